"""Merging pending changes into leaves of the base, and packing the leaves into manifests.

Which leaves are due is estimated from the boxes and row counts in the read list, without fetching
anything: the refs of an entry are assumed to be spread evenly in their box. Refs outside all leaves
count for the leaves in the same cells of the array's layout; without such leaves they are due at
once.

The due leaves, and all other leaves of their manifests, are merged with pending changes in their
boxes, cut into new leaves, encoded in parallel, and packed into manifests. This happens in steps,
so that besides pending changes only about `STEP_REFS` refs are in memory. After each step the base
is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.compact.presence_index import index_leaves
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.pending import Heap
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.index import Bitmap, IndexEntry
from zarr_manifests.format.manifest import Manifest, ManifestRef, Part
from zarr_manifests.format.stretches import TableData
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.layout.closure import ArrayChange, Closure, Due, close
from zarr_manifests.planning.layout.leaves import BaseIndex, NodeFacts, part_order
from zarr_manifests.planning.layout.sets import plan_manifests
from zarr_manifests.planning.layout.splitting import Cut, Layout, layout_of
from zarr_manifests.planning.tables.merge import Layer, fold, merge_layers, take
from zarr_manifests.planning.upkeep.compaction_triggers import overlap_refs

__all__ = [
    "Pending",
    "Repacked",
    "due_changes",
    "due_manifests",
    "pending_of",
    "repack",
    "set_names",
]

STEP_REFS = 4_000_000
_ENCODED_ROWS: Final = 2_000_000


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


def due_changes(
    context: ReadContext,
    heap: Heap,
    base: BaseIndex,
    facts: NodeFacts,
    pending: Mapping[bytes, Pending],
    ratio: float,
    *,
    everything: bool,
) -> tuple[dict[bytes, ArrayChange], set[bytes]]:
    """Return the coordinates to merge, by node, and the nodes whose entries are needed for that.

    These are the chunks outside all leaves that belong to due leaves or to none, and one chunk in
    each due leaf.
    """
    config = context.config.chunk_manifests
    keys = {ref.blob.key for ref in base} if everything else due_manifests(base, pending, ratio)
    changes, read = {}, set()
    wanted = facts if everything else pending
    for node_id in wanted:
        mine = pending.get(node_id, Pending())
        due = {
            leaf.box
            for leaf, key in base.leaves(node_id)
            if key in keys and (everything or mine.of(leaf))
        }
        corners = np.array([box.lo for box in due], np.int64)
        coords = [corners.reshape(len(due), len(facts[node_id].grid_shape))]
        if mine.outside and (due or mine.new or everything):
            read.add(node_id)
            outside = heap.outside(node_id)
            layout = layout_of(config, facts[node_id])
            rows = _rows_due(outside.coords, layout, base, node_id, due)
            coords.insert(0, outside.choose(rows))
        together = [some for some in coords if len(some)]
        if together:
            one = together[0] if len(together) == 1 else np.concatenate(together)
            changes[node_id] = ArrayChange(one)
    return changes, read | changes.keys()


def _rows_due(
    coords: IndexArray, layout: Layout, base: BaseIndex, node_id: bytes, due: set[Box]
) -> IndexArray:
    """Which of the chunks outside all leaves belong to a due leaf, or to none."""
    if base.ndim(node_id) is None:
        return np.arange(len(coords))
    wanted = np.zeros(len(coords), np.bool_)
    for rows in layout.groups(coords):
        one = tuple(coords[rows[0]].tolist())
        near = base.overlapping(node_id, *layout.around(one, one))
        wanted[rows] = not near or any(leaf.box in due for leaf, _ in near)
    return np.flatnonzero(wanted)


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
    refs : int
        Number of refs written.
    bytes_written, manifests_written, manifests_replaced : int
        The cost of that.
    """

    manifests: tuple[ManifestRef, ...]
    uploads: dict[str, bytes] = field(default_factory=dict)
    entries: list[IndexEntry] = field(default_factory=list)
    bitmaps: list[Upload] = field(default_factory=list)
    refs: int = 0
    bytes_written: int = 0
    manifests_written: int = 0
    manifests_replaced: int = 0


