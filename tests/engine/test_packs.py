"""Packs: few objects for many small chunks, and no byte lost or read wrong on the way."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu
from zarr.core.sync import sync

import zarr_manifests as zm
from zarr_manifests import Fork, Repository, Session
from zarr_manifests.engine.edit.packs import StagedRef
from zarr_manifests.errors import ConflictError, CorruptObjectError, StorageError
from zarr_manifests.format.chunk_table import NativeRef
from zarr_manifests.ids import session_of
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of, workspace_of
from zarr_manifests.testing import CountingStorage, Fault, FaultyStorage, LatencyStorage

SIZE = 1000


def buffer(data: bytes) -> cpu.Buffer:
    return cpu.Buffer.from_bytes(data)


def put(store: ManifestStore, key: str, value: bytes) -> None:
    store.set_sync(key, buffer(value))


def get(store: ManifestStore, key: str) -> bytes | None:
    found = store.get_sync(key)
    return None if found is None else found.to_bytes()


def chunk(i: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(i).bytes(size)


def begin(storage: Storage, n: int = 3000, **config: int) -> tuple[Repository, Session]:
    """A session on an array of n chunks, committed."""
    repository = zm.create(storage, config)
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(n,), chunks=(1,), dtype="u1")
    session.commit("array")
    return repository, session


def objects(storage: Storage) -> dict[str, int]:
    return {info.key: info.nbytes for info in storage.list("chunks/")}


def staged(session: Session) -> int:
    refs = contents_of(session.store).changes.refs()
    return sum(isinstance(ref, StagedRef) for _, _, ref in refs)


# --- how much is written, and when -----------------------------------------------------------


def test_two_thousand_small_chunks_share_one_object() -> None:
    storage = MemoryStorage()
    repository, session = begin(storage)
    counting = CountingStorage(storage)
    session = zm.open(counting).writable_session("main")
    counting.reset()
    for i in range(2000):
        put(session.store, f"a/c/{i}", chunk(i))
    assert counting.requests == 0
    session.commit("small chunks")
    assert list(objects(storage).values()) == [2000 * SIZE]
    written = [r.key.split("/")[0] for r in counting.log if r.op == "create"]
    assert sorted(written) == ["chunks", "deltas", "root", "snapshots"]
    # Index, place and checksum of a chunk cost less than seven bytes.
    assert counting.bytes_written < 2000 * (SIZE + 7) + 4096
    read = repository.readonly_session("main").store
    assert all(get(read, f"a/c/{i}") == chunk(i) for i in range(2000))


def test_packs_are_written_when_they_are_full() -> None:
    storage = MemoryStorage()
    repository, session = begin(storage, pack_bytes=10 * SIZE)
    for i in range(35):
        put(session.store, f"a/c/{i}", chunk(i))
        assert len(objects(storage)) == max(0, i) // 10
        assert get(session.store, f"a/c/{i // 2}") == chunk(i // 2)
    assert staged(session) == 5
    session.commit("full packs and a rest")
    assert sorted(objects(storage).values()) == [5 * SIZE, *[10 * SIZE] * 3]
    read = repository.readonly_session("main").store
    assert all(get(read, f"a/c/{i}") == chunk(i) for i in range(35))
    assert next(repository.ancestry()).written["chunk-objects"] == 4


def test_chunks_beyond_the_limit_are_objects_of_their_own() -> None:
    storage = MemoryStorage()
    _, session = begin(storage, inline_chunk_bytes=10, pack_chunk_bytes=100)
    for i, size in enumerate((10, 11, 100, 101)):
        put(session.store, f"a/c/{i}", bytes(size))
    assert list(objects(storage).values()) == [101]
    assert staged(session) == 2
    session.commit("sizes")
    assert sorted(objects(storage).values()) == [101, 111]


def test_a_pack_lies_in_the_order_of_coordinates() -> None:
    storage = MemoryStorage()
    _, session = begin(storage)
    order = np.random.default_rng(0).permutation(500)
    for i in order:
        put(session.store, f"a/c/{i}", chunk(int(i)))
    session.commit("in any order")
    (key,) = objects(storage)
    assert storage.get(key) == b"".join(chunk(i) for i in range(500))


def test_a_commit_with_packs_takes_two_rounds() -> None:
    storage = MemoryStorage()
    begin(storage, pack_bytes=10 * SIZE)
    counting = CountingStorage(LatencyStorage(storage, latency_s=0))
    session = zm.open(counting).writable_session("main")
    for i in range(25):
        sync(session.store.set(f"a/c/{i}", buffer(chunk(i))))
    counting.reset()
    session.commit("packs")
    assert counting.rounds() == 2


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_the_bytes_of_a_commit_are_those_of_its_chunks(tmp_path: Path, kind: str) -> None:
    storage = MemoryStorage() if kind == "memory" else LocalStorage(tmp_path / "r")
    repository, session = begin(storage)
    array = zarr.create_array(session.store, name="b", shape=(40, 50), chunks=(10, 25), dtype="i4")
    values = np.random.default_rng(0).integers(0, 2**30, (40, 50), dtype="i4")
    array[:] = values
    assert objects(storage) == {}
    np.testing.assert_array_equal(array[:], values)
    array[5:35, 20:30] = -1
    values[5:35, 20:30] = -1
    np.testing.assert_array_equal(array[:], values)
    session.commit("an array")
    assert len(objects(storage)) == 1
    read = zarr.open_array(repository.readonly_session("main").store, path="b", mode="r")
    np.testing.assert_array_equal(read[:], values)
    total = next(repository.ancestry()).written["chunk-bytes"]
    assert sum(objects(storage).values()) <= total


# --- changing what is staged -----------------------------------------------------------------


def test_what_is_overwritten_deleted_or_cut_off_before_the_pack_is_written_leaves_no_byte() -> None:
    storage = MemoryStorage()
    repository, session = begin(storage, n=100)
    for i in range(100):
        put(session.store, f"a/c/{i}", chunk(i))
    for i in range(0, 100, 2):
        put(session.store, f"a/c/{i}", chunk(1000 + i, 600))
    for i in range(30):
        session.store.delete_sync(f"a/c/{i}")
    zarr.open_array(session.store, path="a").resize((80,))
    put(session.store, "a/c/70", b"now inline")
    put(session.store, "note", chunk(5))
    session.store.delete_sync("note")
    due = {f"a/c/{i}": chunk(i) if i % 2 else chunk(1000 + i, 600) for i in range(30, 80)}
    due["a/c/70"] = b"now inline"
    assert all(get(session.store, key) == value for key, value in due.items())
    session.commit("what is left")
    assert sum(objects(storage).values()) == sum(map(len, due.values())) - len(b"now inline")
    read = repository.readonly_session("main").store
    assert all(get(read, key) == value for key, value in due.items())
    assert set(contents_of(read).keys_below("a/c/")) == due.keys()


def test_a_chunk_written_over_and_over_fills_no_pack() -> None:
    storage = MemoryStorage()
    _, session = begin(storage, pack_bytes=10 * SIZE)
    for i in range(500):
        put(session.store, "a/c/0", chunk(i))
        assert workspace_of(session.store).edits.packs._open_bytes <= 10 * SIZE
    assert objects(storage) == {}
    session.commit("once")
    assert list(objects(storage).values()) == [SIZE]


def test_staged_chunks_keep_their_bytes_when_their_key_changes_its_class() -> None:
    storage = MemoryStorage()
    repository, session = begin(storage)
    other = repository.writable_session("main").store
    array = zarr.create_array(other, name="late/b", shape=(9,), chunks=(1,), dtype="u1")
    assert array.nchunks == 9
    document = get(other, "late/b/zarr.json")
    assert document is not None
    put(session.store, "late/b/c/3", chunk(3))  # before the array's document: opaque
    put(session.store, "late/b/zarr.json", document)
    put(session.store, "late/b/c/4", chunk(4))
    session.store.delete_sync("late/b/zarr.json")  # opaque again
    assert get(session.store, "late/b/c/4") == chunk(4)
    put(session.store, "late/b/zarr.json", document)
    session.commit("back and forth")
    assert sum(objects(storage).values()) == 2 * SIZE
    read = repository.readonly_session("main").store
    assert (get(read, "late/b/c/3"), get(read, "late/b/c/4")) == (chunk(3), chunk(4))


def test_equal_chunks_are_told_apart() -> None:
    storage = MemoryStorage()
    repository, session = begin(storage)
    for i in range(5):
        put(session.store, f"a/c/{i}", chunk(0))
    session.store.delete_sync("a/c/2")
    session.commit("the same bytes")
    read = repository.readonly_session("main").store
    assert [get(read, f"a/c/{i}") for i in range(5)] == [chunk(0)] * 2 + [None] + [chunk(0)] * 2


def test_discarded_chunks_are_never_written() -> None:
    storage = MemoryStorage()
    _, session = begin(storage)
    put(session.store, "a/c/0", chunk(0))
    session.discard_changes()
    assert get(session.store, "a/c/0") is None
    put(session.store, "a/c/1", chunk(1))
    session.commit("only what came after")
    assert list(objects(storage).values()) == [SIZE]


# --- reading ---------------------------------------------------------------------------------


def test_each_chunk_of_a_pack_has_a_checksum_of_its_own() -> None:
    storage = MemoryStorage()
    repository, session = begin(storage)
    for i in range(3):
        put(session.store, f"a/c/{i}", chunk(i))
    session.commit("three")
    (key,) = objects(storage)
    data = bytearray(storage.get(key))
    data[SIZE + 17] ^= 1
    storage.put(key, bytes(data))
    read = repository.readonly_session("main").store
    assert (get(read, "a/c/0"), get(read, "a/c/2")) == (chunk(0), chunk(2))
    with pytest.raises(CorruptObjectError, match=f"offset {SIZE}.*does not match its checksum"):
        get(read, "a/c/1")
    storage.put(key, bytes(data[: 2 * SIZE + 5]))
    with pytest.raises(CorruptObjectError, match="ends after 5 of 1000 bytes"):
        get(read, "a/c/2")


def test_a_chunk_of_a_pack_is_read_by_its_range_alone() -> None:
    storage = MemoryStorage()
    _, session = begin(storage)
    for i in range(100):
        put(session.store, f"a/c/{i}", chunk(i))
    session.commit("hundred")
    counting = CountingStorage(storage)
    read = zm.open(counting).readonly_session("main").store
    get(read, "a/c/0")
    counting.reset()
    assert get(read, "a/c/50") == chunk(50)
    assert (counting.requests, counting.bytes_read) == (1, SIZE)


# --- failures --------------------------------------------------------------------------------


def test_a_commit_that_fails_keeps_what_is_staged() -> None:
    storage = MemoryStorage()
    repository, _ = begin(storage)
    faults = (("create", "chunks/*", 1), ("create", "snapshots/*", 1), ("cas", "current", 5))
    for op, pattern, count in faults:
        faulty = FaultyStorage(storage, [Fault("fail_before", op, pattern, count=count)])
        session = zm.open(faulty).writable_session("main")
        put(session.store, "a/c/0", chunk(1))
        with pytest.raises(StorageError):
            session.commit("fails")
        assert get(session.store, "a/c/0") == chunk(1)
        put(session.store, "a/c/1", chunk(2))
        session.commit("and again")
        read = repository.readonly_session("main").store
        assert (get(read, "a/c/0"), get(read, "a/c/1")) == (chunk(1), chunk(2))


@pytest.mark.parametrize("kind", ["fail_before", "fail_after"])
@pytest.mark.parametrize("remote", [False, True])
def test_a_full_pack_that_cannot_be_written_loses_no_chunk(kind: Any, remote: bool) -> None:
    storage = MemoryStorage()
    begin(storage, pack_bytes=10 * SIZE)
    faulty = FaultyStorage(storage, [Fault(kind, "create", "chunks/*", count=2)])
    place: Storage = LatencyStorage(faulty, latency_s=0.0) if remote else faulty
    session = zm.open(place).writable_session("main")
    for i in range(10):
        sync(session.store.set(f"a/c/{i}", buffer(chunk(i))))
    for _ in range(2):
        with pytest.raises(StorageError):
            sync(session.store.set("a/c/10", buffer(chunk(10))))
        assert sync(session.store.get("a/c/10")) is None
    sync(session.store.set("a/c/10", buffer(chunk(10))))
    assert staged(session) == 1
    session.commit("all of them")
    read = zm.open(storage).readonly_session("main").store
    assert [get(read, f"a/c/{i}") for i in range(11)] == [chunk(i) for i in range(11)]


def test_a_lost_commit_is_found_and_its_packs_are_done_with() -> None:
    storage = MemoryStorage()
    repository, _ = begin(storage)
    faulty = FaultyStorage(storage, [Fault("fail_after", "cas", "current")])
    session = zm.open(faulty).writable_session("main")
    put(session.store, "a/c/0", chunk(0))
    session.commit("lost answer")
    assert staged(session) == 0
    assert not session.status()
    put(session.store, "a/c/1", chunk(1))
    session.commit("next")
    read = repository.readonly_session("main").store
    assert (get(read, "a/c/0"), get(read, "a/c/1")) == (chunk(0), chunk(1))
    assert list(objects(storage).values()) == [SIZE, SIZE]


def test_packs_survive_a_conflict() -> None:
    storage = MemoryStorage()
    repository, session = begin(storage)
    other = repository.writable_session("main")
    put(other.store, "a/c/0", chunk(7))
    other.commit("came first")
    put(session.store, "a/c/0", chunk(8))
    with pytest.raises(ConflictError):
        session.commit("too late")
    assert get(session.store, "a/c/0") == chunk(8)


# --- threads ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True])
def test_eight_threads_fill_packs_while_the_session_commits(remote: bool) -> None:
    inner = MemoryStorage()
    begin(inner, n=1600, pack_bytes=20 * SIZE)
    storage: Storage = LatencyStorage(inner, latency_s=0.001) if remote else inner
    session = zm.open(storage).writable_session("main")
    barrier = threading.Barrier(9)

    def work(worker: int) -> None:
        barrier.wait()
        for i in range(worker * 200, worker * 200 + 200):
            store = session.store
            data = buffer(chunk(i))
            asyncio.run(store.set(f"a/c/{i}", data)) if remote else store.set_sync(f"a/c/{i}", data)
            found = asyncio.run(store.get(f"a/c/{i}"))
            assert found is not None
            assert found.to_bytes() == chunk(i)

    with ThreadPoolExecutor(8) as pool:
        working = [pool.submit(work, worker) for worker in range(8)]
        barrier.wait()
        while not all(future.done() for future in working):
            if session.status():
                session.commit("so far")
        for future in working:
            future.result()
    if session.status():
        session.commit("the rest")
    read = zm.open(inner).readonly_session("main").store
    assert [i for i in range(1600) if get(read, f"a/c/{i}") != chunk(i)] == []


class _Slow(LatencyStorage):
    """Holds an upload of chunks until it is let go."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage, latency_s=0.0)
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if key.startswith("chunks/"):
            self.begun.set()
            await self.go_on.wait()
        return await super().create_async(key, data, durable=durable)


