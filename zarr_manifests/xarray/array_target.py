"""Writes encoded values to arrays: here, or where dask computes them; and measures them.

Where dask computes in threads of this process, its tasks write to the session's own store. Where it
computes in other processes, each block is a task that makes its own fork of the session, writes its
block there, and returns its changes, which are a few references and no data. One result for each
block is merged into the session. A task that runs twice writes to a different fork each time; only
the result that came back counts. If two tasks wrote to the same chunk, the merge fails, so nothing
is lost silently.

Zone maps are made meanwhile: bounds and counts of each chunk's stored values.
Only chunks that a write covers wholly have an entry, since the other values of a chunk are unknown
here. A chunk at the array's edge is whole if all its cells inside the array are written; Zarr then
fills the rest of it with the fill value. In a shard, what Zarr keeps beyond the edge is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import EllipsisType
from typing import Any

import numpy as np
import zarr
from msgspec.structs import replace
from xarray.backends.common import ArrayWriter

from zarr_manifests.bulk import use_bulk, write_here
from zarr_manifests.engine.change_set import ChangeSet, ForkState
from zarr_manifests.engine.chunk_statistics import cell_weights, record_zones
from zarr_manifests.engine.forks import freeze, merge_forks, revive
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.zone_maps import Bounds
from zarr_manifests.grid import Box, Coords
from zarr_manifests.planning.meaning import Meaning
from zarr_manifests.planning.measure import CellWeights, measure
from zarr_manifests.session import Fork, Session
from zarr_manifests.storage import Storage
from zarr_manifests.store import ManifestStore, freeze_store, workspace_of

type Place = EllipsisType | tuple[slice, ...]
"""Where values are written to; an ellipsis is all of the array."""
type _Written = tuple[str, ChangeSet]
"""Id of a fork, and its own changes."""


class ArrayTarget:
    """An array to write to, from any thread; what is written may be measured.

    Parameters
    ----------
    array : Array
        The array, in the store of a session, where the zone map is recorded. It is read and written
        in bulk from now on.
    statistics : bool
        Whether to measure.
    """

    def __init__(self, array: zarr.Array[Any], *, statistics: bool) -> None:
        use_bulk(array)
        store: Any = array.store
        self.array, self._workspace, self._dtype = array, workspace_of(store), array.dtype
        node = self._workspace.contents.array_at(array.path)
        self.meaning, self._meta = Meaning.of(node.documents), node.array_meta
        self._measures = statistics and self.meaning.measurable and self.meaning.lossless
        self._measured: list[tuple[Box, Bounds]] = []
        self._pads = array.shards is None  # to the edge of a chunk

    @property
    def is_weighted(self) -> bool:
        """Whether the coordinates that its weights come from have to be there before it."""
        return self._measures and bool(self.meaning.weights)

    @cached_property
    def _weights(self) -> CellWeights | None:
        contents = self._workspace.contents
        return cell_weights(contents, contents.array_at(self.array.path), self.meaning.weights)

    def __dask_tokenize__(self) -> object:
        return type(self).__name__, self.array.path, id(self)

    def __setitem__(self, place: Place, values: Any) -> None:
        """Write encoded values, and measure them."""
        block, box, whole = self._filled(place, values)
        write_here(self.array, place, block)
        if box is None:
            return
        meaning = self.meaning
        bounds = measure(
            meaning.compared(whole),
            self._meta.chunk_shape,
            meaning.missing,
            weights=self._weights if self.is_weighted else None,
            at=box.lo,
        )
        self._measured.append((box, bounds))

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
        measured, self._measured = self._measured, []
        if not measured:
            return
        around = Box.around(box for box, _ in measured)
        index = np.concatenate([box.carried(np.arange(box.size), around) for box, _ in measured])
        order = np.argsort(index)
        joined = Bounds.joined([bounds for _, bounds in measured]).take(order)
        where = self._workspace, self.array.path, around, self.meaning.digest
        record_zones(*where, joined, index[order])


class DatasetWriter(ArrayWriter):
    """Writes arrays of a dataset, as xarray tells it to.

    Parameters
    ----------
    statistics : bool
        Whether to measure what is written.
    """

    def __init__(self, *, statistics: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._statistics = statistics
        self._all: list[tuple[Any, ArrayTarget, Any]] = []

    def add(self, source: Any, target: Any, region: Any = None) -> None:
        """Keep the source for `compute`."""
        self._all.append((source, ArrayTarget(target, statistics=self._statistics), region))

    def compute(self, session: Session | Fork, scheduler: Any) -> None:
        """Write the arrays in memory, compute and write those of dask, and record zone maps.

        Other processes write to forks of the session.
        """
        for source, to, region in sorted(self._all, key=lambda each: each[1].is_weighted):
            super().add(source, to, region)  # type: ignore[no-untyped-call]
        if not _computed_elsewhere(self.sources, scheduler):
            how = {"scheduler": scheduler}
            self.sync(chunkmanager_store_kwargs=how)  # type: ignore[no-untyped-call]
        else:
            workspace = workspace_of(session.store)
            _check_reachable(workspace.storage, scheduler)
            # The state of a fork, not a fork: unpickling a fork opens the snapshot, which may fail.
            origin = freeze_store(session.fork().store)
            written = self._write_blocks(origin, scheduler)
            merge_forks(workspace, [_fork_with(origin, *each) for each in written])
        for _, to, _ in self._all:
            to.record()

    def _write_blocks(self, origin: ForkState, scheduler: Any) -> Sequence[_Written]:
        """Write each dask block to a fork of its own, where dask computes it."""
        from dask.base import compute, persist
        from dask.delayed import delayed

        # The result of a task goes to each worker once; a literal would go with each block.
        shared = delayed(_unchanged, pure=False)(origin)
        written = [
            source.map_blocks(
                _write_block,
                origin=shared,
                path=target.array.path,
                config=target.array.config,
                start=[p.indices(n)[0] for p, n in zip(region, target.array.shape, strict=True)],
                statistics=self._statistics,
                dtype=object,
                meta=np.empty((0,) * source.ndim, object),
            )
            for source, target, region in zip(self.sources, self.targets, self.regions, strict=True)
        ]
        # Persisted together, so that work shared by arrays is done once; `compute` would try to
        # assemble arrays from what the blocks return.
        persisted = persist(*written, scheduler=scheduler)  # type: ignore[no-untyped-call]
        blocks = [block for array in persisted for block in array.to_delayed().ravel()]
        return compute(*blocks, scheduler=scheduler)  # type: ignore[no-untyped-call,no-any-return]


# --- where dask computes -------------------------------------------------------------------------


def _computed_elsewhere(sources: Sequence[Any], scheduler: Any) -> bool:
    """Whether these dask arrays may be computed by other processes."""
    if not sources:
        return False
    from dask import local, threaded
    from dask.base import get_scheduler

    get: Any = get_scheduler(scheduler=scheduler, collections=sources)  # type: ignore[no-untyped-call]
    return get not in (threaded.get, local.get_sync)


def _check_reachable(storage: Storage, scheduler: Any) -> None:
    """Refuse to compute elsewhere on a storage of this process only: it would never finish."""
    from dask.base import compute
    from dask.delayed import delayed

    if storage.capabilities.shared:
        return
    task = delayed(os.getpid, pure=False)()
    (worker,) = compute(task, scheduler=scheduler)  # type: ignore[no-untyped-call]
    if worker != os.getpid():
        raise InvalidArgumentError(
            f"{storage.url} is in the memory of this process, and dask computes in others: write "
            "to a path, or compute here, with dask.config.set(scheduler='threads')"
        )


def _unchanged(origin: ForkState) -> ForkState:
    return origin


def _write_block(
    block: Any,
    *,
    origin: ForkState,
    path: str,
    config: Any,
    start: Sequence[int],
    statistics: bool,
    block_info: Mapping[int, Mapping[str, Any]],
) -> _Written:
    workspace = revive(origin)
    if block.size:
        place = zip(start, block_info[0]["array-location"], strict=True)
        array = zarr.open_array(
            ManifestStore(workspace, read_only=False), path=path, mode="r+", config=config
        )
        target = ArrayTarget(array, statistics=statistics)
        target[tuple(slice(at + lo, at + hi) for at, (lo, hi) in place)] = block
        target.record()
    state = freeze(workspace, explicit=True)
    return state.copy_id, state.after.since(origin.before)


def _fork_with(origin: ForkState, copy_id: str, own: ChangeSet) -> ForkState:
    """The fork as it was after the block was written, with chunks of the block's array only."""
    changed = own.touched()
    kept = {node: refs for node, refs in origin.before.chunks.items() if node in changed}
    # Nothing is spilled here: the session that merges the forks does that.
    before = replace(origin.before, chunks=kept, unsynced=[], spill=None, zones={})
    after = before.copy()
    after.unsynced, after.reads = own.unsynced, own.reads
    after.zones = {node: zones for node, zones in own.zones.items() if node in changed}
    for node_id in changed:
        for rows in own.tables[node_id]:
            after.put_table(node_id, rows)
    return replace(origin, copy_id=copy_id, before=before, after=after)
