"""Merging the changes of forks into their session.

Invariants: a fork is merged completely or not at all; a copy's changes count once, however often it
is merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.change_set import ChangeSet, Owners, Rows, lies_below, resident
from zarr_manifests.engine.overlay import SessionView, same_chunk
from zarr_manifests.errors import Conflict, ConflictKind
from zarr_manifests.format.chunk_table import UNSET, ChunkTable, RefKind, StoredRef
from zarr_manifests.format.manifest import Node
from zarr_manifests.grid import Coords
from zarr_manifests.planning.merge import (
    Layer,
    difference,
    in_box,
    inside,
    merge_layers,
    narrower,
    pick,
    rows_at,
    select,
    shared_rows,
)

_ABSENT: Final = object()


def _may_share(ours: Rows, theirs: Rows) -> bool:
    """Whether both may have rows of the same chunks; fetches nothing."""
    if not ours.box.overlaps(theirs.box):
        return False
    if resident(ours) and not in_box(ours, theirs.box).any():
        return False
    return not resident(theirs) or bool(in_box(theirs, ours.box).any())


class Merge:
    """Merges the changes of forks into a session's, and records which copy wrote what.

    A fork's change applies where the session has not changed since the fork was made, where the
    same copy made the earlier change, or where both made the same change. Anything else is a
    conflict.

    Parameters
    ----------
    contents : SessionView
        The session's contents. Merged is a copy of its changes, `mine`.
    owners : Owners
        What was merged earlier, which is copied too.
    """

    def __init__(self, contents: SessionView, owners: Owners) -> None:
        self.mine, self.owners = contents.changes.copy(), owners.copy()
        self._view, self._same = contents.view, partial(same_chunk, contents)

    def apply(self, before: ChangeSet, after: ChangeSet, copy_id: str) -> list[Conflict]:
        """Apply what the copy `copy_id` changed between `before` and `after`; return the conflicts.

        If there are conflicts, nothing is applied.
        """
        theirs = after.since(before)
        if copy_id in self.owners.copies:
            self._leave_out_merged(theirs, copy_id)
        self._single_out(before, theirs, copy_id)
        for node_id, refs in [*theirs.chunks.items()]:  # skip what is merged already
            new = {c: ref for c, ref in refs.items() if self._owner(node_id, c) != (copy_id, ref)}
            theirs.chunks[node_id] = new
            if not new:
                del theirs.chunks[node_id]
        for path, node in [*theirs.nodes.items()]:
            known = self.owners.nodes.get(path) == (copy_id, node)
            if known and not (node and node.node_id in (*theirs.chunks, *theirs.tables)):
                del theirs.nodes[path]
        alive = {node.node_id for node in after.nodes.values() if node is not None}
        replaced = {
            old.node_id: path
            for path, new in theirs.nodes.items()
            if (old := self._node(before, path)) is not None
            and (new is None or new.node_id != old.node_id)
            and old.node_id not in alive  # or it was only moved
        }
        for node_id in replaced:
            theirs.chunks.pop(node_id, None)
            theirs.tables.pop(node_id, None)
        differ = "changed in two copies of one session, differently"
        conflicts = [
            Conflict(ConflictKind.METADATA, f"/{path}", "metadata", differ)
            for path, node in theirs.nodes.items()
            if self.mine.nodes.get(path, _ABSENT) not in (before.nodes.get(path, _ABSENT), node)
            and self.owners.nodes.get(path) != (copy_id, self.mine.nodes.get(path))
        ]
        gone = "written in the session and deleted in a fork"
        conflicts += [
            Conflict(ConflictKind.DELETE, f"/{path}", "chunks", gone)
            for node_id, path in replaced.items()
            if self.mine.beyond(node_id, before)
        ]
        conflicts += self._chunk_conflicts(before, theirs, copy_id)
        conflicts += self._cut_conflicts(before, theirs)
        if not conflicts:
            self._take(theirs, after, replaced, copy_id)
        return conflicts

    def _owner(self, node_id: bytes, coords: Coords) -> tuple[str, StoredRef] | None:
        return self.owners.of(node_id, coords, self.mine.rows)

    def _leave_out_merged(self, theirs: ChangeSet, copy_id: str) -> None:
        """Drop from a copy's tables the rows that an earlier merge of the copy applied."""
        owned, single = self.owners.tables, self.owners.chunks
        for node_id, parts in list(theirs.tables.items()):
            brought = [rows for owner, rows in owned.get(node_id, ()) if owner == copy_id]
            refs = {
                coords: ref
                for (node, coords), (owner, ref) in single.items()
                if node == node_id and owner == copy_id
            }
            layers = [*brought, ChunkTable.of(refs)] if refs else brought
            left: list[Rows] = []
            for i, rows in enumerate(parts):
                near = [layer for layer in layers if layer.box.overlaps(rows.box)]
                if not resident(rows) and rows in near:
                    continue  # merged already
                if near:
                    left += self._beyond(self._newest(rows, parts[i + 1 :]), near)
                else:
                    left.append(rows)
            theirs.tables[node_id] = tuple(left)
            if not left:
                del theirs.tables[node_id]

    def _newest(self, rows: Rows, later: Iterable[Rows]) -> ChunkTable:
        """The rows, without those that a later layer of the same copy replaces."""
        table = self.mine.rows(rows)
        for layer in later:
            if len(table) and layer.box.overlaps(table.box):
                table = select(table, ~shared_rows(table, self.mine.rows(layer)))
        return table

    def _beyond(self, table: ChunkTable, layers: Sequence[Rows]) -> list[Rows]:
        """The rows of the table that differ from these layers, of which the last wins."""
        if not len(table):
            return []
        found = (pick(self.mine.rows(layer), table.coords()) for layer in layers)
        known = [layer for layer in found if len(layer)]
        new = difference(table, merge_layers([Layer(None, tuple(known))]).table)
        return [] if new is None else [new]

    def _single_out(self, before: ChangeSet, theirs: ChangeSet, copy_id: str) -> None:
        """Turn bulk refs of a fork into single refs where the session changed the chunk too."""
        for node_id, parts in list(theirs.tables.items()):
            was = before.layers(node_id)
            moved = [rows for rows in self.mine.layers(node_id) if rows not in was]
            merged = self.owners.tables.get(node_id, ())
            left: list[Rows] = []
            for rows in parts:
                near = [each for each in moved if _may_share(each, rows)]
                if not near:
                    left.append(rows)
                elif resident(rows) or (copy_id, rows) not in merged:
                    left += self._uncontested(before, theirs, node_id, rows, near)
            if left:
                theirs.tables[node_id] = tuple(left)
            else:
                del theirs.tables[node_id]

    def _uncontested(
        self, before: ChangeSet, theirs: ChangeSet, node_id: bytes, rows: Rows, near: Sequence[Rows]
    ) -> list[Rows]:
        """The rows that the session has not changed; the others become single refs."""
        table = theirs.rows(rows)
        both = np.zeros(len(table), np.bool_)
        for each in near:
            both |= shared_rows(table, self.mine.rows(each))
        if both.any():
            coords = table.coords()[both]
            changed = difference(self.mine.at(node_id, coords), before.at(node_id, coords))
            both[both] = False if changed is None else rows_at(changed, coords) >= 0
        if not both.any():
            return [rows]
        theirs.chunks.setdefault(node_id, {}).update(select(table, both).refs())
        return [] if both.all() else [select(table, ~both)]

    def _node(self, changes: ChangeSet, path: str) -> Node | None:
        return changes.nodes[path] if path in changes.nodes else self._view.nodes.get(path)

    def _take(
        self, theirs: ChangeSet, after: ChangeSet, replaced: Iterable[bytes], copy_id: str
    ) -> None:
        # This comes first: rows written to a manifest name objects that must be durable.
        known = self.owners.objects
        self.mine.unsynced += [key for key in theirs.unsynced if key not in known]
        known.update(theirs.unsynced)
        self.owners.copies.add(copy_id)
        for node_id in replaced:
            self.mine.forget(node_id)
        for path, node in theirs.nodes.items():
            self.owners.nodes[path] = copy_id, node
            if node is None and path not in after.nodes:
                self.mine.leave_node(path)
            else:
                self.mine.set_node(path, node)
        for node_id, tables in theirs.tables.items():
            for table in tables:
                self.mine.put_table(node_id, table)
                owned = self.owners.tables.get(node_id, ())
                self.owners.tables[node_id] = (*owned, (copy_id, table))
        for node_id, coords, ref in theirs.refs():
            self.mine.chunks.setdefault(node_id, {})[coords] = ref
            self.owners.chunks[node_id, coords] = copy_id, ref
        for node_id, shape in theirs.truncated.items():
            mine = self.mine.truncated
            mine[node_id] = narrower(mine.get(node_id), shape) or shape
        self.mine.reads.add(theirs.reads)
        self.mine.take_zones(theirs.zones)

    def _chunk_conflicts(
        self, before: ChangeSet, theirs: ChangeSet, copy_id: str
    ) -> list[Conflict]:
        paths = self._paths(theirs)
        reason = (
            "written in a fork, to an array that was deleted, "
            "or made in a copy that is not merged yet"
        )
        conflicts: list[Conflict] = []
        for node_id in theirs.touched():
            if node_id not in paths:
                lost = theirs.rows(theirs.layers(node_id)[0]).coords()[:20].tolist()
                chunks = tuple(map(tuple, lost))
                conflicts.append(Conflict(ConflictKind.DELETE, "/?", "chunks", reason, chunks))
                continue
            twice, path, refs = [], paths[node_id], theirs.chunks.get(node_id, {})
            node = self._node(theirs, path) or self._node(self.mine, path)
            for coords, ref in refs.items():
                ours, was = self.mine.get(node_id, coords), before.get(node_id, coords)
                if (
                    ours != was
                    and self._owner(node_id, coords) != (copy_id, ours)
                    and (ours is None or not self._same(node, ours, ref))
                ):
                    twice.append(coords)
            if twice:
                differs = "written with different bytes by two writers of the same session"
                where = tuple(sorted(twice)[:20])
                conflicts.append(
                    Conflict(ConflictKind.CHUNK, f"/{paths[node_id]}", "chunks", differs, where)
                )
        return conflicts

    def _paths(self, theirs: ChangeSet) -> dict[bytes, str]:
        """The paths of the nodes whose chunks the copy has changed, if they are still there."""
        changed = {**self.mine.nodes, **theirs.nodes}
        found = {node.node_id: path for path, node in changed.items() if node is not None}
        for node_id in {*theirs.tables, *theirs.chunks} - found.keys():
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
            refs = {**self.mine.chunks.get(node.node_id, {}), **theirs.chunks.get(node.node_id, {})}
            cut = [c for c, ref in refs.items() if c not in node.array.grid and ref is not UNSET]
            for side in (self.mine, theirs):
                for rows in side.tables.get(node.node_id, ()):
                    if lies_below(rows.box, node.array.grid.hi):
                        continue
                    table = side.rows(rows)
                    out = ~inside(table.coords(), node.array.grid.hi)
                    out &= table.kind != RefKind.UNSET
                    cut += [tuple(c) for c in table.coords()[out][:20].tolist()]
            if cut:
                reason = "written by one writer and cut off by another of the same session"
                conflicts.append(
                    Conflict(
                        ConflictKind.SHAPE, f"/{path}", "chunks", reason, tuple(sorted(cut)[:20])
                    )
                )
        return conflicts
