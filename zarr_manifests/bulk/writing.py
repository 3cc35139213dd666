"""Writing a request's chunks: merged with what is stored, encoded and recorded in parts.

Invariants:

- Of a part, all chunks are recorded in one step, or none.
- The parts before one that fails stay written, as chunks do where Zarr writes one by one.
- No call of this module still runs when it returns or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from zarr.core.buffer.cpu import NDBuffer as CPUBuffer
from zarr.core.chunk_utils import ChunkTransform, chunk_is_empty, fill_value_or_default

from zarr_manifests.bulk.batch import GAP_BYTES, LARGE_BYTES, SPAN_BYTES, Batch, run_all
from zarr_manifests.decoding import BulkDecoder, gather, lying
from zarr_manifests.engine.edit.bulk_chunks import (
    ArrayKeys,
    ChunkFetch,
    Request,
    array_keys,
    chunks_at_keys,
)
from zarr_manifests.engine.edit.workspace import INTERRUPTED, Workspace
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.ids import crc32c_of_each

type _Values = npt.NDArray[Any]
type _Watch = Callable[[Coords, _Values], object]

_MOST_LOOKED_UP: Final = 16
"""Up to so many chunks are looked up one by one, which reads only the newest delta of each."""
_MOST_TAKEN: Final = 8
_MOST_COPIED_BYTES: Final = 2 * 1024**2
_MOST_KEPT_BYTES: Final = 8 * 1024**2
_ROOMS: Final[list[npt.NDArray[np.uint8]]] = []
_STEP_BYTES: Final = 1024**2
"""Bytes that are merged and encoded at a time: a processor's cache holds them."""
_WATCH: Final[ContextVar[_Watch | None]] = ContextVar("zarr_manifests_watch", default=None)


@contextmanager
def watched(watch: Callable[[Coords, npt.NDArray[Any]], object]) -> Iterator[None]:
    """In the block, have `watch` called with each chunk that is written wholly and in bulk.

    It gets the chunk's coordinates and contiguous values just before these are encoded, which then
    finds them in the processor's cache. It is called from several threads, and for no chunk that
    is written otherwise.
    """
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def write_batch(
    workspace: Workspace,
    batch: Batch,
    decoder: BulkDecoder,
    transform: ChunkTransform,
    *,
    in_loop: bool,
) -> bool:
    """Write all chunks of the request; False if in doubt, and Zarr has to write it.

    `in_loop` says that the caller is an event loop, which must not block on an upload.
    """
    found = array_keys(workspace.contents, batch.keys)
    if found is None or len(set(batch.keys)) < len(batch.keys):
        return False
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

    def put(start: int) -> bool:
        part = range(start, min(start + size, total))
        if packed and 2 * len(part) * nbytes >= config.pack_bytes:
            return parts.put_pack(part)
        return parts.put(part, in_loop=in_loop)

    starts = range(0, total, size)
    inline = workspace.contents.inline
    try:
        return run_all(workspace.contents, starts, put, inline=inline, threaded=large)
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
        self._watch = _WATCH.get()

    def put(self, part: range, *, in_loop: bool) -> bool:
        """Write these chunks; False if in doubt."""
        batch, encoded = self._batch, list[bytes | memoryview | None]()
        for rows in self._steps(part):
            values = self._whole(rows.start) if len(rows) == 1 else None
            if values is None:
                values = np.empty((len(rows), *batch.spec.shape), batch.cells.dtype)
                if not self._fill(rows, values):
                    return False
            encoded += self._encoded(self._shown(rows, values))
        self._workspace.set_chunks(*self._keys(part), encoded, in_loop=in_loop)
        return True

    def put_pack(self, part: range) -> bool:
        """Write chunks that are not compressed as one object; False if in doubt."""
        lying = self._lying(part)
        with _room(len(part) * self._batch.chunk_bytes if lying is None else 0) as room:
            values = self._in_stored_order(room, len(part)) if lying is None else lying
            chunks = (room if lying is None else _bytes_of(lying)).reshape(len(part), -1)
            empty: list[int] = []
            checksums = np.empty(len(part), np.int64)
            for rows in self._steps(part):
                here = slice(rows.start - part.start, rows.stop - part.start)
                if lying is None and not self._fill(rows, values[here]):
                    return False
                seen = self._shown(rows, values[here])
                empty += [here.start + i for i in _empty(seen, self._batch)]
                checksums[here] = crc32c_of_each(list(chunks[here]))
            keys, at = self._keys(part)
            if empty or not at.in_order:
                found = [None if i in empty else data.tobytes() for i, data in enumerate(chunks)]
                self._workspace.set_chunks(keys, at, found)
            else:
                self._workspace.set_pack(keys, at, memoryview(_bytes_of(chunks)), checksums)
        return True

    def _lying(self, part: range) -> _Values | None:
        """The new values of chunks, if these lie in memory one after another as in a pack."""
        batch, corner = self._batch, self._corner
        if corner is None or not self._decoder.is_plain(batch.cells.dtype):
            return None
        return lying(batch.spec.shape, self._keys(part)[1].coords, batch.cells, corner)

    def _in_stored_order(self, room: npt.NDArray[np.uint8], number: int) -> _Values:
        """So many chunks in memory that is to be stored, of shape (chunks, *chunk shape)."""
        decoder = self._decoder
        shape = [self._batch.spec.shape[axis] for axis in decoder.order]
        back = np.argsort(decoder.order) + 1
        values = room.view(decoder.stored).reshape(number, *shape)
        return values.transpose(0, *back.tolist())

    def _shown(self, rows: range, values: _Values) -> _Values:
        """The values, contiguous if somebody watches, who has then seen the whole chunks."""
        if self._watch is None:
            return values
        values = np.ascontiguousarray(values)
        for row, chunk in zip(rows, values, strict=True):
            if self._batch.complete[row]:
                self._watch(tuple(self._at.coords[row].tolist()), chunk)
        return values

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

    def _fill(self, part: range, values: _Values) -> bool:
        """Fill in the new values of chunks, of shape (chunks, *chunk shape); False if in doubt."""
        batch, corner = self._batch, self._corner
        _, at = self._keys(part)
        if not batch.is_whole and (
            corner is None
            or not _are_inside(at.coords, batch.spec.shape, corner, batch.cells.shape)
        ):
            values[...] = fill_value_or_default(batch.spec)
            partial = np.flatnonzero([not batch.complete[i] for i in part])
            if len(partial) and not self._workspace.contents.guarded(
                lambda: self._read_stored(part, at, partial, values)
            ):
                return False
        if corner is not None:
            gather(values, at.coords, batch.cells, corner)
        else:
            for number, chunk in zip(part, values, strict=True):
                batch.take(number, chunk)
        return True

    def _read_stored(self, part: range, at: ArrayKeys, rows: IndexArray, values: _Values) -> bool:
        """Copy what is stored of chunks to their rows of the values; False if in doubt."""
        contents, decoder = self._workspace.contents, self._decoder
        if len(rows) > _MOST_LOOKED_UP:
            return _read_together(self._workspace, decoder, at, rows, values)

        def take(row: int) -> bool:
            entry = contents.find(self._batch.keys[part[row]])
            if entry is None:
                return True
            decoded = decoder.values([contents.reader.read(entry, 0, entry.length)])
            if decoded is not None:
                values[row] = decoded[0]
            return decoded is not None

        numbers = rows.tolist()
        return run_all(contents, numbers, take, inline=contents.inline, threaded=False)

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


