"""Moving changes made on one snapshot onto the tip of a branch.

The logs of the commits in between are split into components, like the session's own changes, and
`planning` decides. Invariants: a base that is not an ancestor of the tip, or a log
that cannot be read, is an error; uploaded chunks are never uploaded again.

Appends can be *relocated* behind those of others: all other changes are rebased as usual, and the
appends are put on top at their new places. Chunks that start where the others' append ends only get
new coordinates. If the boundary is within a chunk, both sides have values in it, and a `Rewrite`
writes the session's values again. Every other chunk and document becomes what a rebase makes of it.

What other commits did, as changes of a session: repeated, reverted, or merged into a branch
--------------------------------------------------------------------------------------------

The commit's delta says which nodes and chunks are concerned; `planning.components` decides
about each. Chunk refs are reused, so no chunk is read or written. Invariants: a patch with
conflicts is not applied at all; a node that is missing on the other snapshot is added with its id,
all its chunks, and a truncation of whatever older deltas have under that id.

A merge is one commit by the rules of a rebase: the changes of the source since the base become the
changes of a session that began at the base, and `rebase` puts them on the branch's head. It is
planned for exactly one head, and planned anew if the branch has moved; the snapshot that is merged
is in history as of the root that is replaced.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import ancestors, find_kept, floor_below, snapshot_ref
from zarr_manifests.engine.change_set import ChangeSet, Rows, Spilled, rows_of
from zarr_manifests.engine.differences import (
    Line,
    MergeBase,
    chunks_at,
    delta_of,
    deltas_between,
    differs,
    distinct,
    listed_since,
    merge_base,
    net_changes,
    rows_for,
    tables_of,
    touched_chunks,
)
from zarr_manifests.engine.landing import moved, take_zones
from zarr_manifests.engine.refs import BranchMovedError, mark_of, marks_of
from zarr_manifests.engine.view import Context, ReadContext, SnapshotView
from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.errors import (
    Conflict,
    ConflictError,
    ConflictKind,
    CorruptObjectError,
    InvalidArgumentError,
    SnapshotExpiredError,
)
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.manifest import Delta, Node, NodeKind
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.format.snapshot import CommitKind, Snapshot
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import NODE_ID_BYTES, snapshot_id_of
from zarr_manifests.keys import absolute
from zarr_manifests.planning.appends import Relocation, plan_relocation
from zarr_manifests.planning.components import (
    Changes,
    Component,
    DocumentChange,
    Reads,
    apart,
    compare_documents,
    decide_nodes,
    with_shape,
)
from zarr_manifests.planning.conflict import (
    LISTED_CHUNKS,
    Choice,
    MarkStep,
    Policy,
    Rebased,
    check_policy,
    rebase,
    shown,
    steps_between,
)
from zarr_manifests.planning.merge import (
    Layer,
    agree,
    inside,
    merge_layers,
    narrower,
    rearranged,
    select,
    shared_rows,
    unset_at,
    without,
)


class Joined(Struct, frozen=True):
    """How a branch has come to have a snapshot that its head does not come after: by a merge.

    Parameters
    ----------
    at : SnapshotView
        The first snapshot of the branch that has that snapshot's changes.
    changes : Delta
        What makes that snapshot into this one.
    """

    at: SnapshotView
    changes: Delta


class Rebasing(Struct, frozen=True):
    """What to do with the changes if other commits came first.

    Parameters
    ----------
    allowed : bool
        Whether they may be put on top of the others at all.
    policy : {"fail", "ours", "theirs"} or callable
        Who wins where both sides may: "ours" is the session's change, "theirs" what others have
        committed.
    serializable : bool
        Whether nothing that was read may have been changed by others.
    joined : Joined, optional
        If the branch has the snapshot that the changes were made on by a merge: which.
    net : bool
        Whether a chunk that others wrote counts only if it is another one in the end; conflicts
        then list all chunks.
    """

    allowed: bool = True
    policy: Policy = "fail"
    serializable: bool = False
    joined: Joined | None = None
    net: bool = False


class Mine(Struct, frozen=True):
    """The changes to move.

    Parameters
    ----------
    nodes : mapping of str to (Node or None)
        Nodes made or changed, by path; None where one was deleted.
    truncated : mapping of bytes to tuple of int
        Grid shapes of truncations, by node id.
    tables : mapping of bytes to sequence of ChunkTable or Spilled
        Chunks set and unset, by node id; no chunk is in two tables.
    reads : Reads
        What was read in the meantime.
    """

    nodes: Mapping[str, Node | None]
    truncated: Mapping[bytes, Coords]
    tables: Mapping[bytes, Sequence[Rows]]
    reads: Reads = field(default_factory=Reads)

    @classmethod
    def of(cls, delta: Delta, tables: Mapping[bytes, Sequence[Rows]], *reads: Reads) -> Mine:
        """The changes of a delta with these chunks."""
        nodes: dict[str, Node | None] = dict.fromkeys(delta.deleted)
        nodes |= {node.path: node for node in delta.nodes}
        return cls(nodes, delta.truncated, tables, *reads)

    @classmethod
    def of_set(cls, changes: ChangeSet) -> Mine:
        """The changes of a session."""
        tables = {node: parts for node in changes.touched() if (parts := changes.parts(node))}
        return cls(changes.nodes, changes.truncated, tables, changes.reads)


def stack(base: SnapshotView, layers: Iterable[Mine], together: ChangeSet) -> None:
    """Put changes made one after another on `base`, oldest first, into one change set."""
    for layer in layers:
        for node_id, shape in layer.truncated.items():
            together.cut_tables(node_id, shape)
            together.truncated[node_id] = narrower(together.truncated.get(node_id), shape) or shape
        for node_id, parts in layer.tables.items():
            for rows in parts:
                together.put_table(node_id, rows)
        for path, node in layer.nodes.items():
            if node == base.nodes.get(path):
                together.leave_node(path)
            else:
                together.set_node(path, node)
    result = {**base.nodes, **together.nodes}
    alive = {node.node_id for node in result.values() if node is not None}
    for node_id in {*together.touched(), *together.truncated} - alive:
        together.forget(node_id)


def combined(
    context: ReadContext, parent: SnapshotView, delta: Delta, later: ChangeSet
) -> ChangeSet:
    """The combined changes of a commit on `parent` and of the changes made on top of it."""
    newer = Mine.of_set(later)
    together = ChangeSet(unsynced=list(later.unsynced), spill=later.spill)
    stack(parent, [Mine.of(delta, tables_of(context, delta)), newer], together)
    return together


class Moved(Struct, frozen=True):
    """Changes, moved onto the tip.

    Parameters
    ----------
    on : SnapshotView
        The tip, opened.
    changes : ChangeSet
        The changes as they are there; the same object if nothing in them changes.
    apart : bool
        Whether the others are known to have touched no node and none of its chunks.
    """

    on: SnapshotView
    changes: ChangeSet
    apart: bool = False


def rebase_changes(
    context: ReadContext,
    view: SnapshotView,
    tip: Branch,
    changes: ChangeSet,
    rebasing: Rebasing,
    mine: Mine | None = None,
) -> Moved:
    """Put the changes made on `view` on top of the tip.

    `mine` are the same changes, if they are known.

    Raises
    ------
    ConflictError
        If they cannot be put on top of what came first.
    """
    mine = mine or Mine.of_set(changes)
    on, moved = _onto(context, view, tip, mine, rebasing)
    if not moved.dropped and moved.nodes == mine.nodes:
        return Moved(on, changes, moved.apart)
    result = replace(changes.copy(), nodes=dict(moved.nodes))
    for node_id, coords in moved.dropped.items():
        around, gone = Box.around_coords(coords), set(map(tuple, coords.tolist()))
        left = [
            without(changes.rows(rows), coords) if rows.box.overlaps(around) else rows
            for rows in changes.tables.get(node_id, ())
        ]
        refs = result.chunks.pop(node_id, {})
        result.tables.pop(node_id, None)
        if kept := {at: ref for at, ref in refs.items() if at not in gone}:
            result.chunks[node_id] = kept
        if any(map(len, left)):
            result.tables[node_id] = tuple(rows for rows in left if len(rows))
    result.keep_within_budget()
    return Moved(on, result)


def _onto(
    context: ReadContext, view: SnapshotView, tip: Branch, mine: Mine, rebasing: Rebasing
) -> tuple[SnapshotView, Rebased]:
    if rebasing.allowed and not rebasing.serializable and _apart(context, view, tip, mine):
        return context.open_branch(tip), Rebased((), mine.nodes, apart=True)
    between = _between(context, view, tip, rebasing.joined)
    if not rebasing.allowed:
        raise ConflictError(
            "other commits came first, and with rebase=False this one is not rebased onto them; "
            "nothing was committed. Call session.rebase(), look at the result, and commit again",
            [Conflict(ConflictKind.HISTORY, "/", "history", "the branch has moved")],
            *_ends(view, tip),
        )
    wanted = {*Changes.of(view.nodes, mine.nodes, mine.truncated, {}).nodes, *mine.tables}
    wanted |= mine.reads.nodes() if rebasing.serializable else set()
    theirs = _theirs(context, view, between, wanted)
    tables = {
        node_id: [rows_of(context.objects, rows) for rows in parts if _meets(rows, theirs)]
        for node_id, parts in mine.tables.items()
    }
    ours = Changes.of(view.nodes, mine.nodes, mine.truncated, _as_one(tables))
    on = context.open_branch(tip)
    if rebasing.net:
        theirs = _without_detours(context, view, on, theirs, ours)
    moved = rebase(
        ours,
        theirs,
        on.nodes,
        policy=rebasing.policy,
        reads=mine.reads,
        serializable=rebasing.serializable,
        listed=sys.maxsize if rebasing.net else LISTED_CHUNKS,
    )
    if moved.conflicts:
        raise ConflictError(
            "other commits came first and this one cannot be rebased onto them; nothing was "
            "committed. Open a new session on the branch and make the changes again",
            moved.conflicts,
            *_ends(view, tip),
        )
    return on, moved


def _ends(view: SnapshotView, tip: Branch) -> tuple[str, str]:
    """The ids of the snapshot that changes were made on, and of the branch's head."""
    return view.snapshot_id, snapshot_id_of(tip.head.key)


