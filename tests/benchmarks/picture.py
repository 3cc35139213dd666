"""The comparison as a picture: ratios and memory of all rows, and the curves of long histories.

The colours can be told apart by people who see fewer of them, and marks differ in shape as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import figure_text
from runner import BEFORE, MISSED, OURS, Outcome

_COLOURS = {
    OURS: "#000000",
    BEFORE: "#444444",
    "icechunk": "#0072B2",
    "LocalStore": "#E69F00",
    "MemoryStore": "#009E73",
    "ObjectStore": "#CC79A7",
    "FsspecStore": "#56B4E9",
    "generated": "#D55E00",
    "memcpy": "#999999",
    "decode": "#999999",
    "Zarr": "#999999",
    "without": "#F0E442",
    "read": "#882255",
    "rows": "#882255",
    "alone": "#7f7f7f",
    "native": "#7f7f7f",
    "everything": "#7f7f7f",
    "dask": "#D55E00",
    "noop": "#999999",
    "parquet": "#D55E00",
}
_BAR, _GAP = 0.8, 0.5  # of the height that one comparison has; between two rows


def draw(outcomes: Sequence[Outcome], place: Path) -> None:
    """Draw what was measured: ratios beside memory, and below them how figures went."""
    from matplotlib.figure import Figure as Canvas

    curves = [each for each in outcomes if any(map(each.series, each.figures))]
    heights = [_GAP + max(1, len(each.figures) - 1) for each in outcomes]
    tall = 0.22 * sum(heights) + 0.6
    canvas = Canvas(figsize=(13, tall + 1.3 + 2.6 * len(curves)), layout="constrained")
    ratios = [tall] + [2.6] * len(curves)
    grid = canvas.add_gridspec(len(ratios), 2, height_ratios=ratios, width_ratios=(3, 1))
    compared = canvas.add_subplot(grid[0, 0])
    memory = canvas.add_subplot(grid[0, 1], sharey=compared)
    _draw_ratios(compared, outcomes)
    _draw_memory(memory, outcomes)
    for number, outcome in enumerate(curves, 1):
        _draw_curve(canvas.add_subplot(grid[number, :]), outcome)
    _draw_legend(canvas, outcomes)
    place.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(place, dpi=110, metadata={"Software": None})


def _places(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, float, list[tuple[str, float]]]]:
    """Each row with its place on the axis, and those of its peers."""
    found, at = [], 0.0
    for outcome in outcomes:
        peers = [name for name in outcome.figures if name != OURS]
        places = [(name, at + number) for number, name in enumerate(peers)]
        count = max(1, len(peers))
        found.append((outcome, at + (count - 1) / 2, places))
        at += count + _GAP
    return found


def _draw_ratios(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """A bar for the middle ratio, dots for those of the rounds, a mark for the target."""
    rows = _places(outcomes)
    for outcome, middle, peers in rows:
        if not peers:
            axes.text(1.03, middle, "not compared", fontsize=7, va="center", color="#666666")
        for peer, at in peers:
            found, ratios = outcome.ratio(peer), outcome.ratios(peer)
            colour, due = _COLOURS[peer], outcome.row.due.get(peer)
            axes.barh(at, found - 1, left=1, height=_BAR, color=colour, alpha=0.75)
            axes.plot(ratios, [at] * len(ratios), "o", color="black", markersize=2)
            text = f"{found:.3g} x"
            if due is not None:
                axes.plot([due] * 2, [at - 0.5, at + 0.5], color="black", linewidth=2.2)
                short = "" if found >= due else ": MISSED" if found < due * MISSED else ": short"
                text += f" (target {due:.3g}{short})"
            end = max(1.0, found, *ratios, due or 0.0)
            axes.text(end * 1.04, at, text, fontsize=7, va="center")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(right=axes.get_xlim()[1] * 3)  # room for what stands beside the bars
    axes.axvline(1, color="black", linewidth=1)
    labels = [
        f"{each.row.title}\n{each.row.name}: {figure_text(each.median(OURS), each.row.unit)}"
        for each, *_ in rows
    ]
    axes.set_yticks([middle for _, middle, _ in rows], labels, fontsize=7)
    axes.set_ylim(rows[-1][1] + len(rows[-1][2]) / 2 + 0.7, -1)
    axes.set_xlabel("times the time (or bytes) that zarr_manifests takes; thick line: target")
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.set_axisbelow(True)


def _draw_memory(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """A mark for the peak of each, ours a diamond; below 0.1 MB nothing is told apart."""
    for outcome, middle, peers in _places(outcomes):
        ours = outcome.peak_bytes(OURS)
        for peer, at in peers or [(OURS, middle)]:
            theirs = outcome.peak_bytes(peer)
            if ours is None or theirs is None:
                where = axes.get_yaxis_transform()
                axes.text(0.5, at, "not compared", fontsize=7, ha="center", transform=where)
                continue
            pair = [max(0.1, peak / 1e6) for peak in (ours, theirs)]
            axes.plot(pair, [at, at], color="#999999", linewidth=1)
            axes.plot(pair[1], at, "o", color=_COLOURS[peer], markersize=6)
            axes.plot(pair[0], at, "D", color=_COLOURS[OURS], markersize=4)
    axes.set_xscale("log")
    axes.set_xlabel("peak memory, MB")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.25)
    axes.tick_params(labelleft=False)


def _draw_curve(axes: Any, outcome: Outcome) -> None:
    """How the figure went from the first to the last."""
    for number, name in enumerate(outcome.figures):
        series = outcome.series(name)
        count = outcome.extras(name).get("commits", len(series))
        at = [(i + 1) / len(series) * count for i in range(len(series))]
        style = ("-", "--")[number % 2]
        axes.plot(at, [1e3 * value for value in series], style, color=_COLOURS[name], label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("commits")
    axes.set_ylabel("ms a commit")
    axes.set_title(f"{outcome.row.name}: medians of a hundredth each", fontsize=9)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.25)


def _draw_legend(canvas: Any, outcomes: Sequence[Outcome]) -> None:
    from matplotlib.lines import Line2D

    names = dict.fromkeys(name for outcome in outcomes for name in outcome.figures)
    marks = [
        Line2D([], [], color=_COLOURS[n], marker="D" if n == OURS else "s", linestyle="", label=n)
        for n in names
    ]
    canvas.legend(handles=marks, loc="outside upper center", ncols=len(marks), fontsize=8)
