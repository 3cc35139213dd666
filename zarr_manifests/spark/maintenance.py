"""Maintenance whose work Spark's executors do: the methods of `Repository`, with Spark tasks.

The driver plans, and only the driver changes the repository's root. Tasks read, check, write and
delete objects. A task that Spark runs twice does no harm.

Each function takes a Spark session and the repository: a path, a URL, a `Storage` or a
`Repository`. `storage_options` are those of `zarr_manifests.storage.from_url` for the path or URL.
All other arguments, what is returned and what is raised are as for the method that its docstring
names.

`metadata_table` makes DataFrames of what a snapshot says of its arrays and chunks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zarr
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.keys import ArrayMeta, absolute
from zarr_manifests.reports import (
    CollectionReport,
    CompactionReport,
    RewriteReport,
    StatisticsReport,
    VerifyReport,
)
from zarr_manifests.repositories import Location, repository_of
from zarr_manifests.rewriting import rewrite_chunks as rewrite
from zarr_manifests.session import Session, estimate_of
from zarr_manifests.spark.job import made_frame, shared_repository
from zarr_manifests.spark.tasks import run_tasks
from zarr_manifests.store import contents_of
from zarr_manifests.texts import known_as

__all__ = ["compact", "compute_statistics", "garbage_collect", "rewrite_chunks", "verify"]

type Options = Mapping[str, object] | None

_TEXT: Final = pa.string()
_NUMBER: Final = pa.int64()
_SHAPE: Final = pa.list_(_NUMBER)
_ARRAYS: Final = pa.schema(
    {"path": _TEXT, "zarr_format": pa.int32(), "dtype": _TEXT, "dimensions": pa.list_(_TEXT)}
    | dict.fromkeys(("shape", "chunk_shape", "shard_shape"), _SHAPE)
    | {"attributes": _TEXT, "grid_chunks": pa.decimal128(38, 0)}
    | {"chunks": _NUMBER, "chunks_exact": pa.bool_()}
    | {"chunk_bytes": _NUMBER, "chunk_bytes_exact": pa.bool_()}
)
_STATISTICS: Final = pa.schema(
    {"path": _TEXT, "coords": _SHAPE, "low": _TEXT, "high": _TEXT}
    | dict.fromkeys(("missing", "nan", "cells"), _NUMBER)
    | {"sum": pa.float64()}
)
_CHUNKS: Final = pa.schema(
    {"path": _TEXT, "coords": _SHAPE, "kind": _TEXT, "location": _TEXT}
    | dict.fromkeys(("offset", "length", "crc32c"), _NUMBER)
)


def verify(
    spark: SparkSession, url: Location, *args: Any, storage_options: Options = None, **options: Any
) -> VerifyReport:
    """Read every object that can be reached; tasks read the chunks and compare their checksums.

    As `Repository.verify`.

    Examples
    --------
    >>> from zarr_manifests.spark import maintenance, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> maintenance.verify(spark, "winds").ok  # doctest: +SKIP
    True
    """
    repository, run = shared_repository(url, storage_options), partial(run_tasks, spark)
    return repository.verify(*args, **options, run=run)


def garbage_collect(
    spark: SparkSession, url: Location, *args: Any, storage_options: Options = None, **options: Any
) -> CollectionReport:
    """Delete the objects that no snapshot needs; the driver marks, and tasks delete.

    As `Repository.garbage_collect`.

    Examples
    --------
    >>> from zarr_manifests.spark import maintenance, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> maintenance.garbage_collect(spark, "winds", dry_run=True).kept  # doctest: +SKIP
    12
    """
    repository, run = shared_repository(url, storage_options), partial(run_tasks, spark)
    return repository.garbage_collect(*args, **options, run=run)


def compact(
    spark: SparkSession, url: Location, *args: Any, storage_options: Options = None, **options: Any
) -> CompactionReport:
    """Bring the deltas of a branch together, or its packs; tasks write leaves, or copy chunks.

    Commits that land meanwhile stay on top. As `Repository.compact`.

    Examples
    --------
    >>> from zarr_manifests.spark import maintenance, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> maintenance.compact(spark, "winds", mode="full").deltas_after  # doctest: +SKIP
    0
    >>> maintenance.compact(spark, "winds", mode="packs").chunks  # doctest: +SKIP
    48
    """
    repository, run = shared_repository(url, storage_options), partial(run_tasks, spark)
    return repository.compact(*args, **options, run=run)


def compute_statistics(
    spark: SparkSession, url: Location, *args: Any, storage_options: Options = None, **options: Any
) -> StatisticsReport:
    """Measure chunks, so that queries can leave out those that cannot match; tasks decode them.

    An array of few bytes is measured on the driver. As `Repository.compute_statistics`.

    Examples
    --------
    >>> from zarr_manifests.spark import maintenance, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> maintenance.compute_statistics(spark, "winds", ["/u"]).measured  # doctest: +SKIP
    132
    """
    repository, run = shared_repository(url, storage_options), partial(run_tasks, spark)
    return repository.compute_statistics(*args, **options, run=run)


def rewrite_chunks(
    spark: SparkSession, url: Location, *args: Any, storage_options: Options = None, **options: Any
) -> RewriteReport:
    """Write an array anew with other chunks, shards or codecs, in one commit; tasks copy it.

    As `zarr_manifests.rewrite_chunks`.

    Examples
    --------
    >>> from zarr_manifests.spark import maintenance, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> how = {"chunks": (24, 90, 180), "dry_run": True}
    >>> maintenance.rewrite_chunks(spark, "winds", "/u", **how).chunks_after  # doctest: +SKIP
    132
    """
    repository, run = shared_repository(url, storage_options), partial(run_tasks, spark)
    return rewrite(repository, *args, **options, run=run)


# --- metadata tables -------------------------------------------------------------------------


def metadata_table(
    spark: SparkSession,
    url: Location,
    table: Literal["arrays", "chunks", "statistics"],
    *,
    path: str | None = None,
    version: str | None = None,
    storage_options: Options = None,
) -> DataFrame:
    """Read what a snapshot says of its arrays and chunks; no chunk is read.

    The driver makes the table. Name a path where chunks are too many for its memory.

    ============  ================================================================================
    table         one row per
    ============  ================================================================================
    `arrays`      array: type, dimensions, shape, attributes (as JSON), chunks and bytes; these are
                  upper bounds where `chunks_exact` or `chunk_bytes_exact` is false
    `chunks`      chunk that is there: where its bytes are, and their checksum. A sharded array's
                  chunks are its shards. `location` is an object's key or a file's URL, and null for
                  a chunk in a manifest (`inline`)
    `statistics`  chunk with an entry in a zone map, as in `Session.chunk_refs`: `low` and
                  `high` bound the stored values, as text (`CAST(low AS DOUBLE)`), and are null if
                  there are none; `missing`, `nan` and `cells` count
    ============  ================================================================================

    Parameters
    ----------
    spark : SparkSession
        A Spark session.
    url : str, path, Storage or Repository
        The repository.
    table : str
        One of the table above.
    path : str, optional
        Only this array, or all below this group.
    version : str, optional
        As for `Repository.readonly_session`.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

    Returns
    -------
    pyspark.sql.DataFrame
        At the snapshot that was current when it was made.

    Raises
    ------
    InvalidArgumentError
        If there is no such table.
    NotARepositoryError
        If there is no repository.
    NotFoundError
        If the branch, tag, snapshot or path does not exist.

    Examples
    --------
    >>> from zarr_manifests.spark import metadata_table, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> chunks = metadata_table(spark, "winds", "chunks", path="/u")  # doctest: +SKIP
    >>> chunks.groupBy("location").sum("length").show()  # doctest: +SKIP
    """
    if table not in _MADE:
        raise InvalidArgumentError(f"there is no table {table!r}: {known_as(table, _MADE)}")
    repository = repository_of(url, storage_options)
    made = driver_table(repository.readonly_session(version), table, path)
    return made_frame(spark, made, from_arrow_schema(made.schema))


def driver_table(session: Session, table: str, path: str | None = None) -> pa.Table:
    """Make a table, as `metadata_table` documents it, without Spark."""
    return _MADE[table](session, _arrays_of(session, path))


def _arrays_of(session: Session, path: str | None) -> dict[str, ArrayMeta]:
    """The array at a path and all below it, by path."""
    wanted = (path or "").strip("/")
    found = contents_of(session.store).within(wanted)
    if wanted and not found:
        raise NotFoundError(f"snapshot {session.snapshot_id} has no group or array /{wanted}")
    return {absolute(at): node.array for at, node in sorted(found.items()) if node.array}


def _arrays(session: Session, arrays: Mapping[str, ArrayMeta]) -> pa.Table:
    totals = {array.path: array.total for array in estimate_of(session).arrays}
    rows = []
    for path, meta in arrays.items():
        total = totals[path]
        array = zarr.open_array(session.store, path=path, mode="r")
        shapes = array.shape, array.chunks, array.shards
        kind = path, array.metadata.zarr_format, str(array.dtype), meta.dimension_names
        sizes = total.chunks, total.chunks_exact, total.nbytes, total.nbytes_exact
        row = (
            *kind,
            *shapes,
            json.dumps(array.attrs.asdict(), default=str, sort_keys=True),
            meta.grid.size,
            *sizes,
        )
        rows.append(dict(zip(_ARRAYS.names, row, strict=True)))
    return pa.Table.from_pylist(rows, _ARRAYS)


def _chunks(session: Session, arrays: Iterable[str]) -> pa.Table:
    made = [_CHUNKS.empty_table()]
    for path in arrays:
        found = session.chunk_refs(path).to_arrow().drop_columns("data")
        rows = found.add_column(0, "path", pa.repeat(path, len(found)))
        made.append(rows.rename_columns(_CHUNKS.names).cast(_CHUNKS))
    return pa.concat_tables(made)


def _statistics(session: Session, arrays: Iterable[str]) -> pa.Table:
    made = [_STATISTICS.empty_table()]
    for path in arrays:
        found = session.chunk_refs(path, statistics=True)
        edges = np.arange(len(found) + 1, dtype=np.int32) * found.coords.shape[1]
        coords = pa.ListArray.from_arrays(edges, found.coords.reshape(-1))
        bounds = _texts(found.low, found.bounded), _texts(found.high, found.bounded)
        counts = found.missing, found.nan, found.cells
        sums = pa.array(found.sums, mask=np.isnan(found.sums))
        columns = pa.repeat(found.path, len(found)), coords, *bounds, *map(pa.array, counts), sums
        made.append(pa.table(columns, _STATISTICS))
    return pa.concat_tables(made)


def _texts(values: npt.NDArray[Any], bounded: npt.NDArray[np.bool_]) -> pa.Array:
    return pa.array(values.astype(str), _TEXT, mask=~bounded)


_MADE: Final[Mapping[str, Callable[[Session, Mapping[str, ArrayMeta]], pa.Table]]] = {
    "arrays": _arrays,
    "chunks": _chunks,
    "statistics": _statistics,
}
