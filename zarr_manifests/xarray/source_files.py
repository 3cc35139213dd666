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
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import xarray as xr
from xarray.conventions import decode_cf_variable, encode_cf_variable

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.file_rows import FileFacts, FileLayout, VariableFacts
from zarr_manifests.runtime import quiet
from zarr_manifests.session import Session
from zarr_manifests.storage.url import refuse_slipped
from zarr_manifests.virtual.containers import VirtualContainer
from zarr_manifests.virtual.locations import WEB
from zarr_manifests.xarray.fit import DECODED_BY, is_time
from zarr_manifests.xarray.scan_files import codecs_of, scan
from zarr_manifests.xarray.stored_group import meaning_of_bounds

__all__ = [
    "FailedFileError",
    "OpenedFile",
    "SourceFiles",
    "axis_names",
    "decoded_axis",
    "layout_of",
    "source_url",
    "stamp_of",
]

_AXIS_BYTES: Final = 32
"""A variable with at most so many bytes a row is written by the driver."""
_COMPARED_VALUES: Final = 8192
"""So many values that files have in common are compared one by one."""
_NAN: Final = "nan"
_ENGINES: Final[Mapping[str, str | None]] = {
    "netcdf": None,
    "hdf5": "h5netcdf",
    "zarr": "zarr",
    "grib": "cfgrib",
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
}
"""What leaves values as they are stored, but makes text of characters."""


def source_url(given: str | os.PathLike[str]) -> str:
    """Return the URL of a file, by which it is known again.

    Raises
    ------
    InvalidArgumentError
        If a user, a password or a query is in it, which may be a secret, and would be written to
        the repository. If it is not text that UTF-8 can encode.

    Examples
    --------
    >>> source_url("/data/day 1.nc")
    'file:///data/day%201.nc'
    """
    text = os.fspath(given)
    refuse_slipped(text)
    try:
        if isinstance(given, str) and _URL.match(text):
            _refuse_secrets(text)
            text.encode()
            if not text.startswith("file://"):
                return text
            text = urllib.parse.unquote(text.removeprefix("file://"))
        return Path(text).absolute().as_uri()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{text!r} is no path: UTF-8 cannot encode it") from error


def _refuse_secrets(url: str) -> None:
    for scheme, host, rest in _CHAINED.findall(url):
        of_web = scheme.lower() in WEB
        part = "a user or password" if "@" in host else "a query" if of_web and "?" in rest else ""
        if part:
            raise InvalidArgumentError(
                f"a {scheme}:// location with {part} in it is refused: that may be a secret, and "
                "where files came from is written to the repository"
            )


def _path(url: str) -> str | None:
    """The local path of a URL, if it has one."""
    return urllib.parse.unquote(url.removeprefix("file://")) if url.startswith("file://") else None


def stamp_of(url: str) -> tuple[int, str]:
    """Return the size of a file, or of a folder, and text that changes when its bytes do.

    Raises
    ------
    OSError
        If it is not there.
    """
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


