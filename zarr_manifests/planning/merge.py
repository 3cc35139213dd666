"""Merging chunk tables: the newest row wins. Vectorised, no I/O.

Of all rows for a coordinate, the one from the newest layer counts. An UNSET row hides older rows.
A truncation drops every older row at or beyond it on any axis. UNSET rows are kept as long as
something older may hold the coordinate, and dropped when the merge reaches the base. Only layers
newer than a leaf are merged into it, inside its box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import (
    LEAF_ROWS,
    TABLE_ROWS,
    ChunkTable,
    RefKind,
    VirtualSource,
    bare,
    repeated,
    side_by_side,
)
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import crc32c

_TABLES: Final = 64
"""Tables of a delta that may be as small as leaves."""
_COLUMNS: Final = ("index", "kind", "source", "number", "offset", "length", "crc32c")


class Layer(Struct, frozen=True):
    """One delta's changes to one node: a truncation of everything older, then its tables."""

    truncated: Coords | None
    tables: tuple[ChunkTable, ...]


class Overlay(Struct, frozen=True, weakref=True):
    """All merged layers of one node: the truncation of the base, then the rows on top of it."""

    truncated: Coords | None
    table: ChunkTable | None


def narrower(a: Coords | None, b: Coords | None) -> Coords | None:
    """The combined effect of two truncations."""
    if a is None or b is None:
        return b if a is None else a
    return tuple(map(min, a, b))


def inside(coords: IndexArray, shape: Coords) -> npt.NDArray[np.bool_]:
    """Which coordinates (int64[n, ndim]) lie below `shape` on every axis.

    Raises
    ------
    CorruptObjectError
        If the numbers of axes differ: a truncation and a table contradict each other.
    """
    if coords.shape[1] != len(shape):
        raise CorruptObjectError(f"chunks of {coords.shape[1]} axes are cut off at {shape}")
    return np.asarray((coords < np.asarray(shape, np.int64)).all(axis=1))


def select(table: ChunkTable, keep: npt.NDArray[np.bool_]) -> ChunkTable:
    """The rows for which `keep` (bool[n]) is true."""
    if keep.all():
        return table
    return _gather([table], table.box, table.linear_index()[keep], np.flatnonzero(keep))


def pick(table: ChunkTable, coords: IndexArray) -> ChunkTable:
    """The rows at these coordinates (int64[n, ndim]); coordinates without a row are ignored."""
    rows = rows_at(table, coords)
    rows = np.unique(rows[rows >= 0])
    if len(rows) == len(table):
        return table
    return _gather([table], table.box, rows if table.index is None else table.index[rows], rows)


def without_unused_sessions(table: ChunkTable) -> ChunkTable:
    """The same rows, without session ids that no row refers to."""
    source, sources = _used(RefKind.NATIVE, table.kind, table.source, table.sources)
    return table if sources is table.sources else replace(table, source=source, sources=sources)


def without(table: ChunkTable, coords: IndexArray) -> ChunkTable:
    """The table without the rows at these coordinates (int64[n, ndim])."""
    keep = np.ones(len(table), np.bool_)
    rows = rows_at(table, coords)
    keep[rows[rows >= 0]] = False
    return select(table, keep)


def unset_at(coords: IndexArray) -> ChunkTable:
    """An UNSET row at each of these coordinates (int64[n, ndim], n >= 1, ascending, distinct)."""
    box = Box.around_coords(coords)
    index = None if len(coords) == box.size else box.ravel(coords)
    return bare(box, index, repeated(RefKind.UNSET, len(coords)))


def rearranged(
    table: ChunkTable, keep: npt.NDArray[np.bool_], coords: IndexArray
) -> ChunkTable | None:
    """The rows for which `keep` (bool[n]) is true, moved to `coords` (int64[n, ndim], distinct).

    None if none is kept.
    """
    rows = np.flatnonzero(keep)
    if not len(rows):
        return None
    box = Box.around_coords(coords[rows])
    index = box.ravel(coords[rows])
    order = np.argsort(index)
    return _gather([table], box, index[order], rows[order])


