"""Whatever fails or crashes, at whatever call: the old state or the new one, and never a lie.

Every storage call of a scenario is made to fail, to lose its answer, or to be the process's last.
Afterwards a fresh open must find exactly the state before or exactly the state after, agree with
what the caller was told, and let the same thing be done again.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zarr
from msgspec.structs import replace

import zarr_manifests as zm
from effort import chosen
from in_order import in_order
from inside import root_of
from storages import (
    CrashDisk,
    Fault,
    FaultKind,
    FaultyStorage,
    SimulatedCrash,
    WrappedStorage,
    copy_of,
)
from stored import contents, put
from zarr_manifests import Repository, Session
from zarr_manifests.errors import (
    CommitOutcomeUnknownError,
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    NotARepositoryError,
    SessionClosedError,
    StorageError,
    StorageFullError,
    TransactionAlreadyCommitted,
)
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import Capabilities

RUNTIME = in_order()
KINDS: tuple[FaultKind, ...] = (
    "fail_before",
    "fail_after",
    "lose_answer",
    "duplicate_late",
    "crash_before",
    "crash_after",
    "truncate",
    "flip_bits",
)
BIG = bytes(range(256)) * 8
every_or_all = pytest.mark.parametrize(
    "every", [pytest.param(17, id="some"), pytest.param(1, id="all", marks=pytest.mark.sweep)]
)
"""`make test` tries one call of so many, `make sweep` each."""


class RemoteStorage(WrappedStorage):
    """Calls that fail may still land, for all a caller knows."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.storage.capabilities, inline=False)


def opened(storage: Storage) -> Repository:
    return zm.open(storage, runtime=RUNTIME)


def seed(storage: Storage, folds_at: int = 50) -> None:
    """A repository with an array and two chunks, and packs of one chunk each."""
    config = {"compaction": {"max-delta-count": folds_at}, "pack-bytes": 3000}
    session = zm.create(storage, config, runtime=RUNTIME).writable_session("main")
    zarr.create_array(session.store, name="a", shape=(9,), chunks=(1,), dtype="u1")
    put(session, "a/c/0", b"old")
    put(session, "a/c/1", b"old" + BIG)
    session.commit("old")


def commit(storage: Storage) -> str | None:
    """Write three chunks, of which two are packs, delete one, commit: all of it once.

    One pack is written before the commit and one by it.
    """
    session = opened(storage).writable_session("main")
    put(session, "a/c/1", b"new")
    put(session, "a/c/2", b"new" + BIG)
    put(session, "a/c/3", b"newer" + BIG)
    session.store.delete_sync("a/c/0")
    try:
        return session.commit("new", txn=("app", 1))
    except TransactionAlreadyCommitted as error:
        return error.snapshot_id


@dataclass(frozen=True)
class State:
    """All that a reader can see; not which compactions there were, of which each is a commit."""

    heads: Mapping[str, Mapping[str, bytes]]
    tags: Mapping[str, Mapping[str, bytes]]
    messages: tuple[str, ...]

    @classmethod
    def of(cls, storage: Storage) -> State | None:
        try:
            repository = opened(storage)
        except (NotARepositoryError, CorruptObjectError):
            return None
        return cls(
            {b: contents(repository.readonly_session(b)) for b in repository.list_branches()},
            {t: contents(repository.readonly_session(t)) for t in repository.list_tags()},
            tuple(info.message for info in repository.ancestry() if info.kind != "rewrite"),
        )


def faults(
    base: Storage, scenario: Callable[[Storage], object], kinds: Sequence[FaultKind], every: int
) -> Iterator[tuple[str, MemoryStorage, object]]:
    """Calls of the scenario, with faults: what it was, the storage, how it ended."""
    probe = FaultyStorage(copy_of(base))
    scenario(probe)
    assert len(probe.calls) > 3
    cases = itertools.product(enumerate(probe.calls, 1), kinds)
    for (number, call), kind in itertools.islice(cases, 0, None, every):
        storage = copy_of(base)
        faulty = FaultyStorage(storage)
        faulty.fail_at(number, kind)
        try:
            outcome: object = scenario(faulty)
        except (ManifestsError, SimulatedCrash) as error:
            outcome = error
        crashed = isinstance(outcome, SimulatedCrash)
        # A head that finds nothing is an error, after which no fault comes.
        assert crashed == (kind == "crash_before") or kind == "crash_after"
        yield f"{kind} at {number} {call}", storage, outcome


