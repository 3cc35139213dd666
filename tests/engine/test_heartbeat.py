"""Renewing leases where threads are scarce, the storage fails, or clocks are set."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import zarr

import zarr_manifests as zm
from inside import context_of, root_of
from zarr_manifests import Repository
from zarr_manifests.engine.history import leases
from zarr_manifests.error_cases import FencedError, LeaseError
from zarr_manifests.errors import CorruptObjectError, ManifestsError, StorageError
from zarr_manifests.format.root import Lease
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import in_order
from zarr_manifests.testing.wrapped import Call, WrappedStorage

NO_THREAD = RuntimeError("can't start new thread")


@dataclass
class World:
    """Clocks that are set by hand, timers, and threads that can be had or not."""

    wall_ms: int = 1_700_000_000_000
    monotonic_ms: int = 0
    due: dict[int, tuple[int, Callable[[], None]]] = field(default_factory=dict)
    timers: int = 0
    no_threads: bool = False
    waited: list[float] = field(default_factory=list)
    when_waiting: Callable[[], None] = lambda: None

    def runtime(self) -> Any:
        return in_order(
            now_ms=lambda: self.wall_ms,
            monotonic_s=lambda: self.monotonic_ms / 1000,
            later=self.later,
            sleep=self.sleep,
        )

    def later(self, delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        if self.no_threads:
            raise NO_THREAD
        self.timers += 1
        number = self.timers
        self.due[number] = self.monotonic_ms + int(delay_s * 1000), call
        return lambda: self.due.pop(number, None)

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.waited.append(seconds)
            self.pass_by(seconds)
            self.when_waiting()

    def pass_by(self, seconds: float) -> None:
        self.wall_ms += int(seconds * 1000)
        self.monotonic_ms += int(seconds * 1000)

    def advance(self, seconds: float) -> None:
        """Time goes by, and timers go off."""
        self.pass_by(seconds)
        for number, (at, call) in [*self.due.items()]:
            if at <= self.monotonic_ms and self.due.pop(number, None):
                call()


class Cut(WrappedStorage):
    """A storage that cannot be reached while `cut` says so."""

    cut = False

    def _around[R](self, call: Call[R]) -> R:
        if self.cut:
            raise StorageError("it cannot be reached")
        return super()._around(call)


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    with zm.create(storage).transaction(message="make a") as store:
        zarr.create_array(store, name="a", shape=(2,), chunks=(1,), dtype="i4")
    return storage


def held(storage: MemoryStorage) -> tuple[Lease, ...]:
    return root_of(storage).leases


def head(repository: Repository) -> str:
    return repository.list_branches()["main"]


def test_where_there_is_no_thread_for_the_next_renewal_the_last_one_waits(
    storage: MemoryStorage,
) -> None:
    world = World()
    repository = zm.open(storage, runtime=world.runtime())
    with repository.lease(head(repository), 60) as lease:
        world.no_threads = True

        def at_the_third() -> None:
            world.no_threads = len(world.waited) < 3

        world.when_waiting = at_the_third
        world.advance(20)  # the timer goes off, and no other can be set until the third wait ends
        assert world.waited == [20.0] * 3
        assert [one.expires_ms for one in held(storage)] == [world.wall_ms + 60_000]
        lease.check()
        assert len(world.due) == 1
    assert held(storage) == ()
    assert not world.due


def test_what_waits_for_a_thread_ends_with_the_last_lease(storage: MemoryStorage) -> None:
    world = World()
    repository = zm.open(storage, runtime=world.runtime())
    block = repository.lease(head(repository), 60)
    block.__enter__()
    world.no_threads = True
    world.when_waiting = lambda: block.__exit__(None, None, None) and None
    world.advance(20)
    assert world.waited == [20.0]
    assert held(storage) == ()


def test_a_lease_that_cannot_be_renewed_is_given_up_and_others_go_on(
    storage: MemoryStorage,
) -> None:
    world = World()
    repository = zm.open(storage, runtime=world.runtime())
    with repository.lease(head(repository), 60) as first:
        world.no_threads = True
        with (
            pytest.raises(LeaseError, match="can't start new thread"),
            repository.lease(head(repository), 30),
        ):
            raise AssertionError
        with pytest.raises(LeaseError):
            repository.writable_session(lease=30)
        assert len(held(storage)) == 1
        world.no_threads = False
        world.advance(20)
        assert [one.expires_ms for one in held(storage)] == [world.wall_ms + 60_000]
        first.check()
    assert held(storage) == ()
    with repository.lease(head(repository), 30):
        assert len(held(storage)) == 1


def test_without_a_thread_no_lease_is_left_although_it_cannot_be_given_up(
    storage: MemoryStorage,
) -> None:
    world = World()
    faulty = Cut(storage)

    def later(delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        faulty.cut = True
        raise NO_THREAD

    world.later = later  # type: ignore[method-assign]
    repository = zm.open(faulty, runtime=world.runtime())
    snapshot_id = head(repository)
    with pytest.raises(LeaseError), repository.lease(snapshot_id, 30):
        raise AssertionError
    faulty.cut = False
    world.pass_by(31)
    report = zm.open(storage, runtime=world.runtime()).garbage_collect(timedelta(0))
    assert report.leases_removed == 1


def test_a_real_timer_without_a_thread_is_told_as_a_lease_error(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = zm.open(storage)
    snapshot_id = head(repository)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if isinstance(thread, threading.Timer):
            raise NO_THREAD
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(LeaseError), repository.lease(snapshot_id):
        raise AssertionError
    assert held(storage) == ()


@pytest.mark.parametrize("clock", ["monotonic", "wall"])
def test_a_lease_that_was_not_renewed_in_time_is_not_relied_on(
    storage: MemoryStorage, clock: str
) -> None:
    """A collector goes by the wall clock; the other tells what one that was set back hides."""
    world = World()
    repository = zm.open(storage, runtime=world.runtime())
    with repository.lease(head(repository), 60) as lease:
        lease.check()
        world.due.clear()  # whatever is due does not come
        if clock == "monotonic":
            world.wall_ms -= 7_200_000
            world.monotonic_ms += 60_000
        else:
            world.wall_ms += 60_000
        with pytest.raises(LeaseError, match="not renewed within 60000 ms"):
            lease.check()
        assert lease.lost
        assert len(held(storage)) == 1
        leases.renew_all(context_of(repository))  # it has been there all the time
        lease.check()
        assert not lease.lost


def test_renewals_that_fail_are_tried_again_and_told(storage: MemoryStorage) -> None:
    world, faulty = World(), Cut(storage)
    repository = zm.open(faulty, runtime=world.runtime())
    with repository.lease(head(repository), 60) as lease:
        faulty.cut = True
        world.advance(20)
        world.advance(20)
        lease.check()
        world.advance(20)
        with pytest.raises(LeaseError):
            lease.check()
        faulty.cut = False
        world.advance(20)
        lease.check()
        world.due.clear()
        world.pass_by(60)
        zm.open(storage, runtime=world.runtime()).garbage_collect(timedelta(0))
        with pytest.raises(LeaseError):
            lease.check()
        leases.renew_all(context_of(repository))
        with pytest.raises(FencedError):
            lease.check()


def test_a_history_that_is_damaged_keeps_no_other_lease_from_being_renewed(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    repository = zm.open(storage, runtime=world.runtime())
    bad = head(repository)
    with repository.transaction(message="another") as store:
        zarr.open_array(store, path="a")[:] = 1
    find = leases.find_in_history

    def damaged(context: Any, root: Any, snapshot_id: str) -> Any:
        if snapshot_id == bad:
            raise CorruptObjectError(f"{snapshot_id} is damaged")
        return find(context, root, snapshot_id)

    with repository.lease(bad, 60) as one, repository.lease(head(repository), 60) as other:
        monkeypatch.setattr(leases, "find_in_history", damaged)
        for _ in range(3):
            world.advance(20)
        other.check()
        with pytest.raises(LeaseError):
            one.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_a_forked_child_relies_on_its_parents_lease_no_longer_than_it_knows(
    storage: MemoryStorage,
) -> None:
    world = World()
    repository = zm.open(storage, runtime=world.runtime())
    with repository.lease(head(repository), 60) as lease:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                lease.check()
                world.pass_by(60)
                lease.check()
            except ManifestsError as error:
                status = 0 if "ask the process" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
