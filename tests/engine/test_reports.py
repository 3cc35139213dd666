"""Copies that report: what returned before the commit is in it, and what comes later raises."""

from __future__ import annotations

import copy
import os
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

import stored
import zarr_manifests as zm
from effort import examples
from storages import WrappedStorage
from storages.wrapped import Call
from zarr_manifests import Repository, Session
from zarr_manifests.error_cases import FencedError, UnsupportedStorageError
from zarr_manifests.errors import (
    CommitOutcomeUnknownError,
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    ReadOnlyError,
    SessionClosedError,
    StorageError,
)
from zarr_manifests.session import commits_of
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, workspace_of

CHUNKS = 40


class Hooked(WrappedStorage):
    """Runs something before each call and after it."""

    hook: Callable[[Call[Any]], None] = staticmethod(lambda _: None)

    def _around[R](self, call: Call[R]) -> R:
        self.hook(call)
        result = call.run()
        self.hook(call)
        return result


def make(storage: Storage, chunks: int = CHUNKS, config: Any = None) -> Repository:
    repo = zm.create(storage, config)
    with repo.transaction(message="make a") as store:
        zarr.create_array(
            store, name="a", shape=(chunks,), chunks=(1,), dtype="u1", compressors=None
        )
    return repo


def begin(repo: Repository, **options: Any) -> Session:
    return repo.writable_session(copies="report", **options)


def change(store: ManifestStore, chunk: int, value: bytes | None) -> None:
    if value is None:
        store.delete_sync(f"a/c/{chunk}")
    else:
        stored.put(store, f"a/c/{chunk}", value)


def put(store: ManifestStore, chunk: int, value: int) -> None:
    change(store, chunk, bytes([value]))


def values(repo: Repository) -> list[int]:
    found = zarr.open_array(repo.readonly_session().store, path="a", mode="r")[:]
    return [int(value) for value in np.asarray(found)]


def listed(repo: Repository) -> list[str]:
    return [info.key for info in repo.storage.list("reports/")]


@pytest.fixture
def repo() -> Repository:
    return make(MemoryStorage())


def test_whenever_a_copy_writes_during_a_commit_its_chunk_is_in_it_or_it_is_told() -> None:
    """One write before each call to the storage that the commit makes."""
    repo = make(storage := Hooked(MemoryStorage()))
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    put(twin, 0, 1)
    returned, raised, busy = [0], list[int](), list[bool]()

    def write(call: Call[Any]) -> None:
        if busy or len(returned) + len(raised) == CHUNKS:
            return
        busy.append(True)
        number = len(returned) + len(raised)
        try:
            put(twin, number, 1)
            returned.append(number)
        except SessionClosedError:
            raised.append(number)
        busy.clear()

    storage.hook = write
    session.commit("beside it")
    del storage.hook
    assert len(returned) > 1
    assert len(raised) > 1
    found = values(repo)
    assert [number for number in returned if found[number] != 1] == []


def test_the_token_is_gone_for_good_and_nothing_is_committed_unless_that_is_certain() -> None:
    class Keeping(WrappedStorage):
        keeps = False

        def delete_many(self, keys: Any) -> None:
            if not self.keeps:
                super().delete_many(keys)

    repo = make(storage := Keeping(MemoryStorage()))
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    put(twin, 0, 1)
    before = repo.list_branches()
    storage.keeps = True
    with pytest.raises(StorageError):
        session.commit("cannot be")
    assert repo.list_branches() == before
    storage.keeps = False
    put(twin, 1, 2)
    session.commit("now")
    assert values(repo)[:2] == [1, 2]
    with pytest.raises(SessionClosedError):
        put(twin, 2, 3)


