"""Chunk bytes: names of a session's objects, and reads of exactly a chunk's range.

Invariants: a referenced chunk that is missing or damaged raises an error and never reads as `None`;
a whole chunk's checksum is verified on every read; objects are written put-if-absent, under a
session id that no other process uses, since a forked child draws its own before it writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from zarr_manifests.engine.objects.bytes_ahead import BytesAhead
from zarr_manifests.engine.objects.coalescing import CoalescedReads
from zarr_manifests.engine.objects.decoded_cache import ChunkCache
from zarr_manifests.errors import (
    CorruptObjectError,
    MissingChunkError,
    ObjectNotFoundError,
    VirtualContainerError,
)
from zarr_manifests.format.chunk_table import (
    ChunkRef,
    InlineRef,
    NativeRef,
    StoredRef,
    VirtualRef,
)
from zarr_manifests.format.virtual_sources import VirtualSource
from zarr_manifests.ids import crc32c, new_session_id, object_key
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.protocol import REMOTE_CAPABILITIES, ReadableStorage, ReadsInto
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.virtual_refs import VirtualReader

_LINEAGE_BYTES = 6
_SYNCED_ABREAST: Final = 8
"""A disk takes many calls at once; more than this do not make it faster."""
_LARGE_BYTES: Final = 512 * 1024
"""From this size on, a local read in an event loop runs in a thread: several chunks are then read
and checked in parallel, which outweighs the cost of the thread."""


def sync_parts(keys: Sequence[str]) -> list[Sequence[str]]:
    """The keys in a few parts to make durable in parallel; no part is empty."""
    return [keys[i::_SYNCED_ABREAST] for i in range(min(len(keys), _SYNCED_ABREAST))]


class SessionKeys:
    """Generates the keys of one writer's objects: `<kind>/<session>/<n>`.

    The first 48 random bits of a session id are its lineage, which copies of the session share; the
    other 48 bits differ from copy to copy. `epoch` is the epoch of the session's claim of its
    branch, if it has claimed it.
    """

    def __init__(
        self,
        start: int,
        runtime: Runtime,
        lineage: bytes | None = None,
        *,
        epoch: int | None = None,
    ) -> None:
        self._runtime = runtime
        self.start = start
        self.epoch = epoch
        self.lineage = lineage or runtime.random_bytes(_LINEAGE_BYTES)
        self._own = self._draw()

    def _draw(self) -> _Own:
        own = self._runtime.random_bytes(_LINEAGE_BYTES)
        return _Own(os.getpid(), new_session_id(self.start, self.lineage + own))

    def next(self, kind: str) -> str:
        """A new key, never used before."""
        own = self._current()
        return object_key(kind, own.session_id, next(own.numbers))

    def key_for(self, kind: str, data: bytes) -> str:
        """The key under which these bytes were already written, or a new one."""
        found = [key for key in self._current().written if key.startswith(f"{kind}/")]
        digest = _digest(data) if found else b""  # a first commit has none to compare with
        same = (key for key in found if self._current().written[key] == digest)
        return next(same, None) or self.next(kind)

    def has_written(self, key: str) -> bool:
        """Whether this session has written an object under the key."""
        return key in self._current().written

    def note_written(self, key: str, data: bytes) -> None:
        """Note that these bytes are stored under a key of this session."""
        self._current().written[key] = _digest(data)

    @property
    def session_id(self) -> str:
        """The session id in this process."""
        return self._current().session_id

    def _current(self) -> _Own:
        if self._own.pid != os.getpid():
            self._own = self._draw()
        return self._own

    @property
    def lineage_prefix(self) -> str:
        """The common prefix of chunk keys of this session and all its copies."""
        return f"chunks/{self.start:012d}-{self.lineage.hex()}"


@dataclass(slots=True)
class _Own:
    """The part of a session's keys that belongs to one process."""

    pid: int
    session_id: str
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    written: dict[str, bytes] = field(default_factory=dict)
    """Key -> digest of the bytes written there."""


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


