"""Packs that are written in the background while an event loop goes on, on a local disk."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Session
from zarr_manifests.engine.edit import pack_uploads as pack_writes
from zarr_manifests.engine.edit.pack_uploads import Flight, PackWrites
from zarr_manifests.engine.edit.packs import Pack, StagedRef
from zarr_manifests.errors import StorageError
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.disk import PosixDisk, Temp
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import workspace_of

SIZE = 1000
PACK = 10


class Disk(PosixDisk):
    """Holds writes of packs until they are let go, lets some fail, and counts fsyncs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.packs = 0
        self.failing = 0
        self.fsyncs: Counter[int] = Counter()
        self._lock = threading.Lock()

    def write(self, temp: Temp, data: bytes) -> None:
        if "/chunks/" in temp.directory:
            with self._lock:
                self.packs += 1
                fails, self.failing = self.failing > 0, max(0, self.failing - 1)
            self.begun.release()
            assert self.gate.acquire(timeout=30)
            if fails:
                raise OSError(5, "the disk has a fault")
        super().write(temp, data)

    def fsync_file(self, fd: int) -> None:
        with self._lock:
            self.fsyncs[os.fstat(fd).st_ino] += 1
        super().fsync_file(fd)

    def let_go(self, packs: int = 1000) -> None:
        self.gate.release(packs)


def chunk(i: int) -> bytes:
    return np.random.default_rng(i).bytes(SIZE)


def put(session: Session, i: int, value: bytes | None = None) -> None:
    asyncio.run(session.store.set(f"a/c/{i}", cpu.Buffer.from_bytes(value or chunk(i))))


def get(session: Session, i: int) -> bytes:
    found = session.store.get_sync(f"a/c/{i}")
    assert found is not None
    return found.to_bytes()


@contextmanager
def begun(path: Path, disk: Disk, runtime: Runtime = SYSTEM) -> Iterator[Session]:
    """A session on an array, whose packs take ten chunks; whatever happens, all is let go."""
    storage = LocalStorage(path, disk=disk)
    repo = zm.create(storage, {"pack-bytes": PACK * SIZE}, runtime=runtime)
    session = repo.writable_session()
    zarr.create_array(session.store, name="a", shape=(2000,), chunks=(1,), dtype="u1")
    session.commit("array")
    try:
        yield session
    finally:
        disk.let_go()


def packs_in(path: Path) -> dict[int, int]:
    """Bytes of each chunk object, by inode."""
    files = [file.stat() for file in (path / "chunks").rglob("*") if file.is_file()]
    return {file.st_ino: file.st_size for file in files}


def check(path: Path, expected: dict[int, bytes]) -> None:
    reader = zm.open(path).readonly_session()
    assert {i: get(reader, i) for i in expected} == expected


def test_writers_go_on_while_a_pack_is_written(tmp_path: Path) -> None:
    disk = Disk()
    with begun(tmp_path, disk) as session:
        for i in range(25):
            put(session, i)  # nobody waits for the two packs that are full
        assert disk.begun.acquire(timeout=30)
        assert packs_in(tmp_path) == {}
        assert [get(session, i) for i in range(25)] == [chunk(i) for i in range(25)]
        put(session, 3, chunk(103))  # of a pack that is being written
        session.store.delete_sync("a/c/4")
        disk.let_go()
        session.commit("all")
    written = packs_in(tmp_path)
    assert sorted(written.values()) == [6 * SIZE, 10 * SIZE, 10 * SIZE]  # each byte once
    assert [disk.fsyncs[inode] for inode in written] == [1, 1, 1]
    assert disk.packs == 3
    check(tmp_path, {i: chunk(i) for i in range(25) if i not in (3, 4)} | {3: chunk(103)})
    assert zm.open(tmp_path).readonly_session().store.get_sync("a/c/4") is None


def test_a_commit_waits_for_what_is_being_written(tmp_path: Path) -> None:
    disk = Disk()
    with begun(tmp_path, disk) as session, ThreadPoolExecutor(1) as pool:
        for i in range(11):
            put(session, i)
        committing = pool.submit(session.commit, "eleven")
        assert disk.begun.acquire(timeout=30)
        assert not committing.done()
        disk.let_go()
        committing.result(timeout=30)
    assert sorted(packs_in(tmp_path).values()) == [SIZE, 10 * SIZE]
    check(tmp_path, {i: chunk(i) for i in range(11)})


def test_only_so_many_are_under_way(tmp_path: Path) -> None:
    disk, most = Disk(), pack_writes.MOST
    with begun(tmp_path, disk) as session, ThreadPoolExecutor(1) as pool:
        for i in range(PACK * most + PACK):
            put(session, i)
        for _ in range(most):
            assert disk.begun.acquire(timeout=30)
        beyond = pool.submit(put, session, PACK * most + PACK)  # one pack more is full
        assert disk.begun.acquire(timeout=30)
        assert not beyond.done()
        disk.let_go()
        beyond.result(timeout=30)
        session.commit("all")
    check(tmp_path, {i: chunk(i) for i in range(PACK * most + PACK + 1)})


