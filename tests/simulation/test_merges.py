"""A merge has the changes of both sides and no others, whatever else is done to the repository."""

from __future__ import annotations

from collections import Counter

import pytest

from simulated import simulate

SEEDS = 30


@pytest.mark.simulation
def test_seeds_with_merges_keep_all_promises() -> None:
    seen = Counter[str]()
    for seed in range(SEEDS):
        outcome = simulate(seed, merges=True)
        assert outcome.failure is None, f"{outcome.again}: {outcome.failure}"
        seen.update(outcome.counts)
    assert seen["merges landed"] > SEEDS // 4
    assert seen["branches moved by merges"] > 1
    assert seen["merges refused: ConflictError"] > SEEDS // 6
