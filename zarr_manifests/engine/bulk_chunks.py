"""Many chunks of an array at once: their locations in one step, and their bytes as a stream.

The snapshot's leaves and deltas of a box are merged as columns, with the session's changes on top;
no chunk is looked up by itself. Chunks are then read one window at a time: nearby ranges of one
object or file share a request, and the requests of a window run in parallel.

Invariants:

- A read returns what the session had when it was asked for, whatever the session does meanwhile.
- A referenced chunk that is missing or damaged is an error. A chunk that fails in a combined
  request is read once more by itself, which raises the precise error.
- In memory are at most a window of chunks (or one larger chunk), and one request for each thread
  that reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.chunks import ChunkReader
from zarr_manifests.engine.overlay import SessionView, better_error
from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    MissingChunkError,
    ObjectNotFoundError,
)
from zarr_manifests.format.chunk_table import (
    ChunkTable,
    InlineRef,
    NativeRef,
    RefKind,
    Unset,
    VirtualRef,
)
from zarr_manifests.format.manifest import Node
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import crc32c_of_each
from zarr_manifests.keys import directory
from zarr_manifests.planning.components import Reads
from zarr_manifests.planning.merge import pick, rows_at
from zarr_manifests.planning.regions import Bounds, cells_box, chunk_box, locate
from zarr_manifests.storage.protocol import RangeRequest, coalesce

if TYPE_CHECKING:
    from zarr_manifests.decoding import Chunks

_SPAN_BYTES: Final = 8 * 1024**2
_WINDOW_CHUNKS: Final = 16 * 1024
_MOST_NOTED: Final = 4096
"""Chunks of a box that are noted one by one as read."""
_MOST_SPARSE: Final = 64
"""Chunks of a box, for each that is looked up in it."""


def find_chunks(
    contents: SessionView,
    path: str,
    box: Sequence[Bounds] | Box | None,
    cells: Sequence[Bounds] | None,
    coords: IndexArray | None = None,
) -> tuple[Node, ChunkTable | None]:
    """The array, and its chunks that are in the box, hold any of the cells, or are at `coords`.

    Raises
    ------
    NotFoundError
        If there is no such array.
    InvalidArgumentError
        If box, cells or coordinates do not fit it, or more than one of them is given.
    """
    if sum(given is not None for given in (box, cells, coords)) > 1:
        raise InvalidArgumentError("give only one of box, cells and coords")

    def find() -> tuple[Node, ChunkTable | None]:
        node = contents.array_at(path)
        meta = node.array_meta
        if coords is not None:
            return node, _chunks_at(contents, node, meta.grid, coords)
        if cells is None:
            due = chunk_box(meta.grid, box)
        else:
            due = cells_box(meta.shape, meta.chunk_shape, cells)
        return node, _chunks_in(contents, node, due) if due.size else None

    return contents.guarded(find)


def stream_table(
    contents: SessionView, table: ChunkTable | None, *, gap_bytes: int, window_bytes: int
) -> Iterator[tuple[Coords, bytes]]:
    """The bytes of a table's chunks, none of them unset, in its order.

    Ranges are fetched together if no more than `gap_bytes` lie between them, and so many chunks at
    a time as have `window_bytes`.
    """
    if table is None:
        return iter(())
    # Here, not when the first chunk is asked for: the contents may have moved on by then.
    span_bytes = min(_SPAN_BYTES, window_bytes)
    fetch = ChunkFetch(contents, table, gap_bytes=gap_bytes, span_bytes=span_bytes)
    return _windows(fetch, table, window_bytes)


def _windows(
    fetch: ChunkFetch, table: ChunkTable, window_bytes: int
) -> Iterator[tuple[Coords, bytes]]:
    ends = np.cumsum(table.length)
    first = 0
    while first < len(table):
        before = int(ends[first - 1]) if first else 0
        stop = int(np.searchsorted(ends, before + window_bytes, side="right"))
        stop = min(max(stop, first + 1), first + _WINDOW_CHUNKS)
        rows = np.arange(first, stop)
        coords = table.box.unravel(rows if table.index is None else table.index[rows])
        for at, data in zip(coords.tolist(), fetch.read(rows), strict=True):
            yield tuple(at), data
        first = stop


def chunks_at_keys(
    contents: SessionView, found: ArrayKeys
) -> tuple[ChunkTable | None, IndexArray] | None:
    """The chunks of a box around these keys, and each key's row of them, -1 if it has no chunk.

    None if they lie too far apart in the array's grid. Chunks are recorded as read like by a
    look-up of each key.
    """
    coords = found.coords
    box = Box.around_coords(coords)
    if box.size > _MOST_SPARSE * len(coords):
        return None
    table = _chunks_in(contents, found.node, box, coords)
    rows = np.full(len(coords), -1, np.int64) if table is None else rows_at(table, coords)
    return table, rows


def array_keys(contents: SessionView, keys: Sequence[str]) -> ArrayKeys | None:
    """The array that all the keys are chunks of, and their coordinates; None if there is none."""
    stamp = contents.stamp
    found = contents.chunk_at(keys[0])
    if found is None or contents.has_arrays_below(found[0]):
        return None
    node, _ = found
    prefix, grid = directory(node.path), node.array_meta.grid
    start = len(prefix)
    rests = [key[start:] for key in keys if key.startswith(prefix)]
    if len(rests) < len(keys):
        return None
    coords = node.array_meta.chunk_keys.decode_all(rests, grid.ndim)
    if coords is None or not (coords < np.array(grid.hi, np.int64)).all():
        return None
    return ArrayKeys(node, coords, stamp)


class ArrayKeys(NamedTuple):
    """Keys of an array's chunks.

    Attributes
    ----------
    node : Node
        The array.
    coords : int64[n, ndim]
        The coordinates of each key.
    stamp : object
        The contents' stamp when the keys were looked up: they name these chunks while it stays.
    """

    node: Node
    coords: IndexArray
    stamp: object

    @property
    def in_order(self) -> bool:
        """Whether the chunks are in C order."""
        order = np.lexsort(self.coords.T[::-1])
        return bool((order[1:] > order[:-1]).all())

    def part(self, at: slice | Sequence[int]) -> ArrayKeys:
        """Some of the keys."""
        return self._replace(coords=self.coords[at])


def _chunks_at(
    contents: SessionView, node: Node, grid: Box, coords: IndexArray
) -> ChunkTable | None:
    """The chunks of an array at these coordinates that are there; None if there is none."""
    if coords.dtype.kind not in "iu" or coords.shape[1:] != (grid.ndim,):
        raise InvalidArgumentError(
            f"{coords!r} are not coordinates of chunks: give {grid.ndim} whole numbers for each"
        )
    coords = coords[grid.holds(coords)]
    table = _chunks_in(contents, node, Box.around_coords(coords)) if len(coords) else None
    return None if table is None else pick(table, coords)


def _chunks_in(
    contents: SessionView, node: Node, box: Box, read: IndexArray | None = None
) -> ChunkTable | None:
    """The chunks of an array in the box that are there; None if there is none.

    All of the box is recorded as read, or the chunks at the coordinates `read`.
    """
    with contents.lock:
        if contents.keys is not None and read is None:
            _note(contents.changes.reads, node.node_id, box)
        elif contents.keys is not None and read is not None:
            for coords in read.tolist():
                contents.note_read(node, tuple(coords))
    return contents.chunks(node, box)


def note_unchanged(contents: SessionView, node: Node, box: Box) -> bool:
    """Whether the session has changed no chunk of an array; if so, the box is recorded as read."""
    with contents.lock:
        changes = contents.changes
        changed = (changes.truncated, changes.tables, changes.chunks)
        if any(node.node_id in changes_of for changes_of in changed):
            return False
        if contents.keys is not None:
            _note(changes.reads, node.node_id, box)
    return True


def _note(reads: Reads, node_id: bytes, box: Box) -> None:
    """Note that the chunks of the box were read, or that there are none: commits may depend."""
    if box.size > _MOST_NOTED:
        reads.add(Reads(boxes={node_id: box}))
        return
    for coords in box.unravel(np.arange(box.size)).tolist():
        reads.note(node_id, tuple(coords))


class ChunkFetch:
    """Fetches rows of a table in few requests, and verifies each chunk.

    Parameters
    ----------
    contents : SessionView
        Whose chunks they are.
    table : ChunkTable
        The chunks, none of them unset.
    gap_bytes : int
        Ranges are fetched together if no more than this lies between them.
    span_bytes : int
        The longest request for more than one chunk.
    spare : float, optional
        Bytes that may lie in gaps, as a share of those of the chunks.
    cached : bool
        Whether chunks are taken from the chunk cache, and kept in it, if there is one.
    """

    def __init__(
        self,
        contents: SessionView,
        table: ChunkTable,
        *,
        gap_bytes: int,
        span_bytes: int,
        spare: float | None = None,
        cached: bool = False,
    ) -> None:
        self._context, self._keys = contents.context, contents.keys
        self._snapshot_id = contents.view.snapshot_id
        self._reader: ChunkReader = contents.reader
        self._table = table
        self._source, _ = locate(table)
        self._gap_bytes = gap_bytes
        self._span_bytes = span_bytes
        self._spare = spare
        self._cached = cached and contents.context.chunks is not None

    def read(self, rows: IndexArray) -> list[bytes]:
        """The chunks of these rows."""
        requests = self.requests(rows)
        calls = [request.send for request in requests]
        try:
            if self._context.storage.capabilities.inline and not self.is_remote(rows):
                fetched = [call() for call in calls]
            else:
                fetched = self._context.runtime.parallel(calls)
        except ManifestsError as error:
            better = better_error(self._context, self._snapshot_id, self._keys, error)
            if better is None:
                raise
            raise better from error
        chunks: dict[int, bytes] = {}
        for request, data in zip(requests, fetched, strict=True):
            each = map(bytes, data) if isinstance(data, np.ndarray) else data
            chunks.update(zip(request.members.tolist(), each, strict=True))
        return [chunks[at] for at in range(len(rows))]

    def requests(self, rows: IndexArray) -> list[Request]:
        """The requests that fetch these rows, each with the positions in `rows` that it fetches."""
        table, source = self._table, self._source[rows]
        found: list[Request] = []
        order = np.argsort(source, kind="stable")
        if self._cached:
            kept = {
                at: data for at in order.tolist() if (data := self._kept(int(rows[at]))) is not None
            }
            if kept:
                found.append(Request(np.array([*kept]), lambda: [*kept.values()]))
                order = order[[at not in kept for at in order.tolist()]]
            if len(kept) == len(rows):
                return found
        for alike in np.split(order, np.flatnonzero(np.diff(source[order])) + 1):
            here = rows[alike]
            if source[alike[0]] < 0:
                found.append(Request(alike, partial(self._inline, here)))
                continue
            if len(here) == 1:
                found.append(Request(alike, partial(self._each, here)))
                continue
            for part in coalesce(
                table.offset[here],
                table.length[here],
                gap_bytes=self._gap_bytes,
                span_bytes=self._span_bytes,
                spare=self._spare,
            ):
                members = np.array(part.members, np.int64)
                found.append(Request(alike[members], partial(self._fetch, here[members], part)))
        return found

    def _inline(self, rows: IndexArray) -> Chunks:
        refs = [self._table.ref(row) for row in rows.tolist()]
        return [ref.data for ref in refs if isinstance(ref, InlineRef)]

    def _fetch(self, rows: IndexArray, request: RangeRequest) -> Chunks:
        """The chunks of one request."""
        span = self._span(int(rows[0]), request) if len(rows) > 1 else None
        if span is None:
            return self._each(rows)
        table = self._table
        starts, lengths = table.offset[rows] - request.start, table.length[rows]
        if not self._cached and len(span) == request.length and _are_even(starts, lengths):
            even = np.frombuffer(span, np.uint8).reshape(len(rows), -1)
            if _are_sound(table, rows, list(even)).all():
                return even
        ends = (starts + lengths).tolist()
        chunks = [span[a:b] for a, b in zip(starts.tolist(), ends, strict=True)]
        sound = _are_sound(table, rows, chunks)
        for at in np.flatnonzero(~sound).tolist():
            chunks[at] = self._alone(int(rows[at]))
        if self._cached:
            for row, data in zip(rows.tolist(), chunks, strict=True):
                ref = table.ref(row)
                if isinstance(ref, NativeRef | VirtualRef):
                    self._reader.keep(ref, data)
        return chunks

    def is_remote(self, rows: IndexArray) -> bool:
        """Whether chunks of these rows are in files elsewhere that are read by requests."""
        virtual = rows[self._table.kind[rows] == RefKind.VIRTUAL]
        sources = np.unique(self._table.source[virtual]).tolist()
        return any(
            self._reader.virtual.is_remote(self._table.virtual[source]) for source in sources
        )

    def _kept(self, row: int) -> bytes | None:
        """The chunk in the cache, if it is there."""
        ref = self._table.ref(row)
        return self._reader.cached(ref) if isinstance(ref, NativeRef | VirtualRef) else None

    def _span(self, row: int, request: RangeRequest) -> bytes | None:
        """What the request gives; None if not all of it can be had."""
        ref = self._table.ref(row)
        try:
            if isinstance(ref, VirtualRef):
                span = self._reader.virtual.read_bytes(ref.source, request.start, request.length)
                return span if len(span) == request.length else None
            assert isinstance(ref, NativeRef)
            return self._context.storage.get(ref.key, request.start, request.length)
        except (ObjectNotFoundError, MissingChunkError, CorruptObjectError):
            return None  # chunk by chunk it is said which one cannot be had, and why

    def _each(self, rows: IndexArray) -> list[bytes]:
        return [self._alone(row) for row in rows.tolist()]

    def _alone(self, row: int) -> bytes:
        ref = self._table.ref(row)
        assert not isinstance(ref, Unset)
        return self._reader.read(ref, 0, ref.length)


class Request(NamedTuple):
    """A request for several chunks, not sent yet.

    Attributes
    ----------
    members : int64[n]
        Positions of its chunks in what was asked for.
    send : callable
        Returns their bytes, which are verified.
    """

    members: IndexArray
    send: Callable[[], Chunks]


def _are_even(starts: IndexArray, lengths: IndexArray) -> bool:
    """Whether ranges are of one length and follow one another."""
    length = int(lengths[0])
    return length > 0 and bool((lengths == length).all() and (np.diff(starts) == length).all())


def _are_sound(
    table: ChunkTable, rows: IndexArray, chunks: Sequence[bytes] | Sequence[npt.NDArray[np.uint8]]
) -> npt.NDArray[np.bool_]:
    """Which chunks are whole, and what their checksums say, if these are known."""
    number = len(chunks)
    native, length = table.kind[rows] == RefKind.NATIVE, table.length[rows]
    whole = np.fromiter(map(len, chunks), np.int64, number) == length
    whole &= native | (length > 0)
    known = native | (table.number[rows] == 1)
    sound = ~known | (crc32c_of_each(chunks) == table.crc32c[rows])
    return np.asarray(whole & sound)
