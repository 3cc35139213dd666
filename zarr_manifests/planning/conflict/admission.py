"""Whether a root admits a session's change, and steps of exactly-once commits.

The root is replaced by a compare-and-swap of the root that was checked, so a decision stays true.

The *mark* of an application is the last version that it has committed. A branch without its mark is
below version 0. Invariant: a mark only rises, except where it is forgotten or the branch goes back
to an older snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.root import COMPACTOR, Branch, Root
from zarr_manifests.format.snapshot import check_marks


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


class Writer(Struct, frozen=True):
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


# --- marks -------------------------------------------------------------------------------------

NO_MARK: Final = -1
"""In place of a version: the application has no mark."""


class Txn(Struct, frozen=True):
    """A numbered step of an application, which reaches a branch at most once.

    Parameters
    ----------
    app : str
        Name of the application, with 1 to 255 bytes of UTF-8.
    version : int or None
        Number of the step, from 0 on. Versions may be left out, but only rise. None forgets the
        application: after it, the application can commit any version to the branch. Older
        snapshots still have the mark, and a branch that is set back to one has it again.
    after : int, optional
        The application's last version must be exactly this one; -1 says that there must be none.
        By default it may be any lower one. To forget the application, it must be given.

    Raises
    ------
    InvalidArgumentError
        If the name or a number is invalid, or `after` is not below `version`.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://txn-example")
    >>> for batch in range(2):
    ...     with repo.transaction(message="a batch", txn=zm.Txn("app", batch, batch - 1)) as store:
    ...         _ = zarr.create_group(store, path=f"batch{batch}")
    >>> repo.txn_versions()
    {'app': 1}
    >>> _ = repo.writable_session().commit("start again", txn=zm.Txn("app", None, after=1))
    >>> repo.txn_versions()
    {}
    """

    app: str
    version: int | None
    after: int | None = None

    def __post_init__(self) -> None:
        if self.version is None:
            check_app(self.app, self.after)
            return
        check_app(self.app, self.version)
        if self.after is not None and not (
            type(self.after) is int and NO_MARK <= self.after < self.version
        ):
            raise InvalidArgumentError(
                f"txn: after must be a version below {self.version}, or -1 for none, "
                f"not {self.after!r:.40}"
            )


def txn_of(given: Any) -> Txn | None:
    """The step as callers give it: as a `Txn`, a pair of name and version, or None.

    Raises
    ------
    InvalidArgumentError
        If it is none of these, or invalid.
    """
    match given:
        case None | Txn():
            return given
        case (app, version):
            return Txn(app, version)
    raise InvalidArgumentError(
        f"txn is a pair of an application's name and a version, or a Txn, not {given!r:.80}"
    )


def check_app(app: object, version: object) -> None:
    """Raise unless this is the name of an application and a version of it."""
    if not isinstance(app, str):
        raise InvalidArgumentError(f"txn: the name of an application is a text, not {app!r:.80}")
    check_marks("txn", {app: version}, 1)  # type: ignore[dict-item]  # checked there


class MarkStep(Struct, frozen=True):
    """A mark that was at `before` and is to be at `version`; `NO_MARK` says that there is none."""

    app: str
    before: int
    version: int


def steps_between(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[MarkStep, ...]:
    """The marks that were set or forgotten, given all marks before and after."""
    return tuple(
        MarkStep(app, before.get(app, NO_MARK), after.get(app, NO_MARK))
        for app in sorted(before.keys() | after.keys())
        if before.get(app, NO_MARK) != after.get(app, NO_MARK)
    )


def moved_marks(marks: Mapping[str, int], steps: tuple[MarkStep, ...]) -> dict[str, int]:
    """The marks after these steps."""
    moved = dict(marks)
    for step in steps:
        moved.pop(step.app, None)
        if step.version != NO_MARK:
            moved[step.app] = step.version
    return moved


def shown(mark: int) -> str:
    """The mark in words."""
    return "none" if mark == NO_MARK else str(mark)
