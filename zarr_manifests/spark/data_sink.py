"""Writing through the data source: `df.write`, `INSERT INTO` and `writeStream`.

A data source's tasks get rows in any order, and cannot know where new labels go. So each task
spools its rows as they are, in a fork of a session that never commits, and reports where they are.
The commit runs in one process, without a Spark session. It reads the rows back piece by piece,
gathers their cells by bin, and writes one bin after the other. Invariants:

- Only `commit` commits, once; `abort` deletes nothing.
- No snapshot refers to what is spooled, so the next collection that is due removes it.
- Memory is bounded by `write.buffer-bytes`: beyond that, cells are spooled again, by bin.
- A batch of a stream is a transaction of its query, so it lands once however often it comes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import feather
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType
from zarr.core.buffer import default_buffer_prototype

from zarr_manifests import repositories
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box
from zarr_manifests.planning.conflict.transactions import Txn
from zarr_manifests.repository import Repository
from zarr_manifests.session import Fork
from zarr_manifests.spark.cell_writer import WritePlan, share_cells, write_cells
from zarr_manifests.spark.checks import check_shared
from zarr_manifests.spark.dataframes import (
    QUERY_ID,
    WriteReport,
    batch_txn,
    columns_as_there,
    write_rows,
)
from zarr_manifests.spark.options import taken, write_options
from zarr_manifests.spark.plan import SparkFacts
from zarr_manifests.spark.tasks import PICKLE
from zarr_manifests.spark.write_target import WriteOptions, plan_write
from zarr_manifests.versions import HEADS

__all__ = ["BatchSink", "Sink", "Spooled", "StreamSink"]

_LOG = logging.getLogger(__name__)
_PIECE_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """What is written to, and how; it can be pickled.

    Parameters
    ----------
    repository : Repository
        The repository.
    branch : str
        The branch.
    columns : pyarrow.Schema
        The columns of the rows.
    options : WriteOptions
        The arrays, and how rows become their cells.
    message : str, optional
        The message of the commit.
    txn_app_id : str, optional
        The application of the transaction; for a stream, instead of its query.
    txn_version : int, optional
        The version of the transaction; None for a stream.
    """

    repository: Repository
    branch: str
    columns: pa.Schema
    options: WriteOptions
    message: str | None = None
    txn_app_id: str | None = None
    txn_version: int | None = None

    @classmethod
    def of(
        cls, given: Mapping[str, str], schema: StructType, *, overwrite: bool, facts: SparkFacts
    ) -> Sink:
        """What options of a write, as Spark passes them on, ask for.

        Times of its region without a zone are in the session's.

        Raises
        ------
        ManifestsError
            As for `zarr_manifests.spark.write_dataframe`, as far as rows need not be known.
        """
        location, arguments = write_options(given)
        if ("txn_app_id" in arguments) != ("txn_version" in arguments):
            raise InvalidArgumentError("options txn-app-id and txn-version go together")
        if overwrite:
            # As everywhere in Spark: what has no row is not there afterwards.
            arguments.pop("append_dim", None)  # of a view that rows are appended to, too
            arguments = {"mode": "overwrite-region"} | arguments
        sink = cls._of(location, arguments, schema, facts)
        sink.check()
        return sink

    @classmethod
    def of_stream(cls, given: Mapping[str, str], schema: StructType, *, facts: SparkFacts) -> Sink:
        """What options of a stream's sink ask for.

        Raises
        ------
        ManifestsError
            As for `of`.
        """
        location, arguments = write_options(given)
        if "txn_version" in arguments:
            raise InvalidArgumentError(
                "a stream numbers its batches itself: leave out the option txn-version"
            )
        # What an earlier batch has brought stays, where this one has no row.
        return cls._of(location, {"missing": "keep"} | arguments, schema, facts)

    @classmethod
    def _of(
        cls, location: str, arguments: dict[str, Any], schema: StructType, facts: SparkFacts
    ) -> Sink:
        opening = taken(arguments, ("virtual-containers", "authorize"))
        storage_options = arguments.pop("storage_options", None)
        repository = repositories.open(location, **opening, storage_options=storage_options)
        check_shared(repository.storage)
        if "dims" not in arguments:
            raise InvalidArgumentError(
                "the option dims is missing: name the columns that locate the cell of a row"
            )
        columns = to_arrow_schema(schema, timezone="UTC")
        for column in columns:
            if column.type in (pa.timestamp("us"), pa.date32()):
                raise InvalidArgumentError(
                    f"the column {column.name!r} has no time zone, so its values are not "
                    "exact times: cast it to timestamp"
                )
        own = taken(arguments, ("message", "txn-app-id", "txn-version"))
        branch, target = arguments.pop("branch", "main"), arguments.pop("group", "/")
        options = WriteOptions(target=target, max_tasks=1, time_zone=facts.time_zone, **arguments)
        with repository.readonly_session(HEADS + branch) as session:
            names = columns_as_there(columns.names, session, options, facts)
        columns = pa.schema([f.with_name(n) for f, n in zip(columns, names, strict=True)])
        return cls(repository=repository, branch=branch, columns=columns, options=options, **own)

    def check(self) -> None:
        """Try what can be tried before there are rows; nothing is written.

        Raises
        ------
        ManifestsError
            As for `zarr_manifests.spark.write_dataframe`.
        """
        with self.repository.writable_session(self.branch) as session:
            plan_write(session, self.options, _SpooledRows(self, []))

    def spool(self, batches: Iterable[pa.RecordBatch]) -> Spooled:
        """Spool the rows of a task."""
        context = TaskContext.get()
        query_id = None if context is None else context.getLocalProperty(QUERY_ID)
        spooled = Spooled(self.fork(), query_id=query_id)
        names = [] if self.options.append_dim is None else [self.options.append_dim]
        waiting: list[pa.RecordBatch] = []
        for batch in batches:
            if not batch.num_rows:
                continue
            waiting.append(batch.rename_columns(self.columns.names))
            for name in names:
                known = spooled.labels.get(name, waiting[-1].column(name)[:0])
                parts = pa.chunked_array([known, waiting[-1].column(name)])
                spooled.labels[name] = parts.unique()
            if sum(each.nbytes for each in waiting) >= _PIECE_BYTES:
                spooled.put(_serialized(waiting))
                waiting = []
        if waiting:
            spooled.put(_serialized(waiting))
        return spooled

    def fork(self) -> Fork:
        """A fork of a session that never commits, to spool to."""
        with self.repository.writable_session(self.branch) as session:
            return session.fork()

    def commit(self, spooled: Sequence[Spooled], txn: Txn | None) -> WriteReport:
        """Write the rows to chunks and commit them, on top of what others have committed."""
        rows = _SpooledRows(self, spooled)
        how: Any = {"branch": self.branch, "message": self.message, "txn": txn}
        report = write_rows(self.repository, self.options, lambda _: rows, **how)
        _LOG.info("%s: %s", self.repository.storage.url, report)
        return report


# --- spooled rows ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spooled(WriterCommitMessage):
    """Pieces of rows or cells in a fork; for rows, what a task tells the commit.

    Parameters
    ----------
    fork : Fork
        The fork; nobody may merge it.
    pieces : list of str
        The names of the pieces.
    labels : mapping of str to Array
        Distinct values of the column that is appended along.
    query_id : str, optional
        The streaming query that the task ran for.
    """

    fork: Fork
    pieces: list[str] = field(default_factory=list)
    labels: dict[str, pa.Array] = field(default_factory=dict)
    query_id: str | None = None

    def put(self, data: bytes) -> str:
        """Store a piece; its name."""
        self.pieces.append(f"spool/{len(self.pieces)}")
        buffer = default_buffer_prototype().buffer.from_bytes(data)
        self.fork.store.set_sync(self.pieces[-1], buffer)
        return self.pieces[-1]

    def piece(self, name: str) -> bytes:
        """A piece.

        Raises
        ------
        FencedError
            If a collection of garbage has removed it, since its grace is shorter than the write.
        """
        found = self.fork.store.get_sync(name)
        assert found is not None
        return found.to_bytes()


def _serialized(batches: Sequence[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    feather.write_feather(pa.Table.from_batches(batches), sink, "lz4")
    return bytes(sink.getvalue())


@dataclass(frozen=True, slots=True)
class _SpooledRows:
    """The rows of all tasks, which this process writes."""

    sink: Sink
    spooled: Sequence[Spooled]

    @property
    def columns(self) -> pa.Schema:
        """The columns of the rows."""
        return self.sink.columns

    def labels(self, dims: Sequence[str]) -> dict[str, pa.Array]:
        """The distinct values of these columns."""
        found = {}
        for dim in dims:
            kind = self.columns.field(dim).type
            parts = [one.labels[dim].cast(kind) for one in self.spooled if one.pieces]
            found[dim] = pa.chunked_array(parts, kind).unique()
        return found

    def region(self, plan: WritePlan) -> Box:
        """All cells."""
        return plan.bins.region

    def write(self, plan: WritePlan, fork: Fork) -> list[tuple[Fork, int]]:
        """Write the cells of a plan."""
        return [write_cells(plan, fork, self._by_bin(plan))]

    def _by_bin(self, plan: WritePlan) -> Iterator[tuple[int, bytes | None]]:
        """Cells of one bin after the other, with at most so many bytes of them in memory."""
        held: dict[int, list[bytes]] = defaultdict(list)
        pieces: dict[int, list[str]] = defaultdict(list)
        again = Spooled(self.sink.fork())
        nbytes = 0
        for number, cells in share_cells(plan, self._batches()):
            held[number].append(cells)
            nbytes += len(cells)
            if nbytes > self.sink.options.buffer_bytes:
                for waiting, several in held.items():
                    pieces[waiting].append(again.put(PICKLE.dumps(several)))
                held.clear()
                nbytes = 0
        for number in range(len(plan.bins)):
            yield number, None  # bins without rows are written, too
            for name in pieces[number]:
                yield from ((number, cells) for cells in PICKLE.loads(again.piece(name)))
            yield from ((number, cells) for cells in held.pop(number, ()))

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """The rows; a piece at a time is in memory."""
        for one in self.spooled:
            for name in one.pieces:
                yield from feather.read_table(pa.BufferReader(one.piece(name))).to_batches()


# --- Spark's writers -------------------------------------------------------------------------


class _Spooling:
    """What the tasks of both writers do.

    Parameters
    ----------
    sink : Sink
        Where to.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Spool the rows of a task."""
        return self._sink.spool(iterator)

    def abort(self, messages: list[WriterCommitMessage | None], *batch: int) -> None:
        """Leave what tasks have spooled to the next collection; a commit may have landed."""
        which = f"batch {batch[0]} of a stream" if batch else "a write"
        _LOG.warning("%s to %s has failed", which, self._sink.repository.storage.url)


class BatchSink(_Spooling, DataSourceArrowWriter):
    """Writes the rows of a DataFrame in one commit."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the rows of all tasks."""
        app, version = self._sink.txn_app_id, self._sink.txn_version
        txn = None if app is None or version is None else Txn(app, version)
        self._sink.commit(_spooled(messages), txn)


class StreamSink(_Spooling, DataSourceStreamArrowWriter):
    """Writes the batches of a stream, each in one commit and once.

    Spark makes it anew for each commit, which then knows only the number of the batch. So tasks
    report which query they run for.
    """

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit the rows of a batch, unless that was done before."""
        spooled = _spooled(messages)
        query_id = next((one.query_id for one in spooled if one.query_id), None)
        self._sink.commit(spooled, batch_txn(self._sink.txn_app_id, query_id, batchId))


def _spooled(messages: Iterable[WriterCommitMessage | None]) -> list[Spooled]:
    return [message for message in messages if isinstance(message, Spooled)]
