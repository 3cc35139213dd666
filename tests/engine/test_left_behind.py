"""Snapshots that no branch leads to any more: they can be named until a collection deletes them.

Whoever names one beside a collection, at whatever moment, gets it whole or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import root_of
from zarr_manifests import Repository
from zarr_manifests.errors import NotFoundError, SnapshotExpiredError
from zarr_manifests.repository import resolved
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import copy_of, in_order
from zarr_manifests.testing.wrapped import Call, WrappedStorage

NOW, DAY = timedelta(0), timedelta(hours=24)
CONFIG = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0, "compaction": {"mode": "manual"}}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def wait(self, hours: float) -> None:
        self.ms += int(hours * 3_600_000)

    def world(self) -> Any:
        return in_order(now_ms=lambda: self.ms, monotonic_s=lambda: self.ms / 1000)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def repo(clock: Clock) -> Repository:
    return made(MemoryStorage(), clock)


def made(storage: Storage, clock: Clock) -> Repository:
    repo = zm.create(storage, CONFIG, runtime=clock.world())
    with repo.transaction(message="make a") as store:
        zarr.create_array(store, name="a", shape=(8,), chunks=(2,), dtype="i4")[:] = 1
    return repo


def fill(repo: Repository, value: int, branch: str = "main", at: slice = slice(None)) -> str:
    session = repo.writable_session(branch)
    zarr.open_array(session.store, path="a")[at] = value
    return session.commit(f"fill {value}")


def read(repo: Repository, snapshot_id: str) -> list[int]:
    store = repo.readonly_session(snapshot_id).store
    return np.asarray(zarr.open_array(store, path="a", mode="r")[:]).tolist()


def check_named(repo: Repository, name: str, values: list[int]) -> None:
    """It is whole, and stays so."""
    for _ in range(2):
        assert repo.verify().ok
        assert read(repo, name) == values
        repo.garbage_collect(NOW)


# --- by the ids that the log of operations tells -------------------------------------------------


def reset(repo: Repository) -> None:
    repo.reset_branch("main", "main~2", force=True)


def amend(repo: Repository) -> None:
    session = repo.writable_session()
    zarr.open_array(session.store, path="a")[:] = 9
    session.amend("amended")


def delete(repo: Repository) -> None:
    repo.create_branch("side")
    reset(repo)
    repo.delete_branch("side")


def untag(repo: Repository) -> None:
    repo.create_tag("v1")
    reset(repo)
    repo.delete_tag("v1")


@pytest.mark.parametrize("leave", [reset, amend, delete, untag])
@pytest.mark.parametrize("expired", [False, True])
def test_what_the_log_tells_can_be_named(
    repo: Repository, leave: Callable[[Repository], None], expired: bool
) -> None:
    for value in (2, 3, 4):
        fill(repo, value)
    if expired:
        repo.expire_snapshots(keep_last=4)
    line = [info.id for info in repo.ancestry()]
    leave(repo)
    left = next(one.before for one in repo.ops_log() if one.before)
    assert left == line[0]
    if expired and leave is untag:  # once anything has expired, a tag has no history
        line = [left]
    repo.create_branch("back", left)
    assert [info.id for info in repo.ancestry("back")] == line
    repo.create_tag("kept", left)
    repo.reset_branch("main", left, force=True)
    assert [info.id for info in repo.ancestry()] == line
    check_named(repo, "kept", [4] * 8)
    assert [info.id for info in repo.ancestry("back")] == line


@pytest.mark.parametrize("leave", [reset, amend, delete, untag])
@pytest.mark.parametrize("expired", [False, True])
def test_short_ids_find_what_was_left_until_it_is_collected(
    repo: Repository, leave: Callable[[Repository], None], expired: bool
) -> None:
    for value in (2, 3, 4):
        fill(repo, value)
    line = [info.id for info in repo.ancestry()]
    if expired:
        repo.expire_snapshots(keep_last=4)
    leave(repo)
    left = [name for name in line if name not in {info.id for info in repo.ancestry()}]
    assert left
    for name in left:
        assert resolved(repo, name[13:21]) == name
        assert next(repo.ancestry(name[13:21])).id == name
    repo.garbage_collect(NOW)
    for name in left:
        with pytest.raises((NotFoundError, SnapshotExpiredError)):
            resolved(repo, name[13:21])


@pytest.mark.parametrize("by", ["reset", "expiry"])
def test_short_ids_find_what_is_older_than_the_log_of_operations(repo: Repository, by: str) -> None:
    ids = []
    for number in range(40):
        with repo.transaction(message=f"commit {number}", allow_empty=True):
            pass
        ids.append(resolved(repo, "main"))
    if by == "reset":
        repo.reset_branch("main", ids[0], force=True)
    else:
        repo.expire_snapshots(keep_last=1)
    repo.storage.delete_many([info.key for info in repo.storage.list("root/")])
    assert ids[1] not in {one.snapshot_id for one in repo.ops_log()}
    for name in ids[1:]:
        assert resolved(repo, name[13:21]) == name


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize("fast_forward", [False, True])
def test_what_was_left_can_be_merged(repo: Repository, expired: bool, fast_forward: bool) -> None:
    for value in (2, 3):
        fill(repo, value)
    repo.create_branch("side")
    fill(repo, 4, "side", slice(2))
    left = fill(repo, 5, "side", slice(2, 4))
    if expired:
        repo.expire_snapshots(keep_last=4)
    if not fast_forward:
        fill(repo, 6, at=slice(6, 8))
    repo.delete_branch("side")
    report = repo.merge(left)
    assert (report.commits, report.fast_forward) == (2, fast_forward)
    check_named(repo, "main", [4, 4, 5, 5, 3, 3] + ([3, 3] if fast_forward else [6, 6]))


def test_what_was_left_can_be_picked(repo: Repository) -> None:
    repo.create_branch("side")
    fill(repo, 2, "side", slice(2))
    left = fill(repo, 3, "side", slice(4, 6))
    repo.delete_branch("side")
    repo.cherry_pick(left[13:21])
    check_named(repo, "main", [1, 1, 1, 1, 3, 3, 1, 1])


def test_what_was_left_is_leased_once_it_has_a_name(repo: Repository) -> None:
    repo.create_branch("side")
    left = fill(repo, 2, "side")
    repo.delete_branch("side")
    with pytest.raises(SnapshotExpiredError, match=rf"create_tag\(name, '{left}'\) keeps it"):
        repo.lease(left).__enter__()
    repo.create_tag("kept", left)
    with repo.lease("kept") as lease:
        lease.check()


def test_what_has_expired_can_be_named_until_it_is_collected(repo: Repository) -> None:
    ids = [fill(repo, value) for value in (2, 3, 4)]
    repo.expire_snapshots(keep_last=1)
    repo.create_tag("kept", ids[0])
    assert [info.id for info in repo.ancestry("kept")] == [ids[0]]
    repo.create_branch("back", ids[1])
    # What is older stays expired, but for what a tag keeps.
    assert [info.id for info in repo.ancestry("back")] == ids[1::-1]
    assert all(branch.floor is not None for branch in root_of(repo).branches.values())
    check_named(repo, "kept", [2] * 8)
    repo.reset_branch("main", ids[1], force=True)  # from a branch that has it
    repo.delete_branch("back")
    check_named(repo, "main", [3] * 8)
    with pytest.raises(SnapshotExpiredError, match=rf"{ids[2]} is not in memory://.*ancestry"):
        repo.create_tag("late", ids[2])


def test_restored_refs_leave_what_can_be_named(repo: Repository) -> None:
    version = root_of(repo).version
    left = fill(repo, 2)
    zm.recover(repo, version)
    repo.create_branch("back", left)
    check_named(repo, "back", [2] * 8)


def test_what_never_was_cannot_be_named(repo: Repository) -> None:
    for name in (f"{1:012d}-{'0' * 24}-7", f"{10**9:012d}-{'ab' * 12}-1"):
        for make in (repo.create_tag, repo.create_branch):
            with pytest.raises(SnapshotExpiredError, match="it never was, or"):
                make("x", name)


# --- after collections ---------------------------------------------------------------------------


def test_what_is_younger_than_the_fence_can_be_named_after_a_collection(
    repo: Repository, clock: Clock
) -> None:
    """The collection ran last night; the reset was before it, and the commit shortly before."""
    old = fill(repo, 2)
    clock.wait(30)
    fill(repo, 3, at=slice(4))
    left = fill(repo, 4, at=slice(2))
    repo.reset_branch("main", old, force=True)
    repo.garbage_collect(DAY)
    assert 0 < root_of(repo).fence
    repo.create_branch("back", left)
    assert [info.message for info in repo.ancestry("back")][:3] == ["fill 4", "fill 3", "fill 2"]
    check_named(repo, "back", [4, 4, 3, 3, 2, 2, 2, 2])


def test_what_is_older_than_the_fence_can_be_named_if_it_was_left_after_the_collection(
    repo: Repository, clock: Clock
) -> None:
    first = fill(repo, 2)
    left = fill(repo, 3)
    clock.wait(30)
    repo.garbage_collect(DAY)
    fill(repo, 4)
    repo.reset_branch("main", first, force=True)
    repo.create_tag("back", left)
    check_named(repo, "back", [3] * 8)


def test_what_a_collection_has_deleted_in_part_is_refused(clock: Clock) -> None:
    """Chunks go first and snapshots last, so the snapshot of what is no longer whole is there."""
    storage = MemoryStorage()
    repo = made(storage, clock)
    first = resolved(repo, "main")
    left = fill(repo, 2)
    repo.reset_branch("main", first, force=True)
    with suppress(_StoppedError):
        zm.open(_Stopping(storage), runtime=clock.world()).garbage_collect(NOW)
    assert not [info for info in storage.list("chunks/") if left.rsplit("-", 1)[0] in info.key]
    assert [info for info in storage.list("snapshots/") if left.rsplit("-", 1)[0] in info.key]
    for make in (repo.create_tag, repo.create_branch):
        with pytest.raises(SnapshotExpiredError, match=r"deletes parts.*readonly_session.*clone"):
            make("back", left)
    with pytest.raises(SnapshotExpiredError):
        repo.reset_branch("main", left)


class _StoppedError(Exception):
    pass


class _Stopping(WrappedStorage):
    """The process ends after its first deletion."""

    def _around[R](self, call: Call[R]) -> R:
        done = call.run()
        if call.op == "delete_many":
            raise _StoppedError
        return done


def test_what_has_taken_chunks_from_what_is_gone_is_refused(repo: Repository, clock: Clock) -> None:
    """The commit is young, and some of its chunks are not: only another branch had them."""
    repo.create_branch("side")
    taken = fill(repo, 2, "side")
    clock.wait(30)
    repo.create_branch("picked")
    left = repo.cherry_pick(taken, "picked")
    repo.delete_branch("side")
    repo.delete_branch("picked")
    repo.garbage_collect(DAY)
    assert repo.verify().ok
    with pytest.raises(SnapshotExpiredError, match="deletes parts of it"):
        repo.create_tag("back", left)


def test_what_comes_after_something_old_is_refused(repo: Repository, clock: Clock) -> None:
    """Also where this process still has all of it in memory."""
    first = resolved(repo, "main")
    with repo.transaction(message="an old group, without chunks") as store:
        zarr.create_group(store, path="old")
    clock.wait(30)
    with repo.transaction(message="a young group") as store:
        zarr.create_group(store, path="young")
    left = resolved(repo, "main")
    repo.reset_branch("main", first, force=True)
    repo.garbage_collect(DAY)
    with pytest.raises(SnapshotExpiredError, match="deletes parts of it"):
        repo.create_tag("back", left)


def test_a_base_that_was_written_anew_still_refers_to_what_an_ancestor_has(
    repo: Repository, clock: Clock
) -> None:
    fill(repo, 2)
    clock.wait(30)
    made = repo.compact("main", "full").snapshot_id
    assert made is not None
    repo.reset_branch("main", "main~1", force=True)
    repo.garbage_collect(DAY)
    repo.create_tag("back", made)
    check_named(repo, "back", [2] * 8)


# --- beside a collection, at every moment --------------------------------------------------------


class Between(WrappedStorage):
    """Calls something else before one of its calls."""

    def __init__(self, storage: Storage, at: int, other: Callable[[], object]) -> None:
        super().__init__(storage)
        self.at, self.other, self.calls = at, other, 0

    def _around[R](self, call: Call[R]) -> R:
        self.calls += 1
        if self.calls == self.at:
            self.other()
        return call.run()


def scene(clock: Clock, left_before: bool) -> tuple[MemoryStorage, str]:
    """The head of `main` was left, before or after a collection; it holds twos and threes."""
    storage = MemoryStorage()
    repo = made(storage, clock)
    first = fill(repo, 2)
    left = fill(repo, 3, at=slice(4))
    if left_before:
        repo.reset_branch("main", first, force=True)
    else:
        repo.garbage_collect(NOW)
        repo.reset_branch("main", first, force=True)
    return storage, left


def tag(repo: Repository, left: str) -> None:
    repo.create_tag("back", left)


def pick(repo: Repository, left: str) -> None:
    repo.cherry_pick(left)
    repo.create_tag("back")


def merge(repo: Repository, left: str) -> None:
    repo.merge(left, fast_forward=False)
    repo.create_tag("back")


@pytest.mark.parametrize("left_before", [True, False])
@pytest.mark.parametrize("outer", ["naming", "collecting"])
@pytest.mark.parametrize("bring", [tag, pick, merge])
def test_naming_and_collecting_at_once(
    clock: Clock, outer: str, left_before: bool, bring: Callable[[Repository, str], None]
) -> None:
    """Those who commit have begun after the fence, which is a day old."""
    storage, left = scene(clock, left_before)
    clock.wait(30)
    outcomes = []
    for at in range(1, 500):
        there = copy_of(storage)

        def name(place: Storage) -> None:
            try:
                bring(zm.open(place, runtime=clock.world()), left)
            except SnapshotExpiredError:
                outcomes.append("refused")
            else:
                outcomes.append("named")

        def collect(place: Storage) -> None:
            zm.open(place, runtime=clock.world()).garbage_collect(DAY)

        first, second = (name, collect) if outer == "naming" else (collect, name)
        between = Between(there, at, lambda: second(there))  # noqa: B023 - called in this round
        first(between)
        if between.calls < at:
            break
        repo = zm.open(there, runtime=clock.world())
        assert repo.verify().ok, at
        if outcomes[-1] == "named":
            assert read(repo, "back") == [3] * 4 + [2] * 4, at
            check_named(repo, "back", [3] * 4 + [2] * 4)
        else:
            assert "back" not in repo.list_tags()
            assert read(repo, "main") == [2] * 8
    assert {*outcomes} == {"named", "refused"}
    if bring is tag:  # beside a collection that begins before the swap of the name, it is too late
        assert outer == "collecting" or {*outcomes[:-1]} == {"refused"}
        assert outer == "collecting" or outcomes[-1] == "named"


@pytest.mark.parametrize("leave", [reset, amend, delete, untag])
def test_what_is_left_during_a_collection_is_found_by_the_next(
    clock: Clock, leave: Callable[[Repository], None]
) -> None:
    storage = MemoryStorage()
    repo = made(storage, clock)
    left = [fill(repo, value) for value in (2, 3)][-1]
    swaps = 0

    class BeforeItsEnd(WrappedStorage):
        def _around[R](self, call: Call[R]) -> R:
            nonlocal swaps
            if call.op == "cas":
                swaps += 1
                if swaps == 2:
                    leave(zm.open(storage, runtime=clock.world()))
            return call.run()

    zm.open(BeforeItsEnd(storage), runtime=clock.world()).garbage_collect(NOW)
    assert swaps > 2
    assert root_of(storage).swept == 0  # else it would be found by every tenth collection only
    repo.garbage_collect(NOW)
    session = left.rsplit("-", 1)[0]
    assert not [info.key for info in storage.list("chunks/") if session in info.key]
