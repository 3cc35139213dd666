"""What commits have changed, as records and as cells: of each commit, or of a range of them.

The records of one commit come in the order in which they take effect: changes of nodes, then
truncations, then chunks. A range is told as one commit that makes its start into its end. So a
coordinate occurs at most once, and nodes that were both made and deleted within the range do not
occur. Invariant: replaying either over the chunks before gives the chunks after.

Several arrays of one shape are the columns of one table. A *cell* is a row of the table if it lies
inside the shape, and a stored chunk of any array holds it. So a chunk that was never stored has no
rows. Each row that differs between two snapshots is in one class:

- *added*: it is a row at the end only. It lies beyond the old shape, or in chunks that were absent.
- *removed*: it is a row at the start only.
- *overwritten*: it is a row at both, and a chunk that holds it was written or deleted.
- *rewritten*: it is a row at both, and was written again only because it shares a chunk with cells
  that an append added. Whether its values differ is not known.

Axes are cut at the edges of changed chunks and at both shapes. The cells between two cuts of each
axis are a *block*: a whole block is in one class. The cost depends on the changed chunks, not on
the size of the arrays. Invariants:

- Added rows are the rows of the end without those of the start. So over consecutive ranges in which
  no row is removed, each row is added once, and all of them are the rows of the end.
- The classes have no cell in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.manifest import Node
from zarr_manifests.grid import Box, Coords, IndexArray, in_few_boxes, places_in
from zarr_manifests.keys import absolute
from zarr_manifests.planning.components import Changes, Fields, NodeChange, field_changes
from zarr_manifests.planning.merge import inside

type _Mask = npt.NDArray[np.bool_]


class ArrayShape(Struct, frozen=True):
    """An array's shape and the shape of its chunks, in cells.

    Parameters
    ----------
    shape, chunk_shape : tuple of int
        One number for each axis.
    """

    shape: Coords
    chunk_shape: Coords


class CellChanges(Struct, frozen=True, eq=False):
    """The cells of arrays of one shape that changed between two snapshots.

    Each class of cells is an int64[n, 2, ndim]: half-open boxes of array positions, the lower and
    the upper bound of each. Boxes are disjoint and in C order.

    Parameters
    ----------
    paths : tuple of str
        Absolute paths of the arrays at the end.
    old_shape : tuple of int or None
        Their shape at the start; None if none of them existed.
    new_shape : tuple of int or None
        Their shape at the end; None if none of them exists.
    added : int64[n, 2, ndim]
        Cells beyond the old shape, or in chunks that were absent.
    overwritten : int64[n, 2, ndim]
        Cells that were there, in chunks that were written again or deleted.
    rewritten : int64[n, 2, ndim]
        Cells that were there, in chunks at the old edge of an axis that has grown. An append must
        write such a chunk again; whether the values differ is not known.
    removed : int64[n, 2, ndim]
        Cells that are not there any more.
    start : str or None
        Id of the first snapshot; None if all of the second one is new.
    end : str
        Id of the second snapshot.
    """

    paths: tuple[str, ...]
    old_shape: Coords | None
    new_shape: Coords | None
    added: IndexArray
    overwritten: IndexArray
    rewritten: IndexArray
    removed: IndexArray
    start: str | None = None
    end: str = ""

    @property
    def only_added(self) -> bool:
        """Whether no cell was overwritten or removed."""
        return not len(self.overwritten) and not len(self.removed)


class ChangedArray(Struct, frozen=True, eq=False):
    """What happened to one array.

    Parameters
    ----------
    before, after : ArrayShape or None
        The array at the start and at the end; None if it did not exist.
    written : int64[n, ndim]
        Chunks at the end that were written.
    dropped : int64[n, ndim]
        Chunks at the start that were deleted.
    exposed : int64[n, ndim]
        Chunks at both that were not written and lie across the old or the new edge of an axis.
    there_before, there_after : callable
        Which of these chunks (int64[n, ndim], n >= 1, inside the grid) exist.
    """

    before: ArrayShape | None
    after: ArrayShape | None
    written: IndexArray
    dropped: IndexArray
    exposed: IndexArray
    there_before: Callable[[IndexArray], _Mask]
    there_after: Callable[[IndexArray], _Mask]


def common_shape(shapes: Sequence[ArrayShape | None], paths: Sequence[str]) -> Coords | None:
    """The shape that all of these arrays have; None if none of them exists.

    Raises
    ------
    InvalidArgumentError
        If they have different shapes.
    """
    found = {shape.shape: path for shape, path in zip(shapes, paths, strict=True) if shape}
    if len(found) > 1:
        listed = "; ".join(f"{path} {shape}" for shape, path in found.items())
        raise InvalidArgumentError(f"arrays whose cells are compared have one shape: {listed}")
    return next(iter(found), None)


def classify_cells(paths: Sequence[str], arrays: Sequence[ChangedArray]) -> CellChanges:
    """Tell which cells came, changed or went.

    Parameters
    ----------
    paths : sequence of str
        Paths of the arrays, one or more.
    arrays : sequence of ChangedArray
        What happened to each.

    Raises
    ------
    InvalidArgumentError
        If the arrays have different shapes at the start or at the end.
    """
    old = common_shape([array.before for array in arrays], paths)
    new = common_shape([array.after for array in arrays], paths)
    known = old if old is not None else new
    if old is not None and new is not None and len(old) != len(new):
        raise InvalidArgumentError(f"{paths[0]} has {len(new)} axes now, and had {len(old)}")
    if known is None:
        nothing = np.empty((0, 2, 0), np.int64)
        return CellChanges(tuple(paths), None, None, nothing, nothing, nothing, nothing)
    lo, hi, changed, beside = _blocks(tuple(map(max, old or known, new or known)), arrays)
    existed = _held(lo, [(a.before, a.there_before) for a in arrays], old)
    exists = _held(lo, [(a.after, a.there_after) for a in arrays], new)
    stayed = existed & exists
    classes = exists & ~existed, stayed & changed, stayed & beside & ~changed, existed & ~exists
    a, b, c, d = (in_few_boxes(lo[rows], hi[rows], len(known) - 1) for rows in classes)
    return CellChanges(tuple(paths), old, new, a, b, c, d)


def _blocks(
    most: Coords, arrays: Sequence[ChangedArray]
) -> tuple[IndexArray, IndexArray, _Mask, _Mask]:
    """The blocks of the changed chunks, as far as they lie below `most`.

    Their bounds (int64[n, ndim]); which lie in a chunk that was written or dropped, and which in
    one that was written because an axis has grown.
    """
    pieces: list[tuple[ArrayShape, IndexArray, _Mask, bool]] = []
    for array in arrays:
        edge = _across_old_edge(array)
        if array.after is not None:
            pieces.append((array.after, array.written, edge, True))
            pieces.append(
                (array.after, array.exposed, np.zeros(len(array.exposed), np.bool_), False)
            )
        if array.before is not None:
            pieces.append(
                (array.before, array.dropped, np.zeros(len(array.dropped), np.bool_), True)
            )
    cells = [_cells(shape, chunks) for shape, chunks, _, _ in pieces]
    lows = np.concatenate([lo for lo, _ in cells])
    highs = np.minimum(np.concatenate([hi for _, hi in cells]), most)
    edges = np.concatenate([edge for _, _, edge, _ in pieces])
    written = np.repeat([each[3] for each in pieces], [len(lo) for lo, _ in cells]) & ~edges
    real = (lows < highs).all(axis=1)
    lows, highs, edges, written = lows[real], highs[real], edges[real], written[real]
    shapes = [shape for array in arrays for shape in (array.before, array.after) if shape]
    cuts = [
        _cuts(lows[:, axis], highs[:, axis], [(s.shape[axis], s.chunk_shape[axis]) for s in shapes])
        for axis in range(len(most))
    ]
    first, stop = (
        np.array([*map(np.searchsorted, cuts, cells.T)], np.int64).reshape(cells.T.shape).T
        for cells in (lows, highs)
    )
    owner, places = places_in(first, stop)
    grid = Box((0,) * len(most), tuple(len(cut) for cut in cuts))
    linear, which = np.unique(grid.ravel(places), return_inverse=True)
    at = grid.unravel(linear)
    lo, hi = np.empty_like(at), np.empty_like(at)
    for axis, cut in enumerate(cuts):
        lo[:, axis], hi[:, axis] = cut[at[:, axis]], cut[at[:, axis] + 1]
    changed, beside = np.zeros((2, len(linear)), np.bool_)
    changed[which[written[owner]]] = True
    beside[which[edges[owner]]] = True
    return lo, hi, changed, beside


def _across_old_edge(array: ChangedArray) -> _Mask:
    """Which written chunks were there and hold the old end of an axis that has grown."""
    was, now, chunks = array.before, array.after, array.written
    if was is None or now is None or was.chunk_shape != now.chunk_shape:
        return np.zeros(len(chunks), np.bool_)
    (lo, hi), old = _cells(now, chunks), np.asarray(was.shape, np.int64)
    grown = old < np.asarray(now.shape, np.int64)
    across = (grown & (lo < old) & (old < hi)).any(axis=1) & (lo < old).all(axis=1)
    if across.any():
        across[across] = array.there_before(chunks[across])
    return np.asarray(across)


def _held(
    lo: IndexArray,
    arrays: Sequence[tuple[ArrayShape | None, Callable[[IndexArray], _Mask]]],
    shape: Coords | None,
) -> _Mask:
    """Which blocks, that begin at `lo`, are inside the shape and in a stored chunk of any array."""
    held = np.zeros(len(lo), np.bool_)
    if shape is None:
        return held
    inside = (lo < np.asarray(shape, np.int64)).all(axis=1)  # none lies across its edge
    for array, there in arrays:
        rows = np.flatnonzero(inside & ~held)
        if array is None or not len(rows):
            continue
        chunks = lo[rows] // np.asarray(array.chunk_shape, np.int64)
        grid = Box.around_coords(chunks)
        linear, which = np.unique(grid.ravel(chunks), return_inverse=True)
        held[rows] = there(grid.unravel(linear))[which]
    return held


def _cells(array: ArrayShape, chunks: IndexArray) -> tuple[IndexArray, IndexArray]:
    """The first and the last cell (exclusive) of each chunk on each axis."""
    lo = chunks * np.asarray(array.chunk_shape, np.int64)
    return lo, lo + np.asarray(array.chunk_shape, np.int64)


def _cuts(lo: IndexArray, hi: IndexArray, sizes: Sequence[tuple[int, int]]) -> IndexArray:
    """Where to cut an axis: at both ends of joined spans, and inside them at edges of chunks.

    Also at the lengths of arrays, which are given with those of their chunks.
    """
    starts, stops = _union(lo, hi)
    cuts = [starts, stops, np.array([size for size, _ in sizes], np.int64)]
    for chunk in {max(chunk, 1) for _, chunk in sizes}:
        _, edges = places_in(-(-starts // chunk)[:, None], -(-stops // chunk)[:, None])
        cuts.append(edges[:, 0] * chunk)
    return np.unique(np.concatenate(cuts))


def _union(lo: IndexArray, hi: IndexArray) -> tuple[IndexArray, IndexArray]:
    """The spans (half-open) joined where they overlap or touch."""
    if not len(lo):
        return lo, hi
    order = np.argsort(lo, kind="stable")
    lo, reach = lo[order], np.maximum.accumulate(hi[order])
    first = np.flatnonzero(np.append(True, lo[1:] > reach[:-1]))
    return lo[first], reach[np.append(first[1:], len(lo)) - 1]


# --- records -----------------------------------------------------------------------------------


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


class Change(Struct, frozen=True, eq=False):
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
    """

    path: str
    operation: Operation
    coordinates: IndexArray
    snapshot_id: str | None = None
    grid_shape: Coords | None = None
    moved_from: str | None = None
    before: ArrayShape | None = None
    after: ArrayShape | None = None
    fields: Fields = {}


