"""The picture of a layout: a bar for each array, a box for each leaf, a color for each manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from zarr_manifests.reports import ArrayPlace, ManifestLayout

__all__ = ["draw"]

_INK: Final = "#22303c"
_PALE: Final = "#dde2e7"
_COLORS: Final = (
    "#d1495b", "#1f77a4", "#8fc1d9", "#2f9c7f", "#a5d6c4", "#b58b2b", "#e2cb8e", "#6d6aa8",
    "#bdbbdd",
)  # fmt: skip
_PALE_ONES: Final = frozenset(_COLORS[2::2])
_MOST_ROWS: Final = 48


def draw(path: Path, layout: ManifestLayout, title: str) -> None:
    """Save the picture as PNG; of very many arrays, it shows those with the most refs.

    Parameters
    ----------
    path : Path
        The file.
    layout : ManifestLayout
        What is drawn.
    title : str
        Stands above, followed by how many there are.
    """
    arrays = sorted(
        sorted(layout.arrays, key=lambda array: -array.refs)[:_MOST_ROWS],
        key=lambda array: array.path,
    )
    style: Any = {
        "font.family": "DejaVu Sans",
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "ytick.color": _INK,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(9.6, 0.34 * len(arrays) + 1.3), dpi=130, layout="constrained")
        axes = figure.subplots()
        for row, array in enumerate(arrays):
            _draw_bar(axes, row, array)
        names = [array.path if len(array.path) < 40 else f"…{array.path[-38:]}" for array in arrays]
        axes.set_yticks(range(len(arrays)), names, fontsize=9)
        axes.set(xlim=(0, 1), ylim=(len(arrays) - 0.5, -0.5), xticks=[])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.axvline(0, color=_PALE, linewidth=1, zorder=0)
        count = len(layout.manifests)
        text = f"{title}: {count:,}" if count != 1 else f"{title}: one"
        axes.set_title(text, loc="left", fontsize=12, fontweight="bold", color=_INK)
        more = len(layout.arrays) - len(arrays)
        rest = f"; {more:,} arrays with fewer refs are left out" if more else ""
        axes.set_xlabel(f"leaves of each array; numbers and colors are manifests{rest}", fontsize=9)
        figure.savefig(path, format="png", facecolor="white")


def _draw_bar(axes: Axes, row: int, array: ArrayPlace) -> None:
    total, left = array.refs, 0.0
    run: list[list[int]] = []  # adjacent leaves in one manifest become one box
    for leaf in sorted(array.leaves, key=lambda leaf: (leaf.lo, leaf.hi)):
        if run and run[-1][0] == leaf.manifest:
            run[-1][1] += leaf.refs
        else:
            run.append([leaf.manifest, leaf.refs])
    for manifest, refs in run:
        color, width = _COLORS[manifest % len(_COLORS)], refs / max(total, 1)
        line = 0.8 if len(run) < 200 else 0
        axes.barh(row, width, 0.72, left, color=color, edgecolor="white", linewidth=line)
        if width > 0.03:
            ink = _INK if color in _PALE_ONES else "white"
            middle: Any = {"ha": "center", "va": "center", "fontsize": 8, "fontweight": "bold"}
            axes.text(left + width / 2, row, str(manifest + 1), color=ink, **middle)
        left += width
    text = f"{total:,} ref{'s' if total != 1 else ''}"
    axes.text(1.01, row, text, va="center", fontsize=8.5)
