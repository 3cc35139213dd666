"""Bounds, counts and sums of the chunks of a block of values.

Small chunks are measured together, and large ones one by one, so that values are read from the
processor's cache after the first pass. Most take three passes, for the smallest value, the largest
one and the sum. Only where the first two show that values may be missing, further passes count them
and leave them out.

Numbers and booleans are compared as they are, and times as the integers they are stored as. Numbers
and booleans have a sum.

Groups of the cells of an array: what is selected along each axis, and what is known of each
--------------------------------------------------------------------------------------------

A group has the cells that go to one cell of an answer. Rows of `Bounds`, of whole chunks or of runs
of cells, are added to the groups that they belong to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import force_setattr

from zarr_manifests.format.zone_maps import HASH_BYTES, NO_SUM, Bounds, sum_type
from zarr_manifests.grid import Box, Coords, IndexArray, clipped_cells, grid_clips, grid_shape

type _Values = npt.NDArray[Any]

_MOST_SUM: Final = 2**62
_FLOAT: Final = np.dtype(np.float64)
_SLAB: Final = 2**18
"""Number of values in chunks that are measured together; larger chunks are measured one by one."""
_quiet: Final = np.errstate(invalid="ignore", over="ignore")
"""A sum may be of infinities of both signs, or too large."""
_FEW: Final = 32
"""Runs of at most so many neighbouring values are reduced column by column, which is faster."""


def measure(
    values: _Values,
    chunk_shape: Sequence[int],
    missing: _Values,
    *,
    weights: CellWeights | None = None,
    at: Coords | None = None,
) -> Bounds:
    """Measure the chunks of a block; one row for each, in C order.

    Missing cells include those with NaN or NaT.

    Parameters
    ----------
    values : array
        The block, as `Meaning.compared` returns it. It starts where a chunk starts. Chunks that it
        cuts off are at the array's edge: their padding is not measured.
    chunk_shape : sequence of int
        Shape of a chunk.
    missing : array
        The values that are missing, besides NaN and NaT, as `Meaning.missing`.
    weights : CellWeights, optional
        Those of the block, of numbers; with `at`, the coordinates of its first chunk, those of the
        array.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.planning.measure import measure
    >>> values = np.array([3, 1, -9, 7, -9], "i2")
    >>> found = measure(values, (2,), np.array([-9], "i2"))
    >>> found.low.tolist()[:2], found.high.tolist()[:2], found.bounded.tolist()
    ([1, 7], [3, 7], [True, True, False])
    >>> found.missing.tolist(), found.sums.tolist()
    ([0, 1, 1], [4, 7, 0])
    """
    if not values.ndim:
        values, chunk_shape = values.reshape(1), (1,)
    clips = grid_clips(values.shape, chunk_shape)
    cells = clipped_cells(clips, chunk_shape)
    # Values are read fast in the order in which they lie in memory.
    axes = sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis]))
    own = None
    if weights is not None:
        sides = zip(at or (0,) * values.ndim, chunk_shape, values.shape, strict=True)
        own = weights.inside([slice(lo * n, lo * n + size) for lo, n, size in sides])
        own = CellWeights(tuple(own.along[axis] for axis in axes), own.digest)
    values, chunk_shape = values.transpose(axes), [chunk_shape[axis] for axis in axes]
    dtype, number, marks = _numbers(values.dtype, missing)
    kinds = (number, number, "i8", "i8", _adds(number), *["f8", "f8"] * (own is not None))
    grid = Box((0,) * values.ndim, grid_shape(values.shape, chunk_shape))
    columns = [np.empty(grid.hi, kind) for kind in kinds]
    for box in grid.pieces(_SLAB // math.prod(chunk_shape)):
        sides = zip(box.lo, box.hi, chunk_shape, strict=True)
        inside = tuple(slice(lo * n, hi * n) for lo, hi, n in sides)
        block = values[inside].astype(dtype, copy=False).view(number)
        if box.size == 1:  # which is faster as one row, also if that is a copy
            found = _measured(block.ravel(), [block.size], marks)
        else:
            found = _measured(block, chunk_shape, marks)
        if own is not None:
            present = _present(block, marks, some=bool(np.any(found[2])))
            found += own.inside(inside).weigh(present, chunk_shape)
        place = tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))
        for column, one in zip(columns, found, strict=True):
            column[place] = one
    back = [axes.index(axis) for axis in range(len(axes))]
    low, high, gone, nan, sums, *weighted = (column.transpose(back).ravel() for column in columns)
    bounded, adds = gone < cells, sum_type(dtype)
    if adds is None:
        sums = np.full(len(low), np.nan)
    elif adds.kind == "i":
        # Beyond this a sum may have wrapped around.
        most = np.maximum(np.abs(low.astype(np.float64)), np.abs(high.astype(np.float64)))
        wraps = bounded & (most * cells > _MOST_SUM)
        sums = np.where(wraps, NO_SUM, np.where(bounded, sums.view(np.int64), 0))
    declared: Any = () if own is None else (*weighted, own.digest)
    return Bounds(low.view(dtype), high.view(dtype), bounded, gone, nan, sums, clips, *declared)


def _adds(number: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which numbers of a type are added; it wraps around."""
    return np.dtype({"f": "f8", "u": "u8"}.get(number.kind, "i8"))


