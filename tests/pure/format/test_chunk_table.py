"""Chunk tables and the columns they are made of."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc

from effort import examples
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError, ManifestsError
from zarr_manifests.format import chunk_table
from zarr_manifests.format.chunk_table import (
    MAX_ROWS,
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    StoredTable,
    VirtualRef,
    VirtualSource,
    decode_column,
    encode_column,
)
from zarr_manifests.format.records import pack, record, unpack
from zarr_manifests.planning.merge import Layer, Overlay, fold, merge_layers

SESSION = f"{1:012d}-" + "ab" * 12
OTHER = f"{2:012d}-" + "cd" * 12
FILE = VirtualSource("archive", "1999/t.nc", "e-tag", 1_600_000_000_000, 4096)
WEB = VirtualSource("", "file:///data/u.nc")
FILES = ChunkTable.of({(0,): VirtualRef(FILE, 0, 1), (1,): VirtualRef(WEB, 0, 1)}).pack()["virt"]


def table_of(fields: Any) -> ChunkTable:
    return ChunkTable.parse(record(StoredTable, fields, "table"))


def parsed(table: ChunkTable) -> ChunkTable:
    return table_of(unpack(pack(table.pack())))


# --- columns ---------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(
    st.one_of(
        st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=40),
        st.lists(st.integers(0, 300), min_size=1, max_size=200),
        st.lists(st.integers(0, 2**40), min_size=1, max_size=40).map(sorted),
        st.tuples(st.integers(0, 2**63 - 1), st.integers(1, 50)).map(lambda x: [x[0]] * x[1]),
    )
)
def test_columns_round_trip(values: list[int]) -> None:
    column = np.array(values, np.int64)
    stored = unpack(pack(encode_column(column)))
    np.testing.assert_array_equal(decode_column(stored, len(values)), column)


def test_a_column_with_damaged_compressed_bytes() -> None:
    packed = bytearray(blosc.compress(bytes(range(200)) * 5, b"zstd", 5, 1))
    for at in range(16, len(packed)):
        damaged = packed.copy()
        damaged[at] ^= 0xFF
        try:
            found = decode_column([2, 0, 1, 1, bytes(damaged)], 1000)
        except CorruptObjectError:
            continue
        assert found.shape == (1000,)


def test_no_allocation_follows_a_number_of_rows_beyond_the_bound() -> None:
    with pytest.raises(CorruptObjectError):
        decode_column([2, 0, 8, 0, b""], MAX_ROWS + 1)
    with pytest.raises(CorruptObjectError):
        table_of({"n": 2**40, "lo": [0], "hi": [2**40]})


# --- tables ----------------------------------------------------------------------------------

refs: st.SearchStrategy[StoredRef] = st.one_of(
    st.just(UNSET),
    st.builds(InlineRef, st.binary(max_size=9)),
    st.builds(
        NativeRef,
        st.sampled_from([SESSION, OTHER]),
        st.integers(0, 10**9 - 1),
        st.integers(0, 2**45),
        st.integers(0, 2**45),
        st.integers(0, 2**32 - 1),
    ),
)


@settings(max_examples=examples(200))
@given(st.data())
def test_lookup_after_a_round_trip(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 4))
    axis = st.integers(0, 3) | st.integers(2**13, 2**13 + 3)
    coords = st.lists(axis, min_size=ndim, max_size=ndim).map(tuple)
    given_refs = data.draw(st.dictionaries(coords, refs, min_size=1, max_size=20))
    table = parsed(ChunkTable.of(given_refs))
    assert dict(table.refs()) == given_refs
    assert len(table) == len(given_refs)
    for probe in [*given_refs, *data.draw(st.lists(coords, max_size=5))]:
        assert table.get(probe) == given_refs.get(probe)
    assert table.get((0,) * (ndim + 1)) is None
    assert [tuple(c) for c in table.coords().tolist()] == sorted(given_refs)


def test_rows_that_do_not_follow_each_other_are_refused() -> None:
    fields = unpack(pack(ChunkTable.of({(0,): UNSET, (9,): UNSET}).pack()))
    assert len(table_of(fields)) == 2
    for index in (b"\x09\x00", b"\x03\x03"):
        fields["col"]["index"] = [2, 0, 1, 0, index]
        with pytest.raises(CorruptObjectError):
            table_of(fields)


def test_a_table_beyond_what_is_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better no commit than one that nobody can open."""
    parsed(ChunkTable.of({(i,): UNSET for i in range(3)}))  # bounds of types are read once
    monkeypatch.setattr(chunk_table, "MAX_ROWS", 3)
    with pytest.raises(InvalidArgumentError, match="3"):
        ChunkTable.of({(i,): UNSET for i in range(4)}).pack()


@settings(max_examples=examples(300))
@given(st.data())
def test_whatever_passes_for_a_table_can_be_used(data: st.DataObject) -> None:
    """Columns of forged bytes: refused, or a table that merges and folds without a fault."""
    rows = data.draw(st.integers(1, 5))
    byte = st.integers(0, 255) | st.integers(0, 3)

    def column(how: int, width: int, n: int = rows) -> st.SearchStrategy[list[Any]]:
        of = st.lists(byte, min_size=width * n, max_size=width * n)
        return of.map(lambda v: [how, 0, width, 0, bytes(v)])

    plain = column(2, 1)
    constant = st.sampled_from([0, 1, 2, 3, 255, 2**31, 2**62]).map(lambda v: [0, v])
    kinds = st.lists(st.integers(0, 3), min_size=rows, max_size=rows)
    columns = {
        "kind": [2, 0, 1, 0, bytes(data.draw(kinds))],
        "source": data.draw(constant | plain),
    }
    for name in ("number", "offset", "length", "crc32c"):
        columns[name] = data.draw(constant | plain | column(2, 8))
    if data.draw(st.booleans()):
        columns["index"] = data.draw(column(1, 1, rows - 1) | plain)
    fields = {
        "n": rows,
        "lo": data.draw(st.sampled_from([[], [0], [0, 0], [5]])),
        "hi": data.draw(st.sampled_from([[], [300], [rows], [2, 200], [2**40]])),
        "src": data.draw(st.sampled_from([[], [SESSION], [SESSION, OTHER]])),
        "inl": data.draw(st.binary(max_size=12)),
        "virt": data.draw(st.none() | st.just(FILES)),
        "col": columns,
    }
    with contextlib.suppress(ManifestsError):
        table = table_of(msgpack.unpackb(msgpack.packb(fields)))
        dict(table.refs())
        merged = merge_layers([Layer(None, (table,)), Layer((3,) * table.box.ndim, (table,))])
        fold([table], merged)
        fold([table], Overlay(None, None))


# --- virtual refs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "virt",
    [
        {"paths": b"../a\0b"},
        {"paths": b"a\0b\0c"},
        {"names": ["arch/ive", ""]},
        {"container": [0, 2]},
        {"n": 2**40},
    ],
)
def test_forged_files_are_refused(virt: dict[str, Any]) -> None:
    table = ChunkTable.of({(0,): VirtualRef(FILE, 0, 5), (1,): VirtualRef(WEB, 0, 5)})
    fields = unpack(pack(table.pack()))
    assert dict(table_of(fields).refs()) == dict(table.refs())
    with pytest.raises(CorruptObjectError):
        table_of(fields | {"virt": fields["virt"] | virt})
