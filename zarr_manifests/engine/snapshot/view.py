"""One snapshot, ready for queries: its nodes, and where each chunk is.

A lookup consults the live deltas, then the leaf whose box has the coordinate. A leaf has all
changes up to its merged-to sequence, so only newer deltas apply inside its box; the same holds for
the base's nodes. Everything needed is fetched in one parallel round. For the first chunk of a node
these are the deltas whose boxes contain it. For the second chunk that needs another delta, it is
everything left of the node, which is then merged once into the overlay that serves all further
chunks. So one chunk costs only the tables that concern it, and a scan two rounds, not one per
delta. A lookup of many chunks costs the tables that concern any of them.

Invariant: a view never changes. What it fetches and merges is kept in the objects' cache while
there is room, and is the same for all views of the snapshot.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from zarr_manifests.engine.objects.metadata import AtHand, NotAtHandError, ObjectReader, Wanted
from zarr_manifests.engine.snapshot.base_pages import (
    BasePages,
    NodeIds,
    NodeMaps,
    PagedIndex,
    PagedNodes,
    PagedPaths,
    Paths,
)
from zarr_manifests.engine.snapshot.tables import SnapshotTables
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import (
    ChunkRef,
    ChunkTable,
    NativeRef,
    Unset,
    VirtualRef,
)
from zarr_manifests.format.manifest import ManifestRef
from zarr_manifests.format.nodes import Base, Count, Delta, Digest, Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.layout.leaves import PlacedLeaf
from zarr_manifests.planning.tables.live_deltas import Reach, any_at, clipped, picked, rows_in
from zarr_manifests.planning.tables.live_deltas import check_axes as check_axes
from zarr_manifests.planning.tables.merge import (
    Leaf,
    Overlay,
    fold,
    fold_leaves,
    inside,
    pick,
    within,
)
from zarr_manifests.planning.upkeep.read_list import tells_about
from zarr_manifests.runtime import SYSTEM, Runtime

DIGESTS: Final = "digests"
"""The first part of the keys of digests."""
_ALONE_S: Final = 0.05
"""Seconds before an overlay's cache entry is refreshed."""
_now_s: Final = SYSTEM.monotonic_s


