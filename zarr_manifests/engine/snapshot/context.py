"""What every part of the engine works with: one repository's storage, root, objects and runtime.

A reader takes a `ReadContext`, whose parts cannot write. A writer takes a `Context`, which is also
a `ReadContext`. Contexts are only made here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from zarr_manifests.config import CacheOptions, Config
from zarr_manifests.engine.objects.chunk_cache import ChunkCache
from zarr_manifests.engine.objects.disk_cache import DiskCache
from zarr_manifests.engine.objects.metadata import ObjectReader, Objects
from zarr_manifests.engine.root.heartbeat import Heart
from zarr_manifests.engine.root.roots import RootReader, Roots
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import Branch
from zarr_manifests.metrics import Meter, connect
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import meter_of
from zarr_manifests.storage.protocol import ReadableStorage
from zarr_manifests.virtual.containers import Containers

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadContext:
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


@dataclass(frozen=True, slots=True)
class Context(ReadContext):
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
