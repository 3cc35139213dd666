"""Chunk tables and the columns they are made of."""

from __future__ import annotations

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
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    VirtualRef,
    native_keys,
)
from zarr_manifests.format.columns import MAX_ROWS, decode_column, encode_column
from zarr_manifests.format.envelope import Fields, pack, unpack
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.virtual_sources import NO_SOURCES, VirtualSource, VirtualSources
from zarr_manifests.grid import Box
from zarr_manifests.planning.tables.merge import Layer, Overlay, fold, merge_layers

SESSION = f"{1:012d}-" + "ab" * 12
OTHER = f"{2:012d}-" + "cd" * 12
FILE = VirtualSource("archive", "1999/t.nc", "e-tag", 1_600_000_000_000, 4096)
WEB = VirtualSource("", "file:///data/u.nc")
FILES = VirtualSources.of([FILE, WEB])


def parsed(table: ChunkTable) -> ChunkTable:
    return ChunkTable.parse(Fields(unpack(pack(table.pack())), "table"))


def forged(table: ChunkTable, **changes: Any) -> ChunkTable:
    fields = unpack(pack(table.pack()))
    columns = {name: changes.pop(name) for name in [*changes] if name in fields["col"]}
    return ChunkTable.parse(Fields(fields | changes | {"col": fields["col"] | columns}, "table"))


# --- columns ---------------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
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


@settings(max_examples=examples(200), deadline=None)
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


def test_a_virtual_ref_without_its_file_is_refused() -> None:
    table = ChunkTable.of({(0,): NativeRef(OTHER, 1, 5, 7, 9)})
    with pytest.raises(CorruptObjectError, match="contradict"):
        forged(table, kind=[0, 3])


