"""`Repository`: a versioned store of Zarr hierarchies, with its branches, tags and history.

Each method hands over to the room of the engine that does the work, so the file is long because of
its documentation. Invariants: if several processes create a repository at one place at once, one
succeeds; only `save_config` changes the saved configuration; the virtual containers and caches that
a repository was opened with go with its pickles and are never saved; opening and reading import no
module that only commits, maintenance or imports of other formats need; what makes no session
imports no Zarr.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec.structs import replace

from zarr_manifests import engine
from zarr_manifests.config import Config
from zarr_manifests.display import html_page
from zarr_manifests.engine import upkeep
from zarr_manifests.engine.heartbeat import HeldLease
from zarr_manifests.engine.leases import checked_timeout_ms, hold
from zarr_manifests.engine.refs import DEFAULT_BRANCH, Refs
from zarr_manifests.engine.roots import RootAt, opened
from zarr_manifests.engine.totals import totals_of
from zarr_manifests.engine.view import Context, metadata_of, open_at, save_config, set_metadata
from zarr_manifests.errors import (
    HistoryExpiredError,
    InvalidArgumentError,
    ManifestsError,
    SnapshotExpiredError,
    plain_text,
)
from zarr_manifests.metrics import Metrics, unmetered
from zarr_manifests.planning.conflict import Policy, Txn
from zarr_manifests.planning.garbage import retention
from zarr_manifests.runtime import SYSTEM, Run
from zarr_manifests.storage import Storage
from zarr_manifests.versions import milliseconds, refs_by_snapshot
from zarr_manifests.virtual.containers import VirtualContainer

if TYPE_CHECKING:
    from zarr_manifests.commits import SessionCommits
    from zarr_manifests.picturing.graph import GraphRow
    from zarr_manifests.reports import (
        Ancestry,
        CellChanges,
        Change,
        CollectionReport,
        CompactionReport,
        Diff,
        LoggedOperation,
        ManifestLayout,
        MergeReport,
        SnapshotInfo,
        StatisticsReport,
        Usage,
        VerifyReport,
    )
    from zarr_manifests.session import Session
    from zarr_manifests.store import ManifestStore

_SHOWN_REFS: Final = 20


class Repository:
    """A transactional, versioned store of Zarr hierarchies.

    Made by `zarr_manifests.create` and `zarr_manifests.open`. Thread-safe.

    Examples
    --------
    >>> import numpy as np, xarray as xr, zarr_manifests as zm
    >>> repo = zm.create("memory://repository-example")
    >>> ds = xr.Dataset({"t": ("x", np.arange(3.0))})
    >>> with repo.transaction("main", message="first values") as store:
    ...     _ = ds.to_zarr(store, consolidated=False)
    >>> xr.open_zarr(repo.readonly_session("main").store).t.values
    array([0., 1., 2.])
    >>> [info.message for info in repo.ancestry()]
    ['first values', 'create repository']
    """

    def __init__(self, context: Context, opened_at: RootAt) -> None:
        self._context = context
        self._refs = Refs(context, opened_at)

    def __repr__(self) -> str:
        return f"<Repository {plain_text(self.storage.url)}>"

    def _repr_html_(self) -> str:
        facts = [("at", self.storage.url), ("id", self._context.repository_id)]
        try:
            refs = [(f"branch {name}", head) for name, head in self.list_branches().items()]
            refs += [(f"tag {name}", head) for name, head in self.list_tags().items()]
            nodes = self._refs.view(None).nodes
        except ManifestsError as error:  # what is shown to look around must not fail
            return html_page("Repository", [*facts, ("error", str(error))])
        facts += refs[:_SHOWN_REFS]
        if len(refs) > _SHOWN_REFS:
            facts.append(("...", f"and {len(refs) - _SHOWN_REFS:,} more"))
        return html_page("Repository", facts, nodes)

    def __reduce__(self) -> tuple[Any, ...]:
        where = self.storage, self.config, self._context.containers, self._context.cache
        return _opened_again, (where,)

    @property
    def storage(self) -> Storage:
        """The storage of the repository; its `url` is what to open the repository with."""
        return unmetered(self._context.storage)

    @property
    def config(self) -> Config:
        """The configuration in use."""
        return self._context.config

    def metrics(self) -> Metrics:
        """Requests, bytes and operations of this object, its sessions and stores so far.

        See Also
        --------
        zarr_manifests.metrics.process_totals : The same of all repositories of the process.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.create("memory://counted-example")
        >>> before = repo.metrics()
        >>> _ = repo.list_branches()
        >>> (repo.metrics() - before).requests
        1
        """
        return self._context.meter.read()

    def save_config(self, config: Config | Mapping[str, Any] | None = None) -> Config:
        """Save the configuration in the repository, for everyone who opens it from now on.

        In this process it applies to sessions opened from now on. Other processes, and the
        section `cache` everywhere, use it once they open the repository again.

        Parameters
        ----------
        config : Config or mapping, optional
            Saved instead of what is saved; a mapping changes only the options it names (see
            `Config.overlaid`). If left out, the configuration in use is saved.

        Returns
        -------
        Config
            What is saved now.

        Raises
        ------
        ConfigError
            If the configuration has faults; nothing is saved.
        ConflictError
            If other writers come first too often.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.create("memory://save-config-example")
        >>> saved = repo.save_config({"commits": {"mode": "rewrite"}})
        >>> zm.open("memory://save-config-example").config.commits.mode
        'rewrite'
        """
        self._context, saved = save_config(self._context, config)
        return saved

    # --- metadata ----------------------------------------------------------------------------

    def metadata(
        self, update: Mapping[str, Any] | None = None, *, replace: bool = False
    ) -> dict[str, Any]:
        """Metadata of the repository as a whole, such as its title and whom to ask; or set some.

        It belongs to no branch or snapshot, so it has no versions: resets, `recover`, expiry and
        collection leave it as it is. A clone has it, too.

        Parameters
        ----------
        update : mapping, optional
            Names to set, in one atomic operation. Values as in the metadata of a commit; at most
            16 KiB in all.
        replace : bool, default False
            Drop all other names. By default they stay, also those that others set meanwhile.

        Returns
        -------
        dict
            All of it, as it is now.

        Raises
        ------
        InvalidArgumentError
            If it cannot be stored, or is too large; nothing was changed.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.create("memory://metadata-example")
        >>> _ = repo.metadata({"title": "reanalysis", "contact": "data@example.org"})
        >>> repo.metadata({"title": "Reanalysis, daily"})
        {'title': 'Reanalysis, daily', 'contact': 'data@example.org'}
        >>> repo.metadata()["title"]
        'Reanalysis, daily'
        """
        if update is None:
            return metadata_of(self._context.roots.read().root)
        checked = engine.commit_changes.checked_metadata(update, "repository")
        return set_metadata(self._context.roots, checked, keep=not replace)

    # --- sessions ----------------------------------------------------------------------------

    def readonly_session(
        self,
        version: str | None = None,
        *,
        follow: bool = False,
        follow_interval: timedelta = timedelta(seconds=60),
    ) -> Session:
        """A session that reads one snapshot.

        Parameters
        ----------
        version : str, optional
            What to read, by any name: a branch (its head), a tag, the id of a snapshot, or the
            first six or more digits of the random part of an id; `main` if nothing is given.
            `main~3` is three snapshots before the head, as `ancestry` lists them, and
            `main@{2026-11-01}` what was the head at that time, in UTC if it has no zone; the
            braces may be left out. `HEAD` means `main`, `refs/heads/x` the branch x and
            `refs/tags/x` the tag, if both are there.
        follow : bool, default False
            Move to the branch's newest snapshot automatically: at that interval, or when the
            snapshot has expired. Consecutive reads may then come from different snapshots.
        follow_interval : timedelta
            How often to look.

        Raises
        ------
        NotFoundError
            If there is no such version, or nothing as old as that.
        SnapshotExpiredError
            If the snapshot does not exist, or no longer exists.
        InvalidArgumentError
            If the name is ambiguous, or names no version.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://versions-example")
        >>> for name in ("air", "sea"):
        ...     with repo.transaction(message=f"make {name}") as store:
        ...         _ = zarr.create_group(store, path=name)
        >>> [*zarr.open_group(repo.readonly_session("main~1").store, mode="r")]
        ['air']
        """
        found, view = self._refs.open(version, first=True, follow=follow)
        follow_s = follow_interval.total_seconds() if follow else None
        contents = engine.overlay.SessionView(self._context, view)
        return _session(engine.forks.Pin(contents, found.branch, follow_s))

    def writable_session(
        self,
        branch: str = DEFAULT_BRANCH,
        *,
        isolation: Literal["snapshot", "serializable"] = "snapshot",
        lease: timedelta | float | None = None,
        exclusive: bool = False,
        copies: Literal["merge", "report"] = "merge",
        append_dim: str | None = None,
    ) -> Session:
        """A session whose changes can be committed to the branch.

        Parameters
        ----------
        branch : str
            The branch.
        isolation : {"snapshot", "serializable"}
            Whether a commit conflicts only with what others wrote to the same places, or also with
            what they changed of anything that was read.
        lease : timedelta or seconds, optional
            Take a lease of that timeout, renewed by itself, so that the session can commit
            however long it takes, collections of garbage notwithstanding. Given up when the
            session is closed, or some time after the session is
            forgotten.
        exclusive : bool, default False
            Claim the branch: sessions that were opened before cannot commit to it any more
            (`FencedError`), as if their process had been stopped. Sessions that are opened later
            can, by the usual rules, until one of them claims the branch in turn.
        copies : {"merge", "report"}
            How writes in pickled copies of the session's store, and in children of `os.fork`, reach
            a commit. With `"merge"`, only if the copies are merged. With `"report"`, the copies
            report each chunk through the storage, and the commit includes them all, so xarray's and
            dask's own writers work on a cluster. The commit includes every call that returned
            before `commit` began; later calls raise. Copies can only write and unset chunks. This
            costs
            two more requests and one object for each chunk, and one more request for each in the
            commit.
        append_dim : str, optional
            A dimension. Appends along it land behind those that others commit first. An append
            writes at fixed positions, so of two made at the same time the second conflicts. With
            this, its positions shift when it is committed, and its values stay the same. A shift
            by whole chunks touches no chunk. Otherwise arrays of one axis are decoded and written
            anew, and arrays of more axes are a conflict. Two more things are a conflict: any other
            change of an array that shifts, and an array along the dimension that only one side
            appended to. Data that refers to positions (an index, an array of offsets) does not
            shift.

        Raises
        ------
        InvalidArgumentError
            If there is no such isolation, or no such way with copies; for copies that report
            with `"serializable"`, as what they read is not known; or if `append_dim` is no name.
        NotFoundError
            If there is no such branch.
        UnsupportedStorageError
            If the storage cannot compare-and-swap; or cannot list and delete, which copies that
            report need.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://exclusive-example")
        >>> before = repo.writable_session()
        >>> _ = zarr.create_group(before.store, path="air")
        >>> session = repo.writable_session(exclusive=True)
        >>> before.commit("make a group")
        Traceback (most recent call last):
        zarr_manifests.errors.FencedError: ... another writer has claimed branch 'main' ...
        """
        lease_ms = _checked_writer(isolation, copies, lease)
        start, view = self._refs.begin(branch, claim=exclusive)
        writer = engine.forks.SessionWriter(
            self._context,
            view,
            branch,
            start,
            lease_ms=lease_ms,
            epoch=start if exclusive else None,
            reporting=copies == "report",
        )
        from zarr_manifests.commits import SessionCommits  # only writers load what commits need

        commits = SessionCommits(writer, serializable=isolation == "serializable")
        if append_dim is not None:
            commits.relocate_appends(append_dim)
        return _session(writer.pin, commits)

    def _commits(self, branch: str) -> SessionCommits:
        return self.writable_session(branch)._writable()

    @contextmanager
    def transaction(
        self,
        branch: str = DEFAULT_BRANCH,
        *,
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        txn: Txn | tuple[str, int] | None = None,
        allow_empty: bool = False,
    ) -> Iterator[ManifestStore]:
        """A store whose changes are committed at the end of the block, or not at all.

        If the block raises, nothing is committed; if it changes nothing, no commit is made, unless
        `allow_empty` asks for one. Without a message, the commit says which nodes have changed.
        After the block what was opened from the store can be read, and refuses to be changed.

        With `txn`, as of `Session.commit`, a commit is made also if the block changes nothing. If
        the step was committed before, `TransactionAlreadyCommitted` is raised before the block
        runs; or after it, if somebody else has committed the step meanwhile.
        """
        session = self.writable_session(branch)
        commits = session._writable()
        try:
            step = commits.begin(txn)
            yield session.store
            if commits.writer.workspace.contents.changes or step is not None or allow_empty:
                session.commit(message, metadata, txn=step, allow_empty=allow_empty)
            else:
                commits.writer.copies.check_merged()
        finally:
            commits.writer.close("its transaction has ended")

    # --- history -----------------------------------------------------------------------------

    def ancestry(self, version: str | None = None, *, limit: int | None = None) -> Ancestry:
        """The history of a branch, tag or snapshot, newest first; of `main` if none is given.

        It is an iterator; on the last line of a cell, a notebook shows it as a graph. Its `plot()`
        draws the history of all branches and tags.

        Parameters
        ----------
        version : str, optional
            As for `readonly_session`.
        limit : int, optional
            The most snapshots. Only their pages are fetched; without a limit, all of the history is
            fetched in as few round trips as possible.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://ancestry-example")
        >>> with repo.transaction(message="make air") as store:
        ...     _ = zarr.create_group(store, path="air")
        >>> [info.message for info in repo.ancestry()]
        ['make air', 'create repository']
        >>> [info.message for info in repo.ancestry(limit=1)]
        ['make air']
        """
        from zarr_manifests.reports import Ancestry, SnapshotInfo  # rarely needed, and many classes

        found = self._refs.history(version, limit)
        snapshots = map(SnapshotInfo.of, found)
        return Ancestry(snapshots, partial(graph_of, self), version or DEFAULT_BRANCH, limit)

    def diff(
        self,
        start: str,
        end: str,
        path: str | None = None,
        *,
        values: bool = False,
        symmetric: bool = True,
    ) -> Diff:
        """What changed after the version `start` up to the version `end`; `print` shows it.

        With `values=True`, the chunks and cells of one array that have other values. The chunks
        that may differ are then read in both versions and compared; which these are follows from
        the history. An array that was made anew in between is compared whole. Cells that an array
        has gained or lost are not compared: its two shapes are in the report.

        Parameters
        ----------
        start, end : str
            Any names of versions (`readonly_session`).
        path : str, optional
            With `values`, the array; if it was moved, by its path in either version.
        values : bool, default False
            Whether to compare the values of one array.
        symmetric : bool, default True
            Where `start` is no ancestor of `end`, such as on another branch: what `end` has changed
            since both had the same history, as `git diff start...end`. If false, all that differs
            between the two, as `git diff start..end`. Values are compared so anyway.

        Raises
        ------
        InvalidArgumentError
            If `end` is an ancestor of `start`, so that it has changed nothing since; if only one of
            path and `values` is given, or the arrays have different numbers of dimensions.
        ConflictError
            After a criss-cross merge; then only `symmetric=False` tells.
        SnapshotExpiredError
            If one of them is not there, or snapshots between them have expired.
        NotFoundError
            If there is no such version, or one of them has no such array.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://diff-example")
        >>> with repo.transaction(message="four values") as store:
        ...     a = zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i4")
        ...     a[:] = [1, 2, 3, 4]
        >>> repo.create_branch("experiment")
        >>> with repo.transaction("experiment", message="correct one") as store:
        ...     zarr.open_array(store, path="a")[2] = 5
        >>> with repo.transaction(message="make sea") as store:
        ...     _ = zarr.create_group(store, path="sea")
        >>> print(repo.diff("main", "experiment"))
          /a: 1 chunk: (1,)
        >>> print(repo.diff("main", "experiment", symmetric=False))
        - /sea
          /a: 1 chunk: (1,)
        >>> found = repo.diff("main", "experiment", "a", values=True)
        >>> print(found)
          /a: 1 chunk: (1,)
            1 changed cell by 2 to 2, as stored
        >>> found.chunks["/a"].tolist(), found.cells["/a"].tolist()
        ([[1]], [1])
        """
        if values != (path is not None):
            raise InvalidArgumentError("values=True and a path go together")
        if path is not None:
            from zarr_manifests.value_changes import value_changes

            old, new = map(self.readonly_session, (start, end))
            return value_changes(self._context, old, new, path)
        named = self._refs.named(start, end)
        return engine.changes_between.compare(self._context, *named, symmetric=symmetric)

    def changes(
        self, start: str | None = None, end: str | None = None, mode: Literal["log", "net"] = "log"
    ) -> Iterator[Change]:
        """The changes made by the commits after `start` up to `end`, oldest first.

        The cost depends on what the commits have changed, not on the size of the arrays: each
        commit's own record is read, and no manifest of what was there before. Compactions change
        no data and are left out.

        Parameters
        ----------
        start, end : str, optional
            Any names of versions (`readonly_session`). Without `start`, all since the repository
            was made; without `end`, up to the head of `main`.
        mode : {"log", "net"}
            `log` tells what each commit did. `net` tells what all of them did together, each chunk
            once: what was made and removed in between does not occur, nor a chunk with the bytes
            that it had. It holds the coordinates of all that has changed in memory, and compares
            these chunks at both ends.

        Yields
        ------
        Change
            Records in an order in which they can be replayed. What they say is in `Operation`.

        Raises
        ------
        HistoryExpiredError
            If some of the range has expired; nothing was yielded then.
        InvalidArgumentError
            If `start` is not an ancestor of `end`, or there is no such mode.
        NotFoundError
            If there is no such branch or tag.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://changes-example")
        >>> with repo.transaction(message="make air") as store:
        ...     array = zarr.create_array(store, name="air", shape=(4,), chunks=(1,), dtype="i2")
        >>> made = repo.list_branches()["main"]
        >>> with repo.transaction(message="fill the middle") as store:
        ...     zarr.open_array(store, path="air")[1:3] = 7
        >>> for change in repo.changes(made):
        ...     print(change.path, change.operation, change.coordinates.tolist())
        /air overwrite [[1], [2]]
        """
        first, last = self._refs.range(start, end)
        return engine.changes_between.changes_between(
            self._context, first, last.head, mode, floor=last.floor
        )

    def revert(self, version: str, branch: str = DEFAULT_BRANCH, message: str | None = None) -> str:
        """Undo a commit of the branch in a new commit; no chunk is read or written.

        Parameters
        ----------
        version : str
            The snapshot whose commit is undone.
        branch : str, default "main"
            It must be in the history of this branch, which gets the new commit.
        message : str, optional
            The new commit's.

        Returns
        -------
        str
            The new snapshot's id.

        Raises
        ------
        ConflictError
            If the branch has changed since in a place that the commit changed.
        InvalidArgumentError
            If the snapshot is the first, or the branch has nothing of it to undo.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://revert-example")
        >>> with repo.transaction(message="make air") as store:
        ...     _ = zarr.create_group(store, path="air")
        >>> _ = repo.revert(repo.list_branches()["main"])
        >>> [info.message for info in repo.ancestry()]
        ["revert 'make air'", 'make air', 'create repository']
        """
        snapshot_id, commits = self._refs.fixed(version), self._commits(branch)
        done = engine.rebase.to_pick(self._context, snapshot_id)
        message = f"revert {done.snapshot.message!r}" if message is None else message
        return commits.patch(done, message, {"reverts": snapshot_id}, undo=True)

    def cherry_pick(
        self,
        version: str,
        branch: str = DEFAULT_BRANCH,
        message: str | None = None,
        *,
        txn: Literal["take", "drop"] = "take",
    ) -> str:
        """Repeat a commit of another branch on this one; no chunk is read or written.

        Parameters
        ----------
        version : str
            The snapshot whose commit is done again.
        branch : str, default "main"
            The branch that gets the new commit.
        message : str, optional
            The new commit's; that of the picked one if none is given.
        txn : {"take", "drop"}, default "take"
            Whether a commit that was a numbered step (`Session.commit` with `txn`) is that step on
            this branch, too.

        Returns
        -------
        str
            The new snapshot's id.

        Raises
        ------
        ConflictError
            If the branch differs from the commit's parent in a place that the commit changed; or
            the commit was a numbered step, and the application's last version is another one here.
        InvalidArgumentError
            If the snapshot is the first of the repository, or the branch has all its changes
            already.
        SnapshotExpiredError
            If there is no such snapshot; or no branch or tag leads to it any more, and a collection
            deletes parts of it.
        """
        commits = self._commits(branch)  # reads the root, which may be newer than the latest known
        done = engine.rebase.to_pick(self._context, self._refs.fixed(version))
        metadata = {**done.snapshot.metadata, "cherry-picked-from": done.snapshot_id}
        message = done.snapshot.message if message is None else message
        return commits.patch(done, message, metadata, undo=False, marks=txn)

    def merge(
        self,
        source: str,
        into: str = DEFAULT_BRANCH,
        *,
        policy: Policy = "fail",
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        fast_forward: bool = True,
        dry_run: bool = False,
    ) -> MergeReport:
        """Bring the commits of another branch into this one, as one commit.

        All that the source has changed since both sides were last the same is put on the branch, by
        the rules by which a commit is rebased. Chunk refs are copied; no chunk is read or written.
        The source stays as it is, and can be merged again when it has more commits.

        Parameters
        ----------
        source : str
            What to merge: a branch, or any other name of a version (`readonly_session`).
        into : str, default "main"
            The branch that gets the commit.
        policy : {"fail", "ours", "theirs"} or callable, default "fail"
            Who wins where both sides have different changes and the rules leave it open: nobody,
            the branch ("ours") or the source ("theirs"), as in `git merge`. A function is called
            for each conflict and returns one of these words.
        message : str, optional
            The new commit's.
        metadata : mapping, optional
            The new commit's. `merged-from` is added to it: the id of the snapshot merged.
        fast_forward : bool, default True
            Whether the branch is just moved to the source if it has no commits of its own since,
            and neither message nor metadata are given. Else there is always a commit.
        dry_run : bool, default False
            Only report what would be done, with all conflicts.

        Returns
        -------
        MergeReport
            What was merged. If the branch had all changes of the source, nothing is done.

        Raises
        ------
        ConflictError
            If both sides have different changes in one place; `conflicts` lists every place, with
            all chunks. Also after a criss-cross merge. Nothing was committed.
        NotFoundError
            If there is no such branch or version.
        SnapshotExpiredError
            If there is no such snapshot, or no branch or tag leads to it any more and a collection
            deletes parts of it; or the common ancestor of both sides has expired
            (`HistoryExpiredError`).

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://merge-example")
        >>> repo.create_branch("experiment")
        >>> with repo.transaction("experiment", message="make air") as store:
        ...     _ = zarr.create_group(store, path="air")
        >>> with repo.transaction("main", message="make sea") as store:
        ...     _ = zarr.create_group(store, path="sea")
        >>> report = repo.merge("experiment")
        >>> report.commits, report.fast_forward
        (1, False)
        >>> sorted(zarr.open_group(repo.readonly_session().store, mode="r"))
        ['air', 'sea']
        """
        from zarr_manifests.commits import merge

        return merge(
            self._refs,
            source,
            into,
            policy=policy,
            described=(message, metadata),
            fast_forward=fast_forward,
            dry_run=dry_run,
        )

    # --- transactions ------------------------------------------------------------------------

    def txn_versions(self, branch: str = DEFAULT_BRANCH) -> dict[str, int]:
        """The last version that each application has committed to a branch with `txn`.

        Raises
        ------
        NotFoundError
            If there is no such branch.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://txn-versions-example")
        >>> session = repo.writable_session()
        >>> _ = zarr.create_group(session.store, path="air")
        >>> _ = session.commit("batch 17", txn=("app", 17))
        >>> repo.txn_versions()
        {'app': 17}
        """
        return self._refs.marks(branch)

    # --- sizes -------------------------------------------------------------------------------

    def du(
        self, version: str | None = None, *, path: str | None = None, estimate: bool = False
    ) -> Usage:
        """Chunks and bytes of every array, and how many more than in the snapshot before.

        No chunk is read. It reads all manifests of the snapshot, or those of one array, and counts
        chunks in manifests, in objects and in files elsewhere apart.

        Parameters
        ----------
        version : str, optional
            As for `readonly_session`; by default the head of `main`.
        path : str, optional
            One array.
        estimate : bool, default False
            Take the counts that the snapshot has itself, and read nothing. A commit makes no
            lookups to count, so where it may have overwritten or removed something, the number is
            an upper bound and marked so. A compaction that merges all of an array makes it exact.
            `SnapshotInfo.totals` has the same sums for every entry of the history.

        Raises
        ------
        NotFoundError
            If there is no such array.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://du-example")
        >>> with repo.transaction(message="fill a quarter") as store:
        ...     array = zarr.create_array(store, name="air", shape=(8,), chunks=(2,), dtype="i2")
        ...     array[:2] = 7
        >>> air = repo.du(path="air")["air"]
        >>> air.chunks, air.grid_shape, air.fraction
        (1, (4,), 0.25)
        >>> print(repo.du().total, "-", repo.du(estimate=True).growth.exact)
        1 chunk, 13 bytes - True
        """
        if not estimate:
            return engine.overlay.usage_of(self.readonly_session(version)._contents, path)
        usage = opened(lambda: totals_of(self._context.open_branch(self._refs.resolve(version).at)))
        if path is None:
            return usage
        array = usage[path]
        return replace(array, path="", arrays=(array,), snapshot_id=usage.snapshot_id)

    def compute_statistics(
        self,
        paths: Sequence[str] | None = None,
        *,
        branch: str = DEFAULT_BRANCH,
        run: Run | None = None,
    ) -> StatisticsReport:
        """Measure chunks, so that queries can leave out those that cannot match.

        Decodes the chunks of a branch's head that have no statistics yet, and stores the least and
        greatest value of each, and how many are missing. Statistics change the speed of queries,
        never their results, and conflict with no commit. Chunks that are overwritten meanwhile
        simply have none. An array has statistics if its values are numbers, booleans or times, in
        the usual codecs.

        Parameters
        ----------
        paths : sequence of str, optional
            The arrays; by default all.
        branch : str
            The branch.
        run : callable, optional
            Runs the tasks that measure chunks: `run(call, items)` gives the results in order, as
            the builtin `map` does. Without it, this process does all of it.

        Raises
        ------
        NotFoundError
            If there is no such branch or array.
        CorruptObjectError, MissingChunkError
            If a chunk is damaged or missing.
        FencedError
            If a collection has shut this computation out; compute again.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://statistics-example")
        >>> with repo.transaction(message="three chunks") as store:
        ...     a = zarr.create_array(store, name="a", shape=(6,), chunks=(2,), dtype="i4")
        ...     a[:] = [1, 2, 3, 4, 5, 6]
        >>> repo.compute_statistics().measured, repo.compute_statistics().measured
        (3, 0)
        """
        return upkeep.compute_statistics.compute_statistics(self._context, paths, branch, run)

    # --- branches and tags -------------------------------------------------------------------

    def list_branches(self) -> dict[str, str]:
        """The snapshot id of every branch's head, by name."""
        return self._refs.branches()

    def list_tags(self) -> dict[str, str]:
        """The snapshot id of every tag, by name."""
        return self._refs.tags()

    def create_branch(self, name: str, version: str | None = None) -> None:
        """Create a branch at a snapshot of the history, by default at the head of `main`.

        It may also be a snapshot that no branch or tag leads to any more, such as after a reset, as
        long as no collection deletes any of it; `ops_log` has the ids.

        Parameters
        ----------
        name : str
            Its name; `HEAD` is reserved.
        version : str, optional
            Where, by any name of a version (`readonly_session`).

        Raises
        ------
        AlreadyExistsError
            If there is a branch or a tag of that name.
        SnapshotExpiredError
            If the snapshot does not exist, or a collection of garbage deletes parts of it.
        """
        self._refs.create_branch(name, version)

    def reset_branch(
        self, name: str, version: str, *, force: bool = False, expected: str | None = None
    ) -> None:
        """Move a branch to a snapshot of the history; what it leaves behind stays readable.

        Parameters
        ----------
        name : str
            The branch.
        version : str
            Where it is to be, by any name of a version (`readonly_session`).
        force : bool
            Drop commits of the branch: those that the snapshot does not come after.
        expected : str, optional
            Id of the snapshot that the branch is at now; commits of the branch up to there may be
            dropped, and nothing happens if it is elsewhere by now.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        SnapshotExpiredError
            If the snapshot does not exist, or a collection of garbage deletes parts of it.
        InvalidArgumentError
            If commits of the branch would be dropped, and neither `force` nor `expected` is given.
        ConflictError
            If the branch is not where it is expected to be.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://reset-example")
        >>> before = repo.list_branches()["main"]
        >>> with repo.transaction(message="a mistake") as store:
        ...     _ = zarr.create_group(store, path="air")
        >>> repo.reset_branch("main", before, expected=repo.list_branches()["main"])
        """
        self._refs.reset_branch(name, version, force=force, expected=expected)

    def delete_branch(self, name: str) -> None:
        """Delete a branch; `main` cannot be.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        """
        self._refs.delete_branch(name)

    def create_tag(self, name: str, version: str | None = None) -> None:
        """Create a tag at a snapshot of the history, by default at the head of `main`.

        It may also be a snapshot that no branch or tag leads to any more, such as after a reset, as
        long as no collection deletes any of it; `ops_log` has the ids.

        Parameters
        ----------
        name : str
            Its name; `HEAD` is reserved.
        version : str, optional
            Where, by any name of a version (`readonly_session`).

        Raises
        ------
        AlreadyExistsError
            If there is, or ever was, a tag of that name; or a branch has it.
        SnapshotExpiredError
            If the snapshot does not exist, or a collection of garbage deletes parts of it.
        """
        self._refs.create_tag(name, version)

    def delete_tag(self, name: str) -> None:
        """Delete a tag; its name is never used again.

        Raises
        ------
        NotFoundError
            If there is no such tag.
        """
        self._refs.delete_tag(name)

    def ops_log(self) -> Iterator[LoggedOperation]:
        """The log of operations on branches and tags, newest first: who did what, and when.

        It goes back as far as archives of the root are kept.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.create("memory://ops-example")
        >>> repo.create_tag("empty")
        >>> [(one.version, one.operation, one.ref) for one in repo.ops_log()]
        [(2, 'create tag', 'empty'), (1, 'create', 'main')]
        """
        return upkeep.recover.operations(self._context)

    # --- maintenance -------------------------------------------------------------------------

    def compact(
        self,
        branch: str = "main",
        mode: str = "major",
        *,
        min_live: float = 0.5,
        dry_run: bool = False,
        run: Run | None = None,
    ) -> CompactionReport:
        """Bring the deltas of a branch together, as a commit that changes no data; or its packs.

        Runs beside writers: what they commit meanwhile stays on top, and a chunk that they change
        is left alone. If somebody else compacts the branch at the same time, one of the two is
        dropped.

        Parameters
        ----------
        branch : str
            The branch.
        mode : {"minor", "major", "full", "packs"}
            `minor`: deltas become runs, and runs of similar size larger ones. `major`: also,
            leaves of the base for which much is pending are written anew. `full`: everything is
            merged into the base and packed anew by the configuration of now.

            `packs`: chunks move out of packs that are mostly dead. Small chunks share objects, and
            one that is overwritten or deleted leaves dead bytes in its pack. If the branch's head
            refers to less than `min_live` of a pack, its live chunks are written into new packs,
            and their refs are merged into the base. A collection deletes the old packs after the
            snapshots that name them have expired; other branches, tags and leases may still keep
            them. A commit moves about 250,000 chunks. Memory holds their refs, or all refs of the
            largest array if those are more, and the chunks of eight packs.
        min_live : float
            With `packs`, the part of a pack that has to be live, above 0 and at most 1. What is in
            a pack is counted by the head's refs, its size is that of the object.
        dry_run : bool
            Estimate what would be written or moved, without writing anything.
        run : callable, optional
            Runs the tasks that merge and write leaves of the base, or copy chunks:
            `run(call, items)` gives the results in order, as the builtin `map` does. Without it,
            this process does all of it.

        Returns
        -------
        CompactionReport
            What was done; its `snapshot_id` is None if there was nothing to do.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        InvalidArgumentError
            If the mode is none of these, or `min_live` is out of its range.
        CorruptObjectError
            If chunks that are to be moved are damaged or missing; it names them. They stay where
            they are, and all others have been moved.
        SessionClosedError
            If a collection or another compaction has shut this one out; what it had committed by
            then stands.
        ConflictError
            If the branch was deleted meanwhile, or others came first too often.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://compact-example", {"inline-chunk-bytes": 0})
        >>> with repo.transaction(message="four chunks, in one pack") as store:
        ...     a = zarr.create_array(store, name="a", shape=(4,), chunks=(1,), dtype="i4")
        ...     a[:] = [1, 2, 3, 4]
        >>> with repo.transaction(message="three of them anew") as store:
        ...     zarr.open_array(store, path="a")[:3] = [5, 6, 7]
        >>> moved = repo.compact(mode="packs", min_live=0.5)
        >>> moved.packs, moved.chunks
        (1, 1)
        >>> merged = repo.compact("main", mode="full")
        >>> merged.deltas_after
        0
        """
        context = self._context
        if mode == "packs":
            how: Any = {"dry_run": dry_run, "run": run or map}
            return upkeep.repack_chunks.repack_chunks(context, branch, min_live, **how)
        return upkeep.compaction.compact(context, branch, mode, dry_run=dry_run, run=run)

    def explain_manifests(
        self,
        version: str | None = None,
    ) -> ManifestLayout:
        """Which manifest holds which chunk refs of a snapshot, and the rule that put them there.

        For each array: the rule that matches it, its set, its manifests, and the sets that did
        not take it. All of it is in the snapshot; no manifest is fetched. By default for the head
        of `main`.

        To see what another configuration would make of it, open the repository with that one, and
        compact a branch made for that.

        Parameters
        ----------
        version : str, optional
            As for `readonly_session`.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://explain-example")
        >>> with repo.transaction(message="three chunks") as store:
        ...     a = zarr.create_array(store, name="a", shape=(6,), chunks=(2,), dtype="i4")
        ...     a[:] = [1, 2, 3, 4, 5, 6]
        >>> _ = repo.compact("main", mode="full")
        >>> layout = repo.explain_manifests()
        >>> [(one.set_name, one.refs) for one in layout.manifests]
        [('coordinates', 3)]
        >>> layout.arrays[0].path, layout.arrays[0].rule, layout.arrays[0].manifests
        ('/a', 0, (0,))
        """
        view = self._refs.view(version, first=True)
        return upkeep.repack_chunks.layout_now(self._context, view)

    def lease(
        self,
        version: str,
        timeout: timedelta | float = timedelta(seconds=120),
        *,
        owner: str = "",
        instead: bool = False,
    ) -> AbstractContextManager[HeldLease]:
        """A context manager that keeps a snapshot readable while others expire and collect.

        The lease is renewed at a third of its timeout, with all other leases of this process in
        one request. Take one lease per job, not one per task.

        Parameters
        ----------
        version : str
            A snapshot of the history.
        timeout : timedelta or seconds
            When others may take the lease away if this process cannot renew it any more.
        owner : str, optional
            A text about who holds it, of which 200 characters are kept.
        instead : bool, default False
            Whether it takes the place of all leases of the same owner, in the same swap: for a job
            that goes on from one snapshot to the next, or goes on with a lease that was kept.

        Raises
        ------
        SnapshotExpiredError
            If the snapshot is not in the history of any branch or tag; a tag keeps what was left
            behind.
        LeaseError
            If there is no thread that could renew it; it was given up again.
        InvalidArgumentError
            If it shall take the place of others, and has no owner.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://lease-example")
        >>> reader = repo.readonly_session("main")
        >>> with repo.lease(reader.snapshot_id) as lease:
        ...     _ = repo.garbage_collect()
        ...     lease.check()
        """
        return hold(self._context, self._refs.fixed(version), timeout, owner, instead=instead)

    def clean(
        self,
        keep: int | timedelta | None = None,
        grace: timedelta = timedelta(hours=24),
        *,
        dry_run: bool = False,
    ) -> CollectionReport:
        """Free the space of what old snapshots need alone, and say what is still held, by what.

        Like `expire_snapshots` and then `garbage_collect`. Before, branches are repacked and
        compacted whose older deltas hold chunks that were overwritten or deleted.

        Parameters
        ----------
        keep : int or timedelta, optional
            Keep that many of the newest versions of each branch, not counting the compactions that
            this call makes; 1 keeps the head alone, even if it is one. Or what is not older than
            this. By default, the configuration says it (`snapshots.keep-last` and
            `snapshots.max-age`).
        grace : timedelta
            How long a session without a lease can still commit.
        dry_run : bool
            Only say what would be done; chunks that a compaction would let go are not counted.

        Raises
        ------
        InvalidArgumentError
            If nothing says what to keep.
        CorruptObjectError
            If something that is reached cannot be read; nothing was deleted.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> from datetime import timedelta
        >>> repo = zm.create("memory://clean-example")
        >>> for name in ("air", "sea", "ice"):
        ...     with repo.transaction(message=f"make {name}") as store:
        ...         _ = zarr.create_group(store, path=name)
        >>> report = repo.clean(keep=1, grace=timedelta(0))
        >>> len(report.snapshots), report.waiting
        (3, 0)
        """
        from zarr_manifests.engine.upkeep.collect import clean

        return clean(self._context, keep, grace, dry_run=dry_run)

    def expire_snapshots(
        self,
        keep_last: int | None = None,
        max_age: timedelta | None = None,
        *,
        dry_run: bool = False,
    ) -> CollectionReport:
        """Remove old snapshots from the history of every branch; no object is deleted yet.

        A snapshot stays if `keep_last` keeps it, or if it is new enough. The head of a branch
        always stays, a tag's snapshot stays readable by the tag, and a leased snapshot stays with
        all after it. Once anything has expired, a tag alone keeps only its own snapshot.

        If nothing is given, the configuration says it (`snapshots.keep-last` and
        `snapshots.max-age`).

        Parameters
        ----------
        keep_last : int, optional
            Keep that many of the newest snapshots of each branch.
        max_age : timedelta, optional
            Keep what is not older than this.
        dry_run : bool
            Only say what would expire.

        Raises
        ------
        InvalidArgumentError
            If nothing is given, here or in the configuration.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://expire-example")
        >>> for name in ("air", "sea", "ice"):
        ...     with repo.transaction(message=f"make {name}") as store:
        ...         _ = zarr.create_group(store, path=name)
        >>> report = repo.expire_snapshots(keep_last=2)
        >>> len(report.expired["main"]), report.versions["main"]
        (2, 2)
        >>> [info.message for info in repo.ancestry()]
        ['make ice', 'make sea']
        """
        now_ms, options = self._context.runtime.now_ms(), self._context.config.snapshots
        kept = retention(options, now_ms, keep_last, max_age)
        return upkeep.collect.expire(self._context, kept, dry_run=dry_run)

    def garbage_collect(
        self,
        grace: timedelta = timedelta(hours=24),
        *,
        dry_run: bool = False,
        run: Run | None = None,
    ) -> CollectionReport:
        """Delete the objects that no snapshot in history needs.

        Safe beside writers and readers with any grace: a writer that began longer ago cannot
        commit afterwards (`FencedError`), unless it holds a lease.

        Parameters
        ----------
        grace : timedelta
            How long a session without a lease can still commit.
        dry_run : bool
            Only say what would be deleted.
        run : callable, optional
            `run(call, items)` gives the results of a function for each item, as `map` does; see
            `zarr_manifests.spark.maintenance`.

        Raises
        ------
        CorruptObjectError
            If something that is reached cannot be read; nothing was deleted.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.create("memory://collect-example")
        >>> repo.garbage_collect(dry_run=True).deleted
        0
        """
        grace_ms = milliseconds(grace, "grace")
        return upkeep.collect.collect(self._context, grace_ms, dry_run=dry_run, run=run or map)

    def verify(self, *, run: Run | None = None) -> VerifyReport:
        """Read every object that can be reached, and report what is missing or damaged.

        Files elsewhere that virtual chunks lie in are counted, and not looked at.

        Parameters
        ----------
        run : callable, optional
            `run(call, items)` gives the results of a function for each item, as `map` does; see
            `zarr_manifests.spark.maintenance`.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.create("memory://verify-example")
        >>> repo.verify().ok
        True
        """
        return upkeep.verify.verify(self._context, run or map)


