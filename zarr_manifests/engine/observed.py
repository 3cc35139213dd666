"""Commits and compactions, counted and told to the log.

The logger `zarr_manifests.operations` gets one line at INFO for each, with what it says as
attributes of the record too. Nothing here can make an operation fail that has landed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from zarr_manifests.engine.changes import ChangeSet
from zarr_manifests.engine.chunks import SessionKeys
from zarr_manifests.engine.commit import Committed, commit
from zarr_manifests.engine.compact import CompactionReport, compact_branch
from zarr_manifests.engine.context import Context
from zarr_manifests.engine.packs import Pack
from zarr_manifests.engine.rebasing import Rebasing
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.errors import ConflictError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.compaction import CompactionMode

__all__ = ["observed_commit", "observed_compaction", "report"]

_LOG = logging.getLogger("zarr_manifests.operations")


def observed_commit(
    context: Context,
    view: SnapshotView,
    changes: ChangeSet,
    keys: SessionKeys,
    branch: str,
    message: str,
    metadata: Mapping[str, Any],
    packs: Sequence[Pack] = (),
    *,
    replaces: SnapshotView | None = None,
    source: str | None = None,
    rebasing: Rebasing,
) -> Committed:
    """As `engine.commit.commit`."""
    start_s = context.runtime.monotonic_s()
    try:
        done = commit(
            context,
            view,
            changes,
            keys,
            branch,
            message,
            metadata,
            packs,
            replaces=replaces,
            source=source,
            rebasing=rebasing,
        )
    except ConflictError:
        context.meter.add("conflicts")
        raise
    context.meter.add("commits")
    report(context, "commit", branch, done.head, start_s)
    return done


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
    start_s = context.runtime.monotonic_s()
    found, head = compact_branch(
        context, branch, mode, dry_run=dry_run, size_ratio=size_ratio, claim=claim
    )
    if head is not None:
        context.meter.add("compactions")
        report(
            context,
            "compaction",
            branch,
            head,
            start_s,
            mode=str(mode),
            refs_merged=found.refs_merged,
            bytes_written=found.bytes_written,
            bytes_read=found.bytes_read,
        )
    return found, head


def report(
    context: Context, operation: str, branch: str, head: BlobRef, start_s: float, **more: object
) -> None:
    """Log an operation that began at `start_s` of the runtime and made the snapshot `head`.

    `more` are further attributes of the record; units in their names.
    """
    if not _LOG.isEnabledFor(logging.INFO):
        return
    duration_ms = round((context.runtime.monotonic_s() - start_s) * 1000, 3)
    facts: dict[str, object] = {
        "operation": operation,
        "repository_id": context.repository_id,
        "repository_url": context.storage.url,
        "branch": branch,
        "snapshot_id": snapshot_id_of(head.key),
        "duration_ms": duration_ms,
    }
    snapshot = context.objects.recall(head, Snapshot)
    if snapshot is not None:
        facts["kind"] = str(snapshot.kind)
        facts |= {name.replace("-", "_"): n for name, n in snapshot.totals.items()}
    _LOG.info(
        "%s %s on %s in %.1f ms",
        operation,
        facts["snapshot_id"],
        branch,
        duration_ms,
        extra=facts | more,
    )
