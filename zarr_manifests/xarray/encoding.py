"""Encoding a dataset for a store, and checking its values.

Xarray encodes and writes the dataset, as `Dataset.to_zarr` does; `Fit` checks what it has encoded.

Invariants: `begin_write` checks all values in memory before it writes a chunk; dask values are
checked once, when and where they are computed.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr
import zarr
from xarray.backends import ZarrStore
from xarray.backends.chunks import validate_grid_chunks_alignment
from xarray.backends.zarr import encode_zarr_attr_value, encode_zarr_variable
from xarray.conventions import decode_cf_variable, encode_dataset_coordinates
from zarr.core.group import ConsolidatedMetadata

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.conflict.append_labels import aligned_blocks
from zarr_manifests.runtime import quiet
from zarr_manifests.store import ManifestStore, contents_of, workspace_of
from zarr_manifests.xarray.array_target import DatasetWriter
from zarr_manifests.xarray.fit import DECODED_BY, Fit, MisfitError, is_time
from zarr_manifests.xarray.stored_group import StoredGroup, meaning_of_bounds

__all__ = [
    "begin_write",
    "explained",
    "fit_of",
    "fits_of",
    "located",
    "of_first_label",
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
        The dataset to write. Axes are in the order of existing arrays.
    store : ManifestStore
        The store to write to.
    options : mapping
        `group`, `mode`, `append_dim` and `zarr_format`, as for `Dataset.to_zarr`.
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
    path, mode, along = options["group"] or "", options["mode"], options["append_dim"]
    there = there or StoredGroup.of(store, path)
    if not there.exists or mode not in ("a", "a-", "r+"):
        how: Any = "a" if mode == "a-" else mode
        zarr.open_group(store, path=path, mode=how, zarr_format=options["zarr_format"])
        there = StoredGroup.of(store, path)
    ds = ds.copy()
    for variable in ds.variables.values():
        if variable.size == 0:  # Zarr accepts no chunks of length 0
            variable.load()
    place: Mapping[str, slice] = {}
    if region is not None:
        place = located(ds, store, options, region)
        ds = ds.drop_vars(ds.indexes)
    _check_names(ds, there, options, encoding)
    encode: Any = encode_dataset_coordinates
    variables, attributes = encode(ds)
    for name, how in encoding.items():
        variables[name].encoding = dict(how)
    # All is checked before any of it is written.
    encoded = {name: _encoded(str(name), v, there, fits) for name, v in variables.items()}
    old = {
        str(name): _fitted(str(name), variable, there, options, place)
        for name, variable in encoded.items()
        if str(name) in there.nodes and (mode != "a-" or along is None or along in variable.dims)
    }
    new = {name: v for name, v in encoded.items() if str(name) not in there.nodes}
    writer, group = DatasetWriter(workspace_of(store), statistics=statistics), there.open_in(store)
    if mode != "r+":
        _set_attributes(group, attributes)
    if new:
        # What else is in the group is nothing to these: xarray would open all of it.
        alone: Any = replace(group.metadata, consolidated_metadata=ConsolidatedMetadata({}))
        only = zarr.Group(zarr.AsyncGroup(metadata=alone, store_path=group.store_path))
        to: Any = ZarrStore
        to = to(only, "a", use_zarr_fill_value_as_mask=there.zarr_format == 2)
        to.set_variables(new, {*encoding}, writer)
    for name, (data, cells, shape) in old.items():
        writer.add(data, there.open_array_in(store, name, shape), cells)
    return writer


def located(
    ds: xr.Dataset, store: ManifestStore, options: Mapping[str, Any], region: Any
) -> dict[str, slice]:
    """Return the region with slices in place of "auto", which are found by the labels.

    Raises
    ------
    InvalidArgumentError
        If the region is none of this dataset, or labels are not there, or not beside each other.
    """
    group = StoredGroup(contents_of(store), options["group"] or "")  # a session notes it as read
    found: dict[Hashable, Any] = dict.fromkeys(ds.dims, "auto") if region == "auto" else region
    if not isinstance(found, Mapping):
        raise InvalidArgumentError(f"region is a mapping or 'auto', not {region!r}")
    for dim, part in found.items():
        if dim not in ds.dims:
            known = ", ".join(map(str, ds.dims)) or "none"
            raise InvalidArgumentError(
                f"region names {dim!r}, which is not a dimension of the dataset; there are: {known}"
            )
        if dim == options["append_dim"]:
            raise InvalidArgumentError(f"{dim!r} cannot be both append_dim and in region")
        if part == "auto" and options["mode"] == "a-":
            raise InvalidArgumentError("region='auto' goes with mode 'r+' or 'a', not 'a-'")
        if part != "auto" and (not isinstance(part, slice) or part.step not in (None, 1)):
            raise InvalidArgumentError(
                f"the region of {dim!r} is a slice with step 1 or 'auto', not {part!r}"
            )
    found = {d: _run_of(ds, d, group) if part == "auto" else part for d, part in found.items()}
    apart = [name for name, v in ds.variables.items() if found and found.keys().isdisjoint(v.dims)]
    if apart:
        raise InvalidArgumentError(
            f"{apart[0]!r} has none of the region's dimensions ({', '.join(map(str, found))}): "
            f"leave such variables out, by ds.drop_vars({apart!r})"
        )
    return {str(dim): part for dim, part in found.items()}


def _run_of(ds: xr.Dataset, dim: Hashable, group: StoredGroup) -> slice:
    """Where the labels of a dataset are in the group."""
    if dim not in ds.variables:
        return slice(0, ds.sizes[dim])
    if str(dim) not in group.nodes:
        raise InvalidArgumentError(f"region: the group has no labels of {dim!r}; give a slice")
    there, given = group.labels(str(dim), ds.variables[dim])
    at = pd.Index(there).get_indexer(pd.Index(given))
    if (at < 0).any():
        raise InvalidArgumentError(
            f"region: the label {given[at < 0][0]} of {dim!r} is not in the group; append it"
        )
    if (np.diff(at) != 1).any():
        raise InvalidArgumentError(
            f"region: the labels of {dim!r} are not beside each other, in this order, in the group"
        )
    return slice(int(at[0]), int(at[-1]) + 1) if at.size else slice(0, 0)


def _check_names(
    ds: xr.Dataset,
    there: StoredGroup,
    options: Mapping[str, Any],
    encoding: Mapping[Hashable, Mapping[str, Any]],
) -> None:
    """Refuse variables and encodings that do not go with the arrays that are there."""
    along, dims = options["append_dim"], {dim for name in there.nodes for dim in there.sizes(name)}
    for name in encoding:
        if str(name) in there.nodes:
            raise InvalidArgumentError(
                f"{name!r} exists already and keeps its encoding: leave it out of encoding"
            )
    for name in ds.variables:
        if options["mode"] == "r+" and str(name) not in there.nodes:
            raise InvalidArgumentError(
                f"{name!r} does not exist yet, and mode='r+', as with region, makes no arrays: "
                "write it with mode='a', or drop it"
            )
    if along is not None and along not in dims:
        listed = ", ".join(sorted(map(str, dims))) or "none"
        raise InvalidArgumentError(
            f"append_dim {along!r} is not a dimension of the group; there are: {listed}"
        )


def _encoded(
    name: str, variable: xr.Variable, there: StoredGroup, fits: Mapping[str, Fit]
) -> xr.Variable:
    """The variable as it is stored; raises `MisfitError` if values in memory do not fit."""
    fit, how = fits.get(name), variable.encoding
    if name in there.nodes:
        like = there.like(name)
        how = dict(like.encoding)
        texts = variable.dtype.kind in "SUT" and like.dtype != object
        if texts and variable.dtype != like.dtype:
            raise InvalidArgumentError(
                f"{name!r} has texts of type {variable.dtype}, and the existing array has "
                f"{like.dtype}: cast them, by astype"
            )
    if variable.dtype.kind in "iu" and how.get("add_offset") is not None:
        variable = variable.astype(np.float64)  # xarray adds no offset to whole numbers
    given: Any = variable.copy(deep=False)
    given.encoding = how
    if fit is None:
        found: xr.Variable = encode_zarr_variable(given, name=name, zarr_format=there.zarr_format)
        return found
    if given.chunks is None:
        given.load()  # once, if it is of a file
    with np.errstate(all="ignore"), quiet():  # what they warn of is checked
        own = encode_zarr_variable(given, name=name, zarr_format=there.zarr_format)
    return fit.checked(given, own)


def _set_attributes(group: zarr.Group, attributes: Mapping[str, Any]) -> None:
    """Replace the group's attributes, if they differ as JSON: 1 and 1.0 do."""
    encode: Any = encode_zarr_attr_value
    given = {key: encode(value) for key, value in attributes.items()}
    both = (
        json.dumps(each, sort_keys=True, default=repr) for each in (group.attrs.asdict(), given)
    )
    if len({*both}) > 1:
        group.attrs.put(given)


