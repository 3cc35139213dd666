"""Many clients at once, some of them killed: what they saw and did is recorded and checked.

Each does random transactions on a few keys, snapshot-isolated and serialisable ones, and readers.
Before each commit it records what it is about to commit, afterwards what the commit said; so what
a killed one was about is known, and whether it landed is not. The branch's history, which names
every transaction by its message, has to explain all of it.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import swept
from zarr_manifests import Repository, Session
from zarr_manifests.errors import ConflictError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.disk import PosixDisk, Temp
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import Access, Transaction, check_isolation

CLIENTS, COMMITS = 8, 50
CHUNKS, ATTRIBUTES = 24, 3
CONFIG = {"commits": {"attempts": 100}, "compaction": {"max-delta-count": 20}}

type Record = dict[str, Any]


def make(storage: Storage) -> Repository:
    repository = zm.create(storage, CONFIG)
    with repository.transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(CHUNKS,), chunks=(1,), dtype="u1")
    return repository


# --- a client ------------------------------------------------------------------------------------


def get(session: Session, key: str) -> str | None:
    """What is at the key: a chunk's text, or an attribute."""
    if key.startswith("a/c/"):
        found = session.store.get_sync(key)
        return None if found is None else found.to_bytes().rstrip(b".").decode()
    value = attributes(session)["attributes"].get(key)
    assert value is None or isinstance(value, str)
    return value


def attributes(session: Session) -> dict[str, Any]:
    found = session.store.get_sync("a/zarr.json")
    assert found is not None
    fields = json.loads(found.to_bytes())
    assert isinstance(fields, dict)
    return fields


def put(session: Session, key: str, value: str | None, nbytes: int) -> None:
    if not key.startswith("a/c/"):
        fields = attributes(session)
        fields["attributes"][key] = value
        session.store.set_sync("a/zarr.json", cpu.Buffer.from_bytes(json.dumps(fields).encode()))
    elif value is None:
        session.store.delete_sync(key)
    else:
        data = value.encode().ljust(nbytes, b".")  # inline, in a pack, or an object of its own
        session.store.set_sync(key, cpu.Buffer.from_bytes(data))


def operations(
    session: Session, rng: np.random.Generator, name: str, *, writing: bool
) -> list[tuple[str, str, str | None]]:
    """A few reads and writes; what they did, for the record."""
    done: list[tuple[str, str, str | None]] = []
    keys = [f"a/c/{at}" for at in range(CHUNKS)] + [f"attribute {at}" for at in range(ATTRIBUTES)]
    chosen = rng.choice(keys, int(rng.integers(2, 5)), replace=False)
    for number, key in enumerate(map(str, chosen)):
        what = rng.integers(4) if number or not writing else 3
        if what < 3 or not writing:
            done.append(("read", key, get(session, key)))
        if what > 1 and writing:
            value = None if key.startswith("a/c/") and rng.random() < 0.1 else f"{name}/{number}"
            if value is None and get(session, key) is None:
                continue  # deleting what is not there is no write
            put(session, key, value, int(rng.choice([1, 2_000, 300_000], p=[0.5, 0.45, 0.05])))
            done.append(("write", key, value))
            if rng.random() < 0.2:
                done.append(("read", key, get(session, key)))
    return done


def work(
    repository: Repository,
    client: int,
    life: int,
    commits: int,
    note: Callable[[Record], object],
) -> None:
    """So many commits, and what else comes between."""
    rng = np.random.default_rng([client, life])
    number = 0
    while commits:
        name = f"{client}.{life}.{number}"
        number += 1
        writing = bool(rng.random() < 0.85)
        serializable = bool(rng.random() < 0.5)
        if writing:
            isolation: Any = "serializable" if serializable else "snapshot"
            session = repository.writable_session("main", isolation=isolation)
        else:
            session = repository.readonly_session("main")
        record = {
            "name": name,
            "began_at": session.snapshot_id,
            "operations": operations(session, rng, name, writing=writing),
            "outcome": "unknown" if writing else "reader",
            "serializable": serializable,
            "client": str(client),
        }
        note(record)
        if not writing or not session.status():
            continue
        try:
            snapshot_id = session.commit(name)
        except ConflictError:
            note({"name": name, "outcome": "refused"})
        else:
            commits -= 1
            note({"name": name, "outcome": "committed", "snapshot_id": snapshot_id})


