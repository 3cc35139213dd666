"""Digests: several live deltas in one object, for readers that open a snapshot.

A digest covers consecutive deltas of a snapshot. It holds the node records after them, all their
truncations, and the chunk tables of coordinates, merged into one for each node in `covered`.
Invariant: it only repeats its deltas, so it saves requests and can always be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.envelope import (
    Fields,
    ObjectKind,
    check_numbers,
    check_texts,
    decode,
    encode,
)
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords
from zarr_manifests.ids import NODE_ID_BYTES


@dataclass(frozen=True, slots=True)
class Digest:
    """Consecutive deltas, merged.

    Parameters
    ----------
    nodes : tuple of Node
        Nodes created or changed, in their state after the last delta.
    deleted : mapping of str to bytes
        Deleted nodes: id by path. Applied before `nodes`.
    truncated : tuple of mapping
        Truncations of each delta: grid shape by node id.
    covered : mapping of bytes to tuple of int or None
        Nodes whose chunk refs are all in `tables`, and the shape at which older chunks are
        truncated; None for no truncation.
    tables : Manifest
        At most one chunk table for each covered node.
    of : tuple of int
        Checksum of each delta, as in the pointers to them.

    Raises
    ------
    CorruptObjectError
        If the fields contradict each other, or an id has the wrong length.
    """

    nodes: tuple[Node, ...]
    deleted: Mapping[str, bytes]
    truncated: tuple[Mapping[bytes, Coords], ...]
    covered: Mapping[bytes, Coords | None] = field(default_factory=dict)
    tables: Manifest = field(default_factory=lambda: Manifest(()))
    of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ids = [*self.deleted.values(), *self.covered]
        ids += [node_id for cuts in self.truncated for node_id in cuts]
        held = [part.node_id for part in self.tables.directory()]
        if any(len(node_id) != NODE_ID_BYTES for node_id in ids):
            raise CorruptObjectError("digest: an id has the wrong length")
        if len(set(held)) != len(held) or not set(held) <= self.covered.keys():
            raise CorruptObjectError("digest: tables and covered nodes contradict each other")
        if len(self.of) != len(self.truncated):
            raise CorruptObjectError("digest: `of` and `truncated` have different lengths")
        shapes = [shape for cuts in self.truncated for shape in cuts.values()]
        shapes += [shape for shape in self.covered.values() if shape is not None]
        for shape in shapes:
            check_numbers("digest: a shape", *shape)
        check_numbers("digest.of", *self.of)
        check_texts("digest.deleted", *self.deleted)

    def encode(self) -> bytes:
        """The object's bytes."""
        return encode(
            ObjectKind.DIGEST,
            {
                "nodes": [node.pack() for node in self.nodes],
                "deleted": dict(self.deleted),
                "truncated": [
                    [[node, shape] for node, shape in cuts.items()] for cuts in self.truncated
                ],
                "covered": [[node, shape] for node, shape in self.covered.items()],
                "tables": self.tables.pack(),
                "of": self.of,
            },
        )

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Digest:
        """Decode a digest."""
        return decode(
            data, ObjectKind.DIGEST, cls._parse, ref.key, crc=ref.crc32c, length=ref.length
        )

    @classmethod
    def _parse(cls, fields: Fields) -> Digest:
        deleted = fields.table("deleted")
        if not all(isinstance(node, bytes) for node in deleted.values()):
            raise CorruptObjectError("digest.deleted: expected node ids")
        truncated = []
        for cuts in fields.items("truncated"):
            shapes = parse_shapes(cuts, "digest.truncated")
            truncated.append({node: shape for node, shape in shapes.items() if shape is not None})
        return cls(
            tuple(Node.parse(value, "digest.nodes") for value in fields.items("nodes")),
            deleted,
            tuple(truncated),
            parse_shapes(fields.items("covered"), "digest.covered"),
            Manifest.parse(fields, "tables"),
            fields.numbers("of"),
        )


def parse_shapes(value: object, where: str) -> dict[bytes, Coords | None]:
    """Grid shapes, or None, by node id; from a list of pairs."""
    shapes: dict[bytes, Coords | None] = {}
    for pair in value if isinstance(value, list) else [None]:
        match pair:
            case [bytes(node), None]:
                shapes[node] = None
            case [bytes(node), list(shape)]:
                shapes[node] = tuple(shape)
            case _:
                raise CorruptObjectError(f"{where}: expected node id and grid shape")
    return shapes
