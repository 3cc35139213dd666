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

All three are a rebase by states: what makes one snapshot into another becomes the changes of a
session that began at the first, and what the branch's head has that differs from the first is what
others did. The logs say only which chunks may have changed. Chunk refs are reused, so no chunk is
read or written. Invariants: changes with conflicts are not applied at all; a node that is missing
on the branch is added with its id, all its chunks, and a truncation of whatever older deltas have
under that id.

A merge is planned for exactly one head, and planned anew if the branch has moved; the snapshot that
is merged is in history as of the root that is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import find_kept
from zarr_manifests.engine.change_set import ChangeSet, Rows, Spilled, rows_of
from zarr_manifests.engine.differences import (
    chunks_at,
    delta_of,
    deltas_apart,
    deltas_between,
    distinct,
    listed_since,
    logged_changes,
    merge_base,
    net_changes,
    rows_for,
    same_chunks,
    tables_of,
)
from zarr_manifests.engine.landing import mark_conflicts, moved, take_zones
from zarr_manifests.engine.refs import BranchMovedError, marks_of
from zarr_manifests.engine.view import Context, ReadContext, SnapshotView
from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.errors import Conflict, ConflictError, ConflictKind
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.manifest import Delta, Node, grouped
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.format.snapshot import CommitKind, Snapshot
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.keys import lies_below
from zarr_manifests.planning.appends import Relocation, plan_relocation
from zarr_manifests.planning.components import Changes, Component, apart, with_shape
from zarr_manifests.planning.conflict import (
    LISTED_CHUNKS,
    MarkStep,
    Policy,
    check_policy,
    rebase,
    steps_between,
)
from zarr_manifests.planning.merge import (
    inside,
    narrower,
    rearranged,
    rows_at,
    select,
    unset_at,
    without,
)

_ON_TOP: Final = frozenset(
    {Component.CHUNKS, Component.GROWTH, Component.ATTRIBUTES, Component.CREATE}
)
"""Changes of a node that concern no chunk but those they write themselves."""


