"""Zone maps of commits: whatever happens to chunks, an entry that counts is right."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import context_of, root_of
from zarr_manifests import Repository, Session
from zarr_manifests.engine.edit.record_zones import record_zones
from zarr_manifests.engine.snapshot.zones import zones_of
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.root import ZONE_MAPS
from zarr_manifests.format.zone_maps import PAGE_ROWS, Bounds, Zones
from zarr_manifests.grid import Box
from zarr_manifests.planning.zones.entries import taken, valid, zones_of_chunks
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.session import commits_of
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage, LatencyStorage, in_order
from zoned import counting, grow, make, numbers, write

MANUAL = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 0}


def created(storage: Any = None, *, runtime: Runtime | None = None, **config: Any) -> Repository:
    options = MANUAL | {name.replace("_", "-"): value for name, value in config.items()}
    where = storage or MemoryStorage()
    repository = zm.create(where, options, runtime=runtime or in_order())
    session = repository.writable_session()
    make(session)
    session.commit("make")
    return repository


def begun(repository: Repository, branch: str = "main") -> Session:
    return repository.writable_session(branch)


def committed(
    repository: Repository, *steps: Callable[[Session], Any], branch: str = "main"
) -> str:
    session = begun(repository, branch)
    for step in steps:
        step(session)
    return session.commit("write")


def wrote(first: int, last: int, seed: float, **how: Any) -> Callable[[Session], None]:
    return lambda session: write(session, first, last, seed, **how)


def entry_of(repository: Repository, branch: str = "main") -> Any:
    return contents_of(repository.readonly_session(branch).store).view.snapshot.deltas[-1]


@pytest.mark.parametrize(
    "config",
    [
        {"inline_chunk_bytes": 100},
        {"pack_chunk_bytes": 0},
        {},
        {"pack_bytes": 40},
        {"spill_refs": 4},
    ],
    ids=["inline", "native", "packed", "packs", "spilled"],
)
def test_a_commit_has_entries_of_the_chunks_it_wrote(config: dict[str, Any]) -> None:
    repository = created(**config)
    committed(repository, wrote(0, 3, 1), wrote(5, 8, 2))
    assert numbers(counting(repository)) == [0, 1, 2, 5, 6, 7]
    committed(repository, wrote(2, 6, 3))
    assert numbers(counting(repository)) == [*range(8)]
    assert counting(repository)[2,] == (3008, 3011)


@pytest.mark.parametrize("config", [{"inline_chunk_bytes": 100}, {"pack_chunk_bytes": 0}, {}])
def test_an_entry_of_a_chunk_overwritten_in_the_session_is_not_written(
    config: dict[str, Any],
) -> None:
    repository = created(**config)
    committed(repository, wrote(0, 4, 1), wrote(2, 4, 2, record=False))
    zones = context_of(repository).objects.load(entry_of(repository).zones, Zones)
    (table,) = (zones.at(i) for i in range(len(zones.packed)))
    assert table.coords().tolist() == [[0], [1]]
    assert numbers(counting(repository)) == [0, 1]


def test_an_entry_of_a_chunk_overwritten_later_does_not_count() -> None:
    repository = created()
    committed(repository, wrote(0, 4, 1))
    committed(repository, wrote(2, 4, 2, record=False))
    assert numbers(counting(repository)) == [0, 1]
    committed(repository, lambda session: workspace_of(session.store).delete("a/c/1"))
    assert numbers(counting(repository)) == [0]


def test_only_commits_with_entries_write_them_and_need_the_feature() -> None:
    repository = created()
    committed(repository, wrote(0, 4, 1, record=False))
    assert entry_of(repository).zones is None
    assert ZONE_MAPS not in root_of(repository).features
    committed(repository, wrote(4, 8, 1))
    assert entry_of(repository).zones is not None
    assert ZONE_MAPS in root_of(repository).features
    committed(repository, wrote(0, 4, 2, record=False))
    assert ZONE_MAPS in root_of(repository).features


def test_a_commit_with_entries_takes_one_object_and_no_round_more() -> None:
    costs = []
    for record in (False, True):
        storage = CountingStorage(LatencyStorage(MemoryStorage(), latency_s=0.01))
        repository = created(storage, runtime=SYSTEM)
        session = begun(repository)
        write(session, 0, 4, 1, record=record)
        storage.reset()
        session.commit("write")
        costs.append((storage.requests, storage.rounds()))
    (without, rounds), (requests, same) = costs
    assert (requests, same) == (without + 1, rounds)


def test_finding_entries_takes_one_round_for_commits() -> None:
    storage = MemoryStorage()
    repository = created(storage)
    for i in range(8):
        committed(repository, wrote(i, i + 1, i))
    counted = CountingStorage(LatencyStorage(storage, latency_s=0.01))
    cold = zm.open(counted)
    contents = contents_of(cold.readonly_session().store)
    node_id = contents.array_at("a").node_id
    counted.reset()
    found = zones_of(context_of(cold), contents.view, [node_id])[node_id]
    assert len(found.recent) == 8
    assert counted.rounds() == 1


def test_forks_bring_their_entries() -> None:
    repository = created(MemoryStorage("zones-of-forks"))
    session = begun(repository)
    write(session, 0, 2, 1)
    forks = []
    for i in (1, 2):
        fork = pickle.loads(pickle.dumps(session.fork()))
        write(fork, 2 * i - 1, 2 * i + 1, i)
        forks.append(pickle.loads(pickle.dumps(fork)))
    write(session, 6, 7, 1)
    session.merge(*forks)
    write(session, 4, 6, 4)
    session.commit("merged")
    assert numbers(counting(repository)) == [*range(7)]
    assert counting(repository)[1,] == (1004, 1007)


def test_entries_survive_a_rebase() -> None:
    repository = created()
    late, later = begun(repository), begun(repository)
    committed(repository, wrote(0, 2, 1))
    write(late, 2, 4, 2)
    late.commit("rebased in the commit")
    write(later, 4, 6, 3)
    later.rebase()
    later.commit("rebased before")
    assert numbers(counting(repository)) == [*range(6)]


def test_entries_of_chunks_that_lost_do_not_count() -> None:
    repository = created()
    late = begun(repository)
    committed(repository, wrote(0, 2, 1))
    write(late, 1, 3, 2)
    late.commit("theirs wins", rebase="theirs")
    assert counting(repository)[1,] == (1004, 1007)
    assert numbers(counting(repository)) == [0, 1, 2]


def test_entries_move_with_relocated_appends() -> None:
    repository = created()
    committed(repository, wrote(0, 8, 1))
    session, other = begun(repository), begun(repository)
    commits_of(session).relocate_appends("t")
    for seed, one in ((2, other), (3, session)):
        first = grow(one, 2)
        write(one, first, first + 2, seed)
        one.commit("append")
    assert numbers(counting(repository)) == [*range(12)]
    assert counting(repository)[10,] == (3032, 3035)


def test_amending_keeps_the_entries_of_both() -> None:
    repository = created()
    committed(repository, wrote(0, 4, 1))
    session = begun(repository)
    write(session, 2, 6, 2)
    session.amend("both")
    assert numbers(counting(repository)) == [*range(6)]
    assert counting(repository)[2,] == (2008, 2011)


def test_picked_commits_bring_their_entries_and_reverted_chunks_find_theirs() -> None:
    repository = created()
    repository.create_branch("side", repository.list_branches()["main"])
    picked = committed(repository, wrote(0, 2, 1), branch="side")
    repository.cherry_pick(picked)
    assert numbers(counting(repository)) == [0, 1]
    undone = committed(repository, wrote(1, 3, 2))
    repository.revert(undone)
    assert counting(repository) == {(0,): (1000, 1003), (1,): (1004, 1007)}


def test_another_meaning_has_no_entries_until_it_is_the_old_one_again() -> None:
    repository = created()
    committed(repository, wrote(0, 4, 1))

    def marked(value: int | None) -> Callable[[Session], None]:
        def change(session: Session) -> None:
            array = zarr.open_array(session.store, path="a")
            array.attrs.put({} if value is None else {"missing_value": value})

        return change

    committed(repository, marked(1001))
    assert counting(repository) == {}
    committed(repository, marked(None))
    assert numbers(counting(repository)) == [0, 1, 2, 3]


def test_collection_keeps_entries_in_history_and_removes_others() -> None:
    storage = MemoryStorage()
    repository = created(storage)
    committed(repository, wrote(0, 4, 1))
    entry = entry_of(repository).zones
    committed(repository, wrote(4, 8, 1))
    repository.garbage_collect(timedelta(0))
    assert storage.head(entry.key)
    assert repository.verify().problems == ()
    assert numbers(counting(repository)) == [*range(8)]
    first = [info.snapshot_id for info in repository.ancestry()][-1]
    repository.reset_branch("main", first, force=True)
    repository.garbage_collect(timedelta(0))
    assert [info.key for info in storage.list("indexes/")] == []


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_entries_that_cannot_be_read_are_as_if_absent(how: str) -> None:
    storage = MemoryStorage()
    repository = created(storage)
    committed(repository, wrote(0, 4, 1))
    key = entry_of(repository).zones.key
    committed(repository, wrote(4, 8, 1))
    data = storage.get(key)
    storage.delete_many([key])
    if how == "damaged":
        storage.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    fresh = zm.open(storage)
    assert numbers(counting(fresh)) == [4, 5, 6, 7]
    assert [problem.key for problem in fresh.verify().problems] == [key]
    fresh.garbage_collect(timedelta(0))
    storage.put("current", b"damaged")
    zm.recover(storage)
    assert numbers(counting(zm.open(storage))) == [4, 5, 6, 7]


def test_as_many_bounds_as_chunks_are_needed() -> None:
    session = begun(created())
    none = np.zeros(0, np.int64)
    bounds = Bounds(none, none, none > 0, none, none, none)
    with pytest.raises(InvalidArgumentError):
        record_zones(workspace_of(session.store), "a", Box((0,), (1,)), b"m" * 16, bounds)


def test_many_entries_are_packed_in_memory() -> None:
    session = begun(created())
    contents = contents_of(session.store)
    contents.changes.spill = None
    n = PAGE_ROWS + 10
    zeros, at = np.zeros(n, np.int64), np.arange(n)
    sessions = (workspace_of(session.store).keys.session_id,)
    place = (zeros + 2, zeros, zeros, at * 9, zeros + 9, zeros)
    table = ChunkTable(Box((0,), (n,)), None, *place, sessions, b"")
    bounds = Bounds(at, at, zeros == 0, zeros, zeros, zeros + 1)
    zones = zones_of_chunks(b"m" * 16, table, bounds)
    assert zones is not None
    contents.changes.add_zones(b"n" * 12, taken(zones, at < n // 2) or zones)
    contents.changes.add_zones(b"n" * 12, taken(zones, at >= n // 2) or zones)
    ((packed,),) = contents.changes.zones.values()
    assert isinstance(packed, bytes)
    (back,) = contents.changes.zones_of(b"n" * 12)
    assert valid(back, table).all()
