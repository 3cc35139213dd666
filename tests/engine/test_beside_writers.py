"""Who only looks tells of no damage where others write and collect meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import pytest

from filled import NOW, fill, make, opened, read
from storages import InterruptingStorage, copy_of
from storages.wrapped import Call, WrappedStorage
from zarr_manifests import Repository
from zarr_manifests.errors import SnapshotExpiredError
from zarr_manifests.storage.memory import MemoryStorage


def commit(repository: Repository) -> None:
    fill(repository, read(repository)[0] + 1)


def collect(repository: Repository) -> None:
    commit(repository)
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(NOW)


@pytest.fixture(scope="module")
def made() -> MemoryStorage:
    storage = MemoryStorage()
    repository = make(storage)
    commit(repository)
    repository.create_tag("t")
    commit(repository)
    return storage


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
    for number in range(1, 1000):
        storage = copy_of(made)
        racing = InterruptingStorage(storage, partial(collect, opened(storage)))
        repository = opened(racing)
        racing.arm(number)
        with contextlib.suppress(SnapshotExpiredError):
            repository.expire_snapshots(keep_last=2)
            repository.create_branch("b", first)
            repository.lease(first).__enter__()
        assert opened(copy_of(storage)).verify().ok
        if len(racing.ops) < number:
            return
