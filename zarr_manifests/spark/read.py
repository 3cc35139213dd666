"""Reading variables of a repository as a Spark DataFrame, one row per cell.

The driver pins the snapshot, reads metadata and coordinates, and plans. Only tasks read chunks of
variables. Each task is one partition and gets one box of whole chunks. A task receives the plan and
the repository's location, never data.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
from pyspark.sql import DataFrame, SparkSession

from zarr_manifests.errors import InvalidArgumentError, UnsupportedStorageError
from zarr_manifests.grid import IndexArray
from zarr_manifests.planning.scan import Axis, Scan, plan_scan
from zarr_manifests.repository import Repository
from zarr_manifests.session import Session
from zarr_manifests.spark.ranges import runs_in_range
from zarr_manifests.spark.schema import Column, column_of, schema_of
from zarr_manifests.spark.source import Source
from zarr_manifests.spark.worker import PANDAS_WARNING, Job, run
from zarr_manifests.storage import Storage

__all__ = ["read"]

_LAYOUTS: Final = ("long",)
_NAN: Final = ("keep", "null", "drop")


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
    _check_options(layout, nan, target_rows)
    repository = url if isinstance(url, Repository) else Repository.open(url)
    if not repository.storage.capabilities.shared:
        raise UnsupportedStorageError(
            f"{repository.url} is in the memory of this process, and Spark reads in processes of "
            "its own; put the repository on a local disk or a storage they can see"
        )
    session = repository.readonly_session(branch, tag=tag, snapshot_id=snapshot_id)
    source = Source(session, group)
    names = _variables(source, variables)
    dims = _shared_dimensions(source, names)
    clashing = [name for name in names if name in dims and source.coordinate(name) is None]
    if clashing:
        raise InvalidArgumentError(
            f"{clashing[0]!r} is a variable of several dimensions and the name of one of them, so "
            "two columns would have that name; store it under another"
        )
    dimensions = tuple(column_of(source, dim, is_dimension=True) for dim in dims)
    columns = tuple(column_of(source, n, is_dimension=False) for n in names if n not in dims)
    _check_names(spark, (*dimensions, *columns))
    scan = plan_scan(
        _axes(source, names, dims, ranges or {}),
        target_rows=target_rows,
        min_tasks=spark.sparkContext.defaultParallelism,
    )
    schema = schema_of((*dimensions, *columns))
    numbers = _boxes_with_rows(session, source, columns, scan) if nan == "drop" else None
    count = len(scan) if numbers is None else len(numbers)
    if not count:
        return spark.createDataFrame([], schema)
    place = (repository.storage, session.snapshot_id, source.group)
    containers = tuple(sorted(repository.virtual_containers.items()))
    job = Job(*place, dimensions, columns, scan, nan, containers, numbers)

    def rows(tasks: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        return run(job, tasks)

    # As many partitions as numbers, so that each task gets one.
    tasks = spark.range(0, count, 1, count)
    with warnings.catch_warnings():
        # A warning about features of pandas that are not used here.
        warnings.filterwarnings("ignore", PANDAS_WARNING, FutureWarning)
        return tasks.mapInPandas(rows, schema)


def _check_options(layout: str, nan: str, target_rows: int) -> None:
    for name, value, known in (("layout", layout, _LAYOUTS), ("nan", nan, _NAN)):
        if value not in known:
            listed = ", ".join(map(repr, known))
            raise InvalidArgumentError(f"{name} cannot be {value!r}; known: {listed}")
    if type(target_rows) is not int or target_rows < 1:
        raise InvalidArgumentError(f"target_rows must be 1 or more, not {target_rows!r}")


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


def _check_names(spark: SparkSession, columns: Sequence[Column]) -> None:
    if spark.conf.get("spark.sql.caseSensitive") == "true":
        return
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