def test_retried_tasks_that_wrote_the_same_agree_and_others_are_named(repo: Repository) -> None:
    session = begin(repo)
    one, two = copy.deepcopy(session.store), copy.deepcopy(session.store)
    for store in (one, two):
        put(store, 0, 1)
        store.delete_sync("a/c/1")
    put(one, 3, 1)
    put(two, 3, 2)
    put(one, 4, 1)
    two.delete_sync("a/c/4")
    with pytest.raises(ConflictError, match=r"/a: chunks \[\(3,\), \(4,\)\]"):
        session.commit("which")
    assert values(repo) == [0] * CHUNKS
    with pytest.raises(ConflictError):
        session.commit("still")
    put(session.store, 5, 5)
    session.commit("none of them", discard_unmerged=True)
    assert values(repo)[:6] == [0, 0, 0, 0, 0, 5]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no os.fork")
def test_what_the_session_wrote_since_a_child_was_forked_is_not_replaced_silently(
    tmp_path: Path,
) -> None:
    session = begin(make(LocalStorage(tmp_path)))
    put(session.store, 1, 1)
    go_on, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.read(go_on, 1)
            put(session.store, 0, 1)
        finally:
            os._exit(0)
    put(session.store, 0, 2)
    copy.deepcopy(session.store)
    os.write(tell, b"x")
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(ConflictError, match=r"\[\(0,\)\]"):
        session.commit("which")


def test_chunks_of_an_array_that_the_session_has_deleted_are_a_conflict(repo: Repository) -> None:
    session = begin(repo)
    put(copy.deepcopy(session.store), 0, 2)
    session.store.delete_sync("a/zarr.json")
    with pytest.raises(ConflictError):
        session.commit("which")


@pytest.mark.parametrize(
    "change",
    [
        lambda store: zarr.open_array(store, path="a", mode="r+").resize((50,)),
        lambda store: zarr.create_group(store, path="g"),
        lambda store: stored.put(store, "notes.txt", b"x"),
        lambda store: store.delete_sync("a/zarr.json"),
        lambda store: zarr.open_group(store, mode="r+").__delitem__("a"),
        lambda store: store.set_virtual_refs("a", [[0]], ["memory://x/y"], [0], [0], [1]),
    ],
)
def test_copies_change_nothing_but_chunks(repo: Repository, change: Callable[[Any], Any]) -> None:
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    with pytest.raises(ReadOnlyError, match="fork"):
        change(twin)
    document = twin.get_sync("a/zarr.json")
    twin.set_sync("a/zarr.json", document)  # as libraries do
    twin.delete_sync("no/such/key")
    put(twin, 0, 1)
    session.commit("the chunk")
    assert values(repo)[0] == 1


@pytest.mark.parametrize("lacks", ["list", "delete_many"])
def test_a_storage_that_does_not_list_or_delete_is_refused_at_once(lacks: str) -> None:
    make(inner := MemoryStorage())
    lacking = type("Lacking", (WrappedStorage,), {lacks: lambda *_: iter(())})
    with pytest.raises(UnsupportedStorageError, match="list and delete"):
        begin(zm.open(lacking(inner)))


@pytest.mark.parametrize("end", ["close", "discard", "rebase", "amend"])
def test_however_a_session_goes_on_its_copies_are_told(repo: Repository, end: str) -> None:
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    put(twin, 0, 1)
    with repo.transaction(message="others") as store:
        put(store, 1, 1)
    if end == "close":
        session.close()
    elif end == "discard":
        session.discard_changes()
    elif end == "rebase":
        session.rebase()
    else:
        with pytest.raises(ConflictError):
            session.amend("not the head any more")
    with pytest.raises(SessionClosedError):
        put(twin, 2, 1)
    if end == "rebase":
        session.commit("what came before")
        assert values(repo)[:3] == [1, 1, 0]
    if end == "discard":
        put(copy.deepcopy(session.store), 3, 1)
        session.commit("new ones")
        assert values(repo)[:4] == [0, 1, 0, 1]


