"""What a snapshot says about its ancestors, so that listing history need not open each of them.

A snapshot carries the entries of its newest ancestors, and pointers to immutable pages that hold
the older ones. A page holds either entries or pointers to further pages. Invariants: an entry only
repeats what its snapshot says and never changes; entries and pages cover neighbouring ancestors,
oldest first, up to the parent. Entries stay packed until somebody lists them, since every commit
copies those of its parent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import MOST_BLOB_BYTES, BlobRef
from zarr_manifests.format.delta import COMMIT_ID_BYTES, CommitKind
from zarr_manifests.format.envelope import (
    MAX_MS,
    Fields,
    ObjectKind,
    are,
    are_counts,
    check_numbers,
    decode,
    encode,
    pack,
    unpack_each,
)
from zarr_manifests.ids import is_snapshot_id, snapshot_id_of, snapshot_key

__all__ = ["History", "HistoryEntry", "HistoryPage", "HistoryPageRef", "SnapshotPointer"]

_TEXT_BYTES: Final = 512
_MOST_LEVELS: Final = 16


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
    length: int
    crc32c: int

    @classmethod
    def of(cls, ref: BlobRef) -> SnapshotPointer:
        """The same as a `BlobRef`."""
        return cls(snapshot_id_of(ref.key), ref.length, ref.crc32c)

    @classmethod
    def parse(cls, value: Any) -> SnapshotPointer:
        """From a list for msgpack."""
        (found,) = cls.parse_all([value])
        return found

    @classmethod
    def parse_all(cls, values: Sequence[Any]) -> list[SnapshotPointer]:
        """From lists for msgpack; there is at least one."""
        _check(are(list, values) and set(map(len, values)) == {len(cls._fields)})
        ids, lengths, crcs = zip(*values, strict=True)
        _check(
            are(str, ids)
            and all(map(is_snapshot_id, ids))
            and are_counts(lengths)
            and max(lengths) <= MOST_BLOB_BYTES
            and are_counts(crcs)
            and max(crcs) < 2**32
        )
        return [*map(cls, ids, lengths, crcs)]

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
    written_ms: int
    commit_id: bytes
    kind: CommitKind
    message: str | None
    metadata: Mapping[str, Any]
    totals: Mapping[str, int]
    sums: Mapping[str, int]

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

    @classmethod
    def parse_all(cls, packed: Sequence[bytes]) -> list[HistoryEntry]:
        """The entries of neighbouring snapshots, from bytes that `pack` made, in the same order.

        Raises
        ------
        CorruptObjectError
            If an entry is malformed, or not the child of the one before.
        """
        entries = unpack_each(packed)
        if not entries:
            return []
        # There may be thousands, so a field is checked in all of them at once.
        _check(are(list, entries) and min(map(len, entries)) >= len(cls._fields))
        columns = zip(*(entry[: len(cls._fields)] for entry in entries), strict=True)
        snapshots, parents, times, commits, kinds, messages, *maps = columns
        _check(
            are_counts(times)
            and max(times) <= MAX_MS
            and are(bytes, commits)
            and set(map(len, commits)) == {COMMIT_ID_BYTES}
            and are(str, kinds)
            and set(kinds) <= _KINDS.keys()
            and are(str, [message for message in messages if message is not None])
            and are(dict, [*chain(*maps)])
            and are(str, set().union(*chain(*maps)))
            and are_counts([*chain.from_iterable(map(dict.values, chain(*maps[1:])))])
        )
        pointers = SnapshotPointer.parse_all(snapshots)
        if parents[1:] != snapshots[:-1]:
            raise CorruptObjectError("history: an entry is not the child of the one before")
        first = None if parents[0] is None else SnapshotPointer.parse(parents[0])
        names = map(_KINDS.__getitem__, kinds)
        olders = [first, *pointers[:-1]]
        return [*map(cls, pointers, olders, times, commits, names, messages, *maps)]


_KINDS: Final = {str(kind): kind for kind in CommitKind}


def _check(sound: bool) -> None:
    if not sound:
        raise CorruptObjectError("history: a malformed entry or pointer to a snapshot")


@dataclass(frozen=True, slots=True)
class HistoryPageRef:
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
        check_numbers("history.pages", self.count - 1, most=2**31 - 1)
        check_numbers("history.pages", self.level, most=_MOST_LEVELS)

    def pack(self) -> list[Any]:
        """As a list for msgpack."""
        return [self.blob.bare().pack(), SnapshotPointer.of(self.newest), self.count, self.level]

    @classmethod
    def parse_all(cls, fields: Fields, name: str) -> tuple[HistoryPageRef, ...]:
        """From the field of that name, a list of what `pack` made."""
        found = []
        for value in fields.items(name):
            match value:
                case [dict(blob), newest, int(count), int(level)]:
                    ref = BlobRef.parse(Fields(blob, f"{fields.where}.{name}"))
                    found.append(cls(ref, SnapshotPointer.parse(newest).ref, count, level))
                case _:
                    raise CorruptObjectError(
                        f"{fields.where}.{name}: expected pointer, newest snapshot, count and level"
                    )
        return tuple(found)

    def check(self, page: HistoryPage) -> None:
        """Raise if the page covers other snapshots than this pointer says.

        Raises
        ------
        CorruptObjectError
            If it does.
        """
        if (page.newest, page.count, page.level) != (self.newest, self.count, self.level):
            raise CorruptObjectError(f"{self.blob.key} covers other snapshots than it should")


@dataclass(frozen=True, slots=True)
class History:
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

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack."""
        return {"pages": [page.pack() for page in self.pages], "recent": list(self.recent)}

    @classmethod
    def parse(cls, fields: Fields) -> History:
        """From a map that `pack` made."""
        return cls(HistoryPageRef.parse_all(fields, "pages"), _parse_entries(fields, "recent"))


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """Entries of neighbouring snapshots, or pointers to pages of neighbours; oldest first.

    Parameters
    ----------
    entries : tuple of bytes
        Packed entries.
    pages : tuple of HistoryPageRef
        Pointers to pages of one level.

    Raises
    ------
    CorruptObjectError
        If it has both or neither, or pages of different levels.
    """

    entries: tuple[bytes, ...] = ()
    pages: tuple[HistoryPageRef, ...] = ()
    newest: BlobRef = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if bool(self.entries) == bool(self.pages) or len({p.level for p in self.pages}) > 1:
            raise CorruptObjectError("a page of history needs entries, or pages of one level")
        last = (
            self.pages[-1].newest
            if self.pages
            else HistoryEntry.parse_all(self.entries[-1:])[0].pointer.ref
        )
        object.__setattr__(self, "newest", last)

    @property
    def count(self) -> int:
        """Number of snapshots that it covers."""
        return len(self.entries) + sum(page.count for page in self.pages)

    @property
    def level(self) -> int:
        """0 for a page of entries; else one more than the level of the pages it names."""
        return self.pages[0].level + 1 if self.pages else 0

    def at(self, blob: BlobRef) -> HistoryPageRef:
        """The pointer to this page, which lies at `blob`."""
        return HistoryPageRef(blob, self.newest, self.count, self.level)

    def encode(self) -> bytes:
        """The object's bytes."""
        pages = [page.pack() for page in self.pages]
        return encode(ObjectKind.HISTORY, {"entries": list(self.entries), "pages": pages})

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> HistoryPage:
        """Decode a page."""
        pointer: Any = {"crc": ref.crc32c, "length": ref.length}
        return decode(data, ObjectKind.HISTORY, cls._parse, ref.key, **pointer)

    @classmethod
    def _parse(cls, fields: Fields) -> HistoryPage:
        return cls(_parse_entries(fields, "entries"), HistoryPageRef.parse_all(fields, "pages"))


def _parse_entries(fields: Fields, name: str) -> tuple[bytes, ...]:
    entries = fields.items(name)
    if not are(bytes, entries):
        raise CorruptObjectError(f"{fields.where}.{name}: expected packed entries")
    return tuple(entries)
