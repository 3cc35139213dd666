"""A grid of chunks folded onto two dimensions: its layout, and how texts and pages draw it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.texts import bytes_text, count_text

_WIDE: Final = 4
"""So many times the columns of a square picture fit, where there are few rows."""
_LINE: Final = 60
_FEW: Final = 24
_MANY: Final = 64


class Folding(Struct, frozen=True, eq=False):
    """Which chunks of a grid share a cell of a picture.

    The picture has the two longest axes of the grid; all chunks along the others share a cell.

    Parameters
    ----------
    grid_shape : tuple of int
        The grid, in chunks.
    axes : tuple of (int or None)
        The axes that are the rows and the columns; None where the grid has no such axis.
    row_edges, column_edges : int64[n + 1]
        Where each row and column begins, in chunks, and where the last one ends.
    """

    grid_shape: Coords
    axes: tuple[int | None, int | None]
    row_edges: IndexArray
    column_edges: IndexArray

    @classmethod
    def of(cls, grid_shape: Sequence[int], side: int, most: int | None = None) -> Folding:
        """A folding to at most `side` rows, and `most` columns.

        Without `most`, there are at most `side` columns, too, or more where rows are few.

        Examples
        --------
        >>> from zarr_manifests.picturing import Folding
        >>> folding = Folding.of((1000, 1, 500), 100)
        >>> folding.axes, folding.shape
        ((0, 2), (100, 100))
        >>> Folding.of((365, 2), 100).axes  # the longer axis runs from left to right
        (1, 0)
        """
        grid = tuple(grid_shape)
        longest = sorted(sorted(range(len(grid)), key=lambda axis: -grid[axis])[:2])
        axes: tuple[int | None, int | None] = (None, None)
        if len(longest) == 1:
            axes = (None, longest[0])
        elif longest:
            row, column = longest
            axes = (column, row) if grid[row] > 2 * grid[column] else (row, column)
        sizes = [1 if axis is None else grid[axis] for axis in axes]
        rows = min(sizes[0], side)
        most = most or max(side, min(_WIDE * side, side * side // max(rows, 1)))
        columns = min(sizes[1], most)
        return cls(grid, axes, _edges(sizes[0], rows), _edges(sizes[1], columns))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the picture."""
        return len(self.row_edges) - 1, len(self.column_edges) - 1

    @property
    def whole(self) -> IndexArray:
        """The number of chunks that each cell stands for."""
        others = [n for axis, n in enumerate(self.grid_shape) if axis not in self.axes]
        sides = np.diff(self.row_edges), np.diff(self.column_edges)
        return np.outer(*sides) * math.prod(others)

    def place(self, coords: IndexArray, weights: Any = None) -> npt.NDArray[Any]:
        """How many of these chunks (int64[n, ndim]) are in each cell, or the sum of their weights.

        Chunks outside the grid are left out.

        Examples
        --------
        >>> import numpy as np
        >>> from zarr_manifests.picturing import Folding
        >>> Folding.of((2, 3), 10).place(np.array([[0, 1], [1, 2], [9, 9]])).tolist()
        [[0, 1, 0], [0, 0, 1]]
        """
        size, kind = math.prod(self.shape), np.int64 if weights is None else weights.dtype
        if not len(coords) or not size:
            return np.zeros(self.shape, kind)
        inside = ((coords >= 0) & (coords < np.array(self.grid_shape, np.int64))).all(axis=1)
        cells = np.zeros(len(coords), np.int64)
        edges = self.row_edges, self.column_edges
        for axis, starts, step in zip(self.axes, edges, (self.shape[1], 1), strict=True):
            if axis is not None:
                cells += step * (np.searchsorted(starts, coords[:, axis], "right") - 1)
        weight = None if weights is None else weights[inside]
        found = np.bincount(cells[inside], weight, size)
        return found.astype(kind).reshape(self.shape)

    def cover(self, boxes: IndexArray) -> IndexArray:
        """How many chunks of disjoint boxes (int64[n, 2, ndim]) are in each cell.

        Examples
        --------
        >>> import numpy as np
        >>> from zarr_manifests.picturing import Folding
        >>> Folding.of((2, 4), 2).cover(np.array([[[0, 1], [2, 4]]])).tolist()
        [[1, 2], [1, 2]]
        """
        ndim = len(self.grid_shape)
        axes = [ndim if axis is None else axis for axis in self.axes]
        ends = np.broadcast_to([[0], [1]], (len(boxes), 2, 1))  # along an axis that is not there
        sides, of_box = np.concatenate([boxes, ends], axis=2), np.diff(boxes, axis=1)[:, 0]
        depths = np.delete(of_box, [axis for axis in axes if axis < ndim], axis=1).prod(axis=1)
        rows, columns = (
            np.diff(np.clip(edges, sides[:, :1, axis], sides[:, 1:, axis]))
            for edges, axis in zip((self.row_edges, self.column_edges), axes, strict=True)
        )
        counts: IndexArray = (rows.T * depths) @ columns
        return counts


