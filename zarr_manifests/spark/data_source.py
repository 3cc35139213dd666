"""The data source `zarr_manifests`: `spark.read.format`, `df.write.format`, and views in SQL.

Spark makes a data source in a process of its own, asks it for its schema, pickles it, and plans the
read in another process. So `ManifestsDataSource` plans when it is asked for its schema, which pins
the snapshot; all later steps take that plan. It is the plan that `read` makes, and the same tasks
run it. If a schema is given, Spark makes the data source only when a query runs, and the snapshot
would be that of the query; so none may be given.

Filters are not pushed down: Spark keeps one plan for each relation, so a filter of one query would
take rows from another (decision 18 in `docs/adr`).

A write's tasks get rows in any order, and cannot know where new labels go. So each task spools its
rows as they are, in a fork of a session that never commits, and reports where they are. The commit
runs in one process, without a Spark session. It reads the rows back piece by piece, gathers their
cells by bin, and writes one bin after the other. Invariants:

- Only `commit` commits, once; `abort` deletes nothing.
- No snapshot refers to what is spooled, so the next collection that is due removes it.
- Memory is bounded by `write.buffer-bytes`: beyond that, cells are spooled again, by bin.

The options of the data source, from the text that Spark passes on to arguments of Python
-----------------------------------------------------------------------------------------

Names are those that Iceberg uses. As with all options of Spark, upper and lower case are the same.
Options of the storage begin with `storage.`, such as `storage.region`. An option that is unknown,
has an impossible value or contradicts another one is an error, because an option without effect
would give wrong rows.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar, Final

import pyarrow as pa
from pyarrow import feather
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType
from zarr.core.buffer import default_buffer_prototype

from zarr_manifests import repositories
from zarr_manifests.config import duration_of
from zarr_manifests.errors import ConfigError, InvalidArgumentError
from zarr_manifests.planning.conflict import Txn
from zarr_manifests.repository import Repository
from zarr_manifests.session import Fork
from zarr_manifests.spark.cell_writer import WritePlan, share_cells, write_cells
from zarr_manifests.spark.dataframes import WriteOptions, WriteReport, plan_write, write_rows
from zarr_manifests.spark.job import Job, check_shared, with_lease
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_changes, plan_read
from zarr_manifests.spark.stream import ChangeStream, StreamOptions, same_columns
from zarr_manifests.spark.tasks import PICKLE
from zarr_manifests.spark.worker import JobReader, briefly
from zarr_manifests.storage.url import parse_options
from zarr_manifests.texts import hyphened, known_as, shown

type _Options = Mapping[str, Callable[[str], Any]]
"""What makes an argument of an option's text, or raises `ValueError` with what it expects."""

_STORAGE: Final = "storage."


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    return value.strip()


def _names(value: str) -> list[str]:
    """Names apart from each other by commas."""
    return [_text(name) for name in value.split(",")]