_KEPT_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf to write, and its data for the index."""

    part: Part
    data: TableData
    stored_bytes: int
    bitmap: Bitmap


def set_names(manifests: Sequence[ManifestRef]) -> dict[str, str]:
    """The set that each manifest was packed for, by key."""
    return {ref.blob.key: ref.packed_for for ref in manifests if ref.packed_for}


def repack(
    context: Context,
    heap: Heap,
    base: BaseIndex,
    facts: NodeFacts,
    changes: Mapping[bytes, ArrayChange],
    keys: SessionKeys,
    ratio: float,
    *,
    everything: bool,
) -> Repacked:
    """Rewrite the leaves of the changed chunks, with all that is pending in them."""
    config = context.config.chunk_manifests
    gone = {part.node_id for ref in base for part in ref.parts if part.node_id not in facts}
    deleted = gone if everything else _mostly_dead(base, gone, ratio)
    closure = close(config, facts, base, changes, deleted, reopen=True)
    result = Repacked(tuple(base))
    for step in _steps(closure, base, whole_arrays=everything):
        index = BaseIndex(result.manifests, set_names(result.manifests))
        encoded: dict[tuple[bytes, Coords, Coords], _Leaf] = {}
        for due in step.dues(index):
            if due.node_id in facts:
                for leaf in _folded(context, heap, index, due):
                    encoded[part_order(leaf.part)] = leaf
        parts = [leaf.part for leaf in encoded.values()]
        plan = plan_manifests(config, facts, parts, index, step.manifests)
        calls = [
            partial(
                _write,
                context,
                keys.next("manifests"),
                [encoded[part_order(leaf)] for leaf in planned.leaves],
                planned.set_name,
                heap.view.snapshot.sequence,
            )
            for planned in plan.manifests
        ]
        written = context.runtime.parallel(calls)
        leaves = [
            (part.node_id, ref.blob, leaf.stored_bytes, leaf.bitmap)
            for ref, _ in written
            for part in ref.parts
            for leaf in [encoded[part_order(part)]]
        ]
        bitmaps, entries = index_leaves(keys, leaves)
        result.entries += entries
        result.bitmaps += bitmaps
        kept = [ref for ref in result.manifests if ref.blob.key not in set(step.manifests)]
        result.manifests = (*kept, *(ref for ref, _ in written))
        result.uploads |= {ref.blob.key: copy for ref, copy in written if copy}
        result.refs += sum(part.count for part in parts)
        result.bytes_written += sum(ref.blob.length for ref, _ in written)
        result.manifests_written += len(written)
        result.manifests_replaced += len(step.manifests)
    return result


def _write(
    context: Context,
    key: str,
    leaves: Sequence[_Leaf],
    packed_for: str,
    sequence: int,
) -> tuple[ManifestRef, bytes]:
    """Write a manifest whose leaves are merged up to the sequence; return its bytes if small."""
    manifest = Manifest(tuple((leaf.part, leaf.data) for leaf in leaves))
    data = manifest.encode()
    context.objects.create(key, data)
    merged_to = (sequence,) * len(leaves)
    ref = ManifestRef(BlobRef.to(key, data), manifest.directory(), merged_to, packed_for)
    return ref, data if len(data) <= _KEPT_BYTES else b""


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


def _folded(context: ReadContext, heap: Heap, base: BaseIndex, due: Due) -> list[_Leaf]:
    """Merge and encode the due leaves of a node with all that is pending in their boxes.

    This includes every pending chunk that is in the box of a new leaf: inside it, a reader ignores
    everything older than the leaf.
    """
    tables = [*_leaves(context, heap, base, due)]
    if due.layout is not None:
        tables += heap.take(due.node_id, due.rows, due.layout)
    while tables:
        merged = merge_layers([Layer(None, tuple(tables))]).table
        assert merged is not None  # none of them is empty
        tables.clear()  # frees memory
        cuts = due.cut(merged.coords(), base)
        more = heap.take_within(due.node_id, [cut.box for cut in cuts])
        if not more:
            return _encoded(context, due.node_id, merged, cuts)
        tables = [merged, *more]
    return []


def _encoded(
    context: ReadContext, node_id: bytes, table: ChunkTable, cuts: Sequence[Cut]
) -> list[_Leaf]:
    """Encode the leaves that the table is cut into; only some in parallel, to limit memory."""

    def encode(cut: Cut) -> _Leaf:
        taken = take(table, cut.rows, cut.box)
        part, data = Manifest.of([(node_id, taken)]).parts[0]
        return _Leaf(part, data, int(taken.length.sum()), Bitmap.of(taken))

    done: list[_Leaf] = []
    calls: list[Callable[[], _Leaf]] = []
    rows = 0
    for cut in cuts:
        if calls and rows + len(cut.rows) > _ENCODED_ROWS:
            done += context.runtime.parallel(calls)
            calls, rows = [], 0
        calls.append(partial(encode, cut))
        rows += len(cut.rows)
    return done + context.runtime.parallel(calls)


def _leaves(context: ReadContext, heap: Heap, base: BaseIndex, due: Due) -> Iterator[ChunkTable]:
    """The due leaves, merged with what is pending in their boxes."""
    refs = {key: base[key] for _, key in due.leaves}
    context.objects.prefetch([(ref.blob, Manifest) for ref in refs.values()])
    for part, key in due.leaves:
        found = context.objects.load(refs[key].blob, Manifest).parts
        data = next((data for held, data in found if held == part), None)
        if data is None:
            raise CorruptObjectError(f"{key} has no chunk tables such as the snapshot says it has")
        pending = heap.over(due.node_id, part.box, refs[key].merged_to(part))
        folded = fold([Manifest.decode(part, data)], pending)
        if folded is not None:
            yield folded