def _without_detours(
    context: ReadContext, view: SnapshotView, on: SnapshotView, theirs: Changes, ours: Changes
) -> Changes:
    """Others' changes without the chunks that are in the end as they were, as far as it matters."""
    nodes = dict(theirs.nodes)
    for node_id, change in theirs:
        mine = ours.nodes.get(node_id)
        if mine is None or mine.chunks is None or change.chunks is None or change.cut is not None:
            continue
        if change.before is None or change.after is None:
            continue
        both = select(change.chunks, shared_rows(change.chunks, mine.chunks)).coords()
        if not len(both):
            continue
        left = without(change.chunks, both[~differs(context, on, view, node_id, both)])
        nodes[node_id] = replace(change, chunks=left if len(left) else None)
    return Changes(nodes)


def _apart(context: ReadContext, view: SnapshotView, tip: Branch, mine: Mine) -> bool:
    """Whether the tip's read list shows that the commits in between are disjoint from mine."""
    if mine.nodes or mine.truncated:
        return False
    listed = listed_since(context, view, tip.head, tip.floor)
    boxes = {node_id: [rows.box for rows in parts] for node_id, parts in mine.tables.items()}
    return listed is not None and apart(boxes, listed)


def _meets(rows: Rows, theirs: Changes) -> bool:
    """Whether others' changes depend on which chunks these are; spilled ones may not matter."""
    if not isinstance(rows, Spilled):
        return True
    change = theirs.nodes.get(rows.node_id)
    if change is None:
        return False
    if {*change.components} <= {Component.CHUNKS, Component.GROWTH, Component.ATTRIBUTES}:
        return change.chunks is not None and change.chunks.box.overlaps(rows.box)
    return True


