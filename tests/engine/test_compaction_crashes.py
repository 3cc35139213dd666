"""A compaction that crashes, at whatever call: nothing that was ever committed is lost or changed.

Every storage call of every kind of compaction is made the last one of its process, before or after
it took effect, or loses its answer; and every call to a disk that forgets what was not synced is
where the machine stops. Afterwards every snapshot there ever was reads as a dictionary says, and
the next commit and the next compaction succeed.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import chosen, some_or_all
from zarr_manifests import Session
from zarr_manifests.engine.compact import merge_leaves as repack
from zarr_manifests.errors import ManifestsError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import (
    CrashDisk,
    FaultKind,
    FaultyStorage,
    SimulatedCrash,
    copy_of,
    in_order,
)

RUNTIME = in_order()
KINDS: tuple[FaultKind, ...] = ("crash_before", "crash_after", "lose_answer")
MANUAL = {
    "compaction": {"mode": "manual", "fan-in": 2, "size-ratio": 0.1},
    "inline-chunk-bytes": 4,
    "chunk-manifests": {
        "sets": [
            {"few": {"max-manifest-size": 6, "cardinality": 2}},
            {"default": {"max-manifest-size": 8}},
        ],
        "rules": [{"target": "few", "path": "/(few|time).*"}],
        "splitting": [{"path": ".*", "along": {0: 4}}],
    },
}
AUTO = {"compaction": {"mode": "auto", "min-delta-count": 1, "max-delta-count": 1}}
REWRITE = {"compaction": {"mode": "manual"}, "commits": {"mode": "rewrite"}}

type Contents = dict[str, bytes]


@dataclass
class Made:
    """What each snapshot reads as, by id in the order in which they were made."""

    snapshots: dict[str, Contents]

    @property
    def head(self) -> Contents:
        return next(reversed(self.snapshots.values()))


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def contents(session: Session) -> Contents:
    found = {}
    for key in contents_of(session.store).keys_below(""):
        value = session.store.get_sync(key)
        assert value is not None
        found[key] = value.to_bytes()
    return found


def fill(session: Session, path: str, chunks: range, value: bytes) -> None:
    for i in chunks:
        put(session, f"{path}/c/{i}", value + bytes([i]) * (i % 3) * 3)


def seed(storage: Storage) -> Made:
    """A base of several manifests, and deltas and runs on it that set, unset, cut and delete."""
    repository = zm.create(storage, MANUAL, runtime=RUNTIME)
    made = Made({})

    def commit(session: Session) -> None:
        snapshot_id = session.commit("commit")
        made.snapshots[snapshot_id] = contents(repository.readonly_session(snapshot_id))

    session = repository.writable_session()
    for path in ("a", "b", "few", "time"):
        zarr.create_array(session.store, name=path, shape=(12,), chunks=(1,), dtype="u1",
                          dimension_names=(path,))  # fmt: skip
        fill(session, path, range(9 if path == "a" else 3), b"old")
    commit(session)
    repository.compact(mode="full")
    session = repository.writable_session()
    fill(session, "a", range(2, 5), b"new")
    session.store.delete_sync("a/c/7")
    session.store.delete_sync("few/c/1")
    commit(session)
    repository.compact(mode="minor")
    session = repository.writable_session()
    zarr.open_array(session.store, path="a").resize((8,))
    put(session, "other", b"opaque")
    commit(session)
    session = repository.writable_session()
    workspace_of(session.store).delete_below("b/")
    zarr.create_array(session.store, name="b", shape=(6,), chunks=(1,), dtype="u1")
    fill(session, "b", range(1, 3), b"again")
    zarr.open_array(session.store, path="a").resize((12,))
    commit(session)
    return made


def change(session: Session, value: bytes = b"next") -> str:
    """A commit like any other."""
    put(session, "a/c/3", value)
    put(session, "time/c/9", value)
    session.store.delete_sync("few/c/0")
    return session.commit("next")


def changed(before: Contents, value: bytes = b"next") -> Contents:
    after = before | {"a/c/3": value, "time/c/9": value}
    after.pop("few/c/0", None)
    return after


def compact(mode: str) -> Callable[[Storage], object]:
    return lambda storage: zm.open(storage, runtime=RUNTIME).compact(mode=mode)


def commit_with(config: Mapping[str, Any]) -> Callable[[Storage], object]:
    def scenario(storage: Storage) -> str:
        return change(zm.open(storage, config, runtime=RUNTIME).writable_session())

    return scenario


SCENARIOS: dict[str, Callable[[Storage], object]] = {
    "minor": compact("minor"),
    "major": compact("major"),
    "full": compact("full"),
    "auto": commit_with(AUTO),
    "rewrite": commit_with(REWRITE),
}
COMMITS = ("auto", "rewrite")


def check(storage: Storage, made: Made, name: str, outcome: object, where: object) -> bool:
    """All reads as it must, and goes on; returns whether a compaction had landed."""
    repository = zm.open(storage)
    for snapshot_id, expected in made.snapshots.items():
        found = contents(repository.readonly_session(snapshot_id))
        assert found == expected, (where, snapshot_id)
    head = contents(repository.readonly_session())
    if name in COMMITS:
        assert head in (made.head, changed(made.head)), where
        if isinstance(outcome, str):
            assert head == changed(made.head), where
            assert contents(repository.readonly_session(outcome)) == head, where
    else:
        assert head == made.head, where
    kinds = [info.kind for info in repository.ancestry()]
    last = change(repository.writable_session(), b"last")
    mode = "full" if name in COMMITS else name
    assert repository.compact(mode=mode).snapshot_id is not None, where
    fresh = zm.open(storage)
    assert contents(fresh.readonly_session()) == changed(made.head, b"last"), where
    assert contents(fresh.readonly_session(last)) == changed(made.head, b"last"), where
    return kinds[0] == "rewrite"


@pytest.fixture(scope="module")
def template() -> tuple[MemoryStorage, Made]:
    storage = MemoryStorage()
    made = seed(storage)
    assert len(made.snapshots) == 4
    return storage, made


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "STEP_REFS", 6)


def ends(
    base: Storage, scenario: Callable[[Storage], object], every: int
) -> Iterator[tuple[str, MemoryStorage, object]]:
    """Calls of the scenario, with faults: what it was, the storage, how it ended."""
    probe = FaultyStorage(copy_of(base))
    scenario(probe)
    assert len(probe.calls) > 5
    cases = itertools.product(enumerate(probe.calls, 1), KINDS)
    for (number, call), kind in itertools.islice(cases, 0, None, every):
        storage = copy_of(base)
        faulty = FaultyStorage(storage)
        faulty.fail_at(number, kind)
        try:
            outcome: object = scenario(faulty)
        except (ManifestsError, SimulatedCrash) as error:
            outcome = error
        assert (kind != "lose_answer") == isinstance(outcome, SimulatedCrash)
        yield f"{kind} at {number} {call}", storage, outcome


@pytest.mark.parametrize("name", SCENARIOS)
@some_or_all
def test_a_crash_at_every_call_to_the_storage(
    name: str, template: tuple[MemoryStorage, Made], every: int
) -> None:
    base, made = template
    landed = set()
    for where, storage, outcome in ends(base, SCENARIOS[name], every):
        landed.add(check(storage, made, name, outcome, where))
    assert landed == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
@some_or_all
def test_a_crash_at_every_call_to_the_disk(name: str, tmp_path: Path, every: int) -> None:
    first = tmp_path / "template"
    made = seed(LocalStorage(first))
    whole = tmp_path / "whole"
    shutil.copytree(first, whole)
    probe = CrashDisk(whole)
    SCENARIOS[name](probe.storage())
    calls = probe.calls
    assert len(calls) > 20
    landed = set()
    for number in chosen(len(calls), every):
        if number > 1 and calls[number - 2] in ("open_temp", "write"):
            continue  # what has no name yet is nothing, whatever is in it
        folder = tmp_path / str(number)
        shutil.copytree(first, folder)
        disk = CrashDisk(folder)
        disk.crash_at = number
        storage = disk.storage()
        try:
            outcome: object = SCENARIOS[name](storage)
        except SimulatedCrash as error:
            outcome = error
        # All that was not synced is lost, or some of it.
        disk.crash(random.Random(number) if number % 2 else None)
        storage = disk.storage()
        landed.add(check(storage, made, name, outcome, number))
        shutil.rmtree(folder)
    assert landed == {False, True}
