"""Refs of the chunks that are likely to be read next, when chunks are read in order.

A lookup takes longer than a read of a few KB from the page cache, especially if threads share the
chunks of an array, since they contend for the same objects. So once some chunks of an array were
read in C order, the refs of the next ones are made by key in one vectorized step.

Invariants:

- Only for readers, since a view never changes. Refs are kept for one view, and equal the results of
  its lookups.
- Nothing is fetched or decoded for it.
- At most as many refs are made in vain as were used before: windows double while they are used up.
- At most two windows of `MOST` refs are kept; the older one is for threads that lag behind.

Thread-safe without a lock: state is replaced as a whole, and losing a window changes no result.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.chunk_table import NativeRef, VirtualRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords

__all__ = ["MOST", "RefsAhead"]

MOST: Final = 256
_BEGINS: Final = 4
"""Number of chunks that have to be read in order first."""
_RESTS: Final = 60
"""Number of further chunks after a window was useless, or could not be made."""
_NEAR: Final = 8
"""Threads that share the chunks of an array read them in nearly their order."""


class _Run(NamedTuple):
    """Chunks that were read in order: the node, how many, and the next one."""

    node_id: bytes
    length: int
    next: int


class RefsAhead:
    """The refs that one reader is likely to ask for next."""

    def __init__(self) -> None:
        self._kept: tuple[SnapshotView | None, dict[str, NativeRef | VirtualRef]] = None, {}
        self._newest: dict[str, NativeRef | VirtualRef] = {}
        self._run = _Run(b"", 0, 0)

    def find(self, view: SnapshotView, key: str) -> NativeRef | VirtualRef | None:
        """The ref of the key in that view, if it is known already."""
        of, refs = self._kept
        return refs.get(key) if of is view else None

    def note(self, view: SnapshotView, node: Node, coords: Coords) -> None:
        """Note that this chunk of the view was looked up, exists, and was not known."""
        meta, run = node.array, self._run
        if meta is None:
            return
        at = meta.grid.ravel_one(coords)
        follows = run.node_id == node.node_id and 0 <= at - run.next < _NEAR
        length = run.length + 1 if follows else 1
        self._run = _Run(node.node_id, length, at + 1)
        if length < _BEGINS:
            return
        following = view.following(node.node_id, coords, min(length, MOST), meta.grid)
        if not following:
            self._run = _Run(node.node_id, -_RESTS, at + 1)
            return
        prefix, encode = node.path + "/" if node.path else "", meta.chunk_keys.encode
        new = {prefix + encode(where): ref for where, ref in following}
        older = self._newest if self._kept[0] is view else {}
        self._newest, self._kept = new, (view, {**older, **new})
        last = meta.grid.ravel_one(following[-1][0])
        self._run = _Run(node.node_id, length + len(following), last + 1)
