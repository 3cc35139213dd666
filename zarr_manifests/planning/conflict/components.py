"""What a commit has changed, taken apart into what conflicts are decided by.

A node's part of a commit is a `NodeChange`: the node before and after, and which chunks were
written. From it follow its *components*. Several commits in a row become one such change a node:
their components are all those that any of them had, and the values are the last ones. Opaque
entries are nodes of one chunk, so they need no case of their own.

Invariant: a node made and deleted again within the commits leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.planning.conflict.documents import DocumentChange, compare_documents
from zarr_manifests.planning.tables.merge import Layer, merge_layers, narrower

__all__ = ["Changes", "Component", "NodeChange", "above", "key_of"]


class Component(StrEnum):
    """A kind of change, as conflicts are decided by."""

    CHUNKS = "chunks"
    GROWTH = "growth"
    SHRINK = "shrink"
    ATTRIBUTES = "attributes"
    STRUCTURE = "structure"
    CREATE = "create"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class NodeChange:
    """What was done to one node.

    Parameters
    ----------
    before, after : Node or None
        The node, and what has become of it.
    documents : DocumentChange
        What was changed of its documents.
    cut : tuple of int or None
        Grid shape: the chunks there were at or beyond it are gone, even if it has grown again.
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
        """Whether it was there and is elsewhere now."""
        return (
            self.before is not None
            and self.after is not None
            and self.before.path != self.after.path
        )

    @property
    def left(self) -> str | None:
        """The path that it is no more at."""
        gone = self.before is not None and (self.after is None or self.moved)
        return self.before.path if gone and self.before is not None else None

    @property
    def taken(self) -> str | None:
        """The path that it is newly at."""
        new = self.after is not None and (self.before is None or self.moved)
        return self.after.path if new and self.after is not None else None

    @property
    def path(self) -> str:
        """Where the node is, or was."""
        node = self.before or self.after
        return node.path if node is not None else "?"

    @property
    def components(self) -> tuple[Component, ...]:
        """What was done to the node."""
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
        """The change and the one after it, as one that has done both."""
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
    """What one or more commits have changed, by node id.

    Parameters
    ----------
    nodes : mapping of bytes to NodeChange
        A change for each node that anything was done to.
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
        """What a commit on the nodes `before` did.

        Parameters
        ----------
        before : mapping of str to Node
            All nodes by path.
        changed : mapping of str to (Node or None)
            Nodes made or changed, by path; None where one was deleted.
        truncated : mapping of bytes to tuple of int
            What was cut off, by node id.
        tables : mapping of bytes to ChunkTable
            Chunks set and unset, by node id.
        """
        was = {before[path].node_id: before[path] for path in changed if path in before}
        now = {node.node_id: node for node in changed.values() if node is not None}
        ids = {*was, *now, *truncated, *tables}
        if not ids <= was.keys():  # moved, or only their chunks have changed
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
        """These changes and the ones after them, as one."""
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
        """Paths that nodes were deleted at, or moved from, with the nodes' ids."""
        return {c.left: node_id for node_id, c in self if c.left is not None}

    @property
    def taken(self) -> dict[str, bytes]:
        """Paths that nodes were made at, or moved to, with the nodes' ids."""
        return {c.taken: node_id for node_id, c in self if c.taken is not None}

    @property
    def opaque(self) -> Iterable[NodeChange]:
        """The changes of opaque entries."""
        for _, change in self:
            node = change.before or change.after
            if node is not None and node.kind is NodeKind.OPAQUE:
                yield change


def key_of(path: str) -> str:
    """Where in Zarr's keys a node's path is: an opaque entry's path has a slash before its key."""
    return path.removeprefix("/")


def above(path: str) -> Iterator[str]:
    """The paths above a path, nearest first; the root's is empty and last."""
    path = key_of(path)
    while path:
        path = path.rpartition("/")[0]
        yield path