def _edges(size: int, parts: int) -> IndexArray:
    return np.arange(parts + 1, dtype=np.int64) * size // max(parts, 1)


class ChunkMap(Struct, frozen=True, eq=False):
    """Which chunks of an array exist, how large they are, and when they last changed.

    Parameters
    ----------
    path : str
        The array.
    dimensions : tuple of (str or None)
        Names of its axes.
    folding : Folding
        Which chunks each cell stands for.
    chunks, nbytes : int64[rows, columns]
        Chunks that exist in each cell, and their stored bytes.
    changed_ms : int64[rows, columns]
        When any chunk of the cell last changed, in ms since 1970; 0 if there is none, or if it
        was earlier than `since_ms`.
    since_ms : int
        The time of the oldest commit that was looked at, in ms since 1970.
    """

    path: str
    dimensions: tuple[str | None, ...]
    folding: Folding
    chunks: IndexArray
    nbytes: IndexArray
    changed_ms: IndexArray
    since_ms: int


def axis_name(dimensions: Sequence[str | None], axis: int | None) -> str:
    """The name of a dimension, or which axis it is; empty for none."""
    return "" if axis is None else dimensions[axis] or f"axis {axis}"


def as_table(found: ChunkMap, changed: IndexArray | None, chunk_shape: Coords) -> dict[str, Any]:
    """A map of chunks as the table of a page.

    Parameters
    ----------
    found : ChunkMap
        What exists.
    changed : int64[n, ndim], optional
        Coordinates of chunks that were written or removed; None if that is not known.
    chunk_shape : tuple of int
        In elements.

    Returns
    -------
    dict
        `lines` of cells, each with `name` (the classes of its style), `text` (what there is to say
        of its chunks), and `first` (the position of the first of these along the axes of the table,
        None along others); `name` and `text` of the table (which chunks its rows and columns are),
        and whether it `has_parts`, cells with some of their chunks, but not all.
    """
    folding = found.folding
    height, width = folding.shape
    counts = np.zeros(folding.shape, np.int64) if changed is None else folding.place(changed)
    lines = [
        [_cell(found, new, chunk_shape, (row, column)) for column, new in enumerate(line)]
        for row, line in enumerate(counts.tolist())
    ]
    names = [axis_name(found.dimensions, axis) for axis in folding.axes]
    text = f"chunks along {names[1]}" if width > 1 else "one chunk"
    if height > 1:
        text = f"rows are {names[0]}, columns are {names[1]}"
    elif width > _LINE:
        lines = [lines[0][at : at + _LINE] for at in range(0, width, _LINE)]
        text += ", line by line"
    most = int(folding.whole.max(initial=0))
    if most > 1:
        text += f"; each cell stands for up to {count_text(most, 'chunk')}"
    widest = max(map(len, lines), default=0)
    size = " few" if max(widest, len(lines)) <= _FEW else " many" if widest > _MANY else ""
    parts = bool(((found.chunks > 0) & (found.chunks < folding.whole)).any())
    return {"lines": lines, "name": f"chunks{size}", "text": text, "has_parts": parts}


def _cell(found: ChunkMap, new: int, chunk_shape: Coords, at: tuple[int, int]) -> dict[str, Any]:
    folding = found.folding
    there, whole = int(found.chunks[at]), int(folding.whole[at])
    where: list[str] = []
    first: list[int | None] = [None] * len(folding.grid_shape)
    edges = folding.row_edges, folding.column_edges
    for axis, places, place in zip(folding.axes, edges, at, strict=True):
        if axis is not None:
            lo, hi = int(places[place]), int(places[place + 1]) - 1
            first[axis] = lo * chunk_shape[axis]
            if folding.grid_shape[axis] > 1:
                along = axis_name(found.dimensions, axis)
                where.append(f"{along} {lo}" + (f" to {hi}" if hi > lo else ""))
    size = bytes_text(int(found.nbytes[at]))
    if whole == 1:
        told = (f"there, {size}" if there else "not there") + ("; changed" if new else "")
    else:
        told = f"{there:,} of {whole:,} there, {size}" + (f"; {new:,} changed" if new else "")
    if found.changed_ms[at]:
        moment = np.datetime64(int(found.changed_ms[at]), "ms").astype("datetime64[m]")
        told += f"; written {str(moment).replace('T', ' ')} UTC"
    name = "changed" if new and there else "gone" if new else ""
    if there and not new:
        name = f"stored-{4 if there == whole else 1 + 3 * there // whole}"
    chunk = f"chunk {', '.join(where)}" if where else "the chunk"
    return {"name": name, "text": f"{chunk}: {told}", "first": first}