class CellWeights(Struct, frozen=True, eq=False):
    """Weights of an array's cells: the product of one weight for each axis.

    Parameters
    ----------
    along : tuple of (float64[n] or None)
        For each axis the weights of its positions; None for 1.
    digest : bytes, optional
        Hash of the weights of all cells; to be given if these are the weights of a part of them.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.planning.measure import CellWeights
    >>> values, there = np.array([3, 1, 0, 7]), np.array([1, 1, 0, 1])
    >>> sums, weights = CellWeights((np.array([1, 2, 3, 4.0]),)).weigh([values, there], (2,))
    >>> sums.tolist(), weights.tolist()
    ([5.0, 28.0], [3.0, 4.0])
    """

    along: tuple[npt.NDArray[np.float64] | None, ...]
    digest: bytes = b""

    def __post_init__(self) -> None:
        if not self.digest:
            parts = [b"" if one is None else one.astype("<f8").tobytes() for one in self.along]
            whole = b"".join(blake2b(part, digest_size=HASH_BYTES).digest() for part in parts)
            force_setattr(self, "digest", blake2b(whole, digest_size=HASH_BYTES).digest())

    def inside(self, place: Sequence[slice]) -> CellWeights:
        """Those of the cells of a block."""
        parts = zip(self.along, place, strict=True)
        inside = tuple(None if one is None else one[cells] for one, cells in parts)
        return CellWeights(inside, self.digest)

    @_quiet
    def weigh(self, present: Sequence[_Values], chunk_shape: Sequence[int]) -> list[_Values]:
        """Weighted sums, and weights, of the chunks of a block with these weights.

        The block is numbers, 0 in place of missing ones, and 1 where there is one.
        """
        found = [*present]
        # Axes without weights come first, the last one above all: few values are left to multiply.
        ndim = len(self.along)
        for axis in sorted(range(ndim), key=lambda at: (self.along[at] is not None, -at)):
            weights = self.along[axis]
            if weights is not None:
                factor = weights.reshape(-1, *(1,) * (ndim - axis - 1))
                found = [one * factor for one in found]
            found = [_reduced_along(np.add, one, axis, chunk_shape[axis], _FLOAT) for one in found]
        return found


def _present(numbers: _Values, marks: _Values, *, some: bool) -> tuple[_Values, _Values]:
    """Numbers with 0 in place of missing ones, and 1 where there is one."""
    if not some:
        return numbers, np.broadcast_to(1.0, numbers.shape)
    absent = np.isnan(numbers) if numbers.dtype.kind == "f" else np.zeros(numbers.shape, np.bool_)
    for mark in marks:
        absent |= numbers == mark
    return _zeroed(numbers, absent), np.where(absent, 0.0, 1.0)


def _numbers(
    dtype: np.dtype[Any], missing: _Values
) -> tuple[np.dtype[Any], np.dtype[Any], _Values]:
    """A type in native order, the numbers it is compared as, and what is missing among these."""
    dtype = dtype.newbyteorder("=")
    number = np.dtype({"b": "u1", "M": "i8", "m": "i8"}.get(dtype.kind, dtype))
    marks = missing.astype(dtype).view(number)
    if dtype.kind in "mM":
        marks = np.append(marks, np.iinfo(np.int64).min)  # NaT
    return dtype, number, marks


@_quiet
def _measured(
    values: _Values, chunk_shape: Sequence[int], marks: _Values, *, has_nan: bool = False
) -> list[Any]:
    """Least and greatest value, number of missing values and of NaN, and sum, of each chunk.

    Where all values are missing, the first two mean nothing. `has_nan` says that there may be NaN.
    """
    low = _reduced(np.fmin if has_nan else np.minimum, values, chunk_shape)
    if not has_nan and values.dtype.kind == "f" and np.isnan(low).any():
        return _measured(values, chunk_shape, marks, has_nan=True)
    high = _reduced(np.fmax if has_nan else np.maximum, values, chunk_shape)
    seen = [mark for mark in marks if ((low <= mark) & (mark <= high)).any()]
    absent = [values == mark for mark in seen]
    nan: _Values | int = 0
    if has_nan:
        absent.append(np.isnan(values))
        nan = _counted(absent[-1], chunk_shape)
    adds = _adds(values.dtype)
    if not absent:
        return [low, high, 0, 0, _reduced(np.add, values, chunk_shape, adds)]
    missing = np.asarray(functools.reduce(np.logical_or, absent))
    if any((low == mark).any() or (high == mark).any() for mark in seen):
        rests = zip((np.fmin, np.fmax), _without(values, missing), strict=True)
        low, high = (_reduced(how, rest, chunk_shape) for how, rest in rests)
        if values.dtype.kind == "i":
            top = np.iinfo(values.dtype).min
            low, high = (end.view(values.dtype) ^ top for end in (low, high))
    sums = _reduced(np.add, _zeroed(values, missing), chunk_shape, adds)
    return [low, high, _counted(missing, chunk_shape), nan, sums]


