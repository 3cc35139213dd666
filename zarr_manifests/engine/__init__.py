"""The engine: carries out plans on the storage below, without the Zarr store above.

To understand it, read `objects` (immutable ones), `roots` (the one that is overwritten),
`view` (a snapshot), `change_set` (what a session has changed) and `landing` (how that reaches a
branch). What only few callers need is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr_manifests.runtime import on_demand

if TYPE_CHECKING:
    from zarr_manifests.engine import changes_between as changes_between
    from zarr_manifests.engine import commit_changes as commit_changes
    from zarr_manifests.engine import forks as forks
    from zarr_manifests.engine import overlay as overlay
    from zarr_manifests.engine import rebase as rebase
else:
    __getattr__ = on_demand(
        __name__, "changes_between", "commit_changes", "forks", "overlay", "rebase"
    )
