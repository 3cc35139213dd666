"""Arrays read and written in bulk have the values of Zarr's own pipeline, or raise its errors."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import dask.array as da
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, integer_array_indices
from numcodecs import Blosc, GZip, Shuffle, Zstd
from zarr import codecs as v3
from zarr.core.buffer.cpu import Buffer, NDBuffer
from zarr.core.codec_pipeline import FusedCodecPipeline
from zarr.storage import MemoryStore
from zarr.storage._utils import normalize_path
from zarr.testing import strategies as zarr_strategies

import zarr_manifests as zm
from effort import examples
from zarr_manifests.bulk import chunk_locks, here, reading, use_bulk, writing
from zarr_manifests.bulk.pipeline import BulkCodecPipeline
from zarr_manifests.engine.edit.bulk_chunks import ArrayKeys
from zarr_manifests.error_cases import StorageFullError
from zarr_manifests.errors import (
    CorruptObjectError,
    MissingChunkError,
    SessionClosedError,
    SnapshotExpiredError,
)
from zarr_manifests.session import initialized_chunks
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage, Fault, FaultyStorage, LatencyStorage

pytestmark = pytest.mark.filterwarnings(
    "ignore::zarr.errors.UnstableSpecificationWarning", "ignore::zarr.errors.ZarrUserWarning"
)
_TYPES = ["bool", "i1", "i4", "u8", "f2", ">f4", "f8", "c8", "S3", "<U2", "M8[s]", "T"]
_V3: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "zstd": lambda: [v3.ZstdCodec(level=1)],
    "blosc": lambda: [v3.BloscCodec()],
    "gzip and crc": lambda: [v3.GzipCodec(level=1), v3.Crc32cCodec()],
}
_V2: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "zstd": lambda: Zstd(level=1),
    "blosc": Blosc,
    "gzip and crc": lambda: GZip(level=1),
}
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


def _numbers(draw: Any, ndim: int, most: int) -> list[int]:
    return draw(st.lists(st.integers(1, most), min_size=ndim, max_size=ndim))


def _values(draw: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    numbers = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 3, shape)
    plain = dtype.kind in "SUT"
    return numbers.astype(str).astype(dtype) if plain else numbers.astype("i8").astype(dtype)


@st.composite
def options(draw: Any) -> dict[str, Any]:
    """Of an array of any kind."""
    ndim = draw(st.integers(0, 3))
    dtype = np.dtypes.StringDType() if (name := draw(st.sampled_from(_TYPES))) == "T" else name
    dtype = np.dtype(dtype)
    chunks = tuple(_numbers(draw, ndim, 3))
    made: dict[str, Any] = {
        "name": "a",
        "shape": tuple(_numbers(draw, ndim, 9)),
        "chunks": chunks,
        "dtype": dtype,
        "config": {
            "write_empty_chunks": draw(st.booleans()),
            "order": draw(st.sampled_from("CF")),
        },
        "fill_value": 1 if dtype.kind in "if" and draw(st.booleans()) else None,
    }
    codec = draw(st.sampled_from(sorted(_V3)))
    if draw(st.booleans()) and dtype.kind != "T":
        shuffled = draw(st.booleans())
        order = {"order": draw(st.sampled_from("CF"))}
        made["config"].pop("order")
        return {
            **made,
            **order,
            "zarr_format": 2,
            "compressors": _V2[codec](),
            "filters": [Shuffle(dtype.itemsize)] if shuffled else None,
        }
    if ndim and draw(st.booleans()):
        made["shards"] = tuple(2 * n for n in chunks)
    orders = draw(st.lists(st.permutations(range(ndim)), max_size=1)) if ndim else []
    return {
        **made,
        "filters": [v3.TransposeCodec(order=order) for order in orders],
        "compressors": _V3[codec](),
    }


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


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_any_array_has_the_values_of_zarrs_own_pipeline(data: st.DataObject) -> None:
    given_, draw = data.draw(options()), data.draw
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
        patch.setattr(reading, "LARGE_BYTES", large)
        patch.setattr(writing, "LARGE_BYTES", large)
        patch.setattr(writing, "_STEP_BYTES", draw(st.sampled_from([40, 1 << 20])))
        patch.setattr(writing, "_MOST_LOOKED_UP", draw(st.sampled_from([0, 16])))
        if draw(st.integers(0, 4)) == 0:  # as if another thread had changed a node
            patch.setattr(ArrayKeys, "hold", lambda *_: False)
        for _ in range(draw(st.integers(0, 3))):
            how, part = _selection(draw, judge.shape, unique=True)
            shape = np.shape(_indexed(judge, how)[part])
            values = _values(draw, judge.dtype, shape)
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


# --- what Zarr's own tests try ---------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_arrays_that_zarr_draws_are_read_and_written_as_numpy_arrays(data: st.DataObject) -> None:
    config = {**_CONFIG, "pack-bytes": data.draw(st.sampled_from([100, 8_388_608]))}
    store = zm.create(MemoryStorage(), config).writable_session().store
    shapes = array_shapes(max_dims=4, min_side=1)
    with zm.tune_zarr():
        array: Any = data.draw(
            zarr_strategies.arrays(
                stores=st.just(store),
                shapes=shapes,
                paths=st.just("g"),
                array_names=st.just("a"),
                attrs=st.none(),
                compressors=st.sampled_from([None, "default"]),
            )
        )
    assert type(array.async_array.codec_pipeline) is BulkCodecPipeline
    judge = array[:]
    values = zarr_strategies.numpy_arrays
    at = data.draw(zarr_strategies.basic_indices(shape=judge.shape))
    np.testing.assert_array_equal(array[at], judge[at])
    array[at] = judge[at] = data.draw(values(shapes=st.just(judge[at].shape), dtype=judge.dtype))
    np.testing.assert_array_equal(array[:], judge)
    at, there = data.draw(zarr_strategies.orthogonal_indices(shape=judge.shape))
    np.testing.assert_array_equal(array.oindex[at], judge[there])
    numbers = [each for each in there if isinstance(each, np.ndarray)]
    if all(each.size == np.unique(each).size for each in numbers):
        given_ = data.draw(values(shapes=st.just(judge[there].shape), dtype=judge.dtype))
        array.oindex[at] = judge[there] = given_
        np.testing.assert_array_equal(array[:], judge)
    points = array_shapes(min_side=1, max_dims=None)
    at = data.draw(integer_array_indices(shape=judge.shape, result_shape=points))
    np.testing.assert_array_equal(array.vindex[at], judge[at])


def test_a_few_chunks_keep_the_cells_that_are_not_written() -> None:
    storage = MemoryStorage()
    repository, values = filled(storage, (7,), (2,))
    with repository.transaction(message="some") as store:
        array = bulk(store)
        array.oindex[[0, 0, 2, 2]] = np.array([70, 71, 72, 73])  # as many cells as both chunks have
        array[5:7] = [74, 75]
        array.resize((8,))
        values = np.append(values, 0)
        values[[0, 2, 5, 6]] = 71, 73, 74, 75
        np.testing.assert_array_equal(array[:], values)
    np.testing.assert_array_equal(bulk(repository.readonly_session().store)[:], values)


# --- where chunks are ------------------------------------------------------------------------


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


def counts(repository: zm.Repository) -> tuple[int, int]:
    metrics = repository.metrics()
    return metrics.bulk_batches, metrics.bulk_fallbacks


def test_requests_that_go_in_bulk_and_those_that_do_not_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "zarr_manifests.bulk")
    repository, values = filled(MemoryStorage())
    array = bulk(repository.readonly_session().store)
    for part in (np.s_[:], np.s_[3:33:2, 1], np.s_[0, 0], np.s_[0:1]):
        np.testing.assert_array_equal(array[part], values[part])
    np.testing.assert_array_equal(array.oindex[[1, 30], [0, 5]], values[np.ix_([1, 30], [0, 5])])
    assert counts(repository) == (5, 0)
    with repository.transaction(message="text") as store:
        words = np.array(["a", "bc"], np.dtypes.StringDType())
        zarr.create_array(store, name="text", data=words, chunks=(1,))
    text = bulk(repository.readonly_session().store, "text")
    for _ in range(2):
        assert text[:].tolist() == ["a", "bc"]
    assert counts(repository) == (5, 2)
    assert len(caplog.records) == 1, "once, not for each request"


@pytest.mark.parametrize("location", ["start", "end"])
def test_shards_of_which_most_is_wanted_are_read_whole(location: str) -> None:
    repository = zm.create(MemoryStorage())
    values = np.arange(1, 1 + 24 * 8).reshape(24, 8)
    values[:, 4:] = 0  # absent chunks
    values[8:16] = 0  # an absent shard
    with repository.transaction(message="shards") as store:
        shards: Any = {"shape": (8, 8), "index_location": location}
        zarr.create_array(store, name="a", data=values, chunks=(2, 4), shards=shards, fill_value=0)
    array = bulk(repository.readonly_session().store)
    for part in (np.s_[:], np.s_[1:], np.s_[3:23, 1:]):
        np.testing.assert_array_equal(array[part], values[part])
    assert counts(repository) == (3, 0)
    for part in (np.s_[:, 2:3], np.s_[::2], np.s_[5]):
        np.testing.assert_array_equal(array[part], values[part])
    assert counts(repository) == (3, 3)


def test_chunks_of_one_length_are_read_wherever_they_are_in_their_shard() -> None:
    repository = zm.create(MemoryStorage())
    values = np.arange(1, 1 + 8 * 8).reshape(8, 8)
    values[2:4, 4:6] = 0  # an absent chunk
    with repository.transaction(message="shards") as store:
        made: dict[str, Any] = {"chunks": (2, 2), "shards": (8, 8), "compressors": None}
        zarr.create_array(store, name="a", data=values, fill_value=0, **made)
    array = bulk(repository.readonly_session().store)
    for part in (np.s_[:], np.s_[1:, :7]):
        np.testing.assert_array_equal(array[part], values[part])
    assert counts(repository) == (2, 0)


def test_neighbours_are_read_together() -> None:
    counting = CountingStorage(MemoryStorage())
    repository, values = filled(counting)
    array = bulk(repository.readonly_session().store)
    counting.reset()
    np.testing.assert_array_equal(array[:], values)
    assert sum(record.key.startswith("chunks/") for record in counting.log) == 1


def test_many_requests_of_an_object_store_are_sent_at_once() -> None:
    far = LatencyStorage(MemoryStorage(), latency_s=0)
    repository, values = filled(far, **{"pack-chunk-bytes": 0})
    np.testing.assert_array_equal(bulk(repository.readonly_session().store)[:], values)
    assert counts(repository) == (1, 0)


def test_a_chunk_cache_serves_requests_and_takes_what_they_read() -> None:
    storage = MemoryStorage()
    _, values = filled(storage)
    counting = CountingStorage(storage)
    repository = zm.open(counting, cache={"chunk-bytes": 1 << 20})
    array = bulk(repository.readonly_session().store)
    for part in (np.s_[:30], np.s_[:], np.s_[:]):
        counting.reset()
        np.testing.assert_array_equal(array[part], values[part])
    assert counting.requests == 0
    metrics = repository.metrics()
    assert (metrics.chunk_cache_misses, metrics.chunk_cache_hits) == (40, 30 + 40)


def test_chunks_elsewhere_are_read(tmp_path: Path) -> None:
    values = np.arange(60, dtype="u1")
    (tmp_path / "a.bin").write_bytes(values.tobytes())
    repository = zm.create("memory://bulk-virtual", virtual_containers={"raw": tmp_path})
    store = repository.writable_session().store
    zarr.create_array(store, name="a", shape=(60,), chunks=(4,), dtype="u1", compressors=None)
    number = np.arange(15)
    store.set_virtual_refs(
        "a", number[:, None], ["virtual://raw/a.bin"], number * 0, number * 4, number * 0 + 4
    )
    array = bulk(store)
    array[8:11] = 0
    values[8:11] = 0
    np.testing.assert_array_equal(array[:], values)
    np.testing.assert_array_equal(array[::3], values[::3])


def test_arrays_that_lie_in_the_keys_of_another_are_kept_apart() -> None:
    session = zm.create(MemoryStorage()).writable_session()
    made: dict[str, Any] = {"chunks": (1,), "dtype": "i4"}
    outer = zarr.create_array(session.store, name="a", shape=(9,), **made)
    outer[:] = 1
    keys = {"name": "v2", "separator": "/"}
    zarr.create_array(session.store, name="b", shape=(3,), chunk_key_encoding=keys, **made)[:] = 7
    for name in ("zarr.json", "0", "1", "2"):
        session.store.set_sync(f"a/c/{name}", session.store.get_sync(f"b/{name}"))
    np.testing.assert_array_equal(bulk(session.store)[:], fused(outer)[:])


# --- writes ----------------------------------------------------------------------------------


def empty_array(storage: Any, **given_: Any) -> tuple[zm.Repository, zm.Session, Any]:
    """A repository, a session, and its array `a` of 4,000 chunks of 4 KB, opened in bulk."""
    repository = zm.create(storage, given_)
    session = repository.writable_session()
    made: dict[str, Any] = {"shape": (4000, 512), "chunks": (1, 512), "dtype": "f8"}
    zarr.create_array(session.store, name="a", compressors=None, **made)
    return repository, session, bulk(session.store)


@pytest.mark.slow
def test_a_large_batch_is_written_as_packs_of_its_own_and_a_small_one_is_staged() -> None:
    storage = MemoryStorage()
    repository, session, array = empty_array(storage)
    values = np.random.default_rng(1).random((4000, 512))
    array[:3] = values[:3] + 1
    array[:] = values
    assert counts(repository) == (2, 0)
    sizes = sorted(len(storage.get(info.key)) for info in storage.list("chunks/"))
    assert sizes == [2000 * 4096, 2000 * 4096]
    array[5:7] = 0  # the fill value
    array[10:12] = 7
    values[5:7], values[10:12] = 0, 7
    np.testing.assert_array_equal(fused(array)[:], values)
    session.commit("written")
    reader = repository.readonly_session()
    np.testing.assert_array_equal(fused(zarr.open_array(reader.store, path="a"))[:], values)
    assert len(initialized_chunks(reader, "a")) == 3998
    assert len(list(storage.list("chunks/"))) == 3


class Recording(MemoryStorage):
    """A storage that notes the memory it is given for chunk objects."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[np.ndarray] = []

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        if key.startswith("chunks/"):
            self.given.append(np.frombuffer(data, np.uint8))
        return super().create(key, data, durable=durable)


