"""The snapshot that a session is pinned to, and how the session moves to another one.

Invariants: the root version a session starts from is no newer than the snapshot it reads; each
commit, discard or refresh of a writable session gives it new object keys; its lease moves with it,
and is dropped when the session is garbage collected; a closed session can be read, but not changed.
"""

from __future__ import annotations

import logging
import os
import weakref

from zarr_manifests.engine.edit.copies import Copies
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.history.follow import Follower, open_head
from zarr_manifests.engine.history.leases import give_up, move, take
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.root.heartbeat import Held
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.preload import SnapshotPreload
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import (
    InvalidArgumentError,
    ManifestsError,
    ReadOnlyError,
    SessionClosedError,
)

__all__ = ["Pin"]

_LOG = logging.getLogger(__name__)


class Pin:
    """A session's snapshot, workspace, copies, lease and preload. Thread-safe.

    Parameters
    ----------
    context : ReadContext
        The repository.
    view : SnapshotView
        The snapshot.
    branch : str, optional
        The branch to commit to.
    start : int, optional
        The root version that a writable session begins at; without it the session is read-only.
    read_from : str, optional
        The branch that a read-only session reads.
    follow_s : float, optional
        Move to that branch's head automatically, at this interval in seconds.
    lease_ms : int, optional
        Hold a lease with this timeout.
    epoch : int, optional
        The epoch under which the session claimed its branch.
    reporting : bool
        Whether copies of the session's store report what they change.

    Attributes
    ----------
    workspace : Workspace
        What the session reads and changes.
    copies : Copies
        The copies of its store.
    preload : SnapshotPreload
        The manifests fetched in the background.
    read_from : str or None
        The branch that the session reads, or None.
    """

    def __init__(
        self,
        context: Context,
        view: SnapshotView,
        branch: str | None,
        start: int | None,
        *,
        read_from: str | None = None,
        follow_s: float | None = None,
        lease_ms: int | None = None,
        epoch: int | None = None,
        reporting: bool = False,
    ) -> None:
        self.context, self.branch, self._epoch = context, branch, epoch
        self.read_from = branch if read_from is None else read_from
        keys = None if start is None else self._keys_from(start)
        self.workspace = Workspace(context, view, keys)
        self.copies = Copies(self.workspace, reporting=reporting)
        if follow_s is not None and read_from is not None:
            self.workspace.follower = Follower(context, read_from, follow_s)
        self._held: Held | None = None
        if lease_ms is not None and keys is not None:
            owner = f"writer of {branch}"
            self._held = take(context, view.snapshot_id, lease_ms, owner, keys.session_id)
            # A garbage-collected session must not keep its lease alive.
            weakref.finalize(self, context.heart.drop, self._held)
        options = context.config.chunk_manifests.preload
        self.preload = SnapshotPreload(context.objects, context.runtime, options, view)
        # Tied to the workspace, since the store may outlive the session.
        weakref.finalize(self.workspace, self.preload.cancel).atexit = False
        self.preload.start()

    @property
    def read_only(self) -> bool:
        """Whether the session can only read."""
        return self.workspace.keys is None

    @property
    def snapshot_id(self) -> str:
        """Id of the snapshot."""
        return self.workspace.view.snapshot_id

    def check_open(self) -> None:
        """Refuse changes if the session is read-only or closed.

        Raises
        ------
        ReadOnlyError, SessionClosedError
            If it is read-only or closed.
        """
        if self.read_only:
            raise ReadOnlyError(
                "the session is read-only; open one with repo.writable_session(branch)"
            )
        if self.workspace.closed is not None:
            raise SessionClosedError(f"the session is closed: {self.workspace.closed}")

    def move_to(self, view: SnapshotView, start: int | None = None) -> None:
        """Move to this snapshot and drop all changes.

        With `start`, a version of the root, the session gets new object keys and its lease moves
        along. Copies made before cannot be merged any more.
        """
        keys = self.workspace.keys if start is None else self._keys_from(start)
        renamed = start is not None
        if renamed:
            self.copies.bring_in(discard=True)
        self.preload.cancel()
        self.workspace.start_at(view, keys)
        self.copies.begin_anew(renamed=renamed)
        if renamed:
            self._move_lease()

    def refresh(self) -> bool:
        """Move to the head of the branch that the session reads; whether it was newer.

        Raises
        ------
        InvalidArgumentError
            If the session reads no branch, or has changes.
        NotFoundError
            If the branch was deleted.
        """
        if self.read_from is None:
            raise InvalidArgumentError(
                "the session reads a tag or one certain snapshot, of which there is no newer one; "
                "only a session of a branch can be refreshed"
            )
        workspace = self.workspace
        with workspace.lock:
            if workspace.changes:
                raise InvalidArgumentError(
                    "the session has changes; commit or discard them, then refresh"
                )
            if not self.read_only:
                self.check_open()
            # Read first: the session's start must not be newer than the snapshot it reads.
            start = self.context.roots.read().root.version
            view = open_head(self.context, self.read_from, workspace.view)
            if view is workspace.view:
                return False
            if self.read_only:
                workspace.start_at(view, None)
                return True
            self.copies.bring_in()
            if workspace.changes:
                raise InvalidArgumentError(
                    "copies of the session have written; commit or discard that, then refresh"
                )
            self.move_to(view, start)
            return True

    def discard_changes(self) -> None:
        """Drop all uncommitted changes."""
        self.check_open()
        workspace = self.workspace
        with workspace.lock:
            assert workspace.keys is not None
            # New object keys, so that a commit does not refuse what older copies left unmerged.
            start = workspace.keys.start
            if self._held is not None:  # a lease moves only to a session that is not fenced
                start = self.context.roots.read().root.version
            self.move_to(workspace.view, start)

    def close(self, why: str) -> None:
        """Refuse further changes, stop background fetches and give up the lease."""
        self.preload.cancel()
        workspace = self.workspace
        if workspace.closed is None:
            workspace.closed = f"{why}; open another one to make changes"
        if workspace.token is not None and workspace.pid == os.getpid():
            try:
                self.copies.bring_in(discard=True)
            except ManifestsError:
                _LOG.warning("copies of a session were not told that it ended", exc_info=True)
        try:
            self.release_lease()
        except ManifestsError:
            # Nobody renews it any more, so a collection removes it when its time is up.
            _LOG.warning("the lease of a session was not given up", exc_info=True)

    def release_lease(self) -> None:
        """Give up the lease, if there is one; a child of `os.fork` only forgets it."""
        held, self._held = self._held, None
        if held is not None:
            give_up(self.context, held)

    def _keys_from(self, start: int) -> SessionKeys:
        return SessionKeys(start, self.context.runtime, epoch=self._epoch)

    def _move_lease(self) -> None:
        """Move the lease to the session's new keys and snapshot; a parent process keeps its own."""
        keys = self.workspace.keys
        if self._held is None or self._held.is_inherited or keys is None:
            return
        try:
            move(self.context, self._held, keys.session_id, self.snapshot_id)
        except ManifestsError:
            # If the session is fenced by then, its next commit is refused.
            _LOG.warning("the lease of a session could not go on with it", exc_info=True)
