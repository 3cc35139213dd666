"""The history of several branches as rows of a graph, newest first.

A *line* is a run of commits, each the parent of the one before. The first line begins at the head
of a branch; every other line ends where an earlier one has its next commit. Each line has a lane of
the graph. Invariant: a commit stands above its parent, whatever the clocks of the committers said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import heapify, heappop, heappush
from itertools import groupby, islice
from typing import Any, Final, Protocol

from zarr_manifests.ids import is_snapshot_id
from zarr_manifests.versions import RefName

__all__ = ["GraphCommit", "GraphRow", "lanes", "lines", "width_of"]

_MOST_LINES: Final = 50
_MERGED: Final = "merged-from"


class GraphCommit(Protocol):
    """What a graph needs to know of a commit."""

    @property
    def id(self) -> str:
        """The id of its snapshot."""

    @property
    def parent_id(self) -> str | None:
        """The id of its parent."""

    @property
    def written_at(self) -> datetime:
        """When it was written."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the committer wanted kept; `merged-from` is the other parent of a merge."""


@dataclass(frozen=True, slots=True)
class GraphRow[C: GraphCommit]:
    """A row of the graph: a commit, or several that are folded into one.

    Parameters
    ----------
    commits : tuple of GraphCommit
        Newest first.
    lane : int
        Where the commit stands, from 0.
    refs : tuple of RefName
        Branches and tags that are there.
    above, below : tuple of (int, int)
        Pieces of lines in the upper and in the lower half of the row: lanes where they begin, at
        the top, and end.
    """

    commits: tuple[C, ...]
    lane: int
    refs: tuple[RefName, ...]
    above: tuple[tuple[int, int], ...]
    below: tuple[tuple[int, int], ...]


def lines[C: GraphCommit](
    heads: Iterable[str], ancestry: Callable[[str], Iterable[C]], most: int
) -> list[list[C]]:
    """The lines of history below some heads and below what was merged into them, newest first.

    Parameters
    ----------
    heads : iterable of str
        Ids of snapshots; the first one's line is whole.
    ancestry : callable
        A snapshot and those before it, by its id.
    most : int
        At most so many commits of a line. There are at most 50 lines.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> from zarr_manifests.picturing.lanes import lines
    >>> repo = zm.create("memory://lines-example")
    >>> heads = repo.list_branches().values()
    >>> [[info.message for info in line] for line in lines(heads, repo.ancestry, 100)]
    [['create repository']]
    """
    seen: set[str] = set()
    found: list[list[C]] = []
    due = deque(heads)
    while due and len(found) < _MOST_LINES:
        head = due.popleft()
        line: list[C] = []
        for commit in islice(() if head in seen else ancestry(head), most):
            if commit.id in seen:
                break
            seen.add(commit.id)
            line.append(commit)
            due.extend(_merged(commit))
        found += [line] if line else []
    return found


def _merged(commit: GraphCommit) -> list[str]:
    """The other parent of a merge; metadata may say anything."""
    source = commit.metadata.get(_MERGED)
    return [source] if isinstance(source, str) and is_snapshot_id(source) else []


def lanes[C: GraphCommit](
    history: Sequence[Sequence[C]], refs: Mapping[str, Sequence[RefName]], rows: int = 60
) -> tuple[GraphRow[C], ...]:
    """The rows of a graph of history, newest first.

    Where there are more commits than rows, older ones that follow each other without a branch,
    merge or name in between share a row. What is still too old is left out.

    Parameters
    ----------
    history : sequence of sequence of GraphCommit
        Lines, as `lines` gives them.
    refs : mapping of str to sequence of RefName
        Branches and tags of snapshots, by their ids.
    rows : int
        At most so many rows.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> from zarr_manifests.picturing.lanes import lanes, lines
    >>> repo = zm.create("memory://lanes-example")
    >>> repo.create_branch("side")
    >>> for branch in ("main", "side"):
    ...     with repo.transaction(branch, message=f"on {branch}") as store:
    ...         _ = zarr.create_group(store, path=branch)
    >>> from zarr_manifests.versions import refs_by_snapshot
    >>> refs = refs_by_snapshot(repo.list_branches(), repo.list_tags())
    >>> for row in lanes(lines(refs, repo.ancestry, 100), refs):
    ...     print(row.lane, row.commits[0].message, *row.refs)
    1 on side side
    0 on main main
    0 create repository
    """
    graph = _Lanes(_folded(history, refs, rows))
    graph.draw()
    return tuple(
        GraphRow(
            tuple(commits),
            graph.lane[node],
            tuple(refs.get(commits[0].id, ())),
            tuple(graph.above[at]),
            tuple(graph.below[at]),
        )
        for at, node in enumerate(graph.order[:rows])
        for commits in [graph.nodes[node]]
    )


def width_of(rows: Iterable[GraphRow[Any]]) -> int:
    """How many lanes the rows have."""
    used = {lane for row in rows for lane in (row.lane, *_ends(row))}
    return 1 + max(used, default=0)


def _ends(row: GraphRow[Any]) -> Iterator[int]:
    return (lane for piece in (*row.above, *row.below) for lane in piece)


