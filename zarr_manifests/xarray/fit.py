"""Whether values survive being written to an array and read back.

Xarray packs and casts without checking: 330 K, in a 16-bit array packed for 250 to 300 K, is read
back as 264 K. So each block is encoded as it is stored, decoded as a reader decodes it by default,
and compared with what was given: numbers part by part, while a part is in the processor's cache.

Values may be rounded:

- Packed ones by half a step and the error of the arithmetic, which does not depend on the values.
- Floats to the nearest of a narrower type; to 0 only if that type was asked for.
- Times by less than a second.

One shortcut is safe: the same type given and stored, with no attribute that changes its meaning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr
from msgspec import Struct
from xarray.backends.zarr import FillValueCoder, encode_zarr_variable
from xarray.conventions import decode_cf_variable, encode_cf_variable

from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.runtime import quiet

PACKED_BY: Final = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")
DECODED_BY: Final = (*PACKED_BY, "units", "calendar")
"""Attributes that say what stored values mean."""
_MEANING: Final = {*DECODED_BY, "dtype"} - {"_FillValue"}
_PART: Final = 2**18
"""Number of values that are encoded and compared together: they fit in a processor's cache."""
_LISTED: Final = 3
_PACKING: Final = {"scale_factor": 1.0, "add_offset": 0.0}
_LABELS: Final = 64
"""Chunks of labels that appends will follow: of 8 bytes each, they are still stored inline."""
_ULPS: Final = 8
"""How many units in the last place packing and unpacking may change a value."""
_SECOND: Final = timedelta(seconds=1)
_REACH: Final = np.timedelta64(106_000, "D")
_FAILURES: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip
"""What xarray raises where it cannot encode or decode."""


type _Values = npt.NDArray[Any]


class MisfitError(Exception):
    """Raised where values are encoded: a variable, and the values that do not fit."""

    def __init__(self, name: str, misfits: tuple[Misfit, ...]) -> None:
        super().__init__(name, misfits)
        self.name, self.misfits = name, misfits


class Misfit(Struct, frozen=True):
    """A value, its position, and what it would be read back as."""

    index: tuple[int, ...]
    given: str
    read: str


class Fit(Struct, frozen=True, dict=True):
    """How a variable is stored, and whether its values survive that.

    Parameters
    ----------
    name : str
        Name of the variable.
    given : mapping
        The variable's own attributes. Values that these say how to decode are encoded already.
    encoding : mapping
        How xarray encodes it.
    stored : dtype, optional
        Type of the existing array; None if there is none.
    attributes : mapping, optional
        What a reader decodes the existing array by; a new one, besides its attributes: by the fill
        value of Zarr v2, and the units of the times whose bounds it has.
    """

    name: str
    given: Mapping[str, Any]
    encoding: Mapping[str, Any]
    stored: np.dtype[Any] | None = None
    attributes: Mapping[str, Any] = {}

    @quiet()
    @np.errstate(all="ignore")  # what they warn of is checked
    def checked(self, variable: xr.Variable, encode: Callable[..., xr.Variable]) -> xr.Variable:
        """The variable, encoded; its values are checked here, or where dask computes them.

        Raises
        ------
        MisfitError
            If some would be read back differently.
        """
        dtype, ndim, how = variable.dtype, variable.ndim, (variable.attrs, variable.encoding)
        numbers, like = dtype.kind in "biufc", variable
        if numbers:  # they are encoded where they are checked
            like = xr.Variable(variable.dims, np.zeros((0,) * ndim, dtype), *how)
        with told(self.name):
            encoded = encode(like, name=self.name)
        check = _Comparison.of(self, dtype, encoded)
        lazy: Any = None if variable.chunks is None else variable.data
        if encoded.chunks is None and not numbers:  # xarray has computed lazy objects
            assert check is not None
            check.block(variable.values, encoded.values, (0,) * ndim)
            return encoded
        if check is None:
            data = variable.data
            if lazy is not None:
                data = lazy.map_blocks(_as_declared, of=self.name, declared=dtype, dtype=dtype)
        elif lazy is None:
            data = check.of_block(variable.values, how, [[0]] * ndim, [0] * ndim)
        else:
            starts = [np.cumsum([0, *sizes[:-1]]) for sizes in lazy.chunks]
            of_block = partial(check.of_block, how=how, starts=starts)  # which dask leaves alone
            data = lazy.map_blocks(of_block, meta=np.empty((0,) * ndim, encoded.dtype))
        return xr.Variable(encoded.dims, data, encoded.attrs, encoded.encoding)

    def check_beside(self, given: _Values, codes: _Values, there: Callable[[], _Values]) -> None:
        """Check dates that are stored as `codes` beside the codes that are there.

        Xarray loses dates beside a missing one that are more than 290 years from 1970, or from
        the date of their units.

        Raises
        ------
        InvalidArgumentError
            If they would be lost.
        """
        if given.dtype.kind != "M":
            return
        if not (_are_far(given, self.attributes) or np.isnat(given).any()):
            return
        check = _Comparison.of(self, given.dtype, xr.Variable(_dims(self.name, codes), codes))
        if check is not None:
            check.beside(given, np.append(there(), codes))

    def encoded(self, values: _Values) -> _Values:
        """Values in memory as the existing array stores them.

        Raises
        ------
        MisfitError
            If some would be read back differently.
        """
        if values.dtype.kind in "biu" and not _PACKING.keys().isdisjoint(self.attributes):
            values = values.astype(np.float64)  # xarray does not pack integers
        own = xr.Variable(_dims(self.name, values), values, dict(self.given), dict(self.encoding))
        with told(self.name):
            codes = self.checked(own, encode_cf_variable).values
        return np.asarray(codes).astype(self.stored or codes.dtype, copy=False)


