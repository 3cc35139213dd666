"""Merging the changes of forks into their session.

Invariants: a fork is merged completely or not at all; a copy's changes count once, however often it
is merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from zarr_manifests.engine.change_set import ChangeSet, Rows, lies_below, resident
from zarr_manifests.engine.overlay import SessionView, same_chunk
from zarr_manifests.errors import Conflict, ConflictKind
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.manifest import Node
from zarr_manifests.grid import Coords
from zarr_manifests.planning.merge import (
    Layer,
    difference,
    in_box,
    inside,
    merge_layers,
    narrower,
)

_ABSENT: Final = object()
_LISTED: Final = 20


def _may_share(ours: Rows, theirs: Rows) -> bool:
    """Whether both may have rows of the same chunks; fetches nothing."""
    if not ours.box.overlaps(theirs.box):
        return False
    if resident(ours) and not in_box(ours, theirs.box).any():
        return False
    return not resident(theirs) or bool(in_box(theirs, ours.box).any())


class Merge:
    """Merges the changes of forks into a session's.

    A fork's change applies where the session has not changed since the fork was made, where the
    same copy made the earlier change, or where both made the same change. Anything else is a
    conflict.

    Parameters
    ----------
    contents : SessionView
        The session's contents. Merged is a copy of its changes, `mine`.
    merged : mapping of str to ChangeSet
        What was merged earlier of each copy, by copy id. `merged` is a copy with what is new.
    """

    def __init__(self, contents: SessionView, merged: Mapping[str, ChangeSet]) -> None:
        self.mine, self.merged = contents.changes.copy(), dict(merged)
        self._view, self._same = contents.view, partial(same_chunk, contents)

    def apply(self, before: ChangeSet, after: ChangeSet, copy_id: str) -> list[Conflict]:
        """Apply what the copy `copy_id` changed between `before` and `after`; return the conflicts.

        If there are conflicts, nothing is applied.
        """
        theirs, known = after.since(before), after
        if copy_id in self.merged:
            before = self.merged[copy_id]
            _leave_out(theirs, after, before)
            known = before.copy()
        alive = {node.node_id for node in after.nodes.values() if node is not None}
        replaced = {
            old.node_id: path
            for path, new in theirs.nodes.items()
            if (old := self._node(before, path)) is not None
            and (new is None or new.node_id != old.node_id)
            and old.node_id not in alive  # or it was only moved
        }
        for node_id in replaced:
            theirs.tables.pop(node_id, None)
        differ = "changed in two copies of one session, differently"
        conflicts = [
            Conflict(ConflictKind.METADATA, f"/{path}", "metadata", differ)
            for path, node in theirs.nodes.items()
            if self.mine.nodes.get(path, _ABSENT) not in (before.nodes.get(path, _ABSENT), node)
        ]
        gone = "written in the session and deleted in a fork"
        conflicts += [
            Conflict(ConflictKind.DELETE, f"/{path}", "chunks", gone)
            for node_id, path in replaced.items()
            if self.mine.beyond(node_id, before)
        ]
        conflicts += self._chunk_conflicts(before, theirs)
        conflicts += self._cut_conflicts(before, theirs)
        if not conflicts:
            _put(theirs, after, replaced, self.mine)
            if known is not after:
                _put(theirs, after, replaced, known)
            self.merged[copy_id] = known
        return conflicts

    def _node(self, changes: ChangeSet, path: str) -> Node | None:
        return changes.nodes[path] if path in changes.nodes else self._view.nodes.get(path)

    def _chunk_conflicts(self, before: ChangeSet, theirs: ChangeSet) -> list[Conflict]:
        paths = self._paths(theirs)
        conflicts: list[Conflict] = []
        for node_id in theirs.touched():
            kind, path = ConflictKind.CHUNK, paths.get(node_id)
            if path is None:
                reason = (
                    "written in a fork, to an array that was deleted, "
                    "or made in a copy that is not merged yet"
                )
                kind = ConflictKind.DELETE
                twice = [*map(tuple, theirs.rows(theirs.layers(node_id)[0]).coords().tolist())]
            else:
                reason = "written with different bytes by two writers of the same session"
                node = self._node(theirs, path) or self._node(self.mine, path)
                twice = self._written_twice(before, theirs, node_id, node)
            if twice:
                where = tuple(sorted(twice)[:_LISTED])
                conflicts.append(Conflict(kind, f"/{path or '?'}", "chunks", reason, where))
        return conflicts

    def _written_twice(
        self, before: ChangeSet, theirs: ChangeSet, node_id: bytes, node: Node | None
    ) -> list[Coords]:
        """Chunks that the session has changed since `before`, and the copy to other bytes."""
        known, now = before.layers(node_id), self.mine.layers(node_id)
        moved = [rows for rows in (*known, *now) if rows not in known or rows not in now]
        twice: set[Coords] = set()
        for rows in theirs.layers(node_id):
            if not any(_may_share(each, rows) for each in moved):
                continue  # nothing is fetched
            at = theirs.rows(rows).coords()
            changed = difference(self.mine.at(node_id, at), before.at(node_id, at))
            for coords in () if changed is None else map(tuple, changed.coords().tolist()):
                ours, ref = self.mine.get(node_id, coords), theirs.get(node_id, coords)
                if ours is None or ref is None or not self._same(node, ours, ref):
                    twice.add(coords)
        return [*twice]

    def _paths(self, theirs: ChangeSet) -> dict[bytes, str]:
        """The paths of the nodes whose chunks the copy has changed, if they are still there."""
        changed = {**self.mine.nodes, **theirs.nodes}
        found = {node.node_id: path for path, node in changed.items() if node is not None}
        for node_id in theirs.tables.keys() - found.keys():
            node = self._view.by_id.get(node_id)
            if node is not None and node.path not in changed:
                found[node_id] = node.path
        return found

    def _cut_conflicts(self, before: ChangeSet, theirs: ChangeSet) -> list[Conflict]:
        """Conflicts where one side wrote chunks that the other side's resize removes."""
        conflicts = []
        for path in self.mine.nodes.keys() | theirs.nodes.keys():
            ours = self.mine.nodes.get(path)
            node = theirs.nodes.get(path, ours)
            if (
                node is None
                or node.array is None
                or ours == theirs.nodes.get(path, before.nodes.get(path))
            ):
                continue
            # What one side sets and the other unsets is gone with both.
            layers = [
                side.rows(rows)
                for side in (self.mine, theirs)
                for rows in side.layers(node.node_id)
                if not lies_below(rows.box, node.array.grid.hi)
            ]
            table = merge_layers([Layer(None, tuple(layers))]).table
            if table is None:
                continue
            coords = table.coords()
            cut = coords[~inside(coords, node.array.grid.hi) & (table.kind != RefKind.UNSET)]
            if len(cut):
                reason = "written by one writer and cut off by another of the same session"
                where = tuple(map(tuple, cut[:_LISTED].tolist()))
                conflicts.append(Conflict(ConflictKind.SHAPE, f"/{path}", "chunks", reason, where))
        return conflicts


