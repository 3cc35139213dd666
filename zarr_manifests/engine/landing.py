"""How a new version reaches its branch: commits, merges, compactions and repackings alike.

1. For exactly the root that is about to be replaced, the writer says what comes next (`make`):
   whether it may still land, and its snapshot on the branch's head.
2. One upload round: everything that is not stored yet, the archive of the root that is about to be
   replaced, and what else has to be durable. All must have succeeded before the next step.
3. One compare-and-swap of the root (`roots`). Nothing else makes the version visible. If somebody
   else's swap came first, all is done again on the new head; nothing is uploaded twice.

Every snapshot says the same of its ancestors: what its parent says, and an entry of that one. The
marks of applications are compared on each attempt, with those of the very snapshot that it replaces
or builds on, before anything else is checked. That a version is committed is said only of a root
that was read after the commit was called, and that is durable.

Entries of zone maps that a commit writes or carries along
----------------------------------------------------------

A commit writes one object with the entries of the chunks that it sets. Invariant: it writes no
entry of another chunk, as far as the chunks are in memory. Nothing depends on this, since readers
compare addresses; it keeps useless entries from being stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, groupby
from typing import Any, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import snapshot_at
from zarr_manifests.engine.change_set import ChangeSet, Rows
from zarr_manifests.engine.objects import SessionKeys, Upload
from zarr_manifests.engine.refs import mark_of, marks_of, snapshot_of
from zarr_manifests.engine.roots import RootAt, opened
from zarr_manifests.engine.view import BUNDLES, Context, ReadContext, SnapshotView, opening_kind
from zarr_manifests.engine.zones import KnownZones
from zarr_manifests.errors import (
    Conflict,
    ConflictError,
    ConflictKind,
    CorruptObjectError,
    ObjectNotFoundError,
    TransactionAlreadyCommitted,
    TransactionGapError,
)
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import Bundle, Delta, Manifest, ManifestRef, Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import ROOT_KEY, Branch, LogEntry, Root, leaving
from zarr_manifests.format.snapshot import (
    MOST_IN_SNAPSHOT,
    CommitKind,
    History,
    HistoryPage,
    HistoryPageRef,
    MarksPage,
    Snapshot,
)
from zarr_manifests.format.zone_maps import PAGE_ROWS, Zones, ZoneTable
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.conflict import NO_MARK, MarkStep, Txn, moved_marks, shown
from zarr_manifests.planning.garbage import (
    are_a_page,
    bundle_from,
    coordinate_ids,
    pages_to_merge,
    pages_to_roll,
    parts,
)
from zarr_manifests.planning.meaning import merged, sort_of, taken, valid
from zarr_manifests.planning.merge import rearranged
from zarr_manifests.planning.packing import plan_embedding
from zarr_manifests.runtime import one_by_one


def zones_upload(
    zones_of: Callable[[bytes], Iterable[ZoneTable]],
    tables: Mapping[bytes, Sequence[Rows]],
    keys: SessionKeys,
) -> Upload | None:
    """The object with the entries that describe chunks in these tables, by node.

    `zones_of` has the entries of a node. None if there are none.
    """
    kept = ChangeSet()
    for node_id, each in tables.items():
        here = [rows for rows in each if isinstance(rows, ChunkTable)]
        found = zones_of(node_id)
        if len(here) == len(each):  # else their chunks may be in those that are not in memory
            found = (taken(z, np.any([valid(z, rows) for rows in here], axis=0)) for z in found)
        for _, some in groupby(found, sort_of):
            for part in parts(filter(len, some), len, PAGE_ROWS):
                kept.add_zones(node_id, merged(part))
    packed = [(node, one) for node, some in kept.packed_zones().items() for one in some]
    return Upload.of(keys, "indexes", Zones(tuple(packed)).encode()) if packed else None


def take_zones(context: ReadContext, changes: ChangeSet, snapshot: Snapshot) -> None:
    """Add the entries of a snapshot's own commit to changes that have some of its chunks."""
    entry = snapshot.deltas[-1] if snapshot.deltas else None
    if entry is None or entry.zones is None or entry.log.key != snapshot.log.key:
        return
    known = KnownZones.of(context, [entry])
    changes.take_zones(
        {node: [zones.pack() for zones in known.recent_of(node)] for node in changes.touched()}
    )


