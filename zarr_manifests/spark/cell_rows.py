"""Reading variables of a repository as a Spark DataFrame, one row per cell.

The driver pins the snapshot, reads metadata and coordinates, and plans. Only tasks read chunks of
variables. Each task is one partition and gets one box of whole chunks. A task receives the plan and
the repository's location, never data.

For what was added between two snapshots, the driver finds the boxes of these cells from the deltas
of the commits in between, and each task reads the cells of some boxes. Rows are identified
by the positions of their cells. So coordinates must have the same values at both snapshots, as far
as both have them.

Aggregates come mostly from statistics. Tasks aggregate the rest before a row is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal

from pyarrow.types import is_binary, is_string
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, IntegerType, StructField, StructType

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.repositories import Location, repository_of
from zarr_manifests.spark.job import Job, frame_of, options_of, shared_repository, with_lease
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_changes, plan_read
from zarr_manifests.spark.tasks import mapped, run_tasks
from zarr_manifests.spark.worker import run_arrow
from zarr_manifests.texts import known_as, shown

_FUNCTIONS: Final = ("count", "missing", "min", "max", "sum", "mean")


def read(
    spark: SparkSession,
    url: Location,
    variables: str | Sequence[str] | None = None,
    *,
    group: str = "/",
    version: str | None = None,
    where: Any = None,
    layout: Literal["long", "chunk"] = "long",
    nan: Literal["keep", "null", "drop"] = "null",
    decode_times: bool = True,
    target_rows: int = 2 * 1024**2,
    max_tasks: int = 10_000,
    lease: timedelta | None = timedelta(days=1),
    storage_options: Mapping[str, object] | None = None,
) -> DataFrame:
    """Read variables as a DataFrame with one row per cell.

    The columns are the dimensions, then the variables. Values are as in `xarray.open_zarr`:
    unpacked, times decoded. A dimension is represented by its coordinate, or by positions from 0
    on without one. Auxiliary coordinates (scalar, or of several dimensions) are read only if they
    are named as variables. The columns' metadata has the variables' attributes.

    The DataFrame is lazy, and stays at the snapshot that was current when it was made. Its
    `explain()` says how many chunks are read; `Session.chunks_where` says why it leaves out others.

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
    version : str, optional
        As for `Repository.readonly_session`; by default the head of `main` is read.
    where : str, mapping or list, optional
        Which rows to read. Text has comparisons of columns with literals, joined by AND, such as
        `"depth > 6000 AND lat BETWEEN -30 AND 30"`; rows are the same as with Spark's own filter.
        A mapping has values by column: in `{"lat": (-30, 30), "time": ("2000-01", "2000-02")}`
        these are closed ranges of labels, with None for an open end, `lo <= hi` even if a
        coordinate descends. ISO text stands for the whole period it names, so that February is
        included, also by `{"time": "2000-02"}`. `[(1, 2), 5]` means any of these, `[1, 2, 5]` one
        of them, `(">", 6000)` a comparison as in text, and None a missing value. A list joins any
        of these. Chunks that cannot have a row are not read: by the coordinates, and by the bounds
        of the chunks' values where the repository has statistics. Times without a zone are in the
        session's, those of NumPy in UTC. Dimensions without a coordinate have positions.
    layout : "long" or "chunk", default "long"
        One row per cell or per chunk. The row of a chunk has its coordinates as arrays, its
        `shape`, and for each variable the `dtype` and the decoded values (`data`, in C order). Of
        a chunk, only the cells are in it that comparisons of dimensions select. By comparisons of
        variables, chunks are left out that cannot match, and no cells of others.
    nan : "null", "keep" or "drop", default "null"
        How to treat NaN. `null` replaces it by null. `keep` keeps it: in Spark, NaN is larger than
        all numbers, and makes averages NaN. `drop` is `null` without the rows in which no variable
        has a value; chunks in which none has one are not read, if they were never written and the
        fill value stands for no value, or if the repository has statistics that say so.
    decode_times : bool, default True
        Whether CF times become timestamps. If not, they stay numbers, and the columns' metadata has
        their units.
    target_rows : int, default 2,097,152
        The target number of cells per task. Tasks read whole chunks, and there are at least as many
        tasks as Spark runs at once, if there are as many chunks.
    max_tasks : int, default 10,000
        The largest number of tasks. Above it, tasks read more cells than `target_rows`.
    lease : timedelta, default 1 day
        How long to keep the snapshot, and all later ones, from being collected; tasks that begin
        late prolong it. It lasts that long even if the DataFrame is not needed any more. None takes
        no lease.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

    Returns
    -------
    pyspark.sql.DataFrame
        Without rows if the variables have no cells, or none can match.

    Raises
    ------
    NotARepositoryError
        If there is no repository.
    NotFoundError
        If the branch, tag, snapshot, group or a variable does not exist.
    InvalidArgumentError
        If an option is unknown, variables have different dimensions or values without a Spark type,
        or a column cannot be compared so.
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
    options = options_of(ReadOptions, locals())
    repository = repository_of(url, storage_options)
    job = with_lease(plan_read(repository, options, SparkFacts.of(spark)), lease)
    return rows(spark, job)