def _opened_again(where: tuple[Any, Any, Any, Any]) -> Repository:
    return Repository(*open_at(*where, SYSTEM))


def context_of(repository: Repository) -> Context:
    """The roots, objects and caches of a repository, for the rest of the package."""
    return repository._context


def containers_of(repository: Repository) -> dict[str, VirtualContainer]:
    """The containers that a repository was opened with, by name, for the rest of the package."""
    return dict(repository._context.containers.places)


def resolved(repository: Repository, version: str) -> str:
    """The id of the snapshot that a version names now, for the rest of the package.

    Raises
    ------
    InvalidArgumentError
        If the name is ambiguous, or is no name.
    NotFoundError
        If there is no such version; the message lists what is near.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> from zarr_manifests.repository import resolved
    >>> repo = zm.create("memory://resolve-example")
    >>> resolved(repo, "HEAD") == repo.list_branches()["main"]
    True
    """
    return opened(lambda: repository._refs.resolve(version)).snapshot_id


def changed_cells(
    repository: Repository,
    paths: str | Sequence[str],
    start: str | None = None,
    end: str | None = None,
) -> CellChanges:
    """Which cells of arrays came, changed or went after `start` up to `end`, as boxes.

    Several arrays of one shape are the columns of one table, and a cell is a row. Only cells in
    stored chunks count: a chunk that was never written has no rows. Zarr does not store a chunk
    in which all cells have the fill value, unless told to (`write_empty_chunks`).

    Added cells are those of `end` without those of `start`. So over consecutive ranges each
    cell is added once, also where a chunk was filled by two appends. The cost depends on the
    chunks that changed; no chunk is read. Compactions and repacks change nothing.

    If some of the range has expired, and a tag keeps `start`, all chunks of the arrays are
    compared.

    Parameters
    ----------
    paths : str or sequence of str
        One array, or several of one shape.
    start, end : str, optional
        Any names of versions (`readonly_session`). Without `start`, all cells of `end` are
        added, and no history is needed; without `end`, up to the head of `main`.

    Returns
    -------
    CellChanges
        Boxes of array positions: added, overwritten, rewritten and removed cells.

    Raises
    ------
    HistoryExpiredError
        If some of the range has expired, and no tag keeps `start`.
    InvalidArgumentError
        If `start` is not an ancestor of `end`, or the arrays have different shapes.
    NotFoundError
        If there is no such branch or tag, or an array is at neither end.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> from zarr_manifests.repository import changed_cells
    >>> repo = zm.create("memory://changed-cells-example")
    >>> with repo.transaction(message="three days") as store:
    ...     days = zarr.create_array(store, name="air", shape=(3,), chunks=(4,), dtype="i2")
    ...     days[:] = 7
    >>> made = repo.list_branches()["main"]
    >>> with repo.transaction(message="two more") as store:
    ...     days = zarr.open_array(store, path="air")
    ...     days.append([8, 9])
    (5,)
    >>> found = changed_cells(repo, "air", made)
    >>> found.added.tolist(), found.rewritten.tolist(), found.only_added
    ([[[3], [5]]], [[[0], [3]]], True)
    """
    first, last = repository._refs.range(start, end)
    named = (paths,) if isinstance(paths, str) else tuple(paths)
    context, cells = repository._context, engine.changes_between.changed_cells
    try:
        return cells(context, first, last, named)
    except HistoryExpiredError:
        if first not in repository.list_tags().values():
            raise
        return cells(context, first, last, named, logged=False)


