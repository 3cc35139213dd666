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
from zarr_manifests.format import chunk_table
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.blocks import directory_end, is_in_blocks
from zarr_manifests.format.chunk_table import COLUMNS, ChunkTable, RefKind
from zarr_manifests.format.columns import decode_column, decode_pieces, encode_column
from zarr_manifests.format.manifest import Manifest, ManifestBlocks
from zarr_manifests.format.stretches import SplitTable
from zarr_manifests.format.virtual_sources import NO_SOURCES, VirtualSource, VirtualSources
from zarr_manifests.grid import Box
from zarr_manifests.ids import crc32c, crc32c_of_all, new_session_id

KEY = "manifests/000000000001-" + "ab" * 12 + "/1"
NODE, OTHER = b"n" * 12, b"o" * 12
SESSION = "000000000001-" + "cd" * 12
ROWS = 60_000


def sessions(n: int) -> tuple[str, ...]:
    rng = np.random.default_rng(n)
    return tuple(new_session_id(i, rng.bytes(12)) for i in range(n))


def files(n: int) -> VirtualSources:
    found = [VirtualSource("era5", f"daily/{i}.nc", f"{i * 7919:x}", i, None) for i in range(n)]
    return VirtualSources.of(found)


def table(
    *,
    rows: int = ROWS,
    sparse: bool = False,
    kind: Any = RefKind.NATIVE,
    source: Any = 0,
    sources: tuple[str, ...] = (SESSION,),
    virtual: VirtualSources = NO_SOURCES,
    inline: int = 0,
) -> ChunkTable:
    """A table of rows with random checksums, of about 5 bytes each; inline rows of random bytes."""
    rng = np.random.default_rng(rows)
    kinds = np.broadcast_to(np.asarray(kind, np.int64), (rows,))
    lengths = rng.integers(1, 200, rows)
    has_bytes = kinds == RefKind.INLINE
    lengths[has_bytes] = inline
    offsets = np.where(has_bytes, inline * (np.cumsum(has_bytes) - 1), rng.integers(0, 9, rows))
    index = np.sort(rng.choice(3 * rows, rows, replace=False)) if sparse else None
    return ChunkTable(
        Box((7, 5), (7 + (3 if sparse else 1) * rows // 10, 15)),
        index,
        kinds,
        np.where(has_bytes, 0, np.broadcast_to(np.asarray(source, np.int64), (rows,))),
        np.zeros(rows, np.int64),
        offsets,
        lengths,
        np.where(has_bytes, 0, rng.integers(0, 2**32, rows)),
        sources,
        rng.bytes(inline * int(has_bytes.sum())),
        virtual,
    )


_ALONG, _ACROSS = np.arange(ROWS) // 20, np.arange(ROWS) % 3000
_MIXED = np.where(np.arange(ROWS) % 3 == 0, RefKind.INLINE, RefKind.NATIVE)
TABLES: dict[str, Callable[[], ChunkTable]] = {
    "dense": table,
    "sparse": lambda: table(sparse=True),
    "sessions one after another": lambda: table(source=_ALONG, sources=sessions(3000)),
    "sessions everywhere": lambda: table(source=_ACROSS, sources=sessions(3000)),
    "files one after another": lambda: table(
        kind=RefKind.VIRTUAL, source=_ALONG, sources=(), virtual=files(3000)
    ),
    "files everywhere": lambda: table(
        kind=RefKind.VIRTUAL, source=_ACROSS, sources=(), virtual=files(3000), sparse=True
    ),
    "inline and native": lambda: table(kind=_MIXED, inline=24),
    "uneven": lambda: table(
        kind=np.where(np.arange(ROWS) < 300, RefKind.INLINE, RefKind.NATIVE), inline=2000
    ),
}
each_table = pytest.mark.parametrize("name", TABLES)


def stored(*tables: tuple[bytes, ChunkTable]) -> tuple[bytes, BlobRef]:
    data = Manifest.of(tables).encode()
    return data, BlobRef.to(KEY, data)


def same(found: ChunkTable, expected: ChunkTable, rows: slice = slice(None)) -> None:
    assert found.box == expected.box
    assert (found.linear_index() == expected.linear_index()[rows]).all()
    for name in ("kind", "number", "length", "crc32c"):
        assert (getattr(found, name) == getattr(expected, name)[rows]).all(), name
    start = range(len(expected))[rows].start
    for row in range(0, len(found), 97):
        assert found.ref(row) == expected.ref(start + row)


@each_table
def test_the_whole_and_each_part(name: str) -> None:
    expected = TABLES[name]()
    data, ref = stored((NODE, expected))
    assert is_in_blocks(data)
    (whole,) = Manifest.from_object(data, ref).tables(NODE)
    same(whole, expected)
    assert (whole.index is None) == (expected.index is None)

    blocks = ManifestBlocks.of(data[: directory_end(data)], ref)
    assert blocks.parts == Manifest.from_object(data, ref).directory()
    assert len(blocks.blocks) > 2
    assert blocks.blocks.lengths.max() <= 100_000
    number, at = blocks.number_of(NODE, expected.box), 0
    for stretch in blocks.stretches(number):
        start, length = blocks.blocks.range(blocks.block_of.item(stretch))
        part = blocks.table(number, stretch, data[start : start + length])
        same(part, expected, slice(at, at + len(part)))
        at += len(part)
    assert at == len(expected)


@pytest.mark.parametrize("rows", [ROWS, 4 * ROWS])
def test_all_stretches_are_decoded_in_one_step(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, ref = stored((NODE, table(rows=rows)))
    manifest, steps = Manifest.from_object(data, ref), []

    def counted(pieces: Any, rows: Any, most: int) -> Any:
        steps.append(len(pieces))
        return decode_pieces(pieces, rows, most)

    monkeypatch.setattr(chunk_table, "decode_pieces", counted)
    manifest.tables(NODE)
    ((_, split),) = manifest.parts
    assert isinstance(split, SplitTable)
    assert steps == [len(split.stretches)] * len(COLUMNS)


def test_files_are_not_gone_through_for_each_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be as many files as rows."""
    expected = table(kind=RefKind.VIRTUAL, source=np.arange(ROWS), sources=(), virtual=files(ROWS))
    seen: list[int] = []
    search, find = np.searchsorted, np.flatnonzero
    monkeypatch.setattr(np, "searchsorted", lambda a, v: (seen.append(np.size(v)), search(a, v))[1])
    monkeypatch.setattr(np, "flatnonzero", lambda a: (seen.append(np.size(a)), find(a))[1])
    data, ref = stored((NODE, expected))
    assert len(ManifestBlocks.of(data[: directory_end(data)], ref).blocks) > 10
    assert sum(seen) < 4 * ROWS
    (whole,) = Manifest.from_object(data, ref).tables(NODE)
    same(whole, expected)


@each_table
def test_a_gap_between_stretches_is_known(name: str) -> None:
    expected = TABLES[name]()
    data, ref = stored((NODE, expected))
    blocks, index = ManifestBlocks.of(data, ref), set(expected.linear_index().tolist())
    for at in [*range(0, expected.box.size, 1013), expected.box.size - 1, expected.box.size]:
        stretch = blocks.stretch_at(0, at)
        if stretch is None:
            assert at not in index
        else:
            assert blocks.first[stretch] <= at <= blocks.last[stretch]
    assert all(blocks.stretch_at(0, at) is not None for at in list(index)[::1013])


def test_small_manifests_are_not_in_blocks() -> None:
    data, ref = stored((NODE, table(rows=30_000)))
    assert 100_000 < len(data) < 256 * 1024
    assert not is_in_blocks(data)
    same(Manifest.from_object(data, ref).tables(NODE)[0], table(rows=30_000))
    small = [(bytes([i // 256, i % 256] * 6), table(rows=10)) for i in range(3000)]
    data, _ = stored(*small)
    assert not is_in_blocks(data)  # since they compress well together


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


def test_a_table_in_stretches_is_embedded_in_one_piece() -> None:
    manifest = Manifest.of([(NODE, table())])
    ((_, data),) = manifest.pack()
    same(Manifest.decode(manifest.directory()[0], data), table())


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "sparse",
        "inline and native",
        *(f"{w} one after another" for w in ("sessions", "files")),
    ],
)
def test_blocks_take_little_room(name: str) -> None:
    expected = TABLES[name]()
    whole = zstandard.ZstdCompressor().compress(msgpack.packb(expected.pack()))
    assert len(stored((NODE, expected))[0]) <= 1.03 * len(whole)


@given(parts=st.lists(st.binary(max_size=40), max_size=8))
def test_checksums_are_combined(parts: list[bytes]) -> None:
    large = [part * 3000 for part in parts]
    found = crc32c_of_all([(crc32c(part), len(part)) for part in large])
    assert found == google_crc32c.value(b"".join(large))


def refused(data: bytes, ref: BlobRef) -> None:
    """Neither the whole nor any part is read, but for parts that are intact."""
    with pytest.raises(CorruptObjectError):
        Manifest.from_object(data, ref).tables(NODE)


def test_damage_anywhere_is_found() -> None:
    data, ref = stored((NODE, table()))
    end = directory_end(data)
    for at in [*range(end), *range(end, len(data), 20_011)]:
        damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
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


def test_what_is_short_or_shifted_or_another_block() -> None:
    data, ref = stored((NODE, table()))
    for length in (0, 20, 26, directory_end(data) - 1):
        with pytest.raises(CorruptObjectError):
            ManifestBlocks.of(data[:length], ref)
    blocks = ManifestBlocks.of(data, ref)
    start, length = blocks.blocks.range(1)
    for wrong in (
        data[start : start + length - 1],
        data[start : start + length + 1],
        data[start + 1 : start + 1 + length],
        data[slice(*np.add(blocks.blocks.range(0), (0, blocks.blocks.starts.item(0))).tolist())],
        b"",
    ):
        with pytest.raises(CorruptObjectError, match="block 1 does not match"):
            blocks.table(0, 1, wrong)
    for other in (
        BlobRef(KEY, ref.length, ref.crc32c ^ 1),
        BlobRef(KEY, ref.length + 1, ref.crc32c),
    ):
        with pytest.raises(CorruptObjectError):
            ManifestBlocks.of(data, other)


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


def column(fields: dict[str, Any], name: str, change: Callable[[np.ndarray], Any]) -> None:
    n = len(fields["tables"]) and sum(one[1] for one in fields["tables"])
    n = fields["blocks"] if name in ("length", "crc32c", "held") else n
    values = decode_column(fields[name], n).copy()
    change(values)
    fields[name] = encode_column(values)


def _exchange(values: np.ndarray) -> None:
    values[[0, 1]] = values[[1, 0]]


def _add(at: int, more: int) -> Callable[[np.ndarray], None]:
    def change(values: np.ndarray) -> None:
        values[at] += more

    return change


def columns(*changes: tuple[str, Callable[[np.ndarray], None]]) -> Callable[[Any], None]:
    def change(fields: dict[str, Any]) -> None:
        for name, how in changes:
            column(fields, name, how)

    return change


def first_table(at: int, new: Any) -> Callable[[Any], None]:
    return lambda fields: fields["tables"][0].__setitem__(at, new)


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "overlapping bounds": columns(("last", _add(0, 50))),
    "bounds that descend": columns(("first", _exchange), ("last", _exchange)),
    "bounds beyond the box": columns(("last", _add(-1, 1))),
    "no room for the rows": columns(("first", _add(1, 5000))),
    "more rows": columns(("rows", _add(0, 1))),
    "rows moved to another block": columns(("rows", _add(0, 1)), ("rows", _add(1, -1))),
    "fewer rows in all": first_table(0, [NODE, [7, 5], [7 + ROWS // 10, 15], ROWS - 1]),
    "another box": first_table(0, [NODE, [6, 5], [6 + ROWS // 10, 15], ROWS]),
    "fewer blocks": lambda fields: fields.update(blocks=fields["blocks"] - 1),
    "no blocks": lambda fields: fields.update(blocks=0),
    "many blocks": lambda fields: fields.update(blocks=1 << 17, length=[0, 0], crc32c=[0, 0]),
    "other lengths": columns(("length", _add(0, 1)), ("length", _add(1, -1))),
    "another total": columns(("length", _add(0, 1))),
    "another checksum": columns(("crc32c", _add(0, 1))),
    "exchanged checksums": columns(("crc32c", _exchange)),
    "no tables": lambda fields: fields.update(tables=[]),
    "fewer stretches": first_table(1, 3),
    "many stretches": first_table(1, 1 << 24),
    "stretches in other blocks": columns(("held", _add(0, 1))),
    "no sessions": first_table(2, {"src": []}),
    "sessions that are none": first_table(2, {"src": ["x"]}),
}


def read_all_parts(data: bytes, ref: BlobRef) -> None:
    blocks = ManifestBlocks.of(data[: directory_end(data)], ref)
    for stretch in blocks.stretches(0):
        start, length = blocks.blocks.range(blocks.block_of.item(stretch))
        blocks.table(0, stretch, data[start : start + length])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_directories(what: str, sparse: bool) -> None:
    data, _ = stored((NODE, table(sparse=sparse)))
    if (what, sparse) == ("bounds beyond the box", True):
        return  # the box is larger than the rows need
    made, ref = forged(data, HOSTILE[what])
    refused(made, ref)
    with pytest.raises(CorruptObjectError):
        read_all_parts(made, ref)


def test_exchanged_blocks() -> None:
    """Then the rows do not keep their bounds, even if the checksums are exchanged as well."""
    data, ref = stored((NODE, table()))
    blocks = ManifestBlocks.of(data, ref).blocks
    (a, n), (_, m) = blocks.range(0), blocks.range(1)
    other = data[a + n : a + n + m] + data[a : a + n] + data[a + n + m :]
    read_all_parts(*forged(data, lambda _: None))
    refused(data[:a] + other, ref)
    refused(*forged(data, lambda _: None, other))
    made, ref = forged(data, columns(("crc32c", _exchange), ("length", _exchange)), other)
    refused(made, ref)
    found = ManifestBlocks.of(made, ref)
    with pytest.raises(CorruptObjectError, match="outside its bounds"):
        found.table(0, 0, other[:m])


def test_claims_that_few_bytes_cannot_hold() -> None:
    """Constant columns of many rows, in a table of many stretches."""
    rows, n = 1 << 20, 40
    stretch = {"n": rows, "lo": [0], "hi": [rows * n], "src": [SESSION]}
    stretch["col"] = {name: [0, 2 if name == "kind" else 0] for name in COLUMNS}
    block = b"\0" + msgpack.packb([msgpack.packb(stretch)])
    data, _ = stored((NODE, table()))

    def change(_: dict[str, Any]) -> dict[str, Any]:
        at = np.arange(n) * rows
        return {
            "tables": [[[NODE, [0], [rows * n], rows * n], n, {}]],
            "blocks": n,
            "length": [0, len(block)],
            "crc32c": [0, google_crc32c.value(block)],
            "held": [0, 1],
            "first": encode_column(at),
            "last": encode_column(at + rows - 1),
            "rows": [0, rows],
        }

    made, ref = forged(data, change, block * n)
    with pytest.raises(CorruptObjectError, match="cannot hold"):
        Manifest.from_object(made, ref).tables(NODE)


FIRST = table().get((7, 5))
wild = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, 2, 3, 255, 2**24, 2**31, 2**62, 2**63, 2**64 - 1, -1])
    | st.text(max_size=5)
    | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_directory(data: st.DataObject, whole: bytes) -> None:
    """Nothing but the project's own errors comes out, and no other rows than those stored."""

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
            assert found.get((7, 5)) == FIRST


@pytest.fixture(scope="module")
def whole() -> bytes:
    return stored((NODE, table()))[0]
