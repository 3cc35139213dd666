"""What is dead and may go: snapshots that expire, objects, and bytes in packs.

*Expiry*: a branch's history ends at its floor; older snapshots are no longer part of it.
Invariants: a head is never removed; nor is a snapshot with a lease or any newer one, so that the
lease's holder finds the log from there to the head. A tag keeps only its own snapshot.

*Collection* is decided from object names alone. The name of an object contains its session's start:
the root version at which the session began. Once the fence is at F, a session that began before F
and holds no lease cannot commit any more. So of its objects only those are alive that the root
reaches. Invariants: an object is never dead if its session began at the fence or later, or holds a
lease; a search never starts after an object that an earlier search has skipped because of a lease.

A *pack* is an object with the bytes of many chunks, identified by the session that wrote it and a
number. Bytes to which no chunk refers any more are dead; where there are too many, the live chunks
are rewritten. Invariants:

- The live bytes of an object are the ranges that a row refers to; each range counts once, however
  many rows refer to it.
- Chunks that share a range still share one after the rewrite.
- When written, chunks of one array are next to each other, in order of coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.config import Snapshots
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import NO_SOURCES, ChunkTable, RefKind
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import Lease, LogEntry, PendingDeletion, Root
from zarr_manifests.ids import lineage_of, object_key, session_of, session_start
from zarr_manifests.planning.tables.merge import rearranged, select
from zarr_manifests.versions import milliseconds, moment_ms

# --- expiry ------------------------------------------------------------------------------------

_PENDING_MOST = 64


class Aged(Struct, frozen=True):
    """A snapshot in a history: its reference, its id, and when it was written."""

    ref: BlobRef
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
                "nothing says what to keep: pass keep_last, max_age or older_than (`clean`: keep), "
                "or save `snapshots` in the configuration"
            )
        whole = isinstance(self.keep_last, int) and not isinstance(self.keep_last, bool)
        if self.keep_last is not None and not (whole and self.keep_last >= 1):
            raise InvalidArgumentError(
                f"keep_last must be a whole number of at least 1, not {self.keep_last!r}"
            )

    def keeps(self, position: int, written_ms: int) -> bool:
        """Whether to keep a snapshot that has `position` newer ones on its branch."""
        newest = self.keep_last is not None and position < self.keep_last
        return newest or (self.oldest_ms is not None and written_ms >= self.oldest_ms)


def retention(
    options: Snapshots,
    now_ms: int,
    keep_last: int | None,
    max_age: timedelta | None,
    older_than: datetime | None,
) -> Retention:
    """Return what to keep: what the caller says, else what the configuration says.

    Raises
    ------
    InvalidArgumentError
        If neither says anything, or both `max_age` and `older_than` are given.
    """
    if max_age is not None and older_than is not None:
        raise InvalidArgumentError("give max_age or older_than, not both")
    if older_than is not None:
        return Retention(keep_last, moment_ms(older_than, "older_than"))
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


def with_pending(
    pending: Sequence[PendingDeletion],
    lines: Sequence[Sequence[Aged]],
    parents: Sequence[BlobRef | None],
) -> tuple[PendingDeletion, ...] | None:
    """Add pieces of history to what is pending.

    Each piece is newest first; `parents` has the parent of its oldest snapshot.
    None if there would be too many pieces to list.
    """
    found = list(pending)
    seen = {piece.newest.key for piece in found}
    for line, parent in zip(lines, parents, strict=True):
        if not line or line[0].ref.key in seen:
            continue
        seen.add(line[0].ref.key)
        count = len(line)
        for older in found:
            if parent is not None and older.newest.key == parent.key:
                found.remove(older)  # the new piece continues with the old one
                count += older.count
                break
        found.append(PendingDeletion(line[0].ref.bare(), count))
    return tuple(found) if len(found) <= _PENDING_MOST else None


# --- collection --------------------------------------------------------------------------------

ARCHIVES_KEPT = 100
"""At least this many of the newest root versions keep their archive."""
FULL_EVERY = 10
"""Every this many collections, one lists all objects."""
_LEAVING = (
    "amend",
    "delete branch",
    "delete tag",
    "expire snapshots",
    "recover",
    "reset branch",
    "restore",
)
"""How the operations begin that leave snapshots behind."""


def choose_fence(
    times: Iterable[tuple[int, int]], next_version: int, now_ms: int, grace_ms: int, fence: int
) -> int:
    """Return the new fence: sessions that began before the grace period are behind it.

    Parameters
    ----------
    times : iterable of (version, time)
        Versions of the root and the times they were written, newest first.
    next_version : int
        The version that the collection is about to write.
    now_ms, grace_ms : int
        The time now, and how long a session without a lease may run.
    fence : int
        The current fence; it never moves back.
    """
    if grace_ms <= 0:
        return next_version
    old_enough = (version for version, at_ms in times if at_ms <= now_ms - grace_ms)
    return max(fence, next(old_enough, 0))


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


def nothing_left_since(root: Root, version: int) -> bool:
    """Whether the log shows that no operation since that version can have orphaned snapshots."""
    since = [entry for entry in root.log if entry.version > version]
    whole = not since or len(since) < len(root.log) or since[0].version == version + 1
    return whole and not any(entry.operation.startswith(_LEAVING) for entry in since)


def search_start(swept: int, collections: int) -> int:
    """The session start from which on to list objects."""
    return 0 if (collections + 1) % FULL_EVERY == 0 else swept


def swept_after(fence: int, leases: Iterable[Lease]) -> int:
    """The start below which nothing unreachable is left after a search up to the fence."""
    return min([fence, *(session_start(lease.session) for lease in leases)])


def first_archive_kept(version: int, fence: int) -> int:
    """The oldest root version whose archive a collection at `version` keeps.

    Archives since the fence are kept too, since the next fence is chosen among them.
    """
    return max(0, min(version - ARCHIVES_KEPT + 1, fence))


def unended_since(version: int, newer: Iterable[Root], unreadable: Iterable[int]) -> int | None:
    """The start of a collection that may still delete objects of an older root; None if none may.

    A version that cannot be read counts as such a start.

    Parameters
    ----------
    version : int
        The older root's version.
    newer : iterable of Root
        The readable roots after it.
    unreadable : iterable of int
        The versions after it whose roots cannot be read.
    """
    entries: dict[int, LogEntry] = {}
    known = version
    for root in sorted(newer, key=lambda root: root.version):
        since = [entry for entry in root.log if entry.version > known]
        if since and len(since) == len(root.log) and since[0].version > known + 1:
            return known + 1  # the log no longer reaches back to it
        entries.update((entry.version, entry) for entry in since)
        known = max(known, root.version)
    begun = None
    for at, entry in sorted(entries.items()):
        if entry.operation == "collect garbage":
            if begun is not None:
                return begun  # superseded by the next, but its requests may still be in flight
            begun = at
        elif entry.operation == "end collection":
            begun = None
    return begun or min((at for at in unreadable if at > known), default=None)


# --- dead packs --------------------------------------------------------------------------------

type Column = npt.NDArray[np.int64]

_NUMBERS = 10**9
"""More than the objects of one session: source * _NUMBERS + number identifies an object."""


class Use(Struct, frozen=True):
    """The live part of a chunk object: the number of ranges, and their bytes."""

    chunks: int = 0
    nbytes: int = 0

    def plus(self, other: Use) -> Use:
        """The sum of both."""
        return Use(self.chunks + other.chunks, self.nbytes + other.nbytes)


class Range(Struct, frozen=True):
    """A byte range of a chunk in an object, its checksum, and its position in `PackMoves`."""

    key: str
    offset: int
    length: int
    crc32c: int
    at: int


def _objects(table: ChunkTable, rows: Column) -> Column:
    """A number for the object of each row, equal for the same object."""
    return np.asarray(table.source[rows] * _NUMBERS + table.number[rows])


def _key(table: ChunkTable, number: int) -> str:
    return object_key("chunks", table.sources[number // _NUMBERS], number % _NUMBERS)


def _distinct(columns: Sequence[Column]) -> tuple[Column, Column]:
    """The first row of each distinct combination, in order; and which of these each row is."""
    order = np.lexsort(columns[::-1])
    new = np.ones(len(order), np.bool_)
    if len(order):
        new[1:] = np.logical_or.reduce([c[order[1:]] != c[order[:-1]] for c in columns])
    which = np.empty(len(order), np.int64)
    which[order] = np.cumsum(new) - 1
    return order[new], which


def uses_of(table: ChunkTable) -> dict[str, Use]:
    """Return the live part of each chunk object that the table's rows refer to, by key."""
    rows = np.flatnonzero(table.kind == RefKind.NATIVE)
    named = _objects(table, rows)
    ranges, _ = _distinct([named, table.offset[rows], table.length[rows]])
    numbers, which = np.unique(named[ranges], return_inverse=True)
    lengths = table.length[rows][ranges]
    chunks, nbytes = np.bincount(which), np.zeros(len(numbers), np.int64)
    np.add.at(nbytes, which, lengths)
    return {
        _key(table, number): Use(count, size)
        for number, count, size in zip(
            numbers.tolist(), chunks.tolist(), nbytes.tolist(), strict=True
        )
    }


