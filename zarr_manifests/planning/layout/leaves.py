"""What the manifest planner knows: facts about arrays, and an index of a base's leaves.

A leaf is a `Part` of a manifest: a node, a box and the number of chunk refs in it. Invariant: a
`BaseIndex` is built once, in one pass over the base's directory, and never changes. The cost of a
query depends on the size of its answer, not of the base, so planning a change of one leaf costs
the same for eighty leaves as for eight thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.keys import absolute


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """The facts about an array that rules, sets and splitting use.

    Parameters
    ----------
    node_id : bytes
        The node's id.
    path : str
        Its absolute path, `/group/array`.
    grid_shape : tuple of int
        Number of chunks along each axis; `()` for a scalar or an opaque entry.
    initialized_chunks : int
        Number of its chunks that exist.
    dimension_names : tuple of str or None, or None
        Names of its axes.
    """

    node_id: bytes
    path: str
    grid_shape: Coords
    initialized_chunks: int
    dimension_names: tuple[str | None, ...] | None = None
    metadata_chunks: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata_chunks", math.prod(self.grid_shape))

    @property
    def is_coordinate(self) -> bool:
        """Whether it is a CF coordinate: one axis with the array's own name."""
        return self.dimension_names == (self.path.rpartition("/")[2],)


class NodeFacts(Mapping[bytes, ArrayFacts]):
    """The facts about a snapshot's nodes, computed on access."""

    def __init__(self, nodes: Mapping[bytes, Node], refs: Mapping[bytes, int]) -> None:
        self._nodes, self._refs = nodes, refs
        self._known: dict[bytes, ArrayFacts] = {}

    def __getitem__(self, node_id: bytes) -> ArrayFacts:
        found = self._known.get(node_id)
        if found is None:
            node = self._nodes[node_id]
            meta, path = node.array, absolute(node.path)
            grid = () if meta is None else meta.grid.hi
            names = None if meta is None else meta.dimension_names
            found = ArrayFacts(node_id, path, grid, self._refs.get(node_id, 0), names)
            self._known[node_id] = found
        return found

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


def part_order(part: Part) -> tuple[bytes, Coords, Coords]:
    """Sort key of leaves, independent of paths."""
    return part.node_id, part.box.lo, part.box.hi


@dataclass(frozen=True, slots=True)
class PlacedLeaf:
    """A leaf, its manifest, and the sequence up to which changes are merged into it."""

    part: Part
    manifest: ManifestRef
    merged: int


