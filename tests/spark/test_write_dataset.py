"""Datasets whose blocks Spark computes and writes."""

from __future__ import annotations

import os
import select
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.spark import write_dataset
from zarr_manifests.spark.tasks import run_tasks

pytestmark = pytest.mark.spark

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


def test_blocks_go_to_tasks_in_groups(spark, tmp_path):
    ds = xr.Dataset({"v": ("x", da.arange(4000, chunks=2))})
    before = len(spark.sparkContext.statusTracker().getJobIdsForGroup(None))
    spark.sparkContext.setJobGroup("groups", "blocks")
    write_dataset(ds, tmp_path, spark=spark, message="create")
    tracker = spark.sparkContext.statusTracker()
    stages = [
        tracker.getStageInfo(stage)
        for job in tracker.getJobIdsForGroup("groups")
        for stage in tracker.getJobInfo(job).stageIds
    ]
    assert before >= 0
    assert 2 <= sum(stage.numTasks for stage in stages) <= 16  # of 2000 blocks
    assert head(tmp_path).v.values.tolist() == list(range(4000))


def test_lazy_values_without_dask_are_read_by_tasks(spark, tmp_path):
    """Also where an append begins within a chunk."""
    for number, rows in enumerate((slice(0, 7), slice(7, 12))):
        field(rows.start, rows.stop).to_netcdf(tmp_path / f"{number}.nc", engine="scipy")
    place = tmp_path / "r"
    for number in range(2):
        with xr.open_dataset(tmp_path / f"{number}.nc", engine="scipy") as ds:
            lazy = ds.t.variable
            assert not lazy._in_memory
            how = {"encoding": ENCODING} if number == 0 else {"append_dim": "time"}
            write_dataset(ds, place, spark=spark, message=f"file {number}", **how)
            assert not lazy._in_memory, "the driver has read it"
    xr.testing.assert_equal(head(place), field(0, 12))


def test_values_in_memory_are_written_by_the_driver(spark, tmp_path):
    write_dataset(field(0, 4), tmp_path, spark=spark, message="create", encoding=ENCODING)
    xr.testing.assert_identical(head(tmp_path), field(0, 4))


def test_errors_are_those_of_write(spark, tmp_path):
    ds = field(0, 4).chunk(time=2)
    with pytest.raises(InvalidArgumentError, match="takes no scheduler"):
        write_dataset(ds, tmp_path, spark=spark, message="a", scheduler="threads")
    with pytest.raises(InvalidArgumentError, match="is in the memory of this process"):
        write_dataset(ds, "memory://spark-write", spark=spark, message="a")
    small = {"t": {"dtype": "i2", "chunks": (2, 400)}}
    ds["t"] = ds.t * 1000
    with pytest.raises(InvalidArgumentError, match="would be read back as"):
        write_dataset(ds, tmp_path / "r", spark=spark, message="a", encoding=small)
    assert not zm.exists(tmp_path / "r")
    with pytest.raises(TypeError, match="no_such"):
        write_dataset(ds, tmp_path, spark=spark, message="a", no_such=1)


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


def test_results_of_tasks_come_in_order(spark):
    assert list(run_tasks(spark, abs, range(-20, 20))) == [abs(n) for n in range(-20, 20)]
    assert list(run_tasks(spark, abs, [])) == []
    with pytest.raises(ZeroDivisionError):
        list(run_tasks(spark, lambda n: 1 / n, [1, 0]))


def test_results_of_tasks_come_before_the_last_task_ends(spark, tmp_path):
    """The last one waits until this process has the results of the others."""
    heard = tmp_path / "heard"
    os.mkfifo(heard)

    def call(number: int) -> int:
        if number == 3:
            with heard.open("r+b", buffering=0) as pipe:
                assert select.select([pipe], [], [], 300)[0]
        return number

    found = run_tasks(spark, call, range(4))
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    heard.write_bytes(b".")
    assert list(found) == [3]


def test_write_computes_with_the_scheduler_it_is_given(tmp_path):
    asked = []

    def scheduler(graph, keys, **options):
        asked.append(len(keys))
        return dask.get(graph, keys)

    ds = field(0, 8).chunk(time=2)
    zm.write(ds, tmp_path / "a", message="a", encoding=ENCODING, scheduler=scheduler)
    zm.write(ds, tmp_path / "b", message="b", encoding=ENCODING, scheduler="synchronous")
    assert asked
    for name in "ab":
        xr.testing.assert_identical(head(Path(tmp_path, name)), field(0, 8))
