"""Compaction: merging a branch's live deltas into runs and into the base.

1. Leaves of the base with enough pending changes are rewritten with these changes (`write_leaves`),
   together with a new node table. Other manifests stay as they are, under the same keys.
2. The oldest entries of the read list that the base now covers are dropped. Neighbours among the
   others are merged into runs, as `planning.garbage` decides.
3. The new read list is committed as a REWRITE. It changes no data, so it never conflicts: if the
   branch has moved, newer deltas stay on top, provided that the compacted entries are unchanged. If
   they are not, somebody else was faster and this compaction is dropped.

Invariant: an entry is dropped only together with all older ones. So reads are right even outside
the boxes of all leaves, where no record says what has been merged.

A run is one delta. For each chunk and node it has the newest entry's state, and for each node the
combined truncation. UNSET rows are kept, since the base may still have the chunk. Invariant:
applied to any older state, a run has the same effect as its entries one after the other.

Compactions on request, and the compaction that a commit makes due
------------------------------------------------------------------

In the background a compaction uses its own thread and its own view of the repository; it shares no
thread pool or cache with readers and writers. Invariants: at most one thread compacts a branch, and
never more than the repository's configuration allows do so; the interpreter waits for them at its
exit; a forked child starts with none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Final

from msgspec.structs import replace

from zarr_manifests.config import CacheOptions, Compaction
from zarr_manifests.engine.create import with_reserve
from zarr_manifests.engine.differences import deltas_between
from zarr_manifests.engine.landing import (
    NextVersion,
    encoded_delta,
    land,
    merged_pages,
    rewritten,
    tell_landed,
    zones_upload,
)
from zarr_manifests.engine.objects import SessionKeys, Upload, Wanted
from zarr_manifests.engine.roots import check_compactor, claim_compaction, fenced, opened
from zarr_manifests.engine.totals import counts_of_base, node_facts, pending_rows, sums_after
from zarr_manifests.engine.upkeep import write_leaves
from zarr_manifests.engine.upkeep.write_leaves import (
    Due,
    LeavesHere,
    WriteLeaves,
    Written,
    due_of,
    encoded_base,
    plan_leaves,
    task_elsewhere,
    unmerged,
    write_all,
)
from zarr_manifests.engine.view import Context, ReadContext, SnapshotView
from zarr_manifests.engine.zones import KnownZones, with_zones
from zarr_manifests.errors import ConflictError, InvalidArgumentError, ManifestsError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import Base, Delta, Manifest, Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import Root
from zarr_manifests.format.snapshot import DeltaEntry, Snapshot
from zarr_manifests.grid import Box, Coords
from zarr_manifests.ids import COMMIT_ID_BYTES
from zarr_manifests.planning.garbage import (
    CompactionMode,
    PackMoves,
    is_due,
    merge_groups,
    opening_is_slow,
)
from zarr_manifests.planning.merge import Layer, in_tables, merge_layers
from zarr_manifests.planning.tables import BaseIndex, merged_counts
from zarr_manifests.progress import expect, is_shown
from zarr_manifests.reports import CompactionReport
from zarr_manifests.runtime import ForkSafeLock, Run, one_by_one, start_thread

_ATTEMPTS = 10


def compact_branch(
    context: Context,
    branch: str,
    mode: CompactionMode,
    *,
    dry_run: bool = False,
    size_ratio: float | None = None,
    claim: bool = False,
    run: Run | None = None,
    moves: PackMoves | None = None,
    keys: SessionKeys | None = None,
) -> tuple[CompactionReport, BlobRef | None]:
    """Compact a branch's head; `size_ratio` overrides the configuration.

    With `claim`, running compactions are shut out first. With `run`, its tasks write the leaves.
    With `moves`, manifests with chunks that have moved are written anew, under `keys`, which have
    named the new packs. `progress` is told how many refs are merged.

    Raises
    ------
    FencedError
        If somebody else has claimed compactions in the meantime, or, with `moves`, a collection has
        shut this out; nothing is changed.
    CorruptObjectError
        If something to merge is damaged; nothing is changed.
    """
    start_s, roots = context.runtime.monotonic_s(), context.roots
    ratio = context.config.compaction.size_ratio if size_ratio is None else size_ratio
    known = [claim_compaction(roots) if claim and not dry_run else roots.latest]

    def attempt() -> tuple[CompactionReport, BlobRef | None]:
        root = roots.with_branch((known.pop() if known else roots.read()).root, branch)
        if branch not in root.branches:
            return CompactionReport(mode=mode, dry_run=dry_run), None
        work = _Work(context, root, branch, mode, ratio, run, moves, keys)
        if dry_run:
            return work.estimate(), None
        return work.land() if work.do() else (work.before, None)

    found, head = opened(attempt)
    if head is not None:
        facts = {
            "mode": str(mode),
            "refs_merged": found.refs_merged,
            "bytes_written": found.bytes_written,
        }
        tell_landed(context, "compaction", branch, head, start_s, **facts)
    return found, head


class _Work:
    """One compaction of one snapshot: a new base and read list, everything but its snapshot.

    Attributes
    ----------
    before : CompactionReport
        What was there, as the report if nothing changes.
    """

    def __init__(
        self,
        context: Context,
        root: Root,
        branch: str,
        mode: CompactionMode,
        ratio: float,
        run: Run | None,
        moves: PackMoves | None,
        keys: SessionKeys | None,
    ) -> None:
        self._context, self._root, self._branch, self._mode = context, root, branch, mode
        self._ratio, self._run, self._moves = ratio, run, moves
        self._keys = keys or SessionKeys(root.version, context.runtime)
        self._view = view = context.open_branch(root.branches[branch])
        self._manifests = view.pages.manifests()
        self._old_base = BaseIndex(self._manifests)
        self._facts = node_facts(view, self._old_base)
        self._commit_id = b""
        self._base = view.snapshot.base
        self._new_base: Upload | None = None
        self._sequence, self._counts = view.base_sequence, view.pages.counts()
        self._uploads: list[Upload] = []
        self._written: list[Upload] = []  # what the last attempt to land has added
        self._entries = view.snapshot.deltas
        self._done = Written()
        self.before = CompactionReport(
            mode=mode,
            deltas_before=len(self._entries),
            deltas_after=len(self._entries),
            manifests_before=len(self._manifests),
            manifests_after=len(self._manifests),
        )

    @property
    def _everything(self) -> bool:
        return self._mode is CompactionMode.FULL

    def estimate(self) -> CompactionReport:
        """Estimate what `do` would do from the read list, without fetching anything."""
        due = self._due().manifests
        refs = self._refs(due)
        return replace(self.before, dry_run=True, manifests_written=len(due), refs_merged=refs)

    def _due(self) -> Due:
        """What is merged into the base."""
        if self._mode is CompactionMode.MINOR:
            return Due()
        config, base = self._context.config.chunk_manifests, self._old_base
        ratio = 0.0 if self._everything else self._ratio
        due = due_of(config, self._view, base, self._facts, ratio)
        if self._everything:
            due.manifests |= {ref.blob.key for ref in base}
        for node_id, coords in self._moves.coords.items() if self._moves else ():
            for leaf in base.placed_in(node_id, Box.around_coords(coords)):
                due.manifests |= {leaf.key} if leaf.part.box.holds(coords).any() else set()
        return due

    def _refs(self, keys: Collection[str]) -> int:
        return sum(part.count for key in keys for part in self._old_base[key].parts)

    def do(self) -> bool:
        """Write new manifests and encode the rest; whether there is anything to do."""
        dropped = self._rebuild_base() if self._base_is_due() else 0
        self._roll_up(dropped)
        self._commit_id = self._context.runtime.random_bytes(COMMIT_ID_BYTES)
        return bool(self._uploads or dropped)

    def land(self) -> tuple[CompactionReport, BlobRef | None]:
        """Put it on the branch; nothing has changed if others were faster."""
        what = f"compaction of {self._branch!r}", "start it again later"
        try:
            landed = land(
                self._context,
                self._branch,
                self._keys,
                self._view,
                self._make,
                self._uploads,
                what,
                _ATTEMPTS,
            )
        except ConflictError:
            landed = None
        if landed is None:
            return self.before, None
        done, own = self._done, (*self._uploads, *self._written)
        report = replace(
            self.before,
            deltas_after=len(self._entries),
            manifests_after=len(self._manifests),
            manifests_written=len(done.manifests),
            refs_merged=sum(part.count for ref in done.manifests for part in ref.parts),
            bytes_written=sum(ref.blob.length for ref in done.manifests)
            + sum(len(each.data) for each in own),
            snapshot_id=landed.snapshot.snapshot_id,
        )
        return report, landed.head

    def _make(self, root: Root) -> NextVersion | None:
        """The compaction as of this root; None if somebody else has compacted in the meantime."""
        context, view, keys, branch = self._context, self._view, self._keys, self._branch
        if self._moves and keys.start < root.fence:
            what = f"the repacking of {branch!r}"
            raise fenced(root, keys.start, what, "Nothing was changed; start it again")
        if branch not in root.branches or keys.start < root.fence:
            return None  # behind the fence: the uploads may be collected
        check_compactor(root, keys.start)
        tip, old = root.branches[branch], view.snapshot
        current = view if tip.head.key == view.ref.key else context.open_branch(tip)
        before, count = current.snapshot, len(old.deltas)
        if _places(before, count) != _places(old, count):
            return None
        deltas = (*self._entries, *before.deltas[count:])
        snapshot, log = rewritten(
            context,
            keys,
            before,
            self._commit_id,
            "repack chunks" if self._moves else f"compact {count} deltas",
            base=self._base,
            deltas=deltas,
            sums=sums_after(current, self._counts, self._sequence, deltas),
        )
        pages, merged = merged_pages(context, before.history, tip.floor, keys)
        self._written = [log, *merged]
        index: list[Upload] = []
        changed = {part.node_id for ref in self._done.manifests for part in ref.parts}
        if self._done.zones or (changed and tip.index is not None):
            # On top of the index as it is now: somebody may have added to it in the meantime.
            added = changed, self._manifests, current.by_id, self._done.zones
            tip, index = with_zones(context, tip, keys, *added)
        return NextVersion(
            current,
            snapshot,
            [*self._uploads, *self._written, *index],
            tip=tip,
            base=self._new_base,
            pages=pages,
        )

    def _base_is_due(self) -> bool:
        """Whether enough is pending for a new base; of its pages only changed ones are written."""
        if self._mode is CompactionMode.MINOR:
            return False
        entries, base = self._view.snapshot.deltas, self._view.snapshot.base
        if self._everything or base is None:
            return bool(entries) or self._everything
        if self._moves:
            return True
        if opening_is_slow(*self._view.node_changes()):
            return True
        nbytes = sum(e.log.length + sum(m.blob.length for m in e.manifests) for e in entries)
        return bool(entries) and nbytes >= self._ratio * base.length

    def _rebuild_base(self) -> int:
        """Write the base with what is due merged into it; return how many entries it covers."""
        context, view, due, facts = self._context, self._view, self._due(), self._facts
        # Where tasks write leaves, a driver has little room.
        rows = write_leaves.BATCH_ROWS // (1 if self._run is None else 2)
        nbytes = rows * write_leaves.ROW_BYTES
        if is_shown():
            expect("merging refs", self._refs(due.manifests) + sum(pending_rows(view).values()))
        config, bare = context.config.chunk_manifests, view.passing(nbytes, refs=False)
        planned, stay = plan_leaves(config, bare, self._old_base, facts, due, rows)
        del bare  # with the tables that it keeps
        self._done = write_all(planned, self._run or map, self._task(view.passing(nbytes)))
        self._manifests = (*stay, *self._done.manifests)
        self._sequence, index = view.snapshot.sequence, BaseIndex(self._manifests)
        left: dict[bytes, int] = {}  # position of the oldest entry with something, by node
        for one in unmerged(view, index, facts):
            if one.leaf or one.node_id in due.left:
                left.setdefault(one.node_id, one.position)
        self._counts = counts_of_base(view, index, facts.keys() - left.keys())
        nodes = tuple(node for _, node in sorted(view.nodes.items()))
        whole = Base(nodes, self._manifests, self._sequence, self._counts)
        base, pages = encoded_base(context.objects, view, whole, self._keys, self._done.copies)
        self._base, self._new_base = base.ref, base
        self._uploads += [*pages, base]
        return min(left.values(), default=len(view.snapshot.deltas))

    def _task(self, view: SnapshotView) -> WriteLeaves:
        """Writes manifests here, or in the tasks of `run`."""
        context, index = self._context, self._root.branches[self._branch].index
        if self._run is not None:
            return task_elsewhere(context, view, self._keys, index)
        zones = KnownZones.of(context, view.snapshot.deltas, index)
        return LeavesHere(context, view, self._keys, zones, self._moves).write

    def _roll_up(self, dropped: int) -> None:
        """Make the new read list, without the oldest entries that are dropped."""
        left = self._view.snapshot.deltas[dropped:]
        rows = [sum(part.count for part in entry.parts()) for entry in left]
        runs = sum(1 for _ in takewhile(lambda entry: entry.first < entry.last, left))
        entries: list[DeltaEntry] = []
        for start, stop in merge_groups(rows, runs, self._context.config.compaction.fan_in):
            run = left[start]
            if stop - start > 1:
                run, written = roll_up(self._context, self._view, left[start:stop], self._keys)
                self._uploads += written
            entries.append(run)
        self._entries = tuple(entries)


def _places(snapshot: Snapshot, count: int) -> tuple[str | None, list[str]]:
    """Where its base is, and its oldest deltas."""
    base = None if snapshot.base is None else snapshot.base.key
    return base, [entry.log.key for entry in snapshot.deltas[:count]]


# --- runs -----------------------------------------------------------------------------------------


def roll_up(
    context: ReadContext, view: SnapshotView, entries: Sequence[DeltaEntry], keys: SessionKeys
) -> tuple[DeltaEntry, list[Upload]]:
    """Merge neighbours of the view's read list; return the run's entry and objects to upload."""
    wanted: list[Wanted] = [(entry.log, Delta) for entry in entries]
    wanted += [(ref.blob, Manifest) for entry in entries for ref in entry.manifests]
    loaded = context.objects.load_all(wanted)
    nodes: dict[str, Node] = {}
    deleted: dict[str, bytes] = {}
    for delta in (loaded[entry.log.key] for entry in entries):
        for path in delta.deleted:
            nodes.pop(path, None)
        deleted |= delta.deleted
        nodes |= {node.path: node for node in delta.nodes}
    alive = view.by_id.keys()
    truncated: dict[bytes, Coords] = {}
    parts: dict[bytes, list[ChunkTable]] = {}
    for node_id, layers in _layers(entries, loaded).items():
        if node_id not in alive:
            continue  # the node was deleted
        merged = merge_layers(layers)
        if merged.truncated is not None:
            truncated[node_id] = merged.truncated
        if merged.table is not None:
            parts[node_id] = [*in_tables(merged.table)]
    encoded = {
        node_id: Manifest.of([(node_id, table) for table in tables])
        for node_id, tables in parts.items()
    }
    commit_id = context.runtime.random_bytes(COMMIT_ID_BYTES)
    listed = tuple(nodes[path] for path in sorted(nodes))
    run, uploads, coordinates = encoded_delta(
        context, keys, view, Delta(commit_id, listed, deleted, truncated), encoded
    )
    first, last = entries[0].first, entries[-1].last
    entry = DeltaEntry.of(uploads[-1].ref, run, last, coordinates, first=first)
    known = KnownZones.of(context, entries)
    zones = zones_upload(known.recent_of, parts, keys)
    uploads += [] if zones is None else [zones]
    at = None if zones is None else zones.ref
    counts = merged_counts(entries, view.base_sequence, alive)
    return replace(entry, counts=counts, zones=at), uploads


def _layers(entries: Sequence[DeltaEntry], loaded: Mapping[str, Any]) -> dict[bytes, list[Layer]]:
    """The layers of each node's chunks, oldest first."""
    layers: dict[bytes, list[Layer]] = {}
    for entry in entries:
        tables: dict[bytes, list[ChunkTable]] = {}
        delta: Delta = loaded[entry.log.key]
        manifests: list[Manifest] = [loaded[ref.blob.key] for ref in entry.manifests]
        for manifest in (delta.embedded, *manifests):
            for part, data in manifest.parts:
                tables.setdefault(part.node_id, []).append(manifest.decode(part, data))
        for node_id in {*tables, *delta.truncated}:
            layer = Layer(delta.truncated.get(node_id), tuple(tables.get(node_id, ())))
            layers.setdefault(node_id, []).append(layer)
    return layers