def moved(changes: ChangeSet, node_id: bytes, axis: int, first: int, steps: int) -> None:
    """Move the entries of chunks from `first` on along an axis, as their chunks have been moved."""
    before = [*changes.zones_of(node_id)]
    changes.zones.pop(node_id, None)
    for zones in before:
        coords = zones.coords().copy()
        coords[:, axis] += np.where(coords[:, axis] >= first, steps, 0)
        addresses = rearranged(zones.addresses, np.ones(len(zones), np.bool_), coords)
        assert addresses is not None  # no table is empty
        bounds = zones.bounds.take(np.lexsort(coords.T[::-1]))
        changes.add_zones(node_id, ZoneTable(zones.meaning, addresses, bounds))


# --- landing ------------------------------------------------------------------------------------


_LOG = logging.getLogger("zarr_manifests.operations")
_HISTORY: Final = "history"
_QUICK_BYTES: Final = 4 << 20
"""Up to this many bytes are written in the round of the writer's turn."""


class NextVersion(Struct, frozen=True):
    """What an attempt puts on a branch; `land` gives it its id, its history and a bundle.

    Parameters
    ----------
    after : SnapshotView
        The snapshot that it comes after.
    snapshot : Snapshot
        Everything else that it says.
    uploads : sequence of Upload
        What it refers to; what is stored already is not uploaded again.
    tip : Branch, optional
        The branch that moves there, if it has changed otherwise.
    base : Upload, optional
        Its base, if that is new.
    pages : tuple of HistoryPageRef, optional
        Pages to have in place of those of `after`.
    left : str, optional
        Id of the head that it replaces, if it amends one.
    """

    after: SnapshotView
    snapshot: Snapshot
    uploads: Sequence[Upload]
    tip: Branch | None = None
    base: Upload | None = None
    pages: tuple[HistoryPageRef, ...] | None = None
    left: str | None = None


class Landed(Struct, frozen=True):
    """A version that has landed: the root that holds it, and its snapshot."""

    at: RootAt
    head: BlobRef
    snapshot: Snapshot


