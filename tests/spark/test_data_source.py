"""The data source and its views, as a user of Spark sees them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.spark import read, register

FORMAT = "zarr_manifests"


def field(offset: float = 0.0) -> xr.Dataset:
    values = np.arange(200.0).reshape(2, 10, 10) + offset
    values[0, 0, 0] = np.nan
    times = np.array(["2024-01-01", "2024-01-02"], "M8[ns]")
    return xr.Dataset(
        {
            "a": (("time", "y", "x"), values, {"units": "K"}),
            "b": (("time", "y", "x"), (-values).astype("f4")),
        },
        {"time": times, "y": np.arange(10), "x": np.arange(0, 100, 10)},
    )


def write(place: Path, ds: xr.Dataset, **options: Any) -> Repository:
    zm.open(place, {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}, create=True)
    chunks = {name: {"chunks": (1, 5, 5)} for name in ds.data_vars}
    zm.write(ds, str(place), message="write", encoding=chunks, **options)
    return zm.open(place)


@pytest.fixture(scope="module", autouse=True)
def _registered(spark: SparkSession) -> None:
    register(spark)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    made = write(tmp_path_factory.mktemp("source") / "repo", field())
    made.create_tag("first")
    return made


def load(spark: SparkSession, repo: Repository, **options: Any) -> DataFrame:
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return spark.read.format(FORMAT).options(**named).load(repo.storage.url)


def rows(frame: DataFrame) -> list[str]:
    """The rows as text, in which NaN equals NaN and is apart from null."""
    return sorted(repr(tuple(row)) for row in frame.collect())


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {}),
        (
            {"variables": "b,a", "where": "y BETWEEN 2 AND 4 AND time >= '2024-01-02'"},
            {"variables": ["b", "a"], "where": {"y": (2, 4), "time": ("2024-01-02", None)}},
        ),
        ({"variables": "a", "layout": "chunk"}, {"variables": ["a"], "layout": "chunk"}),
    ],
    ids=["all", "some", "chunks"],
)
def test_rows_and_schema_are_those_of_read(
    spark: SparkSession, repo: Repository, options: dict[str, str], arguments: dict[str, Any]
) -> None:
    found = load(spark, repo, **options)
    expected = read(spark, repo.storage.url, **arguments)
    assert found.schema == expected.schema
    assert [f.metadata for f in found.schema] == [f.metadata for f in expected.schema]
    assert rows(found) == rows(expected)
    assert found.count() == expected.count() > 0


def test_a_frame_stays_at_its_snapshot_while_others_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = write(tmp_path / "repo", field())
    frame = load(spark, made)
    at = made.storage.url
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW pinned USING {FORMAT} OPTIONS (path '{at}')")
    read(spark, made.storage.url).createOrReplaceTempView("pinned_too")
    before = rows(frame)
    write(tmp_path / "repo", field(1000.0), mode="w")
    made.compact()
    assert rows(frame) == before
    assert rows(spark.table("pinned")) == rows(spark.table("pinned_too")) == before
    assert rows(load(spark, made)) == rows(read(spark, made.storage.url)) != before


def test_a_version_is_chosen_by_options(spark: SparkSession, tmp_path: Path) -> None:
    made = write(tmp_path / "repo", field())
    first = made.list_branches()["main"]
    made.create_tag("v1")
    made.create_branch("dev")
    write(tmp_path / "repo", field(1000.0), mode="w")
    old, new = rows(load(spark, made, branch="dev")), rows(load(spark, made))
    assert old != new
    assert rows(load(spark, made, branch="main")) == rows(load(spark, made, version="HEAD")) == new
    for version in ("main~1", "v1", first):
        assert rows(load(spark, made, version=version)) == old
    assert rows(read(spark, made.storage.url, version="main~1")) == old


def test_no_query_changes_the_rows_of_another(spark: SparkSession, repo: Repository) -> None:
    whole, part = load(spark, repo, variables="a"), load(spark, repo, where="x >= 90")
    assert whole.where("x >= 90").count() == part.count() == 20
    assert whole.count() == 200
    assert whole.where("x >= 90").union(whole.where("x < 20")).count() == 60
    assert whole.join(part, ["time", "y", "x"]).count() == 20
    cached = whole.where("y < 2").cache()
    try:
        assert (cached.count(), whole.count(), cached.where("x = 0").count()) == (40, 200, 4)
    finally:
        cached.unpersist()
    joined = whole.alias("l").join(whole.where("x >= 90").alias("r"), ["time", "y"])
    assert joined.count() == 10 * 20
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda x: whole.where(f"x >= {x}").count(), [90, 60, 0]))
    assert found == [20, 80, 200]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"brnach": "main"}, "option 'brnach' is unknown: did you mean branch?"),
        ({"variables": "c"}, "there is no variable 'c' in group /; there are: a, b"),
        ({"where": "a > 1 OR b < 2"}, "column BETWEEN literal AND literal"),
    ],
    ids=["option", "variable", "where"],
)
def test_errors_say_what_to_do(
    spark: SparkSession, repo: Repository, options: dict[str, str], advice: str
) -> None:
    with pytest.raises(AnalysisException) as raised:
        spark.read.format(FORMAT).options(**options).load(repo.storage.url)
    assert advice in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_a_location_is_needed_and_repeats_no_secret(spark: SparkSession, repo: Repository) -> None:
    assert repo
    with pytest.raises(AnalysisException, match="there is no location"):
        spark.read.format(FORMAT).load()
    with pytest.raises(AnalysisException) as raised:
        spark.read.format(FORMAT).load("s3://AKIA:hunter2@bucket/prefix")
    assert "hunter2" not in str(raised.value)
    with pytest.raises(AnalysisException, match="NotARepositoryError"):
        spark.read.format(FORMAT).load("/nowhere/at/all")


@pytest.mark.smoke
def test_views_answer_sql(spark: SparkSession, repo: Repository) -> None:
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW v USING {FORMAT} "
        f"OPTIONS (path '{repo.storage.url}', variables 'a', version 'first', `target-rows` '50')"
    )
    read(spark, repo.storage.url, "a", version="first").createOrReplaceTempView("w")
    query = "SELECT y, round(avg(a), 3) AS a, count(*) AS n FROM {} WHERE x < 50 GROUP BY y"
    found = rows(spark.sql(query.format("v")))
    assert found == rows(spark.sql(query.format("w")))
    assert len(found) == 10
    assert spark.sql("SELECT count(*) FROM v JOIN w USING (time, y, x)").collect()[0][0] == 200
