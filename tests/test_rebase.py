"""What can be put on top of what, through real sessions: the whole table, and what goes with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
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
from zarr_manifests import Repository, Session
from zarr_manifests.conflicts import Conflict, ConflictKind
from zarr_manifests.errors import ConflictError, CorruptObjectError, InvalidArgumentError
from zarr_manifests.planning.conflict import decide as rules
from zarr_manifests.planning.conflict.components import Component
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage

GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {"made": true}}'


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def get(session: Session, key: str) -> bytes | None:
    found = session.store.get_sync(key)
    return None if found is None else found.to_bytes()


def contents(repository: Repository) -> dict[str, bytes | None]:
    session = repository.readonly_session()
    return {key: get(session, key) for key in contents_of(session.store).keys_below("")}


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
    "grow columns": edits("a", shape=[6, 8]),
    "grow both": edits("a", shape=[8, 8]),
    "append 30": lambda s: (edits("a", shape=[8, 4])(s), put(s, "a/c/3/0", b"30"))[1],
    "append 40": lambda s: (edits("a", shape=[10, 4])(s), put(s, "a/c/4/0", b"40"))[1],
    "append 30 other": lambda s: (edits("a", shape=[8, 4])(s), put(s, "a/c/3/0", b"x"))[1],
    "shrink rows to 4": edits("a", shape=[4, 4]),
    "shrink rows to 2": edits("a", shape=[2, 4]),
    "shrink in the chunk": edits("a", shape=[5, 4]),
    "title one": has("a", title="one"),
    "title two": has("a", title="two"),
    "no title": has("a", title=None),
    "note": has("a", note="n"),
    "group title one": has("g", title="one"),
    "group note": has("g", note="n"),
    "units": has("a", units="K"),
    "units other": has("a", units="degC"),
    "group units": has("g", units="K"),
    "fill value": edits("a", fill_value=9),
    "make n": writes("n/zarr.json", GROUP),
    "make n other": writes("n/zarr.json", GROUP.replace(b"true", b"false")),
    "make m": writes("m/zarr.json", GROUP),
    "make array n": lambda s: array(s, "n", 1),
    "make n/deep": writes("n/deep/zarr.json", GROUP),
    "make g/new": writes("g/new/zarr.json", GROUP),
    "make g/new/deep": writes("g/new/deep/zarr.json", GROUP),
    "make g/x/deep": writes("g/x/deep/zarr.json", GROUP),
    "make new.txt": writes("new.txt", b"1"),
    "make g/new.txt": writes("g/new.txt", b"1"),
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

C, G, S = Component.CHUNKS, Component.GROWTH, Component.SHRINK
A, X, N, D = Component.ATTRIBUTES, Component.STRUCTURE, Component.CREATE, Component.DELETE
REBASE, CONFLICT, POLICY = "rebase", "conflict", "policy"

# My component and theirs, what each side does, what becomes of mine, and of theirs were it second.
TABLE: list[tuple[Component, Component, str, str, str, str]] = [
    # chunk write or unset
    (C, C, "write 00", "write 01", REBASE, REBASE),
    (C, C, "write 00", "write 00 the same", REBASE, REBASE),
    (C, C, "unset 00", "unset 00", REBASE, REBASE),
    (C, C, "write 00", "write 00 other", POLICY, POLICY),
    (C, C, "write 00", "unset 00", POLICY, POLICY),
    (C, C, "write notes", "write notes other", POLICY, POLICY),
    (C, C, "write notes", "write 00", REBASE, REBASE),
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
    (C, D, "write notes", "remove notes", CONFLICT, POLICY),
    # growth
    (G, G, "grow rows to 8", "grow rows to 10", REBASE, REBASE),
    (G, G, "grow columns", "grow columns", REBASE, REBASE),
    (G, G, "grow both", "grow both", REBASE, REBASE),
    (G, G, "grow rows to 8", "grow columns", CONFLICT, CONFLICT),
    (G, G, "grow rows to 8", "grow both", CONFLICT, CONFLICT),
    (G, G, "append 30", "append 40", REBASE, REBASE),
    (G, S, "grow rows to 8", "shrink rows to 4", CONFLICT, CONFLICT),
    (G, S, "grow columns", "shrink in the chunk", CONFLICT, CONFLICT),
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
    (A, A, "title one", "no title", POLICY, POLICY),
    (A, A, "group title one", "group note", REBASE, REBASE),
    (A, A, "group title one", "group units", REBASE, REBASE),
    (A, X, "title one", "units", CONFLICT, CONFLICT),
    (A, D, "title one", "delete a", CONFLICT, POLICY),
    (A, D, "group note", "delete g", CONFLICT, POLICY),
    # structure
    (X, X, "units", "units other", CONFLICT, CONFLICT),
    (X, X, "fill value", "fill value", CONFLICT, CONFLICT),
    (X, D, "fill value", "delete a", CONFLICT, CONFLICT),
    # create
    (N, N, "make n", "make m", REBASE, REBASE),
    (N, N, "make n", "make n", REBASE, REBASE),
    (N, N, "make n", "make n other", CONFLICT, CONFLICT),
    (N, N, "make n", "make array n", CONFLICT, CONFLICT),
    (N, N, "make array n", "make array n", CONFLICT, CONFLICT),
    (N, N, "make array n", "make n/deep", CONFLICT, CONFLICT),
    (N, N, "make new.txt", "make new.txt", CONFLICT, CONFLICT),
    (N, N, "make n", "move g/x to n", CONFLICT, CONFLICT),
    (N, D, "make g/new", "delete g", CONFLICT, CONFLICT),
    (N, D, "make g/new/deep", "delete g", CONFLICT, CONFLICT),
    (N, D, "make g/new", "move g", CONFLICT, CONFLICT),
    (N, D, "make g/new.txt", "delete g", CONFLICT, CONFLICT),
    (N, D, "make g/new", "delete g/x", REBASE, REBASE),
    (N, D, "make n", "delete g", REBASE, REBASE),
    # delete or move
    (D, D, "delete a", "delete a", REBASE, REBASE),
    (D, D, "delete g", "delete g", REBASE, REBASE),
    (D, D, "delete g/x", "delete g/y", REBASE, REBASE),
    (D, D, "delete g", "delete g/x", CONFLICT, CONFLICT),
    (D, D, "move a", "move a", REBASE, REBASE),
    (D, D, "move g", "move g", REBASE, REBASE),
    (D, D, "move a", "move a elsewhere", CONFLICT, CONFLICT),
    (D, D, "move a", "delete a", CONFLICT, CONFLICT),
    (D, D, "move g", "delete g/x", CONFLICT, CONFLICT),
    (D, D, "delete a", "delete g", REBASE, REBASE),
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


def both(
    repository: Repository, mine: Action, theirs: Action, **options: Any
) -> dict[str, bytes | None]:
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


def outcome(mine: str, theirs: str) -> tuple[str, set[tuple[str, str]]]:
    """What becomes of mine on top of theirs: REBASE, POLICY or CONFLICT.

    And the components in conflict, each with the kind of the conflict.
    """
    try:
        both(base(), ACTIONS[mine], ACTIONS[theirs])
    except ConflictError as error:
        components = {(each.component, each.kind) for each in error.conflicts}
        try:
            both(base(), ACTIONS[mine], ACTIONS[theirs], rebase="ours")
        except ConflictError:
            return CONFLICT, components
        return POLICY, components
    except CorruptObjectError:  # only ever where a rule was taken out
        return "broken", set()
    return REBASE, set()


def name_of(row: tuple[Any, ...]) -> str:
    return f"{row[2]} on {row[3]}"


def merged(mine: str, theirs: str) -> tuple[str, dict[str, bytes | None]]:
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


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_merge_and_a_pick_do_what_a_rebase_does(row: tuple[Any, ...]) -> None:
    _, _, mine, theirs, expected = row
    found, there = merged(mine, theirs)
    assert found == expected
    if expected == REBASE:
        assert there == both(base(), ACTIONS[mine], ACTIONS[theirs])
    elif expected == POLICY:
        assert there == both(base(), ACTIONS[mine], ACTIONS[theirs], rebase="ours")


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_the_table(row: tuple[Component, Component, str, str, str]) -> None:
    mine, _, do, done, expected = row
    found, components = outcome(do, done)
    assert found == expected
    assert found == REBASE or (str(mine), kind_of(mine, row[1])) in components


def kind_of(mine: Component, theirs: Component) -> ConflictKind:
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


def test_every_cell_is_in_the_table() -> None:
    dashes = {(x, N) for x in (C, G, S, A, X)} | {(N, x) for x in (C, G, S, A, X)}
    cells = {(a, b) for a in Component for b in Component} - dashes
    assert {row[:2] for row in ROWS} == cells
    assert rules.CELLS.keys() | rules.PATH_CELLS.keys() <= cells


@pytest.mark.parametrize("cell", sorted(rules.CELLS | rules.PATH_CELLS), ids="-".join)
def test_the_table_notices_a_rule_that_is_missing(
    cell: tuple[Component, Component], monkeypatch: pytest.MonkeyPatch
) -> None:
    for cells in (rules.CELLS, rules.PATH_CELLS):
        monkeypatch.delitem(cells, cell, raising=False)
    rows = [row for row in ROWS if row[:2] == cell and row[4] != REBASE]
    assert [row for row in rows if outcome(row[2], row[3])[0] not in (CONFLICT, POLICY)]


@pytest.mark.parametrize(
    ("dtype", "key", "value"),
    [
        ("i1", "scale_factor", 0.5),
        ("i1", "add_offset", 3.0),
        ("i1", "_FillValue", -1),
        ("i1", "missing_value", -1),
        ("i1", "units", "days since 2000-01-01"),
        ("i1", "_Unsigned", "true"),
        ("i1", "dtype", "bool"),
        ("S2", "_Encoding", "utf-8"),
        ("i1", "valid_min", 0),
        ("i1", "valid_max", 0),
        ("i1", "valid_range", [0, 1]),
        ("i1", "flag_values", [-1, 1]),
        ("i1", "coordinates", "lat lon"),
        ("i1", "grid_mapping", "crs"),
        ("i1", "bounds", "time_bnds"),
        ("i1", "actual_range", [-1, 1]),
    ],
)
def test_attributes_that_xarray_decodes_by_are_structure(dtype: str, key: str, value: Any) -> None:
    data = np.array([-1, 1]).astype(dtype)
    plain, said = (
        xr.decode_cf(xr.Dataset({"a": ("x", data, attributes)}), decode_timedelta=True).a
        for attributes in ({}, {key: value})
    )
    decoded = plain.dtype != said.dtype or not plain.variable.equals(said.variable)
    repository = zm.create(MemoryStorage())
    with repository.transaction(message="make a") as store:
        zarr.create_array(store, name="a", shape=(2,), chunks=(2,), dtype=dtype, zarr_format=2)
    writer, editor = repository.writable_session(), repository.writable_session()
    zarr.open_array(writer.store, path="a")[:] = data
    zarr.open_array(editor.store, path="a").attrs[key] = value
    editor.commit("what the chunks mean")
    if not decoded:
        writer.commit("chunks")
        return
    with pytest.raises(ConflictError) as caught:
        writer.commit("chunks")
    assert [conflict.component for conflict in caught.value.conflicts] == ["chunks"]


FREE = sorted({row[:2] for row in ROWS} - rules.CELLS.keys() - rules.PATH_CELLS.keys())


@pytest.mark.parametrize("cell", FREE, ids="-".join)
def test_the_table_notices_a_rule_too_many(
    cell: tuple[Component, Component], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rules.CELLS, cell, rules._never(C, D))
    rows = [row for row in ROWS if row[:2] == cell]
    assert all(outcome(row[2], row[3])[0] == CONFLICT for row in rows)


@pytest.mark.parametrize("row", [row for row in TABLE if row[4] == row[5] == REBASE], ids=name_of)
def test_either_order_has_the_same_result(row: tuple[Any, ...]) -> None:
    one, two = ACTIONS[row[2]], ACTIONS[row[3]]
    assert both(base(), one, two) == both(base(), two, one)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.sampled_from(sorted(ACTIONS)), min_size=1, max_size=3),
    st.lists(st.sampled_from(sorted(ACTIONS)), min_size=1, max_size=3),
)
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

    results: list[dict[str, bytes | None] | None] = []
    for mine, theirs in ((run(one), run(two)), (run(two), run(one))):
        try:
            results.append(both(base(), mine, theirs))
        except (ConflictError, InvalidArgumentError) as error:  # or there is nothing to commit
            results.append({} if str(error).startswith("nothing") else None)
    if {} not in results:
        assert results[0] == results[1]


@pytest.mark.parametrize("beside", ["write 00", "make m", "remake a"])
def test_a_group_deleted_and_made_again_as_it_was_is_there_after_a_rebase(beside: str) -> None:
    def mine(session: Session) -> None:
        remakes("g")(session)
        put(session, "g/new/zarr.json", GROUP)

    due = {key for key in contents(base()) if not key.startswith(("g/x/", "g/y/"))}
    due |= {"g/new/zarr.json"} | ({"m/zarr.json"} if beside == "make m" else set())
    due = {key for key in due if beside != "remake a" or not key.startswith("a/c/")}
    assert both(base(), mine, ACTIONS[beside]).keys() == due
    assert both(base(), ACTIONS[beside], mine).keys() == due


def in_turn(repository: Repository, *actions: Action) -> None:
    session = repository.writable_session()
    for action in actions:
        action(session)
        session.commit("theirs")


def test_what_others_made_and_unmade_again_is_in_nobodys_way() -> None:
    repository = base()
    session = repository.writable_session()
    in_turn(repository, ACTIONS["write 00 other"], ACTIONS["unset 00"])
    in_turn(repository, lambda s: put(s, "m/zarr.json", GROUP), clears("m"))
    removes("a/c/0/0")(session)
    put(session, "m/zarr.json", GROUP)
    session.commit("mine")
    found = contents(repository)
    assert "a/c/0/0" not in found
    assert found["m/zarr.json"] == GROUP


@pytest.mark.parametrize("last", ["write 00 other", "unset 00"])
def test_what_others_left_in_the_end_is_not_overwritten(last: str) -> None:
    repository = base()
    session = repository.writable_session()
    # In between it was as this session has it, too.
    in_turn(repository, ACTIONS["write 00"], ACTIONS[last])
    ACTIONS["write 00"](session)
    with pytest.raises(ConflictError) as caught:
        session.commit("mine")
    assert [conflict.path for conflict in caught.value.conflicts] == ["/a"]


# --- policies --------------------------------------------------------------------------------


def test_policies_decide_whose_chunks_stay() -> None:
    mine = lambda s: (put(s, "a/c/0/0", b"mine"), put(s, "a/c/0/1", b"01"))[1]  # noqa: E731
    theirs = lambda s: (put(s, "a/c/0/0", b"other"), put(s, "a/c/1/1", b"11"))[1]  # noqa: E731
    for policy, first in (("ours", b"mine"), ("theirs", b"other")):
        found = both(base(), mine, theirs, rebase=policy)
        assert [found[f"a/c/{at}"] for at in ("0/0", "0/1", "1/1")] == [first, b"01", b"11"]


@pytest.mark.parametrize(
    ("policy", "left"), [("ours", b"mine"), ("theirs", None), ("fail", ConflictError)]
)
def test_a_chunk_that_others_deleted_is_theirs_even_if_it_was_gone_already(
    policy: str, left: Any
) -> None:
    repository = base()
    late = repository.writable_session()
    ACTIONS["unset 00"](late)
    in_turn(repository, ACTIONS["unset 00"])
    mine = repository.writable_session()
    ACTIONS["write 00"](mine)
    late.commit("deletes what is deleted")
    if left is ConflictError:
        with pytest.raises(ConflictError):
            mine.commit("mine", rebase=policy)
        return
    mine.commit("mine", rebase=policy)
    assert contents(repository).get("a/c/0/0") == left


def test_a_policy_of_the_others_may_leave_nothing_of_a_commit() -> None:
    found = both(base(), ACTIONS["write 00"], ACTIONS["write 00 other"], rebase=lambda _: "theirs")
    assert found["a/c/0/0"] == b"other"


def attributes(found: dict[str, bytes | None], path: str = "a") -> dict[str, Any]:
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


def test_a_group_stays_with_the_array_that_is_kept_in_it() -> None:
    theirs = writes("g/x/c/0", b"kept")
    found = both(base(), clears("g"), theirs, rebase="theirs")
    assert {key for key in found if key.startswith("g/")} == {
        *("g/zarr.json", "g/x/zarr.json", "g/x/c/0", "g/x/c/1")
    }
    assert found["g/x/c/0"] == b"kept"


@pytest.mark.parametrize("also", ["move g", "replace g/x"])
def test_what_is_moved_or_replaced_cannot_be_kept(also: str) -> None:
    def mine(session: Session) -> None:
        clears("g/x")(session)
        if also == "move g":
            session.move("g", "h")
        else:
            array(session, "g/x", 3)

    with pytest.raises(ConflictError, match="/g/x: delete"):
        both(base(), mine, writes("g/x/c/0", b"kept"), rebase="theirs")


def test_a_move_over_a_write_takes_it_along_or_fails() -> None:
    found = both(base(), ACTIONS["move a"], ACTIONS["write 00"], rebase="ours")
    assert found["moved/c/0/0"] == b"mine"
    assert "a/zarr.json" not in found
    found = both(base(), ACTIONS["move a"], ACTIONS["title one"], rebase="ours")
    assert attributes(found, "moved")["title"] == "one"
    with pytest.raises(ConflictError):
        both(base(), ACTIONS["move a"], ACTIONS["write 00"], rebase="theirs")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fail", "ours", "theirs"])
def test_no_policy_decides_what_is_not_for_it(policy: str) -> None:
    for _, _, mine, theirs, how in ROWS:
        if how == CONFLICT:
            with pytest.raises(ConflictError):
                both(base(), ACTIONS[mine], ACTIONS[theirs], rebase=policy)


def test_what_is_no_policy_is_refused() -> None:
    session = base().writable_session()
    put(session, "a/c/0/0", b"1")
    with pytest.raises(InvalidArgumentError, match="not a policy"):
        session.commit("no", rebase="mine")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="not a policy"):
        session.rebase("mine")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="retries"):
        session.commit("no", retries=-1)
    with pytest.raises(InvalidArgumentError, match="the policy answered None"):
        both(
            base(),
            ACTIONS["write 00"],
            ACTIONS["write 00 other"],
            rebase=lambda _: None,
        )


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


# --- session.rebase --------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in ROWS if row[4] == REBASE], ids=name_of)
def test_a_rebased_session_reads_and_commits_as_a_rebased_commit(row: tuple[Any, ...]) -> None:
    mine, theirs = ACTIONS[row[2]], ACTIONS[row[3]]
    expected = both(base(), mine, theirs)
    repository = base()
    session, other = repository.writable_session(), repository.writable_session()
    mine(session)
    theirs(other)
    other.commit("theirs")
    assert session.rebase() == other.snapshot_id == session.snapshot_id
    keys = contents_of(session.store).keys_below("")
    assert {key: get(session, key) for key in keys} == expected
    if session.status():
        session.commit("mine", rebase=False)
    assert contents(repository) == expected


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


def test_a_session_without_changes_goes_to_the_tip() -> None:
    repository = base()
    session, other = repository.writable_session(), repository.writable_session()
    assert session.rebase() == session.snapshot_id
    put(other, "a/c/0/0", b"1")
    assert session.rebase() != other.commit("theirs") == session.rebase()
    assert get(session, "a/c/0/0") == b"1"


def test_forks_of_before_a_rebase_are_refused() -> None:
    repository = base()
    session, other = repository.writable_session(), repository.writable_session()
    fork = session.fork()
    put(other, "a/c/0/0", b"1")
    other.commit("theirs")
    session.rebase()
    with pytest.raises(InvalidArgumentError, match="another base"):
        session.merge(fork)


# --- what was read ---------------------------------------------------------------------------


def increment(session: Session) -> None:
    value = get(session, "a/c/0/0")
    assert value is not None
    put(session, "a/c/0/0", bytes([value[0] + 1]))


def test_the_same_bytes_conflict_where_they_depend_on_a_read() -> None:
    """Two that both add one to what they have read must not become one."""
    repository = base()
    with repository.transaction(message="a number") as store:
        store.set_sync("a/c/0/0", cpu.Buffer.from_bytes(b"\x05"))
    with pytest.raises(ConflictError, match=r"\(0, 0\)"):
        both(repository, increment, increment)


def test_parts_of_one_chunk_conflict() -> None:
    def one(session: Session) -> None:
        zarr.open_array(session.store, path="a")[0, 0] = 7

    with pytest.raises(ConflictError, match=r"\(0, 0\)"):
        both(base(), one, one)


def test_what_a_session_wrote_itself_is_no_read() -> None:
    def twice(session: Session) -> None:
        put(session, "a/c/0/0", b"1")
        assert get(session, "a/c/0/0") == b"1"
        put(session, "a/c/0/0", b"2")

    assert both(base(), twice, twice)["a/c/0/0"] == b"2"


def test_reads_of_forks_count() -> None:
    repository = base()
    with repository.transaction(message="a number") as store:
        store.set_sync("a/c/0/0", cpu.Buffer.from_bytes(b"\x05"))

    def through_a_fork(session: Session) -> None:
        fork = session.fork()
        value = fork.store.get_sync("a/c/0/0")
        assert value is not None
        fork.store.set_sync("a/c/0/0", cpu.Buffer.from_bytes(bytes([value.to_bytes()[0] + 1])))
        session.merge(fork)

    with pytest.raises(ConflictError, match=r"\(0, 0\)"):
        both(repository, through_a_fork, increment)


@pytest.mark.parametrize(
    ("read", "theirs", "clash"),
    [
        ("a/c/0/0", "write 00", True),
        ("a/c/0/0", "unset 00", True),
        ("a/c/0/0", "write 01", False),
        ("a/c/2/0", "shrink rows to 4", True),
        ("a/c/0/0", "shrink rows to 4", False),
        ("a/zarr.json", "title one", True),
        ("a/zarr.json", "write 00", False),
        ("a/zarr.json", "delete a", True),
        ("n/zarr.json", "make n", True),
        ("n/zarr.json", "make m", False),
        ("notes.txt", "write notes", True),
    ],
)
def test_serializable_sessions_conflict_with_what_they_read(
    read: str, theirs: str, clash: bool
) -> None:
    for isolation in ("snapshot", "serializable"):
        repository = base()
        session = repository.writable_session(isolation=isolation)  # type: ignore[arg-type]
        get(session, read)
        put(session, "g/x/c/0", b"depends on it")
        other = repository.writable_session()
        ACTIONS[theirs](other)
        other.commit("theirs")
        if clash and isolation == "serializable":
            with pytest.raises(ConflictError, match=": read") as caught:
                session.commit("mine", rebase="ours")
            assert caught.value.conflicts[0].path == f"/{read.split('/')[0]}" or read == "notes.txt"
        else:
            session.commit("mine")


def test_write_skew_is_found_by_serializable_sessions_only() -> None:
    """Each reads both and takes from one: together they take too much."""
    for isolation, lands in (("snapshot", True), ("serializable", False)):
        repository = base()
        sessions = [repository.writable_session(isolation=isolation) for _ in "12"]  # type: ignore[arg-type]
        for session, key in zip(sessions, ("g/x/c/0", "g/y/c/0"), strict=True):
            get(session, "g/x/c/0")
            get(session, "g/y/c/0")
            put(session, key, b"taken")
        sessions[0].commit("one")
        if lands:
            sessions[1].commit("two")
        else:
            with pytest.raises(ConflictError, match="read here"):
                sessions[1].commit("two")
    with pytest.raises(InvalidArgumentError, match="isolation"):
        repository.writable_session(isolation="none")  # type: ignore[arg-type]


# --- appends through xarray ------------------------------------------------------------------


def hours(start: int, stop: int) -> xr.Dataset:
    time = np.arange(start, stop)
    data = {"air": (("time", "lat"), np.ones((stop - start, 2)) * time[:, None])}
    return xr.Dataset(data, {"time": time, "lat": [1.0, 2.0]})


def test_two_appends_at_the_same_place_conflict_and_say_what_to_do() -> None:
    repository = zm.create(MemoryStorage())
    with repository.transaction(message="hours") as store:
        hours(0, 4).to_zarr(store, zarr_format=3, consolidated=False)

    def append(start: int, stop: int) -> Action:
        return lambda session: (
            hours(start, stop).to_zarr(session.store, append_dim="time", consolidated=False)
            and None
        )

    with pytest.raises(ConflictError) as caught:
        both(repository, append(4, 6), append(4, 7))
    air = next(c for c in caught.value.conflicts if c.path == "/air")
    assert air.chunks
    assert "both commits append along 'time'" in air.reason
    assert "open a new session" in air.reason


def overtaken_write(mine: xr.Dataset, theirs: xr.Dataset, **options: Any) -> xr.Dataset:
    """What is there when `theirs` was written after `mine` was uploaded, and before its swap."""
    storage = MemoryStorage()
    data = {"air": (("time", "lat"), np.zeros((8, 2)))}
    whole = xr.Dataset(data, {"time": np.arange(8), "lat": [1.0, 2.0]}, {"title": "hours"})
    zm.write(whole, storage, message="whole", encoding={"air": {"chunks": (2, 2)}})
    due = [theirs]

    def overtake(point: str) -> None:
        if point == "root.swap" and due:
            zm.write(due.pop(), storage, message="theirs", **options)

    repository = zm.open(storage, runtime=replace(SYSTEM, checkpoint=overtake))
    zm.write(mine, repository, message="mine", **options)
    assert [info.message for info in repository.ancestry()][:2] == ["mine", "theirs"]
    return xr.open_dataset(zm.open(storage), engine="zarr_manifests").load()  # type: ignore[arg-type]


def test_writes_to_two_regions_both_land() -> None:
    one, two = (hours(start, start + 4).drop_vars("lat") for start in (0, 4))
    found = overtaken_write(one, two, region="auto")
    assert (found["air"][:, 0] == np.arange(8)).all()


def test_variables_that_two_writers_add_both_land() -> None:
    coordinates = {"time": np.arange(8)}
    one = xr.Dataset({"wind": ("time", np.ones(8))}, coordinates, {"source": "one"})
    two = xr.Dataset({"rain": ("time", np.ones(8) * 2)}, coordinates, {"licence": "two"})
    found = overtaken_write(one, two, mode="a")
    assert {"air", "wind", "rain"} == set(found.data_vars)
    assert (found["wind"].sum(), found["rain"].sum()) == (8, 16)
    assert found.attrs == {"source": "one", "licence": "two"}


# --- keys that others make their own ---------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "node"),
    [
        ("make a/c/3/0", "grow rows to 8"),
        ("make a/c/3/0", "append 40"),
        ("make n/zarr.json opaque", "make n"),
    ],
)
def test_an_entry_at_a_key_of_a_node_conflicts_with_it(entry: str, node: str) -> None:
    for mine, theirs in ((entry, node), (node, entry)):
        with pytest.raises(ConflictError, match="belongs to a node of the other"):
            both(base(), ACTIONS[mine], ACTIONS[theirs])


def test_a_node_below_an_array_that_others_write_to_is_a_conflict() -> None:
    for mine, theirs in (("make g/x/deep", "grow x"), ("grow x", "make g/x/deep")):
        actions = {**ACTIONS, "grow x": edits("g/x", shape=[6])}
        with pytest.raises(ConflictError, match="below an array"):
            both(base(), actions[mine], actions[theirs])


# --- what is uploaded ------------------------------------------------------------------------


def test_nothing_that_was_uploaded_is_uploaded_again() -> None:
    """Somebody comes first after the uploads; growth and chunks are merged, and rows dropped."""
    storage = MemoryStorage()
    base(storage)
    counting = CountingStorage(storage)
    others = [ACTIONS["append 40"], ACTIONS["title one"], ACTIONS["write 01"]]
    due = list(others)

    def overtake(point: str) -> None:
        if point == "root.swap" and due:
            other = zm.open(storage).writable_session()
            due.pop()(other)
            other.commit("other")

    runtime = replace(SYSTEM, checkpoint=overtake)
    session = zm.open(counting, runtime=runtime).writable_session()
    edits("a", shape=[8, 4], attributes={"note": "n"})(session)
    put(session, "a/c/3/0", b"x" * 5000)
    put(session, "a/c/0/1", b"y")
    counting.reset()
    session.commit("mine", rebase="theirs")
    made = [record.key for record in counting.log if record.op == "create"]
    assert len(made) == len(set(made))
    kinds = [key.split("/")[0] for key in made if key.split("/")[0] != "root"]
    assert sorted(kinds) == ["chunks", *["deltas"] * 4, *["snapshots"] * 4]
    found = contents(zm.open(storage))
    assert (found["a/c/3/0"], found["a/c/4/0"], found["a/c/0/1"]) == (b"x" * 5000, b"40", b"01")
    assert attributes(found) == {"title": "one", "x": 1.5, "note": "n"}


def test_rows_that_are_left_to_others_leave_their_manifest() -> None:
    """Beyond what is embedded in a delta, with another array in the same commit."""
    repository = zm.create(MemoryStorage())
    with repository.transaction(message="arrays") as store:
        for name in ("big", "also"):
            zarr.create_array(store, name=name, shape=(400,), chunks=(1,), dtype="u1")
    first, second = repository.writable_session(), repository.writable_session()
    rng = np.random.default_rng(0)
    for i in range(400):
        put(second, f"big/c/{i}", rng.bytes(200))
        put(second, f"also/c/{i}", rng.bytes(200))
    put(first, "big/c/399", b"theirs")
    first.commit("theirs")
    before = {info.key for info in repository.storage.list("manifests/")}
    expected = {key: get(second, key) for key in ("big/c/0", "also/c/399")}
    second.commit("mine", rebase="theirs")
    made = {info.key for info in repository.storage.list("manifests/")} - before
    assert made
    found = contents(zm.open(repository.storage))
    assert found["big/c/399"] == b"theirs"
    assert {key: found[key] for key in expected} == expected
    assert len(found) == 803


def test_retries_are_counted() -> None:
    storage = MemoryStorage()
    base(storage)
    overtaken = 0

    def overtake(point: str) -> None:
        nonlocal overtaken
        if point == "root.swap":
            overtaken += 1
            with zm.open(storage).transaction(message="other") as store:
                store.set_sync("a/c/1/1", cpu.Buffer.from_bytes(bytes([overtaken])))

    runtime = replace(SYSTEM, checkpoint=overtake, sleep=lambda _: None)
    session = zm.open(storage, runtime=runtime).writable_session()
    put(session, "a/c/0/0", b"1")
    with pytest.raises(ConflictError, match="came first 3 times"):
        session.commit("mine", retries=2)
    assert overtaken == 3
    with pytest.raises(ConflictError, match="came first 1 times"):
        session.commit("mine", retries=0)


# --- what fails closed -----------------------------------------------------------------------


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
    assert session.status().chunks == {"/a": 1}


# --- Zarr v2 ---------------------------------------------------------------------------------


def v2_attributes(**changed: Any) -> Action:
    def change(session: Session) -> None:
        node = contents_of(session.store).node("v")
        assert node is not None
        held = json.loads(node.documents.get(".zattrs", b"{}"))
        put(session, "v/.zattrs", json.dumps({**held, **changed}).encode())

    return change


def v2_shape(*shape: int) -> Action:
    def change(session: Session) -> None:
        node = contents_of(session.store).node("v")
        assert node is not None
        document = {**json.loads(node.documents[".zarray"]), "shape": shape}
        put(session, "v/.zarray", json.dumps(document).encode())

    return change


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (v2_attributes(a=1), v2_attributes(b=2), ([6], {"t": 0, "a": 1, "b": 2})),
        (v2_attributes(a=1), v2_shape(8), ([8], {"t": 0, "a": 1})),
        (v2_shape(10), v2_shape(8), ([10], {"t": 0})),
        (v2_attributes(t=1), v2_attributes(t=2), None),
        (v2_attributes(_ARRAY_DIMENSIONS=["x"]), v2_attributes(a=1), None),
        (v2_attributes(units="K"), writes("v/0", b"1"), None),
        (lambda s: put(s, "v/.zattrs", b"no json"), v2_attributes(a=1), None),
        (lambda s: put(s, "v/.zattrs", b"no json"), writes("v/0", b"1"), None),
        (removes("v/.zattrs"), v2_attributes(a=1), ([6], {"a": 1})),
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
        assert json.loads(found["v/.zarray"] or b"")["shape"] == expected[0]
        assert json.loads(found["v/.zattrs"] or b"") == expected[1]
