"""Commits among threads, interrupts, resets, and clocks that go back."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Repository, Session
from zarr_manifests.engine.compact import outcomes
from zarr_manifests.errors import ConflictError, SessionClosedError, StorageError
from zarr_manifests.ids import session_of
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.disk import PosixDisk
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of

BIG = b"x" * 1000  # more than is kept inline


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def get(session: Session, key: str) -> bytes | None:
    found = session.store.get_sync(key)
    return None if found is None else found.to_bytes()


def seed(repository: Repository) -> Repository:
    with repository.transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(9,), chunks=(1,), dtype="u1")
    return repository


def at_checkpoint(name: str, do: Callable[[], object]) -> Runtime:
    """Does something once, where a scheduler could switch to somebody else."""
    due = [do]

    def checkpoint(reached: str) -> None:
        if reached == name and due:
            due.pop()()

    return replace(SYSTEM, checkpoint=checkpoint)


def messages(storage: MemoryStorage) -> list[str]:
    return [info.message for info in zm.open(storage).ancestry()]


# --- an outcome that is not known ------------------------------------------------------------


class _Announced(dict[str, Any]):
    """Commit metadata that tells when a commit has begun to look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_at = threading.Event()

    def __iter__(self) -> Any:  # with which `{**metadata}` calls `keys`
        return super().__iter__()

    def keys(self) -> Any:
        self.looked_at.set()
        return super().keys()

    def __bool__(self) -> bool:
        self.looked_at.set()
        return True


def test_a_thread_that_waits_behind_a_commit_in_doubt_does_not_commit_again() -> None:
    storage = MemoryStorage()
    seed(zm.create(storage))
    announced = _Announced()
    outcomes: list[object] = []

    def commit_too() -> None:
        try:
            outcomes.append(session.commit("again", announced))
        except SessionClosedError as error:
            outcomes.append(error)

    other = threading.Thread(target=commit_too)

    def interrupt() -> None:
        other.start()
        assert announced.looked_at.wait(20)
        raise KeyboardInterrupt

    runtime = at_checkpoint("root.swap", interrupt)
    session = zm.open(storage, runtime=runtime).writable_session()
    put(session, "a/c/0", b"1")
    with pytest.raises(KeyboardInterrupt):
        session.commit("in doubt")
    other.join(20)
    assert isinstance(outcomes[0], SessionClosedError)
    assert messages(storage) == ["array", "create repository"]


async def test_the_store_of_a_closed_session_reads_and_takes_no_writes() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    storage = MemoryStorage()
    seed(zm.create(storage))
    runtime = at_checkpoint("root.swap", interrupt)
    session = zm.open(storage, runtime=runtime).writable_session()
    store = session.store
    put(session, "a/c/0", b"1")
    with pytest.raises(KeyboardInterrupt):
        session.commit("in doubt")
    value = cpu.Buffer.from_bytes(BIG)
    with pytest.raises(SessionClosedError, match="not known"):
        store.set_sync("a/c/1", value)
    with pytest.raises(SessionClosedError, match="not known"):
        store.delete_sync("a/c/0")
    with pytest.raises(SessionClosedError, match="not known"):
        await store.set("a/c/1", value)
    with pytest.raises(SessionClosedError, match="not known"):
        await store.delete_dir("a")
    assert get(session, "a/c/0") == b"1"
    assert not [*storage.list("chunks/")]


# --- others in between -----------------------------------------------------------------------


def test_a_chunk_in_flight_during_a_commit_belongs_to_the_next_session() -> None:
    """Under the old session's name a collector could take it for something left behind."""
    storage = MemoryStorage()
    seed(zm.create(storage, {"pack-chunk-bytes": 0}))
    runtime = at_checkpoint("chunks.create", lambda: session.commit("in between"))
    session = zm.open(storage, runtime=runtime).writable_session()
    put(session, "a/c/0", b"small")
    put(session, "a/c/1", BIG)
    assert messages(storage)[0] == "in between"
    assert session.status().chunks == {"/a": 1}
    keys = workspace_of(session.store).keys
    assert keys is not None
    assert [session_of(key) for key in contents_of(session.store).changes.unsynced] == [
        keys.session_id
    ]
    session.commit("the rest")
    assert get(zm.open(storage).readonly_session(), "a/c/1") == BIG


