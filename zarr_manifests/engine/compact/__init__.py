"""The same data in another layout: runs, merged leaves, repacked chunks, zone maps.

What reading does not need is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr_manifests.ondemand import on_demand

if TYPE_CHECKING:
    from zarr_manifests.engine.compact import compaction as compaction
    from zarr_manifests.engine.compact import compute_statistics as compute_statistics
    from zarr_manifests.engine.compact import manifest_layout as manifest_layout
    from zarr_manifests.engine.compact import repack_chunks as repack_chunks
else:
    __getattr__ = on_demand(
        __name__, "compaction", "compute_statistics", "manifest_layout", "repack_chunks"
    )