class FailedFileError(Exception):
    """A file that cannot be read, and why."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason


@dataclass(frozen=True, slots=True, eq=False)
class OpenedFile:
    """An open file: its dataset, and a session with its chunks if they are to be referred to."""

    ds: xr.Dataset
    session: Session | None = None


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
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
    containers : mapping of str to VirtualContainer, optional
        The folders whose files may be read, if chunks are to be referred to.
    """

    kind: str | Callable[[str], xr.Dataset]
    dim: str
    variables: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    containers: Mapping[str, VirtualContainer] | None = None

    @cached_property
    def text(self) -> str:
        """What is known of it when a file is found again; the same means the same values."""
        kind = self.kind
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        virtual = self.containers is not None
        told = [name, self.dim, self.variables, sorted(self.options.items(), key=str), virtual]
        return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()

    @contextmanager
    def opened(self, url: str) -> Iterator[OpenedFile]:
        """A file, with values as they are stored."""
        if self.containers is None:
            with closing(self._open(url)) as found:
                yield OpenedFile(self.chosen(found))
            return
        path = _path(url)
        if path is None or not isinstance(self.kind, str):
            raise InvalidArgumentError("only local files can be referred to; copy it instead")
        session = scan(path, self.kind, self.containers)
        how: dict[str, Any] = {"decode_cf": False, "consolidated": False, "chunks": None}
        store: Any = session.store
        with xr.open_dataset(store, engine="zarr", **how) as found:
            yield OpenedFile(self.chosen(found), session)

    def _open(self, url: str) -> xr.Dataset:
        path = _path(url)
        if not isinstance(self.kind, str):
            return _encoded(self.kind(path or url))
        engine = _ENGINES[self.kind]
        how: dict[str, Any] = {**_STORED, "cache": False, "chunks": None}
        how["create_default_indexes"] = False  # which take longer to make than a file to open
        if engine is not None:
            how["engine"] = engine
        if engine == "zarr":
            how["consolidated"] = False
        if engine == "cfgrib":
            how["indexpath"] = ""  # else it writes a file beside each one that it opens
        place: Any = path or url
        if path is None and self.kind in ("netcdf", "hdf5"):
            import fsspec

            place = fsspec.open(url).open()
        try:
            return xr.open_dataset(place, **{**how, **self.options})
        except ValueError as error:
            if "installed" not in str(error) and "engine" not in str(error):
                raise
            raise InvalidArgumentError(
                f"no package that is installed can open it as {self.kind}: netCDF-3 takes scipy, "
                "netCDF-4 and HDF5 take h5netcdf, and GRIB takes cfgrib, on the driver and on "
                f"every worker ({error})"
            ) from error

    def chosen(self, ds: xr.Dataset) -> xr.Dataset:
        """The chosen variables and their coordinates, each row of them along the dimension.

        Raises
        ------
        InvalidArgumentError
            If a variable is not there, or the dataset has not the dimension.
        """
        if self.variables is not None:
            missing = [name for name in self.variables if name not in ds.variables]
            if missing:
                raise InvalidArgumentError(f"there is no variable {missing[0]!r} in it")
            names = dict.fromkeys(self.variables)
            for name in (*self.variables, self.dim):
                attributes = ds[name].attrs if name in ds.variables else {}
                told = f"{attributes.get('coordinates', '')} {attributes.get('bounds', '')}"
                names |= dict.fromkeys(other for other in told.split() if other in ds.variables)
            if self.dim in ds.variables:
                names[self.dim] = None
            ds = ds[list(names)]
        if self.dim in ds.dims:
            return ds
        if self.dim in ds.variables:  # one row, whose label is a scalar
            found: dict[Any, Any] = dict(ds.variables)
            fixed = {n for v in found.values() for n in str(v.attrs.get("coordinates", "")).split()}
            of_times = _is_time(ds.variables[self.dim])
            for key, variable in ds.variables.items():
                values = variable.ndim and variable.dims != (key,) and key not in fixed
                other_time = of_times and not variable.ndim and _is_time(variable)
                if key == self.dim or values or other_time:  # such as `valid_time` of GRIB
                    found[key] = found[key].set_dims({self.dim: 1, **variable.sizes})
            made = xr.Dataset(found, attrs=ds.attrs)
            made.set_close(ds.close)
            return made
        raise InvalidArgumentError(
            f"it has no dimension {self.dim!r}, and no variable of that name"
        )

    def facts(self, url: str, opened: OpenedFile, stamp: tuple[int, str]) -> FileFacts:
        """Return what a file holds, of which `stamp_of` was the stamp before it was opened."""
        ds, session = opened.ds, opened.session

        def codecs(name: str) -> str:
            return "" if session is None else codecs_of(session.store, name, ds[name].ndim)

        decoded = decoded_axis(ds, self.dim)
        axis = {name: variable.values for name, variable in decoded.items()}
        layout = layout_of(ds, decoded, self.dim, codecs)
        return FileFacts(url, *stamp, layout, ds.sizes[self.dim], axis)


def _is_time(stored: xr.Variable) -> bool:
    return " since " in str(stored.attrs.get("units"))


def _encoded(ds: xr.Dataset) -> xr.Dataset:
    """The dataset with times as numbers; other values stay as they are."""
    found = {}
    for name, variable in ds.variables.items():
        own = variable.copy(deep=False)
        if is_time(variable):
            own = encode_cf_variable(own, name=name)
        own.encoding = {}
        found[name] = own
    made = xr.Dataset({n: v for n, v in found.items() if n not in ds.coords}, attrs=ds.attrs)
    made = made.assign_coords({n: found[n] for n in ds.coords}).reset_coords(
        [n for n in ds.coords if n not in ds.dims]
    )
    made.set_close(ds.close)
    return made


# --- what it holds ---------------------------------------------------------------------------


