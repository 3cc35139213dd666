"""The first step of writing rows: find the cell of each row.

`share_cells` looks up the coordinates of rows, encodes and checks their values, and gathers many
rows at a time by bin. The result is few, large rows, so shuffling them costs little.

Memory is bounded by `GATHER_BYTES` of rows. Invariant: wrong data is reported in a row of the
result, not by an exception, since Spark would try the task again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import IndexArray
from zarr_manifests.planning.cells import ordered
from zarr_manifests.spark.cell_values import shown
from zarr_manifests.spark.write_plan import WritePlan
from zarr_manifests.xarray.fit import MisfitError

__all__ = [
    "AXIS",
    "BOUNDS",
    "GATHER_BYTES",
    "SHARES",
    "cell_bounds",
    "distinct_labels",
    "share_cells",
]

GATHER_BYTES: Final = 64 * 1024**2
"""How much of rows is gathered before it is shared out."""

SHARES: Final = pa.schema(
    [("task", pa.int32()), ("bin", pa.int64()), ("cells", pa.binary()), ("failure", pa.string())]
)
"""What `share_cells` gives: cells of one bin, and the task that writes it; or what is wrong."""

BOUNDS: Final = pa.schema(
    [("lo", pa.list_(pa.int64())), ("hi", pa.list_(pa.int64())), ("failure", pa.string())]
)
"""What `cell_bounds` gives, in one row: positions by axis; or what is wrong."""

AXIS: Final = "#axis"
"""The column that says which column a row of `distinct_labels` has a label in."""

_UNIQUE_AT: Final = 1024**2
_BLOB_BYTES: Final = 4 * 1024**2
_LISTED: Final = 3

type _Columns = list[npt.NDArray[Any]]


def distinct_labels(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the distinct values of each column, in rows that have the others empty."""
    columns: list[pa.ChunkedArray] = []
    schema: pa.Schema | None = None
    for batch in batches:
        if schema is None:
            schema = batch.schema.append(pa.field(AXIS, pa.int32()))
            columns = [pa.chunked_array([], field.type) for field in batch.schema]
        for number, column in enumerate(batch.columns):
            parts = [*columns[number].chunks, column.unique()]
            columns[number] = pa.chunked_array(parts)
            # The first part is unique already; this keeps the work in proportion to what is new.
            if sum(map(len, parts[1:])) > max(len(parts[0]), _UNIQUE_AT):
                columns[number] = pa.chunked_array([columns[number].unique()])
    for number, several in enumerate(columns):
        assert schema is not None
        labels = several.unique()
        arrays = [pa.nulls(len(labels), field.type) for field in schema]
        arrays[number], arrays[-1] = labels, pa.array([number] * len(labels), pa.int32())
        yield pa.record_batch(arrays, schema=schema)


def cell_bounds(plan: WritePlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield, in one row, the smallest and largest position of rows on each axis."""
    found: IndexArray | None = None
    try:
        for batch in batches:
            if batch.num_rows:
                places = np.stack([np.zeros(batch.num_rows, np.int64), *_places_of(plan, batch)])
                bounds = np.stack([places.min(axis=1), -places.max(axis=1)])
                found = bounds if found is None else np.minimum(bounds, found)
    except InvalidArgumentError as error:
        yield pa.record_batch([[None], [None], [str(error)]], schema=BOUNDS)
        return
    if found is not None:
        lo, hi = found[0, 1:], -found[1, 1:]
        yield pa.record_batch([[lo.tolist()], [hi.tolist()], [None]], schema=BOUNDS)


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
        yield pa.record_batch([[0], [None], [None], [str(error)]], schema=SHARES)


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
    places = _places_of(plan, batch)
    keys = plan.bins.keys(places, batch.num_rows)
    try:
        values = [one.codes(batch.column(one.name)) for one in plan.variables]
    except MisfitError as error:
        raise InvalidArgumentError(_misfit(plan, places, error)) from None
    order = [] if plan.order_by is None else [_order(plan, batch, places)]
    return [keys, *values, *order]


def _places_of(plan: WritePlan, batch: pa.RecordBatch) -> list[IndexArray]:
    """The positions of the rows' cells on each axis.

    Raises
    ------
    InvalidArgumentError
        If some are not in the region.
    """
    places = [axis.positions(batch.column(axis.name)) for axis in plan.along]
    inside = plan.bins.inside(places)
    if not inside.all():
        raise InvalidArgumentError(_outside(plan, batch, places, inside))
    return places


def _order(plan: WritePlan, batch: pa.RecordBatch, places: Sequence[IndexArray]) -> Any:
    assert plan.order_by is not None
    column = batch.column(plan.order_by)
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    if column.null_count:
        row = column.is_valid().to_numpy(zero_copy_only=False).argmin()
        raise InvalidArgumentError(
            f"a row at {plan.cell([at[row] for at in places])} has no value in order_by "
            f"{plan.order_by!r}, so it is not known which row is the last"
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
    if plan.order_by is None:
        order, keys = ordered(columns[0])
    else:
        order = np.lexsort((columns[-1], columns[0]))
        keys = columns[0][order]
    same = keys[1:] == keys[:-1]
    if same.any():
        order = _without_repeats(plan, columns, order, same)
        keys = columns[0][order]
    numbers, offsets = plan.bins.parted(keys)
    starts = np.append(0, np.flatnonzero(numbers[1:] != numbers[:-1]) + 1)
    ends = [*starts[1:].tolist(), len(keys)]
    values = [column.take(order) for column in columns[1:]]
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
    tasks, numbers, cells = (list(each) for each in zip(*ready, strict=True))
    return pa.record_batch([tasks, numbers, cells, [None] * len(ready)], schema=SHARES)


def _blobs(plan: WritePlan, columns: _Columns) -> Iterator[bytes]:
    """Cells of one bin as bytes, in parts that are not too large."""
    schema = plan.cell_schema
    nbytes = sum(_nbytes(column) for column in columns)
    rows, parts = len(columns[0]), -(-nbytes // _BLOB_BYTES)
    for part in range(parts):
        place = slice(part * rows // parts, (part + 1) * rows // parts)
        arrays = [
            _to_arrow(each[place], one.type) for each, one in zip(columns, schema, strict=True)
        ]
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
        values = columns[1 : 1 + len(plan.variables)]
        pairs_of = [(each[one], each[other]) for each in values]
        raise plan.repeated(int(numbers[0]), int(offsets[0]), pairs_of)
    return np.compress(np.append(~same, True), order)
