"""Whether a dataset agrees with the existing arrays that it is written to.

xarray writes values into existing arrays and leaves their attributes alone. So values mean what the
attributes of the first write say: days since 1990 appended to days since 1980 are ten years off.
Times that are not whole days are written in hours, without the array saying so. An append makes
some arrays longer, and a dataset opens only if all arrays of a dimension have the same length. Such
writes are refused here, before anything is written.

Invariants: no data is read but times and index coordinates; these reads do not count as reads of
the session, so its commit can still be rebased onto others'.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Final

import numpy as np
import xarray as xr
from xarray.conventions import decode_cf_variable

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.nodes import Node
from zarr_manifests.xarray.fit import PACKED_BY, TIMED_BY
from zarr_manifests.xarray.parts import is_virtual
from zarr_manifests.xarray.stored_group import StoredGroup, meaning_of_bounds

__all__ = ["check_agreement", "check_not_new"]

_CLOSE: Final = 1e-6
"""Relative; coordinates that differ by less are from the same grid."""
_LISTED: Final = 5
_SAME_NOW: Final = ("standard", "gregorian", "proleptic_gregorian")
"""Calendars that agree since 1582."""


def check_agreement(ds: xr.Dataset, group: StoredGroup, append_dim: Hashable | None) -> None:
    """Refuse a dataset whose values would change their meaning in the group's arrays.

    Parameters
    ----------
    ds : Dataset
        The dataset to write.
    group : StoredGroup
        The group to write to.
    append_dim : hashable, optional
        The dimension to append along.

    Raises
    ------
    InvalidArgumentError
        If units or calendar differ from an existing array's; if values are packed already and the
        existing ones are not; or if after the append arrays would differ in length, or an index
        coordinate would not match the existing one.
    """
    arrays = group.nodes
    if append_dim is not None:
        _check_lengths(ds, arrays, append_dim)
    _check_sizes(ds, arrays, append_dim)
    for name in sorted(map(str, ds.variables)):
        if name in arrays:
            _check_variable(name, ds.variables[name], group, append_dim)


def _check_lengths(ds: xr.Dataset, arrays: Mapping[str, Node], append_dim: Hashable) -> None:
    lengths: dict[str, int] = {}
    for name, node in arrays.items():
        names = node.array.dimension_names if node.array is not None else None
        if names is not None and append_dim in names:
            assert node.array is not None
            lengths[name] = node.array.shape[names.index(str(append_dim))]
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {n}" for name, n in sorted(lengths.items())[:_LISTED])
        raise InvalidArgumentError(
            f"the arrays along {append_dim!r} have different lengths already ({listed}), so an "
            "append would put values at different positions; resize them to one length first"
        )
    missing = lengths.keys() - set(map(str, ds.variables))
    if missing:
        raise InvalidArgumentError(
            f"{_names(missing)} would be left shorter than the rest along {append_dim!r}, and the "
            "group could not be opened as a dataset any more: append all of its variables "
            "together, or delete those arrays"
        )
    if any(lengths.values()):
        check_not_new(ds, arrays, append_dim)


def _check_sizes(ds: xr.Dataset, arrays: Mapping[str, Node], append_dim: Hashable | None) -> None:
    """Refuse new variables with which the group would not open: a dimension has one length."""
    metas = {name: node.array for name, node in arrays.items() if node.array is not None}
    sizes = {
        dim: (size, name)
        for name, meta in metas.items()
        for dim, size in zip(meta.dimension_names or (), meta.shape, strict=False)
    }
    scalars = {name for name, meta in metas.items() if not meta.shape}
    for name, variable in ds.variables.items():
        if name in arrays:
            continue
        for dim, size in variable.sizes.items():
            there, other = sizes.get(str(dim), (size, ""))
            if dim in scalars or (there != size and dim != append_dim):
                found = "a scalar" if dim in scalars else f"{there} long, as {other!r} has it"
                raise InvalidArgumentError(
                    f"{name!r} has {size} values along {dim!r}, and {dim!r} is {found}: the group "
                    "could not be opened as a dataset any more. Rename the dimension, or write to "
                    "another group, with group=..."
                )
        if not variable.dims and str(name) in sizes:
            raise InvalidArgumentError(
                f"{name!r} is a dimension in the group and would become a scalar, with which the "
                "group could not be opened as a dataset any more: rename it"
            )


def check_not_new(ds: xr.Dataset, arrays: Mapping[str, Node], append_dim: Hashable) -> None:
    """Refuse variables along the dimension that the group, which has values along it, lacks.

    Raises
    ------
    InvalidArgumentError
        If there are any.
    """
    new = {str(k) for k, v in ds.variables.items() if append_dim in v.dims} - arrays.keys()
    if new:
        raise InvalidArgumentError(
            f"{_names(new)} does not exist yet, so an append would leave it shorter than the "
            f"rest along {append_dim!r}: write it at full length first, or drop it from the append"
        )


def _check_variable(
    name: str, variable: xr.Variable, group: StoredGroup, append_dim: Hashable | None
) -> None:
    meaning = meaning_of_bounds(name, group.attributes.values())
    attributes = {**meaning, **group.attributes[name]}
    own = dict(variable.attrs)
    if "units" in own and attributes.get("calendar") not in (None, *_SAME_NOW):
        own.setdefault("calendar", "standard")  # as CF says
    if "units" in attributes and own.get("calendar") not in (None, *_SAME_NOW):
        attributes.setdefault("calendar", "standard")
    for key in TIMED_BY:
        there, given = attributes.get(key), own.get(key)
        if not (given is None or there is None or _same_units(str(given), str(there))):
            raise InvalidArgumentError(
                f"{name!r} has the {key} {given!r}, and the existing array keeps its {key} "
                f"{there!r}: convert the values, or drop the attribute if it means the same"
            )
    for key in PACKED_BY:
        if key in variable.attrs and key not in attributes:  # if it is in both, xarray refuses
            raise InvalidArgumentError(
                f"{name!r} has the attribute {key!r}, so its values are encoded already, and the "
                "existing array has no such attribute: decode the dataset first, with "
                "xr.decode_cf, or drop the attribute if it means nothing"
            )
    is_index = variable.dims == (name,) and append_dim is not None and name != append_dim
    if variable.chunks is not None or is_virtual(variable) or not is_index:
        return
    if variable.shape == group.array(name).shape and not _same(name, variable, group):
        raise InvalidArgumentError(
            f"the values of {name!r} differ from the existing ones, which an append would replace "
            f"for all earlier data: bring the dataset onto the same {name!r} (such as by sortby or "
            f"reindex), or drop {name!r} if only its values are wrong"
        )


def _same_units(one: str, other: str) -> bool:
    """Whether both units are equivalent; a reference date can be written in several ways."""
    if one == other:
        return True
    if " since " not in one or " since " not in other:
        return False
    try:
        times = (xr.Variable("t", [0, 1], {"units": units}) for units in (one, other))
        a, b = (decode_cf_variable("t", time) for time in times)
    except ValueError:
        return False
    return bool((a.values == b.values).all())


def _same(name: str, variable: xr.Variable, group: StoredGroup) -> bool:
    """Whether an index coordinate is the stored one; floats may be rounded in another way."""
    new, old = np.asarray(group.encoded(name, variable).values), group.values(name)
    units = str(group.attributes[name].get("units"))
    if new.dtype.kind == old.dtype.kind == "f" and " since " not in units:
        close = _CLOSE * np.ptp(old) / old.size if old.size else 0.0
        return np.allclose(new, old, rtol=_CLOSE, atol=close, equal_nan=True)
    return bool(((new == old) | ((new != new) & (old != old))).all())


def _names(names: Iterable[str]) -> str:
    found = sorted(names)
    rest = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return ", ".join(map(repr, found[:_LISTED])) + rest
