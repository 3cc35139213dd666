"""Many chunks at a time: resolved as each by itself is, and read with few requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Repository, Session
from zarr_manifests.engine.edit.bulk_chunks import _are_sound
from zarr_manifests.error_cases import FencedError, VirtualSourceChangedError
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    MissingChunkError,
    NotFoundError,
    SnapshotExpiredError,
    StorageError,
    VirtualContainerError,
)
from zarr_manifests.format.chunk_table import ChunkTable, InlineRef, NativeRef, VirtualRef
from zarr_manifests.planning.tables.resolved_chunks import ChunkKind, ResolvedChunks
from zarr_manifests.session import initialized_chunks, preload_report
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage, Fault, FaultyStorage, LatencyStorage

RAW = "memory://raw-of-bulk"
LENGTH = 24


def document(length: int, side: int = 2) -> bytes:
    """Metadata of an array whose chunks hold one element, in two columns."""
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [length, side],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
    }
    return json.dumps(fields).encode()


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def make(storage: Any, **config: Any) -> Repository:
    common = {"inline-chunk-bytes": 4, "compaction": {"mode": "manual"}}
    return zm.create(storage, {**common, **config}, virtual_containers={"raw": RAW})


def raw_file(nbytes: int = 4096) -> bytes:
    data = bytes(i % 251 for i in range(nbytes))
    MemoryStorage("raw-of-bulk").put("x", data)
    return data


def rows(found: ResolvedChunks) -> dict[tuple[int, ...], object]:
    """What each row says, by its coordinates."""
    said: dict[tuple[int, ...], object] = {}
    for i, coords in enumerate(found.coords.tolist()):
        kind, offset, length = ChunkKind(found.kind[i]), int(found.offset[i]), int(found.length[i])
        if kind is ChunkKind.INLINE:
            assert (found.source[i], found.checksum[i]) == (-1, -1)
            said[tuple(coords)] = found.inline[offset : offset + length]
        else:
            where = found.locations[found.source[i]]
            said[tuple(coords)] = kind.name, where, offset, length, int(found.checksum[i])
    return said


def one_by_one(session: Session, path: str, box: list[slice]) -> dict[tuple[int, ...], object]:
    """The same, each chunk looked up by itself."""
    contents = contents_of(session.store)
    node = contents.array_at(path)
    assert node.array is not None
    said: dict[tuple[int, ...], object] = {}
    for coords in np.ndindex(node.array.grid.shape):
        sides = zip(coords, box, node.array.grid.shape, strict=True)
        if not all(at in range(n)[part] for at, part, n in sides):
            continue
        match contents.ref(node, coords):
            case InlineRef(data):
                said[coords] = data
            case NativeRef(_, _, offset, length, checksum) as ref:
                said[coords] = "NATIVE", ref.key, offset, length, checksum
            case VirtualRef(file, offset, length, known):
                checksum = -1 if known is None else known
                said[coords] = "VIRTUAL", file.location, offset, length, checksum
    return said


# --- against lookups of each chunk ---------------------------------------------------------------


class Model:
    """A session that is changed in all ways, and what must hold of it after each."""

    def __init__(self, spill_refs: int) -> None:
        leaves = [{"default": {"max-manifest-size": 7}}]
        self.repository = make(
            MemoryStorage(), **{"spill-refs": spill_refs, "chunk-manifests": {"sets": leaves}}
        )
        self.session = self.repository.writable_session()
        put(self.session, "a/zarr.json", document(LENGTH))

    def one(self, at: int, value: bytes) -> None:
        put(self.session, f"a/c/{at}/1", value)

    def bulk(self, first: int, count: int, step: int) -> None:
        node = contents_of(self.session.store).array_at("a")
        assert node.array is not None
        at = np.arange(first, node.array.shape[0], step)[:count]
        if not len(at):
            return
        index = np.stack([np.repeat(at, 2), np.tile([1, 0], len(at))], axis=1)
        n = len(index)
        offsets, sizes = (np.arange(n) * 7 + first) % 4000, np.arange(n) % 5 + 5
        files = ["virtual://raw/x", "virtual://raw/x"]
        known = np.arange(n) % 3 == 0
        checksums = np.where(known, 99, -1) if first % 2 else None
        self.session.store.set_virtual_refs(
            "a", index, files[:1], np.zeros(n, int), offsets, sizes, checksums=checksums
        )

    def unset(self, at: int) -> None:
        self.session.store.delete_sync(f"a/c/{at}/1")

    def resize(self, length: int) -> None:
        put(self.session, "a/zarr.json", document(length))

    def recreate(self) -> None:
        workspace_of(self.session.store).delete_below("a/")
        put(self.session, "a/zarr.json", document(LENGTH))

    def commit(self) -> None:
        if self.session.status():
            self.session.commit("changes")

    def discard(self) -> None:
        if "a" in contents_of(self.session.store).view.nodes:
            self.session.discard_changes()

    def compact(self, mode: Any) -> None:
        self.commit()
        self.repository.compact(mode=mode)
        self.session = self.repository.writable_session()

    def check(self, box: list[slice]) -> None:
        sessions = [self.session]
        if "a" in contents_of((reader := self.repository.readonly_session()).store).view.nodes:
            sessions.append(reader)
        for session in sessions:
            expected = one_by_one(session, "a", box)
            found = session.chunk_refs("a", box)
            assert rows(found) == expected
            assert list(map(tuple, found.coords.tolist())) == sorted(expected)
            there = initialized_chunks(session, "a", box)
            assert found.coords.tolist() == there.tolist()


AT = st.integers(0, LENGTH + 3)
VALUE = st.sampled_from([b"abc", b"abcd", b"longer than inline", b"another that is longer"])
TURNS = st.one_of(
    st.tuples(st.just("one"), st.integers(0, LENGTH - 1), VALUE),
    st.tuples(st.just("bulk"), AT, st.integers(1, 20), st.integers(1, 3)),
    st.tuples(st.just("bulk"), AT, st.integers(1, 20), st.integers(1, 3)),
    st.tuples(st.just("unset"), AT),
    st.tuples(st.just("unset"), AT),
    st.tuples(st.just("resize"), st.integers(1, LENGTH + 6)),
    st.tuples(st.just("compact"), st.sampled_from(["minor", "major", "full"])),
    st.sampled_from([("commit",), ("commit",), ("commit",), ("recreate",), ("discard",)]),
)
BOUND = st.none() | st.integers(-3, LENGTH + 3)
BOX = st.tuples(st.builds(slice, BOUND, BOUND), st.builds(slice, BOUND, BOUND)).map(list)


@pytest.mark.slow
@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(TURNS, BOX), min_size=3, max_size=14), st.sampled_from([8, 10_000]))
def test_it_says_what_lookups_of_each_chunk_say(
    turns: list[tuple[tuple[Any, ...], list[slice]]], spill_refs: int
) -> None:
    model = Model(spill_refs)
    for (name, *arguments), box in turns:
        event(name)
        getattr(model, name)(*arguments)
        model.check(box)
        model.check([slice(None), slice(None)])


# --- what is asked, and what is told -------------------------------------------------------------


@pytest.fixture
def repository() -> Repository:
    """One array with an inline, a native and a virtual chunk, of which the checksum is known."""
    raw_file()
    made = make(MemoryStorage())
    session = made.writable_session()
    put(session, "a/zarr.json", document(5))
    put(session, "a/c/0/1", b"in")
    put(session, "a/c/1/0", b"a native chunk")
    session.store.set_virtual_refs("a", [[3, 0]], ["virtual://raw/x"], [0], [10], [20])
    session.commit("one of each")
    return made


def test_columns_of_each_kind(repository: Repository) -> None:
    found = repository.readonly_session().chunk_refs("/a")
    assert (found.path, len(found), found.nbytes) == ("/a", 3, 2 + 14 + 20)
    assert [ChunkKind(kind) for kind in found.kind] == list(ChunkKind)
    assert found.coords.dtype == found.offset.dtype == np.int64
    assert found.coords.tolist() == [[0, 1], [1, 0], [3, 0]]
    assert found.source.tolist() == [-1, 0, 1]
    assert found.length.tolist() == [2, 14, 20]
    assert found.checksum[1] > 0
    assert found.checksum[2] == -1
    assert found.inline == b"in"
    assert found.locations[0].startswith("chunks/")
    assert list(found.locations)[1] == found.locations[-1] == "virtual://raw/x"
    assert found.locations[:] == list(found.locations)
    with pytest.raises(IndexError):
        found.locations[2]
    assert "3 chunks of 36 bytes in 2 objects or files" in repr(found)


def test_a_table_of_pyarrow(repository: Repository) -> None:
    found = repository.readonly_session().chunk_refs("a")
    inline, native, virtual = found.to_arrow().to_pylist()
    assert inline == {
        "coords": [0, 1],
        "kind": "inline",
        "location": None,
        "offset": None,
        "length": 2,
        "checksum": None,
        "data": b"in",
    }
    assert native["location"] == found.locations[0]
    assert native["checksum"] == found.checksum[1]
    assert (native["kind"], native["data"], native["offset"]) == ("native", None, 0)
    assert (virtual["kind"], virtual["location"]) == ("virtual", "virtual://raw/x")
    assert (virtual["offset"], virtual["length"], virtual["checksum"]) == (10, 20, None)
    empty = repository.readonly_session().chunk_refs("a", [(4, 5), (0, 2)])
    assert len(empty) == 0
    assert empty.coords.shape == (0, 2)
    assert empty.to_arrow().schema == found.to_arrow().schema


def test_cells_are_those_chunks_that_hold_any() -> None:
    session = make(MemoryStorage()).writable_session()
    array = zarr.create_array(session.store, name="a", shape=(20, 7), chunks=(6, 3), dtype="u1")
    array[:] = 1
    found = session.chunk_refs("a", cells=[(5, 7), slice(-1, None)])
    assert found.coords.tolist() == [[0, 2], [1, 2]]
    assert len(session.chunk_refs("a", cells=[(3, 3), (0, 7)])) == 0
    assert [at for at, _ in session.read_chunks("a", cells=[(19, 20), (0, 1)])] == [(3, 0)]


def test_single_chunks_are_read_by_their_coordinates() -> None:
    storage = CountingStorage(MemoryStorage())
    repository = make(storage)
    session = repository.writable_session()
    array = zarr.create_array(
        session.store, name="a", shape=(20, 7), chunks=(6, 3), dtype="u1", compressors=None
    )
    array[6:] = np.arange(98).reshape(14, 7)
    array[0, 0] = 1
    for commits in (False, True):
        if commits:
            session.commit("numbers")
        found = dict(session.read_chunks("a", coords=[(3, 2), (1, 0), (0, 0), (0, 1), (4, 0)]))
        assert list(found) == [(0, 0), (1, 0), (3, 2)]
        whole = dict(session.read_chunks("a"))
        assert found == {at: whole[at] for at in found}
    assert not list(session.read_chunks("a", coords=np.empty((0, 2), np.int64)))
    storage.reset()
    list(repository.readonly_session().read_chunks("a", coords=[(3, 2)], gap_bytes=0))
    (read,) = [record for record in storage.log if record.key.startswith("chunks/")]
    assert read.nbytes == 18
    with pytest.raises(InvalidArgumentError, match="only one of box, cells and coords"):
        session.read_chunks("a", cells=[(0, 1)] * 2, coords=[(0, 0)])
    for wrong in ([(0,)], [0, 0], [(0.5, 1.0)]):
        with pytest.raises(InvalidArgumentError, match="are not coordinates of chunks"):
            session.read_chunks("a", coords=wrong)


def test_a_scalar_array_is_one_chunk() -> None:
    repository = make(MemoryStorage())
    session = repository.writable_session()
    zarr.create_array(session.store, name="s", shape=(), dtype="i8", compressors=None)[...] = 7
    zarr.create_array(session.store, name="none", shape=(), dtype="i8")
    for at in (session, None):
        if at is None:
            session.commit("scalars")
        found = (at or repository.readonly_session()).chunk_refs("s", [])
        assert found.coords.shape == (1, 0)
        assert found.to_arrow()["coords"].to_pylist() == [[]]
        assert list(session.read_chunks("s")) == [((), b"\x07" + bytes(7))]
        assert len(session.chunk_refs("none")) == 0
        assert not list(session.read_chunks("none"))


def test_of_a_sharded_array_these_are_the_shards() -> None:
    session = make(MemoryStorage()).writable_session()
    array = zarr.create_array(
        session.store, name="a", shape=(16,), chunks=(2,), shards=(8,), dtype="u1"
    )
    array[8:] = 1
    assert session.chunk_refs("a").coords.tolist() == [[1]]
    stored = session.store.get_sync("a/c/1")
    assert stored is not None
    assert list(session.read_chunks("a")) == [((1,), stored.to_bytes())]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"path": "b"}, NotFoundError, "there is no array '/b'; there are: /a"),
        ({"path": "a", "box": [slice(None)]}, InvalidArgumentError, "not a region of a grid of"),
        ({"path": "a", "box": [slice(0, 4, 2), slice(None)]}, InvalidArgumentError, "step"),
        ({"path": "a", "cells": [(0, 1)]}, InvalidArgumentError, "not a region of an array of"),
        (
            {"path": "a", "box": [(0, 1)] * 2, "cells": [(0, 1)] * 2},
            InvalidArgumentError,
            "only one of",
        ),
    ],
)
def test_wrong_input_is_refused_at_once(
    repository: Repository, arguments: Any, error: type[Exception], match: str
) -> None:
    session = repository.readonly_session()
    with pytest.raises(error, match=match):
        session.chunk_refs(**arguments)
    with pytest.raises(error, match=match):
        session.read_chunks(**arguments)


@pytest.mark.parametrize("bounds", [{"gap_bytes": -1}, {"window_bytes": 0}, {"gap_bytes": 1.5}])
def test_wrong_bounds_are_refused_at_once(repository: Repository, bounds: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a whole number"):
        repository.readonly_session().read_chunks("a", **bounds)


def test_columns_that_contradict_each_other_are_refused() -> None:
    one = np.zeros(1, np.int64)
    kind = np.ones(1, np.uint8)
    for columns in ((one[:0], one, one), (one, one + 1, one), (one, one, one + 2)):
        with pytest.raises(InvalidArgumentError, match="contradict"):
            ResolvedChunks("/a", np.zeros((1, 1), np.int64), kind, *columns, one, [], b"a")


def test_objects_out_of_order_are_told_once_each() -> None:
    """Small packs, filled in no order, so that the numbers of chunks go to and fro."""
    repository = make(MemoryStorage(), **{"pack-bytes": 64})
    session = repository.writable_session()
    put(session, "a/zarr.json", document(40))
    for at in np.random.default_rng(2).permutation(40).tolist():
        put(session, f"a/c/{at}/0", b"0123456789")
    session.commit("in no order")
    found = repository.readonly_session().chunk_refs("a")
    assert (np.diff(found.source) < 0).any()
    assert len(set(found.locations)) == len(found.locations) == len(set(found.source.tolist())) > 5
    everything = [slice(None), slice(None)]
    assert rows(found) == one_by_one(session, "a", everything)


# --- how much is read ----------------------------------------------------------------------------


def packed(storage: Any, chunks: int = 1000, nbytes: int = 100, **config: Any) -> Repository:
    """So many chunks of an array in one pack."""
    repository = make(storage, **config)
    session = repository.writable_session()
    put(session, "a/zarr.json", document(chunks, 1))
    for at in range(chunks):
        put(session, f"a/c/{at}/0", at.to_bytes(2) * (nbytes // 2))
    session.commit("many")
    return repository


def chunk_reads(storage: CountingStorage) -> list[int]:
    """Bytes of each read of a chunk object."""
    return [r.nbytes for r in storage.log if r.op == "get" and r.key.startswith("chunks/")]


def test_a_thousand_chunks_of_a_pack_are_one_request() -> None:
    storage = CountingStorage(MemoryStorage())
    session = packed(storage).readonly_session()
    session.chunk_refs("a")
    storage.reset()
    found = list(session.read_chunks("a"))
    assert chunk_reads(storage) == [100_000]
    assert storage.requests == 1
    assert found == [((at, 0), at.to_bytes(2) * 50) for at in range(1000)]


def test_gaps_are_fetched_up_to_their_bound_and_not_beyond() -> None:
    storage = CountingStorage(MemoryStorage())
    packed(storage)
    reader = zm.open(storage).writable_session()
    for at in range(1000):
        if at % 10:
            reader.store.delete_sync(f"a/c/{at}/0")
    for gap_bytes, requests in ((900, 1), (899, 100)):
        storage.reset()
        assert len(list(reader.read_chunks("a", gap_bytes=gap_bytes))) == 100
        assert len(chunk_reads(storage)) == requests
    assert chunk_reads(storage) == [100] * 100


def test_no_more_is_fetched_at_a_time_than_a_window_holds() -> None:
    storage = CountingStorage(MemoryStorage())
    stream = packed(storage).readonly_session().read_chunks("a", window_bytes=5_000)
    storage.reset()
    for count in range(1, 1001):
        next(stream)
        assert sum(chunk_reads(storage)) == -(-count // 50) * 5_000
    assert set(chunk_reads(storage)) == {5_000}


def test_a_chunk_larger_than_a_window_comes_by_itself() -> None:
    storage = CountingStorage(MemoryStorage())
    session = packed(storage, chunks=4).readonly_session()
    storage.reset()
    assert len(list(session.read_chunks("a", window_bytes=1))) == 4
    assert chunk_reads(storage) == [100] * 4


def test_requests_of_a_window_are_made_side_by_side() -> None:
    storage = CountingStorage(LatencyStorage(MemoryStorage(), latency_s=0))
    session = packed(storage, **{"pack-bytes": 10_000}).readonly_session()
    session.chunk_refs("a")
    storage.reset()
    assert len(list(session.read_chunks("a"))) == 1000
    assert len(chunk_reads(storage)) == 10
    assert storage.rounds() == 1


def leaves(storage: Any) -> Repository:
    """A base of ten leaves, each in a manifest of its own, and two deltas of some kilobytes."""
    sets = [{"default": {"max-manifest-size": 100}}]
    repository = packed(storage, **{"chunk-manifests": {"sets": sets}})
    repository.compact(mode="full")
    sizes = np.random.default_rng(4).integers(1, 2**40, (2, 500))
    for first in (0, 500):
        session = repository.writable_session()
        index = [[at, 0] for at in range(first, first + 500)]
        session.store.set_virtual_refs("a", index, ["virtual://raw/x"], [0] * 500, *sizes)
        session.commit("500 more")
    return repository


def test_manifests_that_have_nothing_of_the_box_are_not_read() -> None:
    storage = CountingStorage(MemoryStorage())
    leaves(storage)
    session = zm.open(storage).readonly_session()
    preload_report(session, wait_s=5)
    both = ["deltas", "manifests"]
    boxes = ((120, 130, both), (105, 199, []), (520, 530, both), (480, 530, ["manifests"]))
    for start, stop, fetched in boxes:
        storage.reset()
        assert len(session.chunk_refs("a", [(start, stop), (0, 1)])) == stop - start
        assert sorted(record.key.split("/")[0] for record in storage.log) == fetched


def test_what_a_box_needs_is_fetched_in_one_round() -> None:
    storage = CountingStorage(LatencyStorage(MemoryStorage(), latency_s=0))
    leaves(storage)
    session = zm.open(storage).readonly_session()
    preload_report(session, wait_s=5)
    storage.reset()
    assert len(session.chunk_refs("a", [(450, 650), (0, 1)])) == 200
    assert storage.rounds() == 1


def test_neighbours_in_a_file_elsewhere_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    data = raw_file()
    repository = make(MemoryStorage())
    session = repository.writable_session()
    put(session, "a/zarr.json", document(100, 1))
    offsets = np.arange(100) * 30
    session.store.set_virtual_refs(
        "a",
        [[at, 0] for at in range(100)],
        ["virtual://raw/x"],
        [0] * 100,
        offsets,
        [20] * 100,
    )
    lengths: list[int | None] = []
    get = MemoryStorage.get

    def counted(self: MemoryStorage, key: str, start: int = 0, length: int | None = None) -> bytes:
        lengths.append(length)
        return get(self, key, start, length)

    monkeypatch.setattr(MemoryStorage, "get", counted)
    assert [chunk for _, chunk in session.read_chunks("a")] == [data[i : i + 20] for i in offsets]
    assert lengths == [99 * 30 + 20]


# --- what cannot be had is an error --------------------------------------------------------------


def chunk_keys(storage: MemoryStorage) -> list[str]:
    return [info.key for info in storage.list("chunks/")]


def drained(chunks: Iterator[tuple[tuple[int, ...], bytes]]) -> list[tuple[int, ...]]:
    return [coords for coords, _ in chunks]


@pytest.mark.parametrize("chunks", [1, 50])
def test_a_missing_object_is_an_error(chunks: int) -> None:
    storage = MemoryStorage()
    repository = packed(storage, chunks)
    (key,) = chunk_keys(storage)
    storage.delete_many([key])
    with pytest.raises(MissingChunkError, match=key):
        drained(repository.readonly_session().read_chunks("a"))


@pytest.mark.parametrize("damage", ["flipped", "short"])
@pytest.mark.parametrize("chunks", [1, 50])
def test_a_damaged_chunk_is_an_error_that_names_it(chunks: int, damage: str) -> None:
    storage = MemoryStorage()
    repository = packed(storage, chunks)
    (key,) = chunk_keys(storage)
    data = bytearray(storage.get(key))
    if damage == "flipped":
        data[-1] ^= 1
    else:
        del data[-1]
    storage.put(key, bytes(data))
    session = repository.readonly_session()
    match = rf"{key} \(offset {100 * (chunks - 1)}\)"
    with pytest.raises(CorruptObjectError, match=match):
        drained(session.read_chunks("a"))
    if chunks > 1:
        assert len(drained(session.read_chunks("a", [(0, chunks - 1), (0, 1)]))) == chunks - 1


def test_less_than_a_chunk_is_none_whatever_its_checksum() -> None:
    empty = NativeRef("000000000001-" + "0" * 24, 1, 10, 4, 0)  # 0 is the checksum of no bytes
    table = ChunkTable.of({(0,): empty})
    assert not _are_sound(table, np.array([0]), [b""]).any()


def test_a_storage_that_fails_is_asked_once() -> None:
    inner = MemoryStorage()
    packed(inner, 50)
    counting = CountingStorage(
        FaultyStorage(inner, [Fault("fail_before", key="chunks/*", count=None)])
    )
    session = zm.open(counting).readonly_session()
    with pytest.raises(StorageError):
        drained(session.read_chunks("a"))
    assert sum(record.key.startswith("chunks/") for record in counting.log) == 1


def test_files_elsewhere_that_changed_or_may_not_be_read(repository: Repository) -> None:
    virtual = [slice(3, 4), slice(None)]
    session = repository.writable_session()
    session.store.set_virtual_refs(
        "a", [[2, 0], [3, 0]], ["virtual://raw/x"], [0, 0], [0, 10], [10, 20], sizes=[4096]
    )
    assert drained(session.read_chunks("a", [slice(2, 4), slice(None)])) == [(2, 0), (3, 0)]
    raw_file(5000)
    for box in (virtual, [slice(2, 4), slice(None)]):
        with pytest.raises(VirtualSourceChangedError):
            drained(session.read_chunks("a", box))
    elsewhere = zm.open(repository.storage).readonly_session()
    with pytest.raises(VirtualContainerError):
        drained(elsewhere.read_chunks("a", virtual))


def test_a_known_checksum_of_a_virtual_chunk_is_compared() -> None:
    raw_file()
    session = make(MemoryStorage()).writable_session()
    put(session, "a/zarr.json", document(3, 1))
    session.store.set_virtual_refs(
        "a",
        [[0, 0], [1, 0]],
        ["virtual://raw/x"],
        [0, 0],
        [0, 10],
        [10, 10],
        checksums=[1, -1],
    )
    assert session.chunk_refs("a").checksum.tolist() == [1, -1]
    with pytest.raises(CorruptObjectError, match="does not match its checksum"):
        drained(session.read_chunks("a"))
    assert drained(session.read_chunks("a", [(1, 2), (0, 1)])) == [(1, 0)]


# --- sessions ------------------------------------------------------------------------------------


def test_a_stream_gives_what_the_session_had_when_it_began() -> None:
    session = packed(MemoryStorage(), 6).writable_session()
    put(session, "a/c/0/0", b"changed, and not yet written")
    stream = session.read_chunks("a", window_bytes=1)
    put(session, "a/c/0/0", b"changed again")
    put(session, "a/c/5/0", b"changed as well")
    session.commit("changes")
    found = dict(stream)
    assert found[0, 0] == b"changed, and not yet written"
    assert found[5, 0] == b"\x00\x05" * 50


def test_an_expired_snapshot_is_said_to_be() -> None:
    storage = MemoryStorage()
    repository = packed(storage, 6)
    stream = repository.readonly_session().read_chunks("a")
    session = repository.writable_session()
    for at in range(6):
        put(session, f"a/c/{at}/0", b"something that is new")
    session.commit("all is new")
    repository.expire_snapshots(keep_last=1)
    storage.delete_many(chunk_keys(storage)[:1])
    with pytest.raises(SnapshotExpiredError, match="has expired"):
        drained(stream)


def test_what_a_collection_took_of_what_a_writer_wrote_is_said_to_be() -> None:
    storage = MemoryStorage()
    repository = make(storage, **{"pack-chunk-bytes": 8})
    session = repository.writable_session()
    put(session, "a/zarr.json", document(2, 1))
    put(session, "a/c/0/0", b"an object of its own")
    repository.create_tag("meanwhile")
    repository.garbage_collect(timedelta(0))
    with pytest.raises(FencedError, match="collection has taken chunks/"):
        drained(session.read_chunks("a"))


@pytest.mark.parametrize("chunks", [100, 9000])
@pytest.mark.parametrize("clash", [True, False])
def test_what_a_serializable_session_resolves_its_commit_depends_on(
    chunks: int, clash: bool
) -> None:
    repository = make(MemoryStorage())
    session = repository.writable_session()
    put(session, "a/zarr.json", document(chunks, 1))
    put(session, "b/zarr.json", document(1, 1))
    session.commit("empty")
    mine = repository.writable_session(isolation="serializable")
    assert len(mine.chunk_refs("a", [(10, None), (0, 1)])) == 0
    put(mine, "b/c/0/0", b"none")
    theirs = repository.writable_session()
    put(theirs, f"a/c/{20 if clash else 5}/0", b"one")
    theirs.commit("one")
    if clash:
        with pytest.raises(ConflictError, match=": read"):
            mine.commit("there are none")
    else:
        mine.commit("there are none")


def test_a_follower_resolves_what_is_newest() -> None:
    repository = packed(MemoryStorage(), 3)
    follower = repository.readonly_session(follow=True)
    session = repository.writable_session()
    session.store.delete_sync("a/c/1/0")
    session.commit("one less")
    assert len(follower.chunk_refs("a")) == 3
    contents_of(follower.store).follow()
    assert follower.chunk_refs("a").coords.tolist() == [[0, 0], [2, 0]]
