"""What a snapshot says about its ancestors, so that listing history need not open each of them.

A snapshot carries the entries of its newest ancestors, and pointers to immutable pages that hold
the older ones. A page holds either entries or pointers to further pages. Invariants: an entry only
repeats what its snapshot says and never changes; entries and pages cover neighbouring ancestors,
oldest first, up to the parent. Entries stay packed until somebody lists them, since every commit
copies those of its parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.delta import COMMIT_ID_BYTES, CommitKind
from zarr_manifests.format.envelope import (
    MAX_MS,
    Fields,
    ObjectKind,
    check_numbers,
    check_texts,
    decode,
    encode,
    pack,
    unpack,
)
from zarr_manifests.ids import snapshot_id_of, snapshot_key

__all__ = ["History", "HistoryEntry", "HistoryPage", "HistoryPageRef"]

_TEXT_BYTES: Final = 512
_MOST_LEVELS: Final = 16


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """What one snapshot says about itself and its commit.

    Parameters
    ----------
    ref : BlobRef
        The snapshot.
    parent : BlobRef or None
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

    Raises
    ------
    CorruptObjectError
        If a value is invalid.
    """

    ref: BlobRef
    parent: BlobRef | None
    written_ms: int
    commit_id: bytes
    kind: CommitKind
    message: str | None
    metadata: Mapping[str, Any]
    totals: Mapping[str, int]
    sums: Mapping[str, int]

    def __post_init__(self) -> None:
        check_numbers("history: a time", self.written_ms, most=MAX_MS)
        if self.message is not None:
            check_texts("history", self.message)
        if len(self.commit_id) != COMMIT_ID_BYTES:
            raise CorruptObjectError("history: a commit id has the wrong length")

    @property
    def snapshot_id(self) -> str:
        """The snapshot's id."""
        return snapshot_id_of(self.ref.key)

    def pack(self) -> bytes:
        """Msgpack of a list, without message and metadata if these are long."""
        parent = None if self.parent is None else _pack_pointer(self.parent)
        texts = self.message, dict(self.metadata)
        if len(pack(texts)) > _TEXT_BYTES:
            texts = None, {}
        facts = self.written_ms, self.commit_id, str(self.kind), *texts
        sums = dict(self.totals), dict(self.sums)
        return pack([_pack_pointer(self.ref), parent, *facts, *sums])

    @classmethod
    def parse(cls, packed: bytes) -> HistoryEntry:
        """From bytes that `pack` made."""
        try:
            return cls._parse(unpack(packed))
        except (InvalidArgumentError, ValueError) as error:
            raise CorruptObjectError(f"history: {error}") from error

    @classmethod
    def _parse(cls, value: Any) -> HistoryEntry:
        match value:
            case [
                ref,
                parent,
                int(at_ms),
                bytes(commit),
                str(kind),
                None | str() as message,
                dict(metadata),
                dict(totals),
                dict(sums),
                *_,
            ]:
                named = {"metadata": metadata, "totals": totals, "sums": sums}
                fields = Fields(named, "history")
                return cls(
                    _parse_pointer(ref),
                    None if parent is None else _parse_pointer(parent),
                    at_ms,
                    commit,
                    CommitKind(kind),
                    message,
                    fields.table("metadata"),
                    fields.counters("totals"),
                    fields.counters("sums"),
                )
        raise CorruptObjectError("history: expected an entry")


def _pack_pointer(ref: BlobRef) -> list[Any]:
    return [snapshot_id_of(ref.key), ref.length, ref.crc32c]


def _parse_pointer(value: Any) -> BlobRef:
    match value:
        case [str(snapshot_id), int(length), int(crc)]:
            return _pointer(snapshot_id, length, crc)
    raise CorruptObjectError("history: expected id, length and checksum of a snapshot")


@lru_cache(4, typed=True)  # the parent of an entry is the snapshot of the next
def _pointer(snapshot_id: str, length: int, crc: int) -> BlobRef:
    return BlobRef(snapshot_key(snapshot_id), length, crc)


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
        return [self.blob.bare().pack(), _pack_pointer(self.newest), self.count, self.level]

    @classmethod
    def parse_all(cls, fields: Fields, name: str) -> tuple[HistoryPageRef, ...]:
        """From the field of that name, a list of what `pack` made."""
        found = []
        for value in fields.items(name):
            match value:
                case [dict(blob), newest, int(count), int(level)]:
                    ref = BlobRef.parse(Fields(blob, f"{fields.where}.{name}"))
                    found.append(cls(ref, _parse_pointer(newest), count, level))
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
        last = self.pages[-1].newest if self.pages else HistoryEntry.parse(self.entries[-1]).ref
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
    if any(type(entry) is not bytes for entry in entries):
        raise CorruptObjectError(f"{fields.where}.{name}: expected packed entries")
    return tuple(entries)
