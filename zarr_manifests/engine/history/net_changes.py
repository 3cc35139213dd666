"""What differs between any two snapshots of a repository, as one delta.

The logs of both lines since they part say which places may differ, and only these are compared. So
the cost follows from what was changed, not from the size of the arrays. Invariant: a place is in
the delta if and only if it differs.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.history.commit_logs import delta_of, distinct, touched_chunks
from zarr_manifests.engine.history.merge_base import parted
from zarr_manifests.engine.objects.chunks import ChunkReader
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.chunk_table import ChunkTable, Unset, VirtualRef
from zarr_manifests.format.delta import COMMIT_ID_BYTES, CommitKind, Delta
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.root import Root
from zarr_manifests.grid import IndexArray
from zarr_manifests.planning.tables.merge import agree, inside, pick, unset_at
from zarr_manifests.progress import counted

_NOBODY: Final = bytes(COMMIT_ID_BYTES)


def net_changes(
    context: ReadContext,
    root: Root,
    old: SnapshotView,
    new: SnapshotView,
) -> Delta:
    """What makes the one snapshot into the other; it is no commit's.

    `progress` is told how many commits since they part were read.

    Raises
    ------
    HistoryExpiredError
        If what both have in common has expired.
    """
    nodes = {
        path: new.nodes.get(path)
        for path in old.nodes.keys() | new.nodes.keys()
        if old.nodes.get(path) != new.nodes.get(path)
    }
    was, now = old.by_id, new.by_id
    tables: list[tuple[bytes, ChunkTable]] = []
    truncated = {}
    for node_id, coords in _touched(context, root, old, new).items():
        array = now[node_id].array
        if array is not None and not inside(coords, array.grid.hi).all():
            truncated[node_id] = array.grid.hi
            coords = coords[inside(coords, array.grid.hi)]
        if len(coords):
            before, after = (chunks_at(view, node_id, coords) for view in (old, new))
            coords = coords[~same_chunks(context, new, node_id, before, after, coords)]
            tables += [(node_id, table) for table in rows_for(after, coords)]
    for node_id in sorted(now.keys() - was.keys()):
        table = new.chunks(node_id)
        tables += [] if table is None or not len(table) else [(node_id, table)]
    return Delta(
        _NOBODY,
        tuple(node for node in nodes.values() if node is not None),
        {path: old.nodes[path].node_id for path, node in nodes.items() if node is None},
        truncated,
        Manifest.of(tables),
    )


def _touched(
    context: ReadContext, root: Root, old: SnapshotView, new: SnapshotView
) -> dict[bytes, IndexArray]:
    """The chunks that were changed since the lines part, of nodes that both have, in C order."""
    lines = parted(context, root, old.ref, new.ref)
    both = old.by_id.keys() & new.by_id.keys()
    commits = counted("reading commits", (*lines.left, *lines.right))
    deltas = [delta_of(context, each) for _, each in commits if each.kind is not CommitKind.REWRITE]
    found = touched_chunks(context, deltas, both)
    cut = {node_id for delta in deltas for node_id in delta.truncated.keys() & both}
    for node_id in cut:
        existing = (old.chunks(node_id), new.chunks(node_id))
        found.setdefault(node_id, []).extend(t.coords() for t in existing if t is not None)
    places = {node_id: distinct(coords) for node_id, coords in found.items()}
    return {node_id: coords for node_id, coords in places.items() if len(coords)}


def same_chunks(
    context: ReadContext,
    view: SnapshotView,
    node_id: bytes,
    a: ChunkTable | None,
    b: ChunkTable | None,
    coords: IndexArray,
) -> npt.NDArray[np.bool_]:
    """Like `agree`, for chunks of a node of `view`; reads them where checksums cannot tell.

    Virtual chunks then have to be the same range of the same file.
    """
    same, node = agree(a, b, coords), view.by_id.get(node_id)
    array = None if node is None else node.array
    if a is None or b is None or a is b or array is None or not array.checks_itself:
        return same
    reader = ChunkReader(
        context.storage, view.snapshot_id, context.containers, context.chunks, context.runtime
    )
    for row in np.flatnonzero(same).tolist():
        at = tuple(coords[row].tolist())
        one, other = a.get(at), b.get(at)
        if one is None or other is None or one == other:
            continue
        if isinstance(one, Unset | VirtualRef) or isinstance(other, Unset | VirtualRef):
            same[row] = False
        else:
            data = reader.read(one, 0, one.length)
            same[row] = data == reader.read(other, 0, other.length)
    return same


def chunks_at(view: SnapshotView, node_id: bytes, coords: IndexArray) -> ChunkTable | None:
    """Those of these chunks that exist; none if the snapshot does not have the node.

    (Deltas keep the chunks of deleted nodes, so a view may still find them.)
    """
    return view.chunks_at(node_id, coords) if len(coords) and node_id in view.by_id else None


def differs(
    context: ReadContext, here: SnapshotView, other: SnapshotView, node_id: bytes, at: IndexArray
) -> npt.NDArray[np.bool_]:
    """Which of these chunks differ between the two snapshots, of a node that is in `here`."""
    if here is other:
        return np.zeros(len(at), np.bool_)
    a, b = (chunks_at(view, node_id, at) for view in (here, other))
    return ~same_chunks(context, here, node_id, a, b, at)


def rows_for(table: ChunkTable | None, coords: IndexArray) -> list[ChunkTable]:
    """Rows that make these chunks what they are in the table, and unset those it does not have."""
    gone = coords[agree(None, table, coords)]
    rows = [unset_at(gone)] if len(gone) else []
    there = None if table is None else pick(table, coords)
    return [*rows, there] if there is not None and len(there) else rows
