"""Garbage collection, safe beside concurrent writers and readers, without trust in clocks.

1. One swap raises the fence, removes expired leases, and notes that a collection has begun. From
   then on, a session that began before the fence and holds no lease cannot commit. The new root is
   archived before anything is deleted, so that `recover` first finds a root that needs none of it.
2. Everything that this root reaches is marked. If anything cannot be read, nothing is deleted.
3. Dead objects are unmarked objects of sessions behind the fence that hold no lease. All objects
   are listed to find them.
4. Dead objects are deleted: chunks first and snapshots last, so that after a crash the objects that
   lead to the rest still exist.
5. Another swap logs that the collection has ended.

Why a dead object stays dead: a later commit refers only to objects of its own session, which began
at the fence or later or holds a lease, and to objects that its parent reaches. The parent is a
snapshot that was in history after the first swap, or a newer one.

Expiry: moving the floors of branches, in one swap
--------------------------------------------------

Nothing is deleted here. Snapshots that stay are read. Of those that leave, the entries of
history tell, unless a lease may keep one.

Invariant: leased snapshots stay in history. A branch's floor never rises above a leased snapshot.
The first expiry also ends the history of tags; it is put off while a leased snapshot is in the
history of no branch.

Freeing space in one call: compaction where overwritten chunks are held, expiry, collection
-------------------------------------------------------------------------------------------

A head reads a base and the deltas since. Chunks that a delta overwrites are held by the older ones,
and by the base, however many snapshots expire. So the branch is compacted before it expires, if the
snapshots that overwrote something are about to leave its history.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import batched, chain, groupby, takewhile
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import (
    Link,
    ancestors,
    archived_versions,
    entries,
    follow,
    has_expired,
    lease_name,
    live_snapshots,
    tables,
)
from zarr_manifests.engine.create import keep_reserve, with_reserve
from zarr_manifests.engine.objects import ObjectReader
from zarr_manifests.engine.roots import RootAt, RootReader, check_collector, claimed, opened
from zarr_manifests.engine.upkeep.compaction import compact
from zarr_manifests.engine.upkeep.repack_chunks import repack_chunks
from zarr_manifests.engine.view import Context, ReadContext, SnapshotView
from zarr_manifests.errors import (
    CorruptObjectError,
    NotFoundError,
    ObjectNotFoundError,
    StorageFullError,
    UnsupportedFormatError,
)
from zarr_manifests.format.chunk_table import native_keys
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import COLLECTOR, Branch, Root, archive_key, without
from zarr_manifests.format.snapshot import CommitKind, DeltaEntry
from zarr_manifests.format.zone_maps import IndexDirectory, ZonePages, Zones
from zarr_manifests.ids import snapshot_id_of, snapshot_key
from zarr_manifests.metrics import unmetered
from zarr_manifests.planning.garbage import (
    Aged,
    Retention,
    first_archive_kept,
    is_dead,
    kept_count,
    leased_lineages,
    retention,
)
from zarr_manifests.progress import counted, expect, tell
from zarr_manifests.reports import CollectionReport
from zarr_manifests.runtime import Run, Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import KeepsTemporaryFiles, ObjectInfo
from zarr_manifests.versions import milliseconds

_ATTEMPTS = 100
_BATCH = 1_000
# Chunks first and snapshots last: an object goes before those that lead to it.
KINDS: Final = (
    "chunks",
    "reports",
    "manifests",
    "indexes",
    "bundles",
    "pages",
    "history",
    "deltas",
    "nodes",
    "snapshots",
)
_TEMP_AGE_MS: Final = 24 * 3_600_000


def collect(context: Context, grace_ms: int, *, dry_run: bool, run: Run = map) -> CollectionReport:
    """Delete objects that nothing reaches and no writer can refer to any more; `run` deletes.

    Raises
    ------
    CorruptObjectError
        If something that is reached cannot be read; nothing was deleted.
    FencedError
        If another collection has begun in the meantime; it goes on with the rest.
    """
    root = _begin(context, context.roots.read(), grace_ms, dry_run=dry_run)
    marks = mark(context, root)
    dead, waiting = _find_dead(context, root, marks.marked)
    if not dry_run:
        keys = [info.key for info in dead]
        _delete(context, keys, root.epochs[COLLECTOR], run)
        _remove_temporary(context)
        _end(context, root.epochs[COLLECTOR])
        keep_reserve(context.storage)
    by_kind: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for info in dead:
        kind = info.key.partition("/")[0]
        by_kind[kind] += 1
        nbytes[kind] += info.nbytes
    return CollectionReport(
        len(marks.marked),
        dict(by_kind),
        dict(nbytes),
        dry_run,
        len(waiting),
        sum(info.nbytes for info in waiting),
        marks.held_by,
        _utc(context.runtime.now_ms() + grace_ms) if waiting else None,
    )


# --- the two swaps -----------------------------------------------------------------------------


def _begin(context: Context, before: RootAt, grace_ms: int, *, dry_run: bool) -> Root:
    """Raise the fence; return the new root, archived."""
    now_ms = context.runtime.now_ms()
    old_enough = _written_by(context, before.root, now_ms - grace_ms) if grace_ms > 0 else 0

    def change(root: Root) -> Root:
        version = root.version + 1
        fence = max(root.fence, old_enough) if grace_ms > 0 else version
        expired = [lease.name for lease in context.roots.leases(root) if lease.expires_ms <= now_ms]
        epochs = claimed(root, COLLECTOR)
        left = without(root, *expired)
        return replace(left, fence=fence, collected=version, epochs=epochs)

    if dry_run:
        return replace(change(before.root), version=before.root.version + 1)
    at = updated(context, change, "collect garbage")
    with_reserve(context.storage, partial(context.roots.archive, at))
    # If the answer was lost, others may have moved refs meanwhile, which can be restored.
    version = at.root.collected
    return at.root if at.root.version == version else context.roots.archived(version)


def _written_by(context: ReadContext, root: Root, ms: int) -> int:
    """The newest version of the root that was written by then; 0 if none is known."""
    logged = [entry.version for entry in root.log if entry.at_ms <= ms]
    versions = [] if logged else archived_versions(context.storage)
    with suppress(ObjectNotFoundError):  # another collection is removing the oldest archives
        old = bisect_right(versions, ms, key=lambda v: context.roots.archived(v).written_ms)
        return max(logged or versions[:old], default=0)
    return 0


def _end(context: Context, epoch: int) -> None:
    """Log the end; refused if another collection has begun in the meantime."""

    def change(root: Root) -> Root:
        check_collector(root, epoch)
        return root

    updated(context, change, "end collection")


def updated(context: Context, change: Callable[[Root], Root], what: str) -> RootAt:
    """Swap in the changed root, on a full disk with the reserve."""
    update = context.roots.update
    return with_reserve(context.storage, partial(update, change, what, "", "", _ATTEMPTS))


# --- what is alive -----------------------------------------------------------------------------


class Marks(Struct, frozen=True):
    """Keys of everything the root reaches; and tags and leases with older snapshots."""

    marked: set[str]
    held_by: Mapping[str, datetime | None]


def mark(context: ReadContext, root: Root) -> Marks:
    """Mark everything the root reaches.

    If an index or a page of history cannot be read, all of its kind count as reached.

    Raises
    ------
    CorruptObjectError
        If anything else cannot be read.
    """
    whole = context.roots.whole(root)
    snapshots: dict[str, BlobRef] = {}
    holders: dict[str, str] = {}
    for ref, _, holder in live_snapshots(context, whole):
        snapshots[ref.key] = ref
        holders.setdefault(ref.key, holder)  # a branch comes first
    marked = _reached(context, snapshots, whole.branches.values())
    leases = sorted(whole.leases, key=lambda lease: lease.expires_ms)
    until = {lease_name(lease): _utc(lease.expires_ms) for lease in leases}
    heads = {branch.head.key for branch in whole.branches.values()}
    held = {lease_name(one) for one in leases if snapshot_key(one.snapshot) not in heads}
    held_by = {one: until.get(one) for one in sorted({*holders.values(), *held} - {""})}
    marked |= {page.blob.key for page in root.pages}
    return Marks(marked, held_by)


def _utc(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _reached(
    context: ReadContext, snapshots: Mapping[str, BlobRef], branches: Iterable[Branch]
) -> set[str]:
    """Keys of all that these lead to."""
    reached: set[str] = set()
    lost: set[str] = set()

    def load(link: Link) -> Any:
        # A page of entries or a zone map has no pointers to mark.
        if link.kind is Zones or (link.page is not None and link.page.level == 0):
            return None
        try:
            return context.objects.load(link.ref.bare(), link.kind)
        except (CorruptObjectError, UnsupportedFormatError):
            if link.page is None and link.kind not in (IndexDirectory, ZonePages):
                raise
            lost.add(link.ref.key.partition("/")[0])
            return None

    for _, value in follow(context.runtime, snapshots, branches, load, reached, "marking"):
        for table in tables(value):
            reached |= native_keys(table)
    for kind in lost:
        reached |= {info.key for info in context.storage.list(f"{kind}/")}
    return reached


# --- what is dead ------------------------------------------------------------------------------


def _find_dead(
    context: ReadContext, root: Root, marked: set[str]
) -> tuple[list[ObjectInfo], list[ObjectInfo]]:
    """What can be deleted, and what nothing reaches either, but whose writers may still commit."""
    leased = leased_lineages(context.roots.leases(root))
    dead, waiting = [], []
    listed = chain.from_iterable(context.storage.list(f"{kind}/") for kind in KINDS)
    for info in counted("looking at objects", listed):
        if is_dead(info.key, marked, root.fence, leased):
            dead.append(info)
        elif is_dead(info.key, marked, root.version + 1, ()):
            waiting.append(info)
    if any(info.key.startswith("pages/") for info in dead):
        kept = _archived_pages(context, root)
        dead = [info for info in dead if info.key not in kept]
    return [*dead, *_old_archives(context, root)], waiting


def _archived_pages(context: ReadContext, root: Root) -> set[str]:
    """Keys of the pages that kept archives refer to: an archive is incomplete without them."""
    first = first_archive_kept(root.version, root.fence)
    kept = [version for version in archived_versions(context.storage) if version >= first]

    def pages(version: int) -> set[str]:
        with suppress(ObjectNotFoundError):
            return {page.blob.key for page in context.roots.archived(version).pages}
        return set()

    return set().union(*context.runtime.parallel([partial(pages, v) for v in kept]))


def _old_archives(context: ReadContext, root: Root) -> list[ObjectInfo]:
    first = archive_key(first_archive_kept(root.version, root.fence))
    return [*takewhile(lambda info: info.key < first, context.storage.list("root/"))]


def _delete(context: Context, keys: Sequence[str], epoch: int, run: Run) -> None:
    """Delete the objects, one kind after the other, as long as the epoch is ours."""
    delete = partial(_delete_batch, context.storage, context.runtime, context.repository_id, epoch)
    done = 0
    expect("deleting", len(keys))
    for _, due in groupby(keys, lambda key: key.partition("/")[0]):
        for count in run(delete, [*batched(due, _BATCH)]):
            done += count
            tell("deleting", done)


def _delete_batch(
    storage: Storage, runtime: Runtime, repository_id: str, epoch: int, keys: Sequence[str]
) -> int:
    roots = RootReader(storage, runtime)
    roots.share(ObjectReader(storage, runtime), repository_id)
    check_collector(roots.read().root, epoch)
    storage.delete_many(keys)
    return len(keys)


def _remove_temporary(context: Context) -> None:
    storage = unmetered(context.storage)
    if isinstance(storage, KeepsTemporaryFiles):
        storage.remove_temporary(context.runtime.now_ms() - _TEMP_AGE_MS)


# --- expiry -------------------------------------------------------------------------------------


_LOG = logging.getLogger(__name__)


def expire(context: Context, retention: Retention, *, dry_run: bool) -> CollectionReport:
    """Cut the history of every branch as the retention says."""
    report = CollectionReport()

    def change(root: Root) -> Root:
        nonlocal report
        whole = context.roots.whole(root)
        leased = frozenset(lease.snapshot for lease in whole.leases)
        lines = {
            name: _line(context, branch, retention, leased)
            for name, branch in whole.branches.items()
        }
        kept = {name: kept_count(line, retention, leased) for name, line in lines.items()}
        held = _held_elsewhere(whole, lines, leased)
        if held is not None and any(kept[name] < len(line) for name, line in lines.items()):
            _LOG.warning("nothing expires yet: %s is leased, and in no branch's history", held)
            kept = {name: len(line) for name, line in lines.items()}
        ids = {name: tuple(aged.snapshot_id for aged in line) for name, line in lines.items()}
        expired = {name: line[kept[name] :] for name, line in ids.items() if line[kept[name] :]}
        report = CollectionReport(expired=expired, versions=kept, dry_run=dry_run)
        branches = {
            name: replace(branch, floor=ids[name][kept[name] - 1])
            for name, branch in whole.branches.items()
        }
        return replace(whole, branches=branches) if expired else root

    opened(lambda: change(context.roots.read().root))
    if report.expired and not dry_run:
        updated(context, change, "expire snapshots")
        keep_reserve(context.storage)  # for the collection that follows
    return report


def _line(
    context: ReadContext, branch: Branch, retention: Retention, leased: Set[str]
) -> list[Aged]:
    """The history of a branch, newest first; what leaves it is read only if it may be leased."""
    line: list[Aged] = []
    for ref, snapshot in ancestors(context, branch.head, branch.floor):
        if line and not (leased or retention.keeps(len(line), snapshot.written_ms)):
            found = entries(context, ref, branch.floor)
            return line + [Aged(one.snapshot_id, one.written_ms) for one in found]
        line.append(Aged(snapshot_id_of(ref.key), snapshot.written_ms))
    return line


def _held_elsewhere(
    whole: Root, lines: Mapping[str, Sequence[Aged]], leased: Set[str]
) -> str | None:
    """A leased snapshot that may be in a tag's history only, which would be lost; else None."""
    if has_expired(whole):
        return None  # tags have already lost their history
    of_branches = {aged.snapshot_id for line in lines.values() for aged in line}
    of_tags = {snapshot_id_of(ref.key) for ref in whole.tags.values()}
    return min(leased - of_branches - of_tags, default=None)


