"""The metadata of a repository as DataFrames, from its history to its chunks.

Tables that are as small as a snapshot or a log are made on the driver. Tables of chunks can have as
many rows as the repository has chunks, so tasks make them: each gets a box of one array's chunk
grid, and the driver never has a chunk's ref.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zarr
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from zarr_manifests.config.kinds import known_as
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.planning.scan import Axis, Scan, plan_scan
from zarr_manifests.planning.tables.resolved_chunks import ChunkKind, ResolvedChunks
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository
from zarr_manifests.session import ChunkStatistics, Session, estimate_of
from zarr_manifests.spark.checks import check_shared
from zarr_manifests.spark.job import Leased
from zarr_manifests.spark.lease import keep_readable, renew_lease
from zarr_manifests.spark.worker import opened
from zarr_manifests.storage import Storage

__all__ = ["metadata_table"]

_REFS_PER_TASK: Final = 256 * 1024
_BATCH_ROWS: Final = 64 * 1024
_MOST_CUTS: Final = 64 * 1024  # of an axis, which bounds what the driver holds

_TIME: Final = pa.timestamp("us", tz="UTC")
_NUMBERS: Final = pa.map_(pa.string(), pa.int64())
_SHAPE: Final = pa.list_(pa.int64())

_SNAPSHOTS: Final = pa.schema(
    {
        "snapshot_id": pa.string(),
        "parent_id": pa.string(),
        "written_at": _TIME,
        "kind": pa.string(),
        "message": pa.string(),
        "metadata": pa.string(),
        "written": _NUMBERS,
        "totals": _NUMBERS,
        "commit_id": pa.string(),
    }
)
_OPERATIONS: Final = pa.schema(
    {
        "version": pa.int64(),
        "at": _TIME,
        "operation": pa.string(),
        "ref": pa.string(),
        "snapshot_id": pa.string(),
        "operation_id": pa.string(),
        "by": pa.string(),
    }
)
_MANIFESTS: Final = pa.schema(
    {
        "key": pa.string(),
        "set_name": pa.string(),
        "refs": pa.int64(),
        "nbytes": pa.int64(),
        "arrays": pa.int64(),
    }
)
_ARRAYS: Final = pa.schema(
    {
        "path": pa.string(),
        "zarr_format": pa.int32(),
        "dtype": pa.string(),
        "dimensions": pa.list_(pa.string()),
        "shape": _SHAPE,
        "chunk_shape": _SHAPE,
        "shard_shape": _SHAPE,
        "attributes": pa.string(),
        "grid_chunks": pa.decimal128(38, 0),
        "chunks": pa.int64(),
        "chunks_exact": pa.bool_(),
        "chunk_bytes": pa.int64(),
        "chunk_bytes_exact": pa.bool_(),
    }
)
_CHUNKS: Final = pa.schema(
    {
        "path": pa.string(),
        "coords": _SHAPE,
        "kind": pa.string(),
        "location": pa.string(),
        "offset": pa.int64(),
        "length": pa.int64(),
        "crc32c": pa.int64(),
    }
)

_STATISTICS: Final = pa.schema(
    {
        "path": pa.string(),
        "coords": _SHAPE,
        "low": pa.string(),
        "high": pa.string(),
        "missing": pa.int64(),
        "nan": pa.int64(),
        "cells": pa.int64(),
    }
)
_IN_SPARK: Final = {pa.string(): "string", pa.int64(): "bigint", _SHAPE: "array<bigint>"}
_KIND_NAMES: Final = pa.array(
    [ChunkKind(kind).name.lower() if kind in ChunkKind else None for kind in range(4)]
)


def metadata_table(
    spark: SparkSession,
    url: str | os.PathLike[str] | Storage | Repository,
    table: Literal["snapshots", "operations", "manifests", "arrays", "chunks", "statistics"],
    *,
    path: str | None = None,
    version: str | None = None,
    lease: timedelta | None = timedelta(hours=1),
    storage_options: Mapping[str, object] | None = None,
) -> DataFrame:
    """Read what a repository says of itself; no chunk is read.

    ============  ================================================================================
    table         one row per
    ============  ================================================================================
    `snapshots`   snapshot of the history, newest first: what the commit did (`written`), and what
                  the snapshot holds (`totals`), as in `SnapshotInfo`
    `operations`  operation on branches and tags, newest first, as in `Repository.ops_log`
    `manifests`   manifest of the base, as in `Repository.explain_manifests`
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
        The repository. For `chunks` and `statistics`, Spark's workers must be able to
        reach it.
    table : str
        One of the table above.
    path : str, optional
        For `arrays`, `chunks` and `statistics`: only this array, or all below this group.
    version : str, optional
        As for `Repository.readonly_session`; `snapshots` starts there. The log of
        operations is that of the whole repository.
    lease : timedelta, optional
        For `chunks` and `statistics`, which tasks read: how long to keep the snapshot, as for
        `read`. None takes no lease.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

    Returns
    -------
    pyspark.sql.DataFrame
        At the snapshot that was current when it was made.

    Raises
    ------
    InvalidArgumentError
        If there is no such table, or an argument does not apply to it.
    NotARepositoryError
        If there is no repository.
    NotFoundError
        If the branch, tag, snapshot or path does not exist.
    UnsupportedStorageError
        If tasks are to read chunk refs of a repository that they cannot reach (`memory://`).

    Examples
    --------
    >>> from zarr_manifests.spark import metadata_table, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> chunks = metadata_table(spark, "winds", "chunks", path="/u")  # doctest: +SKIP
    >>> chunks.groupBy("location").sum("length").show()  # doctest: +SKIP
    """
    make = _TABLES.get(table)
    if make is None:
        raise InvalidArgumentError(f"there is no table {table!r}: {known_as(table, _TABLES)}")
    if path is not None and table not in ("arrays", "chunks", "statistics"):
        raise InvalidArgumentError(
            f"the table {table} is not about arrays: leave out path, or choose the table arrays, "
            "chunks or statistics"
        )
    if table == "operations" and version is not None:
        raise InvalidArgumentError(
            "the log of operations is that of the whole repository: leave out version, and filter "
            "by its columns ref and at"
        )
    repository = repository_of(url, storage_options)
    session = repository.readonly_session(version)
    return make(spark, _Subject(repository, session, path, lease))


@dataclass(frozen=True, slots=True)
class _Subject:
    """What a table is about."""

    repository: Repository
    session: Session
    path: str | None
    lease: timedelta | None

    def arrays(self) -> dict[str, zarr.Array[Any]]:
        """The arrays by absolute path; reads no chunk."""
        wanted = (self.path or "").strip("/")
        try:
            node = zarr.open(self.session.store, path=wanted, mode="r")
        except (FileNotFoundError, ValueError) as error:
            if not wanted:  # nothing has been written yet
                return {}
            raise NotFoundError(
                f"there is no group or array /{wanted} in snapshot {self.session.snapshot_id}"
            ) from error
        if isinstance(node, zarr.Array):
            return {f"/{wanted}": node}
        below = node.members(max_depth=None)
        prefix = f"/{wanted}/" if wanted else "/"
        found = {prefix + name: array for name, array in below if isinstance(array, zarr.Array)}
        return dict(sorted(found.items()))


def _frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    """The table as a DataFrame; Spark Connect cannot tell the columns of one without rows."""
    if table.num_rows:
        return spark.createDataFrame(table)
    return spark.createDataFrame([], from_arrow_schema(table.schema))


def _snapshots(spark: SparkSession, place: _Subject) -> DataFrame:
    history = place.repository.ancestry(place.session.snapshot_id)
    rows = [
        {
            "snapshot_id": one.snapshot_id,
            "parent_id": one.parent_id,
            "written_at": one.written_at,
            "kind": one.kind,
            "message": one.message,
            "metadata": _as_json(one.metadata),
            "written": list(one.written.items()),
            "totals": list(one.totals.items()),
            "commit_id": one.commit_id,
        }
        for one in history
    ]
    return _frame(spark, pa.Table.from_pylist(rows, _SNAPSHOTS))


def _operations(spark: SparkSession, place: _Subject) -> DataFrame:
    names = _OPERATIONS.names
    rows = [{name: getattr(one, name) for name in names} for one in place.repository.ops_log()]
    return _frame(spark, pa.Table.from_pylist(rows, _OPERATIONS))


def _manifests(spark: SparkSession, place: _Subject) -> DataFrame:
    layout = place.repository.explain_manifests(place.session.snapshot_id)
    names = _MANIFESTS.names
    rows = [{name: getattr(one, name) for name in names} for one in layout.manifests]
    return _frame(spark, pa.Table.from_pylist(rows, _MANIFESTS))


def _arrays(spark: SparkSession, place: _Subject) -> DataFrame:
    totals = {array.path: array.total for array in estimate_of(place.session).arrays}
    rows = []
    for path, array in place.arrays().items():
        total = totals[path]
        rows.append(
            {
                "path": path,
                "zarr_format": array.metadata.zarr_format,
                "dtype": str(array.dtype),
                "dimensions": _dimensions(array),
                "shape": array.shape,
                "chunk_shape": array.chunks,
                "shard_shape": array.shards,
                "attributes": _as_json(array.attrs.asdict()),
                "grid_chunks": math.prod(_grid(array)),
                "chunks": total.chunks,
                "chunks_exact": total.chunks_exact,
                "chunk_bytes": total.nbytes,
                "chunk_bytes_exact": total.nbytes_exact,
            }
        )
    return _frame(spark, pa.Table.from_pylist(rows, _ARRAYS))


@dataclass(frozen=True, slots=True)
class _ChunkJob:
    """What the tasks of a table with a row per chunk have in common, without refs or secrets.

    Parameters
    ----------
    storage : Storage
        The repository's storage.
    snapshot_id : str
        The snapshot.
    table : str
        `chunks` or `statistics`.
    scans : tuple of (str, Scan)
        Paths of arrays, and the boxes that their chunk grids are cut into.
    lease : Leased, optional
        The lease on the snapshot that tasks renew.
    """

    storage: Storage
    snapshot_id: str
    table: str
    scans: tuple[tuple[str, Scan], ...]
    lease: Leased | None = None

    def __len__(self) -> int:
        return sum(len(scan) for _, scan in self.scans)

    def __getitem__(self, number: int) -> tuple[str, Box]:
        for path, scan in self.scans:
            if number < len(scan):
                return path, scan[number]
            number -= len(scan)
        raise IndexError("there is no such task")

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the tasks whose numbers are in the first column."""
        renew_lease(self)
        session = opened(self.storage, self.snapshot_id)
        for number in (number for batch in batches for number in batch.column(0).to_pylist()):
            of_box: ResolvedChunks | ChunkStatistics
            if self.table == "statistics":
                of_box = session.chunk_refs(*self[number], statistics=True)
            else:
                of_box = session.chunk_refs(*self[number])
            for start in range(0, len(of_box), _BATCH_ROWS):
                rows = slice(start, start + _BATCH_ROWS)
                if isinstance(of_box, ChunkStatistics):
                    yield _statistics_rows(of_box, rows)
                else:
                    yield _chunk_rows(of_box, rows)


