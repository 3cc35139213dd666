"""What a task does: read the chunks of its boxes, and return rows, or lines that become rows.

It runs in Spark's Python workers. A worker serves many tasks and keeps what it has opened, so it
opens a repository and reads coordinates once per snapshot. Memory is bounded by what one task holds
at a time: a block (`BLOCK_BYTES` of values and `BLOCK_CHUNKS` chunks, or one chunk), a window of
stored chunks, and two batches. Invariants:

- A chunk is read once, as blocks are whole chunks. No chunk outside the boxes is read.
- A batch has at most `BATCH_BYTES`, and at least half of `BATCH_ROWS` rows unless that would exceed
  the first bound or it is the last of its task.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from operator import sub
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from zarr_manifests import repositories
from zarr_manifests.errors import ManifestsError
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.metrics import place_of
from zarr_manifests.planning.scan import Axis, plan_scan
from zarr_manifests.planning.skipping import comparable, matching_cells
from zarr_manifests.planning.where import zone_of
from zarr_manifests.spark.job import Job, to_arrow
from zarr_manifests.spark.source import Source, place_in

BATCH_ROWS: Final = 64 * 1024
BATCH_BYTES: Final = 32 * 1024**2
ROW_CELLS: Final = 8 * 1024
"""The most cells in a row of lines, if a line is not longer: Spark makes rows of all at once."""
BLOCK_BYTES: Final = 32 * 1024**2
BLOCK_CHUNKS: Final = 64 * 1024

_KEPT: Final = 16
# Reading a box by itself costs about as much as passing over so many cells.
_SKIPPED_CELLS: Final = 256 * 1024
_opened: Final[dict[Hashable, tuple[Source, dict[str, pa.Array]]]] = {}
"""What is open, the least recent first."""


def run_arrow(
    job: Job, tasks: Iterable[pa.RecordBatch], *, in_lines: bool = False
) -> Iterator[pa.RecordBatch]:
    """The rows of the tasks whose numbers are in the first column of `tasks`.

    The types are exactly those of the job's columns, since Spark takes what it gets by position
    and converts nothing. Rows of lines have many cells each: see `Cells.lines`.
    """
    numbers = [number for batch in tasks for number in batch[0].to_pylist()]
    return partition_batches(job, *numbers, in_lines=in_lines)


def partition_batches(job: Job, *numbers: int, in_lines: bool = False) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the tasks with these numbers, as `run_arrow` does."""
    with briefly():
        if job.lease is not None:
            job.lease.renew()
        boxes = (box for number in numbers for box in job.boxes(number))
        if job.options.layout == "chunk":
            made = _chunk_rows(job, boxes)
        else:
            form = Cells.lines if in_lines else Cells.rows
            names = [column.name for column in job.columns]
            made = (form(cells, names) for cells in _cells(job, boxes))
        for table in batches(made):
            yield from table.to_batches()


class JobReader(DataSourceReader):
    """A data source's tasks: one partition for each task of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def partitions(self) -> list[InputPartition]:
        """The numbers of the tasks."""
        if self._job.lease is not None:
            self._job.lease.renew()  # a view may be older than the first query on it
        return [InputPartition(number) for number in range(self._job.tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        # For a job without tasks, Spark makes a partition without a value.
        number = partition.value
        return iter(()) if number is None else partition_batches(self._job, number)


class Cells(NamedTuple):
    """Cells of a box, in C order: labels along each axis, which cells (None: all), and values."""

    along: list[pa.Array]
    numbers: IndexArray | None
    values: list[pa.Array]

    def rows(self, names: list[str]) -> pa.Table:
        """One row for each cell."""
        return pa.table([*_taken_at(self.along, self.numbers), *self.values], names)

    def lines(self, names: list[str]) -> pa.Table:
        """Few rows of lists: outer labels, by line; those along a line; values; a line's length.

        A line has the cells along the last axis, and all lines of a row have the same of them. So
        labels are there once, where a row for each cell would repeat them.
        """
        *outer, inner = self.along
        first = None
        if self.numbers is None:
            lines, inside = math.prod(map(len, outer)), len(inner)
            line = np.append(np.arange(0, lines, max(ROW_CELLS // inside, 1)), lines)
            place, cell = np.tile(np.arange(inside), len(line) - 1), line * inside
            along = np.arange(len(line)) * inside
        else:
            of, place = np.divmod(self.numbers, len(inner))
            starts = np.flatnonzero(np.diff(of, prepend=-1))
            first, line = of[starts], np.arange(len(starts) + 1)
            along = cell = np.append(starts, len(of))
        columns = [*_taken_at(outer, first), inner.take(pa.array(place)), *self.values]
        ends = [line] * len(outer) + [along] + [cell] * len(self.values)
        lists = [
            pa.ListArray.from_arrays(pa.array(end.astype(np.int32)), column)
            for end, column in zip(ends, columns, strict=True)
        ]
        length = pa.array(np.diff(along).astype(np.int32))
        return pa.table([*lists, length], [*names, "length"])


def batches(pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Merge and split tables, in order, into tables within the bounds of a batch."""
    waiting: list[pa.Table] = []
    rows = nbytes = 0
    for piece in (part for each in pieces for part in _split(each)):
        if rows >= BATCH_ROWS // 2 or (rows and nbytes + piece.nbytes > BATCH_BYTES):
            yield pa.concat_tables(waiting).combine_chunks()
            waiting, rows, nbytes = [], 0, 0
        waiting.append(piece)
        rows, nbytes = rows + piece.num_rows, nbytes + piece.nbytes
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


