"""Chunks that lie near each other in a pack are fetched together, where a storage is far away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype

import zarr_manifests as zm
from zarr_manifests.engine.objects.coalescing import CoalescedReads
from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    MissingChunkError,
    StorageError,
)
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import Capabilities
from zarr_manifests.store import ManifestStore
from zarr_manifests.testing import Call, CountingStorage, LatencyStorage, WrappedStorage

CHUNKS, ROW = 1000, 1024  # 4 KB each, so that all lie in one pack
PROTOTYPE = default_buffer_prototype()


class Bounded(WrappedStorage):
    """Says how far apart ranges may be, and how long a request."""

    def __init__(self, storage: Storage, gap_bytes: int, span_bytes: int) -> None:
        super().__init__(storage)
        self.bounds = gap_bytes, span_bytes

    @property
    def capabilities(self) -> Capabilities:
        gap_bytes, span_bytes = self.bounds
        return replace(
            self.storage.capabilities, inline=False, gap_bytes=gap_bytes, span_bytes=span_bytes
        )


class Gated(WrappedStorage):
    """Answers async reads when it is told to; `begun` and `cancelled` count them."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.begun = self.cancelled = 0
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.storage.capabilities, inline=False)

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        if self.gate is None:
            return await run()
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return await run()


def values(chunks: int = CHUNKS) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 2**31, (chunks, ROW), dtype=np.int32)


@pytest.fixture(scope="module")
def packed() -> MemoryStorage:
    storage = MemoryStorage()
    session = zm.create(storage).writable_session("main")
    array = zarr.create_array(
        session.store,
        name="a",
        shape=(CHUNKS, ROW),
        chunks=(1, ROW),
        dtype="i4",
        compressors=None,
    )
    array[:] = values()
    session.commit("a pack")
    assert len([*storage.list("chunks/")]) == 1
    return storage


@pytest.fixture(autouse=True)
def pipeline() -> Iterator[None]:
    with zarr.config.set({"async.concurrency": 64}):
        yield


def pack_of(storage: Storage) -> str:
    return next(iter(storage.list("chunks/"))).key


def copy_of(storage: MemoryStorage, change: Callable[[bytes], bytes]) -> MemoryStorage:
    """The same objects, the pack changed."""
    copy = MemoryStorage()
    for info in storage.list():
        data = storage.get(info.key)
        copy.put(info.key, change(data) if info.key.startswith("chunks/") else data)
    return copy


def warm(storage: Storage) -> ManifestStore:
    """The store of a reader that has its metadata."""
    store = zm.open(storage).readonly_session("main").store
    array = zarr.open_array(store, path="a", mode="r")
    with zarr.config.set({"async.concurrency": 1}):
        array[2], array[3]
    return store


def reads(counting: CountingStorage) -> list[int]:
    """Bytes of each request for chunks."""
    return [record.nbytes for record in counting.log if record.key.startswith("chunks/")]


async def get(store: ManifestStore, row: int) -> bytes | None:
    found = await store.get(f"a/c/{row}/0", PROTOTYPE)
    return None if found is None else found.to_bytes()


def test_reads_of_two_turns_share_a_request() -> None:
    """Zarr asks for a chunk in the place of one that came, and a turn later for the others."""
    read: list[tuple[int, int]] = []

    async def note(key: str, start: int, length: int) -> bytes:
        read.append((start, length))
        return bytes(range(start, start + length))

    async def ask() -> list[bytes]:
        reads = CoalescedReads(note, Capabilities())
        tasks = []
        for start in (0, 10, 30):
            tasks.append(asyncio.ensure_future(reads.get("key", start, 10)))
            await asyncio.sleep(0)
            if start == 10:
                await asyncio.sleep(0)  # the request begins
        return await asyncio.gather(*tasks)

    assert asyncio.run(ask()) == [bytes(range(at, at + 10)) for at in (0, 10, 30)]
    assert read == [(0, 20), (30, 10)]


def test_a_thousand_chunks_of_a_pack_are_a_few_requests(packed: MemoryStorage) -> None:
    counting = CountingStorage(packed)
    store = zm.open(LatencyStorage(counting, latency_s=0)).readonly_session("main").store
    array = zarr.open_array(store, path="a", mode="r")
    counting.reset()
    assert np.array_equal(array[:], values())
    # 1000 / 64 turns, but the first ones wait for metadata on threads and come one by one.
    assert len(reads(counting)) < 150
    counting.reset()
    assert np.array_equal(array[:], values())
    assert len(reads(counting)) <= 2 * CHUNKS // 64
    assert sum(reads(counting)) == values().nbytes


def test_where_calls_are_inline_each_chunk_is_read_by_itself(packed: MemoryStorage) -> None:
    counting = CountingStorage(packed)
    store = warm(counting)
    counting.reset()
    zarr.open_array(store, path="a", mode="r")[:100]
    assert reads(counting) == [ROW * 4] * 100


