"""Which chunks of an array may hold cells that a where selects.

Comparisons of coordinates are applied to their values, which are read. Comparisons of data are
applied to the bounds in zone maps, and no chunk is read. Bounds and coordinates are decoded by
xarray, as data is when it is read. Invariants: an entry of a zone map counts only for the chunk
and the meaning it was made of; chunks without an entry that counts are selected.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr

from zarr_manifests.display import fields_of
from zarr_manifests.engine.edit.bulk_chunks import find_chunks
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.snapshot.zones import KnownZones, read_pages, zones_of
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.format.chunk_table import ChunkTable
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
    tables = {node.node_id: array.chunks(node, region) for node in (array.node, *nodes.values())}
    verdicts: list[Verdict] = []
    for name, comparisons in of_data.items():
        node = nodes[name]
        stored = _WhereChunks(array, node, region, tables[node.node_id])
        for comparison, verdict in stored.verdicts(comparisons, known[node.node_id], match):
            absent = 0 if verdict.unwritten else region.size - len(verdict.index)
            reasons[comparison.sql] = int((~verdict.match).sum()) + absent
            verdicts.append(verdict)
    plan = plan_chunks(axes, region, verdicts)
    table = tables[array.node.node_id]
    sizes = (0, 0)
    if table is not None:
        chosen = plan.chosen(region.ravel(table.coords()))
        sizes = int(table.length.sum()), int(table.length[chosen].sum())
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
class _WhereChunks:
    """The stored chunks of an array in a region, to be judged by its zone map."""

    array: _WhereArray
    node: Node
    region: Box
    table: ChunkTable | None

    def verdicts(
        self, comparisons: Sequence[Comparison], zones: KnownZones, match: _Match
    ) -> Iterable[tuple[Comparison, Verdict]]:
        """What each comparison says of the chunks."""
        meaning = Meaning.of(self.node.documents)
        unwritten = [True] * len(comparisons)
        if meaning.measurable:
            fill = self._fill(meaning)
            unwritten = [bool(match(comparison, fill)[0]) for comparison in comparisons]
        if self.table is None:
            no = np.empty(0, np.int64)
            none = [Verdict(no, no > 0, no > 0, may) for may in unwritten]
            return zip(comparisons, none, strict=True)
        index = self.region.ravel(self.table.coords())
        known = np.zeros(len(index), np.bool_)
        keep = [np.ones(len(index), np.bool_) for _ in comparisons]
        if meaning.measurable:
            entries = list(zones.recent) + self._recorded()
            checked: list[ZoneTable] = []
            if zones.pages is not None and zones.pages.meaning == meaning.digest:
                due = self._pages(zones.pages, meaning, comparisons, match, index, known, keep)
                read = read_pages(self.array.contents.context, zones.pages, [*due])
                checked = [table for i, table in read.items() if due[i]]
                entries += [table for i, table in read.items() if not due[i]]
            self._entries(entries, checked, meaning, comparisons, match, known, keep)
        found = [
            Verdict(index, *one, may)
            for one, may in zip(((mask, known) for mask in keep), unwritten, strict=True)
        ]
        return zip(comparisons, found, strict=True)

    def _recorded(self) -> list[ZoneTable]:
        """Zone maps of changes that are not committed."""
        with self.array.contents.lock:
            return list(self.array.contents.changes.zones_of(self.node.node_id))

    def _entries(
        self,
        entries: Sequence[ZoneTable],
        checked: Sequence[ZoneTable],
        meaning: Meaning,
        comparisons: Sequence[Comparison],
        match: _Match,
        known: _Mask,
        keep: Sequence[_Mask],
    ) -> None:
        """Judge chunks by the entries that count for them; those of `checked` are known to."""
        assert self.table is not None
        rows, bounds, places = [], [], []
        for number, zones in enumerate((*checked, *entries)):
            if zones.meaning != meaning.digest:
                continue
            coords = zones.coords()
            at = rows_at(self.table, coords)
            counts = at >= 0 if number < len(checked) else valid(zones, self.table)
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

    def _pages(
        self,
        pages: ZonePages,
        meaning: Meaning,
        comparisons: Sequence[Comparison],
        match: _Match,
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
        whole = math.prod(_meta(self.node).chunk_shape)
        counts = np.array([page.count for page in pages.pages])
        ranges = self._ranges(pages.bounds, meaning, pages.bounds.cells == counts * whole)
        if ranges is None:
            return due
        may = [match(comparison, ranges) for comparison in comparisons]
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
