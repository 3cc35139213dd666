"""Requests of reads and compactions of manifests of several blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from filled import Clock, opened
from inside import apart_ids, small_blocks
from specified import contents, reader
from storages import CountingStorage
from zarr_manifests import Repository
from zarr_manifests.storage.memory import MemoryStorage

CHUNKS = 4096
CONFIG = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 64}


@pytest.fixture(autouse=True)
def _blocks() -> Iterator[None]:
    with small_blocks():
        yield


def in_turn(sessions: int) -> CountingStorage:
    """An array whose chunks so many sessions wrote in turn, compacted."""
    storage = CountingStorage(MemoryStorage())
    repository = zm.create(storage, {**CONFIG, "inline-chunk-bytes": 0})
    with repository.transaction(message="create") as store:
        zarr.create_array(store, name="a", shape=(512,), chunks=(1,), dtype="i8", compressors=None)
    for number in range(sessions):
        with repository.transaction(message="write") as store:
            array = zarr.open_array(store, path="a", mode="r+")
            array[number::sessions] = np.arange(number, 512, sessions) + 1
    repository.compact()
    return storage


def manifest_bytes(storage: CountingStorage) -> int:
    return sum(each.nbytes for each in storage.list("manifests/"))


@pytest.fixture
def storage() -> CountingStorage:
    """An array with half of its chunks, in the many blocks of one manifest."""
    storage = CountingStorage(MemoryStorage())
    repository = zm.create(storage, CONFIG)
    write(repository, slice(None), seed=0)
    repository.compact()
    storage.reset()
    return storage


def write(repository: Repository, where: slice, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 2**40, CHUNKS) * (rng.random(CHUNKS) < 0.5)
    with repository.transaction(message="write") as store:
        group = zarr.open_group(store, mode="a")
        if "a" not in group:
            group.create_array("a", shape=(CHUNKS,), chunks=(1,), dtype="i8", compressors=None)
        group["a"][where] = values[where]


def manifests_read(storage: CountingStorage) -> int:
    found = sum(each.op == "get" and each.key.startswith("manifests/") for each in storage.log)
    storage.reset()
    return found


@pytest.mark.parametrize("cache", [{}, {"max-size": 100_000}, {"max-size": 0}])
def test_a_scan_reads_all_blocks_in_one_request(storage: CountingStorage, cache: Any) -> None:
    """However little of it the cache keeps."""
    session = zm.open(storage, cache=cache).readonly_session()
    for _ in range(3):
        assert len(session.chunk_refs("a")) > CHUNKS // 3
        assert manifests_read(storage) <= 1


def test_after_idling_a_scan_reads_all_blocks_in_one_request(storage: CountingStorage) -> None:
    session = opened(storage, clock := Clock()).readonly_session()
    for _ in range(2):
        session.chunk_refs("a")
        assert manifests_read(storage) == 1
        clock.ms += 301_000


@pytest.mark.parametrize("size", [0, 50_000, 1 << 28])
def test_a_compaction_reads_the_blocks_it_needs_together(
    storage: CountingStorage, size: int
) -> None:
    write(zm.open(storage), slice(None, None, 2), seed=1)
    storage.reset()
    zm.open(storage, cache={"max-size": size}).compact()
    assert 0 < manifests_read(storage) <= 6
    assert zm.open(storage).verify().ok


def test_chunks_here_and_there_read_no_large_manifest_again_and_again(
    storage: CountingStorage,
) -> None:
    session = zm.open(storage, cache={"max-size": 20_000}).readonly_session()
    array = zarr.open_array(session.store, path="a", mode="r")
    storage.reset()
    for at in np.random.default_rng(2).permutation(CHUNKS)[:100].tolist():
        assert array[at] >= 0
    assert storage.bytes_read < 400_000  # blocks of 1 kB; the manifest has more than 20 kB


def test_ids_of_sessions_that_many_leaves_name_are_stored_once() -> None:
    storage = in_turn(sessions=16)
    with apart_ids():
        each = in_turn(sessions=16)
    assert manifest_bytes(storage) < manifest_bytes(each) * 0.8
    for cache in ({}, {"max-size": 0}):
        session = zm.open(storage, cache=cache).readonly_session()
        storage.reset()
        assert len(session.chunk_refs("a")) == 512
        assert manifests_read(storage) == 1  # the ids lie beside the leaves
    assert reader.Reader(storage.get).read(session.snapshot_id) == contents(session.store)
    assert (zarr.open_array(session.store, path="a", mode="r")[:] == np.arange(512) + 1).all()
    assert zm.open(storage).verify().ok
