"""Zone maps: whatever happens to chunks and to the objects of entries, one that counts is right."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import zarr

import zarr_manifests as zm
from in_order import in_order
from storages import CountingStorage, LatencyStorage, copy_of
from zarr_manifests import Repository
from zarr_manifests.storage.memory import MemoryStorage
from zoned import counting, created, grow, numbers, write


def wrote(repository: Repository, first: int, last: int, seed: float, **how: Any) -> None:
    session = repository.writable_session()
    write(session, first, last, seed, **how)
    session.commit(f"write {first} to {last}")


def indexes(storage: MemoryStorage) -> list[str]:
    return [info.key for info in storage.list("indexes/")]


@pytest.mark.parametrize(
    "config",
    [
        {"inline-chunk-bytes": 100},
        {"pack-chunk-bytes": 0},
        {"pack-bytes": 40},
        {"spill-refs": 4},
    ],
    ids=["inline", "native", "packs", "spilled"],
)
def test_a_commit_has_entries_of_the_chunks_it_wrote(config: dict[str, Any]) -> None:
    repository = created(**config)
    session = repository.writable_session()
    write(session, 0, 3, 1)
    write(session, 5, 8, 2)
    session.commit("write")
    assert numbers(counting(repository)) == [0, 1, 2, 5, 6, 7]
    wrote(repository, 2, 6, 3)
    assert numbers(counting(repository)) == [*range(8)]
    assert counting(repository)[2,] == (3008, 3011)


def test_runs_have_the_entries_that_still_count() -> None:
    repository = created(compaction={"mode": "manual", "fan-in": 2})
    for i in range(6):
        wrote(repository, i, i + 2, i)
    wrote(repository, 0, 1, 9, record=False)
    assert repository.compact(mode="minor").snapshot_id is not None
    assert numbers(counting(repository)) == [1, 2, 3, 4, 5, 6]
    assert repository.verify().problems == ()


def test_compaction_keeps_entries() -> None:
    repository = created()
    wrote(repository, 0, 8, 1)
    wrote(repository, 2, 4, 2)
    wrote(repository, 3, 4, 3, record=False)
    before = counting(repository)
    repository.compact(mode="full")
    assert counting(repository) == before
    assert numbers(before) == [0, 1, 2, 4, 5, 6, 7]
    assert repository.verify().problems == ()


def test_a_new_meaning_leaves_old_entries_behind() -> None:
    repository = created()
    wrote(repository, 0, 4, 1)
    repository.compact(mode="full")
    session = repository.writable_session()
    zarr.open_array(session.store, path="a").attrs["missing_value"] = 3
    session.commit("another meaning")
    wrote(repository, 4, 8, 2)
    repository.compact(mode="full")
    assert numbers(counting(repository)) == [4, 5, 6, 7]


@pytest.mark.parametrize("in_base", [False, True])
def test_repacked_chunks_keep_their_entries(in_base: bool) -> None:
    repository = created()
    wrote(repository, 0, 8, 1)
    if in_base:
        repository.compact(mode="full")
    wrote(repository, 0, 5, 2, record=False)
    assert repository.compact(mode="packs", min_live=0.9).chunks == 3
    assert numbers(counting(repository)) == [5, 6, 7]
    assert repository.verify().problems == ()


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_entries_that_cannot_be_read_are_as_if_absent(how: str) -> None:
    made = MemoryStorage()
    repository = created(made)
    wrote(repository, 0, 4, 1)
    repository.compact(mode="full")
    wrote(repository, 4, 8, 1)
    found = []
    for key in indexes(made):
        storage = copy_of(made)
        storage.delete_many([key])
        if how == "damaged":
            data = made.get(key)
            storage.put(key, data[:-1] + bytes([data[-1] ^ 1]))
        fresh = zm.open(storage, runtime=in_order())
        there = numbers(counting(fresh))
        found.append(len(there))
        assert key in {problem.key for problem in fresh.verify().problems}
        fresh.compact(mode="full")
        assert numbers(counting(fresh)) == there
        fresh.garbage_collect(timedelta(0))
        storage.put("current", b"damaged")
        zm.recover(storage)
        assert numbers(counting(zm.open(storage))) == there
    assert sorted(set(found)) == [4, 8]  # those that are hit are read, the others are not needed


def test_after_many_appends_entries_are_found_in_few_rounds() -> None:
    often = {"mode": "auto", "min-delta-count": 4, "max-delta-count": 12, "interval-commits": 8}
    repository = created(storage := MemoryStorage(), chunks=1, compaction=often)
    session = repository.writable_session()
    for seed in range(60):
        at = grow(session, 1)
        write(session, at, at + 1, seed)
        session.commit("append")
    counted = CountingStorage(LatencyStorage(storage, latency_s=0))
    reader = zm.open(counted).readonly_session()
    assert len(reader.chunk_refs("a", statistics=True)) == 60
    assert counted.rounds() <= 5
    assert numbers(counting(repository)) == [*range(1, 61)]