type Tables = Mapping[bytes, Sequence[Rows]]
"""Chunks set and unset, by node id; no chunk is in two tables."""


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
    net : bool
        Whether only what is different on the branch in the end counts, and not what each commit
        did. The branch then need not come after the snapshot that the changes were made on.
        Conflicts list all chunks.
    follows : bool
        With `net`: whether chunks go with arrays that others have moved.
    relocating : Relocating, optional
        Whether appends go behind those of others.
    """

    allowed: bool = True
    policy: Policy = "fail"
    serializable: bool = False
    net: bool = False
    follows: bool = False
    relocating: Relocating | None = None


def combined(
    context: ReadContext, parent: SnapshotView, delta: Delta, later: ChangeSet
) -> ChangeSet:
    """The combined changes of a commit on `parent` and of the changes made on top of it."""
    together = ChangeSet(
        {**dict.fromkeys(delta.deleted), **{node.path: node for node in delta.nodes}},
        truncated=dict(delta.truncated),
        unsynced=list(later.unsynced),
        tables={node_id: tuple(each) for node_id, each in tables_of(context, delta).items()},
        spill=later.spill,
    )
    for node_id, shape in later.truncated.items():
        together.cut_tables(node_id, shape)
        together.truncated[node_id] = narrower(together.truncated.get(node_id), shape) or shape
    for node_id, parts in later.all_parts().items():
        for rows in parts:
            together.put_table(node_id, rows)
    for path, node in later.nodes.items():
        if node == parent.nodes.get(path):
            together.leave_node(path)
        else:
            together.set_node(path, node)
    result = {**parent.nodes, **together.nodes}
    alive = {node.node_id for node in result.values() if node is not None}
    for node_id in {*together.touched(), *together.truncated} - alive:
        together.forget(node_id)
    return together


def rebase_changes(
    context: ReadContext,
    view: SnapshotView,
    tip: Branch,
    changes: ChangeSet,
    rebasing: Rebasing,
    mine: Tables | None = None,
) -> tuple[SnapshotView, ChangeSet]:
    """Put the changes made on `view` on top of the tip; the tip, and the changes as they are there.

    If nothing in them changes, they are the same object. `mine` are all of their chunks, in tables
    that share none, if they are known.

    Raises
    ------
    ConflictError
        If they cannot be put on top of what came first.
    """
    mine = changes.all_parts() if mine is None else mine
    if (
        rebasing.allowed
        and not rebasing.serializable
        and is_apart(context, view, tip, changes, mine)
    ):
        return context.open_branch(tip), changes
    sides = _in_the_end if rebasing.net else _logged
    on, ours, theirs, done = sides(context, view, tip, changes, mine, rebasing)
    moved = rebase(
        ours,
        theirs,
        on.nodes,
        policy=rebasing.policy,
        reads=changes.reads,
        serializable=rebasing.serializable,
        listed=sys.maxsize if rebasing.net else LISTED_CHUNKS,
    )
    if moved.conflicts:
        raise ConflictError(
            "other commits came first and this one cannot be rebased onto them; nothing was "
            "committed. Open a new session on the branch and make the changes again",
            moved.conflicts,
            view.snapshot_id,
            on.snapshot_id,
        )
    dropped = grouped((*done.items(), *moved.dropped.items()))
    if not dropped and moved.nodes == changes.nodes:
        return on, changes
    result = replace(changes.copy(), nodes=dict(moved.nodes))
    for node_id, places in dropped.items():
        coords = distinct(places)
        around = Box.around_coords(coords)
        result.chunks.pop(node_id, None)
        result.tables.pop(node_id, None)
        for rows in mine[node_id]:
            left = without(changes.rows(rows), coords) if rows.box.overlaps(around) else rows
            if len(left):
                result.put_table(node_id, left)
    return on, result


type _Sides = tuple[SnapshotView, Changes, Changes, dict[bytes, IndexArray]]
"""The tip, my changes and theirs as far as they matter, and chunks of mine that are no changes."""


def _logged(
    context: ReadContext,
    view: SnapshotView,
    tip: Branch,
    changes: ChangeSet,
    mine: Tables,
    rebasing: Rebasing,
) -> _Sides:
    """Both sides, by the logs of the commits in between."""
    between = _between(context, view, tip)
    if not rebasing.allowed:
        raise ConflictError(
            "other commits came first, and with rebase=False this one is not rebased onto them; "
            "nothing was committed. Call session.rebase(), look at the result, and commit again",
            [Conflict(ConflictKind.HISTORY, "/", "history", "the branch has moved")],
            *_ends(view, tip),
        )
    of_view = view.nodes, view.by_id
    wanted = {*Changes.of(*of_view, changes.nodes, changes.truncated).nodes, *mine}
    wanted |= changes.reads.nodes() if rebasing.serializable else set()
    theirs = logged_changes(context, view, between, wanted)
    tables = {
        node_id: [rows_of(context.objects, rows) for rows in parts if _meets(rows, theirs)]
        for node_id, parts in mine.items()
    }
    ours = Changes.of(*of_view, changes.nodes, changes.truncated, tables)
    return context.open_branch(tip), ours, theirs, {}


def _ends(view: SnapshotView, tip: Branch) -> tuple[str, str]:
    """The ids of the snapshot that changes were made on, and of the branch's head."""
    return view.snapshot_id, snapshot_id_of(tip.head.key)


def _in_the_end(
    context: ReadContext,
    view: SnapshotView,
    tip: Branch,
    changes: ChangeSet,
    mine: Tables,
    rebasing: Rebasing,
) -> _Sides:
    """Both sides, by what makes `view` into the tip in the end.

    Chunks of mine that the tip has already are no changes any more, nor are nodes that both have
    made from one commit.
    """
    on = context.open_branch(tip)
    was_made = (node for node in changes.nodes.values() if node and node.node_id not in view.by_id)
    twins = {node.path: node for node in was_made if on.nodes.get(node.path) == node}
    base = {**view.nodes, **twins}
    plain = Changes.of(view.nodes, view.by_id, changes.nodes)
    placed = {*plain.taken, *plain.left}
    for node_id in mine if rebasing.follows else ():
        old, new = view.by_id.get(node_id), on.by_id.get(node_id)
        if not old or not new or old.path in changes.nodes or new.path in base:
            continue
        # Where I make or delete nodes, I would seem to take this one away.
        if not any(lies_below(new.path, at) or lies_below(at, new.path) for at in placed):
            del base[old.path]
            base[new.path] = replace(old, path=new.path)
    by_id = {node.node_id: node for node in base.values()}
    rows = {n: [rows_of(context.objects, r) for r in parts] for n, parts in mine.items()}
    # What is cut off shows in shapes and chunks.
    ours = dict(Changes.of(base, by_id, changes.nodes, {}, rows))
    tables: dict[bytes, Sequence[ChunkTable]] = {}
    done: dict[bytes, IndexArray] = {}
    for node_id, change in ours.items():
        to = change.chunks
        places = [] if to is None else [to.coords()]
        if not _ON_TOP.issuperset(change.components):
            whole = (each.chunks(node_id) for each in (view, on) if node_id in each.by_id)
            places += [table.coords() for table in whole if table is not None]
        at = distinct(places) if places else np.empty((0, 0), np.int64)
        was, now = (chunks_at(each, node_id, at) for each in (view, on))
        changed = ~same_chunks(context, on, node_id, was, now, at)
        array = on.by_id[node_id].array if node_id in on.by_id else None
        if array is not None and len(at):
            changed &= inside(at, array.grid.hi)  # its new shape says the rest
        # An array made anew in place of mine has none of its chunks, but not because I unset them.
        if to is not None and (node_id in on.by_id or node_id not in view.by_id):
            there = select(to, to.kind != RefKind.UNSET)
            same = same_chunks(context, on, node_id, there, now, at) & (rows_at(to, at) >= 0)
            changed &= ~same
            if same.any():
                done[node_id] = at[same]
                left = without(to, at[same])
                ours[node_id] = replace(change, chunks=left if len(left) else None)
        tables[node_id] = rows_for(now, at[changed])
    paths = base.keys() | on.nodes.keys()
    nodes = {path: on.nodes.get(path) for path in paths if base.get(path) != on.nodes.get(path)}
    return on, Changes(ours), Changes.of(base, by_id, nodes, {}, tables), done


