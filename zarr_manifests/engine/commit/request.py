"""A commit's description and options, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zarr_manifests.engine.commit.rebase import Rebasing
from zarr_manifests.engine.commit.relocate import Relocating
from zarr_manifests.engine.edit.workspace import TipCheck
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.planning.conflict.admission import MarkStep, Txn


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """What a commit says about itself, and how it may land.

    Parameters
    ----------
    message : str
        Its message.
    metadata : mapping
        Its metadata, checked.
    rebasing : Rebasing
        What to do if other commits came first.
    attempts : int, optional
        The number of attempts; by default as configured.
    relocating : Relocating, optional
        Whether to put its appends behind those of others.
    check_tip : callable, optional
        Checks a tip that has moved before the commit is put on top of it, besides the workspace's
        own checks.
    amends : SnapshotView, optional
        The branch's head, which the commit replaces.
    source : str, optional
        Id of a snapshot from which chunk refs were taken: it must be in history when the commit
        lands.
    txn : Txn, optional
        The application's step that it is; it then lands even if it changes nothing.
    steps : tuple of MarkStep
        Other marks that it moves, each of which must be where the step begins.
    merged : tuple of str, optional
        Of a merge: the ids of the snapshot that it merges, and of the one since which.
    """

    message: str
    metadata: Mapping[str, Any]
    rebasing: Rebasing = field(default_factory=Rebasing)
    attempts: int | None = None
    relocating: Relocating | None = None
    check_tip: TipCheck | None = None
    amends: SnapshotView | None = None
    source: str | None = None
    txn: Txn | None = None
    steps: tuple[MarkStep, ...] = ()
    merged: tuple[str, str] | None = None
