"""What is done to versions and in them without writing data: move, shift, revert, pick, amend."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from inside import change_root
from zarr_manifests import Repository, Session, commits
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    ReadOnlyError,
    SnapshotExpiredError,
)
from zarr_manifests.format.root import Root
from zarr_manifests.reports import Amount
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage, Fault, FaultKind, FaultyStorage


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def contents(session: Session) -> dict[str, bytes]:
    store = session.store
    return {key: store.get_sync(key).to_bytes() for key in contents_of(store).keys_below("")}


def at(repository: Repository, branch: str = "main") -> dict[str, bytes]:
    return contents(repository.readonly_session(branch))


def array(
    session: Session, path: str, values: Any, chunks: tuple[int, ...], names: Any = None
) -> zarr.Array:
    values = np.asarray(values)
    made = zarr.create_array(
        session.store,
        name=path,
        shape=values.shape,
        chunks=chunks,
        dtype=values.dtype,
        compressors=None,
        dimension_names=names,
    )
    made[...] = values
    return made


def commit(repository: Repository, change: Callable[[Session], object], message: str) -> str:
    session = repository.writable_session()
    change(session)
    return session.commit(message)


@pytest.fixture
def repository() -> Repository:
    """A tree with inline and native chunks, and an opaque key."""
    repo = zm.create(MemoryStorage(), {"inline-chunk-bytes": 16})

    def fill(session: Session) -> None:
        zarr.create_group(session.store, path="g/inner")
        array(session, "g/x", np.arange(8, dtype="i4"), (2,), ["x"])
        array(session, "g/inner/big", np.arange(64.0).reshape(8, 8), (4, 4))
        put(session, "g/notes.txt", b"an opaque key")
        array(session, "other", np.arange(4, dtype="i4"), (2,))

    commit(repo, fill, "fill")
    return repo


# --- move and rename -------------------------------------------------------------------------


def renamed(kept: dict[str, bytes], old: str, new: str) -> dict[str, bytes]:
    """What a move makes of these keys."""
    return {
        new + key[len(old) :] if key.startswith(old + "/") else key: value
        for key, value in kept.items()
    }


@pytest.mark.parametrize("folded", [False, True])
def test_a_move_keeps_every_byte_and_id(repository: Repository, folded: bool) -> None:
    if folded:
        repository.compact("main", "full")
    before = at(repository)
    session = repository.writable_session()
    ids = {path: node.node_id for path, node in contents_of(session.store).nodes().items()}
    session.move("/g", "moved")
    assert contents(session) == renamed(before, "g", "moved")
    session.commit("move")
    read = repository.readonly_session()
    assert contents(read) == renamed(before, "g", "moved")
    now = {path: node.node_id for path, node in contents_of(read.store).nodes().items()}
    assert now["moved/inner/big"] == ids["g/inner/big"]
    assert set(now.values()) == set(ids.values())
    repository.compact("main", "full")
    assert at(repository) == renamed(before, "g", "moved")


def test_a_move_uploads_no_chunks_and_no_manifest(repository: Repository) -> None:
    counting = CountingStorage(repository.storage)
    session = zm.open(counting).writable_session()
    counting.reset()
    session.move("g", "moved")
    assert counting.log == []
    session.commit("move")
    written = {r.key.partition("/")[0] for r in counting.log if r.op in ("create", "cas", "put")}
    assert written == {"deltas", "snapshots", "root", "current"}


def test_changes_of_the_session_move_along(repository: Repository) -> None:
    session = repository.writable_session()
    zarr.open_array(session.store, path="g/x")[:2] = 77
    session.move("g", "h")
    zarr.open_array(session.store, path="h/x")[2:4] = 88
    array(session, "g", np.arange(2, dtype="i4"), (2,))  # the old place is free
    session.commit("move and write")
    group = zarr.open_group(repository.readonly_session().store, mode="r")
    assert group["h/x"][:].tolist() == [77, 77, 88, 88, 4, 5, 6, 7]
    assert group["g"][:].tolist() == [0, 1]


def test_a_moved_array_that_is_shrunk_and_grown_has_lost_its_chunks(
    repository: Repository,
) -> None:
    session = repository.writable_session()
    session.move("g/x", "x")
    moved = zarr.open_array(session.store, path="x")
    moved.resize((2,))
    moved.resize((8,))
    assert moved[:].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    session.commit("move, shrink, grow")
    read = zarr.open_array(repository.readonly_session().store, path="x", mode="r")
    assert read[:].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_there_and_back_is_no_change(repository: Repository) -> None:
    session = repository.writable_session()
    session.move("g", "h")
    session.move("h", "g")
    assert not session.status()
    session.move("g", "h")
    workspace_of(zarr.open_group(session.store, mode="a").store).delete_below("h/")
    assert session.status().deleted == ("/g", "/g/inner", "/g/inner/big", "/g/notes.txt", "/g/x")


def test_status_and_diff_tell_a_move_from_delete_and_create(repository: Repository) -> None:
    start = repository.list_branches()["main"]
    session = repository.writable_session()
    session.move("g/x", "y")
    zarr.open_array(session.store, path="y").update_attributes({"units": "m"})
    zarr.open_array(session.store, path="y")[:2] = 9
    status = session.status()
    assert (status.created, status.deleted, status.updated) == ((), (), ("/y",))
    assert (status.moved, status.chunks) == ({"/g/x": "/y"}, {"/y": 1})
    assert "> /g/x to /y" in str(status)
    diff = repository.diff(start, session.commit("move"))
    assert (diff.created, diff.deleted, diff.updated) == ((), (), ("/y",))
    assert diff.moved == {"/g/x": "/y"}
    assert diff.chunks["/y"].tolist() == [[0]]


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("nothing", "a", NotFoundError),
        ("g/notes.txt", "a", NotFoundError),
        ("", "a", InvalidArgumentError),
        ("g", "/", InvalidArgumentError),
        ("g", "g", InvalidArgumentError),
        ("g", "g/deeper", InvalidArgumentError),
        ("g", "other/deeper", InvalidArgumentError),
        ("g", "a/../b", InvalidArgumentError),
        ("g", "a//b", InvalidArgumentError),
        ("g", "no/such", NotFoundError),
        ("g", "other", AlreadyExistsError),
        ("other", "g/notes.txt", AlreadyExistsError),
        ("other", "g/inner", AlreadyExistsError),
    ],
)
def test_moves_that_are_refused(
    repository: Repository, old: str, new: str, error: type[Exception]
) -> None:
    session = repository.writable_session()
    with pytest.raises(error):
        session.move(old, new)
    assert not session.status()


def test_a_readonly_session_moves_nothing(repository: Repository) -> None:
    session = repository.readonly_session()
    for change in (
        lambda: session.move("g", "h"),
        lambda: session.shift_array("g/x", (1,)),
        lambda: session.reindex_array("g/x", {}),
    ):
        with pytest.raises(ReadOnlyError):
            change()


@pytest.mark.parametrize("move_first", [True, False])
def test_a_move_and_a_write_at_the_same_time_conflict(
    repository: Repository, move_first: bool
) -> None:
    mover, writer = repository.writable_session(), repository.writable_session()
    mover.move("g", "h")
    zarr.open_array(writer.store, path="g/x")[:2] = 5
    first, second = (mover, writer) if move_first else (writer, mover)
    first.commit("first")
    with pytest.raises(ConflictError):
        second.commit("second")


def test_forks_write_to_what_was_moved(repository: Repository) -> None:
    session = repository.writable_session()
    early = session.fork()
    session.move("g", "h")
    late = session.fork()
    zarr.open_array(early.store, path="g/x")[:2] = 5
    zarr.open_array(late.store, path="h/x")[2:4] = 6
    session.merge(early, late)
    session.commit("both")
    read = zarr.open_array(repository.readonly_session().store, path="h/x", mode="r")
    assert read[:].tolist() == [5, 5, 6, 6, 4, 5, 6, 7]


# --- shift and reindex -----------------------------------------------------------------------


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


def test_shift_and_reindex_upload_no_chunks() -> None:
    counting = CountingStorage(MemoryStorage())
    repository = zm.create(counting, {"inline-chunk-bytes": 0})
    commit(repository, lambda s: array(s, "a", np.arange(40, dtype="i4"), (2,)), "a")
    session = zm.open(counting).writable_session()
    counting.reset()
    session.shift_array("a", [3])
    session.reindex_array("a", {(3,): (0,), (19,): None})
    assert {record.op for record in counting.log} <= {"get"}
    session.commit("shift")
    assert not [r for r in counting.log if r.key.startswith("chunks/")]
    assert len(counting.log) <= 8
    read = zarr.open_array(repository.readonly_session().store, path="a", mode="r")
    assert read[:].tolist() == [0, 1, 0, 0, 0, 0, 0, 0, *range(2, 32), 0, 0]


@settings(max_examples=examples(40), deadline=None)
@given(
    st.permutations(range(6)), st.sets(st.integers(0, 5)), st.sampled_from(["map", "call", "array"])
)
def test_reindexing_is_a_permutation(order: list[int], dropped: set[int], how: str) -> None:
    repository = zm.create(MemoryStorage())
    commit(repository, lambda s: array(s, "a", np.arange(12, dtype="i4"), (2,)), "a")
    places = {(i,): None if i in dropped else (to,) for i, to in enumerate(order)}
    session = repository.writable_session()
    rows = [(*was, -1 if to is None else to[0]) for was, to in places.items()]
    forms = {"map": places, "call": places.__getitem__, "array": np.array(rows, "i1")}
    session.reindex_array("a", forms[how])
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


def test_wrong_shifts_are_refused_and_change_nothing(repository: Repository) -> None:
    session = repository.writable_session()
    array(session, "scalar", np.int32(5), ())
    session.commit("scalar")
    for path, offset, error in (
        ("g/x", (1, 1), InvalidArgumentError),
        ("g/x", (0.5,), InvalidArgumentError),
        ("g", (1,), NotFoundError),
        ("nothing", (1,), NotFoundError),
        ("scalar", (), InvalidArgumentError),
    ):
        with pytest.raises(error):
            session.shift_array(path, offset)
    for places, what in (
        ({(0,): (4,)}, r"chunk \(0,\) cannot go to \(4,\).*grid \(4,\)"),
        ({(0,): (-1,)}, r"cannot go to \(-1,\)"),
        ({(0,): (1,)}, r"chunks \(0,\) and \(1,\) both go to \(1,\)"),
        ({(0,): (1, 1)}, "one whole number an axis"),
        ({(0, 0): (1,)}, "one whole number an axis"),
        ({0: 1}, "one whole number an axis"),
        ({(0,): (0.5,)}, "one whole number an axis"),
        ({(0,): (2**70,)}, "one whole number an axis"),
        (lambda chunk: (0,), "both go to"),
        (lambda chunk: chunk[0], "one whole number an axis"),
        (np.array([[0, 1], [1, 0], [0, 2]]), r"chunk \(0,\) is moved twice"),
        (np.array([[0, 1, 2]]), "columns for the old"),
        (np.array([[0.0, 1.0]]), "columns for the old"),
        (np.array([[0, 2**63]], "u8"), "one whole number"),
        (5, "columns for the old"),
    ):
        with pytest.raises(InvalidArgumentError, match=what):
            session.reindex_array("g/x", places)
    session.shift_array("g/x", (0,))
    session.reindex_array("g/x", {})
    session.reindex_array("g/x", {(9,): (0,)})  # there is no such chunk
    session.reindex_array("g/x", np.zeros((0, 2), "i8"))
    assert not session.status()


def test_what_cannot_be_meant_is_refused_in_words(repository: Repository) -> None:
    session = repository.writable_session()
    anything: Any = None
    calls = [
        lambda: session.move(anything, "g"),
        lambda: session.shift_array(anything, (1,)),
        lambda: session.shift_array("g/x", anything),
        lambda: session.shift_array("g/x", 1),
        lambda: session.shift_array("g/x", (True,)),
        lambda: session.reindex_array("g/x", anything),
        lambda: repository.revert(anything),
        lambda: repository.cherry_pick("main"),
        lambda: repository.diff(anything, "main"),
        lambda: repository.diff("main", 5),
        lambda: repository.changes(5),
        lambda: repository.create_branch(anything),
        lambda: repository.create_tag(5),
        lambda: repository.readonly_session("main@{yesterday}"),
        lambda: repository.readonly_session("main@5"),
        lambda: repository.readonly_session(5),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError):
            call()
    with pytest.raises(NotFoundError, match="list_branches"):
        repository.reset_branch("main", "nowhere")
    assert not session.status()
    session.shift_array("g/x", (9,))
    with pytest.raises(InvalidArgumentError):  # no chunk is left, and it cannot be meant
        session.reindex_array("g/x", anything)


def test_a_move_is_told_in_one_line_for_all_that_goes_along(repository: Repository) -> None:
    session = repository.writable_session()
    session.move("g", "moved")
    session.move("moved/x", "x")
    assert str(session.status()) == "> /g to /moved\n> /g/x to /x"
    assert session.status().moved["/g/inner/big"] == "/moved/inner/big"


def test_a_huge_shift_leaves_nothing(repository: Repository) -> None:
    session = repository.writable_session()
    session.shift_array("g/x", (-(2**70),))
    assert zarr.open_array(session.store, path="g/x")[:].tolist() == [0] * 8
    session.commit("away")
    assert [key for key in at(repository) if key.startswith("g/x/c/")] == []


@pytest.mark.parametrize("shift_first", [True, False])
def test_a_shift_conflicts_with_any_write_to_the_array(
    repository: Repository, shift_first: bool
) -> None:
    writer = repository.writable_session()
    zarr.open_array(writer.store, path="g/x")[:2] = 5
    shifter = repository.writable_session()
    shifter.shift_array("g/x", (1,))
    first, second = (shifter, writer) if shift_first else (writer, shifter)
    first.commit("first")
    with pytest.raises(ConflictError):
        second.commit("second")


# --- revert, cherry-pick, amend: against a model ---------------------------------------------

PATHS = ("g/x", "g/inner/big", "other", "new", "g/new", "scalar")


def write(session: Session, path: str, seed: int) -> None:
    found = zarr.open_array(session.store, path=path)
    if found.ndim:
        found[: 1 + seed % 5] = seed
    else:
        found[...] = seed


def create(session: Session, path: str, seed: int) -> None:
    above, _, name = path.rpartition("/")
    if above:
        zarr.open_group(session.store, path=above)  # KeyError without it
    array(
        session,
        path,
        np.int32(seed) if name == "scalar" else np.arange(seed % 7 + 1),
        (2,)[: name != "scalar"],
    )


def resize(session: Session, path: str, seed: int) -> None:
    found = zarr.open_array(session.store, path=path)
    found.resize(tuple((n + seed) % 11 + 1 for n in found.shape))


def change_attributes(session: Session, path: str, seed: int) -> None:
    zarr.open_array(session.store, path=path).update_attributes({"seed": seed})


def delete(session: Session, path: str, seed: int) -> None:
    workspace_of(session.store).delete_below(
        (path if seed % 2 else path.rpartition("/")[0] or path) + "/"
    )


def move(session: Session, path: str, seed: int) -> None:
    session.move(path if seed % 2 else path.partition("/")[0], PATHS[seed % len(PATHS)])


def shift(session: Session, path: str, seed: int) -> None:
    ndim = zarr.open_array(session.store, path=path).ndim
    session.shift_array(path, (seed % 5 - 2,) * ndim)


def opaque(session: Session, path: str, seed: int) -> None:
    put(session, path + ".txt", b"%d" % seed)


OPERATIONS = (write, write, create, resize, change_attributes, delete, move, shift, opaque)
STEPS = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(PATHS), st.integers(1, 40)),
    min_size=1,
    max_size=6,
)


def do(session: Session, steps: list[tuple[Any, str, int]]) -> None:
    """Do all of the steps that can be done."""
    for operation, path, seed in steps:
        try:
            operation(session, path, seed)
        except (KeyError, ValueError, TypeError, FileExistsError, FileNotFoundError):
            continue  # there is no such node, or there is one already


def start() -> Repository:
    repo = zm.create(MemoryStorage(), {"inline-chunk-bytes": 16})

    def fill(session: Session) -> None:
        zarr.create_group(session.store, path="g/inner")
        array(session, "g/x", np.arange(8, dtype="i4"), (2,), ["x"])
        array(session, "g/inner/big", np.arange(64.0).reshape(8, 8), (4, 4))
        put(session, "g/notes.txt", b"an opaque key")
        array(session, "other", np.arange(4, dtype="i4"), (2,))

    commit(repo, fill, "fill")
    return repo


@pytest.mark.slow
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


def test_a_group_that_is_picked_beside_one_like_it_is_not_that_one(
    repository: Repository,
) -> None:
    """Groups of the same documents are as good as one, so those of the same id may meet."""

    def groups(*names: str) -> Callable[[Session], object]:
        return lambda s: [zarr.create_group(s.store, path=name) for name in names]

    commit(repository, groups("one", "two"), "two groups")
    repository.create_branch("side")
    session = repository.writable_session("side")
    for old, new in (("one", "three"), ("two", "one"), ("three", "two")):
        session.move(old, new)
    session.commit("exchange them")
    zarr.open_group(session.store, path="one").attrs["a"] = 1
    session.move("two", "three")
    groups("two")(session)
    picked = session.commit("change one, move the other and make a new one")
    repository.cherry_pick(picked)
    assert at(repository) == at(repository, "side")
    nodes = contents_of(repository.readonly_session().store).nodes()
    assert len({node.node_id for node in nodes.values()}) == len(nodes)


@pytest.mark.slow
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


# --- revert, cherry-pick, amend: what must not happen ----------------------------------------


def in_array(path: str, start: int, stop: int, value: int) -> Callable[[Session], object]:
    def change(session: Session) -> None:
        zarr.open_array(session.store, path=path)[start:stop] = value

    return change


@pytest.mark.parametrize("folded", [False, True])
def test_a_node_that_comes_back_has_no_chunks_of_later_commits(folded: bool) -> None:
    repository = zm.create(MemoryStorage())

    def make(session: Session) -> None:
        zarr.create_array(session.store, name="a", shape=(4,), chunks=(2,), dtype="i4")[:2] = 1
        zarr.create_array(session.store, name="scalar", shape=(), dtype="i4")

    def write_both(session: Session) -> None:
        zarr.open_array(session.store, path="a")[2:] = 2
        zarr.open_array(session.store, path="scalar")[...] = 2

    made = commit(repository, make, "make")
    state = at(repository)
    written = commit(repository, write_both, "write")
    whole = at(repository)
    commit(repository, lambda s: workspace_of(s.store).delete_below(""), "delete")
    if folded:
        repository.compact("main", "full")
    back = repository.cherry_pick(made)
    assert at(repository) == state
    repository.cherry_pick(written)
    assert at(repository) == whole
    with pytest.raises(ConflictError) as caught:
        repository.revert(back)
    found = {(c.path, c.component, c.chunks) for c in caught.value.conflicts}
    assert found == {("/a", "chunks", ((1,),)), ("/scalar", "chunks", ((),))}
    assert at(repository) == whole


def test_revert_conflicts_where_later_commits_changed_the_same(repository: Repository) -> None:
    def grow(session: Session) -> None:
        grown = zarr.open_array(session.store, path="g/x")
        grown.resize((12,))
        grown[8:10] = 8

    written = commit(repository, in_array("g/x", 0, 4, 50), "write")
    commit(repository, in_array("g/x", 2, 4, 60), "write one of the chunks again")
    with pytest.raises(ConflictError) as caught:
        repository.revert(written)
    assert [(c.path, c.chunks) for c in caught.value.conflicts] == [("/g/x", ((1,),))]
    grown = commit(repository, grow, "grow")
    commit(repository, in_array("g/x", 10, 12, 70), "write what the growth made room for")
    with pytest.raises(ConflictError) as caught:
        repository.revert(grown)
    assert [(c.path, c.chunks) for c in caught.value.conflicts] == [("/g/x", ((5,),))]
    tip = repository.list_branches()["main"]
    named = commit(
        repository,
        lambda s: zarr.open_array(s.store, path="g/x").update_attributes({"a": 1}),
        "attributes",
    )
    repository.revert(named)
    commit(repository, lambda s: s.move("g/x", "elsewhere"), "move")
    with pytest.raises(ConflictError) as caught:
        repository.revert(named)
    assert [(c.path, c.reason) for c in caught.value.conflicts] == [
        ("/g/x", "it is at /elsewhere here")
    ]
    assert repository.diff(tip, repository.list_branches()["main"]).chunks == {}


def test_a_refused_revert_says_what_stands_in_the_way(repository: Repository) -> None:
    """A later commit has made the array longer, has named it, or has made it anew."""

    def resized(length: int) -> Callable[[Session], None]:
        return lambda s: zarr.open_array(s.store, path="g/x").resize((length,))

    def named(number: int) -> Callable[[Session], None]:
        return lambda s: zarr.open_array(s.store, path="g/x").update_attributes({"a": number})

    def anew(session: Session) -> None:
        zarr.create_array(session.store, name="g/x", shape=(2,), dtype="i4", overwrite=True)

    def reason(version: str) -> str:
        with pytest.raises(ConflictError) as caught:
            repository.revert(version)
        return {c.path: c.reason for c in caught.value.conflicts}["/g/x"]

    longer = commit(repository, resized(10), "append")
    commit(repository, resized(12), "append more")
    assert reason(longer) == "its shape is (12,) here, and the commit has it as (10,)"
    first = commit(repository, named(1), "name")
    commit(repository, named(2), "name again")
    assert reason(first) == "its attributes differ here from those of the commit"
    commit(repository, anew, "make anew")
    assert reason(first) == "it has been made anew here"


def test_an_attribute_of_zarr_2_is_no_shape() -> None:
    repository, written = zm.create(MemoryStorage()), []
    with repository.transaction(message="make") as store:
        zarr.create_array(store, name="a", shape=(2,), dtype="i4", zarr_format=2)
    for number in (1, 2):
        with repository.transaction(message="name") as store:
            zarr.open_array(store, path="a").update_attributes({"shape": number})
        written.append(repository.list_branches()["main"])
    with pytest.raises(ConflictError) as caught:
        repository.revert(written[0])
    assert [c.reason for c in caught.value.conflicts] == [
        "its attributes differ here from those of the commit"
    ]


def test_a_group_that_comes_back_has_no_chunks(repository: Repository) -> None:
    back = repository.revert(repository.list_branches()["main"])
    again = repository.revert(back)
    changed = repository.diff(back, again)
    groups = {"/", "/g", "/g/inner"}
    assert groups < {*changed.created}
    assert {*changed.chunks} == {*changed.created} - groups


def test_revert_leaves_later_work_on_other_chunks(repository: Repository) -> None:
    written = commit(repository, in_array("g/x", 0, 2, 50), "write")
    commit(repository, in_array("g/x", 2, 4, 60), "write another chunk")
    commit(repository, lambda s: zarr.open_array(s.store, path="g/x").resize((10,)), "grow")
    commit(repository, lambda s: s.move("g", "h"), "move")
    snapshot_id = repository.revert(written)
    read = zarr.open_array(repository.readonly_session().store, path="h/x", mode="r")
    assert read[:].tolist() == [0, 1, 60, 60, 4, 5, 6, 7, 0, 0]
    info = next(repository.ancestry())
    assert (info.snapshot_id, info.message) == (snapshot_id, "revert 'write'")
    assert info.metadata == {"reverts": written}


def test_a_group_that_has_got_children_is_not_reverted_away(repository: Repository) -> None:
    made = commit(repository, lambda s: zarr.create_group(s.store, path="new"), "group")
    commit(repository, lambda s: zarr.create_group(s.store, path="new/child"), "child")
    with pytest.raises(ConflictError, match=r"/new/child.*no longer exists"):
        repository.revert(made)
    repository.create_branch("side", made)
    child = repository.list_branches()["main"]
    parent = next(repository.ancestry(made)).parent_id or ""
    repository.reset_branch("side", parent, force=True)
    with pytest.raises(ConflictError, match=r"/new/child.*is not here"):
        repository.cherry_pick(child, "side")


def test_chunks_are_not_picked_into_an_array_of_another_encoding(repository: Repository) -> None:
    def other_fill(session: Session) -> None:
        store = session.store
        data = store.get_sync("g/x/zarr.json")
        assert data is not None
        changed = data.to_bytes().replace(b'"fill_value": 0', b'"fill_value": 9')
        assert changed != data.to_bytes()
        put(session, "g/x/zarr.json", changed)

    repository.create_branch("side")
    written = commit(repository, in_array("g/x", 0, 2, 50), "write")
    session = repository.writable_session("side")
    other_fill(session)
    session.commit("another fill value")
    with pytest.raises(ConflictError, match="encoded otherwise"):
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
    repository.compact("main", "full")
    rewrite = repository.list_branches()["main"]
    with pytest.raises(InvalidArgumentError, match="nothing to undo"):
        repository.revert(rewrite)
    repository.create_branch("side", first)
    with pytest.raises(InvalidArgumentError, match="not in the history"):
        repository.revert(written, "side")
    with pytest.raises(SnapshotExpiredError, match="it never was, or has expired"):
        repository.cherry_pick(f"{1:012d}-{'0' * 24}-7")


def test_revert_and_cherry_pick_read_and_write_no_chunks() -> None:
    counting = CountingStorage(MemoryStorage())
    repository = zm.create(counting, {"inline-chunk-bytes": 0})
    commit(repository, lambda s: array(s, "a", np.arange(40, dtype="i4"), (2,)), "a")
    repository.create_branch("side")
    written = commit(repository, in_array("a", 0, 20, 5), "write")
    for call in (repository.revert, lambda snapshot: repository.cherry_pick(snapshot, "side")):
        counting.reset()
        call(written)
        assert not [r for r in counting.log if r.key.startswith("chunks/")]
        assert len(counting.log) <= 10


def test_a_revert_reads_the_leaves_of_the_chunks_it_is_about() -> None:
    counting = CountingStorage(MemoryStorage())
    manifests = {"sets": [{"default": {"max-manifest-size": 8}}], "rules": []}
    config = {"inline-chunk-bytes": 0, "chunk-manifests": manifests}
    repository = zm.create(counting, config)
    commit(repository, lambda s: array(s, "a", np.arange(128, dtype="i4"), (2,)), "a")
    repository.compact("main", "full")
    written = commit(repository, in_array("a", 20, 24, 5), "write")
    cold = zm.open(counting)
    counting.reset()
    cold.revert(written)
    leaves = [r.key for r in counting.log if r.op == "get" and r.key.startswith("manifests/")]
    assert len(leaves) == 1
    read = zarr.open_array(cold.readonly_session().store, path="a", mode="r")
    assert read[:].tolist() == list(range(128))


def test_amend_keeps_what_others_hold(repository: Repository) -> None:
    session = repository.writable_session()
    in_array("g/x", 0, 2, 50)(session)
    old = session.commit("write")
    repository.create_tag("before", old)
    late = repository.writable_session()
    in_array("g/x", 2, 4, 60)(late)
    session.amend("write, said better")
    assert [info.message for info in repository.ancestry()][:2] == ["write, said better", "fill"]
    assert [info.message for info in repository.ancestry("before")][:2] == ["write", "fill"]
    with pytest.raises(ConflictError, match="no longer in the branch's history"):
        late.commit("on top of what is no more")


def test_amends_that_are_refused(repository: Repository) -> None:
    session = repository.writable_session()
    with pytest.raises(InvalidArgumentError, match="nothing to amend"):
        session.amend()
    with pytest.raises(InvalidArgumentError, match="message"):
        session.amend(" ")
    in_array("g/x", 0, 2, 50)(session)
    commit(repository, in_array("g/x", 2, 4, 60), "first")
    head = repository.list_branches()["main"]
    with pytest.raises(ConflictError, match="not the head"):
        session.amend("late")
    assert repository.list_branches()["main"] == head
    assert session.status()
    session.commit("as a commit of its own")
    repository.compact("main", "full")
    with pytest.raises(InvalidArgumentError, match="a rewrite"):
        repository.writable_session().amend("no")
    with pytest.raises(InvalidArgumentError, match="the first"):
        zm.create(MemoryStorage()).writable_session().amend("no")
    with pytest.raises(ReadOnlyError):
        repository.readonly_session().amend("no")


def test_of_two_amends_one_lands(repository: Repository) -> None:
    one, two = repository.writable_session(), repository.writable_session()
    one.amend("one")
    with pytest.raises(ConflictError, match="not the head"):
        two.amend("two")
    assert next(repository.ancestry()).message == "one"


def test_amend_uploads_no_chunk_again() -> None:
    counting = CountingStorage(MemoryStorage())
    repository = zm.create(counting, {"inline-chunk-bytes": 0})
    session = repository.writable_session()
    array(session, "a", np.arange(40, dtype="i4"), (2,))
    session.commit("a")
    in_array("a", 0, 2, 7)(session)
    counting.reset()
    session.amend("a, right")
    used = [r for r in counting.log if r.key.startswith("chunks/") and r.op != "sync"]
    assert [(r.op, r.nbytes) for r in used] == [("create", 8)]  # the chunk that is new
    assert len(counting.log) <= 10


def test_chunks_that_are_still_staged_are_shifted_into_one_pack() -> None:
    counting = CountingStorage(MemoryStorage())
    repository = zm.create(counting, {"inline-chunk-bytes": 0})
    session = repository.writable_session()
    made = array(session, "a", np.arange(40, dtype="i4"), (2,))
    session.shift_array("a", (-3,))
    session.commit("a, shifted")
    created = [r for r in counting.log if r.key.startswith("chunks/") and r.op == "create"]
    assert [r.nbytes for r in created] == [20 * 8]  # none of them inline
    np.testing.assert_array_equal(made[:34], np.arange(6, 40))


# --- du, and what notebooks show -------------------------------------------------------------


def test_du_adds_up_by_array_and_by_kind(repository: Repository) -> None:
    session = repository.writable_session()
    big = zarr.open_array(session.store, path="g/inner/big")
    big[:4, :4] = 0  # a chunk that is all fill value is removed
    session.commit("remove a chunk")
    whole = repository.du()
    assert {array.path for array in whole.arrays} == {
        "/g/x",
        "/g/inner/big",
        "/g/notes.txt",
        "/other",
    }
    assert (whole["/g/x"].inline, whole["/g/x"].native) == (Amount(4, 32), Amount(0, 0))
    assert (whole["/g/inner/big"].native, whole["/g/inner/big"].fraction) == (Amount(3, 384), 0.75)
    assert (whole["/g/notes.txt"].total, whole["/g/notes.txt"].grid_shape) == (Amount(1, 13), None)
    assert (whole.total, whole.growth) == (Amount(10, 32 + 384 + 13 + 16), Amount(-1, -128))
    filled = repository.readonly_session("main~1")
    assert repository.du(filled.snapshot_id).nbytes == 32 + 512 + 13 + 16
    repository.create_tag("filled", filled.snapshot_id)
    assert repository.du("filled").chunks == 11


def test_du_reads_no_chunk_and_in_few_rounds() -> None:
    counting = CountingStorage(MemoryStorage())
    repository = zm.create(counting, {"inline-chunk-bytes": 0})

    def fill(session: Session) -> None:
        for i in range(20):
            array(session, f"a{i}", np.arange(40, dtype="i4"), (2,))

    commit(repository, fill, "arrays")
    repository.compact("main", "full")
    cold = zm.open(counting)
    session = cold.readonly_session()
    counting.reset()
    assert cold.du(session.snapshot_id).chunks == 20 * 20
    assert {record.key.partition("/")[0] for record in counting.log} == {"manifests", "snapshots"}
    assert len(counting.log) <= 3


def test_html_shows_what_tree_shows(repository: Repository) -> None:
    session = repository.writable_session()
    session.move("g", "moved")
    pages = [session._repr_html_(), session.store._repr_html_()]
    pages.append(repository._repr_html_().replace("├── g<", "├── moved<"))
    for page in pages:
        for line in ("├── moved", "│   ├── inner", "│   │   └── big", "│   └── x", "└── other"):
            assert line in page
        for cell in ("(8, 8)", "float64", "4 x 4", "(x: 8)"):
            assert cell in page
        assert page.count("<") == page.count(">")
    assert "&gt; /g to /moved" in pages[0]
    assert "branch main" in pages[2]
    empty = zm.create(MemoryStorage()).readonly_session()
    assert "(empty)" in empty._repr_html_()


def test_html_escapes_everything() -> None:
    evil = "<script>alert('&')</script>"
    repository = zm.create(MemoryStorage())
    with repository.transaction(message=evil) as store:
        group = zarr.create_group(store, path=f"a {evil.replace('/', '')}")
        group.create_array(
            evil.replace("/", ""),
            shape=(1,),
            dtype="f8",
            dimension_names=[evil],
            attributes={"units": evil},
        )
    repository.create_branch("plain")
    session = repository.readonly_session()
    for page in (repository._repr_html_(), session._repr_html_(), session.store._repr_html_()):
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        tags = set(re.findall(r"</?(\w+)", page))
        ours = {"style", "div", "details", "summary", "table", "thead", "tbody", "tr", "th", "td"}
        assert tags <= ours


def test_html_has_no_character_that_turns_text_around() -> None:
    repository = zm.create(MemoryStorage())
    with repository.transaction(message="\u202egnorw\x1b[31m") as store:
        zarr.create_group(store, path="a\u202eb")
    for page in (repository._repr_html_(), repository.readonly_session()._repr_html_()):
        assert "a\\u202eb" in page
        assert page.isprintable()


def test_a_fork_shows_itself_without_being_opened(repository: Repository) -> None:
    session = repository.writable_session()
    fork = session.fork()
    at = f"{repository.storage.url} at {session.snapshot_id}"
    assert repr(fork) == f"<Fork <ManifestStore {at}, writable>>"
    assert "at first use" in fork.store._repr_html_()


def test_html_of_very_much_is_short_and_of_what_is_gone_no_error(
    repository: Repository,
) -> None:
    session = repository.writable_session()
    for i in range(600):
        put(session, f"many/g{i}/zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
    page = session._repr_html_()
    assert page.count("<tr>") < 520
    assert "... and 106 more" in page
    assert "at first use" in session.fork().store._repr_html_()
    repository.storage.delete_many(["current"])
    assert "no repository" in repository._repr_html_()


# --- others at the same time -----------------------------------------------------------------


def test_amend_and_revert_land_when_only_other_refs_have_moved() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage)
    other = zm.open(storage)
    commit(repository, lambda s: array(s, "a", np.arange(4, dtype="i4"), (2,)), "a")
    session = repository.writable_session()
    other.create_tag("meanwhile")
    session.amend("amended")
    assert next(repository.ancestry()).message == "amended"
    assert next(other.ancestry("meanwhile")).message == "a"


def first(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Have something happen between the decision what to patch and the commit of that."""
    land = commits.commit

    def late(*args: Any) -> Any:
        monkeypatch.setattr(commits, "commit", land)
        happens()
        return land(*args)

    monkeypatch.setattr(commits, "commit", late)


