"""What live deltas contain, box by box.

The deltas' tables of a node are decoded once and merged only inside the requested box, so that only
the result is in memory besides them.

Chunks in no leaf's box are determined once per `Heap`, and removed from the list when leaves that
contain them are written. Invariant: chunks on the list are in no leaf, neither of the base nor of
those written since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.grid import Box, IndexArray, taken
from zarr_manifests.metrics import Meter
from zarr_manifests.planning.layout.leaves import BaseIndex
from zarr_manifests.planning.layout.packing import LEAF_ROWS
from zarr_manifests.planning.layout.splitting import Layout
from zarr_manifests.planning.tables.merge import (
    Layer,
    Overlay,
    bare,
    merge_layers,
    pick,
    select,
    within,
)

__all__ = ["Heap", "Outside"]


@dataclass(slots=True)
class Outside:
    """Chunks of one node that are pending and were in no leaf.

    Parameters
    ----------
    coords : int64[n, ndim]
        In C order.
    left : bool[n]
        Which of them are still in no leaf.
    chosen : int64[k] or None
        Rows of the chunks to merge, ascending; None for all.
    """

    coords: IndexArray
    left: npt.NDArray[np.bool_]
    chosen: IndexArray | None = field(default_factory=lambda: np.empty(0, np.int64))

    def choose(self, rows: IndexArray) -> IndexArray:
        """Choose these rows for merging; return their coordinates."""
        self.chosen = None if len(rows) == len(self.coords) else rows
        return self.coords if self.chosen is None else self.coords[rows]

    def take(self, numbers: IndexArray) -> IndexArray:
        """Remove the chosen rows with these numbers (ascending); return those that were left.

        Numbers beyond the chosen rows belong to something else and are ignored.
        """
        count = len(self.coords if self.chosen is None else self.chosen)
        rows = numbers[: numbers.searchsorted(count)]
        rows = rows if self.chosen is None else self.chosen[rows]
        rows = rows[self.left[rows]]
        self.left[rows] = False
        return rows

    def within(self, box: Box) -> IndexArray:
        """Rows of the chunks in the box that are left."""
        rows = slice(None)
        if box.ndim and len(self.coords):  # in C order, the first axis ascends
            rows = slice(*self.coords[:, 0].searchsorted((box.lo[0], box.hi[0])).tolist())
        found = np.flatnonzero(self.left[rows])
        if not len(found):
            return found
        found += rows.start or 0
        coords = self.coords[found]
        return found[((coords >= box.lo) & (coords < box.hi)).all(axis=1)]


class Heap:
    """What a snapshot's live deltas contain in addition to its base.

    Parameters
    ----------
    view : SnapshotView
        The snapshot.
    base : BaseIndex
        Its base.
    outside : collection of bytes
        Nodes that may have chunks outside all leaves.
    meter : Meter
        Counts the refs that are merged.
    """

    def __init__(
        self, view: SnapshotView, base: BaseIndex, outside: Collection[bytes], meter: Meter
    ) -> None:
        self.view = view
        self._meter = meter
        self._base, self._may = base, frozenset(outside)
        self._outside: dict[bytes, Outside] = {}
        # Of one node at a time: the cache has no room for more, and may have none for this.
        self._at_hand: tuple[bytes, Sequence[tuple[int, Layer]]] | None = None

    def _layers(self, node_id: bytes) -> Sequence[tuple[int, Layer]]:
        if self._at_hand is None or self._at_hand[0] != node_id:
            self._at_hand = None
            self._at_hand = node_id, self.view.layers(node_id)
        return self._at_hand[1]

    def over(self, node_id: bytes, box: Box, after: int = 0) -> Overlay:
        """The chunks in the box according to deltas newer than `after`."""
        layers = [
            Layer(layer.truncated, tuple(within(table, box) for table in layer.tables))
            for last, layer in self._layers(node_id)
            if last > after
        ]
        self._meter.add("refs_merged", sum(len(t) for layer in layers for t in layer.tables))
        return merge_layers(layers)

    def outside(self, node_id: bytes) -> Outside:
        """The node's pending chunks in no leaf of the base."""
        found = self._outside.get(node_id)
        if found is None:
            coords = self._coords_outside(node_id) if node_id in self._may else None
            if coords is None:
                coords = np.empty((0, 0), np.int64)
            found = self._outside[node_id] = Outside(coords, np.ones(len(coords), np.bool_))
        return found

    def _coords_outside(self, node_id: bytes) -> IndexArray | None:
        layers = [layer for _, layer in self._layers(node_id)]
        table = merge_layers(
            [Layer(layer.truncated, tuple(map(bare, layer.tables))) for layer in layers]
        ).table
        if table is None:
            return None
        coords = select(table, table.kind != RefKind.UNSET).coords()
        if self._base.ndim(node_id) is None:
            return coords
        return coords[self._base.locate(node_id, coords) < 0]

    def take(self, node_id: bytes, rows: IndexArray, layout: Layout) -> Iterator[ChunkTable]:
        """Remove chosen chunks, by their numbers; yield what is pending there."""
        outside = self.outside(node_id)
        for some in _stretches(layout, outside.coords, outside.take(rows)):
            yield self._pending_at(node_id, taken(outside.coords, some))

    def take_within(self, node_id: bytes, boxes: Iterable[Box]) -> list[ChunkTable]:
        """Remove the chunks in these boxes; return what is pending there."""
        outside, found = self.outside(node_id), []
        for box in boxes if outside.left.any() else ():
            rows = outside.within(box)
            if len(rows):
                outside.left[rows] = False
                found.append(self._pending_at(node_id, outside.coords[rows]))
        return found

    def _pending_at(self, node_id: bytes, coords: IndexArray) -> ChunkTable:
        """The pending refs at these coordinates; all of them are pending."""
        table = self.over(node_id, Box.around_coords(coords)).table
        assert table is not None
        table = select(table, table.kind != RefKind.UNSET)
        return table if len(table) == len(coords) else pick(table, coords)


def _stretches(layout: Layout, coords: IndexArray, rows: IndexArray) -> Iterator[IndexArray]:
    """The rows by cells of the layout; adjacent cells are combined while they fit into a leaf."""
    together: list[IndexArray] = []
    held = 0
    for group in layout.groups(taken(coords, rows)):
        if together and held + len(group) > LEAF_ROWS:
            yield _sorted(together)
            together, held = [], 0
        together.append(rows[group])
        held += len(group)
    if together:
        yield _sorted(together)


def _sorted(rows: list[IndexArray]) -> IndexArray:
    return rows[0] if len(rows) == 1 else np.sort(np.concatenate(rows))
