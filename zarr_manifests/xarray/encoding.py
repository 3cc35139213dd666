"""Encoding a dataset for a store, and checking its values.

Xarray encodes and writes the dataset, as `Dataset.to_zarr` does; `Fit` checks what it has encoded.

Invariants: `begin_write` checks all values in memory before it writes a chunk; dask values are
checked once, when and where they are computed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr
import zarr
from xarray.backends import ZarrStore
from xarray.backends.common import ArrayWriter
from xarray.conventions import decode_cf_variable

from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.conflict.append_labels import aligned_blocks
from zarr_manifests.runtime import quiet
from zarr_manifests.store import ManifestStore, workspace_of
from zarr_manifests.xarray.array_target import ArrayTarget
from zarr_manifests.xarray.fit import DECODED_BY, Fit, MisfitError, is_time
from zarr_manifests.xarray.stored_group import StoredGroup, meaning_of_bounds, open_array

__all__ = [
    "DatasetWriter",
    "begin_write",
    "explained",
    "fit_of",
    "fits_of",
    "of_first_label",
    "open_target",
    "units_of_first",
]


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
    target = open_target(store, options, region, there)
    target.fits, target.writer = fits, writer
    ds = target._validate_and_autodetect_region(ds)
    target._validate_encoding(encoding)
    dump_to_store(ds, target, writer, encoding=encoding)  # type: ignore[no-untyped-call]
    return writer


class DatasetWriter(ArrayWriter):
    """Xarray's writer, which may measure what it writes; values in memory are written at once."""

    __slots__ = ("_all", "_statistics", "_workspace")
    sources: list[Any]
    targets: list[ArrayTarget]
    regions: list[Any]

    def __init__(self, workspace: Workspace, *, statistics: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace, self._statistics = workspace, statistics
        self._all: list[ArrayTarget] = []

    def add(self, source: Any, target: Any, region: Any = None) -> None:
        """Write the source, or keep it for `sync` if dask computes it."""
        to = ArrayTarget(target, self._workspace, statistics=self._statistics)
        self._all.append(to)
        if isinstance(source, np.ndarray):
            to[region or ...] = source
            return
        add: Any = super().add
        add(source, to, region)

    def sync(self, *args: Any, **options: Any) -> Any:
        """Compute and write the dask arrays, and record zone maps of all arrays."""
        sync: Any = super().sync
        sync(*args, **options)
        self.record()

    def record(self) -> None:
        """Record the zone maps of what is written so far."""
        for array in self._all:
            array.record()


def open_target(
    store: ManifestStore,
    options: Mapping[str, Any],
    region: Any,
    there: StoredGroup | None = None,
) -> _Store:
    """Return the group to write to, made if it does not exist.

    Takes arguments of `begin_write`.
    """
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
        chunks = stored.get("shards") or stored["chunks"]
        if variable.chunks is not None:  # no two blocks write to a chunk
            starts = [part.indices(size)[0] for part, size in zip(places, shape, strict=True)]
            each = zip(variable.dims, variable.chunks, starts, chunks, strict=True)
            variable = variable.chunk({dim: aligned_blocks(*rest) for dim, *rest in each})
        check: Any = validate_grid_chunks_alignment
        check(
            nd_v_chunks=variable.chunks,
            enc_chunks=chunks,
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
            how = variable.encoding
            if variable.dtype.kind in "iu" and how.get("add_offset") is not None:
                variable = variable.astype(np.float64)  # xarray adds no offset to whole numbers
                variable.encoding = how
            fit = self.fits.get(str(name))
            if fit is not None and variable.chunks is None:
                variable.load()  # once, if it is of a file
            if fit is None:
                encoded.update(encode({name: variable}, {})[0])
                continue
            with np.errstate(all="ignore"), quiet():  # what they warn of is checked
                own = encode({name: variable}, {})[0][name]
            encoded[name] = fit.checked(variable, own)
        return encoded, encode({}, attributes)[1]


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
        f"Nothing is committed. Correct the values, or {way}; check=False writes them as "
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
) -> dict[str, Fit]:
    """Return how each variable is stored, by name.

    Parameters
    ----------
    ds : Dataset
        The dataset to write.
    group : StoredGroup
        The group to write to.
    options : mapping
        The arguments of `Dataset.to_zarr`: `group`, `mode`, `append_dim` and `zarr_format`.
    encoding : mapping
        Encodings of new variables, by name.

    Returns
    -------
    dict
        Without variables that a write leaves as they are.
    """
    there = group.nodes if group.exists and options["mode"] != "w" else {}
    fits = {}
    bounding = [
        {**variable.attrs, "units": "days since 1970-01-01"}
        for variable in ds.variables.values()
        if "bounds" in variable.attrs and is_time(variable)
    ]
    for key, variable in ds.variables.items():
        name, own, along = str(key), dict(variable.attrs), options["append_dim"]
        if name not in there:
            bounds = variable.attrs.get("bounds")
            if bounds in there and is_time(variable) and "units" not in group.attributes[bounds]:
                raise InvalidArgumentError(
                    f"{name!r} has times and says that {bounds!r} has their bounds: a reader would "
                    "make times of the numbers that are there. Write the bounds anew together with "
                    "the times, with mode='w', or leave the attribute out"
                )
            how = encoding.get(key, variable.encoding)
            more = meaning_of_bounds(
                name, [*bounding, *(group.attributes.values() if there else ())]
            )
            if options["zarr_format"] == 2 and how.get("fill_value") is not None:
                more["_FillValue"] = how["fill_value"]
            fits[name] = Fit(name, own, _kept(how), more=more)
        elif options["mode"] != "a-" or along is None or along in variable.dims:
            stored = group.variable(name)
            attributes = meaning_of_bounds(name, group.attributes.values()) | stored.attrs
            fits[name] = Fit(name, own, _kept(group.like(name).encoding), stored.dtype, attributes)
    return fits


def of_first_label(
    ds: xr.Dataset, dim: Hashable, encoding: Mapping[Hashable, Mapping[str, Any]]
) -> tuple[xr.Dataset, Mapping[Hashable, Mapping[str, Any]]]:
    """The dataset and encodings that make room for times after the first; see `units_of_first`.

    Units that the encodings name stay.
    """
    if ds.sizes.get(dim) != 1:
        return ds, encoding
    for name, variable in ds.variables.items():
        how = encoding.get(name, variable.encoding)
        dtype = np.dtype(how.get("dtype") or np.int64)
        if dim not in variable.dims or variable.dtype.kind != "M" or variable.chunks is not None:
            continue
        if name in encoding and "units" in how:
            continue
        units = units_of_first(variable.values, how.get("units"), dtype)
        if units is None:
            continue
        if name in encoding:
            encoding = {**encoding, name: {**how, "units": units}}
        else:
            timed = variable.copy(deep=False)
            timed.encoding = {**how, "units": units}
            ds = ds.assign({name: timed})
    return ds, encoding


def units_of_first(times: npt.NDArray[Any], units: str | None, dtype: np.dtype[Any]) -> str | None:
    """Units in which an array of a first time has room for more; None if its own have.

    Of one time, xarray makes days since that time, and an hour later is no whole day. Of its bounds
    it makes units as coarse as these are.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.xarray.encoding import units_of_first
    >>> times = np.array(["2026-01-01T05"], "M8[ns]")
    >>> units_of_first(times, "days since 2026-01-01 05:00:00", np.dtype("i8"))
    'seconds since 2026-01-01 05:00:00'
    >>> units_of_first(times, "hours since 1900-01-01", np.dtype("i8"))
    """
    if times.dtype.kind != "M" or dtype.kind not in "iu" or dtype.itemsize < 4:
        return None
    seconds = times.astype("M8[s]")
    if not times.size or np.isnat(times).any() or (seconds != times).any():
        return None
    if units is None:
        return f"seconds since {str(seconds.min()).replace('T', ' ')}"
    if len({*times.ravel()}) != 1:
        return None
    since = units.partition(" since ")[2]
    try:
        is_first = np.datetime64(pd.Timestamp(since).to_datetime64()) == seconds.flat[0]
    except (ValueError, OverflowError):  # a date of another calendar
        return None
    return f"seconds since {since}" if is_first else None


def _kept(encoding: Mapping[str, Any]) -> dict[str, Any]:
    return {key: encoding[key] for key in (*DECODED_BY, "dtype") if key in encoding}


def fit_of(name: str, stored: np.dtype[Any], attributes: Mapping[str, Any]) -> Fit:
    """Return how values are stored in an existing array.

    Parameters
    ----------
    name : str
        Name of the array.
    stored : dtype
        Its type.
    attributes : mapping
        Its attributes.
    """
    none = xr.Variable((name,), np.empty(0, stored), dict(attributes))
    with quiet():  # xarray itself warns when it writes
        decoded = decode_cf_variable(name, none, decode_times=False)
    how = _kept({**attributes, **decoded.encoding, "dtype": stored})
    return Fit(name, {}, how, stored, attributes)