def _json(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error


def _region(value: str) -> dict[str, Any]:
    """By column, a closed range `[lo, hi]` of labels, or one label."""
    given = _object('{"lat": [-30, 30]}')(value)
    return {dim: tuple(ends) if isinstance(ends, list) else ends for dim, ends in given.items()}


def _object(example: str) -> Callable[[str], dict[str, Any]]:
    def read(value: str) -> dict[str, Any]:
        found = _json(value)
        if not isinstance(found, dict):
            raise ValueError(f"expected a JSON object, as in {example}")
        return found

    return read


def _count(value: str, least: int = 1) -> int:
    # int() would accept signs, underscores and digits of other scripts.
    if not (value.isascii() and value.isdigit() and len(value) < 19 and int(value) >= least):
        raise ValueError(f"expected a whole number from {least} on")
    return int(value)


def _one_of(*words: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value.lower() not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}")
        return value.lower()

    return read


def _flag(value: str) -> bool:
    return _one_of("true", "false")(value) == "true"


def _duration(value: str, advice: str = "") -> timedelta:
    found = duration_of(value)
    if not found:
        raise ValueError(f"expected a duration such as 90s, 36h or 7d{advice}")
    return found


def _lease(value: str) -> timedelta | None:
    return None if value.strip().lower() == "none" else _duration(value, ", or none")


_PLACE: Final[_Options] = {
    "group": _text,
    "branch": _text,
    "virtual-containers": _object('{"era5": "s3://bucket/era5"}'),
    "authorize": _names,
}
"""The options of reads and writes."""
# What a view may have that rows are inserted into, and which says nothing about where they go.
_EITHER: Final[_Options] = {
    "variables": _names,
    "nan": _one_of("null", "keep", "drop"),
    "lease": _lease,
}
_READ: Final[_Options] = {
    "version": _text,
    "where": _text,
    "decode-times": _flag,
    "target-rows": _count,
    "max-tasks": _count,
    "layout": _one_of("long", "chunk"),
}
CHANGES: Final[_Options] = {"start-snapshot-id": _text, "end-snapshot-id": _text}
"""The options of the cells that were added between two snapshots."""
STREAM: Final[_Options] = {
    "starting-snapshot": _text,
    "max-commits-per-trigger": _count,
    "streaming-overwrite-mode": _one_of("fail", "added-only"),
    "keep-for": _duration,
}
"""The options that only a stream has."""
_WRITE: Final[_Options] = {
    "dims": _names,
    "append-dim": _text,
    "region": _region,
    "missing": _one_of("fill", "keep", "error"),
    "tolerance": _object('{"lat": 1e-6}'),
    "message": _text,
    "txn-app-id": _text,
    "txn-version": lambda value: _count(value, least=0),
    "write.buffer-bytes": _count,
}
"""The options that only a write has. A view that rows are inserted into has them too."""
_ALL: Final[_Options] = {**_PLACE, **_EITHER, **_READ, **CHANGES, **STREAM, **_WRITE}
# Of each of these, both contradict each other.
_APART: Final = (
    *((change, other) for change in CHANGES for other in ("version", "branch")),
    *(("lease", of_stream) for of_stream in STREAM),
)


def read_options(given: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the location, and the arguments of a read that the options give.

    Options of a write are checked and left out, since a view to insert into has both. Without a
    version, the branch is read.

    Parameters
    ----------
    given : mapping of str to str
        The options as Spark passes them on. `path` is the location.

    Raises
    ------
    InvalidArgumentError
        If there is no location, or options are unknown, malformed or contradict each other; it
        names all of them.

    Examples
    --------
    >>> from zarr_manifests.spark.data_source import read_options
    >>> read_options({"path": "winds", "variables": "u, v", "Target-Rows": "1000"})
    ('winds', {'variables': ['u', 'v'], 'target_rows': 1000})
    >>> read_options({"path": "winds", "target_rows": "1000"})
    Traceback (most recent call last):
        ...
    zarr_manifests.errors.InvalidArgumentError: option 'target_rows' is unknown: did you mean \
target-rows?
    """
    location, arguments, _ = _parsed(given)
    taken(arguments, _WRITE)
    branch = arguments.pop("branch", None)
    return location, arguments if branch is None else {"version": branch} | arguments


def write_options(given: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the location, and the arguments of a write that the options give.

    Parameters
    ----------
    given : mapping of str to str
        The options as Spark passes them on. `path` is the location.

    Raises
    ------
    InvalidArgumentError
        As `read_options`; also if options say what to read.

    Examples
    --------
    >>> from zarr_manifests.spark.data_source import write_options
    >>> write_options({"path": "winds", "dims": "time,lat", "append-dim": "time"})
    ('winds', {'dims': ['time', 'lat'], 'append_dim': 'time'})
    """
    location, arguments, names = _parsed(given)
    reads = [name for name in names if name in {**_READ, **CHANGES, **STREAM}]
    if reads:
        raise InvalidArgumentError(
            f"a write does not take {' and '.join(reads)}, which say what to read"
        )
    taken(arguments, _EITHER)
    return location, arguments


def _parsed(given: Mapping[str, str]) -> tuple[str, dict[str, Any], list[str]]:
    """The location, the arguments, and the names of the options in lower case."""
    texts = {name.lower(): value for name, value in given.items()}
    location = texts.pop("path", "")
    arguments: dict[str, Any] = {}
    faults = []
    if not location:
        faults.append(
            "there is no location: load(url) or save(url) gives it, and in SQL path 'url'"
        )
    of_storage = {name: texts.pop(name) for name in list(texts) if name.startswith(_STORAGE)}
    if of_storage and location:
        try:
            arguments["storage_options"] = parse_options(
                location, {name.removeprefix(_STORAGE): text for name, text in of_storage.items()}
            )
        except ConfigError as error:
            faults += [f"option {_STORAGE}{problem}" for problem in error.problems]
    for name, text in texts.items():
        if name not in _ALL:
            advice = known_as(hyphened(name), _ALL)
            faults.append(f"option {name[:64]!r} is unknown: {advice}")
            continue
        try:
            arguments[_argument(name)] = _ALL[name](text)
        except ValueError as error:
            faults.append(f"option {name!r} cannot be {shown(text)}: {error}")
    for pair in _APART:
        if {*pair} <= texts.keys():
            faults.append(f"options {' and '.join(pair)} contradict each other: give one of them")
    if faults:
        raise InvalidArgumentError("; ".join(faults))
    return location, arguments, list(texts)


def _argument(name: str) -> str:
    return name.removeprefix("write.").replace("-", "_")


def taken(arguments: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Take the arguments that the options of these names give out of those of `read_options`."""
    return {name: arguments.pop(name) for name in map(_argument, names) if name in arguments}


# --- the data source ----------------------------------------------------------------------------


_LOG = logging.getLogger(__name__)
_LEASE: Final = timedelta(days=1)


def register(spark: SparkSession) -> None:
    """Register the data source `zarr_manifests` with a session.

    Afterwards `spark.read.format("zarr_manifests").option(...).load(url)` and
    `CREATE TEMPORARY VIEW v USING zarr_manifests OPTIONS (path 'url', ...)` read repositories, and
    `df.write.format("zarr_manifests").mode("append").option(...).save(url)` writes to them.
    `spark.sql.session.timeZone` counts as it is now; register again after you change it.

    The first query through a data source is slow, since Spark starts processes to plan it. In
    Python, prefer `read`, which is also faster afterwards.

    Parameters
    ----------
    spark : SparkSession
        A Spark session.

    Examples
    --------
    >>> from zarr_manifests.spark import register, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> register(spark)  # doctest: +SKIP
    >>> winds = spark.read.format("zarr_manifests").load("winds")  # doctest: +SKIP
    """
    # Spark's processes do not know the session, so the class tells them what planning needs.
    members = {"facts": SparkFacts.of(spark)}
    spark.dataSource.register(type("ManifestsDataSource", (ManifestsDataSource,), members))


class ManifestsDataSource(DataSource):
    """The variables of a repository, as Spark's data source.

    Parameters
    ----------
    options : mapping of str to str
        As `zarr_manifests.spark.data_source` lists them; `path` is the location.
    """

    facts: ClassVar[SparkFacts] = SparkFacts()

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "zarr_manifests"

    @briefly()
    def schema(self) -> StructType:
        """The columns, as `read` has them."""
        return self._planned[-1].schema

    @cached_property
    def _planned(self) -> tuple[Repository, dict[str, Any], dict[str, Any], Job]:
        """What is read; its options for changes, and for a stream; and the job of its rows."""
        location, arguments = read_options(self.options)
        changes, stream = taken(arguments, CHANGES), taken(arguments, STREAM)
        # A stream holds its own.
        lease = arguments.pop("lease", None if stream else _LEASE)
        repository = _opened(location, arguments)
        options = ReadOptions(**arguments)
        if changes:
            ends = changes.get("start_snapshot_id"), changes.get("end_snapshot_id", "main")
            job = plan_changes(repository, options, self.facts, *ends)
        else:
            job = plan_read(repository, options, self.facts)
        return repository, changes, stream, with_lease(job, lease)

    @briefly()
    def reader(self, schema: StructType) -> JobReader:
        """The tasks of the read.

        Raises
        ------
        InvalidArgumentError
            If the caller has given a schema, or options of a stream.
        """
        if "_planned" not in vars(self):
            raise InvalidArgumentError(
                f"with the schema {schema.simpleString()[:200]}, Spark would choose the snapshot "
                "anew for each query: leave it out, and choose columns by the option variables"
            )
        *_, stream, job = self._planned
        if stream:
            raise InvalidArgumentError(
                f"only a stream takes the options {', '.join(STREAM)}: use readStream"
            )
        return JobReader(job)

    @briefly()
    def streamReader(self, schema: StructType) -> ChangeStream:  # noqa: N802
        """The stream of the cells that commits of a branch add.

        Raises
        ------
        InvalidArgumentError
            If the caller has given another schema, or options name one snapshot.
        """
        repository, changes, stream, job = self._planned
        own = job.schema
        if not same_columns(schema, own):
            raise InvalidArgumentError(
                f"the schema {schema.simpleString()[:200]} is not that of the variables, "
                f"{own.simpleString()[:200]}: leave it out, and choose columns by the option "
                "variables"
            )
        if changes:
            raise InvalidArgumentError(
                f"a stream does not take {' and '.join(CHANGES)}: use starting-snapshot"
            )
        return ChangeStream(repository, job, StreamOptions(**stream))

    @briefly()
    def writer(self, schema: StructType, overwrite: bool) -> Sink:
        """The tasks of a write, and its commit.

        Raises
        ------
        ManifestsError
            As for `zarr_manifests.spark.write_dataframe`, as far as rows need not be known.
        """
        location, arguments = write_options(self.options)
        if overwrite:
            # As everywhere in Spark: what has no row is not there afterwards.
            arguments.pop("append_dim", None)  # of a view that rows are appended to, too
            arguments = {"mode": "overwrite-region", "region": {}} | arguments
        repository = _opened(location, arguments)
        check_shared(repository.storage)
        if "dims" not in arguments:
            raise InvalidArgumentError(
                "the option dims is missing: name the columns that locate the cell of a row"
            )
        arguments = {"target": arguments.pop("group", "/")} | arguments
        sink = Sink(
            repository=repository,
            columns=to_arrow_schema(schema, timezone="UTC"),
            options=WriteOptions(**arguments, max_tasks=1, time_zone=self.facts.time_zone),
        )
        sink.options.txn()
        # What can be tried before there are rows; nothing is written.
        with sink.repository.writable_session(sink.options.branch) as session:
            plan_write(session, sink.options, sink)
        return sink


def _opened(location: str, arguments: dict[str, Any]) -> Repository:
    """The repository; what says how to open it is taken out of the arguments."""
    opening = taken(arguments, ("virtual-containers", "authorize", "storage-options"))
    return repositories.open(location, **opening)


# --- the sink --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink(DataSourceArrowWriter):
    """Writes the rows of a DataFrame in one commit; it can be pickled.

    Parameters
    ----------
    repository : Repository
        The repository.
    columns : pyarrow.Schema
        The columns of the rows.
    options : WriteOptions
        The arrays, and how rows become their cells.
    spooled : sequence of Spooled
        The rows of all tasks, which the process that commits writes.
    """

    repository: Repository
    columns: pa.Schema
    options: WriteOptions
    spooled: Sequence[Spooled] = ()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Spooled:
        """Spool the rows of a task."""
        spooled = Spooled(self.fork())
        name = self.options.append_dim
        for batch in iterator:
            if not batch.num_rows:
                continue
            rows = pa.Table.from_batches([batch]).rename_columns(self.columns.names)
            if name is not None:
                known = spooled.labels.get(name, pa.array([], rows[name].type))
                spooled.labels[name] = pa.chunked_array([known, *rows[name].chunks]).unique()
            sink = pa.BufferOutputStream()
            feather.write_feather(rows, sink, "lz4")
            spooled.put(bytes(sink.getvalue()))
        return spooled

    def fork(self) -> Fork:
        """A fork of a session that never commits, to spool to."""
        with self.repository.writable_session(self.options.branch) as session:
            return session.fork()

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the rows of all tasks."""
        spooled = [message for message in messages if isinstance(message, Spooled)]
        self.land(spooled, self.options.txn())

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave what tasks have spooled to the next collection; a commit may have landed."""
        _LOG.warning("a write to %s has failed", self.repository.storage.url)

    def land(self, spooled: Sequence[Spooled], txn: Txn | None) -> WriteReport:
        """Write the rows to chunks and commit them, on top of what others have committed."""
        report = write_rows(self.repository, self.options, replace(self, spooled=spooled), txn)
        _LOG.info("%s: %s", self.repository.storage.url, report)
        return report

    def labels(self, dims: Sequence[str]) -> dict[str, pa.Array]:
        """The distinct values of these columns."""
        found = {}
        for dim in dims:
            kind = self.columns.field(dim).type
            parts = [one.labels[dim].cast(kind) for one in self.spooled if one.pieces]
            found[dim] = pa.chunked_array(parts, kind).unique()
        return found

    def fill(self, plan: WritePlan, fork: Fork) -> list[tuple[Fork, int]]:
        """Write the cells of a plan."""
        return [write_cells(plan, fork, self._by_bin(plan))]

    def _by_bin(self, plan: WritePlan) -> Iterator[tuple[int, bytes | None]]:
        """Cells of one bin after the other, with at most so many bytes of them in memory."""
        held: dict[int, list[bytes]] = defaultdict(list)
        pieces: dict[int, list[str]] = defaultdict(list)
        again = Spooled(self.fork())
        nbytes = 0
        for number, cells in share_cells(plan, self._batches()):
            held[number].append(cells)
            nbytes += len(cells)
            if nbytes > self.options.buffer_bytes:
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
    """

    fork: Fork
    pieces: list[str] = field(default_factory=list)
    labels: dict[str, pa.Array] = field(default_factory=dict)

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
