"""What is measured of Spark that writes: rows in random order become chunks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from runner import Case, Figure, Watch

import zarr_manifests as zm

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DIMS = ["time", "lat", "lon"]
_LAT, _LON = 250, 400


def filling(case: Case, *, one_chunk: bool = False) -> Iterator[Figure]:
    """Write rows to the cells of a new array; or to Parquet; or have Spark throw them away.

    All take the same rows, which a sort by a random key brings out of order. If `one_chunk`, each
    of two tasks holds one chunk at a time, so that cells have to be sorted.
    """
    from zarr_manifests.spark import session

    times = case.sizes["times"]
    spark = session(master="local[2]")
    try:
        rows = _shuffled(spark, times * _LAT * _LON)
        write = _written(case, times, one_chunk)
        while True:
            with Watch() as watch:
                write(rows)
            yield Figure(watch.seconds / (times * _LAT * _LON))
    finally:
        spark.stop()


def _shuffled(spark: SparkSession, cells: int) -> DataFrame:
    from pyspark.sql.functions import rand

    ordered = spark.range(0, cells, 1, 2).selectExpr(
        f"timestamp_seconds(86400 * (id div {_LAT * _LON})) AS time",
        f"CAST(id % {_LAT * _LON} div {_LON} AS double) AS lat",
        f"CAST(id % {_LON} AS double) AS lon",
        "CAST(rand(7) AS float) AS t",
    )
    return ordered.orderBy(rand(3))


def _written(case: Case, times: int, one_chunk: bool) -> Callable[[DataFrame], None]:
    """What a contestant does with rows."""
    from zarr_manifests.spark import write_dataframe

    place = case.folder / "r"
    grid = xr.Dataset(
        coords={
            "time": np.datetime64(0, "D") + np.arange(times) * np.timedelta64(1, "D"),
            "lat": np.arange(_LAT, dtype=float),
            "lon": np.arange(_LON, dtype=float),
        }
    )
    encoding = {"t": {"chunks": (10, _LAT, _LON)}}
    how = {"buffer_bytes": 1, "max_tasks": 2} if one_chunk else {}

    def ours(rows: DataFrame) -> None:
        if place.exists():
            shutil.rmtree(place)
        repository = zm.create(place)
        zm.write(grid, repository, message="grid")
        report = write_dataframe(
            rows,
            repository,
            "/",
            dims=_DIMS,
            mode="create",
            encoding=encoding,
            **how,
        )
        assert report.cells == times * _LAT * _LON

    if case.contestant == "noop":
        return lambda rows: rows.write.format("noop").mode("overwrite").save()
    if case.contestant == "parquet":
        return lambda rows: rows.write.mode("overwrite").parquet(str(place))
    return ours