def test_without_a_token_copies_are_as_without_the_option() -> None:
    repo = make(storage := Hooked(MemoryStorage()))
    session = begin(repo)
    put(session.store, 0, 1)

    def fail(call: Call[Any]) -> None:
        if call.key.startswith("reports/") and call.op == "create":
            raise StorageError("no")

    storage.hook = fail
    session.commit("stands")
    del storage.hook
    assert values(repo)[0] == 1
    put(copy.deepcopy(session.store), 1, 1)
    with pytest.raises(ManifestsError, match="1 copies"):
        session.commit("would leave it out")


def test_reports_are_collected_with_their_session_and_a_lease_keeps_them(repo: Repository) -> None:
    leased, dead = begin(repo, lease=600), begin(repo)
    for session, number in ((leased, 0), (dead, 1)):
        put(copy.deepcopy(session.store), number, 1)
    with repo.transaction(message="others") as store:
        put(store, 2, 1)
    count = len(listed(repo))
    repo.garbage_collect(timedelta(0))
    assert len(listed(repo)) == count - 2  # token and report of the one that is shut out
    with pytest.raises(FencedError):
        dead.commit("too late")
    leased.commit("kept")
    assert values(repo)[:3] == [1, 0, 1]
    assert repo.verify().ok
    leased.close()
    repo.garbage_collect(timedelta(0))
    assert listed(repo) == []


@pytest.mark.parametrize("damage", ["cut", "long", "foreign"])
def test_a_damaged_report_is_an_error_and_nothing_is_committed(
    repo: Repository, damage: str
) -> None:
    session = begin(repo)
    token = set(listed(repo))
    put(copy.deepcopy(session.store), 0, 1)
    put(copy.deepcopy(session.store), 1, 1)
    one, two = sorted({*listed(repo)} - token)
    data, other = repo.storage.get(one), repo.storage.get(two)
    wrong = {"cut": data[:-3], "long": bytes(1 << 17), "foreign": other}
    repo.storage.put(one, wrong[damage])
    with pytest.raises(CorruptObjectError):
        session.commit("with what")
    assert values(repo) == [0] * CHUNKS
    put(session.store, 2, 2)
    session.commit("without", discard_unmerged=True)
    assert values(repo)[:3] == [0, 0, 2]


# --- against a model of values -----------------------------------------------------------------

FEW = 2
CONFIG = {"inline-chunk-bytes": 4, "compaction": {"mode": "manual"}}

type Values = dict[int, bytes | None]
"""By chunk; None where it is absent, or was unset."""


class Failing(WrappedStorage):
    """Fails one call, which is not carried out: the one that `calls` more go before."""

    calls: int | None = None

    def _around[R](self, call: Call[R]) -> R:
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                self.calls = None
                raise StorageError("planted")
        return call.run()


def read(store: ManifestStore) -> Values:
    return {chunk: stored.get(store, f"a/c/{chunk}") for chunk in range(FEW)}


@dataclass
class Copy:
    """A copy, or the pickle of one, and what is read in it."""

    store: Any
    reads: Values
    start: int
    reported: Values = field(default_factory=dict)


