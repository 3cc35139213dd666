"""Merging pending changes into leaves of the base, packing these into manifests, writing the base.

Which leaves are due is estimated from the boxes and row counts in the read list, without fetching
anything: the refs of an entry are assumed to be spread evenly in their box. Refs outside all leaves
count for the leaves in the same cells of the array's layout; without such leaves they are due at
once.

The due leaves, and all other leaves of their manifests, are merged with pending changes in their
boxes, cut into new leaves, and packed into manifests. This happens in steps of some million refs;
after each step the base is complete. A full compaction rewrites each array in a single step.

Within a step, only about `BATCH_ROWS` refs are in memory. First, the coordinates of the chunks are
read, region by region: they show where the new leaves are and how many refs each has, which decides
how leaves are packed. Then leaves are merged, encoded and uploaded, one batch after the other. The
base itself is written whole if it is small, else the pages of it that have changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.compact.write_leaves import WriteLeaves, Written, leaf_tables
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import ObjectReader, Upload
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.pending import Heap
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.nodes import Base, LeafPage, Node, NodePage
from zarr_manifests.format.records import with_copies
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.at_open import coordinate_ids
from zarr_manifests.planning.layout import pages
from zarr_manifests.planning.layout.closure import ArrayChange, Closure, Due, close
from zarr_manifests.planning.layout.leaves import (
    BaseIndex,
    Layout,
    NodeFacts,
    PlacedLeaf,
    batches,
    layout_around,
    layout_of,
)
from zarr_manifests.planning.layout.packing import plan_manifests
from zarr_manifests.planning.tables.live_deltas import Stack
from zarr_manifests.planning.tables.merge import (
    bare,
    fold,
    within,
)
from zarr_manifests.planning.upkeep.compaction_triggers import overlap_refs

STEP_REFS = 4_000_000
_ALL_REFS: Final = 1 << 62
_BASE_COPY_BYTES: Final = 256 * 1024
_PAGE_COPY_BYTES: Final = 8 * 1024


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


def repack(
    context: Context,
    heap: Heap,
    base: BaseIndex,
    facts: NodeFacts,
    merges: Mapping[bytes, NodeMerge],
    ratio: float,
    write: WriteLeaves,
    *,
    everything: bool,
    in_steps: bool,
) -> Written:
    """Rewrite the leaves of the changed chunks, with all that is pending in them.

    `in_steps` says that steps must be small, since this process has in memory what they write.
    """
    config = context.config.chunk_manifests
    gone = {part.node_id for ref in base for part in ref.parts if part.node_id not in facts}
    deleted = gone if everything else _mostly_dead(base, gone, ratio)
    changes = {node_id: merge.change for node_id, merge in merges.items()}
    closure = close(config, facts, base, changes, deleted, reopen=True)
    result = Written(tuple(base))
    most = STEP_REFS if in_steps else _ALL_REFS
    for step in _steps(closure, base, most, whole_arrays=everything):
        index = BaseIndex(result.manifests)
        leaves = [
            leaf
            for due in step.dues(index)
            if due.node_id in facts
            for leaf in _cut(context, heap, index, due, merges.get(due.node_id))
        ]
        plan = plan_manifests(config, facts, leaves, index, step.manifests)
        written = write(index, plan.manifests)
        result.add(written)
        kept = [ref for ref in result.manifests if ref.blob.key not in set(step.manifests)]
        result.manifests = (*kept, *written.manifests)
        result.refs += sum(leaf.count for leaf in leaves)
    return result


def _mostly_dead(base: BaseIndex, gone: set[bytes], ratio: float) -> set[bytes]:
    """Deleted nodes that take up enough of a manifest for it to be rewritten."""
    found: set[bytes] = set()
    for ref in base:
        dead = [part for part in ref.parts if part.node_id in gone]
        if dead and sum(p.count for p in dead) >= ratio * sum(p.count for p in ref.parts):
            found |= {part.node_id for part in dead}
    return found


def _steps(
    closure: Closure, base: BaseIndex, most: int, *, whole_arrays: bool
) -> Iterator[Closure]:
    """Split the closure into parts of about `most` refs.

    With `whole_arrays`, all leaves of an array are in one part, so that it can be split anew.
    """
    rest = closure.with_whole_arrays(base) if whole_arrays else closure
    while rest:
        step, rest = rest.step(most)
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
    for region in batches(held, heap.rows, layout.cell):
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
    due = list[tuple[PlacedLeaf, Box, Stack]]()
    for leaf, box, stack in zip(near, boxes, stacks, strict=True):
        is_full = leaf.part.count == leaf.part.box.size
        if is_full and not stack.removes(leaf.merged):  # the usual case of an overwrite
            found.append(box.unravel(np.arange(box.size)))
        else:
            due.append((leaf, box, stack))
    held = leaf_tables(context, heap, [leaf for leaf, _, _ in due])
    for (leaf, box, stack), inner in zip(due, held, strict=True):
        table = fold([bare(within(inner, box))], stack.after(leaf.merged))
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


# --- writing the base -----------------------------------------------------------------------------


def encoded_base(
    objects: ObjectReader,
    view: SnapshotView,
    whole: Base,
    keys: SessionKeys,
    known: Mapping[str, bytes],
) -> tuple[Upload, list[Upload]]:
    """Return the base that replaces the view's, and its new pages; pages that stay are linked.

    Parameters
    ----------
    objects : ObjectReader
        Remembers what is written.
    view : SnapshotView
        The snapshot that is compacted.
    whole : Base
        The new base, without pages.
    keys : SessionKeys
        Names the new objects.
    known : mapping of str to bytes
        New small manifests, by key.
    """
    old = () if view.pages is None else view.pages.linked_pages()
    old_leaves = () if view.pages is None else view.pages.linked_leaf_pages()
    copies = partial(_with_copies, known=known, budget_bytes=_PAGE_COPY_BYTES)
    inline, nodes, leaves = pages.plan_pages(whole, old, old_leaves, pages.LIMITS, copies)
    uploads: list[Upload] = []

    def written(page: Base, data: bytes) -> Upload:
        uploads.append(Upload(keys.next("nodes"), data))
        objects.remember(uploads[-1].ref, page)
        return uploads[-1]

    paths = {node.path for node in whole.nodes}
    linked = []
    for one in nodes:
        blob = one.kept.blob if one.kept else written(one.page, one.data).ref
        orphans = pages.orphans(one.page, paths)
        linked.append(NodePage.to(blob, one.page, orphans=orphans))
    leaf_pages = [
        other.kept or LeafPage.to(written(other.page, other.data).ref, other.page)
        for other in leaves
    ]
    inline = replace(
        inline,
        manifests=_with_copies(inline.nodes, inline.manifests, known, _BASE_COPY_BYTES),
        pages=tuple(linked),
        leaf_pages=tuple(leaf_pages),
    )
    base = Upload(keys.next("nodes"), inline.encode())
    objects.remember(base.ref, inline)
    return base, uploads


def _with_copies(
    nodes: Sequence[Node],
    manifests: Sequence[ManifestRef],
    known: Mapping[str, bytes],
    budget_bytes: int,
) -> tuple[ManifestRef, ...]:
    """The directory with copies of small manifests of coordinates, up to a total size."""
    held = {part.node_id for manifest in manifests for part in manifest.parts}
    coordinates = coordinate_ids(nodes, held)
    wanted = [
        i
        for i in sorted(range(len(manifests)), key=lambda i: manifests[i].blob.length)
        if any(part.node_id in coordinates for part in manifests[i].parts)
    ]
    copies = with_copies([manifests[i].blob for i in wanted], known, budget_bytes)
    out = [replace(manifest, blob=manifest.blob.bare()) for manifest in manifests]
    for i, blob in zip(wanted, copies, strict=True):
        out[i] = replace(out[i], blob=blob)
    return tuple(out)
