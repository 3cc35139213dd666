"""Writing through the data source: `df.write`, `INSERT INTO` and `writeStream`.

Tasks get rows in any order and spool them (`zarr_manifests.spark.spool`). The commit runs in one
process, without a Spark session. It gets the labels from the tasks, gathers the cells of the rows
by bin, and writes one bin after the other. Invariants:

- Only `commit` commits, once; `abort` deletes nothing.
- Memory is bounded by `write.buffer-bytes`: beyond that, cells are spooled again, by bin.
- A batch of a stream is a transaction of its query, so it lands once however often it comes.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from zarr_manifests import repositories
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.conflict.transactions import Txn
from zarr_manifests.repository import Repository, containers_of
from zarr_manifests.session import Session
from zarr_manifests.spark.cell_shares import SHARES, share_cells
from zarr_manifests.spark.cell_values import to_numpy
from zarr_manifests.spark.cell_writer import write_cells
from zarr_manifests.spark.checks import check_shared
from zarr_manifests.spark.options import write_options
from zarr_manifests.spark.plan import SparkFacts
from zarr_manifests.spark.spool import Spool, SpooledRows, labels_of, spool_rows
from zarr_manifests.spark.write_dataframe import (
    CountedCells,
    TipCheck,
    columns_as_there,
    distinct,
    landed,
)
from zarr_manifests.spark.write_plan import WriteOptions, WritePlan, WriteReport
from zarr_manifests.spark.write_target import Target, begin
from zarr_manifests.storage import Storage
from zarr_manifests.versions import HEADS
from zarr_manifests.virtual.containers import VirtualContainer

__all__ = ["QUERY_ID", "BatchSink", "Sink", "StreamSink", "app_of", "batch_txn"]

_LOG = logging.getLogger(__name__)
QUERY_ID: Final = "sql.streaming.queryId"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """What is written to, and how; it can be pickled.

    Parameters
    ----------
    storage : Storage
        The repository's storage.
    containers : mapping
        The places of its virtual chunks.
    branch : str
        The branch.
    columns : pyarrow.Schema
        The columns of the rows.
    options : WriteOptions
        The arrays, and how rows become their cells.
    message : str, optional
        The message of the commit.
    app : str, optional
        The application of the transaction; for a stream, instead of its query.
    version : int, optional
        The version of the transaction; None for a stream.
    """

    storage: Storage
    containers: Mapping[str, VirtualContainer]
    branch: str
    columns: pa.Schema
    options: WriteOptions
    message: str | None = None
    app: str | None = None
    version: int | None = None

    @classmethod
    def of(
        cls,
        given: Mapping[str, str],
        schema: StructType,
        *,
        overwrite: bool,
        facts: SparkFacts,
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
            arguments = {"mode": "overwrite-region", "region": {}} | arguments
        sink = cls._of(location, arguments | {"time_zone": facts.time_zone}, schema, facts)
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
        repository = repositories.open(
            location,
            virtual_containers=arguments.pop("virtual_containers", None),
            authorize=arguments.pop("authorize", ()),
            storage_options=arguments.pop("storage_options", None),
        )
        check_shared(repository.storage)
        if "dims" not in arguments:
            raise InvalidArgumentError(
                "the option dims is missing: name the columns that locate the cell of a row"
            )
        columns = to_arrow_schema(schema, timezone="UTC")
        for field in columns:
            if field.type in (pa.timestamp("us"), pa.date32()):
                raise InvalidArgumentError(
                    f"the column {field.name!r} has no time zone, so its values are not "
                    "exact times: cast it to timestamp"
                )
        branch, message = arguments.pop("branch", "main"), arguments.pop("message", None)
        app, version = (arguments.pop(name, None) for name in ("txn_app_id", "txn_version"))
        options = WriteOptions(target=arguments.pop("group", "/"), max_tasks=1, **arguments)
        with repository.readonly_session(HEADS + branch) as session:
            names = columns_as_there(columns.names, session, options, facts)
        return cls(
            storage=repository.storage,
            containers=containers_of(repository),
            branch=branch,
            columns=pa.schema([f.with_name(n) for f, n in zip(columns, names, strict=True)]),
            message=message,
            app=app,
            version=version,
            options=options,
        )

    @property
    def txn(self) -> Txn | None:
        """The transaction of a batch write."""
        if self.app is None or self.version is None:
            return None
        return Txn(self.app, self.version)

    def repository(self) -> Repository:
        """The repository, opened."""
        return repositories.open(self.storage, virtual_containers=self.containers)

    def check(self) -> None:
        """Try what can be tried before there are rows; nothing is written.

        Raises
        ------
        ManifestsError
            As for `zarr_manifests.spark.write_dataframe`.
        """
        with self.repository().writable_session(self.branch) as session:
            target = Target.of(session, self.options, self.columns.names)
            none = {
                dim: to_numpy(pa.array([], self.columns.field(dim).type))
                for dim in target.new_labels(session, self.options)
            }
            begin(session, target, self.options, self.columns, none)

    def spool(self, batches: Iterable[pa.RecordBatch]) -> SpooledRows:
        """Spool the rows of a task."""
        wanted = [] if self.options.append_dim is None else [self.options.append_dim]
        named = (batch.rename_columns(self.columns.names) for batch in batches)
        return spool_rows(self.repository(), self.branch, named, wanted)

    def commit(self, spooled: Sequence[SpooledRows], txn: Txn | None) -> WriteReport:
        """Write the rows to chunks and commit them, on top of what others have committed."""
        write = partial(self._write, spooled)
        repository = self.repository()
        report = landed(repository, self.options, write, self.branch, self.message, None, txn)
        _LOG.info("%s: %s", self.storage.url, report)
        return report

    def _write(
        self, spooled: Sequence[SpooledRows], session: Session
    ) -> tuple[TipCheck, CountedCells]:
        """Write the rows to a session; what refuses another tip, and what was counted."""
        target = Target.of(session, self.options, self.columns.names)
        labels = {
            dim: distinct(dim, labels_of(spooled, dim, self.columns.field(dim).type))
            for dim in target.new_labels(session, self.options)
        }
        begun = begin(session, target, self.options, self.columns, labels)
        if not len(begun.plan.bins):
            return begun.check_tip, CountedCells()
        counts = CountedCells(0, len(spooled))
        forks: Any = CloudPickleSerializer()  # type: ignore[no-untyped-call]
        shares = self._shares(begun.plan, spooled)
        for batch in write_cells(begun.plan, session.fork(), shares):
            (row,) = batch.to_pylist()
            if row["failure"] is not None:
                raise InvalidArgumentError(row["failure"])
            session.merge(forks.loads(row["fork"]))
            counts = CountedCells(row["cells"], len(spooled))
        return begun.check_tip, counts

    def _shares(self, plan: WritePlan, spooled: Sequence[SpooledRows]) -> Iterator[pa.RecordBatch]:
        batches = itertools.chain.from_iterable(one.batches() for one in spooled)
        with self.repository().writable_session(self.branch) as session:
            spool = Spool(session.fork())
        return _by_bin(share_cells(plan, batches), spool, self.options.buffer_bytes)


def _by_bin(shares: Iterable[pa.RecordBatch], spool: Spool, most: int) -> Iterator[pa.RecordBatch]:
    """The same cells, one bin after the other, with at most so many bytes of them in memory."""
    held: dict[int, list[bytes]] = defaultdict(list)
    spooled: dict[int, list[str]] = defaultdict(list)
    nbytes = 0
    for batch in shares:
        for row in batch.to_pylist():
            if row["failure"] is not None:
                yield batch
                return
            held[row["bin"]].append(row["cells"])
            nbytes += len(row["cells"])
        if nbytes > most:
            for number, waiting in held.items():
                name = f"{number}-{len(spooled[number])}"
                spool.put_batches(name, [_share(number, waiting)])
                spooled[number].append(name)
            held.clear()
            nbytes = 0
    yield _share(None, [None])  # a task runs also where there are no rows
    for number in sorted({*held, *spooled}):
        for name in spooled.get(number, ()):
            yield from spool.batches(name)
        if number in held:
            yield _share(number, held.pop(number))


def _share(number: int | None, cells: Sequence[bytes | None]) -> pa.RecordBatch:
    count = len(cells)
    columns = [0] * count, [number] * count, list(cells), [None] * count
    arrays = [pa.array(each, field.type) for each, field in zip(columns, SHARES, strict=True)]
    return pa.record_batch(arrays, schema=SHARES)


@dataclass(frozen=True, slots=True)
class _Reported(WriterCommitMessage):
    """What a task tells the commit: its rows, and the query that it ran for."""

    rows: SpooledRows
    query_id: str | None


class BatchSink(DataSourceArrowWriter):
    """Writes the rows of a DataFrame in one commit.

    Parameters
    ----------
    sink : Sink
        Where to.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Spool the rows of a task."""
        return _spooled(self._sink, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the rows of all tasks."""
        self._sink.commit([one.rows for one in _reported(messages)], self._sink.txn)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave what tasks have spooled to the next collection; a commit may have landed."""
        _LOG.warning("a write to %s has failed", self._sink.storage.url)


class StreamSink(DataSourceStreamArrowWriter):
    """Writes the batches of a stream, each in one commit and once.

    Spark makes it anew for each commit, which then knows only the number of the batch. So tasks
    report which query they run for.

    Parameters
    ----------
    sink : Sink
        Where to.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Spool the rows of a task."""
        return _spooled(self._sink, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit the rows of a batch, unless that was done before."""
        reported = _reported(messages)
        app = self._sink.app or next(
            (app_of(one.query_id) for one in reported if one.query_id), None
        )
        if app is None:
            raise InvalidArgumentError(
                "the id of the query is not known, so its batches cannot be told from those "
                "of other queries; name it by the option txn-app-id"
            )
        self._sink.commit([one.rows for one in reported], batch_txn(app, batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Leave what tasks have spooled to the next collection; the commit may have landed."""
        _LOG.warning("batch %d of a stream to %s has failed", batchId, self._sink.storage.url)


def app_of(query_id: str) -> str:
    """The application whose transactions are the batches of a streaming query.

    Examples
    --------
    >>> from zarr_manifests.spark.data_sink import app_of
    >>> app_of("6ba7b810-9dad-11d1-80b4-00c04fd430c8")
    'spark:6ba7b810-9dad-11d1-80b4-00c04fd430c8'
    """
    return f"spark:{query_id}"


def batch_txn(app: str, number: int) -> Txn:
    """A batch of a stream as a transaction, which comes right after the batch before.

    Examples
    --------
    >>> from zarr_manifests.spark.data_sink import batch_txn
    >>> batch_txn("hourly", 7)
    Txn(app='hourly', version=7, after=6)
    """
    return Txn(app, number, number - 1)


def _spooled(sink: Sink, batches: Iterator[pa.RecordBatch]) -> _Reported:
    context = TaskContext.get()
    query_id = None if context is None else context.getLocalProperty(QUERY_ID)
    return _Reported(sink.spool(batches), query_id)


def _reported(messages: Iterable[WriterCommitMessage | None]) -> list[_Reported]:
    return [message for message in messages if isinstance(message, _Reported)]