class Model:
    """A session, and what must be in it."""

    def __init__(self) -> None:
        memory = MemoryStorage("reports-model")  # by this name a copy finds it
        memory.delete_many([info.key for info in memory.list()])
        self.inner, self.storage = memory, Failing(memory)
        self.repo = make(self.storage, FEW, CONFIG)
        with self.repo.transaction(message="begin") as store:
            change(store, 0, b"0")
            change(store, 1, b"1, in a pack")
        self.tip: Values = read(self.repo.readonly_session().store)
        self.start = 0
        self.copies: list[Copy] = []
        self.pickles: list[Copy] = []
        self.open()

    def open(self) -> None:
        self.session = self.repo.writable_session(copies="report")
        self.go_on(self.tip)
        self.rebased()

    def go_on(self, base: Values) -> None:
        """What copies of before do from here on raises."""
        self.start += 1
        self.base = dict(base)
        self.mine: Values = {}
        self.writes: Counter[int] = Counter()
        self.first: tuple[Values, Counter[int]] | None = None
        self.brought_in = False

    def rebased(self) -> None:
        self.base = dict(self.tip)
        self.others: set[int] = set()

    @property
    def now(self) -> Values:
        return {**self.base, **self.mine}

    @property
    def is_open(self) -> bool:
        token = workspace_of(self.session.store).token
        return bool(list(self.inner.list(token or "none")))

    # --- what a session and its copies do ------------------------------------------------------

    def note(self, chunk: int, value: bytes | None) -> None:
        if value is not None or self.now[chunk] is not None:
            self.writes[chunk] += 1
            self.mine[chunk] = value
            if value is None and self.base[chunk] is None:
                del self.mine[chunk]

    def write(self, chunk: int, value: bytes | None) -> None:
        change(self.session.store, chunk, value)
        self.note(chunk, value)

    def pickle(self) -> None:
        self.pickles.append(Copy(pickle.dumps(self.session.store), self.now, self.start))
        self.first = self.first or (self.now, self.writes.copy())

    def unpickle(self, number: int) -> None:
        if self.pickles:
            of = self.pickles[-number % len(self.pickles)]
            self.copies.append(Copy(pickle.loads(of.store), dict(of.reads), of.start))

    def copy(self) -> None:
        self.pickle()
        self.unpickle(1)

    def pickle_copy(self, number: int) -> None:
        if self.copies:
            of = self.copies[-number % len(self.copies)]
            self.pickles.append(Copy(pickle.dumps(of.store), dict(of.reads), of.start))

    def write_in_copy(self, number: int, chunk: int, value: bytes | None) -> None:
        if not self.copies:
            return
        of = self.copies[-number % len(self.copies)]
        of.reads[chunk] = value
        if of.start == self.start and self.is_open:
            change(of.store, chunk, value)
        else:
            with pytest.raises(SessionClosedError):
                change(of.store, chunk, value)
        of.reported[chunk] = value  # one that raised may be in it, if a commit is tried again
        assert read(of.store) == of.reads

    def rival(self, chunk: int, value: bytes | None) -> None:
        if value is None and self.tip[chunk] is None:
            return
        with self.repo.transaction(message="of another") as store:
            change(store, chunk, value)
        self.tip[chunk] = value
        self.others.add(chunk)

    def discard(self) -> None:
        self.session.discard_changes()
        self.go_on(self.base)

    # --- commits -------------------------------------------------------------------------------

    def reports(self) -> tuple[Values, set[int], set[int]]:
        """What the copies have changed, and the chunks that must, or may, be in conflict."""
        reports: Values = {}
        differ, moved, may = set(), set(), set()
        was, writes = self.first or (self.now, self.writes)
        for of in self.copies:
            for chunk, value in of.reported.items() if of.start == self.start else ():
                if reports.setdefault(chunk, value) != value:
                    differ.add(chunk)
        for chunk, value in reports.items():
            if self.now[chunk] != value and self.writes[chunk] != writes[chunk]:
                may.add(chunk)
                if self.now[chunk] != was[chunk]:
                    moved.add(chunk)
        return reports, differ or moved, may | differ

    def bring_in(self, reports: Values) -> None:
        for chunk, value in reports.items():
            if value is not None or self.now[chunk] is not None:
                self.writes[chunk] += 1
                self.mine[chunk] = value
        self.brought_in = True

    def gathered(self, call: Callable[[], object], what: str, *, discard: bool = False) -> bool:
        """Do what brings in the reports first, or leaves them out; whether it succeeded."""
        due = not self.brought_in and not discard
        reports, must, may = self.reports() if due else ({}, set(), set())
        outcome: Exception | None = None
        try:
            call()
        except (ConflictError, StorageError, InvalidArgumentError) as error:
            outcome = error
        except CommitOutcomeUnknownError as error:
            assert workspace_of(self.session.store).closed is not None
            outcome = error
        self.storage.calls = None
        named = {
            c for at in getattr(outcome, "conflicts", ()) for (c,) in at.chunks if at.path == "/a"
        }
        event(f"{what}: {type(outcome).__name__}")
        if due and (outcome is None or commits_of(self.session).writer.copies.gathered):
            assert not must
            self.bring_in(reports)
        elif due and isinstance(outcome, ConflictError):
            event(f"{what}: conflict of copies")
            assert named
            assert must <= named <= may
            assert not self.is_open
            return False
        crossed = {c for c in self.mine if c in self.others}
        if isinstance(outcome, ConflictError):
            assert named
            assert named <= crossed
        elif outcome is None:
            told = {c for c in crossed if self.tip[c] not in (self.base[c], self.mine[c])}
            assert not told
        elif isinstance(outcome, InvalidArgumentError):
            assert self.now == self.base
        return outcome is None

    def commit(self, calls: int | None, discard: bool) -> None:
        commit = partial(self.session.commit, "changes", discard_unmerged=discard)
        self.storage.calls = calls
        landed = self.gathered(commit, "commit", discard=discard)
        if landed:
            self.tip.update(self.mine)
            self.go_on(self.tip)
            self.rebased()
        workspace = workspace_of(self.session.store)
        if workspace.closed is not None or workspace.token is None:
            event("commit: begin again")
            assert landed or calls is not None
            found = read(self.repo.readonly_session().store)
            assert found in (self.tip, {**self.tip, **self.mine})
            self.tip = found
            self.session.close()
            self.open()

    def rebase(self) -> None:
        moved = bool(self.others)
        if self.gathered(self.session.rebase, "rebase"):
            kept = {c: value for c, value in self.mine.items() if value != self.tip[c]}
            self.mine = kept
            if moved:
                self.rebased()

    def check(self) -> None:
        assert read(self.session.store) == self.now
        assert read(self.repo.readonly_session().store) == self.tip


