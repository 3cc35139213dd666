"""Walks through long histories of a storage that is far away: what is asked for, and believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from zarr_manifests import Repository
from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.history.parallel_walk import older_than
from zarr_manifests.errors import CorruptObjectError, StorageError
from zarr_manifests.ids import snapshot_key
from zarr_manifests.storage import MemoryStorage, ObjectInfo
from zarr_manifests.testing import CountingStorage, LatencyStorage, WrappedStorage, copy_of

COMMITS = 300
QUIET = {"compaction": {"mode": "manual"}}


class Seeded(NamedTuple):
    storage: MemoryStorage
    history: list[str]


def commit(repository: Repository, message: str, branch: str = "main") -> str:
    session = repository.writable_session(branch)
    zarr.create_group(session.store, overwrite=True, attributes={"last": message})
    return session.commit(message)


@pytest.fixture(scope="module")
def seeded() -> Seeded:
    """A repository of one branch with many commits, and their ids, newest first."""
    storage = MemoryStorage()
    repository = Repository.create(storage)
    for i in range(COMMITS):
        commit(repository, str(i))
    return Seeded(storage, [info.snapshot_id for info in repository.ancestry()])


def far_away(storage: MemoryStorage) -> CountingStorage:
    return CountingStorage(LatencyStorage(storage, latency_s=0))


def read_keys(storage: CountingStorage) -> list[str]:
    return [record.key for record in storage.log if record.op == "get"]


def test_a_long_history_takes_few_rounds_and_hardly_anything_in_vain(seeded: Seeded) -> None:
    storage = far_away(seeded.storage)
    repository = Repository.open(storage)
    storage.reset()
    assert [info.snapshot_id for info in repository.ancestry()] == seeded.history
    assert storage.rounds() <= 16
    keys = read_keys(storage)
    assert len(keys) == len(set(keys)) <= len(seeded.history)


def test_on_this_machine_nothing_is_listed_or_fetched_ahead(seeded: Seeded) -> None:
    storage = CountingStorage(seeded.storage)
    repository = Repository.open(storage)
    storage.reset()
    walk = repository.ancestry()
    for _ in range(20):
        next(walk)
    assert {record.op for record in storage.log} == {"get", "get_tagged"}
    assert len(read_keys(storage)) < 20


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_the_newest_few_are_fetched_alone(seeded: Seeded, wanted: int) -> None:
    storage = far_away(seeded.storage)
    walk = Repository.open(storage).ancestry()
    storage.reset()
    found = [next(walk).snapshot_id for _ in range(wanted)]
    assert found == seeded.history[:wanted]
    assert storage.requests == wanted - 1  # the root carries the first


@pytest.mark.parametrize("wanted", [4, 10, 50, 200])
def test_at_most_twice_as_many_are_fetched_as_were_needed(seeded: Seeded, wanted: int) -> None:
    storage = far_away(seeded.storage)
    walk = Repository.open(storage).ancestry()
    storage.reset()
    for _ in range(wanted):
        next(walk)
    assert len(read_keys(storage)) <= 2 * wanted + 4


def test_expiry_and_time_travel_take_few_rounds_too(seeded: Seeded) -> None:
    copy = copy_of(seeded.storage)
    storage = far_away(copy)
    repository = Repository.open(storage)
    storage.reset()
    oldest = seeded.history[-1]
    created = next(i for i in Repository.open(copy).ancestry() if i.snapshot_id == oldest)
    session = repository.readonly_session(as_of=created.written_at)
    assert session.snapshot_id in seeded.history[-2:]  # others may be of the same millisecond
    assert storage.rounds() <= 20

    repository = Repository.open(storage)
    storage.reset()
    report = repository.expire_snapshots(keep_last=5)
    assert len(report.snapshots) == len(seeded.history) - 5
    assert storage.rounds() <= 24
    collected = repository.garbage_collect(timedelta(0))
    assert collected.kept > 0
    assert [i.snapshot_id for i in Repository.open(copy).ancestry()] == seeded.history[:5]


def test_what_is_on_this_disk_is_not_asked_for_again(seeded: Seeded, tmp_path: Path) -> None:
    options = CacheOptions(directory=str(tmp_path / "cache"))
    storage = far_away(seeded.storage)
    assert len(list(Repository.open(storage, cache=options).ancestry())) == len(seeded.history)
    again = Repository.open(storage, cache=options)
    storage.reset()
    assert [info.snapshot_id for info in again.ancestry()] == seeded.history
    assert read_keys(storage) == []
    assert storage.requests == 1  # the root


def test_few_listings_find_what_is_far_apart() -> None:
    storage = CountingStorage(MemoryStorage())
    keys = [snapshot_key(f"{version:012d}-{'ab' * 12}-1") for version in (0, 7, 10**6, 10**9)]
    for key in keys:
        storage.create(key, b"")
    storage.reset()
    assert list(older_than(storage, keys[-1])) == keys[-2::-1]
    assert storage.requests <= 24


# --- guesses are only guesses ------------------------------------------------------------------


class NoListing(WrappedStorage):
    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        raise StorageError("listing is not allowed here")
        yield


def test_where_nothing_can_be_listed_history_is_read_one_by_one(seeded: Seeded) -> None:
    storage = CountingStorage(NoListing(LatencyStorage(seeded.storage, latency_s=0)))
    walk = Repository.open(storage).ancestry()
    assert [next(walk).snapshot_id for _ in range(40)] == seeded.history[:40]


def test_a_damaged_or_missing_snapshot_is_told_and_only_when_it_is_due(seeded: Seeded) -> None:
    at = 100
    key = snapshot_key(seeded.history[at])
    damaged, missing = copy_of(seeded.storage), copy_of(seeded.storage)
    sound = damaged.get(key)
    damaged.put(key, sound[:-1] + bytes([sound[-1] ^ 1]))
    missing.delete_many([key])
    for storage in damaged, missing:
        walk = Repository.open(far_away(storage)).ancestry()
        assert [next(walk).snapshot_id for _ in range(at)] == seeded.history[:at]
        with pytest.raises(CorruptObjectError, match=key):
            next(walk)


def test_what_another_writer_left_is_not_taken_for_history(seeded: Seeded) -> None:
    storage = copy_of(seeded.storage)
    repository = Repository.open(storage, QUIET)
    for i in range(30):  # what a lost try leaves: a snapshot that nothing points to
        key = snapshot_key(seeded.history[20 + i])
        storage.create(f"{key}9", storage.get(key))
    assert len(list(repository.ancestry())) == len(seeded.history)
    far = far_away(storage)
    assert [i.snapshot_id for i in Repository.open(far).ancestry()] == seeded.history
    assert far.rounds() <= 24


class Large(WrappedStorage):
    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        for info in super().list(prefix, after):
            yield replace(info, nbytes=info.nbytes + (1 << 30))


def test_nothing_large_is_fetched_for_a_guess(seeded: Seeded) -> None:
    storage = CountingStorage(Large(LatencyStorage(seeded.storage, latency_s=0)))
    walk = Repository.open(storage).ancestry()
    storage.reset()
    assert [next(walk).snapshot_id for _ in range(40)] == seeded.history[:40]
    assert len(read_keys(storage)) == 39


def test_a_branch_is_followed_to_where_it_began_long_ago(seeded: Seeded) -> None:
    storage = copy_of(seeded.storage)
    repository = Repository.open(storage, QUIET)
    repository.create_branch("old", seeded.history[200])
    mine = [commit(repository, str(i), "old") for i in range(20)]
    far = far_away(storage)
    repository = Repository.open(far)
    far.reset()
    found = [info.snapshot_id for info in repository.ancestry("old")]
    assert found == mine[::-1] + seeded.history[200:]
    assert far.rounds() <= 24
    assert len(read_keys(far)) <= 1.3 * len(found)


def test_guesses_begin_again_where_they_may_be_of_use(seeded: Seeded) -> None:
    storage = copy_of(seeded.storage)
    repository = Repository.open(storage, QUIET)
    repository.create_branch("slow")
    for i in range(10):
        commit(repository, f"slow {i}", "slow")
        for j in range(8):
            commit(repository, f"busy {i} {j}")
    far = far_away(storage)
    repository = Repository.open(far)
    far.reset()
    found = [info.snapshot_id for info in repository.ancestry("slow")]
    assert found[10:] == seeded.history
    assert far.rounds() <= 50


def test_guesses_end_where_they_are_of_no_use() -> None:
    """A short branch beside a busy one: what is listed is nearly all the other one's."""
    storage = MemoryStorage()
    repository = Repository.create(storage, QUIET)
    repository.create_branch("slow")
    for i in range(24):
        commit(repository, f"slow {i}", "slow")
        for j in range(8):
            commit(repository, f"busy {i} {j}")
    expected = [info.snapshot_id for info in repository.ancestry("slow")]
    far = far_away(storage)
    repository = Repository.open(far)
    far.reset()
    assert [info.snapshot_id for info in repository.ancestry("slow")] == expected
    assert len(read_keys(far)) <= 1.5 * len(expected)


@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=40))
@settings(max_examples=30)
def test_far_away_or_not_history_is_the_same(steps: list[tuple[int, int]]) -> None:
    storage = MemoryStorage()
    repository = Repository.create(storage, QUIET)
    branches = ["main"]
    for at, what in steps:
        branch = branches[at % len(branches)]
        heads = repository.list_branches()
        match what:
            case 0:
                branches.append(f"b{len(branches)}")
                repository.create_branch(branches[-1], heads[branch])
            case 1:
                repository.reset_branch(branch, heads["main"], force=True)
            case _:
                for i in range(5):
                    commit(repository, str(i), branch)
    for branch in branches:
        near = [info.snapshot_id for info in Repository.open(storage).ancestry(branch)]
        far = Repository.open(far_away(storage)).ancestry(branch)
        assert [info.snapshot_id for info in far] == near