def rows(spark: SparkSession, job: Job) -> DataFrame:
    """The rows of all tasks of a job; none if it has no tasks."""
    in_lines = _in_lines(job)
    task: Any = partial(run_arrow, job, in_lines=in_lines)
    task.__name__ = job.name  # which the plan shows
    schema = job.schema
    if in_lines:  # numbered, as names may be alike but for case, or have dots
        lists = [ArrayType(field.dataType) for field in schema]
        schema = StructType([StructField(f"c{n}", kind) for n, kind in enumerate(lists)])
        schema.add("length", IntegerType())
    # As many partitions as numbers, so that each task gets one.
    found = mapped(spark.range(0, job.tasks, 1, max(job.tasks, 1)), task, schema)
    return _cells_of(found, job) if in_lines else found


def _in_lines(job: Job) -> bool:
    """Whether tasks hand over lines of cells, of which Spark makes rows.

    It makes them faster than Python, and only the columns that a query needs. Values of any length
    would make lines too large.
    """
    fixed = not any(is_string(each.arrow) or is_binary(each.arrow) for each in job.variables)
    long = job.options.layout == "long"
    return bool(long and fixed and job.dimensions and job.variables)


def _cells_of(lines: DataFrame, job: Job) -> DataFrame:
    """A row for each cell of `Cells.lines`."""
    dims, count = len(job.dimensions), len(job.columns)
    found = [*(f"c{n}[cell DIV length]" for n in range(dims - 1)), f"c{dims - 1}[cell % length]"]
    found += ["value", *(f"c{n}[cell]" for n in range(dims + 1, count))]
    columns = [
        f.expr(text).alias(column.name, metadata=dict(column.metadata))
        for text, column in zip(found, job.columns, strict=True)
    ]
    return lines.selectExpr("*", f"posexplode(c{dims}) AS (cell, value)").select(columns)


# --- what changed --------------------------------------------------------------------------------


