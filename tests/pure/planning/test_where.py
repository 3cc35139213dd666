"""Wheres: what text and Python values say, and that canonical text says the same."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import cftime
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.errors import InvalidArgumentError, WhereError
from zarr_manifests.planning.skipping import matching_cells
from zarr_manifests.planning.where import (
    GRAMMAR,
    Comparison,
    Moment,
    Where,
    parse_where,
    zone_of,
)

NUMBERS = st.one_of(
    st.integers(-(10**37) + 1, 10**37 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([2**53 + 1, -(2**63), 2**64 - 1, -0.0, 5e-324, 1.7976931348623157e308, 1e37]),
)
MOMENTS = st.one_of(
    st.datetimes().map(lambda at: Comparison("t", "=", (at,)).values[0]),
    st.dates().map(lambda at: Moment(at.isoformat())),
    st.sampled_from([Moment("1999-02-28T12:30Z"), Moment("-0044-03-15"), Moment("2000-02-29")]),
)
KINDS = st.sampled_from([NUMBERS, MOMENTS, st.booleans(), st.text()])

OPS = ["=", "!=", "<", "<=", ">", ">=", "in", "between", "is_null", "is_not_null"]
EPOCH = pd.Timestamp("1970-01-01").to_pydatetime()


@st.composite
def comparisons(draw: st.DrawFn) -> Comparison:
    op = draw(st.sampled_from(OPS))
    count = {"in": draw(st.integers(1, 4)), "between": 2, "is_null": 0, "is_not_null": 0}
    kind, n = draw(KINDS), count.get(op, 1)
    values = draw(st.lists(kind, min_size=n, max_size=n))
    return Comparison(draw(st.text(min_size=1)), op, tuple(values))


@given(st.lists(comparisons(), min_size=1, max_size=4))
def test_canonical_text_says_the_same(made: list[Comparison]) -> None:
    where = Where(tuple(made))
    again = parse_where(where.sql)
    assert again == where
    assert again.sql == where.sql
    for one, other in zip(where.comparisons, again.comparisons, strict=True):
        if all(isinstance(value, Moment) for value in one.values):
            assert one.values == other.values
        assert [type(value) for value in one.values] == [type(value) for value in other.values]


def test_python_values_say_the_same_as_text() -> None:
    text = "depth > 4000 AND flag IN (1, 2) AND t IS NULL AND lat BETWEEN -30 AND 30 AND name = 'a'"
    listed = [
        ("depth", ">", np.float32(4000)),
        ("flag", "in", np.array([1, 2])),
        ("t", "is null"),
        ("lat", "BETWEEN", (-30, Decimal("30.0"))),
        Comparison("name", "==", ("a",)),
    ]
    mapping = {
        "depth": (">", 4000),
        "flag": [1, 2],
        "t": None,
        "lat": ("between", [-30, 30]),
        "name": ("=", np.str_("a")),
    }
    assert parse_where(listed) == parse_where(mapping) == parse_where(text)
    assert parse_where(parse_where(text)) == parse_where(text)
    assert parse_where(text).columns == ("depth", "flag", "t", "lat", "name")
    assert parse_where(Comparison("a", "=", (1,))).sql == "a = 1"
    joined = ["depth > 4000", {"flag": [1, 2]}, parse_where("t IS NULL"), ("a", "=", 1)]
    assert parse_where(joined) == parse_where(
        "depth > 4000 AND flag IN (1, 2) AND t IS NULL AND a = 1"
    )


def test_pairs_of_a_mapping_are_ranges_unless_they_begin_with_an_operator() -> None:
    where = parse_where(
        {"lat": (-30, 30), "t": slice("2000", None), "x": [1, (2, 3)], "d": (">", 1)}
    )
    assert [each.op for each in where.comparisons] == ["within", "within", "within", ">"]
    assert [each.values for each in where.comparisons[:3]] == [
        ((-30, 30),),
        (("2000", None),),
        ((1, 1), (2, 3)),
    ]
    shown = "lat WITHIN (-30, 30) AND t WITHIN ('2000', None) AND x WITHIN (1, 1), (2, 3) AND d > 1"
    assert where.sql == shown


@pytest.mark.parametrize(
    "value",
    [
        "2000-02",
        date(2000, 2, 1),
        cftime.Datetime360Day(2000, 2, 30),
        ["2000-02", "2000-05"],
        ["2000-02", np.datetime64("2000-03-01")],
    ],
)
def test_a_label_of_a_mapping_is_a_range_from_it_to_it(value: Any) -> None:
    labels = value if isinstance(value, list) else [value]
    (found,) = parse_where({"t": value}).comparisons
    assert found == Comparison("t", "within", tuple((label, label) for label in labels))


@pytest.mark.parametrize("value", [[("2000", "2001"), None], ["2000", None], [1, None]])
def test_a_list_has_no_missing_value(value: Any) -> None:
    """As an end of a range, None would select everything."""
    with pytest.raises(InvalidArgumentError, match="IS NULL by itself"):
        parse_where({"t": value})


def test_times_of_numpy_are_in_utc_wherever_they_stand() -> None:
    noon = np.datetime64("2000-03-26T12")
    hours = np.array(["2000-03-26T12"], "M8[h]")
    for value in (noon, [noon], ("=", noon), (noon, noon), ("in", [noon])):
        (comparison,) = parse_where({"t": value}).comparisons
        assert matching_cells(comparison, hours, zone=zone_of("Asia/Tokyo")).all(), value


@pytest.mark.parametrize(
    ("value", "sql"),
    [
        (date(2000, 1, 2), "DATE '2000-01-02'"),
        (datetime(2000, 1, 2, 3, tzinfo=timezone(timedelta(hours=1))), "TIMESTAMP '2000-01-02 02"),
        (np.datetime64("2000-01-02T03:00:00.000000001"), "TIMESTAMP '2000-01-02T03:00:00.00000000"),
        (pd.Timestamp("2000-01-02T03:00:00.000000001"), "TIMESTAMP '2000-01-02 03:00:00.0000000"),
        (np.uint64(2**64 - 1), "18446744073709551615.0"),
        (Decimal("0.1"), "0.1"),
    ],
)
def test_values_of_python_and_numpy_become_literals(value: Any, sql: str) -> None:
    assert parse_where({"x": ("=", value)}).sql.startswith(f"x = {sql}")


@pytest.mark.parametrize(
    ("text", "at", "word"),
    [
        ("depth > 4000 OR x < 1", "OR", "AND"),
        ("x > 1 + 2", "+", "arithmetic"),
        ("x = 1 AND sin(x) > 1", "sin", "comparison"),
        ("x > y", "x", "literal"),
        ("x = 'abc", "x", "literal"),
        ("xIS NULL", "xIS", "literal"),
        ("x = DATE '2001-02-29'", "x", "calendar"),
        ("x = '\x1b' OR y = 1", "OR", "AND"),
    ],
)
def test_anything_else_shows_the_place_and_the_grammar(text: str, at: str, word: str) -> None:
    with pytest.raises(WhereError) as caught:
        parse_where(text)
    assert text[caught.value.position :].startswith(at)
    assert word in caught.value.reason
    shown, place = str(caught.value).splitlines()[1:3]
    assert shown[place.index("^") :] == text[caught.value.position :]
    assert shown.isprintable()
    assert str(caught.value).endswith(GRAMMAR)


@pytest.mark.parametrize(
    "where",
    [
        [],
        [("x", "~", 1)],
        [("x", "in", [])],
        [("x", "=", float("nan"))],
        [("x", "=", pd.NaT)],
        [("x", "between", (1, 2, 3))],
        {"x": (1, 2, 3)},
        {"x": (1, "a")},
        {"x": ["a", None]},
        {"x": ("=>", "a")},
        {"x": slice(1, 3, 2)},
        {"x": (float("nan"), None)},
    ],
    ids=str,
)
def test_values_that_say_nothing_are_refused(where: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_where(where)


@given(st.datetimes(), st.sampled_from(["UTC", "Asia/Kolkata"]))
def test_moments_count_nanoseconds_from_1970(at: datetime, zone: str) -> None:
    (literal,) = Comparison("t", "=", (at,)).values
    assert isinstance(literal, Moment)
    microseconds = (at - EPOCH) // timedelta(microseconds=1)
    assert literal.nanoseconds() == microseconds * 1000
    if 1950 < at.year < 9000:
        due = at.replace(tzinfo=ZoneInfo(zone)) - EPOCH.replace(tzinfo=UTC)
        assert literal.nanoseconds(ZoneInfo(zone)) == due // timedelta(microseconds=1) * 1000


@pytest.mark.parametrize("text", ["-0044-03-15T12:00:01", "+12345-02-28"])
def test_years_that_python_does_not_have_count_as_numpy_counts_them(text: str) -> None:
    due = np.datetime64(text.replace("+", ""), "s").astype(int)
    assert Moment(text).nanoseconds() == int(due) * 10**9


def test_the_zone_in_a_moment_counts() -> None:
    assert Moment("1970-01-01T01:00+01:00").nanoseconds(ZoneInfo("Asia/Tokyo")) == 0
    assert Moment("1970-01-01T00:00:00-00:30").nanoseconds() == 1800 * 10**9
    assert Moment("1970-01-01 09:00").nanoseconds(ZoneInfo("Asia/Tokyo")) == 0


def test_of_a_long_where_what_is_near_the_fault_is_shown() -> None:
    with pytest.raises(WhereError) as caught:
        parse_where(f"{'x' * 5000} > 1 AND y ! 2 AND {'z' * 5000} > 3")
    lines = str(caught.value).splitlines()
    assert lines[1].startswith("  ...xxx")
    assert lines[1].endswith("zzz...")
    assert lines[1][lines[2].index("^") :].startswith("y ! 2")
    assert len(lines[1]) < 500
