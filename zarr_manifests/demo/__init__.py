"""The package's main job on real data: netCDF, commits, xarray, Spark, a picture.

`open_winds` returns the data by itself; `Demo` has the steps that `zarr-manifests demo` runs.
"""

from __future__ import annotations

from zarr_manifests.demo.place import DemoPlace
from zarr_manifests.demo.sample import open_relief, open_winds
from zarr_manifests.demo.steps import CheckFailedError, Demo

__all__ = ["CheckFailedError", "Demo", "DemoPlace", "open_relief", "open_winds"]
