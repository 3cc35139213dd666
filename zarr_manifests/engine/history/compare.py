"""The differences between a snapshot and a later one: nodes, chunks, moves and truncations."""

from __future__ import annotations

from collections.abc import Sequence

from zarr_manifests.engine.history.changes_between import if_expired
from zarr_manifests.engine.history.commit_logs import deltas_between, distinct, touched_chunks
from zarr_manifests.engine.history.merge_base import merge_base
from zarr_manifests.engine.history.net_changes import net_changes
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.root import Branch
from zarr_manifests.grid import Coords
from zarr_manifests.keys import absolute
from zarr_manifests.planning.conflict.documents import changed_nodes
from zarr_manifests.planning.tables.merge import narrower
from zarr_manifests.reports import Diff


def compare(context: ReadContext, start: Branch, end: Branch, *, symmetric: bool = True) -> Diff:
    """What changed from the snapshot `start` to the snapshot `end`.

    If `start` is no ancestor of `end`: what `end` has changed since both were last the same; or,
    if not `symmetric`, all that differs between them.

    Raises
    ------
    InvalidArgumentError
        If `end` has changed nothing since, because it is an ancestor of `start`.
    ConflictError
        If the lines were merged crosswise, so that there is no one snapshot to start from.
    HistoryExpiredError
        If snapshots between them have expired.
    """
    before, after = context.open_branch(start), context.open_branch(end)
    deltas = _logged(context, before, after)
    if deltas is None:
        root = context.roots.read().root
        if symmetric:
            base = merge_base(context, root, before.ref, after.ref).at
            if base.key == after.ref.key:
                raise InvalidArgumentError(
                    f"{before.snapshot_id} is not an ancestor of {after.snapshot_id}, but comes "
                    "after it; give the older snapshot first, or symmetric=False"
                )
            before = context.open_view(base)
            deltas = _logged(context, before, after)
        if deltas is None:
            deltas = [net_changes(context, root, before, after)]
    return _difference(context, before, after, deltas)


def _logged(
    context: ReadContext, before: SnapshotView, after: SnapshotView
) -> Sequence[Delta] | None:
    """The deltas of the commits between; None if the first is no ancestor of the second."""
    with if_expired(context, before.snapshot_id, after.ref):
        return deltas_between(context, before, after.ref)


def _difference(
    context: ReadContext, before: SnapshotView, after: SnapshotView, deltas: Sequence[Delta]
) -> Diff:
    """The changes in these deltas, which are all those after `before` up to `after`."""
    changed = changed_nodes(before.nodes, after.nodes)
    paths = {node.node_id: absolute(path) for path, node in after.nodes.items()}
    touched = touched_chunks(context, deltas, paths)
    chunks = {paths[node_id]: distinct(coords) for node_id, coords in touched.items()}
    cuts: dict[bytes, Coords] = {}
    for node_id, shape in ((i, shape) for delta in deltas for i, shape in delta.truncated.items()):
        if node_id in paths and node_id in before.by_id:
            cuts[node_id] = narrower(cuts.get(node_id), shape) or shape
    arrays = {
        absolute(path): node.array
        for path, node in after.nodes.items()
        if node.array is not None and absolute(path) in chunks
    }
    return Diff(
        changed.created,
        changed.updated,
        changed.deleted,
        dict(sorted(chunks.items())),
        changed.moved,
        {paths[node_id]: shape for node_id, shape in cuts.items()},
        {path: array.grid.shape for path, array in arrays.items()},
        {p: tuple(a.dimension_names) for p, a in arrays.items() if a.dimension_names},
        changed.fields,
    )
