"""Entries of zone maps against chunk tables: which of them count, and how they combine.

An entry counts for a coordinate if the chunk there has exactly the entry's address. Whatever
happened between (commits, compactions, resets) cannot make an entry wrong: it makes it useless.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate, groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.virtual_sources import VirtualSources
from zarr_manifests.format.zone_maps import HASH_BYTES, PAGE_ROWS, Bounds, ZoneTable
from zarr_manifests.planning.tables.merge import (
    Layer,
    aligned,
    merge_layers,
    pick,
    rows_at,
    same_rows,
    select,
    split,
    without_unused_sessions,
)

_COMPARED: Final = ("kind", "source", "number", "offset", "length", "crc32c")


def zones_of_chunks(meaning: bytes, table: ChunkTable, bounds: Bounds) -> ZoneTable | None:
    """The entries of the chunks in a table; row i of `bounds` describes row i of `table`.

    None if no chunk can have one. A chunk in a file elsewhere has none if nothing tells the file's
    versions apart: neither etag, nor modification time, nor a checksum of the chunk.
    """
    known = _identified(table)
    if not known.any():
        return None
    return ZoneTable(meaning, _addresses(select(table, known)), bounds.take(known))


def _identified(table: ChunkTable) -> npt.NDArray[np.bool_]:
    """Rows whose address tells their chunk from all others."""
    known: npt.NDArray[np.bool_] = table.kind != RefKind.UNSET
    virtual = table.kind == RefKind.VIRTUAL
    if virtual.any():
        dated = _dated(table.virtual)[np.where(virtual, table.source, 0)]
        known &= ~virtual | dated | (table.number == 1)
    return known


def _dated(files: VirtualSources) -> npt.NDArray[np.bool_]:
    """Files with an etag or a modification time."""
    dated: npt.NDArray[np.bool_] = files.modified_ms >= 0
    return dated | np.array([bool(etag) for etag in files.etags]) if files.etags else dated


def _addresses(table: ChunkTable) -> ChunkTable:
    """The table with addresses only: hashes of inline chunks, no checksums of native ones."""
    inline = np.flatnonzero(table.kind == RefKind.INLINE)
    crc = np.where(table.kind == RefKind.VIRTUAL, table.crc32c, 0)
    if not len(inline):
        return replace(table, crc32c=crc)
    offset, length = table.offset.copy(), table.length.copy()
    places = zip(offset[inline].tolist(), length[inline].tolist(), strict=True)
    hashes = [
        blake2b(table.inline[at : at + n], digest_size=HASH_BYTES).digest() for at, n in places
    ]
    offset[inline], length[inline] = np.arange(len(inline)) * HASH_BYTES, HASH_BYTES
    return replace(table, crc32c=crc, offset=offset, length=length, inline=b"".join(hashes))


def valid(zones: ZoneTable, table: ChunkTable | None) -> npt.NDArray[np.bool_]:
    """Which entries describe the chunk that `table` has at their coordinate (bool[n])."""
    count = np.zeros(len(zones), np.bool_)
    if table is None or table.box.ndim != zones.box.ndim:
        return count
    if same_rows(zones.addresses, table):  # as those of chunks that were written together have
        due = known = _identified(table)
    else:
        coords = zones.coords()
        # Only these rows are looked at, since there may be many others. Both are in C order.
        table = without_unused_sessions(pick(table, coords))
        known = _identified(table)
        rows = rows_at(table, coords)
        due = rows >= 0
        due[due] = known[rows[due]]
    if not due.any():
        return count
    mine, its = aligned(select(zones.addresses, due), _addresses(select(table, known)))
    same = np.ones(len(mine), np.bool_)
    inline = mine.kind == RefKind.INLINE
    for name in _COMPARED:
        equal = getattr(mine, name) == getattr(its, name)
        # Where the hash lies is no part of the address.
        same &= (equal | inline) if name == "offset" else equal
    both = inline & same
    if both.any():
        same[both] = (_hashes(mine, both) == _hashes(its, both)).all(axis=1)
    count[due] = same
    return count


def _hashes(addresses: ChunkTable, rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    hashes = np.frombuffer(addresses.inline, np.uint8).reshape(-1, HASH_BYTES)
    return hashes[addresses.offset[rows] // HASH_BYTES]


def taken(zones: ZoneTable, keep: npt.NDArray[np.bool_]) -> ZoneTable | None:
    """The entries for which `keep` is true; None if it is for none."""
    if keep.all():
        return zones
    if not keep.any():
        return None
    return ZoneTable(zones.meaning, select(zones.addresses, keep), zones.bounds.take(keep))


def merged(tables: Sequence[ZoneTable]) -> ZoneTable:
    """Entries of one meaning and one type in one table, oldest first: the newest of each chunk."""
    if len(tables) == 1:
        return tables[0]
    addresses = merge_layers([Layer(None, tuple(zones.addresses for zones in tables))]).table
    assert addresses is not None  # no table is empty
    coords = addresses.coords()
    # Number the rows of all tables through, and find the row of each coordinate in the newest.
    starts = accumulate((len(zones) for zones in tables), initial=0)
    rows = np.zeros(len(addresses), np.int64)
    for zones, start in zip(tables, starts, strict=False):
        at = rows_at(zones.addresses, coords)
        rows = np.where(at >= 0, at + start, rows)
    bounds = Bounds.joined([zones.bounds for zones in tables]).take(rows)
    return ZoneTable(tables[0].meaning, addresses, bounds)


def like(zones: ZoneTable, other: ZoneTable) -> bool:
    """Whether the entries can be merged: one meaning, one type, as many axes."""
    return _alike(zones) == _alike(other)


def _alike(zones: ZoneTable) -> tuple[bytes, str, int]:
    dtype = zones.bounds.low.dtype
    # Texts of any length go together.
    return zones.meaning, "text" if dtype.kind == "S" else dtype.str, zones.box.ndim


def merged_by_node(tables: Sequence[tuple[bytes, ZoneTable]]) -> list[tuple[bytes, ZoneTable]]:
    """Entries by node, oldest first, in one table for each node, meaning and type."""

    def group(one: tuple[bytes, ZoneTable]) -> tuple[bytes, tuple[bytes, str, int]]:
        return one[0], _alike(one[1])

    groups = groupby(sorted(tables, key=group), key=group)
    return [(key[0], merged([zones for _, zones in same])) for key, same in groups]


def in_pages(zones: ZoneTable) -> Iterator[ZoneTable]:
    """The entries in tables of at most `PAGE_ROWS`, in boxes that do not overlap."""
    if len(zones) <= PAGE_ROWS:
        yield zones
        return
    start = 0
    for part in split(zones.addresses, PAGE_ROWS):
        stop = start + len(part)
        yield ZoneTable(zones.meaning, part, zones.bounds.take(slice(start, stop)))
        start = stop
