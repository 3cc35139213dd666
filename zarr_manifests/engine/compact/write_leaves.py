"""Writing planned manifests: their leaves are merged, encoded and uploaded, some at a time.

`LeavesHere` does it in this process, `write_in_tasks` in others: each task gets some of the planned
manifests, and opens the snapshot itself. It returns pointers, never refs. Invariants: a task writes
only new objects, under keys of its own, so a task that runs twice leaves garbage and changes
nothing; a manifest is written by one task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Final

import numpy as np

from zarr_manifests.engine.compact.zone_index import add_pages, write_pages
from zarr_manifests.engine.edit.change_set import ForkState
from zarr_manifests.engine.edit.forks import freeze_reader, revive_reader
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import tallied_reads
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.pending import BATCH_ROWS, Heap
from zarr_manifests.engine.snapshot.zones import KnownZones
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import Manifest, ManifestRef, Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.zone_maps import ZonePages, ZoneTable
from zarr_manifests.planning.at_open import coordinate_ids
from zarr_manifests.planning.layout.leaves import PlacedLeaf
from zarr_manifests.planning.layout.packing import PlannedManifest
from zarr_manifests.planning.tables.live_deltas import Stack
from zarr_manifests.planning.tables.merge import Leaf, fold, fold_leaves, take, within
from zarr_manifests.planning.upkeep.garbage import parts
from zarr_manifests.runtime import SYSTEM, Run

_TASK_REFS: Final = 1_000_000
_KEPT_BYTES: Final = 256 * 1024
_REFS: Final = attrgetter("refs")


@dataclass(slots=True)
class Written:
    """Manifests of the base that were written, in order, and what belongs to them.

    Parameters
    ----------
    manifests : list of ManifestRef
        Pointers to them.
    copies : dict of str to bytes
        The small ones with coordinates, by key.
    zones : dict of bytes to ZonePages
        Pages of zone maps of the leaves, by node; written.
    bytes_read : int
        Bytes that other processes have read for that.
    """

    manifests: list[ManifestRef] = field(default_factory=list)
    copies: dict[str, bytes] = field(default_factory=dict)
    zones: dict[bytes, ZonePages] = field(default_factory=dict)
    bytes_read: int = 0

    def add(self, more: Written) -> None:
        """Add the manifests that come next."""
        self.manifests += more.manifests
        self.copies |= more.copies
        self.bytes_read += more.bytes_read
        for node_id, pages in more.zones.items():
            add_pages(self.zones, node_id, pages)


type WriteLeaves = Callable[[Sequence[PlannedManifest]], Written]
"""Writes manifests, whose leaves replace some of the base."""


def write_in_tasks(
    context: Context,
    heap: Heap,
    keys: SessionKeys,
    index: BlobRef | None,
    run: Run,
    tell: Callable[[int], None],
) -> WriteLeaves:
    """Writes manifests in other processes, about `_TASK_REFS` refs in a task."""
    state = freeze_reader(SessionView(context, heap.view))
    task = _LeafTask(replace(state, start=keys.start, lineage=keys.lineage), index)

    def write(planned: Sequence[PlannedManifest]) -> Written:
        jobs = [*parts(planned, _REFS, _TASK_REFS)]
        result = Written()
        for job, done in zip(jobs, run(task.write, jobs), strict=True):
            tell(sum(map(_REFS, job)))
            result.add(done)
        return result

    return write


@dataclass(frozen=True, slots=True)
class _LeafTask:
    """What tasks read, and under whose name they write; can be pickled."""

    state: ForkState
    index: BlobRef | None

    def write(self, planned: Sequence[PlannedManifest]) -> Written:
        """Write these manifests, and everything that belongs to them."""
        contents = revive_reader(self.state)
        context, view = contents.context, contents.view
        assert isinstance(context, Context)  # as revived
        keys = SessionKeys(self.state.start, SYSTEM, self.state.lineage)
        with tallied_reads() as read:
            zones = KnownZones.of(context, view.snapshot.deltas, self.index)
            heap = Heap(view, view.index, (), context.meter)
            written = LeavesHere(context, heap, keys, zones).write(planned)
        written.bytes_read = sum(read)
        return written


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf that is encoded, and its data for the index."""

    part: Part
    data: bytes
    stored_bytes: int
    zones: ZoneTable | None


