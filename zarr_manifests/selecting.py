"""Which chunks of an array may hold cells that a where selects.

Comparisons of coordinates are applied to their values, which are read. Comparisons of data are
applied to the bounds in zone maps, and no chunk is read. Bounds and coordinates are decoded by
xarray, as data is when it is read.

Leaves that no live delta touches, and whose chunks all have entries in pages, are judged by these
pages: their chunk tables are not read, and a page whose bounds exclude a match is not read either.
For all other chunks the chunk tables say which entries count. Where a session has changed chunks of
an array, it goes by chunk tables alone.

Invariants: an entry of a zone map counts only for the chunk and the meaning it was made of; chunks
without an entry that counts are selected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import zarr
from msgspec.structs import replace

from zarr_manifests.bulk import open_here, read_here
from zarr_manifests.decoding import decoded, decoded_by
from zarr_manifests.display import attributes_of
from zarr_manifests.engine.bulk_chunks import find_chunks, note_unchanged
from zarr_manifests.engine.overlay import SessionView
from zarr_manifests.engine.zones import KnownZones, paged_leaves, read_pages, zones_of
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import Node, grouped
from zarr_manifests.format.zone_maps import Bounds, ZonePage, ZoneTable
from zarr_manifests.grid import Box, IndexArray, clips
from zarr_manifests.keys import V2_ARRAY, V3_DOCUMENT
from zarr_manifests.planning.meaning import Meaning
from zarr_manifests.planning.merge import in_box, rows_at, select
from zarr_manifests.planning.skipping import Ranges, Verdict, comparable, may_match, plan_chunks
from zarr_manifests.planning.where import Comparison, parse_where, zone_of
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.runtime import need
from zarr_manifests.store import ManifestStore, contents_of

type _Mask = npt.NDArray[np.bool_]
type _Values = npt.NDArray[Any]

_US: Final = np.timedelta64(1, "us")
_CF: Final = frozenset(
    ["scale_factor", "add_offset", "_FillValue", "missing_value", "units", "_Unsigned", "dtype"]
)
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
    array = WhereArray(store, path, decode_times=decode_times)
    axes = [np.ones(n, np.bool_) for n in array.meta.grid.shape]
    match = partial(may_match, nan_matches=nan_matches, zone=zone)
    of_data = list[tuple[Node, list[Comparison]]]()
    for name, comparisons in grouped((one.column, one) for one in parsed.comparisons).items():
        found = array.column(name)
        if isinstance(found, Node):
            of_data.append((found, comparisons))
            continue
        cells = array.coordinate(name, found)
        # Readers differ in what NaN in a coordinate is, so it may match.
        fits = partial(may_match, nan_matches=cells.low.dtype.kind == "f", zone=zone)
        keep = np.logical_and.reduce([fits(one, cells) for one in comparisons])
        axes[found] &= _by_chunk(keep, array.meta.chunk_shape[found])
    region = box_around(axes)
    nodes = [node for node, _ in of_data]
    known = zones_of(
        array.contents.context, array.contents.view, [node.node_id for node in nodes], branch
    )
    verdicts: list[Verdict] = []
    out: list[Box] = []
    for node, comparisons in of_data:
        pruner = _Pruner(array, node, region, known, [partial(match, one) for one in comparisons])
        unread, verdict = pruner.judge(alone=len(nodes) == 1)
        verdicts.append(verdict)
        out += unread
    plan = plan_chunks(axes, region, verdicts, out)
    return ChunkSelection(
        path=f"/{array.node.path}",
        where=parsed.sql,
        shape=array.meta.shape,
        chunk_shape=array.meta.chunk_shape,
        dimensions=array.dims,
        boxes=plan.boxes,
        selected=plan.selected,
        left_out=plan.left_out,
        unknown=plan.unknown,
        data=tuple(f"/{node.path}" for node in nodes),
    )


def _by_chunk(cells: _Mask, chunk: int) -> _Mask:
    """Which chunks along an axis have a cell for which the mask is true."""
    starts = np.arange(0, len(cells), chunk)
    return np.logical_or.reduceat(cells, starts) if len(starts) else cells


def box_around(axes: Sequence[_Mask]) -> Box:
    """The smallest box around the chunks that are in all masks."""
    found = [np.flatnonzero(axis) for axis in axes]
    if not all(map(len, found)):
        return Box((0,) * len(axes), (0,) * len(axes))
    return Box(tuple(int(at[0]) for at in found), tuple(int(at[-1]) + 1 for at in found))


# --- the arrays that a where names -----------------------------------------------------------


class WhereArray:
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
        self._opened: dict[str, zarr.Array[Any]] = {}
        self.contents: SessionView = contents_of(store)
        self.node: Node = self.contents.array_at(path)
        self.meta = self.node.array_meta
        self._group, _, self.name = self.node.path.rpartition("/")
        self.dims = _dims(self.node)

    def chunks(self, node: Node, region: Box) -> ChunkTable | None:
        """The stored chunks of an array in the region."""
        return find_chunks(self.contents, node.path, region, None)[1]

    def leaves(
        self, node: Node, region: Box, pages: Sequence[ZonePage], due: Sequence[Any]
    ) -> tuple[list[int], ChunkTable | None]:
        """The pages that are due and describe leaves in the region, and the chunks in no other."""
        if not (pages and region.size and note_unchanged(self.contents, node, region)):
            return [], self.chunks(node, region)

        def find() -> tuple[list[int], ChunkTable | None]:
            view, node_id = self.contents.view, node.node_id
            found = [i for i in paged_leaves(view, node_id, region, pages) if due[i]]
            boxes = [pages[i].box for i in found]
            return found, view.chunks_in(node_id, region, without=boxes)

        return self.contents.guarded(find)

    def column(self, name: str) -> int | Node:
        """The axis that a column is a coordinate of, or the array that it is.

        Raises
        ------
        NotFoundError
            If there is no such column.
        """
        if name == self.name and self.dims != (self.name,):
            return self.node
        node = self.beside(name)
        if node is None or node.array is None:
            if name in self.dims:
                return self.dims.index(name)  # its positions
            raise NotFoundError(f"there is no column {name!r}; {self._columns()}")
        dims = _dims(node)
        if len(dims) == 1 and dims[0] in self.dims:
            axis = self.dims.index(dims[0])
            if node.array.shape == (self.meta.shape[axis],):
                return axis
        alike = (dims, node.array.shape, node.array.chunk_shape)
        if alike != (self.dims, self.meta.shape, self.meta.chunk_shape):
            raise InvalidArgumentError(
                f"{name!r} has other dimensions or chunks than {self.name!r}; {self._columns()}"
            )
        return node

    def _columns(self) -> str:
        dims = ", ".join(str(dim) for dim in self.dims if dim is not None) or "none"
        return (
            f"a where names /{self.node.path} itself, arrays beside it with the same dimensions "
            f"and chunks, and coordinates along one of its dimensions ({dims})"
        )

    def beside(self, name: str) -> Node | None:
        """What has that name in the array's group."""
        return self.contents.node(f"{self._group}/{name}".lstrip("/"))

    def coordinate(self, name: str, axis: int) -> Ranges:
        """The decoded values of a coordinate; positions from 0 on where there is none."""
        node, size = self.beside(name), self.meta.shape[axis]
        if size > _MOST_CELLS:
            raise InvalidArgumentError(
                f"{name!r} has {size} values, and at most {_MOST_CELLS} can be compared"
            )
        if node is None or node.array is None:
            return Ranges.of_cells(np.arange(size), np.zeros(size, np.bool_))
        return Ranges.of_cells(*comparable(self.values(node)))

    def opened(self, node: Node) -> zarr.Array[Any]:
        """An array, opened once."""
        if node.path not in self._opened:
            self._opened[node.path] = open_here(self._store, node.path)
        return self._opened[node.path]

    def values(self, node: Node) -> _Values:
        """All values of an array as xarray decodes them."""
        return self.decoded(node, read_here(self.opened(node)))

    def decoded(self, node: Node, stored: _Values) -> _Values:
        """Stored values as xarray decodes them.

        Raises
        ------
        ModuleNotFoundError
            If xarray is needed and not installed.
        InvalidArgumentError
            If xarray cannot decode them.
        """
        is_v2 = V3_DOCUMENT not in node.documents and V2_ARRAY in node.documents
        if stored.dtype.kind not in "biuf" or not (is_v2 or _CF & attributes_of(node).keys()):
            return stored
        if is_v2 and "_ARRAY_DIMENSIONS" not in attributes_of(node):
            raise InvalidArgumentError(
                f"/{node.path} has no _ARRAY_DIMENSIONS, so xarray cannot say what its values "
                "mean: set this attribute to a list of names"
            )
        need(f"/{node.path}, which has CF attributes,", "xarray", "xarray")
        how = decoded_by(self.opened(node))
        return decoded(f"/{node.path}", stored, how, decode_times=self._decode_times)


