"""Packs: small chunks share objects.

A small chunk that is written is *staged*: its ref holds its bytes, so it is read from memory. When
about `pack-bytes` are staged, and when the session commits or a copy of it travels, what is staged
is written as one object, a pack, in the order of nodes and coordinates; then the staged refs are
replaced by native ones.

Invariants:

- A pack holds the chunks that are live when it is put together. What was overwritten, deleted or
  cut off before that leaves no byte; what is overwritten while the pack is being written does.
- A staged ref that lies in the change set is known here with the place it lies at. It becomes
  native only after the pack that holds it has been written; until then, whatever fails, it stays
  staged and goes into another pack.
- A pack that is being written by one of the session's own threads does not keep another thread's
  commit waiting: the commit writes the chunks itself, and the other's pack is left over. For what
  is written in the background (`pack_writes`) the commit waits. After a commit or a discard a
  pack's chunks are unknown here, so that settling it changes nothing.
- Staged are at most `pack-bytes`, the packs being written in the background and by as many threads
  of the session, and for each of these threads one chunk.

Not thread-safe: the workspace's lock is held for every call but `Pack.write`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final, NamedTuple

from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.objects.metadata import create_own
from zarr_manifests.format.chunk_table import InlineRef, NativeRef
from zarr_manifests.grid import Coords
from zarr_manifests.ids import crc32c
from zarr_manifests.storage import Storage

__all__ = ["Pack", "Packs", "StagedRef", "native_ref"]


@dataclass(frozen=True, slots=True, eq=False)
class StagedRef(InlineRef):
    """A chunk whose bytes are in memory and still to be written."""

    crc32c: int

    @classmethod
    def of(cls, data: bytes) -> StagedRef:
        """The chunk with these bytes."""
        # As `cls(...)`, which takes twice as long.
        new: StagedRef = _new(cls)
        _set_data(new, data)
        _set_checksum(new, crc32c(data))
        return new


_new: Final = object.__new__
_new_tuple: Final = tuple.__new__
_set_data: Final = InlineRef.__dict__["data"].__set__
_set_checksum: Final = StagedRef.__dict__["crc32c"].__set__


class _Place(NamedTuple):
    ref: StagedRef
    node_id: bytes
    coords: Coords


def native_ref(key: str, offset: int, length: int, checksum: int) -> NativeRef:
    """A ref to a range of the chunk object with that key."""
    _, session, number = key.split("/")
    return NativeRef(session, int(number), offset, length, checksum)


class Pack:
    """Chunks that are to be written as one object.

    Attributes
    ----------
    key : str
        The object's.
    written : bool
        Whether it is known to be in the storage.
    staged : tuple of StagedRef
        The chunks, in order.
    """

    def __init__(self, key: str, staged: Sequence[StagedRef]) -> None:
        self.key = key
        self.written = False
        self.staged = tuple(staged)

    def rows(self) -> Iterator[tuple[StagedRef, NativeRef]]:
        """Each chunk as it is staged, and as it is once the pack has been written."""
        _, session, number = self.key.split("/")
        of, offset = int(number), 0
        for ref in self.staged:
            length = len(ref.data)
            yield ref, _new_tuple(NativeRef, (session, of, offset, length, ref.crc32c))
            offset += length

    @property
    def nbytes(self) -> int:
        """Size of the object."""
        return sum(len(ref.data) for ref in self.staged)

    def data(self) -> bytes:
        """The object's bytes."""
        return b"".join([ref.data for ref in self.staged])

    def write(self, storage: Storage, *, durable: bool) -> None:
        """Put it into the storage.

        Raises
        ------
        StorageError
            If it could not be written, or something else lies there.
        """
        create_own(storage, self.key, self.data(), durable=durable)
        self.written = True

    async def write_async(self, storage: Storage) -> None:
        """As `write`, for an event loop, and not durably."""
        data = self.data()
        if not await storage.create_async(self.key, data, durable=False):
            await asyncio.to_thread(create_own, storage, self.key, data, durable=False)
        self.written = True


