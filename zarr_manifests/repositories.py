"""Making, opening and recovering repositories."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from zarr_manifests.config import CacheOptions, Config
from zarr_manifests.engine import upkeep
from zarr_manifests.engine.objects import is_there
from zarr_manifests.engine.refs import DEFAULT_BRANCH
from zarr_manifests.engine.view import create_at, open_at
from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError
from zarr_manifests.format.root import ROOT_KEY
from zarr_manifests.repository import Repository, context_of
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.url import refuse_options, storage_of
from zarr_manifests.virtual.containers import Authorized, Containers, VirtualContainer

if TYPE_CHECKING:
    from zarr_manifests.reports import RecoveryReport

type Location = str | os.PathLike[str] | Storage | Repository


def create(
    location: str | os.PathLike[str] | Storage,
    config: Config | Mapping[str, Any] | None = None,
    *,
    virtual_containers: Mapping[str, VirtualContainer | str | os.PathLike[str]] | None = None,
    authorize: Authorized = (),
    cache: CacheOptions | Mapping[str, Any] | None = None,
    storage_options: Mapping[str, object] | None = None,
    runtime: Runtime = SYSTEM,
) -> Repository:
    """A new repository at an empty place, with a branch `main`.

    Parameters
    ----------
    location : str, path or Storage
        A path, a URL (`file://`, `memory://name`) or a storage.
    config : Config or mapping, optional
        Saved with the repository.
    virtual_containers, authorize, cache, storage_options, runtime
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
    containers = Containers.of(virtual_containers)
    storage = storage_of(location, storage_options)
    where = storage, config, containers, cache, runtime
    return Repository(*create_at(*where, DEFAULT_BRANCH, authorize))