class SnapshotView(SnapshotTables):
    """One snapshot, ready for queries. Thread-safe; made by `open`.

    Attributes
    ----------
    ref : BlobRef
        The pointer to the snapshot.
    snapshot : Snapshot
        The snapshot itself.
    nodes : mapping of str to Node
        All nodes by path.
    by_id : mapping of bytes to Node
        All nodes by id.
    pages : BasePages or None
        The base, if it has pages: `nodes` and `by_id` then load the pages they need.
    base_sequence : int
        The sequence up to which the base has all node changes.
    opening : mapping of int to Delta or Digest
        The objects that opening needed besides the base, by position in the read list.
    """

    def __init__(
        self,
        objects: ObjectReader,
        ref: BlobRef,
        snapshot: Snapshot,
        base: Base,
        opening: Mapping[int, Delta | Digest],
    ) -> None:
        super().__init__(objects, ref, snapshot, base, opening)
        self.base_sequence = base.sequence
        self.pages: BasePages | None = None
        self.nodes: Mapping[str, Node]
        self.by_id: Mapping[bytes, Node]
        self._paths: Callable[[], Paths]
        newer = [opening[at] for at in sorted(opening) if self._last(at) > base.sequence]
        changes = [found for found in newer if found.deleted or found.nodes]
        if base.pages or base.leaf_pages:
            self._open_pages(BasePages(objects, base), changes)
        else:
            self._take_nodes(base, changes)
        self._first: dict[bytes, Coords] = {}  # by node, until its overlay is made
        # Overlays of nodes without a leaf, by node, while the cache keeps them, and the time until
        # which the cache entry is not refreshed.
        self._alone: dict[bytes, tuple[weakref.ref[Overlay], float]] = {}
        self._damaged: set[bytes] = set()  # nodes whose overlay could not be made

    def _take_nodes(self, base: Base, changes: Sequence[Delta | Digest]) -> None:
        # Without node changes in deltas, the nodes are shared by all snapshots of this base.
        known = self.of_base(NodeMaps, lambda: NodeMaps.of(base.nodes))
        if changes:
            nodes = dict(known.by_path)
            for found in changes:
                for path in found.deleted:
                    nodes.pop(path, None)
                nodes.update((node.path, node) for node in found.nodes)
            known = NodeMaps.of(nodes.values())
        self.nodes, self.by_id, self._paths = known.by_path, known.by_id, known.paths
        if len(self.by_id) != len(self.nodes):
            raise CorruptObjectError(f"two nodes of snapshot {self.snapshot_id} have the same id")

    def _open_pages(self, pages: BasePages, changes: Sequence[Delta | Digest]) -> None:
        changed: dict[str, Node | None] = {}
        for found in changes:
            changed.update(dict.fromkeys(found.deleted))
            changed.update((node.path, node) for node in found.nodes)
        self.pages = pages
        self.nodes = nodes = PagedNodes(pages, changed)
        self.by_id = ids = NodeIds(nodes)
        self._index = PagedIndex(pages, ids)
        paths = PagedPaths(pages, changed)
        self._paths = lambda: paths

    def counts_among(self, node_ids: Iterable[bytes]) -> tuple[Count, ...]:
        """The base's counts of at least these nodes; loads only their pages."""
        pages, ids = self.pages, self.by_id
        if pages is None or not isinstance(ids, NodeIds):
            return self.counts
        at = {node_id: ids.page_of(node_id) for node_id in node_ids}
        found = (pages.counts_in(n).get(i) for i, n in at.items() if n is not None)
        return tuple(count for count in found if count is not None)

    def among(self, node_ids: Iterable[bytes]) -> Iterable[Node]:
        """The nodes with these ids, as far as there are any."""
        found = (self.by_id.get(node_id) for node_id in sorted(node_ids))
        return [node for node in found if node is not None]

    def node_changes(self) -> tuple[int, int, int]:
        """How many nodes live deltas newer than the base change; their bytes and chunk tables."""
        number = nbytes = tables = 0
        for position, blob in self.snapshot.opening():
            found = self.opening[position]
            changes = len(found.nodes) + len(found.deleted)
            if changes and self._last(position) > self.base_sequence:
                number, nbytes = number + changes, nbytes + blob.length
                tables += len(self.snapshot.deltas[position].parts())
        return number, nbytes, tables

    def _last(self, position: int) -> int:
        """The newest sequence of the delta or digest at that position of the read list."""
        ends = {entry.first: entry.stop for entry in self.snapshot.digests}
        return self.snapshot.deltas[ends.get(position, position + 1) - 1].last

    @property
    def manifests(self) -> tuple[ManifestRef, ...]:
        """The base's leaf directory; loads all its pages."""
        return self._base.manifests if self.pages is None else self.pages.manifests()

    @property
    def counts(self) -> tuple[Count, ...]:
        """The base's chunk counts; loads all its pages."""
        if self.snapshot.base is None:
            return ()
        return self._base.counts if self.pages is None else self.pages.counts()

    def nodes_here(self) -> Iterable[Node]:
        """The nodes that are known without a request; all of them if the base has no pages."""
        return self.nodes.here() if isinstance(self.nodes, PagedNodes) else self.nodes.values()

    def is_here(self, paths: Iterable[str]) -> bool:
        """Whether looking up the nodes at these paths needs no request."""
        return self.pages is None or all(map(self.pages.is_here, paths))

    def manifests_here(self) -> tuple[ManifestRef, ...]:
        """The leaves that are known without a request; all of them if the base has no pages."""
        return self._base.manifests if self.pages is None else self.pages.manifests_here()

    @classmethod
    def open(
        cls,
        objects: ObjectReader,
        runtime: Runtime,
        ref: BlobRef,
        base: BlobRef | None = None,
        ahead: Sequence[BlobRef] = (),
    ) -> SnapshotView:
        """Open the snapshot at `ref`.

        `base` is the base it is expected to read, and `ahead` other objects, if known: everything
        is fetched in one round.
        """
        first: list[Any] = [(ref, Snapshot)]
        first += [(base, Base)] if base is not None else []
        first += [(other, opening_kind(other)) for other in ahead]
        snapshot: Snapshot = objects.load_all(first, runtime)[ref.key]
        due = base if base and snapshot.base and base.key == snapshot.base.key else snapshot.base
        wanted = snapshot.opening()
        rest: list[Any] = [(other, opening_kind(other)) for _, other in wanted]
        rest += [(due, Base)] if due is not None else []
        loaded = objects.load_all(rest, runtime)
        found = loaded[due.key] if due is not None else Base((), ())
        opening = {position: loaded[other.key] for position, other in wanted}
        for entry in snapshot.digests:
            digest = objects.load(entry.blob, Digest)
            if not tells_about(digest, snapshot.deltas[entry.first : entry.stop]):
                raise CorruptObjectError(f"{entry.blob.key} is a digest of other deltas")
        view = cls(objects, ref, snapshot, found, opening)
        for position, value in opening.items():
            if isinstance(value, Delta):
                view._check(value, position)
        return view

    @property
    def paths(self) -> Paths:
        """The paths of all nodes by directory."""
        return self._paths()

    def at_hand(self) -> SnapshotView:
        """The same view, but a fetch raises `NotAtHandError` instead."""
        view = copy.copy(self)
        view._objects = AtHand(self._objects)
        if isinstance(self._index, PagedIndex):
            view._index = self._index.at_hand(view._objects)
        return view

    def lookup(self, node_id: bytes, coords: Coords) -> ChunkRef | None:
        """Where the chunk is; None if it is absent."""
        alone = self._alone.get(node_id)
        if alone is not None:  # the usual case when many chunks are read
            overlay, until_s = alone[0](), alone[1]
            if overlay is not None and overlay.table is not None and _now_s() < until_s:
                ref = overlay.table.get(coords)
                if ref is not None:
                    return None if isinstance(ref, Unset) else ref
        due = self._leaf_at(node_id, coords)
        after = due[0].merged if due else 0
        loaded: dict[Any, Any] = {}
        overlay = self._known_overlay(node_id, after)
        if overlay is None:
            reach = self._sources(node_id).reach(coords, after)
            if self._by_itself(node_id, coords, reach):
                return self._reached(node_id, coords, reach, due)
            try:  # in one round with the leaf, which is probably needed as well
                overlays, loaded = self._fetch(node_id, {after}, self._due_leaf(due))
            except CorruptObjectError:
                self._damaged.add(node_id)
                return self._reached(node_id, coords, reach, due)
            overlay = overlays[after]
            self._first.pop(node_id, None)
        if not due and self.index.around(node_id) is None:
            self._alone[node_id] = weakref.ref(overlay), _now_s() + _ALONE_S
        if overlay.table is not None:
            ref = overlay.table.get(coords)
            if ref is not None:
                return None if isinstance(ref, Unset) else ref
            check_axes(overlay.table.box, len(coords))
        cut = overlay.truncated
        if cut is not None and not inside(np.array(coords, np.int64).reshape(1, -1), cut)[0]:
            return None
        return self._in_leaf(coords, due, loaded)

    def following(
        self, node_id: bytes, coords: Coords, most: int, grid: Box, *, fetch: bool = False
    ) -> list[tuple[Coords, NativeRef | VirtualRef]] | None:
        """The refs among the next `most` chunks of the grid after this one, in C order.

        Absent and inline chunks are left out, and all of them where a table is damaged. None if it
        would take a request, unless `fetch` is set.
        """
        first = grid.ravel_one(coords) + 1
        index = np.arange(first, min(first + most, grid.size))
        if not len(index):
            return []
        view = self if fetch else self.at_hand()
        try:
            found = view.chunks_at(node_id, grid.unravel(index))
        except NotAtHandError:
            return None
        except CorruptObjectError:  # who reads a chunk that needs the table gets the error
            return []
        return [] if found is None else found.stored_refs()

    def knows(self, node_id: bytes, coords: Coords) -> bool:
        """Whether `lookup` of the chunk finds everything in memory and decoded."""
        if self._index is None or node_id not in self._live:
            return False
        due = self._leaf_at(node_id, coords)
        if self._known_overlay(node_id, due[0].merged if due else 0) is None:
            return False
        return all(self._objects.has_table(leaf.manifest.blob, leaf.part) for leaf in due)

    def _by_itself(self, node_id: bytes, coords: Coords, reach: Reach) -> bool:
        """Whether to look the chunk up in the tables that contain it, without the rest of the node.

        Not if another chunk was looked up that way and this one needs more tables, unless a few
        blocks of these will do; nor if all tables are in memory, since they are then merged and
        kept. (If that fails because some are damaged, chunks that do not need these are still
        looked up.)
        """
        if node_id in self._damaged:
            return True
        begins = node_id not in self._first
        alike = self._first.setdefault(node_id, coords) == coords
        if begins and alike:
            return True
        if not all(self._at_hand(one) or self._is_asked_little(one) for one in reach.sources):
            return alike
        return not all(map(self._at_hand, self._sources(node_id).sources))

    def _reached(
        self, node_id: bytes, coords: Coords, reach: Reach, leaves: Sequence[PlacedLeaf]
    ) -> ChunkRef | None:
        """Look the chunk up in the tables that contain it, which are fetched in one round."""
        due = leaves if reach.base else ()
        wanted = [*self._due_places(reach.places), *self._due_leaf(due)]
        loaded = self._objects.load_all(wanted)
        for place in reach.places:
            table = self._table(node_id, place.source, place.number, loaded)
            ref = table.get(coords)
            if ref is not None:
                return None if isinstance(ref, Unset) else ref
        return self._in_leaf(coords, due, loaded)

    def _in_leaf(
        self, coords: Coords, leaves: Sequence[PlacedLeaf], loaded: Mapping[Any, Any]
    ) -> ChunkRef | None:
        for leaf in leaves:
            if not loaded and not self._objects.has_table(leaf.manifest.blob, leaf.part):
                loaded = self._objects.load_all(self._due_leaf(leaves))
            ref = self._leaf(leaf, loaded).get(coords)
            if isinstance(ref, Unset):
                key = leaf.manifest.blob.key
                raise CorruptObjectError(f"{key} is a leaf and has an unset row")
            return ref
        return None

    def _due_leaf(self, leaves: Sequence[PlacedLeaf]) -> list[Wanted]:
        """What is due first for one chunk of the leaves."""
        return [due for leaf in leaves for due in self._due_of(leaf.manifest, leaf.part)]

    def _leaf_at(self, node_id: bytes, coords: Coords) -> list[PlacedLeaf]:
        self._check_leaves(node_id, len(coords))
        found = self.index.holding(node_id, coords)
        if len(found) > 1:
            one, two = (leaf.manifest.blob.key for leaf in found[:2])
            raise CorruptObjectError(
                f"{one} and {two} both say where chunk {coords} is: leaves of a base must not "
                "overlap"
            )
        return found

    def _check_leaves(self, node_id: bytes, ndim: int) -> None:
        around = self.index.around(node_id)
        if around is not None:
            check_axes(around, ndim)

    def overlay(self, node_id: bytes, after: int = 0, region: Box | None = None) -> Overlay:
        """The node's overlay of live deltas newer than `after`.

        With a region, rows outside it may be missing.
        """
        found = self._known_overlay(node_id, after)
        if found is not None:
            return found
        if region is None:
            return self._fetch(node_id, {after})[0][after]
        box = region
        sources = self._sources(node_id).where(
            lambda last, of: last > after and of.overlaps(box), box.ndim
        )
        return self._fetch_some(node_id, {after}, sources)[0][after]

    def has_leaves(self, node_id: bytes, box: Box) -> bool:
        """Whether the node's leaves that overlap the box need no fetch."""
        due = self._due_leaves(self.index.placed_in(node_id, box))
        return all(self._objects.has(blob, kind) for blob, kind in due)

    def leaves(self, node_id: bytes, wanted: Callable[[Box], bool]) -> list[ChunkTable]:
        """The node's tables in the base whose boxes are wanted, without overlays."""
        due = [leaf for leaf in self.index.placed(node_id) if wanted(leaf.part.box)]
        loaded = self._objects.load_all(self._due_leaves(due))
        return [self._leaf(leaf, loaded) for leaf in due]

    def chunks(self, node_id: bytes) -> ChunkTable | None:
        """All chunks of the node that exist; None if there are none."""
        due = self.index.placed(node_id)
        afters = {0, *(leaf.merged for leaf in due)}
        overlays, loaded = self._fetch(node_id, afters, self._due_leaves(due))
        tables = [self._leaf(leaf, loaded) for leaf in due]
        if len(overlays) == 1:
            return fold(tables, overlays[0])
        leaves = [
            Leaf(leaf.part.box, table, overlays[leaf.merged])
            for leaf, table in zip(due, tables, strict=True)
        ]
        return fold_leaves(leaves, overlays[0])

    def chunks_at(self, node_id: bytes, coords: IndexArray) -> ChunkTable | None:
        """Those of these chunks of the node (int64[n, ndim], n >= 1) that exist.

        Leaves without any of them are not read.
        """
        self._check_leaves(node_id, coords.shape[1])
        due = [
            leaf
            for leaf in self.index.placed_in(node_id, Box.around_coords(coords))
            if ((coords >= leaf.part.box.lo) & (coords < leaf.part.box.hi)).all(axis=1).any()
        ]
        sources = self._sources(node_id).where(any_at(coords, due), coords.shape[1])
        afters = {0, *(leaf.merged for leaf in due)}
        first = self._due_leaves(due)
        overlays, loaded = self._fetch_some(node_id, afters, sources, first, coords)
        over = {after: picked(overlay, coords) for after, overlay in overlays.items()}
        tables = [pick(self._leaf(leaf, loaded), coords) for leaf in due]
        leaves = [
            Leaf(leaf.part.box, table, over[leaf.merged])
            for leaf, table in zip(due, tables, strict=True)
        ]
        return fold_leaves(leaves, over[0])

    def chunks_in(
        self, node_id: bytes, box: Box, without: Collection[Box] = ()
    ) -> ChunkTable | None:
        """The node's chunks in the box that exist, except those of leaves with a box in `without`.

        Leaves and deltas without chunks in the box are not read.
        """
        self._check_leaves(node_id, box.ndim)
        placed = self.index.placed_in(node_id, box)
        due = [leaf for leaf in placed if leaf.part.box not in without]
        afters = {leaf.merged for leaf in due}
        if sum(leaf.part.box.shared_size(box) for leaf in placed) < box.size:
            afters.add(0)  # part of the box is in no leaf
        elif not due:
            return None
        since = min(afters, default=0)
        sources = [s for s in self._sources(node_id).deciding(box) if s.last > since]
        overlays, loaded = self._fetch_some(node_id, afters, sources, self._due_leaves(due))
        over = {after: clipped(overlay, box) for after, overlay in overlays.items()}
        tables = [within(self._leaf(leaf, loaded), box) for leaf in due]
        if len(over) == 1 and len(due) == len(placed):
            return fold(tables, *over.values())
        leaves = [
            Leaf(leaf.part.box, table, over[leaf.merged])
            for leaf, table in zip(due, tables, strict=True)
        ]
        outside = over.get(0, Overlay(None, None))
        rest = rows_in(outside.table, [*without], outside=True)
        return fold_leaves(leaves, Overlay(None, rest))

    def truncations(self, position: int) -> Mapping[bytes, Coords]:
        """The truncations of the entry at that position of the read list, by node id."""
        return self._cuts.get(position, {})

    def touched(self) -> set[bytes]:
        """Ids of all nodes with chunk tables or truncations in live deltas."""
        ids: set[bytes] = set()
        for entry in self.snapshot.deltas:
            ids.update(part.node_id for part in entry.embedded)
            ids.update(part.node_id for ref in entry.manifests for part in ref.parts)
        return ids.union(*self._cuts.values())


def opening_kind(ref: BlobRef) -> type[Delta | Digest]:
    """The type of an object that opening a snapshot needs."""
    return Digest if ref.key.startswith(DIGESTS) else Delta
