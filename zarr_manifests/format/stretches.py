"""A large chunk table in stretches of rows, so that a reader can decode some of them.

A stretch is encoded like a chunk table in the box of the whole table, without an index, but with
the first linear index, if its rows take up its bounds. All stretches
have about the same number of bytes. The sessions and virtual files that rows refer to are in each
stretch, or once for all stretches, whichever is smaller.

Invariants, checked when stretches are decoded: their bounds strictly ascend and do not overlap, and
the rows of each lie within its bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.chunk_table import (
    ChunkTable,
    Files,
    RefKind,
    pack_rows,
    parse_box,
    parse_files,
    parse_index,
    parse_rows,
    side_by_side,
)
from zarr_manifests.format.columns import MAX_ROWS, Column
from zarr_manifests.format.envelope import Fields, pack, unpack
from zarr_manifests.format.virtual_sources import VirtualSources

STRETCH_BYTES: Final = 80 * 1024
"""About the most bytes of a stretch; a smaller table is not split."""
_ROWS_FREELY: Final = 1 << 20
_ROWS_A_BYTE: Final = 8
_VALUES_FREELY: Final = 1 << 22
_VALUES_A_BYTE: Final = 8
_TOO_LARGE: Final = 100_000
_ESTIMATED_ROWS: Final = 1 << 16
_SAMPLE_ROWS: Final = 1 << 12
_SAMPLES: Final = 4
_EVEN_ROWS: Final = 1024
_LEAST_ROWS: Final = 64
_SESSION_BYTES: Final = 38
_SHARED_FREELY_BYTES: Final = 32 * 1024
_REPEATED: Final = 1.25


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some consecutive rows of a table, encoded.

    Parameters
    ----------
    first, last : int
        Bounds of their linear indexes in the table's box, both included.
    rows : int
        Number of rows.
    data : bytes
        The encoded rows.
    """

    first: int
    last: int
    rows: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SplitTable:
    """Stretches of an encoded chunk table, all of them or some consecutive ones.

    Parameters
    ----------
    shared : mapping of str to object
        Sessions and files of all stretches, as they are stored; empty if each has its own.
    stretches : tuple of Stretch
        In the order of their rows.
    """

    shared: Mapping[str, Any]
    stretches: tuple[Stretch, ...]

    def __len__(self) -> int:
        return sum(len(stretch.data) for stretch in self.stretches)


type TableData = bytes | SplitTable
"""An encoded chunk table, in one piece or in stretches."""


def decode_table(data: TableData, rows: int) -> ChunkTable:
    """The encoded table, which must have that many rows.

    Raises
    ------
    CorruptObjectError
        If it is malformed, or claims more values than its bytes may hold.
    """
    if isinstance(data, bytes):
        fields = Fields(unpack(data), "table")
        if fields.number("n") != rows:
            raise CorruptObjectError("a chunk table has not the rows that its manifest lists")
        _check_size(rows, [fields], len(data))
        return ChunkTable.parse(fields)
    if sum(stretch.rows for stretch in data.stretches) != rows:
        raise CorruptObjectError("a chunk table has not the rows that its manifest lists")
    maps = [Fields(unpack(stretch.data), "stretch") for stretch in data.stretches]
    _check_size(rows, maps, len(data))
    return _joined(data, maps, rows)


def _check_size(rows: int, maps: Sequence[Fields], nbytes: int) -> None:
    """Raise if rows, or values that vary, are more than so few bytes may hold."""
    values = sum(_values(fields) for fields in maps)
    if rows > _ROWS_FREELY + _ROWS_A_BYTE * nbytes:
        raise CorruptObjectError(f"a chunk table of {nbytes} bytes cannot hold {rows} rows")
    if values > _VALUES_FREELY + _VALUES_A_BYTE * nbytes:
        raise CorruptObjectError(f"a chunk table of {nbytes} bytes cannot hold {values} values")


def _values(fields: Fields) -> int:
    """Number of values in columns that vary."""
    columns = fields.table("col").values()
    return fields.number("n") * sum(isinstance(c, list) and c[:1] != [0] for c in columns)


