"""Merging chunk tables against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.engine.change_set import same_bytes
from zarr_manifests.format.chunk_table import (
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    StoredTable,
    Unset,
    VirtualRef,
    VirtualSource,
)
from zarr_manifests.format.records import pack, record, unpack
from zarr_manifests.grid import Box, Coords
from zarr_manifests.ids import crc32c
from zarr_manifests.planning.merge import (
    Layer,
    Overlay,
    agree,
    difference,
    fold,
    inside,
    merge_layers,
    pick,
    split,
)
from zarr_manifests.planning.tables import Stack

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
type Layers = list[tuple[Coords | None, list[Model]]]


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
def stacks(draw: st.DrawFn) -> tuple[list[Model], Layers]:
    """Leaves, and layers of truncation and tables on top of them."""
    ndim = draw(st.integers(0, 4))
    shape = st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim).map(tuple)
    layers = draw(st.lists(st.tuples(st.none() | shape, tables_of(ndim)), max_size=4))
    return draw(tables_of(ndim, unset=False)), layers


def model_of(leaves: list[Model], layers: Layers) -> Model:
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
    return tuple(ChunkTable.parse(record(StoredTable, fields, "table")) for fields in packed)


def lookup(leaves: tuple[ChunkTable, ...], overlay: Overlay, coords: Coords) -> StoredRef | None:
    """As a reader looks it up, without a fold."""
    found = overlay.table.get(coords) if overlay.table is not None else None
    if found is None and (
        overlay.truncated is None or inside(np.array([coords]), overlay.truncated)
    ):
        found = next((ref for leaf in leaves if (ref := leaf.get(coords)) is not None), None)
    return None if isinstance(found, Unset) else found


@settings(max_examples=examples(200))
@given(stacks())
def test_what_is_merged_is_what_a_dict_says(stack: tuple[list[Model], Layers]) -> None:
    leaves, layers = stack
    expected = model_of(leaves, layers)
    overlay = merge_layers([Layer(cut, built(tables)) for cut, tables in layers])
    folded = fold(built(leaves), overlay)
    assert (dict(folded.refs()) if folded is not None else {}) == expected
    if folded is not None:
        inline = [ref.length for ref in expected.values() if isinstance(ref, InlineRef)]
        assert len(folded.inline) == sum(inline)
    for coords in {c for model in [*leaves, *(m for _, ms in layers for m in ms)] for c in model}:
        assert lookup(built(leaves), overlay, coords) == expected.get(coords)


@given(stacks(), st.integers(1, 10))
def test_a_stack_merged_early_is_the_same_as_its_layers(
    stack: tuple[list[Model], Layers], most: int
) -> None:
    tables, layers = stack
    early, late = Stack(most), Stack()
    for cut, each in layers:
        early.add(Layer(cut, built(each)))
        late.add(Layer(cut, built(each)))
    for found in (early, late):
        merged = fold(built(tables), found.overlay())
        assert (dict(merged.refs()) if merged is not None else {}) == model_of(tables, layers)


# --- splitting -------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(stacks(), st.integers(1, 5))
def test_split_tables_hold_the_same_in_boxes_that_do_not_overlap(
    stack: tuple[list[Model], Layers], most_rows: int
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
        used = {ref.source for _, ref in part.refs() if isinstance(ref, NativeRef | VirtualRef)}
        assert {*part.sources, *part.virtual} == used
    assert found == dict(table.refs())
    assert sum(map(len, parts)) == len(table)
    for i, part in enumerate(parts):
        assert not any(part.box.overlaps(other.box) for other in parts[:i])
        assert table.box == Box.around([table.box, part.box])


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


@settings(max_examples=examples(200))
@given(st.data(), st.integers(0, 2))
def test_tables_are_compared_by_the_bytes_that_their_refs_stand_for(
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
    changed = difference(tables[1], tables[0])
    due = {c: ref for c, ref in other.items() if one.get(c) != ref}
    due |= dict.fromkeys(one.keys() - other.keys(), UNSET)
    assert (dict(changed.refs()) if changed is not None else {}) == due
