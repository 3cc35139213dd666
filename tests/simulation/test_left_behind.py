"""What was left behind is named whole or not at all, whatever collections do meanwhile."""

from __future__ import annotations

from collections import Counter

import pytest

from simulated import simulate

SEEDS = 30


@pytest.mark.simulation
def test_seeds_with_names_for_what_was_left_keep_all_promises() -> None:
    seen = Counter[str]()
    for seed in range(SEEDS):
        outcome = simulate(seed, finders=True)
        assert outcome.failure is None, f"{outcome.again}: {outcome.failure}"
        seen.update(outcome.counts)
    assert seen["named again"] > SEEDS // 10
    assert seen["refused a name"] > SEEDS // 10