def encode_table(table: ChunkTable) -> TableData:
    """Encode the table, in stretches if it is large.

    Raises
    ------
    InvalidArgumentError
        If it has more rows or values than readers accept.
    """
    data = _encoded(table)
    whole = [data] if isinstance(data, bytes) else [stretch.data for stretch in data.stretches]
    try:
        _check_size(len(table), [Fields(unpack(each), "table") for each in whole], len(data))
    except CorruptObjectError as error:
        raise InvalidArgumentError(
            f"a table of {len(data)} bytes with {len(table)} chunks of one array exceeds what "
            "readers accept; commit them in several steps"
        ) from error
    return data


def encode_whole(table: ChunkTable) -> bytes:
    """Encode the table in one piece, whatever its size."""
    return pack(table.pack())


def _encoded(table: ChunkTable) -> TableData:
    rows = 0
    if len(table) > _ESTIMATED_ROWS:
        estimate = _row_bytes(table)
        if estimate * len(table) > 2 * STRETCH_BYTES:  # encode it once
            rows = _rows_for(estimate)
    if not rows:
        data = encode_whole(table)
        rows = _rows_for(len(data) / max(len(table), 1))
        if len(data) <= STRETCH_BYTES or rows >= len(table):
            return data
    bounds = [(start, min(start + rows, len(table))) for start in range(0, len(table), rows)]
    files = table.sources, table.virtual
    shared = _is_shared(table, bounds)
    stretches: list[Stretch] = []
    due = bounds[::-1]
    while due:
        start, stop = due.pop()
        found = _stretch(table, start, stop, None if shared else files)
        if len(found.data) > _TOO_LARGE and stop - start > 1:
            middle = (start + stop) // 2
            due += [(middle, stop), (start, middle)]
        else:
            stretches.append(found)
    held: dict[str, Any] = {}
    if shared:
        held = {"src": list(table.sources)} | (
            {"virt": table.virtual.pack()} if len(files[1]) else {}
        )
    return SplitTable(held, tuple(stretches))


def _row_bytes(table: ChunkTable) -> float:
    """An estimate of the bytes that a row takes."""
    starts = np.linspace(0, len(table) - _SAMPLE_ROWS, _SAMPLES).astype(int).tolist()
    found = [_stretch(table, start, start + _SAMPLE_ROWS, None) for start in starts]
    return sum(len(stretch.data) for stretch in found) / (_SAMPLES * _SAMPLE_ROWS)


