"""Packs: small chunks share objects.

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

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import numpy as np
from msgspec import Struct, field

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
from zarr_manifests.format.zone_maps import Bounds
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import crc32c
from zarr_manifests.planning.meaning import zones_of_chunks
from zarr_manifests.storage import Storage


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
