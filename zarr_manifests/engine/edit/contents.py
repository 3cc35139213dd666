"""What a session holds: its uncommitted changes, and the size of each array."""

from __future__ import annotations

from functools import partial
from itertools import batched, chain
from typing import TYPE_CHECKING, Final

import numpy as np

from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.snapshot.totals import grid_of, totals_of
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.grid import IndexArray
from zarr_manifests.keys import absolute
from zarr_manifests.planning.conflict.components import changed_nodes
from zarr_manifests.planning.tables.sums import NOTHING, Amount, sum_of
from zarr_manifests.progress import counted

if TYPE_CHECKING:
    from zarr_manifests.reports import Status, Usage

_AT_ONCE: Final = 256
_NAMED: Final = 3
_CHUNKS: Final = 100
"""So many chunks of an array are named."""


def status_of(contents: SessionView) -> Status:
    """The uncommitted changes; no chunk is read."""
    from zarr_manifests.reports import Status  # rarely needed, and many classes

    with contents.lock:
        view, changes = contents.view, contents.changes.copy()
    nodes = contents.nodes()
    changed = changed_nodes(view.nodes, nodes)
    paths = {node.node_id: absolute(node.path) for node in nodes.values()}
    touched = sorted((paths[node], node) for node in changes.touched() if node in paths)
    counts = {path: count for path, node in touched if (count := changes.count(node))}
    named = {path: _first_chunks(changes, node) for path, node in touched if path in counts}
    return Status(
        changed.created,
        changed.updated,
        changed.deleted,
        counts,
        changed.moved,
        {
            paths[node]: shape
            for node, shape in changes.truncated.items()
            if node in paths and view.by_id.get(node) is not None
        },
        {path: tuple(map(tuple, coords.tolist())) for path, coords in named.items()},
        changed.fields,
    )


def _first_chunks(changes: ChangeSet, node_id: bytes) -> IndexArray:
    """Coordinates of the first changed chunks of a node, in C order."""
    layers = sorted(changes.layers(node_id), key=lambda rows: rows.box.lo)
    found = np.zeros((0, layers[0].box.ndim), np.int64)
    for rows in layers:
        if len(found) == _CHUNKS and tuple(found[-1].tolist()) < tuple(rows.box.lo):
            break  # spilled rows that cannot be among the first are not fetched
        both = np.concatenate([found, changes.rows(rows).coords()[:_CHUNKS]])
        found = np.unique(both, axis=0)[:_CHUNKS] if both.shape[1] else both[:1]
    return found


def summary(contents: SessionView) -> str:
    """What the uncommitted changes are about, in one line: the message of a commit without one."""
    with contents.lock:
        changes = contents.changes
        paths = {node.node_id: path for path, node in contents.nodes().items()}
        written = {paths[node_id] for node_id in changes.touched() if node_id in paths}
        found = sorted(map(absolute, changes.nodes.keys() | written))
    if not found:
        return "no changes"
    more = len(found) - _NAMED
    return f"change {', '.join(found[:_NAMED])}" + (f" and {more:,} more" if more > 0 else "")


def usage_of(contents: SessionView) -> Usage:
    """Exact chunks and bytes of every array and opaque entry, and by where they are; by path.

    No chunk is read. `progress` is told of how many of these.
    """
    from zarr_manifests.reports import Usage  # rarely needed, and many classes

    nodes = [node for node in contents.nodes().values() if node.kind is not NodeKind.GROUP]
    calls = (partial(contents.chunks, node) for node in nodes)
    tables = chain.from_iterable(map(contents.context.runtime.parallel, batched(calls, _AT_ONCE)))
    told = counted("reading refs of arrays", tables, len(nodes))
    known = totals_of(contents.view)
    growth = {array.path: array.growth for array in known.arrays}
    arrays = []
    for node, table in zip(nodes, told, strict=True):
        path = absolute(node.path)
        kinds = RefKind.INLINE, RefKind.NATIVE, RefKind.VIRTUAL
        inline, native, virtual = (_amount(table, kind) for kind in kinds)
        whole = sum_of((inline, native, virtual))
        grown = growth.get(path, NOTHING)
        arrays.append(Usage(path, whole, grown, grid_of(node), inline, native, virtual))
    arrays.sort(key=lambda array: array.path)
    total = sum_of(array.total for array in arrays)
    at = known.snapshot_id
    return Usage("", total, known.growth, arrays=tuple(arrays), snapshot_id=at)


def _amount(table: ChunkTable | None, kind: RefKind) -> Amount:
    if table is None:
        return NOTHING
    rows = table.kind == kind
    return Amount(int(rows.sum()), int(table.length[rows].sum()))
