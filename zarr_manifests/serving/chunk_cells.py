"""The grid of an array's chunks as cells of a table, each with what there is to say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.picturing.chunk_map import ChunkMap
from zarr_manifests.texts import bytes_text, count_text

__all__ = ["ChunkCell", "ChunkCells", "cell_table", "chunk_json", "side_for"]

_SIDE: Final = 48
_LINE: Final = 60
_LONG_SIDE: Final = 384  # four times as many cells in a row, which fill 26 lines
_FEW: Final = 24
_MANY: Final = 64


@dataclass(frozen=True, slots=True)
class ChunkCell:
    """One cell of the table.

    Parameters
    ----------
    name : str
        The classes of its style.
    text : str
        What there is to say of its chunks.
    first : tuple of (int or None)
        The position of the first of its chunks along the axes of the table; None along others.
    """

    name: str
    text: str
    first: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ChunkCells:
    """The chunks of an array as a table.

    Parameters
    ----------
    lines : sequence of (sequence of ChunkCell)
        The cells.
    name : str
        The classes of its style.
    text : str
        Which chunks its rows and columns are.
    has_parts : bool
        Whether any cell holds some of its chunks, but not all.
    """

    lines: Sequence[Sequence[ChunkCell]]
    name: str
    text: str
    has_parts: bool


def side_for(grid_shape: Sequence[int]) -> int:
    """How finely to fold a grid: one that is long in one direction only gets many lines."""
    return _LONG_SIDE if sum(n > 1 for n in grid_shape) <= 1 else _SIDE


def cell_table(found: ChunkMap, changed: IndexArray | None, chunk_shape: Coords) -> ChunkCells:
    """The cells of a map of chunks.

    Parameters
    ----------
    found : ChunkMap
        What exists.
    changed : int64[n, ndim], optional
        Coordinates of chunks that were written or removed; None if that is not known.
    chunk_shape : tuple of int
        In elements.
    """
    folding = found.folding
    counts = None if changed is None else folding.place(changed)
    rows = [
        [_cell(found, counts, chunk_shape, row, column) for column in range(folding.shape[1])]
        for row in range(folding.shape[0])
    ]
    names = [_name(found, axis) for axis in folding.axes]
    if folding.shape[0] > 1:
        text = f"rows are {names[0]}, columns are {names[1]}"
    elif folding.shape[1] > 1:
        text = f"chunks along {names[1]}"
    else:
        text = "one chunk"
    if folding.shape[0] == 1 and folding.shape[1] > _LINE:
        rows = [rows[0][at : at + _LINE] for at in range(0, len(rows[0]), _LINE)]
        text += ", line by line"
    if folding.is_folded:
        text += f"; each cell stands for up to {count_text(int(folding.whole.max()), 'chunk')}"
    widest = max(map(len, rows), default=0)
    size = " few" if widest <= _FEW and len(rows) <= _FEW else " many" if widest > _MANY else ""
    parts = bool(((found.chunks > 0) & (found.chunks < folding.whole)).any())
    return ChunkCells(rows, f"chunks{size}", text, parts)


def _cell(
    found: ChunkMap, counts: IndexArray | None, chunk_shape: Coords, row: int, column: int
) -> ChunkCell:
    folding, at = found.folding, (row, column)
    there, whole = int(found.chunks[at]), int(folding.whole[at])
    new = 0 if counts is None else int(counts[at])
    shade = "" if not there else f"stored-{4 if there == whole else 1 + 3 * there // whole}"
    name = ("changed" if there else "gone") if new else shade
    edges = (folding.row_edges, row), (folding.column_edges, column)
    spans = [(int(each[n]), int(each[n + 1]) - 1) for each, n in edges]
    where = [
        f"{_name(found, axis)} {lo}" + (f" to {hi}" if hi > lo else "")
        for axis, (lo, hi) in zip(folding.axes, spans, strict=True)
        if axis is not None and folding.grid_shape[axis] > 1
    ]
    if whole == 1:
        told = f"there, {bytes_text(int(found.nbytes[at]))}" if there else "not there"
        told += "; changed" if new else ""
    else:
        told = f"{there:,} of {whole:,} there, {bytes_text(int(found.nbytes[at]))}"
        told += f"; {new:,} changed" if new else ""
    if found.changed_ms[at]:
        moment = np.datetime64(int(found.changed_ms[at]), "ms").astype("datetime64[m]")
        told += f"; written {str(moment).replace('T', ' ')} UTC"
    first: list[int | None] = [None] * len(folding.grid_shape)
    for axis, (lo, _) in zip(folding.axes, spans, strict=True):
        if axis is not None:
            first[axis] = lo * chunk_shape[axis]
    return ChunkCell(
        name, f"{'chunk ' + ', '.join(where) if where else 'the chunk'}: {told}", tuple(first)
    )


def _name(found: ChunkMap, axis: int | None) -> str:
    if axis is None:
        return ""
    return found.dimensions[axis] or f"axis {axis}"


def chunk_json(found: ChunkMap, changed: IndexArray | None) -> dict[str, object]:
    """The same as values for JSON."""
    folding = found.folding
    return {
        "path": found.path,
        "dimensions": list(found.dimensions),
        "grid_shape": list(folding.grid_shape),
        "axes": list(folding.axes),
        "row_edges": folding.row_edges.tolist(),
        "column_edges": folding.column_edges.tolist(),
        "whole": folding.whole.tolist(),
        "chunks": found.chunks.tolist(),
        "nbytes": found.nbytes.tolist(),
        "changed": None if changed is None else folding.place(changed).tolist(),
    }
