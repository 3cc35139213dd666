"""Moving changes made on one snapshot onto the tip of a branch.

The logs of the commits in between are split into components, like the session's own changes, and
`planning.conflict.decide` decides. Invariants: a base that is not an ancestor of the tip, or a log
that cannot be read, is an error; uploaded chunks are never uploaded again.

Appends can be *relocated* behind those of others: all other changes are rebased as usual, and the
appends are put on top at their new places. Chunks that start where the others' append ends only get
new coordinates. If the boundary is within a chunk, both sides have values in it, and a `Rewrite`
writes the session's values again. Every other chunk and document becomes what a rebase makes of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from zarr_manifests.engine.commit.landing import moved
from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.history.differences import (
    deltas_between,
    differs,
    listed_since,
    tables_of,
)
from zarr_manifests.engine.objects.spill import Rows, Spilled, rows_of
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import Conflict, ConflictError, ConflictKind
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.nodes import Delta, Node
from zarr_manifests.format.root import Branch
from zarr_manifests.grid import Box, Coords
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.conflict.appends import Relocation, plan_relocation
from zarr_manifests.planning.conflict.components import (
    Changes,
    Component,
    DocumentChange,
    Reads,
    apart,
    compare_documents,
    with_shape,
)
from zarr_manifests.planning.conflict.decide import LISTED_CHUNKS, Policy, Rebased, rebase
from zarr_manifests.planning.tables.merge import (
    Layer,
    merge_layers,
    narrower,
    rearranged,
    select,
    shared_rows,
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
    together = ChangeSet(
        unsynced=list(later.unsynced), spill=later.spill, durable=dict(later.durable)
    )
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
        raise ConflictError(
            f"the snapshot the session began at ({view.snapshot_id}) is no longer in the "
            "branch's history; was the branch reset, or has the snapshot expired? Nothing was "
            "committed",
            [
                Conflict(
                    ConflictKind.HISTORY,
                    "/",
                    "history",
                    "the branch was reset, or the snapshot has expired",
                )
            ],
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
    context, view = workspace.context, workspace.contents.view
    found = _moved_whole(context, view, tip, changes, relocating.dim, rebasing)
    if found is None:
        return None
    on, result, uneven = found
    return on, relocating.rewrite(workspace, on, result, uneven) if uneven else result


def _moved_whole(
    context: ReadContext,
    view: SnapshotView,
    tip: Branch,
    changes: ChangeSet,
    dim: str,
    rebasing: Rebasing,
) -> tuple[SnapshotView, ChangeSet, list[Relocation]] | None:
    """The tip, the changes there with whole chunks moved, and the appends to rewrite.

    None if no array was made longer along the dimension by both sides.
    """
    mine = Changes.of(view.nodes, changes.nodes, changes.truncated, _tables(changes))
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
        result.nodes[move.path] = _longer(node, move)
        if move.steps is not None:
            for rows in appended[move.node_id]:
                _put_shifted(result, move, result.rows(rows))
            moved(result, move.node_id, move.axis, move.first, move.steps)
    return on, result, [move for move in moves if move.steps is None]


def _tables(changes: ChangeSet) -> dict[bytes, ChunkTable]:
    return {node: table for node in changes.touched() if (table := changes.table(node)) is not None}


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


def _longer(node: Node, move: Relocation) -> Node:
    assert node.array is not None
    shape = list(node.array.shape)
    shape[move.axis] = move.length
    return with_shape(node, tuple(shape))


def _put_shifted(result: ChangeSet, move: Relocation, table: ChunkTable) -> None:
    coords = table.coords().copy()
    coords[:, move.axis] += move.steps or 0
    shifted = rearranged(table, np.ones(len(table), np.bool_), coords)
    if shifted is not None:
        result.put_table(move.node_id, shifted)