# --- all in one call ----------------------------------------------------------------------------


_MIN_LIVE = 0.5


def clean(
    context: Context, keep: int | timedelta | None, grace: timedelta, *, dry_run: bool
) -> CollectionReport:
    """Expire all but the snapshots to keep (a count, an age, or as configured), and collect."""
    by_age = keep if isinstance(keep, timedelta) else None
    by_count = None if isinstance(keep, timedelta) else keep
    now_ms = context.runtime.now_ms()
    kept = retention(context.config.snapshots, now_ms, by_count, by_age)
    grace_ms = milliseconds(grace, "grace")
    due, compacted = expire(context, kept, dry_run=True), list[str]()
    for name, count in due.versions.items():
        try:
            if not _holds(context, name, count):
                continue
            if not dry_run:
                repack_chunks(context, name, _MIN_LIVE, dry_run=False)
                compact(context, name, "full", dry_run=False)
            compacted.append(name)
        except (NotFoundError, StorageFullError) as error:
            # Others have deleted the branch; or there is room after the collection, for the next.
            _LOG.warning("branch %s of %s is not compacted: %s", name, context.storage.url, error)
    if not dry_run:
        if kept.keep_last is not None and kept.keep_last > 1:  # compactions are no versions
            more = max((_compactions(context, name) for name in compacted), default=0)
            kept = replace(kept, keep_last=kept.keep_last + more)
        due = expire(context, kept, dry_run=False)
    found = collect(context, grace_ms, dry_run=dry_run)
    return replace(found, expired=due.expired, versions=due.versions, compacted=tuple(compacted))


def _holds(context: Context, branch: str, kept: int) -> bool:
    """Whether a branch holds chunks that none of its `kept` newest snapshots reads."""
    view = _head(context, branch)
    oldest = view.snapshot.sequence - kept + 1
    alive = {node.node_id for node in view.nodes.values()}
    old = [entry for entry in view.snapshot.deltas if entry.first <= oldest]
    parts = chain.from_iterable(
        [*(e.parts() for e in old), *(m.parts for m in view.pages.manifests())]
    )
    return any(map(_overwrites, old)) or any(part.node_id not in alive for part in parts)


def _compactions(context: Context, branch: str) -> int:
    """How many of the newest snapshots of a branch are compactions."""
    with suppress(NotFoundError):
        newest = ancestors(context, _head(context, branch).ref)
        return sum(1 for _ in takewhile(lambda each: each[1].kind is CommitKind.REWRITE, newest))
    return 0


def _head(context: Context, branch: str) -> SnapshotView:
    return context.open_branch(context.roots.branch(context.roots.read().root, branch))


def _overwrites(entry: DeltaEntry) -> bool:
    """Whether chunks were there before that it has changed, as far as is known."""
    rows = sum(part.count for part in entry.parts())
    return rows != sum(count.chunks for count in entry.counts)
