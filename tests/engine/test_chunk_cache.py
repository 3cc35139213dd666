"""Chunks' bytes kept in memory: when asked for, whole and sound ones, within a bound."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype

import zarr_manifests as zm
from inside import context_of
from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects.chunk_cache import ChunkCache
from zarr_manifests.error_cases import ConfigError, VirtualSourceChangedError
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import NativeRef
from zarr_manifests.metrics import Meter
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.testing import CountingStorage, LatencyStorage

SESSION = f"{1:012d}-{'ab' * 12}"
PROTOTYPE = default_buffer_prototype()
CHUNKS, ROW = 8, 1024


def ref(number: int, length: int) -> NativeRef:
    return NativeRef(SESSION, 0, number * length, length, number)


def cache_of(chunk_bytes: int) -> tuple[ChunkCache, Meter]:
    meter = Meter()
    return ChunkCache(CacheOptions(chunk_bytes=chunk_bytes), SYSTEM, meter), meter


def values() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 2**31, (CHUNKS, ROW), dtype=np.int32)


def written(storage: Storage) -> None:
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
    session.commit("eight chunks")


@pytest.fixture
def counting() -> CountingStorage:
    storage = CountingStorage(MemoryStorage("chunk-cache"))
    for info in [*storage.list()]:
        storage.delete_many([info.key])
    written(storage)
    storage.reset()
    return storage


def chunk_reads(counting: CountingStorage) -> int:
    return sum(record.key.startswith("chunks/") for record in counting.log)


def read(store: ManifestStore, row: int, part: RangeByteRequest | None = None) -> bytes:
    found = store.get_sync(f"a/c/{row}/0", byte_range=part)
    assert found is not None
    return found.to_bytes()


@pytest.mark.parametrize("far", [False, True])
def test_a_chunk_that_was_read_is_not_read_again(counting: CountingStorage, far: bool) -> None:
    storage = LatencyStorage(counting, latency_s=0) if far else counting
    repo = zm.open(storage, cache={"chunk-bytes": 1 << 20})
    for _ in range(3):  # sessions share it
        array = zarr.open_array(repo.readonly_session("main").store, path="a", mode="r")
        assert np.array_equal(array[:], values())
    reads = chunk_reads(counting)
    assert 1 <= reads <= CHUNKS
    assert (repo.metrics().chunk_cache_hits, repo.metrics().chunk_cache_misses) == (16, 8)
    store = repo.readonly_session("main").store
    assert read(store, 3, RangeByteRequest(8, 16)) == values()[3].tobytes()[8:16]
    assert chunk_reads(counting) == reads


def test_nothing_is_kept_unless_asked_for(counting: CountingStorage) -> None:
    repo = zm.open(counting)
    store = repo.readonly_session("main").store
    counting.reset()
    assert [read(store, 1) for _ in range(3)] == [values()[1].tobytes()] * 3
    assert chunk_reads(counting) == 3
    assert (repo.metrics().chunk_cache_hits, repo.metrics().chunk_cache_misses) == (0, 0)
    assert context_of(repo).chunks is None


def test_a_part_of_a_chunk_is_not_kept(counting: CountingStorage) -> None:
    repo = zm.open(counting, cache={"chunk-bytes": 1 << 20})
    store = repo.readonly_session("main").store
    counting.reset()
    part = RangeByteRequest(0, 8)
    assert [read(store, 1, part) for _ in range(2)] == [values()[1].tobytes()[:8]] * 2
    assert chunk_reads(counting) == 2, "nobody has checked them"
    assert read(store, 1) == values()[1].tobytes()
    assert chunk_reads(counting) == 3


def test_a_chunk_that_is_damaged_is_never_kept(counting: CountingStorage) -> None:
    pack = next(iter(counting.list("chunks/"))).key
    sound = counting.get(pack)
    counting.put(pack, sound[:5000] + bytes([sound[5000] ^ 1]) + sound[5001:])
    repo = zm.open(counting, cache={"chunk-bytes": 1 << 20})
    store = repo.readonly_session("main").store
    for _ in range(2):
        with pytest.raises(CorruptObjectError, match="does not match its checksum"):
            read(store, 1)
        with pytest.raises(CorruptObjectError, match="does not match its checksum"):
            asyncio.run(store.get("a/c/1/0", PROTOTYPE))
    assert read(store, 0) == values()[0].tobytes()
    counting.put(pack, sound)
    assert read(store, 1) == values()[1].tobytes()


def test_a_chunk_that_is_written_again_is_another(counting: CountingStorage) -> None:
    repo = zm.open(counting, cache={"chunk-bytes": 1 << 20})
    before = repo.readonly_session("main")
    assert read(before.store, 2) == values()[2].tobytes()
    session = repo.writable_session("main")
    zarr.open_array(session.store, path="a", mode="r+")[2] = 9
    session.commit("nine")
    assert read(repo.readonly_session("main").store, 2) == np.full(ROW, 9, np.int32).tobytes()
    assert read(before.store, 2) == values()[2].tobytes()


def test_the_bound_holds_and_what_was_used_last_stays() -> None:
    cache, meter = cache_of(100_000)
    for number in range(50):
        cache.keep(ref(number, 9_000), bytes(9_000))
        assert cache.nbytes <= 100_000
        assert cache.find(ref(0, 9_000)) is not None, "used all the time"
    kept = [n for n in range(50) if cache.find(ref(n, 9_000)) is not None]
    assert kept == [0, *range(51 - len(kept), 50)]
    assert len(kept) >= 9
    assert meter.read().cache_evicted_bytes >= (50 - len(kept)) * 9_000


def test_a_chunk_that_is_larger_than_the_room_is_not_kept() -> None:
    cache, _ = cache_of(10_000)
    cache.keep(ref(0, 5_000), bytes(5_000))
    cache.keep(ref(1, 10_000), bytes(10_000))
    assert cache.nbytes <= 10_000
    assert cache.find(ref(1, 10_000)) is None
    assert cache.find(ref(0, 5_000)) == bytes(5_000)


def test_threads_may_use_it_at_once() -> None:
    cache, meter = cache_of(50_000)
    errors: list[str] = []
    start = threading.Barrier(4)

    def use(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        for number in rng.integers(0, 30, 2000).tolist():
            found = cache.find(ref(number, 4_000))
            if found is None:
                cache.keep(ref(number, 4_000), bytes([number]) * 4_000)
            elif found != bytes([number]) * 4_000:
                errors.append(f"{number} is another chunk")
            if cache.nbytes > 50_000:
                errors.append(f"{cache.nbytes} bytes are kept")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    counted = meter.read()
    assert counted.chunk_cache_hits + counted.chunk_cache_misses == 8000


def test_it_does_not_travel(counting: CountingStorage, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "r")
    written(storage)
    repo = zm.open(storage, cache={"chunk-bytes": 1 << 20})
    store = repo.readonly_session("main").store
    empty = len(pickle.dumps(store))
    for row in range(CHUNKS):
        read(store, row)
    pickled = pickle.dumps(store)
    assert len(pickled) == empty
    copy = pickle.loads(pickled)
    assert read(copy, 0) == values()[0].tobytes()
    chunks = contents_of(copy).context.chunks
    assert chunks is not None, "the option travels"
    assert chunks is not context_of(repo).chunks
    assert chunks.nbytes < context_of(repo).chunks.nbytes  # type: ignore[union-attr]


def test_virtual_chunks_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    file = tmp_path / "raw" / "a.bin"
    file.write_bytes(bytes(range(8)))
    repo = zm.create(
        MemoryStorage(),
        virtual_containers={"raw": tmp_path / "raw"},
        cache={"chunk-bytes": 1 << 20},
    )
    store = repo.writable_session("main").store
    array = zarr.create_array(
        store, name="a", shape=(8,), chunks=(8,), dtype="u1", compressors=None
    )
    store.set_virtual_refs("a", [[0]], ["virtual://raw/a.bin"], [0], [0], [8], sizes=[8])
    assert array[:].tolist() == [*range(8)]
    file.write_bytes(bytes(9))
    with pytest.raises(VirtualSourceChangedError):
        array[:]
    assert context_of(repo).chunks is not None
    assert context_of(repo).chunks.nbytes == 0


@pytest.mark.parametrize("wrong", [-1, True, "1"])
def test_a_bound_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="chunk"):
        CacheOptions(chunk_bytes=wrong)


def test_the_bound_is_not_saved_with_a_repository() -> None:
    with pytest.raises(ConfigError, match="chunk-bytes: is not saved with a repository"):
        zm.create(MemoryStorage(), {"cache": {"chunk-bytes": 1}})
