"""What commits have changed, as records: of each commit, or of a range of commits together.

A `NodeTable` follows the nodes from commit to commit, so that every chunk table finds the path and
grid that its array has at that commit. Only the commits' own deltas are read.

The records of one commit come in the order in which they take effect: changes of nodes, then
truncations, then chunks. For a range (`Net`) the deltas of each node are merged, newest wins, and
the nodes at both ends are compared. So a coordinate occurs at most once, and nodes that were both
made and deleted within the range do not occur.

Invariant: replaying either over the chunks before gives the chunks after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.keys import absolute
from zarr_manifests.planning.tables.merge import Layer, Overlay, bare, inside, merge_layers, select
from zarr_manifests.planning.tables.moves import Fields, field_changes
from zarr_manifests.planning.upkeep.cell_changes import ArrayShape

_MOST_LAYERS: Final = 16

type Tables = Mapping[bytes, Sequence[ChunkTable]]


class Operation(StrEnum):
    """The kind of change that a record describes.

    Attributes
    ----------
    DELETE
        A group, array or other key was deleted with all its chunks.
    MOVE
        It has another path. All moves of one commit take effect at once.
    CREATE
        It is new, and has no chunks yet.
    METADATA
        Its metadata documents have changed.
    TRUNCATE
        Chunks at or beyond a grid shape on any axis are gone.
    UNSET
        Chunks were deleted.
    APPEND
        Chunks were written beyond the array's previous grid, or to a new array.
    OVERWRITE
        Chunks were written inside the array's previous grid, whether or not they existed.
    """

    DELETE = "delete"
    MOVE = "move"
    CREATE = "create"
    METADATA = "metadata"
    TRUNCATE = "truncate"
    UNSET = "unset"
    APPEND = "append"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One operation on one group, array or other key.

    Parameters
    ----------
    path : str
        Absolute path after the commit; for `delete`, before it.
    operation : Operation
        The kind of change; it equals its name as a string, such as `"append"`.
    coordinates : int64[n, ndim]
        The chunks concerned, for `unset`, `append` and `overwrite`; otherwise no rows.
    snapshot_id : str or None
        The snapshot of the commit; None for a range of commits.
    grid_shape : tuple of int or None
        For `truncate`: chunks at or beyond it on any axis are gone.
    moved_from : str or None
        For `move`: the path before.
    before, after : ArrayShape or None
        Of an array: its shape and chunk shape before and after the commit, or the range of commits.
        None if it was made or deleted, or is no array.
    fields : mapping of str to tuple
        For `metadata`: the fields of the documents that differ, such as `shape` or
        `attributes.units`, with their values before and after; None where there was none.

    Raises
    ------
    InvalidArgumentError
        If the fields contradict the operation.
    """

    path: str
    operation: Operation
    coordinates: IndexArray
    snapshot_id: str | None = None
    grid_shape: Coords | None = None
    moved_from: str | None = None
    before: ArrayShape | None = None
    after: ArrayShape | None = None
    fields: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        chunks = self.operation in (Operation.UNSET, Operation.APPEND, Operation.OVERWRITE)
        if (
            self.coordinates.ndim != 2
            or (len(self.coordinates) > 0) != chunks
            or (self.grid_shape is not None) != (self.operation is Operation.TRUNCATE)
            or (self.moved_from is not None) != (self.operation is Operation.MOVE)
        ):
            raise InvalidArgumentError(f"not a valid change: {self.operation} of {self.path}")


def node_path(node: Node) -> str:
    """Return the node's absolute path."""
    return absolute(node.path)


