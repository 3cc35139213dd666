"""A request for chunks, as Zarr gives it to a codec pipeline, and how it is read or written.

Invariants:

- Nothing of a chunk is copied to the output before it is verified and decoded. A chunk that is
  stored as it lies in the output may be read straight into it; if it is damaged, zeros are left.
- All chunks of a request are of one snapshot. A reader that follows a branch reads the request
  again on the new head if its snapshot has expired.
- Chunks to write are merged with what is stored, encoded and recorded in parts. Of a part, all
  chunks are recorded in one step, or none.
- The parts before one that fails stay written, as chunks do where Zarr writes one by one.
- No call of this module still runs when it returns or raises.
- What is not known here raises `InDoubtError`, and Zarr has to do it all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace
from zarr.abc.codec import GetResult
from zarr.abc.store import Store
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import NDBuffer
from zarr.core.buffer.cpu import NDBuffer as CPUBuffer
from zarr.core.chunk_utils import ChunkTransform, chunk_is_empty, fill_value_or_default
from zarr.core.codec_pipeline import _resolve_max_workers
from zarr.storage import StorePath
from zarr.storage._utils import normalize_path

from zarr_manifests.decoding import BulkDecoder, Chunks, InDoubtError, gather, place
from zarr_manifests.engine.bulk_chunks import (
    ArrayKeys,
    ChunkFetch,
    Request,
    array_keys,
    chunks_at_keys,
)
from zarr_manifests.engine.chunks import SPARE
from zarr_manifests.engine.overlay import SessionView
from zarr_manifests.engine.workspace import INTERRUPTED, Workspace
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.ids import crc32c_of_each

if TYPE_CHECKING:
    from zarr_manifests.store import ManifestStore

type Results = tuple[GetResult, ...]
type _Values = npt.NDArray[Any]

_GAP_BYTES: Final = 64 * 1024
_SPAN_BYTES: Final = 1024**2
_FAR_SPAN_BYTES: Final = 4 * 1024**2
LARGE_BYTES: Final = 64 * 1024
"""From this size of a chunk on, several threads are faster than one."""
_PRESENT: Final = GetResult(status="present")
_MISSING: Final = GetResult(status="missing")
_START, _STOP, _STEP = attrgetter("start"), attrgetter("stop"), attrgetter("step")
_MOST_WHOLE_BYTES: Final = 64 * 1024**2
"""Larger shards are read part by part."""
_MOST_LOOKED_UP: Final = 16
"""Up to so many chunks are looked up one by one, which reads only the newest delta of each."""
_MOST_TAKEN: Final = 8
_MOST_COPIED_BYTES: Final = 2 * 1024**2
_STEP_BYTES: Final = 1024**2
"""Bytes that are merged and encoded at a time: a processor's cache holds them."""


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


class Batch(Struct, frozen=True):
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
    ) -> Batch:
        """The request.

        Raises
        ------
        InDoubtError
            If it is not known here.
        """
        array: Any = cells.as_ndarray_like() if type(cells) is CPUBuffer else None
        spec = items[0][1]
        if type(array) is not np.ndarray or array.dtype != spec.dtype.to_native_dtype():
            raise InDoubtError
        # All chunks of a regular grid have one specification.
        known = [item[0] for item in items if item[0].store is store and item[1] is spec]
        lazy = {type(path) for path in known} == {LazyPath}
        # What is not normalized is no key of a chunk.
        keys = [path.joined if lazy else path.path for path in known]
        if len(keys) < len(items) or not spec.shape:
            raise InDoubtError
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


def read(contents: SessionView, batch: Batch, decoder: BulkDecoder, *, few: bool) -> Results:
    """Read all chunks of the request; a few are looked up and fetched one by one."""
    how = _read_few if few else _read_many
    return contents.guarded(lambda: how(contents, batch, decoder))


