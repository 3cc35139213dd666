"""Texts, names, grids and versions."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault("no-near-names-are-told", "texts.py", "most: int = 1, cutoff", "most: int = 0, cutoff"),
]
