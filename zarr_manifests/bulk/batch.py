"""A request for chunks, as Zarr gives it to a codec pipeline, and how it is read in batches.

Invariants of reading:

- Nothing of a chunk is copied to the output before it is verified and decoded. A chunk that is
  stored as it lies in the output may be read straight into it; if it is damaged, zeros are left.
- All chunks of a request are of one snapshot. A reader that follows a branch reads the request
  again on the new head if its snapshot has expired.
- No call of this module still runs when it returns or raises.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.codec import GetResult
from zarr.abc.store import Store
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import NDBuffer
from zarr.core.buffer.cpu import NDBuffer as CPUBuffer
from zarr.core.chunk_utils import fill_value_or_default
from zarr.storage import StorePath
from zarr.storage._utils import normalize_path

from zarr_manifests.decoding import BulkDecoder, Chunks, place
from zarr_manifests.engine.edit.bulk_chunks import ChunkFetch, Request, array_keys, chunks_at_keys
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.objects.coalescing import SPARE
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.store import ManifestStore

type Results = tuple[GetResult, ...]

GAP_BYTES: Final = 64 * 1024
SPAN_BYTES: Final = 1024**2
_FAR_SPAN_BYTES: Final = 4 * 1024**2
LARGE_BYTES: Final = 64 * 1024
"""From this size of a chunk on, several threads are faster than one."""
_PRESENT: Final = GetResult(status="present")
_MISSING: Final = GetResult(status="missing")
_START, _STOP, _STEP = attrgetter("start"), attrgetter("stop"), attrgetter("step")
_MOST_WHOLE_BYTES: Final = 64 * 1024**2
"""Larger shards are read part by part."""


class LazyPath(StorePath):
    """An array's `StorePath`, below which Zarr makes one path for each chunk of a request.

    Normalizing them takes as long as reading 4 KB.

    Examples
    --------
    >>> from zarr.storage import MemoryStore
    >>> from zarr_manifests.bulk.batch import LazyPath
    >>> path = LazyPath(MemoryStore(), "a") / "c/0"
    >>> path.path, path.joined
    ('a/c/0', 'a/c/0')
    """

    __slots__ = ("joined",)

    def __init__(self, store: Store, path: str = "") -> None:
        self.store = store
        self.joined = path

    @property
    def path(self) -> str:  # type: ignore[override]  # an attribute there
        """The normalized path."""
        return normalize_path(self.joined)

    def __truediv__(self, other: str) -> LazyPath:
        return LazyPath(self.store, f"{self.joined}/{other}" if self.joined else other)


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


# --- reading ---------------------------------------------------------------------------------


def read_few(contents: SessionView, batch: Batch, decoder: BulkDecoder) -> Results | None:
    """Read a few chunks, which are looked up and fetched one by one; None if in doubt."""

    def read() -> Results | None:
        results, straight = [], _is_straight(batch, decoder)
        for at, key in enumerate(batch.keys):
            entry = contents.find(key)
            if entry is None:
                batch.put_fill_value(at)
                results.append(_MISSING)
                continue
            room = batch.room(at) if straight else None
            if room is not None and contents.reader.read_into(entry, room):
                results.append(_PRESENT)
                continue
            values = decoder.values([contents.reader.read(entry, 0, entry.length)])
            if values is None:
                return None
            batch.put(at, values[0])
            results.append(_PRESENT)
        return tuple(results)

    return contents.guarded(read)


def read_batch(contents: SessionView, batch: Batch, decoder: BulkDecoder) -> Results | None:
    """Read all chunks of the request; None if in doubt, and Zarr has to read it."""
    return contents.guarded(lambda: _read(contents, batch, decoder))


def _read(contents: SessionView, batch: Batch, decoder: BulkDecoder) -> Results | None:
    at_keys = array_keys(contents, batch.keys)
    found = None if at_keys is None else chunks_at_keys(contents, at_keys)
    if at_keys is None or found is None:
        return None
    coords, (table, rows) = at_keys.coords, found
    due = np.flatnonzero(rows >= 0)
    corner = batch.corner(coords)
    if decoder.shards is not None and corner is None:
        return None
    reader, straight = contents.reader, _is_straight(batch, decoder)
    if table is not None and len(due):
        fetch = ChunkFetch(
            contents,
            table,
            gap_bytes=GAP_BYTES,
            span_bytes=SPAN_BYTES if contents.inline else _FAR_SPAN_BYTES,
            spare=None if contents.inline else SPARE,
            cached=True,
        )

        def take(request: Request) -> bool:
            """Copy the chunks of a request; whether all could be decoded."""
            at, size = due[request.members], decoder.batch_chunks
            if straight and len(at) == 1:
                number = int(at[0])
                room = batch.room(number)
                if room is not None and reader.read_into(table.ref(int(rows[number])), room):
                    return True
            chunks = request.send()
            return all(
                _put(batch, decoder, corner, coords, at[i : i + size], chunks[i : i + size])
                for i in range(0, len(at), size)
            )

        requests = fetch.requests(rows[due])
        nbytes = math.prod(decoder.chunk_shape) * decoder.stored.itemsize
        inline = contents.inline and not fetch.is_remote(rows[due])
        threaded = nbytes >= LARGE_BYTES
        if not run_all(contents, requests, take, inline=inline, threaded=threaded):
            return None
    if len(due) == len(rows):
        return (_PRESENT,) * len(rows)
    for at in np.flatnonzero(rows < 0).tolist():
        batch.put_fill_value(at)
    return tuple([_PRESENT if row >= 0 else _MISSING for row in rows.tolist()])


def _is_straight(batch: Batch, decoder: BulkDecoder) -> bool:
    """Whether chunks are stored as they lie in an array, and worth being read straight into it."""
    return batch.chunk_bytes >= LARGE_BYTES and decoder.is_plain(batch.cells.dtype)


def _put(
    batch: Batch,
    decoder: BulkDecoder,
    corner: Coords | None,
    every: IndexArray,
    numbers: IndexArray,
    chunks: Chunks,
) -> bool:
    """Decode the chunks of these numbers and copy them; whether they could be decoded.

    `every` has the coordinates of all chunks of the request.
    """
    coords = every[numbers]
    if decoder.shards is not None:
        found = decoder.inner_chunks(coords, chunks)
        if found is None:
            return False
        if len(found[1]) < len(chunks) * math.prod(decoder.shards.counts):
            for number in numbers.tolist():
                batch.put_fill_value(number)
        coords, chunks = found
        if not len(chunks):
            return True
    values = decoder.values(chunks)
    if values is None:
        return False
    if corner is not None and (len(numbers) > 1 or decoder.shards is not None):
        place(values, coords, batch.cells, corner)
    else:
        for number, cells in zip(numbers.tolist(), values, strict=True):
            batch.put(number, cells)
    return True


def run_all[Item](
    contents: SessionView,
    items: Sequence[Item],
    take: Callable[[Item], bool],
    *,
    inline: bool,
    threaded: bool,
) -> bool:
    """Whether `take` returns true for every item.

    In threads if a remote storage is asked, or if the items are worth it.
    """
    parallel = contents.context.runtime.parallel
    if not inline:
        return all(parallel([partial(take, item) for item in items]))
    threads = min(_threads(), len(items)) if threaded else 1
    if threads <= 1:
        return all(map(take, items))
    # Each thread takes the next item when it is done with one, since one may be slowed down.
    due = iter(items)
    return all(parallel([lambda: all(map(take, due))] * threads))


def _threads() -> int:
    """As many as Zarr's fused pipeline uses."""
    given = zarr.config.get("codec_pipeline.max_workers", None)
    try:
        return max(int(given), 1)
    except (TypeError, ValueError):  # not set, or not a number, as Zarr takes it
        return os.cpu_count() or 1
