"""Freeing space in one call: compaction where overwritten chunks are held, expiry, collection.

A head reads a base and the deltas since. Chunks that a delta overwrites are held by the older ones,
and by the base, however many snapshots expire. So the branch is compacted before it expires, if the
snapshots that overwrote something are about to leave its history.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import chain, takewhile

from zarr_manifests.engine.compact.outcomes import compact
from zarr_manifests.engine.compact.repack_chunks import repack_chunks
from zarr_manifests.engine.history.ancestry import ancestors
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.engine.upkeep.collect import collect
from zarr_manifests.engine.upkeep.expire import expire
from zarr_manifests.format.delta import CommitKind
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.planning.upkeep.garbage import retention
from zarr_manifests.reports import CollectionReport
from zarr_manifests.versions import milliseconds

_MIN_LIVE = 0.5


def clean(
    context: Context,
    keep: int | timedelta | None,
    grace: timedelta,
    *,
    dry_run: bool,
) -> CollectionReport:
    """Expire all but the snapshots to keep (a count, an age, or as configured), and collect."""
    by_age = keep if isinstance(keep, timedelta) else None
    by_count = None if isinstance(keep, timedelta) else keep
    now_ms = context.runtime.now_ms()
    kept = retention(context.config.snapshots, now_ms, by_count, by_age, None)
    grace_ms = milliseconds(grace, "grace")
    due = expire(context, kept, dry_run=True)
    compacted = tuple(name for name, count in due.kept.items() if _holds(context, name, count))
    if not dry_run:
        for name in compacted:
            repack_chunks(context, name, _MIN_LIVE, dry_run=False)
            compact(context, name, "full", dry_run=False)
        if kept.keep_last is not None and kept.keep_last > 1:  # compactions are no versions
            more = max((_compactions(context, name) for name in compacted), default=0)
            kept = replace(kept, keep_last=kept.keep_last + more)
        due = expire(context, kept, dry_run=False)
    found = collect(context, grace_ms, dry_run=dry_run)
    return replace(found, expiry=due, compacted=compacted)


def _holds(context: Context, branch: str, kept: int) -> bool:
    """Whether a branch holds chunks that none of its `kept` newest snapshots reads."""
    view = _head(context, branch)
    oldest = view.snapshot.sequence - kept + 1
    alive = {node.node_id for node in view.nodes.values()}
    old = [entry for entry in view.snapshot.deltas if entry.first <= oldest]
    parts = chain.from_iterable([*(e.parts() for e in old), *(m.parts for m in view.manifests)])
    return any(map(_overwrites, old)) or any(part.node_id not in alive for part in parts)


def _compactions(context: Context, branch: str) -> int:
    """How many of the newest snapshots of a branch are compactions."""
    newest = ancestors(context, _head(context, branch).ref)
    return sum(1 for _ in takewhile(lambda each: each[1].kind is CommitKind.REWRITE, newest))


def _head(context: Context, branch: str) -> SnapshotView:
    return context.open_branch(context.roots.branch(context.roots.read().root, branch))


def _overwrites(entry: DeltaEntry) -> bool:
    """Whether chunks were there before that it has changed, as far as is known."""
    rows = sum(part.count for part in entry.parts())
    return rows != sum(count.chunks for count in entry.counts)
