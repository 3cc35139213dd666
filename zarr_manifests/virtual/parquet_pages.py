"""Measuring what a parquet file expands to, from the headers of its pages.

A footer states totals, but nothing compares them with the pages, and pyarrow allocates what a page
header asks for, up to 2 GiB per page. So the headers are read here before pyarrow reads the file.
They are Thrift structs in the compact protocol; as in pyarrow, a field counts only if it has the
type that the format defines.

Invariant: pyarrow reads no page that is not counted. It starts at the same offset of a column, and
stops after as many values as the column states, which is what the counted pages have.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

__all__ = ["MalformedParquetError", "measure"]

_MAGIC: Final = b"PAR1"
_MOST_FOOTER: Final = 1 << 18
_MOST_DEPTH: Final = 32
_I32, _I64, _LIST, _MAP, _STRUCT = 5, 6, 9, 11, 12
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_COUNTED: Final = {_DATA: (5, 2), _DICTIONARY: (7, 2), _DATA_V2: (8, 4)}
"""For each page type: the field of its own header, and in it the field of the encoding."""
_DELTA_BYTE_ARRAY: Final = 7
_VALUE_BYTES: Final = 16
"""Bytes that pyarrow takes for each value of a dictionary, besides its content."""

type _Fields = dict[tuple[int, int], Any]


class MalformedParquetError(ValueError):
    """The parquet file is malformed, or may expand to more than it states."""


def measure(data: bytes) -> tuple[int, int]:
    """Return the number of rows of a parquet file, and the decompressed bytes of its pages.

    Raises
    ------
    MalformedParquetError
        If the file is malformed, or its pages do not have the values that its columns state. Also
        if a page stores texts without their common prefixes, where a few bytes can expand to any
        size.
    """
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise MalformedParquetError("it does not begin and end as a parquet file does")
    length = int.from_bytes(data[-8:-4], "little")
    if length > min(_MOST_FOOTER, len(data) - 12):
        raise MalformedParquetError(f"its footer states a length of {length} bytes")
    nbytes = 0
    values: Counter[int] = Counter()
    try:
        footer = _Thrift(data[-8 - length : -8]).struct()
        rows = _size(footer, 3, _I64)
        for group in footer[4, _LIST]:
            for number, column in enumerate(group[1, _LIST]):
                described = column[3, _STRUCT]
                values[number] += _size(described, 5, _I64)
                nbytes += _column_bytes(data, described)
    except (IndexError, KeyError, TypeError) as error:
        raise MalformedParquetError("its headers are malformed") from error
    if any(count != rows for count in values.values()):
        raise MalformedParquetError("its columns do not have one value for each row")
    return rows, nbytes


def _column_bytes(data: bytes, column: _Fields) -> int:
    """Decompressed bytes of a column's pages in one row group."""
    at = _size(column, 9, _I64)
    if (11, _I64) in column:
        at = min(at, _size(column, 11, _I64) or at)
    end, left, total = at + _size(column, 7, _I64), _size(column, 5, _I64), 0
    while at < end:
        thrift = _Thrift(data, at)
        page = thrift.struct()
        unpacked = _size(page, 2, _I32)
        total += unpacked
        kind = page[1, _I32]
        if kind in _COUNTED:
            own, encoding = _COUNTED[kind]
            count = _size(page[own, _STRUCT], 1, _I32)
            if page[own, _STRUCT][encoding, _I32] == _DELTA_BYTE_ARRAY:
                raise MalformedParquetError("it stores texts without their common prefixes")
            if kind == _DICTIONARY:
                total += count * _VALUE_BYTES
            else:
                left -= count
        at = thrift.at + _size(page, 3, _I32)
    if left:
        raise MalformedParquetError("its pages do not hold the values that its columns state")
    return total


def _size(fields: _Fields, number: int, kind: int) -> int:
    value: int = fields[number, kind]
    if not 0 <= value < 1 << (31 if kind == _I32 else 63):
        raise MalformedParquetError("its headers state sizes that cannot be")
    return value


class _Thrift:
    """Reads values in Thrift's compact protocol.

    Parameters
    ----------
    data : bytes
        The bytes to read from.
    at : int
        The position of the next value.
    """

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data, self.at = data, at

    def struct(self, depth: int = 0) -> _Fields:
        """Read a struct, as values by number and type of its fields.

        Raises
        ------
        IndexError
            If it does not end.
        MalformedParquetError
            If it is malformed otherwise.
        """
        fields: _Fields = {}
        seen: set[int] = set()
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._number()
            if number in seen:
                raise MalformedParquetError("its headers have a field twice")
            seen.add(number)
            kind = head & 15
            # The value of a bool field is in its type.
            fields[number, kind] = kind if kind in (1, 2) else self._value(kind, depth + 1)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        """Read a value of any type; None for types that no size depends on."""
        if depth > _MOST_DEPTH:
            raise MalformedParquetError("its headers are nested too deep")
        if kind == _STRUCT:
            return self.struct(depth)
        if kind in (4, _I32, _I64):
            return self._number()
        if kind in (_LIST, _LIST + 1):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        if kind == _MAP:
            if count := self._varint():
                kinds = self._byte()
                for _ in range(count):
                    self._value(kinds >> 4, depth + 1)
                    self._value(kinds & 15, depth + 1)
        elif kind == 8:  # bytes
            length = self._varint()
            self.at += length
        elif kind in (1, 2, 3, 7, 13):  # in a list, two kinds of bool; a byte, a double, a UUID
            self.at += {7: 8, 13: 16}.get(kind, 1)
        else:
            raise MalformedParquetError("its headers have values of unknown types")
        if self.at > len(self._data):
            raise IndexError
        return None

    def _byte(self) -> int:
        value = self._data[self.at]
        self.at += 1
        return value

    def _number(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise MalformedParquetError("its headers have numbers that do not end")
