"""Which tables can locate a chunk: leaves of the base and live deltas, without reading them.

A leaf is a `Part` of a manifest: a node, a box and the number of chunk refs in it. Invariant: a
`BaseIndex` is built once, in one pass over the base's directory, and never changes. The cost of a
query depends on the size of its answer, not of the base, so planning a change of one leaf costs
the same for eighty leaves as for eight thousand.

Tables are searched from the newest to the oldest; the first with a row for the chunk decides. The
search ends early at a table that has a row for every chunk of its box, and at a truncation that
drops the chunk. A table whose box does not contain the chunk is not fetched.

Which chunks exist is decided for many coordinates at once, without their refs.

Arithmetic of totals: exact counts or upper bounds of chunks and bytes. No I/O
------------------------------------------------------------------------------

The base has a count for each node. Every live delta or run says by how much it changes the count,
or what the count is after it. Added up in order they give the totals of a snapshot. Invariants: a
number marked exact is exact; any other is an upper bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import gt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import (
    Count,
    Counted,
    ManifestRef,
    Node,
    NodeKind,
    Part,
    grouped,
)
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.grid import Box, Coords, IndexArray, corners, holding
from zarr_manifests.planning.merge import Layer, Overlay, in_box, inside, merge_layers, select
from zarr_manifests.texts import count_text


def part_order(part: Part) -> tuple[bytes, Coords, Coords]:
    """Sort key of leaves, independent of paths."""
    return part.node_id, part.box.lo, part.box.hi


class PlacedLeaf(NamedTuple):
    """A leaf, its manifest, and the sequence up to which changes are merged into it."""

    part: Part
    manifest: ManifestRef
    merged: int

    @property
    def key(self) -> str:
        """The key of its manifest."""
        return self.manifest.blob.key

    @property
    def nbytes(self) -> int:
        """The bytes of its chunks."""
        return self.manifest.bytes_of(self.part)


def check_axes(box: Box, ndim: int) -> None:
    """Refuse a chunk table with other axes than its node: its chunks would read as absent.

    Raises
    ------
    CorruptObjectError
        If the numbers differ.
    """
    if box.ndim != ndim:
        raise CorruptObjectError(f"a chunk table of {box.ndim} axes for a node of {ndim}")


class _NodeLeaves:
    """The leaves of one node, found by coordinate.

    They are sorted along the axis on which they differ most. So the leaves that may hold a
    coordinate are a short contiguous range: from the first leaf that ends after it, to the last
    that starts at or before it.
    """

    def __init__(self, leaves: Sequence[PlacedLeaf]) -> None:
        ndim = leaves[0].part.box.ndim
        if any(leaf.part.box.ndim != ndim for leaf in leaves):
            raise CorruptObjectError("leaves of one array have different numbers of axes")
        lo, hi = corners([leaf.part.box for leaf in leaves], ndim)
        self.axis = 0
        if ndim > 1 and len(lo) > 1:
            self.axis = int(np.argmax([len(np.unique(column)) for column in lo.T]))
        order = np.argsort(lo[:, self.axis], kind="stable") if ndim else np.arange(len(leaves))
        self.lo, self.hi = lo[order], hi[order]
        self.leaves = [leaves[i] for i in order.tolist()]
        self.merged = np.array([leaf.merged for leaf in self.leaves], np.int64)
        self.around = Box.around(leaf.part.box for leaf in leaves)
        self.starts, self.ends = np.zeros(len(leaves), np.int64), np.ones(len(leaves), np.int64)
        if ndim:
            self.starts = self.lo[:, self.axis].copy()
            self.ends = np.maximum.accumulate(self.hi[:, self.axis])

    def overlapping(self, lo: IndexArray, hi: IndexArray) -> list[PlacedLeaf]:
        """The leaves that overlap [lo, hi)."""
        check_axes(self.around, len(lo))
        if not len(lo):
            return self.leaves
        first = int(np.searchsorted(self.ends, lo[self.axis], side="right"))
        stop = int(np.searchsorted(self.starts, hi[self.axis], side="left"))
        meets = (np.maximum(self.lo[first:stop], lo) < np.minimum(self.hi[first:stop], hi)).all(1)
        return [self.leaves[first + i] for i in np.flatnonzero(meets).tolist()]

    def holding(self, coords: Coords) -> list[PlacedLeaf]:
        """The leaves that hold a coordinate."""
        check_axes(self.around, len(coords))
        at = coords[self.axis] if coords else 0
        near = slice(self.ends.searchsorted(at, "right"), self.starts.searchsorted(at, "right"))
        leaves = self.leaves[near]
        boxes = [leaf.part.box for leaf in leaves]
        return [leaves[row] for row in holding(boxes, self.lo[near], self.hi[near], coords)]

    def locate(self, coords: IndexArray) -> IndexArray:
        """Position of the leaf that holds each coordinate; -1 where none does."""
        found = np.full(len(coords), -1, np.int64)
        if not coords.shape[1]:
            found[:] = 0
            return found
        along = coords[:, self.axis]
        first = np.searchsorted(self.ends, along, side="right")
        stop = np.searchsorted(self.starts, along, side="right")
        for step in range(int((stop - first).max(initial=0))):
            due = np.flatnonzero((found < 0) & (first + step < stop))
            if not len(due):
                break
            at = first[due] + step
            here = coords[due]
            inside = ((self.lo[at] <= here) & (here < self.hi[at])).all(axis=1)
            found[due[inside]] = at[inside]
        return found


class BaseIndex:
    """The manifests of a base, found by key, by set, by node and by chunk.

    Parameters
    ----------
    manifests : sequence of ManifestRef
        The base's directory.

    Raises
    ------
    InvalidArgumentError
        If a manifest is listed twice.
    """

    def __init__(self, manifests: Sequence[ManifestRef]) -> None:
        self._manifests = {ref.blob.key: ref for ref in manifests}
        if len(self._manifests) != len(manifests):
            raise InvalidArgumentError("a base names a manifest twice")
        self._in_set = grouped((ref.packed_for, ref) for ref in manifests if ref.packed_for)
        leaves = (PlacedLeaf(part, ref, to) for ref in manifests for part, to in ref.leaves())
        self._placed = grouped((leaf.part.node_id, leaf) for leaf in leaves)
        each = self._placed.items()
        self._refs = {node: sum(leaf.part.count for leaf in of) for node, of in each}
        self._leaves: dict[bytes, _NodeLeaves] = {}  # built when first asked for

    def __iter__(self) -> Iterator[ManifestRef]:
        return iter(self._manifests.values())

    def __getitem__(self, key: str) -> ManifestRef:
        return self._manifests[key]

    def in_set(self, name: str) -> Sequence[ManifestRef]:
        """The set's manifests."""
        return self._in_set.get(name, ())

    def refs(self, node_id: bytes) -> int:
        """The number of refs in all leaves of the node."""
        return self._refs.get(node_id, 0)

    def placed(self, node_id: bytes) -> Sequence[PlacedLeaf]:
        """The leaves of the node, in the directory's order."""
        return self._placed.get(node_id, ())

    def placed_in(self, node_id: bytes, box: Box) -> list[PlacedLeaf]:
        """The leaves of the node that overlap the box."""
        return self.overlapping(node_id, *np.array([box.lo, box.hi], np.int64))

    def overlapping(self, node_id: bytes, lo: IndexArray, hi: IndexArray) -> list[PlacedLeaf]:
        """The leaves of the node that overlap [lo, hi), which may be larger than a box."""
        leaves = self._of(node_id)
        return [] if leaves is None else leaves.overlapping(lo, hi)

    def holding(self, node_id: bytes, coords: Coords) -> list[PlacedLeaf]:
        """The leaves of the node that hold a chunk: one at most, unless leaves overlap."""
        leaves = self._of(node_id)
        return [] if leaves is None else leaves.holding(coords)

    def merged_at(self, node_id: bytes, coords: IndexArray) -> IndexArray:
        """What the leaf of each coordinate (int64[n, ndim]) is merged to; -1 where none is."""
        leaves = self._of(node_id)
        if leaves is None:
            return np.full(len(coords), -1, np.int64)
        at = leaves.locate(coords)
        return np.where(at < 0, -1, leaves.merged[at])

    def around(self, node_id: bytes) -> Box | None:
        """The smallest box around the node's leaves; None if it has none."""
        leaves = self._of(node_id)
        return None if leaves is None else leaves.around

    def _of(self, node_id: bytes) -> _NodeLeaves | None:
        found = self._leaves.get(node_id)
        if found is None and node_id in self._placed:
            found = self._leaves[node_id] = _NodeLeaves(self._placed[node_id])
        return found