def _split(table: pa.Table) -> Iterator[pa.Table]:
    """Split the table into parts no larger than a batch may be."""
    if table.nbytes <= BATCH_BYTES or table.num_rows <= 1:
        if table.num_rows:
            yield table
        return
    half = table.num_rows // 2
    yield from _split(table.slice(0, half))
    yield from _split(table.slice(half))


def _cells(job: Job, boxes: Iterable[Box]) -> Iterator[Cells]:
    """Yield the cells of boxes, at most `BATCH_ROWS` at a time."""
    source, coordinates = _open(job)
    for block, parts in _blocks(job, source, boxes):
        axes = job.scan.within(block)
        stored = [source.stored(each.name, block, parts) for each in job.variables]
        stored = [_taken(each, axes, block).reshape(-1) for each in stored]
        cells = None  # all that the axes select
        if parts is not None:
            due = np.zeros(block.shape, bool)
            for part in parts:
                due[place_in(block, part)] = True
            cells = np.flatnonzero(_taken(due, axes, block))
            stored = [each[cells] for each in stored]
        values = [
            source.decode(column.name, each)
            for column, each in zip(job.variables, stored, strict=True)
        ]
        places = (pa.array(axis.positions()) for axis in axes)
        along = [
            place if column.name not in coordinates else coordinates[column.name].take(place)
            for column, place in zip(job.dimensions, places, strict=True)
        ]
        start = 0
        shape = (len(cells),) if cells is not None else tuple(map(len, along))
        for slab in Box((0,) * len(shape), shape).pieces(BATCH_ROWS):
            stop = start + slab.size
            here = [each[start:stop] for each in values]
            if cells is not None:
                yield _due(job, along, cells[start:stop], here)
            else:
                sides = zip(along, slab.lo, slab.shape, strict=True)
                yield _due(job, [each.slice(lo, length) for each, lo, length in sides], None, here)
            start = stop


def _taken_at(along: Sequence[pa.Array], numbers: IndexArray | None) -> list[pa.Array]:
    """The labels of cells, which are numbered in C order; None: of all of them."""
    shape = tuple(map(len, along)) or (1,)  # without axes there is a cell, too
    # Of all, to list the positions is much faster than to divide.
    at = np.indices(shape, np.int32) if numbers is None else np.unravel_index(numbers, shape)
    taken = zip(along, at, strict=False)
    return [labels.take(pa.array(each.reshape(-1))) for labels, each in taken]


def _chunk_rows(job: Job, boxes: Iterable[Box]) -> Iterator[pa.Table]:
    """Yield a row for each chunk of boxes, with the values of its selected cells."""
    source, coordinates = _open(job)
    schema = pa.schema([(column.name, column.arrow) for column in job.columns])
    drop = job.options.nan == "drop"
    for block, parts in _blocks(job, source, boxes):
        stored = [source.stored(each.name, block, parts) for each in job.variables]
        side = cache(partial(_side, job, coordinates))  # shared by the chunks of a line
        for part in parts or [block]:
            here = [np.ascontiguousarray(each[place_in(block, part)]) for each in stored]
            decoded = [
                source.decode(column.name, each)
                for column, each in zip(job.variables, here, strict=True)
            ]
            rows = []
            for chunk in plan_scan(job.scan.within(part), target_rows=1):
                sides = [side(*each) for each in zip(count(), chunk.lo, chunk.hi, strict=False)]
                axes, along = tuple(axis for axis, _ in sides), [labels for _, labels in sides]
                values = [_taken(each[place_in(part, chunk)], axes, chunk) for each in decoded]
                flat = [each.reshape(-1) for each in values]
                if drop and values and all(comparable(each)[1].all() for each in flat):
                    continue
                cells = [each.astype(each.dtype.newbyteorder("<"), copy=False) for each in values]
                data = [{"dtype": each.dtype.str, "data": each.tobytes()} for each in cells]
                row = (*along, list(map(len, along)), *data)
                rows.append(dict(zip(schema.names, row, strict=True)))
            yield pa.Table.from_pylist(rows, schema)


