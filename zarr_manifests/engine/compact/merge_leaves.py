"""Merging pending changes into leaves of the base, packing these into manifests, writing the base.

Which leaves are due is estimated from the boxes and row counts in the read list, without fetching
anything: the refs of an entry are assumed to be spread evenly in their box. Refs outside all leaves
count for the leaves in the same cells of the array's layout; without such leaves they are due at
once.

The due leaves, and all other leaves of their manifests, are merged with pending changes in their
boxes, cut into new leaves, and packed into manifests.

Only about `BATCH_ROWS` refs are in memory. First, the coordinates of the chunks are
read, region by region: they show where the new leaves are and how many refs each has, which decides
how leaves are packed. Then leaves are merged, encoded and uploaded, one batch after the other. The
base itself is written whole if it is small, else the pages of it that have changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.compact.write_leaves import WriteLeaves, Written, leaf_tables
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import ObjectReader, Upload
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.pending import Heap, Outside
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.nodes import Base, LeafPage, Node, NodePage
from zarr_manifests.format.records import with_copies
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.at_open import coordinate_ids
from zarr_manifests.planning.layout import pages
from zarr_manifests.planning.layout.leaves import (
    BaseIndex,
    Layout,
    NodeFacts,
    PlacedLeaf,
    batches,
    cut,
    layout_around,
    layout_of,
    part_order,
)
from zarr_manifests.planning.layout.packing import close, plan_manifests, staying_beside
from zarr_manifests.planning.tables.live_deltas import Stack
from zarr_manifests.planning.tables.merge import (
    bare,
    fold,
    within,
)
from zarr_manifests.planning.upkeep.compaction_triggers import overlap_refs

_BASE_COPY_BYTES: Final = 256 * 1024
_PAGE_COPY_BYTES: Final = 8 * 1024


@dataclass(slots=True)
class Pending:
    """Estimated pending changes of one node.

    Parameters
    ----------
    leaves : dict of Box to float
        Pending refs by the leaf's box.
    new : float
        Pending refs in cells without a leaf.
    outside : bool
        Whether some may be outside all leaves.
    """

    leaves: defaultdict[Box, float] = field(default_factory=lambda: defaultdict(float))
    new: float = 0.0
    outside: bool = False


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
        for node_id, end in view.truncations(position).items():
            if node_id in facts:
                pending = found.setdefault(node_id, Pending())
                _count_cut(base, pending, node_id, end, entry.last)
    return found


def _count_part(
    context: ReadContext, base: BaseIndex, facts: NodeFacts, pending: Pending, part: Part, last: int
) -> None:
    covered = 0
    for leaf in base.placed_in(part.node_id, part.box):
        shared = part.box.shared_size(leaf.part.box)
        covered += shared
        if last > leaf.merged:
            pending.leaves[leaf.part.box] += overlap_refs(part.count, part.box.size, shared)
    if covered >= part.box.size:
        return
    pending.outside = True
    rest = overlap_refs(part.count, part.box.size, part.box.size - covered)
    layout = layout_of(context.config.chunk_manifests, facts[part.node_id])
    near = base.overlapping(part.node_id, *layout.around(part.box.lo, part.box.hi))
    held = sum(leaf.part.count for leaf in near)
    if not held:
        pending.new += rest
    for leaf in near:
        pending.leaves[leaf.part.box] += rest * leaf.part.count / held if held else rest


def _count_cut(base: BaseIndex, pending: Pending, node_id: bytes, end: Coords, last: int) -> None:
    for leaf in base.placed(node_id):
        box = leaf.part.box
        if last > leaf.merged:
            kept = box.shared_size(Box((0,) * len(end), end))
            if kept < box.size:
                pending.leaves[box] += leaf.part.count * (1 - kept / box.size)


def due_manifests(base: BaseIndex, pending: Mapping[bytes, Pending], ratio: float) -> set[str]:
    """Keys of the manifests with enough pending refs to be rewritten.

    Counted per manifest, since all its leaves are rewritten together.
    """
    sums = defaultdict[str, float](float)
    for node_id, mine in pending.items():
        for leaf in base.placed(node_id):
            sums[leaf.key] += mine.leaves[leaf.part.box]
    return {
        key
        for key, refs in sums.items()
        if refs and refs >= ratio * sum(part.count for part in base[key].parts)
    }


@dataclass(frozen=True, slots=True)
class NodeMerge:
    """What is merged of one node, beside what its leaves in repacked manifests have.

    Parameters
    ----------
    cells : int64[n, ndim]
        One chunk in each due cell with chunks outside all leaves, in C order.
    whole : bool
        Whether all chunks outside leaves are in due cells.
    layout : Layout
        How the array is split.
    """

    cells: IndexArray
    whole: bool
    layout: Layout


def due_changes(
    context: ReadContext,
    heap: Heap,
    facts: NodeFacts,
    pending: Mapping[bytes, Pending],
    due: Collection[str],
    *,
    everything: bool,
) -> dict[bytes, NodeMerge]:
    """Return what to merge, by node, where these manifests are due.

    Chunks outside all leaves are due if their cell of the array's layout has a due leaf, or none.
    """
    base, found = heap.base, dict[bytes, NodeMerge]()
    for node_id in facts if everything else pending:
        mine = pending.get(node_id, Pending())
        boxes = {
            leaf.part.box
            for leaf in base.placed(node_id)
            if leaf.key in due and (everything or mine.leaves[leaf.part.box])
        }
        reads = mine.outside and (boxes or mine.new or everything)
        if not (boxes or reads):
            continue
        outside = heap.outside(node_id) if reads else Outside()
        config = context.config.chunk_manifests
        layout = layout_around(config, facts[node_id], base, outside.box)
        first = outside.cells(layout)
        near = (base.overlapping(node_id, *layout.around(one, one)) for one in first)
        cells = [
            one
            for one, leaves in zip(first, near, strict=True)
            if not leaves or any(leaf.part.box in boxes for leaf in leaves)
        ]
        coords = np.array(cells, np.int64).reshape(len(cells), len(layout.cell))
        whole = bool(reads) and len(cells) == len(first)
        found[node_id] = NodeMerge(coords, whole, layout)
    return found


def repack(
    context: Context,
    heap: Heap,
    facts: NodeFacts,
    merges: Mapping[bytes, NodeMerge],
    due: Collection[str],
    ratio: float,
    write: WriteLeaves,
) -> tuple[Written, tuple[ManifestRef, ...]]:
    """Rewrite these manifests, and what has to be with them, with all that is pending in them.

    Returns what was written, and the manifests of the new base.
    """
    config, base = context.config.chunk_manifests, heap.base
    layouts = {node_id: merge.layout for node_id, merge in merges.items()}
    cells = {node_id: merge.cells for node_id, merge in merges.items() if len(merge.cells)}
    changed = {*due, *_mostly_dead(base, facts, ratio)}
    replaced = close(config, facts, base, changed, cells, layouts)
    leaves = [
        leaf
        for node_id in sorted(layouts)
        for leaf in _cut(context, heap, node_id, layouts[node_id], replaced, merges.get(node_id))
    ]
    planned = plan_manifests(config, facts, leaves, base, replaced)
    # Neighbours come together, since they need the same tables.
    written = write(sorted(planned, key=lambda one: part_order(one.leaves[0])))
    stay = (ref for ref in base if ref.blob.key not in replaced)
    return written, (*stay, *written.manifests)


def _mostly_dead(base: BaseIndex, facts: NodeFacts, ratio: float) -> Iterator[str]:
    """Keys of manifests of which deleted nodes take up enough for them to be rewritten."""
    for ref in base:
        dead = [part.count for part in ref.parts if part.node_id not in facts]
        if dead and sum(dead) >= ratio * sum(part.count for part in ref.parts):
            yield ref.blob.key


# --- where the new leaves are ---------------------------------------------------------------------


def _cut(
    context: ReadContext,
    heap: Heap,
    node_id: bytes,
    layout: Layout,
    replaced: Collection[str],
    merge: NodeMerge | None,
) -> Iterator[Part]:
    """Cut the due chunks of a node into new leaves, region by region."""
    base, outside = heap.base, heap.outside(node_id)
    first = np.empty((0, len(layout.cell)), np.int64) if merge is None else merge.cells
    old = [leaf for leaf in base.placed(node_id) if leaf.key in replaced]
    if not old and not len(first):
        return
    held = [(leaf.part.box, leaf.part.count) for leaf in old] + outside.held
    for region in batches(held, heap.rows, layout.cell):
        near = [leaf for leaf in base.placed_in(node_id, region) if leaf.key in replaced]
        cells = {tuple(at) for at in (_inside(first, region) // layout.cell).tolist()}
        if not near and not cells:
            continue
        there = _coords_there(context, heap, node_id, near, region)
        pending = outside.coords(region)
        coords = _joined(there, _in_cells(pending, layout, cells))
        boxes = [leaf.part.box for leaf in near]
        staying = staying_beside(base, node_id, layout, boxes, replaced)
        while len(coords):
            parts = cut(node_id, coords, layout, boxes, staying)
            # Inside a leaf, a reader ignores everything older than the leaf.
            whole = merge is not None and merge.whole
            inside = () if whole else (_inside(pending, part.box) for part in parts)
            more = _joined(coords, *inside)
            if len(more) == len(coords):
                yield from parts
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
