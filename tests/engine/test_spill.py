"""A session that keeps few refs in memory does all that one does that keeps all of them.

What else it does is compared with dictionaries in test_workspace.py and in tests/api/test_bulk.py,
and with one writer in test_forks_of_forks.py.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from storages import CountingStorage, CrashDisk
from zarr_manifests import Repository, Session
from zarr_manifests.errors import FencedError
from zarr_manifests.storage.memory import MemoryStorage
from zoned import created, write

BUDGET = 8


def make(storage: Any, spill_refs: int = BUDGET) -> Repository:
    """With an array of 60 chunks, none of which is there."""
    config = {
        "inline-chunk-bytes": 0,
        "pack-chunk-bytes": 0,
        "spill-refs": spill_refs,
        "compaction": {"mode": "manual"},
    }
    repository = zm.create(storage, config)
    with repository.transaction(message="array") as store:
        zarr.create_array(
            store, name="a", shape=(60,), chunks=(1,), dtype="u1", compressors=None,
            dimension_names=["time"],
        )  # fmt: skip
    return repository


def values(source: Session | Repository) -> list[int]:
    session = source.readonly_session() if isinstance(source, Repository) else source
    return np.asarray(zarr.open_array(session.store, path="a")[:]).tolist()


def test_appends_land_behind_those_of_others() -> None:
    repository = make(storage := MemoryStorage())
    sessions = [repository.writable_session(append_dim="time") for _ in "12"]
    for session, many in zip(sessions, (3, 50), strict=True):
        array = zarr.open_array(session.store, path="a")
        array.resize((60 + many,))
        array[60:] = np.arange(many) + many
    assert [*storage.list("manifests/")]
    for session in sessions:
        session.commit("append")
    assert values(repository)[60:] == [3, 4, 5, *range(50, 100)]
    assert repository.verify().ok


def test_statistics_of_what_is_spilled_are_not_looked_for() -> None:
    where = CountingStorage(MemoryStorage())
    few = {"spill-refs": 8, "pack-chunk-bytes": 0, "cache": {"max-size": 0}}
    repository = created(where, 40, **few)
    session = repository.writable_session()
    write(session, 0, 40, 1)
    assert any(record.key.startswith("manifests/") for record in where.log)
    read = [one.key for one in where.log if one.op == "get" and one.key.startswith("manifests/")]
    assert read == []
    session.commit("values")
    assert repository.verify().ok


def test_a_leased_writer_keeps_what_it_has_spilled() -> None:
    repository = make(storage := MemoryStorage())
    with repository.writable_session(lease=timedelta(minutes=2)) as session:
        zarr.open_array(session.store, path="a")[:] = 7
        assert [*storage.list("manifests/")]
        with repository.transaction(message="go on") as store:
            zarr.create_group(store, path="g")
        repository.garbage_collect(grace=timedelta(0))
        session.commit("bulk")
    assert values(repository) == [7] * 60
    assert repository.verify().ok


def test_a_writer_whose_chunks_were_collected_is_told_so_if_it_has_spilled() -> None:
    repository = make(MemoryStorage())
    session = repository.writable_session()
    array = zarr.open_array(session.store, path="a")
    array[:] = 7
    array[3] = 8
    with repository.transaction(message="go on") as store:
        zarr.create_group(store, path="g")
    repository.garbage_collect(grace=timedelta(0))
    with pytest.raises(FencedError):
        session.commit("bulk")


def test_what_is_spilled_while_forks_are_merged_survives_a_crash(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path / "repository")
    storage = disk.storage()
    session = make(storage, 30).writable_session()
    forks = [session.fork() for _ in range(3)]
    for i, fork in enumerate(forks):  # two have more than there is room for
        zarr.open_array(fork.store, path="a")[20 * i : 20 * (i + 1)] = i + 1
    session.merge(*forks)
    assert [*storage.list("manifests/")]
    session.commit("all of them")
    disk.crash()
    reader = zm.open(storage)
    assert values(reader) == [1] * 20 + [2] * 20 + [3] * 20
    assert reader.verify().ok


@pytest.mark.parametrize("budget", [10_000_000, 40, 12])
def test_a_copy_that_is_merged_again_brings_nothing_back(budget: int) -> None:
    """However many chunks it has: in memory one by one, as tables, or not in memory."""
    repository = make(MemoryStorage(), budget)
    session = repository.writable_session()
    fork = session.fork()
    array = zarr.open_array(fork.store, path="a")
    array[:30] = 7
    session.merge(fork)
    session.store.delete_sync("a/c/1")
    array[30:50] = 8
    session.merge(fork)
    session.store.delete_sync("a/c/40")
    array[2] = array[55] = 5
    session.merge(fork)
    expected = [7] * 30 + [8] * 20 + [0] * 10
    expected[1] = expected[40] = 0
    expected[2] = expected[55] = 5
    assert values(session) == expected
    session.commit("merged")
    assert values(repository) == expected
