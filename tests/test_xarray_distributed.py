"""Writing and reading from the processes of a distributed cluster."""

import os
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from distributed import Client, LocalCluster

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError, UnmergedForksError

ENGINE = "zarr_manifests"


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=2,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def field(start: int, stop: int) -> xr.Dataset:
    """Rows that tell where they are; in chunks of two rows, big enough not to be kept inline."""
    rows = np.arange(start, stop)
    values = rows[:, None] * 1000.0 + np.arange(400)
    return xr.Dataset(
        {"t": (("time", "x"), values), "n": ("time", rows * 2)},
        {"time": rows.astype("f8"), "x": np.arange(400)},
    )


def dask_field(start: int, stop: int) -> xr.Dataset:
    return field(start, stop).chunk(time=2, x=200)


ENCODING = {"t": {"chunks": (2, 200)}, "n": {"chunks": (2,)}}


def head(url: object, **options: object) -> xr.Dataset:
    return xr.open_dataset(url, engine=ENGINE, **options)


def messages(url: object) -> list[str]:
    return [info.message for info in zm.Repository.open(url).ancestry()][::-1][1:]


def test_create_append_and_region(client, tmp_path):
    zm.write(dask_field(0, 8), tmp_path, message="create", encoding=ENCODING)
    zm.write(dask_field(8, 16), tmp_path, message="append", append_dim="time")
    patch = dask_field(4, 10).drop_vars("x") * -1
    patch["time"] = patch.time * -1
    zm.write(patch, tmp_path, message="patch", region={"time": slice(4, 10)})
    expected = field(0, 16)
    for name in ("t", "n"):
        expected[name][4:10] *= -1
    xr.testing.assert_equal(head(tmp_path).load(), expected)
    assert messages(tmp_path) == ["create", "append", "patch"]


def test_reading_on_the_workers(client, tmp_path):
    first = zm.write(field(0, 8), tmp_path, message="create", encoding=ENCODING)
    zm.write(field(0, 8) + 1, tmp_path, message="replace", mode="w", encoding=ENCODING)
    now, then = head(tmp_path, chunks={}), head(tmp_path, chunks={}, snapshot_id=first)
    assert float((now.t - then.t).sum()) == now.t.size
    xr.testing.assert_equal(then.compute(), field(0, 8))
    xr.testing.assert_equal(
        xr.open_zarr(zm.Repository.open(tmp_path).readonly_session().store).compute(),
        field(0, 8) + 1,
    )


def test_a_store_that_was_merely_pickled_cannot_be_committed(client, tmp_path):
    session = zm.Repository.create(tmp_path).writable_session()
    dask_field(0, 8).to_zarr(session.store)
    with pytest.raises(UnmergedForksError, match=r"zarr_manifests\.write"):
        session.commit("would lose what the workers wrote")
    assert messages(tmp_path) == []


def test_a_worker_that_dies_is_made_up_for(client, tmp_path):
    died = tmp_path / "died"

    def die_once(block, block_id=None):
        if block_id == (3, 0) and not died.exists():
            Path(died).touch()
            os._exit(1)
        return block

    ds = dask_field(0, 8)
    ds["t"] = ds.t.copy(data=ds.t.data.map_blocks(die_once, dtype="f8", meta=np.empty((0, 0))))
    zm.write(ds, tmp_path / "repo", message="create", encoding=ENCODING)
    assert died.exists()
    xr.testing.assert_equal(head(tmp_path / "repo").load(), field(0, 8))
    repo = zm.Repository.open(tmp_path / "repo")
    tip, before = (info.snapshot_id for info in repo.ancestry())
    assert len(repo.diff(before, tip).chunks["/t"]) == 8


def test_a_task_that_fails_commits_nothing(client, tmp_path):
    zm.write(field(0, 4), tmp_path, message="create", encoding=ENCODING)

    def fail(block):
        raise RuntimeError("the source is gone")

    more = dask_field(4, 8)
    more["t"] = more.t.copy(data=more.t.data.map_blocks(fail, dtype="f8", meta=np.empty((0, 0))))
    with pytest.raises(RuntimeError, match="the source is gone"):
        zm.write(more, tmp_path, message="append", append_dim="time")
    assert messages(tmp_path) == ["create"]
    xr.testing.assert_equal(head(tmp_path).load(), field(0, 4))


def test_memory_of_this_process_cannot_be_written_from_others(client):
    ds = xr.Dataset({"t": ("x", da.arange(4, chunks=2))})
    with pytest.raises(InvalidArgumentError, match="memory://"):
        zm.write(ds, "memory://not-shared", message="create")
    assert messages("memory://not-shared") == []
