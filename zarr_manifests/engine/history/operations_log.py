"""The log of operations: what the root and its archives say was done, newest first."""

from __future__ import annotations

from collections.abc import Iterator

from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import ObjectNotFoundError
from zarr_manifests.format.root import LogEntry, Root


def archived_versions(context: ReadContext) -> list[int]:
    """The versions of the root that are archived, oldest first."""
    found = (info.key.partition("/")[2] for info in context.storage.list("root/"))
    return [int(text) for text in found if len(text) == 20 and text.isdecimal()]


def logged(context: ReadContext, root: Root) -> Iterator[LogEntry]:
    """All operations that this root and its archives know, newest first."""
    versions, oldest = archived_versions(context), root.version + 1
    while True:
        for entry in reversed(root.log):
            if entry.version < oldest:
                yield entry
        oldest = min(oldest, root.log[0].version if root.log else 0)
        # This archive's log reaches further back, so no single archive is needed.
        while versions and versions[-1] > oldest:
            versions.pop()
        if not versions:
            return
        try:
            root = context.roots.archived(versions.pop())
        except ObjectNotFoundError:
            return  # a collection is removing the oldest archives
