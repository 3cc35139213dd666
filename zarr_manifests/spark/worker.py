"""What a task does: read the chunks of its boxes, and return them as rows.

It runs in Spark's Python workers. A worker serves many tasks and keeps what it has opened, so it
opens a repository and reads coordinates once per snapshot. Memory is bounded by what one task holds
at a time: a block (`BLOCK_BYTES` of values and `BLOCK_CHUNKS` chunks, or one chunk), a window of
stored chunks, and two batches. Invariants:

- A chunk is read once, as blocks are whole chunks. No chunk outside the boxes is read.
- A batch has at most `BATCH_BYTES`, and at least `BATCH_ROWS` rows unless that would exceed the
  first bound or the task has fewer.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from functools import cache, partial
from itertools import count
from operator import sub
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from zarr_manifests import repositories
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.scan import Axis, plan_scan
from zarr_manifests.planning.zones.time_zone import zone_of
from zarr_manifests.session import Session
from zarr_manifests.spark.job import Containers, Job
from zarr_manifests.spark.row_filter import kept
from zarr_manifests.spark.schema import SHAPE, to_arrow
from zarr_manifests.spark.source import Source
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import place_of

__all__ = [
    "BATCH_BYTES",
    "BATCH_ROWS",
    "BLOCK_BYTES",
    "BLOCK_CHUNKS",
    "PANDAS_WARNING",
    "batches",
    "opened",
    "partition_batches",
    "run",
    "run_arrow",
]

BATCH_ROWS: Final = 64 * 1024
BATCH_BYTES: Final = 32 * 1024**2
BLOCK_BYTES: Final = 32 * 1024**2
BLOCK_CHUNKS: Final = 64 * 1024

PANDAS_WARNING: Final = "PySpark does not yet fully support pandas"
"""Start of a warning that pyspark gives for each batch, about features not used here."""

_KEPT: Final = 8
# A column of so many 8-byte values has half as many bytes as a block.
_TILE_ROWS: Final = 2 * 1024**2
# Reading a box by itself costs about as much as passing over so many cells.
_SKIPPED_CELLS: Final = 256 * 1024
# The key has the containers, since they decide what a job may read elsewhere.
_sessions: OrderedDict[tuple[Hashable, Containers, str], Session] = OrderedDict()
type _Place = tuple[Hashable, Containers, str, str, bool, bool]
type _Held = dict[str, tuple[Box, npt.NDArray[Any]]]
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
    if job.lease is not None:
        job.lease.renew()
    boxes = (box for number in numbers for box in job.boxes(number))
    return batches(_chunk_rows(job, boxes) if job.layout == "chunk" else _pieces(job, boxes))


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


def _pieces(job: Job, boxes: Iterable[Box]) -> Iterator[pa.Table]:
    """Yield the rows of boxes, in tables of at most `BATCH_ROWS` rows."""
    source, coordinates = _open(job)
    along = [coordinates.get(column.name) for column in job.dimensions]
    tiles = _Tiles()
    held: _Held = {}
    for block, parts in _blocks(job, source, boxes):
        axes = job.scan.within(block)
        stored = [_stored(job, source, each.name, block, parts, held) for each in job.variables]
        cells = _selected(block, parts, axes)
        if cells is None:
            places = [axis.positions() for axis in axes]
            shape = [len(place) for place in places]
            stored = [_taken(each, axes, block).reshape(-1) for each in stored]
        else:
            shape = [len(cells)]
            places = list(block.unravel(cells).T)
            stored = [each.reshape(-1)[cells] for each in stored]
        values = [
            source.decode(column.name, each)
            for column, each in zip(job.variables, stored, strict=True)
        ]
        known = [
            pa.array(place) if coordinate is None else coordinate.take(pa.array(place))
            for coordinate, place in zip(along, places, strict=True)
        ]
        size = math.prod(shape)
        for start in range(0, size, BATCH_ROWS):
            stop = min(start + BATCH_ROWS, size)
            if cells is None:
                spread = tiles.columns(known, start, stop)
            else:
                spread = [each.slice(start, stop - start) for each in known]
            yield _table(job, spread, [each[start:stop] for each in values])


def _stored(
    job: Job, source: Source, name: str, block: Box, parts: list[Box] | None, held: _Held
) -> npt.NDArray[Any]:
    """A variable's stored values in a block, repeated along dimensions that it does not have.

    Values that are repeated are kept in `held`, since the next block may have the same.
    """
    all_of = [column.name for column in job.dimensions]
    dims = source.encoded(name).dims
    if list(dims) == all_of:
        return source.stored(name, block, parts)
    at = [all_of.index(str(dim)) for dim in dims]
    own = Box(tuple(block.lo[axis] for axis in at), tuple(block.hi[axis] for axis in at))
    if name not in held or held[name][0] != own:
        held[name] = own, source.stored(name, own)
    values = held[name][1].transpose(np.argsort(at))
    shape = [length if axis in at else 1 for axis, length in enumerate(block.shape)]
    return np.broadcast_to(values.reshape(shape), block.shape)


def _chunk_rows(job: Job, boxes: Iterable[Box]) -> Iterator[pa.Table]:
    """Yield a row for each chunk of boxes, with the values of its selected cells."""
    source, coordinates = _open(job)
    names = [column.name for column in job.variables]
    schema = pa.schema([(column.name, column.arrow) for column in job.columns])
    held: _Held = {}
    for block, parts in _blocks(job, source, boxes):
        stored = [_stored(job, source, name, block, parts, held) for name in names]
        side = cache(partial(_side, job, coordinates))  # shared by the chunks of a line
        for part in parts or [block]:
            decoded = [
                source.decode(name, np.ascontiguousarray(each[_place(part, block)]))
                for name, each in zip(names, stored, strict=True)
            ]
            rows = []
            for chunk in plan_scan(job.scan.within(part), target_rows=1):
                sides = list(map(side, count(), chunk.lo, chunk.hi))
                axes = tuple(axis for axis, _ in sides)
                values = [_taken(each[_place(chunk, part)], axes, chunk) for each in decoded]
                if job.nan == "drop" and values and all(pd.isnull(each).all() for each in values):
                    continue
                rows.append(_chunk_row(job, sides, values))
            for start in range(0, len(rows), 1024):
                yield pa.Table.from_pylist(rows[start : start + 1024], schema)


def _place(box: Box, within: Box) -> tuple[slice, ...]:
    """Where the cells of a box are in an array of the cells of a larger one."""
    sides = zip(box.lo, box.hi, within.lo, strict=True)
    return tuple(slice(lo - at, hi - at) for lo, hi, at in sides)


def _side(
    job: Job, coordinates: dict[str, pa.Array], number: int, lo: int, hi: int
) -> tuple[Axis, list[Any]]:
    """What is selected along an axis from `lo` to `hi`, and its coordinates as Python values."""
    axis = job.scan.axes[number].within(lo, hi)
    at, along = pa.array(axis.positions()), coordinates.get(job.dimensions[number].name)
    return axis, (at if along is None else along.take(at)).to_pylist()


def _chunk_row(
    job: Job, sides: list[tuple[Axis, list[Any]]], values: list[npt.NDArray[Any]]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        column.name: along for column, (_, along) in zip(job.dimensions, sides, strict=True)
    }
    row[SHAPE] = [len(along) for _, along in sides]
    for column, each in zip(job.variables, values, strict=True):
        little = each.astype(each.dtype.newbyteorder("<"), copy=False)
        row[column.name] = {"dtype": little.dtype.str, "data": little.tobytes()}
    return row


def _blocks(
    job: Job, source: Source, boxes: Iterable[Box]
) -> Iterator[tuple[Box, list[Box] | None]]:
    """Cut boxes that are large, and gather neighbouring ones that are small.

    Yields blocks of cells, each with the parts of it that are due, or None for all of it.
    """
    # A packed value is decoded to as many as 8 bytes.
    sizes = [max(source.encoded(column.name).dtype.itemsize, 8) for column in job.variables]
    # Of variables that lack a dimension there are fewer chunks.
    chunk_cells = min(
        (
            source.chunk_cells(column.name)
            for column in job.variables
            if source.encoded(column.name).ndim == len(job.dimensions)
        ),
        default=1,
    )
    most = max(min(BLOCK_BYTES // (sum(sizes) or 1), BLOCK_CHUNKS * chunk_cells), 1)

    chunk_shape = [axis.chunk for axis in job.scan.axes]

    def covered(lo: Coords, hi: Coords) -> int:
        sides = zip(lo, hi, chunk_shape, strict=True)
        return math.prod([(-(-end // n) - start // n) * n for start, end, n in sides])

    # There may be very many boxes, so the one around them is a pair of corners until it is full.
    parts: list[Box] = []
    lo: Coords = ()
    hi: Coords = ()
    due = 0
    for box in boxes:
        size = math.prod(map(sub, box.hi, box.lo))
        if parts:
            wider = tuple(map(min, lo, box.lo)), tuple(map(max, hi, box.hi))
            skipped = math.prod(map(sub, wider[1], wider[0])) - due - size
            if skipped <= len(parts) * _SKIPPED_CELLS and covered(*wider) <= most:
                (lo, hi), due = wider, due + size
                parts.append(box)
                continue
        if covered(box.lo, box.hi) > most:
            yield from ((block, None) for block in _cut(job, box, most))
            continue
        if parts:
            yield Box(lo, hi), parts
        parts, lo, hi, due = [box], box.lo, box.hi, size
    if parts:
        yield Box(lo, hi), parts


def _cut(job: Job, box: Box, most: int) -> Iterator[Box]:
    """Cut a box into blocks of whole chunks that cover at most so many cells."""
    axes = [axis.in_chunks() for axis in job.scan.within(box)]
    for block in plan_scan(axes, target_rows=most):
        yield block.shared(box)


def _selected(block: Box, parts: list[Box] | None, axes: tuple[Axis, ...]) -> IndexArray | None:
    """Numbers of the selected cells of a block in C order; None if axes alone select them."""
    if parts is None or len(parts) == 1:
        return None
    mask = np.zeros(block.shape, bool)
    for part in parts:
        mask[_place(part, block)] = True
    for number, (axis, lo, length) in enumerate(zip(axes, block.lo, block.shape, strict=True)):
        if axis.size < length:
            others = np.ones(length, bool)
            others[axis.positions() - lo] = False
            mask[(slice(None),) * number + (others,)] = False
    return np.flatnonzero(mask)


def _taken(values: npt.NDArray[Any], axes: tuple[Axis, ...], block: Box) -> npt.NDArray[Any]:
    """The cells of a block that its axes select."""
    for number, (axis, lo, length) in enumerate(zip(axes, block.lo, block.shape, strict=True)):
        if axis.size < length:
            values = values.take(axis.positions() - lo, axis=number)
    return values


def _table(job: Job, along: list[pa.Array], values: list[npt.NDArray[Any]]) -> pa.Table:
    """The rows of cells with these coordinates and values."""
    null = job.nan != "keep"
    cells = [
        to_arrow(each, column, nan_is_null=null)
        for column, each in zip(job.variables, values, strict=True)
    ]
    names = [column.name for column in (*job.dimensions, *job.variables)]
    table = pa.Table.from_arrays([*along, *cells], names)
    if job.nan == "drop" and values:
        present = ~np.logical_and.reduce([pd.isnull(each) for each in values])
        table = table.filter(pa.array(present))
    if job.where is not None:
        table = kept(table, job.where, zone_of(job.time_zone))
    return table


class _Tiles:
    """Coordinates of the cells of blocks, in C order.

    The inner axes of a block repeat the same pattern, and so do blocks with the same inner axes.
    Such a pattern is made once, and batches are slices of it.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[list[pa.Array], pa.Array]] = {}

    def columns(self, along: list[pa.Array], start: int, stop: int) -> list[pa.Array]:
        """The columns of the cells from `start` to `stop` of the product of some coordinates."""
        size = math.prod(map(len, along))
        found: list[pa.Array] = []
        inner = 1
        for axis in reversed(range(len(along))):
            period = inner * len(along[axis])
            if period <= _TILE_ROWS:
                # Long enough for a batch that begins anywhere in the pattern.
                length = min(period + BATCH_ROWS, size)
                tile = self._tile(along[axis:], length, inner)
                found.insert(0, tile.slice(start % period, stop - start))
            else:
                found.insert(0, _spread(along[axis], start, stop, inner))
            inner = period
        return found

    def _tile(self, along: list[pa.Array], length: int, inner: int) -> pa.Array:
        made = self._made.get(len(along))
        if made is not None and len(made[1]) >= length and _alike(made[0], along):
            return made[1]
        tile = _spread(along[0], 0, length, inner)
        self._made[len(along)] = along, tile
        return tile


def _alike(some: list[pa.Array], others: list[pa.Array]) -> bool:
    return all(a is b or a.equals(b) for a, b in zip(some, others, strict=True))


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
    place = (place_of(job.storage), job.containers, job.snapshot_id, *within)
    if place not in _sources:
        session = opened(job.storage, job.snapshot_id, job.containers)
        source = Source(session, job.group, decode_times=job.decode_times)
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


def opened(storage: Storage, snapshot_id: str, containers: Containers = ()) -> Session:
    """A snapshot of a repository, which the worker keeps open for later tasks."""
    place = (place_of(storage), containers, snapshot_id)
    if place not in _sessions:
        repository = repositories.open(storage, virtual_containers=dict(containers))
        _keep(_sessions, place, repository.readonly_session(snapshot_id))
    return _sessions[place]


def _keep[K, V](held: OrderedDict[K, V], key: K, value: V) -> None:
    held[key] = value
    while len(held) > _KEPT:
        held.popitem(last=False)
