"""Chunks that are read in order from far away are fetched before Zarr asks for them.

What runs in the background runs at once, so that counts depend on neither threads nor time.
"""

from __future__ import annotations

import numpy as np
import pytest
import zarr
from msgspec.structs import replace

import zarr_manifests as zm
from storages import CountingStorage, LatencyStorage
from zarr_manifests.errors import StorageError
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import Capabilities

AT_ONCE = replace(SYSTEM, background=lambda call: call())
CHUNKS, CELLS, LEAF = 1000, 64, 300
CHUNK_BYTES = 4 * CELLS
FAR = Capabilities(inline=False, gap_bytes=4 * CHUNK_BYTES, span_bytes=64 * CHUNK_BYTES)
VALUES = np.arange(CHUNKS * CELLS).reshape(CHUNKS, CELLS)


@pytest.fixture(scope="module")
def filled() -> MemoryStorage:
    """An array in several leaves."""
    storage = MemoryStorage()
    config = {
        "inline-chunk-bytes": 0,
        "pack-bytes": 50_000,
        "compaction": {"mode": "manual"},
        "chunk-manifests": {
            "sets": [{"default": {"max-manifest-size": LEAF}}],
            "rules": [],
            "splitting": [{"path": ".*", "along": {"0": LEAF}}],
            "preload": {"max-manifests": 0},
        },
    }
    repository = zm.create(storage, config)
    with repository.transaction(message="fill") as store:
        array = zarr.create_array(
            store, name="a", shape=VALUES.shape, chunks=(1, CELLS), dtype="i4", compressors=None
        )
        array[:] = VALUES
    repository.compact(mode="full")
    return storage


class Far(CountingStorage):
    capabilities = FAR  # type: ignore[assignment]

    def read(self) -> tuple[int, float]:
        """Requests for chunks, and their bytes in chunks."""
        chunks = [record.nbytes for record in self.log if record.key.startswith("chunks/")]
        return len(chunks), sum(chunks) / CHUNK_BYTES


def opened(storage: MemoryStorage, runtime: Runtime = AT_ONCE) -> tuple[Far, zarr.Array]:
    far = Far(LatencyStorage(storage, latency_s=0))
    store = zm.open(far, runtime=runtime).readonly_session().store
    return far, zarr.open_array(store, path="a", mode="r")


def test_chunks_of_the_next_leaf_are_read_ahead(filled: MemoryStorage) -> None:
    """Its table is fetched in the background while chunks of this one are read."""
    far, array = opened(filled)
    with zarr.config.set({"async.concurrency": 1}):  # in order, however busy the machine is
        assert np.array_equal(array[:], VALUES)
    requests, chunks = far.read()
    assert CHUNKS <= chunks <= 1.13 * CHUNKS
    assert requests <= 70, "a thousand, one for each chunk"
    assert max(r.nbytes for r in far.log if r.key.startswith("chunks/")) <= FAR.span_bytes
    tables = [record.key for record in far.log if record.key.startswith("manifests/")]
    assert len(tables) == len(set(tables)) >= CHUNKS // LEAF, "each is fetched once"


class Failing(Far):
    """Requests for more than one chunk fail."""

    failed = False

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key.startswith("chunks/") and length is not None and length > 10 * CHUNK_BYTES:
            self.failed = True
            raise StorageError("the request has failed")
        return await super().get_async(key, start, length)


def test_a_span_that_fails_fails_no_chunk(filled: MemoryStorage) -> None:
    far = Failing(LatencyStorage(filled, latency_s=0))
    store = zm.open(far, runtime=AT_ONCE).readonly_session().store
    assert np.array_equal(zarr.open_array(store, path="a", mode="r")[:], VALUES)
    assert far.failed
