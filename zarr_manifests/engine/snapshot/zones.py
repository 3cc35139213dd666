"""Zone maps of arrays in a snapshot: found and read, or absent.

Entries of recent commits are in objects that live deltas and runs name; those of older chunks in
pages, which the branch's index directory leads to. Invariant: whatever cannot be read counts as
absent, so a query reads more chunks. Which entries count is for the caller to judge by addresses
(`planning.zones`); only for `paged_region` do leaves and live deltas say it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.index_directory import (
    UNUSABLE,
    index_directory,
    index_pointer,
)
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.index import IndexDirectory, IndexEntry, LeafName
from zarr_manifests.format.zone_maps import ZonePages, Zones, ZoneTable
from zarr_manifests.grid import Box
from zarr_manifests.planning.tables.merge import in_box

__all__ = ["KnownZones", "PagedRegion", "paged_region", "read_pages", "zones_of"]


@dataclass(frozen=True, slots=True)
class KnownZones:
    """The zone maps of one array.

    Parameters
    ----------
    recent : tuple of ZoneTable
        Entries of live deltas and runs, oldest first.
    pages : ZonePages or None
        The pages of older entries, not read yet.
    leaves : mapping of LeafName to IndexEntry
        What the index says of leaves.
    """

    recent: tuple[ZoneTable, ...] = ()
    pages: ZonePages | None = None
    leaves: Mapping[LeafName, IndexEntry] = field(default_factory=dict)


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
        *(partial(_load, context, ref, Zones) for ref in refs),
    ]
    first = context.runtime.parallel(calls)
    recent = [zones for zones in first if isinstance(zones, Zones)]
    index = next((one for one in first if isinstance(one, IndexDirectory)), IndexDirectory({}))
    loads = [partial(_load, context, index.zones.get(node), ZonePages) for node in node_ids]
    pages = dict(zip(node_ids, context.runtime.parallel(loads), strict=True))
    return {
        node: KnownZones(_recent(recent, node), pages[node], index.entries) for node in node_ids
    }


def _load[T: (Zones, ZonePages)](
    context: ReadContext, ref: BlobRef | None, kind: type[T]
) -> T | None:
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
    loads = [partial(_load, context, ref, Zones) for ref in blobs.values()]
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
class PagedRegion:
    """The pages that together have an entry for every chunk of a region, and no other entry in it.

    Parameters
    ----------
    pages : tuple of int
        Their positions.
    summed : frozenset of int
        Those of leaves that lie in the region, and whose bytes the index knows.
    summed_bytes : int
        The stored bytes of these leaves.
    """

    pages: tuple[int, ...]
    summed: frozenset[int]
    summed_bytes: int


def paged_region(
    view: SnapshotView, node_id: bytes, region: Box, known: KnownZones
) -> PagedRegion | None:
    """Which pages say what chunks a region has, without its leaves.

    None if pages do not say it: a chunk has no entry, or a live delta touches the region.
    """
    pages = () if known.pages is None else known.pages.pages
    leaves = view.index.placed_in(node_id, region)
    boxes = [*(page.box for page in pages), *(leaf.part.box for leaf in leaves)]
    if not pages or not leaves or any(box.ndim != region.ndim for box in boxes):
        return None
    whole = sum(leaf.part.box.shared_size(region) for leaf in leaves) == region.size
    # Outside of leaves, every live delta is newer.
    over = view.overlay(node_id, min(leaf.merged for leaf in leaves) if whole else 0, region)
    if over.truncated is not None or (over.table is not None and in_box(over.table, region).any()):
        return None
    of_manifest: dict[tuple[str, int], list[int]] = {}
    for i, page in enumerate(pages):
        if page.complete and page.leaf is not None:
            of_manifest.setdefault(page.leaf, []).append(i)
    due, summed, nbytes = list[int](), set[int](), 0
    for leaf in leaves:
        box, blob = leaf.part.box, leaf.manifest.blob
        found = [
            i
            for i in of_manifest.get((blob.key, blob.crc32c), ())
            if pages[i].box.shared_size(box) == pages[i].box.size
        ]
        if sum(pages[i].count for i in found) != leaf.part.count:
            return None
        if any(pages[a].box.overlaps(pages[b].box) for a, b in combinations(found, 2)):
            return None
        entry = known.leaves.get((node_id, box, blob.key, blob.crc32c))
        if entry is not None and box.shared_size(region) == box.size:
            summed.update(found)
            nbytes += entry.stored_bytes
        due += [i for i in found if pages[i].box.overlaps(region)]
    return PagedRegion(tuple(due), frozenset(summed), nbytes)
