"""No chunk is decompressed to more than its array says, whoever decodes it and however it lies."""

from __future__ import annotations

import gzip
import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr
import zstandard
from numcodecs import Blosc, Delta, GZip, Zlib, Zstd
from zarr import codecs as v3
from zarr.codecs import numcodecs as numcodecs_v3
from zarr.core.buffer.cpu import Buffer

import zarr_manifests as zm
from served import get, serving
from zarr_manifests.bulk import use_bulk
from zarr_manifests.decoding import BulkDecoder
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


def frame(data: bytes, *, says_size: bool) -> bytes:
    if says_size:
        return zstandard.ZstdCompressor().compress(data)
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


def honest(data: bytes) -> bytes:
    return frame(data, says_size=True)


SMALL = bytes(4 * PART)
SKIPPED = struct.pack("<II", 0x184D2A50, 4) + b"none"
BOMBS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "zstd": ("zstd", honest),
    "zstd without a size": ("zstd", lambda large: frame(large, says_size=False)),
    "zstd after a frame": ("zstd", lambda large: honest(SMALL) + honest(large)),
    "zstd after an empty frame": ("zstd", lambda large: honest(b"") + honest(large)),
    "zstd after a frame without a size": (
        "zstd",
        lambda large: frame(SMALL, says_size=False) + honest(large),
    ),
    "zstd after what is skipped": ("zstd", lambda large: SKIPPED + honest(large)),
    "gzip": ("gzip", gzip.compress),
    "gzip after a member": ("gzip", lambda large: gzip.compress(SMALL) + gzip.compress(large)),
    "gzip after padding": (
        "gzip",
        lambda large: gzip.compress(SMALL) + bytes(9) + gzip.compress(large),
    ),
    "blosc": ("blosc", Blosc(cname="zstd").encode),
    "zlib": ("zlib", zlib.compress),
}
CODECS: dict[str, Callable[[], Any]] = {
    "zstd": v3.ZstdCodec,
    "gzip": v3.GzipCodec,
    "blosc": lambda: v3.BloscCodec(typesize=4),
    "zlib": numcodecs_v3.Zlib,
}
OLD_CODECS: dict[str, Callable[[], Any]] = {
    "zstd": Zstd,
    "gzip": GZip,
    "blosc": Blosc,
    "zlib": Zlib,
}


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


def in_shards(name: str, bomb: bytes) -> zm.Repository:
    return with_chunk(shard(bomb, bomb), shards=(CELLS,), compressors=CODECS[name]())


LAYOUTS: dict[str, Callable[[str, bytes], zm.Repository]] = {
    "chunk": lambda name, bomb: with_chunk(bomb, compressors=CODECS[name]()),
    "part of a shard": in_shards,
    "no bulk decoder": lambda name, bomb: with_chunk(
        bomb, filters=[numcodecs_v3.Delta(dtype="f4")], compressors=CODECS[name]()
    ),
    "format 2": lambda name, bomb: with_chunk(
        bomb, zarr_format=2, compressors=OLD_CODECS[name](), filters=[Delta(dtype="f4")]
    ),
    "filter of format 2": lambda name, bomb: with_chunk(
        bomb, zarr_format=2, compressors=None, filters=[OLD_CODECS[name]()]
    ),
}


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


