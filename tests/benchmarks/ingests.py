"""What is measured of files that become rows of a repository."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from runner import Case, Figure, Watch

import zarr_manifests as zm

_SEED = 7

type _Encoding = dict[str, dict[str, Any]]
type _Copy = Callable[[Sequence[Path], Path], object]


def ingesting(case: Case) -> Iterator[Figure]:
    """Copy a year of daily netCDF-3 files in one commit: with Spark, or with dask's threads."""
    files = [case.folder / f"{number:04}.nc" for number in range(case.sizes["files"])]
    side = case.sizes["side"]
    rng = np.random.default_rng(_SEED)
    noise = rng.random((side, 2 * side), np.float32)
    axes = {"lat": np.arange(float(side)), "lon": np.arange(2.0 * side)}
    for number, file in enumerate(files):
        time = np.datetime64("2023-01-01", "ns") + np.arange(number, number + 1).astype("m8[D]")
        values = np.roll(noise, number, 1)[None]
        ds = xr.Dataset({"t": (("time", "lat", "lon"), values)}, {"time": time, **axes})
        ds.time.encoding["units"] = "days since 2023-01-01"
        ds.to_netcdf(file, engine="scipy", unlimited_dims=["time"])
    encoding: _Encoding = {"t": {"chunks": (1, side, 2 * side)}, "time": {"chunks": (8192,)}}
    copy = _by_spark if case.contestant == "zarr_manifests" else _by_dask
    with copy(encoding) as run:
        while True:
            place = case.folder / "r"
            with Watch() as watch:
                run(files, place)
            found = xr.open_dataset(place, engine="zarr_manifests")
            assert found.sizes["time"] == len(files)
            assert float(found.t[-1, 0, 0]) == float(np.roll(noise, len(files) - 1, 1)[0, 0])
            shutil.rmtree(place)
            yield Figure(watch.seconds / len(files))


@contextmanager
def _by_spark(encoding: _Encoding) -> Iterator[_Copy]:
    from zarr_manifests.spark import ingest, session

    spark = session(master="local[2]")
    try:
        yield lambda files, place: ingest(spark, files, place, append_dim="time", encoding=encoding)
    finally:
        spark.stop()


@contextmanager
def _by_dask(encoding: _Encoding) -> Iterator[_Copy]:
    import dask

    how: dict[str, Any] = {"combine": "nested", "concat_dim": "time", "data_vars": "minimal"}
    how |= {"coords": "minimal", "compat": "override", "join": "override", "engine": "scipy"}

    def copy(files: Sequence[Path], place: Path) -> None:
        with xr.open_mfdataset(files, **how) as ds:
            zm.write(ds, place, message="a year", encoding=encoding)

    with dask.config.set(scheduler="threads", num_workers=2):
        yield copy
