"""What is known of the values in an array's chunks, without reading them.

The entries of zone maps are matched with the chunks that the session has now, by their addresses.
Invariant: a row describes exactly the chunk at its coordinate, with the meaning that the array
gives to stored values today. Chunks without such an entry have no row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.edit.bulk_chunks import find_chunks
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.snapshot.zones import read_pages, zones_of
from zarr_manifests.format.zone_maps import Bounds, ZoneTable
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.planning.tables.merge import rows_at
from zarr_manifests.planning.tables.regions import Bounds as AxisBounds
from zarr_manifests.planning.zones.entries import valid
from zarr_manifests.planning.zones.meaning import Meaning


@dataclass(frozen=True, slots=True, eq=False)
class ChunkStatistics:
    """Bounds and counts of the values in chunks: one row per chunk that has them, in C order.

    Parameters
    ----------
    path : str
        Path of the array.
    coords : int64[n, ndim]
        Chunk coordinates.
    low, high : array[n]
        Bounds of the stored values that are neither missing nor NaN: no such value is outside them,
        and they may be a little wider. Texts are UTF-8 bytes.
    bounded : bool[n]
        Whether there is such a value; if not, `low` and `high` mean nothing.
    missing, nan, cells : int64[n]
        Number of missing values, of NaN, and of all cells, inside the array's shape when they were
        counted.
    """

    path: str
    coords: IndexArray
    low: npt.NDArray[Any]
    high: npt.NDArray[Any]
    bounded: npt.NDArray[np.bool_]
    missing: IndexArray
    nan: IndexArray
    cells: IndexArray

    def __len__(self) -> int:
        return len(self.coords)


def chunk_statistics(
    contents: SessionView,
    path: str,
    box: Sequence[AxisBounds] | Box | None,
    cells: Sequence[AxisBounds] | None,
    branch: str | None,
) -> ChunkStatistics:
    """The statistics of the chunks in a box, as `Session.chunk_refs` documents them."""
    node, table = find_chunks(contents, path, box, cells)
    meaning = Meaning.of(node.documents)
    assert node.array is not None
    bounds: list[Bounds] = []
    rows: list[npt.NDArray[np.int64]] = []
    if table is not None and meaning.measurable:
        known = np.zeros(len(table), np.bool_)
        for zones in _zones(contents, node.node_id, meaning.digest, table.box, branch):
            kind = zones.bounds.low.dtype
            if kind != meaning.dtype and not (kind.kind == "S" and meaning.dtype.kind in "SU"):
                continue
            counts = np.flatnonzero(valid(zones, table))
            at = rows_at(table, zones.coords()[counts])
            new = ~known[at]
            known[at] = True
            if new.any():
                rows.append(at[new])
                bounds.append(zones.bounds.take(counts[new]))
    if table is None or not rows:
        kind = np.dtype("S1") if meaning.dtype.kind in "UV" else meaning.dtype
        nothing, none = np.empty(0, kind), np.empty(0, np.int64)
        coords = np.empty((0, len(node.array.shape)), np.int64)
        found = Bounds(nothing, nothing, none == 0, none, none, none)
    else:
        joined = np.concatenate(rows)
        order = joined.argsort()
        coords, found = table.coords()[joined[order]], Bounds.joined(bounds).take(order)
    return ChunkStatistics(
        f"/{node.path}",
        coords,
        found.low,
        found.high,
        found.bounded,
        found.missing,
        found.nan,
        found.cells,
    )


def _zones(
    contents: SessionView, node_id: bytes, meaning: bytes, box: Box, branch: str | None
) -> Iterator[ZoneTable]:
    """The entries with that meaning that can lie in the box: uncommitted, recent and paged ones."""
    known = zones_of(contents.context, contents.view, [node_id], branch)[node_id]
    for zones in (*contents.changes.zones_of(node_id), *known.recent):
        if zones.meaning == meaning:
            yield zones
    pages = known.pages
    if pages is not None and pages.meaning == meaning:
        due = [i for i, page in enumerate(pages.pages) if page.box.overlaps(box)]
        yield from read_pages(contents.context, pages, due).values()
