"""Whether values are read back as what they are, out of the arrays that they are written to.

xarray packs and casts without looking: 330 K, in an array of 16 bits that holds 250 to 300 K, is
read back as 264. Here values that would be read as others are refused. What only rounds is fine:
within the step of a packing, or the precision of a floating-point type.

A look at the least and the greatest value clears most parts of an array, and comparisons clear most
values of any other part. What is left xarray itself encodes and decodes, and what differs is
refused; so nothing is refused that would have been read back as it was.

Invariants: values in memory are looked at before anything is written, dask's where and when they
are computed, once; and never more than a few MB are copied.
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
"""Values looked at together; the cache of a processor holds them."""
_LISTED: Final = 3
_ULPS: Final = 8
"""By so many of their last digits a value can be off that is packed and unpacked."""
_EXACT: Final = 2**53
"""Up to here each integer is a float."""
_NEAR: Final = 1e-3
"""Relative; what is so near to the end of a range is looked at in its own right."""
_SECOND: Final = (np.timedelta64(1, "s"), timedelta(seconds=1))
"""Of numpy's times, and of cftime's."""


class MisfitError(Exception):
    """Raised where dask computes: a variable, and what of it does not fit."""

    def __init__(self, name: str, misfits: tuple[Misfit, ...]) -> None:
        super().__init__(name, misfits)
        self.name, self.misfits = name, misfits


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value, where it is, and what it would be read back as."""

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
    """The dataset to write in the block; its dask arrays are checked when they are computed.

    Parameters
    ----------
    ds : Dataset
        What is to be written. Of arrays in memory the values are checked now.
    store : ManifestStore
        Where to; its session has not changed anything yet.
    options : mapping
        What `Dataset.to_zarr` is given: `group`, `mode` and `append_dim`.
    encoding : mapping
        By variable, for those that are new.

    Raises
    ------
    InvalidArgumentError
        If values would be read back as others; now, or at the end of the block.
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
    """What does not fit, where it is, what would fit, and what to do."""
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


# --- how each variable is kept -------------------------------------------------------------------


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
                continue  # xarray leaves it as it is
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
    """How xarray would encode what goes to arrays that are there; it reads no chunks for it."""
    from xarray.backends import ZarrStore

    workspace, group = workspace_of(store), options["group"]
    if options["mode"] == "w" or (group or "") not in workspace.view.nodes:
        return {}
    # What is looked at here is no read that the commit depends on.
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
    """How a variable is kept, and whether values are read back as what they are.

    Parameters
    ----------
    name : str
        Of the variable.
    given : dtype
        What is to be written.
    attributes : mapping
        The variable's own; what they say of packing is about values that are packed already.
    encoding : mapping
        How xarray encodes it.
    stored : dtype, optional
        That of the array that is there; None if there is none.
    lazy : bool
        Whether values are computed by dask.
    """

    name: str
    given: np.dtype[Any]
    attributes: Mapping[str, Any]
    encoding: Mapping[str, Any]
    stored: np.dtype[Any] | None
    lazy: bool

    def check(self, values: npt.NDArray[Any], start: Sequence[int] = ()) -> None:
        """Look at values, the first of which is at `start`.

        Raises
        ------
        MisfitError
            If some would be read back as others.
        """
        # Along memory, which is fast; which values come first in it is all the same.
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
        """Whether all values of the type are kept as they are."""
        if self._is_time and self.stored is None and "units" not in self.encoding:
            return True  # xarray chooses units that tell them all
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
        """What fits."""
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

    # --- what is sure -----------------------------------------------------------------------------

    def _all_doubtful(
        self, values: npt.NDArray[Any]
    ) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[Any]]]:
        """Values of which xarray itself has to tell whether they fit, and where they are."""
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
        """Where they are in a part."""
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
        """Ranges all of which is read back as it was, in order; empty if none is known.

        Of floats that go into plain integers, the whole ones.
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
            return []  # xarray casts floats to signed integers on the way
        ranges = _between(*self._codes, self._missing, 0)
        if whole and not self._packed:
            return ranges
        return [self._inner(lo, hi) for lo, hi in ranges]

    def _inner(self, lo: float, hi: float) -> tuple[float, float]:
        """Values that are surely kept as codes of that range, however they are rounded."""
        low, high = self._ends(lo, hi)
        margin = 2 * self._looseness() * (abs(low) + abs(high) + abs(self._offset))
        if self._packed:
            margin += 2 * self._step
        return low + margin, high - margin

    @property
    def _keeps_nan(self) -> bool:
        # Of what takes a float's place, only codes that a float can be are sure.
        exact = bool(self._missing) and max(map(abs, self._missing)) <= _EXACT
        return self._codes is None or exact

    @cached_property
    def _dtype(self) -> np.dtype[Any]:
        """What values are kept as; of times, if nothing is said, xarray chooses."""
        wanted = self.encoding.get("dtype", self.given) if self.stored is None else self.stored
        if self.stored is None and wanted == "S1":  # how files have texts; xarray casts none to it
            wanted = self.given
        try:
            return np.dtype(object if wanted is str else wanted)
        except TypeError as error:
            raise InvalidArgumentError(f"the encoding of {self.name!r}: {error}") from error

    @property
    def _takes_texts(self) -> bool:
        """Whether an array of texts is there, to which what is missing would be one as well."""
        texts = self.stored is not None and self.stored.kind in "OT" and self.given.kind == "O"
        return texts and not self._is_time

    @property
    def _is_time(self) -> bool:
        return self.given.kind in "mM" or (self.given.kind == "O" and "units" in self.encoding)

    @cached_property
    def _codes(self) -> tuple[int, int] | None:
        """The least and the greatest integer that is kept; None if it is not integers."""
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
        """What is kept for missing values, if it is not NaN."""
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
        """Of packed values, what they stand for, in order."""
        if not self._packed:
            return list(codes)
        return sorted(code * self._scale + self._offset for code in codes)

    # --- what differs -----------------------------------------------------------------------------

    def _differences(self, part: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], Any]:
        """Which values would be read back as others, and what as."""
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
                # As integers, since a float that is near is none that is the same.
                other = read.astype(np.int64 if self.given.kind == "b" else self.given) != part
            else:
                wide = np.complex128 if "c" in (read.dtype.kind, part.dtype.kind) else np.float64
                exact = read.dtype.kind in "biu" and part.dtype.kind in "biu"
                distance = read != part if exact else abs(read.astype(wide) - part.astype(wide))
                other = distance > self._tolerance(part, read.dtype)
                other &= read != part
        return off | (other & ~missing), read

    def _tolerance(self, part: npt.NDArray[Any], read: np.dtype[Any]) -> Any:
        """How far off values may be."""
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
        """How much of a number the arithmetic of packing may round away."""
        packing = [np.asarray(self.encoding.get(key)).dtype for key in _PACKED]
        floats = [t for t in (self.given, self._dtype, *packing, *more) if t.kind in "fc"]
        return _ULPS * max((float(np.finfo(t).eps) for t in floats), default=0.0)

    def _read_back(self, part: npt.NDArray[Any]) -> Any:
        """What xarray would read, had it written the values."""
        if part.dtype.kind == "c" and self._dtype.kind != "c":
            part = part.real
        # A dimension of the variable's name, since xarray warns of other variables.
        own = xr.Variable((self.name,), part, dict(self.attributes), dict(self.encoding))
        with np.errstate(all="ignore"):
            if self.lazy and self._is_time:  # whose units xarray does not change, as it does else
                encoded = encode_cf_variable(own.chunk(), name=self.name)
                encoded.load(scheduler="synchronous")
            else:
                encoded = encode_cf_variable(own, name=self.name)
            kept = encoded.values if self.stored is None else encoded.values.astype(self.stored)
            said = encoded.attrs.items()
            # Its own attributes tell of values that are packed already, and so are these.
            attributes = {k: _plain(v) for k, v in said if k not in self.attributes}
            raw = xr.Variable((self.name,), kept, attributes)
            unit: Any = np.datetime_data(part.dtype)[0] if part.dtype.kind == "M" else "ns"
            own_kind = True if part.dtype == object else None  # else where numpy has no such dates
            times = xr.coders.CFDatetimeCoder(use_cftime=own_kind, time_unit=unit)
            decoded = decode_cf_variable(
                self.name,
                raw,
                decode_times=times if self._is_time else False,
                decode_timedelta=self._is_time,
            )
            return np.asarray(decoded.values)


