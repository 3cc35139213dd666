"""The engine that opens a repository, xarray's Zarr backend on a session's store; and `ds.zm`.

`ds.zm.summarize` answers for what is stored, so it answers only for variables whose values are
surely those: not loaded yet, and at most selected from. Xarray keeps such a selection as a key.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import PurePosixPath
from typing import Any, Final, cast

import numpy as np
import xarray as xr
import zarr
from xarray.backends import BackendEntrypoint, ZarrStore
from xarray.backends.store import StoreBackendEntrypoint
from xarray.backends.zarr import ZarrArrayWrapper

from zarr_manifests.bulk import open_here, use_bulk
from zarr_manifests.decoding import decoded_by
from zarr_manifests.errors import InvalidArgumentError, ManifestsError, NotFoundError
from zarr_manifests.format.manifest import NodeKind
from zarr_manifests.format.records import MAGIC
from zarr_manifests.repositories import Location, repository_of
from zarr_manifests.repository import Repository
from zarr_manifests.storage import Storage, from_url
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.texts import listed
from zarr_manifests.virtual.containers import Authorized
from zarr_manifests.xarray.fit import PACKED_BY

_TASK_BYTES: Final = 32 * 1024**2
"""The most that a dask chunk of `chunks={}` holds, if that is more than a stored chunk."""
_LAZY: Final = {"MemoryCachedArray", "CopyOnWriteArray", "ImplicitToExplicitIndexingAdapter"}
"""What xarray lays over values that it has not read."""
_DECODES: Final = "_ElementwiseFunctionArray"


def _opened(
    filename_or_obj: Location,
    *,
    group: str | None = None,
    version: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    virtual_containers: Mapping[str, Any] | None = None,
    authorize: Authorized = (),
    **decoding: Any,
) -> tuple[ManifestStore, str, Callable[[Any], xr.Dataset]]:
    """What to open, the path of the group, and what makes a dataset of a group."""
    repository = repository_of(
        filename_or_obj, storage_options, virtual_containers=virtual_containers, authorize=authorize
    )
    store = repository.readonly_session(version).store

    def decoded(opened: _OpenedStore) -> xr.Dataset:
        return _pinned(StoreBackendEntrypoint().open_dataset(opened, **decoding))

    return store, _known_group(store, group), decoded


class ManifestsBackendEntrypoint(BackendEntrypoint):
    """The engine `zarr_manifests` of `xarray.open_dataset` and `xarray.open_datatree`.

    It takes a path, a URL, a storage or a `Repository`. Besides the usual decoding options it has:

    - `version`: what to open, as in `Repository.readonly_session`: a branch, a tag, an id,
      `main~3`, `main@{2026-11-01}`; by default the head of `main`.
    - `group`: the path of the group; by default the root.
    - `storage_options`: options of `zarr_manifests.storage.from_url` for the path or URL.
    - `virtual_containers`, `authorize`: where virtual chunks may be read, as in `zm.open`.

    With `chunks={}`, neighbouring stored chunks become dask chunks of up to 32 MiB.

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
    open_dataset_parameters = tuple(
        {
            **signature(StoreBackendEntrypoint.open_dataset).parameters,
            **signature(_opened).parameters,
        }.keys()
        - {"self", "decoding"}
    )

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
            return storage.capabilities.inline and storage.get("current", 0, len(MAGIC)) == MAGIC
        except (ManifestsError, OSError, ValueError):
            return False

    def open_dataset(self, filename_or_obj: Any, **options: Any) -> xr.Dataset:
        store, group, decoded = _opened(filename_or_obj, **options)
        return decoded(_OpenedStore.open_group(store, group=group, consolidated=False))

    def open_groups_as_dict(self, filename_or_obj: Any, **options: Any) -> dict[str, xr.Dataset]:
        store, group, decoded = _opened(filename_or_obj, **options)
        groups = _OpenedStore.open_store(store, group=f"/{group}", consolidated=False)
        if group:  # paths are relative to it
            groups = {
                str(PurePosixPath(at).relative_to(f"/{group}")): g for at, g in groups.items()
            }
        return {path: decoded(each) for path, each in groups.items()}

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
        groups = sorted(f"/{p}" for p, n in contents.nodes().items() if n.kind is NodeKind.GROUP)
        known = listed(groups, 20) if groups else "none, nothing is written"
        what = "is an array, not a group" if node is not None else "is not there"
        raise NotFoundError(
            f"group '/{path}' {what} in {contents.context.storage.url}; there are: {known}"
        )
    return path


