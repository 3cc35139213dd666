"""What snapshots say about themselves and their ancestors, so that listing history opens none.

A snapshot carries the entries of its newest ancestors, and pointers to immutable pages that hold
the older ones. A page holds either entries or pointers to further pages. Invariants: an entry only
repeats what its snapshot says and never changes; entries and pages cover neighbouring ancestors,
oldest first, up to the parent. Those that a snapshot carries stay packed until somebody lists them,
since every commit copies those of its parent.

A listing may go through thousands of entries, and its caller looks at a few fields of each. So
pages store columns, each column is checked as a whole, and an entry is made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.records import (
    MOST_BLOB_BYTES,
    BlobRef,
    CommitId,
    ListRecord,
    MetadataObject,
    Number,
    ObjectKind,
    Record,
    TimeMs,
    are,
    are_counts,
    check_numbers,
    drop_copies,
    pack,
    record,
    unpack,
)
from zarr_manifests.ids import COMMIT_ID_BYTES, are_snapshot_ids, snapshot_id_of, snapshot_key

_TEXT_BYTES: Final = 512


class CommitKind(StrEnum):
    """What a commit mostly did: a label that nothing depends on."""

    APPEND = "append"
    OVERWRITE = "overwrite"
    DELETE = "delete"
    METADATA = "metadata"
    REWRITE = "rewrite"


class SnapshotPointer(NamedTuple):
    """Pointer to a snapshot. Unlike a `BlobRef`, thousands are quickly made and compared.

    Parameters
    ----------
    snapshot_id : str
        The snapshot's id.
    length, crc32c : int
        Bytes of the object, and the checksum in its envelope.
    """

    snapshot_id: str
    length: Number
    crc32c: Number

    @classmethod
    def of(cls, ref: BlobRef) -> SnapshotPointer:
        """The same as a `BlobRef`."""
        return cls(snapshot_id_of(ref.key), ref.length, ref.crc32c)

    @property
    def ref(self) -> BlobRef:
        """The same as a `BlobRef`."""
        return BlobRef(snapshot_key(self.snapshot_id), self.length, self.crc32c)


class HistoryEntry(NamedTuple):
    """What one snapshot says about itself and its commit.

    Parameters
    ----------
    pointer : SnapshotPointer
        The snapshot.
    parent : SnapshotPointer or None
        The previous snapshot; None for the first.
    written_ms : int
        Time of the commit, in milliseconds since 1970 UTC.
    commit_id : bytes
        Id of the commit.
    kind : CommitKind
        What the commit mostly did.
    message : str or None
        The commit message; None if only the snapshot has it, and the metadata.
    metadata : mapping
        The committer's own metadata.
    totals, sums : mapping of str to int
        What the commit did, and totals of the whole snapshot.
    """

    pointer: SnapshotPointer
    parent: SnapshotPointer | None
    written_ms: TimeMs
    commit_id: CommitId
    kind: CommitKind
    message: str | None
    metadata: Mapping[str, Any]
    totals: Mapping[str, Number]
    sums: Mapping[str, Number]

    @property
    def snapshot_id(self) -> str:
        """The snapshot's id."""
        return self.pointer.snapshot_id

    def pack(self) -> bytes:
        """As msgpack, without message and metadata if these are long."""
        texts = self.message, dict(self.metadata)
        if len(pack(texts)) > _TEXT_BYTES:
            texts = None, {}
        facts = self.written_ms, self.commit_id, str(self.kind), *texts
        sums = dict(self.totals), dict(self.sums)
        return pack([self.pointer, self.parent, *facts, *sums])


