"""Claims of branches, compactions and collections, and the errors for those who come too late.

A claim is a swap of the root. Its epoch is the version that the swap makes. Versions only rise, so
no epoch occurs twice, even if a branch is deleted and made again. A *writer's* epoch is stored with
its branch; those of the *compactor* and the *collector* with the repository.

Invariants, checked against exactly the root that is replaced, so that a decision stays true:

- A session with a claim goes on only while the claim's epoch is the current one.
- A session without a claim goes on only if it began at the newest claim or later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from zarr_manifests.engine.metadata import SessionKeys
from zarr_manifests.engine.roots import RootAt, RootReader, Roots
from zarr_manifests.errors import Conflict, ConflictError, ConflictKind, FencedError
from zarr_manifests.format.root import COLLECTOR, COMPACTOR, Branch, Root, known_ref

_ATTEMPTS: Final = 100


def claim_branch(roots: Roots, branch: str) -> RootAt:
    """Claim the branch for one writer; return the new root, with the branch.

    Raises
    ------
    NotFoundError
        If there is no such branch.
    """

    def change(root: Root) -> Root:
        tip = known_ref(root.branches, branch, "branch")
        moved = replace(tip, epoch=root.version + 1)
        return replace(root, branches={**root.branches, branch: moved})

    at = roots.update(change, "claim branch", branch, "", _ATTEMPTS)
    return replace(at, root=roots.with_branch(at.root, branch))


def admitted(
    roots: RootReader,
    root: Root,
    branch: str,
    keys: SessionKeys,
    amends: tuple[str, str] | None = None,
) -> Branch:
    """Return the branch if the root admits the session's commit to it, else raise.

    `amends` has key and id of the head that the commit replaces, if it amends one.

    Raises
    ------
    ConflictError
        If the branch was deleted, or its head cannot be amended any more.
    FencedError
        If the session began before the fence and holds no lease, or another writer has since
        claimed the branch.
    """
    tip = root.branches.get(branch)
    if tip is None:
        raise ConflictError(
            f"branch {branch!r} was deleted since the session began; nothing was committed. "
            "Create it again at the session's snapshot, then commit"
        )
    if is_shut_out(tip, keys):
        claimed = f"at version {tip.epoch} another writer has claimed branch {branch!r} for itself"
        again = f"branch {branch!r} was deleted and made again since the session claimed it"
        what = claimed if tip.epoch else again
        raise FencedError(f"{what}; nothing was committed. Open a new session and write again")
    check_fence(roots, root, keys)
    if amends is not None and tip.head.key != amends[0]:
        raise ConflictError(
            f"snapshot {amends[1]} is not the head of {branch!r} any more, and only a "
            "head can be amended; nothing was committed. Commit the changes as a new snapshot",
            [Conflict(ConflictKind.HISTORY, "/", "history", "the branch has moved")],
        )
    if amends is not None and tip.floor == amends[1]:
        raise ConflictError(
            f"the snapshot before {amends[1]} has expired, so that one cannot be amended; "
            f"nothing was committed. Commit the changes to {branch!r} as a new snapshot",
            [Conflict(ConflictKind.HISTORY, "/", "history", "the snapshot before has expired")],
        )
    return tip


def is_shut_out(tip: Branch, keys: SessionKeys) -> bool:
    """Whether another writer has claimed the branch since the session did, or else began."""
    return tip.epoch != keys.epoch and (keys.epoch is not None or keys.start < tip.epoch)


def check_fence(roots: RootReader, root: Root, keys: SessionKeys) -> None:
    """Refuse a session behind the fence, unless it holds a lease.

    Raises
    ------
    FencedError
        If the session is behind the fence.
    """
    if is_fenced(roots, root, keys):
        raise fenced(root, keys.start)


def is_fenced(roots: RootReader, root: Root, keys: SessionKeys) -> bool:
    """Whether the session began before the fence and holds no lease."""
    if keys.start >= root.fence or root.holds_lease(keys.session_id):
        return False
    # Leases may be in pages; only now are they worth a request.
    return not roots.with_leases(root, keys.session_id).holds_lease(keys.session_id)


def check_compactor(root: Root, start: int) -> None:
    """Refuse a compaction that began at version `start` if another compactor has taken over.

    Raises
    ------
    FencedError
        If it has.
    """
    if start < root.epochs.get(COMPACTOR, 0):
        raise overtaken(root, COMPACTOR, start)


def fenced(
    root: Root,
    start: int,
    what: str = "the session",
    again: str = "Open a new session and write the changes again",
) -> FencedError:
    """The error for what began at version `start`, before the fence."""
    return FencedError(
        f"{what} began at version {start}, before the repository's fence {root.fence}: its "
        f"objects may have been collected. {again}"
    )


def claim_compaction(roots: Roots) -> RootAt:
    """Claim the compactor's epoch, so that running compactions end without effect."""
    return roots.update(
        lambda root: replace(root, epochs=claimed(root, COMPACTOR)),
        *("claim compaction", "", "", _ATTEMPTS),
    )


def claimed(root: Root, name: str) -> Mapping[str, int]:
    """The epochs, with `name` claimed by the root's next version."""
    return {**root.epochs, name: root.version + 1}


def check_collector(root: Root, epoch: int) -> None:
    """Refuse to go on with a collection whose epoch is no longer the current one.

    Raises
    ------
    FencedError
        If somebody has claimed the collector's epoch since, or has restored an older root.
    """
    newest = root.epochs.get(COLLECTOR, 0)
    if newest < epoch:
        raise FencedError(
            f"the root of version {root.version} knows nothing of the collection that began at "
            f"version {epoch}: an older root was put back, or a new one was made. Nothing more was "
            "deleted"
        )
    if epoch < newest:
        raise overtaken(root, COLLECTOR, epoch)


def overtaken(root: Root, name: str, own: int) -> FencedError:
    """The error for a claim, or a start, at version `own` that a newer claim has superseded."""
    return FencedError(
        f"at version {root.epochs[name]} another {name} has taken over from this one, of version "
        f"{own}; what it has done until then stands"
    )


def restored_epoch(old: Branch, now: Branch | None, version: int) -> int:
    """The epoch of a branch that becomes `old` again in that version of the root.

    A claim that was superseded since must not become current again.
    """
    if not old.epoch:
        return 0 if now is None else now.epoch
    return now.epoch if now is not None and now.epoch >= old.epoch else version
