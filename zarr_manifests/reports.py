"""What repositories and sessions tell of themselves: history, differences, changes, room taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from zarr_manifests.engine.compact.presence_index import IndexReport
from zarr_manifests.engine.compact.repack_chunks import RepackReport
from zarr_manifests.engine.snapshot.totals import changes_of, tallies_of
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.engine.upkeep.collect import CollectionReport
from zarr_manifests.engine.upkeep.expire import ExpiryReport
from zarr_manifests.engine.upkeep.recover import LoggedOperation, RecoveryReport, RestoreReport
from zarr_manifests.engine.upkeep.verify import Problem, VerifyReport
from zarr_manifests.errors import NotFoundError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.plain import plain_text
from zarr_manifests.planning.tables.sums import NOTHING, Tally, alive_tallies, sum_of
from zarr_manifests.planning.upkeep.change_records import Change, Operation

__all__ = [
    "Amount",
    "ArrayStats",
    "ArrayTotals",
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
    "RepackReport",
    "RestoreReport",
    "SnapshotInfo",
    "Status",
    "Totals",
    "Usage",
    "VerifyReport",
    "moved_tops",
]


def moved_tops(moved: Mapping[str, str]) -> dict[str, str]:
    """New path by old of what was moved, without what only went along with its group.

    Examples
    --------
    >>> from zarr_manifests.reports import moved_tops
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
    sums : mapping of str to int
        What there is in the snapshot: `arrays`, `groups`, `chunks`, `chunk-bytes`. Where there are
        at most so many, the last two are `chunks-at-most` and `chunk-bytes-at-most`; what is not
        known is not there.
    """

    snapshot_id: str
    parent_id: str | None
    written_at: datetime
    kind: str
    message: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    commit_id: str = ""
    sums: Mapping[str, int] = field(default_factory=dict)

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
            snapshot.sums,
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
    truncated : mapping of str to tuple of int
        Of arrays that were made smaller, or whose chunks were moved, though they may have grown
        again since: the shape of the chunk grid, in chunks along each axis, beyond which all chunks
        went. Which these were is not looked up; `chunks` does not have them.
    """

    created: tuple[str, ...]
    updated: tuple[str, ...]
    deleted: tuple[str, ...]
    chunks: Mapping[str, IndexArray]
    moved: Mapping[str, str] = field(default_factory=dict)
    truncated: Mapping[str, Coords] = field(default_factory=dict)


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
class Amount:
    """Chunk refs and the bytes of their chunks: exactly so many, or so many at most.

    Parameters
    ----------
    refs : int
        Chunks that are there, wherever their bytes are.
    nbytes : int or None
        Bytes of all of them; None if nothing is known of these.
    refs_exact, nbytes_exact : bool
        Whether there are exactly so many; else there are no more.
    """

    refs: int
    nbytes: int | None
    refs_exact: bool
    nbytes_exact: bool

    @property
    def exact(self) -> bool:
        """Whether both numbers are."""
        return self.refs_exact and self.nbytes_exact

    @classmethod
    def of(cls, tally: Tally) -> Amount:
        """What is tallied."""
        return cls(tally.chunks, tally.nbytes, tally.chunks_exact, tally.nbytes_exact)


@dataclass(frozen=True, slots=True)
class ArrayTotals:
    """How much there is of one array, or of one key that is no part of any.

    Parameters
    ----------
    path : str
        Its absolute path.
    total : Amount
        What there is of it in the snapshot.
    delta : Amount
        How much more that is than in the snapshot before; less than nothing if it is less.
    """

    path: str
    total: Amount
    delta: Amount

    @property
    def exact(self) -> bool:
        """Whether all numbers are."""
        return self.total.exact and self.delta.exact


@dataclass(frozen=True, slots=True)
class Totals:
    """How much there is in a snapshot, as it says itself.

    Parameters
    ----------
    snapshot_id : str
        The snapshot.
    arrays : tuple of ArrayTotals
        By path, of every array and of every key that is no part of one.
    total : Amount
        All of them together.
    delta : Amount
        How much more that is than in the snapshot before, what was deleted included.
    """

    snapshot_id: str
    arrays: tuple[ArrayTotals, ...]
    total: Amount
    delta: Amount

    def __getitem__(self, path: str) -> ArrayTotals:
        """Of the array at that path, with or without a leading slash."""
        for array in self.arrays:
            if array.path.strip("/") == path.strip("/"):
                return array
        raise NotFoundError(f"there is no array {path!r} in snapshot {self.snapshot_id}")

    @property
    def exact(self) -> bool:
        """Whether all numbers are."""
        return self.total.exact and self.delta.exact

    @classmethod
    def of(cls, view: SnapshotView) -> Totals:
        """What the snapshot says; nothing is fetched."""
        totals, changes = tallies_of(view), changes_of(view)
        ids = {path: node.node_id for path, node in view.nodes.items()}
        alive = alive_tallies(totals, view.nodes.values())
        arrays = []
        for path, total in sorted(alive.items()):
            # It cannot be more by more than there is.
            delta = changes.get(ids[path], NOTHING).within(total.chunks)
            absolute = path if path.startswith("/") else f"/{path}"
            arrays.append(ArrayTotals(absolute, Amount.of(total), Amount.of(delta)))
        return cls(
            view.snapshot_id,
            tuple(sorted(arrays, key=lambda array: array.path)),
            Amount.of(sum_of(alive.values())),
            Amount.of(sum_of(changes.values())),
        )


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
    truncated : mapping of str to tuple of int
        Of arrays of the snapshot that were made smaller, or whose chunks were moved, though they
        may have grown again since: the shape of the chunk grid beyond which all chunks went.
    """

    created: tuple[str, ...]
    updated: tuple[str, ...]
    deleted: tuple[str, ...]
    chunks: Mapping[str, int]
    moved: Mapping[str, str] = field(default_factory=dict)
    truncated: Mapping[str, Coords] = field(default_factory=dict)

    def __bool__(self) -> bool:
        listed = self.created, self.updated, self.deleted, self.chunks, self.moved, self.truncated
        return any(listed)

    def __str__(self) -> str:
        if not self:
            return "no changes"
        lines = [f"{sign} {path}" for sign, path in self._signed()]
        lines += [f"> {old} to {new}" for old, new in moved_tops(self.moved).items()]
        lines += [f"  {path}: cut to {shape} chunks" for path, shape in self.truncated.items()]
        lines += [f"  {path}: {n} chunks" for path, n in self.chunks.items()]
        return "\n".join(map(plain_text, lines))

    def _signed(self) -> list[tuple[str, str]]:
        groups = (("+", self.created), ("~", self.updated), ("-", self.deleted))
        return [(sign, path) for sign, paths in groups for path in paths]
