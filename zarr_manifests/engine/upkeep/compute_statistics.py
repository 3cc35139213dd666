"""Zone maps of chunks that are there already, made by decoding them.

Leaf by leaf, and then what live deltas have besides, the chunks without an entry are read, decoded
and measured, in parallel and a limited number of bytes at a time; here, or in tasks, which get
references of chunks and return entries. Entries go to pages: of a leaf where the leaf has the
chunk, else to pages without leaf. Invariants: chunks with an entry that counts are not read; every
entry has the address of the chunk that was decoded, so whatever others commit meanwhile makes it
useless at most; the swap changes nothing but the branch's index.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import batched
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.decoding import BulkDecoder
from zarr_manifests.engine.bulk_chunks import stream_table
from zarr_manifests.engine.change_set import ForkState
from zarr_manifests.engine.chunk_statistics import cell_weights
from zarr_manifests.engine.objects import SessionKeys
from zarr_manifests.engine.overlay import SessionView, freeze_reader, revive_reader
from zarr_manifests.engine.roots import opened
from zarr_manifests.engine.totals import totals_of
from zarr_manifests.engine.view import Context
from zarr_manifests.engine.zones import KnownZones, add_to_index, write_pages
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.manifest import Node
from zarr_manifests.format.zone_maps import Bounds, ZonePages, ZoneTable
from zarr_manifests.grid import Box, Coords, clips
from zarr_manifests.keys import V2_ARRAY, V3_DOCUMENT, ArrayMeta
from zarr_manifests.planning.garbage import parts
from zarr_manifests.planning.meaning import Meaning, in_pages, merged, taken, valid, zones_of_chunks
from zarr_manifests.planning.measure import CellWeights, measure
from zarr_manifests.planning.merge import rows_at, select, split
from zarr_manifests.planning.tables import PlacedLeaf, rows_in
from zarr_manifests.progress import expect, tell
from zarr_manifests.reports import StatisticsReport
from zarr_manifests.runtime import Run

_BATCH_BYTES: Final = 8 << 20
_ABREAST: Final = 4
_GAP_BYTES: Final = 64 * 1024
_WINDOW_BYTES: Final = 32 << 20
_ROWS: Final = 1 << 18
_TASK_BYTES: Final = 256 << 20
"""What a task decodes at most, unless one chunk is larger; less is measured without tasks."""
_GATHERED: Final = 1_000_000
"""References of chunks that are held for tasks at a time."""


class _MeasuredArray(Struct, frozen=True):
    """An array to measure.

    Parameters
    ----------
    node : Node
        The array.
    meta : ArrayMeta
        What its documents say.
    meaning : Meaning
        What its values mean.
    decoder : BulkDecoder
        Decodes its chunks.
    weights : CellWeights, optional
        Those that are declared.
    """

    node: Node
    meta: ArrayMeta
    meaning: Meaning
    decoder: BulkDecoder
    weights: CellWeights | None = None

    @classmethod
    def of(cls, contents: SessionView, node: Node) -> _MeasuredArray | str:
        """The array; the reason if its chunks cannot be measured."""
        meaning = Meaning.of(node.documents)
        if not meaning.measurable:
            return "its values have no order that is known"
        document = json.loads(node.documents.get(V3_DOCUMENT) or node.documents[V2_ARRAY])
        decoder = BulkDecoder.of(document, meaning.laid_out)
        if decoder is None:
            return "it has a codec that is not decoded here"
        weights = cell_weights(contents, node, meaning.weights)
        return cls(node, node.array_meta, meaning, decoder, weights)

    def measured(self, chunks: Sequence[tuple[Coords, bytes]]) -> Bounds | None:
        """The bounds of some chunks, in their order; None if only Zarr can decode one of them."""
        shape, ends = self.meta.chunk_shape, self.meta.shape
        # One chunk below the other.
        rest = (0,) * (len(shape) - 1)
        placed = [((i, *rest) if shape else (), data) for i, (_, data) in enumerate(chunks)]
        out = self._room(len(chunks))
        if not self.decoder.decode(placed, out, (0,) * len(shape)):
            return None
        values, missing = self.meaning.compared(out), self.meaning.missing
        sizes = [
            [min(n, end - i * n) for i, n, end in zip(at, shape, ends, strict=True)]
            for at, _ in chunks
        ]
        if self.weights is None and all(size == [*shape] for size in sizes):
            return measure(values, shape, missing)
        found = []
        for row, ((first, *others), (at, _)) in enumerate(zip(sizes, chunks, strict=True)):
            begin = row * shape[0]
            inside = values[(slice(begin, begin + first), *map(slice, others))]
            found.append(measure(inside, shape, missing, weights=self.weights, at=at))
        return Bounds.joined(found)

    def holds(self, zones: ZoneTable) -> npt.NDArray[np.bool_]:
        """Which entries have the cells that the array has now, and what it declares (bool[n])."""
        clip, bounds = clips(zones.coords(), self.meta.shape, self.meta.chunk_shape), zones.bounds
        found: npt.NDArray[np.bool_] = bounds.clip == clip
        if self.weights is not None:
            found &= ~np.isnan(bounds.weighted_by(self.weights.digest).weights)
        return found

    def _room(self, chunks: int) -> npt.NDArray[Any]:
        """An array for so many chunks, full of fill values: shards may lack some."""
        shape = self.meta.chunk_shape
        room = (chunks * shape[0], *shape[1:]) if shape else ()
        return np.full(room, self.meaning.fill.view(self.meaning.stored), self.meaning.laid_out)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk."""
        return max(1, int(np.prod(self.meta.chunk_shape)) * self.meaning.stored.itemsize)


