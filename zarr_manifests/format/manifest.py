"""Manifests: chunk tables of one or more nodes in one object, and pointers to them.

A `ManifestRef` lists the (node, box) tables of a manifest, so readers know which manifests they
need before they fetch any. Invariant: a table is decoded on demand, so a lookup in one node never
pays for the other nodes in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.envelope import (
    MAX_NUMBER,
    Fields,
    ObjectKind,
    check_numbers,
    check_texts,
    decode,
    encode,
    pack,
    unpack,
)
from zarr_manifests.grid import Box
from zarr_manifests.ids import NODE_ID_BYTES

__all__ = ["Manifest", "ManifestRef", "Part"]

_ROWS_FREELY: Final = 1 << 20
_ROWS_A_BYTE: Final = 8
_VALUES_FREELY: Final = 1 << 22
_VALUES_A_BYTE: Final = 8
_INTEGER: Final = frozenset({int})


def _is_bomb(rows: int, columns: Mapping[str, Any], data: bytes) -> bool:
    """Whether a table has more rows, or more varying values, than allowed for its bytes."""
    values = rows * sum(isinstance(c, list) and c[:1] != [0] for c in columns.values())
    most_rows = _ROWS_FREELY + _ROWS_A_BYTE * len(data)
    return rows > most_rows or values > _VALUES_FREELY + _VALUES_A_BYTE * len(data)


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
            case [bytes(node_id), list(lo), list(hi), int(count)] if {
                *map(type, lo),
                *map(type, hi),
            } <= _INTEGER:
                return cls(node_id, Box(tuple(lo), tuple(hi)), count)
        raise CorruptObjectError(f"{where}: expected node, box and count")

    @classmethod
    def parse_all(cls, fields: Fields, name: str) -> tuple[Part, ...]:
        """The parts in the field of that name."""
        where = f"{fields.where}.{name}"
        return tuple(cls.parse(value, where) for value in fields.items(name))


@dataclass(frozen=True, slots=True)
class ManifestRef:
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
        return self.merged[self.parts.index(part)] if self.merged else 0

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack."""
        parts = [part.pack() for part in self.parts]
        packed: dict[str, Any] = {"blob": self.blob.pack(), "parts": parts}
        packed |= {"merged": list(self.merged)} if self.merged else {}
        return packed | ({"set": self.packed_for} if self.packed_for else {})

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
        named = [(part.box, part.count) for part in self.parts if part.node_id == node_id]
        if named != [(table.box, len(table)) for table in tables]:
            raise CorruptObjectError(
                f"{self.blob.key} has no chunk tables as the snapshot lists them"
            )

    @classmethod
    def parse(cls, fields: Fields) -> ManifestRef:
        """From a map that `pack` made."""
        parts = Part.parse_all(fields, "parts")
        packed_for = fields.text("set") if fields.has("set") else ""
        blob = BlobRef.parse_required(fields, "blob")
        return cls(blob, parts, fields.numbers("merged"), packed_for)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Chunk tables of one or more nodes, each still encoded.

    Parameters
    ----------
    parts : tuple of (Part, bytes)
        Each table's directory entry and bytes.
    """

    parts: tuple[tuple[Part, bytes], ...]

    @classmethod
    def of(cls, tables: Iterable[tuple[bytes, ChunkTable]]) -> Manifest:
        """The manifest of these (node id, table) pairs."""
        parts = []
        for node, table in tables:
            packed = table.pack()
            data = pack(packed)
            if _is_bomb(len(table), packed.get("col", {}), data):
                raise InvalidArgumentError(
                    f"a table of {len(data)} bytes with {len(table)} chunks of one array exceeds "
                    "what readers accept; commit them in several steps"
                )
            parts.append((Part(node, table.box, len(table)), data))
        return cls(tuple(parts))

    def directory(self) -> tuple[Part, ...]:
        """The directory of its tables."""
        return tuple(part for part, _ in self.parts)

    def tables(self, node_id: bytes) -> list[ChunkTable]:
        """The tables of one node, decoded."""
        return [self.decode(part, data) for part, data in self.parts if part.node_id == node_id]

    @staticmethod
    def decode(part: Part, data: bytes) -> ChunkTable:
        """Decode one of the tables."""
        fields = Fields(unpack(data), "table")
        if fields.number("n") != part.count or _is_bomb(part.count, fields.table("col"), data):
            raise CorruptObjectError("a chunk table has not the rows that its manifest lists")
        try:
            table = ChunkTable.parse(fields)
        except InvalidArgumentError as error:  # an invalid box
            raise CorruptObjectError(f"a chunk table is malformed: {error}") from error
        if (table.box, len(table)) != (part.box, part.count):
            raise CorruptObjectError("a chunk table has another box than its manifest lists")
        return table

    def pack(self) -> list[Any]:
        """As a list for msgpack."""
        return [[part.pack(), data] for part, data in self.parts]

    @classmethod
    def parse(cls, fields: Fields, name: str) -> Manifest:
        """The manifest in the field of that name."""
        parts = []
        for value in fields.items(name):
            match value:
                case [list(part), bytes(data)]:
                    parts.append((Part.parse(part, f"{fields.where}.{name}"), data))
                case _:
                    raise CorruptObjectError(f"{fields.where}.{name}: expected part and table")
        return cls(tuple(parts))

    def encode(self) -> bytes:
        """The object's bytes."""
        return encode(ObjectKind.MANIFEST, {"tables": self.pack()})

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Manifest:
        """Decode a manifest; its tables stay encoded."""
        return decode(
            data,
            ObjectKind.MANIFEST,
            lambda fields: cls.parse(fields, "tables"),
            ref.key,
            crc=ref.crc32c,
            length=ref.length,
        )