def _rows_for(row_bytes: float) -> int:
    """How many rows fit a stretch; a multiple of 8, since Blosc shuffles no other number."""
    rows = int(STRETCH_BYTES / max(row_bytes, 1e-3))
    return max(rows // _EVEN_ROWS * _EVEN_ROWS, _LEAST_ROWS)


def _is_shared(table: ChunkTable, bounds: Sequence[tuple[int, int]]) -> bool:
    """Whether to store sessions and files once, instead of in each stretch that refers to them."""
    each_file = len(pack(table.virtual.pack())) / len(table.virtual) if len(table.virtual) else 0
    whole = _SESSION_BYTES * len(table.sources) + each_file * len(table.virtual)
    if whole <= _SHARED_FREELY_BYTES:
        return True
    apart = 0.0
    for start, stop in bounds:
        kind, source = table.kind[start:stop], table.source[start:stop]
        sessions = _used(kind, source, RefKind.NATIVE, len(table.sources))
        files = _used(kind, source, RefKind.VIRTUAL, len(table.virtual))
        apart += _SESSION_BYTES * len(sessions) + each_file * len(files)
    return apart > _REPEATED * whole


def _used(kind: Column, source: Column, of: RefKind, most: int) -> Column:
    """Positions of the sources, of `most`, that rows of this kind refer to, ascending."""
    mine = source[kind == of]
    if most > len(mine):  # a table may have as many files as rows
        mine = np.sort(mine)
        found: Column = mine[np.diff(mine, prepend=-1) > 0]
        return found
    used = np.zeros(most, np.bool_)
    used[mine] = True
    return np.flatnonzero(used)


def _stretch(table: ChunkTable, start: int, stop: int, files: Files | None) -> Stretch:
    """Encode some rows; without `files`, they keep the table's numbering of sources."""
    rows = slice(start, stop)
    index = np.arange(start, stop) if table.index is None else table.index[rows]
    columns = {name: column[rows] for name, column in table.columns().items()}
    kind, inline = columns["kind"], b""
    if table.inline:
        places = columns["offset"], columns["length"]
        columns["offset"], inline = side_by_side(table.inline, kind, *places)
    if files is not None:
        source, (sessions, virtual) = columns["source"], files
        native = _used(kind, source, RefKind.NATIVE, len(sessions))
        others = _used(kind, source, RefKind.VIRTUAL, len(virtual))
        moved = np.zeros(len(source), np.int64)
        for which, used in ((RefKind.NATIVE, native), (RefKind.VIRTUAL, others)):
            mine = kind == which
            moved[mine] = np.searchsorted(used, source[mine])
        columns["source"] = moved
        files = tuple([sessions[i] for i in native.tolist()]), virtual.take(others)
    first, last = int(index[0]), int(index[-1])
    sparse = index if last - first + 1 > stop - start else None
    packed = pack_rows(table.box, sparse, columns, inline, files)
    if sparse is None:
        packed["at"] = first
    return Stretch(first, last, stop - start, pack(packed))


def _renumbered(
    kind: Column, source: Column, rows: Sequence[int], places: Sequence[tuple[Column, Column]]
) -> Column:
    """The source of each row by its new position.

    `places` has the new positions of sessions and of files, for each piece of so many rows.
    """
    moved = np.zeros(len(source), np.int64)
    for of, which in ((RefKind.NATIVE, 0), (RefKind.VIRTUAL, 1)):
        mine: Any = kind == of
        if mine.any():
            mine = slice(None) if mine.all() else mine
            counts = np.array([len(each[which]) for each in places], np.int64)
            ends = counts.cumsum()
            at = (source + np.repeat(ends - counts, rows))[mine]
            if (at >= np.repeat(ends, rows)[mine]).any():
                raise CorruptObjectError("a row of a chunk table has no source")
            moved[mine] = np.concatenate([each[which] for each in places])[at]
    return moved


def _joined(data: SplitTable, maps: Sequence[Fields], n: int) -> ChunkTable:
    """One table of the `n` rows of all stretches, whose maps are given."""
    rows = [stretch.rows for stretch in data.stretches]
    if 0 in rows or [fields.number("n", MAX_ROWS) for fields in maps] != rows:
        raise CorruptObjectError("a stretch of a chunk table has other rows than listed")
    box, *others = map(parse_box, maps)
    if any(other != box for other in others):
        raise CorruptObjectError("the stretches of a chunk table are in different boxes")
    columns = parse_rows(maps, rows)
    index = _index(data.stretches, maps, None if n == box.size else np.empty(n, np.int64))
    if data.shared:
        sources, virtual = parse_files(Fields(data.shared, "shared"))
    else:
        files = [parse_files(fields) for fields in maps]
        numbers: dict[str, int] = {}
        sessions = [
            np.array([numbers.setdefault(one, len(numbers)) for one in each], np.int64)
            for each, _ in files
        ]
        virtual, positions = VirtualSources.union([each for _, each in files])
        places = list(zip(sessions, positions, strict=True))
        columns["source"] = _renumbered(columns["kind"], columns["source"], rows, places)
        sources = tuple(numbers)
    return ChunkTable(box, index, **columns, sources=sources, virtual=virtual)


def _index(
    stretches: Sequence[Stretch], maps: Sequence[Fields], index: Column | None
) -> Column | None:
    """Fill `index`, if there is one; raises if rows are outside the bounds of their stretch."""
    stop = 0
    for stretch, fields in zip(stretches, maps, strict=True):
        start, stop = stop, stop + stretch.rows
        first, last, found = stretch.first, stretch.last, parse_index(fields, stretch.rows)
        if found is None:
            sound = fields.number("at") == first == last + 1 - stretch.rows
        else:
            sound = int(found[0]) >= first and int(found[-1]) <= last
        if not sound:
            raise CorruptObjectError("a stretch of a chunk table has rows outside its bounds")
        if index is not None:
            index[start:stop] = np.arange(first, last + 1) if found is None else found
    return index
