"""What a snapshot says about its ancestors, so that listing history need not open each of them.

A snapshot carries the entries of its newest ancestors, and pointers to immutable pages that hold
the older ones. A page holds either entries or pointers to further pages. Invariants: an entry only
repeats what its snapshot says and never changes; entries and pages cover neighbouring ancestors,
oldest first, up to the parent. Those that a snapshot carries stay packed until somebody lists them,
since every commit copies those of its parent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.entry_columns import HistoryEntries, SnapshotPointer
from zarr_manifests.format.envelope import Fields, ObjectKind, are, check_numbers
from zarr_manifests.format.records import MetadataObject, Record, Stored, inner, within

_MOST_LEVELS: Final = 16


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


_PAGES: Final = within(HistoryPageRef)


def _recent(fields: Fields, name: str) -> tuple[bytes, ...]:
    recent = fields.items(name)
    if not are(bytes, recent):
        raise CorruptObjectError(f"{fields.where}.{name}: expected packed entries")
    return tuple(recent)


@dataclass(frozen=True, slots=True)
class History(Record):
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

    _FIELDS = (("pages", "pages", _PAGES), ("recent", "recent", Stored(_recent)))

    def __post_init__(self) -> None:
        levels = [page.level for page in self.pages]
        if levels != sorted(levels, reverse=True):
            raise CorruptObjectError("history: pages are out of order")

    @property
    def count(self) -> int:
        """Number of ancestors that it covers."""
        return len(self.recent) + sum(page.count for page in self.pages)


@dataclass(frozen=True, slots=True)
class HistoryPage(MetadataObject):
    """HistoryEntries of neighbouring snapshots, or pointers to pages of neighbours; oldest first.

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
    _FIELDS = (
        ("pages", "pages", _PAGES.left_out()),
        ("entries", "entries", inner(HistoryEntries).left_out()),
    )

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
