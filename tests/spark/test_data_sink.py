"""Writing through the data source: `df.write` and `INSERT INTO`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from grids import found, hours, made
from zarr_manifests import Repository
from zarr_manifests.spark import register


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
        ({"apend_dim": "time"}, "did you mean append-dim"),
        ({"version": "v1"}, "a write does not take version"),
        ({"txn_app_id": "a"}, "go together"),
    ],
    ids=["dims", "unknown", "of reads", "half"],
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