class HistoryEntries(Record, frozen=True, rename={"written_ms": "at_ms"}):
    """Entries of one or more neighbouring snapshots by column, oldest first.

    Parameters
    ----------
    ids, lengths, crcs : sequence
        The snapshots, as in `SnapshotPointer`. Each is the parent of the next.
    parent : SnapshotPointer or None
        The parent of the oldest one.
    written_ms, kinds, messages, metadata : sequence
        As in `HistoryEntry`.
    commits : bytes
        The commit ids, one after another.
    totals, sums : mapping of str to sequence
        By name, the number of each entry; None where an entry has none of that name.

    Raises
    ------
    CorruptObjectError
        If a value is none that `HistoryEntry` may have, or a column has another length.
    """

    ids: Sequence[str]
    lengths: Sequence[Number]
    crcs: Sequence[Number]
    written_ms: Sequence[TimeMs]
    commits: bytes
    kinds: Sequence[CommitKind]
    messages: Sequence[str | None]
    metadata: Sequence[Mapping[str, Any]]
    parent: SnapshotPointer | None = None
    totals: Mapping[str, Sequence[Number | None]] = {}
    sums: Mapping[str, Sequence[Number | None]] = {}

    def __post_init__(self) -> None:
        columns = [self.lengths, self.crcs, self.written_ms, self.kinds, self.messages]
        columns += [self.metadata, *self.totals.values(), *self.sums.values()]
        _check({*map(len, columns)} == {len(self.ids)} != {0})
        _check(len(self.commits) == COMMIT_ID_BYTES * len(self.ids))
        _check_pointers(self.ids, self.lengths, self.crcs)
        if self.parent is not None:
            _check_pointers(*([value] for value in self.parent))

    @classmethod
    def of(cls, entries: Sequence[HistoryEntry]) -> HistoryEntries:
        """Of entries that follow each other, oldest first.

        Raises
        ------
        CorruptObjectError
            If one is not the child of the one before.
        """
        _check(len(entries) > 0)
        pointers, parents, times, commits, *others, totals, sums = zip(*entries, strict=True)
        if parents[1:] != pointers[:-1]:
            raise CorruptObjectError("history: an entry is not the child of the one before")
        columns: Any = *zip(*pointers, strict=True), times, b"".join(commits), *others
        return cls(*(*columns, parents[0], _by_name(totals), _by_name(sums)))

    @classmethod
    def unpack(cls, packed: Sequence[bytes]) -> HistoryEntries:
        """Of bytes that `HistoryEntry.pack` made, oldest first.

        Raises
        ------
        CorruptObjectError
            If an entry is malformed, or not the child of the one before.
        """
        return cls.of(record(list[HistoryEntry], [*map(unpack, packed)], "history"))

    @classmethod
    def join(cls, parts: Sequence[HistoryEntries]) -> HistoryEntries:
        """Of parts that follow each other, oldest first.

        Raises
        ------
        CorruptObjectError
            If one is not the child of the one before.
        """
        return cls.of([*chain.from_iterable(part.entries() for part in parts)])

    def __len__(self) -> int:
        return len(self.ids)

    def pointer(self, at: int) -> SnapshotPointer:
        """The snapshot at that position."""
        return SnapshotPointer(self.ids[at], self.lengths[at], self.crcs[at])

    def parent_of(self, at: int) -> SnapshotPointer | None:
        """The parent of the snapshot at that position."""
        return self.pointer(at - 1) if at else self.parent

    def commit_id(self, at: int) -> bytes:
        """The id of the commit at that position."""
        return self.commits[at * COMMIT_ID_BYTES : (at + 1) * COMMIT_ID_BYTES]

    def entry(self, at: int) -> HistoryEntry:
        """The entry at that position, from 0."""
        return HistoryEntry(
            self.pointer(at),
            self.parent_of(at),
            self.written_ms[at],
            self.commit_id(at),
            self.kinds[at],
            self.messages[at],
            self.metadata[at],
            numbers_at(self.totals, at),
            numbers_at(self.sums, at),
        )

    def entries(self) -> list[HistoryEntry]:
        """All entries."""
        return [*map(self.entry, range(len(self)))]

    def since(self, at: int) -> HistoryEntries:
        """The entries from that position on."""
        return HistoryEntries.of(self.entries()[at:])

    def completed(self, texts: Mapping[int, tuple[str, Mapping[str, Any]]]) -> HistoryEntries:
        """The same with these messages and metadata, by position."""
        messages, metadata = [*self.messages], [*self.metadata]
        for at, (message, belongs) in texts.items():
            messages[at], metadata[at] = message, belongs
        return replace(self, messages=messages, metadata=metadata)


def numbers_at(columns: Mapping[str, Sequence[int | None]], at: int) -> dict[str, int]:
    """The numbers at that position, by name."""
    found = {name: column[at] for name, column in columns.items()}
    return {name: number for name, number in found.items() if number is not None}