def _between(
    context: ReadContext, view: SnapshotView, tip: Branch, joined: Joined | None = None
) -> list[Delta]:
    since = view if joined is None else joined.at
    between = deltas_between(context, since, tip.head, tip.floor)
    if between is None:
        why = "the branch was reset, or the snapshot has expired"
        raise ConflictError(
            f"the snapshot the session began at ({view.snapshot_id}) is no longer in the "
            "branch's history; was the branch reset, or has the snapshot expired? Nothing was "
            "committed",
            [Conflict(ConflictKind.HISTORY, "/", "history", why)],
            *_ends(view, tip),
        )
    return between if joined is None else [*between, joined.changes]


def _theirs(
    context: ReadContext, view: SnapshotView, between: list[Delta], wanted: Container[bytes]
) -> Changes:
    """The changes of the commits in between, newest first; chunks only of the nodes wanted."""
    nodes = dict(view.nodes)
    theirs = Changes({})
    for delta in reversed(between):
        changed = Mine.of(delta, {}).nodes
        tables = _as_one(tables_of(context, delta, wanted))
        theirs = theirs.then(Changes.of(nodes, changed, delta.truncated, tables))
        for path in delta.deleted:
            nodes.pop(path, None)
        nodes.update((node.path, node) for node in delta.nodes)
    return theirs


