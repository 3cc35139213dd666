"""Commits: an upload round, then one swap of the root.

1. The change set becomes a delta (its larger chunk tables manifests of their own) and a snapshot.
   Every pointer's key, length and checksum are known beforehand, so all of it is uploaded in one
   parallel round, together with the packs still to be written, the archive of the root version
   that is about to be replaced and the fsync of chunks written so far. All must have succeeded
   before the next step. What the change set has spilled is referred to as it is.
2. One compare-and-swap of the root (`roots`). Nothing else makes the commit visible.
3. If somebody else's swap came first and moved the branch, the commit is put on top of the new tip
   where that is safe (`rebase`). Its snapshot is written anew, its delta only where nodes that
   both sides changed were merged; chunks and manifests are never uploaded twice.

Whether the marks allow the commit (`advance_marks`), whether the session may still commit
(`admitted`), and whether a snapshot that chunk refs were taken from is still in history, is checked
against each root that is about to be replaced, in this order. So all held when the swap took
effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from zarr_manifests.engine.commit.add_digest import with_digest
from zarr_manifests.engine.commit.advance_marks import check_marks, marks_after
from zarr_manifests.engine.commit.carry_zones import take_zones, zones_upload
from zarr_manifests.engine.commit.describe import kind_of, totals_of
from zarr_manifests.engine.commit.extend_history import history_after
from zarr_manifests.engine.commit.observe import observed
from zarr_manifests.engine.commit.rebase import Mine, Rebasing, rebase_delta
from zarr_manifests.engine.commit.relocate import relocate_changes
from zarr_manifests.engine.commit.replay import combined
from zarr_manifests.engine.commit.request import CommitRequest
from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.edit.packs import Pack
from zarr_manifests.engine.edit.workspace import UNKNOWN, Workspace
from zarr_manifests.engine.history.ancestry import is_missing
from zarr_manifests.engine.history.differences import delta_of
from zarr_manifests.engine.history.left_behind import find_kept
from zarr_manifests.engine.objects.chunks import SessionKeys, sync_parts
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.objects.spill import Rows, Spilled, resident, rows_of
from zarr_manifests.engine.root.epochs import admitted
from zarr_manifests.engine.root.roots import RootAt
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.totals import Effect, effect_of
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import (
    CommitOutcomeUnknownError,
    ConflictError,
    CorruptObjectError,
    ManifestsError,
    MissingChunkError,
    ObjectNotFoundError,
)
from zarr_manifests.format.delta import COMMIT_ID_BYTES, Delta
from zarr_manifests.format.manifest import Manifest, ManifestRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import (
    HISTORY_PAGES,
    MARKS_PAGE,
    MERGE,
    ZONE_MAPS,
    Branch,
    LogEntry,
    Root,
    leaving,
)
from zarr_manifests.format.snapshot import DeltaEntry, Snapshot
from zarr_manifests.ids import session_of, snapshot_id_of
from zarr_manifests.planning.at_open import coordinate_ids
from zarr_manifests.planning.conflict.components import Reads
from zarr_manifests.planning.layout.packing import plan_embedding
from zarr_manifests.runtime import one_by_one

_QUICK_BYTES: Final = 4 << 20
"""Up to this many bytes, chunks are written in the round of the writer's turn."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit that has landed: the root that holds it, and its snapshot."""

    at: RootAt
    head: BlobRef
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An encoded commit; only the snapshot's place depends on the tip it lands on.

    Its `effect` is known if it was computed on the snapshot it was made on, and all later commits
    are disjoint from it.
    """

    delta: Delta
    uploads: tuple[Upload, ...]
    log: BlobRef
    snapshot: Snapshot
    tables: Mapping[bytes, Sequence[Rows]]
    manifests: Mapping[str, Manifest]
    reads: Reads
    zones: BlobRef | None = None
    effect: Effect | None = None


def commit(workspace: Workspace, branch: str, request: CommitRequest) -> Committed:
    """Commit the workspace's changes to the branch, and write the packs they refer to.

    The workspace is closed if the outcome is unknown.

    Raises
    ------
    SnapshotExpiredError
        If `request.source` is no longer in history; nothing was committed.
    TransactionAlreadyCommitted, TransactionGapError
        If `request.txn` was committed before, or versions before it are missing.
    ConflictError
        If the branch has moved and the changes cannot be rebased, the head to amend is no longer
        the head, or a mark is not where it should be; nothing was committed.
    FencedError
        If the session began before the repository's fence and holds no lease, or another writer
        has claimed the branch since.
    CommitOutcomeUnknownError
        If it cannot be determined whether the swap took effect.
    """
    context, amends = workspace.context, request.amends
    view, amended = workspace.contents.view, None
    if amends is not None and amends.snapshot.parent is not None:
        with _amending(workspace, branch, amends):
            view = context.open_view(amends.snapshot.parent)
            amended = delta_of(context, amends.snapshot)
    with _closed_if_unknown(workspace), workspace.packed() as (changes, packs):
        if amends is not None and amended is not None:
            with _amending(workspace, branch, amends):
                zones = dict(changes.zones)
                changes = replace(combined(context, view, amended, changes), zones=zones)
                take_zones(context, changes, amends.snapshot)
        with observed(context, "commit", branch) as outcome:
            done = _landed(workspace, branch, request, view, changes, packs)
            outcome.head = done.head
    return done


@contextmanager
def _closed_if_unknown(workspace: Workspace) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        # An interrupt may have come after the swap.
        if isinstance(error, CommitOutcomeUnknownError) or not isinstance(error, ManifestsError):
            workspace.closed = UNKNOWN
        raise


def _landed(
    workspace: Workspace,
    branch: str,
    request: CommitRequest,
    view: SnapshotView,
    changes: ChangeSet,
    packs: Sequence[Pack],
) -> Committed:
    """Commit the changes, made on top of `view`, without staged chunks among them."""
    context, keys = workspace.context, workspace.keys
    prepared = _prepare(context, view, changes, keys, request.message, request.metadata, len(packs))
    prepared = _counted(context, view, prepared)
    pending: list[Callable[[], object]] = [
        partial(pack.write, context.storage, durable=True) for pack in packs
    ]
    pending += [partial(context.storage.sync, due) for due in _due_syncs(changes)]
    landing = _Landing(workspace, keys, branch, request, view, changes, prepared, pending)
    if changes.unsynced or sum(pack.nbytes for pack in packs) > _QUICK_BYTES:
        landing.upload_ahead()  # keeps the turn short
    ahead = partial(landing.upload_ahead, abreast=False)
    with context.roots.turn(ahead) as held:
        landed = landing.land(in_turn=held)
    context.objects.remember(landed.head, landed.snapshot)  # after the turn has ended
    return landed


@dataclass(slots=True)
class _Landing:
    """An encoded commit on its way to its branch."""

    workspace: Workspace
    keys: SessionKeys
    branch: str
    request: CommitRequest
    view: SnapshotView
    changes: ChangeSet
    prepared: _Prepared
    pending: list[Callable[[], object]]
    """What still has to be uploaded or synced, whatever tip the commit lands on."""

    @property
    def context(self) -> Context:
        """The repository."""
        return self.workspace.context

    def land(self, *, in_turn: bool) -> Committed:
        """Place it on the tip and swap the root; repeat if others come first."""
        context, branch, request = self.context, self.branch, self.request
        at, parent, placed = context.roots.latest, self.view, self.prepared
        due = request.amends or self.view
        seen = context.roots.with_branch(at.root, branch).branches.get(branch)
        if in_turn or seen is None or seen.head.key != due.ref.key:
            # A branch that has moved may move again; during our turn it cannot.
            at = context.roots.read()
        attempts = request.attempts or context.config.commits.attempts
        for attempt in range(attempts):
            root = context.roots.with_branch(at.root, branch)
            try:
                check_marks(context, root, branch, request.txn, request.steps)
                tip = admitted(context.roots, root, branch, self.keys, _amends(request.amends))
                if request.source is not None:
                    find_kept(context, root, request.source)
                if request.amends is None and tip.head.key != parent.ref.key:
                    parent, placed = self._moved(tip)
                after = (request.amends or parent).snapshot
                head, snapshot, uploads = _place(context, placed, parent, self.keys, after, request)
            except (CorruptObjectError, MissingChunkError) as error:
                at = _moved_since(context, root.branches[branch], branch, error)
                continue
            archive = context.roots.archiving(at)  # the root to be replaced
            self._upload([*placed.uploads, *uploads], *archive)
            left = None if request.amends is None else request.amends.snapshot_id
            new = root_with(context, root, branch, snapshot, uploads[-1], left=left)
            if request.amends is not None:  # what it leaves may be older than where a search begins
                new = replace(new, swept=0)
            landed = context.roots.swap(at, new, snapshot.commit_id)
            if landed is not None:
                return Committed(landed, head, snapshot)
            context.roots.backoff(attempt)
            at = context.roots.read()
        raise ConflictError(
            f"commit to {branch!r}: other writers came first {attempts} times; the "
            "session keeps its changes, commit again later"
        )

    def _moved(self, tip: Branch) -> tuple[SnapshotView, _Prepared]:
        """The opened tip, and the commit as it is on top of it."""
        context, keys, request = self.context, self.keys, self.request
        if request.check_tip is not None or self.workspace.tip_checks:
            on = context.open_branch(tip)
            self.workspace.check_tip(on)
            if request.check_tip is not None:
                request.check_tip(on)
        moved = relocate_changes(
            self.workspace, self.changes, tip, request.relocating, request.rebasing
        )
        if moved is None:
            return _rebased(context, self.view, tip, self.prepared, request.rebasing, keys)
        parent, changes = moved
        self.pending += [partial(context.storage.sync, k) for k in _due_syncs(changes)]
        return parent, _relocated(context, parent, changes, self.prepared, keys)

    def upload_ahead(self, *, abreast: bool = True) -> None:
        """If the storage has turns, upload what does not depend on the tip before the turn.

        Without `abreast` one by one: while waiting, more threads would only slow others down.
        """
        if self.context.storage.capabilities.turns:
            self._upload(self.prepared.uploads, abreast=abreast)

    def _upload(
        self,
        uploads: Sequence[Upload],
        *besides: Callable[[], object],
        abreast: bool = True,
    ) -> None:
        """Upload what is missing, in one round."""
        context, keys = self.context, self.keys
        due = [upload for upload in uploads if not keys.has_written(upload.key)]
        calls = [*self.pending, *besides]
        calls += [partial(context.objects.create, u.key, u.data) for u in due]
        _upload(context, calls, self.branch, keys, abreast)
        self.pending = []
        for upload in due:
            keys.note_written(upload.key, upload.data)


def _upload(
    context: Context,
    calls: Sequence[Callable[[], object]],
    branch: str,
    keys: SessionKeys,
    abreast: bool,
) -> None:
    """Make the calls of an upload round; all must succeed.

    If the session is behind the fence, its chunks may have been collected: that is then the error.
    """
    try:
        run = context.runtime.parallel if abreast else one_by_one
        run(calls)
    except ObjectNotFoundError:
        root = context.roots.with_branch(context.roots.read().root, branch)
        admitted(context.roots, root, branch, keys)
        raise


def _due_syncs(changes: ChangeSet) -> list[Sequence[str]]:
    """The chunk objects that must be durable, in a few parts to sync in parallel.

    Objects that were overwritten since are left out.
    """
    if not changes.unsynced:
        return []
    used = changes.chunk_objects({session_of(key) for key in changes.unsynced})
    return sync_parts([key for key in changes.unsynced if key in used])


def _prepare(
    context: ReadContext,
    view: SnapshotView,
    changes: ChangeSet,
    keys: SessionKeys,
    message: str,
    metadata: Mapping[str, Any],
    packs: int,
    commit_id: bytes | None = None,
) -> _Prepared:
    tables = {node: parts for node in changes.touched() if (parts := changes.parts(node))}
    encoded = {
        (node, i): Manifest.of([(node, table)]).parts[0]
        for node, parts in tables.items()
        for i, table in enumerate(parts)
        if resident(table)
    }
    changed = [node for node in changes.nodes.values() if node is not None]
    coordinates = _coordinates(view, changed, tables)
    plan = plan_embedding(
        {place: len(data) for place, (_, data) in encoded.items()},
        {place for place in encoded if place[0] in coordinates},
        changes_nodes=bool(changes.nodes or changes.truncated),
    )

    def together(places: Sequence[tuple[bytes, int]]) -> Manifest:
        return Manifest(tuple(encoded[place] for place in places))

    uploads, manifests = [], [spilled.manifest for spilled in _spilled(tables)]
    written: dict[str, Manifest] = {}
    for group in plan.manifests:
        manifest = together(group)
        upload = Upload.of(keys, "manifests", manifest.encode())
        written[upload.key] = manifest
        uploads.append(upload)
        context.objects.remember(upload.ref, manifest)
        manifests.append(ManifestRef(upload.ref, manifest.directory()))
    commit_id = commit_id or context.runtime.random_bytes(COMMIT_ID_BYTES)
    delta = Delta(
        commit_id,
        tuple(changed),
        {p: view.nodes[p].node_id for p, n in changes.nodes.items() if n is None},
        dict(changes.truncated),
        together(plan.embedded),
        tuple(manifests),
    )
    log = Upload(keys.next("deltas"), delta.encode())
    uploads.append(log)
    zones = zones_upload(changes, tables, keys)
    if zones is not None:
        uploads.append(zones)
    snapshot = Snapshot(
        snapshot_id_of(keys.next("snapshots")),  # each attempt has its own id
        context.repository_id,
        view.ref.bare(),
        commit_id,
        kind_of(context, view, changes, tables),
        message,
        metadata,
        context.runtime.now_ms(),
        None,
        (),
        log.ref,
        totals_of(tables, changes.chunk_objects_written + packs),
    )
    context.objects.remember(log.ref, delta)
    at = None if zones is None else zones.ref
    return _Prepared(delta, tuple(uploads), log.ref, snapshot, tables, written, changes.reads, at)


def _coordinates(
    view: SnapshotView, changed: Iterable[Node], among: Collection[bytes]
) -> frozenset[bytes]:
    """The ids that belong to coordinates after these changes to the view.

    Other nodes are not examined, since there may be thousands.
    """
    now = {node.node_id: node for node in changed}
    found = (now.get(node_id) or view.by_id.get(node_id) for node_id in among)
    return coordinate_ids((node for node in found if node is not None), among)


def _counted(context: ReadContext, view: SnapshotView, prepared: _Prepared) -> _Prepared:
    """The commit with its effect, computed before the turn so that nobody waits for it."""
    fetch = partial(rows_of, context.objects)
    try:
        effect = effect_of(prepared.delta, prepared.tables, view, fetch)
    except (CorruptObjectError, MissingChunkError):
        return prepared  # the base may have been collected; it is then computed on the tip
    return replace(prepared, effect=effect)


def _place(
    context: Context,
    prepared: _Prepared,
    parent: SnapshotView,
    keys: SessionKeys,
    tip: Snapshot,
    request: CommitRequest,
) -> tuple[BlobRef, Snapshot, list[Upload]]:
    """The commit's snapshot on top of `parent`, and what to upload; the snapshot comes last.

    It comes after `tip`, or replaces it.
    """
    known = {upload.key: upload.data for upload in prepared.uploads}
    held = {part.node_id for part in prepared.delta.embedded.directory()}
    coordinates = _coordinates(parent, prepared.delta.nodes, held)
    sequence = parent.snapshot.sequence + 1
    entry = DeltaEntry.of(prepared.log, prepared.delta, sequence, coordinates)
    effect = prepared.effect
    if effect is None:
        fetch = partial(rows_of, context.objects)
        effect = effect_of(prepared.delta, prepared.tables, parent, fetch)
    entry = replace(entry, counts=effect.counts, zones=prepared.zones)
    key = keys.next("snapshots")
    history, uploads = history_after(context, parent, parent.snapshot.history.pages, keys)
    marks = marks_after(context, tip, request, keys)
    uploads += marks.uploads
    snapshot = replace(
        prepared.snapshot,
        snapshot_id=snapshot_id_of(key),
        parent=parent.ref.bare(),
        base=parent.snapshot.base,
        deltas=(*parent.snapshot.deltas, entry),
        marks=marks.own,
        marks_page=marks.page,
        # Amending a merge, as opposed to committing on top of one, leaves it one.
        merged=request.merged if tip.snapshot_id == parent.snapshot.snapshot_id else tip.merged,
        digests=parent.snapshot.digests,
        sequence=sequence,
        # Never before the tip's time, else `main@{time}` would find a snapshot too early.
        written_ms=max(prepared.snapshot.written_ms, tip.written_ms),
        sums=effect.sums(parent, entry, prepared.delta),
        history=history,
    )

    def nodes() -> list[Node]:
        # With pages, looking up more nodes than needed would load more pages.
        due = [e for e in snapshot.deltas if e.coordinates or parent.pages is None]
        held = {part.node_id for listed in due for part in listed.embedded}
        made = {node.node_id: node for node in prepared.delta.nodes}
        return [*parent.among(held - made.keys()), *made.values()]

    whole, digests = with_digest(context, snapshot, nodes, parent.base_sequence, keys, known)
    uploads += [*digests, Upload(key, whole.encode())]
    return uploads[-1].ref, whole, uploads


def root_with(
    context: ReadContext,
    root: Root,
    branch: str,
    snapshot: Snapshot,
    head: Upload,
    base: Upload | None = None,
    left: str | None = None,
) -> Root:
    """The next root: the branch moved to the snapshot, and the operation logged.

    `head` is the encoded snapshot, and `base` its base if that is new; `left` is the id of the
    snapshot that it replaces, if it amends one.
    """
    entry = LogEntry(
        root.version + 1,
        context.runtime.now_ms(),
        f"commit {snapshot.kind}" if left is None else leaving(f"amend {snapshot.kind}", left),
        branch,
        snapshot_id_of(head.key),
        snapshot.commit_id,
    )
    tip = root.branches[branch]
    # An unchanged base keeps its copy in the root.
    stays = tip.base and snapshot.base and tip.base.key == snapshot.base.key
    of = tip.base if stays else snapshot.base
    moved = replace(tip, head=head.ref, base=of, ahead=snapshot.ahead)
    new = replace(root, branches={**root.branches, branch: moved})
    if snapshot.history.pages:
        new = new.with_feature(HISTORY_PAGES)
    if snapshot.marks_page is not None:
        new = new.with_feature(MARKS_PAGE)
    if snapshot.merged is not None:
        new = new.with_feature(MERGE)
    if any(listed.zones is not None for listed in snapshot.deltas):
        new = new.with_feature(ZONE_MAPS)
    copies = {upload.key: upload.data for upload in (head, base) if upload is not None}
    return new.with_log(entry).with_copies(copies, branch)


def _moved_since(context: ReadContext, tip: Branch, branch: str, error: ManifestsError) -> RootAt:
    """A root in which the branch has moved, so that a missing object may have been collected.

    Raises the error if that does not explain it.
    """
    if not is_missing(error):
        raise error
    at = context.roots.read()
    now = context.roots.with_branch(at.root, branch).branches.get(branch)
    if now is not None and (now.head.key, now.floor) == (tip.head.key, tip.floor):
        raise error
    return at


@contextmanager
def _amending(workspace: Workspace, branch: str, head: SnapshotView) -> Iterator[None]:
    """Read what amending a head needs; if others have changed the head, say so in the error.

    Raises
    ------
    ConflictError
        If something is missing, and the head is no longer the branch's head or the snapshot before
        it has expired.
    """
    try:
        yield
    except CorruptObjectError as error:
        roots, keys = workspace.context.roots, workspace.keys
        if is_missing(error):
            root = roots.with_branch(roots.read().root, branch)
            admitted(roots, root, branch, keys, _amends(head))
        raise


def _amends(head: SnapshotView | None) -> tuple[str, str] | None:
    return None if head is None else (head.ref.key, head.snapshot_id)


def _rebased(
    context: ReadContext,
    view: SnapshotView,
    tip: Branch,
    prepared: _Prepared,
    rebasing: Rebasing,
    keys: SessionKeys,
) -> tuple[SnapshotView, _Prepared]:
    """The opened tip if the commit may be put on top of it, and the commit as it is there."""
    mine = Mine.of(prepared.delta, prepared.tables, prepared.reads)
    moved = rebase_delta(
        context, view, tip, prepared.delta, mine, prepared.manifests, rebasing, keys
    )
    on, delta, uploads = moved.on, moved.delta, moved.uploads
    if delta is prepared.delta:
        return on, prepared if moved.apart else replace(prepared, effect=None)
    log = Upload.of(keys, "deltas", delta.encode())
    context.objects.remember(log.ref, delta)
    used = {ref.blob.key for ref in delta.manifests}
    used |= set() if prepared.zones is None else {prepared.zones.key}
    kept = [upload for upload in prepared.uploads if upload.key in used]
    snapshot = replace(prepared.snapshot, log=log.ref)
    written = {upload.key: Manifest.from_object(upload.data, upload.ref) for upload in uploads}
    return on, replace(
        prepared,
        delta=delta,
        uploads=(*kept, *uploads, log),
        log=log.ref,
        snapshot=snapshot,
        tables=_tables_of(delta, {**prepared.manifests, **written}, _spilled(prepared.tables)),
        effect=None,
    )


def _tables_of(
    delta: Delta, manifests: Mapping[str, Manifest], spilled: Sequence[Spilled]
) -> dict[bytes, tuple[Rows, ...]]:
    """The delta's chunks by node, from these manifests, which may not be uploaded yet."""
    found: dict[bytes, tuple[Rows, ...]] = {}
    known = {each.key: each for each in spilled}
    here = [known[ref.blob.key] for ref in delta.manifests if ref.blob.key in known]
    for each in here:
        found[each.node_id] = (*found.get(each.node_id, ()), each)
    rest = [manifests[ref.blob.key] for ref in delta.manifests if ref.blob.key not in known]
    for manifest in (delta.embedded, *rest):
        for part, data in manifest.parts:
            found[part.node_id] = (*found.get(part.node_id, ()), manifest.decode(part, data))
    return found


def _spilled(tables: Mapping[bytes, Sequence[Rows]]) -> list[Spilled]:
    return [rows for parts in tables.values() for rows in parts if isinstance(rows, Spilled)]


def _relocated(
    context: ReadContext,
    on: SnapshotView,
    changes: ChangeSet,
    prepared: _Prepared,
    keys: SessionKeys,
) -> _Prepared:
    """The same commit, of the changes as they are on the tip."""
    old = prepared.snapshot
    placed = _prepare(context, on, changes, keys, old.message, old.metadata, 0, old.commit_id)
    totals = {**placed.snapshot.totals, "chunk-objects": old.totals["chunk-objects"]}
    return replace(placed, snapshot=replace(placed.snapshot, totals=totals))
