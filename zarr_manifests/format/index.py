"""The index of initialised chunks: which coordinates of the base's leaves have a chunk.

An entry describes one leaf, identified by node, box, and key and checksum of its manifest.
Manifests never change, so an entry stays true, and entries of other leaves are ignored. An index
that is outdated, incomplete or damaged makes lookups slower, never wrong. A branch names the
directory of entries, outside snapshots, so that commits need not write it. The bitmaps are in
objects of their own, fetched on demand.

A bitmap stores nothing if every coordinate of the box has a chunk, or none has. Otherwise it is one
bit for each coordinate or, if chunks are few, a column of linear indexes.

Invariant: the size of the object bounds the memory a bitmap takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.columns import MAX_ROWS, Column, decode_column, encode_column
from zarr_manifests.format.envelope import Fields, ObjectKind, check_numbers, is_sound
from zarr_manifests.format.records import POINTERS, BlobRef, MetadataObject, box_of, pointer, rows
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.ids import NODE_ID_BYTES

_INDEX_BITS: Final = 16
"""Approximate bits for each chunk in a column of linear indexes."""

type LeafName = tuple[bytes, Box, str, int]
"""Identity of a leaf: node id, box, key and checksum of its manifest."""


@dataclass(frozen=True, slots=True, eq=False)
class Bitmap:
    """Which coordinates of a box have a chunk.

    Parameters
    ----------
    box : Box
        The coordinates described.
    count : int
        How many of them have a chunk.
    bits : bytes or None
        One bit for each coordinate, in C order, highest bit of a byte first.
    index : int64[count] or None
        Linear indexes in the box, ascending. Without `bits` and `index`, every coordinate has a
        chunk, or none if `count` is 0.

    Raises
    ------
    CorruptObjectError
        If the fields contradict each other.
    """

    box: Box
    count: int
    bits: bytes | None = None
    index: Column | None = None

    def __post_init__(self) -> None:
        if self.bits is not None:
            # Counted without unpacking, so check the padding of the last byte separately.
            ones = int(np.bitwise_count(np.frombuffer(self.bits, np.uint8)).sum(dtype=np.int64))
            spare = -self.box.size % 8
            tail = self.bits[-1] & ((1 << spare) - 1) if self.bits else 0
            sound = len(self.bits) == -(-self.box.size // 8) and ones == self.count and not tail
        elif self.index is not None:
            sound = len(self.index) == self.count > 0
            sound = sound and 0 <= int(self.index[0]) and int(self.index[-1]) < self.box.size
            sound = sound and bool((np.diff(self.index) > 0).all())
        else:
            sound = self.count in (0, self.box.size)
        if not sound or (self.bits is not None and self.index is not None):
            raise CorruptObjectError("a bitmap of chunks contradicts itself")

    @classmethod
    def of(cls, table: ChunkTable) -> Bitmap:
        """The bitmap of a leaf's table, which has no UNSET rows."""
        count, size = len(table), table.box.size
        if count in (0, size):
            return cls(table.box, count)
        index = table.linear_index()
        if size > _INDEX_BITS * count:
            return cls(table.box, count, index=index)
        there = np.zeros(size, np.bool_)
        there[index] = True
        return cls(table.box, count, np.packbits(there).tobytes())

    def has(self, coords: IndexArray) -> npt.NDArray[np.bool_]:
        """Which of the coordinates (int64[n, ndim], all inside the box) have a chunk."""
        linear = self.box.ravel(coords)
        if self.bits is not None:
            data = np.frombuffer(self.bits, np.uint8)
            return np.asarray(data[linear >> 3] >> (7 - (linear & 7)).astype(np.uint8) & 1 == 1)
        if self.index is not None:
            at = np.minimum(np.searchsorted(self.index, linear), len(self.index) - 1)
            return np.asarray(self.index[at] == linear)
        return np.full(len(coords), self.count > 0)

    def coords(self, region: Box) -> IndexArray:
        """Coordinates (int64[n, ndim]) with a chunk in a region that overlaps the box."""
        lo = tuple(map(max, self.box.lo, region.lo))
        hi = tuple(map(min, self.box.hi, region.hi))
        shared = Box(lo, hi)
        if self.bits is None and self.index is None:
            found = np.arange(shared.size if self.count else 0, dtype=np.int64)
            return shared.unravel(found)
        first = self.box.ravel_one(lo)
        last = self.box.ravel_one(tuple(n - 1 for n in hi))
        if self.index is not None:
            found = self.index[np.searchsorted(self.index, first) :]
            found = found[: np.searchsorted(found, last, "right")]
        else:
            assert self.bits is not None  # as checked above
            some = np.frombuffer(self.bits, np.uint8)[first >> 3 : (last >> 3) + 1]
            found = np.flatnonzero(np.unpackbits(some)).astype(np.int64) + (first >> 3 << 3)
        coords = self.box.unravel(found)
        return coords[shared.holds(coords)]

    def pack(self) -> list[Any]:
        """As a list for msgpack."""
        index = None if self.index is None else encode_column(self.index)
        return [self.box.lo, self.box.hi, self.count, self.bits, index]

    @classmethod
    def parse(cls, value: Any, where: str) -> Bitmap:
        """From a list that `pack` made."""
        match value:
            case [list(lo), list(hi), int(count), bytes() | None as bits, index] if count >= 0:
                box, column = box_of(lo, hi, where), None
                if index is not None:
                    if count > MAX_ROWS:
                        raise CorruptObjectError(f"{where}: more chunks than a leaf can have")
                    column = decode_column(index, count)
                return cls(box, count, bits, column)
        raise CorruptObjectError(f"{where}: expected box, count and bits")


