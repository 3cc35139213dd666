"""Merging one line of history into a branch, as one commit by the rules of a rebase.

The changes of the source since the base become the changes of a session that began at the base. So
`rebase` puts them on the branch's head as it would put those of any session. Invariants: the merge
is planned for exactly one head, and planned anew if the branch has moved; the snapshot that is
merged is in history as of the root that is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zarr_manifests.engine.commit.carry_zones import take_zones
from zarr_manifests.engine.commit.commit_changes import CommitRequest
from zarr_manifests.engine.commit.rebase import Joined, Mine, Rebasing, rebase_changes, stack
from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.history.commit_logs import deltas_between, tables_of, touched_chunks
from zarr_manifests.engine.history.find_marks import mark_of, marks_of
from zarr_manifests.engine.history.left_behind import find_kept
from zarr_manifests.engine.history.merge_base import Line, MergeBase, merge_base
from zarr_manifests.engine.history.net_changes import differs, net_changes
from zarr_manifests.engine.history.refs import BranchMovedError
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import Conflict, ConflictError, ConflictKind
from zarr_manifests.format.delta import CommitKind, Delta
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.conflict.decide import Choice, Policy, check_policy
from zarr_manifests.planning.conflict.transactions import MarkStep, shown, steps_between
from zarr_manifests.planning.tables.merge import unset_at, without


@dataclass(frozen=True, slots=True)
class Merging:
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
        If the lines were merged crosswise.
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