def _read_few(contents: SessionView, batch: Batch, decoder: BulkDecoder) -> Results:
    results, straight = [], _is_straight(batch, decoder)
    for at, key in enumerate(batch.keys):
        entry = contents.find(key)
        if entry is None:
            batch.put_fill_value(at)
            results.append(_MISSING)
            continue
        room = batch.room(at) if straight else None
        if room is None or not contents.reader.read_into(entry, room):
            (values,) = decoder.values([contents.reader.read(entry, 0, entry.length)])
            batch.put(at, values)
        results.append(_PRESENT)
    return tuple(results)


def _read_many(contents: SessionView, batch: Batch, decoder: BulkDecoder) -> Results:
    at_keys = _known(array_keys(contents, batch.keys))
    coords, (table, rows) = at_keys.coords, _known(chunks_at_keys(contents, at_keys))
    due = np.flatnonzero(rows >= 0)
    corner = batch.corner(coords)
    if decoder.shards is not None and corner is None:
        raise InDoubtError
    reader, straight = contents.reader, _is_straight(batch, decoder)
    if table is not None and len(due):
        fetch = ChunkFetch(
            contents,
            table,
            gap_bytes=_GAP_BYTES,
            span_bytes=_SPAN_BYTES if contents.inline else _FAR_SPAN_BYTES,
            spare=None if contents.inline else SPARE,
            cached=True,
        )

        def take(request: Request) -> None:
            """Copy the chunks of a request."""
            at, size = due[request.members], decoder.batch_chunks
            if straight and len(at) == 1:
                number = int(at[0])
                room = batch.room(number)
                if room is not None and reader.read_into(table.ref(int(rows[number])), room):
                    return
            chunks = request.send()
            for i in range(0, len(at), size):
                _put(batch, decoder, corner, coords, at[i : i + size], chunks[i : i + size])

        requests = fetch.requests(rows[due])
        nbytes = math.prod(decoder.chunk_shape) * decoder.stored.itemsize
        inline = contents.inline and not fetch.is_remote(rows[due])
        threaded = nbytes >= LARGE_BYTES
        _run_all(contents, requests, take, inline=inline, threaded=threaded)
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
) -> None:
    """Decode the chunks of these numbers and copy them.

    `every` has the coordinates of all chunks of the request.
    """
    coords = every[numbers]
    if decoder.shards is not None:
        every_part = len(chunks) * math.prod(decoder.shards.counts)
        coords, chunks = decoder.shards.open(coords, chunks)
        if len(chunks) < every_part:
            for number in numbers.tolist():
                batch.put_fill_value(number)
        if not len(chunks):
            return
    values = decoder.values(chunks)
    if corner is not None and (len(numbers) > 1 or decoder.shards is not None):
        place(values, coords, batch.cells, corner)
    else:
        for number, cells in zip(numbers.tolist(), values, strict=True):
            batch.put(number, cells)


def _known[T](found: T | None) -> T:
    """What was found; it is for Zarr if nothing was."""
    if found is None:
        raise InDoubtError
    return found


def _run_all[Item](
    contents: SessionView,
    items: Sequence[Item],
    take: Callable[[Item], None],
    *,
    inline: bool,
    threaded: bool,
) -> None:
    """Call `take` with each item, in threads if a remote storage is asked, or if it is worth it."""
    parallel = contents.context.runtime.parallel
    if not inline:
        parallel([partial(take, item) for item in items])
        return
    threads = min(_resolve_max_workers(), len(items)) if threaded else 1  # as Zarr's fused pipeline
    if threads <= 1:
        for item in items:
            take(item)
        return
    # Each thread takes the next item when it is done with one, since one may be slowed down.
    due = iter(items)
    parallel([lambda: [*map(take, due)]] * threads)


# --- writing ---------------------------------------------------------------------------------


