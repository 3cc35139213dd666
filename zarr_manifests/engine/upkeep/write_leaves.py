"""Merging pending changes into leaves of the base, packing these into manifests, writing the base.

What is due is estimated from the boxes and row counts in the read list, without fetching anything:
the refs of an entry are assumed to be spread evenly in their box. Refs of an array that are outside
all leaves are merged together: they are due if they are many beside what has to be rewritten with
them, the leaves in the same cells of the array's layout. Without such leaves they are due at once.

The due leaves, and all other leaves of their manifests, are merged with pending changes in their
boxes, cut into new leaves, and packed into manifests.

Only about `BATCH_ROWS` refs are in memory. First, the coordinates of the chunks are
read, region by region: they show where the new leaves are and how many refs each has, which decides
how leaves are packed. Then leaves are merged, encoded and uploaded, one batch after the other. The
base itself is written whole if it is small, else the pages of it that have changed.

Writing planned manifests: their leaves are merged, encoded and uploaded, some at a time
----------------------------------------------------------------------------------------

`LeavesHere` does it in this process, `task_elsewhere` in others: each task gets some of the planned
manifests, and opens the snapshot itself. It returns pointers, never refs. Invariants: a task writes
only new objects, under keys of its own, so a task that runs twice leaves garbage and changes
nothing; a manifest is written by one task.

Chunks in no leaf's box are determined once, region by region; only their indexes are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby, islice
from operator import attrgetter, gt
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.config.manifest_sets import ChunkManifests
from zarr_manifests.engine.change_set import ForkState
from zarr_manifests.engine.objects import ObjectReader, SessionKeys, Upload
from zarr_manifests.engine.overlay import SessionView, freeze_reader, revive_reader
from zarr_manifests.engine.view import Context, SnapshotView
from zarr_manifests.engine.zones import KnownZones, write_pages
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.manifest import (
    Base,
    LeafPage,
    Manifest,
    ManifestRef,
    Node,
    NodePage,
    Part,
)
from zarr_manifests.format.records import BlobRef, with_copies
from zarr_manifests.format.zone_maps import ZonePages, ZoneTable
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.planning import packing
from zarr_manifests.planning.garbage import PackMoves, coordinate_ids, parts
from zarr_manifests.planning.leaves import Layout, NodeFacts, batches, cut, layout_around, layout_of
from zarr_manifests.planning.meaning import zones_of_chunks
from zarr_manifests.planning.merge import pick, split, take, unset_at, within
from zarr_manifests.planning.packing import PlannedManifest, close, plan_manifests
from zarr_manifests.planning.tables import BaseIndex, PlacedLeaf, part_order
from zarr_manifests.progress import expect, tell
from zarr_manifests.runtime import SYSTEM, Run

BATCH_ROWS: Final = 1_000_000
"""Rows that are worked on at a time, about."""
ROW_BYTES: Final = 56
"""A row of which no column is constant."""
_PIECE_ROWS: Final = 250_000
"""Rows whose coordinates are in memory at once: these take several times as much as the rows."""


# --- writing leaves -----------------------------------------------------------------------------


_KEPT_BYTES: Final = 256 * 1024


class Written(Struct):
    """Manifests of the base that were written, in order, and what belongs to them.

    Parameters
    ----------
    manifests : list of ManifestRef
        Pointers to them.
    copies : dict of str to bytes
        The small ones with coordinates, by key.
    zones : list of (bytes, ZonePages)
        Pages of zone maps of the leaves, each with its node; written.
    """

    manifests: list[ManifestRef] = []
    copies: dict[str, bytes] = {}
    zones: list[tuple[bytes, ZonePages]] = []

    def add(self, more: Written) -> None:
        """Add the manifests that come next."""
        self.manifests += more.manifests
        self.copies |= more.copies
        self.zones += more.zones


type WriteLeaves = Callable[[Sequence[PlannedManifest]], Written]
"""Writes manifests, whose leaves replace some of the base."""


def write_all(planned: Sequence[PlannedManifest], run: Run, task: WriteLeaves) -> Written:
    """Write manifests, about `BATCH_ROWS` refs in a task; `progress` is told how many refs."""
    result, jobs, refs = Written(), [*parts(planned, attrgetter("refs"), BATCH_ROWS)], 0
    for job, done in zip(jobs, run(task, jobs), strict=True):
        refs += sum(one.refs for one in job)
        tell("merging refs", refs)
        result.add(done)
    expect("merging refs", refs)  # it was told more, since the same chunk may have several
    tell("merging refs", refs)
    return result


def task_elsewhere(
    context: Context, view: SnapshotView, keys: SessionKeys, index: BlobRef | None
) -> WriteLeaves:
    """Writes manifests in another process."""
    state = freeze_reader(SessionView(context, view))
    return partial(_write, replace(state, start=keys.start, lineage=keys.lineage), index)


def _write(state: ForkState, index: BlobRef | None, planned: Sequence[PlannedManifest]) -> Written:
    """Write these manifests, and everything that belongs to them, in another process.

    `state` is what it reads, and says under whose name it writes.
    """
    contents = revive_reader(state)
    context, view = contents.context, contents.view
    assert isinstance(context, Context)  # as revived
    keys = SessionKeys(state.start, SYSTEM, state.lineage)
    zones = KnownZones.of(context, view.snapshot.deltas, index)
    return LeavesHere(context, view.passing(BATCH_ROWS * ROW_BYTES), keys, zones).write(planned)


class _Leaf(Struct, frozen=True):
    """A leaf that is encoded, and its data for the index."""

    part: Part
    data: bytes
    stored_bytes: int
    zones: ZoneTable | None


class LeavesHere(Struct, frozen=True):
    """Writes manifests in this process: merges, encodes and uploads some leaves at a time."""

    context: Context
    view: SnapshotView
    keys: SessionKeys
    zones: KnownZones
    moves: PackMoves | None = None

    def write(self, planned: Sequence[PlannedManifest]) -> Written:
        """Write the manifests."""
        leaves, calls, made = (leaf for one in planned for leaf in one.leaves), [], []
        batches = parts(leaves, attrgetter("count"), BATCH_ROWS)
        encoded = chain.from_iterable(map(self._encoded, batches))
        for one in planned:
            made.append([*islice(encoded, len(one.leaves))])
            key = self.keys.next("manifests")
            calls.append(partial(self._upload, key, made[-1], one.set_name))
        result = Written()
        for some, (ref, copy) in zip(made, self.context.runtime.parallel(calls), strict=True):
            own = [
                (one.part.node_id, ref.blob.key, one.zones) for one in some if one.zones is not None
            ]
            zones = write_pages(self.context, self.keys, own)
            result.add(Written([ref], {ref.blob.key: copy} if copy else {}, zones))
        return result

    def _encoded(self, batch: Sequence[Part]) -> list[_Leaf]:
        """Merge and encode these leaves."""
        calls = []
        for node_id, leaves in groupby(batch, lambda leaf: leaf.node_id):
            some = [*leaves]
            tables = self.view.chunks_in_each(node_id, [leaf.box for leaf in some])
            calls += [partial(self._encode, *each) for each in zip(some, tables, strict=True)]
        return self.context.runtime.parallel(calls)

    def _encode(self, leaf: Part, table: ChunkTable | None) -> _Leaf:
        """The leaf with these chunks."""
        assert table is not None
        assert len(table) == leaf.count  # as `_cut` counted them
        table = take(table, np.arange(len(table)), leaf.box)
        zones = self.zones.counting(self.view.by_id[leaf.node_id], table)
        if self.moves:
            table = self.moves.moved(table)
            if zones is not None:
                chunks = pick(table, zones.coords())
                zones = zones_of_chunks(zones.meaning, chunks, zones.bounds)
        part, data = Manifest.of([(leaf.node_id, table)]).parts[0]
        return _Leaf(part, data, int(table.length.sum()), zones)

    def _upload(
        self, key: str, leaves: Sequence[_Leaf], set_name: str
    ) -> tuple[ManifestRef, bytes]:
        """Write a manifest; return its pointer, and a copy if it is to be at hand."""
        manifest = Manifest(tuple((leaf.part, leaf.data) for leaf in leaves))
        data, where = manifest.encode()
        self.context.objects.create(key, data)
        merged_to = (self.view.snapshot.sequence,) * len(leaves)
        blob = BlobRef.to(key, data)
        nbytes = tuple(leaf.stored_bytes for leaf in leaves)
        ref = ManifestRef(blob, manifest.directory(), merged_to, set_name, nbytes=nbytes, **where)
        ids = {leaf.part.node_id for leaf in leaves}
        is_wanted = coordinate_ids(self.view.among(ids), ids)
        copy = data if is_wanted and len(data) <= _KEPT_BYTES else b""
        return ref, copy


# --- merging changes into leaves ----------------------------------------------------------------


_BASE_COPY_BYTES: Final = 256 * 1024
_PAGE_COPY_BYTES: Final = 8 * 1024


class Unmerged(NamedTuple):
    """What a live delta changes in a leaf of the base that does not have it, or may in no leaf.

    Attributes
    ----------
    position : int
        The delta's position in the read list.
    node_id : bytes
        The node.
    leaf : PlacedLeaf or None
        The leaf; None for chunks outside of all leaves.
    refs : float
        How many refs it changes there, if they are spread evenly.
    box : Box
        Where they are.
    """

    position: int
    node_id: bytes
    leaf: PlacedLeaf | None
    refs: float
    box: Box


def unmerged(view: SnapshotView, base: BaseIndex, facts: NodeFacts) -> Iterator[Unmerged]:
    """Yield what live deltas have that leaves of a base have not, in the order of the read list."""
    for position, entry in enumerate(view.snapshot.deltas):
        for part in entry.parts():
            node_id, box, count = part.node_id, part.box, part.count
            if node_id not in facts or not count:  # the node was deleted
                continue
            left = box.size
            for leaf in base.placed_in(node_id, box):
                shared = box.shared_size(leaf.part.box)
                left -= shared
                if leaf.merged < entry.last:
                    yield Unmerged(position, node_id, leaf, count * shared / box.size, box)
            if left > 0:
                yield Unmerged(position, node_id, None, count * left / box.size, box)
        for node_id, cut_at in view.truncations(position).items():
            for leaf in base.placed(node_id) if node_id in facts else ():
                box, count = leaf.part.box, leaf.part.count
                lost = 1 - box.shared_size(Box((0,) * box.ndim, cut_at)) / box.size
                if any(map(gt, box.hi, cut_at)) and leaf.merged < entry.last:
                    yield Unmerged(position, node_id, leaf, count * lost, box)


class Due(Struct):
    """What is merged into the base.

    Parameters
    ----------
    manifests : set of str
        Keys of the manifests that are rewritten, with all that is pending in their leaves.
    outside : set of bytes
        The nodes whose pending chunks in no leaf are merged, too.
    left : set of bytes
        Those whose are not.
    """

    manifests: set[str] = set()
    outside: set[bytes] = set()
    left: set[bytes] = set()


def due_of(
    config: ChunkManifests, view: SnapshotView, base: BaseIndex, facts: NodeFacts, ratio: float
) -> Due:
    """Return what is due: where pending refs are at least this part of those to be rewritten.

    Counted per manifest, since all its leaves are rewritten together; those of deleted nodes count
    as pending. And per node for chunks in no leaf, with which the leaves in the same cells of the
    array's layout are rewritten.
    """
    pending, outside = defaultdict[str, float](float), defaultdict[bytes, float](float)
    beside = defaultdict[bytes, set[str]](set)
    for ref in base:
        pending[ref.blob.key] += sum(p.count for p in ref.parts if p.node_id not in facts)
    for _, node_id, leaf, refs, box in unmerged(view, base, facts):
        if leaf is not None:
            pending[leaf.key] += refs
        else:
            outside[node_id] += refs
            area = layout_of(config, facts[node_id]).around(box.lo, box.hi)
            beside[node_id] |= {near.key for near in base.overlapping(node_id, *area)}

    def missing(key: str) -> float:
        return ratio * sum(part.count for part in base[key].parts) - pending[key]

    manifests = {key for key, refs in pending.items() if refs and missing(key) <= 0}
    shared = defaultdict[str, float](float)
    for node_id, keys in beside.items():
        for key in keys:
            shared[key] += outside[node_id] / len(keys)
    due = {*manifests, *(key for key, refs in shared.items() if refs >= missing(key))}
    merged = {node_id for node_id in outside if beside[node_id] <= due}
    return Due(manifests, merged, outside.keys() - merged)


def plan_leaves(
    config: ChunkManifests,
    view: SnapshotView,
    base: BaseIndex,
    facts: NodeFacts,
    due: Due,
    rows: int,
) -> tuple[list[PlannedManifest], list[ManifestRef]]:
    """Plan how what is due, and what has to be with it, is merged with all that is pending there.

    Returns the manifests to write, and those of the base that stay. About so many `rows` are in
    memory at a time.
    """
    changed, layouts = {*due.manifests}, dict[bytes, Layout]()
    outside = {node_id: [*_outside(view, base, node_id, rows)] for node_id in due.outside}
    for node_id, tables in outside.items():
        boxes = [table.box for table in tables]
        layouts[node_id] = layout = layout_around(config, facts[node_id], base, boxes)
        for coords in (table.coords() for table in tables if base.placed(node_id)):
            for cell in layout.groups(coords):
                one = tuple(coords[cell[0]].tolist())
                near = base.overlapping(node_id, *layout.around(one, one))
                changed |= {leaf.key for leaf in near}
    replaced = close(config, facts, base, changed, due.outside, layouts)
    leaves = list[Part]()
    for node_id, layout in sorted(layouts.items()):
        old = [leaf for leaf in base.placed(node_id) if leaf.key in replaced]
        new, apart = outside.get(node_id, []), node_id in due.left
        leaves += _cut(view, base, node_id, layout, old, new, rows, apart=apart)
    planned = plan_manifests(config, facts, leaves, base, replaced)
    # Neighbours come together, since they need the same tables.
    inorder = sorted(planned, key=lambda one: part_order(one.leaves[0]))
    return inorder, [ref for ref in base if ref.blob.key not in replaced]


# --- where the new leaves are ---------------------------------------------------------------------


def _outside(
    view: SnapshotView, base: BaseIndex, node_id: bytes, rows: int
) -> Iterator[ChunkTable]:
    """The node's pending chunks in no leaf: tables without refs, region by region in C order."""
    held = [(part.box, part.count) for part in view.live_parts(node_id) if part.count]
    for region in batches(held, rows):
        leaves = base.placed_in(node_id, region)
        if sum(leaf.part.box.shared_size(region) for leaf in leaves) >= region.size:
            continue
        (table,) = view.chunks_in_each(node_id, [region], {leaf.part.box for leaf in leaves})
        for part in () if table is None else split(table, _PIECE_ROWS):
            coords = part.coords()
            outside = base.merged_at(node_id, coords) < 0
            if outside.any():
                yield unset_at(coords if outside.all() else coords[outside])


