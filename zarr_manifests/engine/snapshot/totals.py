"""Totals: what a commit says of how much there is, and what a snapshot says of it to its readers.

A commit fetches nothing for it. It counts what it sets, and what it replaces as far as that can be
told for nothing: outside the boxes of all that is stored there is nothing; an array that is full
has every chunk; and what lies in memory or came with the snapshot is looked up. For the rest it
takes every chunk that is set for a new one, and none that is removed for one that was there; so
its numbers are at most so much, and say so. A compaction that merges all there is of an array
counts it anew.

Invariant: what is called exact is so for every reader of the snapshot, whatever was in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.objects.metadata import NotAtHandError
from zarr_manifests.engine.objects.spill import Rows, Spilled
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.counts import Count, Counted
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.index import LeafName
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.keys import absolute
from zarr_manifests.planning.layout.leaves import BaseIndex, PlacedLeaf
from zarr_manifests.planning.tables.merge import inside
from zarr_manifests.planning.tables.presence import kinds_at, within
from zarr_manifests.planning.tables.sums import (
    NOTHING,
    Tally,
    alive_tallies,
    base_tallies,
    difference,
    lay_over,
    sum_of,
    sums_of,
)
from zarr_manifests.reports import Amount, ArrayTotals, Totals

__all__ = [
    "Effect",
    "changes_of",
    "counts_of_base",
    "effect_of",
    "ref_counts",
    "sums_after",
    "tallies_of",
    "totals_of",
]

_LOOKED_THROUGH: Final = 16_384
"""Rows of deltas that are brought together to look a few chunks up; more for more chunks."""
_UNKNOWN: Final = -1
_UNSURE: Final = Tally(chunks_exact=False, nbytes_exact=False)
_NOT_TOLD: Final = (NotAtHandError, CorruptObjectError)  # whoever reads what is damaged is told


class _BaseTallies(dict[bytes, Tally]):
    """What a base says of each node; there may be thousands, and each commit asks."""


def tallies_of(view: SnapshotView, *, stop: int | None = None) -> dict[bytes, Tally]:
    """What there is of each node, by what the base and the read list say; nothing is fetched.

    With `stop`, before the entry at that position of the read list.
    """
    entries, counts = view.snapshot.deltas[:stop], view.counts
    if counts is None:
        return _tallies_over(view, counts, view.manifests, view.base_sequence, entries)
    base = view.of_base(_BaseTallies, lambda: _BaseTallies(base_tallies(counts, ())))
    return _laid_over(view, dict(base), view.base_sequence, entries)


def changes_of(view: SnapshotView) -> dict[bytes, Tally]:
    """How much more there is of each node than in the snapshot before; nothing is fetched."""
    snapshot = view.snapshot
    if not snapshot.deltas or snapshot.deltas[-1].log.key != snapshot.log.key:
        return {}  # it has changed no data
    own = snapshot.deltas[-1]
    if own.counts is None:
        found: dict[bytes, Tally] = {}
        lay_over(found, own, view.touched())
        return found
    before, after = tallies_of(view, stop=-1), tallies_of(view)
    return {
        count.node_id: difference(
            before.get(count.node_id, NOTHING), after.get(count.node_id, NOTHING), count
        )
        for count in own.counts
    }


def _tallies_over(
    view: SnapshotView,
    counts: Sequence[Count] | None,
    manifests: Iterable[ManifestRef],
    base_sequence: int,
    entries: Sequence[DeltaEntry],
) -> dict[bytes, Tally]:
    """The same for another base and read list of the snapshot."""
    parts: list[Part] = []
    if counts is None:  # what it has not counted may also be in what is older
        parts += [part for ref in manifests for part in ref.parts]
        older = [entry for entry in entries if entry.first <= base_sequence]
        parts += [part for entry in older for part in entry.parts()]
    return _laid_over(view, base_tallies(counts, parts), base_sequence, entries)


def _laid_over(
    view: SnapshotView,
    found: dict[bytes, Tally],
    base_sequence: int,
    entries: Sequence[DeltaEntry],
) -> dict[bytes, Tally]:
    for entry in entries:
        if entry.last > base_sequence:
            lay_over(found, entry, () if entry.counts is not None else view.touched())
    return found


def ref_counts(
    view: SnapshotView, base: BaseIndex, pending: Mapping[bytes, int]
) -> tuple[dict[bytes, int], set[bytes]]:
    """Chunks of each array and opaque entry, and of which of them these are only bounds.

    `pending` has the number of rows that live deltas have for a node.
    """
    tallies, refs, bounds = tallies_of(view), dict[bytes, int](), set[bytes]()
    for node in view.nodes.values():
        if node.kind is NodeKind.GROUP:
            continue
        tally = tallies.get(node.node_id, NOTHING)
        refs[node.node_id] = tally.chunks
        if not tally.chunks_exact:
            most = base.refs(node.node_id) + pending.get(node.node_id, 0)
            refs[node.node_id] = min(tally.chunks, most)
            bounds.add(node.node_id)
    return refs, bounds


def counts_of_base(
    view: SnapshotView, base: BaseIndex, settled: Set[bytes], stored: Mapping[LeafName, int]
) -> tuple[Count, ...] | None:
    """The counts of a base that is made of the snapshot; None if they are not known.

    Parameters
    ----------
    settled : set of bytes
        Nodes whose chunks are all in leaves, and all that is in these is theirs.
    stored : mapping of LeafName to int
        Bytes of the chunks of leaves, as far as known.
    """
    found = []
    tallies = tallies_of(view)
    for node in view.nodes.values():
        tally = tallies.get(node.node_id, NOTHING)
        if node.node_id in settled:
            leaves = [_name(leaf) for leaf in base.placed(node.node_id)]
            if all(name in stored for name in leaves):
                tally = Tally(nbytes=sum(stored[name] for name in leaves))
            tally = replace(tally, chunks=base.refs(node.node_id), chunks_exact=True)
        if tally.nbytes is None:
            return None
        if tally != NOTHING:
            found.append(tally.count(node.node_id))
    return tuple(found)


def _name(leaf: PlacedLeaf) -> LeafName:
    blob = leaf.manifest.blob
    return leaf.part.node_id, leaf.part.box, blob.key, blob.crc32c


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """What a commit does to how much there is.

    Parameters
    ----------
    counts : tuple of Count
        By how much it changes each node's chunks. It is so on any later snapshot, too, if the
        commits between have not touched the same chunks, nor any node.
    view : SnapshotView
        What it was found out on.
    before : mapping of bytes to Tally
        What there is of each node there.
    """

    counts: tuple[Count, ...]
    view: SnapshotView
    before: Mapping[bytes, Tally]

    def sums(self, parent: SnapshotView, entry: DeltaEntry, delta: Delta) -> dict[str, int]:
        """All there is after the commit on `parent`, which has this entry with the counts."""
        tallies = dict(self.before) if parent is self.view else tallies_of(parent)
        lay_over(tallies, entry)
        return sums_of(tallies, _nodes_after(parent, delta).values())


def effect_of(
    delta: Delta,
    tables: Mapping[bytes, Sequence[Rows]],
    view: SnapshotView,
    fetch: Callable[[Rows], ChunkTable],
) -> Effect:
    """What a commit with this delta does on top of the view.

    `tables` are the delta's; `fetch` gives those that are not in memory.
    """
    tallies = tallies_of(view)
    counter = _Counter(view, tallies, fetch)
    return Effect(counter.counts(delta, tables, _nodes_after(view, delta).values()), view, tallies)


def _nodes_after(view: SnapshotView, delta: Delta) -> Mapping[str, Node]:
    if not (delta.nodes or delta.deleted):
        return view.nodes
    after = {path: node for path, node in view.nodes.items() if path not in delta.deleted}
    return after | {node.path: node for node in delta.nodes}


def sums_after(
    view: SnapshotView,
    base: tuple[Sequence[Count] | None, Sequence[ManifestRef], int],
    entries: Sequence[DeltaEntry],
) -> dict[str, int]:
    """All there is, by another base (counts, directory, sequence) and read list of the snapshot."""
    return sums_of(_tallies_over(view, *base, entries), view.nodes.values())


class _Counter:
    """Counts what one commit on top of a snapshot changes."""

    def __init__(
        self,
        view: SnapshotView,
        tallies: Mapping[bytes, Tally],
        fetch: Callable[[Rows], ChunkTable],
    ) -> None:
        self._view = view
        self._fetch = fetch
        self._at_hand = view.at_hand()
        self._tallies = tallies
        self._nodes = view.by_id
        self._boxes: dict[bytes, list[tuple[Box, int]]] = {}

    def counts(
        self,
        delta: Delta,
        tables: Mapping[bytes, Sequence[Rows]],
        nodes: Iterable[Node],
    ) -> tuple[Count, ...]:
        """By how much the delta, whose chunk tables these are, changes each node's chunks.

        `nodes` are all there are afterwards.
        """
        touched = dict.fromkeys((*tables, *delta.truncated))
        for node in delta.nodes:
            if node.node_id not in self._nodes and node.node_id in self._tallies:
                touched[node.node_id] = None  # it was there once, and comes back
        for entry in self._view.snapshot.deltas:
            for part in entry.parts():
                if part.node_id in touched:
                    self._boxes.setdefault(part.node_id, []).append((part.box, part.count))
        found = {
            node_id: self._change(node_id, delta.truncated.get(node_id), tables.get(node_id, ()))
            for node_id in touched
        }
        if delta.nodes or delta.deleted:
            for node_id in self._nodes.keys() - {node.node_id for node in nodes}:
                if node_id in self._tallies:
                    found[node_id] = Count(node_id, 0, 0, Counted.WHOLE)
        return tuple(c for c in found.values() if c.chunks or c.nbytes or c.counted)

    def _change(self, node_id: bytes, cut: Coords | None, tables: Sequence[Rows]) -> Count:
        dead = node_id not in self._nodes
        whole = dead or (cut is not None and self._cuts_all(node_id, cut))
        change = NOTHING if cut is None or whole else self._lost(node_id, cut)
        resident = [rows for rows in tables if isinstance(rows, ChunkTable)]
        if resident:
            change = change.plus(self._laid_over(node_id, cut, _Rows(resident), new=whole))
        boxes = () if whole else self._all_boxes(node_id)
        for rows in tables:
            if not isinstance(rows, Spilled):
                continue
            if any(box.overlaps(rows.box) for box in boxes):
                one = _Rows([self._fetch(rows)])
                change = change.plus(self._laid_over(node_id, cut, one, new=False))
            else:
                change = change.plus(Tally(len(rows) - rows.unset, rows.nbytes))
        return change.count(node_id, Counted.WHOLE if whole else Counted.EXACT)

    def _laid_over(self, node_id: bytes, cut: Coords | None, rows: _Rows, *, new: bool) -> Tally:
        """How many more chunks there are by these rows; `new` says that there were none before."""
        if new:
            return Tally(*rows.all_new())
        return rows.laid_over(*self._before(node_id, rows.coords, cut))

    def _cuts_all(self, node_id: bytes, cut: Coords) -> bool:
        """Whether nothing that is stored lies inside the cut."""
        if 0 in cut:
            return True
        kept = Box((0,) * len(cut), cut)
        return not any(kept.overlaps(box) for box in self._all_boxes(node_id))

    def _lost(self, node_id: bytes, cut: Coords) -> Tally:
        """What the truncation takes away, as a change."""
        if self._lies_in(node_id, cut):
            return NOTHING
        rows = sum(count for _, count in self._boxes.get(node_id, ()))
        if rows + self._view.index.refs(node_id) <= _LOOKED_THROUGH:
            try:
                table = self._at_hand.chunks(node_id)
            except _NOT_TOLD:
                return _UNSURE
            if table is None:
                return NOTHING
            gone = ~inside(table.coords(), cut)
            return Tally(-int(gone.sum()), -int(table.length[gone].sum()))
        return _UNSURE

    def _before(
        self, node_id: bytes, coords: IndexArray, cut: Coords | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of each chunk, whether it was there (0, 1, -1: not known) and how long it was (or -1)."""
        there, lengths = np.zeros(len(coords), np.int64), np.zeros(len(coords), np.int64)
        if not len(coords):
            return there, lengths
        around = Box.around_coords(coords)
        over = [box for box, _ in self._boxes.get(node_id, ()) if box.overlaps(around)]
        near = self._near(node_id, coords, over)
        if cut is not None:
            near &= inside(coords, cut)
        due = coords[near]
        if not len(due):
            return there, lengths
        there[near] = 1 if self._is_full(node_id) else _UNKNOWN
        lengths[near] = _UNKNOWN
        rows = sum(count for _, count in self._boxes.get(node_id, ()))
        if rows > _LOOKED_THROUGH + 4 * len(due):
            return there, lengths
        if not over and not self._at_hand.has_leaves(node_id, around):
            return there, lengths  # what most overwrites come to, found out at once
        try:
            table = self._at_hand.chunks_at(node_id, due)
        except _NOT_TOLD:
            return there, lengths
        there[near], lengths[near] = _looked_up(table, due)
        return there, lengths

    def _near(
        self, node_id: bytes, coords: IndexArray, over: Sequence[Box]
    ) -> npt.NDArray[np.bool_]:
        """Which of the coordinates lie in a leaf's box, or in one of these of live deltas."""
        near = self._view.index.locate(node_id, coords) >= 0
        for box in over:
            rest = np.flatnonzero(~near)
            near[rest] = within(box, coords[rest])
        return near

    def _is_full(self, node_id: bytes) -> bool:
        """Whether the array has each of its chunks."""
        tally, meta = self._tallies.get(node_id, NOTHING), self._nodes[node_id].array
        grid = Box((), ()) if meta is None else meta.grid
        if not tally.chunks_exact or tally.chunks != grid.size:
            return False
        return self._lies_in(node_id, grid.hi)  # else some that were counted may not be its own

    def _lies_in(self, node_id: bytes, shape: Coords) -> bool:
        """Whether all that is stored lies below `shape`."""
        boxes = self._all_boxes(node_id)
        return all(n <= at for box in boxes for n, at in zip(box.hi, shape, strict=True))

    def _all_boxes(self, node_id: bytes) -> list[Box]:
        """Boxes that hold all that is stored of the node."""
        around = self._view.index.around(node_id)
        boxes = [box for box, _ in self._boxes.get(node_id, ())]
        return boxes if around is None else [*boxes, around]


