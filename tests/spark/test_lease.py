"""Leases that keep the snapshots of DataFrames."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
import zarr
from pyspark.sql import SparkSession

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.errors import SnapshotExpiredError
from zarr_manifests.format.root import Lease
from zarr_manifests.spark import lease, read, register
from zarr_manifests.spark.data_source import ManifestsDataSource
from zarr_manifests.spark.job import Job, Leased
from zarr_manifests.spark.lease import keep_readable, leave_lease, renew_lease, with_lease
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.testing import Fault, FaultyStorage


class Frame:
    """Stands for a DataFrame."""


def written(storage: Storage | Path) -> tuple[Repository, str]:
    repo = zm.create(storage)
    for number in range(3):
        with repo.transaction(message="write") as store:
            zarr.create_group(store, path=f"g{number}")
        if number == 0:
            first = repo.readonly_session().snapshot_id
    return repo, first


class Clock:
    """The time and the timers of the module, which go on when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def Timer(self, delay_s: float, call: Callable[..., None], args: list[Any]) -> Any:
        due = self.now_s + delay_s, partial(call, *args)
        return SimpleNamespace(start=lambda: self._due.append(due))

    def go_to(self, now_s: float) -> None:
        self.now_s = now_s
        due = [timer for timer in self._due if timer[0] <= now_s]
        self._due = [timer for timer in self._due if timer[0] > now_s]
        for _, call in due:
            call()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease, "time", clock)
    monkeypatch.setattr(lease, "threading", clock)
    return clock


def held(repo: Repository) -> list[Lease]:
    roots = zm.open(repo.storage.url)._context.roots
    return list(roots.leases(roots.read().root))


def leases(repo: Repository) -> int:
    return len(held(repo))


def test_a_lease_lasts_as_long_as_the_frame_and_the_duration(tmp_path: Path, clock: Clock) -> None:
    repo, first = written(tmp_path / "repo")
    frame, other = Frame(), Frame()
    keep_readable(repo, first, 20, frame)
    keep_readable(repo, first, 10, other)
    assert leases(repo) == 1
    del other
    clock.go_to(50)
    assert leases(repo) == 1
    repo.expire_snapshots(keep_last=1)
    assert first in {snapshot.snapshot_id for snapshot in repo.ancestry("main")}
    del frame
    clock.go_to(70)
    assert leases(repo) == 0


def test_without_a_frame_it_lasts_for_the_duration(tmp_path: Path, clock: Clock) -> None:
    repo, first = written(tmp_path / "repo")
    for duration_s in (10, 40, 10):
        keep_readable(repo, first, duration_s, Frame())
    for now_s in (10, 39):
        clock.go_to(now_s)
        assert leases(repo) == 1
    clock.go_to(40)
    assert leases(repo) == 0


def test_a_storage_that_cannot_be_written_gives_no_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path / "repo")
    faulty = FaultyStorage(
        LocalStorage(tmp_path / "repo"), [Fault("fail_before", "cas", count=None)]
    )
    repo = zm.open(faulty)
    with caplog.at_level(logging.WARNING):
        keep_readable(repo, repo.readonly_session().snapshot_id, 1, Frame())
    assert "no lease on" in caplog.text
    assert leases(repo) == 0


def test_a_snapshot_that_has_expired_gets_no_lease(tmp_path: Path) -> None:
    repo, first = written(tmp_path / "repo")
    repo.expire_snapshots(keep_last=1)
    with pytest.raises(SnapshotExpiredError):
        keep_readable(repo, first, 1, Frame())


# --- leases that nobody holds ---------------------------------------------------------------------

HOUR = timedelta(hours=1)


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
    first = held(repo)
    assert len(first) == 1
    # The same snapshot and duration again: no lease more.
    id_ = first[0].snapshot
    assert read_by_tasks(source(repo, version=id_), lambda: upheaval(repo)) == FIRST
    assert [each.snapshot for each in held(repo)] == [id_]
    assert held(repo)[0].expires_ms > first[0].expires_ms


def test_without_a_lease_a_collection_takes_what_is_planned(repo: Repository) -> None:
    with pytest.raises(SnapshotExpiredError):
        read_by_tasks(source(repo, lease="none"), lambda: upheaval(repo))
    assert leases(repo) == 0


