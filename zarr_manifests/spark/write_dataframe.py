"""Writing the rows of a Spark DataFrame to the cells of arrays, in one commit.

The driver prepares a session, and tasks write chunks to forks of it (`cell_writer`). The driver
merges the forks and commits. It never collects rows, only the labels that are to be appended or
made. If another commit has changed what an append is planned on, all of it is done again.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.errors import PythonException
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as sql
from pyspark.sql.pandas.types import to_arrow_schema

from zarr_manifests import errors
from zarr_manifests.errors import (
    ConflictError,
    InvalidArgumentError,
    TransactionAlreadyCommitted,
)
from zarr_manifests.grid import Box
from zarr_manifests.keys import split
from zarr_manifests.planning.conflict.transactions import Txn, txn_of
from zarr_manifests.repositories import let_others_open, repository_of, write_into
from zarr_manifests.repository import Repository
from zarr_manifests.session import Fork, Session, commits_of
from zarr_manifests.spark.cell_shares import AXIS, cell_bounds, distinct_labels, share_cells
from zarr_manifests.spark.cell_values import to_numpy
from zarr_manifests.spark.cell_writer import write_cells
from zarr_manifests.spark.checks import check_shared
from zarr_manifests.spark.plan import SparkFacts, spelled
from zarr_manifests.spark.worker import PANDAS_WARNING
from zarr_manifests.spark.write_plan import WriteOptions, WritePlan, WriteReport
from zarr_manifests.spark.write_target import Begun, Target, begin
from zarr_manifests.storage import Storage
from zarr_manifests.storage.url import storage_of
from zarr_manifests.store import contents_of

__all__ = [
    "CountedCells",
    "TipCheck",
    "check_shared",
    "columns_as_there",
    "distinct",
    "landed",
    "write_dataframe",
    "write_rows",
]

_SHARES: Final = "task int, bin bigint, cells binary, failure string"
_REPORTS: Final = "fork binary, cells bigint, failure string"
_BOUNDS: Final = "lo array<bigint>, hi array<bigint>, failure string"


type TipCheck = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class CountedCells:
    """What tasks have counted."""

    cells: int = 0
    tasks: int = 0


def write_dataframe(
    df: DataFrame,
    url: str | os.PathLike[str] | Storage | Repository,
    target: str,
    *,
    dims: Sequence[str],
    mode: Literal["append", "overwrite-region", "create"] = "append",
    append_dim: str | None = None,
    region: Mapping[str, Any] | None = None,
    template: Any = None,
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    missing: Literal["fill", "keep", "error"] = "fill",
    duplicates: Literal["error", "last"] = "error",
    order_by: str | None = None,
    tolerance: Mapping[str, Any] | None = None,
    txn_app_id: str | None = None,
    txn_version: int | None = None,
    message: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    branch: str = "main",
    statistics: bool = True,
    buffer_bytes: int = 256 * 1024**2,
    max_tasks: int = 1000,
    storage_options: Mapping[str, object] | None = None,
) -> WriteReport:
    """Write the rows of a DataFrame to the cells of arrays, in one commit.

    Each row is written to one cell. The columns `dims` hold its coordinates, and the other columns
    are variables. Rows may be in any order. If anything fails, nothing is committed.

    Parameters
    ----------
    df : DataFrame
        The rows. Without a region, the DataFrame is computed twice, first to find labels or the
        region, and must give the same rows both times; persist it if it is costly.
    url : str, path, Storage or Repository
        The repository. Spark's workers must be able to reach it.
    target : str
        Path of an array, whose name the one column besides `dims` has; or of a group, whose
        variables have the names of the columns besides `dims`.
    dims : sequence of str
        The columns that are coordinates: all dimensions of the variables, in any order. Values are
        looked up in the coordinates as they are read; times are timestamps. For a dimension without
        a coordinate they are positions from 0 on.
    mode : "append", "overwrite-region" or "create", default "append"
        Whether to append cells, to overwrite existing ones, or to make new variables.
    append_dim : str, optional
        The dimension to append along. Its new labels are those of the rows, and are added after the
        existing ones. Rows of existing labels are an error, unless `missing` is "keep".
    region : mapping of str to (lo, hi) or slice, optional
        With `overwrite-region`: by dimension, the closed range of labels to write, as for `read`;
        other dimensions are written whole. By default the smallest box that holds the rows.
    template : Dataset, optional
        With `create`: a dataset that provides coordinates, types, encodings and attributes. Its
        values are not read. Without one, coordinates are the distinct labels of the rows,
        ascending. Existing coordinates of the group are used as they are.
    encoding : mapping, optional
        With `create`: encodings of the new variables, such as `{"t": {"chunks": (10, 90, 90)}}`.
    missing : "fill", "keep" or "error", default "fill"
        What to do with cells of the region without a row: remove their values, keep them, or raise
        an error. Cells outside the region never change.
    duplicates : "error" or "last", default "error"
        What to do about two rows of one cell. `last` takes the one with the larger value in the
        column `order_by`, since rows have no order in Spark.
    order_by : str, optional
        A column of numbers or times that says which of two rows is the last.
    tolerance : mapping, optional
        By dimension, how far a value may be from the label it is looked up as, such as
        `{"lat": 1e-6}` or `{"time": timedelta(minutes=1)}`. By default they have to be equal.
    txn_app_id, txn_version : str and int, optional
        The name of an application and the number of its step, which is written at most once, as by
        `Session.commit(..., txn=(app, version))`.
    message : str, optional
        The commit message.
    metadata : mapping, optional
        Stored with the commit.
    branch : str, default "main"
        The branch to commit to.
    statistics : bool, default True
        Whether to record the bounds of chunks, for `Session.chunks_where`.
    buffer_bytes : int, default 268,435,456
        How much of decoded values a task holds. Chunks are written by as many tasks as that takes,
        and by at least as many as can run at once.
    max_tasks : int, default 1000
        The largest number of tasks that write. Where it is not enough, a task writes several
        buffers, one after the other.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

    Returns
    -------
    WriteReport
        The snapshot, and what was written.

    Raises
    ------
    NotARepositoryError
        If there is no repository. With `create` the commit makes one, unless `branch` is another
        than "main".
    NotFoundError
        If there is no such branch or variable, and it is not to be created.
    AlreadyExistsError
        If labels to append, or variables to create, are there already.
    InvalidArgumentError
        If options contradict each other; if rows have no cell in the grid or the region, or two
        rows one cell; if values would be read back differently, as for `zarr_manifests.write`; or
        if a cell gets no value (NULL, or no row) and the array has nothing that stands for it.
    ConflictError
        If others have committed to the same chunks in the meantime.
    UnsupportedStorageError
        If other processes cannot reach the repository (`memory://`).

    Examples
    --------
    >>> from zarr_manifests.spark import read, session, write_dataframe
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> mean = read(spark, "winds", "u").groupBy("lat", "lon").agg({"u": "avg"})  # doctest: +SKIP
    >>> mean = mean.withColumnRenamed("avg(u)", "u_mean")  # doctest: +SKIP
    >>> how = dict(dims=["lat", "lon"], mode="create")  # doctest: +SKIP
    >>> write_dataframe(mean, "winds", "u_mean", **how)  # doctest: +SKIP
    """
    options = WriteOptions(
        target=target,
        dims=tuple(dims) if not isinstance(dims, str) else dims,
        mode=mode,
        append_dim=append_dim,
        region=region,
        template=template,
        encoding={} if encoding is None else encoding,
        missing=missing,
        duplicates=duplicates,
        order_by=order_by,
        tolerance={} if tolerance is None else tolerance,
        statistics=statistics,
        buffer_bytes=buffer_bytes,
        max_tasks=max_tasks,
    )
    if (txn_app_id is None) != (txn_version is None):
        raise InvalidArgumentError("txn_app_id and txn_version go together")
    txn = None if txn_app_id is None else txn_of((txn_app_id, txn_version))

    def into(repository: Repository) -> WriteReport:
        return write_rows(df, repository, options, branch, message, metadata, txn)

    if isinstance(url, Repository):
        return into(repository_of(url, storage_options))
    storage = storage_of(url, storage_options)
    check_shared(storage)
    return write_into(storage, None, into, make=mode == "create" and branch == "main")


def write_rows(
    df: DataFrame,
    repository: Repository,
    options: WriteOptions,
    branch: str = "main",
    message: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    txn: Txn | None = None,
) -> WriteReport:
    """Write rows, as `write_dataframe` does."""
    check_shared(repository.storage)
    write = partial(_write, df, options)
    return landed(repository, options, write, branch, message, metadata, txn)


def landed(
    repository: Repository,
    options: WriteOptions,
    write: Callable[[Session], tuple[TipCheck, CountedCells]],
    branch: str,
    message: str | None,
    metadata: Mapping[str, Any] | None,
    txn: Txn | None,
) -> WriteReport:
    """Write rows to a session and commit it; again, if others have changed what it is planned on.

    `write` returns what refuses a tip on which the write would be another one, and its counts.
    """
    if message is None:
        message = f"{options.mode} rows to /{options.target.strip('/')}"
    attempts = 0
    while True:
        attempts += 1
        session = repository.writable_session(branch)
        try:
            commits_of(session).begin(txn)
            with _own_errors():
                check, counts = write(session)
            if txn is None and not session.status():
                return WriteReport(snapshot_id=None)
            snapshot_id = commits_of(session).commit(message, metadata, check_tip=check, txn=txn)
        except TransactionAlreadyCommitted as done:
            return WriteReport(snapshot_id=done.snapshot_id, replayed=True)
        except ConflictError:
            # What others appended may leave room behind it, or say that the labels are there.
            if options.mode != "append" or attempts > repository.config.commits.attempts:
                raise
        else:
            written = next(repository.ancestry(snapshot_id, limit=1)).written
            return WriteReport(
                snapshot_id=snapshot_id,
                chunks=written.get("refs-set", 0),
                bytes=written.get("chunk-bytes", 0),
                cells=counts.cells,
                tasks=counts.tasks,
            )
        finally:
            session.close()


def _write(df: DataFrame, options: WriteOptions, session: Session) -> tuple[TipCheck, CountedCells]:
    """Write rows to a session; what checks a tip before the commit, and what was counted."""
    spark = df.sparkSession
    facts = SparkFacts.of(spark)
    options = replace(options, time_zone=facts.time_zone)
    df = df.toDF(*columns_as_there(df.columns, session, options, facts))
    target = Target.of(session, options, df.columns)
    frame = _with_plain_times(df, options)
    columns = to_arrow_schema(frame.schema, timezone="UTC")
    labels = _labels(frame, target.new_labels(session, options), columns)
    begun = begin(session, target, options, columns, labels, parallelism=facts.parallelism)
    plan = begun.plan
    if begun.region is None:
        region = _smallest_box(frame, begun)
        if region is None:
            return begun.check_tip, CountedCells()
        plan = begun.within(region, options, facts.parallelism)
    if not len(plan.bins):
        return begun.check_tip, CountedCells()
    chosen = frame.select(*(f"`{name}`" for name in plan.columns))
    let_others_open(session)
    rows = _checked(_written(spark, chosen, plan, session.fork()))
    forks: Any = CloudPickleSerializer()  # type: ignore[no-untyped-call]
    session.merge(*(forks.loads(bytes(row.fork)) for row in rows))
    return begun.check_tip, CountedCells(sum(row.cells for row in rows), len(rows))


def columns_as_there(
    columns: Sequence[str], session: Session, options: WriteOptions, facts: SparkFacts
) -> list[str]:
    """The columns as the options and the arrays that are there spell them."""
    contents, path = contents_of(session.store), options.target.strip("/")
    node = contents.node(path)
    group = path if node is not None and node.array is None else split(path)[0]
    there = [split(at)[1] for at in contents.members(group)]
    order = [] if options.order_by is None else [options.order_by]
    spelling = spelled(columns, [*there, split(path)[1], *options.dims, *order], facts)
    return [spelling[name] for name in columns]


def _written(spark: SparkSession, frame: DataFrame, plan: WritePlan, fork: Fork) -> DataFrame:
    """What the tasks that write a plan report."""
    shares = _mapped(frame, partial(share_cells, plan), _SHARES)
    # Every task gets a mark, so that those without rows run too, and each knows its number.
    marks = spark.range(0, plan.tasks, 1, 1).select(
        f.col("id").cast("int").alias("task"),
        f.lit(None).cast("bigint").alias("bin"),
        f.lit(None).cast("binary").alias("cells"),
        f.lit(None).cast("string").alias("failure"),
    )
    parted = shares.union(marks).repartitionById(plan.tasks, "task")
    if len(plan.bins) > plan.tasks:
        parted = parted.sortWithinPartitions("bin")
    return _mapped(parted, partial(write_cells, plan, fork), _REPORTS)


def _checked(frame: DataFrame) -> list[Row]:
    """The rows of what tasks report; raises what is wrong with the data."""
    rows = frame.collect()
    failures = [row.failure for row in rows if row.failure is not None]
    if failures:
        raise InvalidArgumentError(failures[0])
    return rows


def _mapped(frame: DataFrame, call: Any, schema: str | sql.StructType) -> DataFrame:
    with warnings.catch_warnings():
        # A warning about features of pandas that are not used here.
        warnings.filterwarnings("ignore", PANDAS_WARNING, FutureWarning)
        return frame.mapInArrow(call, schema)


def _with_plain_times(df: DataFrame, options: WriteOptions) -> DataFrame:
    """The rows with dates and times without zone as timestamps, of the session's zone."""
    times = (sql.DateType, sql.TimestampNTZType)
    cast = {
        field.name: f.col(f"`{field.name}`").cast("timestamp")
        for field in df.schema.fields
        if isinstance(field.dataType, times)
    }
    return df.withColumns(cast) if cast else df


