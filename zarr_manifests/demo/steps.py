"""The demo, step by step; `zarr-manifests demo` runs the steps and prints what they return.

Each step checks its claims: both snapshots are compared with the sample value by value, and Spark's
means with xarray's. A difference raises `CheckFailedError` and ends the demo. Every figure is
measured at the storage while the step runs.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from zarr_manifests import repositories
from zarr_manifests.demo.costs import Commit, Cost, Rewrite, measure
from zarr_manifests.demo.place import DemoPlace
from zarr_manifests.demo.sample import open_winds
from zarr_manifests.errors import ManifestsError
from zarr_manifests.repository import Repository
from zarr_manifests.runtime import SYSTEM

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    import pandas as pd
    import xarray as xr
    from pyspark.sql import SparkSession

    from zarr_manifests.spark.write_dataframe import WriteReport

__all__ = [
    "APPENDS",
    "FIRST_TAG",
    "CheckFailedError",
    "Demo",
    "Opened",
    "SparkMeans",
    "Streamed",
    "StrongWinds",
    "compare_means",
]

FIRST_MONTHS: Final = 72
APPENDS: Final = 60
FIRST_TAG: Final = "first-years"
_REWRITE_EVERY: Final = 6
_AGREE_RTOL: Final = 1e-9
_STREAMED: Final = 2
"""Months that come in before the restart of the stream, and after it."""
_STRONG: Final = 15.0
"""Speed of strong winds, in m s-1."""


class CheckFailedError(ManifestsError):
    """Something that the demo read or computed is wrong."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A snapshot read with xarray by a process without any cached data.

    Parameters
    ----------
    months : int
        Months in it.
    opening : Cost
        The cost of opening the repository and the dataset, with all coordinates.
    one_month : Cost
        The cost of then reading `u` and `v` of its last month.
    the_rest : Cost
        The cost of reading all other months.
    """

    months: int
    opening: Cost
    one_month: Cost
    the_rest: Cost


@dataclass(frozen=True, slots=True)
class SparkMeans:
    """Monthly mean wind speeds, as Spark computed them.

    Parameters
    ----------
    rows : int
        Cells that were read.
    tasks : int
        Tasks that read them.
    means : float64[n]
        Mean speed of each month over the globe, weighted by area, in m s-1.
    difference : float
        Largest difference from what xarray computes, in m s-1.
    seconds : float
        How long it took, including Spark's start.
    strong : StrongWinds
        What a second read with a `where` gave.
    """

    rows: int
    tasks: int
    means: npt.NDArray[np.float64]
    difference: float
    seconds: float
    strong: StrongWinds


@dataclass(frozen=True, slots=True)
class StrongWinds:
    """The strong winds of the second half of the months, read with a `where`.

    Parameters
    ----------
    where : str
        What was asked for.
    rows : int
        Cells that are so.
    chunks : int
        Chunks of the variable.
    by_time, by_statistics : int
        Chunks that were not read, because of their months, and because of their bounds.
    """

    where: str
    rows: int
    chunks: int
    by_time: int
    by_statistics: int


@dataclass(frozen=True, slots=True)
class Streamed:
    """Months that came in as files, and were streamed into a repository.

    Parameters
    ----------
    months : int
        Months that came in.
    commits : int
        Commits that they made.
    repeated : int
        Batches that came again after the restart, and made no commit.
    seconds : float
        How long the stream has run.
    """

    months: int
    commits: int
    repeated: int
    seconds: float


class Demo:
    """The package's main job on the sample data; call the steps in order.

    Parameters
    ----------
    place : DemoPlace
        Where it writes.
    appends : int
        How many months are appended after the first years, 1 to 60.
    """

    def __init__(self, place: DemoPlace, appends: int = APPENDS) -> None:
        self.place = place
        self.first_months = FIRST_MONTHS
        self.winds = open_winds().isel(time=slice(0, FIRST_MONTHS + appends))
        self._repo = repositories.create(place.repository)
        self._spark_start_s = 0.0

    def label(self, months: int) -> str:
        """The name of the last of that many months."""
        return str(self.winds.time[months - 1].dt.strftime("%B %Y").item())

    def ingest(self) -> Cost:
        """Write the first years as one commit, and tag it."""
        first = self.winds.isel(time=slice(0, FIRST_MONTHS))
        with measure() as measured:
            _commit_whole(self._repo, first, f"Ingest the months up to {self.label(FIRST_MONTHS)}")
        self._repo.create_tag(FIRST_TAG)
        return measured.cost

    def append(self) -> Iterator[Commit]:
        """Append the following months, one commit each."""
        for month in range(FIRST_MONTHS, self.winds.sizes["time"]):
            one = self.winds.isel(time=slice(month, month + 1))
            message = f"Append {self.label(month + 1)}"
            with (
                measure() as measured,
                self._repo.transaction("main", message=message) as store,
            ):
                one.to_zarr(store, append_dim="time")
            compacted = next(self._repo.ancestry()).kind == "rewrite"
            yield Commit(month + 1, measured.cost, compacted)

    @property
    def rewrites(self) -> list[int]:
        """The numbers of months after which everything is rewritten for comparison."""
        first, last = FIRST_MONTHS + 1, self.winds.sizes["time"]
        return sorted({first, *range(FIRST_MONTHS + _REWRITE_EVERY, last, _REWRITE_EVERY), last})

    def rewrite(self) -> Iterator[Rewrite]:
        """Rewrite all months so far: same chunks, same disk, into an empty repository."""
        for months in self.rewrites:
            repo = repositories.create(self.place.scratch)
            with measure() as measured:
                _commit_whole(repo, self.winds.isel(time=slice(0, months)), "Rewrite everything")
            shutil.rmtree(self.place.scratch)
            yield Rewrite(months, measured.cost)

    def read(self, tag: str | None = None) -> Opened:
        """Read the snapshot of the tag, or the head, and compare it with the sample.

        Raises
        ------
        CheckFailedError
            If a value differs.
        """
        import xarray as xr

        with measure() as opened:
            session = repositories.open(self.place.repository).readonly_session(tag)
            found = xr.open_zarr(session.store, chunks=None)
        with measure() as one_month:
            last = found.isel(time=slice(-1, None)).load()
        with measure() as the_rest:
            others = found.isel(time=slice(None, -1)).load()
        months = FIRST_MONTHS if tag == FIRST_TAG else self.winds.sizes["time"]
        wanted = self.winds.isel(time=slice(0, months))
        if not xr.concat([others, last], dim="time").identical(wanted):
            raise CheckFailedError(
                f"snapshot {session.snapshot_id} in {self.place.repository} does not hold the "
                f"{months} months that were written"
            )
        return Opened(months, opened.cost, one_month.cost, the_rest.cost)

    @contextmanager
    def on_spark(self) -> Iterator[SparkSession]:
        """A Spark session for the next two steps, stopped at the end.

        Raises
        ------
        JavaNotFoundError
            If there is no Java that Spark can run on.
        """
        from zarr_manifests.spark import session

        self._spark_start_s = SYSTEM.monotonic_s()
        settings = {
            "spark.sql.shuffle.partitions": "2",
            # The caller shows progress, and two progress bars would overwrite each other.
            "spark.ui.showConsoleProgress": "false",
        }
        with warnings.catch_warnings():
            # A warning about features of pandas that are not used here.
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
            spark = session("zarr-manifests demo", master="local[2]", config=settings)
            try:
                yield spark
            finally:
                spark.stop()

    def means(self, spark: SparkSession) -> SparkMeans:
        """Compute each month's mean wind speed on Spark, and compare with xarray.

        Raises
        ------
        CheckFailedError
            If the means differ.
        """
        rows, tasks, table = _spark_means(spark, self.place.repository)
        seconds = SYSTEM.monotonic_s() - self._spark_start_s
        strong = self._strong_winds(spark)
        difference = compare_means(table, _xarray_means(self.winds))
        return SparkMeans(rows, tasks, table["mean"].to_numpy(), difference, seconds, strong)

    def stream(self, spark: SparkSession) -> Streamed:
        """Stream files of months into a repository, with a restart in the middle.

        The driver is made to forget its last batch, as if it had died right after the commit. The
        restarted stream brings that batch again.

        Raises
        ------
        CheckFailedError
            If a month is missing, or is there twice.
        """
        import xarray as xr

        files = self.place.stream / "files"
        files.mkdir(parents=True)
        months = self.winds.isel(time=slice(0, 1 + 2 * _STREAMED))
        repo = repositories.create(self.place.stream / "winds")
        _commit_whole(repo, months.isel(time=slice(0, 1)), "The first month")
        reports: list[WriteReport] = []
        start_s = SYSTEM.monotonic_s()
        for first in (1, 1 + _STREAMED):
            for month in range(first, first + _STREAMED):
                _as_rows(months.isel(time=slice(month, month + 1)), files / f"{month:02}.parquet")
            _run_stream(spark, repo, self.place.stream, reports)
            if first == 1:
                _forget_last_batch(self.place.stream / "checkpoint")
        seconds = SYSTEM.monotonic_s() - start_s
        found = xr.open_zarr(repositories.open(repo.storage).readonly_session().store, chunks=None)
        if not found.equals(months):
            raise CheckFailedError("the stream has not written each month once")
        repeated = sum(report.replayed for report in reports)
        shutil.rmtree(self.place.stream)
        return Streamed(2 * _STREAMED, len(reports) - repeated, repeated, seconds)

    def _strong_winds(self, spark: SparkSession) -> StrongWinds:
        """Read the strong westerlies of the second half, and compare with xarray."""
        from zarr_manifests.spark import explain_pruning, read

        repositories.open(self.place.repository).compute_statistics(["u"])
        first = self.winds.time.values[self.winds.sizes["time"] // 2]
        where = f"u > {_STRONG} AND time >= '{np.datetime_as_string(first, 'D')}'"
        rows = read(spark, self.place.repository, "u", where=where).count()
        if rows != int((self.winds.u.sel(time=slice(first, None)) > _STRONG).sum()):
            raise CheckFailedError(f"Spark finds other cells where {where} than xarray does")
        found = explain_pruning(spark, self.place.repository, "u", where=where)
        left_out = found.left_out
        return StrongWinds(where, rows, found.chunks, left_out["range"], left_out["statistics"])

    def draw(self, commits: list[Commit], rewrites: list[Rewrite]) -> None:
        """Save the picture, with the last month at the repository's head."""
        import xarray as xr

        from zarr_manifests.demo.map_picture import draw

        store = repositories.open(self.place.repository).readonly_session("main").store
        with xr.open_zarr(store, chunks=None) as found:
            draw(self.place.picture, found.isel(time=-1).load(), commits, rewrites)


