"""The graph of history as it stands beside the list of commits: places and curves, for SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from zarr_manifests.picturing.lanes import GraphRow, width_of
from zarr_manifests.reports import SnapshotInfo

__all__ = ["HistoryGraph"]

_HEIGHT: Final = 56  # of a row, as in page.css
_STEP: Final = 18
_LEFT: Final = 16
_COLORS: Final = 6


@dataclass(frozen=True, slots=True)
class HistoryGraph:
    """What a template draws.

    Parameters
    ----------
    rows : sequence of GraphRow
        Commits, newest first.
    width, height : int
        Of the whole graph.
    edges : sequence of (str, int)
        Pieces of lines: a path, and the number of a colour.
    dots : sequence of (int, int, int, bool)
        x, y, the number of a colour, and whether it stands for several commits.
    """

    rows: Sequence[GraphRow[SnapshotInfo]]
    width: int
    height: int
    edges: Sequence[tuple[str, int]]
    dots: Sequence[tuple[int, int, int, bool]]

    @classmethod
    def of(cls, rows: Sequence[GraphRow[SnapshotInfo]]) -> HistoryGraph:
        """The graph of these rows."""
        edges = [edge for at, row in enumerate(rows) for edge in _edges(at, row)]
        dots = [
            (_x(row.lane), _middle(at), row.lane % _COLORS, len(row.commits) > 1)
            for at, row in enumerate(rows)
        ]
        width = _x(width_of(rows) - 1) + _LEFT
        return cls(rows, width, _HEIGHT * len(rows), edges, dots)

    @property
    def is_cut(self) -> bool:
        """Whether there are commits without a row of their own."""
        if not self.rows:
            return False
        folded = any(len(row.commits) > 1 for row in self.rows)
        return folded or bool(self.rows[-1].below)


def _edges(at: int, row: GraphRow[Any]) -> list[tuple[str, int]]:
    top, middle, bottom = _HEIGHT * at, _middle(at), _HEIGHT * (at + 1)
    found = [_edge(lanes, top, middle) for lanes in row.above]
    return found + [_edge(lanes, middle, bottom) for lanes in row.below]


def _edge(lanes: tuple[int, int], top: int, bottom: int) -> tuple[str, int]:
    start, end = map(_x, lanes)
    color = max(lanes) % _COLORS  # of the line that leaves or joins
    if start == end:
        return f"M{start} {top}V{bottom}", color
    middle = (top + bottom) // 2
    return f"M{start} {top}C{start} {middle} {end} {middle} {end} {bottom}", color


def _x(lane: int) -> int:
    return _LEFT + _STEP * lane


def _middle(at: int) -> int:
    return _HEIGHT * at + _HEIGHT // 2
