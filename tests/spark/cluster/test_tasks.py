"""Forks of a session on a cluster: one commit or none, whatever befalls tasks and drivers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from on_cluster.after import landed
from on_cluster.answers import DriverDied, JobError
from zarr_manifests import Repository

pytestmark = pytest.mark.cluster


def made(url: str) -> Repository:
    """A repository with an array of eight chunks."""
    repo = zm.create(url)
    with repo.transaction(message="an array") as store:
        zarr.create_array(store, name="a", shape=(8000,), chunks=(1000,), dtype="f8")
    return repo


def value(url: str) -> float:
    """What the array is filled with; NaN if it is empty."""
    array: Any = zarr.open_array(zm.open(url).readonly_session().store, path="a")
    values = array[:] - np.tile(np.arange(1000), 8)
    if not array[:].any():
        return np.nan
    assert (values == values[0]).all()
    return float(values[0])


TASKS = {
    "a task fails": {"what": "fail"},
    "a task fails after a write": {"what": "fail", "after": True},
    "an executor is killed": {"what": "kill executor", "skip": 2},
}


@pytest.mark.parametrize("what", TASKS)
def test_tasks_that_fail_are_tried_again(what: str, cluster: Any, tmp_path: Path) -> None:
    url = str(tmp_path / "repo")
    made(url)
    trouble = TASKS[what] | {"tickets": str(tmp_path / "tickets")}
    snapshot_id = cluster.run("fill", url=url, value=1.0, troubles=[trouble])
    assert landed(url, "fill with 1.0") == 1
    assert zm.open(url).list_branches()["main"] == snapshot_id
    assert value(url) == 1
    assert len(list((tmp_path / "tickets").iterdir())) > 1


def test_an_executor_is_killed_while_it_writes_to_an_object_store(
    cluster: Any, object_server: Any, tmp_path: Path
) -> None:
    url = f"s3://{object_server.bucket}/killed"
    made(url)
    trouble = {"what": "kill executor", "after": True, "tickets": str(tmp_path / "tickets")}
    cluster.run("fill", url=url, value=3.0, troubles=[trouble])
    assert landed(url, "fill with 3.0") == 1
    assert value(url) == 3


@pytest.mark.parametrize(("after", "times"), [(False, 0), (True, 1)], ids=["before", "after"])
def test_the_driver_is_killed_at_its_commit(
    after: bool, times: int, victim: Any, cluster: Any, tmp_path: Path
) -> None:
    url = str(tmp_path / "repo")
    made(url)
    trouble = {"what": "kill driver", "where": "driver", "op": "cas", "key": "current"}
    trouble |= {"after": after, "tickets": str(tmp_path / "tickets")}
    with pytest.raises(DriverDied):
        victim.run("fill", url=url, value=1.0, troubles=[trouble])
    assert landed(url, "fill with 1.0") == times
    cluster.run("fill", url=url, value=2.0)
    assert landed(url, "fill with 2.0") == 1
    assert value(url) == 2


def test_the_storage_fails_under_the_commit(cluster: Any, tmp_path: Path) -> None:
    """Before the swap there is none; where its answer is lost, there is one."""
    url = str(tmp_path / "repo")
    made(url)
    trouble = {"what": "fail", "where": "driver", "tickets": str(tmp_path / "before")}
    with pytest.raises(JobError, match="StorageError: trouble"):
        cluster.run("fill", url=url, value=1.0, troubles=[trouble | {"key": "snapshots/*"}])
    assert landed(url, "fill with 1.0") == 0
    trouble |= {"op": "cas", "key": "current", "after": True, "tickets": str(tmp_path / "after")}
    cluster.run("fill", url=url, value=2.0, troubles=[trouble])
    assert landed(url, "fill with 2.0") == 1
    assert value(url) == 2
