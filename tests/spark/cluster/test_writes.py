"""Writes and streams on a cluster: one commit or none, whatever befalls tasks and drivers."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import xarray as xr

import zarr_manifests as zm
from grids import found, hours, made, put_file
from on_cluster.after import landed
from on_cluster.answers import DriverDied, JobError

pytestmark = pytest.mark.cluster
WRITES = ["write_dataframe", "save"]
SWAP = {"where": "driver", "op": "cas", "key": "current"}


@pytest.mark.parametrize("how", WRITES)
def test_tasks_fail_and_executors_are_killed(how: str, cluster: Any, tmp_path: Path) -> None:
    url = str(tmp_path / "repo")
    made(url)
    fails = {"what": "fail", "tickets": str(tmp_path / "fails")}
    kills = {"what": "kill executor", "tickets": str(tmp_path / "kills"), "skip": 1}
    cluster.run("write", how=how, url=url, start=4, stop=12, troubles=[fails], amid=[kills])
    assert landed(url, "hours from 4") == 1
    xr.testing.assert_equal(found(zm.open(url)), hours(12))
    assert len(list((tmp_path / "fails").iterdir())) > 1
    assert len(list((tmp_path / "kills").iterdir())) > 1


@pytest.mark.parametrize("how", WRITES)
def test_a_slow_attempt_loses_to_a_second_one(how: str, cluster: Any, tmp_path: Path) -> None:
    """What it had written is left over; the commit has what the other one wrote."""
    url = str(tmp_path / "repo")
    repo = made(url)
    waits = {"what": "wait", "after": True, "tickets": str(tmp_path / "waits")}
    cluster.run("write_twice_a_task", how=how, url=url, start=4, stop=12, troubles=[waits])
    before = len(list(repo.storage.list("chunks/")))
    assert landed(url, "hours from 4") == 1
    assert len(list(repo.storage.list("chunks/"))) < before
    xr.testing.assert_equal(found(zm.open(url)), hours(12))


def test_two_drivers_on_one_checkpoint(three: Any, tmp_path: Path) -> None:
    cluster, *_ = three
    url, files = str(tmp_path / "repo"), tmp_path / "in"
    made(url)
    put_file(hours(6, 4), files, 0)
    asked = {"url": url, "files": str(files), "checkpoint": str(tmp_path / "c")}
    query_id = cluster.run("stream", **asked)
    for number in range(1, 5):
        put_file(hours(6 + number, 5 + number), files, number)
    copy = shutil.copytree(tmp_path / "c", tmp_path / "copy")
    own = [asked, asked, asked | {"checkpoint": str(copy)}]

    def run(number: int) -> str:
        try:
            return str(three[number].run("stream", **own[number]))
        except JobError as error:
            return str(error)

    with ThreadPoolExecutor(3) as threads:
        ids = [*threads.map(run, range(3))]
    # Spark may notice that two drivers write one log; this package has nothing to object.
    assert query_id in ids
    assert not [each for each in ids if "zarr_manifests.errors" in each]
    cluster.run("stream", **asked)
    repo = zm.open(url)
    assert repo.txn_versions() == {f"spark:{query_id}": 4}
    assert len(list(repo.ancestry())) == 2 + 5
    assert landed(url, "first hours") == 1
    xr.testing.assert_equal(found(repo), hours(10))


@pytest.mark.parametrize("after", [False, True])
def test_the_driver_is_killed_at_the_commit_of_a_batch(
    after: bool, victim: Any, cluster: Any, tmp_path: Path
) -> None:
    url, files = str(tmp_path / "repo"), tmp_path / "in"
    made(url)
    for number in range(3):
        put_file(hours(6 + 2 * number, 4 + 2 * number), files, number)
    asked = {"url": url, "files": str(files), "checkpoint": str(tmp_path / "c")}
    # The second batch dies.
    kill = SWAP | {"what": "kill driver", "after": after, "skip": 1, "tickets": str(tmp_path / "t")}
    with pytest.raises(DriverDied):
        victim.run("stream", **asked, troubles=[kill])
    history = [info.message for info in zm.open(url).ancestry()]
    assert len(history) == (4 if after else 3)
    query_id = cluster.run("stream", **asked)
    repo = zm.open(url)
    assert repo.txn_versions() == {f"spark:{query_id}": 2}
    assert len(list(repo.ancestry())) == 5
    assert landed(url, "first hours") == 1
    xr.testing.assert_equal(found(repo), hours(10))


def test_tasks_of_a_stream_fail_and_its_executor_is_killed(cluster: Any, tmp_path: Path) -> None:
    url, files = str(tmp_path / "repo"), tmp_path / "in"
    made(url)
    put_file(hours(6, 4), files, 0)
    put_file(hours(9, 6), files, 1)
    fails = {"what": "fail", "tickets": str(tmp_path / "fails")}
    kills = {"what": "kill executor", "tickets": str(tmp_path / "kills"), "skip": 2}
    asked = {"url": url, "files": str(files), "checkpoint": str(tmp_path / "c")}
    cluster.run("stream", **asked, troubles=[fails, kills])
    assert len(list(zm.open(url).ancestry())) == 4
    assert landed(url, "first hours") == 1
    xr.testing.assert_equal(found(zm.open(url)), hours(9))
