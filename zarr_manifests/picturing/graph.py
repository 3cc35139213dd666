"""The graph of history as text: a piece of it before each commit, as `git log --graph` draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from zarr_manifests.picturing.lanes import GraphRow, width_of
from zarr_manifests.texts import plain_text
from zarr_manifests.versions import short_ids

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["graph_lines", "lane_color"]

_COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of lanes: told apart with any color vision, on white and on black."""
_MOST_MESSAGE: Final = 120
_LEFT, _RIGHT, _UP, _DOWN = 1, 2, 4, 8
_STROKES: Final = {
    0: " ", _LEFT | _RIGHT: "─", _UP | _DOWN: "│", _UP | _LEFT: "╯", _UP | _RIGHT: "╰",
    _DOWN | _LEFT: "╮", _DOWN | _RIGHT: "╭", _UP | _DOWN | _LEFT: "┤", _UP | _DOWN | _RIGHT: "├",
    _UP | _LEFT | _RIGHT: "┴", _DOWN | _LEFT | _RIGHT: "┬", _UP | _DOWN | _LEFT | _RIGHT: "┼",
}  # fmt: skip


def lane_color(lane: int) -> str:
    """The color of a lane."""
    return _COLORS[lane % len(_COLORS)]


def graph_lines(rows: Sequence[GraphRow[Any]]) -> list[Text]:
    """The rows of a graph of snapshots as lines of text, newest first.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> from zarr_manifests.picturing.graph import graph_lines
    >>> from zarr_manifests.picturing.lanes import lanes, lines
    >>> repo = zm.create("memory://graph-example")
    >>> history = lines(repo.list_branches().values(), repo.ancestry, 100)
    >>> [str(line)[:1] for line in graph_lines(lanes(history, {}))]
    ['●']
    """
    width = width_of(rows)
    short = short_ids(one.id for row in rows for one in row.commits)
    found: list[Text] = []
    for row in rows:
        if any(a != b for a, b in row.above):
            found.append(_pieces(row.above, width))
        line = _pieces([(a, a) for _, a in row.above] + [(b, b) for b, _ in row.below], width)
        mark = "●" if len(row.commits) == 1 else "┇"
        line.plain = f"{line.plain[: 2 * row.lane]}{mark}{line.plain[2 * row.lane + 1 :]}"
        line.append_text(_about(row, short))
        found.append(line)
        if any(a != b for a, b in row.below):
            found.append(_pieces(row.below, width))
    return found


def _pieces(pieces: Iterable[tuple[int, int]], width: int) -> Text:
    """One line of strokes: each piece comes from above in one lane and goes down in another."""
    from rich.text import Text

    strokes, lane_of = [0] * (2 * width), [0] * (2 * width)
    for a, b in pieces:
        strokes[2 * a] |= _UP
        strokes[2 * b] |= _DOWN
        low, high = sorted((2 * a, 2 * b))
        for at in range(low, high + 1):
            strokes[at] |= (_LEFT * (at > low)) | (_RIGHT * (at < high))
            lane_of[at] = max(a, b, lane_of[at])
    line = Text()
    for stroke, lane in zip(strokes, lane_of, strict=True):
        line.append(_STROKES.get(stroke, "│"), lane_color(lane))
    return line.append(" ")


def _about(row: GraphRow[Any], short: dict[str, str]) -> Text:
    from rich.text import Text

    first, last = row.commits[0], row.commits[-1]
    if len(row.commits) > 1:
        since, until = last.written_at, first.written_at
        return Text(f"{len(row.commits):,} commits, {since:%Y-%m-%d} to {until:%Y-%m-%d}", "dim")
    text = Text(short[first.id])
    if row.refs:
        text.append(f" ({', '.join(plain_text(ref) for ref in row.refs)})", "bold green")
    message = first.message
    cut = message if len(message) <= _MOST_MESSAGE else f"{message[: _MOST_MESSAGE - 1]}…"
    text.append(f" {plain_text(cut)}")
    return text.append(f"  {first.written_at:%Y-%m-%d %H:%M}, {first.kind}", "dim")
