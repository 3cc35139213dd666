"""The index of initialised chunks: kept, and asked.

What is asked about a snapshot is answered from the live deltas' chunk tables (as for any read) on
top of the base, and of the base from bitmaps of its leaves where the index has them, and else from
the leaves themselves. Invariant: whatever of the index is missing, behind or cannot be read is as
if it were not there, so answers never depend on it.

To keep it, whoever writes new leaves calls `index_leaves` for what to upload beside them, and
`with_entries` for the root that names it; `build_index` does both for leaves that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.arrange import node_path
from zarr_manifests.engine.chunks import SessionKeys
from zarr_manifests.engine.context import Context
from zarr_manifests.engine.objects import Upload
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.errors import (
    CorruptObjectError,
    FencedError,
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.envelope import Fields
from zarr_manifests.format.index import Bitmap, Bitmaps, IndexDirectory, IndexEntry, LeafName
from zarr_manifests.format.manifest import ManifestRef
from zarr_manifests.format.root import Root
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.planning.merge import Overlay, inside
from zarr_manifests.planning.presence import kinds_at, laid_over, within

__all__ = [
    "IndexReport",
    "Presence",
    "build_index",
    "index_leaves",
    "index_pointer",
    "initialized_coords",
    "initialized_counts",
    "with_entries",
]

INITIALIZED: Final = "initialized-chunks"
_OTHER_ENTRIES: Final = 4_096
_BITMAPS_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 1 << 10
_ATTEMPTS: Final = 100
_UNUSABLE: Final = (CorruptObjectError, UnsupportedFormatError, StorageError)


@dataclass(frozen=True, slots=True)
class IndexReport:
    """What building the index has done.

    Parameters
    ----------
    leaves : int
        Leaves of the branch's base.
    indexed : int
        Those of them that were new to the index.
    read_bytes, written_bytes : int
        Of the manifests that were read, and of the objects that were written.
    """

    leaves: int
    indexed: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class _Leaf:
    node_id: bytes
    box: Box
    count: int
    manifest: ManifestRef

    @property
    def name(self) -> LeafName:
        return self.node_id, self.box, self.manifest.blob.key, self.manifest.blob.crc32c


def _leaves_of(view: SnapshotView) -> list[_Leaf]:
    return [
        _Leaf(part.node_id, part.box, part.count, manifest)
        for manifest in view.manifests
        for part in manifest.parts
    ]


def index_pointer(root: Root) -> BlobRef | None:
    """Where the directory is; None if there is none that is understood."""
    named = root.extra.get("indexes")
    try:
        fields = Fields(named, "root.indexes")
        return BlobRef.parse(Fields(fields.value.get(INITIALIZED), "root.indexes"))
    except CorruptObjectError:
        return None


class Presence:
    """Which chunks of a snapshot are there. Made for a few questions; reads what they need.

    Attributes
    ----------
    counted : bool
        Whether a leaf had to be read, as the index did not say what was asked.
    """

    def __init__(self, context: Context, view: SnapshotView) -> None:
        self._context = context
        self._view = view
        self._by_node: dict[bytes, list[_Leaf]] = {}
        for leaf in _leaves_of(view):
            self._by_node.setdefault(leaf.node_id, []).append(leaf)
        self._directory: IndexDirectory | None = None
        self.counted = False

    def coords(self, node_id: bytes, region: Box) -> IndexArray:
        """Coordinates (int64[n, ndim]) of the chunks in the region that are there, in C order."""
        overlay = self._view.overlay(node_id)
        if not region.size:
            return np.empty((0, region.ndim), np.int64)
        found = [
            part.coords(region) for _, part in self._base(node_id, lambda box: box.overlaps(region))
        ]
        coords = np.concatenate([np.empty((0, region.ndim), np.int64), *found])
        if overlay.truncated is not None:
            coords = coords[inside(coords, overlay.truncated)]
        return laid_over(coords, overlay.table, region)

    def count(self, node_id: bytes) -> int:
        """Number of chunks that are there."""
        leaves = self._by_node.get(node_id, [])
        more = self._difference(node_id, self._view.overlay(node_id))
        return sum(leaf.count for leaf in leaves) + more

    def stored_bytes(self, node_id: bytes) -> int | None:
        """Bytes of all chunks that are there; None if the index does not tell.

        It does not where chunks of the base were overwritten or removed since.
        """
        leaves = self._by_node.get(node_id, [])
        entries = [self._entry(leaf) for leaf in leaves]
        known = [entry.stored_bytes for entry in entries if entry is not None]
        if len(known) < len(leaves):
            return None
        overlay = self._view.overlay(node_id)
        rows = 0 if overlay.table is None else int((overlay.table.kind > RefKind.UNSET).sum())
        if self._difference(node_id, overlay) != rows:
            return None
        return sum(known) + (0 if overlay.table is None else int(overlay.table.length.sum()))

    def _difference(self, node_id: bytes, overlay: Overlay) -> int:
        """How many chunks more there are than in the base."""
        cut, table = overlay.truncated, overlay.table

        rows = None if table is None else table.coords()

        def concerned(box: Box) -> bool:
            cuts = cut is not None and any(n > at for n, at in zip(box.hi, cut, strict=True))
            return cuts or (rows is not None and bool(within(box, rows).any()))

        more = 0 if table is None else int((table.kind > RefKind.UNSET).sum())
        for leaf, part in self._base(node_id, concerned):
            if cut is not None:
                coords = part.coords(leaf.box)
                kept = inside(coords, cut)
                if table is not None:
                    kept &= kinds_at(table, coords) < 0
                more -= leaf.count - int(kept.sum())
            elif rows is not None:
                more -= int(part.has(rows[within(leaf.box, rows)]).sum())
        return more

    def _base(self, node_id: bytes, wanted: Callable[[Box], bool]) -> list[tuple[_Leaf, Bitmap]]:
        """The bitmaps of the node's leaves whose boxes are wanted, fetched in one round."""
        leaves = [leaf for leaf in self._by_node.get(node_id, []) if wanted(leaf.box)]
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
        return [(leaf, found[leaf.box]) for leaf in leaves]

    def _entry(self, leaf: _Leaf) -> IndexEntry | None:
        if self._directory is None:
            self._directory = _directory(self._context, self._context.roots.latest.root)
        return self._directory.entries.get(leaf.name)

    def _load(self, blob: BlobRef) -> Bitmaps | None:
        try:
            return self._context.objects.load(blob, Bitmaps)
        except _UNUSABLE:
            return None  # as if it were not there: the leaves say the same


