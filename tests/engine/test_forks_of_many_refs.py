"""Forks with many refs: what they send, what the session keeps, and what a commit refers to."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Fork, Repository, Session
from zarr_manifests.engine.commit import carry_zones
from zarr_manifests.engine.edit import forks as forks_module
from zarr_manifests.engine.objects.spill import Spilled
from zarr_manifests.error_cases import FencedError
from zarr_manifests.errors import ConflictError, InvalidArgumentError
from zarr_manifests.format.chunk_table import UNSET, ChunkTable, VirtualRef
from zarr_manifests.grid import Box
from zarr_manifests.planning.tables.merge import in_box, in_c_order
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage, CrashDisk
from zarr_manifests.xarray.array_target import ArrayTarget

SENT = 500
GRID = (20, 10, 20)
CHUNKS = 4_000
CONFIG: dict[str, Any] = {
    "inline-chunk-bytes": 0,
    "pack-chunk-bytes": 0,
    "compaction": {"mode": "manual"},
}
CONTAINERS: dict[str, Any] = {"raw": "memory://raw-of-forks"}


@pytest.fixture(autouse=True)
def sends_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks_module, "_MOST_SENT", SENT)


@pytest.fixture
def storage() -> CountingStorage:
    memory = MemoryStorage("many-refs")
    memory.delete_many([info.key for info in memory.list()])
    return CountingStorage(memory)


@pytest.fixture
def repository(storage: CountingStorage) -> Repository:
    return make(storage)


def make(storage: Any, grid: Sequence[int] = GRID) -> Repository:
    """With an array of 4,000 chunks, none of which is there."""
    repository = zm.create(storage, CONFIG, virtual_containers=CONTAINERS)
    with repository.transaction(message="array") as store:
        zarr.create_array(
            store, name="a", shape=grid, chunks=(1,) * len(grid), dtype="u1", compressors=None
        )
    return repository


def refer(target: Session | Fork, first: int, stop: int, version: int = 1) -> None:
    """Refs to a range of chunks in C order."""
    rows = np.arange(first, stop)
    length = 1 + (rows * 2_654_435_761 >> 9) % 200
    target.store.set_virtual_refs(
        "a",
        Box((0,) * len(GRID), GRID).unravel(rows),
        ["virtual://raw/x"],
        rows * 0,
        rows * 1_000 + version,
        length,
    )


def write(target: Fork, at: int, data: bytes = b"data") -> None:
    """Write one chunk as an object of its own."""
    key = "a/c/" + "/".join(str(int(n)) for n in np.unravel_index(at, GRID))
    target.store.set_sync(key, cpu.Buffer.from_bytes(data))


def version_of(session: Session, at: int) -> int | None:
    """Which version of a chunk is there."""
    coords = np.unravel_index(at, GRID)
    ref = contents_of(session.store).find("a/c/" + "/".join(map(str, coords)))
    assert ref is None or isinstance(ref, VirtualRef)
    return None if ref is None else ref.offset - at * 1_000


def sent(fork: Fork) -> Fork:
    return pickle.loads(pickle.dumps(fork))  # type: ignore[no-any-return]


def worked(session: Session, first: int, stop: int, version: int = 1) -> Fork:
    """A fork as it comes back from a task."""
    fork = sent(session.fork())
    refer(fork, first, stop, version)
    return sent(fork)


def tables(session: Session) -> list[ChunkTable | Spilled]:
    parts = contents_of(session.store).changes.tables.values()
    return [rows for each in parts for rows in each]


def requests(storage: CountingStorage, kind: str = "manifests/") -> list[str]:
    return [r.op for r in storage.log if r.key.startswith(kind)]


def referred(repository: Repository) -> set[str]:
    """Keys of the manifests that the newest commit refers to."""
    entry = contents_of(repository.readonly_session().store).view.snapshot.deltas[-1]
    return {ref.blob.key for ref in entry.manifests}


@pytest.mark.parametrize("each", [20, 200, 400, 1_000, 3_000])
def test_a_fork_is_at_most_64_bytes_a_chunk(repository: Repository, each: int) -> None:
    """Whether it sends its refs or has written them."""
    session = repository.writable_session()
    empty = len(pickle.dumps(session.fork()))
    fork = sent(session.fork())
    refer(fork, 0, each)
    nbytes = len(pickle.dumps(fork)) - empty
    assert nbytes <= 64 * min(each, SENT)
    if each > SENT:
        assert nbytes < 3_500 + 64 * SENT // 4  # pointers, and refs of small boxes


def test_chunks_written_one_by_one_are_sent_as_few_bytes(repository: Repository) -> None:
    session = repository.writable_session()
    empty = len(pickle.dumps(session.fork()))
    for count in (1, 15, 300):
        fork = sent(session.fork())
        for at in range(count):
            write(fork, at)
        assert len(pickle.dumps(fork)) - empty <= 700 + 64 * count
        changes = contents_of(sent(fork).store).changes
        assert not changes.unsynced
        assert changes.chunk_objects_written == count


def test_a_merge_reads_nothing_and_a_commit_refers_to_what_forks_have_written(
    storage: CountingStorage, repository: Repository
) -> None:
    """Ranges of chunks end within a row, so the boxes around them overlap."""
    session = repository.writable_session()
    bounds = [*range(0, CHUNKS, 1_111), CHUNKS]
    back = [worked(session, a, b) for a, b in pairwise(bounds)]
    written = {info.key for info in storage.list("manifests/")}
    assert len(back) <= len(written) <= 5 * len(back)
    storage.reset()
    session.merge(*back)
    assert not storage.log
    resident = [len(rows) for rows in tables(session) if isinstance(rows, ChunkTable)]
    assert sum(resident) <= len(back) * SENT // 4  # of small boxes
    session.commit("all")
    assert "get" not in requests(storage)
    assert written <= referred(repository)
    assert requests(storage).count("create") == len(referred(repository)) - len(written) <= 1
    head = repository.readonly_session()
    assert [version_of(head, at) for at in range(0, CHUNKS, 37)] == [1] * len(range(0, CHUNKS, 37))
    assert repository.du(estimate=True).total.chunks == CHUNKS
    assert repository.verify().ok


def test_refs_to_objects_of_strangers_are_found_in_what_was_spilled(
    repository: Repository,
) -> None:
    """Nothing protects these objects until a snapshot reaches them."""
    stranger = repository.writable_session()
    stranger.store.set_sync("a/c/1/5/0", cpu.Buffer.from_bytes(b"theirs"))
    workspace_of(stranger.store).flush()
    ((node, refs),) = contents_of(stranger.store).changes.chunks.items()
    planted = dict(refs)
    tight = zm.open(
        repository.storage, {**CONFIG, "spill-refs": 100}, virtual_containers=CONTAINERS
    )

    def with_theirs(fork: Fork) -> None:
        refer(fork, 100, 100 + SENT + 1)
        contents_of(fork.store).changes.chunks[node] = dict(planted)
        refer(fork, 700, 900)

    session = tight.writable_session()
    fork = sent(session.fork())
    with_theirs(fork)
    fork = sent(fork)
    with pytest.raises(InvalidArgumentError, match="neither this session nor its copies"):
        session.merge(fork)
    stranger.commit("now they are reached")
    session = tight.writable_session()
    fork = sent(session.fork())
    with_theirs(fork)
    session.merge(sent(fork))
    session.commit("fine")
    assert repository.verify().ok


def test_small_forks_become_one_table(storage: CountingStorage, repository: Repository) -> None:
    session = repository.writable_session()
    session.merge(*(worked(session, at, at + 100) for at in range(0, CHUNKS, 100)))
    assert not requests(storage)
    assert len(tables(session)) < 12  # each is longer than all after it
    session.commit("all")
    (entry,) = contents_of(repository.readonly_session().store).view.snapshot.deltas[-1:]
    assert len([*entry.parts()]) <= 3
    assert repository.du(estimate=True).total.chunks == CHUNKS


@pytest.mark.parametrize("many", [300, 900])
def test_forks_that_differ_are_refused_and_nothing_is_merged(
    repository: Repository, many: int
) -> None:
    session = repository.writable_session()
    one, two = worked(session, 0, many), worked(session, many - 1, 2 * many, version=2)
    with pytest.raises(ConflictError) as raised:
        session.merge(one, two)
    coords = tuple(int(at) for at in np.unravel_index(many - 1, GRID))
    assert [(c.path, c.chunks) for c in raised.value.conflicts] == [("/a", (coords,))]
    assert not session.status()
    session.merge(one)
    with pytest.raises(ConflictError):
        session.merge(two)
    session.commit("the first")
    assert repository.du(estimate=True).total.chunks == many


@pytest.mark.parametrize("many", [300, 900])
def test_attempts_that_wrote_the_same_agree(repository: Repository, many: int) -> None:
    session = repository.writable_session()
    session.merge(worked(session, 0, many), worked(session, 0, many))
    session.commit("once")
    assert repository.du(estimate=True).total.chunks == many
    assert repository.verify().ok


@pytest.mark.parametrize("many", [300, 900])
def test_what_the_session_wrote_since_conflicts_and_what_it_wrote_before_does_not(
    repository: Repository, many: int
) -> None:
    session = repository.writable_session()
    refer(session, 0, 350)
    fork = worked(session, 100, 100 + many, version=2)
    late = sent(fork)
    session.merge(fork)
    assert [version_of(session, at) for at in (99, 100, 99 + many, 100 + many)][:3] == [1, 2, 2]
    refer(session, 150, 151, version=3)
    other = worked(session, 2_000, 2_010)
    session.merge(other, late)  # what was merged before is not merged again
    assert version_of(session, 150) == 3
    session.commit("both")
    assert repository.du(estimate=True).total.chunks == max(350, 100 + many) + 10
    again = repository.writable_session()
    fork = worked(again, 0, many, version=4)
    refer(again, 7, 8, version=5)
    with pytest.raises(ConflictError):
        again.merge(fork)


@pytest.mark.parametrize("many", [12, 300, 900])
def test_a_fork_frozen_twice_and_merged_twice_counts_once(
    storage: CountingStorage, repository: Repository, many: int
) -> None:
    session = repository.writable_session()
    fork = sent(session.fork())

    def go_on(first: int, stop: int) -> Fork:
        for at in range(first, stop):
            write(fork, at)
        return sent(fork)

    session.merge(go_on(0, many))
    half = go_on(many, 2 * many)
    session.merge(half, half)
    session.merge(sent(half), go_on(10, 11))
    grandchild = sent(sent(fork))
    write(grandchild, CHUNKS - 1)
    session.merge(sent(grandchild))
    assert session.status().chunks == {"/a": 2 * many + 1}
    session.commit("once")
    totals = contents_of(repository.readonly_session().store).view.snapshot.totals
    assert totals["refs-set"] == 2 * many + 1
    assert totals["chunk-objects"] == 2 * many + 2  # one was overwritten
    assert repository.verify().ok


def test_what_tasks_wrote_is_durable_before_it_is_merged(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path / "repository")
    repository = make(disk.storage())
    session = repository.writable_session()
    back = []
    for first in (0, 1_000):
        fork = session.fork()
        for at in range(first, first + 30):
            write(fork, at, bytes([at % 251 + 1]))
        refer(fork, first + 30, first + 900)
        back.append(fork)
    session.merge(*back)
    assert not contents_of(session.store).changes.unsynced
    session.commit("all")
    disk.crash()
    reader = zm.open(disk.storage(), virtual_containers=CONTAINERS)
    found = zarr.open_array(reader.readonly_session().store, path="a")[0, 0, :]
    assert np.array_equal(found, np.arange(20) % 251 + 1)
    assert reader.verify().ok
    assert reader.du(estimate=True).total.chunks == 1_800


def test_what_an_abandoned_fork_has_written_is_collected(
    storage: CountingStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    worked(session, 0, 900)
    merged = worked(session, 900, 1_800)
    session.merge(merged)
    session.commit("one of two")
    manifests = {info.key for info in storage.list("manifests/")}
    with repository.transaction(message="go on") as store:
        zarr.create_group(store, path="g")
    repository.garbage_collect(grace=timedelta(0))
    gone = manifests - {info.key for info in storage.list("manifests/")}
    assert len(gone) == 1
    assert referred(repository).isdisjoint(gone)
    assert repository.verify().ok
    assert repository.du(estimate=True).total.chunks == 900


def test_statistics_of_many_forks_are_written_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(carry_zones, "_ROWS_TOGETHER", 12)  # two forks
    repository = zm.create(tmp_path / "r", {"compaction": {"mode": "manual"}})
    with repository.transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(60,), chunks=(2,), dtype="i4")
    session = repository.writable_session()
    back = []
    for at in (4, 2, 0, 5, 1, 3):  # in any order
        fork = sent(session.fork())
        array, workspace = zarr.open_array(fork.store, path="a"), workspace_of(fork.store)
        target = ArrayTarget(array, workspace, statistics=True)
        target[(slice(at * 10, at * 10 + 10),)] = np.arange(at * 10, at * 10 + 10, dtype="i4")
        target.record()
        back.append(sent(fork))
    session.merge(*back)
    session.commit("with statistics")
    for mode in ("as they are", "major", "full"):
        if mode != "as they are":  # entries go to pages, and from pages to pages
            assert repository.compact(mode=mode, run=map).snapshot_id is not None
        found = repository.readonly_session().chunk_refs("a", statistics=True)
        assert found.low.tolist() == list(range(0, 60, 2))
        assert found.high.tolist() == list(range(1, 60, 2))


# --- boxes ------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_a_range_in_c_order_is_cut_into_few_full_boxes(shape: list[int], data: Any) -> None:
    whole = Box((0,) * len(shape), tuple(shape))
    bounds = data.draw(
        st.lists(st.integers(0, whole.size), min_size=2, max_size=5, unique=True).map(sorted)
    )
    parts: list[ChunkTable] = []
    for first, stop in pairwise(bounds):
        coords = map(tuple, whole.unravel(np.arange(first, stop)).tolist())
        found = in_c_order(ChunkTable.of(dict.fromkeys(coords, UNSET)))
        assert len(found) <= 2 * len(shape) - 1
        assert all(len(part) == part.box.size for part in found)
        parts += found
    places = np.concatenate([whole.ravel(part.coords()) for part in parts])
    assert places.tolist() == [*range(bounds[0], bounds[-1])]


@given(st.sets(st.tuples(*[st.integers(0, 5)] * 3), min_size=1), st.data())
def test_parts_of_any_table_are_its_rows(coords: set[tuple[int, ...]], data: Any) -> None:
    table = ChunkTable.of(dict.fromkeys(sorted(coords), UNSET))
    rows = [tuple(row) for part in in_c_order(table) for row in part.coords().tolist()]
    assert rows == sorted(coords)
    assert len(in_c_order(table)) <= 7
    lo = data.draw(st.tuples(*[st.integers(0, 5)] * 3))
    box = Box(lo, tuple(n + data.draw(st.integers(0, 4)) for n in lo))
    assert in_box(table, box).tolist() == [at in box for at in sorted(coords)]


def test_a_copy_whose_chunks_were_collected_is_fenced_off() -> None:
    repository = zm.create(MemoryStorage())
    session = repository.writable_session()
    array = zarr.create_array(session.store, name="a", shape=(2**17,), chunks=(2**16,), dtype="f8")
    fork = session.fork()
    values = np.random.default_rng(1).random(2**17)
    zarr.open_array(fork.store, path=array.path)[:] = values  # chunks that are objects of their own
    with repository.transaction(message="another") as store:
        zarr.create_group(store, path="g")
    assert repository.garbage_collect(timedelta(0)).objects["chunks"] == 2
    with pytest.raises(FencedError, match="what it wrote has been collected"):
        pickle.dumps(fork)