def land(
    context: Context,
    branch: str,
    keys: SessionKeys,
    on: SnapshotView,
    make: Callable[[Root], NextVersion | None],
    uploads: Sequence[Upload],
    what: tuple[str, str],
    attempts: int,
    *,
    pending: list[Callable[[], object]] | None = None,
    nbytes: int = 0,
) -> Landed | None:
    """Put a new version on the branch: upload, swap; repeat if others come first.

    Parameters
    ----------
    context : Context
        The repository.
    branch : str
        The branch.
    keys : SessionKeys
        Names new objects, and knows which are written.
    on : SnapshotView
        The head that the version was made on. If the branch is known to have moved since, the root
        is read first.
    make : callable
        The version, as of a root, with the branch if it is still there; it is called on every
        attempt. None if nothing is to land any more.
    uploads : sequence of Upload
        Those that do not depend on the head.
    what : tuple of str
        The operation, and what to do if others come first too often.
    attempts : int
        How often the swap is tried.
    pending : list of callable, optional
        What else must be done before the swap; `make` may add to it.
    nbytes : int
        How much that writes.

    Raises
    ------
    ConflictError
        If others came first too often.
    CommitOutcomeUnknownError
        If it cannot be determined whether the swap took effect.
    """
    roots, turns = context.roots, context.storage.capabilities.turns
    pending = [] if pending is None else pending
    placed: list[tuple[Snapshot, BlobRef]] = []

    def upload(
        uploads: Sequence[Upload], *besides: Callable[[], object], abreast: bool = True
    ) -> None:
        due = [upload for upload in uploads if not keys.has_written(upload.key)]
        calls = [*pending, *besides]
        calls += [partial(context.objects.create, each.key, each.data) for each in due]
        # While others wait for their turn, another thread for one of two calls takes longer.
        _upload(context, calls, abreast and len(calls) > 2 * turns)
        pending.clear()
        for each in due:
            keys.note_written(each.key, each.data)

    def attempt(at: RootAt) -> tuple[Root, bytes] | None:
        placed.clear()
        root = roots.with_branch(at.root, branch)
        version = make(root)
        if version is None:
            return None
        snapshot, made = _placed(context, version, keys)
        upload([*version.uploads, *made], *roots.archiving(at))
        placed.append((snapshot, made[-1].ref))
        return _root_with(context, root, branch, version, snapshot, made[-1]), snapshot.commit_id

    # Before the turn, so that others wait less; if there is a wait, one by one, since more threads
    # would only slow the others down.
    if turns and nbytes + sum(len(each.data) for each in uploads) > _QUICK_BYTES:
        upload(uploads)
    with roots.turn(partial(upload, uploads, abreast=False) if turns else lambda: None) as held:
        at = roots.latest
        seen = roots.with_branch(at.root, branch).branches.get(branch)
        # A branch that has moved may move again; during our turn it cannot.
        known = at if not held and seen is not None and seen.head.key == on.ref.key else None
        at = roots.swap_in(attempt, what[0], attempts, known, otherwise=what[1])
    for snapshot, head in placed:
        context.objects.remember(head, snapshot)  # after the turn has ended
        return Landed(at, head, snapshot)
    return None


def _upload(context: Context, calls: Sequence[Callable[[], object]], abreast: bool) -> None:
    """Make the calls of an upload round; all must succeed."""
    run = context.runtime.parallel if abreast else one_by_one
    run(calls)


def _placed(
    context: ReadContext, version: NextVersion, keys: SessionKeys
) -> tuple[Snapshot, list[Upload]]:
    """The whole snapshot, and what to upload for it; the snapshot itself comes last."""
    after, key = version.after, keys.next("snapshots")
    history, uploads = _history(context, version, keys)
    snapshot = replace(
        version.snapshot, snapshot_id=snapshot_id_of(key), parent=after.ref.bare(), history=history
    ).with_delta_copies({each.key: each.data for each in version.uploads})
    if (start := bundle_from(snapshot)) is not None:
        snapshot, bundle = _bundled(context, snapshot, start, keys)
        uploads.append(bundle)
    uploads.append(Upload(key, snapshot.encode()))
    return snapshot, uploads


def _bundled(
    context: ReadContext, snapshot: Snapshot, start: int, keys: SessionKeys
) -> tuple[Snapshot, Upload]:
    """The snapshot with the objects that opening needs from there on in a bundle."""
    due = snapshot.opening()[start:]
    loaded = context.objects.load_all([(ref, opening_kind(ref)) for ref in due])
    entries = {
        entry.log.key: entry
        for entry in snapshot.deltas
        if entry.at_open and entry.at.key in loaded
    }
    bundle = Bundle({key: entry.opened(loaded) for key, entry in entries.items()})
    upload = Upload(keys.next(BUNDLES), bundle.encode())
    context.objects.remember(upload.ref, bundle)
    deltas = (
        replace(entry, log=entry.log.bare(), bundle=upload.ref)
        if entry.log.key in entries
        else entry
        for entry in snapshot.deltas
    )
    snapshot = replace(snapshot, deltas=tuple(deltas))
    return snapshot.with_delta_copies({upload.key: upload.data}), upload


