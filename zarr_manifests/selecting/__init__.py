"""Which chunks of an array may hold cells that a where selects.

What reading does not need is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr_manifests.ondemand import on_demand

if TYPE_CHECKING:
    from zarr_manifests.selecting import chunks_where as chunks_where
else:
    __getattr__ = on_demand(__name__, "chunks_where")
