"""The index of initialized chunks: keeping it up to date, and using it.

A query merges the live deltas' chunk tables, as any read does, with the base. For the base it uses
bitmaps of leaves where the index has them, and the leaves themselves otherwise. Only deltas newer
than a leaf apply to it. Invariant: an index that is missing, outdated or unreadable counts as
absent, so results never depend on it.

A writer of new leaves calls `index_leaves` for the objects to upload, and `with_entries` for the
branch that refers to them. A compaction does so in the swap that installs its leaves; `build_index`
does so for existing leaves. A commit writes no leaves.

Each branch of the root refers to a directory, or to none. The directory refers to bitmap objects
(`blobs`) and to objects of other indexes (`others`). These are reachable, and nothing else under
`indexes/` is. Index entries do not make the manifests they describe reachable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.compact.zone_index import NewPages, pages_after
from zarr_manifests.engine.edit.overlay import SessionView, node_path
from zarr_manifests.engine.history.follow import opened
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.totals import amounts_of, changes_of
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.engine.snapshot.zones import (
    UNUSABLE,
    index_directory,
    index_pointer,
)
from zarr_manifests.errors import FencedError, NotFoundError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.index import Bitmap, Bitmaps, IndexDirectory, IndexEntry, LeafName
from zarr_manifests.format.manifest import ManifestRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.keys import no_array
from zarr_manifests.planning.conflict.admission import Writer, admission
from zarr_manifests.planning.tables.merge import Overlay, inside
from zarr_manifests.planning.tables.presence import kinds_at, laid_over, rows_in, within
from zarr_manifests.planning.tables.regions import Bounds, chunk_box
from zarr_manifests.planning.tables.sums import NOTHING
from zarr_manifests.reports import Amount, Usage

_BITMAPS_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 1 << 10
_ATTEMPTS: Final = 100


@dataclass(frozen=True, slots=True)
class _IndexedLeaf:
    node_id: bytes
    box: Box
    count: int
    manifest: ManifestRef
    merged: int
    """The sequence up to which it has all changes."""

    @property
    def name(self) -> LeafName:
        return self.node_id, self.box, self.manifest.blob.key, self.manifest.blob.crc32c


@dataclass(frozen=True, slots=True)
class _Group:
    """Leaves of a node that are merged up to the same sequence, and the overlay on top of them.

    The group of leaves without live changes also has everything outside all leaves.
    """

    leaves: list[_IndexedLeaf]
    overlay: Overlay

    @property
    def rows(self) -> int:
        """Number of chunks that live deltas set."""
        table = self.overlay.table
        return 0 if table is None else int((table.kind > RefKind.UNSET).sum())


def _leaves_of(view: SnapshotView) -> list[_IndexedLeaf]:
    return [
        _IndexedLeaf(part.node_id, part.box, part.count, manifest, merged)
        for manifest in view.manifests
        for part, merged in manifest.leaves()
    ]


class Presence:
    """Which chunks of a snapshot exist. Fetches only what the queries need.

    It uses the index of the branch, or of `main` if none is given.

    Attributes
    ----------
    counted : bool
        Whether a leaf had to be read because the index did not have it.
    """

    def __init__(self, context: ReadContext, view: SnapshotView, branch: str | None = None) -> None:
        self._context = context
        self._view = view
        self._branch = branch
        self._by_node: dict[bytes, list[_IndexedLeaf]] = {}
        for leaf in _leaves_of(view):
            self._by_node.setdefault(leaf.node_id, []).append(leaf)
        self._directory: IndexDirectory | None = None
        self.counted = False

    def coords(self, node_id: bytes, region: Box) -> IndexArray:
        """Coordinates (int64[n, ndim]) of the chunks in the region that exist, in C order."""
        groups = self._groups(node_id, region)
        if not region.size:
            return np.empty((0, region.ndim), np.int64)
        due = [leaf for group in groups for leaf in group.leaves if leaf.box.overlaps(region)]
        bitmaps = self._bitmaps(node_id, due)
        parts = []
        for group in groups:
            shared = [leaf.box for leaf in group.leaves if leaf.box in bitmaps]
            found = [bitmaps[box].coords(region) for box in shared]
            coords = np.concatenate([np.empty((0, region.ndim), np.int64), *found])
            if group.overlay.truncated is not None:
                coords = coords[inside(coords, group.overlay.truncated)]
            parts.append(laid_over(coords, group.overlay.table, region))
        return parts[0] if len(parts) == 1 else laid_over(np.concatenate(parts), None, region)

    def count(self, node_id: bytes) -> int:
        """Number of chunks that exist."""
        groups = self._groups(node_id)
        leaves = self._by_node.get(node_id, [])
        return sum(leaf.count for leaf in leaves) + self._difference(node_id, groups)

    def stored_bytes(self, node_id: bytes) -> int | None:
        """Bytes of all chunks that exist; None if the index cannot tell.

        It cannot if chunks of the base were overwritten or removed since.
        """
        leaves = self._by_node.get(node_id, [])
        entries = [self._entry(leaf) for leaf in leaves]
        known = [entry.stored_bytes for entry in entries if entry is not None]
        if len(known) < len(leaves):
            return None
        groups = self._groups(node_id)
        if self._difference(node_id, groups) != sum(group.rows for group in groups):
            return None
        tables = [group.overlay.table for group in groups]
        return sum(known) + sum(int(table.length.sum()) for table in tables if table is not None)

    def _groups(self, node_id: bytes, region: Box | None = None) -> list[_Group]:
        """The node's leaves and the rows of live deltas, in groups; each row is in one group.

        With a region, rows outside it may be missing.
        """
        leaves = self._by_node.get(node_id, [])
        overlay = self._view.overlay(node_id, 0, region)
        merged = [leaf for leaf in leaves if leaf.merged]
        if not merged:
            return [_Group(leaves, overlay)]
        rest = rows_in(overlay.table, (leaf.box for leaf in merged), outside=True)
        others = [leaf for leaf in leaves if not leaf.merged]
        groups = [_Group(others, Overlay(overlay.truncated, rest))]
        for sequence in sorted({leaf.merged for leaf in merged}):
            due = [leaf for leaf in merged if leaf.merged == sequence]
            newer = self._view.overlay(node_id, sequence, region)
            rows = rows_in(newer.table, (leaf.box for leaf in due))
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
                bitmap = bitmaps[leaf.box]
                if cut is not None:
                    coords = bitmap.coords(leaf.box)
                    kept = inside(coords, cut)
                    if table is not None:
                        kept &= kinds_at(table, coords) < 0
                    more -= leaf.count - int(kept.sum())
                elif rows is not None:
                    more -= int(bitmap.has(rows[within(leaf.box, rows)]).sum())
        return more

    def _bitmaps(self, node_id: bytes, leaves: Sequence[_IndexedLeaf]) -> dict[Box, Bitmap]:
        """The bitmaps of these leaves, by box, fetched in one round."""
        entries = [self._entry(leaf) for leaf in leaves]
        blobs = {e.blob.key: e.blob for e in entries if e is not None}
        loads = [partial(self._load, blob) for blob in blobs.values()]
        loaded = dict(zip(blobs, self._context.runtime.parallel(loads), strict=True))
        found: dict[Box, Bitmap] = {}
        for leaf, entry in zip(leaves, entries, strict=True):
            bitmaps = None if entry is None else loaded[entry.blob.key]
            if entry is None or bitmaps is None or entry.position >= len(bitmaps.bitmaps):
                continue
            bitmap = bitmaps.bitmaps[entry.position]
            if (bitmap.box, bitmap.count) == (leaf.box, leaf.count):
                found[leaf.box] = bitmap
        missing = {leaf.box for leaf in leaves} - found.keys()
        if missing:
            self.counted = True
            for table in self._view.leaves(node_id, missing.__contains__):
                found[table.box] = Bitmap.of(table)
        return found

    def _entry(self, leaf: _IndexedLeaf) -> IndexEntry | None:
        if self._directory is None:
            pointer = index_pointer(self._context, self._branch)
            self._directory = index_directory(self._context, pointer)
        return self._directory.entries.get(leaf.name)

    def _load(self, blob: BlobRef) -> Bitmaps | None:
        try:
            return self._context.objects.load(blob, Bitmaps)
        except UNUSABLE:
            return None  # as if missing: the leaves say the same


def _concerned(group: _Group) -> list[_IndexedLeaf]:
    """Leaves of the group that its overlay may change."""
    cut, table = group.overlay.truncated, group.overlay.table
    rows = None if table is None else table.coords()

    def concerned(box: Box) -> bool:
        cuts = cut is not None and any(n > at for n, at in zip(box.hi, cut, strict=True))
        return cuts or (rows is not None and bool(within(box, rows).any()))

    return [leaf for leaf in group.leaves if concerned(leaf.box)]


def initialized_coords(
    contents: SessionView,
    path: str,
    region: Sequence[Bounds] | Box | None,
    *,
    branch: str | None,
) -> IndexArray:
    """Coordinates (int64[n, ndim]) of the array's chunks in the region that exist.

    `branch` selects the index to use.
    """
    node = contents.array_at(node_path(path))
    assert node.array is not None
    box = chunk_box(node.array.grid, region)
    with contents.lock:
        cut = contents.changes.truncated.get(node.node_id)
        changed = contents.changes.table(node.node_id)
    presence = Presence(contents.context, contents.view, branch)
    coords = presence.coords(node.node_id, box)
    if cut is not None:
        coords = coords[inside(coords, cut)]
    return laid_over(coords, changed, box)


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


def leaf_names(ref: ManifestRef) -> list[LeafName]:
    """Names that identify the leaves of a base's manifest in the index."""
    return [(part.node_id, part.box, ref.blob.key, ref.blob.crc32c) for part in ref.parts]


