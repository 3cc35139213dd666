"""What repositories and sessions tell of themselves: history, differences, changes, room taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from zarr_manifests.engine.collect import CollectionReport
from zarr_manifests.engine.expire import ExpiryReport
from zarr_manifests.engine.index import IndexReport
from zarr_manifests.engine.recover import LoggedOperation, RecoveryReport
from zarr_manifests.engine.verify import Problem, VerifyReport
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.incremental import Change, Operation

__all__ = [
    "ArrayStats",
    "ArrayUsage",
    "Change",
    "CollectionReport",
    "Diff",
    "ExpiryReport",
    "IndexReport",
    "LoggedOperation",
    "Operation",
    "Problem",
    "RecoveryReport",
    "SnapshotInfo",
    "Status",
    "Usage",
    "VerifyReport",
    "moved_tops",
]


def moved_tops(moved: Mapping[str, str]) -> dict[str, str]:
    """New path by old of what was moved, without what only went along with its group.

    Examples
    --------
    >>> from zarr_manifests.history import moved_tops
    >>> moved_tops({"/air": "/sky", "/air/t": "/sky/t", "/air/q": "/q"})
    {'/air': '/sky', '/air/q': '/q'}
    """

    def went_along(old: str, new: str) -> bool:
        (above, _, name), (now_above, _, now_name) = old.rpartition("/"), new.rpartition("/")
        return name == now_name and moved.get(above) == now_above

    return {old: new for old, new in moved.items() if not went_along(old, new)}


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


@dataclass(frozen=True, slots=True)
class ArrayStats:
    """How far an array is filled.

    Parameters
    ----------
    path : str
        Absolute path.
    shape, chunk_shape, grid_shape : tuple of int
        Elements of the array and of a chunk, and chunks of the array, along each axis.
    initialized_chunks : int
        Chunks that are there; all others read as the fill value.
    stored_bytes : int or None
        Bytes of these, as stored; None if the index does not tell: `Repository.du` counts them.
    counted : bool
        Whether manifests were read for it, as the index did not have what was asked.
    """

    path: str
    shape: Coords
    chunk_shape: Coords
    grid_shape: Coords
    initialized_chunks: int
    stored_bytes: int | None
    counted: bool

    @property
    def total_chunks(self) -> int:
        """Chunks of the whole grid."""
        return math.prod(self.grid_shape)

    @property
    def fraction(self) -> float:
        """How much of the grid is there, from 0 to 1; 1 for an empty grid."""
        return self.initialized_chunks / self.total_chunks if self.total_chunks else 1.0


@dataclass(frozen=True, slots=True)
class ArrayUsage:
    """What an array refers to.

    Parameters
    ----------
    path : str
        Absolute path.
    inline_chunks, inline_bytes : int
        Chunks that are in manifests.
    native_chunks, native_bytes : int
        Chunks in objects of the repository.
    virtual_chunks, virtual_bytes : int
        Chunks in files elsewhere.
    """

    path: str
    inline_chunks: int = 0
    inline_bytes: int = 0
    native_chunks: int = 0
    native_bytes: int = 0
    virtual_chunks: int = 0
    virtual_bytes: int = 0

    @property
    def chunks(self) -> int:
        """All chunks that are there."""
        return self.inline_chunks + self.native_chunks + self.virtual_chunks

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.inline_bytes + self.native_bytes + self.virtual_bytes

    @classmethod
    def of(cls, path: str, table: ChunkTable | None) -> ArrayUsage:
        """What the chunk table refers to; it may be None, for no chunks."""
        if table is None:
            return cls(path)
        counts = []
        for kind in (RefKind.INLINE, RefKind.NATIVE, RefKind.VIRTUAL):
            rows = table.kind == kind
            counts += [int(rows.sum()), int(table.length[rows].sum())]
        return cls(path, *counts)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one snapshot refers to, and what each snapshot of its history has brought.

    Parameters
    ----------
    arrays : tuple of ArrayUsage
        By path, of every array and of every key that is no part of one.
    snapshots : tuple of SnapshotInfo
        The history, newest first; `totals` says how many chunks each commit set and removed
        (`refs-set`, `refs-unset`), and the bytes of those it set (`chunk-bytes`).
    """

    arrays: tuple[ArrayUsage, ...]
    snapshots: tuple[SnapshotInfo, ...]

    @property
    def chunks(self) -> int:
        """Chunks of all arrays."""
        return sum(array.chunks for array in self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays' chunks."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class Status:
    """What a session has changed and not committed.

    Parameters
    ----------
    created, updated, deleted : tuple of str
        Absolute paths of nodes.
    chunks : mapping of str to int
        Number of chunks written or removed, by absolute path.
    moved : mapping of str to str
        New path by old; these are neither created nor deleted.
    """

    created: tuple[str, ...]
    updated: tuple[str, ...]
    deleted: tuple[str, ...]
    chunks: Mapping[str, int]
    moved: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((self.created, self.updated, self.deleted, self.chunks, self.moved))

    def __str__(self) -> str:
        if not self:
            return "no changes"
        lines = [f"{sign} {path}" for sign, path in self._signed()]
        lines += [f"> {old} to {new}" for old, new in moved_tops(self.moved).items()]
        lines += [f"  {path}: {n} chunks" for path, n in self.chunks.items()]
        return "\n".join(lines)

    def _signed(self) -> list[tuple[str, str]]:
        groups = (("+", self.created), ("~", self.updated), ("-", self.deleted))
        return [(sign, path) for sign, paths in groups for path in paths]
