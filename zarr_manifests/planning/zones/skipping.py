"""Which chunks may hold a cell that a where selects.

Comparisons have three outcomes, as in SQL: a missing value matches none, only `IS NULL`. So a chunk
is left out if its bounds exclude a match, or if all its values are missing. The caller decodes the
bounds as a reader decodes values. Numbers are compared exactly: integers as integers, times at
their own unit, and floats both as 64-bit floats and in their own type, as readers differ in that.

Invariant: whatever is not known may match.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, tzinfo
from fractions import Fraction
from functools import partial, reduce
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.scan import runs_of
from zarr_manifests.planning.zones.where import Comparison, Literal, Moment

__all__ = ["Plan", "Ranges", "Verdict", "boxes_of", "counts_hold", "may_match", "plan_chunks"]

type _Mask = npt.NDArray[np.bool_]

_DENSE: Final = 1 << 24
"""Most chunks of a region that are looked at one by one though nothing is stored for them."""
_MOST_RUNS: Final = 1 << 16
_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9, "ps": 10**12, "fs": 10**15}
_ABOVE_NAN: Final = (">", ">=", "!=")
"""What NaN matches, where it is greater than every number."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """The decoded values of chunks or cells, as far as they are known.

    Parameters
    ----------
    low, high : array[n]
        Least and greatest value.
    bounded : bool[n]
        Whether there is a value; if not, `low` and `high` mean nothing.
    nulls : bool[n]
        Whether there may be missing values.
    known : bool[n]
        Whether the row says anything.
    """

    low: npt.NDArray[Any]
    high: npt.NDArray[Any]
    bounded: _Mask
    nulls: _Mask
    known: _Mask

    @classmethod
    def of_cells(cls, values: npt.NDArray[Any], missing: _Mask) -> Ranges:
        """One row for each cell."""
        return cls(values, values, ~missing, missing, np.ones(len(values), np.bool_))


def may_match(
    comparison: Comparison, ranges: Ranges, *, nan_matches: bool = False, zone: tzinfo = UTC
) -> _Mask:
    """Whether each row may have a match; exact for single cells of 64-bit types.

    Parameters
    ----------
    comparison : Comparison
        What must hold.
    ranges : Ranges
        The values of its column.
    nan_matches : bool, default False
        Missing values are NaN, which is greater than every number, as in Spark.
    zone : tzinfo, default UTC
        The time zone of times without one.

    Raises
    ------
    InvalidArgumentError
        If values of this type cannot be compared with the literals.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.planning.zones.skipping import Ranges, may_match
    >>> from zarr_manifests.planning.zones.where import Comparison
    >>> depths = np.array([1.0, np.nan, 3.0])
    >>> cells = Ranges.of_cells(depths, np.isnan(depths))
    >>> may_match(Comparison("depth", ">", (2,)), cells)
    array([False, False,  True])
    >>> may_match(Comparison("depth", "is_null"), cells)
    array([False,  True, False])
    """
    op, found = comparison.op, ranges.bounded
    if op == "is_null":
        found = ranges.nulls
    elif op != "is_not_null":
        with np.errstate(invalid="ignore", over="ignore"):
            within, dtype = _within(comparison, ranges, zone), ranges.low.dtype
            if dtype.kind == "f" and dtype.itemsize < np.dtype(np.float64).itemsize:
                # Spark compares 64-bit floats, and numpy compares in the type of the values.
                within |= _within(comparison, ranges, zone, own=True)
            found = found & within
    if nan_matches and op in (*_ABOVE_NAN, "is_not_null"):
        found = found | ranges.nulls
    return found | ~ranges.known


def _within(comparison: Comparison, ranges: Ranges, zone: tzinfo, *, own: bool = False) -> _Mask:
    def low(value: Literal) -> tuple[_Mask, _Mask]:
        return _against(comparison, ranges.low, value, zone, own=own)

    def high(value: Literal) -> tuple[_Mask, _Mask]:
        return _against(comparison, ranges.high, value, zone, own=own)

    def between(least: Literal, most: Literal) -> _Mask:
        less, equal = low(most)
        return (less | equal) & ~high(least)[0]

    match comparison.op, comparison.values:
        case "=" | "in", values:
            return reduce(np.logical_or, [between(value, value) for value in values])
        case "between", (least, most):
            return between(least, most)
        case "!=", (value,):
            return ~(low(value)[1] & high(value)[1])
        case "<", (value,):
            return low(value)[0]
        case "<=", (value,):
            less, equal = low(value)
            return less | equal
        case ">", (value,):
            less, equal = high(value)
            return ~(less | equal)
        case ">=", (value,):
            return ~high(value)[0]
    raise AssertionError(comparison)


def _against(
    comparison: Comparison, values: npt.NDArray[Any], literal: Literal, zone: tzinfo, *, own: bool
) -> tuple[_Mask, _Mask]:
    """Which values are less than the literal, and which are equal to it."""
    kind = values.dtype.kind
    match kind, literal:
        case "b", bool():
            return _integers(values.astype(np.int8), Fraction(literal))
        case "i" | "u", int() | float() if not isinstance(literal, bool):
            return _integers(values, Fraction(literal))
        case "f", int() | float() if not isinstance(literal, bool):
            wide = values if own else values.astype(np.float64, copy=False)
            number = wide.dtype.type(literal)
            return wide < number, wide == number
        case "M", Moment() | str():
            try:
                moment = literal if isinstance(literal, Moment) else Moment(literal)
            except InvalidArgumentError as error:
                raise _wrong(comparison, f"its values are times, and {error}") from error
            return _times(values, moment.nanoseconds(zone))
        case "S", str():
            found = np.bytes_(literal.encode(errors="surrogatepass"))
            return values < found, values == found
        case "U" | "O", str():
            return np.asarray(values < literal, bool), np.asarray(values == literal, bool)
    names = {"b": "TRUE and FALSE", "M": "times", "m": "durations, which cannot be compared"}
    what = names.get(kind, "numbers" if kind in "iuf" else "text")
    raise _wrong(comparison, f"its values are {what}")


def _wrong(comparison: Comparison, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{comparison.column!r} cannot be in `{comparison.sql}`: {what}")


def _integers(values: npt.NDArray[Any], literal: Fraction) -> tuple[_Mask, _Mask]:
    least = math.floor(literal)
    limits, none = np.iinfo(values.dtype), np.zeros(len(values), np.bool_)
    if not limits.min <= least <= limits.max:
        return none | (least > limits.max), none
    end = values.dtype.type(least)
    if literal != least:
        return values <= end, none
    return values < end, values == end


def _times(values: npt.NDArray[Any], nanoseconds: int) -> tuple[_Mask, _Mask]:
    unit = np.datetime_data(values.dtype)
    if unit[0] not in _PER_SECOND or unit[1] != 1:
        values = values.astype("M8[s]" if unit[0] not in _PER_SECOND else f"M8[{unit[0]}]")
    per_second = _PER_SECOND[np.datetime_data(values.dtype)[0]]
    return _integers(values.view(np.int64), Fraction(nanoseconds * per_second, 10**9))


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What one comparison says of the chunks of an array.

    Parameters
    ----------
    index : int64[n]
        The stored chunks of the region, as linear indexes, ascending.
    match : bool[n]
        Which of them may match.
    known : bool[n]
        Which of them have statistics.
    unwritten : bool
        Whether chunks that are not stored may match.
    """

    index: IndexArray
    match: _Mask
    known: _Mask
    unwritten: bool

    def at(self, index: IndexArray, size: int) -> _Mask:
        """Which chunks of a region of this size may match."""
        if len(self.index) == size:
            return self.match[index]
        if not len(self.index):
            return np.full(len(index), self.unwritten)
        if size <= _DENSE:
            all_of = np.full(size, self.unwritten)
            all_of[self.index] = self.match
            return np.asarray(all_of[index])
        at = np.minimum(self.index.searchsorted(index), len(self.index) - 1)
        return np.where(self.index[at] == index, self.match[at], self.unwritten)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The chunks of a grid that may match, and why the others do not.

    Parameters
    ----------
    boxes : int64[n, 2, ndim]
        Half-open boxes of chunks that may match, in C order, disjoint.
    selected : int
        Chunks in them.
    by_range, by_statistics, by_absence : int
        Chunks left out: by the values of coordinates; by their bounds; because nothing is stored
        and the fill value does not match.
    unknown : int
        Chunks in the boxes that lack statistics.
    chosen : callable
        Whether each chunk of the region, given as linear indexes, is in the boxes.
    """

    boxes: IndexArray
    selected: int
    by_range: int
    by_statistics: int
    by_absence: int
    unknown: int
    chosen: Callable[[IndexArray], _Mask]


def plan_chunks(
    axes: Sequence[_Mask], region: Box, verdicts: Sequence[Verdict], out: Sequence[Box] = ()
) -> Plan:
    """Plan which chunks to read.

    Parameters
    ----------
    axes : sequence of bool[n]
        For each axis of the grid, the chunks at which coordinates may match.
    region : Box
        The smallest box around them.
    verdicts : sequence of Verdict
        What comparisons of data say of the chunks in the region.
    out : sequence of Box, optional
        Disjoint boxes in the region, of stored chunks that cannot match and are in no verdict. For
        one of the verdicts, chunks that are not stored cannot match either.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.grid import Box
    >>> from zarr_manifests.planning.zones.skipping import Verdict, plan_chunks
    >>> axes = [np.array([True, True, False]), np.ones(4, bool)]
    >>> match = np.array([True, True, False, False, True, True])
    >>> verdict = Verdict(np.array([0, 1, 2, 3, 4, 5]), match, match | True, False)
    >>> plan = plan_chunks(axes, Box((0, 0), (2, 4)), [verdict])
    >>> plan.boxes.tolist()
    [[[0, 0], [2, 2]]]
    >>> plan.selected, plan.by_range, plan.by_statistics, plan.by_absence
    (4, 4, 2, 2)
    """
    chunks = math.prod(len(axis) for axis in axes)
    in_range = math.prod(int(axis.sum()) for axis in axes)
    shown = [axis[lo:hi] for axis, lo, hi in zip(axes, region.lo, region.hi, strict=True)]

    def in_axes(index: IndexArray) -> _Mask:
        if all(axis.all() for axis in shown):
            return np.ones(len(index), np.bool_)
        found = region.unravel(index)
        masks = [a[found[:, i] - region.lo[i]] for i, a in enumerate(shown)]
        return reduce(np.logical_and, masks)

    def inside(index: IndexArray) -> IndexArray:
        return index[in_axes(index)]

    ruling = [v for v in verdicts if not v.unwritten or not v.match.all()]
    if not ruling or not in_range:
        kept = None
    elif narrow := [v for v in ruling if not v.unwritten]:
        kept = inside(narrow[0].index[narrow[0].match])
        ruling.remove(narrow[0])
    elif region.size <= _DENSE:
        kept = inside(np.arange(region.size))
    else:
        kept = None  # chunks that are not stored match, and are too many to list
    unknown = [v.index[~v.known] for v in verdicts if not v.known.all()]
    missing = inside(np.unique(np.concatenate(unknown))) if unknown else np.empty(0, np.int64)
    if kept is None:
        boxes = _products(axes)
        selected = sum(math.prod(sides) for sides in (boxes[:, 1] - boxes[:, 0]).tolist())
        return Plan(boxes, selected, chunks - selected, 0, 0, len(missing), in_axes)
    for verdict in ruling:
        kept = kept[verdict.at(kept, region.size)]
    excluded = [v.index[~v.match] for v in verdicts]
    gone = excluded[0] if len(excluded) == 1 else np.unique(np.concatenate(excluded))
    statistics = len(inside(gone)) + sum(
        math.prod(int(a[lo:hi].sum()) for a, lo, hi in zip(axes, box.lo, box.hi, strict=True))
        for box in out
    )
    absent = in_range - len(kept) - statistics
    lacking = len(np.intersect1d(missing, kept, assume_unique=True)) if len(missing) else 0
    every = np.ones(len(kept), np.bool_)
    chosen = partial(Verdict(kept, every, every, unwritten=False).at, size=region.size)
    boxes = boxes_of(kept, region)
    return Plan(boxes, len(kept), chunks - in_range, statistics, absent, lacking, chosen)


def _products(axes: Sequence[_Mask]) -> IndexArray:
    """Boxes of the products of runs; around all of them, if there are too many."""
    runs = [runs_of(axis) for axis in axes]
    if math.prod(map(len, runs)) > _MOST_RUNS:
        runs = [np.array([[axis[0, 0], axis[-1, 1]]]) for axis in runs]
    boxes = [np.array(box, np.int64).reshape(-1, 2).T for box in product(*runs)]
    return np.array(boxes, np.int64).reshape(len(boxes), 2, len(axes))


def boxes_of(index: IndexArray, region: Box) -> IndexArray:
    """Disjoint boxes (int64[n, 2, ndim]) of the chunks with these ascending linear indexes.

    Chunks are merged along the last axis, the results along the axis before it, and so on.
    """
    if not len(index):
        return np.empty((0, 2, region.ndim), np.int64)
    if not region.ndim:
        return np.zeros((1, 2, 0), np.int64)
    row = region.hi[-1] - region.lo[-1]
    starts = np.ones(len(index), np.bool_)
    starts[1:] = (np.diff(index) != 1) | (index[1:] % row == 0)
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(index)) - 1
    lo, hi = region.unravel(index[first]), region.unravel(index[last]) + 1
    for axis in range(region.ndim - 2, -1, -1):
        lo, hi = _merged_along(lo, hi, axis)
    order = np.lexsort(lo.T[::-1])
    return np.stack([lo[order], hi[order]], axis=1)


def _merged_along(lo: IndexArray, hi: IndexArray, axis: int) -> tuple[IndexArray, IndexArray]:
    """Neighbors along an axis in one box, where they are equal along the others."""
    others = [lo[:, i] for i in range(lo.shape[1]) if i != axis]
    others += [hi[:, i] for i in range(axis + 1, lo.shape[1])]
    order = np.lexsort((lo[:, axis], *others))
    lo, hi = lo[order], hi[order]
    starts = np.ones(len(lo), np.bool_)
    starts[1:] = lo[1:, axis] != hi[:-1, axis]
    for column in others:
        starts[1:] |= np.diff(column[order]) != 0
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(lo)) - 1
    # From here on `lo` and `hi` differ along this axis, too.
    return lo[first], np.concatenate([hi[last][:, : axis + 1], hi[first][:, axis + 1 :]], axis=1)


def counts_hold(cells: IndexArray, coords: IndexArray, shape: Coords, chunk: Coords) -> _Mask:
    """Whether counts of cells that were taken earlier count the cells that the array has now.

    They do if all cells of the chunk were counted. In an array with one axis, the number of cells
    also says which ones.
    """
    whole = math.prod(chunk)
    if len(shape) != 1:
        return np.asarray(cells == whole)
    now = np.clip(shape[0] - coords[:, 0] * chunk[0], 0, chunk[0])
    return np.asarray((cells == whole) | (cells >= now))