class Packs:
    """What is staged in one session.

    Parameters
    ----------
    pack_bytes : int
        Size at which a pack is written.
    new_key : callable
        Gives the key of a chunk object that nobody has used.
    """

    def __init__(self, pack_bytes: int, new_key: Callable[[], str]) -> None:
        self._pack_bytes = pack_bytes
        self._new_key = new_key
        # By identity: two chunks may have the same bytes.
        self._places: dict[int, _Place] = {}  # all that is staged, also in packs being written
        self._open: dict[int, StagedRef] = {}
        self._open_bytes = 0

    def stage(self, ref: StagedRef, node_id: bytes, coords: Coords) -> None:
        """Note that the ref lies at this place of the change set now."""
        at = id(ref)
        if at not in self._places and at not in self._open:
            self._open[at] = ref
            self._open_bytes += len(ref.data)
        self._places[at] = _new_tuple(_Place, (ref, node_id, coords))

    def full(self, changes: ChangeSet, nbytes: int) -> Pack | None:
        """The open pack, if `nbytes` more do not fit in; the caller writes and settles it."""
        if not self._open or self._open_bytes + nbytes <= self._pack_bytes:
            return None
        self._forget([ref for ref in self._open.values() if not self._is_live(ref, changes)])
        # Half of it, so that a chunk written over and over does not make it look through each time.
        if self._open_bytes + nbytes <= self._pack_bytes // 2:
            return None
        pack = self._pack(self._open.values())
        self._open, self._open_bytes = {}, 0
        return pack

    def all(self, changes: ChangeSet) -> list[Pack]:
        """Packs of everything that is staged; it stays staged until they are settled."""
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

    def settled(self, packs: Iterable[Pack], changes: ChangeSet) -> ChangeSet:
        """The changes as they are once these packs have been written."""
        chunks = dict(changes.chunks)
        copied: set[bytes] = set()
        for pack in packs:
            for ref, native in pack.rows():
                place = self._places[id(ref)]
                if place.node_id not in copied:
                    chunks[place.node_id] = dict(chunks[place.node_id])
                    copied.add(place.node_id)
                chunks[place.node_id][place.coords] = native
        return replace(changes, chunks=chunks)

    def has_some_of(self, pack: Pack) -> bool:
        """Whether any of the pack's chunks is staged here."""
        return any(id(ref) in self._places for ref in pack.staged)

    def settle(self, pack: Pack, changes: ChangeSet) -> None:
        """Replace the pack's staged refs by native ones if it was written, else open it again."""
        if not pack.written:
            self._reopen(ref for ref in pack.staged if id(ref) in self._places)
            return
        if not self._places:
            return
        used = False
        for ref, native in pack.rows():
            if id(ref) in self._places and self._is_live(ref, changes):
                place = self._places[id(ref)]
                changes.chunks[place.node_id][place.coords] = native
                used = True
        self._forget(pack.staged)
        if used:
            changes.unsynced.append(pack.key)

    def relocate(self, changes: ChangeSet) -> None:
        """Find anew where everything lies, when changes were taken back."""
        for node_id, coords, ref in changes.refs():
            if isinstance(ref, StagedRef):
                self.stage(ref, node_id, coords)

    def _is_live(self, ref: StagedRef, changes: ChangeSet) -> bool:
        _, node_id, coords = self._places[id(ref)]
        refs = changes.chunks.get(node_id)
        return refs is not None and refs.get(coords) is ref

    def _pack(self, staged: Iterable[StagedRef]) -> Pack:
        places = [self._places[id(ref)] for ref in staged]
        places.sort(key=itemgetter(1, 2))
        return Pack(self._new_key(), [place.ref for place in places])

    def _reopen(self, staged: Iterable[StagedRef]) -> None:
        for ref in staged:
            if id(ref) not in self._open:
                self._open[id(ref)] = ref
                self._open_bytes += ref.length

    def _forget(self, staged: Iterable[StagedRef]) -> None:
        for ref in staged:
            self._places.pop(id(ref), None)
            if self._open.pop(id(ref), None) is not None:
                self._open_bytes -= ref.length
