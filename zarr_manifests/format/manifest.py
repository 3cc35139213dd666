"""Manifests: chunk tables of one or more nodes in one object, and pointers to them.

A `ManifestRef` lists the (node, box) tables of a manifest, so readers know which manifests they
need before they fetch any. Invariant: a table is decoded on demand, so a lookup in one node never
pays for the other nodes in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.blocks import Blocks, encode_blocks, is_in_blocks
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.columns import MAX_ROWS, Column, decode_column, encode_column
from zarr_manifests.format.envelope import (
    MAX_NUMBER,
    Fields,
    ObjectKind,
    check_numbers,
    check_texts,
    decode,
    encode,
    pack,
    refusing,
    unpack,
)
from zarr_manifests.format.records import (
    COPIED,
    NUMBERS,
    BlobRef,
    Record,
    Stored,
    box_of,
    rows,
)
from zarr_manifests.format.stretches import (
    STRETCH_BYTES,
    SplitTable,
    Stretch,
    TableData,
    decode_table,
    encode_table,
    encode_whole,
)
from zarr_manifests.grid import MAX_BOX_CHUNKS, Box
from zarr_manifests.ids import NODE_ID_BYTES

_WHOLE_BYTES: Final = 256 * 1024
"""A manifest of at most about this size is not in blocks: one request reads it."""
_MUCH_SMALLER: Final = 4
"""Small tables may compress so well that the manifest is small after all."""
_MOST_STRETCHES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Directory entry of one chunk table: node, box and number of rows."""

    node_id: bytes
    box: Box
    count: int

    def __post_init__(self) -> None:
        if len(self.node_id) != NODE_ID_BYTES or not 0 <= self.count <= MAX_NUMBER:
            raise CorruptObjectError("a chunk table with an invalid node id or number of rows")
        if max(self.box.hi, default=0) > MAX_NUMBER:
            raise CorruptObjectError(f"a chunk table whose box exceeds {MAX_NUMBER}: {self.box}")

    def pack(self) -> list[Any]:
        """As a list for msgpack."""
        return [self.node_id, self.box.lo, self.box.hi, self.count]

    @classmethod
    def parse(cls, value: Any, where: str) -> Part:
        """From a list that `pack` made."""
        match value:
            case [bytes(node_id), list(lo), list(hi), int(count)]:
                return cls(node_id, box_of(lo, hi, where), count)
        raise CorruptObjectError(f"{where}: expected node, box and count")


def by_node[T](items: Iterable[tuple[Part, T]]) -> dict[bytes, list[T]]:
    """The items by the node of their part, in order."""
    found: dict[bytes, list[T]] = {}
    for part, item in items:
        found.setdefault(part.node_id, []).append(item)
    return found


_SET: Final = Stored(lambda fields, name: fields.text(name) if fields.has(name) else "", rare=True)


