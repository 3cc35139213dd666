"""Folding: all live deltas of a branch merged into a new base, as a REWRITE commit of its own.

A fold changes no data, so it never conflicts: if the branch has moved meanwhile, the newer deltas
stay on top of the new base, provided nobody else has replaced the base the fold started from. If
somebody has, this fold is dropped. Manifests that no delta touched stay linked, same object, same
key; every array of a touched manifest is packed anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from zarr_manifests.engine.chunks import SessionKeys
from zarr_manifests.engine.context import Context
from zarr_manifests.engine.objects import Upload
from zarr_manifests.engine.roots import RootAt
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.format.blobs import BlobRef, with_copies
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.delta import COMMIT_ID_BYTES, CommitKind, Delta
from zarr_manifests.format.manifest import Manifest, ManifestRef
from zarr_manifests.format.nodes import Base, NodeKind
from zarr_manifests.format.root import LogEntry
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.merge import split
from zarr_manifests.planning.packing import LEAF_ROWS, pack_leaves

__all__ = ["fold_branch"]

_ATTEMPTS = 10
_BASE_COPY_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """A new base and what has to be uploaded for it."""

    base: BlobRef
    base_data: bytes
    log: BlobRef
    commit_id: bytes
    uploads: tuple[Upload, ...]


def fold_branch(context: Context, branch: str) -> BlobRef | None:
    """Fold the branch's live deltas; None if there are none or somebody else was faster."""
    at = context.roots.latest
    tip = context.roots.with_branch(at.root, branch).branches.get(branch)
    if tip is None:
        return None
    view = context.open_branch(tip)
    folded = view.snapshot.deltas
    if not folded:
        return None
    keys = SessionKeys(at.root.version, context.runtime)
    rewrite = _rewrite(context, view, keys)
    uploads = rewrite.uploads
    for attempt in range(_ATTEMPTS):
        tip = context.roots.with_branch(at.root, branch).branches.get(branch)
        if tip is None or keys.start < at.root.fence:
            return None  # behind the fence, what was uploaded may be collected
        current = context.objects.load(tip.head, Snapshot)
        same_base = (current.base and current.base.key) == (
            view.snapshot.base and view.snapshot.base.key
        )
        known = [entry.log.key for entry in current.deltas[: len(folded)]]
        if not same_base or known != [entry.log.key for entry in folded]:
            return None
        landed = _try(context, at, branch, tip.head, current, rewrite, uploads, keys, len(folded))
        if landed is not None:
            return landed
        uploads = ()
        context.roots.backoff(attempt)
        at = context.roots.read()
    return None


def _try(
    context: Context,
    at: RootAt,
    branch: str,
    parent: BlobRef,
    current: Snapshot,
    rewrite: _Rewrite,
    uploads: tuple[Upload, ...],
    keys: SessionKeys,
    folded: int,
) -> BlobRef | None:
    """One attempt to put the new base under the branch; None if somebody else's swap came first."""
    snapshot = Snapshot(
        parent.bare(),
        rewrite.commit_id,
        CommitKind.REWRITE,
        f"fold {folded} deltas",
        {},
        max(context.runtime.now_ms(), current.written_ms),
        rewrite.base,
        current.deltas[folded:],
        rewrite.log,
        {},
        current.streams,
        sequence=current.sequence,
    ).with_delta_copies({})
    head = Upload(keys.next("snapshots"), snapshot.encode())
    context.runtime.parallel(
        [
            *(partial(context.objects.create, u.key, u.data) for u in (*uploads, head)),
            partial(context.roots.archive, at),
        ]
    )
    entry = LogEntry(
        at.root.version + 1,
        context.runtime.now_ms(),
        "commit rewrite",
        branch,
        snapshot_id_of(head.key),
        rewrite.commit_id,
    )
    old = context.roots.with_branch(at.root, branch)
    moved = replace(old.branches[branch], head=head.ref, base=rewrite.base, ahead=snapshot.ahead)
    root = replace(old, branches={**old.branches, branch: moved}).with_log(entry)
    root = root.with_copies({head.key: head.data, rewrite.base.key: rewrite.base_data}, branch)
    landed = context.roots.swap(at, root, rewrite.commit_id)
    if landed is None:
        return None
    context.objects.remember(head.ref, snapshot)
    return head.ref


def _rewrite(context: Context, view: SnapshotView, keys: SessionKeys) -> _Rewrite:
    touched = view.touched()
    alive = {node.node_id for node in view.nodes.values()}
    kept, due = [], {node for node in touched if node in alive}
    for manifest in view.manifests:
        ids = {part.node_id for part in manifest.parts}
        if ids & touched or not ids <= alive:
            due |= ids & alive
        else:
            kept.append(manifest)
    tables: dict[tuple[bytes, int], ChunkTable] = {}
    for node_id in due:
        table = view.chunks(node_id)
        if table is not None:
            for i, leaf in enumerate(split(table, LEAF_ROWS)):
                tables[node_id, i] = leaf
    uploads, refs, known = [], [], {}
    for group in pack_leaves({leaf: len(table) for leaf, table in tables.items()}):
        packed = Manifest.of([(leaf[0], tables[leaf]) for leaf in group])
        upload = Upload(keys.next("manifests"), packed.encode())
        uploads.append(upload)
        refs.append(ManifestRef(upload.ref, packed.directory()))
        known[upload.key] = upload.data
    base_manifests = _with_coordinate_copies(view, [*kept, *refs], known)
    nodes = tuple(view.nodes[path] for path in sorted(view.nodes))
    base = Base(nodes, base_manifests, view.snapshot.sequence)
    base_upload = Upload(keys.next("nodes"), base.encode())
    commit_id = context.runtime.random_bytes(COMMIT_ID_BYTES)
    log = Upload(keys.next("deltas"), Delta(commit_id).encode())
    context.objects.remember(base_upload.ref, base)
    context.objects.remember(log.ref, Delta(commit_id))
    return _Rewrite(
        base_upload.ref, base_upload.data, log.ref, commit_id, (*uploads, log, base_upload)
    )


def _with_coordinate_copies(
    view: SnapshotView, manifests: list[ManifestRef], known: dict[str, bytes]
) -> tuple[ManifestRef, ...]:
    """The directory, carrying copies of the manifests that hold coordinates while they fit."""
    coordinates = {
        node.node_id
        for node in view.nodes.values()
        if node.kind is NodeKind.ARRAY and node.array and node.array.is_coordinate(node.path)
    }
    order = sorted(
        range(len(manifests)),
        key=lambda i: (
            not any(part.node_id in coordinates for part in manifests[i].parts),
            manifests[i].blob.length,
        ),
    )
    wanted = [i for i in order if any(part.node_id in coordinates for part in manifests[i].parts)]
    copies = with_copies([manifests[i].blob for i in wanted], known, _BASE_COPY_BYTES)
    out = [replace(manifest, blob=manifest.blob.bare()) for manifest in manifests]
    for i, blob in zip(wanted, copies, strict=True):
        out[i] = replace(out[i], blob=blob)
    return tuple(out)
