"""How many chunks an array has, exactly; and the branch's index of leaves, kept up to date.

A count merges the live deltas' chunk tables, as any read does, with the base. Of the base it reads
the leaves that live deltas may change. Only deltas newer than a leaf apply to it. Invariant: an
index that is missing, outdated or unreadable counts as absent, so it makes no count wrong.

A compaction calls `with_entries` in the swap that installs its leaves. A commit writes no leaves.

Each branch of the root refers to a directory, or to none. The directory refers to pages of zone
maps (`zones`). These are reachable, and nothing else under `indexes/` is. Index entries do not make
the manifests they describe reachable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.compact.zone_index import NewPages, pages_after
from zarr_manifests.engine.edit.overlay import node_path
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.root.epochs import fenced
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.totals import amounts_of, changes_of, leaf_name
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.engine.snapshot.zones import index_directory, index_pointer
from zarr_manifests.errors import NotFoundError
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.index import IndexDirectory, LeafName
from zarr_manifests.format.manifest import ManifestRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.grid import Box
from zarr_manifests.keys import no_array
from zarr_manifests.planning.conflict.admission import Writer, admission
from zarr_manifests.planning.layout.leaves import PlacedLeaf
from zarr_manifests.planning.tables.live_deltas import kinds_at, lies_in, rows_in
from zarr_manifests.planning.tables.merge import Overlay, inside
from zarr_manifests.planning.tables.sums import NOTHING
from zarr_manifests.reports import Amount, Usage

_ATTEMPTS: Final = 100


@dataclass(frozen=True, slots=True)
class _Group:
    """Leaves of a node that are merged up to the same sequence, and the overlay on top of them.

    The group of leaves without live changes also has everything outside all leaves.
    """

    leaves: list[PlacedLeaf]
    overlay: Overlay


class Presence:
    """Which chunks of a snapshot exist. Fetches only what the queries need.

    It uses the index of the branch, or of `main` if none is given.
    """

    def __init__(self, context: ReadContext, view: SnapshotView, branch: str | None = None) -> None:
        self._context, self._view, self._branch = context, view, branch

    def count(self, node_id: bytes) -> int:
        """Number of chunks that exist."""
        leaves = self._view.index.placed(node_id)
        return sum(leaf.part.count for leaf in leaves) + self._difference(node_id)[0]

    def stored_bytes(self, node_id: bytes) -> int | None:
        """Bytes of all chunks that exist; None if the index does not know them of each leaf."""
        leaves = self._view.index.placed(node_id)
        entries = index_directory(self._context, index_pointer(self._context, self._branch)).entries
        names = [leaf_name(leaf) for leaf in leaves]
        if not all(name in entries for name in names):
            return None
        return sum(entries[name] for name in names) + self._difference(node_id)[1]

    def _groups(self, node_id: bytes) -> list[_Group]:
        """The node's leaves and the rows of live deltas, in groups; each row is in one group."""
        leaves = self._view.index.placed(node_id)
        overlay = self._view.overlay(node_id, 0)
        merged = [leaf for leaf in leaves if leaf.merged]
        if not merged:
            return [_Group(leaves, overlay)]
        rest = rows_in(overlay.table, (leaf.part.box for leaf in merged), outside=True)
        others = [leaf for leaf in leaves if not leaf.merged]
        groups = [_Group(others, Overlay(overlay.truncated, rest))]
        for sequence in sorted({leaf.merged for leaf in merged}):
            due = [leaf for leaf in merged if leaf.merged == sequence]
            newer = self._view.overlay(node_id, sequence)
            rows = rows_in(newer.table, (leaf.part.box for leaf in due))
            groups.append(_Group(due, Overlay(newer.truncated, rows)))
        return groups

    def _difference(self, node_id: bytes) -> tuple[int, int]:
        """How many more chunks, and bytes, there are than in the base."""
        groups = self._groups(node_id)
        due = [_concerned(group) for group in groups]
        wanted = {leaf.part.box for leaves in due for leaf in leaves}
        held = {one.box: one for one in self._view.leaves(node_id, wanted.__contains__)}
        more = nbytes = 0
        for group, leaves in zip(groups, due, strict=True):
            cut, table = group.overlay.truncated, group.overlay.table
            if table is not None:
                more += int((table.kind > RefKind.UNSET).sum())
                nbytes += int(table.length.sum())
            for leaf in leaves:
                old = held[leaf.part.box]
                coords = old.coords()
                gone = np.zeros(len(coords), np.bool_) if cut is None else ~inside(coords, cut)
                if table is not None:
                    gone |= kinds_at(table, coords) >= 0
                more -= int(gone.sum())
                nbytes -= int(old.length[gone].sum())
        return more, nbytes