def _root_with(
    context: ReadContext,
    root: Root,
    branch: str,
    version: NextVersion,
    snapshot: Snapshot,
    head: Upload,
) -> Root:
    """The next root: the branch moved to the snapshot, and the operation logged."""
    what = f"{snapshot.kind}"
    what = f"commit {what}" if version.left is None else leaving(f"amend {what}", version.left)
    runtime, at = context.runtime, snapshot_id_of(head.key)
    by = snapshot.commit_id, runtime.who()
    entry = LogEntry(root.version + 1, runtime.now_ms(), what, branch, at, *by)
    tip = version.tip or root.branches[branch]
    # An unchanged base keeps its copy in the root.
    stays = tip.base and snapshot.base and tip.base.key == snapshot.base.key
    of = tip.base if stays else snapshot.base
    moved = replace(tip, head=head.ref, base=of, ahead=snapshot.ahead)
    new = replace(root, branches={**root.branches, branch: moved})
    copies = {each.key: each.data for each in (head, version.base) if each is not None}
    return new.with_log(entry).with_copies(copies, branch)


def encoded_delta[K: (bytes, tuple[bytes, int])](
    context: ReadContext,
    keys: SessionKeys,
    view: SnapshotView,
    delta: Delta,
    tables: Mapping[K, Manifest],
    changed: Sequence[Node] = (),
    more: Sequence[ManifestRef] = (),
) -> tuple[Delta, list[Upload], frozenset[bytes]]:
    """The delta with chunk tables in it, or in manifests, and what to upload; itself comes last.

    And the ids of coordinates among the nodes, whose tables are embedded first.

    Parameters
    ----------
    context : ReadContext
        The repository.
    keys : SessionKeys
        Names the objects.
    view : SnapshotView
        A snapshot that has the nodes.
    delta : Delta
        The delta without tables.
    tables : mapping of K to Manifest
        What stays together.
    changed : sequence of Node
        Nodes that are others than in the view.
    more : sequence of ManifestRef
        Manifests that are written already.
    """
    ids = {part.node_id for each in tables.values() for part, _ in each.parts}
    now = {node.node_id: node for node in changed}
    # Other nodes are not examined, since there may be thousands.
    found = (now.get(node_id) or view.by_id.get(node_id) for node_id in ids)
    coordinates = coordinate_ids((node for node in found if node is not None), ids)
    embedded, others = plan_embedding(
        {key: sum(len(data) for _, data in each.parts) for key, each in tables.items()},
        {key for key, each in tables.items() if each.parts[0][0].node_id in coordinates},
        changes_nodes=bool(delta.nodes or delta.deleted or delta.truncated),
    )

    def together(group: Sequence[K]) -> Manifest:
        return Manifest(tuple(part for key in group for part in tables[key].parts))

    uploads, manifests = list[Upload](), [*more]
    for group in others:
        manifest = together(group)
        data, where = manifest.encode()
        uploads.append(Upload.of(keys, "manifests", data))
        context.objects.remember(uploads[-1].ref, manifest)
        manifests.append(ManifestRef(uploads[-1].ref, manifest.directory(), **where))
    whole = replace(delta, embedded=together(embedded), manifests=tuple(manifests))
    uploads.append(Upload.of(keys, "deltas", whole.encode()))
    context.objects.remember(uploads[-1].ref, whole)
    return whole, uploads, coordinates


def rewritten(
    context: ReadContext,
    keys: SessionKeys,
    before: Snapshot,
    commit_id: bytes,
    message: str,
    **changes: Any,
) -> tuple[Snapshot, Upload]:
    """The snapshot of a rewrite after `before`, and its log, which is empty: no data changes."""
    log = Upload.of(keys, "deltas", Delta(commit_id).encode())
    context.objects.remember(log.ref, Delta(commit_id))
    snapshot = replace(
        before,
        commit_id=commit_id,
        kind=CommitKind.REWRITE,
        message=message,
        metadata={},
        written_ms=max(context.runtime.now_ms(), before.written_ms),
        log=log.ref,
        totals={},
        merged=None,
        **changes,
    )
    return snapshot, log


# --- history ------------------------------------------------------------------------------------