def axis_names(ds: xr.Dataset, dim: str) -> list[str]:
    """Names of variables with a few bytes a row: labels, and what is told beside them."""
    found = []
    for name, variable in ds.variables.items():
        if dim not in variable.dims:
            continue
        cells = math.prod(size for other, size in variable.sizes.items() if other != dim)
        small = variable.dtype.kind in "biuf" and cells * variable.dtype.itemsize <= _AXIS_BYTES
        if (variable.dims == (dim,) and name == dim) or (small and variable.dims[0] == dim):
            found.append(str(name))
    return found


def decoded_axis(ds: xr.Dataset, dim: str) -> dict[str, xr.Variable]:
    """The axis variables of a dataset of stored values, decoded; times only if they can be."""
    names = axis_names(ds, dim)
    told = [variable.attrs for variable in ds.variables.values()]
    found = {}
    for name in names:
        stored = ds.variables[name]
        attributes = {**meaning_of_bounds(name, told), **stored.attrs}
        attributes.pop("coordinates", None)
        given = xr.Variable(stored.dims, stored.values, attributes)
        with quiet():  # dates beyond those of numpy become cftime's
            try:
                decoded = decode_cf_variable(name, given, decode_timedelta=False).load()
            except (ValueError, OverflowError):  # such as months since a date
                decoded = decode_cf_variable(name, given, decode_times=False).load()
        found[name] = decoded
    return found


def layout_of(
    ds: xr.Dataset,
    decoded: Mapping[str, xr.Variable],
    dim: str,
    codecs: Callable[[str], str],
) -> FileLayout:
    """Return what other files must have in common with a dataset of stored values.

    Parameters
    ----------
    ds : Dataset
        The dataset.
    decoded : mapping of str to Variable
        Its axis variables.
    dim : str
        The dimension along which it grows.
    codecs : callable
        How the chunks of a variable are encoded.
    """
    variables = {}
    for name, variable in ds.variables.items():
        grows = dim in variable.dims
        axis = decoded.get(str(name))
        variables[str(name)] = VariableFacts(
            tuple(map(str, variable.dims)),
            _type(variable.dtype),
            _meaning(variable, axis),
            codecs(str(name)) if grows and axis is None else "",
            *((b"", b"") if grows else _digest(variable)),
        )
    sizes = {str(name): size for name, size in ds.sizes.items() if name != dim}
    return FileLayout(tuple(sorted(sizes.items())), tuple(sorted(variables.items())))


def _type(dtype: np.dtype[Any]) -> str:
    return "text" if dtype.kind in "OT" else dtype.newbyteorder("=").str.lstrip("<>|=")


def _meaning(variable: xr.Variable, axis: xr.Variable | None) -> tuple[tuple[str, Any], ...]:
    """Units, calendar and packing; of an axis variable, what its decoded values leave open."""
    keys: tuple[str, ...] = DECODED_BY
    if axis is not None:
        is_time = axis.dtype.kind in "mM" or "units" in axis.encoding
        keys = ("calendar",) if is_time else ("units",)
    found = {}
    for key in keys:
        if key in variable.attrs and _plain(variable.attrs[key]) != _NAN:
            found[key] = _plain(variable.attrs[key])  # NaN is missing anyway
    if "calendar" in found:
        found["calendar"] = str(found["calendar"]).lower()
        if found["calendar"] == "gregorian":
            found["calendar"] = "standard"
        if axis is not None and found["calendar"] == "standard":
            del found["calendar"]  # which is what none means
    return tuple(sorted(found.items()))


def _plain(value: Any) -> Any:
    """A value that compares equal to itself, whatever type a file gives it."""
    values = np.ravel(np.asarray(value)).tolist()
    plain = tuple(_NAN if v != v else v for v in values)
    return plain[0] if len(plain) == 1 else plain


def _digest(variable: xr.Variable) -> tuple[bytes, bytes]:
    """A hash of the values, and the values themselves if they are few numbers."""
    values = np.asarray(variable.values)
    if values.dtype.kind in "OT":
        data = "\0".join(map(str, values.ravel().tolist())).encode()
    else:
        values = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False))
        data = values.tobytes()
    digest = hashlib.blake2b(data, digest_size=16).digest()
    few = values.dtype.kind in "iuf" and values.size <= _COMPARED_VALUES
    return digest, values.astype(np.float64).tobytes() if few else b""
