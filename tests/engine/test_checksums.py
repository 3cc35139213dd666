"""A chunk read whole is what was written: its checksum is looked at wherever its bytes lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.ids import crc32c
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of

CHUNK = bytes(range(256)) * 4


def repository(kind: str) -> tuple[Repository, MemoryStorage, str, int]:
    """One with a chunk of that kind; the storage and key of its bytes, and where they begin."""
    storage, files = MemoryStorage(), MemoryStorage(f"checksums-{kind}")
    pack_chunk_bytes = {"native": 0}.get(kind, 262_144)
    prefixes = {"files": f"memory://checksums-{kind}/in"}
    repository = zm.create(
        storage,
        {"pack-chunk-bytes": pack_chunk_bytes},
        virtual_containers=prefixes,
    )
    session = repository.writable_session()
    array = zarr.create_array(
        session.store, name="a", shape=(3 * 1024,), chunks=(1024,), dtype="u1", compressors=None
    )
    if kind == "virtual":
        files.put("in/f", b"before" + CHUNK)
        session.store.set_virtual_refs(
            "a", [[1]], [f"memory://checksums-{kind}/in/f"], [0], [6], [1024],
            checksums=[crc32c(CHUNK)],
        )  # fmt: skip
        held, key, start = files, "in/f", 6
    else:
        if kind == "pack":
            array[:1024] = 7
        array[1024:2048] = np.frombuffer(CHUNK, "u1")
    session.commit("a chunk")
    if kind != "virtual":
        ref: Any = contents_of(session.store).find("a/c/1")
        held, key, start = storage, ref.key, ref.offset
        assert start == (1024 if kind == "pack" else 0)
    return zm.open(storage, virtual_containers=prefixes), held, key, start


@pytest.mark.parametrize("kind", ["native", "pack", "virtual"])
async def test_a_flipped_bit_of_a_whole_chunk(kind: str) -> None:
    opened, held, key, start = repository(kind)
    store = opened.readonly_session().store
    read = contents_of(store).reader
    ref: Any = contents_of(store).find("a/c/1")
    assert zarr.open_array(store, path="a")[1024:2048].tobytes() == CHUNK
    data = bytearray(held.get(key))
    for at in (0, 511, 1023):
        damaged = bytearray(data)
        damaged[start + at] ^= 0x10
        held.put(key, bytes(damaged))
        with pytest.raises(CorruptObjectError, match="does not match its checksum"):
            read.read(ref, 0, 1024)
        with pytest.raises(CorruptObjectError, match="does not match its checksum"):
            await read.read_async(ref, 0, 1024)
        # A part of a chunk has no checksum of its own.
        assert read.read(ref, at, 1) == bytes([CHUNK[at] ^ 0x10])
    held.put(key, bytes(data))
    assert await read.read_async(ref, 0, 1024) == CHUNK