def _cut(
    view: SnapshotView,
    base: BaseIndex,
    node_id: bytes,
    layout: Layout,
    old: Sequence[PlacedLeaf],
    outside: Sequence[ChunkTable],
    rows: int,
    *,
    apart: bool,
) -> Iterator[Part]:
    """Cut the chunks of old leaves, and those outside, into new leaves, region by region.

    With `apart`, each old leaf by itself: between them may be chunks that are not merged.
    """
    held = [(leaf.part.box, leaf.part.count) for leaf in old]
    held += [(table.box, len(table)) for table in outside]
    gone = {leaf.part.box for leaf in old}
    for region in batches(held, rows, layout.cell):
        near = base.placed_in(node_id, region)
        staying = [leaf.part.box for leaf in near if leaf.part.box not in gone]
        there = [leaf for leaf in near if leaf.part.box in gone]
        found = _coords_there(view, node_id, there, region)
        over = (table for table in outside if table.box.overlaps(region))
        found += [within(table, region).coords() for table in over]
        for coords in found if apart else _joined(found):
            yield from cut(node_id, coords, layout, staying)


def _coords_there(
    view: SnapshotView, node_id: bytes, near: Sequence[PlacedLeaf], region: Box
) -> list[IndexArray]:
    """The chunks in the region that each of these leaves will have, in C order."""
    if not near:
        return []
    changes = view.overlay(node_id, min(leaf.merged for leaf in near), region)
    unset = changes.table is not None and (changes.table.kind == RefKind.UNSET).any()
    found, due, removes = list[IndexArray](), list[Box](), unset or changes.truncated is not None
    for leaf in near:
        box = leaf.part.box.shared(region)
        if leaf.part.count == leaf.part.box.size and not removes:  # as with most overwrites
            found.append(box.unravel(np.arange(box.size)))
        else:
            due.append(box)
    tables = view.chunks_in_each(node_id, due)
    return found + [table.coords() for table in tables if table is not None]