def _dims(node: Node) -> tuple[str | None, ...]:
    meta = node.array_meta
    return meta.dimension_names or (None,) * len(meta.shape)


def chosen_axes(index: str, shape: Sequence[int]) -> list[int | range]:
    """The position, or the positions, along each axis that an index means; all where it says none.

    Raises
    ------
    InvalidArgumentError
        If it means none, or a position or an axis that the array does not have.

    Examples
    --------
    >>> from zarr_manifests.selecting import chosen_axes
    >>> chosen_axes("-1,...,2:8:3", (10, 4, 20)), chosen_axes("0", (5, 2))
    ([9, range(0, 4), range(2, 8, 3)], [0, range(0, 2)])
    """
    parts = [part.strip() for part in index.split(",")] if index.strip() else []
    missing = len(shape) - len(parts) + parts.count("...")
    if parts.count("...") > 1 or missing < 0:
        raise InvalidArgumentError(
            f"index {index[:80]!r} has more parts than the array has axes, {len(shape)}"
        )
    at = parts.index("...") if "..." in parts else len(parts)
    parts[at : at + 1] = [":"] * missing
    return [_along(*one) for one in zip(range(len(shape)), parts, shape, strict=True)]


def _along(axis: int, text: str, length: int) -> int | range:
    try:
        numbers = [int(part) if part.strip() else None for part in text.split(":")]
        found: Any = range(length)[numbers[0] if len(numbers) == 1 else slice(*numbers)]  # type: ignore[index]
    except (IndexError, TypeError, ValueError):
        found = None
    if found is None or (isinstance(found, range) and found.step < 1):
        raise InvalidArgumentError(
            f"{text[:80]!r} is no index of axis {axis}, which has {length} cells: write 3, -1, "
            "10:20, :10 or 10:200:5"
        )
    return cast("int | range", found)