def _joined(arrays: Sequence[IndexArray]) -> IndexArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class _Rows:
    """Chunks of one node that a commit sets and unsets; no two are the same."""

    def __init__(self, tables: Sequence[ChunkTable]) -> None:
        each = [table for table in tables if len(table)] or list(tables[:1])
        self.coords = _joined([table.coords() for table in each])
        self.set = _joined([table.kind for table in each]) != RefKind.UNSET
        self.length = _joined([table.length for table in each])

    def all_new(self) -> tuple[int, int]:
        """Chunks and bytes, if there was nothing before."""
        return int(self.set.sum()), int(self.length[self.set].sum())

    def laid_over(self, there: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Tally:
        """How many more chunks and bytes there are, by what was there, as `_before` says it."""
        known = there != _UNKNOWN
        old = int((there == 1).sum())
        chunks = int(self.set.sum()) - old
        told = lengths != _UNKNOWN
        nbytes = int(self.length[self.set].sum()) - int(lengths[told].sum())
        return Tally(chunks, nbytes, bool(known.all()), bool(told.all()))


def _looked_up(
    table: ChunkTable | None, coords: IndexArray
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Whether the table has each of the coordinates, and the lengths."""
    there, lengths = np.zeros(len(coords), np.int64), np.zeros(len(coords), np.int64)
    if table is None:
        return there, lengths
    there[kinds_at(table, coords) > RefKind.UNSET] = 1
    linear = table.box.ravel(coords[there == 1])
    rows = linear if table.index is None else np.searchsorted(table.index, linear)
    lengths[there == 1] = table.length[rows]
    return there, lengths


def totals_of(view: SnapshotView) -> Totals:
    """The chunks and bytes of every array, as the snapshot counts them; nothing is fetched."""
    totals, changes = tallies_of(view), changes_of(view)
    ids = {path: node.node_id for path, node in view.nodes.items()}
    alive = alive_tallies(totals, view.nodes.values())
    arrays = []
    for path, total in sorted(alive.items()):
        # It cannot be more by more than there is.
        delta = changes.get(ids[path], NOTHING).within(total.chunks)
        arrays.append(ArrayTotals(absolute(path), Amount.of(total), Amount.of(delta)))
    return Totals(
        view.snapshot_id,
        tuple(sorted(arrays, key=lambda array: array.path)),
        Amount.of(sum_of(alive.values())),
        Amount.of(sum_of(changes.values())),
    )
