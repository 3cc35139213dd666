"""Opening and making a repository: its storage, root, configuration, metadata, and context."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final

from zarr_manifests.config import CacheOptions, Config
from zarr_manifests.engine.objects.disk_cache import DiskCache
from zarr_manifests.engine.objects.metadata import Objects
from zarr_manifests.engine.root.create import create_repository
from zarr_manifests.engine.root.roots import RootAt, Roots
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.errors import InvalidArgumentError, ObjectNotFoundError
from zarr_manifests.format.envelope import pack
from zarr_manifests.format.root import METADATA, ROOT_KEY, Root
from zarr_manifests.metrics import Meter
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import MeteredStorage, metered
from zarr_manifests.virtual.containers import Authorized, Containers

type GivenConfig = Config | Mapping[str, Any] | None
type Cache = CacheOptions | Mapping[str, Any] | None

_ATTEMPTS: Final = 100
_MOST_BYTES: Final = 16 * 1024
"""What the metadata of a repository take at most."""


def exists_at(storage: Storage) -> bool:
    """Whether there is a repository in that storage."""
    try:
        storage.head(ROOT_KEY)
    except ObjectNotFoundError:
        return False
    return True


def create_at(
    storage: Storage,
    config: GivenConfig,
    containers: Containers,
    cache: Cache,
    runtime: Runtime,
    branch: str,
    authorize: Authorized = (),
) -> tuple[Context, RootAt]:
    """Make a repository with one empty snapshot on `branch`; it is open then."""
    storage = _counted(storage)
    saved = _overlaid(None, config)
    options = CacheOptions.of(cache, saved.cache)
    DiskCache.check(options)
    containers = containers.with_saved(saved.virtual_containers, authorize)
    at = create_repository(storage, runtime, Objects(storage, runtime), saved, branch)
    roots = Roots(storage, runtime)
    where = at.root.repository_id, storage, runtime, roots, saved, containers, options
    return Context.of(*where), at


def open_at(
    storage: Storage,
    config: GivenConfig,
    containers: Containers,
    cache: Cache,
    runtime: Runtime,
    *,
    authorize: Authorized = (),
    elsewhere: bool = False,
) -> tuple[Context, RootAt]:
    """The repository in that storage, and its root as it is now.

    `authorize` names the saved containers whose files may be read. `elsewhere` says that the
    options come from another process: a cache directory that this one cannot use is left out then.
    """
    CacheOptions.of(cache)  # faults of an argument are said before anything is read
    storage = _counted(storage)
    roots = Roots(storage, runtime)
    at = roots.read()
    used = _overlaid(at.root.config, config)
    options = CacheOptions.of(cache, used.cache)
    containers = containers.with_saved(used.virtual_containers, authorize)
    where = at.root.repository_id, storage, runtime, roots, used, containers, options
    return Context.of(*where, elsewhere=elsewhere), at


def save_config(context: Context, config: GivenConfig) -> tuple[Context, Config]:
    """The context with that configuration, and what is saved in the repository now.

    What is in use may differ from what is saved: both get the change, or none.
    """
    given = context.config if config is None else config
    used = _overlaid(context.config, given)

    def change(root: Root) -> Root:
        return replace(root, config=_overlaid(root.config, given))

    at = context.roots.update(change, "save config", "", "", _ATTEMPTS)
    return replace(context, config=used), at.root.config


def _overlaid(saved: Config | None, overlay: GivenConfig) -> Config:
    if isinstance(overlay, Config):
        return overlay
    if overlay is None:
        return Config() if saved is None else saved
    return Config.from_dict(overlay) if saved is None else saved.overlaid(overlay)


def _counted(storage: Storage) -> MeteredStorage:
    return storage if isinstance(storage, MeteredStorage) else metered(storage, Meter())


def metadata_of(root: Root) -> dict[str, Any]:
    """The metadata; changing what is returned changes nothing else."""
    return deepcopy(dict(root.metadata))


def set_metadata(roots: Roots, metadata: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Swap in a root with that metadata, over what there is if it is to be kept; all of it.

    Raises
    ------
    InvalidArgumentError
        If it becomes too large; every commit writes it.
    """

    def change(root: Root) -> Root:
        new = {**root.metadata, **metadata} if keep else {**metadata}
        size = len(pack(new))
        if size > _MOST_BYTES:
            raise InvalidArgumentError(
                f"the metadata of the repository would take {size:,} bytes, and {_MOST_BYTES:,} "
                "are allowed, since every commit writes it; store the rest as attributes of the "
                "root group"
            )
        changed = replace(root, metadata=new)
        return changed.with_feature(METADATA) if new else changed

    return metadata_of(roots.update(change, "set metadata", "", "", _ATTEMPTS).root)
