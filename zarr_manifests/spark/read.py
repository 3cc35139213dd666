"""Reading variables of a repository as a Spark DataFrame, one row per cell.

The driver pins the snapshot, reads metadata and coordinates, and plans. Only tasks read chunks of
variables. Each task is one partition and gets one box of whole chunks. A task receives the plan and
the repository's location, never data.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import pandas as pd
from pyspark.sql import DataFrame, SparkSession

from zarr_manifests.repository import Repository
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.spark.worker import PANDAS_WARNING, run
from zarr_manifests.storage import Storage

__all__ = ["read"]


def read(
    spark: SparkSession,
    url: str | os.PathLike[str] | Storage | Repository,
    variables: str | Sequence[str] | None = None,
    *,
    group: str = "/",
    branch: str | None = None,
    tag: str | None = None,
    snapshot_id: str | None = None,
    ranges: Mapping[str, tuple[Any, Any]] | None = None,
    layout: Literal["long"] = "long",
    nan: Literal["keep", "null", "drop"] = "keep",
    target_rows: int = 4 * 1024**2,
) -> DataFrame:
    """Read variables as a DataFrame with one row per cell.

    The columns are the dimensions, then the variables. Values are as in `xarray.open_zarr`:
    unpacked, times decoded. A dimension is represented by its coordinate, or by positions from 0
    on without one. Auxiliary coordinates (scalar, or of several dimensions) are read only if they
    are named as variables. The columns' metadata has the variables' attributes.

    The DataFrame is lazy, and stays at the snapshot that was current when it was made.

    Parameters
    ----------
    spark : SparkSession
        A Spark session, such as `zarr_manifests.spark.session()` returns.
    url : str, path, Storage or Repository
        The repository. Spark's workers must be able to reach it. A `Repository` passes on its
        `virtual_containers`; the workers must be able to reach these as well.
    variables : str or sequence of str, optional
        The variables to read; by default all of the group that are not coordinates. They must have
        the same dimensions.
    group : str, default "/"
        The group of the variables.
    branch, tag, snapshot_id : str, optional
        At most one; by default the head of `main` is read.
    ranges : mapping of str to (lo, hi), optional
        By dimension, the closed range of coordinate values to read, with None for an open end.
        `lo <= hi` even if the coordinate descends. ISO text stands for the whole period it names:
        `("2000-01", "2000-02")` includes the 29th of February. Dimensions without a coordinate have
        ranges of positions.
    layout : "long"
        One row per cell; there is no other layout yet.
    nan : "keep", "null" or "drop", default "keep"
        How to treat NaN in variables. Spark's aggregates skip null, but not NaN. `null` replaces
        NaN by null. `drop` does the same and leaves out rows without any value; boxes whose chunks
        were never written get no task if the fill value stands for no value.
    target_rows : int, default 4,194,304
        The target number of cells per task. Tasks read whole chunks, and there are at least as many
        tasks as Spark runs at once, if there are as many chunks.

    Returns
    -------
    pyspark.sql.DataFrame
        Without rows if the variables have no cells.

    Raises
    ------
    NotARepositoryError
        If there is no repository.
    NotFoundError
        If the branch, tag, snapshot, group or a variable does not exist.
    InvalidArgumentError
        If an option is unknown, variables have different dimensions or values without a Spark type,
        or a range selects nothing.
    UnsupportedStorageError
        If other processes cannot reach the repository (`memory://`).

    Examples
    --------
    >>> from zarr_manifests.spark import read, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> df = read(spark, "winds", ["u", "v"], ranges={"lat": (-30, 30)})  # doctest: +SKIP
    >>> df.groupBy("time").agg({"u": "avg"}).orderBy("time").show()  # doctest: +SKIP
    """
    options = ReadOptions(
        variables=variables,
        group=group,
        branch=branch,
        tag=tag,
        snapshot_id=snapshot_id,
        ranges=ranges,
        layout=layout,
        nan=nan,
        target_rows=target_rows,
    )
    job = plan_read(url, options, SparkFacts.of(spark))
    if not job.tasks:
        return spark.createDataFrame([], job.schema)

    def rows(tasks: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        return run(job, tasks)

    # As many partitions as numbers, so that each task gets one.
    tasks = spark.range(0, job.tasks, 1, job.tasks)
    with warnings.catch_warnings():
        # A warning about features of pandas that are not used here.
        warnings.filterwarnings("ignore", PANDAS_WARNING, FutureWarning)
        return tasks.mapInPandas(rows, job.schema)