@pytest.mark.parametrize(
    ("chunks", "endian", "copied"),
    [
        ((1, 512), "little", False),
        ((8, 512), "little", False),
        ((8, 64), "little", True),
        ((1, 512), "big", True),
    ],
)
def test_chunks_that_lie_in_the_values_as_in_a_pack_are_not_copied(
    chunks: tuple[int, ...], endian: Any, copied: bool
) -> None:
    storage = Recording()
    session = zm.create(storage).writable_session()
    made: dict[str, Any] = {"shape": (4000, 512), "chunks": chunks, "dtype": "f8"}
    made["serializer"] = v3.BytesCodec(endian=endian)
    zarr.create_array(session.store, name="a", compressors=None, **made)
    array = bulk(session.store)
    values = np.random.default_rng(1).random((3000, 512))
    array[1000:] = values
    assert len(storage.given) == 2
    for given_ in storage.given:
        assert np.shares_memory(given_, values) != copied
    assert (fused(array)[:1000] == 0).all()
    np.testing.assert_array_equal(fused(array)[1000:], values)


def test_many_large_chunks_are_written_as_packs_if_no_codec_takes_time() -> None:
    storage = Recording()
    session = zm.create(storage).writable_session()
    values = np.random.default_rng(1).random((120, 64, 128))  # 64 KB a chunk
    made: dict[str, Any] = {"shape": values.shape, "chunks": (1, 64, 128), "dtype": "f8"}
    zarr.create_array(session.store, name="a", compressors=None, **made)
    array = bulk(session.store)
    array[:] = values
    assert [len(data) for data in storage.given] == [120 * 65536]
    session.commit("written")
    np.testing.assert_array_equal(fused(array)[:], values)