EMPTY: Final = BaseIndex(())
"""The index of a repository without a base."""


def combined_refs(refs: Iterable[ManifestRef]) -> tuple[ManifestRef, ...]:
    """The manifests, each once, with all leaves that are listed of it."""
    found = grouped((ref.blob.key, ref) for ref in refs)
    return tuple(some[0] if len(some) == 1 else _combined(some) for some in found.values())


def _combined(refs: Sequence[ManifestRef]) -> ManifestRef:
    merged = tuple(to for ref in refs for _, to in ref.leaves())
    blob = next((ref.blob for ref in refs if ref.blob.copy is not None), refs[0].blob)
    parts, places, nbytes = (
        tuple(chain.from_iterable(getattr(ref, name) for ref in refs))
        for name in ("parts", "places", "nbytes")
    )
    kept = merged if any(merged) else ()
    return ManifestRef(blob, parts, kept, refs[0].packed_for, places, nbytes, refs[0].ids)


class LiveTable(Struct, frozen=True, eq=False):
    """A chunk table of one node, listed in the read list.

    Parameters
    ----------
    position : int
        Position of its entry in the read list.
    last : int
        The entry's sequence.
    blob : BlobRef
        The object that has it.
    part : Part
        Its directory entry.
    manifest : ManifestRef, optional
        The pointer, if the object is a manifest; else it is the delta itself.
    """

    position: int
    last: int
    blob: BlobRef
    part: Part
    manifest: ManifestRef | None = None

    @property
    def is_full(self) -> bool:
        """Whether it has a row for every chunk of its box."""
        return self.part.count == self.part.box.size


