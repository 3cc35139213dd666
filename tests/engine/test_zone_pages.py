"""Zone maps of runs and leaves: carried by compactions, whose pages are found in few rounds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import context_of, root_of
from zarr_manifests import Repository
from zarr_manifests.engine.objects.metadata import ObjectReader
from zarr_manifests.engine.snapshot.index_directory import index_directory
from zarr_manifests.engine.snapshot.zones import read_pages, zones_of
from zarr_manifests.format.root import ZONE_MAPS
from zarr_manifests.repository import build_index
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage, LatencyStorage, in_order
from zoned import counting, created, grow, make, numbers, pages_of, write


def wrote(repository: Repository, first: int, last: int, seed: float, **how: Any) -> str:
    session = repository.writable_session()
    write(session, first, last, seed, **how)
    return session.commit(f"write {first} to {last}")


def entries(repository: Repository) -> int:
    contents = contents_of(repository.readonly_session().store)
    return sum(entry.zones is not None for entry in contents.view.snapshot.deltas)


def test_runs_have_the_entries_that_still_count() -> None:
    repository = created(compaction={"mode": "manual", "fan-in": 2})
    for i in range(6):
        wrote(repository, i, i + 2, i)
    wrote(repository, 0, 1, 9, record=False)
    assert entries(repository) == 6
    assert repository.compact(mode="minor").snapshot_id is not None
    assert 0 < entries(repository) < 6
    assert numbers(counting(repository)) == [1, 2, 3, 4, 5, 6]
    assert repository.verify().problems == ()


def test_a_run_without_entries_has_no_object() -> None:
    repository = created()
    for i in range(4):
        wrote(repository, i, i + 1, i, record=False)
    repository.compact(mode="minor")
    assert entries(repository) == 0
    assert ZONE_MAPS not in root_of(repository).features


@pytest.mark.parametrize("config", [{}, {"inline-chunk-bytes": 100}])
def test_compaction_turns_entries_into_pages_of_leaves(config: dict[str, Any]) -> None:
    repository = created(**config)
    wrote(repository, 0, 8, 1)
    wrote(repository, 2, 4, 2)
    wrote(repository, 3, 4, 3, record=False)
    before = counting(repository)
    repository.compact(mode="full")
    assert entries(repository) == 0
    assert counting(repository) == before
    assert numbers(before) == [0, 1, 2, 4, 5, 6, 7]
    pages = pages_of(repository)
    assert pages is not None
    (page,) = pages.pages
    assert (page.count, page.complete) == (7, False)
    assert (pages.bounds.low[0], pages.bounds.high[0]) == (1000, 2011)
    assert repository.verify().problems == ()


def test_pages_are_carried_to_newer_leaves_and_kept_for_those_that_stay() -> None:
    sets = {
        "splitting": [{"path": ".*", "along": {0: 4}}],
        "sets": [{"default": {"max-manifest-size": 4}}],
    }
    repository = created(chunks=16, **{"chunk-manifests": sets})
    wrote(repository, 0, 16, 1)
    repository.compact(mode="full")
    before = pages_of(repository)
    assert before is not None
    assert len(before.pages) == 4
    assert all(page.complete for page in before.pages)
    wrote(repository, 1, 2, 2)
    wrote(repository, 2, 3, 2, record=False)
    repository.compact(mode="major")
    rewritten = pages_of(repository)
    assert rewritten is not None
    assert {page.blob.key for page in rewritten.pages} & {page.blob.key for page in before.pages}
    assert sum(page.complete for page in rewritten.pages) == 3
    assert numbers(counting(repository)) == [n for n in range(16) if n != 2]
    repository.compact(mode="full")
    assert numbers(counting(repository)) == [n for n in range(16) if n != 2]
    after = pages_of(repository)
    assert after is not None
    assert sum(page.count for page in after.pages) == 15


def test_a_page_is_complete_only_if_every_chunk_of_its_leaf_has_an_entry() -> None:
    repository = created()
    wrote(repository, 0, 6, 1)
    repository.compact(mode="full")
    pages = pages_of(repository)
    assert pages is not None
    assert [(page.count, page.complete) for page in pages.pages] == [(6, True)]


def test_a_compaction_reads_nothing_for_zone_maps_where_there_are_none() -> None:
    costs = []
    for record in (True, False):
        storage = CountingStorage(MemoryStorage())
        repository = created(storage)
        wrote(repository, 0, 8, 1, record=record)
        storage.reset()
        repository.compact(mode="full")
        costs.append([one for one in storage.log if one.key.startswith("indexes/")])
    with_zones, without = costs
    assert [one.op for one in without] == ["create", "create"]  # bitmaps and directory
    assert len(with_zones) > len(without)


def test_a_new_meaning_leaves_old_entries_behind() -> None:
    repository = created()
    wrote(repository, 0, 4, 1)
    repository.compact(mode="full")
    session = repository.writable_session()
    zarr.open_array(session.store, path="a").attrs["missing_value"] = 3
    session.commit("another meaning")
    wrote(repository, 4, 8, 2)
    repository.compact(mode="full")
    assert numbers(counting(repository)) == [4, 5, 6, 7]


def test_pages_of_deleted_arrays_go_with_them() -> None:
    storage = MemoryStorage()
    repository = created(storage)
    wrote(repository, 0, 8, 1)
    repository.compact(mode="full")
    session = repository.writable_session()
    make(session, "b")
    write(session, 0, 4, 2, "b")
    del zarr.open_group(session.store)["a"]
    session.commit("another array")
    repository.compact(mode="full")
    tip = root_of(repository).branches["main"]
    assert len(index_directory(context_of(repository), tip.index).zones) == 1
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(timedelta(0))
    assert len([*storage.list("indexes/")]) == 4  # directory, bitmaps, pages, entries
    assert numbers(counting(repository, "b")) == [0, 1, 2, 3]
    assert repository.verify().problems == ()


@pytest.mark.parametrize("leaves", [False, True])
def test_repacked_chunks_keep_their_entries(leaves: bool) -> None:
    repository = created()
    wrote(repository, 0, 8, 1)
    if leaves:
        repository.compact(mode="full")
    wrote(repository, 0, 5, 2, record=False)
    assert repository.compact(mode="packs", min_live=0.9).chunks == 3
    assert numbers(counting(repository)) == [5, 6, 7]
    assert repository.verify().problems == ()


def test_an_index_built_during_a_compaction_stays() -> None:
    repository = created()
    wrote(repository, 0, 8, 1)
    repository.compact(mode="full")
    build_index(repository)
    assert numbers(counting(repository)) == [*range(8)]
    assert pages_of(repository) is not None


@pytest.mark.parametrize("what", ["pages", "entries", "directory"])
@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_pages_that_cannot_be_read_are_as_if_absent(what: str, how: str) -> None:
    storage = MemoryStorage()
    repository = created(storage)
    wrote(repository, 0, 4, 1)
    repository.compact(mode="full")
    wrote(repository, 4, 8, 1)
    tip = root_of(repository).branches["main"]
    assert tip.index is not None
    directory = index_directory(context_of(repository), tip.index)
    (pages,) = directory.zones.values()
    listed = pages_of(repository)
    assert listed is not None
    key = {"pages": pages, "entries": listed.blobs[0], "directory": tip.index}[what].key
    data = storage.get(key)
    storage.delete_many([key])
    if how == "damaged":
        storage.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    fresh = zm.open(storage, runtime=in_order())
    assert numbers(counting(fresh)) == [4, 5, 6, 7]
    assert fresh.verify().problems[0].key == key
    fresh.compact(mode="full")
    assert numbers(counting(fresh)) == [4, 5, 6, 7]
    fresh.garbage_collect(timedelta(0))
    assert numbers(counting(zm.open(storage))) == [4, 5, 6, 7]


_OFTEN = {
    "compaction": {
        "mode": "auto",
        "min-delta-count": 4,
        "max-delta-count": 12,
        "interval-commits": 8,
    },
}
_AS_USUAL = {"compaction": {"mode": "auto"}}


@pytest.mark.parametrize(
    ("appends", "config"),
    [(120, _OFTEN), pytest.param(3_000, _AS_USUAL, marks=pytest.mark.sweep)],
    ids=["120", "3000"],
)
def test_after_many_appends_entries_are_found_in_three_rounds(
    appends: int, config: dict[str, Any]
) -> None:
    storage = MemoryStorage()
    repository = created(storage, chunks=1, **config)
    wrote(repository, 0, 1, 0)
    session = repository.writable_session()
    for seed in range(1, appends):
        at = grow(session, 1)
        write(session, at, at + 1, seed)
        session.commit("append")
    counted = CountingStorage(LatencyStorage(storage, latency_s=0.01))
    cold = zm.open(counted)
    session = cold.readonly_session()
    contents = contents_of(session.store)
    node_id = contents.array_at("a").node_id
    counted.reset()
    known = zones_of(context_of(cold), contents.view, [node_id])[node_id]
    assert known.pages is not None
    tables = read_pages(context_of(cold), known.pages, range(len(known.pages.pages)))
    assert counted.rounds() <= 3
    found = np.concatenate([table.coords() for table in (*known.recent, *tables.values())])
    assert len(np.unique(found)) == appends
    assert numbers(counting(repository)) == [*range(appends)]
    assert isinstance(context_of(cold).objects, ObjectReader)
