"""Moving what was changed on one snapshot onto the tip of a branch.

The logs of the commits between are taken apart, together with one's own changes, and
`planning.rebase` decides. Invariants: a base that is no ancestor of the tip, or a log that cannot
be read, ends in an error; of what has been uploaded nothing is uploaded again: chunks stay where
they are, a manifest is written anew only if rows of it were left to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zarr_manifests.engine.changes import ChangeSet
from zarr_manifests.engine.chunks import SessionKeys
from zarr_manifests.engine.context import Context
from zarr_manifests.engine.logs import deltas_between, tables_of
from zarr_manifests.engine.objects import Upload
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.errors import Conflict, ConflictError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.manifest import Manifest, ManifestRef, Part
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.root import Branch
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.planning.components import Changes
from zarr_manifests.planning.merge import Layer, merge_layers, without
from zarr_manifests.planning.reads import Reads
from zarr_manifests.planning.rebase import Policy, Rebased, rebase

__all__ = ["Rebasing", "rebase_changes", "rebase_delta"]


@dataclass(frozen=True, slots=True)
class Rebasing:
    """What a commit may do when others came first.

    Parameters
    ----------
    allowed : bool
        Whether it may be put on top of theirs at all.
    policy : {"fail", "ours", "theirs"} or callable
        Who wins where both sides may.
    serializable : bool
        Whether nothing that was read may have been changed by others.
    attempts : int or None
        How often it is tried; as configured if not given.
    """

    allowed: bool = True
    policy: Policy = "fail"
    serializable: bool = False
    attempts: int | None = None


@dataclass(frozen=True, slots=True)
class _Mine:
    """What is to be moved."""

    nodes: Mapping[str, Node | None]
    truncated: Mapping[bytes, Coords]
    tables: Mapping[bytes, ChunkTable]
    reads: Reads


def rebase_delta(
    context: Context,
    view: SnapshotView,
    tip: Branch,
    delta: Delta,
    tables: Mapping[bytes, ChunkTable],
    reads: Reads,
    rebasing: Rebasing,
    keys: SessionKeys,
) -> tuple[SnapshotView, Delta, list[Upload]]:
    """The tip, opened; the delta as it is there; and what else must be uploaded for it.

    The delta is the same object where nothing in it has to change.

    Raises
    ------
    ConflictError
        If it cannot be put on top of what came first.
    """
    nodes: dict[str, Node | None] = dict.fromkeys(delta.deleted)
    nodes |= {node.path: node for node in delta.nodes}
    on, moved = _onto(context, view, tip, _Mine(nodes, delta.truncated, tables, reads), rebasing)
    if not moved.dropped and moved.nodes == nodes:
        return on, delta, []
    embedded, manifests = delta.embedded, delta.manifests
    uploads: list[Upload] = []
    if moved.dropped:
        embedded, manifests, uploads = _left(delta, tables, moved.dropped, keys)
    changed = replace(
        delta,
        nodes=tuple(node for node in moved.nodes.values() if node is not None),
        deleted={p: on.nodes[p].node_id for p, node in moved.nodes.items() if node is None},
        embedded=embedded,
        manifests=manifests,
    )
    return on, changed, uploads


def _left(
    delta: Delta,
    tables: Mapping[bytes, ChunkTable],
    dropped: Mapping[bytes, IndexArray],
    keys: SessionKeys,
) -> tuple[Manifest, tuple[ManifestRef, ...], list[Upload]]:
    """The delta's chunk tables without the dropped rows, where they were."""

    def left(node_id: bytes) -> Manifest:
        table = without(tables[node_id], dropped[node_id])
        return Manifest.of([(node_id, table)] if len(table) else [])

    parts: list[tuple[Part, bytes]] = []
    manifests: list[ManifestRef] = []
    uploads: list[Upload] = []
    for part, data in delta.embedded.parts:
        parts += left(part.node_id).parts if part.node_id in dropped else ((part, data),)
    for ref in delta.manifests:
        ids = [part.node_id for part in ref.parts]
        if dropped.keys().isdisjoint(ids):
            manifests.append(ref)
            continue
        rest = [
            row
            for node_id in ids
            for row in (
                left(node_id) if node_id in dropped else Manifest.of([(node_id, tables[node_id])])
            ).parts
        ]
        if rest:
            manifest = Manifest(tuple(rest))
            upload = Upload(keys.next("manifests"), manifest.encode())
            uploads.append(upload)
            manifests.append(ManifestRef(upload.ref, manifest.directory()))
    return Manifest(tuple(parts)), tuple(manifests), uploads