class _Comparison(Struct, frozen=True):
    """Decodes what is stored, and compares it with what was given. Made by `of`.

    Parameters
    ----------
    name : str
        The variable's.
    attributes : mapping
        What a reader decodes by.
    stored : dtype
        The type that is stored.
    in_parts : bool
        Whether these are numbers, of which each is decoded by itself.
    packing : tuple of float, optional
        Step and offset.
    asked : bool
        Whether a narrower type was asked for, in which small floats become 0.
    """

    name: str
    attributes: Mapping[str, Any]
    stored: np.dtype[Any]
    in_parts: bool
    packing: tuple[float, float] | None
    asked: bool

    @staticmethod
    def of(fit: Fit, given: np.dtype[Any], encoded: xr.Variable) -> _Comparison | None:
        """The check of values of that type; None if each is surely read back as it is."""
        also = encoded.attrs if fit.stored is None else {}
        found = {key: _plain(value) for key, value in {**fit.attributes, **also}.items()}
        # What says how to decode numbers that were given encoded is no part of what was given.
        own = fit.given if given.kind in "biufcS" else {}
        attributes = {key: value for key, value in found.items() if key not in own}
        stored = np.dtype(encoded.dtype) if fit.stored is None else fit.stored
        with told(fit.name):  # as a reader does, before it decodes any value
            fill = encoded.attrs.get("_FillValue")
            if fit.stored is None and fill is not None:
                FillValueCoder.decode(FillValueCoder.encode(fill, encoded.dtype), encoded.dtype)
        fill = attributes.get("_FillValue")
        is_nan = isinstance(fill, float | complex) and fill != fill
        plain = (fill is None or is_nan) and _MEANING.isdisjoint(attributes)
        if plain and given == stored and given.kind in "biufc":
            return None
        numbers = given.kind in "biufc" and stored.kind in "biufc"
        times = "units" in attributes or "dtype" in attributes
        asked = fit.stored is None and fit.encoding.get("dtype") is not None
        packing = None
        if any(attributes.get(key) is not None for key in _PACKING):
            step, offset = (float(attributes.get(key) or no) for key, no in _PACKING.items())
            packing = abs(step), abs(offset)
        in_parts = numbers and not times
        return _Comparison(fit.name, attributes, stored, in_parts, packing, asked)

    def of_block(
        self, block: Any, how: tuple[Any, ...], starts: Sequence[Any], block_id: Sequence[int]
    ) -> _Values:
        """Encode and check a block of a dask array, or all numbers in memory."""
        given = np.asarray(block)
        codes = np.empty_like(given, self.stored)
        start = [int(of_axis[at]) for of_axis, at in zip(starts, block_id, strict=True)]
        self.block(given, codes, start, how)
        if given.dtype.kind == "M" and _are_far(given, self.attributes):
            with_missing = np.append(np.array("NaT", given.dtype), given.ravel())
            try:
                both = self._encoded(with_missing, how)
            except InvalidArgumentError:  # no other block can have a missing one
                return codes
            self.beside(given, both)
        return codes

    def _encoded(self, given: _Values, how: tuple[Any, ...]) -> _Values:
        # As a coordinate: of other floats stored as integers xarray warns that they may be NaN.
        own: Any = xr.Variable((self.name,), given, *how)
        with np.errstate(all="ignore"), told(self.name):
            if given.dtype.kind in "mM" or _are_dates(given):
                own = own.chunk(name=False)  # else xarray would choose units, block by block
            codes = encode_zarr_variable(own, name=self.name).load(scheduler="synchronous").values
            return np.asarray(codes.astype(self.stored, copy=False))

    def beside(self, given: _Values, codes: _Values) -> None:
        """Refuse dates that are not read back behind the other ones of which there are codes."""
        with told(self.name):
            read = self._read(codes.astype(self.stored, copy=False))
            if self._differ(given.ravel(), read[len(read) - given.size :]).any():
                raise ValueError(
                    "dates more than 290 years from 1970 or from the date of their units cannot "
                    "be stored beside a missing date"
                )

    def block(
        self, given: _Values, codes: _Values, start: Sequence[int], how: tuple[Any, ...] = ()
    ) -> None:
        """Check values in memory, the first of which is at position `start`.

        With `how`, they are encoded first, into `codes`.

        Raises
        ------
        MisfitError
            If some would be read back differently.
        """
        fits = True
        for part, stored in self._parts(given, codes):
            if how:
                stored[...] = self._encoded(part.ravel(), how).reshape(part.shape)
            fits = fits and not self._compared(part, stored)[0].any()
        if fits:
            return
        off, read = self._compared(given, codes)
        misfits = [
            Misfit(
                tuple(int(i) + first for i, first in zip(at, start, strict=True)),
                _text(given[tuple(at)]),
                _text(read[tuple(at)] if read.shape == given.shape else read),
            )
            for at in np.argwhere(off)[:_LISTED]
        ]
        raise MisfitError(self.name, tuple(misfits))

    def _parts(self, given: _Values, codes: _Values) -> Iterator[tuple[_Values, ...]]:
        """All values, numbers in parts in the order of memory, without copies."""
        if not given.size:
            return  # of no values, xarray cannot decode the times of every calendar
        if not self.in_parts or given.dtype.kind not in "biufc":  # dask declares what it likes
            yield given, codes
            return
        flags: Any = ["external_loop", "buffered"]
        modes: Any = [["readonly"], ["readwrite"]]
        with np.nditer([given, codes], flags, modes, order="K", buffersize=_PART) as parts:
            yield from parts

    def _compared(self, given: _Values, codes: _Values) -> tuple[_Values, _Values]:
        """Which values are not read back as given, and what is read."""
        with np.errstate(all="ignore"), told(self.name):
            read = self._read(codes.astype(self.stored, copy=False))
            return self._differ(given, read), read

    def _read(self, stored: _Values) -> _Values:
        """The stored values as `xr.open_dataset` decodes them."""
        raw = xr.Variable(_dims(self.name, stored), stored, dict(self.attributes))
        with nullcontext() if self.in_parts else quiet():  # the reader is warned
            return np.asarray(decode_cf_variable(self.name, raw).values)

    def _differ(self, given: _Values, read: _Values) -> _Values:
        """Which values are read back differently."""
        if read.shape != given.shape:
            return np.ones(given.shape, bool)
        if given.dtype.kind in "mM" or _are_dates(given):
            return times_differ(given, read)
        if given.dtype.kind not in "biufc":
            return _objects_differ(given, read)
        if read.dtype.kind not in "biufc":
            return np.ones(given.shape, bool)
        return self._numbers_differ(given, read)

    def _numbers_differ(self, given: _Values, read: _Values) -> _Values:
        if self.packing is None and given.dtype.kind in "biu" and read.dtype.kind in "fc":
            # As whole numbers: the nearest float is not the same number.
            bounds = given.dtype.kind != "b" and np.iinfo(given.dtype)
            lo, hi = (bounds.min, bounds.max) if bounds else (0, 1)
            within = (read.real >= np.float64(lo)) & (read.real < np.float64(hi + 1))
            return np.asarray(~(within & (read.real.astype(given.dtype) == given)))
        if self.packing is None and self.stored.kind not in "fc":
            return np.asarray((read != given) & ((read == read) | (given == given)))
        if self.packing is None:
            near = given.astype(self.stored, copy=False)
            off: _Values = (read != near) & ((read == read) | (near == near)) | np.isinf(read)
        else:
            distance = np.subtract(read, given, dtype=np.result_type(given, read, np.float32))
            off = ~(np.abs(distance) <= self._allowed(given, read.dtype))
        if given.dtype.kind == "c" and read.dtype.kind != "c":
            off |= given.imag != 0
        if self.packing is None and not self.asked:
            off |= (read == 0) & (given != 0)
        if off.any():  # NaN, or an infinity, is as far from itself as from all others
            off &= (read != given) & ((read == read) | (given == given))
        return off

    def _allowed(self, given: _Values, read: np.dtype[Any]) -> _Values | float:
        """By how much each may be off."""
        assert self.packing is not None
        step, offset = self.packing
        floats = [kind for kind in (given.dtype, read, self.stored) if kind.kind in "fc"]
        error = _ULPS * max((float(np.finfo(kind).eps) for kind in floats), default=0.0)
        if self.stored.kind in "iu":  # a constant: one huge value hides no other
            extent = step * 2.0 ** (8 * self.stored.itemsize)
            return step * (0.5 + 1e-6) + error * (extent + 2 * offset)
        least = step * float(np.finfo(self.stored).tiny)
        return error * (np.abs(given) + 2 * offset) + least