def _history(
    context: ReadContext, version: NextVersion, keys: SessionKeys
) -> tuple[History, list[Upload]]:
    """What a snapshot says of its ancestors, and new pages to upload.

    It is computed from the very parent that an attempt builds on, so that all it covers are
    ancestors of the new snapshot.
    """
    parent, uploads = version.after, list[Upload]()
    pages = parent.snapshot.history.pages if version.pages is None else version.pages
    recent = (*parent.snapshot.history.recent, parent.snapshot.entry(parent.ref).pack())

    if are_a_page([len(entry) for entry in recent]):
        due = History(recent=recent)
        recent = ()
        while True:
            page, upload = _page(context, due, parent.snapshot.written_ms, keys)
            uploads.append(upload)
            pages = (*pages, page)
            count = pages_to_roll([page.level for page in pages])
            if not count:
                break
            due, pages = History(pages[-count:]), pages[:-count]
    return History(pages, recent), uploads


def _page(
    context: ReadContext, history: History, newest_ms: int, keys: SessionKeys
) -> tuple[HistoryPageRef, Upload]:
    """A page, and what to upload for it."""
    page = HistoryPage(history)
    upload = Upload.of(keys, _HISTORY, page.encode())
    context.objects.remember(upload.ref, page)  # for a compaction that merges it
    return HistoryPageRef(upload.ref, newest_ms, history.count, history.level), upload


def merged_pages(
    context: ReadContext, history: History, floor: str | None, keys: SessionKeys
) -> tuple[tuple[HistoryPageRef, ...], list[Upload]]:
    """The pages that are in history, the newest of entries merged into one."""
    pages, since_ms = history.pages, 0
    if pages and floor is not None:
        with suppress(CorruptObjectError, ObjectNotFoundError):
            since_ms = snapshot_at(context, floor)[1].written_ms
    pages = tuple(page for page in pages if page.newest_ms >= since_ms)
    count = pages_to_merge([page.count for page in pages if page.level == 0])
    kept, due = pages[: len(pages) - count], pages[len(pages) - count :]
    if not due:
        return pages, []
    try:
        found = context.objects.load_all([(page.blob, HistoryPage) for page in due])
        for page in due:
            page.check(found[page.blob.key])
    except CorruptObjectError:
        return pages, []  # `verify` tells; readers go on without the page
    merged = History(
        recent=tuple(chain.from_iterable(found[p.blob.key].history.recent for p in due))
    )
    page, upload = _page(context, merged, due[-1].newest_ms, keys)
    return (*kept, page), [upload]


# --- what is told of it -------------------------------------------------------------------------


def tell_landed(
    context: ReadContext, operation: str, branch: str, head: BlobRef, start_s: float, **more: object
) -> None:
    """Count an operation that began at `start_s` of the runtime, and log it with its values.

    The logger `zarr_manifests.operations` gets one INFO line, with the values, which have units in
    their names, as attributes of the record.
    """
    context.meter.add(f"{operation}s")
    if not _LOG.isEnabledFor(logging.INFO):
        return
    duration_ms = round((context.runtime.monotonic_s() - start_s) * 1000, 3)
    facts: dict[str, object] = {
        "operation": operation,
        "repository_id": context.repository_id,
        "repository_url": context.storage.url,
        "branch": branch,
        "snapshot_id": snapshot_id_of(head.key),
        "duration_ms": duration_ms,
    }
    snapshot = context.objects.recall(head, Snapshot)
    if snapshot is not None:
        facts["kind"] = str(snapshot.kind)
        facts |= {name.replace("-", "_"): n for name, n in snapshot.totals.items()}
    _LOG.info(
        "%s %s on %s in %.1f ms",
        operation,
        facts["snapshot_id"],
        branch,
        duration_ms,
        extra={**facts, **more},
    )


# --- marks ----------------------------------------------------------------------------------------


def check_now(context: Context, branch: str, txn: Txn) -> None:
    """Raise if the branch, as it is now, does not let the step be taken.

    Raises
    ------
    TransactionAlreadyCommitted
        If it was committed.
    TransactionGapError
        If the version before is not the one it comes after.
    """

    def check() -> None:
        root = context.roots.with_branch(context.roots.read().root, branch)
        check_marks(context, root, branch, txn)

    opened(check)


