"""xarray: the engine that opens a repository, and `write`, which puts a dataset into one.

Reading reuses xarray's Zarr backend on the store of a read-only session. Writing is one commit.
Where dask works in threads of this process, its tasks write to the session's own store. Anywhere
else (a distributed client, the process scheduler, any scheduler not known here) this happens:

1. The documents of all arrays, and all data in memory, are written to the session.
2. Each dask block is a task: it makes a fork of its own, writes its block there and returns
   what that changed, which is a few references and no data.
3. What has come back, once a block, is merged into the session, which commits.

A task that runs twice writes to another fork each time; only the one whose result came back
counts. Two tasks that wrote to the same chunk make the merge fail, so nothing is lost silently.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from inspect import signature
from typing import Any, Final, Literal

import numpy as np
import xarray as xr
import zarr
from xarray.backends import BackendEntrypoint, ZarrBackendEntrypoint

from zarr_manifests.agreement import check_agreement
from zarr_manifests.config import RepositoryConfig
from zarr_manifests.engine.changes import ChangeSet, ForkState, same_bytes
from zarr_manifests.engine.forks import freeze, revive
from zarr_manifests.engine.labels import checked_message, checked_metadata
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
)
from zarr_manifests.format.chunk_table import Unset
from zarr_manifests.format.envelope import MAGIC
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.keys import V3_DOCUMENT, split
from zarr_manifests.repository import Repository
from zarr_manifests.session import Fork, Session
from zarr_manifests.storage import Storage, from_url
from zarr_manifests.store import ManifestStore

__all__ = ["ManifestsBackendEntrypoint", "write"]

type _Location = str | os.PathLike[str] | Storage | Repository
type _Region = Mapping[str, slice | Literal["auto"]] | Literal["auto"]
type _WriteMode = Literal["w", "w-", "a", "a-", "r+"]

_MODES: Final = ("w", "w-", "a", "a-", "r+")
_LISTED: Final = 20


# --- reading ---------------------------------------------------------------------------------


def _options(
    filename_or_obj: _Location,
    *,
    mask_and_scale: Any = True,
    decode_times: Any = True,
    concat_characters: Any = True,
    decode_coords: Any = True,
    drop_variables: str | Iterable[str] | None = None,
    use_cftime: Any = None,
    decode_timedelta: Any = None,
    group: str | None = None,
    branch: str | None = None,
    tag: str | None = None,
    snapshot_id: str | None = None,
    as_of: datetime | None = None,
) -> dict[str, Any]:
    """The engine's options as arguments for xarray's Zarr backend."""
    store = _open_store(filename_or_obj, branch, tag, snapshot_id, as_of)
    return {
        "filename_or_obj": store,
        "mask_and_scale": mask_and_scale,
        "decode_times": decode_times,
        "concat_characters": concat_characters,
        "decode_coords": decode_coords,
        "drop_variables": drop_variables,
        "use_cftime": use_cftime,
        "decode_timedelta": decode_timedelta,
        "group": _known_group(store, group),
        "consolidated": False,
    }


class ManifestsBackendEntrypoint(BackendEntrypoint):
    """The engine `zarr_manifests` of `xarray.open_dataset` and `xarray.open_datatree`.

    It takes a path, a URL, a storage or a `Repository`, and besides the usual decoding options:

    - `branch`, `tag`, `snapshot_id`, `as_of`: which version to open, as in
      `Repository.readonly_session`; the head of `main` by default.
    - `group`: the path of the group; the root by default.

    The dataset stays at the snapshot that was opened, whatever is committed later. Errors are
    those of `Repository.open` and `Repository.readonly_session`, and `NotFoundError` if there is
    no such group.

    Examples
    --------
    >>> import xarray as xr, zarr_manifests as zm
    >>> ds = xr.Dataset({"t": ("x", [1.0, 2.0])})
    >>> snapshot_id = zm.write(ds, "memory://engine-example", message="two values")
    >>> xr.open_dataset("memory://engine-example", engine="zarr_manifests").t.values
    array([1., 2.])
    """

    description = "Open zarr_manifests repositories"
    supports_groups = True
    open_dataset_parameters = tuple(signature(_options).parameters)

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Whether a repository is there, which one small read tells; anything else is not ours.

        Of what is far away nothing is asked for a guess: name the engine.
        """
        if isinstance(filename_or_obj, Repository | Storage):
            return True
        if not isinstance(filename_or_obj, str | os.PathLike):
            return False
        try:
            storage = from_url(filename_or_obj)
            here = storage.capabilities.inline
            return here and storage.get("current", 0, len(MAGIC)) == MAGIC
        except (ManifestsError, OSError, ValueError):
            return False

    def open_dataset(self, filename_or_obj: Any, **options: Any) -> xr.Dataset:
        return _pinned(ZarrBackendEntrypoint().open_dataset(**_options(filename_or_obj, **options)))

    def open_groups_as_dict(self, filename_or_obj: Any, **options: Any) -> dict[str, xr.Dataset]:
        arguments = _options(filename_or_obj, **options)
        groups = ZarrBackendEntrypoint().open_groups_as_dict(**arguments)
        return {path: _pinned(dataset) for path, dataset in groups.items()}

    def open_datatree(self, filename_or_obj: Any, **options: Any) -> xr.DataTree:
        return xr.DataTree.from_dict(self.open_groups_as_dict(filename_or_obj, **options))


