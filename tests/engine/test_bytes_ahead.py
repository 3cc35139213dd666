"""Chunks that are read in order from far away are fetched before Zarr asks for them.

Where requests are counted, what runs in the background runs at once, so that counts depend on
neither threads nor time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.engine.objects import bytes_ahead
from zarr_manifests.engine.objects.bytes_ahead import BytesAhead
from zarr_manifests.errors import CorruptObjectError, MissingChunkError, StorageError
from zarr_manifests.format.chunk_table import NativeRef, VirtualRef
from zarr_manifests.planning.tables import byte_ranges
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import Capabilities
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.testing import CountingStorage, LatencyStorage, copy_of

AT_ONCE = replace(SYSTEM, background=lambda call: call())
CHUNKS, MANY, CELLS = 1000, 2000, 64
CHUNK_BYTES = 4 * CELLS
FAR = Capabilities(inline=False, gap_bytes=4 * CHUNK_BYTES, span_bytes=64 * CHUNK_BYTES)


CONFIG = {"inline-chunk-bytes": 0, "pack-bytes": 50_000, "compaction": {"mode": "manual"}}
VALUES = np.arange(MANY * CELLS).reshape(MANY, CELLS)


def _fill(storage: MemoryStorage, *stops: int, **config: Any) -> Repository:
    """An array whose first rows are written by one commit, and the others appended by more."""
    repository = zm.create(storage, {**CONFIG, **config})
    with repository.transaction(message="fill") as store:
        array = zarr.create_array(
            store,
            name="a",
            shape=(stops[0], CELLS),
            chunks=(1, CELLS),
            dtype="i4",
            compressors=None,
        )
        array[:] = VALUES[: stops[0]]
    repository.compact(mode="full")
    for start, stop in itertools.pairwise(stops):
        with repository.transaction(message="append") as store:
            array = zarr.open_array(store, path="a")
            array.resize((stop, CELLS))
            array[start:] = VALUES[start:stop]
    return repository


@pytest.fixture(scope="module")
def filled() -> MemoryStorage:
    storage = MemoryStorage()
    _fill(storage, CHUNKS)
    return storage


class _Far(CountingStorage):
    capabilities = FAR  # type: ignore[assignment]


def _opened(storage: MemoryStorage, **options: Any) -> tuple[_Far, zarr.Array]:
    far = _Far(LatencyStorage(storage, latency_s=0))
    store = zm.open(far, **{"runtime": AT_ONCE, **options}).readonly_session().store
    array = zarr.open_array(store, path="a", mode="r")
    array[0], array[900]  # further refs need no request
    far.reset()
    return far, array


def _read(far: _Far) -> tuple[int, float]:
    """Requests for chunks, and their bytes in chunks."""
    chunks = [record.nbytes for record in far.log if record.key.startswith("chunks/")]
    return len(chunks), sum(chunks) / CHUNK_BYTES


def test_a_full_read_takes_few_requests_and_reads_no_chunk_twice(filled: MemoryStorage) -> None:
    far, array = _opened(filled)
    assert np.array_equal(array[:], VALUES[:CHUNKS])
    requests, chunks = _read(far)
    assert CHUNKS <= chunks <= 1.13 * CHUNKS, "some that are asked for a little later are gaps"
    assert requests <= 70, "a hundred, ten chunks at a time"
    assert max(record.nbytes for record in far.log) <= FAR.span_bytes


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests are begun at once, each time."""
    found: list[int] = []
    true = BytesAhead.fetch

    def noted(self: BytesAhead, refs: Any) -> None:
        true(self, refs)
        found.append(len({id(span) for span in self._newest.values()}))

    monkeypatch.setattr(BytesAhead, "fetch", noted)
    return found


def _check_full_read(far: _Far, array: zarr.Array, at_once: list[int]) -> None:
    values = array[:]
    assert np.array_equal(values[40:], VALUES[40:])
    assert (values[:40] == -1).all()
    requests, chunks = _read(far)
    assert MANY <= chunks <= 1.13 * MANY
    assert requests <= 120, "two hundred, ten chunks at a time"
    assert max(at_once) >= 8
    assert max(record.nbytes for record in far.log) <= FAR.span_bytes


def test_an_array_that_grows_every_day_is_read_as_one_that_does_not(at_once: list[int]) -> None:
    """Base and live deltas: most arrays of most users."""
    storage = MemoryStorage()
    repository = _fill(storage, 1000, *range(1050, MANY + 1, 50))
    with repository.transaction(message="overwrite") as store:
        zarr.open_array(store, path="a")[:40] = -1
    _check_full_read(*_opened(storage), at_once)