async def test_only_the_call_that_fills_a_pack_awaits_its_upload() -> None:
    inner = MemoryStorage()
    begin(inner, pack_bytes=10 * SIZE)
    slow = _Slow(inner)
    session = zm.open(slow).writable_session("main")
    for i in range(10):
        await session.store.set(f"a/c/{i}", buffer(chunk(i)))
    filling = asyncio.ensure_future(session.store.set("a/c/10", buffer(chunk(10))))
    await slow.begun.wait()
    await session.store.set("a/c/11", buffer(chunk(11)))
    await session.store.set("a/c/0", buffer(chunk(100)))
    found = await session.store.get("a/c/5")
    assert found is not None
    assert found.to_bytes() == chunk(5)
    # A commit does not wait for it: it writes the chunks itself.
    await asyncio.to_thread(session.commit, "meanwhile")
    slow.go_on.set()
    await filling
    await asyncio.to_thread(session.commit, "the one that waited")
    read = zm.open(inner).readonly_session("main").store
    due = [chunk(100), *(chunk(i) for i in range(1, 12))]
    assert [get(read, f"a/c/{i}") for i in range(12)] == due


async def test_attributes_in_flight_when_their_array_comes_are_the_arrays() -> None:
    """Zarr writes the two documents of a v2 array at once."""
    inner = MemoryStorage()
    begin(inner, inline_chunk_bytes=0, pack_chunk_bytes=0)
    slow = _Slow(inner)
    store = zm.open(slow).writable_session("main").store
    attributes = buffer(b'{"_ARRAY_DIMENSIONS": ["b"]}')
    setting = asyncio.ensure_future(store.set("b/.zattrs", attributes))
    await slow.begun.wait()
    document = b'{"zarr_format": 2, "shape": [4], "chunks": [2]}'
    await store.set("b/.zarray", buffer(document))
    slow.go_on.set()
    await setting
    nodes = contents_of(store).nodes()
    assert not any(path.startswith("/") for path in nodes)
    assert nodes["b"].array is not None
    assert nodes["b"].array.dimension_names == ("b",)