def check_outcome(where: str, outcome: object, found: object, old: object, new: object) -> None:
    """What the caller was told is what a reader finds."""
    if isinstance(outcome, SimulatedCrash | CommitOutcomeUnknownError):
        assert found in (old, new), where
    elif isinstance(outcome, ManifestsError):
        assert found == old, where
    else:
        assert found == new, where


# --- operations ------------------------------------------------------------------------------

NOW = timedelta(0)


def with_history(storage: Storage) -> None:
    """Commits of which some can expire and be deleted, a branch that is gone, and garbage."""
    seed(storage)
    repository = opened(storage)
    repository.create_branch("gone")
    repository.create_branch("side")
    for branch in ("gone", "main", "main", "side"):
        session = repository.writable_session(branch)
        put(session, "a/c/1", branch.encode() + BIG)
        session.commit(f"on {branch}")
    repository.create_tag("tagged")
    session = repository.writable_session()
    put(session, "a/c/1", b"newest" + BIG)
    session.commit("newest")
    repository.delete_branch("gone")


def with_expired(storage: Storage) -> None:
    with_history(storage)
    opened(storage).expire_snapshots(keep_last=1)


def with_a_damaged_root(storage: Storage) -> None:
    with_history(storage)
    storage.put("current", b"damaged")


def recovered(storage: Storage) -> None:
    with contextlib.suppress(InvalidArgumentError):  # there is nothing to recover any more
        zm.recover(storage, runtime=RUNTIME)


type Operation = tuple[Callable[[Storage], None], Callable[[Storage], object]]

OPERATIONS: dict[str, Operation] = {
    "create": (lambda s: None, lambda s: zm.open(s, runtime=RUNTIME, create=True) and None),
    "commit": (seed, commit),
    "commit far away, and fold": (partial(seed, folds_at=2), lambda s: commit(RemoteStorage(s))),
    "expire": (with_history, lambda s: opened(s).expire_snapshots(keep_last=1)),
    "collect": (with_expired, lambda s: opened(s).garbage_collect(NOW)),
    "recover": (with_a_damaged_root, recovered),
}
LEFT_OUT: dict[str, tuple[FaultKind, ...]] = {
    "collect": ("crash_before", "crash_after"),  # tried where collections are
    "recover": ("truncate", "flip_bits"),  # damage is what it looks for
}


def check_done_again(
    operation: Callable[[Storage], object], storage: Storage, outcome: object, new: State | None
) -> None:
    again = operation(storage)
    assert State.of(storage) == new
    assert opened(storage).verify().problems == ()
    if isinstance(outcome, str):
        assert again == outcome
        assert again in {info.snapshot_id for info in opened(storage).ancestry()}


@pytest.mark.parametrize("name", OPERATIONS)
@every_or_all
def test_an_operation_is_done_or_not_whatever_fails_and_can_be_repeated(
    name: str, every: int
) -> None:
    prepare, operation = OPERATIONS[name]
    base = MemoryStorage()
    prepare(base)
    old, done = State.of(base), copy_of(base)
    operation(done)
    new = State.of(done)
    assert (old == new) == (name == "collect")
    folded = any(info.kind == "rewrite" for info in opened(done).ancestry())
    assert folded == ("fold" in name)
    ends = set()
    kinds = [kind for kind in KINDS if kind not in LEFT_OUT.get(name, ())]
    for where, storage, outcome in faults(base, operation, kinds, every):
        check_outcome(where, outcome, State.of(storage), old, new)
        ends.add(type(outcome))
        check_done_again(operation, storage, outcome, new)
    assert len(ends) > 1


