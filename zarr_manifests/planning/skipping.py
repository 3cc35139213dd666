"""Which chunks may hold a cell that a where selects.

Comparisons have three outcomes, as in SQL: a missing value matches none, only `IS NULL`. So a chunk
is left out if its bounds exclude a match, or if all its values are missing. The caller decodes the
bounds as a reader decodes values. Numbers are compared exactly: integers as integers, times at
their own unit, and floats both as 64-bit floats and in their own type, as readers differ in that.
For single cells the same comparisons are exact, so that they choose rows, too.

Invariant: whatever is not known may match.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, timedelta, tzinfo
from fractions import Fraction
from functools import partial, reduce
from itertools import product, zip_longest
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box, IndexArray, in_few_boxes
from zarr_manifests.planning.scan import runs_of
from zarr_manifests.planning.where import MOMENT, Comparison, End, Moment

type _Mask = npt.NDArray[np.bool_]

_DENSE: Final = 1 << 24
"""Most chunks of a region that are looked at one by one though nothing is stored for them."""
_MOST_RUNS: Final = 1 << 16
_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9, "ps": 10**12, "fs": 10**15}
_FIELDS: Final = attrgetter("year", "month", "day", "hour", "minute", "second", "microsecond")
_BASES: Final = (13, 32, 24, 60, 62, 10**6)
"""One more than the greatest month, day and so on of any calendar."""
_ABOVE_NAN: Final = (">", ">=", "!=")
"""What NaN matches, where it is greater than every number."""


class Ranges(Struct, frozen=True, eq=False):
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
    comparison: Comparison,
    ranges: Ranges,
    *,
    nan_matches: bool = False,
    zone: tzinfo = UTC,
    as_spark: bool = False,
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
    as_spark : bool, default False
        Small floats are compared as 64-bit floats only, so that all single cells are exact.

    Raises
    ------
    InvalidArgumentError
        If values of this type cannot be compared with the literals.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.planning.skipping import Ranges, may_match
    >>> from zarr_manifests.planning.where import Comparison
    >>> depths = np.array([1.0, np.nan, 3.0])
    >>> cells = Ranges.of_cells(depths, np.isnan(depths))
    >>> may_match(Comparison("depth", ">", (2,)), cells)
    array([False, False,  True])
    >>> may_match(Comparison("depth", "is_null"), cells)
    array([False,  True, False])
    """
    op, found, low, high = comparison.op, ranges.bounded, ranges.low, ranges.high
    with np.errstate(invalid="ignore", over="ignore"):
        if op == "is_null":
            found = ranges.nulls
        elif op == "within" and (None, None) in comparison.values:
            found = np.ones(len(low), np.bool_)
        elif op != "is_not_null":
            small = low.dtype.kind == "f" and low.dtype.itemsize < np.dtype(np.float64).itemsize
            match = np.zeros(len(low), np.bool_)
            if op == "within" or not (small and as_spark):
                match = _matching(comparison, low, high, zone)
            if small and op != "within":  # numpy compares in the type of the values, Spark in this
                low, high = low.astype(np.float64), high.astype(np.float64)
                match |= _matching(comparison, low, high, zone)
            found = found & match
    if nan_matches and op in (*_ABOVE_NAN, "is_not_null"):
        found = found | ranges.nulls
    return found | ~ranges.known


def matching_cells(
    comparison: Comparison, values: npt.NDArray[Any], *, zone: tzinfo, nan_is_null: bool = True
) -> _Mask:
    """Which decoded values match, as rows of Spark do."""
    values, missing = comparable(values)
    if values.dtype.kind == "f" and not nan_is_null:
        missing = np.zeros(len(values), np.bool_)  # NaN compares as in Spark by what is done here
    if values.dtype.kind == "M":
        values = values.astype("M8[us]")
    return may_match(comparison, Ranges.of_cells(values, missing), zone=zone, as_spark=True)


def matching_runs(
    comparisons: Sequence[Comparison],
    coordinate: npt.NDArray[Any] | None,
    size: int,
    *,
    zone: tzinfo,
    nan_is_null: bool = True,
) -> IndexArray:
    """The half-open runs (int64[n, 2]) of positions along a dimension where comparisons hold.

    A dimension without a coordinate has positions, which are not listed: between two numbers that
    occur in comparisons, all of them compare alike.
    """
    values = coordinate
    if values is None:
        given = [value for each in comparisons for value in each.values]
        ends = [end for one in given for end in (one if isinstance(one, tuple) else (one,))]
        numbers = [int(min(max(end, -1), size)) for end in ends if isinstance(end, int | float)]
        edges = {0, *numbers, *(number + 1 for number in numbers)}
        values = np.array(sorted(edge for edge in edges if 0 <= edge < size), np.int64)
    masks = [
        matching_cells(each, values, zone=zone, nan_is_null=nan_is_null) for each in comparisons
    ]
    runs = runs_of(np.logical_and.reduce(masks))
    if coordinate is not None:
        return runs
    return np.stack([values[runs[:, 0]], np.append(values, size)[runs[:, 1]]], axis=1)


