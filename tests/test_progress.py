"""What long work tells its `progress`: counts, and totals where these are cheap to know."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import zarr

import zarr_manifests as zm
from tests.support.hearing import Hearing
from zarr_manifests.progress import counted, expect, ignore
from zarr_manifests.storage import MemoryStorage

COMMITS = 70
"""More than are loaded at once."""


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    """An array that `COMMITS` commits have filled; a branch ends ten commits before."""
    options = {"inline-chunk-bytes": 0, "compaction": {"mode": "manual"}}
    repo = zm.Repository.create(tmp_path / "repository", options)
    with repo.transaction(message="make t") as store:
        zarr.create_array(store, name="t", shape=(2 * COMMITS,), chunks=(2,), dtype="i4")
    for at in range(COMMITS):
        with repo.transaction(message=f"fill {at}") as store:
            zarr.open_array(store, path="t")[2 * at : 2 * at + 2] = at + 1
    repo.create_branch("trial", "main~10")
    return repo


def heard(work: Callable[[Hearing], object], hearing: Hearing | None = None) -> Hearing:
    hearing = hearing or Hearing()
    work(hearing)
    return hearing


def kinds(repo: zm.Repository, *names: str) -> int:
    """How many objects of these kinds there are."""
    return sum(info.key.partition("/")[0] in names for info in repo.storage.list())


METADATA = ("deltas", "digests", "history", "indexes", "manifests", "nodes", "snapshots")


def test_a_count_is_told_of_each_item_and_of_none_at_the_start() -> None:
    hearing = Hearing()
    assert [*counted(hearing, "looking", ["a", "b"])] == ["a", "b"]
    assert (hearing.told, hearing.totals) == (
        [("looking", 0), ("looking", 1), ("looking", 2)],
        {"looking": 2},
    )
    assert [*counted(hearing, "listing", iter("abc"))] == ["a", "b", "c"]
    assert hearing.done["listing"] == 3
    assert "listing" not in hearing.totals
    expect(ignore, "looking", 3)  # a plain function is told no total


def test_verify_tells_of_every_object_and_of_how_many(repo: zm.Repository) -> None:
    report = None

    def verify(hearing: Hearing) -> None:
        nonlocal report
        report = repo.verify(progress=hearing)

    hearing = heard(verify)
    assert report is not None
    snapshots, archives = COMMITS + 2, kinds(repo, "root")
    due = {
        "reading archives": archives,
        "following the history": snapshots,
        "reading metadata": kinds(repo, *METADATA),
        "checking snapshots": snapshots,
        "counting chunks": snapshots,
        "reading pages of archives": archives,
        "reading chunks": report.chunk_objects,
    }
    assert hearing.done == hearing.totals == due
    assert hearing.runs["following the history"] == [snapshots, snapshots - 10, snapshots]


def test_a_collection_tells_how_far_it_is(repo: zm.Repository) -> None:
    hearing = heard(lambda told: repo.expire_snapshots(keep_last=30, progress=told))
    # Of both branches, first to find out and then within the swap.
    lengths = [COMMITS + 2, COMMITS - 8]
    assert sorted(hearing.runs["following the history"]) == sorted(2 * lengths)
    first = heard(lambda told: repo.garbage_collect(timedelta(0), progress=told))
    assert first.runs["following the history"] == [30, 30]
    assert first.totals["following the history"] == 30
    assert first.done["marking"] == first.totals["marking"] == kinds(repo, *METADATA)
    # Everything is listed once, and only that tells how much there is.
    assert "looking at objects" not in first.totals
    assert first.done["looking at objects"] > first.done["marking"]
    assert first.done["deleting"] == first.totals["deleting"] > 0
    # A later collection follows what has expired since.
    repo.expire_snapshots(keep_last=10)
    later = heard(lambda told: repo.garbage_collect(timedelta(0), progress=told))
    assert later.runs["following what has expired"] == [20, 20]
    stage = "looking at objects that have expired"
    assert later.done[stage] == later.totals[stage] >= later.totals["deleting"] / 2 > 0


def test_an_expiry_that_keeps_everything_tells_of_all(repo: zm.Repository) -> None:
    hearing = heard(lambda told: repo.expire_snapshots(keep_last=10**6, progress=told))
    assert hearing.runs["following the history"] == [COMMITS + 2, COMMITS - 8]


def test_a_clone_tells_of_every_object(repo: zm.Repository) -> None:
    place = MemoryStorage()
    hearing = heard(lambda told: repo.clone(place, progress=told))
    metadata, chunks = kinds(repo, *METADATA), kinds(repo, "chunks")
    assert hearing.done["metadata"] == hearing.totals["metadata"] == metadata
    assert hearing.done["chunks"] == hearing.totals["chunks"] == chunks == COMMITS
    assert {COMMITS + 2, COMMITS - 8} <= {*hearing.runs["following the history"]}
    with repo.transaction(message="one more") as store:
        zarr.open_array(store, path="t")[:2] = 7
    again = heard(lambda told: repo.clone(place, progress=told))
    assert again.done["looking at the clone"] == again.totals["looking at the clone"] > COMMITS
    assert again.runs["looking at what is there"] == [metadata, chunks]
    assert again.done["chunks"] == again.totals["chunks"] == 1


def test_a_recovery_tells_how_far_it_is(repo: zm.Repository) -> None:
    archives = sorted(info.key for info in repo.storage.list("root/"))
    repo.storage.delete_many(["current", archives[-1]])
    metadata = kinds(repo, *METADATA)
    hearing = heard(lambda told: zm.Repository.recover(repo.storage, dry_run=True, progress=told))
    assert hearing.totals["trying archives"] == len(archives) - 1
    # Pages of history only repeat what snapshots say, and are not needed.
    assert hearing.done["reading metadata"] == hearing.totals["reading metadata"]
    assert 0 <= metadata - hearing.done["reading metadata"] <= kinds(repo, "history")
    assert hearing.done["checking snapshots"] == hearing.totals["checking snapshots"] == COMMITS + 2
    assert hearing.done["looking for chunks"] == COMMITS
    repo.storage.delete_many([next(repo.storage.list("snapshots/")).key])
    tried = Hearing()
    with pytest.raises(zm.errors.CorruptObjectError):
        zm.Repository.recover(repo.storage, dry_run=True, progress=tried)
    assert tried.done["trying archives"] == tried.totals["trying archives"] == len(archives) - 1


def test_a_plan_and_a_compaction_tell_of_all_refs(repo: zm.Repository) -> None:
    plan = heard(lambda told: repo.plan_manifests({}, progress=told))
    assert plan.done == plan.totals == {"merging refs": COMMITS}
    compaction = heard(lambda told: repo.compact(mode="full", progress=told))
    assert compaction.done == compaction.totals == plan.totals
    with repo.transaction(message="again") as store:
        zarr.open_array(store, path="t")[:20] = 7
    # Until they are merged, refs that replace others count, too.
    totals: list[int] = []

    class Told(Hearing):
        def expect(self, stage: str, total: int) -> None:
            totals.append(total)
            super().expect(stage, total)

    hearing = heard(lambda told: repo.compact(mode="full", progress=told), Told())
    assert totals == [COMMITS + 10, COMMITS]
    assert hearing.done == hearing.totals == {"merging refs": COMMITS}