@pytest.mark.parametrize("name", ["create", "commit", "expire", "collect", "recover"])
@every_or_all
def test_an_operation_is_done_or_not_at_whatever_call_the_disk_crashes(
    name: str, tmp_path: Path, every: int
) -> None:
    """All that was not synced is lost, or some of it; what was acknowledged is there."""
    prepare, operation = OPERATIONS[name]
    first = tmp_path / "template"
    first.mkdir()
    prepare(LocalStorage(first))
    old = State.of(LocalStorage(first))
    disk = CrashDisk(shutil.copytree(first, tmp_path / "whole"))
    whole = disk.storage()
    operation(whole)
    new = State.of(whole)
    calls = list(disk.calls)
    assert len(calls) > 5
    found = []
    for number in chosen(len(calls) + 1, every):  # and after the last
        if number > 1 and calls[number - 2] in ("open_temp", "write"):
            continue  # what has no name yet is nothing, whatever is in it
        disk = CrashDisk(shutil.copytree(first, tmp_path / str(number)))
        disk.crash_at = number
        try:
            outcome: object = operation(disk.storage())
        except SimulatedCrash as error:
            outcome = error
        assert isinstance(outcome, SimulatedCrash) == (number <= len(calls))
        disk.crash(random.Random(number) if number % 2 else None)
        storage = disk.storage()
        found.append(State.of(storage))
        check_outcome(f"{number} {calls[number - 2]}", outcome, found[-1], old, new)
        check_done_again(operation, storage, outcome, new)
    assert found[0] == old
    assert found[-1] == new


# --- faults that last ------------------------------------------------------------------------


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    seed(storage)
    return storage


def _commit_with(storage: Storage, *faults: Fault) -> tuple[Session, object]:
    faulty = FaultyStorage(storage, faults)
    session = zm.open(faulty, runtime=RUNTIME).writable_session("main")
    put(session, "a/c/5", b"new" + BIG)
    try:
        return session, session.commit("new")
    except ManifestsError as error:
        return session, error


def test_swap_that_always_fails_far_away_is_in_doubt(storage: MemoryStorage) -> None:
    faulty = FaultyStorage(storage, [Fault("fail_before", op="cas", count=None)])
    session = zm.open(RemoteStorage(faulty), runtime=RUNTIME).writable_session("main")
    put(session, "a/c/5", b"new")
    with pytest.raises(CommitOutcomeUnknownError) as caught:
        session.commit("new")
    assert len(bytes.fromhex(caught.value.commit_id)) == 16
    with pytest.raises(SessionClosedError):
        session.commit("again")


@pytest.mark.parametrize("before", [0, 1])
def test_a_full_disk_far_away_is_a_refusal_only_if_nothing_was_sent_before(
    storage: MemoryStorage, before: int
) -> None:
    """A swap that timed out may still land when the next one is refused."""
    faults = [Fault("fail_before", op="cas", count=before)] if before else []
    faults.append(Fault("fail_before", op="cas", skip=before, error=StorageFullError))
    faulty = RemoteStorage(FaultyStorage(storage, faults))
    session = zm.open(faulty, runtime=RUNTIME).writable_session("main")
    put(session, "a/c/5", b"new")
    with pytest.raises(CommitOutcomeUnknownError if before else StorageFullError):
        session.commit("new")
    if before:
        with pytest.raises(SessionClosedError):
            session.commit("again")
    else:
        session.commit("again")


@pytest.mark.parametrize("kind", ["fail_before", "truncate"])
def test_lost_answer_and_then_an_unreadable_root_is_in_doubt(
    storage: MemoryStorage, kind: FaultKind
) -> None:
    """It took effect, and nobody may say that it did not."""
    new = copy_of(storage)
    _commit_with(new)
    # The open and the session read the root once each.
    unreadable = Fault(kind, op="get_tagged", skip=2, count=None)
    _, outcome = _commit_with(storage, Fault("fail_after", op="cas"), unreadable)
    assert isinstance(outcome, CommitOutcomeUnknownError)
    assert State.of(storage) == State.of(new)


