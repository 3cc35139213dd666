"""What every part of the engine works with: one repository's storage, root, objects and world."""

from __future__ import annotations

from dataclasses import dataclass, field

from zarr_manifests.config import RepositoryConfig
from zarr_manifests.engine.heartbeat import Heart
from zarr_manifests.engine.objects import Objects
from zarr_manifests.engine.roots import Roots
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.root import Branch
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.virtual.containers import Containers

__all__ = ["Context"]


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
    heart : Heart
        The leases that this process holds.
    """

    repository_id: str
    storage: Storage
    runtime: Runtime
    objects: Objects
    roots: Roots
    config: RepositoryConfig
    containers: Containers = field(default_factory=Containers)
    heart: Heart = field(default_factory=Heart)

    def open_view(self, head: BlobRef, base: BlobRef | None = None) -> SnapshotView:
        """Open a snapshot; `base` is the base it is expected to read, if known."""
        return SnapshotView.open(self.objects, self.runtime, head, base)

    def open_branch(self, tip: Branch) -> SnapshotView:
        """Open a branch's head, fetching all that the branch names in one round."""
        return SnapshotView.open(self.objects, self.runtime, tip.head, tip.base, tip.ahead)
