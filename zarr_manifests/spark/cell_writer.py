"""What the tasks of a write from rows do: tell which cell a row is of, and fill chunks.

1. `share_cells` looks up the coordinates of rows, encodes and checks their values, and gathers many
   rows at a time by bin. What it gives is few, large rows, so shuffling them costs little.
2. `write_cells` puts the cells of a bin in place, and writes its chunks to a fork of the session.

Memory is bounded by what one task holds: `GATHER_BYTES` of rows in the first step, the values of one
bin in the second. Invariants:

- A chunk is written by one task, once.
- Cells that are not written keep their values.
- Wrong data is told in a row of the result and is no exception, since Spark would try it again.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zarr

from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.session import Fork
from zarr_manifests.spark.cell_values import Values, shown
from zarr_manifests.spark.write_plan import WritePlan
from zarr_manifests.store import workspace_of
from zarr_manifests.xarray.array_target import ArrayTarget
from zarr_manifests.xarray.fit import MisfitError

__all__ = ["GATHER_BYTES", "REPORTED", "SHARED", "share_cells", "write_cells"]

GATHER_BYTES: Final = 64 * 1024**2
"""How much of rows is gathered before it is shared out."""

SHARED: Final = pa.schema([("task", pa.int32()), ("bin", pa.int64()), ("cells", pa.binary())])
"""What the first step gives: the task and bin of cells. Without a bin, a mark or a failure."""

REPORTED: Final = pa.schema([("fork", pa.binary()), ("cells", pa.int64()), ("failure", pa.binary())])
"""What a task of the second step gives, in one row: its fork, pickled, and what it counted."""

_BLOB_BYTES: Final = 4 * 1024**2
_LISTED: Final = 3

type _Columns = list[npt.NDArray[Any]]


# --- from rows to shares ---------------------------------------------------------------------


def share_cells(plan: WritePlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the cells of rows, by the task and the bin that write them.

    Parameters
    ----------
    plan : WritePlan
        The write.
    batches : iterable of RecordBatch
        Rows with the columns of the plan.
    """
    try:
        yield from _shares(plan, batches)
    except InvalidArgumentError as error:
        row = pa.array([0], pa.int32()), pa.array([None], pa.int64()), pa.array([pickle.dumps(error)])
        yield pa.record_batch(list(row), schema=SHARED)


