"""Many clients at once, some of them killed: what they saw and did is recorded and checked.

Each does random transactions on a few keys, snapshot-isolated and serialisable ones, and readers.
Before each commit it records what it is about to commit, afterwards what the commit said; so what
a killed one was about is known, and whether it landed is not. The branch's history, which names
every transaction by its message, has to explain all of it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import stored
import zarr_manifests as zm
from zarr_manifests import Repository, Session
from zarr_manifests.errors import ConflictError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.disk import PosixDisk
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage

CLIENTS = 8
CHUNKS, ATTRIBUTES = 24, 3
KEYS = [f"a/c/{at}" for at in range(CHUNKS)] + [f"attribute {at}" for at in range(ATTRIBUTES)]
CONFIG = {"commits": {"attempts": 100}, "compaction": {"max-delta-count": 20}}

type Record = dict[str, Any]
type Values = dict[str, str | None]


def make(storage: Storage) -> Repository:
    repository = zm.create(storage, CONFIG)
    with repository.transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(CHUNKS,), chunks=(1,), dtype="u1")
    return repository


def document(session: Session) -> dict[str, Any]:
    fields = json.loads(stored.get(session, "a/zarr.json") or b"")
    assert isinstance(fields, dict)
    return fields


def get(session: Session, key: str) -> str | None:
    """What is at the key: a chunk's text, or an attribute."""
    if not key.startswith("a/c/"):
        value: str | None = document(session)["attributes"].get(key)
        return value
    found = stored.get(session, key)
    return None if found is None else found.rstrip(b".").decode()


def put(session: Session, key: str, value: str | None, nbytes: int) -> None:
    if not key.startswith("a/c/"):
        fields = document(session)
        fields["attributes"][key] = value
        stored.put(session, "a/zarr.json", json.dumps(fields).encode())
    elif value is None:
        session.store.delete_sync(key)
    else:  # inline, in a pack, or an object of its own
        stored.put(session, key, value.encode().ljust(nbytes, b"."))


def operate(session: Session, rng: np.random.Generator, name: str, *, writing: bool) -> Any:
    """A few reads and writes; what was read of others, and what was written."""
    reads: Values = {}
    writes: Values = {}
    chosen = rng.choice(KEYS, int(rng.integers(2, 5)), replace=False)
    for number, key in enumerate(map(str, chosen)):
        what = rng.integers(4) if number or not writing else 3
        if what < 3 or not writing:
            reads[key] = get(session, key)
        if what > 1 and writing:
            value = None if key.startswith("a/c/") and rng.random() < 0.1 else f"{name}/{number}"
            if value is None and get(session, key) is None:
                continue  # deleting what is not there is no write
            put(session, key, value, int(rng.choice([1, 2_000, 300_000], p=[0.5, 0.45, 0.05])))
            assert get(session, key) == value
            writes[key] = value
    return reads, writes


def work(
    repository: Repository, client: int, life: int, commits: int, note: Callable[[Record], object]
) -> None:
    """So many commits, and what else comes between."""
    rng = np.random.default_rng([client, life])
    number = 0
    while commits:
        name = f"{client}.{life}.{number}"
        number += 1
        writing = bool(rng.random() < 0.85)
        serializable = bool(rng.random() < 0.5)
        isolation: Any = "serializable" if serializable else "snapshot"
        if writing:
            session = repository.writable_session("main", isolation=isolation)
        else:
            session = repository.readonly_session("main")
        began, outcome = session.snapshot_id, "unknown" if writing else "reader"
        reads, writes = operate(session, rng, name, writing=writing)
        record = {"name": name, "began": began, "reads": reads, "writes": writes}
        note(record | {"client": client, "outcome": outcome, "serializable": serializable})
        if not session.status():
            continue
        try:
            snapshot_id = session.commit(name)
        except ConflictError:
            note({"name": name, "outcome": "refused"})
        else:
            commits -= 1
            note({"name": name, "outcome": "committed", "snapshot_id": snapshot_id})


def all_read(repository: Repository, snapshot_id: str) -> Values:
    session = repository.readonly_session(snapshot_id)
    return {key: get(session, key) for key in KEYS}


def check_isolation(done: dict[str, Record], repository: Repository) -> None:
    """Each read its snapshot, wrote over nothing newer, and landed once if it was told so.

    A serialisable one that landed has read nothing that others changed before it did.
    """
    place: dict[str, int] = {}
    states: list[Values] = []
    changed = defaultdict[str, list[int]](list)
    landed: dict[str, int] = {}
    now: Values = dict.fromkeys(KEYS)
    for at, info in enumerate([*repository.ancestry()][::-1]):
        place[info.snapshot_id] = at
        ours = info.kind != "rewrite" and info.message not in ("create repository", "array")
        if ours:
            assert info.message not in landed, "it landed twice"
            landed[info.message] = at
            now = now | done[info.message]["writes"]
            for key in done[info.message]["writes"]:
                changed[key].append(at)
        states.append(now)
        if at % 10 == 1:
            assert all_read(repository, info.snapshot_id) == now
    last = Counter[int]()
    for name, one in done.items():
        began, at = place[one["began"]], landed.get(name)
        assert one["reads"].items() <= states[began].items(), name
        assert began >= last[one["client"]], "it began before its client's last commit"
        if one["outcome"] in ("refused", "reader"):
            assert at is None, name
        elif one["outcome"] == "committed":
            assert at == place[one["snapshot_id"]], name
        if at is not None:
            last[one["client"]] = at
            for key in {*one["writes"], *(one["reads"] if one["serializable"] else ())}:
                assert not [other for other in changed[key] if began < other < at], (name, key)


