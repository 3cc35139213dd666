"""`write_dataframe` on Spark: what is seen of it there; `test_cells` tries what rows may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import zarr_manifests as zm
from overtaken import OvertakenStorage
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
    NotARepositoryError,
    UnsupportedStorageError,
)
from zarr_manifests.spark import read, write_dataframe
from zarr_manifests.spark.dataframes import WriteReport
from zarr_manifests.storage.local import LocalStorage

DIMS = ["time", "lat", "lon"]


def winds(first: str = "2024-01") -> xr.Dataset:
    times = (np.datetime64(first, "M") + np.arange(6)).astype("M8[ns]")
    values = np.arange(6 * 5 * 8, dtype="f4").reshape(6, 5, 8)
    coords = {"time": times, "lat": np.linspace(60, -60, 5), "lon": np.arange(8) * 10.0}
    return xr.Dataset({"u": (DIMS, values), "v": (DIMS, -values)}, coords)


@pytest.fixture
def url(tmp_path: Path) -> str:
    chunks = {"chunks": (4, 3, 4)}
    zm.write(winds(), tmp_path / "r", message="half a year", encoding={"u": chunks, "v": chunks})
    return str(tmp_path / "r")


def opened(url: str, group: str | None = None) -> xr.Dataset:
    return xr.open_dataset(url, engine="zarr_manifests", group=group).load()


def later(spark: SparkSession, url: str) -> DataFrame:
    """Half a year after the first, in random order."""
    rows = read(spark, url, where={"time": ("2024-01", "2024-06")})
    return rows.withColumn("time", f.add_months("time", 6).cast("timestamp")).orderBy(f.rand(3))


@pytest.mark.smoke
def test_rows_come_back(spark: SparkSession, url: str) -> None:
    """Two variables are appended, then written over in part, in one commit each."""
    report = write_dataframe(later(spark, url), url, "/", dims=DIMS, append_dim="time")
    year = xr.concat([winds(), winds("2024-07")], "time")
    xr.testing.assert_equal(opened(url), year)
    assert (report.cells, report.tasks, report.replayed) == (240, 2, False)
    repo = zm.open(url)
    newest = next(iter(repo.ancestry()))
    assert newest.snapshot_id == report.snapshot_id
    assert newest.message == "append rows to /"
    assert report.chunks == newest.written["refs-set"]
    assert report.bytes == newest.written["chunk-bytes"] > 0
    assert str(report).startswith("240 cells in ")

    some = read(spark, url, "u").where("lat > 0 AND time >= '2024-05-01' AND time < '2024-08-01'")
    changed = some.withColumn("u", f.col("u") + 1000)
    how = {"dims": DIMS, "mode": "overwrite-region", "message": "correct"}
    write_dataframe(changed, repo, "u", **how, metadata={"why": "calibration"})
    year["u"][4:7, :2] += 1000
    xr.testing.assert_equal(opened(url), year)
    assert next(iter(repo.ancestry())).metadata == {"why": "calibration"}
    assert sum(1 for _ in repo.ancestry()) == 4  # and the one that made it


def test_an_aggregate_becomes_a_variable(spark: SparkSession, url: str) -> None:
    mean = read(spark, url, "u").groupBy("lat", "lon").agg(f.avg("u").alias("mean"))
    write_dataframe(mean, url, "mean", dims=["lat", "lon"], mode="create")
    np.testing.assert_allclose(opened(url)["mean"], winds().u.mean("time"))


def test_no_rows_write_nothing(spark: SparkSession, url: str) -> None:
    none = later(spark, url).where("lat > 90")
    for how in ({"append_dim": "time"}, {"mode": "overwrite-region"}):
        report = write_dataframe(none, url, "/", dims=DIMS, **how)  # type: ignore[arg-type]
        assert report == WriteReport(snapshot_id=None)
        assert str(report) == "nothing written"
    xr.testing.assert_equal(opened(url), winds())


def test_a_step_is_written_once(spark: SparkSession, url: str) -> None:
    how = {"dims": DIMS, "append_dim": "time", "txn_app_id": "daily", "txn_version": 7}
    rows = later(spark, url)
    first = write_dataframe(rows, url, "/", **how)
    again = write_dataframe(rows, url, "/", **how)
    assert again == WriteReport(snapshot_id=first.snapshot_id, replayed=True)
    assert str(again) == f"nothing written: the transaction is in {first.snapshot_id}"
    assert zm.open(url).txn_versions() == {"daily": 7}
    assert opened(url).sizes["time"] == 12
    empty = rows.where("lat > 90")
    assert write_dataframe(empty, url, "/", **how | {"txn_version": 8}).snapshot_id is not None
    assert zm.open(url).txn_versions() == {"daily": 8}
    with pytest.raises(InvalidArgumentError, match="go together"):
        write_dataframe(rows, url, "/", dims=DIMS, append_dim="time", txn_version=1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda df: df.withColumn("lat", f.col("lat") + 1), "no cell in the grid.*lat=61"),
        (lambda df: df.withColumn("lon", f.lit(None).cast("double")), "lon=None"),
    ],
)
def test_wrong_rows_are_told_once(
    spark: SparkSession,
    url: str,
    capfd: pytest.CaptureFixture[str],
    change: Callable[[DataFrame], DataFrame],
    what: str,
) -> None:
    """As an error of the package, with nothing of Spark's around it; tasks are not repeated."""
    with pytest.raises(InvalidArgumentError, match=what) as found:
        write_dataframe(change(later(spark, url)), url, "/", dims=DIMS, append_dim="time")
    assert len(str(found.value).splitlines()) == 1
    assert "Traceback" not in capfd.readouterr().err
    xr.testing.assert_equal(opened(url), winds())