def test_a_branch_that_was_deleted_here_and_made_again_elsewhere() -> None:
    storage = MemoryStorage()
    repository = seed(zm.create(storage))
    repository.create_branch("side")
    session = repository.writable_session("side")
    put(session, "a/c/0", b"1")
    repository.delete_branch("side")
    with pytest.raises(ConflictError, match="was deleted"):
        session.commit("nowhere to go")
    zm.open(storage).create_branch("side", session.snapshot_id)
    session.commit("as the message said")
    assert get(zm.open(storage).readonly_session("side"), "a/c/0") == b"1"


def test_a_branch_that_is_reset_before_a_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session goes on from its own commit, and finds the reset out at the next."""
    storage = MemoryStorage()
    repository = seed(zm.create(storage, {"compaction": {"max-delta-count": 2}}))
    patient = zm.open(storage, {"compaction": {"max-delta-count": 99}})
    patient.create_branch("side")
    with patient.transaction("side", message="side") as store:
        store.set_sync("a/c/3", cpu.Buffer.from_bytes(b"side"))
    elsewhere = patient.list_branches()["side"]

    def reset_and_compact(*args: Any, **options: Any) -> Any:
        repository.reset_branch("main", elsewhere, force=True)
        return observed_compaction(*args, **options)

    session = repository.writable_session()
    put(session, "a/c/0", b"mine")
    observed_compaction = outcomes.observed_compaction
    monkeypatch.setattr(outcomes, "observed_compaction", reset_and_compact)
    assert session.commit("mine") == session.snapshot_id
    assert (get(session, "a/c/0"), get(session, "a/c/3")) == (b"mine", None)
    put(session, "a/c/1", b"next")
    with pytest.raises(ConflictError, match="was the branch reset"):
        session.commit("next")


# --- clocks ----------------------------------------------------------------------------------


def test_as_of_finds_nothing_that_was_committed_later() -> None:
    """A commit that others overtook is not dated before them, nor is one by a slow clock."""
    now = [1_000]
    storage = MemoryStorage()
    clock = replace(SYSTEM, now_ms=lambda: now[0])
    seed(zm.create(storage, {"compaction": {"max-delta-count": 4}}, runtime=clock))

    def overtake() -> None:
        now[0] = 9_000
        put(fast, "a/c/1", b"fast")
        fast.commit("fast")

    fast = zm.open(storage, runtime=clock).writable_session()
    runtime = replace(at_checkpoint("root.swap", overtake), now_ms=lambda: now[0])
    slow = zm.open(storage, runtime=runtime).writable_session()
    now[0] = 2_000
    put(slow, "a/c/0", b"slow")
    slow.commit("slow")
    now[0] = 4_000  # set back
    put(slow, "a/c/2", b"later")
    slow.commit("later, and a fold")

    repository = zm.open(storage)
    times = [info.written_at for info in repository.ancestry()]
    assert next(repository.ancestry()).kind == "rewrite"
    assert times == sorted(times, reverse=True)
    then = repository.readonly_session(f"main@{datetime.fromtimestamp(5, UTC)}")
    assert [get(then, f"a/c/{i}") for i in range(3)] == [None] * 3


# --- disks -----------------------------------------------------------------------------------


def test_a_chunk_that_the_disk_dropped_must_be_written_again(tmp_path: Path) -> None:
    """As Linux does with what it could not write: the next fsync says that all is well."""

    class Disk(PosixDisk):
        failing = ""

        def fsync_file(self, fd: int) -> None:
            if self.failing and Path(f"/dev/fd/{fd}").samefile(self.failing):
                self.failing = ""
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().fsync_file(fd)

    disk = Disk()
    config = {"pack-chunk-bytes": 0}
    session = seed(zm.create(LocalStorage(tmp_path, disk=disk), config)).writable_session()
    put(session, "a/c/0", BIG)
    put(session, "a/c/1", BIG)
    lost = contents_of(session.store).changes.unsynced[0]
    disk.failing = str(tmp_path / lost)
    with pytest.raises(StorageError, match="Input/output error"):
        session.commit("fails")
    for _ in range(2):
        with pytest.raises(StorageError, match=f"{lost} .*must be written again"):
            session.commit("the disk no longer says so")
    put(session, "a/c/0", BIG)
    session.commit("written again")
    assert get(zm.open(tmp_path).readonly_session(), "a/c/0") == BIG