def is_apart(
    context: ReadContext, view: SnapshotView, tip: Branch, changes: ChangeSet, mine: Tables
) -> bool:
    """Whether the tip's read list shows that the commits in between are disjoint from mine."""
    if changes.nodes or changes.truncated:
        return False
    listed = listed_since(context, view, tip.head, tip.floor)
    boxes = {node_id: [rows.box for rows in parts] for node_id, parts in mine.items()}
    return listed is not None and apart(boxes, listed)


def _meets(rows: Rows, theirs: Changes) -> bool:
    """Whether others' changes depend on which chunks these are; spilled ones may not matter."""
    if not isinstance(rows, Spilled):
        return True
    change = theirs.nodes.get(rows.node_id)
    if change is None:
        return False
    if _ON_TOP.issuperset(change.components):
        return change.chunks is not None and change.chunks.box.overlaps(rows.box)
    return True


def _between(context: ReadContext, view: SnapshotView, tip: Branch) -> list[Delta]:
    between = deltas_between(context, view, tip.head, tip.floor)
    if between is None:
        why = "the branch was reset, or the snapshot has expired"
        raise ConflictError(
            f"the snapshot the session began at ({view.snapshot_id}) is no longer in the "
            "branch's history; was the branch reset, or has the snapshot expired? Nothing was "
            "committed",
            [Conflict(ConflictKind.HISTORY, "/", "history", why)],
            *_ends(view, tip),
        )
    return between


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


def put_on_tip(
    workspace: Workspace,
    view: SnapshotView,
    changes: ChangeSet,
    tip: Branch,
    rebasing: Rebasing,
    mine: Tables | None = None,
) -> tuple[SnapshotView, ChangeSet]:
    """Put the workspace's changes, made on `view`, on top of the tip, if the tip passes its checks.

    `changes` are without staged chunks; `mine` are all of their chunks, if they are known.

    Raises
    ------
    ConflictError
        If they cannot be put on top of what came first.
    """
    if workspace.tip_checks:
        opened = workspace.context.open_branch(tip)
        for check in workspace.tip_checks:
            check(opened)
    moved = None
    if rebasing.relocating is not None and rebasing.allowed:
        moved = _relocated(workspace, view, changes, tip, rebasing.relocating, rebasing)
    return moved or rebase_changes(workspace.context, view, tip, changes, rebasing, mine)


def _relocated(
    workspace: Workspace,
    view: SnapshotView,
    changes: ChangeSet,
    tip: Branch,
    relocating: Relocating,
    rebasing: Rebasing,
) -> tuple[SnapshotView, ChangeSet] | None:
    """The changes on the tip, with the appends moved.

    None if no array was made longer along the dimension by both sides.

    Raises
    ------
    ConflictError
        If the appends cannot be relocated, or the rest cannot be rebased.
    """
    context, dim = workspace.context, relocating.dim
    mine = changes.on(view.nodes, view.by_id)
    theirs = logged_changes(context, view, _between(context, view, tip), ())
    moves, conflicts = plan_relocation(dim, view.nodes, mine, theirs)
    if conflicts:
        raise ConflictError(
            f"other commits have appended along {dim!r} first, and this append cannot be relocated "
            "behind them; nothing was committed. Open a new session on the branch and append again",
            conflicts,
        )
    if not moves:
        return None
    there = changes.copy()
    for move in moves:
        node = there.nodes[move.path]
        assert node is not None  # it was made longer
        shape = list(node.array_meta.shape)
        shape[move.axis] = move.length
        there.nodes[move.path] = with_shape(node, tuple(shape))
        _shift(there, move)
    # Their chunks are now beside those of others, like all else that a rebase lets pass.
    on, result = rebase_changes(context, view, tip, there, rebasing)
    uneven = [move for move in moves if move.steps is None]
    return on, relocating.rewrite(workspace, on, result, uneven) if uneven else result


