"""Writing and reading from the processes of a distributed cluster."""

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from distributed import Client, LocalCluster

import zarr_manifests as zm
from looking import messages, opened
from zarr_manifests.errors import InvalidArgumentError


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=2,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",  # any free port
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


def test_several_datasets_in_an_open_session_are_one_commit(client, tmp_path):
    repo = zm.create(tmp_path)
    with repo.writable_session() as session:
        for group in ("a", "b"):
            zm.to_session(dask_field(0, 4), session, group=group, encoding=ENCODING)
        zm.to_session(dask_field(4, 6), session, group="a", append_dim="time")
        assert len([*repo.ancestry()]) == 1
        session.commit("two groups")
    assert messages(tmp_path) == ["two groups"]
    for group, stop in (("a", 6), ("b", 4)):
        xr.testing.assert_identical(opened(tmp_path, group=group), field(0, stop))


def test_copies_that_report_let_xarray_write_by_itself(client, tmp_path):
    repo = zm.create(tmp_path)
    session = repo.writable_session(copies="report")
    dask_field(0, 8).to_zarr(session.store, encoding=ENCODING, consolidated=False)
    session.commit("create")
    options = {"append_dim": "time", "consolidated": False}
    dask_field(8, 12).to_zarr(session.store, **options)
    dask_field(12, 16).to_zarr(session.store, compute=False, **options).compute()
    session.commit("append twice")
    patch = (dask_field(4, 10) * -1).drop_vars(["x", "time"])
    patch.to_zarr(session.store, region={"time": slice(4, 10)}, consolidated=False)
    session.commit("patch")
    expected = field(0, 16)
    for name in ("t", "n"):
        expected[name][4:10] *= -1
    xr.testing.assert_equal(opened(tmp_path), expected)
    assert messages(tmp_path) == ["create", "append twice", "patch"]
    assert repo.verify().ok


def test_memory_of_this_process_cannot_be_written_from_others(client):
    ds = xr.Dataset({"t": ("x", da.arange(4, chunks=2))})
    with pytest.raises(InvalidArgumentError, match="memory://"):
        zm.write(ds, "memory://not-shared", message="create")
    assert len([*zm.open("memory://not-shared").ancestry()]) == 1
