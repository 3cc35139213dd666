"""Columns of unsigned integers as bytes.

A column is written in the first of these modes that fits:

- *constant*: all values are equal. Stored once, and decoded without allocating n values;
- *differences*: values never decrease. Stored as the first value and the steps;
- *plain*: the values themselves.

Steps or values take 1, 2, 4 or 8 bytes each, as the largest needs, little-endian, and are
bit-shuffled and compressed by Blosc (zstd) if that makes them smaller. The list is
`[mode, first, width, packed, bytes]`. Invariant: the decoded size is bounded before anything is
allocated.
"""

from __future__ import annotations

import struct
import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import CorruptObjectError

type Column = npt.NDArray[np.int64]

MAX_ROWS: Final = 1 << 24
_CONSTANT, _DIFFERENCES, _PLAIN = 0, 1, 2
_BLOSC_HEADER_BYTES: Final = 16
_WIDTHS: Final = (1, 2, 4, 8)


def repeated(value: int, rows: int) -> Column:
    """A read-only column of one value, which is stored once.

    Takes a sixth of the time of `numpy.broadcast_to`, and small tables consist of such columns.
    """
    return np.ndarray((rows,), np.int64, value.to_bytes(8, sys.byteorder, signed=True), 0, (0,))


def encode_column(values: Column) -> list[Any]:
    """The column as a list for msgpack; needs at least one value, none negative."""
    first = int(values[0])
    if (values == first).all():
        return [_CONSTANT, first]
    steps = np.diff(values)
    if steps.min() >= 0:
        return [_DIFFERENCES, first, *_pack(steps)]
    return [_PLAIN, 0, *_pack(values)]


def _pack(values: Column) -> tuple[int, int, bytes]:
    most = int(values.max())
    width = next(w for w in _WIDTHS if most < 1 << (8 * w))
    raw = values.astype(f"<u{width}").tobytes()
    if len(raw) > _BLOSC_HEADER_BYTES:
        from numcodecs import blosc  # slow to import, and small tables do without

        packed = blosc.compress(raw, b"zstd", 5, blosc.BITSHUFFLE, typesize=width)
        if len(packed) < len(raw):
            return width, 1, bytes(packed)
    return width, 0, raw


def decode_column(column: object, rows: int, most: int = 2**63 - 1) -> Column:
    """The column's `rows` values (int64), each from 0 to `most`.

    Raises
    ------
    CorruptObjectError
        If the column is malformed or a value is out of range.
    """
    match column:
        case [0, int(value)] if 0 <= value <= most:
            return repeated(value, rows)
    if rows > MAX_ROWS:
        raise CorruptObjectError("a column of a chunk table is malformed")
    values = np.empty(rows, np.int64)
    _decode(column, values, most)
    return values


def _decode(column: object, values: Column, most: int) -> None:
    """Decode the column into `values`."""
    valid, rows = True, len(values)
    match column:
        case [1, int(first), int(width), int(packed), bytes(data)] if 0 <= first <= most and rows:
            values[0] = first
            values[1:] = _unpack(data, width, packed, rows - 1)
            np.add.accumulate(values, out=values)
            # A sum that wraps around shows as a value below the one before it. (Compare, since a
            # difference would wrap around again.)
            valid = bool((values[1:] >= values[:-1]).all())
            largest = int(values[-1])
        case [2, 0, int(width), int(packed), bytes(data)]:
            unsigned = _unpack(data, width, packed, rows)
            largest = int(unsigned.max(initial=0))
            values[:] = unsigned
        case _:
            raise CorruptObjectError("a column of a chunk table is malformed")
    if not valid or largest > most:
        raise CorruptObjectError("a column of a chunk table holds a value out of range")


def _unpack(data: bytes, width: int, packed: int, rows: int) -> npt.NDArray[np.unsignedinteger]:
    nbytes = rows * width
    if type(width) is not int or width not in _WIDTHS or packed not in (0, 1) or rows > MAX_ROWS:
        raise CorruptObjectError("a column of a chunk table is malformed")
    if packed:
        # Blosc trusts the sizes in its header, so check them first.
        if len(data) < _BLOSC_HEADER_BYTES or struct.unpack_from("<I4xI", data, 4) != (
            nbytes,
            len(data),
        ):
            raise CorruptObjectError("a column of a chunk table states a wrong size")
        from numcodecs import blosc

        try:
            data = bytes(blosc.decompress(data))
        except RuntimeError as error:
            raise CorruptObjectError("a column of a chunk table does not decompress") from error
    if len(data) != nbytes:
        raise CorruptObjectError(f"expected a column of {nbytes} bytes, found {len(data)}")
    return np.frombuffer(data, f"<u{width}")
