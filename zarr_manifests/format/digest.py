"""Digests: several live deltas in one object, for readers that open a snapshot.

A digest covers consecutive deltas of a snapshot. It holds the node records after them, all their
truncations, and the chunk tables of coordinates, merged into one for each node in `covered`.
Invariant: it only repeats its deltas, so it saves requests and can always be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.delta import DELETED, NODES, TABLES, pack_shapes, parse_shapes
from zarr_manifests.format.envelope import Fields, ObjectKind, check_numbers, check_texts
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.records import NUMBERS, MetadataObject, Stored
from zarr_manifests.grid import Coords
from zarr_manifests.ids import NODE_ID_BYTES


def _truncated(fields: Fields, name: str) -> tuple[dict[bytes, Coords], ...]:
    where = f"{fields.where}.{name}"
    return tuple(parse_shapes(cuts, where) for cuts in fields.items(name))


def _covered(fields: Fields, name: str) -> dict[bytes, Coords | None]:
    return parse_shapes(fields.items(name), f"{fields.where}.{name}", optional=True)


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
        ("nodes", "nodes", NODES),
        ("deleted", "deleted", DELETED),
        ("truncated", "truncated", Stored(_truncated, lambda cuts: [*map(pack_shapes, cuts)])),
        ("covered", "covered", Stored(_covered, pack_shapes)),
        ("tables", "tables", TABLES),
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
