"""Files that Spark's tasks open and write; tests/xarray/test_ingest.py has everything else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import raw_files
import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.spark import ingest

pytestmark = pytest.mark.spark


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
    assert (len(report.added), len(report.failed), len(report.snapshot_ids)) == (11, 1, 1)
    found = head(place)
    assert os.getpid() not in found.worker.values.tolist()
    xr.testing.assert_equal(found.drop_vars("worker"), days(*rest))
    assert zm.open(place).verify().ok
    good = [file for file in files if file != files[5]]
    assert ingest(spark, good, place, open=opened, **how).snapshot_ids == ()


def test_tasks_refer_to_files(spark, files, tmp_path):
    place = zm.create(tmp_path / "r", virtual_containers={"raw": tmp_path})
    ingest(spark, files[:7], place, append_dim="time", virtual=True)
    report = ingest(spark, files, place, append_dim="time", virtual=True)
    assert (len(report.added), report.unchanged) == (5, 7)
    xr.testing.assert_equal(head(place), days(*range(12)))


@pytest.mark.parametrize("virtual", [False, True], ids=["copy", "virtual"])
@pytest.mark.parametrize("kind", ["netcdf", "grib"])
def test_tasks_open_other_formats(spark, tmp_path, kind, virtual):
    """With the libraries of HDF5 and of GRIB, in processes that Spark has forked."""
    raw = tmp_path / "raw"
    raw.mkdir()
    files = [raw / str(number) for number in range(3)]
    for number, file in enumerate(files):
        if kind == "netcdf":
            raw_files.save(kind, raw_files.day(number), file)
        else:
            raw_files.save_grib(file, number, raw_files.SHAPE, ("2t",))
    place = zm.create(tmp_path / "r", virtual_containers={"raw": raw})
    report = ingest(spark, files, place, append_dim="time", open=kind, virtual=virtual)
    assert len(report.added) == 3
    found = head(place)
    if kind == "netcdf":
        xr.testing.assert_equal(found, raw_files.days(3))
    else:
        due = [raw_files.grib_values(number, raw_files.SHAPE) for number in range(3)]
        np.testing.assert_allclose(found.t2m, np.stack(due))
    assert place.verify().ok


def test_a_failed_task_is_tried_again(spark, files, tmp_path):
    """As when the storage of the repository fails once."""
    marker = tmp_path / "failed"

    def fails_once(path: str) -> xr.Dataset:
        from zarr_manifests.storage.local import LocalStorage

        put = LocalStorage.create

        def failing(self, *args, **options):
            LocalStorage.create = put
            if marker.exists():
                return put(self, *args, **options)
            marker.touch()
            raise zm.errors.StorageError("the disk is away")

        LocalStorage.create = failing
        return xr.open_dataset(path, engine="scipy")

    place = zm.create(tmp_path / "r", {"inline-chunk-bytes": 0})
    ingest(spark, files[:2], place, append_dim="time", open=fails_once)
    assert marker.exists()
    xr.testing.assert_equal(head(tmp_path / "r"), days(0, 1))
    assert zm.open(tmp_path / "r").verify().ok