def transactions(records: Iterable[Record]) -> list[Transaction]:
    merged: dict[str, Record] = {}
    for record in records:
        merged.setdefault(record["name"], {}).update(record)
    for record in merged.values():
        record["operations"] = tuple(Access(*one) for one in record["operations"])
    return [Transaction(**record) for record in merged.values()]


# --- what must hold afterwards -------------------------------------------------------------------


def history_of(repository: Repository) -> list[tuple[str, str]]:
    """The branch's snapshots, oldest first, and whose they are."""
    found = []
    for info in [*repository.ancestry()][::-1]:
        ours = info.kind != "rewrite" and info.message not in ("create repository", "array")
        found.append((info.snapshot_id, info.message if ours else ""))
    return found


def all_read(repository: Repository, snapshot_id: str, name: str) -> Transaction:
    """A reader of everything there is."""
    session = repository.readonly_session(snapshot_id)
    keys = [f"a/c/{at}" for at in range(CHUNKS)] + [f"attribute {at}" for at in range(ATTRIBUTES)]
    reads = tuple(Access("read", key, get(session, key)) for key in keys)
    return Transaction(name, snapshot_id, reads, "reader")


def check(repository: Repository, done: list[Transaction]) -> Counter[str]:
    """All of it is as promised; how often each outcome was."""
    history = history_of(repository)
    outcomes = Counter(one.outcome for one in done)
    landed = {name for _, name in history if name}
    assert landed <= {one.name for one in done}
    readers = [
        all_read(repository, snapshot_id, f"of {at}")
        for at, (snapshot_id, _) in enumerate(history)
        if at % 10 == 1 or at == len(history) - 1
    ]
    assert check_isolation([*done, *readers], history) == []
    last = readers[-1].operations
    # The lock is free, nothing is damaged, and that stays so without what is not needed any more.
    with repository.transaction(message="and one more") as store:
        zarr.create_array(store, name="b", shape=(1,), dtype="u1")[:] = 1
    assert repository.verify().ok
    repository.expire_snapshots(keep_last=3)
    repository.garbage_collect(timedelta(0))
    again = zm.open(repository.storage)
    assert again.verify().ok
    head = again.list_branches()["main"]
    assert all_read(again, head, "after").operations == last
    assert len(list(again.ancestry())) <= 4
    return outcomes


def rebased(repository: Repository, done: list[Transaction]) -> int:
    """How many commits did not land where they began."""
    history = history_of(repository)
    before = {after[0]: one[0] for one, after in itertools.pairwise(history)}
    return sum(one.began_at != before[one.snapshot_id] for one in done if one.snapshot_id)


