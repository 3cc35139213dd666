"""Files ingested on a cluster: each is in once or not at all, whoever and whatever is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import zarr_manifests as zm
from on_cluster.after import landed
from on_cluster.answers import Driver, DriverDied

pytestmark = pytest.mark.cluster


def whole() -> xr.Dataset:
    noise = np.random.default_rng(0).random((8, 30, 400), "f4")  # too much for chunks in refs
    return xr.Dataset({"t": (("time", "y", "x"), noise)}, {"time": np.arange(8)})


@pytest.fixture
def files(tmp_path: Path) -> str:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(4):
        part = whole().isel(time=slice(2 * number, 2 * number + 2))
        part.to_netcdf(folder / f"{number}.nc", engine="scipy", unlimited_dims=["time"])
    return str(folder)


def check(url: str, commits: int) -> None:
    assert landed(url, "files") == commits
    xr.testing.assert_equal(xr.load_dataset(url, engine="zarr_manifests"), whole())


def test_tasks_fail_and_an_executor_is_killed(cluster: Driver, files: str, tmp_path: Path) -> None:
    url = str(tmp_path / "repo")
    fails = {"what": "fail", "tickets": str(tmp_path / "fails")}
    kills = {"what": "kill executor", "tickets": str(tmp_path / "kills")}
    asked = {"url": url, "files": files, "per_commit": 4}
    assert cluster.run("ingest_files", **asked, troubles=[fails, kills]) == [4, 0]
    for tickets in ("fails", "kills"):
        assert len(list((tmp_path / tickets).iterdir())) > 1
    check(url, 1)
    assert cluster.run("ingest_files", **asked) == [0, 4]
    check(url, 1)


@pytest.mark.parametrize(
    ("commits", "after"), [(0, False), (1, False), (1, True)], ids=["first", "before", "after"]
)
def test_the_driver_is_killed_at_a_commit(
    commits: int, after: bool, victim: Driver, cluster: Driver, files: str, tmp_path: Path
) -> None:
    """So many commits are there when it dies, or one more; the first one makes the repository."""
    url = str(tmp_path / "repo")
    kill = {"what": "kill driver", "where": "driver", "op": "cas", "key": "current"}
    kill |= {"after": after, "skip": commits, "tickets": str(tmp_path / "kills")}
    asked = {"url": url, "files": files, "per_commit": 2}
    with pytest.raises(DriverDied):
        victim.run("ingest_files", **asked, troubles=[kill])
    there = commits + after
    assert zm.exists(url) == bool(there)
    if there:
        assert landed(url, "files") == there
        assert xr.open_dataset(url, engine="zarr_manifests").sizes["time"] == 4 * there
    assert cluster.run("ingest_files", **asked) == [4 - 2 * there, 2 * there]
    check(url, 2)
