"""Whether values survive being written to an array and read back.

xarray packs and casts without checking: 330 K, in a 16-bit array packed for 250 to 300 K, is read
back as 264 K. Here such values are refused. Rounding is allowed: within the step of a packing, or
the precision of a floating-point type.

Most parts of an array pass by their smallest and largest value, and most values of the other parts
by comparisons. For the rest, xarray itself encodes and decodes the values, and those that differ
are refused. So no value is refused that would have been read back correctly.

Invariants: values in memory are checked before anything is written; dask values are checked once,
when and where they are computed; no more than a few MB are copied.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xarray as xr
from xarray.conventions import decode_cf_variable, encode_cf_variable

from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.store import ManifestStore, workspace_of
from zarr_manifests.xarray.agreement import meaning_of_bounds

__all__ = ["Fit", "Misfit", "MisfitError", "looked_at"]

_PACKED: Final = ("scale_factor", "add_offset")
_MISSING: Final = ("_FillValue", "missing_value")
_ENCODING: Final = (*_PACKED, *_MISSING, "_Unsigned", "units", "calendar", "dtype")
_PART: Final = 2**17
"""Number of values checked together, so that they fit in a processor's cache."""
_LISTED: Final = 3
_ULPS: Final = 8
"""How many units in the last place packing and unpacking may change a value."""
_EXACT: Final = 2**53
"""Up to here every integer is exactly a float."""
_NEAR: Final = 1e-3
"""Relative; values this near to the end of a range are checked one by one."""
_SECOND: Final = (np.timedelta64(1, "s"), timedelta(seconds=1))
"""Tolerances of numpy's times, and of cftime's."""


