"""Commits: the changes of a session, as a delta and a snapshot that land on its branch.

1. The change set becomes a delta (its larger chunk tables manifests of their own) and a snapshot.
   Every pointer's key, length and checksum are known beforehand, so all of it is uploaded in one
   round (`landing`), together with the packs still to be written, and the fsync of chunks written
   so far. What the change set has spilled is referred to as it is.
2. If somebody else's swap came first and moved the branch, the commit is put on top of the new tip
   where that is safe (`rebase`). Its snapshot is written anew, its delta only where
   nodes that both sides changed were merged; chunks and manifests are never uploaded twice.

Whether the marks allow the commit (`check_marks`), whether the session may still commit
(`admitted`), and whether a snapshot that chunk refs were taken from is still in history, is checked
against each root that is about to be replaced, in this order. So all held when the swap took
effect. What a commit says about itself is checked before anything is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import ge, le
from typing import Any

import msgpack
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import find_kept
from zarr_manifests.engine.change_set import ChangeSet, Rows, Spilled, counts, resident, rows_of
from zarr_manifests.engine.chunks import Pack, sync_parts
from zarr_manifests.engine.differences import delta_of
from zarr_manifests.engine.landing import (
    Landed,
    NextVersion,
    check_marks,
    encoded_delta,
    land,
    marks_after,
    take_zones,
    tell_landed,
    zones_upload,
)
from zarr_manifests.engine.objects import SessionKeys, Upload
from zarr_manifests.engine.rebase import Rebasing, combined, is_apart, put_on_tip
from zarr_manifests.engine.roots import admitted, check_fence
from zarr_manifests.engine.totals import Effect, effect_of
from zarr_manifests.engine.view import Context, ReadContext, SnapshotView
from zarr_manifests.engine.workspace import UNKNOWN, Workspace
from zarr_manifests.errors import (
    CommitOutcomeUnknownError,
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    ObjectNotFoundError,
)
from zarr_manifests.format.manifest import Delta, Manifest, Node
from zarr_manifests.format.records import plain, unpack
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.format.snapshot import CommitKind, DeltaEntry, Snapshot
from zarr_manifests.ids import COMMIT_ID_BYTES
from zarr_manifests.planning.conflict import MarkStep, Txn


class CommitRequest(Struct, frozen=True):
    """What a commit says about itself, and how it may land.

    Parameters
    ----------
    message : str
        Its message.
    metadata : mapping
        Its metadata, checked.
    rebasing : Rebasing
        What to do if other commits came first.
    amends : SnapshotView, optional
        The branch's head, which the commit replaces.
    source : str, optional
        Id of a snapshot from which chunk refs were taken: it must be in history when the commit
        lands.
    txn : Txn, optional
        The application's step that it is; it then lands even if it changes nothing.
    steps : tuple of MarkStep
        Other marks that it moves, each of which must be where the step begins.
    merged : tuple of str, optional
        Of a merge: the ids of the snapshot that it merges, and of the one since which.
    """

    message: str
    metadata: Mapping[str, Any]
    rebasing: Rebasing = field(default_factory=Rebasing)
    amends: SnapshotView | None = None
    source: str | None = None
    txn: Txn | None = None
    steps: tuple[MarkStep, ...] = ()
    merged: tuple[str, str] | None = None


class _Prepared(Struct, frozen=True):
    """An encoded commit; only its snapshot depends on the tip it lands on.

    Its effect and totals were computed before the turn, so that nobody waits for them.
    """

    delta: Delta
    uploads: Sequence[Upload]
    kind: CommitKind
    tables: Mapping[bytes, Sequence[Rows]]
    entry: DeltaEntry
    effect: Effect
    totals: dict[str, int]


def commit(workspace: Workspace, branch: str, request: CommitRequest) -> Landed:
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
    context = workspace.context
    try:
        with workspace.packed() as (changes, packs):
            start_s = context.runtime.monotonic_s()
            done = _landed(workspace, branch, request, changes, packs)
            tell_landed(context, "commit", branch, done.head, start_s)
    except BaseException as error:
        if isinstance(error, ConflictError):
            context.meter.add("conflicts")
        if isinstance(error, ObjectNotFoundError):  # its chunks may have been collected
            check_fence(context.roots, context.roots.read().root, workspace.keys)
        # An interrupt may have come after the swap.
        if isinstance(error, CommitOutcomeUnknownError) or not isinstance(error, ManifestsError):
            workspace.closed = UNKNOWN
        raise
    return done


def _landed(
    workspace: Workspace,
    branch: str,
    request: CommitRequest,
    changes: ChangeSet,
    packs: Sequence[Pack],
) -> Landed:
    """Commit the changes, without staged chunks among them."""
    context, keys, view = workspace.context, workspace.keys, workspace.contents.view
    amends = request.amends
    prepared = None if amends else _prepare(context, view, changes, keys, request)
    pending: list[Callable[[], object]] = [
        partial(pack.write, context.storage, durable=True) for pack in packs
    ]
    pending += [partial(context.storage.sync, due) for due in sync_parts(changes.unsynced)]
    parent, placed = view, prepared  # where the last attempt put it, and as it is there

    def amended(head: Snapshot) -> tuple[SnapshotView, _Prepared]:
        """The snapshot before the head, and the commit of both on it."""
        assert head.parent is not None  # callers refuse the first snapshot
        on = context.open_view(head.parent)
        both = combined(context, on, delta_of(context, head), changes)
        both = replace(both, zones=dict(changes.zones))
        take_zones(context, both, head)
        return on, _prepare(context, on, both, keys, request)

    def moved_to(tip: Branch, made: _Prepared) -> tuple[SnapshotView, _Prepared]:
        """The opened tip, and the commit as it is on top of it."""
        on, new = put_on_tip(workspace, view, changes, tip, request.rebasing, made.tables)
        if new is changes:
            if not is_apart(context, view, tip, changes, made.tables):
                effect = effect_of(made.delta, made.tables, on, context.objects)
                made = replace(made, effect=effect)
            return on, made
        pending.extend(partial(context.storage.sync, due) for due in sync_parts(new.unsynced))
        return on, _prepare(context, on, new, keys, request, made.delta.commit_id)

    def make(root: Root) -> NextVersion:
        """The commit as of this root, if that allows it."""
        nonlocal parent, placed
        check_marks(context, root, branch, request.txn, request.steps)
        tip = admitted(context.roots, root, branch, keys, _amends(request.amends))
        if request.source is not None:
            find_kept(context, root, request.source)
        if prepared is not None and tip.head.key != parent.ref.key:
            parent, placed = moved_to(tip, prepared)
        elif placed is None and request.amends is not None:
            parent, placed = amended(request.amends.snapshot)
        assert placed is not None
        return _place(context, placed, parent, keys, request)

    landed = land(
        context,
        branch,
        keys,
        request.amends or view,
        make,
        () if prepared is None else prepared.uploads,
        (f"commit to {branch!r}", "the session keeps its changes, commit again later"),
        context.config.commits.attempts,
        pending=pending,
        nbytes=sys.maxsize if changes.unsynced else sum(pack.nbytes for pack in packs),
    )
    assert landed is not None  # it lands, or raises
    return landed


def _prepare(
    context: ReadContext,
    view: SnapshotView,
    changes: ChangeSet,
    keys: SessionKeys,
    request: CommitRequest,
    commit_id: bytes | None = None,
) -> _Prepared:
    tables = changes.all_parts()
    changed = [node for node in changes.nodes.values() if node is not None]
    encoded = {
        (node, i): Manifest.of([(node, table)])
        for node, parts in tables.items()
        for i, table in enumerate(parts)
        if resident(table)
    }
    commit_id = commit_id or context.runtime.random_bytes(COMMIT_ID_BYTES)
    deleted = {p: view.nodes[p].node_id for p, n in changes.nodes.items() if n is None}
    delta, uploads, coordinates = encoded_delta(
        context,
        keys,
        view,
        Delta(commit_id, tuple(changed), deleted, dict(changes.truncated)),
        encoded,
        changed,
        [t.manifest for parts in tables.values() for t in parts if isinstance(t, Spilled)],
    )
    log, zones = uploads[-1].ref, zones_upload(changes.zones_of, tables, keys)
    uploads += [] if zones is None else [zones]
    entry = DeltaEntry.of(log, delta, 1, coordinates)  # each attempt has its own sequence
    entry = replace(entry, zones=None if zones is None else zones.ref)
    kind = kind_of(context, view, changes, tables)
    effect = effect_of(delta, tables, view, context.objects)
    return _Prepared(delta, uploads, kind, tables, entry, effect, totals_of(tables))


def _place(
    context: Context,
    prepared: _Prepared,
    parent: SnapshotView,
    keys: SessionKeys,
    request: CommitRequest,
) -> NextVersion:
    """The commit on top of `parent`; it comes after that, or replaces the head that it amends."""
    amends, delta, before = request.amends, prepared.delta, parent.snapshot
    tip = before if amends is None else amends.snapshot
    sequence = before.sequence + 1
    effect = prepared.effect
    entry = replace(prepared.entry, first=sequence, last=sequence, counts=effect.counts)
    marks, page, more = marks_after(context, tip, request.txn, request.steps, keys)
    snapshot = replace(
        before,
        commit_id=delta.commit_id,
        kind=prepared.kind,
        message=request.message,
        metadata=request.metadata,
        # Never before the tip's time, else `main@{time}` would find a snapshot too early.
        written_ms=max(context.runtime.now_ms(), tip.written_ms),
        deltas=(*before.deltas, entry),
        log=entry.log,
        totals=prepared.totals,
        marks=marks,
        marks_page=page,
        # Amending a merge, as opposed to committing on top of one, leaves it one.
        merged=request.merged if amends is None else tip.merged,
        sequence=sequence,
        sums=effect.sums(parent, entry, delta),
    )
    uploads = [*prepared.uploads, *more]
    left = None if amends is None else amends.snapshot_id
    return NextVersion(parent, snapshot, uploads, left=left)


def _amends(head: SnapshotView | None) -> tuple[str, str] | None:
    return None if head is None else (head.ref.key, head.snapshot_id)


# --- what a commit says about itself ------------------------------------------------------------


def checked_message(message: object) -> str:
    """Return the message if it is valid."""
    if not isinstance(message, str) or not message.strip():
        raise InvalidArgumentError("a commit needs a message: say in a line what it does")
    try:
        message.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"the message is not valid Unicode text: {error}") from error
    return message


def checked_metadata(metadata: Mapping[str, Any], of: str = "commit") -> dict[str, Any]:
    """Return the metadata as readers will get it, if it is valid; `of` is for errors."""
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(
            f"{of} metadata is a map of names to values, not a {type(metadata).__name__}"
        )
    try:
        # Nested as deep as it will be stored: not all that packs can be unpacked.
        ((checked,),) = plain(unpack(msgpack.packb([[dict(metadata)]], default=_plain)))
    except (TypeError, ValueError, OverflowError, CorruptObjectError) as error:
        raise InvalidArgumentError(
            f"{of} metadata must be made of strings, numbers, lists and maps: {error}"
        ) from error
    if not all(isinstance(name, str) for name in checked):
        raise InvalidArgumentError(f"the names in {of} metadata must be strings")
    return dict(checked)


def _plain(value: object) -> object:
    """Convert numpy numbers to Python's, and points in time to ISO 8601 text."""
    match value:
        case np.bool():
            return bool(value)
        case np.timedelta64():
            pass  # numpy counts it as an integer, and the number is meaningless without its unit
        case np.integer():
            return int(value)
        case np.floating():
            return float(value)
        case np.datetime64():
            return str(value)
    raise TypeError(f"{value!r:.80} is of another type")