def index_leaves(
    keys: SessionKeys, leaves: Iterable[tuple[bytes, BlobRef, int, Bitmap]]
) -> tuple[list[Upload], list[IndexEntry]]:
    """Objects to upload for leaves (node id, manifest, chunk bytes, bitmap), and index entries."""
    made = []
    for node_id, blob, stored, bitmap in leaves:
        size = len(bitmap.bits or b"") + 2 * (0 if bitmap.index is None else len(bitmap.index))
        made.append((node_id, blob, stored, bitmap, size))
    made.sort(key=lambda one: (one[4] > _SMALL_BYTES, one[0]))
    groups: list[list[tuple[bytes, BlobRef, int, Bitmap, int]]] = []
    nbytes = 0
    for one in made:
        # Large bitmaps are stored by array, so that a query for one array fetches no other's.
        other = bool(groups) and one[4] > _SMALL_BYTES and one[0] != groups[-1][-1][0]
        if not groups or other or nbytes + one[4] > _BITMAPS_BYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(one)
        nbytes += one[4]
    uploads: list[Upload] = []
    entries: list[IndexEntry] = []
    for group in groups:
        upload = Upload(keys.next("indexes"), Bitmaps(tuple(one[3] for one in group)).encode())
        uploads.append(upload)
        for position, (node_id, blob, stored, bitmap, _) in enumerate(group):
            name = (node_id, bitmap.box, blob.key, blob.crc32c)
            entries.append(IndexEntry(*name, bitmap.count, stored, upload.ref, position))
    return uploads, entries