def _as_one(tables: Mapping[bytes, Sequence[ChunkTable]]) -> dict[bytes, ChunkTable]:
    """The chunks of each node in one table."""
    found = {}
    for node_id, each in tables.items():
        table = merge_layers([Layer(None, tuple(each))]).table
        if table is not None:
            found[node_id] = table
    return found


# --- appends behind those of others ---------------------------------------------------------------

type Rewrite = Callable[[Workspace, SnapshotView, ChangeSet, Sequence[Relocation]], ChangeSet]
"""Rewrites a session's appended values, given its workspace, the tip, the changes on the tip
without these values, and their new place."""


class Relocating(Struct, frozen=True):
    """Appends along a dimension are put behind those of others.

    Parameters
    ----------
    dim : str
        The name of the dimension.
    rewrite : Rewrite
        Rewrites values if the boundary of the others' append is within a chunk.
    """

    dim: str
    rewrite: Rewrite


def relocate_changes(
    workspace: Workspace,
    changes: ChangeSet,
    tip: Branch,
    relocating: Relocating | None,
    rebasing: Rebasing,
) -> tuple[SnapshotView, ChangeSet] | None:
    """The opened tip, and the workspace's changes as they are there, with its appends moved.

    `changes` are the workspace's, without staged chunks. None if relocation is not wanted, or if no
    array was made longer along the dimension by both sides.

    Raises
    ------
    ConflictError
        If the appends cannot be relocated, or the rest cannot be rebased.
    """
    if relocating is None or not rebasing.allowed:
        return None
    context, view, dim = workspace.context, workspace.contents.view, relocating.dim
    found = {node_id: changes.table(node_id) for node_id in changes.touched()}
    tables = {node_id: table for node_id, table in found.items() if table is not None}
    mine = Changes.of(view.nodes, changes.nodes, changes.truncated, tables)
    theirs = _theirs(context, view, _between(context, view, tip), ())
    moves, conflicts = plan_relocation(dim, view.nodes, mine, theirs)
    if conflicts:
        raise ConflictError(
            f"other commits have appended along {dim!r} first, and this append cannot be relocated "
            "behind them; nothing was committed. Open a new session on the branch and append again",
            conflicts,
        )
    if not moves:
        return None
    rest, appended = changes.copy(), {}
    for move in moves:
        appended[move.node_id] = _take_append(rest, move, view)
    rebased = rebase_changes(context, view, tip, rest, rebasing)
    on, result = rebased.on, rebased.changes
    for move in moves:
        node = result.nodes.get(move.path) or on.nodes[move.path]
        shape = list(node.array_meta.shape)
        shape[move.axis] = move.length
        result.nodes[move.path] = with_shape(node, tuple(shape))
        if move.steps is not None:
            for rows in appended[move.node_id]:
                _put_shifted(result, move, result.rows(rows))
            moved(result, move.node_id, move.axis, move.first, move.steps)
    uneven = [move for move in moves if move.steps is None]
    return on, relocating.rewrite(workspace, on, result, uneven) if uneven else result


