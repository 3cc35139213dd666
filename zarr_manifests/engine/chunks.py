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

Packs: small chunks share objects
---------------------------------

A small chunk that is written is *staged*: its ref holds its bytes, so it is read from memory. When
about `pack-bytes` are staged, when the session commits, and when a copy of it is pickled, the
staged chunks are written as one object, a pack, ordered by node and coordinate. Native refs then
replace the staged ones. A batch of chunks that is written at once, of at least half of that size,
is a pack of its own.

Invariants:

- A pack holds the chunks that are live when it is built. Chunks that were overwritten, deleted or
  cut off earlier take no space in it; chunks overwritten during the write do.
- A staged ref knows its node and coordinate, and is live if the change set has it there. It becomes
  native only after its pack has been written. If the write fails, it stays staged and goes into
  another pack.
- A commit does not wait for a pack that another thread of the session is writing: it writes the
  chunks itself, and the other pack becomes garbage. After a commit or a discard, a pack's chunks
  are no longer live, so settling the pack changes nothing.
- Bounds of a staged chunk wait with it until its pack is settled, since an entry of a zone map
  names where its chunk lies.
- At most this much is staged: `pack-bytes`, the packs that are being written by threads of the
  session, and for each of these threads one chunk, or a batch of at most `pack-bytes`.

Not thread-safe: callers hold the workspace's lock for every call except `Pack.write`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from msgspec import Struct, field

from zarr_manifests.engine.change_set import ChangeSet
from zarr_manifests.engine.objects import create_own
from zarr_manifests.errors import (
    CorruptObjectError,
    MissingChunkError,
    ObjectNotFoundError,
    VirtualContainerError,
)
from zarr_manifests.format.chunk_table import (
    ChunkRef,
    ChunkTable,
    Column,
    InlineRef,
    NativeRef,
    RefKind,
    StoredRef,
    Unset,
    VirtualRef,
    VirtualSource,
)
from zarr_manifests.format.zone_maps import Bounds
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import crc32c
from zarr_manifests.planning.meaning import zones_of_chunks
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import REMOTE_CAPABILITIES, Capabilities, ReadsInto, coalesce
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


class Place(Struct):
    """Where a staged chunk was put last, and what is known of it.

    Attributes
    ----------
    node_id, coords : bytes, tuple of int
        Its node and coordinate.
    measured : (bytes, Bounds, int), optional
        What its bounds mean, bounds of several chunks, and the row of these that is its own.
    """

    node_id: bytes = b""
    coords: Coords = ()
    measured: tuple[bytes, Bounds, int] | None = None


class StagedRef(InlineRef, frozen=True, eq=False):
    """A chunk whose bytes are in memory and not written yet."""

    crc32c: int
    at: Place = field(default_factory=Place)

    @classmethod
    def of(cls, data: bytes) -> StagedRef:
        """The chunk with these bytes."""
        return cls(data, crc32c(data))

    def is_live(self, changes: ChangeSet) -> bool:
        """Whether the changes have it where it was put last."""
        refs = changes.chunks.get(self.at.node_id)
        return refs is not None and refs.get(self.at.coords) is self


def native_ref(key: str, data: bytes | memoryview) -> NativeRef:
    """A ref to the chunk object with that key and these bytes."""
    _, session, number = key.split("/")
    return NativeRef(session, int(number), 0, len(data), crc32c(data))


def native_rows(key: str, coords: IndexArray, lengths: Column, checksums: Column) -> ChunkTable:
    """Refs to the consecutive parts of the chunk object with that key; coordinates in C order."""
    _, session, number = key.split("/")
    box, rows = Box.around_coords(coords), len(coords)
    zeros = np.zeros(rows, np.int64)
    return ChunkTable(
        box,
        None if rows == box.size else box.ravel(coords),
        kind=zeros + RefKind.NATIVE,
        source=zeros,
        number=zeros + int(number),
        offset=np.cumsum(lengths) - lengths,
        length=lengths,
        crc32c=checksums,
        sources=(session,),
        inline=b"",
    )