def _dims(name: str, values: _Values) -> list[str]:
    """Dimensions; those of a coordinate if it can be one, as xarray warns of other variables."""
    return [name] if values.ndim == 1 else [f"{name}-{axis}" for axis in range(values.ndim)]


def _as_declared(block: Any, *, of: str, declared: np.dtype[Any]) -> Any:
    if block.dtype != declared:
        raise InvalidArgumentError(
            f"{of!r} is computed as {block.dtype}, and dask was told that it is {declared}: "
            "correct that, as by output_dtypes, or cast the values"
        )
    return block


def times_differ(given: _Values, read: _Values) -> _Values:
    """Which times differ by a second or more; those of different calendars, by their texts."""
    off = np.ones(given.shape, bool)
    if given.dtype.kind == read.dtype.kind and given.dtype.kind in "mM":
        if given.dtype == read.dtype:
            # Most are the same; units take long.
            off = np.asarray(given.view(np.int64) != read.view(np.int64))
        one, other = (times[off].astype(f"{given.dtype.kind}8[us]") for times in (given, read))
        apart = np.abs(one - other) >= np.timedelta64(1, "s")
        off[off] = (np.isnat(one) != np.isnat(other)) | apart
    elif given.dtype.kind != "m" and (read.dtype.kind == "M" or _are_dates(read)):
        missing = pd.isnull(given)
        each = zip(missing.ravel(), given.ravel(), read.ravel(), strict=True)
        differ = [not lost and _apart(one, other) for lost, one, other in each]
        off = (missing != pd.isnull(read)) | np.reshape(differ, given.shape)
    return off


