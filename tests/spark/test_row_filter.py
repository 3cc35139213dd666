"""Rows that a where keeps, against Spark's own filter."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.zones.time_zone import zone_of
from zarr_manifests.planning.zones.where import parse_where
from zarr_manifests.spark.row_filter import kept

TIMES = [
    datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
    datetime(1999, 12, 31, 16, tzinfo=UTC),
    datetime(2000, 1, 31, 12, tzinfo=UTC),
    None,
]
COLUMNS: dict[str, pa.Array] = {
    "b": pa.array([True, False, None, True]),
    "i1": pa.array([-128, 127, None, 0], pa.int8()),
    "i8": pa.array([2**53, 2**53 + 1, -(2**63), None], pa.int64()),
    "u8": pa.array([Decimal(2**64 - 1), Decimal(0), None, Decimal(2**63)], pa.decimal128(20, 0)),
    "f4": pa.array([0.1, -0.0, math.nan, None], pa.float32()),
    "f8": pa.array([0.1, math.inf, -math.inf, math.nan], pa.float64()),
    "big": pa.array([2.0**24, 2.0**24 + 2, None, 0.0], pa.float32()),
    "t": pa.array(TIMES, pa.timestamp("us", tz="UTC")),
    "s": pa.array(["", "a", "é", None]),
}
TEXTS = [
    "b = TRUE",
    "b < TRUE",
    "b != FALSE",
    "i1 > 126.5",
    "i1 = 0",
    "i1 IN (127, 300, -128.0)",
    "i1 IS NULL",
    "i8 = 9007199254740993",
    "i8 > 9007199254740992",
    "i8 > 9007199254740992.5",
    "i8 >= -9223372036854775808",
    "u8 = 18446744073709551615",
    "u8 >= 9223372036854775808 AND u8 < 18446744073709551615",
    "f4 = 0.1",
    "f4 >= 0.1",
    "f4 > 0.1",
    "f4 = 0",
    "f4 < 0",
    "f4 != 5",
    "f4 BETWEEN 0 AND 1",
    "f8 = 0.1",
    "f8 > 1.7976931348623157e308",
    "f8 <= 0.1",
    "f8 IN (0.1, 2)",
    "f8 IS NOT NULL",
    "big = 16777217",
    "big > 16777217",
    "big >= 16777216",
    "t < '1970-01-01'",
    "t >= DATE '2000-01-01'",
    "t = TIMESTAMP '2000-01-31 12:00:00Z'",
    "t = TIMESTAMP '2000-01-31 21:00:00.0000009'",
    "t BETWEEN '2000' AND '2000-01-31T12:00:00Z'",
    "t IN ('2000-01-01', '2000-01-31 21:00')",
    "s > 'a'",
    "s = ''",
    "s IN ('é', 'b')",
    "s IS NULL AND b = TRUE",
]


@pytest.mark.spark
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])
def test_rows_are_those_that_spark_keeps(spark: SparkSession, zone: str) -> None:
    table = pa.table({"n": pa.array(range(4)), **COLUMNS})
    frame = spark.createDataFrame(table)
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        found, wanted = {}, {}
        queries = {}
        for text in TEXTS:
            where = parse_where(text)
            found[text] = kept(table, where, zone_of(zone))["n"].to_pylist()
            queries[text] = where.sql
        rows = frame.selectExpr(
            "n", *(f"({sql}) AS q{i}" for i, sql in enumerate(queries.values()))
        )
        answers = sorted(rows.collect(), key=lambda row: row["n"])
        for i, text in enumerate(queries):
            wanted[text] = [row["n"] for row in answers if row[f"q{i}"]]
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert found == wanted


@pytest.mark.parametrize(
    ("text", "rows"),
    [("i1 < 1e21", [0, 1, 3]), ("i8 > -1e30", [0, 1, 2]), ("i1 = 300", []), ("f4 < 1e300", [0, 1])],
)
def test_null_is_not_less_than_what_no_value_reaches(text: str, rows: list[int]) -> None:
    """Spark 4.3 takes such comparisons for true, also for null."""
    table = pa.table({"n": pa.array(range(4)), **COLUMNS})
    assert kept(table, parse_where(text), UTC)["n"].to_pylist() == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing = 1", "no column 'nothing' .* there are: b, i1"),
        ("b = 1", "'b' has values of type bool, which cannot be compared with 1"),
        ("i1 = 'a'", "'i1' has values of type int8.* with 'a'"),
        ("t > 5", "type timestamp.* with 5"),
        ("t > 'noon'", "type timestamp.* with 'noon'"),
        ("s > 5", "type string.* with 5"),
        ("d > 5", "type duration"),
    ],
)
def test_what_cannot_be_compared_is_told_without_rows(text: str, message: str) -> None:
    table = pa.table({**COLUMNS, "d": pa.array([1] * 4, pa.duration("us"))}).slice(0, 0)
    with pytest.raises(InvalidArgumentError, match=message):
        kept(table, parse_where(text), UTC)


@pytest.mark.parametrize("name", ["UTC", "Z", "+08:00", "UTC-3", "GMT+5:30", "Europe/Berlin"])
def test_time_zones_have_sparks_names(name: str) -> None:
    assert datetime(2000, 1, 1, tzinfo=zone_of(name)).utcoffset() is not None


@pytest.mark.parametrize("name", ["Mars/Phobos", "", "+1:2:3"])
def test_unknown_time_zones_are_told(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is no time zone"):
        zone_of(name)
