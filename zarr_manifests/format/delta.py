"""Deltas: what one commit changed; and digests of several.

A delta is the transaction log of its commit. Until a compaction merges it into the base, readers
also lay it over the base: node records set and deleted, truncations, and chunk tables of refs set
and unset. Small tables are embedded; others are in manifests.

A *run* replaces several neighbours in a read list. It is an object of the same form, whose `commit`
is the one that wrote it.

A *digest* is several live deltas in one object, for readers that open a snapshot. It covers
consecutive deltas of a snapshot, and holds the node records after them, all their truncations, and
the chunk tables of coordinates, merged into one for each node in `covered`.

Invariants: a delta has at most one row for a coordinate; its truncations apply to everything older
than the delta, and not to its own rows. A digest only repeats its deltas, so it saves requests and
can always be ignored.
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
from zarr_manifests.format.records import NUMBERS, MetadataObject, Stored, binary, maps, rows
from zarr_manifests.grid import Coords
from zarr_manifests.ids import NODE_ID_BYTES

COMMIT_ID_BYTES = 16
_NODES: Final = rows(Node)
_TABLES: Final = Stored(Manifest.parse, Manifest.pack)


def _deleted(fields: Fields, name: str) -> dict[str, bytes]:
    deleted = fields.table(name)
    if not all(isinstance(node, bytes) for node in deleted.values()):
        raise CorruptObjectError(f"{fields.where}.{name}: expected node ids")
    return deleted


_DELETED: Final = Stored(_deleted, dict)


def _pack_shapes(shapes: Mapping[bytes, Coords | None]) -> list[Any]:
    """Grid shapes by node id, as a list of pairs for msgpack."""
    return [[node, shape] for node, shape in shapes.items()]


def _parse_shapes(value: object, where: str, *, optional: bool = False) -> dict[bytes, Any]:
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
    return _parse_shapes(fields.items(name), f"{fields.where}.{name}")


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
        ("nodes", "nodes", _NODES),
        ("deleted", "deleted", _DELETED),
        ("truncated", "truncated", Stored(_truncated, _pack_shapes)),
        ("tables", "embedded", _TABLES),
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


def _cuts_of_each(fields: Fields, name: str) -> tuple[dict[bytes, Coords], ...]:
    where = f"{fields.where}.{name}"
    return tuple(_parse_shapes(cuts, where) for cuts in fields.items(name))


def _covered(fields: Fields, name: str) -> dict[bytes, Coords | None]:
    return _parse_shapes(fields.items(name), f"{fields.where}.{name}", optional=True)


@dataclass(frozen=True, slots=True)
class Digest(MetadataObject):
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

    _KIND = ObjectKind.DIGEST
    _FIELDS = (
        ("nodes", "nodes", _NODES),
        ("deleted", "deleted", _DELETED),
        ("truncated", "truncated", Stored(_cuts_of_each, lambda cuts: [*map(_pack_shapes, cuts)])),
        ("covered", "covered", Stored(_covered, _pack_shapes)),
        ("tables", "tables", _TABLES),
        ("of", "of", NUMBERS),
    )

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
