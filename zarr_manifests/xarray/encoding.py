"""Encoding a dataset for a store, and checking its values in the same pass.

Xarray writes the dataset, as `Dataset.to_zarr` does. Numbers that need a check are encoded here, by
xarray's own function, in parts that are checked while they are in the processor's cache. Floats
that are stored as floats are checked by the bounds that statistics are made of. Blocks of dask
arrays are encoded and checked by the task that writes them. Other values are checked before xarray
encodes them.

Invariants: `begin_write` checks all values in memory before it writes a chunk; dask values are
checked once, when and where they are computed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xarray as xr
import zarr
from xarray.backends import ZarrStore
from xarray.backends.common import ArrayWriter
from xarray.conventions import decode_cf_variable

from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.store import ManifestStore, workspace_of
from zarr_manifests.xarray.array_target import ArrayTarget, Encoder, start_of
from zarr_manifests.xarray.fit import Fit, MisfitError
from zarr_manifests.xarray.stored_group import StoredGroup, open_array

__all__ = ["DatasetWriter", "begin_write", "encoding_of", "explained", "fit_of", "fits_of"]

type _Unchecked = tuple[Fit, xr.Variable, npt.NDArray[Any]]
"""How a variable is stored, its values, and the values to store."""

_ENCODING: Final = (
    "scale_factor",
    "add_offset",
    "_FillValue",
    "missing_value",
    "_Unsigned",
    "units",
    "calendar",
    "dtype",
)


def begin_write(
    ds: xr.Dataset,
    store: ManifestStore,
    options: Mapping[str, Any],
    region: Any,
    encoding: Mapping[Hashable, Mapping[str, Any]],
    fits: Mapping[str, Fit],
    there: StoredGroup | None = None,
    *,
    statistics: bool,
) -> DatasetWriter:
    """Do what `Dataset.to_zarr` does, except for dask arrays, which are left in the result.

    Parameters
    ----------
    ds : Dataset
        The dataset to write.
    store : ManifestStore
        The store to write to.
    options : mapping
        Arguments of `ZarrStore.open_group`: `group`, `mode`, `append_dim` and `zarr_format`.
    region : mapping or "auto", optional
        The region of `Dataset.to_zarr`.
    encoding : mapping
        Encodings of new variables, by name.
    fits : mapping
        How each variable to check is stored, by name.
    there : StoredGroup, optional
        The group to write to, if it has been opened and is as it was.
    statistics : bool
        Whether to measure what is written, for zone maps.

    Returns
    -------
    DatasetWriter
        Its `sync` computes and writes the dask arrays.

    Raises
    ------
    MisfitError
        If values in memory would be read back differently.
    """
    from xarray.backends.writers import _validate_dataset_names, dump_to_store

    _validate_dataset_names(ds)
    ds = ds.copy()
    for variable in ds.variables.values():
        if variable.size == 0:  # Zarr accepts no chunks of length 0
            variable.load()
    writer = DatasetWriter(workspace_of(store), statistics=statistics)
    target = _opened(store, options, region, there)
    target.fits, target.writer = fits, writer
    ds = target._validate_and_autodetect_region(ds)
    target._validate_encoding(encoding)
    dump_to_store(ds, target, writer, encoding=encoding)  # type: ignore[no-untyped-call]
    writer.write()
    return writer


class DatasetWriter(ArrayWriter):
    """Xarray's writer, which may measure what it writes.

    Values in memory wait until all of them are checked.
    """

    __slots__ = ("_all", "_statistics", "_waiting", "_workspace", "encoders", "unchecked")
    sources: list[Any]
    targets: list[ArrayTarget]
    regions: list[Any]
    unchecked: dict[str, _Unchecked]
    """By path: variables whose bounds may tell that they fit."""
    encoders: dict[str, Encoder]
    """By path: what encodes the blocks of dask arrays."""

    def __init__(self, workspace: Workspace, *, statistics: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace, self._statistics = workspace, statistics
        self._all: list[ArrayTarget] = []
        self._waiting: list[Callable[[], None]] = []
        self.unchecked = {}
        self.encoders = {}

    def add(self, source: Any, target: Any, region: Any = None) -> None:
        """Keep the source for `write`, or for `sync` if dask computes it."""
        encoder = self.encoders.get(target.path)
        if encoder is not None:
            encoder = encoder.begun_at(start_of(region, target.shape))
        to = ArrayTarget(target, self._workspace, statistics=self._statistics, encoder=encoder)
        self._all.append(to)
        if not isinstance(source, np.ndarray):
            add: Any = super().add
            add(source, to, region)
            return
        place = region or ...
        unchecked = self.unchecked.get(target.path)
        if unchecked is None:
            self._waiting.append(partial(to.write, place, source))
            return
        fit, variable, codes = unchecked
        block, bounds = to.look(place, source)
        self._waiting.append(partial(target.__setitem__, place, block))
        if bounds is not None and to.tells(bounds, fit, codes, variable):
            del self.unchecked[target.path]

    def write(self) -> None:
        """Write the values in memory; raises `MisfitError` before, if some do not fit."""
        for fit, variable, codes in self.unchecked.values():
            fit.check(variable, codes)
        self.unchecked.clear()
        for write in self._waiting:
            write()
        self._waiting.clear()

    def sync(self, *args: Any, **options: Any) -> Any:
        """Compute and write the dask arrays, and record zone maps of all arrays."""
        sync: Any = super().sync
        sync(*args, **options)
        self.record()

    def record(self) -> None:
        """Record the zone maps of what is written so far."""
        for array in self._all:
            array.record()


def _opened(
    store: ManifestStore, options: Mapping[str, Any], region: Any, there: StoredGroup | None
) -> _Store:
    """The group to write to, made if it does not exist."""
    how = {"write_region": region, "safe_chunks": True}
    path, mode = options["group"] or "", options["mode"]
    there = there or StoredGroup.of(store, path)
    kind: Any = _Store
    if there.exists and mode in ("a", "a-", "r+"):
        how |= {"append_dim": options["append_dim"], "use_zarr_fill_value_as_mask": there.is_v2}
        found: _Store = kind(there.open_in(store), mode, **how)
    else:
        found = kind.open_group(store, **options, **how, consolidated=False)
        there = StoredGroup.of(store, path)
    found.there = there
    return found


class _Store(ZarrStore):
    """Xarray's store, which checks the values that it encodes.

    Xarray makes new arrays. What goes to existing ones is encoded like them and written to them
    here: xarray would open and decode all of them again.
    """

    __slots__ = ("fits", "there", "writer")
    fits: Mapping[str, Fit]
    there: StoredGroup
    writer: DatasetWriter

    def _fetch_members(self) -> dict[str, Any]:
        """None: each array is opened where it is needed."""
        return {}

    def array_keys(self) -> tuple[str, ...]:
        """The names of all arrays in the group."""
        return tuple(self.there.nodes)

    def arrays(self) -> tuple[tuple[str, zarr.Array[Any]], ...]:
        """All arrays in the group."""
        return tuple((name, self.there.array(name)) for name in self.there.nodes)

    def open_store_variable(self, name: Any) -> xr.Variable:
        """An array, to find a region by its labels: these are read by the session."""
        node, store = self.there.nodes[name], self.zarr_group.store
        self.members[name] = open_array(store, node.path, self.zarr_group.metadata.zarr_format)
        opened: Any = super().open_store_variable
        variable: xr.Variable = opened(name)
        return variable

    def store(
        self,
        variables: Mapping[Any, xr.Variable],
        attributes: Any,
        check_encoding_set: Collection[Any] = frozenset(),
        writer: Any = None,
        unlimited_dims: Any = None,
    ) -> None:
        """Write variables and the group's attributes."""
        existing = {name: v for name, v in variables.items() if str(name) in self.there.nodes}
        new = {name: v for name, v in variables.items() if name not in existing}
        like = {name: self._like_stored(str(name), v) for name, v in existing.items()}
        put: Any = super().store
        put(new, attributes, check_encoding_set, writer, unlimited_dims)
        for name, variable in like.items():
            if self._mode != "a-" or self._append_dim is None or self._append_dim in variable.dims:
                self._add_to(str(name), variable)

    def _like_stored(self, name: str, variable: xr.Variable) -> xr.Variable:
        """The variable, encoded like the array of that name and with its axes."""
        from xarray.backends.zarr import (
            _validate_and_transpose_existing_dims,
            _validate_datatypes_for_zarr_append,
        )

        like = self.there.like(name)
        _validate_datatypes_for_zarr_append(name, like, variable)  # type: ignore[no-untyped-call]
        fit = self.fits.get(name)
        unchecked = fit is None or fit.needs_no_check
        encoded = self.there.encoded_before(name, variable) if unchecked else None
        if encoded is None:
            given = variable.copy(deep=False)
            given.encoding = dict(like.encoding)
            encoded = self.encode({name: given}, {})[0][name]
        fitting: Any = _validate_and_transpose_existing_dims
        stored, region = self.there.variable(name), self._write_region
        found: xr.Variable = fitting(name, encoded, stored, region, self._append_dim)
        return found

    def _add_to(self, name: str, variable: xr.Variable) -> None:
        """Have an encoded variable written to the existing array of that name."""
        from xarray.backends.chunks import validate_grid_chunks_alignment
        from xarray.backends.zarr import extract_zarr_variable_encoding

        encoding: Any = extract_zarr_variable_encoding
        formatted = self.zarr_group.metadata.zarr_format
        stored = encoding(variable, name=name, zarr_format=formatted)
        shape, places = list(self.there.variable(name).shape), []
        for axis, dim in enumerate(variable.dims):
            if dim == self._append_dim:
                places.append(slice(shape[axis], None))
                shape[axis] += variable.shape[axis]
            else:
                places.append((self._write_region or {}).get(dim, slice(None)))
        check: Any = validate_grid_chunks_alignment
        check(
            nd_v_chunks=variable.chunks,
            enc_chunks=stored.get("shards") or stored["chunks"],
            region=tuple(places),
            allow_partial_chunks=self._mode != "r+",
            name=name,
            backend_shape=tuple(shape),
        )
        longer = None if self._append_dim not in variable.dims else shape
        array = self.there.open_array_in(self.zarr_group.store, name, longer)
        self.writer.add(variable.data, array, tuple(places))

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Replace the group's attributes, if they differ as JSON: 1 and 1.0 do."""
        there, given = (
            json.dumps(each, sort_keys=True, default=repr)
            for each in (self.zarr_group.attrs.asdict(), attributes)
        )
        if there != given:
            put: Any = super().set_attributes
            put(attributes)

    def encode(self, variables: Mapping[str, xr.Variable], attributes: Any) -> Any:
        """Encode the variables and attributes; raises `MisfitError` if values do not fit."""
        encode: Any = super().encode
        encoded = {}
        for name, variable in variables.items():
            fit = self.fits.get(str(name))
            encoded[name] = None if fit is None else self._encoded(variable, fit)
            if encoded[name] is None:
                encoded.update(encode({name: variable}, {})[0])
        return encoded, encode({}, attributes)[1]

    def _encoded(self, variable: xr.Variable, fit: Fit) -> xr.Variable | None:
        """The variable, encoded and checked; None if xarray is to encode it, once it is checked."""
        if fit.needs_no_check:
            return None
        like = fit.encoded_like(variable)
        if like is not None:
            return xr.Variable(
                variable.dims, self._data(variable, fit, like.dtype), like.attrs, like.encoding
            )
        if variable.chunks is None:
            fit.checked(variable.load())
        else:
            variable.data = _checked_blocks(variable, fit)
        return None

    def _data(self, variable: xr.Variable, fit: Fit, dtype: np.dtype[Any]) -> Any:
        """The encoded values; dask's blocks are encoded when they are written."""
        kept = {key: variable.encoding[key] for key in _ENCODING if key in variable.encoding}
        path = (self.zarr_group.store_path / fit.name).path  # names may have slashes
        if variable.chunks is not None:
            self.writer.encoders[path] = Encoder(fit, variable.dims, variable.attrs, kept)
            return _declared(variable.data, dtype)
        given = xr.Variable(variable.dims, variable.values, variable.attrs, kept)
        if not fit.is_checked_by_bounds:
            return fit.encoded(given)
        codes = fit.cast(given)
        self.writer.unchecked[path] = fit, given, codes
        return codes


