"""Event loops that are not kind: tasks cancelled at every step, several loops, loops that run.

A chunk whose writing was cancelled is there whole or not at all, and nothing that others do waits
or suffers for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.core.buffer import cpu, default_buffer_prototype

import zarr_manifests as zm
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.testing import Call, LatencyStorage, WrappedStorage

PROTOTYPE = default_buffer_prototype()
SIZES = (10, 700, 700, 700, 5000, 700, 700)
"""Inline, packed (the third fills a pack), an object of its own, packed."""
STEPS = 14
"""A set of any of them ends after fewer."""


class Stepping(WrappedStorage):
    """Calls of an event loop give way to others twice before they are made, and twice after."""

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        for _ in range(2):
            await asyncio.sleep(0)
        result = call.run()
        for _ in range(2):
            await asyncio.sleep(0)
        return result


def make(n: int = 20) -> tuple[MemoryStorage, zm.Repository]:
    below = MemoryStorage()
    config = {"inline-chunk-bytes": 100, "pack-chunk-bytes": 1000, "pack-bytes": 1500}
    repository = zm.create(Stepping(LatencyStorage(below, latency_s=0.0)), config)
    with repository.transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(n,), chunks=(1,), dtype="u1")
    return below, repository


def value(i: int) -> bytes:
    return bytes([65 + i]) * SIZES[i % len(SIZES)]


def buffer(data: bytes) -> cpu.Buffer:
    return cpu.Buffer.from_bytes(data)


def held(below: MemoryStorage) -> dict[str, bytes]:
    repository = zm.open(below)
    assert repository.verify().ok
    store = repository.readonly_session().store
    keys = [key for key in contents_of(store).keys_below("") if "/c/" in key]
    return {key: store.get_sync(key).to_bytes() for key in keys}  # type: ignore[union-attr]


async def cancelled(work: Awaitable[object], steps: int) -> bool:
    """Whether the work, cancelled after so many steps of the loop, had not ended before."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


@pytest.mark.parametrize("victim", range(len(SIZES)))
def test_a_set_that_is_cancelled_leaves_its_chunk_whole_or_alone(victim: int) -> None:
    ended = []
    for steps in range(STEPS):
        below, repository = make()
        session = repository.writable_session()

        async def write(session: zm.Session = session, steps: int = steps) -> bool:
            ended_early = False
            for i in range(len(SIZES)):
                work = session.store.set(f"a/c/{i}", buffer(value(i)))
                if i == victim:
                    ended_early = await cancelled(work, steps)
                else:
                    await work
            await session.store.set("a/c/15", buffer(value(1)))
            return ended_early

        lost = asyncio.run(write())
        session.commit("what there is")
        wanted = {f"a/c/{i}": value(i) for i in range(len(SIZES))} | {"a/c/15": value(1)}
        found = held(below)
        there = f"a/c/{victim}" in found
        assert found == {key: data for key, data in wanted.items() if there or key in found}
        assert len(found) >= len(wanted) - lost
        ended.append(lost)
    assert not ended[-1]


def test_many_that_are_cancelled_among_many() -> None:
    for steps in range(STEPS):
        below, repository = make()
        session = repository.writable_session()

        async def write(session: zm.Session = session, steps: int = steps) -> set[int]:
            sets = [session.store.set(f"a/c/{i}", buffer(value(i))) for i in range(14)]
            tasks = [asyncio.ensure_future(one) for one in sets]
            for _ in range(steps):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            return {i for i, result in enumerate(ended) if result is None}

        done = asyncio.run(write())
        assert done >= set(range(1, 14, 2))
        session.commit("what there is")
        found = held(below)
        assert {f"a/c/{i}" for i in done} <= found.keys()
        assert all(found[key] == value(int(key.rpartition("/")[2])) for key in found)


def test_a_replacement_that_is_cancelled_leaves_the_old_chunk_or_the_new() -> None:
    for steps in range(STEPS):
        below, repository = make()
        with repository.transaction(message="old") as store:
            for i in range(len(SIZES)):
                store.set_sync(f"a/c/{i}", buffer(value(i)))
        session = repository.writable_session()

        async def replace(session: zm.Session = session, steps: int = steps) -> None:
            for i in range(len(SIZES)):
                await cancelled(session.store.set(f"a/c/{i}", buffer(value(i + 3))), steps)
                await cancelled(session.store.delete("a/c/19"), steps)
            await session.store.set("a/c/15", buffer(value(1)))

        asyncio.run(replace())
        session.commit("new, or not")
        found = held(below)
        for i in range(len(SIZES)):
            assert found[f"a/c/{i}"] in (value(i), value(i + 3))


