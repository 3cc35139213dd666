"""The simulation finds faults that are put in on purpose."""

from __future__ import annotations

import pytest

import mutants


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_seed_within_the_budget_finds_the_fault(mutant: mutants.Mutant) -> None:
    assert 0 <= mutant.seed < mutants.BUDGET
    assert mutants.run(mutant, mutant.seed).failure is not None


SCHEDULES = sorted({(one.seed, one.kinds) for one in mutants.MUTANTS})


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_without_the_faults_the_seed_is_fine(schedule: tuple[int, tuple[str, ...]]) -> None:
    assert mutants.simulate(*schedule).failure is None
