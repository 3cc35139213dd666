"""Merging pending changes into leaves of the base, and packing the leaves into manifests.

Which leaves are due is estimated from the boxes and row counts in the read list, without fetching
anything: the refs of an entry are assumed to be spread evenly in their box. Refs outside all leaves
count for the leaves in the same cells of the array's layout; without such leaves they are due at
once.

The due leaves, and all other leaves of their manifests, are merged with pending changes in their
boxes, cut into new leaves, and packed into manifests. This happens in steps of about `STEP_REFS`
refs; after each step the base is complete. A full compaction rewrites each array in a single step.

Within a step, only about `BATCH_ROWS` refs are in memory. First, the coordinates of the chunks are
read, region by region: they show where the new leaves are and how many refs each has, which decides
how leaves are packed. Then leaves are merged, encoded and uploaded, one batch after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.compact.presence_index import index_leaves
from zarr_manifests.engine.compact.zone_index import LeafZones, NewPages, write_pages
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.pending import BATCH_ROWS, Heap
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.index import Bitmap, IndexEntry
from zarr_manifests.format.manifest import Manifest, ManifestRef, Part
from zarr_manifests.format.stretches import TableData
from zarr_manifests.format.zone_maps import ZoneTable
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.layout.batches import batches
from zarr_manifests.planning.layout.closure import ArrayChange, Closure, Due, close
from zarr_manifests.planning.layout.leaves import BaseIndex, NodeFacts, PlacedLeaf, part_order
from zarr_manifests.planning.layout.sets import PlannedManifest, plan_manifests
from zarr_manifests.planning.layout.splitting import Layout, layout_around, layout_of
from zarr_manifests.planning.tables.live_deltas import Stack
from zarr_manifests.planning.tables.merge import (
    Leaf,
    bare,
    fold,
    fold_leaves,
    take,
    within,
)
from zarr_manifests.planning.upkeep.compaction_triggers import overlap_refs

__all__ = [
    "NodeMerge",
    "Pending",
    "Repacked",
    "due_changes",
    "due_manifests",
    "pending_of",
    "repack",
    "set_names",
]

STEP_REFS = 4_000_000


@dataclass(slots=True)
class Pending:
    """Estimated pending changes of one node.

    Parameters
    ----------
    leaves : dict of (Coords, Coords) to float
        Pending refs by the corners of the leaf's box.
    new : float
        Pending refs in cells without a leaf.
    outside : bool
        Whether some may be outside all leaves.
    refs : int
        All pending refs.
    """

    leaves: dict[tuple[Coords, Coords], float] = field(default_factory=dict)
    new: float = 0.0
    outside: bool = False
    refs: int = 0

    def of(self, leaf: Part) -> float:
        """The pending refs of a leaf."""
        return self.leaves.get((leaf.box.lo, leaf.box.hi), 0.0)

    def add(self, part: Part, weight: float) -> None:
        """Add pending refs to a leaf."""
        corners = part.box.lo, part.box.hi
        self.leaves[corners] = self.leaves.get(corners, 0.0) + weight


def pending_of(
    context: ReadContext, view: SnapshotView, base: BaseIndex, facts: NodeFacts
) -> dict[bytes, Pending]:
    """Return the pending changes, by node."""
    found: dict[bytes, Pending] = {}
    for position, entry in enumerate(view.snapshot.deltas):
        for part in entry.parts():
            if part.node_id in facts:  # else the node was deleted
                pending = found.setdefault(part.node_id, Pending())
                _count_part(context, base, facts, pending, part, entry.last)
        for node_id, cut in view.truncations(position).items():
            if node_id in facts:
                pending = found.setdefault(node_id, Pending())
                _count_cut(base, pending, node_id, cut, entry.last)
    return found


def _count_part(
    context: ReadContext, base: BaseIndex, facts: NodeFacts, pending: Pending, part: Part, last: int
) -> None:
    pending.refs += part.count
    lo, hi = np.asarray(part.box.lo, np.int64), np.asarray(part.box.hi, np.int64)
    covered = 0
    for leaf, number in base.overlapping(part.node_id, lo, hi):
        shared = part.box.shared_size(leaf.box)
        covered += shared
        if last > base.manifest(number).merged_to(leaf):
            pending.add(leaf, overlap_refs(part.count, part.box.size, shared))
    if covered >= part.box.size:
        return
    pending.outside = True
    rest = overlap_refs(part.count, part.box.size, part.box.size - covered)
    layout = layout_of(context.config.chunk_manifests, facts[part.node_id])
    near = base.overlapping(part.node_id, *layout.around(part.box.lo, part.box.hi))
    held = sum(leaf.count for leaf, _ in near)
    if not held:
        pending.new += rest
    for leaf, _ in near:
        pending.add(leaf, rest * leaf.count / held if held else rest)


def _count_cut(base: BaseIndex, pending: Pending, node_id: bytes, cut: Coords, last: int) -> None:
    for leaf, key in base.leaves(node_id):
        if last > base[key].merged_to(leaf):
            kept = leaf.box.shared_size(Box((0,) * len(cut), cut))
            if kept < leaf.box.size:
                pending.add(leaf, leaf.count * (1 - kept / leaf.box.size))


def due_manifests(base: BaseIndex, pending: Mapping[bytes, Pending], ratio: float) -> set[str]:
    """Keys of the manifests with enough pending refs to be rewritten.

    Counted per manifest, since all its leaves are rewritten together.
    """
    sums: dict[str, float] = {}
    for node_id, mine in pending.items():
        for leaf, key in base.leaves(node_id):
            sums[key] = sums.get(key, 0.0) + mine.of(leaf)
    return {
        key
        for key, refs in sums.items()
        if refs and refs >= ratio * sum(part.count for part in base[key].parts)
    }


@dataclass(frozen=True, slots=True)
class NodeMerge:
    """What is merged of one node.

    Parameters
    ----------
    change : ArrayChange
        One chunk in each due cell with chunks outside all leaves, then one in each due leaf.
    cells : int
        How many of them stand for cells.
    whole : bool
        Whether all chunks outside leaves are in due cells.
    """

    change: ArrayChange
    cells: int
    whole: bool

    def cells_at(self, rows: IndexArray) -> IndexArray:
        """The chunks that stand for cells, of those at these rows (ascending)."""
        return self.change.coords[rows[: rows.searchsorted(self.cells)]]


def due_changes(
    context: ReadContext,
    heap: Heap,
    base: BaseIndex,
    facts: NodeFacts,
    pending: Mapping[bytes, Pending],
    ratio: float,
    *,
    everything: bool,
) -> dict[bytes, NodeMerge]:
    """Return what to merge, by node: the due leaves, and the chunks outside all leaves.

    The latter are due if their cell of the array's layout has a due leaf, or none.
    """
    config = context.config.chunk_manifests
    keys = {ref.blob.key for ref in base} if everything else due_manifests(base, pending, ratio)
    found = {}
    for node_id in facts if everything else pending:
        mine = pending.get(node_id, Pending())
        due = {
            leaf.box
            for leaf, key in base.leaves(node_id)
            if key in keys and (everything or mine.of(leaf))
        }
        ndim = len(facts[node_id].grid_shape)
        coords = np.array([box.lo for box in due], np.int64).reshape(len(due), ndim)
        counts, cells, whole, around = np.ones(len(due), np.int64), 0, False, None
        reads = mine.outside and (due or mine.new or everything)
        if reads:
            outside = heap.outside(node_id)
            around = outside.box
            layout = layout_around(config, facts[node_id], base, around)
            first, chunks = outside.cells(layout)
            rows = _cells_due(first, layout, base, node_id, due)
            cells, whole = len(rows), len(rows) == len(first)
            if cells:
                coords = np.concatenate([first[rows], coords])
                counts = np.concatenate([chunks[rows], counts])
        if len(coords) or reads:
            found[node_id] = NodeMerge(ArrayChange(coords, None, counts, around), cells, whole)
    return found


def _cells_due(
    first: IndexArray, layout: Layout, base: BaseIndex, node_id: bytes, due: set[Box]
) -> list[int]:
    """Which of the cells, each given by a chunk in it, have a due leaf or none."""
    rows = []
    for row, one in enumerate(map(tuple, first.tolist())):
        near = base.overlapping(node_id, *layout.around(one, one))
        if not near or any(leaf.box in due for leaf, _ in near):
            rows.append(row)
    return rows


@dataclass(slots=True)
class Repacked:
    """The base's new directory, and what was written for it.

    Parameters
    ----------
    manifests : tuple of ManifestRef
        The directory.
    uploads : dict of str to bytes
        The small ones among the new manifests, by key.
    entries : list of IndexEntry
        Entries for the index of initialized chunks, of the new leaves.
    bitmaps : list of Upload
        Objects that these entries refer to; they are still to be written.
    zones : dict of bytes to NewPages
        Pages of zone maps of the new leaves, by node; written.
    refs : int
        Number of refs written.
    bytes_written, manifests_written, manifests_replaced : int
        The cost of that.
    """

    manifests: tuple[ManifestRef, ...]
    uploads: dict[str, bytes] = field(default_factory=dict)
    entries: list[IndexEntry] = field(default_factory=list)
    bitmaps: list[Upload] = field(default_factory=list)
    zones: dict[bytes, NewPages] = field(default_factory=dict)
    refs: int = 0
    bytes_written: int = 0
    manifests_written: int = 0
    manifests_replaced: int = 0


_KEPT_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf that is encoded, and its data for the index."""

    part: Part
    data: TableData
    stored_bytes: int
    bitmap: Bitmap
    zones: list[tuple[ZoneTable, bool]]


