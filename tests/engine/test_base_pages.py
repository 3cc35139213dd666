"""Bases in pages: they answer as bases without pages do, and few of their pages are read."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.core.sync import sync

import zarr_manifests as zm
from effort import examples
from inside import small_node_pages
from storages import CountingStorage, LatencyStorage
from stored import put
from zarr_manifests import Session
from zarr_manifests.errors import ManifestsError
from zarr_manifests.storage.memory import MemoryStorage

GROUP = b'{"zarr_format": 3, "node_type": "group"}'


def array(length: int = 6, dimension: str = "x") -> bytes:
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [length],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "bytes"}],
            "fill_value": 0,
            "dimension_names": [dimension],
        }
    ).encode()


# --- alike -----------------------------------------------------------------------------------

names = st.sampled_from(["a", "a-b", "a0", "b", "x"])
paths = st.lists(names, max_size=3).map("/".join)
keys = st.one_of(
    paths.map(lambda path: f"{path}/zarr.json".lstrip("/")),
    st.tuples(paths, st.integers(0, 6)).map(lambda one: f"{one[0]}/c/{one[1]}".lstrip("/")),
    st.tuples(paths, names).map(lambda one: f"{one[0]}/{one[1]}.txt".lstrip("/")),
)
documents = st.sampled_from([GROUP, array(), array(3), array(6, "a")])


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, ...]:
    match draw(st.sampled_from(["set", "set", "set", "set", "delete", "move", "fold", "commit"])):
        case "set":
            key = draw(keys)
            value = draw(documents) if key.endswith("zarr.json") else draw(st.binary(min_size=1))
            return "set", key, value.hex()
        case "delete":
            return "delete", draw(keys)
        case "move":
            return "move", draw(paths), draw(paths)
        case what:
            return (what,)


def outcome(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except ManifestsError as error:
        return type(error)


class One:
    """A repository and a session on it."""

    def __init__(self, pages: Any) -> None:
        self.pages = pages
        self.repo = zm.create(
            MemoryStorage(), {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 100}
        )
        self.session = self.repo.writable_session("main")

    def do(self, step: tuple[str, ...]) -> Any:
        store = self.session.store
        match step:
            case "set", key, value:
                return outcome(put, store, key, bytes.fromhex(value))
            case "delete", key:
                return outcome(store.delete_sync, key)
            case "move", old, new:
                return outcome(self.session.move, old, new)
        with contextlib.suppress(ManifestsError):  # nothing to commit
            self.session.commit("change")
        if step == ("fold",):
            with self.pages():
                self.repo.compact("main", "full")
        self.session = self.repo.writable_session("main")
        return None


def seen(session: Session, wanted: list[str]) -> Any:
    """What the store answers to these keys, and to listings."""
    store = session.store
    found: dict[str, Any] = {}
    for key in wanted:
        value = store.get_sync(key)
        found[key] = None if value is None else value.to_bytes()
    for prefix in {"", *(key.rpartition("/")[0] for key in wanted)}:
        found[f"list {prefix}"] = sorted(collected(store.list_dir(prefix)))
        found[f"all {prefix}"] = sorted(collected(store.list_prefix(prefix)))
    return found


def collected(names: Any) -> list[str]:
    async def gather() -> list[str]:
        return [name async for name in names]

    return sync(gather())


@given(st.lists(steps(), min_size=1, max_size=25), st.lists(keys, min_size=1, max_size=6))
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_base_in_pages_answers_as_one_without(
    changes: list[tuple[str, ...]], wanted: list[str]
) -> None:
    one, other = One(small_node_pages), One(contextlib.nullcontext)
    for step in changes:
        assert one.do(step) == other.do(step)
    wanted = [*wanted, *(step[1] for step in changes if step[0] in ("set", "delete"))]
    assert seen(one.session, wanted) == seen(other.session, wanted)
    for each in (one, other):
        each.do(("fold",))
        each.do(("commit",))
    readers = [each.repo.readonly_session("main") for each in (one, other)]
    assert seen(readers[0], wanted) == seen(readers[1], wanted)
    assert one.repo.verify().problems == ()
    mine, theirs = (each.repo.du(estimate=True) for each in (one, other))
    assert (mine.total, mine.arrays) == (theirs.total, theirs.arrays)


# --- few pages -------------------------------------------------------------------------------

GROUPS, IN_A_GROUP = 50, 100


def test_one_array_or_group_of_many_is_found_by_few_pages() -> None:
    storage = CountingStorage(LatencyStorage(MemoryStorage(), latency_s=0))
    with zm.create(storage).transaction("main", message="make") as store:
        put(store, "zarr.json", GROUP)
        for group in range(GROUPS):
            put(store, f"g{group}/zarr.json", GROUP)
            for i in range(IN_A_GROUP):
                put(store, f"g{group}/a{i}/zarr.json", array(i + 1))
    storage.reset()
    session = zm.open(storage).readonly_session("main")
    assert zarr.open_array(session.store, path="g7/a23", mode="r").shape == (24,)
    assert storage.rounds() <= 3
    assert storage.bytes_read <= 32 * 1024
    storage.reset()
    with pytest.raises(FileNotFoundError):
        zarr.open_array(session.store, path="g7/a100", mode="r")
    assert storage.requests <= 1  # the page of a path beyond those of the group
    storage.reset()
    assert len(collected(session.store.list_dir(""))) == GROUPS + 1
    assert storage.requests <= 1
    storage.reset()
    group = zarr.open_group(session.store, path="g3", mode="r")
    assert len(list(group.array_keys())) == IN_A_GROUP
    assert storage.requests <= 3
    assert storage.rounds() <= 2
