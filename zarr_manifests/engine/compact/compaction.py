"""Compaction: merging a branch's live deltas into runs and into the base.

1. Leaves of the base with enough pending changes are rewritten with these changes (`merge_leaves`),
   together with a new node table. Other manifests stay as they are, under the same keys.
2. The oldest entries of the read list that the base now covers are dropped. Neighbours among the
   others are merged into runs, as `planning.upkeep.compaction_triggers` decides.
3. The new read list is committed as a REWRITE. It changes no data, so it never conflicts: if the
   branch has moved, newer deltas stay on top, provided that the compacted entries are unchanged. If
   they are not, somebody else was faster and this compaction is dropped.

Invariant: an entry is dropped only together with all older ones. So reads are right even outside
the boxes of all leaves, where no record says what has been merged.

A run is one delta. For each chunk and node it has the newest entry's state, and for each node the
combined truncation. UNSET rows are kept, since the base may still have the chunk. Invariant:
applied to any older state, a run has the same effect as its entries one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.commit.carry_zones import upload_of
from zarr_manifests.engine.commit.landing import (
    NextVersion,
    encoded_delta,
    land,
    merged_pages,
    rewritten,
)
from zarr_manifests.engine.compact.merge_leaves import (
    NodeMerge,
    Pending,
    due_changes,
    due_manifests,
    encoded_base,
    pending_of,
    repack,
)
from zarr_manifests.engine.compact.presence_index import Presence, leaf_names, with_entries
from zarr_manifests.engine.compact.write_leaves import (
    LeavesHere,
    WriteLeaves,
    Written,
    write_in_tasks,
)
from zarr_manifests.engine.compact.zone_index import LeafZones, load_zones, paged_zones
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload, tallied_reads
from zarr_manifests.engine.root.epochs import claim_compaction, overtaken
from zarr_manifests.engine.root.roots import RootAt, opened
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.pending import BATCH_ROWS, Heap
from zarr_manifests.engine.snapshot.totals import counts_of_base, ref_counts, sums_after
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.engine.snapshot.zones import UNUSABLE
from zarr_manifests.errors import ConflictError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.delta import COMMIT_ID_BYTES, Delta
from zarr_manifests.format.manifest import Manifest, Part
from zarr_manifests.format.nodes import Base, Node, NodeKind
from zarr_manifests.format.root import COMPACTOR, Root
from zarr_manifests.format.snapshot import DeltaEntry, DigestEntry, Snapshot
from zarr_manifests.format.zone_maps import ZoneTable
from zarr_manifests.grid import Coords
from zarr_manifests.planning.conflict.admission import Refusal, Writer, admission
from zarr_manifests.planning.layout.leaves import BaseIndex, NodeFacts
from zarr_manifests.planning.layout.packing import LEAF_ROWS
from zarr_manifests.planning.tables.merge import Layer, merge_layers, split
from zarr_manifests.planning.tables.sums import merged_counts
from zarr_manifests.planning.upkeep.compaction_triggers import (
    CompactionMode,
    Size,
    merge_groups,
    opening_is_slow,
)
from zarr_manifests.planning.upkeep.digests import coordinate_ids
from zarr_manifests.planning.zones.entries import merged_by_node, taken, valid
from zarr_manifests.progress import expect, is_shown, tell
from zarr_manifests.reports import CompactionReport
from zarr_manifests.runtime import Run

_ATTEMPTS = 10
_PLANNED_ROWS: Final = BATCH_ROWS // 4
"""Rows whose coordinates are read at a time where tasks write leaves: a driver has little room."""


def compact_branch(
    context: Context,
    branch: str,
    mode: CompactionMode,
    *,
    dry_run: bool = False,
    size_ratio: float | None = None,
    claim: bool = False,
    run: Run | None = None,
) -> tuple[CompactionReport, BlobRef | None]:
    """Compact a branch's head; `size_ratio` overrides the configuration.

    With `claim`, running compactions are shut out first. With `run`, its tasks write the leaves.
    `progress` is told how many refs are merged.

    Raises
    ------
    FencedError
        If somebody else has claimed compactions in the meantime; nothing is changed.
    CorruptObjectError
        If something to merge is damaged; nothing is changed.
    """
    ratio = context.config.compaction.size_ratio if size_ratio is None else size_ratio
    with tallied_reads() as read:
        known = [claim_compaction(context.roots) if claim and not dry_run else context.roots.latest]

        def attempt() -> tuple[CompactionReport, BlobRef | None]:
            at = known.pop() if known else context.roots.read()
            return _compact(context, at, branch, mode, ratio, dry_run=dry_run, run=run)

        report, head = opened(attempt)
    return replace(report, bytes_read=report.bytes_read + sum(read)), head


def _compact(
    context: Context,
    at: RootAt,
    branch: str,
    mode: CompactionMode,
    ratio: float,
    *,
    dry_run: bool,
    run: Run | None,
) -> tuple[CompactionReport, BlobRef | None]:
    root = context.roots.with_branch(at.root, branch)
    tip = root.branches.get(branch)
    if tip is None:
        return CompactionReport(mode=mode, dry_run=dry_run), None
    view = context.open_branch(tip)
    entries = view.snapshot.deltas
    before = CompactionReport(
        mode=mode,
        dry_run=dry_run,
        deltas_before=len(entries),
        deltas_after=len(entries),
        manifests_before=len(view.manifests),
        manifests_after=len(view.manifests),
    )
    keys = SessionKeys(at.root.version, context.runtime)
    work = _Work(context, view, keys, mode, ratio, branch, root, run)
    if dry_run:
        return work.estimate(before), None
    if not work.do():
        return before, None
    what = f"compaction of {branch!r}", "start it again later"
    try:
        landed = land(context, branch, keys, view, work.make, work.uploads, what, _ATTEMPTS)
    except ConflictError:
        landed = None  # as if somebody else had compacted
    if landed is None:
        return before, None
    report = replace(
        before,
        deltas_after=len(work.entries),
        manifests_after=len(work.manifests),
        manifests_written=work.done.manifests_written,
        refs_merged=work.done.refs,
        bytes_written=work.done.bytes_written + sum(len(u.data) for u in work.written),
        bytes_read=work.done.bytes_read,
        snapshot_id=landed.snapshot.snapshot_id,
    )
    return report, landed.head


class _Work:
    """One compaction of one snapshot: a new base and read list, everything but its snapshot.

    Attributes
    ----------
    uploads : list of Upload
        What `do` has encoded, to be written before the swap.
    written : list of Upload
        The same, with what the last attempt to land has added.
    manifests : tuple of ManifestRef
        The directory of the base.
    entries : tuple of DeltaEntry
        The read list.
    done : Written
        What was written of the base.
    """

    def __init__(
        self,
        context: Context,
        view: SnapshotView,
        keys: SessionKeys,
        mode: CompactionMode,
        ratio: float,
        branch: str,
        root: Root,
        run: Run | None,
    ) -> None:
        self._run, self._told = run, 0
        self._ratio, self._root, self._branch = ratio, root, branch
        self._context, self._view, self._keys, self._mode = context, view, keys, mode
        self._old_base = BaseIndex(view.manifests)
        nodes = {node.node_id: node for node in view.nodes.values() if node.kind != NodeKind.GROUP}
        refs, bounds = ref_counts(view, self._old_base, self._rows_by_node())
        rules = context.config.chunk_manifests.rules
        if bounds and any(rule.initialized_chunks is not None for rule in rules):
            presence = Presence(context, view, branch)
            refs |= {node: presence.count(node) for node in bounds}
        self._facts = NodeFacts(nodes, refs)
        self._merges: Mapping[bytes, NodeMerge] = {}
        self._heap = Heap(view, self._old_base, (), context.meter)
        self._commit_id = b""
        self._base = view.snapshot.base
        self._new_base: Upload | None = None
        self._sequence, self._counts = view.base_sequence, view.counts
        self._kept: dict[int, int] = {}  # old -> new position of entries that stay as they are
        self.uploads: list[Upload] = []
        self.written: list[Upload] = []
        self.manifests = view.manifests
        self.entries: tuple[DeltaEntry, ...] = ()
        self.done = Written()

    def _rows_by_node(self) -> dict[bytes, int]:
        rows: dict[bytes, int] = {}
        for entry in self._view.snapshot.deltas:
            for part in entry.parts():
                rows[part.node_id] = rows.get(part.node_id, 0) + part.count
        return rows

    @property
    def _everything(self) -> bool:
        return self._mode is CompactionMode.FULL

    def estimate(self, before: CompactionReport) -> CompactionReport:
        """Estimate what `do` would do from the read list, without fetching anything."""
        due = self._due(self._pending())
        return replace(before, manifests_written=len(due), refs_merged=self._refs(due))

    def _due(self, pending: Mapping[bytes, Pending]) -> Collection[str]:
        """Keys of the manifests that are written anew."""
        if self._everything:
            return {ref.blob.key for ref in self._old_base}
        return due_manifests(self._old_base, pending, self._ratio)

    def _refs(self, keys: Collection[str]) -> int:
        return sum(part.count for key in keys for part in self._old_base[key].parts)

    def _pending(self) -> dict[bytes, Pending]:
        if self._mode is CompactionMode.MINOR:
            return {}
        return pending_of(self._context, self._view, self._old_base, self._facts)

    def do(self) -> bool:
        """Write new manifests and encode the rest; whether there is anything to do."""
        if self._base_is_due():
            self._rebuild_base()
        dropped = self._droppable(BaseIndex(self.manifests), self._sequence)
        self._roll_up(dropped)
        self._commit_id = self._context.runtime.random_bytes(COMMIT_ID_BYTES)
        return bool(self.uploads or dropped)

    def make(self, root: Root) -> NextVersion | None:
        """The compaction as of this root; None if somebody else has compacted in the meantime."""
        context, view, keys, branch = self._context, self._view, self._keys, self._branch
        refusal = admission(root, Writer(keys.start, compacts=True), branch)
        if refusal is Refusal.OVERTAKEN:
            raise overtaken(root, COMPACTOR, keys.start)
        if refusal is not None:
            return None  # behind the fence: the uploads may be collected
        tip, old = root.branches[branch], view.snapshot
        current = view if tip.head.key == view.ref.key else context.open_branch(tip)
        before, count = current.snapshot, len(old.deltas)
        if _places(before, count) != _places(old, count):
            return None
        deltas = (*self.entries, *before.deltas[count:])
        snapshot, log = rewritten(
            context,
            keys,
            before,
            self._commit_id,
            f"compact {count} deltas",
            base=self._base,
            deltas=deltas,
            digests=self._moved_digests(before),
            sums=sums_after(current, (self._counts, self.manifests, self._sequence), deltas),
        )
        pages, merged = merged_pages(context, before.history, tip.floor, keys)
        self.written = [*self.uploads, log, *merged]
        index: list[Upload] = []
        if self.done.entries:
            # On top of the index as it is now: somebody may have built it in the meantime.
            done, nodes = self.done, current.by_id
            names = [name for ref in self.manifests for name in leaf_names(ref)]
            tip, index = with_entries(context, tip, keys, done.entries, names, nodes, done.zones)
        return NextVersion(
            current,
            snapshot,
            [*self.written, *index],
            tip=tip,
            base=self._new_base,
            base_sequence=self._sequence,
            pages=pages,
        )

    def _moved_digests(self, current: Snapshot) -> tuple[DigestEntry, ...]:
        """The digests whose deltas are all still there, at their new positions."""
        count = len(self._view.snapshot.deltas)
        shift = len(self.entries) - count
        places = self._kept | {i: i + shift for i in range(count, len(current.deltas))}
        found = []
        for entry in current.digests:
            to = [places.get(i) for i in range(entry.first, entry.stop)]
            if to[0] is not None and to == list(range(to[0], to[0] + entry.count)):
                found.append(replace(entry, first=to[0]))
        return tuple(found)

    def _base_is_due(self) -> bool:
        """Whether enough is pending for a new base; of its pages only changed ones are written."""
        if self._mode is CompactionMode.MINOR:
            return False
        entries, base = self._view.snapshot.deltas, self._view.snapshot.base
        if self._everything or base is None:
            return bool(entries) or self._everything
        if opening_is_slow(*self._view.node_changes()):
            return True
        nbytes = sum(e.log.length + sum(m.blob.length for m in e.manifests) for e in entries)
        return bool(entries) and nbytes >= self._ratio * base.length

    def _rebuild_base(self) -> None:
        """Write the base with what is due merged into it."""
        context, view, pending = self._context, self._view, self._pending()
        outside = {node_id for node_id, mine in pending.items() if mine.outside}
        rows = None if self._run is None else _PLANNED_ROWS
        self._heap = Heap(view, self._old_base, outside, context.meter, rows)
        what = context, self._heap, self._old_base, self._facts
        ratio, everything = self._ratio, self._everything
        self._merges = due_changes(*what, pending, ratio, everything=everything)
        if is_shown():
            expect("merging refs", self._expected(pending))
        write, in_steps = self._writer(), self._run is None
        done = repack(*what, self._merges, ratio, write, everything=everything, in_steps=in_steps)
        expect("merging refs", self._told)  # the same chunk may have several
        self._tell(0)
        self.done, self.manifests = done, tuple(done.manifests)
        self._sequence, index = view.snapshot.sequence, BaseIndex(done.manifests)
        stored = {entry.name: entry.stored_bytes for entry in done.entries}
        self._counts = counts_of_base(view, index, self._settled(index), stored)
        nodes = tuple(node for _, node in sorted(view.nodes.items()))
        whole = Base(nodes, self.manifests, self._sequence, self._counts)
        base, pages = encoded_base(context.objects, view, whole, self._keys, done.copies)
        self._base, self._new_base = base.ref, base
        self.uploads += [*done.bitmaps, *pages, base]

    def _writer(self) -> WriteLeaves:
        """Writes the new manifests: here, or in the tasks of `run`."""
        context, heap, keys = self._context, self._heap, self._keys
        tip = self._root.branches[self._branch]
        if self._run is not None:
            pages = paged_zones(context, self._root, tip)
            return write_in_tasks(context, heap, keys, pages, self._run, self._tell)
        zones = LeafZones.of(context, self._root, self._view, tip)
        return LeavesHere(context, heap, keys, self._facts, zones, self._tell).write

    def _expected(self, pending: Mapping[bytes, Pending]) -> int:
        """How many refs are merged, at most."""
        return self._refs(self._due(pending)) + sum(self._rows_by_node().values())

    def _tell(self, refs: int) -> None:
        self._told += refs
        tell("merging refs", self._told)

    def _droppable(self, base: BaseIndex, sequence: int) -> int:
        """How many of the oldest entries the base fully covers."""
        for position, entry in enumerate(self._view.snapshot.deltas):
            if entry.last > sequence or any(self._unmerged(base, position, entry)):
                return position
        return len(self._view.snapshot.deltas)

    def _settled(self, base: BaseIndex) -> set[bytes]:
        """Nodes whose changes in the read list are all in the base."""
        entries = enumerate(self._view.snapshot.deltas)
        return self._facts.keys() - {n for at in entries for n in self._unmerged(base, *at)}

    def _unmerged(self, base: BaseIndex, position: int, entry: DeltaEntry) -> Iterator[bytes]:
        """Nodes with changes of the entry that are not in the base."""
        for part in entry.parts():
            if part.node_id not in self._facts or not part.count:
                continue
            lo, hi = np.asarray(part.box.lo, np.int64), np.asarray(part.box.hi, np.int64)
            covered = 0
            for leaf, number in base.overlapping(part.node_id, lo, hi):
                if base.manifest(number).merged_to(leaf) < entry.last:
                    yield part.node_id
                covered += part.box.shared_size(leaf.box)
            if covered < part.box.size and self._holds_more(base, part):
                yield part.node_id
        for node_id, cut in self._view.truncations(position).items():
            for leaf, key in base.leaves(node_id) if node_id in self._facts else ():
                beyond = any(h > c for h, c in zip(leaf.box.hi, cut, strict=True))
                if beyond and base[key].merged_to(leaf) < entry.last:
                    yield node_id

    def _holds_more(self, base: BaseIndex, part: Part) -> bool:
        """Whether chunks may be in the box but outside all leaves, so that the entry is needed."""
        merge = self._merges.get(part.node_id)
        if merge is None or merge.whole:
            return merge is None
        coords = self._heap.outside(part.node_id).coords(part.box)
        return bool((base.locate(part.node_id, coords) < 0).any())

    def _roll_up(self, dropped: int) -> None:
        """Make the new read list, without the oldest entries that are dropped."""
        left = self._view.snapshot.deltas[dropped:]
        sizes = [Size(sum(p.count for p in e.parts()), e.first < e.last) for e in left]
        groups = dict(merge_groups(sizes, self._context.config.compaction.fan_in))
        entries: list[DeltaEntry] = []
        position = 0
        while position < len(left):
            stop = groups.get(position)
            if stop is None:
                self._kept[dropped + position] = len(entries)
                entries.append(left[position])
                position += 1
                continue
            run, written = roll_up(self._context, self._view, left[position:stop], self._keys)
            entries.append(run)
            self.uploads += written
            position = stop
        self.entries = tuple(entries)


def _places(snapshot: Snapshot, count: int) -> tuple[str | None, list[str]]:
    """Where its base is, and its oldest deltas."""
    base = None if snapshot.base is None else snapshot.base.key
    return base, [entry.log.key for entry in snapshot.deltas[:count]]


# --- runs -----------------------------------------------------------------------------------------


def roll_up(
    context: ReadContext,
    view: SnapshotView,
    entries: Sequence[DeltaEntry],
    keys: SessionKeys,
) -> tuple[DeltaEntry, list[Upload]]:
    """Merge neighbours of the view's read list; return the run's entry and objects to upload."""
    wanted = [(entry.log, Delta) for entry in entries]
    context.objects.prefetch(
        [*wanted, *((ref.blob, Manifest) for e in entries for ref in e.manifests)]
    )
    deltas = [context.objects.load(ref, kind) for ref, kind in wanted]
    nodes: dict[str, Node] = {}
    deleted: dict[str, bytes] = {}
    for delta in deltas:
        for path in delta.deleted:
            nodes.pop(path, None)
        deleted |= delta.deleted
        nodes |= {node.path: node for node in delta.nodes}
    alive = view.by_id.keys()
    truncated: dict[bytes, Coords] = {}
    parts: dict[bytes, list[ChunkTable]] = {}
    for node_id, layers in _layers(context, entries, deltas).items():
        if node_id not in alive:
            continue  # the node was deleted
        merged = merge_layers(layers)
        if merged.truncated is not None:
            truncated[node_id] = merged.truncated
        if merged.table is not None:
            parts[node_id] = [*split(merged.table, LEAF_ROWS)]
    encoded = {
        node_id: Manifest.of([(node_id, table) for table in tables])
        for node_id, tables in parts.items()
    }
    commit_id = context.runtime.random_bytes(COMMIT_ID_BYTES)
    listed = tuple(nodes[path] for path in sorted(nodes))
    run, uploads = encoded_delta(
        context,
        keys,
        Delta(commit_id, listed, deleted, truncated),
        encoded,
        coordinate_ids(view.nodes.values(), encoded),
    )
    log = uploads[-1].ref
    held = {part.node_id for part in run.embedded.directory()}
    entry = DeltaEntry.of(
        log,
        run,
        entries[-1].last,
        coordinate_ids(view.nodes.values(), held),
        first=entries[0].first,
    )
    zones = _zones(context, entries, parts, keys)
    uploads += [] if zones is None else [zones]
    at = None if zones is None else zones.ref
    counts = merged_counts(entries, view.base_sequence, alive)
    return replace(entry, counts=counts, zones=at), uploads


def _zones(
    context: ReadContext,
    entries: Sequence[DeltaEntry],
    parts: Mapping[bytes, Sequence[ChunkTable]],
    keys: SessionKeys,
) -> Upload | None:
    """The object with the entries of zone maps that still describe a chunk of the run."""
    refs = [entry.zones for entry in entries if entry.zones is not None]
    found: list[tuple[bytes, ZoneTable]] = []
    for zones in context.runtime.parallel([partial(load_zones, context, ref) for ref in refs]):
        for node_id in zones.nodes & parts.keys():
            with suppress(*UNUSABLE):
                for table in zones.of_node(node_id):
                    count = np.zeros(len(table), np.bool_)
                    for part in parts[node_id]:
                        count |= valid(table, part)
                    kept = taken(table, count)
                    found += [] if kept is None else [(node_id, kept)]
    return upload_of(merged_by_node(found), keys)


def _layers(
    context: ReadContext, entries: Sequence[DeltaEntry], deltas: Sequence[Delta]
) -> dict[bytes, list[Layer]]:
    """The layers of each node's chunks, oldest first."""
    layers: dict[bytes, list[Layer]] = {}
    for entry, delta in zip(entries, deltas, strict=True):
        tables: dict[bytes, list[ChunkTable]] = {}
        manifests = [context.objects.load(ref.blob, Manifest) for ref in entry.manifests]
        for manifest in (delta.embedded, *manifests):
            for part, data in manifest.parts:
                tables.setdefault(part.node_id, []).append(manifest.decode(part, data))
        for node_id in {*tables, *delta.truncated}:
            layer = Layer(delta.truncated.get(node_id), tuple(tables.get(node_id, ())))
            layers.setdefault(node_id, []).append(layer)
    return layers
