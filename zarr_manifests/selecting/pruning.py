"""What comparisons say of the stored chunks of an array, by its zone map.

Leaves that no live delta touches, and whose chunks all have entries in pages, are judged by these
pages: their chunk tables are not read, and a page whose bounds exclude a match is not read either.
For all other chunks the chunk tables say which entries count. Where a session has changed chunks of
an array, it goes by chunk tables alone.

Invariants: an entry counts only for the chunk and the meaning it was made of; chunks without an
entry that counts may match.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.edit.bulk_chunks import note_unchanged
from zarr_manifests.engine.snapshot.zones import (
    KnownZones,
    PagedLeaves,
    paged_leaves,
    read_pages,
)
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.zone_maps import Bounds, ZonePage, ZoneTable
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.planning.tables.merge import in_box, rows_at
from zarr_manifests.planning.zones.entries import valid
from zarr_manifests.planning.zones.meaning import Meaning
from zarr_manifests.planning.zones.skipping import Ranges, Verdict, counts_hold
from zarr_manifests.planning.zones.where import Comparison
from zarr_manifests.selecting.where_columns import WhereArray, attributes_of, comparable, meta_of

__all__ = ["Match", "Pruner", "StoredChunks"]

type _Mask = npt.NDArray[np.bool_]
type _Values = npt.NDArray[Any]
type Match = Callable[[Comparison, Ranges], _Mask]
"""Whether rows of ranges may match a comparison."""

_US: Final = np.timedelta64(1, "us")
_US_PER: Final = {
    "Y": 31_622_400_000_000,
    "M": 2_678_400_000_000,
    "W": 604_800_000_000,
    "D": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1000,
}


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunks:
    """The stored chunks of an array in a region.

    Parameters
    ----------
    index : int64[n]
        Linear indexes of the chunks in the region, ascending.
    length : int64[n]
        Their stored bytes.
    summed : bool[n]
        Which of them `summed_bytes` counts.
    inline : bool[n]
        Which of them are inline chunks, whose lengths pages do not have.
    unread : tuple of (Box, tuple of bool)
        Boxes full of chunks that are not in `index`, since their page cannot match. With each, for
        every comparison whether the page may match.
    summed_bytes : int
        The stored bytes of the summed chunks and of those in `unread`.
    """

    index: IndexArray
    length: IndexArray
    summed: _Mask
    inline: _Mask
    unread: tuple[tuple[Box, tuple[bool, ...]], ...] = ()
    summed_bytes: int = 0

    @classmethod
    def of(cls, table: ChunkTable | None, region: Box) -> StoredChunks:
        """Those of a chunk table."""
        if table is None:
            none = np.empty(0, np.int64)
            return cls(none, none, none > 0, none > 0)
        no = np.zeros(len(table), np.bool_)
        return cls(table.box.carried(table.linear_index(), region), table.length, no, no)

    @property
    def unread_count(self) -> int:
        """Number of chunks in `unread`."""
        return sum(box.size for box, _ in self.unread)

    def sizes(
        self, array: WhereArray, region: Box, chosen: Callable[[IndexArray], _Mask]
    ) -> tuple[int, int]:
        """The stored bytes of all chunks, and of the chosen ones."""
        selected, length = chosen(self.index), self.length
        due = self.inline & (selected | ~self.summed)
        if due.any():
            length = length.copy()
            length[due] = array.lengths_at(region.unravel(self.index[due]))
        rest = int(length[~self.summed].sum())
        return self.summed_bytes + rest, int(length[selected].sum())


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    """Chunks, which of them have statistics, and for each comparison which of them may match."""

    chunks: StoredChunks
    known: _Mask
    keep: list[_Mask]


class Pruner:
    """What comparisons say of the stored chunks of an array in a region.

    Parameters
    ----------
    array : WhereArray
        The array that the where is about.
    node : Node
        The array that is compared.
    region : Box
        The chunks to judge.
    zones : KnownZones
        Its zone map.
    comparisons : sequence of Comparison
        What must hold.
    match : callable
        How they are compared with ranges.
    """

    def __init__(
        self,
        array: WhereArray,
        node: Node,
        region: Box,
        zones: KnownZones,
        comparisons: Sequence[Comparison],
        match: Match,
    ) -> None:
        self._array, self._node, self._region, self._zones = array, node, region, zones
        self._comparisons, self._match = comparisons, match
        self._meaning = meaning = Meaning.of(node.documents)
        self._unwritten = [True] * len(comparisons)
        if meaning.measurable:
            fill = self._fill()
            self._unwritten = [bool(match(comparison, fill)[0]) for comparison in comparisons]
        pages = zones.pages
        usable = pages is not None and meaning.measurable and pages.meaning == meaning.digest
        self._listed = pages if usable else None
        self._pages: tuple[ZonePage, ...] = () if self._listed is None else self._listed.pages
        self._may = self._of_pages()

    def judge(self, *, alone: bool) -> tuple[StoredChunks, list[Verdict]]:
        """The chunks, and what each comparison says of them.

        `alone` says that no other array is compared, so pages may stay unread.
        """
        context = self._array.contents.context
        for by_pages in (True, False):
            paged, table = self._found(by_pages=by_pages)
            rest = self._unjudged(StoredChunks.of(table, self._region))
            unread = self._unread(paged) if alone else set()
            named = [i for i in paged.pages if i not in unread]
            judged_by_address = {} if table is None else self._judge_by_pages(paged, rest)
            due = [*named, *judged_by_address]
            read = read_pages(context, self._listed, due) if self._listed and due else {}
            if all(i in read for i in named):
                break  # else as if there were no pages
        if table is not None and self._meaning.measurable:
            checked = [zones for i, zones in read.items() if judged_by_address.get(i)]
            others = [zones for i, zones in read.items() if judged_by_address.get(i) is False]
            self._judge_by_entries(table, rest, checked, others)
        parts = [rest, *self._judged_pages({i: read[i] for i in named}, paged.summed)]
        boxes = [(self._pages[i].box, tuple(bool(one[i]) for one in self._may)) for i in unread]
        stored, known, keep = _in_order(parts, tuple(boxes), paged.summed_bytes)
        judged = zip(keep, self._unwritten, strict=True)
        return stored, [Verdict(stored.index, mask, known, fills) for mask, fills in judged]

    def _found(self, *, by_pages: bool) -> tuple[PagedLeaves, ChunkTable | None]:
        """The leaves that pages describe, and the chunks of the region that are not in these."""
        contents, node_id, region = self._array.contents, self._node.node_id, self._region
        usable = by_pages and self._pages and region.size
        if not usable or not note_unchanged(contents, self._node, region):
            return PagedLeaves(), self._array.chunks(self._node, region)

        def find() -> tuple[PagedLeaves, ChunkTable | None]:
            paged = paged_leaves(contents.view, node_id, region, self._zones)
            return paged, contents.view.chunks_in(node_id, region, without=paged.boxes)

        return contents.guarded(find)

    def _unread(self, paged: PagedLeaves) -> set[int]:
        """The pages that cannot match, if it is known without reading them which chunks they have.

        If unwritten chunks match too, the plan has to know which chunks a page has.
        """
        narrow = [one for one, fills in zip(self._may, self._unwritten, strict=True) if not fills]
        return {
            i
            for i in paged.summed.intersection(paged.pages)
            if self._pages[i].count == self._pages[i].box.size and not all(one[i] for one in narrow)
        }

    def _unjudged(self, chunks: StoredChunks) -> _Judged:
        n = len(chunks.index)
        every = [np.ones(n, np.bool_) for _ in self._comparisons]
        return _Judged(chunks, np.zeros(n, np.bool_), every)

    # --- pages that are known to count ------------------------------------------------------------

    def _judged_pages(self, tables: dict[int, ZoneTable], summed: frozenset[int]) -> list[_Judged]:
        """The chunks of pages, all of whose entries count."""
        index, columns, bounds = list[IndexArray](), list[tuple[_Values, ...]](), list[Bounds]()
        for i, zones in tables.items():
            at, of = zones.addresses, zones.bounds
            here: _Mask | slice = slice(None)
            if at.box.shared_size(self._region) == at.box.size:
                index.append(at.box.carried(at.linear_index(), self._region))
            else:
                here = in_box(at, self._region)
                index.append(self._region.ravel(at.coords()[here]))
                of = of.take(here)
            n = len(index[-1])
            inline = at.kind[here] == RefKind.INLINE
            columns.append((at.length[here], np.full(n, i in summed), inline))
            bounds.append(of)
        if not sum(map(len, index)):
            return []
        length, is_summed, inline = (np.concatenate(many) for many in zip(*columns, strict=True))
        chunks = StoredChunks(np.concatenate(index), length, is_summed, inline)
        judged = self._unjudged(chunks)
        self._apply(judged, np.arange(len(chunks.index)), Bounds.joined(bounds))
        return [judged]

    # --- chunks whose addresses are known ---------------------------------------------------------

    def _judge_by_pages(self, paged: PagedLeaves, rest: _Judged) -> dict[int, bool]:
        """Judge chunks of chunk tables by the bounds of their pages.

        Returns the pages that have to be read, and whether all their entries count.
        """
        taken = {*paged.pages}
        near = {
            i: self._counts(page)
            for i, page in enumerate(self._pages)
            if i not in taken and page.box.overlaps(self._region)
        }
        left = np.logical_and.reduce(self._may)
        for i in [i for i, counts in near.items() if counts and not left[i]]:
            if not self._pages[i].complete:
                continue
            rows = self._rows_in(rest.chunks.index, self._pages[i].box)
            rest.known[rows] = True
            for mask, page in zip(rest.keep, self._may, strict=True):
                mask[rows] &= page[i]
            del near[i]
        return near

    def _judge_by_entries(
        self,
        table: ChunkTable,
        rest: _Judged,
        checked: Sequence[ZoneTable],
        others: Sequence[ZoneTable],
    ) -> None:
        """Judge chunks by the entries that count for them; those of `checked` are known to."""
        entries = (*checked, *self._zones.recent, *self._recorded(), *others)
        rows, bounds = [], []
        for number, zones in enumerate(entries):
            if zones.meaning != self._meaning.digest:
                continue
            at = rows_at(table, zones.coords())
            counts = at >= 0 if number < len(checked) else valid(zones, table)
            if counts.any():
                rows.append(at[counts])
                bounds.append(zones.bounds if counts.all() else zones.bounds.take(counts))
        if rows:
            self._apply(rest, np.concatenate(rows), Bounds.joined(bounds))

    def _recorded(self) -> list[ZoneTable]:
        """Zone maps of changes that are not committed."""
        with self._array.contents.lock:
            return list(self._array.contents.changes.zones_of(self._node.node_id))

    def _counts(self, page: ZonePage) -> bool:
        """Whether the chunks in the page's box are still those of its leaf."""
        contents, node_id = self._array.contents, self._node.node_id
        changes = contents.changes
        if page.leaf is None:
            return False
        changed = (changes.truncated, changes.tables, changes.chunks)
        if any(node_id in changes_of for changes_of in changed):
            return False
        for leaf in contents.view.index.placed_in(node_id, page.box):
            blob = leaf.manifest.blob
            inside = page.box.shared_size(leaf.part.box) == page.box.size
            if (blob.key, blob.crc32c) == page.leaf and inside:
                overlay = contents.view.overlay(node_id, leaf.merged, page.box)
                newer = overlay.table
                untouched = newer is None or not in_box(newer, page.box).any()
                return untouched and overlay.truncated is None
        return False

    def _rows_in(self, index: IndexArray, box: Box) -> IndexArray:
        """The rows of these chunks that lie in the box, which overlaps the region."""
        shared = box.shared(self._region)
        ends = [self._region.ravel_one(shared.lo)]
        ends.append(self._region.ravel_one(tuple(n - 1 for n in shared.hi)) + 1)
        start, stop = index.searchsorted(ends).tolist()
        coords = self._region.unravel(index[start:stop])
        inside = ((coords >= shared.lo) & (coords < shared.hi)).all(axis=1)
        return np.asarray(np.flatnonzero(inside) + start, np.int64)

    # --- bounds -----------------------------------------------------------------------------------

    def _apply(self, judged: _Judged, rows: IndexArray, bounds: Bounds) -> None:
        """Judge these rows by their bounds."""
        meta, coords = meta_of(self._node), self._region.unravel(judged.chunks.index[rows])
        hold = counts_hold(bounds.cells, coords, meta.shape, meta.chunk_shape)
        ranges = self._ranges(bounds, hold)
        if ranges is not None:
            judged.known[rows] |= ranges.known
            for comparison, mask in zip(self._comparisons, judged.keep, strict=True):
                mask[rows] &= self._match(comparison, ranges)

    def _of_pages(self) -> list[_Mask]:
        """For each comparison, which pages may have a match."""
        ranges = None
        if self._listed is not None:
            bounds, whole = self._listed.bounds, math.prod(meta_of(self._node).chunk_shape)
            counts = np.array([page.count for page in self._pages])
            ranges = self._ranges(bounds, bounds.cells == counts * whole)
        if ranges is None:
            return [np.ones(len(self._pages), np.bool_) for _ in self._comparisons]
        return [self._match(comparison, ranges) for comparison in self._comparisons]

    def _fill(self) -> Ranges:
        """The values of chunks that are not stored."""
        meaning = self._meaning
        fill = meaning.fill.reshape(1)
        missing = np.isin(fill, meaning.missing)
        if fill.dtype.kind in "SU":
            return Ranges.of_cells(fill, missing)
        values, null = comparable(self._array.decoded(self._node, meaning.decodable(fill)))
        found = Ranges.of_cells(values, missing | null)
        if values.dtype.kind == "O" or self._is_rounded(values):
            return Ranges(values, values, found.bounded, found.nulls, np.zeros(1, np.bool_))
        return found

    def _is_rounded(self, decoded: _Values) -> bool:
        """Whether decoded times may lack fractions of a microsecond."""
        units = str(attributes_of(self._node).get("units", ""))
        stored = self._meaning.stored
        return decoded.dtype.kind == "M" and (stored.kind != "i" or units.startswith("nano"))

    def _ranges(self, bounds: Bounds, hold: _Mask) -> Ranges | None:
        """Decoded bounds; None if they cannot be decoded."""
        meaning, dtype, bounded = self._meaning, bounds.low.dtype, bounds.bounded
        nullable = bool(len(meaning.missing)) or meaning.dtype.kind in "fmM"
        nulls = ((bounds.missing > 0) | ~hold) & nullable
        everything = np.ones(len(bounds), np.bool_)
        if dtype.kind == "S" and meaning.dtype.kind in "SU":
            return Ranges(bounds.low, bounds.high, bounded, nulls, everything)
        if dtype != meaning.dtype:
            return None
        if not bounded.any():
            return Ranges(bounds.low, bounds.high, bounded, nulls, everything)
        # Rows without values have any bounds.
        some = bounds.low[np.argmax(bounded)]
        both = [np.where(bounded, ends, some) for ends in (bounds.low, bounds.high)]
        try:
            values = self._array.decoded(self._node, meaning.decodable(np.concatenate(both)))
        except InvalidArgumentError:
            return None
        if values.dtype.kind not in "biufM":
            return None
        values, null = comparable(values)
        # With a negative scale, the least stored value is the greatest one.
        one, other = np.split(values, 2)
        low, high = np.minimum(one, other), np.maximum(one, other)
        known = ~bounded | ~np.logical_or(*np.split(null, 2))
        if self._is_rounded(values):
            # Beyond these, microseconds overflow.
            most = 2**62 // _US_PER.get(np.datetime_data(values.dtype)[0], 1)
            known = known & (low.view(np.int64) > -most) & (high.view(np.int64) < most)
            epoch = np.zeros(1, values.dtype)
            low, high = np.where(known, low, epoch), np.where(known, high, epoch)
            low, high = low - _US, high + _US
        return Ranges(low, high, bounded, nulls, known)


def _in_order(
    parts: Sequence[_Judged], unread: tuple[tuple[Box, tuple[bool, ...]], ...], summed_bytes: int
) -> tuple[StoredChunks, _Mask, list[_Mask]]:
    """All chunks in the order of the region, which of them are known, and which may match."""
    chunks = [part.chunks for part in parts]
    names = ("index", "length", "summed", "inline")
    columns = [np.concatenate([getattr(one, name) for one in chunks]) for name in names]
    columns.append(np.concatenate([part.known for part in parts]))
    keep = zip(*(part.keep for part in parts), strict=True)
    columns += [np.concatenate(masks) for masks in keep]
    index = columns[0]
    if not (index[1:] > index[:-1]).all():
        order = np.argsort(index)
        columns = [column[order] for column in columns]
    index, length, summed, inline, known, *masks = columns
    stored = StoredChunks(index, length, summed, inline, unread, summed_bytes)
    return stored, known, masks
