"""Each planted fault still fits its module; `make mutants` sees that a test finds it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from planted.rooms import ROOMS, Fault

PACKAGE = Path(__file__).parents[2] / "zarr_manifests"
FAULTS = [fault for room in ROOMS.values() for fault in room]


def fits(fault: Fault) -> bool:
    """Whether its text is there once, and the module with the other text can be compiled."""
    path = PACKAGE / fault.path
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    if source.count(fault.old) != 1 or fault.old == fault.new:
        return False
    ast.parse(source.replace(fault.old, fault.new))
    return True


def test_each_fault_fits_once_and_has_a_name_of_its_own() -> None:
    assert [fault.name for fault in FAULTS if not fits(fault)] == []
    assert [
        name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1
    ] == []
