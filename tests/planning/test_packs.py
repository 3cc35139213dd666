"""Which packs are due and what moves where, against a dict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.format.chunk_table import (
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    VirtualRef,
)
from zarr_manifests.format.virtual_sources import VirtualSource
from zarr_manifests.grid import Coords
from zarr_manifests.planning.upkeep.dead_packs import (
    PackMoves,
    Range,
    Use,
    by_bytes,
    due_packs,
    moved_rows,
    rounds,
    uses_of,
)

SESSIONS = [f"{i:012d}-" + "ab" * 12 for i in range(3)]
NEW = f"{9:012d}-" + "cd" * 12

# Ranges of ten bytes, so that several rows share one; the checksum follows from the range.
natives = st.tuples(
    st.sampled_from(SESSIONS), st.integers(0, 2), st.integers(0, 4), st.integers(1, 3)
).map(lambda r: NativeRef(r[0], r[1], r[2] * 10, r[3] * 3, hash(r) % 2**32))
refs = st.one_of(
    natives,
    st.binary(max_size=3).map(InlineRef),
    st.just(VirtualRef(VirtualSource("a", "0.nc", None, None, 5), 3, 4)),
)
tables = st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 4)), refs, min_size=1)


def _natives(table: dict[Coords, StoredRef]) -> dict[Coords, NativeRef]:
    return {at: ref for at, ref in sorted(table.items()) if isinstance(ref, NativeRef)}


def _ranges(table: dict[Coords, StoredRef]) -> dict[str, set[tuple[int, int]]]:
    found: dict[str, set[tuple[int, int]]] = {}
    for ref in _natives(table).values():
        found.setdefault(ref.key, set()).add((ref.offset, ref.length))
    return found


@given(tables)
def test_live_bytes_are_those_of_distinct_ranges(table: dict[Coords, StoredRef]) -> None:
    expected = {
        key: Use(len(ranges), sum(length for _, length in ranges))
        for key, ranges in _ranges(table).items()
    }
    assert uses_of(ChunkTable.of(table)) == expected


@given(
    st.lists(tables, max_size=3),
    st.sets(st.sampled_from([NativeRef(s, n, 0, 1, 0).key for s in SESSIONS for n in range(3)])),
    st.data(),
)
def test_rows_move_with_their_range(
    given_tables: list[dict[Coords, StoredRef]], keys: set[str], data: st.DataObject
) -> None:
    nodes = [bytes([i]) * 16 for i in range(len(given_tables))]
    due = []
    for node, table in zip(nodes, given_tables, strict=True):
        rows = moved_rows(ChunkTable.of(table), keys)
        wanted = {at: ref for at, ref in _natives(table).items() if ref.key in keys}
        assert (dict(rows.refs()) if rows is not None else {}) == wanted
        if rows is not None:
            due.append((node, rows))
    moves = PackMoves(due)
    found = [(one.key, one.offset, one.length, one.crc32c) for one in moves.ranges]
    named = [
        (ref.key, ref.offset, ref.length, ref.crc32c)
        for _, table in due
        for _, ref in table.refs()
        if isinstance(ref, NativeRef)
    ]
    assert found == sorted(set(named))
    # The order of writing is that of the first row that names a range.
    by_row = [found[i] for i in sorted(range(len(found)), key=lambda i: moves.order[i])]
    assert by_row == list(dict.fromkeys(named))
    moved = {}
    for one in moves.ranges:
        if data.draw(st.booleans()):
            number, offset = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 99))
            moves.note(one.at, number, offset)
            new = NativeRef(NEW, number, offset, one.length, one.crc32c)
            moved[one.key, one.offset, one.length, one.crc32c] = new
    after = {node: (dict(old.refs()), dict(new.refs())) for node, old, new in moves.rows(NEW)}
    for node, table in due:
        old = {
            at: ref
            for at, ref in table.refs()
            if isinstance(ref, NativeRef) and (ref.key, ref.offset, ref.length, ref.crc32c) in moved
        }
        new = {at: moved[r.key, r.offset, r.length, r.crc32c] for at, r in old.items()}
        assert after.get(node, ({}, {})) == (old, new)


@given(st.lists(st.integers(0, 9)), st.integers(1, 12))
def test_parts_are_bounded_and_whole(lengths: list[int], most: int) -> None:
    ranges = [Range("a", i, length, 0, i) for i, length in enumerate(lengths)]
    parts = list(by_bytes(ranges, most))
    assert [one for part in parts for one in part] == ranges
    assert all(sum(one.length for one in part) <= most or len(part) == 1 for part in parts)
    assert all(parts)


def test_due_is_what_is_less_live_than_that() -> None:
    uses = {"a": Use(1, 49), "b": Use(2, 50), "c": Use(3, 100), "gone": Use(1, 1)}
    sizes = {"a": 100, "b": 100, "c": 100}
    assert due_packs(uses, sizes, 0.5) == ["a"]
    assert due_packs(uses, sizes, 1.0) == ["a", "b"]
    assert list(rounds(["a", "b", "c"], uses, 3)) == [["a", "b"], ["c"]]
    assert list(rounds(["a", "b", "c"], uses, 1)) == [["a"], ["b"], ["c"]]
    assert list(rounds([], uses, 1)) == []
