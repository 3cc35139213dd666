"""Chunk tables and the columns they are made of."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc

from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    UnsupportedFormatError,
)
from zarr_manifests.format import chunk_table
from zarr_manifests.format.chunk_table import (
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
)
from zarr_manifests.format.columns import MAX_ROWS, decode_column, encode_column
from zarr_manifests.format.envelope import Fields, pack, unpack
from zarr_manifests.grid import Box
from zarr_manifests.planning.merge import Layer, Overlay, fold, merge_layers

SESSION = f"{1:012d}-" + "ab" * 12
OTHER = f"{2:012d}-" + "cd" * 12


def parsed(table: ChunkTable) -> ChunkTable:
    return ChunkTable.parse(Fields(unpack(pack(table.pack())), "table"))


def forged(table: ChunkTable, **changes: Any) -> ChunkTable:
    fields = unpack(pack(table.pack()))
    columns = {name: changes.pop(name) for name in [*changes] if name in fields["col"]}
    return ChunkTable.parse(Fields(fields | changes | {"col": fields["col"] | columns}, "table"))


# --- columns ---------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
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


def test_columns_are_small_where_they_can_be() -> None:
    rng = np.random.default_rng(0)
    assert len(pack(encode_column(np.full(100_000, 7)))) < 8
    assert len(pack(encode_column(np.arange(100_000) * 3))) < 200
    assert len(pack(encode_column(rng.integers(0, 16, 100_000)))) < 60_000


@pytest.mark.parametrize(
    "column",
    [
        None,
        [],
        [0],
        [0, -1],
        [0, 2**63],
        [0, 1.0],
        [3, 0],
        [1, 0, 1, 0, b""],
        [1, 0, 3, 0, b"abc"],
        [1, 0, 1, 2, b"ab"],
        [1, 2**63 - 1, 1, 0, b"\1\1"],  # the sum wraps around
        [1, 0, 8, 0, b"\xff" * 16],
        [2, 0, 8, 0, b"\xff" * 24],
        [2, 1, 1, 0, b"abc"],
        [2, 0, 1, 0, b"ab"],
        [2, 0, 1, 1, b"abc"],
        [2, 0, 1, 1, bytes(16)],
        [2, 0, 1, 1, bytes(blosc.compress(bytes(4), b"zstd", 5, 1))],  # another size
        [2, 0, 1, 1, bytes(blosc.compress(bytes(3), b"zstd", 5, 1))[:-1]],
        [2, 0, 2**40, 0, b""],
    ],
)
def test_columns_that_are_none(column: Any) -> None:
    with pytest.raises(CorruptObjectError, match="column"):
        decode_column(column, 3)


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


def test_values_beyond_the_bound_are_refused() -> None:
    for column in ([0, 4], [1, 0, 1, 0, b"\2\2"], [2, 0, 1, 0, b"\0\4\0"]):
        decode_column(column, 3, most=4)
        with pytest.raises(CorruptObjectError):
            decode_column(column, 3, most=3)


def test_no_allocation_follows_a_number_of_rows_beyond_the_bound() -> None:
    with pytest.raises(CorruptObjectError):
        decode_column([2, 0, 8, 0, b""], MAX_ROWS + 1)
    with pytest.raises(CorruptObjectError):
        ChunkTable.parse(Fields({"n": 2**40, "lo": [0], "hi": [2**40]}, "table"))


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


@settings(max_examples=200, deadline=None)
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


def test_a_resize_of_the_array_does_not_change_what_a_stored_table_means() -> None:
    table = parsed(ChunkTable.of({(3, 4): InlineRef(b"x"), (5, 9): InlineRef(b"y")}))
    assert table.box == Box((3, 4), (6, 10))
    assert table.get((5, 9)) == InlineRef(b"y")


def test_an_empty_table() -> None:
    table = parsed(ChunkTable.build(Box((2,), (2,)), np.zeros(0, np.int64), []))
    assert len(table) == 0
    assert dict(table.refs()) == {}
    assert table.get((2,)) is None


def test_an_empty_table_in_a_box_whose_strides_are_beyond_an_integer() -> None:
    fields = {"n": 0, "lo": [0, 0, 0], "hi": [0, 2**62, 2**62], "src": [], "col": {}}
    table = ChunkTable.parse(Fields(fields, "table"))
    assert table.coords().shape == (0, 3)


def test_dense_tables_have_no_index() -> None:
    dense = ChunkTable.of({(i, j): InlineRef(b"x") for i in range(4) for j in range(5)})
    assert dense.index is None
    assert "index" not in dense.pack()["col"]
    sparse = ChunkTable.of({(0, 0): InlineRef(b"x"), (3, 3): InlineRef(b"x")})
    assert sparse.index is not None


def test_chunks_that_lie_one_after_another_take_next_to_nothing() -> None:
    n = 20_000
    pack_of = {
        (i,): NativeRef(SESSION, 0, 4096 * i, 4096, i * 2654435761 % 2**32) for i in range(n)
    }
    apart = {(i,): NativeRef(SESSION, i, 0, 4096, i * 2654435761 % 2**32) for i in range(n)}
    for table in (pack_of, apart):
        assert len(pack(ChunkTable.of(table).pack())) < 4.3 * n  # of which the checksums take 4


@pytest.mark.parametrize(
    "changes",
    [
        {"src": []},
        {"src": ["../../etc", OTHER]},
        {"src": [SESSION + "\n", OTHER]},
        {"src": [SESSION]},
        {"src": "ab"},
        {"n": 3},
        {"n": 5},
        {"lo": [0, 0], "hi": [2, 2]},
        {"lo": [0], "hi": [4]},
        {"inl": b""},
        {"inl": b"abcdef"},
        {"source": [0, 2]},
        {"source": [2, 0, 1, 0, b"\0\1\0\x09"]},
        {"source": [2, 0, 1, 0, b"\x09\1\0\1"]},  # also where no source is due
        {"kind": [0, 4]},
        {"kind": [0, 1]},
        {"offset": [0, 1]},
        {"length": [0, 2**48 + 1]},
        {"number": [0, 10**9]},
        {"crc32c": [0, 2**32]},
        {"index": [0, 0]},
        {"index": [2, 0, 1, 0, b"\0\2\1\3"]},
        {"index": [1, 0, 1, 0, b"\1\1\x7f"]},
        {"index": [0, -1]},
    ],
)
def test_contradictory_tables_are_refused(changes: dict[str, Any]) -> None:
    table = ChunkTable.of(
        {
            (0, 0): InlineRef(b"abc"),
            (1, 1): NativeRef(OTHER, 1, 5, 7, 9),
            (2, 2): NativeRef(SESSION, 2, 6, 8, 10),
            (3, 3): NativeRef(OTHER, 3, 5, 7, 9),
        }
    )
    assert dict(forged(table).refs()) == dict(table.refs())
    with pytest.raises((CorruptObjectError, InvalidArgumentError)):
        forged(table, **changes)


def test_virtual_refs_of_a_later_version() -> None:
    table = ChunkTable.of({(0,): NativeRef(OTHER, 1, 5, 7, 9)})
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        forged(table, kind=[0, 3])


def test_a_table_beyond_what_is_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better no commit than one that nobody can open."""
    monkeypatch.setattr(chunk_table, "MAX_ROWS", 3)
    parsed(ChunkTable.of({(i,): UNSET for i in range(3)}))
    with pytest.raises(InvalidArgumentError, match="3"):
        ChunkTable.of({(i,): UNSET for i in range(4)}).pack()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_passes_for_a_table_can_be_used(data: st.DataObject) -> None:
    """Columns of forged bytes: refused, or a table that merges and folds without a fault."""
    rows = data.draw(st.integers(1, 5))
    byte = st.integers(0, 255) | st.integers(0, 3)
    plain = st.lists(byte, min_size=rows, max_size=rows).map(lambda v: [2, 0, 1, 0, bytes(v)])
    big = st.lists(st.binary(min_size=8, max_size=8), min_size=rows, max_size=rows).map(
        lambda v: [2, 0, 8, 0, b"".join(v)]
    )
    steps = st.lists(byte, min_size=rows - 1, max_size=rows - 1).map(
        lambda v: [1, 0, 1, 0, bytes(v)]
    )
    constant = st.sampled_from([0, 1, 2, 3, 255, 2**31, 2**62]).map(lambda v: [0, v])
    column = constant | plain | big
    kinds = st.lists(st.integers(0, 2), min_size=rows, max_size=rows).map(
        lambda v: [2, 0, 1, 0, bytes(v)]
    )
    columns = {
        "kind": data.draw(kinds),
        "source": data.draw(constant | plain),
        **{name: data.draw(column) for name in ("number", "offset", "length", "crc32c")},
    }
    if data.draw(st.booleans()):
        columns["index"] = data.draw(steps | plain)
    fields = {
        "n": rows,
        "lo": data.draw(st.sampled_from([[], [0], [0, 0], [5]])),
        "hi": data.draw(st.sampled_from([[], [300], [rows], [2, 200], [2**40]])),
        "src": data.draw(st.sampled_from([[], [SESSION], [SESSION, OTHER]])),
        "inl": data.draw(st.binary(max_size=12)),
        "col": columns,
    }
    try:
        table = ChunkTable.parse(Fields(msgpack.unpackb(msgpack.packb(fields)), "table"))
        dict(table.refs())
        merged = merge_layers([Layer(None, (table,)), Layer((3,) * table.box.ndim, (table,))])
        fold([table], merged)
        fold([table], Overlay(None, None))
    except ManifestsError:
        pass
