"""Marks in a commit: whether its step may be taken, and the marks of its snapshot.

Invariants: each attempt compares the marks of the very snapshot that it replaces or builds on,
before anything else is checked. That a version is committed is said only of a root that was read
after the commit was called, and that is durable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zarr_manifests.engine.history.find_marks import mark_of, paged_marks, snapshot_of
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.root.roots import opened
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.errors import (
    Conflict,
    ConflictError,
    ConflictKind,
    TransactionAlreadyCommitted,
    TransactionGapError,
)
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.root import ROOT_KEY, Branch, Root
from zarr_manifests.format.snapshot import MOST_IN_SNAPSHOT, MarksPage, Snapshot
from zarr_manifests.planning.conflict.transactions import (
    NO_MARK,
    MarkStep,
    Txn,
    moved_marks,
    shown,
)


def check_now(context: Context, branch: str, txn: Txn) -> None:
    """Raise if the branch, as it is now, does not let the step be taken.

    Raises
    ------
    TransactionAlreadyCommitted
        If it was committed.
    TransactionGapError
        If the version before is not the one it comes after.
    """

    def check() -> None:
        root = context.roots.with_branch(context.roots.read().root, branch)
        check_marks(context, root, branch, txn)

    opened(check)


def check_marks(
    context: Context,
    root: Root,
    branch: str,
    txn: Txn | None,
    steps: tuple[MarkStep, ...] = (),
) -> None:
    """Raise if the marks of the branch's head do not allow the commit.

    Raises
    ------
    TransactionAlreadyCommitted
        If the transaction was committed.
    TransactionGapError
        If the version before is not the one that the transaction comes after.
    ConflictError
        If a mark is not where its step begins.
    """
    tip = root.branches.get(branch)
    if tip is None or (txn is None and not steps):
        return  # without a branch, `admitted` raises
    head = context.objects.load(tip.head, Snapshot)
    if txn is not None:
        _check_txn(context, tip, head, txn, branch)
    conflicts = [
        Conflict(
            ConflictKind.TXN,
            "/",
            "txn",
            f"the last version of {step.app!r} is {shown(mark)} and not {shown(step.before)}",
        )
        for step in steps
        if (mark := mark_of(context, head, step.app)) != step.before
    ]
    if conflicts:
        raise ConflictError(
            f"the last versions of applications on branch {branch!r} are not those that this "
            "commit expects; nothing was committed. `repo.txn_versions(branch)` lists them",
            conflicts,
        )


def _check_txn(context: Context, tip: Branch, head: Snapshot, txn: Txn, branch: str) -> None:
    assert txn.version is not None  # to forget one is no step
    mark = mark_of(context, head, txn.app)
    if mark >= txn.version:
        # Others may have swapped this root in and not have synced it yet.
        context.storage.sync([ROOT_KEY])
        found = snapshot_of(context, tip, txn.app, txn.version)
        where = "" if found is None else f", in snapshot {found}"
        raise TransactionAlreadyCommitted(
            f"version {txn.version} of {txn.app!r} is committed to branch {branch!r} already"
            f"{where}; its last version is {mark}. Nothing was committed",
            txn.app,
            txn.version,
            mark,
            found,
        )
    if txn.after is not None and mark != txn.after:
        raise TransactionGapError(
            f"version {txn.version} of {txn.app!r} comes after {shown(txn.after)}, but the last "
            f"one on branch {branch!r} is {shown(mark)}; nothing was committed. Versions between "
            "are missing, perhaps because the branch was reset or restored: commit them first, or "
            "leave out `after` to skip them"
        )


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a new snapshot: its own, its page's pointer, and the page to upload, if new."""

    own: Mapping[str, int]
    page: BlobRef | None
    uploads: tuple[Upload, ...] = ()


def marks_after(
    context: Context,
    tip: Snapshot,
    txn: Txn | None,
    steps: tuple[MarkStep, ...],
    keys: SessionKeys,
) -> Marks:
    """The marks of a snapshot that comes after `tip`, or replaces it."""
    if txn is not None:
        assert txn.version is not None
        steps = (*steps, MarkStep(txn.app, NO_MARK, txn.version))
    if not steps:
        return Marks(tip.marks, tip.marks_page)
    own = moved_marks(tip.marks, steps)
    gone = {step.app for step in steps if step.version == NO_MARK}
    page = paged_marks(context, tip).marks if gone or len(own) > MOST_IN_SNAPSHOT else {}
    left = {app: version for app, version in page.items() if app not in gone}
    if len(own) > MOST_IN_SNAPSHOT:
        newest = {step.app for step in steps}
        left |= {app: version for app, version in own.items() if app not in newest}
        own = {app: version for app, version in own.items() if app in newest}
    elif len(left) == len(page):
        return Marks(own, tip.marks_page)
    if not left:
        return Marks(own, None)
    upload = Upload.of(keys, "pages", MarksPage(left).encode())
    return Marks(own, upload.ref, (upload,))
