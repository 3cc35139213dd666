"""What the history of a repository is told in: one entry a snapshot, and differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import IndexArray
from zarr_manifests.ids import snapshot_id_of

__all__ = ["Diff", "SnapshotInfo"]


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One entry of the history.

    Parameters
    ----------
    snapshot_id : str
        The snapshot's id.
    parent_id : str or None
        Its parent's; None for the first of a repository.
    written_at : datetime
        When, in UTC, by the committer's clock.
    kind : str
        `append`, `overwrite`, `delete`, `metadata`, or `rewrite` (changes no data).
    message : str
        Why.
    metadata : mapping
        What the committer wanted kept.
    totals : mapping of str to int
        What the commit did: `refs-set`, `refs-unset`, `chunk-bytes`, `chunk-objects`.
    commit_id : str
        32 hexadecimal digits, as in `CommitOutcomeUnknownError.commit_id`.
    """

    snapshot_id: str
    parent_id: str | None
    written_at: datetime
    kind: str
    message: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    commit_id: str = ""

    @classmethod
    def of(cls, ref: BlobRef, snapshot: Snapshot) -> SnapshotInfo:
        """The entry of the snapshot that lies at `ref`."""
        return cls(
            snapshot_id_of(ref.key),
            snapshot.parent_id,
            datetime.fromtimestamp(snapshot.written_ms / 1000, UTC),
            str(snapshot.kind),
            snapshot.message,
            snapshot.metadata,
            snapshot.totals,
            snapshot.commit_id.hex(),
        )


@dataclass(frozen=True, slots=True)
class Diff:
    """What changed from one snapshot to a later one.

    Parameters
    ----------
    created, updated, deleted : tuple of str
        Absolute paths; a node that was deleted and made again is in both lists.
    chunks : mapping of str to int64[n, ndim]
        Coordinates of the chunks written or removed, by absolute path, sorted.
    moved : mapping of str to str
        New path by old; these are neither created nor deleted, but updated if their metadata
        changed too.
    """

    created: tuple[str, ...]
    updated: tuple[str, ...]
    deleted: tuple[str, ...]
    chunks: Mapping[str, IndexArray]
    moved: Mapping[str, str] = field(default_factory=dict)
