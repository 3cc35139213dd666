"""What is done to versions and in them without writing data: move, shift, revert, pick, amend."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from steps import STEPS, array, change_attributes, do, start
from stored import contents, put
from zarr_manifests import Repository, Session
from zarr_manifests.errors import (
    AlreadyExistsError,
    Conflict,
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.storage.memory import MemoryStorage


def at(repository: Repository, branch: str = "main") -> dict[str, bytes]:
    return contents(repository.readonly_session(branch).store)


def commit(repository: Repository, change: Callable[[Session], object], message: str) -> str:
    session = repository.writable_session()
    change(session)
    return session.commit(message)


@pytest.fixture
def repository() -> Repository:
    return start()


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("nothing", "a", NotFoundError),
        ("", "a", InvalidArgumentError),
        ("g", "g/deeper", InvalidArgumentError),
        ("g", "a/../b", InvalidArgumentError),
        ("g", "other", AlreadyExistsError),
        ("other", "g/notes.txt", AlreadyExistsError),
    ],
)
def test_moves_that_are_refused(
    repository: Repository, old: str, new: str, error: type[Exception]
) -> None:
    session = repository.writable_session()
    with pytest.raises(error):
        session.move(old, new)
    assert not session.status()


def shifted(padded: np.ndarray, offset: tuple[int, ...]) -> np.ndarray:
    """The array moved by that many elements, zero where vacant."""
    moved = np.zeros_like(padded)
    source, target = [], []
    for step, n in zip(offset, padded.shape, strict=True):
        step = max(-n, min(n, step))
        source.append(slice(max(0, -step), n - max(0, step)))
        target.append(slice(max(0, step), n - max(0, -step)))
    moved[tuple(target)] = padded[tuple(source)]
    return moved


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_shift_is_slicing_by_whole_chunks(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=ndim, max_size=ndim)))
    chunks = tuple(data.draw(st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim)))
    whole = tuple(-(-n // c) * c for n, c in zip(shape, chunks, strict=True))
    inside = tuple(map(slice, shape))
    expected = np.zeros(whole, "i4")
    expected[inside] = np.arange(1, np.prod(shape) + 1).reshape(shape)
    repository = zm.create(MemoryStorage(), {"inline-chunk-bytes": 16})
    session = repository.writable_session()
    array(session, "a", expected[inside], chunks)
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()) and session.status():
            session.commit("in between")
        offset = data.draw(st.tuples(*[st.integers(-4, 4)] * ndim))
        session.shift_array("a", offset)
        elements = tuple(o * c for o, c in zip(offset, chunks, strict=True))
        expected = shifted(expected, elements)
        np.testing.assert_array_equal(zarr.open_array(session.store, path="a"), expected[inside])
    if session.status():
        session.commit("shifted")
    repository.compact("main", "full")
    read = zarr.open_array(repository.readonly_session().store, path="a", mode="r")
    np.testing.assert_array_equal(read, expected[inside])


@settings(max_examples=examples(40), deadline=None)
@given(st.permutations(range(6)), st.sets(st.integers(0, 5)), st.sampled_from(["map", "call"]))
def test_reindexing_is_a_permutation(order: list[int], dropped: set[int], how: str) -> None:
    repository = zm.create(MemoryStorage())
    commit(repository, lambda s: array(s, "a", np.arange(12, dtype="i4"), (2,)), "a")
    places = {(i,): None if i in dropped else (to,) for i, to in enumerate(order)}
    session = repository.writable_session()
    session.reindex_array("a", places if how == "map" else places.__getitem__)
    expected = np.zeros((6, 2), "i4")
    for i, to in enumerate(order):
        if i not in dropped:
            expected[to] = [2 * i, 2 * i + 1]
    read = zarr.open_array(session.store, path="a")
    assert read[:].tolist() == expected.ravel().tolist()
    if session.status():
        session.commit("reindex")
    read = zarr.open_array(repository.readonly_session().store, path="a", mode="r")
    assert read[:].tolist() == expected.ravel().tolist()


def test_shifts_that_are_refused_change_nothing(repository: Repository) -> None:
    session = repository.writable_session()
    for offset in ((1, 1), (0.5,)):
        with pytest.raises(InvalidArgumentError):
            session.shift_array("g/x", offset)
    for places, what in (
        ({(0,): (4,)}, r"chunk \(0,\) cannot go to \(4,\)"),
        ({(0,): (1,)}, r"chunks \(0,\) and \(1,\) both go to \(1,\)"),
        ({(0,): (1, 1)}, "one whole number an axis"),
        ({0: (1,)}, "one whole number an axis"),
    ):
        with pytest.raises(InvalidArgumentError, match=what):
            session.reindex_array("g/x", places)
    session.shift_array("g/x", (0,))
    session.reindex_array("g/x", {(9,): (0,)})  # there is no such chunk
    assert not session.status()


@settings(max_examples=examples(150), deadline=None)
@given(STEPS, STEPS, st.sets(st.integers(0, 3)))
def test_revert_is_the_state_before(first: list[Any], second: list[Any], folds: set[int]) -> None:
    repository = start()
    states = [at(repository)]
    for number, steps in enumerate((first, second)):
        session = repository.writable_session()
        do(session, steps)
        if session.status():
            session.commit("steps")
            states.append(at(repository))
        if number in folds:
            repository.compact("main", "full")
    done = [info for info in repository.ancestry() if info.message == "steps"]
    for number, info in enumerate(done):
        if states[-1 - number] == states[-2 - number]:
            return  # what was done in it left everything as it was
        reverted = repository.revert(info.snapshot_id)
        assert at(repository) == states[-2 - number]
        if number in folds:
            repository.compact("main", "full")
        again = repository.revert(reverted)
        assert at(repository) == states[-1 - number]
        repository.revert(again)
        assert at(repository) == states[-2 - number]


@settings(max_examples=examples(100), deadline=None)
@given(STEPS, STEPS, st.booleans())
def test_cherry_picking_is_doing_the_same(first: list[Any], second: list[Any], fold: bool) -> None:
    repository = start()
    repository.create_branch("side")
    expected, picked = [], []
    for steps in (first, second):
        session = repository.writable_session("side")
        do(session, steps)
        before = at(repository, "side")
        if session.status():
            snapshot_id = session.commit("steps", {"by": "test"})
            if at(repository, "side") != before:
                picked.append(snapshot_id)
                expected.append(at(repository, "side"))
    if fold:
        repository.compact("main", "full")
    for snapshot_id, state in zip(picked, expected, strict=True):
        repository.cherry_pick(snapshot_id)
        assert at(repository) == state
        info = next(repository.ancestry())
        assert info.message == "steps"
        assert info.metadata == {"by": "test", "cherry-picked-from": snapshot_id}
    repository.compact("main", "full")
    if expected:
        assert at(repository) == expected[-1]


@settings(max_examples=examples(100), deadline=None)
@given(STEPS, STEPS, st.booleans())
def test_amending_is_one_commit_of_both(first: list[Any], second: list[Any], fold: bool) -> None:
    repository = start()
    parent = repository.list_branches()["main"]
    session = repository.writable_session()
    do(session, first)
    if not session.status():
        return
    session.commit("first", {"n": 1})
    do(session, second)
    expected = contents(session)
    snapshot_id = session.amend("both")
    assert contents(session) == at(repository) == expected
    info = next(repository.ancestry())
    assert (info.snapshot_id, info.parent_id) == (snapshot_id, parent)
    assert (info.message, info.metadata) == ("both", {"n": 1})
    if fold:
        repository.compact("main", "full")
        assert at(repository) == expected


@settings(max_examples=examples(200), deadline=None)
@given(STEPS)
def test_status_is_what_diff_says_once_it_is_committed(steps: list[Any]) -> None:
    repository = start()
    session = repository.writable_session()
    do(session, steps)
    status = session.status()
    if status:
        session.commit("steps")
    diff = repository.diff("main~1" if status else "main", "main")
    assert status.to_dict() == diff.to_dict()
    assert (str(status), bool(status)) == (str(diff), bool(diff))


def in_array(path: str, start: int, stop: int, value: int) -> Callable[[Session], object]:
    def change(session: Session) -> None:
        zarr.open_array(session.store, path=path)[start:stop] = value

    return change


def test_revert_conflicts_where_later_commits_changed_the_same(repository: Repository) -> None:
    def refused(version: str) -> Conflict:
        with pytest.raises(ConflictError) as caught:
            repository.revert(version)
        (conflict,) = caught.value.conflicts
        return conflict

    def grow(session: Session) -> None:
        grown = zarr.open_array(session.store, path="g/x")
        grown.resize((12,))
        grown[8:10] = 8

    written = commit(repository, in_array("g/x", 0, 4, 50), "write")
    commit(repository, in_array("g/x", 2, 4, 60), "write one of the chunks again")
    assert (refused(written).path, refused(written).chunks) == ("/g/x", ((1,),))
    grown = commit(repository, grow, "grow")
    commit(repository, in_array("g/x", 10, 12, 70), "write what the growth made room for")
    assert (refused(grown).path, refused(grown).chunks) == ("/g/x", ((5,),))
    named = commit(repository, lambda s: change_attributes(s, "g/x", 1), "name")
    again = commit(repository, lambda s: change_attributes(s, "g/x", 2), "name again")
    assert "given another value" in refused(named).reason
    repository.revert(again)
    commit(repository, lambda s: s.move("g/x", "elsewhere"), "move")
    assert "moved" in refused(again).reason
    moved = commit(repository, in_array("elsewhere", 4, 6, 80), "write")
    commit(repository, lambda s: s.move("elsewhere", "back"), "move")
    repository.revert(moved)  # chunks go with their array


def test_a_revert_takes_no_array_away_that_has_moved_to_the_old_place_of_another(
    repository: Repository,
) -> None:
    def both(session: Session) -> None:
        session.move("g/x", "elsewhere")
        zarr.open_array(session.store, path="beside")[0] = 9

    commit(
        repository,
        lambda s: zarr.create_array(s.store, name="beside", shape=(2,), chunks=(1,), dtype="u1"),
        "another",
    )
    done = commit(repository, both, "move one and write to another")
    commit(repository, lambda s: s.move("beside", "g/x"), "move the other")
    with pytest.raises(ConflictError, match="/g/x: create: also made"):
        repository.revert(done)
    found = zarr.open_array(repository.readonly_session().store, path="g/x", mode="r")
    assert found[:].tolist() == [9, 0]


def test_a_group_that_has_got_children_is_not_reverted_away(repository: Repository) -> None:
    made = commit(repository, lambda s: zarr.create_group(s.store, path="new"), "group")
    commit(repository, lambda s: zarr.create_group(s.store, path="new/child"), "child")
    with pytest.raises(
        ConflictError, match=r"/new: delete: at, above or below it something was made"
    ):
        repository.revert(made)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"fill_value": 0', b'"fill_value": 9'),
        (b'"attributes": {', b'"attributes": {"scale_factor": 0.5'),
    ],
)
def test_chunks_are_not_picked_into_an_array_of_another_encoding(
    repository: Repository, old: bytes, new: bytes
) -> None:
    repository.create_branch("side")
    written = commit(repository, in_array("g/x", 0, 2, 50), "write")
    session = repository.writable_session("side")
    document = contents(session)["g/x/zarr.json"]
    assert old in document
    put(session, "g/x/zarr.json", document.replace(old, new))
    session.commit("another encoding")
    with pytest.raises(ConflictError, match="its structure was changed"):
        repository.cherry_pick(written, "side")


def test_reverts_and_picks_that_make_no_sense(repository: Repository) -> None:
    first = list(repository.ancestry())[-1].snapshot_id
    for call in (repository.revert, repository.cherry_pick):
        with pytest.raises(InvalidArgumentError, match="first of the repository"):
            call(first)
    with pytest.raises(InvalidArgumentError, match="nothing to do"):
        repository.cherry_pick(repository.list_branches()["main"])
    written = commit(repository, in_array("g/x", 0, 2, 50), "write")
    repository.revert(written)
    with pytest.raises(InvalidArgumentError, match="nothing to undo"):
        repository.revert(written)
    repository.create_branch("side", first)
    with pytest.raises(ConflictError, match="cannot be undone here"):
        repository.revert(written, "side")


def test_the_oldest_commit_is_neither_undone_nor_repeated_once_its_parent_is_gone() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage)
    for name in "ab":
        with repository.transaction(message=name) as store:
            zarr.create_group(store, path=name)
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(timedelta(0))
    repository = zm.open(storage)
    (oldest,) = repository.ancestry()
    with repository.transaction(message="delete") as store:
        del zarr.open_group(store)["b"]
    for call in (repository.revert, repository.cherry_pick):
        with pytest.raises(SnapshotExpiredError):
            call(oldest.snapshot_id)


def test_only_the_head_is_amended(repository: Repository) -> None:
    session = repository.writable_session()
    with pytest.raises(InvalidArgumentError, match="nothing to amend"):
        session.amend()
    in_array("g/x", 0, 2, 50)(session)
    head = commit(repository, in_array("g/x", 2, 4, 60), "first")
    with pytest.raises(ConflictError, match="not the head"):
        session.amend("late")
    assert repository.list_branches()["main"] == head
    session.commit("as a commit of its own")
    one, two = repository.writable_session(), repository.writable_session()
    one.amend("one")
    with pytest.raises(ConflictError, match="not the head"):
        two.amend("two")
    assert next(repository.ancestry()).message == "one"
    repository.compact("main", "full")
    with pytest.raises(InvalidArgumentError, match="a rewrite"):
        repository.writable_session().amend("no")