@dataclass(frozen=True, slots=True)
class Bitmaps(MetadataObject):
    """Bitmaps of several leaves in one object."""

    bitmaps: tuple[Bitmap, ...]

    _KIND = ObjectKind.INDEX
    _TYPE = "bitmaps"
    _FIELDS = (("bitmaps", "bitmaps", rows(Bitmap)),)


class UnknownIndex:
    """An index of a kind that this package does not know: only its checksum is compared."""

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> UnknownIndex:
        """Check the bytes."""
        if not is_sound(data, ref.length, ref.crc32c):
            raise CorruptObjectError(f"{ref.key} does not match its checksum")
        return cls()


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Entry of the index for one leaf.

    Parameters
    ----------
    node_id : bytes
        Node of the leaf.
    box : Box
        Box of the leaf.
    key, crc32c : str, int
        Key and checksum of the manifest that holds the leaf.
    count : int
        Number of its chunks.
    stored_bytes : int
        Sum of their lengths.
    blob : BlobRef
        The object with the leaf's bitmap.
    position : int
        Position of the bitmap in that object.
    """

    node_id: bytes
    box: Box
    key: str
    crc32c: int
    count: int
    stored_bytes: int
    blob: BlobRef
    position: int

    def __post_init__(self) -> None:
        check_numbers("index.entries", self.crc32c, most=2**32 - 1)
        check_numbers("index.entries", self.count, self.stored_bytes, self.position)

    @property
    def name(self) -> LeafName:
        """Identity of the leaf."""
        return self.node_id, self.box, self.key, self.crc32c


@dataclass(frozen=True, slots=True)
class IndexDirectory(MetadataObject):
    """All entries by leaf, newest last.

    `zones` are pointers to the pages of zone maps, by node id. `others` are pointers to other
    indexes of the branch, by name; writers keep them.
    """

    entries: Mapping[LeafName, IndexEntry]
    others: Mapping[str, BlobRef] = field(default_factory=dict)
    zones: Mapping[bytes, BlobRef] = field(default_factory=dict)

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """The objects with bitmaps that entries point to, each once."""
        return tuple({entry.blob.key: entry.blob for entry in self.entries.values()}.values())

    _KIND = ObjectKind.INDEX
    _TYPE = "directory"

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack."""
        blobs = {blob.key: i for i, blob in enumerate(self.blobs)}
        entries = [
            [
                *(e.node_id, e.box.lo, e.box.hi, e.key, e.crc32c),
                *(e.count, e.stored_bytes, blobs[e.blob.key], e.position),
            ]
            for e in self.entries.values()
        ]
        packed = [blob.bare().pack() for blob in self.blobs]
        found = {"blobs": packed, "entries": entries, "others": POINTERS.pack(self.others)}
        if self.zones:
            found["zones"] = [[n, self.zones[n].bare().pack()] for n in sorted(self.zones)]
        return found

    @classmethod
    def parse(cls, fields: Fields) -> IndexDirectory:
        """From a map that `pack` made."""
        blobs = [BlobRef.parse(blob) for blob in fields.maps("blobs")]
        entries = {}
        for value in fields.items("entries"):
            match value:
                case [
                    bytes(node),
                    list(lo),
                    list(hi),
                    str(key),
                    int(crc),
                    int(count),
                    int(stored),
                    int(blob),
                    int(position),
                ] if len(node) == NODE_ID_BYTES and 0 <= blob < len(blobs):
                    box = box_of(lo, hi, "index.entries")
                    entry = IndexEntry(node, box, key, crc, count, stored, blobs[blob], position)
                    entries[entry.name] = entry
                case _:
                    raise CorruptObjectError("index.entries: expected leaf, counts and bitmap")
        zones = {}
        for value in fields.items("zones"):
            match value:
                case [bytes(node), blob] if len(node) == NODE_ID_BYTES:
                    zones[node] = pointer(blob, "index.zones")
                case _:
                    raise CorruptObjectError("index.zones: expected node and pointer")
        return cls(entries, POINTERS.parse(fields, "others"), zones)
