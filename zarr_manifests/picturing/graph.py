"""The graph of history: its layout, newest first, and how terminals, notebooks and pages draw it.

Invariant: a commit stands above its parent, whatever the clocks of the committers said.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from zarr_manifests.errors import plain_text
from zarr_manifests.ids import is_snapshot_id
from zarr_manifests.versions import RefName, short_ids

if TYPE_CHECKING:
    from rich.text import Text

_MOST_LINES: Final = 50
_MERGED: Final = "merged-from"
_COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of lanes: told apart with any color vision, on white and on black."""
_MOST_MESSAGE: Final = 120
_LEFT, _RIGHT, _UP, _DOWN = 1, 2, 4, 8
_STROKES: Final = {
    0: " ", _LEFT | _RIGHT: "─", _UP | _DOWN: "│", _UP | _LEFT: "╯", _UP | _RIGHT: "╰",
    _DOWN | _LEFT: "╮", _DOWN | _RIGHT: "╭", _UP | _DOWN | _LEFT: "┤", _UP | _DOWN | _RIGHT: "├",
    _UP | _LEFT | _RIGHT: "┴", _DOWN | _LEFT | _RIGHT: "┬", _UP | _DOWN | _LEFT | _RIGHT: "┼",
}  # fmt: skip
_HEIGHT: Final = 56  # of a row of a page, as in page.css
_STEP: Final = 18
_MARGIN: Final = 16


class GraphRow(Struct, frozen=True):
    """A row of the graph.

    Parameters
    ----------
    commit : SnapshotInfo
        Its commit.
    lane : int
        Where the commit stands, from 0.
    refs : sequence of RefName
        Branches and tags that are there.
    above, below : list of (int, int)
        Pieces of lines in the upper and in the lower half of the row: lanes where they begin, at
        the top, and end.
    """

    commit: Any
    lane: int
    refs: Sequence[RefName]
    above: list[tuple[int, int]]
    below: list[tuple[int, int]]


def history_graph(
    heads: Iterable[str],
    ancestry: Callable[[str], Iterable[Any]],
    refs: Mapping[str, Sequence[RefName]],
    rows: int = 60,
) -> list[GraphRow]:
    """The rows of the history below some heads and below what was merged into them, newest first.

    Older commits are left out.

    Parameters
    ----------
    heads : iterable of str
        Ids of snapshots; the first one's line is whole, and at the left if nothing follows it.
    ancestry : callable
        The `SnapshotInfo` of a snapshot and those before it, by its id. The metadata of a merge has
        its other parent as `merged-from`.
    refs : mapping of str to sequence of RefName
        Branches and tags of snapshots, by their ids.
    rows : int
        At most so many rows. There are at most 50 lines.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> from zarr_manifests.picturing.graph import history_graph
    >>> from zarr_manifests.versions import refs_by_snapshot
    >>> repo = zm.create("memory://graph-example")
    >>> repo.create_branch("side")
    >>> for branch in ("main", "side"):
    ...     with repo.transaction(branch, message=f"on {branch}") as store:
    ...         _ = zarr.create_group(store, path=branch)
    >>> refs = refs_by_snapshot(repo.list_branches(), repo.list_tags())
    >>> for row in history_graph(refs, repo.ancestry, refs):
    ...     print(row.lane, row.commit.message, *row.refs)
    1 on side side
    0 on main main
    0 create repository
    """
    commits = [*chain(*_lines(heads, ancestry, rows))]
    node_of = {commit.id: node for node, commit in enumerate(commits)}
    parents = [node_of.get(commit.parent_id or "") for commit in commits]
    merges = [[node_of[one] for one in _merged(commit) if one in node_of] for commit in commits]
    order = _sorted(commits, parents, merges)
    if len(order) < len(commits):  # metadata pretends a circle
        merges = [[] for _ in commits]
        order = _sorted(commits, parents, merges)
    # What the line in each lane comes to next; the first one's lane is kept for it until it begins.
    waiting: list[int | None] = [] if 0 in parents else [0]
    begun: set[int] = set()
    found = []
    for node in order[:rows]:
        ends = [lane for lane, due in enumerate(waiting) if due == node]
        lane = ends[0] if ends else _free(waiting)
        passing = [(at, at) for at in begun if waiting[at] not in (None, node)]
        above = passing + [(end, lane) for end in ends if end in begun]
        for end in ends:
            waiting[end] = None
        below = passing + [(lane, lane)] * (commits[node].parent_id is not None)
        waiting[lane] = parents[node]  # if that is not shown, the line just ends
        begun.add(lane)
        for source in merges[node]:
            to = waiting.index(source) if source in waiting else _free(waiting)
            waiting[to] = source
            begun.add(to)
            below.append((lane, to))
        commit = commits[node]
        found.append(GraphRow(commit, lane, refs.get(commit.id, ()), above, below))
    return found


def _lines(
    heads: Iterable[str], ancestry: Callable[[str], Iterable[Any]], limit: int
) -> list[list[Any]]:
    """Runs of commits, each the parent of the one before, that end where another has the next."""
    seen: set[str] = set()
    found: list[list[Any]] = []
    due = deque(heads)
    while due and len(found) < _MOST_LINES:
        head = due.popleft()
        line: list[Any] = []
        for commit in islice(() if head in seen else ancestry(head), limit):
            if commit.id in seen:
                break
            seen.add(commit.id)
            line.append(commit)
            due.extend(_merged(commit))
        found += [line] if line else []
    return found


