"""What opening, reading and committing cost, in storage requests, rounds and bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from storages import CountingStorage, LatencyStorage
from stored import put
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage


def stopped_clock() -> Runtime:
    return replace(SYSTEM, monotonic_s=lambda: 1000.0)


def weather(n: int) -> xr.Dataset:
    return xr.Dataset(
        {"t2m": (("time", "lat", "lon"), np.random.default_rng(0).normal(size=(n, 20, 30)))},
        coords={
            "time": np.arange(n, dtype="int64"),
            "lat": np.linspace(90, -90, 20),
            "lon": np.linspace(0, 348, 30),
        },
    )


def small_repository(commits: int = 1) -> MemoryStorage:
    """A dataset whose data chunks are objects and whose coordinates are small."""
    storage = MemoryStorage()
    repository = zm.create(storage)
    for i in range(commits):
        session = repository.writable_session("main")
        data = weather(4).assign_coords(time=np.arange(4) + 4 * i)
        how = {"append_dim": "time"} if i else {"encoding": {"t2m": {"chunks": (2, 20, 30)}}}
        data.to_zarr(session.store, consolidated=False, zarr_format=3, **how)
        session.commit(f"months {i}")
    return storage


# --- opening ---------------------------------------------------------------------------------


@pytest.mark.parametrize("folded", [False, True])
def test_a_small_repository_opens_with_its_coordinates_in_one_request(folded: bool) -> None:
    storage = small_repository(4)
    if folded:
        zm.open(storage).compact(mode="full")
    counting = CountingStorage(storage)
    repository = zm.open(counting, runtime=stopped_clock())
    ds = xr.open_zarr(repository.readonly_session("main").store, consolidated=False)
    np.testing.assert_array_equal(ds.lat.values, np.linspace(90, -90, 20))
    np.testing.assert_array_equal(ds.time.values, np.arange(16))
    assert [(r.op, r.key) for r in counting.log] == [("get_tagged", "current")]
    # A data chunk is one request more.
    counting.reset()
    assert ds.t2m[0, 0, 0].values == weather(4).t2m.values[0, 0, 0]
    assert [record.op for record in counting.log] == ["get"]


def test_a_commit_of_others_is_not_missed_by_a_session() -> None:
    """The first may use what `open` has read, unless that was a while ago; others ask again."""
    storage, times = small_repository(), [1000.0]
    counting = CountingStorage(storage)
    repository = zm.open(counting, runtime=replace(SYSTEM, monotonic_s=lambda: times[0]))
    times[0] += 1.0
    repository.readonly_session("main")
    assert [record.key for record in counting.log] == ["current", "current"]
    other = zm.open(storage).writable_session("main")
    put(other, "note", b"x")
    snapshot_id = other.commit("of another handle")
    assert repository.readonly_session("main").snapshot_id == snapshot_id
    assert counting.requests == 3


# --- committing ------------------------------------------------------------------------------


def test_a_warm_commit_takes_two_rounds() -> None:
    storage = small_repository()
    counting = CountingStorage(LatencyStorage(storage, latency_s=0))
    session = zm.open(counting).writable_session("main")
    for i in range(3):
        put(session, "t2m/c/0/0/0", bytes([i]) * 4000)
        counting.reset()
        session.commit(f"{i}")
        assert counting.rounds() == 2
        # What follows the swap is not waited for.
        due = [(r.op, r.key.split("/")[0]) for r in counting.log if r.op in ("create", "cas")]
        assert sorted(due[:-1]) == [
            ("create", "chunks"),
            ("create", "deltas"),
            ("create", "root"),
            ("create", "snapshots"),
        ]
        assert due[-1] == ("cas", "current")
        assert {r.op for r in counting.log} <= {"create", "cas", "sync", "create_after"}


def test_a_warm_commit_to_a_disk_takes_three_rounds(tmp_path: Path) -> None:
    """In its turn it reads the root, has everything on the disk at once, and swaps."""
    counting = CountingStorage(LocalStorage(tmp_path))
    session = zm.create(counting).writable_session("main")
    zarr.create_array(session.store, name="a", shape=(30, 2**18), chunks=(1, 2**18), dtype="u1")
    session.commit("an array")
    for i in range(3):
        for chunk in range(10):
            put(session, f"a/c/{10 * i + chunk}/0", bytes([i + 1]) * 2**18)
        counting.reset()
        session.commit("a pack of 2.5 MB")
        log = [(r.op, r.key.split("/")[0]) for r in counting.log]
        assert log[0] == ("get_tagged", "current")
        assert ("create", "chunks") in log
        assert counting.rounds() == 3, log


def test_bytes_of_a_commit_do_not_grow_with_the_base() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, {"inline-chunk-bytes": 0, "compaction": {"mode": "manual"}})
    written = []
    for chunks in (10, 5_000):
        session = repository.writable_session("main")
        zarr.create_array(
            session.store, name="a", shape=(chunks + 10,), chunks=(1,), dtype="u1", overwrite=True
        )
        for i in range(chunks):
            put(session, f"a/c/{i}", i.to_bytes(4, "little"))
        session.commit("base")
        repository.compact(mode="full")
        counting = CountingStorage(storage)
        session = zm.open(counting).writable_session("main")
        for i in range(chunks, chunks + 10):
            put(session, f"a/c/{i}", i.to_bytes(4, "little"))
        session.commit("append")
        written.append(counting.bytes_written)
    assert written[1] <= 1.3 * written[0]