def take(table: ChunkTable, rows: npt.NDArray[np.int64], box: Box) -> ChunkTable:
    """The rows at these positions (ascending), as a table in the given box."""
    # Of a full table, the rows are its linear index.
    index = table.box.carried(rows if table.index is None else table.index[rows], box)
    if len(rows) and int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        part = _sliced(table, slice(int(rows[0]), int(rows[-1]) + 1))
        return replace(part, box=box, index=None if len(rows) == box.size else index)
    return _gather([table], box, index, rows)


def within(table: ChunkTable, box: Box) -> ChunkTable:
    """The rows in the box. Contiguous rows are not copied."""
    if table.box.ndim != box.ndim:
        raise CorruptObjectError(f"chunks of {table.box.ndim} axes over a leaf of {box.ndim}")
    return _between(table, box.lo, box.hi)


def cut_off(table: ChunkTable, shape: Coords) -> ChunkTable:
    """The rows below `shape` on every axis."""
    if table.box.ndim != len(shape):
        raise CorruptObjectError(f"chunks of {table.box.ndim} axes are cut off at {shape}")
    return _between(table, (0,) * len(shape), shape)


def owned(table: ChunkTable) -> ChunkTable:
    """The table with columns of its own: a slice of a column keeps all of it in memory."""
    columns = {name: getattr(table, name) for name in _COLUMNS if getattr(table, name) is not None}
    slices = {
        name: column.copy()
        for name, column in columns.items()
        if column.base is not None and len(column) and column.strides[0]
    }
    return replace(table, **slices) if slices else table


def _between(table: ChunkTable, lo: Coords, hi: Coords) -> ChunkTable:
    mine = table.box
    sides = enumerate(zip(lo, mine.lo, mine.hi, hi, strict=True))
    cut = [axis for axis, (a, b, c, d) in sides if a > b or c > d]
    if not cut:
        return table
    axis, step = cut[0], mine.strides()[cut[0]]
    if len(cut) == 1 and all(n == 1 for n in mine.shape[:axis]):  # a stretch of rows
        first, last = mine.lo[axis], mine.hi[axis]
        bounds = [(min(max(at, first), last) - first) * step for at in (lo[axis], hi[axis])]
        if table.index is not None:
            bounds = table.index.searchsorted(bounds).tolist()
        return _sliced(table, slice(bounds[0], max(bounds)))
    coords = table.coords()
    keep = (coords >= np.asarray(lo, np.int64)) & (coords < np.asarray(hi, np.int64))
    return select(table, keep.all(axis=1))


def _sliced(table: ChunkTable, rows: slice) -> ChunkTable:
    """A slice of the rows, as views of the columns, without sources that no row uses."""
    if rows.stop - rows.start == len(table):
        return table
    index = np.arange(rows.start, rows.stop) if table.index is None else table.index[rows]
    if table.inline:
        return _gather([table], table.box, index, np.arange(rows.start, rows.stop))
    kind = table.kind[rows]
    source, virtual = _used(RefKind.VIRTUAL, kind, table.source[rows], table.virtual)
    source, sources = _used(RefKind.NATIVE, kind, source, table.sources)
    columns = (table.number[rows], table.offset[rows], table.length[rows], table.crc32c[rows])
    at = None if len(index) == table.box.size else index
    return ChunkTable(table.box, at, kind, source, *columns, sources, b"", virtual)


