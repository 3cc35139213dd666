"""Exclusive writers, compactors and collectors: who is overtaken is refused, and leaves garbage."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import context_of, root_of
from zarr_manifests import Repository, Session
from zarr_manifests.engine.compact.compaction import compact_branch
from zarr_manifests.engine.root.epochs import claim_compaction
from zarr_manifests.error_cases import FencedError
from zarr_manifests.errors import ConflictError, NotFoundError
from zarr_manifests.planning.upkeep.compaction_triggers import CompactionMode
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import InterruptingStorage, in_order

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
    assert root_of(storage).branches["main"].epoch == root_of(storage).version
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


def test_a_claim_leaves_other_branches_alone_and_later_sessions_may_commit() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    repository.create_branch("side")
    side = write(repository.writable_session("side"), 5)
    exclusive = write(repository.writable_session(exclusive=True), 2, slice(0, 2))
    side.commit("of another branch")
    write(repository.writable_session(), 3, slice(2, 4)).commit("opened after the claim")
    exclusive.commit("put on top of that one")
    assert read(repository) == [2, 2, 3, 3, 1, 1, 1, 1]
    assert next(iter(repository.ops_log())).ref == "main"
    assert "claim branch" in {one.operation for one in repository.ops_log()}
    with pytest.raises(NotFoundError):
        repository.writable_session("absent", exclusive=True)


def test_a_session_that_is_overtaken_cannot_come_back_by_starting_anew() -> None:
    storage = MemoryStorage()
    make(storage)
    zombie = others(storage).writable_session(exclusive=True, lease=60)
    others(storage).writable_session(exclusive=True)
    zombie.discard_changes()
    write(others(storage).writable_session(), 4, slice(0, 2)).commit("someone else")
    zombie.rebase()
    write(zombie, 5)
    with pytest.raises(FencedError, match="claimed"):
        zombie.commit("with a new start and a lease")


def test_no_epoch_comes_twice_when_a_branch_is_made_again() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    repository.create_branch("side")
    zombie = write(others(storage).writable_session("side", exclusive=True), 5)
    version = root_of(storage).version
    others(storage).writable_session("side", exclusive=True)
    repository.delete_branch("side")
    repository.create_branch("side")
    with pytest.raises(FencedError, match="deleted and made again"):
        zombie.commit("onto a branch of the same name")
    zm.recover(repository, version)  # where the branch had the zombie's epoch
    assert root_of(storage).branches["side"].epoch == root_of(storage).version
    with pytest.raises(FencedError):
        zombie.commit("after a restore")
    repository.delete_branch("side")
    with pytest.raises((ConflictError, FencedError)):
        zombie.commit("onto nothing")
    assert repository.verify().ok


def interrupted(number: int, action: str) -> tuple[InterruptingStorage, Session]:
    """A session about to commit, and the storage that makes a claim before the call of a number."""
    storage = MemoryStorage()
    make(storage)

    def claim() -> None:
        if action == "writer":
            others(storage).writable_session(exclusive=True)
        else:
            claim_compaction(context_of(others(storage)).roots)

    racing = InterruptingStorage(storage, claim)
    session = write(others(racing).writable_session(), 5)
    racing.arm(number)
    return racing, session


def test_a_claim_at_any_moment_of_a_commit_comes_before_it_or_after_it() -> None:
    outcomes = []
    for number in range(1, 100):
        racing, session = interrupted(number, "writer")
        try:
            session.commit("beside a claim")
            landed = True
        except FencedError:
            landed = False
        now = others(racing)
        assert read(now) == ([5] * 8 if landed else [1] * 8)
        operations = [one.operation for one in now.ops_log()]
        if "claim branch" not in operations:
            break  # it made fewer calls than that
        newest = operations[0]
        assert newest == "claim branch"  # whatever landed came before it
        outcomes.append(landed)
    assert set(outcomes) == {True, False}


# --- compactors ----------------------------------------------------------------------------------


def with_deltas(storage: Storage) -> Repository:
    repository = make(storage)
    for value in range(4):
        write(repository.writable_session(), value).commit(f"fill {value}")
    return repository


def test_a_compactor_that_another_has_overtaken_is_refused() -> None:
    """At each of its calls; what it wrote is garbage, and the other's claim stands."""
    outcomes = []
    for number in range(1, 200):
        storage = MemoryStorage()
        with_deltas(storage)
        roots = context_of(others(storage)).roots
        racing = InterruptingStorage(storage, partial(claim_compaction, roots))
        zombie = others(racing)
        racing.arm(number)
        try:
            compact_branch(context_of(zombie), "main", CompactionMode.FULL, claim=True)
            landed = True
        except FencedError:
            landed = False
        head = contents_of(others(storage).readonly_session().store).view.snapshot
        assert (len(head.deltas) == 0) == landed
        assert read(others(storage)) == [3] * 8
        operations = [one.operation for one in others(storage).ops_log()]
        if "claim compaction" not in operations or len(racing.ops) < number:
            break
        outcomes.append(landed)
        assert others(storage).compact(mode="full").snapshot_id is not None or landed
        others(storage).expire_snapshots(keep_last=1)
        others(storage).garbage_collect(NOW)
        assert others(storage).verify().problems == ()
    assert set(outcomes) == {True, False}


def test_a_compaction_that_was_asked_for_claims_and_one_by_itself_does_not() -> None:
    storage = MemoryStorage()
    repository = with_deltas(storage)
    compact_branch(context_of(repository), "main", CompactionMode.MINOR)
    assert root_of(storage).epochs == {}
    repository.compact(dry_run=True)
    assert root_of(storage).epochs == {}
    repository.compact(mode="full")
    assert root_of(storage).epochs == {"compactor": root_of(storage).version - 1}


def test_a_compaction_of_before_a_claim_does_not_land() -> None:
    storage = MemoryStorage()
    repository = with_deltas(storage)
    stale = others(storage)
    claim_compaction(context_of(repository).roots)
    with pytest.raises(FencedError):
        compact_branch(context_of(stale), "main", CompactionMode.MINOR)
    assert len(contents_of(others(storage).readonly_session().store).view.snapshot.deltas) == 5


# --- collectors ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_collector_that_another_has_overtaken_stops() -> None:
    """It deletes nothing more but what it was about to, and does not say that it is done."""
    stopped = []
    for number in range(1, 200):
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
    assert stopped.count(True) > 10
    assert stopped.count(False) > 1