def _commit_whole(repo: Repository, ds: xr.Dataset, message: str) -> None:
    # One chunk per month, so that appending a month touches no existing chunk.
    chunk = (1, ds.sizes["lat"], ds.sizes["lon"])
    units = {name: ds.time.encoding[name] for name in ("units", "calendar", "dtype")}
    encoding = {"u": {"chunks": chunk}, "v": {"chunks": chunk}, "time": units | {"chunks": (12,)}}
    with repo.transaction("main", message=message) as store:
        ds.to_zarr(store, encoding=encoding)


def compare_means(computed: pd.DataFrame, wanted: xr.DataArray) -> float:
    """Return the largest difference between Spark's and xarray's means; only rounding is allowed.

    Parameters
    ----------
    computed : pandas.DataFrame
        `time` and `mean`, in the order of time.
    wanted : xarray.DataArray
        The means over `time`.

    Raises
    ------
    CheckFailedError
        If the months or the means are not the same.
    """
    means = computed["mean"].to_numpy()
    same_months = np.array_equal(computed["time"].to_numpy(), wanted.time.values)
    if not same_months or not np.allclose(means, wanted.values, rtol=_AGREE_RTOL, atol=0):
        raise CheckFailedError(
            "the monthly mean wind speeds that Spark computed are not those that xarray computes"
        )
    return float(np.abs(means - wanted.values).max())


