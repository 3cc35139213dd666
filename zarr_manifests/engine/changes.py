"""What a writer has changed and not yet committed.

A `ChangeSet` is a plain value store: nodes by path (None = deleted), chunk refs by node and
coordinate, truncations. The rules about *what* to record live in `workspace`; here is only how
change sets are compared and brought together when forks are merged.

Invariant: a node that was made and deleted within the change set leaves no trace in it; refs are
only recorded for nodes that exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from zarr_manifests.errors import Conflict
from zarr_manifests.format.chunk_table import InlineRef, NativeRef, StoredRef, Unset
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords
from zarr_manifests.ids import crc32c
from zarr_manifests.planning.merge import narrower

__all__ = ["ChangeSet", "Merge", "same_bytes"]


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
        truncated = {
            node: shape
            for node, shape in self.truncated.items()
            if before.truncated.get(node) != shape
        }
        known = set(before.unsynced)
        unsynced = [key for key in self.unsynced if key not in known]
        return ChangeSet(nodes, chunks, truncated, unsynced)


@dataclass(slots=True)
class Merge:
    """Brings forks' changes into a session's, and remembers which fork wrote what.

    A fork's change applies where the session is as it was when the fork was made, or where the
    very same fork has changed it before, or where both did the same; anything else is a conflict.
    """

    mine: ChangeSet
    owners: dict[tuple[bytes, Coords], str] = field(default_factory=dict)

    def apply(self, before: ChangeSet, after: ChangeSet, copy_id: str) -> list[Conflict]:
        """Apply what the fork `copy_id` changed between `before` and `after`, or nothing.

        Returns the conflicts; where there are any, nothing was applied.
        """
        theirs = after.since(before)
        paths = {
            node.node_id: path
            for nodes in (after.nodes, self.mine.nodes)
            for path, node in nodes.items()
            if node is not None
        }
        conflicts = [
            Conflict(f"/{path}", "metadata", "changed in the session and in a fork, differently")
            for path, node in theirs.nodes.items()
            if self.mine.nodes.get(path) not in (before.nodes.get(path), node)
        ]
        conflicts += self._chunk_conflicts(before, theirs, copy_id, paths)
        if conflicts:
            return conflicts
        for path, node in theirs.nodes.items():
            if node is None and path not in after.nodes:
                self.mine.nodes.pop(path, None)
            else:
                self.mine.nodes[path] = node
        for node_id, coords, ref in theirs.refs():
            self.mine.chunks.setdefault(node_id, {})[coords] = ref
            self.owners[node_id, coords] = copy_id
        for node_id, shape in theirs.truncated.items():
            cut = narrower(self.mine.truncated.get(node_id), shape)
            self.mine.truncated[node_id] = cut or shape
        self.mine.unsynced += theirs.unsynced
        return []

    def _chunk_conflicts(
        self, before: ChangeSet, theirs: ChangeSet, copy_id: str, paths: dict[bytes, str]
    ) -> list[Conflict]:
        overlapping: dict[bytes, list[Coords]] = {}
        for node_id, coords, ref in theirs.refs():
            ours = self.mine.chunks.get(node_id, {}).get(coords)
            was = before.chunks.get(node_id, {}).get(coords)
            if ours in (None, was) or self.owners.get((node_id, coords)) == copy_id:
                continue
            if not same_bytes(ours, ref):
                overlapping.setdefault(node_id, []).append(coords)
        return [
            Conflict(
                f"/{paths.get(node_id, '?')}",
                "chunks",
                "written with different bytes by two writers of the same session",
                tuple(sorted(chunks)[:20]),
            )
            for node_id, chunks in overlapping.items()
        ]
