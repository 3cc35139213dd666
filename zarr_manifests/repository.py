"""`Repository`: a versioned store of Zarr hierarchies, its branches, tags and history."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Literal

import numpy as np

from zarr_manifests.config import RepositoryConfig
from zarr_manifests.display import html_page
from zarr_manifests.engine.commit import deltas_between, footprint_of
from zarr_manifests.engine.context import Context
from zarr_manifests.engine.create import create_repository
from zarr_manifests.engine.imports import import_references
from zarr_manifests.engine.incremental import changes_between
from zarr_manifests.engine.index import Presence, build_index
from zarr_manifests.engine.objects import Objects
from zarr_manifests.engine.patch import patch
from zarr_manifests.engine.roots import RootAt, Roots
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    HistoryExpiredError,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
    ObjectNotFoundError,
    SnapshotExpiredError,
    UnsupportedStorageError,
)
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.root import (
    Branch,
    Root,
    check_ref_name,
)
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import IndexArray
from zarr_manifests.history import ArrayStats, Change, Diff, IndexReport, SnapshotInfo, Usage
from zarr_manifests.ids import is_snapshot_id, snapshot_id_of, snapshot_key
from zarr_manifests.planning.arrange import moved_paths
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.session import Session
from zarr_manifests.storage import Storage, from_url
from zarr_manifests.store import ManifestStore
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.references import (
    References,
    list_zarr,
    location_of,
    read_kerchunk,
)

__all__ = ["Diff", "Repository", "SnapshotInfo", "Usage"]

_DEFAULT_BRANCH: Final = "main"
_FRESH_S: Final = 0.1
_REF_ATTEMPTS: Final = 100
_SHOWN_REFS: Final = 20


class Repository:
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

    def __init__(self, context: Context, opened: RootAt) -> None:
        self._context = context
        self._opened: tuple[float, RootAt] | None = (context.runtime.monotonic_s(), opened)

    # --- create and open ---------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        location: str | os.PathLike[str] | Storage,
        config: RepositoryConfig | Mapping[str, Any] | None = None,
        *,
        virtual_containers: Mapping[str, str | os.PathLike[str]] | None = None,
        runtime: Runtime = SYSTEM,
    ) -> Repository:
        """Make a repository at an empty place, with a branch `main`.

        Parameters
        ----------
        location : str, path or Storage
            A path, a URL (`file://`, `memory://name`) or a storage.
        config : RepositoryConfig or mapping, optional
            Saved with the repository.
        virtual_containers : mapping of str to str or path, optional
            Places elsewhere that virtual chunks may be read from: a name, and the URL or path of
            a folder. It counts for this object, what comes from it and their pickles only.
        runtime : Runtime
            Clock, randomness and threads; for tests.

        Raises
        ------
        AlreadyExistsError
            If there is a repository, or anything else.
        ConfigError
            If the configuration has faults.
        UnsupportedStorageError
            If the storage cannot put-if-absent and compare-and-swap.
        """
        storage, containers = _storage(location), Containers.of(virtual_containers)
        objects, roots = Objects(storage, runtime), Roots(storage, runtime)
        at = create_repository(storage, runtime, objects, _config(config), _DEFAULT_BRANCH)
        return cls(_context(storage, runtime, objects, roots, at.root, None, containers), at)

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str] | Storage,
        config: RepositoryConfig | Mapping[str, Any] | None = None,
        *,
        virtual_containers: Mapping[str, str | os.PathLike[str]] | None = None,
        runtime: Runtime = SYSTEM,
    ) -> Repository:
        """Open the repository at that place.

        Parameters
        ----------
        location : str, path or Storage
            A path, a URL (`file://`, `memory://name`) or a storage.
        config : RepositoryConfig or mapping, optional
            Used instead of the saved configuration by this object; a mapping changes only the
            options it names. Nothing is saved.
        virtual_containers : mapping of str to str or path, optional
            Places elsewhere that virtual chunks may be read from: a name, and the URL or path of
            a folder. It counts for this object, what comes from it and their pickles only.
        runtime : Runtime
            Clock, randomness and threads; for tests.

        Raises
        ------
        NotARepositoryError
            If there is none.
        UnsupportedFormatError
            If it was written in a newer format.
        CorruptObjectError
            If its root is damaged.
        """
        storage, containers = _storage(location), Containers.of(virtual_containers)
        roots = Roots(storage, runtime)
        at = roots.read()
        objects = Objects(storage, runtime)
        return cls(_context(storage, runtime, objects, roots, at.root, config, containers), at)

    @classmethod
    def open_or_create(
        cls,
        location: str | os.PathLike[str] | Storage,
        config: RepositoryConfig | Mapping[str, Any] | None = None,
        *,
        virtual_containers: Mapping[str, str | os.PathLike[str]] | None = None,
        runtime: Runtime = SYSTEM,
    ) -> Repository:
        """Open the repository at that place, or make it if the place is empty.

        Of any number of processes that do this at once, one makes it and all open it.
        """
        storage = _storage(location)
        if not cls.exists(storage):
            try:
                return cls.create(
                    storage, config, virtual_containers=virtual_containers, runtime=runtime
                )
            except AlreadyExistsError:
                if not cls.exists(storage):
                    raise
        return cls.open(storage, config, virtual_containers=virtual_containers, runtime=runtime)

    @staticmethod
    def exists(location: str | os.PathLike[str] | Storage) -> bool:
        """Whether there is a repository at that place."""
        try:
            _storage(location).head("current")
        except ObjectNotFoundError:
            return False
        return True

    def __repr__(self) -> str:
        return f"<Repository {self.url}>"

    def _repr_html_(self) -> str:
        facts = [("at", self.url), ("id", self.repository_id)]
        try:
            refs = [(f"branch {name}", head) for name, head in self.list_branches().items()]
            refs += [(f"tag {name}", head) for name, head in self.list_tags().items()]
            nodes = self.readonly_session().store.workspace.nodes()
        except ManifestsError as error:  # what is shown to look around must not fail
            return html_page("Repository", [*facts, ("error", str(error))])
        facts += refs[:_SHOWN_REFS]
        if len(refs) > _SHOWN_REFS:
            facts.append(("...", f"and {len(refs) - _SHOWN_REFS:,} more"))
        return html_page("Repository", facts, nodes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.storage, self.config, self._context.containers)

    @property
    def storage(self) -> Storage:
        """Where it lies."""
        return self._context.storage

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

    # --- sessions ----------------------------------------------------------------------------

    def readonly_session(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
        as_of: datetime | None = None,
    ) -> Session:
        """A session that reads one snapshot.

        Parameters
        ----------
        branch : str, optional
            Read its head; `main` if nothing else is given.
        tag : str, optional
            Read what it points to.
        snapshot_id : str, optional
            Read that snapshot.
        as_of : datetime, optional
            Read the newest snapshot of the branch written at or before that time. Without a time
            zone it is taken as UTC.

        Raises
        ------
        NotFoundError
            If there is no such branch or tag, or nothing as old as `as_of`.
        SnapshotExpiredError
            If the snapshot is not, or no longer, there.
        InvalidArgumentError
            If more than one of branch, tag and snapshot is given, or `as_of` with one of the
            latter two.
        """
        given = [x for x in (branch, tag, snapshot_id) if x is not None]
        if len(given) > 1 or (as_of is not None and (tag or snapshot_id)):
            raise InvalidArgumentError(
                "give one of branch, tag and snapshot_id; as_of goes with a branch only"
            )
        if snapshot_id is not None:
            return Session(self._context, self._open_snapshot(snapshot_id), None, None)
        root = self._fresh_root()
        if tag is not None:
            ref = _known(self._context.roots.with_tag(root, tag).tags, tag, "tag")
            return Session(self._context, self._context.open_view(ref), None, None)
        name = _DEFAULT_BRANCH if branch is None else branch
        head = _known(self._context.roots.with_branch(root, name).branches, name, "branch")
        if as_of is None:
            view = self._context.open_branch(head)
        else:
            view = self._context.open_view(self._as_of(head.head, as_of))
        return Session(self._context, view, None, None)

    def writable_session(self, branch: str = _DEFAULT_BRANCH) -> Session:
        """A session whose changes can be committed to the branch.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        UnsupportedStorageError
            If the storage cannot compare-and-swap.
        """
        if not self.storage.capabilities.cas:
            raise UnsupportedStorageError(
                f"{self.url} cannot compare-and-swap; the repository is read-only there"
            )
        at = self._context.roots.read()
        head = _known(self._context.roots.with_branch(at.root, branch).branches, branch, "branch")
        view = self._context.open_branch(head)
        return Session(self._context, view, branch, at.root.version)

    @contextmanager
    def transaction(
        self,
        branch: str = _DEFAULT_BRANCH,
        *,
        message: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> Iterator[ManifestStore]:
        """A store whose changes are committed at the end of the block, or not at all.

        If the block raises, nothing is committed; if it changes nothing, no commit is made.
        """
        session = self.writable_session(branch)
        yield session.store
        if session.has_changes:
            session.commit(message, metadata)
        else:
            session.check_forks()

    # --- taking what is elsewhere ------------------------------------------------------------

    def import_zarr(
        self,
        url: str | os.PathLike[str],
        path: str = "/",
        copy: bool = False,
        *,
        message: str | None = None,
        branch: str = _DEFAULT_BRANCH,
    ) -> str:
        """Take a plain Zarr store in, in one commit: its metadata, and refs to its chunks.

        The store's files must stay as they are: each is noted with its size and time of
        modification, and reading one that has changed is an error.

        Parameters
        ----------
        url : str or path
            Path or URL (`file://`, `memory://`) of the store.
        path : str
            Where to; nothing may be there. Groups above it are made.
        copy : bool
            Copy the chunks instead, so that the store is not needed any more.
        message : str, optional
            Of the commit.
        branch : str
            What to commit to.

        Returns
        -------
        str
            The new snapshot's id.

        Raises
        ------
        NotFoundError
            If there is no Zarr store at the URL.
        AlreadyExistsError
            If there is something at the path.
        UnsupportedFormatError
            If the store has metadata that is not understood.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> from zarr_manifests.storage import MemoryStorage
        >>> plain = MemoryStorage("plain-zarr")
        >>> plain.put("zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
        >>> repo = zm.Repository.create("memory://import-example")
        >>> snapshot_id = repo.import_zarr("memory://plain-zarr", message="take it in")
        >>> list(zarr.open_group(repo.readonly_session().store, mode="r"))
        []
        """
        references, location = list_zarr(url), location_of(url)
        return self._import(
            references,
            path,
            Containers.of({"source": location}),
            message or f"import {location}",
            branch,
            copy=copy,
        )

    def import_kerchunk(
        self,
        references: str | os.PathLike[str] | Mapping[str, Any],
        path: str = "/",
        *,
        message: str | None = None,
        branch: str = _DEFAULT_BRANCH,
    ) -> str:
        """Take kerchunk references in, in one commit: metadata, and refs to chunks.

        Parameters
        ----------
        references : str, path or mapping
            A JSON file, or what is in one. Of files that lie below a container, size and time of
            modification are noted, and reading one that has changed is an error.
        path : str
            Where to; nothing may be there. Groups above it are made.
        message : str, optional
            Of the commit.
        branch : str
            What to commit to.

        Returns
        -------
        str
            The new snapshot's id.

        Raises
        ------
        NotFoundError
            If there is no such file.
        AlreadyExistsError
            If there is something at the path.
        InvalidArgumentError
            If a reference is malformed, or a location has a user or a password in it.
        UnsupportedFormatError
            If references are generated, or there is metadata that is not understood.
        UnsupportedStorageError
            If the scheme of a location is not supported.
        """
        found = read_kerchunk(references, self._context.containers)
        return self._import(
            found,
            path,
            self._context.containers,
            message or "import kerchunk references",
            branch,
            copy=False,
        )

    def _import(
        self,
        references: References,
        path: str,
        trusted: Containers,
        message: str,
        branch: str,
        *,
        copy: bool,
    ) -> str:
        session = self.writable_session(branch)
        import_references(session.store.workspace, path, references, trusted, copy=copy)
        return session.commit(message)

    def _fresh_root(self) -> Root:
        """The root as it is now.

        Right after `open` that is the one `open` has read: the first session needs no second
        request, unless this process has swapped or read a newer root since.
        """
        opened, self._opened = self._opened, None
        if opened is not None:
            read_s, at = opened
            recent = 0 <= self._context.runtime.monotonic_s() - read_s <= _FRESH_S
            if recent and self._context.roots.undisturbed(at):
                return at.root
        return self._context.roots.read().root

    def _open_snapshot(self, snapshot_id: str) -> SnapshotView:
        return self._context.open_view(self._snapshot_ref(snapshot_id))

    def _snapshot_ref(self, snapshot_id: str) -> BlobRef:
        key = snapshot_key(snapshot_id)
        try:
            data = self.storage.get(key)
        except ObjectNotFoundError as error:
            raise SnapshotExpiredError(
                f"snapshot {snapshot_id} is not in {self.url}: it never was, or has expired; "
                "`repo.ancestry()` and `zarr-manifests log` list what there is"
            ) from error
        ref = BlobRef.to(key, data)
        self._context.objects.remember(ref, Snapshot.from_object(data, ref))
        return ref

    def _as_of(self, head: BlobRef, as_of: datetime) -> BlobRef:
        moment = as_of if as_of.tzinfo is not None else as_of.replace(tzinfo=UTC)
        for ref, snapshot in self._walk(head):
            if snapshot.written_ms <= moment.timestamp() * 1000:
                return ref
        raise NotFoundError(f"the branch has no snapshot as old as {moment.isoformat()}")

    # --- history -----------------------------------------------------------------------------

    def ancestry(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
    ) -> Iterator[SnapshotInfo]:
        """The history of a branch, tag or snapshot, newest first; of `main` if none is given."""
        if sum(x is not None for x in (branch, tag, snapshot_id)) > 1:
            raise InvalidArgumentError("give one of branch, tag and snapshot_id")
        if snapshot_id is not None:
            start = self._snapshot_ref(snapshot_id)
        else:
            root = self._context.roots.read().root
            roots = self._context.roots
            if tag is not None:
                start = _known(roots.with_tag(root, tag).tags, tag, "tag")
            else:
                name = _DEFAULT_BRANCH if branch is None else branch
                start = _known(roots.with_branch(root, name).branches, name, "branch").head
        return (SnapshotInfo.of(ref, snapshot) for ref, snapshot in self._walk(start))

    def _walk(self, start: BlobRef) -> Iterator[tuple[BlobRef, Snapshot]]:
        ref: BlobRef | None = start
        seen: set[str] = set()
        while ref is not None:
            if ref.key in seen:
                raise CorruptObjectError(f"{ref.key} is its own ancestor; the history is damaged")
            seen.add(ref.key)
            snapshot = self._context.objects.load(ref, Snapshot)
            yield ref, snapshot
            ref = snapshot.parent

    def diff(self, start: str, end: str) -> Diff:
        """What changed after snapshot `start` up to snapshot `end`.

        Raises
        ------
        InvalidArgumentError
            If `start` is not an ancestor of `end`.
        SnapshotExpiredError
            If one of them is not there.
        """
        before, after = self._open_snapshot(start), self._open_snapshot(end)
        deltas = deltas_between(self._context, before.ref, after.ref)
        if deltas is None:
            raise InvalidArgumentError(
                f"{start} is not an ancestor of {end}; give the older snapshot first"
            )
        old, new = before.nodes, after.nodes
        same = {p: p for p in old.keys() & new.keys() if old[p].node_id == new[p].node_id}
        moved = moved_paths(old, new)
        same |= moved
        return Diff(
            _absolute(new.keys() - set(same.values())),
            _absolute(to for p, to in same.items() if old[p].documents != new[to].documents),
            _absolute(old.keys() - same.keys()),
            self._changed_chunks(after, deltas),
            dict(zip(map(_slashed, moved), map(_slashed, moved.values()), strict=True)),
        )

    def changes(
        self,
        start: str | None = None,
        end: str | None = None,
        mode: Literal["log", "net"] = "log",
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[Change]:
        """What the commits after `start` up to `end` have changed, oldest first.

        It costs what the commits have changed, whatever the size of what is there: each commit's
        own record is read, and no manifest of what was there before. Compactions are not seen.

        Parameters
        ----------
        start, end : str, optional
            The id of a snapshot, a branch or a tag. Without `start`, all since the repository was
            made; without `end`, up to the head of `main`.
        mode : {"log", "net"}
            `log` tells what each commit did. `net` tells what all of them did together, each chunk
            once: what was made and removed in between does not occur. It holds the coordinates of
            all that has changed in memory, and looks chunks that were removed up at `start`.
        progress : callable, optional
            Called with the number of commits found so far, while the history is followed.

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
        >>> repo = zm.Repository.create("memory://changes-example")
        >>> with repo.transaction(message="make air") as store:
        ...     array = zarr.create_array(store, name="air", shape=(4,), chunks=(1,), dtype="i2")
        >>> made = repo.list_branches()["main"]
        >>> with repo.transaction(message="fill the middle") as store:
        ...     zarr.open_array(store, path="air")[1:3] = 7
        >>> for change in repo.changes(made):
        ...     print(change.path, change.operation, change.coordinates.tolist())
        /air overwrite [[1], [2]]
        """
        root = self._context.roots.read().root
        since = start
        if start is not None and not is_snapshot_id(start):
            since = snapshot_id_of(self._named(root, start).head.key)
        try:
            last = self._named(root, _DEFAULT_BRANCH if end is None else end)
        except SnapshotExpiredError as error:
            raise HistoryExpiredError(str(error)) from error
        return changes_between(
            self._context, since, last.head, mode, floor=last.floor, progress=progress
        )

    def _named(self, root: Root, name: str) -> Branch:
        """The snapshot of that id, else the branch, else the tag of that name."""
        if is_snapshot_id(name):
            return Branch(self._snapshot_ref(name), None)
        roots = self._context.roots
        branch = roots.with_branch(root, name).branches.get(name)
        if branch is not None:
            return branch
        tag = roots.with_tag(root, name).tags.get(name)
        if tag is None:
            raise NotFoundError(
                f"{name[:80]!r} is neither a branch nor a tag nor the id of a snapshot; "
                "`repo.list_branches()`, `repo.list_tags()` and `repo.ancestry()` list them"
            )
        return Branch(tag, None)

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

    def array_stats(
        self,
        path: str,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
    ) -> ArrayStats:
        """How far an array is filled, without a listing; of `main` if nothing is given.

        Quick where the index of initialised chunks is up to date (`build_index`); the same, more
        slowly, where it is not, or is not there.

        Raises
        ------
        NotFoundError
            If there is no such array.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://stats-example")
        >>> with repo.transaction(message="fill a quarter") as store:
        ...     array = zarr.create_array(store, name="air", shape=(8,), chunks=(2,), dtype="i2")
        ...     array[:2] = 7
        >>> stats = repo.array_stats("air")
        >>> stats.initialized_chunks, stats.total_chunks, stats.fraction
        (1, 4, 0.25)
        """
        session = self.readonly_session(branch, tag=tag, snapshot_id=snapshot_id)
        view = session.store.workspace.view
        node = view.nodes.get(path.strip("/"))
        if node is None or node.array is None:
            raise NotFoundError(f"there is no array {_slashed(path)}")
        presence = Presence(self._context, view)
        meta = node.array
        return ArrayStats(
            _slashed(node.path),
            meta.shape,
            meta.chunk_shape,
            meta.grid.shape,
            presence.count(node.node_id),
            presence.stored_bytes(node.node_id),
            presence.counted,
        )

    def build_index(self, branch: str = _DEFAULT_BRANCH) -> IndexReport:
        """Bring the index of initialised chunks up to date with a branch.

        It reads the manifests of the branch that the index does not know yet. The index changes no
        data: it is in no commit's way, and without it all is the same, but slower.

        Raises
        ------
        NotFoundError
            If there is no such branch.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://index-example")
        >>> repo.build_index().indexed
        0
        """
        return build_index(self._context, branch)

    def _changed_chunks(
        self, after: SnapshotView, deltas: Sequence[Delta]
    ) -> dict[str, IndexArray]:
        paths = {node.node_id: path for path, node in after.nodes.items()}
        found: dict[str, list[IndexArray]] = {}
        for delta in deltas:
            for node_id, tables in footprint_of(self._context, after, delta).tables.items():
                if node_id in paths:
                    coords = [table.coords() for table in tables]
                    found.setdefault(paths[node_id], []).extend(coords)
        return {
            _slashed(path): np.unique(np.concatenate(coords), axis=0)
            for path, coords in sorted(found.items())
        }

    # --- doing and undoing what a commit did -------------------------------------------------

    def revert(
        self, snapshot_id: str, branch: str = _DEFAULT_BRANCH, message: str | None = None
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
        session = self.writable_session(branch)
        here = session.store.workspace.view
        view = self._open_snapshot(snapshot_id)
        if not any(ref.key == view.ref.key for ref, _ in self._walk(here.ref)):
            raise InvalidArgumentError(
                f"snapshot {snapshot_id} is not in the history of branch {branch!r}; there is "
                "nothing of it to undo there"
            )
        if message is None:
            message = f"revert {view.snapshot.message!r}"
        return self._patch(session, view, message, {"reverts": snapshot_id}, undo=True)

    def cherry_pick(
        self, snapshot_id: str, branch: str = _DEFAULT_BRANCH, message: str | None = None
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
        session = self.writable_session(branch)
        self._at(self._context.roots.latest.root, snapshot_id)
        view = self._open_snapshot(snapshot_id)
        metadata = {**view.snapshot.metadata, "cherry-picked-from": snapshot_id}
        return self._patch(session, view, message or view.snapshot.message, metadata, undo=False)

    def _patch(
        self,
        session: Session,
        view: SnapshotView,
        message: str,
        metadata: Mapping[str, Any],
        *,
        undo: bool,
    ) -> str:
        if view.snapshot.parent is None:
            raise InvalidArgumentError(
                f"snapshot {view.snapshot_id} is the first of the repository; no commit made it"
            )
        workspace = session.store.workspace
        workspace.changes = patch(self._context, view, workspace.view, undo=undo)
        if not workspace.changes:
            raise InvalidArgumentError(
                f"snapshot {view.snapshot_id} has nothing to {'undo' if undo else 'do'} on branch "
                f"{session.branch!r}: it is so already"
            )
        return session.commit(message, metadata)

    # --- branches and tags -------------------------------------------------------------------

    def list_branches(self) -> dict[str, str]:
        """Snapshot id of every branch's head, by name."""
        branches = self._context.roots.whole(self._context.roots.read().root).branches
        return {name: snapshot_id_of(b.head.key) for name, b in sorted(branches.items())}

    def list_tags(self) -> dict[str, str]:
        """Snapshot id of every tag, by name."""
        tags = self._context.roots.whole(self._context.roots.read().root).tags
        return {name: snapshot_id_of(ref.key) for name, ref in sorted(tags.items())}

    def create_branch(self, name: str, snapshot_id: str | None = None) -> None:
        """Make a branch at a snapshot of the history; at `main`'s head if none is given.

        Raises
        ------
        AlreadyExistsError
            If there is a branch of that name.
        SnapshotExpiredError
            If the snapshot is not in the history of any branch or tag.
        """
        check_ref_name(name)

        def change(root: Root) -> Root:
            if name in root.branches:
                raise AlreadyExistsError(
                    f"branch {name!r} exists; reset_branch moves it, or choose another name"
                )
            return replace(root, branches={**root.branches, name: self._at(root, snapshot_id)})

        self._update(change, "create branch", name, snapshot_id)

    def reset_branch(self, name: str, snapshot_id: str) -> None:
        """Move a branch to a snapshot of the history; what it leaves behind stays readable.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        SnapshotExpiredError
            If the snapshot is not in the history of any branch or tag.
        """

        def change(root: Root) -> Root:
            old = _known(root.branches, name, "branch")
            moved = replace(self._at(root, snapshot_id), epoch=old.epoch)
            return replace(root, branches={**root.branches, name: moved})

        self._update(change, "reset branch", name, snapshot_id)

    def delete_branch(self, name: str) -> None:
        """Delete a branch; `main` cannot be.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        """
        if name == _DEFAULT_BRANCH:
            raise InvalidArgumentError("branch 'main' cannot be deleted; reset_branch moves it")

        def change(root: Root) -> Root:
            _known(root.branches, name, "branch")
            left = {other: branch for other, branch in root.branches.items() if other != name}
            return replace(root, branches=left)

        self._update(change, "delete branch", name, None)

    def create_tag(self, name: str, snapshot_id: str | None = None) -> None:
        """Name a snapshot of the history for good; `main`'s head if none is given.

        Raises
        ------
        AlreadyExistsError
            If there is, or ever was, a tag of that name.
        SnapshotExpiredError
            If the snapshot is not in the history of any branch or tag.
        """
        check_ref_name(name)

        def change(root: Root) -> Root:
            if name in root.tags:
                raise AlreadyExistsError(f"tag {name!r} exists; tags do not move")
            if name in root.deleted_tags:
                raise AlreadyExistsError(
                    f"a tag {name!r} was deleted; its name is never used again, so that it cannot "
                    "come to mean something else"
                )
            head = self._at(root, snapshot_id).head.bare()
            return replace(root, tags={**root.tags, name: head})

        self._update(change, "create tag", name, snapshot_id)

    def delete_tag(self, name: str) -> None:
        """Delete a tag; its name is never used again.

        Raises
        ------
        NotFoundError
            If there is no such tag.
        """

        def change(root: Root) -> Root:
            _known(root.tags, name, "tag")
            left = {other: ref for other, ref in root.tags.items() if other != name}
            return replace(root, tags=left, deleted_tags=(*root.deleted_tags, name))

        self._update(change, "delete tag", name, None)

    def _update(self, change: Any, operation: str, name: str, snapshot_id: str | None) -> None:
        self._context.roots.update(change, operation, name, snapshot_id or "", _REF_ATTEMPTS)

    def _at(self, root: Root, snapshot_id: str | None) -> Branch:
        """A branch at that snapshot, which must be in history as of this root."""
        if snapshot_id is None:
            return replace(root.branches[_DEFAULT_BRANCH], epoch=0)
        key = snapshot_key(snapshot_id)
        seen: set[str] = set()
        for start in self._starts(root):
            for ref, snapshot in self._walk(start):
                if ref.key == key:
                    return Branch(ref.bare(), snapshot.base, ahead=snapshot.ahead)
                if ref.key in seen:
                    break
                seen.add(ref.key)
        raise SnapshotExpiredError(
            f"snapshot {snapshot_id} is not in the history of any branch or tag of {self.url}; "
            "`repo.ancestry()` and `zarr-manifests log` list what is"
        )

    def _starts(self, root: Root) -> Iterator[BlobRef]:
        """What all branches and tags point to; those in the root itself come first."""
        yield from (branch.head for branch in root.branches.values())
        yield from root.tags.values()
        if root.pages:
            whole = self._context.roots.whole(root)
            yield from (branch.head for branch in whole.branches.values())
            yield from whole.tags.values()


def _storage(location: str | os.PathLike[str] | Storage) -> Storage:
    return location if isinstance(location, Storage) else from_url(location)


def _config(config: RepositoryConfig | Mapping[str, Any] | None) -> RepositoryConfig:
    if isinstance(config, RepositoryConfig):
        return config
    return RepositoryConfig.from_dict(config or {})


def _context(
    storage: Storage,
    runtime: Runtime,
    objects: Objects,
    roots: Roots,
    root: Root,
    overlay: RepositoryConfig | Mapping[str, Any] | None,
    containers: Containers,
) -> Context:
    if isinstance(overlay, RepositoryConfig):
        config = overlay
    else:
        hyphened = {str(k).replace("_", "-"): v for k, v in (overlay or {}).items()}
        config = RepositoryConfig.from_dict(root.config.to_dict() | hyphened)
    return Context(root.repository_id, storage, runtime, objects, roots, config, containers)


def _reopen(storage: Storage, config: RepositoryConfig, containers: Containers) -> Repository:
    return Repository.open(storage, config, virtual_containers=containers.prefixes)


def _known[T](refs: Mapping[str, T], name: str, what: str) -> T:
    if name not in refs:
        listed = ", ".join(sorted(refs)[:10]) or "none"
        raise NotFoundError(f"there is no {what} {name!r}; there are: {listed}")
    return refs[name]


def _absolute(paths: Any) -> tuple[str, ...]:
    return tuple(sorted(map(_slashed, paths)))


def _slashed(path: str) -> str:
    return path if path.startswith("/") else f"/{path}"
