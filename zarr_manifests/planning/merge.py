"""Merging chunk tables: newest wins, vectorised, no I/O.

The rule: of all rows for a coordinate the one from the newest layer counts; an UNSET row hides
older rows; a truncation drops every older row that lies at or beyond it on any axis. UNSET rows
are kept while something older may still hold the coordinate, and dropped when the merge reaches
the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.grid import Box, Coords, IndexArray

__all__ = [
    "Layer",
    "Overlay",
    "fold",
    "inside",
    "merge_layers",
    "narrower",
    "select",
    "split",
]


@dataclass(frozen=True, slots=True)
class Layer:
    """What one delta says about one node: a truncation of all that is older, then its tables."""

    truncated: Coords | None
    tables: tuple[ChunkTable, ...]


@dataclass(frozen=True, slots=True)
class Overlay:
    """All deltas' words about one node: what is cut off the base, then the rows on top of it."""

    truncated: Coords | None
    table: ChunkTable | None


def narrower(a: Coords | None, b: Coords | None) -> Coords | None:
    """What two truncations cut off together."""
    if a is None or b is None:
        return b if a is None else a
    return tuple(map(min, a, b))


def inside(coords: IndexArray, shape: Coords) -> npt.NDArray[np.bool_]:
    """Which coordinates (int64[n, ndim]) lie below `shape` on every axis.

    Raises
    ------
    CorruptObjectError
        If they have not as many axes: a truncation and a table contradict each other.
    """
    if coords.shape[1] != len(shape):
        raise CorruptObjectError(f"chunks of {coords.shape[1]} axes are cut off at {shape}")
    return np.asarray((coords < np.asarray(shape, np.int64)).all(axis=1))


def select(table: ChunkTable, keep: npt.NDArray[np.bool_]) -> ChunkTable:
    """The table's rows where `keep` (bool[n]) holds."""
    return _gather([table], table.box, table.linear_index()[keep], np.flatnonzero(keep))


def split(table: ChunkTable, most_rows: int) -> list[ChunkTable]:
    """The table as tables of at most that many rows, in boxes that do not overlap.

    It is cut along the first axis, and along the next where one step of it has too many rows, so
    that what is appended along the first axis belongs to the last of them.
    """
    done: list[ChunkTable] = []
    due = [table]
    while due:
        rest = due.pop()
        if len(rest) <= most_rows:
            done.append(rest)
            continue
        coords = rest.coords()
        # Rows are in C order: they ascend on the first axis on which the first and last differ.
        # (The box may be wider than they are, and cutting it there would leave them together.)
        axis = int(np.flatnonzero(coords[0] != coords[-1])[0])
        at = int(coords[most_rows, axis])
        if at == int(coords[0, axis]):
            at += 1
        rows = int(np.searchsorted(coords[:, axis], at))
        lo, hi = rest.box.lo, rest.box.hi
        below = Box(lo, (*hi[:axis], at, *hi[axis + 1 :]))
        above = Box((*lo[:axis], at, *lo[axis + 1 :]), hi)
        due += [
            _gather([rest], box, box.ravel(coords[which]), np.arange(len(rest))[which])
            for box, which in ((above, slice(rows, None)), (below, slice(rows)))
        ]
    return done


def merge_layers(layers: Sequence[Layer]) -> Overlay:
    """Bring the layers of one node (oldest first) together."""
    cut: Coords | None = None
    tables: list[ChunkTable] = []
    for layer in layers:
        if layer.truncated is not None:
            cut = narrower(cut, layer.truncated)
            tables = [select(t, inside(t.coords(), layer.truncated)) for t in tables]
        tables.extend(layer.tables)
    tables = [table for table in tables if len(table)]
    return Overlay(cut, _newest(tables) if tables else None)


def fold(leaves: Sequence[ChunkTable], overlay: Overlay) -> ChunkTable | None:
    """The leaves with the overlay merged in, free of UNSET rows; None if nothing is left."""
    tables = list(leaves)
    if overlay.truncated is not None:
        tables = [select(t, inside(t.coords(), overlay.truncated)) for t in tables]
    if overlay.table is not None:
        tables.append(overlay.table)
    tables = [table for table in tables if len(table)]
    if not tables:
        return None
    merged = _newest(tables)
    if (merged.kind == RefKind.UNSET).any():
        merged = select(merged, merged.kind != RefKind.UNSET)
    return merged if len(merged) else None


def _newest(tables: Sequence[ChunkTable]) -> ChunkTable:
    """Of every coordinate the row from the last table that has one."""
    if len(tables) == 1:
        return tables[0]
    box = Box.around(table.box for table in tables)
    linear = np.concatenate(
        [
            table.linear_index() if table.box == box else box.ravel(table.coords())
            for table in tables
        ]
    )
    order = np.argsort(linear, kind="stable")
    ordered = linear[order]
    last = np.append(ordered[1:] != ordered[:-1], True)
    return _gather(tables, box, ordered[last], order[last])


def _gather(
    tables: Sequence[ChunkTable],
    box: Box,
    index: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
) -> ChunkTable:
    """A table of the given rows, counted through all `tables`, at the given linear indexes."""
    sources: dict[str, int] = {}
    shifts, base = [], 0
    for table in tables:
        mapping = [sources.setdefault(source, len(sources)) for source in table.sources]
        shifts.append((np.array(mapping, np.int64), base))
        base += len(table.inline)

    def column(name: str) -> npt.NDArray[np.int64]:
        return np.concatenate([getattr(table, name) for table in tables])[rows]

    kind, length, offset = column("kind"), column("length"), column("offset").copy()
    # Unset and inline rows have no source; position 0 stands for "none" there.
    source = np.concatenate(
        [
            mapping[table.source] * (table.kind == RefKind.NATIVE)
            if len(mapping)
            else np.zeros(len(table), np.int64)
            for table, (mapping, _) in zip(tables, shifts, strict=True)
        ]
    )[rows]
    is_inline = kind == RefKind.INLINE
    inline = b""
    if is_inline.any():
        bases = np.repeat([b for _, b in shifts], [len(table) for table in tables])[rows]
        blob = b"".join(table.inline for table in tables)
        starts = (offset + bases)[is_inline].tolist()
        lengths = length[is_inline].tolist()
        inline = b"".join(blob[s : s + n] for s, n in zip(starts, lengths, strict=True))
        ends = np.cumsum(length[is_inline])
        offset[is_inline] = ends - length[is_inline]
    dense = len(index) == box.size
    return ChunkTable(
        box,
        None if dense else index,
        kind,
        source,
        column("number"),
        offset,
        length,
        column("crc32c"),
        tuple(sources),
        inline,
    )
