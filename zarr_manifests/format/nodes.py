"""Nodes of the hierarchy, and the base of a snapshot.

A node is a group, an array or an opaque entry: a key that is neither metadata nor chunk, and
behaves like an array of one chunk. A node keeps its random id until it is deleted. The *base* is
the node table and the directory of leaf manifests. Compactions and rewrites replace it; commits
leave it alone. It carries copies of small manifests with coordinates, so that reading a dataset's
coordinates takes no further request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.counts import Count, check_counts, pack_counts, parse_counts
from zarr_manifests.format.envelope import (
    Fields,
    ObjectKind,
    check_numbers,
    check_texts,
    decode,
    encode,
)
from zarr_manifests.format.manifest import ManifestRef
from zarr_manifests.ids import NODE_ID_BYTES
from zarr_manifests.keys import (
    DOCUMENTS,
    ArrayMeta,
    GroupMeta,
    join,
    node_documents,
    parse_documents,
)

__all__ = ["Base", "Node", "NodeKind"]


class NodeKind(IntEnum):
    """Kind of a node."""

    GROUP = 0
    ARRAY = 1
    OPAQUE = 2


_KINDS: Final = {int(kind): kind for kind in NodeKind}
_DOCUMENTS: Final = frozenset(DOCUMENTS)
_BYTES: Final = frozenset({bytes})


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the hierarchy.

    Parameters
    ----------
    path : str
        Path without a leading slash; empty for the root. For an opaque entry, a slash and the
        whole key.
    node_id : bytes
        12 random bytes.
    kind : NodeKind
        Group, array or opaque entry.
    documents : mapping of str to bytes
        Metadata documents by file name, unchanged: `zarr.json`, or `.zarray` or `.zgroup` and
        optionally `.zattrs`. Empty for opaque entries.

    Raises
    ------
    InvalidArgumentError
        If the path is not valid Unicode text.
    CorruptObjectError
        If the id has the wrong length, or the documents do not describe a node of that kind.
    """

    path: str
    node_id: bytes
    kind: NodeKind
    documents: Mapping[str, bytes]
    meta: ArrayMeta | GroupMeta | None = field(init=False, repr=False, compare=False)
    """The parsed documents; None for an opaque entry."""
    array: ArrayMeta | None = field(init=False, repr=False, compare=False)
    """The parsed documents of an array; None for other nodes."""

    def __post_init__(self) -> None:
        check_texts("a key", self.path)
        meta = parse_documents(self.documents)
        object.__setattr__(self, "meta", meta)
        object.__setattr__(self, "array", meta if isinstance(meta, ArrayMeta) else None)
        # Most nodes have one document; checking that one is enough.
        sound = len(self.node_id) == NODE_ID_BYTES and (
            (meta is not None and len(self.documents) == 1)
            or node_documents(self.documents).keys() == self.documents.keys()
        )
        sound = sound and (
            (self.kind is NodeKind.GROUP and isinstance(meta, GroupMeta))
            or (self.kind is NodeKind.ARRAY and isinstance(meta, ArrayMeta))
            or (self.kind is NodeKind.OPAQUE and not self.documents)
        )
        sound = sound and self.path.startswith("/") == (self.kind is NodeKind.OPAQUE)
        if not sound:
            raise CorruptObjectError(f"/{self.path}: not a node of kind {self.kind.name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Node, (self.path, self.node_id, self.kind, self.documents)

    @property
    def document_keys(self) -> list[str]:
        """The keys of its documents."""
        return [join(self.path, name) for name in self.documents]

    def pack(self) -> list[Any]:
        """As a list for msgpack."""
        return [self.path, self.node_id, int(self.kind), dict(self.documents)]

    @classmethod
    def parse(cls, value: Any, where: str) -> Node:
        """From a list that `pack` made."""
        match value:
            case [str(path), bytes(node_id), int(kind), dict(documents)] if (
                kind in _KINDS
                and documents.keys() <= _DOCUMENTS
                and set(map(type, documents.values())) <= _BYTES
            ):
                return cls(path, node_id, _KINDS[kind], documents)
        raise CorruptObjectError(f"{where}: expected path, id, kind and documents")


@dataclass(frozen=True, slots=True)
class Base:
    """Node table and directory of leaves.

    Parameters
    ----------
    nodes : tuple of Node
        All nodes as of `sequence`.
    manifests : tuple of ManifestRef
        The leaves, each with the sequence it is merged to.
    sequence : int
        Sequence of the newest change in `nodes`.
    counts : tuple of Count or None
        Chunks of each node as of `sequence`; None if unknown.

    Raises
    ------
    CorruptObjectError
        If a leaf is merged to a later sequence than the base, or a path occurs twice.
    """

    nodes: tuple[Node, ...]
    manifests: tuple[ManifestRef, ...]
    sequence: int = 0
    counts: tuple[Count, ...] | None = None

    def __post_init__(self) -> None:
        if any(merged > self.sequence for ref in self.manifests for merged in ref.merged):
            raise CorruptObjectError("base: a leaf is merged to a later sequence than the base")
        if len({node.path for node in self.nodes}) != len(self.nodes):
            raise CorruptObjectError("base.nodes: a path occurs twice")
        check_numbers("base.sequence", self.sequence)
        check_counts(self.counts, least=0)

    def encode(self) -> bytes:
        """The object's bytes."""
        return encode(
            ObjectKind.BASE,
            {
                "nodes": [node.pack() for node in self.nodes],
                "manifests": [manifest.pack() for manifest in self.manifests],
                "sequence": self.sequence,
                "counts": pack_counts(self.counts),
            },
        )

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Base:
        """Decode a base."""

        def parse(fields: Fields) -> Base:
            return cls(
                tuple(Node.parse(v, "base.nodes") for v in fields.items("nodes")),
                tuple(ManifestRef.parse(f) for f in fields.maps("manifests")),
                fields.number("sequence"),
                parse_counts(fields),
            )

        return decode(data, ObjectKind.BASE, parse, ref.key, crc=ref.crc32c, length=ref.length)
