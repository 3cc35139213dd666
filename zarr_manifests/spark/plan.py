"""Planning a read: from a repository and options to a `Job` and its columns.

One planner serves `read`, the data source and streams. It needs no Spark session. It pins the
snapshot, and reads metadata and coordinates, but no chunk of another variable.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from pyspark.errors import PySparkAttributeError
from pyspark.sql import SparkSession

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import IndexArray
from zarr_manifests.planning.scan import Axis, Scan, plan_scan
from zarr_manifests.planning.zones.time_zone import zone_of
from zarr_manifests.planning.zones.where import parse_where
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository, containers_of
from zarr_manifests.session import Session, initialized_chunks
from zarr_manifests.spark.checks import check_counts, check_shared, check_words
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.prune import axis_where, boxes_where, common, empty_rows
from zarr_manifests.spark.ranges import runs_in_range
from zarr_manifests.spark.row_filter import kept
from zarr_manifests.spark.schema import Column, column_of
from zarr_manifests.spark.source import Source
from zarr_manifests.storage import Storage

__all__ = ["PlannedRead", "ReadOptions", "SparkFacts", "plan", "plan_read", "restrict", "spelled"]

_LAYOUTS: Final = ("long", "chunk")
_NAN: Final = ("null", "keep", "drop")
_ON_EMPTY: Final = ("empty", "error")
# As many tasks as a small cluster runs at once, where Spark does not tell.
_CONNECT_PARALLELISM: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What to read and how, as `zarr_manifests.spark.read` documents it.

    Raises
    ------
    InvalidArgumentError
        If an option has a value that it cannot have.
    """

    variables: str | Sequence[str] | None = None
    group: str = "/"
    version: str | None = None
    ranges: Mapping[str, Any] | None = None
    where: Any = None
    on_empty: str = "empty"
    layout: str = "long"
    nan: str = "null"
    decode_times: bool = True
    broadcast: bool = False
    target_rows: int = 4 * 1024**2
    max_tasks: int = 10_000

    def __post_init__(self) -> None:
        check_words(self, layout=_LAYOUTS, nan=_NAN, on_empty=_ON_EMPTY)
        check_counts(self, "target_rows", "max_tasks")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkFacts:
    """What planning needs to know of a Spark session; it can be pickled.

    Parameters
    ----------
    parallelism : int, default 1
        Number of tasks that can run at once.
    case_sensitive : bool, default False
        Whether names of columns that differ only in case are different.
    time_zone : str, default "UTC"
        The time zone of times without one.
    """

    parallelism: int = 1
    case_sensitive: bool = False
    time_zone: str = "UTC"

    @classmethod
    def of(cls, spark: SparkSession) -> SparkFacts:
        """The facts about a session, which may be one of Spark Connect."""
        try:
            parallelism = int(spark.sparkContext.defaultParallelism)
        except PySparkAttributeError:  # Spark Connect: the context is in another process
            told = spark.conf.get("spark.default.parallelism", None)
            parallelism = int(told) if told else _CONNECT_PARALLELISM
        return cls(
            parallelism=parallelism,
            case_sensitive=spark.conf.get("spark.sql.caseSensitive") == "true",
            time_zone=spark.conf.get("spark.sql.session.timeZone") or "UTC",
        )


def spelled(given: Iterable[str], names: Iterable[str], facts: SparkFacts) -> dict[str, str]:
    """Return the names as which Spark finds given ones: in any case, unless it tells cases apart.

    Examples
    --------
    >>> from zarr_manifests.spark.plan import SparkFacts, spelled
    >>> spelled(["LAT", "u"], ["lat", "lon"], SparkFacts())
    {'LAT': 'lat', 'u': 'u'}
    """
    known = {} if facts.case_sensitive else {name.lower(): name for name in names}
    exact = {*names}
    return {name: name if name in exact else known.get(name.lower(), name) for name in given}


def plan_read(
    location: str | os.PathLike[str] | Storage | Repository,
    options: ReadOptions,
    facts: SparkFacts,
) -> Job:
    """Plan a read.

    Parameters
    ----------
    location : str, path, Storage or Repository
        The repository.
    options : ReadOptions
        What to read and how.
    facts : SparkFacts
        Where it will run. There are at least as many tasks as can run at once, if there are as
        many chunks.

    Returns
    -------
    Job
        With `tasks` 0 if there is nothing to read.

    Raises
    ------
    NotARepositoryError, NotFoundError, InvalidArgumentError, UnsupportedStorageError
        As for `zarr_manifests.spark.read`.
    """
    return plan(location, options, facts).job


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """A planned read, and what was found out on the way.

    Parameters
    ----------
    job : Job
        The read.
    session : Session
        The pinned snapshot.
    source : Source
        The group.
    selections : tuple of ChunkSelection
        What statistics say of the arrays that `where` compares.
    """

    job: Job
    session: Session
    source: Source
    selections: tuple[ChunkSelection, ...] = ()


