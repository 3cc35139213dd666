"""Draw the layouts in the guide to manifests: `python docs/images/layouts.py`.

What is drawn is what the planner says of these configurations.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zarr_manifests.config import Config
from zarr_manifests.grid import Box
from zarr_manifests.planning.leaves import ArrayFacts, cut, layout_of
from zarr_manifests.planning.packing import PlannedManifest, plan_manifests

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK: Final = "#22303c"
_PALE: Final = "#dde2e7"
_COORDINATES: Final = "#d1495b"
_OTHERS: Final = (
    "#1f77a4", "#8fc1d9", "#2f9c7f", "#a5d6c4", "#b58b2b", "#e2cb8e", "#6d6aa8", "#bdbbdd",
)  # fmt: skip
_PALE_ONES: Final = _OTHERS[1::2]
_NAMES: Final = ("time", "lat", "lon")
_SMALL: Final = {
    "/lat": ((1,), ("lat",)),
    "/lon": ((1,), ("lon",)),
    "/time": ((12,), ("time",)),
    "/elevation": ((6, 12), ("lat", "lon")),
}
_YEAR: Final = {f"/{name}": ((8760, 6, 12), _NAMES) for name in ("t", "u", "v")}
_MORE: Final = {
    "/monthly": ((120, 6, 12), _NAMES),
    "/radar": ((35_040, 6, 12), _NAMES),
}
_BY_TIME: Final = """
chunk-manifests:
  sets:
    - coordinates: {max-manifest-size: 50000}
    - by-time: {max-manifest-size: 160000, cardinality: null}
  rules:
    - {metadata-chunks: [0, 5000], target: coordinates}
    - {path: "/[tuv]", target: by-time}
  splitting:
    - {path: "/[tuv]", along: {time: 720}}
"""
_BY_PLACE: Final = """
chunk-manifests:
  sets:
    - coordinates: {max-manifest-size: 50000}
    - by-place: {max-manifest-size: 160000, cardinality: null}
  rules:
    - {metadata-chunks: [0, 5000], target: coordinates}
    - {path: "/[tuv]", target: by-place}
  splitting:
    - {path: "/[tuv]", along: {lat: 2, lon: 3}}
"""
LAYOUTS: Final = {
    "layout-default.svg": (
        "",
        _SMALL | _YEAR | _MORE,
        "Without configuration",
        "along its first axis",
    ),
    "layout-by-time.svg": (_BY_TIME, _SMALL | _YEAR, "Split along time", "along time"),
    "layout-by-place.svg": (
        _BY_PLACE,
        _SMALL | _YEAR,
        "Split along latitude and longitude",
        "tile by tile of 2 by 3 chunks, each with all times",
    ),
}


def planned(
    yaml: str, arrays: dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
) -> tuple[list[ArrayFacts], Sequence[PlannedManifest]]:
    """Facts of the arrays, all full, and where their leaves go."""
    config = Config.from_yaml(yaml).chunk_manifests
    facts = []
    for path, (shape, names) in arrays.items():
        facts.append(ArrayFacts(path.encode().ljust(12, b"\0"), path, shape, 0, names))
        refs = facts[-1].metadata_chunks
        facts[-1] = ArrayFacts(path.encode().ljust(12, b"\0"), path, shape, refs, names)
    leaves = []
    for of in facts:
        grid = Box((0,) * len(of.grid_shape), of.grid_shape)
        leaves += cut(of.node_id, grid.unravel(np.arange(grid.size)), layout_of(config, of))
    return facts, plan_manifests(config, {of.node_id: of for of in facts}, leaves)


def draw(
    path: Path,
    title: str,
    along: str,
    facts: Sequence[ArrayFacts],
    plan: Sequence[PlannedManifest],
) -> None:
    """Save one picture: a bar for each array, a box for each leaf, a color for each manifest."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "font.family": "DejaVu Sans",
        "svg.hashsalt": path.name,
        "svg.fonttype": "path",
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(9.6, 0.42 * len(facts) + 1.2), layout="constrained")
        axes = figure.subplots()
        _draw_bars(axes, facts, plan)
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK)
        axes.set_xlabel(f"chunk refs of each array, {along}", fontsize=9.5)
        figure.savefig(
            path,
            format="svg",
            facecolor="white",
            metadata={"Date": None},
        )


def _draw_bars(axes: Axes, facts: Sequence[ArrayFacts], plan: Sequence[PlannedManifest]) -> None:
    others = (color for _ in plan for color in _OTHERS)
    colors = [
        _COORDINATES if manifest.set_name == "coordinates" else next(others) for manifest in plan
    ]
    for row, of in enumerate(facts):
        leaves = sorted(
            (leaf.box.lo, leaf.count, number)
            for number, manifest in enumerate(plan)
            for leaf in manifest.leaves
            if leaf.node_id == of.node_id
        )
        left = 0.0
        for _, count, number in leaves:
            width = count / of.initialized_chunks
            axes.barh(
                row,
                width,
                0.72,
                left,
                color=colors[number],
                edgecolor="white",
                linewidth=1,
            )
            if width > 0.025:
                ink = _INK if colors[number] in _PALE_ONES else "white"
                middle: Any = {
                    "ha": "center",
                    "va": "center",
                    "fontsize": 8.5,
                    "fontweight": "bold",
                }
                axes.text(left + width / 2, row, str(number + 1), color=ink, **middle)
            left += width
        plural = "s" if of.initialized_chunks > 1 else ""
        text = f"{of.initialized_chunks:,} ref{plural}"
        axes.text(1.01, row, text, va="center", fontsize=9)
    axes.set_yticks(range(len(facts)), [of.path for of in facts], fontsize=9.5)
    axes.set(xlim=(0, 1), ylim=(len(facts) - 0.5, -0.5), xticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.axvline(0, color=_PALE, linewidth=1, zorder=0)


def draw_all(folder: Path) -> None:
    """Save all pictures into the folder."""
    for name, (yaml, arrays, title, along) in LAYOUTS.items():
        facts, plan = planned(yaml, arrays)
        draw(folder / name, f"{title}: {len(plan)} manifests", along, facts, plan)


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
