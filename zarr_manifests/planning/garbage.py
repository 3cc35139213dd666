"""What is dead and may go: snapshots that expire, objects, and bytes in packs.

*Expiry*: a branch's history ends at its floor; older snapshots are no longer part of it.
Invariants: a head is never removed; nor is a snapshot with a lease or any newer one, so that the
lease's holder finds the log from there to the head. A tag keeps only its own snapshot.

*Collection* is decided from object names alone. The name of an object contains its session's start:
the root version at which the session began. Once the fence is at F, a session that began before F
and holds no lease cannot commit any more. So of its objects only those are alive that the root
reaches. Invariant: an object is never dead if its session began at the fence or later, or holds a
lease.

A *pack* is an object with the bytes of many chunks, identified by the session that wrote it and a
number. Bytes to which no chunk refers any more are dead; where there are too many, the live chunks
are rewritten. Invariants:

- The live bytes of an object are the ranges that a row refers to; each range counts once, however
  many rows refer to it.
- Chunks that share a range still share one after the rewrite.
- When written, chunks of one array are next to each other, in order of coordinates.

When deltas are compacted, and which entries are merged
-------------------------------------------------------

A snapshot's read list has two kinds of entries: deltas (of one commit) and runs (several deltas,
merged). Two kinds of compaction limit how often each row is rewritten:

- A *minor* compaction merges the deltas that are in no run yet into one run, and then runs of
  similar size, `fan_in` at a time. Sizes fall into classes, each a power of `fan_in`, and a class
  has fewer than `fan_in` runs. So a row is copied once per class.
- A *major* compaction merges entries into leaves of the base, but only into leaves whose pending
  refs have reached `size_ratio` of the refs they hold. So rewriting a leaf costs at most
  1 / `size_ratio` times the cost of what was added to it.

A third trigger is for whoever opens the branch: live deltas with many changed nodes are merged into
the base, which is read page by page.

Invariants: only neighbours are merged, so the newest row of a chunk stays the newest; an entry is
dropped only when the base has everything in it, and all older entries are dropped too.

Entries of history move from the snapshot to a page, and pages to a larger page. Each commit writes
the entries in its snapshot again, so they are few. A commit fetches nothing for a new page: what
goes there is in the parent already. Compactions read pages and merge those of similar size, so that
few are left to read.

What opening a snapshot fetches besides the snapshot and its base: bundles
--------------------------------------------------------------------------

A reader opens a branch in two rounds of requests: the root, then everything the root names, all at
once. The root can name few objects, and a snapshot can carry copies of few. If opening needs more
deltas than that, the newest of them are copied into a bundle. It reaches back from the newest
delta over everything that is at most twice as large as all that is newer. So sizes at least double
from bundle to bundle, and a byte is copied into a bundle only logarithmically often.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from itertools import takewhile
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.config import Compaction, Snapshots
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.manifest import Node
from zarr_manifests.format.root import Lease
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import lineage_of, object_key, session_of, session_start
from zarr_manifests.planning.merge import rearranged, without_unused_sessions
from zarr_manifests.versions import milliseconds

# --- expiry ------------------------------------------------------------------------------------


class Aged(Struct, frozen=True):
    """A snapshot in a history: its id, and when it was written."""

    snapshot_id: str
    written_ms: int


class Retention(Struct, frozen=True):
    """Which snapshots to keep: those that satisfy either condition.

    Parameters
    ----------
    keep_last : int or None
        Keep this many of the newest snapshots of each branch; None for no such condition.
    oldest_ms : int or None
        Keep what was written at this time or later; None for no such condition.

    Raises
    ------
    InvalidArgumentError
        If neither is given, or `keep_last` is less than 1.
    """

    keep_last: int | None
    oldest_ms: int | None

    def __post_init__(self) -> None:
        if self.keep_last is None and self.oldest_ms is None:
            raise InvalidArgumentError(
                "nothing says what to keep: give keep (of expire_snapshots: keep_last or max_age), "
                "or save `snapshots` in the configuration"
            )
        whole = isinstance(self.keep_last, int) and not isinstance(self.keep_last, bool)
        if self.keep_last is not None and not (whole and self.keep_last >= 1):
            raise InvalidArgumentError(
                f"keep a number from 1 on, or an age as timedelta(days=30), not {self.keep_last!r}"
            )

    def keeps(self, position: int, written_ms: int) -> bool:
        """Whether to keep a snapshot that has `position` newer ones on its branch."""
        newest = self.keep_last is not None and position < self.keep_last
        return newest or (self.oldest_ms is not None and written_ms >= self.oldest_ms)


def retention(
    options: Snapshots, now_ms: int, keep_last: int | None, max_age: timedelta | None
) -> Retention:
    """Return what to keep: what the caller says, else what the configuration says.

    Raises
    ------
    InvalidArgumentError
        If neither says anything.
    """
    if keep_last is None and max_age is None:
        keep_last, max_age = options.keep_last, options.max_age
    if max_age is None:
        return Retention(keep_last, None)
    return Retention(keep_last, now_ms - milliseconds(max_age, "max_age"))


def kept_count(line: Sequence[Aged], retention: Retention, needed: Container[str]) -> int:
    """The number of snapshots of a history, newest first, that stay in it; at least one."""
    count = 1
    while count < len(line) and retention.keeps(count, line[count].written_ms):
        count += 1
    leased = [i for i, aged in enumerate(line) if aged.snapshot_id in needed]
    return max(count, 1 + max(leased, default=0))


# --- collection --------------------------------------------------------------------------------

ARCHIVES_KEPT = 100
"""At least this many of the newest root versions keep their archive."""


def leased_lineages(leases: Iterable[Lease]) -> frozenset[str]:
    """The lineages of the sessions that hold leases; a lineage includes a session's copies."""
    return frozenset(lineage_of(lease.session) for lease in leases)


