"""No chunk is decompressed to more than its array says, whoever decodes it and however it lies."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr
import zstandard
from numcodecs import Blosc, Delta, GZip, Zstd
from zarr import codecs as v3
from zarr.codecs import numcodecs as numcodecs_v3
from zarr.core.buffer.cpu import Buffer

import zarr_manifests as zm
from served import get, serving
from zarr_manifests.bulk import use_bulk
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.ids import crc32c
from zarr_manifests.storage.memory import MemoryStorage

pytestmark = pytest.mark.filterwarnings(
    "ignore::zarr.errors.UnstableSpecificationWarning", "ignore::zarr.errors.ZarrUserWarning"
)

CELLS, PART = 20, 10
LARGE = 32 * 1024**2
MOST_BYTES = 8 * 1024**2
"""What a request may take beside the chunks."""


def honest(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def frame(data: bytes) -> bytes:
    """A frame that does not say its size."""
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


SMALL = bytes(4 * PART)
SKIPPED = struct.pack("<II", 0x184D2A50, 4) + b"none"


def shard(*parts: bytes) -> bytes:
    at = 0
    index = []
    for part in parts:
        index += [at, len(part)]
        at += len(part)
    numbers = np.array(index, "<u8").tobytes()
    return b"".join(parts) + numbers + struct.pack("<I", crc32c(numbers))


def with_chunk(data: bytes, **options: Any) -> zm.Repository:
    """A repository with an array `a` whose first chunk has these bytes."""
    repo = zm.create(MemoryStorage())
    key = "a/0" if options.get("zarr_format") == 2 else "a/c/0"
    with repo.transaction(message="chunk") as store:
        made = {"shape": (CELLS,), "chunks": (PART,), "dtype": "f4"} | options
        zarr.create_array(store, name="a", **made)
        store.set_sync(key, Buffer.from_bytes(data))
    return repo


def peak(call: Callable[[], Any]) -> int:
    """The most bytes that Python has allocated during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def opened(repo: zm.Repository) -> Any:
    array = zarr.open_array(repo.readonly_session("main").store, path="a", mode="r")
    use_bulk(array)
    return array


ZSTD: dict[str, Any] = {"compressors": v3.ZstdCodec()}
V2: dict[str, Any] = {"zarr_format": 2}


@pytest.mark.parametrize(
    ("options", "bomb"),
    [
        (ZSTD, honest),
        (ZSTD | {"filters": [numcodecs_v3.Delta(dtype="f4")]}, frame),
        (ZSTD | {"shards": (CELLS,)}, lambda large: shard(*[honest(SMALL) + honest(large)] * 2)),
        (
            V2 | {"compressors": Zstd(), "filters": [Delta(dtype="f4")]},
            lambda large: SKIPPED + honest(large),
        ),
        (
            V2 | {"compressors": None, "filters": [GZip()]},
            lambda large: gzip.compress(SMALL) + gzip.compress(large),
        ),
        ({"compressors": v3.BloscCodec(typesize=4)}, Blosc(cname="zstd").encode),
    ],
    ids=["zstd", "no bulk decoder", "part of a shard", "format 2", "filter of format 2", "blosc"],
)
def test_what_becomes_larger_than_its_chunk_is_damage(
    options: dict[str, Any], bomb: Callable[[bytes], bytes]
) -> None:
    repo = with_chunk(bomb(bytes(LARGE)), **options)
    refused(repo, slice(None))
    refused(repo, slice(0, 3))


def refused(repo: zm.Repository, cells: slice = slice(None)) -> None:
    array = opened(repo)

    def read() -> None:
        with pytest.raises(CorruptObjectError, match="a chunk decompresses to more than"):
            array[cells]

    assert peak(read) < MOST_BYTES


def test_a_slice_of_it_is_not_served() -> None:
    repo = with_chunk(gzip.compress(bytes(LARGE)), compressors=v3.GzipCodec())
    answers = []
    with serving(repo) as url:
        get(url, "/slice/main/none")  # so that what it imports is not counted
        assert peak(lambda: answers.append(get(url, "/slice/main/a"))) < MOST_BYTES
    assert answers[0].status == 500
    assert answers[0].text.startswith("a chunk decompresses to more than")


def test_what_compresses_whole_shards_is_bounded_too() -> None:
    whole = shard(bytes(4 * PART), bytes(4 * PART))
    serializer = v3.ShardingCodec(chunk_shape=(PART,))
    options = {"chunks": (CELLS,), "serializer": serializer, "compressors": v3.GzipCodec()}
    assert opened(with_chunk(gzip.compress(whole), **options))[:].tolist() == [0] * CELLS
    refused(with_chunk(gzip.compress(whole + bytes(LARGE)), **options))


def test_parts_of_a_shard_that_overlap_are_not_copied() -> None:
    """Each part claims all bytes of the shard."""
    parts, body = 1024, 64 * 1024
    index = np.array([[0, body]] * parts, "<u8").tobytes()
    data = bytes(body) + index + struct.pack("<I", crc32c(index))
    array = opened(with_chunk(data, shape=(parts,), chunks=(1,), shards=(parts,), compressors=None))

    def read() -> None:
        with pytest.raises(ValueError, match="reshape"):
            array[:]

    assert peak(read) < MOST_BYTES