def _folded[C: GraphCommit](
    history: Sequence[Sequence[C]], refs: Mapping[str, Sequence[RefName]], rows: int = 60
) -> list[list[list[C]]]:
    """The lines with their commits in groups: of one commit, or of many where there is no room."""
    every = [commit for line in history for commit in line]
    ends = [commit for line in history for commit in (line[0], line[-1])]
    fixed = {commit.id for commit in ends} | {line[-1].parent_id for line in history} | {*refs}
    merges = [commit for commit in every if _merged(commit)]
    fixed |= {commit.id for commit in merges} | {i for one in merges for i in _merged(one)}
    plain = [commit for commit in every if commit.id not in fixed]
    if len(every) > rows:
        plain.sort(key=lambda commit: commit.written_at, reverse=True)
        plain = plain[max(rows - 2 * (len(every) - len(plain)), 0) :]
        folded = {commit.id for commit in plain}
    else:
        folded = set()
    groups: list[list[list[C]]] = []
    for line in history:
        found: list[list[C]] = []
        for together, run in groupby(line, lambda commit: commit.id in folded):
            commits = [*run]
            found += [commits] if together else [[commit] for commit in commits]
        groups.append(found)
    return groups


class _Lanes[C: GraphCommit]:
    """The order of the nodes, and the lanes of the lines between them."""

    def __init__(self, history: Sequence[Sequence[Sequence[C]]]) -> None:
        self.nodes: list[Sequence[C]] = [group for line in history for group in line]
        self._starts = [0]
        for line in history:
            self._starts.append(self._starts[-1] + len(line))
        self._of = {commit.id: at for at, group in enumerate(self.nodes) for commit in group}
        self._parent = [self._of.get(group[-1].parent_id or "") for group in self.nodes]
        sources = [[s for one in group for s in _merged(one)] for group in self.nodes]
        self._merged = [[self._of[s] for s in each if s in self._of] for each in sources]
        self.order = self._sorted()
        self._row = {node: row for row, node in enumerate(self.order)}
        self.lane = [0] * len(self.nodes)
        self.above: list[list[tuple[int, int]]] = [[] for _ in self.nodes]
        self.below: list[list[tuple[int, int]]] = [[] for _ in self.nodes]
        self._taken: list[list[tuple[int, int]]] = []

    def _older(self, node: int) -> list[int]:
        parent = self._parent[node]
        return [*self._merged[node]] if parent is None else [parent, *self._merged[node]]

    def _sorted(self) -> list[int]:
        """The nodes, newest first, each above those it comes from."""
        due = [0] * len(self.nodes)
        for node in range(len(self.nodes)):
            for older in self._older(node):
                due[older] += 1
        keys = [(-group[0].written_at.timestamp(), at) for at, group in enumerate(self.nodes)]
        ready = [keys[node] for node, children in enumerate(due) if not children]
        heapify(ready)
        order: dict[int, None] = {}
        rest = deque(sorted(keys))  # if metadata pretends a circle, its newest node goes first
        while ready or rest:
            _, node = heappop(ready) if ready else rest.popleft()
            if node in order:
                continue
            order[node] = None
            for older in self._older(node):
                due[older] -= 1
                if not due[older]:
                    heappush(ready, keys[older])
        return [*order]

    def draw(self) -> None:
        """Give each line a lane, and connect the nodes."""
        for first, end in zip(self._starts, self._starts[1:], strict=False):
            self._draw_line(first, end)
        for node, sources in enumerate(self._merged):
            for source in sources:
                top, bottom = self._row[node], self._row[source]
                if top < bottom:  # else metadata pretends a circle
                    via = self._free(2 * top + 1, 2 * bottom - 1, self.lane[source])
                    self._connect(node, source, via)

    def _draw_line(self, first: int, end: int) -> None:
        fork = self._parent[end - 1]
        rows = [self._row[node] for node in range(first, end)]
        last = 2 * rows[-1] + 1 if fork is None else 2 * self._row[fork] - 1
        lane = self._free(2 * rows[0], max(last, 2 * rows[-1]), 0)
        self.lane[first:end] = [lane] * (end - first)
        for node in range(first, end - 1):
            self._connect(node, node + 1, lane)
        if fork is not None:
            self._connect(end - 1, fork, lane)
        elif self.nodes[end - 1][-1].parent_id is not None:
            self.below[rows[-1]].append((lane, lane))  # older ones are not shown

    def _free(self, top: int, bottom: int, wanted: int) -> int:
        """A lane where nothing else is in these places: 2 n is row n, 2 n + 1 is below it."""
        self._taken += [[] for _ in range(wanted + 1 - len(self._taken))]
        free = (
            lane
            for lane in (wanted, *range(len(self._taken)))
            if all(bottom < a or b < top for a, b in self._taken[lane])
        )
        found: int = next(free, len(self._taken))
        self._taken += [[]] if found == len(self._taken) else []
        self._taken[found].append((top, bottom))
        return found

    def _connect(self, node: int, older: int, via: int) -> None:
        """Draw a line from a node down to an older one."""
        top, bottom = self._row[node], self._row[older]
        if bottom <= top:
            return  # metadata pretends a circle
        self.below[top].append((self.lane[node], via))
        for row in range(top + 1, bottom):
            self.above[row].append((via, via))
            self.below[row].append((via, via))
        self.above[bottom].append((via, self.lane[older]))
