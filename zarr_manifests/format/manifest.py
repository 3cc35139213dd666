"""Manifests: chunk tables of one or more nodes in one object, and pointers to them.

A `ManifestRef` lists the (node, box) tables of a manifest, so readers know which manifests they
need before they fetch any. Tables lie in blocks, small ones together. A manifest of several blocks
is stored so that each block is compressed by itself, and its `ManifestRef` says where: a reader
fetches and verifies a block without the rest. Invariant: a table is decoded on demand, so a lookup
in one node never pays for the other nodes in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Final

import msgpack
from msgspec import Struct

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.chunk_table import MAX_ROWS, ChunkTable, StoredTable
from zarr_manifests.format.records import (
    HEADER_BYTES,
    MAX_EXPANSION,
    MAX_NUMBER,
    STORED,
    BlobRef,
    BlockRef,
    ListRecord,
    NodeId,
    Number,
    ObjectKind,
    Record,
    are,
    check_numbers,
    check_texts,
    compress,
    decode,
    decompress,
    encode,
    expanded_at_most,
    frame,
    pack,
    plain,
    record,
    refusing,
    unpack,
)
from zarr_manifests.grid import Box
from zarr_manifests.ids import NODE_ID_BYTES, crc32c

_WHOLE_BYTES: Final = 256 * 1024
"""A manifest of at most about this size is one block: one request reads it."""
_MUCH_SMALLER: Final = 4
"""Small tables may compress so well that the manifest is small after all."""
_BLOCK_BYTES: Final = 64 * 1024
"""Tables up to about so many bytes share a block."""
_ROWS_FREELY: Final = 1 << 20
_ROWS_A_BYTE: Final = 8
_VALUES_FREELY: Final = 1 << 22
_VALUES_A_BYTE: Final = 8
_RAW, _ZSTD = b"\0", b"\1"

type Place = tuple[Number, Number, Number, Number]
"""Where a table is: offset, length and crc32c of its block in the object, and its number there."""


class Part(ListRecord, frozen=True):
    """Directory entry of one chunk table: node, box and number of rows."""

    node_id: NodeId
    box: Box
    count: Number

    def __post_init__(self) -> None:
        if len(self.node_id) != NODE_ID_BYTES or not 0 <= self.count <= MAX_NUMBER:
            raise CorruptObjectError("a chunk table with an invalid node id or number of rows")
        if max(self.box.hi, default=0) > MAX_NUMBER:
            raise CorruptObjectError(f"a chunk table whose box exceeds {MAX_NUMBER}: {self.box}")


def by_node[T](items: Iterable[tuple[Part, T]]) -> dict[bytes, list[T]]:
    """The items by the node of their part, in order."""
    found: dict[bytes, list[T]] = {}
    for part, item in items:
        found.setdefault(part.node_id, []).append(item)
    return found


class ManifestRef(Record, frozen=True, dict=True, rename={"packed_for": "set", "nbytes": "bytes"}):
    """Pointer to a manifest, with the directory of its tables.

    Parameters
    ----------
    blob : BlobRef
        The manifest.
    parts : tuple of Part
        Its tables, in order.
    merged : tuple of int
        In a base: for each part, the sequence up to which it includes all changes. Empty if that
        is 0 for all.
    packed_for : str
        In a base: name of the manifest set it was packed for; empty for none.
    places : tuple of (int, int, int, int)
        Where each part's table is in the object; empty if that is read whole.
    nbytes : tuple of int
        In a base: the bytes of the chunks of each part.

    Raises
    ------
    CorruptObjectError
        If `merged`, `places` or `nbytes` is not empty and has not one item for each part, or a
        place is not in the object.
    """

    blob: BlobRef
    parts: tuple[Part, ...] = ()
    merged: tuple[Number, ...] = ()
    packed_for: str = ""
    places: tuple[Place, ...] = ()
    nbytes: tuple[Number, ...] = ()

    def __post_init__(self) -> None:
        columns = self.merged, self.places, self.nbytes
        if any(of and len(of) != len(self.parts) for of in columns):
            raise CorruptObjectError(f"{self.blob.key}: expected one number for each part")
        check_numbers(self.blob.key, *self.merged, *self.nbytes)
        check_texts(self.blob.key, self.packed_for)
        for offset, length, crc, number in self.places:
            within = HEADER_BYTES <= offset < offset + length <= self.blob.length
            if not (within and 0 <= crc < 2**32 and 0 <= number < MAX_ROWS):
                raise CorruptObjectError(f"{self.blob.key}: a table lies outside of the manifest")

    def leaves(self) -> list[tuple[Part, int]]:
        """Each part and the sequence it is merged to."""
        return list(zip(self.parts, self.merged or (0,) * len(self.parts), strict=True))

    def bytes_of(self, part: Part) -> int:
        """The bytes of the part's chunks, in a base.

        Raises
        ------
        CorruptObjectError
            If the base does not say them.
        """
        if not self.nbytes:
            raise CorruptObjectError(f"{self.blob.key}: a leaf without the bytes of its chunks")
        return self.nbytes[self._numbers[part]]

    @cached_property
    def _numbers(self) -> Mapping[Part, int]:
        return {part: number for number, part in enumerate(self.parts)}

    def block(self, part: Part) -> tuple[BlobRef, int] | None:
        """The block with the part's table, and its number there; None if it is read whole."""
        if not self.places:
            return None
        offset, length, crc, number = self.places[self._numbers[part]]
        return BlockRef(self.blob.key, length, crc, start=offset), number