class Truncation(Struct, frozen=True):
    """A truncation; it drops chunks from everything older than the sequence `last`."""

    last: int
    shape: Coords


class LiveTables:
    """The tables of one node in live deltas, as the read list describes them.

    Parameters
    ----------
    tables : sequence of LiveTable
        From the oldest to the newest.
    cuts : mapping of int to Truncation
        Truncations, by position in the read list. A truncation applies before the tables at the
        same position.
    """

    def __init__(self, tables: Sequence[LiveTable], cuts: Mapping[int, Truncation]) -> None:
        self.tables = tuple(tables)
        self._cuts = dict(sorted(cuts.items()))
        self._boxes = boxes = [table.part.box for table in self.tables]
        self._axes = {box.ndim: box for box in boxes}
        if len(self._axes) < 2:
            self._lo, self._hi = corners(boxes, boxes[0].ndim if boxes else 0)

    @property
    def cuts(self) -> list[Truncation]:
        """All truncations, oldest first."""
        return [*self._cuts.values()]

    def reach(self, coords: Coords, leaves: Sequence[PlacedLeaf]) -> list[LiveTable | PlacedLeaf]:
        """What has to be searched for a chunk, in this order; `leaves` are those that hold it.

        Raises
        ------
        CorruptObjectError
            If a table or a truncation has other axes than the chunk.
        """
        dropped, after = -1, leaves[0].merged if leaves else 0
        for position, cut in self._cuts.items():
            if cut.last > after and not inside(np.array([coords], np.int64), cut.shape)[0]:
                dropped = position
        self._check_axes(len(coords))
        found: list[LiveTable | PlacedLeaf] = []
        for row in reversed(holding(self._boxes, self._lo, self._hi, coords)):
            table = self.tables[row]
            if table.last <= after:
                continue
            if table.position < dropped:
                break
            found.append(table)
            if table.is_full:
                return found
        return found if dropped >= 0 else [*found, *leaves]

    def holding(self, coords: IndexArray, after: int) -> list[LiveTable]:
        """The tables newer than `after` that may have any of these chunks, oldest first.

        Raises
        ------
        CorruptObjectError
            If a table has other axes than the chunks.
        """
        near = self._overlapping(Box.around_coords(coords))
        return [
            table for table in near if table.last > after and table.part.box.holds(coords).any()
        ]

    def deciding(self, box: Box) -> list[LiveTable]:
        """The tables that may decide where a chunk of the box is, from the oldest to the newest.

        Left out is what is older than a table with a row for every chunk of the box.

        Raises
        ------
        CorruptObjectError
            If a table has other axes than the box.
        """
        found: list[LiveTable] = []
        for table in reversed(self._overlapping(box)):
            found.append(table)
            if table.is_full and table.part.box.shared_size(box) == box.size:
                break
        return found[::-1]

    def in_order(self) -> Iterator[Truncation | LiveTable]:
        """All truncations and tables, oldest first."""
        cuts = list(self._cuts.items())[::-1]
        for table in self.tables:
            while cuts and cuts[-1][0] <= table.position:
                yield cuts.pop()[1]
            yield table
        yield from (cut for _, cut in reversed(cuts))

    def _overlapping(self, box: Box) -> list[LiveTable]:
        """The tables that overlap the box, oldest first."""
        self._check_axes(box.ndim)
        if not self.tables:
            return []
        lo, hi = np.asarray(box.lo, np.int64), np.asarray(box.hi, np.int64)
        shared = np.maximum(self._lo, lo) < np.minimum(self._hi, hi)
        return [self.tables[row] for row in np.flatnonzero(shared.all(axis=1)).tolist()]

    def _check_axes(self, ndim: int) -> None:
        for box in self._axes.values():
            check_axes(box, ndim)


