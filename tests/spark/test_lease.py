"""Leases that keep the snapshots of DataFrames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from inside import root_of
from storages import Fault, FaultyStorage
from zarr_manifests import Repository
from zarr_manifests.errors import SnapshotExpiredError
from zarr_manifests.spark import lease
from zarr_manifests.spark.data_source import ManifestsDataSource
from zarr_manifests.spark.job import Leased
from zarr_manifests.spark.lease import keep_readable, leave_lease, renew_lease, with_lease
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage


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


def leases(repo: Repository) -> tuple[Any, ...]:
    return root_of(repo).leases


def test_a_lease_lasts_as_long_as_the_frame_and_the_duration(tmp_path: Path, clock: Clock) -> None:
    repo, first = written(tmp_path / "repo")
    frame, other = Frame(), Frame()
    keep_readable(repo, first, 20, frame)
    keep_readable(repo, first, 40, other)
    assert len(leases(repo)) == 1
    del frame, other
    clock.go_to(39)
    assert len(leases(repo)) == 1
    clock.go_to(60)
    assert leases(repo) == ()
    frame = Frame()
    keep_readable(repo, first, 20, frame)
    clock.go_to(100)
    repo.expire_snapshots(keep_last=1)
    assert first in {snapshot.snapshot_id for snapshot in repo.ancestry("main")}
    del frame
    clock.go_to(120)
    assert leases(repo) == ()
    repo.expire_snapshots(keep_last=1)
    with pytest.raises(SnapshotExpiredError):
        keep_readable(repo, first, 1, Frame())


def test_a_storage_that_cannot_be_written_gives_no_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repo, _ = written(tmp_path / "repo")
    fault = Fault("fail_before", "cas", count=None)
    faulty = zm.open(FaultyStorage(LocalStorage(tmp_path / "repo"), [fault]))
    last = repo.list_branches()["main"]
    for lease_of in (
        lambda: keep_readable(faulty, last, 1, Frame()),
        lambda: leave_lease(faulty, last, HOUR),
    ):
        caplog.clear()
        lease_of()
        assert "no lease on" in caplog.text
    assert leases(repo) == ()


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
    first = leases(repo)
    assert len(first) == 1
    # The same snapshot and duration again: no lease more.
    id_ = first[0].snapshot
    assert read_by_tasks(source(repo, version=id_), lambda: upheaval(repo)) == FIRST
    assert [each.snapshot for each in leases(repo)] == [id_]
    assert leases(repo)[0].expires_ms > first[0].expires_ms


def test_without_a_lease_a_collection_takes_what_is_planned(repo: Repository) -> None:
    with pytest.raises(SnapshotExpiredError):
        read_by_tasks(source(repo, lease="none"), lambda: upheaval(repo))
    assert leases(repo) == ()


def test_options_of_a_stream_leave_the_lease_to_the_stream(repo: Repository) -> None:
    source(repo, keep_for="1h").schema()
    assert leases(repo) == ()


def test_a_late_task_renews_the_lease_or_goes_on_without(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    job = with_lease(plan_read(repo, ReadOptions(), SparkFacts()), HOUR)
    assert job.lease is not None
    renew_lease(job)
    assert leases(repo) == ()
    late = replace(job, lease=Leased(job.lease.since_s - 0.9 * 3600, HOUR))
    renew_lease(late)
    assert [lease.snapshot for lease in leases(repo)] == [job.snapshot_id]
    renew_lease(replace(late, snapshot_id="AAAAAAAAAAA"))
    assert "was not renewed" in caplog.text
