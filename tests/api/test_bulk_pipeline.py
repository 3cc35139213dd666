"""Arrays read and written in bulk have the values of Zarr's own pipeline, or raise its errors."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer.cpu import NDBuffer
from zarr.core.codec_pipeline import FusedCodecPipeline
from zarr.storage import MemoryStore

import zarr_manifests as zm
from effort import examples
from storages import LatencyStorage
from zarr_arrays import TYPES, array_options, some_values
from zarr_manifests.bulk import BulkCodecPipeline, batch, use_bulk
from zarr_manifests.errors import CorruptObjectError, MissingChunkError, SnapshotExpiredError
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage

pytestmark = pytest.mark.filterwarnings(
    "ignore::zarr.errors.UnstableSpecificationWarning", "ignore::zarr.errors.ZarrUserWarning"
)
_CONFIG = {"inline-chunk-bytes": 8, "pack-chunk-bytes": 100}


class IntoMemory(MemoryStorage):
    """A storage that reads into memory of the caller, as files do."""

    def read_into(self, key: str, start: int, room: memoryview) -> int:
        data = self.get(key, start, len(room))
        room[: len(data)] = data
        return len(data)


def fused(array: Any) -> Any:
    """The same array, with Zarr's own pipeline."""
    path = f"{FusedCodecPipeline.__module__}.FusedCodecPipeline"
    with zarr.config.set({"codec_pipeline.path": path}):
        return zarr.open_array(array.store, path=array.path)


def bulk(store: Any, path: str = "a") -> Any:
    with zm.tune_zarr():
        array = zarr.open_array(store, path=path)
    assert type(array.async_array.codec_pipeline) is BulkCodecPipeline
    return array


def _slice(draw: Any, size: int) -> slice:
    lo = draw(st.integers(0, size - 1))
    return slice(lo, draw(st.integers(lo + 1, size)), draw(st.sampled_from([None, None, 1, 2, 3])))


def _selection(draw: Any, shape: tuple[int, ...], *, unique: bool = False) -> tuple[str, Any]:
    """How to index an array, and with what; NumPy does not say which of two values a cell gets."""
    kinds = ["basic", "basic", "orthogonal", "points", "mask"] if shape else ["basic"]
    kind = draw(st.sampled_from(kinds))
    if kind == "basic":
        one = [st.just(slice(None)), st.integers(0, 99), st.none()]
        drawn = [draw(st.one_of(*one)) for _ in shape]
        return "basic", tuple(
            at % size if isinstance(at, int) else at or _slice(draw, size)
            for at, size in zip(drawn, shape, strict=True)
        )
    if kind == "mask":
        rng = np.random.default_rng(draw(st.integers(0, 9)))
        return "points", rng.integers(0, 2, shape).astype(bool)
    numbers: dict[str, Any] = {"min_size": 1, "max_size": 6, "unique": unique}
    if kind == "points":
        number = draw(st.integers(1, 9))
        rng = np.random.default_rng(draw(st.integers(0, 9)))
        points = np.stack([rng.integers(0, size, number) for size in shape])
        return "points", tuple(np.unique(points, axis=1) if unique else points)
    return "orthogonal", tuple(
        _slice(draw, size)
        if draw(st.booleans())
        else sorted(draw(st.lists(st.integers(0, size - 1), **numbers)))
        for size in shape
    )


