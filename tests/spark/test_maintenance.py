"""Maintenance whose work Spark's tasks do gives what the methods of a repository give."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import zarr
from msgspec.structs import replace
from pyspark.sql import SparkSession

import zarr_manifests as zm
from overtaken import OvertakenStorage
from zarr_manifests.spark import maintenance

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
    with zm.show_progress(lambda *step: told.append(step)):
        report = maintenance.verify(spark, repo.storage.url)
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


def test_a_compaction_gives_the_same_base(
    spark: SparkSession, repo: zm.Repository, tmp_path: Path
) -> None:
    repo.compute_statistics()
    before = values(repo)
    shutil.copytree(tmp_path / "repo", tmp_path / "same")
    same = zm.open(tmp_path / "same")
    config = {"chunk-manifests": {"sets": [{"default": {"max-manifest-size": 8}}]}}
    here = zm.open(tmp_path / "same", config).compact(mode="full")
    there = maintenance.compact(spark, zm.open(repo.storage.url, config), mode="full")
    assert replace(there, snapshot_id=None, bytes_written=0) == replace(
        here, snapshot_id=None, bytes_written=0
    )
    assert there.manifests_written == 5
    assert values(repo) == before
    statistics = repo.readonly_session().chunk_refs("t", statistics=True)
    assert statistics.low.tolist() == np.min(before, axis=1).tolist()
    mine, theirs = repo.du(estimate=True), same.du(estimate=True)
    assert mine == replace(theirs, snapshot_id=mine.snapshot_id)
    assert maintenance.verify(spark, repo.storage.url).ok
    assert maintenance.compact(spark, repo.storage.url, mode="major").snapshot_id is None


def test_tasks_measure_what_has_no_statistics(spark: SparkSession, repo: zm.Repository) -> None:
    report = maintenance.compute_statistics(spark, repo.storage.url, ["t"])
    assert (report.chunks, report.measured) == (40, 40)
    statistics = repo.readonly_session().chunk_refs("t", statistics=True)
    assert statistics.low.tolist() == np.min(values(repo), axis=1).tolist()
    assert maintenance.compute_statistics(spark, repo.storage.url).measured == 0
    assert repo.readonly_session().chunks_where("t", "t >= 3900").selected == 1


def test_a_commit_that_comes_first_stays_on_top_of_a_compaction(
    spark: SparkSession, repo: zm.Repository
) -> None:
    def meanwhile() -> None:
        with zm.open(repo.storage.url).transaction(message="meanwhile") as store:
            zarr.open_array(store, path="t")[39] = 7

    overtaken = zm.open(OvertakenStorage(repo.storage, meanwhile))
    assert maintenance.compact(spark, overtaken, mode="full").snapshot_id is not None
    assert {info.message for info in repo.ancestry()} >= {"compact 2 deltas", "meanwhile"}
    assert values(repo)[39] == [7] * 100
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
