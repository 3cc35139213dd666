"""Epochs: claims after which nobody who began before may go on.

A claim is a swap of the root, and its epoch is the version that this swap makes. Versions only
rise, so no epoch comes twice, whatever is deleted and made again meanwhile. A *writer's* epoch is
kept with its branch, those of the *compactor* and the *collector* with the repository.

Invariants, each checked against the very root that is replaced:

- Who has claimed goes on only while the epoch is still its own.
- Who has not goes on only if it began at the newest claim, or later: it has seen what the one with
  the claim began from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.root.roots import RootAt, Roots
from zarr_manifests.errors import FencedError, NotFoundError
from zarr_manifests.format.root import Branch, Root

__all__ = [
    "COLLECTOR",
    "COMPACTOR",
    "check_collector",
    "check_compactor",
    "check_fence",
    "check_writer",
    "claim_branch",
    "claim_compaction",
    "claimed",
    "restored_epoch",
]

COMPACTOR: Final = "compactor"
COLLECTOR: Final = "collector"
_ATTEMPTS: Final = 100


def claim_branch(roots: Roots, branch: str) -> RootAt:
    """Claim the branch for one writer; the root that says so, with the branch.

    Raises
    ------
    NotFoundError
        If there is no such branch.
    """

    def change(root: Root) -> Root:
        tip = root.branches.get(branch)
        if tip is None:
            raise NotFoundError(f"there is no branch {branch!r}")
        moved = replace(tip, epoch=root.version + 1)
        return replace(root, branches={**root.branches, branch: moved})

    at = roots.update(change, "claim branch", branch, "", _ATTEMPTS)
    return replace(at, root=roots.with_branch(at.root, branch))


def check_writer(tip: Branch, branch: str, keys: SessionKeys) -> None:
    """Refuse a commit of a session that the branch's newest claim has shut out.

    Raises
    ------
    FencedError
        If another writer has claimed the branch since the session began.
    """
    own = keys.epoch
    if tip.epoch == own or (own is None and keys.start >= tip.epoch):
        return
    if tip.epoch:
        what = f"at version {tip.epoch} another writer has claimed branch {branch!r} for itself"
    else:
        what = f"branch {branch!r} was deleted and made again since the session claimed it"
    raise FencedError(f"{what}; nothing was committed. Open a new session and write again")


def claim_compaction(roots: Roots) -> RootAt:
    """Claim the compactor's epoch, so that compactions that are under way end without effect."""
    return roots.update(
        lambda root: replace(root, epochs=claimed(root, COMPACTOR)),
        *("claim compaction", "", "", _ATTEMPTS),
    )


def claimed(root: Root, name: str) -> Mapping[str, int]:
    """The epochs, with that of `name` as the root's next version makes it."""
    return {**root.epochs, name: root.version + 1}


def check_fence(roots: Roots, root: Root, keys: SessionKeys) -> None:
    """Refuse a commit of a session behind the fence, unless it holds a lease.

    Raises
    ------
    FencedError
        If it is one.
    """
    if keys.start < root.fence and not roots.holds_lease(root, keys.session_id):
        raise FencedError(
            f"the session began at version {keys.start}, before the repository's "
            f"fence {root.fence}: its objects may have been collected. Open a new session and "
            "write the changes again"
        )


def check_compactor(root: Root, start: int) -> None:
    """Refuse a compaction that began at `start`, before the newest claim.

    Raises
    ------
    FencedError
        If somebody has claimed the compactor's epoch since.
    """
    _check(root, COMPACTOR, start)


def check_collector(root: Root, epoch: int) -> None:
    """Refuse to go on with a collection whose epoch is not that of the root any more.

    Raises
    ------
    FencedError
        If somebody has claimed the collector's epoch since, or has put an older root back.
    """
    newest = root.epochs.get(COLLECTOR, 0)
    if newest < epoch:
        raise FencedError(
            f"the root of version {root.version} knows nothing of the collection that began at "
            f"version {epoch}: it was put back, or made anew. Nothing more was deleted"
        )
    _check(root, COLLECTOR, epoch)


def _check(root: Root, name: str, own: int) -> None:
    newest = root.epochs.get(name, 0)
    if own < newest:
        raise FencedError(
            f"at version {newest} another {name} has taken over from this one, of version {own}; "
            "what it has done until then stands"
        )


def restored_epoch(old: Branch, now: Branch | None, version: int) -> int:
    """The epoch of a branch that becomes `old` again with that version of the root.

    One that was claimed since and is forgotten must not come to count again.
    """
    if not old.epoch:
        return 0 if now is None else now.epoch
    return now.epoch if now is not None and now.epoch >= old.epoch else version