def is_dead(key: str, marked: Container[str], fence: int, leased: Container[str]) -> bool:
    """Whether a listed object may be deleted."""
    try:
        session = session_of(key)
    except InvalidArgumentError:
        return False  # not an object of this package
    return (
        session_start(session) < fence and lineage_of(session) not in leased and key not in marked
    )


def first_archive_kept(version: int, fence: int) -> int:
    """The oldest root version whose archive a collection at `version` keeps.

    Archives since the fence are kept too, since the next fence is chosen among them.
    """
    return max(0, min(version - ARCHIVES_KEPT + 1, fence))


# --- dead packs --------------------------------------------------------------------------------

type Column = npt.NDArray[np.int64]

type Rows = npt.NDArray[np.int64]
"""Ranges of one object: offset, length and checksum of each."""

_FOLD_ROWS: Final = 1 << 20
_NUMBERS = 10**9
"""More than the objects of one session: source * _NUMBERS + number identifies an object."""


def _objects(table: ChunkTable, rows: Column) -> Column:
    """A number for the object of each row, equal for the same object."""
    return np.asarray(table.source[rows] * _NUMBERS + table.number[rows])


def _key(table: ChunkTable, number: int) -> str:
    return object_key("chunks", table.sources[number // _NUMBERS], number % _NUMBERS)


def _ranges(table: ChunkTable, rows: Column, known: dict[str, int]) -> Rows:
    """For each row a number for its object, by key, and its range; new objects become known."""
    numbers, which = np.unique(_objects(table, rows), return_inverse=True)
    places = [known.setdefault(_key(table, number), len(known)) for number in numbers.tolist()]
    at = np.array(places, np.int64)[which]
    columns = (at, table.offset[rows], table.length[rows], table.crc32c[rows])
    return np.stack(columns, axis=1, dtype=np.int64)


class ChunkRanges(Struct):
    """The different ranges that tables refer to, by object; as columns, since there may be many.

    Attributes
    ----------
    objects : dict of str to int
        A number for the key of each object.
    """

    objects: dict[str, int] = {}
    _rows: list[Rows] = []
    _unfolded: int = 0
    _folded: int = 0

    def add(self, table: ChunkTable) -> None:
        """Note what the native rows of the table refer to."""
        native = np.flatnonzero(table.kind == RefKind.NATIVE)
        if not native.size:
            return
        self._rows.append(_ranges(table, native, self.objects))
        self._unfolded += native.size
        if self._unfolded > max(_FOLD_ROWS, self._folded):
            self._fold()

    def _fold(self) -> None:
        """Keep each range once; other snapshots refer to most of them, too."""
        if self._unfolded:
            self._rows = [np.unique(np.concatenate(self._rows), axis=0)]
            self._folded, self._unfolded = len(self._rows[0]), 0

    def of_each(self) -> Iterator[tuple[str, Rows]]:
        """Key and ranges of each object."""
        self._fold()
        if not self._rows:
            return
        (rows,) = self._rows
        bounds = np.flatnonzero(np.diff(rows[:, 0], prepend=-1, append=-1))
        keys = [*self.objects]
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            yield keys[rows[first, 0]], rows[first:last, 1:]


class Use(Struct, frozen=True):
    """The live part of a chunk object: the number of ranges, and their bytes."""

    chunks: int = 0
    nbytes: int = 0

    def plus(self, other: Use) -> Use:
        """The sum of both."""
        return Use(self.chunks + other.chunks, self.nbytes + other.nbytes)


class Range(Struct, frozen=True):
    """A byte range of a chunk in an object, its checksum, and its number in `PackMoves`.

    They are numbered in the order of the first rows that refer to them.
    """

    key: str
    offset: int
    length: int
    crc32c: int
    at: int


def uses_of(table: ChunkTable) -> dict[str, Use]:
    """Return the live part of each chunk object that the table's rows refer to, by key."""
    ranges = ChunkRanges()
    ranges.add(table)
    return {key: Use(len(rows), int(rows[:, 1].sum())) for key, rows in ranges.of_each()}


def due_packs(uses: Mapping[str, Use], sizes: Mapping[str, int], min_live: float) -> list[str]:
    """Return the keys of objects whose live fraction is below `min_live`, in order.

    An object of unknown size is never due.

    Examples
    --------
    >>> from zarr_manifests.planning.garbage import Use, due_packs
    >>> uses = {"chunks/a/0": Use(1, 40), "chunks/a/1": Use(9, 90), "chunks/a/2": Use(1, 1)}
    >>> due_packs(uses, {"chunks/a/0": 100, "chunks/a/1": 100}, 0.5)
    ['chunks/a/0']
    """
    return sorted(
        key for key, use in uses.items() if key in sizes and use.nbytes < min_live * sizes[key]
    )


def parts[T](
    items: Iterable[T], weigh: Callable[[T], int], most: int, most_items: int | None = None
) -> Iterator[list[T]]:
    """Split the items, in order, into parts of at most that weight and number, or of one item.

    Examples
    --------
    >>> from zarr_manifests.planning.garbage import parts
    >>> list(parts(["ab", "c", "defg", "h"], len, 3)), list(parts("abc", len, 9, 2))
    ([['ab', 'c'], ['defg'], ['h']], [['a', 'b'], ['c']])
    """
    part: list[T] = []
    weight = 0
    for item in items:
        more = weigh(item)
        if part and (weight + more > most or len(part) == most_items):
            yield part
            part, weight = [], 0
        part.append(item)
        weight += more
    if part:
        yield part


class PackMoves:
    """The chunks to move out of some objects, and where they have been written.

    Parameters
    ----------
    tables : mapping of bytes to ChunkTable
        By node id: only the rows that refer to these objects (see `rows_of`).
    source : str
        The session that writes the new objects.

    Attributes
    ----------
    ranges : list of Range
        The distinct ranges that the rows refer to, by object and offset.
    done : bool[n]
        Which of them some table refers to that `moved` was given.
    """

    def __init__(self, tables: Mapping[bytes, ChunkTable], source: str) -> None:
        self.coords = {node_id: table.coords() for node_id, table in tables.items()}
        self._source = source
        self._objects: dict[str, int] = {}
        self._at: dict[tuple[Any, ...], int] = {}  # number by object, offset, length, checksum
        for table in tables.values():
            for one in _ranges(table, np.arange(len(table)), self._objects).tolist():
                self._at.setdefault(tuple(one), len(self._at))
        keys = [*self._objects]
        # Objects in order of their keys, so that what was written together is read together.
        self.ranges = [
            Range(key, offset, length, crc, at)
            for key, offset, length, crc, at in sorted(
                (keys[of], *where, at) for (of, *where), at in self._at.items()
            )
        ]
        self._to = np.full((len(self._at) + 1, 2), -1, np.int64)  # the last is for unknown ranges
        self.done = np.zeros(len(self._at), np.bool_)

    def note(self, at: int, number: int, offset: int) -> None:
        """Note that the writer has written this range to object `number` at `offset`."""
        self._to[at] = number, offset

    def moved(self, table: ChunkTable) -> ChunkTable:
        """The table, referring to where its chunks have been written."""
        rows = np.flatnonzero(_refers(table, self._objects))
        ranges = map(tuple, _ranges(table, rows, self._objects).tolist())
        at = np.array([self._at.get(one, -1) for one in ranges], np.int64)
        written = self._to[at, 0] >= 0
        rows, at = rows[written], at[written]
        if not len(rows):
            return table
        self.done[at] = True
        sources = list(dict.fromkeys((*table.sources, self._source)))
        source, number, offset = (c.copy() for c in (table.source, table.number, table.offset))
        source[rows] = sources.index(self._source)
        number[rows], offset[rows] = self._to[at].T
        new = replace(table, source=source, number=number, offset=offset, sources=tuple(sources))
        return without_unused_sessions(new)


def _refers(table: ChunkTable, keys: Container[str]) -> npt.NDArray[np.bool_]:
    """Which rows refer to objects with these keys."""
    keep = np.asarray(table.kind == RefKind.NATIVE)
    numbers, which = np.unique(_objects(table, np.flatnonzero(keep)), return_inverse=True)
    wanted = np.array([_key(table, number) in keys for number in numbers.tolist()], np.bool_)
    keep[keep] = wanted[which]
    return keep


def rows_of(table: ChunkTable, keys: Container[str]) -> ChunkTable | None:
    """The rows that refer to objects with these keys; None if there are none."""
    return rearranged(table, _refers(table, keys), table.coords())


# --- read list ------------------------------------------------------------------------------------

MOST_RUNS: Final = 20
"""Most runs in a read list; beyond that the newest are merged whatever their sizes."""
_SMALLEST_CLASS_ROWS: Final = 1_024
_NODE_CHANGES_MOST: Final = 1_000
_NODE_BYTES_MOST: Final = 128 * 1024
_TABLES_FEW: Final = 1_000
_TABLES_MOST: Final = 20_000
_PATIENCE: Final = 10
"""With more than few tables, which cost a writer most, so many times the changes are due."""


class CompactionMode(StrEnum):
    """How much a compaction rewrites."""

    MINOR = "minor"
    MAJOR = "major"
    FULL = "full"


def is_due(unrolled: int, sequence: int, options: Compaction) -> bool:
    """Whether a compaction is due after the commit with this sequence number.

    Parameters
    ----------
    unrolled : int
        The number of deltas that are in no run.
    sequence : int
        The commit's number in the branch's history.
    options : Compaction
        Below `min_delta_count`, none is due; from `max_delta_count` on, one always is. In between,
        one is due when the sequence is a multiple of `interval_commits`.

    Examples
    --------
    >>> from zarr_manifests.config import Compaction
    >>> from zarr_manifests.planning.garbage import is_due
    >>> options = Compaction(min_delta_count=10, max_delta_count=50, interval_commits=100)
    >>> is_due(49, 149, options), is_due(50, 150, options), is_due(12, 200, options)
    (False, True, True)
    """
    if unrolled >= options.max_delta_count:
        return True
    return unrolled >= options.min_delta_count and sequence % options.interval_commits == 0


def opening_is_slow(changes: int, nbytes: int, tables: int) -> bool:
    """Whether so many nodes have changed since the base that a compaction is due.

    Parameters
    ----------
    changes : int
        The number of nodes that live deltas newer than the base set or delete.
    nbytes : int
        The size of these deltas, which every reader fetches to open the snapshot.
    tables : int
        The number of their chunk tables. Merging one takes a writer longer than a hundred changes
        take a reader: more than a few wait for ten times the changes, and very many for a
        compaction that is due for other reasons.

    Examples
    --------
    >>> from zarr_manifests.planning.garbage import opening_is_slow
    >>> opening_is_slow(3, 4_000, 3), opening_is_slow(5_000, 60_000, 0)
    (False, True)
    >>> opening_is_slow(2_000, 60_000, 2_000), opening_is_slow(12_000, 360_000, 12_000)
    (False, True)
    """
    scale = 1 if tables <= _TABLES_FEW else _PATIENCE
    many = changes > scale * _NODE_CHANGES_MOST
    large = changes > 0 and nbytes > scale * _NODE_BYTES_MOST
    return (many or large) and tables <= _TABLES_MOST


def merge_groups(rows: Sequence[int], runs: int, fan_in: int) -> list[tuple[int, int]]:
    """Return which entries a minor compaction merges, as half-open ranges of all positions.

    An entry that is not merged is alone in its range.

    Parameters
    ----------
    rows : sequence of int
        The number of chunk refs that each entry of the read list sets or unsets, oldest first.
    runs : int
        How many of the oldest entries are runs.
    fan_in : int
        How many runs of similar size are merged into one.

    Examples
    --------
    >>> from zarr_manifests.planning.garbage import merge_groups
    >>> merge_groups([5_000] * 3 + [100] * 50, 3, 4)
    [(0, 53)]
    >>> merge_groups([5_000] * 2 + [100] * 50, 2, 4)
    [(0, 1), (1, 2), (2, 52)]
    """
    stack = [(at, at + 1, rows[at]) for at in range(runs)]  # start, stop, rows
    if runs < len(rows):
        stack.append((runs, len(rows), sum(rows[runs:])))
        _settle(stack, fan_in)
    excess = len(stack) - MOST_RUNS
    if excess > 0:
        _merge(stack, len(stack) - excess - 1)
    return [(start, stop) for start, stop, _ in stack]


def _settle(stack: list[tuple[int, int, int]], fan_in: int) -> None:
    """Merge the newest run with its neighbours until each class has fewer than `fan_in`."""
    while True:
        newest = _class(stack[-1][2], fan_in)
        start = len(stack) - 1
        # Smaller runs before it would never again be the newest of their class.
        while start and _class(stack[start - 1][2], fan_in) < newest:
            start -= 1
        same = start
        while same and _class(stack[same - 1][2], fan_in) == newest:
            same -= 1
        if start - same + 1 >= fan_in:
            start = same
        if start == len(stack) - 1:
            return
        _merge(stack, start)


def _merge(stack: list[tuple[int, int, int]], start: int) -> None:
    merged = stack[start][0], stack[-1][1], sum(rows for _, _, rows in stack[start:])
    stack[start:] = [merged]


def _class(rows: int, fan_in: int) -> int:
    found, bound = 0, _SMALLEST_CLASS_ROWS
    while rows >= bound:
        found, bound = found + 1, bound * fan_in
    return found


# --- pages of history --------------------------------------------------------------------------

PAGE: Final = 24
"""So many entries go to a page."""
FAN_OUT: Final = 32
"""So many pages of one level go to a page of the next level."""
_MOST_BYTES: Final = 12 * 1024
_MOST_MERGED: Final = 1024


def are_a_page(sizes: Sequence[int]) -> bool:
    """Whether entries of these sizes in bytes go to a page.

    Examples
    --------
    >>> from zarr_manifests.planning.garbage import are_a_page
    >>> are_a_page([200] * 23), are_a_page([200] * 24), are_a_page([1000] * 13)
    (False, True, True)
    """
    return len(sizes) >= PAGE or sum(sizes) > _MOST_BYTES


def pages_to_roll(levels: Sequence[int]) -> int:
    """How many of the newest pages go to a page of pages, given the level of each, oldest first.

    Examples
    --------
    >>> from zarr_manifests.planning.garbage import pages_to_roll
    >>> pages_to_roll([1, 1] + [0] * 31), pages_to_roll([1, 1] + [0] * 32)
    (0, 32)
    """
    last = sum(1 for _ in takewhile(lambda level: level == levels[-1], reversed(levels)))
    return last if last >= FAN_OUT else 0


def pages_to_merge(counts: Sequence[int]) -> int:
    """How many of the newest pages a compaction merges, given the entries of each, oldest first.

    A page is merged if it is at most twice as large as all newer ones together. So sizes at least
    double from page to page, and an entry is copied only logarithmically often.

    Examples
    --------
    >>> from zarr_manifests.planning.garbage import pages_to_merge
    >>> pages_to_merge([500, 90, 24, 24]), pages_to_merge([500, 24]), pages_to_merge([24])
    (3, 0, 0)
    """
    merged = total = 0
    for count in reversed(counts):
        if (merged and count > 2 * total) or total + count > _MOST_MERGED:
            break
        merged, total = merged + 1, total + count
    return merged if merged > 1 else 0


# --- bundles ------------------------------------------------------------------------------------


_AHEAD_MOST: Final = 4  # objects that a branch names besides snapshot and base
_OPENING_MOST: Final = 8  # the same, plus those that the snapshot carries copies of


def bundle_from(snapshot: Snapshot) -> int | None:
    """Which of the objects that opening needs is the first to go into a new bundle, if one is due.

    The last one is the newest.
    """
    sizes = [ref.length for ref in snapshot.opening()]
    if len(snapshot.ahead) <= _AHEAD_MOST and len(sizes) <= _OPENING_MOST:
        return None
    start = len(sizes) - 2
    newer = sum(sizes[start:])
    while start > 0 and sizes[start - 1] <= 2 * newer:
        start -= 1
        newer += sizes[start]
    return start


def coordinate_ids(nodes: Iterable[Node], among: Container[bytes]) -> frozenset[bytes]:
    """The ids of those nodes that are coordinates."""
    return frozenset(
        node.node_id
        for node in nodes
        if node.node_id in among and node.array and node.array.is_coordinate(node.path)
    )