class Meddling(MemoryStorage):
    """A storage that makes a call after the first chunk object was written."""

    meddle: Callable[[], object] | None = None

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        made = super().create(key, data, durable=durable)
        if key.startswith("chunks/") and self.meddle is not None:
            meddle, self.meddle = self.meddle, None
            meddle()
        return made


def test_a_commit_between_writing_and_recording_has_chunks_written_again() -> None:
    storage = Meddling()
    repository, session, array = empty_array(storage)
    array[:2] = 3
    values = np.random.default_rng(1).random((4000, 512))
    storage.meddle = partial(session.commit, "in between")
    array[1000:] = values[1000:]
    session.commit("the rest")
    found = zarr.open_array(repository.readonly_session().store, path="a")[:]
    np.testing.assert_array_equal(found[1000:], values[1000:])
    assert (found[:2] == 3).all()
    # The first chunks, the first pack twice, and the rest.
    assert len(list(storage.list("chunks/"))) == 4


def test_chunks_of_an_array_that_is_discarded_before_they_are_recorded_stay_at_their_keys() -> None:
    storage = Meddling()
    repository, session, array = empty_array(storage, **{"pack-bytes": 8192})
    storage.meddle = session.discard_changes
    array[:4] = 7
    zarr.create_array(
        session.store, name="a", shape=(8, 512), chunks=(1, 512), dtype="f8", compressors=None
    )
    session.commit("written")
    found = zarr.open_array(repository.readonly_session().store, path="a")[:]
    assert (found[:4] == 7).all()
    assert (found[4:] == 0).all()


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("rows", [4, 32])
def test_a_session_that_is_closed_before_chunks_are_recorded_refuses_them(
    codec: str, rows: int
) -> None:
    storage = Meddling()
    config = {"pack-bytes": 4096, "inline-chunk-bytes": 0, "pack-chunk-bytes": 1024}
    session = zm.create(storage, config).writable_session()
    made: dict[str, Any] = {"shape": (32, 128), "chunks": (1, 128), "dtype": "f8"}
    zarr.create_array(session.store, name="a", compressors=_V3[codec](), **made)
    array = bulk(session.store)
    storage.meddle = session.close
    with pytest.raises(SessionClosedError):
        array[:rows] = np.random.default_rng(1).random((rows, 128))


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_of_a_part_that_fails_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    session = zm.create(MemoryStorage(), {"pack-bytes": 4096}).writable_session()
    made: dict[str, Any] = {"shape": (32, 128), "chunks": (1, 128), "dtype": "f8"}
    zarr.create_array(session.store, name="a", compressors=_V3[codec](), **made)
    array = bulk(session.store)
    left = [5]

    def failing(empty: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise ArithmeticError
            return empty(*args)

        return call

    monkeypatch.setattr(writing, "_empty", failing(writing._empty))
    monkeypatch.setattr(writing, "_STEP_BYTES", 2048)  # two steps for each pack
    with pytest.raises(ArithmeticError):
        array[:] = np.arange(1, 1 + 32 * 128).reshape(32, 128)
    assert {at for at, _ in initialized_chunks(session, "a").tolist()} == {*range(8)}
    array[:] = 1
    session.commit("written")
    assert (array[:] == 1).all()


def test_a_full_storage_leaves_nothing_of_a_pack() -> None:
    fault = Fault("fail_before", op="create", key="chunks/*", skip=1, error=StorageFullError)
    repository, session, array = empty_array(FaultyStorage(MemoryStorage(), [fault]))
    values = np.random.default_rng(1).random((4000, 512))
    with pytest.raises(StorageFullError):
        array[:] = values
    assert len(initialized_chunks(session, "a")) == 2000
    array[:] = values
    session.commit("written")
    np.testing.assert_array_equal(bulk(repository.readonly_session().store)[:], values)


def test_writes_that_are_refused_raise_as_they_do_one_by_one() -> None:
    repository, session, array = empty_array(MemoryStorage())
    session.commit("empty")
    for store in (repository.readonly_session().store, session.store.with_read_only(True)):
        with pytest.raises(Exception, match="read-only"):
            bulk(store)[:] = 1
    session.close()
    with pytest.raises(SessionClosedError):
        array[:] = 1


def test_a_chunk_that_is_filled_by_many_commits_takes_no_more_requests_than_one_by_one() -> None:
    def requests(read: Callable[[Any], Any]) -> list[str]:
        counting = CountingStorage(MemoryStorage())
        zm.create(counting, {"inline-chunk-bytes": 0})
        with zm.open(counting).transaction(message="made") as store:
            made: dict[str, Any] = {"shape": (64, 4), "chunks": (64, 1), "dtype": "f8"}
            zarr.create_array(store, name="a", **made)
        for i in range(12):
            counting.reset()
            repository = zm.open(counting)
            with repository.transaction(message="appended") as store:
                read(zarr.open_array(store, path="a"))[i] = i + 1
        return sorted(
            record.key.partition("/")[0] for record in counting.log if record.op.startswith("get")
        )

    assert requests(lambda a: bulk(a.store)) == requests(fused)


# --- what is not whole -----------------------------------------------------------------------


def chunk_key(storage: MemoryStorage) -> str:
    return next(info.key for info in storage.list("chunks/"))


@pytest.mark.parametrize("part", [np.s_[:], np.s_[30:38], np.s_[::7]])
@pytest.mark.parametrize("far", [False, True])
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


@pytest.mark.parametrize("part", [np.s_[:], np.s_[4:6]])
@pytest.mark.parametrize("problem", ["damaged", "cut", "missing"])
def test_a_chunk_that_is_read_into_the_output_leaves_nothing_if_it_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: Any, problem: str
) -> None:
    monkeypatch.setattr(reading, "LARGE_BYTES", 1)
    storage = LocalStorage(tmp_path)
    repository, values = filled(storage, (20, 6), (2, 6), **{"pack-chunk-bytes": 0})
    array = bulk(repository.readonly_session().store)
    read: list[int] = []
    plain = LocalStorage.read_into
    monkeypatch.setattr(
        LocalStorage, "read_into", lambda *args: read.append(plain(*args)) or read[-1]
    )
    np.testing.assert_array_equal(array[part], values[part])
    assert read == [96] * (10 if part == np.s_[:] else 1)
    whole = values[4:6].tobytes()
    (key,) = (info.key for info in storage.list("chunks/") if storage.get(info.key) == whole)
    storage.delete_many([key])
    if problem != "missing":
        storage.create(key, whole[:-1] + b"\x01" if problem == "damaged" else whole[:-9])
    out = np.full(values[part].shape, -1)
    with pytest.raises(MissingChunkError if problem == "missing" else CorruptObjectError):
        array.get_basic_selection(part, out=NDBuffer.from_numpy_array(out))
    assert not np.isin(out, values[4:6]).any()
    assert {*(out[4:6] if part == np.s_[:] else out).flat} <= {0, -1}