class NodeTable:
    """The nodes of a snapshot, updated commit by commit as deltas are applied."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._by_path = {node.path: node for node in nodes}
        self.by_id = {node.node_id: node for node in self._by_path.values()}

    def apply(self, delta: Delta) -> tuple[dict[bytes, Node], dict[bytes, Node]]:
        """Apply a delta; return the nodes at its paths by id, before and after."""
        paths = dict.fromkeys((*delta.deleted, *(node.path for node in delta.nodes)))
        before = self._at(paths)
        for path in delta.deleted:
            self._by_path.pop(path, None)
        self._by_path.update((node.path, node) for node in delta.nodes)
        after = self._at(paths)
        for node_id in before:
            self.by_id.pop(node_id, None)
        self.by_id.update(after)
        return before, after

    def _at(self, paths: Iterable[str]) -> dict[bytes, Node]:
        found = (self._by_path.get(path) for path in paths)
        return {node.node_id: node for node in found if node is not None}


def changes_of(
    nodes: NodeTable, delta: Delta, tables: Tables, snapshot_id: str
) -> Iterator[Change]:
    """Yield the changes of one commit; `nodes` are the nodes before it, and are updated."""
    before, after = nodes.apply(delta)
    records = [*_node_changes(before, after)]
    for node_id in sorted({*delta.truncated, *tables}):
        node = nodes.by_id.get(node_id)
        if node is not None:
            # Without a path in the delta, the node itself has not changed.
            old = before.get(node_id) if node_id in after else node
            overlay = merge_layers([_layer(delta, node_id, tables)])
            records += _chunk_changes(node, old, overlay)
    for record in records:
        yield replace(record, snapshot_id=snapshot_id)


@dataclass(slots=True)
class Net:
    """The deltas of a range of commits, merged node by node."""

    start: Mapping[bytes, Node]
    nodes: NodeTable
    _layers: dict[bytes, list[Layer]] = field(default_factory=dict)

    @classmethod
    def since(cls, nodes: Iterable[Node]) -> Net:
        """Start a range at these nodes, without any change."""
        table = NodeTable(nodes)
        return cls(dict(table.by_id), table)

    def add(self, delta: Delta, tables: Tables) -> None:
        """Add the next commit's delta."""
        self.nodes.apply(delta)
        for node_id in {*delta.truncated, *tables}:
            add_layer(self._layers.setdefault(node_id, []), delta, node_id, tables)

    def node_changes(self) -> Iterator[Change]:
        """Yield what happened to nodes."""
        start, end = self.start, self.nodes.by_id
        touched = [i for i in start.keys() | end.keys() if start.get(i) != end.get(i)]
        yield from _node_changes(
            {i: start[i] for i in touched if i in start}, {i: end[i] for i in touched if i in end}
        )

    def touched(self) -> list[tuple[bytes, IndexArray]]:
        """Return the nodes with changed chunks, by path, and chunks to look up at the start.

        Those are unset chunks that may not have existed at the start.
        """
        end = self.nodes.by_id
        found = []
        for node_id in sorted(self._layers.keys() & end.keys(), key=lambda i: end[i].path):
            table = merge_layers(self._layers[node_id]).table
            unset = _no_chunks(end[node_id])
            if table is not None:
                unset = table.coords()[self._unsure(node_id)]
            found.append((node_id, unset))
        return found

    def chunk_changes(self, node_id: bytes, there: npt.NDArray[np.bool_]) -> Iterator[Change]:
        """Yield what happened to a node's chunks; `there` says which looked-up ones existed."""
        overlay = merge_layers(self._layers[node_id])
        table = overlay.table
        if table is not None:
            keep = table.kind != RefKind.UNSET
            keep[self._unsure(node_id)] = there
            table = select(table, keep)
        old = self.start.get(node_id)
        yield from _chunk_changes(self.nodes.by_id[node_id], old, Overlay(overlay.truncated, table))

    def _unsure(self, node_id: bytes) -> npt.NDArray[np.bool_]:
        """Rows of the node's table that unset a chunk inside the array's previous grid."""
        overlay = merge_layers(self._layers[node_id])
        assert overlay.table is not None  # callers have looked
        unset = np.asarray(overlay.table.kind == RefKind.UNSET)
        old = self.start.get(node_id)
        if old is None:
            return np.zeros(len(unset), np.bool_)
        grids = [overlay.truncated, None if old.array is None else old.array.grid.hi]
        for grid in grids:
            if grid is not None:
                unset &= inside(overlay.table.coords(), grid)
        return unset


def add_layer(layers: list[Layer], delta: Delta, node_id: bytes, tables: Tables) -> None:
    """Add what the next commit did to a node's chunks; merge the layers if there are many."""
    layers.append(_layer(delta, node_id, tables))
    if len(layers) == _MOST_LAYERS:
        overlay = merge_layers(layers)
        rows = () if overlay.table is None else (overlay.table,)
        layers[:] = [Layer(overlay.truncated, rows)]


def _layer(delta: Delta, node_id: bytes, tables: Tables) -> Layer:
    return Layer(delta.truncated.get(node_id), tuple(map(bare, tables.get(node_id, ()))))


def _node_changes(before: Mapping[bytes, Node], after: Mapping[bytes, Node]) -> Iterator[Change]:
    """Yield what happened to nodes, in the order in which it takes effect."""
    records = []
    for node_id, old in before.items():
        new = after.get(node_id)
        if new is None:
            records.append(_record(Operation.DELETE, old, None))
            continue
        if new.path != old.path:
            records.append(_record(Operation.MOVE, old, new, moved_from=node_path(old)))
        if new.documents != old.documents:
            fields = field_changes(old, new)
            records.append(_record(Operation.METADATA, old, new, fields=fields))
    for node_id, new in after.items():
        if node_id not in before:
            records.append(_record(Operation.CREATE, None, new))
    order = list(Operation)
    return iter(sorted(records, key=lambda r: (order.index(r.operation), r.path)))


def _chunk_changes(node: Node, old: Node | None, overlay: Overlay) -> Iterator[Change]:
    """Yield what happened to a node's chunks; `old` is the node before, or None."""
    cut = overlay.truncated if old is not None else None
    grid = None if old is None or old.array is None else old.array.grid.hi
    if cut is not None and (grid is None or all(n <= at for n, at in zip(grid, cut, strict=True))):
        cut = None  # no chunk can have existed there
    if cut is not None:
        yield _record(Operation.TRUNCATE, old, node, grid_shape=cut)
    if overlay.table is None:
        return
    coords, unset = overlay.table.coords(), overlay.table.kind == RefKind.UNSET
    known = np.full(len(coords), old is not None)
    if grid is not None:
        known &= inside(coords, grid)
    gone = unset & known
    if cut is not None:
        gone &= inside(coords, cut)
    for operation, rows in (
        (Operation.UNSET, gone),
        (Operation.APPEND, ~unset & ~known),
        (Operation.OVERWRITE, ~unset & known),
    ):
        if rows.any():
            yield _record(operation, old, node, coords[rows])


def _record(
    operation: Operation,
    old: Node | None,
    new: Node | None,
    coordinates: IndexArray | None = None,
    **fields: Any,
) -> Change:
    """A record about a node, which was `old` before and is `new` now."""
    node = new if new is not None else old
    assert node is not None  # callers have one of them
    chunks = _no_chunks(node) if coordinates is None else coordinates
    before, after = (None if each is None else _shape(each) for each in (old, new))
    return Change(node_path(node), operation, chunks, before=before, after=after, **fields)


def _shape(node: Node) -> ArrayShape | None:
    """The shape of a node that is an array, else None."""
    meta = node.array
    return None if meta is None else ArrayShape(meta.shape, meta.chunk_shape)


def _no_chunks(node: Node) -> IndexArray:
    ndim = len(node.array.shape) if node.kind is NodeKind.ARRAY and node.array else 0
    return np.empty((0, ndim), np.int64)
