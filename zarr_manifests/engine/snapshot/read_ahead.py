"""Refs of chunks that are going to be asked for, where chunks are read one after another.

A lookup takes longer than a read of a few KB that is at hand, and most of all where threads share
the chunks of an array among them, since each touches many objects that the other has touched. So
once some chunks of an array were asked for in C order, the refs of the next ones are made in one
vectorised step, by key.

Invariants:

- Only for readers: of what a view says nothing changes. What is kept belongs to one view, and is
  what a lookup in it would find.
- Nothing is fetched or decoded for it.
- In vain are at most as many refs as were asked for before: windows double while they are used up.
- At most two windows of `MOST` refs are kept; the older one for threads that lag behind.

Thread-safe without a lock: what is kept is replaced as a whole, and a window more or less changes
no answer.
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
"""So many have to follow one another first."""
_RESTS: Final = 60
"""So many more where it was in vain: what is at hand may be in parts, or have nothing to tell."""
_NEAR: Final = 8
"""Threads that share chunks among them ask for them in nearly their order."""


class _Run(NamedTuple):
    """Chunks that were asked for one after another: the node, how many, and the next one."""

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
        """What is at the key in that view, if it is known already."""
        of, refs = self._kept
        return refs.get(key) if of is view else None

    def note(self, view: SnapshotView, node: Node, coords: Coords) -> None:
        """Note that this chunk of the view was asked for, is there, and was not known."""
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
