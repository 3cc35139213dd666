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
from typing import Final

import numpy as np

from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.history.follow import collected, expired
from zarr_manifests.engine.objects.chunks import ChunkReader
from zarr_manifests.engine.snapshot.view import check_axes
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
    StoredRef,
    Unset,
    VirtualRef,
)
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import crc32c
from zarr_manifests.planning.conflict.reads import Reads
from zarr_manifests.planning.tables.byte_ranges import RangeRequest, coalesce
from zarr_manifests.planning.tables.merge import Layer, fold, merge_layers, pick, within
from zarr_manifests.planning.tables.regions import Bounds, cells_box, chunk_box
from zarr_manifests.planning.tables.resolved_chunks import locate

__all__ = ["ChunkStream", "find_chunks", "stream_chunks"]

_SPAN_BYTES: Final = 8 * 1024**2
_WINDOW_CHUNKS: Final = 16 * 1024
_MOST_NOTED: Final = 4096
"""Chunks of a box that are noted one by one as read."""


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
        raise InvalidArgumentError("box, cells and coordinates of chunks exclude each other")

    def find() -> tuple[Node, ChunkTable | None]:
        node = contents.array_at(path)
        assert node.array is not None
        meta = node.array
        if coords is not None:
            return node, _chunks_at(contents, node, meta.grid, coords)
        if cells is None:
            due = chunk_box(meta.grid, box)
        else:
            due = cells_box(meta.shape, meta.chunk_shape, cells)
        return node, _chunks_in(contents, node, due) if due.size else None

    return contents.guarded(find)


def stream_chunks(
    contents: SessionView,
    path: str,
    box: Sequence[Bounds] | Box | None,
    cells: Sequence[Bounds] | None,
    coords: IndexArray | None,
    *,
    gap_bytes: int,
    window_bytes: int,
) -> ChunkStream:
    """The bytes of the chunks that `find_chunks` finds.

    Raises
    ------
    NotFoundError, InvalidArgumentError
        As `find_chunks`; the latter also if a number of bytes is out of range.
    """
    for name, value, least in (("gap_bytes", gap_bytes, 0), ("window_bytes", window_bytes, 1)):
        if type(value) is not int or value < least:
            raise InvalidArgumentError(f"{name} is a number from {least} on, not {value!r}")
    _, table = find_chunks(contents, path, box, cells, coords)
    return ChunkStream(contents, table, gap_bytes=gap_bytes, window_bytes=window_bytes)


def _chunks_at(
    contents: SessionView, node: Node, grid: Box, coords: IndexArray
) -> ChunkTable | None:
    """The chunks of an array at these coordinates that are there; None if there is none."""
    if coords.dtype.kind not in "iu" or coords.shape[1:] != (grid.ndim,):
        raise InvalidArgumentError(
            f"{coords!r} are not coordinates of chunks: give whole numbers, {grid.ndim} a chunk"
        )
    coords = coords[((coords >= 0) & (coords < np.array(grid.hi, np.int64))).all(axis=1)]
    table = _chunks_in(contents, node, Box.around_coords(coords)) if len(coords) else None
    return None if table is None else pick(table, coords)


def _chunks_in(contents: SessionView, node: Node, box: Box) -> ChunkTable | None:
    """The chunks of an array in the box that are there; None if there is none."""
    with contents.lock:
        view, changes = contents.view, contents.changes
        cut = changes.truncated.get(node.node_id)
        layers = [rows for rows in changes.tables.get(node.node_id, ()) if rows.box.overlaps(box)]
        single = _single(changes.chunks.get(node.node_id, {}), box)
        if contents.keys is not None:
            _note(changes.reads, node.node_id, box)
    stored = view.chunks_in(node.node_id, box)
    if stored is not None:
        check_axes(stored.box, box.ndim)
    if cut is None and not layers and not single:
        return stored
    tables = [within(changes.rows(rows), box) for rows in layers]
    if single:
        tables.append(ChunkTable.of(single))
    changed = merge_layers([Layer(cut, tuple(tables))])
    return fold([] if stored is None else [stored], changed)


def _single(refs: dict[Coords, StoredRef], box: Box) -> dict[Coords, StoredRef]:
    """Those of the refs, which were set one by one, that lie in the box."""
    if box.size >= len(refs):
        return {coords: ref for coords, ref in refs.items() if coords in box}
    inside = map(tuple, box.unravel(np.arange(box.size)).tolist())
    return {coords: refs[coords] for coords in inside if coords in refs}


def _note(reads: Reads, node_id: bytes, box: Box) -> None:
    """Note that the chunks of the box were read, or that there are none: commits may depend."""
    if box.size > _MOST_NOTED:
        reads.add(Reads(boxes={node_id: box}))
        return
    for coords in box.unravel(np.arange(box.size)).tolist():
        reads.note(node_id, tuple(coords))