def _commit_others(storage: Storage, commits: int) -> None:
    session = zm.open(storage).writable_session("main")
    for i in range(commits):
        put(session, "a/c/8", bytes([i]))
        session.commit(f"other {i}")


class _Overtaking(WrappedStorage):
    """Loses the answer to the first swap, and lets others commit before it is looked for."""

    def __init__(self, storage: Storage, others: Callable[[], None]) -> None:
        super().__init__(storage)
        self._others: Callable[[], None] | None = others

    def cas(self, key: str, data: bytes, token: str | None, **kwargs: Any) -> str | None:
        new = super().cas(key, data, token, **kwargs)
        if self._others is None:
            return new
        others, self._others = self._others, None
        others()
        raise StorageError("the answer was lost")


@pytest.mark.parametrize("commits", [1, 40])
def test_lost_answer_is_found_in_the_log_or_the_archive(
    storage: MemoryStorage, commits: int
) -> None:
    """The tail of the log holds 32 operations; after that the archive tells."""
    overtaking = _Overtaking(storage, partial(_commit_others, storage, commits))
    session = zm.open(overtaking, runtime=RUNTIME).writable_session("main")
    put(session, "a/c/5", b"mine")
    snapshot_id = session.commit("mine")
    infos = [*zm.open(storage).ancestry()]
    assert [info.message for info in infos].count("mine") == 1
    assert snapshot_id in {info.snapshot_id for info in infos}
    put(session, "a/c/6", b"mine too")
    session.commit("goes on")
    assert contents(zm.open(storage).readonly_session())["a/c/8"] == bytes([commits - 1])


@pytest.mark.parametrize("lost", [1, 32])
def test_lost_answer_is_in_doubt_only_without_any_archive(
    storage: MemoryStorage, lost: int
) -> None:
    """The log of any of the next 32 versions tells."""

    def others() -> None:
        mine = root_of(storage).version
        _commit_others(storage, 40)
        storage.delete_many([f"root/{version:020d}" for version in range(mine, mine + lost)])

    session = zm.open(_Overtaking(storage, others), runtime=RUNTIME).writable_session("main")
    put(session, "a/c/5", b"mine")
    if lost == 1:
        session.commit("mine")
        assert [info.message for info in zm.open(storage).ancestry()].count("mine") == 1
    else:
        with pytest.raises(CommitOutcomeUnknownError):
            session.commit("mine")


@pytest.mark.parametrize(
    ("op", "key"), [("create", "chunks/*"), ("create", "snapshots/*"), ("cas", "current")]
)
def test_a_commit_for_which_there_was_no_room_can_be_tried_again(
    storage: MemoryStorage, op: str, key: str
) -> None:
    old = State.of(storage)
    full = FaultyStorage(storage, [Fault("fail_before", op=op, key=key, error=StorageFullError)])
    session = zm.open(full, runtime=RUNTIME).writable_session("main")
    put(session, "a/c/2", b"new" + BIG)
    with pytest.raises(StorageFullError):
        session.commit("new")
    assert State.of(storage) == old
    snapshot_id = session.commit("new")
    assert contents(zm.open(storage).readonly_session())["a/c/2"] == b"new" + BIG
    assert zm.open(storage).list_branches()["main"] == snapshot_id


@pytest.mark.parametrize("kind", ["lose_answer", "fail_after"])
def test_a_swap_that_is_found_is_a_commit_only_once_it_is_durable(
    storage: MemoryStorage, kind: FaultKind
) -> None:
    unsynced = Fault("fail_before", op="sync", key="current", count=None)
    _, outcome = _commit_with(storage, Fault(kind, op="cas"), unsynced)
    assert isinstance(outcome, CommitOutcomeUnknownError)
    assert "durable" in str(outcome)
