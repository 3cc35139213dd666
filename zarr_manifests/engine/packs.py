"""Packs: small chunks share objects.

A small chunk that is written is *staged*: its ref holds its bytes, so it is read from memory. When
about `pack-bytes` are staged, when the session commits, and when a copy of it is pickled, the
staged chunks are written as one object, a pack, ordered by node and coordinate. Native refs then
replace the staged ones. A batch of chunks that is written at once, of at least half of that size,
is a pack of its own.

Invariants:

- A pack holds the chunks that are live when it is built. Chunks that were overwritten, deleted or
  cut off earlier take no space in it; chunks overwritten during the write do.
- `Packs` knows the node and coordinate of every staged ref in the change set. A staged ref becomes
  native only after its pack has been written. If the write fails, it stays staged and goes into
  another pack.
- A commit does not wait for a pack that another thread of the session is writing: it writes the
  chunks itself, and the other pack becomes garbage. It does wait for background writes. After a
  commit or a discard, a pack's chunks are no longer known here, so settling the pack changes
  nothing.
- Entries of zone maps for staged chunks wait here until their pack is settled, since an entry names
  where its chunk lies.
- At most this much is staged: `pack-bytes`, the packs that are being written in the background or
  by threads of the session, and for each of these threads one chunk, or a batch of at most
  `pack-bytes`.

While an event loop goes on, a few threads write packs in the background (`PackWrites`):

- A pack is taken back exactly once, after its write has ended, and settled by whoever takes it:
  `PackWrites` changes no change set, and no thread that writes a pack waits for a lock.
- Up to `MOST` writes run while nobody waits. A thread that begins another waits for an
  earlier one.
- If no thread can be started for a write, it counts as not begun, and nobody waits for it.
- An error is kept for whoever takes the pack back. The pack's chunks are still staged then.
- A forked child has none of its parent's threads. It forgets their writes; the chunks are staged in
  the child as well.

Not thread-safe: callers hold the workspace's lock for every call except `Pack.write`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from operator import attrgetter
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.change_set import ChangeSet
from zarr_manifests.engine.metadata import create_own
from zarr_manifests.format.chunk_table import (
    ChunkTable,
    Column,
    InlineRef,
    NativeRef,
    RefKind,
    StoredRef,
)
from zarr_manifests.format.zone_maps import Bounds, ZoneTable
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import crc32c
from zarr_manifests.planning.meaning import zones_of_chunks
from zarr_manifests.runtime import Runtime, handed_over
from zarr_manifests.storage import Storage

MOST: Final = 4
"""Packs under way at once; a disk that is slow for a moment keeps nobody waiting so."""


class StagedRef(InlineRef, frozen=True, eq=False):
    """A chunk whose bytes are in memory and not written yet."""

    crc32c: int

    @classmethod
    def of(cls, data: bytes) -> StagedRef:
        """The chunk with these bytes."""
        return cls(data, crc32c(data))


class _Place(Struct, frozen=True):
    ref: StagedRef
    node_id: bytes
    coords: Coords


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
    """Chunks to write as one object.

    Attributes
    ----------
    key : str
        Key of the object.
    written : bool
        Whether the object is known to be in the storage.
    staged : tuple of StagedRef
        The chunks, in order.
    zones : list of (bytes, ZoneTable), optional
        Entries of zone maps of the chunks, by node, once they have been made.
    """

    def __init__(self, key: str, staged: Sequence[StagedRef]) -> None:
        self.key = key
        self.written = False
        self.zones: list[tuple[bytes, ZoneTable]] | None = None
        self.staged = tuple(staged)

    def rows(self) -> Iterator[tuple[StagedRef, NativeRef]]:
        """Each chunk's staged ref, and the native ref that replaces it after the write."""
        _, session, number = self.key.split("/")
        of, offset = int(number), 0
        for ref in self.staged:
            length = len(ref.data)
            yield ref, NativeRef(session, of, offset, length, ref.crc32c)
            offset += length

    @property
    def nbytes(self) -> int:
        """Size of the object."""
        return sum(len(ref.data) for ref in self.staged)

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

    async def write_async(self, storage: Storage) -> None:
        """Like `write`, for an event loop, and not durable."""
        data = self.data()
        if not await storage.create_async(self.key, data, durable=False):
            await asyncio.to_thread(create_own, storage, self.key, data, durable=False)
        self.written = True