def _fitted(
    name: str,
    variable: xr.Variable,
    there: StoredGroup,
    options: Mapping[str, Any],
    region: Mapping[str, slice],
) -> tuple[Any, tuple[slice, ...], tuple[int, ...]]:
    """The data for an existing array, the cells it goes to, and the shape the array then has.

    No two dask blocks write to a chunk.
    """
    meta, dims, along = there.meta(name), (*there.sizes(name),), options["append_dim"]
    if variable.dims != dims:
        raise InvalidArgumentError(
            f"{name!r} has the dimensions {variable.dims}, and the existing array has {dims}: "
            "rename them, or write the array anew"
        )
    shape, cells = list(meta.shape), []
    for axis, (dim, size) in enumerate(variable.sizes.items()):
        start, stop, _ = region.get(str(dim), slice(None)).indices(shape[axis])
        if dim == along:
            start, stop = shape[axis], shape[axis] + size
            shape[axis] = stop
        if stop - start != size:
            raise InvalidArgumentError(
                f"{name!r} has {size} values along {dim!r}, and there is room for "
                f"{max(stop - start, 0)}: give append_dim={dim!r} to append, or region to "
                "write to a part"
            )
        cells.append(slice(start, stop))
    if variable.chunks is not None:
        starts = [part.start for part in cells]
        each = zip(variable.chunks, starts, meta.chunk_shape, strict=True)
        blocks = [aligned_blocks(*axis) for axis in each]
        variable = variable.chunk(dict(zip(dims, blocks, strict=True)))
        validate_grid_chunks_alignment(
            nd_v_chunks=variable.chunks,
            enc_chunks=tuple(meta.chunk_shape),
            region=tuple(cells),
            allow_partial_chunks=options["mode"] != "r+",
            name=name,
            backend_shape=tuple(shape),
        )
    return variable.data, tuple(cells), tuple(shape)


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
        fit = fits[error.name]
        told = "; ".join(
            f"{found.given} {_place(ds, fit.name, found.index, rows or {})}would be read back as "
            f"{found.read}"
            for found in error.misfits
        )
        where, way = "the array that is there", "write the array anew, with room for both"
        if fit.stored is None:
            where = "their encoding"
            way = (
                f"give another encoding={{{fit.name!r}: ...}}, or drop the one that came with the "
                f"data, by ds[{fit.name!r}].encoding.clear()"
            )
        raise InvalidArgumentError(
            f"values of {fit.name!r} do not fit {where}, which has room for {fit.range_text}: "
            f"{told}. Nothing is committed. Correct the values, or {way}; check=False writes them "
            "as they are"
        ) from None


