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
from contextlib import suppress
from typing import Any, Final

import numpy as np
import xarray as xr
from xarray.conventions import decode_cf_variable

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.xarray.fit import PACKED_BY
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
    if append_dim is not None:
        _check_lengths(ds, group, append_dim)
    _check_sizes(ds, group, append_dim)
    for key, variable in ds.variables.items():
        name = str(key)
        if name in group.nodes:
            _check_meaning(name, variable.attrs, group)
            in_memory = variable.chunks is None and not is_virtual(variable)
            if append_dim not in (None, name) and variable.dims == (name,) and in_memory:
                _check_index(name, variable, group)


def check_not_new(ds: xr.Dataset, group: StoredGroup, append_dim: Hashable) -> None:
    """Refuse variables along the dimension that the group, which has values along it, lacks.

    Raises
    ------
    InvalidArgumentError
        If there are any.
    """
    new = {str(k) for k, v in ds.variables.items() if append_dim in v.dims} - group.nodes.keys()
    if new:
        raise InvalidArgumentError(
            f"{_names(new)} does not exist yet, so an append would leave it shorter than the "
            f"rest along {append_dim!r}: write it at full length first, or drop it from the append"
        )


def _check_lengths(ds: xr.Dataset, group: StoredGroup, append_dim: Hashable) -> None:
    sizes = {name: group.sizes(name).get(str(append_dim)) for name in group.nodes}
    lengths = {name: size for name, size in sizes.items() if size is not None}
    if len({*lengths.values()}) > 1:
        listed = ", ".join(f"{name} {n}" for name, n in sorted(lengths.items())[:_LISTED])
        raise InvalidArgumentError(
            f"the arrays along {append_dim!r} have different lengths already ({listed}), so an "
            "append would put values at different positions; resize them to one length first"
        )
    missing = lengths.keys() - {str(name) for name in ds.variables}
    if missing:
        raise InvalidArgumentError(
            f"{_names(missing)} would be left shorter than the rest along {append_dim!r}, and the "
            "group could not be opened as a dataset any more: append all of its variables "
            "together, or delete those arrays"
        )
    if any(lengths.values()):
        check_not_new(ds, group, append_dim)


def _check_sizes(ds: xr.Dataset, group: StoredGroup, append_dim: Hashable | None) -> None:
    """Refuse new variables with which the group would not open: a dimension has one length."""
    sizes: dict[Any, tuple[int, str]] = {
        dim: (size, name) for name in group.nodes for dim, size in group.sizes(name).items()
    }
    scalars = {name for name in group.nodes if not group.meta(name).shape}
    for name, variable in ds.variables.items():
        if str(name) in group.nodes:
            continue
        wrong = "is a dimension there" if not variable.dims and str(name) in sizes else ""
        for dim, size in variable.sizes.items():
            there, other = sizes.get(str(dim), (size, ""))
            if dim in scalars:
                wrong = f"has the dimension {dim!r}, which is a scalar there"
            elif there != size and dim != append_dim:
                wrong = f"has {size} values along {dim!r}, and {other!r} has {there} there"
        if wrong:
            raise InvalidArgumentError(
                f"{name!r} {wrong}: the group could not be opened as a dataset any more. Rename "
                "variable or dimension, or write to another group, with group=..."
            )


def _check_meaning(name: str, given: Mapping[str, Any], group: StoredGroup) -> None:
    kept = {**meaning_of_bounds(name, group.attributes.values()), **group.attributes[name]}
    if "units" in given and "units" in kept:
        (one, own), (other, there) = _meaning(given), _meaning(kept)
        if one != other:
            raise InvalidArgumentError(
                f"{name!r} has {own}, and the existing array keeps {there}: convert the values, or "
                "drop the attribute if it means the same"
            )
    for key in PACKED_BY:
        if key in given and key not in kept:  # if it is in both, xarray refuses
            raise InvalidArgumentError(
                f"{name!r} has the attribute {key!r}, so its values are encoded already, and the "
                "existing array has no such attribute: decode the dataset first, with "
                "xr.decode_cf, or drop the attribute if it means nothing"
            )


def _meaning(attributes: Mapping[str, Any]) -> tuple[object, str]:
    """What units and calendar mean, to compare, and how to name them.

    A reference date can be written in several ways.
    """
    units, calendar = str(attributes["units"]), attributes.get("calendar", "standard")
    if " since " not in units:
        return units, f"units {units!r}"
    found: object = units
    with suppress(ValueError):
        numbers = xr.Variable("t", [0, 1], {"units": units, "calendar": calendar})
        found = [str(time) for time in decode_cf_variable("t", numbers).values]
    told = f"units {units!r} with calendar {calendar!r}"
    return (calendar in _SAME_NOW or calendar, found), told


def _check_index(name: str, variable: xr.Variable, group: StoredGroup) -> None:
    """Refuse other labels than the stored ones; floats may be rounded in another way."""
    if variable.shape != group.meta(name).shape:
        return
    new, old = np.asarray(group.encoded(name, variable).values), group.values(name)
    units = str(group.attributes[name].get("units"))
    if new.dtype.kind == old.dtype.kind == "f" and " since " not in units:
        close = _CLOSE * np.ptp(old) / old.size if old.size else 0.0
        same = np.allclose(new, old, rtol=_CLOSE, atol=close, equal_nan=True)
    else:
        same = bool(((new == old) | ((new != new) & (old != old))).all())
    if not same:
        raise InvalidArgumentError(
            f"the values of {name!r} differ from the existing ones, which an append would replace "
            f"for all earlier data: bring the dataset onto the same {name!r} (such as by sortby or "
            f"reindex), or drop {name!r} if only its values are wrong"
        )


def _names(names: Iterable[str]) -> str:
    found = sorted(names)
    rest = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return ", ".join(map(repr, found[:_LISTED])) + rest
