"""A request for chunks, as Zarr gives it to a codec pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import NDBuffer
from zarr.core.buffer.cpu import NDBuffer as CPUBuffer
from zarr.core.chunk_utils import fill_value_or_default

from zarr_manifests.bulk.here import LazyPath
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.store import ManifestStore

_START, _STOP, _STEP = attrgetter("start"), attrgetter("stop"), attrgetter("step")
_MOST_WHOLE_BYTES: Final = 64 * 1024**2
"""Larger shards are read part by part."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks of one array, all of one shape, and what of them is read or written.

    Parameters
    ----------
    keys : list of str
        Their keys.
    spec : ArraySpec
        What Zarr says of each.
    selected, places : list of selections
        The cells of each chunk that are read or written, and where they are in `cells`.
    complete : list of bool
        Whether all cells of a chunk that lie inside the array are selected.
    cells : array
        The output, or the values to write.
    drop_axes : tuple of int
        Axes of a chunk that `cells` does not have.
    """

    keys: list[str]
    spec: ArraySpec
    selected: list[Any]
    places: list[Any]
    complete: list[bool]
    cells: npt.NDArray[Any]
    drop_axes: Coords

    @staticmethod
    def of(
        store: ManifestStore, items: Sequence[tuple[Any, ...]], cells: NDBuffer, drop_axes: Coords
    ) -> Batch | None:
        """The request; None if it is not known here."""
        if type(cells) is not CPUBuffer:
            return None
        array: Any = cells.as_ndarray_like()
        spec = items[0][1]
        if type(array) is not np.ndarray or array.dtype != spec.dtype.to_native_dtype():
            return None
        # All chunks of a regular grid have one specification.
        known = [item[0] for item in items if item[0].store is store and item[1] is spec]
        lazy = {type(path) for path in known} == {LazyPath}
        # What is not normalized is no key of a chunk.
        keys = [path.joined if lazy else path.path for path in known]
        if len(keys) < len(items) or not spec.shape:
            return None
        selected, places, complete = ([item[i] for item in items] for i in (2, 3, 4))
        return Batch(keys, spec, selected, places, complete, array, drop_axes)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk."""
        return math.prod(self.spec.shape) * self.cells.itemsize

    @property
    def wants_most(self) -> bool:
        """Whether at least half of the cells of these chunks are wanted, and fit in memory."""
        half = 2 * self.cells.size >= len(self.keys) * math.prod(self.spec.shape)
        return half and self.chunk_bytes <= _MOST_WHOLE_BYTES

    @property
    def is_whole(self) -> bool:
        """Whether all cells of these chunks are selected, beyond the array's edge too: of none."""
        cells = len(self.keys) * math.prod(self.spec.shape)
        return all(self.complete) and self.cells.size == cells

    def put(self, at: int, values: npt.NDArray[Any]) -> None:
        """Copy what is wanted of one chunk."""
        found = np.asanyarray(values[self.selected[at]])
        if self.drop_axes:
            kept = [n for axis, n in enumerate(found.shape) if axis not in self.drop_axes]
            found = found.reshape(kept)
        self.cells[self.places[at]] = found

    def room(self, at: int) -> memoryview | None:
        """The bytes of `cells` where one chunk goes, if all of it goes there in its own order."""
        part, place = self.selected[at], self.places[at]
        if not (isinstance(part, tuple) and isinstance(place, tuple)):
            return None
        if not all(isinstance(each, int) or _is_range(each) for each in part):
            return None
        if not all(map(_is_range, place)):
            return None
        cells = self.cells[(*place, ...)]  # a view, even without axes
        if cells.size != math.prod(self.spec.shape) or not cells.flags.c_contiguous:
            return None
        return memoryview(cells.reshape(-1).view(np.uint8))

    def put_fill_value(self, at: int) -> None:
        """Have the fill value where a chunk is absent."""
        self.cells[self.places[at]] = fill_value_or_default(self.spec)

    def taken(self, at: int) -> npt.NDArray[Any]:
        """The values to write of one chunk."""
        return np.asanyarray(self.cells[self.places[at]])

    def take(self, at: int, chunk: npt.NDArray[Any]) -> None:
        """Copy what is to be written of one chunk into it."""
        found = self.taken(at) if self.cells.ndim else self.cells
        if self.drop_axes and self.cells.ndim:
            axes = range(chunk.ndim)
            found = found[tuple(None if axis in self.drop_axes else slice(None) for axis in axes)]
        chunk[self.selected[at]] = found

    def corner(self, coords: IndexArray) -> Coords | None:
        """The cell of the array at which `cells` begins, if it is a box of all its axes; else None.

        The chunks' selections then follow from their coordinates, int64[n, ndim].
        """
        shape, found = self.spec.shape, []
        if self.drop_axes or self.cells.ndim != len(shape):
            return None
        try:
            if {*map(len, self.selected), *map(len, self.places)} != {len(shape)}:
                return None
            for axis, size in enumerate(self.cells.shape):
                parts, places = (
                    [each[axis] for each in of_each] for of_each in (self.selected, self.places)
                )
                start = _start(coords[:, axis], parts, places, shape[axis], size)
                if start is None:
                    return None
                found.append(start)
        except (AttributeError, TypeError, ValueError):  # not of slices only, one for each axis
            return None
        return tuple(found)


def _is_range(each: Any) -> bool:
    return isinstance(each, slice) and each.step in (None, 1)


def _start(
    numbers: IndexArray, parts: Sequence[slice], places: Sequence[slice], length: int, size: int
) -> int | None:
    """Where an axis of the output begins, from coordinates and selections; None if not a range."""
    if (numbers == numbers[0]).all():
        if parts.count(parts[0]) < len(parts) or places.count(places[0]) < len(places):
            return None
        numbers, parts, places = numbers[:1], parts[:1], places[:1]
    if parts.count(parts[0]) == len(parts):  # as they are of chunks that are selected wholly
        parts = parts[:1]
    if not {*map(_STEP, parts), *map(_STEP, places)} <= {None, 1}:
        return None
    given = [
        np.fromiter(map(bound, each), np.int64, len(each))
        for each in (places, parts)
        for bound in (_START, _STOP)
    ]
    firsts = numbers * length
    lo = int(firsts[0] + given[2][0] - given[0][0])
    from_cells, to_cells = np.maximum(firsts, lo), np.minimum(firsts + length, lo + size)
    due = from_cells - lo, to_cells - lo, from_cells - firsts, to_cells - firsts
    return lo if all((a == b).all() for a, b in zip(due, given, strict=True)) else None
