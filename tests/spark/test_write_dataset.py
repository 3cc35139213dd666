"""Datasets whose blocks Spark computes and writes."""

from __future__ import annotations

import os

import numpy as np
import xarray as xr

import zarr_manifests as zm
from zarr_manifests.spark import write_dataset

ENCODING = {"t": {"chunks": (2, 200)}, "n": {"chunks": (2,)}}


def field(start: int, stop: int) -> xr.Dataset:
    rows = np.arange(start, stop)
    values = rows[:, None] * 1000.0 + np.arange(400)
    return xr.Dataset(
        {"t": (("time", "x"), values), "n": ("time", rows * 2)},
        {"time": rows.astype("f8"), "x": np.arange(400)},
    )


def head(url: object) -> xr.Dataset:
    return xr.open_dataset(url, engine="zarr_manifests").load()


def messages(url: object) -> list[str]:
    return [info.message for info in zm.open(url).ancestry()][::-1][1:]


def process_of(block):
    return np.full_like(block, os.getpid())


def test_blocks_are_computed_by_tasks_and_make_one_commit(spark, tmp_path):
    ds = field(0, 40).chunk(time=2, x=200)
    ds["worker"] = ("time", ds.n.data.map_blocks(process_of, dtype="i8"))
    written = write_dataset(ds, tmp_path, spark=spark, message="create", encoding=ENCODING)
    assert zm.open(tmp_path).list_branches()["main"] == written
    found = head(tmp_path)
    xr.testing.assert_identical(found.drop_vars("worker"), field(0, 40))
    assert os.getpid() not in set(found.worker.values.tolist())
    more = field(40, 45).chunk(time=2, x=400)
    more["worker"] = more.n * 0
    write_dataset(more, tmp_path, spark=spark, message="append", append_dim="time")
    patch = field(0, 4).drop_vars("x")[["t"]].chunk(time=2) * -1
    write_dataset(patch, tmp_path, spark=spark, message="patch", region={"time": slice(0, 4)})
    expected = field(0, 45)
    expected["t"][:4] *= -1
    xr.testing.assert_identical(head(tmp_path).drop_vars("worker"), expected)
    assert messages(tmp_path) == ["create", "append", "patch"]
    session = zm.open(tmp_path).readonly_session()
    assert len(session.chunk_refs("t", statistics=True)) == len(
        session.chunk_refs("t")
    )  # tasks measure
    assert zm.open(tmp_path).verify().ok


def test_files_are_read_by_tasks(spark, tmp_path):
    """Also where an append begins within a chunk."""
    for number, rows in enumerate((slice(0, 7), slice(7, 12))):
        field(rows.start, rows.stop).to_netcdf(tmp_path / f"{number}.nc", engine="scipy")
    place = tmp_path / "r"
    for number in range(2):
        with xr.open_dataset(tmp_path / f"{number}.nc", engine="scipy", chunks={"time": 2}) as ds:
            how = {"encoding": ENCODING} if number == 0 else {"append_dim": "time"}
            write_dataset(ds, place, spark=spark, message=f"file {number}", **how)
    xr.testing.assert_equal(head(place), field(0, 12))


def test_a_failed_task_is_tried_again(spark, tmp_path):
    """Its first attempt leaves an object behind, which no commit refers to."""
    marker = tmp_path / "failed"

    def fails_once(block, block_info=None):
        if block_info and block_info[0]["chunk-location"] == (1, 0) and not marker.exists():
            marker.touch()
            raise OSError("the network is away")
        return block

    ds = field(0, 8).chunk(time=2)
    ds["t"] = ds.t.copy(data=ds.t.data.map_blocks(fails_once, meta=np.empty((0, 0))))
    write_dataset(ds, tmp_path / "r", spark=spark, message="create", encoding=ENCODING)
    assert marker.exists()
    xr.testing.assert_identical(head(tmp_path / "r"), field(0, 8))
    assert zm.open(tmp_path / "r").verify().ok
