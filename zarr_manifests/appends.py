"""Appends that land behind those of others, where the boundary runs through a chunk, too.

The chunks of such an array have values of both sides. The values that this side has appended are
decoded, and written to the array as it is at the tip, at their new place. Invariant: nothing but
what was appended is written anew; where values before it were changed as well, it is a conflict.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zarr

from zarr_manifests.engine.commit.rebase import Rebasing
from zarr_manifests.engine.commit.relocate import relocate_changes
from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import Conflict, ConflictError
from zarr_manifests.format.root import Branch
from zarr_manifests.planning.conflict.relocation import Relocation
from zarr_manifests.store import ManifestStore

__all__ = ["put_behind"]


def put_behind(
    context: Context,
    workspace: Workspace,
    changes: ChangeSet,
    dim: str,
    rebasing: Rebasing,
    tip: Branch,
) -> tuple[SnapshotView, ChangeSet] | None:
    """The tip, opened, and a session's changes as they are behind what others have appended.

    `changes` are the workspace's, without staged chunks. None if others have not appended along
    the dimension what this session has.

    Raises
    ------
    ConflictError
        If the append cannot be put there, or the rest of the changes not on the tip.
    """
    found = relocate_changes(context, workspace.view, tip, changes, dim, rebasing)
    if found is None:
        return None
    on, result, uneven = found
    if uneven:
        there = Workspace(context, on, workspace.keys)
        there.changes = result
        store = ManifestStore(there, read_only=False)
        for move in uneven:
            values = _appended(context, workspace, move)
            array = zarr.open_array(store, path=move.path, mode="r+")
            array[move.to : move.length] = values
        there.flush()
        result = there.changes
    return on, result


def _appended(context: Context, workspace: Workspace, move: Relocation) -> Any:
    """The values that were appended; those before them in their chunk must be as they were."""
    first = move.first * move.chunk
    now = _values(context, workspace.view, workspace.changes, move, first, move.stop)
    before = _values(context, workspace.view, ChangeSet(), move, first, move.start)
    if not _equal(now[: move.start - first], before):
        raise ConflictError(
            "other commits have appended first, and this append cannot be put behind theirs; "
            "nothing was committed. Open a new session on the branch and make the changes again",
            [Conflict(f"/{move.path}", "chunks", "values before the append were changed as well")],
        )
    return now[move.start - first :]


def _values(
    context: Context, view: SnapshotView, changes: ChangeSet, move: Relocation, lo: int, hi: int
) -> Any:
    """Values of an array of one axis; that they are read is noted nowhere."""
    workspace = Workspace(context, view, None)
    workspace.changes = changes
    store = ManifestStore(workspace, read_only=True)
    return np.asarray(zarr.open_array(store, path=move.path, mode="r")[lo:hi])


def _equal(a: Any, b: Any) -> bool:
    if a.dtype.hasobject or a.dtype.kind == "T":  # their bytes are addresses
        return bool(a.tolist() == b.tolist())
    return bool(a.tobytes() == b.tobytes())
