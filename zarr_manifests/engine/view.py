"""One snapshot, ready to be asked: which nodes there are, and where each chunk is.

A lookup consults the overlay (all live deltas' words about that node, brought together once, from
one parallel round of fetches), then the leaf whose box holds the coordinate. A leaf has all changes
up to its merged-to sequence, so inside its box only what is newer is laid over it; likewise the
base's nodes. Invariant: a view never changes; what it has fetched and merged is kept in the cache
of its objects, for as long as there is room, and is the same for all views of the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Final, cast

import numpy as np

from zarr_manifests.engine.objects import Objects
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkRef, ChunkTable, Unset
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.digest import Digest
from zarr_manifests.format.manifest import Manifest, ManifestRef
from zarr_manifests.format.nodes import Base, Node
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.digests import tells_about
from zarr_manifests.planning.leaves import BaseIndex, PlacedLeaf
from zarr_manifests.planning.merge import (
    Layer,
    Leaf,
    Overlay,
    fold,
    fold_leaves,
    inside,
    merge_layers,
    pick,
)
from zarr_manifests.runtime import Runtime

__all__ = ["DIGESTS", "SnapshotView", "check_axes", "opening_kind"]

DIGESTS: Final = "digests"
"""The first part of the keys of digests."""
_OTHER_AXES: Final = "a chunk table of {} axes for a node of {}"


def check_axes(box: Box, ndim: int) -> None:
    """Refuse a chunk table that counts other axes than its node has: it would read as absent.

    Raises
    ------
    CorruptObjectError
        If the numbers differ.
    """
    if box.ndim != ndim:
        raise CorruptObjectError(_OTHER_AXES.format(box.ndim, ndim))


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
        # Manifests, by key and node, known to hold what this base says they do.
        self._checked: set[tuple[str, bytes]] = set()

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
        calls: list[Any] = [partial(objects.load, ref, Snapshot)]
        if base is not None:
            calls.append(partial(objects.load, base, Base))
        calls += [partial(objects.load, other, opening_kind(other)) for other in ahead]
        snapshot: Snapshot = runtime.parallel(calls)[0]
        due = base if base and snapshot.base and base.key == snapshot.base.key else snapshot.base
        wanted = snapshot.opening()
        loads: list[Any] = [
            partial(objects.load, other, opening_kind(other)) for _, other in wanted
        ]
        if due is not None:
            loads.append(partial(objects.load, due, Base))
        loaded = runtime.parallel(loads)
        found = loaded.pop() if due is not None else Base((), ())
        opening = dict(zip((position for position, _ in wanted), loaded, strict=True))
        for position, value in opening.items():
            if isinstance(value, Delta):
                snapshot.deltas[position].check(value)
        for entry in snapshot.digests:
            digest = objects.load(entry.blob, Digest)
            if not tells_about(digest, snapshot.deltas[entry.first : entry.stop]):
                raise CorruptObjectError(f"{entry.blob.key} is a digest of other deltas")
        return cls(objects, ref, snapshot, found, opening)

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
        due = self._leaf_at(node_id, coords)
        after = due[0].merged if due else 0
        overlay, loaded = self._known_overlay(node_id, after), dict[str, Any]()
        if overlay is None:  # in one round with the leaf, which is most likely needed as well
            overlays, loaded = self._fetch(node_id, {after}, due)
            overlay = overlays[after]
        if overlay.table is not None:
            check_axes(overlay.table.box, len(coords))
            ref = overlay.table.get(coords)
            if ref is not None:
                return None if isinstance(ref, Unset) else ref
        cut = overlay.truncated
        if cut is not None and not inside(np.array(coords, np.int64).reshape(1, -1), cut)[0]:
            return None
        for leaf in due:
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
            raise CorruptObjectError(_OTHER_AXES.format(found, ndim))

    def overlay(self, node_id: bytes, after: int = 0) -> Overlay:
        """What live deltas of a sequence beyond `after` say about the node."""
        found = self._known_overlay(node_id, after)
        return self._fetch(node_id, {after})[0][after] if found is None else found

    def layers(self, node_id: bytes) -> Sequence[tuple[int, Layer]]:
        """What each live delta says of the node's chunks, oldest first, with its sequence."""
        name = self._name("layers", node_id)
        found: Sequence[tuple[int, Layer]] | None = self._objects.cache.find(name)
        if found is None:
            found, _ = self._fetch_layers(node_id, ())
            self._objects.cache.keep(name, found)
        return found

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
        overlays, loaded = self._fetch(node_id, {0, *(leaf.merged for leaf in due)}, due)
        picked = {after: _picked(overlay, coords) for after, overlay in overlays.items()}
        leaves = [
            Leaf(
                leaf.part.box, pick(self._leaf(node_id, leaf, loaded), coords), picked[leaf.merged]
            )
            for leaf in due
        ]
        return fold_leaves(leaves, picked[0])

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
        if (ref.blob.key, node_id) not in self._checked:
            # The cache has them by what they lie in; another base may say something else of it.
            ref.check(node_id, tables.values())
            self._checked.add((ref.blob.key, node_id))
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
        return cast(Overlay | None, self._objects.cache.find(self._name("overlay", node_id, after)))

    def _name(self, what: str, node_id: bytes, *more: int) -> tuple[Any, ...]:
        return what, self.ref.key, self.ref.crc32c, node_id, *more

    def _fetch(
        self, node_id: bytes, afters: Set[int], leaves: Sequence[PlacedLeaf] = ()
    ) -> tuple[dict[int, Overlay], dict[str, Any]]:
        """Overlays by what they come after, and the objects loaded, by key; in one round.

        Among the objects are the manifests of `leaves`, but those whose tables are in memory.
        """
        known = {after: self._known_overlay(node_id, after) for after in afters}
        overlays = {after: overlay for after, overlay in known.items() if overlay is not None}
        if len(overlays) == len(known):
            return overlays, self._objects.load_all(self._due_leaves(node_id, leaves))
        cache, name = self._objects.cache, self._name("layers", node_id)
        layers: Sequence[tuple[int, Layer]] | None = cache.find(name)
        if layers is None:
            layers, loaded = self._fetch_layers(node_id, leaves)
            if any(afters) or any(leaf.merged for leaf in self.index.placed(node_id)):
                cache.keep(name, layers)  # there are other overlays to be made of them
        else:
            loaded = self._objects.load_all(self._due_leaves(node_id, leaves))
        for after in known.keys() - overlays.keys():
            newer = [layer for last, layer in layers if last > after]
            overlays[after] = merge_layers(newer)
            cache.keep(self._name("overlay", node_id, after), overlays[after])
            rows = sum(len(table) for layer in newer for table in layer.tables)
            self._objects.meter.add("refs_merged", rows)
        return overlays, loaded

    def _embedded(self, position: int, delta: Delta) -> Manifest:
        if not isinstance(self.opening.get(position), Delta):  # where those have been checked
            self.snapshot.deltas[position].check(delta)
        return delta.embedded

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

    def _fetch_layers(
        self, node_id: bytes, leaves: Sequence[PlacedLeaf]
    ) -> tuple[list[tuple[int, Layer]], dict[str, Any]]:
        """A layer for each live delta that speaks of the node, with its sequence; in one round.

        With the objects that were loaded for it and for the leaves, by key.
        """
        deltas: dict[int, BlobRef] = {}
        manifests: dict[int, list[ManifestRef]] = {}
        digests = self._digests_of(node_id)
        covered = {at + i for at, digest in digests.items() for i in range(len(digest.truncated))}
        for position, entry in enumerate(self.snapshot.deltas):
            if position in covered:
                continue
            if any(part.node_id == node_id for part in entry.embedded):
                deltas[position] = entry.log
            for ref in entry.manifests:
                if any(part.node_id == node_id for part in ref.parts):
                    manifests.setdefault(position, []).append(ref)
        wanted: list[tuple[BlobRef, Any]] = [(ref, Delta) for ref in deltas.values()]
        wanted += [(ref.blob, Manifest) for refs in manifests.values() for ref in refs]
        wanted += self._due_leaves(node_id, leaves)
        loaded = self._objects.load_all(wanted)
        layers = []
        for position, entry in enumerate(self.snapshot.deltas):
            tables: list[ChunkTable] = []
            if position in digests:
                cut = digests[position].covered[node_id]
                tables += digests[position].tables.tables(node_id)
            elif position in covered:
                continue
            else:
                cut = self._cuts.get(position, {}).get(node_id)
            if position in deltas:
                delta = loaded[deltas[position].key]
                tables += self._embedded(position, delta).tables(node_id)
            for ref in manifests.get(position, ()):
                tables += ref.tables(loaded[ref.blob.key], node_id)
            if cut is not None or tables:
                layers.append((entry.last, Layer(cut, tuple(tables))))
        return layers, loaded


def _picked(overlay: Overlay, coords: IndexArray) -> Overlay:
    table = overlay.table
    if table is not None:
        check_axes(table.box, coords.shape[1])
        table = pick(table, coords)
    return Overlay(overlay.truncated, table)


def opening_kind(ref: BlobRef) -> type[Delta | Digest]:
    """What lies at one of the places that opening a snapshot needs."""
    return Digest if ref.key.startswith(DIGESTS) else Delta
