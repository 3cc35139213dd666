"""Planning a read: from a repository and options to a `Job` and its columns.

One planner serves `read`, the data source and streams. It needs no Spark session. It pins the
snapshot, and reads metadata and coordinates, but no chunk of another variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pyspark.errors import PySparkAttributeError
from pyspark.sql import SparkSession

from zarr_manifests.errors import InvalidArgumentError, UnsupportedStorageError
from zarr_manifests.grid import IndexArray
from zarr_manifests.planning.scan import Axis, Scan, plan_scan
from zarr_manifests.repository import Repository
from zarr_manifests.session import Session
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.ranges import runs_in_range
from zarr_manifests.spark.schema import Column, column_of
from zarr_manifests.spark.source import Source
from zarr_manifests.storage import Storage

__all__ = ["ReadOptions", "SparkFacts", "plan_read"]

_LAYOUTS: Final = ("long",)
_NAN: Final = ("keep", "null", "drop")
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
    branch: str | None = None
    tag: str | None = None
    snapshot_id: str | None = None
    ranges: Mapping[str, Any] | None = None
    layout: str = "long"
    nan: str = "keep"
    target_rows: int = 4 * 1024**2

    def __post_init__(self) -> None:
        for name, known in (("layout", _LAYOUTS), ("nan", _NAN)):
            value = getattr(self, name)
            if value not in known:
                listed = ", ".join(map(repr, known))
                raise InvalidArgumentError(f"{name} cannot be {value!r}; known: {listed}")
        if type(self.target_rows) is not int or self.target_rows < 1:
            raise InvalidArgumentError(f"target_rows must be 1 or more, not {self.target_rows!r}")


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
    repository = location if isinstance(location, Repository) else Repository.open(location)
    if not repository.storage.capabilities.shared:
        raise UnsupportedStorageError(
            f"{repository.url} is in the memory of this process, and Spark reads in processes of "
            "its own; put the repository on a local disk or a storage they can see"
        )
    session = repository.readonly_session(
        options.branch, tag=options.tag, snapshot_id=options.snapshot_id
    )
    source = Source(session, options.group)
    names = _variables(source, options.variables)
    dims = _shared_dimensions(source, names)
    dimensions, columns = _columns(source, names, dims, facts.case_sensitive)
    scan = plan_scan(
        _axes(source, names, dims, options.ranges or {}),
        target_rows=options.target_rows,
        min_tasks=facts.parallelism,
    )
    numbers = _boxes_with_rows(session, source, columns, scan) if options.nan == "drop" else None
    return Job(
        storage=repository.storage,
        containers=tuple(sorted(repository.virtual_containers.items())),
        snapshot_id=session.snapshot_id,
        group=source.group,
        dimensions=dimensions,
        variables=columns,
        scan=scan,
        tasks=len(scan) if numbers is None else len(numbers),
        nan=options.nan,
        numbers=numbers,
    )


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


def _shared_dimensions(source: Source, names: Sequence[str]) -> tuple[str, ...]:
    """The dimensions of all the variables, which must be the same in the same order."""
    found = {name: tuple(map(str, source.encoded(name).dims)) for name in names}
    if len(set(found.values())) > 1:
        listed = "; ".join(f"{name} ({', '.join(dims)})" for name, dims in found.items())
        raise InvalidArgumentError(
            f"variables of one read must have the same dimensions in the same order: {listed}. "
            "Name those that do with variables=[...], and join the results"
        )
    return found[names[0]]


def _columns(
    source: Source, names: Sequence[str], dims: Sequence[str], case_sensitive: bool
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
    if not case_sensitive:
        _check_names((*dimensions, *columns))
    return dimensions, columns


def _check_names(columns: Sequence[Column]) -> None:
    seen: dict[str, str] = {}
    for column in columns:
        other = seen.setdefault(column.name.lower(), column.name)
        if other != column.name:
            raise InvalidArgumentError(
                f"the columns {other!r} and {column.name!r} are the same to Spark; leave one out "
                "with variables=[...], or set spark.sql.caseSensitive to true"
            )


def _boxes_with_rows(
    session: Session, source: Source, columns: Sequence[Column], scan: Scan
) -> IndexArray | None:
    """Numbers of the boxes that can have rows if cells without values have none; None for all.

    Cells of chunks that were never written have no value if the fill value stands for none.
    """
    if not columns or not all(source.absent_is_missing(column.name) for column in columns):
        return None
    found = []
    for column in columns:
        path = f"{source.group.rstrip('/')}/{column.name}"
        chunks = session.initialized_chunks(path)
        found.append(scan.holding(source.stored_chunk_shape(column.name), chunks))
    return np.unique(np.concatenate(found))


def _axes(
    source: Source, names: Sequence[str], dims: Sequence[str], ranges: Mapping[str, Any]
) -> list[Axis]:
    """What to read along each dimension, in chunks that are whole for all the variables."""
    unknown = sorted(ranges.keys() - set(dims))
    if unknown:
        raise InvalidArgumentError(
            f"there is no dimension {', '.join(map(repr, unknown))} to have a range; "
            f"{', '.join(map(repr, names))} has: {', '.join(dims) or 'none'}"
        )
    encoded = [source.encoded(name) for name in names]
    axes = []
    for number, (dim, size) in enumerate(zip(dims, encoded[0].shape, strict=True)):
        # If chunks differ, the largest: if it is a multiple of the others, no chunk is read twice.
        chunk = max(_largest(variable.encoding["chunks"][number]) for variable in encoded)
        if dim in ranges:
            runs = runs_in_range(dim, source.coordinate(dim), size, ranges[dim])
        else:
            runs = np.array([[0, size]] if size else [], np.int64).reshape(-1, 2)
        axes.append(Axis(max(chunk, 1), runs))
    return axes


def _largest(chunk: int | Sequence[int]) -> int:
    return chunk if isinstance(chunk, int) else max(chunk)