def comparable(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], _Mask]:
    """Values of a type that can be compared, and which of them are missing.

    Objects are text, bytes or dates of `cftime`; another one is in the place of missing ones.
    """
    kind = values.dtype.kind
    if kind in "mM":
        return values, np.isnat(values)
    if kind == "f":
        return values, np.isnan(values)
    if kind not in "TO":
        return values, np.zeros(len(values), np.bool_)
    values = values.astype(object)
    kinds = {type(value) for value in values.tolist()}
    good = {kind for kind in kinds if issubclass(kind, str | bytes) or hasattr(kind, "calendar")}
    if kinds == good:
        return values, np.zeros(len(values), np.bool_)
    present = np.array([type(value) in good for value in values.tolist()], np.bool_)
    values[~present] = values[present][0] if good else ""
    return values, ~present


def _matching(
    comparison: Comparison, low: npt.NDArray[Any], high: npt.NDArray[Any], zone: tzinfo
) -> _Mask:
    """Which of these bounds may have a match in between."""
    op, values, labels = comparison.op, comparison.values, comparison.op == "within"
    kind = _kind(low)
    if kind == "dates":
        low = high = np.array([_rank(_FIELDS(at)) if labels else at.isoformat() for at in low])
        kind = kind if labels else "U"
    scalar = partial(_scalar, comparison, kind, low.dtype, zone=zone)
    if op == "!=":
        value = scalar(values[0])
        return ~(_against(low, value)[1] & _against(high, value)[1])
    spans: Sequence[tuple[Any, Any]] = values
    match op:
        case "=" | "in":
            spans = [(value, value) for value in values]
        case "between":
            spans = [(values[0], values[1])]
        case "<" | "<=":
            spans = [(None, values[0])]
        case ">" | ">=":
            spans = [(values[0], None)]
    found = np.zeros(len(low), np.bool_)
    for first, last in spans:
        least = None if first is None else scalar(first)
        most = None if last is None else scalar(last, last=labels)
        if labels and least is not None and most is not None and least > most:
            raise _wrong(comparison, "the smaller end comes first, also where labels descend")
        inside = np.ones(len(low), np.bool_)
        if least is not None:
            less, equal = _against(high, least)
            inside = ~(less | equal) if op == ">" else ~less
        if most is not None:
            less, equal = _against(low, most)
            inside &= less if op == "<" else less | equal
        found |= inside
    return found & ~np.isnan(low) if labels and kind == "f" else found


def _kind(values: npt.NDArray[Any]) -> str:
    """The kind of a type; of objects, what they are."""
    first = values[0] if values.dtype.kind == "O" and len(values) else None
    if isinstance(first, bytes):
        return "S"
    return "dates" if hasattr(first, "calendar") else values.dtype.kind


def _scalar(
    comparison: Comparison,
    kind: str,
    dtype: np.dtype[Any],
    literal: End,
    zone: tzinfo,
    *,
    last: bool = False,
) -> Any:
    """What such values are compared with; `last` is for the end of the period that times name."""
    ranges = comparison.op == "within"
    match kind, literal:
        case "b", bool():
            return Fraction(literal)
        case "i" | "u", int() | float() if not isinstance(literal, bool):
            return Fraction(literal if math.isfinite(literal) else math.copysign(2**65, literal))
        case "f", int() | float() if not isinstance(literal, bool):
            return dtype.type(literal)
        case "M", Moment() | str():
            try:
                moment = literal if isinstance(literal, Moment) else Moment(literal.strip())
            except InvalidArgumentError as error:
                raise _wrong(comparison, f"its values are times, and {error}") from error
            nanoseconds = moment.nanoseconds(zone, last=last)
            return Fraction(nanoseconds * _PER_SECOND[_unit(dtype)], 10**9)
        case "m", str() | timedelta() | np.timedelta64() if ranges:
            return Fraction(_duration(comparison, literal) * _PER_SECOND[_unit(dtype)], 10**9)
        case "dates", str() | Moment() if ranges:
            found = MOMENT.fullmatch(str(getattr(literal, "text", literal)).strip())
            if found is None:
                raise _wrong(comparison, f"its values are dates, and {literal!r} is none")
            *given, fraction, _ = found.groups()
            given.append(fraction and fraction.ljust(6, "0")[:6])
            return Fraction(_rank([int(part) for part in given if part], last=last))
        case "S", str() | bytes():
            if isinstance(literal, str):
                literal = literal.encode(errors="surrogatepass")
            return np.bytes_(literal)
        case "U" | "O", str():
            return literal
    names = {"b": "TRUE and FALSE", "M": "times", "m": "durations, which cannot be compared"}
    what = names.get(kind, "numbers" if kind in "iuf" else "text")
    raise _wrong(comparison, f"its values are {what}")


