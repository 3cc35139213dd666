"""What a session writes of its own to keep few refs in memory, and what becomes of it."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Fork, Repository, Session
from zarr_manifests.engine.objects.spill import Spilled
from zarr_manifests.format.chunk_table import VirtualRef
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage, CrashDisk

BUDGET = 1_000
NOW = timedelta(0)
CONFIG: dict[str, Any] = {
    "spill-refs": BUDGET,
    "inline-chunk-bytes": 0,
    "pack-chunk-bytes": 0,
    "compaction": {"mode": "manual"},
}
CONTAINERS: dict[str, Any] = {"raw": "memory://raw-of-spilled"}


@pytest.fixture
def storage() -> CountingStorage:
    memory = MemoryStorage("spilled")
    memory.delete_many([info.key for info in memory.list()])
    return CountingStorage(memory)


@pytest.fixture
def repository(storage: CountingStorage) -> Repository:
    """With two arrays of 10,000 chunks, none of which is there."""
    return make(storage)


def make(storage: Any) -> Repository:
    repository = zm.create(storage, CONFIG, virtual_containers=CONTAINERS)
    with repository.transaction(message="arrays") as store:
        for name in "ab":
            zarr.create_array(
                store,
                name=name,
                shape=(10_000,),
                chunks=(1,),
                dtype="u1",
                compressors=None,
                dimension_names=["time"],
            )
    return repository


def bulk(target: Session | Fork, first: int, stop: int, version: int = 1, name: str = "a") -> None:
    """Refs to 500 chunks at once."""
    for start in range(first, stop, 500):
        rows = np.arange(start, min(start + 500, stop))
        length = 1 + (rows * 2_654_435_761 >> 9) % 200  # too much to be embedded
        target.store.set_virtual_refs(
            name, rows[:, None], ["virtual://raw/x"], rows * 0, rows * 1_000 + version, length
        )


def version_of(session: Session | Fork, at: int, name: str = "a") -> int | None:
    """Which version of a chunk is there."""
    ref = contents_of(session.store).find(f"{name}/c/{at}")
    assert ref is None or isinstance(ref, VirtualRef)
    return None if ref is None else ref.offset - at * 1_000


def spilled(session: Session | Fork, name: str = "a") -> list[Spilled]:
    contents = contents_of(session.store)
    node = contents.node(name)
    assert node is not None
    rows = contents.changes.tables.get(node.node_id, ())
    return [each for each in rows if isinstance(each, Spilled)]


def in_memory(session: Session | Fork) -> int:
    tables = contents_of(session.store).changes.tables.values()
    return sum(len(rows) for parts in tables for rows in parts if not isinstance(rows, Spilled))


def created(storage: CountingStorage, kind: str = "manifests") -> list[str]:
    return [r.key for r in storage.log if r.op == "create" and r.key.startswith(f"{kind}/")]


def referred(repository: Repository) -> list[str]:
    """Keys of the manifests that the newest commit refers to."""
    entry = contents_of(repository.readonly_session().store).view.snapshot.deltas[-1]
    return [ref.blob.key for ref in entry.manifests]


def test_few_refs_are_in_memory_and_no_manifest_is_uploaded_twice(
    storage: CountingStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    most = 0
    for first in range(0, 9_000, 500):
        bulk(session, first, first + 500)
        most = max(most, in_memory(session))
    assert most <= BUDGET
    before = created(storage)
    assert [each.key for each in spilled(session)] == before
    assert sum(map(len, spilled(session))) + in_memory(session) == 9_000
    storage.reset()
    session.commit("bulk")
    assert storage.rounds() == 2
    assert sorted([*before, *created(storage)]) == sorted(referred(repository))
    assert version_of(repository.readonly_session(), 8_999) == 1
    assert repository.verify().ok


def test_a_small_commit_spills_nothing_and_takes_two_rounds(
    storage: CountingStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    storage.reset()
    bulk(session, 0, BUDGET)
    assert not storage.log
    session.commit("small")
    assert storage.rounds() == 2


def test_refs_that_are_set_one_by_one_are_spilled_too(
    storage: CountingStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    contents = contents_of(session.store)
    node = contents.node("a")
    assert node is not None
    for at in range(3_000):
        session.store.set_sync(f"a/c/{at}", cpu.Buffer.from_bytes(b"%d" % at))
        assert len(contents.changes.chunks.get(node.node_id, ())) < BUDGET // 4
        assert in_memory(session) <= BUDGET
    assert spilled(session)
    unsynced = [r.key for r in storage.log if r.op == "create" and r.key.startswith("chunks/")]
    session.commit("chunks")
    assert len(unsynced) == 3_000
    reader = repository.readonly_session().store
    assert [reader.get_sync(f"a/c/{at}").to_bytes() for at in (0, 2_999)] == [b"0", b"2999"]  # type: ignore[union-attr]
    assert repository.verify().ok


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_spilled_is_read_through_the_cache(
    storage: CountingStorage, repository: Repository, cached: bool
) -> None:
    """The value used last stays in a cache without room."""
    options = {} if cached else {"max-size": 0}
    repository = zm.open(storage, cache=options, virtual_containers=CONTAINERS)
    session = repository.writable_session()
    bulk(session, 0, 5_000)
    storage.reset()
    assert [version_of(session, at) for at in (3, 4, 4_999, 5_000)] == [1, 1, 1, None]
    assert [r.op for r in storage.log] == ([] if cached else ["get"])


def test_one_chunk_that_is_set_anew_costs_one_manifest(
    storage: CountingStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    bulk(session, 0, 6_000)
    old = created(storage)
    storage.reset()
    bulk(session, 10, 11, version=2)
    session.store.delete_sync("a/c/11")
    assert [version_of(session, at) for at in (9, 10, 11, 12)] == [1, 2, None, 1]
    assert session.status().chunks == {"/a": 6_000}
    session.commit("bulk")
    now = referred(repository)
    assert len(set(old) - set(now)) == 1
    assert len(created(storage)) == len(set(created(storage)))
    reader = repository.readonly_session()
    assert [version_of(reader, at) for at in (9, 10, 11, 12)] == [1, 2, None, 1]
    assert contents_of(reader.store).view.snapshot.totals["refs-set"] == 5_999
    assert contents_of(reader.store).view.snapshot.totals["refs-unset"] == 1


def test_a_resize_cuts_off_what_is_spilled(repository: Repository) -> None:
    session = repository.writable_session()
    bulk(session, 0, 6_000)
    zarr.open_array(session.store, path="a").resize((1_250,))
    assert sum(map(len, spilled(session))) + in_memory(session) == 1_250
    zarr.open_array(session.store, path="a").resize((6_000,))
    assert [version_of(session, at) for at in (1_249, 1_250, 5_999)] == [1, None, None]
    session.commit("cut")
    assert repository.du(estimate=True).total.chunks == 1_250


@pytest.mark.parametrize("what", ["nothing to do with it", "other chunks", "the same chunks"])
def test_a_rebase_uploads_no_manifest_again(
    storage: CountingStorage, repository: Repository, what: str
) -> None:
    session = repository.writable_session()
    bulk(session, 0, 6_000)
    before = created(storage)
    other = repository.writable_session()
    first, name = {"n": (0, "b"), "o": (7_000, "a"), "t": (100, "a")}[what[0]]
    bulk(other, first, first + 50, version=2 - (what[0] == "t"), name=name)
    other.commit("first")
    storage.reset()
    session.commit("bulk")
    assert set(before) <= set(referred(repository))
    assert set(created(storage)).isdisjoint(before)
    reads = [r for r in storage.log if r.op == "get" and r.key.startswith("manifests/")]
    assert not reads
    assert version_of(repository.readonly_session(), first, name) == 2 - (what[0] == "t")
    assert repository.verify().ok


def test_chunks_that_are_left_to_others_go_from_one_manifest(
    storage: CountingStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    bulk(session, 0, 6_000)
    before = created(storage)
    other = repository.writable_session()
    bulk(other, 100, 150, version=2)
    other.commit("first")
    session.rebase("theirs")
    assert [version_of(session, at) for at in (99, 100, 149, 150)] == [1, 2, 2, 1]
    session.commit("bulk")
    assert len(set(before) - set(referred(repository))) == 1
    reader = repository.readonly_session()
    assert [version_of(reader, at) for at in (99, 100, 149, 150)] == [1, 2, 2, 1]
    assert len(created(storage)) == len(set(created(storage)))
    assert repository.verify().ok


def test_a_fork_comes_back_as_counts(storage: CountingStorage, repository: Repository) -> None:
    session = repository.writable_session()
    forks = [pickle.loads(pickle.dumps(session.fork())) for _ in "12"]
    for at, fork in enumerate(forks):
        bulk(fork, at * 5_000, at * 5_000 + 5_000)
        assert len(spilled(fork)) > 2
    sizes = [len(rows) for fork in forks for rows in spilled(fork)]
    one = len(pickle.dumps(repository.writable_session().fork()))
    held = max(map(in_memory, forks))
    back = [pickle.dumps(fork) for fork in forks]
    # A row in memory takes seven columns of eight bytes.
    assert max(map(len, back)) < one + 60 * held + 1_000 * len(sizes)
    storage.reset()
    session.merge(*map(pickle.loads, back))
    assert not [r for r in storage.log if r.key.startswith("manifests/")]
    assert sum(map(len, spilled(session))) >= sum(sizes)
    assert [version_of(session, at) for at in (0, 4_999, 5_000, 9_999)] == [1] * 4
    storage.reset()
    session.merge(pickle.loads(back[0]))  # counts once
    assert not [r for r in storage.log if r.key.startswith("manifests/")]
    session.commit("both")
    assert repository.du(estimate=True).total.chunks == 10_000
    assert {rows.key for fork in forks for rows in spilled(fork)} <= set(referred(repository))
    assert repository.verify().ok


def test_appends_land_behind_those_of_others(
    storage: CountingStorage, repository: Repository
) -> None:
    sessions = [repository.writable_session(append_dim="time") for _ in "12"]
    for session, many in zip(sessions, (3, 5_000), strict=True):
        zarr.open_array(session.store, path="a").resize((10_000 + many,))
        bulk(session, 10_000, 10_000 + many, version=many)
    assert spilled(sessions[1])
    for session in sessions:
        session.commit("append")
    reader = repository.readonly_session()
    assert [version_of(reader, at) for at in (10_000, 10_002)] == [3, 3]
    moved = 5_000 - 3 * 1_000  # which is how much their places say
    assert [version_of(reader, at) for at in (10_003, 15_002)] == [moved, moved]
    assert repository.du(estimate=True).total.chunks == 5_003
    assert len(created(storage)) == len(set(created(storage)))
    assert repository.verify().ok


def test_of_an_abandoned_session_nothing_is_left(
    storage: CountingStorage, repository: Repository
) -> None:
    for end in ("discarded", "left"):
        session = repository.writable_session()
        bulk(session, 0, 5_000)
        if end == "discarded":
            session.discard_changes()
            assert version_of(session, 0) is None
    gone = created(storage)
    with repository.transaction(message="go on") as store:
        zarr.create_group(store, path="g")
    repository.garbage_collect(grace=NOW)
    assert set(gone).isdisjoint(info.key for info in storage.list())


def test_a_leased_writer_keeps_what_it_has_spilled(
    storage: CountingStorage, repository: Repository
) -> None:
    with repository.writable_session(lease=timedelta(minutes=2)) as session:
        bulk(session, 0, 5_000)
        with repository.transaction(message="go on") as store:
            zarr.create_group(store, path="g")
        repository.garbage_collect(grace=NOW)
        assert {rows.key for rows in spilled(session)} <= {info.key for info in storage.list()}
        session.commit("bulk")
    assert version_of(repository.readonly_session(), 4_999) == 1
    assert repository.verify().ok


def test_a_crash_after_the_commit_leaves_all_of_it(tmp_path: Path) -> None:
    """Also the chunks that were written one by one, and were spilled with the others."""
    disk = CrashDisk(tmp_path / "repository")
    storage = disk.storage()
    session = make(storage).writable_session()
    for at in range(3):
        session.store.set_sync(f"a/c/{at}", cpu.Buffer.from_bytes(b"%d" % at))
    bulk(session, 3, 9_000)
    assert any((0,) in rows.box for rows in spilled(session))
    session.commit("bulk")
    disk.crash()
    reader = zm.open(storage, virtual_containers=CONTAINERS)
    values = zarr.open_array(reader.readonly_session().store, path="a")[:3]
    assert values.tolist() == list(b"012")  # type: ignore[union-attr]
    assert version_of(reader.readonly_session(), 8_999) == 1
    assert reader.verify().ok


@pytest.mark.slow
def test_what_is_spilled_while_forks_are_merged_survives_a_crash(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path / "repository")
    storage = disk.storage()
    session = make(storage).writable_session()
    forks = [session.fork() for _ in range(3)]
    for i, fork in enumerate(forks):  # two have more than there is room for
        for at in range(600 * i, 600 * (i + 1)):
            fork.store.set_sync(f"a/c/{at}", cpu.Buffer.from_bytes(bytes([at % 251 + 1])))
    session.merge(*forks)
    assert spilled(session)
    session.commit("all of them")
    disk.crash()
    reader = zm.open(storage, virtual_containers=CONTAINERS)
    values = zarr.open_array(reader.readonly_session().store, path="a")[:1800]
    assert np.array_equal(values, np.arange(1800) % 251 + 1)
    assert reader.verify().ok


@pytest.mark.parametrize("budget", [10_000_000, 40, 12])
def test_a_copy_that_is_merged_again_brings_nothing_back(budget: int) -> None:
    """However many chunks it has: in memory one by one, as tables, or not in memory."""
    repository = zm.create(MemoryStorage(), {**CONFIG, "spill-refs": budget})
    with repository.transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(60,), chunks=(1,), dtype="u1", compressors=None)
    session = repository.writable_session()
    fork, other = session.fork(), session.fork()
    array = zarr.open_array(fork.store, path="a")
    array[:3] = 7
    session.merge(fork)
    session.store.delete_sync("a/c/1")
    array[3:30] = 8
    session.merge(fork)
    session.store.delete_sync("a/c/20")
    zarr.open_array(other.store, path="a")[40:60] = 9
    session.merge(other, fork)
    array[2] = array[31] = 5
    session.merge(fork)
    expected = np.zeros(60, np.uint8)
    expected[:3], expected[3:30], expected[40:60] = 7, 8, 9
    expected[[1, 20]], expected[[2, 31]] = 0, 5
    assert zarr.open_array(session.store, path="a")[:].tolist() == expected.tolist()  # type: ignore[union-attr]
    session.commit("merged")
    head = zarr.open_array(repository.readonly_session().store, path="a")
    assert head[:].tolist() == expected.tolist()  # type: ignore[union-attr]
