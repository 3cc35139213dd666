"""Forks of forks: whatever way they are merged, the session has what one writer would have."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import zarr
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from stored import contents, get, put
from zarr_manifests import Fork, Session
from zarr_manifests.errors import ConflictError
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of

MOST = 8
"""Forks in a tree."""


def make(target: Session | Fork, name: str, *shape: int) -> None:
    how: dict[str, Any] = {"shape": shape, "chunks": (1,) * len(shape), "dtype": "u1"}
    zarr.create_array(target.store, name=name, **how)


def sent[T](value: T) -> T:
    return pickle.loads(pickle.dumps(value))  # type: ignore[no-any-return]


def opened(name: str, config: dict[str, Any] | None = None) -> Session:
    """A session of a repository with the arrays `a` and `clash`, half of `a` committed."""
    storage = MemoryStorage(f"forks-of-forks-{name}")  # by this name a fork finds it
    storage.delete_many([info.key for info in storage.list()])
    session = zm.create(storage, config).writable_session()
    make(session, "a", MOST, MOST)
    make(session, "clash", 1)
    for row in range(MOST):
        for column in range(0, MOST, 2):
            put(session, f"a/c/{row}/{column}", b"committed")
    session.commit("begin")
    return session


@dataclass(frozen=True)
class Plan:
    """A writer, number `number`: what it does, and the forks that it makes in between.

    Writer n alone writes row n of `a`; writer m, forked by n, also writes column m of row n. So
    what all of them have written is the same whenever it is merged.
    """

    number: int
    before: tuple[tuple[Any, ...], ...]
    forks: tuple[Plan, ...] = ()
    after: tuple[tuple[Any, ...], ...] = ()
    hands_up: bool = False
    """Whether whoever made it passes it on instead of merging it."""
    again: bool = False
    """Whether it is passed on although it was merged."""
    beside: bool = False
    """Whether it is merged into the fork that was made before it."""
    clashes: bytes | None = None

    @property
    def is_passed_on(self) -> bool:
        return self.hands_up or self.again

    def all(self) -> Iterator[Plan]:
        yield self
        for fork in self.forks:
            yield from fork.all()


VALUE = st.sampled_from([b"1", b"22", b"a value that is not kept inline", b"another such value"])
ACT = st.one_of(
    st.tuples(st.just("own"), st.integers(0, MOST - 1), VALUE),
    st.tuples(st.just("own"), st.integers(0, MOST - 1), VALUE),
    st.tuples(st.just("unset"), st.integers(0, MOST - 1)),
    st.tuples(st.just("make")),
    st.tuples(st.just("describe"), st.integers(0, 2)),
    st.tuples(st.just("for maker"), VALUE),
    st.tuples(st.just("into maker's array"), VALUE),
)
ACTS = st.lists(ACT, max_size=4).map(tuple)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A tree of up to `MOST` writers; the first is the session itself."""
    makers = [draw(st.integers(0, n - 1)) for n in range(1, draw(st.integers(2, MOST)))]

    def plan(number: int) -> Plan:
        forks = tuple(plan(n) for n, maker in enumerate(makers, 1) if maker == number)
        ways = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
        return Plan(number, draw(ACTS), forks, draw(ACTS), *ways)

    return plan(0)


def not_alone(plan: Plan) -> set[int]:
    """Columns of its row that forks may bring elsewhere, so that it must not write them later."""
    top = plan.number == 0
    return {fork.number for fork in plan.forks if fork.beside or (not top and fork.is_passed_on)}


def act(target: Session | Fork, plan: Plan, maker: int, acts: Any, taken: set[int]) -> None:
    """What a writer does, but to the columns `taken` of its row."""
    n = plan.number
    for name, *values in acts:
        match name:
            case "own" if values[0] not in taken:
                put(target, f"a/c/{n}/{values[0]}", values[1])
            case "unset" if values[0] not in taken:
                target.store.delete_sync(f"a/c/{n}/{values[0]}")
            case "make" if contents_of(target.store).node(f"n{n}") is None:
                make(target, f"n{n}", MOST)
            case "describe" if contents_of(target.store).node(f"n{n}") is not None:
                zarr.open_array(target.store, path=f"n{n}").attrs["value"] = values[0]
            case "for maker" if n:
                put(target, f"a/c/{maker}/{n}", values[0])
            case "into maker's array" if n and contents_of(target.store).node(f"n{maker}"):
                put(target, f"n{maker}/c/{n}", values[0])


def run(plan: Plan, target: Session | Fork, maker: int = 0) -> list[Fork]:
    """Let a writer and its forks work; the forks that are still to be merged, its own first."""
    act(target, plan, maker, plan.before, set())
    if plan.clashes is not None:
        put(target, "clash/c/0", plan.clashes)
    groups: list[tuple[Plan, list[Fork]]] = []
    for fork in plan.forks:
        group = [sent(one) for one in run(fork, sent(target.fork()), plan.number)]
        if fork.beside and groups:
            groups[-1][1][0].merge(*reversed(group))
        else:
            groups.append((fork, group))
    up: list[Fork] = []
    for fork, group in groups:
        # A second merge elsewhere must not meet a chunk that was written again in between.
        again = fork.again and len(group) == 1
        if isinstance(target, Fork) and (fork.hands_up or again):
            up += group
        if isinstance(target, Session) or not fork.hands_up:
            target.merge(*reversed(group))
    act(target, plan, maker, plan.after, not_alone(plan))
    return [sent(target), *up] if isinstance(target, Fork) else up


def alone(plan: Plan, session: Session, maker: int = 0) -> None:
    """Let one session do all of it."""
    act(session, plan, maker, plan.before, set())
    for fork in plan.forks:
        alone(fork, session, plan.number)
    act(session, plan, maker, plan.after, not_alone(plan))


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize("config", [{}, {"spill-refs": 8, "inline-chunk-bytes": 4}], ids=str)
@settings(max_examples=examples(40), deadline=None, suppress_health_check=SLOW)
@given(plan=plans())
def test_merged_in_any_way_they_are_what_one_session_writes(
    plan: Plan, config: dict[str, Any]
) -> None:
    session, single = opened("many", config), opened("one", config)
    assert run(plan, session) == []
    alone(plan, single)
    assert contents(session) == contents(single)
    if session.status():
        session.commit("of many")
        assert contents(session) == contents(single)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=SLOW)
@given(plan=plans(), data=st.data())
def test_of_two_that_write_one_chunk_differently_one_is_refused(
    plan: Plan, data: st.DataObject
) -> None:
    session = opened("many")
    lines = {each.number: {inner.number for inner in each.all()} for each in plan.all()}
    apart = [(a, b) for a in lines for b in lines if a < b and b not in lines[a]]
    assume(apart)
    one, other = data.draw(st.sampled_from(apart))
    with pytest.raises(ConflictError, match=r"/clash: chunks \[\(0,\)\]"):
        run(clashing(plan, {one: b"x", other: b"y"}), session)


def clashing(plan: Plan, values: dict[int, bytes]) -> Plan:
    forks = tuple(clashing(fork, values) for fork in plan.forks)
    return replace(plan, forks=forks, clashes=values.get(plan.number))


def test_what_a_fork_of_a_fork_has_changed_needs_the_fork() -> None:
    session = opened("one")
    fork = session.fork()
    make(fork, "new", 4)
    inner = fork.fork()
    put(inner, "new/c/1", b"x")
    with pytest.raises(ConflictError, match="made in a copy that is not merged yet"):
        session.merge(inner)
    assert not session.status()
    session.merge(inner, fork)  # in any order within a call
    assert get(session, "new/c/1") == b"x"
