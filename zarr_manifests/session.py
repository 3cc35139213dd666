"""Sessions: one snapshot to read, or one set of changes to commit.

A session is pinned to a snapshot. A read-only one never sees anything else. A writable one lays
its changes over the snapshot; `commit` makes them a new snapshot on the branch and goes on from
there, all or nothing. Forks carry a copy of the session to other processes, and `merge` brings
their changes back.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from zarr_manifests.appends import put_behind
from zarr_manifests.config import Compaction
from zarr_manifests.display import html_page
from zarr_manifests.engine.arrange import move_node, node_path, reindex_chunks, shift_chunks
from zarr_manifests.engine.background import compact_soon
from zarr_manifests.engine.changes import ChangeSet, ForkState, Owners
from zarr_manifests.engine.chunks import SessionKeys
from zarr_manifests.engine.commit import (
    Committed,
    checked_message,
    checked_metadata,
    delta_of,
    deltas_between,
)
from zarr_manifests.engine.context import Context
from zarr_manifests.engine.following import Follower, open_head
from zarr_manifests.engine.forks import freeze, merge_forks, refuse_unmerged
from zarr_manifests.engine.heartbeat import Held
from zarr_manifests.engine.index import initialized_coords
from zarr_manifests.engine.leases import give_up, move, take
from zarr_manifests.engine.observed import observed_commit, observed_compaction
from zarr_manifests.engine.patch import combined, patch
from zarr_manifests.engine.preload import Preload, PreloadReport
from zarr_manifests.engine.rebasing import Rebasing, rebase_changes
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.errors import (
    CommitOutcomeUnknownError,
    ConflictError,
    InvalidArgumentError,
    ManifestsError,
    ReadOnlyError,
    SessionClosedError,
)
from zarr_manifests.format.delta import CommitKind
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.format.root import Branch
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import IndexArray
from zarr_manifests.history import ArrayUsage, Status, Totals
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.arrange import Places, moved_paths
from zarr_manifests.planning.compaction import CompactionMode, is_due
from zarr_manifests.planning.rebase import Policy, check_policy
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.store import ManifestStore

__all__ = ["Fork", "PreloadReport", "Session", "Status"]

_LOG = logging.getLogger(__name__)


class Fork:
    """A copy of a session for another process: pickle it, write to its `store`, send it back.

    Made by `Session.fork`; its changes reach a commit only through `Session.merge`.
    """

    def __init__(self, state: ForkState, runtime: Runtime = SYSTEM) -> None:
        self._store = ManifestStore(state, read_only=False, runtime=runtime)

    def __repr__(self) -> str:
        return f"<Fork {self._store!r}>"

    @property
    def store(self) -> ManifestStore:
        """The Zarr store to write to."""
        return self._store

    def __reduce__(self) -> tuple[Any, ...]:
        return Fork, (self._store.freeze(explicit=True),)


class Session:
    """A view of one snapshot, and of the changes made on top of it.

    Made by `Repository.readonly_session`, `Repository.writable_session` or
    `Repository.transaction`.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> repo = zm.Repository.create("memory://session-example")
    >>> session = repo.writable_session("main")
    >>> _ = zarr.create_group(session.store, path="air")
    >>> print(session.status())
    + /
    + /air
    >>> snapshot_id = session.commit("make a group for air temperature")
    >>> session.status()
    Status(created=(), updated=(), deleted=(), chunks={}, moved={})
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
        serializable: bool = False,
    ) -> None:
        self._context = context
        self._serializable = serializable
        self._branch = branch
        self._held: Held | None = None
        self._epoch = epoch
        self._indexed = branch if read_from is None else read_from
        keys = None if start is None else self._keys_from(start)
        self._workspace = Workspace(context, view, keys)
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
        self._append_dim: str | None = None

    def __repr__(self) -> str:
        mode = "read-only" if self.read_only else f"writable on {self._branch!r}"
        return f"<Session {self._context.storage.url} at {self.snapshot_id}, {mode}>"

    def _repr_html_(self) -> str:
        view = self._workspace.view
        facts = [
            ("at", self._context.storage.url),
            ("snapshot", view.snapshot_id),
            ("message", view.snapshot.message),
            ("mode", "read-only" if self.read_only else f"writable on branch {self._branch!r}"),
        ]
        if not self.read_only:
            facts.append(("changes", str(self.status())))
        return html_page("Session", facts, self._workspace.nodes())

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
        """The session's contents as a Zarr store."""
        return ManifestStore(self._workspace, read_only=self.read_only)

    @property
    def has_changes(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self._workspace.changes)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        self._preload.cancel()
        if self._workspace.closed is None:
            self._workspace.closed = "close() was called; open another one to make changes"
        try:
            self.release_lease()
        except ManifestsError:
            # Nobody renews it any more, so that a collection removes it once its time is up.
            _LOG.warning("the lease of a session was not given up", exc_info=True)

    def preload_report(self, wait_s: float = 0.0) -> PreloadReport:
        """What was fetched in the background since the session opened, and what was not, and why.

        Parameters
        ----------
        wait_s : float, default 0
            Wait so many seconds at most for it to end.

        Examples
        --------
        >>> import numpy as np, xarray as xr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://preload-example")
        >>> with repo.transaction(message="a coordinate") as store:
        ...     _ = xr.Dataset(coords={"x": np.arange(3)}).to_zarr(store, consolidated=False)
        >>> report = repo.readonly_session().preload_report(wait_s=1)
        >>> [(one.state.value, one.refs, one.why) for one in report.manifests]
        [('skipped', 1, 'it is here already')]
        """
        if wait_s > 0:
            self._preload.wait(wait_s)
        return self._preload.report()

    def status(self) -> Status:
        """What has been changed and not committed."""
        workspace = self._workspace
        with workspace.lock:
            before, changes = workspace.view.nodes, workspace.changes.copy()
        nodes = workspace.nodes()
        paths = {node.node_id: node.path for node in nodes.values()}
        opaque = {n.node_id for n in nodes.values() if n.kind is NodeKind.OPAQUE}
        moved = moved_paths(before, nodes)
        old_paths = {new: old for old, new in moved.items()}
        made = [n for n in changes.nodes.values() if n is not None]
        created = [n.path for n in made if n.path not in before and n.path not in old_paths]
        updated = [
            n.path
            for n in made
            if (n.path in before and n.path not in old_paths)
            or (n.path in old_paths and before[old_paths[n.path]].documents != n.documents)
        ]
        gone = [p for p, node in changes.nodes.items() if node is None and p not in moved]
        return Status(
            tuple(sorted(map(_absolute, created))),
            tuple(sorted(map(_absolute, updated))),
            tuple(sorted(map(_absolute, gone))),
            {
                _absolute(paths[node]): count
                for node in changes.touched()
                if node in paths and node not in opaque and (count := changes.count(node))
            },
            {_absolute(old): _absolute(new) for old, new in moved.items()},
        )

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
                self.check_forks()
            # Read first: the session's start must not be younger than the snapshot it reads.
            start = self._context.roots.read().root.version
            view = open_head(self._context, self._indexed, workspace.view)
            if view is workspace.view:
                return False
            if self.read_only:
                workspace.start_at(view, None)
            else:
                self._start_at(view, self._keys_from(start))
                self._move_lease()
            return True

    def release_lease(self) -> None:
        """Give up the lease that the session was opened with, if any; the fence counts for it."""
        held, self._held = self._held, None
        if held is not None:
            give_up(self._context, held)

    def _move_lease(self) -> None:
        """Let the lease go on with what the session is now."""
        keys = self._workspace.keys
        if self._held is None or keys is None:
            return
        try:
            move(self._context, self._held, keys.session_id, self.snapshot_id)
        except ManifestsError:
            # The next commit is refused, should the fence have passed the session by then.
            _LOG.warning("the lease of a session could not go on with it", exc_info=True)

    # --- moving what is there ----------------------------------------------------------------

    def move(self, old: str, new: str) -> None:
        """Move a group or array, with everything below it, to another path.

        Only metadata changes: no chunk is read or written, and every node keeps its history.
        What documents say (dimension names, attributes) stays as it is.

        Parameters
        ----------
        old, new : str
            Paths, with or without a leading slash. The group that `new` lies in must exist.

        Raises
        ------
        NotFoundError
            If there is nothing at `old`, or no group for `new`.
        AlreadyExistsError
            If there is something at or below `new`.
        InvalidArgumentError
            If `old` is the root, or `new` lies below `old` or below an array.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.Repository.create("memory://move-example").writable_session()
        >>> _ = zarr.create_group(session.store, path="air")
        >>> session.move("air", "water")
        >>> list(zarr.open_group(session.store, mode="r"))
        ['water']
        """
        self._check_open()
        move_node(self._workspace, old, new)

    def rename(self, path: str, name: str) -> None:
        """Give a group or array another name in the same group; as `move` otherwise."""
        if not name or "/" in name:
            raise InvalidArgumentError(f"{name!r} is no name; session.move takes a path")
        above = node_path(path).rpartition("/")[0]
        self.move(path, f"{above}/{name}")

    def shift_array(self, path: str, offset_in_chunks: Sequence[int]) -> None:
        """Move all chunks of an array by whole chunks; none is read or written.

        What would come to lie outside the array is dropped, and what becomes vacant reads as fill
        value. The array keeps its shape; resize it first to make room. A chunk at the array's
        edge moves with all it holds, including what lies beyond the edge.

        Parameters
        ----------
        path : str
            The array.
        offset_in_chunks : sequence of int
            How far, one number an axis, in chunks; negative towards the beginning.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If there is not one whole number for each axis.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.Repository.create("memory://shift-example").writable_session()
        >>> a = zarr.create_array(session.store, name="a", shape=(6,), chunks=(2,), dtype="i4")
        >>> a[:] = [1, 2, 3, 4, 5, 6]
        >>> session.shift_array("a", (-1,))
        >>> a[:]
        array([3, 4, 5, 6, 0, 0], dtype=int32)
        """
        self._check_open()
        shift_chunks(self._workspace, path, offset_in_chunks)

    def reindex_array(self, path: str, places: Places) -> None:
        """Move the chunks of an array to other places in it; none is read or written.

        Parameters
        ----------
        path : str
            The array.
        places : mapping, callable or int[n, 2 * ndim]
            From a chunk's coordinate to its new one, or to None to drop the chunk. A callable is
            asked once for each chunk that is there, which takes seconds for a million. An array
            has a row a chunk, the old coordinate and then the new one, where -1 on every axis
            drops the chunk. Chunks that are not named stay; what is named and not there does not
            matter.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If a chunk would lie outside the array, or two at one place, or a coordinate has not
            one whole number for each axis; nothing is changed.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.Repository.create("memory://reindex-example").writable_session()
        >>> a = zarr.create_array(session.store, name="a", shape=(6,), chunks=(2,), dtype="i4")
        >>> a[:] = [1, 2, 3, 4, 5, 6]
        >>> session.reindex_array("a", lambda chunk: (2 - chunk[0],))
        >>> a[:]
        array([5, 6, 3, 4, 1, 2], dtype=int32)
        """
        self._check_open()
        reindex_chunks(self._workspace, path, places)

    # --- committing --------------------------------------------------------------------------

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

    def _keys_from(self, start: int) -> SessionKeys:
        return SessionKeys(start, self._context.runtime, epoch=self._epoch)

    def _start_at(self, view: SnapshotView, keys: SessionKeys) -> None:
        self._preload.cancel()
        self._workspace.start_at(view, keys)
        self._owners = Owners()
        self._merged = False

    def check_forks(self) -> None:
        """Refuse to leave out what pickled copies of the store, or forked children, have written.

        Raises
        ------
        UnmergedForksError
            If there are copies that changed anything, and none was merged.
        """
        if self._workspace.copied and not self._merged:
            refuse_unmerged(self._workspace)

    def commit(
        self,
        message: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        rebase: bool | Policy = True,
        retries: int | None = None,
        discard_unmerged: bool = False,
    ) -> str:
        """Make the changes a new snapshot on the branch, all or nothing.

        If other commits came first, this one is put on top of them where that is safe, as
        `rebase` does.

        Parameters
        ----------
        message : str
            Why; shown by `ancestry` and `zarr-manifests log`.
        metadata : mapping, optional
            Anything msgpack can hold, kept with the snapshot.
        rebase : bool, {"fail", "ours", "theirs"} or callable, default True
            What to do when other commits came first: with True (the same as "fail") go on top of
            them where nothing is in the way, with False give up, else decide by this policy.
        retries : int, optional
            How often to try again when others are faster; else as configured (`commit-attempts`).
        discard_unmerged : bool, default False
            Commit although pickled copies of the store, or children of `os.fork`, changed
            something that was not merged.

        Returns
        -------
        str
            The new snapshot's id.

        Raises
        ------
        InvalidArgumentError
            If there is nothing to commit, or the message or metadata cannot be stored.
        ConflictError
            If the changes cannot be put on top of what came first. The session keeps them.
        UnmergedForksError
            If copies of the store changed anything and none was merged.
        FencedError
            If the session is older than the repository's fence, or than another writer's claim
            on the branch.
        CommitOutcomeUnknownError
            If it cannot be found out whether the commit took effect. The session is closed.
        StorageError
            If an upload failed; nothing was committed and the session keeps its changes.
        """
        self._check_open()
        message, metadata = checked_message(message), checked_metadata(metadata)
        rebasing = self._rebasing(rebase, retries)
        workspace = self._workspace
        with workspace.lock:
            self._check_open()  # another thread's commit may have closed it
            if not discard_unmerged:
                self.check_forks()
            if not workspace.changes:
                raise InvalidArgumentError("nothing to commit: the session has no changes")
            return self._land(message, metadata, rebasing=rebasing)

    def rebase(self, policy: Policy = "fail") -> str:
        """Put the changes on top of what others have committed to the branch meanwhile.

        Afterwards the session reads the others' commits too, with its own changes over them, and
        nothing is committed. Forks made before cannot be merged any more.

        Parameters
        ----------
        policy : {"fail", "ours", "theirs"} or callable, default "fail"
            Who wins where both sides wrote other bytes to a chunk or another value to an
            attribute, or where this session deleted what others wrote to. A function is given each
            `Conflict` and answers with one of the words.

        Returns
        -------
        str
            Id of the snapshot that the session's changes are made on now.

        Raises
        ------
        ConflictError
            If the changes cannot be put on top of what came first. The session is as it was.
        InvalidArgumentError
            If there is no such policy.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://rebase-example")
        >>> with repo.transaction(message="make a") as store:
        ...     a = zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i4")
        >>> session = repo.writable_session()
        >>> a = zarr.open_array(session.store, path="a")
        >>> a[:2] = 1
        >>> with repo.transaction(message="the other chunk") as store:
        ...     zarr.open_array(store, path="a")[2:] = 2
        >>> snapshot_id = session.rebase()
        >>> a[:]
        array([1, 1, 2, 2], dtype=int32)
        """
        self._check_open()
        rebasing = self._rebasing(policy, None)
        workspace, context = self._workspace, self._context
        with workspace.lock:
            self._check_open()
            assert self._branch is not None
            root = context.roots.with_branch(context.roots.read().root, self._branch)
            tip = root.branches.get(self._branch)
            if tip is None:
                raise ConflictError(
                    f"branch {self._branch!r} was deleted since the session began; create it "
                    "again at the session's snapshot, then commit"
                )
            if tip.head.key != workspace.view.ref.key:
                if self._append_dim is not None:
                    workspace.flush()
                moved = self._put_behind(workspace.changes, rebasing, tip)
                if moved is None:
                    moved = rebase_changes(
                        context, workspace.view, tip, workspace.changes, rebasing
                    )
                workspace.rebase(*moved)
        return self.snapshot_id

    def append_mode(self, dim: str, *, relocate: bool = True) -> None:
        """Have appends along a dimension land behind those that others commit meanwhile.

        Appends are positional: of two that were made at the same time, the second would be in
        conflict. With this, from now on, its positions shift at the commit, and its values do
        not. No chunk is touched where the shift is by whole chunks. Where it is not, arrays of
        one axis are decoded and written anew; arrays of more axes are a conflict, and so is
        whatever else was changed of an array that shifts, and an array that has the dimension
        and was not made longer by both.

        What depends on positions elsewhere (an index, an array of offsets) is not known here and
        does not shift.

        Parameters
        ----------
        dim : str
            The dimension, as arrays name it.
        relocate : bool, default True
            False takes it back.

        Raises
        ------
        InvalidArgumentError
            If the dimension is no name.

        Examples
        --------
        >>> import xarray as xr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://append-mode-example")
        >>> ds = xr.Dataset({"t": ("time", [1.0, 2.0])}, {"time": [0, 1]})
        >>> _ = zm.write(ds, repo, message="create")
        >>> session = repo.writable_session()
        >>> session.append_mode("time", relocate=True)
        >>> options = dict(append_dim="time", consolidated=False)
        >>> _ = ds.assign_coords(time=[4, 5]).to_zarr(session.store, **options)
        >>> more = ds.assign_coords(time=[2, 3])
        >>> _ = zm.write(more, repo, message="by somebody else", append_dim="time")
        >>> _ = session.commit("behind it")
        >>> xr.open_dataset(repo, engine="zarr_manifests").time.values
        array([0, 1, 2, 3, 4, 5])
        """
        self._check_open()
        name = _dimension(dim)
        self._append_dim = name if relocate else None

    def _put_behind(
        self, changes: ChangeSet, rebasing: Rebasing, tip: Branch
    ) -> tuple[SnapshotView, ChangeSet] | None:
        """The changes behind what others have appended, if that is asked for and due."""
        if self._append_dim is None or not rebasing.allowed:
            return None
        return put_behind(self._context, self._workspace, changes, self._append_dim, rebasing, tip)

    def _rebasing(self, rebase: bool | Policy, retries: int | None) -> Rebasing:
        policy: Policy = "fail" if isinstance(rebase, bool) else rebase
        check_policy(policy)
        if retries is not None and (type(retries) is not int or retries < 0):
            raise InvalidArgumentError(f"retries is a number of times, and not {retries!r}")
        attempts = None if retries is None else retries + 1
        return Rebasing(rebase is not False, policy, self._serializable, attempts)

    def amend(
        self,
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        discard_unmerged: bool = False,
    ) -> str:
        """Replace the head of the branch by one commit of what it did and the session's changes.

        The new snapshot's parent is the head's parent. The old head is in the branch's history
        no more; tags and other branches that point to it stay there.

        Parameters
        ----------
        message : str, optional
            The head's own if none is given.
        metadata : mapping, optional
            The head's own if none is given.
        discard_unmerged : bool, default False
            As in `commit`.

        Returns
        -------
        str
            The new snapshot's id.

        Raises
        ------
        InvalidArgumentError
            If nothing is to be changed; or if the session's snapshot is the first of the
            repository or a rewrite, which cannot be replaced.
        ConflictError
            If the session's snapshot is not the branch's head any more.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://amend-example")
        >>> session = repo.writable_session()
        >>> _ = zarr.create_group(session.store, path="air")
        >>> _ = session.commit("make a gruop")
        >>> _ = session.amend("make a group")
        >>> [info.message for info in repo.ancestry()]
        ['make a group', 'create repository']
        """
        self._check_open()
        workspace = self._workspace
        with workspace.lock:
            self._check_open()
            if not discard_unmerged:
                self.check_forks()
            head, old = workspace.view, workspace.view.snapshot
            if old.parent is None or old.kind is CommitKind.REWRITE:
                what = "the first of the repository" if old.parent is None else "a rewrite"
                raise InvalidArgumentError(
                    f"snapshot {head.snapshot_id} is {what} and cannot be amended; commit instead"
                )
            if not workspace.changes and message is None and metadata is None:
                raise InvalidArgumentError("nothing to amend: no changes, message or metadata")
            message = checked_message(old.message if message is None else message)
            metadata = checked_metadata(old.metadata if metadata is None else metadata)
            return self._land(message, metadata, amended=head)

    def _commit_patch(
        self, done: SnapshotView, message: str, metadata: Mapping[str, Any], *, undo: bool
    ) -> str:
        """Commit what the commit `done` did, or undo it; for `Repository.revert`, `cherry_pick`.

        It takes chunk refs over from `done`, or from its parent, so that one has to be in history
        still when this lands.
        """
        message, metadata = checked_message(message), checked_metadata(metadata)
        source = done.snapshot.parent_id if undo else done.snapshot_id
        if done.snapshot.parent is None or source is None:
            raise InvalidArgumentError(
                f"snapshot {done.snapshot_id} is the first of the repository; no commit made it"
            )
        self._workspace.changes = patch(self._context, done, self._workspace.view, undo=undo)
        if not self.has_changes:
            raise InvalidArgumentError(
                f"snapshot {done.snapshot_id} has nothing to {'undo' if undo else 'do'} on branch "
                f"{self._branch!r}: it is so already"
            )
        return self._land(message, metadata, source=source)

    def _land(
        self,
        message: str,
        metadata: Mapping[str, Any],
        *,
        amended: SnapshotView | None = None,
        source: str | None = None,
        rebasing: Rebasing | None = None,
    ) -> str:
        """Commit the changes, together with what the head that is amended did; the new id."""
        workspace, context = self._workspace, self._context
        assert workspace.keys is not None
        assert self._branch is not None
        view, delta = workspace.view, None
        if amended is not None and amended.snapshot.parent is not None:
            view = context.open_view(amended.snapshot.parent)
            delta = delta_of(context, amended.snapshot)
        try:
            with workspace.packed() as (changes, packs):
                if delta is not None:
                    changes = combined(context, view, delta, changes)
                how = rebasing or self._rebasing(True, None)
                how = replace(how, relocate=partial(self._put_behind, changes, how))
                done = observed_commit(
                    context,
                    view,
                    changes,
                    workspace.keys,
                    self._branch,
                    message,
                    metadata,
                    packs,
                    replaces=amended,
                    source=source,
                    rebasing=how,
                )
        except BaseException as error:
            if isinstance(error, CommitOutcomeUnknownError) or not isinstance(
                error, ManifestsError
            ):  # an interrupt may have come after the swap
                workspace.closed = "whether its last commit took effect is not known"
            raise
        self._go_on(done)
        return snapshot_id_of(done.head.key)

    def _go_on(self, done: Committed) -> None:
        """Continue from what was committed; the commit stands whatever becomes of this."""
        assert self._branch is not None
        context = self._context
        try:
            view = context.open_view(done.head)
        except BaseException as error:
            # The old snapshot with the changes on it still reads right; only that it has been
            # committed must not be forgotten.
            self._workspace.closed = "its last commit landed, but could not be opened again"
            if not isinstance(error, ManifestsError):
                raise
            _LOG.warning("going on after a commit to %r failed", self._branch, exc_info=True)
            return
        keys = self._keys_from(done.at.root.version)
        self._start_at(view, keys)
        self._move_lease()
        rewrite, options = context.config.commits.mode == "rewrite", context.config.compaction
        if not rewrite and (options.mode == "MANUAL" or not _is_due(view.snapshot, options)):
            return
        if not rewrite and options.mode == "ASYNC":
            compact_soon(context, self._branch)
            return
        try:
            ratio = 0.0 if rewrite else None
            head = observed_compaction(context, self._branch, CompactionMode.MAJOR, ratio)[1]
            # Somebody may have reset the branch meanwhile; then it is not of this commit.
            if head is not None and deltas_between(context, done.head, head) is not None:
                self._start_at(context.open_view(head), keys)
        except ManifestsError:
            # The next commit makes it due again.
            _LOG.warning("compacting %r failed", self._branch, exc_info=True)

    def du(self) -> tuple[ArrayUsage, ...]:
        """Chunks and bytes of every array, and of every key that is no part of one.

        Counted from manifests, changes of the session included; no chunk is read.
        """
        nodes = [n for n in self._workspace.nodes().values() if n.kind is not NodeKind.GROUP]
        calls = [partial(self._workspace.chunks, node) for node in nodes]
        tables = self._context.runtime.parallel(calls)
        found = map(ArrayUsage.of, (_absolute(node.path) for node in nodes), tables)
        return tuple(sorted(found, key=lambda usage: usage.path))

    def totals(self) -> Totals:
        """How many chunks and bytes there are in the session's snapshot, as it says itself.

        What the session has changed is not in it. Nothing is read for it; see `Repository.totals`.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.Repository.create("memory://session-totals-example").writable_session()
        >>> array = zarr.create_array(session.store, name="a", shape=(8,), chunks=(2,), dtype="i2")
        >>> array[4:] = 7
        >>> _ = session.commit("fill half")
        >>> session.totals()["a"].total.refs
        2
        """
        return Totals.of(self._workspace.view)

    def initialized_chunks(self, path: str, region: Sequence[slice] | None = None) -> IndexArray:
        """Coordinates (int64[n, ndim]) of the chunks of an array that are there, in C order.

        Changes of the session included. Nothing is listed and no chunk is read; where the index of
        initialised chunks is up to date (`Repository.build_index`), no manifest of the base either.

        Parameters
        ----------
        path : str
            The array.
        region : sequence of slice, optional
            One slice of chunk coordinates an axis; all if none is given.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If the region has other axes than the array, or a step.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.Repository.create("memory://present-example").writable_session()
        >>> array = zarr.create_array(session.store, name="a", shape=(8,), chunks=(2,), dtype="i2")
        >>> array[4:] = 7
        >>> session.initialized_chunks("a").tolist()
        [[2], [3]]
        >>> session.initialized_chunks("a", [slice(0, 3)]).tolist()
        [[2]]
        """
        return initialized_coords(
            self._context, self._workspace, path, region, branch=self._indexed
        )

    def fork(self) -> Fork:
        """A copy of the session for another process.

        Raises
        ------
        ReadOnlyError
            If the session is read-only: pickle its store instead.
        """
        self._check_open()
        return Fork(freeze(self._workspace, explicit=True), self._context.runtime)

    def merge(self, *forks: Fork | ManifestStore) -> None:
        """Bring the changes of forks, or of their stores, into this session.

        Merging the same copy twice counts once. Forks that wrote the same bytes to the same
        chunk (as retried tasks do) agree.

        Raises
        ------
        InvalidArgumentError
            If a fork belongs to another repository, session or base.
        ConflictError
            If two writers changed the same chunk or document differently. Nothing was merged.
        """
        self._check_open()
        stores = [fork.store if isinstance(fork, Fork) else fork for fork in forks]
        states = [store.freeze(explicit=True) for store in stores]
        merge_forks(self._workspace, self._owners, states)
        self._merged = True

    def _check_open(self) -> None:
        if self.read_only:
            raise ReadOnlyError(
                "the session is read-only; open one with repo.writable_session(branch)"
            )
        if self._workspace.closed is not None:
            raise SessionClosedError(f"the session is closed: {self._workspace.closed}")


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"/{path}"


def _dimension(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"{name!r} is no name of a dimension")
    return name


def _is_due(snapshot: Snapshot, options: Compaction) -> bool:
    return is_due(
        sum(entry.first == entry.last for entry in snapshot.deltas),
        snapshot.sequence,
        min_delta_count=options.min_delta_count,
        max_delta_count=options.max_delta_count,
        interval_commits=options.interval_commits,
    )
