"""What a writer has changed and not yet committed.

A `ChangeSet` is a plain value store: nodes by path (None = deleted), chunk refs by node and
coordinate, truncations. The rules about *what* to record live in `workspace`; here is only how
change sets are compared and brought together when forks are merged.

Invariant: a node that was made and deleted within the change set leaves no trace in it; refs are
only recorded for nodes that exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from zarr_manifests.errors import Conflict
from zarr_manifests.format.chunk_table import UNSET, InlineRef, NativeRef, StoredRef, Unset
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords
from zarr_manifests.ids import crc32c
from zarr_manifests.planning.merge import narrower

__all__ = ["ChangeSet", "Merge", "Owners", "same_bytes"]

_ABSENT: Final = object()


def same_bytes(a: StoredRef | None, b: StoredRef | None) -> bool:
    """Whether two refs stand for the same chunk bytes (by length and checksum)."""
    if a == b:
        return True
    if a is None or b is None or isinstance(a, Unset) or isinstance(b, Unset):
        return False
    return _fingerprint(a) == _fingerprint(b)


def _fingerprint(ref: InlineRef | NativeRef) -> tuple[int, int]:
    return ref.length, crc32c(ref.data) if isinstance(ref, InlineRef) else ref.crc32c


@dataclass(slots=True)
class ChangeSet:
    """Changes relative to a snapshot.

    Attributes
    ----------
    nodes : dict of str to Node or None
        Nodes created or changed, by path; None for a deleted one.
    chunks : dict of bytes to dict of coords to ref
        By node id.
    truncated : dict of bytes to tuple of int
        Node id to grid shape: chunks of the snapshot at or beyond it are gone.
    unsynced : list of str
        Keys of chunk objects written and not yet durable.
    """

    nodes: dict[str, Node | None] = field(default_factory=dict)
    chunks: dict[bytes, dict[Coords, StoredRef]] = field(default_factory=dict)
    truncated: dict[bytes, Coords] = field(default_factory=dict)
    unsynced: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.nodes or self.truncated or any(self.chunks.values()))

    def copy(self) -> ChangeSet:
        """A copy that shares nothing mutable."""
        chunks = {node: dict(refs) for node, refs in self.chunks.items()}
        return ChangeSet(dict(self.nodes), chunks, dict(self.truncated), list(self.unsynced))

    def refs(self) -> Iterator[tuple[bytes, Coords, StoredRef]]:
        """Every changed chunk: node id, coordinate, ref."""
        for node_id, refs in self.chunks.items():
            for coords, ref in refs.items():
                yield node_id, coords, ref

    def since(self, before: ChangeSet) -> ChangeSet:
        """What this change set has beyond `before`, from which it grew."""
        nodes = {
            path: self.nodes.get(path)
            for path in self.nodes.keys() | before.nodes.keys()
            if self.nodes.get(path) != before.nodes.get(path)
            or (path in self.nodes) != (path in before.nodes)
        }
        chunks: dict[bytes, dict[Coords, StoredRef]] = {}
        for node_id, coords, ref in self.refs():
            if before.chunks.get(node_id, {}).get(coords) != ref:
                chunks.setdefault(node_id, {})[coords] = ref
        for node_id, coords, _ in before.refs():
            if coords not in self.chunks.get(node_id, {}):
                chunks.setdefault(node_id, {})[coords] = UNSET
        truncated = {
            node: shape
            for node, shape in self.truncated.items()
            if before.truncated.get(node) != shape
        }
        known = set(before.unsynced)
        unsynced = [key for key in self.unsynced if key not in known]
        return ChangeSet(nodes, chunks, truncated, unsynced)


@dataclass(slots=True)
class Owners:
    """What has been merged: the copy that each chunk and node came from, and what it was then."""

    chunks: dict[tuple[bytes, Coords], tuple[str, StoredRef]] = field(default_factory=dict)
    nodes: dict[str, tuple[str, Node | None]] = field(default_factory=dict)

    def copy(self) -> Owners:
        """A copy that shares nothing mutable."""
        return Owners(dict(self.chunks), dict(self.nodes))

    def take(self, other: Owners) -> None:
        """Become equal to `other`."""
        self.chunks, self.nodes = other.chunks, other.nodes


class Merge:
    """Brings forks' changes into a session's, and remembers which copy wrote what.

    A fork's change applies where the session is as it was when the fork was made, or where the
    very same copy has changed it before, or where both did the same; anything else is a conflict.

    Parameters
    ----------
    mine : ChangeSet
        The session's changes; modified in place.
    stored : mapping of str to Node
        The nodes of the snapshot that session and forks began with.
    owners : Owners
        What has been merged before.
    """

    def __init__(
        self,
        mine: ChangeSet,
        stored: Mapping[str, Node],
        owners: Owners,
    ) -> None:
        self.mine = mine
        self.owners = owners.copy()
        self._stored = stored

    def apply(self, before: ChangeSet, after: ChangeSet, copy_id: str) -> list[Conflict]:
        """Apply what the copy `copy_id` changed between `before` and `after`, or nothing.

        Returns the conflicts; where there are any, nothing was applied.
        """
        theirs = after.since(before)
        for node_id, refs in [*theirs.chunks.items()]:  # what was merged before counts once
            new = {c: ref for c, ref in refs.items() if self._owner(node_id, c) != (copy_id, ref)}
            theirs.chunks[node_id] = new
            if not new:
                del theirs.chunks[node_id]
        for path, node in [*theirs.nodes.items()]:
            known = self.owners.nodes.get(path) == (copy_id, node)
            if known and not (node and node.node_id in theirs.chunks):
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
        conflicts = [
            Conflict(f"/{path}", "metadata", "changed in the session and in a fork, differently")
            for path, node in theirs.nodes.items()
            if self.mine.nodes.get(path, _ABSENT) not in (before.nodes.get(path, _ABSENT), node)
            and self.owners.nodes.get(path) != (copy_id, self.mine.nodes.get(path))
        ]
        conflicts += [
            Conflict(f"/{path}", "chunks", "written in the session and deleted in a fork")
            for node_id, path in replaced.items()
            if self.mine.chunks.get(node_id, {}) != before.chunks.get(node_id, {})
        ]
        conflicts += self._chunk_conflicts(before, theirs, copy_id)
        conflicts += self._cut_conflicts(before, theirs)
        if not conflicts:
            self._take(theirs, after, replaced, copy_id)
        return conflicts

    def _owner(self, node_id: bytes, coords: Coords) -> tuple[str, StoredRef] | None:
        return self.owners.chunks.get((node_id, coords))

    def _node(self, changes: ChangeSet, path: str) -> Node | None:
        return changes.nodes[path] if path in changes.nodes else self._stored.get(path)

    def _take(
        self, theirs: ChangeSet, after: ChangeSet, replaced: Iterable[bytes], copy_id: str
    ) -> None:
        for node_id in replaced:
            self.mine.chunks.pop(node_id, None)
            self.mine.truncated.pop(node_id, None)
        for path, node in theirs.nodes.items():
            self.owners.nodes[path] = copy_id, node
            if node is None and path not in after.nodes:
                self.mine.nodes.pop(path, None)
            else:
                self.mine.nodes[path] = node
        for node_id, coords, ref in theirs.refs():
            self.mine.chunks.setdefault(node_id, {})[coords] = ref
            self.owners.chunks[node_id, coords] = copy_id, ref
        for node_id, shape in theirs.truncated.items():
            cut = narrower(self.mine.truncated.get(node_id), shape)
            self.mine.truncated[node_id] = cut or shape
        self.mine.unsynced += theirs.unsynced

    def _chunk_conflicts(
        self, before: ChangeSet, theirs: ChangeSet, copy_id: str
    ) -> list[Conflict]:
        nodes = {**self._stored, **self.mine.nodes, **theirs.nodes}
        paths = {node.node_id: path for path, node in nodes.items() if node is not None}
        conflicts: list[Conflict] = []
        for node_id, refs in theirs.chunks.items():
            if node_id not in paths:
                reason = "written in a fork, to an array that the session has deleted"
                conflicts.append(Conflict("/?", "chunks", reason, tuple(sorted(refs)[:20])))
                continue
            ours, was = self.mine.chunks.get(node_id, {}), before.chunks.get(node_id, {})
            twice = [
                coords
                for coords, ref in refs.items()
                if ours.get(coords) != was.get(coords)
                and self._owner(node_id, coords) != (copy_id, ours.get(coords))
                and not same_bytes(ours.get(coords), ref)
            ]
            if twice:
                reason = "written with different bytes by two writers of the same session"
                where = tuple(sorted(twice)[:20])
                conflicts.append(Conflict(f"/{paths[node_id]}", "chunks", reason, where))
        return conflicts

    def _cut_conflicts(self, before: ChangeSet, theirs: ChangeSet) -> list[Conflict]:
        """Chunks that one side wrote where the other has shrunk the array."""
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
            if cut:
                reason = "written by one writer and cut off by another of the same session"
                conflicts.append(Conflict(f"/{path}", "chunks", reason, tuple(sorted(cut)[:20])))
        return conflicts
