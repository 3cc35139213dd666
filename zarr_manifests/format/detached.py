"""Detached sessions: an open session as bytes, and the claim of the one that commits it.

The bytes are an envelope like that of the repository's objects, but are not stored in it: they
travel from process to process. They hold no location and no credentials. The claim is an object of
the repository. Its key follows from the start and lineage that all copies of the session share, so
there is one claim for a session, however often it is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Final

import numpy as np

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.envelope import (
    Fields,
    ObjectKind,
    check_numbers,
    check_texts,
    decode,
    encode,
)
from zarr_manifests.format.manifest import Manifest, ManifestRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.root import Lease
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import NODE_ID_BYTES, is_session_id, new_session_id, object_key
from zarr_manifests.records import dataclass

__all__ = [
    "LINEAGE_BYTES",
    "Detached",
    "DetachedChanges",
    "DetachedOwners",
    "DetachedReads",
    "DetachedRows",
    "claim_key",
    "encode_claim",
]

LINEAGE_BYTES: Final = 6
_LEAST_LEASE_MS: Final = 10
_MOST_LEASE_MS: Final = 366 * 86_400_000
_WHERE: Final = "a detached session"

type DetachedRows = ChunkTable | tuple[ManifestRef, int, int, int]
"""Chunk refs of one node: a table; or a manifest that has it, with the number of rows that unset a
chunk, the bytes of all chunks set, and of those stored in the repository."""


def claim_key(start: int, lineage: bytes) -> str:
    """The key of the claim of the session with that start and lineage."""
    return object_key("reports", new_session_id(start, lineage + bytes(LINEAGE_BYTES)), 0)


def encode_claim(session_id: str) -> bytes:
    """The claim of the resumed session with that id, as an object's bytes."""
    return encode(ObjectKind.CLAIM, {"session": session_id})


@dataclass(frozen=True, slots=True)
class DetachedChanges:
    """The changes of a session; fields as of a change set, with zone maps packed.

    `singles` has the refs that were set one by one, which are newer than those in `rows`.
    """

    nodes: Mapping[str, Node | None] = field(default_factory=dict)
    truncated: Mapping[bytes, Coords] = field(default_factory=dict)
    rows: Mapping[bytes, Sequence[DetachedRows]] = field(default_factory=dict)
    singles: Mapping[bytes, ChunkTable] = field(default_factory=dict)
    zones: Mapping[bytes, Sequence[bytes]] = field(default_factory=dict)
    durable: Mapping[str, int] = field(default_factory=dict)

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack."""
        return {
            "nodes": [[path, node and node.pack()] for path, node in self.nodes.items()],
            "truncated": [[node, shape] for node, shape in self.truncated.items()],
            "rows": [
                [node, [_pack_rows(node, rows) for rows in layers]]
                for node, layers in self.rows.items()
            ],
            "singles": [_pack_rows(node, table) for node, table in self.singles.items()],
            "zones": [[node, list(zones)] for node, zones in self.zones.items()],
            "durable": dict(self.durable),
        }

    @classmethod
    def parse(cls, fields: Fields) -> DetachedChanges:
        """From a map that `pack` made."""
        singles = [_parse_rows(value) for value in fields.items("singles")]
        return cls(
            {_text(path): _node(node) for path, node in _pairs(fields, "nodes")},
            {_id(node): _coords(shape) for node, shape in _pairs(fields, "truncated")},
            {
                _id(node): [_rows_of(node, value) for value in _list(layers)]
                for node, layers in _pairs(fields, "rows")
            },
            {node: table for node, table in singles if isinstance(table, ChunkTable)},
            {
                _id(node): [_bytes(each) for each in _list(zones)]
                for node, zones in _pairs(fields, "zones")
            },
            fields.counters("durable"),
        )


@dataclass(frozen=True, slots=True)
class DetachedReads:
    """What a session has read: chunks (int64[n, ndim]) and boxes by node id, and documents."""

    chunks: Mapping[bytes, IndexArray] = field(default_factory=dict)
    boxes: Mapping[bytes, Box] = field(default_factory=dict)
    documents: Sequence[str] = ()

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack."""
        return {
            "chunks": [
                [node, *coords.shape, coords.astype("<i8").tobytes()]
                for node, coords in self.chunks.items()
            ],
            "boxes": [[node, box.lo, box.hi] for node, box in self.boxes.items()],
            "documents": list(self.documents),
        }

    @classmethod
    def parse(cls, fields: Fields) -> DetachedReads:
        """From a map that `pack` made."""
        chunks, boxes = {}, {}
        for value in fields.items("chunks"):
            match value:
                case [bytes(node), int(n), int(ndim), bytes(data)] if (
                    0 <= n <= (len(data) or 1) and 0 <= ndim and len(data) == 8 * n * ndim
                ):
                    chunks[_id(node)] = np.frombuffer(data, "<i8").astype(np.int64).reshape(n, ndim)
                case _:
                    raise CorruptObjectError(f"{_WHERE}: expected chunks that were read")
        for value in fields.items("boxes"):
            match value:
                case [node, lo, hi]:
                    boxes[_id(node)] = Box(_coords(lo), _coords(hi))
                case _:
                    raise CorruptObjectError(f"{_WHERE}: expected boxes that were read")
        return cls(chunks, boxes, [_text(path) for path in fields.items("documents")])