def _take_append(rest: ChangeSet, move: Relocation, view: SnapshotView) -> list[Rows]:
    """Take the append out of the changes; return its chunks."""
    before, node = view.nodes[move.path], rest.nodes.pop(move.path, None)
    if node is not None and before.array is not None:
        other = with_shape(node, before.array.shape)
        if compare_documents(before, other) != DocumentChange():
            rest.nodes[move.path] = other  # attributes
    appended: list[Rows] = []
    parts = rest.parts(move.node_id)
    rest.chunks.pop(move.node_id, None)
    rest.tables.pop(move.node_id, None)
    for rows in parts:
        if isinstance(rows, Spilled) and not rows.unset and rows.box.lo[move.axis] >= move.first:
            appended.append(rows)
            continue
        table = rest.rows(rows)
        beyond = table.coords()[:, move.axis] >= move.first
        for keep, taken in ((beyond & (table.kind != RefKind.UNSET), True), (~beyond, False)):
            part = select(table, keep)
            if len(part) and taken:
                appended.append(part)
            elif len(part):
                rest.put_table(move.node_id, part)
    return appended


def _put_shifted(result: ChangeSet, move: Relocation, table: ChunkTable) -> None:
    coords = table.coords().copy()
    coords[:, move.axis] += move.steps or 0
    shifted = rearranged(table, np.ones(len(table), np.bool_), coords)
    if shifted is not None:
        result.put_table(move.node_id, shifted)


# --- replay ---------------------------------------------------------------------------------------

_LISTED_CHUNKS: Final = 20


def to_revert(
    context: ReadContext, here: SnapshotView, branch: str, snapshot_id: str
) -> SnapshotView:
    """The commit to revert, which must be in the history of the branch whose head is `here`.

    Raises
    ------
    InvalidArgumentError
        If it is not.
    SnapshotExpiredError
        If its parent is no longer in history.
    """
    ref = snapshot_ref(context, snapshot_id)
    floor = floor_below(context, context.roots.latest.root, here.ref)
    if not any(known.key == ref.key for known, _ in ancestors(context, here.ref, floor)):
        raise InvalidArgumentError(
            f"snapshot {snapshot_id} is not in the history of branch {branch!r}, so it cannot be "
            "undone there"
        )
    done = context.open_view(ref)
    if floor == snapshot_id and done.snapshot.parent is not None:
        raise SnapshotExpiredError(
            f"the snapshot before {snapshot_id} has expired, so the earlier state is not known; "
            "make the change by hand"
        )
    return done


def to_pick(context: ReadContext, snapshot_id: str) -> SnapshotView:
    """The commit to repeat, which must be in history, or left behind and not collected.

    Raises
    ------
    SnapshotExpiredError
        If it is not.
    """
    ref, _, _ = find_kept(context, context.roots.latest.root, snapshot_id)
    return context.open_view(ref)


