"""Leases that keep the snapshots of DataFrames."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zarr

from zarr_manifests import Repository
from zarr_manifests.errors import SnapshotExpiredError
from zarr_manifests.spark.lease import keep_readable
from zarr_manifests.storage import LocalStorage, Storage
from zarr_manifests.testing import Fault, FaultyStorage


class Frame:
    """Stands for a DataFrame."""


def written(storage: Storage | Path) -> tuple[Repository, str]:
    repo = Repository.create(storage)
    for number in range(3):
        with repo.transaction(message="write") as store:
            zarr.create_group(store, path=f"g{number}")
        if number == 0:
            first = repo.readonly_session().snapshot_id
    return repo, first


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def leases(repo: Repository) -> int:
    roots = Repository.open(repo.url)._context.roots
    return len(roots.leases(roots.read().root))


def test_a_lease_lasts_as_long_as_the_frame_and_the_duration(tmp_path: Path) -> None:
    repo, first = written(tmp_path / "repo")
    frame, other = Frame(), Frame()
    keep_readable(repo, first, 0.2, frame)
    keep_readable(repo, first, 0.1, other)
    assert leases(repo) == 1
    del other
    time.sleep(0.5)
    assert leases(repo) == 1
    repo.expire_snapshots(keep_last=1)
    assert first in {snapshot.snapshot_id for snapshot in repo.ancestry("main")}
    del frame
    wait_until(lambda: leases(repo) == 0)


def test_without_a_frame_it_lasts_for_the_duration(tmp_path: Path) -> None:
    repo, first = written(tmp_path / "repo")
    keep_readable(repo, first, 0.4, Frame())
    keep_readable(repo, first, 0.1, Frame())
    time.sleep(0.2)
    assert leases(repo) == 1
    wait_until(lambda: leases(repo) == 0)


def test_a_storage_that_cannot_be_written_gives_no_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path / "repo")
    faulty = FaultyStorage(
        LocalStorage(tmp_path / "repo"), [Fault("fail_before", "cas", count=None)]
    )
    repo = Repository.open(faulty)
    with caplog.at_level(logging.WARNING):
        keep_readable(repo, repo.readonly_session().snapshot_id, 1, Frame())
    assert "no lease on" in caplog.text
    assert leases(repo) == 0


def test_a_snapshot_that_has_expired_gets_no_lease(tmp_path: Path) -> None:
    repo, first = written(tmp_path / "repo")
    repo.expire_snapshots(keep_last=1)
    with pytest.raises(SnapshotExpiredError):
        keep_readable(repo, first, 1, Frame())