def _declared(lazy: Any, dtype: np.dtype[Any]) -> Any:
    """The dask array under the type that its blocks will be stored as."""
    from dask.array import Array

    return Array(lazy.dask, lazy.name, lazy.chunks, dtype)  # type: ignore[no-untyped-call]


def _checked_blocks(variable: xr.Variable, fit: Fit) -> Any:
    """The dask array, each block of which is checked when it is computed."""
    kept = {key: variable.encoding[key] for key in _ENCODING if key in variable.encoding}
    how = variable.dims, variable.attrs, kept
    lazy: Any = variable.data
    of_block = partial(_checked_block, fit=fit, how=how, chunks=lazy.chunks)
    none = np.empty((0,) * variable.ndim, variable.dtype)
    return lazy.map_blocks(of_block, dtype=variable.dtype, meta=none)


def _checked_block(
    block: Any,
    *,
    fit: Fit,
    how: tuple[Any, ...],
    chunks: Sequence[Sequence[int]],
    block_id: Sequence[int],
) -> Any:
    start = tuple(sum(sizes[:at]) for sizes, at in zip(chunks, block_id, strict=True))
    dims, attributes, encoding = how
    return fit.checked(xr.Variable(dims, np.asarray(block), attributes, encoding), start)


# --- what does not fit ---------------------------------------------------------------------------


