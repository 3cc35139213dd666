"""Counts, extremes, sums and means of an array's values, mostly from what is known of its chunks.

An answer has cells: one, or one for each label or group of labels along some dimensions. A chunk
all of whose values go to one cell is answered by its entry in the zone map; a leaf whose chunks all
go to one cell, by the bounds and sums of its page. Other chunks are read, and measured as entries
are made. Chunks that are not stored count as the fill value says.

Invariants: an entry answers only for the chunk, the meaning and the clip that it was made of; every
selected value counts once. Sums are those of stored values, and are unpacked at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import batched, product
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from zarr_manifests.decoding import REAL_CALENDARS, meaning_of_bounds, packing_of
from zarr_manifests.display import attributes_of
from zarr_manifests.engine.bulk_chunks import note_unchanged
from zarr_manifests.engine.change_set import ForkState
from zarr_manifests.engine.chunk_statistics import cell_weights
from zarr_manifests.engine.overlay import freeze_reader, revive_reader
from zarr_manifests.engine.zones import KnownZones, zones_of
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.zone_maps import NO_SUM, Bounds, sum_type
from zarr_manifests.grid import Box, IndexArray, clipped_cells, clips
from zarr_manifests.keys import split
from zarr_manifests.planning.meaning import Meaning
from zarr_manifests.planning.measure import (
    CellRuns,
    CellWeights,
    GroupedAxis,
    Rows,
    Totals,
    measure,
)
from zarr_manifests.planning.merge import rows_at, select
from zarr_manifests.planning.skipping import boxes_of, may_match
from zarr_manifests.planning.where import parse_where
from zarr_manifests.progress import expect, tell
from zarr_manifests.runtime import Run, need
from zarr_manifests.selecting import WhereArray, box_around
from zarr_manifests.store import ManifestStore

if TYPE_CHECKING:
    import xarray as xr

type _Values = npt.NDArray[Any]
_BLOCK_BYTES: Final = 32 << 20
_ABREAST: Final = 4
_FOR_TASKS: Final = 8
"""Fewer blocks are read here."""
_COLUMNS: Final = ("count", "missing", "min", "max", "sum", "mean", "weight")
_LOW: Final = 2**32 - 1
_ROUNDED: Final = 1e-13
"""Weights of cells that are not stored are a difference, which may be off by such a part."""


def summarize(
    store: ManifestStore,
    path: str,
    indexers: Mapping[str, Any] | str | None,
    by: str | Sequence[str] | None,
    weights: Mapping[str, Any] | None,
    branch: str | None = None,
    run: Run | None = None,
    along: Mapping[str, xr.DataArray] | None = None,
) -> Any:
    """The answer, as `Session.summarize` documents it, with the index of the branch.

    What indexers select from may be given by dimension: positions, with their labels.
    """
    need("summarize", "xarray", "xarray")
    array = WhereArray(store, path, decode_times=True)
    meaning = Meaning.of(array.node.documents)
    if not meaning.measurable or sum_type(meaning.dtype) is None:
        raise InvalidArgumentError(
            f"/{array.node.path} holds no numbers that can be summarized: read it with xarray"
        )
    kind = array.decoded(array.node, meaning.decodable(meaning.fill.reshape(1))).dtype.kind
    beside = (
        array.contents.members(split(array.node.path)[0]) if array.meta.shape[1:] == (2,) else {}
    )
    is_bounds = meaning_of_bounds(array.name, map(attributes_of, beside.values()))
    if kind in "mM" or is_bounds:
        raise InvalidArgumentError(f"/{array.node.path} holds times, which are not summarized")
    if kind in "iu" and not {"scale_factor", "add_offset"}.isdisjoint(attributes_of(array.node)):
        raise InvalidArgumentError(
            f"/{array.node.path} is packed by whole numbers, and decoded to such: write "
            "scale_factor and add_offset as floats, such as 2.0"
        )
    if not isinstance(indexers, Mapping | str | None):
        raise InvalidArgumentError(
            f"what is selected is a mapping, such as {{'lat': slice(60, 30)}}, or a text, not "
            f"{indexers!r:.80}"
        )
    found = None if weights is None else _weights(array, weights)
    chosen: Mapping[str, Any] = _chosen(array, indexers) if isinstance(indexers, str) else {}
    labels = {} if indexers is None or isinstance(indexers, str) else dict(indexers)
    axes, coords = _axes(array, chosen, labels, _by(by, array.dims), found, along)
    work = _Summary(array, meaning, axes, None if found is None else found.digest)
    work.find(branch, run)
    return work.answer(coords)


def _weights(array: WhereArray, given: Any) -> CellWeights:
    """The weights that are asked for."""
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(
            f"weights={type(given).__name__} is no mapping, such as {{'lat': 'cos'}}"
        )
    labelled = any(hasattr(said, "coords") for said in given.values())
    found = None if labelled else cell_weights(array.contents, array.node, given)
    if found is None:
        raise InvalidArgumentError(
            f"weights={given!r:.200} are none of /{array.node.path}, whose dimensions are "
            f"{_named(array)}: give for a dimension 'cos' of its coordinate in degrees, the name "
            "of a variable along it alone, without packing, or a number for each position, without "
            "labels; none is negative or missing"
        )
    return found


def _named(array: WhereArray) -> str:
    return ", ".join(map(str, array.dims)) or "none"


def _by(by: Any, dims: Sequence[str | None]) -> dict[str, str | None]:
    """What there are groups of, by dimension: of `time.month`, the `month` of `time`."""
    names = [by] if isinstance(by, str) else [] if by is None else by
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(f"by= names dimensions, such as 'time.month', not {by!r:.80}")
    found = dict[str, str | None]()
    for name in names:
        dim, _, part = name.partition(".")
        found |= {dim: part} if part and name not in dims else {name: None}
    if len(found) < len(names):
        raise InvalidArgumentError(f"by={by!r:.80} names a dimension twice: ask in two calls")
    return found


def _chosen(array: WhereArray, where: str) -> dict[str, npt.NDArray[np.bool_]]:
    """By dimension, the positions that a where selects."""
    found: dict[str, npt.NDArray[np.bool_]] = {}
    for comparison in parse_where(where).comparisons:
        axis = array.column(comparison.column)
        beside = array.beside(comparison.column)
        calendar = "" if beside is None else str(attributes_of(beside).get("calendar", ""))
        if calendar.lower() not in ("", *REAL_CALENDARS):
            raise InvalidArgumentError(
                f"times of the calendar {calendar!r} are not compared as text: give labels, as in "
                f"{{{comparison.column!r}: slice('2001-01', '2001-03')}}"
            )
        if not isinstance(axis, int):
            raise InvalidArgumentError(
                f"`{comparison.sql}` is about values: a summary takes comparisons of coordinates "
                f"along the dimensions of /{array.node.path}; on Spark, aggregate the rows of "
                "zarr_manifests.spark.read(..., where=...)"
            )
        fits = may_match(comparison, array.coordinate(comparison.column, axis), as_spark=True)
        dim = str(array.dims[axis])
        found[dim] = fits & found[dim] if dim in found else fits
    return found


def _axes(
    array: WhereArray,
    chosen: Mapping[str, npt.NDArray[np.bool_]],
    indexers: dict[str, Any],
    by: dict[str, str | None],
    weights: CellWeights | None,
    given: Mapping[str, xr.DataArray] | None,
) -> tuple[list[GroupedAxis], dict[str, Any]]:
    """What is selected along each axis, and the labels of the answer."""
    import xarray as xr

    dims = [str(dim) for dim in array.dims]
    for name in (*indexers, *by):
        if dims.count(name) != 1 or None in array.dims:
            raise InvalidArgumentError(
                f"/{array.node.path} has no dimension {name!r}; it has {_named(array)}"
            )
    axes, coords = list[GroupedAxis](), dict[str, Any]()
    meta = array.meta
    along = weights.along if weights is not None else (None,) * len(dims)
    for dim, size, chunk, its in zip(dims, meta.shape, meta.chunk_shape, along, strict=True):
        if given is None:
            labels = _labels(array, dim, size) if dim in indexers or dim in by else {}
            at = xr.DataArray(np.arange(size), labels, [dim])
        else:
            at = given[dim]
        if dim in chosen:
            at = at[chosen[dim]]
        if dim in indexers:
            at = _selected(at, dim, indexers[dim])
        places = np.atleast_1d(at.to_numpy())
        picked = given is not None or dim in indexers
        if picked and len(np.unique(places)) < len(places):
            what = f"{dim}={indexers[dim]!r}" if dim in indexers else f"the dataset's {dim!r}"
            raise InvalidArgumentError(f"{what} selects a position twice")
        named, codes, groups = None, np.zeros(len(places), np.int64), 1
        if dim in by:
            named, labels, codes = _grouped(at, dim, by[dim])
            if named in _COLUMNS or named in [axis.name for axis in axes]:
                raise InvalidArgumentError(
                    f"by={[*by]!r:.80}: the answer cannot have {named!r} twice; ask in two calls"
                )
            coords |= {} if labels is None else {named: labels}
            groups = len(places) if labels is None else len(labels)
        axes.append(GroupedAxis.of(named, places, codes, groups, size, chunk, its))
    return axes, coords


def _selected(at: xr.DataArray, dim: str, labels: Any) -> xr.DataArray:
    """The positions along a dimension that have these labels."""
    if isinstance(labels, tuple):
        raise InvalidArgumentError(
            f"{dim}={labels!r}: give slice(first, last) in the order of the labels, or the text "
            f"'{dim} BETWEEN low AND high'"
        )
    try:
        found = at.sel({dim: labels})
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{dim}={labels!r}: {error}") from error
    if found.dims not in ((), (dim,)):
        raise InvalidArgumentError(f"{dim}={labels!r}: give a list, a slice or one label")
    return found


def _labels(array: WhereArray, dim: str, size: int) -> dict[str, Any]:
    """The coordinate of a dimension by its name; nothing if there is none."""
    node = array.beside(dim)
    if node is None or node.array is None or node.array.shape != (size,):
        return {}
    return {dim: (dim, array.values(node))}


def _grouped(at: Any, dim: str, how: str | None) -> tuple[str, Any, IndexArray]:
    """The name and the labels of the groups along a dimension, and the group of each position."""
    import xarray as xr

    if at.ndim == 0:
        raise InvalidArgumentError(f"by={dim!r}: one label of it is selected, which has no groups")
    if how is None:
        return dim, at[dim].variable if dim in at.coords else None, np.arange(at.size)
    if dim not in at.coords or at[dim].isnull().any():
        what = "has no labels" if dim not in at.coords else "has positions without a label"
        raise InvalidArgumentError(f"by='{dim}.{how}': {dim!r} {what}")
    try:
        parts = getattr(at[dim].dt, how, None)
        if parts is not None and hasattr(parts, "to_numpy"):
            labels, codes = np.unique(parts.to_numpy(), return_inverse=True)
            return how, xr.Variable(how, labels), codes.astype(np.int64)
        whole = at.resample({dim: how})
        labels, codes = whole.count()[dim], np.zeros(at.size, np.int64)
        members = dict(whole.groups)
        for number, label in enumerate(labels.to_numpy()):
            codes[members.get(label, slice(0, 0))] = number
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"by='{dim}.{how}': give a part of a time, as in 'time.month', or a frequency of "
            "xarray, as in 'time.MS', along a dimension of times"
        ) from error
    return dim, labels.variable, codes


class _Summary:
    """One answer.

    Parameters
    ----------
    array : WhereArray
        The array.
    meaning : Meaning
        What its values mean.
    axes : sequence of GroupedAxis
        What is selected along each axis.
    digest : bytes, optional
        That of the weights of cells.
    """

    def __init__(
        self, array: WhereArray, meaning: Meaning, axes: Sequence[GroupedAxis], digest: bytes | None
    ) -> None:
        self._array, self._meaning, self._axes, self._digest = array, meaning, axes, digest
        self._shape = tuple(axis.groups for axis in axes)
        self._totals = Totals(meaning.dtype, math.prod(self._shape))
        self._zarr = array.opened(array.node)
        self._counts = dict.fromkeys(("chunks_answered", "chunks_read", "bytes_read"), 0)

    # --- from zone maps ---------------------------------------------------------------------------

    def find(self, branch: str | None, run: Run | None) -> None:
        """Find out everything that is asked for; `run` is for what is read."""
        region = box_around([axis.touched for axis in self._axes])
        if not region.size:
            return
        array, node_id = self._array, self._array.node.node_id
        known = zones_of(array.contents.context, array.contents.view, [node_id], branch)
        table = self._without_leaves(region, known)
        if table is None:
            return
        some = self._are("touched", table.coords())
        if not some.any():
            return
        table = select(table, some)
        with array.contents.lock:
            newer = list(array.contents.changes.zones_of(node_id))
        zones = known.counting(array.node, table, newer)
        rest = np.ones(len(table), np.bool_)
        if zones is not None:
            coords, bounds = zones.coords(), zones.bounds
            clip = clips(coords, array.meta.shape, array.meta.chunk_shape)
            counts = self._are("whole", coords) & (bounds.clip == clip) & ~_unknown(bounds.sums)
            cells = clipped_cells(clip, array.meta.chunk_shape)
            if self._digest is not None:
                bounds = self._weighted(bounds, coords, cells, self._digest)
                counts &= ~np.isnan(bounds.weights)
            if counts.any():
                self._answered(bounds.take(counts), coords[counts], cells[counts])
            rest[rows_at(table, coords[counts])] = False
        self._counts["chunks_read"] = int(rest.sum())
        self._counts["bytes_read"] = int(table.length[rest].sum())
        self._read(table.box.carried(table.linear_index()[rest], region), region, run)

    def _each(self, coords: IndexArray) -> Iterator[tuple[GroupedAxis, IndexArray]]:
        return zip(self._axes, coords.T, strict=True)

    def _are(self, what: str, coords: IndexArray) -> npt.NDArray[np.bool_]:
        """Which chunks are `whole` or `touched` along each axis."""
        masks = (getattr(axis, what)[at] for axis, at in self._each(coords))
        return reduce(np.logical_and, masks, np.ones(len(coords), np.bool_))

    def _codes(self, along: Sequence[IndexArray]) -> IndexArray:
        """The numbers of groups, from those along each axis."""
        if not along:
            return np.zeros(1, np.int64)
        return np.ravel_multi_index(tuple(along), self._shape)

    def _answered(self, bounds: Bounds, coords: IndexArray, cells: IndexArray) -> None:
        codes = self._codes([axis.code[at] for axis, at in self._each(coords)])
        covered = _product([axis.chunk_weight[at] for axis, at in self._each(coords)])
        self._totals.add(bounds, codes, cells, covered)
        self._counts["chunks_answered"] += len(bounds)

    def _weighted(
        self, bounds: Bounds, coords: IndexArray, cells: IndexArray, digest: bytes
    ) -> Bounds:
        """The entries with weighted sums, where these are known."""
        its = bounds.weighted_by(digest)
        even = _product([axis.even[at] for axis, at in self._each(coords)])
        known = ~np.isnan(its.weights)
        sums = np.where(known, its.weighted, bounds.sums * even)
        weights = np.where(known, its.weights, (cells - bounds.missing) * even)
        return replace(its, weighted=sums, weights=weights)

    def _without_leaves(self, region: Box, known: KnownZones) -> ChunkTable | None:
        """Answer leaves by their pages, and return the chunks that are left."""
        array, node = self._array, self._array.node
        pages = known.pages(node.node_id)
        if pages is None or pages.meaning != self._meaning.digest:
            return array.chunks(node, region)
        counts = (pages.bounds.clip == 0) & ~_unknown(pages.bounds.sums)
        if self._digest is not None:
            counts &= ~np.isnan(pages.bounds.weighted_by(self._digest).weights)
            counts &= [page.count == page.box.size for page in pages.pages]
        due = [counts[i] and self._is_one(page.box) for i, page in enumerate(pages.pages)]
        # What is asked for of each of these is all of it.
        some, rest = array.leaves(node, region, pages.pages, due)
        if some:
            listed = [pages.pages[i] for i in some]
            low = np.array([page.box.lo for page in listed], np.int64)
            codes = self._codes([axis.code[at] for axis, at in self._each(low)])
            chunks = np.array([page.count for page in listed], np.int64)
            bounds = pages.bounds.take(np.array(some))
            cells = chunks * math.prod(array.meta.chunk_shape)
            covered = [
                math.prod(
                    float(axis.chunk_weight[lo:hi].sum())
                    for axis, lo, hi in zip(self._axes, page.box.lo, page.box.hi, strict=True)
                )
                for page in listed
            ]
            self._totals.add(bounds, codes, cells, np.array(covered))
            self._counts["chunks_answered"] += int(chunks.sum())
        return rest

    def _is_one(self, box: Box) -> bool:
        """Whether all chunks of a box are selected wholly, for one group, and none is clipped."""
        meta = self._array.meta
        sides = zip(self._axes, box.lo, box.hi, meta.chunk_shape, meta.shape, strict=True)
        return all(
            hi * chunk <= size
            and bool(axis.whole[lo:hi].all())
            and len({*axis.code[lo:hi].tolist()}) == 1
            for axis, lo, hi, chunk, size in sides
        )

    # --- by reading -------------------------------------------------------------------------------

    def _read(self, index: IndexArray, region: Box, run: Run | None) -> None:
        """Read the chunks with these linear indexes in the region, and measure what is selected."""
        expect("reading", len(index))
        nbytes = math.prod(self._array.meta.chunk_shape) * self._meaning.stored.itemsize
        most, due = _BLOCK_BYTES // nbytes, boxes_of(index, region).tolist()
        boxes = [box for lo, hi in due for box in Box(tuple(lo), tuple(hi)).pieces(most)]
        contents, node = self._array.contents, self._array.node
        found = self._here(boxes)
        if (
            run is not None
            and len(boxes) >= _FOR_TASKS
            # Tasks see what is committed.
            and node.path not in contents.changes.nodes
            and note_unchanged(contents, node, region)
        ):
            what = freeze_reader(contents), node.path, self._axes, self._digest
            found = run(partial(_measured_elsewhere, *what), boxes)
        done = 0
        for box, rows in zip(boxes, found, strict=True):
            for row in rows:
                self._totals.add(*row)
            tell("reading", done := done + box.size)

    def _here(self, boxes: Sequence[Box]) -> Iterable[list[Rows]]:
        """What the blocks say, a few at a time."""
        parallel = self._array.contents.context.runtime.parallel
        for some in batched(boxes, _ABREAST):
            yield from parallel([partial(self.measured, box) for box in some])

    def measured(self, box: Box) -> list[Rows]:
        """What a block of chunks says: rows, their groups, and how many cells they have."""
        meta, along = self._array.meta, list[list[CellRuns]]()
        place, some = list[slice](), list[IndexArray | None]()
        for axis, lo, hi, chunk, size in zip(
            self._axes, box.lo, box.hi, meta.chunk_shape, meta.shape, strict=True
        ):
            cells, taken, parts = axis.parts(lo * chunk, min(hi * chunk, size))
            place.append(cells)
            some.append(taken)
            along.append(parts)
        values = self._meaning.compared(np.asarray(self._zarr[tuple(place)]))
        for number, at in enumerate(some):
            values = values if at is None else values.take(at, axis=number)
        found = list[Rows]()
        for pieces in product(*along):
            lengths, missing = [piece.length for piece in pieces], self._meaning.missing
            block = values[tuple(piece.cells for piece in pieces)]
            each, weights = zip(self._axes, pieces, strict=True), None
            if self._digest is not None:
                own = tuple(piece.weights if axis.is_weighted else None for axis, piece in each)
                weights = CellWeights(own, self._digest)
            rows = measure(block, lengths, missing, weights=weights)
            sums = rows.sums
            if sums.dtype.kind == "i" and (sums == NO_SUM).any():
                wide = np.where(np.isin(block, missing), block.dtype.type(0), block)
                halves = (measure(half, lengths, missing[:0]) for half in (wide >> 32, wide & _LOW))
                high, low = (half.sums.astype(object) for half in halves)
                sums = high * 2**32 + low
            codes = self._codes(_crossed([piece.codes for piece in pieces]))
            covered = _product(_crossed([piece.run_weights for piece in pieces]))
            found.append((rows, codes, clipped_cells(rows.clip, lengths), covered, sums))
        return found

    # --- the answer -------------------------------------------------------------------------------

    def answer(self, coords: Mapping[str, Any]) -> Any:
        """The answer as a dataset with these labels."""
        import xarray as xr

        totals = self._totals
        self._add_fill()
        count = totals.cells - totals.missing
        attributes = attributes_of(self._array.node)
        scale, offset = packing_of(attributes)
        low, high = self._ends()
        sums: _Values = totals.sums
        if sums.dtype.kind == "O":
            whole = sums.tolist()
            holding = np.uint64 if totals.low.dtype.kind == "u" else np.int64
            ends, either = np.iinfo(holding), {0, *whole}
            exact = low.dtype.kind != "f" and ends.min <= min(either) <= max(either) <= ends.max
            sums = np.array(whole, holding if exact else np.float64)
        if (scale, offset) != (1, 0):
            sums = sums * scale + offset * count
        dividend, divisor = sums, count.astype(np.float64)
        if self._digest is not None:
            dividend, divisor = totals.weighted * scale + offset * totals.weight, totals.weight
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(count > 0, dividend / divisor, np.nan)
        dims = [axis.name for axis in self._axes if axis.name is not None]
        shape = [axis.groups for axis in self._axes if axis.name is not None]
        units = {name: attributes[name] for name in ("units", "long_name") if name in attributes}
        columns = {"count": count, "missing": totals.missing, "min": low, "max": high}
        columns |= {"sum": sums, "mean": mean}
        columns |= {} if self._digest is None else {"weight": totals.weight}
        measured = ("min", "max", "mean")
        data = {
            name: (dims, one.reshape(shape), units if name in measured else {})
            for name, one in columns.items()
        }
        return xr.Dataset(data, coords, self._counts)

    def _add_fill(self) -> None:
        """Count the cells of chunks that are not stored."""
        totals, fill = self._totals, self._meaning.fill
        every = [np.bincount(axis.codes, minlength=axis.groups) for axis in self._axes]
        rest = reduce(np.multiply.outer, every, np.ones((), np.int64)).ravel() - totals.cells
        groups = np.flatnonzero(rest)
        rest, none = rest[groups], np.zeros(len(groups), np.int64)
        low, sums = np.full(len(groups), fill), np.zeros(len(groups), totals.sums.dtype)
        absent = rest if fill != fill or fill in self._meaning.missing else none
        if not absent.any():
            sums[:] = [fill.item() * n for n in rest.tolist()]
        nan = rest if fill != fill else none
        along = [np.bincount(axis.codes, axis.weights, axis.groups) for axis in self._axes]
        weight = _product(_crossed(along))[groups] - totals.covered[groups]
        weight = np.where((absent > 0) | (weight <= _ROUNDED * totals.covered[groups]), 0, weight)
        declared = np.where(weight, weight * float(fill), 0), weight
        unsaid = np.zeros(len(groups), sum_type(fill.dtype))
        made = Bounds(low, low, absent == 0, absent, nan, unsaid, none, *declared)
        totals.add(made, groups, rest, sums=sums)

    def _ends(self) -> tuple[_Values, _Values]:
        """The least and the greatest value of each group as xarray decodes them; NaN for none."""
        totals, node = self._totals, self._array.node
        both = self._meaning.decodable(np.concatenate([totals.low, totals.high]))
        one, other = np.split(self._array.decoded(node, both), 2)
        # With a negative scale, the least stored value is the greatest one.
        low, high = np.minimum(one, other), np.maximum(one, other)
        if not totals.bounded.all():
            wide = np.result_type(low.dtype, np.float32)
            low, high = (np.where(totals.bounded, end, np.nan).astype(wide) for end in (low, high))
        return low, high


def _measured_elsewhere(
    state: ForkState, path: str, axes: Sequence[GroupedAxis], digest: bytes | None, box: Box
) -> list[Rows]:
    """What a block of chunks says, measured in another process."""
    store = ManifestStore(revive_reader(state), read_only=True)
    array = WhereArray(store, path, decode_times=True)
    return _Summary(array, Meaning.of(array.node.documents), axes, digest).measured(box)


def _crossed(along: Sequence[_Values]) -> list[_Values]:
    """One value for each combination of those along some axes, in C order, by axis."""
    return [one.ravel() for one in np.meshgrid(*along, indexing="ij")]


def _product(along: Sequence[_Values]) -> _Values:
    return reduce(np.multiply, along, np.ones(1))


def _unknown(sums: _Values) -> npt.NDArray[np.bool_]:
    return np.isnan(sums) if sums.dtype.kind == "f" else sums == NO_SUM
