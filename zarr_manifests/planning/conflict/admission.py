"""Whether a root admits a session's change.

The root is replaced by a compare-and-swap of the root that was checked, so a decision stays true.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zarr_manifests.format.root import COMPACTOR, Branch, Root


class Refusal(StrEnum):
    """Why a root does not admit a session's change."""

    NO_BRANCH = "no-branch"
    """The branch was deleted."""
    CLAIMED = "claimed"
    """Another writer has claimed the branch."""
    MADE_AGAIN = "made-again"
    """The session claimed the branch, which was deleted and made again since."""
    FENCED = "fenced"
    """The session began before the fence and holds no lease: its objects may be deleted already."""
    OVERTAKEN = "overtaken"
    """Another compactor has taken over."""
    NOT_HEAD = "not-head"
    """The snapshot to amend is not the branch's head."""
    NO_PARENT = "no-parent"
    """The parent of the snapshot to amend has expired."""


@dataclass(frozen=True, slots=True)
class Writer:
    """What admission has to know about a session that wants to change the root.

    Parameters
    ----------
    start : int
        The version of the root at which the session began.
    session_id : str or None
        Its id, to find its leases; None if it cannot hold any.
    epoch : int or None
        The epoch of its claim of the branch, if it has claimed it.
    compacts : bool
        Whether it only rewrites tables and changes no data. Claims of other compactors count for
        it, claims of writers do not.
    """

    start: int
    session_id: str | None = None
    epoch: int | None = None
    compacts: bool = False


def admission(
    root: Root, writer: Writer, branch: str | None = None, amends: tuple[str, str] | None = None
) -> Refusal | None:
    """Return why the root does not admit the session's change; None if it does.

    Parameters
    ----------
    root : Root
        The root to replace, with the branch and the session's leases.
    writer : Writer
        The session.
    branch : str or None
        The branch to change; None if none is changed.
    amends : tuple of str, or None
        Key and id of the head that the commit replaces, if it amends one.
    """
    tip = None if branch is None else root.branches.get(branch)
    if branch is not None and tip is None:
        return Refusal.NO_BRANCH
    if tip is not None and not writer.compacts and _is_shut_out(tip, writer):
        return Refusal.CLAIMED if tip.epoch else Refusal.MADE_AGAIN
    leased = writer.session_id is not None and root.holds_lease(writer.session_id)
    if writer.start < root.fence and not leased:
        return Refusal.FENCED
    if writer.compacts and writer.start < root.epochs.get(COMPACTOR, 0):
        return Refusal.OVERTAKEN
    if tip is not None and amends is not None:
        key, snapshot_id = amends
        if tip.head.key != key:
            return Refusal.NOT_HEAD
        if tip.floor == snapshot_id:
            return Refusal.NO_PARENT
    return None


def _is_shut_out(tip: Branch, writer: Writer) -> bool:
    """Whether the branch has a newer claim, by another writer, than the writer's claim or start."""
    return tip.epoch != writer.epoch and (writer.epoch is not None or writer.start < tip.epoch)