class Block(Struct, frozen=True):
    """The tables of a block of a manifest, each still encoded."""

    tables: tuple[bytes, ...]

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Block:
        """The block that the pointer names.

        Raises
        ------
        CorruptObjectError
            If the bytes are not those of the block.
        """
        if len(data) != ref.length or crc32c(data) != ref.crc32c:  # the only check of these bytes
            raise CorruptObjectError(
                f"{ref.key}: the checksum does not match the bytes of the block at {ref.offset}; "
                "restore the object from a backup, or open an older snapshot that does not use it"
            )
        with refusing(ref.key):
            return cls.parse(data, MAX_EXPANSION * len(data))

    @classmethod
    def parse(cls, data: bytes, most: int) -> Block:
        """From the bytes that `pack` made; compressed content may have at most so many bytes."""
        codec, body = data[:1], data[1:]
        if codec not in (_RAW, _ZSTD):
            raise CorruptObjectError("a block has an unknown codec")
        tables = unpack(decompress(body, most) if codec == _ZSTD else body)
        if not isinstance(tables, list) or not are(bytes, tables):
            raise CorruptObjectError("a block is no list of tables")
        return cls(tuple(tables))

    def pack(self, *, alone: bool) -> bytes:
        """The bytes; compressed, if the block is to be read alone and that makes it smaller."""
        raw = pack(self.tables)
        packed = compress(raw) if alone else raw
        smaller = len(packed) < len(raw) <= MAX_EXPANSION * len(packed)
        return _ZSTD + packed if smaller else _RAW + raw


class Manifest(Record, frozen=True, dict=True):
    """Chunk tables of one or more nodes, each still encoded.

    Parameters
    ----------
    parts : tuple of (Part, bytes)
        Each table's directory entry, and the encoded table.
    """

    parts: tuple[tuple[Part, bytes], ...] = ()

    @classmethod
    def of(cls, tables: Iterable[tuple[bytes, ChunkTable]]) -> Manifest:
        """The manifest of these (node id, table) pairs."""
        return cls(
            tuple(
                (Part(node, table.box, len(table)), encode_table(table)) for node, table in tables
            )
        )

    def directory(self) -> tuple[Part, ...]:
        """The directory of its tables."""
        return tuple(part for part, _ in self.parts)

    def tables(self, node_id: bytes) -> list[ChunkTable]:
        """The tables of one node, decoded."""
        return [self.decode(part, data) for part, data in self.of_node(node_id)]

    def of_node(self, node_id: bytes) -> Sequence[tuple[Part, bytes]]:
        """The tables of one node, each with its directory entry and still encoded."""
        return self._of_nodes.get(node_id, ())

    @cached_property
    def _of_nodes(self) -> Mapping[bytes, Sequence[tuple[Part, bytes]]]:
        return by_node((item[0], item) for item in self.parts)

    @staticmethod
    def decode(part: Part, data: bytes) -> ChunkTable:
        """Decode one of the tables."""
        stored = record(StoredTable, unpack(data), "table")
        if stored.n != part.count:
            raise CorruptObjectError("a chunk table has not the rows that its manifest lists")
        _check_size(stored.n, stored.col, len(data))
        try:
            table = ChunkTable.parse(stored)
        except InvalidArgumentError as error:  # an invalid box
            raise CorruptObjectError(f"a chunk table is malformed: {error}") from error
        if table.box != part.box:
            raise CorruptObjectError("a chunk table has another box than its manifest lists")
        return table

    def data(self, part: Part) -> bytes:
        """The encoded table of that part.

        Raises
        ------
        CorruptObjectError
            If there is none, since the node would read wrongly.
        """
        found = self._of_parts.get(part)
        if found is None:
            raise CorruptObjectError("a manifest has no chunk table such as the snapshot says")
        return found

    @cached_property
    def _of_parts(self) -> Mapping[Part, bytes]:
        return dict(self.parts)

    def encode(self) -> tuple[bytes, tuple[Place, ...]]:
        """The object's bytes, and where its tables are in it; nothing of that if it is small."""
        nbytes = sum(len(data) for _, data in self.parts)
        if nbytes <= _MUCH_SMALLER * _WHOLE_BYTES:
            block = Block(tuple(data for _, data in self.parts)).pack(alone=False)
            whole = encode(ObjectKind.MANIFEST, {"blocks": [[self.directory(), block]]})
            if nbytes <= _WHOLE_BYTES or len(whole) <= _WHOLE_BYTES:
                return whole, ()
        return _in_blocks(self.parts)

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Manifest:
        """Decode a manifest; its tables stay encoded."""
        told: Any = {"crc": ref.crc32c, "length": ref.length}
        parse = partial(_of_blocks, most=expanded_at_most(data))
        return decode(data, ObjectKind.MANIFEST, parse, ref.key, **told)


