"""Reading a request's chunks: looked up, fetched, verified, decoded and copied in batches.

Invariants:

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
from functools import partial
from typing import Final

import numpy as np
import zarr
from zarr.abc.codec import GetResult

from zarr_manifests.bulk.batch import Batch
from zarr_manifests.decoding import BulkDecoder, Chunks, place
from zarr_manifests.engine.edit.bulk_chunks import ChunkFetch, Request, array_keys, chunks_at_keys
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.objects.coalescing import SPARE
from zarr_manifests.grid import Coords, IndexArray

type Results = tuple[GetResult, ...]

GAP_BYTES: Final = 64 * 1024
SPAN_BYTES: Final = 1024**2
_FAR_SPAN_BYTES: Final = 4 * 1024**2
LARGE_BYTES: Final = 64 * 1024
"""From this size of a chunk on, several threads are faster than one."""
_PRESENT: Final = GetResult(status="present")
_MISSING: Final = GetResult(status="missing")


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