@pytest.mark.parametrize("cells", [slice(None), slice(0, 3)], ids=["all", "few"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", BOMBS)
def test_what_becomes_larger_than_its_chunk_is_damage(kind: str, layout: str, cells: slice) -> None:
    name, make = BOMBS[kind]
    array = opened(LAYOUTS[layout](name, make(bytes(LARGE))))

    def read() -> None:
        with pytest.raises(CorruptObjectError, match="a chunk decompresses to more than"):
            array[cells]

    assert peak(read) < MOST_BYTES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slice_of_it_is_not_served(layout: str) -> None:
    repo = LAYOUTS[layout]("gzip", gzip.compress(bytes(LARGE)))
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
    array = opened(with_chunk(gzip.compress(whole + bytes(LARGE)), **options))

    def read() -> None:
        with pytest.raises(CorruptObjectError, match="a chunk decompresses to more than"):
            array[:]

    assert peak(read) < MOST_BYTES


def test_a_later_frame_is_not_believed_what_it_claims() -> None:
    header = struct.pack("<IBQ", 0xFD2FB528, 0b11100000, LARGE)
    claims = header + (1 << 3 | 1).to_bytes(3, "little") + b"x"  # one block, the last, of a byte
    assert zstandard.frame_content_size(claims) == LARGE
    array = opened(with_chunk(honest(SMALL) + claims, compressors=v3.ZstdCodec()))

    def read() -> None:
        with pytest.raises(RuntimeError, match="Zstd decompression error"):
            array[:]

    assert peak(read) < MOST_BYTES


def test_parts_of_a_shard_that_overlap_are_not_copied() -> None:
    """Each part claims all bytes of the shard."""
    parts, body = 1024, 64 * 1024
    index = np.array([[0, body]] * parts, "<u8").tobytes()
    data = bytes(body) + index + struct.pack("<I", crc32c(index))
    repo = with_chunk(data, shape=(parts,), chunks=(1,), shards=(parts,), compressors=None)
    array = opened(repo)

    def read() -> None:
        with pytest.raises(ValueError, match="reshape"):
            array[:]

    assert peak(read) < MOST_BYTES


def test_of_a_shard_without_its_index_nothing_is_planned() -> None:
    side = 1024
    options = {"shape": (side, side), "chunks": (1, 1), "shards": (side, side), "dtype": "u1"}
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="chunk") as store:
        zarr.create_array(store, name="a", compressors=None, **options)
        store.set_sync("a/c/0/0", Buffer.from_bytes(b"short"))
    session = repo.readonly_session("main")
    document = json.loads(session.store.get_sync("a/zarr.json").to_bytes())
    decoder = BulkDecoder.of(document, np.dtype("u1"))
    assert decoder is not None
    out = np.zeros((side, side), "u1")
    assert peak(lambda: decoder.decode([((0, 0), b"short")], out, (0, 0))) < MOST_BYTES


@pytest.mark.parametrize(
    "stored",
    [
        lambda data: honest(data[:12]) + honest(data[12:]),
        lambda data: frame(data[:12], says_size=False) + honest(data[12:]),
        lambda data: SKIPPED + honest(data),
        lambda data: frame(data, says_size=False),
    ],
)
def test_frames_that_follow_one_another_are_what_zarr_reads(
    stored: Callable[[bytes], bytes],
) -> None:
    values = np.arange(PART, dtype="f4")
    repo = with_chunk(stored(values.tobytes()), compressors=v3.ZstdCodec())
    plain = zarr.open_array(repo.readonly_session("main").store, path="a", mode="r")
    assert plain[:PART].tolist() == values.tolist()
    assert opened(repo)[:PART].tolist() == values.tolist()


@pytest.mark.parametrize("filters", [None, [numcodecs_v3.Delta(dtype="i4")]])
@pytest.mark.parametrize(
    "compressors",
    [
        [v3.ZstdCodec(), v3.GzipCodec()],
        [v3.Crc32cCodec(), v3.BloscCodec(), v3.Crc32cCodec(), numcodecs_v3.Zlib()],
        [v3.GzipCodec(level=0), v3.ZstdCodec(), v3.GzipCodec(level=0)],
        [numcodecs_v3.Blosc(), numcodecs_v3.GZip(), numcodecs_v3.Zstd()],
    ],
)
@pytest.mark.parametrize("cells", [1, 1000])
def test_codecs_may_add_to_what_they_cannot_compress(
    filters: Any, compressors: Any, cells: int
) -> None:
    values = np.random.default_rng(3).integers(-(2**31), 2**31, 2 * cells, "i4")
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="chunks") as store:
        for name, shards in (("a", None), ("b", (2 * cells,))):
            zarr.create_array(
                store,
                name=name,
                shape=values.shape,
                chunks=(cells,),
                shards=shards,
                dtype="i4",
                filters=filters,
                compressors=compressors,
            )[:] = values
    store = repo.readonly_session("main").store
    for name in "ab":
        plain = zarr.open_array(store, path=name, mode="r")
        due = plain[:].tobytes()
        use_bulk(plain)
        assert plain[:].tobytes() == due
        assert plain[:cells].tobytes() == due[: 4 * cells]


def test_text_may_be_of_any_length() -> None:
    repo = zm.create(MemoryStorage())
    values = np.array(["a" * 100_000, "b"], "T")
    with repo.transaction(message="text") as store:
        array = zarr.create_array(store, name="a", shape=(2,), dtype="string")
        array[:] = values
    assert opened(repo)[:].tolist() == values.tolist()