def _shift(changes: ChangeSet, move: Relocation) -> None:
    """Move the appended chunks of an array to their new place, or out of it if that is uneven."""
    parts = changes.parts(move.node_id)
    changes.chunks.pop(move.node_id, None)
    changes.tables.pop(move.node_id, None)
    for table in map(changes.rows, parts):
        coords = table.coords()
        beyond = coords[:, move.axis] >= move.first
        keep = ~beyond
        if move.steps is not None:
            coords[beyond, move.axis] += move.steps
            keep |= table.kind != RefKind.UNSET
        shifted = rearranged(table, keep, coords)
        if shifted is not None:
            changes.put_table(move.node_id, shifted)
    if move.steps is not None:
        moved(changes, move.node_id, move.axis, move.first, move.steps)


# --- replay ---------------------------------------------------------------------------------------


def to_pick(context: ReadContext, snapshot_id: str) -> SnapshotView:
    """The commit to repeat or revert, which must be in history, or left behind and not collected.

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
    assert commit.snapshot.parent is not None  # callers refuse the first snapshot
    parent = context.open_view(commit.snapshot.parent)
    old, new = (commit, parent) if undo else (parent, commit)
    changes = _as_changes(net_changes(context, old, new, [delta_of(context, commit.snapshot)]))
    if not undo:
        take_zones(context, changes, commit.snapshot)
    try:
        tip = Branch(here.ref, here.snapshot.base)
        rebasing = Rebasing(net=True, follows=True)
        _, changes = rebase_changes(context, old, tip, changes, rebasing)
    except ConflictError as error:
        what = "undone" if undo else "repeated"
        raise ConflictError(
            f"commit {commit.snapshot_id} cannot be {what} here, because its nodes or chunks have "
            "other changes; nothing was committed. Make the changes by hand",
            error.conflicts,
        ) from error
    _clear_older(changes, here)
    return changes


def _as_changes(done: Changes) -> ChangeSet:
    """The changes as those of a session."""
    nodes: dict[str, Node | None] = dict.fromkeys(done.left)
    made = (c.after for _, c in done if c.after is not None and c.after != c.before)
    return ChangeSet(
        nodes | {node.path: node for node in made},
        truncated={node_id: c.cut for node_id, c in done if c.cut is not None},
        tables={node_id: (c.chunks,) for node_id, c in done if c.after and c.chunks is not None},
    )


def _clear_older(changes: ChangeSet, tip: SnapshotView) -> None:
    """Remove what the branch's deltas still hold of nodes that it had once and has not now."""
    for node in changes.nodes.values():
        if node is None or node.node_id in tip.by_id or tip.chunks(node.node_id) is None:
            continue
        if node.array is not None and node.array.shape:
            changes.truncated[node.node_id] = (0,) * len(node.array.shape)
        elif node.node_id not in changes.tables:
            changes.put_table(node.node_id, unset_at(np.zeros((1, 0), np.int64)))


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
        return Rebasing(True, _turned(policy), net=True)

    def check_tip(self, tip: SnapshotView) -> None:
        """Refuse a branch that has moved."""
        if tip.ref.key != self.tip.head.key:
            raise BranchMovedError("the branch has moved")

    def conflicts(self, context: Context, policy: Policy) -> tuple[Conflict, ...]:
        """All places where the source and the branch have different changes."""
        tip = context.objects.load(self.tip.head, Snapshot)
        found = mark_conflicts(context, tip, self.steps)
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

    def other(answer: Any) -> Any:
        words = [("ours", "theirs"), ("theirs", "ours")]
        return next((b for a, b in words if a == answer), answer)

    return (lambda conflict: other(policy(conflict))) if callable(policy) else other(policy)


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
    base = context.open_view(known.at)
    deltas = deltas_apart(context, root, known.at, head)
    changes = _as_changes(net_changes(context, base, context.open_view(head), deltas))
    _clear_older(changes, context.open_branch(tip))
    for _, each in reversed(known.left):
        take_zones(context, changes, each)
    since = known.has(head) - known.has(tip.head) - {known.at.key}
    rewrites = {ref.key for ref, each in known.left if each.kind is CommitKind.REWRITE}
    return Merging(
        snapshot_id_of(head.key),
        tip,
        base,
        changes,
        len(since - rewrites),
        steps_between(marks_of(context, base.snapshot), marks_of(context, snapshot)),
        follows=not known.right and bool(known.left),
    )
