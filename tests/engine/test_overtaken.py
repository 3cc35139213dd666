"""Commits that others overtake: with commits, compactions or both, once and by the dozen."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Session
from zarr_manifests.errors import ConflictError
from zarr_manifests.ids import session_of
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage

MODES = ("minor", "major", "full")
MANUAL = {"compaction": {"mode": "manual", "fan-in": 2}}


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def get(session: Session, key: str) -> bytes | None:
    found = session.store.get_sync(key)
    return None if found is None else found.to_bytes()


def contents(storage: MemoryStorage) -> dict[str, bytes | None]:
    session = zm.open(storage).readonly_session()
    return {key: get(session, key) for key in contents_of(session.store).keys_below("")}


def chunks(storage: MemoryStorage) -> dict[int, bytes | None]:
    """What is there of the array's chunks."""
    found = contents(storage)
    return {int(key[4:]): value for key, value in found.items() if key.startswith("a/c/")}


def made(config: dict[str, Any] | None = None, size: int = 100) -> MemoryStorage:
    storage = MemoryStorage()
    with zm.create(storage, config or MANUAL).transaction(message="array") as store:
        zarr.create_group(store)
        zarr.create_array(store, name="a", shape=(size,), chunks=(1,), dtype="u1")
    return storage


def overtaking(do: Callable[[int], object], swaps: int = 100) -> Runtime:
    """Does something before each of so many swaps, told their number."""
    seen = 0

    def checkpoint(point: str) -> None:
        nonlocal seen
        if point == "root.swap" and seen < swaps:
            seen += 1
            do(seen)

    return replace(SYSTEM, checkpoint=checkpoint, sleep=lambda _: None)


def commit(storage: MemoryStorage, at: int, value: bytes, config: Any = None) -> None:
    session = zm.open(storage, config).writable_session()
    put(session, f"a/c/{at}", value)
    session.commit(f"chunk {at}")


def messages(storage: MemoryStorage) -> Counter[str]:
    """Of all commits but rewrites, and how often each is there."""
    history = zm.open(storage).ancestry()
    return Counter(info.message for info in history if info.kind != "rewrite")


# --- by commits that are compacted -----------------------------------------------------------

