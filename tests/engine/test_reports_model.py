"""Copies that report, in any order with all else that a session does, against a model of values.

Every call of a copy that returned is in the commit, or the commit names its chunk in a conflict;
every call after the token is gone raises; nothing else in the array changes.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import pytest
import zarr
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Fork
from zarr_manifests.errors import (
    CommitOutcomeUnknownError,
    ConflictError,
    InvalidArgumentError,
    SessionClosedError,
    StorageError,
)
from zarr_manifests.session import commits_of
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, workspace_of
from zarr_manifests.testing import WrappedStorage
from zarr_manifests.testing.wrapped import Call

CHUNKS = 2
CONFIG: dict[str, Any] = {"inline-chunk-bytes": 4, "compaction": {"mode": "manual"}}

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


def change(store: ManifestStore, chunk: int, value: bytes | None) -> None:
    if value is None:
        store.delete_sync(f"a/c/{chunk}")
    else:
        store.set_sync(f"a/c/{chunk}", cpu.Buffer.from_bytes(value))


def read(store: ManifestStore) -> Values:
    found = {chunk: store.get_sync(f"a/c/{chunk}") for chunk in range(CHUNKS)}
    return {chunk: None if data is None else data.to_bytes() for chunk, data in found.items()}


@dataclass
class Copy:
    """A copy, or the pickle of one, and what is read in it."""

    store: Any
    reads: Values
    start: int
    reported: Values = field(default_factory=dict)


@dataclass
class Forked:
    """A fork that has written one chunk, and what the session was when it was made."""

    fork: Fork
    chunk: int
    value: bytes
    began: Values
    writes: int
    base: int


class Model:
    """A session, and what must be in it."""

    def __init__(self) -> None:
        memory = MemoryStorage("reports-model")  # by this name a copy finds it
        memory.delete_many([info.key for info in memory.list()])
        self.inner, self.storage = memory, Failing(memory)
        self.repo = zm.create(self.storage, CONFIG)
        with self.repo.transaction(message="begin") as store:
            zarr.create_array(
                store, name="a", shape=(CHUNKS,), chunks=(1,), dtype="u1", compressors=None
            )
            change(store, 0, b"0")
            change(store, 1, b"1, in a pack")
        self.tip: Values = read(self.repo.readonly_session().store)
        self.start = self.base_number = 0
        self.copies: list[Copy] = []
        self.pickles: list[Copy] = []
        self.forks: list[Forked] = []
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
        self.base_number += 1
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

    def fork(self, chunk: int, value: bytes) -> None:
        fork = pickle.loads(pickle.dumps(self.session.fork()))
        change(fork.store, chunk, value)
        fork = pickle.loads(pickle.dumps(fork))
        now, writes = self.now, self.writes[chunk]
        self.forks.append(Forked(fork, chunk, value, now, writes, self.base_number))

    def merge(self) -> None:
        if not self.forks:
            return
        of = self.forks.pop(0)
        now, was = self.now[of.chunk], of.began[of.chunk]
        try:
            self.session.merge(of.fork)
        except InvalidArgumentError:
            event("merge: of another base")
            assert of.base != self.base_number
        except ConflictError as error:
            event("merge: conflict")
            named = {c for at in error.conflicts for (c,) in at.chunks}
            assert named == {of.chunk}
            assert self.writes[of.chunk] != of.writes
            assert now != of.value
        else:
            assert of.base == self.base_number
            assert now in (was, of.value) or was == of.value
            if now in (was, of.value):  # else the fork, which has what it began with, tells nothing
                self.writes[of.chunk] += 1
                self.mine[of.chunk] = of.value

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
        self.base_number += 1  # forks of before cannot be merged

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


CHUNK = st.integers(0, CHUNKS - 1)
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
    st.one_of(st.tuples(st.just("fork"), CHUNK, WRITTEN), st.just(("merge",))),
    st.tuples(st.just("rival"), CHUNK, VALUE),
)
END = st.one_of(COMMIT, COMMIT, st.just(("rebase",)), st.just(("discard",)))
ROUND = st.tuples(st.lists(AMID, min_size=4, max_size=12), END).map(lambda of: [*of[0], of[1]])


@settings(
    max_examples=examples(100), derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
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
