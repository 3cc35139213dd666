"""The map of an array's chunks: which exist, how large they are, and when they last changed.

The chunks are taken slab by slab along the longest axis, and of the history only the cells of the
map are remembered, so memory depends on the size of the map and on the largest commit. Commits are
looked at from the newest on, until all cells with chunks have a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.edit.bulk_chunks import find_chunks
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.history.ancestry import ancestors
from zarr_manifests.engine.history.differences import delta_of, tables_of
from zarr_manifests.engine.root.roots import is_missing
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.totals import amounts_of
from zarr_manifests.errors import CorruptObjectError, MissingChunkError
from zarr_manifests.format.delta import CommitKind
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.picturing import ChunkMap, Folding
from zarr_manifests.planning.tables.sums import NOTHING

_SLAB_CHUNKS: Final = 1 << 18
_MOST_COMMITS: Final = 1000
_FIRST_COMMITS: Final = 8
_AT_ONCE: Final = 64


def chunk_map(contents: SessionView, path: str, side: int = 96) -> ChunkMap:
    """The map of an array's chunks, of at most `side` x `side` cells (see `Folding`).

    Uncommitted changes are included; they count as made now. At most 1,000 commits are looked at.

    Raises
    ------
    NotFoundError
        If there is no such array.
    """
    node = contents.array_at(path)
    meta = node.array
    assert meta is not None
    folding = Folding.of(meta.grid.shape, side)
    chunks, nbytes = np.zeros(folding.shape, np.int64), np.zeros(folding.shape, np.int64)
    for box in _slabs(contents, node, meta.grid):
        _, table = find_chunks(contents, node.path, box, None)
        if table is not None:
            coords = table.coords()
            chunks += folding.place(coords)
            nbytes += folding.place(coords, table.length)
    changed, since_ms = _changed(contents, node, folding, chunks > 0)
    names = meta.dimension_names or (None,) * len(meta.shape)
    return ChunkMap(f"/{node.path}", tuple(names), folding, chunks, nbytes, changed, since_ms)


def _slabs(contents: SessionView, node: Node, grid: Box) -> Iterator[Box]:
    """Boxes that cover the grid, each with a bounded number of chunks if they are spread evenly."""
    if not grid.ndim or not grid.size:
        yield grid
        return
    count = amounts_of(contents.view).get(node.node_id, NOTHING).chunks
    length, axis = max((n, axis) for axis, n in enumerate(grid.hi))
    step = max(1, length // (1 + count // _SLAB_CHUNKS))
    for first in range(0, length, step):
        lo, hi = [*grid.lo], [*grid.hi]
        lo[axis], hi[axis] = first, min(first + step, length)
        yield Box(tuple(lo), tuple(hi))


def _changed(
    contents: SessionView, node: Node, folding: Folding, there: npt.NDArray[np.bool_]
) -> tuple[IndexArray, int]:
    """When each cell with chunks last changed, 0 if before the oldest commit that was looked at.

    Also the time of that commit.
    """
    changed = np.zeros(folding.shape, np.int64)
    context = contents.context
    with contents.lock:
        uncommitted, view = contents.changes.table(node.node_id), contents.view
    if uncommitted is not None:
        changed[folding.place(uncommitted.coords()) > 0] = context.runtime.now_ms()
    since_ms = view.snapshot.written_ms
    for snapshots in _batches(context, view.ref):
        if not (there & (changed == 0)).any():
            break
        data = [one for one in snapshots if one.kind is not CommitKind.REWRITE]
        deltas = context.runtime.parallel([partial(delta_of, context, one) for one in data])
        for snapshot, delta in zip(data, deltas, strict=True):
            for table in tables_of(context, delta, {node.node_id}).get(node.node_id, ()):
                changed[(folding.place(table.coords()) > 0) & (changed == 0)] = snapshot.written_ms
        since_ms = snapshots[-1].written_ms
    return changed, since_ms


def _batches(context: ReadContext, head: BlobRef) -> Iterator[list[Snapshot]]:
    """The snapshot and those before it, a few at first, as far as they are there."""
    walk = islice((snapshot for _, snapshot in ancestors(context, head)), _MOST_COMMITS)
    size = _FIRST_COMMITS
    while True:
        batch: list[Snapshot] = []
        try:
            batch.extend(islice(walk, size))
        except (CorruptObjectError, MissingChunkError) as error:
            if not is_missing(error):
                raise
            walk = islice(walk, 0)  # older ones have expired
        if not batch:
            return
        yield batch
        size = min(2 * size, _AT_ONCE)
