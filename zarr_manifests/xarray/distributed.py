"""Writing where dask computes in other processes: each block is written to a fork of its own.

1. The documents of all arrays, and all data in memory, are written to the session.
2. Each dask block is a task. It makes its own fork of the session, writes its block there, and
   returns its changes, which are a few references and no data.
3. One result for each block is merged into the session, which then commits.

A task that runs twice writes to a different fork each time; only the result that came back counts.
If two tasks wrote to the same chunk, the merge fails, so nothing is lost silently.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
import zarr

from zarr_manifests.engine.edit.change_set import ChangeSet, ForkState
from zarr_manifests.engine.edit.forks import freeze, revive
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.repositories import let_others_open
from zarr_manifests.session import Fork, Session, merge_own
from zarr_manifests.storage import Storage
from zarr_manifests.store import ManifestStore, freeze_store, workspace_of
from zarr_manifests.xarray.array_target import ArrayTarget, start_of
from zarr_manifests.xarray.encoding import DatasetWriter, begin_write
from zarr_manifests.xarray.fit import Fit
from zarr_manifests.xarray.stored_group import StoredGroup

__all__ = ["computed_elsewhere", "write_elsewhere"]


def computed_elsewhere(ds: xr.Dataset, scheduler: Any = None) -> bool:
    """Whether its dask arrays may be computed by other processes."""
    graph: Any = ds.__dask_graph__
    if graph() is None:  # dask's own test of a dataset takes twenty times as long
        return False
    from dask import local, threaded
    from dask.base import get_scheduler

    get: Any = get_scheduler(scheduler=scheduler, collections=[ds])  # type: ignore[no-untyped-call]
    return get not in (threaded.get, local.get_sync)


def write_elsewhere(
    ds: xr.Dataset,
    session: Session | Fork,
    options: Mapping[str, Any],
    region: Any,
    encoding: Mapping[Hashable, Mapping[str, Any]],
    fits: Mapping[str, Fit],
    there: StoredGroup,
    *,
    statistics: bool,
    scheduler: Any = None,
) -> None:
    """Write a dataset to the session, with each dask block written where dask computes it.

    Takes the arguments of `begin_write`, and what `dask.compute` takes as a scheduler.
    """
    _check_reachable(workspace_of(session.store).storage, scheduler)
    let_others_open(session)
    how = options, region, encoding, fits, there
    writer = begin_write(ds, session.store, *how, statistics=statistics)
    # The state of a fork, not a fork: unpickling a fork opens the snapshot, which may fail.
    origin = freeze_store(session.fork().store)
    written = _write_blocks(origin, writer, scheduler, statistics=statistics)
    merge_own(session, [_fork_with(origin, copy_id, own) for copy_id, own in written])
    writer.record()


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


type _Written = tuple[str, ChangeSet]
"""Id of a fork, and its own changes."""


def _write_blocks(
    origin: ForkState, writer: DatasetWriter, scheduler: Any, *, statistics: bool
) -> Sequence[_Written]:
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
            start=start_of(region, target.array.shape),
            statistics=statistics,
            dtype=object,
            meta=np.empty((0,) * source.ndim, object),
        )
        for source, target, region in zip(
            writer.sources, writer.targets, writer.regions, strict=True
        )
    ]
    # Persisted together, so that work shared by arrays is done once; `compute` would try to
    # assemble arrays from what the blocks return.
    persisted = persist(*written, scheduler=scheduler)  # type: ignore[no-untyped-call]
    blocks = [block for array in persisted for block in array.to_delayed().ravel()]
    results: tuple[_Written, ...]
    results = compute(*blocks, scheduler=scheduler)  # type: ignore[no-untyped-call]
    return results


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
        target = ArrayTarget(array, workspace, statistics=statistics)
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
    after.unsynced, after.durable, after.reads = own.unsynced, own.durable, own.reads
    after.zones = {node: zones for node, zones in own.zones.items() if node in changed}
    for node_id in changed:
        tables = own.tables.get(node_id, ())
        if node_id in kept:
            for rows in tables:
                after.put_table(node_id, rows)
        elif tables:
            after.tables[node_id] = (*after.tables.get(node_id, ()), *tables)
        if node_id in own.chunks:
            after.chunks[node_id] = {**after.chunks.get(node_id, {}), **own.chunks[node_id]}
    return replace(origin, copy_id=copy_id, before=before, after=after)