def _leave_out(theirs: ChangeSet, after: ChangeSet, merged: ChangeSet) -> None:
    """Drop the changes of a copy that were merged earlier."""
    for path in [*theirs.nodes]:
        if after.nodes.get(path, _ABSENT) == merged.nodes.get(path, _ABSENT):
            theirs.leave_node(path)
    for node_id, tables in [*theirs.tables.items()]:
        known, changed = merged.layers(node_id), None
        if not all(not resident(rows) and rows in known for rows in tables):
            table = theirs.table(node_id)
            assert table is not None  # none is empty
            changed = difference(table, merged.at(node_id, table.coords()))
        del theirs.tables[node_id]
        if changed is not None:
            theirs.put_table(node_id, changed)


def _put(theirs: ChangeSet, after: ChangeSet, replaced: Iterable[bytes], mine: ChangeSet) -> None:
    """Put a copy's changes on top of mine."""
    # This comes first: rows written to a manifest name objects that must be durable.
    if theirs.unsynced:
        known = {*mine.unsynced}
        mine.unsynced += [key for key in theirs.unsynced if key not in known]
    for node_id in replaced:
        mine.forget(node_id)
    for path, node in theirs.nodes.items():
        if node is None and path not in after.nodes:
            mine.leave_node(path)
        else:
            mine.set_node(path, node)
    for node_id, tables in theirs.tables.items():
        for table in tables:
            mine.put_table(node_id, table)
    for node_id, shape in theirs.truncated.items():
        mine.truncated[node_id] = narrower(mine.truncated.get(node_id), shape) or shape
    mine.reads.add(theirs.reads)
    mine.take_zones(theirs.packed_zones())
