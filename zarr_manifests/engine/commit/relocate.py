"""Appends that are put behind those of others, chunk by chunk.

What a session has changed is taken apart: all but the appends is rebased as ever, and the appends
are laid on top at their new places. Chunks that begin at a boundary of the others' append are given
other coordinates and never touched. Invariant: what is returned says of every other chunk and
document what a rebase would say.
"""

from __future__ import annotations

import numpy as np

from zarr_manifests.engine.commit.rebase import Rebasing, changes_between, rebase_changes
from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.objects.spill import Rows, Spilled
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import ConflictError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.root import Branch
from zarr_manifests.planning.conflict.components import Changes
from zarr_manifests.planning.conflict.documents import DocumentChange, compare_documents, with_shape
from zarr_manifests.planning.conflict.relocation import Relocation, plan_relocation
from zarr_manifests.planning.tables.merge import rearranged, select

__all__ = ["relocate_changes"]


def relocate_changes(
    context: Context,
    view: SnapshotView,
    tip: Branch,
    changes: ChangeSet,
    dim: str,
    rebasing: Rebasing,
) -> tuple[SnapshotView, ChangeSet, list[Relocation]] | None:
    """The tip, opened; the changes as they are there; and whose values must be written anew.

    None if no array was made longer along the dimension by both sides. The changes hold no staged
    chunks.

    Raises
    ------
    ConflictError
        If the appends cannot be relocated, or the rest cannot be rebased.
    """
    mine = Changes.of(view.nodes, changes.nodes, changes.truncated, _tables(changes))
    theirs = changes_between(context, view, tip)
    moves, conflicts = plan_relocation(dim, view.nodes, mine, theirs)
    if conflicts:
        raise ConflictError(
            f"other commits have appended along {dim!r} first, and this append cannot be put "
            "behind theirs; nothing was committed. Open a new session on the branch and append "
            "again",
            conflicts,
        )
    if not moves:
        return None
    rest, appended = changes.copy(), {}
    for move in moves:
        appended[move.node_id] = _take_append(rest, move, view)
    on, result = rebase_changes(context, view, tip, rest, rebasing)
    for move in moves:
        node = result.nodes.get(move.path) or on.nodes[move.path]
        result.nodes[move.path] = _longer(node, move)
        if move.steps is not None:
            for rows in appended[move.node_id]:
                _put_shifted(result, move, result.rows(rows))
    return on, result, [move for move in moves if move.steps is None]


def _tables(changes: ChangeSet) -> dict[bytes, ChunkTable]:
    return {node: table for node in changes.touched() if (table := changes.table(node)) is not None}


def _take_append(rest: ChangeSet, move: Relocation, view: SnapshotView) -> list[Rows]:
    """Take the append out of the changes; its chunks."""
    before, node = view.nodes[move.path], rest.nodes.pop(move.path, None)
    if node is not None and before.array is not None:
        other = with_shape(node, before.array.shape)
        if compare_documents(before, other) != DocumentChange():
            rest.nodes[move.path] = other  # attributes
    appended: list[Rows] = []
    parts = rest.parts(move.node_id)
    rest.chunks.pop(move.node_id, None)
    rest.tables.pop(move.node_id, None)
    for rows in parts:
        if isinstance(rows, Spilled) and not rows.unset and rows.box.lo[move.axis] >= move.first:
            appended.append(rows)
            continue
        table = rest.rows(rows)
        beyond = table.coords()[:, move.axis] >= move.first
        for keep, taken in ((beyond & (table.kind != RefKind.UNSET), True), (~beyond, False)):
            part = select(table, keep)
            if len(part) and taken:
                appended.append(part)
            elif len(part):
                rest.put_table(move.node_id, part)
    return appended


def _longer(node: Node, move: Relocation) -> Node:
    assert node.array is not None
    shape = list(node.array.shape)
    shape[move.axis] = move.length
    return with_shape(node, tuple(shape))


def _put_shifted(result: ChangeSet, move: Relocation, table: ChunkTable) -> None:
    coords = table.coords().copy()
    coords[:, move.axis] += move.steps or 0
    shifted = rearranged(table, np.ones(len(table), np.bool_), coords)
    if shifted is not None:
        result.put_table(move.node_id, shifted)