@contextmanager
def explained(
    ds: xr.Dataset, fits: Mapping[str, Fit], rows: Mapping[Hashable, Sequence[int]] | None = None
) -> Iterator[None]:
    """Say which values of the dataset do not fit, if a `MisfitError` is raised in the block.

    Parameters
    ----------
    ds : Dataset
        The dataset as it was given.
    fits : mapping
        How each variable is stored, by name.
    rows : mapping, optional
        By dimension, the positions in `ds` of what is written; by default, all of it is.

    Raises
    ------
    InvalidArgumentError
        If a `MisfitError` is raised in the block.
    """
    try:
        yield
    except MisfitError as error:
        raise InvalidArgumentError(_explained(error, ds, fits[error.name], rows or {})) from None


def _explained(
    error: MisfitError, ds: xr.Dataset, fit: Fit, rows: Mapping[Hashable, Sequence[int]]
) -> str:
    """Describe what does not fit, where it is, what would fit, and what to do."""
    told = "; ".join(
        f"{found.given} {_place(ds, fit.name, found.index, rows)}would be read back as {found.read}"
        for found in error.misfits
    )
    where, way = "the array that is there", "write the array anew, with room for both"
    if fit.stored is None:
        where = "their encoding"
        way = (
            f"give another encoding={{{fit.name!r}: ...}}, or drop the one that came with the "
            f"data, by ds[{fit.name!r}].encoding.clear()"
        )
    return (
        f"values of {fit.name!r} do not fit {where}, which has room for {fit.range_text}: {told}. "
        f"Nothing is committed. Correct the values, or {way}; check='encoding' writes them as "
        "they are"
    )


