"""What a task does: read the chunks of its box, and return them as rows.

It runs in Spark's Python workers. A worker serves many tasks and keeps what it has opened, so it
opens a repository and reads coordinates once per snapshot. Memory is bounded by what one task holds
at a time: a block (`BLOCK_BYTES` of values, or one chunk), the stored bytes of its chunks, and two
batches. Invariants:

- A chunk is read once, as blocks are whole chunks.
- A batch has at most `BATCH_BYTES`, and at least `BATCH_ROWS` rows unless that would exceed the
  first bound or the task has fewer.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from zarr_manifests.grid import Box
from zarr_manifests.planning.scan import Axis, plan_scan
from zarr_manifests.repository import Repository
from zarr_manifests.session import Session
from zarr_manifests.spark.job import Containers, Job
from zarr_manifests.spark.schema import Column, to_arrow
from zarr_manifests.spark.source import Source

__all__ = [
    "BATCH_BYTES",
    "BATCH_ROWS",
    "BLOCK_BYTES",
    "PANDAS_WARNING",
    "batches",
    "partition_batches",
    "run",
    "run_arrow",
]

BATCH_ROWS: Final = 64 * 1024
BATCH_BYTES: Final = 32 * 1024**2
BLOCK_BYTES: Final = 32 * 1024**2

PANDAS_WARNING: Final = "PySpark does not yet fully support pandas"
"""Start of a warning that pyspark gives for each batch, about features not used here."""

_KEPT: Final = 8
# The key has the containers, since they decide what a job may read elsewhere.
_sessions: OrderedDict[tuple[str, Containers, str], Session] = OrderedDict()
type _Place = tuple[str, Containers, str, str, bool, bool]
_sources: OrderedDict[_Place, tuple[Source, dict[str, pa.Array]]] = OrderedDict()


def run_arrow(job: Job, tasks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the tasks whose numbers are in the first column of `tasks`.

    The types are exactly those of the job's columns, since Spark takes what it gets by position
    and converts nothing.
    """
    for table in _rows(job, (number for batch in tasks for number in batch[0].to_pylist())):
        yield from table.to_batches()