def _directory(context: Context, root: Root) -> IndexDirectory:
    """The directory that the root names; an empty one if it cannot be had."""
    pointer = index_pointer(root)
    if pointer is None:
        return IndexDirectory({})
    try:
        return context.objects.load(pointer, IndexDirectory)
    except _UNUSABLE:
        return IndexDirectory({})  # as if it were not there: it can be built again


def initialized_coords(
    context: Context, workspace: Workspace, path: str, region: Sequence[slice] | None
) -> IndexArray:
    """Coordinates (int64[n, ndim]) of the array's chunks in the region that are there."""
    node = workspace.node(node_path(path))
    if node is None or node.array is None:
        raise NotFoundError(f"there is no array /{node_path(path)}")
    box = _region(node.array.grid, region)
    with workspace.lock:
        cut = workspace.changes.truncated.get(node.node_id)
        changed = workspace.changes.table(node.node_id)
    coords = Presence(context, workspace.view).coords(node.node_id, box)
    if cut is not None:
        coords = coords[inside(coords, cut)]
    return laid_over(coords, changed, box)


def _region(grid: Box, region: Sequence[slice] | None) -> Box:
    if region is None:
        return grid
    ranges = [part.indices(n) for part, n in zip(region, grid.hi, strict=False)]
    if len(region) != grid.ndim or any(step != 1 for _, _, step in ranges):
        raise InvalidArgumentError(
            f"{tuple(region)} is no region of a grid of {grid.shape} chunks: give a slice without "
            "step for each axis"
        )
    lo, hi = [a for a, _, _ in ranges], [max(a, b) for a, b, _ in ranges]
    return Box(tuple(lo), tuple(hi))


def initialized_counts(context: Context, view: SnapshotView) -> dict[str, int]:
    """Number of chunks that are there, by path of the array.

    Of arrays that no live delta touches it is known without a request.
    """
    presence = Presence(context, view)
    return {
        path: presence.count(node.node_id)
        for path, node in view.nodes.items()
        if node.array is not None
    }


