"""Immutable objects: fetched once, whoever asks, and written once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects.metadata import Objects
from zarr_manifests.errors import CorruptObjectError, StorageError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import CountingStorage, Fault, FaultyStorage, LatencyStorage


def key(n: int) -> str:
    return f"deltas/{1:012d}-{'ab' * 12}/{n}"


def stored(
    storage: Storage, n: int, deleted: Mapping[str, bytes] | None = None
) -> tuple[BlobRef, Delta]:
    delta = Delta(bytes([n]) * 16, deleted=deleted or {})
    storage.create(key(n), delta.encode())
    return BlobRef.to(key(n), delta.encode()), delta


def test_fetched_once() -> None:
    storage = MemoryStorage()
    counting = CountingStorage(storage)
    objects = Objects(counting, SYSTEM)
    ref, delta = stored(storage, 1)
    assert objects.load(ref, Delta) == delta
    assert objects.load(ref, Delta) is objects.load(ref.bare(), Delta)
    objects.prefetch([(ref, Delta), (ref, Delta)])
    assert counting.requests == 1
    counted = objects.meter.read()
    assert (counted.cache_misses, counted.cache_hits) == (1, 2)


def test_what_is_carried_along_or_remembered_is_not_fetched() -> None:
    storage = MemoryStorage()
    counting = CountingStorage(storage)
    objects = Objects(counting, SYSTEM)
    one, two = stored(storage, 1), stored(storage, 2)
    carried = replace(one[0], copy=one[1].encode())
    objects.prefetch([(carried, Delta)])
    assert objects.load(carried, Delta) == one[1]
    objects.remember(two[0], two[1])
    assert objects.load(two[0], Delta) is two[1]
    assert counting.requests == 0


@pytest.mark.parametrize(
    ("local", "nbytes", "threads"),
    [(False, 0, 30), (True, 0, 1), (True, 4_000, 4), (True, 50_000, 8)],
)
def test_a_local_disk_is_asked_by_few_threads_a_distant_storage_by_as_many_as_it_takes(
    tmp_path: Path, local: bool, nbytes: int, threads: int
) -> None:
    storage = LocalStorage(tmp_path / "r") if local else MemoryStorage()
    noise = np.random.default_rng(1).bytes(nbytes).hex()
    wanted = [stored(storage, n, {f"/{noise}": bytes(12)} if nbytes else {}) for n in range(30)]
    abreast = []

    def parallel(calls: Sequence[Callable[[], Any]]) -> list[Any]:
        abreast.append(len(calls))
        return [call() for call in calls]

    whole: Any = parallel
    objects = Objects(storage, replace(SYSTEM, parallel=whole))
    found = objects.load_all([(ref, Delta) for ref, _ in wanted])
    assert found == {ref.key: delta for ref, delta in wanted}
    assert abreast == [threads]


def test_threads_that_want_the_same_object_wait_for_one_fetch() -> None:
    storage = MemoryStorage()
    counting = CountingStorage(LatencyStorage(storage, latency_s=0.05))
    objects = Objects(counting, SYSTEM)
    ref, delta = stored(storage, 1)
    barrier = threading.Barrier(8)

    def load() -> Delta:
        barrier.wait()
        return objects.load(ref, Delta)

    assert SYSTEM.parallel([load] * 8) == [delta] * 8
    assert counting.requests == 1


def test_prefetch_is_one_round() -> None:
    storage = MemoryStorage()
    counting = CountingStorage(LatencyStorage(storage, latency_s=0))
    objects = Objects(counting, SYSTEM)
    refs = [stored(storage, n)[0] for n in range(8)]
    objects.prefetch([(ref, Delta) for ref in refs])
    assert (counting.requests, counting.rounds()) == (8, 1)


def test_a_failed_fetch_is_not_remembered() -> None:
    storage = MemoryStorage()
    objects = Objects(
        FaultyStorage(storage, [Fault("fail_before"), Fault("flip_bits", skip=1)]), SYSTEM
    )
    ref, delta = stored(storage, 1)
    with pytest.raises(StorageError):
        objects.load(ref, Delta)
    with pytest.raises(CorruptObjectError):
        objects.load(ref, Delta)
    assert objects.load(ref, Delta) == delta


def test_a_failed_fetch_fails_for_all_who_wait() -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(LatencyStorage(storage, latency_s=0.05), [Fault("fail_after")])
    objects = Objects(faulty, SYSTEM)
    ref, delta = stored(storage, 1)
    barrier = threading.Barrier(4)
    outcomes: list[object] = []

    def load() -> None:
        barrier.wait()
        try:
            outcomes.append(objects.load(ref, Delta))
        except StorageError as error:
            outcomes.append(type(error))

    SYSTEM.parallel([load] * 4)
    assert StorageError in outcomes
    assert set(map(str, outcomes)) <= {str(StorageError), str(delta)}
    assert objects.load(ref, Delta) == delta


def test_the_cache_is_bounded_in_bytes_and_drops_what_was_not_used() -> None:
    storage = MemoryStorage()
    counting = CountingStorage(storage)
    refs = [stored(storage, n)[0] for n in range(4)]
    whole = Objects(storage, SYSTEM)
    whole.prefetch([(ref, Delta) for ref in refs[:3]])
    objects = Objects(counting, SYSTEM, CacheOptions(max_size=whole.cache.nbytes))
    for ref in refs[:3]:
        objects.load(ref, Delta)
    objects.load(refs[0], Delta)
    objects.load(refs[3], Delta)  # in place of the second
    counting.reset()
    for n in (0, 2, 3):
        objects.load(refs[n], Delta)
    assert counting.requests == 0
    objects.load(refs[1], Delta)
    assert counting.requests == 1


def test_missing_longer_and_of_another_kind() -> None:
    storage = MemoryStorage()
    ref, delta = stored(storage, 1)
    with pytest.raises(CorruptObjectError, match=f"{key(9)} is referenced and not there"):
        Objects(storage, SYSTEM).load(replace(ref, key=key(9)), Delta)
    with pytest.raises(CorruptObjectError, match=f"{key(1)}: .*kind"):
        Objects(storage, SYSTEM).load(ref, Snapshot)
    storage.put(key(1), delta.encode() + b"\0")
    with pytest.raises(CorruptObjectError, match="its pointer says"):
        Objects(storage, SYSTEM).load(ref, Delta)


def test_what_is_cached_is_no_answer_to_another_pointer() -> None:
    storage = MemoryStorage()
    ref, delta = stored(storage, 1)
    objects = Objects(storage, SYSTEM)
    assert objects.load(ref, Delta) == delta
    for other in (replace(ref, crc32c=ref.crc32c ^ 1), replace(ref, length=ref.length + 1)):
        with pytest.raises(CorruptObjectError, match="its pointer"):
            objects.load(other, Delta)
    with pytest.raises(CorruptObjectError, match="kind"):
        objects.load(ref, Snapshot)


def test_create_is_put_if_absent_and_takes_its_own_bytes_for_success() -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage, [Fault("lose_answer", op="create")])
    objects = Objects(faulty, SYSTEM)
    objects.create(key(1), b"mine")
    assert storage.get(key(1)) == b"mine"
    objects.create(key(1), b"mine")
    with pytest.raises(StorageError, match="exists with other bytes"):
        objects.create(key(1), b"theirs")
    assert storage.get(key(1)) == b"mine"