def _by_tasks(table: str, spark: SparkSession, place: _Subject) -> DataFrame:
    repository, session = place.repository, place.session
    check_shared(repository.storage)
    totals = {array.path: array.chunks for array in estimate_of(session).arrays}
    scans = []
    for path, array in place.arrays().items():
        grid = _grid(array)
        # By refs, not by the size of the grid: a large grid may have few.
        boxes = math.ceil(totals[path] / _REFS_PER_TASK)
        if boxes:
            axes = [Axis(-(-size // _MOST_CUTS), np.array([[0, size]])) for size in grid]
            scans.append((path, plan_scan(axes, target_rows=math.ceil(math.prod(grid) / boxes))))
    leased = None if place.lease is None else Leased(time.time(), place.lease)
    job = _ChunkJob(repository.storage, session.snapshot_id, table, tuple(scans), leased)
    schema = _CHUNKS if table == "chunks" else _STATISTICS
    if not len(job):
        return _frame(spark, schema.empty_table())
    numbers = spark.range(0, len(job), 1, len(job))
    columns = ", ".join(f"{field.name} {_IN_SPARK[field.type]}" for field in schema)
    frame = numbers.mapInArrow(job.run, columns)
    if place.lease is not None:
        keep_readable(repository, job.snapshot_id, place.lease.total_seconds(), frame)
    return frame


def _lists(coords: IndexArray) -> pa.ListArray:
    edges = np.arange(len(coords) + 1, dtype=np.int32) * coords.shape[1]
    return pa.ListArray.from_arrays(pa.array(edges), pa.array(coords.reshape(-1)))


def _statistics_rows(found: ChunkStatistics, rows: slice) -> pa.RecordBatch:
    coords, empty = found.coords[rows], ~found.bounded[rows]
    return pa.record_batch(
        [
            pa.repeat(found.path, len(coords)),
            _lists(coords),
            _texts(found.low[rows], empty),
            _texts(found.high[rows], empty),
            pa.array(found.missing[rows]),
            pa.array(found.nan[rows]),
            pa.array(found.cells[rows]),
        ],
        schema=_STATISTICS,
    )


def _texts(values: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> pa.Array:
    if values.dtype.kind == "S":
        # A bound may end within a character.
        texts = [value.decode("utf-8", "replace") for value in values.tolist()]
        return pa.array(texts, pa.string(), mask=mask)
    return pa.array(values.astype(str).tolist(), pa.string(), mask=mask)


def _chunk_rows(found: ResolvedChunks, rows: slice) -> pa.RecordBatch:
    coords, source = found.coords[rows], found.source[rows]
    distinct, inverse = np.unique(source, return_inverse=True)
    named = [None if at < 0 else found.locations[at] for at in distinct.tolist()]
    checksum = found.checksum[rows]
    return pa.record_batch(
        [
            pa.repeat(found.path, len(coords)),
            _lists(coords),
            _KIND_NAMES.take(pa.array(found.kind[rows])),
            pa.array(named, pa.string()).take(pa.array(inverse)),
            pa.array(found.offset[rows], mask=source < 0),
            pa.array(found.length[rows]),
            pa.array(checksum, mask=checksum < 0),
        ],
        schema=_CHUNKS,
    )


def _grid(array: zarr.Array[Any]) -> tuple[int, ...]:
    """Stored chunks along each axis: those of a sharded array are its shards."""
    stored = array.shards or array.chunks
    return tuple(-(-size // max(chunk, 1)) for size, chunk in zip(array.shape, stored, strict=True))


def _dimensions(array: zarr.Array[Any]) -> list[str | None] | None:
    """The names of the dimensions, which Zarr 2 has no place for but xarray's attribute."""
    if array.metadata.zarr_format == 2:
        named = array.attrs.get("_ARRAY_DIMENSIONS")
        return list(map(str, named)) if isinstance(named, list) else None
    names = array.metadata.dimension_names
    return None if names is None else list(names)


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(dict(values), default=str, sort_keys=True)


_TABLES: Final[Mapping[str, Callable[[SparkSession, _Subject], DataFrame]]] = {
    "snapshots": _snapshots,
    "operations": _operations,
    "manifests": _manifests,
    "arrays": _arrays,
    "chunks": partial(_by_tasks, "chunks"),
    "statistics": partial(_by_tasks, "statistics"),
}
