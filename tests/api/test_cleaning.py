"""`clean` frees what only old versions need, and says what is still held, by what."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import StorageFullError
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


def test_kept_versions_stay_as_they_were(repo: zm.Repository) -> None:
    repo.clean(keep=3, grace=NOW)
    kept = [info.snapshot_id for info in repo.ancestry()]
    assert [values(repo, each) for each in kept] == [[6], [6], [5], [4]]  # one is a compaction
    for number in (7, 8, 9):
        put(repo, number)
    repo.clean(keep=3, grace=NOW)
    assert chunks(repo) <= 4 * 4
    assert repo.verify().ok


def test_it_says_what_a_tag_and_a_lease_keep(repo: zm.Repository) -> None:
    repo.create_tag("v1", "main~2")
    with repo.lease(resolved(repo, "main~1"), timeout=timedelta(hours=1)):
        found = repo.clean(keep=1, grace=NOW)
        lease = next(name for name in found.held_by if name.startswith("lease of "))
        assert f"{lease} keeps its snapshot and all newer ones until" in str(found)
        assert found.versions["main"] > 1
        assert found.held_by[lease] is not None
        assert found.held_by["tag 'v1'"] is None
    found = repo.clean(keep=1, grace=NOW)
    assert list(found.held_by) == ["tag 'v1'"]
    repo.delete_tag("v1")
    assert repo.clean(keep=1, grace=NOW).held_by == {}
    assert chunks(repo) == 4


def test_a_dry_run_changes_nothing(repo: zm.Repository) -> None:
    before = {info.key for info in repo.storage.list("")}
    report = repo.clean(keep=1, grace=NOW, dry_run=True)
    assert {info.key for info in repo.storage.list("")} == before
    assert report.compacted == ("main",)
    assert str(report).startswith(
        "would expire 6 snapshots\n  main: 6 to expire, 1 kept\nwould compact main\nwould delete"
    )


def test_chunks_of_a_deleted_array_are_freed(repo: zm.Repository) -> None:
    repo.clean(keep=1, grace=NOW)
    with repo.transaction(message="delete it") as store:
        del zarr.open_group(store)["a"]
    with repo.transaction(message="go on") as store:
        zarr.create_array(store, name="b", shape=(1,), dtype="u1")[:] = 1
    assert chunks(repo) == 5
    repo.clean(keep=1, grace=NOW)
    assert chunks(repo) == 1


def test_a_branch_that_is_deleted_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    repo, collect = _overwritten("deleted"), import_module("zarr_manifests.engine.upkeep.collect")
    repo.create_branch("tmp")
    repack = collect.repack_chunks

    def late(context: Any, name: str, *rest: Any, **more: Any) -> Any:
        if name == "tmp":
            repo.delete_branch("tmp")
        return repack(context, name, *rest, **more)

    monkeypatch.setattr(collect, "repack_chunks", late)
    assert repo.clean(keep=1).compacted == ("main",)


def test_a_full_disk_is_cleaned_without_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise StorageFullError("no space")

    repo = _overwritten("full")
    monkeypatch.setattr("zarr_manifests.engine.upkeep.collect.repack_chunks", full)
    report = repo.clean(keep=1, grace=timedelta(0))
    assert (report.compacted, len(report.snapshots)) == ((), 4)
    assert report.deleted > 0


def _overwritten(name: str) -> zm.Repository:
    repo = zm.create(f"memory://overwritten-{name}")
    with repo.transaction(message="a") as store:
        zarr.create_array(store, name="a", shape=(4,), chunks=(1,), dtype="i4")[:] = 1
    for number in range(3):
        with repo.transaction(message=f"{number}") as store:
            zarr.open_array(store, path="a")[:] = number + 2
    return repo
