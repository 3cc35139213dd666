"""What differs between two snapshots: the logs in between, their common past, and one net delta.

A log that cannot be read, or belongs to another commit than its snapshot says, is an error:
conflicts are never guessed.

Each snapshot has one parent, so the parents make a tree. A merge also names the snapshot that it
has brought in (`merged`), whose changes its line has from then on. Invariant: a merge base is known
only if all that lies above it could be read; else the history has expired.

For a net delta, the logs of both lines since they part say which places may differ, and only these
are compared. So the cost follows from what was changed, not from the size of the arrays. Invariant:
a place is in the delta if and only if it differs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence, Set
from heapq import merge
from operator import eq

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import ancestors, floor_below, snapshot_ref
from zarr_manifests.engine.chunks import ChunkReader
from zarr_manifests.engine.roots import unless_missing
from zarr_manifests.engine.view import ReadContext, SnapshotView
from zarr_manifests.errors import (
    Conflict,
    ConflictError,
    ConflictKind,
    CorruptObjectError,
    HistoryExpiredError,
    SnapshotExpiredError,
)
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import Delta, Part, grouped
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import Root
from zarr_manifests.format.snapshot import CommitKind, DeltaEntry, Snapshot
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.ids import snapshot_id_of, snapshot_key
from zarr_manifests.planning.components import Changes, replayed
from zarr_manifests.planning.merge import agree, inside, pick, unset_at
from zarr_manifests.progress import counted


def deltas_between(
    context: ReadContext, older: SnapshotView, newer: BlobRef, floor: str | None = None
) -> list[Delta] | None:
    """Deltas of the commits after `older` up to `newer`, newest first; None if not an ancestor.

    Snapshots older than `floor` do not count as ancestors. Commits that changed nothing may be left
    out.
    """
    listed = listed_since(context, older, newer, floor)
    if listed is None:
        found: list[Delta] = []
        for ref, snapshot in ancestors(context, newer, floor):
            if ref.key == older.ref.key:
                return found
            found.append(delta_of(context, snapshot))
        return None
    loaded = context.objects.load_all([(entry.log, Delta) for entry in listed])
    deltas = list[Delta]()
    for entry in reversed(listed):
        delta = loaded[entry.log.key]
        entry.check(delta)
        deltas.append(delta)
    return deltas


def listed_since(
    context: ReadContext, older: SnapshotView, newer: BlobRef, floor: str | None = None
) -> tuple[DeltaEntry, ...] | None:
    """The entries that `newer`'s read list has after the ancestor `older`; None if unclear.

    It is valid if it has the log of the commit that made `older`, which is unique to that snapshot,
    and after it each commit's own log. Then no snapshot in between has to be read, and logs can be
    read in one round, or not at all.
    """
    tip = context.objects.load(newer, Snapshot)
    deltas, logs = tip.deltas, [entry.log.key for entry in tip.deltas]
    if tip.log.key not in logs[-1:] and tip.kind is not CommitKind.REWRITE:
        return None
    if older.snapshot.log.key not in logs:
        return None
    since = deltas[logs.index(older.snapshot.log.key) + 1 :]
    whole = all(entry.first == entry.last for entry in since)
    return since if whole and _is_above(context, older, floor) else None


def _is_above(context: ReadContext, older: SnapshotView, floor: str | None) -> bool:
    """Whether an ancestor is the floor or newer."""
    if floor is None or floor == older.snapshot_id:
        return True

    def sequence() -> int:
        return context.objects.load(snapshot_ref(context, floor), Snapshot).sequence

    lowest: int = context.objects.cache.obtain(("sequence", floor), sequence)
    return lowest < older.snapshot.sequence


def delta_of(context: ReadContext, snapshot: Snapshot) -> Delta:
    """The delta of the snapshot's commit."""
    log = snapshot.log
    if snapshot.deltas and snapshot.deltas[-1].log.key == log.key:
        log = snapshot.deltas[-1].log  # with the copy that the read list may carry
    delta = context.objects.load(log, Delta)
    if delta.commit_id != snapshot.commit_id:
        raise CorruptObjectError(f"{log.key} is the log of another commit than its snapshot's")
    return delta


def tables_of(
    context: ReadContext, delta: Delta, wanted: Container[bytes] | None = None
) -> dict[bytes, list[ChunkTable]]:
    """The chunks a commit set or unset, by node, for all nodes or those wanted."""

    def is_due(part: Part) -> bool:
        return wanted is None or part.node_id in wanted

    objects, own = context.objects, delta.embedded
    due = [(ref, part) for ref in delta.manifests for part in ref.parts if is_due(part)]
    loaded = objects.load_all(due)
    found = [(part.node_id, own.decode(part, data)) for part, data in own.parts if is_due(part)]
    found += [(part.node_id, objects.table(ref, part, loaded)) for ref, part in due]
    return grouped(found)


def logged_changes(
    context: ReadContext,
    before: SnapshotView,
    deltas: Sequence[Delta],
    wanted: Container[bytes] | None = None,
) -> Changes:
    """What these commits, newest first, did after `before`; chunks only of the nodes wanted."""
    commits = ((delta, tables_of(context, delta, wanted)) for delta in reversed(deltas))
    return Changes.joined(replayed(before.nodes.values(), commits))


