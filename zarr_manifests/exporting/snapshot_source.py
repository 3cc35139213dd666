"""What is exported: the documents and chunks of a snapshot, by the keys of a plain Zarr store.

Invariants:

- The source is one snapshot, whatever becomes of the session and its branch.
- Every chunk is verified when it is read. A chunk that is missing, damaged or changed is an error.
- Groups get consolidated metadata, as xarray writes it; other documents stay byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from functools import partial
from itertools import chain
from typing import Final

import numpy as np

from zarr_manifests.engine.edit.bulk_chunks import ChunkStream
from zarr_manifests.engine.edit.overlay import OPAQUE, SessionView
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.exporting.consolidated import V2_CONSOLIDATED, consolidated
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.keys import (
    DOCUMENTS,
    V2_ARRAY,
    V2_GROUP,
    V3_DOCUMENT,
    ChunkKeys,
    absolute,
    check_inside,
    directory,
    join,
    split,
)
from zarr_manifests.planning.tables.merge import pick
from zarr_manifests.records import dataclass

__all__ = ["DEFAULT_KEYS", "SnapshotSource"]

DEFAULT_KEYS: Final = ChunkKeys("default", "/")
"""The usual names of chunks in Zarr v3."""

_GAP_BYTES: Final = 64 * 1024
_WINDOW_BYTES: Final = 32 * 1024**2
_BATCH_BYTES: Final = 16 * 1024**2
_BATCH_CHUNKS: Final = 1024
_LAST: Final = (V3_DOCUMENT, V2_GROUP, V2_ARRAY)
"""The documents that make a node: without them there is none."""

type Batch = list[tuple[str, bytes]]
"""Keys, each with its bytes."""


@dataclass(slots=True)
class SnapshotSource:
    """A snapshot, or what is at and below a path in it.

    Parameters
    ----------
    contents : SessionView
        The snapshot, without changes over it.
    path : str
        The group or array that becomes the root, without slashes at its ends.

    Attributes
    ----------
    nodes : list of Node
        What is exported, by path.
    chunk_keys : ChunkKeys or None
        How all chunks are named; None if as each array says.

    Raises
    ------
    NotFoundError
        If there is nothing at the path.
    """

    contents: SessionView
    path: str
    nodes: list[Node] = field(init=False)
    chunk_keys: ChunkKeys | None = field(init=False, default=None)

    @classmethod
    def of(cls, contents: SessionView, path: str) -> SnapshotSource:
        """The snapshot that a session reads.

        Raises
        ------
        InvalidArgumentError
            If the session has uncommitted changes.
        """
        if not isinstance(path, str):
            raise InvalidArgumentError(f"path={path!r}: give the path of a group or an array")
        if contents.changes:
            raise InvalidArgumentError(
                "the session has uncommitted changes, which are in no snapshot; commit or discard "
                "them first"
            )
        return cls(SessionView(contents.context, contents.view), path.strip("/"))

    def __post_init__(self) -> None:
        found = self.contents.within(self.path)
        if self.path not in found and (self.path or not found):
            raise NotFoundError(
                f"there is no group or array {absolute(self.path)!r} in snapshot {self.snapshot_id}"
            )
        self.nodes = [found[path] for path in sorted(found)]

    @property
    def snapshot_id(self) -> str:
        """The snapshot's id."""
        return self.contents.view.snapshot_id

    def count(self, kind: NodeKind) -> int:
        """How many nodes are of that kind."""
        return sum(node.kind is kind for node in self.nodes)

    # --- documents ---------------------------------------------------------------------------

    def documents(self) -> dict[str, bytes]:
        """Documents by key. Those of members come before those of their group; the root is last."""
        found = {
            self.relative(join(node.path, name)): document
            for node in self.nodes
            for name, document in node.documents.items()
        }
        # Documents that the one beside them hides are entries of their own.
        hidden = [node for node in self.nodes if _is_hidden(node)]
        found |= dict(chain.from_iterable(self._batches(hidden, {}, _none)))
        nodes = {node.path: node for node in self.nodes}
        found |= {self.relative(key): document for key, document in consolidated(nodes)}
        return dict(sorted(found.items(), key=_members_first))

    # --- chunks ------------------------------------------------------------------------------

    def tables(self, nodes: Iterable[Node] | None = None) -> Iterator[tuple[Node, ChunkTable]]:
        """Arrays and opaque entries that have chunks, with their refs."""
        contents = self.contents
        for node in (n for n in self.nodes if not _is_hidden(n)) if nodes is None else nodes:
            if node.kind is NodeKind.GROUP:
                continue
            table = contents.guarded(partial(contents.chunks, node))
            if table is not None and len(table):
                yield node, table

    def key(self, node: Node, coords: Coords) -> str:
        """The key of a chunk below the root of the export."""
        if node.array is None:
            return self.relative(node.path.removeprefix(OPAQUE))
        chunk_keys = self.chunk_keys or node.array.chunk_keys
        return self.relative(join(node.path, chunk_keys.encode(coords)))

    def chunks(
        self, stored: Mapping[str, int], reused: Callable[[int, int], None]
    ) -> Iterator[Batch]:
        """The chunks, as they are stored, in batches that fit in memory.

        Those that `stored` has with the same size are left out, and `reused` is told their number
        and bytes.
        """
        return self._batches(None, stored, reused)

    def _batches(
        self,
        nodes: Iterable[Node] | None,
        stored: Mapping[str, int],
        reused: Callable[[int, int], None],
    ) -> Iterator[Batch]:
        batch: Batch = []
        size = 0
        for node, whole in self.tables(nodes):
            table = self._without(node, whole, stored, reused) if stored else whole
            stream = ChunkStream(
                self.contents, table, gap_bytes=_GAP_BYTES, window_bytes=_WINDOW_BYTES
            )
            for coords, data in stream:
                batch.append((self.key(node, coords), data))
                size += len(data)
                if size >= _BATCH_BYTES or len(batch) >= _BATCH_CHUNKS:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def _without(
        self,
        node: Node,
        table: ChunkTable,
        stored: Mapping[str, int],
        reused: Callable[[int, int], None],
    ) -> ChunkTable | None:
        coords = table.coords()
        keys = [self.key(node, tuple(at)) for at in coords.tolist()]
        there = np.fromiter((stored.get(key, -1) for key in keys), np.int64, len(keys))
        same = there == table.length
        reused(int(same.sum()), int(table.length[same].sum()))
        return None if same.all() else pick(table, coords[~same])

    def relative(self, key: str) -> str:
        """The key below the root of the export: every name that an export writes."""
        return check_inside(key[len(directory(self.path)) :])


def _is_hidden(node: Node) -> bool:
    return node.kind is NodeKind.OPAQUE and split(node.path)[1] in (*DOCUMENTS, V2_CONSOLIDATED)


def _none(chunks: int, nbytes: int) -> None:
    """Nothing is there already."""


def _members_first(entry: tuple[str, bytes]) -> tuple[int, bool, str]:
    key = entry[0]
    return -key.count("/"), split(key)[1] in _LAST, key