def patch(
    context: ReadContext, commit: SnapshotView, here: SnapshotView, *, undo: bool = False
) -> ChangeSet:
    """The changes to make on `here` to repeat or revert the commit.

    Raises
    ------
    ConflictError
        If `here` differs from what the commit found, or left, where it changed something.
    """
    if commit.ref.key == here.ref.key:
        commit = here  # reuses everything that is loaded
    assert commit.snapshot.parent is not None  # callers refuse the first snapshot
    parent = context.open_view(commit.snapshot.parent)
    delta = delta_of(context, commit.snapshot)
    old, new = (commit, parent) if undo else (parent, commit)
    paths = {node.path for node in delta.nodes} | delta.deleted.keys()
    nodes, conflicts = decide_nodes(paths, old.nodes, new.nodes, here.nodes)
    _tell_groups_apart(context, nodes, here)
    result = {path: node for path, node in {**here.nodes, **nodes}.items() if node is not None}
    by_id = {node.node_id: node for node in result.values()}
    states = _States(context, old, new, here, by_id)
    changes = ChangeSet(nodes)
    for node_id, coords in _touched(states, delta).items():
        conflicts += _patch_chunks(changes, node_id, coords, states)
    if conflicts:
        what = "undone" if undo else "repeated"
        raise ConflictError(
            f"commit {commit.snapshot_id} cannot be {what} here, because its nodes or chunks have "
            "other changes; nothing was committed. Make the changes by hand",
            conflicts,
        )
    if not undo:
        take_zones(context, changes, commit.snapshot)
    return changes


def _tell_groups_apart(
    context: ReadContext, nodes: dict[str, Node | None], here: SnapshotView
) -> None:
    """Give a new group a new id if its own id exists already.

    Groups with the same documents count as one, so a group here may have that id.
    """
    ids = Counter(n.node_id for n in {**here.nodes, **nodes}.values() if n is not None)
    for path, node in nodes.items():
        if node is not None and node.kind is NodeKind.GROUP and ids[node.node_id] > 1:
            ids[node.node_id] -= 1
            nodes[path] = replace(node, node_id=context.runtime.random_bytes(NODE_ID_BYTES))


def _all_chunks(view: SnapshotView, node_id: bytes) -> list[IndexArray]:
    """All existing chunks of the node: one array of coordinates, or none."""
    table = view.chunks(node_id) if node_id in view.by_id else None
    return [] if table is None else [table.coords()]


class _States(Struct, frozen=True):
    """The snapshots before and after the commit (swapped to revert it), and the one to change."""

    context: ReadContext
    before: SnapshotView
    after: SnapshotView
    here: SnapshotView
    result: Mapping[bytes, Node]
    """The nodes that will be here."""


def _touched(states: _States, delta: Delta) -> dict[bytes, IndexArray]:
    """Chunks that the commit has changed, and those that a change of nodes here affects."""
    before, after, here, result = states.before, states.after, states.here, states.result
    touched = touched_chunks(states.context, [delta])
    for node_id in delta.truncated:
        found = _all_chunks(before, node_id) + _all_chunks(after, node_id)
        touched[node_id] = touched.get(node_id, []) + found
    for node_id in here.by_id.keys() - result.keys():
        touched[node_id] = _all_chunks(before, node_id) + _all_chunks(here, node_id)
    for node_id in result.keys() - here.by_id.keys():
        touched[node_id], node = _all_chunks(after, node_id), result[node_id]
        # Nothing else shows that an older chunk is gone.
        if not _ndim(node) and node.kind is not NodeKind.GROUP:
            touched[node_id].append(np.zeros((1, 0), np.int64))
    for node_id in here.by_id.keys() & result.keys():
        now, then = here.by_id[node_id].array, result[node_id].array
        if now is not None and then is not None and now.grid != then.grid:
            cut = [coords[~inside(coords, then.grid.hi)] for coords in _all_chunks(here, node_id)]
            touched[node_id] = touched.get(node_id, []) + cut
    return {node_id: _unique(found, node_id, states) for node_id, found in touched.items()}


def _unique(found: Sequence[IndexArray], node_id: bytes, states: _States) -> IndexArray:
    """All of these coordinates without duplicates, in C order."""
    known = [v.by_id[node_id] for v in (states.before, states.after) if node_id in v.by_id]
    ndim = _ndim(known[0]) if known else next((coords.shape[1] for coords in found), 0)
    if any(coords.shape[1] != ndim for coords in found):
        raise CorruptObjectError(f"a commit has chunks of other axes than the {ndim} of their node")
    return distinct([np.zeros((0, ndim), np.int64), *found])


def _ndim(node: Node) -> int:
    return len(node.array.shape) if node.array is not None else 0


