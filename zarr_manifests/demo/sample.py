"""The data shipped with the package: 132 months of wind, and a relief of the earth."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["open_relief", "open_winds"]


def open_winds() -> xr.Dataset:
    """The monthly Navy winds, January 1982 to December 1992, on a grid of 5 degrees, in memory.

    Returns
    -------
    xarray.Dataset
        `u` and `v` (float32, m s-1) over `time`, `lat` and `lon`. In the public domain.

    Examples
    --------
    >>> from zarr_manifests.demo import open_winds
    >>> dict(open_winds().sizes)
    {'time': 132, 'lat': 37, 'lon': 72}
    """
    return _load("winds.nc")


def open_relief() -> xr.Dataset:
    """The relief of the earth on a grid of 1 degree (`relief`, int16, m), in memory.

    Examples
    --------
    >>> from zarr_manifests.demo import open_relief
    >>> int(open_relief().relief.max())
    5731
    """
    return _load("relief.nc")


def _load(name: str) -> xr.Dataset:
    import xarray as xr

    with as_file(files(__package__) / "data" / name) as path:
        return xr.load_dataset(path, engine="scipy")
