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
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import chosen, some_or_all
from inside import change_root, context_of, root_of
from zarr_manifests import Repository, Session
from zarr_manifests.engine.history.leases import give_up, renew_all, take
from zarr_manifests.engine.root.heartbeat import Held
from zarr_manifests.error_cases import NotARepositoryError, StorageFullError
from zarr_manifests.errors import (
    AlreadyExistsError,
    CommitOutcomeUnknownError,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
    SessionClosedError,
    StorageError,
    TransactionAlreadyCommitted,
)
from zarr_manifests.format.root import Root
from zarr_manifests.repository import build_index
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import Capabilities
from zarr_manifests.store import contents_of
from zarr_manifests.testing import (
    Call,
    CrashDisk,
    Fault,
    FaultKind,
    FaultyStorage,
    SimulatedCrash,
    WrappedStorage,
    copy_of,
    in_order,
)

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


class RemoteStorage(WrappedStorage):
    """Calls that fail may still land, for all a caller knows."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.storage.capabilities, inline=False)


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def contents(session: Session) -> dict[str, bytes]:
    found = {}
    for key in contents_of(session.store).keys_below(""):
        value = session.store.get_sync(key)
        assert value is not None
        found[key] = value.to_bytes()
    return found


def seed(storage: Storage, max_delta_count: int = 50) -> None:
    """A repository with an array and two chunks, and packs of one chunk each."""
    config = {"compaction": {"max-delta-count": max_delta_count}, "pack-bytes": 3000}
    session = zm.create(storage, config, runtime=RUNTIME).writable_session("main")
    zarr.create_array(session.store, name="a", shape=(9,), chunks=(1,), dtype="u1")
    put(session, "a/c/0", b"old")
    put(session, "a/c/1", b"old" + BIG)
    session.commit("old")


def change(storage: Storage, txn: tuple[str, int] | None = None) -> str:
    """Open, write three chunks, of which two are packs, delete one, commit.

    One pack is written before the commit and one by it.
    """
    session = zm.open(storage, runtime=RUNTIME).writable_session("main")
    put(session, "a/c/1", b"new")
    put(session, "a/c/2", b"new" + BIG)
    put(session, "a/c/3", b"newer" + BIG)
    session.store.delete_sync("a/c/0")
    return session.commit("new", txn=txn)


@dataclass(frozen=True)
class State:
    """All that a reader can see."""

    heads: Mapping[str, Mapping[str, bytes]]
    tags: Mapping[str, Mapping[str, bytes]]
    messages: tuple[str, ...]

    @classmethod
    def of(cls, storage: Storage) -> State | None:
        try:
            repository = zm.open(storage, runtime=RUNTIME)
        except NotARepositoryError:
            return None
        return cls(
            {b: contents(repository.readonly_session(b)) for b in repository.list_branches()},
            {t: contents(repository.readonly_session(t)) for t in repository.list_tags()},
            tuple(info.message for info in repository.ancestry()),
        )


def faults(
    base: Storage,
    scenario: Callable[[Storage], object],
    wrap: Callable[[Storage], Storage],
    kinds: Sequence[FaultKind] = KINDS,
    *,
    every: int,
) -> Iterator[tuple[str, MemoryStorage, object]]:
    """Calls of the scenario, with faults: what it was, the storage, how it ended."""
    probe = FaultyStorage(copy_of(base))
    scenario(wrap(probe))
    assert len(probe.calls) > 3
    cases = itertools.product(enumerate(probe.calls, 1), kinds)
    for (number, call), kind in itertools.islice(cases, 0, None, every):
        storage = copy_of(base)
        faulty = FaultyStorage(storage)
        faulty.fail_at(number, kind)
        try:
            outcome: object = scenario(wrap(faulty))
        except (ManifestsError, SimulatedCrash) as error:
            outcome = error
        assert (kind in ("crash_before", "crash_after")) == isinstance(outcome, SimulatedCrash)
        yield f"{kind} at {number} {call}", storage, outcome


def check_outcome(where: str, outcome: object, found: object, old: object, new: object) -> None:
    """What the caller was told is what a reader finds."""
    if isinstance(outcome, SimulatedCrash | CommitOutcomeUnknownError):
        assert found in (old, new), where
    elif isinstance(outcome, ManifestsError):
        assert found == old, where
    else:
        assert found == new, where


@pytest.mark.parametrize("wrap", [lambda storage: storage, RemoteStorage], ids=["inline", "remote"])
@pytest.mark.parametrize("max_delta_count", [50, 2], ids=["plain", "folding"])
@some_or_all
def test_commit(max_delta_count: int, wrap: Callable[[Storage], Storage], every: int) -> None:
    base = MemoryStorage()
    seed(base, max_delta_count)
    old = State.of(base)
    done = copy_of(base)
    change(done)
    new = State.of(done)
    assert old is not None
    assert new is not None
    assert new.heads["main"].keys() == {"zarr.json", "a/zarr.json", "a/c/1", "a/c/2", "a/c/3"}
    assert any("compact" in message for message in new.messages) == (max_delta_count == 2)
    ends = set()
    for where, storage, outcome in faults(base, change, wrap, every=every):
        found = State.of(storage)
        assert found is not None, where
        # A fold is a commit of its own, and may be missing.
        found = replace(found, messages=tuple(m for m in found.messages if "compact" not in m))
        due = replace(new, messages=tuple(m for m in new.messages if "compact" not in m))
        check_outcome(where, outcome, found, old, due)
        ends.add(type(outcome))
        history = {info.snapshot_id for info in zm.open(storage).ancestry()}
        if isinstance(outcome, str):
            assert outcome in history, where
        again = change(storage)
        assert State.of(storage).heads == new.heads, where  # type: ignore[union-attr]
        assert again in {info.snapshot_id for info in zm.open(storage).ancestry()}
    assert {str, SimulatedCrash, StorageError} <= ends


@some_or_all
def test_a_step_lands_once_whatever_goes_wrong_and_however_it_is_repeated(every: int) -> None:
    """The replay comes after every call at which the process may have failed or died."""
    base = MemoryStorage()
    seed(base, 50)
    step = partial(change, txn=("app", 1))
    for where, storage, outcome in faults(base, step, RemoteStorage, every=every):
        told = None
        try:
            step(storage)
        except TransactionAlreadyCommitted as error:
            told = error
        if isinstance(outcome, str):
            assert told is not None, where
            assert told.snapshot_id == outcome, where
        found = State.of(storage)
        assert found is not None
        assert found.messages.count("new") == 1, where
        assert found.heads["main"]["a/c/3"] == b"newer" + BIG, where
        assert zm.open(storage).txn_versions() == {"app": 1}, where


@some_or_all
def test_create(every: int) -> None:
    base = MemoryStorage()
    done = MemoryStorage()
    zm.create(done)
    new = State.of(done)
    for where, storage, outcome in faults(
        base, lambda s: zm.create(s, runtime=RUNTIME), lambda s: s, every=every
    ):
        check_outcome(where, outcome, State.of(storage), None, new)
        # Another attempt makes it, or says that it is there.
        if State.of(storage) is None:
            zm.create(storage)
        else:
            with pytest.raises(AlreadyExistsError, match="there is a repository"):
                zm.create(storage)
        zm.open(storage, create=True)
        assert State.of(storage) == new, where


def _first_id(repository: Repository) -> str:
    return [info.snapshot_id for info in repository.ancestry()][-1]


def with_refs(storage: Storage) -> None:
    """A history with a branch and a tag beside `main`."""
    seed(storage)
    repository = zm.open(storage, runtime=RUNTIME)
    repository.create_branch("side", _first_id(repository))
    repository.create_tag("tagged")


REF_OPERATIONS: dict[str, Callable[[Repository], object]] = {
    "create branch": lambda r: r.create_branch("new"),
    "reset branch": lambda r: r.reset_branch("main", _first_id(r), force=True),
    "delete branch": lambda r: r.delete_branch("side"),
    "create tag": lambda r: r.create_tag("new"),
    "delete tag": lambda r: r.delete_tag("tagged"),
}


@pytest.mark.parametrize("name", REF_OPERATIONS)
@some_or_all
def test_ref_operations(name: str, every: int) -> None:
    operation = REF_OPERATIONS[name]
    base = MemoryStorage()
    with_refs(base)
    old = State.of(base)
    done = copy_of(base)
    operation(zm.open(done))
    new = State.of(done)
    assert old != new
    for where, storage, outcome in faults(
        base,
        lambda s: operation(zm.open(s, runtime=RUNTIME)),
        lambda s: s,
        every=every,
    ):
        check_outcome(where, outcome, State.of(storage), old, new)
        with contextlib.suppress(AlreadyExistsError, NotFoundError):  # it had been done
            operation(zm.open(storage))
        assert State.of(storage) == new, where


# --- maintenance -----------------------------------------------------------------------------

NOW = timedelta(0)


def with_history(storage: Storage) -> None:
    """Commits of which some can expire and be deleted, a branch that is gone, and garbage."""
    seed(storage)
    repository = zm.open(storage, runtime=RUNTIME)
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


def without_index(storage: Storage) -> None:
    """A base whose index of initialised chunks, which compactions write, is gone."""
    with_history(storage)
    repository = opened(storage)
    repository.compact(mode="full")

    def change(root: Root) -> Root:
        bare = replace(root.branches["main"], index=None)
        return replace(root, branches={**root.branches, "main": bare})

    change_root(repository, "build index", change)


def with_values(storage: Storage) -> None:
    """Chunks that can be measured, in a leaf and in a delta."""
    with_history(storage)
    repository = opened(storage)
    session = repository.writable_session()
    zarr.create_array(session.store, name="values", data=np.arange(4.0), chunks=(2,))
    session.commit("values")
    repository.compact(mode="full")
    session = repository.writable_session()
    zarr.open_array(session.store, path="values")[:2] = 7
    session.commit("other values")


def with_expired(storage: Storage) -> None:
    with_history(storage)
    zm.open(storage, runtime=RUNTIME).expire_snapshots(keep_last=1)


def with_a_damaged_root(storage: Storage) -> None:
    with_history(storage)
    storage.put("current", b"damaged")


def opened(storage: Storage) -> Repository:
    return zm.open(storage, runtime=RUNTIME)


def restored(storage: Storage) -> None:
    """As before the last commit; it is an error to restore the version that is there."""
    logged = [one for one in opened(storage).ops_log() if one.operation == "create tag"]
    zm.recover(opened(storage), logged[-1].version)


def recovered(storage: Storage) -> None:
    with contextlib.suppress(InvalidArgumentError):  # there is nothing to recover any more
        zm.recover(storage, runtime=RUNTIME)


SHORT_MS, LONG_MS = 60_000, 30 * 86_400_000


def with_lease(storage: Storage) -> None:
    """As `with_history`, with a lease that ends soon if nobody renews it."""
    with_history(storage)
    taken(storage, SHORT_MS)


def taken(storage: Storage, timeout_ms: int) -> Held:
    repository = opened(storage)
    return take(context_of(repository), repository.list_branches()["main"], timeout_ms, "")


def held(storage: Storage) -> list[Held]:
    """The leases that there are, as their holder knows them, to be renewed for long."""
    return [
        Held(one.lease_id, one.session, one.snapshot, LONG_MS, one.owner)
        for one in root_of(opened(storage)).leases
    ]


def renewed(storage: Storage) -> None:
    context = context_of(opened(storage))
    for one in held(storage):
        context.heart.add(one, RUNTIME, lambda: None)
    renew_all(context)
    assert [one.lost for one in context.heart.held()] == [None]


def given_up(storage: Storage) -> None:
    context = context_of(opened(storage))
    for one in held(storage):
        give_up(context, one)


MAINTENANCE: dict[str, tuple[Callable[[Storage], None], Callable[[Storage], object]]] = {
    "expire": (with_history, lambda s: opened(s).expire_snapshots(keep_last=1)),
    "collect": (with_expired, lambda s: opened(s).garbage_collect(NOW)),
    "restore": (with_history, restored),
    "recover": (with_a_damaged_root, recovered),
    "save config": (with_history, lambda s: opened(s).save_config({"pack-bytes": 77})),
    "claim": (with_history, lambda s: opened(s).writable_session(exclusive=True)),
    "compact": (with_history, lambda s: opened(s).compact(mode="full")),
    "take a lease": (with_history, lambda s: taken(s, SHORT_MS)),
    "renew a lease": (with_lease, renewed),
    "give up a lease": (with_lease, given_up),
    "build an index": (without_index, lambda s: build_index(opened(s))),
    "compute statistics": (with_values, lambda s: opened(s).compute_statistics()),
}
UNSEEN = ("collect", "compact", "build an index", "compute statistics")


@dataclass(frozen=True)
class Kept:
    """What maintenance may change and readers do not see, too."""

    seen: State
    config: Mapping[str, object]
    claimed: bool
    leased_for_long: frozenset[bool]

    @classmethod
    def of(cls, storage: Storage) -> Kept | None:
        if storage.get("current") == b"damaged":
            return None
        seen, repository = State.of(storage), opened(storage)
        assert seen is not None
        root = root_of(repository)
        # A compaction may be done more than once, or not at all.
        seen = replace(seen, messages=tuple(m for m in seen.messages if "compact" not in m))
        now_ms = RUNTIME.now_ms()
        long = frozenset(lease.expires_ms > now_ms + LONG_MS // 2 for lease in root.leases)
        return cls(seen, repository.config.to_dict(), root.branches["main"].epoch > 0, long)


@pytest.mark.parametrize("name", MAINTENANCE)
@some_or_all
def test_maintenance(name: str, every: int) -> None:
    """Whatever happens at whatever call, all is whole, and can be done again."""
    prepare, operation = MAINTENANCE[name]
    base = MemoryStorage()
    prepare(base)
    old = Kept.of(base)
    done = copy_of(base)
    operation(done)
    new = Kept.of(done)
    assert (old == new) == (name in UNSEEN)
    ends = set()
    left_out = {
        "collect": ("crash_before", "crash_after"),  # tried where collections are
        "recover": ("truncate", "flip_bits"),  # damage is what it looks for
    }
    kinds = [kind for kind in KINDS if kind not in left_out.get(name, ())]
    for where, storage, outcome in faults(base, operation, lambda s: s, kinds, every=every):
        check_outcome(where, outcome, Kept.of(storage), old, new)
        ends.add(type(outcome))
        if old is not None:
            assert opened(storage).verify().problems == (), where
        operation(storage)
        assert Kept.of(storage) == new, where
        assert opened(storage).verify().problems == (), where
    assert len(ends) > 2


def with_leased_session(storage: Storage) -> str:
    """A commit of a session that holds a lease, which goes on with it."""
    with opened(storage).writable_session(lease=60) as session:
        put(session, "a/c/2", b"leased" + BIG)
        return session.commit("leased")


@some_or_all
def test_a_commit_of_a_leased_session(every: int) -> None:
    """Whatever becomes of the lease, which a collection removes in the end."""
    base = MemoryStorage()
    with_history(base)
    old = State.of(base)
    done = copy_of(base)
    with_leased_session(done)
    new = State.of(done)
    assert old != new
    for where, storage, outcome in faults(base, with_leased_session, lambda s: s, every=every):
        check_outcome(where, outcome, State.of(storage), old, new)
        later = replace(RUNTIME, now_ms=lambda: SYSTEM.now_ms() + LONG_MS)
        zm.open(storage, runtime=later).garbage_collect(NOW)
        assert root_of(opened(storage)).leases == ()
        assert State.of(storage) in (old, new), where
        with_leased_session(storage)
        assert opened(storage).verify().problems == (), where


# --- faults that last ------------------------------------------------------------------------


def _commit_with(storage: Storage, *faults: Fault) -> tuple[Session, object]:
    faulty = FaultyStorage(storage, faults)
    session = zm.open(faulty, runtime=RUNTIME).writable_session("main")
    put(session, "a/c/5", b"new" + BIG)
    try:
        return session, session.commit("new")
    except ManifestsError as error:
        return session, error


def test_swap_that_always_fails_is_no_commit_and_can_be_tried_again() -> None:
    storage = MemoryStorage()
    seed(storage)
    old = State.of(storage)
    session, outcome = _commit_with(storage, Fault("fail_before", op="cas", count=5))
    assert type(outcome) is StorageError
    assert State.of(storage) == old
    snapshot_id = session.commit("again")
    assert next(i.snapshot_id for i in zm.open(storage).ancestry()) == snapshot_id


def test_swap_that_always_fails_far_away_is_in_doubt() -> None:
    storage = MemoryStorage()
    seed(storage)
    faulty = FaultyStorage(storage, [Fault("fail_before", op="cas", count=None)])
    session = zm.open(RemoteStorage(faulty), runtime=RUNTIME).writable_session("main")
    put(session, "a/c/5", b"new")
    with pytest.raises(CommitOutcomeUnknownError, match="never answered") as caught:
        session.commit("new")
    assert len(bytes.fromhex(caught.value.commit_id)) == 16
    with pytest.raises(ManifestsError, match="closed"):
        session.commit("again")


@pytest.mark.parametrize("before", [0, 1])
def test_a_full_disk_far_away_is_a_refusal_only_if_nothing_was_sent_before(before: int) -> None:
    """A swap that timed out may still land when the next one is refused."""
    storage = MemoryStorage()
    seed(storage)
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


@pytest.mark.parametrize("kind", ["fail_before", "truncate", "flip_bits"])
def test_lost_answer_and_then_an_unreadable_root_is_in_doubt(kind: FaultKind) -> None:
    """It took effect, and nobody may say that it did not."""
    storage = MemoryStorage()
    seed(storage)
    new = copy_of(storage)
    _commit_with(new)
    # The open and the session read the root once each.
    unreadable = Fault(kind, op="get_tagged", skip=2, count=None)
    _, outcome = _commit_with(storage, Fault("fail_after", op="cas"), unreadable)
    assert isinstance(outcome, CommitOutcomeUnknownError)
    found = State.of(storage)
    expected = State.of(new)
    assert found == expected


def test_lost_answer_and_a_root_that_is_unreadable_for_a_while() -> None:
    storage = MemoryStorage()
    seed(storage)
    unreadable = Fault("flip_bits", op="get_tagged", skip=2, count=2)
    _, outcome = _commit_with(storage, Fault("fail_after", op="cas"), unreadable)
    assert isinstance(outcome, str)
    assert next(i.snapshot_id for i in zm.open(storage).ancestry()) == outcome


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


@pytest.mark.parametrize("commits", [1, 5, 40])
def test_lost_answer_is_found_in_the_log_or_the_archive(commits: int) -> None:
    """The tail of the log holds 32 operations; after that the archive tells."""
    storage = MemoryStorage()
    seed(storage)

    def others() -> None:
        session = zm.open(storage).writable_session("main")
        for i in range(commits):
            put(session, "a/c/8", bytes([i]))
            session.commit(f"other {i}")

    repository = zm.open(_Overtaking(storage, others), runtime=RUNTIME)
    session = repository.writable_session("main")
    put(session, "a/c/5", b"mine")
    snapshot_id = session.commit("mine")
    infos = [*zm.open(storage).ancestry()]
    assert [info.message for info in infos].count("mine") == 1
    assert snapshot_id in {info.snapshot_id for info in infos}
    put(session, "a/c/6", b"mine too")
    session.commit("goes on")
    assert contents(zm.open(storage).readonly_session())["a/c/8"] == bytes([commits - 1])


def test_lost_answer_without_an_archive_is_in_doubt() -> None:
    storage = MemoryStorage()
    seed(storage)

    def others() -> None:
        mine = root_of(zm.open(storage)).version
        session = zm.open(storage).writable_session("main")
        for i in range(40):
            put(session, "a/c/8", bytes([i]))
            session.commit(f"other {i}")
        storage.delete_many([f"root/{mine:020d}"])

    repository = zm.open(_Overtaking(storage, others), runtime=RUNTIME)
    session = repository.writable_session("main")
    put(session, "a/c/5", b"mine")
    with pytest.raises(CommitOutcomeUnknownError, match="archive is unreadable"):
        session.commit("mine")


# --- no room ---------------------------------------------------------------------------------


class FullDisk(WrappedStorage):
    """Takes so many more writes, and then none until somebody makes room."""

    def __init__(self, storage: Storage, room: int) -> None:
        super().__init__(storage)
        self.room: int | None = room

    def _around[R](self, call: Call[R]) -> R:
        if call.op in ("create", "cas") and self.room is not None:
            if not self.room:
                raise StorageFullError("no room is left")
            self.room -= 1
        return call.run()


def test_disk_full_at_every_write_of_a_commit() -> None:
    base = MemoryStorage()
    seed(base)
    old = State.of(base)

    def write(session: Session) -> str:
        put(session, "a/c/2", b"new" + BIG)
        put(session, "a/c/3", b"newer" + BIG)
        return session.commit("new")

    for room in range(6):  # two packs, delta, snapshot, archive, swap
        disk = FullDisk(copy_of(base), room)
        session = zm.open(disk, runtime=RUNTIME).writable_session("main")
        with pytest.raises(StorageFullError):
            write(session)
        assert State.of(disk.storage) == old
        disk.room = None
        snapshot_id = write(session)
        found = State.of(disk.storage)
        assert found is not None
        assert found.heads["main"]["a/c/3"] == b"newer" + BIG
        assert found.messages == ("new", "old", "create repository")
        assert zm.open(disk.storage).list_branches()["main"] == snapshot_id
    assert isinstance(write(zm.open(FullDisk(copy_of(base), 6)).writable_session()), str)


# --- a disk that crashes ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "repository"
    seed(LocalStorage(folder), max_delta_count=2)
    return folder


def _crashed(
    template: Path, folder: Path, crash_at: int | None, rng: random.Random | None
) -> tuple[LocalStorage, object, int]:
    shutil.copytree(template, folder)
    disk = CrashDisk(folder)
    disk.crash_at = crash_at
    storage = disk.storage()
    try:
        outcome: object = change(storage)
    except SimulatedCrash as error:
        outcome = error
    calls = len(disk.calls)
    disk.crash(rng)
    return LocalStorage(folder), outcome, calls


def test_what_was_committed_survives_a_crash(template: Path, tmp_path: Path) -> None:
    for attempt in range(4):
        rng = random.Random(attempt) if attempt else None
        storage, outcome, _ = _crashed(template, tmp_path / f"{attempt}", None, rng)
        found = State.of(storage)
        assert found is not None
        assert found.heads["main"]["a/c/3"] == b"newer" + BIG
        assert outcome in {info.snapshot_id for info in zm.open(storage).ancestry()}


@pytest.mark.slow
@some_or_all
def test_crash_at_every_call_to_the_disk(template: Path, tmp_path: Path, every: int) -> None:
    old = State.of(LocalStorage(template))
    storage, _, calls = _crashed(template, tmp_path / "whole", None, None)
    new = State.of(storage)
    assert old is not None
    assert new is not None
    assert calls > 30
    seen = set()
    for number in chosen(calls, every):
        for attempt in range(2):
            folder = tmp_path / f"{number}-{attempt}"
            rng = random.Random(number * 10 + attempt) if attempt else None
            storage, outcome, _ = _crashed(template, folder, number, rng)
            found = State.of(storage)
            assert found is not None
            assert found.heads in (old.heads, new.heads), (number, attempt)
            if isinstance(outcome, str):
                assert found.heads == new.heads, (number, attempt)
            seen.add(found.heads == new.heads)
            change(LocalStorage(folder))
            again = State.of(storage)
            assert again is not None
            assert again.heads == new.heads
    assert seen == {False, True}


DISK_OPERATIONS: dict[str, tuple[Callable[[Storage], None], Callable[[Storage], object]]] = {
    **MAINTENANCE,
    **{
        name: (with_refs, lambda s, operation=operation: operation(opened(s)))
        for name, operation in REF_OPERATIONS.items()
    },
}
del DISK_OPERATIONS["compact"]  # tried where compactions are


def _again(operation: Callable[[Storage], object], storage: Storage) -> None:
    with contextlib.suppress(AlreadyExistsError, NotFoundError):  # it had been done
        operation(storage)


@pytest.mark.parametrize("name", DISK_OPERATIONS)
@some_or_all
def test_an_operation_and_a_crash_at_every_call_to_the_disk(
    name: str, tmp_path: Path, every: int
) -> None:
    """All that was not synced is lost, or some of it; what was acknowledged is there."""
    prepare, operation = DISK_OPERATIONS[name]
    first = tmp_path / "template"
    storage: Storage = LocalStorage(first)
    prepare(storage)
    old = Kept.of(storage)
    disk = CrashDisk(shutil.copytree(first, tmp_path / "whole"))
    whole = disk.storage()
    operation(whole)
    new = Kept.of(whole)
    calls = list(disk.calls)
    assert len(calls) > 5
    found_states = []
    for number in chosen(len(calls) + 1, every):  # and after the last
        if number > 1 and calls[number - 2] in ("open_temp", "write"):
            continue  # what has no name yet is nothing, whatever is in it
        folder = tmp_path / str(number)
        disk = CrashDisk(shutil.copytree(first, folder))
        disk.crash_at = number
        storage = disk.storage()
        try:
            outcome: object = operation(storage)
        except SimulatedCrash as error:
            outcome = error
        assert isinstance(outcome, SimulatedCrash) == (number <= len(calls))
        disk.crash(random.Random(number) if number % 2 else None)
        storage = disk.storage()
        found = Kept.of(storage)
        check_outcome(f"{number} {calls[number - 2]}", outcome, found, old, new)
        found_states.append(found)
        if found is not None:
            assert opened(storage).verify().problems == (), number
        _again(operation, storage)
        assert Kept.of(storage) == new, number
        assert opened(storage).verify().problems == (), number
        shutil.rmtree(folder)
    assert found_states[0] == old
    assert found_states[-1] == new


@some_or_all
def test_create_and_a_crash_at_every_call_to_the_disk(tmp_path: Path, every: int) -> None:
    disk = CrashDisk(tmp_path / "whole")
    whole = disk.storage()
    zm.create(whole, runtime=RUNTIME)
    new = State.of(whole)
    calls = len(disk.calls)
    found_states = []
    for number in chosen(calls + 1, every):
        disk = CrashDisk(tmp_path / str(number))
        disk.crash_at = number
        storage = disk.storage()
        with contextlib.suppress(SimulatedCrash):
            zm.create(storage, runtime=RUNTIME)
        disk.crash(random.Random(number) if number % 2 else None)
        storage = disk.storage()
        found_states.append(State.of(storage))
        zm.open(storage, runtime=RUNTIME, create=True)
        assert State.of(storage) == new
        assert opened(storage).verify().problems == ()
    assert found_states[0] is None
    assert found_states[-1] == new
