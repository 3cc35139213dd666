"""Rows that a where keeps, against Spark's own filter."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
from pyspark.sql import SparkSession

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.spark.worker import partition_batches

STORED = {
    "b": np.array([True, False, True, True]),
    "i1": np.array([-128, 127, 1, 0], "i1"),
    "i8": np.array([2**53, 2**53 + 1, -(2**63), 0]),
    "u8": np.array([2**64 - 1, 0, 1, 2**63], "u8"),
    "f4": np.array([0.1, -0.0, math.nan, 5], "f4"),
    "f8": np.array([0.1, math.inf, -math.inf, math.nan]),
    "big": np.array([2.0**24, 2.0**24 + 2, math.nan, 0.0], "f4"),
    "t": np.array(
        ["1969-12-31T23:59:59.999999", "1999-12-31T16", "2000-01-31T12", "NaT"], "M8[ns]"
    ),
    "s": np.array(["", "a", "é", "b"], object),
}
TIMES = [
    datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
    datetime(1999, 12, 31, 16, tzinfo=UTC),
    datetime(2000, 1, 31, 12, tzinfo=UTC),
    None,
]
# The same for Spark, with NaN as it is.
COLUMNS = {
    "n": pa.array(range(4)),
    **{name: pa.array(STORED[name]) for name in ("b", "i1", "i8", "f4", "f8", "big", "s")},
    "u8": pa.array([Decimal(int(n)) for n in STORED["u8"]], pa.decimal128(20, 0)),
    "t": pa.array(TIMES, pa.timestamp("us", tz="UTC")),
}
TEXTS = [
    "b < TRUE",
    "i1 > 126.5",
    "i1 IN (127, 300, -128.0)",
    "i8 = 9007199254740993",
    "i8 > 9007199254740992.5",
    "i8 >= -9223372036854775808",
    "u8 = 18446744073709551615",
    "u8 >= 9223372036854775808 AND u8 < 18446744073709551615",
    "f4 = 0.1",
    "f4 = 0",
    "f4 != 5",
    "f4 BETWEEN 0 AND 1",
    "f8 > 1.7976931348623157e308",
    "f8 IN (0.1, 2)",
    "big = 16777217",
    "t < '1970-01-01'",
    "t = TIMESTAMP '2000-01-31 12:00:00Z'",
    "t = TIMESTAMP '2000-01-31 21:00:00.0000009'",
    "t BETWEEN '2000' AND '2000-01-31T12:00:00Z'",
    "t IN ('2000-01-01', '2000-01-31 21:00')",
    "s > 'a'",
    "s IN ('é', '')",
    "s = '' AND b = TRUE",
]


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    repo = zm.create(tmp_path / "repo")
    ds = xr.Dataset({name: ("n", values) for name, values in STORED.items()}, {"n": np.arange(4)})
    zm.write(ds, repo, message="all types")
    return repo


def planned(repo: Repository, text: str, zone: str = "UTC") -> Job:
    return plan_read(repo, ReadOptions(where=text, nan="keep"), SparkFacts(time_zone=zone))


def kept(job: Job) -> list[int]:
    batches = [each for task in range(job.tasks) for each in partition_batches(job, task)]
    return sorted(n for each in batches for n in each.column("n").to_pylist())


def test_rows_are_those_that_spark_keeps(spark: SparkSession, repo: Repository) -> None:
    frame = spark.createDataFrame(pa.table(COLUMNS))
    jobs = {text: planned(repo, text, "Asia/Tokyo") for text in TEXTS}
    queries = [f"({job.where.sql}) AS q{i}" for i, job in enumerate(jobs.values()) if job.where]
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        answers = frame.selectExpr("n", *queries).collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    wanted = {
        text: sorted(row["n"] for row in answers if row[f"q{i}"]) for i, text in enumerate(TEXTS)
    }
    assert {text: kept(job) for text, job in jobs.items()} == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing = 1", "no column 'nothing' .* there are: n, "),
        ("b = 1", "'b' cannot be in `b = 1`: its values are TRUE and FALSE"),
        ("t > 'noon'", "its values are times, and 'noon' is not a date"),
        ("s > 5", "its values are text"),
        ("f4 > 1 OR b = TRUE", "only be joined by AND"),
    ],
)
def test_what_cannot_be_compared_is_told(repo: Repository, text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"(?s){message}"):
        kept(planned(repo, text))
