"""Reading variables of a repository as a Spark DataFrame, one row per cell.

The driver pins the snapshot, reads metadata and coordinates, and plans. Only tasks read chunks of
variables. Each task is one partition and gets one box of whole chunks. A task receives the plan and
the repository's location, never data.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal

from pyspark.sql import DataFrame, SparkSession

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository
from zarr_manifests.spark.job import Job, with_lease
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.spark.worker import PANDAS_WARNING, run, run_arrow
from zarr_manifests.storage import Storage

__all__ = ["read", "rows"]

_ENGINES: Final = ("arrow", "pandas")


def read(
    spark: SparkSession,
    url: str | os.PathLike[str] | Storage | Repository,
    variables: str | Sequence[str] | None = None,
    *,
    group: str = "/",
    version: str | None = None,
    where: Any = None,
    on_empty: Literal["empty", "error"] = "empty",
    layout: Literal["long", "chunk"] = "long",
    nan: Literal["keep", "null", "drop"] = "null",
    decode_times: bool = True,
    broadcast: bool = False,
    target_rows: int = 2 * 1024**2,
    max_tasks: int = 10_000,
    engine: Literal["arrow", "pandas"] = "arrow",
    lease: timedelta | None = timedelta(days=1),
    storage_options: Mapping[str, object] | None = None,
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
        the same dimensions, or see `broadcast`.
    group : str, default "/"
        The group of the variables.
    version : str, optional
        As for `Repository.readonly_session`; by default the head of `main` is read.
    where : str, mapping or list, optional
        Which rows to read. Text has comparisons of columns with literals, joined by AND, such as
        `"depth > 6000 AND lat BETWEEN -30 AND 30"`; rows are the same as with Spark's own filter.
        A mapping has values by column: in `{"lat": (-30, 30), "time": ("2000-01", "2000-02")}`
        these are closed ranges of labels, with None for an open end, `lo <= hi` even if a
        coordinate descends. ISO text stands for the whole period it names, so that February is
        included. `[(1, 2), 5]` means any of these, `[1, 2, 5]` one of them, `(">", 6000)` a
        comparison, and None a missing value. A list joins any of these. Chunks that cannot have a
        row are not read: by the coordinates, and by the bounds of the chunks' values where the
        repository has statistics. Times without a zone are in the session's; in ranges, those of
        NumPy are in UTC. Dimensions without a coordinate have positions.
    on_empty : "empty" or "error", default "empty"
        What to do if no cell can match: return no rows, or raise.
    layout : "long" or "chunk", default "long"
        One row per cell or per chunk. The row of a chunk has its coordinates as arrays, its
        `shape`, and for each variable the `dtype` and the decoded values (`data`, in C order). Of
        a chunk, only the cells are in it that comparisons of dimensions select. By comparisons of
        variables, chunks are left out that cannot match, and no cells of others.
    nan : "null", "keep" or "drop", default "null"
        How to treat NaN. `null` replaces it by null. `keep` keeps it: in Spark, NaN is larger than
        all numbers, and makes averages NaN. `drop` is `null` without the rows in which no variable
        has a value; boxes whose chunks were never written get no task if the fill value stands for
        no value.
    decode_times : bool, default True
        Whether CF times become timestamps. If not, they stay numbers, and the columns' metadata has
        their units.
    broadcast : bool, default False
        Whether variables may lack some of the dimensions that another one has. Their values are
        then repeated.
    target_rows : int, default 2,097,152
        The target number of cells per task. Tasks read whole chunks, and there are at least as many
        tasks as Spark runs at once, if there are as many chunks.
    max_tasks : int, default 10,000
        The largest number of tasks. Above it, tasks read more cells than `target_rows`.
    engine : "arrow" or "pandas", default "arrow"
        How workers hand rows to Spark: with `mapInArrow`, or with the slower `mapInPandas`. The
        rows are the same.
    lease : timedelta, default 1 day
        How long to keep the snapshot, and all later ones, from being collected; tasks that begin
        late prolong it. It lasts that long even if the DataFrame is not needed any more. None takes
        no lease.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

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
        a column cannot be compared so, or no cell can match and `on_empty` is "error".
    WhereError
        If the text of `where` cannot be read.
    UnsupportedStorageError
        If other processes cannot reach the repository (`memory://`).

    Examples
    --------
    >>> from zarr_manifests.spark import read, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> df = read(spark, "winds", ["u", "v"], where={"lat": (-30, 30)})  # doctest: +SKIP
    >>> df.groupBy("time").agg({"u": "avg"}).orderBy("time").show()  # doctest: +SKIP
    """
    if engine not in _ENGINES:
        listed = ", ".join(map(repr, _ENGINES))
        raise InvalidArgumentError(f"engine cannot be {engine!r}; known: {listed}")
    options = ReadOptions(
        variables=variables,
        group=group,
        version=version,
        where=where,
        on_empty=on_empty,
        layout=layout,
        nan=nan,
        decode_times=decode_times,
        broadcast=broadcast,
        target_rows=target_rows,
        max_tasks=max_tasks,
    )
    repository = repository_of(url, storage_options)
    job = with_lease(plan_read(repository, options, SparkFacts.of(spark)), lease)
    return rows(spark, job, engine)


def rows(spark: SparkSession, job: Job, engine: str = "arrow") -> DataFrame:
    """The rows of all tasks of a job; none if it has no tasks."""
    if not job.tasks:
        return spark.createDataFrame([], job.schema)
    # As many partitions as numbers, so that each task gets one.
    tasks = spark.range(0, job.tasks, 1, job.tasks)
    with warnings.catch_warnings():
        # A warning about features of pandas that are not used here.
        warnings.filterwarnings("ignore", PANDAS_WARNING, FutureWarning)
        task: Any = partial(run_arrow if engine == "arrow" else run, job)
        task.__name__ = job.name  # which the plan shows
        give = tasks.mapInArrow if engine == "arrow" else tasks.mapInPandas
        return give(task, job.schema)