def test_one_cell_is_read_into_an_output_without_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGE_BYTES", 1)
    repository, values = filled(IntoMemory(), (3, 4), (1, 1))
    array = bulk(repository.readonly_session().store)
    assert [array[1, at] for at in range(4)] == values[1].tolist()


def test_a_missing_object_raises() -> None:
    storage = MemoryStorage()
    repository, _ = filled(storage)
    storage.delete_many([chunk_key(storage)])
    with pytest.raises(MissingChunkError, match="is not read as fill value"):
        bulk(repository.readonly_session().store)[:]


def test_a_chunk_that_no_codec_made_raises_what_zarr_raises() -> None:
    session = zm.create(MemoryStorage()).writable_session()
    array = zarr.create_array(session.store, name="a", data=np.arange(1, 21), chunks=(2,))
    session.store.set_sync("a/c/3", Buffer.from_bytes(b"no frame"))
    with pytest.raises(Exception, match=r".") as due:
        fused(array)[:]
    with pytest.raises(type(due.value)):
        bulk(session.store)[:]
    np.testing.assert_array_equal(bulk(session.store)[8:], np.arange(9, 21))


def test_chunks_that_must_be_there_are_missed() -> None:
    session = zm.create(MemoryStorage()).writable_session()
    array = zarr.create_array(session.store, name="a", shape=(20,), chunks=(2,), dtype="i4")
    array[:10] = 1
    with zarr.config.set({"array.read_missing_chunks": False}):
        array = bulk(session.store)
    with pytest.raises(zarr.errors.ChunkNotFoundError, match="5 chunk"):
        array[:]


