"""Deltas: what one commit changed.

A delta is the transaction log of its commit. Until a compaction merges it into the base, readers
also lay it over the base: node records set and deleted, truncations, and chunk tables of refs set
and unset. Small tables are embedded; others are in manifests.

A *run* replaces several neighbours in a read list. It is an object of the same form, whose `commit`
is the one that wrote it.

Invariants: a delta has at most one row for a coordinate; its truncations apply to everything older
than the delta, and not to its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

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
from zarr_manifests.format.manifest import Manifest, ManifestRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords
from zarr_manifests.ids import NODE_ID_BYTES

COMMIT_ID_BYTES = 16


class CommitKind(StrEnum):
    """What a commit mostly did: a label that nothing depends on."""

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
        16 random bytes, the same for all attempts of a commit.
    nodes : tuple of Node
        Nodes created or changed, in their new state.
    deleted : mapping of str to bytes
        Deleted nodes: id by path.
    truncated : mapping of bytes to tuple of int
        Grid shape by node id: older chunks at or beyond it on any axis are gone.
    embedded : Manifest
        Small chunk tables.
    manifests : tuple of ManifestRef
        Manifests with the other chunk tables.

    Raises
    ------
    CorruptObjectError
        If an id has the wrong length.
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
        """Whether it creates, changes, deletes or truncates nodes."""
        return bool(self.nodes or self.deleted or self.truncated)

    def encode(self) -> bytes:
        """The object's bytes."""
        return encode(
            ObjectKind.DELTA,
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
        """Decode a delta."""
        return decode(
            data, ObjectKind.DELTA, cls._parse, ref.key, crc=ref.crc32c, length=ref.length
        )

    @classmethod
    def _parse(cls, fields: Fields) -> Delta:
        deleted = fields.table("deleted")
        if not all(isinstance(node, bytes) for node in deleted.values()):
            raise CorruptObjectError("delta.deleted: expected node ids")
        truncated: dict[bytes, Coords] = {}
        for value in fields.items("truncated"):
            match value:
                case [bytes(node), list(shape)]:
                    truncated[node] = tuple(shape)
                case _:
                    raise CorruptObjectError("delta.truncated: expected node id and grid shape")
        return cls(
            fields.binary("commit", COMMIT_ID_BYTES),
            tuple(Node.parse(value, "delta.nodes") for value in fields.items("nodes")),
            deleted,
            truncated,
            Manifest.parse(fields, "tables"),
            tuple(ManifestRef.parse(f) for f in fields.maps("manifests")),
        )
