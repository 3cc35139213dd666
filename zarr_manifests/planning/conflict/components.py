"""What commits have changed, split into the components that conflict rules compare.

A `NodeChange` is a node's part of a commit: the node before and after, and the chunks written. Its
*components* follow from that. Several commits in a row are combined into one change per node: it
has all components that any of them had, and the last values. Opaque entries are nodes of one chunk
and need no case of their own.

Invariant: a node that the commits both make and delete leaves no trace.

What a writer has *read* is recorded too. Few chunk reads are recorded exactly. Beyond a limit they
become one bounding box per node, which may then include chunks that were not read, but never misses
one. The size of the record is bounded by the number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.conflict.documents import DocumentChange, compare_documents
from zarr_manifests.planning.tables.merge import Layer, merge_layers, narrower
from zarr_manifests.runtime import ForkSafeLock


class Component(StrEnum):
    """A kind of change; conflict rules compare pairs of them."""

    CHUNKS = "chunks"
    GROWTH = "growth"
    SHRINK = "shrink"
    ATTRIBUTES = "attributes"
    STRUCTURE = "structure"
    CREATE = "create"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class NodeChange:
    """The changes of one node.

    Parameters
    ----------
    before, after : Node or None
        The node before and after.
    documents : DocumentChange
        What changed in its documents.
    cut : tuple of int or None
        Grid shape; older chunks at or beyond it are gone, even if the array has grown again.
    chunks : ChunkTable or None
        Chunks set or unset.
    """

    before: Node | None
    after: Node | None
    documents: DocumentChange = field(default_factory=DocumentChange)
    cut: Coords | None = None
    chunks: ChunkTable | None = None

    @property
    def moved(self) -> bool:
        """Whether it existed before and has another path now."""
        return (
            self.before is not None
            and self.after is not None
            and self.before.path != self.after.path
        )

    @property
    def left(self) -> str | None:
        """The path that it has left, by deletion or by a move."""
        gone = self.before is not None and (self.after is None or self.moved)
        return self.before.path if gone and self.before is not None else None

    @property
    def taken(self) -> str | None:
        """The path that it has taken, by creation or by a move."""
        new = self.after is not None and (self.before is None or self.moved)
        return self.after.path if new and self.after is not None else None

    @property
    def path(self) -> str:
        """The node's path before; if it is new, its path now."""
        node = self.before or self.after
        return node.path if node is not None else "?"

    @property
    def components(self) -> tuple[Component, ...]:
        """The components of the change."""
        if self.before is None:
            return (Component.CREATE,)
        if self.after is None:
            return (Component.DELETE,)
        done = {
            Component.DELETE: self.moved,
            Component.STRUCTURE: self.documents.structure,
            Component.SHRINK: self.documents.shrunk or self.cut is not None,
            Component.GROWTH: bool(self.documents.grown),
            Component.ATTRIBUTES: bool(self.documents.attributes),
            Component.CHUNKS: self.chunks is not None,
        }
        return tuple(component for component, is_so in done.items() if is_so)

    def then(self, later: NodeChange) -> NodeChange:
        """Combine the change with a later one."""
        tables = tuple(table for table in (self.chunks, later.chunks) if table is not None)
        return NodeChange(
            self.before,
            later.after,
            self.documents.then(later.documents),
            narrower(self.cut, later.cut),
            merge_layers([Layer(None, tables)]).table,
        )


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one or more commits, by node id.

    Parameters
    ----------
    nodes : mapping of bytes to NodeChange
        One change for each changed node.
    """

    nodes: Mapping[bytes, NodeChange]

    @classmethod
    def of(
        cls,
        before: Mapping[str, Node],
        changed: Mapping[str, Node | None],
        truncated: Mapping[bytes, Coords],
        tables: Mapping[bytes, ChunkTable],
    ) -> Changes:
        """Return the changes of a commit on the nodes `before`.

        Parameters
        ----------
        before : mapping of str to Node
            All nodes by path.
        changed : mapping of str to (Node or None)
            Nodes made or changed, by path; None where one was deleted.
        truncated : mapping of bytes to tuple of int
            Grid shapes of truncations, by node id.
        tables : mapping of bytes to ChunkTable
            Chunks set and unset, by node id.
        """
        was = {before[path].node_id: before[path] for path in changed if path in before}
        now = {node.node_id: node for node in changed.values() if node is not None}
        ids = {*was, *now, *truncated, *tables}
        if not ids <= was.keys():  # moved nodes, and nodes of which only chunks have changed
            rest = ids - was.keys()
            was |= {n.node_id: n for n in before.values() if n.node_id in rest}
        found = {}
        for node_id in ids:
            old = was.get(node_id)
            untouched = old is not None and old.path not in changed
            new = old if untouched and node_id not in now else now.get(node_id)
            if old is None and new is None:
                continue
            both = old is not None and new is not None
            found[node_id] = NodeChange(
                old,
                new,
                compare_documents(old, new) if old and new else DocumentChange(),
                truncated.get(node_id) if both else None,
                tables.get(node_id),
            )
        return cls(found)

    def then(self, later: Changes) -> Changes:
        """Combine these changes with later ones."""
        together = dict(self.nodes)
        for node_id, change in later.nodes.items():
            known = together.get(node_id)
            if known is not None:
                change = known.then(change)
            if change.before is None and change.after is None:
                del together[node_id]
            else:
                together[node_id] = change
        return Changes(together)

    def __iter__(self) -> Iterator[tuple[bytes, NodeChange]]:
        return iter(self.nodes.items())

    @property
    def left(self) -> dict[str, bytes]:
        """Paths that nodes have left, by deletion or move, with the nodes' ids."""
        return {c.left: node_id for node_id, c in self if c.left is not None}

    @property
    def taken(self) -> dict[str, bytes]:
        """Paths that nodes have taken, by creation or move, with the nodes' ids."""
        return {c.taken: node_id for node_id, c in self if c.taken is not None}

    @property
    def opaque(self) -> Iterable[NodeChange]:
        """The changes of opaque entries."""
        for _, change in self:
            node = change.before or change.after
            if node is not None and node.kind is NodeKind.OPAQUE:
                yield change


