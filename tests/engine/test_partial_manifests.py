"""Lookups in a huge array read parts of its manifests: what it costs in requests, rounds and bytes.

The array has 500 x 40 x 100 chunks, with a leaf for each half of its first axis.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import ChunkTable, NativeRef, RefKind
from zarr_manifests.grid import Box, Coords
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage

SHAPE = (500, 40, 100)
GRID = Box((0, 0, 0), SHAPE)
MISSING = (300, 0, 0)
_DOCUMENT = (
    b'{"zarr_format": 3, "node_type": "array", "shape": [500, 40, 100], "data_type": "uint8",'
    b' "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1, 1]}},'
    b' "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "bytes"}], "fill_value": 0}'
)
_CONFIG = {
    "compaction": {"mode": "manual"},
    "chunk-manifests": {"preload": {"max-manifests": 0}},
}


CRCS = np.random.default_rng(7).integers(0, 2**32, GRID.size)


def crc_of(coords: Coords) -> int:
    return int(CRCS[GRID.ravel_one(coords)])


@pytest.fixture(scope="module")
def storage() -> MemoryStorage:
    """Not to be changed."""
    storage = MemoryStorage()
    repository = zm.create(storage, _CONFIG)
    session = repository.writable_session("main")
    session.store.set_sync("a/zarr.json", cpu.Buffer.from_bytes(_DOCUMENT))
    workspace = workspace_of(session.store)
    assert workspace.keys is not None
    index = np.delete(np.arange(GRID.size), GRID.ravel_one(MISSING))
    zeros = np.zeros(len(index), np.int64)
    rows = zeros + RefKind.NATIVE, zeros, zeros, 8 * index, zeros + 8, CRCS[index]
    table = ChunkTable(GRID, index, *rows, (workspace.keys.session_id,), b"")
    workspace.put_table("a", GRID, table)
    session.commit("bulk")
    repository.compact("main", "full")
    return storage


class Cold:
    """A view of which nothing but the opening is in memory, and what it asks of the storage."""

    def __init__(self, storage: MemoryStorage, cache: CacheOptions | None = None) -> None:
        self.counting = CountingStorage(storage)
        self.session = zm.open(self.counting, cache=cache).readonly_session("main")
        self.view: SnapshotView = contents_of(self.session.store).view
        self.node_id = self.view.nodes["a"].node_id
        assert len(self.view.manifests) == 2
        assert min(ref.blob.length for ref in self.view.manifests) > 4_000_000 // 2
        self.counting.reset()

    def crc(self, coords: Coords) -> int | None:
        ref = contents_of(self.session.store).find("a/c/" + "/".join(map(str, coords)))
        assert ref is None or isinstance(ref, NativeRef)
        return None if ref is None else ref.crc32c

    def costs(self) -> tuple[int, int, int]:
        """Requests, rounds and bytes since the last time."""
        found = self.counting.requests, self.counting.rounds(), self.counting.bytes_read
        self.counting.reset()
        return found


@pytest.mark.parametrize("coords", [(0, 0, 0), (123, 7, 99), (249, 39, 99), (250, 0, 0), MISSING])
def test_a_chunk_costs_a_directory_and_a_stretch(storage: MemoryStorage, coords: Coords) -> None:
    cold = Cold(storage)
    due = None if coords == MISSING else crc_of(coords)
    assert cold.crc(coords) == due
    requests, rounds, nbytes = cold.costs()
    assert (requests, rounds) == (2, 2)
    assert nbytes <= 128_000
    assert cold.crc(coords) == due
    assert cold.costs()[0] == 0


def test_after_a_few_stretches_the_whole_is_read(storage: MemoryStorage) -> None:
    cold = Cold(storage)
    for t in range(0, 250, 50):
        assert cold.crc((t, 1, 2)) == crc_of((t, 1, 2))
    requests, rounds, nbytes = cold.costs()
    assert requests == rounds == 1 + 4 + 1
    assert nbytes < 1.2 * max(ref.blob.length for ref in cold.view.manifests)
    rng = np.random.default_rng(0)
    for coords in map(tuple, rng.integers((0, 0, 0), (250, 40, 100), (200, 3)).tolist()):
        assert cold.crc(coords) == crc_of(coords)
    assert cold.costs()[0] == 0


def test_neighbours_are_in_the_same_stretch(storage: MemoryStorage) -> None:
    cold = Cold(storage)
    for x in range(100):
        assert cold.crc((17, 3, x)) == crc_of((17, 3, x))
    assert cold.costs()[:2] == (2, 2)
    assert cold.view.knows(cold.node_id, (17, 3, 5))
    assert not cold.view.knows(cold.node_id, (200, 3, 5))
    following = cold.view.following(cold.node_id, (17, 3, 5), 10, GRID)
    assert [where for where, _ in following] == [(17, 3, x) for x in range(6, 16)]
    assert cold.costs()[0] == 0
    with_hand = cold.view.at_hand()
    assert with_hand.lookup(cold.node_id, (17, 3, 5)) is not None


READS: dict[str, Callable[[SnapshotView, bytes], ChunkTable | None]] = {
    "box": lambda view, node_id: view.chunks_in(node_id, Box((40, 5, 6), (60, 6, 8))),
    "coordinates": lambda view, node_id: view.chunks_at(
        node_id, np.array([(t, 5, x) for t in range(40, 60) for x in (6, 7)])
    ),
}


@pytest.mark.parametrize("how", READS)
def test_some_chunks_cost_the_stretches_that_have_them(storage: MemoryStorage, how: str) -> None:
    cold = Cold(storage)
    table = READS[how](cold.view, cold.node_id)
    assert table is not None
    expected = {(t, 5, x): crc_of((t, 5, x)) for t in range(40, 60) for x in (6, 7)}
    found = {c: ref.crc32c for c, ref in table.refs() if isinstance(ref, NativeRef)}
    assert found == expected
    requests, rounds, nbytes = cold.costs()
    assert (requests, rounds) == (2, 2), "a directory, and neighbouring stretches in one request"
    assert nbytes < 0.25 * cold.view.manifests[0].blob.length


def test_a_series_of_one_pixel_in_both_leaves(storage: MemoryStorage) -> None:
    """It is in every stretch, so the whole is read: directories, then both manifests."""
    cold = Cold(storage)
    table = cold.view.chunks_in(cold.node_id, Box((0, 5, 6), (500, 6, 7)))
    assert table is not None
    np.testing.assert_array_equal(table.crc32c, [crc_of((t, 5, 6)) for t in range(500)])
    assert cold.costs()[:2] == (4, 2)


def test_a_series_of_one_pixel_reads_the_leaf_of_its_tile() -> None:
    """Where leaves are split along both axes of the map, it needs one of 25."""
    storage, grid = MemoryStorage(), Box((0, 0, 0), (2000, 10, 10))
    split = {"splitting": [{"path": "/a", "along": {1: 2, 2: 2}}], "preload": {"max-manifests": 0}}
    repository = zm.create(storage, {**_CONFIG, "chunk-manifests": split})
    session = repository.writable_session("main")
    document = _DOCUMENT.replace(b"[500, 40, 100]", b"[2000, 10, 10]")
    session.store.set_sync("a/zarr.json", cpu.Buffer.from_bytes(document))
    workspace = workspace_of(session.store)
    assert workspace.keys is not None
    index, zeros = np.arange(grid.size), np.zeros(grid.size, np.int64)
    rows = zeros + RefKind.NATIVE, zeros, zeros, 8 * index, zeros + 8, CRCS[: grid.size]
    table = ChunkTable(grid, None, *rows, (workspace.keys.session_id,), b"")
    workspace.put_table("a", grid, table)
    session.commit("bulk")
    repository.compact("main", "full")
    counting = CountingStorage(storage)
    contents = contents_of(zm.open(counting).readonly_session("main").store)
    nbytes = sum(ref.blob.length for ref in contents.view.manifests)
    counting.reset()
    for t in range(2000):
        ref = contents.find(f"a/c/{t}/5/6")
        assert isinstance(ref, NativeRef)
        assert ref.crc32c == CRCS[grid.ravel_one((t, 5, 6))]
    assert counting.requests <= 3
    assert counting.bytes_read <= 200_000 < nbytes / 4  # the directory, one or two blocks


@pytest.mark.slow
def test_a_scan_reads_the_whole_at_once(storage: MemoryStorage) -> None:
    for read in (
        lambda view, node_id: view.chunks(node_id),
        lambda view, node_id: view.chunks_in(node_id, GRID),
    ):
        cold = Cold(storage)
        table = read(cold.view, cold.node_id)
        assert len(table) == GRID.size - 1
        assert cold.costs()[:2] == (2, 1)


def test_with_a_cache_on_disk_the_whole_is_kept(storage: MemoryStorage, tmp_path: Path) -> None:
    cache = CacheOptions(directory=tmp_path)
    cold = Cold(storage, cache)
    assert cold.crc((1, 2, 3)) == crc_of((1, 2, 3))
    assert cold.costs()[:2] == (1, 1)
    again = Cold(storage, cache)
    assert again.crc((200, 2, 3)) == crc_of((200, 2, 3))
    assert again.costs()[0] == 0


def test_damage_hurts_only_the_stretch_that_has_it(storage: MemoryStorage) -> None:
    ref = Cold(storage).view.manifests[0].blob
    copy = MemoryStorage()
    for info in storage.list():
        copy.put(info.key, storage.get(info.key))
    whole = bytearray(storage.get(ref.key))
    whole[len(whole) // 2] ^= 1
    copy.put(ref.key, bytes(whole))
    first = (0, 0, 0) if Cold(storage).view.manifests[0].parts[0].box.lo[0] == 0 else (250, 0, 0)
    middle = (first[0] + 125, 0, 0)
    cold = Cold(copy)
    assert cold.crc(first) == crc_of(first)
    failed = 0
    for t in range(middle[0] - 8, middle[0] + 8, 2):
        try:
            found = cold.crc((t, 20, 0))
        except CorruptObjectError:
            failed += 1
        else:
            assert found == crc_of((t, 20, 0))
    assert failed
    whole = bytearray(storage.get(ref.key))
    whole[40] ^= 1
    copy.put(ref.key, bytes(whole))
    with pytest.raises(CorruptObjectError):
        Cold(copy).crc(first)
    copy.put(ref.key, storage.get(ref.key)[:-1])  # the last stretch is short
    cold = Cold(copy)
    assert cold.crc(first) == crc_of(first)
    with pytest.raises(CorruptObjectError, match="does not match"):
        cold.crc((first[0] + 249, 39, 99))
    copy.delete_many([ref.key])
    with pytest.raises(CorruptObjectError, match="not there"):
        Cold(copy).crc(first)
