"""From closed ranges of coordinate values to the positions they select.

A range is `(lo, hi)` or `slice(lo, hi)` with both ends included, None for an open end, and
`lo <= hi` even for a descending coordinate. A list of ranges and single values selects all that any
of them does. Every value is compared, so the coordinate may be unsorted, descending, wrapping or
repeating.

What the ends may be depends on the coordinate:

- Numbers: numbers.
- Times: `datetime`, `date`, `numpy.datetime64`, or ISO text. Text and dates stand for the whole
  period they name: the upper end `"2000-02"` includes all of February. Without a time zone they are
  in the given one; those of NumPy are as the coordinate has them, in UTC.
- Times of a calendar that timestamps cannot hold: the same, and `cftime` objects.
- Durations: `timedelta`, `numpy.timedelta64`, or text such as `"3 days"`.
- Text and bytes: the same, compared by code point.
- A dimension without a coordinate: whole numbers, compared with positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import partial
from numbers import Integral, Real
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import IndexArray
from zarr_manifests.planning.scan import runs_of
from zarr_manifests.planning.zones.where import Moment

__all__ = ["runs_in_range"]

_ISO: Final = re.compile(
    r"(\d{4}|[+-]\d{4,6})"
    r"(?:-(\d\d)(?:-(\d\d)(?:[T ](\d\d)(?::(\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)?)?)?)?)?",
    re.ASCII,
)
_FIELDS: Final = ("year", "month", "day", "hour", "minute", "second", "microsecond")
_US: Final = np.timedelta64(1, "us")


def runs_in_range(
    name: str,
    coordinate: npt.NDArray[Any] | None,
    size: int,
    given: Any,
    *,
    on_empty: str = "error",
    zone: tzinfo = UTC,
) -> IndexArray:
    """The half-open runs (int64[n, 2]) of positions along a dimension that a range selects.

    Parameters
    ----------
    name : str
        Name of the dimension.
    coordinate : array, optional
        Its decoded values; None for a dimension without a coordinate.
    size : int
        Its length.
    given : (lo, hi), slice or list
        The range, or a list of ranges and values.
    on_empty : "error" or "empty", default "error"
        What to do if a range selects nothing although the dimension is not empty.
    zone : tzinfo
        The time zone of times without one.

    Raises
    ------
    InvalidArgumentError
        If it is not a range, an end has another type than the coordinate, the ends are the wrong
        way round, or it selects nothing and `on_empty` is "error".
    """
    ranges = [_pair(name, each) for each in given] if isinstance(given, list) else None
    if ranges is None and not isinstance(given, tuple | slice):
        raise _no_range(name, given)
    ranges = [_pair(name, given)] if ranges is None else ranges
    if not size:
        return np.empty((0, 2), np.int64)
    runs = _joined([_runs(name, coordinate, size, lo, hi, zone) for lo, hi in ranges])
    if not len(runs) and on_empty == "error":
        raise _selects_nothing(name, coordinate, size, given)
    return runs


def _pair(name: str, given: Any) -> tuple[Any, Any]:
    """The ends of a range, or of a single value."""
    if isinstance(given, slice):
        if given.step is not None:
            raise _no_range(name, given)
        return given.start, given.stop
    if isinstance(given, tuple | list):
        if len(given) != 2:
            raise _no_range(name, given)
        return given[0], given[1]
    return given, given


def _no_range(name: str, given: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the range of {name!r} must be a pair (lo, hi) or a slice, with None for an open end, or "
        f"a list of pairs and values; got {given!r}"
    )


def _selects_nothing(
    name: str, coordinate: npt.NDArray[Any] | None, size: int, given: Any
) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the range {given!r} of {name!r} selects nothing: {_span(coordinate, size)}. "
        "The smaller end comes first, also where the coordinate descends"
    )


def _runs(
    name: str, coordinate: npt.NDArray[Any] | None, size: int, lo: Any, hi: Any, zone: tzinfo
) -> IndexArray:
    """The runs of positions that one range selects."""
    if coordinate is not None:
        return runs_of(_mask(name, coordinate, lo, hi, zone))
    first = 0 if lo is None else _whole(name, lo)
    last = size - 1 if hi is None else _whole(name, hi)
    if lo is not None and hi is not None and first > last:
        raise _selects_nothing(name, coordinate, size, (lo, hi))
    runs = np.array([[max(first, 0), min(last + 1, size)]], np.int64)
    return runs[runs[:, 0] < runs[:, 1]]


def _joined(given: list[IndexArray]) -> IndexArray:
    """The runs of positions that are in any of these runs."""
    if len(given) == 1:
        return given[0]
    runs = np.concatenate([np.empty((0, 2), np.int64), *given])
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    begins = np.flatnonzero(np.append(True, runs[1:, 0] > reach[:-1])[: len(runs)])
    ends = np.append(begins[1:], len(runs))[: len(begins)] - 1
    return np.stack([runs[begins, 0], reach[ends]], axis=1)


def _mask(
    name: str, coordinate: npt.NDArray[Any], lo: Any, hi: Any, zone: tzinfo
) -> npt.NDArray[np.bool_]:
    """Which values are in the range; missing values are only in a range without ends."""
    if lo is None and hi is None:
        return np.ones(coordinate.shape, bool)
    mask: npt.NDArray[np.bool_] = ~pd.isnull(coordinate)
    if not mask.any():
        return mask
    values, convert = _comparable(name, coordinate[mask], zone)
    inside = np.ones(values.shape, bool)
    low = None if lo is None else convert(name, lo, False)
    high = None if hi is None else convert(name, hi, True)
    if low is not None and high is not None and low > high:
        raise _selects_nothing(name, coordinate, coordinate.size, (lo, hi))
    if low is not None:
        inside &= np.asarray(values >= low, bool)
    if high is not None:
        inside &= np.asarray(values <= high, bool)
    mask[mask] = inside
    return mask


type _Convert = Callable[[str, Any, bool], Any]


def _comparable(
    name: str, values: npt.NDArray[Any], zone: tzinfo
) -> tuple[npt.NDArray[Any], _Convert]:
    """The values in a comparable form, and a function that converts an end to it."""
    kind = values.dtype.kind
    if kind == "O" and hasattr(values[0], "calendar"):
        ranks = [_rank(_fields(name, value)) for value in values]
        return np.array(ranks, object), _date_rank
    if kind == "O" and isinstance(values[0], str):
        return values, _text
    if kind in "iub":
        return values, _number
    if kind == "f":  # an end at the coordinate's own precision, so that 0.1 equals float32(0.1)
        return values, lambda name, end, upper: _float(values.dtype, _number(name, end, upper))
    if kind in "mM":
        return values, partial(_instant, zone) if kind == "M" else _duration
    return values.astype(object), _bytes


def _wrong(name: str, end: Any, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{end!r} cannot be an end of the range of {name!r}: {what}")


def _whole(name: str, end: Any) -> int:
    if isinstance(end, bool) or not isinstance(end, Integral):
        raise _wrong(name, end, "it has no coordinate, so its ranges are of positions from 0 on")
    return int(end)


def _number(name: str, end: Any, upper: bool) -> Any:
    if isinstance(end, bool) or not isinstance(end, Real) or math.isnan(end):
        raise _wrong(name, end, "its values are numbers")
    return int(end) if isinstance(end, Integral) else float(end)


def _float(dtype: np.dtype[Any], end: float) -> Any:
    with np.errstate(over="ignore"):
        return dtype.type(end)


def _text(name: str, end: Any, upper: bool) -> str:
    if not isinstance(end, str):
        raise _wrong(name, end, "its values are text")
    return end


def _bytes(name: str, end: Any, upper: bool) -> bytes:
    if not isinstance(end, bytes):
        raise _wrong(name, end, "its values are bytes")
    return end


def _duration(name: str, end: Any, upper: bool) -> Any:
    what = "its values are durations; give a timedelta, or text such as '3 days'"
    if not isinstance(end, str | timedelta | np.timedelta64):
        raise _wrong(name, end, what)
    try:
        given = pd.Timedelta(end)
    except ValueError as error:
        raise _wrong(name, end, what) from error
    if given is pd.NaT:
        raise _wrong(name, end, what)
    return given.to_timedelta64()


def _instant(zone: tzinfo, name: str, end: Any, upper: bool) -> Any:
    """The first or last microsecond of the period that an end names."""
    what = "its values are times; give a datetime, or ISO text such as '2000-02-29T12:00'"
    if isinstance(end, np.datetime64) and not np.isnat(end):
        return end.astype("M8[us]")
    if isinstance(end, datetime) and end is not pd.NaT:
        return _utc(end, zone)
    text = end.isoformat() if type(end) is date else end
    if not isinstance(text, str):
        raise _wrong(name, end, what)
    try:
        if _ISO.fullmatch(text.strip()) is None:  # numpy has no time zones, but takes "today"
            return _utc(datetime.fromisoformat(text.strip()), zone)
        period = np.datetime64(text.strip())
    except ValueError as error:
        raise _wrong(name, end, what) from error
    if upper:
        unit: Any = np.datetime_data(period.dtype)[0]
        return _utc_of(period + np.timedelta64(1, unit), zone) - _US
    return _utc_of(period, zone)


def _utc(moment: datetime, zone: tzinfo) -> np.datetime64:
    if moment.tzinfo is None:
        return _utc_of(np.datetime64(moment, "us"), zone)
    return np.datetime64(moment.astimezone(UTC).replace(tzinfo=None), "us")


def _utc_of(local: np.datetime64, zone: tzinfo) -> np.datetime64:
    local = local.astype("M8[us]")
    text = str(local)
    moment = Moment(text if text[0] in "+-" or text[4] == "-" else f"+{text}")
    return np.datetime64(moment.nanoseconds(zone) // 1000, "us")


_BASE: Final = (13, 32, 24, 60, 62, 1_000_000)
_LEAST: Final = (0,) * len(_BASE)
_GREATEST: Final = tuple(base - 1 for base in _BASE)


def _date_rank(name: str, end: Any, upper: bool) -> int:
    return _rank(_fields(name, end), _GREATEST if upper else _LEAST)


def _rank(fields: tuple[int, ...], rest: tuple[int, ...] = _LEAST) -> int:
    """A number that sorts like the date; `rest` stands for fields that are not named."""
    rank = fields[0]
    for base, field in zip(_BASE, (*fields[1:], *rest[len(fields) - 1 :]), strict=True):
        rank = rank * base + field
    return rank


def _fields(name: str, moment: Any) -> tuple[int, ...]:
    """Year, month and so on of a date, as far as it names them."""
    if isinstance(moment, np.datetime64):
        moment = moment.astype("M8[us]").item()
    if all(hasattr(moment, field) for field in _FIELDS) and moment is not pd.NaT:
        return tuple(int(getattr(moment, field)) for field in _FIELDS)
    text = moment.isoformat() if type(moment) is date else moment
    found = _ISO.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        what = "its values are dates; give ISO text such as '2000-02-30', or a cftime date"
        raise _wrong(name, moment, what)
    given = [part for part in found.groups() if part is not None]
    if len(given) == len(_FIELDS):
        given[-1] = given[-1].ljust(6, "0")
    return tuple(map(int, given))


def _span(coordinate: npt.NDArray[Any] | None, size: int) -> str:
    """Describe what a coordinate spans."""
    if coordinate is None:
        return f"it has no coordinate, and its positions run from 0 to {size - 1}"
    values = coordinate[~pd.isnull(coordinate)]
    if not values.size:
        return f"all its {size} values are missing"
    if values.dtype.kind not in "mM":
        values = values.astype(object)
    low, high = (_shown(end) for end in (values.min(), values.max()))
    return f"its {size} values run from {low} to {high}"


def _shown(value: Any) -> str:
    if isinstance(value, np.datetime64):
        return np.datetime_as_string(value, unit="auto")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