class _NodeLeaves:
    """The leaves of one node, found by coordinate.

    They are sorted along the axis on which they differ most. So the leaves that may hold a
    coordinate are a short contiguous range: from the first leaf that ends after it, to the last
    that starts at or before it.
    """

    def __init__(self, entries: Sequence[tuple[Part, int, int]]) -> None:
        ndim = entries[0][0].box.ndim
        if any(part.box.ndim != ndim for part, _, _ in entries):
            raise CorruptObjectError("leaves of one array have different numbers of axes")
        lo = np.array([part.box.lo for part, _, _ in entries], np.int64)
        lo = lo.reshape(len(entries), ndim)
        hi = np.array([part.box.hi for part, _, _ in entries], np.int64).reshape(lo.shape)
        self.axis = 0
        if lo.shape[1] > 1 and len(lo) > 1:
            self.axis = int(np.argmax([len(np.unique(column)) for column in lo.T]))
        if lo.shape[1]:
            order = np.argsort(lo[:, self.axis], kind="stable")
        else:
            order = np.arange(len(entries))
        self.lo, self.hi = lo[order], hi[order]
        self.manifest = np.array([number for _, number, _ in entries], np.int64)[order]
        self.merged = np.array([merged for _, _, merged in entries], np.int64)[order]
        self.parts = [entries[i][0] for i in order.tolist()]
        self.placed: dict[int, PlacedLeaf] = {}  # by position, made when first asked for
        self.around = Box.around(part.box for part in self.parts)
        if lo.shape[1]:
            self.starts = self.lo[:, self.axis].copy()
            self.ends = np.maximum.accumulate(self.hi[:, self.axis])
        else:
            self.starts = np.zeros(len(entries), np.int64)
            self.ends = np.ones(len(entries), np.int64)

    def overlapping(self, lo: IndexArray, hi: IndexArray) -> IndexArray:
        """Positions of the leaves that overlap [lo, hi)."""
        if not len(lo):
            return np.arange(len(self.parts))
        first = int(np.searchsorted(self.ends, lo[self.axis], side="right"))
        stop = int(np.searchsorted(self.starts, hi[self.axis], side="left"))
        meets = (np.maximum(self.lo[first:stop], lo) < np.minimum(self.hi[first:stop], hi)).all(1)
        return np.asarray(np.flatnonzero(meets) + first, np.int64)

    def holding(self, coords: Coords) -> list[int]:
        """Positions of the leaves whose box holds the coordinate."""
        if len(self.parts) == 1 or not coords:
            return [i for i, part in enumerate(self.parts) if coords in part.box]
        at = coords[self.axis]
        first = int(np.searchsorted(self.ends, at, side="right"))
        stop = int(np.searchsorted(self.starts, at, side="right"))
        if stop - first > 16:  # many leaves start at the same place along that axis
            here = slice(first, stop)
            inside = ((self.lo[here] <= coords) & (coords < self.hi[here])).all(axis=1)
            return (np.flatnonzero(inside) + first).tolist()
        return [i for i in range(first, stop) if coords in self.parts[i].box]

    def beyond(self, cut: Coords) -> IndexArray:
        """Positions of the leaves that reach beyond a truncation at `cut`."""
        return np.flatnonzero((self.hi > np.asarray(cut, np.int64)).any(axis=1))

    def locate(self, coords: IndexArray) -> IndexArray:
        """Position of the leaf that holds each coordinate; -1 where none does."""
        found = np.full(len(coords), -1, np.int64)
        if not len(coords):
            return found
        if not coords.shape[1]:
            found[:] = 0
            return found
        along = coords[:, self.axis]
        first = np.searchsorted(self.ends, along, side="right")
        stop = np.searchsorted(self.starts, along, side="right")
        for step in range(int((stop - first).max(initial=0))):
            due = np.flatnonzero((found < 0) & (first + step < stop))
            if not len(due):
                break
            at = first[due] + step
            here = coords[due]
            inside = ((self.lo[at] <= here) & (here < self.hi[at])).all(axis=1)
            found[due[inside]] = at[inside]
        return found


