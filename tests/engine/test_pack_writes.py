"""Packs that are written in the background while an event loop goes on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Session
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.disk import PosixDisk, Temp
from zarr_manifests.storage.local import LocalStorage

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
        if "/chunks/" in str(temp.path):
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
    files = [file.stat() for file in (path / "chunks").rglob("[!.]*") if file.is_file()]
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


def test_a_commit_writes_what_could_not_be_written(tmp_path: Path) -> None:
    """The first pack, which ten chunks fill; what it held is not lost, and goes with the rest."""
    disk = Disk()
    with begun(tmp_path, disk) as session:
        disk.failing = 1
        for i in range(12):
            put(session, i)
        disk.let_go()
        session.commit("all")
    assert sorted(packs_in(tmp_path).values()) == [2 * SIZE, 10 * SIZE]
    check(tmp_path, {i: chunk(i) for i in range(12)})