def test_a_table_beyond_what_is_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better no commit than one that nobody can open."""
    monkeypatch.setattr(chunk_table, "MAX_ROWS", 3)
    parsed(ChunkTable.of({(i,): UNSET for i in range(3)}))
    with pytest.raises(InvalidArgumentError, match="3"):
        ChunkTable.of({(i,): UNSET for i in range(4)}).pack()


@settings(max_examples=examples(300), deadline=None)
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
    kinds = st.lists(st.integers(0, 3), min_size=rows, max_size=rows).map(
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
        "virt": data.draw(st.none() | st.just(FILES.pack())),
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


# --- virtual refs ----------------------------------------------------------------------------


def test_virtual_refs_round_trip_beside_others() -> None:
    refs: dict[tuple[int, ...], StoredRef] = {
        (0, 0): VirtualRef(FILE, 100, 50, 7),
        (0, 1): VirtualRef(FILE, 150, 60),
        (1, 0): InlineRef(b"abc"),
        (1, 1): VirtualRef(WEB, 0, 2**40, 0),
        (2, 0): NativeRef(SESSION, 2, 6, 8, 10),
        (2, 1): UNSET,
    }
    table = parsed(ChunkTable.of(refs))
    assert dict(table.refs()) == refs
    assert [source.location for source in (table.virtual[0], table.virtual[1])] == [
        "virtual://archive/1999/t.nc",
        "file:///data/u.nc",
    ]


def test_merging_brings_files_together_and_drops_those_not_used() -> None:
    old = ChunkTable.of({(i,): VirtualRef(FILE, i, 1) for i in range(4)})
    new = ChunkTable.of({(1,): VirtualRef(WEB, 9, 1), (2,): VirtualRef(FILE, 8, 1, 3)})
    merged = fold([old], merge_layers([Layer(None, (new,))]))
    assert merged is not None
    assert len(merged.virtual) == 2
    assert dict(merged.refs()) == dict(old.refs()) | dict(new.refs())
    cut = fold([merged], merge_layers([Layer((1,), ())]))
    assert cut is not None
    assert [cut.virtual[i] for i in range(len(cut.virtual))] == [FILE]
    over = fold(
        [old], merge_layers([Layer(None, (ChunkTable.of({(0,): UNSET}),)), Layer((1,), ())])
    )
    assert over is None
    inline = fold([old], merge_layers([Layer((0,), (ChunkTable.of({(0,): InlineRef(b"a")}),))]))
    assert inline is not None
    assert inline.virtual is NO_SOURCES


@pytest.mark.parametrize(
    "virt",
    [
        {"paths": b"../a\0b"},
        {"paths": b"a/./b\0b"},
        {"paths": b"/a\0b"},
        {"paths": b"a/\0b"},
        {"paths": b"a//c\0b"},
        {"paths": b"a/..\0b"},
        {"paths": b"a\0"},
        {"paths": b"a"},
        {"paths": b"a\0b\0c"},
        {"paths": b"\xff\0b"},
        {"names": ["archive"]},
        {"names": ["arch/ive", ""]},
        {"names": [1, ""]},
        {"container": [0, 2]},
        {"modified": [0, -1]},
        {"size": None},
        {"etags": b"a"},
        {"n": 1},
        {"n": 0},
        {"n": 2**40},
    ],
)
def test_forged_files_are_refused(virt: dict[str, Any]) -> None:
    table = ChunkTable.of({(0,): VirtualRef(FILE, 0, 5), (1,): VirtualRef(WEB, 0, 5)})
    packed = unpack(pack(table.virtual.pack()))
    assert dict(forged(table, virt=packed).refs()) == dict(table.refs())
    with pytest.raises(CorruptObjectError):
        forged(table, virt=packed | virt)


def test_offsets_count_from_the_last_row_of_the_same_object() -> None:
    """Whether files follow one another or take turns, chunks that lie side by side cost nothing."""
    n, files = 4096, 8
    zeros = np.zeros(n, np.int64)
    for source in (np.repeat(np.arange(files), n // files), np.tile(np.arange(files), n // files)):
        offset = np.empty(n, np.int64)
        for file in range(files):
            offset[source == file] = 512 + 100 * np.arange(n // files)
        table = ChunkTable(
            Box((0,), (n,)),
            None,
            np.full(n, 3),
            source,
            zeros,
            offset,
            np.full(n, 100),
            zeros,
            (),
            b"",
            VirtualSources.of([VirtualSource("a", f"{i}.nc") for i in range(files)]),
        )
        assert len(pack(table.pack()["col"]["offset"])) < 120
        np.testing.assert_array_equal(parsed(table).offset, offset)


def big_table(source: Any, offset: Any, length: Any, files: int) -> ChunkTable:
    n = len(source)
    paths = tuple(f"daily/{1980 + i // 365}/t2m_{i % 365:03d}_era5.nc" for i in range(files))
    rng = np.random.default_rng(1)
    found = VirtualSources(
        ("era5",),
        np.zeros(files, np.int64),
        paths,
        1_600_000_000_000 + rng.integers(0, 10**9, files),
        rng.integers(10**8, 10**9, files),
    )
    zeros = np.zeros(n, np.int64)
    kind = np.full(n, 3)
    return ChunkTable(
        Box((0,), (n,)), None, kind, source, zeros, offset, length, zeros, (), b"", found
    )


def test_a_million_refs_are_small() -> None:
    n, files = 1_000_000, 1_000
    rng = np.random.default_rng(0)
    length = rng.normal(100_000, 12_000, n).astype(np.int64)
    source = np.repeat(np.arange(files), n // files)
    ends = np.cumsum(length.reshape(files, -1), axis=1)
    header = rng.integers(20_000, 20_500, files)[:, None]
    offset = (ends - length.reshape(files, -1) + header).ravel()
    assert (
        len(Manifest.of([(b"n" * 12, big_table(source, offset, length, files))]).encode()) < 3 * n
    )
    regular = big_table(
        np.zeros(n, np.int64), 8192 + 65536 * np.arange(n), np.full(n, 65536), files=1
    )
    assert len(Manifest.of([(b"n" * 12, regular)]).encode()) < 0.1 * n
    zeros = np.zeros(n, np.int64)
    native = ChunkTable(
        Box((0,), (n,)),
        None,
        np.full(n, 2),
        zeros,
        np.arange(n),
        zeros,
        length,
        rng.integers(0, 2**32, n),
        (SESSION,),
        b"",
    )
    assert len(Manifest.of([(b"n" * 12, native)]).encode()) < 7 * n


def test_objects_that_rows_point_to_in_turn_are_found_once() -> None:
    objects = [(SESSION, 1), (SESSION, 1), (OTHER, 1), (SESSION, 2), (SESSION, 1), (OTHER, 1)]
    refs: dict[tuple[int, ...], StoredRef] = {
        (i,): NativeRef(session, number, i, 1, 0) for i, (session, number) in enumerate(objects)
    }
    table = ChunkTable.of(refs | {(9,): InlineRef(b"a"), (10,): VirtualRef(FILE, 0, 1)})
    own = {f"chunks/{SESSION}/1", f"chunks/{SESSION}/2"}
    assert native_keys(table) == own | {f"chunks/{OTHER}/1"}
    assert native_keys(table, {SESSION}) == own
    assert native_keys(ChunkTable.of({(0,): InlineRef(b"a")})) == set()