def _shares(plan: WritePlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    waiting: list[_Columns] = []
    nbytes = 0
    for batch in batches:
        if batch.num_rows:
            columns = _cells_of(plan, batch)
            waiting.append(columns)
            nbytes += sum(_nbytes(column) for column in columns)
        if nbytes >= GATHER_BYTES:
            yield from _shared(plan, waiting)
            waiting, nbytes = [], 0
    if waiting:
        yield from _shared(plan, waiting)


def _nbytes(column: npt.NDArray[Any]) -> int:
    return column.nbytes if column.dtype.kind not in "OT" else 64 * len(column)


def _cells_of(plan: WritePlan, batch: pa.RecordBatch) -> _Columns:
    """The keys of the rows' cells, their stored values, and their order if there is one."""
    places = [axis.positions(batch.column(axis.name)) for axis in plan.along]
    inside = plan.bins.inside(places)
    if not inside.all():
        raise InvalidArgumentError(_outside(plan, batch, places, inside))
    keys = plan.bins.keys(places, batch.num_rows)
    try:
        values = [one.codes(batch.column(one.name)) for one in plan.variables]
    except MisfitError as error:
        raise InvalidArgumentError(_misfit(plan, places, error)) from None
    order = [] if plan.order_by is None else [_order(plan, batch, places)]
    return [keys, *values, *order]


def _order(plan: WritePlan, batch: pa.RecordBatch, places: Sequence[IndexArray]) -> Any:
    assert plan.order_by is not None
    column = batch.column(plan.order_by)
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    if column.null_count:
        row = column.is_valid().to_numpy(zero_copy_only=False).argmin()
        raise InvalidArgumentError(
            f"a row at {plan.cell([at[row] for at in places])} has no {plan.order_by!r}, so "
            "it does not say whether it is the last"
        )
    return column.cast(pa.float64(), safe=False).to_numpy()


def _outside(
    plan: WritePlan, batch: pa.RecordBatch, places: Sequence[IndexArray], inside: Any
) -> str:
    """Describe rows that are of no cell that is written."""
    rows = np.flatnonzero(~inside)[:_LISTED]
    unknown = [
        (axis, at) for axis, at in zip(plan.along, places, strict=True) if (at[rows] < 0).any()
    ]
    examples = []
    for row in rows.tolist():
        labels = [shown(batch.column(axis.name)[row].as_py()) for axis in plan.along]
        pairs = zip(plan.along, labels, strict=True)
        examples.append("(" + ", ".join(f"{axis.name}={label}" for axis, label in pairs) + ")")
    listed = ", ".join(examples)
    if not unknown:
        return f"rows are outside the region that is written: {listed}. Nothing was written"
    names = " and ".join(repr(axis.name) for axis, _ in unknown)
    hint = ""
    if any(axis.lookup is not None and axis.lookup.tolerance is None for axis, _ in unknown):
        hint = "; labels have to be equal, unless tolerance={...} says how far they may be off"
    return f"rows have no cell in the grid, by their {names}: {listed}{hint}. Nothing was written"


def _misfit(plan: WritePlan, places: Sequence[IndexArray], error: MisfitError) -> str:
    """Describe values that would be read back differently."""
    variable = next(one for one in plan.variables if one.name == error.name)
    told = "; ".join(
        f"{found.given} at {plan.cell([at[found.index[0]] for at in places])} would be read back "
        f"as {found.read}"
        for found in error.misfits
    )
    return (
        f"values of {error.name!r} do not fit the array, which has room for "
        f"{variable.fit.range_text}: {told}. Nothing was written. Correct the values, or write the "
        "array anew, with room for them"
    )


def _shared(plan: WritePlan, waiting: Sequence[_Columns]) -> Iterator[pa.RecordBatch]:
    """Share out gathered cells, ordered by their keys."""
    columns = [np.concatenate(parts) for parts in zip(*waiting, strict=True)]
    keys = columns[0]
    if plan.order_by is None:
        order = np.argsort(keys)
    else:
        order = np.lexsort((columns[-1], keys))
    keys = keys[order]
    same = keys[1:] == keys[:-1]
    if same.any():
        order = _without_repeats(plan, columns, order, same)
        keys = columns[0][order]
    numbers, offsets = plan.bins.parted(keys)
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    ends = [*starts[1:].tolist(), len(keys)]
    values = [column[order] for column in columns[1:]]
    ready: list[tuple[int, int, bytes]] = []
    nbytes = 0
    tasks = plan.bins.task_of(numbers[starts], plan.tasks).tolist()
    for start, end, task, number in zip(
        starts.tolist(), ends, tasks, numbers[starts].tolist(), strict=True
    ):
        for data in _blobs(plan, [offsets[start:end], *(each[start:end] for each in values)]):
            ready.append((task, number, data))
            nbytes += len(data)
            if nbytes >= _BLOB_BYTES:
                yield _rows(ready)
                ready, nbytes = [], 0
    if ready:
        yield _rows(ready)


def _rows(ready: Sequence[tuple[int, int, bytes]]) -> pa.RecordBatch:
    columns = zip(*ready, strict=True)
    arrays = [pa.array(each, of.type) for each, of in zip(columns, SHARED, strict=True)]
    return pa.record_batch(arrays, schema=SHARED)


def _blobs(plan: WritePlan, columns: _Columns) -> Iterator[bytes]:
    """Cells of one bin as bytes, in parts that are not too large."""
    schema = plan.cell_schema
    nbytes = sum(_nbytes(column) for column in columns)
    rows, parts = len(columns[0]), -(-nbytes // _BLOB_BYTES)
    for part in range(parts):
        place = slice(part * rows // parts, (part + 1) * rows // parts)
        arrays = [_to_arrow(each[place], one.type) for each, one in zip(columns, schema, strict=True)]
        yield pa.record_batch(arrays, schema=schema).serialize().to_pybytes()


def _to_arrow(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    if values.dtype.kind == "b":
        values = values.view(np.uint8)
    if pa.types.is_fixed_size_binary(kind):
        raw = pa.py_buffer(np.ascontiguousarray(values).tobytes())
        return pa.Array.from_buffers(kind, len(values), [None, raw])
    if values.dtype.kind in "OT":
        return pa.array(values.tolist(), kind)
    return pa.array(values.astype(values.dtype.newbyteorder("="), copy=False), kind)


def _without_repeats(
    plan: WritePlan, columns: _Columns, order: IndexArray, same: npt.NDArray[np.bool_]
) -> IndexArray:
    """The order without rows that another one of the same cell replaces.

    Raises
    ------
    InvalidArgumentError
        If two rows are of one cell, and it is not said which of them counts.
    """
    pairs = np.flatnonzero(same)
    if plan.order_by is not None:
        stamps = columns[-1][order]
        pairs = pairs[~(stamps[pairs] < stamps[pairs + 1])]
    if pairs.size:
        one, other = order[pairs[0]], order[pairs[0] + 1]
        numbers, offsets = plan.bins.parted(columns[0][[one]])
        raise _repeated(
            plan,
            plan.bins.cell(int(numbers[0]), int(offsets[0])),
            [(values[one], values[other]) for values in _values_of(plan, columns[1:])],
        )
    return order[np.append(~same, True)]


def _values_of(plan: WritePlan, columns: _Columns) -> _Columns:
    return columns[: len(plan.variables)]


def _repeated(
    plan: WritePlan, cell: Sequence[int], pairs: Sequence[tuple[Any, Any]]
) -> InvalidArgumentError:
    """The error for two rows of one cell."""
    told = ", ".join(
        f"{one.name} {one.decoded(first)} and {one.decoded(second)}"
        for one, (first, second) in zip(plan.variables, pairs, strict=True)
    )
    how = (
        "give duplicates='last' and order_by=..., if one of them counts"
        if plan.order_by is None
        else f"and the same {plan.order_by!r}, so neither is the last"
    )
    return InvalidArgumentError(
        f"two rows are of the cell {plan.cell(cell)}, with {told}; nothing was written: {how}"
    )


# --- from shares to chunks -------------------------------------------------------------------


def write_cells(
    plan: WritePlan, fork: bytes, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the chunks of one task to a fork; yield one row that says what was done.

    Parameters
    ----------
    plan : WritePlan
        The write.
    fork : bytes
        A pickled fork of the session.
    batches : iterable of RecordBatch
        What `share_cells` gave for this task, ordered by bin if it has several, and a row without
        bin and cells. Without any row, nothing is yielded.
    """
    writer: _TaskWriter | None = None
    try:
        for task, number, cells in _shares_in(batches):
            if writer is None:
                writer = _TaskWriter(plan, fork, task)
            if number is not None:
                writer.put(number, cells)
            elif cells is not None:
                raise pickle.loads(cells)
        if writer is not None:
            written, data = writer.end()
            yield pa.record_batch([[data], [written], pa.array([None], pa.binary())], schema=REPORTED)
    except InvalidArgumentError as error:
        row = [pa.array([None], pa.binary()), [0], [pickle.dumps(error)]]
        yield pa.record_batch(row, schema=REPORTED)


def _shares_in(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, int | None, Any]]:
    for batch in batches:
        tasks, numbers = batch.column(0).to_pylist(), batch.column(1).to_pylist()
        for task, number, cells in zip(tasks, numbers, batch.column(2), strict=True):
            yield task, number, cells.as_buffer() if cells.is_valid else None


class _TaskWriter:
    """Writes the bins of one task, one after the other, to a fork of its own."""

    def __init__(self, plan: WritePlan, fork: bytes, task: int) -> None:
        self._plan, self._fork = plan, pickle.loads(fork)
        assert isinstance(self._fork, Fork)
        store = self._fork.store
        self._targets = [
            ArrayTarget(
                zarr.open_array(store, path=one.path, mode="r+"),
                workspace_of(store),
                statistics=plan.statistics,
            )
            for one in plan.variables
        ]
        self._due = plan.bins.of_task(task, plan.tasks)
        self._next = self._due.start
        self._open: _OpenBin | None = None
        self._cells = 0

    def put(self, number: int, cells: Any) -> None:
        """Take some cells of a bin."""
        if self._open is None or self._open.number != number:
            self._close()
            self._fill_until(number)
            self._open, self._next = _OpenBin(self._plan, number), number + 1
        self._open.put(pa.ipc.read_record_batch(cells, self._plan.cell_schema))

    def end(self) -> tuple[int, bytes]:
        """Write what is left; the number of cells, and the pickled fork."""
        self._close()
        self._fill_until(self._due.stop)
        for target in self._targets:
            target.record()
        return self._cells, pickle.dumps(self._fork)

    def _close(self) -> None:
        if self._open is not None:
            self._cells += self._open.write(self._targets)
            self._open = None

    def _fill_until(self, stop: int) -> None:
        """Write bins that no row is in, unless they are to be kept."""
        assert stop >= self._next, "bins came unordered"
        if self._plan.missing != "keep":
            for number in range(self._next, stop):
                _OpenBin(self._plan, number).write(self._targets)
        self._next = stop


class _OpenBin:
    """The cells of one bin, in memory."""

    def __init__(self, plan: WritePlan, number: int) -> None:
        self._plan, self.number = plan, number
        self._box, size = plan.bins.box(number), math.prod(plan.bins.shape)
        # Pages of zeros take no memory until they are written to.
        self._filled = np.zeros(size, bool)
        self._values = [np.zeros(size, one.stored) for one in plan.variables]
        self._order = None if plan.order_by is None else np.zeros(size)

    def put(self, cells: pa.RecordBatch) -> None:
        """Put cells in place.

        Raises
        ------
        InvalidArgumentError
            If one is there already, and it is not said which of them counts.
        """
        offsets = cells.column(0).to_numpy()
        kept = None
        seen = self._filled[offsets]
        if seen.any():
            kept = self._latest(cells, offsets, seen)
            offsets = offsets[kept]
        for number, (values, variable) in enumerate(zip(self._values, self._plan.variables, strict=True)):
            given = _from_arrow(cells.column(number + 1), variable)
            values[offsets] = given if kept is None else given[kept]
        if self._order is not None:
            stamps = cells.column(cells.num_columns - 1).to_numpy()
            self._order[offsets] = stamps if kept is None else stamps[kept]
        self._filled[offsets] = True

    def _latest(self, cells: pa.RecordBatch, offsets: Any, seen: Any) -> npt.NDArray[np.bool_]:
        """Which of the cells count."""
        tied = seen
        if self._order is not None:
            stamps, there = cells.column(cells.num_columns - 1).to_numpy(), self._order[offsets]
            tied = seen & ~((stamps < there) | (stamps > there))
        if not tied.any():
            return np.asarray(~seen | (stamps > there))
        row = int(np.flatnonzero(tied)[0])
        offset = int(offsets[row])
        pairs = [
            (values[offset], _from_arrow(cells.column(number + 1), variable)[row])
            for number, (values, variable) in enumerate(
                zip(self._values, self._plan.variables, strict=True)
            )
        ]
        raise _repeated(self._plan, self._plan.bins.cell(self.number, offset), pairs)

    def write(self, targets: Sequence[ArrayTarget]) -> int:
        """Write the chunks; the number of cells that rows have given."""
        count = int(np.count_nonzero(self._filled))
        if self._plan.missing == "keep" and not count:
            return 0
        if count < self._box.size:
            self._check_missing()
            self._fill_gaps()
        whole = count == self._box.size or self._plan.missing == "fill"
        if whole and all(self._is_whole(lo, hi, axis) for axis, (lo, hi) in enumerate(self._sides)):
            place = tuple(slice(lo, hi) for lo, hi in self._sides)
            for number, target in enumerate(targets):
                self._put_block(target, number, place, self._cut(self._values[number], place))
            return count
        for unit in itertools.product(*map(self._units, range(len(self._sides)))):
            self._write_unit(targets, unit)
        return count

    def _fill_gaps(self) -> None:
        if self._plan.missing == "fill":
            for values, variable in zip(self._values, self._plan.variables, strict=True):
                values[~self._filled] = variable.absent[0]

    @cached_property
    def _sides(self) -> list[tuple[int, int]]:
        return list(zip(self._box.lo, self._box.hi, strict=True))

    def _is_whole(self, lo: int, hi: int, axis: int) -> bool:
        unit, size = self._plan.bins.unit[axis], self._plan.shape[axis]
        return lo % unit == 0 and (hi % unit == 0 or hi == size)

    def _units(self, axis: int) -> list[tuple[int, int]]:
        """Where the units begin and end, along an axis, that have cells in the bin."""
        (lo, hi), unit, size = self._sides[axis], self._plan.bins.unit[axis], self._plan.shape[axis]
        return [(at, min(at + unit, size)) for at in range(lo - lo % unit, hi, unit)]

    def _write_unit(self, targets: Sequence[ArrayTarget], unit: Sequence[tuple[int, int]]) -> None:
        """Write one unit; what is not written of it stays as it is."""
        pairs = list(zip(unit, self._sides, strict=True))
        part = tuple(slice(max(a, lo), min(b, hi)) for (a, b), (lo, hi) in pairs)
        filled = self._cut(self._filled, part)
        if self._plan.missing == "keep" and not filled.any():
            return
        place = tuple(slice(*ends) for ends in unit)
        complete = self._plan.missing == "fill" or bool(filled.all())
        for number, (target, values) in enumerate(zip(targets, self._values, strict=True)):
            given = self._cut(values, part)
            if part == place and complete:
                block = given
            else:
                axes = self._plan.variables[number].axes
                there = np.asarray(target.array[tuple(place[axis] for axis in axes)])
                block = np.array(there.transpose(np.argsort(axes)))
                within = tuple(
                    slice(one.start - all_.start, one.stop - all_.start)
                    for one, all_ in zip(part, place, strict=True)
                )
                if complete:
                    block[within] = given
                else:
                    block[within] = np.where(filled, given, block[within])
            self._put_block(target, number, place, block)

    def _put_block(
        self, target: ArrayTarget, number: int, place: tuple[slice, ...], block: npt.NDArray[Any]
    ) -> None:
        axes = self._plan.variables[number].axes
        target[tuple(place[axis] for axis in axes)] = np.ascontiguousarray(block.transpose(axes))

    def _cut(self, flat: npt.NDArray[Any], place: tuple[slice, ...]) -> npt.NDArray[Any]:
        """Some cells of the bin."""
        within = tuple(
            slice(one.start - lo, one.stop - lo) for one, lo in zip(place, self._box.lo, strict=True)
        )
        return flat.reshape(self._plan.bins.shape)[within]

    def _check_missing(self) -> None:
        """Refuse cells without a row that nothing can stand for.

        Raises
        ------
        InvalidArgumentError
            If there are any.
        """
        plan = self._plan
        lacking = [one for one in plan.variables if not one.has_absent]
        if plan.missing == "keep" or (plan.missing == "fill" and not lacking):
            return
        all_cells = tuple(slice(lo, hi) for lo, hi in self._sides)
        gaps = np.argwhere(~self._cut(self._filled, all_cells))
        cells = "; ".join(plan.cell(at + np.array(self._box.lo)) for at in gaps[:_LISTED])
        more = f" and {len(gaps) - _LISTED:,} more" if len(gaps) > _LISTED else ""
        what = "missing='error' wants one for each cell of the region"
        if plan.missing == "fill":
            what = (
                f"{lacking[0].name!r}, of type {lacking[0].stored}, has no value that stands for a "
                "missing one (_FillValue); give missing='keep' to leave these cells as they are"
            )
        raise InvalidArgumentError(f"there is no row for {cells}{more}: {what}. Nothing was written")


def _from_arrow(column: pa.Array, variable: Values) -> npt.NDArray[Any]:
    stored = variable.stored
    if variable.is_text:
        return column.to_numpy(zero_copy_only=False).astype(stored)
    if pa.types.is_fixed_size_binary(column.type):
        width = stored.itemsize
        raw = np.frombuffer(column.buffers()[1], np.uint8)
        return raw[column.offset * width :][: len(column) * width].view(stored)
    values = column.to_numpy()
    return values.view(bool) if stored.kind == "b" else values
