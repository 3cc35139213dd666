"""Chunk bytes: names of a session's objects, and reads of exactly a chunk's range.

Invariants: a referenced chunk that is missing or damaged raises an error and never reads as `None`;
a whole chunk's checksum is verified on every read; objects are written put-if-absent, under a
session id that no other process uses, since a forked child draws its own before it writes.

Bytes of the chunks that are likely to be read next, fetched before anybody asks for them
-----------------------------------------------------------------------------------------

Zarr asks for ten chunks at a time, by default, and for the next ones once it has some of them. From
far away, that is ten small requests in flight at most. So where chunks are read in order (see
`read_ahead`), the next ones are fetched in spans of several megabytes, all at once.

Invariants:

- Requests are tasks of the event loop that asks for chunks; another loop does not wait for them.
  Whatever goes wrong with a request, a caller reads its chunk by itself, and gets that error.
- Bytes are given to one caller, who verifies them. Two windows are held, each of at most
  `MOST_BYTES`.

Combining reads of neighbouring ranges into one request, in event loops on remote storages
------------------------------------------------------------------------------------------

All reads that are asked for in one turn of an event loop and the next are planned together
(`storage.protocol`), within the storage's bounds. The requests then run in parallel.
Two turns, since Zarr asks for one chunk in the turn in which a request ends, and for the others in
the place of those that came with it in the next.
Invariants:

- Every caller gets its own bytes (fewer only at the end of the object), or the error of the request
  that contained its range. Errors of other requests do not affect it.
- Cancelling one caller does not affect the others.
- State is per event loop and turn: loops of different threads neither wait for each other nor share
  requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct

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
    Unset,
    VirtualRef,
    VirtualSource,
)
from zarr_manifests.ids import crc32c
from zarr_manifests.storage.protocol import (
    REMOTE_CAPABILITIES,
    Capabilities,
    ReadsInto,
    coalesce,
)
from zarr_manifests.virtual.virtual_refs import VirtualReader

if TYPE_CHECKING:
    import asyncio

    from zarr_manifests.engine.view import ReadContext


SPARE: Final = 0.15
"""What may be fetched in vain from a remote storage, as a share of what is wanted."""


class _Span(NamedTuple):
    """A request that has begun, and where its bytes begin."""

    task: asyncio.Task[bytes]
    start: int

    @classmethod
    def begun(cls, read: Coroutine[Any, Any, bytes], start: int) -> _Span:
        """A request in the running event loop."""
        import asyncio

        task = asyncio.get_running_loop().create_task(read)
        task.add_done_callback(_noted)
        return cls(task, start)


def _noted(task: asyncio.Task[bytes]) -> None:
    """Take note of an error of a request, else the event loop complains if nobody has."""
    if not task.cancelled():
        task.exception()


class _Turn[K: Hashable](Struct, eq=False):
    """Ranges asked for in two turns of the loop, by key."""

    loop: asyncio.AbstractEventLoop
    asked: dict[K, list[_Asked]] = {}


class _Asked(Struct, eq=False):
    """A range, and the request that it is part of, once that has begun."""

    start: int
    length: int
    span: asyncio.Future[_Span]


class CoalescedReads[K: Hashable]:
    """Reads ranges of immutable objects, combining neighbouring ones.

    Parameters
    ----------
    read : callable
        Reads a range of the object with the given key, as `Storage.get_async` does.
    capabilities : Capabilities
        Which ranges share a request.
    """

    def __init__(
        self, read: Callable[[K, int, int], Coroutine[Any, Any, bytes]], capabilities: Capabilities
    ) -> None:
        self._read = read
        self._gap_bytes = capabilities.gap_bytes
        self._span_bytes = capabilities.span_bytes
        self._here = threading.local()

    async def get(self, key: K, start: int, length: int) -> bytes:
        """Like `Storage.get_async`."""
        import asyncio

        loop = asyncio.get_running_loop()
        turn: _Turn[K] | None = getattr(self._here, "turn", None)
        if turn is None or turn.loop is not loop:
            turn = self._here.turn = _Turn(loop)
            loop.call_soon(loop.call_soon, self._end, turn)  # when the next turn ends
        asked = _Asked(start, length, loop.create_future())
        turn.asked.setdefault(key, []).append(asked)
        span = await asked.span
        data = await asyncio.shield(span.task)  # who is cancelled cancels no others
        at = start - span.start
        return data[at : at + length]

    def _end(self, turn: _Turn[K]) -> None:
        if getattr(self._here, "turn", None) is turn:
            self._here.turn = None
        for key, all_asked in turn.asked.items():
            asked = [one for one in all_asked if not one.span.done()]  # skip cancelled ones
            for plan in coalesce(
                [one.start for one in asked],
                [one.length for one in asked],
                gap_bytes=self._gap_bytes,
                span_bytes=self._span_bytes,
                spare=SPARE,
            ):
                span = _Span.begun(self._read(key, plan.start, plan.length), plan.start)
                for i in plan.members:
                    asked[i].span.set_result(span)


# --- bytes ahead --------------------------------------------------------------------------------


MOST_BYTES: Final = 32 * 1024 * 1024


class BytesAhead:
    """Fetches chunks of one reader ahead.

    Parameters
    ----------
    read : callable
        `read(ref, start, length)` gives bytes of the object or file that a chunk is in.
    capabilities : Capabilities
        Which ranges share a request.
    """

    def __init__(
        self,
        read: Callable[[NativeRef | VirtualRef, int, int], Coroutine[Any, Any, bytes]],
        capabilities: Capabilities,
    ) -> None:
        self._read = read
        self._gap_bytes, self._span_bytes = capabilities.gap_bytes, capabilities.span_bytes
        self._newest: dict[NativeRef | VirtualRef, _Span] = {}
        self._older: dict[NativeRef | VirtualRef, _Span] = {}

    def fetch(self, refs: Iterable[NativeRef | VirtualRef]) -> None:
        """Begin to fetch these chunks, up to `MOST_BYTES` of them, in the running event loop."""
        by_object: dict[tuple[str, int] | VirtualSource, list[NativeRef | VirtualRef]] = {}
        nbytes = 0
        for ref in refs:
            nbytes += ref.length
            if nbytes > MOST_BYTES:
                break
            where = ref.source if isinstance(ref, VirtualRef) else (ref.source, ref.number)
            by_object.setdefault(where, []).append(ref)
        window: dict[NativeRef | VirtualRef, _Span] = {}
        for chunks in by_object.values():
            for request in coalesce(
                [ref.offset for ref in chunks],
                [ref.length for ref in chunks],
                gap_bytes=self._gap_bytes,
                span_bytes=self._span_bytes,
                spare=SPARE,
            ):
                first = chunks[request.members[0]]
                read = self._read(first, request.start, request.length)
                span = _Span.begun(read, request.start)
                window.update(dict.fromkeys((chunks[i] for i in request.members), span))
        self._older, self._newest = self._newest, window

    async def take(self, ref: NativeRef | VirtualRef) -> memoryview | None:
        """The chunk, not verified yet; None if it is to be read by itself."""
        span = self._newest.pop(ref, None) or self._older.pop(ref, None)
        if span is None:
            return None
        import asyncio

        task = span.task
        if not task.done():
            if task.get_loop() is not asyncio.get_running_loop():
                return None
            await asyncio.wait([task])  # who is cancelled cancels no others
        if task.cancelled() or task.exception() is not None:
            return None  # who asks for a chunk reads it, and gets the error
        data, at = task.result(), ref.offset - span.start
        return memoryview(data)[at : at + ref.length] if len(data) >= at + ref.length else None


# --- chunks -------------------------------------------------------------------------------------


_SYNCED_ABREAST: Final = 8
"""A disk takes many calls at once; more than this do not make it faster."""
_LARGE_BYTES: Final = 512 * 1024
"""From this size on, a local read in an event loop runs in a thread: several chunks are then read
and checked in parallel, which outweighs the cost of the thread."""


def sync_parts(keys: Sequence[str]) -> list[Sequence[str]]:
    """The keys in a few parts to make durable in parallel; no part is empty."""
    return [keys[i::_SYNCED_ABREAST] for i in range(min(len(keys), _SYNCED_ABREAST))]


class ChunkReader:
    """Reads chunks of one snapshot, or of a session based on it."""

    def __init__(self, context: ReadContext, snapshot_id: str) -> None:
        self._storage = storage = context.storage
        self._inline = storage.capabilities.inline
        self._far = (
            None if self._inline else CoalescedReads(storage.get_async, storage.capabilities)
        )
        self.virtual = VirtualReader(context.containers)
        self._elsewhere = CoalescedReads(self.virtual.read_source, REMOTE_CAPABILITIES)
        self._snapshot_id = snapshot_id
        self._cache = context.chunks
        far = REMOTE_CAPABILITIES if self._inline else storage.capabilities
        self._ahead = BytesAhead(self._read_span, far)

    def alike(self, one: StoredRef, other: StoredRef) -> bool:
        """Whether two refs have the same bytes, which are read where the refs differ.

        Virtual chunks have to be the same range of the same file.
        """
        if one == other or isinstance(one, Unset | VirtualRef):
            return one == other
        if isinstance(other, Unset | VirtualRef):
            return False
        return self.read(one, 0, one.length) == self.read(other, 0, other.length)

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
        if isinstance(ref, InlineRef):
            return ref.data[start : start + length]
        if (kept := self.cached(ref)) is not None:
            return kept[start : start + length]
        if isinstance(ref, VirtualRef):
            data = self.virtual.read(ref, start, length)
            self.keep(ref, data)
            return data
        try:
            data = self._storage.get(ref.key, ref.offset + start, length)
        except ObjectNotFoundError as error:
            raise self._missing(ref) from error
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
        if isinstance(ref, VirtualRef) and length and self.virtual.is_remote(ref.source):
            if (kept := self.cached(ref)) is not None:
                return kept[start : start + length]
            known = await self._ahead.take(ref) if length == ref.length else None
            if known is not None:
                data = bytes(known)
            else:
                data = await self._elsewhere.get(ref.source, ref.offset + start, length)
            self.keep(ref, self.virtual.checked(ref, data, length))
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
                    remote[ref.source] = self.virtual.is_remote(ref.source)
                if not remote[ref.source]:
                    return False
            elif self._inline:
                return False
            return self._cache is None or not self._cache.holds(ref)

        with suppress(VirtualContainerError):  # which reading the chunk raises
            self._ahead.fetch([ref for ref in refs if is_due(ref)])

    async def _read_span(self, ref: NativeRef | VirtualRef, start: int, length: int) -> bytes:
        if isinstance(ref, VirtualRef):
            return await self.virtual.read_source(ref.source, start, length)
        return await self._storage.get_async(ref.key, start, length)

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
        return self.virtual.is_remote(ref.source) and known

    def _missing(self, ref: NativeRef) -> MissingChunkError:
        error = MissingChunkError(
            f"chunk object {ref.key} of snapshot {self._snapshot_id} is not in "
            f"{self._storage.url}; restore it from a backup, write the chunk again, or open an "
            "older snapshot. It is not read as fill value"
        )
        error.key = ref.key
        return error

    def _checked(self, ref: NativeRef, data: bytes, start: int, length: int) -> bytes:
        problem = _problem(ref, data, start, length)
        if problem is not None:
            # The object may have been restored or deleted since its file was opened. So this opens
            # it once more, as reads to the end of an object do.
            try:
                data = self._storage.get(ref.key, ref.offset + start)[:length]
            except ObjectNotFoundError as error:
                raise self._missing(ref) from error
            problem = _problem(ref, data, start, length)
        if problem is not None:
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
