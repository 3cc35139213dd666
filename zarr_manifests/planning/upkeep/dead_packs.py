"""Which packs have too many dead bytes, and how their live chunks are rewritten.

A pack is an object with the bytes of many chunks. Bytes to which no chunk refers any more are dead.
A pack is identified by the session that wrote it and a number. All functions are pure and
vectorised over the columns of chunk tables.

Invariants:

- The live bytes of an object are the ranges that a row refers to; each range counts once, however
  many rows refer to it.
- Chunks that share a range still share one after the rewrite.
- When written, chunks of one array are next to each other, in order of coordinates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.virtual_sources import NO_SOURCES
from zarr_manifests.grid import Box
from zarr_manifests.ids import object_key
from zarr_manifests.planning.layout.batches import parts
from zarr_manifests.planning.tables.merge import select, take

type Column = npt.NDArray[np.int64]

_NUMBERS = 10**9
"""More than the objects of one session: source * _NUMBERS + number identifies an object."""


@dataclass(frozen=True, slots=True)
class Use:
    """The live part of a chunk object: the number of ranges, and their bytes."""

    chunks: int = 0
    nbytes: int = 0

    def plus(self, other: Use) -> Use:
        """The sum of both."""
        return Use(self.chunks + other.chunks, self.nbytes + other.nbytes)


@dataclass(frozen=True, slots=True)
class Range:
    """A byte range of a chunk in an object, its checksum, and its position in `PackMoves`."""

    key: str
    offset: int
    length: int
    crc32c: int
    at: int


def _objects(table: ChunkTable, rows: Column) -> Column:
    """A number for the object of each row, equal for the same object."""
    return np.asarray(table.source[rows] * _NUMBERS + table.number[rows])


def _key(table: ChunkTable, number: int) -> str:
    return object_key("chunks", table.sources[number // _NUMBERS], number % _NUMBERS)


def _distinct(columns: Sequence[Column]) -> tuple[Column, Column]:
    """The first row of each distinct combination, in order; and which of these each row is."""
    order = np.lexsort(columns[::-1])
    new = np.ones(len(order), np.bool_)
    if len(order):
        new[1:] = np.logical_or.reduce([c[order[1:]] != c[order[:-1]] for c in columns])
    which = np.empty(len(order), np.int64)
    which[order] = np.cumsum(new) - 1
    return order[new], which


def uses_of(table: ChunkTable) -> dict[str, Use]:
    """Return the live part of each chunk object that the table's rows refer to, by key."""
    rows = np.flatnonzero(table.kind == RefKind.NATIVE)
    named = _objects(table, rows)
    ranges, _ = _distinct([named, table.offset[rows], table.length[rows]])
    numbers, which = np.unique(named[ranges], return_inverse=True)
    lengths = table.length[rows][ranges]
    chunks, nbytes = np.bincount(which), np.zeros(len(numbers), np.int64)
    np.add.at(nbytes, which, lengths)
    return {
        _key(table, number): Use(count, size)
        for number, count, size in zip(
            numbers.tolist(), chunks.tolist(), nbytes.tolist(), strict=True
        )
    }


def due_packs(uses: Mapping[str, Use], sizes: Mapping[str, int], min_live: float) -> list[str]:
    """Return the keys of objects whose live fraction is below `min_live`, in order.

    An object of unknown size is never due.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.dead_packs import Use, due_packs
    >>> uses = {"chunks/a/0": Use(1, 40), "chunks/a/1": Use(9, 90), "chunks/a/2": Use(1, 1)}
    >>> due_packs(uses, {"chunks/a/0": 100, "chunks/a/1": 100}, 0.5)
    ['chunks/a/0']
    """
    return sorted(
        key for key, use in uses.items() if key in sizes and use.nbytes < min_live * sizes[key]
    )


def by_bytes(ranges: Iterable[Range], most_bytes: int) -> Iterator[list[Range]]:
    """Split the ranges, in order, into parts of at most `most_bytes`, or of one range."""
    return parts(ranges, lambda one: one.length, most_bytes)


class PackMoves:
    """The chunks to move out of some objects, and where they have been written.

    Parameters
    ----------
    tables : sequence of (bytes, ChunkTable)
        By node id: only the rows that refer to these objects (see `moved_rows`).

    Attributes
    ----------
    ranges : list of Range
        The distinct ranges that the rows refer to, by object and offset.
    order : int64[n]
        For each range, the position of the first row that refers to it.
    """

    def __init__(self, tables: Sequence[tuple[bytes, ChunkTable]]) -> None:
        self.tables = tables
        keys: dict[str, int] = {}
        named: list[Column] = []
        for _, table in tables:
            numbers, which = np.unique(_objects(table, np.arange(len(table))), return_inverse=True)
            places = [keys.setdefault(_key(table, n), len(keys)) for n in numbers.tolist()]
            named.append(np.array(places, np.int64)[which])
        columns = [np.concatenate(named) if named else np.zeros(0, np.int64)]
        for name in ("offset", "length", "crc32c"):
            one = [getattr(table, name) for _, table in tables]
            columns.append(np.concatenate(one) if one else np.zeros(0, np.int64))
        # Objects in order of their keys, so that what was written together is read together.
        listed = sorted(keys)
        rank = np.empty(len(listed), np.int64)
        rank[[keys[key] for key in listed]] = np.arange(len(listed))
        columns[0] = rank[columns[0]]
        self.order, self._which = _distinct(columns)
        values = zip(*(column[self.order].tolist() for column in columns), strict=True)
        self.ranges = [
            Range(listed[of], offset, length, crc, at)
            for at, (of, offset, length, crc) in enumerate(values)
        ]
        self._number = np.full(len(self.ranges), -1, np.int64)
        self._offset = np.zeros(len(self.ranges), np.int64)

    def note(self, at: int, number: int, offset: int) -> None:
        """Note that the writer has written this range to object `number` at `offset`."""
        self._number[at], self._offset[at] = number, offset

    def rows(self, source: str) -> list[tuple[bytes, ChunkTable, ChunkTable]]:
        """Return, by node id, the rows that have moved, before and after.

        `source` is the session that wrote the new objects.
        """
        found, start = [], 0
        for node_id, table in self.tables:
            which = self._which[start : start + len(table)]
            start += len(table)
            moved = self._number[which] >= 0
            if moved.any():
                old, at = select(table, moved), which[moved]
                found.append(
                    (node_id, old, _moved(old, source, self._number[at], self._offset[at]))
                )
        return found


def _moved(table: ChunkTable, source: str, number: Column, offset: Column) -> ChunkTable:
    zeros = np.zeros(len(table), np.int64)
    return replace(
        table,
        source=zeros,
        number=number,
        offset=offset,
        sources=(source,),
        inline=b"",
        virtual=NO_SOURCES,
    )


def moved_rows(table: ChunkTable, keys: Collection[str]) -> ChunkTable | None:
    """The rows that refer to objects with these keys; None if there are none."""
    rows = np.flatnonzero(table.kind == RefKind.NATIVE)
    numbers, which = np.unique(_objects(table, rows), return_inverse=True)
    wanted = np.array([_key(table, number) in keys for number in numbers.tolist()], np.bool_)
    if not wanted.any():
        return None
    rows = rows[wanted[which]]
    return take(table, rows, Box.around_coords(table.coords()[rows]))
