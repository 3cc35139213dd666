"""One snapshot, ready to be asked: which nodes there are, and where each chunk is.

A lookup consults what live deltas say, then the leaf whose box holds the coordinate. A leaf has all
changes up to its merged-to sequence, so inside its box only what is newer is laid over it; likewise
the base's nodes. What is fetched is fetched in one parallel round: for the first chunk of a node
the deltas whose boxes hold it; for the second that needs one more, all that is left of the node.
These are then brought together once, as the overlay, in which the further chunks are looked up. So
one chunk costs what concerns it, and a scan two rounds, not one a delta. Many chunks at a time cost
what concerns any of them.

Invariant: a view never changes what it says; what it has fetched and merged is kept in the cache of
its objects, for as long as there is room, and is the same for all views of the snapshot.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from operator import le
from typing import Any, Final, cast

import numpy as np

from zarr_manifests.engine.objects import AtHand, Objects
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import (
    ChunkRef,
    ChunkTable,
    NativeRef,
    Unset,
    VirtualRef,
)
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.digest import Digest
from zarr_manifests.format.manifest import Manifest, Part
from zarr_manifests.format.nodes import Base, Node
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.digests import tells_about
from zarr_manifests.planning.leaves import BaseIndex, PlacedLeaf
from zarr_manifests.planning.live import (
    Cut,
    LiveSources,
    Reach,
    Source,
    any_at,
    check_axes,
    clipped,
    picked,
)
from zarr_manifests.planning.merge import (
    Layer,
    Leaf,
    Overlay,
    fold,
    fold_leaves,
    inside,
    merge_layers,
    pick,
    within,
)
from zarr_manifests.runtime import SYSTEM, Runtime

__all__ = ["DIGESTS", "SnapshotView", "check_axes", "opening_kind"]

DIGESTS: Final = "digests"
"""The first part of the keys of digests."""
_BASE: Final = -1
_ANY_NODE: Final = b""
_ALONE_S: Final = 0.05
"""For so long the cache is not told again that an overlay is in use."""
_now_s: Final = SYSTEM.monotonic_s


class SnapshotView:
    """What a snapshot says. Thread-safe; made by `open`.

    Attributes
    ----------
    ref : BlobRef
        Where the snapshot is.
    snapshot : Snapshot
        The snapshot itself.
    nodes : mapping of str to Node
        All nodes by path.
    manifests : tuple of ManifestRef
        The base's leaf directory.
    base_sequence : int
        The sequence up to which the base has all changes of nodes.
    counts : tuple of Count or None
        What the base says of how many chunks there were then; None if it does not.
    opening : mapping of int to Delta or Digest
        What opening needed besides the base, by position in the read list.
    """

    def __init__(
        self,
        objects: Objects,
        ref: BlobRef,
        snapshot: Snapshot,
        base: Base,
        opening: Mapping[int, Delta | Digest],
    ) -> None:
        self.ref = ref
        self.snapshot = snapshot
        self.manifests = base.manifests
        self.base_sequence = base.sequence
        self.counts = base.counts if snapshot.base is not None else ()
        self._objects = objects
        self.opening = opening  # by position in the read list
        nodes = {node.path: node for node in base.nodes}
        ends = {entry.first: snapshot.deltas[entry.stop - 1].last for entry in snapshot.digests}
        self._cuts: dict[int, Mapping[bytes, Coords]] = {}  # by position in the read list
        for position in sorted(opening):
            found = opening[position]
            if ends.get(position, snapshot.deltas[position].last) > base.sequence:
                for path in found.deleted:
                    nodes.pop(path, None)
                nodes.update((node.path, node) for node in found.nodes)
            if isinstance(found, Digest):
                self._cuts.update(enumerate(found.truncated, position))
            else:
                self._cuts[position] = found.truncated
        self.nodes: Mapping[str, Node] = nodes
        if len({node.node_id for node in nodes.values()}) != len(nodes):
            raise CorruptObjectError(f"two nodes of snapshot {self.snapshot_id} have the same id")
        self._index: BaseIndex | None = None
        self._live: dict[bytes, LiveSources] = {}  # by node, made when first asked for
        self._first: dict[bytes, Coords] = {}  # by node, until its overlay is made
        # Overlays of nodes without a leaf, while the cache keeps them, and until when it is
        # not asked for them; by node.
        self._alone: dict[bytes, tuple[weakref.ref[Overlay], float]] = {}
        self._damaged: set[bytes] = set()  # nodes whose overlay could not be made
        # Objects, by key, node and position in the read list (that of the base is -1), known to
        # hold what this snapshot says they do.
        self._checked: set[tuple[str, bytes, int]] = set()

    @classmethod
    def open(
        cls,
        objects: Objects,
        runtime: Runtime,
        ref: BlobRef,
        base: BlobRef | None = None,
        ahead: Sequence[BlobRef] = (),
    ) -> SnapshotView:
        """Open the snapshot at `ref`.

        `base` is the base it is expected to read, and `ahead` what else, if known: all of it is
        fetched in one round.
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

    def at_hand(self) -> SnapshotView:
        """The same view, but what would have to be fetched raises `NotAtHandError`."""
        view = copy.copy(self)
        view._objects = AtHand(self._objects)
        return view

    @property
    def snapshot_id(self) -> str:
        """The snapshot's id."""
        return snapshot_id_of(self.ref.key)

    @property
    def index(self) -> BaseIndex:
        """The base's leaves, to search in; made when first asked for, and once for each base."""
        found = self._index
        if found is None:
            base = self.snapshot.base
            found = None if base is None else self._objects.recall(base, BaseIndex)
            if found is None:
                sets = {ref.blob.key: ref.packed_for for ref in self.manifests if ref.packed_for}
                try:
                    found = BaseIndex(self.manifests, sets)
                except InvalidArgumentError as error:
                    raise CorruptObjectError(f"snapshot {self.snapshot_id}: {error}") from error
                if base is not None:
                    self._objects.remember(base, found)
            self._index = found
        return found

    def lookup(self, node_id: bytes, coords: Coords) -> ChunkRef | None:
        """Where the chunk is; None if it is absent."""
        alone = self._alone.get(node_id)
        if alone is not None:  # as nearly always where many chunks are read
            overlay, until_s = alone[0](), alone[1]
            if overlay is not None and overlay.table is not None and _now_s() < until_s:
                ref = overlay.table.get(coords)
                if ref is not None:
                    return None if isinstance(ref, Unset) else ref
        due = self._leaf_at(node_id, coords)
        after = due[0].merged if due else 0
        loaded: dict[str, Any] = {}
        overlay = self._known_overlay(node_id, after)
        if overlay is None:
            reach = self._sources(node_id).reach(coords, after)
            if self._by_itself(node_id, coords, reach):
                return self._reached(node_id, coords, reach, due)
            try:  # in one round with the leaf, which is most likely needed as well
                overlays, loaded = self._fetch(node_id, {after}, due)
            except CorruptObjectError:
                self._damaged.add(node_id)
                return self._reached(node_id, coords, reach, due)
            overlay = overlays[after]
            self._first.pop(node_id, None)
        if not due and self.index.ndim(node_id) is None:
            self._alone[node_id] = weakref.ref(overlay), _now_s() + _ALONE_S
        if overlay.table is not None:
            ref = overlay.table.get(coords)
            if ref is not None:
                return None if isinstance(ref, Unset) else ref
            check_axes(overlay.table.box, len(coords))
        cut = overlay.truncated
        if cut is not None and not inside(np.array(coords, np.int64).reshape(1, -1), cut)[0]:
            return None
        return self._in_leaf(node_id, coords, due, loaded)

    def following(
        self, node_id: bytes, coords: Coords, most: int, grid: Box
    ) -> list[tuple[Coords, NativeRef | VirtualRef]]:
        """Where the next chunks of the grid after this one are, in C order.

        As far as one table in memory says. Those that are not there, or lie inline, are left out.
        """
        due = self._leaf_at(node_id, coords)
        overlay = self._known_overlay(node_id, due[0].merged if due else 0)
        if overlay is None or overlay.truncated is not None:
            return []
        table = overlay.table
        if due:
            if table is not None or not self._objects.has_tables(due[0].manifest.blob, node_id):
                return []
            table = self._leaf(node_id, due[0], {})
        elif table is None or self.index.ndim(node_id) is not None:
            return []
        row = table.row_of(coords)
        if row is None or not all(map(le, table.box.hi, grid.hi)):
            return []
        return table.refs_between(row + 1, row + 1 + most)

    def knows(self, node_id: bytes, coords: Coords) -> bool:
        """Whether `lookup` of the chunk finds all in memory and decoded."""
        if self._index is None or node_id not in self._live:
            return False
        due = self._leaf_at(node_id, coords)
        if self._known_overlay(node_id, due[0].merged if due else 0) is None:
            return False
        return all(self._objects.has_tables(leaf.manifest.blob, node_id) for leaf in due)

    def _by_itself(self, node_id: bytes, coords: Coords, reach: Reach) -> bool:
        """Whether to look the chunk up in what holds it, and leave the rest of the node.

        Not if another has been looked up that way and this one needs more than is at hand; nor if
        all is at hand, which then is as well brought together for good. (If that cannot be done
        since some of it is damaged, chunks that do not need this are still looked up.)
        """
        if node_id in self._damaged:
            return True
        begins = node_id not in self._first
        alike = self._first.setdefault(node_id, coords) == coords
        if begins and alike:
            return True
        if not all(map(self._at_hand, reach.sources)):
            return alike
        return not all(map(self._at_hand, self._sources(node_id).sources))

    def _reached(
        self, node_id: bytes, coords: Coords, reach: Reach, leaves: Sequence[PlacedLeaf]
    ) -> ChunkRef | None:
        """Where the chunk is, from what holds it; fetched in one round."""
        due = leaves if reach.base else ()
        loaded = self._load(reach.sources, self._due_leaves(node_id, due))
        for place in reach.places:
            ref = self._table(node_id, place.source, place.number, loaded).get(coords)
            if ref is not None:
                return None if isinstance(ref, Unset) else ref
        return self._in_leaf(node_id, coords, due, loaded)

    def _in_leaf(
        self,
        node_id: bytes,
        coords: Coords,
        leaves: Sequence[PlacedLeaf],
        loaded: Mapping[str, Any],
    ) -> ChunkRef | None:
        for leaf in leaves:
            ref = self._leaf(node_id, leaf, loaded).get(coords)
            if isinstance(ref, Unset):
                key = leaf.manifest.blob.key
                raise CorruptObjectError(f"{key} is a leaf and has an unset row")
            return ref
        return None

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
        found = self.index.ndim(node_id)
        if found is not None and found != ndim:
            raise CorruptObjectError(f"a chunk table of {found} axes for a node of {ndim}")

    def overlay(self, node_id: bytes, after: int = 0, region: Box | None = None) -> Overlay:
        """What live deltas of a sequence beyond `after` say about the node.

        Given a region, rows elsewhere may be missing.
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

    def layers(self, node_id: bytes) -> Sequence[tuple[int, Layer]]:
        """What each live delta says of the node's chunks, oldest first, with its sequence."""
        name = self._name("layers", node_id)
        found: Sequence[tuple[int, Layer]] | None = self._objects.cache.find(name)
        if found is None:
            sources = self._sources(node_id).sources
            loaded = self._load(sources, ())
            found = self._layers(node_id, sources, loaded, keep=False)
            self._objects.cache.keep(name, found)
        return found

    def has_leaves(self, node_id: bytes, box: Box) -> bool:
        """Whether the node's leaves that share a chunk with the box need not be fetched."""
        due = self._due_leaves(node_id, self.index.placed_in(node_id, box))
        return all(self._objects.has(blob, kind) for blob, kind in due)

    def leaves(self, node_id: bytes, wanted: Callable[[Box], bool]) -> list[ChunkTable]:
        """The node's tables in the base, of the boxes that are wanted; nothing is laid over."""
        due = [leaf for leaf in self.index.placed(node_id) if wanted(leaf.part.box)]
        loaded = self._objects.load_all(self._due_leaves(node_id, due))
        return [self._leaf(node_id, leaf, loaded) for leaf in due]

    def chunks(self, node_id: bytes) -> ChunkTable | None:
        """All chunks of the node that are there; None if there is none."""
        due = self.index.placed(node_id)
        overlays, loaded = self._fetch(node_id, {0, *(leaf.merged for leaf in due)}, due)
        tables = [self._leaf(node_id, leaf, loaded) for leaf in due]
        if len(overlays) == 1:
            return fold(tables, overlays[0])
        leaves = [
            Leaf(leaf.part.box, table, overlays[leaf.merged])
            for leaf, table in zip(due, tables, strict=True)
        ]
        return fold_leaves(leaves, overlays[0])

    def chunks_at(self, node_id: bytes, coords: IndexArray) -> ChunkTable | None:
        """Of these chunks of the node (int64[n, ndim], n >= 1) those that are there.

        Leaves that hold none of them are not read.
        """
        self._check_leaves(node_id, coords.shape[1])
        due = [
            leaf
            for leaf in self.index.placed_in(node_id, Box.around_coords(coords))
            if ((coords >= leaf.part.box.lo) & (coords < leaf.part.box.hi)).all(axis=1).any()
        ]
        sources = self._sources(node_id).where(any_at(coords, due), coords.shape[1])
        afters = {0, *(leaf.merged for leaf in due)}
        overlays, loaded = self._fetch_some(node_id, afters, sources, due, coords)
        over = {after: picked(overlay, coords) for after, overlay in overlays.items()}
        leaves = [
            Leaf(leaf.part.box, pick(self._leaf(node_id, leaf, loaded), coords), over[leaf.merged])
            for leaf in due
        ]
        return fold_leaves(leaves, over[0])

    def chunks_in(self, node_id: bytes, box: Box) -> ChunkTable | None:
        """Of the node's chunks in the box those that are there.

        Leaves and deltas that hold none of them are not read.
        """
        self._check_leaves(node_id, box.ndim)
        due = self.index.placed_in(node_id, box)
        afters = {leaf.merged for leaf in due}
        if sum(leaf.part.box.shared_size(box) for leaf in due) < box.size:
            afters.add(0)  # some of it lies in no leaf
        since = min(afters, default=0)
        sources = self._sources(node_id).where(
            lambda last, of: last > since and of.overlaps(box), box.ndim
        )
        overlays, loaded = self._fetch_some(node_id, afters, sources, due)
        over = {after: clipped(overlay, box) for after, overlay in overlays.items()}
        tables = [within(self._leaf(node_id, leaf, loaded), box) for leaf in due]
        if len(over) == 1:
            return fold(tables, *over.values())
        leaves = [
            Leaf(leaf.part.box, table, over[leaf.merged])
            for leaf, table in zip(due, tables, strict=True)
        ]
        return fold_leaves(leaves, over.get(0, Overlay(None, None)))

    def truncations(self, position: int) -> Mapping[bytes, Coords]:
        """What the entry at that position of the read list cuts off, by node id."""
        return self._cuts.get(position, {})

    def touched(self) -> set[bytes]:
        """Ids of all nodes that live deltas have chunk tables or truncations for."""
        ids: set[bytes] = set()
        for entry in self.snapshot.deltas:
            ids.update(part.node_id for part in entry.embedded)
            ids.update(part.node_id for ref in entry.manifests for part in ref.parts)
        return ids.union(*self._cuts.values())

    def _leaf(self, node_id: bytes, leaf: PlacedLeaf, loaded: Mapping[str, Any]) -> ChunkTable:
        """The leaf's table; `loaded` has what manifests are at hand."""
        ref = leaf.manifest
        tables = self._objects.tables(ref.blob, node_id, loaded.get(ref.blob.key))
        if (ref.blob.key, node_id, _BASE) not in self._checked:
            # The cache has them by what they lie in; another base may say something else of it.
            ref.check(node_id, tables.values())
            self._checked.add((ref.blob.key, node_id, _BASE))
        return tables[leaf.part.box]

    def _due_leaves(
        self, node_id: bytes, leaves: Sequence[PlacedLeaf]
    ) -> list[tuple[BlobRef, Any]]:
        """Manifests of the leaves whose tables are not in memory."""
        return [
            (leaf.manifest.blob, Manifest)
            for leaf in leaves
            if not self._objects.has_tables(leaf.manifest.blob, node_id)
        ]

    def _known_overlay(self, node_id: bytes, after: int) -> Overlay | None:
        found: Overlay | None = self._objects.cache.find(self._overlay_name(node_id, after))
        return found

    def _overlay_name(self, node_id: bytes, after: int) -> tuple[Any, ...]:
        live = self._live.get(node_id) or self._sources(node_id)
        return *self._name("overlay", node_id), live.since(after)

    def _name(self, what: str, node_id: bytes) -> tuple[Any, ...]:
        return what, self.ref.key, self.ref.crc32c, node_id

    def _fetch(
        self, node_id: bytes, afters: Set[int], leaves: Sequence[PlacedLeaf] = ()
    ) -> tuple[dict[int, Overlay], dict[str, Any]]:
        """Overlays by what they come after, and the objects loaded, by key; in one round.

        Among the objects are the manifests of `leaves`, but those whose tables are in memory.
        """
        known = {after: self._known_overlay(node_id, after) for after in afters}
        overlays = {after: overlay for after, overlay in known.items() if overlay is not None}
        if len(overlays) == len(known):
            return overlays, self._load((), self._due_leaves(node_id, leaves))
        cache, name = self._objects.cache, self._name("layers", node_id)
        layers: Sequence[tuple[int, Layer]] | None = cache.find(name)
        live = self._sources(node_id)
        sources = live.sources if layers is None else ()
        loaded = self._load(sources, self._due_leaves(node_id, leaves))

        def merge(after: int) -> Overlay:
            nonlocal layers
            if layers is None:
                layers = self._layers(node_id, sources, loaded, keep=False)
                if any(map(live.since, self.index.merged(node_id).tolist())):
                    cache.keep(name, layers)  # there are other overlays to be made of them
            return self._merged([layer for last, layer in layers if last > after])

        for after in known.keys() - overlays.keys():  # by one of the threads that want it
            overlays[after] = cache.obtain(
                self._overlay_name(node_id, after), partial(merge, after)
            )
        return overlays, loaded

    def _merged(self, layers: Sequence[Layer]) -> Overlay:
        rows = sum(len(table) for layer in layers for table in layer.tables)
        self._objects.meter.add("refs_merged", rows)
        return merge_layers(layers)

    def _fetch_some(
        self,
        node_id: bytes,
        afters: Set[int],
        sources: Sequence[Source],
        leaves: Sequence[PlacedLeaf] = (),
        coords: IndexArray | None = None,
    ) -> tuple[dict[int, Overlay], dict[str, Any]]:
        """As `_fetch`, of no more than these sources, and of these chunks if any are given.

        Unless all is at hand, which then is as well brought together for good.
        """
        live = self._sources(node_id)
        known = all(self._known_overlay(node_id, after) is not None for after in afters)
        if known or len(sources) == len(live.sources) or all(map(self._at_hand, live.sources)):
            return self._fetch(node_id, afters, leaves)
        loaded = self._load(sources, self._due_leaves(node_id, leaves))
        layers = self._layers(node_id, sources, loaded, coords, keep=True)
        return {
            after: self._merged([layer for last, layer in layers if last > after])
            for after in afters
        }, loaded

    def _load(
        self, sources: Sequence[Source], leaves: Sequence[tuple[BlobRef, Any]]
    ) -> dict[str, Any]:
        """The objects by key; what has to be fetched is, in one round."""
        due = [(s.blob, s.kind) for s in sources if not self._is_open(s)]
        return self._objects.load_all([*due, *leaves])

    def _at_hand(self, source: Source) -> bool:
        return self._is_open(source) or self._objects.has(source.blob, source.kind)

    def _is_open(self, source: Source) -> bool:
        """Whether it came with the snapshot and lives as long as this view."""
        return type(self.opening.get(source.position)) is source.kind

    def _layers(
        self,
        node_id: bytes,
        sources: Sequence[Source],
        loaded: Mapping[str, Any],
        coords: IndexArray | None = None,
        *,
        keep: bool,
    ) -> list[tuple[int, Layer]]:
        tables: dict[Source, list[ChunkTable]] = {}
        for source in sources:
            numbers = range(len(source.parts))
            found = [self._table(node_id, source, n, loaded, keep=keep) for n in numbers]
            tables[source] = found if coords is None else [pick(one, coords) for one in found]
        return self._sources(node_id).layers(tables)

    def _table(
        self,
        node_id: bytes,
        source: Source,
        number: int,
        loaded: Mapping[str, Any],
        *,
        keep: bool = True,
    ) -> ChunkTable:
        """The table of that number that the source has for the node.

        It stays in memory if it is to be kept, which what is about to be merged for good need not.
        """
        find = partial(self._part, node_id, source, number, loaded)
        if (source.blob.key, node_id, source.position) not in self._checked:
            find()
        if keep:
            return self._objects.table(source.blob, node_id, number, find)
        known = self._objects.known_table(source.blob, node_id, number)
        return Manifest.decode(*find()) if known is None else known

    def _part(
        self, node_id: bytes, source: Source, number: int, loaded: Mapping[str, Any]
    ) -> tuple[Part, bytes]:
        """The same, encoded; of an object that is among those loaded or opened."""
        found = self.opening[source.position] if self._is_open(source) else loaded[source.blob.key]
        checked = source.blob.key, node_id, source.position
        if isinstance(found, Delta | Digest):
            manifest = found.embedded if isinstance(found, Delta) else found.tables
        else:
            manifest = cast(Manifest, found)
        parts = [part for part in manifest.parts if part[0].node_id == node_id]
        if checked not in self._checked:
            if isinstance(found, Delta):
                self._check(found, source.position)
            if tuple(part for part, _ in parts) != source.parts:
                raise CorruptObjectError(
                    f"{source.blob.key} has no chunk tables such as the snapshot says it has"
                )
            self._checked.add(checked)
        return parts[number]

    def _check(self, delta: Delta, position: int) -> None:
        """Refuse a delta that is not as its entry says; once, and not for each node."""
        entry = self.snapshot.deltas[position]
        checked = entry.log.key, _ANY_NODE, position
        if checked not in self._checked:
            entry.check(delta)
            self._checked.add(checked)

    def _digests_of(self, node_id: bytes) -> dict[int, Digest]:
        """The digests that stand in place of their runs for the node, by where they begin.

        Each leaf has all of such a run already or nothing of it: a digest cannot tell its parts.
        """
        merged = self.index.merged(node_id)
        found = {}
        for entry in self.snapshot.digests:
            digest, run = self.opening[entry.first], self.snapshot.deltas[entry.first : entry.stop]
            if not isinstance(digest, Digest) or node_id not in digest.covered:
                continue
            if not ((merged >= run[0].last) & (merged < run[-1].last)).any():
                found[entry.first] = digest
        return found

    def in_digest(self, node_id: bytes, position: int) -> bool:
        """Whether what the entry at that position says of the node came with the snapshot."""
        return any(
            first <= position < first + len(digest.truncated)
            for first, digest in self._digests_of(node_id).items()
        )

    def _sources(self, node_id: bytes) -> LiveSources:
        """What the read list names of the node."""
        found = self._live.get(node_id)
        if found is None:
            found = self._live.setdefault(node_id, self._find_sources(node_id))
        return found

    def _find_sources(self, node_id: bytes) -> LiveSources:
        sources: list[Source] = []
        cuts: dict[int, Cut] = {}
        digests = self._digests_of(node_id)
        covered = {at + i for at, digest in digests.items() for i in range(len(digest.truncated))}
        blobs = {entry.first: entry.blob for entry in self.snapshot.digests}

        def add(blob: BlobRef, kind: type[Any], parts: Sequence[Part]) -> None:
            of_node = tuple(part for part in parts if part.node_id == node_id)
            if of_node:
                sources.append(Source(position, entry.last, blob, kind, of_node))

        for position, entry in enumerate(self.snapshot.deltas):
            cut = self._cuts.get(position, {}).get(node_id)
            if position in digests:
                cut = digests[position].covered[node_id]
                add(blobs[position], Digest, digests[position].tables.directory())
            elif position in covered:
                continue
            else:
                add(entry.log, Delta, entry.embedded)
                for ref in entry.manifests:
                    add(ref.blob, Manifest, ref.parts)
            if cut is not None:
                cuts[position] = Cut(entry.last, cut)
        return LiveSources(sources, cuts)


def opening_kind(ref: BlobRef) -> type[Delta | Digest]:
    """What lies at one of the places that opening a snapshot needs."""
    return Digest if ref.key.startswith(DIGESTS) else Delta