def _place(
    ds: xr.Dataset, name: str, index: Sequence[int], rows: Mapping[Hashable, Sequence[int]]
) -> str:
    """Labels and positions of a value."""
    dims = ds.variables[name].dims
    index = [rows[dim][at] if dim in rows else at for dim, at in zip(dims, index, strict=True)]
    labels = [
        f"{dim}={ds.indexes[dim][at]}" if dim in ds.indexes else f"{dim}[{at}]"
        for dim, at in zip(dims, index, strict=True)
    ]
    positions = ", ".join(map(str, index))
    return f"at {', '.join(labels)} (position {positions}) " if labels else ""


# --- how each variable is stored -----------------------------------------------------------------


def fits_of(
    ds: xr.Dataset,
    group: StoredGroup,
    options: Mapping[str, Any],
    encoding: Mapping[Hashable, Mapping[str, Any]],
    known: Collection[str] = (),
) -> dict[str, Fit]:
    """Return how each variable to check is stored, by name.

    Parameters
    ----------
    ds : Dataset
        The dataset to write.
    group : StoredGroup
        The group to write to.
    options : mapping
        The arguments of `Dataset.to_zarr`: `group`, `mode` and `append_dim`.
    encoding : mapping
        Encodings of new variables, by name.
    known : collection of str
        Names of variables that need no check.

    Returns
    -------
    dict
        Without variables that a write leaves as they are.
    """
    there = group.nodes if group.exists and options["mode"] != "w" else {}
    fits = {}
    for name, variable in ds.variables.items():
        if str(name) in known:
            continue
        if str(name) in there:
            along = options["append_dim"]
            if options["mode"] == "a-" and along is not None and along not in variable.dims:
                continue  # xarray does not change it
            array, like = group.variable(str(name)), group.like(str(name))
            how: Mapping[str, Any] = {**array.attrs, **like.encoding, "dtype": array.dtype}
        else:
            how = encoding.get(name, variable.encoding)
        kept: dict[str, Any] = {key: how[key] for key in _ENCODING if key in how}
        stored = np.dtype(kept["dtype"]) if str(name) in there else None
        own, lazy = dict(variable.attrs), variable.chunks is not None
        fits[str(name)] = Fit(str(name), variable.dtype, own, kept, stored, lazy)
    return fits


def encoding_of(name: str, stored: np.dtype[Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return how xarray would encode values for an array with these attributes.

    Parameters
    ----------
    name : str
        Name of the array.
    stored : dtype
        The array's type.
    attributes : mapping
        The attributes of the array.
    """
    none = xr.Variable((name,), np.empty(0, stored), dict(attributes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # xarray itself warns when it writes
        decoded = decode_cf_variable(name, none, decode_times=False)
    how = {**attributes, **decoded.encoding, "dtype": stored}
    return {key: how[key] for key in _ENCODING if key in how}


def fit_of(
    name: str, given: np.dtype[Any], stored: np.dtype[Any], attributes: Mapping[str, Any]
) -> Fit:
    """Return how values of a type are stored in an array.

    Parameters
    ----------
    name : str
        Name of the array.
    given, stored : dtype
        Types of the values and of the array.
    attributes : mapping
        The attributes of the array.
    """
    return Fit(name, given, {}, encoding_of(name, stored, attributes), stored, False)
