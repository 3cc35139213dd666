"""How the changes of a session reach its branch.

Invariants: the changes of a session are committed whole or not at all; a session whose commit has
landed never commits the same changes again; a merge moves a branch to its source only if the source
comes after the branch's head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import zarr
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import find_kept
from zarr_manifests.engine.bulk_chunks import find_chunks
from zarr_manifests.engine.change_set import ChangeSet
from zarr_manifests.engine.commit_changes import (
    CommitRequest,
    checked_message,
    checked_metadata,
    commit,
)
from zarr_manifests.engine.forks import SessionWriter
from zarr_manifests.engine.landing import Landed, check_now
from zarr_manifests.engine.overlay import SessionView, summary
from zarr_manifests.engine.rebase import (
    Merging,
    Rebasing,
    Relocating,
    patch,
    plan_merge,
    put_on_tip,
)
from zarr_manifests.engine.refs import BranchMovedError, Refs, marks_of
from zarr_manifests.engine.roots import opened
from zarr_manifests.engine.upkeep.compaction import compact_if_due
from zarr_manifests.engine.view import Context, SnapshotView
from zarr_manifests.engine.workspace import UNKNOWN, Workspace
from zarr_manifests.errors import (
    Conflict,
    ConflictError,
    ConflictKind,
    InvalidArgumentError,
    ManifestsError,
    TransactionAlreadyCommitted,
)
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.snapshot import CommitKind, Snapshot
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.appends import Relocation
from zarr_manifests.planning.conflict import (
    NO_MARK,
    MarkStep,
    Policy,
    Txn,
    check_policy,
    steps_between,
    txn_of,
)
from zarr_manifests.reports import MergeReport
from zarr_manifests.store import ManifestStore, finish_writes

_LOG = logging.getLogger(__name__)


class SessionCommits:
    """Commits, amends, rebases and patches for one session.

    Parameters
    ----------
    writer : SessionWriter
        The session's snapshot and changes.
    serializable : bool
        Whether a commit conflicts with any change of what the session has read.
    """

    def __init__(self, writer: SessionWriter, *, serializable: bool = False) -> None:
        self.writer, self._serializable = writer, serializable
        self._relocating: Relocating | None = None

    def relocate_appends(self, dim: object) -> None:
        """From now on, land appends along the dimension behind those of others."""
        if not isinstance(dim, str) or not dim:
            raise InvalidArgumentError(f"{dim!r} is not the name of a dimension")
        self._relocating = Relocating(dim, _rewrite_appends)

    def relocates(self, dim: object) -> bool:
        """Whether appends along the dimension land behind those of others."""
        return self._relocating is not None and self._relocating.dim == dim

    def commit(
        self,
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        rebase: bool | Policy = True,
        discard_unmerged: bool = False,
        txn: object = None,
        allow_empty: bool = False,
    ) -> str:
        """The id of the new snapshot; see `Session.commit`.

        With `allow_empty` a commit is made also if nothing has changed.
        """
        step = txn_of(txn)
        steps: tuple[MarkStep, ...] = ()
        if step is not None and step.version is None:
            assert step.after is not None  # else it would not be valid
            steps, step, allow_empty = (MarkStep(step.app, step.after, NO_MARK),), None, True
        request = CommitRequest(
            "" if message is None else checked_message(message),
            self._metadata(metadata),
            self._rebasing(rebase),
            txn=step,
            steps=steps,
        )
        workspace = self.writer.workspace
        finish_writes()
        with workspace.lock, self._ended_if_done():
            workspace.check_open()
            if step is not None:  # says so before copies are refused, or much is uploaded
                check_now(self.writer.context, self.writer.branch, step)
            self.writer.copies.bring_in(discard=discard_unmerged)
            if not workspace.contents.changes and step is None and not allow_empty:
                raise InvalidArgumentError("nothing to commit: nothing was written or deleted")
            if message is None:  # now all that copies have written is known
                request = replace(request, message=summary(workspace.contents))
            return self._land(request)

    def begin(self, txn: object) -> Txn | None:
        """Check whether a transaction that just begins was committed before; it as a value.

        Raises
        ------
        TransactionAlreadyCommitted, TransactionGapError
            As the commit would.
        """
        step = txn_of(txn)
        if step is not None and step.version is not None:
            with self._ended_if_done():
                check_now(self.writer.context, self.writer.branch, step)
        return step

    def amend(
        self,
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        discard_unmerged: bool = False,
    ) -> str:
        """The id of the snapshot that replaces the branch's head; see `Session.amend`."""
        workspace = self.writer.workspace
        finish_writes()
        with workspace.lock:
            workspace.check_open()
            self.writer.copies.bring_in(discard=discard_unmerged)
            head, old = workspace.contents.view, workspace.contents.view.snapshot
            if old.parent is None or old.kind is CommitKind.REWRITE:
                what = "the first of the repository" if old.parent is None else "a rewrite"
                raise InvalidArgumentError(
                    f"snapshot {head.snapshot_id} is {what} and cannot be amended; commit instead"
                )
            if not workspace.contents.changes and message is None and metadata is None:
                raise InvalidArgumentError("nothing to amend: no changes, message or metadata")
            message = checked_message(old.message if message is None else message)
            metadata = checked_metadata(old.metadata if metadata is None else metadata)
            return self._land(CommitRequest(message, metadata, amends=head))

    def patch(
        self,
        done: SnapshotView,
        message: str,
        metadata: Mapping[str, Any],
        *,
        undo: bool,
        marks: str = "drop",
    ) -> str:
        """Repeat or undo the commit `done`; the new snapshot's id.

        Chunk refs are copied from `done`, or from its parent, so that snapshot must still be in
        history when the commit lands. With `marks="take"`, so are the marks that it has set.
        """
        if marks not in ("take", "drop"):
            raise InvalidArgumentError(f"txn={marks!r}: give 'take' or 'drop'")
        message, metadata = checked_message(message), self._metadata(metadata)
        parent_id = done.snapshot.parent_id
        if done.snapshot.parent is None or parent_id is None:
            raise InvalidArgumentError(
                f"snapshot {done.snapshot_id} is the first of the repository; no commit made it"
            )
        contents, context = self.writer.workspace.contents, self.writer.context
        find_kept(context, context.roots.latest.root, parent_id)  # it may have expired
        source = parent_id if undo else done.snapshot_id
        contents.rebase(contents.view, patch(context, done, contents.view, undo=undo))
        steps: tuple[MarkStep, ...] = ()
        if marks == "take":
            before = context.objects.load(done.snapshot.parent, Snapshot)
            moved = steps_between(marks_of(context, before), marks_of(context, done.snapshot))
            steps = tuple(step for step in moved if step.version != NO_MARK)
        if not contents.changes and not steps:
            raise InvalidArgumentError(
                f"nothing to {'undo' if undo else 'do'}: branch {self.writer.branch!r} has the "
                f"state {'before' if undo else 'after'} commit {done.snapshot_id} already"
            )
        rebasing = self._rebasing(True)
        return self._land(CommitRequest(message, metadata, rebasing, source=source, steps=steps))

    def merge(
        self,
        planned: Merging,
        message: str | None,
        metadata: Mapping[str, Any] | None,
        policy: Policy,
    ) -> str:
        """The id of the snapshot of a merge, whose changes are the session's.

        Raises
        ------
        BranchMovedError
            If the branch has moved since the merge was planned; nothing was committed.
        """
        branch = self.writer.branch
        text = f"merge {planned.source} into {branch}" if message is None else message
        request = CommitRequest(
            checked_message(text),
            {**self._metadata(metadata), "merged-from": planned.source},
            planned.rebasing(policy),
            source=planned.source,
            steps=planned.steps,
            merged=(planned.source, planned.base.snapshot_id),
        )
        return self._land(request)

    def rebase(self, policy: Policy) -> str:
        """Move the changes onto the branch's head; its id. See `Session.rebase`."""
        rebasing, writer = self._rebasing(policy), self.writer
        workspace, context = writer.workspace, writer.context
        with workspace.lock:
            workspace.check_open()
            if workspace.token is not None or not workspace.contents.changes:
                writer.copies.bring_in()
            if not workspace.contents.changes:
                writer.refresh()
                return workspace.contents.view.snapshot_id
            root = context.roots.with_branch(context.roots.read().root, writer.branch)
            tip = root.branches.get(writer.branch)
            if tip is None:
                raise ConflictError(
                    f"branch {writer.branch!r} was deleted since the session began; create it "
                    "again at the session's snapshot, then commit"
                )
            if tip.head.key != workspace.contents.view.ref.key:
                workspace.flush()
                view, changes = workspace.contents.view, workspace.contents.changes
                workspace.contents.rebase(*put_on_tip(workspace, view, changes, tip, rebasing))
                writer.move_lease()
        return workspace.contents.view.snapshot_id

    @contextmanager
    def _ended_if_done(self) -> Iterator[None]:
        """End the session if its transaction turns out to be committed already."""
        try:
            yield
        except TransactionAlreadyCommitted:
            self.writer.drop("its transaction had been committed before")
            raise

    def _metadata(self, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        """The metadata of a commit, over what every commit is to have, and its author."""
        own = {} if metadata is None else checked_metadata(metadata)
        context = self.writer.context
        author = context.runtime.who()
        found = dict(context.config.commits.metadata) | own
        return found | ({"author": author} if author and "author" not in found else {})

    def _rebasing(self, rebase: bool | Policy) -> Rebasing:
        policy: Policy = "fail" if isinstance(rebase, bool) else rebase
        check_policy(policy)
        allowed = rebase is not False
        return Rebasing(allowed, policy, self._serializable, relocating=self._relocating)

    def _land(self, request: CommitRequest) -> str:
        workspace = self.writer.workspace
        if workspace.landing:  # an interrupt came after a swap, and before the session moved on
            workspace.closed = UNKNOWN
        workspace.check_open()
        workspace.landing = True
        try:
            done = commit(workspace, self.writer.branch, request)
        except ManifestsError:
            workspace.landing = False
            raise
        self._go_on(done)
        return snapshot_id_of(done.head.key)

    def _go_on(self, done: Landed) -> None:
        """Continue from the committed snapshot; a failure here does not undo the commit."""
        writer = self.writer
        try:
            view = writer.context.open_view(done.head)
        except BaseException as error:
            # The old snapshot with the changes over it still reads correctly. The session is closed
            # so that it cannot commit the same changes again.
            writer.workspace.closed = "its last commit landed, but could not be opened again"
            if not isinstance(error, ManifestsError):
                raise
            _LOG.warning("going on after a commit to %r failed", writer.branch, exc_info=True)
            return
        writer.move_to(view, done.at.root.version)
        compacted = compact_if_due(writer.context, writer.branch, view)
        if compacted is not None:
            writer.move_to(compacted)


def merge(
    refs: Refs,
    source: str,
    into: str,
    *,
    policy: Policy,
    described: tuple[str | None, Mapping[str, Any] | None],
    fast_forward: bool,
    dry_run: bool,
) -> MergeReport:
    """Merge a version into a branch; `described` has the commit's message and metadata."""
    check_policy(policy)
    context, due = refs.context, refs.fixed(source)
    attempts = context.config.commits.attempts
    moves = fast_forward and described == (None, None)
    for attempt in range(attempts):
        commits, planned = _planned(context, into, due)
        move = moves and planned.follows
        report = MergeReport(
            planned.source, planned.base.snapshot_id, into, None, planned.commits, move
        )
        try:
            if dry_run:
                found = () if move or planned.done else planned.conflicts(context, policy)
                return replace(report, conflicts=found, dry_run=True)
            if planned.done:
                return replace(report, snapshot_id=planned.head)
            if move:
                refs.fast_forward(into, planned.source, expected=planned.head)
                return replace(report, snapshot_id=planned.source)
            return replace(report, snapshot_id=commits.merge(planned, *described, policy))
        except BranchMovedError:
            context.roots.backoff(attempt)
        except ConflictError as error:
            if not error.conflicts:
                raise
            raise ConflictError(
                f"{source!r} cannot be merged into branch {into!r}, because both have changes in "
                "one place; nothing was committed. Choose a policy, or change one side first",
                error.conflicts,
            ) from error
        finally:
            commits.writer.close("its merge has ended")
    raise ConflictError(
        f"merge into {into!r}: other writers came first {attempts} times; try again later"
    )


def _planned(context: Context, into: str, source: str) -> tuple[SessionCommits, Merging]:
    """A session on the base with the changes to merge, and the plan."""

    def attempt() -> tuple[SessionCommits, Merging]:
        root = context.roots.read().root
        planned = plan_merge(context, root, into, source)
        commits = SessionCommits(SessionWriter(context, planned.base, into, root.version))
        commits.writer.workspace.contents.rebase(planned.base, planned.changes)
        commits.writer.workspace.tip_checks.append(planned.check_tip)
        return commits, planned

    return opened(attempt)


# --- appends behind those of others ----------------------------------------------------------


def _rewrite_appends(
    workspace: Workspace, tip: SnapshotView, changes: ChangeSet, moves: Sequence[Relocation]
) -> ChangeSet:
    """The changes on the tip, with the values that the workspace has appended.

    `changes` are the changes to make on the tip, without these values. Where another commit
    appended within the same chunk, the chunk holds values of both sides: those that this session
    appended are decoded, and written at their new place to the array at the tip.

    Raises
    ------
    ConflictError
        If values before an append were changed too: only appended ones are rewritten.
    """
    there = Workspace(workspace.context, tip, workspace.keys)
    there.contents.rebase(tip, changes)
    store = ManifestStore(there, read_only=False)
    for move in moves:
        values = _appended(workspace, move)
        zarr.open_array(store, path=move.path, mode="r+")[move.to : move.length] = values
    there.flush()
    return there.contents.changes


def _appended(workspace: Workspace, move: Relocation) -> Any:
    """The appended values; values before them in their chunk must be unchanged."""
    first, cells = move.first * move.chunk, [(move.start, move.stop)]
    _, table = find_chunks(workspace.contents, move.path, None, cells)
    now = _values(workspace, workspace.contents.changes, move, first, move.stop)
    before = _values(workspace, ChangeSet(), move, first, move.start)
    reason = ""
    if not _equal(now[: move.start - first], before):
        reason = "values before the append were changed as well"
    elif table is not None and (table.kind == RefKind.VIRTUAL).any():
        reason = f"files cannot begin at {move.to}, within a chunk of {move.chunk}: copy them there"
    if reason:
        raise ConflictError(
            "other commits have appended first, and this append cannot be relocated behind them; "
            "nothing was committed. Open a new session on the branch and make the changes again",
            [Conflict(ConflictKind.APPEND, f"/{move.path}", "chunks", reason)],
        )
    return now[move.start - first :]


def _values(
    workspace: Workspace, changes: ChangeSet, move: Relocation, start: int, stop: int
) -> Any:
    """Values of an array of one axis, read without recording the read."""
    contents = SessionView(workspace.context, workspace.contents.view, changes=changes)
    store = ManifestStore(contents, read_only=True)
    return np.asarray(zarr.open_array(store, path=move.path, mode="r")[start:stop])


def _equal(a: Any, b: Any) -> bool:
    if a.dtype.hasobject or a.dtype.kind == "T":  # their bytes are addresses
        return bool(a.tolist() == b.tolist())
    return bool(a.tobytes() == b.tobytes())
