"""Manifests of several blocks: read whole and block by block, damaged, and forged.

A forged manifest has right checksums and wrong contents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.errors import CorruptObjectError, ManifestsError, UnsupportedFormatError
from zarr_manifests.format.chunk_table import COLUMNS, ChunkTable, RefKind
from zarr_manifests.format.manifest import Block, Manifest, ManifestRef, decode_table
from zarr_manifests.format.records import HEADER_BYTES, STORED, BlobRef, ObjectKind, frame
from zarr_manifests.grid import Box
from zarr_manifests.ids import new_session_id

KEY = "manifests/000000000001-" + "ab" * 12 + "/1"
NODE, OTHER = b"n" * 12, b"o" * 12
SESSION = "000000000001-" + "cd" * 12


def table(rows: int, *, sparse: bool = False) -> ChunkTable:
    """A table of rows with random checksums, of about 5 bytes each; a third of them are inline."""
    rng = np.random.default_rng(rows)
    inline = np.arange(rows) % 3 == 0
    index = np.sort(rng.choice(3 * rows, rows, replace=False)) if sparse else None
    return ChunkTable(
        Box((7, 5), (7 + (3 if sparse else 1) * rows // 10, 15)),
        index,
        np.where(inline, RefKind.INLINE, RefKind.NATIVE),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.int64),
        np.where(inline, 24 * (np.cumsum(inline) - 1), rng.integers(0, 9, rows)),
        np.where(inline, 24, rng.integers(1, 200, rows)),
        np.where(inline, 0, rng.integers(0, 2**32, rows)),
        (new_session_id(1, rng.bytes(12)),),
        rng.bytes(24 * int(inline.sum())),
        (),
    )


TABLES = [
    *((bytes([i] * 12), table(100 + 10 * i)) for i in range(30)),
    (NODE, table(16_000)),
    (OTHER, ChunkTable.build(Box((0, 0), (0, 4)), np.zeros(0, np.int64), [])),
    (OTHER, table(15_000, sparse=True)),
    (OTHER, table(14_000)),
]


@pytest.fixture(scope="module")
def whole() -> tuple[bytes, ManifestRef]:
    manifest = Manifest.of(TABLES)
    data, where = manifest.encode()
    return data, ManifestRef(BlobRef.to(KEY, data), manifest.directory(), **where)


def read(data: bytes, ref: ManifestRef, number: int) -> ChunkTable:
    """The table of that number, read by its block alone."""
    found = ref.block(ref.parts[number])
    assert found is not None
    block, at = found
    tables = Block.from_object(data[block.offset : block.offset + block.length], block).tables
    return decode_table(ref.parts[number], tables[at])


def test_each_table_is_where_the_pointer_says(whole: tuple[bytes, ManifestRef]) -> None:
    data, ref = whole
    manifest = Manifest.from_object(data, ref.blob)
    assert manifest.directory() == ref.parts
    assert len({place[0] for place in ref.places}) < len(ref.places) - 20  # small ones share blocks
    for number, (node_id, expected) in enumerate(TABLES):
        for found in (read(data, ref, number), manifest.decode(*manifest.parts[number])):
            assert (found.box, len(found)) == (expected.box, len(expected))
            assert [*found.refs()][:50] == [*expected.refs()][:50]
        assert any(found.box == expected.box for found in manifest.tables(node_id))


def test_a_small_manifest_is_one_block() -> None:
    manifest = Manifest.of(TABLES[:3])
    data, where = manifest.encode()
    assert not where
    assert Manifest.from_object(data, BlobRef.to(KEY, data)).parts == manifest.parts


def test_damage_anywhere_is_found(whole: tuple[bytes, ManifestRef]) -> None:
    data, ref = whole
    for at in [*range(40), *range(40, len(data), 20_011)]:
        damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        with pytest.raises((CorruptObjectError, UnsupportedFormatError)) as caught:
            Manifest.from_object(damaged, ref.blob)
        assert str(caught.value).startswith(KEY)
        for number, (start, length, *_) in enumerate(ref.places):
            if start <= at < start + length:
                with pytest.raises(CorruptObjectError, match="checksum"):
                    read(damaged, ref, number)
            else:
                read(damaged, ref, number)


def test_what_is_short_or_shifted_or_another_block(whole: tuple[bytes, ManifestRef]) -> None:
    data, ref = whole
    found = ref.block(ref.parts[30])
    assert found is not None
    block, start = found[0], found[0].offset
    for wrong in (
        data[start : start + block.length - 1],
        data[start + 1 : start + 1 + block.length],
        data[HEADER_BYTES : HEADER_BYTES + block.length],
        b"",
    ):
        with pytest.raises(CorruptObjectError, match="does not match"):
            Block.from_object(wrong, block)


@pytest.mark.parametrize(
    "place", [(0, 100, 0, 0), (10**9, 100, 0, 0), (24, 0, 0, 0), (24, 9, -1, 0), (24, 9, 0, -1)]
)
def test_places_outside_of_the_object_are_refused(
    whole: tuple[bytes, ManifestRef], place: tuple[int, int, int, int]
) -> None:
    _, ref = whole
    with pytest.raises(CorruptObjectError, match="outside"):
        ManifestRef(ref.blob, ref.parts, places=(place, *ref.places[1:]))
    with pytest.raises(CorruptObjectError, match="each part"):
        ManifestRef(ref.blob, ref.parts, places=ref.places[1:])


def forged(blocks: Any) -> tuple[bytes, BlobRef]:
    payload = msgpack.packb({"blocks": blocks})
    data = frame(ObjectKind.MANIFEST, STORED, len(payload), payload)
    return data, BlobRef.to(KEY, data)


def listed(data: bytes) -> list[Any]:
    found: list[Any] = msgpack.unpackb(data[HEADER_BYTES:])["blocks"]
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda blocks: blocks[0][0].pop(),
        lambda blocks: blocks[0][0][0].__setitem__(2, 7),
        lambda blocks: blocks[0][0][0][1].__setitem__(0, [6, 5]),
        lambda blocks: blocks[0].__setitem__(1, b"\2" + blocks[0][1][1:]),
        lambda blocks: blocks[0].__setitem__(1, b"\0" + msgpack.packb({})),
    ],
    ids=["tables", "rows", "box", "codec", "no list"],
)
def test_blocks_that_lie_are_refused(
    change: Callable[[list[Any]], Any], whole: tuple[bytes, ManifestRef]
) -> None:
    blocks = listed(whole[0])
    Manifest.from_object(*forged(blocks)).tables(bytes(12))
    change(blocks)
    with pytest.raises(CorruptObjectError):
        Manifest.from_object(*forged(blocks)).tables(bytes(12))


@pytest.fixture(scope="module")
def sharing() -> bytes:
    """A manifest of six tables that name the same 3,000 sessions."""
    rng = np.random.default_rng(0)
    sessions = tuple(new_session_id(number, rng.bytes(12)) for number in range(3000))
    rows, none = 12_000, np.zeros(12_000, np.int64)
    tables = []
    for first in range(0, 6 * rows, rows):
        box, crc = Box((first,), (first + rows,)), rng.integers(0, 2**32, rows)
        kind, source = none + RefKind.NATIVE, np.arange(rows) % 3000
        table = ChunkTable(box, None, kind, source, none, none, none + 9, crc, sessions, b"")
        tables.append((NODE, table))
    return Manifest.of(tables).encode()[0]


def changed(data: bytes, change: Callable[[Any, list[Any]], Any]) -> tuple[bytes, BlobRef]:
    """The manifest after a change of its payload, or of what its first table says of its ids."""
    payload = msgpack.unpackb(data[HEADER_BYTES:])
    packed, *others = Block.parse(payload["blocks"][0][1], 1 << 24).tables
    table = msgpack.unpackb(packed)
    change(payload, table)
    payload["blocks"][0][1] = b"\0" + msgpack.packb([msgpack.packb(table), *others])
    body = msgpack.packb(payload)
    made = frame(ObjectKind.MANIFEST, STORED, len(body), body)
    return made, BlobRef.to(KEY, made)


@pytest.mark.parametrize(
    "change",
    [
        lambda payload, _: payload.pop("ids"),
        lambda payload, _: payload.update(ids=b"\0" + msgpack.packb([b"no id"] * 3000)),
        lambda payload, _: payload.update(ids=b"\0" + msgpack.packb([b"\xff" * 37] * 3000)),
        lambda payload, _: payload.update(ids=b"\2"),
        lambda _, table: table.update(src=[SESSION]),
        lambda _, table: table["shared"].__setitem__(0, 2999),
        lambda _, table: table["shared"].__setitem__(0, 3001),
        lambda _, table: table.update(shared=[3000, [0, 7]]),
        lambda _, table: table.update(shared=[2**24, [0, 7]]),
        lambda _, table: table.update(shared=[1, [0, 3000]]),
        lambda _, table: table.pop("shared"),
    ],
)
def test_shared_ids_that_lie_are_refused(
    change: Callable[[Any, list[Any]], Any], sharing: bytes
) -> None:
    kept = Manifest.from_object(*changed(sharing, lambda *_: None)).tables(NODE)
    assert len({table.sources for table in kept}) == 1
    assert all(len(table) == len(table.sources) * 4 for table in kept)
    with pytest.raises(CorruptObjectError):
        Manifest.from_object(*changed(sharing, change)).tables(NODE)


def test_claims_that_few_bytes_cannot_hold_are_refused() -> None:
    """Constant columns of many rows."""
    rows = 1 << 23
    claim = {"n": rows, "lo": [0], "hi": [rows], "src": [SESSION]}
    claim["col"] = {name: [0, 2 if name == "kind" else 0] for name in COLUMNS}
    block = b"\0" + msgpack.packb([msgpack.packb(claim)])
    made = forged([[[[NODE, [[0], [rows]], rows]], block]])
    with pytest.raises(CorruptObjectError, match="cannot hold"):
        Manifest.from_object(*made).tables(NODE)


@pytest.mark.parametrize(("noise", "zeros"), [(10, 100_000), (1000, 59_000)])
def test_few_bytes_cannot_fill_memory(noise: int, zeros: int) -> None:
    """Neither does one block expand freely, nor do many within an object that expands itself."""
    content = msgpack.packb([np.random.default_rng(0).bytes(noise) + bytes(zeros)])
    tables = b"\1" + zstandard.ZstdCompressor().compress(content)
    payload = msgpack.packb({"blocks": [[[[NODE, [[0], [1]], 1]], tables]] * 200})
    packed = zstandard.ZstdCompressor().compress(payload)
    data = frame(ObjectKind.MANIFEST, 1, len(payload), packed)
    with pytest.raises(CorruptObjectError, match="cannot hold"):
        Manifest.from_object(data, BlobRef.to(KEY, data))


wild = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, 2, 3, 255, 2**24, 2**31, 2**62, 2**63, 2**64 - 1, -1])
    | st.text(max_size=5)
    | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_blocks_are_refused_or_give_the_rows_that_are_stored(
    whole: tuple[bytes, ManifestRef], data: st.DataObject
) -> None:
    blocks = listed(whole[0])
    at: Any = blocks
    for most in (len(blocks), 2, 3, 4):
        place = data.draw(st.integers(0, most - 1))
        if place >= len(at) or not isinstance(at[place], list) or data.draw(st.booleans()):
            break
        at = at[place]
    at[min(place, len(at) - 1)] = data.draw(wild)
    made, ref = forged(blocks)
    with contextlib.suppress(ManifestsError):
        for found in Manifest.from_object(made, ref).tables(NODE):
            assert found.get((7, 5)) == table(16_000).ref(0)