def _indexed(array: Any, how: str) -> Any:
    return {"basic": array, "orthogonal": array.oindex, "points": array.vindex}[how]


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_any_array_has_the_values_of_zarrs_own_pipeline(data: st.DataObject) -> None:
    given_, draw = data.draw(array_options((*TYPES, "T"))), data.draw
    storage = draw(
        st.sampled_from(
            [MemoryStorage, IntoMemory, lambda: LatencyStorage(MemoryStorage(), latency_s=0)]
        )
    )()
    config = {**_CONFIG, "pack-bytes": draw(st.sampled_from([100, 8_388_608]))}
    session = zm.create(storage, config).writable_session()
    # Opened again, since an array that was just made may have another byte order.
    judge = fused(zarr.create_array(MemoryStore(), **given_))
    zarr.create_array(session.store, **given_)
    array = bulk(session.store)
    with pytest.MonkeyPatch.context() as patch:
        large = draw(st.sampled_from([0, 1 << 16]))
        patch.setattr(batch, "LARGE_BYTES", large)
        for _ in range(draw(st.integers(0, 3))):
            how, part = _selection(draw, judge.shape, unique=True)
            shape = np.shape(_indexed(judge, how)[part])
            values = some_values(draw, judge.dtype, shape)
            _indexed(judge, how)[part] = values
            _indexed(array, how)[part] = values
        if draw(st.booleans()):
            session.commit("written")
            array = bulk(session.store)
        for _ in range(3):
            how, part = _selection(draw, judge.shape)
            found, due = _indexed(array, how)[part], _indexed(judge, how)[part]
            assert np.shape(found) == np.shape(due)
            assert np.asarray(found).dtype == np.asarray(due).dtype
            np.testing.assert_array_equal(found, due)
            np.testing.assert_array_equal(_indexed(fused(array), how)[part], due)


def filled(
    storage: Any, shape: tuple[int, ...] = (40, 6), chunks: tuple[int, ...] = (2, 3), **config: Any
) -> tuple[zm.Repository, np.ndarray]:
    """A repository with an array `a`, and its values."""
    given_ = {"inline-chunk-bytes": 0, **config}
    repository = zm.create(storage, given_)
    values = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    with repository.transaction(message="filled") as store:
        zarr.create_array(store, name="a", data=values, chunks=chunks, compressors=None)
    return repository, values


@pytest.mark.parametrize("location", ["start", "end"])
def test_absent_chunks_and_shards_are_the_fill_value(location: str) -> None:
    repository = zm.create(MemoryStorage())
    values = np.arange(1, 1 + 24 * 8).reshape(24, 8)
    values[:, 4:] = 0  # absent chunks
    values[8:16] = 0  # an absent shard
    with repository.transaction(message="shards") as store:
        shards: Any = {"shape": (8, 8), "index_location": location}
        zarr.create_array(store, name="a", data=values, chunks=(2, 4), shards=shards, fill_value=0)
    array = bulk(repository.readonly_session().store)
    for part in (np.s_[:], np.s_[1:], np.s_[3:23, 1:], np.s_[:, 2:3], np.s_[::2], np.s_[5]):
        np.testing.assert_array_equal(array[part], values[part])


def chunk_key(storage: MemoryStorage) -> str:
    return next(info.key for info in storage.list("chunks/"))


@pytest.mark.parametrize(
    ("part", "far"), [(np.s_[:], False), (np.s_[::7], False), (np.s_[30:38], True)]
)
def test_a_damaged_chunk_raises_and_leaves_nothing_of_it(part: Any, far: bool) -> None:
    storage = MemoryStorage()
    filled(storage)
    key = chunk_key(storage)
    data = bytearray(storage.get(key))
    at = 48 * 2 * 17 + 5  # in the first chunk of the rows 34 and 35
    data[at] ^= 1
    storage.put(key, bytes(data))
    opened = LatencyStorage(storage, latency_s=0) if far else storage
    array = bulk(zm.open(opened).readonly_session().store)
    out = np.zeros(np.zeros((40, 6))[part].shape, array.dtype)
    with pytest.raises(CorruptObjectError, match=rf"{key} \(offset {48 * 34}\)"):
        array.get_basic_selection(part, out=NDBuffer.from_numpy_array(out))
    hurt = np.zeros((40, 6), bool)
    hurt[34:36, :3] = True
    assert not out[hurt[part]].any()