class Stack:
    """What live deltas say of one box: their layers, added oldest first.

    Layers are merged as soon as they have many rows. So chunks that were written again and again
    take no more memory than chunks that were written once.

    Parameters
    ----------
    most : int, optional
        Rows up to which layers are never merged early.
    """

    def __init__(self, most: int = 1_000_000) -> None:
        self._most = most
        self._layers: list[Layer] = []
        self._new = self._old = 0
        self.rows = 0

    def add(self, layer: Layer) -> None:
        """Put a layer on top."""
        self._layers.append(layer)
        rows = sum(map(len, layer.tables))
        self.rows += rows
        self._new += rows
        if self._new > max(self._most, self._old):
            merged = self.overlay()
            tables = () if merged.table is None else (merged.table,)
            self._layers = [Layer(merged.truncated, tables)]
            self._new, self._old = 0, sum(map(len, tables))

    def overlay(self) -> Overlay:
        """All layers, merged."""
        return merge_layers(self._layers)


# --- presence ----------------------------------------------------------------------------------


def lies_in(box: Box, coords: IndexArray) -> npt.NDArray[np.bool_]:
    """Which coordinates (int64[n, ndim]) lie in the box.

    Raises
    ------
    CorruptObjectError
        If they have another number of axes than the box.
    """
    check_axes(box, coords.shape[1])
    return box.holds(coords)


def has_changes(overlay: Overlay, box: Box) -> bool:
    """Whether live deltas change a chunk of the box."""
    cut, table = overlay.truncated, overlay.table
    if cut is not None and any(map(gt, box.hi, cut)):
        return True
    return table is not None and table.box.overlaps(box) and bool(in_box(table, box).any())


def rows_in(
    table: ChunkTable | None, boxes: Iterable[Box], *, outside: bool = False
) -> ChunkTable | None:
    """The table's rows in any of the boxes, or, with `outside`, in none of them."""
    if table is None:
        return None
    coords = table.coords()
    inner = np.zeros(len(coords), np.bool_)
    for box in boxes:
        inner |= lies_in(box, coords)
    return select(table, ~inner if outside else inner)


# --- sums -----------------------------------------------------------------------------------------


class Amount(Struct, frozen=True):
    """A number of chunks and of their bytes, each exact or an upper bound.

    Parameters
    ----------
    chunks : int
        Chunks that are there, wherever their bytes are.
    nbytes : int
        Bytes of all of them.
    chunks_exact, nbytes_exact : bool
        Whether the number is exact; else it is an upper bound.
    """

    chunks: int = 0
    nbytes: int = 0
    chunks_exact: bool = True
    nbytes_exact: bool = True

    @property
    def exact(self) -> bool:
        """Whether both numbers are exact."""
        return self.chunks_exact and self.nbytes_exact

    def __str__(self) -> str:
        chunks = ("" if self.chunks_exact else "at most ") + count_text(self.chunks, "chunk")
        most = "" if self.nbytes_exact else "at most "
        return f"{chunks}, {most}{count_text(self.nbytes, 'byte')}"

    def __add__(self, other: Amount) -> Amount:
        """The sum of both."""
        return Amount(
            self.chunks + other.chunks,
            self.nbytes + other.nbytes,
            self.chunks_exact and other.chunks_exact,
            self.nbytes_exact and other.nbytes_exact,
        )

    def at_most(self, most: int) -> Amount:
        """The amount with a bound of at most `most` chunks."""
        if self.chunks_exact or self.chunks <= most:
            return self
        return Amount(most, self.nbytes, chunks_exact=False, nbytes_exact=self.nbytes_exact)

    @classmethod
    def from_count(cls, count: Count) -> Amount:
        """The amount of a stored count."""
        return cls(
            count.chunks,
            count.nbytes,
            not count.counted & Counted.CHUNKS_AT_MOST,
            not count.counted & Counted.BYTES_AT_MOST,
        )

    def to_count(self, node_id: bytes, counted: int = Counted.EXACT) -> Count:
        """The amount as a stored count of the node."""
        if not self.chunks_exact:
            counted |= Counted.CHUNKS_AT_MOST
        if not self.nbytes_exact:
            counted |= Counted.BYTES_AT_MOST
        return Count(node_id, self.chunks, self.nbytes, counted)


NOTHING: Final = Amount()