def test_a_read_or_listing_that_is_cancelled_hinders_no_other() -> None:
    below, repository = make()
    with repository.transaction(message="chunks") as store:
        for i in range(14):
            store.set_sync(f"a/c/{i}", buffer(value(i)))
    for steps in range(STEPS):
        store = zm.open(repository.storage).readonly_session().store

        async def read(store: ManifestStore = store, steps: int = steps) -> None:
            gets = [asyncio.ensure_future(store.get(f"a/c/{i}", PROTOTYPE)) for i in range(14)]
            listing = asyncio.ensure_future(_listed(store))
            for _ in range(steps):
                await asyncio.sleep(0)
            for task in (*gets[::3], listing):
                task.cancel()
            found = await asyncio.gather(*gets, return_exceptions=True)
            for i, one in enumerate(found):
                if isinstance(one, asyncio.CancelledError):
                    assert i % 3 == 0
                else:
                    assert one.to_bytes() == value(i)
            again = [await store.get(f"a/c/{i}", PROTOTYPE) for i in range(14)]
            assert [one.to_bytes() for one in again if one] == [value(i) for i in range(14)]
            assert {*await _listed(store)} == {*held(below), "zarr.json", "a/zarr.json"}

        asyncio.run(read())


async def _listed(store: ManifestStore) -> list[str]:
    return [key async for key in store.list()]


def test_a_commit_whose_waiter_is_cancelled_lands_once_or_not_at_all() -> None:
    for steps in (1, 2, 5):
        below, repository = make()
        session = repository.writable_session()
        session.store.set_sync("a/c/4", buffer(value(4)))
        ended = threading.Event()

        def commit(session: zm.Session = session, ended: threading.Event = ended) -> None:
            try:
                session.commit("mine")
            finally:
                ended.set()

        async def wait(commit: Callable[[], None] = commit, steps: int = steps) -> None:
            assert await cancelled(asyncio.to_thread(commit), steps) in (True, False)

        asyncio.run(wait())  # it waits for the thread
        assert ended.is_set()
        messages = [info.message for info in zm.open(below).ancestry()]
        assert messages.count("mine") == 1
        assert held(below)["a/c/4"] == value(4)
        session.store.set_sync("a/c/5", buffer(value(5)))
        session.commit("goes on")


def test_one_store_in_several_loops_at_once() -> None:
    below, repository = make(200)
    session = repository.writable_session()
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def loop(worker: int) -> None:
        async def work() -> None:
            mine = range(worker, 200, 4)
            await asyncio.gather(
                *(session.store.set(f"a/c/{i}", buffer(value(i % 7))) for i in mine)
            )
            found = await asyncio.gather(*(session.store.get(f"a/c/{i}", PROTOTYPE) for i in mine))
            assert [one.to_bytes() for one in found if one] == [value(i % 7) for i in mine]

        try:
            barrier.wait(20)
            asyncio.run(work())
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    session.commit("all")
    assert held(below) == {f"a/c/{i}": value(i % 7) for i in range(200)}
    for _ in range(2):  # a loop that has ended is not asked again
        found = asyncio.run(session.store.get("a/c/4", PROTOTYPE))
        assert found is not None
        assert found.to_bytes() == value(4)


@pytest.mark.parametrize("far", [False, True])
async def test_everything_synchronous_within_a_running_loop(far: bool) -> None:
    storage = MemoryStorage()
    through = LatencyStorage(storage, latency_s=0.0) if far else storage
    ds = xr.Dataset({"t": ("x", np.arange(6.0))}, {"x": np.arange(6)})
    zm.write(ds, through, message="one")
    repository = zm.open(through)
    with repository.transaction(message="two") as store:
        zarr.open_array(store, path="t")[:2] = 9
    read = xr.open_dataset(through, engine="zarr_manifests").load()
    np.testing.assert_array_equal(read.t, [9, 9, 2, 3, 4, 5])
    assert len([*repository.ancestry()]) == 3
    assert repository.compact().snapshot_id is not None
    assert repository.verify().ok
    store = repository.readonly_session().store
    assert store.get_sync("t/c/0") == await store.get("t/c/0", PROTOTYPE)