@dataclass(frozen=True)
class ManifestRef(Record):
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

    Raises
    ------
    CorruptObjectError
        If `merged` is not empty and has not one number for each part.
    """

    blob: BlobRef
    parts: tuple[Part, ...]
    merged: tuple[int, ...] = ()
    packed_for: str = ""

    _FIELDS = (
        ("blob", "blob", COPIED),
        ("parts", "parts", rows(Part)),
        ("merged", "merged", NUMBERS.left_out()),
        ("set", "packed_for", _SET),
    )

    def __post_init__(self) -> None:
        if self.merged and len(self.merged) != len(self.parts):
            raise CorruptObjectError(f"{self.blob.key}: expected a sequence for each part")
        check_numbers(self.blob.key, *self.merged)
        check_texts(self.blob.key, self.packed_for)

    def leaves(self) -> list[tuple[Part, int]]:
        """Each part and the sequence it is merged to."""
        return list(zip(self.parts, self.merged or (0,) * len(self.parts), strict=True))

    def merged_to(self, part: Part) -> int:
        """The sequence up to which the part includes all changes."""
        return self._sequences[part] if self.merged else 0

    @cached_property
    def _sequences(self) -> Mapping[Part, int]:
        return dict(zip(self.parts, self.merged, strict=True))

    @cached_property
    def _of_nodes(self) -> Mapping[bytes, Sequence[Part]]:
        return by_node((part, part) for part in self.parts)

    def tables(self, manifest: Manifest, node_id: bytes) -> list[ChunkTable]:
        """The node's tables in `manifest`, the manifest that this points to.

        Raises
        ------
        CorruptObjectError
            If the tables are not those listed here, since the node would read wrongly.
        """
        tables = manifest.tables(node_id)
        self.check(node_id, tables)
        return tables

    def check(self, node_id: bytes, tables: Iterable[ChunkTable]) -> None:
        """Raise unless the node's tables are those listed here, in order.

        Raises
        ------
        CorruptObjectError
            If a box or number of rows differs.
        """
        self.check_parts(node_id, (Part(node_id, table.box, len(table)) for table in tables))

    def check_parts(self, node_id: bytes, parts: Iterable[Part]) -> None:
        """The same for the directory entries of the manifest's tables, also of other nodes."""
        named = self._of_nodes.get(node_id, ())
        if [*named] != [part for part in parts if part.node_id == node_id]:
            raise CorruptObjectError(
                f"{self.blob.key} has no chunk tables as the snapshot lists them"
            )


@dataclass(frozen=True)
class Manifest:
    """Chunk tables of one or more nodes, each still encoded.

    Parameters
    ----------
    parts : tuple of (Part, TableData)
        Each table's directory entry, and the encoded table.
    """

    parts: tuple[tuple[Part, TableData], ...]

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

    def of_node(self, node_id: bytes) -> Sequence[tuple[Part, TableData]]:
        """The tables of one node, each with its directory entry and still encoded."""
        return self._of_nodes.get(node_id, ())

    @cached_property
    def _of_nodes(self) -> Mapping[bytes, Sequence[tuple[Part, TableData]]]:
        return by_node((item[0], item) for item in self.parts)

    @staticmethod
    def decode(part: Part, data: TableData) -> ChunkTable:
        """Decode one of the tables."""
        try:
            table = decode_table(data, part.count)
        except InvalidArgumentError as error:  # an invalid box
            raise CorruptObjectError(f"a chunk table is malformed: {error}") from error
        if (table.box, len(table)) != (part.box, part.count):
            raise CorruptObjectError("a chunk table has another box than its manifest lists")
        return table

    def pack(self) -> list[Any]:
        """As a list for msgpack, with each table in one piece."""
        return [
            [
                part.pack(),
                data if isinstance(data, bytes) else encode_whole(self.decode(part, data)),
            ]
            for part, data in self.parts
        ]

    @classmethod
    def parse(cls, fields: Fields, name: str) -> Manifest:
        """The manifest in the field of that name."""
        parts: list[tuple[Part, TableData]] = []
        for value in fields.items(name):
            match value:
                case [list(part), bytes(data)]:
                    parts.append((Part.parse(part, f"{fields.where}.{name}"), data))
                case _:
                    raise CorruptObjectError(f"{fields.where}.{name}: expected part and table")
        return cls(tuple(parts))

    def encode(self) -> bytes:
        """The object's bytes; in blocks if it is large."""
        nbytes = sum(len(data) for _, data in self.parts)
        split = any(isinstance(data, SplitTable) for _, data in self.parts)
        if nbytes <= _WHOLE_BYTES or not (split or nbytes > _MUCH_SMALLER * _WHOLE_BYTES):
            whole = encode(ObjectKind.MANIFEST, {"tables": self.pack()})
            if nbytes <= _WHOLE_BYTES or len(whole) <= _WHOLE_BYTES:
                return whole
        return _in_blocks(self.parts)

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Manifest:
        """Decode a manifest; its tables stay encoded."""
        if len(data) == ref.length and is_in_blocks(data):
            return ManifestBlocks.of(data, ref).manifest(data)
        return decode(
            data,
            ObjectKind.MANIFEST,
            lambda fields: cls.parse(fields, "tables"),
            ref.key,
            crc=ref.crc32c,
            length=ref.length,
        )


