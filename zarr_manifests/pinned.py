"""The snapshot that a session is pinned to, and how it goes on to another.

Invariants: the session's start is no younger than the snapshot it reads; names of objects that it
has written before it went on are not taken for those of after; a lease goes on with it, and is
dropped when the session is forgotten; a session that is closed can be read, and takes no changes.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

from zarr_manifests.engine.edit.forks import merge_reports, refuse_unmerged
from zarr_manifests.engine.edit.merge_forks import Owners
from zarr_manifests.engine.edit.reporting_copies import check_reporting, close_token, open_token
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.history.follow import Follower, open_head
from zarr_manifests.engine.history.leases import give_up, move, take
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.root.epochs import check_fence
from zarr_manifests.engine.root.heartbeat import Held
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.preload import Preload
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import (
    InvalidArgumentError,
    ManifestsError,
    ReadOnlyError,
    SessionClosedError,
)
from zarr_manifests.plain import plain_text
from zarr_manifests.store import ManifestStore

__all__ = ["Pinned"]

_LOG = logging.getLogger(__name__)


class Pinned:
    """A snapshot, the changes on it, and what is held for them; what `Session` is besides."""

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
        serializable: bool = False,
        reporting: bool = False,
    ) -> None:
        self._context = context
        self._serializable = serializable
        self._branch = branch
        self._held: Held | None = None
        self._epoch = epoch
        self._indexed = branch if read_from is None else read_from
        keys = None if start is None else self._keys_from(start)
        self._workspace = Workspace(context, view, keys)
        self._reporting = reporting
        self._shut = self._gathered = False
        if reporting and keys is not None:
            check_reporting(context.storage, keys)
            self._workspace.token = open_token(context.storage, keys)
        if follow_s is not None and read_from is not None:
            self._workspace.follower = Follower(context, read_from, follow_s)
        if lease_ms is not None and keys is not None:
            owner = f"writer of {branch}"
            self._held = take(context, view.snapshot_id, lease_ms, owner, keys.session_id)
            # A session that is forgotten must not keep its lease alive for ever.
            weakref.finalize(self, context.heart.drop, self._held)
        options = context.config.chunk_manifests.preload
        self._preload = Preload(context.objects, context.runtime, options, view)
        # The store may live longer than the session, so it is the workspace that counts.
        weakref.finalize(self._workspace, self._preload.cancel).atexit = False
        self._preload.start()
        self._owners = Owners()
        self._merged = False

    def __repr__(self) -> str:
        mode = "read-only" if self.read_only else f"writable on {self._branch!r}"
        return f"<Session {plain_text(self._context.storage.url)} at {self.snapshot_id}, {mode}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a session cannot be pickled: pickle session.fork(), or session.store for reading"
        )

    @property
    def read_only(self) -> bool:
        """Whether the session can only read."""
        return self._workspace.keys is None

    @property
    def branch(self) -> str | None:
        """The branch a writable session commits to."""
        return self._branch

    @property
    def snapshot_id(self) -> str:
        """Id of the snapshot the session reads, or that its changes are made on."""
        return self._workspace.view.snapshot_id

    @property
    def store(self) -> ManifestStore:
        """The session's contents as a Zarr store.

        A writable one is for this process and its threads. Pickled, as dask does to write from
        other processes, it is a copy, and what that writes is in no commit unless it is merged:
        so pickling warns (`PickledStoreWarning`), and a commit that would leave something out
        raises `UnmergedForksError`. Write datasets with `zarr_manifests.write`; give each task
        `Session.fork()` and merge what comes back; or open the session with `copies="report"`. The
        store of a read-only session can be pickled.
        """
        return ManifestStore(self._workspace, read_only=self.read_only)

    @property
    def has_changes(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self._workspace.changes)

    def close(self) -> None:
        """Fetch nothing more in the background, take no more changes, and give up the lease.

        What was not committed cannot be committed any more. What was opened from the session's
        store can still be read. A session closes at the end of its `with` block, too; one that is
        forgotten need not be closed.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://close-example")
        >>> with repo.writable_session() as session:
        ...     _ = zarr.create_group(session.store, path="air")
        ...     _ = session.commit("make a group")
        >>> with repo.readonly_session() as session:
        ...     list(zarr.open_group(session.store, mode="r"))
        ['air']
        """
        self._close("close() was called")

    def _close(self, why: str) -> None:
        self._preload.cancel()
        if self._workspace.closed is None:
            self._workspace.closed = f"{why}; open another one to make changes"
        if self._workspace.token is not None and self._workspace.pid == os.getpid():
            try:
                self._bring_in(discard=True)
            except ManifestsError:
                _LOG.warning("copies of a session were not told that it ended", exc_info=True)
        try:
            self.release_lease()
        except ManifestsError:
            # Nobody renews it any more, so that a collection removes it once its time is up.
            _LOG.warning("the lease of a session was not given up", exc_info=True)

    def refresh(self) -> bool:
        """Go on to the newest snapshot of the branch that the session reads.

        Returns
        -------
        bool
            Whether there was a newer one.

        Raises
        ------
        InvalidArgumentError
            If the session reads a tag or a snapshot by its id, or has changes.
        NotFoundError
            If the branch was deleted.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://refresh-example")
        >>> reader = repo.readonly_session("main")
        >>> with repo.transaction(message="make air") as store:
        ...     _ = zarr.create_group(store, path="air")
        >>> reader.refresh(), list(zarr.open_group(reader.store, mode="r"))
        (True, ['air'])
        """
        if self._indexed is None:
            raise InvalidArgumentError(
                "the session reads a tag or one certain snapshot, of which there is no newer one; "
                "only a session of a branch can be refreshed"
            )
        workspace = self._workspace
        with workspace.lock:
            if workspace.changes:
                raise InvalidArgumentError(
                    "the session has changes; commit or discard them, then refresh"
                )
            if not self.read_only:
                self._check_open()
            # Read first: the session's start must not be younger than the snapshot it reads.
            start = self._context.roots.read().root.version
            view = open_head(self._context, self._indexed, workspace.view)
            if view is workspace.view:
                return False
            if self.read_only:
                workspace.start_at(view, None)
            else:
                self._bring_in()
                if workspace.changes:
                    raise InvalidArgumentError(
                        "copies of the session have written; commit or discard that, then refresh"
                    )
                self._start_at(view, self._keys_from(start))
                self._move_lease()
            return True

    def release_lease(self) -> None:
        """Give up the lease that the session was opened with, if any; the fence counts for it.

        A child of `os.fork` forgets the lease; it is its parent's, who still has it.
        """
        held, self._held = self._held, None
        if held is not None:
            give_up(self._context, held)

    def discard_changes(self) -> None:
        """Forget everything that was not committed."""
        self._check_open()
        workspace = self._workspace
        with workspace.lock:
            assert workspace.keys is not None
            # A new name, so that what copies of the old session wrote is not missed at a commit.
            start = workspace.keys.start
            if self._held is not None:  # a lease can go on only with a session before no fence
                start = self._context.roots.read().root.version
            self._start_at(workspace.view, self._keys_from(start))
            self._move_lease()

    def check_forks(self) -> None:
        """Refuse to leave out what pickled copies of the store, or forked children, have written.

        Raises
        ------
        UnmergedForksError
            If there are copies that changed anything, and none was merged.
        """
        workspace = self._workspace
        if workspace.token is None and workspace.copied and not self._merged:
            refuse_unmerged(workspace)

    def _bring_in(self, *, discard: bool = False) -> None:
        """Let no copy change anything any more; bring in what they reported, or refuse the rest.

        The reports are brought in once: who retries a commit has them. They are left out only of
        the commit that says so, should it fail.
        """
        workspace = self._workspace
        if workspace.token is None:
            if not discard:
                self.check_forks()
        elif not self._gathered:
            roots = self._context.roots
            if not discard and workspace.keys is not None:  # else they may have been collected
                check_fence(roots, roots.read().root, workspace.keys)
            if not self._shut:
                close_token(self._context.storage, workspace.token)
                self._shut = True
            if not discard:
                merge_reports(workspace, self._owners)
                self._gathered = True

    def _keys_from(self, start: int) -> SessionKeys:
        return SessionKeys(start, self._context.runtime, epoch=self._epoch)

    def _start_at(self, view: SnapshotView, keys: SessionKeys) -> None:
        same = keys is self._workspace.keys
        if not same:
            self._bring_in(discard=True)
        self._preload.cancel()
        self._workspace.start_at(view, keys)
        self._owners = Owners()
        self._merged = False
        if self._reporting and not same:
            self._workspace.token = self._new_token(keys)
            self._shut = self._gathered = False

    def _new_token(self, keys: SessionKeys) -> str | None:
        """The token of what the session is now; without it, copies are as without the option."""
        try:
            return open_token(self._context.storage, keys)
        except ManifestsError:
            _LOG.warning("copies of the session cannot report until its commit", exc_info=True)
            return None

    def _move_lease(self) -> None:
        """Let the lease go on with what the session is now; a parent's stays with the parent's."""
        keys = self._workspace.keys
        if self._held is None or self._held.is_inherited or keys is None:
            return
        try:
            move(self._context, self._held, keys.session_id, self.snapshot_id)
        except ManifestsError:
            # The next commit is refused, should the fence have passed the session by then.
            _LOG.warning("the lease of a session could not go on with it", exc_info=True)

    def _check_open(self) -> None:
        if self.read_only:
            raise ReadOnlyError(
                "the session is read-only; open one with repo.writable_session(branch)"
            )
        if self._workspace.closed is not None:
            raise SessionClosedError(f"the session is closed: {self._workspace.closed}")
