"""What can be put on top of what, through real sessions: the whole table, and what goes with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from storages import CountingStorage
from stored import contents, get, overtaking, put
from zarr_manifests import Fork, Repository, Session
from zarr_manifests.errors import (
    Conflict,
    ConflictError,
    ConflictKind,
    CorruptObjectError,
    InvalidArgumentError,
)
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of

GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {"made": true}}'


# --- what can be done ------------------------------------------------------------------------

type Action = Callable[[Session], None]


def writes(key: str, value: bytes) -> Action:
    return lambda session: put(session, key, value)


def removes(key: str) -> Action:
    return lambda session: session.store.delete_sync(key)


def clears(path: str) -> Action:
    return lambda session: workspace_of(session.store).delete_below(path + "/")


def edits(path: str, attributes: dict[str, Any] | None = None, **fields: Any) -> Action:
    """Have other fields in a document, if it is there; it is not read through the store."""

    def edit(session: Session) -> None:
        node = contents_of(session.store).node(path)
        if node is not None:
            document = json.loads(node.documents["zarr.json"])
            changed = {**document["attributes"], **(attributes or {})}
            kept = {key: value for key, value in changed.items() if value is not None}
            document |= {"attributes": kept, **fields}
            put(session, f"{path}/zarr.json", json.dumps(document).encode())

    return edit


def has(path: str, **attributes: Any) -> Action:
    return edits(path, attributes)


def remakes(path: str) -> Action:
    """Delete a node with all below it, and make it again with the documents that it had."""

    def remake(session: Session) -> None:
        node = contents_of(session.store).node(path)
        if node is not None:
            clears(path)(session)
            put(session, f"{path}/zarr.json", node.documents["zarr.json"])

    return remake


def array(session: Session, path: str, value: int) -> None:
    made = zarr.create_array(session.store, name=path, shape=(2,), chunks=(1,), dtype="u1")
    made[:] = value


ACTIONS: dict[str, Action] = {
    "write 00": writes("a/c/0/0", b"mine"),
    "write 00 the same": writes("a/c/0/0", b"mine"),
    "write 00 other": writes("a/c/0/0", b"other"),
    "write 01": writes("a/c/0/1", b"01"),
    "write 20": writes("a/c/2/0", b"20"),
    "unset 00": removes("a/c/0/0"),
    "write notes": writes("notes.txt", b"mine"),
    "write notes other": writes("notes.txt", b"other"),
    "remove notes": removes("notes.txt"),
    "grow rows to 8": edits("a", shape=[8, 4]),
    "grow rows to 10": edits("a", shape=[10, 4]),
    "grow x": edits("g/x", shape=[6]),
    "grow columns": edits("a", shape=[6, 8]),
    "append 30": lambda s: (edits("a", shape=[8, 4])(s), put(s, "a/c/3/0", b"30"))[1],
    "append 40": lambda s: (edits("a", shape=[10, 4])(s), put(s, "a/c/4/0", b"40"))[1],
    "append 30 other": lambda s: (edits("a", shape=[8, 4])(s), put(s, "a/c/3/0", b"x"))[1],
    "shrink rows to 4": edits("a", shape=[4, 4]),
    "shrink rows to 2": edits("a", shape=[2, 4]),
    "shrink in the chunk": edits("a", shape=[5, 4]),
    "title one": has("a", title="one"),
    "title two": has("a", title="two"),
    "note": has("a", note="n"),
    "group title one": has("g", title="one"),
    "group note": has("g", note="n"),
    "units": has("a", units="K"),
    "units other": has("a", units="degC"),
    "fill value": edits("a", fill_value=9),
    "make n": writes("n/zarr.json", GROUP),
    "make n other": writes("n/zarr.json", GROUP.replace(b"true", b"false")),
    "make m": writes("m/zarr.json", GROUP),
    "make array n": lambda s: array(s, "n", 1),
    "make n/deep": writes("n/deep/zarr.json", GROUP),
    "make g/new": writes("g/new/zarr.json", GROUP),
    "make g/new/deep": writes("g/new/deep/zarr.json", GROUP),
    "make g/x/deep": writes("g/x/deep/zarr.json", GROUP),
    "make a/c/3/0": writes("a/c/3/0", b"opaque"),
    "make n/zarr.json opaque": writes("n/zarr.json", b"{}"),
    "delete a": clears("a"),
    "delete g": clears("g"),
    "delete g/x": clears("g/x"),
    "delete g/y": clears("g/y"),
    "remake a": remakes("a"),
    "remake g": remakes("g"),
    "move a": lambda s: s.move("a", "moved"),
    "move a elsewhere": lambda s: s.move("a", "moved2"),
    "move g": lambda s: s.move("g", "h"),
    "move g/x to n": lambda s: s.move("g/x", "n"),
    "shift a": lambda s: s.shift_array("a", (1, 0)),
}

C, G, S = "chunks", "growth", "shrink"
A, X, N, D = "attributes", "structure", "create", "delete"
REBASE, CONFLICT, POLICY = "rebase", "conflict", "policy"

# My component and theirs, what each side does, what becomes of mine, and of theirs were it second.
TABLE: list[tuple[str, str, str, str, str, str]] = [
    # chunk write or unset
    (C, C, "write 00", "write 01", REBASE, REBASE),
    (C, C, "write 00", "write 00 the same", REBASE, REBASE),
    (C, C, "write 00", "write 00 other", POLICY, POLICY),
    (C, C, "write 00", "unset 00", POLICY, POLICY),
    (C, C, "write notes", "write notes other", POLICY, POLICY),
    (C, G, "write 00", "grow rows to 8", REBASE, REBASE),
    (C, S, "write 00", "shrink rows to 4", REBASE, REBASE),
    (C, S, "write 20", "shrink rows to 4", CONFLICT, CONFLICT),
    (C, S, "write 20", "shrink in the chunk", REBASE, REBASE),
    (C, S, "write 00", "shift a", CONFLICT, CONFLICT),
    (C, A, "write 00", "title one", REBASE, REBASE),
    (C, X, "write 00", "units", CONFLICT, CONFLICT),
    (C, X, "write 00", "fill value", CONFLICT, CONFLICT),
    (C, D, "write 00", "delete a", CONFLICT, POLICY),
    (C, D, "write 00", "move a", CONFLICT, POLICY),
    # growth
    (G, G, "grow rows to 8", "grow rows to 10", REBASE, REBASE),
    (G, G, "grow rows to 8", "grow columns", CONFLICT, CONFLICT),
    (G, G, "append 30", "append 40", REBASE, REBASE),
    (G, S, "grow rows to 8", "shrink rows to 4", CONFLICT, CONFLICT),
    (G, A, "grow rows to 8", "title one", REBASE, REBASE),
    (G, X, "grow rows to 8", "units", CONFLICT, CONFLICT),
    (G, D, "grow rows to 8", "delete a", CONFLICT, CONFLICT),
    # shrink
    (S, S, "shrink rows to 4", "shrink rows to 4", REBASE, REBASE),
    (S, S, "shrink rows to 4", "shrink rows to 2", CONFLICT, CONFLICT),
    (S, A, "shrink rows to 4", "title one", REBASE, REBASE),
    (S, X, "shrink rows to 4", "fill value", CONFLICT, CONFLICT),
    (S, D, "shrink rows to 4", "delete a", CONFLICT, CONFLICT),
    # attributes
    (A, A, "title one", "note", REBASE, REBASE),
    (A, A, "title one", "title one", REBASE, REBASE),
    (A, A, "title one", "title two", POLICY, POLICY),
    (A, A, "group title one", "group note", REBASE, REBASE),
    (A, X, "title one", "units", CONFLICT, CONFLICT),
    (A, D, "title one", "delete a", CONFLICT, POLICY),
    # structure
    (X, X, "units", "units other", CONFLICT, CONFLICT),
    (X, X, "fill value", "fill value", CONFLICT, CONFLICT),
    (X, D, "fill value", "delete a", CONFLICT, CONFLICT),
    # create
    (N, N, "make n", "make m", REBASE, REBASE),
    (N, N, "make n", "make n", REBASE, REBASE),
    (N, N, "make n", "make n other", CONFLICT, CONFLICT),
    (N, N, "make array n", "make array n", CONFLICT, CONFLICT),
    (N, N, "make array n", "make n/deep", CONFLICT, CONFLICT),
    (N, N, "make n", "move g/x to n", CONFLICT, CONFLICT),
    (N, D, "make g/new", "delete g", CONFLICT, CONFLICT),
    (N, D, "make g/new/deep", "delete g", CONFLICT, CONFLICT),
    (N, D, "make g/new", "move g", CONFLICT, CONFLICT),
    (N, D, "make g/new", "delete g/x", REBASE, REBASE),
    # delete or move
    (D, D, "delete a", "delete a", REBASE, REBASE),
    (D, D, "delete g/x", "delete g/y", REBASE, REBASE),
    (D, D, "delete g", "delete g/x", CONFLICT, CONFLICT),
    (D, D, "move a", "move a", REBASE, REBASE),
    (D, D, "move a", "move a elsewhere", CONFLICT, CONFLICT),
    (D, D, "move g", "delete g/x", CONFLICT, CONFLICT),
]
ROWS = [(a, b, mine, theirs, how) for a, b, mine, theirs, how, _ in TABLE] + [
    (b, a, theirs, mine, how) for a, b, mine, theirs, _, how in TABLE
]


def base(storage: MemoryStorage | None = None, **config: Any) -> Repository:
    repository = zm.create(storage or MemoryStorage(), config or None)
    session = repository.writable_session()
    root = zarr.create_group(session.store)
    a = root.create_array(
        "a", shape=(6, 4), chunks=(2, 2), dtype="u1", attributes={"title": "t", "x": 1.5}
    )
    a[:] = np.arange(24).reshape(6, 4)
    group = root.create_group("g", attributes={"title": "t"})
    for name in ("x", "y"):
        group.create_array(name, shape=(4,), chunks=(2,), dtype="u1")[:] = 1
    put(session, "notes.txt", b"0")
    session.commit("base")
    return repository


def both(repository: Repository, mine: Action, theirs: Action, **options: Any) -> dict[str, bytes]:
    """What is there when `mine` was committed on top of `theirs`, both of the same snapshot."""
    first, second = repository.writable_session(), repository.writable_session()
    theirs(first)
    mine(second)
    first.commit("theirs")
    second.commit("mine", **options)
    found = contents(zm.open(repository.storage))
    read = contents_of(second.store)
    assert {key: get(second, key) for key in read.keys_below("")} == found
    return found


def name_of(row: tuple[Any, ...]) -> str:
    return f"{row[2]} on {row[3]}"


def merged(mine: str, theirs: str) -> tuple[str, dict[str, bytes]]:
    """The same as a merge of a branch that has mine into one that has theirs; and what is there.

    It also repeats my commit there by `cherry_pick`: if that lands, what is there is the same.
    """
    repository = base()
    repository.create_branch("mine")
    repository.create_branch("picked")
    for branch, done in (("main", theirs), ("picked", theirs), ("mine", mine)):
        session = repository.writable_session(branch)
        ACTIONS[done](session)
        session.commit(done)
    planned = repository.merge("mine", dry_run=True)
    if planned.conflicts:
        with pytest.raises(ConflictError) as refused:
            repository.merge("mine")
        assert refused.value.conflicts == planned.conflicts
        try:
            repository.merge("mine", policy="theirs")
        except ConflictError:
            return CONFLICT, {}
        return POLICY, contents(repository)
    repository.merge("mine")
    found = contents(repository)
    with suppress(ConflictError, InvalidArgumentError):
        repository.cherry_pick("mine", "picked")
        repository.reset_branch("main", "picked", force=True)
        assert contents(repository) == found
    return REBASE, found


def outcome(mine: str, theirs: str) -> tuple[str, Any]:
    """What becomes of mine on top of theirs, and what is there then, or the conflicts."""
    try:
        return REBASE, both(base(), ACTIONS[mine], ACTIONS[theirs])
    except ConflictError as error:
        conflicts = {(each.component, each.kind) for each in error.conflicts}
    decided = []
    for policy in ("ours", "theirs"):
        with suppress(ConflictError):
            decided.append(both(base(), ACTIONS[mine], ACTIONS[theirs], rebase=policy))
    return POLICY if decided else CONFLICT, conflicts


@pytest.mark.parametrize("row", TABLE, ids=name_of)
def test_the_table(row: tuple[str, str, str, str, str, str]) -> None:
    """And where both orders can be rebased, they have the same result."""
    mine, theirs, do, done, *expected = row
    found = [outcome(do, done), outcome(done, do)]
    assert [how for how, _ in found] == expected
    if expected == [REBASE, REBASE]:
        assert found[0] == found[1]
    for component, (how, conflicts) in zip((mine, theirs), found, strict=True):
        assert how == REBASE or (component, kind_of(mine, theirs)) in conflicts


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_merge_and_a_pick_do_what_a_rebase_does(row: tuple[Any, ...]) -> None:
    _, _, mine, theirs, expected = row
    found, there = merged(mine, theirs)
    # Chunks that were moved are other chunks in the end, where a merge compares them.
    assert found == (POLICY if "shift a" in (mine, theirs) else expected)
    if expected != CONFLICT:
        policy = "fail" if expected == REBASE else "ours"
        assert there == both(base(), ACTIONS[mine], ACTIONS[theirs], rebase=policy)


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from([row for row in ROWS if row[4] == REBASE]))
def test_a_rebased_session_reads_and_commits_as_a_rebased_commit(row: tuple[Any, ...]) -> None:
    mine, theirs = ACTIONS[row[2]], ACTIONS[row[3]]
    repository = base()
    session, other = repository.writable_session(), repository.writable_session()
    mine(session)
    theirs(other)
    other.commit("theirs")
    assert session.rebase() == other.snapshot_id == session.snapshot_id
    expected = both(base(), mine, theirs)
    keys = contents_of(session.store).keys_below("")
    assert {key: get(session, key) for key in keys} == expected
    if session.status():
        session.commit("mine", rebase=False)
    assert contents(repository) == expected


@pytest.mark.parametrize(
    ("key", "value", "decodes"),
    [
        ("scale_factor", 0.5, True),
        ("_FillValue", -1, True),
        ("_Unsigned", "true", True),
        ("units", "days since 2000-01-01", True),
        ("valid_min", 0, False),
        ("coordinates", "lat lon", False),
    ],
)
def test_attributes_that_change_what_chunks_mean_conflict_with_chunks(
    key: str, value: Any, decodes: bool
) -> None:
    repository = base()
    writer, editor = repository.writable_session(), repository.writable_session()
    zarr.open_array(writer.store, path="g/x")[:] = 5
    zarr.open_array(editor.store, path="g/x").attrs[key] = value
    editor.commit("what the chunks mean")
    if not decodes:
        writer.commit("chunks")
        return
    with pytest.raises(ConflictError) as caught:
        writer.commit("chunks")
    assert [conflict.component for conflict in caught.value.conflicts] == ["chunks"]


def kind_of(mine: str, theirs: str) -> ConflictKind:
    """What a conflict of these components is called, as docs/guide/conflicts.md says."""
    pair = {mine, theirs}
    if D in pair:
        return ConflictKind.DELETE
    if X in pair:
        return ConflictKind.STRUCTURE
    if pair & {G, S}:
        return ConflictKind.SHAPE
    alone = {C: ConflictKind.CHUNK, A: ConflictKind.ATTRIBUTE, N: ConflictKind.CREATE}
    return alone[mine]


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.sampled_from(sorted(ACTIONS)), min_size=1, max_size=3),
    st.lists(st.sampled_from(sorted(ACTIONS)), min_size=1, max_size=3),
)
@example(["make n/zarr.json opaque"], ["move g/x to n"])
def test_orders_agree(one: list[str], two: list[str]) -> None:
    """Both or neither can be put on top of the other, and if so the result is the same."""

    def run(actions: list[str]) -> Action:
        def act(session: Session) -> None:
            for action in actions:
                try:
                    ACTIONS[action](session)
                except (KeyError, FileExistsError, ValueError):
                    continue  # what it would change is gone already

        return act

    results: list[dict[str, bytes] | None] = []
    for mine, theirs in ((run(one), run(two)), (run(two), run(one))):
        try:
            results.append(both(base(), mine, theirs))
        except (ConflictError, InvalidArgumentError) as error:  # or there is nothing to commit
            results.append({} if str(error).startswith("nothing") else None)
    if {} not in results:
        assert results[0] == results[1]


def in_turn(repository: Repository, *actions: Action) -> None:
    session = repository.writable_session()
    for action in actions:
        action(session)
        session.commit("theirs")


# --- policies --------------------------------------------------------------------------------


def attributes(found: dict[str, bytes], path: str = "a") -> dict[str, Any]:
    document = found[f"{path}/zarr.json"]
    assert document is not None
    fields = json.loads(document)["attributes"]
    assert isinstance(fields, dict)
    return fields


def test_a_function_is_asked_for_each_conflict() -> None:
    asked: list[Conflict] = []

    def decide(conflict: Conflict) -> Any:
        asked.append(conflict)
        return "ours" if "'title'" in conflict.reason else "theirs"

    found = both(
        base(), has("a", title="1", x=1, only=1), has("a", title="2", x=2, new=2), rebase=decide
    )
    assert attributes(found) == {"title": "1", "x": 2, "only": 1, "new": 2}
    assert [(c.path, c.component) for c in asked] == [("/a", "attributes")] * 2


def test_policies_decide_whether_what_was_written_to_is_deleted() -> None:
    before = contents(base())
    for theirs, key in (("write 00", "a/c/0/0"), ("title one", "a/zarr.json")):
        found = both(base(), ACTIONS["delete a"], ACTIONS[theirs], rebase="ours")
        assert not [key for key in found if key.startswith("a/")]
        found = both(base(), ACTIONS["delete a"], ACTIONS[theirs], rebase="theirs")
        assert found.keys() == before.keys()
        assert found[key] != before[key]


def test_a_move_over_a_write_takes_it_along_or_fails() -> None:
    found = both(base(), ACTIONS["move a"], ACTIONS["write 00"], rebase="ours")
    assert found["moved/c/0/0"] == b"mine"
    assert "a/zarr.json" not in found
    found = both(base(), ACTIONS["move a"], ACTIONS["title one"], rebase="ours")
    assert attributes(found, "moved")["title"] == "one"
    with pytest.raises(ConflictError):
        both(base(), ACTIONS["move a"], ACTIONS["write 00"], rebase="theirs")


def test_a_commit_may_be_told_to_stay_where_it_is() -> None:
    repository = base()
    one, two = repository.writable_session(), repository.writable_session()
    put(one, "a/c/0/0", b"1")
    put(two, "a/c/0/1", b"2")
    one.commit("one")
    with pytest.raises(ConflictError, match=r"session\.rebase\(\)") as refused:
        two.commit("two", rebase=False)
    assert (refused.value.base, refused.value.head) == (two.snapshot_id, one.snapshot_id)
    two.rebase()
    two.commit("two", rebase=False)
    found = contents(repository)
    assert (found["a/c/0/0"], found["a/c/0/1"]) == (b"1", b"2")


def test_a_session_that_cannot_be_rebased_is_as_it_was() -> None:
    repository = base()
    session, other = repository.writable_session(), repository.writable_session()
    put(session, "a/c/0/0", b"1" * 1000)
    put(session, "a/c/0/1", b"2" * 1000)
    ACTIONS["write 00 other"](other)
    other.commit("theirs")
    before = session.snapshot_id
    with pytest.raises(ConflictError) as caught:
        session.rebase()
    (conflict,) = caught.value.conflicts
    assert (conflict.path, conflict.component, conflict.chunks) == ("/a", "chunks", ((0, 0),))
    assert session.snapshot_id == before
    assert get(session, "a/c/0/0") == b"1" * 1000
    session.rebase("theirs")
    assert (get(session, "a/c/0/0"), get(session, "a/c/0/1")) == (b"other", b"2" * 1000)
    session.commit("what is left")
    assert contents(repository)["a/c/0/1"] == b"2" * 1000


def increment(session: Session | Fork) -> None:
    value = get(session, "a/c/0/0")
    assert value is not None
    put(session, "a/c/0/0", bytes([value[0] + 1]))


def test_the_same_bytes_conflict_where_they_depend_on_a_read() -> None:
    """Two that both add one to what they have read must not become one."""
    repository = base()
    with repository.transaction(message="a number") as store:
        put(store, "a/c/0/0", b"\x05")
    with pytest.raises(ConflictError, match=r"\(0, 0\)"):
        both(repository, increment, increment)


@pytest.mark.parametrize(
    ("read", "theirs", "clash"),
    [
        ("a/c/0/0", "write 00", True),
        ("a/c/0/0", "write 01", False),
        ("a/c/2/0", "shrink rows to 4", True),
        ("a/zarr.json", "title one", True),
        ("n/zarr.json", "make n", True),
        ("notes.txt", "write notes", True),
    ],
)
def test_serializable_sessions_conflict_with_what_they_read(
    read: str, theirs: str, clash: bool
) -> None:
    repository = base()
    snapshot = repository.writable_session()
    serializable = repository.writable_session(isolation="serializable")
    for session, key in ((snapshot, "g/x/c/0"), (serializable, "g/y/c/0")):
        get(session, read)
        put(session, key, b"depends on it")
    in_turn(repository, ACTIONS[theirs])
    snapshot.commit("mine")
    if not clash:
        serializable.commit("mine")
        return
    with pytest.raises(ConflictError, match=": read"):
        serializable.commit("mine", rebase="ours")


def test_reads_of_forks_count() -> None:
    repository = base()
    with repository.transaction(message="a number") as store:
        put(store, "a/c/0/0", b"\x05")

    def through_a_fork(session: Session) -> None:
        fork = session.fork()
        increment(fork)
        session.merge(fork)

    with pytest.raises(ConflictError, match=r"\(0, 0\)"):
        both(repository, through_a_fork, increment)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("make a/c/3/0", "grow rows to 8"),
        ("make n/zarr.json opaque", "make n"),
        ("make g/x/deep", "grow x"),
    ],
)
def test_a_key_that_others_make_a_nodes_own_is_a_conflict(one: str, two: str) -> None:
    for mine, theirs in ((one, two), (two, one)):
        with pytest.raises(ConflictError, match=r"belongs to a node|below an array"):
            both(base(), ACTIONS[mine], ACTIONS[theirs])


def test_nothing_that_was_uploaded_is_uploaded_again() -> None:
    """Somebody comes first after the uploads; growth and chunks are merged, and rows dropped."""
    storage = MemoryStorage()
    base(storage)
    counting = CountingStorage(storage)

    def comes_first(name: str) -> Callable[[], None]:
        return lambda: in_turn(zm.open(storage), ACTIONS[name])

    runtime = overtaking(*map(comes_first, ("write 01", "title one", "append 40")))
    session = zm.open(counting, runtime=runtime).writable_session()
    edits("a", shape=[8, 4], attributes={"note": "n"})(session)
    put(session, "a/c/3/0", b"x" * 5000)
    put(session, "a/c/0/1", b"y")
    counting.reset()
    session.commit("mine", rebase="theirs")
    made = [record.key for record in counting.log if record.op == "create"]
    assert len(made) == len(set(made))
    assert sum(key.startswith("chunks/") for key in made) == 1
    found = contents(zm.open(storage))
    assert (found["a/c/3/0"], found["a/c/4/0"], found["a/c/0/1"]) == (b"x" * 5000, b"40", b"01")
    assert attributes(found) == {"title": "one", "x": 1.5, "note": "n"}


def test_attempts_are_counted() -> None:
    storage = MemoryStorage()
    base(storage)
    numbers = iter(range(9))

    def come_first() -> None:
        with zm.open(storage).transaction(message="other") as store:
            put(store, "a/c/1/1", bytes([next(numbers)]))

    runtime = overtaking(*[come_first] * 9)
    session = zm.open(storage, {"commits": {"attempts": 3}}, runtime=runtime).writable_session()
    put(session, "a/c/0/0", b"1")
    with pytest.raises(ConflictError, match="came first 3 times"):
        session.commit("mine")
    assert next(numbers) == 3


def test_a_base_that_is_no_ancestor_of_the_tip_is_a_conflict() -> None:
    repository = base()
    start = repository.list_branches()["main"]
    other = repository.writable_session()
    put(other, "a/c/0/1", b"1")
    other.commit("other")
    session = repository.writable_session()
    put(session, "a/c/0/0", b"1")
    repository.reset_branch("main", start, force=True)
    for go_on in (lambda: session.rebase("ours"), lambda: session.commit("mine", rebase="ours")):
        with pytest.raises(ConflictError, match="was the branch reset"):
            go_on()
    assert contents(repository)["a/c/0/1"] != b"1"


@pytest.mark.parametrize("kind", ["deltas", "manifests", "snapshots"])
def test_a_missing_log_fails_closed(kind: str) -> None:
    """The tip can be read without it; only whether the two conflict is not known."""
    storage = MemoryStorage()
    base(storage)
    session = zm.open(storage).writable_session()
    put(session, "a/c/0/0", b"1")
    before = {info.key for info in storage.list()}
    other = zm.open(storage).writable_session()
    rng = np.random.default_rng(0)
    text = rng.bytes(30_000).hex()  # more than a snapshot carries a copy of
    edits("a", {"text": text}, shape=[600, 4])(other)
    for i in range(10, 200):
        put(other, f"a/c/{i}/0", rng.bytes(200))
    other.commit("other")
    lost = {info.key for info in storage.list(f"{kind}/")} - before
    assert zm.open(storage).compact(mode="full").snapshot_id is not None
    storage.delete_many(sorted(lost))
    assert len(contents(zm.open(storage))) > 190
    (key,) = lost
    for go_on in (lambda: session.rebase("ours"), lambda: session.commit("mine", rebase="ours")):
        with pytest.raises(CorruptObjectError, match=key):
            go_on()
    assert len(session.status().chunks["/a"]) == 1


def v2(name: str, **changed: Any) -> Action:
    """Have other fields in a document of the array `v`."""

    def change(session: Session) -> None:
        held = json.loads(get(session, f"v/{name}") or b"{}")
        put(session, f"v/{name}", json.dumps({**held, **changed}).encode())

    return change


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (v2(".zattrs", a=1), v2(".zarray", shape=[8]), ([8], {"t": 0, "a": 1})),
        (v2(".zarray", shape=[10]), v2(".zarray", shape=[8]), ([10], {"t": 0})),
        (removes("v/.zattrs"), v2(".zattrs", a=1), ([6], {"a": 1})),
        (v2(".zattrs", t=1), v2(".zattrs", t=2), None),
        (v2(".zattrs", units="K"), writes("v/0", b"1"), None),
        (writes("v/.zattrs", b"no json"), v2(".zattrs", a=1), None),
    ],
)
def test_documents_of_zarr_v2(one: Action, two: Action, expected: Any) -> None:
    for mine, theirs in ((one, two), (two, one)):
        repository = zm.create(MemoryStorage())
        with repository.transaction(message="v2") as store:
            made = zarr.create_array(
                store, name="v", shape=(6,), chunks=(2,), dtype="u1", zarr_format=2
            )
            made.attrs["t"] = 0
        if expected is None:
            with pytest.raises(ConflictError):
                both(repository, mine, theirs)
            continue
        found = both(repository, mine, theirs)
        documents = [json.loads(found[f"v/{name}"] or b"") for name in (".zarray", ".zattrs")]
        assert (documents[0]["shape"], documents[1]) == expected
