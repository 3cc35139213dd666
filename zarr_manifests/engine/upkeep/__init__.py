"""Keeping a repository small and sound: compaction, statistics, collection, verification, recovery.

What reading does not need is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr_manifests.runtime import on_demand

if TYPE_CHECKING:
    from zarr_manifests.engine.upkeep import clone_repository as clone_repository
    from zarr_manifests.engine.upkeep import collect as collect
    from zarr_manifests.engine.upkeep import compaction as compaction
    from zarr_manifests.engine.upkeep import compute_statistics as compute_statistics
    from zarr_manifests.engine.upkeep import recover as recover
    from zarr_manifests.engine.upkeep import repack_chunks as repack_chunks
    from zarr_manifests.engine.upkeep import verify as verify
else:
    __getattr__ = on_demand(
        __name__,
        *("clone_repository", "collect", "compaction", "compute_statistics"),
        *("recover", "repack_chunks", "verify"),
    )
