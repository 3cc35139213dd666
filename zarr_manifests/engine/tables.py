"""The chunk tables that a snapshot refers to: finding, fetching and merging those of a node.

A node's tables are in its *sources* (in the read list) and its *leaves* (in the base). They are
fetched in one parallel round. Each table is narrowed to the chunks that are asked for before it is
merged with others.

Invariants: a fetched object is compared once with what the snapshot says about it, before it is
used; decoded tables are kept in the objects' cache while there is room, and are the same for all
views of the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from zarr_manifests.engine.base_pages import BasePages
from zarr_manifests.engine.metadata import ObjectReader, Wanted
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import Base, Delta, ManifestRef, Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.leaves import BaseIndex, PlacedLeaf
from zarr_manifests.planning.live_deltas import (
    LiveTable,
    LiveTables,
    Stack,
    Truncation,
)
from zarr_manifests.planning.merge import Layer, Overlay, cut_off, fold, select


class Asked(NamedTuple):
    """Chunks of a node that are asked for.

    Attributes
    ----------
    narrow : callable
        Leaves only the rows of these chunks in a table.
    box : Box or None
        A box around them; None for all chunks.
    leaves : sequence of PlacedLeaf
        The leaves with any of them.
    """

    narrow: Callable[[ChunkTable], ChunkTable]
    box: Box | None
    leaves: Sequence[PlacedLeaf] = ()


class SnapshotTables:
    """The chunk tables of a snapshot; base of `view.SnapshotView`, which has its attributes."""

    def __init__(
        self,
        objects: ObjectReader,
        ref: BlobRef,
        snapshot: Snapshot,
        base: Base,
        opening: Mapping[int, Delta],
    ) -> None:
        self.ref = ref
        self.snapshot = snapshot
        self.pages = BasePages(objects, base, snapshot.base)
        self.opening = opening  # by position in the read list
        self._objects = objects
        self._index: BaseIndex | None = None
        self._listed: dict[bytes, list[LiveTable]] | None = None
        self._live: dict[bytes, LiveTables] = {}  # by node, made when first asked for
        # Positions of deltas that are known to hold what this snapshot says they do.
        self._checked: set[int] = set()

    @property
    def snapshot_id(self) -> str:
        """The snapshot's id."""
        return snapshot_id_of(self.ref.key)

    @property
    def index(self) -> BaseIndex:
        """An index of the base's leaves; made on first use, and once for each base."""
        found = self._index
        if found is None:
            found = self._index = self.pages.page(0).index
        return found

    def _overlays(
        self,
        node_id: bytes,
        tables: Collection[LiveTable],
        asked: Sequence[Asked],
        loaded: Mapping[Any, Any],
        *,
        after: int = 0,
        merged: int = 0,
    ) -> list[Overlay]:
        """What these tables say of each that is asked for, in what was loaded.

        Truncations up to the sequence `after` are left out, and rows that a leaf of the base has;
        `merged` is the greatest sequence that one of these is merged to.
        """
        wanted, stacks = set(tables), [Stack() for _ in asked]
        for step in self._live_of(node_id).in_order():
            if isinstance(step, Truncation):
                for stack in stacks if step.last > after else ():
                    stack.add(Layer(step.shape, ()))
            elif step in wanted:
                table = self._table(step, loaded)
                for one, stack in zip(asked, stacks, strict=True):
                    if one.box is None or one.box.overlaps(table.box):
                        rows = one.narrow(table)
                        if step.last <= merged:
                            old = self.index.merged_at(node_id, rows.coords())
                            rows = select(rows, old < step.last)
                        stack.add(Layer(None, (rows,)))
        self._objects.meter.add("refs_merged", sum(stack.rows for stack in stacks))
        return [stacks.pop(0).overlay() for _ in asked]  # they take memory

    def _resolved(
        self, node_id: bytes, tables: Collection[LiveTable], asked: Sequence[Asked]
    ) -> list[ChunkTable | None]:
        """The chunks that exist, of each that are asked for; `tables` may have changed them.

        Of the rows for a chunk the newest counts. A leaf is as new as what is merged into it, and
        newer truncations apply to it.
        """
        leaves = [*{id(leaf): leaf for one in asked for leaf in one.leaves}.values()]
        loaded = self._load([*tables, *leaves])
        merged = max((leaf.merged for leaf in leaves), default=0)
        overlays = self._overlays(node_id, tables, asked, loaded, merged=merged)
        cuts = self._live_of(node_id).cuts

        def rows(leaf: PlacedLeaf, one: Asked) -> ChunkTable:
            table = one.narrow(self._table(leaf, loaded))
            for cut in cuts:
                table = cut_off(table, cut.shape) if cut.last > leaf.merged else table
            return table

        return [
            fold([rows(leaf, one) for leaf in one.leaves], Overlay(None, over.table))
            for one, over in zip(asked, overlays, strict=True)
        ]

    def _load(self, tables: Iterable[LiveTable | PlacedLeaf]) -> dict[Any, Any]:
        """What has these tables; what is missing is fetched in one round."""
        return self._objects.load_all(self._due(tables))

    def _due(self, tables: Iterable[LiveTable | PlacedLeaf]) -> list[Wanted]:
        """What to load for these tables."""
        due: list[Wanted] = []
        for table in tables:
            if table.manifest is not None:
                due.append((table.manifest, table.part))
            elif table.position not in self.opening:
                due.append((table.blob, Delta))
        return due

    def live_parts(self, node_id: bytes) -> list[Part]:
        """The node's tables in live deltas."""
        return [table.part for table in self._live_of(node_id).tables]

    def _table(self, table: LiveTable | PlacedLeaf, loaded: Mapping[Any, Any]) -> ChunkTable:
        """The table itself, from what was loaded, as far as that has it."""
        if table.manifest is not None:
            return self._objects.table(table.manifest, table.part, loaded)
        found: Delta | None = self.opening.get(table.position)
        if found is None:
            found = loaded.get(table.blob.key) or self._objects.load(table.blob, Delta)
            if table.position not in self._checked:
                self.snapshot.deltas[table.position].check(found)
                self._checked.add(table.position)
        return self._objects.table_in(
            table.blob, table.part, partial(found.embedded.data, table.part)
        )

    def _live_of(self, node_id: bytes) -> LiveTables:
        """The node's tables in the read list."""
        found = self._live.get(node_id)
        if found is None:
            if self._listed is None:
                self._listed = self._list()
            deltas, opened = self.snapshot.deltas, self.opening.items()
            cuts = {
                at: Truncation(deltas[at].last, delta.truncated[node_id])
                for at, delta in opened
                if node_id in delta.truncated
            }
            new = LiveTables(self._listed.get(node_id, ()), cuts)
            found = self._live.setdefault(node_id, new)
        return found

    def _list(self) -> dict[bytes, list[LiveTable]]:
        """The tables in entries of the read list, by node."""
        found: dict[bytes, list[LiveTable]] = {}
        for position, entry in enumerate(self.snapshot.deltas):
            objects: list[tuple[BlobRef, Sequence[Part], ManifestRef | None]] = [
                (entry.log, entry.embedded, None),
                *((ref.blob, ref.parts, ref) for ref in entry.manifests),
            ]
            for blob, parts, manifest in objects:
                for part in parts:
                    table = LiveTable(position, entry.last, blob, part, manifest)
                    found.setdefault(part.node_id, []).append(table)
        return found
