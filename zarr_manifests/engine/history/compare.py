"""The differences between a snapshot and a later one: nodes, chunks, moves and truncations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zarr_manifests.engine.history.ancestry import is_missing
from zarr_manifests.engine.history.commit_logs import deltas_between, footprint_of
from zarr_manifests.engine.history.merge_base import merge_base
from zarr_manifests.engine.history.net_changes import net_changes
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError, HistoryExpiredError, InvalidArgumentError
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.root import Branch
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.keys import absolute
from zarr_manifests.planning.tables.merge import narrower
from zarr_manifests.planning.tables.moves import changed_nodes
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
    try:
        return deltas_between(context, before, after.ref)
    except CorruptObjectError as error:
        if is_missing(error):
            raise HistoryExpiredError(
                f"snapshots between {before.snapshot_id} and {after.snapshot_id} have expired"
            ) from error
        raise


def _difference(
    context: ReadContext, before: SnapshotView, after: SnapshotView, deltas: Sequence[Delta]
) -> Diff:
    """The changes in these deltas, which are all those after `before` up to `after`."""
    changed = changed_nodes(before.nodes, after.nodes)
    chunks = _changed_chunks(context, after, deltas)
    arrays = {
        absolute(path): node.array
        for path, node in after.nodes.items()
        if node.array is not None and absolute(path) in chunks
    }
    return Diff(
        changed.created,
        changed.updated,
        changed.deleted,
        chunks,
        changed.moved,
        _truncated(before, after, deltas),
        {path: array.grid.shape for path, array in arrays.items()},
        {p: tuple(a.dimension_names) for p, a in arrays.items() if a.dimension_names},
        changed.fields,
    )


def _truncated(
    before: SnapshotView, after: SnapshotView, deltas: Sequence[Delta]
) -> dict[str, Coords]:
    """By path, the grid shape that an existing array was truncated to."""
    cuts: dict[bytes, Coords | None] = {}
    for delta in deltas:
        for node_id, shape in delta.truncated.items():
            cuts[node_id] = narrower(cuts.get(node_id), shape)
    there = ((before.by_id.get(i), after.by_id.get(i), shape) for i, shape in cuts.items())
    return {
        absolute(new.path): shape
        for old, new, shape in there
        if old is not None and new is not None and shape is not None
    }


def _changed_chunks(
    context: ReadContext, after: SnapshotView, deltas: Sequence[Delta]
) -> dict[str, IndexArray]:
    paths = {node.node_id: path for path, node in after.nodes.items()}
    found: dict[str, list[IndexArray]] = {}
    for delta in deltas:
        for node_id, tables in footprint_of(context, after, delta).tables.items():
            if node_id in paths:
                coords = [table.coords() for table in tables]
                found.setdefault(paths[node_id], []).extend(coords)
    return {
        absolute(path): np.unique(np.concatenate(coords), axis=0)
        for path, coords in sorted(found.items())
    }
