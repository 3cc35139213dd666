"""No where ever leaves out a chunk that matches, whatever others do to the repository meanwhile."""

from __future__ import annotations

from collections import Counter

import pytest

from simulated import simulate

SEEDS = 30


@pytest.mark.simulation
def test_seeds_with_zone_maps_keep_all_promises() -> None:
    seen = Counter[str]()
    for seed in range(SEEDS):
        outcome = simulate(seed, zones=True)
        assert outcome.failure is None, f"{outcome.again}: {outcome.failure}"
        seen.update(outcome.counts)
    assert seen["chunks left out by statistics"] > 10 * SEEDS
    assert seen["chunks measured"] > SEEDS
