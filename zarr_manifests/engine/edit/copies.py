"""The copies of a session's store: which are merged, and what reporting copies have changed.

Invariants: a commit leaves out no detected copy's changes unless its caller says so; reports are
merged once, after the session's token is gone, so that a retried commit has them; a session with
new object keys has no copies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from zarr_manifests.engine.edit.change_set import ForkState
from zarr_manifests.engine.edit.forks import merge_forks, merge_reports, refuse_unmerged
from zarr_manifests.engine.edit.merge_forks import Owners
from zarr_manifests.engine.edit.reporting_copies import check_reporting, close_token, open_token
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.root.epochs import check_fence
from zarr_manifests.errors import ManifestsError

_LOG = logging.getLogger(__name__)


class Copies:
    """Tracks the copies of one session, and merges their changes into its workspace.

    Parameters
    ----------
    workspace : Workspace
        The session's workspace.
    reporting : bool
        Whether copies report their changes through the storage.

    Attributes
    ----------
    owners : Owners
        Which copy each merged change came from.
    gathered : bool
        Whether the copies' reports are merged into the workspace.
    """

    def __init__(self, workspace: Workspace, *, reporting: bool) -> None:
        self._workspace, self._reporting = workspace, reporting
        self.owners = Owners()
        self._merged = self._shut = self.gathered = False
        if reporting:
            check_reporting(workspace.storage, workspace.keys)
            workspace.token = open_token(workspace.storage, workspace.keys)

    def merge(self, states: Sequence[ForkState]) -> None:
        """Merge the changes of these copies into the workspace, all or none."""
        merge_forks(self._workspace, self.owners, states)
        self._merged = True

    def check_merged(self) -> None:
        """Raise if copies that do not report have unmerged changes.

        Raises
        ------
        UnmergedForksError
            If copies have changed anything and none was merged.
        """
        workspace = self._workspace
        if workspace.token is None and workspace.copied and not self._merged:
            refuse_unmerged(workspace)

    def bring_in(self, *, discard: bool = False) -> None:
        """Stop all reporting copies and merge their reports; refuse other unmerged copies.

        With `discard`, nothing is merged and nothing is refused.
        """
        workspace = self._workspace
        if workspace.token is None:
            if not discard:
                self.check_merged()
        elif not self.gathered:
            roots = workspace.context.roots
            if not discard:  # if fenced, reports may be gone
                check_fence(roots, roots.read().root, workspace.keys)
            if not self._shut:
                close_token(workspace.storage, workspace.token)
                self._shut = True
            if not discard:
                merge_reports(workspace, self.owners)
                self.gathered = True

    def begin_anew(self, *, renamed: bool) -> None:
        """Forget what was merged; a session with new object keys opens a new token."""
        self.owners, self._merged = Owners(), False
        if self._reporting and renamed:
            self._workspace.token = self._new_token()
            self._shut = self.gathered = False

    def _new_token(self) -> str | None:
        """The key of a new token; None if it cannot be created, and then copies do not report."""
        try:
            return open_token(self._workspace.storage, self._workspace.keys)
        except ManifestsError:
            _LOG.warning("copies of the session cannot report until its commit", exc_info=True)
            return None
