"""Taking an open session from one process to another, as bytes.

`detach` ends a session and gives its bytes; `attach` makes a session that goes on from there.
Several processes may resume the same bytes, and one of them commits: before its swap, a resumed
session puts a claim, whose key is the same for all of them. Invariants: a detached session is
closed; what its bytes refer to is durable; a resumed one draws object names and commit ids of its
own; the claim is collected only where the fence refuses the session.
"""

from __future__ import annotations

import os

import numpy as np

from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.edit.foreign_refs import check_refs
from zarr_manifests.engine.edit.merge_forks import Owners
from zarr_manifests.engine.edit.pin import SessionWriter
from zarr_manifests.engine.history.follow import expired
from zarr_manifests.engine.history.leases import SessionLease
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import create_or_find
from zarr_manifests.engine.objects.spill import Rows, Spilled
from zarr_manifests.engine.root.epochs import check_fence
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.error_cases import FencedError
from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.format.chunk_table import ChunkTable, StoredRef
from zarr_manifests.format.detached import (
    Detached,
    DetachedChanges,
    DetachedOwners,
    DetachedReads,
    DetachedRows,
    claim_key,
    encode_claim,
)
from zarr_manifests.grid import Coords
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.conflict.reads import Reads
from zarr_manifests.storage import Storage

__all__ = ["attach", "detach", "win_claim"]


def detach(
    writer: SessionWriter, lease_ms: int | None, *, serializable: bool, append_dim: str | None
) -> bytes:
    """End the session and return it as bytes; callers hold the workspace's lock.

    With `lease_ms`, its lease lasts that long from now on; it takes one if it has none.

    Raises
    ------
    InvalidArgumentError
        If its copies report, it is a child of `os.fork`, or it was resumed and has tried to commit.
    UnmergedForksError
        If pickled copies of its store have changed anything and none was merged.
    FencedError
        If it has lost its lease, or began before the fence and asks for one.
    """
    workspace, context = writer.workspace, writer.context
    keys, view = workspace.keys, workspace.contents.view
    if workspace.token is not None:
        raise InvalidArgumentError("a session with copies='report' cannot be detached")
    if workspace.pid != os.getpid():
        raise InvalidArgumentError("only the process that opened a session can detach it")
    if keys.claimed:
        raise InvalidArgumentError(
            "a resumed session that has tried to commit cannot be detached: nobody else may commit "
            "it any more. Commit it here"
        )
    writer.copies.check_merged()
    workspace.flush()
    changes = workspace.contents.changes
    workspace.make_durable()
    held = writer.hand_over_lease(lease_ms)
    data = Detached(
        context.repository_id,
        writer.branch,
        view.ref,
        view.snapshot.base,
        keys.start,
        keys.lineage,
        keys.epoch,
        serializable,
        append_dim,
        None if held is None else held[0],
        0 if held is None else held[1],
        workspace.copied,
        writer.copies.merged,
        _packed_changes(changes),
        _packed_reads(changes.reads),
        _packed_owners(writer.copies.owners),
    ).encode()
    writer.close("it was detached")
    return data


def attach(context: Context, detached: Detached) -> SessionWriter:
    """The session that goes on from these bytes.

    Raises
    ------
    InvalidArgumentError
        If it is a session of another repository or of another copy of this one, or has chunk refs
        that it must not commit.
    FencedError
        If it has lost its lease, or began before the fence and has none.
    SnapshotExpiredError
        If its snapshot has left history.
    """
    if detached.repository_id != context.repository_id:
        raise InvalidArgumentError(
            f"a session of repository {detached.repository_id} cannot be resumed in "
            f"{context.storage.url}, which is {context.repository_id}"
        )
    lease = None
    if detached.lease is not None:
        lease = SessionLease.taken_over(context, detached.lease, detached.lease_ms)
    try:
        return _attached(context, detached, lease)
    except BaseException:
        if lease is not None:  # another process may resume it yet
            lease.leave()
        raise


