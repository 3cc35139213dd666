"""Chunk coordinates, and boxes of them.

A chunk coordinate counts chunks along each axis. A `Box` is a half-open range of coordinates per
axis; inside it, a coordinate has a linear index in C order. Invariant: a box holds fewer than
2**62 coordinates, so linear indexes and their differences fit an int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import InvalidArgumentError

__all__ = ["MAX_BOX_CHUNKS", "Box", "Coords", "IndexArray", "grid_shape"]

type Coords = tuple[int, ...]
type IndexArray = npt.NDArray[np.int64]

MAX_BOX_CHUNKS: Final = 2**62


def grid_shape(shape: Sequence[int], chunk_shape: Sequence[int]) -> Coords:
    """Number of chunks along each axis of an array with that shape and chunk shape.

    Examples
    --------
    >>> from zarr_manifests.grid import grid_shape
    >>> grid_shape((132, 73), (12, 73))
    (11, 1)
    """
    return tuple(-(-n // c) if n else 0 for n, c in zip(shape, chunk_shape, strict=True))


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box of chunk coordinates, `lo <= coordinate < hi` on each axis.

    Parameters
    ----------
    lo, hi : tuple of int
        One number an axis. A zero-dimensional box holds the one coordinate `()`.

    Raises
    ------
    InvalidArgumentError
        If the bounds are negative, reversed, of different length, or hold 2**62 coordinates.
    """

    lo: Coords
    hi: Coords

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi) or any(
            not 0 <= a <= b for a, b in zip(self.lo, self.hi, strict=True)
        ):
            raise InvalidArgumentError(f"not a box of chunks: {self.lo} to {self.hi}")
        if math.prod(self.shape) >= MAX_BOX_CHUNKS:
            raise InvalidArgumentError(f"a box of {self.shape} chunks is beyond 2**62")

    @property
    def shape(self) -> Coords:
        """Number of chunks along each axis."""
        return tuple(b - a for a, b in zip(self.lo, self.hi, strict=True))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.lo)

    @property
    def size(self) -> int:
        """Number of coordinates inside."""
        return math.prod(self.shape)

    def __contains__(self, coords: Coords) -> bool:
        if len(coords) != len(self.lo):
            return False
        # Every chunk that is read or written comes by, and a generator takes twice as long.
        for lo, at, hi in zip(self.lo, coords, self.hi, strict=True):  # noqa: SIM110
            if not lo <= at < hi:
                return False
        return True

    def overlaps(self, other: Box) -> bool:
        """Whether the two boxes share a coordinate."""
        return len(self.lo) == len(other.lo) and all(
            max(a, c) < min(b, d)
            for a, b, c, d in zip(self.lo, self.hi, other.lo, other.hi, strict=True)
        )

    def shared_size(self, other: Box) -> int:
        """Number of coordinates that are in both boxes, of as many axes each."""
        sides = zip(self.lo, self.hi, other.lo, other.hi, strict=True)
        return math.prod(max(0, min(b, d) - max(a, c)) for a, b, c, d in sides)

    def strides(self) -> Coords:
        """Linear-index step of each axis (C order)."""
        steps = [1] * self.ndim
        for axis in range(self.ndim - 2, -1, -1):
            steps[axis] = steps[axis + 1] * (self.hi[axis + 1] - self.lo[axis + 1])
        return tuple(steps)

    def ravel_one(self, coords: Coords) -> int:
        """Linear index of one coordinate that is inside."""
        index = 0
        for c, a, b in zip(coords, self.lo, self.hi, strict=True):
            index = index * (b - a) + (c - a)
        return index

    def ravel(self, coords: IndexArray) -> IndexArray:
        """Linear indexes (int64[n]) of coordinates (int64[n, ndim]) that are inside."""
        if not self.ndim:
            return np.zeros(len(coords), np.int64)
        offsets = coords - np.asarray(self.lo, np.int64)
        return np.asarray(offsets @ np.asarray(self.strides(), np.int64), np.int64)

    def unravel(self, index: IndexArray) -> IndexArray:
        """Coordinates (int64[n, ndim]) of linear indexes (int64[n])."""
        coords = np.empty((len(index), self.ndim), np.int64)
        if not len(index):
            return coords  # strides of an empty box may be beyond an int64
        rest = index
        for axis, step in enumerate(self.strides()):
            coords[:, axis] = rest // step + self.lo[axis]
            rest = rest % step
        return coords

    @staticmethod
    def around(boxes: Iterable[Box]) -> Box:
        """The smallest box that holds all of these (at least one, and of as many axes each)."""
        lows, highs = zip(*((box.lo, box.hi) for box in boxes), strict=True)
        if len(set(map(len, lows))) > 1:
            raise InvalidArgumentError("boxes of different numbers of axes have none around them")
        return Box(
            tuple(min(axis) for axis in zip(*lows, strict=True)),
            tuple(max(axis) for axis in zip(*highs, strict=True)),
        )

    @staticmethod
    def around_coords(coords: IndexArray) -> Box:
        """The smallest box that holds all of these coordinates (int64[n, ndim], n >= 1)."""
        # Axis by axis, which is many times faster than all axes in one pass over the rows.
        axes = coords.T
        return Box(tuple(int(a.min()) for a in axes), tuple(int(a.max()) + 1 for a in axes))
