"""What is fetched in the background: once, within limits, and without harm to anybody."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import zarr
from msgspec.structs import replace

import zarr_manifests as zm
from storages import CountingStorage
from storages.wrapped import Call, WrappedStorage
from stored import get, put
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage

COUNT = 24
EACH_ALONE = {
    "sets": [{"alone": {"arrays-per-manifest": 1, "cardinality": None}}],
    "rules": [{"target": "alone"}],
    "preload": {"arrays": [{"path": ".*/v.*"}]},
}


class Gate(WrappedStorage):
    """Holds back every read of a manifest until it is opened."""

    def __init__(self, storage: MemoryStorage) -> None:
        super().__init__(storage)
        self.open = threading.Event()
        self.began = threading.Semaphore(0)

    def _around[R](self, call: Call[R]) -> R:
        if call.key.startswith("manifests/"):
            self.began.release()
            assert self.open.wait(20)
        return call.run()


class Background(list[threading.Thread]):
    """Threads of their own for what is done in the background."""

    def __call__(self, call: Callable[[], None]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        self.append(thread)

    def wait(self) -> None:
        for thread in self:  # each may begin others before it ends
            thread.join(20)


def manifests_read(counting: CountingStorage) -> list[str]:
    return [record.key for record in counting.log if record.key.startswith("manifests/")]


@pytest.fixture(scope="module")
def storage() -> MemoryStorage:
    """A repository of arrays v0, v1, ... whose refs each have a manifest of their own."""
    storage = MemoryStorage()
    repository = zm.create(storage, {"chunk-manifests": EACH_ALONE})
    with repository.transaction(message="write") as store:
        for i in range(COUNT):
            zarr.create_array(store, name=f"v{i}", shape=(4 + i,), chunks=(1,), dtype="i1")
            for at in range(4 + i):
                put(store, f"v{i}/c/{at}", bytes([at]))
    repository.compact(mode="full")
    return storage


def test_what_was_fetched_is_not_fetched_again(storage: MemoryStorage) -> None:
    counting = CountingStorage(storage)
    background = Background()
    runtime = replace(SYSTEM, background=background)
    session = zm.open(counting, runtime=runtime).readonly_session()
    background.wait()
    assert len(manifests_read(counting)) == COUNT
    counting.reset()
    assert [get(session, f"v{i}/c/3") for i in range(COUNT)] == [b"\x03"] * COUNT
    assert manifests_read(counting) == []


def test_it_ends_with_the_session(storage: MemoryStorage) -> None:
    gate = Gate(storage)
    counting = CountingStorage(gate)
    background = Background()
    runtime = replace(SYSTEM, background=background)
    session = zm.open(counting, runtime=runtime).readonly_session()
    assert gate.began.acquire(timeout=20)
    session.close()
    gate.open.set()
    background.wait()
    assert 1 <= len(manifests_read(counting)) <= 16
