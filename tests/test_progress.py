"""What long work tells its `progress`: counts, and totals where these are cheap to know."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import zarr

import zarr_manifests as zm
from hearing import Hearing
from zarr_manifests.progress import counted, expect, ignore
from zarr_manifests.storage.memory import MemoryStorage

COMMITS = 70
"""More than are loaded at once."""


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    """An array that `COMMITS` commits have filled; a branch ends ten commits before."""
    options = {"inline-chunk-bytes": 0, "compaction": {"mode": "manual"}}
    repo = zm.create(tmp_path / "repository", options)
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


@pytest.mark.slow
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
    hearing = heard(lambda told: zm.clone(repo, place, progress=told))
    metadata, chunks = kinds(repo, *METADATA), kinds(repo, "chunks")
    assert hearing.done["metadata"] == hearing.totals["metadata"] == metadata
    assert hearing.done["chunks"] == hearing.totals["chunks"] == chunks == COMMITS
    assert {COMMITS + 2, COMMITS - 8} <= {*hearing.runs["following the history"]}
    with repo.transaction(message="one more") as store:
        zarr.open_array(store, path="t")[:2] = 7
    again = heard(lambda told: zm.clone(repo, place, progress=told))
    assert again.done["looking at the clone"] == again.totals["looking at the clone"] > COMMITS
    assert again.runs["looking at what is there"] == [metadata, chunks]
    assert again.done["chunks"] == again.totals["chunks"] == 1


@pytest.mark.slow
def test_a_recovery_tells_how_far_it_is(repo: zm.Repository) -> None:
    archives = sorted(info.key for info in repo.storage.list("root/"))
    repo.storage.delete_many(["current", archives[-1]])
    metadata = kinds(repo, *METADATA)
    hearing = heard(lambda told: zm.recover(repo.storage, dry_run=True, progress=told))
    assert hearing.totals["trying archives"] == len(archives) - 1
    # Pages of history only repeat what snapshots say, and are not needed.
    assert hearing.done["reading metadata"] == hearing.totals["reading metadata"]
    assert 0 <= metadata - hearing.done["reading metadata"] <= kinds(repo, "history")
    assert hearing.done["checking snapshots"] == hearing.totals["checking snapshots"] == COMMITS + 2
    assert hearing.done["looking for chunks"] == COMMITS
    repo.storage.delete_many([next(repo.storage.list("snapshots/")).key])
    tried = Hearing()
    with pytest.raises(zm.errors.CorruptObjectError):
        zm.recover(repo.storage, dry_run=True, progress=tried)
    assert tried.done["trying archives"] == tried.totals["trying archives"] == len(archives) - 1


def test_a_plan_and_a_compaction_tell_of_all_refs(repo: zm.Repository) -> None:
    plan = heard(lambda told: repo.explain_manifests(config={}, progress=told))
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


# --- bringing and taking data ----------------------------------------------------------------


def references(folder: Path, chunks: int) -> dict[str, Any]:
    """kerchunk references to an array of that many chunks, in one file."""
    (folder / "data").write_bytes(bytes(8 * chunks))
    array = {"zarr_format": 2, "shape": [2 * chunks], "chunks": [2], "dtype": "<i4", "order": "C",
             "compressor": None, "filters": None, "fill_value": 0}  # fmt: skip
    found: dict[str, Any] = {".zgroup": '{"zarr_format": 2}', "a/.zarray": json.dumps(array)}
    place = (folder / "data").as_uri()
    return found | {f"a/{at}": [place, 8 * at, 8] for at in range(chunks)}


def test_an_import_of_references_tells_of_references_and_chunks(
    repo: zm.Repository, tmp_path: Path
) -> None:
    repo = zm.open(repo.storage, virtual_containers={"here": tmp_path})
    given = references(tmp_path, 30)
    hearing = heard(lambda told: zm.virtual.import_kerchunk(repo, given, "/in", progress=told))
    assert hearing.done == hearing.totals == {"reading references": 32, "chunks": 30}


@pytest.mark.parametrize("copy", [False, True])
def test_an_import_of_a_zarr_store_tells_of_files_and_chunks(
    repo: zm.Repository, tmp_path: Path, copy: bool
) -> None:
    zm.export(repo.readonly_session(), tmp_path / "plain")
    files = sum(path.is_file() for path in (tmp_path / "plain").rglob("*"))
    target = zm.create(tmp_path / "target", virtual_containers={"plain": tmp_path / "plain"})
    hearing = heard(
        lambda told: zm.virtual.import_zarr(target, tmp_path / "plain", "/in", copy, progress=told)
    )
    assert hearing.done == {"looking for files": files, "chunks": COMMITS}
    assert hearing.totals == {"chunks": COMMITS}  # a folder says what it holds when it is listed


@pytest.mark.parametrize("name", ["zarr", "zip", "kerchunk"])
def test_an_export_tells_of_all_chunks(repo: zm.Repository, tmp_path: Path, name: Any) -> None:
    with repo.transaction(message="again, which leaves a bound") as store:
        zarr.open_array(store, path="t")[:20] = 7
    session = repo.readonly_session()
    copy = name != "kerchunk"
    hearing = heard(
        lambda told: zm.export(session, tmp_path / "out", name, copy, progress=told), Hearing()
    )
    assert hearing.done == hearing.totals == {"chunks": COMMITS}


def test_a_rewriting_tells_of_all_boxes(repo: zm.Repository) -> None:
    hearing = heard(
        lambda told: zm.rewrite_chunks(
            repo, "t", chunks=(10,), task_bytes=80, round_bytes=320, progress=told
        )
    )
    boxes = COMMITS // 10
    assert hearing.totals == {"rewriting chunks": boxes}
    assert hearing.told == [("rewriting chunks", done) for done in (0, 4, boxes)]


# --- looking ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["log", "net"])
def test_changes_tell_of_commits_followed_and_read(repo: zm.Repository, mode: Any) -> None:
    hearing = heard(lambda told: [*repo.changes("main~20", "main", mode, progress=told)])
    assert hearing.done == {"following the history": 20, "reading commits": 20}
    assert hearing.totals == hearing.done
    every = heard(lambda told: [*repo.changes(None, "trial", mode, progress=told)])
    assert every.done["following the history"] == every.totals["following the history"]
    assert every.done["reading commits"] == every.totals["reading commits"] == COMMITS - 8


def test_a_difference_of_values_tells_of_commits_and_chunks(repo: zm.Repository) -> None:
    hearing = heard(lambda told: repo.diff("trial", "main", "t", values=True, progress=told))
    assert hearing.done == hearing.totals == {"reading commits": 10, "comparing chunks": 10}
    with repo.transaction(message="make t anew") as store:
        zarr.create_array(
            store, name="t", shape=(6,), chunks=(2,), dtype="i4", overwrite=True, fill_value=5
        )
    anew = heard(lambda told: repo.diff("trial", "main", "t", values=True, progress=told))
    assert anew.done == anew.totals == {"comparing chunks": 3}


def test_usage_tells_of_every_array(repo: zm.Repository) -> None:
    with repo.transaction(message="more arrays") as store:
        for name in "abc":
            zarr.create_array(store, name=name, shape=(2,), chunks=(2,), dtype="i4")
    hearing = heard(lambda told: repo.du(progress=told))
    assert hearing.done == hearing.totals == {"reading refs of arrays": 4}