def totals_of(tables: Mapping[bytes, Sequence[Rows]]) -> dict[str, int]:
    """The counts of its own commit that a snapshot stores, given its chunk tables."""
    each = [rows for parts in tables.values() for rows in parts]
    unset = sum(counts(rows)[0] for rows in each)
    written = sum(counts(rows)[2] for rows in each)
    return {"refs-set": sum(map(len, each)) - unset, "refs-unset": unset, "chunk-bytes": written}


def kind_of(
    context: ReadContext,
    view: SnapshotView,
    changes: ChangeSet,
    tables: Mapping[bytes, Sequence[Rows]],
) -> CommitKind:
    """The commit's label: deletions first, then whether written chunks are beyond the old grid."""
    each = [(node, rows) for node, parts in tables.items() for rows in parts]
    unset = any(counts(rows)[0] for _, rows in each)
    # Moving an array's chunks truncates it completely and adds new rows.
    cut = any(any(shape) or node not in tables for node, shape in changes.truncated.items())
    alive = {node.node_id for node in changes.nodes.values() if node is not None}  # or moved
    gone = {view.nodes[path].node_id for path, node in changes.nodes.items() if node is None}
    if unset or cut or gone - alive:
        return CommitKind.DELETE
    if not tables:
        return CommitKind.METADATA
    return (
        CommitKind.APPEND
        if all(_beyond(context, view.by_id.get(node), rows) for node, rows in each)
        else CommitKind.OVERWRITE
    )


def _beyond(context: ReadContext, before: Node | None, rows: Rows) -> bool:
    """Whether all rows could come from an append.

    They could if they are outside the array's previous grid or in its partial edge, or belong to a
    coordinate, which an append rewrites.
    """
    if before is None or before.array is None:
        return before is None
    meta = before.array
    if meta.is_coordinate(before.path):
        return True
    whole = tuple(n // c if c else 0 for n, c in zip(meta.shape, meta.chunk_shape, strict=True))
    if any(map(ge, rows.box.lo, whole)):
        return True
    if all(map(le, rows.box.hi, whole)):
        return False
    coords = rows_of(context.objects, rows).coords()
    return bool((coords >= whole).any(axis=1).all())
