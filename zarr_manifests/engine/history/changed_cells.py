"""Which cells of arrays came, changed or went between two snapshots.

The deltas of the commits in between say which chunks were written or deleted. Only chunks that
these touch, or that lie across an edge that has moved, are looked up in the two snapshots. An array
that is another one at the end, or whose values are decoded in another way, counts as written anew.

Where the commits in between have expired, and both snapshots are still there, `compared_cells`
compares where each chunk lies instead. A chunk that lies elsewhere counts as written.

Invariant: positions mean the same cells at both ends. Where a commit has moved chunks to other
positions (`Session.shift_array`, `Session.reindex_array`), it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.history.changes_between import (
    LoggedCommit,
    chunks_there,
    commits_between,
    if_expired,
)
from zarr_manifests.engine.history.differences import tables_of
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.root import Branch
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.keys import ArrayMeta, absolute
from zarr_manifests.planning.conflict.documents import compare_documents
from zarr_manifests.planning.tables.live_deltas import lies_in
from zarr_manifests.planning.tables.merge import Layer, Overlay, difference, inside, merge_layers
from zarr_manifests.planning.upkeep.changes import (
    ArrayShape,
    CellChanges,
    ChangedArray,
    add_layer,
    classify_cells,
)


def changed_cells(
    context: ReadContext, start: str | None, end: Branch, paths: Sequence[str]
) -> CellChanges:
    """What happened to the cells of arrays of one shape after snapshot `start` up to `end`.

    Without `start`, all cells of `end` are new.

    Raises
    ------
    NotFoundError
        If an array is in neither snapshot.
    InvalidArgumentError
        If `start` is not an ancestor, the arrays have different shapes, or a commit has moved
        their chunks to other positions.
    HistoryExpiredError
        If some of the range has expired.
    """
    with if_expired(context, start, end.head):
        commits: Sequence[LoggedCommit] = ()
        before = None
        if start is not None:
            commits, before = commits_between(context, start, end.head, end.floor)
        old = None if before is None else context.open_view(before)
        new = context.open_view(end.head)
        pairs = [_pair(path, old, new) for path in paths]
        kept = {was.node.node_id: was for was, now in pairs if was and _means_the_same(was, now)}
        layers: dict[bytes, list[Layer]] = {node_id: [] for node_id in kept}
        grids = {node_id: was.node for node_id, was in kept.items()}
        for commit in commits:
            delta = context.objects.load(commit.log, Delta)
            tables = tables_of(context, delta, kept)
            _refuse_moves(commit.snapshot_id, grids, delta, tables)
            grids |= {node.node_id: node for node in delta.nodes if node.node_id in kept}
            for node_id in kept.keys() & {*delta.truncated, *tables}:
                add_layer(layers[node_id], delta, node_id, tables)
        found = _classified(pairs, lambda was, _: merge_layers(layers[was.node.node_id]))
    return replace(found, start=start, end=snapshot_id_of(end.head.key))


def compared_cells(
    context: ReadContext, start: Branch, end: Branch, paths: Sequence[str]
) -> CellChanges:
    """The same without the commits in between: the chunk tables of both snapshots are compared.

    Raises
    ------
    NotFoundError
        If an array is in neither snapshot.
    InvalidArgumentError
        If the arrays have different shapes.
    """
    old, new = context.open_branch(start), context.open_branch(end)
    pairs = [_pair(path, old, new) for path in paths]
    found = _classified(pairs, lambda was, now: Overlay(None, difference(now.table, was.table)))
    return replace(found, start=old.snapshot_id, end=new.snapshot_id)


@dataclass(frozen=True, slots=True)
class _Array:
    """An array in one of the two snapshots."""

    view: SnapshotView
    node: Node
    meta: ArrayMeta

    @classmethod
    def of(cls, view: SnapshotView, node: Node | None) -> _Array | None:
        """The node in the snapshot, if it is an array."""
        return None if node is None or node.array is None else cls(view, node, node.array)

    @property
    def shape(self) -> ArrayShape:
        return ArrayShape(self.meta.shape, self.meta.chunk_shape)

    @property
    def table(self) -> ChunkTable | None:
        """All chunks that exist."""
        return self.view.chunks(self.node.node_id)

    def there(self, coords: IndexArray) -> npt.NDArray[np.bool_]:
        """Which of these chunks exist."""
        return chunks_there(self.view, self.node.node_id, coords)

    def chunks(self, boxes: Iterable[Box] | None = None) -> IndexArray:
        """The chunks that exist: all, or those in any of the boxes, which do not overlap."""
        if boxes is None:
            tables = [self.table]
        else:
            tables = [self.view.chunks_in(self.node.node_id, box) for box in boxes]
        found = [table.coords() for table in tables if table is not None]
        return np.concatenate([np.empty((0, len(self.meta.shape)), np.int64), *found])


type _Pair = tuple[_Array | None, _Array | None]


def _pair(path: str, old: SnapshotView | None, new: SnapshotView) -> _Pair:
    """The array at both ends, which may have had another path at the start."""
    name = path.strip("/")
    now, was = _Array.of(new, new.nodes.get(name)), None
    if old is not None:
        moved = None if now is None else old.by_id.get(now.node.node_id)
        was = _Array.of(old, old.nodes.get(name) if moved is None else moved)
    if was is None and now is None:
        raise NotFoundError(f"there is no array {absolute(name)} in snapshot {new.snapshot_id}")
    return was, now


def _classified(
    pairs: Sequence[_Pair], overlay: Callable[[_Array, _Array], Overlay]
) -> CellChanges:
    """What happened to the cells; `overlay` says which chunks changed of an array that stayed."""
    arrays = [
        _changed(was, now, overlay(was, now))
        if was is not None and now is not None and _means_the_same(was, now)
        else _replaced(was, now)
        for was, now in pairs
    ]
    return classify_cells([_path(pair) for pair in pairs], arrays)


def _path(pair: _Pair) -> str:
    was, now = pair
    found = now or was
    assert found is not None  # `_pair` has found one
    return absolute(found.node.path)


def _means_the_same(was: _Array, now: _Array | None) -> bool:
    """Whether a chunk that nobody has written has the same values at both ends."""
    if now is None or was.node.node_id != now.node.node_id:
        return False
    return not compare_documents(was.node, now.node).structure


def _refuse_moves(
    snapshot_id: str,
    nodes: Mapping[bytes, Node],
    delta: Delta,
    tables: Mapping[bytes, Sequence[ChunkTable]],
) -> None:
    """Raise if a commit has cut chunks off and set chunks in their place, as moves do."""
    for node_id in nodes.keys() & delta.truncated.keys() & tables.keys():
        node, cut = nodes[node_id], delta.truncated[node_id]
        for table in tables[node_id]:
            coords = table.coords()[table.kind != RefKind.UNSET]
            known = node.array is not None and inside(coords, node.array.grid.hi)
            if (known & ~inside(coords, cut)).any():
                raise InvalidArgumentError(
                    f"commit {snapshot_id} has moved chunks of {absolute(node.path)} to other "
                    "positions (shift_array, reindex_array, or a cut and a write in one), so its "
                    "cells cannot be compared with those before. Read the whole of a newer "
                    "snapshot, and the changes from there on"
                )


def _changed(was: _Array, now: _Array, overlay: Overlay) -> ChangedArray:
    """What has happened to an array, by what the merged deltas or the chunk tables say."""
    written = np.empty((0, len(now.meta.shape)), np.int64)
    dropped = was.chunks(_cut_off(was.meta.grid.hi, overlay.truncated))
    if overlay.table is not None:
        coords, unset = overlay.table.coords(), overlay.table.kind == RefKind.UNSET
        written = coords[~unset]
        gone = coords[unset & inside(coords, was.meta.grid.hi)]
        if len(gone):
            dropped = np.concatenate([dropped, gone[was.there(gone)]])
    edges = _moved_edges(was.meta, now.meta)
    # Appends write all chunks at the edge again; nothing is looked up for them then.
    exposed = now.chunks(box for box in edges if int(lies_in(box, written).sum()) < box.size)
    return ChangedArray(was.shape, now.shape, written, dropped, exposed, was.there, now.there)


def _replaced(was: _Array | None, now: _Array | None) -> ChangedArray:
    """An array that is another one now: every chunk was dropped, or written."""
    some = now or was
    assert some is not None  # `_pair` has found one
    nothing = np.empty((0, len(some.meta.shape)), np.int64)
    return ChangedArray(
        None if was is None else was.shape,
        None if now is None else now.shape,
        nothing if now is None else now.chunks(),
        nothing if was is None else was.chunks(),
        nothing,
        (was or some).there,
        (now or some).there,
    )


def _moved_edges(was: ArrayMeta, now: ArrayMeta) -> Iterator[Box]:
    """Boxes of the chunks across the nearer of the two edges of an axis that has another length."""
    grid = tuple(map(min, was.grid.hi, now.grid.hi))
    for axis, chunk in enumerate(now.chunk_shape):
        nearer = min(was.shape[axis], now.shape[axis])
        if was.shape[axis] != now.shape[axis] and nearer % chunk:
            yield _slab(grid, axis, nearer // chunk, nearer // chunk + 1)


def _cut_off(grid: Coords, cut: Coords | None) -> Iterator[Box]:
    """Boxes, apart from each other, of the chunks in the grid that a truncation has removed."""
    for axis, size in enumerate(grid):
        if cut is not None and cut[axis] < size:
            yield _slab(grid, axis, cut[axis], size)
            grid = (*grid[:axis], cut[axis], *grid[axis + 1 :])


def _slab(grid: Coords, axis: int, lo: int, hi: int) -> Box:
    start = tuple(lo if a == axis else 0 for a in range(len(grid)))
    return Box(start, tuple(hi if a == axis else n for a, n in enumerate(grid)))
