"""The data source and its views, as a user of Spark sees them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyspark
import pytest
import xarray as xr
from pyspark import cloudpickle
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    Filter,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
)

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.repository import resolved
from zarr_manifests.spark import create_view, read, register

# Spark's processes cannot import this module; what they need of it travels by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

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


# --- the same as read ------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"variables": "b"},
        {"variables": "b,a", "ranges": '{"y": [2, 4], "time": ["2024-01-02", null]}'},
        {"nan": "drop"},
        {"target-rows": "7", "layout": "long", "nan": "keep"},
        {"variables": "a", "layout": "chunk"},
    ],
    ids=str,
)
def test_rows_and_schema_are_those_of_read(
    spark: SparkSession, repo: Repository, options: dict[str, str]
) -> None:
    arguments: dict[str, Any] = dict(options)
    if "ranges" in options:
        arguments["ranges"] = {"y": (2, 4), "time": ("2024-01-02", None)}
    if "variables" in options:
        arguments["variables"] = options["variables"].split(",")
    if "target-rows" in options:
        arguments["target_rows"] = int(arguments.pop("target-rows"))
    found = spark.read.format(FORMAT).options(**options).load(repo.storage.url)
    expected = read(spark, repo.storage.url, **arguments)
    assert found.schema == expected.schema
    assert [f.metadata for f in found.schema] == [f.metadata for f in expected.schema]
    assert rows(found) == rows(expected)
    assert found.count() == expected.count() > 0


@pytest.mark.spark
def test_only_the_chunks_of_the_named_variables_are_read(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = write(tmp_path / "repo", field())
    for key in set(made.readonly_session().chunk_refs("/b").locations):
        (tmp_path / "repo" / key).unlink()
    whole = load(spark, made, variables="a", nan="null").selectExpr("count(a) AS n").collect()
    assert whole[0].n == 199


@pytest.mark.spark
def test_a_read_without_cells_has_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    empty = write(tmp_path / "repo", field().isel(time=slice(0)).drop_encoding())
    frame = load(spark, empty)
    assert frame.columns == ["time", "y", "x", "a", "b"]
    assert frame.count() == 0


# --- one snapshot ----------------------------------------------------------------------------


@pytest.mark.spark
def test_a_frame_stays_at_its_snapshot_while_others_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = write(tmp_path / "repo", field())
    frame = load(spark, made)
    at = made.storage.url
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW pinned USING {FORMAT} OPTIONS (path '{at}')")
    create_view(spark, "pinned_too", made.storage.url)
    before = rows(frame)
    write(tmp_path / "repo", field(1000.0), mode="w")
    made.compact()
    assert rows(frame) == before
    assert rows(spark.table("pinned")) == rows(spark.table("pinned_too")) == before
    assert rows(load(spark, made)) == rows(read(spark, made.storage.url)) != before


@pytest.mark.spark
def test_a_version_is_chosen_by_options(spark: SparkSession, tmp_path: Path) -> None:
    made = write(tmp_path / "repo", field())
    first = made.list_branches()["main"]
    made.create_tag("v1")
    made.create_branch("dev")
    write(tmp_path / "repo", field(1000.0), mode="w")
    old, new = rows(load(spark, made, version="v1")), rows(load(spark, made))
    assert old != new
    assert rows(load(spark, made, version=first)) == old
    assert rows(load(spark, made, branch="dev")) == old
    assert rows(load(spark, made, branch="main")) == new
    assert resolved(made, "main~1") == first
    for version in ("main~1", "v1", "dev", first, first.split("-")[1][:8]):
        assert rows(load(spark, made, version=version)) == old
    assert rows(read(spark, made.storage.url, version="main~1")) == old
    assert rows(load(spark, made, version="HEAD")) == new


# --- no relation changes another's result ----------------------------------------------------


@pytest.mark.spark
def test_a_filter_of_one_query_does_not_reach_another(
    spark: SparkSession, repo: Repository
) -> None:
    frame = load(spark, repo, variables="a", nan="null")
    assert frame.where("x >= 90").count() == 20
    assert frame.count() == 200
    assert frame.where("x >= 90").union(frame.where("x < 20")).count() == 60
    assert frame.where("a > 100").count() == 99
    assert frame.count() == 200


@pytest.mark.spark
def test_relations_with_other_options_are_apart(spark: SparkSession, repo: Repository) -> None:
    whole, part = load(spark, repo), load(spark, repo, ranges='{"x": [90, null]}')
    assert (part.count(), whole.count(), part.count()) == (20, 200, 20)
    assert whole.union(part).count() == 220
    assert load(spark, repo, variables="a").join(part, ["time", "y", "x"]).count() == 20


@pytest.mark.spark
def test_a_cached_frame_and_a_self_join_are_whole(spark: SparkSession, repo: Repository) -> None:
    frame = load(spark, repo, variables="a")
    cached = frame.where("y < 2").cache()
    try:
        assert (cached.count(), frame.count(), cached.where("x = 0").count()) == (40, 200, 4)
    finally:
        cached.unpersist()
    left, right = frame.alias("l"), frame.where("x >= 90").alias("r")
    joined = left.join(right, ["time", "y"])
    assert joined.count() == 10 * 20
    assert frame.join(frame, ["time", "y", "x"]).count() == 200


@pytest.mark.spark
def test_threads_do_not_disturb_each_other(spark: SparkSession, repo: Repository) -> None:
    frame = load(spark, repo, variables="a")

    def count(lower: int) -> int:
        return frame.where(f"x >= {lower}").count()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(count, [90, 60, 0, 30] * 2))
    assert found == [20, 80, 200, 140] * 2


@pytest.mark.spark
@pytest.mark.parametrize(
    "where",
    [
        "a > 100",
        "x BETWEEN 20 AND 40 AND y != 3 AND b < -7.5",
        "time = '2024-01-02 00:00:00' AND a IS NOT NULL",
        "a IS NULL",
        "x IN (0, 90, 1000)",
        "a > 1e6",
    ],
)
def test_rows_of_a_where_are_those_of_sparks_filter(
    spark: SparkSession, repo: Repository, where: str
) -> None:
    whole = load(spark, repo)
    part = load(spark, repo, where=where)
    assert rows(part) == rows(whole.where(where))
    assert part.count() == whole.where(where).count()
    # The option belongs to its relation, and to no other.
    assert whole.count() == 200


@pytest.mark.spark
def test_times_of_a_where_are_in_the_zone_at_register(
    spark: SparkSession, repo: Repository
) -> None:
    where = "time >= '2024-01-01 12:00:00'"
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        register(spark)
        # In New York, that is 17:00 UTC of the same day; 20:00 there is the next day in UTC.
        assert load(spark, repo, where=where).count() == 100
        late = "time > '2024-01-01 20:00:00'"
        assert load(spark, repo, where=late).count() == load(spark, repo).where(late).count() == 0
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        register(spark)


@pytest.mark.spark
def test_a_where_that_cannot_be_read_shows_the_grammar(
    spark: SparkSession, repo: Repository
) -> None:
    with pytest.raises(AnalysisException, match="column BETWEEN literal AND literal"):
        load(spark, repo, where="a > 1 OR b < 2")


class PushingReader(DataSourceReader):
    """Reads the numbers below 100, without those that the pushed filters exclude."""

    def __init__(self) -> None:
        self.low, self.high = 0, 100

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        for each in filters:
            match each:
                case GreaterThanOrEqual(("x",), low):
                    self.low = max(self.low, low)
                case LessThan(("x",), high):
                    self.high = min(self.high, high)
                case _:
                    yield each

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return ((x,) for x in range(self.low, self.high))


class PushingSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "pushing"

    def schema(self) -> str:
        return "x int"

    def reader(self, schema: Any) -> DataSourceReader:
        return PushingReader()


@pytest.mark.spark
def test_pushed_filters_leak_into_other_queries_of_this_pyspark(spark: SparkSession) -> None:
    """Why the data source has no `pushFilters`; where this fails, it could have."""
    spark.dataSource.register(PushingSource)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = spark.read.format("pushing").load()
        assert frame.where("x >= 90").count() == 10
        leaked = frame.count()
        both = spark.read.format("pushing").load()
        united = both.where("x >= 90").union(both.where("x < 20")).count()
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    assert (leaked, united) != (100, 30), (
        f"PySpark {pyspark.__version__} plans each query by itself: filters can be pushed down, "
        "see docs/adr/0035"
    )


# --- errors and SQL --------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"brnach": "main"}, "option 'brnach' is unknown: did you mean branch?"),
        ({"version": "second"}, "there is no branch 'second'"),
        ({"variables": "c"}, "there is no variable 'c' in group /; there are: a, b"),
        ({"group": "/none"}, "there is no group /none in this snapshot; there are: /"),
        ({"nan": "zero"}, "option 'nan' cannot be 'zero': expected null, keep or drop"),
    ],
    ids=str,
)
def test_errors_say_what_to_do(
    spark: SparkSession, repo: Repository, options: dict[str, str], advice: str
) -> None:
    with pytest.raises(AnalysisException) as raised:
        spark.read.format(FORMAT).options(**options).load(repo.storage.url)
    said = str(raised.value)
    assert advice in said
    assert len(said.splitlines()) < 10, "the advice is buried in the traceback"


@pytest.mark.spark
def test_an_error_while_reading_says_what_to_do(spark: SparkSession, tmp_path: Path) -> None:
    made = write(tmp_path / "repo", field())
    frame = load(spark, made, variables="a")
    for key in set(made.readonly_session().chunk_refs("/a").locations):
        (tmp_path / "repo" / key).unlink()
    with pytest.raises(Exception, match="MissingChunkError"):
        frame.selectExpr("sum(a)").collect()


@pytest.mark.spark
def test_a_location_is_needed_and_repeats_no_secret(spark: SparkSession, repo: Repository) -> None:
    assert repo
    with pytest.raises(AnalysisException, match="there is no location"):
        spark.read.format(FORMAT).load()
    with pytest.raises(AnalysisException) as raised:
        spark.read.format(FORMAT).load("s3://AKIA:hunter2@bucket/prefix")
    assert "hunter2" not in str(raised.value)
    with pytest.raises(AnalysisException, match="NotARepositoryError"):
        spark.read.format(FORMAT).load("/nowhere/at/all")


@pytest.mark.spark
def test_a_given_schema_is_refused(spark: SparkSession, repo: Repository) -> None:
    """Spark would pin the snapshot at the first query, not when the frame is made."""
    own = load(spark, repo).schema
    for schema in ("a double", own):
        given = spark.read.format(FORMAT).schema(schema).load(repo.storage.url)
        with pytest.raises(AnalysisException, match="choose columns by the option variables"):
            given.collect()


@pytest.mark.spark
def test_views_answer_sql(spark: SparkSession, repo: Repository) -> None:
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW v USING {FORMAT} "
        f"OPTIONS (path '{repo.storage.url}', variables 'a', version 'first', `target-rows` '50')"
    )
    create_view(spark, "w", repo.storage.url, variables=["a"], version="first")
    query = "SELECT y, round(avg(a), 3) AS a, count(*) AS n FROM {} WHERE x < 50 GROUP BY y"
    found = rows(spark.sql(query.format("v")))
    assert found == rows(spark.sql(query.format("w")))
    assert len(found) == 10
    assert spark.sql("SELECT count(*) FROM v JOIN w USING (time, y, x)").collect()[0][0] == 200


@pytest.mark.spark
def test_the_case_of_names_and_the_time_zone_are_the_sessions(
    spark: SparkSession, tmp_path: Path
) -> None:
    ds = field().rename(a="v", b="V")
    made = write(tmp_path / "repo", ds)
    register(spark)
    with pytest.raises(AnalysisException, match=r"set spark\.sql\.caseSensitive to true"):
        load(spark, made)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        register(spark)
        assert load(spark, made).columns[3:] == ["V", "v"]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
        register(spark)