AUTO = {"compaction": {"mode": "auto", "min-delta-count": 1, "max-delta-count": 1, "fan-in": 2}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("swap", [0, 1, 2])
@pytest.mark.parametrize("config", [MANUAL, AUTO, AUTO | {"commits": {"mode": "rewrite"}}])
def test_what_is_compacted_before_a_commit_or_beside_it_is_not_lost(
    config: dict[str, Any], swap: int, mode: str
) -> None:
    """Before the commit, before its swap, or before the swap of the compaction that it makes due.

    What the others have committed is in the base or a run by then, and in no delta of its own.
    """
    storage = made()

    def others(reached: int) -> None:
        if reached != swap:
            return
        for at in range(10):
            commit(storage, at, b"theirs", MANUAL)
        assert zm.open(storage, MANUAL).compact(mode=mode).snapshot_id is not None

    session = zm.open(storage, config, runtime=overtaking(others)).writable_session()
    for at in range(20, 30):
        put(session, f"a/c/{at}", b"mine")
    others(0)
    session.commit("mine")
    theirs = {} if swap == 2 and config is MANUAL else dict.fromkeys(range(10), b"theirs")
    assert chunks(storage) == theirs | dict.fromkeys(range(20, 30), b"mine")
    expected = {"create repository": 1, "array": 1, "mine": 1}
    assert messages(storage) == expected | {f"chunk {at}": 1 for at in theirs}
    # The session goes on from what is there, and sees it all.
    assert get(session, "a/c/20") == b"mine"
    put(session, "a/c/30", b"more")
    session.commit("more")
    assert chunks(storage)[30] == b"more"
    assert theirs.items() <= chunks(storage).items()


def test_the_logs_of_what_was_compacted_still_say_what_conflicts() -> None:
    storage = made()
    commit(storage, 5, b"first")
    for mode in MODES:
        repository = zm.open(storage)
        session, shifted = repository.writable_session(), repository.writable_session()
        put(session, "a/c/5", b"mine")
        shifted.shift_array("a", [1])
        put(shifted, "a/c/90", b"after the shift")
        for at in range(10):
            commit(storage, at, mode.encode())
        assert repository.compact(mode=mode).snapshot_id is not None
        with pytest.raises(ConflictError) as caught:
            session.commit("mine")
        (conflict,) = caught.value.conflicts
        assert (conflict.path, conflict.component, conflict.chunks) == ("/a", "chunks", ((5,),))
        with pytest.raises(ConflictError, match="shrink"):
            shifted.commit("shifted")
        assert chunks(storage) == dict.fromkeys(range(10), mode.encode())


@pytest.mark.parametrize("mode", MODES)
def test_versioning_goes_on_beside_compactions(mode: str) -> None:
    """What was done to versions is overtaken by a commit, and by a compaction of it."""
    storage = made()
    for at in range(4):
        commit(storage, at, b"old")
    at_old = zm.open(storage).list_branches()["main"]
    commit(storage, 0, b"new")
    wrong = zm.open(storage).list_branches()["main"]
    zm.open(storage).create_branch("side", at_old)
    count = 10

    def others(reached: int) -> None:
        nonlocal count
        if reached == 1:
            count += 1
            commit(storage, count, b"theirs")
            zm.open(storage).compact(mode=mode)

    repository = zm.open(storage, runtime=overtaking(others))
    repository.revert(wrong)
    assert chunks(storage) == {**dict.fromkeys(range(4), b"old"), 11: b"theirs"}
    side = zm.open(storage).writable_session("side")
    put(side, "a/c/50", b"side")
    picked = side.commit("on the side")
    zm.open(storage, runtime=overtaking(others)).cherry_pick(picked)
    kept = {**dict.fromkeys(range(4), b"old"), 11: b"theirs", 12: b"theirs", 50: b"side"}
    assert chunks(storage) == kept
    commit(storage, 60, b"60")
    session = zm.open(storage, runtime=overtaking(others)).writable_session()
    put(session, "a/c/61", b"61")
    with pytest.raises(ConflictError, match="not the head"):
        session.amend("both")
    session.rebase()
    session.commit("61 apart")
    assert chunks(storage) == kept | {13: b"theirs", 60: b"60", 61: b"61"}


class World:
    """Writers that never touch the same, so that each commit of them must land."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.storage = made()
        self.landed: dict[str, bytes] = {}
        self.sessions: dict[int, Session] = {}
        self.pending: dict[int, dict[str, bytes | None]] = {}
        self.overtaken = 0
        self.busy: set[int] = set()

    def step(self) -> None:
        idle = [writer for writer in range(4) if writer not in self.busy]
        if not idle or self.rng.random() < 0.2:
            self.compact()
            return
        writer = int(self.rng.choice(idle))
        match self.rng.integers(4):
            case 0:
                self.change(writer)
            case 1 if writer in self.sessions:
                self.sessions[writer].rebase()
            case _:
                self.commit(writer)

    def compact(self) -> None:
        mode = MODES[self.rng.integers(3)]
        runtime = overtaking(lambda _: self.meanwhile(), 1)
        config = {"compaction": {"mode": "manual", "fan-in": 2, "size-ratio": 0.01}}
        zm.open(self.storage, config, runtime=runtime).compact(mode=mode)

    def meanwhile(self) -> None:
        if len(self.busy) < 2 and self.rng.random() < 0.5:
            self.overtaken += 1
            for _ in range(int(self.rng.integers(1, 4))):
                self.step()

    def change(self, writer: int) -> None:
        if writer not in self.sessions:
            runtime = overtaking(lambda _: self.meanwhile(), 3)
            self.sessions[writer] = zm.open(self.storage, runtime=runtime).writable_session()
            self.pending[writer] = {}
        session, pending = self.sessions[writer], self.pending[writer]
        for _ in range(int(self.rng.integers(1, 6))):
            value = self.rng.bytes(int(self.rng.choice([3, 800])))
            key = f"a/c/{writer * 20 + int(self.rng.integers(20))}"
            match self.rng.integers(8):
                case 0:
                    session.store.delete_sync(key)
                    pending[key] = None
                case 1:
                    key = f"notes-{writer}.txt"
                    if self.rng.random() < 0.5:
                        put(session, key, value)
                        pending[key] = value
                    else:
                        session.store.delete_sync(key)
                        pending[key] = None
                case 2:
                    node = contents_of(session.store).node("a")
                    assert node is not None
                    fields = json.loads(node.documents["zarr.json"])
                    fields["attributes"][f"of {writer}"] = value[:3].hex()
                    put(session, "a/zarr.json", json.dumps(fields).encode())
                    pending[f"attribute of {writer}"] = value[:3]
                case _:
                    put(session, key, value)
                    pending[key] = value

    def commit(self, writer: int) -> None:
        self.change(writer)
        self.busy.add(writer)
        session = self.sessions[writer]
        if session.status():
            session.commit(f"of {writer}")
        self.busy.discard(writer)
        for key, value in self.pending[writer].items():
            if value is None:
                self.landed.pop(key, None)
            else:
                self.landed[key] = value
        self.pending[writer] = {}
        if self.rng.random() < 0.5:
            del self.sessions[writer]
        self.check()

    def check(self) -> None:
        if self.busy:
            return  # what they are about to say has landed may have
        found = contents(self.storage)
        fields = json.loads(found.pop("a/zarr.json") or b"")
        found.pop("zarr.json")
        found |= {f"attribute {k}": bytes.fromhex(v) for k, v in fields["attributes"].items()}
        assert found == self.landed


@pytest.mark.parametrize("seed", range(20))
def test_what_does_not_meet_always_lands(seed: int) -> None:
    world = World(seed)
    for _ in range(25):
        world.step()
    assert world.overtaken > 0


# --- nothing is uploaded twice ---------------------------------------------------------------


def manifests_of(
    counting: CountingStorage, sessions: Container[str] | None = None
) -> Counter[bytes]:
    """What was uploaded as manifests, by these sessions or by all, and how often."""
    keys = [r.key for r in counting.log if r.op == "create" and r.key.startswith("manifests/")]
    assert len(keys) == len(set(keys))
    return Counter(
        counting.get(key) for key in keys if sessions is None or session_of(key) in sessions
    )


def fill(session: Session, start: int, stop: int) -> None:
    """Chunks whose refs do not fit into a delta."""
    rng = np.random.default_rng(start)
    for at in range(start, stop):
        put(session, f"a/c/{at}", rng.bytes(200))


def test_a_commit_that_gave_up_uploads_no_manifest_again() -> None:
    storage = made(size=1000)
    counting = CountingStorage(storage)

    def others(reached: int) -> None:
        if reached < 3:
            commit(storage, 500 + reached, bytes([reached]))
        elif reached < 5:
            commit(storage, 0, bytes([reached]))

    runtime = overtaking(others)
    session = zm.open(counting, runtime=runtime).writable_session()
    fill(session, 0, 400)
    for _ in range(2):
        with pytest.raises(ConflictError, match="came first 1 times"):
            session.commit("gives up", retries=0)
    with pytest.raises(ConflictError, match=r"\(0,\)"):
        session.commit("is told who came first")
    session.commit("leaves it to them", rebase="theirs")
    first, left = manifests_of(counting).items()
    assert (first[1], left[1]) == (1, 1)
    assert chunks(storage)[0] == bytes([4])
    assert len(chunks(storage)) == 402


def test_rows_are_left_to_others_once() -> None:
    """What remains of a manifest is the same however often the commit is overtaken after that."""
    storage = made(size=1000)
    counting = CountingStorage(storage)
    commit_of = {1: 0, 2: 501, 3: 502}
    runtime = overtaking(lambda n: n in commit_of and commit(storage, commit_of[n], b"theirs"))
    session = zm.open(counting, runtime=runtime).writable_session()
    fill(session, 0, 400)
    session.commit("mine", rebase="theirs")
    assert list(manifests_of(counting).values()) == [1, 1]
    deltas = [r.key for r in counting.log if r.op == "create" and r.key.startswith("deltas/")]
    assert len(deltas) == 2
    assert chunks(storage)[0] == b"theirs"


SOON: dict[str, Any] = {"min-delta-count": 2, "max-delta-count": 8, "fan-in": 4}


@pytest.mark.parametrize("mode", ["manual", "auto"])
def test_eight_writers_of_disjoint_chunks_finish_forty_commits(mode: str) -> None:
    """Each commit has one manifest, which is uploaded once however often it is overtaken.

    By commits, and by the compactions that they make due.
    """
    config = {"compaction": SOON | {"mode": mode}, "commits": {"attempts": 100}}
    storage = made(config, size=8 * 5 * 60)
    counting = CountingStorage(storage)
    failed: list[BaseException] = []
    begin = threading.Barrier(8)

    def write(writer: int) -> None:
        try:
            session = zm.open(counting).writable_session()
            begin.wait()
            for number in range(5):
                start = (writer * 5 + number) * 60
                fill(session, start, start + 60)
                session.commit(f"{writer}: {number}")
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)
            begin.abort()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    history = [*zm.open(storage).ancestry()]
    commits = [info for info in history if info.kind != "rewrite"]
    assert (len(history) > len(commits)) == (mode == "auto")
    # A compaction that was overtaken is dropped, with what it has uploaded.
    uploads = manifests_of(counting, {info.snapshot_id.rpartition("-")[0] for info in commits})
    assert len(uploads) == 40
    assert set(uploads.values()) == {1}
    assert len(chunks(storage)) == 8 * 5 * 60
    landed = {f"{writer}: {number}": 1 for writer in range(8) for number in range(5)}
    assert messages(storage) == landed | {"create repository": 1, "array": 1}
    swaps = Counter(record.op for record in counting.log)["cas"]
    assert swaps > 40  # they did get in each other's way