class Packs:
    """The staged chunks of one session.

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
        # By identity: two chunks may have the same bytes.
        self._places: dict[int, _Place] = {}  # all staged refs, also in packs being written
        self._open: dict[int, StagedRef] = {}
        self._open_bytes = 0
        self._measured: dict[int, tuple[bytes, Bounds, int]] = {}

    def note_bounds(self, ref: StagedRef, meaning: bytes, bounds: Bounds, row: int) -> None:
        """Keep the bounds of a staged chunk, which are in that row, for its zone map."""
        if id(ref) in self._places:
            self._measured[id(ref)] = meaning, bounds, row

    def _add_zones(self, pack: Pack, changes: ChangeSet) -> None:
        """Add the entries of the pack's chunks to the changes."""
        if pack.zones is None:
            pack.zones = self._zones_of(pack)
        for node_id, zones in pack.zones:
            changes.add_zones(node_id, zones)

    def _zones_of(self, pack: Pack) -> list[tuple[bytes, ZoneTable]]:
        """The entries of the pack's chunks, by node."""
        found: dict[
            tuple[bytes, bytes, int], tuple[dict[Coords, StoredRef], list[int], Bounds]
        ] = {}
        for ref, native in pack.rows() if self._measured else ():
            if id(ref) in self._measured and id(ref) in self._places:
                meaning, bounds, row = self._measured[id(ref)]
                place = self._places[id(ref)]
                group = place.node_id, meaning, id(bounds)
                refs, rows, _ = found.setdefault(group, ({}, [], bounds))
                refs[place.coords] = native
                rows.append(row)
        made: list[tuple[bytes, ZoneTable]] = []
        for (node_id, meaning, _), (refs, rows, bounds) in found.items():
            # A pack is in the order of its coordinates, as a table is.
            every = rows == [*range(len(bounds))]
            its = bounds if every else bounds.take(np.array(rows))
            zones = zones_of_chunks(meaning, ChunkTable.of(refs), its)
            if zones is not None:
                made.append((node_id, zones))
        return made

    def stage(self, node_id: bytes, refs: Mapping[Coords, StoredRef]) -> None:
        """Record the places of a node's staged refs in the change set; others are left out."""
        for coords, ref in refs.items():
            if isinstance(ref, StagedRef):
                at = id(ref)
                is_new = at not in self._places
                self._places[at] = _Place(ref, node_id, coords)
                if is_new:
                    self._open_bytes += len(ref.data)
                    self._open[at] = ref

    def full(self, changes: ChangeSet, nbytes: int) -> Pack | None:
        """The open pack if `nbytes` more do not fit, else None; callers write and settle it."""
        if not self._open or self._open_bytes + nbytes <= self._pack_bytes:
            return None
        self._forget([ref for ref in self._open.values() if not self._is_live(ref, changes)])
        # Half, so that overwriting one chunk again and again does not scan all refs each time.
        if self._open_bytes + nbytes <= self._pack_bytes // 2:
            return None
        pack = self._pack(self._open.values())
        self._open, self._open_bytes = {}, 0
        return pack

    def all(self, changes: ChangeSet) -> list[Pack]:
        """Packs of all staged chunks, which stay staged until the packs are settled."""
        live = [p.ref for p in self._places.values() if self._is_live(p.ref, changes)]
        packs: list[list[StagedRef]] = []
        room = 0
        for ref in live:
            if not packs or ref.length > room:
                packs.append([])
                room = self._pack_bytes
            packs[-1].append(ref)
            room -= ref.length
        return [self._pack(refs) for refs in packs]

    def settled(self, packs: Sequence[Pack], changes: ChangeSet) -> ChangeSet:
        """The changes with native refs to these packs in place of the staged refs."""
        chunks = dict(changes.chunks)
        copied: set[bytes] = set()
        for pack in packs:
            for ref, native in pack.rows():
                place = self._places[id(ref)]
                if place.node_id not in copied:
                    chunks[place.node_id] = dict(chunks[place.node_id])
                    copied.add(place.node_id)
                chunks[place.node_id][place.coords] = native
        settled = replace(changes, chunks=chunks, zones=dict(changes.zones))
        for pack in packs:
            self._add_zones(pack, settled)
        return settled

    def has_some_of(self, pack: Pack) -> bool:
        """Whether any of the pack's chunks is staged here."""
        return any(id(ref) in self._places for ref in pack.staged)

    def settle(self, pack: Pack, changes: ChangeSet) -> None:
        """Replace the pack's staged refs by native ones if it was written, else reopen it."""
        if not pack.written:
            for ref in pack.staged:
                if id(ref) in self._places and id(ref) not in self._open:
                    self._open[id(ref)] = ref
                    self._open_bytes += ref.length
            return
        if not self._places:
            return
        used = False
        for ref, native in pack.rows():
            if id(ref) in self._places and self._is_live(ref, changes):
                place = self._places[id(ref)]
                changes.chunks[place.node_id][place.coords] = native
                used = True
        self._add_zones(pack, changes)
        self._forget(pack.staged)
        if used:
            changes.unsynced.append(pack.key)

    def relocate(self, changes: ChangeSet) -> None:
        """Record the places of all staged refs again, after the change set was replaced."""
        for node_id, refs in changes.chunks.items():
            self.stage(node_id, refs)

    def _is_live(self, ref: StagedRef, changes: ChangeSet) -> bool:
        place = self._places[id(ref)]
        refs = changes.chunks.get(place.node_id)
        return refs is not None and refs.get(place.coords) is ref

    def _pack(self, staged: Iterable[StagedRef]) -> Pack:
        places = [self._places[id(ref)] for ref in staged]
        places.sort(key=attrgetter("node_id", "coords"))
        return Pack(self._new_key(), [place.ref for place in places])

    def _forget(self, staged: Iterable[StagedRef]) -> None:
        for ref in staged:
            if self._open.pop(id(ref), None) is not None:  # all that is open has a place
                self._open_bytes -= ref.length
            self._measured.pop(id(ref), None)
            self._places.pop(id(ref), None)


