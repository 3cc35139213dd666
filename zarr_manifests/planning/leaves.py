"""What the manifest planner knows: facts about arrays, and an index of a base's leaves.

A leaf is a `Part` of a manifest: a node, a box and the number of chunk refs in it. Invariant: a
`BaseIndex` is built once, in one pass over the base's directory, and never changes. The cost of a
query depends on the size of its answer, not of the base, so planning a change of one leaf costs
the same for eighty leaves as for eight thousand.

How an array is split into leaves:

A `Layout` covers the array's grid with cells of a fixed shape, counted in chunks from the origin.
The shape is set by `splitting` if it names the array, and by the size of the last set otherwise. It
does not depend on the length of the first axis. So a chunk keeps its cell while the array grows
along that axis, and an append changes only the last leaf. An array that is not split has a single
unbounded cell.

`cut` turns chunk coordinates into leaves: one leaf per cell, unless the cell has too many chunks,
or a leaf that stays reaches into it. That happens when only a part of the array is repacked. Then
it cuts along the sides of that leaf as well, so that leaves never overlap.

`batches` cuts an array into regions with so few chunk refs that one fits into memory. How many refs
a region has is estimated from the boxes and row counts of tables: the rows of a table are assumed
to be spread evenly in its box.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct

from zarr_manifests.config.manifest_sets import ChunkManifests, ManifestSet, Split
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.chunk_table import LEAF_ROWS
from zarr_manifests.format.manifest import ManifestRef, Node, Part, grouped
from zarr_manifests.grid import Box, Coords, IndexArray, corners, holding
from zarr_manifests.keys import absolute


class ArrayFacts(Struct, frozen=True):
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

    @property
    def metadata_chunks(self) -> int:
        """Number of chunks that the array's document gives room for."""
        return math.prod(self.grid_shape)

    @property
    def is_coordinate(self) -> bool:
        """Whether it is a CF coordinate: one axis with the array's own name."""
        return self.dimension_names == (self.path.rpartition("/")[2],)

    @classmethod
    def of(cls, node: Node, refs: int) -> ArrayFacts:
        """The facts about an array or an opaque entry with that many refs."""
        meta, path = node.array, absolute(node.path)
        if meta is None:
            return cls(node.node_id, path, (), refs)
        return cls(node.node_id, path, meta.grid.hi, refs, meta.dimension_names)


type NodeFacts = Mapping[bytes, ArrayFacts]


def part_order(part: Part) -> tuple[bytes, Coords, Coords]:
    """Sort key of leaves, independent of paths."""
    return part.node_id, part.box.lo, part.box.hi


class PlacedLeaf(NamedTuple):
    """A leaf, its manifest, and the sequence up to which changes are merged into it."""

    part: Part
    manifest: ManifestRef
    merged: int

    @property
    def key(self) -> str:
        """The key of its manifest."""
        return self.manifest.blob.key

    @property
    def nbytes(self) -> int:
        """The bytes of its chunks."""
        return self.manifest.bytes_of(self.part)


def check_axes(box: Box, ndim: int) -> None:
    """Refuse a chunk table with other axes than its node: its chunks would read as absent.

    Raises
    ------
    CorruptObjectError
        If the numbers differ.
    """
    if box.ndim != ndim:
        raise CorruptObjectError(f"a chunk table of {box.ndim} axes for a node of {ndim}")