class _OpenedStore(ZarrStore):
    """Xarray's store of a group, whose variables say which chunks to compute together."""

    __slots__ = ()

    def open_store_variable(self, name: Any) -> xr.Variable:
        """The variable, not read yet; it will be in bulk."""
        use_bulk(cast("Any", self.members[name]))
        variable: xr.Variable = super().open_store_variable(name)  # type: ignore[no-untyped-call]
        stored = variable.encoding["preferred_chunks"]
        lengths = variable.encoding["shards"] or tuple(stored.values())
        # Other grids than regular ones have a tuple for an axis.
        if variable.dtype.itemsize and all(type(length) is int for length in lengths):
            chunks = bundle(variable.shape, lengths, variable.dtype.itemsize, _TASK_BYTES)
            if chunks != lengths:
                bundles = dict(zip(variable.dims, chunks, strict=True))
                variable.encoding["preferred_chunks"] = _Bundles(bundles, stored)
        return variable


def bundle(
    shape: Sequence[int], lengths: Sequence[int], itemsize: int, most_bytes: int
) -> tuple[int, ...]:
    """The lengths of a dask chunk that holds whole stored chunks, which lie beside each other.

    Neighbours along the last axis are stored beside each other; once such a row is complete, so are
    rows along the axis before.

    Parameters
    ----------
    shape, lengths : sequence of int
        Of the array, and of a stored chunk.
    itemsize : int
        Bytes of a cell.
    most_bytes : int
        The most that a dask chunk may hold, if it holds more than one stored chunk.

    Examples
    --------
    >>> from zarr_manifests.xarray.backend import bundle
    >>> bundle((365, 700, 1400), (1, 350, 350), 4, 32 * 2**20)
    (8, 700, 1400)
    """
    found = list(lengths)
    for axis in reversed(range(len(found))):
        number = -(-shape[axis] // found[axis])
        room = max(most_bytes // (math.prod(found) * itemsize), 1)
        tasks = -(-number // room)  # of about the same size
        found[axis] *= max(-(-number // max(tasks, 1)), 1)
        if tasks > 1:
            break
    return tuple(found)


class _Bundles(dict[Any, int]):
    """Lengths of dask chunks by dimension, and what is stored.

    Xarray looks up what to use where the caller of `open_dataset` does not say, with a default. It
    looks up what the caller's chunks should not cut, without a default: these are stored chunks.
    """

    def __init__(self, bundles: Mapping[Any, int], stored: Mapping[Any, int]) -> None:
        super().__init__(bundles)
        self._stored = dict(stored)

    def get(self, dim: Any, *default: Any) -> Any:
        """The length along a dimension."""
        return super().get(dim, *default) if default else self._stored.get(dim)


# --- ds.zm -----------------------------------------------------------------------------------


class DatasetAccessor:
    """What `ds.zm` of a dataset is, once the engine has opened one.

    Parameters
    ----------
    ds : Dataset
        The dataset.

    Examples
    --------
    >>> import xarray as xr, zarr_manifests as zm
    >>> ds = xr.Dataset({"t": (("time", "lat"), [[1.0, 2.0], [3.0, 6.0]])})
    >>> _ = zm.write(ds, "memory://accessor-example", message="two times")
    >>> opened = xr.open_dataset("memory://accessor-example", engine="zarr_manifests")
    >>> opened.isel(lat=0).zm.summarize("t")["mean"].item()
    2.0
    """

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    def summarize(
        self,
        name: str,
        indexers: Mapping[str, Any] | None = None,
        *,
        by: str | Sequence[str] | None = None,
        weights: Mapping[str, str] | None = None,
    ) -> xr.Dataset:
        """Count, extremes, sum and mean of what the dataset selects of a stored variable.

        Parameters
        ----------
        name : str
            The variable. Its values must not be loaded, which `cache=False` avoids, or changed;
            with dask arrays, it must be whole, and `indexers` select of it.
        indexers, by, weights
            As in `Session.summarize`, but the indexers are labels by dimension, and no text. Labels
            are those of the dataset. Weights are names, of what is stored: `Session.summarize`
            takes numbers, too.

        Returns
        -------
        Dataset
            As of `Session.summarize`.

        Raises
        ------
        InvalidArgumentError
            If the values may be others than those stored; or as `Session.summarize` does.
        """
        from zarr_manifests.summarizing import summarize

        if isinstance(indexers, str):
            raise InvalidArgumentError(
                f"indexers={indexers!r:.80}: give labels by dimension, {{'lat': slice(60, 0)}}"
            )
        if isinstance(weights, Mapping):
            for dim, said in weights.items():
                if not isinstance(said, str):
                    raise InvalidArgumentError(
                        f"the weights of {dim!r} are no name: Session.summarize takes numbers, for "
                        "all stored positions"
                    )
        shown = self._ds[name]
        array, key = _stored_array(name, shown.variable)
        store = cast("ManifestStore", array.store)
        node = contents_of(store).array_at(array.path)
        if open_here(store, array.path).metadata != array.metadata:
            raise _unknown(name, "its array has changed since")
        dims = list(map(str, node.array_meta.dimension_names or ()))
        along = dict[str, xr.DataArray]()
        places = [np.arange(n)[at] for at, n in zip(key, array.shape, strict=True)]
        if [dim for dim, at in zip(dims, places, strict=True) if at.ndim] != [*shown.dims]:
            raise _unknown(name, "its dimensions have other names than those stored")
        for dim, at in zip(dims, places, strict=True):
            labels = {dim: shown.coords[dim].variable} if at.ndim and dim in shown.coords else {}
            along[dim] = xr.DataArray(at, labels, [dim] if at.ndim else [])
        found: xr.Dataset = summarize(store, array.path, indexers, by, weights, along=along)
        scalars = {at: one for at, one in shown.coords.items() if not one.ndim}
        return found.assign_coords({at: scalars[at] for at in scalars.keys() - found.variables})


def _stored_array(name: str, variable: xr.Variable) -> tuple[zarr.Array[Any], tuple[Any, ...]]:
    """The stored array that a variable shows, and which of its cells, by axis."""
    data: Any = variable._data
    decodes, keys = False, list[tuple[Any, ...]]()
    if variable.chunks is not None:
        graph = variable.data.dask
        read = [one for one in graph.values() if type(one).__name__ in _LAZY]
        if len(graph.layers) != 2 or len(read) != 1:
            raise _unknown(name, "dask computes it")
        data = read[0]
    while type(data) is not ZarrArrayWrapper:
        kind = type(data).__name__
        if kind == "LazilyIndexedArray":
            keys.append(data.key.tuple)
        elif kind not in {*_LAZY, _DECODES}:
            raise _unknown(name, "its values are loaded, computed or rearranged")
        decodes |= kind == _DECODES
        data = data.array
    array = data._array
    if type(array.store) is not ManifestStore:
        raise _unknown(name, "it is not of a repository")
    how, own = decoded_by(array), variable.encoding
    marks = {mark: how[mark] for mark in PACKED_BY if how.get(mark, np.nan) == how.get(mark)}
    if not decodes and marks:
        raise _unknown(name, "it was opened without decoding it")
    if any(not np.array_equal(np.array(own.get(mark)), there) for mark, there in marks.items()):
        raise _unknown(name, "it was decoded, or encoded, by other attributes than those stored")
    if variable.dtype.kind in "mM":
        raise InvalidArgumentError(f"{name!r} holds times, which are not summarized")
    whole = (slice(None),) * array.ndim
    chosen = [key for key in keys if any(type(at) is not slice or at != slice(None) for at in key)]
    if len(chosen) > 1:
        raise _unknown(name, "it is selected in several steps")
    return array, chosen[0] if chosen else whole


def _unknown(name: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name!r} may not be what is stored, since {why}: open it by "
        'xr.open_dataset(..., engine="zarr_manifests", cache=False), and select by sel, isel or '
        "indexers only; or compute with xarray"
    )


if not hasattr(xr.Dataset, "zm"):  # which is so if this module is loaded again
    xr.register_dataset_accessor("zm")(DatasetAccessor)  # type: ignore[no-untyped-call]