class BaseIndex:
    """The manifests of a base, found by key, by set, by node and by chunk.

    Parameters
    ----------
    manifests : sequence of ManifestRef
        The base's directory.

    Raises
    ------
    InvalidArgumentError
        If a manifest is listed twice.
    """

    def __init__(self, manifests: Sequence[ManifestRef]) -> None:
        self._manifests = tuple(manifests)
        self._numbers = {ref.blob.key: number for number, ref in enumerate(self._manifests)}
        if len(self._numbers) != len(self._manifests):
            raise InvalidArgumentError("a base names a manifest twice")
        self._in_set: dict[str, list[int]] = {}
        entries: dict[bytes, list[tuple[Part, int, int]]] = {}
        for number, ref in enumerate(self._manifests):
            if ref.packed_for:
                self._in_set.setdefault(ref.packed_for, []).append(number)
            for part, merged in ref.leaves():
                entries.setdefault(part.node_id, []).append((part, number, merged))
        self._entries = entries
        self._refs = {node: sum(part.count for part, _, _ in of) for node, of in entries.items()}
        self._leaves: dict[bytes, _NodeLeaves] = {}  # built when first asked for

    def __len__(self) -> int:
        return len(self._manifests)

    def __iter__(self) -> Iterator[ManifestRef]:
        return iter(self._manifests)

    def __getitem__(self, key: str) -> ManifestRef:
        return self._manifests[self._numbers[key]]

    def set_of(self, key: str) -> str | None:
        """The set a manifest was packed for."""
        return self[key].packed_for or None

    def in_set(self, name: str) -> int:
        """The number of the set's manifests."""
        return len(self._in_set.get(name, ()))

    def numbers_in_set(self, name: str) -> tuple[int, ...]:
        """The set's manifests, by their numbers in the directory."""
        return tuple(self._in_set.get(name, ()))

    def refs(self, node_id: bytes) -> int:
        """The number of refs in all leaves of the node."""
        return self._refs.get(node_id, 0)

    def leaves(self, node_id: bytes) -> list[tuple[Part, str]]:
        """The leaves of the node and the keys of their manifests, in the directory's order."""
        return [(leaf.part, leaf.manifest.blob.key) for leaf in self.placed(node_id)]

    def placed(self, node_id: bytes) -> list[PlacedLeaf]:
        """The leaves of the node, in the directory's order."""
        return [
            PlacedLeaf(part, self._manifests[number], merged)
            for part, number, merged in self._entries.get(node_id, ())
        ]

    def holding(self, node_id: bytes, coords: Coords) -> list[PlacedLeaf]:
        """The leaves whose box holds the coordinate: at most one in a valid base."""
        leaves = self._of(node_id)
        return [] if leaves is None else self._placed(leaves, leaves.holding(coords))

    def placed_in(self, node_id: bytes, box: Box) -> list[PlacedLeaf]:
        """The leaves of the node that overlap the box."""
        leaves = self._of(node_id)
        if leaves is None:
            return []
        lo, hi = np.asarray(box.lo, np.int64), np.asarray(box.hi, np.int64)
        return self._placed(leaves, leaves.overlapping(lo, hi).tolist())

    def _placed(self, leaves: _NodeLeaves, at: Sequence[int]) -> list[PlacedLeaf]:
        return [leaves.placed.get(i) or self._place(leaves, i) for i in at]

    def _place(self, leaves: _NodeLeaves, at: int) -> PlacedLeaf:
        manifest = self._manifests[int(leaves.manifest[at])]
        placed = PlacedLeaf(leaves.parts[at], manifest, int(leaves.merged[at]))
        leaves.placed[at] = placed
        return placed

    def may_be_merged(self, node_id: bytes, first: int, stop: int) -> bool:
        """Whether a leaf of the node may be merged to a sequence from `first` up to `stop`."""
        leaves = self._of(node_id)
        if leaves is None:
            return False
        return bool(((leaves.merged >= first) & (leaves.merged < stop)).any())

    def around(self, node_id: bytes) -> Box | None:
        """The smallest box around the node's leaves; None if it has none."""
        leaves = self._of(node_id)
        return None if leaves is None else leaves.around

    def ndim(self, node_id: bytes) -> int | None:
        """The number of axes of the node's leaves; None if it has none."""
        entries = self._entries.get(node_id)
        return None if entries is None else entries[0][0].box.ndim

    def manifests_of(self, node_id: bytes) -> tuple[str, ...]:
        """Keys of the manifests that hold leaves of the node, in the directory's order."""
        numbers = sorted({number for _, number, _ in self._entries.get(node_id, ())})
        return tuple(self._manifests[number].blob.key for number in numbers)

    def locate(self, node_id: bytes, coords: IndexArray) -> IndexArray:
        """The manifest number of the leaf at each coordinate (int64[n, ndim]), -1 without one."""
        leaves = self._of(node_id)
        if leaves is None:
            return np.full(len(coords), -1, np.int64)
        at = leaves.locate(coords)
        return np.where(at >= 0, leaves.manifest[at], -1)

    def overlapping(self, node_id: bytes, lo: IndexArray, hi: IndexArray) -> list[tuple[Part, int]]:
        """The node's leaves that overlap [lo, hi), with their manifests' numbers."""
        leaves = self._of(node_id)
        if leaves is None:
            return []
        at = leaves.overlapping(lo, hi)
        numbers = leaves.manifest[at].tolist()
        return [(leaves.parts[i], n) for i, n in zip(at.tolist(), numbers, strict=True)]

    def beyond(self, node_id: bytes, cut: Coords) -> npt.NDArray[np.int64]:
        """Numbers of the manifests with leaves of the node that reach beyond `cut` on an axis."""
        leaves = self._of(node_id)
        if leaves is None:
            return np.empty(0, np.int64)
        return np.unique(leaves.manifest[leaves.beyond(cut)])

    def manifest(self, number: int) -> ManifestRef:
        """A manifest, by its number in the directory."""
        return self._manifests[number]

    def key(self, number: int) -> str:
        """The key of a manifest, by its number in the directory."""
        return self._manifests[number].blob.key

    def number(self, key: str) -> int:
        """The number of a manifest in the directory, by its key."""
        return self._numbers[key]

    def _of(self, node_id: bytes) -> _NodeLeaves | None:
        found = self._leaves.get(node_id)
        if found is None and node_id in self._entries:
            found = self._leaves[node_id] = _NodeLeaves(self._entries[node_id])
        return found


EMPTY: Final = BaseIndex(())
"""The index of a repository without a base."""
