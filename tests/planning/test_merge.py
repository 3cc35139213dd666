"""Merging chunk tables against a dict."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.engine.edit.change_set import same_bytes
from zarr_manifests.errors import ManifestsError
from zarr_manifests.format.chunk_table import (
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    Unset,
    VirtualRef,
)
from zarr_manifests.format.envelope import Fields, pack, unpack
from zarr_manifests.format.virtual_sources import VirtualSource
from zarr_manifests.grid import Box, Coords
from zarr_manifests.ids import crc32c
from zarr_manifests.planning.tables.live_deltas import Stack
from zarr_manifests.planning.tables.merge import (
    Layer,
    Overlay,
    agree,
    bare,
    difference,
    fold,
    inside,
    merge_layers,
    narrower,
    owned,
    pick,
    select,
    split,
    unset_at,
    within,
)

SESSIONS = [f"{i:012d}-" + "ab" * 12 for i in range(3)]

FILES = [VirtualSource("a", f"{i}.nc", "e" * i or None, i or None, 5) for i in range(3)]

virtual = st.builds(
    VirtualRef,
    st.sampled_from(FILES),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.none() | st.integers(0, 2**32 - 1),
)
native = st.builds(
    NativeRef,
    st.sampled_from(SESSIONS),
    st.integers(0, 99),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 2**32 - 1),
)
refs: st.SearchStrategy[StoredRef] = st.one_of(
    st.just(UNSET), virtual, st.builds(InlineRef, st.binary(max_size=6)), native
)
type Model = dict[Coords, StoredRef]


def _is_set(ref: StoredRef) -> bool:
    return ref is not UNSET


@st.composite
def tables_of(draw: st.DrawFn, ndim: int, *, unset: bool = True) -> list[Model]:
    """Tables of one layer: no coordinate twice."""
    coords = st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim).map(tuple)
    # Of one kind, most often: what is the same in all rows is stored, and merged, otherwise.
    kinds = draw(st.sampled_from([refs, virtual, native, st.just(UNSET)]))
    kinds = kinds if unset else draw(st.sampled_from([refs, virtual, native])).filter(_is_set)
    model = draw(st.dictionaries(coords, kinds, max_size=12))
    cut = draw(st.integers(0, len(model)))
    items = list(model.items())
    return [dict(part) for part in (items[:cut], items[cut:]) if part]


@st.composite
def stacks(draw: st.DrawFn) -> tuple[list[Model], list[tuple[Coords | None, list[Model]]]]:
    """Leaves, and layers of truncation and tables on top of them."""
    ndim = draw(st.integers(0, 4))
    shape = st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim).map(tuple)
    layers = draw(st.lists(st.tuples(st.none() | shape, tables_of(ndim)), max_size=4))
    return draw(tables_of(ndim, unset=False)), layers


def model_of(leaves: list[Model], layers: list[tuple[Coords | None, list[Model]]]) -> Model:
    found: Model = {}
    for leaf in leaves:
        found.update(leaf)
    for cut, tables in layers:
        if cut is not None:
            found = {
                c: r for c, r in found.items() if all(x < n for x, n in zip(c, cut, strict=True))
            }
        for table in tables:
            found.update(table)
    return {coords: ref for coords, ref in found.items() if not isinstance(ref, Unset)}


def built(tables: list[Model]) -> tuple[ChunkTable, ...]:
    """As they come from disk, where columns of one value are stored once."""
    packed = [unpack(pack(ChunkTable.of(table).pack())) for table in tables]
    return tuple(ChunkTable.parse(Fields(fields, "table")) for fields in packed)


def lookup(leaves: tuple[ChunkTable, ...], overlay: Overlay, coords: Coords) -> StoredRef | None:
    """As a reader looks it up, without a fold."""
    found = overlay.table.get(coords) if overlay.table is not None else None
    if found is None and (
        overlay.truncated is None or inside(np.array([coords]), overlay.truncated)
    ):
        found = next((ref for leaf in leaves if (ref := leaf.get(coords)) is not None), None)
    return None if isinstance(found, Unset) else found


@settings(max_examples=examples(200), deadline=None)
@given(stacks())
def test_fold_against_a_dict(
    stack: tuple[list[Model], list[tuple[Coords | None, list[Model]]]],
) -> None:
    leaves, layers = stack
    expected = model_of(leaves, layers)
    overlay = merge_layers([Layer(cut, built(tables)) for cut, tables in layers])
    folded = fold(built(leaves), overlay)
    assert (dict(folded.refs()) if folded is not None else {}) == expected
    if folded is not None:
        assert not any(isinstance(ref, Unset) for _, ref in folded.refs())
        assert sum(r.length for r in expected.values() if isinstance(r, InlineRef)) == len(
            folded.inline
        )
        for coords in expected:
            assert folded.get(coords) == expected[coords]


@settings(max_examples=examples(150), deadline=None)
@given(stacks())
def test_lookup_through_overlay_and_leaves_against_a_dict(
    stack: tuple[list[Model], list[tuple[Coords | None, list[Model]]]],
) -> None:
    leaves, layers = stack
    expected = model_of(leaves, layers)
    overlay = merge_layers([Layer(cut, built(tables)) for cut, tables in layers])
    everywhere = {c for m in leaves for c in m} | {c for _, ts in layers for m in ts for c in m}
    for coords in everywhere:
        assert lookup(built(leaves), overlay, coords) == expected.get(coords)


@settings(max_examples=examples(200), deadline=None)
@given(stacks(), st.integers(0, 4))
def test_layers_can_be_brought_together_in_steps(
    stack: tuple[list[Model], list[tuple[Coords | None, list[Model]]]], at: int
) -> None:
    """An overlay is a layer: merging some first changes nothing."""
    leaves, layers = stack
    built_layers = [Layer(cut, built(tables)) for cut, tables in layers]
    first = merge_layers(built_layers[:at])
    as_layer = Layer(first.truncated, (first.table,) if first.table is not None else ())
    whole = fold(built(leaves), merge_layers(built_layers))
    stepwise = fold(built(leaves), merge_layers([as_layer, *built_layers[at:]]))
    assert (whole is None) == (stepwise is None)
    if whole is not None and stepwise is not None:
        assert dict(whole.refs()) == dict(stepwise.refs())


@given(stacks(), st.integers(1, 10), st.sets(st.integers(0, 4), max_size=2))
def test_a_stack_merged_early_is_the_same_as_its_layers(
    stack: tuple[list[Model], list[tuple[Coords | None, list[Model]]]], most: int, apart: set[int]
) -> None:
    tables, layers = stack
    early, late = Stack(apart, most), Stack(apart, 1_000)
    held = [Layer(cut, built(each)) for cut, each in layers]
    for last, layer in enumerate(held, 1):
        early.add(last, layer)
        late.add(last, layer)
    leaves = built(tables)
    for after in {0, *apart}:
        expected = model_of(tables, layers[after:])
        for found in (early, late):
            merged = fold(leaves, found.after(after))
            assert (dict(merged.refs()) if merged is not None else {}) == expected
        states = [model_of(tables, layers[after:at]) for at in range(after, len(layers) + 1)]
        lost = any(new.keys() < old.keys() for old, new in pairwise(states))
        assert late.removes(after) or not lost
    assert early.rows == late.rows == sum(len(t) for _, each in layers for t in each)


def test_a_stack_of_overwritten_chunks_stays_small() -> None:
    stack = Stack((), 10)
    table = ChunkTable.of({(i,): InlineRef(b"a") for i in range(10)})
    for last in range(1, 100):
        stack.add(last, Layer(None, (table,)))
        assert sum(len(t) for _, layer in stack._layers for t in layer.tables) <= 30
    assert stack.rows == 990


@given(stacks(), st.data())
def test_tables_own_their_rows(
    stack: tuple[list[Model], list[tuple[Coords | None, list[Model]]]], data: st.DataObject
) -> None:
    for table in built(stack[0]):
        rows = data.draw(st.integers(0, len(table)))
        inner = within(table, Box.around_coords(table.coords()[:rows])) if rows else table
        mine = owned(inner)
        assert dict(mine.refs()) == dict(inner.refs())
        columns = (mine.index, mine.kind, mine.source, mine.offset, mine.length)
        assert all(c is None or c.base is None or not c.strides[0] or not len(c) for c in columns)


def test_unset_rows_are_kept_until_the_base_is_reached() -> None:
    layers = [Layer(None, built([{(1,): UNSET}]))]
    overlay = merge_layers(layers)
    assert overlay.table is not None
    assert overlay.table.get((1,)) is UNSET
    assert fold((), overlay) is None


def test_nothing_on_nothing() -> None:
    assert merge_layers([]) == Overlay(None, None)
    assert fold((), Overlay(None, None)) is None
    assert fold((), Overlay((3,), None)) is None


def test_a_later_growth_does_not_bring_back_what_a_truncation_cut() -> None:
    leaf = ChunkTable.of({(i,): InlineRef(bytes([i])) for i in range(6)})
    overlay = merge_layers([Layer((2,), ()), Layer((9,), built([{(4,): InlineRef(b"new")}]))])
    assert overlay.truncated == (2,)
    folded = fold([leaf], overlay)
    assert folded is not None
    assert dict(folded.refs()) == {
        (0,): InlineRef(b"\0"),
        (1,): InlineRef(b"\1"),
        (4,): InlineRef(b"new"),
    }


def test_narrower() -> None:
    assert narrower(None, None) is None
    assert narrower((3, 4), None) == (3, 4)
    assert narrower(None, (3, 4)) == (3, 4)
    assert narrower((3, 9), (5, 4)) == (3, 4)


def test_select_keeps_inline_bytes_with_their_rows() -> None:
    table = ChunkTable.of({(i,): InlineRef(bytes([i]) * i) for i in range(6)})
    kept = select(table, np.array([False, True, False, True, False, True]))
    assert dict(kept.refs()) == {(i,): InlineRef(bytes([i]) * i) for i in (1, 3, 5)}
    assert kept.box == table.box


def test_merging_inline_rows_makes_no_object_for_each() -> None:
    count = 20_000
    tables = [
        ChunkTable.of({(i,): InlineRef(b"0123456789abcdef") for i in range(first, stop)})
        for first, stop in ((0, count // 2), (count // 2, count))
    ]
    tracemalloc.start()
    merged = merge_layers([Layer(None, tuple(tables))]).table
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert merged is not None
    assert merged.inline == b"0123456789abcdef" * count
    assert peak < 190 * count


@pytest.mark.parametrize("cut", [(1,), (1, 1, 1), ()])
def test_tables_and_truncations_of_different_ndim_are_refused(cut: Coords) -> None:
    """They come from objects that contradict each other."""
    flat, deep = ChunkTable.of({(1, 2): UNSET}), ChunkTable.of({(1, 2, 3): UNSET})
    with pytest.raises(ManifestsError):
        merge_layers([Layer(None, (flat,)), Layer(None, (deep,))])
    with pytest.raises(ManifestsError):
        merge_layers([Layer(None, (flat,)), Layer(cut, ())])
    with pytest.raises(ManifestsError):
        fold([flat], Overlay(cut, None))
    with pytest.raises(ManifestsError):
        fold([flat], Overlay(None, deep))


# --- splitting -------------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
@given(stacks(), st.data())
def test_rows_within_a_box_and_which_are_set(
    stack: tuple[list[Model], list[tuple[Coords | None, list[Model]]]], data: st.DataObject
) -> None:
    leaves, layers = stack
    for table in [*built(leaves), *(t for _, tables in layers for t in built(tables))]:
        lo = tuple(data.draw(st.integers(0, 4)) for _ in table.box.lo)
        box = Box(lo, tuple(x + data.draw(st.integers(0, 4)) for x in lo))
        expected = {coords: ref for coords, ref in table.refs() if coords in box}
        assert dict(within(table, box).refs()) == expected
        states = {coords: ref is UNSET for coords, ref in table.refs()}
        assert {coords: ref is UNSET for coords, ref in bare(table).refs()} == states


@settings(max_examples=examples(200), deadline=None)
@given(stacks(), st.integers(1, 5))
def test_split_tables_hold_the_same_in_boxes_that_do_not_overlap(
    stack: tuple[list[Model], list[tuple[Coords | None, list[Model]]]], most_rows: int
) -> None:
    leaves, layers = stack
    overlay = merge_layers([Layer(cut, built(tables)) for cut, tables in layers])
    table = fold(built(leaves), overlay)  # its box may be wider than its rows are
    if table is None:
        return
    parts = [*split(table, most_rows)]
    assert [len(part) for part in parts if not 0 < len(part) <= most_rows] == []
    found: Model = {}
    for part in parts:
        assert all(coords in part.box for coords, _ in part.refs())
        found |= dict(part.refs())
    assert found == dict(table.refs())
    assert sum(map(len, parts)) == len(table)
    for i, part in enumerate(parts):
        assert not any(part.box.overlaps(other.box) for other in parts[:i])
        assert table.box == Box.around([table.box, part.box])


def test_a_table_that_fits_is_left_alone() -> None:
    table = ChunkTable.of({(i,): UNSET for i in range(5)})
    assert [*split(table, 5)] == [table]


def test_a_table_is_split_without_the_coordinates_of_all_rows() -> None:
    n = 200_000
    index, same = np.arange(n) * 2, np.broadcast_to(np.int64(0), (n,))
    columns = (same,) * 6  # all of them unset
    table = ChunkTable(Box((0, 0), (1000, 400)), index, *columns, (), b"")
    tracemalloc.start()
    rows = [len(part) for part in split(table, 1000)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(rows), sum(rows)) == (200, n)
    assert peak < 2 * n  # bytes; coordinates take 16 a row


def test_a_table_is_cut_along_the_first_axis_where_that_is_enough() -> None:
    table = ChunkTable.of({(i, j): InlineRef(b"x") for i in range(9) for j in range(4)})
    assert [part.box for part in split(table, 12)] == [
        Box((0, 0), (3, 4)),
        Box((3, 0), (6, 4)),
        Box((6, 0), (9, 4)),
    ]
    assert [part.box for part in split(table, 3)][:2] == [
        Box((0, 0), (1, 3)),
        Box((0, 3), (1, 4)),
    ]


few = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 2)), st.sampled_from(
        [
            UNSET,
            InlineRef(b"a"),
            InlineRef(b"b"),
            NativeRef(SESSIONS[0], 1, 2, 3, 4),
            NativeRef(SESSIONS[1], 1, 2, 3, 4),
            VirtualRef(FILES[0], 2, 3, 4),
            VirtualRef(FILES[1], 2, 3, 4),
            VirtualRef(FILES[1], 2, 3, 0),
            VirtualRef(FILES[1], 2, 3, None),
        ]
    ),
)  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(few, few)
def test_a_difference_is_what_changed_and_nothing_else(
    old: dict[Coords, StoredRef], new: dict[Coords, StoredRef]
) -> None:
    found = difference(ChunkTable.of(new) if new else None, ChunkTable.of(old) if old else None)
    expected = {c: ref for c, ref in new.items() if old.get(c) != ref}
    expected |= dict.fromkeys(old.keys() - new.keys(), UNSET)
    assert (dict(found.refs()) if found is not None else {}) == expected


# Few lengths and checksums, so that some of the bytes are the same.
alike: st.SearchStrategy[StoredRef] = st.one_of(
    st.builds(
        VirtualRef,
        st.sampled_from(FILES),
        st.integers(0, 1),
        st.integers(0, 1),
        st.sampled_from([None, None, 0, crc32c(b"a")]),
    ),
    st.builds(InlineRef, st.sampled_from([b"", b"a", b"b"])),
    st.builds(
        NativeRef,
        st.sampled_from(SESSIONS),
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 1),
        st.sampled_from([0, crc32c(b"a")]),
    ),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.data(), st.integers(0, 2))
def test_tables_agree_where_their_refs_stand_for_the_same_bytes(
    data: st.DataObject, ndim: int
) -> None:
    coords = st.lists(st.integers(0, 2), min_size=ndim, max_size=ndim).map(tuple)
    one, other = (data.draw(st.dictionaries(coords, alike, max_size=9)) for _ in range(2))
    asked = sorted(data.draw(st.sets(coords, min_size=1)))
    tables = [ChunkTable.of(model) if model else None for model in (one, other)]
    index = np.array(asked, np.int64).reshape(len(asked), ndim)
    expected = [same_bytes(one.get(c), other.get(c)) for c in asked]
    assert agree(tables[0], tables[1], index).tolist() == expected
    assert agree(tables[0], tables[0], index).all()
    for model, table in zip((one, other), tables, strict=True):
        if table is not None:
            kept = {c: ref for c, ref in model.items() if c in asked}
            assert dict(pick(table, index).refs()) == kept
    assert dict(unset_at(index).refs()) == dict.fromkeys(asked, UNSET)
