"""The two steps of writing rows: find the cell of each row, and fill chunks.

`share_cells` looks up the coordinates of rows, encodes and checks their values, and gathers many
rows at a time by bin. The result is few, large pieces, so shuffling them costs little.
`write_cells` puts the cells of a bin in place, and writes its chunks to a fork of the session.

Memory is bounded by `GATHER_BYTES` of rows, and by the values of one bin. Invariants:

- A chunk is written by one task, once.
- Cells that are not written keep their values.

Columns of rows as numbers of an array: positions of coordinates, and encoded values
------------------------------------------------------------------------------------

Labels are compared in the type of the coordinate, as xarray decodes it, so a double 0.1 is the
label 0.1 of a float32 coordinate; a whole number is only found as itself. Values are encoded by
xarray as the array has it (packing, fill value, times), and checked as `zarr_manifests.write`
checks them. NULL is the value that stands for a missing one. Invariant: an array that has no such
value never gets one for NULL.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zarr
from msgspec import Struct
from msgspec.structs import replace
from pyarrow import types

from zarr_manifests.decoding import decoded
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.scan import Bins, Lookup, ordered
from zarr_manifests.session import Fork
from zarr_manifests.spark.source import place_in
from zarr_manifests.spark.tasks import PICKLE
from zarr_manifests.xarray.array_target import ArrayTarget
from zarr_manifests.xarray.fit import Fit, Misfit, MisfitError

_FITTING: Final = {"b": "biuf", "i": "biuf", "u": "biuf", "f": "biuf", "M": "M", "m": "m", "O": "O"}
"""The kinds of values that can be those of each kind."""


def to_numpy(column: pa.Array) -> npt.NDArray[Any]:
    """The values of a column without NULL, as xarray would have them.

    Raises
    ------
    InvalidArgumentError
        If xarray has no such values.
    """
    kind = column.type
    if types.is_decimal(kind):
        column = _number(column)
    values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    if types.is_timestamp(kind) or types.is_duration(kind) or values.dtype.kind in "biuf":
        return values
    if types.is_string(kind) or types.is_binary(kind):
        return values.astype(object)
    raise InvalidArgumentError(f"values of type {kind} cannot be written to an array")


def _number(column: pa.Array) -> pa.Array:
    """Decimals as whole numbers, if they have no fraction, or as the nearest floats."""
    if column.type.scale:
        return column.cast(pa.float64(), safe=False)
    for whole in (pa.int64(), pa.uint64()):  # `read` has uint64 as decimals
        with suppress(pa.ArrowInvalid):
            return column.cast(whole)
    raise InvalidArgumentError(f"decimals of type {column.type} are beyond 64-bit integers")


def distinct(dim: str, column: pa.Array) -> npt.NDArray[Any]:
    """The labels in a column, each once, ascending.

    Raises
    ------
    InvalidArgumentError
        If some are missing.
    """
    labels = to_numpy(column.drop_null())
    lacks = "NULL" if column.null_count else ""
    if labels.dtype.kind == "f" and np.isnan(labels).any():
        lacks = "NaN"
    if lacks:
        raise InvalidArgumentError(f"rows have {lacks} in {dim!r}, so their cells are not known")
    return np.unique(labels)


def shown(value: Any) -> str:
    """A label or value for a message."""
    if isinstance(value, np.datetime64):
        return str(np.datetime_as_string(value, unit="auto"))
    if isinstance(value, np.floating):
        return f"{value:.9g}"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


# --- coordinates -----------------------------------------------------------------------------


class AlongAxis(Struct, frozen=True):
    """A dimension of the rows' cells: its column, and what its labels are. Made by `of`.

    Parameters
    ----------
    name : str
        Name of the dimension and of the column.
    size : int
        Number of positions.
    dtype : numpy.dtype
        Type of the labels, as xarray decodes them.
    lookup : Lookup
        Finds the positions of labels.
    """

    name: str
    size: int
    dtype: np.dtype[Any]
    lookup: Lookup

    @staticmethod
    def of(
        name: str,
        labels: npt.NDArray[Any] | None,
        size: int,
        column: pa.DataType,
        tolerance: Any = None,
    ) -> AlongAxis:
        """The dimension with these decoded labels; without any, columns have positions.

        Raises
        ------
        InvalidArgumentError
            If values of the column cannot be labels, or a label is there twice.
        """
        labels = np.arange(size) if labels is None else labels
        if labels.dtype.kind == "O" and size and hasattr(labels[0], "calendar"):
            dates: list[Any] = labels.tolist()
            labels = np.array([date.isoformat() for date in dates], object)
        check_fits(name, column, labels, "the labels of that dimension")
        if labels.dtype.kind in "biu" and not types.is_integer(column):
            whole, labels = labels, labels.astype(np.float64)
            if not _same_numbers(whole, labels).all():
                raise InvalidArgumentError(
                    f"labels of {name!r} are beyond 2**53, where a double is not one of them: cast "
                    "the column to bigint"
                )
        lookup = Lookup.of(name, _widened(labels), _tolerance(name, tolerance, labels.dtype))
        return AlongAxis(name, size, labels.dtype, lookup)

    def positions(self, column: pa.Array) -> IndexArray:
        """The position of each value; -1 for those that are no label, such as NULL."""
        if column.null_count:
            positions = np.full(len(column), -1, np.int64)
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            positions[valid] = self.positions(column.drop_null())
            return positions
        if self.dtype.kind == "O":
            coded = column.dictionary_encode()
            found = self.lookup.find(coded.dictionary.to_numpy(zero_copy_only=False))
            return np.asarray(found.take(coded.indices.to_numpy()))
        given = to_numpy(column)
        with np.errstate(over="ignore"):  # floats at the coordinate's own precision
            values = given.astype(self.dtype, copy=False) if self.dtype.kind == "f" else given
        positions = self.lookup.find(_widened(values))
        if self.dtype.kind == "f":
            if given.dtype.kind in "iu" and self.lookup.tolerance is None:
                positions[~_same_numbers(given, values)] = -1
        elif self.dtype.kind in "iu" and given.dtype.kind != self.dtype.kind:
            info = np.iinfo(f"{self.dtype.kind}8")  # which lookups know by 64 bits
            positions[(given < info.min) | (given > info.max)] = -1
        return positions

    def label(self, position: int) -> str:
        """The label at a position, for messages."""
        found = self.lookup.label_at(position)
        return "NaN" if found is None else shown(found)


def _same_numbers(whole: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which whole numbers are the same as floats."""
    if whole.dtype.kind == "b":
        return np.ones(whole.shape, bool)
    with np.errstate(invalid="ignore"):
        back = other.astype(whole.dtype)
    return np.asarray((back == whole) & (other < np.iinfo(whole.dtype).max + 1.0))