# --- sessions --------------------------------------------------------------------------------


def test_what_a_writer_reads_its_commit_may_depend_on() -> None:
    def noted(read: Callable[[Any], Any], part: slice) -> tuple[bool, ...]:
        repository, _ = filled(MemoryStorage(), (40,), (2,))
        mine = repository.writable_session()
        array = read(zarr.open_array(mine.store, path="a"))
        array[0:2] = 5
        _ = array[part]
        assert array[0] == 5
        reads = contents_of(mine.store).changes.reads
        assert not reads.boxes
        (chunks,) = reads.chunks.values()
        return tuple((at,) in chunks for at in range(20))

    for part in (np.s_[:], np.s_[:30], np.s_[28:34]):
        due = noted(fused, part)
        assert noted(lambda a: bulk(a.store), part) == due


def test_a_follower_reads_the_newest() -> None:
    repository, values = filled(MemoryStorage())
    array = bulk(repository.readonly_session(follow=True).store)
    np.testing.assert_array_equal(array[:], values)
    with repository.transaction(message="changed") as store:
        zarr.open_array(store, path="a")[:] = values + 1
    contents_of(array.store).follow()
    np.testing.assert_array_equal(array[:], values + 1)


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


def test_unsetting_chunks_of_an_expired_snapshot_is_an_error_and_unsets_none() -> None:
    storage = MemoryStorage()
    repository, values = filled(storage, (400, 6))
    repository.compact("main", "full")
    array = bulk(zm.open(storage).writable_session().store)
    old = [info.key for kind in ("manifests/", "deltas/") for info in storage.list(kind)]
    with repository.transaction(message="changed") as store:
        zarr.open_array(store, path="a")[:] = values + 1
    repository.compact("main", "full")
    repository.expire_snapshots(keep_last=1)
    storage.delete_many(old)
    with pytest.raises(SnapshotExpiredError):
        array[:40] = 0
    assert not list(contents_of(array.store).changes.refs())


