"""Which chunks exist, decided for many coordinates at once, without I/O."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.planning.tables.live_deltas import check_axes
from zarr_manifests.planning.tables.merge import rows_at, select


def within(box: Box, coords: IndexArray) -> npt.NDArray[np.bool_]:
    """Which coordinates (int64[n, ndim]) lie in the box.

    Raises
    ------
    CorruptObjectError
        If they have another number of axes than the box.
    """
    check_axes(box, coords.shape[1])
    return np.asarray(((coords >= box.lo) & (coords < box.hi)).all(axis=1))


def kinds_at(table: ChunkTable, coords: IndexArray) -> npt.NDArray[np.int64]:
    """The kind of the table's row for each coordinate; -1 where it has none."""
    check_axes(table.box, coords.shape[1])
    rows = rows_at(table, coords)
    return np.where(rows >= 0, table.kind[rows], -1) if len(table) else rows


def rows_in(
    table: ChunkTable | None, boxes: Iterable[Box], *, outside: bool = False
) -> ChunkTable | None:
    """The table's rows in any of the boxes, or, with `outside`, in none of them."""
    if table is None:
        return None
    coords = table.coords()
    inner = np.zeros(len(coords), np.bool_)
    for box in boxes:
        inner |= within(box, coords)
    return select(table, ~inner if outside else inner)
