"""What is kept in memory: bounded by its decoded size, made once, forgotten when idle."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from inside import context_of
from zarr_manifests import Repository, Session
from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects.decoded_cache import OBJECT, DecodedCache
from zarr_manifests.engine.objects.decoded_sizes import decoded_bytes
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable, NativeRef
from zarr_manifests.format.counts import Count
from zarr_manifests.format.delta import CommitKind, Delta
from zarr_manifests.format.envelope import Fields, pack, unpack
from zarr_manifests.format.manifest import Manifest, ManifestRef, Part
from zarr_manifests.format.nodes import Base, Node, NodeKind
from zarr_manifests.format.snapshot import _PARSED, DeltaEntry, Snapshot
from zarr_manifests.format.virtual_sources import VirtualSource, VirtualSources
from zarr_manifests.grid import Box
from zarr_manifests.metrics import Meter
from zarr_manifests.planning.tables.merge import Layer, merge_layers
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import Call, CountingStorage, WrappedStorage

_SESSION = f"{1:012d}-{'ab' * 12}"
_WHO = f"{_SESSION}-0", "5e" * 16
_NODE = b"n" * 12


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    @property
    def runtime(self) -> Runtime:
        return replace(SYSTEM, monotonic_s=lambda: self.now_s)


def table(rows: int, *, sparse: bool = True) -> ChunkTable:
    rng = np.random.default_rng(rows)
    box = Box((0,), (rows * (2 if sparse else 1),))
    lengths = rng.integers(1, 1000, rows)
    refs = [NativeRef(_SESSION, 0, i * 1000, int(n), i) for i, n in enumerate(lengths)]
    index = np.arange(rows, dtype=np.int64) * (2 if sparse else 1)
    return ChunkTable.build(box, index, refs)


def node(i: int) -> Node:
    document = b'{"zarr_format": 3, "node_type": "group", "attributes": {"i": %d}}' % i
    return Node(f"group/{i}", i.to_bytes(12, "big"), NodeKind.GROUP, {"zarr.json": document})


def manifest_object(rows: int) -> tuple[BlobRef, bytes]:
    data = Manifest.of([(_NODE, table(rows))]).encode()
    return BlobRef.to(f"manifests/{_SESSION}/0", data), data


def decode_base() -> Callable[[], Any]:
    data = Base(tuple(map(node, range(500))), ()).encode()
    ref = BlobRef.to(f"nodes/{_SESSION}/0", data)
    return lambda: Base.from_object(data, ref)


def decode_manifest() -> Callable[[], Any]:
    ref, data = manifest_object(20_000)
    return lambda: Manifest.from_object(data, ref)


def decode_table() -> Callable[[], Any]:
    ref, data = manifest_object(50_000)
    manifest = Manifest.from_object(data, ref)
    return lambda: manifest.tables(_NODE)


def decode_delta() -> Callable[[], Any]:
    nodes = tuple(map(node, range(300)))
    delta = Delta(b"d" * 16, nodes, {}, {}, Manifest.of([(_NODE, table(500))]))
    data = delta.encode()
    ref = BlobRef.to(f"deltas/{_SESSION}/0", data)
    return lambda: Delta.from_object(data, ref)


def entry(i: int, manifests: int) -> DeltaEntry:
    """An entry of a read list, as a commit of one array or of several makes it."""

    def parts(n: int) -> tuple[Part, ...]:
        nodes = [bytes([9, *j.to_bytes(11, "big")]) for j in range(n)]
        return tuple(Part(one, Box((i + 300, 7000), (i + 301, 7001)), 500 + i) for one in nodes)

    refs = tuple(
        ManifestRef(BlobRef(f"manifests/{_SESSION}/{n}", 5000 + i, 2**31 + i), parts(2))
        for n in range(manifests)
    )
    copy = bytes(200 + i) if i % 3 == 0 else None
    log = BlobRef(f"deltas/{i:012d}-{'ab' * 12}/{i}", 200 + i, 2**31 + i, copy)
    counts = tuple(Count(part.node_id, 1000 + i, 2**20 + i, 3) for part in parts(1 + 2 * manifests))
    return DeltaEntry(log, i + 1, i + 1, False, parts(1), refs, False, counts)


def decode_snapshot(manifests: int) -> Callable[[], Any]:
    entries = tuple(entry(i, manifests) for i in range(50))
    log = entries[-1].log.bare()
    about: Any = (*_WHO, None, b"c" * 16, CommitKind.APPEND, "x", {}, 1, None)
    data = Snapshot(*about, entries, log, sequence=50).encode()
    ref = BlobRef.to(f"snapshots/{_SESSION}/0", data)

    def decode() -> Snapshot:
        _PARSED.clear()
        value = Snapshot.from_object(data, ref)
        _PARSED.clear()
        return value

    return decode


def decode_snapshot_without_deltas() -> Callable[[], Any]:
    parent, base, log = (
        BlobRef(f"{kind}/{i:012d}-{'ab' * 12}/{i}", n or 2000 + i, 2**31 + i, b"c" * n or None)
        for i, (kind, n) in enumerate([("snapshots", 0), ("nodes", 5000), ("deltas", 0)])
    )
    totals = {"refs-set": 1000, "refs-unset": 2000, "chunk-bytes": 2**40, "chunk-objects": 300}
    sums = {"chunks": 10**6, "chunk-bytes": 2**50, "arrays": 300, "groups": 400}
    metadata = {f"name {i}": ["value", i * 1000] for i in range(12)}
    about: Any = (*_WHO, parent, b"c" * 16, CommitKind.APPEND, "why" * 30, metadata, 2**41, base)
    data = Snapshot(*about, (), log, totals, {"q" * 40: 900}, (), 50, sums).encode()
    ref = BlobRef.to(f"snapshots/{_SESSION}/0", data)
    return lambda: Snapshot.from_object(data, ref)


def decode_small_snapshot() -> Callable[[], Any]:
    return decode_snapshot(0)


def decode_large_snapshot() -> Callable[[], Any]:
    return decode_snapshot(3)


def decode_sources() -> Callable[[], Any]:
    sources = [VirtualSource("c", f"day/{i}.nc") for i in range(3000)]
    packed = unpack(pack(VirtualSources.of(sources).pack()))
    return lambda: VirtualSources.parse(Fields(packed, "virt"))


def make_overlay() -> Callable[[], Any]:
    layers = [Layer(None, (table(20_000),)), Layer(None, (table(30_000, sparse=False),))]
    return lambda: merge_layers(layers)


@pytest.mark.parametrize(
    "prepare",
    [
        decode_base,
        decode_manifest,
        decode_table,
        decode_delta,
        decode_snapshot_without_deltas,
        decode_small_snapshot,
        decode_large_snapshot,
        decode_sources,
        make_overlay,
    ],
)
def test_the_estimate_is_what_decoding_takes(prepare: Callable[[], Callable[[], Any]]) -> None:
    make = prepare()
    make()  # what is made once for all is not the value's
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        value = make()
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.8 * taken <= decoded_bytes(value) <= 1.25 * taken


def test_a_constant_column_counts_as_the_single_number_it_is() -> None:
    many, few = (np.broadcast_to(np.int64(7), (n,)) for n in (1_000_000, 10))
    assert decoded_bytes(many) == decoded_bytes(few) < 1000
    assert decoded_bytes((many, many)) < decoded_bytes(many) + 200, "counted once"
    assert decoded_bytes(np.zeros(10_000)[:10]) > 80_000, "a part keeps the whole alive"


def test_a_snapshot_is_as_large_as_what_it_counts() -> None:
    """Which is four numbers, unless somebody who wants to fill the memory has written it."""
    about: Any = (*_WHO, None, b"c" * 16, CommitKind.APPEND, "why", {}, 1, None)
    log = BlobRef(f"deltas/{_SESSION}/0", 1, 1)
    few, many = ({f"name {i}": 2**40 + i for i in range(n)} for n in (0, 50_000))
    for totals, sums in ((many, few), (few, many)):
        snapshot = Snapshot(*about, (), log, totals, {}, (), 1, sums)
        assert 0.7 < decoded_bytes(snapshot) / decoded_bytes(many) < 1.4


def test_of_many_alike_some_are_looked_at() -> None:
    rng = np.random.default_rng(3)
    many = tuple((rng.bytes(int(n)), str(n)) for n in rng.integers(100, 400, 5000))
    whole = sum(decoded_bytes(each) for each in many)
    assert 0.7 * whole <= decoded_bytes(many) <= 1.4 * whole


def cache_of(max_size: int = 1 << 30, **options: Any) -> DecodedCache:
    return DecodedCache(CacheOptions(max_size=max_size, **options), SYSTEM)


def test_decoded_tables_count_by_what_they_take_in_memory() -> None:
    """A hundred thousand regular refs are a few bytes encoded and megabytes decoded."""
    objects = context_of(zm.create(MemoryStorage())).objects
    ref, data = manifest_object(100_000)
    objects.create(ref.key, data)
    before = objects.cache.nbytes
    objects.load(ref, Manifest)
    encoded = objects.cache.nbytes - before
    found = objects.tables(ref, _NODE)
    decoded = objects.cache.nbytes - before - encoded
    assert len(data) <= encoded < 1.1 * len(data) + 3000
    columns = sum(c.nbytes for t in found.values() for c in (t.offset, t.length, t.crc32c))
    assert decoded >= columns > 5 * len(data)


def test_what_was_used_last_stays_and_the_bound_holds() -> None:
    cache = cache_of(100_000)
    for n in range(50):
        cache.keep((OBJECT, n), bytes(9_000))
        assert cache.find((OBJECT, 0)) is not None, "used all the time"
        assert cache.nbytes <= 100_000
    kept = [n for n in range(50) if (OBJECT, n) in cache]
    assert kept == [0, *range(50 - len(kept) + 1, 50)]
    assert len(kept) == 10


def test_tables_of_a_scan_do_not_push_the_deltas_out() -> None:
    cache = cache_of(1_000_000)
    for n in range(50):
        cache.keep((OBJECT, n), bytes(8_000))
    for n in range(100):
        cache.keep(("tables", n), bytes(90_000))
        assert cache.nbytes <= 1_000_000
    cache.keep(("tables", "huge"), bytes(5_000_000))
    assert all((OBJECT, n) in cache for n in range(50))
    assert ("tables", "huge") in cache
    assert ("tables", 99) not in cache
    cache.keep(("tables", 100), bytes(1000))
    assert ("tables", "huge") not in cache
    assert cache.nbytes <= 1_000_000


def test_objects_beyond_their_half_do_give_room_to_a_huge_table() -> None:
    cache = cache_of(1_000_000)
    for n in range(90):
        cache.keep((OBJECT, n), bytes(10_000))
    cache.keep(("tables", "huge"), bytes(5_000_000))
    assert cache.nbytes <= 5_001_000 + 500_000
    assert ("tables", "huge") in cache


def test_a_cache_of_no_size_keeps_what_was_added_last() -> None:
    cache = cache_of(0)
    cache.keep((OBJECT, 1), b"one")
    cache.keep(("tables", 2), b"two")
    assert (cache.find((OBJECT, 1)), cache.find(("tables", 2))) == (None, b"two")
    cache.clear()
    assert cache.nbytes == 0


def test_what_is_not_used_expires() -> None:
    clock, meter = Clock(), Meter()
    cache = DecodedCache(CacheOptions(expire_ms=5_000), clock.runtime, meter)
    cache.keep((OBJECT, 1), b"used")
    cache.keep((OBJECT, 2), b"idle")
    cache.keep(("tables", 3), b"idle")
    clock.now_s += 4
    assert cache.find((OBJECT, 1)) == b"used"
    clock.now_s += 1
    assert cache.find((OBJECT, 1)) == b"used"
    assert (OBJECT, 2) not in cache
    assert ("tables", 3) not in cache
    assert meter.read().cache_evicted_bytes > 0
    clock.now_s += 5
    assert cache.find((OBJECT, 1)) is None
    assert cache.nbytes == 0


def test_zero_means_that_nothing_expires() -> None:
    clock = Clock()
    cache = DecodedCache(CacheOptions(expire_ms=0), clock.runtime)
    cache.keep((OBJECT, 1), b"kept")
    clock.now_s += 1e9
    assert cache.find((OBJECT, 1)) == b"kept"


class Gate:
    """A value that takes until it is let go."""

    def __init__(self, outcome: Any = b"made") -> None:
        self.calls = 0
        self.begun, self.go = threading.Event(), threading.Event()
        self.outcome = outcome

    def __call__(self) -> Any:
        self.calls += 1
        self.begun.set()
        assert self.go.wait(20)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@dataclass
class Obtain:
    """`obtain` in a thread, and what became of it."""

    cache: DecodedCache
    make: Callable[[], Any]
    outcome: Any = None

    def start(self) -> Obtain:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def _run(self) -> None:
        try:
            self.outcome = self.cache.obtain((OBJECT, 1), self.make)
        except BaseException as error:  # noqa: BLE001 - it is what is looked at
            self.outcome = error

    def end(self) -> Any:
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.outcome


def test_a_value_is_made_once_for_all_who_want_it() -> None:
    cache, gate = cache_of(), Gate()
    calls = [Obtain(cache, gate).start() for _ in range(8)]
    assert gate.begun.wait(20)
    gate.go.set()
    assert [call.end() for call in calls] == [b"made"] * 8
    assert gate.calls == 1


def watch_waits(
    monkeypatch: pytest.MonkeyPatch, cache: DecodedCache, watch: Callable[[], object]
) -> None:
    """Call `watch` before a thread waits for the one that makes the value."""
    flight = cache._flights[(OBJECT, 1)]
    making = flight.making

    @contextmanager
    def watched() -> Iterator[None]:
        watch()
        with making:
            yield

    monkeypatch.setattr(flight, "making", watched())


def test_an_error_is_raised_for_those_who_wait_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, gate = cache_of(), Gate(ValueError("no"))
    first = Obtain(cache, gate).start()
    assert gate.begun.wait(20)
    waits = threading.Event()
    watch_waits(monkeypatch, cache, waits.set)
    waiting = Obtain(cache, lambda: b"second").start()
    assert waits.wait(20)
    gate.go.set()
    assert first.end() is waiting.end() is gate.outcome
    assert cache.obtain((OBJECT, 1), lambda: b"third") == b"third"


def test_when_the_maker_is_interrupted_those_who_wait_go_on() -> None:
    cache, gate = cache_of(), Gate(KeyboardInterrupt())
    first = Obtain(cache, gate).start()
    assert gate.begun.wait(20)
    waiting = [Obtain(cache, lambda: b"second").start() for _ in range(4)]
    gate.go.set()
    assert [call.end() for call in waiting] == [b"second"] * 4
    assert isinstance(first.end(), KeyboardInterrupt)


def test_a_waiter_that_is_interrupted_leaves_the_maker_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, gate = cache_of(), Gate()
    first = Obtain(cache, gate).start()
    assert gate.begun.wait(20)

    def interrupted() -> None:
        raise KeyboardInterrupt

    watch_waits(monkeypatch, cache, interrupted)
    assert isinstance(Obtain(cache, gate).start().end(), KeyboardInterrupt)
    gate.go.set()
    assert first.end() == b"made"
    assert cache.find((OBJECT, 1)) == b"made"
    assert cache._flights == {}


def test_a_value_that_cannot_be_measured_does_not_leave_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = cache_of()

    def full(value: object) -> int:
        raise MemoryError

    monkeypatch.setattr("zarr_manifests.engine.objects.decoded_cache.decoded_bytes", full)
    with pytest.raises(MemoryError):
        cache.obtain((OBJECT, 1), lambda: b"made")
    monkeypatch.undo()
    assert cache.obtain((OBJECT, 1), lambda: b"again") == b"again"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_the_values_a_free_lock_and_no_flights() -> None:
    cache, gate = cache_of(), Gate()
    cache.keep((OBJECT, 0), b"kept")
    making = Obtain(cache, gate).start()
    assert gate.begun.wait(20)
    nbytes = cache.nbytes
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with cache._lock:
            cache._bytes[0] += 1_000_000  # as if between adding a value and its size
            held.set()
            assert release.wait(20)
            cache._bytes[0] -= 1_000_000

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(20)
    pid = os.fork()
    if pid == 0:  # no assert may leave the child
        sound = cache.find((OBJECT, 0)) == b"kept" and cache.nbytes == nbytes
        sound = sound and cache.obtain((OBJECT, 1), lambda: b"own") == b"own"
        os._exit(0 if sound else 1)
    release.set()
    holder.join(20)
    _, status = os.waitpid(pid, 0)
    gate.go.set()
    assert making.end() == b"made"
    assert os.waitstatus_to_exitcode(status) == 0


def test_many_threads_keep_the_bound_and_the_count() -> None:
    cache = cache_of(200_000)
    made: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for n in rng.integers(0, 60, 300).tolist():

            def make(n: int = n) -> bytes:
                made.append(n)
                return bytes(4_000 + n)

            name = (OBJECT if n % 2 else "tables", n)
            assert len(cache.obtain(name, make)) == 4_000 + n

    SYSTEM.parallel([lambda seed=seed: work(seed) for seed in range(8)])
    assert cache.nbytes <= 200_000
    entries = [*cache._objects.values(), *cache._made.values()]
    assert cache.nbytes == sum(entry.nbytes for entry in entries)
    assert set(made) == set(range(60))
    assert cache._flights == {}


# --- through a repository ------------------------------------------------------------------------


def filled(storage: Storage, commits: int = 3) -> Repository:
    """An array of which every commit wrote so many chunks that its refs are a manifest."""
    repository = zm.create(storage)
    session = repository.writable_session()
    zarr.create_array(session.store, name="a", shape=(100_000,), chunks=(1,), dtype="u1")
    session.commit("array")
    for commit in range(commits):
        for i in range(1000):
            session.store.set_sync(f"a/c/{commit * 1000 + i}", value(commit, i))
        session.commit("chunks")
    assert len([*storage.list("manifests/")]) == commits
    return repository


def value(commit: int, i: int) -> cpu.Buffer:
    return cpu.Buffer.from_bytes(hashlib.sha256(bytes([commit]) + i.to_bytes(2, "big")).digest())


def read(session: Session, commit: int, i: int) -> None:
    found = session.store.get_sync(f"a/c/{commit * 1000 + i}")
    assert found is not None
    assert found.to_bytes() == value(commit, i).to_bytes()


def test_sessions_of_a_repository_share_what_one_has_read() -> None:
    storage = MemoryStorage()
    filled(storage)
    counting = CountingStorage(storage)
    repository = zm.open(counting)
    first = repository.readonly_session()
    read(first, 0, 5)
    assert repository.metrics().refs_merged == 0, "one chunk is looked up in what holds it"
    read(first, 1, 5)
    assert repository.metrics().refs_merged == 3000
    counting.reset()
    read(repository.readonly_session(), 2, 5)
    assert [(r.op, r.key) for r in counting.log] in ([], [("get_tagged", "current")])
    assert repository.metrics().refs_merged == 3000, "merged once for all of them"


def test_deltas_that_were_written_are_not_read_again() -> None:
    counting = CountingStorage(MemoryStorage())
    repository = filled(counting)
    counting.reset()
    session, before = repository.readonly_session(), repository.metrics()
    for commit in range(3):
        read(session, commit, 7)
    assert [r.key for r in counting.log] in ([], ["current"])
    merged = (repository.metrics() - before).refs_merged
    assert merged == 3000, "as all is at hand, it is brought together for further lookups"


def test_with_next_to_no_room_all_is_read_right_and_in_parallel() -> None:
    storage = MemoryStorage()
    filled(storage, 8)
    gate = RoundStorage(storage)
    repository = zm.open(gate, cache={"max-size": 0})
    session = repository.readonly_session()
    for commit, deltas in ((0, 1), (3, 8), (7, 1), (5, 8)):
        gate.due = deltas
        context_of(repository).objects.cache.clear()
        read(session, commit, 5)
        assert gate.due == 0, "the deltas are fetched side by side, though none is kept"
    cache = context_of(repository).objects.cache
    assert len(cache._objects) + len(cache._made) == 1


class RoundStorage(WrappedStorage):
    """Answers no request for a manifest until as many as are due have been made."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.due = 0
        self._met = threading.Condition()

    def _around[R](self, call: Call[R]) -> R:
        if call.key.startswith("manifests/"):
            with self._met:
                self.due -= 1
                self._met.notify_all()
                assert self._met.wait_for(lambda: self.due <= 0, 20)
        return super()._around(call)


def test_idle_sessions_fetch_again_after_expiry() -> None:
    storage, clock = MemoryStorage(), Clock()
    filled(storage)
    counting = CountingStorage(storage)
    repository = zm.open(counting, cache=CacheOptions(expire_ms=60_000), runtime=clock.runtime)
    session = repository.readonly_session()
    read(session, 0, 5)
    counting.reset()
    clock.now_s += 59
    read(session, 0, 6)
    assert counting.requests == 0
    clock.now_s += 60
    read(session, 0, 7)
    assert counting.requests > 0


def test_options_are_checked_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        CacheOptions(max_size=-1, expire_ms=True, directory=7)  # type: ignore[arg-type]
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "max-size",
        "expire-ms",
        "directory",
    ]
    with pytest.raises(ConfigError) as caught:
        zm.create("memory://never-made", cache={"max-sizes": 1, "expire_ms": -1, "directory": ""})
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "cache.max-sizes",
        "cache.expire_ms",
        "cache.directory",
    ]
    assert "did you mean max-size?" in str(caught.value)
    assert not zm.exists("memory://never-made")
    assert CacheOptions.of({"expire-ms": 1, "max_size": 2}) == CacheOptions(2, 1)
