"""The chunk tables that a snapshot refers to: finding, fetching and merging those of a node.

A node's tables are in its *sources* (in the read list) and its *leaves* (in the base). They are
fetched in one parallel round. Live deltas are then merged into *overlays*, by the sequence that
they follow.

Invariants: a fetched object is compared once with what the snapshot says about it, before it is
used; decoded and merged tables are kept in the objects' cache while there is room, and are the same
for all views of the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from typing import Any, Final

import numpy as np

from zarr_manifests.engine.base_pages import BasePages
from zarr_manifests.engine.caches import DecodedCache
from zarr_manifests.engine.metadata import ObjectReader, Wanted
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import Base, Delta, Digest, Manifest, ManifestRef, Part, grouped
from zarr_manifests.format.records import MAX_NUMBER, BlobRef
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.leaves import BaseIndex, PlacedLeaf
from zarr_manifests.planning.live_deltas import (
    LiveSources,
    Stack,
    TablePlace,
    TableSource,
    Truncation,
)
from zarr_manifests.planning.merge import Layer, Overlay, merge_layers, pick, within

_FEW: Final = 8
_ANY_NODE: Final = b""
_BLOCKS: Final = 4
"""Number of blocks of a manifest that are fetched one by one before the whole is."""
_SHARE: Final = 4
"""A manifest that takes a larger share of the cache may not stay there, so only blocks are read."""
_MERGED_ROWS: Final = 1_000_000
"""Rows up to which what is pending in a box is not merged early."""


class SnapshotTables:
    """The chunk tables of a snapshot; base of `view.SnapshotView`, which has its attributes."""

    def __init__(
        self,
        objects: ObjectReader,
        ref: BlobRef,
        snapshot: Snapshot,
        base: Base,
        opening: Mapping[int, Delta | Digest],
    ) -> None:
        self.ref = ref
        self.snapshot = snapshot
        self.pages = BasePages(objects, base, snapshot.base)
        self.opening = opening  # by position in the read list
        self._objects = objects
        self._cuts: dict[int, Mapping[bytes, Coords]] = {}  # by position in the read list
        for position in sorted(opening):
            found = opening[position]
            if isinstance(found, Digest):
                self._cuts.update(enumerate(found.truncated, position))
            else:
                self._cuts[position] = found.truncated
        self._asked: dict[str, set[str]] = {}  # blocks asked for, by the key of their manifest
        self._index: BaseIndex | None = None
        self._listed: dict[bytes, dict[int, list[TableSource]]] | None = None
        self._live: dict[bytes, LiveSources] = {}  # by node, made when first asked for
        # Objects, by key, node and position in the read list, known to hold what this snapshot
        # says they do.
        self._checked: set[tuple[str, bytes, int]] = set()

    @property
    def snapshot_id(self) -> str:
        """The snapshot's id."""
        return snapshot_id_of(self.ref.key)

    @property
    def index(self) -> BaseIndex:
        """An index of the base's leaves; made on first use, and once for each base."""
        found = self._index
        if found is None:
            found = self._index = self.pages.index(0)
        return found

    def of_base[T](self, kind: type[T], make: Callable[[], T]) -> T:
        """A value that depends on the base alone, shared by all snapshots with that base.

        It is kept while there is room, and must not be changed.
        """
        base = self.snapshot.base
        return make() if base is None else self._objects.derived(base, kind, make)

    def _leaf(self, leaf: PlacedLeaf, loaded: Mapping[Any, Any]) -> ChunkTable:
        """The leaf's table; `loaded` may have what was loaded of its manifest."""
        return self._objects.table(leaf.manifest, leaf.part, loaded)

    @staticmethod
    def _due_leaves(leaves: Sequence[PlacedLeaf]) -> list[Wanted]:
        """What to load for the leaves."""
        return [(leaf.manifest, leaf.part) for leaf in leaves]

    def _due_of(self, ref: ManifestRef, part: Part) -> list[Wanted]:
        """What to load for one chunk of a table; of a manifest that was asked often, all of it."""
        block = self._objects.block_due(ref, part)
        if block is None:
            return [(ref, part)]
        asked = self._asked.setdefault(ref.blob.key, set())
        asked.add(block)
        stays = _SHARE * ref.blob.length <= self._objects.cache.max_size
        return [(ref.blob, Manifest)] if stays and len(asked) > _BLOCKS else [(ref, part)]

    def _known_overlay(self, node_id: bytes, after: int) -> Overlay | None:
        found: Overlay | None = self._objects.cache.find(self._overlay_name(node_id, after))
        return found

    def _overlay_name(self, node_id: bytes, after: int) -> tuple[Any, ...]:
        live = self._live.get(node_id) or self._sources(node_id)
        return *self._name("overlay", node_id), live.since(after)

    def _name(self, what: str, node_id: bytes) -> tuple[Any, ...]:
        return what, self.ref.key, self.ref.crc32c, node_id

    def _fetch(
        self, node_id: bytes, afters: Set[int], leaves: Sequence[Wanted] = ()
    ) -> tuple[dict[int, Overlay], dict[Any, Any]]:
        """Fetch in one round; return overlays by the sequence they follow, and objects by key.

        The objects include `leaves`, which `_due_leaves` has found.
        """
        known = {after: self._known_overlay(node_id, after) for after in afters}
        overlays = {after: overlay for after, overlay in known.items() if overlay is not None}
        if len(overlays) == len(known):
            return overlays, self._load((), leaves)
        cache, name = self._objects.cache, self._name("layers", node_id)
        layers: Sequence[tuple[int, Layer]] | None = cache.find(name)
        live = self._sources(node_id)
        sources = live.sources if layers is None else ()
        loaded = self._load(sources, leaves)
        is_one = layers is None and not self.index.may_be_merged(node_id, live.oldest, MAX_NUMBER)

        def merge(after: int) -> Overlay:
            nonlocal layers
            if layers is None:
                layers = self._layers(node_id, sources, loaded, keep=False)
                if not is_one:
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
        sources: Sequence[TableSource],
        leaves: Sequence[Wanted] = (),
        coords: IndexArray | None = None,
    ) -> tuple[dict[int, Overlay], dict[Any, Any]]:
        """Like `_fetch`, but only of these sources, and only of these chunks if any are given.

        If everything is in memory, everything is merged and kept instead.
        """
        live = self._sources(node_id)
        known = all(self._known_overlay(node_id, after) is not None for after in afters)
        if known or len(sources) == len(live.sources) or all(map(self._at_hand, live.sources)):
            return self._fetch(node_id, afters, leaves)
        loaded = self._load(sources, leaves)
        layers = self._layers(node_id, sources, loaded, coords, keep=True)
        return {
            after: self._merged([layer for last, layer in layers if last > after])
            for after in afters
        }, loaded

    def _load(self, sources: Sequence[TableSource], leaves: Sequence[Wanted]) -> dict[Any, Any]:
        """The objects by key; missing ones are fetched in one round."""
        due = [one for source in sources for one in self._due_source(source)]
        return self._objects.load_all([*due, *leaves])

    def _due_source(self, source: TableSource) -> list[Wanted]:
        """What to load for all tables of the node in a source."""
        if source.manifest is None:
            return [] if self._is_open(source) else [(source.blob, source.kind)]
        return [(source.manifest, part) for part in source.parts]

    def _due_places(self, places: Sequence[TablePlace]) -> list[Wanted]:
        """What to load for one chunk of these tables."""
        due: list[Wanted] = []
        for place in places:
            manifest = place.source.manifest
            if manifest is None:
                due += self._due_source(place.source)
            else:
                due += self._due_of(manifest, place.source.parts[place.number])
        return due

    def _at_hand(self, source: TableSource) -> bool:
        return all(self._objects.has(blob, kind) for blob, kind in self._due_source(source))

    def _is_asked_little(self, source: TableSource) -> bool:
        """Whether the source has several blocks, of which few were asked for."""
        few = len(self._asked.get(source.blob.key, ())) < _BLOCKS
        return few and source.manifest is not None and bool(source.manifest.places)

    def _is_open(self, source: TableSource) -> bool:
        """Whether it was fetched with the snapshot and lives as long as this view."""
        return type(self.opening.get(source.position)) is source.kind

    def _layers(
        self,
        node_id: bytes,
        sources: Sequence[TableSource],
        loaded: Mapping[Any, Any],
        coords: IndexArray | None = None,
        *,
        keep: bool,
    ) -> list[tuple[int, Layer]]:
        tables: dict[TableSource, list[ChunkTable]] = {}
        for source in sources:
            numbers = range(len(source.parts))
            found = [self._table(node_id, source, n, loaded, keep=keep) for n in numbers]
            tables[source] = found if coords is None else [pick(one, coords) for one in found]
        return self._sources(node_id).layers(tables)

    def stacks(
        self,
        node_id: bytes,
        boxes: Sequence[Box],
        narrow: Callable[[ChunkTable], ChunkTable],
        recent: DecodedCache,
        apart: Collection[int],
    ) -> list[Stack]:
        """What live deltas say of each box, with each table put through `narrow`.

        `apart` are the sequences up to which leaves of the node are merged. The objects are fetched
        in one round, and the tables decoded one after the other.
        """
        if not boxes:
            return []
        live = self._sources(node_id)
        stacks = [Stack(apart, _MERGED_ROWS) for _ in boxes]
        near = np.array([live.overlap(box) for box in boxes]).reshape(len(boxes), -1)
        due, steps = near.any(axis=0), list(live.in_order())
        places = [step for step in steps if isinstance(step, TablePlace)]
        wanted = {p.source: None for p, is_due in zip(places, due.tolist(), strict=True) if is_due}
        loaded = self._load(list(wanted), ())
        at = -1
        for step in steps:
            if isinstance(step, Truncation):
                for stack in stacks:
                    stack.add(step.last, Layer(step.shape, ()))
                continue
            at += 1
            if due[at]:
                place = node_id, step.source, step.number, loaded
                name = step.source.blob.key, node_id, step.number
                table = recent.obtain(name, partial(self._table, *place, keep=False))
                for i in np.flatnonzero(near[:, at]).tolist():
                    inner = narrow(within(table, boxes[i]))
                    stacks[i].add(step.source.last, Layer(None, (inner,)))
        return stacks

    def live_parts(self, node_id: bytes) -> list[Part]:
        """The node's tables in live deltas."""
        return [part for source in self._sources(node_id).sources for part in source.parts]

    def _table(
        self,
        node_id: bytes,
        source: TableSource,
        number: int,
        loaded: Mapping[Any, Any],
        *,
        keep: bool = True,
    ) -> ChunkTable:
        """The source's table of the node with that number.

        It stays in memory only if `keep` is set; a table that is about to be merged need not.
        """
        part = source.parts[number]
        if source.manifest is not None:
            return self._objects.table(source.manifest, part, loaded, keep=keep)
        found: Delta | Digest
        found = self.opening[source.position] if self._is_open(source) else loaded[source.blob.key]
        held = found.embedded if isinstance(found, Delta) else found.tables
        checked = source.blob.key, node_id, source.position
        if checked not in self._checked:
            if isinstance(found, Delta):
                self._check(found, source.position)
            if tuple(part for part, _ in held.of_node(node_id)) != source.parts:
                raise CorruptObjectError(
                    f"{source.blob.key} has no chunk tables such as the snapshot says it has"
                )
            self._checked.add(checked)
        return self._objects.table_in(source.blob, part, partial(held.data, part), keep=keep)

    def _check(self, delta: Delta, position: int) -> None:
        """Refuse a delta that differs from its entry; checked once, not for each node."""
        entry = self.snapshot.deltas[position]
        checked = entry.log.key, _ANY_NODE, position
        if checked not in self._checked:
            entry.check(delta)
            self._checked.add(checked)

    def _digests_of(self, node_id: bytes) -> dict[int, Digest]:
        """The digests that replace their runs for the node, by where they begin.

        Only if each leaf has all of such a run or nothing of it: a digest cannot tell its parts.
        """
        found = {}
        for entry in self.snapshot.digests:
            digest, run = self.opening[entry.first], self.snapshot.deltas[entry.first : entry.stop]
            if not isinstance(digest, Digest) or node_id not in digest.covered:
                continue
            if not self.index.may_be_merged(node_id, run[0].last, run[-1].last):
                found[entry.first] = digest
        return found

    def in_digest(self, node_id: bytes, position: int) -> bool:
        """Whether the node's part of the entry at that position came with the snapshot."""
        return any(
            first <= position < first + len(digest.truncated)
            for first, digest in self._digests_of(node_id).items()
        )

    def _sources(self, node_id: bytes) -> LiveSources:
        """The node's sources in the read list."""
        found = self._live.get(node_id)
        if found is None:
            found = self._live.setdefault(node_id, self._find_sources(node_id))
        return found

    def _find_sources(self, node_id: bytes) -> LiveSources:
        sources: list[TableSource] = []
        cuts: dict[int, Truncation] = {}
        digests = self._digests_of(node_id)
        covered = {at + i for at, digest in digests.items() for i in range(len(digest.truncated))}
        blobs = {entry.first: entry.blob for entry in self.snapshot.digests}
        listed = self._listed_for(node_id)
        for position, entry in enumerate(self.snapshot.deltas):
            cut = self._cuts.get(position, {}).get(node_id)
            if position in digests:
                cut = digests[position].covered[node_id]
                parts = tuple(part for part, _ in digests[position].tables.of_node(node_id))
                if parts:
                    blob = blobs[position]
                    sources.append(TableSource(position, entry.last, blob, Digest, parts))
            elif position in covered:
                continue
            else:
                sources += listed.get(position, ())
            if cut is not None:
                cuts[position] = Truncation(entry.last, cut)
        return LiveSources(sources, cuts)

    def _listed_for(self, node_id: bytes) -> Mapping[int, Sequence[TableSource]]:
        """The node's sources in entries of the read list, by position."""
        if self._listed is None and len(self._live) < _FEW:
            return self._list(node_id).get(node_id, {})  # cheaper for few nodes
        if self._listed is None:
            self._listed = self._list()
        return self._listed.get(node_id, {})

    def _list(self, only: bytes | None = None) -> dict[bytes, dict[int, list[TableSource]]]:
        """The sources in entries of the read list, by node and position; of one node or all."""
        found: dict[bytes, dict[int, list[TableSource]]] = {}
        for position, entry in enumerate(self.snapshot.deltas):
            objects: list[tuple[BlobRef, Any, Sequence[Part], ManifestRef | None]] = [
                (entry.log, Delta, entry.embedded, None),
                *((ref.blob, Manifest, ref.parts, ref) for ref in entry.manifests),
            ]
            for blob, kind, parts, manifest in objects:
                wanted = (part for part in parts if only is None or part.node_id == only)
                for node_id, of in grouped((part.node_id, part) for part in wanted).items():
                    source = TableSource(position, entry.last, blob, kind, tuple(of), manifest)
                    found.setdefault(node_id, {}).setdefault(position, []).append(source)
        return found
