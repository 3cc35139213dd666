"""`clean` frees what only old versions need, and says what is still held, by what."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.repository import resolved

CHUNK = 10_000
"""Bytes of a chunk, which gets an object of its own."""
NOW = timedelta(0)
CONFIG = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    """An array of four chunks, all of which five commits have overwritten."""
    made = zm.create(tmp_path / "r", CONFIG)
    with made.transaction(message="make") as store:
        zarr.create_array(
            store, name="a", shape=(4, CHUNK), chunks=(1, CHUNK), dtype="u1", compressors=None
        )[:] = 1
    for number in range(2, 7):
        put(made, number)
    return made


def put(repo: zm.Repository, number: int) -> None:
    with repo.transaction(message=f"all of them are {number}") as store:
        zarr.open_array(store, path="a")[:] = number


def chunks(repo: zm.Repository) -> int:
    """How many objects have chunks."""
    return sum(1 for _ in repo.storage.list("chunks/"))


def values(repo: zm.Repository, version: str) -> list[int]:
    found = zarr.open_array(repo.readonly_session(version).store, path="a")[:]
    return np.unique(np.asarray(found)).tolist()


def test_overwritten_chunks_go_in_one_call(repo: zm.Repository) -> None:
    assert chunks(repo) == 24
    report = repo.clean(keep=1, grace=NOW)
    assert chunks(repo) == 4
    assert values(repo, "main") == [6]
    assert report.compacted == ("main",)
    assert len(report.expiry.snapshots) == 7  # one is the compaction's own parent
    assert report.collection.objects["chunks"] == 20
    assert repo.verify().ok
    head = resolved(repo, "main")
    again = repo.clean(keep=1, grace=NOW)
    assert (again.compacted, again.collection.deleted, resolved(repo, "main")) == ((), 0, head)
    assert "reaches everything" in str(again)


def test_chunks_that_were_deleted_go_too(repo: zm.Repository) -> None:
    with repo.transaction(message="shorter") as store:
        zarr.open_array(store, path="a").resize((1, CHUNK))
    repo.clean(keep=1, grace=NOW)
    assert chunks(repo) == 1


def test_chunks_of_arrays_that_were_written_anew_go_too(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "r", CONFIG)
    for number in (6, 7, 8):
        with repo.transaction(message="an array at the place of the one before") as store:
            made = zarr.create_array(
                store, name="a", shape=(CHUNK,), dtype="u1", compressors=None, overwrite=True
            )
            made[:] = number
    report = repo.clean(keep=1, grace=NOW)
    assert (chunks(repo), report.compacted) == (1, ("main",))
    assert values(repo, "main") == [8]
    assert repo.clean(keep=1, grace=NOW).compacted == ()


def test_kept_versions_stay_as_they_were(repo: zm.Repository) -> None:
    repo.clean(keep=3, grace=NOW)
    kept = [info.snapshot_id for info in repo.ancestry()]
    assert [values(repo, each) for each in kept] == [[6], [6], [5], [4]]  # one is a compaction
    for number in (7, 8, 9):
        put(repo, number)
    repo.clean(keep=3, grace=NOW)
    assert chunks(repo) <= 4 * 4
    assert repo.verify().ok


def test_what_was_only_appended_is_not_compacted(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "r", CONFIG)
    with repo.transaction(message="make") as store:
        zarr.create_array(store, name="a", shape=(0,), chunks=(10,), dtype="u1")
    for _ in "123":
        with repo.transaction(message="more") as store:
            zarr.open_array(store, path="a").append(np.ones(10, "u1"))
    head = resolved(repo, "main")
    assert repo.clean(keep=1, grace=NOW).compacted == ()
    assert resolved(repo, "main") == head


def test_small_chunks_are_taken_out_of_packs(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "r", {"inline-chunk-bytes": 0})
    with repo.transaction(message="many in a pack") as store:
        zarr.create_array(
            store, name="a", shape=(40, 1000), chunks=(1, 1000), dtype="u1", compressors=None
        )[:] = 1
    with repo.transaction(message="most of them anew") as store:
        zarr.open_array(store, path="a")[:36] = 2
    before = sum(info.nbytes for info in repo.storage.list("chunks/"))
    repo.clean(keep=1, grace=NOW)
    after = sum(info.nbytes for info in repo.storage.list("chunks/"))
    assert (before, after) == (76_000, 40_000)
    assert values(repo, "main") == [1, 2]


def test_it_says_what_a_tag_and_a_lease_keep(repo: zm.Repository) -> None:
    repo.create_tag("v1", "main~2")
    with repo.lease(resolved(repo, "main~1"), timeout=timedelta(hours=1)):
        report = repo.clean(keep=1, grace=NOW)
        found = report.collection
        lease = next(name for name in found.held_by if name.startswith("lease of "))
        assert f"{lease} keeps its snapshot and all newer ones until" in str(report)
        assert report.expiry.kept["main"] > 1
        until = found.held_by[lease]
        assert until is not None
        assert timedelta(minutes=50) < until - datetime.now(UTC) < timedelta(hours=1)
        assert found.held_by["tag 'v1'"] is None
    found = repo.clean(keep=1, grace=NOW).collection
    assert list(found.held_by) == ["tag 'v1'"]
    assert found.held_nbytes == 16 * CHUNK  # its deltas overwrite one another
    assert "160 kB of chunks are only kept for tag 'v1'" in str(found)
    repo.delete_tag("v1")
    assert repo.clean(keep=1, grace=NOW).collection.held_by == {}
    assert chunks(repo) == 4


def test_it_says_what_waits_for_the_grace(repo: zm.Repository) -> None:
    report = repo.clean(keep=1)
    found = report.collection
    assert (found.deleted, found.objects) == (0, {})
    assert found.waiting_nbytes >= 20 * CHUNK
    assert found.waiting_until is not None
    due = found.waiting_until - datetime.now(UTC)
    assert timedelta(hours=23) < due <= timedelta(hours=24)
    assert f"{found.waiting} objects" in str(report)
    assert "grace" in str(report)
    assert repo.garbage_collect(dry_run=True).waiting == found.waiting


def test_a_dry_run_changes_nothing(repo: zm.Repository) -> None:
    before = {info.key for info in repo.storage.list("")}
    report = repo.clean(keep=1, grace=NOW, dry_run=True)
    assert {info.key for info in repo.storage.list("")} == before
    assert report.compacted == ("main",)
    assert str(report).startswith("would expire 6 snapshots\nwould compact main\nwould delete")


def test_what_to_keep(repo: zm.Repository) -> None:
    assert repo.clean(keep=timedelta(days=1)).expiry.snapshots == ()
    with pytest.raises(InvalidArgumentError, match="what to keep"):
        repo.clean()
    repo.save_config({"snapshots": {"keep-last": 2}})
    assert repo.clean().expiry.kept == {"main": 3}  # two versions, and the compaction
