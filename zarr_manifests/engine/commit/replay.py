"""What other commits did, as changes of a session: repeated, reverted, or merged into a branch.

The commit's delta says which nodes and chunks are concerned; `planning.conflict.components` decides
about each. Chunk refs are reused, so no chunk is read or written. Invariants: a patch with
conflicts is not applied at all; a node that is missing on the other snapshot is added with its id,
all its chunks, and a truncation of whatever older deltas have under that id.

A merge is one commit by the rules of a rebase: the changes of the source since the base become the
changes of a session that began at the base, and `rebase` puts them on the branch's head. It is
planned for exactly one head, and planned anew if the branch has moved; the snapshot that is merged
is in history as of the root that is replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.commit.commit_changes import CommitRequest
from zarr_manifests.engine.commit.landing import take_zones
from zarr_manifests.engine.commit.rebase import Joined, Mine, Rebasing, rebase_changes, stack
from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.history.ancestry import ancestors, snapshot_ref
from zarr_manifests.engine.history.differences import (
    Line,
    MergeBase,
    chunks_at,
    delta_of,
    deltas_between,
    differs,
    distinct,
    merge_base,
    net_changes,
    rows_for,
    tables_of,
    touched_chunks,
)
from zarr_manifests.engine.history.left_behind import find_kept, floor_below
from zarr_manifests.engine.history.refs import BranchMovedError, mark_of, marks_of
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import (
    Conflict,
    ConflictError,
    ConflictKind,
    CorruptObjectError,
    InvalidArgumentError,
    SnapshotExpiredError,
)
from zarr_manifests.format.history_pages import CommitKind
from zarr_manifests.format.nodes import Delta, Node, NodeKind
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.ids import NODE_ID_BYTES, snapshot_id_of
from zarr_manifests.keys import absolute
from zarr_manifests.planning.conflict.admission import MarkStep, shown, steps_between
from zarr_manifests.planning.conflict.components import compare_documents, decide_nodes
from zarr_manifests.planning.conflict.decide import Choice, Policy, check_policy
from zarr_manifests.planning.tables.merge import agree, inside, unset_at, without

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
    path = known.path if known is not None else "?"
    path = absolute(path)
    if now is None and then is None:
        # What the commit deleted and what is missing here count as the same.
        return (
            [Conflict(ConflictKind.DELETE, path, "chunks", "it is not here")]
            if wanted is not None
            else []
        )
    if then is not None and wanted is not None and compare_documents(wanted, then).structure:
        return [
            Conflict(
                ConflictKind.STRUCTURE,
                path,
                "metadata",
                "its chunks are encoded otherwise here, or stand for other values",
            )
        ]
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

    def request(
        self, message: str, metadata: Mapping[str, object], policy: Policy
    ) -> CommitRequest:
        """The commit."""
        return CommitRequest(
            message,
            {**metadata, "merged-from": self.source},
            self._rebasing(policy),
            check_tip=self._check_tip,
            source=self.source,
            steps=self.steps,
            merged=(self.source, self.base.snapshot_id),
        )

    def _rebasing(self, policy: Policy) -> Rebasing:
        return Rebasing(True, _turned(policy), joined=self.joined, net=True)

    def _check_tip(self, tip: SnapshotView) -> None:
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
                rebasing = self._rebasing(policy)
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
        rank = 0 if node.array is None else len(node.array.shape)
        if rank:
            changes.truncated[node.node_id] = (0,) * rank
        elif node.node_id not in changes.tables:
            changes.put_table(node.node_id, unset_at(np.zeros((1, 0), np.int64)))
