"""Reading what commits have changed, over a range of the history.

1. Parents are followed from the end of the range to its start, and each commit's own delta is
   fetched on the way, many at once; manifests that deltas refer to are checked for existence. Only
   then is anything returned: a range that has partly expired is an error, never a shorter answer.
2. From the oldest commit on, the delta's chunk tables are decoded and become records. The net
   change is one delta that makes the start into the end (`differences`), read like a commit's.

Invariants: a compaction never replaces a commit's own delta, and a run is never taken for one, so
compactions are not visible; only the net change reads manifests of the base.

A comparison of two snapshots tells the differences by node: chunks, moves and truncations.

Which cells of arrays came, changed or went between two snapshots
-----------------------------------------------------------------

The same net change says which chunks differ. Only these, and chunks that lie across an edge that
has moved, are looked up in the two snapshots. An array that is another one at the end, or whose
values are decoded in another way, counts as written anew. Positions are compared, so chunks that
were moved count as written where they are, and as deleted where they were.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import ancestors, snapshot_ref
from zarr_manifests.engine.differences import (
    delta_of,
    deltas_apart,
    deltas_between,
    logged_changes,
    merge_base,
    net_changes,
    tables_of,
)
from zarr_manifests.engine.view import ReadContext, SnapshotView
from zarr_manifests.errors import (
    CorruptObjectError,
    HistoryExpiredError,
    InvalidArgumentError,
    NotFoundError,
    ObjectNotFoundError,
)
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.manifest import Delta, Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import Branch
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import snapshot_id_of, snapshot_key
from zarr_manifests.keys import ArrayMeta, absolute
from zarr_manifests.planning.changes import (
    ArrayShape,
    CellChanges,
    Change,
    ChangedArray,
    classify_cells,
    records_of,
)
from zarr_manifests.planning.components import Changes, compare_documents, replayed
from zarr_manifests.planning.merge import agree
from zarr_manifests.planning.tables import lies_in
from zarr_manifests.progress import counted
from zarr_manifests.reports import Diff

type Mode = Literal["log", "net"]


def changes_between(
    context: ReadContext, start: str | None, end: BlobRef, mode: Mode, *, floor: str | None = None
) -> Iterator[Change]:
    """The changes of the commits after snapshot `start` (None: all) up to the one at `end`.

    `floor` is the oldest snapshot in history, if that is not the first; `progress` is told how many
    commits were found, and how many were read.

    Raises
    ------
    HistoryExpiredError
        If some of the range has expired.
    InvalidArgumentError
        If `start` is not an ancestor, or there is no such mode.
    """
    if mode not in ("log", "net"):
        raise InvalidArgumentError(f"there is no mode {mode!r}: choose 'log' or 'net'")
    with if_expired(context, start, end):
        commits, before = commits_between(context, start, end, floor)
        view = None if before is None else context.open_view(before)

    def records() -> Iterator[Change]:
        read = counted("reading commits", commits)
        with if_expired(context, start, end):  # some of the range may expire meanwhile
            if mode == "net":
                new, deltas = context.open_view(end), [delta for _, delta in read]
                yield from records_of(net_changes(context, view, new, deltas, read=False))
                return
            nodes = () if view is None else view.nodes.values()
            each = replayed(nodes, ((delta, tables_of(context, delta)) for _, delta in read))
            for (snapshot_id, _), changes in zip(commits, each, strict=True):
                yield from records_of(changes, snapshot_id)

    return records()


def chunks_there(view: SnapshotView, node_id: bytes, coords: IndexArray) -> npt.NDArray[np.bool_]:
    """Which of these chunks (int64[n, ndim], n >= 1) exist; reads only leaves that may tell."""
    return ~agree(None, view.chunks_at(node_id, coords), coords)


type Commit = tuple[str, Delta]
"""The id of its snapshot, and what it changed."""


def commits_between(
    context: ReadContext, start: str | None, end: BlobRef, floor: str | None = None
) -> tuple[list[Commit], BlobRef | None]:
    """The commits, oldest first, and the snapshot before the first of them."""
    stop = None if start is None else snapshot_key(start)
    due: list[tuple[str, Snapshot]] = []
    before: BlobRef | None = None
    for ref, snapshot in ancestors(context, end):
        if ref.key == stop:
            before = ref
            break
        due.append((snapshot_id_of(ref.key), snapshot))
        if snapshot.parent is not None and snapshot_id_of(ref.key) == floor:
            raise _expired(start, end, f"the history of the branch begins at {floor}")
    if before is None and start is not None:
        raise InvalidArgumentError(
            f"snapshot {start} is not an ancestor of {snapshot_id_of(end.key)}; give the older "
            "one first"
        )
    loads = [partial(delta_of, context, snapshot) for _, snapshot in due]
    deltas: list[Delta] = context.runtime.parallel(loads)
    manifests = [ref.blob.key for delta in deltas for ref in delta.manifests]
    context.runtime.parallel([partial(context.storage.head, key) for key in manifests])
    return [*zip((snapshot_id for snapshot_id, _ in due), deltas, strict=True)][::-1], before


@contextmanager
def if_expired(context: ReadContext, start: str | None, end: BlobRef) -> Iterator[None]:
    """A block in which missing objects mean that some of the range has expired."""
    try:
        yield
    except ObjectNotFoundError as error:
        raise _expired(start, end, f"{error} ({context.storage.url})") from error
    except CorruptObjectError as error:
        if isinstance(error.__cause__, ObjectNotFoundError):
            raise _expired(start, end, str(error.__cause__)) from error
        raise


def _expired(start: str | None, end: BlobRef, why: str) -> HistoryExpiredError:
    since = "the first snapshot" if start is None else f"snapshot {start}"
    return HistoryExpiredError(
        f"the changes from {since} to {snapshot_id_of(end.key)} are not all there any more: {why}. "
        "Read the whole of a newer snapshot, and the changes from there on; "
        "`repo.ancestry()` lists what there is"
    )


# --- comparing ---------------------------------------------------------------------------------


def compare(context: ReadContext, start: Branch, end: Branch, *, symmetric: bool = True) -> Diff:
    """What changed from the snapshot `start` to the snapshot `end`.

    If `start` is no ancestor of `end`: what `end` has changed since both were last the same; or,
    if not `symmetric`, all that differs between them.

    Raises
    ------
    InvalidArgumentError
        If `end` has changed nothing since, because it is an ancestor of `start`.
    ConflictError
        After a criss-cross merge, since there is no one snapshot to start from.
    HistoryExpiredError
        If snapshots between them have expired.
    """
    before, after = context.open_branch(start), context.open_branch(end)
    deltas = _logged(context, before, after)
    if deltas is None:
        root = context.roots.read().root
        if symmetric:
            base = merge_base(context, root, before.ref, after.ref).at
            if base.key == after.ref.key:
                raise InvalidArgumentError(
                    f"{before.snapshot_id} is not an ancestor of {after.snapshot_id}, but comes "
                    "after it; give the older snapshot first, or symmetric=False"
                )
            before = context.open_view(base)
            deltas = _logged(context, before, after)
        if deltas is None:
            apart = deltas_apart(context, root, before.ref, after.ref)
            return Diff.of(net_changes(context, before, after, apart))
    return Diff.of(logged_changes(context, before, deltas))


def _logged(
    context: ReadContext, before: SnapshotView, after: SnapshotView
) -> Sequence[Delta] | None:
    """The deltas of the commits between; None if the first is no ancestor of the second."""
    with if_expired(context, before.snapshot_id, after.ref):
        return deltas_between(context, before, after.ref)


# --- cells of arrays ----------------------------------------------------------------------------


def changed_cells(
    context: ReadContext,
    start: str | None,
    end: Branch,
    paths: Sequence[str],
    *,
    logged: bool = True,
) -> CellChanges:
    """What happened to the cells of arrays of one shape after snapshot `start` up to `end`.

    Without `start`, all cells of `end` are new. If the commits in between are not `logged` any
    more, all chunks of the arrays are compared.

    Raises
    ------
    NotFoundError
        If an array is in neither snapshot.
    InvalidArgumentError
        If `start` is not an ancestor, or the arrays have different shapes.
    HistoryExpiredError
        If some of the range has expired.
    """
    with if_expired(context, start, end.head):
        deltas: list[Delta] | None = None
        before = None
        if start is not None and logged:
            commits, before = commits_between(context, start, end.head, end.floor)
            deltas = [delta for _, delta in commits]
        elif start is not None:
            before = snapshot_ref(context, start)
        old = None if before is None else context.open_view(before)
        new = context.open_view(end.head)
        pairs = [_pair(path, old, new) for path in paths]
        kept = {was.node.node_id for was, now in pairs if was and _means_the_same(was, now)}
        changes = net_changes(context, old, new, deltas, kept, read=False)
        arrays = [_changed(was, now, kept, changes) for was, now in pairs]
        found = classify_cells([_path(pair) for pair in pairs], arrays)
    return replace(found, start=start, end=snapshot_id_of(end.head.key))


class _Array(Struct, frozen=True):
    """An array in one of the two snapshots."""

    view: SnapshotView
    node: Node
    meta: ArrayMeta

    @classmethod
    def of(cls, view: SnapshotView, node: Node | None) -> _Array | None:
        """The node in the snapshot, if it is an array."""
        return None if node is None or node.array is None else cls(view, node, node.array)

    @property
    def shape(self) -> ArrayShape:
        return ArrayShape(self.meta.shape, self.meta.chunk_shape)

    def there(self, coords: IndexArray) -> npt.NDArray[np.bool_]:
        """Which of these chunks exist."""
        return chunks_there(self.view, self.node.node_id, coords)

    def chunks(self, boxes: Iterable[Box] | None = None) -> IndexArray:
        """The chunks that exist: all, or those in any of the boxes, which do not overlap."""
        view, node_id = self.view, self.node.node_id
        every = [view.chunks(node_id)] if boxes is None else []
        tables = [*every, *(view.chunks_in(node_id, box) for box in boxes or ())]
        found = [table.coords() for table in tables if table is not None]
        return np.concatenate([np.empty((0, len(self.meta.shape)), np.int64), *found])


type _Pair = tuple[_Array | None, _Array | None]


def _pair(path: str, old: SnapshotView | None, new: SnapshotView) -> _Pair:
    """The array at both ends, which may have had another path at the start."""
    name = path.strip("/")
    now, was = _Array.of(new, new.nodes.get(name)), None
    if old is not None:
        moved = None if now is None else old.by_id.get(now.node.node_id)
        was = _Array.of(old, old.nodes.get(name) if moved is None else moved)
    if was is None and now is None:
        raise NotFoundError(f"there is no array {absolute(name)} in snapshot {new.snapshot_id}")
    return was, now


def _path(pair: _Pair) -> str:
    was, now = pair
    found = now or was
    assert found is not None  # `_pair` has found one
    return absolute(found.node.path)


def _means_the_same(was: _Array, now: _Array | None) -> bool:
    """Whether a chunk that nobody has written has the same values at both ends."""
    if now is None or was.node.node_id != now.node.node_id:
        return False
    return not compare_documents(was.node, now.node).structure


def _changed(
    was: _Array | None, now: _Array | None, kept: Container[bytes], changes: Changes
) -> ChangedArray:
    """What has happened to an array; one that is not kept is another now, with other chunks."""
    some = now or was
    assert some is not None  # `_pair` has found one
    written = dropped = exposed = np.empty((0, len(some.meta.shape)), np.int64)
    if was is not None and now is not None and was.node.node_id in kept:
        change = changes.nodes.get(was.node.node_id)
        dropped = was.chunks(_cut_off(was.meta.grid.hi, change.cut if change else None))
        if change is not None and change.chunks is not None:
            coords, unset = change.chunks.coords(), change.chunks.kind == RefKind.UNSET
            written, dropped = coords[~unset], np.concatenate([dropped, coords[unset]])
        # Appends write all chunks at the edge again; nothing is looked up for them then.
        edges = _moved_edges(was.meta, now.meta)
        exposed = now.chunks(box for box in edges if int(lies_in(box, written).sum()) < box.size)
    else:
        written = written if now is None else now.chunks()
        dropped = dropped if was is None else was.chunks()
    before, after = (None if each is None else each.shape for each in (was, now))
    looks = (was or some).there, (now or some).there
    return ChangedArray(before, after, written, dropped, exposed, *looks)


def _moved_edges(was: ArrayMeta, now: ArrayMeta) -> Iterator[Box]:
    """Boxes of the chunks across the nearer of the two edges of an axis that has another length."""
    grid = tuple(map(min, was.grid.hi, now.grid.hi))
    for axis, chunk in enumerate(now.chunk_shape):
        nearer = min(was.shape[axis], now.shape[axis])
        if was.shape[axis] != now.shape[axis] and nearer % chunk:
            yield _slab(grid, axis, nearer // chunk, nearer // chunk + 1)


def _cut_off(grid: Coords, cut: Coords | None) -> Iterator[Box]:
    """Boxes, apart from each other, of the chunks in the grid that a truncation has removed."""
    for axis, size in enumerate(grid):
        if cut is not None and cut[axis] < size:
            yield _slab(grid, axis, cut[axis], size)
            grid = (*grid[:axis], cut[axis], *grid[axis + 1 :])


def _slab(grid: Coords, axis: int, lo: int, hi: int) -> Box:
    start = tuple(lo if a == axis else 0 for a in range(len(grid)))
    return Box(start, tuple(hi if a == axis else n for a, n in enumerate(grid)))
