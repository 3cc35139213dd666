"""A session that keeps few refs in memory does all that one does that keeps all of them.

Two repositories go through the same: refs are set in bulk and one by one, unset, cut off by
resizes, arrays are moved, deleted and made anew; forks come back, others commit first, the session
is rebased, discards its changes, commits and amends. After every step both sessions read the same,
and whatever one is refused the other is refused.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from storages import CountingStorage, CrashDisk
from stored import array_document, get, put
from zarr_manifests import Fork, Repository, Session
from zarr_manifests.errors import ConflictError, ManifestsError
from zarr_manifests.storage.memory import MemoryStorage

BUDGET = 8
PATHS = ("a", "g/b")
LONGEST = 40
COMMON: dict[str, Any] = {"inline-chunk-bytes": 4, "compaction": {"mode": "manual"}}
CONTAINERS: dict[str, Any] = {"raw": "memory://raw-of-the-spill"}
for name in "xy":
    MemoryStorage("raw-of-the-spill").put(name, Random(name).randbytes(1000))


def document(length: int) -> bytes:
    return array_document((length, 2), dimension_names=["time", "side"])


def length_of(target: Session | Fork, path: str) -> int:
    """Rows of an array; 0 if it is not there."""
    return json.loads(get(target.store, f"{path}/zarr.json") or b'{"shape": [0]}')["shape"][0]


def read(session: Session) -> dict[str, Any]:
    """How long each array is, and what each of its chunks holds."""
    lengths = {path: length_of(session, path) for path in (*PATHS, "g/m")}
    return {
        path: (length, dict(session.read_chunks(path)))
        for path, length in lengths.items()
        if length
    }


class Side:
    """One of the two, which must not be told from the other."""

    def __init__(self, spill_refs: int) -> None:
        memory = MemoryStorage(f"spill-{spill_refs}")  # by this name a fork finds it
        memory.delete_many([info.key for info in memory.list()])
        self.storage = CountingStorage(memory)
        config = {**COMMON, "spill-refs": spill_refs}
        self.repository = zm.create(self.storage, config, virtual_containers=CONTAINERS)
        self.session = self.repository.writable_session()
        for path in PATHS:
            put(self.session.store, f"{path}/zarr.json", document(LONGEST))
        self.bulk(self.session, PATHS[0], 0, 9, 1)
        self.session.commit("begin")

    def bulk(self, target: Session | Fork, path: str, first: int, count: int, step: int) -> None:
        rows = np.arange(first, length_of(target, path), step)[:count]
        if not len(rows):
            return
        index = np.stack([np.repeat(rows, 2), np.tile([0, 1], len(rows))], axis=1)
        n = len(index)
        files = ["virtual://raw/x", "virtual://raw/y"]
        sizes = np.arange(n) + count
        target.store.set_virtual_refs(path, index, files, sizes % 2, np.arange(n) * step, sizes)

    def one(self, target: Session | Fork, path: str, at: int, value: bytes) -> None:
        if length_of(target, path):
            put(target.store, f"{path}/c/{at}/1", value)

    def unset(self, target: Session | Fork, path: str, at: int) -> None:
        target.store.delete_sync(f"{path}/c/{at}/0")

    def resize(self, target: Session | Fork, path: str, length: int) -> None:
        if length_of(target, path):
            put(target.store, f"{path}/zarr.json", document(length))

    def delete(self, target: Session | Fork, path: str) -> None:
        asyncio.run(target.store.delete_dir(path))

    def recreate(self, target: Session | Fork, path: str) -> None:
        self.delete(target, path)
        put(target.store, f"{path}/zarr.json", document(LONGEST))

    def move(self, path: str, to: str) -> None:
        self.session.move(path, to)

    def fork(self, work: list[tuple[Any, ...]]) -> None:
        fork = pickle.loads(pickle.dumps(self.session.fork()))
        for name, *arguments in work:
            getattr(self, name)(fork, *arguments)
        self.session.merge(pickle.loads(pickle.dumps(fork)))

    def rival(self, path: str, at: int) -> None:
        other = self.repository.writable_session()
        self.one(other, path, at, b"rival")
        self.bulk(other, path, at, 3, 1)
        if other.status():
            other.commit("rival")

    def rebase(self, policy: Any) -> None:
        self.session.rebase(policy)

    def discard(self) -> None:
        self.session.discard_changes()

    def commit(self) -> None:
        if self.session.status():
            try:
                self.session.commit("changes")
            except ConflictError:
                self.session.discard_changes()
                raise

    def amend(self) -> None:
        self.session.amend("amended")

    def facts(self) -> Any:
        """What must be the same on both sides."""
        history = list(self.repository.ancestry())
        snapshots = [
            (i.kind, dict(i.totals), read(self.repository.readonly_session(i.snapshot_id)))
            for i in history
        ]
        changes = [
            (c.path, c.operation, sorted(map(tuple, c.coordinates.tolist())))
            for c in self.repository.changes(history[-1].snapshot_id, mode="log")
        ]
        return snapshots, sorted(changes)


WHERE = st.sampled_from(PATHS)
AT = st.integers(0, LONGEST - 1)
VALUE = st.tuples(st.sampled_from([b"%d", b"%d, longer than inline"]), st.integers(0, 9)).map(
    lambda value: value[0] % value[1]
)
BULK = st.tuples(st.just("bulk"), WHERE, AT, st.integers(1, 20), st.integers(1, 3))
WORK = st.one_of(
    BULK,
    BULK,
    BULK,
    st.tuples(st.just("one"), WHERE, AT, VALUE),
    st.tuples(st.just("unset"), WHERE, AT),
    st.tuples(st.just("resize"), WHERE, st.integers(1, LONGEST + 10)),
)
RARE = st.tuples(st.sampled_from(["delete", "recreate"]), WHERE)
TURNS = st.one_of(
    *[WORK.map(lambda work: ("work", work))] * 3,
    RARE.map(lambda work: ("work", work)),
    st.tuples(st.just("fork"), st.lists(WORK, min_size=1, max_size=3)),
    st.tuples(st.just("rival"), WHERE, AT),
    st.tuples(st.just("rebase"), st.sampled_from(["fail", "ours", "theirs"])),
    st.sampled_from([("commit",), ("commit",), ("amend",), ("discard",), ("move", "a", "g/m")]),
)


def done(call: Callable[[], None]) -> str:
    """What came of it."""
    try:
        call()
    except ManifestsError as error:
        conflicts = getattr(error, "conflicts", ())
        return f"{type(error).__name__} {sorted({(c.path, c.component) for c in conflicts})}"
    return "done"


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(TURNS, min_size=4, max_size=12))
def test_what_is_spilled_makes_no_difference(turns: list[tuple[Any, ...]]) -> None:
    few, many = sides = Side(BUDGET), Side(1_000_000)
    for name, *arguments in [*turns, ("commit",)]:
        outcomes = []
        for side in sides:
            if name == "work":
                what, *rest = arguments[0]
                outcomes.append(done(partial(getattr(side, what), side.session, *rest)))
            else:
                outcomes.append(done(partial(getattr(side, name), *arguments)))
        event(f"{name} {outcomes[0].split()[0]}")
        assert outcomes[0] == outcomes[1]
        assert read(few.session) == read(many.session)
        assert few.session.status() == many.session.status()
    assert few.facts() == many.facts()
    keys = [r.key for r in few.storage.log if r.op == "create"]
    assert len(keys) == len(set(keys))
    assert few.repository.verify().ok


def make(storage: Any, spill_refs: int = BUDGET) -> Repository:
    """With an array of 60 chunks, none of which is there."""
    config = {**COMMON, "inline-chunk-bytes": 0, "pack-chunk-bytes": 0, "spill-refs": spill_refs}
    repository = zm.create(storage, config)
    with repository.transaction(message="array") as store:
        zarr.create_array(
            store, name="a", shape=(60,), chunks=(1,), dtype="u1", compressors=None,
            dimension_names=["time"],
        )  # fmt: skip
    return repository


def values(source: Session | Repository) -> list[int]:
    session = source.readonly_session() if isinstance(source, Repository) else source
    return np.asarray(zarr.open_array(session.store, path="a")[:]).tolist()


def test_appends_land_behind_those_of_others() -> None:
    repository = make(storage := MemoryStorage())
    sessions = [repository.writable_session(append_dim="time") for _ in "12"]
    for session, many in zip(sessions, (3, 50), strict=True):
        array = zarr.open_array(session.store, path="a")
        array.resize((60 + many,))
        array[60:] = np.arange(many) + many
    assert [*storage.list("manifests/")]
    for session in sessions:
        session.commit("append")
    assert values(repository)[60:] == [3, 4, 5, *range(50, 100)]
    assert repository.verify().ok


def test_a_leased_writer_keeps_what_it_has_spilled() -> None:
    repository = make(storage := MemoryStorage())
    with repository.writable_session(lease=timedelta(minutes=2)) as session:
        zarr.open_array(session.store, path="a")[:] = 7
        assert [*storage.list("manifests/")]
        with repository.transaction(message="go on") as store:
            zarr.create_group(store, path="g")
        repository.garbage_collect(grace=timedelta(0))
        session.commit("bulk")
    assert values(repository) == [7] * 60
    assert repository.verify().ok


def test_what_is_spilled_while_forks_are_merged_survives_a_crash(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path / "repository")
    storage = disk.storage()
    session = make(storage, 30).writable_session()
    forks = [session.fork() for _ in range(3)]
    for i, fork in enumerate(forks):  # two have more than there is room for
        zarr.open_array(fork.store, path="a")[20 * i : 20 * (i + 1)] = i + 1
    session.merge(*forks)
    assert [*storage.list("manifests/")]
    session.commit("all of them")
    disk.crash()
    reader = zm.open(storage)
    assert values(reader) == [1] * 20 + [2] * 20 + [3] * 20
    assert reader.verify().ok


@pytest.mark.parametrize("budget", [10_000_000, 40, 12])
def test_a_copy_that_is_merged_again_brings_nothing_back(budget: int) -> None:
    """However many chunks it has: in memory one by one, as tables, or not in memory."""
    repository = make(MemoryStorage(), budget)
    session = repository.writable_session()
    fork = session.fork()
    array = zarr.open_array(fork.store, path="a")
    array[:30] = 7
    session.merge(fork)
    session.store.delete_sync("a/c/1")
    array[30:50] = 8
    session.merge(fork)
    session.store.delete_sync("a/c/40")
    array[2] = array[55] = 5
    session.merge(fork)
    expected = [7] * 30 + [8] * 20 + [0] * 10
    expected[1] = expected[40] = 0
    expected[2] = expected[55] = 5
    assert values(session) == expected
    session.commit("merged")
    assert values(repository) == expected
