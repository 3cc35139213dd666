"""One snapshot, ready to be asked: which nodes there are, and where each chunk is.

A lookup consults the overlay (all live deltas' words about that node, brought together once, from
one parallel round of fetches), then the leaf whose box holds the coordinate. Invariant: a view
never changes, and what it has fetched and merged stays valid for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from zarr_manifests.engine.objects import Objects
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkRef, ChunkTable, Unset
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.digest import Digest
from zarr_manifests.format.manifest import Manifest, ManifestRef
from zarr_manifests.format.nodes import Base, Node
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box, Coords
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.merge import Layer, Overlay, fold, inside, merge_layers
from zarr_manifests.runtime import Runtime

__all__ = ["DIGESTS", "SnapshotView", "check_axes"]

DIGESTS: Final = "digests"
"""The first part of the keys of digests."""


def check_axes(box: Box, ndim: int) -> None:
    """Refuse a chunk table that counts other axes than its node has: it would read as absent.

    Raises
    ------
    CorruptObjectError
        If the numbers differ.
    """
    if box.ndim != ndim:
        raise CorruptObjectError(f"a chunk table of {box.ndim} axes for a node of {ndim}")


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
        self._objects = objects
        self.opening = opening  # by position in the read list
        nodes = {node.path: node for node in base.nodes}
        self._cuts: dict[int, Mapping[bytes, Coords]] = {}  # by position in the read list
        for position in sorted(opening):
            found = opening[position]
            for path in found.deleted:
                nodes.pop(path, None)
            nodes.update((node.path, node) for node in found.nodes)
            if isinstance(found, Digest):
                self._cuts.update(enumerate(found.truncated, position))
            else:
                self._cuts[position] = found.truncated
        self.nodes: Mapping[str, Node] = nodes
        leaves: dict[bytes, list[tuple[Box, ManifestRef]]] = {}
        for manifest in base.manifests:
            for part in manifest.parts:
                leaves.setdefault(part.node_id, []).append((part.box, manifest))
        self._leaves = leaves
        self._overlays: dict[bytes, Overlay] = {}
        self._tables: dict[tuple[bytes, Box], ChunkTable] = {}

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
        calls += [partial(objects.load, other, _kind_of(other)) for other in ahead]
        snapshot: Snapshot = runtime.parallel(calls)[0]
        due = base if base and snapshot.base and base.key == snapshot.base.key else snapshot.base
        wanted = snapshot.opening()
        loads: list[Any] = [partial(objects.load, other, _kind_of(other)) for _, other in wanted]
        if due is not None:
            loads.append(partial(objects.load, due, Base))
        loaded = runtime.parallel(loads)
        found = loaded.pop() if due is not None else Base((), ())
        for entry in snapshot.digests:
            if len(objects.load(entry.blob, Digest).truncated) != entry.count:
                raise CorruptObjectError(f"{entry.blob.key} is a digest of other deltas")
        opening = dict(zip((position for position, _ in wanted), loaded, strict=True))
        return cls(objects, ref, snapshot, found, opening)

    @property
    def snapshot_id(self) -> str:
        """The snapshot's id."""
        return snapshot_id_of(self.ref.key)

    def lookup(self, node_id: bytes, coords: Coords) -> ChunkRef | None:
        """Where the chunk is; None if it is absent."""
        overlay = self._overlays.get(node_id)
        if overlay is None:  # in one round with the leaf, which is most likely needed as well
            overlay = self.overlay(node_id, self._leaf_at(node_id, coords))
        if overlay.table is not None:
            check_axes(overlay.table.box, len(coords))
            ref = overlay.table.get(coords)
            if ref is not None:
                return None if isinstance(ref, Unset) else ref
        cut = overlay.truncated
        if cut is not None and not inside(np.array(coords, np.int64).reshape(1, -1), cut)[0]:
            return None
        for box, manifest in self._leaf_at(node_id, coords):
            ref = self._leaf(node_id, box, manifest).get(coords)
            return None if isinstance(ref, Unset) else ref
        return None

    def _leaf_at(self, node_id: bytes, coords: Coords) -> list[tuple[Box, ManifestRef]]:
        leaves = self._leaves.get(node_id, [])
        for box, _ in leaves:
            check_axes(box, len(coords))
        return [leaf for leaf in leaves if coords in leaf[0]]

    def overlay(self, node_id: bytes, leaves: Sequence[tuple[Box, ManifestRef]] = ()) -> Overlay:
        """All live deltas' words about the node; `leaves` are fetched in the same round."""
        found = self._overlays.get(node_id)
        if found is None:
            found = merge_layers(self._layers(node_id, leaves))
            self._overlays[node_id] = found  # another thread's is equal: the view is immutable
        return found

    def leaves(
        self, node_id: bytes, wanted: Callable[[Box], bool] | None = None
    ) -> list[ChunkTable]:
        """The node's tables in the base; only those of the boxes that are wanted, if told."""
        due = self._leaves.get(node_id, [])
        if wanted is not None:
            due = [leaf for leaf in due if wanted(leaf[0])]
        self._objects.prefetch([(manifest.blob, Manifest) for _, manifest in due])
        return [self._leaf(node_id, box, manifest) for box, manifest in due]

    def chunks(self, node_id: bytes) -> ChunkTable | None:
        """All chunks of the node that are there; None if there is none."""
        return fold(self.leaves(node_id), self.overlay(node_id))

    def touched(self) -> set[bytes]:
        """Ids of all nodes that live deltas have chunk tables or truncations for."""
        ids: set[bytes] = set()
        for entry in self.snapshot.deltas:
            ids.update(part.node_id for part in entry.embedded)
            ids.update(part.node_id for ref in entry.manifests for part in ref.parts)
        return ids.union(*self._cuts.values())

    def _leaf(self, node_id: bytes, box: Box, manifest: ManifestRef) -> ChunkTable:
        table = self._tables.get((node_id, box))
        if table is None:
            loaded = self._objects.load(manifest.blob, Manifest)
            for found in loaded.tables(node_id):
                self._tables[node_id, found.box] = found
            table = self._tables.get((node_id, box))
            if table is None:
                raise CorruptObjectError(
                    f"{manifest.blob.key} has no chunk table that the snapshot says it has"
                )
        return table

    def _layers(self, node_id: bytes, leaves: Sequence[tuple[Box, ManifestRef]]) -> list[Layer]:
        """One layer for each live delta that speaks of the node, fetched in one round."""
        deltas: dict[int, BlobRef] = {}
        manifests: dict[int, list[BlobRef]] = {}
        digests = {
            entry.first: digest
            for entry in self.snapshot.digests
            if isinstance(digest := self.opening[entry.first], Digest) and node_id in digest.covered
        }
        covered = {at + i for at, digest in digests.items() for i in range(len(digest.truncated))}
        for position, entry in enumerate(self.snapshot.deltas):
            if position in covered:
                continue
            if any(part.node_id == node_id for part in entry.embedded):
                deltas[position] = entry.log
            for ref in entry.manifests:
                if any(part.node_id == node_id for part in ref.parts):
                    manifests.setdefault(position, []).append(ref.blob)
        wanted: list[tuple[BlobRef, Any]] = [(ref, Delta) for ref in deltas.values()]
        wanted += [(ref, Manifest) for refs in manifests.values() for ref in refs]
        wanted += [
            (manifest.blob, Manifest)
            for box, manifest in leaves
            if (node_id, box) not in self._tables
        ]
        self._objects.prefetch(wanted)
        layers = []
        for position in range(len(self.snapshot.deltas)):
            tables: list[ChunkTable] = []
            if position in digests:
                cut = digests[position].covered[node_id]
                tables += digests[position].tables.tables(node_id)
            elif position in covered:
                continue
            else:
                cut = self._cuts.get(position, {}).get(node_id)
            if position in deltas:
                delta = self._objects.load(deltas[position], Delta)
                tables += delta.embedded.tables(node_id)
            for blob in manifests.get(position, ()):
                tables += self._objects.load(blob, Manifest).tables(node_id)
            if cut is not None or tables:
                layers.append(Layer(cut, tuple(tables)))
        return layers


def _kind_of(ref: BlobRef) -> type[Delta | Digest]:
    return Digest if ref.key.startswith(DIGESTS) else Delta