class ChunkReader:
    """Reads chunks of one snapshot, or of a session based on it."""

    def __init__(
        self,
        storage: ReadableStorage,
        snapshot_id: str,
        containers: Containers | None = None,
        cache: ChunkCache | None = None,
        runtime: Runtime = SYSTEM,
    ) -> None:
        self._storage = storage
        self._inline = storage.capabilities.inline
        self._far = (
            None if self._inline else CoalescedReads(storage.get_async, storage.capabilities)
        )
        self._virtual = VirtualReader(containers or Containers())
        self._elsewhere = CoalescedReads(self._virtual.read_source, REMOTE_CAPABILITIES)
        self._snapshot_id = snapshot_id
        self._cache = cache
        far = REMOTE_CAPABILITIES if self._inline else storage.capabilities
        self._ahead = BytesAhead(self._read_span, self._read_span_async, runtime, far)

    def read(self, ref: ChunkRef, start: int, length: int) -> bytes:
        """Return `length` bytes of the chunk from `start` on; both are within the chunk.

        Raises
        ------
        MissingChunkError
            If the chunk's object does not exist.
        CorruptObjectError
            If it is too short, or the whole chunk does not match its checksum.
        VirtualContainerError
            If it is in a file elsewhere that the repository was not opened to read.
        VirtualSourceChangedError
            If that file has changed since it was referenced.
        """
        if not isinstance(ref, NativeRef):
            if isinstance(ref, VirtualRef):
                if (kept := self.cached(ref)) is not None:
                    return kept[start : start + length]
                data = self._virtual.read(ref, start, length)
                self.keep(ref, data)
                return data
            return ref.data[start : start + length]
        if self._cache is not None and (kept := self._cache.find(ref)) is not None:
            return kept[start : start + length]
        try:
            data = self._storage.get(ref.key, ref.offset + start, length)
        except ObjectNotFoundError as error:
            raise self._missing(ref) from error
        if self._cache is None and len(data) == length == ref.length and crc32c(data) == ref.crc32c:
            return data  # as `_checked` would say
        return self._checked(ref, data, start, length)

    def read_into(self, ref: StoredRef, room: memoryview) -> bool:
        """Read a whole chunk into `room`, without a copy; False if it has to be read by `read`.

        Of a damaged chunk nothing stays there: `room` has zeros, and `read` says what is wrong.
        """
        storage, sound = self._storage, False
        if not isinstance(ref, NativeRef) or ref.length != len(room):
            return False
        if self._cache is not None or not isinstance(storage, ReadsInto):
            return False
        try:
            count = storage.read_into(ref.key, ref.offset, room)
            if count is None:
                return False
            sound = count == len(room) and crc32c(room) == ref.crc32c
        except ObjectNotFoundError:
            return False
        finally:
            if not sound:
                room[:] = bytes(len(room))
        return sound

    async def read_async(self, ref: ChunkRef, start: int, length: int) -> bytes | memoryview:
        """Like `read`, for an event loop; adjacent reads of remote objects share a request.

        A chunk that was fetched ahead may be a view of all that was fetched with it.
        """
        if isinstance(ref, InlineRef):
            return ref.data[start : start + length]
        if isinstance(ref, VirtualRef) and length and self._virtual.is_remote(ref.source):
            if (kept := self.cached(ref)) is not None:
                return kept[start : start + length]
            known = await self._ahead.take(ref) if length == ref.length else None
            if known is not None:
                data = bytes(known)
            else:
                data = await self._elsewhere.get(ref.source, ref.offset + start, length)
            self.keep(ref, self._virtual.checked(ref, data, length))
            return data
        if isinstance(ref, VirtualRef) or (length >= _LARGE_BYTES and self._inline):
            import asyncio

            return await asyncio.to_thread(self.read, ref, start, length)
        if self._cache is not None and (kept := self._cache.find(ref)) is not None:
            return kept[start : start + length]
        try:
            if self._far is None:
                data = await self._storage.get_async(ref.key, ref.offset + start, length)
            else:
                known = await self._ahead.take(ref) if length == ref.length else None
                if known is not None and self._cache is None and crc32c(known) == ref.crc32c:
                    return known
                if known is not None:
                    return self._checked(ref, bytes(known), start, length)
                data = await self._far.get(ref.key, ref.offset + start, length)
        except ObjectNotFoundError as error:
            raise self._missing(ref) from error
        return self._checked(ref, data, start, length)

    def fetch_ahead(self, refs: Iterable[NativeRef | VirtualRef]) -> None:
        """Begin to fetch chunks that take requests, and that no cache holds."""
        remote: dict[VirtualSource, bool] = {}

        def is_due(ref: NativeRef | VirtualRef) -> bool:
            if isinstance(ref, VirtualRef):
                if ref.source not in remote:
                    remote[ref.source] = self._virtual.is_remote(ref.source)
                if not remote[ref.source]:
                    return False
            elif self._inline:
                return False
            return self._cache is None or not self._cache.holds(ref)

        with contextlib.suppress(VirtualContainerError):  # which reading the chunk raises
            self._ahead.fetch([ref for ref in refs if is_due(ref)])

    def _read_span(self, ref: NativeRef | VirtualRef, start: int, length: int) -> bytes:
        if isinstance(ref, VirtualRef):
            return self._virtual.read_bytes(ref.source, start, length)
        return self._storage.get(ref.key, start, length)

    async def _read_span_async(self, ref: NativeRef | VirtualRef, start: int, length: int) -> bytes:
        if isinstance(ref, VirtualRef):
            return await self._virtual.read_source(ref.source, start, length)
        return await self._storage.get_async(ref.key, start, length)

    def read_elsewhere(self, source: VirtualSource, start: int, length: int) -> bytes:
        """Return bytes of a file elsewhere, fewer at its end. Errors are those of `read`."""
        return self._virtual.read_bytes(source, start, length)

    def is_remote(self, source: VirtualSource) -> bool:
        """Whether it takes requests to read the source."""
        return self._virtual.is_remote(source)

    def cached(self, ref: NativeRef | VirtualRef) -> bytes | None:
        """The chunk's bytes in the cache; None if they are not there, or there is no cache.

        Raises
        ------
        VirtualContainerError
            If the chunk is in a file elsewhere that the repository was not opened to read.
        """
        if self._cache is None or not self._is_kept(ref):
            return None
        return self._cache.find(ref)

    def keep(self, ref: NativeRef | VirtualRef, data: bytes) -> None:
        """Keep a whole chunk, if there is a cache; the caller has compared its checksum."""
        if self._cache is not None and len(data) == ref.length and self._is_kept(ref):
            self._cache.keep(ref, data)

    def _is_kept(self, ref: NativeRef | VirtualRef) -> bool:
        """Whether the ref says which bytes are meant, and fetching them takes a request."""
        if isinstance(ref, NativeRef):
            return True
        known = ref.crc32c is not None or ref.source.is_dated
        return self._virtual.is_remote(ref.source) and known

    def _missing(self, ref: NativeRef) -> MissingChunkError:
        error = MissingChunkError(
            f"chunk object {ref.key} of snapshot {self._snapshot_id} is not in "
            f"{self._storage.url}; restore it from a backup, write the chunk again, or open an "
            "older snapshot. It is not read as fill value"
        )
        error.key = ref.key
        return error

    def _checked(self, ref: NativeRef, data: bytes, start: int, length: int) -> bytes:
        if _problem(ref, data, start, length):
            # The object may have been restored or deleted since its file was opened. So this opens
            # it once more, as reads to the end of an object do.
            try:
                data = self._storage.get(ref.key, ref.offset + start)[:length]
            except ObjectNotFoundError as error:
                raise self._missing(ref) from error
        if problem := _problem(ref, data, start, length):
            raise CorruptObjectError(
                f"chunk object {ref.key} (offset {ref.offset}) of snapshot {self._snapshot_id} in "
                f"{self._storage.url} {problem}; restore it from a backup, write the chunk again, "
                "or open an older snapshot"
            )
        if self._cache is not None and length == ref.length:
            self._cache.keep(ref, data)
        return data


def _problem(ref: NativeRef, data: bytes, start: int, length: int) -> str | None:
    """Say what is wrong with a part of a chunk; only a whole one has a checksum."""
    if len(data) != length:
        return f"ends after {start + len(data)} of {ref.length} bytes"
    if length == ref.length and crc32c(data) != ref.crc32c:
        return "does not match its checksum"
    return None