def _widened(labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Labels in the one type of their kind that lookups compare."""
    wide: Any = {"M": "M8[us]", "m": "m8[us]", "b": "i8", "i": "i8", "u": "i8"}
    half = "f4" if labels.dtype == np.float16 else labels.dtype
    return labels.astype(wide.get(labels.dtype.kind, half), copy=False)


def check_fits(name: str, column: pa.DataType, known: npt.NDArray[Any], what: str) -> None:
    """Refuse a column whose values cannot be what there is already.

    Raises
    ------
    InvalidArgumentError
        If they cannot.
    """
    kind = known.dtype.kind
    texts = kind == "O" and known.size and isinstance(known[0], bytes) != types.is_binary(column)
    if texts or to_numpy(pa.array([], column)).dtype.kind not in _FITTING.get(kind, "O"):
        words = {"M": "times", "m": "durations", "O": "texts"}.get(kind, "numbers")
        raise InvalidArgumentError(
            f"the column {name!r} is of type {column}, and {what} are {words}; cast the column"
        )


def _tolerance(name: str, given: Any, labels: np.dtype[Any]) -> Any:
    if given is None:
        return None
    found: Any = None
    with suppress(TypeError, ValueError):
        found = np.timedelta64(given, "us") if labels.kind in "mM" else float(given)
    if labels.kind == "O" or found is None or not found >= 0 * found:  # as NaN and infinity
        raise InvalidArgumentError(
            f"{given!r} is not a tolerance for {name!r}: it is a number from 0 on, for times a "
            "timedelta, and texts have none"
        )
    return found


# --- values ----------------------------------------------------------------------------------


class Values(Struct, frozen=True, kw_only=True):
    """A variable that rows are written to, and how its values are stored.

    Parameters
    ----------
    name, path : str
        Its name, which is that of the column, and its path.
    axes : tuple of int
        For each axis of the array, the number of the dimension.
    stored : numpy.dtype
        The type of the array.
    fit : Fit
        How values of the column's type are encoded.
    absent : ndarray
        What stands for a missing value, as one element; empty if nothing does.
    """

    name: str
    path: str
    axes: Coords
    stored: np.dtype[Any]
    fit: Fit
    absent: npt.NDArray[Any]

    @property
    def itemsize(self) -> int:
        """About how many bytes a value takes in memory."""
        return 64 if self.stored.kind in "OT" else self.stored.itemsize

    def codes(self, column: pa.Array) -> npt.NDArray[Any]:
        """The values of a column as they are stored.

        Raises
        ------
        MisfitError
            If some would be read back differently, or NULL is there and nothing stands for it.
        """
        if not column.null_count:
            return self._encoded(column)
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        if not self.absent.size:
            row = int(np.flatnonzero(~valid)[0])
            raise MisfitError(self.name, (Misfit((row,), "NULL", "a value"),))
        codes = np.empty(len(column), self.stored)
        codes[:] = self.absent[0]
        try:
            codes[valid] = self._encoded(column.drop_null())
        except MisfitError as error:
            rows = np.flatnonzero(valid)
            moved = [replace(one, index=(int(rows[one.index[0]]),)) for one in error.misfits]
            raise MisfitError(error.name, tuple(moved)) from None
        return codes

    def _encoded(self, column: pa.Array) -> npt.NDArray[Any]:
        values = to_numpy(column)
        codes = self.fit.encoded(values)
        self.fit.check_beside(values, codes, lambda: self.absent)  # other rows may have none
        return codes

    def decoded(self, code: Any) -> str:
        """A stored value as it would be read, for messages."""
        raw = np.empty(1, self.stored)
        raw[0] = code
        return shown(decoded(self.name, raw, self.fit.attributes)[0])


# --- from rows to cells and chunks --------------------------------------------------------------


GATHER_BYTES: Final = 64 * 1024**2
"""How much of rows is gathered before it is shared out."""
_PIECE_BYTES: Final = 1024**2
"""About the largest piece of cells that is shuffled."""
_LISTED: Final = 3

type _Columns = Sequence[npt.NDArray[Any]]


class WritePlan(Struct, frozen=True, kw_only=True):
    """What all tasks of a write have in common; it travels to Spark's workers.

    It has neither data nor secrets, and its size depends on the length of the axes.

    Parameters
    ----------
    along : tuple of AlongAxis
        The dimensions, in the order of the first variable's axes.
    variables : tuple of Values
        What is written.
    bins : Bins
        The cells that are written.
    cell_bytes : int
        About how many bytes a cell takes in memory, with whether it is filled.
    tasks : int
        How many tasks write them.
    missing : str
        What becomes of cells without a row.
    """

    along: tuple[AlongAxis, ...]
    variables: tuple[Values, ...]
    bins: Bins
    cell_bytes: int
    tasks: int
    missing: str

    def cell(self, position: Iterable[int]) -> str:
        """A cell by its labels, for messages."""
        pairs = zip(self.along, position, strict=True)
        return ", ".join(f"{axis.name}={axis.label(int(at))}" for axis, at in pairs) or "()"


# --- from rows to cells ----------------------------------------------------------------------


def share_cells(plan: WritePlan, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, bytes]]:
    """Yield the number of a bin and some of its cells, for `write_cells`.

    Parameters
    ----------
    plan : WritePlan
        The write.
    batches : iterable of RecordBatch
        Rows, all of whose columns are those of the plan.

    Raises
    ------
    InvalidArgumentError
        If rows have no cell, or values that would be read back differently.
    """
    waiting: list[_Columns] = []
    nbytes = 0
    for batch in batches:
        if batch.num_rows:
            waiting.append(_cells_of(plan, batch))
            nbytes += batch.num_rows * (plan.cell_bytes + 8)
        if nbytes >= GATHER_BYTES:
            yield from _shared(plan, waiting)
            waiting, nbytes = [], 0
    if waiting:
        yield from _shared(plan, waiting)


def _cells_of(plan: WritePlan, batch: pa.RecordBatch) -> _Columns:
    """The keys of the rows' cells, and their stored values."""
    places = [axis.positions(batch.column(axis.name)) for axis in plan.along]
    inside = plan.bins.inside(places)
    if not inside.all():
        raise InvalidArgumentError(_outside(plan, batch, places, np.flatnonzero(~inside)))
    keys = plan.bins.keys(places, batch.num_rows)
    try:
        values = [one.codes(batch.column(one.name)) for one in plan.variables]
    except MisfitError as error:
        raise InvalidArgumentError(_misfit(plan, places, error)) from None
    return [keys, *values]


def _outside(
    plan: WritePlan, batch: pa.RecordBatch, places: Sequence[IndexArray], rows: IndexArray
) -> str:
    """Describe rows that are of no cell that is written."""
    rows = rows[:_LISTED]
    unknown = [axis for axis, at in zip(plan.along, places, strict=True) if (at[rows] < 0).any()]
    examples = []
    for row in rows.tolist():
        labels = (f"{a.name}={shown(batch.column(a.name)[row].as_py())}" for a in plan.along)
        examples.append(f"({', '.join(labels)})")
    listed = ", ".join(examples)
    if not unknown:
        return f"rows are outside the region that is written: {listed}. Nothing was written"
    names = " and ".join(repr(axis.name) for axis in unknown)
    hint = ""
    if any(axis.dtype.kind != "O" and axis.lookup.tolerance is None for axis in unknown):
        hint = "; labels have to be equal, unless tolerance={...} says how far they may be off"
    return f"rows have no cell in the grid, by their {names}: {listed}{hint}. Nothing was written"


def _misfit(plan: WritePlan, places: Sequence[IndexArray], error: MisfitError) -> str:
    """Describe values that would be read back differently."""
    told = "; ".join(
        f"{found.given} at {plan.cell(at[found.index[0]] for at in places)} would be read back "
        f"as {found.read}"
        for found in error.misfits
    )
    return (
        f"values of {error.name!r} do not fit the array: {told}. Nothing was written. Correct the "
        "values, or write the array anew, with room for them"
    )


def _shared(plan: WritePlan, waiting: Sequence[_Columns]) -> Iterator[tuple[int, bytes]]:
    """Share out gathered cells, ordered by their keys."""
    keys, *columns = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
    order, keys = ordered(keys)
    numbers, offsets = plan.bins.parted(keys)
    cells = [offsets, *(column.take(order) for column in columns)]
    starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
    most = max(_PIECE_BYTES // (plan.cell_bytes + 4), 1)
    for start, end in itertools.pairwise([*starts, len(keys)]):
        for at in range(start, end, most):
            piece = [column[at : min(at + most, end)] for column in cells]
            yield int(numbers[start]), pickle.dumps(piece, protocol=5)


# --- from cells to chunks --------------------------------------------------------------------


def write_cells(plan: WritePlan, fork: Fork, shares: Iterable[tuple[int, Any]]) -> tuple[Fork, int]:
    """Write the chunks of one task to a fork; the fork, and the number of cells that rows gave.

    Parameters
    ----------
    plan : WritePlan
        The write.
    fork : Fork
        A fork of the session, of this task only.
    shares : iterable of (int, bytes)
        What `share_cells` gave for this task, ordered by bin; and for each bin of the task one
        without cells, so that bins without rows are written, too.

    Raises
    ------
    InvalidArgumentError
        If two rows are of one cell, or a cell gets no value and nothing stands for it.
    """
    arrays = [zarr.open_array(fork.store, path=one.path, mode="r+") for one in plan.variables]
    targets = [ArrayTarget(array, statistics=True) for array in arrays]
    written = 0
    for number, several in itertools.groupby(shares, key=lambda share: share[0]):
        opened = _OpenBin(plan, number)
        for _, cells in several:
            if cells is not None:
                opened.put(*PICKLE.loads(cells))
        written += opened.write(targets)
    for target in targets:
        target.record()
    return fork, written


class _OpenBin:
    """The cells of one bin, in memory."""

    def __init__(self, plan: WritePlan, number: int) -> None:
        self._plan, self._number, self._box = plan, number, plan.bins.box(number)
        size = math.prod(plan.bins.shape)
        # Pages of zeros take no memory until they are written to.
        self._filled = np.zeros(size, bool)
        self._columns = [np.zeros(size, one.stored) for one in plan.variables]

    def put(self, offsets: IndexArray, *columns: npt.NDArray[Any]) -> None:
        """Put cells in place, which are ordered by offset.

        Raises
        ------
        InvalidArgumentError
            If two are of one cell.
        """
        seen, again = self._filled[offsets], offsets[1:] == offsets[:-1]
        if seen.any():
            row = int(seen.argmax())
            before = [column[offsets[row]] for column in self._columns]
            raise self._repeated(offsets[row], before, [column[row] for column in columns])
        if again.any():
            row = int(again.argmax())
            both = [column[row : row + 2] for column in columns]
            raise self._repeated(offsets[row], *zip(*both, strict=True))
        for there, given in zip(self._columns, columns, strict=True):
            there[offsets] = given
        self._filled[offsets] = True

    def _repeated(
        self, offset: int, one: Sequence[Any], other: Sequence[Any]
    ) -> InvalidArgumentError:
        plan = self._plan
        told = ", ".join(
            f"{variable.name} {variable.decoded(first)} and {variable.decoded(second)}"
            for variable, first, second in zip(plan.variables, one, other, strict=True)
        )
        cell = plan.cell(plan.bins.cell(self._number, offset))
        return InvalidArgumentError(
            f"two rows are of the cell {cell}, with {told}; nothing was written. Keep one of "
            "them, such as by df.dropDuplicates(dims) or an aggregation by max_by"
        )

    def write(self, targets: Sequence[ArrayTarget]) -> int:
        """Write the chunks; the number of cells that rows have given."""
        plan, count = self._plan, int(np.count_nonzero(self._filled))
        if plan.missing == "keep" and not count:
            return 0
        if plan.missing != "keep" and count < self._box.size:
            self._check_missing()
            for values, variable in zip(self._columns, plan.variables, strict=True):
                values[~self._filled] = variable.absent[0]
            self._filled[:] = True
        sides = list(zip(self._box.lo, self._box.hi, plan.bins.unit, plan.along, strict=True))
        aligned = all(not lo % n and (not hi % n or hi == axis.size) for lo, hi, n, axis in sides)
        if aligned and (plan.missing != "keep" or count == self._box.size):
            self._write(self._box, targets)
            return count
        for at in itertools.product(*(range(lo - lo % n, hi, n) for lo, hi, n, _ in sides)):
            ends = (min(lo + n, axis.size) for lo, (_, _, n, axis) in zip(at, sides, strict=True))
            self._write(Box(at, tuple(ends)), targets)
        return count

    def _write(self, place: Box, targets: Sequence[ArrayTarget]) -> None:
        """Write whole chunks, if any of their cells is filled; other cells keep their values."""
        part = place.shared(self._box)
        filled = self._cut(self._filled, part)
        if not filled.any():
            return
        whole = part == place and bool(filled.all())
        for target, values, variable in zip(
            targets, self._columns, self._plan.variables, strict=True
        ):
            axes, block = variable.axes, self._cut(values, part)
            at = tuple(slice(place.lo[axis], place.hi[axis]) for axis in axes)
            if not whole:
                there = np.array(target.array[at]).transpose(np.argsort(axes))
                np.copyto(there[place_in(place, part)], block, where=filled)
                block = there
            target[at] = np.ascontiguousarray(block.transpose(axes))

    def _cut(self, flat: npt.NDArray[Any], part: Box) -> npt.NDArray[Any]:
        """Some cells of the bin."""
        cells = flat.reshape(self._plan.bins.shape)
        return np.asarray(cells[place_in(self._box, part)])

    def _check_missing(self) -> None:
        """Refuse cells without a row that nothing can stand for.

        Raises
        ------
        InvalidArgumentError
            If there are any.
        """
        plan = self._plan
        lacking = [one for one in plan.variables if not one.absent.size]
        if plan.missing == "fill" and not lacking:
            return
        gaps = np.argwhere(~self._cut(self._filled, self._box))
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
