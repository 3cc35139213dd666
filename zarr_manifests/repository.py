"""`Repository`: a versioned store of Zarr hierarchies, its branches, tags and history.

Invariants: of all that make a repository at one place at once, one does; the saved configuration
is changed by `save_config` alone; what virtual containers and caches an object was opened with
goes with its pickles and is never saved.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from zarr_manifests.config import CacheOptions, RepositoryConfig
from zarr_manifests.display import html_page
from zarr_manifests.engine.compact.compaction import CompactionReport
from zarr_manifests.engine.compact.outcomes import observed_compaction
from zarr_manifests.engine.history.ancestry import (
    ancestors,
    find_in_history,
    floor_below,
    snapshot_ref,
)
from zarr_manifests.engine.objects.disk_cache import DiskCache
from zarr_manifests.engine.objects.metadata import Objects
from zarr_manifests.engine.root.create import create_repository
from zarr_manifests.engine.root.disk_reserve import with_reserve
from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.preload import RefsPreload
from zarr_manifests.engine.upkeep.recover import RecoveryReport, recover
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
    ObjectNotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.format.root import Root
from zarr_manifests.imports import Imports
from zarr_manifests.metrics import Meter, Metrics
from zarr_manifests.plain import plain_text
from zarr_manifests.planning.upkeep.compaction_triggers import CompactionMode
from zarr_manifests.reports import Diff, SnapshotInfo, Usage
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage import Storage, from_url
from zarr_manifests.storage.metered import MeteredStorage, metered, unmetered
from zarr_manifests.store import workspace_of
from zarr_manifests.versions import DEFAULT_BRANCH, REF_ATTEMPTS
from zarr_manifests.virtual.containers import Containers

__all__ = ["Diff", "Repository", "SnapshotInfo", "Usage"]

_SHOWN_REFS: Final = 20


class Repository(Imports):
    """A transactional, versioned store of Zarr hierarchies.

    Made by `create`, `open` or `open_or_create`. Thread-safe.

    Examples
    --------
    >>> import numpy as np, xarray as xr, zarr_manifests as zm
    >>> repo = zm.Repository.create("memory://repository-example")
    >>> ds = xr.Dataset({"t": ("x", np.arange(3.0))})
    >>> with repo.transaction("main", message="first values") as store:
    ...     _ = ds.to_zarr(store, consolidated=False)
    >>> xr.open_zarr(repo.readonly_session("main").store).t.values
    array([0., 1., 2.])
    >>> [info.message for info in repo.ancestry(branch="main")]
    ['first values', 'create repository']
    """

    # --- create and open ---------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        location: str | os.PathLike[str] | Storage,
        config: RepositoryConfig | Mapping[str, Any] | None = None,
        *,
        virtual_containers: Mapping[str, str | os.PathLike[str]] | None = None,
        cache: CacheOptions | Mapping[str, Any] | None = None,
        runtime: Runtime = SYSTEM,
    ) -> Repository:
        """Make a repository at an empty place, with a branch `main`.

        Parameters
        ----------
        location : str, path or Storage
            A path, a URL (`file://`, `memory://name`) or a storage.
        config : RepositoryConfig or mapping, optional
            Saved with the repository.
        virtual_containers, cache, runtime
            As for `open`.

        Raises
        ------
        AlreadyExistsError
            If there is a repository, or anything else.
        InvalidArgumentError
            If the location is the path of a file.
        ConfigError
            If the configuration has faults.
        UnsupportedStorageError
            If the storage cannot put-if-absent and compare-and-swap.
        """
        storage, containers = _counted(location), Containers.of(virtual_containers)
        saved = _config(config)
        options = CacheOptions.of(cache, saved.cache)
        DiskCache.check(options)
        objects = Objects(storage, runtime)
        at = create_repository(storage, runtime, objects, saved, DEFAULT_BRANCH)
        roots = Roots(storage, runtime)
        return cls(_context(storage, runtime, roots, at.root, None, containers, options), at)

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str] | Storage,
        config: RepositoryConfig | Mapping[str, Any] | None = None,
        *,
        virtual_containers: Mapping[str, str | os.PathLike[str]] | None = None,
        cache: CacheOptions | Mapping[str, Any] | None = None,
        runtime: Runtime = SYSTEM,
    ) -> Repository:
        """Open the repository at that place.

        Parameters
        ----------
        location : str, path or Storage
            A path, a URL (`file://`, `memory://name`) or a storage.
        config : RepositoryConfig or mapping, optional
            Used instead of the saved configuration by this object; a mapping changes only the
            options it names (see `RepositoryConfig.overlaid`). Nothing is saved.
        virtual_containers : mapping of str to str or path, optional
            Places elsewhere that virtual chunks may be read from: a name, and the URL or path of
            a folder. It counts for this object, what comes from it and their pickles only.
        cache : CacheOptions or mapping, optional
            How much metadata is kept in memory, and in which folder of the local disk; for this
            object, what comes from it and their pickles only. What a mapping leaves out is as the
            configuration's section `cache` says.
        runtime : Runtime
            Clock, randomness and threads; for tests.

        Raises
        ------
        NotARepositoryError
            If there is none.
        ConfigError
            If the configuration has faults.
        UnsupportedFormatError
            If it was written in a newer format.
        CorruptObjectError
            If its root is damaged.
        """
        return cls._open(location, config, Containers.of(virtual_containers), cache, runtime)

    @classmethod
    def _open(
        cls,
        location: str | os.PathLike[str] | Storage,
        config: RepositoryConfig | Mapping[str, Any] | None,
        containers: Containers,
        cache: CacheOptions | Mapping[str, Any] | None,
        runtime: Runtime = SYSTEM,
        *,
        elsewhere: bool = False,
    ) -> Repository:
        CacheOptions.of(cache)  # faults of an argument are said before anything is read
        storage = _counted(location)
        roots = Roots(storage, runtime)
        at = roots.read()
        context = _context(
            storage, runtime, roots, at.root, config, containers, cache, elsewhere=elsewhere
        )
        repository = cls(context, at)
        preload = RefsPreload(context, at.root)
        if preload.start():
            weakref.finalize(repository, preload.cancel).atexit = False
        return repository

    @classmethod
    def open_or_create(
        cls,
        location: str | os.PathLike[str] | Storage,
        config: RepositoryConfig | Mapping[str, Any] | None = None,
        *,
        virtual_containers: Mapping[str, str | os.PathLike[str]] | None = None,
        cache: CacheOptions | Mapping[str, Any] | None = None,
        runtime: Runtime = SYSTEM,
    ) -> Repository:
        """Open the repository at that place, or make it if the place is empty.

        Of any number of processes that do this at once, one makes it and all open it.
        """
        storage = _storage(location)
        if not cls.exists(storage):
            try:
                return cls.create(
                    storage,
                    config,
                    virtual_containers=virtual_containers,
                    cache=cache,
                    runtime=runtime,
                )
            except AlreadyExistsError:
                if not cls.exists(storage):
                    raise
        return cls.open(
            storage, config, virtual_containers=virtual_containers, cache=cache, runtime=runtime
        )

    @staticmethod
    def recover(
        location: str | os.PathLike[str] | Storage,
        *,
        dry_run: bool = False,
        collections_ended: bool = False,
        runtime: Runtime = SYSTEM,
    ) -> RecoveryReport:
        """Make a repository usable again whose root is lost, damaged, or leads to what is.

        The newest archived root of which all it reaches is there is taken. No writer of before
        can commit afterwards. Chunk objects are only looked for; `verify` reads them.

        Parameters
        ----------
        location : str, os.PathLike or Storage
            Where it lies, as for `open`.
        dry_run : bool
            Only say which version would be taken; nothing is changed.
        collections_ended : bool
            Say that no collection of garbage is running. It is only asked for where an archive is
            to be taken from before a collection that is not known to have ended.

        Returns
        -------
        RecoveryReport
            Which version was taken, and which ones may be lost.

        Raises
        ------
        InvalidArgumentError
            If the root is sound, so that there is nothing to recover.
        NotARepositoryError
            If there is no archive.
        CorruptObjectError
            If there is none that leads to a whole repository.
        ConflictError
            If others change the root meanwhile, or a collection may be running that deletes what
            the archive leads to.
        """
        storage = _storage(location)
        return recover(storage, runtime, dry_run=dry_run, collections_ended=collections_ended)

    @staticmethod
    def exists(location: str | os.PathLike[str] | Storage) -> bool:
        """Whether there is a repository at that place."""
        try:
            _storage(location).head("current")
        except ObjectNotFoundError:
            return False
        return True

    def __repr__(self) -> str:
        return f"<Repository {plain_text(self.url)}>"

    def _repr_html_(self) -> str:
        facts = [("at", self.url), ("id", self.repository_id)]
        try:
            refs = [(f"branch {name}", head) for name, head in self.list_branches().items()]
            refs += [(f"tag {name}", head) for name, head in self.list_tags().items()]
            nodes = workspace_of(self.readonly_session().store).nodes()
        except ManifestsError as error:  # what is shown to look around must not fail
            return html_page("Repository", [*facts, ("error", str(error))])
        facts += refs[:_SHOWN_REFS]
        if len(refs) > _SHOWN_REFS:
            facts.append(("...", f"and {len(refs) - _SHOWN_REFS:,} more"))
        return html_page("Repository", facts, nodes)

    def __reduce__(self) -> tuple[Any, ...]:
        context = self._context
        return _reopen, (self.storage, self.config, context.containers, context.cache)

    @property
    def storage(self) -> Storage:
        """Where it lies."""
        return unmetered(self._context.storage)

    @property
    def url(self) -> str:
        """The URL it can be opened with."""
        return self._context.storage.url

    @property
    def repository_id(self) -> str:
        """32 hexadecimal digits, drawn when it was made."""
        return self._context.repository_id

    @property
    def config(self) -> RepositoryConfig:
        """The configuration in use."""
        return self._context.config

    def metrics(self) -> Metrics:
        """What this object, its sessions and stores have done so far in this process.

        See Also
        --------
        zarr_manifests.metrics.process_totals : The same of all repositories of the process.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://counted-example")
        >>> before = repo.metrics()
        >>> _ = repo.list_branches()
        >>> (repo.metrics() - before).requests
        1
        """
        return self._context.meter.read()

    @property
    def virtual_containers(self) -> dict[str, str]:
        """URL prefix of each container that this repository was opened with, by name."""
        return dict(self._context.containers.prefixes)

    def save_config(
        self, config: RepositoryConfig | Mapping[str, Any] | None = None
    ) -> RepositoryConfig:
        """Save the configuration in the repository, for whoever opens it from now on.

        It is in use here at once, in sessions opened from now on; in other processes once they
        open the repository again. The section `cache` counts for whoever opens it from now on.

        Parameters
        ----------
        config : RepositoryConfig or mapping, optional
            Saved instead of what is saved; a mapping changes only the options it names (see
            `RepositoryConfig.overlaid`). Left out, the configuration in use is saved.

        Returns
        -------
        RepositoryConfig
            What is saved now.

        Raises
        ------
        ConfigError
            If the configuration has faults; nothing is saved.
        ConflictError
            If other writers always come first.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://save-config-example")
        >>> saved = repo.save_config({"commits": {"mode": "rewrite"}})
        >>> zm.Repository.open("memory://save-config-example").config.commits.mode
        'rewrite'
        """
        given = self.config if config is None else config
        # What is in use may differ from what is saved: both get the change, or none.
        used = _overlaid(self.config, given)

        def change(root: Root) -> Root:
            return replace(root, config=_overlaid(root.config, given))

        at = self._context.roots.update(change, "save config", "", "", REF_ATTEMPTS)
        self._context = replace(self._context, config=used)
        return at.root.config

    # --- history -----------------------------------------------------------------------------

    def du(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
    ) -> Usage:
        """Chunks and bytes of every array of a snapshot, and of every commit that led to it.

        Counted from manifests and snapshots; no chunk is read. Of `main` if nothing is given.
        """
        session = self.readonly_session(branch, tag=tag, snapshot_id=snapshot_id)
        history = self.ancestry(snapshot_id=session.snapshot_id)
        return Usage(session.du(), tuple(history))

    # --- doing and undoing what a commit did -------------------------------------------------

    def compact(
        self, branch: str = "main", mode: str = "major", *, dry_run: bool = False
    ) -> CompactionReport:
        """Bring the deltas of a branch together, as a commit that changes no data.

        Runs beside writers: what they commit meanwhile stays on top. If somebody else compacts
        the branch at the same time, one of the two is dropped.

        Parameters
        ----------
        branch : str
            The branch.
        mode : {"minor", "major", "full"}
            `minor`: deltas become runs, and runs of similar size larger ones. `major`: also,
            leaves of the base for which much is pending are written anew. `full`: everything is
            merged into the base and packed anew by the configuration of now.
        dry_run : bool
            Estimate what would be written, without fetching or writing anything.

        Returns
        -------
        CompactionReport
            What was done; its `snapshot_id` is None if there was nothing to do.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        InvalidArgumentError
            If the mode is none of these.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://compact-example")
        >>> for i in range(3):
        ...     with repo.transaction("main", message=f"group {i}") as store:
        ...         _ = zarr.create_group(store, path=f"g{i}")
        >>> report = repo.compact("main", mode="full")
        >>> report.deltas_before, report.deltas_after
        (3, 0)
        """
        if mode not in set(CompactionMode):
            raise InvalidArgumentError(f"mode {mode!r} is none of minor, major, full")
        roots = self._context.roots
        if branch not in roots.with_branch(roots.read().root, branch).branches:
            listed = ", ".join(self.list_branches())
            raise NotFoundError(f"there is no branch {branch!r}; there are: {listed}")
        compaction = partial(
            observed_compaction,
            self._context,
            branch,
            CompactionMode(mode),
            dry_run=dry_run,
            claim=True,
        )
        return with_reserve(self._context.storage, compaction)[0]

    def revert(
        self, snapshot_id: str, branch: str = DEFAULT_BRANCH, message: str | None = None
    ) -> str:
        """Undo what one commit of the branch did, in a new commit; no chunk is read or written.

        Parameters
        ----------
        snapshot_id : str
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
            If the branch is not any more as that commit left it, where it changed something.
        InvalidArgumentError
            If the snapshot is not in the branch's history, is the first, or has nothing to undo.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://revert-example")
        >>> with repo.transaction(message="make air") as store:
        ...     _ = zarr.create_group(store, path="air")
        >>> _ = repo.revert(repo.list_branches()["main"])
        >>> [info.message for info in repo.ancestry()]
        ["revert 'make air'", 'make air', 'create repository']
        """
        session, context = self.writable_session(branch), self._context
        ref = snapshot_ref(context, snapshot_id)
        head = workspace_of(session.store).view.ref
        floor = floor_below(context, context.roots.latest.root, head)
        history = ancestors(context, head, floor)
        if not any(known.key == ref.key for known, _ in history):
            raise InvalidArgumentError(
                f"snapshot {snapshot_id} is not in the history of branch {branch!r}; there is "
                "nothing of it to undo there"
            )
        done = context.open_view(ref)
        if floor == snapshot_id and done.snapshot.parent is not None:
            raise SnapshotExpiredError(
                f"the snapshot before {snapshot_id} is not in the history any more, so what was "
                "before it is not known; make the change by hand"
            )
        message = f"revert {done.snapshot.message!r}" if message is None else message
        return session._commit_patch(done, message, {"reverts": snapshot_id}, undo=True)

    def cherry_pick(
        self, snapshot_id: str, branch: str = DEFAULT_BRANCH, message: str | None = None
    ) -> str:
        """Do what a commit of another branch did on this one; no chunk is read or written.

        Parameters
        ----------
        snapshot_id : str
            The snapshot whose commit is done again.
        branch : str, default "main"
            The branch that gets the new commit.
        message : str, optional
            The new commit's; that of the picked one if none is given.

        Returns
        -------
        str
            The new snapshot's id.

        Raises
        ------
        ConflictError
            If the branch is not as that commit found it, where it changed something.
        InvalidArgumentError
            If the snapshot is the first of the repository, or all it did is here already.
        SnapshotExpiredError
            If the snapshot is not in the history of any branch or tag.
        """
        session, context = self.writable_session(branch), self._context
        ref, snapshot = find_in_history(context, context.roots.latest.root, snapshot_id)
        message = snapshot.message if message is None else message
        metadata = {**snapshot.metadata, "cherry-picked-from": snapshot_id}
        return session._commit_patch(context.open_view(ref), message, metadata, undo=False)


def _storage(location: str | os.PathLike[str] | Storage) -> Storage:
    return location if isinstance(location, Storage) else from_url(location)


def _config(config: RepositoryConfig | Mapping[str, Any] | None) -> RepositoryConfig:
    if isinstance(config, RepositoryConfig):
        return config
    return RepositoryConfig() if config is None else RepositoryConfig.from_dict(config)


def _overlaid(
    saved: RepositoryConfig, overlay: RepositoryConfig | Mapping[str, Any] | None
) -> RepositoryConfig:
    if overlay is None:
        return saved
    return overlay if isinstance(overlay, RepositoryConfig) else saved.overlaid(overlay)


def _counted(location: str | os.PathLike[str] | Storage) -> MeteredStorage:
    storage = _storage(location)
    return storage if isinstance(storage, MeteredStorage) else metered(storage, Meter())


def _context(
    storage: Storage,
    runtime: Runtime,
    roots: Roots,
    root: Root,
    overlay: RepositoryConfig | Mapping[str, Any] | None,
    containers: Containers,
    cache: CacheOptions | Mapping[str, Any] | None,
    *,
    elsewhere: bool = False,
) -> Context:
    config = _overlaid(root.config, overlay)
    return Context.of(
        root.repository_id,
        storage,
        runtime,
        roots,
        config,
        containers,
        CacheOptions.of(cache, config.cache),
        elsewhere=elsewhere,
    )


def _reopen(
    storage: Storage,
    config: RepositoryConfig,
    containers: Containers,
    options: CacheOptions | None = None,
) -> Repository:
    return Repository._open(storage, config, containers, options, elsewhere=True)