# --- copies ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:a writable store was pickled")
def test_a_copy_reads_what_its_session_had_staged() -> None:
    storage = MemoryStorage("packs-copies")
    repository, session = begin(storage)
    put(session.store, "a/c/0", chunk(0))
    fork = pickle.loads(pickle.dumps(session.fork()))
    store = pickle.loads(pickle.dumps(session.store))
    assert (get(fork.store, "a/c/0"), get(store, "a/c/0")) == (chunk(0), chunk(0))
    assert staged(session) == 0
    put(session.store, "a/c/1", chunk(1))
    session.commit("of its own", discard_unmerged=True)
    read = repository.readonly_session("main").store
    assert (get(read, "a/c/0"), get(read, "a/c/1")) == (chunk(0), chunk(1))


def _travel(fork: Fork) -> Fork:
    return pickle.loads(pickle.dumps(fork))


def test_copies_flush_their_own_packs_before_they_travel_back() -> None:
    storage = MemoryStorage("packs-forks")
    repository, session = begin(storage)
    put(session.store, "a/c/0", chunk(0))
    forks = [_travel(session.fork()) for _ in range(3)]
    for worker, fork in enumerate(forks):
        for i in range(100):
            put(fork.store, f"a/c/{1 + worker * 100 + i}", chunk(1 + worker * 100 + i))
    put(session.store, "a/c/999", chunk(999))
    session.merge(*map(_travel, forks))
    assert all(get(session.store, f"a/c/{i}") == chunk(i) for i in [*range(301), 999])
    session.commit("merged")
    found = objects(storage)
    assert sorted(found.values()) == [SIZE, SIZE, *[100 * SIZE] * 3]
    assert len({session_of(key) for key in found}) == 4
    read = repository.readonly_session("main").store
    assert all(get(read, f"a/c/{i}") == chunk(i) for i in [*range(301), 999])