def _by_name(maps: Sequence[Mapping[str, int]]) -> dict[str, list[int | None]]:
    """By name, the number of each map; None where a map has none of that name."""
    return {name: [each.get(name) for each in maps] for name in dict.fromkeys(chain(*maps))}


def _check_pointers(ids: Sequence[Any], lengths: Sequence[Any], crcs: Sequence[Any]) -> None:
    _check(
        are(str, ids)
        and are_snapshot_ids(ids)
        and are_counts(lengths)
        and max(lengths) <= MOST_BLOB_BYTES
        and are_counts(crcs)
        and max(crcs) < 2**32
    )


def _check(sound: bool) -> None:
    if not sound:
        raise CorruptObjectError("history: a malformed entry or pointer to a snapshot")


# --- pages -------------------------------------------------------------------------------------

_MOST_LEVELS: Final = 16


class HistoryPageRef(ListRecord, frozen=True):
    """Pointer to a page of entries, or to a page that names further pages.

    Parameters
    ----------
    blob : BlobRef
        The page.
    newest : BlobRef
        The newest snapshot that it covers.
    count : int
        Number of snapshots that it covers: `newest`, its parent, and so on.
    level : int
        0 for a page of entries; else one more than the level of the pages it names.
    """

    blob: BlobRef
    newest: BlobRef
    count: int
    level: int

    def __post_init__(self) -> None:
        drop_copies(self, "blob", "newest")
        check_numbers("history.pages", self.count - 1, most=2**31 - 1)
        check_numbers("history.pages", self.level, most=_MOST_LEVELS)

    def check(self, page: HistoryPage) -> None:
        """Raise if the page covers other snapshots than this pointer says.

        Raises
        ------
        CorruptObjectError
            If it does.
        """
        if (page.newest, page.count, page.level) != (self.newest, self.count, self.level):
            raise CorruptObjectError(f"{self.blob.key} covers other snapshots than it should")


class History(Record, frozen=True):
    """What a snapshot says about its ancestors, the parent last.

    Parameters
    ----------
    pages : tuple of HistoryPageRef
        Pages of the older ancestors, oldest first; no level is higher than the one before.
    recent : tuple of bytes
        Packed entries of the newer ancestors, oldest first.
    """

    pages: tuple[HistoryPageRef, ...] = ()
    recent: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        levels = [page.level for page in self.pages]
        if levels != sorted(levels, reverse=True):
            raise CorruptObjectError("history: pages are out of order")

    @property
    def count(self) -> int:
        """Number of ancestors that it covers."""
        return len(self.recent) + sum(page.count for page in self.pages)


class HistoryPage(MetadataObject, frozen=True):
    """Entries of neighbouring snapshots, or pointers to pages of neighbours; oldest first.

    Parameters
    ----------
    entries : HistoryEntries or None
        The entries.
    pages : tuple of HistoryPageRef
        Pointers to pages of one level.

    Raises
    ------
    CorruptObjectError
        If it has both or neither, or pages of different levels.
    """

    entries: HistoryEntries | None = None
    pages: tuple[HistoryPageRef, ...] = ()

    _KIND = ObjectKind.HISTORY

    def __post_init__(self) -> None:
        if (self.entries is None) == (not self.pages) or len({p.level for p in self.pages}) > 1:
            raise CorruptObjectError("a page of history needs entries, or pages of one level")

    @property
    def newest(self) -> BlobRef:
        """The newest snapshot that it covers."""
        return self.pages[-1].newest if self.entries is None else self.entries.pointer(-1).ref

    @property
    def count(self) -> int:
        """Number of snapshots that it covers."""
        own = 0 if self.entries is None else len(self.entries)
        return own + sum(page.count for page in self.pages)

    @property
    def level(self) -> int:
        """0 for a page of entries; else one more than the level of the pages it names."""
        return self.pages[0].level + 1 if self.pages else 0

    def at(self, blob: BlobRef) -> HistoryPageRef:
        """The pointer to this page, which lies at `blob`."""
        return HistoryPageRef(blob, self.newest, self.count, self.level)
