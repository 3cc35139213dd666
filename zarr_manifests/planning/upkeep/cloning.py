"""What the root of a clone says, decided from the root of the source and the clone's own.

A clone has the id of its source, since every snapshot states that id. Both draw names of objects at
random, so they can go on independently. Invariants: the version of a clone is far ahead of that of
its source, and its fence is that version, so no session of the source can commit to the clone; a
branch or tag that is in the clone already is never lost, moved back or made shorter; once anything
has expired, every branch has a floor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.root import Branch, LogEntry, Root

OPERATION: Final = "clone"
_AHEAD: Final = 1_000_000
"""More versions than a source makes before it is cloned again, and as many as a recovery skips."""


def begun(
    source: Root,
    branches: Mapping[str, Branch],
    tags: Mapping[str, BlobRef],
    now_ms: int,
    operation_id: bytes,
    by: str,
) -> Root:
    """The first root of a clone.

    Leases, claims and counters of the source are not those of its clone.
    """
    version = source.version + _AHEAD
    return Root(
        source.repository_id,
        version,
        operation_id,
        now_ms,
        source.config,
        branches,
        tags,
        source.deleted_tags,
        (LogEntry(version, now_ms, OPERATION, "", "", operation_id).signed(by),),
        fence=version,
        features=source.features,
        metadata=source.metadata,
    )


def continued(
    root: Root, source: Root, branches: Mapping[str, Branch], tags: Mapping[str, BlobRef]
) -> Root:
    """The next root of a clone that has all its refs in itself, with these branches and tags."""
    new = replace(
        root,
        branches={**root.branches, **branches},
        tags={**root.tags, **tags},
        deleted_tags=tuple(dict.fromkeys((*root.deleted_tags, *source.deleted_tags))),
        pages={s: refs for s, refs in root.pages.items() if s not in ("branches", "tags")},
        deleted_branches=(),
        swept=0,
        metadata={**root.metadata, **source.metadata},
    )
    for feature in source.features:
        new = new.with_feature(feature)
    return new