def _side(
    job: Job, coordinates: dict[str, pa.Array], number: int, lo: int, hi: int
) -> tuple[Axis, list[Any]]:
    """What is selected along an axis from `lo` to `hi`, and its coordinates as Python values."""
    axis = job.scan.axes[number].within(lo, hi)
    coordinate, at = coordinates.get(job.dimensions[number].name), pa.array(axis.positions())
    return axis, (at if coordinate is None else coordinate.take(at)).to_pylist()


def _blocks(
    job: Job, source: Source, boxes: Iterable[Box]
) -> Iterator[tuple[Box, list[Box] | None]]:
    """Cut boxes that are large, and gather neighbouring ones that are small.

    Yields blocks of cells, each with the parts of it that are due, or None for all of it.
    """
    # A packed value is decoded to as many as 8 bytes.
    row_bytes = sum(max(source.array(column.name).dtype.itemsize, 8) for column in job.variables)
    chunk_cells = min((math.prod(source.array(c.name).chunks) for c in job.variables), default=1)
    most = max(min(BLOCK_BYTES // (row_bytes or 1), BLOCK_CHUNKS * chunk_cells), 1)
    chunk_shape = [axis.chunk for axis in job.scan.axes]

    def covered(lo: Coords, hi: Coords) -> int:
        sides = zip(lo, hi, chunk_shape, strict=True)
        return math.prod([(-(-end // n) - start // n) * n for start, end, n in sides])

    def block_of(parts: list[Box], due: int) -> tuple[Box, list[Box] | None]:
        block = Box(lo, hi)
        return block, None if due == block.size else parts

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
            yield block_of(parts, due)
        parts, lo, hi, due = [box], box.lo, box.hi, size
        if covered(lo, hi) > most:
            parts = []
            whole = [axis.in_chunks() for axis in job.scan.within(box)]
            yield from ((block.shared(box), None) for block in plan_scan(whole, target_rows=most))
    if parts:
        yield block_of(parts, due)


def _taken(values: npt.NDArray[Any], axes: tuple[Axis, ...], block: Box) -> npt.NDArray[Any]:
    """The cells of a block that its axes select."""
    for number, (axis, lo, length) in enumerate(zip(axes, block.lo, block.shape, strict=True)):
        if axis.size < length:
            values = values.take(axis.positions() - lo, axis=number)
    return values


def _due(
    job: Job, along: list[pa.Array], numbers: IndexArray | None, values: list[npt.NDArray[Any]]
) -> Cells:
    """The cells among these that the read keeps, by their values."""
    null = job.options.nan != "keep"
    due = None
    if job.options.nan == "drop" and values:
        due = ~np.logical_and.reduce([comparable(each)[1] for each in values])
    decoded = {column.name: each for column, each in zip(job.variables, values, strict=True)}
    for comparison in job.where.comparisons if job.where else ():
        # The others choose positions along dimensions, which are all that is read.
        if comparison.column in decoded:
            how: Any = {"zone": zone_of(job.facts.time_zone), "nan_is_null": null}
            matching = matching_cells(comparison, decoded[comparison.column], **how)
            due = matching if due is None else due & matching
    if due is not None and not due.all():
        numbers = np.flatnonzero(due) if numbers is None else numbers[due]
        values = [each[due] for each in values]
    cells = [
        to_arrow(each, column, nan_is_null=null)
        for column, each in zip(job.variables, values, strict=True)
    ]
    return Cells(along, numbers, cells)


def _open(job: Job) -> tuple[Source, dict[str, pa.Array]]:
    """The job's group and its coordinates as columns, kept open for later tasks."""
    null = job.options.nan != "keep"

    # Containers decide what a job may read elsewhere.
    place = (place_of(job.storage), job.containers, job.snapshot_id)
    key = (*place, job.group, job.options.decode_times, null)
    found = _opened.pop(key, None)
    if found is None:
        containers = dict(job.containers)
        repository = repositories.open(job.storage, virtual_containers=containers)
        session = repository.readonly_session(job.snapshot_id)
        found = Source(session, job.group, decode_times=job.options.decode_times), {}
        # Everything imported and opened so far lives as long as the worker.
        if not gc.get_freeze_count():
            gc.freeze()
    _opened[key] = found
    while len(_opened) > _KEPT:
        del _opened[next(iter(_opened))]
    source, columns = found
    for each in job.dimensions:
        values = source.coordinate(each.name)
        if each.name not in columns and values is not None:
            columns[each.name] = to_arrow(values, each, nan_is_null=null)
    return source, columns


@contextmanager
def briefly() -> Iterator[None]:
    """Have Spark show an error of this package as one sentence, without Python's traceback.

    Other errors keep theirs. A worker ends with its error, so the setting has no other effect.
    """
    try:
        yield
    except ManifestsError:
        if any(name.startswith("PYTHON_WORKER_FACTORY") for name in os.environ):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
