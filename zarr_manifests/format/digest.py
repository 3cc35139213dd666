"""Digests: what several live deltas say together to a reader that opens a snapshot.

A digest holds, for a contiguous run of a snapshot's deltas, the node records as the run leaves
them, every truncation, and the chunk tables of coordinates merged into one a node. Invariant: it
repeats what its deltas say and nothing else, so it saves requests and can always be ignored. A
node in `covered` is one whose chunk refs of the whole run are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.envelope import Fields, Kind, check_numbers, check_texts, decode, encode
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords
from zarr_manifests.ids import NODE_ID_BYTES

__all__ = ["Digest", "parse_shapes"]


@dataclass(frozen=True, slots=True)
class Digest:
    """What a run of deltas says together.

    Parameters
    ----------
    nodes : tuple of Node
        Nodes created or changed, as they are after the run.
    deleted : mapping of str to bytes
        Path and id of nodes deleted; applied before `nodes`.
    truncated : tuple of mapping
        What each delta of the run truncates.
    covered : mapping of bytes to tuple of int or None
        Nodes whose chunk refs are all in `tables`, and what the run cuts off of what is older.
    tables : Manifest
        At most one chunk table of each covered node.
    of : tuple of int
        The checksum of each delta of the run, as a pointer to it has it.
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
            raise CorruptObjectError("digest: of another number of deltas than it tells about")
        shapes = [shape for cuts in self.truncated for shape in cuts.values()]
        shapes += [shape for shape in self.covered.values() if shape is not None]
        for shape in shapes:
            check_numbers("digest: a shape", *shape)
        check_numbers("digest.of", *self.of)
        check_texts("digest.deleted", *self.deleted)

    def encode(self) -> bytes:
        """The object's bytes."""
        return encode(
            Kind.DIGEST,
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
        """The digest that the object's bytes hold."""
        return decode(data, Kind.DIGEST, cls._parse, ref.key, crc=ref.crc32c, length=ref.length)

    @classmethod
    def _parse(cls, fields: Fields) -> Digest:
        deleted = fields.table("deleted")
        if not all(isinstance(node, bytes) for node in deleted.values()):
            raise CorruptObjectError("digest.deleted: node ids are due")
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
    """Node ids and grid shapes from a list of pairs."""
    shapes: dict[bytes, Coords | None] = {}
    for pair in value if isinstance(value, list) else [None]:
        match pair:
            case [bytes(node), None]:
                shapes[node] = None
            case [bytes(node), list(shape)]:
                shapes[node] = tuple(shape)
            case _:
                raise CorruptObjectError(f"{where}: node id and grid shape are due")
    return shapes
