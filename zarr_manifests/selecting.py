"""Which chunks of an array may hold cells that a where selects.

Comparisons of coordinates are applied to their values, which are read. Comparisons of data are
applied to the bounds in zone maps, and no chunk is read. Bounds and coordinates are decoded by
xarray, as data is when it is read. Invariants: an entry of a zone map counts only for the chunk
and the meaning it was made of; chunks without an entry that counts are selected.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr

from zarr_manifests.display import fields_of
from zarr_manifests.engine.edit.bulk_chunks import find_chunks
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.snapshot.zones import KnownZones, paged_region, read_pages, zones_of
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.zone_maps import Bounds, ZonePage, ZonePages, ZoneTable
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.keys import V2_ARRAY, V3_DOCUMENT, ArrayMeta
from zarr_manifests.planning.tables.merge import in_box, rows_at
from zarr_manifests.planning.zones.entries import valid
from zarr_manifests.planning.zones.meaning import Meaning
from zarr_manifests.planning.zones.skipping import (
    Ranges,
    Verdict,
    counts_hold,
    may_match,
    plan_chunks,
)
from zarr_manifests.planning.zones.time_zone import zone_of
from zarr_manifests.planning.zones.where import Comparison, parse_where
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.store import ManifestStore, contents_of

__all__ = ["chunks_where"]

type _Mask = npt.NDArray[np.bool_]
type _Values = npt.NDArray[Any]
type _Match = Callable[[Comparison, Ranges], _Mask]

_CF: Final = frozenset(
    ["scale_factor", "add_offset", "_FillValue", "missing_value", "units", "_Unsigned", "dtype"]
)
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
_MOST_CELLS: Final = 2**27
"""Most values of a coordinate that are read."""


def chunks_where(
    store: ManifestStore,
    path: str,
    where: Any,
    *,
    branch: str | None,
    nan_matches: bool,
    time_zone: str,
    decode_times: bool,
) -> ChunkSelection:
    """Select chunks, as `Session.chunks_where` documents it, with the index of the branch."""
    parsed = parse_where(where)
    zone = zone_of(time_zone)
    array = _WhereArray(store, path, decode_times=decode_times)
    axes = [np.ones(n, np.bool_) for n in array.meta.grid.shape]
    reasons: dict[str, int] = {}
    total = array.meta.grid.size
    of_data: dict[str, list[Comparison]] = {}
    of_axes: dict[tuple[str, int], list[Comparison]] = {}
    for comparison in parsed.comparisons:
        axis = array.axis_of(comparison.column)
        if axis is None:
            of_data.setdefault(comparison.column, []).append(comparison)
        else:
            of_axes.setdefault((comparison.column, axis), []).append(comparison)
    for (name, axis), comparisons in of_axes.items():
        cells = array.coordinate(name, axis)
        keep = np.ones(len(cells.low), np.bool_)
        for comparison in comparisons:
            # Readers differ in what NaN in a coordinate is, so it may match.
            floats = cells.low.dtype.kind == "f"
            found = may_match(comparison, cells, nan_matches=floats, zone=zone)
            gone = ~_by_chunk(found, array.meta.chunk_shape[axis])
            reasons[comparison.sql] = int(gone.sum()) * (total // max(len(gone), 1))
            keep &= found
        axes[axis] &= _by_chunk(keep, array.meta.chunk_shape[axis])
    region = _around(axes)

    def match(comparison: Comparison, ranges: Ranges) -> _Mask:
        return may_match(comparison, ranges, nan_matches=nan_matches, zone=zone)

    nodes = {name: array.beside(name) for name in of_data}
    known = zones_of(
        array.contents.context,
        array.contents.view,
        [node.node_id for node in nodes.values()],
        branch,
    )
    verdicts: list[Verdict] = []
    stored: dict[bytes, _ChunksHere] = {}
    for name, comparisons in of_data.items():
        node = nodes[name]
        chunks = _WhereChunks(array, node, region, known[node.node_id])
        here, judged = chunks.judge(comparisons, match, alone=len(nodes) == 1)
        for number, verdict in enumerate(judged):
            unread = sum(box.size for box, may in here.unread if not may[number])
            absent = region.size - len(verdict.index) - sum(box.size for box, _ in here.unread)
            left_out = int((~verdict.match).sum()) + unread
            reasons[comparisons[number].sql] = left_out + (0 if verdict.unwritten else absent)
        verdicts += judged
        stored[node.node_id] = here
    out = [box for each in stored.values() for box, _ in each.unread]
    plan = plan_chunks(axes, region, verdicts, out)
    target = stored.get(array.node.node_id) or _ChunksHere(array.chunks(array.node, region))
    sizes = target.sizes(array, region, plan.chosen)
    return ChunkSelection(
        path=f"/{array.node.path}",
        where=parsed.sql,
        shape=array.meta.shape,
        chunk_shape=array.meta.chunk_shape,
        dimensions=array.dims,
        boxes=plan.boxes,
        selected=plan.selected,
        left_out={
            "range": plan.by_range,
            "statistics": plan.by_statistics,
            "absence": plan.by_absence,
        },
        unknown=plan.unknown,
        bytes=sizes[0],
        selected_bytes=sizes[1],
        reasons={each.sql: reasons[each.sql] for each in parsed.comparisons},
        data=tuple(f"/{node.path}" for node in nodes.values()),
    )


def _by_chunk(cells: _Mask, chunk: int) -> _Mask:
    """Which chunks along an axis have a cell for which the mask is true."""
    starts = np.arange(0, len(cells), chunk)
    return np.logical_or.reduceat(cells, starts) if len(starts) else cells


def _around(axes: Sequence[_Mask]) -> Box:
    """The smallest box around the chunks that are in all masks."""
    found = [np.flatnonzero(axis) for axis in axes]
    if not all(map(len, found)):
        return Box((0,) * len(axes), (0,) * len(axes))
    return Box(tuple(int(at[0]) for at in found), tuple(int(at[-1]) + 1 for at in found))


class _WhereArray:
    """An array, the coordinates of its dimensions, and the arrays beside it.

    Parameters
    ----------
    store : ManifestStore
        The session's contents.
    path : str
        Path of the array.
    decode_times : bool
        Whether CF times become times.
    """

    def __init__(self, store: ManifestStore, path: str, *, decode_times: bool) -> None:
        self._store, self._decode_times = store, decode_times
        self.contents: SessionView = contents_of(store)
        self.node: Node = self.contents.array_at(path)
        self.meta = _meta(self.node)
        self._group, _, self.name = self.node.path.rpartition("/")
        self.dims = _dims(self.node)

    def chunks(self, node: Node, region: Box) -> ChunkTable | None:
        """The stored chunks of an array in the region."""
        if not region.size:
            return None
        return find_chunks(self.contents, node.path, region, None)[1]

    def lengths_at(self, coords: IndexArray) -> IndexArray:
        """The stored lengths of the array's chunks at these coordinates."""
        table = find_chunks(self.contents, self.node.path, None, None, coords)[1]
        if table is None:
            return np.zeros(len(coords), np.int64)
        rows = rows_at(table, coords)
        return np.where(rows >= 0, table.length[rows], 0)

    def axis_of(self, column: str) -> int | None:
        """The axis that a column is a coordinate of; None for data.

        Raises
        ------
        NotFoundError
            If there is no such column.
        """
        if column == self.name and self.dims != (self.name,):
            return None
        node = self._at(column)
        if node is None or node.array is None:
            if column in self.dims:
                return self.dims.index(column)  # its positions
            raise NotFoundError(f"there is no column {column!r}; {self._columns()}")
        dims = _dims(node)
        if len(dims) == 1 and dims[0] in self.dims:
            axis = self.dims.index(dims[0])
            if node.array.shape == (self.meta.shape[axis],):
                return axis
        alike = (dims, node.array.shape, node.array.chunk_shape)
        if alike != (self.dims, self.meta.shape, self.meta.chunk_shape):
            raise InvalidArgumentError(
                f"{column!r} has other dimensions or chunks than {self.name!r}; {self._columns()}"
            )
        return None

    def _columns(self) -> str:
        dims = ", ".join(str(dim) for dim in self.dims if dim is not None) or "none"
        return (
            f"a where names /{self.node.path} itself, arrays beside it with the same dimensions "
            f"and chunks, and coordinates along one of its dimensions ({dims})"
        )

    def _at(self, name: str) -> Node | None:
        return self.contents.node(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._group}/{name}".lstrip("/")

    def beside(self, name: str) -> Node:
        """The array of that name in the same group."""
        return self.contents.array_at(self._path(name))

    def coordinate(self, name: str, axis: int) -> Ranges:
        """The decoded values of a coordinate; positions from 0 on where there is none."""
        node, size = self._at(name), self.meta.shape[axis]
        if size > _MOST_CELLS:
            raise InvalidArgumentError(f"the {size} values of {name!r} are too many to compare")
        if node is None or node.array is None:
            return Ranges.of_cells(np.arange(size), np.zeros(size, np.bool_))
        stored = np.asarray(zarr.open_array(self._store, path=node.path, mode="r")[...])
        return Ranges.of_cells(*_comparable(self.decoded(node, stored)))

    def decoded(self, node: Node, stored: _Values) -> _Values:
        """Stored values as xarray decodes them.

        Raises
        ------
        ModuleNotFoundError
            If xarray is needed and not installed.
        InvalidArgumentError
            If xarray cannot decode them.
        """
        attributes = _attributes(node)
        is_v2 = V3_DOCUMENT not in node.documents and V2_ARRAY in node.documents
        if stored.dtype.kind not in "biuf" or not (is_v2 or _CF & attributes.keys()):
            return stored
        try:
            import xarray as xr
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"/{node.path} has CF attributes, which xarray decodes: "
                "pip install 'zarr-manifests[xarray]'"
            ) from error
        encoded = xr.Variable(("n",), stored, self._encoded(node).attrs)
        times: Any = xr.coders.CFDatetimeCoder(time_unit="us") if self._decode_times else False
        spans = xr.coders.CFTimedeltaCoder(
            time_unit="us", decode_via_units=False, decode_via_dtype=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reading the data gives the same warnings
            try:
                found = xr.conventions.decode_cf_variable(
                    node.path, encoded, decode_times=times, decode_timedelta=spans
                )
                return np.asarray(found.values)
            except (ValueError, OverflowError, TypeError) as error:
                raise InvalidArgumentError(
                    f"/{node.path} cannot be decoded: {error}. With decode_times=False, times "
                    "are compared as the numbers that are stored"
                ) from error

    def _encoded(self, node: Node) -> Any:
        return self._opened.open_store_variable(node.path.rpartition("/")[2])

    @cached_property
    def _opened(self) -> Any:
        import xarray as xr

        return xr.backends.ZarrStore.open_group(
            self._store, mode="r", group=self._group, consolidated=False
        )


def _meta(node: Node) -> ArrayMeta:
    assert node.array is not None
    return node.array


def _attributes(node: Node) -> dict[str, Any]:
    found = fields_of(node).get("attributes")
    return found if isinstance(found, dict) else {}


def _dims(node: Node) -> tuple[str | None, ...]:
    meta = _meta(node)
    names = meta.dimension_names
    if names is None:
        given = _attributes(node).get("_ARRAY_DIMENSIONS")
        names = tuple(given) if isinstance(given, list) else ()
    return names if len(names) == len(meta.shape) else (None,) * len(meta.shape)


def _comparable(values: _Values) -> tuple[_Values, _Mask]:
    """Values of a type that can be compared, and which of them are missing.

    Dates of other calendars become ISO text.
    """
    kind = values.dtype.kind
    if kind in "mM":
        return values, np.isnat(values)
    if kind == "f":
        return values, np.isnan(values)
    if kind == "T":
        values = values.astype(object)
    elif kind != "O":
        return values, np.zeros(len(values), np.bool_)
    listed = [_text(value) for value in values.tolist()]
    texts = np.array([text or "" for text in listed], object)
    return texts, np.array([text is None for text in listed], np.bool_)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else getattr(value, "isoformat", lambda: None)()


@dataclass(frozen=True, slots=True, eq=False)
class _ChunksHere:
    """The stored chunks of an array in a region.

    Parameters
    ----------
    table : ChunkTable or None
        The chunks. From pages, it has only their coordinates and lengths.
    pages : tuple of ZoneTable
        The pages that the table was made of.
    unread : tuple of (Box, tuple of bool)
        Boxes full of chunks that are not in the table, since their page cannot match. With each,
        for every comparison whether the page may match.
    summed : bool[n], optional
        The rows that `summed_bytes` counts. None if the table is not from pages.
    inline : bool[n], optional
        The rows of inline chunks, whose lengths pages do not have.
    summed_bytes : int
        The stored bytes of the summed rows and of the chunks in `unread`.
    """

    table: ChunkTable | None
    pages: tuple[ZoneTable, ...] = ()
    unread: tuple[tuple[Box, tuple[bool, ...]], ...] = ()
    summed: _Mask | None = None
    inline: _Mask | None = None
    summed_bytes: int = 0

    def sizes(
        self, array: _WhereArray, region: Box, chosen: Callable[[IndexArray], _Mask]
    ) -> tuple[int, int]:
        """The stored bytes of all chunks, and of the chosen ones."""
        if self.table is None:
            return self.summed_bytes, 0
        coords, length = self.table.coords(), self.table.length
        selected = chosen(region.ravel(coords))
        if self.summed is None or self.inline is None:
            return int(length.sum()), int(length[selected].sum())
        due = self.inline & (selected | ~self.summed)
        if due.any():
            length = length.copy()
            length[due] = array.lengths_at(coords[due])
        rest = int(length[~self.summed].sum())
        return self.summed_bytes + rest, int(length[selected].sum())


@dataclass(frozen=True, slots=True, eq=False)
class _WhereChunks:
    """The stored chunks of an array in a region, to be judged by its zone map."""

    array: _WhereArray
    node: Node
    region: Box
    zones: KnownZones

    def judge(
        self, comparisons: Sequence[Comparison], match: _Match, *, alone: bool
    ) -> tuple[_ChunksHere, list[Verdict]]:
        """The chunks, and what each comparison says of them.

        `alone` says that no other array is compared, so pages may stay unread.
        """
        meaning = Meaning.of(self.node.documents)
        unwritten = [True] * len(comparisons)
        may: list[_Mask] = []
        pages = self.zones.pages if meaning.measurable else None
        if meaning.measurable:
            fill = self._fill(meaning)
            unwritten = [bool(match(comparison, fill)[0]) for comparison in comparisons]
        if pages is not None and pages.meaning != meaning.digest:
            pages = None
        stored = None
        if pages is not None:
            may = self._of_pages(pages, meaning, comparisons, match)
            # If unwritten chunks match too, the plan has to know which chunks a page has.
            narrow = [one for one, fills in zip(may, unwritten, strict=True) if not fills]
            stored = self._paged(pages, may, narrow if alone else [])
        if stored is None:
            stored = _ChunksHere(self.array.chunks(self.node, self.region))
        table = stored.table
        if table is None:
            no = np.empty(0, np.int64)
            return stored, [Verdict(no, no > 0, no > 0, fills) for fills in unwritten]
        index = self.region.ravel(table.coords())
        known = np.zeros(len(index), np.bool_)
        keep = [np.ones(len(index), np.bool_) for _ in comparisons]
        if meaning.measurable:
            checked, entries = [*stored.pages], list[ZoneTable]()
            if stored.summed is None:
                entries = [*self.zones.recent, *self._recorded()]
                due = {} if pages is None else self._pages(pages, may, index, known, keep)
                read = read_pages(self.array.contents.context, pages, [*due]) if pages else {}
                checked = [zones for i, zones in read.items() if due[i]]
                entries += [zones for i, zones in read.items() if not due[i]]
            self._entries(table, entries, checked, meaning, comparisons, match, known, keep)
        judged = zip(keep, unwritten, strict=True)
        return stored, [Verdict(index, mask, known, fills) for mask, fills in judged]

    def _paged(
        self, pages: ZonePages, may: Sequence[_Mask], narrow: Sequence[_Mask]
    ) -> _ChunksHere | None:
        """The chunks that pages name, without those that `narrow` leaves out.

        None if there may be chunks that no page names.
        """
        contents = self.array.contents
        if contents.keys is not None or not self.region.size:
            return None  # a writer may have changes, and notes what it reads
        trusted = contents.guarded(
            lambda: paged_region(contents.view, self.node.node_id, self.region, self.zones)
        )
        if trusted is None:
            return None
        # Only of full pages it is known without reading them which chunks they have.
        unread = {
            i
            for i in trusted.summed.intersection(trusted.pages)
            if pages.pages[i].count == pages.pages[i].box.size and not all(one[i] for one in narrow)
        }
        due = [i for i in trusted.pages if i not in unread]
        read = read_pages(contents.context, pages, due)
        if len(read) < len(due):
            return None
        boxes = tuple((pages.pages[i].box, tuple(bool(one[i]) for one in may)) for i in unread)
        none = _ChunksHere(None, (), boxes, summed_bytes=trusted.summed_bytes)
        if not due:
            return none
        parts: list[tuple[IndexArray, IndexArray, _Mask, _Mask]] = []
        for i in due:
            addresses = read[i].addresses
            here = in_box(addresses, self.region)
            at = self.region.ravel(addresses.coords()[here])
            inline = addresses.kind[here] == RefKind.INLINE
            parts.append(
                (at, addresses.length[here], np.full(len(at), i in trusted.summed), inline)
            )
        index, length = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
        summed, inline = (np.concatenate([part[k] for part in parts]) for k in (2, 3))
        if not len(index):
            return none
        order = slice(None) if (np.diff(index) > 0).all() else np.argsort(index)
        index = index[order]
        dense = len(index) == self.region.size
        zero = np.broadcast_to(np.int64(0), index.shape)
        columns = (zero, zero, zero, zero, length[order], zero)
        table = ChunkTable(self.region, None if dense else index, *columns, (), b"")
        masks = summed[order], inline[order]
        return _ChunksHere(table, tuple(read.values()), boxes, *masks, trusted.summed_bytes)

    def _recorded(self) -> list[ZoneTable]:
        """Zone maps of changes that are not committed."""
        with self.array.contents.lock:
            return list(self.array.contents.changes.zones_of(self.node.node_id))

    def _entries(
        self,
        table: ChunkTable,
        entries: Sequence[ZoneTable],
        checked: Sequence[ZoneTable],
        meaning: Meaning,
        comparisons: Sequence[Comparison],
        match: _Match,
        known: _Mask,
        keep: Sequence[_Mask],
    ) -> None:
        """Judge chunks by the entries that count for them; those of `checked` are known to."""
        rows, bounds, places = [], [], []
        for number, zones in enumerate((*checked, *entries)):
            if zones.meaning != meaning.digest:
                continue
            coords = zones.coords()
            at = rows_at(table, coords)
            counts = at >= 0 if number < len(checked) else valid(zones, table)
            if counts.any():
                rows.append(at[counts])
                places.append(coords[counts])
                bounds.append(zones.bounds if counts.all() else zones.bounds.take(counts))
        if not rows:
            return
        joined, at = Bounds.joined(bounds), np.concatenate(rows)
        meta = _meta(self.node)
        hold = counts_hold(joined.cells, np.concatenate(places), meta.shape, meta.chunk_shape)
        ranges = self._ranges(joined, meaning, hold)
        if ranges is not None:
            known[at] |= ranges.known
            for comparison, mask in zip(comparisons, keep, strict=True):
                mask[at] &= match(comparison, ranges)

    def _of_pages(
        self,
        pages: ZonePages,
        meaning: Meaning,
        comparisons: Sequence[Comparison],
        match: _Match,
    ) -> list[_Mask]:
        """For each comparison, which pages may have a match."""
        whole = math.prod(_meta(self.node).chunk_shape)
        counts = np.array([page.count for page in pages.pages])
        ranges = self._ranges(pages.bounds, meaning, pages.bounds.cells == counts * whole)
        if ranges is None:
            return [np.ones(len(counts), np.bool_) for _ in comparisons]
        return [match(comparison, ranges) for comparison in comparisons]

    def _pages(
        self,
        pages: ZonePages,
        may: Sequence[_Mask],
        index: IndexArray,
        known: _Mask,
        keep: Sequence[_Mask],
    ) -> dict[int, bool]:
        """Judge chunks by the bounds of their pages.

        Returns the pages that have to be read, and whether all their entries count.
        """
        due = {
            i: self._counts(page)
            for i, page in enumerate(pages.pages)
            if page.box.overlaps(self.region)
        }
        left = np.logical_and.reduce(may)
        for i in [i for i, counts in due.items() if counts and not left[i]]:
            if not pages.pages[i].complete:
                continue
            rows = self._rows_in(index, pages.pages[i].box)
            known[rows] = True
            for mask, page in zip(keep, may, strict=True):
                mask[rows] &= page[i]
            del due[i]
        return due

    def _counts(self, page: ZonePage) -> bool:
        """Whether the chunks in the page's box are still those of its leaf."""
        contents, node_id = self.array.contents, self.node.node_id
        changes = contents.changes
        if page.leaf is None:
            return False
        changed = (changes.truncated, changes.tables, changes.chunks)
        if any(node_id in changes_of for changes_of in changed):
            return False
        for leaf in contents.view.index.placed_in(node_id, page.box):
            blob = leaf.manifest.blob
            if (blob.key, blob.crc32c) == page.leaf and _holds(leaf.part.box, page.box):
                overlay = contents.view.overlay(node_id, leaf.merged, page.box)
                newer = overlay.table
                untouched = newer is None or not in_box(newer, page.box).any()
                return untouched and overlay.truncated is None
        return False

    def _rows_in(self, index: IndexArray, box: Box) -> IndexArray:
        """The rows of the table in the box, which overlaps the region."""
        shared = box.shared(self.region)
        ends = [self.region.ravel_one(shared.lo)]
        ends.append(self.region.ravel_one(tuple(n - 1 for n in shared.hi)) + 1)
        start, stop = index.searchsorted(ends).tolist()
        coords = self.region.unravel(index[start:stop])
        inside = ((coords >= shared.lo) & (coords < shared.hi)).all(axis=1)
        return np.asarray(np.flatnonzero(inside) + start, np.int64)

    def _fill(self, meaning: Meaning) -> Ranges:
        """The values of chunks that are not stored."""
        fill = meaning.fill.reshape(1)
        missing = np.isin(fill, meaning.missing)
        if fill.dtype.kind in "SU":
            return Ranges.of_cells(fill, missing)
        values, null = _comparable(self.array.decoded(self.node, meaning.decodable(fill)))
        found = Ranges.of_cells(values, missing | null)
        if values.dtype.kind == "O" or self._is_rounded(values):
            return Ranges(values, values, found.bounded, found.nulls, np.zeros(1, np.bool_))
        return found

    def _is_rounded(self, decoded: _Values) -> bool:
        """Whether decoded times may lack fractions of a microsecond."""
        units = str(_attributes(self.node).get("units", ""))
        stored = Meaning.of(self.node.documents).stored
        return decoded.dtype.kind == "M" and (stored.kind != "i" or units.startswith("nano"))

    def _ranges(self, bounds: Bounds, meaning: Meaning, hold: _Mask) -> Ranges | None:
        """Decoded bounds; None if they cannot be decoded."""
        dtype, bounded = bounds.low.dtype, bounds.bounded
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
            values = self.array.decoded(self.node, meaning.decodable(np.concatenate(both)))
        except InvalidArgumentError:
            return None
        if values.dtype.kind not in "biufM":
            return None
        values, null = _comparable(values)
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


def _holds(box: Box, inner: Box) -> bool:
    return all(a <= b for a, b in zip(box.lo, inner.lo, strict=True)) and all(
        b <= a for a, b in zip(box.hi, inner.hi, strict=True)
    )
