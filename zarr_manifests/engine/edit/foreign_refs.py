"""Refusing chunk refs that a session must not commit, where changes come from elsewhere.

A session's lease and start protect the objects of its own lineage, and history those that its
snapshot reaches. A ref to anything else may lose its object before the commit lands. A manifest
that the session or its copies have spilled is read only if it may have refs to other objects.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zarr_manifests.engine.edit.change_set import ForkState, lies_below
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.objects.metadata import ObjectReader
from zarr_manifests.engine.objects.spill import Rows, Spilled, rows_of
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind, native_keys
from zarr_manifests.format.nodes import Node
from zarr_manifests.ids import lineage_of, session_of
from zarr_manifests.planning.tables.merge import inside, select


def check_refs(workspace: Workspace, fork: ForkState) -> None:
    """Raise if a fork has changed refs to what the workspace's session must not commit.

    Raises
    ------
    InvalidArgumentError
        If an object was written neither by this session nor by its copies, and the snapshot does
        not reach it; or a chunk lies outside its array.
    """
    changes, objects = fork.after, workspace.context.objects
    view, lineage = workspace.contents.view, workspace.keys.lineage_prefix.removeprefix("chunks/")
    made = {node.node_id: node for node in changes.nodes.values() if node is not None}
    for node_id in changes.touched():
        node = made.get(node_id) or view.by_id.get(node_id)
        if node is None:
            raise InvalidArgumentError("changes have chunks of an array that does not exist")
        before = fork.before.layers(node_id)
        for rows in changes.layers(node_id):
            if not any(rows is other for other in before):
                _check_grid(objects, node, rows)
                _check_objects(objects, view, node_id, rows, lineage)


def _check_grid(objects: ObjectReader, node: Node, rows: Rows) -> None:
    if node.array is None or lies_below(rows.box, node.array.grid.hi):
        return
    table = rows_of(objects, rows)
    if rows.box.ndim != node.array.grid.ndim:
        raise InvalidArgumentError(f"/{node.path}: changes have chunks with {rows.box.ndim} axes")
    outside = ~inside(table.coords(), node.array.grid.hi) & (table.kind != RefKind.UNSET)
    if outside.any():
        first = tuple(table.coords()[outside][0].tolist())
        raise InvalidArgumentError(f"/{node.path}: chunk {first} lies outside the array")


def _check_objects(
    objects: ObjectReader, view: SnapshotView, node_id: bytes, rows: Rows, lineage: str
) -> None:
    if isinstance(rows, Spilled) and lineage_of(session_of(rows.key)) != lineage:
        foreign = {rows.key}
    elif isinstance(rows, Spilled) and rows.is_own:
        return
    else:
        foreign = _foreign(rows_of(objects, rows), lineage)
    for reached in _reached(view, node_id) if foreign else ():
        foreign -= reached
        if not foreign:
            break
    if foreign:
        raise InvalidArgumentError(
            f"changes refer to {min(foreign)}, which neither this session nor its copies have "
            "written, and which its snapshot does not reach; it may be deleted at any time"
        )


def _foreign(table: ChunkTable, lineage: str) -> set[str]:
    other = np.array([lineage_of(source) != lineage for source in table.sources], np.bool_)
    if not other.any():
        return set()
    rows = (table.kind == RefKind.NATIVE) & other[table.source * (table.kind == RefKind.NATIVE)]
    return native_keys(select(table, rows)) if rows.any() else set()


def _reached(view: SnapshotView, node_id: bytes) -> Iterator[set[str]]:
    """Keys of the chunk objects that the snapshot reaches, those of the node first."""
    for each in (node_id, *(other for other in view.by_id if other != node_id)):
        table = view.chunks(each) if each in view.by_id else None
        if table is not None:
            yield native_keys(table)
