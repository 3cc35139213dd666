"""Uncommitted changes: laid over a snapshot, packed, forked and merged.

What only looking around does not need is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr_manifests.ondemand import on_demand

if TYPE_CHECKING:
    from zarr_manifests.engine.edit import contents as contents
    from zarr_manifests.engine.edit import overlay as overlay
    from zarr_manifests.engine.edit import pin as pin
else:
    __getattr__ = on_demand(__name__, "contents", "overlay", "pin")