CHUNK = st.integers(0, FEW - 1)
WRITTEN = st.sampled_from([b"2", b"2", b"3, in a pack"])
VALUE = st.one_of(st.none(), WRITTEN)
WHICH = st.integers(1, 3)
WRITE = st.tuples(st.just("write"), CHUNK, VALUE)
WRITE_IN_COPY = st.tuples(st.just("write_in_copy"), WHICH, CHUNK, VALUE)
COMMIT = st.tuples(
    st.just("commit"),
    st.one_of(st.none(), st.integers(0, 20)),
    st.sampled_from([False, False, False, True]),
)
AMID = st.one_of(
    WRITE,
    WRITE,
    st.just(("copy",)),
    st.tuples(st.sampled_from(["unpickle", "pickle_copy"]), WHICH),
    WRITE_IN_COPY,
    WRITE_IN_COPY,
    st.tuples(st.just("rival"), CHUNK, VALUE),
)
END = st.one_of(COMMIT, COMMIT, st.just(("rebase",)), st.just(("discard",)))
ROUND = st.tuples(st.lists(AMID, min_size=4, max_size=12), END).map(lambda of: [*of[0], of[1]])


@settings(max_examples=examples(60), derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROUND, min_size=1, max_size=3))
@example([[("copy",), ("write", 0, b"2"), ("copy",), ("write_in_copy", 2, 0, b"3, in a pack")]])
@example([[("write", 0, None), ("copy",), ("write", 0, b"2"), ("write_in_copy", 1, 0, None)]])
@example([[("copy",), ("write_in_copy", 1, 0, b"2"), ("commit", None, True)]])
@example([[("copy",), ("write", 1, b"2"), ("write_in_copy", 1, 0, b"2"), ("commit", 9, True)]])
def test_nothing_that_copies_report_is_lost_or_replaced(rounds: list[list[Any]]) -> None:
    model = Model()
    for name, *arguments in [*chain(*rounds), ("commit", None, False)]:
        getattr(model, name)(*arguments)
        model.check()
    assert model.repo.verify().ok
