"""The planted faults, by room of the package."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from planted.fault import Fault as Fault

ROOMS: dict[str, list[Fault]] = {
    path.stem: import_module(f"planted.rooms.{path.stem}").FAULTS
    for path in sorted(Path(__file__).parent.glob("[!_]*.py"))
}