def _parts(values: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """All of it, one after another, in rows; without a copy where memory has them so."""
    flags: Any = ["external_loop", "buffered", "refs_ok", "zerosize_ok"]
    for part in np.nditer(values, flags, order="C", buffersize=_PART):
        yield np.atleast_1d(part)


def _apart(given: npt.NDArray[Any], read: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which times are others, and not just rounded."""
    if given.dtype.kind == read.dtype.kind:
        apart: npt.NDArray[np.bool_] = abs(read - given) >= _SECOND[given.dtype.kind == "O"]
        return apart
    # Read as cftime's: of another calendar than numpy's, or beyond its dates.
    pairs = zip(given.astype("M8[s]").tolist(), read.tolist(), strict=True)
    differ = [
        isinstance(own, datetime) and abs(time - type(time)(*own.timetuple()[:6])) > _SECOND[1]
        for own, time in pairs
    ]
    return np.array(differ, bool)


def _index(
    at: int, shape: Sequence[int], axes: Sequence[int], start: Sequence[int]
) -> tuple[int, ...]:
    """Where a value is that is the `at`-th along memory."""
    place = dict(zip(axes, np.unravel_index(at, shape), strict=True))
    return tuple(int(place[axis]) + (start[axis] if start else 0) for axis in range(len(shape)))


def _between(
    lo: float, hi: float, holes: Sequence[float], near: float
) -> list[tuple[float, float]]:
    """The ranges from `lo` to `hi` that no hole is in."""
    inside = [hole for hole in holes if lo <= hole <= hi]
    gaps = [1 if near == 0 else near * abs(hole) + near for hole in inside]
    starts = [lo, *(hole + gap for hole, gap in zip(inside, gaps, strict=True))]
    ends = [*(hole - gap for hole, gap in zip(inside, gaps, strict=True)), hi]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start <= end]


def _plain(value: Any) -> Any:
    """A number as JSON has it."""
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.size == 1 else value


def _text(value: Any) -> str:
    if isinstance(value, np.datetime64 | np.timedelta64 | np.bool_):
        return str(value)
    value = _plain(value)
    return f"{value:.9g}" if isinstance(value, float) else str(value)
