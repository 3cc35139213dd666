"""What every part of the engine works with: one repository's storage, root, objects and runtime.

A reader takes a `ReadContext`, whose parts cannot write. A writer takes a `Context`, which is also
a `ReadContext`. Contexts are only made here, when a repository is opened or made: its storage, its
root, its configuration, its metadata.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from zarr_manifests.config import CacheOptions, Config
from zarr_manifests.engine.objects.caches import ChunkCache, DiskCache
from zarr_manifests.engine.objects.metadata import ObjectReader, Objects
from zarr_manifests.engine.root.create import create_repository
from zarr_manifests.engine.root.heartbeat import Heart
from zarr_manifests.engine.root.roots import RootAt, RootReader, Roots
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import InvalidArgumentError, ObjectNotFoundError
from zarr_manifests.format.records import BlobRef, pack
from zarr_manifests.format.root import ROOT_KEY, Branch, Root
from zarr_manifests.metrics import Meter, connect
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import MeteredStorage, meter_of, metered
from zarr_manifests.storage.protocol import ReadableStorage
from zarr_manifests.virtual.containers import Authorized, Containers

_LOG = logging.getLogger(__name__)


class ReadContext(Struct, frozen=True):
    """One repository, to read.

    Parameters
    ----------
    repository_id : str
        Its id.
    storage : ReadableStorage
        Its storage.
    runtime : Runtime
        Clock, randomness, threads.
    objects : ObjectReader
        Its immutable objects, cached.
    roots : RootReader
        Its root.
    config : Config
        The saved configuration, overlaid with what was given to `open`.
    containers : Containers
        The places outside the repository that virtual chunks may be read from.
    cache : CacheOptions
        What may be cached.
    chunks : ChunkCache or None
        The cache of chunks, if there is one.
    """

    repository_id: str
    storage: ReadableStorage
    runtime: Runtime
    objects: ObjectReader
    roots: RootReader
    config: Config
    containers: Containers = field(default_factory=Containers)
    cache: CacheOptions = field(default_factory=CacheOptions)
    chunks: ChunkCache | None = None

    @classmethod
    def unshared(
        cls,
        repository_id: str,
        storage: ReadableStorage,
        runtime: Runtime,
        config: Config,
    ) -> ReadContext:
        """The same repository with empty caches of its own."""
        objects, roots = ObjectReader(storage, runtime), RootReader(storage, runtime)
        roots.share(objects, repository_id)
        return ReadContext(repository_id, storage, runtime, objects, roots, config)

    @property
    def meter(self) -> Meter:
        """The meter of everything this process does with the repository."""
        return self.objects.meter

    def open_view(self, head: BlobRef, base: BlobRef | None = None) -> SnapshotView:
        """Open a snapshot; `base` is the base it is expected to read, if known."""
        return SnapshotView.open(self.objects, self.runtime, head, base)

    def open_branch(self, tip: Branch) -> SnapshotView:
        """Open a branch's head, fetching everything that the branch names in one round."""
        return SnapshotView.open(self.objects, self.runtime, tip.head, tip.base, tip.ahead)


class Context(ReadContext, frozen=True):
    """One repository, to read and write.

    Parameters
    ----------
    storage : Storage
        Its storage.
    objects : Objects
        Its immutable objects, cached; it also writes new ones.
    roots : Roots
        Its root, to read and swap.
    heart : Heart
        The leases that this process holds.
    """

    storage: Storage
    objects: Objects
    roots: Roots
    heart: Heart = field(default_factory=Heart)

    @classmethod
    def of(
        cls,
        repository_id: str,
        storage: Storage,
        runtime: Runtime,
        roots: Roots,
        config: Config,
        containers: Containers,
        cache: CacheOptions,
        *,
        elsewhere: bool = False,
    ) -> Context:
        """The repository, with one cache for all that is read of it.

        `elsewhere` says that the options come from another process: a cache directory that this
        one cannot use is left out then.

        Raises
        ------
        InvalidArgumentError
            If the cache directory cannot be used.
        """
        connect()
        meter = meter_of(storage)
        try:
            disk = DiskCache.open(cache, repository_id, runtime, meter)
        except InvalidArgumentError as error:
            if not elsewhere:
                raise
            _LOG.warning("%s; going on without it", error)
            disk = None
        objects = Objects(storage, runtime, cache, disk)
        roots.share(objects, repository_id)
        kept = cache.chunk_bytes or (cache.chunks and disk is not None)
        chunks = ChunkCache(cache, runtime, meter, disk) if kept else None
        where = repository_id, storage, runtime, objects, roots
        return cls(*where, config, containers, cache, chunks=chunks)

    def unshared_by(self, runtime: Runtime, options: CacheOptions) -> Context:
        """The same repository, sharing neither threads nor caches with others."""
        objects, roots = Objects(self.storage, runtime, options), Roots(self.storage, runtime)
        return replace(self, runtime=runtime, objects=objects, roots=roots, cache=options)


# --- opening and making ------------------------------------------------------------------------

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
        return replace(root, metadata=new)

    return metadata_of(roots.update(change, "set metadata", "", "", _ATTEMPTS).root)
