"""Snapshots: one committed version each.

A snapshot names its parent and its own log delta, which history and conflict checks need. Its *read
list* is the base and all live deltas since, or runs that replace several deltas. Invariants: the
read list is complete, so readers never need an earlier snapshot; its entries are in the order of
their sequences, which number the changes of a line of history. A snapshot may be found by its key
alone, without a pointer that has its checksum. So it states its own id, which must match its key,
and the id of its repository.

A snapshot has up to 256 *marks* itself: the last version that each application has committed
exactly once. The others are in a page of marks, which it points to; its own marks override those of
the page. So no earlier snapshot is needed to find one.

What snapshots say about themselves and their ancestors, so that listing history opens none
-------------------------------------------------------------------------------------------

A snapshot carries the entries of its newest ancestors, and pointers to immutable pages that hold
the older ones, or pointers to further pages. Invariants: an entry only repeats what its snapshot
says and never changes; entries and pages cover neighbouring ancestors, oldest first, up to the
parent. Entries stay packed until somebody lists them, since every commit copies those of its
parent.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

import msgpack
from msgspec.structs import replace

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.manifest import Bundle, Count, Delta, ManifestRef, Part, check_counts
from zarr_manifests.format.records import (
    MAX_MS,
    PARENT_COPY_BYTES,
    BlobLength,
    BlobRef,
    CommitId,
    Crc,
    ListRecord,
    MetadataObject,
    Number,
    ObjectKind,
    Record,
    TimeMs,
    check_numbers,
    check_texts,
    drop_copies,
    pack,
    record,
    unpack,
    with_copies,
)
from zarr_manifests.ids import COMMIT_ID_BYTES, is_snapshot_id, snapshot_id_of, snapshot_key

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
    length: BlobLength
    crc32c: Crc

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


def unpacked_entries(packed: Sequence[bytes]) -> list[HistoryEntry]:
    """The entries in bytes that `HistoryEntry.pack` made.

    Raises
    ------
    CorruptObjectError
        If one is malformed, or not the child of the one before.
    """
    header = msgpack.Packer().pack_array_header(len(packed))
    found = record(list[HistoryEntry], unpack(header + b"".join(packed)), "history")
    for at, entry in enumerate(found):
        if not is_snapshot_id(entry.snapshot_id):
            raise CorruptObjectError("history: a malformed pointer to a snapshot")
        if at and entry.parent != found[at - 1].pointer:
            raise CorruptObjectError("history: an entry is not the child of the one before")
    return found


# --- pages -------------------------------------------------------------------------------------

_MOST_LEVELS: Final = 16


class HistoryPageRef(ListRecord, frozen=True):
    """Pointer to a page of history.

    Parameters
    ----------
    blob : BlobRef
        The page.
    newest_ms : int
        Time of the newest snapshot that it covers.
    count : int
        Number of snapshots that it covers.
    level : int
        0 for a page without further pages; else one more than the highest level of these.
    """

    blob: BlobRef
    newest_ms: TimeMs
    count: int
    level: int

    def __post_init__(self) -> None:
        drop_copies(self, "blob")
        check_numbers("history.pages", self.count - 1, most=2**31 - 1)
        check_numbers("history.pages", self.level, most=_MOST_LEVELS)

    def check(self, page: HistoryPage) -> None:
        """Raise if the page has another size than this pointer says.

        Raises
        ------
        CorruptObjectError
            If it does.
        """
        if (page.history.count, page.history.level) != (self.count, self.level):
            raise CorruptObjectError(f"{self.blob.key} covers other snapshots than it should")


class History(Record, frozen=True):
    """What a snapshot says about its ancestors, the parent last; or a page of that.

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

    @property
    def level(self) -> int:
        """The level of a page with it."""
        return self.pages[0].level + 1 if self.pages else 0


class HistoryPage(MetadataObject, frozen=True):
    """A part of what snapshots say about their ancestors, as an object of its own."""

    history: History

    _KIND = ObjectKind.HISTORY


# --- snapshot -------------------------------------------------------------------------------------

_LATER_COPY_BYTES: Final = 2 * 1024
MOST_IN_SNAPSHOT: Final = 256
MOST_IN_PAGE: Final = 1 << 20
_NAME_BYTES: Final = 255