def _place(
    ds: xr.Dataset, name: str, index: Sequence[int], rows: Mapping[Hashable, Sequence[int]]
) -> str:
    """Labels and positions of a value."""
    each = zip(ds.variables[name].dims, index, strict=True)
    places = {dim: rows[dim][at] if dim in rows else at for dim, at in each}
    labels = [
        f"{dim}={ds.indexes[dim][at]}" if dim in ds.indexes else f"{dim}[{at}]"
        for dim, at in places.items()
    ]
    positions = ", ".join(map(str, places.values()))
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
            how, attributes = group.like(name).encoding, group.decoded_by(name)
            fits[name] = Fit(name, own, _kept(how), group.array(name).dtype, attributes)
    return fits


def of_first_label(
    ds: xr.Dataset, dim: Hashable, encoding: Mapping[Hashable, Mapping[str, Any]]
) -> tuple[xr.Dataset, Mapping[Hashable, Mapping[str, Any]]]:
    """The dataset and encodings that make room for times after the first; see `units_of_first`.

    Units that the encodings name stay.
    """
    for name, variable in ds.variables.items():
        how = encoding.get(name, variable.encoding)
        asked = name in encoding and "units" in how
        in_memory = variable.dtype.kind == "M" and variable.chunks is None
        if asked or not in_memory or dim not in variable.dims or ds.sizes[dim] != 1:
            continue
        dtype = np.dtype(how.get("dtype") or np.int64)
        units = units_of_first(variable.values, how.get("units"), dtype)
        if units is not None:
            timed = variable.copy(deep=False)
            timed.encoding = {**how, "units": units}
            ds = ds.assign({name: timed})
            if name in encoding:
                encoding = {**encoding, name: timed.encoding}
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