def changes(
    spark: SparkSession,
    url: Location,
    start: str | None,
    end: str = "main",
    variables: str | Sequence[str] | None = None,
    *,
    lease: timedelta | None = timedelta(days=1),
    storage_options: Mapping[str, object] | None = None,
    **options: Any,
) -> DataFrame:
    """Read the cells that were added from one snapshot to a later one, one row per cell.

    Columns and values are as `read` gives them at `end`. Only cells in stored chunks are rows: a
    chunk that was never written has none. Zarr does not store a chunk in which all cells have the
    fill value, unless told to (`write_empty_chunks`).

    A cell is added if it lies beyond the old shape, or in chunks of all variables that were absent.
    So the rows added over consecutive ranges are the rows of the table, each once, also where two
    appends fill one chunk. Compactions change nothing.

    Parameters
    ----------
    spark : SparkSession
        A Spark session.
    url : str, path, Storage or Repository
        The repository, as for `read`.
    start : str or None
        Any name of a version, as `Repository.readonly_session` takes it. With None, all cells of
        `end` are added.
    end : str, default "main"
        Likewise; `start` must be in its history.
    variables, lease, storage_options
        As for `read`.
    **options
        The other options of `read` but `version` and `layout`, such as `group`, `where` or `nan`.

    Returns
    -------
    pyspark.sql.DataFrame
        Without rows if nothing was added.

    Raises
    ------
    SnapshotExpiredError
        If some of the range has expired; it may be a `HistoryExpiredError`.
    NotFoundError
        If there is no such branch, tag, group or variable at `end`.
    InvalidArgumentError
        If `start` is not in the history of `end`, coordinates have other values now, or an option
        is wrong.
    UnsupportedStorageError
        If other processes cannot reach the repository (`memory://`).

    Examples
    --------
    >>> from zarr_manifests.spark import changes, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> changes(spark, "winds", "monday", "tuesday", ["u", "v"]).show()  # doctest: +SKIP
    """
    asked = ReadOptions(variables=variables, **options)
    repository = repository_of(url, storage_options)
    job = plan_changes(repository, asked, SparkFacts.of(spark), start, end)
    return rows(spark, with_lease(job, lease))


# --- aggregates ----------------------------------------------------------------------------------


def aggregate(
    spark: SparkSession,
    url: Location,
    values: Mapping[str, Sequence[str]],
    *,
    by: str | Sequence[str] | None = None,
    where: str | None = None,
    weights: Mapping[str, Any] | None = None,
    version: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> DataFrame:
    """Aggregate arrays by labels of their dimensions, as `Session.summarize` does.

    Whole chunks are answered by their statistics. Others are read and aggregated in tasks, by
    NumPy; what is few is read on the driver. Only the answer becomes rows.

    Parameters
    ----------
    spark : SparkSession
        Runs the tasks.
    url : str, path, storage or Repository
        The repository.
    values : mapping of str to sequence of str
        By path of each array, what to compute: `count`, `missing`, `min`, `max`, `sum`, `mean`.
    by, weights
        As in `Session.summarize`.
    where : str, optional
        Comparisons of coordinates, such as `"lat > 30"`.
    version : str, optional
        A branch, tag, id and so on; by default the head of `main`.
    storage_options : mapping, optional
        Options for the URL.

    Returns
    -------
    DataFrame
        A column for each dimension in `by`, and one such as `t2m_mean` for each value.

    Raises
    ------
    NotFoundError
        If there is no such array.
    InvalidArgumentError
        If a function is unknown, or as `Session.summarize` does.

    Examples
    --------
    >>> from zarr_manifests.spark import aggregate, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> aggregate(spark, "winds", {"u": ["mean", "max"]}, by="time").show()  # doctest: +SKIP
    """
    import xarray as xr

    asked: Any = values
    if not isinstance(asked, Mapping) or any(isinstance(one, str) for one in asked.values()):
        raise InvalidArgumentError(f'values= is {{"air": ["mean"]}} and so on, not {values!r:.80}')
    for how in (how for given in values.values() for how in given):
        if how not in _FUNCTIONS:
            raise InvalidArgumentError(f"{shown(how)} is unknown: {known_as(how, _FUNCTIONS)}")
    if not any(values.values()):
        raise InvalidArgumentError('values= names nothing: give {"air": ["mean"]} and so on')
    opened = shared_repository(url, storage_options).readonly_session(version)
    run, parts = partial(run_tasks, spark), []
    for path, given in values.items():
        found = opened.summarize(path, where, by=by, weights=weights, run=run)
        name = path.strip("/").replace("/", "_")
        parts.append(found[[*given]].rename({how: f"{name}_{how}" for how in given}))
    # Where one array has labels that another one lacks, it has no cells.
    none = {name: 0 for part in parts for name in part if name.endswith(("_count", "_missing"))}
    whole = xr.merge(parts, join="outer", fill_value=none, combine_attrs="drop")
    dims = [*whole.sizes]
    columns = (whole[name].broadcast_like(whole).transpose(*dims) for name in (*dims, *whole))
    return frame_of(spark, {str(one.name): one for one in columns})
