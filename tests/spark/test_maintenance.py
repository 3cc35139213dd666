"""Maintenance whose work Spark's tasks do gives what the methods of a repository give."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import zarr
from pyspark.sql import SparkSession

import zarr_manifests as zm
from zarr_manifests.errors import UnsupportedStorageError
from zarr_manifests.spark import maintenance

pytestmark = pytest.mark.spark
VALUES = np.arange(4000, dtype="i4").reshape(40, 100)


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    """A repository with packs of which most is dead, and with garbage."""
    repo = zm.Repository.create(tmp_path / "repo", {"inline-chunk-bytes": 0})
    with repo.transaction(message="values") as store:
        how = {"chunks": (1, 100), "dtype": "i4", "compressors": None}
        zarr.create_array(store, name="t", shape=VALUES.shape, **how)[:] = VALUES
    with repo.transaction(message="most of them again") as store:
        zarr.open_array(store, path="t")[:30] = VALUES[:30] + 1
    session = repo.writable_session()
    zarr.open_array(session.store, path="t")[0] = 5
    session.fork()  # writes the pack of a session that never commits
    return repo


def values(repo: zm.Repository) -> object:
    return zarr.open_array(repo.readonly_session().store, path="t")[:].tolist()


def test_verify_reads_every_chunk_in_tasks(spark: SparkSession, repo: zm.Repository) -> None:
    told: list[tuple[str, int]] = []
    report = maintenance.verify(spark, repo.url, progress=lambda *step: told.append(step))
    assert report == repo.verify()
    assert report.ok
    assert told[-1] == ("reading chunks", report.chunk_objects)
    pack = repo.readonly_session().chunk_refs("t").locations[0]
    data = bytearray(repo.storage.get(pack))
    data[7] ^= 1
    repo.storage.delete_many([pack])
    repo.storage.create(pack, bytes(data))
    damaged = maintenance.verify(spark, repo.url)
    assert [problem.key for problem in damaged.problems] == [pack]
    assert damaged == repo.verify()


def test_repack_and_collect_leave_what_is_needed(spark: SparkSession, repo: zm.Repository) -> None:
    before, packs = values(repo), [*repo.storage.list("chunks/")]
    report = maintenance.repack(spark, repo, min_live=0.9)
    assert (report.packs, report.chunks, report.packs_written) == (1, 10, 1)
    assert values(repo) == before
    assert zm.Repository.open(repo.url).verify().ok
    repo.expire_snapshots(keep_last=1, max_age=timedelta(0))
    planned = maintenance.collect(spark, repo.url, timedelta(0), dry_run=True)
    done = maintenance.collect(spark, repo.url, timedelta(0))
    assert done.objects["chunks"] == planned.objects["chunks"] == 2
    assert len([*repo.storage.list("chunks/")]) == len(packs) + 1 - 2
    assert values(repo) == before
    assert maintenance.verify(spark, repo.url).ok


def test_rewriting_gives_the_same_array(spark: SparkSession, repo: zm.Repository) -> None:
    before = values(repo)
    planned = maintenance.rewrite_chunks(
        spark, repo.url, "t", chunks=(20, 50), task_bytes=4000, dry_run=True
    )
    report = maintenance.rewrite_chunks(spark, repo.url, "t", chunks=(20, 50), task_bytes=4000)
    assert report.tasks == planned.tasks == 4
    assert values(repo) == before
    assert zarr.open_array(repo.readonly_session().store, path="t").chunks == (20, 50)
    assert len(repo.readonly_session().chunk_statistics("t")) == 4
    assert zm.Repository.open(repo.url).verify().ok


def test_a_repository_in_memory_is_refused(spark: SparkSession) -> None:
    repo = zm.Repository.create("memory://maintenance-on-spark")
    with pytest.raises(UnsupportedStorageError, match="memory of this process"):
        maintenance.verify(spark, repo)
