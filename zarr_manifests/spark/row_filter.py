"""Rows that a `Where` keeps, as Spark's own filter would.

Numbers are compared exactly, a float column with the literal's nearest double. NaN equals itself
and is larger than every number; null matches nothing but IS NULL. Times without a zone are in the
session's; they are cut to microseconds. Text is compared by code point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import tzinfo
from operator import eq, ge, gt, le, lt, ne
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.zones.where import Comparison, Literal, Moment, Where

__all__ = ["kept"]

_COMPARE: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "=": eq,
    "!=": ne,
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
}
_TEXT: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
# NaN is larger than every literal, and no literal is NaN.
_NAN_MATCHES: Final = frozenset(("!=", ">", ">="))


def kept(table: pa.Table, where: Where, zone: tzinfo) -> pa.Table:
    """The rows for which all comparisons hold.

    Raises
    ------
    InvalidArgumentError
        If there is no such column, or its values cannot be compared with a literal.
    """
    mask = np.ones(table.num_rows, bool)
    for comparison in where.comparisons:
        mask &= _matching(table, comparison, zone)
    return table if mask.all() else table.filter(pa.array(mask))


def _matching(table: pa.Table, comparison: Comparison, zone: tzinfo) -> npt.NDArray[np.bool_]:
    if comparison.column not in table.column_names:
        raise InvalidArgumentError(
            f"there is no column {comparison.column!r} to compare in {comparison.sql!r}; "
            f"there are: {', '.join(table.column_names)}"
        )
    chunked = table.column(comparison.column)
    # Joining copies, even a single chunk.
    column = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # a table without rows
        column = pa.array([], column.type)
    valid = np.ones(len(column), np.bool_)
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    match comparison.op:
        case "is_null":
            return ~valid
        case "is_not_null":
            return valid
    matches = _comparer(column, comparison, zone)
    match comparison.op:
        case "in":
            found = np.zeros(len(column), bool)
            for value in comparison.values:
                found |= matches("=", value)
            return valid & found
        case "between":
            low, high = comparison.values
            return valid & matches(">=", low) & matches("<=", high)
    return valid & matches(comparison.op, comparison.values[0])


type _Comparer = Callable[[str, Literal], npt.NDArray[np.bool_]]


def _comparer(column: pa.Array, comparison: Comparison, zone: tzinfo) -> _Comparer:
    """A function that compares a column's values with a literal; nulls count as anything."""
    kind = column.type

    def wrong(value: Literal) -> InvalidArgumentError:
        said = value.text if isinstance(value, Moment) else value
        return InvalidArgumentError(
            f"{comparison.column!r} has values of type {kind}, which cannot be compared with "
            f"{said!r}"
        )

    if pa.types.is_string(kind):

        def texts(op: str, value: Literal) -> npt.NDArray[np.bool_]:
            if not isinstance(value, str):
                raise wrong(value)
            found = _TEXT[op](column, pa.scalar(value)).fill_null(False)
            return np.asarray(found.to_numpy(zero_copy_only=False), bool)

        return texts

    literal, values = _numbers(column, zone)

    def numbers(op: str, value: Literal) -> npt.NDArray[np.bool_]:
        number = literal(value)
        if number is None:
            raise wrong(value)
        found = np.asarray(_COMPARE[op](values, number), bool)
        if values.dtype.kind == "f" and op in _NAN_MATCHES:
            found |= np.isnan(values)
        return found

    return numbers


def _numbers(
    column: pa.Array, zone: tzinfo
) -> tuple[Callable[[Literal], bool | int | float | None], npt.NDArray[Any]]:
    """What makes numbers of literals, or None of those that do not fit, and the values as such."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return lambda value: _microseconds(value, zone), _filled(column.cast(pa.int64()))
    if pa.types.is_boolean(kind):
        return lambda value: value if isinstance(value, bool) else None, _filled(column)
    if pa.types.is_floating(kind):
        values = _filled(column).astype(np.float64)
        return lambda value: None if (n := _number(value)) is None else float(n), values
    if pa.types.is_integer(kind):
        return _number, _filled(column)
    if pa.types.is_decimal(kind):
        return _number, _filled(column.cast(pa.uint64()))
    return lambda value: None, np.zeros(len(column))


def _filled(column: pa.Array) -> npt.NDArray[Any]:
    column = column.fill_null(pa.scalar(0).cast(column.type)) if column.null_count else column
    values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values


def _number(value: Literal) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _microseconds(value: Literal, zone: tzinfo) -> int | None:
    if isinstance(value, str):
        try:
            value = Moment(value)
        except InvalidArgumentError:
            return None
    return value.nanoseconds(zone) // 1000 if isinstance(value, Moment) else None