def test_arrays_keep_the_pipeline_in_pickles(tmp_path: Path) -> None:
    repository, values = filled(str(tmp_path / "r"))
    array = bulk(repository.readonly_session().store)
    array[:]
    there = pickle.loads(pickle.dumps(array))
    assert type(there.async_array.codec_pipeline) is BulkCodecPipeline
    np.testing.assert_array_equal(there[:], values)


def test_an_array_that_is_told_to_reads_in_bulk_and_is_otherwise_the_same(tmp_path: Path) -> None:
    repository, values = filled(str(tmp_path / "r"))
    session = repository.writable_session()
    array, due = (zarr.open_array(session.store, path="a") for _ in range(2))
    use_bulk(array)
    assert (array.path, array.name, str(array.store_path)) == (
        due.path,
        due.name,
        str(due.store_path),
    )
    array[3:9] = 7
    values[3:9] = 7
    array.attrs["units"] = "m"
    array.resize((50, 6))
    again = zarr.open_array(repository.readonly_session().store, path="a")
    use_bulk(again)
    again = pickle.loads(pickle.dumps(again))
    assert type(again.async_array.codec_pipeline) is BulkCodecPipeline
    assert again[:].shape == (40, 6)
    np.testing.assert_array_equal(array[:40], values)
    np.testing.assert_array_equal(array[0], values[0])
    np.testing.assert_array_equal(array.oindex[[3, 30]], values[[3, 30]])
    session.commit("changed")
    found = zarr.open_array(repository.readonly_session().store, path="a")
    np.testing.assert_array_equal(found[:40], values)
    assert found.attrs["units"] == "m"
    other = zarr.create_array(MemoryStore(), data=values, chunks=(2, 3))
    use_bulk(other)
    np.testing.assert_array_equal(other[:], values)


