"""Exclusive writers, compactors and collectors: who is overtaken is refused, and leaves garbage."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from in_order import in_order
from storages import InterruptingStorage
from zarr_manifests import Repository, Session
from zarr_manifests.error_cases import FencedError
from zarr_manifests.errors import ConflictError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage

NOW = timedelta(0)
CONFIG = {
    "inline-chunk-bytes": 0,
    "pack-chunk-bytes": 0,
    "compaction": {"mode": "manual", "fan-in": 2},
}


def make(storage: Storage) -> Repository:
    repository = zm.create(storage, CONFIG, runtime=in_order())
    with repository.transaction(message="make a") as store:
        array = zarr.create_array(store, name="a", shape=(8,), chunks=(2,), dtype="i4")
        array[:] = 1
    return repository


def write(session: Session, value: int, where: slice = slice(None)) -> Session:
    zarr.open_array(session.store, path="a")[where] = value
    return session


def read(repository: Repository, branch: str = "main") -> list[int]:
    session = repository.readonly_session(branch)
    return np.asarray(zarr.open_array(session.store, path="a", mode="r")[:]).tolist()


def others(storage: Storage) -> Repository:
    return zm.open(storage, runtime=in_order())


def claim(storage: Storage) -> None:
    others(storage).writable_session(exclusive=True)


def compact_all(storage: Storage) -> None:
    others(storage).compact(mode="full")


# --- writers -------------------------------------------------------------------------------------


def test_an_older_epoch_cannot_commit_and_what_it_wrote_is_garbage() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    live = {info.key for info in storage.list("chunks/")}
    plain = write(repository.writable_session(), 7, slice(0, 2))
    zombie = write(others(storage).writable_session(exclusive=True), 8, slice(2, 4))
    with pytest.raises(FencedError, match="claimed"):
        plain.commit("from before the first claim")
    claimed = others(storage).writable_session(exclusive=True)
    for attempt in range(2):  # refused again, not only once
        with pytest.raises(FencedError, match="claimed"):
            zombie.commit(f"from before the second claim {attempt}")
    write(claimed, 9, slice(4, 6)).commit("the one with the claim")
    write(claimed, 10, slice(6, 8)).commit("and on it goes")
    assert read(repository) == [1, 1, 1, 1, 9, 9, 10, 10]
    written = {info.key for info in storage.list("chunks/")} - live
    assert len(written) == 4  # two of the refused ones, too
    report = repository.garbage_collect(NOW)
    assert report.objects["chunks"] == 2
    assert read(others(storage)) == [1, 1, 1, 1, 9, 9, 10, 10]
    assert repository.verify().ok


def test_no_epoch_comes_twice_when_a_branch_is_made_again() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    repository.create_branch("side")
    zombie = write(others(storage).writable_session("side", exclusive=True), 5)
    version = next(repository.ops_log()).version
    others(storage).writable_session("side", exclusive=True)
    repository.delete_branch("side")
    repository.create_branch("side")
    with pytest.raises(FencedError, match="deleted and made again"):
        zombie.commit("onto a branch of the same name")
    zm.recover(repository, version)  # where the branch had the zombie's epoch
    with pytest.raises(FencedError):
        zombie.commit("after a restore")
    repository.delete_branch("side")
    with pytest.raises((ConflictError, FencedError)):
        zombie.commit("onto nothing")
    assert repository.verify().ok


def test_a_claim_at_any_moment_of_a_commit_refuses_it_whole() -> None:
    for number in range(1, 100):
        storage = MemoryStorage()
        make(storage)
        racing = InterruptingStorage(storage, partial(claim, storage))
        session = write(others(racing).writable_session(), 5)
        racing.arm(number)
        try:
            session.commit("beside a claim")
            landed = True
        except FencedError:
            landed = False
        assert read(others(storage)) == ([5] * 8 if landed else [1] * 8)
        assert landed == (len(racing.ops) < number)
        if landed:
            break
    assert 3 < number < 99


# --- compactors ----------------------------------------------------------------------------------


def with_deltas(storage: Storage) -> Repository:
    repository = make(storage)
    for value in range(4):
        write(repository.writable_session(), value).commit(f"fill {value}")
    return repository


def test_a_compactor_that_another_has_overtaken_is_refused() -> None:
    """At each of its calls; what it wrote is garbage, and the other's compaction stands."""
    outcomes = []
    for number in range(1, 200):
        storage = MemoryStorage()
        with_deltas(storage)
        racing = InterruptingStorage(storage, partial(compact_all, storage))
        zombie = others(racing)
        racing.arm(number)
        refused = False
        try:
            zombie.compact(mode="full")
        except FencedError:
            refused = True
        if len(racing.ops) < number:
            break
        outcomes.append(refused)
        assert read(others(storage)) == [3] * 8
        others(storage).expire_snapshots(keep_last=1)
        others(storage).garbage_collect(NOW)
        assert others(storage).verify().problems == ()
    assert set(outcomes) == {True, False}


# --- collectors ----------------------------------------------------------------------------------


def test_a_collector_that_another_has_overtaken_stops() -> None:
    """It deletes nothing more but what it was about to, and does not say that it is done."""
    stopped = []
    for number in range(1, 200, 3):
        storage = MemoryStorage()
        with_deltas(storage)
        write(others(storage).writable_session(), 77)  # chunks that are never committed
        others(storage).expire_snapshots(keep_last=1)
        racing = InterruptingStorage(storage, partial(others(storage).garbage_collect, NOW))
        zombie = others(racing)
        racing.arm(number)
        overtaken = False
        try:
            zombie.garbage_collect(NOW)
        except FencedError:
            overtaken = True
        if len(racing.ops) < number:
            break
        before, after = racing.ops[: number - 1], racing.ops[number:]
        assert overtaken == ("cas" in before)
        assert not overtaken or not {"delete_many", "cas"} & set(after)
        stopped.append(overtaken)
        assert read(others(storage)) == [3] * 8
        assert others(storage).verify().problems == ()
        assert others(storage).garbage_collect(NOW).objects.keys() <= {"root"}
    assert set(stopped) == {True, False}


@pytest.mark.parametrize("merges", [False, True])
def test_a_branch_that_is_moved_forward_stays_claimed(merges: bool) -> None:
    storage = MemoryStorage()
    repository = make(storage)
    repository.create_branch("side")
    write(repository.writable_session("side"), 2, slice(0, 2)).commit("on the side")
    before = write(repository.writable_session(), 3, slice(2, 4))
    exclusive = write(others(storage).writable_session(exclusive=True), 4, slice(4, 6))
    if merges:
        assert repository.merge("side").fast_forward
    else:
        repository.reset_branch("main", "side")
    with pytest.raises(FencedError, match="claimed"):
        before.commit("from before the claim")
    exclusive.commit("the one with the claim")
    assert read(repository) == [2, 2, 1, 1, 4, 4, 1, 1]
