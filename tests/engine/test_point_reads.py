"""What it costs to find chunks under many deltas, in requests, rounds and bytes.

An array of 60 x 6,000 chunks has a base of 300,000 refs. Delta k, with 5,000 refs in a manifest of
its own, writes half of the even columns of row k and half of those of row 59: so its box holds
the even and odd columns below 5,000 of all rows from k on, and none beyond.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Session
from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import ChunkTable, NativeRef, RefKind, VirtualRef
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.session import initialized_chunks
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage, LatencyStorage, WrappedStorage

ROWS, COLUMNS, BASE_COLUMNS = 60, 6_000, 5_000
GRID = Box((0, 0), (ROWS, COLUMNS))
KINDS = ("native", "virtual")
_DOCUMENT = (
    b'{"zarr_format":3,"node_type":"array","shape":[60,6000],"data_type":"uint8",'
    b'"chunk_grid":{"name":"regular","configuration":{"chunk_shape":[1,1]}},'
    b'"chunk_key_encoding":{"name":"default"},"fill_value":0,"codecs":[{"name":"bytes"}]}'
)
_CONFIG = {"compaction": {"mode": "manual", "max-delta-count": 1_000}}


def stopped_clock() -> Runtime:
    return replace(SYSTEM, monotonic_s=lambda: 1000.0)


def base_coords() -> IndexArray:
    return Box((0, 0), (ROWS, BASE_COLUMNS)).unravel(np.arange(ROWS * BASE_COLUMNS))


def delta_coords(k: int) -> IndexArray:
    columns = np.arange(0, BASE_COLUMNS, 2)
    rows = [np.stack([np.full(2_500, row), columns], axis=1) for row in (k, ROWS - 1)]
    return np.concatenate(rows).astype(np.int64)


def checksums(coords: IndexArray, version: int | IndexArray) -> IndexArray:
    """Of the chunks that this commit wrote (0 is the base): no two alike, and hard to compress."""
    mixed = (GRID.ravel(coords) + 1_000_000 * version) * 0x9E3779B1 % 2**32
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6B % 2**32
    return np.asarray(mixed ^ mixed >> 13, np.int64)


def set_chunks(session: Session, coords: IndexArray, version: int, kind: str) -> None:
    crc, n = checksums(coords, version), len(coords)
    if kind == "virtual":
        zeros, location = np.zeros(n, np.int64), [f"virtual://raw/{version}.bin"]
        offset, length = 8 * np.arange(n), zeros + 8
        session.store.set_virtual_refs("a", coords, location, zeros, offset, length, checksums=crc)
        return
    workspace = workspace_of(session.store)
    zeros = np.zeros(n, np.int64)
    keys = workspace.keys
    box = Box.around_coords(coords)
    index = box.ravel(coords)
    table = ChunkTable(
        box,
        None if n == box.size else index,
        kind=zeros + RefKind.NATIVE,
        source=zeros,
        number=zeros,
        offset=8 * np.arange(n, dtype=np.int64),
        length=zeros + 8,
        crc32c=crc,
        sources=(keys.session_id,),
        inline=b"",
    )
    workspace.put_table("a", GRID, table)


def made(kind: str, deltas: int) -> MemoryStorage:
    storage = MemoryStorage()
    containers = {"raw": "memory://point-reads"}
    repository = zm.create(storage, _CONFIG, virtual_containers=containers)
    session = repository.writable_session("main")
    session.store.set_sync("a/zarr.json", cpu.Buffer.from_bytes(_DOCUMENT))
    set_chunks(session, base_coords(), 0, kind)
    session.commit("base")
    repository.compact("main", "full")
    add_deltas(storage, range(deltas), kind)
    return storage


def add_deltas(storage: Storage, numbers: Iterable[int], kind: str) -> None:
    session = zm.open(storage).writable_session("main")
    for k in numbers:
        set_chunks(session, delta_coords(k), k + 1, kind)
        session.commit(f"delta {k}")


@pytest.fixture(scope="module")
def repositories() -> Callable[[str, int], MemoryStorage]:
    """By kind of refs and number of deltas; not to be changed."""
    known: dict[tuple[str, int], MemoryStorage] = {}

    def get(kind: str, deltas: int) -> MemoryStorage:
        if (kind, deltas) not in known:
            known[kind, deltas] = made(kind, deltas)
        return known[kind, deltas]

    return get


class Cold:
    """A session of a repository of which nothing is in memory, and what it asks of the storage."""

    def __init__(
        self, storage: Storage, latency_s: float = 0, cache: CacheOptions | None = None
    ) -> None:
        self.counting = CountingStorage(LatencyStorage(storage, latency_s=latency_s))
        self.repository = zm.open(self.counting, runtime=stopped_clock(), cache=cache)
        self.open()

    def open(self) -> None:
        """Another session of the same repository object."""
        self.session = self.repository.readonly_session("main")
        self.view: SnapshotView = contents_of(self.session.store).view
        self.node_id = self.view.nodes["a"].node_id
        self.opening = self.counting.requests

    def checksum(self, coords: Coords) -> int | None:
        """That of the chunk; None if it is absent."""
        ref = contents_of(self.session.store).find("a/c/" + "/".join(map(str, coords)))
        assert ref is None or isinstance(ref, NativeRef | VirtualRef)
        return None if ref is None else ref.crc32c

    def costs(self) -> tuple[int, int]:
        """Requests and rounds since the last time."""
        found = self.counting.requests, self.counting.rounds()
        self.counting.reset()
        return found

    def holding(self, coords: Coords) -> int:
        """Deltas and runs with a box that holds the chunk."""
        return sum(map(partial(holds, coords), self.view.snapshot.deltas))


def holds(coords: Coords, entry: DeltaEntry) -> bool:
    return any(coords in part.box for part in entry.parts())


def expected(coords: Coords, deltas: int) -> int | None:
    """The checksum of the chunk under so many deltas; None if it is absent."""
    if coords[1] >= BASE_COLUMNS:
        return None
    return int(all_expected(np.array([coords]), deltas)[0])


def all_expected(coords: IndexArray, deltas: int) -> IndexArray:
    """The same of many chunks that are there."""
    row, column = coords.T
    version = np.where(row == ROWS - 1, deltas, np.where(row < deltas, row + 1, 0))
    return checksums(coords, np.where(column % 2, 0, version))


POINTS = [(0, 0), (9, 8), (40, 2), (40, 3), (59, 4_998), (59, 1), (5, 5_500)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coords", POINTS)
def test_a_chunk_costs_the_deltas_whose_box_holds_it(
    repositories: Callable[[str, int], MemoryStorage], kind: str, coords: Coords
) -> None:
    rounds = set()
    for deltas in (0, 10, 50):
        cold = Cold(repositories(kind, deltas))
        entries = cold.view.snapshot.deltas
        assert len(entries) == deltas
        assert all(e.manifests and sum(p.count for p in e.parts()) >= 5_000 for e in entries)
        assert cold.checksum(coords) == expected(coords, deltas)
        due = 0 if coords[1] >= BASE_COLUMNS else min(deltas, coords[0] + 1)
        assert cold.holding(coords) == due
        from_leaf = expected(coords, deltas) == expected(coords, 0)  # a further round
        rounds.add(cold.counting.rounds() - from_leaf)
        assert cold.costs()[0] - cold.opening <= 2 + due  # of the leaf, directory and stretch
        assert cold.checksum(coords) == expected(coords, deltas)
        assert cold.costs() == (0, 0)
    if coords[1] < BASE_COLUMNS:
        assert len(rounds) == 1, "as many, whatever the number of deltas"


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_costs_two_rounds(
    repositories: Callable[[str, int], MemoryStorage], kind: str
) -> None:
    cold = Cold(repositories(kind, 50))
    cold.counting.reset()
    for coords, cost in [
        ((2, 0), (1 + 3, 1)),  # the leaf's directory, and deltas 0 to 2, of which one has it
        ((2, 2), (0, 0)),
        ((1, 4), (0, 0)),  # needs two of these three
        ((7, 5_500), (0, 0)),  # no delta and no leaf has a box with it
        ((3, 0), (47, 1)),  # needs one more, which is why all others are fetched
    ]:
        assert cold.checksum(coords) == expected(coords, 50)
        assert cold.costs() == cost, coords
    for row in range(ROWS):
        for column in (0, 1, 2_500, 4_999, 5_999):
            assert cold.checksum((row, column)) == expected((row, column), 50)
    assert cold.costs() == (4 + 1, 5), "a few stretches of the leaf, then the whole"
    for row in range(ROWS):
        assert cold.checksum((row, 1_234)) == expected((row, 1_234), 50)
    assert cold.costs() == (0, 0)
    metrics = cold.repository.metrics()
    assert metrics.refs_merged == 50 * 5_000, "brought together once"


def test_an_array_without_deltas_costs_its_leaf(
    repositories: Callable[[str, int], MemoryStorage],
) -> None:
    cold = Cold(repositories("native", 0))
    cold.counting.reset()
    assert cold.checksum((0, 0)) == expected((0, 0), 0)
    assert cold.costs() == (2, 2), "its directory, and a stretch"
    assert cold.checksum((1, 0)) == expected((1, 0), 0)
    assert cold.costs() == (0, 0)


def with_large_deltas(kind: str) -> MemoryStorage:
    """300,000 refs in one delta, and over them those of the even columns in another."""
    storage = MemoryStorage()
    containers = {"raw": "memory://point-reads"}
    repository = zm.create(storage, _CONFIG, virtual_containers=containers)
    session = repository.writable_session("main")
    session.store.set_sync("a/zarr.json", cpu.Buffer.from_bytes(_DOCUMENT))
    set_chunks(session, base_coords(), 0, kind)
    session.commit("all")
    set_chunks(session, base_coords()[::2], 1, kind)
    session.commit("the even columns")
    return storage


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_of_large_deltas_costs_a_stretch_of_each(kind: str) -> None:
    storage = with_large_deltas(kind)
    for coords, tables in [((7, 8), 2), ((30, 2_501), 2), ((59, 4_999), 1)]:
        cold = Cold(storage)
        sizes = [ref.blob.length for e in cold.view.snapshot.deltas for ref in e.manifests]
        assert len(sizes) == 2
        assert min(sizes) > 500_000
        cold.counting.reset()
        version = 1 - coords[1] % 2
        assert cold.checksum(coords) == checksums(np.array([coords]), version)[0]
        assert cold.counting.bytes_read <= tables * 128 * 1024
        assert cold.costs() == (2 * tables, 2), "their directories, then a stretch of each"
        assert cold.checksum(coords) == checksums(np.array([coords]), version)[0]
        assert cold.costs() == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_of_large_deltas_reads_them_whole(kind: str) -> None:
    cold = Cold(with_large_deltas(kind))
    cold.counting.reset()
    for row in (0, 0, 20, 40, 59):
        assert cold.checksum((row, 1)) == checksums(np.array([[row, 1]]), 0)[0]
    few = cold.costs()
    assert few[1] <= 5, "the directories, then stretches"
    coords = [(row, column) for row in range(0, ROWS, 7) for column in range(0, COLUMNS, 501)]
    for at in coords:
        version = 1 - at[1] % 2
        there = at[1] < BASE_COLUMNS
        assert cold.checksum(at) == (checksums(np.array([at]), version)[0] if there else None)
    assert cold.costs()[0] <= 2, "each whole, once"
    assert cold.repository.metrics().refs_merged == 450_000


def test_a_large_delta_of_other_tables_than_the_snapshot_says_is_refused() -> None:
    cold = Cold(with_large_deltas("native"))
    (ref,) = cold.view.snapshot.deltas[-1].manifests
    parts = tuple(replace(part, count=part.count - 1) for part in ref.parts)
    entry = replace(cold.view.snapshot.deltas[-1], manifests=(replace(ref, parts=parts),))
    forged = replace(cold.view.snapshot, deltas=(*cold.view.snapshot.deltas[:-1], entry))
    cold.view.snapshot = forged
    with pytest.raises(CorruptObjectError, match="no chunk tables such as the snapshot says"):
        cold.view.lookup(cold.node_id, (7, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_reading_everything_costs_the_deltas_on_top(
    repositories: Callable[[str, int], MemoryStorage], kind: str
) -> None:
    found = {}
    for deltas in (0, 50):
        cold = Cold(repositories(kind, deltas))
        cold.counting.reset()
        table = cold.view.chunks(cold.node_id)
        assert table is not None
        found[deltas] = cold.counting.bytes_read
        assert cold.costs()[1] == 1
        np.testing.assert_array_equal(table.crc32c, all_expected(table.coords(), deltas))
        assert len(table) == ROWS * BASE_COLUMNS
    own = sum(ref.blob.length for e in cold.view.snapshot.deltas for ref in e.manifests)
    assert own < found[50] <= 1.1 * found[0] + own


@pytest.mark.parametrize("kind", KINDS)
def test_runs_count_as_the_deltas_they_are_of(kind: str) -> None:
    storage = made(kind, 10)
    zm.open(storage).compact("main", "minor")
    add_deltas(storage, range(10, 14), kind)
    for coords, live in [((0, 0), 1), ((9, 1), 1), ((11, 0), 3), ((40, 0), 5), ((0, 5_500), 0)]:
        cold = Cold(storage)
        entries = cold.view.snapshot.deltas
        assert [entry.last - entry.first for entry in entries] == [9, 0, 0, 0, 0]
        assert cold.holding(coords) == live
        cold.counting.reset()
        assert cold.checksum(coords) == expected(coords, 14)
        more = expected(coords, 14) == expected(coords, 0)  # a stretch of the leaf
        assert cold.costs() == ((1 + live + more, 1 + more) if live else (0, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_delta_removes_is_absent(kind: str) -> None:
    storage = made(kind, 10)
    session = zm.open(storage).writable_session("main")
    session.store.delete_sync("a/c/3/0")
    set_chunks(session, delta_coords(20), 21, kind)
    session.commit("removes a chunk")
    cold = Cold(storage)
    assert len(cold.view.snapshot.deltas) == 11
    cold.counting.reset()
    assert cold.checksum((3, 0)) is None
    assert cold.costs() == (1 + 5, 1)
    assert cold.checksum((3, 2)) == expected((3, 2), 10)
    assert cold.checksum((20, 0)) == checksums(np.array([[20, 0]]), 21)[0]
    assert cold.checksum((3, 0)) is None


def test_many_chunks_at_once_cost_what_any_of_them_needs(
    repositories: Callable[[str, int], MemoryStorage],
) -> None:
    cold = Cold(repositories("native", 50))
    some = np.array([[1, 0], [4, 3], [5, 2]])
    for _ in range(2):
        cold.counting.reset()
        table = cold.view.chunks_at(cold.node_id, some)
        assert table is not None
        found = {c: ref.crc32c for c, ref in table.refs() if isinstance(ref, NativeRef)}
        assert found == {tuple(c): expected(tuple(c), 50) for c in some.tolist()}
        assert cold.costs() in ((1 + 6 + 1, 2), (0, 0))
    cold.counting.reset()
    region = slice(0, 9), slice(4_990, None)
    there = initialized_chunks(cold.session, "a", region)
    assert len(there) == 9 * 10
    manifests = [r.key for r in cold.counting.log if r.key.startswith("manifests/")]
    assert len(manifests) == 9 - 6, "the base's are known to the index, or here"


def test_nothing_is_fetched_twice_for_lookups_at_the_same_time(
    repositories: Callable[[str, int], MemoryStorage],
) -> None:
    cold = Cold(repositories("native", 50), latency_s=0.05)
    cold.counting.reset()
    barrier = threading.Barrier(16)
    found: dict[int, int | None] = {}

    def look(row: int) -> None:
        barrier.wait(20)
        found[row] = cold.checksum((row, 0))

    threads = [threading.Thread(target=look, args=(row,)) for row in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {row: expected((row, 0), 50) for row in range(16)}
    keys = [record.key for record in cold.counting.log]
    assert len(keys) == len(set(keys)) == 51
    assert cold.repository.metrics().refs_merged == 50 * 5_000


def test_deltas_stay_in_memory_though_the_tables_of_a_scan_do_not(
    repositories: Callable[[str, int], MemoryStorage],
) -> None:
    cold = Cold(repositories("native", 10), cache=CacheOptions(max_size=6 << 20))
    deltas = {ref.blob.key for e in cold.view.snapshot.deltas for ref in e.manifests}
    for _ in range(3):
        for row in (0, 5, 9):
            assert cold.checksum((row, 0)) == expected((row, 0), 10)
        table = cold.view.chunks(cold.node_id)
        assert table is not None
        cold.open()
    assert cold.repository.metrics().cache_evicted_bytes > 6 << 20, "more than there is room for"
    read = [r.key for r in cold.counting.log if r.key in deltas]
    assert sorted(read) == sorted(deltas), "each once"


class Damaged(WrappedStorage):
    """Gives one object with a byte changed."""

    def __init__(self, storage: Storage, key: str) -> None:
        super().__init__(storage)
        self.key = key

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = super().get(key, start, length)
        return data if key != self.key else data[:100] + bytes([data[100] ^ 1]) + data[101:]


def test_a_damaged_delta_hurts_those_who_need_it(
    repositories: Callable[[str, int], MemoryStorage],
) -> None:
    storage = repositories("native", 50)
    (ref,) = Cold(storage).view.snapshot.deltas[30].manifests
    cold = Cold(Damaged(storage, ref.blob.key))
    for row in (3, 5, 29, 4):  # the second of these has everything fetched
        assert cold.checksum((row, 0)) == expected((row, 0), 50)
    for row in (30, 31, 59, 30):
        with pytest.raises(CorruptObjectError, match=ref.blob.key):
            cold.checksum((row, 0))
    with pytest.raises(CorruptObjectError, match=ref.blob.key):
        cold.view.chunks(cold.node_id)
    with pytest.raises(CorruptObjectError, match=ref.blob.key):
        cold.view.chunks_at(cold.node_id, np.array([[2, 0], [40, 0]]))
    found = cold.view.chunks_at(cold.node_id, np.array([[2, 0], [29, 0]]))
    assert found is not None
    assert len(found) == 2
    assert cold.checksum((29, 2)) == expected((29, 2), 50)