@pytest.mark.parametrize("tuned", [False, True])
def test_an_array_that_is_told_to_normalizes_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: bool
) -> None:
    repository, values = filled(str(tmp_path / "r"))
    store = repository.readonly_session().store
    array = bulk(store) if tuned else zarr.open_array(store, path="a")
    use_bulk(array)
    normalized: list[str] = []

    def note(path: str) -> str:
        normalized.append(path)
        return normalize_path(path)

    for module in ("zarr.storage._common", "zarr_manifests.bulk.lazy_path"):
        monkeypatch.setattr(f"{module}.normalize_path", note)
    np.testing.assert_array_equal(array[:], values)
    assert [path for path in normalized if "/c/" in path] == []


def test_reads_within_one_loop_run_side_by_side() -> None:
    repository, values = filled(MemoryStorage())
    array = bulk(repository.readonly_session().store).async_array

    async def both() -> list[Any]:
        return await asyncio.gather(*(array.getitem(np.s_[i:]) for i in range(8)))

    for i, found in enumerate(asyncio.run(both())):
        np.testing.assert_array_equal(found, values[i:])


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    zarr.config.reset()


def test_an_interrupt_at_any_line_leaves_nothing_behind_for_later_requests() -> None:
    store = zm.create("memory://interrupted-here").writable_session().store
    a = zarr.create_array(store, name="a", data=np.arange(6), chunks=(2,))
    use_bulk(a)
    lines, before = 0, sys.gettrace()

    def run_until(last: int) -> int:
        """Write, and interrupt before that line of the module; return how many lines were run."""
        seen = 0

        def traced(frame: FrameType, event: str, _: object) -> Any:
            nonlocal seen
            if frame.f_code.co_filename != here.__file__:
                return None
            seen += event == "line"
            if seen == last:
                raise KeyboardInterrupt
            return traced

        sys.settrace(traced)
        try:
            with suppress(KeyboardInterrupt):
                here.write_here(a, (slice(1, None),), np.full(5, 9))
        finally:
            sys.settrace(before)
        return seen

    while run_until(lines + 1) > lines:
        lines += 1
        assert not here.is_here(), f"after line {lines}"
        assert a[1:].tolist() in ([1, 2, 3, 4, 5], [9] * 5)
        a[1:] = np.arange(1, 6)
    assert lines > 10
    assert a[:].tolist() == [0, 9, 9, 9, 9, 9]


# --- several tasks -------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [None, (2048,)], ids=["chunks", "shards"])
@pytest.mark.parametrize("place", ["memory", "disk", "far"])
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


def test_locks_of_chunks_are_free_in_a_forked_child() -> None:
    keys = [f"a/c/{i}" for i in range(1000)]
    with ExitStack() as held:
        for lock in chunk_locks.locks_of(keys, keys):
            held.enter_context(lock)
        child = os.fork()
        if not child:
            free = [lock.acquire(blocking=False) for lock in chunk_locks.locks_of(keys, keys)]
            os._exit(not all(free))
    assert os.waitpid(child, 0)[1] == 0
