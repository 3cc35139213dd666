"""Exclusive writers, compactors and collectors: who is overtaken is refused, and leaves garbage."""

from __future__ import annotations

from functools import partial

import pytest

import zarr_manifests as zm
from filled import NOW, fill, make, opened, read, write
from storages import InterruptingStorage
from zarr_manifests.errors import ConflictError, FencedError
from zarr_manifests.storage.memory import MemoryStorage

# --- writers -------------------------------------------------------------------------------------


def test_an_older_epoch_cannot_commit_and_what_it_wrote_is_garbage() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    live = {info.key for info in storage.list("chunks/")}
    plain = write(repository.writable_session(), 7, slice(0, 2))
    zombie = write(opened(storage).writable_session(exclusive=True), 8, slice(2, 4))
    with pytest.raises(FencedError, match="claimed"):
        plain.commit("from before the first claim")
    claimed = opened(storage).writable_session(exclusive=True)
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
    assert read(opened(storage)) == [1, 1, 1, 1, 9, 9, 10, 10]
    assert repository.verify().ok


def test_no_epoch_comes_twice_when_a_branch_is_made_again() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    repository.create_branch("side")
    zombie = write(opened(storage).writable_session("side", exclusive=True), 5)
    version = next(repository.ops_log()).version
    opened(storage).writable_session("side", exclusive=True)
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


# --- compactors ----------------------------------------------------------------------------------


# --- collectors ----------------------------------------------------------------------------------


def test_a_collector_that_another_has_overtaken_stops() -> None:
    """It deletes nothing more but what it was about to, and does not say that it is done."""
    stopped = []
    for number in range(1, 200, 3):
        storage = MemoryStorage()
        repository = make(storage)
        for value in range(4):
            fill(repository, value)
        write(opened(storage).writable_session(), 77)  # chunks that are never committed
        opened(storage).expire_snapshots(keep_last=1)
        racing = InterruptingStorage(storage, partial(opened(storage).garbage_collect, NOW))
        zombie = opened(racing)
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
        assert read(opened(storage)) == [3] * 8
        assert opened(storage).verify().problems == ()
        assert opened(storage).garbage_collect(NOW).objects.keys() <= {"root"}
    assert set(stopped) == {True, False}


@pytest.mark.parametrize("merges", [False, True])
def test_a_branch_that_is_moved_forward_stays_claimed(merges: bool) -> None:
    storage = MemoryStorage()
    repository = make(storage)
    repository.create_branch("side")
    write(repository.writable_session("side"), 2, slice(0, 2)).commit("on the side")
    before = write(repository.writable_session(), 3, slice(2, 4))
    exclusive = write(opened(storage).writable_session(exclusive=True), 4, slice(4, 6))
    if merges:
        assert repository.merge("side").fast_forward
    else:
        repository.reset_branch("main", "side")
    with pytest.raises(FencedError, match="claimed"):
        before.commit("from before the claim")
    exclusive.commit("the one with the claim")
    assert read(repository) == [2, 2, 1, 1, 4, 4, 1, 1]