class _Due(Struct):
    """Chunks of a leaf, or of no leaf; their entries, and which of them have none at first."""

    leaf: PlacedLeaf | None
    table: ChunkTable
    entries: list[ZoneTable]
    missing: npt.NDArray[np.bool_]


def _measure(state: ForkState, node_id: bytes, table: ChunkTable) -> ZoneTable | None:
    """The entries of the chunks in a table of the node, measured in another process."""
    contents = revive_reader(state)
    array = _MeasuredArray.of(contents, contents.view.by_id[node_id])
    assert isinstance(array, _MeasuredArray)  # as the driver has found
    return _measured(contents, array, table)


class _Measuring(Struct):
    """One computation on one snapshot, up to the swap."""

    context: Context
    contents: SessionView
    keys: SessionKeys
    zones: KnownZones
    run: Run | None = None
    new: list[tuple[bytes, ZonePages]] = []
    done: int = 0

    def do(self, node: Node) -> StatisticsReport:
        """Measure the chunks of one array that have no entry."""
        array, path = _MeasuredArray.of(self.contents, node), f"/{node.path}"
        if isinstance(array, str):
            return StatisticsReport(path, 0, 0, 0, array)
        chunks = known = measured = 0
        beside: list[ZoneTable] = []  # of chunks that no leaf has
        most = 0 if self.run is None else _GATHERED  # for tasks, work for all of them
        for some in parts(self._due(array), lambda due: len(due.table), most):
            self._measure(array, some)
            for due in some:
                had = len(due.table) - int(due.missing.sum())
                chunks, known = chunks + len(due.table), known + had
                measured += sum(map(len, due.entries)) - had
                beside += due.entries if due.leaf is None else self._added(node, due.leaf, due)
        beside = [one for one in beside if len(one)]
        if measured and beside:
            pages = [(node.node_id, None, page) for page in in_pages(merged(beside))]
            self.new += write_pages(self.context, self.keys, pages)
        return StatisticsReport(path, chunks, known, measured)

    def _added(self, node: Node, leaf: PlacedLeaf, due: _Due) -> Iterator[ZoneTable]:
        """Write the page of a leaf, if it is new; yields the entries of chunks it does not have."""
        fresh = sum(map(len, due.entries)) > len(due.table) - int(due.missing.sum())
        table = self.contents.view.leaf(leaf)
        zones = self.zones.counting(node, table, due.entries) if fresh else None
        if zones is not None:
            page = node.node_id, leaf.key, zones
            self.new += write_pages(self.context, self.keys, [page])
        yield from (taken(one, ~valid(one, table)) for one in due.entries)

    def _due(self, array: _MeasuredArray) -> Iterator[_Due]:
        """The chunks of one leaf after the other, and then those of no leaf."""
        view, node_id, boxes = self.contents.view, array.node.node_id, list[Box]()
        for leaf in view.index.placed(node_id):
            boxes.append(leaf.part.box)
            now = view.chunks_in(node_id, leaf.part.box)
            if now is not None:
                yield self._looked_up(array, leaf, now)
        pending = rows_in(view.overlay(node_id).table, boxes, outside=True)
        if pending is not None:
            pending = select(pending, pending.kind != RefKind.UNSET)
            for table in split(pending, _ROWS) if len(pending) else ():
                yield self._looked_up(array, None, table)

    def _looked_up(self, array: _MeasuredArray, leaf: PlacedLeaf | None, table: ChunkTable) -> _Due:
        """Which chunks have no entry, or not one for what the array declares."""
        missing, entries = np.ones(len(table), np.bool_), list[ZoneTable]()
        known = self.zones.counting(array.node, table)
        if known is not None:
            entries.append(taken(known, array.holds(known)))
            missing[rows_at(table, entries[0].coords())] = False
        self._tell(len(table) - int(missing.sum()))
        return _Due(leaf, table, entries, missing)

    def _measure(self, array: _MeasuredArray, some: Sequence[_Due]) -> None:
        """Measure the chunks of these that have no entries, here or in tasks."""
        size = max(1, _TASK_BYTES // array.chunk_bytes)
        jobs = [
            (due, part)
            for due in some
            if due.missing.any()
            for part in split(select(due.table, due.missing), size)
        ]
        task = partial(_measured, self.contents, array)
        run: Run = map
        if self.run is not None and sum(len(part) for _, part in jobs) > size:
            task = partial(_measure, freeze_reader(self.contents), array.node.node_id)
            run = self.run
        for (due, part), zones in zip(jobs, run(task, [part for _, part in jobs]), strict=True):
            due.entries += [] if zones is None else [zones]
            self._tell(len(part))

    def _tell(self, count: int) -> None:
        self.done += count
        tell("measuring", self.done)


def _measured(contents: SessionView, array: _MeasuredArray, table: ChunkTable) -> ZoneTable | None:
    """Decode and measure the chunks of a table."""
    stream = stream_table(contents, table, gap_bytes=_GAP_BYTES, window_bytes=_WINDOW_BYTES)
    size = max(1, _BATCH_BYTES // array.chunk_bytes)
    found: list[Bounds] = []
    keep: list[bool] = []
    for some in batched(batched(stream, size), _ABREAST):
        calls = [partial(array.measured, batch) for batch in some]
        for batch, bounds in zip(some, contents.context.runtime.parallel(calls), strict=True):
            keep += [bounds is not None] * len(batch)
            found += [] if bounds is None else [bounds]
    if not found:
        return None
    rows = select(table, np.array(keep))
    return zones_of_chunks(array.meaning.digest, rows, Bounds.joined(found))


def compute_statistics(
    context: Context, paths: Sequence[str] | None, branch: str, run: Run | None = None
) -> StatisticsReport:
    """Make the zone maps of these arrays, or of all, as they are on the branch.

    With `run`, its tasks measure.

    Raises
    ------
    NotFoundError
        If there is no such branch, or no such array.
    CorruptObjectError, MissingChunkError
        If a chunk is damaged or missing.
    FencedError
        If a collection has shut this computation out; it changed nothing.
    """
    return opened(partial(_compute, context, paths, branch, run))


def _compute(
    context: Context, paths: Sequence[str] | None, branch: str, run: Run | None
) -> StatisticsReport:
    root = context.roots.with_branch(context.roots.read().root, branch)
    tip = context.roots.branch(root, branch)
    view = context.open_branch(tip)
    contents, keys = SessionView(context, view), SessionKeys(root.version, context.runtime)
    zones = KnownZones.of(context, view.snapshot.deltas, tip.index)
    work = _Measuring(context, contents, keys, zones, run)
    nodes = [node for _, node in sorted(view.nodes.items()) if node.array is not None]
    if paths is not None:
        nodes = [contents.array_at(path) for path in dict.fromkeys(paths)]
    due = {f"/{node.path}" for node in nodes if Meaning.of(node.documents).measurable}
    expect("measuring", sum(one.chunks for one in totals_of(view).arrays if one.path in due))
    arrays = tuple(work.do(node) for node in nodes)
    if work.new:
        add_to_index(context, branch, view, keys, "compute statistics", zones=work.new)
    chunks, known = sum(one.chunks for one in arrays), sum(one.known for one in arrays)
    measured = sum(one.measured for one in arrays)
    at = view.snapshot_id
    return StatisticsReport("", chunks, known, measured, arrays=arrays, snapshot_id=at)