class Pack:
    """Chunks to write as one object, in the order of their nodes and coordinates.

    Attributes
    ----------
    key : str
        Key of the object.
    written : bool
        Whether the object is known to be in the storage.
    staged : list of StagedRef
        The chunks.
    """

    def __init__(self, key: str, staged: Iterable[StagedRef]) -> None:
        self.key = key
        self.written = False
        self.staged = sorted(staged, key=attrgetter("at.node_id", "at.coords"))

    @property
    def nbytes(self) -> int:
        """Size of the object."""
        return sum(ref.length for ref in self.staged)

    def data(self) -> bytes:
        """The object's bytes."""
        return b"".join([ref.data for ref in self.staged])

    def write(self, storage: Storage, *, durable: bool) -> None:
        """Write the pack to the storage.

        Raises
        ------
        StorageError
            If the write failed, or the key holds something else.
        """
        create_own(storage, self.key, self.data(), durable=durable)
        self.written = True

    def settle(self, changes: ChangeSet) -> bool:
        """Put native refs in the place of the live ones, with their zones; whether any is live."""
        _, session, number = self.key.split("/")
        of, offset, settled = int(number), 0, False
        measured: dict[tuple[bytes, bytes, int], tuple[dict[Coords, StoredRef], list[int], Bounds]]
        measured = {}
        for ref in self.staged:
            if ref.is_live(changes):
                native = NativeRef(session, of, offset, ref.length, ref.crc32c)
                at, settled = ref.at, True
                changes.chunks[at.node_id][at.coords] = native
                if at.measured is not None:
                    meaning, bounds, row = at.measured
                    group = at.node_id, meaning, id(bounds)
                    refs, rows, _ = measured.setdefault(group, ({}, [], bounds))
                    refs[at.coords] = native
                    rows.append(row)
            offset += ref.length
        for (node_id, meaning, _), (refs, rows, bounds) in measured.items():
            # A pack is in the order of its coordinates, as a table is.
            its = bounds if rows == [*range(len(bounds))] else bounds.take(np.array(rows))
            zones = zones_of_chunks(meaning, ChunkTable.of(refs), its)
            if zones is not None:
                changes.add_zones(node_id, zones)
        return settled


class Packs:
    """The staged chunks of one session that are in no pack yet.

    Parameters
    ----------
    pack_bytes : int
        Size at which a pack is written.
    new_key : callable
        Returns an unused key for a chunk object.
    """

    def __init__(self, pack_bytes: int, new_key: Callable[[], str]) -> None:
        self._pack_bytes = pack_bytes
        self._new_key = new_key
        self._open: dict[int, StagedRef] = {}  # by identity: two may have the same bytes
        self._open_bytes = 0

    def stage(self, node_id: bytes, coords: Coords, ref: StagedRef) -> None:
        """Note a chunk that the change set is about to have at this place."""
        is_new = not ref.at.node_id
        ref.at.node_id, ref.at.coords = node_id, coords
        if is_new:
            self._open[id(ref)] = ref
            self._open_bytes += ref.length

    def full(self, changes: ChangeSet, nbytes: int) -> Pack | None:
        """The open pack if `nbytes` more do not fit, else None; callers write and settle it."""
        if not self._open or self._open_bytes + nbytes <= self._pack_bytes:
            return None
        self._keep(self._open.values(), changes)
        # Half, so that overwriting one chunk again and again does not scan all refs each time.
        if self._open_bytes + nbytes <= self._pack_bytes // 2:
            return None
        pack = Pack(self._new_key(), self._open.values())
        self._keep((), changes)
        return pack

    def all(self, changes: ChangeSet) -> list[Pack]:
        """Packs of all staged chunks, which stay staged until the packs are settled."""
        packs: list[list[StagedRef]] = []
        room = 0
        for _, _, ref in changes.refs():
            if isinstance(ref, StagedRef):
                if not packs or ref.length > room:
                    packs.append([])
                    room = self._pack_bytes
                packs[-1].append(ref)
                room -= ref.length
        return [Pack(self._new_key(), refs) for refs in packs]

    def settle(self, packs: Sequence[Pack], changes: ChangeSet) -> None:
        """Settle the packs that were written; chunks of the others go into another pack."""
        changes.unsynced += [pack.key for pack in packs if pack.written and pack.settle(changes)]
        lost = [ref for pack in packs if not pack.written for ref in pack.staged]
        self._keep((*self._open.values(), *lost), changes)

    def _keep(self, refs: Iterable[StagedRef], changes: ChangeSet) -> None:
        """Have these staged, as far as they are live."""
        self._open = {id(ref): ref for ref in refs if ref.is_live(changes)}
        self._open_bytes = sum(ref.length for ref in self._open.values())