def open(  # noqa: A001 - as Zarr and xarray call it
    location: str | os.PathLike[str] | Storage,
    config: Config | Mapping[str, Any] | None = None,
    *,
    create: bool = False,
    virtual_containers: Mapping[str, VirtualContainer | str | os.PathLike[str]] | None = None,
    authorize: Authorized = (),
    cache: CacheOptions | Mapping[str, Any] | None = None,
    storage_options: Mapping[str, object] | None = None,
    runtime: Runtime = SYSTEM,
) -> Repository:
    """The repository at that place.

    Parameters
    ----------
    location : str, path or Storage
        A path, a URL (`file://`, `memory://name`) or a storage.
    config : Config or mapping, optional
        Used by this object instead of the saved configuration; a mapping changes only the
        options it names (see `Config.overlaid`). It is not saved.
    create : bool, default False
        Make the repository if the place is empty, with that configuration. Of any number of
        processes that do this at once, one makes it and all open it.
    virtual_containers : mapping of str to VirtualContainer, str or path, optional
        Places elsewhere that virtual chunks may be read from, by name; a URL or a path stands
        for a container without options. They apply only to this object, what is made from it,
        and their pickles.
    authorize : iterable of str, or True
        Names of containers saved in the configuration (`config.virtual_containers`) whose files
        may be read, with the credentials of this machine unless a container is anonymous. Look
        at their URLs first: whoever writes the repository can change them.
    cache : CacheOptions or mapping, optional
        How much metadata is cached in memory, and in which folder of the local disk. It applies
        only to this object, what is made from it, and their pickles. Options that a mapping
        leaves out come from the configuration's section `cache`.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the location, such as `region` and
        `credentials`.
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
    storage = storage_of(location, storage_options)
    containers = Containers.of(virtual_containers)
    where = storage, config, containers, cache, runtime
    if create and not exists(storage):
        try:
            return Repository(*create_at(*where, DEFAULT_BRANCH, authorize))
        except AlreadyExistsError:
            if not exists(storage):
                raise
    return Repository(*open_at(*where, authorize=authorize))


def exists(
    location: str | os.PathLike[str] | Storage,
    *,
    storage_options: Mapping[str, object] | None = None,
) -> bool:
    """Whether there is a repository at that place."""
    return is_there(storage_of(location, storage_options), ROOT_KEY)


def recover(
    location: Location,
    version: int | None = None,
    *,
    dry_run: bool = False,
    collections_ended: bool = False,
    storage_options: Mapping[str, object] | None = None,
    runtime: Runtime = SYSTEM,
) -> RecoveryReport:
    """Replace a lost or damaged root by the newest archived one whose objects are all there.

    No writer that began before can commit afterwards. Metadata objects are compared with their
    checksums, and chunk objects only looked for; `verify` reads these, too, and compares what
    objects say of each other.

    With a version, the root may be sound: all branches and tags are set back to what they were
    then. Nothing else changes: configuration and leases stay, what was collected stays deleted, and
    so does a tag that was deleted since.

    Parameters
    ----------
    location : str, path, Storage or Repository
        Where it lies, as for `open`.
    version : int, optional
        A version of the root; `Repository.ops_log` lists them.
    dry_run : bool
        Only report what would be done; nothing is changed.
    collections_ended : bool
        Confirms that no garbage collection is running. Only needed if the archive to take is
        older than the last collection.
    storage_options : mapping, optional
        As for `open`.
    runtime : Runtime
        As for `open`.

    Returns
    -------
    RecoveryReport
        Which version was taken, and which ones may be lost; with a version, which branches and tags
        have moved.

    Raises
    ------
    InvalidArgumentError
        If the root is sound, so that there is nothing to recover.
    NotFoundError
        If there is no archive, or none of that version.
    SnapshotExpiredError
        If the version is older than the last collection of garbage.
    CorruptObjectError
        If there is none that leads to a whole repository.
    ConflictError
        If others change the root meanwhile, or a collection may be running that deletes what
        the archive leads to.
    CommitOutcomeUnknownError
        If the new root is in place and its archive could not be written.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://restore-example")
    >>> with repo.transaction(message="by mistake") as store:
    ...     _ = zarr.create_group(store, path="gruop")
    >>> report = zm.recover(repo, 1)
    >>> list(report.branches), [info.message for info in repo.ancestry()]
    (['main'], ['create repository'])
    """
    if version is not None:
        context = context_of(repository_of(location, storage_options))
        return upkeep.recover.restore_refs(context, version, dry_run=dry_run)
    place = location.storage if isinstance(location, Repository) else location
    return upkeep.recover.recover(
        storage_of(place, storage_options),
        runtime,
        dry_run=dry_run,
        collections_ended=collections_ended,
    )


def repository_of(
    location: Location,
    storage_options: Mapping[str, object] | None = None,
    *,
    virtual_containers: Mapping[str, VirtualContainer | str | os.PathLike[str]] | None = None,
    authorize: Authorized = (),
) -> Repository:
    """The repository at a place; a repository is returned as it is.

    Raises
    ------
    InvalidArgumentError
        If there are options for a storage or a repository, which is open already.
    """
    if isinstance(location, Repository):
        refuse_options("a repository", storage_options)
        if virtual_containers or authorize:
            raise InvalidArgumentError(
                "virtual_containers and authorize apply when a repository is opened, and this "
                "one is open already: pass its URL instead"
            )
        return location
    return open(
        location,
        virtual_containers=virtual_containers,
        authorize=authorize,
        storage_options=storage_options,
    )


def target_of(
    location: Location, storage_options: Mapping[str, object] | None = None
) -> Repository | Storage:
    """Where to write: a repository as it is, or the storage where one is, or is to be made.

    Raises
    ------
    InvalidArgumentError
        If there are options for a storage or a repository, which is open already.
    """
    if isinstance(location, Repository):
        return repository_of(location, storage_options)
    return storage_of(location, storage_options)


def write_into[Written](
    target: Repository | Storage,
    write: Callable[[Repository], Written],
    *,
    make: bool,
    virtual_containers: Mapping[str, Any] | None = None,
) -> Written:
    """Write into a repository, which is made first if there is none.

    Parameters
    ----------
    target : Repository or Storage
        The repository, or where it is, or is to be made.
    write : callable
        Writes and commits. If it fails, a new repository stays, and is empty.
    make : bool
        Whether a repository may be made.
    virtual_containers : mapping, optional
        Places elsewhere whose files may be read, as for `zarr_manifests.open`.
    """
    if isinstance(target, Repository):
        return write(target)
    return write(open(target, create=make, virtual_containers=virtual_containers))
