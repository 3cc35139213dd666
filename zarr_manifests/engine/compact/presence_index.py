"""The index of initialized chunks: keeping it up to date, and using it.

A query merges the live deltas' chunk tables, as any read does, with the base. For the base it uses
bitmaps of leaves where the index has them, and the leaves themselves otherwise. Only deltas newer
than a leaf apply to it. Invariant: an index that is missing, outdated or unreadable counts as
absent, so results never depend on it.

A writer of new leaves calls `index_leaves` for the objects to upload, and `with_entries` for the
branch that refers to them. A compaction does so in the swap that installs its leaves. A commit
writes no leaves.

Each branch of the root refers to a directory, or to none. The directory refers to bitmap objects
(`blobs`) and to objects of other indexes (`others`). These are reachable, and nothing else under
`indexes/` is. Index entries do not make the manifests they describe reachable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Final

from zarr_manifests.engine.compact.zone_index import NewPages, pages_after
from zarr_manifests.engine.edit.overlay import node_path
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.root.epochs import fenced
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.totals import amounts_of, changes_of, leaf_name
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.engine.snapshot.zones import (
    index_directory,
    index_pointer,
    usable,
)
from zarr_manifests.errors import NotFoundError
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.index import Bitmap, Bitmaps, IndexDirectory, IndexEntry
from zarr_manifests.format.manifest import ManifestRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import ZONE_MAPS, Branch, Root
from zarr_manifests.grid import Box
from zarr_manifests.keys import no_array
from zarr_manifests.planning.conflict.admission import Writer, admission
from zarr_manifests.planning.layout.leaves import PlacedLeaf
from zarr_manifests.planning.tables.live_deltas import kinds_at, lies_in, rows_in
from zarr_manifests.planning.tables.merge import Overlay, inside
from zarr_manifests.planning.tables.sums import NOTHING
from zarr_manifests.planning.upkeep.garbage import parts
from zarr_manifests.reports import Amount, Usage

_BITMAPS_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 1 << 10
_ATTEMPTS: Final = 100


@dataclass(frozen=True, slots=True)
class _Group:
    """Leaves of a node that are merged up to the same sequence, and the overlay on top of them.

    The group of leaves without live changes also has everything outside all leaves.
    """

    leaves: list[PlacedLeaf]
    overlay: Overlay

    @property
    def rows(self) -> int:
        """Number of chunks that live deltas set."""
        table = self.overlay.table
        return 0 if table is None else int((table.kind > RefKind.UNSET).sum())


class Presence:
    """Which chunks of a snapshot exist. Fetches only what the queries need.

    It uses the index of the branch, or of `main` if none is given.
    """

    def __init__(self, context: ReadContext, view: SnapshotView, branch: str | None = None) -> None:
        self._context = context
        self._view = view
        self._branch = branch
        self._directory: IndexDirectory | None = None

    def count(self, node_id: bytes) -> int:
        """Number of chunks that exist."""
        groups = self._groups(node_id)
        leaves = self._view.index.placed(node_id)
        return sum(leaf.part.count for leaf in leaves) + self._difference(node_id, groups)

    def stored_bytes(self, node_id: bytes) -> int | None:
        """Bytes of all chunks that exist; None if the index cannot tell.

        It cannot if chunks of the base were overwritten or removed since.
        """
        leaves = self._view.index.placed(node_id)
        entries = [self._entry(leaf) for leaf in leaves]
        known = [entry.stored_bytes for entry in entries if entry is not None]
        if len(known) < len(leaves):
            return None
        groups = self._groups(node_id)
        if self._difference(node_id, groups) != sum(group.rows for group in groups):
            return None
        tables = [group.overlay.table for group in groups]
        return sum(known) + sum(int(table.length.sum()) for table in tables if table is not None)

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

    def _difference(self, node_id: bytes, groups: Sequence[_Group]) -> int:
        """How many more chunks exist than in the base."""
        due = [_concerned(group) for group in groups]
        bitmaps = self._bitmaps(node_id, [leaf for leaves in due for leaf in leaves])
        more = 0
        for group, leaves in zip(groups, due, strict=True):
            more += group.rows
            cut, table = group.overlay.truncated, group.overlay.table
            rows = None if table is None else table.coords()
            for leaf in leaves:
                bitmap = bitmaps[leaf.part.box]
                if cut is not None:
                    coords = bitmap.coords(leaf.part.box)
                    kept = inside(coords, cut)
                    if table is not None:
                        kept &= kinds_at(table, coords) < 0
                    more -= leaf.part.count - int(kept.sum())
                elif rows is not None:
                    more -= int(bitmap.has(rows[lies_in(leaf.part.box, rows)]).sum())
        return more

    def _bitmaps(self, node_id: bytes, leaves: Sequence[PlacedLeaf]) -> dict[Box, Bitmap]:
        """The bitmaps of these leaves, by box, fetched in one round."""
        entries = [self._entry(leaf) for leaf in leaves]
        blobs = {e.blob.key: e.blob for e in entries if e is not None}
        loads = [partial(usable, self._context, blob, Bitmaps) for blob in blobs.values()]
        loaded = dict(zip(blobs, self._context.runtime.parallel(loads), strict=True))
        found: dict[Box, Bitmap] = {}
        for leaf, entry in zip(leaves, entries, strict=True):
            bitmaps = None if entry is None else loaded[entry.blob.key]
            if entry is None or bitmaps is None or entry.position >= len(bitmaps.bitmaps):
                continue
            bitmap = bitmaps.bitmaps[entry.position]
            if (bitmap.box, bitmap.count) == (leaf.part.box, leaf.part.count):
                found[leaf.part.box] = bitmap
        missing = {leaf.part.box for leaf in leaves} - found.keys()
        if missing:
            for table in self._view.leaves(node_id, missing.__contains__):
                found[table.box] = Bitmap.of(table)
        return found

    def _entry(self, leaf: PlacedLeaf) -> IndexEntry | None:
        if self._directory is None:
            pointer = index_pointer(self._context, self._branch)
            self._directory = index_directory(self._context, pointer)
        return self._directory.entries.get(leaf_name(leaf))


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


def index_leaves(
    keys: SessionKeys, leaves: Iterable[tuple[bytes, BlobRef, int, Bitmap]]
) -> tuple[list[Upload], list[IndexEntry]]:
    """Objects to upload for leaves (node id, manifest, chunk bytes, bitmap), and index entries."""
    made = []
    for node_id, blob, stored, bitmap in leaves:
        size = len(bitmap.bits or b"") + 2 * (0 if bitmap.index is None else len(bitmap.index))
        # Large bitmaps are stored by array, so that a query for one array fetches no other's.
        made.append((node_id if size > _SMALL_BYTES else b"", node_id, blob, stored, bitmap, size))
    made.sort(key=itemgetter(0, 1))
    uploads: list[Upload] = []
    entries: list[IndexEntry] = []
    for _, together in groupby(made, itemgetter(0)):
        for group in parts(together, itemgetter(5), _BITMAPS_BYTES):
            bitmaps = Bitmaps(tuple(bitmap for *_, bitmap, _ in group))
            uploads.append(Upload(keys.next("indexes"), bitmaps.encode()))
            for position, (_, node_id, blob, stored, bitmap, _) in enumerate(group):
                name = (node_id, bitmap.box, blob.key, blob.crc32c)
                at = uploads[-1].ref, position
                entries.append(IndexEntry(*name, bitmap.count, stored, *at))
    return uploads, entries


def with_entries(
    context: ReadContext,
    branch: Branch,
    keys: SessionKeys,
    entries: Sequence[IndexEntry],
    manifests: Iterable[ManifestRef],
    nodes: Mapping[bytes, Node],
    zones: Mapping[bytes, NewPages] | None = None,
) -> tuple[Branch, list[Upload]]:
    """Add entries, and pages of zone maps by node, to the branch's index.

    Returns the branch, and the objects to upload, of which the directory is the last. `manifests`
    are those of the branch's base, and `nodes` those of its head.

    Of older entries only those of leaves of the base are kept. Others would keep bitmaps of leaves
    that only old snapshots have, or none, from being collected.
    """
    live = [
        (part.node_id, part.box, ref.blob.key, ref.blob.crc32c)
        for ref in manifests
        for part in ref.parts
    ]
    known = index_directory(context, branch.index)
    kept = {name: known.entries[name] for name in live if name in known.entries}
    new = {entry.name: entry for entry in entries}
    changed = {entry.node_id for entry in entries}
    leaves = live if known.zones or zones else ()
    paged, uploads = pages_after(context, keys, known.zones, zones or {}, changed, leaves, nodes)
    directory = IndexDirectory(kept | new, known.others, paged)
    uploads.append(Upload(keys.next("indexes"), directory.encode()))
    return replace(branch, index=uploads[-1].ref.bare()), uploads


def add_to_index(
    context: Context,
    branch: str,
    view: SnapshotView,
    keys: SessionKeys,
    operation: str,
    entries: Sequence[IndexEntry] = (),
    zones: Mapping[bytes, NewPages] | None = None,
) -> None:
    """Swap in the branch with these entries, and pages of zone maps by node, in its index.

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
        added = entries, now.manifests, now.by_id, zones
        moved, uploads = with_entries(context, tip, keys, *added)
        creates = [partial(context.objects.create, one.key, one.data) for one in uploads]
        context.runtime.parallel(creates)
        new = replace(root, branches={**root.branches, branch: moved})
        return new.with_feature(ZONE_MAPS) if zones else new

    context.roots.update(change, operation, branch, "", _ATTEMPTS)
