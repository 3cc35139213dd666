"""Copying objects of a repository to another storage, each checked before it is written.

Metadata objects are copied on the way: what they refer to is read from them. Chunk objects follow.
Invariants: an object under a key of the other storage is whole and was checked, since it is written
in one call after the check, or copied by the store; what is there already is not written again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.history.reachability import Link, follow, tables
from zarr_manifests.engine.objects.metadata import create_own
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import (
    CorruptObjectError,
    MissingChunkError,
    ObjectNotFoundError,
    StorageError,
)
from zarr_manifests.format.blobs import ROOT_COPY_BYTES, BlobRef
from zarr_manifests.format.chunk_table import ChunkTable, RefKind, chunk_key
from zarr_manifests.format.envelope import is_sound
from zarr_manifests.format.index import IndexDirectory
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import crc32c
from zarr_manifests.progress import counted, expect, tell
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import ObjectInfo

_LOG = logging.getLogger(__name__)
_AT_ONCE: Final = 64
_AT_ONCE_BYTES: Final = 128 * 1024**2
_METADATA: Final = (
    "deltas",
    "digests",
    "history",
    "indexes",
    "manifests",
    "nodes",
    "pages",
    "snapshots",
)
_FOLD_ROWS: Final = 1 << 20
_MEND: Final = "restore it from a backup"

type _Rows = npt.NDArray[np.int64]
"""Rows of object, offset, length and checksum."""


@dataclass(slots=True)
class _Ranges:
    """The different ranges of chunk objects that chunk tables refer to.

    As columns, since there may be as many as chunks.
    """

    objects: dict[str, int] = field(default_factory=dict)
    _rows: list[_Rows] = field(default_factory=list)
    _unfolded: int = 0
    _folded: int = 0

    def add(self, table: ChunkTable) -> None:
        """Note what the native rows of the table refer to."""
        native = np.flatnonzero(table.kind == RefKind.NATIVE)
        if not native.size:
            return
        pairs = np.stack([table.source[native], table.number[native]], axis=1)
        unique, inverse = np.unique(pairs, axis=0, return_inverse=True)
        keys = [chunk_key(table.sources[source], number) for source, number in unique.tolist()]
        known = self.objects
        numbers = np.array([known.setdefault(key, len(known)) for key in keys], np.int64)
        columns = (table.offset[native], table.length[native], table.crc32c[native])
        at = numbers[inverse.reshape(-1)]
        self._rows.append(np.stack([at, *(c.astype(np.int64) for c in columns)], axis=1))
        self._unfolded += native.size
        if self._unfolded > max(_FOLD_ROWS, self._folded):
            self._fold()

    def _fold(self) -> None:
        """Keep each range once; other snapshots refer to most of them, too."""
        if self._unfolded:
            self._rows = [np.unique(np.concatenate(self._rows), axis=0)]
            self._folded, self._unfolded = len(self._rows[0]), 0

    def of_each(self) -> Iterator[tuple[str, _Rows]]:
        """Key and ranges of each object."""
        self._fold()
        if not self._rows:
            return
        (rows,) = self._rows
        bounds = np.flatnonzero(np.diff(rows[:, 0], prepend=-1, append=-1))
        keys = [*self.objects]
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            yield keys[rows[first, 0]], rows[first:last, 1:]


@dataclass(slots=True)
class ObjectCopier:
    """Copies objects, and counts what it does.

    Parameters
    ----------
    source : ReadContext
        The repository to copy from.
    storage : Storage
        The storage to copy to.
    heads : frozenset of str
        Keys of objects of which the bytes are kept, if they are few.
    within : callable, optional
        Has the store copy a chunk object, given key and size, if both storages are in one.

    Attributes
    ----------
    kept : dict of str to bytes
        These bytes.
    copied : list of int
        Sizes of the objects copied so far.
    moved : list of str
        Keys of those that the store has copied itself.
    found : list of str
        Keys of the objects that were there already.
    chunks, virtual : int
        Different ranges of chunk objects, and refs to files elsewhere.
    """

    source: ReadContext
    storage: Storage
    heads: frozenset[str] = frozenset()
    within: Callable[[str, int], None] | None = None
    kept: dict[str, bytes] = field(default_factory=dict)
    copied: list[int] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    chunks: int = 0
    virtual: int = 0
    _here: dict[str, int] = field(default_factory=dict)
    _ranges: _Ranges = field(default_factory=_Ranges)

    def copy(self, starts: Iterable[Link], seen: set[str], wanted: Callable[[Link], bool]) -> None:
        """Copy all wanted objects that the links lead to, except those in `seen`.

        Raises
        ------
        CorruptObjectError
            If an object is missing or damaged; it names the object.
        MissingChunkError
            If a chunk object is missing.
        StorageError
            If a storage fails.
        """
        self._here |= {info.key: info.nbytes for info in self._listed(*_METADATA)}
        runtime, stage = self.source.runtime, "metadata"
        found = follow(runtime, starts, self._metadata, seen, wanted, stage)
        for _, value in found:
            for table in tables(value):
                self._ranges.add(table)
                self.virtual += int(np.count_nonzero(table.kind == RefKind.VIRTUAL))
        self._copy_chunks()

    def _listed(self, *kinds: str) -> Iterator[ObjectInfo]:
        """What is there of these kinds."""
        found = chain.from_iterable(self.storage.list(f"{kind}/") for kind in kinds)
        return counted("looking at what is there", found)

    # --- metadata ----------------------------------------------------------------------------

    def _metadata(self, link: Link) -> Any:
        """Copy the object and return it, decoded."""
        ref = link.ref
        data = self._read(ref)
        value = link.kind.from_object(data, ref)
        link.check(value)
        if isinstance(value, Snapshot):
            value.check_repository(ref.key, self.source.repository_id)
        for other in value.others.values() if isinstance(value, IndexDirectory) else ():
            unknown = self._read(other)
            if not is_sound(unknown, other.length, other.crc32c):
                raise CorruptObjectError(f"{other.key} does not match its checksum")
            self._write(other, unknown)
        self._write(ref, data)
        return value

    def _read(self, ref: BlobRef) -> bytes:
        storage = self.source.storage
        try:
            return storage.get(ref.key, 0, ref.length + 1)
        except ObjectNotFoundError as error:
            raise CorruptObjectError(
                f"{ref.key} is referenced and not there ({storage.url}); restore it from a backup"
            ) from error

    def _write(self, ref: BlobRef, data: bytes) -> None:
        if ref.key in self.heads and len(data) <= ROOT_COPY_BYTES:
            self.kept[ref.key] = data
        if self._here.get(ref.key) == len(data):
            self.found.append(ref.key)
            return
        create_own(self.storage, ref.key, data)
        self.copied.append(len(data))

    # --- chunks ------------------------------------------------------------------------------

    def _copy_chunks(self) -> None:
        """Copy the chunk objects that are not there, many at once."""
        due = self._ranges.objects
        here = {i.key: i.nbytes for i in self._listed("chunks") if i.key in due}
        self.found += here
        done = 0
        expect("chunks", len(due) - len(here))
        for batch in self._batches(here):
            self.source.runtime.parallel([partial(self._chunk, *each) for each in batch])
            done += len(batch)
            tell("chunks", done)

    def _batches(self, here: Mapping[str, int]) -> Iterator[list[tuple[str, _Rows]]]:
        batch: list[tuple[str, _Rows]] = []
        nbytes = 0
        for key, rows in self._ranges.of_each():
            self.chunks += len(rows)
            size = int((rows[:, 0] + rows[:, 1]).max())
            if key in here:
                if here[key] < size:
                    raise CorruptObjectError(
                        f"chunk object {key} in {self.storage.url} ends before {size}; delete it "
                        "there, and clone again"
                    )
                continue
            if batch and (len(batch) == _AT_ONCE or nbytes + size > _AT_ONCE_BYTES):
                yield batch
                batch, nbytes = [], 0
            batch.append((key, rows))
            nbytes += size
        if batch:
            yield batch

    def _chunk(self, key: str, rows: _Rows) -> None:
        """Copy one chunk object if all chunks in it match their checksums."""
        storage = self.source.storage
        try:
            data = storage.get(key)
        except ObjectNotFoundError as error:
            missing = MissingChunkError(
                f"chunk object {key} is referenced and not there ({storage.url}); {_MEND}"
            )
            missing.key = key
            raise missing from error
        _check(key, memoryview(data), rows)
        if not self._copied_within(key, len(data)):
            create_own(self.storage, key, data)
        self.copied.append(len(data))

    def _copied_within(self, key: str, nbytes: int) -> bool:
        """Whether both are in one store, and it has copied the object."""
        if self.within is None:
            return False
        try:
            self.within(key, nbytes)
        except StorageError as error:  # not allowed there, or too large for it
            _LOG.warning("the store did not copy an object, which is sent instead: %s", error)
            return False
        self.moved.append(key)
        return True


def _check(key: str, data: memoryview, rows: _Rows) -> None:
    """Raise unless the object has all its chunks, with their checksums."""
    offsets, ends = rows[:, 0].tolist(), (rows[:, 0] + rows[:, 1]).tolist()
    if max(ends) > len(data):
        raise CorruptObjectError(f"chunk object {key} ends before {max(ends)}; {_MEND}")
    for offset, end, crc in zip(offsets, ends, rows[:, 2].tolist(), strict=True):
        if crc32c(data[offset:end]) != crc:
            raise CorruptObjectError(
                f"chunk object {key} at {offset} does not match its checksum; {_MEND}"
            )
