"""Entries of zone maps, made while chunks are written.

Who has a chunk's values when it is written says what its bounds are; where the chunk lies is looked
up in the session's changes. Staged chunks do not lie anywhere yet: `Packs` keeps their bounds until
they do. Invariant: an entry names the chunk that the session has at that moment. If it is
overwritten later, the entry is left out of the commit.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.edit.packs import StagedRef
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable, StoredRef, Unset
from zarr_manifests.format.columns import Column
from zarr_manifests.format.zone_maps import Bounds
from zarr_manifests.grid import Box, Coords
from zarr_manifests.planning.zones.entries import zones_of_chunks


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
