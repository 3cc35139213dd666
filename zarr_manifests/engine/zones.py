"""A branch's indexes: their directory, and zone maps of arrays in a snapshot, found or absent.

Entries of recent commits are in objects that live deltas and runs name; those of older chunks in
pages, which the branch's index directory leads to. Invariant: whatever cannot be read counts as
absent, so a query reads more chunks. Which entries count is judged by addresses (`planning`);
only for `paged_leaves` do leaves and live deltas say it.

Pages of zone maps: made for new leaves, and kept in the index of a branch
--------------------------------------------------------------------------

A compaction has the table of each new leaf at hand, so entries whose addresses are in it go to the
leaf's page, whether they come from commits or from pages of older leaves. Invariants: an array
without entries costs no request; entries of one leaf are in memory at a time; what cannot be read
counts as absent; the swap that installs pages reads the branch's index again at every attempt.

A compaction calls `with_zones` in the swap that installs its leaves. A commit writes no leaves.
Each branch of the root refers to a directory, or to none. The directory refers to pages of zone
maps. These are reachable, and nothing else under `indexes/` is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.objects import SessionKeys, Upload
from zarr_manifests.engine.roots import fenced
from zarr_manifests.engine.view import Context, ReadContext, SnapshotView
from zarr_manifests.errors import (
    CorruptObjectError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import ManifestRef, Node, grouped
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.format.zone_maps import (
    Bounds,
    IndexDirectory,
    ZonePage,
    ZonePages,
    Zones,
    ZoneTable,
)
from zarr_manifests.grid import Box
from zarr_manifests.planning.garbage import parts
from zarr_manifests.planning.meaning import Meaning, merged, taken, valid
from zarr_manifests.planning.merge import take
from zarr_manifests.planning.tables import PlacedLeaf, has_changes

UNUSABLE: Final = (CorruptObjectError, UnsupportedFormatError, StorageError)
"""What an index that cannot be read raises."""


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


class KnownZones(Struct, frozen=True):
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
    pointers: Mapping[bytes, BlobRef] = {}

    @classmethod
    def of(
        cls, context: ReadContext, entries: Iterable[DeltaEntry], index: BlobRef | None = None
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
        """Those with entries of the node that may be in the box.

        Those in pages are last, since chunks may have been measured again.
        """
        yield from self.recent_of(node_id, box)
        pages = self.pages(node_id)
        if pages is not None:
            yield from read_pages(self.context, pages, pages.near(box)).values()

    def counting(
        self, node: Node, table: ChunkTable, newer: Iterable[ZoneTable] = ()
    ) -> ZoneTable | None:
        """The entries that count for the chunks in a table of the node, in its box.

        Also those in `newer`. None if there are none.
        """
        meaning = Meaning.of(node.documents)
        some = [
            zones
            for zones in chain(self.near(node.node_id, table.box), newer)
            if (zones.meaning, zones.bounds.low.dtype) == (meaning.digest, meaning.dtype)
        ]
        if not some:
            return None
        whole = merged(some)
        # After appends all count, one for each chunk; else each is judged, before any is merged.
        if len(whole) < sum(map(len, some)) or not valid(whole, table).all():
            found = [kept for zones in some if len(kept := taken(zones, valid(zones, table)))]
            if not found:
                return None
            whole = merged(found)
        return replace(whole, addresses=take(whole.addresses, np.arange(len(whole)), table.box))


def zones_of(
    context: ReadContext, view: SnapshotView, node_ids: Collection[bytes], branch: str | None = None
) -> KnownZones:
    """The zone maps of the snapshot, and the lists of pages of these arrays, in two rounds.

    It uses the index of the branch, or of `main` if none is given, as of the newest root seen. An
    index is valid for any snapshot: another branch's has fewer entries for it, never wrong ones.
    """
    roots, name = context.roots, "main" if branch is None else branch
    tip = roots.with_branch(roots.latest.root, name).branches.get(name)
    found = KnownZones.of(context, view.snapshot.deltas, None if tip is None else tip.index)
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


def paged_leaves(
    view: SnapshotView, node_id: bytes, region: Box, pages: Sequence[ZonePage]
) -> list[int]:
    """Positions of the pages of leaves in the region that have an entry for each of their chunks.

    They have no other entry, their box is that of the leaf, and no live delta changes a chunk of
    the leaf in the region.
    """
    of_leaf = {(page.leaf, page.box): i for i, page in enumerate(pages)}
    found: list[tuple[PlacedLeaf, int]] = []
    for leaf in view.index.placed_in(node_id, region):
        mine = of_leaf.get((leaf.key, leaf.part.box))
        if mine is not None and pages[mine].count == leaf.part.count:
            found.append((leaf, mine))
    # The oldest first, which fetches what the others need.
    overlays = {
        merged: view.overlay(node_id, merged, region)
        for merged in sorted({leaf.merged for leaf, _ in found})
    }
    return [
        mine
        for leaf, mine in found
        if not has_changes(overlays[leaf.merged], leaf.part.box.shared(region))
    ]


# --- pages of new leaves ------------------------------------------------------------------------


_OBJECT_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 100

type LeafZones = tuple[bytes, str | None, ZoneTable]
"""Node id, key of the leaf's manifest, and its entries; of chunks in no leaf, without a key."""