def _labels(
    frame: DataFrame, dims: Sequence[str], columns: pa.Schema
) -> dict[str, npt.NDArray[Any]]:
    """The distinct labels of the rows, ascending; O(axis) on the driver."""
    found: dict[str, npt.NDArray[Any]] = {}
    if not dims:
        return found
    chosen = frame.select(*(f"`{dim}`" for dim in dims))
    schema = sql.StructType([*chosen.schema.fields, sql.StructField(AXIS, sql.IntegerType())])
    for field in schema.fields:
        field.nullable = True
    table = _mapped(chosen, distinct_labels, schema).distinct().toArrow()
    for number, dim in enumerate(dims):
        mine = table.filter(pa.array(table[AXIS].to_numpy() == number))
        found[dim] = distinct(dim, mine[dim].combine_chunks().cast(columns.field(dim).type))
    return found


def distinct(dim: str, column: pa.Array) -> npt.NDArray[Any]:
    """The labels in a column, each once, ascending.

    Raises
    ------
    InvalidArgumentError
        If some are missing.
    """
    labels = to_numpy(column.drop_null())
    lacks = "NULL" if column.null_count else ""
    if labels.dtype.kind == "f" and np.isnan(labels).any():
        lacks = "NaN"
    if lacks:
        raise InvalidArgumentError(f"rows have {lacks} in {dim!r}, so their cells are not known")
    return np.unique(labels)


def _smallest_box(frame: DataFrame, begun: Begun) -> Box | None:
    """The smallest box of cells that holds the rows; None if there are no rows."""
    plan = begun.plan
    chosen = frame.select(*(f"`{axis.name}`" for axis in plan.along))
    rows = _checked(_mapped(chosen, partial(cell_bounds, plan), _BOUNDS))
    if not rows:
        return None
    lo, hi = (np.array([row[end] for row in rows], np.int64) for end in ("lo", "hi"))
    return Box(tuple(lo.min(axis=0).tolist()), tuple((hi.max(axis=0) + 1).tolist()))


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise an error of this package that ended a task as itself, without Spark's account of it."""
    try:
        yield
    except PythonException as error:
        found = re.findall(r"zarr_manifests\.errors\.(\w+): (.*)", str(error))
        kind = getattr(errors, found[-1][0], None) if found else None
        if kind is None:
            raise
        raise kind(found[-1][1]) from None