def _joined(coords: Sequence[IndexArray]) -> list[IndexArray]:
    """All of these coordinates together, if there are any, in C order, each once."""
    some = [one for one in coords if len(one)]
    if len(some) < 2:
        return some
    box = Box.around(Box.around_coords(one) for one in some)
    linear = np.concatenate([box.ravel(one) for one in some])
    linear.sort(kind="stable")  # fast, since it consists of few ascending runs
    return [box.unravel(linear[np.append(True, linear[1:] > linear[:-1])])]


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
    links, old = view.pages.base.leaf_pages, view.pages.linked_pages()
    old_leaves = [*zip(links, view.pages.leaf_bases(links), strict=True)]
    copies = partial(_with_copies, known=known, budget_bytes=_PAGE_COPY_BYTES)
    inline, nodes, leaves = packing.plan_pages(whole, old, old_leaves, packing.LIMITS, copies)
    uploads: list[Upload] = []

    def written(page: Base, data: bytes) -> Upload:
        uploads.append(Upload(keys.next("nodes"), data))
        objects.remember(uploads[-1].ref, page)
        return uploads[-1]

    paths = {node.path for node in whole.nodes}
    linked = []
    for one in nodes:
        blob = one.kept.blob if one.kept else written(one.page, one.data).ref
        orphans = packing.orphans(one.page, paths)
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
