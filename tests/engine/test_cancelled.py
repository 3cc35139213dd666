"""Event loops that are not kind: tasks cancelled at every step, several loops, loops that run.

A chunk whose writing was cancelled is there whole or not at all, and nothing else suffers for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.core.buffer import cpu, default_buffer_prototype

import zarr_manifests as zm
from storages import Call, LatencyStorage, WrappedStorage
from stored import contents
from zarr_manifests.storage.memory import MemoryStorage

PROTOTYPE = default_buffer_prototype()
SIZES = (10, 700, 700, 700, 5000, 700, 700)
"""Inline, packed (the third fills a pack), an object of its own, packed."""
VICTIMS = (0, 1, 3, 4, 5)
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
    return {key: value for key, value in contents(repository).items() if "/c/" in key}


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


@pytest.mark.parametrize("victim", VICTIMS)
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


async def test_everything_synchronous_within_a_running_loop() -> None:
    through = LatencyStorage(MemoryStorage(), latency_s=0.0)
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