def test_a_revert_is_put_on_top_of_what_lands_meanwhile(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = commit(repository, in_array("g/x", 0, 2, 50), "write")
    first(monkeypatch, lambda: commit(repository, in_array("g/x", 2, 4, 60), "meanwhile"))
    repository.revert(written)
    assert [info.message for info in repository.ancestry()][:3] == [
        "revert 'write'",
        "meanwhile",
        "write",
    ]
    read = zarr.open_array(repository.readonly_session().store, path="g/x", mode="r")
    assert read[:].tolist() == [0, 1, 60, 60, 4, 5, 6, 7]


@pytest.mark.parametrize("same_process", [True, False])
def test_a_commit_that_has_left_the_history_meanwhile_is_picked_all_the_same(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, same_process: bool
) -> None:
    repository.create_branch("side")
    session = repository.writable_session("side")
    in_array("g/x", 0, 2, 50)(session)
    written = session.commit("write")
    other = repository if same_process else zm.open(repository.storage)
    first(monkeypatch, lambda: other.delete_branch("side"))
    repository.cherry_pick(written)
    assert next(repository.ancestry()).message == "write"
    assert repository.verify().ok


@pytest.mark.parametrize("same_process", [True, False])
def test_a_revert_lands_although_the_snapshot_before_has_expired_meanwhile(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, same_process: bool
) -> None:
    written = commit(repository, in_array("g/x", 0, 2, 50), "write")
    commit(repository, in_array("g/x", 2, 4, 60), "write another")
    other = repository if same_process else zm.open(repository.storage)

    def expire() -> None:
        """Let the branch's history begin with the commit that is being reverted."""

        def change(root: Root) -> Root:
            cut = replace(root.branches["main"], floor=written)
            return replace(root, branches={**root.branches, "main": cut})

        change_root(other, "expire", change, written)

    first(monkeypatch, expire)
    repository.revert(written)
    told = [info.message for info in repository.ancestry()]
    assert told == ["revert 'write'", "write another", "write"]
    assert repository.verify().ok
    with pytest.raises(SnapshotExpiredError, match=r"before .* has expired"):
        repository.revert(written)


@pytest.mark.parametrize("kind", ["lose_answer", "fail_after"])
def test_an_amend_whose_answer_is_lost_has_landed(kind: FaultKind) -> None:
    storage = MemoryStorage()
    repository = zm.create(storage)
    commit(repository, lambda s: array(s, "a", np.arange(4, dtype="i4"), (2,)), "a")
    faulty = FaultyStorage(storage, [Fault(kind, op="cas")])
    snapshot_id = zm.open(faulty).writable_session().amend("amended")
    assert [info.message for info in repository.ancestry()] == ["amended", "create repository"]
    assert repository.list_branches()["main"] == snapshot_id


# --- xarray --------------------------------------------------------------------------------------


def test_xarray_opens_what_was_moved_at_every_ref() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage)
    ds = xr.Dataset({"t": ("x", np.arange(6.0))}, {"x": np.arange(6)})
    written = zm.write(ds, storage, message="write", group="air")
    repository.create_tag("v1", written)
    repository.create_branch("side", written)
    moved = commit(repository, lambda s: s.move("air", "moved"), "move")
    commit(repository, lambda s: s.move("moved/t", "moved/u"), "rename")
    engine = "zarr_manifests"
    for ref in ("v1", "side", written):
        with xr.open_dataset(storage, engine=engine, group="air", version=ref) as read:
            xr.testing.assert_identical(read.load(), ds)
        with xr.open_datatree(storage, engine=engine, version=ref) as tree:
            assert tree.groups == ("/", "/air")
            xr.testing.assert_identical(tree["air"].to_dataset().load(), ds)
    with xr.open_datatree(storage, engine=engine, version=moved) as tree:
        xr.testing.assert_identical(tree["moved"].to_dataset().load(), ds)
    with xr.open_datatree(storage, engine=engine) as tree:
        read = tree["moved"].to_dataset().load()
        xr.testing.assert_identical(read, ds.rename_vars(t="u"))


# --- what the history says -----------------------------------------------------------------------


def test_the_kind_of_a_commit_says_what_was_done(repository: Repository) -> None:
    kinds = {
        "metadata": lambda s: s.move("g/inner/big", "big"),
        "overwrite": lambda s: s.shift_array("big", (1, 0)),
        "delete": lambda s: s.shift_array("big", (9, 0)),
    }
    for kind, change in kinds.items():
        commit(repository, change, kind)
        assert next(repository.ancestry()).kind == kind
    commit(repository, lambda s: workspace_of(s.store).delete_below("other/"), "delete other")
    repository.revert(next(repository.ancestry()).snapshot_id)
    assert [info.kind for info in repository.ancestry()][:2] == ["append", "delete"]