def lay_over(amounts: dict[bytes, Amount], entry: DeltaEntry) -> None:
    """Update the amounts of each node by one entry of the read list."""
    for count in entry.counts:
        flags = count.counted
        before = NOTHING if flags & Counted.WHOLE else amounts.get(count.node_id, NOTHING)
        amounts[count.node_id] = Amount(  # `before + Amount.from_count(count)`, twice as fast
            before.chunks + count.chunks,
            before.nbytes + count.nbytes,
            before.chunks_exact and not flags & Counted.CHUNKS_AT_MOST,
            before.nbytes_exact and not flags & Counted.BYTES_AT_MOST,
        )


def difference(before: Amount, after: Amount, count: Count) -> Amount:
    """How much a commit with this count of a node adds to its amount."""
    if not count.counted & Counted.WHOLE:
        return Amount.from_count(count)
    # Without an exact number before, nothing can be subtracted: all of the new number is the bound.
    chunks = after.chunks - (before.chunks if before.chunks_exact else 0)
    return Amount(
        chunks,
        after.nbytes - (before.nbytes if before.nbytes_exact else 0),
        after.chunks_exact and before.chunks_exact,
        after.nbytes_exact and before.nbytes_exact,
    )


def merged_counts(
    entries: Sequence[DeltaEntry], after: int, alive: Collection[bytes]
) -> tuple[Count, ...]:
    """The counts of a run of these entries, leaving out entries up to the sequence `after`.

    For a node that no longer exists, only a count that says nothing is left is kept: the node may
    come back, and older entries have counted its chunks.
    """
    amounts, whole = dict[bytes, Amount](), set[bytes]()
    for entry in entries:
        if entry.last > after:  # else already counted by the base
            lay_over(amounts, entry)
            whole |= {count.node_id for count in entry.counts if count.counted & Counted.WHOLE}
    counts = (
        amount.to_count(node_id, Counted.WHOLE if node_id in whole else Counted.EXACT)
        for node_id, amount in amounts.items()
    )
    return tuple(
        c for c in counts if c.node_id in alive or c == Count(c.node_id, 0, 0, Counted.WHOLE)
    )


def alive_amounts(amounts: Mapping[bytes, Amount], nodes: Iterable[Node]) -> dict[str, Amount]:
    """The amounts of all arrays and opaque entries among the nodes, by path."""
    found: dict[str, Amount] = {}
    for node in nodes:
        if node.kind is NodeKind.GROUP:
            continue
        amount = amounts.get(node.node_id, NOTHING)
        found[node.path] = amount if amount.chunks_exact else amount.at_most(_most(node))
    return found


def sum_of(amounts: Iterable[Amount]) -> Amount:
    """The sum of the amounts."""
    return sum(amounts, NOTHING)


def sums_of(amounts: Mapping[bytes, Amount], nodes: Iterable[Node]) -> dict[str, int]:
    """The sums that a snapshot stores about its nodes."""
    nodes = [*nodes]
    total = sum_of(alive_amounts(amounts, nodes).values())
    kinds = Counter(node.kind for node in nodes)
    return {
        "arrays": kinds[NodeKind.ARRAY],
        "groups": kinds[NodeKind.GROUP],
        "chunks" if total.chunks_exact else "chunks-at-most": total.chunks,
        "chunk-bytes" if total.nbytes_exact else "chunk-bytes-at-most": total.nbytes,
    }


def changed_sums(
    sums: Mapping[str, int], before: Mapping[str, int], after: Mapping[str, int]
) -> dict[str, int]:
    """The sums of a snapshot of which some nodes have changed.

    `before` and `after` are the sums of these nodes. A sum that was not exact stays an upper bound.

    Examples
    --------
    >>> from zarr_manifests.planning.tables import changed_sums
    >>> before = {"arrays": 1, "groups": 0, "chunks": 2, "chunk-bytes": 20}
    >>> after = {"arrays": 0, "groups": 0, "chunks": 0, "chunk-bytes": 0}
    >>> whole = {"arrays": 5, "groups": 1, "chunks-at-most": 9, "chunk-bytes": 90}
    >>> changed_sums(whole, before, after)
    {'arrays': 4, 'groups': 1, 'chunks-at-most': 7, 'chunk-bytes': 70}
    """
    found = {name: sums[name] - before[name] + after[name] for name in ("arrays", "groups")}
    for name in ("chunks", "chunk-bytes"):
        bound = f"{name}-at-most"
        total, gone, new = (each.get(name, each.get(bound, 0)) for each in (sums, before, after))
        found[name if name in sums and name in after else bound] = total - gone + new
    return found


def _most(node: Node) -> int:
    """The largest possible number of chunks of the node."""
    return 1 if node.array is None else node.array.grid.size
