"""Files to ingest: how they are opened, what identifies their bytes, and what they hold.

Values are read as they are stored: packed, and times as numbers. Only variables of a few bytes a
row are decoded (the axis variables, such as the labels), because each file may store them in its
own way: as hours since its own first day.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xarray as xr
from msgspec import Struct
from xarray.conventions import decode_cf_variable, encode_cf_variable

from zarr_manifests.decoding import meaning_of_bounds
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.reports import Problem
from zarr_manifests.runtime import quiet
from zarr_manifests.virtual.containers import WEB, location_of
from zarr_manifests.xarray.appended_rows import FileFacts, FileLayout, VariableFacts
from zarr_manifests.xarray.fit import DECODED_BY, is_time

_AXIS_BYTES: Final = 32
"""A variable with at most so many bytes a row is written by the driver."""
_COMPARED_VALUES: Final = 8192
"""So many values that files have in common are compared one by one."""
_NAN: Final = "nan"
_ENGINES: Final[Mapping[str, Mapping[str, Any]]] = {
    "netcdf": {},
    "hdf5": {"engine": "h5netcdf"},
    "zarr": {"engine": "zarr", "consolidated": False},
    "grib": {"engine": "cfgrib", "indexpath": ""},  # else it writes a file beside each one
}
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::.*://)", re.DOTALL)
_CHAINED: Final = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]*)://((?:(?!::)[^/?#])*)((?:(?!::).)*)", re.DOTALL
)
"""Scheme, host and rest of each URL in one of fsspec, such as `zip://a.nc::https://host/a.zip`."""

_STORED: Final = {
    "mask_and_scale": False,
    "decode_times": False,
    "decode_timedelta": False,
    "decode_coords": False,
    "cache": False,
    "chunks": None,
    "create_default_indexes": False,  # which take longer to make than a file to open
}
"""What leaves values as they are stored, but makes text of characters."""


def source_url(given: str | os.PathLike[str]) -> str:
    """Return the URL of a file, by which it is known again.

    Raises
    ------
    InvalidArgumentError
        If a user, a password or a query is in it, which may be a secret, and would be written to
        the repository; or if it is malformed.

    Examples
    --------
    >>> source_url("/data/day 1.nc")
    'file:///data/day%201.nc'
    """
    text = os.fspath(given)
    if not isinstance(given, str) or not _URL.match(text) or text.startswith("file://"):
        return location_of(given)
    for scheme, host, rest in _CHAINED.findall(text):
        of_web = scheme.lower() in WEB
        part = "a user or password" if "@" in host else "a query" if of_web and "?" in rest else ""
        if part:
            raise InvalidArgumentError(
                f"a {scheme}:// location with {part} in it is refused: that may be a secret, and "
                "where files came from is written to the repository"
            )
    return text


def _path(url: str) -> str | None:
    """The local path of a URL, if it has one."""
    return urllib.parse.unquote(url.removeprefix("file://")) if url.startswith("file://") else None


def _stamp_of(url: str) -> tuple[int, str]:
    """The size of a file, or of a folder, and text that changes when its bytes do."""
    path = _path(url)
    if path is not None:
        whole = Path(path)
        files = [whole] if whole.is_file() else [p for p in whole.rglob("*") if p.is_file()]
        found = [file.stat() for file in files or [whole]]
        newest = max(each.st_mtime_ns for each in found)
        return sum(each.st_size for each in found), f"{newest}" + f" {len(found)}" * whole.is_dir()
    import fsspec

    system, name = fsspec.core.url_to_fs(url)
    told = system.info(name)
    keys = ("ETag", "etag", "LastModified", "last_modified", "mtime", "created")
    return int(told.get("size") or 0), next((str(told[k]) for k in keys if told.get(k)), "")


class FailedFilesError(Exception):
    """Files that cannot be ingested, and why: its arguments, each a `Problem`."""


@contextmanager
def told_of(url: str) -> Iterator[None]:
    """Have errors in the block name the file.

    Raises
    ------
    ImportError
        If a package is not installed: that is no fault of the file.
    FailedFilesError
        If anything else fails.
    """
    try:
        yield
    except (ImportError, FailedFilesError):
        raise
    except Exception as error:
        raise FailedFilesError(Problem(url, _why(error, url))) from error


def _why(error: Exception, url: str) -> str:
    if "installed IO backends" in str(error):  # and advice that is of no use here
        return "it is empty, or no netCDF or HDF5 file"
    if isinstance(error, FileNotFoundError) and "*" in urllib.parse.unquote(url):
        return "there is no such file, and a pattern has to be expanded first, as by Path.glob"
    own = isinstance(error, InvalidArgumentError)
    return str(error) if own else f"{type(error).__name__}: {error}"


class SourceFiles(Struct, frozen=True, kw_only=True, dict=True):
    """How files are opened.

    Parameters
    ----------
    kind : str or callable
        `netcdf`, `hdf5`, `zarr`, `grib`, or what makes a dataset of a path or URL.
    dim : str
        The dimension along which files are joined.
    variables : tuple of str, optional
        What is read besides the coordinates; all by default.
    options : mapping
        Arguments of `xarray.open_dataset`.
    """

    kind: str | Callable[[str], xr.Dataset]
    dim: str
    variables: tuple[str, ...] | None = None
    options: Mapping[str, Any] = {}

    @cached_property
    def text(self) -> str:
        """What is known of it when a file is found again; the same means the same values."""
        kind = self.kind
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        told = [name, self.dim, self.variables, sorted(self.options.items(), key=str)]
        return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()

    def facts(self, url: str, known: tuple[int, str, str] | None) -> FileFacts | None:
        """What a file holds; None if its size, its stamp and `text` are the known ones.

        Raises
        ------
        FailedFilesError
            If the file cannot be read.
        """
        with told_of(url):
            stamps = *_stamp_of(url), self.text
            if stamps == known:
                return None
            with self.opened(url) as ds:
                layout, axis = layout_of(ds, self.dim)
                return FileFacts(url, stamps, layout, ds.sizes[self.dim], axis)

    @contextmanager
    def reading(self, file: FileFacts) -> Iterator[xr.Dataset]:
        """A file, while rows of it are read.

        Raises
        ------
        FailedFilesError
            If the file cannot be read, or has changed since it was looked at.
        """
        with told_of(file.url):
            with self.opened(file.url) as opened:
                yield opened
            if (*_stamp_of(file.url), self.text) != file.stamps:
                raise FailedFilesError(Problem(file.url, "it has changed since it was looked at"))

    @contextmanager
    def opened(self, url: str) -> Iterator[xr.Dataset]:
        """A file, with values as they are stored."""
        with closing(self._open(url, _path(url))) as found:
            yield self._chosen(found)

    def _open(self, url: str, path: str | None) -> xr.Dataset:
        if not isinstance(self.kind, str):
            return _encoded(self.kind(path or url))
        place: Any = path or url
        if path is None and self.kind in ("netcdf", "hdf5"):
            import fsspec

            place = fsspec.open(url).open()
        how: dict[str, Any] = {**_STORED, **_ENGINES[self.kind], **self.options}
        return xr.open_dataset(place, **how)

    def _chosen(self, ds: xr.Dataset) -> xr.Dataset:
        """The chosen variables and their coordinates, each row of them along the dimension."""
        if self.variables is not None:
            missing = [name for name in self.variables if name not in ds.variables]
            if missing:
                raise InvalidArgumentError(f"there is no variable {missing[0]!r} in it")
            names = dict.fromkeys(self.variables)
            for name in (*self.variables, self.dim):
                attributes = ds[name].attrs if name in ds.variables else {}
                told = f"{attributes.get('coordinates', '')} {attributes.get('bounds', '')}"
                names |= dict.fromkeys((*told.split(), self.dim))
            ds = ds[[name for name in names if name in ds.variables]]
        if self.dim in ds.dims:
            return ds
        if self.dim not in ds.variables:
            raise InvalidArgumentError(
                f"it has no dimension {self.dim!r}, and no variable of that name"
            )
        # One row, whose label is a scalar.
        found: dict[Any, Any] = dict(ds.variables)
        fixed = {n for v in found.values() for n in str(v.attrs.get("coordinates", "")).split()}
        of_times = _is_time(ds.variables[self.dim])
        for key, variable in ds.variables.items():
            values = variable.ndim and variable.dims != (key,) and key not in fixed
            other_time = of_times and not variable.ndim and _is_time(variable)
            if key == self.dim or values or other_time:  # such as `valid_time` of GRIB
                found[key] = found[key].set_dims({self.dim: 1, **variable.sizes})
        return xr.Dataset(found, attrs=ds.attrs)


def stored_dataset(store: Any, group: str = "") -> xr.Dataset:
    """The arrays of a group, with values as they are stored."""
    how: dict[str, Any] = {"decode_cf": False, "chunks": None, "create_default_indexes": False}
    return xr.open_dataset(store, group=group or None, **_ENGINES["zarr"], **how)


def _is_time(stored: xr.Variable) -> bool:
    return " since " in str(stored.attrs.get("units"))


def _encoded(ds: xr.Dataset) -> xr.Dataset:
    """The dataset with times as numbers, and all else as it is; all variables are data."""
    found = {
        name: encode_cf_variable(variable, name=name) if is_time(variable) else variable
        for name, variable in ds.variables.items()
    }
    made = xr.Dataset(found, attrs=ds.attrs).drop_encoding()
    made.set_close(ds.close)
    return made


# --- what it holds ---------------------------------------------------------------------------


def axis_names(ds: xr.Dataset, dim: str) -> list[str]:
    """Names of variables with a few bytes a row: labels, and what is told beside them."""
    found = []
    for name, variable in ds.variables.items():
        nbytes = variable.dtype.itemsize * math.prod(variable.shape[1:])
        small = variable.dtype.kind in "biuf" and nbytes <= _AXIS_BYTES
        if variable.dims[:1] == (dim,) and (small or (variable.ndim == 1 and name == dim)):
            found.append(str(name))
    return found


def _decoded(ds: xr.Dataset, name: str) -> xr.Variable:
    """An axis variable of stored values, decoded; times only if they can be."""
    stored = ds.variables[name]
    told = meaning_of_bounds(name, [variable.attrs for variable in ds.variables.values()])
    given = xr.Variable(stored.dims, stored.values, {**told, **stored.attrs})
    with quiet():  # dates beyond those of numpy become cftime's
        try:
            return decode_cf_variable(name, given).load()
        except (ValueError, OverflowError):  # such as months since a date
            return decode_cf_variable(name, given, decode_times=False).load()


def layout_of(ds: xr.Dataset, dim: str) -> tuple[FileLayout, dict[str, npt.NDArray[Any]]]:
    """Return what other files must have in common, and the decoded values of axis variables.

    Parameters
    ----------
    ds : Dataset
        The dataset, with values as they are stored.
    dim : str
        The dimension along which it grows.
    """
    axis = {name: _decoded(ds, name) for name in axis_names(ds, dim)}
    variables = {}
    for key, variable in ds.variables.items():
        name, grows = str(key), dim in variable.dims
        variables[name] = VariableFacts(
            tuple(map(str, variable.dims)),
            _type(variable.dtype),
            _meaning(variable, axis.get(name)),
            *((b"", b"") if grows else _digest(variable)),
        )
    sizes = {str(name): size for name, size in ds.sizes.items() if name != dim}
    layout = FileLayout(tuple(sorted(sizes.items())), tuple(sorted(variables.items())))
    return layout, {name: variable.values for name, variable in axis.items()}


def _type(dtype: np.dtype[Any]) -> str:
    return "text" if dtype.kind in "OT" else dtype.newbyteorder("=").str.lstrip("<>|=")


def _meaning(variable: xr.Variable, axis: xr.Variable | None) -> tuple[tuple[str, Any], ...]:
    """Units, calendar and packing; of an axis variable, what its decoded values leave open."""
    keys: tuple[str, ...] = DECODED_BY
    if axis is not None:
        is_time = axis.dtype.kind in "mM" or "units" in axis.encoding
        keys = ("calendar",) if is_time else ("units",)
    found = {key: _plain(variable.attrs[key]) for key in keys if key in variable.attrs}
    if "calendar" in found:
        calendar = str(found["calendar"]).lower()
        found["calendar"] = "standard" if calendar == "gregorian" else calendar
    # NaN is missing anyway, and of an axis variable the standard calendar is what none means.
    same = (_NAN,) if axis is None else (_NAN, "standard")
    return tuple(sorted((key, value) for key, value in found.items() if value not in same))


def _plain(value: Any) -> Any:
    """A value that compares equal to itself, whatever type a file gives it."""
    plain = tuple(_NAN if v != v else v for v in np.ravel(value).tolist())
    return plain[0] if len(plain) == 1 else plain


def _digest(variable: xr.Variable) -> tuple[bytes, bytes]:
    """A hash of the values, and the values themselves if they are few numbers."""
    values = np.asarray(variable.values)
    if values.dtype.kind in "OT":
        values = values.astype("U")
    data = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    few = values.dtype.kind in "iuf" and values.size <= _COMPARED_VALUES
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return digest, values.astype(np.float64).tobytes() if few else b""
