"""Leases that keep the snapshots of DataFrames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
from msgspec.structs import replace

import zarr_manifests as zm
from inside import root_of
from storages import Fault, FaultyStorage
from zarr_manifests import Repository
from zarr_manifests.errors import SnapshotExpiredError
from zarr_manifests.spark.data_source import ManifestsDataSource
from zarr_manifests.spark.job import with_lease
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.storage.local import LocalStorage

HOUR = timedelta(hours=1)


def leases(repo: Repository) -> tuple[Any, ...]:
    return root_of(repo).leases


def winds(offset: float) -> xr.Dataset:
    return xr.Dataset({"a": ("x", np.arange(40.0) + offset)}, {"x": np.arange(40)})


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    repo = zm.create(tmp_path / "repo", {"pack-chunk-bytes": 0, "inline-chunk-bytes": 0})
    zm.write(winds(0), repo, message="write", encoding={"a": {"chunks": 10}})
    return repo


def upheaval(repo: Repository) -> None:
    """Overwrite everything, expire all but the last snapshot, and collect the rest."""
    for offset in (1000.0, 2000.0):
        zm.write(winds(offset), repo, message="again", mode="w")
    repo.expire_snapshots(keep_last=1)
    repo.garbage_collect(timedelta(0))


def rows(batches: Iterator[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def source(repo: Repository, **options: str) -> ManifestsDataSource:
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return ManifestsDataSource({"path": repo.storage.url, "target-rows": "10", **named})


def read_by_tasks(made: ManifestsDataSource, between: Callable[[], None]) -> list[tuple[Any, ...]]:
    reader = made.reader(made.schema())
    partitions = reader.partitions()
    between()
    return [row for part in partitions for row in rows(iter(reader.read(part)))]


FIRST = [(x, float(x)) for x in range(40)]


def test_a_collection_between_planning_and_tasks_takes_nothing(repo: Repository) -> None:
    assert read_by_tasks(source(repo), lambda: upheaval(repo)) == FIRST
    assert len(leases(repo)) == 1


def test_without_a_lease_a_collection_takes_what_is_planned(repo: Repository) -> None:
    with pytest.raises(SnapshotExpiredError):
        read_by_tasks(source(repo, lease="none"), lambda: upheaval(repo))
    assert leases(repo) == ()


def test_options_of_a_stream_leave_the_lease_to_the_stream(repo: Repository) -> None:
    source(repo, keep_for="1h").schema()
    assert leases(repo) == ()


def test_many_reads_of_a_snapshot_leave_one_lease(repo: Repository) -> None:
    with_lease(plan_read(repo, ReadOptions(), SparkFacts()), HOUR)
    left = root_of(repo)
    again = plan_read(zm.open(repo.storage.url), ReadOptions(variables="a"), SparkFacts())
    assert with_lease(again, HOUR).lease is not None
    assert root_of(repo) == left


def test_a_late_task_renews_the_lease_or_goes_on_without(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_read(repo, ReadOptions(), SparkFacts())
    early = with_lease(plan, HOUR).lease
    assert early is not None
    first = leases(repo)
    early.renew()
    assert leases(repo) == first
    # Left by another process.
    late = replace(early, duration=2 * HOUR, since_s=early.since_s - 0.9 * 7200)
    late.renew()
    assert [lease.snapshot for lease in leases(repo)] == 2 * [plan.snapshot_id]
    replace(late, snapshot_id="AAAAAAAAAAA").renew()
    assert "was not renewed" in caplog.text


def test_a_storage_that_cannot_be_written_gives_no_lease(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault("fail_before", "cas", count=None)
    faulty = FaultyStorage(LocalStorage(Path(unquote(urlsplit(repo.storage.url).path))), [fault])
    with_lease(plan_read(zm.open(faulty), ReadOptions(), SparkFacts()), 3 * HOUR)
    assert "no lease on" in caplog.text
    assert leases(repo) == ()


def test_a_snapshot_that_has_expired_is_told(repo: Repository) -> None:
    job = plan_read(repo, ReadOptions(), SparkFacts())
    upheaval(repo)
    with pytest.raises(SnapshotExpiredError):
        with_lease(job, HOUR)