def _in_blocks(parts: Sequence[tuple[Part, TableData]]) -> bytes:
    """The bytes of a manifest in blocks: stretches and small tables in groups of similar size."""
    tables: list[list[Any]] = []
    stretches: list[Stretch] = []
    for part, data in parts:
        if isinstance(data, SplitTable):
            tables.append([part.pack(), len(data.stretches), data.shared])
            stretches += data.stretches
        else:
            tables.append([part.pack(), 1, {}])
            stretches.append(Stretch(0, max(part.box.size - 1, 0), part.count, data))
    groups: list[list[bytes]] = []
    room = 0
    for stretch in stretches:
        if len(stretch.data) > room:
            groups.append([])
            room = STRETCH_BYTES
        groups[-1].append(stretch.data)
        room -= len(stretch.data)
    directory = {
        "tables": tables,
        "held": encode_column(np.array([len(group) for group in groups], np.int64)),
        "first": encode_column(np.array([s.first for s in stretches], np.int64)),
        "last": encode_column(np.array([s.last for s in stretches], np.int64)),
        "rows": encode_column(np.array([s.rows for s in stretches], np.int64)),
    }
    return encode_blocks(ObjectKind.MANIFEST, directory, [pack(group) for group in groups])


@dataclass(frozen=True, slots=True, eq=False)
class ManifestBlocks:
    """The verified directory of a manifest in blocks, by which its tables are read in part.

    Parameters
    ----------
    key : str
        The manifest's key, for error messages.
    parts : tuple of Part
        Its tables, in order.
    numbers : mapping of (bytes, Box) to int
        The number of each table, by node and box.
    shared : tuple of mapping of str to object
        For each table, what all its stretches refer to; empty if each has its own.
    begins : int64[t + 1]
        Number of each table's first stretch, and the number of stretches.
    first, last, rows : int64[s]
        For each stretch, the bounds of its linear indexes, both included, and its rows.
    block_of, place : int64[s]
        Which block has the stretch, and its position there.
    blocks : Blocks
        The blocks.
    """

    key: str
    parts: tuple[Part, ...]
    numbers: Mapping[tuple[bytes, Box], int]
    shared: tuple[Mapping[str, Any], ...]
    begins: Column
    first: Column
    last: Column
    rows: Column
    block_of: Column
    place: Column
    blocks: Blocks

    @classmethod
    def of(cls, head: bytes, ref: BlobRef) -> ManifestBlocks:
        """The directory in the first bytes of the manifest that `ref` points to.

        Raises
        ------
        CorruptObjectError
            If it is incomplete, or contradicts itself or the pointer.
        """
        with refusing(ref.key):
            blocks = Blocks.of(head, ObjectKind.MANIFEST, ref.crc32c, ref.length)
            fields, parts, numbers, shared = blocks.fields, [], [], []
            for value in fields.items("tables"):
                match value:
                    case [list(part), int(stretches), dict(common)] if 0 < stretches <= MAX_ROWS:
                        parts.append(Part.parse(part, f"{fields.where}.tables"))
                        numbers.append(stretches)
                        shared.append(common)
                    case _:
                        raise CorruptObjectError("expected tables and their stretches")
            n = sum(numbers)
            held = decode_column(fields.value.get("held"), len(blocks), MAX_ROWS)
            if not 0 < n <= _MOST_STRETCHES or n != int(held.sum()):
                raise CorruptObjectError("the blocks do not hold the stretches of all tables")
            first, last, rows = (
                decode_column(fields.value.get(name), n, MAX_BOX_CHUNKS)
                for name in ("first", "last", "rows")
            )
            block_of = np.repeat(np.arange(len(blocks)), held)
            place = np.arange(n) - (held.cumsum() - held)[block_of]
            begins = np.array([0, *numbers], np.int64).cumsum()
            found = cls(
                ref.key,
                tuple(parts),
                {(part.node_id, part.box): i for i, part in enumerate(parts)},
                tuple(shared),
                begins,
                first,
                last,
                rows,
                block_of,
                place,
                blocks,
            )
            found._check()
            return found

    def _check(self) -> None:
        begins, first, last = self.begins[:-1], self.first, self.last
        sizes = np.array([part.box.size for part in self.parts], np.int64)
        counts = np.array([part.count for part in self.parts], np.int64)
        empty = (counts == 0) & (np.diff(self.begins) == 1)
        follows = np.ones(len(first), np.bool_)
        follows[1:] = first[1:] > last[:-1]
        follows[begins] = True  # of another table
        whole = last[self.begins[1:] - 1] < sizes
        sound = (
            follows.all()
            and (whole | empty).all()
            and (self.rows <= last - first + 1).all()
            and (np.add.reduceat(self.rows, begins) == counts).all()
            and (np.minimum.reduceat(self.rows, begins) > 0)[~empty].all()
        )
        if not sound:
            raise CorruptObjectError("the directory of a manifest contradicts itself")

    def number_of(self, node_id: bytes, box: Box) -> int:
        """The number of the table of that node in that box.

        Raises
        ------
        CorruptObjectError
            If there is none.
        """
        number = self.numbers.get((node_id, box))
        if number is None:
            raise CorruptObjectError(f"{self.key} has no chunk table such as the snapshot says")
        return number

    def stretches(self, number: int) -> range:
        """The numbers of the table's stretches."""
        return range(self.begins.item(number), self.begins.item(number + 1))

    def stretch_at(self, number: int, index: int) -> int | None:
        """The number of the table's stretch whose bounds include a linear index; None if none."""
        start, stop = self.begins.item(number), self.begins.item(number + 1)
        at = start + int(self.last[start:stop].searchsorted(index))
        return at if at < stop and self.first.item(at) <= index else None

    def table(self, number: int, stretch: int, data: bytes) -> ChunkTable:
        """The rows of one stretch of the table; `data` has the bytes of its block.

        Raises
        ------
        CorruptObjectError
            If the bytes are not what the directory says.
        """
        with refusing(self.key):
            block = self.block_of.item(stretch)
            held, part = self._held(block, data), self.parts[number]
            packed = held[self.place.item(stretch)]
            if len(self.stretches(number)) == 1:
                return Manifest.decode(part, packed)
            one = self._stretch(stretch, packed)
            table = decode_table(SplitTable(self.shared[number], (one,)), one.rows)
            if table.box != part.box:
                raise CorruptObjectError("a chunk table has another box than its manifest lists")
            return table

    def manifest(self, data: bytes) -> Manifest:
        """The whole manifest; `data` has all its bytes.

        Raises
        ------
        CorruptObjectError
            If the bytes are not what the directory says.
        """
        with refusing(self.key):
            if len(data) != self.blocks.end:
                raise CorruptObjectError(f"{len(data)} bytes, but its blocks end elsewhere")
            held: list[bytes] = []
            for block in range(len(self.blocks)):
                start, length = self.blocks.range(block)
                held += self._held(block, memoryview(data)[start : start + length])
            parts: list[tuple[Part, TableData]] = []
            for number, part in enumerate(self.parts):
                mine = self.stretches(number)
                if len(mine) == 1:
                    parts.append((part, held[mine[0]]))
                else:
                    stretches = tuple(self._stretch(at, held[at]) for at in mine)
                    parts.append((part, SplitTable(self.shared[number], stretches)))
            return Manifest(tuple(parts))

    def _stretch(self, at: int, data: bytes) -> Stretch:
        return Stretch(self.first.item(at), self.last.item(at), self.rows.item(at), data)

    def _held(self, block: int, data: bytes | memoryview) -> list[bytes]:
        """The encoded stretches in a block."""
        found = unpack(self.blocks.payload(block, data))
        expected = int(np.count_nonzero(self.block_of == block))
        if not isinstance(found, list) or len(found) != expected:
            raise CorruptObjectError(f"block {block} has not the stretches that are listed")
        if not all(isinstance(each, bytes) for each in found):
            raise CorruptObjectError(f"block {block} has something else than stretches")
        return found
