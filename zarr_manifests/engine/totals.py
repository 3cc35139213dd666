"""Totals: how a commit changes the number of chunks and bytes, and what a snapshot says about them.

A commit fetches nothing for that. It counts the chunks it sets, and the chunks it replaces as far
as known without a fetch: outside the boxes of everything stored there are none; an array that is
full has every chunk; tables in memory or fetched with the snapshot are looked up. Otherwise it
assumes that every chunk it sets is new, and that a chunk it removes did not exist. The numbers are
then marked as upper bounds. A compaction that merges everything of an array counts it anew.

A commit adds the difference of the nodes it touches to the sums of the snapshot before, and reads
the pages of these nodes only.

Invariant: a number marked exact is exact for every reader of the snapshot, whatever was in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.engine.change_set import Rows, Spilled, rows_of
from zarr_manifests.engine.objects import NotAtHandError, ObjectReader
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.manifest import Count, Counted, Delta, Node, NodeKind
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.grid import Box, Coords
from zarr_manifests.keys import absolute
from zarr_manifests.planning.leaves import ArrayFacts, NodeFacts
from zarr_manifests.planning.merge import inside, rows_at
from zarr_manifests.planning.tables import (
    NOTHING,
    Amount,
    BaseIndex,
    alive_amounts,
    changed_sums,
    difference,
    lay_over,
    lies_in,
    sum_of,
    sums_of,
)

if TYPE_CHECKING:
    from zarr_manifests.reports import Usage

_UNKNOWN: Final = -1
_UNSURE: Final = Amount(chunks_exact=False, nbytes_exact=False)


def amounts_of(view: SnapshotView, *, stop: int | None = None) -> dict[bytes, Amount]:
    """The amounts of all nodes, by the base and the read list; fetches nothing.

    With `stop`, only up to the entry at that position of the read list, exclusive.
    """
    return _laid_over(view.pages.counts(), view.base_sequence, view.snapshot.deltas[:stop])


def changes_of(view: SnapshotView) -> dict[bytes, Amount]:
    """How much each node's amount grows from the snapshot before; fetches nothing."""
    snapshot = view.snapshot
    if not snapshot.deltas or snapshot.deltas[-1].log.key != snapshot.log.key:
        return {}  # it has changed no data
    own = snapshot.deltas[-1]
    before, after = amounts_of(view, stop=-1), amounts_of(view)
    return {
        count.node_id: difference(
            before.get(count.node_id, NOTHING), after.get(count.node_id, NOTHING), count
        )
        for count in own.counts
    }


def _laid_over(
    counts: Iterable[Count], base_sequence: int, entries: Sequence[DeltaEntry]
) -> dict[bytes, Amount]:
    """The amounts that a base has counted, with those of later entries laid over them."""
    found = {count.node_id: Amount.from_count(count) for count in counts}
    for entry in entries:
        if entry.last > base_sequence:
            lay_over(found, entry)
    return found


def pending_rows(view: SnapshotView) -> dict[bytes, int]:
    """The number of rows that live deltas have for each node."""
    rows: dict[bytes, int] = {}
    for entry in view.snapshot.deltas:
        for part in entry.parts():
            rows[part.node_id] = rows.get(part.node_id, 0) + part.count
    return rows


def node_facts(view: SnapshotView, base: BaseIndex) -> NodeFacts:
    """Arrays and opaque entries with their chunks, or the upper bound where only that is known."""
    amounts, pending = amounts_of(view), pending_rows(view)
    facts: dict[bytes, ArrayFacts] = {}
    for node in view.nodes.values():
        if node.kind is NodeKind.GROUP:
            continue
        node_id = node.node_id
        amount = amounts.get(node_id, NOTHING)
        refs = amount.chunks
        if not amount.chunks_exact:
            most = base.refs(node_id) + pending.get(node_id, 0)
            refs = min(refs, most)
        facts[node_id] = ArrayFacts.of(node, refs)
    return facts


def counts_of_base(view: SnapshotView, base: BaseIndex, settled: Set[bytes]) -> tuple[Count, ...]:
    """The counts of a new base of the snapshot.

    Parameters
    ----------
    settled : set of bytes
        Nodes whose chunks are all in leaves, which have no other chunks.
    """
    found = []
    amounts = amounts_of(view)
    for node in view.nodes.values():
        amount = amounts.get(node.node_id, NOTHING)
        if node.node_id in settled:
            leaves = base.placed(node.node_id)
            if not leaves:
                continue  # as of most arrays when many were just made
            amount = Amount(base.refs(node.node_id), sum(leaf.nbytes for leaf in leaves))
        if amount != NOTHING:
            found.append(amount.to_count(node.node_id))
    return tuple(found)


