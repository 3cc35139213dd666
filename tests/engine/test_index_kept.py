"""The index of initialised chunks is kept by compactions, and is asked without manifests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Repository, Session
from zarr_manifests.engine.compact.presence_index import Presence
from zarr_manifests.error_cases import FencedError
from zarr_manifests.repository import build_index
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.session import initialized_chunks
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage

SMALL_LEAVES = {"chunk-manifests": {"sets": [{"default": {"max-manifest-size": 40}}]}}


def fill(session: Session, coords: Any, path: str = "air") -> None:
    for at in coords:
        key = "/".join([path, "c", *map(str, at)])
        session.store.set_sync(key, cpu.Buffer.from_bytes(b"12345678"))


def make(session: Session, shape: tuple[int, ...], path: str = "air") -> None:
    zarr.create_array(session.store, name=path, shape=shape, chunks=(1,) * len(shape), dtype="u1")


def presence(storage: Any, path: str = "air") -> tuple[Presence, bytes]:
    session = zm.open(storage).readonly_session()
    view = contents_of(session.store).view
    return Presence(contents_of(session.store).context, view, "main"), view.nodes[path].node_id


def indexed(storage: Any) -> tuple[int, int]:
    """How many leaves the head has, and how many of them the index knows."""
    asked, _ = presence(storage)
    leaves = [leaf for some in asked._by_node.values() for leaf in some]
    return len(leaves), sum(asked._entry(leaf) is not None for leaf in leaves)


@pytest.mark.parametrize("mode", ["major", "full"])
def test_a_compaction_keeps_the_index(mode: Any) -> None:
    storage = MemoryStorage()
    config = {"compaction": {"mode": "manual", "size-ratio": 0.2}, **SMALL_LEAVES}
    repository = zm.create(storage, config)
    session = repository.writable_session()
    make(session, (300,))
    for start in range(0, 300, 60):
        fill(session, [(at,) for at in range(start, start + 60) if at % 3])
        session.commit("fill some")
        repository.compact(mode=mode)
        session = repository.writable_session()
        leaves, known = indexed(storage)
        assert known == leaves
        assert leaves > start // 60
        asked, node_id = presence(storage)
        there = asked.coords(node_id, asked._view.nodes["air"].array.grid)
        assert there[:, 0].tolist() == [at for at in range(start + 60) if at % 3]
        assert not asked.counted
    assert build_index(repository).indexed == 0


@pytest.fixture(scope="module")
def hundred() -> MemoryStorage:
    """A base of 4,000 chunks, and 130 commits of ten since, compacted as they come."""
    storage = MemoryStorage()
    repository = zm.create(storage)
    session = repository.writable_session()
    make(session, (2_000, 3))
    make(session, (5,), "other")
    fill(session, [(i, j) for i in range(1_000) for j in range(3) if (i + j) % 4])
    fill(session, [(1,), (3,)], "other")
    session.commit("base")
    repository.compact(mode="full")
    rng = np.random.default_rng(5)
    for _ in range(130):
        session = zm.open(storage).writable_session()
        fill(session, {(int(i), int(j)) for i, j in rng.integers((2_000, 3), size=(10, 2))})
        session.commit("scattered")
    return storage


def requests(storage: MemoryStorage, ask: Callable[[Repository], Any]) -> tuple[Any, list[str]]:
    counting = CountingStorage(storage)
    repository = zm.open(counting)
    before = len(counting.log)
    found = ask(repository)
    assert not [r for r in counting.log if r.op == "list"]
    return found, [r.key for r in counting.log[before:]]


def test_after_a_hundred_commits_an_answer_costs_few_requests(hundred: MemoryStorage) -> None:
    repository = zm.open(hundred)
    usage = {one.path: one for one in repository.du().arrays}
    live = len(contents_of(repository.readonly_session().store).view.snapshot.deltas)
    assert 5 < live <= 70
    stats, asked = requests(hundred, lambda repo: repo.du(path="air"))
    assert stats.chunks == usage["/air"].chunks
    # The head and its base, live deltas in one round, the index's directory and one bitmap.
    assert len(asked) <= 5 + live
    assert not [key for key in asked if key.startswith("manifests/")]
    stats, asked = requests(hundred, lambda repo: repo.du(path="other"))
    assert (stats.chunks, stats.nbytes) == (2, 16)
    assert len(asked) <= 3
    region = [slice(100, 110), slice(0, 3)]
    found, asked = requests(
        hundred, lambda repo: initialized_chunks(repo.readonly_session(), "air", region)
    )
    table = contents_of(repository.readonly_session().store)
    every = table.chunks(table.node("air")).coords()
    inner = ((every >= (100, 0)) & (every < (110, 3))).all(axis=1)
    assert found.tolist() == every[inner].tolist()
    assert len(asked) <= 5 + live
    assert not [key for key in asked if key.startswith("manifests/")]


def test_a_compaction_that_loses_its_race_leaves_the_index_as_it_was() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, {"compaction": {"mode": "manual"}})
    session = repository.writable_session()
    make(session, (50,))
    fill(session, [(at,) for at in range(20)])
    session.commit("fill")
    swaps: list[str] = []
    raced: list[str | None] = []

    def hook(name: str) -> None:
        if name != "root.swap":
            return
        swaps.append(name)
        if len(swaps) == 2:  # the first was its claim
            raced.append(zm.open(storage).compact(mode="full").snapshot_id)

    slow = zm.open(storage, runtime=replace(SYSTEM, checkpoint=hook))
    with pytest.raises(FencedError, match="compact"):
        slow.compact(mode="full")
    assert raced == [repository.list_branches()["main"]]
    assert indexed(storage) == (1, 1)
    asked, node_id = presence(storage)
    assert asked.count(node_id) == 20
    assert not asked.counted


def test_what_was_committed_meanwhile_lies_over_the_index() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, {"compaction": {"mode": "manual"}})
    session = repository.writable_session()
    make(session, (50,))
    fill(session, [(at,) for at in range(20)])
    session.commit("fill")
    raced: list[bool] = []

    def hook(name: str) -> None:
        if name == "root.swap" and not raced:
            raced.append(True)
            other = zm.open(storage).writable_session()
            fill(other, [(30,)])
            other.store.delete_sync("air/c/4")
            other.commit("meanwhile")

    slow = zm.open(storage, runtime=replace(SYSTEM, checkpoint=hook))
    assert slow.compact(mode="full").snapshot_id is not None
    assert indexed(storage) == (1, 1)
    found = initialized_chunks(zm.open(storage).readonly_session(), "air")
    assert found[:, 0].tolist() == [at for at in range(20) if at != 4] + [30]


def test_rules_go_by_the_chunks_that_there_are() -> None:
    """Not by the rows that deltas have for them, which are more."""
    storage = MemoryStorage()
    rules = [{"target": "small", "initialized-chunks": [0, 25]}]
    sets = [{"small": {"max-manifest-size": 1_000}}, {"default": {"max-manifest-size": 1_000}}]
    config = {
        "compaction": {"mode": "manual", "size-ratio": 0},
        "chunk-manifests": {"sets": sets, "rules": rules},
    }
    repository = zm.create(storage, config)
    session = repository.writable_session()
    make(session, (50,))
    fill(session, [(at,) for at in range(20)])
    session.commit("fill")
    repository.compact(mode="full")
    for _ in range(3):
        session = zm.open(storage).writable_session()
        fill(session, [(at,) for at in range(20)])
        session.commit("the same again")
    assert not repository.du(estimate=True)["air"].total.chunks_exact
    repository.compact(mode="major")
    (ref,) = contents_of(repository.readonly_session().store).view.manifests
    assert (ref.packed_for, ref.parts[0].count) == ("small", 20)
    assert repository.du(estimate=True)["air"].total.chunks_exact


@settings(max_examples=examples(40))
@given(st.data())
def test_the_index_says_what_manifests_say(data: st.DataObject) -> None:
    storage = MemoryStorage()
    config = {"compaction": {"mode": "manual", "fan-in": 2}, **SMALL_LEAVES}
    repository = zm.create(storage, config)
    session = repository.writable_session()
    make(session, (30, 4))
    session.commit("make")
    for _ in range(data.draw(st.integers(1, 8))):
        session = zm.open(storage).writable_session()
        array = zarr.open_array(session.store, path="air")
        rows = data.draw(st.lists(st.integers(0, array.shape[0] - 1), max_size=15, unique=True))
        match data.draw(st.sampled_from(["set", "set", "unset", "resize", "compact"])):
            case "set":
                fill(session, [(row, row % 4) for row in rows])
            case "unset":
                for row in rows:
                    session.store.delete_sync(f"air/c/{row}/{row % 4}")
            case "resize":
                array.resize((data.draw(st.integers(1, 30)), 4))
            case _:
                mode = data.draw(st.sampled_from(["minor", "major", "full"]))
                ratio = {"compaction": {"size-ratio": data.draw(st.sampled_from([0.0, 0.3]))}}
                zm.open(storage, ratio).compact(mode=mode)
        if session.status():
            session.commit("change")
        usage, stats = zm.open(storage).du(), zm.open(storage).du(path="air")
        assert stats.chunks == usage.chunks
        assert stats.nbytes in (None, usage.nbytes)
        asked, node_id = presence(storage)
        assert asked.count(node_id) == usage.chunks
        assert not asked.counted
