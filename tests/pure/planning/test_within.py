"""Closed ranges over coordinates of every kind, against comparing value by value."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import cftime
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.skipping import matching_runs
from zarr_manifests.planning.where import parse_where

numbers = st.floats(-9, 9) | st.just(math.nan)


def selected(coordinate: Any, size: int, given: Any, zone: tzinfo = UTC) -> list[list[int]]:
    (within,) = parse_where([("x", "within", given)]).comparisons
    return matching_runs([within], coordinate, size, zone=zone).tolist()


def positions(coordinate: Any, lo: Any, hi: Any) -> list[int]:
    array = np.asarray(coordinate)
    return [at for run in selected(array, array.size, (lo, hi)) for at in range(*run)]


@given(st.lists(numbers, min_size=1), st.none() | st.integers(-9, 9), st.none() | st.floats(-9, 9))
def test_numbers_in_any_order(values: list[float], lo: int | None, hi: float | None) -> None:
    wanted = [
        position
        for position, value in enumerate(values)
        if (lo is None and hi is None)
        or (-math.inf if lo is None else lo) <= value <= (math.inf if hi is None else hi)
    ]
    if None not in (lo, hi) and lo > hi:  # type: ignore[operator]
        with pytest.raises(InvalidArgumentError, match="the smaller end comes first"):
            positions(values, lo, hi)
    else:
        assert positions(values, lo, hi) == wanted


def test_an_end_has_the_coordinates_precision() -> None:
    lat = np.array([0.1, 0.2, 0.3], "f4")
    for end in (0.2, np.float32(0.2), np.float64(0.2)):
        assert positions(lat, end, end) == [1]
    assert positions(lat, -1e300, math.inf) == [0, 1, 2]
    assert positions(np.array([0, 200], "u1"), -5, 1000) == [0, 1]
    assert positions(np.array([2**62, 2**62 + 1]), np.int64(2**62 + 1), None) == [1]


DAYS = pd.date_range("1999-12-30", "2001-01-02").to_numpy()


def test_times_are_in_the_given_zone_or_their_own() -> None:
    """As in `where`: a day of Tokyo begins and ends nine hours before that of UTC."""
    hours = np.arange("2000-03-24", "2000-03-29", dtype="M8[h]")

    def hours_of(zone: str, lo: Any, hi: Any) -> list[str]:
        [[first, end]] = selected(hours, hours.size, (lo, hi), ZoneInfo(zone))
        return [str(hours[first]), str(hours[end - 1])]

    for day in ("2000-03-26", date(2000, 3, 26)):
        assert hours_of("UTC", day, day) == ["2000-03-26T00", "2000-03-26T23"]
        assert hours_of("Asia/Tokyo", day, day) == ["2000-03-25T15", "2000-03-26T14"]
        # The clocks go forward, so that the day has 23 hours.
        assert hours_of("Europe/Berlin", day, day) == ["2000-03-25T23", "2000-03-26T21"]
    noon = datetime(2000, 3, 26, 12)  # noqa: DTZ001
    for time in (noon, noon.isoformat(), pd.Timestamp(noon)):
        assert hours_of("Asia/Tokyo", time, time) == ["2000-03-26T03", "2000-03-26T03"]
    same = np.datetime64("2000-03-26T12")  # as the coordinate has it
    assert hours_of("Asia/Tokyo", same, same) == ["2000-03-26T12", "2000-03-26T12"]
    east = timezone(timedelta(hours=5))
    utc = np.arange("2000-01-01", "2000-01-03", dtype="M8[h]")
    assert positions(utc, datetime(2000, 1, 1, 7, tzinfo=east), "2000-01-01T03:00Z") == [2, 3]


def test_missing_times_are_in_no_range_that_has_an_end() -> None:
    times = np.array(["2000-01-01", "NaT", "2000-01-03"], "M8[us]")
    assert positions(times, "1999", None) == [0, 2]
    assert positions(times, None, None) == [0, 1, 2]
    assert positions(times[1:2], "1999", None) == []


def test_dates_of_other_calendars() -> None:
    days = xr.date_range("2000-02-01", "2001-03-30", calendar="360_day", use_cftime=True).to_numpy()

    def dates(lo: Any, hi: Any) -> list[str]:
        return [days[position].strftime("%m-%d") for position in positions(days, lo, hi)]

    assert dates("2000-02-29", "2000-02-30T23:59:59.5") == ["02-29", "02-30"]
    assert len(dates("2000-02", "2000-03")) == 60
    assert len(dates("2001", None)) == 90
    assert dates(pd.Timestamp(2000, 3, 1, 1), np.datetime64("2000-03-03")) == ["03-02", "03-03"]
    first = cftime.Datetime360Day(2000, 2, 30)
    assert dates(first, date(2000, 3, 1)) == ["02-30", "03-01"]
    assert dates("2002", None) == []
    with pytest.raises(InvalidArgumentError, match="its values are dates, and 'spring' is none"):
        dates("spring", None)
    some = np.array([days[0], None, days[1]], object)
    assert positions(some, "2000-02-02", None) == [2]


def test_positions_where_there_is_no_coordinate() -> None:
    assert selected(None, 10, (3, np.int64(4))) == [[3, 5]]
    assert selected(None, 10, [None, 99]) == [[0, 10]]
    assert selected(None, 10, [1, (4, 5), slice(6, 7), (9, math.inf)]) == [[1, 2], [4, 8], [9, 10]]
    assert selected(None, 10, (10, None)) == selected(None, 0, (3, 4)) == []
    for lo, hi in ((4, 3), (True, None), ("3", None)):
        with pytest.raises(InvalidArgumentError, match=r"smaller end|values are numbers"):
            selected(None, 10, (lo, hi))


def test_durations_text_and_bytes() -> None:
    days = np.arange(5, dtype="m8[D]").astype("m8[us]")
    assert positions(days, "1 days", timedelta(days=2)) == [1, 2]
    assert positions(days, np.timedelta64(60, "h"), None) == [3, 4]
    for names in (["a", "b", None, "é"], [b"a", b"b", None, "é".encode()]):
        array = np.array(names, object)
        assert positions(array, names[1], None) == [1, 3]
        assert positions(array, names[0], names[1]) == [0, 1]