class _NodeLeaves:
    """The leaves of one node, found by coordinate.

    They are sorted along the axis on which they differ most. So the leaves that may hold a
    coordinate are a short contiguous range: from the first leaf that ends after it, to the last
    that starts at or before it.
    """

    def __init__(self, leaves: Sequence[PlacedLeaf]) -> None:
        ndim = leaves[0].part.box.ndim
        if any(leaf.part.box.ndim != ndim for leaf in leaves):
            raise CorruptObjectError("leaves of one array have different numbers of axes")
        lo, hi = corners([leaf.part.box for leaf in leaves], ndim)
        self.axis = 0
        if ndim > 1 and len(lo) > 1:
            self.axis = int(np.argmax([len(np.unique(column)) for column in lo.T]))
        order = np.argsort(lo[:, self.axis], kind="stable") if ndim else np.arange(len(leaves))
        self.lo, self.hi = lo[order], hi[order]
        self.leaves = [leaves[i] for i in order.tolist()]
        self.merged = np.array([leaf.merged for leaf in self.leaves], np.int64)
        self.around = Box.around(leaf.part.box for leaf in leaves)
        self.starts, self.ends = np.zeros(len(leaves), np.int64), np.ones(len(leaves), np.int64)
        if ndim:
            self.starts = self.lo[:, self.axis].copy()
            self.ends = np.maximum.accumulate(self.hi[:, self.axis])

    def overlapping(self, lo: IndexArray, hi: IndexArray) -> list[PlacedLeaf]:
        """The leaves that overlap [lo, hi)."""
        check_axes(self.around, len(lo))
        if not len(lo):
            return self.leaves
        first = int(np.searchsorted(self.ends, lo[self.axis], side="right"))
        stop = int(np.searchsorted(self.starts, hi[self.axis], side="left"))
        meets = (np.maximum(self.lo[first:stop], lo) < np.minimum(self.hi[first:stop], hi)).all(1)
        return [self.leaves[first + i] for i in np.flatnonzero(meets).tolist()]

    def holding(self, coords: Coords) -> list[PlacedLeaf]:
        """The leaves that hold a coordinate."""
        check_axes(self.around, len(coords))
        at = coords[self.axis] if coords else 0
        near = slice(self.ends.searchsorted(at, "right"), self.starts.searchsorted(at, "right"))
        leaves = self.leaves[near]
        boxes = [leaf.part.box for leaf in leaves]
        return [leaves[row] for row in holding(boxes, self.lo[near], self.hi[near], coords)]

    def locate(self, coords: IndexArray) -> IndexArray:
        """Position of the leaf that holds each coordinate; -1 where none does."""
        found = np.full(len(coords), -1, np.int64)
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
        self._manifests = {ref.blob.key: ref for ref in manifests}
        if len(self._manifests) != len(manifests):
            raise InvalidArgumentError("a base names a manifest twice")
        self._in_set = grouped((ref.packed_for, ref) for ref in manifests if ref.packed_for)
        leaves = (PlacedLeaf(part, ref, to) for ref in manifests for part, to in ref.leaves())
        self._placed = grouped((leaf.part.node_id, leaf) for leaf in leaves)
        each = self._placed.items()
        self._refs = {node: sum(leaf.part.count for leaf in of) for node, of in each}
        self._leaves: dict[bytes, _NodeLeaves] = {}  # built when first asked for

    def __iter__(self) -> Iterator[ManifestRef]:
        return iter(self._manifests.values())

    def __getitem__(self, key: str) -> ManifestRef:
        return self._manifests[key]

    def in_set(self, name: str) -> Sequence[ManifestRef]:
        """The set's manifests."""
        return self._in_set.get(name, ())

    def refs(self, node_id: bytes) -> int:
        """The number of refs in all leaves of the node."""
        return self._refs.get(node_id, 0)

    def placed(self, node_id: bytes) -> Sequence[PlacedLeaf]:
        """The leaves of the node, in the directory's order."""
        return self._placed.get(node_id, ())

    def placed_in(self, node_id: bytes, box: Box) -> list[PlacedLeaf]:
        """The leaves of the node that overlap the box."""
        return self.overlapping(node_id, *np.array([box.lo, box.hi], np.int64))

    def overlapping(self, node_id: bytes, lo: IndexArray, hi: IndexArray) -> list[PlacedLeaf]:
        """The leaves of the node that overlap [lo, hi), which may be larger than a box."""
        leaves = self._of(node_id)
        return [] if leaves is None else leaves.overlapping(lo, hi)

    def holding(self, node_id: bytes, coords: Coords) -> list[PlacedLeaf]:
        """The leaves of the node that hold a chunk: one at most, unless leaves overlap."""
        leaves = self._of(node_id)
        return [] if leaves is None else leaves.holding(coords)

    def merged_at(self, node_id: bytes, coords: IndexArray) -> IndexArray:
        """What the leaf of each coordinate (int64[n, ndim]) is merged to; -1 where none is."""
        leaves = self._of(node_id)
        if leaves is None:
            return np.full(len(coords), -1, np.int64)
        at = leaves.locate(coords)
        return np.where(at < 0, -1, leaves.merged[at])

    def around(self, node_id: bytes) -> Box | None:
        """The smallest box around the node's leaves; None if it has none."""
        leaves = self._of(node_id)
        return None if leaves is None else leaves.around

    def _of(self, node_id: bytes) -> _NodeLeaves | None:
        found = self._leaves.get(node_id)
        if found is None and node_id in self._placed:
            found = self._leaves[node_id] = _NodeLeaves(self._placed[node_id])
        return found


