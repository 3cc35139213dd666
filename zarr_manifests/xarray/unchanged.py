"""Which of a session's chunks are in its snapshot already, byte for byte.

A differing checksum shows most changes; bytes are compared only if the checksums are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zarr_manifests.engine.edit.change_set import same_bytes
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.format.chunk_table import StoredRef, Unset
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords

__all__ = ["changes_nothing", "drop_unchanged"]


def changes_nothing(workspace: Workspace) -> bool:
    """Whether the snapshot has everything that was written already."""
    changes = workspace.contents.changes
    if changes.nodes or changes.truncated:
        return False
    return all(_looks_same(workspace, *each) for each in _written(workspace)) and all(
        _is_same(workspace, *each) for each in _written(workspace)
    )


def drop_unchanged(workspace: Workspace, nodes: Iterable[Node]) -> None:
    """Drop written chunks of these nodes that the snapshot has already, unless set in bulk."""
    own = {node.node_id for node in nodes}
    same = [
        (node_id, coords)
        for node_id, coords, new in workspace.contents.changes.refs()
        if node_id in own
        and _looks_same(workspace, node_id, coords, new)
        and _is_same(workspace, node_id, coords, new)
    ]
    with workspace.lock:
        for node_id, coords in same:
            del workspace.contents.changes.chunks[node_id][coords]


def _written(workspace: Workspace) -> Iterator[tuple[bytes, Coords, StoredRef]]:
    changes = workspace.contents.changes
    yield from changes.refs()
    for node_id, tables in changes.tables.items():
        for rows in tables:
            for coords, ref in changes.rows(rows).refs():
                yield node_id, coords, ref


def _looks_same(workspace: Workspace, node_id: bytes, coords: Coords, new: StoredRef) -> bool:
    old = workspace.contents.view.lookup(node_id, coords)
    return old is not None and not isinstance(new, Unset) and same_bytes(old, new)


def _is_same(workspace: Workspace, node_id: bytes, coords: Coords, new: StoredRef) -> bool:
    old, reader = workspace.contents.view.lookup(node_id, coords), workspace.contents.reader
    if old is None or isinstance(new, Unset):
        return False
    return old == new or reader.read(old, 0, old.length) == reader.read(new, 0, new.length)