def set_names(manifests: Sequence[ManifestRef]) -> dict[str, str]:
    """The set that each manifest was packed for, by key."""
    return {ref.blob.key: ref.packed_for for ref in manifests if ref.packed_for}


def repack(
    context: Context,
    heap: Heap,
    base: BaseIndex,
    facts: NodeFacts,
    merges: Mapping[bytes, NodeMerge],
    keys: SessionKeys,
    ratio: float,
    zones: LeafZones,
    *,
    everything: bool,
) -> Repacked:
    """Rewrite the leaves of the changed chunks, with all that is pending in them."""
    config = context.config.chunk_manifests
    gone = {part.node_id for ref in base for part in ref.parts if part.node_id not in facts}
    deleted = gone if everything else _mostly_dead(base, gone, ratio)
    changes = {node_id: merge.change for node_id, merge in merges.items()}
    closure = close(config, facts, base, changes, deleted, reopen=True)
    result = Repacked(tuple(base))
    for step in _steps(closure, base, whole_arrays=everything):
        index = BaseIndex(result.manifests, set_names(result.manifests))
        leaves = [
            leaf
            for due in step.dues(index)
            if due.node_id in facts
            for leaf in _cut(context, heap, index, due, merges.get(due.node_id))
        ]
        plan = plan_manifests(config, facts, leaves, index, step.manifests)
        written = _Writer(context, heap, index, facts, keys, zones).write(plan.manifests)
        bitmaps, entries = index_leaves(keys, written.leaves)
        result.entries += entries
        result.bitmaps += bitmaps
        for node_id, pages in written.zones.items():
            known = NewPages(pages.meaning, pages.before)
            result.zones.setdefault(node_id, known).add(pages)
        kept = [ref for ref in result.manifests if ref.blob.key not in set(step.manifests)]
        result.manifests = (*kept, *written.manifests)
        result.uploads |= written.copies
        result.refs += sum(leaf.count for leaf in leaves)
        result.bytes_written += sum(ref.blob.length for ref in written.manifests)
        result.manifests_written += len(written.manifests)
        result.manifests_replaced += len(step.manifests)
    return result


