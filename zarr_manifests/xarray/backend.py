"""The engine that opens a repository: xarray's Zarr backend on a read-only session's store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from inspect import signature
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

import xarray as xr
from xarray.backends import BackendEntrypoint
from xarray.backends.store import StoreBackendEntrypoint

from zarr_manifests.errors import InvalidArgumentError, ManifestsError, NotFoundError
from zarr_manifests.format.envelope import MAGIC
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository
from zarr_manifests.storage import Storage, from_url
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.virtual.containers import Authorized
from zarr_manifests.xarray.opened_arrays import OpenedStore

__all__ = ["Location", "ManifestsBackendEntrypoint"]

type Location = str | os.PathLike[str] | Storage | Repository

_LISTED: Final = 20
_TASK_BYTES: Final = 32 * 1024**2


def _options(
    filename_or_obj: Location,
    *,
    mask_and_scale: Any = True,
    decode_times: Any = True,
    concat_characters: Any = True,
    decode_coords: Any = True,
    drop_variables: str | Iterable[str] | None = None,
    use_cftime: Any = None,
    decode_timedelta: Any = None,
    group: str | None = None,
    version: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    virtual_containers: Mapping[str, Any] | None = None,
    authorize: Authorized = (),
    tune: bool = True,
    task_bytes: int = _TASK_BYTES,
) -> _Options:
    """The engine's options, by what they are for."""
    if type(task_bytes) is not int or task_bytes < 0:
        raise InvalidArgumentError(f"task_bytes is a number of bytes, not {task_bytes!r}")
    repository = repository_of(
        filename_or_obj,
        storage_options,
        virtual_containers=virtual_containers,
        authorize=authorize,
    )
    store = repository.readonly_session(version).store
    decoding = {
        "mask_and_scale": mask_and_scale,
        "decode_times": decode_times,
        "concat_characters": concat_characters,
        "decode_coords": decode_coords,
        "drop_variables": drop_variables,
        "use_cftime": use_cftime,
        "decode_timedelta": decode_timedelta,
    }
    return _Options(store, _known_group(store, group), decoding, tune, task_bytes)


class _Options(NamedTuple):
    """The engine's options: what to open, how to decode it, and how to read it."""

    store: ManifestStore
    group: str
    decoding: dict[str, Any]
    tune: bool
    task_bytes: int

    def decoded(self, group: OpenedStore) -> xr.Dataset:
        """The dataset of the group."""
        group.tune, group.task_bytes = self.tune, self.task_bytes
        opened: Any = StoreBackendEntrypoint().open_dataset
        return _pinned(opened(group, **self.decoding))


class ManifestsBackendEntrypoint(BackendEntrypoint):
    """The engine `zarr_manifests` of `xarray.open_dataset` and `xarray.open_datatree`.

    It takes a path, a URL, a storage or a `Repository`. Besides the usual decoding options it has:

    - `version`: what to open, as in `Repository.readonly_session`: a branch, a tag, an id,
      `main~3`, `main@{2026-11-01}`; by default the head of `main`.
    - `group`: the path of the group; by default the root.
    - `tune`: whether arrays are read in bulk, by `BulkCodecPipeline`; by default they are.
    - `task_bytes`: with `chunks={}`, stored chunks that lie beside each other are computed
      together, up to so many bytes; by default 32 MiB. With 0, each is by itself.
    - `storage_options`: options of `zarr_manifests.storage.from_url` for the path or URL.
    - `virtual_containers`, `authorize`: where virtual chunks may be read, as in `zm.open`.

    The dataset stays at the snapshot that was opened, whatever is committed later. Errors are
    those of `zm.open` and `Repository.readonly_session`, and `NotFoundError` if there is
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
        """Whether a repository is there, decided by one small local read.

        Remote locations are not asked for a guess: pass the engine's name.
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
        given = _options(filename_or_obj, **options)
        open_group: Any = OpenedStore.open_group
        return given.decoded(open_group(given.store, group=given.group, consolidated=False))

    def open_groups_as_dict(self, filename_or_obj: Any, **options: Any) -> dict[str, xr.Dataset]:
        given = _options(filename_or_obj, **options)
        open_store: Any = OpenedStore.open_store
        top = f"/{given.group}"
        groups = open_store(given.store, group=top, consolidated=False)
        if given.group:  # paths are relative to it
            groups = {str(PurePosixPath(path).relative_to(top)): of for path, of in groups.items()}
        return {path: given.decoded(of) for path, of in groups.items()}

    def open_datatree(self, filename_or_obj: Any, **options: Any) -> xr.DataTree:
        return xr.DataTree.from_dict(self.open_groups_as_dict(filename_or_obj, **options))


class _PinnedVariable(xr.Variable):
    """A variable whose dask array is named after the contents it reads.

    xarray names it after the URL, but the contents of a URL change with each commit: dask would
    take chunks of two snapshots for the same and compute with the wrong ones.
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


def _known_group(store: ManifestStore, group: str | None) -> str:
    """The group's path without slashes at its ends."""
    path = (group or "").strip("/")
    contents = contents_of(store)
    node = contents.node(path)
    if node is None or node.kind is not NodeKind.GROUP:
        groups = sorted(p for p, n in contents.nodes().items() if n.kind is NodeKind.GROUP)
        listed = ", ".join(f"/{p}" for p in groups[:_LISTED]) or "none, nothing is written"
        what = "is an array, not a group" if node is not None else "is not there"
        raise NotFoundError(
            f"group '/{path}' {what} in {contents.context.storage.url}; there are: {listed}"
        )
    return path
