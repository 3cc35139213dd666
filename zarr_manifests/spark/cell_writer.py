"""The second step of writing rows: fill chunks.

`write_cells` puts the cells of a bin in place, and writes its chunks to a fork of the session.

Memory is bounded by the values of one bin. Invariants:

- A chunk is written by one task, once.
- Cells that are not written keep their values.
- Wrong data is reported in a row of the result, not by an exception, since Spark would try the
  task again.
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

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.session import Fork
from zarr_manifests.spark.cell_values import Values
from zarr_manifests.spark.write_plan import WritePlan
from zarr_manifests.store import workspace_of
from zarr_manifests.xarray.array_target import ArrayTarget

__all__ = ["REPORTS", "write_cells"]

REPORTS: Final = pa.schema([("fork", pa.binary()), ("cells", pa.int64()), ("failure", pa.string())])
"""What a task gives, in one row: its pickled fork, and the cells it wrote; or what is wrong."""

_LISTED: Final = 3


def write_cells(
    plan: WritePlan, fork: Fork, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the chunks of one task to a fork; yield one row that says what was done.

    Parameters
    ----------
    plan : WritePlan
        The write.
    fork : Fork
        A fork of the session, of this task only.
    batches : iterable of RecordBatch
        What `share_cells` gave for this task, ordered by bin if it has several, and a row without
        bin and cells. Without any row, nothing is yielded.
    """
    writer: _TaskWriter | None = None
    try:
        for task, number, cells, failure in _shares_in(batches):
            if failure is not None:
                raise InvalidArgumentError(failure)
            if writer is None:
                writer = _TaskWriter(plan, fork, task)
            if number is not None:
                writer.put(number, cells)
        if writer is not None:
            written, data = writer.end()
            yield pa.record_batch([[data], [written], [None]], schema=REPORTS)
    except InvalidArgumentError as error:
        yield pa.record_batch([[None], [0], [str(error)]], schema=REPORTS)


def _shares_in(
    batches: Iterable[pa.RecordBatch],
) -> Iterator[tuple[int, int | None, Any, str | None]]:
    for batch in batches:
        tasks, numbers, cells, failures = batch.columns
        known = tasks.to_pylist(), numbers.to_pylist(), failures.to_pylist()
        for task, number, failure, data in zip(*known, cells, strict=True):
            yield task, number, data.as_buffer() if data.is_valid else None, failure


class _TaskWriter:
    """Writes the bins of one task, one after the other, to a fork of its own."""

    def __init__(self, plan: WritePlan, fork: Fork, task: int) -> None:
        self._plan, self._fork = plan, fork
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
        for number, (values, variable) in enumerate(
            zip(self._values, self._plan.variables, strict=True)
        ):
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
        raise self._plan.repeated(self.number, offset, pairs)

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
            slice(one.start - lo, one.stop - lo)
            for one, lo in zip(place, self._box.lo, strict=True)
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
        raise InvalidArgumentError(
            f"there is no row for {cells}{more}: {what}. Nothing was written"
        )


def _from_arrow(column: pa.Array, variable: Values) -> npt.NDArray[Any]:
    stored = variable.stored
    if variable.is_text:
        return np.asarray(column.to_numpy(zero_copy_only=False), stored)
    if pa.types.is_fixed_size_binary(column.type):
        width = stored.itemsize
        raw = np.frombuffer(column.buffers()[1], np.uint8)
        return raw[column.offset * width :][: len(column) * width].view(stored)
    values: npt.NDArray[Any] = column.to_numpy()
    return values.view(bool) if stored.kind == "b" else values
