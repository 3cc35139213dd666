"""Forged objects of few bytes, their checksums right: they take little memory and little time.

Every case is read with the memory it takes measured; only the project's errors come out.
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import google_crc32c
import msgpack
import numpy as np
import pytest
import zstandard
from numcodecs import blosc

from effort import swept
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError, ManifestsError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.digest import Digest
from zarr_manifests.format.envelope import ObjectKind
from zarr_manifests.format.index import IndexDirectory
from zarr_manifests.format.manifest import Manifest, Part
from zarr_manifests.format.marks import MarksPage
from zarr_manifests.format.nodes import Base
from zarr_manifests.format.pages import Page
from zarr_manifests.format.root import Root
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box

MEMORY_BYTES = 64 << 20
KEY = f"deltas/{1:012d}-{'ab' * 12}/0"
ID = b"n" * 12
DECODERS: dict[ObjectKind, Callable[[bytes], Any]] = {
    ObjectKind.ROOT: Root.from_object,
    ObjectKind.SNAPSHOT: lambda data: Snapshot.from_object(data, BlobRef.to(KEY, data)),
    ObjectKind.BASE: lambda data: Base.from_object(data, BlobRef.to(KEY, data)),
    ObjectKind.DELTA: lambda data: Delta.from_object(data, BlobRef.to(KEY, data)),
    ObjectKind.MANIFEST: lambda data: Manifest.from_object(data, BlobRef.to(KEY, data)),
    ObjectKind.PAGE: lambda data: Page.from_object(data, BlobRef.to(KEY, data)),
    ObjectKind.DIGEST: lambda data: Digest.from_object(data, BlobRef.to(KEY, data)),
    ObjectKind.INDEX: lambda data: IndexDirectory.from_object(data, BlobRef.to(KEY, data)),
    ObjectKind.MARKS: lambda data: MarksPage.from_object(data, BlobRef.to(KEY, data)),
}
LISTS = {
    ObjectKind.ROOT: ("log", "leases", "deleted_tags", "deleted_branches", "pending", "features"),
    ObjectKind.SNAPSHOT: ("deltas", "digests", "marks", "merged"),
    ObjectKind.BASE: ("nodes", "manifests", "counts"),
    ObjectKind.DELTA: ("nodes", "truncated", "tables", "manifests"),
    ObjectKind.MANIFEST: ("tables",),
    ObjectKind.PAGE: ("tags", "leases", "log", "pending"),
    ObjectKind.DIGEST: ("nodes", "truncated", "covered", "tables"),
    ObjectKind.INDEX: ("blobs", "entries"),
    ObjectKind.MARKS: ("marks",),
}
each_kind = pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name.lower())


def envelope(kind: int, payload: bytes, *, compress: bool = True) -> bytes:
    body = zstandard.ZstdCompressor().compress(payload) if compress else payload
    covered = struct.pack("<BBBBQ", 1, kind, int(compress), 0, len(payload)) + body
    return b"\x89ZMF\r\n\x1a\n" + struct.pack("<I", google_crc32c.value(covered)) + covered


def peak_bytes(call: Callable[[], object]) -> int:
    """Memory that the call takes at most; of errors only the project's may come out."""
    tracemalloc.start()
    try:
        call()
    except ManifestsError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


def array_of(n: int) -> bytes:
    return b"\xdd" + n.to_bytes(4, "big")


