"""Relocating appends behind those of others.

All changes except the appends are rebased as usual, and the appends are put on top at their new
places. Chunks that start where the others' append ends only get new coordinates. If the boundary is
within a chunk, both sides have values in it, and a `Rewrite` writes the session's values again.
Invariant: every other chunk and document becomes what a rebase makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zarr_manifests.engine.commit.carry_zones import moved
from zarr_manifests.engine.commit.rebase import Rebasing, changes_between, rebase_changes
from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.objects.spill import Rows, Spilled
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import ConflictError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.root import Branch
from zarr_manifests.planning.conflict.components import Changes
from zarr_manifests.planning.conflict.documents import DocumentChange, compare_documents, with_shape
from zarr_manifests.planning.conflict.relocation import Relocation, plan_relocation
from zarr_manifests.planning.tables.merge import rearranged, select

type Rewrite = Callable[[Workspace, SnapshotView, ChangeSet, Sequence[Relocation]], ChangeSet]
"""Rewrites a session's appended values, given its workspace, the tip, the changes on the tip
without these values, and their new place."""


@dataclass(frozen=True, slots=True)
class Relocating:
    """Appends along a dimension are put behind those of others.

    Parameters
    ----------
    dim : str
        The name of the dimension.
    rewrite : Rewrite
        Rewrites values if the boundary of the others' append is within a chunk.
    """

    dim: str
    rewrite: Rewrite


def relocate_changes(
    workspace: Workspace,
    changes: ChangeSet,
    tip: Branch,
    relocating: Relocating | None,
    rebasing: Rebasing,
) -> tuple[SnapshotView, ChangeSet] | None:
    """The opened tip, and the workspace's changes as they are there, with its appends moved.

    `changes` are the workspace's, without staged chunks. None if relocation is not wanted, or if no
    array was made longer along the dimension by both sides.

    Raises
    ------
    ConflictError
        If the appends cannot be relocated, or the rest cannot be rebased.
    """
    if relocating is None or not rebasing.allowed:
        return None
    context, view = workspace.context, workspace.contents.view
    found = _moved_whole(context, view, tip, changes, relocating.dim, rebasing)
    if found is None:
        return None
    on, result, uneven = found
    return on, relocating.rewrite(workspace, on, result, uneven) if uneven else result


def _moved_whole(
    context: ReadContext,
    view: SnapshotView,
    tip: Branch,
    changes: ChangeSet,
    dim: str,
    rebasing: Rebasing,
) -> tuple[SnapshotView, ChangeSet, list[Relocation]] | None:
    """The tip, the changes there with whole chunks moved, and the appends to rewrite.

    None if no array was made longer along the dimension by both sides.
    """
    mine = Changes.of(view.nodes, changes.nodes, changes.truncated, _tables(changes))
    theirs = changes_between(context, view, tip)
    moves, conflicts = plan_relocation(dim, view.nodes, mine, theirs)
    if conflicts:
        raise ConflictError(
            f"other commits have appended along {dim!r} first, and this append cannot be relocated "
            "behind them; nothing was committed. Open a new session on the branch and append again",
            conflicts,
        )
    if not moves:
        return None
    rest, appended = changes.copy(), {}
    for move in moves:
        appended[move.node_id] = _take_append(rest, move, view)
    rebased = rebase_changes(context, view, tip, rest, rebasing)
    on, result = rebased.on, rebased.changes
    for move in moves:
        node = result.nodes.get(move.path) or on.nodes[move.path]
        result.nodes[move.path] = _longer(node, move)
        if move.steps is not None:
            for rows in appended[move.node_id]:
                _put_shifted(result, move, result.rows(rows))
            moved(result, move.node_id, move.axis, move.first, move.steps)
    return on, result, [move for move in moves if move.steps is None]


def _tables(changes: ChangeSet) -> dict[bytes, ChunkTable]:
    return {node: table for node in changes.touched() if (table := changes.table(node)) is not None}


def _take_append(rest: ChangeSet, move: Relocation, view: SnapshotView) -> list[Rows]:
    """Take the append out of the changes; return its chunks."""
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