def test_an_append_that_was_overtaken_goes_behind(spark: SparkSession, url: str) -> None:
    """It is planned anew; and refused where others have appended the same labels."""
    how: Any = {"dims": DIMS, "append_dim": "time"}
    first = winds("2024-07").isel(time=[0, 1])
    rows = later(spark, url).where("time >= '2024-09-01'")
    write_dataframe(rows, overtaken(url, first, append_dim="time"), "/", **how)
    xr.testing.assert_equal(opened(url), xr.concat([winds(), winds("2024-07")], "time"))
    rows = later(spark, url).withColumn("time", f.add_months("time", 6).cast("timestamp"))
    with pytest.raises(AlreadyExistsError, match="there already"):
        write_dataframe(rows, overtaken(url, winds("2025-01"), append_dim="time"), "/", **how)


def test_a_first_time_has_room_for_others(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Days after the first would not fit an hour on, and each would have a chunk of its own."""
    rows, place = read(spark, url, where={"time": "2024-01"}), str(tmp_path / "new")
    how: dict[str, Any] = {"mode": "create"}
    for hour in range(3):
        at = f.col("time") + f.expr(f"INTERVAL {hour} HOURS 15 MINUTES")
        write_dataframe(rows.withColumn("time", at), place, "/", dims=DIMS, **how)
        how = {"append_dim": "time"}
    found = opened(place)
    assert [str(time)[11:16] for time in found.time.values] == ["00:15", "01:15", "02:15"]
    assert zm.open(place).du()["time"].chunks == 1


def test_a_region_that_others_changed_is_a_conflict(spark: SparkSession, url: str) -> None:
    storage = overtaken(url, winds() * 2, mode="a")
    with pytest.raises(ConflictError):
        write_dataframe(read(spark, url, "u"), storage, "u", dims=DIMS, mode="overwrite-region")
    xr.testing.assert_equal(opened(url), winds() * 2)


def overtaken(url: str, ds: xr.Dataset, **how: Any) -> OvertakenStorage:
    """The storage under which others write a dataset before the next commit."""
    return OvertakenStorage(LocalStorage(url), lambda: zm.write(ds, url, message="first", **how))


def test_dates_and_times_without_zone_are_refused(spark: SparkSession, url: str) -> None:
    rows = read(spark, url, "u")
    for kind in ("date", "timestamp_ntz"):
        cast = rows.withColumn("time", f.col("time").cast(kind))
        with pytest.raises(InvalidArgumentError, match="'time' has no time zone"):
            write_dataframe(cast, url, "u", dims=DIMS, mode="overwrite-region")


def test_a_region_is_of_the_sessions_zone(spark: SparkSession, url: str) -> None:
    changed = read(spark, url, ["u", "v"], where={"time": ("2024-02", "2024-02")})
    changed = changed.withColumn("u", f.col("u") + 1000)
    how = {"dims": DIMS, "mode": "overwrite-region", "missing": "error"}
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:  # the first of February in UTC is the evening before there
        with pytest.raises(InvalidArgumentError, match="outside the region"):
            write_dataframe(changed, url, "/", **how, region={"time": ("2024-02-01", "2024-03")})
        write_dataframe(changed, url, "/", **how, region={"time": ("2024-01-31", "2024-01-31")})
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    expected = winds()
    expected["u"][1] += 1000
    xr.testing.assert_equal(opened(url), expected)


def test_a_first_write_makes_the_repository(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Where rows are wrong, it stays empty."""
    rows, place = read(spark, url), tmp_path / "new"
    for wrong in ({"append_dim": "time"}, {"mode": "overwrite-region"}):
        with pytest.raises(NotARepositoryError):
            write_dataframe(rows, place, "/", dims=DIMS, **wrong)  # type: ignore[arg-type]
    how: Any = {"dims": DIMS, "mode": "create"}
    with pytest.raises(InvalidArgumentError, match="two rows are of the cell"):
        write_dataframe(rows.union(rows), place, "/", **how)
    assert len([*zm.open(place).ancestry()]) == 1
    report = write_dataframe(rows, str(place), "/", **how, message="from rows")
    repo = zm.open(place)
    assert next(info.message for info in repo.ancestry()) == "from rows"
    assert repo.list_branches() == {"main": report.snapshot_id}
    xr.testing.assert_equal(opened(str(place)), winds().sortby("lat"))  # labels ascend
    assert repo.verify().ok
    here = zm.create("memory://write-dataframe")
    for unshared in (here, "memory://write-dataframe-new"):
        with pytest.raises(UnsupportedStorageError, match="memory of this process"):
            write_dataframe(rows, unshared, "/", **how)
