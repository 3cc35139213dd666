"""Zone maps of arrays in a snapshot: found and read, or absent.

Entries of recent commits are in objects that live deltas and runs name; those of older chunks in
pages, which the branch's index directory leads to. Invariant: whatever cannot be read counts as
absent, so a query reads more chunks. Nothing here says which entries count: that is for the caller
to judge by addresses (`planning.zones`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.index_directory import (
    UNUSABLE,
    index_directory,
    index_pointer,
)
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.index import IndexDirectory
from zarr_manifests.format.zone_maps import ZonePages, Zones, ZoneTable

__all__ = ["KnownZones", "read_pages", "zones_of"]


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
        *(partial(_load, context, ref, Zones) for ref in refs),
    ]
    first = context.runtime.parallel(calls)
    recent = [zones for zones in first if isinstance(zones, Zones)]
    paged = next((found.zones for found in first if isinstance(found, IndexDirectory)), {})
    loads = [partial(_load, context, paged.get(node), ZonePages) for node in node_ids]
    pages = dict(zip(node_ids, context.runtime.parallel(loads), strict=True))
    return {node: KnownZones(_recent(recent, node), pages[node]) for node in node_ids}


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
