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
from typing import Any, Final

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.envelope import Fields, ObjectKind, check_numbers, check_texts
from zarr_manifests.format.manifest import Manifest, ManifestRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.records import MetadataObject, Stored, binary, maps, within
from zarr_manifests.grid import Coords
from zarr_manifests.ids import NODE_ID_BYTES

COMMIT_ID_BYTES = 16
NODES: Final = within(Node)
TABLES: Final = Stored(Manifest.parse, Manifest.pack)


def _deleted(fields: Fields, name: str) -> dict[str, bytes]:
    deleted = fields.table(name)
    if not all(isinstance(node, bytes) for node in deleted.values()):
        raise CorruptObjectError(f"{fields.where}.{name}: expected node ids")
    return deleted


DELETED: Final = Stored(_deleted, dict)


def pack_shapes(shapes: Mapping[bytes, Coords | None]) -> list[Any]:
    """Grid shapes by node id, as a list of pairs for msgpack."""
    return [[node, shape] for node, shape in shapes.items()]


def parse_shapes(value: object, where: str, *, optional: bool = False) -> dict[bytes, Any]:
    """Grid shapes by node id, from a list of pairs; None for a shape only if it is optional."""
    shapes: dict[bytes, Coords | None] = {}
    for pair in value if isinstance(value, list) else [None]:
        match pair:
            case [bytes(node), list(shape)]:
                shapes[node] = tuple(shape)
            case [bytes(node), None] if optional:
                shapes[node] = None
            case _:
                raise CorruptObjectError(f"{where}: expected node id and grid shape")
    return shapes


def _truncated(fields: Fields, name: str) -> dict[bytes, Coords]:
    return parse_shapes(fields.items(name), f"{fields.where}.{name}")


class CommitKind(StrEnum):
    """What a commit mostly did: a label that nothing depends on."""

    APPEND = "append"
    OVERWRITE = "overwrite"
    DELETE = "delete"
    METADATA = "metadata"
    REWRITE = "rewrite"


@dataclass(frozen=True, slots=True)
class Delta(MetadataObject):
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

    _KIND = ObjectKind.DELTA
    _FIELDS = (
        ("commit", "commit_id", binary(COMMIT_ID_BYTES)),
        ("nodes", "nodes", NODES),
        ("deleted", "deleted", DELETED),
        ("truncated", "truncated", Stored(_truncated, pack_shapes)),
        ("tables", "embedded", TABLES),
        ("manifests", "manifests", maps(ManifestRef)),
    )

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
