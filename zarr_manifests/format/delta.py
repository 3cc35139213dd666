"""Log deltas: what one commit changed.

A delta is both the transaction log of its commit and, until it is compacted, part of what readers
merge over the base: node records set and deleted, truncations, and chunk tables of refs that were
set or unset. Tables are embedded while they are small, else in manifests of their own.

A *run*, which stands for several neighbours in a read list, is an object of the same form; its
`commit` is the one that wrote it.

Invariant: within a delta there is at most one row a coordinate, and a truncation applies to
everything older than the delta, not to its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.envelope import Fields, Kind, check_numbers, check_texts, decode, encode
from zarr_manifests.format.manifest import Manifest, ManifestRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords
from zarr_manifests.ids import NODE_ID_BYTES

__all__ = ["COMMIT_ID_BYTES", "CommitKind", "Delta"]

COMMIT_ID_BYTES = 16


class CommitKind(StrEnum):
    """What a commit mostly did: a label, never relied on."""

    APPEND = "append"
    OVERWRITE = "overwrite"
    DELETE = "delete"
    METADATA = "metadata"
    REWRITE = "rewrite"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one commit changed.

    Parameters
    ----------
    commit_id : bytes
        16 random bytes, drawn once a commit, kept over its retries.
    nodes : tuple of Node
        Nodes created or changed, as they are afterwards.
    deleted : mapping of str to bytes
        Path and id of nodes deleted.
    truncated : mapping of bytes to tuple of int
        Node id to grid shape: older chunks with a coordinate at or beyond it on any axis are gone.
    embedded : Manifest
        Small chunk tables.
    manifests : tuple of ManifestRef
        Manifests with the other chunk tables.
    """

    commit_id: bytes
    nodes: tuple[Node, ...] = ()
    deleted: Mapping[str, bytes] = field(default_factory=dict)
    truncated: Mapping[bytes, Coords] = field(default_factory=dict)
    embedded: Manifest = field(default_factory=lambda: Manifest(()))
    manifests: tuple[ManifestRef, ...] = ()

    def __post_init__(self) -> None:
        ids = [*self.deleted.values(), *self.truncated]
        if len(self.commit_id) != COMMIT_ID_BYTES or any(len(i) != NODE_ID_BYTES for i in ids):
            raise CorruptObjectError("delta: an id has the wrong length")
        for shape in self.truncated.values():
            check_numbers("delta.truncated", *shape)
        check_texts("delta.deleted", *self.deleted)

    @property
    def changes_nodes(self) -> bool:
        """Whether a reader must know this delta to walk the hierarchy."""
        return bool(self.nodes or self.deleted or self.truncated)

    def encode(self) -> bytes:
        """The object's bytes."""
        return encode(
            Kind.DELTA,
            {
                "commit": self.commit_id,
                "nodes": [node.pack() for node in self.nodes],
                "deleted": dict(self.deleted),
                "truncated": [[node, shape] for node, shape in self.truncated.items()],
                "tables": self.embedded.pack(),
                "manifests": [manifest.pack() for manifest in self.manifests],
            },
        )

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Delta:
        """The delta that the object's bytes hold."""
        return decode(data, Kind.DELTA, cls._parse, ref.key, crc=ref.crc32c, length=ref.length)

    @classmethod
    def _parse(cls, fields: Fields) -> Delta:
        deleted = fields.table("deleted")
        if not all(isinstance(node, bytes) for node in deleted.values()):
            raise CorruptObjectError("delta.deleted: node ids are due")
        truncated: dict[bytes, Coords] = {}
        for value in fields.items("truncated"):
            match value:
                case [bytes(node), list(shape)]:
                    truncated[node] = tuple(shape)
                case _:
                    raise CorruptObjectError("delta.truncated: node id and grid shape are due")
        return cls(
            fields.binary("commit", COMMIT_ID_BYTES),
            tuple(Node.parse(value, "delta.nodes") for value in fields.items("nodes")),
            deleted,
            truncated,
            Manifest.parse(fields, "tables"),
            tuple(ManifestRef.parse(f) for f in fields.maps("manifests")),
        )