# --- on request, and when due -------------------------------------------------------------------


_LOG = logging.getLogger(__name__)
_TASKS_CACHE_BYTES: Final = 32 << 20
_ALONE_CACHE_BYTES: Final = 64 << 20
_OVERDUE: Final = 4
"""At this multiple of `max_delta_count` a writer compacts even if another process should."""


def compact(
    context: Context, branch: str, mode: str, *, dry_run: bool, run: Run | None = None
) -> CompactionReport:
    """Compact a branch on request, shutting out running compactions.

    Raises
    ------
    NotFoundError
        If there is no such branch.
    InvalidArgumentError
        If there is no such mode.
    """
    if mode not in set(CompactionMode):
        raise InvalidArgumentError(f"mode {mode!r} is not one of minor, major, full, packs")
    context.roots.branch(context.roots.read().root, branch)  # there is one
    if run is not None:
        # Planning reads each object once, and tasks have caches of the same size.
        context = context.unshared_by(context.runtime, CacheOptions(max_size=_TASKS_CACHE_BYTES))
        context.roots.read()
    what = context, branch, CompactionMode(mode)
    compaction = partial(compact_branch, *what, dry_run=dry_run, claim=True, run=run)
    return with_reserve(context.storage, compaction)[0]


def compact_if_due(context: Context, branch: str, view: SnapshotView) -> SnapshotView | None:
    """Compact the branch if the commit that made `view` makes it due; return the compacted head.

    None if no compaction is due, if the background does it, or if it failed; the next commit then
    makes it due again.
    """
    rewrite, options = context.config.commits.mode == "rewrite", context.config.compaction
    if not rewrite and (options.mode == "manual" or not _is_due(view, options)):
        return None
    if not rewrite and options.mode == "async":
        compact_soon(context, branch)
        return None
    try:
        with context.roots.only_here("compaction") as alone:
            overdue = len(view.snapshot.deltas) > _OVERDUE * options.max_delta_count
            if not (alone or rewrite or overdue):
                return None  # another process compacts for all, unless it was stopped
            ratio = 0.0 if rewrite else None
            _, head = compact_branch(context, branch, CompactionMode.MAJOR, size_ratio=ratio)
        # The branch may have been reset in the meantime; the head is then unrelated to this commit.
        if head is not None and deltas_between(context, view, head) is not None:
            return context.open_view(head)
    except ManifestsError:
        _LOG.warning("compacting %r failed", branch, exc_info=True)
    return None