# --- stored chunks -------------------------------------------------------------------------------


class _Pruner:
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
        The zone maps.
    comparisons : sequence of callable
        What must hold: each says which ranges may have a match.
    """

    def __init__(
        self,
        array: WhereArray,
        node: Node,
        region: Box,
        zones: KnownZones,
        comparisons: Sequence[Callable[[Ranges], _Mask]],
    ) -> None:
        self._array, self._node, self._region, self._zones = array, node, region, zones
        self._comparisons = comparisons
        self._meaning = meaning = Meaning.of(node.documents)
        self._unwritten = not meaning.measurable or bool(self._match(self._fill())[0])
        pages = zones.pages(node.node_id)
        usable = pages is not None and meaning.measurable and pages.meaning == meaning.digest
        self._listed = pages if usable else None
        self._pages: tuple[ZonePage, ...] = () if self._listed is None else self._listed.pages
        self._may = self._of_pages()

    def judge(self, *, alone: bool) -> tuple[list[Box], Verdict]:
        """Boxes full of chunks whose page cannot match, and what is said of all other chunks.

        `alone` says that no other array is compared, so pages may stay unread.
        """
        context = self._array.contents.context
        for by_pages in (True, False):
            pages = self._pages if by_pages else ()
            paged, table = self._array.leaves(self._node, self._region, pages, [True] * len(pages))
            unread = self._unread(paged) if alone else set()
            named = [i for i in paged if i not in unread]
            others = [
                i
                for i, page in enumerate(self._pages)
                if table is not None and i not in paged and page.box.overlaps(self._region)
            ]
            due = [*named, *others]
            read = read_pages(context, self._listed, due) if self._listed and due else {}
            if all(i in read for i in named):
                break  # else as if there were no pages
        rest = self._unjudged(table)
        if table is not None and self._meaning.measurable:
            contents, newer = self._array.contents, [read[i] for i in others if i in read]
            with contents.lock:
                newer += contents.changes.zones_of(self._node.node_id)
            entries = replace(self._zones, pointers={}).counting(self._node, table, newer)
            if entries is not None:
                self._apply(rest, rows_at(table, entries.coords()), entries.bounds)
        parts = [rest, *self._judged_pages([read[i] for i in named])]
        index, match, known = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("index", "match", "known")
        )
        order = np.argsort(index, kind="stable")  # parts are in order
        verdict = Verdict(index[order], match[order], known[order], self._unwritten)
        return [self._pages[i].box for i in unread], verdict

    def _unjudged(self, table: ChunkTable | None) -> Verdict:
        """The chunks of a table, any of which may match."""
        index = np.empty(0, np.int64)
        if table is not None:
            index = table.box.carried(table.linear_index(), self._region)
        every = np.ones(len(index), np.bool_)
        return Verdict(index, every, ~every, self._unwritten)

    def _unread(self, paged: Sequence[int]) -> set[int]:
        """The pages that cannot match, if it is known without reading them which chunks they have.

        If unwritten chunks match too, the plan has to know which chunks a page has.
        """
        return {
            i
            for i in paged
            if self._pages[i].count == self._pages[i].box.size
            and self._pages[i].box.shared_size(self._region) == self._pages[i].count
            and not (self._unwritten or self._may[i])
        }

    # --- pages that are known to count ------------------------------------------------------------

    def _judged_pages(self, tables: Iterable[ZoneTable]) -> list[Verdict]:
        """The chunks of pages, all of whose entries count."""
        parts = []
        for zones in tables:
            at, bounds = zones.addresses, zones.bounds
            if at.box.shared_size(self._region) != at.box.size:
                inside = in_box(at, self._region)
                at, bounds = select(at, inside), bounds.take(inside)
            part = self._unjudged(at)
            self._apply(part, np.arange(len(at)), bounds)
            parts.append(part)
        return parts

    # --- bounds -----------------------------------------------------------------------------------

    def _apply(self, chunks: Verdict, rows: IndexArray, bounds: Bounds) -> None:
        """Judge these rows by their bounds."""
        meta, coords = self._node.array_meta, self._region.unravel(chunks.index[rows])
        ranges = self._ranges(bounds, bounds.clip == clips(coords, meta.shape, meta.chunk_shape))
        if ranges is not None:
            chunks.known[rows] |= ranges.known
            chunks.match[rows] &= self._match(ranges)

    def _of_pages(self) -> _Mask:
        """Which pages may have a match."""
        ranges = None
        if self._listed is not None:
            ranges = self._ranges(self._listed.bounds, self._listed.bounds.clip == 0)
        return np.ones(len(self._pages), np.bool_) if ranges is None else self._match(ranges)

    def _match(self, ranges: Ranges) -> _Mask:
        """Which rows may match all comparisons."""
        masks = [comparison(ranges) for comparison in self._comparisons]
        return np.asarray(np.logical_and.reduce(masks))

    def _fill(self) -> Ranges:
        """The values of chunks that are not stored."""
        meaning = self._meaning
        fill = meaning.fill.reshape(1)
        missing = np.isin(fill, meaning.missing)
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
        """Decoded bounds; None if they cannot be decoded.

        Chunks for which `hold` is false may have other cells in the array now, of any values.
        """
        meaning, dtype = self._meaning, bounds.low.dtype
        low, high, bounded = bounds.low, bounds.high, bounds.bounded
        nullable = bool(len(meaning.missing)) or meaning.dtype.kind in "fmM"
        nulls = (bounds.missing > 0) & nullable
        if dtype != meaning.dtype:
            return None
        if not bounded.any():
            return Ranges(low, high, bounded, nulls, hold)
        # Rows without values have any bounds.
        some = low[np.argmax(bounded)]
        both = [np.where(bounded, ends, some) for ends in (low, high)]
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
        known = hold & (~bounded | ~np.logical_or(*np.split(null, 2)))
        if self._is_rounded(values):
            # Beyond these, microseconds overflow.
            unit = np.ones(1, values.dtype).astype("M8[us]").view(np.int64)
            most = 2**62 // max(int(unit[0]), 1)
            known = known & (low.view(np.int64) > -most) & (high.view(np.int64) < most)
            epoch = np.zeros(1, values.dtype)
            low, high = np.where(known, low, epoch), np.where(known, high, epoch)
            low, high = low - _US, high + _US
        return Ranges(low, high, bounded, nulls, known)