def apart(mine: Mapping[bytes, Sequence[Box]], theirs: Iterable[DeltaEntry]) -> bool:
    """Whether my chunks cannot conflict with the commits listed in these entries.

    Commits whose boxes are disjoint share no chunk. Those whose boxes overlap may still share none;
    their logs then decide.

    Parameters
    ----------
    mine : mapping of bytes to sequence of Box
        Boxes around all chunks that I have set or unset, by node id. I have changed nothing else.
    theirs : iterable of DeltaEntry
        The commits that came first.
    """
    for entry in theirs:
        if entry.changes_nodes:
            return False
        for part in entry.parts():
            if any(box.overlaps(part.box) for box in mine.get(part.node_id, ())):
                return False
    return True


# --- what was read -----------------------------------------------------------------------------

_MOST_CHUNKS: Final = 4096
_ENCLOSING: Final = ForkSafeLock()


@dataclass(slots=True)
class Reads:
    """The reads of a snapshot; threads may record reads concurrently.

    Attributes
    ----------
    chunks : dict of bytes to set of coords
        By node id: chunks read since they were last merged into the box.
    boxes : dict of bytes to Box
        By node id: a box around all chunks read before.
    documents : set of str
        Paths whose documents were requested, whether they exist or not.
    """

    chunks: dict[bytes, set[Coords]] = field(default_factory=dict)
    boxes: dict[bytes, Box] = field(default_factory=dict)
    documents: set[str] = field(default_factory=set)

    def note(self, node_id: bytes, coords: Coords) -> None:
        """Record that a chunk was read."""
        while True:
            seen = self.chunks.get(node_id)
            if seen is None:
                seen = self.chunks.setdefault(node_id, set())
            seen.add(coords)
            if self.chunks.get(node_id) is seen:  # else `_enclose` may have missed this chunk
                break
        if len(seen) > _MOST_CHUNKS and coords:
            self._enclose(node_id)

    def _enclose(self, node_id: bytes) -> None:
        with _ENCLOSING:
            seen = self.chunks.pop(node_id, None)
            if seen:
                boxes = [Box.around_coords(np.array(list(seen.copy()), np.int64))]
                if node_id in self.boxes:
                    boxes.append(self.boxes[node_id])
                self.boxes[node_id] = Box.around(boxes)

    def copy(self) -> Reads:
        """A copy that shares nothing mutable."""
        chunks = {node: set(seen) for node, seen in dict(self.chunks).items()}
        return Reads(chunks, dict(self.boxes), set(self.documents))

    def add(self, other: Reads) -> None:
        """Record everything that the other has recorded."""
        for node_id, box in other.boxes.items():
            mine = self.boxes.get(node_id)
            self.boxes[node_id] = box if mine is None else Box.around((mine, box))
        for node_id, seen in other.chunks.items():
            for coords in seen:
                self.note(node_id, coords)
        self.documents |= other.documents

    def nodes(self) -> set[bytes]:
        """Ids of the nodes with chunks that were read."""
        return {*self.chunks, *self.boxes}

    def at(self, node_id: bytes, coords: IndexArray) -> npt.NDArray[np.bool_]:
        """Which of these chunks of the node (int64[n, ndim]) were read."""
        found = np.zeros(len(coords), np.bool_)
        seen, box = self.chunks.get(node_id), self.boxes.get(node_id)
        if box is not None and box.ndim == coords.shape[1]:
            found |= box.holds(coords)
        if seen:
            found |= np.array([tuple(row) in seen for row in coords.tolist()], np.bool_)
        return found

    def beyond(self, node_id: bytes, shape: Coords) -> bool:
        """Whether a chunk at or beyond `shape` on any axis was read."""
        box = self.boxes.get(node_id)
        if box is not None and any(b > n for b, n in zip(box.hi, shape, strict=True)):
            return True
        return any(
            c >= n
            for coords in self.chunks.get(node_id, ())
            for c, n in zip(coords, shape, strict=True)
        )