def with_entries(
    context: ReadContext,
    branch: Branch,
    keys: SessionKeys,
    entries: Sequence[IndexEntry],
    live_leaves: Sequence[LeafName],
    nodes: Mapping[bytes, Node],
    zones: Mapping[bytes, NewPages] | None = None,
) -> tuple[Branch, list[Upload]]:
    """Add entries, and pages of zone maps by node, to the branch's index.

    Returns the branch, and the objects to upload, of which the directory is the last. `nodes` are
    those of the branch's head.

    Of older entries only those of `live_leaves`, the leaves of the branch's base, are kept. Others
    would keep bitmaps of leaves that only old snapshots have, or none, from being collected.
    """
    known = index_directory(context, branch.index)
    kept = {name: known.entries[name] for name in live_leaves if name in known.entries}
    new = {entry.name: entry for entry in entries}
    changed = {entry.node_id for entry in entries}
    leaves = live_leaves if known.zones or zones else ()
    paged, uploads = pages_after(context, keys, known.zones, zones or {}, changed, leaves, nodes)
    directory = IndexDirectory(kept | new, known.others, paged)
    uploads.append(Upload(keys.next("indexes"), directory.encode()))
    return replace(branch, index=uploads[-1].ref.bare()), uploads


def build_index(context: Context, branch: str) -> int:
    """Index the leaves of the branch's base that are not indexed yet; return how many."""
    return opened(partial(_build_index, context, branch))


