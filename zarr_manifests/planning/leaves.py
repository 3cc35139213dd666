"""How an array is split into leaves.

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from zarr_manifests.config.manifest_sets import ChunkManifests, ManifestSet, Split
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import LEAF_ROWS
from zarr_manifests.format.manifest import Node, Part
from zarr_manifests.grid import Box, Coords, IndexArray, corners
from zarr_manifests.keys import absolute
from zarr_manifests.planning.tables import BaseIndex, part_order


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