class PackWrites:
    """The packs of one session that are being written."""

    def __init__(self, storage: Storage, runtime: Runtime) -> None:
        self._storage, self._runtime = storage, runtime
        self._under_way: list[tuple[Pack, Future[None]]] = []
        self._pid = os.getpid()

    @property
    def pays(self) -> bool:
        """Whether a write takes so long that a thread of its own is worth while.

        In memory it does not; and from far away it is an event loop that waits for it.
        """
        able = self._storage.capabilities
        return able.inline and able.durable

    @property
    def some_ended(self) -> bool:
        """Whether there is a pack to take back."""
        return bool(self._under_way) and any(done.done() for _, done in self._mine())

    def begin(self, pack: Pack) -> Future[None] | None:
        """Begin to write a pack; what to wait for first, if too many are under way.

        Raises
        ------
        RuntimeError
            If there is no thread for it, as when the interpreter exits; it is not begun then.
        """
        done, under_way = Future[None](), self._mine()
        under_way.append((pack, done))
        try:
            self._runtime.background(handed_over(partial(self._write, pack, done)))
        except RuntimeError:
            under_way.remove((pack, done))
            raise
        return under_way[0][1] if len(under_way) > MOST else None

    def _write(self, pack: Pack, done: Future[None]) -> None:
        try:
            pack.write(self._storage, durable=False)
        except BaseException as error:  # noqa: BLE001 - raised where the pack is taken back
            done.set_exception(error)
        else:
            done.set_result(None)

    def take(self, *, all_of_them: bool = False) -> list[tuple[Pack, Future[None]]]:
        """Take back the packs whose writes have ended; or all, waiting for them."""
        under_way = self._mine()
        if all_of_them:
            wait([done for _, done in under_way])
        taken = [each for each in under_way if each[1].done()]
        self._under_way = [each for each in under_way if each not in taken]
        return taken

    def _mine(self) -> list[tuple[Pack, Future[None]]]:
        if self._pid != os.getpid():
            self._under_way, self._pid = [], os.getpid()
        return self._under_way