def records_of(changes: Changes, snapshot_id: str | None = None) -> Iterator[Change]:
    """The records of a commit, or of a range of commits, in the order in which they take effect."""
    nodes: list[Change] = []
    chunks: list[Change] = []
    for _, change in sorted(changes):
        old, new = change.before, change.after
        record = partial(_record, snapshot_id, old, new)
        if new is None:
            nodes.append(record(Operation.DELETE))
            continue
        if old is None:
            nodes.append(record(Operation.CREATE))
        elif change.moved:
            nodes.append(record(Operation.MOVE, moved_from=absolute(old.path)))
        if old is not None and old.documents != new.documents:
            nodes.append(record(Operation.METADATA, fields=field_changes(old, new)))
        chunks += _chunk_changes(change, record)
    order = list(Operation)
    nodes.sort(key=lambda one: (order.index(one.operation), one.path))
    yield from nodes
    yield from chunks


def _chunk_changes(change: NodeChange, record: Callable[..., Change]) -> Iterator[Change]:
    """Yield what happened to a node's chunks."""
    grid, cut = _grid(change.before), change.cut
    if cut is not None and (grid is None or all(n <= at for n, at in zip(grid, cut, strict=True))):
        cut = None  # no chunk can have existed there
    if cut is not None:
        yield record(Operation.TRUNCATE, grid_shape=cut)
    if change.chunks is None:
        return
    coords, unset = change.chunks.coords(), change.chunks.kind == RefKind.UNSET
    known = np.full(len(coords), change.before is not None)
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
            yield record(operation, coords[rows])


def _grid(node: Node | None) -> Coords | None:
    return None if node is None or node.array is None else node.array.grid.hi


def _record(
    snapshot_id: str | None,
    old: Node | None,
    new: Node | None,
    operation: Operation,
    coordinates: IndexArray | None = None,
    **fields: Any,
) -> Change:
    """A record about a node, which was `old` before and is `new` now."""
    node = new if new is not None else old
    assert node is not None  # callers have one of them
    ndim = 0 if node.array is None else len(node.array.shape)
    chunks = np.empty((0, ndim), np.int64) if coordinates is None else coordinates
    before, after = (None if each is None else _shape(each) for each in (old, new))
    path = absolute(node.path)
    return Change(path, operation, chunks, snapshot_id, before=before, after=after, **fields)


def _shape(node: Node) -> ArrayShape | None:
    """The shape of a node that is an array, else None."""
    meta = node.array
    return None if meta is None else ArrayShape(meta.shape, meta.chunk_shape)
