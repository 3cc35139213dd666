"""Walks through long histories of a storage that is far away: what is asked for, and believed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from inside import context_of, root_of
from zarr_manifests import Repository
from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.history.ancestry import ancestors
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.ids import snapshot_id_of, snapshot_key
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import CountingStorage, LatencyStorage, copy_of

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
    repository = zm.create(storage)
    for i in range(COMMITS):
        commit(repository, str(i))
    return Seeded(storage, [info.snapshot_id for info in repository.ancestry()])


def far_away(storage: MemoryStorage) -> CountingStorage:
    return CountingStorage(LatencyStorage(storage, latency_s=0))


def read_keys(storage: CountingStorage) -> list[str]:
    return [record.key for record in storage.log if record.op == "get"]


def walked(repository: Repository, branch: str = "main") -> Iterator[str]:
    """The ids of a branch's history, from the snapshots themselves."""
    tip = root_of(repository).branches[branch]
    for ref, _ in ancestors(context_of(repository), tip.head, tip.floor):
        yield snapshot_id_of(ref.key)


def test_a_long_history_takes_few_rounds_and_hardly_anything_in_vain(seeded: Seeded) -> None:
    storage = far_away(seeded.storage)
    repository = zm.open(storage)
    storage.reset()
    assert [*walked(repository)] == seeded.history
    assert storage.rounds() <= 16
    keys = read_keys(storage)
    assert len(keys) == len(set(keys)) <= len(seeded.history) + 20  # pages of history


def test_on_this_machine_nothing_is_fetched_ahead(seeded: Seeded) -> None:
    storage = CountingStorage(seeded.storage)
    repository = zm.open(storage)
    storage.reset()
    walk = walked(repository)
    for _ in range(20):
        next(walk)
    assert {record.op for record in storage.log} == {"get", "get_tagged"}
    assert len(read_keys(storage)) < 20


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_the_newest_few_are_fetched_alone(seeded: Seeded, wanted: int) -> None:
    storage = far_away(seeded.storage)
    walk = walked(zm.open(storage))
    storage.reset()
    assert [next(walk) for _ in range(wanted)] == seeded.history[:wanted]
    assert len(read_keys(storage)) == wanted - 1  # the root carries the first


@pytest.mark.parametrize("wanted", [4, 10, 50, 200])
def test_at_most_twice_as_many_are_fetched_as_were_needed(seeded: Seeded, wanted: int) -> None:
    storage = far_away(seeded.storage)
    walk = walked(zm.open(storage))
    storage.reset()
    for _ in range(wanted):
        next(walk)
    snapshots = [key for key in read_keys(storage) if key.startswith("snapshots/")]
    assert len(snapshots) <= 2 * wanted + 4


def test_expiry_takes_few_rounds_too(seeded: Seeded) -> None:
    copy = copy_of(seeded.storage)
    storage = far_away(copy)
    repository = zm.open(storage)
    storage.reset()
    report = repository.expire_snapshots(keep_last=5)
    assert len(report.snapshots) == len(seeded.history) - 5
    assert storage.rounds() <= 24
    collected = repository.garbage_collect(timedelta(0))
    assert collected.kept > 0
    assert [i.snapshot_id for i in zm.open(copy).ancestry()] == seeded.history[:5]


def test_what_is_on_this_disk_is_not_asked_for_again(seeded: Seeded, tmp_path: Path) -> None:
    options = CacheOptions(directory=str(tmp_path / "cache"))
    storage = far_away(seeded.storage)
    assert len([*walked(zm.open(storage, cache=options))]) == len(seeded.history)
    again = zm.open(storage, cache=options)
    storage.reset()
    assert [*walked(again)] == seeded.history
    assert read_keys(storage) == []
    assert storage.requests == 1  # the root


# --- what a history says is only a hint ----------------------------------------------------------


def test_a_damaged_or_missing_snapshot_is_told_and_only_when_it_is_due(seeded: Seeded) -> None:
    at = 100
    key = snapshot_key(seeded.history[at])
    damaged, missing = copy_of(seeded.storage), copy_of(seeded.storage)
    sound = damaged.get(key)
    damaged.put(key, sound[:-1] + bytes([sound[-1] ^ 1]))
    missing.delete_many([key])
    for storage in damaged, missing:
        walk = walked(zm.open(far_away(storage)))
        assert [next(walk) for _ in range(at)] == seeded.history[:at]
        with pytest.raises(CorruptObjectError, match=key):
            next(walk)


@pytest.mark.parametrize("kind", ["missing", "damaged"])
def test_without_its_pages_history_is_walked_all_the_same(seeded: Seeded, kind: str) -> None:
    storage = copy_of(seeded.storage)
    for info in [*storage.list("history/")]:
        if kind == "missing":
            storage.delete_many([info.key])
        else:
            storage.put(info.key, storage.get(info.key)[:-1])
    assert [*walked(zm.open(far_away(storage)))] == seeded.history


def test_a_branch_is_followed_to_where_it_began_long_ago(seeded: Seeded) -> None:
    storage = copy_of(seeded.storage)
    repository = zm.open(storage, QUIET)
    repository.create_branch("old", seeded.history[200])
    mine = [commit(repository, str(i), "old") for i in range(20)]
    far = far_away(storage)
    repository = zm.open(far)
    far.reset()
    found = [*walked(repository, "old")]
    assert found == mine[::-1] + seeded.history[200:]
    assert far.rounds() <= 24
    assert len(read_keys(far)) <= len(found) + 10


def test_a_branch_beside_a_busy_one_is_not_held_up() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, QUIET)
    repository.create_branch("slow")
    for i in range(24):
        commit(repository, f"slow {i}", "slow")
        for j in range(8):
            commit(repository, f"busy {i} {j}")
    expected = [info.snapshot_id for info in repository.ancestry("slow")]
    far = far_away(storage)
    repository = zm.open(far)
    far.reset()
    assert [*walked(repository, "slow")] == expected
    assert len(read_keys(far)) <= len(expected)
    assert far.rounds() <= 8


@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=40))
@settings(max_examples=examples(30))
def test_far_away_or_not_history_is_the_same(steps: list[tuple[int, int]]) -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, QUIET)
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
        near = [*walked(zm.open(storage), branch)]
        assert [*walked(zm.open(far_away(storage)), branch)] == near