@pytest.mark.parametrize("leaf", [50, 300])
def test_chunks_of_the_next_leaf_are_read_ahead(at_once: list[int], leaf: int) -> None:
    """Its table is fetched in the background while chunks of this one are read."""
    sets = {
        "sets": [{"default": {"max-manifest-size": leaf}}],
        "rules": [],
        "splitting": [{"path": ".*", "along": {"0": leaf}}],
        "preload": {"max-manifests": 0},
    }
    storage = MemoryStorage()
    repository = _fill(storage, MANY, **{"chunk-manifests": sets})
    with repository.transaction(message="overwrite") as store:
        zarr.open_array(store, path="a")[:40] = -1
    repository.compact(mode="full")
    far, array = _opened(storage)
    _check_full_read(far, array, at_once)
    tables = [record.key for record in far.log if record.key.startswith("manifests/")]
    assert len(tables) == len(set(tables)) >= MANY // leaf - 2, "each is fetched once"


@pytest.mark.parametrize(
    ("wanted", "most"), [(10, 12), (30, 34), (60, 112), (125, 230), (200, 370), (500, 1000)]
)
def test_a_part_reads_not_much_in_vain(filled: MemoryStorage, wanted: int, most: int) -> None:
    far, array = _opened(filled)
    first = 100
    assert array[first : first + wanted, 0].tolist() == [
        CELLS * i for i in range(first, first + wanted)
    ]
    assert wanted <= _read(far)[1] <= most


@pytest.fixture
def nothing_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for large chunks."""
    monkeypatch.setattr(byte_ranges, "_FREE_BYTES", 0)


@pytest.mark.usefixtures("nothing_free")
def test_of_chunks_here_and_there_few_bytes_are_read_in_vain(filled: MemoryStorage) -> None:
    far, array = _opened(filled)
    for seed in range(5):
        here = sorted(random.Random(seed).sample(range(CHUNKS), 100))
        assert array.oindex[here, 0].tolist() == [CELLS * i for i in here]
    assert _read(far)[1] <= 5 * 115


@pytest.mark.usefixtures("nothing_free")
@pytest.mark.parametrize("before", [0, 600])
@pytest.mark.parametrize("step", [3, 5])
def test_every_few_chunks_are_read_alone(filled: MemoryStorage, step: int, before: int) -> None:
    """They are nearly in order, so refs are made ahead, but bytes are not fetched.

    Not even after another read of the array, in order.
    """
    far, array = _opened(filled)
    array[:before]
    far.reset()
    assert array[::step, 0].tolist() == [CELLS * i for i in range(0, CHUNKS, step)]
    assert _read(far)[1] <= 1.15 * CHUNKS / step


async def _unasked(ref: NativeRef | VirtualRef, start: int, length: int) -> bytes:
    raise AssertionError("a thread has taken it")


def _refs(store: ManifestStore) -> list[NativeRef]:
    refs = [contents_of(store).find(f"a/c/{i}/0") for i in range(CHUNKS)]
    return [ref for ref in refs if isinstance(ref, NativeRef)]


def test_eight_spans_and_more_are_in_flight() -> None:
    together = threading.Barrier(9)

    def read(ref: NativeRef | VirtualRef, start: int, length: int) -> bytes:
        together.wait(timeout=20)
        return bytes(length)

    ahead = BytesAhead(read, _unasked, SYSTEM, FAR)
    refs = [NativeRef("s", i // 256, i % 256 * CHUNK_BYTES, CHUNK_BYTES, 0) for i in range(512)]
    ahead.fetch(refs)
    together.wait(timeout=20)

    async def take() -> list[bytes | None]:
        return [await ahead.take(ref) for ref in refs]

    assert asyncio.run(take()) == [bytes(CHUNK_BYTES)] * 512
    assert asyncio.run(take()) == [None] * 512, "each is given to one caller"


def test_no_more_is_fetched_than_may_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytes_ahead, "MOST_BYTES", 100 * CHUNK_BYTES)
    read: list[int] = []

    def note(ref: NativeRef | VirtualRef, start: int, length: int) -> bytes:
        read.append(length)
        return bytes(length)

    ahead = BytesAhead(note, _unasked, AT_ONCE, FAR)
    refs = [NativeRef("s", 0, i * CHUNK_BYTES, CHUNK_BYTES, 0) for i in range(512)]
    ahead.fetch(refs)
    assert sum(read) == 100 * CHUNK_BYTES
    ahead.fetch(refs[200:210])
    assert asyncio.run(ahead.take(refs[0])) is not None
    ahead.fetch(refs[300:310])
    assert asyncio.run(ahead.take(refs[1])) is None, "two windows are held"


def test_who_finds_no_thread_at_work_sends_the_request(filled: MemoryStorage) -> None:
    """The threads may all be waiting for the caller, or the interpreter be ending."""

    def refuse(call: Any) -> None:
        raise RuntimeError("no more threads")

    for background in (lambda call: None, refuse):
        far, array = _opened(filled, runtime=replace(SYSTEM, background=background))
        assert np.array_equal(array[:], VALUES[:CHUNKS])
        requests, chunks = _read(far)
        assert CHUNKS <= chunks <= 1.13 * CHUNKS
        assert requests <= 70, "a hundred, ten chunks at a time"


def test_a_forked_child_starts_without(
    filled: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, array = _opened(filled)
    array[:200]
    monkeypatch.setattr(bytes_ahead.os, "getpid", lambda: -1)
    far.reset()
    assert array[200:230, 0].tolist() == [CELLS * i for i in range(200, 230)]
    assert _read(far)[1] >= 30


class _Failing(_Far):
    """Requests for more than one chunk fail."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key.startswith("chunks/") and length is not None and length > 10 * CHUNK_BYTES:
            raise StorageError("the request has failed")
        return super().get(key, start, length)