def distinct(coords: Sequence[IndexArray]) -> IndexArray:
    """All of these coordinates (at least one array) without duplicates, in C order.

    Raises
    ------
    CorruptObjectError
        If the numbers of axes differ.
    """
    if len({each.shape[1] for each in coords}) > 1:
        raise CorruptObjectError("commits have chunks of one node with different numbers of axes")
    together = np.concatenate(coords)
    if not len(together):
        return together
    box = Box.around_coords(together)
    return box.unravel(np.unique(box.ravel(together)))


# --- the common past ---------------------------------------------------------------------------

type Line = list[tuple[BlobRef, Snapshot]]
"""Snapshots, newest first, each of which is the parent of the one before."""


class Parted(Struct, frozen=True):
    """Two lines of history, down to the newest snapshot whose changes both have.

    Parameters
    ----------
    left, right : list of tuple
        The lines, newest first, down to the newest snapshot that both have.
    at : BlobRef
        The newest snapshot whose changes both have: that one, or one that was merged since.
    before : mapping of str to list of str
        Of each snapshot above that, by key: the keys of its parent and of what it has merged.
    """

    left: Line
    right: Line
    at: BlobRef
    before: Mapping[str, list[str]] = {}

    def has(self, ref: BlobRef) -> set[str]:
        """Keys of all snapshots from there on whose changes the snapshot has, itself included."""
        found, due = {ref.key}, [ref.key]
        while due:
            for older in self.before.get(due.pop(), ()):
                if older not in found:
                    found.add(older)
                    due.append(older)
        return found


def parted(context: ReadContext, root: Root, left: BlobRef, right: BlobRef) -> Parted:
    """Where the lines of two snapshots part, by their parents.

    Raises
    ------
    HistoryExpiredError
        If that has expired.
    """
    lines: tuple[Line, Line] = ([], [])
    seen: tuple[dict[str, int], dict[str, int]] = ({}, {})
    walks = [_walk(context, root, ref, side) for side, ref in enumerate((left, right))]
    # Sequences only grow along a line: whoever is higher cannot be below the other.
    for side, here in merge(*walks, key=lambda at: -at[1][1].sequence):
        key = here[0].key
        if key in seen[1 - side]:
            lines[1 - side][seen[1 - side][key] :] = []
            return Parted(*lines, here[0])
        seen[side][key] = len(lines[side])
        lines[side].append(here)
    raise HistoryExpiredError(
        f"the common ancestor of {snapshot_id_of(left.key)} and {snapshot_id_of(right.key)} has "
        "expired, so what each has changed since is not known"
    )


def _walk(
    context: ReadContext, root: Root, ref: BlobRef, side: int
) -> Iterator[tuple[int, tuple[BlobRef, Snapshot]]]:
    """The side, with the snapshot and each of its ancestors, as far as they exist."""
    with unless_missing():
        yield from ((side, at) for at in ancestors(context, ref, floor_below(context, root, ref)))


def _merged_line(
    context: ReadContext, root: Root, snapshot: Snapshot, below: BlobRef, known: Container[str]
) -> Line:
    """What a snapshot has merged, down to where that line parts from the one of `below`."""
    assert snapshot.merged is not None  # callers ask of merges
    source = snapshot.merged[0]
    if snapshot_key(source) in known:
        return []
    try:
        return parted(context, root, snapshot_ref(context, source), below).left
    except SnapshotExpiredError as error:
        raise HistoryExpiredError(
            f"snapshot {source}, which {snapshot.snapshot_id} has merged, has expired, so "
            "which changes both lines have is not known. Repeat the commits with cherry_pick; "
            "a tag keeps what was merged"
        ) from error


def merge_base(context: ReadContext, root: Root, ours: BlobRef, theirs: BlobRef) -> Parted:
    """The newest snapshot whose changes both have, by parents and by what was merged.

    Raises
    ------
    ConflictError
        If there are several, of which none has the changes of another.
    HistoryExpiredError
        If it has expired.
    """
    lines = parted(context, root, ours, theirs)
    due = [*lines.left, *lines.right]
    before: dict[str, list[str]] = {ref.key: [] for ref, _ in due}
    while due:
        ref, snapshot = due.pop()
        parent = [] if snapshot.parent is None else [snapshot.parent.key]
        before[ref.key] = parent
        if snapshot.merged is not None:
            before[ref.key] = [*parent, snapshot_key(snapshot.merged[0])]
            due += _merged_line(context, root, snapshot, lines.at, before)
    known = replace(lines, before=before)
    common = (known.has(ours) & known.has(theirs) & before.keys()) | {lines.at.key}
    newest = common.difference(*(before.get(key, ()) for key in common))
    if len(newest) > 1:
        listed = ", ".join(sorted(snapshot_id_of(key) for key in newest))
        raise ConflictError(
            f"this is a criss-cross merge: the common ancestors {listed} do not contain each "
            "other. Repeat the commits of one line on the other with cherry_pick, or take one of "
            "the two merges back with reset_branch",
            [Conflict(ConflictKind.HISTORY, "/", "history", "a criss-cross merge")],
        )
    (key,) = newest
    if key == lines.at.key:
        return known
    return replace(known, at=snapshot_ref(context, snapshot_id_of(key)))


