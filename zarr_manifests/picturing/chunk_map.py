"""A grid of chunks folded onto two dimensions, with what is known of the chunks in each cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from zarr_manifests.grid import Coords, IndexArray

__all__ = ["ChunkMap", "Folding"]

_WIDE: Final = 4
"""So many times the columns of a square picture fit, where there are few rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Folding:
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
    def of(cls, grid_shape: Sequence[int], side: int) -> Folding:
        """A folding to at most `side` x `side` cells; columns may be more where rows are few.

        Examples
        --------
        >>> from zarr_manifests.picturing.chunk_map import Folding
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
        columns = min(sizes[1], max(side, min(_WIDE * side, side * side // max(rows, 1))))
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

    @property
    def is_folded(self) -> bool:
        """Whether any cell stands for more than one chunk."""
        return math.prod(self.shape) < math.prod(self.grid_shape)

    def place(self, coords: IndexArray, weights: IndexArray | None = None) -> IndexArray:
        """How many of these chunks (int64[n, ndim]) are in each cell, or the sum of their weights.

        Chunks outside the grid are left out.

        Examples
        --------
        >>> import numpy as np
        >>> from zarr_manifests.picturing.chunk_map import Folding
        >>> Folding.of((2, 3), 10).place(np.array([[0, 1], [1, 2], [9, 9]])).tolist()
        [[0, 1, 0], [0, 0, 1]]
        """
        size = math.prod(self.shape)
        if not len(coords) or not size:
            return np.zeros(self.shape, np.int64)
        inside = ((coords >= 0) & (coords < np.array(self.grid_shape, np.int64))).all(axis=1)
        cells = np.zeros(len(coords), np.int64)
        edges = self.row_edges, self.column_edges
        for axis, starts, step in zip(self.axes, edges, (self.shape[1], 1), strict=True):
            if axis is not None:
                cells += step * (np.searchsorted(starts, coords[:, axis], "right") - 1)
        weight = None if weights is None else weights[inside]
        found = np.bincount(cells[inside], weight, size)
        return found.astype(np.int64).reshape(self.shape)


def _edges(size: int, parts: int) -> IndexArray:
    return np.arange(parts + 1, dtype=np.int64) * size // max(parts, 1)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkMap:
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
