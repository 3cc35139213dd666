"""The simulation finds faults that are put in on purpose, and the documentation says which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mutants
from effort import swept

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "simulation.md"


MUTANTS = swept(mutants.MUTANTS, but=mutants.MUTANTS[::4])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_seed_within_the_budget_finds_the_fault(mutant: mutants.Mutant) -> None:
    seed = mutants.SEEDS[mutant.name]
    assert 0 <= seed < mutants.BUDGET
    assert mutants.run(mutant, seed).failure is not None


SCHEDULES = sorted({(mutants.SEEDS[one.name], one.streams, one.finders) for one in mutants.MUTANTS})


@pytest.mark.parametrize("schedule", swept(SCHEDULES, but=SCHEDULES[::8]), ids=str)
def test_without_the_faults_the_seed_is_fine(schedule: tuple[int, bool, bool]) -> None:
    seed, streams, finders = schedule
    assert mutants.simulate(seed, streams=streams, finders=finders).failure is None


def test_the_documentation_lists_all_faults_and_their_seeds() -> None:
    assert len(mutants.MUTANTS) >= 15
    assert mutants.SEEDS.keys() == {mutant.name for mutant in mutants.MUTANTS}
    rows = re.findall(r"^\| `([\w-]+)` \| .* \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(mutants.MUTANTS)
    assert mutants.table() in PAGE.read_text(encoding="utf-8")
