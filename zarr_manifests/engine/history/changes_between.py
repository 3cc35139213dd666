"""Reading what commits have changed, over a range of the history.

1. Parents are followed from the end of the range to its start, and each commit's own delta is
   fetched on the way, many at once; manifests that deltas refer to are checked for existence. Only
   then is anything returned: a range that has partly expired is an error, never a shorter answer.
2. From the oldest commit on, the delta's chunk tables are decoded and become records. For the net
   change, they are merged with those before.

Invariants: a compaction never replaces a commit's own delta, and a run is never taken for one, so
compactions are not visible; manifests of the base are not read, except for the net change, where
chunks that were unset in the range are looked up at its start.

A comparison of two snapshots tells the differences by node: chunks, moves and truncations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.history.ancestry import FOLLOWING, ancestors, walk_length
from zarr_manifests.engine.history.differences import (
    delta_of,
    deltas_between,
    distinct,
    merge_base,
    net_changes,
    tables_of,
    touched_chunks,
)
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import (
    CorruptObjectError,
    HistoryExpiredError,
    InvalidArgumentError,
    ObjectNotFoundError,
)
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import Branch
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.ids import snapshot_id_of, snapshot_key
from zarr_manifests.keys import absolute
from zarr_manifests.planning.conflict.documents import changed_nodes
from zarr_manifests.planning.tables.merge import agree, narrower
from zarr_manifests.planning.upkeep.changes import Change, Net, NodeTable, changes_of
from zarr_manifests.progress import counted
from zarr_manifests.reports import Diff

type Mode = Literal["log", "net"]

_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class LoggedCommit:
    """A commit: the id of its snapshot, and its delta."""

    snapshot_id: str
    log: BlobRef


def changes_between(
    context: ReadContext,
    start: str | None,
    end: BlobRef,
    mode: Mode,
    *,
    floor: str | None = None,
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
    read = _log if mode == "log" else _net
    records = read(context, view, commits)
    return _guarded(context, start, end, records)


def chunks_there(view: SnapshotView, node_id: bytes, coords: IndexArray) -> npt.NDArray[np.bool_]:
    """Which of these chunks (int64[n, ndim], n >= 1) exist; reads only leaves that may tell."""
    return ~agree(None, view.chunks_at(node_id, coords), coords)


def commits_between(
    context: ReadContext,
    start: str | None,
    end: BlobRef,
    floor: str | None = None,
) -> tuple[list[LoggedCommit], BlobRef | None]:
    """The commits, oldest first, and the snapshot before the first of them.

    Their deltas are fetched.
    """
    stop = None if start is None else snapshot_key(start)
    commits: list[LoggedCommit] = []
    due: list[Snapshot] = []
    before: BlobRef | None = None
    length = walk_length(context, end, floor if start is None else start)
    if length is not None and start is not None:
        length -= 1  # its own commit is not one of them
    for ref, snapshot in counted(FOLLOWING, ancestors(context, end), length):
        if ref.key == stop:
            before = ref
            break
        commits.append(LoggedCommit(snapshot_id_of(ref.key), snapshot.log.bare()))
        due.append(snapshot)
        if len(due) == _AT_ONCE:
            _check_logs(context, due)
            due = []
        if snapshot.parent is not None and snapshot_id_of(ref.key) == floor:
            raise _expired(start, end, f"the history of the branch begins at {floor}")
    if before is None and start is not None:
        raise InvalidArgumentError(
            f"snapshot {start} is not an ancestor of {snapshot_id_of(end.key)}; give the older "
            "one first"
        )
    _check_logs(context, due)
    return commits[::-1], before


def _check_logs(context: ReadContext, snapshots: list[Snapshot]) -> None:
    """Fetch the commits' deltas, and check that the manifests they name exist."""
    loads = [partial(delta_of, context, snapshot) for snapshot in snapshots]
    deltas: list[Delta] = context.runtime.parallel(loads)
    manifests = [ref.blob.key for delta in deltas for ref in delta.manifests]
    context.runtime.parallel([partial(context.storage.head, key) for key in manifests])


def _log(
    context: ReadContext,
    before: SnapshotView | None,
    commits: list[LoggedCommit],
) -> Iterator[Change]:
    nodes = NodeTable(() if before is None else before.nodes.values())
    for commit in counted("reading commits", commits):
        delta = context.objects.load(commit.log, Delta)
        yield from changes_of(nodes, delta, tables_of(context, delta), commit.snapshot_id)


def _net(
    context: ReadContext,
    before: SnapshotView | None,
    commits: list[LoggedCommit],
) -> Iterator[Change]:
    net = Net.since(() if before is None else before.nodes.values())
    for commit in counted("reading commits", commits):
        delta = context.objects.load(commit.log, Delta)
        net.add(delta, tables_of(context, delta))

    def there(node_id: bytes, coords: IndexArray) -> npt.NDArray[np.bool_]:
        assert before is not None  # else no node was there
        return chunks_there(before, node_id, coords)

    yield from net.changes(there)


def _guarded(
    context: ReadContext, start: str | None, end: BlobRef, records: Iterator[Change]
) -> Iterator[Change]:
    """The records; raises `HistoryExpiredError` if some of the range expires meanwhile."""
    with if_expired(context, start, end):
        yield from records


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
            deltas = [net_changes(context, root, before, after)]
    return _difference(context, before, after, deltas)


def _logged(
    context: ReadContext, before: SnapshotView, after: SnapshotView
) -> Sequence[Delta] | None:
    """The deltas of the commits between; None if the first is no ancestor of the second."""
    with if_expired(context, before.snapshot_id, after.ref):
        return deltas_between(context, before, after.ref)


def _difference(
    context: ReadContext, before: SnapshotView, after: SnapshotView, deltas: Sequence[Delta]
) -> Diff:
    """The changes in these deltas, which are all those after `before` up to `after`."""
    changed = changed_nodes(before.nodes, after.nodes)
    paths = {node.node_id: absolute(path) for path, node in after.nodes.items()}
    touched = touched_chunks(context, deltas, paths)
    chunks = {paths[node_id]: distinct(coords) for node_id, coords in touched.items()}
    cuts: dict[bytes, Coords] = {}
    for node_id, shape in ((i, shape) for delta in deltas for i, shape in delta.truncated.items()):
        if node_id in paths and node_id in before.by_id:
            cuts[node_id] = narrower(cuts.get(node_id), shape) or shape
    arrays = {
        absolute(path): node.array
        for path, node in after.nodes.items()
        if node.array is not None and absolute(path) in chunks
    }
    return Diff(
        changed.created,
        changed.updated,
        changed.deleted,
        dict(sorted(chunks.items())),
        changed.moved,
        {paths[node_id]: shape for node_id, shape in cuts.items()},
        {path: array.grid.shape for path, array in arrays.items()},
        {p: tuple(a.dimension_names) for p, a in arrays.items() if a.dimension_names},
        changed.fields,
    )
