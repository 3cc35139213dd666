"""Renewing leases where threads are scarce, history is damaged, or clocks are set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import zarr

import zarr_manifests as zm
from in_order import in_order
from inside import root_of
from storages import Call, WrappedStorage
from zarr_manifests import Repository
from zarr_manifests.errors import LeaseError
from zarr_manifests.ids import snapshot_key
from zarr_manifests.storage.memory import MemoryStorage

NO_THREAD = RuntimeError("can't start new thread")


@dataclass
class World:
    """Clocks that are set by hand, timers, and threads that can be had or not."""

    wall_ms: int = 1_700_000_000_000
    monotonic_ms: int = 0
    due: dict[int, tuple[int, Callable[[], None]]] = field(default_factory=dict)
    timers: int = 0
    no_threads: bool = False

    def runtime(self) -> Any:
        return in_order(
            now_ms=lambda: self.wall_ms,
            monotonic_s=lambda: self.monotonic_ms / 1000,
            later=self.later,
        )

    def later(self, delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        if self.no_threads:
            raise NO_THREAD
        self.timers += 1
        number = self.timers
        self.due[number] = self.monotonic_ms + int(delay_s * 1000), call
        return lambda: self.due.pop(number, None)

    def pass_by(self, seconds: float) -> None:
        self.wall_ms += int(seconds * 1000)
        self.monotonic_ms += int(seconds * 1000)

    def advance(self, seconds: float) -> None:
        """Time goes by, and timers go off."""
        self.pass_by(seconds)
        for number, (at, call) in [*self.due.items()]:
            if at <= self.monotonic_ms and self.due.pop(number, None):
                call()


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    with zm.create(storage).transaction(message="make a") as store:
        zarr.create_array(store, name="a", shape=(20,), chunks=(1,), dtype="i4")
    return storage


def expiries(storage: MemoryStorage) -> list[int]:
    """When each lease ends if nobody renews it."""
    return [lease.expires_ms for lease in root_of(storage).leases]


def head(repository: Repository, branch: str = "main") -> str:
    return repository.list_branches()[branch]


def commit(repository: Repository, at: int = 0, branch: str = "main") -> str:
    session = repository.writable_session(branch)
    zarr.open_array(session.store, path="a")[at] = 1
    return session.commit(f"chunk {at}")


def test_a_lease_that_cannot_be_renewed_is_given_up_and_others_go_on(
    storage: MemoryStorage,
) -> None:
    world = World()
    repository = zm.open(storage, runtime=world.runtime())
    with repository.lease(head(repository), 60) as first:
        world.no_threads = True
        with pytest.raises(LeaseError), repository.lease(head(repository), 30):
            raise AssertionError
        with pytest.raises(LeaseError):
            repository.writable_session(lease=30)
        assert len(expiries(storage)) == 1
        world.no_threads = False
        world.advance(20)
        assert expiries(storage) == [world.wall_ms + 60_000]
        first.check()
    assert expiries(storage) == []
    with repository.lease(head(repository), 30):
        assert len(expiries(storage)) == 1


@pytest.mark.parametrize("clock", ["monotonic", "wall"])
def test_a_lease_that_was_not_renewed_in_time_is_not_relied_on(
    storage: MemoryStorage, clock: str
) -> None:
    """A collector goes by the wall clock; the other tells what one that was set back hides."""
    world = World()
    repository = zm.open(storage, runtime=world.runtime())
    with repository.lease(head(repository), 60) as lease:
        lease.check()
        if clock == "monotonic":
            world.wall_ms -= 7_200_000
            world.monotonic_ms += 60_000
        else:
            world.wall_ms += 60_000
        with pytest.raises(LeaseError):
            lease.check()
        assert lease.lost
        assert len(expiries(storage)) == 1
        world.advance(20)  # it is renewed late, but has been there all the time
        lease.check()
        assert not lease.lost


def test_a_history_that_is_damaged_keeps_no_other_lease_from_being_renewed(
    storage: MemoryStorage,
) -> None:
    world = World()
    repository, others = zm.open(storage, runtime=world.runtime()), zm.open(storage)
    repository.create_branch("side")
    leased = commit(repository, branch="side")
    with repository.lease(leased, 60) as one, repository.lease(head(repository), 60) as other:
        key = snapshot_key(commit(others, 1, "side"))
        sound = storage.get(key)
        storage.put(key, sound[:-1] + bytes([sound[-1] ^ 1]))
        commit(others, 2, "side")
        for _ in range(3):
            world.advance(20)
        other.check()
        with pytest.raises(LeaseError):
            one.check()
        storage.put(key, sound)


class BesideASwap(WrappedStorage):
    """Calls `action` right before or after a swap: the next one, or the one after that."""

    due: tuple[int, bool] | None = None

    def __init__(self, storage: MemoryStorage) -> None:
        super().__init__(storage)
        self.action: Callable[[], object] = int

    def _around[R](self, call: Call[R]) -> R:
        if call.op != "cas" or self.due is None:
            return super()._around(call)
        (more, after), self.due = self.due, None
        if more:
            self.due = more - 1, after
            return super()._around(call)
        if not after:
            self.action()
        found = super()._around(call)
        if after:
            self.action()
        return found


def test_a_lease_that_is_renewed_while_it_is_moved_is_not_taken_for_lost(
    storage: MemoryStorage,
) -> None:
    world, beside = World(), BesideASwap(storage)
    repository = zm.open(beside, runtime=world.runtime())
    session = repository.writable_session(lease=60)

    def work() -> None:
        array = zarr.open_array(session.store, path="a")
        array[0] = array[0] + 1
        session.commit("the lease moves to the next session")

    for after in (False, True):
        beside.action, beside.due = work, (0, after)
        world.advance(20)  # a renewal, and the commit comes before or after its swap
        assert beside.due is None
        world.advance(20)
        assert expiries(storage) == [world.wall_ms + 60_000]
    # The lease has moved in the root, and the writer is about to note it.
    beside.action, beside.due = lambda: world.advance(20), (1, True)
    work()
    assert beside.due is None
    world.advance(20)
    assert expiries(storage) == [world.wall_ms + 60_000]
    session.close()
    assert expiries(storage) == []


@pytest.mark.parametrize("after", [False, True])
def test_a_lease_of_an_amended_head_is_not_taken_for_lost(
    storage: MemoryStorage, after: bool
) -> None:
    """Between the amend's swap and the lease's move, no history has the old head."""
    world, beside = World(), BesideASwap(storage)
    repository = zm.open(beside, runtime=world.runtime())
    session = repository.writable_session(lease=60)
    array = zarr.open_array(session.store, path="a")
    array[0] = 1
    session.commit("one")
    array[0] = 2
    beside.action, beside.due = lambda: world.advance(20), (1, after)
    session.amend("two")
    assert beside.due is None
    world.advance(20)
    assert expiries(storage) == [world.wall_ms + 60_000]
    array[0] = 3
    session.commit("three")