def _build_index(context: Context, branch: str) -> int:
    at = context.roots.read()
    tip = context.roots.branch(at.root, branch)
    keys = SessionKeys(at.root.version, context.runtime)
    view = context.open_branch(tip)
    leaves = _leaves_of(view)
    known = _usable(context, tip.index, leaves)
    due = [leaf for leaf in leaves if leaf.name not in known]
    if not due:
        return 0
    uploads, entries = index_leaves(keys, _bitmaps(view, due))
    context.runtime.parallel(
        [partial(context.objects.create, upload.key, upload.data) for upload in uploads]
    )

    def change(root: Root) -> Root:
        if admission(root, Writer(keys.start)) is not None:
            raise FencedError(
                "the index was built from before the repository's fence, and its objects may "
                "have been collected; build it again"
            )
        old = root.branches.get(branch)
        if old is None:
            raise NotFoundError(f"branch {branch!r} was deleted; nothing was indexed")
        now = view if old.head.key == view.ref.key else context.open_branch(old)
        live = [name for ref in now.manifests for name in leaf_names(ref)]
        new, uploads = with_entries(context, old, keys, entries, live, now.by_id)
        for upload in uploads:
            context.objects.create(upload.key, upload.data)
        return replace(root, branches={**root.branches, branch: new})

    context.roots.update(change, "build index", branch, "", _ATTEMPTS)
    return len(due)


def _usable(
    context: ReadContext, pointer: BlobRef | None, leaves: Sequence[_IndexedLeaf]
) -> set[LeafName]:
    """The leaves that are in the index with readable bitmaps."""
    entries = index_directory(context, pointer).entries
    found = [entries[leaf.name] for leaf in leaves if leaf.name in entries]

    def readable(blob: BlobRef) -> bool:
        try:
            context.objects.load(blob, Bitmaps)
        except UNUSABLE:
            return False  # it is rebuilt
        return True

    blobs = {entry.blob.key: entry.blob for entry in found}
    checks = [partial(readable, blob) for blob in blobs.values()]
    there = dict(zip(blobs, context.runtime.parallel(checks), strict=True))
    return {entry.name for entry in found if there[entry.blob.key]}


def _bitmaps(
    view: SnapshotView, leaves: Sequence[_IndexedLeaf]
) -> Iterable[tuple[bytes, BlobRef, int, Bitmap]]:
    for leaf in sorted(leaves, key=lambda leaf: (leaf.node_id, leaf.box.lo)):
        (table,) = view.leaves(leaf.node_id, leaf.box.__eq__)
        yield leaf.node_id, leaf.manifest.blob, int(table.length.sum()), Bitmap.of(table)
