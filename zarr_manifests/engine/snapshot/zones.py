"""A branch's indexes: their directory, and zone maps of arrays in a snapshot, found or absent.

Entries of recent commits are in objects that live deltas and runs name; those of older chunks in
pages, which the branch's index directory leads to. Invariant: whatever cannot be read counts as
absent, so a query reads more chunks. Which entries count is for the caller to judge by addresses
(`planning.zones`); only for `paged_leaves` do leaves and live deltas say it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError, StorageError, UnsupportedFormatError
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.zone_maps import IndexDirectory, ZonePages, Zones, ZoneTable
from zarr_manifests.grid import Box
from zarr_manifests.planning.layout.leaves import PlacedLeaf
from zarr_manifests.planning.tables.live_deltas import has_changes

UNUSABLE: Final = (CorruptObjectError, UnsupportedFormatError, StorageError)
"""What an index that cannot be read raises."""


def index_pointer(context: ReadContext, branch: str | None = None) -> BlobRef | None:
    """The index directory of the branch (default `main`), as of the newest root seen.

    It is valid for any snapshot: another branch's index has fewer entries for it, never wrong ones.
    """
    name = "main" if branch is None else branch
    tip = context.roots.with_branch(context.roots.latest.root, name).branches.get(name)
    return None if tip is None else tip.index


def index_directory(context: ReadContext, pointer: BlobRef | None) -> IndexDirectory:
    """The directory at the pointer; an empty one if it cannot be read."""
    return usable(context, pointer, IndexDirectory) or IndexDirectory({})  # it can be rebuilt


@dataclass(frozen=True, slots=True)
class KnownZones:
    """The zone maps of one array.

    Parameters
    ----------
    recent : tuple of ZoneTable
        Entries of live deltas and runs, oldest first.
    pages : ZonePages or None
        The pages of older entries, not read yet.
    """

    recent: tuple[ZoneTable, ...] = ()
    pages: ZonePages | None = None


def zones_of(
    context: ReadContext,
    view: SnapshotView,
    node_ids: Collection[bytes],
    branch: str | None = None,
) -> dict[bytes, KnownZones]:
    """The zone maps of these arrays, in at most two rounds; `read_pages` takes the third.

    It uses the index of the branch, or of `main` if none is given.
    """
    refs = [entry.zones for entry in view.snapshot.deltas if entry.zones is not None]
    pointer = index_pointer(context, branch)
    calls: list[Callable[[], IndexDirectory | Zones | None]] = [
        partial(index_directory, context, pointer),
        *(partial(usable, context, ref, Zones) for ref in refs),
    ]
    first = context.runtime.parallel(calls)
    recent = [zones for zones in first if isinstance(zones, Zones)]
    index = next((one for one in first if isinstance(one, IndexDirectory)), IndexDirectory({}))
    loads = [partial(usable, context, index.zones.get(node), ZonePages) for node in node_ids]
    pages = dict(zip(node_ids, context.runtime.parallel(loads), strict=True))
    return {node: KnownZones(_recent(recent, node), pages[node]) for node in node_ids}


def usable[T: (Zones, ZonePages, IndexDirectory)](
    context: ReadContext, ref: BlobRef | None, kind: type[T]
) -> T | None:
    """What lies at the pointer; None if there is none, or if it cannot be read."""
    if ref is None:
        return None
    try:
        return context.objects.load(ref, kind)
    except UNUSABLE:
        return None


def _recent(found: Sequence[Zones], node_id: bytes) -> tuple[ZoneTable, ...]:
    tables: list[ZoneTable] = []
    for zones in found:
        try:
            tables += zones.of_node(node_id)
        except UNUSABLE:
            continue
    return tuple(tables)


def read_pages(
    context: ReadContext, pages: ZonePages, which: Sequence[int]
) -> Mapping[int, ZoneTable]:
    """The entries of these pages, by position, in one round, without pages that cannot be read."""
    blobs = {pages.pages[i].blob.key: pages.pages[i].blob for i in which}
    loads = [partial(usable, context, ref, Zones) for ref in blobs.values()]
    loaded = dict(zip(blobs, context.runtime.parallel(loads), strict=True))
    found: dict[int, ZoneTable] = {}
    for i in which:
        page, zones = pages.pages[i], loaded[pages.pages[i].blob.key]
        if zones is None:
            continue
        try:
            table = zones.at(page.position)
        except UNUSABLE:
            continue
        if (table.meaning, table.box, len(table)) == (pages.meaning, page.box, page.count):
            found[i] = table
    return found


@dataclass(frozen=True, slots=True)
class PagedLeaves:
    """Leaves of a region whose pages have an entry for each of their chunks, and no other entry.

    No live delta changes a chunk of these leaves in the region.

    Parameters
    ----------
    boxes : tuple of Box
        The boxes of the leaves.
    pages : tuple of int
        The positions of their pages.
    summed : frozenset of int
        Those of leaves that lie in the region.
    summed_bytes : int
        The stored bytes of these leaves.
    """

    boxes: tuple[Box, ...] = ()
    pages: tuple[int, ...] = ()
    summed: frozenset[int] = frozenset()
    summed_bytes: int = 0


def paged_leaves(view: SnapshotView, node_id: bytes, region: Box, known: KnownZones) -> PagedLeaves:
    """Which leaves of the region need not be read, since pages say what chunks they have."""
    pages = () if known.pages is None else known.pages.pages
    of_leaf = {
        (page.leaf, page.box): i
        for i, page in enumerate(pages)
        if page.complete and page.leaf is not None
    }
    found: list[tuple[PlacedLeaf, int]] = []
    for leaf in view.index.placed_in(node_id, region):
        blob = leaf.manifest.blob
        mine = of_leaf.get(((blob.key, blob.crc32c), leaf.part.box))
        if mine is not None and pages[mine].count == leaf.part.count:
            found.append((leaf, mine))
    boxes, due, summed, nbytes = list[Box](), list[int](), set[int](), 0
    # The oldest first, which fetches what the others need.
    overlays = {
        merged: view.overlay(node_id, merged, region)
        for merged in sorted({leaf.merged for leaf, _ in found})
    }
    for leaf, mine in found:
        box = leaf.part.box
        if has_changes(overlays[leaf.merged], box.shared(region)):
            continue
        boxes.append(box)
        if box.shared_size(region) == box.size:
            summed.add(mine)
            nbytes += leaf.nbytes
        due.append(mine)
    return PagedLeaves(tuple(boxes), tuple(due), frozenset(summed), nbytes)
