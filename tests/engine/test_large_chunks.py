"""Where a storage answers at once, an event loop has large chunks read by threads."""

from __future__ import annotations

import asyncio
import threading

import pytest
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype

from zarr_manifests import Repository
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.storage import MemoryStorage
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
    session = Repository.create(storage).writable_session("main")
    array = zarr.create_array(
        session.store, name="a", shape=(length,), chunks=(length,), dtype="u1", compressors=None
    )
    array[:] = 7
    session.commit("one chunk")
    return storage


@pytest.mark.parametrize("length", [LARGE - 1, LARGE])
def test_a_large_chunk_is_read_by_a_thread(length: int) -> None:
    storage = Threads(written(length))
    store = Repository.open(storage).readonly_session("main").store
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
    store = Repository.open(storage).readonly_session("main").store
    with pytest.raises(CorruptObjectError, match="does not match its checksum"):
        asyncio.run(store.get("a/c/0", PROTOTYPE))
