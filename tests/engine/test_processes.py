"""Real processes on a local disk: no acknowledged commit is lost, and a kill leaves no mess."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from inside import context_of, root_of
from zarr_manifests import Repository, Session
from zarr_manifests.engine.objects.metadata import Objects
from zarr_manifests.error_cases import UnmergedForksError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.delta import Delta
from zarr_manifests.ids import session_of
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import Call, CountingStorage, WrappedStorage

_WORKERS, _COMMITS = 4, 25


def _put(repository: Repository, key: str, value: bytes) -> str:
    session = repository.writable_session("main")
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))
    return session.commit(key)


def _value(worker: int, i: int) -> bytes:
    return bytes([worker, i]) * (1 + 600 * (i % 2))  # inline, and objects of their own


def _commit_many(path: str, worker: int, acknowledged: Queue[str]) -> None:
    repository = zm.open(path)
    for i in range(_COMMITS):
        key = f"a/c/{worker * _COMMITS + i}"
        acknowledged.put(_put(repository, key, _value(worker, i)))


def _make(path: Path, n: int, **config: Any) -> Repository:
    repository = zm.create(path, config)
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(n,), chunks=(1,), dtype="u1")
    session.commit("array")
    return repository


@pytest.mark.slow
def test_no_acknowledged_commit_of_racing_processes_is_lost(tmp_path: Path) -> None:
    total = _WORKERS * _COMMITS
    repository = _make(tmp_path / "r", total, compaction={"max-delta-count": 30})
    spawn = multiprocessing.get_context("spawn")
    acknowledged: Queue[str] = spawn.Queue()
    workers = [
        spawn.Process(target=_commit_many, args=(str(tmp_path / "r"), worker, acknowledged))
        for worker in range(_WORKERS)
    ]
    for worker in workers:
        worker.start()
    ids = [acknowledged.get(timeout=60) for _ in range(total)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(set(ids)) == total
    infos = [*repository.ancestry()]
    assert set(ids) <= {info.snapshot_id for info in infos}
    assert sum(info.kind != "rewrite" for info in infos) == total + 2
    assert sum(info.kind == "rewrite" for info in infos) >= 2
    read = zm.open(tmp_path / "r").readonly_session("main").store
    for worker_number in range(_WORKERS):
        for i in range(_COMMITS):
            found = read.get_sync(f"a/c/{worker_number * _COMMITS + i}")
            assert found is not None
            assert found.to_bytes() == _value(worker_number, i)


def _commit_for_ever(path: str, acknowledged: Queue[str]) -> None:
    repository = zm.open(path)
    for i in range(10_000):
        acknowledged.put(_put(repository, f"a/c/{i}", bytes([i % 256]) * 2000))


@pytest.mark.parametrize("after", [1, 3, 8])
def test_a_killed_process_leaves_the_repository_readable_and_unlocked(
    tmp_path: Path, after: int
) -> None:
    repository = _make(tmp_path / "r", 10_000, compaction={"max-delta-count": 4})
    fork = multiprocessing.get_context("spawn")
    acknowledged: Queue[str] = fork.Queue()
    victim = fork.Process(target=_commit_for_ever, args=(str(tmp_path / "r"), acknowledged))
    victim.start()
    ids = [acknowledged.get(timeout=60) for _ in range(after)]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    history = {info.snapshot_id for info in repository.ancestry()}
    assert set(ids) <= history
    read = zm.open(tmp_path / "r").readonly_session("main").store
    for i in range(after):
        found = read.get_sync(f"a/c/{i}")
        assert found is not None
        assert found.to_bytes() == bytes([i % 256]) * 2000
    _put(repository, "a/c/9999", b"unlocked")
    assert zm.open(tmp_path / "r").readonly_session("main").store.get_sync("a/c/9999")


def _write_and_exit(repository: Repository, store: Any, worker: int) -> None:
    store.set_sync(f"a/c/{worker}", cpu.Buffer.from_bytes(bytes([worker]) * 2000))
    _put(repository, f"a/c/{50 + worker}", bytes([worker]) * 2000)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_that_share_everything_use_names_of_their_own(tmp_path: Path) -> None:
    """A child of `os.fork` has the parent's session, open files and random state."""
    repository = _make(tmp_path / "r", 100, pack_chunk_bytes=0)
    session = repository.writable_session("main")
    session.store.set_sync("a/c/99", cpu.Buffer.from_bytes(b"p" * 2000))
    fork = multiprocessing.get_context("fork")
    children = [
        fork.Process(target=_write_and_exit, args=(repository, session.store, worker))
        for worker in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    session.store.set_sync("a/c/98", cpu.Buffer.from_bytes(b"q" * 2000))
    chunks = [info.key for info in LocalStorage(tmp_path / "r").list("chunks/")]
    assert len(chunks) == 8 + 3  # and each child's sign that it has written
    assert len({session_of(key) for key in chunks}) == 7
    session.commit("the parent's own", discard_unmerged=True)
    read = zm.open(tmp_path / "r").readonly_session("main").store
    assert sorted(contents_of(read).keys_below("a/c/")) == [
        f"a/c/{i}" for i in (50, 51, 52, 98, 99)
    ]


def _in_child(work: Callable[[], object]) -> int:
    """The exit code of a child of plain `os.fork` that does the work."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _close(session: Session) -> None:
    session.close()


def _leave(session: Session) -> None:
    with session:
        pass


def _go_on(session: Session) -> None:
    session.discard_changes()
    session.rebase()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("end", [_close, _leave, _go_on])
def test_a_forked_child_leaves_its_parent_the_lease(
    tmp_path: Path, end: Callable[[Session], None]
) -> None:
    path = tmp_path / "r"
    repository = _make(path, 100)
    session = repository.writable_session("main", lease=60)

    def leases() -> list[str]:
        return [lease.name for lease in root_of(zm.open(path)).leases]

    before = leases()
    assert len(before) == 1
    _put(zm.open(path), "a/c/1", b"others")
    assert _in_child(lambda: end(session)) == 0
    assert leases() == before
    session.close()
    assert leases() == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_a_readers_lease(tmp_path: Path) -> None:
    repository = _make(tmp_path / "r", 100)
    block = repository.lease(repository.readonly_session().snapshot_id)
    block.__enter__()
    roots = context_of(repository).roots
    assert _in_child(lambda: block.__exit__(None, None, None)) == 0
    assert len(roots.read().root.leases) == 1
    block.__exit__(None, None, None)
    assert len(roots.read().root.leases) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("value", [b"inline", b"s" * 2000, b"of its own" * 40_000])
def test_what_a_forked_child_wrote_is_not_left_out_silently(tmp_path: Path, value: bytes) -> None:
    session = _make(tmp_path / "r", 100).writable_session("main")
    store = session.store

    def write(at: int) -> int:
        return _in_child(lambda: store.set_sync(f"a/c/{at}", cpu.Buffer.from_bytes(value)))

    store.set_sync("a/c/0", cpu.Buffer.from_bytes(value))
    assert (write(1), write(2)) == (0, 0)
    for _ in range(2):
        with pytest.raises(UnmergedForksError, match="2 copies"):
            session.commit("without the children's work")
    session.commit("on purpose", discard_unmerged=True)
    assert write(3) == 0
    store.set_sync("a/c/4", cpu.Buffer.from_bytes(value))
    with pytest.raises(UnmergedForksError, match="1 copies"):
        session.commit("a child of the session as it went on")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("remove", [False, True])
def test_a_childs_deletions_are_noticed_too(tmp_path: Path, remove: bool) -> None:
    repository = _make(tmp_path / "r", 100)
    _put(repository, "a/c/1", b"there")
    session = repository.writable_session("main")
    session.store.set_sync("a/c/0", cpu.Buffer.from_bytes(b"x"))
    if remove:
        assert _in_child(lambda: session.store.delete_sync("a/c/1")) == 0
        with pytest.raises(UnmergedForksError, match="1 copies"):
            session.commit("without the deletion")
    else:
        assert _in_child(lambda: session.store.get_sync("a/c/1")) == 0
        session.commit("a child that reads hinders nothing")


@pytest.mark.filterwarnings("ignore:a writable store was pickled")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_forked_child_sends_back_is_merged(tmp_path: Path) -> None:
    session = _make(tmp_path / "r", 100).writable_session("main")
    session.store.set_sync("a/c/0", cpu.Buffer.from_bytes(b"p" * 2000))

    def work() -> None:
        session.store.set_sync("a/c/1", cpu.Buffer.from_bytes(b"c" * 2000))
        (tmp_path / "back").write_bytes(pickle.dumps(session.store))

    assert _in_child(work) == 0
    session.merge(pickle.loads((tmp_path / "back").read_bytes()))
    session.commit("the parent's and the child's")
    read = zm.open(tmp_path / "r").readonly_session("main").store
    assert sorted(contents_of(read).keys_below("a/c/")) == ["a/c/0", "a/c/1"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks_that_were_asked_for_may_be_left_out_though_the_process_was_forked(
    tmp_path: Path,
) -> None:
    session = _make(tmp_path / "r", 100).writable_session("main")
    session.store.set_sync("a/c/0", cpu.Buffer.from_bytes(b"mine"))
    fork = session.fork()
    value = cpu.Buffer.from_bytes(b"o" * 1_000_000)
    assert _in_child(lambda: fork.store.set_sync("a/c/1", value)) == 0
    session.commit("without the fork")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_commit_looks_for_children_only_after_a_fork(tmp_path: Path) -> None:
    _make(tmp_path / "r", 100)
    counting = CountingStorage(LocalStorage(tmp_path / "r"))
    session = zm.open(counting).writable_session("main")

    def requests_of_a_commit(at: int) -> Counter[str]:
        session.store.set_sync(f"a/c/{at}", cpu.Buffer.from_bytes(b"x"))
        counting.reset()
        session.commit(f"chunk {at}")
        return Counter(record.op for record in counting.log)

    without = requests_of_a_commit(0)
    assert without["list"] == 0
    assert _in_child(lambda: None) == 0
    assert requests_of_a_commit(1) == without | Counter({"list": 1})
    assert requests_of_a_commit(2) == without


class _Gate(WrappedStorage):
    """Holds up the calls of one kind in the process it was made in, until it is opened."""

    def __init__(self, storage: Storage, op: str) -> None:
        super().__init__(storage)
        self._op, self._pid = op, os.getpid()
        self.reached, self.opened = threading.Event(), threading.Event()

    def _around[R](self, call: Call[R]) -> R:
        if call.op == self._op and os.getpid() == self._pid:
            self.reached.set()
            assert self.opened.wait(60)
        return super()._around(call)


def _exit_code_of_child(work: Callable[[], object]) -> int | None:
    """Of a child of `os.fork` that does the work; None if it had to be killed."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(20)
    code = child.exitcode
    if code is None:
        child.kill()
        child.join()
    return code


def _while_held(gate: _Gate, call: Callable[[], object], child: Callable[[], object]) -> int | None:
    """The exit code of a child that is forked while the gate holds up a thread's call."""
    thread = threading.Thread(target=call)
    thread.start()
    assert gate.reached.wait(20)
    try:
        return _exit_code_of_child(child)
    finally:
        gate.opened.set()
        thread.join(20)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_what_its_parent_fetches() -> None:
    gate = _Gate(MemoryStorage(), "get")
    delta = Delta(b"d" * 16)
    ref = BlobRef.to(f"deltas/{1:012d}-{'ab' * 12}/0", delta.encode())
    gate.create(ref.key, delta.encode())
    objects = Objects(gate, SYSTEM)
    assert (
        _while_held(gate, lambda: objects.load(ref, Delta), lambda: objects.load(ref, Delta)) == 0
    )
    assert objects.load(ref, Delta) == delta


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_locks_of_its_parents_threads(tmp_path: Path) -> None:
    gate = _Gate(LocalStorage(tmp_path / "r"), "cas")
    _make(tmp_path / "r", 9)
    session = zm.open(gate).writable_session()
    value = cpu.Buffer.from_bytes(b"x")
    session.store.set_sync("a/c/0", value)

    def work() -> None:
        session.store.set_sync("a/c/1", value)
        assert session.store.get_sync("a/c/0") is not None

    assert _while_held(gate, lambda: session.commit("the parent's"), work) == 0
    assert next(zm.open(tmp_path / "r").ancestry()).message == "the parent's"
