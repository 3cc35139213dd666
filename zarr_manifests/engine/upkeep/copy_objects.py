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

from zarr_manifests.engine.history.left_behind import Link, follow, tables
from zarr_manifests.engine.objects.metadata import create_own
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.upkeep.chunk_ranges import ChunkRanges, Rows, end_of, problem_of
from zarr_manifests.engine.upkeep.collect import KINDS
from zarr_manifests.errors import (
    CorruptObjectError,
    MissingChunkError,
    ObjectNotFoundError,
    StorageError,
)
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.planning.upkeep.garbage import parts
from zarr_manifests.progress import counted, expect, tell
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import ObjectInfo

_LOG = logging.getLogger(__name__)
_AT_ONCE: Final = 64
_AT_ONCE_BYTES: Final = 128 * 1024**2
_MEND: Final = "restore it from a backup"


@dataclass(slots=True)
class ObjectCopier:
    """Copies objects, and counts what it does.

    Parameters
    ----------
    source : ReadContext
        The repository to copy from.
    storage : Storage
        The storage to copy to.
    within : callable, optional
        Has the store copy a chunk object, given key and size, if both storages are in one.

    Attributes
    ----------
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
    within: Callable[[str, int], None] | None = None
    copied: list[int] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    chunks: int = 0
    virtual: int = 0
    _here: dict[str, int] = field(default_factory=dict)
    _ranges: ChunkRanges = field(default_factory=ChunkRanges)

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
        kinds = [kind for kind in KINDS if kind not in ("chunks", "reports")]
        self._here |= {info.key: info.nbytes for info in self._listed(*kinds)}
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
        absent = self._absent(here)
        for batch in parts(absent, lambda one: end_of(one[1]), _AT_ONCE_BYTES, _AT_ONCE):
            self.source.runtime.parallel([partial(self._chunk, *each) for each in batch])
            done += len(batch)
            tell("chunks", done)

    def _absent(self, here: Mapping[str, int]) -> Iterator[tuple[str, Rows]]:
        """Key and ranges of each chunk object that is not there yet."""
        for key, rows in self._ranges.of_each():
            self.chunks += len(rows)
            if key not in here:
                yield key, rows
            elif here[key] < end_of(rows):
                raise CorruptObjectError(
                    f"chunk object {key} in {self.storage.url} ends before {end_of(rows)}; delete "
                    "it there, and clone again"
                )

    def _chunk(self, key: str, rows: Rows) -> None:
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
        problem = problem_of(key, rows, data)
        if problem is not None:
            raise CorruptObjectError(f"{problem}; {_MEND}")
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
