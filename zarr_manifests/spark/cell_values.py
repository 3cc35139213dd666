"""Columns of rows as numbers of an array: positions of coordinates, and encoded values.

Labels are compared in the type of the coordinate, as xarray decodes it, so a double 0.1 is the
label 0.1 of a float32 coordinate; a whole number is only found as itself. Values are encoded by
xarray as the array has it (packing, fill value, times), and checked as `zarr_manifests.write`
checks them. NULL is the value that stands for a missing one. Invariant: an array that has no such
value never gets one for NULL.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.planning.scan import Lookup
from zarr_manifests.runtime import quiet
from zarr_manifests.selecting import decoded
from zarr_manifests.xarray.fit import Fit, Misfit, MisfitError

_FITTING: Final = {"b": "biuf", "i": "biuf", "u": "biuf", "f": "biuf", "M": "M", "m": "m", "O": "O"}
"""The kinds of values that can be those of each kind."""
_PACKING: Final = frozenset(("scale_factor", "add_offset"))


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


@dataclass(frozen=True, slots=True)
class AlongAxis:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
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
        codes = encoded(self.fit, values)
        self.fit.check_beside(values, codes, lambda: self.absent)  # other rows may have none
        return codes

    def decoded(self, code: Any) -> str:
        """A stored value as it would be read, for messages."""
        raw = np.empty(1, self.stored)
        raw[0] = code
        return shown(decoded(self.name, raw, self.fit.attributes)[0])


def encoded(fit: Fit, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Values as they are stored.

    Raises
    ------
    MisfitError
        If some would be read back differently.
    """
    if values.dtype.kind in "biu" and not _PACKING.isdisjoint(fit.attributes):
        values = values.astype(np.float64)  # xarray does not pack integers
    with quiet():  # what they warn of is checked
        return fit.encoded(values)
