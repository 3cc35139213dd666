"""The pictures in the guide to manifests are drawn by the planner, of what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def layouts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("layouts", DOCS / "images" / "layouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_are_drawn(layouts: ModuleType, tmp_path: Path) -> None:
    layouts.draw_all(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    guide = (DOCS / "guide" / "manifests.md").read_text(encoding="utf-8")
    assert drawn == {path.name for path in (DOCS / "images").glob("layout-*.svg")}
    assert all(f"../images/{name}" in guide for name in drawn)
    assert all(path.read_text(encoding="utf-8").startswith("<?xml") for path in tmp_path.iterdir())


def test_they_show_what_the_guide_says(layouts: ModuleType) -> None:
    def path_of(node_id: bytes) -> str:
        return node_id.rstrip(b"\0").decode()

    def groups(name: str) -> list[str]:
        yaml, arrays, *_ = layouts.LAYOUTS[name]
        _, plan = layouts.planned(yaml, arrays)
        return [
            f"{m.set_name}: {' '.join(sorted({path_of(leaf.node_id) for leaf in m.leaves}))}"
            for m in plan.manifests
        ]

    small = "coordinates: /elevation /lat /lon /time"
    radar = "default: /radar"
    assert groups("layout-default.svg") == [
        small, radar, radar, "default: /monthly /t", "default: /u", "default: /v", radar
    ]  # fmt: skip
    assert groups("layout-by-time.svg") == [small] + ["by-time: /t /u /v"] * 13
    assert groups("layout-by-place.svg") == [small] + ["by-place: /t /u /v"] * 12
    guide = (DOCS / "guide" / "manifests.md").read_text(encoding="utf-8")
    for name in ("layout-by-time.svg", "layout-by-place.svg"):
        assert layouts.LAYOUTS[name][0].strip() in guide
