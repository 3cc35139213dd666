"""A branch's indexes: their directory, and zone maps of arrays in a snapshot, found or absent.

Entries of recent commits are in objects that live deltas and runs name; those of older chunks in
pages, which the branch's index directory leads to. Invariant: whatever cannot be read counts as
absent, so a query reads more chunks. Which entries count is judged by addresses (`planning.zones`);
only for `paged_leaves` do leaves and live deltas say it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Final

import numpy as np

from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError, StorageError, UnsupportedFormatError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.format.zone_maps import IndexDirectory, ZonePage, ZonePages, Zones, ZoneTable
from zarr_manifests.grid import Box
from zarr_manifests.planning.layout.leaves import PlacedLeaf
from zarr_manifests.planning.tables.live_deltas import has_changes
from zarr_manifests.planning.tables.merge import take
from zarr_manifests.planning.zones.meaning import Meaning, merged, taken, valid

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


@dataclass(frozen=True, slots=True)
class KnownZones:
    """The zone maps of a snapshot, by node; still packed.

    Parameters
    ----------
    context : ReadContext
        The repository.
    recent : tuple of Zones
        Those of live deltas and runs, oldest first.
    pointers : mapping of bytes to BlobRef
        Pointers to the lists of pages of older ones, by node.
    """

    context: ReadContext
    recent: tuple[Zones, ...] = ()
    pointers: Mapping[bytes, BlobRef] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        context: ReadContext,
        entries: Iterable[DeltaEntry],
        index: BlobRef | None = None,
    ) -> KnownZones:
        """Those of these deltas and runs, and in pages those of an index; fetched in one round."""
        calls: list[Callable[[], IndexDirectory | Zones | None]] = [
            partial(index_directory, context, index),
            *(partial(usable, context, entry.zones, Zones) for entry in entries),
        ]
        directory, *loaded = context.runtime.parallel(calls)
        assert isinstance(directory, IndexDirectory)
        recent = tuple(zones for zones in loaded if isinstance(zones, Zones))
        return cls(context, recent, directory.zones)

    def pages(self, node_id: bytes) -> ZonePages | None:
        """The list of the node's pages; None if there is none, or if it cannot be read."""
        return usable(self.context, self.pointers.get(node_id), ZonePages)

    def recent_of(self, node_id: bytes, box: Box | None = None) -> Iterator[ZoneTable]:
        """Those of the node in live deltas and runs, one at a time; with a box, those near it."""
        for zones in self.recent:
            yield from zones.of_node(node_id, box)

    def near(self, node_id: bytes, box: Box) -> Iterator[ZoneTable]:
        """Those with entries of the node that may be in the box, oldest first."""
        pages = self.pages(node_id)
        if pages is not None:
            yield from read_pages(self.context, pages, pages.near(box)).values()
        yield from self.recent_of(node_id, box)

    def counting(
        self, node: Node, table: ChunkTable, newer: Iterable[ZoneTable] = ()
    ) -> ZoneTable | None:
        """The entries that count for the chunks in a table of the node, in its box.

        Also those in `newer`. None if there are none.
        """
        meaning = Meaning.of(node.documents)
        found = []
        for zones in chain(self.near(node.node_id, table.box), newer):
            if zones.meaning == meaning.digest and meaning.compares(zones.bounds.low.dtype):
                kept = taken(zones, valid(zones, table))
                found += [] if kept is None else [kept]
        if not found:
            return None
        whole = merged(found)
        return replace(whole, addresses=take(whole.addresses, np.arange(len(whole)), table.box))


def zones_of(
    context: ReadContext,
    view: SnapshotView,
    node_ids: Collection[bytes],
    branch: str | None = None,
) -> KnownZones:
    """The zone maps of the snapshot, and the lists of pages of these arrays, in two rounds.

    It uses the index of the branch, or of `main` if none is given.
    """
    found = KnownZones.of(context, view.snapshot.deltas, index_pointer(context, branch))
    context.runtime.parallel([partial(found.pages, node_id) for node_id in node_ids])
    return found


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
        table = None if zones is None else zones.at(page.position)
        said = pages.meaning, page.box, page.count
        if table is not None and (table.meaning, table.box, len(table)) == said:
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


def paged_leaves(
    view: SnapshotView, node_id: bytes, region: Box, pages: Sequence[ZonePage]
) -> PagedLeaves:
    """Which leaves of the region need not be read, since pages say what chunks they have."""
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