@pytest.mark.parametrize(
    ("gap_chunks", "span_chunks", "expected"),
    [
        (1, 100, [10]),
        (0, 100, [5, 4]),
        (1, 6, [5, 4]),
        (1, 7, [7, 3]),
        (1, 1, [1] * 9),
        (0, 0, [1] * 9),
    ],
)
def test_requests_keep_to_the_bounds_that_the_storage_names(
    packed: MemoryStorage, gap_chunks: int, span_chunks: int, expected: list[int]
) -> None:
    counting = CountingStorage(packed)
    chunk = ROW * 4
    store = warm(Bounded(counting, gap_chunks * chunk, span_chunks * chunk))
    counting.reset()

    rows = (8, 0, 4, 2, 6, 1, 9, 3, 7)  # all but the fifth

    async def all_but_one() -> list[bytes | None]:
        return await asyncio.gather(*(get(store, row) for row in rows))

    found = asyncio.run(all_but_one())
    assert found == [values()[row].tobytes() for row in rows]
    assert [nbytes // chunk for nbytes in reads(counting)] == expected


def test_bounds_below_zero_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="must be 0 or more"):
        Capabilities(gap_bytes=-1)
    with pytest.raises(InvalidArgumentError, match="must be 0 or more"):
        Capabilities(span_bytes=-1)


def test_a_damaged_chunk_is_an_error_of_its_own_reader_only(packed: MemoryStorage) -> None:
    place = ROW * 4 * 500 + 7

    def damaged(data: bytes) -> bytes:
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    counting = CountingStorage(copy_of(packed, damaged))
    store = warm(LatencyStorage(counting, latency_s=0))
    counting.reset()

    async def around() -> list[bytes | BaseException | None]:
        calls = (get(store, row) for row in range(490, 511))
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(around())
    whole = ROW * 4
    assert reads(counting) == [21 * whole, whole]  # and the damaged one once more
    assert isinstance(found[10], CorruptObjectError)
    assert found[:10] == [values()[row].tobytes() for row in range(490, 500)]
    assert found[11:] == [values()[row].tobytes() for row in range(501, 511)]


def test_what_lies_beyond_the_end_of_a_cut_pack_is_an_error_and_the_rest_is_read(
    packed: MemoryStorage,
) -> None:
    storage = copy_of(packed, lambda data: data[: ROW * 4 * 10 + 5])
    store = warm(LatencyStorage(storage, latency_s=0))

    async def around() -> list[bytes | BaseException | None]:
        calls = (get(store, row) for row in range(5, 15))
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(around())
    assert found[:5] == [values()[row].tobytes() for row in range(5, 10)]
    assert all(isinstance(error, CorruptObjectError) for error in found[5:])
    assert "ends after 5 of 4096 bytes" in str(found[5])


def test_a_missing_pack_is_an_error_for_each_that_needs_it(packed: MemoryStorage) -> None:
    storage = copy_of(packed, lambda data: data)
    store = warm(LatencyStorage(storage, latency_s=0))
    storage.delete_many([pack_of(storage)])

    async def some() -> list[bytes | BaseException | None]:
        return await asyncio.gather(*(get(store, row) for row in range(3)), return_exceptions=True)

    assert all(isinstance(error, MissingChunkError) for error in asyncio.run(some()))


def test_a_request_that_fails_is_an_error_for_those_in_it_and_no_others(
    packed: MemoryStorage,
) -> None:
    gated = Gated(packed)
    store = warm(gated)

    async def main() -> tuple[list[bytes | BaseException | None], bytes | None]:
        gated.gate, gated.error = asyncio.Event(), StorageError("no answer")
        first = asyncio.gather(get(store, 0), get(store, 1), return_exceptions=True)
        await until(lambda: gated.begun == 1)
        gated.gate.set()
        failed = await first
        gated.error = None
        return failed, await get(store, 1)

    failed, after = asyncio.run(main())
    assert [str(error) for error in failed] == ["no answer", "no answer"]
    assert after == values()[1].tobytes()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - what is waited for cannot say so
            await asyncio.sleep(0)


def test_one_that_is_cancelled_leaves_the_others_alone(packed: MemoryStorage) -> None:
    gated = Gated(packed)
    store = warm(gated)

    async def main() -> list[bytes | None]:
        gated.gate = asyncio.Event()
        tasks = [asyncio.create_task(get(store, row)) for row in range(3)]
        await until(lambda: gated.begun == 1)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert tasks[0].cancelled()
        gated.gate.set()
        return await asyncio.gather(*tasks[1:])

    assert asyncio.run(main()) == [values()[row].tobytes() for row in (1, 2)]
    assert (gated.begun, gated.cancelled) == (1, 0)


