"""Writing where dask computes in other processes: each block to a fork of its own.

1. The documents of all arrays, and all data in memory, are written to the session.
2. Each dask block is a task: it makes a fork of its own, writes its block there and returns
   what that changed, which is a few references and no data.
3. What has come back, once a block, is merged into the session, which commits.

A task that runs twice writes to another fork each time; only the one whose result came back
counts. Two tasks that wrote to the same chunk make the merge fail, so nothing is lost silently.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import xarray as xr
import zarr

from zarr_manifests.engine.edit.change_set import ChangeSet, ForkState
from zarr_manifests.engine.edit.forks import freeze, revive
from zarr_manifests.engine.root.deferred_create import Unmade
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.ids import object_key
from zarr_manifests.session import Fork, Session
from zarr_manifests.storage import Storage
from zarr_manifests.store import ManifestStore, freeze_store, workspace_of

__all__ = ["computed_elsewhere", "write_elsewhere"]


def computed_elsewhere(ds: xr.Dataset) -> bool:
    """Whether dask arrays in it may be computed by other processes than this one."""
    if find_spec("dask") is None:
        return False
    from dask import local, threaded
    from dask.base import get_scheduler, is_dask_collection

    if not is_dask_collection(ds):
        return False
    scheduler = get_scheduler(collections=[ds])  # type: ignore[no-untyped-call]
    return scheduler not in (threaded.get, local.get_sync)


def write_elsewhere(
    ds: xr.Dataset,
    session: Session,
    options: Mapping[str, Any],
    region: Any,
    encoding: Mapping[Hashable, Mapping[str, Any]],
) -> None:
    """Write a dataset to the session, each dask block of it wherever dask computes.

    Takes what `Dataset.to_zarr` takes.
    """
    storage, keys = workspace_of(session.store).storage, workspace_of(session.store).keys
    _check_reachable(storage)
    if isinstance(storage, Unmade):  # others are going to look for what it holds back
        assert keys is not None
        storage.begin(object_key("chunks", keys.session_id, 0))
    writer = _write_in_memory(ds, session.store, options, region, encoding)
    # What a fork is made of, and not a fork: unpickling one opens the snapshot, which may fail.
    origin = freeze_store(session.fork().store)
    written = _write_blocks(origin, writer)
    session.merge(*(_fork_with(origin, copy_id, own) for copy_id, own in written))


def _check_reachable(storage: Storage) -> None:
    """Refuse work elsewhere on a storage of this process alone: it would never come to an end."""
    from dask.base import compute
    from dask.delayed import delayed

    if storage.capabilities.shared:
        return
    (worker,) = compute(delayed(os.getpid, pure=False)())  # type: ignore[no-untyped-call]
    if worker != os.getpid():
        raise InvalidArgumentError(
            f"{storage.url} is in the memory of this process, and dask computes in others: write "
            "to a path, or compute here, with dask.config.set(scheduler='threads')"
        )


def _write_in_memory(
    ds: xr.Dataset,
    store: ManifestStore,
    options: Mapping[str, Any],
    region: Any,
    encoding: Mapping[Hashable, Mapping[str, Any]],
) -> Any:
    """What `Dataset.to_zarr` does, up to the dask arrays: these are left in the writer."""
    from xarray.backends import ZarrStore
    from xarray.backends.common import ArrayWriter
    from xarray.backends.writers import _validate_dataset_names, dump_to_store

    _validate_dataset_names(ds)
    ds = ds.copy()
    for variable in ds.variables.values():
        if variable.size == 0:  # Zarr takes no chunks of no length
            variable.load()
    writer: Any = ArrayWriter()  # type: ignore[no-untyped-call]
    zarr_store: Any = ZarrStore.open_group(
        store,
        **options,
        write_region=region,
        safe_chunks=True,
        consolidated=False,
    )
    ds = zarr_store._validate_and_autodetect_region(ds)
    zarr_store._validate_encoding(encoding)
    dump_to_store(ds, zarr_store, writer, encoding=encoding)  # type: ignore[no-untyped-call]
    return writer


type _Written = tuple[str, ChangeSet]
"""Id of a fork, and what was changed there and not before."""


def _write_blocks(origin: ForkState, writer: Any) -> Sequence[_Written]:
    """Write each dask block to a fork of its own, wherever dask computes."""
    from dask.base import compute, persist
    from dask.delayed import delayed

    # The result of a task, and not a literal, goes to each worker once and not with each block.
    shared = delayed(_unchanged, pure=False)(origin)
    written = [
        source.map_blocks(
            _write_block,
            origin=shared,
            path=target.path,
            config=target.config,
            start=_start(region, target.shape),
            dtype=object,
            meta=np.empty((0,) * source.ndim, object),
        )
        for source, target, region in zip(
            writer.sources, writer.targets, writer.regions, strict=True
        )
    ]
    # Persisted together, so that work which arrays share is done once; `compute` would try to put
    # what the blocks return together to arrays.
    persisted = persist(*written)  # type: ignore[no-untyped-call]
    blocks = [block for array in persisted for block in array.to_delayed().ravel()]
    results: tuple[_Written, ...] = compute(*blocks)  # type: ignore[no-untyped-call]
    return results


def _unchanged(origin: ForkState) -> ForkState:
    return origin


def _start(region: Sequence[slice] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Where the region begins."""
    if not region:
        return (0,) * len(shape)
    return tuple(part.indices(n)[0] for part, n in zip(region, shape, strict=True))


def _write_block(
    block: Any,
    *,
    origin: ForkState,
    path: str,
    config: Any,
    start: Sequence[int],
    block_info: Mapping[int, Mapping[str, Any]],
) -> _Written:
    workspace = revive(origin)
    if block.size:
        place = zip(start, block_info[0]["array-location"], strict=True)
        target = zarr.open_array(
            ManifestStore(workspace, read_only=False), path=path, mode="r+", config=config
        )
        target[tuple(slice(at + lo, at + hi) for at, (lo, hi) in place)] = block
    state = freeze(workspace, explicit=True)
    return state.copy_id, state.after.since(origin.before)


def _fork_with(origin: ForkState, copy_id: str, own: ChangeSet) -> Fork:
    """The fork as it was when the block had been written; of chunks, those of the block's array."""
    changed = own.touched()
    kept = {node: refs for node, refs in origin.before.chunks.items() if node in changed}
    # Nothing is spilled here: the session that merges them does that.
    before = replace(origin.before, chunks=kept, unsynced=[], spill=None)
    after = before.copy()
    after.unsynced, after.reads = own.unsynced, own.reads
    for node_id in changed:
        for rows in own.tables.get(node_id, ()):
            after.put_table(node_id, rows)
        if node_id in own.chunks:
            after.chunks[node_id] = {**after.chunks.get(node_id, {}), **own.chunks[node_id]}
    return Fork(replace(origin, copy_id=copy_id, before=before, after=after))