@pytest.mark.parametrize("merged", [True, False])
def test_a_merge_that_fails_loses_no_staged_chunk(merged: bool) -> None:
    """The fork brings the array whose chunk the session keeps as an opaque entry."""
    storage = MemoryStorage(f"packs-conflict-{merged}")
    repository, session = begin(storage)
    fork = _travel(session.fork())
    zarr.create_array(fork.store, name="b", shape=(9,), chunks=(1,), dtype="u1")
    put(fork.store, "b/c/0", chunk(1))
    put(session.store, "b/c/0", chunk(2))
    put(session.store, "b/c/1", chunk(3))
    with pytest.raises(ConflictError):
        session.merge(_travel(fork))
    if merged:
        put(session.store, "b/c/0", chunk(1))
        session.merge(_travel(fork))
    session.commit("agreed, or without the fork")
    read = repository.readonly_session("main").store
    assert (get(read, "b/c/0"), get(read, "b/c/1")) == (chunk(1 if merged else 2), chunk(3))
    assert isinstance(contents_of(read).find("b/c/1"), NativeRef)  # and not kept with the metadata
    assert (get(read, "b/zarr.json") is not None) == merged


def test_a_fork_that_cannot_flush_does_not_travel() -> None:
    storage = MemoryStorage()
    begin(storage)
    faulty = FaultyStorage(storage, [Fault("fail_before", "create", "chunks/*")])
    session = zm.open(faulty).writable_session("main")
    put(session.store, "a/c/0", chunk(0))
    with pytest.raises(StorageError):
        session.fork()
    session.fork()
    assert staged(session) == 0
    session.commit("after all")


def _write_in_child(store: ManifestStore, answers: Any) -> None:
    put(store, "a/c/1", chunk(1))
    answers.put(pickle.dumps(store))


@pytest.mark.filterwarnings("ignore:a writable store was pickled")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_writes_what_it_inherited_under_its_own_name(tmp_path: Path) -> None:
    repository, session = begin(LocalStorage(tmp_path / "r"))
    put(session.store, "a/c/0", chunk(0))
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    child = context.Process(target=_write_in_child, args=(session.store, answers))
    child.start()
    copy = pickle.loads(answers.get(timeout=60))
    child.join(60)
    assert child.exitcode == 0
    session.merge(copy)
    assert (get(session.store, "a/c/0"), get(session.store, "a/c/1")) == (chunk(0), chunk(1))
    session.commit("from two processes")
    read = repository.readonly_session("main").store
    assert (get(read, "a/c/0"), get(read, "a/c/1")) == (chunk(0), chunk(1))
    refs = [contents_of(read).find(f"a/c/{i}") for i in range(2)]
    assert all(isinstance(ref, NativeRef) for ref in refs)