def in_tables(table: ChunkTable) -> Iterator[ChunkTable]:
    """The table in tables as large as leaves, or larger ones, if a delta would have too many."""
    yield from split(table, min(max(len(table) // _TABLES, LEAF_ROWS), TABLE_ROWS))


def split(table: ChunkTable, most_rows: int) -> Iterator[ChunkTable]:
    """Split the table into tables of at most `most_rows` rows, in boxes that do not overlap.

    It is split along the first axis, and along the next one where a single step has too many rows.
    So an append along the first axis only touches the last table. Columns are slices.
    """
    whole, linear = table.box, table.linear_index()
    due = [(0, len(table), whole)]
    while due:
        start, stop, box = due.pop()
        if stop - start <= most_rows:
            part = start, stop
            yield table if part == (0, len(table)) else take(table, np.arange(*part), box)
            continue
        rows = np.array([start, start + most_rows, stop - 1])
        first, middle, last = whole.unravel(linear[rows]).tolist()
        # Rows are in C order: they ascend on the first axis on which the first and last differ.
        # (The box may be wider than they are, and cutting it there would leave them together.)
        axis = next(i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b)
        at = max(middle[axis], first[axis] + 1)
        row = int(linear.searchsorted(whole.ravel_one((*first[:axis], at, *whole.lo[axis + 1 :]))))
        below = Box(box.lo, (*box.hi[:axis], at, *box.hi[axis + 1 :]))
        above = Box((*box.lo[:axis], at, *box.lo[axis + 1 :]), box.hi)
        due += [(row, stop, above), (start, row, below)]


def in_c_order(table: ChunkTable) -> list[ChunkTable]:
    """Cut a table with a range of chunks in C order into the few boxes that such a range fills.

    Boxes around ranges overlap where one ends and the next begins within a row or a plane. The
    boxes of the parts do not.

    Examples
    --------
    >>> from zarr_manifests.format.chunk_table import UNSET, ChunkTable
    >>> from zarr_manifests.planning.merge import in_c_order
    >>> table = ChunkTable.of({(n // 4, n % 4): UNSET for n in range(2, 14)})
    >>> [(part.box.lo, part.box.hi) for part in in_c_order(table)]
    [((0, 2), (1, 4)), ((1, 0), (3, 4)), ((3, 0), (4, 2))]
    """
    if not len(table):
        return []
    coords = table.coords()
    box = Box.around_coords(coords)
    differs = np.flatnonzero(coords[0] != coords[-1])
    if not len(differs):
        return [_part(table, coords, slice(None))]
    axis = int(differs[0])
    first, last = coords[0].tolist(), coords[-1].tolist()
    starts_amid = first[axis + 1 :] != [*box.lo[axis + 1 :]]
    ends_amid = last[axis + 1 :] != [n - 1 for n in box.hi[axis + 1 :]]
    bounds = [first[axis] + starts_amid, last[axis] + (not ends_amid)]
    start, stop = np.searchsorted(coords[:, axis], bounds).tolist()
    stop = max(start, stop)
    parts = [_part(table, coords, slice(start, stop))] if start < stop else []
    head = in_c_order(_part(table, coords, slice(start))) if start else []
    tail = in_c_order(_part(table, coords, slice(stop, None))) if stop < len(table) else []
    return [*head, *parts, *tail]


def _part(table: ChunkTable, coords: IndexArray, rows: slice) -> ChunkTable:
    """A slice of the rows, which have these coordinates, in the smallest box around them."""
    box = Box.around_coords(coords[rows])
    return _gather([table], box, box.ravel(coords[rows]), np.arange(len(table))[rows])


def merge_layers(layers: Sequence[Layer]) -> Overlay:
    """Merge the layers of one node, oldest first."""
    cut: Coords | None = None
    tables: list[ChunkTable] = []
    for layer in layers:
        if layer.truncated is not None:
            cut = narrower(cut, layer.truncated)
            tables = [cut_off(table, layer.truncated) for table in tables]
        tables.extend(layer.tables)
    tables = [table for table in tables if len(table)]
    return Overlay(cut, _newest(tables) if tables else None)


def fold(leaves: Sequence[ChunkTable], overlay: Overlay) -> ChunkTable | None:
    """Merge the overlay into the leaves and drop UNSET rows; None if no row is left.

    Raises
    ------
    CorruptObjectError
        If two leaves have the same coordinate.
    """
    tables = list(leaves)
    if len(tables) > 1 and _distinct(tables) < sum(map(len, tables)):
        raise CorruptObjectError("two chunk tables of a base have a row for the same chunk")
    if overlay.truncated is not None:
        tables = [cut_off(table, overlay.truncated) for table in tables]
    if overlay.table is not None:
        tables.append(overlay.table)
    tables = [table for table in tables if len(table)]
    if not tables:
        return None
    merged = _newest(tables)
    if (merged.kind == RefKind.UNSET).any():
        merged = select(merged, merged.kind != RefKind.UNSET)
    return merged if len(merged) else None


def _distinct(tables: Sequence[ChunkTable]) -> int:
    """The number of distinct coordinates in the tables."""
    box = Box.around(table.box for table in tables)
    return len(np.unique(np.concatenate([box.ravel(table.coords()) for table in tables])))


def in_box(table: ChunkTable, box: Box) -> npt.NDArray[np.bool_]:
    """Which rows lie in the box."""
    mine = table.box
    if mine.ndim != box.ndim:
        raise CorruptObjectError(f"chunks of {mine.ndim} axes over a leaf of {box.ndim}")
    found = np.zeros(len(table), np.bool_)
    if not mine.overlaps(box):
        return found
    # Only rows between the corners of the box can lie in it, so the others are not looked at.
    shared = mine.shared(box)
    ends = [mine.ravel_one(shared.lo), mine.ravel_one(tuple(n - 1 for n in shared.hi)) + 1]
    start, stop = ends if table.index is None else table.index.searchsorted(ends).tolist()
    index = np.arange(start, stop) if table.index is None else table.index[start:stop]
    found[start:stop] = box.holds(mine.unravel(index))
    return found


def difference(new: ChunkTable | None, old: ChunkTable | None) -> ChunkTable | None:
    """The table that turns `old` into `new`: new or changed rows, and UNSET for removed ones.

    None if they are the same.
    """
    if new is None or old is None:
        return new if old is None else _unset(old)
    if new is old:
        return None
    gone = ~shared_rows(old, new)
    tables = [select(new, ~unchanged(new, old)), _unset(select(old, gone))]
    return merge_layers([Layer(None, tuple(tables))]).table


def unchanged(table: ChunkTable, other: ChunkTable) -> npt.NDArray[np.bool_]:
    """Which rows of `table` have the same ref in `other`."""
    found = np.zeros(len(table), np.bool_)
    at = np.arange(len(table)) if same_rows(table, other) else rows_at(other, table.coords())
    mine = np.flatnonzero(at >= 0)
    its = at[mine]
    # Both use the same numbering of files and sessions, so that positions compare.
    a, b = aligned(table, other)
    same = np.ones(len(mine), np.bool_)
    for name in ("kind", "source", "number", "length", "crc32c"):
        same &= getattr(a, name)[mine] == getattr(b, name)[its]
    inline = a.kind[mine] == RefKind.INLINE
    same &= inline | (a.offset[mine] == b.offset[its])
    rows = np.flatnonzero(same & inline)
    spans = np.stack([a.offset[mine], b.offset[its], a.length[mine]], axis=1)[rows].tolist()
    same[rows] = [a.inline[i : i + n] == b.inline[j : j + n] for i, j, n in spans]
    found[mine] = same
    return found


def shared_rows(table: ChunkTable, other: ChunkTable) -> npt.NDArray[np.bool_]:
    """Which rows of `table` have a coordinate that also occurs in `other`."""
    if table.box.ndim != other.box.ndim:
        raise CorruptObjectError("chunk tables of one array have different numbers of axes")
    return np.asarray(rows_at(other, table.coords()) >= 0)


def agree(
    a: ChunkTable | None,
    b: ChunkTable | None,
    coords: IndexArray,
    tell: Callable[[Any, Any], bool] | None = None,
) -> npt.NDArray[np.bool_]:
    """At which coordinates both tables have a chunk of the same bytes, or neither has one.

    Bytes count as the same if length and checksum are equal. This says too little about arrays
    that check themselves (see `ArrayMeta`): for these `tell` decides about two such refs. Virtual
    chunks without a checksum must be the same range of the same file. The tables have no UNSET
    rows.
    """
    if a is b:
        return np.ones(len(coords), np.bool_)
    none = np.full(len(coords), -1, np.int64)
    rows_a = none if a is None else rows_at(a, coords)
    rows_b = none if b is None else rows_at(b, coords)
    same: npt.NDArray[np.bool_] = (rows_a < 0) & (rows_b < 0)
    both = np.flatnonzero((rows_a >= 0) & (rows_b >= 0))
    if a is None or b is None or not len(both):
        return same
    i, j = rows_a[both], rows_b[both]
    crc_a, crc_b = _checksums(a)[i], _checksums(b)[j]
    found = (a.length[i] == b.length[j]) & (crc_a == crc_b)
    unknown = found & (crc_a < 0)
    if unknown.any():  # both are virtual
        one, other = aligned(a, b)
        place = (one.source[i] == other.source[j]) & (one.offset[i] == other.offset[j])
        found &= place | ~unknown
    same[both] = found
    if tell is not None:
        for row in both[found].tolist():
            at = tuple(coords[row].tolist())
            same[row] = tell(a.get(at), b.get(at))
    return same


def _checksums(table: ChunkTable) -> npt.NDArray[np.int64]:
    """The checksum of every row; -1 where it is unknown."""
    unknown = (table.kind == RefKind.VIRTUAL) & (table.number == 0)
    checksums = np.where(unknown, -1, table.crc32c)
    for row in np.flatnonzero(table.kind == RefKind.INLINE).tolist():
        start = int(table.offset[row])
        checksums[row] = crc32c(table.inline[start : start + int(table.length[row])])
    return checksums


def rows_at(table: ChunkTable, coords: IndexArray) -> npt.NDArray[np.int64]:
    """The row for each coordinate; -1 where the table has none."""
    within = np.flatnonzero(table.box.holds(coords))
    rows = np.full(len(coords), -1, np.int64)
    linear = table.box.ravel(coords[within])
    if table.index is None:
        rows[within] = linear
    elif len(table):
        at = np.minimum(table.index.searchsorted(linear), len(table) - 1)
        rows[within] = np.where(table.index[at] == linear, at, -1)
    return rows


def same_rows(a: ChunkTable, b: ChunkTable) -> bool:
    """Whether row i of both tables is for the same coordinate; False if their boxes differ."""
    if a.box != b.box or len(a) != len(b):
        return False
    return a.index is b.index or (
        a.index is not None and b.index is not None and np.array_equal(a.index, b.index)
    )


def aligned(new: ChunkTable, old: ChunkTable) -> tuple[ChunkTable, ChunkTable]:
    """Both tables with the same numbering of sessions and files."""
    sessions, places = _united([new.sources, old.sources])
    virtual, files = _united([new.virtual, old.virtual])
    one, other = (
        replace(table, source=_placed(table, *each), sources=sessions, virtual=virtual)
        for table, *each in zip((new, old), places, files, strict=True)
    )
    return one, other


def _unset(table: ChunkTable) -> ChunkTable:
    """An UNSET row at every coordinate of the table."""
    return bare(table.box, table.index, repeated(RefKind.UNSET, len(table)))


def _newest(tables: Sequence[ChunkTable]) -> ChunkTable:
    """For every coordinate, the row of the last table that has one. No table is empty."""
    if len(tables) == 1:
        return tables[0]
    box = Box.around(table.box for table in tables)
    indexes = [table.box.carried(table.linear_index(), box) for table in tables]
    along = sorted(range(len(tables)), key=lambda i: int(indexes[i][0]))
    if all(indexes[a][-1] < indexes[b][0] for a, b in pairwise(along)):
        return _gather([tables[i] for i in along], box, np.concatenate([indexes[i] for i in along]))
    linear = np.concatenate(indexes)
    order = np.argsort(linear, kind="stable")
    linear = linear[order]
    last = np.ones(len(linear), np.bool_)
    np.not_equal(linear[1:], linear[:-1], out=last[:-1])
    if not last.all():
        linear, order = linear[last], order[last]
    return _gather(tables, box, linear, order)


def _gather(
    tables: Sequence[ChunkTable],
    box: Box,
    index: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64] | None = None,
) -> ChunkTable:
    """Build a table from the given rows, numbered across all `tables`, at the given linear indexes.

    Without `rows`, all rows in order.
    """
    sources, mappings = _united([table.sources for table in tables])
    virtual, places = _united([table.virtual for table in tables])

    def column(columns: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        values = {_constant(column) for column in columns}
        if len(values) == 1 and (value := values.pop()) is not None:
            return repeated(value, len(index))  # takes no memory
        whole = columns[0] if len(columns) == 1 else np.concatenate(columns)
        return whole if rows is None else whole[rows]

    def named(name: str) -> npt.NDArray[np.int64]:
        return column([getattr(table, name) for table in tables])

    kind, length, offset = named("kind"), named("length"), named("offset")
    placed = zip(tables, mappings, places, strict=True)
    source = column([_placed(table, *both) for table, *both in placed])
    source, virtual = _used(RefKind.VIRTUAL, kind, source, virtual)
    source, sources = _used(RefKind.NATIVE, kind, source, sources)
    inline = b""
    if any(table.inline for table in tables):
        starts = np.cumsum([0, *(len(table.inline) for table in tables[:-1])])
        bases = np.repeat(starts, [len(table) for table in tables])
        offset = np.where(
            kind == RefKind.INLINE, offset + (bases if rows is None else bases[rows]), offset
        )
        blob = b"".join(table.inline for table in tables)
        offset, inline = side_by_side(blob, kind, offset, length)
    return ChunkTable(
        box,
        None if len(index) == box.size else index,
        kind,
        source,
        named("number"),
        offset,
        length,
        named("crc32c"),
        sources,
        inline,
        virtual,
    )


def _constant(column: npt.NDArray[np.int64]) -> int | None:
    """The value of a constant column that is stored once, else None."""
    return int(column[0]) if len(column) and not column.strides[0] else None


def _placed(
    table: ChunkTable, sessions: npt.NDArray[np.int64], files: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The rows' source positions in the new numbering; 0 for rows without a source."""
    kind = _constant(table.kind)
    numbering = {RefKind.NATIVE: sessions, RefKind.VIRTUAL: files}
    if kind is None:
        placed = np.zeros(len(table), np.int64)
        for of, places in numbering.items():
            if len(places):
                rows = table.kind == of
                placed += places[np.where(rows, table.source, 0)] * rows
        return placed
    if kind not in numbering:
        return repeated(0, len(table))
    places = numbering[RefKind(kind)]
    source = _constant(table.source)
    if source is not None:
        return repeated(int(places[source]), len(table))
    if (places == np.arange(len(places))).all():
        return table.source
    return np.asarray(places[table.source])


def _united[T: (str, VirtualSource)](
    names: Sequence[tuple[T, ...]],
) -> tuple[tuple[T, ...], list[npt.NDArray[np.int64]]]:
    """Sessions or files of several tables, each once, and the positions of each table's in them."""
    first = next((each for each in names if each), ())
    if all(each is first or not each for each in names):
        return first, [np.arange(len(each)) for each in names]
    found: dict[T, int] = {}
    places = [
        np.array([found.setdefault(name, len(found)) for name in each], np.int64) for each in names
    ]
    return tuple(found), places


def _used[T: (str, VirtualSource)](
    of: RefKind,
    kind: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    names: tuple[T, ...],
) -> tuple[npt.NDArray[np.int64], tuple[T, ...]]:
    """The rows' sources and the sessions or files, without those that no row of the kind uses."""
    if not names:
        return source, names
    rows = slice(None) if _constant(kind) == of else kind == of
    used = np.zeros(len(names), np.bool_)
    used[source[rows]] = True
    if used.all():
        return source, names
    if used.any():
        moved = source.copy()
        moved[rows] = (np.cumsum(used) - 1)[source[rows]]
        source = moved
    return source, tuple([names[i] for i in np.flatnonzero(used).tolist()])
