"""Who only looks tells of no damage where others write and collect meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import zarr

import zarr_manifests as zm
from in_order import in_order
from storages import InterruptingStorage, copy_of
from storages.wrapped import Call, WrappedStorage
from zarr_manifests import Repository
from zarr_manifests.errors import SnapshotExpiredError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage

NOW = timedelta(0)
CONFIG = {"inline-chunk-bytes": 0, "compaction": {"mode": "manual"}}
type Work = Callable[[Repository], object]


def opened(storage: Storage) -> Repository:
    return zm.open(storage, runtime=in_order())


def commit(repository: Repository) -> None:
    with repository.transaction(message="beside") as store:
        array = zarr.open_array(store, path="a")
        array[:] = array[:] + 1


def collect(repository: Repository) -> None:
    commit(repository)
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(NOW)


def go_back(repository: Repository) -> None:
    version = next(repository.ops_log()).version
    commit(repository)
    zm.recover(repository, version)


def unmake(repository: Repository) -> None:
    repository.create_branch("gone")
    with repository.transaction("gone", message="gone") as store:
        zarr.open_array(store, path="a")[:] = 7
    repository.delete_branch("gone")
    repository.garbage_collect(NOW)


WORK: dict[str, Work] = {
    "commit": commit,
    "expiry and collection": collect,
    "compaction": lambda repository: repository.compact(mode="full") and collect(repository),
    "restore": go_back,
    "a branch that goes": unmake,
}


@pytest.fixture(scope="module")
def made() -> MemoryStorage:
    storage = MemoryStorage()
    repository = zm.create(storage, CONFIG, runtime=in_order())
    with repository.transaction(message="make a") as store:
        array = zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i8")
        array[:] = 1
    commit(repository)
    repository.create_tag("t")
    commit(repository)
    return storage


def moments(made: MemoryStorage, work: Work) -> Iterator[tuple[int, InterruptingStorage]]:
    """A storage for each moment at which the work may come between."""
    for number in range(1, 1000):
        storage = copy_of(made)
        others = opened(storage)
        racing = InterruptingStorage(storage, lambda others=others: work(others))
        yield number, racing
        if len(racing.ops) < number:
            return


@pytest.mark.parametrize("name", WORK)
def test_verification_reports_nothing_whatever_others_do_between_its_calls(
    name: str, made: MemoryStorage
) -> None:
    for number, racing in moments(made, WORK[name]):
        repository = opened(racing)
        racing.arm(number)
        assert repository.verify().problems == ()


class Restless(WrappedStorage):
    """Others do something before each third call."""

    work: Callable[[], object] | None = None
    calls = 0

    def _around[R](self, call: Call[R]) -> R:
        self.calls += 1
        if self.work is not None and self.calls % 3 == 0:
            self.work()
        return super()._around(call)


def test_what_is_damaged_is_found_though_others_do_not_rest(made: MemoryStorage) -> None:
    storage = copy_of(made)
    opened(storage).create_tag("damaged")
    bad = max(info.key for info in storage.list("deltas/"))
    data = storage.get(bad)
    storage.put(bad, data[:-1] + bytes([data[-1] ^ 1]))
    others, restless = opened(storage), Restless(storage)
    repository = opened(restless)
    restless.work = lambda: others.create_tag(f"t-{len(others.list_tags())}")
    assert [problem.key for problem in repository.verify().problems] == [bad]


def test_what_is_collected_while_history_is_gone_through_is_not_told_as_damage(
    made: MemoryStorage,
) -> None:
    first = [info.snapshot_id for info in opened(made).ancestry()][-2]
    for number, racing in moments(made, collect):
        repository = opened(racing)
        racing.arm(number)
        with contextlib.suppress(SnapshotExpiredError):
            repository.expire_snapshots(keep_last=2)
            repository.create_branch("b", first)
            repository.lease(first).__enter__()
        assert opened(copy_of(racing.storage)).verify().ok