NO_TABLES: Final = Manifest(())


def _in_blocks(parts: Sequence[tuple[Part, bytes]]) -> tuple[bytes, tuple[Place, ...]]:
    """The bytes of a manifest of several blocks, and where each table is."""
    groups: list[list[tuple[Part, bytes]]] = []
    room = 0
    for part, data in parts:
        if len(data) > room:
            groups.append([])
            room = _BLOCK_BYTES
        groups[-1].append((part, data))
        room -= len(data)
    packer = msgpack.Packer(use_bin_type=True)
    written = [packer.pack_map_header(1), packer.pack("blocks")]
    written.append(packer.pack_array_header(len(groups)))
    places: list[Place] = []
    end = HEADER_BYTES + sum(map(len, written))
    for group in groups:
        block = Block(tuple(data for _, data in group)).pack(alone=True)
        listed = plain([part for part, _ in group])
        written += [packer.pack_array_header(2), packer.pack(listed), packer.pack(block)]
        end += sum(map(len, written[-3:]))
        places += [(end - len(block), len(block), crc32c(block), n) for n in range(len(group))]
    payload = b"".join(written)
    return frame(ObjectKind.MANIFEST, STORED, len(payload), payload), tuple(places)


class _StoredBlocks(Record, frozen=True):
    """Blocks of a manifest, still packed, each with the directory of its tables."""

    blocks: tuple[tuple[tuple[Part, ...], bytes], ...] = ()


def _of_blocks(payload: Any, most: int) -> Manifest:
    """The manifest of these blocks, whose tables have together at most so many bytes."""
    found: list[tuple[Part, bytes]] = []
    for parts, data in record(_StoredBlocks, payload, "manifest").blocks:
        tables = Block.parse(data, min(most, MAX_EXPANSION * len(data))).tables
        most -= sum(map(len, tables))
        if len(tables) != len(parts):
            raise CorruptObjectError("a block has not the tables that are listed of it")
        found += zip(parts, tables, strict=True)
    return Manifest(tuple(found))


def encode_table(table: ChunkTable) -> bytes:
    """Encode a chunk table.

    Raises
    ------
    InvalidArgumentError
        If it has more rows or values than readers accept.
    """
    packed = table.pack()
    data = pack(packed)
    try:
        _check_size(len(table), packed.get("col", {}), len(data))
    except CorruptObjectError as error:
        raise InvalidArgumentError(
            f"a table of {len(data)} bytes with {len(table)} chunks of one array exceeds what "
            "readers accept; commit them in several steps"
        ) from error
    return data


def _check_size(rows: int, columns: Mapping[str, Any], nbytes: int) -> None:
    """Raise if rows, or values that vary, are more than so few bytes may hold."""
    varying = sum(isinstance(one, list) and one[:1] != [0] for one in columns.values())
    if rows > _ROWS_FREELY + _ROWS_A_BYTE * nbytes:
        raise CorruptObjectError(f"a chunk table of {nbytes} bytes cannot hold {rows} rows")
    if rows * varying > _VALUES_FREELY + _VALUES_A_BYTE * nbytes:
        raise CorruptObjectError(
            f"a chunk table of {nbytes} bytes cannot hold {rows * varying} values"
        )