def _mostly_dead(base: BaseIndex, gone: set[bytes], ratio: float) -> set[bytes]:
    """Deleted nodes that take up enough of a manifest for it to be rewritten."""
    found: set[bytes] = set()
    for ref in base:
        dead = [part for part in ref.parts if part.node_id in gone]
        if dead and sum(p.count for p in dead) >= ratio * sum(p.count for p in ref.parts):
            found |= {part.node_id for part in dead}
    return found


def _steps(closure: Closure, base: BaseIndex, *, whole_arrays: bool) -> Iterator[Closure]:
    """Split the closure into parts of about `STEP_REFS` at most.

    With `whole_arrays`, all leaves of an array are in one part, so that it can be split anew.
    """
    rest = closure.with_whole_arrays(base) if whole_arrays else closure
    while rest:
        step, rest = rest.step(STEP_REFS)
        yield step


# --- where the new leaves are ---------------------------------------------------------------------


def _cut(
    context: ReadContext, heap: Heap, index: BaseIndex, due: Due, merge: NodeMerge | None
) -> Iterator[Part]:
    """Cut the due chunks of a node into new leaves, region by region."""
    layout = due.layout
    if layout is None:
        return
    outside = heap.outside(due.node_id)
    none = np.empty((0, len(layout.cell)), np.int64)
    first = none if merge is None else merge.cells_at(due.rows)
    held = [(part.box, part.count) for part, _ in due.leaves] + outside.held
    for region in batches(held, BATCH_ROWS, layout.cell):
        near = [leaf for leaf in index.placed_in(due.node_id, region) if due.replaces(leaf)]
        cells = {tuple(at) for at in (_inside(first, region) // layout.cell).tolist()}
        if not near and not cells:
            continue
        there = _coords_there(context, heap, due.node_id, near, region)
        pending = outside.coords(region)
        coords = _joined(there, _in_cells(pending, layout, cells))
        while len(coords):
            cuts = due.of(near).cut(coords, index)
            # Inside a leaf, a reader ignores everything older than the leaf.
            whole = merge is not None and merge.whole
            inside = () if whole else (_inside(pending, cut.box) for cut in cuts)
            more = _joined(coords, *inside)
            if len(more) == len(coords):
                yield from (Part(due.node_id, cut.box, len(cut.rows)) for cut in cuts)
                break
            coords = more


def _coords_there(
    context: ReadContext, heap: Heap, node_id: bytes, near: Sequence[PlacedLeaf], region: Box
) -> IndexArray:
    """The chunks in the region that leaves have once pending changes are merged; in C order."""
    boxes = [leaf.part.box.shared(region) for leaf in near]
    stacks = heap.within(node_id, boxes, kinds_only=True)
    found = [np.empty((0, region.ndim), np.int64)]
    for leaf, box, stack in zip(near, boxes, stacks, strict=True):
        is_full = leaf.part.count == leaf.part.box.size
        if is_full and not stack.removes(leaf.merged):  # the usual case of an overwrite
            found.append(box.unravel(np.arange(box.size)))
            continue
        table = fold(
            [bare(within(_leaf_table(context, heap, leaf), box))], stack.after(leaf.merged)
        )
        found += [] if table is None else [table.coords()]
    return _joined(*found)


def _joined(*coords: IndexArray) -> IndexArray:
    """All of these coordinates in C order, each once."""
    some = [one for one in coords if len(one)]
    if len(some) < 2:
        return some[0] if some else coords[0]
    box = Box.around(Box.around_coords(one) for one in some)
    linear = np.concatenate([box.ravel(one) for one in some])
    linear.sort(kind="stable")  # fast, since it consists of few ascending runs
    return box.unravel(linear[np.append(True, linear[1:] > linear[:-1])])


def _inside(coords: IndexArray, box: Box) -> IndexArray:
    return coords[((coords >= box.lo) & (coords < box.hi)).all(axis=1)]


def _in_cells(coords: IndexArray, layout: Layout, cells: Collection[Coords]) -> IndexArray:
    """The coordinates in these cells, which are counted along each axis."""
    chosen = np.zeros(len(coords), np.bool_)
    for rows in layout.groups(coords) if cells else ():
        chosen[rows] = tuple((coords[rows[0]] // layout.cell).tolist()) in cells
    return coords if chosen.all() else coords[chosen]


def _leaf_table(context: ReadContext, heap: Heap, leaf: PlacedLeaf) -> ChunkTable:
    """The table of a leaf of the base."""
    part, blob = leaf.part, leaf.manifest.blob

    def decode() -> ChunkTable:
        for held, data in context.objects.load(blob, Manifest).parts:
            if held == part:
                return Manifest.decode(held, data)
        raise CorruptObjectError(f"{blob.key} has no chunk tables such as the snapshot says it has")

    return heap.recent.obtain((blob.key, part.node_id, leaf.manifest.parts.index(part)), decode)


# --- writing them ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Written:
    """The manifests of one step, and the leaves in them as `index_leaves` takes them."""

    manifests: list[ManifestRef]
    leaves: list[tuple[bytes, BlobRef, int, Bitmap]]
    copies: dict[str, bytes]
    """The small ones with coordinates, by key."""
    zones: dict[bytes, NewPages] = field(default_factory=dict)


class _Writer:
    """Writes planned manifests: merges, encodes and uploads some leaves at a time."""

    def __init__(
        self,
        context: Context,
        heap: Heap,
        index: BaseIndex,
        facts: NodeFacts,
        keys: SessionKeys,
        zones: LeafZones,
    ) -> None:
        self._context, self._heap, self._index = context, heap, index
        self._facts, self._keys, self._zones = facts, keys, zones

    def write(self, planned: Sequence[PlannedManifest]) -> _Written:
        """Write the manifests."""
        keys = [self._keys.next("manifests") for _ in planned]
        left = [len(one.leaves) for one in planned]
        made: list[dict[Part, _Leaf]] = [{} for _ in planned]
        done: dict[int, tuple[ManifestRef, list[_Leaf], bytes]] = {}
        paged: dict[bytes, NewPages] = {}
        for batch in self._batches(planned):
            for (number, leaf), encoded in zip(batch, self._encoded(batch), strict=True):
                made[number][leaf] = encoded
                left[number] -= 1
            full = [i for i in dict.fromkeys(number for number, _ in batch) if not left[i]]
            calls = []
            for i in full:
                leaves = [made[i].pop(leaf) for leaf in planned[i].leaves]
                calls.append(partial(self._upload, keys[i], leaves, planned[i].set_name))
            for i, (ref, leaves, copy) in zip(
                full, self._context.runtime.parallel(calls), strict=True
            ):
                named = ((one.part.node_id, ref.blob, one.part.box, one.zones) for one in leaves)
                before = self._zones.pages
                made_pages = write_pages(self._context, self._keys, named, before)
                for node_id, pages in made_pages.items():
                    paged.setdefault(node_id, NewPages(pages.meaning, pages.before)).add(pages)
                done[i] = ref, [replace(leaf, zones=[]) for leaf in leaves], copy
        ordered = [done[i] for i in range(len(planned))]
        return _Written(
            [ref for ref, _, _ in ordered],
            [
                (leaf.part.node_id, ref.blob, leaf.stored_bytes, leaf.bitmap)
                for ref, leaves, _ in ordered
                for leaf in leaves
            ],
            {ref.blob.key: copy for ref, _, copy in ordered if copy},
            paged,
        )

    def _batches(self, planned: Sequence[PlannedManifest]) -> Iterator[list[tuple[int, Part]]]:
        """The leaves, each with its manifest's number, a limited number of refs at a time.

        Neighbours come together, since they need the same tables.
        """
        order = sorted(range(len(planned)), key=lambda i: part_order(planned[i].leaves[0]))
        batch: list[tuple[int, Part]] = []
        refs = 0
        for number, leaf in ((i, leaf) for i in order for leaf in planned[i].leaves):
            if batch and refs + leaf.count > BATCH_ROWS:
                yield batch
                batch, refs = [], 0
            batch.append((number, leaf))
            refs += leaf.count
        if batch:
            yield batch

    def _encoded(self, batch: Sequence[tuple[int, Part]]) -> list[_Leaf]:
        """Merge and encode these leaves."""
        near = [self._index.placed_in(leaf.node_id, leaf.box) for _, leaf in batch]
        blobs = {old.manifest.blob.key: old.manifest.blob for some in near for old in some}
        self._context.objects.prefetch([(blob, Manifest) for blob in blobs.values()])
        by_node: dict[bytes, list[int]] = {}
        for i, (_, leaf) in enumerate(batch):
            by_node.setdefault(leaf.node_id, []).append(i)
        stacks: dict[int, Stack] = {}
        for node_id, numbers in by_node.items():
            found = self._heap.within(node_id, [batch[i][1].box for i in numbers])
            stacks.update(zip(numbers, found, strict=True))
        calls = []
        for i, (_, leaf) in enumerate(batch):
            tables = [_leaf_table(self._context, self._heap, old) for old in near[i]]
            inner = [within(table, leaf.box) for table in tables]
            calls.append(partial(self._encode, leaf, stacks.pop(i), near[i], inner))
        return self._context.runtime.parallel(calls)

    def _encode(
        self,
        leaf: Part,
        stack: Stack,
        near: Sequence[PlacedLeaf],
        tables: Sequence[ChunkTable],
    ) -> _Leaf:
        """The leaf: what leaves of the base and the pending changes say of its box."""
        box = leaf.box
        if len(near) == 1 and near[0].part.box.shared_size(box) == box.size:
            table = fold(tables, stack.after(near[0].merged))
        else:
            leaves = [
                Leaf(old.part.box, held, stack.after(old.merged))
                for old, held in zip(near, tables, strict=True)
            ]
            table = fold_leaves(leaves, stack.after(0))
        assert table is not None
        assert len(table) == leaf.count  # as `_cut` counted them
        table = take(table, np.arange(len(table)), box)
        part, data = Manifest.of([(leaf.node_id, table)]).parts[0]
        zones = self._zones.of_leaf(self._heap.view.by_id[leaf.node_id], table)
        return _Leaf(part, data, int(table.length.sum()), Bitmap.of(table), zones)

    def _upload(
        self, key: str, leaves: Sequence[_Leaf], set_name: str
    ) -> tuple[ManifestRef, list[_Leaf], bytes]:
        """Write a manifest; return its pointer, the leaves without their data, and a copy."""
        manifest = Manifest(tuple((leaf.part, leaf.data) for leaf in leaves))
        data = manifest.encode()
        self._context.objects.create(key, data)
        merged_to = (self._heap.view.snapshot.sequence,) * len(leaves)
        ref = ManifestRef(BlobRef.to(key, data), manifest.directory(), merged_to, set_name)
        is_wanted = any(self._facts[leaf.part.node_id].is_coordinate for leaf in leaves)
        copy = data if is_wanted and len(data) <= _KEPT_BYTES else b""
        return ref, [replace(leaf, data=b"") for leaf in leaves], copy