def test_a_pack_that_cannot_be_written_is_told_at_the_next_chunk(tmp_path: Path) -> None:
    disk = Disk()
    disk.failing = 1
    disk.let_go()
    with begun(tmp_path, disk) as session:
        told: list[str] = []
        expected = {}
        for i in range(1000):
            try:
                put(session, i)
            except StorageError as error:
                told.append(str(error))
                assert session.store.get_sync(f"a/c/{i}") is None  # it is not taken
                continue
            expected[i] = chunk(i)
        session.commit("all but one")
    assert len(told) == 1
    assert "the disk has a fault" in told[0]
    assert len(expected) == 999
    check(tmp_path, expected)


def test_a_commit_writes_what_could_not_be_written(tmp_path: Path) -> None:
    disk = Disk()
    disk.failing = 1
    with begun(tmp_path, disk) as session:
        for i in range(12):
            put(session, i)
        disk.let_go()
        session.commit("all")
    assert sorted(packs_in(tmp_path).values()) == [2 * SIZE, 10 * SIZE]
    check(tmp_path, {i: chunk(i) for i in range(12)})


def test_a_commit_that_cannot_write_it_either_keeps_it(tmp_path: Path) -> None:
    disk = Disk()
    disk.failing = 3  # the pack, and both of the commit
    with begun(tmp_path, disk) as session:
        for i in range(12):
            put(session, i)
        disk.let_go()
        with pytest.raises(StorageError, match="the disk has a fault"):
            session.commit("not yet")
        assert [get(session, i) for i in range(12)] == [chunk(i) for i in range(12)]
        session.commit("all")
    check(tmp_path, {i: chunk(i) for i in range(12)})


def test_what_is_discarded_while_it_is_written_is_nobodys(tmp_path: Path) -> None:
    disk = Disk()
    disk.failing = 1
    with begun(tmp_path, disk) as session:
        for i in range(11):
            put(session, i)
        assert disk.begun.acquire(timeout=30)
        session.discard_changes()
        disk.let_go()
        for i in range(40):  # nobody is told that what is not wanted failed
            put(session, i, chunk(500 + i))
        session.commit("others")
    check(tmp_path, {i: chunk(500 + i) for i in range(40)})


@pytest.mark.slow
def test_many_threads_write_while_the_session_commits(tmp_path: Path) -> None:
    disk = Disk()
    disk.let_go(100_000)
    with begun(tmp_path, disk) as session, ThreadPoolExecutor(4) as pool:

        def work(worker: int) -> None:
            for i in range(worker * 300, worker * 300 + 300):
                put(session, i)
                assert get(session, i) == chunk(i)

        working = [pool.submit(work, worker) for worker in range(4)]
        while not all(future.done() for future in working):
            if session.status():
                session.commit("so far")
        for future in working:
            future.result()
        if session.status():
            session.commit("the rest")
    check(tmp_path, {i: chunk(i) for i in range(1200)})


def no_thread(call: Callable[[], None]) -> None:
    raise RuntimeError("cannot schedule new futures after shutdown")


def test_what_there_is_no_thread_for_is_written_by_the_writer(tmp_path: Path) -> None:
    disk = Disk()
    disk.let_go()
    with begun(tmp_path, disk, replace(SYSTEM, background=no_thread)) as session:
        for i in range(100):
            put(session, i)
        assert disk.packs == 9
        session.commit("all")
        assert disk.packs == 10
    check(tmp_path, {i: chunk(i) for i in range(100)})


def test_an_interrupted_wait_forgets_no_pack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = Disk()
    disk.let_go()
    later: list[Callable[[], None]] = []
    with begun(tmp_path, disk, replace(SYSTEM, background=later.append)) as session:
        for i in range(25):
            put(session, i)
        wait, asked = Flight.wait, 0

        def interrupted(flight: Flight) -> None:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise KeyboardInterrupt
            wait(flight)

        monkeypatch.setattr(Flight, "wait", interrupted)
        writes = workspace_of(session.store)._writes
        under_way = list(writes._mine())
        assert len(under_way) == 2
        with pytest.raises(KeyboardInterrupt):
            workspace_of(session.store).flush()
        assert writes._mine() == under_way
        for call in later:
            call()
        session.commit("all")
        assert disk.packs == 3
    check(tmp_path, {i: chunk(i) for i in range(25)})


def test_a_forked_child_waits_for_none_of_its_parents_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    never = replace(SYSTEM, background=lambda call: None)  # as a thread that the child has not
    writes = PackWrites(LocalStorage(tmp_path), never)
    assert writes.begin(Pack("chunks/s/0", [StagedRef.of(b"1")])) is None
    assert len(writes._mine()) == 1
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert len(writes._mine()) == 0
    assert writes.take(all_of_them=True) == []


def test_a_thread_of_a_writer_writes_a_pack_itself(tmp_path: Path) -> None:
    """One more thread would ask for Python's lock again and again; the writer's others go on."""
    disk = Disk()
    disk.let_go()
    with begun(tmp_path, disk) as session:
        for i in range(PACK + 1):
            session.store.set_sync(f"a/c/{i}", cpu.Buffer.from_bytes(chunk(i)))
        assert list(packs_in(tmp_path).values()) == [PACK * SIZE]
        session.commit("all")
    check(tmp_path, {i: chunk(i) for i in range(PACK + 1)})


def test_in_memory_packs_are_written_in_place() -> None:
    assert not PackWrites(MemoryStorage(), SYSTEM).pays