# --- the net delta -----------------------------------------------------------------------------


def deltas_apart(context: ReadContext, root: Root, left: BlobRef, right: BlobRef) -> list[Delta]:
    """Deltas of the commits on both lines since they part; `progress` is told how many were read.

    Raises
    ------
    HistoryExpiredError
        If their common ancestor has expired.
    """
    lines = parted(context, root, left, right)
    commits = counted("reading commits", (*lines.left, *lines.right))
    return [delta_of(context, each) for _, each in commits if each.kind is not CommitKind.REWRITE]


def net_changes(
    context: ReadContext,
    old: SnapshotView | None,
    new: SnapshotView,
    deltas: Sequence[Delta] | None,
    wanted: Container[bytes] | None = None,
    *,
    read: bool = True,
) -> Changes:
    """What makes the one snapshot into the other.

    Parameters
    ----------
    context : ReadContext
        The repository.
    old, new : SnapshotView
        The snapshots; None is one without nodes.
    deltas : sequence of Delta or None
        Of all commits that have made them different; if it is not known, all chunks are compared.
    wanted : container of bytes, optional
        The nodes whose chunks are compared; by default all.
    read : bool
        Whether chunks are read where checksums cannot tell.
    """
    nodes, was = ({}, {}) if old is None else (old.nodes, old.by_id)
    now = new.by_id
    changed = {
        path: new.nodes.get(path)
        for path in nodes.keys() | new.nodes.keys()
        if nodes.get(path) != new.nodes.get(path)
    }
    both = {i for i in was.keys() & now.keys() if wanted is None or i in wanted}
    tables: dict[bytes, Sequence[ChunkTable]] = {}
    truncated = {}
    for node_id, coords in _touched(context, both, (old, new), deltas).items():
        a, b = (chunks_at(view, node_id, coords) for view in (old, new))
        coords = coords[~same_chunks(context, new, node_id, a, b, coords, read=read)]
        array = now[node_id].array
        # Chunks that came and went in between cut nothing off.
        if array is not None and not inside(coords, array.grid.hi).all():
            truncated[node_id] = array.grid.hi
            coords = coords[inside(coords, array.grid.hi)]
        tables[node_id] = rows_for(b, coords)
    for node_id in now.keys() - was.keys():
        table = new.chunks(node_id) if wanted is None or node_id in wanted else None
        tables[node_id] = [] if table is None else [table]
    return Changes.of(nodes, was, changed, truncated, tables)


def _touched(
    context: ReadContext,
    both: Set[bytes],
    ends: Sequence[SnapshotView | None],
    deltas: Sequence[Delta] | None,
) -> dict[bytes, IndexArray]:
    """The chunks that these commits have changed, of nodes that both ends have, in C order."""
    found: dict[bytes, list[IndexArray]] = {}
    for delta in deltas or ():
        for node_id, tables in tables_of(context, delta, both).items():
            found.setdefault(node_id, []).extend(table.coords() for table in tables)
    cut = {node_id for delta in deltas or () for node_id in delta.truncated.keys() & both}
    for node_id in both if deltas is None else cut:
        existing = (view.chunks(node_id) for view in ends if view is not None)
        found.setdefault(node_id, []).extend(t.coords() for t in existing if t is not None)
    places = {node_id: distinct(coords) for node_id, coords in found.items() if coords}
    return {node_id: coords for node_id, coords in places.items() if len(coords)}


def same_chunks(
    context: ReadContext,
    view: SnapshotView,
    node_id: bytes,
    a: ChunkTable | None,
    b: ChunkTable | None,
    coords: IndexArray,
    *,
    read: bool = True,
) -> npt.NDArray[np.bool_]:
    """Like `agree`, for chunks of a node of `view`; reads them where checksums cannot tell.

    Virtual chunks, and all if `read` is false, then have to be the same range of the same object.
    """
    node = view.by_id.get(node_id)
    if node is None or node.array is None or not node.array.checks_itself:
        return agree(a, b, coords)
    return agree(a, b, coords, ChunkReader(context, view.snapshot_id).alike if read else eq)


def chunks_at(view: SnapshotView | None, node_id: bytes, coords: IndexArray) -> ChunkTable | None:
    """Those of these chunks that exist; none if the snapshot does not have the node.

    (Deltas keep the chunks of deleted nodes, so a view may still find them.)
    """
    there = view is not None and node_id in view.by_id and len(coords)
    return view.chunks_at(node_id, coords) if view is not None and there else None


def rows_for(table: ChunkTable | None, coords: IndexArray) -> list[ChunkTable]:
    """Rows that make these chunks what they are in the table, and unset those it does not have."""
    gone = coords[agree(None, table, coords)]
    rows = [unset_at(gone)] if len(gone) else []
    there = None if table is None else pick(table, coords)
    return [*rows, there] if there is not None and len(there) else rows
