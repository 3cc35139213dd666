"""Whether values survive being written to an array and read back.

xarray packs and casts without checking: 330 K, in a 16-bit array packed for 250 to 300 K, is read
back as 264 K. Here such values are refused. Rounding is allowed: within the step of a packing, or
the precision of a floating-point type.

Numbers are encoded and checked part by part, while a part is in the processor's cache. Most parts
pass by their smallest and largest value, and because none of their codes stands for a missing one.
The bounds that statistics are made of tell the same of floats that are stored as floats.
In other parts, comparisons find the values in doubt. Xarray itself encodes and decodes these, and
those that differ are refused. So no value is refused that would have been read back correctly.

Invariant: apart from its codes, no more than a few MB of an array are copied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xarray as xr
from xarray.conventions import decode_cf_variable, encode_cf_variable

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.zones.measure import Extent
from zarr_manifests.records import dataclass

__all__ = ["Fit", "Misfit", "MisfitError"]

_PACKED: Final = ("scale_factor", "add_offset")
_MISSING: Final = ("_FillValue", "missing_value")
_PART: Final = 2**17
"""Number of values checked together, so that they fit in a processor's cache."""
_LISTED: Final = 3
_ULPS: Final = 8
"""How many units in the last place packing and unpacking may change a value."""
_EXACT: Final = 2**53
"""Up to here every integer is exactly a float."""
_NEAR: Final = 1e-3
"""Relative; values this near to the largest float are checked one by one."""
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

    def checked(self, variable: xr.Variable, start: Sequence[int] = ()) -> npt.NDArray[Any]:
        """Return the values of a variable in memory, the first of which is at position `start`.

        Raises
        ------
        MisfitError
            If some would be read back differently.
        """
        values = variable.values
        axes = _in_memory(values)
        along = values.transpose(axes)
        for seen, (part,) in _parts([along]):
            self._refuse(part, seen + np.arange(part.size), along.shape, axes, start)
        return values

    def encoded_like(self, variable: xr.Variable) -> xr.Variable | None:
        """Return an encoded row of no values if `encoded` can encode the variable, else None."""
        if self._sure is None:
            return None
        # A dimension with the variable's name, since xarray warns of NaN in other variables.
        none = np.zeros(0, variable.dtype)
        own = xr.Variable((self.name,), none, variable.attrs, variable.encoding)
        like = encode_cf_variable(own, name=self.name)
        return like if like.dtype == self._dtype else None

    def encoded(self, variable: xr.Variable, start: Sequence[int] = ()) -> npt.NDArray[Any]:
        """Encode numbers in memory, the first of which is at position `start`.

        Only for variables that `encoded_like` accepts.

        Raises
        ------
        MisfitError
            If some would be read back differently.
        """
        # Packing makes several passes, so it is faster in parts; a cast to floats is not.
        if self._codes is None:
            codes = self.cast(variable) if self.is_checked_by_bounds else _codes_of(variable)
            self.check(variable, codes, start)
            return codes
        codes = np.empty_like(variable.values, self._dtype)
        self._go_through(variable, codes, start, encode=True)
        return codes

    @property
    def is_checked_by_bounds(self) -> bool:
        """Whether bounds of the stored values may tell that all given ones fit."""
        return self._codes is None and self.given.kind == "f"

    def cast(self, variable: xr.Variable) -> npt.NDArray[Any]:
        """Encode floats as floats, for `is_sure` or `check` to check."""
        if any(self.encoding.get(key) is not None for key in _MISSING):
            return _codes_of(variable)
        with np.errstate(all="ignore"):
            codes: npt.NDArray[Any] = variable.values.astype(self._dtype)
        return codes

    def is_sure(self, extent: Extent, missing: npt.NDArray[Any], given: npt.NDArray[Any]) -> bool:
        """Whether floats of this extent and with these missing values all fit; else see `check`."""
        assert self._sure is not None
        lo, hi = self._sure
        some = extent.missing < extent.cells
        if some and not (lo <= float(extent.low) and float(extent.high) <= hi):
            return False
        if self._marks and not np.isin(self._marks, missing).all():
            return False
        # Each NaN is stored as a missing value. If there are more of these, others are, too.
        return extent.missing == extent.nan or extent.missing == _nan_count(given)

    def check(
        self, variable: xr.Variable, codes: npt.NDArray[Any], start: Sequence[int] = ()
    ) -> None:
        """Check numbers that `cast` has encoded.

        Raises
        ------
        MisfitError
            If some would be read back differently.
        """
        # Given values may lie apart in memory, so that most checks do not look at them.
        if not (self.is_checked_by_bounds and self._codes_fit(codes, variable.values)):
            self._go_through(variable, codes, start, encode=False)

    def _go_through(
        self,
        variable: xr.Variable,
        codes: npt.NDArray[Any],
        start: Sequence[int],
        *,
        encode: bool,
    ) -> None:
        """Check the values in parts, each encoded first if that is asked for."""
        values = variable.values
        axes = _in_memory(values)
        along = values.transpose(axes)
        waiting: list[tuple[npt.NDArray[np.intp], npt.NDArray[Any]]] = []
        for seen, (part, stored) in _parts([along, codes.transpose(axes)], filled=encode):
            if encode:
                own = xr.Variable((self.name,), part, variable.attrs, variable.encoding)
                stored[:] = _codes_of(own, self.name)
            at = self._doubtful(part, stored)
            if at.size:
                waiting.append((seen + at, part[at]))
            if sum(given.size for _, given in waiting) >= _PART:
                self._refuse(*_joined(waiting), along.shape, axes, start)
                waiting.clear()
        if waiting:
            self._refuse(*_joined(waiting), along.shape, axes, start)

    def _refuse(
        self,
        given: npt.NDArray[Any],
        places: npt.NDArray[np.intp],
        shape: Sequence[int],
        axes: Sequence[int],
        start: Sequence[int],
    ) -> None:
        """Raise if xarray would read some of the values back differently."""
        off, read = self._differences(given)
        found = np.flatnonzero(off)[:_LISTED].tolist()
        if found:
            raise MisfitError(
                self.name,
                tuple(
                    Misfit(
                        _index(int(places[at]), shape, axes, start),
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

    def _codes_fit(self, codes: npt.NDArray[Any], given: npt.NDArray[Any]) -> bool:
        """Whether floats stored as these floats surely fit."""
        assert self._sure is not None
        (lo, hi), marked = self._sure, 0
        for _, (part,) in _parts([codes.transpose(_in_memory(codes))]):
            low, high = np.fmin.reduce(part), np.fmax.reduce(part)  # NaN is kept
            if low < lo or hi < high:
                return False
            marks = [mark for mark in self._marks if low <= mark <= high]
            marked += sum(int(np.count_nonzero(part == mark)) for mark in marks)
        return not marked or marked == _nan_count(given)

    def _doubtful(self, part: npt.NDArray[Any], codes: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
        """Positions of values that xarray itself has to encode and decode to decide."""
        assert self._sure is not None
        codes = codes.view(self._code_type)
        is_float, (lo, hi) = part.dtype.kind == "f", self._sure
        # A cast between floats keeps their order, and the narrower ones are read faster.
        looked = codes if is_float and self._codes is None else part
        found = []
        if not math.isinf(lo):
            low, high = np.minimum.reduce(looked), np.maximum.reduce(looked)
            has_nan = low != low
            if has_nan:
                low, high = np.fmin.reduce(looked), np.fmax.reduce(looked)
            if not (lo <= low and high <= hi):
                found.append((looked < lo) | (looked > hi))
            if has_nan and not self._keeps_nan:
                found.append(np.isnan(part))
        differ = [codes == mark for mark in self._marks]
        marked = sum(map(np.count_nonzero, differ))
        if is_float and marked and marked == np.count_nonzero(np.isnan(part)):
            differ.clear()  # each NaN is stored as a mark, and nothing else is
        if is_float and self._codes is not None and not self._packed:
            differ.append(part != codes.astype(part.dtype))
        # NaN is kept, or found above.
        found += [off & (part == part) for off in differ if off.any()]
        return np.flatnonzero(functools.reduce(np.logical_or, found)) if found else np.arange(0)

    @cached_property
    def _sure(self) -> tuple[float, float] | None:
        """The range of values that are all read back correctly; None if none is known.

        Except those whose code stands for a missing value, and for floats stored as plain integers,
        those that are not whole.
        """
        whole = self.given.kind in "biu"
        if self.given.kind not in "biuf" or self._dtype.kind not in "iuf":
            return None
        if self._codes is None:
            if self._packed:
                return None
            if np.can_cast(self.given, self._dtype, "safe") and not whole:
                return -np.inf, np.inf
            info = np.finfo(self._dtype)
            most = 2 ** (info.nmant + 1) if whole else float(info.max) * (1 - _NEAR)
            return -most, most
        if not whole and "_Unsigned" in self.encoding and self._dtype.itemsize == 8:
            return None  # xarray casts floats to signed integers first
        least, greatest = self._codes
        if whole and not self._packed:
            return least, greatest
        lo, hi = self._inner(least, greatest)
        return (lo, hi) if lo <= hi else None

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
    def _code_type(self) -> np.dtype[Any]:
        """The type that is stored, as signed or unsigned as xarray reads it."""
        if self._dtype.kind not in "iu":
            return self._dtype
        unsigned = self.encoding.get("_Unsigned")
        if self.stored is None and all(self.encoding.get(key) is None for key in _MISSING):
            unsigned = None  # xarray does not write it then
        kind = {"true": "u", "false": "i"}.get(str(unsigned).lower())
        return np.dtype(f"{self._dtype.byteorder}{kind or self._dtype.kind}{self._dtype.itemsize}")

    @cached_property
    def _codes(self) -> tuple[int, int] | None:
        """The smallest and largest integer that is stored; None if it is not integers."""
        if self._dtype.kind not in "iu":
            return None
        info = np.iinfo(self._code_type)
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

    @cached_property
    def _marks(self) -> list[npt.NDArray[Any]]:
        """The same as the type that is stored."""
        with np.errstate(all="ignore"):
            return [np.asarray(code).astype(self._code_type) for code in self._missing]

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


def _codes_of(variable: xr.Variable, name: str | None = None) -> npt.NDArray[Any]:
    """What xarray stores; numpy's warnings are left out, since such values are refused."""
    with np.errstate(all="ignore"):
        codes: npt.NDArray[Any] = encode_cf_variable(variable, name=name).values
    return codes


def _in_memory(values: npt.NDArray[Any]) -> list[int]:
    """The axes in memory order, in which values are read fast."""
    return sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis]))


def _parts(
    arrays: Sequence[npt.NDArray[Any]], *, filled: bool = False
) -> Iterator[tuple[int, list[npt.NDArray[Any]]]]:
    """All values of the arrays in parts, as rows, each with its position.

    Nothing is copied where the arrays are contiguous in memory. If `filled`, the caller fills the
    rows of all arrays but the first.
    """
    flags: Any = ["external_loop", "buffered", "refs_ok", "zerosize_ok"]
    ways: Any = [["readonly"], *[["writeonly" if filled else "readonly"] for _ in arrays[1:]]]
    seen = 0
    with np.nditer(arrays, flags, ways, order="C", buffersize=_PART) as parts:
        for many in parts:
            rows = [np.atleast_1d(part) for part in (many if len(arrays) > 1 else [many])]
            yield seen, rows
            seen += rows[0].size


def _nan_count(values: npt.NDArray[Any]) -> int:
    parts = _parts([values.transpose(_in_memory(values))])
    return sum(int(np.count_nonzero(np.isnan(part))) for _, (part,) in parts)


def _joined(
    found: Sequence[tuple[npt.NDArray[np.intp], npt.NDArray[Any]]],
) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """The values and their positions."""
    return np.concatenate([one for _, one in found]), np.concatenate([at for at, _ in found])


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


def _plain(value: Any) -> Any:
    """A number as JSON represents it."""
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.size == 1 else value


def _text(value: Any) -> str:
    if isinstance(value, np.datetime64 | np.timedelta64 | np.bool_):
        return str(value)
    value = _plain(value)
    return f"{value:.9g}" if isinstance(value, float) else str(value)
