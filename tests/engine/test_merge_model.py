"""Merges of branches against a model: three states of each array, compared part by part."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

import zarr_manifests as zm
from effort import examples
from stored import array_document, contents, put
from zarr_manifests import Fork, Session
from zarr_manifests.errors import ConflictError, InvalidArgumentError
from zarr_manifests.repository import resolved
from zarr_manifests.storage.memory import MemoryStorage

PATHS = ["a", "b", "c"]
LONGEST = 4
KINDS = {"write": 6, "unset": 2, "length": 4, "attr": 1, "move": 1, "delete": 1, "make": 1}


class Array(Struct, frozen=True):
    """An array of one axis and chunks of one cell."""

    path: str
    length: int
    attrs: dict[str, int]
    chunks: dict[int, bytes]

    def document(self) -> bytes:
        return array_document((self.length,), attributes=self.attrs)


type Choice = Literal["fail", "ours", "theirs"]
type State = dict[int, Array]
"""Arrays by number, which they keep when they are moved."""


class DifferError(Exception):
    """Both sides have changed one thing, to two."""


def three_way(base: Any, ours: Any, theirs: Any, winner: Choice = "fail") -> Any:
    if theirs in (base, ours):
        return ours
    if ours != base and winner == "fail":
        raise DifferError
    return ours if ours != base and winner == "ours" else theirs


def in_each(
    base: dict[Any, Any], ours: dict[Any, Any], theirs: dict[Any, Any], winner: Choice
) -> dict[Any, Any]:
    """Key by key; None stands for none."""
    found = {
        key: three_way(base.get(key), ours.get(key), theirs.get(key), winner)
        for key in {**base, **ours, **theirs}
    }
    return {key: value for key, value in found.items() if value is not None}


def merged_length(base: int, ours: int, theirs: int) -> int:
    both_grew = min(ours, theirs) > base
    return max(ours, theirs) if both_grew else int(three_way(base, ours, theirs))


def merged_array(
    base: Array | None, ours: Array | None, theirs: Array | None, winner: Choice
) -> Array | None:
    if base is None or ours is None or theirs is None:
        # Who deletes an array may win over other chunks and attributes, but over nothing else.
        same = base and ours and (base.path, base.length) == (ours.path, ours.length)
        return three_way(base, ours, theirs, winner if same else "fail")
    found = Array(
        three_way(base.path, ours.path, theirs.path),
        merged_length(base.length, ours.length, theirs.length),
        in_each(base.attrs, ours.attrs, theirs.attrs, winner),
        in_each(base.chunks, ours.chunks, theirs.chunks, winner),
    )
    if max(found.chunks, default=0) >= found.length:
        raise DifferError  # one side has written where the other has cut off
    return found


def merged(base: State, ours: State, theirs: State, winner: Choice = "fail") -> State:
    numbers = {**ours, **theirs}
    each = {n: merged_array(base.get(n), ours.get(n), theirs.get(n), winner) for n in numbers}
    found = {number: array for number, array in each.items() if array is not None}
    if len({array.path for array in found.values()}) < len(found):
        raise DifferError
    return found


def changed(base: State, state: State) -> set[Any]:
    """The numbers and paths of what has changed."""
    both = [(base.get(n), state.get(n), n) for n in {**base, **state}]
    found = [(n, old, new) for old, new, n in both if old != new]
    return {each for n, *two in found for each in (n, *(a.path for a in two if a is not None))}


def stored(state: State) -> dict[str, Any]:
    """What a store has by key, with documents decoded."""
    found: dict[str, Any] = {}
    for array in state.values():
        found[f"{array.path}/zarr.json"] = json.loads(array.document())
        found |= {f"{array.path}/c/{at}": data for at, data in array.chunks.items()}
    return found


def there(session: Session | Fork) -> dict[str, Any]:
    found = contents(session)
    return {key: json.loads(v) if key.endswith(".json") else v for key, v in found.items()}


def edited(session: Session | Fork, state: State, pick: random.Random, numbers: Any) -> State:
    """The state after a change, which is made in the session, too."""
    free = [path for path in PATHS if path not in {array.path for array in state.values()}]
    kind = pick.choices([*KINDS], [*KINDS.values()])[0] if state else "make"
    if kind == "make":
        if not free:
            return state
        array = Array(pick.choice(free), pick.randint(1, LONGEST), {}, {})
        put(session, f"{array.path}/zarr.json", array.document())
        return {**state, next(numbers): array}
    number = pick.choice([*state])
    array, at = state[number], pick.randrange(state[number].length)
    kept, document = (
        {i: one for i, one in array.chunks.items() if i != at},
        f"{array.path}/zarr.json",
    )
    make: Callable[[], object]
    match kind:
        case "write":
            data = bytes([pick.randint(1, 3)]) * pick.choice([1, 9])
            new = replace(array, chunks={**kept, at: data})
            make = partial(put, session, f"{array.path}/c/{at}", data)
        case "unset":
            new = replace(array, chunks=kept)
            make = partial(session.store.delete_sync, f"{array.path}/c/{at}")
        case "length":
            length = pick.randint(1, LONGEST)
            kept = {i: data for i, data in array.chunks.items() if i < length}
            new = replace(array, length=length, chunks=kept)
            make = partial(put, session, document, new.document())
        case "attr":
            new = replace(array, attrs={**array.attrs, pick.choice("xy"): pick.randint(0, 2)})
            make = partial(put, session, document, new.document())
        case "move" if free and isinstance(session, Session):
            new = replace(array, path=pick.choice(free))
            make = partial(session.move, array.path, new.path)
        case "delete":
            asyncio.run(session.store.delete_dir(array.path))
            return {n: other for n, other in state.items() if n != number}
        case _:
            return state
    if new != array:  # what is written again as it was counts as written
        make()
    return {**state, number: new}


def _emptied() -> MemoryStorage:
    """A storage that a fork finds by its name, without what was there."""
    storage = MemoryStorage("merge-model")
    storage.delete_many([info.key for info in storage.list()])
    return storage


class Model:
    """A repository of two branches, and the states of its snapshots."""

    def __init__(self, seed: int) -> None:
        self.pick, self.numbers = random.Random(seed), count()
        config = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 2}
        self.repo = zm.create(_emptied(), config)
        self.heads: dict[str, State] = {"main": {}}
        self.states: dict[str, State] = {resolved(self.repo, "main"): {}}
        self.parents: dict[str, str] = {}
        self.commit("main", 8)
        self.repo.create_branch("side")
        self.heads["side"] = self.heads["main"]

    def landed(self, branch: str, state: State) -> None:
        """Compare what the branch has, and remember it."""
        head = next(self.repo.ancestry(branch))
        assert there(self.repo.readonly_session(branch)) == stored(state)
        self.heads[branch] = self.states[head.snapshot_id] = state
        if head.parent_id is not None:
            self.parents[head.snapshot_id] = head.parent_id

    def commit(self, branch: str, edits: int) -> None:
        session, state = self.repo.writable_session(branch), self.heads[branch]
        for _ in range(edits):
            state = edited(session, state, self.pick, self.numbers)
        with suppress(InvalidArgumentError):  # nothing has changed
            session.commit("edit")
        self.landed(branch, state)

    def merge(self, source: str, into: str) -> None:
        winner: Choice = self.pick.choice(["fail", "ours", "theirs"])
        planned = self.repo.merge(source, into, dry_run=True, policy=winner)
        done, theirs = partial(self.repo.merge, source, into, policy=winner), planned.source
        refused = planned.conflicts
        self.brought(into, planned.base, self.states[theirs], done, refused, winner)

    def repeat(self, version: str, branch: str) -> None:
        """A commit of the other branch."""
        done = partial(self.repo.cherry_pick, version, branch)
        self.brought(branch, self.parents[version], self.states[version], done)

    def undo(self, version: str, branch: str) -> None:
        done = partial(self.repo.revert, version, branch)
        self.brought(branch, version, self.states[self.parents[version]], done)

    def makes_and_deletes_none(self, version: str) -> bool:
        """Whether the commit left all arrays: one that is made again has another number."""
        parent = self.parents.get(version)
        return parent is not None and self.states[version].keys() == self.states[parent].keys()

    def brought(
        self,
        branch: str,
        base: str,
        theirs: State,
        done: Any,
        planned: Any = None,
        winner: Choice = "fail",
    ) -> None:
        """What leads from one state to the other is put on the branch, or refused."""
        try:
            done()
            refused = False
        except ConflictError:
            refused = True
        except InvalidArgumentError:  # nothing is left of it
            refused = False
        assert planned is None or bool(planned) is refused
        before, ours = self.states[base], self.heads[branch]
        if refused:  # sometimes without need, but not if both sides are apart
            assert changed(before, ours) & changed(before, theirs)
            state = ours
        else:
            state = merged(before, ours, theirs, winner)
        self.landed(branch, state)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_is_brought_to_a_branch_is_that_of_the_model(seed: int) -> None:
    model = Model(seed)
    pick = model.pick
    for _ in range(8):
        for branch in ("main", "side"):
            for _ in range(pick.choice([0, 0, 1, 3])):
                model.commit(branch, pick.randint(1, 2))
        source, into = pick.sample(["main", "side"], 2)
        if pick.random() < 0.2:
            model.repo.compact(into, mode=pick.choice(["minor", "full"]))
            model.landed(into, model.heads[into])
        recent = [info.snapshot_id for info in model.repo.ancestry(source, limit=3)]
        known = [*filter(model.makes_and_deletes_none, recent)]
        what = pick.choices(["merge", "repeat", "undo"], [6, 2, 2])[0]
        if what == "merge":
            model.merge(source, into)
        elif known and what == "repeat":
            model.repeat(pick.choice(known), into)
        elif known:
            model.undo(pick.choice(known), source)


class Beside(Struct):
    """An open fork or session, its states, and what it and the others have touched since."""

    writer: Fork | Session
    base: State
    state: State
    touched: set[Any]
    touched_since: set[Any]

    def edit(self, model: Model) -> None:
        before, self.state = self.state, edited(self.writer, self.state, model.pick, model.numbers)
        self.touched |= changed(before, self.state)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_forks_bring_to_a_session_is_that_of_the_model(seed: int) -> None:
    model = Model(seed)
    pick, session, state = model.pick, model.repo.writable_session("main"), model.heads["main"]
    forks: list[Beside] = []
    for _ in range(30):
        old, brought = state, set[Any]()
        what = pick.choices(["edit", "fork", "edit a fork", "merge"], [3, 1, 4, 1])[0]
        if what == "edit":
            state = edited(session, state, pick, model.numbers)
        elif what == "fork":
            fork = pickle.loads(pickle.dumps(session.fork()))
            forks.append(Beside(fork, state, state, set(), set()))
        elif forks and what == "edit a fork":
            pick.choice(forks).edit(model)
        elif forks:
            one = forks.pop(pick.randrange(len(forks)))
            try:
                session.merge(one.writer)
            except ConflictError:
                assert one.touched & one.touched_since
            else:
                state, brought = merged(one.base, state, one.state), one.touched
            assert there(session) == stored(state)
        for one in forks:
            one.touched_since |= changed(old, state) | brought
    with suppress(InvalidArgumentError):  # nothing has changed
        session.commit("merged", discard_unmerged=True)
    model.landed("main", state)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_sessions_commit_on_top_of_others_is_that_of_the_model(seed: int) -> None:
    model = Model(seed)
    pick, late = model.pick, list[Beside]()
    for _ in range(16):
        ours = model.heads["main"]
        if pick.random() < 0.5:
            session = model.repo.writable_session("main")
            late.append(one := Beside(session, ours, ours, set(), set()))
            for _ in range(pick.randint(1, 4)):
                one.edit(model)
        elif late:
            one = late.pop(pick.randrange(len(late)))
            state = ours
            with suppress(InvalidArgumentError):  # nothing has changed
                try:
                    one.writer.commit("late")
                except ConflictError:
                    assert one.touched & one.touched_since
                else:
                    state = merged(one.base, ours, one.state)
                    for each in late:
                        each.touched_since |= one.touched
            model.landed("main", state)