def rebase_changes(
    context: Context, view: SnapshotView, tip: Branch, changes: ChangeSet, rebasing: Rebasing
) -> tuple[SnapshotView, ChangeSet]:
    """The tip, opened, and changes that were made on `view` as they are there.

    Raises
    ------
    ConflictError
        If they cannot be put on top of what came first.
    """
    tables = {node: t for node in changes.touched() if (t := changes.table(node)) is not None}
    mine = _Mine(changes.nodes, changes.truncated, tables, changes.reads)
    on, moved = _onto(context, view, tip, mine, rebasing)
    result = changes.copy()
    result.nodes = dict(moved.nodes)
    for node_id, coords in moved.dropped.items():
        gone = set(map(tuple, coords.tolist()))
        refs = changes.chunks.get(node_id, {})
        kept = {at: ref for at, ref in refs.items() if at not in gone}
        left = [without(table, coords) for table in changes.tables.get(node_id, ())]
        result.chunks.pop(node_id, None)
        result.tables.pop(node_id, None)
        if kept:
            result.chunks[node_id] = kept
        if any(map(len, left)):
            result.tables[node_id] = tuple(table for table in left if len(table))
    return on, result


def _onto(
    context: Context, view: SnapshotView, tip: Branch, mine: _Mine, rebasing: Rebasing
) -> tuple[SnapshotView, Rebased]:
    between = deltas_between(context, view.ref, tip.head)
    if between is None:
        raise ConflictError(
            f"the snapshot the session began at ({view.snapshot_id}) is no longer in the "
            "branch's history; was the branch reset? Nothing was committed",
            [Conflict("/", "history", "the branch was reset")],
        )
    if not rebasing.allowed:
        raise ConflictError(
            "other commits came first, and this one was told not to be put on top of them; "
            "nothing was committed. Call session.rebase(), look at what there is, commit again",
            [Conflict("/", "history", "the branch has moved")],
        )
    ours = Changes.of(view.nodes, mine.nodes, mine.truncated, mine.tables)
    wanted = {*ours.nodes, *(mine.reads.nodes() if rebasing.serializable else ())}
    theirs = _theirs(context, view, between, wanted)
    on = context.open_branch(tip)
    moved = rebase(
        ours,
        theirs,
        on.nodes,
        policy=rebasing.policy,
        reads=mine.reads,
        serializable=rebasing.serializable,
    )
    if moved.conflicts:
        raise ConflictError(
            "other commits came first and this one cannot be put on top of them; nothing was "
            "committed. Open a new session on the branch and make the changes again",
            moved.conflicts,
        )
    return on, moved


def _theirs(
    context: Context, view: SnapshotView, between: list[Delta], wanted: set[bytes]
) -> Changes:
    """What the commits between, newest first, have done; chunks only of the nodes wanted."""
    nodes = dict(view.nodes)
    theirs = Changes({})
    for delta in reversed(between):
        changed: dict[str, Node | None] = dict.fromkeys(delta.deleted)
        changed |= {node.path: node for node in delta.nodes}
        tables = {}
        for node_id, found in tables_of(context, delta, wanted).items():
            table = merge_layers([Layer(None, found)]).table
            if table is not None:
                tables[node_id] = table
        theirs = theirs.then(Changes.of(nodes, changed, delta.truncated, tables))
        for path in delta.deleted:
            nodes.pop(path, None)
        nodes.update((node.path, node) for node in delta.nodes)
    return theirs