class Effect(Struct, frozen=True, eq=False):
    """How a commit changes the numbers of chunks and bytes.

    Parameters
    ----------
    counts : tuple of Count
        The change of each node's numbers. It also holds on any later snapshot, if the commits in
        between have not touched the same chunks, nor any node.
    paths : collection of str
        The paths of the nodes that the commit touches, on the snapshot it was computed on.
    """

    counts: tuple[Count, ...]
    paths: Collection[str]

    def sums(self, parent: SnapshotView, entry: DeltaEntry, delta: Delta) -> dict[str, int]:
        """The sums after the commit on `parent`; `entry` is the commit's, with the counts."""
        before, after = _touched(parent, delta, {c.node_id for c in self.counts}, self.paths)
        amounts = _amounts_among(parent, before.values())
        known, gone = parent.snapshot.sums, sums_of(amounts, before.values())
        lay_over(amounts, entry)
        new = sums_of(amounts, after.values())
        if "arrays" not in known or (parent.pages.is_inline and gone.keys() != new.keys()):
            # The last bound may have gone, and the counts of all nodes are here.
            others = [node for path, node in parent.nodes.items() if path not in before]
            known, gone = sums_of(amounts_of(parent), others), sums_of({}, ())
        return changed_sums(known, gone, new)


def _touched(
    view: SnapshotView, delta: Delta, node_ids: Iterable[bytes], paths: Iterable[str] = ()
) -> tuple[dict[str, Node], dict[str, Node]]:
    """Nodes by path before and after a commit: at least those that it touches.

    These are those that the delta names, and those with these ids, which may be at these paths.
    """
    named = {*paths, *delta.deleted, *(node.path for node in delta.nodes)}
    before = {path: node for path in sorted(named) if (node := view.nodes.get(path)) is not None}
    # A node that the delta makes is new unless it was at one of these paths.
    known = {node.node_id for node in (*before.values(), *delta.nodes)}
    for node_id in sorted({*node_ids} - known):
        node = view.by_id.get(node_id)
        if node is not None:
            before[node.path] = node
    after = {path: node for path, node in before.items() if path not in delta.deleted}
    return before, after | {node.path: node for node in delta.nodes}


def _amounts_among(view: SnapshotView, nodes: Iterable[Node]) -> dict[bytes, Amount]:
    """The amounts of these nodes, and of others; loads the pages of no others."""
    counts = view.counts_among(node.node_id for node in nodes)
    return _laid_over(counts, view.base_sequence, view.snapshot.deltas)


def effect_of(
    delta: Delta, tables: Mapping[bytes, Sequence[Rows]], view: SnapshotView, objects: ObjectReader
) -> Effect:
    """How a commit with this delta changes the numbers of the view.

    `tables` are the delta's; those that are not in memory are among the objects.
    """
    before, after = _touched(view, delta, {*tables, *delta.truncated})
    amounts = _amounts_among(view, before.values())
    nodes = {node.node_id: node for node in before.values()}
    counts = _Counter(view, nodes, amounts, objects).counts(delta, tables, after.values())
    return Effect(counts, before.keys())


def sums_after(
    view: SnapshotView, counts: Iterable[Count], sequence: int, entries: Sequence[DeltaEntry]
) -> dict[str, int]:
    """The sums for another base (counts and sequence) and read list of the snapshot."""
    return sums_of(_laid_over(counts, sequence, entries), view.nodes.values())


