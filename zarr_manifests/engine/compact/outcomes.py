"""Compactions, counted and told to the log; and the one that a commit makes due."""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

from zarr_manifests.config import Compaction
from zarr_manifests.engine.commit.observe import observed
from zarr_manifests.engine.compact.background import compact_soon
from zarr_manifests.engine.compact.compaction import compact_branch
from zarr_manifests.engine.history.commit_logs import deltas_between
from zarr_manifests.engine.root.disk_reserve import with_reserve
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.planning.upkeep.compaction_triggers import CompactionMode, is_due
from zarr_manifests.reports import CompactionReport

__all__ = ["compact", "compact_if_due", "observed_compaction"]

_LOG = logging.getLogger(__name__)
_OVERDUE: Final = 4
"""So many times what makes a compaction due, and a writer no longer leaves it to another one."""


def compact(context: Context, branch: str, mode: str, *, dry_run: bool) -> CompactionReport:
    """Compact a branch because somebody asked for it: compactions under way are shut out.

    Raises
    ------
    NotFoundError
        If there is no such branch.
    InvalidArgumentError
        If there is no such mode.
    """
    if mode not in set(CompactionMode):
        raise InvalidArgumentError(f"mode {mode!r} is none of minor, major, full")
    context.roots.branch(context.roots.read().root, branch)  # there is one
    compaction = partial(
        observed_compaction,
        context,
        branch,
        CompactionMode(mode),
        dry_run=dry_run,
        claim=True,
    )
    return with_reserve(context.storage, compaction)[0]


def observed_compaction(
    context: Context,
    branch: str,
    mode: CompactionMode,
    size_ratio: float | None = None,
    *,
    dry_run: bool = False,
    claim: bool = False,
) -> tuple[CompactionReport, BlobRef | None]:
    """As `engine.compact.compact_branch`."""
    with observed(context, "compaction", branch) as landing:
        found, landing.head = compact_branch(
            context, branch, mode, dry_run=dry_run, size_ratio=size_ratio, claim=claim
        )
        landing.facts = {
            "mode": str(mode),
            "refs_merged": found.refs_merged,
            "bytes_written": found.bytes_written,
            "bytes_read": found.bytes_read,
        }
    return found, landing.head


def compact_if_due(context: Context, branch: str, view: SnapshotView) -> SnapshotView | None:
    """The compacted head to go on from, if the commit that made `view` had to compact its branch.

    None if no compaction is due, if the background does it, or if it failed: then the next commit
    makes it due again.
    """
    rewrite, options = context.config.commits.mode == "rewrite", context.config.compaction
    if not rewrite and (options.mode == "manual" or not _is_due(view.snapshot, options)):
        return None
    if not rewrite and options.mode == "async":
        compact_soon(context, branch)
        return None
    try:
        with context.roots.only_here("compaction") as alone:
            overdue = len(view.snapshot.deltas) > _OVERDUE * options.max_delta_count
            if not (alone or rewrite or overdue):
                return None  # whoever does it does it for all, unless it has been stopped
            ratio = 0.0 if rewrite else None
            head = observed_compaction(context, branch, CompactionMode.MAJOR, ratio)[1]
        # Somebody may have reset the branch meanwhile; then it is not of this commit.
        if head is not None and deltas_between(context, view, head) is not None:
            return context.open_view(head)
    except ManifestsError:
        _LOG.warning("compacting %r failed", branch, exc_info=True)
    return None


def _is_due(snapshot: Snapshot, options: Compaction) -> bool:
    return is_due(
        sum(entry.first == entry.last for entry in snapshot.deltas),
        snapshot.sequence,
        min_delta_count=options.min_delta_count,
        max_delta_count=options.max_delta_count,
        interval_commits=options.interval_commits,
    )
