"""Incremental reads: records replay to the state, cost what changed, and are never in part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from hearing import Hearing
from inside import change_root
from zarr_manifests import Repository, Session
from zarr_manifests.error_cases import HistoryExpiredError
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError, NotFoundError
from zarr_manifests.format.root import Root
from zarr_manifests.planning.upkeep.change_records import node_path
from zarr_manifests.reports import Change, Operation
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage

type State = dict[str, set[tuple[int, ...]]]

MODES: list[Literal["log", "net"]] = ["log", "net"]


def put(session: Session, key: str, value: bytes = b"\x01") -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


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
    view = contents_of(repository.readonly_session(snapshot_id).store).view
    found: State = {}
    for node in view.nodes.values():
        table = view.chunks(node.node_id)
        coords = [] if table is None else table.coords().tolist()
        found[node_path(node)] = set(map(tuple, coords))
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


# --- what records say ----------------------------------------------------------------------------


def test_every_operation_is_told_as_what_it_is(repository: Repository) -> None:
    session = repository.writable_session("main")
    make(session, "a", (2, 2))
    put(session, "a/c/0/1")
    made = session.commit("make")
    zarr.open_array(session.store, path="a").resize((3, 2))
    put(session, "a/c/2/0")
    put(session, "a/c/0/0")
    grown = session.commit("grow")
    put(session, "notes.txt")
    session.store.delete_sync("a/c/0/1")
    unset = session.commit("unset")
    zarr.open_array(session.store, path="a").resize((1, 2))
    cut = session.commit("cut")
    session.move("a", "b")
    moved = session.commit("move")
    workspace_of(session.store).delete_below("b/")
    session.store.delete_sync("notes.txt")
    gone = session.commit("delete")
    found = {
        key: list(group) for key, group in groupby(repository.changes(), lambda c: c.snapshot_id)
    }
    told = {key: only(changes) for key, changes in found.items()}
    assert told[made] == [("/", "create", []), ("/a", "create", []), ("/a", "append", [[0, 1]])]
    assert told[grown] == [
        ("/a", "metadata", []),
        ("/a", "append", [[2, 0]]),
        ("/a", "overwrite", [[0, 0]]),
    ]
    assert told[unset][0] == ("/notes.txt", "create", [])
    assert sorted(told[unset][1:]) == [
        ("/a", "unset", [[0, 1]]),
        ("/notes.txt", "append", [[]]),
    ]
    assert told[cut] == [("/a", "metadata", []), ("/a", "truncate", [])]
    assert found[cut][1].grid_shape == (1, 2)
    assert told[moved] == [("/b", "move", [])]
    assert found[moved][0].moved_from == "/a"
    assert told[gone] == [("/b", "delete", []), ("/notes.txt", "delete", [])]
    assert all(c.coordinates.dtype == np.int64 for changes in found.values() for c in changes)
    assert {c.coordinates.shape[1] for c in found[made] if c.path == "/a"} == {2}


def test_the_net_change_has_nothing_that_came_and_went(repository: Repository) -> None:
    session = repository.writable_session("main")
    make(session, "a")
    put(session, "a/c/0")
    put(session, "a/c/1")
    start = session.commit("start")
    make(session, "doomed")
    put(session, "doomed/c/0")
    put(session, "a/c/5")
    put(session, "a/c/2")
    session.commit("make")
    workspace_of(session.store).delete_below("doomed/")
    session.store.delete_sync("a/c/5")
    session.store.delete_sync("a/c/0")
    session.commit("delete")
    put(session, "a/c/2", b"\x02")
    session.commit("overwrite")
    net = list(repository.changes(start, mode="net"))
    assert only(net) == [("/a", "unset", [[0]]), ("/a", "overwrite", [[2]])]
    assert {c.snapshot_id for c in net} == {None}
    zarr.open_array(session.store, path="a").resize((20,))
    put(session, "a/c/15")
    session.commit("grow")
    zarr.open_array(session.store, path="a").resize((8,))
    session.commit("shrink")
    assert only(repository.changes(start, mode="net")) == [*only(net)]


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
    first = list(repository.ancestry())[-1].snapshot_id
    everything = replay({}, repository.changes())
    assert everything == state_of(repository, repository.list_branches()["main"])
    assert len(list(repository.changes())) >= len(list(repository.changes(first)))
    with pytest.raises(NotFoundError, match=r"no branch .*, nor a tag or snapshot"):
        repository.changes("nothing")
    with pytest.raises(InvalidArgumentError, match="not an ancestor"):
        repository.changes("main", "then")
    with pytest.raises(InvalidArgumentError, match="no mode"):
        repository.changes("then", mode="all")  # type: ignore[arg-type]


def test_of_a_range_with_swapped_and_reborn_nodes(repository: Repository) -> None:
    session = repository.writable_session("main")
    for name, chunk in (("a", 1), ("b", 2), ("c", 3)):
        make(session, name)
        put(session, f"{name}/c/{chunk}")
    start = session.commit("start")
    session.move("a", "t")
    session.move("b", "a")
    session.move("t", "b")
    workspace_of(session.store).delete_below("c/")
    make(session, "c")
    put(session, "c/c/7")
    end = session.commit("swap, and make anew")
    for mode in MODES:
        changes = list(repository.changes(start, end, mode))
        assert replay(state_of(repository, start), changes) == state_of(repository, end)
        moves = {c.moved_from: c.path for c in changes if c.operation is Operation.MOVE}
        assert moves == {"/a": "/b", "/b": "/a"}
        of_c = [c.operation for c in changes if c.path == "/c"]
        assert of_c == [Operation.DELETE, Operation.CREATE, Operation.APPEND]
    back = repository.revert(end)
    assert [c.operation for c in repository.changes(start, back, "net") if c.path != "/c"] == []
    for mode in MODES:
        changes = list(repository.changes(start, back, mode))
        assert replay(state_of(repository, start), changes) == state_of(repository, back)


# --- against a model -----------------------------------------------------------------------------

_STEPS = st.one_of(
    st.tuples(st.just("set"), st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 1)),
    st.tuples(st.just("unset"), st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 1)),
    st.tuples(st.just("resize"), st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 2)),
    st.tuples(st.just("remake"), st.sampled_from("abc"), st.integers(0, 0), st.integers(0, 1)),
    st.tuples(st.just("move"), st.sampled_from("abc"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("shift"), st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 1)),
    st.tuples(st.just("key"), st.sampled_from("xy"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("fold"), st.just("a"), st.just(0), st.just(0)),
    st.tuples(st.just("revert"), st.just("a"), st.just(0), st.just(0)),
)


def do(session: Session, step: tuple[str, str, int, int]) -> None:
    what, name, i, j = step
    node = contents_of(session.store).node(name)
    if what == "key":
        if i:
            put(session, f"{name}.txt")
        else:
            session.store.delete_sync(f"{name}.txt")
    elif node is None:
        make(session, name, (6, 2))
    elif what == "remake":
        workspace_of(session.store).delete_below(f"{name}/")
        if j:
            make(session, name, (6, 2))
    elif what == "move":
        to = "abc"[i]
        if contents_of(session.store).node(to) is None:
            session.move(name, to)
    elif what == "shift":
        session.shift_array(name, (i, -j))
    elif what == "resize":
        zarr.open_array(session.store, path=name).resize((i, j))
    elif what == "set":
        put(session, f"{name}/c/{i}/{j}", bytes([i]))
    elif what == "unset":
        session.store.delete_sync(f"{name}/c/{i}/{j}")


@settings(max_examples=examples(120))
@given(
    st.lists(st.lists(_STEPS, min_size=1, max_size=5), min_size=1, max_size=8),
    st.data(),
)
def test_records_replayed_over_the_start_give_the_end(
    commits: list[list[tuple[str, str, int, int]]], data: st.DataObject
) -> None:
    repository = zm.create(MemoryStorage())
    session = repository.writable_session("main")
    make(session, "a", (6, 2))
    for i in range(6):
        put(session, f"a/c/{i}/0")
    history = [session.commit("start")]
    for steps in commits:
        session = repository.writable_session("main")
        for step in steps:
            if step[0] not in ("fold", "revert"):
                do(session, step)
        if session.status():
            history.append(session.commit("some"))
        if any(step[0] == "fold" for step in steps):
            repository.compact("main", data.draw(st.sampled_from(["minor", "major", "full"])))
        if any(step[0] == "revert" for step in steps) and len(history) > 1:
            try:
                history.append(repository.revert(history[-1]))
            except InvalidArgumentError:  # what was set is what was there
                continue
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


# --- what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_cost_follows_the_change_and_no_base_manifest_is_read(mode: Literal["log", "net"]) -> None:
    costs = []
    for rows in (2_000, 40_000):
        storage = MemoryStorage()
        repository = zm.create(storage, {"compaction": {"max-delta-count": 7}})
        session = repository.writable_session("main")
        make(session, "big", (rows,))
        for i in range(rows):
            put(session, f"big/c/{i}", b"12345678")
        session.commit("base")
        repository.compact("main", "full")
        base = {info.key for info in storage.list("manifests/")}
        assert base
        start = repository.list_branches()["main"]
        session = repository.writable_session("main")
        for i in range(30):
            put(session, f"big/c/{i}", b"87654321")
            session.commit(f"chunk {i}")
        kinds = [info.kind for info in repository.ancestry()]
        commits = kinds[:-1].index("metadata") if "metadata" in kinds[:-1] else len(kinds)
        counting = CountingStorage(storage)
        reader = zm.open(counting)
        counting.reset()
        found = list(reader.changes(start, mode=mode))
        assert {tuple(x) for c in found for x in c.coordinates.tolist()} == {
            (i,) for i in range(30)
        }
        read = {record.key for record in counting.log}
        assert not any(key.startswith("manifests/") for key in read)
        assert counting.requests <= 2 * commits + 5
        costs.append((counting.requests, counting.bytes_read))
    assert costs[0][0] == costs[1][0]
    # Over a larger base more deltas are pending, and snapshots name them.
    assert costs[1][1] <= 1.25 * costs[0][1]


def test_a_lookup_of_what_was_unset_reads_only_the_leaf_that_may_have_it() -> None:
    storage = MemoryStorage()
    manifests = {"sets": [{"default": {"max-manifest-size": 6_000}}], "rules": []}
    repository = zm.create(storage, {"chunk-manifests": manifests})
    session = repository.writable_session("main")
    make(session, "a", (12_000,))
    for i in range(12_000):
        put(session, f"a/c/{i}", b"12345678")
    session.commit("base")
    repository.compact("main", "full")
    start = repository.list_branches()["main"]
    view = contents_of(repository.readonly_session().store).view
    assert len(view.manifests) == 2
    session = repository.writable_session("main")
    session.store.delete_sync("a/c/7")
    session.commit("unset")
    counting = CountingStorage(storage)
    reader = zm.open(counting)
    assert only(reader.changes(start, mode="net")) == [("/a", "unset", [[7]])]
    manifests = [r.key for r in counting.log if r.key.startswith("manifests/")]
    assert len(manifests) == 1


def test_the_net_change_of_many_commits(repository: Repository) -> None:
    session = repository.writable_session("main")
    make(session, "a", (40,))
    for i in range(40):
        put(session, f"a/c/{i}")
    start = session.commit("full")
    for size in (3, 40):
        zarr.open_array(session.store, path="a").resize((size,))
        session.commit("cut off, and grown again")
    for i in range(5, 25):
        put(session, f"a/c/{i}")
        end = session.commit("a chunk")
    net = list(repository.changes(start, mode="net"))
    assert only(net) == [
        ("/a", "truncate", []),
        ("/a", "overwrite", [[i] for i in range(5, 25)]),
    ]
    assert replay(state_of(repository, start), net) == state_of(repository, end)


@pytest.mark.slow
def test_records_are_made_commit_by_commit(repository: Repository) -> None:
    """A commit's tables, in manifests of their own, are fetched when its turn comes."""
    session = repository.writable_session("main")
    make(session, "a", (40_000,))
    start = session.commit("array")
    rng = np.random.default_rng(1)
    for _ in range(3):
        for i in rng.permutation(40_000)[:9_000].tolist():
            put(session, f"a/c/{i}", rng.bytes(8))
        session.commit("many")
    counting = CountingStorage(repository.storage)
    reader = zm.open(counting)
    heard = Hearing()
    changes = reader.changes(start, progress=heard)
    assert heard.told == [("following the history", done) for done in range(4)]
    assert heard.totals == {"following the history": 3}

    def read() -> int:
        return len({r.key for r in counting.log if r.op == "get" and "manifests/" in r.key})

    seen = [read()]
    for _ in range(3):
        assert len(next(changes).coordinates) == 9_000
        seen.append(read())
    assert seen == [0, 1, 2, 3]


