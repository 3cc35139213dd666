"""Sessions: one snapshot to read, or one set of changes to commit.

A session is pinned to a snapshot. A read-only one never sees anything else. A writable one lays
its changes over the snapshot; `commit` makes them a new snapshot on the branch and goes on from
there, all or nothing. Forks carry a copy of the session to other processes, and `merge` brings
their changes back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from zarr_manifests.appends import put_behind
from zarr_manifests.arranging import Arranging
from zarr_manifests.config import Compaction
from zarr_manifests.engine.commit.describe import checked_message, checked_metadata
from zarr_manifests.engine.commit.landing import Committed, amending, commit
from zarr_manifests.engine.commit.rebase import Rebasing, rebase_changes
from zarr_manifests.engine.commit.replay import combined, patch
from zarr_manifests.engine.compact.background import compact_soon
from zarr_manifests.engine.compact.outcomes import observed, observed_compaction
from zarr_manifests.engine.edit.change_set import ChangeSet, ForkState
from zarr_manifests.engine.edit.forks import freeze, merge_forks
from zarr_manifests.engine.history.commit_logs import delta_of, deltas_between
from zarr_manifests.engine.snapshot.preload import PreloadReport
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import (
    CommitOutcomeUnknownError,
    ConflictError,
    InvalidArgumentError,
    ManifestsError,
)
from zarr_manifests.format.delta import CommitKind
from zarr_manifests.format.root import Branch
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.conflict.decide import Policy, check_policy
from zarr_manifests.planning.upkeep.compaction_triggers import CompactionMode, is_due
from zarr_manifests.reports import Status
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.store import ManifestStore

__all__ = ["Fork", "PreloadReport", "Session", "Status"]

_LOG = logging.getLogger(__name__)
_OVERDUE: Final = 4
"""So many times what makes a compaction due, and nobody counts on another's any more."""


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


class Session(Arranging):
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
    Status(created=(), updated=(), deleted=(), chunks={}, moved={}, truncated={})
    """

    _append_dim: str | None = None
    _check_tip: Callable[[SnapshotView], None] | None = None
    """Raises `ConflictError` if the changes must not be put on top of this tip."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            Kept with the snapshot: names, and values of None, numbers, strings, bytes, lists and
            maps. Scalars of numpy are taken as the numbers that they are, and `datetime64` as text
            in ISO 8601.
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
            self._bring_in(discard=discard_unmerged)
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
            if workspace.token is not None:
                self._bring_in()
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
            self._bring_in(discard=discard_unmerged)
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
        return Rebasing(rebase is not False, policy, self._serializable, attempts, self._check_tip)

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
            with amending(context, self._branch, amended, workspace.keys):
                view = context.open_view(amended.snapshot.parent)
                delta = delta_of(context, amended.snapshot)
        try:
            with workspace.packed() as (changes, packs):
                if amended is not None and delta is not None:
                    with amending(context, self._branch, amended, workspace.keys):
                        changes = combined(context, view, delta, changes)
                how = rebasing or self._rebasing(True, None)
                how = replace(how, relocate=partial(self._put_behind, changes, how))
                with observed(context, "commit", self._branch) as landing:
                    done = commit(
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
                    landing.head = done.head
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
        if not rewrite and (options.mode == "manual" or not _is_due(view.snapshot, options)):
            return
        if not rewrite and options.mode == "async":
            compact_soon(context, self._branch)
            return
        try:
            ratio = 0.0 if rewrite else None
            with context.roots.only_here("compaction") as alone:
                overdue = len(view.snapshot.deltas) > _OVERDUE * options.max_delta_count
                if not (alone or rewrite or overdue):
                    return  # whoever does it does it for all, unless it has been stopped
                head = observed_compaction(context, self._branch, CompactionMode.MAJOR, ratio)[1]
            # Somebody may have reset the branch meanwhile; then it is not of this commit.
            if head is not None and deltas_between(context, view, head) is not None:
                self._start_at(context.open_view(head), keys)
        except ManifestsError:
            # The next commit makes it due again.
            _LOG.warning("compacting %r failed", self._branch, exc_info=True)


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
