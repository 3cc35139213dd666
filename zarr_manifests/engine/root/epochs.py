"""Claims of branches, compactions and collections, and what the root says to who comes too late.

A claim is a swap of the root. Its epoch is the version that this swap makes: versions only rise,
so no epoch comes twice, even where a branch is deleted and made again. A *writer's* epoch is kept
with its branch, those of the *compactor* and the *collector* with the repository.

Invariants (`planning.conflict.admission`), each checked against the very root that is replaced:

- Who has claimed goes on only while the epoch is still its own.
- Who has not claimed goes on only if it began at the newest claim or later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.root.roots import RootAt, RootReader, Roots
from zarr_manifests.errors import Conflict, ConflictError, FencedError
from zarr_manifests.format.root import COLLECTOR, COMPACTOR, Branch, Root, known_ref
from zarr_manifests.planning.conflict.admission import Refusal, Writer, admission

__all__ = [
    "admitted",
    "check_collector",
    "check_fence",
    "claim_branch",
    "claim_compaction",
    "claimed",
    "is_fenced",
    "overtaken",
    "restored_epoch",
]

_ATTEMPTS: Final = 100
_OPEN_ANOTHER: Final = "nothing was committed. Open a new session and write again"


def claim_branch(roots: Roots, branch: str) -> RootAt:
    """Claim the branch for one writer; the root that says so, with the branch.

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
    """The branch in the root, if the root admits a commit of the session to it.

    `amends` is the key and id of the head that the commit takes the place of, if it takes one's.

    Raises
    ------
    ConflictError
        If the branch was deleted, or its head cannot be amended any more.
    FencedError
        If the session began before the fence and holds no lease, or another writer has claimed
        the branch since.
    """
    match _refusal(roots, root, keys, branch, amends):
        case None:
            return root.branches[branch]
        case Refusal.NO_BRANCH:
            raise ConflictError(
                f"branch {branch!r} was deleted since the session began; nothing was committed. "
                "Create it again at the session's snapshot, then commit"
            )
        case Refusal.CLAIMED:
            at = root.branches[branch].epoch
            what = f"at version {at} another writer has claimed branch {branch!r} for itself"
            raise FencedError(f"{what}; {_OPEN_ANOTHER}")
        case Refusal.MADE_AGAIN:
            what = f"branch {branch!r} was deleted and made again since the session claimed it"
            raise FencedError(f"{what}; {_OPEN_ANOTHER}")
        case Refusal.NOT_HEAD if amends:
            raise ConflictError(
                f"snapshot {amends[1]} is not the head of {branch!r} any more, and only a "
                "head can be amended; nothing was committed. Commit the changes as a new snapshot",
                [Conflict("/", "history", "the branch has moved")],
            )
        case Refusal.NO_PARENT if amends:
            raise ConflictError(
                f"the snapshot before {amends[1]} has expired, so that one cannot be amended; "
                f"nothing was committed. Commit the changes to {branch!r} as a new snapshot",
                [Conflict("/", "history", "the snapshot before has expired")],
            )
        case _:
            raise _fenced(root, keys)


def check_fence(roots: RootReader, root: Root, keys: SessionKeys) -> None:
    """Refuse a session behind the fence, unless it holds a lease.

    Raises
    ------
    FencedError
        If it is one.
    """
    if is_fenced(roots, root, keys):
        raise _fenced(root, keys)


def is_fenced(roots: RootReader, root: Root, keys: SessionKeys) -> bool:
    """Whether the session began before the fence and holds no lease."""
    return _refusal(roots, root, keys) is not None


def _refusal(
    roots: RootReader,
    root: Root,
    keys: SessionKeys,
    branch: str | None = None,
    amends: tuple[str, str] | None = None,
) -> Refusal | None:
    writer = Writer(keys.start, keys.session_id, keys.epoch)
    found = admission(root, writer, branch, amends)
    if found is Refusal.FENCED:  # only then is it worth a request to look for leases in pages
        return admission(roots.with_leases(root, keys.session_id), writer, branch, amends)
    return found


def _fenced(root: Root, keys: SessionKeys) -> FencedError:
    return FencedError(
        f"the session began at version {keys.start}, before the repository's "
        f"fence {root.fence}: its objects may have been collected. Open a new session and "
        "write the changes again"
    )


def claim_compaction(roots: Roots) -> RootAt:
    """Claim the compactor's epoch, so that compactions that are under way end without effect."""
    return roots.update(
        lambda root: replace(root, epochs=claimed(root, COMPACTOR)),
        *("claim compaction", "", "", _ATTEMPTS),
    )


def claimed(root: Root, name: str) -> Mapping[str, int]:
    """The epochs, with that of `name` as the root's next version makes it."""
    return {**root.epochs, name: root.version + 1}


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
    if epoch < newest:
        raise overtaken(root, COLLECTOR, epoch)


def overtaken(root: Root, name: str, own: int) -> FencedError:
    """The error for who has claimed the epoch `own` of that name, or began then."""
    return FencedError(
        f"at version {root.epochs[name]} another {name} has taken over from this one, of version "
        f"{own}; what it has done until then stands"
    )


def restored_epoch(old: Branch, now: Branch | None, version: int) -> int:
    """The epoch of a branch that becomes `old` again with that version of the root.

    One that was claimed since and is forgotten must not come to count again.
    """
    if not old.epoch:
        return 0 if now is None else now.epoch
    return now.epoch if now is not None and now.epoch >= old.epoch else version
