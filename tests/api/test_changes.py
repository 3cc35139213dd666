"""Incremental reads: records replay to the state, cost what changed, and are never in part."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from steps import STEPS, do
from steps import start as begin
from stored import put
from zarr_manifests import Repository, Session
from zarr_manifests.errors import (
    CorruptObjectError,
    HistoryExpiredError,
    InvalidArgumentError,
    NotFoundError,
)
from zarr_manifests.keys import absolute
from zarr_manifests.reports import Change, Operation
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of

type State = dict[str, set[tuple[int, ...]]]

MODES: list[Literal["log", "net"]] = ["log", "net"]


def make(session: Session, path: str, shape: tuple[int, ...] = (8,)) -> None:
    zarr.create_array(
        session.store,
        name=path,
        shape=shape,
        chunks=(1,) * len(shape),
        dtype="u1",
        compressors=None,
    )


def state_of(repository: Repository, snapshot_id: str) -> State:
    """Coordinates of all chunks of every node, by path."""
    contents = contents_of(repository.readonly_session(snapshot_id).store)
    found: State = {}
    for path, node in contents.nodes().items():
        table = contents.chunks(node)
        coords = [] if table is None else table.coords().tolist()
        found[absolute(path)] = set(map(tuple, coords))
    return found


def replay(state: State, changes: Iterable[Change]) -> State:
    """What the documentation says a reader makes of records."""
    state = {path: set(coords) for path, coords in state.items()}
    for (_, operation), group in groupby(changes, key=lambda c: (c.snapshot_id, c.operation)):
        records = list(group)
        if operation is Operation.MOVE:
            taken = {c.path: state.pop(str(c.moved_from)) for c in records}
            assert not taken.keys() & state.keys()
            state |= taken
            continue
        for change in records:
            coords = set(map(tuple, change.coordinates.tolist()))
            assert len(coords) == len(change.coordinates)
            if operation is Operation.DELETE:
                del state[change.path]
            elif operation is Operation.CREATE:
                assert change.path not in state
                state[change.path] = set()
            elif operation is Operation.TRUNCATE:
                assert change.grid_shape is not None
                shape = change.grid_shape
                kept = {c for c in state[change.path] if all(map(int.__lt__, c, shape))}
                state[change.path] = kept
            elif operation is Operation.UNSET:
                assert coords <= state[change.path]
                state[change.path] -= coords
            elif operation is Operation.APPEND:
                assert not coords & state[change.path]
                state[change.path] |= coords
            elif operation is Operation.OVERWRITE:
                state[change.path] |= coords
    return state


def only(changes: Iterable[Change]) -> list[tuple[str, str, list[Any]]]:
    return [(c.path, str(c.operation), c.coordinates.tolist()) for c in changes]


@pytest.fixture
def repository() -> Repository:
    return zm.create(MemoryStorage())


def test_ends_are_ids_branches_tags_or_left_out(repository: Repository) -> None:
    session = repository.writable_session("main")
    make(session, "a")
    start = session.commit("start")
    repository.create_tag("then", start)
    put(session, "a/c/0")
    session.commit("next")
    repository.create_branch("trial", start)
    expected = [("/a", "overwrite", [[0]])]
    assert only(repository.changes(start)) == expected
    assert only(repository.changes("then", "main")) == expected
    assert only(repository.changes("trial", "main", mode="net")) == expected
    assert only(repository.changes("main")) == []
    everything = replay({}, repository.changes())
    assert everything == state_of(repository, repository.list_branches()["main"])
    with pytest.raises(NotFoundError, match="nothing"):
        repository.changes("nothing")
    with pytest.raises(InvalidArgumentError, match="not an ancestor"):
        repository.changes("main", "then")


@settings(max_examples=examples(120))
@given(st.lists(STEPS, min_size=1, max_size=6), st.data())
def test_records_replayed_over_the_start_give_the_end(
    commits: list[list[Any]], data: st.DataObject
) -> None:
    repository = begin()
    history = [repository.list_branches()["main"]]
    for steps in commits:
        session = repository.writable_session("main")
        do(session, steps)
        if session.status():
            history.append(session.commit("some"))
        then = data.draw(st.sampled_from(["nothing", "minor", "major", "full", "revert"]))
        if then == "revert" and len(history) > 1:
            with suppress(InvalidArgumentError):  # what was set is what was there
                history.append(repository.revert(history[-1]))
        elif then in ("minor", "major", "full"):
            repository.compact("main", then)
    first = data.draw(st.integers(0, len(history) - 1))
    last = data.draw(st.integers(first, len(history) - 1))
    start, end = history[first], history[last]
    before, after = state_of(repository, start), state_of(repository, end)
    assert replay(before, repository.changes(start, end)) == after
    net = list(repository.changes(start, end, "net"))
    assert replay(before, net) == after
    check_net(before, after, net)


def check_net(before: State, after: State, net: list[Change]) -> None:
    """Each coordinate once, and all that the listings of both ends differ by."""
    moved = {c.moved_from: c.path for c in net if c.operation is Operation.MOVE}
    made = {c.path for c in net if c.operation is Operation.CREATE}
    gone = {c.path for c in net if c.operation is Operation.DELETE}
    was = {moved.get(path, path): coords for path, coords in before.items() if path not in gone}
    assert was.keys() | made == after.keys()
    for path, coords in after.items():
        old = was.get(path, set())
        records = [c for c in net if c.path == path and len(c.coordinates)]
        told = [tuple(x) for c in records for x in c.coordinates.tolist()]
        assert len(told) == len(set(told))
        unset = {
            tuple(x)
            for c in records
            if c.operation is Operation.UNSET
            for x in c.coordinates.tolist()
        }
        assert unset <= old - coords
        assert set(told) - unset <= coords
        assert coords - old <= set(told) - unset


@pytest.mark.parametrize("kind", ["snapshots", "deltas", "manifests"])
def test_an_expired_range_is_an_error_before_the_first_record(kind: str) -> None:
    """Each commit has a manifest of its own, and a log too long for a copy of it."""
    storage, ids, of_third = MemoryStorage(), [], set[str]()
    repository = zm.create(storage)
    session = repository.writable_session("main")
    make(session, "a", (30_000,))
    ids.append(session.commit("array"))
    rng = np.random.default_rng(1)
    for number in range(4):
        for i in rng.permutation(30_000)[:2_000].tolist():
            put(session, f"a/c/{i}", rng.bytes(40))
        zarr.open_array(session.store, path="a").attrs["noise"] = rng.bytes(12_000).hex()
        before = {info.key for info in storage.list(f"{kind}/")}
        ids.append(session.commit("many"))
        if number == 1:
            of_third = {info.key for info in storage.list(f"{kind}/")} - before
        repository.compact("main", "full")
        session = repository.writable_session("main")
    (key,) = of_third
    whole = storage.get(key)
    storage.put(key, whole[:-1] + b"!")
    with pytest.raises(CorruptObjectError):
        list(zm.open(storage).changes(ids[0]))
    storage.delete_many([key])
    for mode in MODES:
        for start, end in ((ids[0], None), (ids[1], ids[3]), (None, ids[4])):
            with pytest.raises(HistoryExpiredError, match=key):
                zm.open(storage).changes(start, end, mode)
    told = [change.snapshot_id for change in zm.open(storage).changes(ids[3])]
    assert set(told) == {ids[4]}
