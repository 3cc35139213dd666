"""Writing the rows of a Spark DataFrame to the cells of arrays, in one commit.

The driver prepares a session, and tasks write chunks to forks of it (`cell_writer`). The driver
merges the forks and commits. It never collects rows, only the labels that are to be appended or
made. If another commit has changed what an append is planned on, all of it is done again.

Invariant: wrong data is reported in a row, not by an exception, since Spark would try the task
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import batched
from typing import Any, Final, Literal

import pyarrow as pa
from pyspark.errors import PySparkAttributeError
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as sql
from pyspark.sql.pandas.types import to_arrow_schema

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.conflict.admission import Txn
from zarr_manifests.repositories import write_into
from zarr_manifests.repository import Repository
from zarr_manifests.session import Fork
from zarr_manifests.spark.cell_writer import WritePlan, share_cells, write_cells
from zarr_manifests.spark.job import options_of
from zarr_manifests.spark.plan import Location, SparkFacts, check_shared, shared_repository
from zarr_manifests.spark.tasks import PICKLE, mapped, results
from zarr_manifests.spark.write_target import (
    QUERY_ID,
    WriteOptions,
    WriteReport,
    batch_txn,
    write_rows,
)
from zarr_manifests.storage.url import storage_of

_WRONG: Final = -1
"""In place of the number of a bin: what is wrong with the rows."""
_GROUPED: Final = "#grouped"
_PIECES: Final = 16
"""How many pieces of cells are handed to Spark at a time."""


def write_dataframe(
    df: DataFrame,
    url: Location,
    target: str,
    *,
    dims: Sequence[str],
    mode: Literal["append", "overwrite-region", "create"] = "append",
    append_dim: str | None = None,
    region: Mapping[str, Any] | None = None,
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
    encoding : mapping, optional
        With `create`: encodings of the new variables, such as `{"t": {"chunks": (10, 90, 90)}}`.
        Existing coordinates of the group are used as they are; the others are the distinct labels
        of the rows, ascending.
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
    options = options_of(WriteOptions, locals())
    into = partial(_write_frame, df, options, options.txn())

    if isinstance(url, Repository):
        return into(shared_repository(url, storage_options))
    storage = storage_of(url, storage_options)
    check_shared(storage)
    return write_into(storage, None, into, make=mode == "create" and branch == "main")


def foreach_batch(
    url: Location,
    target: str,
    *,
    dims: Sequence[str],
    missing: Literal["fill", "keep", "error"] = "keep",
    txn_app_id: str | None = None,
    message: str | None = None,
    branch: str = "main",
    on_report: Callable[[int, WriteReport], None] | None = None,
    storage_options: Mapping[str, object] | None = None,
    **options: Any,
) -> Callable[[DataFrame, int], None]:
    """A function for `writeStream.foreachBatch` that writes each batch in one commit, exactly once.

    Each batch is a transaction of the query: its number is kept in the snapshots. A batch that
    comes again is not written again, whatever log of the checkpoint was lost, and whoever else runs
    on the same checkpoint. A batch without rows is committed too.

    Parameters
    ----------
    url, target, dims, branch
        As for `write_dataframe`.
    missing : "fill", "keep" or "error", default "keep"
        As for `write_dataframe`. With `keep`, a later batch can bring the rest of a chunk, or cells
        of labels that earlier batches have appended.
    txn_app_id : str, optional
        The name under which the number of the batch is kept, instead of the id of the query. Spark
        Connect does not tell the id, so it is needed there.
    message : str, optional
        The message of the commits; by default it names the batch.
    on_report : callable, optional
        Called with the number of each batch, and what was written.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.
    **options : optional
        `mode`, `append_dim`, `region`, `duplicates`, `order_by`, `tolerance`, `metadata`,
        `statistics`, `buffer_bytes` and `max_tasks` of `write_dataframe`.

    Returns
    -------
    callable
        To be given to `foreachBatch`.

    Raises
    ------
    InvalidArgumentError
        If options contradict each other.
    NotARepositoryError
        If there is no repository.
    UnsupportedStorageError
        If other processes cannot reach it (`memory://`).

    Examples
    --------
    >>> from zarr_manifests.spark import foreach_batch
    >>> write = foreach_batch(  # doctest: +SKIP
    ...     "winds", "/", dims=["time", "lat", "lon"], append_dim="time"
    ... )
    >>> query = (  # doctest: +SKIP
    ...     rows.writeStream.foreachBatch(write).option("checkpointLocation", "winds-in").start()
    ... )
    """
    repository = shared_repository(url, storage_options)
    own: Any = {"txn_app_id": txn_app_id, "message": message, "branch": branch}
    asked = WriteOptions(target=target, dims=dims, missing=missing, **own, **options)
    if asked.txn_version is not None:
        raise InvalidArgumentError("a stream numbers its batches itself: leave out txn_version")

    def write(rows: DataFrame, number: int) -> None:
        query_id = None
        with suppress(PySparkAttributeError):  # Spark Connect: the context is in another process
            query_id = rows.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
        txn = batch_txn(txn_app_id, query_id, number)
        how = asked if message is not None else replace(asked, message=f"batch {number}")
        rows.persist()  # it is computed for the labels, too
        try:
            report = _write_frame(rows, how, txn, repository)
        finally:
            rows.unpersist()
        if on_report is not None:
            on_report(number, report)

    return write


# --- rows of a DataFrame ---------------------------------------------------------------------


def _write_frame(
    df: DataFrame, options: WriteOptions, txn: Txn | None, repository: Repository
) -> WriteReport:
    facts = SparkFacts.of(df.sparkSession)
    options = replace(options, time_zone=facts.time_zone)
    return write_rows(repository, options, _FrameRows(df), txn, facts.parallelism)


class _FrameRows:
    """The rows of a DataFrame, whose tasks write them.

    Dates and times without zone are timestamps, of the session's zone.
    """

    def __init__(self, df: DataFrame) -> None:
        times = (sql.DateType, sql.TimestampNTZType)
        cast = {
            field.name: f.col(f"`{field.name}`").cast("timestamp")
            for field in df.schema.fields
            if isinstance(field.dataType, times)
        }
        self.frame = df.withColumns(cast) if cast else df
        self.columns = to_arrow_schema(self.frame.schema, timezone="UTC")

    def labels(self, dims: Sequence[str]) -> dict[str, pa.Array]:
        """The distinct values of these columns, in one pass; O(axis) on the driver."""
        if not dims:
            return {}
        columns = [f.col(f"`{dim}`") for dim in dims]
        grouped = self.frame.groupingSets([[each] for each in columns], *columns)
        table = grouped.agg(f.grouping_id().alias(_GROUPED)).toArrow()
        found = {}
        for number, dim in enumerate(dims):
            others = 2 ** len(dims) - 1 - 2 ** (len(dims) - 1 - number)
            mine = table.filter(pa.array(table[_GROUPED].to_numpy() == others))
            found[dim] = mine[dim].combine_chunks().cast(self.columns.field(dim).type)
        return found

    def fill(self, plan: WritePlan, fork: Fork) -> list[tuple[Fork, int]]:
        """Write the cells of a plan; what each task returns."""
        bins, rows = len(plan.bins), self.frame.select(*(f"`{name}`" for name in plan.columns))
        shares = mapped(rows, partial(_shares, plan), "bin bigint, cells binary")
        # Every bin gets a mark, so that those without rows are written, too.
        marks = self.frame.sparkSession.range(0, bins, 1, 1)
        marks = marks.selectExpr("id AS bin", "CAST(NULL AS binary) AS cells")
        task = f.expr(f"CAST(greatest(bin, 0) * {plan.tasks} div {bins} AS int)")
        parted = shares.union(marks).repartitionById(plan.tasks, task)
        if bins > plan.tasks:
            parted = parted.sortWithinPartitions("bin")
        return results(parted, lambda batches: write_cells(plan, fork, _pieces(batches)))


def _shares(plan: WritePlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What `share_cells` yields, as rows; or, in one more, what is wrong."""
    try:
        for pieces in batched(share_cells(plan, batches), _PIECES):
            yield _rows(pieces)
    except InvalidArgumentError as error:
        yield _rows([(_WRONG, PICKLE.dumps(error))])


def _rows(pieces: Sequence[tuple[int, bytes]]) -> pa.RecordBatch:
    numbers, cells = zip(*pieces, strict=True)
    columns = [pa.array(numbers, pa.int64()), pa.array(cells, pa.binary())]
    return pa.record_batch(columns, ["bin", "cells"])


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Any]]:
    """What `_shares` has made rows of; raises what is wrong."""
    for batch in batches:
        for number, cells in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
            data = cells.as_buffer() if cells.is_valid else None
            if number == _WRONG:
                raise PICKLE.loads(data)
            yield number, data