def test_what_was_added_is_kept_too(repo: Repository) -> None:
    first = repo.list_branches()["main"]
    more = winds(0).assign_coords(x=np.arange(40, 80))
    zm.write(more, repo, message="append", append_dim="x")
    made = source(repo, start_snapshot_id=first)
    found = read_by_tasks(made, lambda: upheaval(repo))
    assert found == [(x + 40, value) for x, value in FIRST]


@pytest.mark.spark
def test_a_collection_after_load_takes_nothing(spark: SparkSession, repo: Repository) -> None:
    register(spark)
    frame = spark.read.format("zarr_manifests").option("target-rows", "10").load(repo.storage.url)
    upheaval(repo)
    assert sorted(tuple(row) for row in frame.collect()) == FIRST


def test_options_of_a_stream_leave_the_lease_to_the_stream(repo: Repository) -> None:
    source(repo, keep_for="1h").schema()
    assert leases(repo) == 0


@pytest.fixture
def old(repo: Repository) -> Job:
    """A job whose lease has lasted for nine tenths of an hour."""
    return aged(with_lease(plan_read(repo, ReadOptions(target_rows=10), SparkFacts()), HOUR), 0.9)


def aged(job: Job, hours: float) -> Job:
    assert job.lease is not None
    return replace(job, lease=Leased(job.lease.since_s - hours * 3600, HOUR))


def test_tasks_that_begin_late_renew_the_lease(repo: Repository, old: Job) -> None:
    from zarr_manifests.spark.worker import partition_batches

    assert old.lease is not None
    young = aged(old, -0.5)
    assert rows(partition_batches(young, 0)) == FIRST[:10]
    assert leases(repo) == 0
    assert rows(partition_batches(old, 1)) == FIRST[10:20]
    (renewed,) = held(repo)
    assert renewed.snapshot == old.snapshot_id
    assert renewed.expires_ms / 1000 >= old.lease.since_s + 1.9 * 3600
    rows(partition_batches(old, 2))  # this process knows of it
    assert held(repo) == [renewed]
    upheaval(repo)
    assert rows(partition_batches(old, 3)) == FIRST[30:]


@pytest.mark.spark
def test_frames_travel_with_their_lease(spark: SparkSession, repo: Repository) -> None:
    jobs: list[Job] = []

    def rows(spark: SparkSession, job: Job, engine: str) -> Frame:
        jobs.append(job)
        return Frame()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[read.__module__], "rows", rows)
        read(spark, repo)
        read(spark, repo, lease=None)
    assert jobs[0].lease is not None
    assert jobs[0].lease.duration == HOUR
    assert jobs[1].lease is None


def test_a_task_goes_on_where_a_lease_cannot_be_renewed(
    repo: Repository, old: Job, caplog: pytest.LogCaptureFixture
) -> None:
    duration = timedelta(minutes=50)  # no test has left one for so long
    lost = replace(old, snapshot_id="AAAAAAAAAAA", lease=Leased(0.0, duration))
    renew_lease(lost)
    assert "was not renewed" in caplog.text
    assert leases(repo) == 0


def test_no_lease_is_left_where_nothing_can_be_written(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    storage = LocalStorage(Path(unquote(urlsplit(repo.storage.url).path)))
    faulty = zm.open(FaultyStorage(storage, [Fault("fail_before", "cas", count=None)]))
    leave_lease(faulty, faulty.list_branches()["main"], HOUR)
    assert "no lease on" in caplog.text
    assert leases(repo) == 0


def test_workers_do_not_renew_at_the_same_moment() -> None:
    assert 0.5 <= lease._RENEWED <= 0.8


HOLDER = """
import atexit, sys

atexit.register(lambda: print("at exit:", len(lease._held)))  # runs after those registered later

import zarr_manifests as zm
from zarr_manifests.spark import lease

repo = zm.open(sys.argv[1])
lease.keep_readable(repo, repo.list_branches()["main"], 3600, repo)
"""


@pytest.mark.slow
def test_leases_are_given_up_before_the_interpreter_ends(tmp_path: Path) -> None:
    """Threads that renew leases still run then, so that none of them can keep the lock file."""
    ds = xr.Dataset({"a": ("t", np.arange(4.0))})
    zm.write(ds, tmp_path / "r", message="m")
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "at exit: 0\n"), done.stderr
    assert leases(zm.open(tmp_path / "r")) == 0
