"""What is known of the values in an array's chunks: recorded when written, found without reading.

Who has a chunk's values when it is written says what its bounds are; where the chunk lies is looked
up in the session's changes. Staged chunks do not lie anywhere yet: `Packs` keeps their bounds until
they do. To find statistics, the entries of zone maps are matched with the chunks that the session
has now, by their addresses. Invariants:

- An entry names the chunk that the session has when it is recorded. If that is overwritten later,
  the entry is left out of the commit.
- A row of statistics describes exactly the chunk at its coordinate, with the meaning that the array
  gives to stored values today. Chunks without such an entry have no row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.edit.bulk_chunks import find_chunks
from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.edit.packs import StagedRef
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.snapshot.zones import read_pages, zones_of
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable, StoredRef, Unset
from zarr_manifests.format.columns import Column
from zarr_manifests.format.zone_maps import Bounds, ZoneTable
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.tables.merge import rows_at
from zarr_manifests.planning.tables.regions import Bounds as AxisBounds
from zarr_manifests.planning.zones.meaning import Meaning, valid, zones_of_chunks


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


def record_zones(
    workspace: Workspace,
    path: str,
    box: Box,
    meaning: bytes,
    bounds: Bounds,
    index: Column | None = None,
) -> None:
    """Record the bounds of chunks that were just written to the array at `path`.

    Parameters
    ----------
    workspace : Workspace
        The session's changes. A copy that reports its chunks one by one records nothing.
    path : str
        Path of the array.
    box : Box
        The chunks, whole ones only.
    meaning : bytes
        Hash of what decides how their bytes become values.
    bounds : Bounds
        One row for each chunk of the box in C order, or for those at `index`.
    index : int64[n], optional
        Linear indexes in the box, ascending.

    Raises
    ------
    InvalidArgumentError
        If there are more or fewer bounds than chunks.
    """
    index = np.arange(box.size, dtype=np.int64) if index is None else index
    if len(index) != len(bounds):
        raise InvalidArgumentError(f"{len(bounds)} bounds for {len(index)} chunks")
    if workspace.reports or not len(index):
        return
    with workspace.lock:
        node_id = workspace.contents.array_at(path).node_id
        changes, packs = workspace.contents.changes, workspace.edits.packs
        single = changes.chunks.get(node_id, {})
        found: dict[Coords, StoredRef] = {}
        rows: list[int] = []
        for row, coords in enumerate(map(tuple, box.unravel(index).tolist())):
            ref = _ref(changes, node_id, single, coords)
            if isinstance(ref, StagedRef):
                packs.note_bounds(ref, meaning, bounds, row)
            elif ref is not None and not isinstance(ref, Unset):
                found[coords] = ref
                rows.append(row)
        if found:
            table = ChunkTable.of(found)
            zones = zones_of_chunks(meaning, table, bounds.take(np.array(rows)))
            if zones is not None:
                changes.add_zones(node_id, zones)


def _ref(
    changes: ChangeSet, node_id: bytes, single: Mapping[Coords, StoredRef], coords: Coords
) -> StoredRef | None:
    """The session's ref of a chunk; None if it has none in memory."""
    ref = single.get(coords)
    if ref is None:
        for rows in reversed(changes.tables.get(node_id, ())):
            if isinstance(rows, ChunkTable) and (ref := rows.get(coords)) is not None:
                break
    return ref