def graph_of(
    repository: Repository, version: str | None = None, *, rows: int = 60
) -> list[GraphRow]:
    """The graph of the history of all branches and tags, for the rest of the package.

    Parameters
    ----------
    repository : Repository
        Whose.
    version : str, optional
        Of this one only.
    rows : int
        The most rows.
    """
    from zarr_manifests.picturing.graph import history_graph

    refs = refs_by_snapshot(repository.list_branches(), repository.list_tags())

    def ancestry(snapshot_id: str) -> Iterator[SnapshotInfo]:
        with suppress(SnapshotExpiredError):  # of something that was merged
            yield from repository.ancestry(snapshot_id, limit=rows)

    return history_graph(refs if version is None else [version], ancestry, refs, rows)


def _session(pin: engine.forks.Pin, commits: SessionCommits | None = None) -> Session:
    from zarr_manifests.session import Session  # it imports Zarr

    return Session(pin, commits)


def _checked_writer(isolation: str, copies: str, lease: timedelta | float | None) -> int | None:
    """The lease's timeout in milliseconds, if the options of a writable session are valid."""
    if isolation not in ("snapshot", "serializable"):
        raise InvalidArgumentError(f"isolation={isolation!r}: give 'snapshot' or 'serializable'")
    if copies not in ("merge", "report"):
        raise InvalidArgumentError(f"copies={copies!r}: give 'merge' or 'report'")
    if copies == "report" and isolation == "serializable":
        raise InvalidArgumentError(
            "a serializable session must know what its copies have read, and copies='report' "
            "does not tell; use copies='merge' with session.fork()"
        )
    return None if lease is None else checked_timeout_ms(lease)