def due_packs(uses: Mapping[str, Use], sizes: Mapping[str, int], min_live: float) -> list[str]:
    """Return the keys of objects whose live fraction is below `min_live`, in order.

    An object of unknown size is never due.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.garbage import Use, due_packs
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
    >>> from zarr_manifests.planning.upkeep.garbage import parts
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


def by_bytes(ranges: Iterable[Range], most_bytes: int) -> Iterator[list[Range]]:
    """Split the ranges, in order, into parts of at most `most_bytes`, or of one range."""
    return parts(ranges, lambda one: one.length, most_bytes)


class PackMoves:
    """The chunks to move out of some objects, and where they have been written.

    Parameters
    ----------
    tables : sequence of (bytes, ChunkTable)
        By node id: only the rows that refer to these objects (see `moved_rows`).

    Attributes
    ----------
    ranges : list of Range
        The distinct ranges that the rows refer to, by object and offset.
    order : int64[n]
        For each range, the position of the first row that refers to it.
    """

    def __init__(self, tables: Sequence[tuple[bytes, ChunkTable]]) -> None:
        self.tables = tables
        keys: dict[str, int] = {}
        named: list[Column] = []
        for _, table in tables:
            numbers, which = np.unique(_objects(table, np.arange(len(table))), return_inverse=True)
            places = [keys.setdefault(_key(table, n), len(keys)) for n in numbers.tolist()]
            named.append(np.array(places, np.int64)[which])
        columns = [np.concatenate(named) if named else np.zeros(0, np.int64)]
        for name in ("offset", "length", "crc32c"):
            one = [getattr(table, name) for _, table in tables]
            columns.append(np.concatenate(one) if one else np.zeros(0, np.int64))
        # Objects in order of their keys, so that what was written together is read together.
        listed = sorted(keys)
        rank = np.empty(len(listed), np.int64)
        rank[[keys[key] for key in listed]] = np.arange(len(listed))
        columns[0] = rank[columns[0]]
        self.order, self._which = _distinct(columns)
        values = zip(*(column[self.order].tolist() for column in columns), strict=True)
        self.ranges = [
            Range(listed[of], offset, length, crc, at)
            for at, (of, offset, length, crc) in enumerate(values)
        ]
        self._number = np.full(len(self.ranges), -1, np.int64)
        self._offset = np.zeros(len(self.ranges), np.int64)

    def note(self, at: int, number: int, offset: int) -> None:
        """Note that the writer has written this range to object `number` at `offset`."""
        self._number[at], self._offset[at] = number, offset

    def rows(self, source: str) -> list[tuple[bytes, ChunkTable, ChunkTable]]:
        """Return, by node id, the rows that have moved, before and after.

        `source` is the session that wrote the new objects.
        """
        found, start = [], 0
        for node_id, table in self.tables:
            which = self._which[start : start + len(table)]
            start += len(table)
            moved = self._number[which] >= 0
            if moved.any():
                old, at = select(table, moved), which[moved]
                found.append(
                    (node_id, old, _moved(old, source, self._number[at], self._offset[at]))
                )
        return found


def _moved(table: ChunkTable, source: str, number: Column, offset: Column) -> ChunkTable:
    zeros = np.zeros(len(table), np.int64)
    return replace(
        table,
        source=zeros,
        number=number,
        offset=offset,
        sources=(source,),
        inline=b"",
        virtual=NO_SOURCES,
    )


def moved_rows(table: ChunkTable, keys: Collection[str]) -> ChunkTable | None:
    """The rows that refer to objects with these keys; None if there are none."""
    keep = table.kind == RefKind.NATIVE
    numbers, which = np.unique(_objects(table, np.flatnonzero(keep)), return_inverse=True)
    wanted = np.array([_key(table, number) in keys for number in numbers.tolist()], np.bool_)
    keep[keep] = wanted[which]
    return rearranged(table, keep, table.coords())