def _concerned(group: _Group) -> list[PlacedLeaf]:
    """Leaves of the group that its overlay may change."""
    cut, table = group.overlay.truncated, group.overlay.table
    rows = None if table is None else table.coords()

    def concerned(box: Box) -> bool:
        cuts = cut is not None and any(n > at for n, at in zip(box.hi, cut, strict=True))
        return cuts or (rows is not None and bool(lies_in(box, rows).any()))

    return [leaf for leaf in group.leaves if concerned(leaf.part.box)]


def counted_usage(context: ReadContext, view: SnapshotView, path: str, branch: str | None) -> Usage:
    """Exact chunks and bytes of one array, with the help of the branch's index.

    Raises
    ------
    NotFoundError
        If there is no such array.
    """
    node = view.nodes.get(node_path(path))
    if node is None or node.array is None:
        raise no_array(path, (p for p, n in view.nodes.items() if n.array is not None))
    presence = Presence(context, view, branch)
    total = amounts_of(view).get(node.node_id, NOTHING)
    chunks = total.chunks if total.chunks_exact else presence.count(node.node_id)
    nbytes = total.nbytes if total.nbytes_exact else presence.stored_bytes(node.node_id)
    growth = changes_of(view).get(node.node_id, NOTHING).at_most(chunks)
    found = Usage(f"/{node.path}", Amount(chunks, nbytes), growth, node.array.grid.shape)
    return Usage("", found.total, growth, arrays=(found,), snapshot_id=view.snapshot_id)


def with_entries(
    context: ReadContext,
    branch: Branch,
    keys: SessionKeys,
    entries: Mapping[LeafName, int],
    manifests: Iterable[ManifestRef],
    nodes: Mapping[bytes, Node],
    zones: Mapping[bytes, NewPages] | None = None,
) -> tuple[Branch, list[Upload]]:
    """Add entries, and pages of zone maps by node, to the branch's index.

    Returns the branch, and the objects to upload, of which the directory is the last. `manifests`
    are those of the branch's base, and `nodes` those of its head.

    Of older entries only those of leaves of the base are kept. Others would
    grow the directory for leaves that only old snapshots have, or none.
    """
    live = [
        (part.node_id, part.box, ref.blob.key, ref.blob.crc32c)
        for ref in manifests
        for part in ref.parts
    ]
    known = index_directory(context, branch.index)
    kept = {name: known.entries[name] for name in live if name in known.entries}
    changed = {node_id for node_id, *_ in entries}
    leaves = live if known.zones or zones else ()
    paged, uploads = pages_after(context, keys, known.zones, zones or {}, changed, leaves, nodes)
    directory = IndexDirectory({**kept, **entries}, paged)
    uploads.append(Upload(keys.next("indexes"), directory.encode()))
    return replace(branch, index=uploads[-1].ref.bare()), uploads


def add_to_index(
    context: Context,
    branch: str,
    view: SnapshotView,
    keys: SessionKeys,
    operation: str,
    zones: Mapping[bytes, NewPages],
) -> None:
    """Swap in the branch with these pages of zone maps, by node, in its index.

    `view` is the head that they were made on.

    Raises
    ------
    FencedError
        If a collection has shut this out.
    NotFoundError
        If the branch was deleted.
    """

    def change(root: Root) -> Root:
        if admission(root, Writer(keys.start)) is not None:
            raise fenced(root, keys.start, f"{operation!r}", "Nothing was changed; do it again")
        tip = root.branches.get(branch)
        if tip is None:
            raise NotFoundError(f"{operation}: branch {branch!r} was deleted; nothing was added")
        now = view if tip.head.key == view.ref.key else context.open_branch(tip)
        moved, uploads = with_entries(context, tip, keys, {}, now.manifests, now.by_id, zones)
        creates = [partial(context.objects.create, one.key, one.data) for one in uploads]
        context.runtime.parallel(creates)
        return replace(root, branches={**root.branches, branch: moved})

    context.roots.update(change, operation, branch, "", _ATTEMPTS)
