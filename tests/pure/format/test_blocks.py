"""Manifests in blocks: read whole and in parts, damaged, and forged.

A forged manifest has right checksums and a wrong directory.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import google_crc32c
import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.errors import CorruptObjectError, ManifestsError, UnsupportedFormatError
from zarr_manifests.format.blocks import directory_end, is_in_blocks
from zarr_manifests.format.chunk_table import COLUMNS, ChunkTable, RefKind
from zarr_manifests.format.columns import decode_column, encode_column
from zarr_manifests.format.manifest import Manifest, ManifestBlocks
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.virtual_sources import NO_SOURCES
from zarr_manifests.grid import Box
from zarr_manifests.ids import new_session_id

KEY = "manifests/000000000001-" + "ab" * 12 + "/1"
NODE, OTHER = b"n" * 12, b"o" * 12
SESSION = "000000000001-" + "cd" * 12
ROWS = 60_000


def table(
    *, rows: int = ROWS, sparse: bool = False, inline: bool = False, sessions: int = 1
) -> ChunkTable:
    """A table of rows with random checksums, of about 5 bytes each; a third of them may be inline.

    The rows of one session follow each other.
    """
    rng = np.random.default_rng(rows)
    has_bytes = (np.arange(rows) % 3 == 0) & inline
    names = [new_session_id(i, rng.bytes(12)) for i in range(sessions)]
    source = np.where(has_bytes, 0, np.arange(rows) * sessions // rows)
    index = np.sort(rng.choice(3 * rows, rows, replace=False)) if sparse else None
    return ChunkTable(
        Box((7, 5), (7 + (3 if sparse else 1) * rows // 10, 15)),
        index,
        np.where(has_bytes, RefKind.INLINE, RefKind.NATIVE),
        source,
        np.zeros(rows, np.int64),
        np.where(has_bytes, 24 * (np.cumsum(has_bytes) - 1), rng.integers(0, 9, rows)),
        np.where(has_bytes, 24, rng.integers(1, 200, rows)),
        np.where(has_bytes, 0, rng.integers(0, 2**32, rows)),
        tuple(names),
        rng.bytes(24 * int(has_bytes.sum())),
        NO_SOURCES,
    )


def stored(*tables: tuple[bytes, ChunkTable]) -> tuple[bytes, BlobRef]:
    data = Manifest.of(tables).encode()
    return data, BlobRef.to(KEY, data)


@pytest.mark.parametrize("rows", ["dense", "sparse", "of many sessions", "inline and native"])
def test_each_part_holds_the_rows_that_the_directory_says(rows: str) -> None:
    expected = table(
        sparse=rows == "sparse",
        inline=rows == "inline and native",
        sessions=3000 if rows == "of many sessions" else 1,
    )
    data, ref = stored((NODE, expected))
    blocks, index = ManifestBlocks.of(data, ref), expected.linear_index()
    for at in range(0, expected.box.size + 1, 3013):
        stretch = blocks.stretch_at(0, at)
        row = int(index.searchsorted(at))
        if row < len(index) and index[row] == at:
            assert stretch is not None
            start, length = blocks.blocks.range(blocks.block_of.item(stretch))
            part = blocks.table(0, stretch, data[start : start + length])
            coords = tuple(expected.box.unravel(np.array([at]))[0].tolist())
            assert part.get(coords) == expected.ref(row)
        elif stretch is not None:
            assert blocks.first[stretch] <= at <= blocks.last[stretch]


def test_large_and_small_tables_together() -> None:
    tables = [
        *((bytes([i] * 12), table(rows=1000 + 10 * i)) for i in range(30)),
        (NODE, table()),
        (OTHER, ChunkTable.build(Box((0, 0), (0, 4)), np.zeros(0, np.int64), [])),
        (OTHER, table(sparse=True)),
    ]
    data, ref = stored(*tables)
    assert is_in_blocks(data)
    manifest, blocks = Manifest.from_object(data, ref), ManifestBlocks.of(data, ref)
    assert len(blocks.blocks) < len(blocks.first)  # small tables share blocks
    for number, (node_id, expected) in enumerate(tables):
        assert blocks.number_of(node_id, expected.box) == number
        assert any(found.box == expected.box for found in manifest.tables(node_id))
        for stretch in blocks.stretches(number):
            start, length = blocks.blocks.range(blocks.block_of.item(stretch))
            part = blocks.table(number, stretch, data[start : start + length])
            assert len(part) == blocks.rows[stretch]
    with pytest.raises(CorruptObjectError, match="no chunk table"):
        blocks.number_of(NODE, Box((0,), (1,)))


@pytest.fixture(scope="module")
def whole() -> bytes:
    return stored((NODE, table()))[0]


def read_all_parts(data: bytes, ref: BlobRef) -> None:
    blocks = ManifestBlocks.of(data[: directory_end(data)], ref)
    for stretch in blocks.stretches(0):
        start, length = blocks.blocks.range(blocks.block_of.item(stretch))
        blocks.table(0, stretch, data[start : start + length])


def test_damage_anywhere_is_found(whole: bytes) -> None:
    ref, end = BlobRef.to(KEY, whole), directory_end(whole)
    for at in [*range(0, end, 3), *range(end, len(whole), 40_011)]:
        damaged = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
        with pytest.raises((CorruptObjectError, UnsupportedFormatError)) as caught:
            Manifest.from_object(damaged, ref)
        assert str(caught.value).startswith(KEY)
        if at < end:
            with pytest.raises((CorruptObjectError, UnsupportedFormatError)):
                ManifestBlocks.of(damaged[:end], ref)
            continue
        blocks = ManifestBlocks.of(damaged[:end], ref)  # the directory is sound
        block = int(blocks.blocks.starts.searchsorted(at, "right")) - 1
        for stretch in blocks.stretches(0):
            start, length = blocks.blocks.range(blocks.block_of.item(stretch))
            part = damaged[start : start + length]
            if blocks.block_of[stretch] == block:
                with pytest.raises(CorruptObjectError, match="checksum of block"):
                    blocks.table(0, stretch, part)
            else:
                blocks.table(0, stretch, part)


def test_what_is_short_or_shifted_or_another_block(whole: bytes) -> None:
    ref = BlobRef.to(KEY, whole)
    for length in (0, 20, 26, directory_end(whole) - 1):
        with pytest.raises(CorruptObjectError):
            ManifestBlocks.of(whole[:length], ref)
    blocks = ManifestBlocks.of(whole, ref)
    first, before = blocks.blocks.range(0)
    start, length = blocks.blocks.range(1)
    for wrong in (
        whole[start : start + length - 1],
        whole[start + 1 : start + 1 + length],
        whole[first : first + before],
        b"",
    ):
        with pytest.raises(CorruptObjectError, match="block 1 does not match"):
            blocks.table(0, 1, wrong)
    with pytest.raises(CorruptObjectError):
        ManifestBlocks.of(whole, BlobRef(KEY, ref.length, ref.crc32c ^ 1))


def forged(
    data: bytes, change: Callable[[dict[str, Any]], Any], blocks: bytes | None = None
) -> tuple[bytes, BlobRef]:
    """The manifest with another directory, and right checksums."""
    end = directory_end(data)
    fields = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(data[28:end]))
    fields = change(fields) or fields
    raw = msgpack.packb(fields)
    packed = zstandard.ZstdCompressor().compress(raw)
    covered = data[12:16] + struct.pack("<QI", len(raw), len(packed)) + packed
    covered += data[end:] if blocks is None else blocks
    made = data[:8] + struct.pack("<I", google_crc32c.value(covered)) + covered
    return made, BlobRef.to(KEY, made)


def exchange(values: np.ndarray) -> None:
    values[[0, 1]] = values[[1, 0]]


def add(at: int, more: int) -> Callable[[np.ndarray], None]:
    return lambda values: np.add.at(values, at, more)


def columns(*changes: tuple[str, Callable[[np.ndarray], None]]) -> Callable[[Any], None]:
    def change(fields: dict[str, Any]) -> None:
        for name, how in changes:
            of_blocks = name in ("length", "crc32c", "held")
            n = fields["blocks"] if of_blocks else sum(one[1] for one in fields["tables"])
            values = decode_column(fields[name], n).copy()
            how(values)
            fields[name] = encode_column(values)

    return change


def first_table(at: int, new: Any) -> Callable[[Any], None]:
    return lambda fields: fields["tables"][0].__setitem__(at, new)


@pytest.mark.parametrize(
    "change",
    [
        columns(("last", add(0, 50))),
        columns(("rows", add(0, 1)), ("rows", add(1, -1))),
        first_table(0, [NODE, [6, 5], [6 + ROWS // 10, 15], ROWS]),
        lambda fields: fields.update(blocks=1 << 17, length=[0, 0], crc32c=[0, 0]),
        columns(("crc32c", exchange)),
        first_table(1, 1 << 24),
    ],
    ids=["bounds", "rows", "box", "blocks", "checksums", "stretches"],
)
def test_directories_that_lie_are_refused(
    change: Callable[[dict[str, Any]], Any], whole: bytes
) -> None:
    read_all_parts(*forged(whole, lambda _: None))
    made, ref = forged(whole, change)
    with pytest.raises(CorruptObjectError):
        Manifest.from_object(made, ref).tables(NODE)
    with pytest.raises(CorruptObjectError):
        read_all_parts(made, ref)


def test_claims_that_few_bytes_cannot_hold_are_refused(whole: bytes) -> None:
    """Constant columns of many rows, in a table of many stretches."""
    rows, n = 1 << 20, 40
    stretch = {"n": rows, "lo": [0], "hi": [rows * n], "src": [SESSION]}
    stretch["col"] = {name: [0, 2 if name == "kind" else 0] for name in COLUMNS}
    block = b"\0" + msgpack.packb([msgpack.packb(stretch)])
    at = np.arange(n) * rows
    directory = {
        "tables": [[[NODE, [0], [rows * n], rows * n], n, {}]],
        "blocks": n,
        "length": [0, len(block)],
        "crc32c": [0, google_crc32c.value(block)],
        "held": [0, 1],
        "first": encode_column(at),
        "last": encode_column(at + rows - 1),
        "rows": [0, rows],
    }
    made, ref = forged(whole, lambda _: directory, block * n)
    with pytest.raises(CorruptObjectError, match="cannot hold"):
        Manifest.from_object(made, ref).tables(NODE)


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
def test_any_directory_is_refused_or_gives_the_rows_that_are_stored(
    whole: bytes, data: st.DataObject
) -> None:
    def change(fields: dict[str, Any]) -> None:
        name = data.draw(st.sampled_from(sorted(fields)))
        if name == "tables" and data.draw(st.booleans()):
            fields["tables"][0][data.draw(st.integers(0, 2))] = data.draw(wild)
        elif isinstance(fields[name], list) and fields[name] and data.draw(st.booleans()):
            fields[name][data.draw(st.integers(0, len(fields[name]) - 1))] = data.draw(wild)
        else:
            fields[name] = data.draw(wild)

    made, ref = forged(whole, change)
    with contextlib.suppress(ManifestsError):
        for found in Manifest.from_object(made, ref).tables(NODE):
            assert found.get((7, 5)) == table().ref(0)