def _is_due(view: SnapshotView, options: Compaction) -> bool:
    unrolled = sum(entry.first == entry.last for entry in view.snapshot.deltas)
    slow = opening_is_slow(*view.node_changes())
    return slow or is_due(unrolled, view.snapshot.sequence, options)


# --- in the background ----------------------------------------------------------------------------


_BUSY: set[tuple[str, str]] = set()
"""Repositories and branches that threads work on."""
_LOCK: Final = ForkSafeLock()
os.register_at_fork(after_in_child=_BUSY.clear)  # the parent's threads are not here


def compact_soon(context: Context, branch: str) -> None:
    """Compact the branch on a thread in the background; returns at once.

    Unless a thread does so already, or as many as may are busy: the next commit makes it due again.
    """
    try:
        if _may_begin(context, branch):
            start_thread(partial(_work, context, branch))
    except RuntimeError:  # no more threads, or the interpreter is about to exit
        _LOG.warning("no thread to compact %r on", branch, exc_info=True)


def _may_begin(context: Context, branch: str) -> bool:
    free = len(_BUSY) < context.config.compaction.async_threads
    return free and (context.repository_id, branch) not in _BUSY


def _work(context: Context, branch: str) -> None:
    with _LOCK:  # it counts itself: an interrupt may come before or after it is started
        if not _may_begin(context, branch):
            return
        _BUSY.add((context.repository_id, branch))
    try:
        compact_alone(context, branch)
    except Exception:  # noqa: BLE001 - nobody is there to catch it
        _LOG.warning("compacting %r in the background failed", branch, exc_info=True)
    finally:
        _BUSY.discard((context.repository_id, branch))


def compact_alone(context: Context, branch: str) -> None:
    """Compact the branch now, on this thread, without sharing anything, as in the background."""
    # Pools refuse work once the interpreter exits, and their threads are for the foreground.
    runtime = replace(context.runtime, parallel=one_by_one)
    alone = context.unshared_by(runtime, CacheOptions(max_size=_ALONE_CACHE_BYTES))
    alone.roots.read()
    compact_branch(alone, branch, CompactionMode.MAJOR)