def check_marks(where: str, marks: Mapping[str, int], most: int) -> None:
    """Raise unless there are at most `most` marks, each with a valid name and version.

    Raises
    ------
    InvalidArgumentError
        If there are more, a name has not 1 to 255 bytes of UTF-8, or a version is out of range.
    """
    if len(marks) > most:
        raise InvalidArgumentError(f"{where}: {len(marks)} marks, and at most {most} fit")
    check_texts(where, *marks)
    for name in marks:
        if not 1 <= len(name.encode()) <= _NAME_BYTES:
            raise InvalidArgumentError(
                f"{where}: the name {name[:40]!r} has not 1 to {_NAME_BYTES} bytes"
            )
    check_numbers(where, *marks.values())


class MarksPage(MetadataObject, frozen=True):
    """Marks that a snapshot has no room for, by application."""

    marks: Mapping[str, Number] = {}

    _KIND = ObjectKind.MARKS

    def __post_init__(self) -> None:
        check_marks("marks", self.marks, MOST_IN_PAGE)


class DeltaEntry(Record, frozen=True, rename={"changes_nodes": "nodes"}):
    """A live delta or run in a read list, and which chunk tables it has.

    Parameters
    ----------
    log : BlobRef
        The delta or run itself.
    first, last : int
        Sequences of its oldest and newest change; equal for a delta.
    changes_nodes : bool
        Whether it creates, changes, deletes or truncates nodes.
    embedded : tuple of Part
        The chunk tables embedded in it.
    manifests : tuple of ManifestRef
        The manifests with its other chunk tables.
    coordinates : bool
        Whether chunk tables of coordinates are embedded in it.
    counts : tuple of Count
        By how much it changes the number of chunks of each node.
    zones : BlobRef or None
        Zone maps of chunks that it sets, if there are any.
    bundle : BlobRef or None
        The bundle with a copy of it, if there is one.

    Raises
    ------
    CorruptObjectError
        If the sequences are invalid.
    """

    log: BlobRef
    first: Number
    last: Number
    changes_nodes: bool
    embedded: tuple[Part, ...] = ()
    manifests: tuple[ManifestRef, ...] = ()
    coordinates: bool = False
    counts: tuple[Count, ...] = ()
    zones: BlobRef | None = None
    bundle: BlobRef | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise CorruptObjectError(f"{self.log.key}: sequences {self.first} to {self.last}")
        drop_copies(self, "zones")
        check_numbers("snapshot.deltas", self.last)
        check_counts(self.counts)

    @classmethod
    def of(
        cls,
        log: BlobRef,
        delta: Delta,
        sequence: int,
        coordinates: Container[bytes] = (),
        *,
        first: int | None = None,
    ) -> DeltaEntry:
        """The entry of the delta at `log`; `coordinates` are the ids of coordinate variables.

        With `first` it is a run of the changes `first` to `sequence`.
        """
        parts = delta.embedded.directory()
        coordinate = any(part.node_id in coordinates for part in parts)
        begins = sequence if first is None else first
        return cls(
            log.bare(), begins, sequence, delta.changes_nodes, parts, delta.manifests, coordinate
        )

    def check(self, delta: Delta) -> None:
        """Raise if the delta does not match this entry, since chunks would read wrongly.

        Raises
        ------
        CorruptObjectError
            If it has other chunk tables, or differs in whether it changes nodes.
        """
        told = self.changes_nodes, self.embedded, _parts(self.manifests)
        if told != (delta.changes_nodes, delta.embedded.directory(), _parts(delta.manifests)):
            raise CorruptObjectError(f"{self.log.key} does not match its entry in the snapshot")

    @property
    def at(self) -> BlobRef:
        """What opening a snapshot fetches to have the delta: its bundle, or itself."""
        return self.bundle or self.log

    def opened(self, loaded: Mapping[str, Any]) -> Delta:
        """The delta, from the objects by key.

        Raises
        ------
        CorruptObjectError
            If it does not match this entry, or its bundle has no copy of it.
        """
        found = loaded[self.at.key]
        if isinstance(found, Bundle):
            if self.log.key not in found.deltas:
                raise CorruptObjectError(f"{self.at.key} has no copy of {self.log.key}")
            found = found.deltas[self.log.key]
        self.check(found)
        return cast(Delta, found)

    def memory(self) -> tuple[int, tuple[object, ...]]:
        """About how many bytes it takes, with all that is in it."""
        parts = len(self.embedded) + sum(len(ref.parts) for ref in self.manifests)
        nbytes = 450 + 400 * parts + 500 * len(self.manifests) + 170 * len(self.counts)
        return nbytes + len(self.log.copy or b""), ()

    def parts(self) -> list[Part]:
        """All its chunk tables, embedded or in manifests."""
        return [*self.embedded, *(part for ref in self.manifests for part in ref.parts)]

    @property
    def at_open(self) -> bool:
        """Whether opening the snapshot or reading its coordinates needs the delta."""
        return self.changes_nodes or self.coordinates