def check_marks(
    context: Context, root: Root, branch: str, txn: Txn | None, steps: tuple[MarkStep, ...] = ()
) -> None:
    """Raise if the marks of the branch's head do not allow the commit.

    Raises
    ------
    TransactionAlreadyCommitted
        If the transaction was committed.
    TransactionGapError
        If the version before is not the one that the transaction comes after.
    ConflictError
        If a mark is not where its step begins.
    """
    tip = root.branches.get(branch)
    if tip is None or (txn is None and not steps):
        return  # without a branch, `admitted` raises
    head = context.objects.load(tip.head, Snapshot)
    if txn is not None:
        _check_txn(context, tip, head, txn, branch)
    conflicts = mark_conflicts(context, head, steps)
    if conflicts:
        raise ConflictError(
            f"the last versions of applications on branch {branch!r} are not those that this "
            "commit expects; nothing was committed. `repo.txn_versions(branch)` lists them",
            conflicts,
        )


def mark_conflicts(
    context: ReadContext, head: Snapshot, steps: Sequence[MarkStep]
) -> list[Conflict]:
    """The marks of a head that are not where their steps begin."""
    return [
        Conflict(
            ConflictKind.TXN,
            "/",
            "txn",
            f"the last version of {step.app!r} is {shown(mark)} and not {shown(step.before)}",
        )
        for step in steps
        if (mark := mark_of(context, head, step.app)) != step.before
    ]


def _check_txn(context: Context, tip: Branch, head: Snapshot, txn: Txn, branch: str) -> None:
    assert txn.version is not None  # to forget one is no step
    mark = mark_of(context, head, txn.app)
    if mark >= txn.version:
        # Others may have swapped this root in and not have synced it yet.
        context.storage.sync([ROOT_KEY])
        found = snapshot_of(context, tip, txn.app, txn.version)
        where = "" if found is None else f", in snapshot {found}"
        raise TransactionAlreadyCommitted(
            f"version {txn.version} of {txn.app!r} is committed to branch {branch!r} already"
            f"{where}; its last version is {mark}. Nothing was committed",
            txn.app,
            txn.version,
            mark,
            found,
        )
    if txn.after is not None and mark != txn.after:
        raise TransactionGapError(
            f"version {txn.version} of {txn.app!r} comes after {shown(txn.after)}, but the last "
            f"one on branch {branch!r} is {shown(mark)}; nothing was committed. Versions between "
            "are missing, perhaps because the branch was reset or restored: commit them first, or "
            "leave out `after` to skip them. For a stream, take a new checkpoint and txn_app_id"
        )


def marks_after(
    context: Context, tip: Snapshot, txn: Txn | None, steps: tuple[MarkStep, ...], keys: SessionKeys
) -> tuple[Mapping[str, int], BlobRef | None, list[Upload]]:
    """The marks of a snapshot that comes after `tip`, or replaces it.

    Its own, the pointer of its page, and the page to upload, if that is new.
    """
    if txn is not None:
        assert txn.version is not None
        steps = (*steps, MarkStep(txn.app, NO_MARK, txn.version))
    if not steps:
        return tip.marks, tip.marks_page, []
    own = moved_marks(tip.marks, steps)
    forgets = any(step.version == NO_MARK for step in steps)
    if len(own) <= MOST_IN_SNAPSHOT and (tip.marks_page is None or not forgets):
        return own, tip.marks_page, []
    # All but these go to the page.
    newest, every = {step.app for step in steps}, moved_marks(marks_of(context, tip), steps)
    own = {app: version for app, version in every.items() if app in newest}
    left = {app: version for app, version in every.items() if app not in newest}
    if not left:
        return own, None, []
    upload = Upload.of(keys, "pages", MarksPage(left).encode())
    return own, upload.ref, [upload]
