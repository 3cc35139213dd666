"""Zone maps made while arrays are written: bounds and counts of each chunk's stored values.

Only chunks that a write covers wholly have an entry, since the other values of a chunk are unknown
here. A chunk at the array's edge is whole if all its cells inside the array are written; Zarr then
fills the rest of it with the fill value. In a shard, what Zarr keeps beyond the edge is unknown.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from zarr_manifests.bulk import use_bulk
from zarr_manifests.bulk.here import write_here
from zarr_manifests.bulk.writing import watched
from zarr_manifests.engine.edit.record_zones import record_zones
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.format.zone_maps import Bounds
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.zones.meaning import Meaning
from zarr_manifests.planning.zones.measure import (
    LARGE_BYTES,
    PIECE_BYTES,
    ChunkMeasures,
    measure,
)

__all__ = ["ArrayTarget", "start_of"]

_LARGE_BYTES = LARGE_BYTES
"""Larger chunks are measured one by one: others are many, and measured faster together."""
_of_thread = threading.local()

type Place = EllipsisType | tuple[slice, ...]
"""Where values are written to; an ellipsis is all of the array."""


class ArrayTarget:
    """An array to write to, from any thread; what is written may be measured.

    Parameters
    ----------
    array : Array
        The array, in a store of the workspace. It is read and written in bulk from now on.
    workspace : Workspace
        Where the zone map is recorded.
    statistics : bool
        Whether to measure.
    """

    def __init__(
        self,
        array: zarr.Array[Any],
        workspace: Workspace,
        *,
        statistics: bool,
    ) -> None:
        use_bulk(array)
        self.array, self._workspace, self._dtype = array, workspace, array.dtype
        node = workspace.contents.array_at(array.path)
        assert node.array is not None
        self.meaning, self._meta = Meaning.of(node.documents), node.array
        self._measures = statistics and self.meaning.measurable and self.meaning.lossless
        self._measured: list[tuple[Box, IndexArray, Bounds]] = []
        self._chunks = self._no_chunks()
        self._pads = array.shards is None  # to the edge of a chunk

    def __dask_tokenize__(self) -> object:
        return type(self).__name__, self.array.path, id(self)

    def __setitem__(self, place: Place, values: Any) -> None:
        """Write encoded values, and measure them.

        Large chunks are measured just before they are encoded, if they are written in bulk.
        """
        block, box, whole = self._filled(place, values)
        if box is None:
            write_here(self.array, place, block)
            return
        found, compared = self._no_chunks(), self.meaning.compared
        watch = watched(lambda at, chunk: found.add(at, compared(chunk)))
        with watch if self._are_large(box) else nullcontext():
            write_here(self.array, place, block)
        if len(found) == box.size:
            self._measured.append(found.rows())
        else:
            self._measure(box, whole)

    def _measure(self, box: Box, whole: Any) -> None:
        meaning, chunk_shape = self.meaning, self._meta.chunk_shape
        values = meaning.compared(whole)
        if values.shape == chunk_shape and values.dtype.kind not in "SU":
            self._chunks.add(box.lo, values, _room())
            return
        bounds = measure(values, chunk_shape, meaning.fill, meaning.missing, _room())
        self._measured.append((box, np.arange(box.size, dtype=np.int64), bounds))

    def _no_chunks(self) -> ChunkMeasures:
        return ChunkMeasures(self.meaning.dtype, self.meaning.missing)

    def _are_large(self, box: Box) -> bool:
        """Whether each chunk is large, and wholly inside the array."""
        sides = zip(box.hi, self._meta.chunk_shape, self._meta.shape, strict=True)
        nbytes = math.prod(self._meta.chunk_shape) * self._dtype.itemsize
        large = nbytes > _LARGE_BYTES and self._dtype.kind not in "SU"
        return large and all(hi * n <= size for hi, n, size in sides)

    def _filled(self, place: Place, values: Any) -> tuple[Any, Box | None, Any]:
        """The values as they are stored, the chunks that they fill, and the values of these."""
        if not self._measures:
            return values, None, None
        block: Any = np.asarray(values).astype(self._dtype, copy=False)  # as Zarr would cast it
        parts = (slice(None),) * block.ndim if isinstance(place, EllipsisType) else place
        if block.ndim != len(parts):
            return block, None, None
        lo: Coords = ()
        hi: Coords = ()
        inside: tuple[slice, ...] = ()
        sides = zip(parts, block.shape, self._meta.shape, self._meta.chunk_shape, strict=True)
        for part, length, size, chunk in sides:
            start, stop, _ = part.indices(size)
            first = -(-start // chunk)
            to_edge = stop == size and self._pads
            behind = -(-stop // chunk) if to_edge else stop // chunk
            if length != stop - start or first >= behind:
                return block, None, None  # one value for many cells, or no whole chunk
            lo, hi = (*lo, first), (*hi, behind)
            inside = (*inside, slice(first * chunk - start, behind * chunk - start))
        return block, Box(lo, hi), block[(*inside, ...)]  # a view, even without axes

    def record(self) -> None:
        """Record what was measured, once all of it is written."""
        measured = self._measured
        if len(self._chunks):
            measured.append(self._chunks.rows())
        if not measured:
            return
        around, index, joined = measured[0]  # in order
        if len(measured) > 1:
            around = Box.around(box for box, _, _ in measured)
            index = np.concatenate([box.carried(rows, around) for box, rows, _ in measured])
            order = np.argsort(index)
            joined = Bounds.joined([bounds for _, _, bounds in measured]).take(order)
            index = index[order]
        where = self._workspace, self.array.path, around, self.meaning.digest
        record_zones(*where, joined, index)
        self._measured, self._chunks = [], self._no_chunks()


def start_of(place: Place | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Where a place in an array of that shape begins."""
    if place is None or isinstance(place, EllipsisType):
        return (0,) * len(shape)
    return tuple(part.indices(n)[0] for part, n in zip(place, shape, strict=True))


def _room() -> npt.NDArray[np.uint8]:
    """Memory that the thread keeps to measure in."""
    if not hasattr(_of_thread, "room"):
        _of_thread.room = np.empty(PIECE_BYTES, np.uint8)
    room: npt.NDArray[np.uint8] = _of_thread.room
    return room