def _spark_means(spark: SparkSession, repository: Path) -> tuple[int, int, pd.DataFrame]:
    """The number of cells read, the number of tasks, and the table of means."""
    from pyspark.sql import functions as sql

    from zarr_manifests.spark import read

    cells = read(spark, repository, ["u", "v"])
    u, v = sql.col("u").cast("double"), sql.col("v").cast("double")
    speed, weight = sql.sqrt(u * u + v * v), sql.cos(sql.radians("lat"))
    means = (
        cells.groupBy("time")
        .agg((sql.sum(speed * weight) / sql.sum(weight)).alias("mean"), sql.count("u"))
        .orderBy("time")
    )
    table: pd.DataFrame = means.toPandas()
    return int(table["count(u)"].sum()), cells.rdd.getNumPartitions(), table


def _as_rows(month: xr.Dataset, file: Path) -> None:
    """A file with a row for each cell of the month."""
    rows = month.to_dataframe().reset_index()
    rows["time"] = rows["time"].dt.tz_localize("UTC").astype("datetime64[us, UTC]")
    rows.to_parquet(file, index=False)


def _run_stream(
    spark: SparkSession, repo: Repository, place: Path, reports: list[WriteReport]
) -> None:
    """Write the files that have come since the last run, one in each commit."""
    from zarr_manifests.spark import foreach_batch

    write = foreach_batch(
        repo,
        "/",
        dims=["time", "lat", "lon"],
        append_dim="time",
        on_report=lambda _, report: reports.append(report),
    )
    schema = "time timestamp, lat double, lon double, u float, v float"
    rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    query = rows.parquet(str(place / "files")).writeStream.foreachBatch(write)
    started = query.option("checkpointLocation", str(place / "checkpoint")).trigger(
        availableNow=True
    )
    started.start().awaitTermination()


def _forget_last_batch(checkpoint: Path) -> None:
    """Delete what Spark writes after the commit of a batch."""
    last = max(int(file.name) for file in (checkpoint / "commits").iterdir() if file.name.isdigit())
    for name in (f"{last}", f".{last}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)


def _xarray_means(winds: xr.Dataset) -> xr.DataArray:
    u, v = winds.u.astype("float64"), winds.v.astype("float64")
    weight = np.cos(np.deg2rad(winds.lat))
    speed: xr.DataArray = np.sqrt(u * u + v * v)
    return speed.weighted(weight).mean(("lat", "lon"))