def check(repository: Repository, records: list[Record]) -> Counter[str]:
    """All of it is as promised; how often each outcome was."""
    done: dict[str, Record] = {}
    for record in records:
        done.setdefault(record["name"], {}).update(record)
    check_isolation(done, repository)
    last = all_read(repository, repository.list_branches()["main"])
    # The lock is free, nothing is damaged, and that stays so without what is not needed any more.
    with repository.transaction(message="and one more") as store:
        zarr.create_array(store, name="b", shape=(1,), dtype="u1")[:] = 1
    assert repository.verify().ok
    repository.expire_snapshots(keep_last=3)
    repository.garbage_collect(timedelta(0))
    again = zm.open(repository.storage)
    assert again.verify().ok
    assert all_read(again, again.list_branches()["main"]) == last
    assert len(list(again.ancestry())) <= 4
    return Counter(one["outcome"] for one in done.values())


def test_threads_on_memory_see_and_do_what_was_promised() -> None:
    commits, storage = 6, MemoryStorage()
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
    outcomes = check(repository, [record for records in notes for record in records])
    assert outcomes["committed"] == CLIENTS * commits


type Death = tuple[str, int, bool]
"""At which of its calls of that kind a process kills itself, and whether after it."""


def drawn(rng: np.random.Generator) -> Death:
    after = bool(rng.integers(2))
    if rng.integers(3):
        return "any", int(rng.integers(1, 150)), after
    return "rename", int(rng.integers(1, 8)), after  # with the lock held: nothing else is renamed


class DeadlyDisk(PosixDisk):
    """Kills the process at one of its calls."""

    def __init__(self, death: Death) -> None:
        super().__init__()
        self.death, self.seen = death, 0


def deadly(name: str) -> Callable[..., Any]:
    perform = getattr(PosixDisk, name)

    def call(disk: DeadlyDisk, *args: Any) -> Any:
        kind, number, after = disk.death
        disk.seen += kind in (name, "any")
        due = disk.seen == number and kind in (name, "any")
        if due and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = perform(disk, *args)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


for name in ("open_temp", "write", "fsync_file", "fsync_dir", "link", "rename"):
    setattr(DeadlyDisk, name, deadly(name))


def journal(path: Path, client: int) -> list[Record]:
    """What a client has noted; the last line of a killed one may be torn."""
    noted = path / f"{client}.jsonl"
    lines = noted.read_text().splitlines(keepends=True) if noted.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def work_in_process(path: str, client: int, life: int, commits: int, death: Death) -> None:
    out = os.open(f"{path}/{client}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(record: Record) -> None:
        os.write(out, json.dumps(record).encode() + b"\n")

    repository = zm.open(LocalStorage(f"{path}/r", disk=DeadlyDisk(death)))
    work(repository, client, life, commits, note)


@pytest.mark.sweep
def test_processes_that_are_killed_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """They are started again when they were killed, until all have done their work."""
    commits, most_kills, kills = 50, 25, 0
    repository = make(LocalStorage(tmp_path / "r"))
    rng = np.random.default_rng(7)
    lives = Counter[int]()
    alive: dict[int, tuple[int, BaseProcess]] = {}
    # A clean process forks: a new one takes no second to begin.
    context = multiprocessing.get_context("forkserver")
    multiprocessing.set_forkserver_preload(["zarr_manifests", "pytest", "numpy", "zarr"])

    def start(client: int) -> None:
        records = journal(tmp_path, client)
        left = commits - sum(record["outcome"] == "committed" for record in records)
        if left > 0:
            death = drawn(rng) if kills < most_kills else ("", 0, False)
            args = str(tmp_path), client, lives[client], left, death
            lives[client] += 1
            process = context.Process(target=work_in_process, args=args)
            process.start()
            alive[process.sentinel] = client, process

    for client in range(CLIENTS):
        start(client)
    while alive:
        for ended in wait([*alive]):
            client, process = alive.pop(ended)  # type: ignore[arg-type]
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            kills += process.exitcode != 0
            start(client)
    records = [one for client in range(CLIENTS) for one in journal(tmp_path, client)]
    outcomes = check(repository, records)
    assert outcomes["committed"] == CLIENTS * commits
    assert kills >= most_kills / 2
    assert outcomes["refused"] > 0
    assert outcomes["unknown"] > 0


def test_a_swap_that_a_lease_came_before_has_failed() -> None:
    repo = zm.create(MemoryStorage())
    session = repo.writable_session()
    zarr.create_group(session.store, path="mine")
    other = zm.open(repo.storage)
    with other.lease(other.list_branches()["main"], owner="a reader"):
        pass
    for number in range(40):
        with other.transaction(message=str(number)) as store:
            zarr.create_group(store, path=f"g{number}")
    session.commit("on top of all")
    assert next(repo.ancestry()).message == "on top of all"