def _apart(one: Any, other: Any) -> bool:
    try:
        return bool(abs(one - other) >= _SECOND)
    except TypeError:  # of two calendars, or one of numpy and one of cftime
        both = hasattr(one, "calendar") and hasattr(other, "calendar")
        return both or _second_of(one) != _second_of(other)


def _second_of(time: Any) -> str:
    if isinstance(time, np.datetime64):
        return str(np.datetime_as_string(time, "s"))
    return str(time.isoformat(timespec="seconds"))


def _objects_differ(given: _Values, read: _Values) -> _Values:
    """Which texts and other objects differ; for a missing one xarray stores an empty text."""
    both = zip(given.ravel().tolist(), read.ravel().tolist(), strict=True)
    differ = [
        not (pd.isnull(other) or other == "") if one is None or one != one else one != other
        for one, other in both
    ]
    return np.array(differ, bool).reshape(given.shape)


def is_time(variable: xr.Variable) -> bool:
    """Whether it has times or durations, including cftime objects."""
    if variable.dtype != object or not variable.size:
        return variable.dtype.kind in "mM"
    return _are_dates(np.ravel(variable[(0,) * variable.ndim].values))


def _are_dates(values: _Values) -> bool:
    """Whether these are cftime's objects."""
    return bool(values.dtype == object and values.size) and hasattr(values.flat[0], "calendar")


def _are_far(dates: _Values, how: Mapping[str, Any]) -> bool:
    """Whether some may lie beyond what nanoseconds reach, from 1970 or the date of their units."""
    try:
        since = pd.Timestamp(str(how.get("units")).partition(" since ")[2]).tz_localize(None)
        ends = np.sort(np.array([since.to_datetime64(), "1970-01-01"], "M8[D]"))
    except (ValueError, OverflowError):  # a date of another calendar
        return True
    days = dates.astype("M8[D]")
    return bool(((days < ends[1] - _REACH) | (days > ends[0] + _REACH)).any())


@contextmanager
def told(name: str) -> Iterator[None]:
    """Say which variable xarray cannot encode and decode.

    Raises
    ------
    InvalidArgumentError
        In place of xarray's errors.
    """
    try:
        yield
    except ManifestsError:
        raise
    except _FAILURES as error:
        raise InvalidArgumentError(
            f"{name!r} could not be read back, for {type(error).__name__}: "
            f"{str(error).partition('. Try opening')[0]}. Its encoding, such as units and "
            "calendar, cannot hold its values: change either. Nothing is committed"
        ) from error


