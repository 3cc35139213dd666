"""Chunk coordinates and boxes of them.

A chunk coordinate is the position of a chunk in the grid of its array. A `Box` is a half-open range
of coordinates on each axis, in which a coordinate has a linear index in C order. Invariant: a box
holds fewer than 2**62 coordinates, so linear indexes and their differences fit an int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import le, lt, sub
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.errors import InvalidArgumentError

type Coords = tuple[int, ...]
type IndexArray = npt.NDArray[np.int64]

MAX_BOX_CHUNKS: Final = 2**62
_BLOCK: Final = 1 << 14
_FEW: Final = 8


def grid_shape(shape: Sequence[int], chunk_shape: Sequence[int]) -> Coords:
    """Number of chunks along each axis of an array with that shape and chunk shape.

    Examples
    --------
    >>> from zarr_manifests.grid import grid_shape
    >>> grid_shape((132, 73), (12, 73))
    (11, 1)
    """
    return tuple(-(-n // c) if n else 0 for n, c in zip(shape, chunk_shape, strict=True))


def clips(coords: IndexArray, shape: Sequence[int], chunk_shape: Sequence[int]) -> IndexArray:
    """How an array of this shape clips the chunks at these coordinates (int64[n]); 0 for not.

    Two numbers are equal if and only if the same cells of the chunk are inside.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.grid import clips
    >>> clips(np.array([[0, 0], [0, 1], [1, 1]]), (15, 12), (10, 10)).tolist()
    [0, 88, 93]
    """
    found, step = np.zeros(len(coords), np.int64), 1
    for axis, (size, chunk) in enumerate(zip(shape, chunk_shape, strict=True)):
        found += np.clip((coords[:, axis] + 1) * chunk - size, 0, chunk) * step
        step *= chunk + 1
    return found


def grid_clips(shape: Sequence[int], chunk_shape: Sequence[int]) -> IndexArray:
    """How an array clips each of its chunks, in C order, as `clips` numbers it."""
    grid, step = grid_shape(shape, chunk_shape), 1
    found = np.zeros(grid, np.int64)
    for axis, (n, size, chunk) in enumerate(zip(grid, shape, chunk_shape, strict=True)):
        if n and n * chunk > size:
            found[(slice(None),) * axis + (-1,)] += (n * chunk - size) * step
        step *= chunk + 1
    return found.ravel()


def clipped_cells(clip: IndexArray, chunk_shape: Sequence[int]) -> IndexArray:
    """How many cells of a chunk are inside, by the number that `clips` gives.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.grid import clipped_cells
    >>> clipped_cells(np.array([0, 88, 93]), (10, 10)).tolist()
    [100, 20, 10]
    """
    found = np.ones(len(clip), np.int64)
    for chunk in chunk_shape:
        clip, cut = np.divmod(clip, chunk + 1)
        found *= chunk - cut
    return found


class Box(Struct, frozen=True, array_like=True):
    """A half-open box of chunk coordinates, `lo <= coordinate < hi` on each axis.

    Parameters
    ----------
    lo, hi : tuple of int
        One number for each axis. A box without axes holds the one coordinate `()`.

    Raises
    ------
    InvalidArgumentError
        If the bounds are negative, reversed or of different lengths, or the box holds 2**62
        coordinates or more.
    """

    lo: Coords
    hi: Coords

    def __post_init__(self) -> None:
        size, sound = 1, len(self.lo) == len(self.hi)
        # A loop, since opening a repository makes hundreds of boxes and generators are slow.
        for a, b in zip(self.lo, self.hi, strict=sound):
            sound = sound and 0 <= a <= b
            size *= b - a
        if not sound:
            raise InvalidArgumentError(f"invalid box of chunks: {self.lo} to {self.hi}")
        if size >= MAX_BOX_CHUNKS:
            raise InvalidArgumentError(f"a box of {self.shape} chunks exceeds 2**62")

    @property
    def shape(self) -> Coords:
        """Number of chunks along each axis."""
        return tuple(map(sub, self.hi, self.lo))

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
        # Called for every chunk read or written; a loop takes twice as long.
        return all(map(le, self.lo, coords)) and all(map(lt, coords, self.hi))

    def holds(self, coords: IndexArray) -> npt.NDArray[np.bool_]:
        """Which coordinates (int64[n, ndim]) lie inside."""
        lo, hi = np.asarray(self.lo, np.int64), np.asarray(self.hi, np.int64)
        return np.asarray(((coords >= lo) & (coords < hi)).all(axis=1))

    def overlaps(self, other: Box) -> bool:
        """Whether the two boxes share a coordinate."""
        if len(self.lo) != len(other.lo):
            return False
        # Called for every live delta of a commit; a generator takes three times as long.
        for a, b, c, d in zip(self.lo, self.hi, other.lo, other.hi, strict=True):
            if b <= c or d <= a or b <= a or d <= c:
                return False
        return True

    def shared_size(self, other: Box) -> int:
        """Number of coordinates in both boxes, which have the same number of axes."""
        sides = zip(self.lo, self.hi, other.lo, other.hi, strict=True)
        return math.prod(max(0, min(b, d) - max(a, c)) for a, b, c, d in sides)

    def shared(self, other: Box) -> Box:
        """The box of the coordinates in both boxes, which overlap."""
        return Box(tuple(map(max, self.lo, other.lo)), tuple(map(min, self.hi, other.hi)))

    def strides(self) -> Coords:
        """Linear-index step of each axis (C order)."""
        steps = [1] * self.ndim
        for axis in range(self.ndim - 2, -1, -1):
            steps[axis] = steps[axis + 1] * (self.hi[axis + 1] - self.lo[axis + 1])
        return tuple(steps)

    def ravel_one(self, coords: Coords) -> int:
        """Linear index of one coordinate inside the box."""
        index = 0
        for c, a, b in zip(coords, self.lo, self.hi, strict=True):
            index = index * (b - a) + (c - a)
        return index

    def ravel(self, coords: IndexArray) -> IndexArray:
        """Linear indexes (int64[n]) of coordinates (int64[n, ndim]) inside the box."""
        index = np.zeros(len(coords), np.int64)
        for axis, (lo, hi) in enumerate(zip(self.lo, self.hi, strict=True)):
            index *= hi - lo
            index += coords[:, axis]
            index -= lo
        return index

    def unravel(self, index: IndexArray) -> IndexArray:
        """Coordinates (int64[n, ndim]) of linear indexes (int64[n])."""
        # Axes are contiguous in memory, since coordinates are processed axis by axis.
        axes = np.empty((self.ndim, len(index)), np.int64)
        if not len(index):
            return axes.T  # strides of an empty box may exceed int64
        strides = self.strides()
        for first in range(0, len(index), _BLOCK):  # blocks fit the CPU's cache
            rest = np.array(index[first : first + _BLOCK])
            here = axes[:, first : first + _BLOCK]
            for at, lo, step in zip(here, self.lo, strides, strict=True):
                np.floor_divide(rest, step, out=at)
                rest -= at * step  # much faster than the remainder operator
                at += lo
        return axes.T

    def carried(self, index: IndexArray, to: Box) -> IndexArray:
        """Linear indexes of the same coordinates in another box that contains them.

        Examples
        --------
        >>> import numpy as np
        >>> from zarr_manifests.grid import Box
        >>> Box((2, 0), (4, 3)).carried(np.array([0, 5]), Box((0, 0), (9, 4)))
        array([ 8, 14])
        """
        if self.lo[1:] == to.lo[1:] and self.hi[1:] == to.hi[1:]:
            shift = to.ravel_one(self.lo)
            return index + shift if shift else index
        return to.ravel(self.unravel(index))

    def pieces(self, most: int) -> Iterator[Box]:
        """Boxes of at most `most` coordinates, or of one, that are cut along its first axes.

        Examples
        --------
        >>> from zarr_manifests.grid import Box
        >>> [(box.lo, box.hi) for box in Box((0, 2), (2, 5)).pieces(2)]
        [((0, 2), (1, 3)), ((0, 3), (1, 5)), ((1, 2), (2, 3)), ((1, 3), (2, 5))]
        """
        axis = next((axis for axis, side in enumerate(self.shape) if side > 1), None)
        if axis is None or self.size <= most:
            yield self
            return
        middle = (self.lo[axis] + self.hi[axis]) // 2
        yield from Box(self.lo, (*self.hi[:axis], middle, *self.hi[axis + 1 :])).pieces(most)
        yield from Box((*self.lo[:axis], middle, *self.lo[axis + 1 :]), self.hi).pieces(most)

    @staticmethod
    def around(boxes: Iterable[Box]) -> Box:
        """The smallest box that contains one or more boxes with the same number of axes."""
        lows, highs = zip(*((box.lo, box.hi) for box in boxes), strict=True)
        if len(set(map(len, lows))) > 1:
            raise InvalidArgumentError("boxes have different numbers of axes")
        return Box(
            tuple(min(axis) for axis in zip(*lows, strict=True)),
            tuple(max(axis) for axis in zip(*highs, strict=True)),
        )

    @staticmethod
    def around_coords(coords: IndexArray) -> Box:
        """The smallest box that contains the coordinates (int64[n, ndim], n >= 1)."""
        # Axis by axis, which is much faster than one pass over the rows.
        axes = coords.T
        return Box(tuple(int(a.min()) for a in axes), tuple(int(a.max()) + 1 for a in axes))


def holding(boxes: Sequence[Box], lo: IndexArray, hi: IndexArray, coords: Coords) -> list[int]:
    """The numbers of the boxes that hold a coordinate; `lo` and `hi` are their corners."""
    if len(boxes) <= _FEW:  # which numpy takes longer for
        return [row for row, box in enumerate(boxes) if coords in box]
    found: list[int] = np.flatnonzero(((lo <= coords) & (coords < hi)).all(axis=1)).tolist()
    return found


def corners(boxes: Sequence[Box], ndim: int) -> tuple[IndexArray, IndexArray]:
    """The lower and the upper corners (int64[n, ndim]) of the boxes."""
    lo = np.array([box.lo for box in boxes], np.int64).reshape(len(boxes), ndim)
    return lo, np.array([box.hi for box in boxes], np.int64).reshape(lo.shape)


def places_in(first: IndexArray, stop: IndexArray) -> tuple[IndexArray, IndexArray]:
    """The number of each place's box, and all places (int64[m, ndim]) in boxes `first` to `stop`.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.grid import places_in
    >>> owner, places = places_in(np.array([[0, 5], [7, 7]]), np.array([[2, 6], [8, 8]]))
    >>> owner.tolist(), places.tolist()
    ([0, 0, 1], [[0, 5], [1, 5], [7, 7]])
    """
    owner = np.arange(len(first))
    places = np.empty((len(first), 0), np.int64)
    for axis in range(first.shape[1]):
        counts = np.maximum(stop[:, axis] - first[:, axis], 0)[owner]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        owner, places = np.repeat(owner, counts), np.repeat(places, counts, axis=0)
        places = np.column_stack([places, first[owner, axis] + within])
    return owner, places


def in_few_boxes(lo: IndexArray, hi: IndexArray, last: int) -> IndexArray:
    """The boxes (int64[n, 2, ndim], in C order), joined along axis `last` and those before it."""
    for axis in range(last, -1, -1):
        lo, hi = join_along(lo, hi, axis)
    order = np.lexsort(lo.T[::-1]) if lo.shape[1] else np.arange(len(lo))
    return np.stack([lo[order], hi[order]], axis=1)


def join_along(lo: IndexArray, hi: IndexArray, axis: int) -> tuple[IndexArray, IndexArray]:
    """The boxes with neighbours along the axis joined where they are equal on all others."""
    if len(lo) < 2:
        return lo, hi
    others = [a for a in range(lo.shape[1]) if a != axis]
    keys = [lo[:, axis], *(bounds[:, a] for a in others for bounds in (lo, hi))]
    order = np.lexsort(keys)
    lo, hi = lo[order], hi[order]
    new = (lo[1:, others] != lo[:-1, others]).any(axis=1)
    new |= (hi[1:, others] != hi[:-1, others]).any(axis=1)
    new |= lo[1:, axis] != hi[:-1, axis]
    first = np.flatnonzero(np.append(True, new))
    joined = hi[first].copy()
    joined[:, axis] = hi[np.append(first[1:], len(lo)) - 1, axis]
    return lo[first], joined
