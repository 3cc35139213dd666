"""The graph of history as HTML: a piece of it before each commit, and the commit's facts folded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from zarr_manifests.markup import cell, facts, html_text, table
from zarr_manifests.picturing.lanes import GraphRow, width_of
from zarr_manifests.texts import time_text
from zarr_manifests.versions import short_ids

__all__ = ["graph_html", "graph_svg", "lane_color"]

_COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of lanes: told apart with any color vision, on white and on black."""
_STEP_PX: Final = 14
_HEIGHT_PX: Final = 24
_LONG_PX: Final = 10_000
_MOST_MESSAGE: Final = 120
_LISTED: Final = 50


def graph_svg(row: GraphRow[Any], width: int) -> str:
    """The piece of the graph in one row, as SVG without styles, for so many lanes.

    Lines go on below it for as long as nothing covers them, for rows that are unfolded.
    """
    middle = _HEIGHT_PX / 2
    pieces = [_line(a, 0.0, b, middle, max(a, b)) for a, b in row.above]
    pieces += [_line(a, middle, b, float(_HEIGHT_PX), max(a, b)) for a, b in row.below]
    ends = dict.fromkeys(b for _, b in row.below)
    pieces += [_line(b, float(_HEIGHT_PX), b, float(_LONG_PX), b) for b in ends]
    color, x = lane_color(row.lane), _x(row.lane)
    if len(row.commits) == 1:
        pieces.append(f'<circle cx="{x}" cy="{middle}" r="4.5" fill="{color}"/>')
    else:  # beads on the line
        beads = (middle - 7, middle, middle + 7)
        pieces += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"/>' for y in beads]
    return (
        f'<svg width="{width * _STEP_PX}" height="{_HEIGHT_PX}" overflow="visible" '
        f'aria-hidden="true">{"".join(pieces)}</svg>'
    )


def graph_html(rows: Sequence[GraphRow[Any]]) -> str:
    """The rows of a graph of snapshots, for a notebook; each unfolds to what is known of it."""
    width = width_of(rows)
    short = short_ids(one.id for row in rows for one in row.commits)
    return "".join(
        f'<div class="zm-row">{graph_svg(row, width)}<details>'
        f"<summary>{_summary(row, short)}</summary>{_details(row, short)}</details></div>"
        for row in rows
    )


def lane_color(lane: int) -> str:
    """The color of a lane."""
    return _COLORS[lane % len(_COLORS)]


def _summary(row: GraphRow[Any], short: Mapping[str, str]) -> str:
    first, last = row.commits[0], row.commits[-1]
    names = "".join(f'<span class="zm-chip">{html_text(str(ref))}</span>' for ref in row.refs)
    if len(row.commits) > 1:
        since, until = last.written_at, first.written_at
        text = f"{len(row.commits):,} commits, {since:%Y-%m-%d} to {until:%Y-%m-%d}"
        return f'<span class="zm-dim">{text}</span>'
    message = first.message
    if len(message) > _MOST_MESSAGE:
        message = f"{message[: _MOST_MESSAGE - 1]}…"
    about = f"{first.written_at:%Y-%m-%d %H:%M}, {first.kind}"
    return (
        f"<code>{html_text(short[first.id])}</code> {html_text(message)}{names} "
        f'<span class="zm-dim">{html_text(about)}</span>'
    )


def _details(row: GraphRow[Any], short: Mapping[str, str]) -> str:
    if len(row.commits) > 1:
        listed = [
            (short[one.id], f"{one.written_at:%Y-%m-%d %H:%M}", one.message)
            for one in row.commits[:_LISTED]
        ]
        left = len(row.commits) - _LISTED
        listed += [("...", "", f"and {left:,} more")] if left > 0 else []
        return table(listed)
    one = row.commits[0]
    lines = [("id", one.id), ("parent", one.parent_id or "none")]
    lines += [("written at", time_text(one.written_at)), ("message", one.message)]
    for name in ("metadata", "written", "totals"):
        if getattr(one, name):
            lines.append((name, cell(name, getattr(one, name))))
    return facts(lines)


def _line(a: int, top: float, b: int, bottom: float, lane: int) -> str:
    ends = f'x1="{_x(a)}" y1="{top}" x2="{_x(b)}" y2="{bottom}"'
    return f'<line {ends} stroke="{lane_color(lane)}" stroke-width="2"/>'


def _x(lane: int) -> float:
    return _STEP_PX * (lane + 0.5)