def _patch_chunks(
    changes: ChangeSet, node_id: bytes, touched: IndexArray, states: _States
) -> list[Conflict]:
    """Record the changes to one node's chunks; return the conflicts."""
    now, then = states.here.by_id.get(node_id), states.result.get(node_id)
    was, wanted = states.before.by_id.get(node_id), states.after.by_id.get(node_id)
    known = now or wanted or was
    path = absolute(known.path if known is not None else "?")
    if now is None and then is None:
        # What the commit deleted and what is missing here count as the same.
        why = "it is not here"
        return [] if wanted is None else [Conflict(ConflictKind.DELETE, path, "chunks", why)]
    if then is not None and wanted is not None and compare_documents(wanted, then).structure:
        why = "its chunks are encoded otherwise here, or stand for other values"
        return [Conflict(ConflictKind.STRUCTURE, path, "metadata", why)]
    after, due, differ = states.after, touched, [touched[:0]]
    if now is not None:
        due = touched[differs(states.context, states.here, after, node_id, touched)]
        differ = [due[differs(states.context, states.here, states.before, node_id, due)]]
    if then is not None and then.array is not None:
        outside = due[~inside(due, then.array.grid.hi)]
        differ.append(outside[~agree(None, chunks_at(after, node_id, outside), outside)])
    clash = distinct(differ)
    if len(clash):
        where = tuple(tuple(coords) for coords in clash[:_LISTED_CHUNKS].tolist())
        return [Conflict(ConflictKind.CHUNK, path, "chunks", "there are other bytes here", where)]
    if then is not None:  # else the chunks are deleted with the node
        if now is None and _ndim(then):
            changes.truncated[node_id] = (0,) * _ndim(then)
        for table in rows_for(chunks_at(after, node_id, due), due):
            changes.put_table(node_id, table)
    return []


# --- merging --------------------------------------------------------------------------------------


class Merging(Struct, frozen=True):
    """A merge that is planned for one head of a branch.

    Parameters
    ----------
    source : str
        Id of the snapshot to merge.
    tip : Branch
        The branch as it is.
    base : SnapshotView
        The newest snapshot whose changes both have.
    changes : ChangeSet
        What the source has changed since.
    commits : int
        How many commits did that.
    joined : Joined or None
        If the branch has the base by a merge: how that differs from the base.
    steps : tuple of MarkStep
        The marks that the source has moved.
    follows : bool
        Whether the source comes after the branch's head, so that the branch can be moved there.
    """

    source: str
    tip: Branch
    base: SnapshotView
    changes: ChangeSet
    commits: int
    joined: Joined | None
    steps: tuple[MarkStep, ...]
    follows: bool

    @property
    def head(self) -> str:
        """Id of the branch's head."""
        return snapshot_id_of(self.tip.head.key)

    @property
    def done(self) -> bool:
        """Whether the branch has all changes of the source already."""
        return not self.follows and self.base.snapshot_id == self.source

    def rebasing(self, policy: Policy) -> Rebasing:
        """How the changes go on top of the branch."""
        return Rebasing(True, _turned(policy), joined=self.joined, net=True)

    def check_tip(self, tip: SnapshotView) -> None:
        """Refuse a branch that has moved."""
        if tip.ref.key != self.tip.head.key:
            raise BranchMovedError("the branch has moved")

    def conflicts(self, context: Context, policy: Policy) -> tuple[Conflict, ...]:
        """All places where the source and the branch have different changes."""
        tip = context.objects.load(self.tip.head, Snapshot)
        found = [
            Conflict(
                ConflictKind.TXN,
                "/",
                "txn",
                f"both sides have moved the last version of {step.app!r}, from "
                f"{shown(step.before)} to {shown(step.version)} and to {shown(mark)}",
            )
            for step in self.steps
            if (mark := mark_of(context, tip, step.app)) != step.before
        ]
        if self.base.ref.key != self.tip.head.key:
            try:
                rebasing = self.rebasing(policy)
                rebase_changes(context, self.base, self.tip, self.changes, rebasing)
            except ConflictError as error:
                found += error.conflicts
        return tuple(found)