class ChunkStream:
    """The bytes of a table's chunks, in its order; to be iterated once.

    Parameters
    ----------
    contents : SessionView
        Whose chunks they are.
    table : ChunkTable or None
        The chunks, none of them unset.
    gap_bytes : int
        Ranges are fetched together if no more than this lies between them.
    window_bytes : int
        Bytes of chunks that are fetched at a time.
    """

    def __init__(
        self,
        contents: SessionView,
        table: ChunkTable | None,
        *,
        gap_bytes: int,
        window_bytes: int,
    ) -> None:
        self._context = contents.context
        self._keys = contents.keys
        self._snapshot_id = contents.view.snapshot_id
        self._reader: ChunkReader = contents.reader
        self._storage = contents.context.storage
        self._table = table
        self._gap_bytes = gap_bytes
        self._window_bytes = window_bytes

    def __iter__(self) -> Iterator[tuple[Coords, bytes]]:
        table = self._table
        if table is None:
            return
        source, _ = locate(table)
        ends = np.cumsum(table.length)
        first = 0
        while first < len(table):
            before = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, before + self._window_bytes, side="right"))
            stop = min(max(stop, first + 1), first + _WINDOW_CHUNKS)
            rows = np.arange(first, stop)
            coords = table.box.unravel(rows if table.index is None else table.index[rows])
            found = self._window(table, source, rows)
            for at, data in zip(coords.tolist(), found, strict=True):
                yield tuple(at), data
            first = stop

    def _window(self, table: ChunkTable, source: IndexArray, rows: IndexArray) -> list[bytes]:
        """The chunks of these rows, which follow on each other."""
        parts: dict[int, bytes] = {}
        calls: list[Callable[[], list[tuple[int, bytes]]]] = []
        order = rows[np.argsort(source[rows], kind="stable")]
        for alike in np.split(order, np.flatnonzero(np.diff(source[order])) + 1):
            here = alike.tolist()
            if source[here[0]] < 0:
                parts.update((row, _inline(table, row)) for row in here)
                continue
            requests = coalesce(
                table.offset[alike].tolist(),
                table.length[alike].tolist(),
                gap_bytes=self._gap_bytes,
                span_bytes=min(_SPAN_BYTES, self._window_bytes),
            )
            calls += [partial(self._fetch, table, here, request) for request in requests]
        try:
            if self._storage.capabilities.inline:
                fetched = [call() for call in calls]
            else:
                fetched = self._context.runtime.parallel(calls)
        except ManifestsError as error:
            self._raise_better(error)
            raise
        for one in fetched:
            parts.update(one)
        return [parts[row] for row in rows.tolist()]

    def _fetch(
        self, table: ChunkTable, rows: Sequence[int], request: RangeRequest
    ) -> list[tuple[int, bytes]]:
        """The chunks of one request, each with its row."""
        members = [rows[member] for member in request.members]
        span = self._span(table, members[0], request) if len(members) > 1 else None
        if span is None:
            return [(row, self._alone(table, row)) for row in members]
        found = []
        for row in members:
            start = table.offset.item(row) - request.start
            data = span[start : start + table.length.item(row)]
            found.append((row, data if _is_sound(table, row, data) else self._alone(table, row)))
        return found

    def _span(self, table: ChunkTable, row: int, request: RangeRequest) -> bytes | None:
        """What the request gives; None if not all of it can be had."""
        ref = table.ref(row)
        try:
            if isinstance(ref, VirtualRef):
                whole = VirtualRef(ref.source, request.start, request.length)
                return self._reader.read(whole, 0, request.length)
            assert isinstance(ref, NativeRef)
            return self._storage.get(ref.key, request.start, request.length)
        except (ObjectNotFoundError, MissingChunkError, CorruptObjectError):
            return None  # chunk by chunk it is said which one cannot be had, and why

    def _alone(self, table: ChunkTable, row: int) -> bytes:
        ref = table.ref(row)
        assert not isinstance(ref, Unset)
        return self._reader.read(ref, 0, ref.length)

    def _raise_better(self, error: ManifestsError) -> None:
        """Raise what says more: that the snapshot has expired, or the session was too slow."""
        better: ManifestsError | None = expired(self._context, self._snapshot_id, error)
        if better is None and self._keys is not None:
            better = collected(self._context, self._keys, error)
        if better is not None:
            raise better from error


def _inline(table: ChunkTable, row: int) -> bytes:
    ref = table.ref(row)
    assert isinstance(ref, InlineRef)
    return ref.data


def _is_sound(table: ChunkTable, row: int, data: bytes) -> bool:
    """Whether the chunk is whole, and what its checksum says, if that is known."""
    if len(data) != table.length.item(row):
        return False
    known = table.kind.item(row) == RefKind.NATIVE or table.number.item(row) == 1
    return not known or crc32c(data) == table.crc32c.item(row)