def bombs(size: int) -> dict[str, bytes]:
    """Payloads of about that many bytes that want to become as much as can be."""
    return {
        "empty maps": array_of(size) + b"\x80" * size,
        "empty lists": array_of(size) + b"\x90" * size,
        "pairs": array_of(size // 3) + b"\x92\xc0\xc0" * (size // 3),
        "nothing": array_of(size) + b"\xc0" * size,
        "numbers": array_of(size // 9) + b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff" * (size // 9),
        "texts": array_of(size // 2) + b"\xa1\xc2" * (size // 2),
        "floats": array_of(size // 5) + b"\xca\x00\x00\x00\x01" * (size // 5),
        "lists that lie": array_of(size) * 900 + b"\xc0" * size,
        "maps that lie": (b"\xdf" + size.to_bytes(4, "big")) * 900 + b"\xc0" * size,
        "a deep list": b"\x91" * size,
        "keys": b"\xdf" + (size // 6).to_bytes(4, "big") + _keys(size // 6),
        "one text": b"\xdb" + size.to_bytes(4, "big") + b"a" * size,
        "an extension": b"\xc9" + size.to_bytes(4, "big") + b"\x05" + bytes(size),
        "zeros": bytes(size),
    }


def _keys(n: int) -> bytes:
    return b"".join(b"\xce" + i.to_bytes(4, "big") + b"\xc0" for i in range(n))


@pytest.mark.parametrize("what", bombs(10))
@pytest.mark.parametrize("size", swept([1 << 16, 1 << 20], but=[1 << 16]))
def test_a_payload_that_swells(what: str, size: int) -> None:
    payload = bombs(size - 200_000 if size == 1 << 20 else size)[what]
    data = envelope(ObjectKind.ROOT, payload)
    assert peak_bytes(lambda: Root.from_object(data)) < MEMORY_BYTES


@each_kind
@pytest.mark.parametrize("what", swept(["empty maps", "pairs", "lists that lie"], but=["pairs"]))
def test_a_field_that_swells(kind: ObjectKind, what: str) -> None:
    for field in LISTS[kind]:
        named = msgpack.packb("type") + msgpack.packb("directory")  # of an index
        payload = b"\x82" + named + msgpack.packb(field) + bombs(500_000)[what]
        data = envelope(kind, payload)
        assert peak_bytes(lambda data=data: DECODERS[kind](data)) < MEMORY_BYTES


@each_kind
def test_a_frame_that_swells(kind: ObjectKind) -> None:
    for size in (1 << 21, 1 << 26, 1 << 29):
        body = zstandard.ZstdCompressor().compress(bytes(min(size, 1 << 26)))
        covered = struct.pack("<BBBBQ", 1, kind, 1, 0, size) + body
        crc = struct.pack("<I", google_crc32c.value(covered))
        data = b"\x89ZMF\r\n\x1a\n" + crc + covered
        with pytest.raises(CorruptObjectError, match="cannot hold"):
            DECODERS[kind](data)
        assert peak_bytes(lambda data=data: DECODERS[kind](data)) < 1 << 20


# --- chunk tables ----------------------------------------------------------------------------


def zeros(n: int, width: int) -> list[Any]:
    """A column that says it varies, and compresses to nothing."""
    raw = np.zeros(n, f"<u{width}").tobytes()
    return [
        2,
        0,
        width,
        1,
        bytes(blosc.compress(raw, b"zstd", 5, blosc.BITSHUFFLE, typesize=width)),
    ]


COLUMNS = ("kind", "source", "number", "offset", "length", "crc32c")


@pytest.mark.parametrize("n", [1 << 20, 1 << 22, 1 << 30])
@pytest.mark.parametrize("varying", [0, 1, 4, 6])
def test_a_table_that_swells(n: int, varying: int) -> None:
    column = zeros(min(n, 1 << 22), 1)
    columns = {name: column if i < varying else [0, 0] for i, name in enumerate(COLUMNS)}
    rows = {"n": n, "lo": [0], "hi": [n], "src": [], "col": columns}
    data = msgpack.packb(rows)
    part = Part(ID, Box((0,), (n,)), n)
    assert peak_bytes(lambda: Manifest.decode(part, data)) < MEMORY_BYTES


def test_what_a_reader_would_refuse_is_not_written() -> None:
    n = 1 << 22
    constant = np.broadcast_to(np.int64(0), (n,))
    table = ChunkTable(Box((0,), (n,)), None, *[constant] * 6, sources=(), inline=b"")
    with pytest.raises(InvalidArgumentError, match="commit them in several steps"):
        Manifest.of([(ID, table)])


def test_a_million_regular_rows_take_no_more_than_they_need() -> None:
    n = 1_000_000
    constant = np.broadcast_to(np.int64(0), (n,))
    table = ChunkTable(Box((0,), (n,)), None, *[constant] * 6, sources=(), inline=b"")
    part, data = Manifest.of([(ID, table)]).parts[0]
    assert len(data) < 300
    assert len(Manifest.decode(part, data)) == n


# --- at random -------------------------------------------------------------------------------


def wild(rng: random.Random, depth: int = 0) -> Any:
    """Anything that msgpack can say, with sizes and counts that matter more often than not."""
    match rng.randrange(10 if depth < 4 else 6):
        case 0:
            return rng.choice([0, 1, 2, 3, 2**24, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1, -1])
        case 1:
            return rng.randbytes(rng.choice([0, 1, 12, 16, 40]))
        case 2:
            return rng.choice(["", "a", "main", KEY, "../../x", "k", "append", "\u0000"])
        case 3:
            return rng.choice([None, True, False, 1.5, float("nan")])
        case 4 | 5:
            return {"k": KEY, "n": rng.choice([0, 40, 2**40, 2**63]), "c": 1, "b": b"x" * 40}
        case 6 | 7:
            return [wild(rng, depth + 1) for _ in range(rng.randrange(5))]
        case _:
            names = ["nodes", "tables", "n", "lo", "hi", "col", "head", "base", "blob", "parts"]
            return {name: wild(rng, depth + 1) for name in rng.sample(names, rng.randrange(6))}


@each_kind
def test_wild_fields(kind: ObjectKind) -> None:
    rng = random.Random(int(kind))
    names = [*LISTS[kind], "branches", "tags", "pages", "features", "commit", "log", "parent"]
    for _ in range(60):
        fields = {name: wild(rng) for name in names if rng.random() < 0.7}
        fields["type"] = "directory"  # of an index; others have no such field
        data = envelope(kind, msgpack.packb(fields), compress=rng.random() < 0.5)
        assert peak_bytes(lambda data=data: DECODERS[kind](data)) < MEMORY_BYTES


@each_kind
def test_random_bytes(kind: ObjectKind) -> None:
    rng = random.Random(int(kind))
    for _ in range(60):
        payload = rng.randbytes(rng.randrange(1, 200))
        for data in (envelope(kind, payload, compress=False), envelope(kind, b"\x8f" + payload)):
            assert peak_bytes(lambda data=data: DECODERS[kind](data)) < MEMORY_BYTES
