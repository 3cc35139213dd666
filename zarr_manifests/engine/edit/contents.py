"""What a session holds: its uncommitted changes, and the size of each array."""

from __future__ import annotations

from functools import partial
from typing import Final

from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.keys import absolute
from zarr_manifests.planning.tables.moves import moved_paths
from zarr_manifests.reports import ArrayUsage, Status

__all__ = ["status_of", "summary", "usage_of"]

_NAMED: Final = 3


def status_of(contents: SessionView) -> Status:
    """The uncommitted changes; no chunk is read."""
    with contents.lock:
        before, changes = contents.view.nodes, contents.changes.copy()
    nodes = contents.nodes()
    paths = {node.node_id: node.path for node in nodes.values()}
    opaque = {n.node_id for n in nodes.values() if n.kind is NodeKind.OPAQUE}
    moved = moved_paths(before, nodes)
    old_paths = {new: old for old, new in moved.items()}
    made = [n for n in changes.nodes.values() if n is not None]
    created = [n.path for n in made if n.path not in before and n.path not in old_paths]
    updated = [
        n.path
        for n in made
        if (n.path in before and n.path not in old_paths)
        or (n.path in old_paths and before[old_paths[n.path]].documents != n.documents)
    ]
    gone = [p for p, node in changes.nodes.items() if node is None and p not in moved]
    return Status(
        tuple(sorted(map(absolute, created))),
        tuple(sorted(map(absolute, updated))),
        tuple(sorted(map(absolute, gone))),
        {
            absolute(paths[node]): count
            for node in changes.touched()
            if node in paths and node not in opaque and (count := changes.count(node))
        },
        {absolute(old): absolute(new) for old, new in moved.items()},
        {
            absolute(paths[node]): shape
            for node, shape in changes.truncated.items()
            if node in paths
        },
    )


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


def usage_of(contents: SessionView) -> tuple[ArrayUsage, ...]:
    """Chunks and bytes of every array and opaque entry, by path; no chunk is read."""
    nodes = [node for node in contents.nodes().values() if node.kind is not NodeKind.GROUP]
    calls = [partial(contents.chunks, node) for node in nodes]
    tables = contents.context.runtime.parallel(calls)
    found = map(ArrayUsage.of, (absolute(node.path) for node in nodes), tables)
    return tuple(sorted(found, key=lambda usage: usage.path))
