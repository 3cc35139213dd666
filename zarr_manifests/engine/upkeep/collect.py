"""Garbage collection, safe beside concurrent writers and readers, without trust in clocks.

1. One swap raises the fence, removes expired leases, and notes that a collection has begun. From
   then on, a session that began before the fence and holds no lease cannot commit. The new root is
   archived before anything is deleted, so that `recover` first finds a root that needs none of it.
2. Everything that this root reaches is marked. If anything cannot be read, nothing is deleted.
3. Dead objects are unmarked objects of sessions behind the fence that hold no lease. They are found
   through the pending snapshots, and by listing objects: from `swept` on, or all of them every
   tenth time.
4. Dead objects are deleted: chunks first and snapshots last, so that after a crash the objects that
   lead to the rest still exist.
5. Another swap notes what was done: it advances `swept` and removes the pending snapshots.

Why a dead object stays dead: a later commit refers only to objects of its own session, which began
at the fence or later or holds a lease, and to objects that its parent reaches. The parent is a
snapshot that was in history after the first swap, or a newer one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import batched, chain
from typing import Any, Final

from zarr_manifests.engine.history.ancestry import ancestors, snapshot_at, tag_floor
from zarr_manifests.engine.history.left_behind import Link, archived_versions, follow, tables
from zarr_manifests.engine.objects.metadata import ObjectReader
from zarr_manifests.engine.root.create import keep_reserve, with_reserve
from zarr_manifests.engine.root.epochs import check_collector, claimed
from zarr_manifests.engine.root.roots import RootAt, RootReader
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.errors import CorruptObjectError, ObjectNotFoundError, UnsupportedFormatError
from zarr_manifests.format.chunk_table import RefKind, native_keys
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import COLLECTOR, Lease, PendingDeletion, Root, archive_key
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.format.zone_maps import IndexDirectory, ZonePages, Zones
from zarr_manifests.ids import snapshot_key
from zarr_manifests.planning.upkeep.garbage import (
    choose_fence,
    first_archive_kept,
    is_dead,
    leased_lineages,
    nothing_left_since,
    search_start,
    swept_after,
)
from zarr_manifests.progress import counted, expect, tell
from zarr_manifests.reports import CollectionReport
from zarr_manifests.runtime import Run, Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import unmetered
from zarr_manifests.storage.protocol import KeepsTemporaryFiles, ObjectInfo

_ATTEMPTS = 100
_BATCH = 1_000
# Chunks first and snapshots last: an object goes before those that lead to it.
KINDS: Final = (
    "chunks",
    "reports",
    "manifests",
    "indexes",
    "digests",
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
    before = context.roots.read()
    root = _begin(context, before, grace_ms, dry_run=dry_run)
    removed = len(context.roots.leases(before.root)) - len(context.roots.leases(root))
    marks = _mark(context, root)
    marked, alone = marks.marked, marks.alone
    found, waiting = _find_dead(context, root, marks)
    dead = sorted(found.values(), key=lambda info: info.key)
    archives = _old_archives(context, root)
    temporary = 0
    if not dry_run:
        keys = [info.key for info in (*dead, *archives)]
        _delete(context, keys, root.epochs[COLLECTOR], run)
        temporary = _remove_temporary(context)
        _end(context, root, alone=alone)
        keep_reserve(context.storage)
    by_kind: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for info in (*dead, *archives):
        kind = info.key.partition("/")[0]
        by_kind[kind] += 1
        nbytes[kind] += info.nbytes
    return CollectionReport(
        root.fence,
        len(marked),
        dict(by_kind),
        dict(nbytes),
        max(0, removed),
        temporary,
        _from(root) == 0,
        dry_run,
        len(waiting),
        sum(info.nbytes for info in waiting),
        marks.held_by,
        marks.held_nbytes,
        _utc(context.runtime.now_ms() + grace_ms) if waiting else None,
    )


# --- the two swaps -----------------------------------------------------------------------------


def _begin(context: Context, before: RootAt, grace_ms: int, *, dry_run: bool) -> Root:
    """Raise the fence; return the new root, archived."""
    now_ms = context.runtime.now_ms()

    def change(root: Root) -> Root:
        version = root.version + 1
        times = _times(context, root, now_ms - grace_ms)
        fence = choose_fence(times, version, now_ms, grace_ms, root.fence)
        expired = {lease.name for lease in context.roots.leases(root) if lease.expires_ms <= now_ms}
        hidden = root.deleted_leases
        if root.pages.get("leases"):
            hidden = tuple(dict.fromkeys((*hidden, *sorted(expired))))
        return replace(
            root,
            leases=tuple(lease for lease in root.leases if lease.name not in expired),
            deleted_leases=hidden,
            fence=fence,
            collected=version,
            epochs=claimed(root, COLLECTOR),
        )

    if dry_run:
        return replace(change(before.root), version=before.root.version + 1)
    at = updated(context, change, "collect garbage")
    with_reserve(context.storage, partial(context.roots.archive, at))
    return at.root


def _end(context: Context, begun: Root, *, alone: bool) -> None:
    """Note what was done; refused if another collection has begun in the meantime.

    `alone` says whether only leases keep some snapshots: these may be of any age and are not
    listed.
    """
    leases = context.roots.leases(begun)
    done = set(begun.pending)

    def change(root: Root) -> Root:
        check_collector(root, begun.epochs[COLLECTOR])
        swept = root.swept
        if not alone and nothing_left_since(root, begun.version):
            swept = max(swept, swept_after(begun.fence, leases))
        counters = dict(root.counters)
        counters["collections"] = counters.get("collections", 0) + 1
        pending = tuple(piece for piece in root.pending if piece not in done)
        return replace(root, swept=swept, pending=pending, counters=counters)

    updated(context, change, "end collection")


def updated(context: Context, change: Callable[[Root], Root], what: str) -> RootAt:
    """Swap in the changed root, on a full disk with the reserve."""
    update = context.roots.update
    return with_reserve(context.storage, partial(update, change, what, "", "", _ATTEMPTS))


def _times(context: ReadContext, root: Root, cutoff_ms: int) -> Iterator[tuple[int, int]]:
    """Versions of the root and when they were written, newest first.

    Of the versions that only archives know, it has just the newest one written by `cutoff_ms`.
    """
    yield root.version, root.written_ms
    for entry in reversed(root.log):
        yield entry.version, entry.at_ms
    oldest = root.log[0].version if root.log else root.version
    versions = [v for v in archived_versions(context.storage) if v < oldest]

    def written_ms(version: int) -> int:
        return context.roots.archived(version).written_ms

    try:
        found = bisect_right(versions, cutoff_ms, key=written_ms)
        if found:
            yield versions[found - 1], cutoff_ms
    except ObjectNotFoundError:
        return  # another collection is removing them: the fence stays for now


# --- what is alive -----------------------------------------------------------------------------


def live_snapshots(context: ReadContext, whole: Root) -> Iterator[tuple[BlobRef, Snapshot, str]]:
    """All snapshots that branches, tags and leases reach; some more than once.

    With each comes what holds it: nothing for a branch, else the tag or the lease.
    """
    starts = [("", branch.head, branch.floor) for branch in whole.branches.values()]
    starts += [(f"tag {n!r}", ref, tag_floor(whole, ref)) for n, ref in whole.tags.items()]
    seen: set[tuple[str, str | None]] = set()
    reached: set[str] = set()
    for holder, start, floor in starts:
        if (start.key, floor) in seen:
            continue
        seen.add((start.key, floor))
        for ref, snapshot in ancestors(context, start, floor):
            reached.add(ref.key)
            yield ref, snapshot, holder
    for lease in whole.leases:
        if snapshot_key(lease.snapshot) not in reached:
            yield *_leased(context, lease), _name_of(lease)


def _leased(context: ReadContext, lease: Lease) -> tuple[BlobRef, Snapshot]:
    """The snapshot of a lease that no branch or tag reaches any more."""
    try:
        return snapshot_at(context, lease.snapshot)
    except ObjectNotFoundError as error:
        key = snapshot_key(lease.snapshot)
        raise CorruptObjectError(f"{key} is leased and not there") from error


@dataclass(frozen=True, slots=True)
class _Marks:
    """Keys of everything the root reaches.

    `past` are pages of history about expired snapshots only, which live snapshots still name.
    `alone` says whether only leases keep some snapshots. `held_by` are tags and leases with
    older snapshots, and `held_nbytes` the bytes of chunks that no branch needs.
    """

    marked: set[str]
    past: Mapping[str, Link]
    alone: bool
    held_by: Mapping[str, datetime | None]
    held_nbytes: int


def _mark(context: ReadContext, root: Root) -> _Marks:
    """Mark everything the root reaches.

    If an index or a page of history cannot be read, all of its kind count as reached.
    """
    whole = context.roots.whole(root)
    marked: set[str] = set()
    starts: dict[str, Link] = {}
    holders: dict[str, str] = {}
    for ref, _, holder in live_snapshots(context, whole):
        starts[ref.key] = Link(ref, Snapshot)
        holders.setdefault(ref.key, holder)  # a branch comes first
    others = [link for key, link in starts.items() if holders[key]]
    of_branches = [link for key, link in starts.items() if not holders[key]]
    past, _ = _follow(context, starts, of_branches, marked, "marking")
    more: dict[str, Link] = {}
    held_nbytes = 0
    if others:
        stage = "marking what tags and leases keep"
        more, held_nbytes = _follow(context, starts, others, marked, stage)
    leases = sorted(whole.leases, key=lambda lease: lease.expires_ms)
    until = {_name_of(lease): _utc(lease.expires_ms) for lease in leases}
    heads = {branch.head.key for branch in whole.branches.values()}
    held = {_name_of(one) for one in leases if snapshot_key(one.snapshot) not in heads}
    alone = not {*holders.values()}.isdisjoint(until)
    held_by = {one: until.get(one) for one in sorted({*holders.values(), *held} - {""})}
    marked |= {page.blob.key for pages in root.pages.values() for page in pages}
    indexes = {b.index.key: b.index for b in whole.branches.values() if b.index is not None}
    for pointer in indexes.values():
        marked |= _index_keys(context, pointer)
    return _Marks(marked, past | more, alone, held_by, held_nbytes)


def _name_of(lease: Lease) -> str:
    return f"lease of {lease.owner or lease.session}"


def _utc(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _follow(
    context: ReadContext,
    starts: Mapping[str, Link],
    links: Sequence[Link],
    marked: set[str],
    stage: str,
) -> tuple[dict[str, Link], int]:
    """Mark what some of the snapshots lead to.

    Returns the pages of history before all of them, by key, and the bytes of chunks, by tables with
    objects that were not marked before.
    """
    past: dict[str, Link] = {}
    nbytes = 0
    lost: list[Link] = []

    def load(link: Link) -> Any:
        if _leads_nowhere(link):
            return None
        try:
            return context.objects.load(link.ref, link.kind)
        except (CorruptObjectError, UnsupportedFormatError):
            if link.page is None:
                raise
            lost.append(link)
            return None

    def wanted(link: Link) -> bool:
        if link.is_within(starts):
            return True
        past[link.ref.key] = link
        return False

    found = follow(context.runtime, links, load, marked, wanted, stage)
    for _, value in found:
        for table in tables(value):
            keys = native_keys(table)
            if not keys <= marked:
                nbytes += int(table.length[table.kind == RefKind.NATIVE].sum())
            marked |= keys
    if lost:
        marked |= {info.key for info in context.storage.list("history/")}
    return past, nbytes


def _leads_nowhere(link: Link) -> bool:
    """Whether it need not be read: a page of entries or a zone map, without pointers to mark."""
    return link.kind is Zones or (link.page is not None and link.page.level == 0)


def _index_keys(context: ReadContext, pointer: BlobRef) -> set[str]:
    """Keys of an index; if it cannot be read, of all indexes, since no reader depends on one."""
    try:
        directory = context.objects.load(pointer, IndexDirectory)
        zones = [(ref, ZonePages) for ref in directory.zones.values()]
        pages = context.objects.load_all(zones).values()
    except (CorruptObjectError, UnsupportedFormatError):
        return {info.key for info in context.storage.list("indexes/")}
    blobs = (*directory.zones.values(), *(b for p in pages for b in p.blobs))
    return {pointer.key, *(blob.key for blob in blobs)}


# --- what is dead ------------------------------------------------------------------------------


def _from(root: Root) -> int:
    return search_start(root.swept, root.counters.get("collections", 0))


def _find_dead(
    context: ReadContext, root: Root, marks: _Marks
) -> tuple[dict[str, ObjectInfo], list[ObjectInfo]]:
    """The dead objects, and others that nothing reaches, whose writers may still commit."""
    marked = marks.marked
    leased = leased_lineages(context.roots.leases(root))
    found: dict[str, ObjectInfo] = {}
    waiting = []
    start = _from(root)
    for info in counted("looking at objects", _since(context, start)):
        if is_dead(info.key, marked, root.fence, leased):
            found[info.key] = info
        elif is_dead(info.key, marked, root.version + 1, ()):
            waiting.append(info)
    if start > 0:
        keys = _pending_keys(context, root.pending, marks) - found.keys()
        due = [key for key in sorted(keys) if is_dead(key, marked, root.fence, leased)]
        found |= _sizes(context, due)
    pages = {key for key in found if key.startswith("pages/")}
    if pages:
        for key in _archived_pages(context, root):
            found.pop(key, None)
    return {key: info for key, info in found.items() if info.nbytes >= 0}, waiting


def _since(context: ReadContext, start: int) -> Iterator[ObjectInfo]:
    """The objects of sessions that did not begin before `start`."""
    for kind in KINDS:
        yield from context.storage.list(f"{kind}/", after=f"{kind}/{start:012d}")


def _sizes(context: ReadContext, keys: Sequence[str]) -> Iterator[tuple[str, ObjectInfo]]:
    calls = (partial(_sized, context, key) for key in keys)
    sized = chain.from_iterable(map(context.runtime.parallel, batched(calls, _BATCH)))
    stage = "looking at objects that have expired"
    yield from zip(keys, counted(stage, sized, len(keys)), strict=True)


def _sized(context: ReadContext, key: str) -> ObjectInfo:
    try:
        return context.storage.head(key)
    except ObjectNotFoundError:
        return ObjectInfo(key, -1, 0)  # deleted by an earlier collection that was then killed


def _pending_keys(
    context: ReadContext, pending: Iterable[PendingDeletion], marks: _Marks
) -> set[str]:
    """Keys of everything that pending snapshots reach, without what the root reaches."""
    found: set[str] = set()

    def load(link: Link) -> Any:
        if _leads_nowhere(link):
            return None
        try:
            return context.objects.load(link.ref, link.kind)
        except CorruptObjectError:
            return None  # deleted already, or damaged: a full listing finds what it led to

    gone: dict[str, Link] = {}
    for piece in pending:
        ref: BlobRef | None = piece.newest
        for _ in counted("following what has expired", range(piece.count)):
            if ref is None:
                break
            gone[ref.key] = Link(ref, Snapshot)
            snapshot = load(gone[ref.key])
            ref = None if snapshot is None else snapshot.parent

    def wanted(link: Link) -> bool:
        return link.is_within(gone)

    starts = [*gone.values(), *marks.past.values()]
    stage = "looking at what has expired"
    reached = follow(context.runtime, starts, load, {*marks.marked}, wanted, stage)
    for link, value in reached:
        found.add(link.ref.key)
        for table in tables(value):
            found |= native_keys(table)
    return found


def _archived_pages(context: ReadContext, root: Root) -> set[str]:
    """Keys of the pages that kept archives refer to: an archive is incomplete without them."""
    first = first_archive_kept(root.version, root.fence)
    kept = [version for version in archived_versions(context.storage) if version >= first]

    def pages(version: int) -> set[str]:
        try:
            archived = context.roots.archived(version)
        except ObjectNotFoundError:
            return set()
        return {page.blob.key for refs in archived.pages.values() for page in refs}

    return set().union(*context.runtime.parallel([partial(pages, v) for v in kept]))


def _old_archives(context: ReadContext, root: Root) -> list[ObjectInfo]:
    first = archive_key(first_archive_kept(root.version, root.fence))
    found = []
    for info in context.storage.list("root/"):
        if info.key >= first:
            break
        found.append(info)
    return found


def _delete(context: Context, keys: Iterable[str], epoch: int, run: Run) -> None:
    """Delete the objects, one kind after the other, as long as the epoch is ours."""
    groups: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for key in keys:
        groups.setdefault(key.partition("/")[0], []).append(key)
    delete = partial(_delete_batch, context.storage, context.runtime, context.repository_id, epoch)
    done = 0
    expect("deleting", sum(map(len, groups.values())))
    for due in groups.values():
        batches = [due[at : at + _BATCH] for at in range(0, len(due), _BATCH)]
        for count in run(delete, batches):
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


def _remove_temporary(context: Context) -> int:
    storage = unmetered(context.storage)
    if not isinstance(storage, KeepsTemporaryFiles):
        return 0
    return storage.remove_temporary(context.runtime.now_ms() - _TEMP_AGE_MS)
