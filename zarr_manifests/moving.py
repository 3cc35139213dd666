"""Moving in and out: imports, exports and clones.

Of an icechunk repository, snapshots become commits, in their order. A commit says in its metadata
which icechunk snapshot it is. So a later import, also after one that was interrupted, finds where
to continue, and imports no snapshot twice. It also says which session has made it, with whose name
its id begins: that of an amended commit, or of a copy, does not.

Invariant: a branch is only continued from a commit that is an ancestor of its icechunk head.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Literal

from zarr.abc.store import Store

from zarr_manifests import virtual
from zarr_manifests.commits import SessionCommits
from zarr_manifests.engine import upkeep
from zarr_manifests.engine.forks import SessionWriter
from zarr_manifests.engine.objects import SessionKeys
from zarr_manifests.engine.overlay import node_path
from zarr_manifests.engine.refs import DEFAULT_BRANCH, Refs
from zarr_manifests.engine.view import Context
from zarr_manifests.errors import ConflictError, HistoryExpiredError, InvalidArgumentError
from zarr_manifests.exporting import exports
from zarr_manifests.format.root import check_ref_name
from zarr_manifests.format.snapshot import CommitKind
from zarr_manifests.ids import lineage_of
from zarr_manifests.importing import apply_snapshot, import_references
from zarr_manifests.keys import V3_DOCUMENT, directory
from zarr_manifests.progress import expect, tell
from zarr_manifests.reports import CloneReport, ExportReport
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository, context_of
from zarr_manifests.session import Session
from zarr_manifests.storage import Storage
from zarr_manifests.storage.url import storage_of
from zarr_manifests.store import ManifestStore, contents_of, workspace_of
from zarr_manifests.versions import HEADS, TAGS
from zarr_manifests.virtual.icechunk_files import IcechunkFiles
from zarr_manifests.virtual.references import MAX_BYTES, References, check_bound

if TYPE_CHECKING:
    import icechunk


def import_zarr(
    repo: str | os.PathLike[str] | Storage | Repository,
    url: str | os.PathLike[str] | Storage | Store,
    path: str = "/",
    copy: bool = False,
    *,
    message: str | None = None,
    branch: str = DEFAULT_BRANCH,
    max_bytes: int = MAX_BYTES,
    storage_options: Mapping[str, object] | None = None,
) -> str:
    """Take a plain Zarr store in, in one commit: its metadata, and refs to its chunks.

    The store's files must stay as they are: each is noted with its size and time of
    modification, and reading one that has changed is an error.

    Parameters
    ----------
    repo : str, path, Storage or Repository
        The repository to commit to.
    url : str, path, Storage or Zarr store
        Path or URL (`file://`, `memory://`, `s3://`, `gs://`, `az://`) of the store, or the
        store itself. Refs need a place: of a Zarr store in memory or in a ZIP file, chunks can
        only be copied.
    path : str
        Where to; nothing may be there. Groups above it are made.
    copy : bool
        Copy the chunks instead, so that the store is not needed any more.
    message : str, optional
        Of the commit.
    branch : str
        What to commit to.
    max_bytes : int
        Bytes that all metadata documents together, and each chunk that is copied, may have.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the URL.

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
    InvalidArgumentError
        If there is more than `max_bytes`, consolidated metadata knows of documents that are
        not there, a folder has a symbolic link in it, or the store is at no place and its
        chunks are not copied.
    UnsupportedStorageError
        If it is on a web server, which has no listing.
    UnsupportedFormatError
        If the store has metadata that is not understood, or is a file, such as a ZIP.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> from zarr_manifests.storage.memory import MemoryStorage
    >>> plain = MemoryStorage("plain-zarr")
    >>> plain.put("zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
    >>> repo = zm.create("memory://import-example")
    >>> snapshot_id = zm.virtual.import_zarr(repo, "memory://plain-zarr", message="take it in")
    >>> list(zarr.open_group(repo.readonly_session().store, mode="r"))
    []
    """
    repository = repository_of(repo)
    location, references = virtual.references.list_zarr(
        url, max_bytes=max_bytes, storage_options=storage_options, copy=copy
    )
    return _import(repository, references, path, message or f"import {location}", branch, copy=copy)


def import_kerchunk(
    repo: str | os.PathLike[str] | Storage | Repository,
    references: str | os.PathLike[str] | Mapping[str, Any],
    path: str = "/",
    *,
    message: str | None = None,
    branch: str = DEFAULT_BRANCH,
    max_bytes: int = MAX_BYTES,
    mode: Literal["w-", "w"] = "w-",
    remote_protocol: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> str:
    """Take kerchunk references in, in one commit: metadata, and refs to chunks.

    Parameters
    ----------
    repo : str, path, Storage or Repository
        The repository to commit to.
    references : str, path or mapping
        A JSON file, which may lie at any URL, or what is in one, or a folder of parquet files,
        local or in an object store (this needs pyarrow). Of files that lie below a container, size
        and time of modification are noted, and reading one that has changed is an error.
    path, message, branch
        As for `import_zarr`; so is what is returned.
    max_bytes : int
        Bytes that each file of references may have; a parquet file is believed what it says of its
        size when unpacked. References that are not trusted need a process with a memory limit.
    mode : {"w-", "w"}
        Whether there must be nothing at the path, or what is there is replaced.
    remote_protocol : str, optional
        The scheme of locations without one, such as `s3`.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the URL of the references.

    Raises
    ------
    NotFoundError
        If there is no such file.
    AlreadyExistsError
        If there is something at the path.
    InvalidArgumentError
        If a reference is malformed, is no chunk of an array, or names a relative path or one
        with a user or a password in it; or there is more than `max_bytes`.
    UnsupportedFormatError
        If there is a template with more than names, or metadata that is not understood.
    UnsupportedStorageError
        If the scheme of a location is not supported.
    VirtualContainerError
        If a chunk is a whole file that lies below no container, so that its size is not known.
    ImportError
        If pyarrow is due and not installed.
    """
    if mode not in ("w-", "w"):
        raise InvalidArgumentError(f"mode={mode!r}: give 'w-' or 'w'")
    repository = repository_of(repo)
    found = virtual.kerchunk.read_kerchunk(
        references,
        context_of(repository).containers,
        max_bytes=max_bytes,
        remote_protocol=remote_protocol,
        storage_options=storage_options,
    )
    told = message or "import kerchunk references"
    return _import(repository, found, path, told, branch, replace=mode == "w")


def import_icechunk(
    repo: str | os.PathLike[str] | Storage | Repository,
    location: str | os.PathLike[str] | Storage,
    *,
    storage_options: Mapping[str, object] | None = None,
    max_bytes: int = MAX_BYTES,
) -> dict[str, str]:
    """Take an icechunk repository in without copying: its branches, tags and snapshots.

    Each snapshot becomes a commit, with its message and metadata. The commit's metadata also
    say which snapshot it was (`icechunk-snapshot`), when that was written (`icechunk-time`),
    and by which session it was imported (`icechunk-import`). Chunks become refs to the objects
    of the icechunk repository, which are noted with size and time of modification; refs to
    files elsewhere stay refs; inline chunks are copied. What was imported before is not
    imported again, so that calling this once more continues after an interruption, or with
    what is new there.

    Of a file elsewhere that lies below a container of this repository, icechunk reads a byte, and
    so says whether it is the one that it has noted; then the file is noted as it is now. One that
    has changed, or is gone, raises an error when it is read. Other files stay unguarded, as
    `Repository.verify` counts.

    The icechunk repository must stay where it is. An object that is deleted there, such as by
    its garbage collection, is an error when it is read.

    Parameters
    ----------
    repo : str, path, Storage or Repository
        The repository to commit to.
    location : str, path or Storage
        The icechunk repository, of format 1 or 2.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the location.
    max_bytes : int
        Bytes that a file of metadata may say to have, unpacked.

    Returns
    -------
    dict of str to str
        The id of the commit here, by the id of the icechunk snapshot.

    Raises
    ------
    ImportError
        If the package of icechunk is not installed.
    NotARepositoryError
        If there is no icechunk repository.
    ConflictError
        If a branch or tag here is not that of the icechunk repository.
    CorruptObjectError
        If one of its files is missing or damaged.
    MissingChunkError
        If an object of a chunk is missing.
    UnsupportedFormatError
        If its format, or the metadata of an array, is not understood.
    InvalidArgumentError
        If a name or a location is refused, or a file exceeds `max_bytes`.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> repo = zm.create("memory://from-icechunk")
    >>> zm.virtual.import_icechunk(repo, "memory://nothing-there")
    Traceback (most recent call last):
    zarr_manifests.errors.NotARepositoryError: there is no icechunk repository at ...
    """
    storage = storage_of(location, storage_options)
    context = context_of(repository_of(repo))
    most = check_bound("max_bytes", max_bytes)
    with TemporaryDirectory(prefix="zarr-manifests-") as folder:
        files = IcechunkFiles(storage, Path(folder), context.containers, most, context.runtime)
        return _IcechunkHistory(context, files).run()


def clone(
    repo: str | os.PathLike[str] | Storage | Repository,
    dest: str | os.PathLike[str] | Storage,
    *,
    storage_options: Mapping[str, object] | None = None,
) -> CloneReport:
    """Copy a repository to another place: its branches, tags and snapshots, with their ids.

    Every object is checked before it is written, and the clone opens once all are there. After
    an interruption, the same call continues and copies no chunk twice. Called later, it brings
    what is new: the commits since, and new branches and tags. Snapshots that have expired here
    expire in the clone. It never moves a branch of the clone back, and overwrites no commit
    there.

    Others may write, expire and collect here meanwhile. The clone has the repository as it was
    at the beginning of the call. It has the same configuration and the same id, but no leases
    and claims, and sessions of one cannot commit to the other.

    Chunks in files elsewhere are not copied: the clone refers to the same files. Saved
    containers come along with the configuration.

    Parameters
    ----------
    repo : str, path, Storage or Repository
        The repository.
    dest : str, path or Storage
        Where to: an empty place, or a clone of this repository, finished or not.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the other place.

    Raises
    ------
    AlreadyExistsError
        If there is anything else at the other place.
    ConflictError
        If a branch or a tag of the clone is not where it was here at any time, or others
        change the clone meanwhile.
    CorruptObjectError
        If an object is missing or damaged; it names the object.
    UnsupportedStorageError
        If the other storage cannot put-if-absent and compare-and-swap.

    Examples
    --------
    >>> import numpy as np, zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://cloned-example")
    >>> with repo.transaction(message="two values") as store:
    ...     _ = zarr.create_array(store, name="a", data=np.array([1, 2]))
    >>> report = zm.clone(repo, "memory://clone-example")
    >>> report.snapshots, zm.clone(repo, "memory://clone-example").snapshots
    (2, 0)
    >>> copy = zm.open("memory://clone-example")
    >>> copy.list_branches() == repo.list_branches()
    True
    """
    storage = storage_of(dest, storage_options)
    return upkeep.clone_repository.clone(context_of(repository_of(repo)), storage)


def export(
    source: str | os.PathLike[str] | Storage | Repository | Session,
    dest: str | os.PathLike[str] | Storage | Store,
    format: Literal["zarr", "kerchunk", "icechunk"] = "zarr",  # noqa: A002 - the usual name
    *,
    version: str | None = None,
    path: str = "/",
    storage_options: Mapping[str, object] | None = None,
) -> ExportReport:
    """Write a snapshot in a format that other software reads.

    Parameters
    ----------
    source : str, path, Storage, Repository or Session
        The repository; or a session, whose snapshot is written.
    dest : str, path, Storage or Zarr store
        Where to: a path, a URL (`file://`, `s3://`, `gs://`, `az://`), a storage, or any store of
        Zarr. There must be nothing. `"kerchunk"` takes the path of a local file, `"icechunk"` that
        of a folder, or a `Storage` of icechunk.
    format : {"zarr", "kerchunk", "icechunk"}
        What to write. `"zarr"` is a plain Zarr store, with all chunks as they are stored and
        consolidated metadata in each group. `"icechunk"` is a new icechunk repository with
        one commit, and copies of the chunks. `"kerchunk"` is a JSON file of references to the
        chunks, where they are, which a tag `export-<snapshot id>` keeps.
    version : str, optional
        Of a repository, what to write, as for `Repository.readonly_session`; by default the head of
        `main`.
    path : str
        The group or array that becomes the root.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the destination.

    Returns
    -------
    ExportReport
        What was written.

    Raises
    ------
    InvalidArgumentError
        If a session has uncommitted changes or is given a version, the destination is in the
        repository or holds it, or an argument is invalid.
    AlreadyExistsError
        If there is something at the destination, or the tag is of another snapshot.
    NotFoundError
        If there is nothing at the path.
    ReadOnlyError
        If the destination is read-only, or a tag is needed and the repository is.
    UnsupportedStorageError
        If nothing outside of this process can read chunks that are referred to.
    UnsupportedFormatError
        If icechunk does not take a node, such as one of Zarr v2.
    ImportError
        If the package of icechunk is due and not installed.
    MissingChunkError, CorruptObjectError, VirtualSourceChangedError
        If a chunk is missing, damaged, or in a file that has changed. Nobody can open what was
        written so far.
    SnapshotExpiredError
        If the snapshot has expired, and chunks of it are gone.
    StorageError
        If the destination cannot be written, such as a full disk.

    Examples
    --------
    >>> import numpy as np, xarray as xr, zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://export-example")
    >>> ds = xr.Dataset({"t": ("x", np.arange(4.0))}).chunk(x=2)
    >>> _ = zm.write(ds, repo, message="values")
    >>> plain = zarr.storage.MemoryStore()
    >>> report = zm.export(repo, plain)
    >>> report.arrays, report.chunks
    (1, 2)
    >>> xr.open_zarr(plain).t.values
    array([0., 1., 2., 3.])
    """
    if not isinstance(source, Session):
        source = repository_of(source).readonly_session(version)
    elif version is not None:
        raise InvalidArgumentError("a session reads one snapshot: give a version with a repository")
    return exports.export(contents_of(source.store), dest, format, path, storage_options)


def _import(
    repository: Repository,
    references: References,
    path: str,
    message: str,
    branch: str,
    *,
    copy: bool = False,
    replace: bool = False,
) -> str:
    session = repository.writable_session(branch)
    if replace:
        workspace_of(session.store).delete_below(directory(node_path(path)))
    import_references(session.store, path, references, copy=copy)
    return session.commit(message)


_NAME: Final = "icechunk-snapshot"
_TIME: Final = "icechunk-time"
_BY: Final = "icechunk-import"


class _IcechunkHistory:
    """Imports branches and tags of an icechunk repository.

    Parameters
    ----------
    context : Context
        The repository to import to.
    files : IcechunkFiles
        The icechunk repository.

    Attributes
    ----------
    ours : dict of str to str
        The snapshot that each icechunk snapshot has become.
    """

    def __init__(self, context: Context, files: IcechunkFiles) -> None:
        self.context, self.files, self._refs = context, files, Refs(context)
        self.ours: dict[str, str] = {}
        self._names: dict[str, str | None] = {}
        self._first, self._done = "", 0

    def run(self) -> dict[str, str]:
        """Import the branches, the default one first, since others may continue it; then the tags.

        Raises
        ------
        ConflictError
            If a branch has other commits than those of its icechunk branch, or a tag is elsewhere.
        """
        files = self.files
        if both := sorted(files.branches.keys() & files.tags.keys()):
            raise InvalidArgumentError(
                f"in the icechunk repository, {', '.join(both)} is a tag and a branch; a name is "
                "one of them here: delete the tags there, or make tags of other names for them"
            )
        self._find_ours()
        names = sorted(files.branches, key=lambda name: (name != DEFAULT_BRANCH, name))
        lineages = {name: files.lineage(files.branches[name]) for name in names}
        tagged = [files.lineage(snapshot) for snapshot in files.tags.values()]
        every = {each.id for lineage in (*lineages.values(), *tagged) for each in lineage}
        expect("snapshots", len(every - self.ours.keys()))
        tell("snapshots", 0)
        for name, lineage in lineages.items():
            self._import_branch(name, lineage)
        for tag, snapshot in sorted(files.tags.items()):
            self._import_tag(tag, snapshot)
        return self.ours

    def _note(self, snapshot: str, ours: str) -> None:
        """Note what a snapshot has become."""
        self.ours[snapshot] = ours
        self._done += 1
        tell("snapshots", self._done)

    def _find_ours(self) -> None:
        """Find what was imported before, and the first snapshot of the repository."""
        versions = [HEADS + name for name in self._refs.branches()]
        versions += [TAGS + name for name in self._refs.tags()]
        for version in versions:
            rewritten: list[str] = []
            for info in self._refs.history(version, None):
                snapshot_id, name = info.snapshot_id, info.metadata.get(_NAME)
                by = info.metadata.get(_BY)
                seen = snapshot_id in self._names
                if seen:
                    name = self._names[snapshot_id]
                elif info.parent is None:
                    name, self._first = "", snapshot_id
                elif info.kind is CommitKind.REWRITE:
                    rewritten.append(snapshot_id)
                    continue
                elif by is not None and by != lineage_of(snapshot_id):
                    name = None  # amended here, or a copy
                elif (
                    isinstance(name, str) and self.ours.setdefault(name, snapshot_id) != snapshot_id
                ):
                    name = None  # a copy that says the same
                self._names |= dict.fromkeys((*rewritten, snapshot_id), name)
                rewritten = []
                if seen:
                    break

    def _import_branch(self, name: str, lineage: Sequence[icechunk.SnapshotInfo]) -> None:
        check_ref_name(name)
        files = self.files
        root = lineage[0].id
        if root not in self.ours and not files.nodes(root) and self._first:
            self._note(root, self._first)  # both are where a history begins, and empty
        known = [at for at, each in enumerate(lineage) if each.id in self.ours]
        begin = known[-1] if known else -1
        self._place(name, [lineage[at].id for at in known])
        due = lineage[begin + 1 :]
        if not due:
            return
        before = files.nodes(lineage[begin].id) if known else {}
        version, view = self._refs.begin(name)
        commits = SessionCommits(SessionWriter(self.context, view, name, version))
        store = ManifestStore(commits.writer.workspace, read_only=False)
        if {n.path: n.document for n in before.values()} != {
            path: node.documents.get(V3_DOCUMENT) for path, node in view.nodes.items()
        }:
            raise ConflictError(
                f"branch {name!r} has an imported commit that was changed since; import to another "
                "repository"
            )
        for each in due:
            after = files.nodes(each.id)
            apply_snapshot(store, files, before, after)
            made = commits.commit(
                each.message if each.message.strip() else f"icechunk snapshot {each.id}",
                _metadata(each, commits.writer.workspace.keys),
                rebase=False,
                allow_empty=True,
            )
            self._names[made] = each.id
            self._note(each.id, made)
            before = after

    def _place(self, name: str, known: Sequence[str]) -> None:
        """See that the branch is at the last of the known snapshots, having been at one of them."""
        start = self.ours[known[-1]] if known else self._first
        if not start:
            raise HistoryExpiredError(
                "the first snapshot of this repository has expired, so that no other history can "
                "begin there; import to a new repository"
            )
        head = self._refs.branches().get(name)
        at = None if head is None else self._names.get(head)
        if head is None:
            self._refs.create_branch(name, start)
        elif at is None or at not in ("", *known):
            raise ConflictError(
                f"branch {name!r} has commits that its icechunk branch does not have: it was reset "
                "or amended there, or its snapshots have expired there before they were imported, "
                "or it was written to here. Import to another repository, or move the "
                f"branch with reset_branch({name!r}, {start!r}, expected={head!r}), which drops "
                "these commits"
            )
        elif at != self._names[start]:
            self._refs.reset_branch(name, start, force=False, expected=None)

    def _import_tag(self, tag: str, snapshot: str) -> None:
        check_ref_name(tag)
        there, helper = self._refs.tags().get(tag), f"icechunk-tag/{tag}"
        if there not in (None, self.ours.get(snapshot)) and self._names.get(there) != snapshot:
            raise ConflictError(f"tag {tag!r} exists, and is not the icechunk snapshot {snapshot}")
        if snapshot not in self.ours:
            self._import_branch(helper, self.files.lineage(snapshot))
        if there is None:
            self._refs.create_tag(tag, self.ours[snapshot])
        if self._refs.branches().get(helper) == self.ours[snapshot]:
            self._refs.delete_branch(helper)


def _metadata(snapshot: icechunk.SnapshotInfo, keys: SessionKeys) -> dict[str, Any]:
    written = snapshot.written_at.isoformat(timespec="microseconds")
    own = {_NAME: snapshot.id, _TIME: written, _BY: lineage_of(keys.session_id)}
    return {**snapshot.metadata, **own}
