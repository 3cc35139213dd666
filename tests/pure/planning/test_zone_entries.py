"""Entries of zone maps count only for the chunk they were made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.format.chunk_table import (
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    VirtualRef,
    VirtualSource,
)
from zarr_manifests.format.zone_maps import MEANING_BYTES, Bounds, ZoneTable
from zarr_manifests.grid import Coords
from zarr_manifests.planning.meaning import merged, taken, valid, zones_of_chunks

SESSIONS = [f"{n:012d}-{'ab' * 12}" for n in (1, 2)]
MEANING = b"m" * MEANING_BYTES


def bounds_of(values: list[int]) -> Bounds:
    low = np.array(values, np.int64)
    return Bounds(low, low + 1, np.ones(len(low), np.bool_), *(0 * low,) * 4)


def zones_of(refs: dict[Coords, StoredRef], first: int = 0) -> ZoneTable | None:
    table = ChunkTable.of(refs)
    return zones_of_chunks(MEANING, table, bounds_of([*range(first, first + len(table))]))


REFS = st.one_of(
    st.builds(
        NativeRef,
        st.sampled_from(SESSIONS),
        st.integers(0, 1),
        st.integers(0, 2),
        st.integers(1, 2),
        st.integers(0, 2**32 - 1),
    ),
    st.builds(InlineRef, st.binary(max_size=1)),
    st.builds(
        VirtualRef,
        st.builds(
            VirtualSource,
            st.sampled_from(["", "files"]),
            st.sampled_from(["a", "b"]),
            st.sampled_from([None, "etag"]),
            st.sampled_from([None, 1]),
        ),
        st.integers(0, 1),
        st.integers(1, 2),
        st.sampled_from([None, 0, 1]),
    ),
)
COORDS = st.tuples(st.integers(0, 3), st.integers(0, 2))


def key_of(ref: StoredRef) -> object:
    """What identifies a chunk, said another way; None if nothing does."""
    match ref:
        case NativeRef(source, number, offset, length):
            return source, number, offset, length
        case VirtualRef(source, _, _, crc):
            return None if source.etag is source.modified_ms is crc is None else ref
        case InlineRef():
            return ref
    return None


@given(st.dictionaries(COORDS, REFS, min_size=1), st.dictionaries(COORDS, REFS | st.just(UNSET)))
def test_entries_count_where_the_address_is_the_same(
    old: dict[Coords, StoredRef], new: dict[Coords, StoredRef]
) -> None:
    known = {at: ref for at, ref in old.items() if key_of(ref) is not None}
    zones = zones_of(old)
    assert (zones is None) == (not known)
    if zones is None:
        return
    assert zones.coords().tolist() == [list(at) for at in sorted(known)]
    due = [at in new and key_of(new[at]) == key_of(known[at]) for at in sorted(known)]
    assert valid(zones, ChunkTable.of(new) if new else None).tolist() == due
    assert valid(zones, ChunkTable.of(old)).all()
    kept = taken(zones, np.array(due))
    assert len(kept) == sum(due)
    if len(kept):
        assert valid(kept, ChunkTable.of(new)).all()
        assert kept.bounds.low.tolist() == zones.bounds.low[np.array(due)].tolist()


@given(st.lists(st.dictionaries(COORDS, REFS, min_size=1), min_size=1, max_size=4))
def test_the_newest_entry_of_a_chunk_wins(layers: list[dict[Coords, StoredRef]]) -> None:
    expected: dict[Coords, tuple[object, int]] = {}
    tables = []
    for i, refs in enumerate(layers):
        zones = zones_of(refs, 100 * i)
        if zones is None:
            continue
        tables.append(zones)
        for row, at in enumerate(zones.coords().tolist()):
            expected[tuple(at)] = (refs[tuple(at)], int(zones.bounds.low[row]))
    if not tables:
        return
    found = merged(tables)
    assert [tuple(at) for at in found.coords().tolist()] == sorted(expected)
    assert found.bounds.low.tolist() == [expected[at][1] for at in sorted(expected)]
    assert valid(found, ChunkTable.of({at: ref for at, (ref, _) in expected.items()})).all()


NATIVE = NativeRef(SESSIONS[0], 3, 100, 50, 77)


FILE = VirtualSource("files", "a.nc", "etag")


def sound(refs: dict[Coords, StoredRef], first: int = 0) -> ZoneTable:
    zones = zones_of(refs, first)
    assert zones is not None
    return zones


def counts(zones: ZoneTable, refs: dict[Coords, StoredRef]) -> list[bool]:
    return valid(zones, ChunkTable.of(refs)).tolist()


@pytest.mark.parametrize(
    "other",
    [
        NativeRef(SESSIONS[1], 3, 100, 50, 77),
        NativeRef(SESSIONS[0], 4, 100, 50, 77),
        NativeRef(SESSIONS[0], 3, 101, 50, 77),
        NativeRef(SESSIONS[0], 3, 100, 51, 77),
        InlineRef(b"x" * 50),
        VirtualRef(FILE, 100, 50),
        UNSET,
    ],
)
def test_a_native_chunk_is_the_same_at_the_same_address_only(other: StoredRef) -> None:
    zones = sound({(0, 1): NATIVE})
    assert counts(zones, {(0, 0): UNSET, (0, 1): NATIVE, (0, 2): other}) == [True]
    assert counts(zones, {(0, 0): NATIVE, (0, 1): other}) == [False]
    assert counts(zones, {(0, 1): other}) == [False]
    # As many chunks in the same box, but others.
    assert counts(
        sound({(0, 0): NATIVE, (0, 1): NATIVE, (0, 3): NATIVE}),
        {(0, 0): NATIVE, (0, 2): NATIVE, (0, 3): NATIVE},
    ) == [True, False, True]
    assert counts(zones, {(0, 2): NATIVE}) == [False]
