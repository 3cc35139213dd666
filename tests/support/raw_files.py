"""Daily files of every format that `ingest` knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eccodes
import numpy as np
import xarray as xr

FIRST = np.datetime64("2024-01-01", "ns")
SHAPE = (20, 30)


def day(number: int, *, rows: int = 2) -> xr.Dataset:
    """Values that halves can pack, some of them missing, and times since the file's own day."""
    time = FIRST + (number * rows + np.arange(rows)) * np.timedelta64(1, "D")
    values = np.arange(rows * 600).reshape(rows, *SHAPE) / 2 + 1000 * number
    values[0, 3, 4:6] = np.nan
    axes = {"lat": np.arange(20.0), "lon": np.arange(30.0)}
    ds = xr.Dataset({"t": (("time", "lat", "lon"), values, {"units": "K"})}, {"time": time, **axes})
    ds.time.encoding = {"units": f"hours since {str(time[0])[:10]}", "dtype": "i4"}
    return ds


def days(number: int) -> xr.Dataset:
    how: Any = {"data_vars": "minimal", "coords": "minimal", "compat": "override"}
    return xr.concat([day(n) for n in range(number)], "time", join="override", **how)


def save(kind: str, ds: xr.Dataset, place: Path) -> Path:
    packing = {"dtype": "i2", "scale_factor": 0.5, "add_offset": 1000.0, "_FillValue": -32768}
    if kind == "zarr":
        ds.to_zarr(place, consolidated=False, encoding={"t": {**packing, "chunks": (1, 10, 15)}})
    else:
        how = {"zlib": True, "shuffle": True, "chunksizes": (1, 10, 15), **packing}
        ds.to_netcdf(place, engine="h5netcdf", unlimited_dims=["time"], encoding={"t": how})
    return place


def save_grib(place: Path, number: int, shape: tuple[int, int], names: tuple[str, ...]) -> Path:
    """A message for each name, all of one day."""
    with place.open("wb") as file:
        for offset, name in enumerate(names):
            message = eccodes.codes_grib_new_from_samples("regular_ll_sfc_grib2")
            for key, value in {
                "Nj": shape[0],
                "Ni": shape[1],
                "latitudeOfFirstGridPointInDegrees": shape[0] - 1,
                "latitudeOfLastGridPointInDegrees": 0,
                "longitudeOfFirstGridPointInDegrees": 0,
                "longitudeOfLastGridPointInDegrees": shape[1] - 1,
                "iDirectionIncrementInDegrees": 1,
                "jDirectionIncrementInDegrees": 1,
                "dataDate": 20240101 + number,
                "shortName": name,
            }.items():
                eccodes.codes_set(message, key, value)
            eccodes.codes_set_values(message, grib_values(number, shape).ravel() + offset)
            eccodes.codes_write(message, file)
            eccodes.codes_release(message)
    return place


def grib_values(number: int, shape: tuple[int, int]) -> Any:
    return np.arange(float(shape[0] * shape[1])).reshape(shape) + 1000 * number