def _plain(value: Any) -> Any:
    """An attribute as JSON keeps it."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.item() if value.size == 1 else value.tolist()
    return json.loads(json.dumps(value)) if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, np.datetime64 | np.timedelta64 | np.bool_):
        return str(value)
    value = _plain(value)
    if isinstance(value, str):
        return repr(value)  # 'nan' is a text
    return f"{value:.9g}" if isinstance(value, float) else str(value)


# --- what does not fit ---------------------------------------------------------------------------


@contextmanager
def explained(ds: xr.Dataset, fits: Mapping[str, Fit]) -> Iterator[None]:
    """Say which values of the dataset do not fit.

    Parameters
    ----------
    ds : Dataset
        The dataset.
    fits : mapping
        How each variable is stored, by name.

    Raises
    ------
    InvalidArgumentError
        In place of a `MisfitError` in the block.
    """
    try:
        yield
    except MisfitError as error:
        fit = fits[error.name]
        told = "; ".join(
            f"{found.given} {_place(ds, fit.name, found.index)}would be read back as {found.read}"
            for found in error.misfits
        )
        units = fit.attributes.get("units")
        where = "the array that is there" + f" ({units})" * bool(units)
        way = "write the array anew, with room for both"
        if fit.stored is None:
            where = "their encoding"
            way = f"give another encoding, or drop the data's: ds[{fit.name!r}].encoding = {{}}"
        raise InvalidArgumentError(
            f"values of {fit.name!r} do not fit {where}: {told}. Nothing is committed. Correct the "
            f"values, or {way}; check=False writes them as they are"
        ) from None


def _place(ds: xr.Dataset, name: str, index: Sequence[int]) -> str:
    """Labels of a value, or positions where there are none."""
    places = [
        f"{dim}={ds.indexes[dim][at]}" if dim in ds.indexes else f"{dim}[{at}]"
        for dim, at in zip(ds.variables[name].dims, index, strict=True)
    ]
    return f"at {', '.join(places)} " if places else ""


# --- how variables are stored -------------------------------------------------------------------


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
    how = {**attributes, **decoded.encoding, "dtype": stored}
    return Fit(name, {}, how, stored, attributes)


def of_first_label(
    ds: xr.Dataset, dim: Hashable, encoding: Mapping[Hashable, Mapping[str, Any]]
) -> tuple[xr.Dataset, Mapping[Hashable, Mapping[str, Any]]]:
    """The dataset and encodings that make room for labels after the first; see `units_of_first`.

    Units and chunks that the encodings name stay.
    """
    for name, variable in ds.variables.items():
        how, room = encoding.get(name, variable.encoding), dict[str, Any]()
        few = variable.dims == (name,) == (dim,) and variable.size < _LABELS
        if few and how.keys().isdisjoint(("chunks", "shards")):
            room["chunks"] = (_LABELS,)
        asked = name in encoding and "units" in how
        in_memory = variable.dtype.kind in "mM" and variable.chunks is None
        if not asked and in_memory and dim in variable.dims and ds.sizes[dim] == 1:
            dtype = np.dtype(how.get("dtype") or np.int64)
            units = units_of_first(variable.values, how.get("units"), dtype)
            room |= {} if units is None else {"units": units}
        if room:
            roomy = variable.copy(deep=False)
            roomy.encoding = {**how, **room}
            ds = ds.assign({name: roomy})
            if name in encoding:
                encoding = {**encoding, name: roomy.encoding}
    return ds, encoding


def units_of_first(times: _Values, units: str | None, dtype: np.dtype[Any]) -> str | None:
    """Units in which an array of a first time has room for more; None if its own have.

    Of one time, xarray makes days since that time, and an hour later is no whole day. Of its bounds
    it makes units as coarse as these are. Of a first step of 0 hours it makes days, too.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.xarray.fit import units_of_first
    >>> times = np.array(["2026-01-01T05"], "M8[ns]")
    >>> units_of_first(times, "days since 2026-01-01 05:00:00", np.dtype("i8"))
    'seconds since 2026-01-01 05:00:00'
    >>> units_of_first(times, "hours since 1900-01-01", np.dtype("i8"))
    """
    kind = times.dtype.kind
    if kind not in "mM" or dtype.kind not in "iu" or dtype.itemsize < 4:
        return None
    seconds = times.astype(f"{kind}8[s]")
    if not times.size or np.isnat(times).any() or (seconds != times).any():
        return None
    if kind == "m":
        return None if units else "seconds"
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