# --- what is gone is an error, before the first record -------------------------------------------


def expired(storage: MemoryStorage, *arguments: Any) -> str:
    for mode in MODES:
        with pytest.raises(HistoryExpiredError) as caught:
            zm.open(storage).changes(*arguments, mode)
    return str(caught.value)


def told(repository: Repository, start: str) -> list[str | None]:
    """The snapshots whose commits are told of, up to the head."""
    return list(dict.fromkeys(change.snapshot_id for change in repository.changes(start)))


@pytest.fixture
def long() -> tuple[MemoryStorage, list[str]]:
    """Commits each of which has a manifest of its own and a log too long for a copy of it."""
    storage = MemoryStorage()
    repository = zm.create(storage)
    session = repository.writable_session("main")
    make(session, "a", (30_000,))
    ids = [session.commit("array")]
    rng = np.random.default_rng(1)
    for _ in range(4):
        for i in rng.permutation(30_000)[:2_000].tolist():
            put(session, f"a/c/{i}", rng.bytes(40))
        zarr.open_array(session.store, path="a").attrs["noise"] = rng.bytes(12_000).hex()
        ids.append(session.commit("many"))
        repository.compact("main", "full")
        session = repository.writable_session("main")
    return storage, ids


@pytest.mark.parametrize("kind", ["snapshots", "deltas", "manifests"])
def test_an_expired_range_is_an_error_before_the_first_record(
    kind: str, long: tuple[MemoryStorage, list[str]]
) -> None:
    storage, ids = long
    repository = zm.open(storage)
    assert told(repository, ids[0]) == ids[1:]
    third = contents_of(repository.readonly_session(ids[2]).store).view
    key = {
        "snapshots": third.ref.key,
        "deltas": third.snapshot.log.key,
        "manifests": third.snapshot.deltas[-1].manifests[0].blob.key,
    }[kind]
    storage.delete_many([key])
    assert key in expired(storage, ids[0], None)
    assert key in expired(storage, ids[1], ids[3])
    assert key in expired(storage, None, ids[4])
    newer = zm.open(storage)
    if kind == "manifests":  # opening the snapshot needs the others
        assert told(newer, ids[2]) == ids[3:]
    assert told(newer, ids[3]) == ids[4:]


