"""Writing through the data source: `df.write`, `INSERT INTO`, and the sink of a stream."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import zarr_manifests as zm
from grids import found, hours, made
from zarr_manifests import Repository
from zarr_manifests.error_cases import FencedError
from zarr_manifests.spark import register
from zarr_manifests.spark.data_sink import Sink
from zarr_manifests.spark.plan import SparkFacts

pytestmark = pytest.mark.spark


def rows(spark: SparkSession, ds: xr.Dataset, parts: int = 3) -> DataFrame:
    """Its cells in no order."""
    frame = ds.to_dataframe().reset_index().sample(frac=1, random_state=1)
    return spark.createDataFrame(frame).repartition(parts)


def options(**given: Any) -> dict[str, str]:
    own = {"dims": "time,lat,lon", "append-dim": "time"}
    return own | {name.replace("_", "-"): str(value) for name, value in given.items()}


def append(frame: DataFrame, repo: Repository, mode: str = "append", **given: Any) -> None:
    frame.write.format("zarr_manifests").mode(mode).options(**options(**given)).save(
        repo.storage.url
    )


@pytest.fixture
def repo(tmp_path: Path, spark: SparkSession) -> Repository:
    register(spark)
    return made(tmp_path / "repo")


def messages(repo: Repository) -> list[str]:
    return [info.message for info in repo.ancestry()]


def test_rows_of_new_labels_are_appended_in_one_commit(
    repo: Repository, spark: SparkSession
) -> None:
    append(rows(spark, hours(11, 4)), repo, message="seven hours")
    assert messages(repo)[:2] == ["seven hours", "first hours"]
    xr.testing.assert_equal(found(repo), hours(11))
    chosen = repo.readonly_session().chunks_where("u", "u > 130")
    assert 0 < len(chosen.boxes) < 8


def test_memory_that_is_too_small_for_the_cells_changes_nothing(
    repo: Repository, spark: SparkSession
) -> None:
    given = options() | {"write.buffer-bytes": "400"}
    frame = rows(spark, hours(40, 4))
    frame.write.format("zarr_manifests").mode("append").options(**given).save(repo.storage.url)
    xr.testing.assert_equal(found(repo), hours(40))


def test_rows_are_inserted_into_a_view(repo: Repository, spark: SparkSession) -> None:
    spark.sql(f"""
        CREATE OR REPLACE TEMPORARY VIEW winds USING zarr_manifests
        OPTIONS (path '{repo.storage.url}', dims 'time,lat,lon', 'append-dim' 'time',
                 message 'from SQL')
    """)
    assert spark.table("winds").count() == 4 * 12
    rows(spark, hours(6, 4)).createOrReplaceTempView("news")
    spark.sql("INSERT INTO winds SELECT time, lat, lon, u, v FROM news")
    assert messages(repo)[0] == "from SQL"
    xr.testing.assert_equal(found(repo), hours(6))


def test_an_overwrite_leaves_only_the_rows_in_the_region(
    repo: Repository, spark: SparkSession
) -> None:
    twice = hours(4) * 2
    append(rows(spark, twice), repo, "overwrite")
    xr.testing.assert_equal(found(repo), twice)
    given = {"region": '{"time": ["2024-01-01T01:00", "2024-01-01T02:00"]}'}
    append(rows(spark, hours(2, 1)), repo, "overwrite", **given)
    due = twice.copy(deep=True)
    for name in ("u", "v"):
        due[name][1] = hours(4)[name][1]
        due[name][2] = np.nan
    xr.testing.assert_equal(found(repo), due)


def test_a_region_is_in_the_zone_at_register(repo: Repository, spark: SparkSession) -> None:
    frame = rows(spark, hours(2, 1) * 2)
    given = {"region": '{"time": ["2024-01-01T10:00", "2024-01-01T11:00"]}'}
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        register(spark)
        append(frame, repo, "overwrite", **given)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        register(spark)
    due = hours(4).copy(deep=True)
    for name in ("u", "v"):
        due[name][1] *= 2
        due[name][2] = np.nan
    xr.testing.assert_equal(found(repo), due)


def test_columns_are_found_in_any_case(repo: Repository, spark: SparkSession) -> None:
    frame = rows(spark, hours(6, 4))
    append(frame.toDF(*(name.upper() for name in frame.columns)), repo)
    xr.testing.assert_equal(found(repo), hours(6))


def test_late_rows_join_those_that_are_there(repo: Repository, spark: SparkSession) -> None:
    whole = hours(8)
    west, east = whole.isel(lon=[0, 1]), whole.isel(lon=[2, 3])
    append(rows(spark, west.isel(time=slice(4, 8))), repo, missing="keep")
    assert np.isnan(found(repo).u[4:, :, 2:]).all()
    append(rows(spark, east.isel(time=slice(4, 8))), repo, missing="keep")
    xr.testing.assert_equal(found(repo), whole)


def test_a_transaction_lands_once(repo: Repository, spark: SparkSession) -> None:
    for _ in range(2):
        append(rows(spark, hours(6, 4)), repo, txn_app_id="daily", txn_version=3)
    assert repo.txn_versions() == {"daily": 3}
    xr.testing.assert_equal(found(repo), hours(6))
    nothing = rows(spark, hours(6, 4)).limit(0)
    append(nothing, repo, txn_app_id="daily", txn_version=4)
    assert repo.txn_versions() == {"daily": 4}
    count = len(messages(repo))
    append(nothing, repo)
    assert len(messages(repo)) == count


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dims": "time,lat"}, "has the dimensions"),
        ({"dims": ""}, "option 'dims'"),
        ({"append_dim": "lot"}, "needs append_dim, one of"),
        ({"apend_dim": "time"}, "did you mean append-dim"),
        ({"version": "v1"}, "a write does not take version"),
        ({"txn_app_id": "a"}, "go together"),
        ({"txn_version": "-1", "txn_app_id": "a"}, "expected a whole number"),
        ({"branch": "dev"}, "dev"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_asked_for_is_said(
    given: dict[str, str], said: str, repo: Repository, spark: SparkSession
) -> None:
    with pytest.raises(PySparkException, match=said):
        append(rows(spark, hours(6, 4)), repo, **given)
    assert messages(repo)[0] == "first hours"


def test_wrong_rows_are_refused_with_examples(repo: Repository, spark: SparkSession) -> None:
    frame = rows(spark, hours(6, 4))
    with pytest.raises(PySparkException, match=r"no cell in the grid.*lat=45\.5"):
        append(frame.replace(45.0, 45.5, ["lat"]), repo)
    with pytest.raises(PySparkException, match="column 'time' has no time zone"):
        append(frame.withColumn("time", frame.time.cast("timestamp_ntz")), repo)
    with pytest.raises(PySparkException, match="two rows are of the cell"):
        append(frame.union(frame), repo)
    with pytest.raises(PySparkException, match="there already"):
        append(rows(spark, hours(6, 3)), repo)
    assert messages(repo)[0] == "first hours"
    repo.garbage_collect(timedelta(0))
    report = repo.verify()
    assert report.ok
    assert len(list(repo.storage.list("chunks/"))) == report.chunk_objects


def test_rows_that_a_collection_has_removed_are_an_error_and_no_holes(
    repo: Repository, spark: SparkSession
) -> None:
    """A collection whose grace is shorter than the write."""
    frame = rows(spark, hours(40, 4))
    sink = Sink.of(
        options() | {"path": repo.storage.url}, frame.schema, overwrite=False, facts=SparkFacts()
    )
    spooled = [pickle.loads(pickle.dumps(sink.spool(batches(frame))))]
    repo.garbage_collect(timedelta(0))
    with pytest.raises(FencedError, match="did not commit in time"):
        sink.commit(spooled, None)
    assert messages(repo)[0] == "first hours"
    assert sink.commit([sink.spool(batches(frame))], None).cells == 36 * 12
    xr.testing.assert_equal(found(repo), hours(40))


def batches(frame: DataFrame) -> Any:
    return iter(frame.toArrow().to_batches(max_chunksize=50))


def test_a_write_is_planned_again_where_others_have_appended(
    repo: Repository, spark: SparkSession
) -> None:
    frame = rows(spark, hours(8, 6))
    sink = Sink.of(
        options() | {"path": repo.storage.url}, frame.schema, overwrite=False, facts=SparkFacts()
    )
    spooled = [sink.spool(batches(frame))]
    zm.write(hours(6, 4), repo, append_dim="time", message="came first")
    sink.commit(spooled, None)
    xr.testing.assert_equal(found(repo), hours(8))