@dataclass(frozen=True, slots=True)
class DetachedOwners:
    """Which copies the merged changes came from, by their session ids.

    `chunks` has (copy, node id, table) for refs that were merged one by one.
    """

    chunks: Sequence[tuple[str, bytes, ChunkTable]] = ()
    nodes: Mapping[str, tuple[str, Node | None]] = field(default_factory=dict)
    rows: Mapping[bytes, Sequence[tuple[str, DetachedRows]]] = field(default_factory=dict)
    objects: Sequence[str] = ()
    copies: Sequence[str] = ()

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack."""
        return {
            "chunks": [[copy, _pack_rows(node, table)] for copy, node, table in self.chunks],
            "nodes": [
                [path, copy, node and node.pack()] for path, (copy, node) in self.nodes.items()
            ],
            "rows": [
                [node, [[copy, _pack_rows(node, rows)] for copy, rows in layers]]
                for node, layers in self.rows.items()
            ],
            "objects": list(self.objects),
            "copies": list(self.copies),
        }

    @classmethod
    def parse(cls, fields: Fields) -> DetachedOwners:
        """From a map that `pack` made."""
        nodes = {}
        for value in fields.items("nodes"):
            match value:
                case [str(path), str(copy), node]:
                    nodes[path] = copy, _node(node)
                case _:
                    raise CorruptObjectError(f"{_WHERE}: expected a path, a copy and a node")
        chunks = [(_text(copy), *_parse_rows(rows)) for copy, rows in _pairs(fields, "chunks")]
        return cls(
            [(copy, node, rows) for copy, node, rows in chunks if isinstance(rows, ChunkTable)],
            nodes,
            {
                _id(node): [
                    (_text(copy), _rows_of(node, rows)) for copy, rows in map(_pair, _list(layers))
                ]
                for node, layers in _pairs(fields, "rows")
            },
            [_text(key) for key in fields.items("objects")],
            [_text(copy) for copy in fields.items("copies")],
        )


@dataclass(frozen=True, slots=True)
class Detached:
    """A writable session, to be resumed in another process.

    Parameters
    ----------
    repository_id : str
        Id of its repository.
    branch : str
        The branch it commits to.
    head, base : BlobRef
        The snapshot it reads, and its base.
    start : int
        The root version it began at.
    lineage : bytes
        What its id has in common with those of its copies.
    epoch : int or None
        The epoch of its claim of the branch.
    serializable : bool
        Whether its commit conflicts with any change of what it has read.
    append_dim : str or None
        The dimension whose appends are put behind those of others.
    lease : Lease or None
        Its lease.
    lease_ms : int
        How long each renewal of the lease lasts.
    copied, merged : bool
        Whether there may be pickled copies of its store, and whether any copy was merged.
    changes, reads, owners
        Its changes, what it has read, and which copies the changes came from.
    """

    repository_id: str
    branch: str
    head: BlobRef
    base: BlobRef | None
    start: int
    lineage: bytes
    epoch: int | None = None
    serializable: bool = False
    append_dim: str | None = None
    lease: Lease | None = None
    lease_ms: int = 0
    copied: bool = False
    merged: bool = False
    changes: DetachedChanges = field(default_factory=DetachedChanges)
    reads: DetachedReads = field(default_factory=DetachedReads)
    owners: DetachedOwners = field(default_factory=DetachedOwners)

    def __post_init__(self) -> None:
        check_texts(_WHERE, self.repository_id, self.branch)
        check_numbers(_WHERE, self.start, self.epoch or 0, self.lease_ms)
        if self.lease is not None and not _LEAST_LEASE_MS <= self.lease_ms <= _MOST_LEASE_MS:
            raise CorruptObjectError(f"{_WHERE}: a lease of {self.lease_ms} ms")
        if len(self.lineage) != LINEAGE_BYTES:
            raise CorruptObjectError(f"{_WHERE}: the lineage has the wrong length")
        for copy in self.owners.copies:
            if not is_session_id(copy):
                raise CorruptObjectError(f"{_WHERE}: {copy[:80]!r} is not the id of a copy")

    def encode(self) -> bytes:
        """As bytes."""
        return encode(
            ObjectKind.DETACHED,
            {
                "repository": self.repository_id,
                "branch": self.branch,
                "head": self.head.bare().pack(),
                "base": self.base and self.base.bare().pack(),
                "start": self.start,
                "lineage": self.lineage,
                "epoch": self.epoch,
                "serializable": self.serializable,
                "append_dim": self.append_dim,
                "lease": self.lease and self.lease.pack(),
                "lease_ms": self.lease_ms,
                "copied": self.copied,
                "merged": self.merged,
                "changes": self.changes.pack(),
                "reads": self.reads.pack(),
                "owners": self.owners.pack(),
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Detached:
        """From bytes that `encode` made.

        Raises
        ------
        CorruptObjectError
            If they are something else, or damaged.
        UnsupportedFormatError
            If a newer version of the package made them.
        """
        return decode(data, ObjectKind.DETACHED, cls._parse, _WHERE)

    @classmethod
    def _parse(cls, fields: Fields) -> Detached:
        def part(name: str) -> Fields:
            return Fields(fields.value.get(name), f"{_WHERE}.{name}")

        return cls(
            fields.text("repository"),
            fields.text("branch"),
            BlobRef.parse_required(fields, "head"),
            BlobRef.parse_optional(fields, "base"),
            fields.number("start"),
            fields.binary("lineage", LINEAGE_BYTES),
            fields.number("epoch") if fields.has("epoch") else None,
            fields.flag("serializable"),
            fields.text("append_dim") if fields.has("append_dim") else None,
            Lease.parse(fields.value["lease"]) if fields.has("lease") else None,
            fields.number("lease_ms"),
            fields.flag("copied"),
            fields.flag("merged"),
            DetachedChanges.parse(part("changes")),
            DetachedReads.parse(part("reads")),
            DetachedOwners.parse(part("owners")),
        )


# --- pieces ------------------------------------------------------------------------------------


def _pack_rows(node_id: bytes, rows: DetachedRows) -> list[Any]:
    if isinstance(rows, ChunkTable):
        return list(Manifest.of([(node_id, rows)]).pack()[0])
    manifest, *counts = rows
    return [manifest.pack(), *counts]


def _parse_rows(value: Any) -> tuple[bytes, DetachedRows]:
    """The node's id, and its rows."""
    match value:
        case [list(), bytes()]:
            ((part, data),) = Manifest.parse(Fields({"rows": [value]}, _WHERE), "rows").parts
            return part.node_id, Manifest.decode(part, data)
        case [dict(manifest), int(unset), int(nbytes), int(written)]:
            ref = ManifestRef.parse(Fields(manifest, _WHERE))
            sound = len(ref.parts) == 1 and 0 <= unset <= ref.parts[0].count
            if sound and 0 <= written <= nbytes:
                return ref.parts[0].node_id, (ref, unset, nbytes, written)
    raise CorruptObjectError(f"{_WHERE}: expected chunk refs")


def _rows_of(node_id: bytes, value: Any) -> DetachedRows:
    """The rows, which must be of that node."""
    found, rows = _parse_rows(value)
    if found != node_id:
        raise CorruptObjectError(f"{_WHERE}: chunk refs of another node")
    return rows


def _list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    raise CorruptObjectError(f"{_WHERE}: expected a list")


def _pair(value: Any) -> tuple[Any, Any]:
    match value:
        case [one, other]:
            return one, other
    raise CorruptObjectError(f"{_WHERE}: expected a pair")


def _pairs(fields: Fields, name: str) -> list[tuple[Any, Any]]:
    return [_pair(value) for value in fields.items(name)]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise CorruptObjectError(f"{_WHERE}: expected text")


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    raise CorruptObjectError(f"{_WHERE}: expected bytes")


def _id(value: Any) -> bytes:
    if isinstance(value, bytes) and len(value) == NODE_ID_BYTES:
        return value
    raise CorruptObjectError(f"{_WHERE}: expected the id of a node")


def _node(value: Any) -> Node | None:
    return None if value is None else Node.parse(value, _WHERE)


def _coords(value: Any) -> Coords:
    found = tuple(_list(value))
    check_numbers(_WHERE, *found)
    return found