def test_an_expired_start_or_end_is_an_error(long: tuple[MemoryStorage, list[str]]) -> None:
    storage, ids = long
    repository = zm.open(storage)
    views = [contents_of(repository.readonly_session(i).store).view for i in ids]
    storage.delete_many([views[1].ref.key])
    assert ids[1] in expired(storage, ids[1], None)
    assert ids[1] in expired(storage, None, ids[1])


def test_what_is_beyond_a_branch_s_floor_has_expired(
    long: tuple[MemoryStorage, list[str]],
) -> None:
    storage, ids = long
    repository = zm.open(storage)

    def raised(root: Root) -> Root:
        tip = replace(root.branches["main"], floor=ids[2])
        return replace(root, branches={**root.branches, "main": tip})

    change_root(repository, "expire", raised)
    assert ids[2] in expired(storage, ids[1], None)
    assert ids[2] in expired(storage, None, "main")
    assert told(zm.open(storage), ids[2]) == ids[3:]


def test_what_is_damaged_is_no_expiry(long: tuple[MemoryStorage, list[str]]) -> None:
    storage, ids = long
    repository = zm.open(storage)
    log = contents_of(repository.readonly_session(ids[2]).store).view.snapshot.log
    storage.put(log.key, storage.get(log.key)[:-1] + b"!")
    with pytest.raises(CorruptObjectError, match="checksum"):
        zm.open(storage).changes(ids[0])
