"""Maintenance whose work Spark's tasks do gives what the methods of a repository give."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import zarr
from pyspark.sql import SparkSession

import zarr_manifests as zm
from zarr_manifests.engine.compact import compute_statistics
from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.spark import maintenance
from zarr_manifests.store import contents_of

pytestmark = pytest.mark.spark
VALUES = np.arange(4000, dtype="i4").reshape(40, 100)


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    """A repository with packs of which most is dead, and with garbage."""
    repo = zm.create(tmp_path / "repo", {"inline-chunk-bytes": 0})
    with repo.transaction(message="values") as store:
        how = {"chunks": (1, 100), "dtype": "i4", "compressors": None}
        zarr.create_array(store, name="t", shape=VALUES.shape, **how)[:] = VALUES
    with repo.transaction(message="most of them again") as store:
        zarr.open_array(store, path="t")[:30] = VALUES[:30] + 1
    session = repo.writable_session()
    zarr.open_array(session.store, path="t")[0] = 5
    session.fork()  # writes the pack of a session that never commits
    return repo


def values(repo: zm.Repository) -> list[list[int]]:
    found: list[list[int]] = np.asarray(
        zarr.open_array(repo.readonly_session().store, path="t")
    ).tolist()
    return found


def test_verify_reads_every_chunk_in_tasks(spark: SparkSession, repo: zm.Repository) -> None:
    told: list[tuple[str, int]] = []
    report = maintenance.verify(spark, repo.storage.url, progress=lambda *step: told.append(step))
    assert report == repo.verify()
    assert report.ok
    assert told[-1] == ("reading chunks", report.chunk_objects)
    pack = repo.readonly_session().chunk_refs("t").locations[0]
    data = bytearray(repo.storage.get(pack))
    data[7] ^= 1
    repo.storage.delete_many([pack])
    repo.storage.create(pack, bytes(data))
    damaged = maintenance.verify(spark, repo.storage.url)
    assert [problem.key for problem in damaged.problems] == [pack]
    assert damaged == repo.verify()


def test_repack_and_collect_leave_what_is_needed(spark: SparkSession, repo: zm.Repository) -> None:
    before, packs = values(repo), [*repo.storage.list("chunks/")]
    report = maintenance.compact(spark, repo, mode="packs", min_live=0.9)
    assert (report.packs, report.chunks, report.packs_written) == (1, 10, 1)
    assert values(repo) == before
    assert zm.open(repo.storage.url).verify().ok
    repo.expire_snapshots(keep_last=1, max_age=timedelta(0))
    planned = maintenance.garbage_collect(spark, repo.storage.url, timedelta(0), dry_run=True)
    done = maintenance.garbage_collect(spark, repo.storage.url, timedelta(0))
    assert done.objects["chunks"] == planned.objects["chunks"] == 2
    assert len([*repo.storage.list("chunks/")]) == len(packs) + 1 - 2
    assert values(repo) == before
    assert maintenance.verify(spark, repo.storage.url).ok


def leaves(repo: zm.Repository) -> object:
    """The leaves of the base, and how many manifests have them."""
    view = contents_of(repo.readonly_session().store).view
    parts = [
        (part.box, part.count, merged) for ref in view.manifests for part, merged in ref.leaves()
    ]
    return sorted(parts, key=repr), len(view.manifests)


@pytest.mark.parametrize("mode", ["major", "full"])
def test_a_compaction_gives_the_same_base(
    spark: SparkSession, repo: zm.Repository, tmp_path: Path, mode: str
) -> None:
    repo.compute_statistics()
    before = values(repo)
    shutil.copytree(tmp_path / "repo", tmp_path / "same")
    same = zm.open(tmp_path / "same")
    config = {"chunk-manifests": {"sets": [{"default": {"max-manifest-size": 8}}]}}
    here = zm.open(tmp_path / "same", config).compact(mode=mode)
    there = maintenance.compact(spark, zm.open(repo.storage.url, config), mode=mode)
    assert replace(there, snapshot_id=None, bytes_read=0, bytes_written=0) == replace(
        here, snapshot_id=None, bytes_read=0, bytes_written=0
    )
    assert there.manifests_written == 5
    assert leaves(repo) == leaves(same)
    assert values(repo) == before
    statistics = repo.readonly_session().chunk_refs("t", statistics=True)
    assert statistics.low.tolist() == np.min(before, axis=1).tolist()
    mine, theirs = repo.du(estimate=True), same.du(estimate=True)
    assert mine == replace(theirs, snapshot_id=mine.snapshot_id)
    assert maintenance.verify(spark, repo.storage.url).ok
    assert maintenance.compact(spark, repo.storage.url, mode="major").snapshot_id is None


def test_tasks_measure_what_has_no_statistics(
    spark: SparkSession, repo: zm.Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_statistics, "_TASK_BYTES", 15 * 400)
    told: list[int] = []
    report = maintenance.compute_statistics(
        spark, repo.storage.url, ["t"], progress=lambda _, count: told.append(count)
    )
    assert (report.chunks, report.measured) == (40, 40)
    assert told[-1] == 40
    assert len(told) >= 3  # one for each task
    statistics = repo.readonly_session().chunk_refs("t", statistics=True)
    assert statistics.low.tolist() == np.min(values(repo), axis=1).tolist()
    assert maintenance.compute_statistics(spark, repo.storage.url).measured == 0
    session = repo.readonly_session()
    assert session.chunks_where("t", "t >= 3900").selected == 1


def test_a_commit_that_comes_first_stays_on_top_of_a_compaction(
    spark: SparkSession, repo: zm.Repository
) -> None:
    def race(name: str) -> None:
        if name != "root.swap":
            return
        swaps.append(name)
        if len(swaps) == 2:  # the first one shuts other compactions out
            with zm.open(repo.storage.url).transaction(message="meanwhile") as store:
                zarr.open_array(store, path="t")[39] = 7

    swaps: list[str] = []
    racing = zm.open(repo.storage.url, runtime=replace(SYSTEM, checkpoint=race))
    report = maintenance.compact(spark, racing, mode="full")
    assert len(swaps) == 3
    assert report.snapshot_id is not None
    assert [info.message for info in repo.ancestry()][:2] == ["compact 2 deltas", "meanwhile"]
    assert np.asarray(values(repo))[39].tolist() == [7] * 100
    assert repo.verify().ok


def test_rewriting_gives_the_same_array(spark: SparkSession, repo: zm.Repository) -> None:
    before = values(repo)
    planned = maintenance.rewrite_chunks(
        spark, repo.storage.url, "t", chunks=(20, 50), task_bytes=4000, dry_run=True
    )
    report = maintenance.rewrite_chunks(
        spark, repo.storage.url, "t", chunks=(20, 50), task_bytes=4000
    )
    assert report.tasks == planned.tasks == 4
    assert values(repo) == before
    assert zarr.open_array(repo.readonly_session().store, path="t").chunks == (20, 50)
    assert len(repo.readonly_session().chunk_refs("t", statistics=True)) == 4
    assert zm.open(repo.storage.url).verify().ok


def test_a_repository_in_memory_is_refused(spark: SparkSession) -> None:
    repo = zm.create("memory://maintenance-on-spark")
    with pytest.raises(UnsupportedStorageError, match="memory of this process"):
        maintenance.verify(spark, repo)