@lru_cache(maxsize=1024)
def parsed_entry(data: bytes) -> DeltaEntry:
    """The entry in its packed bytes; cached, as a snapshot lists its parent's and one more."""
    return record(DeltaEntry, unpack(data), "snapshot.deltas")


def _parts(manifests: Iterable[ManifestRef]) -> list[tuple[BlobRef, tuple[Part, ...]]]:
    return [(manifest.blob.bare(), manifest.parts) for manifest in manifests]


_NAMES: Final = {
    "snapshot_id": "id",
    "repository_id": "repository",
    "commit_id": "commit",
    "written_ms": "at_ms",
}
"""What attributes are called in the object."""


class Snapshot(MetadataObject, frozen=True, rename=_NAMES):
    """One committed version.

    Parameters
    ----------
    snapshot_id : str
        Its own id, from which its key follows.
    repository_id : str
        Id of its repository.
    parent : BlobRef or None
        The previous snapshot; None for the first of a repository.
    commit_id : bytes
        Id of the commit, the same for all its attempts.
    kind : CommitKind
        What the commit mostly did.
    message : str
        The commit message.
    metadata : mapping
        The committer's own metadata.
    written_ms : int
        Time of the commit by the committer's clock, in milliseconds since 1970 UTC.
    base : BlobRef or None
        Node table and leaf directory; None if everything is in deltas.
    deltas : tuple of DeltaEntry
        Live deltas since the base, oldest first.
    log : BlobRef
        This commit's own delta.
    totals : mapping of str to int
        Refs set and unset, bytes of the chunks set, and chunk objects written by this commit.
    marks : mapping of str to int
        The last version that each application has committed exactly once. They override those in
        `marks_page`.
    sequence : int
        Number of the newest change: the parent's plus one for a commit that changes something, or
        the parent's for a rewrite.
    sums : mapping of str to int
        Totals of the whole snapshot as far as known: `chunks`, `chunk-bytes`, `arrays`, `groups`.
    marks_page : BlobRef or None
        The page with the marks that do not fit into `marks`.
    merged : tuple of str or None
        Of a merge: the ids of the snapshot whose changes it brought in, and of the snapshot that
        both sides were compared with.
    history : History
        What it says about its ancestors.
    """

    snapshot_id: str
    repository_id: str
    parent: BlobRef | None
    commit_id: CommitId
    kind: CommitKind
    message: str
    metadata: Mapping[str, Any]
    written_ms: TimeMs
    base: BlobRef | None
    deltas: tuple[DeltaEntry, ...]
    log: BlobRef
    totals: Mapping[str, Number] = {}
    marks: Mapping[str, Number] = {}
    sequence: Number = 0
    sums: Mapping[str, Number] = {}
    marks_page: BlobRef | None = None
    merged: tuple[str, str] | None = None
    history: History = History()

    _KIND = ObjectKind.SNAPSHOT
    _PACKED = "deltas"

    @classmethod
    def parse(cls, value: Any) -> Snapshot:
        """From an untrusted map that `pack` made, whose deltas are still packed."""
        told = {"parent": None, "base": None, "metadata": {}, "deltas": (), **value}
        told["deltas"] = tuple(map(parsed_entry, told["deltas"]))
        return record(cls, told, "snapshot")

    def __post_init__(self) -> None:
        snapshot_key(self.snapshot_id)
        drop_copies(self, "parent", "base", "log", "marks_page")
        check_texts("snapshot", self.repository_id, self.message)
        check_numbers("snapshot.at_ms", self.written_ms, most=MAX_MS)
        check_numbers("snapshot", self.sequence, *self.totals.values(), *self.sums.values())
        check_marks("snapshot.marks", self.marks, MOST_IN_SNAPSHOT)
        for merged in self.merged or ():
            snapshot_key(merged)
        newest = 0
        for listed in self.deltas:
            if listed.first <= newest:
                raise CorruptObjectError("snapshot: deltas are out of order")
            newest = listed.last
        if newest > self.sequence:
            raise CorruptObjectError("snapshot: a delta has a later sequence than the snapshot")
        if len(self.commit_id) != COMMIT_ID_BYTES:
            raise CorruptObjectError("snapshot: the commit id has the wrong length")

    def check_repository(self, key: str, repository_id: str) -> None:
        """Raise if the snapshot belongs to another repository.

        Raises
        ------
        CorruptObjectError
            If its repository has another id.
        """
        if self.repository_id != repository_id:
            raise CorruptObjectError(
                f"{key}: found a snapshot of repository {self.repository_id} in the repository "
                f"{repository_id}; restore the right object from a backup"
            )

    def memory(self) -> tuple[int, tuple[object, ...]]:
        """About how many bytes it takes, but for the values that are to be measured besides."""
        blobs = [blob for blob in (self.parent, self.base, self.log) if blob is not None]
        copies = sum(len(blob.copy or b"") for blob in blobs)
        nbytes = 1000 + 200 * len(blobs) + copies + 100 * (len(self.totals) + len(self.sums))
        return nbytes, (self.deltas, self.message, self.metadata, self.marks)

    @property
    def parent_id(self) -> str | None:
        """Id of the parent; None for the first snapshot."""
        return None if self.parent is None else snapshot_id_of(self.parent.key)

    def entry(self, ref: BlobRef) -> HistoryEntry:
        """What histories say about this snapshot, which lies at `ref`."""
        return HistoryEntry(
            SnapshotPointer.of(ref),
            None if self.parent is None else SnapshotPointer.of(self.parent),
            self.written_ms,
            self.commit_id,
            self.kind,
            self.message,
            self.metadata,
            self.totals,
            self.sums,
        )

    def with_delta_copies(self, known: Mapping[str, bytes]) -> Snapshot:
        """The same with copies of bundles and deltas while they fit.

        Those that opening needs come first, then a few deltas that readers of chunks would
        otherwise fetch with the leaf. Of the entries that name a bundle, the first has the copy.
        The budget is small, since each commit writes all copies again.
        """
        refs = with_copies(self.opening(), known, PARENT_COPY_BYTES)
        room = PARENT_COPY_BYTES - sum(len(ref.copy or b"") for ref in refs)
        later = [entry.log for entry in self.deltas if not entry.at_open]
        refs += with_copies(later, known, min(room, _LATER_COPY_BYTES))
        due = {ref.key: ref for ref in refs}
        deltas = [*self.deltas]
        for i, entry in enumerate(deltas):
            ref = due.pop(entry.at.key, None) or entry.at.bare()
            if ref is not entry.at:  # most do not change
                deltas[i] = replace(entry, **{"bundle" if entry.bundle else "log": ref})
        return replace(self, deltas=tuple(deltas))

    def opening(self) -> list[BlobRef]:
        """The bundles, and deltas in no bundle, that opening needs, in order."""
        found: dict[str, BlobRef] = {}
        for entry in self.deltas:
            if entry.at_open:
                found.setdefault(entry.at.key, entry.at)
        return [*found.values()]

    @property
    def ahead(self) -> tuple[BlobRef, ...]:
        """Objects that opening needs besides the snapshot and its base, for the branch to name."""
        return tuple(ref for ref in self.opening() if ref.copy is None)

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Snapshot:
        """Decode a snapshot."""
        found = super().from_object(data, ref)
        if found.snapshot_id != snapshot_id_of(ref.key):
            raise CorruptObjectError(
                f"{ref.key}: found snapshot {found.snapshot_id} under this key; restore the right "
                "object from a backup"
            )
        return found
