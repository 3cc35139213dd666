"""The simulation finds faults that are put in on purpose, and the documentation says which."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "simulation.md"


def load() -> ModuleType:
    """`mutants.py` beside this file, which is a program as well."""
    place = Path(__file__).with_name("mutants.py")
    spec = importlib.util.spec_from_file_location("simulation_mutants", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutants = load()


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_seed_within_the_budget_finds_the_fault(mutant: object) -> None:
    seed = mutants.SEEDS[mutant.name]
    assert 0 <= seed < mutants.BUDGET
    assert mutants.run(mutant, seed).failure is not None


@pytest.mark.parametrize("seed", sorted(set(mutants.SEEDS.values())))
def test_without_the_faults_the_seed_is_fine(seed: int) -> None:
    assert mutants.simulate(seed).failure is None


def test_the_documentation_lists_all_faults_and_their_seeds() -> None:
    assert len(mutants.MUTANTS) >= 15
    assert mutants.SEEDS.keys() == {mutant.name for mutant in mutants.MUTANTS}
    rows = re.findall(r"^\| `([\w-]+)` \| .* \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(mutants.MUTANTS)
    assert mutants.table() in PAGE.read_text(encoding="utf-8")
