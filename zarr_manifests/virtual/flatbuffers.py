"""Reading flatbuffers and flexbuffers that others wrote, with a bound on every position.

A flatbuffer is a tree of tables, whose fields are found by number. `FlatTable` reads one table;
`FlatColumns` reads the same field of many tables at once, as numpy columns. A flexbuffer is a value
as in JSON.

Invariant: nothing outside the buffer is read, whatever the buffer says; what does not fit raises
`CorruptObjectError` with the name of the object.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.columns import Column
from zarr_manifests.records import dataclass

__all__ = ["Flat", "FlatColumns", "FlatTable", "flex_value"]

_MOST_VALUES: Final = 1 << 20
_MOST_DEPTH: Final = 64


class Flat:
    """The bytes of a flatbuffer.

    Parameters
    ----------
    data : bytes
        The buffer.
    where : str
        Name of the object, for errors.
    """

    __slots__ = ("bytes", "data", "where")

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where = data, where
        self.bytes = np.frombuffer(data, np.uint8)

    def root(self) -> FlatTable:
        """The table that everything hangs on."""
        return FlatTable(self, self.number(0, "I"))

    def refused(self) -> CorruptObjectError:
        """The error that the buffer is damaged."""
        return CorruptObjectError(f"{self.where} is damaged: it points outside of itself")

    def number(self, at: int, code: str) -> int:
        """The number at a position, of the type that `struct` calls `code`."""
        if at < 0 or at + struct.calcsize(code) > len(self.data):
            raise self.refused()
        return int(struct.unpack_from("<" + code, self.data, at)[0])

    def cut(self, at: int, nbytes: int) -> bytes:
        """The bytes from a position on."""
        if at < 0 or nbytes < 0 or at + nbytes > len(self.data):
            raise self.refused()
        return self.data[at : at + nbytes]


@dataclass(frozen=True, slots=True)
class FlatTable:
    """A table of a flatbuffer; fields are named by number, and absent ones have a default.

    Parameters
    ----------
    flat : Flat
        The buffer.
    at : int
        Position of the table.
    """

    flat: Flat
    at: int

    def _field(self, number: int) -> int:
        """Position of a field; 0 if it is absent."""
        kinds = self.at - self.flat.number(self.at, "i")
        slot = 4 + 2 * number
        if slot + 2 > self.flat.number(kinds, "H"):
            return 0
        offset = self.flat.number(kinds + slot, "H")
        return self.at + offset if offset else 0

    def _target(self, number: int) -> int:
        """Position of what a field points to; 0 if it is absent."""
        at = self._field(number)
        return at + self.flat.number(at, "I") if at else 0

    def number(self, field: int, code: str = "I", default: int = 0) -> int:
        """A number."""
        at = self._field(field)
        return self.flat.number(at, code) if at else default

    def fixed(self, field: int, nbytes: int) -> bytes:
        """A structure of that size; empty if it is absent."""
        at = self._field(field)
        return self.flat.cut(at, nbytes) if at else b""

    def blob(self, field: int, item_bytes: int = 1) -> bytes:
        """A vector of items of that size, or the bytes of a text; empty if it is absent."""
        at = self._target(field)
        return self.flat.cut(at + 4, self.flat.number(at, "I") * item_bytes) if at else b""

    def text(self, field: int) -> str:
        """A text; empty if it is absent."""
        try:
            return self.blob(field).decode()
        except UnicodeDecodeError as error:
            raise CorruptObjectError(f"{self.flat.where}: a text is not UTF-8") from error

    def table(self, field: int) -> FlatTable | None:
        """A table; None if it is absent."""
        at = self._target(field)
        return FlatTable(self.flat, at) if at else None

    def positions(self, field: int) -> Column:
        """Positions of the tables in a vector of tables."""
        offsets = np.frombuffer(self.blob(field, 4), "<u4").astype(np.int64)
        return self._target(field) + 4 + 4 * np.arange(len(offsets)) + offsets

    def tables(self, field: int) -> list[FlatTable]:
        """The tables in a vector of tables."""
        return [FlatTable(self.flat, at) for at in self.positions(field).tolist()]


class FlatColumns:
    """The same fields of many tables, as columns.

    Parameters
    ----------
    flat : Flat
        The buffer.
    at : int64[n]
        Positions of the tables.
    """

    def __init__(self, flat: Flat, at: Column) -> None:
        self._flat, self._at = flat, at
        self._kinds = at - self._read(at, "<i4")
        self._sizes = self._read(self._kinds, "<u2")

    def _gather(self, at: Column, nbytes: int) -> npt.NDArray[np.uint8]:
        """The bytes at positions (uint8[n, nbytes])."""
        if len(at) and (int(at.min()) < 0 or int(at.max()) + nbytes > len(self._flat.data)):
            raise self._flat.refused()
        found: npt.NDArray[np.uint8] = self._flat.bytes[at[:, None] + np.arange(nbytes)]
        return found

    def _read(self, at: Column, dtype: str) -> Column:
        found = self._gather(at, np.dtype(dtype).itemsize).view(dtype)[:, 0]
        if dtype == "<u8" and len(found) and int(found.max()) > 2**62:
            raise CorruptObjectError(f"{self._flat.where} is damaged: a number is too large")
        return found.astype(np.int64)

    def _fields(self, number: int) -> Column:
        """Positions of a field; 0 where it is absent."""
        slot = 4 + 2 * number
        has = self._sizes >= slot + 2
        offset = np.zeros(len(self._at), np.int64)
        offset[has] = self._read(self._kinds[has] + slot, "<u2")
        return np.where(offset > 0, self._at + offset, 0)

    def has(self, number: int) -> npt.NDArray[np.bool_]:
        """Which tables have the field."""
        return self._fields(number) > 0

    def numbers(self, number: int, dtype: str) -> Column:
        """Numbers; 0 where the field is absent."""
        at = self._fields(number)
        found = np.zeros(len(at), np.int64)
        found[at > 0] = self._read(at[at > 0], dtype)
        return found

    def fixed(self, number: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Structures of that size (uint8[n, nbytes]); zeros where the field is absent."""
        at = self._fields(number)
        found = np.zeros((len(at), nbytes), np.uint8)
        found[at > 0] = self._gather(at[at > 0], nbytes)
        return found

    def spans(self, number: int) -> tuple[Column, Column]:
        """Starts and ends of vectors of bytes, or of texts; both 0 where the field is absent."""
        at = self._fields(number)
        start, end = np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
        has = at > 0
        target = at[has] + self._read(at[has], "<u4")
        start[has] = target + 4
        end[has] = start[has] + self._read(target, "<u4")
        if len(end) and int(end.max()) > len(self._flat.data):
            raise self._flat.refused()
        return start, end

    def vectors(self, number: int, count: int) -> Column:
        """Vectors of `count` numbers of 32 bits each (int64[n, count])."""
        at = self._fields(number)
        target = at + self._read(at, "<u4")
        if (at == 0).any() or (self._read(target, "<u4") != count).any():
            raise CorruptObjectError(f"{self._flat.where} is damaged: expected {count} numbers")
        if not count:
            return np.zeros((len(at), 0), np.int64)
        return self._gather(target + 4, 4 * count).view("<u4").astype(np.int64)


