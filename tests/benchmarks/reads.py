"""Reads of compressed chunks, shards, series and days; appends of days; and what limits them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr
import zarr
import zstandard
from contestants import CONTESTANTS, Contestant, Icechunk, Ours, opened, use_pipeline, values
from numcodecs.zstd import Zstd
from runner import Case, Figure, Watch
from workloads import reading

import zarr_manifests as zm

_SEED = 7
_SIDE = 160
_ZSTD = {"compressors": [zarr.codecs.ZstdCodec(level=1)]}


def _smooth(chunks: int, chunk_bytes: int) -> np.ndarray:
    """As many rows of a random walk, a chunk each; they compress to two fifths."""
    steps = np.random.default_rng(_SEED).normal(0, 10, (chunks, chunk_bytes // 4))
    return np.cumsum(steps, axis=1).astype(np.int32)


def _written(case: Case, data: np.ndarray, chunks: tuple[int, ...], **how: Any) -> Contestant:
    use_pipeline(case.pipeline)
    contestant = CONTESTANTS[case.contestant](case.folder)
    contestant.create()
    store, commit = contestant.writer()
    made = {"compressors": None, **how}
    zarr.create_array(store, name="a", data=data, chunks=chunks, **made)
    commit()
    return contestant


def _all(case: Case, contestant: Contestant, data: np.ndarray, chunks: int) -> Iterator[Figure]:
    while True:
        array = opened(contestant, case.pipeline)
        with Watch() as watch:
            found = array[:]
        assert np.array_equal(found, data)
        yield watch.figure(chunks)


def reading_zstd(case: Case) -> Iterator[Figure]:
    """Read all chunks of a compressed array; the contestant `decode` only decodes and copies."""
    chunks = case.sizes["chunks"]
    data = _smooth(chunks, case.sizes["chunk_bytes"])
    if case.contestant == "decode":
        return _decoding(data)
    return _all(case, _written(case, data, (1, data.shape[1]), **_ZSTD), data, chunks)


def _decoding(data: np.ndarray) -> Iterator[Figure]:
    frames = [bytes(Zstd(level=1).encode(row)) for row in data]
    while True:
        decompress = zstandard.ZstdDecompressor().decompress
        with Watch() as watch:
            found = np.empty_like(data)
            for row, frame in zip(found, frames, strict=True):
                row[:] = np.frombuffer(decompress(frame), row.dtype)
        assert np.array_equal(found, data)
        yield watch.figure(len(data))


def reading_raw(case: Case) -> Iterator[Figure]:
    """Read all chunks of an array; the contestant `memcpy` only copies them from memory."""
    return _copying(case) if case.contestant == "memcpy" else reading(case)


def _copying(case: Case) -> Iterator[Figure]:
    data = values(case.sizes["chunks"], case.sizes["chunk_bytes"])
    while True:
        with Watch() as watch:
            found = np.empty_like(data)
            for row, chunk in zip(found, data, strict=True):
                row[:] = chunk
        assert np.array_equal(found, data)
        yield watch.figure(len(data))


def reading_shards(case: Case, codec: str) -> Iterator[Figure]:
    """Read all of an array in shards of 1 MB, which hold chunks of 4 KB."""
    chunks, inner = case.sizes["chunks"], case.sizes["a shard"]
    raw = codec == "raw"
    data = values(chunks, 4096) if raw else _smooth(chunks, 4096)
    how: dict[str, Any] = {"shards": (inner, data.shape[1]), **({} if raw else _ZSTD)}
    return _all(case, _written(case, data, (1, data.shape[1]), **how), data, chunks)


def following(case: Case) -> Iterator[Figure]:
    """Read the values of one pixel at all times, each from a chunk of its own."""
    times = case.sizes["chunks"]
    data = np.random.default_rng(_SEED).random((times, 64, 64), np.float32)
    contestant = _written(case, data, (1, 64, 64))
    while True:
        array = opened(contestant, case.pipeline)
        with Watch() as watch:
            found = array[:, 31, 47]
        assert np.array_equal(found, data[:, 31, 47])
        yield watch.figure(times)


def visiting(case: Case) -> Iterator[Figure]:
    """Read single days, four chunks of 100 KB each, in any order."""
    days = case.sizes["days"]
    rng = np.random.default_rng(_SEED)
    data = rng.random((days, 2 * _SIDE, 2 * _SIDE), np.float32)
    contestant = _written(case, data, (1, _SIDE, _SIDE))
    while True:
        array = opened(contestant, case.pipeline)
        array[0]  # the manifest is in memory
        wanted = rng.permutation(days).tolist()
        with Watch() as watch:
            found = [array[day] for day in wanted]
        assert np.array_equal(found[-1], data[wanted[-1]])
        yield watch.figure(days)


def adding_days(case: Case) -> Iterator[Figure]:
    """Append a day of three variables with xarray, commit, and have it on the disk."""
    use_pipeline(case.pipeline)
    contestant = CONTESTANTS[case.contestant](case.folder)
    contestant.create()
    assert isinstance(contestant, Ours | Icechunk)
    rng = np.random.default_rng(_SEED)
    first, each = np.datetime64("2000-01-01", "ns"), case.sizes["days"]

    def day(number: int) -> xr.Dataset:
        shape = (1, 2 * _SIDE, 2 * _SIDE)
        variables = {name: (("time", "y", "x"), rng.random(shape, np.float32)) for name in "tuv"}
        return xr.Dataset(variables, {"time": [first + np.timedelta64(number, "D")]})

    def write(ds: xr.Dataset, **how: Any) -> None:
        if isinstance(contestant, Ours):
            zm.write(ds, repository, message="a day", **how)
            return
        from icechunk.xarray import to_icechunk

        session = repository.writable_session("main")
        to_icechunk(ds, session, **how)
        session.commit("a day")

    repository = contestant.open()
    chunks = {"chunks": (1, _SIDE, _SIDE), "compressors": None}
    encoding = {**dict.fromkeys("tuv", chunks), "time": {"units": "days since 1990-01-01"}}
    write(day(0), encoding=encoding)
    number = 1
    while True:
        added = [day(number + i) for i in range(each)]
        with Watch() as watch:
            for ds in added:
                write(ds, append_dim="time")
                contestant.make_durable()
        number += each
        assert zarr.open_array(contestant.reader(), path="t", mode="r").shape[0] == number
        yield watch.figure(each)