def run(job: Job, tasks: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Yield the same rows as `run_arrow`, as pandas frames."""
    warnings.filterwarnings("ignore", PANDAS_WARNING, FutureWarning)
    for table in _rows(job, (int(number) for frame in tasks for number in frame["id"])):
        # Arrow-typed columns reach Spark unchanged; NaN in numpy-typed ones becomes null.
        yield table.to_pandas(types_mapper=pd.ArrowDtype)


def partition_batches(job: Job, number: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one task, as `run_arrow` does."""
    for table in _rows(job, [number]):
        yield from table.to_batches()


def _rows(job: Job, numbers: Iterable[int]) -> Iterator[pa.Table]:
    boxes = (box for number in numbers for box in job.boxes(number))
    return batches(piece for box in boxes for piece in _pieces(job, box))


def batches(pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Merge and split tables, in order, into tables within the bounds of a batch."""
    ready: pa.Table | None = None
    waiting: list[pa.Table] = []
    rows = nbytes = 0
    for piece in (part for each in pieces for part in _split(each)):
        full = rows >= BATCH_ROWS or (waiting and nbytes + piece.nbytes > BATCH_BYTES)
        if full:
            if ready is not None:
                yield ready
            ready, waiting, rows, nbytes = _merged(waiting), [], 0, 0
        waiting.append(piece)
        rows, nbytes = rows + piece.num_rows, nbytes + piece.nbytes
    # The rest may have too few rows for a batch of its own.
    left = [table for table in (ready, *waiting) if table is not None]
    if left:
        yield from _split(_merged(left))


def _merged(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).combine_chunks()


def _split(table: pa.Table) -> Iterator[pa.Table]:
    """Split the table into parts no larger than a batch may be."""
    if table.nbytes <= BATCH_BYTES or table.num_rows <= 1:
        if table.num_rows:
            yield table
        return
    half = table.num_rows // 2
    yield from _split(table.slice(0, half))
    yield from _split(table.slice(half))


def _pieces(job: Job, box: Box) -> Iterator[pa.Table]:
    """Yield the rows of a box in C order, in tables of at most `BATCH_ROWS` rows."""
    source, coordinates = _open(job)
    # A packed value is decoded to as many as 8 bytes.
    sizes = [max(source.encoded(column.name).dtype.itemsize, 8) for column in job.variables]
    blocks = plan_scan(job.scan.within(box), target_rows=max(BLOCK_BYTES // (sum(sizes) or 1), 1))
    for block in blocks:
        axes = blocks.within(block)
        values = [_read(source, column, block, axes) for column in job.variables]
        places = [axis.positions() for axis in axes]
        along = [
            coordinates[column.name].take(pa.array(place))
            if column.name in coordinates
            else pa.array(place)
            for column, place in zip(job.dimensions, places, strict=True)
        ]
        size = math.prod(map(len, along))
        for start in range(0, size, BATCH_ROWS):
            stop = min(start + BATCH_ROWS, size)
            yield _table(job, along, start, stop, [each[start:stop] for each in values])


def _read(source: Source, column: Column, block: Box, axes: tuple[Axis, ...]) -> npt.NDArray[Any]:
    """The selected cells of a block in C order."""
    region = tuple(slice(lo, hi) for lo, hi in zip(block.lo, block.hi, strict=True))
    values = source.read(column.name, region)
    for number, (axis, lo, length) in enumerate(zip(axes, block.lo, block.shape, strict=True)):
        if axis.size < length:
            values = values.take(axis.positions() - lo, axis=number)
    return values.reshape(-1)


def _table(
    job: Job, along: list[pa.Array], start: int, stop: int, values: list[npt.NDArray[Any]]
) -> pa.Table:
    """The rows from `start` to `stop` of a block's selected cells, numbered in C order.

    `along` has the coordinates' selected values by axis, `values` the variables' values.
    """
    arrays: list[pa.Array] = []
    inner = 1
    for coordinate in reversed(along):
        arrays.insert(0, _spread(coordinate, start, stop, inner))
        inner *= len(coordinate)
    for column, each in zip(job.variables, values, strict=True):
        arrays.append(to_arrow(each, column, nan_is_null=job.nan != "keep"))
    names = [column.name for column in (*job.dimensions, *job.variables)]
    table = pa.Table.from_arrays(arrays, names)
    if job.nan == "drop" and values:
        kept = ~np.logical_and.reduce([pd.isnull(each) for each in values])
        table = table.filter(pa.array(kept))
    return table


def _spread(coordinate: pa.Array, start: int, stop: int, inner: int) -> pa.Array:
    """Repeat a coordinate's values for cells in C order; `inner` consecutive cells share a value.

    It repeats whole values, without arithmetic per cell.
    """
    size, values = len(coordinate), _plain(coordinate)
    given = np.arange(size) if values is None else values
    if inner == 1:
        first = start % size
        found = np.tile(given, -(-(first + stop - start) // size))[first : first + stop - start]
    else:
        runs = np.arange(start // inner, -(-stop // inner))
        edges = np.clip(np.append(runs, runs[-1] + 1) * inner, start, stop)
        found = np.repeat(given[runs % size], np.diff(edges))
    if values is None:
        return coordinate.take(pa.array(found))
    buffers = [None, pa.py_buffer(np.ascontiguousarray(found))]
    return pa.Array.from_buffers(coordinate.type, len(found), buffers)


def _plain(column: pa.Array) -> npt.NDArray[Any] | None:
    """The values' bytes as integers of the same width; None if there is no such integer type."""
    if column.null_count or not pa.types.is_primitive(column.type) or column.type.bit_width < 8:
        return None
    width = column.type.bit_width // 8
    buffer = column.buffers()[1]
    return np.frombuffer(buffer, f"u{width}", len(column), column.offset * width)


def _open(job: Job) -> tuple[Source, dict[str, pa.Array]]:
    """The job's group and its coordinates as columns, opened on first use."""
    nan_is_null = job.nan != "keep"
    within = (job.group, job.decode_times, nan_is_null)
    place = (job.storage.url, job.containers, job.snapshot_id, *within)
    if place not in _sources:
        source = Source(_session(job), job.group, decode_times=job.decode_times)
        # Everything imported and opened so far lives as long as the worker.
        if not gc.get_freeze_count():
            gc.freeze()
        _keep(_sources, place, (source, {}))
    source, coordinates = _sources[place]
    for column in job.dimensions:
        values = source.coordinate(column.name)
        if column.name not in coordinates and values is not None:
            coordinates[column.name] = to_arrow(values, column, nan_is_null=nan_is_null)
    return source, coordinates


def _session(job: Job) -> Session:
    place = (job.storage.url, job.containers, job.snapshot_id)
    if place not in _sessions:
        repository = Repository.open(job.storage, virtual_containers=dict(job.containers))
        _keep(_sessions, place, repository.readonly_session(snapshot_id=job.snapshot_id))
    return _sessions[place]


def _keep[K, V](kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept[key] = value
    while len(kept) > _KEPT:
        kept.popitem(last=False)