EMPTY: Final = BaseIndex(())
"""The index of a repository without a base."""


# --- splitting ---------------------------------------------------------------------------------

ENDLESS: Final = 2**62
"""Chunks of a leaf along an axis that is not split."""
_SPARSEST: Final = 2**40


class Layout(Struct, frozen=True):
    """How one array is split.

    Parameters
    ----------
    cell : tuple of int
        Chunks of a leaf along each axis.
    most_refs : int
        Most refs of a leaf. Cells of a sparse array hold more chunks than that; a cell that turns
        out fuller is split again.
    together : bool
        Whether all its leaves have to be in one manifest.
    """

    cell: Coords
    most_refs: int
    together: bool

    def groups(self, coords: IndexArray) -> Iterator[IndexArray]:
        """Yield the rows of coordinates (int64[n, ndim]) that share a cell, ascending."""
        cut_axes = [axis for axis, chunks in enumerate(self.cell) if chunks < ENDLESS]
        if not cut_axes or not len(coords):
            yield from [np.arange(len(coords))] if len(coords) else []
            return
        labels = np.array([coords[:, axis] // self.cell[axis] for axis in cut_axes])
        order = np.lexsort(labels[::-1])  # stable: rows of a cell keep their order
        ordered = labels[:, order]
        first = np.flatnonzero((ordered[:, 1:] != ordered[:, :-1]).any(axis=0)) + 1
        yield from np.split(order, first)

    def around(self, lo: Coords, hi: Coords) -> tuple[IndexArray, IndexArray]:
        """Lower and upper corner of the cells that overlap [lo, hi)."""
        shape = np.asarray(self.cell, np.int64)
        last = np.maximum(np.asarray(hi, np.int64) - 1, lo)
        return np.asarray(lo, np.int64) // shape * shape, last // shape * shape + shape


def leaf_shape(
    grid_shape: Coords,
    dimension_names: Sequence[str | None] | None,
    split: Split | None,
    most_chunks: int,
) -> Coords:
    """Return the chunks of a leaf along each axis: at most those of `split`, `most_chunks` in all.

    Axes that `split` does not name are whole (`ENDLESS`), except the first: it is cut so that a
    leaf has at most `most_chunks`. If a single step of it has more, the next axis is cut too, and
    so on. The length of the first axis does not count. Axes and names that the array does not have
    are ignored.

    Examples
    --------
    >>> from zarr_manifests.config.manifest_sets import Split
    >>> from zarr_manifests.planning.leaves import ENDLESS, leaf_shape
    >>> names = ("time", "lat", "lon")
    >>> leaf_shape((9000, 10, 20), names, None, 50_000) == (250, ENDLESS, ENDLESS)
    True
    >>> tiles = Split(".*", (("time", 24), ("lat", 5), (2, 4)))
    >>> leaf_shape((9000, 10, 20), names, tiles, 50_000)
    (24, 5, 4)
    """
    ndim = len(grid_shape)
    named: dict[int, int] = {}
    for axis, chunks in split.along if split else ():
        at = axis
        if isinstance(at, str):
            at = dimension_names.index(at) if dimension_names and at in dimension_names else ndim
        if -ndim <= at < ndim:
            named.setdefault(at % ndim, min(chunks, ENDLESS))
    shape = [named.get(axis, max(1, n)) for axis, n in enumerate(grid_shape)]
    for axis in range(ndim):
        behind = math.prod(shape[axis + 1 :])
        most = max(most_chunks // behind, 1)
        if axis in named or (axis and shape[axis] > most):
            shape[axis] = min(shape[axis], most)
        else:
            shape[axis] = ENDLESS if axis else most
        if behind <= most_chunks:
            shape[axis + 1 :] = (named.get(i, ENDLESS) for i in range(axis + 1, ndim))
            break
    return tuple(shape)


def layout_of(config: ChunkManifests, facts: ArrayFacts, extent: int | None = None) -> Layout:
    """Return how the configuration splits an array.

    `extent` is the number of chunks in the smallest box around existing chunks; by default the
    whole grid. A sparse array gets larger cells.

    Examples
    --------
    >>> from zarr_manifests.config.manifest_sets import ChunkManifests, ManifestSet
    >>> from zarr_manifests.planning.leaves import ArrayFacts
    >>> from zarr_manifests.planning.leaves import layout_of
    >>> default = ManifestSet("default", 1_000, None, None, None)
    >>> config = ChunkManifests(sets=(default,), rules=())
    >>> layout_of(config, ArrayFacts(bytes(12), "/air", (5_000, 10), 50_000)).cell[0]
    100
    """
    chain = _chain(config, facts)
    together = config.splitting is None or any(one.arrays_per_manifest for one in chain)
    split = config.split_for(facts.path)
    most = LEAF_ROWS
    if config.splitting is not None:
        sizes = [chain[-1].max_manifest_size, chain[0].max_manifest_size if split else None]
        most = min(most, *(size for size in sizes if size is not None), LEAF_ROWS)
    if split is None and facts.initialized_chunks <= most:
        return Layout((ENDLESS,) * len(facts.grid_shape), most, together)
    sparse = 1
    if split is None and facts.initialized_chunks:
        room = facts.metadata_chunks if extent is None else extent
        share = room // facts.initialized_chunks
        sparse = min(1 << max(share.bit_length() - 1, 0), _SPARSEST)
    cell = leaf_shape(facts.grid_shape, facts.dimension_names, split, most * sparse)
    return Layout(cell, most, together)


def layout_around(
    config: ChunkManifests, facts: ArrayFacts, base: BaseIndex, changed: Sequence[Box] = ()
) -> Layout:
    """Return how the configuration splits an array whose changed chunks are in boxes."""
    around = base.around(facts.node_id)
    boxes = [*changed] if around is None else [*changed, around]
    return layout_of(config, facts, Box.around(boxes).size if boxes else 0)


def _chain(config: ChunkManifests, facts: ArrayFacts) -> list[ManifestSet]:
    """The set of an array and those it can overflow to, up to one that takes everything."""
    one, _ = config.set_for(facts.path, facts.metadata_chunks, facts.initialized_chunks)
    chain = [one]
    while one.overflow_to is not None and not (
        one.cardinality is None and one.max_manifest_size is None
    ):
        one = next(other for other in config.sets if other.name == one.overflow_to)
        chain.append(one)
    return chain


def cut(
    node_id: bytes, coords: IndexArray, layout: Layout, staying: Sequence[Box] = ()
) -> list[Part]:
    """Cut chunks into new leaves.

    Parameters
    ----------
    node_id : bytes
        The array.
    coords : int64[n, ndim]
        The chunks' coordinates, without duplicates, in C order.
    layout : Layout
        The array's layout.
    staying : sequence of Box
        Boxes of the array's leaves that stay as they are; they hold none of the chunks.

    Returns
    -------
    list of Part
        In ascending order of the boxes' lower corners. Each box is as small as possible, and
        overlaps with no other, and with none that stays.

    Raises
    ------
    CorruptObjectError
        If a leaf that stays holds one of the chunks.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.planning.leaves import Layout, cut
    >>> coords = np.arange(5).reshape(-1, 1)
    >>> [leaf.box.hi for leaf in cut(bytes(12), coords, Layout((2,), 1_000, False))]
    [(2,), (4,), (5,)]
    """
    found = [
        Part(node_id, box, count)
        for rows in layout.groups(coords)
        for box, count in _fitting(coords[rows], layout.most_refs, staying)
    ]
    return sorted(found, key=part_order)


def _fitting(coords: IndexArray, most: int, staying: Sequence[Box]) -> Iterator[tuple[Box, int]]:
    """Boxes around the coordinates (in C order) with at most `most` each, and how many are there.

    Cut along the first axes, and along a side of a box that stays where they would overlap.
    """
    lo, hi = corners(staying, coords.shape[1])
    due = [coords]
    while due:
        here = due.pop()
        box = Box.around_coords(here)
        met = np.flatnonzero((np.maximum(lo, box.lo) < np.minimum(hi, box.hi)).all(axis=1))
        if len(here) > most:
            # They ascend on the first axis on which the first and the last differ.
            axis = int(np.flatnonzero(here[0] != here[-1])[0])
            below = here[:, axis] < max(int(here[most, axis]), int(here[0, axis]) + 1)
        elif len(met):
            corner = lo[met[0]], hi[met[0]]
            sides = (here[:, axis] < at[axis] for at in corner for axis in range(box.ndim))
            found = [side for side in sides if side.any() and not side.all()]
            if not found:  # one of them is in the box
                raise CorruptObjectError("leaves of one array overlap")
            below = found[0]
        else:
            yield box, len(here)
            continue
        due += [here[~below], here[below]]


# --- batches -----------------------------------------------------------------------------------


def batches(
    held: Sequence[tuple[Box, int]], most: int, cell: Coords | None = None
) -> Iterator[Box]:
    """Yield regions that hold about `most` rows each, and together all rows.

    A region is cut along the first axis on which it has more than one cell. So with cells of one
    chunk, the default, the coordinates of one region after the other are in C order.

    Parameters
    ----------
    held : sequence of (Box, int)
        The boxes of the tables and their numbers of rows. Regions without a table are left out.
    most : int
        Rows of a region; one that is a single cell may have more.
    cell : tuple of int, optional
        Shape of the cells that are not cut, counted from the origin.

    Examples
    --------
    >>> from zarr_manifests.grid import Box
    >>> from zarr_manifests.planning.leaves import batches
    >>> tables = [(Box((0, 0), (4, 5)), 20), (Box((4, 0), (8, 5)), 20)]
    >>> [(box.lo, box.hi) for box in batches(tables, 25)]
    [((0, 0), (4, 5)), ((4, 0), (8, 5))]
    """
    if not held:
        return
    around = Box.around(box for box, _ in held)
    lo, hi = corners([box for box, _ in held], around.ndim)
    # Rows a coordinate; the product of the sides may exceed int64.
    rows = np.array([count for _, count in held], np.float64)
    rows /= np.maximum((hi - lo).astype(np.float64).prod(axis=1), 1)
    steps = cell or (1,) * around.ndim
    due = [(around, np.arange(len(held)))]
    while due:
        region, inside = due.pop()
        shared = np.minimum(hi[inside], region.hi) - np.maximum(lo[inside], region.lo)
        inside, shared = inside[(shared > 0).all(axis=1)], shared[(shared > 0).all(axis=1)]
        if not len(inside):
            continue
        estimate = float((rows[inside] * shared.astype(np.float64).prod(axis=1)).sum())
        axis, at = _middle(region, steps)
        if estimate <= most or axis < 0:
            yield region
            continue
        below, above = list(region.hi), list(region.lo)
        below[axis] = above[axis] = at
        due += [(Box(tuple(above), region.hi), inside), (Box(region.lo, tuple(below)), inside)]


def _middle(region: Box, steps: Coords) -> tuple[int, int]:
    """The first axis on which the region has several cells, and where to cut it; -1 without one."""
    for axis, (lo, hi, step) in enumerate(zip(region.lo, region.hi, steps, strict=True)):
        first, count = lo // step, (hi - 1) // step - lo // step + 1
        if count > 1:
            return axis, (first + count // 2) * step
    return -1, 0


def combined_refs(refs: Iterable[ManifestRef]) -> tuple[ManifestRef, ...]:
    """The manifests, each once, with all leaves that are listed of it."""
    found = grouped((ref.blob.key, ref) for ref in refs)
    return tuple(some[0] if len(some) == 1 else _combined(some) for some in found.values())


def _combined(refs: Sequence[ManifestRef]) -> ManifestRef:
    merged = tuple(to for ref in refs for _, to in ref.leaves())
    blob = next((ref.blob for ref in refs if ref.blob.copy is not None), refs[0].blob)
    parts, places, nbytes = (
        tuple(chain.from_iterable(getattr(ref, name) for ref in refs))
        for name in ("parts", "places", "nbytes")
    )
    kept = merged if any(merged) else ()
    return ManifestRef(blob, parts, kept, refs[0].packed_for, places, nbytes)
