"""Which snapshots there are, what lies between two of them, and who may still read them.

What reading does not need is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr_manifests.ondemand import on_demand

if TYPE_CHECKING:
    from zarr_manifests.engine.history import changes_between as changes_between
else:
    __getattr__ = on_demand(__name__, "changes_between")
