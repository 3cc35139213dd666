"""Which cells came, changed or went between two snapshots.

Several arrays of one shape are the columns of one table. A cell is a row of the table if it lies
inside the shape, and a stored chunk of any array holds it. So a chunk that was never stored has no
rows. Each row that differs between the snapshots is in one class:

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box, Coords, IndexArray, join_along

type _Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """An array's shape and the shape of its chunks, in cells.

    Parameters
    ----------
    shape, chunk_shape : tuple of int
        One number for each axis.
    """

    shape: Coords
    chunk_shape: Coords


@dataclass(frozen=True, slots=True, eq=False)
class CellChanges:
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


@dataclass(frozen=True, slots=True, eq=False)
class ChangedArray:
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
    blocks = _Blocks(len(known), old, new, arrays)
    existed = blocks.held([(a.before, a.there_before) for a in arrays], old)
    exists = blocks.held([(a.after, a.there_after) for a in arrays], new)
    stayed = existed & exists
    return CellChanges(
        tuple(paths),
        old,
        new,
        blocks.boxes(exists & ~existed),
        blocks.boxes(stayed & blocks.changed),
        blocks.boxes(stayed & blocks.beside & ~blocks.changed),
        blocks.boxes(existed & ~exists),
    )


class _Blocks:
    """The blocks of the changed chunks.

    `lo` and `hi` (int64[n, ndim]) are their bounds. `changed` says which lie in a chunk that was
    written or dropped, `beside` which lie in a chunk that was written because an axis has grown.
    """

    def __init__(
        self,
        ndim: int,
        old: Coords | None,
        new: Coords | None,
        arrays: Sequence[ChangedArray],
    ) -> None:
        self._ndim = ndim
        self._old, self._new = old, new
        most = tuple(map(max, old or (0,) * ndim, new or (0,) * ndim))
        pieces: list[tuple[IndexArray, IndexArray, bool, bool]] = []
        for array in arrays:
            if array.after is not None:
                edge = self._across_old_edge(array, array.written)
                for rows, changed in ((~edge, True), (edge, False)):
                    pieces.append((*_cells(array.after, array.written[rows]), changed, not changed))
                pieces.append((*_cells(array.after, array.exposed), False, False))
            if array.before is not None:
                pieces.append((*_cells(array.before, array.dropped), True, False))
        lows = np.concatenate([lo for lo, _, _, _ in pieces])
        highs = np.minimum(np.concatenate([hi for _, hi, _, _ in pieces]), most)
        kinds = np.repeat(
            np.array([[changed, beside] for _, _, changed, beside in pieces], np.bool_),
            [len(lo) for lo, _, _, _ in pieces],
            axis=0,
        )
        real = (lows < highs).all(axis=1)
        lows, highs, kinds = lows[real], highs[real], kinds[real]
        grids = [g.chunk_shape for a in arrays for g in (a.before, a.after) if g is not None]
        cuts = [
            _cuts(lows[:, axis], highs[:, axis], [grid[axis] for grid in grids])
            for axis in range(ndim)
        ]
        for axis, size in ((a, s[a]) for s in (old, new) if s is not None for a in range(ndim)):
            at = np.searchsorted(cuts[axis], size)
            if 0 < at < len(cuts[axis]) and cuts[axis][at] != size:
                cuts[axis] = np.insert(cuts[axis], at, size)
        owner, places = _spread(_at(cuts, lows), _at(cuts, highs))
        grid = Box((0,) * ndim, tuple(len(cut) for cut in cuts))
        linear, which = np.unique(grid.ravel(places), return_inverse=True)
        places = grid.unravel(linear)
        self.changed, self.beside = np.zeros((2, len(linear)), np.bool_)
        self.changed[which[kinds[owner, 0]]] = True
        self.beside[which[kinds[owner, 1]]] = True
        shape = (len(linear), ndim)
        self.lo, self.hi = np.empty(shape, np.int64), np.empty(shape, np.int64)
        for axis, cut in enumerate(cuts):
            self.lo[:, axis], self.hi[:, axis] = cut[places[:, axis]], cut[places[:, axis] + 1]

    def _across_old_edge(self, array: ChangedArray, chunks: IndexArray) -> _Mask:
        """Which chunks were there and hold the old end of an axis that has grown."""
        across = np.zeros(len(chunks), np.bool_)
        if self._old is None or self._new is None or array.after is None:
            return across
        if array.before is None or array.before.chunk_shape != array.after.chunk_shape:
            return across
        lo, hi = _cells(array.after, chunks)
        for axis, (was, now) in enumerate(zip(self._old, self._new, strict=True)):
            if was < now:
                across |= (lo[:, axis] < was) & (was < hi[:, axis])
        rows = np.flatnonzero(across & (lo < np.asarray(self._old, np.int64)).all(axis=1))
        across[:] = False
        if len(rows):
            across[rows] = array.there_before(chunks[rows])
        return across

    def held(
        self,
        arrays: Sequence[tuple[ArrayShape | None, Callable[[IndexArray], _Mask]]],
        shape: Coords | None,
    ) -> _Mask:
        """Which blocks inside the shape are held by a stored chunk of any array."""
        held = np.zeros(len(self.lo), np.bool_)
        if shape is None:
            return held
        inside = (self.lo < np.asarray(shape, np.int64)).all(axis=1)  # none lies across its edge
        for array, there in arrays:
            rows = np.flatnonzero(inside & ~held)
            if array is None or not len(rows):
                continue
            chunks = self.lo[rows] // np.asarray(array.chunk_shape, np.int64)
            grid = Box.around_coords(chunks)
            linear, which = np.unique(grid.ravel(chunks), return_inverse=True)
            held[rows] = there(grid.unravel(linear))[which]
        return held

    def boxes(self, rows: _Mask) -> IndexArray:
        """The blocks as few boxes (int64[n, 2, ndim]), in C order."""
        lo, hi = self.lo[rows], self.hi[rows]
        for axis in reversed(range(self._ndim)):
            lo, hi = join_along(lo, hi, axis)
        order = np.lexsort(lo.T[::-1]) if self._ndim else np.arange(len(lo))
        return np.stack([lo[order], hi[order]], axis=1)


def _cells(array: ArrayShape, chunks: IndexArray) -> tuple[IndexArray, IndexArray]:
    """The first and the last cell (exclusive) of each chunk on each axis."""
    lo = chunks * np.asarray(array.chunk_shape, np.int64)
    return lo, lo + np.asarray(array.chunk_shape, np.int64)


def _cuts(lo: IndexArray, hi: IndexArray, chunks: Sequence[int]) -> IndexArray:
    """Where to cut an axis: at both ends of joined spans, and inside them at edges of chunks."""
    starts, stops = _union(lo, hi)
    cuts = [starts, stops]
    for chunk in {max(chunk, 1) for chunk in chunks}:
        _, edges = _spread(-(-starts // chunk)[:, None], -(-stops // chunk)[:, None])
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


def _at(cuts: Sequence[IndexArray], cells: IndexArray) -> IndexArray:
    """The number of each cell's cut on each axis."""
    found = np.empty(cells.shape, np.int64)
    for axis, cut in enumerate(cuts):
        found[:, axis] = np.searchsorted(cut, cells[:, axis])
    return found


def _spread(first: IndexArray, stop: IndexArray) -> tuple[IndexArray, IndexArray]:
    """All places (int64[m, ndim]) in boxes `first` to `stop`, and the number of each one's box."""
    owner = np.arange(len(first))
    places = np.empty((len(first), 0), np.int64)
    for axis in range(first.shape[1]):
        counts = (stop[:, axis] - first[:, axis])[owner]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        owner, places = np.repeat(owner, counts), np.repeat(places, counts, axis=0)
        places = np.column_stack([places, first[owner, axis] + within])
    return owner, places
