"""How changes reach a branch: described, rebased or relocated, uploaded, swapped in.

What reading does not need is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr_manifests.ondemand import on_demand

if TYPE_CHECKING:
    from zarr_manifests.engine.commit import commit_changes as commit_changes
    from zarr_manifests.engine.commit import replay as replay
else:
    __getattr__ = on_demand(__name__, "commit_changes", "replay")