class LeavesHere:
    """Writes manifests in this process: merges, encodes and uploads some leaves at a time."""

    def __init__(
        self,
        context: Context,
        heap: Heap,
        keys: SessionKeys,
        zones: KnownZones,
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._context, self._heap, self._keys = context, heap, keys
        self._zones, self._tell = zones, tell

    def write(self, planned: Sequence[PlannedManifest]) -> Written:
        """Write the manifests."""
        leaves = [(number, leaf) for number, one in enumerate(planned) for leaf in one.leaves]
        made: dict[int, list[_Leaf]] = {}
        result = Written()
        for batch in parts(leaves, lambda one: one[1].count, BATCH_ROWS):
            encoded = self._encoded([leaf for _, leaf in batch])
            for (number, _), one in zip(batch, encoded, strict=True):
                made.setdefault(number, []).append(one)
            full = [i for i, some in made.items() if len(some) == len(planned[i].leaves)]
            calls = [
                partial(self._upload, self._keys.next("manifests"), made[i], planned[i].set_name)
                for i in full
            ]
            for i, (ref, copy) in zip(full, self._context.runtime.parallel(calls), strict=True):
                own = [
                    (one.part.node_id, ref.blob, one.zones, len(one.zones) == one.part.count)
                    for one in made.pop(i)
                    if one.zones is not None
                ]
                zones = write_pages(self._context, self._keys, own)
                copies = {ref.blob.key: copy} if copy else {}
                result.add(Written([ref], copies, zones))
            self._tell(sum(leaf.count for _, leaf in batch))
        return result

    def _encoded(self, batch: Sequence[Part]) -> list[_Leaf]:
        """Merge and encode these leaves."""
        near = [self._heap.base.placed_in(leaf.node_id, leaf.box) for leaf in batch]
        stacks: list[Stack] = []
        for node_id, leaves in groupby(batch, lambda leaf: leaf.node_id):
            stacks += self._heap.within(node_id, [leaf.box for leaf in leaves])
        tables = leaf_tables(self._context, self._heap, [old for some in near for old in some])
        calls = []
        for leaf, stack, some in zip(batch, stacks, near, strict=True):
            inner = [within(next(tables), leaf.box) for _ in some]
            calls.append(partial(self._encode, leaf, stack, some, inner))
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
        zones = self._zones.counting(self._heap.view.by_id[leaf.node_id], table)
        return _Leaf(part, data, int(table.length.sum()), zones)

    def _upload(
        self, key: str, leaves: Sequence[_Leaf], set_name: str
    ) -> tuple[ManifestRef, bytes]:
        """Write a manifest; return its pointer, and a copy if it is to be at hand."""
        manifest = Manifest(tuple((leaf.part, leaf.data) for leaf in leaves))
        data, places = manifest.encode()
        self._context.objects.create(key, data)
        merged_to = (self._heap.view.snapshot.sequence,) * len(leaves)
        blob = BlobRef.to(key, data)
        nbytes = tuple(leaf.stored_bytes for leaf in leaves)
        ref = ManifestRef(blob, manifest.directory(), merged_to, set_name, places, nbytes)
        ids = {leaf.part.node_id for leaf in leaves}
        is_wanted = coordinate_ids(self._heap.view.among(ids), ids)
        copy = data if is_wanted and len(data) <= _KEPT_BYTES else b""
        return ref, copy


def leaf_tables(
    context: ReadContext, heap: Heap, leaves: Sequence[PlacedLeaf]
) -> Iterator[ChunkTable]:
    """The tables of leaves of the base, read in one round and decoded one by one."""
    names = [(leaf.manifest.blob.key, leaf.part) for leaf in leaves]
    held = [heap.recent.find(name) for name in names]
    missing = [leaf for leaf, table in zip(leaves, held, strict=True) if table is None]
    loaded = context.objects.load_all([(leaf.manifest, leaf.part) for leaf in missing])
    for leaf, name, table in zip(leaves, names, held, strict=True):
        decode = partial(context.objects.table, leaf.manifest, leaf.part, loaded, keep=False)
        yield heap.recent.obtain(name, decode) if table is None else table