def write_pages(
    context: Context, keys: SessionKeys, leaves: Iterable[LeafZones]
) -> list[tuple[bytes, ZonePages]]:
    """Write a page for the entries of each leaf; return the pages, each with its node."""
    made: list[tuple[bytes, ZonePages]] = []
    due = [(zones.pack(), *leaf) for leaf in leaves for zones in [leaf[2]]]
    for group in parts(due, lambda one: len(one[0]), _OBJECT_BYTES):
        packed = tuple((node_id, data) for data, node_id, *_ in group)
        upload = Upload(keys.next("indexes"), Zones(packed).encode())
        context.objects.create(upload.key, upload.data)
        for position, (_, node_id, leaf, zones) in enumerate(group):
            page = ZonePage(zones.box, leaf, len(zones), upload.ref, position)
            made.append((node_id, ZonePages(zones.meaning, (page,), zones.bounds.around())))
    return made


def _joined(parts: Sequence[ZonePages]) -> ZonePages:
    pages = tuple(page for part in parts for page in part.pages)
    return ZonePages(parts[0].meaning, pages, Bounds.joined([part.bounds for part in parts]))


def _still(old: ZonePages, new: Sequence[ZonePages], live: Collection[str]) -> list[ZonePages]:
    """The older pages of a node that new ones do not replace.

    Those of leaves have to be live. The page of a leaf replaces the one before, and those of chunks
    in no leaf that lie in its box. If there are new ones of chunks in no leaf, they replace all
    such.
    """
    leaves = {(page.leaf, page.box) for part in new for page in part.pages}
    keep = [
        page.leaf in live and (page.leaf, page.box) not in leaves
        if page.leaf is not None
        else not any(
            leaf is None or box.shared_size(page.box) == page.box.size for leaf, box in leaves
        )
        for page in old.pages
    ]
    pages = tuple(page for page, stays in zip(old.pages, keep, strict=True) if stays)
    return [ZonePages(old.meaning, pages, old.bounds.take(np.array(keep)))] if pages else []


# --- the index of a branch ----------------------------------------------------------------------


def with_zones(
    context: ReadContext,
    branch: Branch,
    keys: SessionKeys,
    changed: Collection[bytes],
    manifests: Iterable[ManifestRef],
    nodes: Mapping[bytes, Node],
    zones: Iterable[tuple[bytes, ZonePages]],
) -> tuple[Branch, list[Upload]]:
    """Add pages of zone maps, each with its node, to the branch's index.

    Of the nodes in `changed`, which have new leaves, and those without leaves, it keeps the older
    pages that no new page replaces, if they are of leaves that are still live, or of none. Arrays
    that are not among `nodes`, those of its head, lose their pages, and others those with another
    meaning than theirs. `manifests` are those of its base. Returns the branch, and the objects to
    upload, of which the directory is the last.
    """
    paged, uploads = dict(index_directory(context, branch.index).zones), list[Upload]()
    new = grouped(zones)
    live = grouped((part.node_id, ref.blob.key) for ref in manifests for part in ref.parts)
    for node_id in sorted({*new, *changed, *(paged.keys() - live.keys())}):
        both, node = new.get(node_id, []), nodes.get(node_id)
        old = usable(context, paged.pop(node_id, None), ZonePages)
        if node is None:
            continue
        if old is not None:
            both = [*both, *_still(old, both, {*live.get(node_id, ())})]
        both = [one for one in both if one.meaning == Meaning.of(node.documents).digest]
        if both:
            uploads.append(Upload(keys.next("indexes"), _joined(both).encode()))
            paged[node_id] = uploads[-1].ref
    uploads.append(Upload(keys.next("indexes"), IndexDirectory(paged).encode()))
    return replace(branch, index=uploads[-1].ref.bare()), uploads


def add_to_index(
    context: Context,
    branch: str,
    view: SnapshotView,
    keys: SessionKeys,
    operation: str,
    zones: Iterable[tuple[bytes, ZonePages]],
) -> None:
    """Swap in the branch with these pages of zone maps, each with its node, in its index.

    `view` is the head that they were made on.

    Raises
    ------
    FencedError
        If a collection has shut this out.
    NotFoundError
        If the branch was deleted.
    """

    def change(root: Root) -> Root:
        if keys.start < root.fence:
            raise fenced(root, keys.start, f"{operation!r}", "Nothing was changed; do it again")
        tip = root.branches.get(branch)
        if tip is None:
            raise NotFoundError(f"{operation}: branch {branch!r} was deleted; nothing was added")
        now = view if tip.head.key == view.ref.key else context.open_branch(tip)
        moved, uploads = with_zones(context, tip, keys, (), now.pages.manifests(), now.by_id, zones)
        creates = [partial(context.objects.create, one.key, one.data) for one in uploads]
        context.runtime.parallel(creates)
        return replace(root, branches={**root.branches, branch: moved})

    context.roots.update(change, operation, branch, "", _ATTEMPTS)