def _reduced(
    how: np.ufunc, values: _Values, chunk_shape: Sequence[int], dtype: np.dtype[Any] | None = None
) -> _Values:
    """Reduce the values of each chunk to one; the last chunks may be shorter.

    The last axis comes at the end, when the fewest values are left of it.
    """
    for axis, chunk in enumerate(chunk_shape):
        values = _reduced_along(how, values, axis, chunk, dtype)
    return values


def _reduced_along(
    how: np.ufunc, values: _Values, axis: int, chunk: int, dtype: np.dtype[Any] | None
) -> _Values:
    if chunk == 1:
        return values
    before, size, behind = values.shape[:axis], values.shape[axis], values.shape[axis + 1 :]
    count, rest = divmod(size, chunk)
    place = (slice(None),) * axis
    runs = values[(*place, slice(size - rest))].reshape(*before, count, chunk, *behind)
    if chunk <= _FEW and not behind:
        found = runs[..., 0].astype(dtype or values.dtype)
        for column in range(1, chunk):
            how(found, runs[..., column], out=found)
    else:
        found = how.reduce(runs, axis=axis + 1, dtype=dtype)
    if not rest:
        return found
    last = values[(*place, slice(size - rest, None))]
    last = how.reduce(last, axis=axis, dtype=dtype, keepdims=True)
    return np.concatenate([found, last], axis=axis)


def _counted(where: npt.NDArray[np.bool_], chunk_shape: Sequence[int]) -> _Values:
    """How many of each chunk are true; sums are as narrow as they can be, which is faster."""
    most = np.min_scalar_type(math.prod(chunk_shape))
    return _reduced(np.add, where.view(np.uint8), chunk_shape, most)


def _zeroed(values: _Values, missing: npt.NDArray[np.bool_]) -> _Values:
    """The values with 0 in place of missing ones, without a branch for each value."""
    bits = missing.view(np.uint8).astype(f"u{values.itemsize}")
    np.subtract(bits, bits.dtype.type(1), out=bits)
    zeroed: _Values = np.bitwise_and(values.view(bits.dtype), bits, out=bits)
    return zeroed.view(values.dtype)


def _without(values: _Values, missing: npt.NDArray[np.bool_]) -> tuple[_Values, _Values]:
    """The values without the missing ones, as `fmin` and `fmax` take them.

    Missing floats become NaN, whose bits are all ones. Integers become unsigned ones in the same
    order, in which missing ones are the greatest, or the least. There is no branch for each value:
    where missing ones are strewn about, it would take ten times as long.
    """
    dtype = values.dtype
    bits = missing.view(np.int8).astype(f"i{dtype.itemsize}")
    bits = np.negative(bits, out=bits).view(f"u{dtype.itemsize}")
    raw = values.view(bits.dtype)
    if dtype.kind == "f":
        rest = np.bitwise_or(raw, bits, out=bits).view(dtype)
        return rest, rest
    if dtype.kind == "i":
        raw = raw ^ bits.dtype.type(1 << (8 * dtype.itemsize - 1))
    others = raw | bits
    return others, np.bitwise_and(raw, np.invert(bits, out=bits), out=bits)


# --- groups ---------------------------------------------------------------------------------------

type Rows = tuple[Bounds, IndexArray, IndexArray, _Values, _Values]
"""Rows, the group of each, the numbers and weights of all its cells, and its sum."""