def _turned(policy: Policy) -> Policy:
    """The policy of the changes that are put on the branch, given that of the branch."""
    check_policy(policy)
    words: dict[Choice, Choice] = {"ours": "theirs", "theirs": "ours", "fail": "fail"}
    if not callable(policy):
        return words[policy]

    def turned(conflict: Conflict) -> Choice:
        answer = policy(conflict)
        known: tuple[object, ...] = tuple(words)
        return words[answer] if answer in known else answer  # which is refused by who asks

    return turned


def plan_merge(context: Context, root: Root, branch: str, source: str) -> Merging:
    """How to merge the snapshot into the branch, as of this root.

    Raises
    ------
    NotFoundError
        If there is no such branch.
    SnapshotExpiredError
        If the snapshot is in no history and not kept, or what it has in common with the branch is
        not in history.
    ConflictError
        After a criss-cross merge.
    """
    tip = context.roots.branch(root, branch)
    head, snapshot, _ = find_kept(context, root, source)
    known = merge_base(context, root, head, tip.head)
    base, lines = context.open_view(known.at), known.lines
    changes = ChangeSet()
    joined = _joined(context, root, base, known, lines.left)
    mine = deltas_between(context, base if joined is None else joined.at, head) or []
    mine += [] if joined is None else [joined.changes]
    stack(base, (Mine.of(each, tables_of(context, each)) for each in reversed(mine)), changes)
    _leave_out_detours(context, base, context.open_view(head), mine, changes)
    _clear_older(changes, base, context.open_branch(tip))
    for _, each in reversed(lines.left):
        take_zones(context, changes, each)
    since = known.has(head) - known.has(tip.head) - {known.at.key}
    rewrites = {ref.key for ref, each in lines.left if each.kind is CommitKind.REWRITE}
    return Merging(
        snapshot_id_of(head.key),
        tip,
        base,
        changes,
        len(since - rewrites),
        _joined(context, root, base, known, lines.right),
        steps_between(marks_of(context, base.snapshot), marks_of(context, snapshot)),
        follows=not lines.right and bool(lines.left),
    )


def _joined(
    context: Context, root: Root, base: SnapshotView, known: MergeBase, line: Line
) -> Joined | None:
    """How a line has come to have the base, if it was by a merge."""
    at = known.joined(line)
    if at is None:
        return None
    view = context.open_view(at)
    return Joined(view, net_changes(context, root, base, view))


def _leave_out_detours(
    context: Context,
    base: SnapshotView,
    source: SnapshotView,
    deltas: Sequence[Delta],
    changes: ChangeSet,
) -> None:
    """Remove the chunks that several commits have written and that are as in the base again."""
    several = deltas if len(deltas) > 1 else ()
    for node_id, coords in touched_chunks(context, several, base.by_id).items():
        table = None if node_id in changes.truncated else changes.table(node_id)
        if table is None or len(coords) < 2:
            continue
        together = np.concatenate(coords)
        box = Box.around_coords(together)
        places, counts = np.unique(box.ravel(together), return_counts=True)
        again = box.unravel(places[counts > 1])
        if len(again):
            left = without(table, again[~differs(context, source, base, node_id, again)])
            changes.chunks.pop(node_id, None)
            changes.tables.pop(node_id, None)
            if len(left):
                changes.put_table(node_id, left)


def _clear_older(changes: ChangeSet, base: SnapshotView, tip: SnapshotView) -> None:
    """Remove what the branch's deltas still hold of arrays that it had once and has not now."""
    old = {node.node_id for node in base.nodes.values()}
    for node in changes.nodes.values():
        if node is None or node.node_id in old or tip.chunks(node.node_id) is None:
            continue
        if _ndim(node):
            changes.truncated[node.node_id] = (0,) * _ndim(node)
        elif node.node_id not in changes.tables:
            changes.put_table(node.node_id, unset_at(np.zeros((1, 0), np.int64)))