@pytest.mark.slow
@pytest.mark.parametrize("commits", swept([10, COMMITS], but=[10]))
def test_threads_on_memory_see_and_do_what_was_promised(commits: int) -> None:
    storage = MemoryStorage()
    repository = make(storage)
    notes: list[list[Record]] = [[] for _ in range(CLIENTS)]
    failed: list[BaseException] = []

    def run(client: int) -> None:
        try:
            work(zm.open(storage), client, 0, commits, notes[client].append)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    threads = [threading.Thread(target=run, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    done = transactions(record for records in notes for record in records)
    moved = rebased(repository, done)
    outcomes = check(repository, done)
    assert outcomes["committed"] == CLIENTS * commits
    if commits == COMMITS:
        assert moved > 0
        assert outcomes["refused"] > 0
        assert outcomes["reader"] > 0


# --- processes that are killed -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Death:
    """When a process dies: at its n-th call of that kind, before or after it.

    Or when another one, which it tells of that call, kills it: wherever it has come to by then.
    """

    call: str = ""
    number: int = 0
    after: bool = False
    by_other: bool = False

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Death:
        match rng.integers(3):
            case 0:  # with the lock held: nothing else is renamed
                return cls("rename", int(rng.integers(1, 8)), bool(rng.integers(2)))
            case 1:
                return cls("any", int(rng.integers(1, 150)), bool(rng.integers(2)))
            case _:
                return cls("any", int(rng.integers(1, 150)), by_other=True)


class DeadlyDisk(PosixDisk):
    """Kills the process at one of its calls, or has it killed."""

    def __init__(self, death: Death, killer: Connection) -> None:
        super().__init__()
        self._death, self._killer, self._seen = death, killer, 0

    def _at[R](self, call: str, run: Callable[[], R]) -> R:
        death = self._death
        self._seen += death.call in (call, "any")
        due = self._seen == death.number and death.call in (call, "any")
        if due and death.by_other:
            self._killer.send_bytes(b"now")
        elif due and not death.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = run()
        if due and death.after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def open_temp(self, directory: str) -> Temp:
        return self._at("open_temp", lambda: PosixDisk.open_temp(self, directory))

    def write(self, temp: Temp, data: bytes) -> None:
        self._at("write", lambda: PosixDisk.write(self, temp, data))

    def fsync_file(self, fd: int) -> None:
        self._at("fsync_file", lambda: PosixDisk.fsync_file(self, fd))

    def fsync_dir(self, directory: str) -> None:
        self._at("fsync_dir", lambda: PosixDisk.fsync_dir(self, directory))

    def link(self, temp: Temp, path: str) -> None:
        self._at("link", lambda: PosixDisk.link(self, temp, path))

    def rename(self, temp: Temp, path: str) -> None:
        self._at("rename", lambda: PosixDisk.rename(self, temp, path))


def journal(path: Path, client: int) -> list[Record]:
    """What a client has noted; the last line of a killed one may be torn."""
    lines = (path / f"{client}.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def work_in_process(
    path: str, client: int, life: int, commits: int, death: Death, killer: Connection
) -> None:
    out = os.open(f"{path}/{client}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(record: Record) -> None:
        os.write(out, json.dumps(record).encode() + b"\n")

    repository = zm.open(LocalStorage(f"{path}/r", disk=DeadlyDisk(death, killer)))
    work(repository, client, life, commits, note)


@dataclass
class Crew:
    """Processes that are started again when they were killed, until all have done their work."""

    path: Path
    rng: np.random.Generator
    commits: int
    most_kills: int
    alive: dict[Connection, tuple[int, BaseProcess]] = field(default_factory=dict)
    lives: Counter[int] = field(default_factory=Counter)
    kills: int = 0

    def start(self, client: int) -> None:
        noted = self.path / f"{client}.jsonl"
        records = journal(self.path, client) if noted.exists() else []
        left = self.commits - sum(record["outcome"] == "committed" for record in records)
        if left <= 0:
            return
        life, self.lives[client] = self.lives[client], self.lives[client] + 1
        death = Death.drawn(self.rng) if self.kills < self.most_kills else Death()
        # A clean process forks: a new one takes no second to begin.
        context = multiprocessing.get_context("forkserver")
        due, killer = context.Pipe(duplex=False)
        args = str(self.path), client, life, left, death, killer
        process = context.Process(target=work_in_process, args=args)
        process.start()
        killer.close()  # it is open only there, so `due` ends with the process
        self.alive[due] = client, process

    def run(self) -> None:
        multiprocessing.set_forkserver_preload(["zarr_manifests", "pytest", "numpy", "zarr"])
        for client in range(CLIENTS):
            self.start(client)
        while self.alive:
            ready = wait([*self.alive])
            for due in [one for one in self.alive if one in ready]:
                client, process = self.alive.pop(due)
                with due, suppress(EOFError):  # it has died by itself, or done its work
                    due.recv_bytes()
                    process.kill()
                process.join()
                assert process.exitcode in (0, -signal.SIGKILL)
                self.kills += process.exitcode != 0
                self.start(client)


@pytest.mark.slow
@pytest.mark.parametrize("commits", swept([10, COMMITS], but=[10]))
def test_processes_that_are_killed_lose_nothing_that_was_acknowledged(
    tmp_path: Path, commits: int
) -> None:
    repository = make(LocalStorage(tmp_path / "r"))
    crew = Crew(tmp_path, np.random.default_rng(7), commits, most_kills=commits // 2)
    crew.run()
    done = transactions(one for client in range(CLIENTS) for one in journal(tmp_path, client))
    moved = rebased(repository, done)
    outcomes = check(repository, done)
    assert outcomes["committed"] == CLIENTS * commits
    if commits == COMMITS:
        assert crew.kills >= crew.most_kills / 2
        assert moved > 0
        assert outcomes["refused"] > 0
        assert outcomes["unknown"] > 0