def index_leaves(
    keys: SessionKeys, leaves: Iterable[tuple[bytes, BlobRef, ChunkTable]]
) -> tuple[list[Upload], list[IndexEntry]]:
    """What to upload for new leaves (node id, manifest, table), and their entries."""
    made = []
    for node_id, blob, table in leaves:
        bitmap = Bitmap.of(table)
        size = len(bitmap.bits or b"") + 2 * (0 if bitmap.index is None else len(bitmap.index))
        made.append((node_id, blob, int(table.length.sum()), bitmap, size))
    made.sort(key=lambda one: (one[4] > _SMALL_BYTES, one[0]))
    groups: list[list[tuple[bytes, BlobRef, int, Bitmap, int]]] = []
    nbytes = 0
    for one in made:
        # Large ones lie apart, array by array: who asks about one fetches no other's.
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
    context: Context,
    root: Root,
    keys: SessionKeys,
    entries: Sequence[IndexEntry],
    view_leaves: Iterable[LeafName] = (),
) -> tuple[Root, Upload]:
    """The root with these entries in its index, and the directory to upload before it is swapped.

    Of older entries, those of `view_leaves` are kept, and the newest of the others.
    """
    older = dict(_directory(context, root).entries)
    new = {entry.name: entry for entry in entries}
    live = [older.pop(name) for name in view_leaves if name in older]
    others = [entry for entry in older.values() if entry.name not in new][-_OTHER_ENTRIES:]
    kept = {entry.name: entry for entry in (*others, *live)}
    upload = Upload(keys.next("indexes"), IndexDirectory({**kept, **new}).encode())
    named = root.extra.get("indexes")
    indexes = dict(named) if isinstance(named, dict) else {}
    indexes[INITIALIZED] = upload.ref.bare().pack()
    return replace(root, extra={**root.extra, "indexes": indexes}), upload


def build_index(context: Context, branch: str) -> IndexReport:
    """Index the leaves of the branch's base that the index does not have yet."""
    at = context.roots.read()
    tip = context.roots.with_branch(at.root, branch).branches.get(branch)
    if tip is None:
        raise NotFoundError(f"there is no branch {branch!r}")
    keys = SessionKeys(at.root.version, context.runtime)
    view = context.open_branch(tip)
    leaves = _leaves_of(view)
    known = _usable(context, at.root, leaves)
    due = [leaf for leaf in leaves if leaf.name not in known]
    if not due:
        return IndexReport(len(leaves), 0, 0, 0)
    uploads, entries = index_leaves(keys, _tables(view, due))
    context.runtime.parallel(
        [partial(context.objects.create, upload.key, upload.data) for upload in uploads]
    )
    written = [len(upload.data) for upload in uploads]

    def change(root: Root) -> Root:
        if keys.start < root.fence:
            raise FencedError(
                "the index was built from before the repository's fence, and its objects may "
                "have been collected; build it again"
            )
        new, directory = with_entries(context, root, keys, entries, [x.name for x in leaves])
        context.objects.create(directory.key, directory.data)
        written.append(len(directory.data))
        return new

    context.roots.update(change, "build index", branch, "", _ATTEMPTS)
    read = {leaf.manifest.blob.key: leaf.manifest.blob.length for leaf in due}
    return IndexReport(len(leaves), len(due), sum(read.values()), sum(written))


def _usable(context: Context, root: Root, leaves: Sequence[_Leaf]) -> set[LeafName]:
    """Those of the leaves that the index has, and whose bitmaps can be read."""
    entries = _directory(context, root).entries
    found = [entries[leaf.name] for leaf in leaves if leaf.name in entries]

    def readable(blob: BlobRef) -> bool:
        try:
            context.objects.load(blob, Bitmaps)
        except _UNUSABLE:
            return False  # it is built again
        return True

    blobs = {entry.blob.key: entry.blob for entry in found}
    checks = [partial(readable, blob) for blob in blobs.values()]
    there = dict(zip(blobs, context.runtime.parallel(checks), strict=True))
    return {entry.name for entry in found if there[entry.blob.key]}


def _tables(
    view: SnapshotView, leaves: Sequence[_Leaf]
) -> Iterable[tuple[bytes, BlobRef, ChunkTable]]:
    for leaf in sorted(leaves, key=lambda leaf: (leaf.node_id, leaf.box.lo)):
        (table,) = view.leaves(leaf.node_id, leaf.box.__eq__)
        yield leaf.node_id, leaf.manifest.blob, table
