"""Freeing space in one call: compaction where overwritten chunks are held, expiry, collection.

A head reads a base and the deltas since. Chunks that a delta overwrites are held by the older ones,
and by the base, however many snapshots expire. So the branch is compacted before it expires, if the
snapshots that overwrote something are about to leave its history.
"""

from __future__ import annotations

from datetime import timedelta

from zarr_manifests.engine.compact.outcomes import compact
from zarr_manifests.engine.compact.repack_chunks import repack_chunks
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.upkeep.collect import collect
from zarr_manifests.engine.upkeep.expire import expire
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.planning.upkeep.expiry import retention
from zarr_manifests.progress import Progress
from zarr_manifests.reports import CleanReport
from zarr_manifests.times import milliseconds

__all__ = ["clean"]

_MIN_LIVE = 0.5


def clean(
    context: Context,
    keep: int | timedelta | None,
    grace: timedelta,
    *,
    dry_run: bool,
    progress: Progress,
) -> CleanReport:
    """Delete what the snapshots to keep do not need: so many, those not older, or as configured."""
    by_age = keep if isinstance(keep, timedelta) else None
    by_count = None if isinstance(keep, timedelta) else keep
    now_ms = context.runtime.now_ms()
    kept = retention(context.config.snapshots, now_ms, by_count, by_age, None)
    grace_ms = milliseconds(grace, "grace")
    due = expire(context, kept, dry_run=True, progress=progress)
    compacted = tuple(name for name, count in due.kept.items() if _holds(context, name, count))
    if not dry_run:
        for name in compacted:
            repack_chunks(context, name, _MIN_LIVE, dry_run=False, progress=progress)
            compact(context, name, "full", dry_run=False, progress=progress)
        due = expire(context, kept, dry_run=False, progress=progress)
    found = collect(context, grace_ms, dry_run=dry_run, progress=progress)
    return CleanReport(due, compacted, found)


def _holds(context: Context, branch: str, kept: int) -> bool:
    """Whether a branch holds chunks that none of so many newest snapshots reads."""
    head = context.roots.branch(context.roots.read().root, branch)
    snapshot = context.open_branch(head).snapshot
    oldest = snapshot.sequence - kept + 1
    return any(entry.first <= oldest and _overwrites(entry) for entry in snapshot.deltas)


def _overwrites(entry: DeltaEntry) -> bool:
    """Whether chunks were there before that it has changed, as far as is known."""
    rows = sum(part.count for part in entry.parts())
    return entry.counts is None or rows != sum(count.chunks for count in entry.counts)
