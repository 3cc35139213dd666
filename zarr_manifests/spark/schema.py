"""The Spark types of variables' values: one table, and the conversion that it defines.

=====================================  ==========================  ==============================
decoded values                         Spark                       remark
=====================================  ==========================  ==============================
bool                                   boolean
int8, int16, int32, int64              tinyint, smallint, int,
                                       bigint
uint8, uint16, uint32                  smallint, int, bigint       the next type that holds them
uint64                                 decimal(20,0)               no integer of Spark holds them
float16, float32, float64              float, float, double
datetime64 and CF times                timestamp                   UTC; NaT is null; microseconds
CF times of other calendars            string                      ISO 8601, said in the metadata
timedelta64                            interval day to second      NaT is null; microseconds
text of fixed or any length            string
bytes of fixed or any length           binary
=====================================  ==========================  ==============================

Other types (complex, structured) are refused. A calendar counts as another one if it has dates that
a timestamp cannot represent (`noleap`, `360_day`, ...), or if a coordinate in the mixed
Julian/Gregorian calendar goes back before 1582. A column's metadata has the variable's attributes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructType

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.spark.source import Recipe, Source

__all__ = [
    "SHAPE",
    "Column",
    "chunk_columns",
    "column_of",
    "plain_arrow",
    "schema_of",
    "to_arrow",
]

SHAPE: Final = "shape"
"""The column with a chunk's shape, where a row is a chunk."""

_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_WIDER: Final[Mapping[str, pa.DataType]] = {
    "u1": pa.int16(),
    "u2": pa.int32(),
    "u4": pa.int64(),
    "u8": pa.decimal128(20, 0),
    "f2": pa.float32(),
}
_REAL_CALENDARS: Final = frozenset({"standard", "gregorian", "proleptic_gregorian"})


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a DataFrame.

    Parameters
    ----------
    name : str
        Name of the variable or dimension.
    arrow : pyarrow.DataType
        Its Arrow type, which is one of Spark's.
    metadata : mapping
        The attributes that a schema can hold, and how the values are represented.
    recipe : Recipe, optional
        How values are decoded; by xarray if it is not given.
    """

    name: str
    arrow: pa.DataType
    metadata: Mapping[str, Any]
    recipe: Recipe | None = None


def column_of(source: Source, name: str, *, is_dimension: bool) -> Column:
    """Return a variable's column; only a dimension's coordinate is read for it.

    Raises
    ------
    NotFoundError
        If there is no such variable.
    InvalidArgumentError
        If Spark has no type for its values.
    """
    coordinate = source.coordinate(name) if is_dimension else None
    if is_dimension and coordinate is None:
        return Column(name, pa.int64(), {"values": "positions: the dimension has no coordinate"})
    dtype = source.decoded_dtype(name) if coordinate is None else coordinate.dtype
    attributes, recipe = source.attributes(name), source.recipe(name)
    metadata = {each: value for each, value in attributes.items() if _is_plain(value)}
    if source.is_time(name):
        calendar = str(attributes.get("calendar", "standard")).lower()
        if calendar in _REAL_CALENDARS and dtype.kind == "M":
            return Column(name, _TIMESTAMP, metadata | {"dtype": "datetime64[us]"}, recipe)
        what = f"ISO 8601 text: a timestamp cannot hold all dates of the calendar {calendar!r}"
        return Column(name, pa.string(), metadata | {"dtype": "object", "values": what})
    arrow = _type(name, dtype, source.encoded(name).dtype)
    return Column(name, arrow, metadata | {"dtype": str(dtype)}, recipe)


def chunk_columns(dimensions: Sequence[Column], variables: Sequence[Column]) -> tuple[Column, ...]:
    """The columns where a row is a chunk: coordinates as arrays, its shape, and values as bytes.

    Raises
    ------
    InvalidArgumentError
        If a variable's values have no fixed size.
    """
    values = pa.struct({"dtype": pa.string(), "data": pa.binary()})
    for column in variables:
        if column.metadata["dtype"] == "object" or column.arrow in (pa.string(), pa.binary()):
            raise InvalidArgumentError(
                f"the values of {column.name!r} have no fixed size, so layout='chunk' cannot give "
                "them as bytes; use layout='long'"
            )
    return (
        *(Column(c.name, pa.list_(c.arrow), c.metadata) for c in dimensions),
        Column(SHAPE, pa.list_(pa.int64()), {}),
        *(Column(c.name, values, c.metadata) for c in variables),
    )


def _type(name: str, dtype: np.dtype[Any], stored: np.dtype[Any]) -> pa.DataType:
    if dtype.kind in "biuf" and dtype.itemsize <= 8:
        return _WIDER.get(f"{dtype.kind}{dtype.itemsize}") or pa.from_numpy_dtype(dtype)
    if dtype.kind in "mM":
        return _TIMESTAMP if dtype.kind == "M" else pa.duration("us")
    if dtype.kind == "O" and stored.kind in "TUS":
        return pa.string()
    if dtype.kind in "OSV" and dtype.names is None:
        return pa.binary()
    raise InvalidArgumentError(
        f"variable {name!r} has values of type {dtype}, which Spark has no type for; leave it out "
        "with variables=[...], or store it as several real variables"
    )


def _is_plain(value: Any) -> bool:
    """Whether a schema's metadata can hold an attribute."""
    if isinstance(value, list):
        plain = all(not isinstance(each, list) and _is_plain(each) for each in value)
        return plain and len({*map(type, value)}) == 1
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def schema_of(columns: Sequence[Column]) -> StructType:
    """Return the schema of a DataFrame with these columns."""
    fields = StructType()
    for c in columns:
        fields.add(c.name, from_arrow_type(c.arrow), nullable=True, metadata=dict(c.metadata))
    return fields


def to_arrow(values: npt.NDArray[Any], column: Column, *, nan_is_null: bool = False) -> pa.Array:
    """Convert decoded values (one-dimensional) to the column's Arrow type.

    Raises
    ------
    InvalidArgumentError
        If they have a date that a timestamp cannot represent.
    """
    arrow, kind = column.arrow, values.dtype.kind
    if pa.types.is_string(arrow):
        return pa.array([_text(value) for value in values.tolist()], arrow)
    if pa.types.is_binary(arrow):
        return pa.array(values.tolist(), arrow)
    if pa.types.is_timestamp(arrow) and kind == "O":
        raise InvalidArgumentError(
            f"variable {column.name!r} has dates before 1582 in the mixed Julian/Gregorian "
            "calendar, which no timestamp can hold; store it in proleptic_gregorian"
        )
    if kind in "mM":
        values = values.astype(f"{kind}8[us]", copy=False)
        return plain_arrow(values, ~np.isnat(values)).cast(arrow)
    if kind == "f" and values.dtype.itemsize == 2:
        values = values.astype(np.float32)
    valid = ~np.isnan(values) if kind == "f" and nan_is_null else None
    return plain_arrow(values, valid).cast(arrow)


def plain_arrow(values: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Numbers, booleans or times (one-dimensional, in the machine's byte order) as Arrow has them.

    `pa.array` imports pandas, even where it needs nothing of it.
    """
    bits = np.packbits(values, bitorder="little") if values.dtype == bool else values
    known = None
    if valid is not None and not valid.all():
        known = pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [known, pa.py_buffer(np.ascontiguousarray(bits))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return str(value.isoformat()) if hasattr(value, "isoformat") else None  # else missing