def write_batch(
    workspace: Workspace,
    batch: Batch,
    decoder: BulkDecoder,
    transform: ChunkTransform,
) -> None:
    """Write all chunks of the request."""
    found = _known(array_keys(workspace.contents, batch.keys))
    if len(set(batch.keys)) < len(batch.keys):
        raise InDoubtError
    nbytes, config = batch.chunk_bytes, workspace.context.config
    # Where a few chunks lie in the values need not be known: copied one by one, they are faster.
    total = len(batch.keys)
    few = total <= _MOST_TAKEN and 2 * total * nbytes < config.pack_bytes
    corner = None if few else batch.corner(found.coords)
    parts = _PartWriter(workspace, batch, decoder, transform, found, corner)
    # Threads are worth while for large chunks only, and then each takes one at a time. To copy a
    # few MB takes less time than to hand them over.
    most = max(config.pack_bytes // nbytes, 1)
    copied = not decoder.stages and nbytes * total <= _MOST_COPIED_BYTES
    large = nbytes >= LARGE_BYTES and not copied
    packed = config.inline_chunk_bytes < nbytes <= workspace.most_packed and not decoder.stages
    # Parts of equal size: none is left that is too small for a pack of its own.
    size = 1 if large and not packed else -(-total // -(-total // most))

    def put(start: int) -> None:
        part = range(start, min(start + size, total))
        if packed and 2 * len(part) * nbytes >= config.pack_bytes:
            parts.put_pack(part)
        else:
            parts.put(part)

    starts = range(0, total, size)
    inline = workspace.contents.inline
    try:
        _run_all(workspace.contents, starts, put, inline=inline, threaded=large)
    except KeyboardInterrupt:
        workspace.closed = INTERRUPTED
        raise


class _PartWriter:
    """The parts of a request, which are written one by one."""

    def __init__(
        self,
        workspace: Workspace,
        batch: Batch,
        decoder: BulkDecoder,
        transform: ChunkTransform,
        at: ArrayKeys,
        corner: Coords | None,
    ) -> None:
        self._workspace, self._batch, self._decoder = workspace, batch, decoder
        self._transform, self._at, self._corner = transform, at, corner
        self._step = max(_STEP_BYTES // batch.chunk_bytes, 1)

    def put(self, part: range) -> None:
        """Write these chunks."""
        batch, encoded = self._batch, list[bytes | memoryview | None]()
        for rows in self._steps(part):
            values = self._whole(rows.start) if len(rows) == 1 else None
            if values is None:
                values = np.empty((len(rows), *batch.spec.shape), batch.cells.dtype)
                self._fill(rows, values)
            encoded += self._encoded(values)
        self._workspace.set_chunks(*self._keys(part), encoded)

    def put_pack(self, part: range) -> None:
        """Write chunks that are not compressed as one object."""
        data = np.empty(len(part) * self._batch.chunk_bytes, np.uint8)
        values, chunks = self._in_stored_order(data, len(part)), data.reshape(len(part), -1)
        empty: list[int] = []
        checksums = np.empty(len(part), np.int64)
        for rows in self._steps(part):
            here = slice(rows.start - part.start, rows.stop - part.start)
            self._fill(rows, values[here])
            empty += [here.start + i for i in _empty(values[here], self._batch)]
            checksums[here] = crc32c_of_each(list(chunks[here]))
        keys, at = self._keys(part)
        if empty or not at.in_order:
            found = [None if i in empty else chunk.tobytes() for i, chunk in enumerate(chunks)]
            self._workspace.set_chunks(keys, at, found)
        else:
            self._workspace.set_pack(keys, at, memoryview(data), checksums)

    def _in_stored_order(self, data: npt.NDArray[np.uint8], number: int) -> _Values:
        """So many chunks in memory that is to be stored, of shape (chunks, *chunk shape)."""
        decoder = self._decoder
        shape = [self._batch.spec.shape[axis] for axis in decoder.order]
        back = np.argsort(decoder.order) + 1
        values = data.view(decoder.stored).reshape(number, *shape)
        return values.transpose(0, *back.tolist())

    def _steps(self, part: range) -> list[range]:
        return [part[i : i + self._step] for i in range(0, len(part), self._step)]

    def _keys(self, part: range) -> tuple[list[str], ArrayKeys]:
        here = slice(part.start, part.stop)
        return self._batch.keys[here], self._at.part(here)

    def _whole(self, number: int) -> _Values | None:
        """A chunk that is written wholly, without a copy; else None."""
        batch = self._batch
        if not batch.complete[number] or not batch.cells.ndim:
            return None
        chunk = batch.taken(number)
        return chunk[None] if chunk.shape == batch.spec.shape else None

    def _fill(self, part: range, values: _Values) -> None:
        """Fill in the new values of chunks, of shape (chunks, *chunk shape)."""
        batch, corner = self._batch, self._corner
        _, at = self._keys(part)
        if not batch.is_whole and (
            corner is None
            or not _are_inside(at.coords, batch.spec.shape, corner, batch.cells.shape)
        ):
            values[...] = fill_value_or_default(batch.spec)
            partial = np.flatnonzero([not batch.complete[i] for i in part])
            if len(partial):
                self._read_stored(part, partial, values)
        if corner is not None:
            gather(values, at.coords, batch.cells, corner)
        else:
            for number, chunk in zip(part, values, strict=True):
                batch.take(number, chunk)

    def _read_stored(self, part: range, rows: IndexArray, values: _Values) -> None:
        """Copy what is stored of chunks to their rows of the values."""
        batch, contents, count = self._batch, self._workspace.contents, len(rows)
        every = (slice(None),) * len(batch.spec.shape)
        stored = replace(
            batch,
            keys=[batch.keys[part[row]] for row in rows],
            selected=[every] * count,
            places=rows.tolist(),
            complete=[True] * count,
            cells=values,
            drop_axes=(),
        )
        few = contents.inline and count <= _MOST_LOOKED_UP
        read(contents, stored, self._decoder, few=few)

    def _encoded(self, values: _Values) -> list[bytes | memoryview | None]:
        """The bytes to store of each chunk; None if there are none."""
        spec, most = self._batch.spec, self._workspace.most_packed
        empty = _empty(values, self._batch)
        if not self._decoder.stages:
            axes = [axis + 1 for axis in self._decoder.order]
            each = values.transpose(0, *axes).astype(self._decoder.stored, copy=False)
            return [None if i in empty else _data(chunk, most) for i, chunk in enumerate(each)]
        found: list[bytes | memoryview | None] = []
        for i, chunk in enumerate(values):
            made = None if i in empty else self._transform.encode_chunk(CPUBuffer(chunk), spec)
            found.append(None if made is None else _data(made.as_numpy_array(), most))
        return found


def _are_inside(coords: IndexArray, shape: Coords, corner: Coords, size: Coords) -> bool:
    """Whether the chunks lie wholly in the box of cells from `corner` on."""
    lo = coords * np.array(shape, np.int64) - np.array(corner, np.int64)
    return bool((lo >= 0).all() and (lo + shape <= np.array(size)).all())


def _empty(values: _Values, batch: Batch) -> set[int]:
    """Which chunks have the fill value only, and need not be stored."""
    spec = batch.spec
    if spec.config.write_empty_chunks:
        return set()
    of_each: Any = (slice(None), *(0,) * len(spec.shape))
    first = values[of_each]
    # NaN is none of the values that equal the fill value.
    likely = (first == fill_value_or_default(spec)) | (first != first)
    candidates = np.flatnonzero(likely).tolist()
    return {i for i in candidates if chunk_is_empty(CPUBuffer(values[i]), spec)}


def _data(values: _Values, most_packed: int) -> bytes | memoryview:
    """Bytes of values; without a copy if they are written before the write returns."""
    if values.nbytes <= most_packed:
        return values.tobytes()
    return memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