def _duration(comparison: Comparison, given: Any) -> int:
    """Nanoseconds in a duration."""
    import pandas as pd

    try:
        return int(pd.Timedelta(given).value)
    except ValueError as error:
        raise _wrong(
            comparison, f"its values are durations, such as '3 days', and {error}"
        ) from error


def _rank(fields: Sequence[int], *, last: bool = False) -> int:
    """A number that sorts like a date; the last one with these fields, or the first."""
    rank = fields[0]
    for base, field in zip_longest(_BASES, fields[1:]):
        rank = rank * base + (field if field is not None else last * (base - 1))
    return rank


def _against(values: npt.NDArray[Any], scalar: Any) -> tuple[_Mask, _Mask]:
    """Which values are less than a scalar, and which are equal to it."""
    if not isinstance(scalar, Fraction):
        return np.asarray(values < scalar, bool), np.asarray(values == scalar, bool)
    if values.dtype.kind == "b":
        values = values.astype(np.int8)
    elif values.dtype.kind in "mM":
        unit = f"{values.dtype.kind}8[{_unit(values.dtype)}]"
        values = values.astype(unit, copy=False).view(np.int64)
    least = math.floor(scalar)
    if scalar != least:
        return values <= least, np.zeros(len(values), np.bool_)
    return values < least, values == least


def _unit(dtype: np.dtype[Any]) -> str:
    """The unit in which times are compared."""
    unit = np.datetime_data(dtype)[0]
    return unit if unit in _PER_SECOND else "s"


def _wrong(comparison: Comparison, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{comparison.column!r} cannot be in `{comparison.sql}`: {what}")


class Verdict(Struct, frozen=True, eq=False):
    """What comparisons say of the chunks of an array.

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

    def at(self, index: IndexArray) -> _Mask:
        """Which of these chunks may match."""
        if not len(self.index):
            return np.full(len(index), self.unwritten)
        at = np.minimum(self.index.searchsorted(index), len(self.index) - 1)
        return np.where(self.index[at] == index, self.match[at], self.unwritten)


class Plan(Struct, frozen=True, eq=False):
    """The chunks of a grid that may match, and why the others do not.

    Parameters
    ----------
    boxes : int64[n, 2, ndim]
        Half-open boxes of chunks that may match, in C order, disjoint.
    selected : int
        Chunks in them.
    left_out : mapping of str to int
        Chunks left out by `range`, the values of coordinates; by `statistics`, their bounds; by
        `absence`, as nothing is stored and the fill value does not match.
    unknown : int
        Chunks in the boxes that lack statistics.
    """

    boxes: IndexArray
    selected: int
    left_out: Mapping[str, int]
    unknown: int


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
    >>> from zarr_manifests.planning.skipping import Verdict, plan_chunks
    >>> axes = [np.array([True, True, False]), np.ones(4, bool)]
    >>> match = np.array([True, True, False, False, True, True])
    >>> verdict = Verdict(np.array([0, 1, 2, 3, 4, 5]), match, match | True, False)
    >>> plan = plan_chunks(axes, Box((0, 0), (2, 4)), [verdict])
    >>> plan.boxes.tolist()
    [[[0, 0], [2, 2]]]
    >>> plan.selected, plan.left_out
    (4, {'range': 4, 'statistics': 2, 'absence': 2})
    """
    chunks = math.prod(len(axis) for axis in axes)
    in_range = math.prod(int(axis.sum()) for axis in axes)
    shown = [axis[lo:hi] for axis, lo, hi in zip(axes, region.lo, region.hi, strict=True)]

    def inside(index: IndexArray) -> IndexArray:
        if all(axis.all() for axis in shown):
            return index
        found = region.unravel(index)
        masks = [a[found[:, i] - region.lo[i]] for i, a in enumerate(shown)]
        return index[reduce(np.logical_and, masks)]

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
        left_out = {"range": chunks - selected, "statistics": 0, "absence": 0}
        return Plan(boxes, selected, left_out, len(missing))
    for verdict in ruling:
        kept = kept[verdict.at(kept)]
    excluded = [v.index[~v.match] for v in verdicts]
    gone = excluded[0] if len(excluded) == 1 else np.unique(np.concatenate(excluded))
    statistics = len(inside(gone)) + sum(
        math.prod(int(a[lo:hi].sum()) for a, lo, hi in zip(axes, box.lo, box.hi, strict=True))
        for box in out
    )
    absent = in_range - len(kept) - statistics
    left_out = {"range": chunks - in_range, "statistics": statistics, "absence": absent}
    lacking = len(np.intersect1d(missing, kept, assume_unique=True)) if len(missing) else 0
    return Plan(boxes_of(kept, region), len(kept), left_out, lacking)


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
    return in_few_boxes(lo, hi, region.ndim - 2)