class _PinnedVariable(xr.Variable):
    """A variable whose dask array is named after the contents it reads.

    xarray names it after the URL that was opened, but what a URL holds changes with each commit:
    dask would take chunks of two snapshots for the same and compute with the wrong ones.
    """

    __slots__ = ()

    def chunk(  # type: ignore[override]  # whatever the arguments are in this version of xarray
        self, *args: Any, from_array_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> xr.Variable:
        options = dict(from_array_kwargs or {})
        if isinstance(options.get("name"), str):
            from dask.base import tokenize

            options["name"] = f"{options['name']}-{tokenize(self._data)}"
        kwargs["from_array_kwargs"] = options
        chunked = super().chunk(*args, **kwargs)
        return xr.Variable(chunked.dims, chunked.data, chunked.attrs, chunked.encoding)


def _pinned(dataset: xr.Dataset) -> xr.Dataset:
    variables = {
        name: _PinnedVariable(v.dims, v._data, v.attrs, v.encoding, fastpath=True)
        if type(v) is xr.Variable
        else v
        for name, v in dataset.variables.items()
    }
    return dataset._replace(variables)


def _open_store(
    location: _Location,
    branch: str | None,
    tag: str | None,
    snapshot_id: str | None,
    as_of: datetime | None,
) -> ManifestStore:
    repository = location if isinstance(location, Repository) else Repository.open(location)
    return repository.readonly_session(branch, tag=tag, snapshot_id=snapshot_id, as_of=as_of).store


def _known_group(store: ManifestStore, group: str | None) -> str:
    """The group's path without slashes around it."""
    path = (group or "").strip("/")
    node = store.workspace.node(path)
    if node is None or node.kind is not NodeKind.GROUP:
        groups = sorted(p for p, n in store.workspace.nodes().items() if n.kind is NodeKind.GROUP)
        listed = ", ".join(f"/{p}" for p in groups[:_LISTED]) or "none, nothing is written"
        what = "is an array, not a group" if node is not None else "is not there"
        raise NotFoundError(
            f"group '/{path}' {what} in {store.workspace.storage.url}; there are: {listed}"
        )
    return path


# --- writing ---------------------------------------------------------------------------------


def write(
    ds: xr.Dataset,
    location: _Location,
    *,
    message: str,
    branch: str = "main",
    group: str | None = None,
    mode: _WriteMode | None = None,
    append_dim: Hashable | None = None,
    region: _Region | None = None,
    encoding: Mapping[Hashable, Mapping[str, Any]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    config: RepositoryConfig | Mapping[str, Any] | None = None,
    relocate: bool = False,
) -> str:
    """Write a dataset into a repository in one commit, and make the repository if need be.

    Whatever fails, either all of the dataset is committed or nothing.

    Parameters
    ----------
    ds : Dataset
        What to write. It may be lazy, also when it is read from the same repository, and its
        dask arrays may be computed in threads, processes or on a distributed cluster that
        reaches the storage. Each chunk must lie within one dask block.
    location : str, path, Storage or Repository
        Where the repository is, or is to be made.
    message : str
        Why, for the history.
    branch : str
        The branch to commit to.
    group : str, optional
        Path of the group; the root by default.
    mode : {"w", "w-", "a", "a-", "r+"}, optional
        As in `Dataset.to_zarr`. `w` replaces the group and all below it, `a` writes over
        variables that are there and adds others. By default what is there is never written over
        unless `append_dim` or `region` says where.
    append_dim : hashable, optional
        Append along this dimension; if the group has no data yet, it is created.
    region : mapping or "auto", optional
        Write to this part of the arrays that are there, as in `Dataset.to_zarr`.
    encoding : mapping, optional
        By variable, for variables that are new.
    metadata : mapping, optional
        Kept with the commit: strings, numbers, lists and maps.
    config : RepositoryConfig or mapping, optional
        For the repository if it is made; if it is there, used instead of its own for this write.
    relocate : bool, default False
        Goes with `append_dim`: if others append meanwhile, land behind them, as in
        `Session.append_mode`.

    Returns
    -------
    str
        The new snapshot's id; that of the branch's head if every byte was there already.

    Raises
    ------
    AlreadyExistsError
        If the group has data, and neither `mode`, `append_dim` nor `region` says what to do.
    NotARepositoryError
        If `region`, `mode="r+"` or another branch than `main` is given, and there is none.
    NotFoundError
        If there is no such branch, or nothing that `region` could be part of.
    InvalidArgumentError
        If arguments contradict each other; or if the values would mean something else in the
        arrays that are there, whose attributes stay (other units, or times that cannot be told in
        theirs), or an append would leave some of them shorter or replace an index coordinate.
    ConflictError
        If somebody else has committed to the same chunks or metadata meanwhile, or two tasks
        wrote to the same chunk.
    ValueError
        From xarray, if the dataset does not go with what is there, or its dask blocks with the
        chunks.

    Examples
    --------
    >>> import xarray as xr, zarr_manifests as zm
    >>> ds = xr.Dataset({"t": ("time", [1.0, 2.0])}, {"time": [0, 1]})
    >>> first = zm.write(ds, "memory://write-example", message="create")
    >>> more = ds.assign_coords(time=[2, 3])
    >>> second = zm.write(more, "memory://write-example", message="append", append_dim="time")
    >>> xr.open_dataset("memory://write-example", engine="zarr_manifests").sizes["time"]
    4
    """
    _check_arguments(ds, location, mode, append_dim, region, config)
    if relocate and append_dim is None:
        raise InvalidArgumentError("relocate goes with append_dim: it is appends that it moves")
    message, metadata = checked_message(message), checked_metadata(metadata)
    session = _repository(location, config, branch, mode, region).writable_session(branch)
    if relocate:
        session.append_mode(append_dim)  # type: ignore[arg-type]  # checked there
    options = _zarr_options(session.store, group, mode, append_dim, region)
    if options["mode"] != "w":
        check_agreement(ds, session.store, (group or "").strip("/"), options["append_dim"])
    encoding = {name: dict(how) for name, how in (encoding or {}).items()}
    place = dict(region) if isinstance(region, Mapping) else region
    _write(ds, session, options, place, encoding)
    if _changes_nothing(session.store):
        return session.snapshot_id
    return session.commit(message, metadata)


def _repository(
    location: _Location,
    config: RepositoryConfig | Mapping[str, Any] | None,
    branch: str,
    mode: _WriteMode | None,
    region: _Region | None,
) -> Repository:
    """The repository; made, unless what is to be written can only go to one that is there."""
    if isinstance(location, Repository):
        return location
    if region is not None or mode == "r+" or branch != "main":
        return Repository.open(location, config)
    return Repository.open_or_create(location, config)


def _check_arguments(
    ds: object,
    location: object,
    mode: object,
    append_dim: object,
    region: object,
    config: object,
) -> None:
    if not isinstance(ds, xr.Dataset):
        hint = "; use its to_dataset(name=...)" if isinstance(ds, xr.DataArray) else ""
        raise InvalidArgumentError(f"write takes a Dataset, not a {type(ds).__name__}{hint}")
    if mode is not None and mode not in _MODES:
        raise InvalidArgumentError(f"mode must be one of {', '.join(_MODES)}, not {mode!r}")
    if append_dim is not None:
        if append_dim not in ds.dims:
            listed = ", ".join(map(str, ds.dims)) or "none"
            raise InvalidArgumentError(
                f"append_dim {append_dim!r} is no dimension of the dataset; there are: {listed}"
            )
        if mode not in (None, "a", "a-"):
            raise InvalidArgumentError(f"append_dim goes with mode 'a' or 'a-', not {mode!r}")
    if region is not None and mode not in (None, "a", "a-", "r+"):
        raise InvalidArgumentError(f"region goes with mode 'r+', 'a' or 'a-', not {mode!r}")
    if config is not None and isinstance(location, Repository):
        raise InvalidArgumentError("config goes with a path, URL or storage, not a Repository")


def _zarr_options(
    store: ManifestStore,
    group: str | None,
    mode: _WriteMode | None,
    append_dim: Hashable | None,
    region: _Region | None,
) -> dict[str, Any]:
    """Arguments for xarray's Zarr backend, by what is there already."""
    path, url = (group or "").strip("/"), store.workspace.storage.url
    arrays = sorted(
        node_path.rpartition("/")[2]
        for node_path, node in store.workspace.nodes().items()
        if node.kind is NodeKind.ARRAY and node_path and node_path.rpartition("/")[0] == path
    )
    if region is not None and not arrays:
        raise NotFoundError(
            f"group '/{path}' of {url} has no arrays that a region could be part of; "
            "write without region first"
        )
    if arrays and mode in (None, "w-") and append_dim is None and region is None:
        raise AlreadyExistsError(
            f"group '/{path}' of {url} has data already ({', '.join(arrays[:_LISTED])}): give "
            "append_dim to append, region to write to a part, mode='a' to add or write over "
            "variables, or mode='w' to replace the group"
        )
    if append_dim is not None and not arrays:
        mode, append_dim = "a", None
    default = "r+" if region is not None and append_dim is None else "a"
    return {
        "group": path or None,
        "mode": mode or default,
        "append_dim": append_dim,
        "zarr_format": _zarr_format(store, path, replaced=mode == "w"),
    }


def _zarr_format(store: ManifestStore, path: str, *, replaced: bool) -> int:
    """That of the group, or of the nearest above it; no node is seen from one of another format."""
    nodes = store.workspace.nodes()
    if replaced and not path:
        return 3
    path = split(path)[0] if replaced else path
    while path and path not in nodes:
        path, _ = split(path)
    return 2 if path in nodes and V3_DOCUMENT not in nodes[path].documents else 3


def _write(
    ds: xr.Dataset,
    session: Session,
    options: Mapping[str, Any],
    region: _Region | None,
    encoding: Mapping[Hashable, Mapping[str, Any]],
) -> None:
    if not _computed_elsewhere(ds):
        ds.to_zarr(
            session.store,
            **options,
            region=region,
            encoding=encoding,
            consolidated=False,
        )
        return
    _check_reachable(session.store.workspace.storage)
    writer = _write_in_memory(ds, session.store, options, region, encoding)
    # What a fork is made of, and not a fork: unpickling one opens the snapshot, which may fail.
    origin = session.fork().store.freeze(explicit=True)
    written = _write_blocks(origin, writer)
    session.merge(*(_fork_with(origin, copy_id, own) for copy_id, own in written))


def _changes_nothing(store: ManifestStore) -> bool:
    """Whether all that was written is what the snapshot has at these places already.

    Checksums almost always tell that it is not; only if none of them does, bytes are compared.
    """
    workspace = store.workspace
    changes, reader = workspace.changes, workspace.reader
    if changes.nodes or changes.truncated or changes.tables:
        return False
    pairs = []
    for node_id, coords, new in changes.refs():
        old = workspace.view.lookup(node_id, coords)
        if old is None or isinstance(new, Unset) or not same_bytes(old, new):
            return False
        pairs.append((old, new))
    return all(
        old == new or reader.read(old, 0, old.length) == reader.read(new, 0, new.length)
        for old, new in pairs
    )


# --- dask somewhere else ---------------------------------------------------------------------


def _computed_elsewhere(ds: xr.Dataset) -> bool:
    """Whether dask arrays in it may be computed by other processes than this one."""
    if find_spec("dask") is None:
        return False
    from dask import local, threaded
    from dask.base import get_scheduler, is_dask_collection

    if not is_dask_collection(ds):
        return False
    scheduler = get_scheduler(collections=[ds])  # type: ignore[no-untyped-call]
    return scheduler not in (threaded.get, local.get_sync)


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
    region: _Region | None,
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
