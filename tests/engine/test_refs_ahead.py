"""Refs are made ahead where chunks are read one after another; no answer is another for it."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Repository
from zarr_manifests.engine.snapshot import read_ahead as ahead
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.grid import Box
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.testing import CountingStorage

CONFIG = {"inline-chunk-bytes": 0, "compaction": {"mode": "manual"}}
SIDE = 40


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Coordinates that were looked up one by one."""
    found: list[tuple[int, ...]] = []
    true = SnapshotView.lookup

    def noted(self: SnapshotView, node_id: bytes, coords: tuple[int, ...]) -> Any:
        found.append(coords)
        return true(self, node_id, coords)

    monkeypatch.setattr(SnapshotView, "lookup", noted)
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many refs were made ahead, each time."""
    found: list[int] = []
    true = SnapshotView.following

    def noted(self: SnapshotView, *args: Any) -> Any:
        following = true(self, *args)
        found.append(len(following or ()))
        return following

    monkeypatch.setattr(SnapshotView, "following", noted)
    return found


def make(storage: Any = None) -> Repository:
    """An array of 40 x 40 chunks of one number each, its place."""
    repository = zm.create(storage or MemoryStorage(), CONFIG)
    with repository.transaction(message="make a") as store:
        array = zarr.create_array(
            store, name="a", shape=(SIDE, SIDE), chunks=(1, 1), dtype="i4", compressors=None
        )
        array[:] = values()
    return repository


def values() -> np.ndarray:
    return 1 + np.arange(SIDE * SIDE, dtype="i4").reshape(SIDE, SIDE)


def key(i: int, j: int, name: str = "a") -> str:
    return f"{name}/c/{i}/{j}"


def read(store: ManifestStore, at: str) -> int | None:
    found = store.get_sync(at)
    return None if found is None else int.from_bytes(found.to_bytes(), "little")


def in_order() -> Iterator[tuple[int, int]]:
    return iter(np.ndindex(SIDE, SIDE))  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["deltas", "base"])
def test_few_chunks_of_an_array_that_is_read_are_looked_up(
    where: str, lookups: list[tuple[int, ...]], made: list[int]
) -> None:
    repository = make()
    if where == "base":
        repository.compact(mode="full")
    store = repository.readonly_session().store
    assert [read(store, key(*at)) for at in in_order()] == values().ravel().tolist()
    assert len(lookups) < 20  # of 1,600
    assert max(made) == ahead.MOST
    assert sum(made) <= SIDE * SIDE


def test_threads_that_share_the_chunks_find_them_too(lookups: list[tuple[int, ...]]) -> None:
    store = make().readonly_session().store
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda at: read(store, key(*at)), in_order()))
    assert found == values().ravel().tolist()
    assert len(lookups) < 800


def test_no_more_is_made_in_vain_than_was_asked_for(made: list[int]) -> None:
    repository = make()
    for asked in (9, 20, 77, 299, 1_000):
        made.clear()
        store = repository.readonly_session().store
        for at in list(in_order())[:asked]:
            read(store, key(*at))
        assert 0 < sum(made) <= 2 * asked


def test_who_reads_here_and_there_has_nothing_made(made: list[int]) -> None:
    store = make().readonly_session().store
    places = list(in_order())
    random.Random(1).shuffle(places)
    for at in places:
        assert read(store, key(*at)) == values()[at]
    assert sum(made) < len(places) / 20


def test_nothing_is_fetched_for_it() -> None:
    """Each leaf is fetched when its first chunk is asked for, and not before."""
    storage = CountingStorage(MemoryStorage())
    make(storage).compact(mode="full")
    store = zm.open(storage).readonly_session().store
    read(store, key(0, 0))
    storage.reset()
    for at in in_order():
        read(store, key(*at))
    kinds = {record.key.partition("/")[0] for record in storage.log}
    assert kinds <= {"chunks"}


def test_a_reader_that_goes_on_sees_what_is_new() -> None:
    repository = make()
    session = repository.readonly_session()
    for at in list(in_order())[:300]:
        read(session.store, key(*at))
    with repository.transaction(message="overwrite, delete, move") as store:
        zarr.open_array(store, path="a")[:, 1] = 7
        store.delete_sync(key(7, 5))
    assert read(session.store, key(7, 1)) == values()[7, 1]
    session.rebase()
    for i in range(SIDE):
        assert read(session.store, key(i, 1)) == 7
    assert read(session.store, key(7, 5)) is None


def test_a_reader_that_follows_sees_what_is_new() -> None:
    repository = make()
    store = repository.readonly_session(follow=True, follow_interval=timedelta(0)).store
    for at in list(in_order())[:300]:
        read(store, key(*at))
    with repository.transaction(message="overwrite") as other:
        zarr.open_array(other, path="a")[:] = 7
    assert {read(store, key(*at)) for at in in_order()} == {7}


def test_chunks_of_an_array_under_another_name_are_its_own() -> None:
    repository = make()
    with repository.transaction(message="another") as store:
        array = zarr.create_array(
            store, name="b", shape=(SIDE, SIDE), chunks=(1, 1), dtype="i4", compressors=None
        )
        array[:] = -values()
    store = repository.readonly_session().store
    for at in in_order():
        assert read(store, key(*at)) == values()[at]
        assert read(store, key(*at, name="b")) == 2**32 - int(values()[at])


def test_a_chunk_of_an_array_below_another_is_found_there(tmp_path: Path) -> None:
    """Its key may be one of both; that with the longest path counts."""
    (tmp_path / "file").write_bytes(bytes(10))
    storage, containers = MemoryStorage(), {"files": tmp_path}
    repository = zm.create(storage, CONFIG, virtual_containers=containers)
    with repository.transaction(message="an array below") as store:
        side = (SIDE, SIDE)
        zarr.create_array(store, name="a", shape=side, chunks=(1, 1), dtype="i4", compressors=None)
        document = json.loads(store.get_sync("a/zarr.json").to_bytes())
        document["shape"] = [SIDE, 9]
        document["chunk_key_encoding"] = {"name": "v2", "configuration": {"separator": "/"}}
        store.set_sync("a/c/zarr.json", cpu.Buffer.from_bytes(json.dumps(document).encode()))
        n, files = SIDE * SIDE, [(tmp_path / "file").as_uri()]
        index = np.array(list(in_order()))
        store.set_virtual_refs("a", index, files, [0] * n, [0] * n, [4] * n)
    store = repository.readonly_session().store
    for i, j in in_order():
        assert (contents_of(store).find(key(i, j)) is None) == (j < 9)


@pytest.mark.parametrize("where", ["deltas", "base"])
def test_what_was_cut_off_does_not_come_back(where: str) -> None:
    repository = make()
    if where == "base":
        repository.compact(mode="full")
    for shape in ((SIDE, 9), (SIDE, SIDE)):
        with repository.transaction(message="resize") as store:
            zarr.open_array(store, path="a").resize(shape)
    store = repository.readonly_session().store
    for i, j in in_order():
        assert read(store, key(i, j)) == (values()[i, j] if j < 9 else None)


def test_what_is_laid_over_a_base_is_seen(made: list[int]) -> None:
    repository = make()
    repository.compact(mode="full")
    with repository.transaction(message="overwrite, delete") as store:
        zarr.open_array(store, path="a")[:, 3] = 7
        for i in range(SIDE):
            store.delete_sync(key(i, 5))
    store = repository.readonly_session().store
    for i, j in in_order():
        assert read(store, key(i, j)) == {3: 7, 5: None}.get(j, values()[i, j])
    assert max(made) == ahead.MOST - ahead.MOST // SIDE


def test_where_none_can_be_made_it_is_not_tried_at_each_chunk(made: list[int]) -> None:
    repository = zm.create(MemoryStorage())
    with repository.transaction(message="inline chunks") as store:
        zarr.create_array(store, name="a", shape=(SIDE, SIDE), chunks=(1, 1), dtype="i4")
        zarr.open_array(store, path="a")[:] = 1
    store = repository.readonly_session().store
    assert all(contents_of(store).find(key(*at)) is not None for at in in_order())
    assert set(made) == {0}
    assert len(made) < SIDE * SIDE / 50


def test_what_lies_beside_a_base_is_made_too(made: list[int]) -> None:
    repository = make()
    repository.compact(mode="full")
    with repository.transaction(message="append") as store:
        array = zarr.open_array(store, path="a")
        array.resize((2 * SIDE, SIDE))
        array[SIDE:] = values()
    store = repository.readonly_session().store
    for i, j in in_order():
        assert read(store, key(SIDE + i, j)) == values()[i, j]
    assert max(made) == ahead.MOST


def test_what_was_deleted_is_not_there(made: list[int]) -> None:
    repository = make()
    with repository.transaction(message="delete") as store:
        for i in range(SIDE):
            store.delete_sync(key(i, 5))
    store = repository.readonly_session().store
    for i, j in in_order():
        assert read(store, key(i, j)) == (None if j == 5 else values()[i, j])
    assert sum(made) > SIDE


@pytest.mark.slow
def test_two_arrays_that_take_turns_are_not_one_after_another(made: list[int]) -> None:
    repository = make()
    with repository.transaction(message="another") as store:
        zarr.create_array(store, name="b", shape=(SIDE, SIDE), chunks=(1, 1), dtype="i4")
        zarr.open_array(store, path="b")[:] = 1
    store = repository.readonly_session().store
    for name in ("a", "b"):  # the nearest array is known
        read(store, key(0, 0, name)), read(store, key(0, 1, name))
    for at in in_order():
        for name in ("a", "b"):
            assert contents_of(store).find(key(*at, name)) is not None
    assert made == []


def test_what_is_known_of_a_view_is_told_of_no_other() -> None:
    repository = make()
    view, other = (contents_of(repository.readonly_session().store).view for _ in range(2))
    known, node = ahead.RefsAhead(SYSTEM), view.nodes["a"]
    assert view.lookup(node.node_id, (0, 0)) != view.lookup(node.node_id, (0, 1))
    for j in range(4):
        known.note(view, node, (0, j))
    assert known.find(view, key(0, 5)) == view.lookup(node.node_id, (0, 5))
    assert known.find(other, key(0, 5)) is None


def test_a_chunk_that_is_looked_up_late_ends_no_run() -> None:
    """As where a thread looks it up, and the event loop has gone on."""
    view = contents_of(make().readonly_session().store).view
    known, node = ahead.RefsAhead(SYSTEM), view.nodes["a"]
    for j in (0, 1, 2, 3, 2, 8):
        known.note(view, node, (0, j))
    assert known.find(view, key(0, 9)) is not None


def test_who_begins_anew_has_refs_made_anew() -> None:
    """Several chunks that a run has passed are another run."""
    view = contents_of(make().readonly_session().store).view
    known, node = ahead.RefsAhead(SYSTEM), view.nodes["a"]
    for j in (0, 1, 2, 3, 8):
        known.note(view, node, (0, j))
    known._kept = None, {}
    for j in range(12):
        known.note(view, node, (0, j))
    assert known.find(view, key(0, 13)) is not None


def test_a_view_that_a_reader_has_left_is_kept_no_longer() -> None:
    repository = make()
    session = repository.readonly_session()
    for at in list(in_order())[:100]:
        read(session.store, key(*at))
    left = contents_of(session.store).view
    assert any(isinstance(one, tuple) for one in gc.get_referrers(left))
    with repository.transaction(message="overwrite") as store:
        zarr.open_array(store, path="a")[0, 0] = 7
    session.rebase()
    assert not any(isinstance(one, tuple) for one in gc.get_referrers(left))


def test_a_table_that_is_not_in_memory_any_more_is_not_fetched_for_it() -> None:
    repository = make()
    repository.compact(mode="full")
    store = repository.readonly_session().store
    view = contents_of(store).view
    node = view.nodes["a"]
    assert node.array is not None
    view.lookup(node.node_id, (0, 0)), view.lookup(node.node_id, (0, 1))
    ask = (node.node_id, (0, 1), 5, node.array.grid)
    made = view.following(*ask)
    assert made is not None
    assert [coords for coords, _ in made] == [(0, j) for j in range(2, 7)]
    contents_of(store).context.objects.cache.clear()
    assert view.following(*ask) is None
    assert view.following(*ask, fetch=True) == made


def test_rows_beyond_the_grid_are_nobodys_chunks() -> None:
    """As a damaged or hostile table may have them."""
    repository = make()
    view = contents_of(repository.readonly_session().store).view
    node = view.nodes["a"]
    view.lookup(node.node_id, (0, 0)), view.lookup(node.node_id, (0, 1))
    made = view.following(node.node_id, (0, 1), SIDE, Box((0, 0), (SIDE, SIDE - 1)))
    assert made is not None
    assert [coords for coords, _ in made] == [
        *((0, j) for j in range(2, SIDE - 1)),
        *((1, j) for j in range(3)),
    ]


def test_a_writer_reads_what_it_has_written(made: list[int]) -> None:
    session = make().writable_session()
    for at in in_order():
        read(session.store, key(*at))
    zarr.open_array(session.store, path="a")[:] = 7
    assert {read(session.store, key(*at)) for at in in_order()} == {7}
    assert made == []


STEPS = st.tuples(
    st.sampled_from(["set", "delete", "compact", "minor", "shrink", "grow"]),
    st.integers(0, 11),
    st.integers(1, 12),
)
RUNS = st.lists(st.tuples(st.integers(0, 143), st.integers(1, 144)), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(STEPS, max_size=6), RUNS)
def test_every_chunk_is_what_it_is_looked_up_to_be(
    steps: list[tuple[str, int, int]], runs: list[tuple[int, int]]
) -> None:
    """After any history, whatever is asked for one after another."""
    repository = zm.create(MemoryStorage(), CONFIG)
    with repository.transaction(message="make a") as store:
        zarr.create_array(store, name="a", shape=(12, 12), chunks=(1, 1), dtype="i4")
        zarr.open_array(store, path="a")[:] = 1
    for number, (what, start, many) in enumerate(steps, 2):
        if what in ("compact", "minor"):
            repository.compact(mode="full" if what == "compact" else "minor")
            continue
        with repository.transaction(message=what) as store:
            array = zarr.open_array(store, path="a")
            if what == "set":
                array[start : start + many] = number
            elif what == "delete":
                for j in range(many):
                    store.delete_sync(key(j, start))
            else:
                array.resize((12, min(start + 1, 12)) if what == "shrink" else (12, 12))
    store, fresh = (repository.readonly_session().store for _ in range(2))
    for first, many in runs:
        for at in range(first, min(first + many, 144)):
            sought = key(*divmod(at, 12))
            contents_of(fresh).start_at(contents_of(fresh).view)  # nothing was asked of it yet
            assert contents_of(store).find(sought) == contents_of(fresh).find(sought)