class GroupedAxis(Struct, frozen=True, eq=False):
    """What is selected along an axis.

    Parameters
    ----------
    name : str or None
        The dimension of the answer, if its groups are told apart.
    places : int64[n]
        The selected positions, ascending.
    codes : int64[n]
        For each of them, the number of its group.
    groups : int
        How many groups there are.
    whole : bool[chunks]
        The chunks that are selected wholly, for one group.
    touched : bool[chunks]
        The chunks with anything selected.
    code : int64[chunks]
        The group of each chunk that is whole.
    weights : float64[n]
        The weight of each selected position.
    is_weighted : bool
        Whether these are not all 1 for lack of weights.
    chunk_weight : float64[chunks]
        The weight of all that is selected of each chunk.
    even : float64[chunks]
        The weight of each position of a chunk that is whole; NaN if they differ.
    """

    name: str | None
    places: IndexArray
    codes: IndexArray
    groups: int
    whole: npt.NDArray[np.bool_]
    touched: npt.NDArray[np.bool_]
    code: IndexArray
    weights: npt.NDArray[np.float64]
    is_weighted: bool
    chunk_weight: npt.NDArray[np.float64]
    even: npt.NDArray[np.float64]

    @classmethod
    def of(
        cls,
        name: str | None,
        places: IndexArray,
        codes: IndexArray,
        groups: int,
        size: int,
        chunk: int,
        weights: npt.NDArray[np.float64] | None,
    ) -> GroupedAxis:
        """The axis of an array with that size and chunk length, and weights of its positions."""
        order = np.argsort(places, kind="stable")
        places, codes = places[order], codes[order]
        is_weighted = weights is not None
        weights = np.ones(len(places)) if weights is None else weights[places]
        starts = np.arange(0, size, chunk)
        at, found = places // chunk, np.bincount(places // chunk, minlength=len(starts))
        first = np.full(len(starts), groups)
        last = np.full(len(starts), -1)
        np.minimum.at(first, at, codes)
        np.maximum.at(last, at, codes)
        whole = (found == np.minimum(chunk, size - starts)) & (first == last)
        total = np.bincount(at, weights, minlength=len(starts))
        low, high = np.full(len(starts), np.inf), np.full(len(starts), -np.inf)
        np.minimum.at(low, at, weights)
        np.maximum.at(high, at, weights)
        even = np.where(low == high, low, np.nan)
        chunks = whole, found > 0, first
        return cls(name, places, codes, groups, *chunks, weights, is_weighted, total, even)

    def parts(self, start: int, stop: int) -> tuple[slice, IndexArray | None, list[CellRuns]]:
        """The cells to read from `start` to `stop`, which of these count, and their runs."""
        first, last = np.searchsorted(self.places, [start, stop])
        places, codes = self.places[first:last], self.codes[first:last]
        whole = slice(int(places[0]), int(places[-1]) + 1)
        some = None if whole.stop - whole.start == len(places) else places - places[0]
        edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
        lengths = np.diff(edges)
        weights = self.weights[first:last]
        if (lengths[:-1] == lengths[0]).all() and lengths[-1] <= lengths[0]:
            return whole, some, [CellRuns(slice(None), edges[1], codes[edges[:-1]], weights)]
        parts = ((slice(a, b), b - a, codes[a : a + 1], weights[a:b]) for a, b in pairwise(edges))
        return whole, some, [CellRuns(*part) for part in parts]


class CellRuns(NamedTuple):
    """Cells along an axis, in runs of a length; the last may be shorter.

    Parameters
    ----------
    cells : slice
        Which of those that were read.
    length : int
        That of the runs.
    codes : int64[runs]
        The group of each run.
    weights : float64[n]
        The weights of the cells.
    """

    cells: slice
    length: int
    codes: IndexArray
    weights: npt.NDArray[np.float64]

    @property
    def run_weights(self) -> npt.NDArray[np.float64]:
        """The weight of each run."""
        return np.add.reduceat(self.weights, np.arange(0, len(self.weights), self.length))


class Totals:
    """What is known of each group."""

    def __init__(self, dtype: np.dtype[Any], groups: int) -> None:
        self.cells, self.missing, self.nan = np.zeros((3, groups), np.int64)
        self.low, self.high = np.zeros(groups, dtype), np.zeros(groups, dtype)
        self.bounded = np.zeros(groups, np.bool_)
        # Integers have no end: their sum may exceed 64 bits.
        self.sums: _Values = np.zeros(groups, np.float64 if dtype.kind == "f" else object)
        self.weighted, self.weight, self.covered = np.zeros((3, groups))

    @_quiet
    def add(
        self,
        bounds: Bounds,
        groups: IndexArray,
        cells: IndexArray,
        covered: _Values | float = 0.0,
        sums: _Values | None = None,
    ) -> None:
        """Add `Rows`, each to a group; with those sums, or with that of the bounds."""
        np.add.at(self.cells, groups, cells)
        np.add.at(self.missing, groups, bounds.missing)
        np.add.at(self.nan, groups, bounds.nan)
        np.add.at(self.covered, groups, covered)
        np.add.at(self.weighted, groups, bounds.weighted)
        np.add.at(self.weight, groups, bounds.weights)
        some = bounds.bounded
        at, low, high = groups[some], bounds.low[some], bounds.high[some]
        new = at[~self.bounded[at]]
        self.low[new] = low[~self.bounded[at]]
        self.high[new] = high[~self.bounded[at]]
        self.bounded[new] = True
        np.minimum.at(self.low, at, low)
        np.maximum.at(self.high, at, high)
        np.add.at(self.sums, groups, bounds.sums if sums is None else sums)
