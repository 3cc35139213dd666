"""Compaction: merging a branch's live deltas into runs and into the base.

1. Leaves of the base with enough pending changes are rewritten with these changes (`merge_leaves`),
   together with a new node table. Other manifests stay as they are, under the same keys.
2. The oldest entries of the read list that the base now covers are dropped. Neighbours among the
   others are merged into runs (`runs`), as `planning.upkeep.compaction_triggers` decides.
3. The new read list is committed as a REWRITE. It changes no data, so it never conflicts: if the
   branch has moved, newer deltas stay on top, provided that the compacted entries are unchanged. If
   they are not, somebody else was faster and this compaction is dropped.

Invariant: an entry is dropped only together with all older ones. So reads are right even outside
the boxes of all leaves, where no record says what has been merged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.commit.add_digest import with_digest
from zarr_manifests.engine.commit.extend_history import history_after
from zarr_manifests.engine.commit.landing import root_with
from zarr_manifests.engine.compact.base_writing import encoded_base
from zarr_manifests.engine.compact.merge_history import MergedPages
from zarr_manifests.engine.compact.merge_leaves import (
    NodeMerge,
    Pending,
    due_changes,
    due_manifests,
    pending_of,
    repack,
)
from zarr_manifests.engine.compact.presence_index import Presence, leaf_names, with_entries
from zarr_manifests.engine.compact.runs import roll_up
from zarr_manifests.engine.compact.write_leaves import Here, InTasks, LeafWriter
from zarr_manifests.engine.compact.zone_index import LeafZones, NewPages, paged_zones
from zarr_manifests.engine.history.ancestry import opened
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload, tallied_reads
from zarr_manifests.engine.root.epochs import claim_compaction, overtaken
from zarr_manifests.engine.root.roots import RootAt
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.pending import BATCH_ROWS, Heap
from zarr_manifests.engine.snapshot.totals import counts_of_base, ref_counts, sums_after
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.delta import COMMIT_ID_BYTES, CommitKind, Delta
from zarr_manifests.format.index import IndexEntry
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.nodes import Base, Count, NodeKind
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import COMPACTOR, Root
from zarr_manifests.format.snapshot import DeltaEntry, DigestEntry, Snapshot
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.conflict.admission import Refusal, Writer, admission
from zarr_manifests.planning.layout.leaves import BaseIndex, NodeFacts
from zarr_manifests.planning.upkeep.compaction_triggers import (
    CompactionMode,
    Size,
    merge_groups,
    opening_is_slow,
)
from zarr_manifests.progress import expect, is_shown, tell
from zarr_manifests.reports import CompactionReport
from zarr_manifests.runtime import Run

_ATTEMPTS = 10
_PLANNED_ROWS: Final = BATCH_ROWS // 4
"""Rows whose coordinates are read at a time where tasks write leaves: a driver has little room."""


@dataclass(slots=True)
class _Compacted:
    """A new base and read list; everything is encoded but the snapshot."""

    old: tuple[DeltaEntry, ...]
    base: BlobRef | None
    new_base: Upload | None
    base_sequence: int
    counts: tuple[Count, ...] | None
    manifests: tuple[ManifestRef, ...]
    entries: tuple[DeltaEntry, ...]
    kept: dict[int, int]
    """Old position in the read list -> new position, of entries that stay as they are."""
    log: BlobRef
    commit_id: bytes
    message: str
    uploads: list[Upload] = field(default_factory=list)
    indexed: list[IndexEntry] = field(default_factory=list)
    """New entries for the presence index, of the new leaves."""
    zones: Mapping[bytes, NewPages] = field(default_factory=dict)
    """Pages of zone maps of the new leaves, by node."""
    merged: MergedPages = field(default_factory=MergedPages)


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
    done = work.do()
    if done is None:
        return before, None
    done.merged = MergedPages.of(context, view.snapshot.history, tip.floor, keys)
    done.uploads += done.merged.uploads
    report = replace(
        before,
        deltas_after=len(done.entries),
        manifests_after=work.manifests,
        manifests_written=work.manifests_written,
        refs_merged=work.refs_merged,
        bytes_written=work.bytes_written + sum(len(u.data) for u in done.uploads),
        bytes_read=work.bytes_read,
    )
    landed = _land(context, at, branch, view, done, keys)
    if landed is None:
        return before, None
    return replace(report, snapshot_id=snapshot_id_of(landed.key)), landed


class _Work:
    """One compaction of one snapshot, up to the swap."""

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
        self._ratio, self._root, self._tip = ratio, root, root.branches[branch]
        self._context, self._view, self._keys, self._mode = context, view, keys, mode
        self._base = BaseIndex(view.manifests)
        nodes = {node.node_id: node for node in view.nodes.values() if node.kind != NodeKind.GROUP}
        refs, bounds = ref_counts(view, self._base, self._rows_by_node())
        rules = context.config.chunk_manifests.rules
        if bounds and any(rule.initialized_chunks is not None for rule in rules):
            presence = Presence(context, view, branch)
            refs |= {node: presence.count(node) for node in bounds}
        self._facts = NodeFacts(nodes, refs)
        self.manifests = len(view.manifests)
        self.manifests_written = self.refs_merged = self.bytes_written = self.bytes_read = 0
        self._merges: Mapping[bytes, NodeMerge] = {}
        self._entries: list[IndexEntry] = []
        self._bitmaps: list[Upload] = []
        self._zones: Mapping[bytes, NewPages] = {}
        self._heap = Heap(view, self._base, (), context.meter)

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
            return {ref.blob.key for ref in self._base}
        return due_manifests(self._base, pending, self._ratio)

    def _refs(self, keys: Collection[str]) -> int:
        return sum(part.count for key in keys for part in self._base[key].parts)

    def _pending(self) -> dict[bytes, Pending]:
        if self._mode is CompactionMode.MINOR:
            return {}
        return pending_of(self._context, self._view, self._base, self._facts)

    def do(self) -> _Compacted | None:
        """Write new manifests and runs; None if there is nothing to do."""
        view, snapshot = self._view, self._view.snapshot
        uploads: list[Upload] = []
        manifests, sequence, counts = view.manifests, view.base_sequence, view.counts
        base, new_base = snapshot.base, None
        if self._base_is_due():
            manifests, small = self._repack()
            sequence = snapshot.sequence
            index = BaseIndex(manifests)
            stored = {entry.name: entry.stored_bytes for entry in self._entries}
            counts = counts_of_base(view, index, self._settled(index), stored)
            nodes = dict(view.nodes)
            whole = Base(tuple(nodes[path] for path in sorted(nodes)), manifests, sequence, counts)
            new_base, pages = encoded_base(self._context.objects, view, whole, self._keys, small)
            base = new_base.ref
            uploads += [*self._bitmaps, *pages, new_base]
        dropped = self._droppable(BaseIndex(manifests), sequence)
        entries, kept, runs = self._rolled_up(dropped)
        uploads += runs
        if not uploads and not dropped:
            return None
        commit_id = self._context.runtime.random_bytes(COMMIT_ID_BYTES)
        log = Upload(self._keys.next("deltas"), Delta(commit_id).encode())
        self._context.objects.remember(log.ref, Delta(commit_id))
        message = f"compact {len(snapshot.deltas)} deltas"
        return _Compacted(
            snapshot.deltas,
            base,
            new_base,
            sequence,
            counts,
            manifests,
            entries,
            kept,
            log.ref,
            commit_id,
            message,
            [*uploads, log],
            self._entries,
            self._zones,
        )

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

    def _repack(self) -> tuple[tuple[ManifestRef, ...], Mapping[str, bytes]]:
        pending = self._pending()
        outside = {node_id for node_id, mine in pending.items() if mine.outside}
        rows = None if self._run is None else _PLANNED_ROWS
        self._heap = Heap(self._view, self._base, outside, self._context.meter, rows)
        self._merges = due_changes(
            self._context,
            self._heap,
            self._base,
            self._facts,
            pending,
            self._ratio,
            everything=self._everything,
        )
        if is_shown():
            expect("merging refs", self._expected(pending))
        done = repack(
            self._context,
            self._heap,
            self._base,
            self._facts,
            self._merges,
            self._ratio,
            self._writer(),
            everything=self._everything,
        )
        expect("merging refs", self._told)  # the same chunk may have several
        self._tell(0)
        self.manifests = len(done.manifests)
        self.manifests_written, self.refs_merged = done.manifests_written, done.refs
        self.bytes_written, self.bytes_read = done.bytes_written, done.bytes_read
        self._entries, self._bitmaps, self._zones = done.entries, done.bitmaps, done.zones
        return done.manifests, done.uploads

    def _writer(self) -> LeafWriter:
        """Writes the new manifests: here, or in the tasks of `run`."""
        context, heap, keys = self._context, self._heap, self._keys
        if self._run is not None:
            pages = paged_zones(context, self._root, self._tip)
            return InTasks(context, heap, keys, pages, self._run, self._tell)
        zones = LeafZones.of(context, self._root, self._view, self._tip)
        return Here(context, heap, keys, self._facts, zones, self._tell)

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

    def _rolled_up(
        self, dropped: int
    ) -> tuple[tuple[DeltaEntry, ...], dict[int, int], list[Upload]]:
        """The new read list, the new positions of entries that stay, and objects to upload."""
        left = self._view.snapshot.deltas[dropped:]
        sizes = [Size(sum(p.count for p in e.parts()), e.first < e.last) for e in left]
        groups = dict(merge_groups(sizes, self._context.config.compaction.fan_in))
        entries: list[DeltaEntry] = []
        kept: dict[int, int] = {}
        uploads: list[Upload] = []
        position = 0
        while position < len(left):
            stop = groups.get(position)
            if stop is None:
                kept[dropped + position] = len(entries)
                entries.append(left[position])
                position += 1
                continue
            run, written = roll_up(self._context, self._view, left[position:stop], self._keys)
            entries.append(run)
            uploads += written
            position = stop
        return tuple(entries), kept, uploads


def _land(
    context: Context,
    at: RootAt,
    branch: str,
    view: SnapshotView,
    done: _Compacted,
    keys: SessionKeys,
) -> BlobRef | None:
    """Commit the new read list; None if somebody else has compacted in the meantime.

    It is repeated if others come first.
    """
    uploads: Sequence[Upload] = done.uploads
    turns = context.storage.capabilities.turns
    if turns:  # upload before the turn, so that nobody waits for it
        context.runtime.parallel([partial(context.objects.create, u.key, u.data) for u in uploads])
        uploads = ()
    with context.roots.turn():
        at = context.roots.read() if turns else at
        for attempt in range(_ATTEMPTS):
            root = context.roots.with_branch(at.root, branch)
            refusal = admission(root, Writer(keys.start, compacts=True), branch)
            if refusal is Refusal.OVERTAKEN:
                raise overtaken(root, COMPACTOR, keys.start)
            if refusal is not None:
                return None  # behind the fence: the uploads may be collected
            tip = root.branches[branch]
            current = view if tip.head.key == view.ref.key else context.open_branch(tip)
            known = current.snapshot.deltas[: len(done.old)]
            same_base = _key(current.snapshot.base) == _key(view.snapshot.base)
            if not same_base or [e.log.key for e in known] != [e.log.key for e in done.old]:
                return None
            landed = _try(context, at, branch, current, done, uploads, keys)
            if landed is not None:
                return landed
            uploads = ()
            context.roots.backoff(attempt)
            at = context.roots.read()
    return None


def _key(ref: BlobRef | None) -> str | None:
    return None if ref is None else ref.key


def _try(
    context: Context,
    at: RootAt,
    branch: str,
    current: SnapshotView,
    done: _Compacted,
    uploads: Sequence[Upload],
    keys: SessionKeys,
) -> BlobRef | None:
    """One attempt; None if somebody else's swap came first."""
    newer = current.snapshot.deltas[len(done.old) :]
    key = keys.next("snapshots")
    history, made = history_after(
        context, current, done.merged.within(current.snapshot.history), keys
    )
    snapshot = Snapshot(
        snapshot_id_of(key),
        context.repository_id,
        current.ref.bare(),
        done.commit_id,
        CommitKind.REWRITE,
        done.message,
        {},
        max(context.runtime.now_ms(), current.snapshot.written_ms),
        done.base,
        (*done.entries, *newer),
        done.log,
        {},
        current.snapshot.marks,
        _moved_digests(current.snapshot, done),
        current.snapshot.sequence,
        sums_after(
            current, (done.counts, done.manifests, done.base_sequence), (*done.entries, *newer)
        ),
        marks_page=current.snapshot.marks_page,
        history=history,
    )
    known = {u.key: u.data for u in done.uploads}
    snapshot, digests = with_digest(
        context, snapshot, current.nodes.values, done.base_sequence, keys, known
    )
    made += [*digests, Upload(key, snapshot.encode())]
    calls: list[Callable[[], object]] = [
        partial(context.objects.create, u.key, u.data) for u in (*uploads, *made)
    ]
    calls.append(partial(context.roots.archive, at))
    old = context.roots.with_branch(at.root, branch)
    tip = old.branches[branch]
    if done.indexed:
        # On top of the index as it is now: somebody may have built it in the meantime.
        names = [name for ref in done.manifests for name in leaf_names(ref)]
        nodes = current.by_id
        tip, index = with_entries(context, tip, keys, done.indexed, names, nodes, done.zones)
        calls += [partial(context.objects.create, one.key, one.data) for one in index]
    context.runtime.parallel(calls)
    head = made[-1]
    indexed = replace(old, branches={**old.branches, branch: tip})
    root = root_with(context, indexed, branch, snapshot, head, done.new_base)
    landed = context.roots.swap(at, root, done.commit_id)
    if landed is None:
        return None
    context.objects.remember(head.ref, snapshot)
    return head.ref


def _moved_digests(current: Snapshot, done: _Compacted) -> tuple[DigestEntry, ...]:
    """The digests whose deltas are all still there, at their new positions."""
    shift = len(done.entries) - len(done.old)
    places = dict(done.kept)
    places |= {i: i + shift for i in range(len(done.old), len(current.deltas))}
    found = []
    for entry in current.digests:
        to = [places.get(i) for i in range(entry.first, entry.stop)]
        if to[0] is not None and to == list(range(to[0], to[0] + entry.count)):
            found.append(replace(entry, first=to[0]))
    return tuple(found)
