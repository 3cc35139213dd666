"""What a commit is to be, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zarr_manifests.engine.commit.rebase import Rebasing
from zarr_manifests.engine.commit.relocate import Relocating
from zarr_manifests.engine.snapshot.view import SnapshotView

__all__ = ["CommitRequest", "TipCheck"]

type TipCheck = Callable[[SnapshotView], None]
"""Looks at a tip that has moved; raises `ConflictError` if the changes must not go on top of it."""


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """What a commit says of itself, and how it may land.

    Parameters
    ----------
    message : str
        Its message.
    metadata : mapping
        Its metadata, checked.
    rebasing : Rebasing
        What may become of it when other commits came first.
    attempts : int, optional
        How often it is tried; else as configured.
    relocating : Relocating, optional
        Whether its appends land behind those of others.
    check_tip : callable, optional
        Looks at a tip that has moved before the commit is put on top of it.
    amends : SnapshotView, optional
        The branch's head, which the commit replaces.
    source : str, optional
        Id of a snapshot that chunk refs were taken from: it must be in history when the commit
        lands.
    """

    message: str
    metadata: Mapping[str, Any]
    rebasing: Rebasing = Rebasing()  # noqa: RUF009 - it is frozen
    attempts: int | None = None
    relocating: Relocating | None = None
    check_tip: TipCheck | None = None
    amends: SnapshotView | None = None
    source: str | None = None
