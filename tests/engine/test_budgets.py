"""What opening, reading and committing cost, in storage requests, rounds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Session
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.session import preload_report
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage, LatencyStorage


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


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


@pytest.mark.parametrize("commits", [1, 4])
def test_small_repository_opens_with_its_coordinates_in_one_request(commits: int) -> None:
    counting = CountingStorage(small_repository(commits))
    repository = zm.open(counting, runtime=stopped_clock())
    ds = xr.open_zarr(repository.readonly_session("main").store, consolidated=False)
    np.testing.assert_array_equal(ds.lat.values, np.linspace(90, -90, 20))
    np.testing.assert_array_equal(ds.time.values, np.arange(4 * commits))
    assert ds.sizes == {"time": 4 * commits, "lat": 20, "lon": 30}
    assert [(r.op, r.key) for r in counting.log] == [("get_tagged", "current")]
    assert counting.rounds() == 1
    # A data chunk is one request more.
    counting.reset()
    value = ds.t2m[0, 0, 0].values
    assert value == weather(4).t2m.values[0, 0, 0]
    assert [record.op for record in counting.log] == ["get"]


def many_arrays(arrays: int, *, coordinates: bool = True, commits: int = 1) -> MemoryStorage:
    """Arrays with attributes and chunks in packs, over coordinates that are small."""
    storage = MemoryStorage()
    repository = zm.create(storage, {"compaction": {"mode": "manual"}})
    for turn in range(commits):
        session = repository.writable_session("main")
        group = zarr.open_group(session.store, mode="a", use_consolidated=False)
        for name, size in (("time", 64), ("lat", 30), ("lon", 40)) if coordinates else ():
            values = np.arange(size) * 0.5 + turn
            group.create_array(name, data=values, dimension_names=(name,), overwrite=True)
        group.create_array(
            "v0",
            shape=(64, 30, 40),
            chunks=(16, 30, 40),
            dtype="f4",
            dimension_names=("time", "lat", "lon"),
            attributes={"long_name": "variable 0", "units": "m s-1", "turn": turn},
            overwrite=True,
        )
        written = session.store.get_sync("v0/zarr.json")
        assert written is not None
        document = written.to_bytes()
        for i in range(arrays):
            renamed = document.replace(b"variable 0", f"variable {i}".encode())
            put(session, f"v{i}/zarr.json", renamed)
        put_chunks(session, arrays)
        session.commit(f"all of them, {turn}")
    return storage


def put_chunks(session: Session, arrays: int) -> None:
    rng = np.random.default_rng(0)
    chunk = rng.bytes(3_000)
    for i in range(arrays):
        for at in range(4):
            put(session, f"v{i}/c/{at}/0/0", chunk[rng.integers(1_000) :])


@pytest.mark.parametrize("arrays", [80, 110, 200])
def test_many_arrays_open_with_their_coordinates_in_one_request(arrays: int) -> None:
    """Where the chunks of the others are is not in the way of opening."""
    storage = many_arrays(arrays)
    counting = CountingStorage(storage)
    repository = zm.open(counting, runtime=stopped_clock())
    session = repository.readonly_session("main")
    ds = xr.open_zarr(session.store, consolidated=False)
    assert len(ds.data_vars) == arrays
    assert (ds.time.values[-1], ds.lat.values[-1], ds.lon.values[-1]) == (31.5, 14.5, 19.5)
    assert preload_report(session, wait_s=20).done
    assert [(r.op, r.key) for r in counting.log] == [("get_tagged", "current")]
    assert counting.bytes_read < 16 * 1024
    # Where the chunks are is at hand, or, of so many arrays, in one object.
    counting.reset()
    assert all(session.store.get_sync(f"v{i}/c/0/0/0") is not None for i in range(arrays))
    kinds = [record.key.split("/")[0] for record in counting.log]
    assert (kinds.count("manifests"), kinds.count("chunks")) == (arrays > 80, arrays)


@pytest.mark.parametrize("coordinates", [True, False])
def test_a_run_of_many_arrays_embeds_what_opening_needs(coordinates: bool) -> None:
    storage = many_arrays(110, coordinates=coordinates, commits=2)
    report = zm.open(storage).compact(mode="minor")
    assert (report.deltas_before, report.deltas_after) == (2, 1)
    view = contents_of(zm.open(storage).readonly_session("main").store).view
    (run,) = view.snapshot.deltas
    embedded = {part.node_id for part in run.embedded}
    first = {node.node_id for path, node in view.nodes.items() if path in ("time", "lat", "lon")}
    assert first <= embedded
    assert run.coordinates == coordinates
    assert 0 < len(embedded - first) < 30
    assert len(run.manifests) == 1


def test_only_a_delta_that_opening_needs_embeds_little() -> None:
    storage = many_arrays(110, coordinates=False)
    session = zm.open(storage).writable_session("main")
    put_chunks(session, 110)
    session.commit("other chunks")
    deltas = contents_of(zm.open(storage).readonly_session("main").store).view.snapshot.deltas
    assert [delta.at_open for delta in deltas] == [True, False]
    assert [len(delta.manifests) for delta in deltas] == [1, 0]


def test_a_delta_is_compared_with_its_entry_once_for_all_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = many_arrays(20)
    checked = []
    check = DeltaEntry.check
    monkeypatch.setattr(
        DeltaEntry, "check", lambda entry, delta: (checked.append(entry), check(entry, delta))
    )
    store = zm.open(storage).readonly_session("main").store
    assert all(store.get_sync(f"v{i}/c/0/0/0") is not None for i in range(20))
    assert len(checked) == 1


def test_small_repository_opens_in_one_request_after_a_fold() -> None:
    storage = small_repository(3)
    session = zm.open(storage, {"compaction": {"max-delta-count": 1}}).writable_session("main")
    put(session, "t2m/c/0/0/0", b"x" * 4000)
    session.commit("and fold")
    assert next(zm.open(storage).ancestry()).kind == "rewrite"
    counting = CountingStorage(storage)
    repository = zm.open(counting, runtime=stopped_clock())
    ds = xr.open_zarr(repository.readonly_session("main").store, consolidated=False)
    assert ds.time.size == 12
    assert counting.requests == 1


def test_the_second_session_reads_the_root_again() -> None:
    storage = small_repository()
    counting = CountingStorage(storage)
    repository = zm.open(counting, runtime=stopped_clock())
    repository.readonly_session("main")
    repository.readonly_session("main")
    assert [record.key for record in counting.log] == ["current", "current"]


def test_a_commit_of_another_handle_is_not_missed_by_the_second_session() -> None:
    storage = small_repository()
    repository = zm.open(storage, runtime=stopped_clock())
    repository.readonly_session("main")
    other = zm.open(storage).writable_session("main")
    put(other, "note", b"x")
    snapshot_id = other.commit("of another handle")
    assert repository.readonly_session("main").snapshot_id == snapshot_id


def test_a_commit_of_another_handle_of_this_process_is_not_missed_by_the_first_session() -> None:
    storage = small_repository()
    repository = zm.open(storage, runtime=stopped_clock())
    other = zm.open(storage).writable_session("main")
    put(other, "note", b"x")
    snapshot_id = other.commit("of another handle")
    assert repository.readonly_session("main").snapshot_id == snapshot_id


def test_what_open_has_read_goes_stale() -> None:
    times = [1000.0]
    counting = CountingStorage(small_repository())
    runtime = replace(SYSTEM, monotonic_s=lambda: times[0])
    repository = zm.open(counting, runtime=runtime)
    times[0] += 1.0
    repository.readonly_session("main")
    assert [record.key for record in counting.log] == ["current", "current"]


def test_opening_costs_the_same_with_a_long_history() -> None:
    """A reader never walks to an earlier snapshot."""
    costs = []
    for commits in (2, 40):
        storage = small_repository()
        session = zm.open(storage).writable_session("main")
        for i in range(commits):
            put(session, "t2m/c/0/0/0", bytes([i]) * 4000)
            session.commit(f"{i}")
        counting = CountingStorage(LatencyStorage(storage, latency_s=0))
        repository = zm.open(counting, runtime=stopped_clock())
        ds = xr.open_zarr(repository.readonly_session("main").store, consolidated=False)
        assert ds.lat.size == 20
        costs.append(counting.rounds())
    assert costs[0] == 1
    assert costs[1] <= 2


def test_opening_does_not_touch_the_manifests_of_big_arrays() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, {"compaction": {"max-delta-count": 1}})
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    group.create_array("x", data=np.arange(9000.0), chunks=(9000,), dimension_names=("x",))
    group.create_array("big", shape=(9000,), chunks=(1,), dtype="u1", dimension_names=("x",))
    rng = np.random.default_rng(0)
    for i in range(9000):
        put(session, f"big/c/{i}", rng.bytes(2))
    session.commit("big, and fold")
    counting = CountingStorage(storage)
    repository = zm.open(counting, runtime=stopped_clock())
    ds = xr.open_zarr(repository.readonly_session("main").store, consolidated=False)
    assert ds.x.values[-1] == 8999.0
    kinds = [record.key.split("/")[0] for record in counting.log]
    assert sorted(set(kinds)) == ["chunks", "current"]
    counting.reset()
    assert repository.readonly_session("main").store.get_sync("big/c/17") is not None
    assert [record.key.split("/")[0] for record in counting.log] == ["current", "manifests"]
    assert counting.bytes_read < 100_000


def test_the_second_chunk_of_an_array_fetches_all_other_deltas_in_one_round() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage)
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(9000,), chunks=(1,), dtype="u1")
    session.commit("array")
    rng = np.random.default_rng(0)
    for commit in range(8):
        for i in range(100):
            put(session, f"a/c/{commit * 100 + i}", rng.bytes(300))
        session.commit("a delta with a manifest of its own")
    counting = CountingStorage(LatencyStorage(storage, latency_s=0))
    read = zm.open(counting, runtime=stopped_clock()).readonly_session("main")
    counting.reset()
    assert read.store.get_sync("a/c/0") is not None
    assert (counting.requests, counting.rounds()) == (1, 1)
    counting.reset()
    assert read.store.get_sync("a/c/799") is not None
    assert (counting.requests, counting.rounds()) == (7, 1)
    counting.reset()
    assert all(read.store.get_sync(f"a/c/{i}") is not None for i in range(800))
    assert counting.requests == 0


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


def test_a_commit_whose_uploads_come_in_turn_takes_more_rounds() -> None:
    """The counts tell: one upload apart from the others is a round more."""

    def last_apart[R](calls: Sequence[Callable[[], R]]) -> list[R]:
        return SYSTEM.parallel(calls[:-1]) + SYSTEM.parallel(calls[-1:])

    counting = CountingStorage(LatencyStorage(small_repository(), latency_s=0))
    runtime = replace(SYSTEM, parallel=last_apart)
    session = zm.open(counting, runtime=runtime).writable_session("main")
    put(session, "t2m/c/0/0/0", b"x" * 4000)
    counting.reset()
    session.commit("uploads in two rounds, and the swap")
    assert counting.rounds() == 3


def test_a_warm_commit_of_many_manifests_takes_two_rounds() -> None:
    storage = MemoryStorage()
    session = zm.create(storage).writable_session("main")
    rng = np.random.default_rng(0)
    for name in "abcdef":
        zarr.create_array(session.store, name=name, shape=(5000,), chunks=(1,), dtype="u1")
    session.commit("arrays")
    counting = CountingStorage(LatencyStorage(storage, latency_s=0))
    session = zm.open(counting).writable_session("main")
    for name in "abcdef":
        for i in range(2_500):
            put(session, f"{name}/c/{i}", rng.bytes(400))
    counting.reset()
    session.commit("much")
    created = [r.key.split("/")[0] for r in counting.log if r.op == "create"]
    assert created.count("manifests") >= 3
    assert counting.rounds() == 2


def test_a_rebase_uploads_no_delta_twice() -> None:
    storage = small_repository()
    runtime = replace(SYSTEM, jitter=lambda limit_s: 0.0)
    counting = CountingStorage(LatencyStorage(storage, latency_s=0))
    session = zm.open(counting, runtime=runtime).writable_session("main")
    other = zm.open(storage).writable_session("main")
    put(other, "t2m/c/0/0/0", b"x" * 4000)
    other.commit("came first")
    put(session, "t2m/c/1/0/0", b"y" * 4000)
    counting.reset()
    session.commit("rebased")
    kinds = [record.key.split("/")[0] for record in counting.log if record.op == "create"]
    assert kinds.count("deltas") == 1
    assert kinds.count("snapshots") == 2
    # Upload and swap, what came first (and again after a while), upload and swap.
    assert counting.rounds() <= 6


def _bytes_of_an_append(chunks: int) -> int:
    """Bytes written by appending ten chunks to an array that has so many, after a fold."""
    storage: Storage = MemoryStorage()
    repository = zm.create(storage, {"inline-chunk-bytes": 0})
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(chunks,), chunks=(1,), dtype="u1")
    for i in range(chunks):
        put(session, f"a/c/{i}", i.to_bytes(4, "little"))
    session.commit("base")
    session = zm.open(storage, {"compaction": {"max-delta-count": 1}}).writable_session("main")
    array = zarr.open_array(session.store, path="a")
    array.resize((chunks + 10,))
    session.commit("fold")
    assert contents_of(session.store).view.snapshot.deltas == ()
    counting = CountingStorage(storage)
    session = zm.open(counting).writable_session("main")
    zarr.open_array(session.store, path="a").resize((chunks + 20,))
    for i in range(10):
        put(session, f"a/c/{chunks + 10 + i}", i.to_bytes(4, "little"))
    session.commit("append")
    return counting.bytes_written


def test_bytes_of_a_commit_do_not_grow_with_the_base() -> None:
    small, large = _bytes_of_an_append(10), _bytes_of_an_append(10_000)
    assert large <= 1.3 * small, (small, large)


def test_bytes_of_a_commit_grow_slowly_with_the_deltas_since_the_base() -> None:
    """The read list of a snapshot is all that does.

    Its ids are random, so that its size after compression varies by some hundred bytes.
    """
    counting = CountingStorage(small_repository())
    session = zm.open(counting).writable_session("main")
    costs = []
    for i in range(45):
        put(session, "t2m/c/0/0/0", bytes([i]) * 4000)
        counting.reset()
        session.commit(f"{i}")
        costs.append(sum(r.nbytes for r in counting.log if r.key.split("/")[0] != "chunks"))
    assert max(costs) < 18 * 1024, costs