def test_a_span_that_fails_fails_no_chunk(filled: MemoryStorage) -> None:
    far = _Failing(LatencyStorage(filled, latency_s=0))
    store = zm.open(far, runtime=AT_ONCE).readonly_session().store
    values = zarr.open_array(store, path="a", mode="r")[:]
    assert np.array_equal(values, VALUES[:CHUNKS])


@pytest.mark.parametrize("fault", ["missing", "short", "changed"])
def test_what_is_damaged_is_never_given(filled: MemoryStorage, fault: str) -> None:
    storage = copy_of(filled)
    ref = _refs(zm.open(storage).readonly_session().store)[500]
    data = storage.get(ref.key)
    storage.delete_many([ref.key])
    at = ref.offset
    if fault == "short":
        storage.put(ref.key, data[: at + 5])
    elif fault == "changed":
        storage.put(ref.key, data[:at] + bytes(5) + data[at + 5 :])
    _, array = _opened(storage)
    with pytest.raises(MissingChunkError if fault == "missing" else CorruptObjectError):
        array[:]
    assert array[100, 0] == 100 * CELLS


def test_what_a_cache_holds_is_not_fetched(filled: MemoryStorage) -> None:
    far, array = _opened(filled, cache={"chunk-bytes": 1 << 20})
    array[:]
    far.reset()
    assert np.array_equal(array[:], VALUES[:CHUNKS])
    assert _read(far) == (0, 0)


def test_parts_of_chunks_are_not_fetched_ahead(filled: MemoryStorage) -> None:
    """As a sharded array reads them: its shards may be large."""
    from zarr.abc.store import RangeByteRequest

    far, array = _opened(filled)
    store, part = array.store, RangeByteRequest(0, 8)

    async def read() -> None:
        for i in range(200):
            await store.get(f"a/c/{i}/0", default_buffer_prototype(), part)

    asyncio.run(read())
    assert _read(far) == (200, 200 * 8 / CHUNK_BYTES)


def test_one_caller_that_is_cancelled_cancels_no_other() -> None:
    go, begun = threading.Event(), threading.Event()

    def read(ref: NativeRef | VirtualRef, start: int, length: int) -> bytes:
        begun.set()
        assert go.wait(20)
        return bytes(length)

    ahead = BytesAhead(read, _unasked, SYSTEM, FAR)
    refs = [NativeRef("s", 0, i * CHUNK_BYTES, CHUNK_BYTES, 0) for i in range(3)]
    ahead.fetch(refs)
    assert begun.wait(20)

    async def take() -> list[Any]:
        tasks = [asyncio.ensure_future(ahead.take(ref)) for ref in refs]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, *others = asyncio.run(take())
    assert isinstance(first, asyncio.CancelledError)
    assert others == [bytes(CHUNK_BYTES)] * 2


def test_a_writer_fetches_nothing_ahead(filled: MemoryStorage) -> None:
    far = _Far(LatencyStorage(copy_of(filled), latency_s=0))
    store = zm.open(far, runtime=AT_ONCE).writable_session().store
    array = zarr.open_array(store, path="a")
    far.reset()
    array[:200]
    assert 200 <= _read(far)[1] <= 1.13 * 200