class MisfitError(Exception):
    """Raised where dask computes: a variable, and the values that do not fit."""

    def __init__(self, name: str, misfits: tuple[Misfit, ...]) -> None:
        super().__init__(name, misfits)
        self.name, self.misfits = name, misfits


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value, its position, and what it would be read back as."""

    index: tuple[int, ...]
    given: str
    read: str


@contextmanager
def looked_at(
    ds: xr.Dataset,
    store: ManifestStore,
    options: Mapping[str, Any],
    encoding: Mapping[Hashable, Mapping[str, Any]],
) -> Iterator[xr.Dataset]:
    """Yield the dataset to write; its dask arrays are checked when they are computed.

    Parameters
    ----------
    ds : Dataset
        The dataset to write. Values of arrays in memory are checked now.
    store : ManifestStore
        The store to write to; its session has no changes yet.
    options : mapping
        The arguments of `Dataset.to_zarr`: `group`, `mode` and `append_dim`.
    encoding : mapping
        Encodings of new variables, by name.

    Raises
    ------
    InvalidArgumentError
        If values would be read back differently; now, or at the end of the block.
    """
    fits = _fits(ds, store, options, encoding)
    try:
        yield _checked(ds, fits)
    except MisfitError as error:
        raise InvalidArgumentError(_explained(error, ds, fits[error.name])) from None


def _checked(ds: xr.Dataset, fits: Mapping[str, Fit]) -> xr.Dataset:
    ds = ds.copy()
    for name, variable in ds.variables.items():
        fit = fits.get(str(name))
        if fit is None or fit.needs_no_check:
            continue
        if variable.chunks is None:
            fit.check(variable.load().values)
            continue
        lazy: Any = variable.data
        check = partial(_checked_block, fit=fit)
        variable.data = lazy.map_blocks(check, dtype=lazy.dtype, meta=lazy._meta)
    return ds


def _explained(error: MisfitError, ds: xr.Dataset, fit: Fit) -> str:
    """Describe what does not fit, where it is, what would fit, and what to do."""
    told = "; ".join(
        f"{found.given} {_place(ds, fit.name, found.index)}would be read back as {found.read}"
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


def _place(ds: xr.Dataset, name: str, index: Sequence[int]) -> str:
    """Labels and positions of a value."""
    dims = ds.variables[name].dims
    labels = [
        f"{dim}={ds.indexes[dim][at]}" if dim in ds.indexes else f"{dim}[{at}]"
        for dim, at in zip(dims, index, strict=True)
    ]
    positions = ", ".join(map(str, index))
    return f"at {', '.join(labels)} (position {positions}) " if labels else ""


def _checked_block(block: Any, *, fit: Fit, block_info: Any) -> Any:
    start = [lo for lo, _ in block_info[0]["array-location"]]
    fit.check(np.asarray(block), start)
    return block


# --- how each variable is stored -----------------------------------------------------------------


def _fits(
    ds: xr.Dataset,
    store: ManifestStore,
    options: Mapping[str, Any],
    encoding: Mapping[Hashable, Mapping[str, Any]],
) -> dict[str, Fit]:
    there = _encodings_there(ds, store, options)
    fits = {}
    for name, variable in ds.variables.items():
        if name in there:
            along = options["append_dim"]
            if options["mode"] == "a-" and along is not None and along not in variable.dims:
                continue  # xarray does not change it
            how: Mapping[str, Any] = there[name]
        else:
            how = encoding.get(name, variable.encoding)
        kept: dict[str, Any] = {key: how[key] for key in _ENCODING if key in how}
        stored = np.dtype(kept["dtype"]) if name in there else None
        own, lazy = dict(variable.attrs), variable.chunks is not None
        fits[str(name)] = Fit(str(name), variable.dtype, own, kept, stored, lazy)
    return fits


def _encodings_there(
    ds: xr.Dataset, store: ManifestStore, options: Mapping[str, Any]
) -> dict[Hashable, dict[str, Any]]:
    """How xarray would encode values for existing arrays; this reads no chunks."""
    from xarray.backends import ZarrStore

    workspace, group = workspace_of(store), options["group"]
    if options["mode"] == "w" or (group or "") not in workspace.view.nodes:
        return {}
    # Looking at this is no read that the commit depends on.
    reader: Any = ManifestStore(Workspace(workspace.context, workspace.view), read_only=True)
    opened: Any = ZarrStore.open_group(reader, mode="r", group=group, consolidated=False)
    names = {str(name): name for name in ds.variables}
    found: dict[Hashable, dict[str, Any]] = {}
    arrays = {n: opened.open_store_variable(n) for n in opened.array_keys() if n in names}
    attributes = [array.attrs for array in arrays.values()]
    for name, array in arrays.items():
        none = xr.Variable(array.dims, np.empty((0,) * array.ndim, array.dtype), array.attrs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # xarray itself warns when it writes
            decoded = decode_cf_variable(name, none, decode_times=False)
        own = {**array.attrs, **decoded.encoding, "dtype": array.dtype}
        found[names[name]] = {**meaning_of_bounds(name, attributes), **own}
    return found


@dataclass(frozen=True)
class Fit:
    """How a variable is stored, and whether its values survive that.

    Parameters
    ----------
    name : str
        Name of the variable.
    given : dtype
        Type of the values to write.
    attributes : mapping
        The variable's own attributes; with packing among them, the values are packed already.
    encoding : mapping
        How xarray encodes it.
    stored : dtype, optional
        Type of the existing array; None if there is none.
    lazy : bool
        Whether dask computes the values.
    """

    name: str
    given: np.dtype[Any]
    attributes: Mapping[str, Any]
    encoding: Mapping[str, Any]
    stored: np.dtype[Any] | None
    lazy: bool

    def check(self, values: npt.NDArray[Any], start: Sequence[int] = ()) -> None:
        """Check values, the first of which is at position `start`.

        Raises
        ------
        MisfitError
            If some would be read back differently.
        """
        # In memory order, which is fast; the order of values does not matter.
        axes = sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis]))
        along = values.transpose(axes)
        for places, given in self._all_doubtful(along):
            off, read = self._differences(given)
            found = np.flatnonzero(off)[:_LISTED].tolist()
            if found:
                raise MisfitError(
                    self.name,
                    tuple(
                        Misfit(
                            _index(int(places[at]), along.shape, axes, start),
                            _text(given[at]),
                            _text(read[at]),
                        )
                        for at in found
                    ),
                )

    @property
    def needs_no_check(self) -> bool:
        """Whether all values of the type are stored unchanged."""
        if self._is_time and self.stored is None and "units" not in self.encoding:
            return True  # xarray chooses units that fit all of them
        if self._takes_texts:
            return False
        if self._dtype.kind in "OT" or (self.given.kind in "OT" and self._dtype.kind not in "SU"):
            return not self._is_time
        if self._packed or self._missing or self._is_time:
            return False
        if self.given.kind in "iu" and self._dtype.kind in "fc":
            return 8 * self.given.itemsize < np.finfo(self._dtype).nmant
        return np.can_cast(self.given, self._dtype, "safe")

    @property
    def range_text(self) -> str:
        """Describe the values that fit."""
        if self._is_time:
            return f"times as {self._dtype} in {self.encoding.get('units', 'whole units')!r}"
        if self._takes_texts:
            return "texts, and none that is missing"
        if self._dtype.kind in "SU":
            unit = "bytes" if self._dtype.kind == "S" else "characters"
            size = self._dtype.itemsize // (1 if self._dtype.kind == "S" else 4)
            return f"texts of at most {size} {unit}"
        missing = self._missing
        if self._codes is None:
            text = "True and False" if self._dtype.kind == "b" else f"numbers as {self._dtype}"
            if self._dtype.kind == "f":
                largest = float(np.finfo(self._dtype).max)
                text = f"{-largest:.6g} to {largest:.6g} as {self._dtype}"
        else:
            least, greatest = self._codes
            least, greatest = least + (least in missing), greatest - (greatest in missing)
            lo, hi = self._ends(least, greatest)
            kind = f"in steps of {self._step:g}" if self._packed else "whole numbers"
            text = f"{_text(lo)} to {_text(hi)}, {kind}, as {self._dtype}"
        if missing:
            codes = ", ".join(_text(self._ends(code)[0]) for code in missing)
            return f"{text}, where {codes} stands for NaN"
        return f"{text}, and no NaN" if self._codes or self._dtype.kind == "b" else text

    # --- values that surely fit -------------------------------------------------------------------

    def _all_doubtful(
        self, values: npt.NDArray[Any]
    ) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[Any]]]:
        """Values that xarray itself has to encode and decode to decide, and their positions."""
        places, found, count, seen = [], [], 0, 0
        for part in _parts(values):
            at = self._doubtful(part)
            if at.size:
                places.append(seen + at)
                found.append(part[at])
            count, seen = count + at.size, seen + part.size
            if count >= _PART:
                yield np.concatenate(places), np.concatenate(found)
                places, found, count = [], [], 0
        if count:
            yield np.concatenate(places), np.concatenate(found)

    def _doubtful(self, part: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
        """Their positions in a part."""
        if not self._sure:
            return np.arange(part.size)
        is_float = part.dtype.kind == "f"
        rounds = is_float and self._codes is not None and not self._packed
        lo, hi = self._sure[0][0], self._sure[-1][1]
        least, greatest = np.fmin.reduce(part), np.fmax.reduce(part)
        doubtful = np.zeros(part.shape, bool)
        if not (lo <= least and greatest <= hi):
            doubtful |= (part < lo) | (part > hi)
        for (_, end), (start, _) in itertools.pairwise(self._sure):
            if end < greatest and least < start:
                doubtful |= (part > end) & (part < start)
        if rounds:
            doubtful |= part != np.rint(part)
        if is_float and not self._keeps_nan:
            doubtful |= np.isnan(part)
        elif rounds:
            doubtful &= ~np.isnan(part)
        return np.flatnonzero(doubtful)

    @cached_property
    def _sure(self) -> list[tuple[float, float]]:
        """Ranges whose values are all read back correctly, in order; empty if none is known.

        For floats stored as plain integers, this holds for whole numbers.
        """
        whole = self.given.kind in "biu"
        if self.given.kind not in "biuf" or self._dtype.kind not in "iuf":
            return []
        if self._codes is None:
            if self._packed:
                return []
            info = np.finfo(self._dtype)
            most = 2 ** (info.nmant + 1) if whole else float(info.max) * (1 - _NEAR)
            return _between(-most, most, self._missing, _NEAR)
        if not whole and "_Unsigned" in self.encoding and self._dtype.itemsize == 8:
            return []  # xarray casts floats to signed integers first
        ranges = _between(*self._codes, self._missing, 0)
        if whole and not self._packed:
            return ranges
        return [self._inner(lo, hi) for lo, hi in ranges]

    def _inner(self, lo: float, hi: float) -> tuple[float, float]:
        """Values that are surely stored as codes of that range, however they are rounded."""
        low, high = self._ends(lo, hi)
        margin = 2 * self._looseness() * (abs(low) + abs(high) + abs(self._offset))
        if self._packed:
            margin += 2 * self._step
        return low + margin, high - margin

    @property
    def _keeps_nan(self) -> bool:
        # Of integers stored for floats, only codes that a float can represent are sure.
        exact = bool(self._missing) and max(map(abs, self._missing)) <= _EXACT
        return self._codes is None or exact

    @cached_property
    def _dtype(self) -> np.dtype[Any]:
        """The type that values are stored as; xarray chooses one for times if none is given."""
        wanted = self.encoding.get("dtype", self.given) if self.stored is None else self.stored
        if self.stored is None and wanted == "S1":  # text in files; xarray casts nothing to it
            wanted = self.given
        try:
            return np.dtype(object if wanted is str else wanted)
        except TypeError as error:
            raise InvalidArgumentError(f"the encoding of {self.name!r}: {error}") from error

    @property
    def _takes_texts(self) -> bool:
        """Whether the existing array has text, in which missing values would become text too."""
        texts = self.stored is not None and self.stored.kind in "OT" and self.given.kind == "O"
        return texts and not self._is_time

    @property
    def _is_time(self) -> bool:
        return self.given.kind in "mM" or (self.given.kind == "O" and "units" in self.encoding)

    @cached_property
    def _codes(self) -> tuple[int, int] | None:
        """The smallest and largest integer that is stored; None if it is not integers."""
        if self._dtype.kind not in "iu":
            return None
        unsigned = self.encoding.get("_Unsigned")
        if self.stored is None and all(self.encoding.get(key) is None for key in _MISSING):
            unsigned = None  # xarray does not write it then
        kind = {"true": "u", "false": "i"}.get(str(unsigned).lower())
        info = np.iinfo(f"{kind or self._dtype.kind}{self._dtype.itemsize}")
        return int(info.min), int(info.max)

    @cached_property
    def _missing(self) -> list[float]:
        """The values stored for missing ones, except NaN."""
        given = [np.ravel(self.encoding.get(key, np.nan)) for key in _MISSING]
        numbers = [x for many in given for x in many.tolist() if isinstance(x, int | float)]
        if self._codes is None:
            return sorted({x for x in numbers if x == x})
        lo, hi = self._codes
        return sorted({lo + (int(x) - lo) % (hi - lo + 1) for x in numbers if math.isfinite(x)})

    @property
    def _packed(self) -> bool:
        return any(self.encoding.get(key) is not None for key in _PACKED)

    @property
    def _scale(self) -> float:
        return float(_plain(self.encoding.get("scale_factor")) or 1)

    @property
    def _step(self) -> float:
        return abs(self._scale)

    @property
    def _offset(self) -> float:
        return float(_plain(self.encoding.get("add_offset")) or 0)

    def _ends(self, *codes: float) -> list[float]:
        """The values that codes stand for, in order."""
        if not self._packed:
            return list(codes)
        return sorted(code * self._scale + self._offset for code in codes)

    # --- values that differ -----------------------------------------------------------------------

    def _differences(self, part: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], Any]:
        """Which values would be read back differently, and as what."""
        if self._takes_texts:
            read = self._read_back(part)
            return xr.Variable("x", part).isnull().values & (read == read.astype(str)), read
        if self._dtype.kind in "SU":
            read = part.astype(self._dtype)
            return read.astype(str) != part.astype(str), read
        read = self._read_back(part)
        if self._is_time:
            lost = xr.Variable("x", part).isnull().values != xr.Variable("x", read).isnull().values
            return lost | _apart(part, read), read
        missing = np.isnan(part)
        off = missing != np.isnan(read)
        with np.errstate(all="ignore"):
            if self.given.kind in "biu" and not self._packed and self._dtype.kind in "bf":
                # Compared as integers, since a nearby float is not the same integer.
                other = read.astype(np.int64 if self.given.kind == "b" else self.given) != part
            else:
                wide = np.complex128 if "c" in (read.dtype.kind, part.dtype.kind) else np.float64
                exact = read.dtype.kind in "biu" and part.dtype.kind in "biu"
                distance = read != part if exact else abs(read.astype(wide) - part.astype(wide))
                other = distance > self._tolerance(part, read.dtype)
                other &= read != part
        return off | (other & ~missing), read

    def _tolerance(self, part: npt.NDArray[Any], read: np.dtype[Any]) -> Any:
        """How much values may differ."""
        size: Any = abs(part.astype(np.complex128 if part.dtype.kind == "c" else np.float64))
        size[~np.isfinite(size)] = 0.0
        if self._packed:
            least = 0.5 + 1e-6 if self._codes else float(np.finfo(self._dtype).smallest_subnormal)
            return self._step * least + self._looseness(read) * (size + abs(self._offset))
        if self._codes is not None or self._dtype.kind == "b":
            return 0.0
        info = np.finfo(self._dtype)
        return size * float(info.eps) + float(info.smallest_subnormal)

    def _looseness(self, *more: np.dtype[Any]) -> float:
        """The relative error that the arithmetic of packing may cause."""
        packing = [np.asarray(self.encoding.get(key)).dtype for key in _PACKED]
        floats = [t for t in (self.given, self._dtype, *packing, *more) if t.kind in "fc"]
        return _ULPS * max((float(np.finfo(t).eps) for t in floats), default=0.0)

    def _read_back(self, part: npt.NDArray[Any]) -> Any:
        """The values that xarray would read after writing these."""
        if part.dtype.kind == "c" and self._dtype.kind != "c":
            part = part.real
        # A dimension with the variable's name, since xarray warns about other variables.
        own = xr.Variable((self.name,), part, dict(self.attributes), dict(self.encoding))
        with np.errstate(all="ignore"):
            if self.lazy and self._is_time:  # whose units xarray does not change, as it does else
                encoded = encode_cf_variable(own.chunk(), name=self.name)
                encoded.load(scheduler="synchronous")
            else:
                encoded = encode_cf_variable(own, name=self.name)
            kept = encoded.values if self.stored is None else encoded.values.astype(self.stored)
            said = encoded.attrs.items()
            # Packing in its own attributes means that the values are packed already.
            attributes = {k: _plain(v) for k, v in said if k not in self.attributes}
            raw = xr.Variable((self.name,), kept, attributes)
            unit: Any = np.datetime_data(part.dtype)[0] if part.dtype.kind == "M" else "ns"
            own_kind = True if part.dtype == object else None  # None: where numpy has no such dates
            times = xr.coders.CFDatetimeCoder(use_cftime=own_kind, time_unit=unit)
            decoded = decode_cf_variable(
                self.name,
                raw,
                decode_times=times if self._is_time else False,
                decode_timedelta=self._is_time,
            )
            return np.asarray(decoded.values)


def _parts(values: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """All values in parts, as rows; without a copy where they are contiguous in memory."""
    flags: Any = ["external_loop", "buffered", "refs_ok", "zerosize_ok"]
    for part in np.nditer(values, flags, order="C", buffersize=_PART):
        yield np.atleast_1d(part)


def _apart(given: npt.NDArray[Any], read: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which times differ by more than rounding."""
    if given.dtype.kind == read.dtype.kind:
        apart: npt.NDArray[np.bool_] = abs(read - given) >= _SECOND[given.dtype.kind == "O"]
        return apart
    # Read as cftime objects: another calendar than numpy's, or beyond its dates.
    pairs = zip(given.astype("M8[s]").tolist(), read.tolist(), strict=True)
    differ = [
        isinstance(own, datetime) and abs(time - type(time)(*own.timetuple()[:6])) > _SECOND[1]
        for own, time in pairs
    ]
    return np.array(differ, bool)


def _index(
    at: int, shape: Sequence[int], axes: Sequence[int], start: Sequence[int]
) -> tuple[int, ...]:
    """The index of the `at`-th value in memory order."""
    place = dict(zip(axes, np.unravel_index(at, shape), strict=True))
    return tuple(int(place[axis]) + (start[axis] if start else 0) for axis in range(len(shape)))


def _between(
    lo: float, hi: float, holes: Sequence[float], near: float
) -> list[tuple[float, float]]:
    """The ranges from `lo` to `hi` without the holes."""
    inside = [hole for hole in holes if lo <= hole <= hi]
    gaps = [1 if near == 0 else near * abs(hole) + near for hole in inside]
    starts = [lo, *(hole + gap for hole, gap in zip(inside, gaps, strict=True))]
    ends = [*(hole - gap for hole, gap in zip(inside, gaps, strict=True)), hi]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start <= end]


def _plain(value: Any) -> Any:
    """A number as JSON represents it."""
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.size == 1 else value


def _text(value: Any) -> str:
    if isinstance(value, np.datetime64 | np.timedelta64 | np.bool_):
        return str(value)
    value = _plain(value)
    return f"{value:.9g}" if isinstance(value, float) else str(value)