def test_one_that_is_cancelled_before_the_turn_ends_is_not_fetched(packed: MemoryStorage) -> None:
    counting = CountingStorage(packed)
    store = warm(LatencyStorage(counting, latency_s=0))
    counting.reset()

    async def main() -> bytes | None:
        cancelled, other = (asyncio.create_task(get(store, row)) for row in (0, 1))
        asyncio.get_running_loop().call_soon(cancelled.cancel)
        found = await other
        assert cancelled.cancelled()
        return found

    assert asyncio.run(main()) == values()[1].tobytes()
    assert reads(counting) == [ROW * 4]


def test_a_request_that_nobody_waits_for_is_cancelled(packed: MemoryStorage) -> None:
    gated = Gated(packed)
    store = warm(gated)

    async def main() -> None:
        gated.gate = asyncio.Event()
        tasks = [asyncio.create_task(get(store, row)) for row in range(3)]
        await until(lambda: gated.begun == 1)
        for task in tasks:
            task.cancel()
        await until(lambda: gated.cancelled == 1)
        assert all(task.cancelled() for task in tasks)

    asyncio.run(main())
    gated.gate = None
    assert asyncio.run(get(store, 1)) == values()[1].tobytes(), "another loop goes on"


@pytest.mark.slow
def test_loops_of_several_threads_do_not_mix(packed: MemoryStorage) -> None:
    store = warm(LatencyStorage(packed, latency_s=0))
    found: dict[int, list[bytes | None]] = {}
    start = threading.Barrier(4)

    def read(first: int) -> None:
        async def main() -> list[bytes | None]:
            return await asyncio.gather(*(get(store, row) for row in range(first, first + 100)))

        start.wait()
        found[first] = asyncio.run(main())

    threads = [threading.Thread(target=read, args=(first,)) for first in range(0, 400, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for first in range(0, 400, 100):
        assert found[first] == [values()[row].tobytes() for row in range(first, first + 100)]


def test_a_loop_that_was_closed_in_the_middle_of_a_turn_keeps_none_waiting(
    packed: MemoryStorage,
) -> None:
    store = warm(LatencyStorage(packed, latency_s=0))

    loop = asyncio.new_event_loop()
    left = loop.create_task(get(store, 1))
    loop.call_soon(loop.stop)  # after it has asked, before the turn is over
    loop.run_forever()
    loop.close()
    assert not left.done()

    async def again() -> bytes | None:
        async with asyncio.timeout(60):
            return await get(store, 2)

    assert asyncio.run(again()) == values()[2].tobytes()


def test_parts_of_chunks_are_fetched_together(packed: MemoryStorage) -> None:
    counting = CountingStorage(packed)
    store = warm(LatencyStorage(counting, latency_s=0))
    counting.reset()
    parts = [("a/c/5/0", RangeByteRequest(8 * i, 8 * i + 4)) for i in range(50)]
    wanted = [*parts, ("a/c/6/0", None), ("a/c/nowhere", None)]
    found = asyncio.run(store.get_partial_values(PROTOTYPE, wanted))
    row = values()[5].tobytes()
    expected = [row[8 * i : 8 * i + 4] for i in range(50)]
    assert [None if part is None else part.to_bytes() for part in found] == [
        *expected,
        values()[6].tobytes(),
        None,
    ]
    assert reads(counting) == [8 * 49 + 4, ROW * 4], "the gap before the whole chunk is too large"


def test_parts_of_many_shards_are_fetched_together() -> None:
    storage = MemoryStorage()
    session = zm.create(storage).writable_session("main")
    array = zarr.create_array(
        session.store,
        name="a",
        shape=(64, 64),
        chunks=(8, 8),
        shards=(16, 16),
        dtype="i4",
        compressors=None,
    )
    data = np.arange(64 * 64, dtype=np.int32).reshape(64, 64) + 1
    array[:] = data
    session.commit("shards")
    counting = CountingStorage(storage)
    store = zm.open(LatencyStorage(counting, latency_s=0)).readonly_session("main").store
    read = zarr.open_array(store, path="a", mode="r")
    assert np.array_equal(read[:], data)
    counting.reset()
    assert np.array_equal(read[:8, :], data[:8, :])
    # The index of each of the four shards, then two parts of each.
    assert len(reads(counting)) < 4 + 2 * 4


def test_a_session_reads_its_own_chunks_and_those_of_its_snapshot(packed: MemoryStorage) -> None:
    repo = zm.open(LatencyStorage(copy_of(packed, bytes), latency_s=0))
    session = repo.writable_session("main")
    array = zarr.open_array(session.store, path="a", mode="r+")
    array[3] = 7
    expected = values()
    expected[3] = 7
    assert np.array_equal(array[:20], expected[:20])
    with zm.tune_zarr():
        assert np.array_equal(array[:20], expected[:20])
