"""What every part of the engine works with: one repository's storage, root, objects and world."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from zarr_manifests.config import CacheOptions, RepositoryConfig
from zarr_manifests.engine.objects.chunk_cache import ChunkCache
from zarr_manifests.engine.objects.disk_cache import DiskCache
from zarr_manifests.engine.objects.metadata import Objects
from zarr_manifests.engine.root.heartbeat import Heart
from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.root import Branch
from zarr_manifests.metrics import Meter
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import meter_of
from zarr_manifests.telemetry import connect
from zarr_manifests.virtual.containers import Containers

__all__ = ["Context"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Context:
    """One repository, as this process sees it.

    Parameters
    ----------
    repository_id : str
        Its id.
    storage : Storage
        Where it lies.
    runtime : Runtime
        Clock, randomness, threads.
    objects : Objects
        Its immutable objects, cached.
    roots : Roots
        Its root.
    config : RepositoryConfig
        The saved configuration with what `open` laid over it.
    containers : Containers
        The places elsewhere that virtual chunks may be read from.
    cache : CacheOptions
        What may be kept of the objects.
    heart : Heart
        The leases that this process holds.
    chunks : ChunkCache or None
        The chunks that are kept in memory, if any may be.
    """

    repository_id: str
    storage: Storage
    runtime: Runtime
    objects: Objects
    roots: Roots
    config: RepositoryConfig
    containers: Containers = field(default_factory=Containers)
    cache: CacheOptions = field(default_factory=CacheOptions)
    heart: Heart = field(default_factory=Heart)
    chunks: ChunkCache | None = None

    @classmethod
    def of(
        cls,
        repository_id: str,
        storage: Storage,
        runtime: Runtime,
        roots: Roots,
        config: RepositoryConfig,
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
        chunks = ChunkCache(cache, runtime, meter) if cache.chunk_bytes else None
        where = repository_id, storage, runtime, objects, roots
        return cls(*where, config, containers, cache, chunks=chunks)

    @property
    def meter(self) -> Meter:
        """What counts all that is done with the repository in this process."""
        return self.objects.meter

    def open_view(self, head: BlobRef, base: BlobRef | None = None) -> SnapshotView:
        """Open a snapshot; `base` is the base it is expected to read, if known."""
        return SnapshotView.open(self.objects, self.runtime, head, base)

    def open_branch(self, tip: Branch) -> SnapshotView:
        """Open a branch's head, fetching all that the branch names in one round."""
        return SnapshotView.open(self.objects, self.runtime, tip.head, tip.base, tip.ahead)
