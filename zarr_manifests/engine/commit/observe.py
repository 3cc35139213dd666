"""Counting commits and compactions, and logging each.

The logger `zarr_manifests.operations` gets one INFO line for each, with its values as attributes of
the record. Nothing here can make an operation fail that has landed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import ConflictError
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import snapshot_id_of

_LOG = logging.getLogger("zarr_manifests.operations")


@dataclass(slots=True)
class Landing:
    """The result of an operation: `head` is the new snapshot, None as long as there is none.

    `facts` are further attributes of the log record, with units in their names.
    """

    head: BlobRef | None = None
    facts: dict[str, object] = field(default_factory=dict)


@contextmanager
def observed(context: ReadContext, operation: str, branch: str) -> Iterator[Landing]:
    """Count the operation in the block, and log it if it reports that it has landed.

    A commit that fails with a conflict is counted too.
    """
    landing, start_s = Landing(), context.runtime.monotonic_s()
    try:
        yield landing
    except ConflictError:
        if operation == "commit":
            context.meter.add("conflicts")
        raise
    if landing.head is not None:
        context.meter.add(f"{operation}s")
        _report(context, operation, branch, landing.head, start_s, landing.facts)


def _report(
    context: ReadContext,
    operation: str,
    branch: str,
    head: BlobRef,
    start_s: float,
    more: Mapping[str, object],
) -> None:
    """Log an operation that began at `start_s` of the runtime and made the snapshot `head`."""
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
        extra={**facts, **more},
    )