@pytest.mark.parametrize("problem", ["damaged", "cut", "missing"])
def test_a_chunk_that_is_read_into_the_output_leaves_nothing_if_it_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    monkeypatch.setattr(batch, "LARGE_BYTES", 1)
    storage = LocalStorage(tmp_path)
    repository, values = filled(storage, (20, 6), (2, 6), **{"pack-chunk-bytes": 0})
    array = bulk(repository.readonly_session().store)
    whole = values[4:6].tobytes()
    (key,) = (info.key for info in storage.list("chunks/") if storage.get(info.key) == whole)
    storage.delete_many([key])
    if problem != "missing":
        storage.create(key, whole[:-1] + b"\x01" if problem == "damaged" else whole[:-9])
    out = np.full(values.shape, -1)
    with pytest.raises(MissingChunkError if problem == "missing" else CorruptObjectError):
        array.get_basic_selection(np.s_[:], out=NDBuffer.from_numpy_array(out))
    assert {*out[4:6].flat} <= {0, -1}


def test_an_expired_snapshot_is_an_error_and_a_follower_moves_on() -> None:
    storage = MemoryStorage()
    repository, values = filled(storage)
    old = chunk_key(storage)
    stale = bulk(repository.readonly_session().store)
    follower = bulk(repository.readonly_session(follow=True).store)
    with repository.transaction(message="changed") as store:
        zarr.open_array(store, path="a")[:] = values + 1
    repository.expire_snapshots(keep_last=1)
    storage.delete_many([old])
    np.testing.assert_array_equal(follower[:], values + 1)
    with pytest.raises(SnapshotExpiredError):
        stale[:]


def test_an_array_that_is_told_to_reads_in_bulk_and_is_otherwise_the_same() -> None:
    repository, values = filled("memory://told-to-read-in-bulk")
    session = repository.writable_session()
    array = zarr.open_array(session.store, path="a")
    use_bulk(array)
    array[3:9] = values[3:9] = 7
    array.attrs["units"] = "m"
    array.resize((50, 6))
    np.testing.assert_array_equal(array[:40], values)
    np.testing.assert_array_equal(array.oindex[[3, 30]], values[[3, 30]])
    session.commit("changed")
    again = zarr.open_array(repository.readonly_session().store, path="a")
    use_bulk(again)
    again = pickle.loads(pickle.dumps(again))
    assert type(again.async_array.codec_pipeline) is BulkCodecPipeline
    np.testing.assert_array_equal(again[:40], values)
    assert (again.shape, again.attrs["units"]) == ((50, 6), "m")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    zarr.config.reset()


@pytest.mark.parametrize(
    ("place", "shards"), [("memory", None), ("disk", (2048,)), ("far", (2048,))]
)
def test_tasks_that_write_parts_of_one_chunk_undo_nothing(
    tmp_path: Path, place: str, shards: tuple[int, ...] | None
) -> None:
    """Zarr's own pipelines lose most of these values."""
    places = {
        "memory": MemoryStorage,
        "disk": lambda: LocalStorage(tmp_path / "r"),
        "far": lambda: LatencyStorage(MemoryStorage(), latency_s=0),
    }
    session = zm.create(places[place]()).writable_session()
    with zm.tune_zarr():
        a = zarr.create_array(
            session.store,
            name="a",
            shape=(10_240,),
            chunks=(128,) if shards else (2048,),
            shards=shards,
            dtype="i4",
        )
    values = np.arange(1, 10_241, dtype="i4")
    blocks = da.from_array(values, 400)  # of which some reach into two chunks
    da.store(blocks, a, lock=False, scheduler="threads", num_workers=8)
    np.testing.assert_array_equal(np.asarray(a[:]), values)


def test_a_large_shard_of_which_most_is_wanted_is_not_held_whole() -> None:
    repository, mib = zm.create(MemoryStorage()), 1024**2
    with repository.transaction(message="a shard") as store:
        shards: Any = {"shape": (96 * mib,), "chunks": (mib,), "shards": (96 * mib,)}
        array = zarr.create_array(store, name="a", dtype="u1", fill_value=1, **shards)
        array[:] = 0
    array = bulk(repository.readonly_session().store)
    tracemalloc.start()
    try:
        assert not array[: 48 * mib].any()
        assert tracemalloc.get_traced_memory()[1] < 3 * 48 * mib  # whole, it takes five times
    finally:
        tracemalloc.stop()