@contextmanager
def _room(nbytes: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Memory for a pack, kept for the next one, since new memory takes as long as filling it."""
    try:
        room = _ROOMS.pop()
    except IndexError:
        room = np.empty(0, np.uint8)
    if len(room) < nbytes:
        room = np.empty(nbytes, np.uint8)
    try:
        yield room[:nbytes]
    finally:
        if not _ROOMS and nbytes <= _MOST_KEPT_BYTES:
            _ROOMS.append(room)


def _are_inside(coords: IndexArray, shape: Coords, corner: Coords, size: Coords) -> bool:
    """Whether the chunks lie wholly in the box of cells from `corner` on."""
    lo = coords * np.array(shape, np.int64) - np.array(corner, np.int64)
    return bool((lo >= 0).all() and (lo + shape <= np.array(size)).all())


def _read_together(
    workspace: Workspace, decoder: BulkDecoder, at: ArrayKeys, rows: IndexArray, values: _Values
) -> bool:
    """Copy what is stored of many chunks to their rows of the values; False if in doubt."""
    contents = workspace.contents
    found = chunks_at_keys(contents, at._replace(coords=at.coords[rows]))
    if found is None:
        return False
    table, stored = found
    due = np.flatnonzero(stored >= 0)
    if table is None or not len(due):
        return True
    fetch = ChunkFetch(contents, table, gap_bytes=GAP_BYTES, span_bytes=SPAN_BYTES, cached=True)

    def take(request: Request) -> bool:
        decoded = decoder.values(request.send())
        if decoded is None:
            return False
        values[rows[due[request.members]]] = decoded
        return True

    stored = stored[due]
    inline = contents.inline and not fetch.is_remote(stored)
    return run_all(contents, fetch.requests(stored), take, inline=inline, threaded=False)


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
    return memoryview(_bytes_of(np.ascontiguousarray(values)))


def _bytes_of(values: _Values) -> npt.NDArray[np.uint8]:
    return values.reshape(-1).view(np.uint8)
