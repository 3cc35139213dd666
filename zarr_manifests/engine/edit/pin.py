"""The snapshot that a session reads, and the writer that moves it.

Invariants: the root version a writer starts from is no newer than the snapshot it reads; each
commit, discard or refresh gives a writer new object keys; its lease moves with it, and is dropped
when the writer is garbage collected; a closed writer can be read, but not changed.
"""

from __future__ import annotations

import logging
import os

from zarr_manifests.engine.edit.forks import Copies
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.history.ancestry import Follower, open_head
from zarr_manifests.engine.history.leases import SessionLease
from zarr_manifests.engine.objects.metadata import SessionKeys
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.read_ahead import SnapshotPreload
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import InvalidArgumentError, ManifestsError

_LOG = logging.getLogger(__name__)


class Pin:
    """The snapshot that a session reads, and its manifests that are fetched in the background.

    Parameters
    ----------
    contents : SessionView
        The snapshot, with a writer's changes over it.
    branch : str, optional
        The branch that the session reads.
    follow_s : float, optional
        Move to that branch's head automatically, at this interval in seconds.

    Attributes
    ----------
    preload : SnapshotPreload
        The manifests fetched in the background.
    """

    def __init__(
        self, contents: SessionView, branch: str | None, follow_s: float | None = None
    ) -> None:
        self.contents, self.branch = contents, branch
        context = contents.context
        if follow_s is not None and branch is not None:
            contents.follower = Follower(context, branch, follow_s)
        options = context.config.chunk_manifests.preload
        self.preload = SnapshotPreload(context.objects, context.runtime, options, contents.view)
        # Tied to the contents, since the store may outlive the session.
        self.preload.cancel_with(contents)
        self.preload.start()

    def head(self) -> SnapshotView:
        """The head of the branch that the session reads, opened.

        Raises
        ------
        InvalidArgumentError
            If the session reads no branch.
        NotFoundError
            If the branch was deleted.
        """
        if self.branch is None:
            raise InvalidArgumentError(
                "the session reads a tag or a fixed snapshot; only a session "
                "of a branch can be refreshed"
            )
        return open_head(self.contents.context, self.branch, self.contents.view)

    def refresh(self) -> bool:
        """Move a session without changes to the head of its branch; whether it was newer."""
        with self.contents.lock:
            view = self.head()
            if view is self.contents.view:
                return False
            self.contents.start_at(view)
            return True


class SessionWriter:
    """What a writable session changes: its workspace, copies and lease. Thread-safe.

    Parameters
    ----------
    context : Context
        The repository.
    view : SnapshotView
        The snapshot.
    branch : str
        The branch to commit to.
    start : int
        The root version that the session begins at.
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
    lease : SessionLease or None
        Its lease, if it holds one.
    pin : Pin
        The snapshot that it reads.
    """

    def __init__(
        self,
        context: Context,
        view: SnapshotView,
        branch: str,
        start: int,
        *,
        lease_ms: int | None = None,
        epoch: int | None = None,
        reporting: bool = False,
    ) -> None:
        self.context, self.branch, self._epoch = context, branch, epoch
        keys = self._keys_from(start)
        self.workspace = Workspace(context, view, keys)
        self.copies = Copies(self.workspace, reporting=reporting)
        self.lease: SessionLease | None = None
        if lease_ms is not None:
            owner = f"writer of {branch}"
            self.lease = SessionLease(context, view.snapshot_id, lease_ms, owner, keys.session_id)
            self.lease.end_with(self)
        self.pin = Pin(self.workspace.contents, branch)

    def move_to(self, view: SnapshotView, start: int | None = None) -> None:
        """Move to this snapshot and drop all changes.

        With `start`, a version of the root, the session gets new object keys and its lease moves
        along. Copies made before cannot be merged any more.
        """
        renamed = start is not None
        keys = self.workspace.keys if start is None else self._keys_from(start)
        if renamed:
            self.copies.bring_in(discard=True)
        self.pin.preload.cancel()
        self.workspace.start_at(view, keys)
        self.copies.begin_anew(renamed=renamed)
        if renamed and self.lease is not None:
            self.lease.move(keys.session_id, view.snapshot_id)

    def refresh(self) -> None:
        """Move a session without changes to the head of its branch.

        Raises
        ------
        NotFoundError
            If the branch was deleted.
        """
        # Read first: the session's start must not be newer than the snapshot it reads.
        start = self.context.roots.read().root.version
        view = self.pin.head()
        if view is not self.workspace.contents.view:
            self.move_to(view, start)

    def discard_changes(self) -> None:
        """Drop all uncommitted changes."""
        workspace = self.workspace
        workspace.check_open()
        with workspace.lock:
            # New object keys, so that a commit does not refuse what older copies left unmerged.
            start = workspace.keys.start
            if self.lease is not None and not self.lease.released:  # it moves only if not fenced
                start = self.context.roots.read().root.version
            self.move_to(workspace.contents.view, start)

    def drop(self, why: str) -> None:
        """Drop all uncommitted changes, and close."""
        with self.workspace.lock:
            self.move_to(self.workspace.contents.view)
            self.close(why)

    def close(self, why: str) -> None:
        """Refuse further changes, stop background fetches and give up the lease."""
        self.pin.preload.cancel()
        workspace = self.workspace
        if workspace.closed is None:
            workspace.closed = f"{why}; open another one to make changes"
        if workspace.token is not None and workspace.pid == os.getpid():
            try:
                self.copies.bring_in(discard=True)
            except ManifestsError:
                _LOG.warning("copies of a session were not told that it ended", exc_info=True)
        try:
            if self.lease is not None:
                self.lease.release()  # a child of `os.fork` only forgets it
        except ManifestsError:
            # Nobody renews it any more, so a collection removes it when its time is up.
            _LOG.warning("the lease of a session was not given up", exc_info=True)

    def _keys_from(self, start: int) -> SessionKeys:
        return SessionKeys(start, self.context.runtime, epoch=self._epoch)