class _Counter(Struct):
    """Computes what a commit on top of a snapshot changes."""

    view: SnapshotView
    nodes: Mapping[bytes, Node]
    amounts: Mapping[bytes, Amount]
    objects: ObjectReader
    boxes: dict[bytes, list[Box]] = {}

    def counts(
        self, delta: Delta, tables: Mapping[bytes, Sequence[Rows]], nodes: Iterable[Node]
    ) -> tuple[Count, ...]:
        """How the delta with these chunk tables changes each node's chunks.

        `nodes` are the nodes afterwards.
        """
        touched = dict.fromkeys((*tables, *delta.truncated))
        for node in delta.nodes:
            if node.node_id not in self.nodes and node.node_id in self.amounts:
                touched[node.node_id] = None  # it was there once, and comes back
        for entry in self.view.snapshot.deltas:
            for part in entry.parts():
                if part.node_id in touched:
                    self.boxes.setdefault(part.node_id, []).append(part.box)
        found = {
            node_id: self._change(node_id, delta.truncated.get(node_id), tables.get(node_id, ()))
            for node_id in touched
        }
        if delta.nodes or delta.deleted:
            for node_id in self.nodes.keys() - {node.node_id for node in nodes}:
                if node_id in self.amounts:
                    found[node_id] = Count(node_id, 0, 0, Counted.WHOLE)
        return tuple(c for c in found.values() if c.chunks or c.nbytes or c.counted)

    def _change(self, node_id: bytes, cut: Coords | None, tables: Sequence[Rows]) -> Count:
        boxes = self._all_boxes(node_id)
        dead = node_id not in self.nodes
        if cut is not None:
            kept = Box((0,) * len(cut), cut)
            dead = dead or not any(kept.overlaps(box) for box in boxes)
        change = NOTHING if cut is None or dead or self._lies_in(node_id, cut) else _UNSURE
        for rows in tables:
            if not dead and any(box.overlaps(rows.box) for box in boxes):
                change += self._laid_over(node_id, cut, rows_of(self.objects, rows))
            elif isinstance(rows, Spilled):
                change += Amount(len(rows) - rows.unset, rows.nbytes)
            else:
                change += amount_of(rows)
        return change.to_count(node_id, Counted.WHOLE if dead else Counted.EXACT)

    def _laid_over(self, node_id: bytes, cut: Coords | None, table: ChunkTable) -> Amount:
        """How many chunks and bytes this table adds to those that are there."""
        there, lengths = self._before(node_id, table, cut)
        told, new = lengths != _UNKNOWN, amount_of(table)
        return Amount(
            new.chunks - int((there == 1).sum()),
            new.nbytes - int(lengths[told].sum()),
            bool((there != _UNKNOWN).all()),
            bool(told.all()),
        )

    def _before(
        self, node_id: bytes, new: ChunkTable, cut: Coords | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each chunk, whether it existed (0, 1, -1: unknown) and its length (-1: unknown)."""
        there, lengths = np.zeros(len(new), np.int64), np.zeros(len(new), np.int64)
        coords = new.coords()
        near = self.view.index.merged_at(node_id, coords) >= 0
        for box in self.boxes.get(node_id, ()):
            if box.overlaps(new.box):
                near |= lies_in(box, coords)
        if cut is not None:
            near &= inside(coords, cut)
        due = coords[near]
        if not len(due):
            return there, lengths
        there[near] = 1 if self._is_full(node_id) else _UNKNOWN
        lengths[near] = _UNKNOWN
        with suppress(NotAtHandError, CorruptObjectError):  # readers get the error of damage
            table = self.view.at_hand().chunks_at(node_id, due)
            rows = np.full(len(due), -1) if table is None else rows_at(table, due)
            there[near] = rows >= 0
            lengths[near] = 0 if table is None else np.where(rows >= 0, table.length[rows], 0)
        return there, lengths

    def _is_full(self, node_id: bytes) -> bool:
        """Whether the array has all of its chunks."""
        amount, meta = self.amounts.get(node_id, NOTHING), self.nodes[node_id].array
        grid = Box((), ()) if meta is None else meta.grid
        if not amount.chunks_exact or amount.chunks != grid.size:
            return False
        return self._lies_in(node_id, grid.hi)  # else some that were counted may not be its own

    def _lies_in(self, node_id: bytes, shape: Coords) -> bool:
        """Whether everything stored is below `shape`."""
        boxes = self._all_boxes(node_id)
        return all(n <= at for box in boxes for n, at in zip(box.hi, shape, strict=True))

    def _all_boxes(self, node_id: bytes) -> list[Box]:
        """Boxes around everything stored of the node."""
        around = self.view.index.around(node_id)
        boxes = self.boxes.get(node_id, [])
        return boxes if around is None else [*boxes, around]


def totals_of(view: SnapshotView) -> Usage:
    """The chunks and bytes of every array, as the snapshot counts them; nothing is fetched."""
    from zarr_manifests.reports import Usage  # rarely needed, and many classes

    totals, changes = amounts_of(view), changes_of(view)
    nodes = {node.path: node for node in view.nodes.values()}
    alive = alive_amounts(totals, view.nodes.values())
    arrays = []
    for path, total in alive.items():
        # It cannot be more by more than there is.
        growth = changes.get(nodes[path].node_id, NOTHING).at_most(total.chunks)
        arrays.append(Usage(absolute(path), total, growth, grid_of(nodes[path])))
    return Usage(
        "",
        sum_of(alive.values()),
        sum_of(changes.values()),
        arrays=tuple(sorted(arrays, key=lambda array: array.path)),
        snapshot_id=view.snapshot_id,
    )


def amount_of(table: ChunkTable | None, kind: RefKind | None = None) -> Amount:
    """The chunks of the table, or those of that kind, and their bytes."""
    if table is None:
        return NOTHING
    rows = table.kind != RefKind.UNSET if kind is None else table.kind == kind
    return Amount(int(rows.sum()), int(table.length[rows].sum()))


def grid_of(node: Node) -> Coords | None:
    """The shape of an array's grid of chunks; None for a node that is no array."""
    return None if node.array is None else node.array.grid.shape
