"""Large chunks: read by threads where an event loop waits, and written from where they lie."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import cpu, default_buffer_prototype

import zarr_manifests as zm
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import Call, WrappedStorage

PROTOTYPE = default_buffer_prototype()
LARGE = 512 * 1024


class Threads(WrappedStorage):
    """Notes which thread makes the reads of chunks."""

    def __init__(self, storage: MemoryStorage) -> None:
        super().__init__(storage)
        self.seen: list[int] = []

    def _around[R](self, call: Call[R]) -> R:
        if call.key.startswith("chunks/"):
            self.seen.append(threading.get_ident())
        return call.run()

    async def _around_async[R](self, call: Call[R], run: object) -> R:
        return self._around(call)


def written(length: int) -> MemoryStorage:
    storage = MemoryStorage()
    session = zm.create(storage).writable_session("main")
    array = zarr.create_array(
        session.store, name="a", shape=(length,), chunks=(length,), dtype="u1", compressors=None
    )
    array[:] = 7
    session.commit("one chunk")
    return storage


@pytest.mark.parametrize("length", [LARGE - 1, LARGE])
def test_a_large_chunk_is_read_by_a_thread(length: int) -> None:
    storage = Threads(written(length))
    store = zm.open(storage).readonly_session("main").store
    found = asyncio.run(store.get("a/c/0", PROTOTYPE))
    assert found is not None
    assert found.to_bytes() == bytes([7]) * length
    here = threading.get_ident()
    assert [seen == here for seen in storage.seen] == [length < LARGE]
    storage.seen.clear()
    part = asyncio.run(store.get("a/c/0", PROTOTYPE, RangeByteRequest(8, 16)))
    assert part is not None
    assert part.to_bytes() == bytes([7]) * 8
    assert storage.seen == [here]


def test_a_large_chunk_that_is_damaged_is_an_error_there_too() -> None:
    storage = written(LARGE)
    key = next(iter(storage.list("chunks/"))).key
    storage.put(key, b"8" + storage.get(key)[1:])
    store = zm.open(storage).readonly_session("main").store
    with pytest.raises(CorruptObjectError, match="does not match its checksum"):
        asyncio.run(store.get("a/c/0", PROTOTYPE))


# --- written without a copy ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_large_chunk_is_what_it_was_when_it_was_set(kind: str, tmp_path: Path) -> None:
    repository = zm.create(MemoryStorage() if kind == "memory" else tmp_path / "r")
    session = repository.writable_session()
    data = np.arange(1 << 20, dtype=np.uint8)
    array = zarr.create_array(
        session.store, name="a", shape=data.shape, chunks=data.shape, dtype="u1", compressors=None
    )
    array[:] = data
    due = data.copy()
    data[:] = 0  # what zarr gave to the store may have been a view of it
    assert np.array_equal(array[:], due)
    session.commit("large")
    assert np.array_equal(zarr.open_array(repository.readonly_session().store, path="a")[:], due)


def test_a_large_chunk_is_written_from_where_it_lies(tmp_path: Path) -> None:
    session = zm.create(tmp_path / "r").writable_session()
    length = 16 << 20
    zarr.create_array(
        session.store, name="a", shape=(length,), chunks=(length,), dtype="u1", compressors=None
    )
    value = cpu.Buffer.from_array_like(np.ones(length, np.uint8))
    tracemalloc.start()
    try:
        session.store.set_sync("a/c/0", value)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert session.store.get_sync("a/c/0", prototype=default_buffer_prototype()) is not None


def test_a_large_document_is_kept() -> None:
    session = zm.create(MemoryStorage()).writable_session()
    attributes = {"note": "x" * 600_000}
    zarr.create_group(session.store, path="g", attributes=attributes)
    session.commit("large document")
    assert zarr.open_group(session.store, path="g").attrs["note"] == attributes["note"]