def _merged(commit: Any) -> list[str]:
    """The other parent of a merge; metadata may say anything."""
    source = commit.metadata.get(_MERGED)
    return [source] if isinstance(source, str) and is_snapshot_id(source) else []


def _sorted(
    commits: Sequence[Any], parents: Sequence[int | None], merges: Sequence[Sequence[int]]
) -> list[int]:
    """The nodes, newest first, each above those it comes from; without those in a circle."""
    older = [
        [*merged] if parent is None else [parent, *merged]
        for parent, merged in zip(parents, merges, strict=True)
    ]
    children = Counter(chain(*older))
    keys = [(-commit.written_at.timestamp(), node) for node, commit in enumerate(commits)]
    ready = [key for key in keys if not children[key[1]]]
    heapify(ready)
    order = []
    while ready:
        node = heappop(ready)[1]
        order.append(node)
        for source in older[node]:
            children[source] -= 1
            if not children[source]:
                heappush(ready, keys[source])
    return order


def _free(waiting: list[int | None]) -> int:
    """The first lane without a line."""
    if None not in waiting:
        waiting.append(None)
    return waiting.index(None)


def width_of(rows: Iterable[GraphRow]) -> int:
    """How many lanes the rows have."""
    ends = (lane for row in rows for lane in chain((row.lane,), *row.above, *row.below))
    return 1 + max(ends, default=0)


def lane_color(lane: int) -> str:
    """The color of a lane."""
    return _COLORS[lane % len(_COLORS)]


# --- as a page draws it ---------------------------------------------------------------------------


def graph_shapes(rows: Sequence[GraphRow]) -> dict[str, Any]:
    """The shapes of a graph for SVG.

    Returns
    -------
    dict
        `width` and `height` of the whole graph; `edges`, pieces of lines as a path and the number
        of a color; `dots`, as x, y and the number of a color.
    """

    def x(lane: int) -> int:
        return _MARGIN + _STEP * lane

    edges, dots = [], []
    for at, row in enumerate(rows):
        middle = _HEIGHT * at + _HEIGHT // 2
        for pieces, start in ((row.above, _HEIGHT * at), (row.below, middle)):
            half, end = start + _HEIGHT // 4, start + _HEIGHT // 2
            for a, b in pieces:
                path = f"M{x(a)} {start}C{x(a)} {half} {x(b)} {half} {x(b)} {end}"
                edges.append((path, max(a, b) % len(_COLORS)))  # of the line that leaves or joins
        dots.append((x(row.lane), middle, row.lane % len(_COLORS)))
    width = x(width_of(rows) - 1) + _MARGIN
    return {"width": width, "height": _HEIGHT * len(rows), "edges": edges, "dots": dots}


# --- as a terminal and a notebook draw it ---------------------------------------------------------


def graph_lines(rows: Sequence[GraphRow]) -> list[Text]:
    """The rows as lines of text, as `git log --graph` draws them."""
    from rich.text import Text

    width = width_of(rows)
    short = short_ids(row.commit.id for row in rows)
    found: list[Text] = []
    for row in rows:
        through = [(a, a) for _, a in row.above] + [(b, b) for b, _ in row.below]
        for pieces in (row.above, through, row.below):
            if pieces is not through and all(a == b for a, b in pieces):
                continue
            line = Text()
            for at, (stroke, lane) in enumerate(_strokes(pieces, width)):
                dot = pieces is through and at == 2 * row.lane
                line.append("●" if dot else _STROKES.get(stroke, "│"), lane_color(lane))
            found.append(line.append(" "))
            if pieces is through:
                line.append_text(about(row, short))
    return found


def _strokes(pieces: Iterable[tuple[int, int]], width: int) -> Iterable[tuple[int, int]]:
    """Of each place in a line of text: where strokes leave it, and of which lane they are.

    Each piece comes from above in one lane and goes down in another.
    """
    strokes, lane_of = [0] * (2 * width), [0] * (2 * width)
    for a, b in pieces:
        strokes[2 * a] |= _UP
        strokes[2 * b] |= _DOWN
        low, high = sorted((2 * a, 2 * b))
        for at in range(low, high + 1):
            strokes[at] |= (_LEFT * (at > low)) | (_RIGHT * (at < high))
            lane_of[at] = max(a, b, lane_of[at])
    return zip(strokes, lane_of, strict=True)


def about(row: GraphRow, short: Mapping[str, str]) -> Text:
    """A row in words: the short id, branches and tags, message, time and kind of its commit."""
    from rich.text import Text

    commit = row.commit
    text = Text(short[commit.id])
    if row.refs:
        text.append(f" ({', '.join(plain_text(ref) for ref in row.refs)})", "bold green")
    text.append(f" {plain_text(commit.message, most=_MOST_MESSAGE)}")
    return text.append(f"  {commit.written_at:%Y-%m-%d %H:%M}, {commit.kind}", "dim")
