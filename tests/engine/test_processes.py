"""Real processes on a local disk: a kill leaves no mess, and a forked child takes nothing along."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from inside import root_of
from zarr_manifests import Repository
from zarr_manifests.ids import session_of
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.store import contents_of


def put(repository: Repository, key: str, value: bytes) -> str:
    session = repository.writable_session("main")
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))
    return session.commit(key)


def get(path: Path, key: str) -> bytes:
    found = zm.open(path).readonly_session().store.get_sync(key)
    assert found is not None
    return found.to_bytes()


def made(path: Path, **config: Any) -> Repository:
    repository = zm.create(path, config)
    with repository.transaction("main", message="array") as store:
        zarr.create_array(store, name="a", shape=(10_000,), chunks=(1,), dtype="u1")
    return repository


def commit_for_ever(path: str, acknowledged: Queue[str]) -> None:
    repository = zm.open(path)
    for i in range(9_999):
        acknowledged.put(put(repository, f"a/c/{i}", bytes([i % 256]) * 2000))


def test_a_killed_process_leaves_the_repository_readable_and_unlocked(tmp_path: Path) -> None:
    repository = made(tmp_path, compaction={"max-delta-count": 4})
    spawn = multiprocessing.get_context("spawn")
    acknowledged: Queue[str] = spawn.Queue()
    victim = spawn.Process(target=commit_for_ever, args=(str(tmp_path), acknowledged))
    victim.start()
    ids = [acknowledged.get() for _ in range(6)]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    assert set(ids) <= {info.snapshot_id for info in repository.ancestry()}
    for i in range(6):
        assert get(tmp_path, f"a/c/{i}") == bytes([i]) * 2000
    put(repository, "a/c/9999", b"unlocked")
    assert get(tmp_path, "a/c/9999") == b"unlocked"


def in_child(work: Callable[[], object]) -> None:
    """Do the work in a child of plain `os.fork`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_that_share_everything_use_names_of_their_own(tmp_path: Path) -> None:
    """A child of `os.fork` has the parent's session, open files and random state."""
    repository = made(tmp_path, pack_chunk_bytes=0)
    session = repository.writable_session("main")
    session.store.set_sync("a/c/99", cpu.Buffer.from_bytes(b"p" * 2000))

    def work(child: int) -> None:
        session.store.set_sync(f"a/c/{child}", cpu.Buffer.from_bytes(bytes([child]) * 2000))
        put(repository, f"a/c/{50 + child}", bytes([child]) * 2000)

    for child in range(3):
        in_child(lambda child=child: work(child))
    session.store.set_sync("a/c/98", cpu.Buffer.from_bytes(b"q" * 2000))
    chunks = [info.key for info in LocalStorage(tmp_path).list("chunks/")]
    assert len(chunks) == 8 + 3  # and each child's sign that it has written
    assert len({session_of(key) for key in chunks}) == 7
    session.commit("the parent's own", discard_unmerged=True)
    read = zm.open(tmp_path).readonly_session("main").store
    found = sorted(contents_of(read).keys_below("a/c/"))
    assert found == [f"a/c/{i}" for i in (50, 51, 52, 98, 99)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_its_parent_the_lease(tmp_path: Path) -> None:
    repository = made(tmp_path)
    session = repository.writable_session("main", lease=60)

    def leases() -> list[str]:
        return [lease.name for lease in root_of(zm.open(tmp_path)).leases]

    before = leases()
    assert len(before) == 1
    put(zm.open(tmp_path), "a/c/1", b"others")

    def end() -> None:
        session.discard_changes()
        session.rebase()
        session.close()

    in_child(end)
    assert leases() == before
    session.close()
    assert leases() == []