_FLOATS: Final = {4: "f", 8: "d"}
_INTS: Final = {1: "b", 2: "h", 4: "i", 8: "q"}
_TYPED: Final = {11: 1, 12: 2, 13: 3, 14: 4, 36: 26}
"""Types of vectors, and of what is in them."""
_UINTS: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}


def flex_value(data: bytes, where: str) -> Any:
    """The value that a flexbuffer holds: None, numbers, texts, lists and dicts.

    Raises
    ------
    CorruptObjectError
        If it is damaged, or nested too deep.

    Examples
    --------
    >>> from zarr_manifests.virtual.flatbuffers import flex_value
    >>> flex_value(bytes([3, 1, 2, 3, 3, 44, 1]), "an example")
    [1, 2, 3]
    """
    flat = Flat(data, where)
    if len(data) < 3:
        raise flat.refused()
    width = data[-1]
    return _Flex(flat).value(len(data) - 2 - width, width, data[-2], 0)


class _Flex:
    """Reads the values of a flexbuffer, a bounded number of them."""

    __slots__ = ("_flat", "_left")

    def __init__(self, flat: Flat) -> None:
        self._flat, self._left = flat, _MOST_VALUES

    def _uint(self, at: int, width: int) -> int:
        if width not in _UINTS:
            raise self._flat.refused()
        return self._flat.number(at, _UINTS[width])

    def value(self, at: int, width: int, packed: int, depth: int) -> Any:
        """The value whose `width` bytes are at the position."""
        self._left -= 1
        if self._left < 0 or depth > _MOST_DEPTH:
            raise CorruptObjectError(f"{self._flat.where}: too many values, or nested too deep")
        kind, inner = packed >> 2, 1 << (packed & 3)
        if kind in (0, 1, 2, 3, 26):
            return self._scalar(kind, at, width)
        at -= self._uint(at, width)
        if kind in (6, 7, 8):
            return self._scalar(kind - 5, at, inner)
        if kind == 4:
            return self._key(at)
        if kind in (5, 25):
            found = self._flat.cut(at, self._uint(at - inner, inner))
            return self._text(found) if kind == 5 else found
        if kind in (9, 10):
            count = self._count(at, inner)
            kinds = self._flat.cut(at + count * inner, count)
            rows = [self.value(at + i * inner, inner, kinds[i], depth + 1) for i in range(count)]
            return (
                rows if kind == 10 else dict(zip(self._keys(at, inner, count), rows, strict=True))
            )
        if 16 <= kind <= 24:  # two to four numbers of one type
            element, count = (kind - 16) % 3 + 1, (kind - 16) // 3 + 2
        elif kind in _TYPED:
            element, count = _TYPED[kind], self._count(at, inner)
        else:
            raise CorruptObjectError(f"{self._flat.where}: a value of unknown type {kind}")
        return [self.value(at + i * inner, inner, element << 2, depth + 1) for i in range(count)]

    def _count(self, at: int, width: int) -> int:
        count = self._uint(at - width, width)
        if count > len(self._flat.data):
            raise self._flat.refused()
        return count

    def _keys(self, at: int, width: int, count: int) -> list[str]:
        """The keys of a map."""
        place, inner = at - 3 * width, self._uint(at - 2 * width, width)
        keys = place - self._uint(place, width)
        places = (keys + i * inner for i in range(count))
        return [self._key(each - self._uint(each, inner)) for each in places]

    def _scalar(self, kind: int, at: int, width: int) -> Any:
        codes = {1: _INTS, 3: _FLOATS}.get(kind, _UINTS)
        if kind == 0:
            return None
        if width not in codes:
            raise self._flat.refused()
        found = struct.unpack("<" + codes[width], self._flat.cut(at, width))[0]
        return bool(found) if kind == 26 else found

    def _key(self, at: int) -> str:
        end = self._flat.data.find(b"\0", at) if at >= 0 else -1
        if end < 0:
            raise self._flat.refused()
        return self._text(self._flat.data[at:end])

    def _text(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CorruptObjectError(f"{self._flat.where}: a text is not UTF-8") from error