def plan(
    location: str | os.PathLike[str] | Storage | Repository,
    options: ReadOptions,
    facts: SparkFacts,
) -> PlannedRead:
    """Plan a read, as `plan_read` does, and tell how."""
    repository = repository_of(location)
    check_shared(repository.storage)
    session = repository.readonly_session(options.version)
    source = Source(session, options.group, decode_times=options.decode_times)
    names = _variables(source, options.variables)
    dims = _shared_dimensions(source, names, options.broadcast)
    dimensions, columns = _columns(source, names, dims)
    where = None if options.where is None else parse_where(options.where)
    zone = zone_of(facts.time_zone)
    if where is not None:
        known = [column.name for column in (*dimensions, *columns)]
        where = where.named(spelled(where.columns, known, facts))
        # Names what cannot be compared.
        kept(empty_rows((*dimensions, *columns)), where, zone)
    axes = _axes(source, names, dims, options, facts)
    if where is not None:
        nan_is_null = options.nan != "keep"
        axes = [
            axis_where(axis, source, column, where, zone, nan_is_null=nan_is_null)
            for axis, column in zip(axes, dimensions, strict=True)
        ]
    rows = math.prod(axis.size for axis in axes)
    # A larger box takes no more memory.
    target = max(options.target_rows, rows // options.max_tasks)
    scan = plan_scan(axes, target_rows=target, min_tasks=facts.parallelism)
    numbers = _boxes_with_rows(session, source, columns, scan) if options.nan == "drop" else None
    job = Job(
        storage=repository.storage,
        containers=tuple(sorted(containers_of(repository).items())),
        snapshot_id=session.snapshot_id,
        group=source.group,
        dimensions=dimensions,
        variables=columns,
        scan=scan,
        tasks=min(len(scan) if numbers is None else len(numbers), options.max_tasks),
        nan=options.nan,
        layout=options.layout,
        numbers=numbers,
        decode_times=options.decode_times,
        where=where,
        time_zone=facts.time_zone,
    )
    _check_columns(job.columns, facts.case_sensitive)
    selections: list[ChunkSelection] = []
    if where is not None and job.tasks:
        boxes, selections = boxes_where(session, source, job, where)
        if boxes is not None:
            job = restrict(job, boxes, options, facts)
    if where is not None and not job.tasks and options.on_empty == "error":
        raise InvalidArgumentError(f"no cell can match {where.sql!r}, and on_empty is 'error'")
    return PlannedRead(job, session, source, tuple(selections))


def restrict(job: Job, boxes: IndexArray, options: ReadOptions, facts: SparkFacts) -> Job:
    """The job for only the cells in some boxes, regrouped into tasks of about the target size.

    Parameters
    ----------
    job : Job
        A planned read.
    boxes : int64[n, 2, ndim]
        Half-open boxes of cells that do not overlap.
    options, facts
        As for `plan_read`.
    """
    if job.parts is not None:
        boxes = common(boxes, job.parts)
    rows = int(job.scan.cells(boxes).sum())
    target = min(options.target_rows, rows // facts.parallelism)
    scan = plan_scan(job.scan.axes, target_rows=max(target, rows // options.max_tasks, 1))
    parts = scan.cut(boxes)
    sizes = scan.cells(parts)
    middles = np.cumsum(sizes) - sizes / 2
    tasks = max(-(-rows // options.target_rows), min(facts.parallelism, len(parts)))
    tasks = min(tasks, options.max_tasks, len(parts))
    shares = np.arange(1, tasks) * (rows / max(tasks, 1))
    cuts = np.searchsorted(middles, shares)
    starts = np.unique(np.concatenate([[0], cuts, [len(parts)]])).astype(np.int64)
    return replace(job, scan=scan, tasks=len(starts) - 1, numbers=None, parts=parts, starts=starts)


def _variables(source: Source, given: str | Sequence[str] | None) -> tuple[str, ...]:
    names = (
        source.data_variables if given is None else (given,) if isinstance(given, str) else given
    )
    if not names:
        what = "has no variables" if given is None else "was asked for no variables"
        raise InvalidArgumentError(
            f"group {source.group} {what}; name what to read with variables=[...]"
        )
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"variables are named twice: {', '.join(names)}")
    for name in names:
        source.encoded(name)
    return tuple(names)


def _shared_dimensions(source: Source, names: Sequence[str], broadcast: bool) -> tuple[str, ...]:
    """The dimensions of the variable with the most, which the others have too, or some of them."""
    found = {name: tuple(map(str, source.encoded(name).dims)) for name in names}
    widest = max(found.values(), key=len)
    if all(dims == widest for dims in found.values()):
        return widest
    listed = "; ".join(f"{name} ({', '.join(dims)})" for name, dims in found.items())
    if not all(set(dims) <= set(widest) for dims in found.values()):
        raise InvalidArgumentError(
            f"variables of one read must have the same dimensions in the same order: {listed}. "
            "Name those that do with variables=[...], and join the results"
        )
    if not broadcast:
        raise InvalidArgumentError(
            f"variables of one read must have the same dimensions in the same order: {listed}. "
            f"With broadcast=True, values are repeated along all of ({', '.join(widest)})"
        )
    return widest


def _columns(
    source: Source, names: Sequence[str], dims: Sequence[str]
) -> tuple[tuple[Column, ...], tuple[Column, ...]]:
    """The columns of the dimensions, and those of the variables."""
    clashing = [name for name in names if name in dims and source.coordinate(name) is None]
    if clashing:
        raise InvalidArgumentError(
            f"{clashing[0]!r} is a variable of several dimensions and the name of one of them, so "
            "two columns would have that name; store it under another"
        )
    dimensions = tuple(column_of(source, dim, is_dimension=True) for dim in dims)
    columns = tuple(column_of(source, n, is_dimension=False) for n in names if n not in dims)
    return dimensions, columns


def _check_columns(columns: Sequence[Column], case_sensitive: bool) -> None:
    seen: dict[str, str] = {}
    for column in columns:
        name = column.name if case_sensitive else column.name.lower()
        if name in seen:
            raise InvalidArgumentError(
                f"the columns {seen[name]!r} and {column.name!r} are the same to Spark; leave one "
                "out with variables=[...], or set spark.sql.caseSensitive to true"
            )
        seen[name] = column.name


def _boxes_with_rows(
    session: Session, source: Source, columns: Sequence[Column], scan: Scan
) -> IndexArray | None:
    """Numbers of the boxes that can have rows if cells without values have none; None for all.

    Cells of chunks that were never written have no value if the fill value stands for none.
    """
    if not columns or not all(
        source.absent_is_missing(column.name) and source.encoded(column.name).ndim == len(scan.axes)
        for column in columns
    ):
        return None
    found = []
    for column in columns:
        path = f"{source.group.rstrip('/')}/{column.name}"
        chunks = initialized_chunks(session, path)
        found.append(scan.holding(source.stored_chunk_shape(column.name), chunks))
    return np.unique(np.concatenate(found))


def _axes(
    source: Source,
    names: Sequence[str],
    dims: Sequence[str],
    options: ReadOptions,
    facts: SparkFacts,
) -> list[Axis]:
    """What to read along each dimension, in chunks that are whole for all the variables."""
    given = options.ranges or {}
    spelling = spelled(given, dims, facts)
    ranges = {spelling[name]: value for name, value in given.items()}
    zone = zone_of(facts.time_zone)
    unknown = sorted(ranges.keys() - set(dims))
    if unknown:
        raise InvalidArgumentError(
            f"ranges: there is no dimension {', '.join(map(repr, unknown))}; "
            f"{', '.join(map(repr, names))} has: {', '.join(dims) or 'none'}"
        )
    axes = []
    for dim in dims:
        having = {name: source.encoded(name) for name in names if dim in source.encoded(name).dims}
        size = next(iter(having.values())).sizes[dim]
        # If chunks differ, the largest: if it is a multiple of the others, no chunk is read twice.
        chunk = max(
            source.reading_shape(name, in_shards=options.layout == "long")[each.dims.index(dim)]
            for name, each in having.items()
        )
        if dim in ranges:
            coordinate = source.coordinate(dim)
            how: Any = {"on_empty": options.on_empty, "zone": zone}
            runs = runs_in_range(dim, coordinate, size, ranges[dim], **how)
        else:
            runs = np.array([[0, size]] if size else [], np.int64).reshape(-1, 2)
        axes.append(Axis(max(chunk, 1), runs))
    return axes
