"""Files that Spark's tasks open and write; tests/api/xarray/test_ingest.py has everything else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.spark import ingest


def day(number: int) -> xr.Dataset:
    values = np.full((1, 20, 30), number, "f4")
    values[0, 0] = np.arange(30)
    time = [np.datetime64("2024-01-01", "ns") + number * np.timedelta64(1, "D")]
    return xr.Dataset({"t": (("time", "y", "x"), values)}, {"time": time})


def days(*numbers: int) -> xr.Dataset:
    return xr.concat([day(number) for number in numbers], "time")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number:02}.nc" for number in range(12)]
    for number, path in enumerate(paths):
        day(number).to_netcdf(path, engine="scipy", unlimited_dims=["time"])
    return paths


def head(url: object) -> xr.Dataset:
    return xr.open_dataset(url, engine="zarr_manifests").load()


@pytest.mark.smoke
def test_tasks_copy_files_and_leave_out_what_they_cannot_open(spark, files, tmp_path):
    def opened(path: str) -> xr.Dataset:
        ds = xr.open_dataset(path, engine="scipy")
        return ds.assign(worker=("time", np.full(ds.sizes["time"], os.getpid()), {}))

    files[5].write_bytes(b"no file of any kind")
    place, how = tmp_path / "r", {"append_dim": "time", "encoding": {"t": {"chunks": (5, 20, 30)}}}
    with pytest.raises(InvalidArgumentError, match=r"05\.nc: "):
        ingest(spark, files, place, open=opened, **how)
    report = ingest(spark, files, place, open=opened, on_error="report", **how)
    rest = [number for number in range(12) if number != 5]
    assert (len(report.added), len(report.failed)) == (11, 1)
    found = head(place)
    assert os.getpid() not in found.worker.values.tolist()
    xr.testing.assert_equal(found.drop_vars("worker"), days(*rest))
    assert zm.open(place).verify().ok
    good = [file for file in files if file != files[5]]
    assert ingest(spark, good, place, open=opened, **how).snapshot_id is None