def _attached(context: Context, detached: Detached, lease: SessionLease | None) -> SessionWriter:
    keys = SessionKeys(
        detached.start, context.runtime, detached.lineage, epoch=detached.epoch, resumed=True
    )
    root = context.roots.read().root
    if detached.start > root.version:
        raise InvalidArgumentError(
            f"the session began at version {detached.start}, and {context.storage.url} is at "
            f"version {root.version}: it is a session of a clone or another copy, which has its "
            "objects. Resume it there"
        )
    check_fence(context.roots, root, keys)
    view = _opened(context, detached)
    changes = _changes(detached.changes)
    changes.reads = _reads(detached.reads)
    check_refs(context.objects, view, keys, changes)
    writer = SessionWriter(context, view, detached.branch, detached.start, keys=keys, lease=lease)
    workspace = writer.workspace
    changes.spill = workspace.contents.changes.spill
    workspace.rebase(view, changes)
    workspace.pickled = detached.copied
    writer.copies.go_on(_owners(detached.owners), merged=detached.merged)
    return writer


def _opened(context: Context, detached: Detached) -> SnapshotView:
    try:
        return context.open_view(detached.head, detached.base)
    except ManifestsError as error:
        gone = expired(context, snapshot_id_of(detached.head.key), error)
        if gone is None:
            raise
        raise gone from error


def win_claim(storage: Storage, keys: SessionKeys) -> None:
    """Make sure that this resumed session, and no other, commits the detached one.

    Raises
    ------
    FencedError
        If another one has claimed it.
    """
    keys.claimed = True
    key, claim = claim_key(keys.start, keys.lineage), encode_claim(keys.session_id)
    if create_or_find(storage, key, claim) is not None:
        raise FencedError(
            "this session was detached, and resumed more than once: another one has committed it, "
            "or is about to. Nothing was committed here"
        )


# --- changes -----------------------------------------------------------------------------------


def _packed_changes(changes: ChangeSet) -> DetachedChanges:
    return DetachedChanges(
        changes.nodes,
        changes.truncated,
        {node: [_packed_rows(rows) for rows in tables] for node, tables in changes.tables.items()},
        {node: ChunkTable.of(refs) for node, refs in changes.chunks.items() if refs},
        {
            node: [each if isinstance(each, bytes) else each.pack() for each in tables]
            for node, tables in changes.zones.items()
        },
        changes.durable,
    )


def _changes(packed: DetachedChanges) -> ChangeSet:
    return ChangeSet(
        dict(packed.nodes),
        {node: dict(table.refs()) for node, table in packed.singles.items()},
        dict(packed.truncated),
        [],
        {node: tuple(map(_rows, tables)) for node, tables in packed.rows.items()},
        zones={node: tuple(tables) for node, tables in packed.zones.items()},
        durable=dict(packed.durable),
    )


def _packed_rows(rows: Rows) -> DetachedRows:
    if isinstance(rows, Spilled):
        return rows.manifest, rows.unset, rows.nbytes, rows.written_bytes
    return rows


def _rows(packed: DetachedRows) -> Rows:
    return packed if isinstance(packed, ChunkTable) else Spilled(*packed)


def _packed_reads(reads: Reads) -> DetachedReads:
    chunks = {
        node: np.array(sorted(seen), np.int64).reshape(len(seen), -1 if seen != {()} else 0)
        for node, seen in reads.copy().chunks.items()
        if seen
    }
    return DetachedReads(chunks, reads.boxes, sorted(reads.documents))


def _reads(packed: DetachedReads) -> Reads:
    chunks = {node: {tuple(c) for c in coords.tolist()} for node, coords in packed.chunks.items()}
    return Reads(chunks, dict(packed.boxes), set(packed.documents))


def _packed_owners(owners: Owners) -> DetachedOwners:
    chunks: dict[tuple[str, bytes], dict[Coords, StoredRef]] = {}
    for (node, coords), (copy, ref) in owners.chunks.items():
        chunks.setdefault((copy, node), {})[coords] = ref
    return DetachedOwners(
        [(copy, node, ChunkTable.of(refs)) for (copy, node), refs in chunks.items()],
        owners.nodes,
        {
            node: [(copy, _packed_rows(rows)) for copy, rows in layers]
            for node, layers in owners.tables.items()
        },
        sorted(owners.objects),
        sorted(owners.copies),
    )


def _owners(packed: DetachedOwners) -> Owners:
    return Owners(
        {
            (node, coords): (copy, ref)
            for copy, node, table in packed.chunks
            for coords, ref in table.refs()
        },
        dict(packed.nodes),
        {
            node: tuple((copy, _rows(rows)) for copy, rows in layers)
            for node, layers in packed.rows.items()
        },
        set(packed.objects),
        set(packed.copies),
    )
