"""Rewrites appended values where another commit appended within the same chunk.

A chunk at such a boundary holds values of both sides. The values that this session appended are
decoded, and written at their new place to the array at the tip. Invariant: only appended values are
rewritten; if values before them were changed too, that is a conflict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import zarr

from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import Conflict, ConflictError, ConflictKind
from zarr_manifests.planning.conflict.relocation import Relocation
from zarr_manifests.store import ManifestStore

__all__ = ["rewrite_appends"]


def rewrite_appends(
    workspace: Workspace, tip: SnapshotView, changes: ChangeSet, moves: Sequence[Relocation]
) -> ChangeSet:
    """The changes on the tip, with the values that the workspace has appended.

    `changes` are the changes to make on the tip, without these values.

    Raises
    ------
    ConflictError
        If values before an append were changed too.
    """
    there = Workspace(workspace.context, tip, workspace.keys)
    there.contents.changes = changes
    store = ManifestStore(there, read_only=False)
    for move in moves:
        values = _appended(workspace.context, workspace, move)
        array = zarr.open_array(store, path=move.path, mode="r+")
        array[move.to : move.length] = values
    there.flush()
    return there.contents.changes


def _appended(context: ReadContext, workspace: Workspace, move: Relocation) -> Any:
    """The appended values; values before them in their chunk must be unchanged."""
    first = move.first * move.chunk
    view, changes = workspace.contents.view, workspace.contents.changes
    now = _values(context, view, changes, move, first, move.stop)
    before = _values(context, view, ChangeSet(), move, first, move.start)
    if not _equal(now[: move.start - first], before):
        raise ConflictError(
            "other commits have appended first, and this append cannot be relocated behind them; "
            "nothing was committed. Open a new session on the branch and make the changes again",
            [
                Conflict(
                    ConflictKind.APPEND,
                    f"/{move.path}",
                    "chunks",
                    "values before the append were changed as well",
                )
            ],
        )
    return now[move.start - first :]


def _values(
    context: ReadContext, view: SnapshotView, changes: ChangeSet, move: Relocation, lo: int, hi: int
) -> Any:
    """Values of an array of one axis, read without recording the read."""
    contents = SessionView(context, view)
    contents.changes = changes
    store = ManifestStore(contents, read_only=True)
    return np.asarray(zarr.open_array(store, path=move.path, mode="r")[lo:hi])


def _equal(a: Any, b: Any) -> bool:
    if a.dtype.hasobject or a.dtype.kind == "T":  # their bytes are addresses
        return bool(a.tolist() == b.tolist())
    return bool(a.tobytes() == b.tobytes())
