"""What live deltas contain, box by box, in bounded memory.

The tables that overlap a box are decoded one after the other, and only their rows in the box stay.
So memory depends on the boxes that are asked for together, not on all that is pending.

Chunks in no leaf's box are determined once per `Heap`, region by region; their indexes are kept
packed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects.decoded_cache import DecodedCache
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.columns import decode_column, encode_column
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.metrics import Meter
from zarr_manifests.planning.layout.leaves import BaseIndex, Layout, batches
from zarr_manifests.planning.tables.live_deltas import Stack
from zarr_manifests.planning.tables.merge import bare, owned, select, split, take
from zarr_manifests.runtime import SYSTEM

BATCH_ROWS: Final = 1_000_000
"""Rows that are worked on at a time, about."""
_ROW_BYTES: Final = 56
"""A row of which no column is constant."""
_PIECE_ROWS: Final = 250_000
"""Rows whose coordinates are in memory at once: these take several times as much as the rows."""


class Outside:
    """Chunks of one node that are pending and in no leaf of the base.

    Parameters
    ----------
    tables : iterable of ChunkTable
        Tables of these chunks. One after the other, their chunks are in C order.

    Attributes
    ----------
    box : Box or None
        The smallest box around the chunks; None if there are none.
    held : list of (Box, int)
        Disjoint boxes, and how many of the chunks are in each.
    """

    def __init__(self, tables: Iterable[ChunkTable] = ()) -> None:
        self.held: list[tuple[Box, int]] = []
        self._parts: list[tuple[Box, Callable[[Box], IndexArray]]] = []
        for table in tables:
            box = Box.around_coords(table.coords())
            self.held.append((box, len(table)))
            self._parts.append((box, _kept(take(table, np.arange(len(table)), box))))
        self.box = Box.around(box for box, _ in self.held) if self.held else None

    def coords(self, box: Box) -> IndexArray:
        """Coordinates (int64[n, ndim]) of the chunks in the box, in C order."""
        found = [inner(box) for around, inner in self._parts if around.overlaps(box)]
        if len(found) == 1:
            return found[0]
        return np.concatenate([np.empty((0, box.ndim), np.int64), *found])

    def cells(self, layout: Layout) -> list[Coords]:
        """The first chunk in each cell of the layout that has some, in C order."""
        first: dict[Coords, Coords] = {}
        for box, inner in self._parts:
            coords = inner(box)
            for rows in layout.groups(coords):
                one = tuple(coords[rows[0]].tolist())
                cell = tuple(at // n for at, n in zip(one, layout.cell, strict=True))
                first.setdefault(cell, one)
        return sorted(first.values())


def _kept(table: ChunkTable) -> Callable[[Box], IndexArray]:
    """Finds coordinates of the table in a box; it holds linear indexes, packed to save memory."""
    box, count, packed = table.box, len(table), encode_column(table.linear_index())

    def coords(region: Box) -> IndexArray:
        shared = box.shared(region)
        linear = decode_column(packed, count)
        first = np.searchsorted(linear, box.ravel_one(shared.lo))
        last = box.ravel_one(tuple(n - 1 for n in shared.hi))
        found = box.unravel(linear[first : np.searchsorted(linear, last, "right")])
        return found[shared.holds(found)]

    return coords


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
    rows : int, optional
        Rows to work on at a time, about; by default `BATCH_ROWS`.

    Attributes
    ----------
    recent : DecodedCache
        The tables that were decoded last: each is needed a few times in a row, and there are more
        than the objects' cache has room for.
    """

    def __init__(
        self,
        view: SnapshotView,
        base: BaseIndex,
        outside: Collection[bytes],
        meter: Meter,
        rows: int | None = None,
    ) -> None:
        self.view, self.rows = view, rows or BATCH_ROWS
        room = CacheOptions(max_size=self.rows * _ROW_BYTES, expire_ms=0)
        self.recent = DecodedCache(room, SYSTEM, meter)
        self._meter = meter
        self.base, self._may = base, frozenset(outside)
        self._outside: dict[bytes, Outside] = {}
        self._apart: dict[bytes, set[int]] = {}

    def within(
        self, node_id: bytes, boxes: Sequence[Box], *, kinds_only: bool = False
    ) -> list[Stack]:
        """What is pending in each of the boxes, fetched in one round.

        With `kinds_only`, the refs only say whether they are set or unset.
        """
        narrow = bare if kinds_only else owned
        if node_id not in self._apart:
            self._apart[node_id] = {leaf.merged for leaf in self.base.placed(node_id)}
        stacks = self.view.stacks(node_id, boxes, narrow, self.recent, self._apart[node_id])
        if not kinds_only:  # their refs are merged later
            self._meter.add("refs_merged", sum(stack.rows for stack in stacks))
        return stacks

    def outside(self, node_id: bytes) -> Outside:
        """The node's pending chunks in no leaf of the base."""
        found = self._outside.get(node_id)
        if found is None:
            tables = self._tables_outside(node_id) if node_id in self._may else ()
            found = self._outside[node_id] = Outside(tables)
        return found

    def _tables_outside(self, node_id: bytes) -> Iterator[ChunkTable]:
        held = [(part.box, part.count) for part in self.view.live_parts(node_id) if part.count]
        for region in batches(held, 2 * self.rows):
            leaves = self.base.placed_in(node_id, region)
            if sum(leaf.part.box.shared_size(region) for leaf in leaves) >= region.size:
                continue
            (stack,) = self.within(node_id, [region], kinds_only=True)
            table = stack.after(0).table
            if table is None:
                continue
            for part in split(select(table, table.kind != RefKind.UNSET), _PIECE_ROWS):
                if leaves:
                    part = select(part, self.base.locate(node_id, part.coords()) < 0)
                if len(part):
                    yield part
