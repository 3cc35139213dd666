"""What can be put on top of what."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zarr_manifests.format.chunk_table import UNSET, ChunkTable, InlineRef
from zarr_manifests.grid import Coords
from zarr_manifests.planning.rebase import Footprint, find_conflicts

A, B = b"a" * 12, b"b" * 12
PATHS = {A: "air/a", B: "air/b"}
NOTHING = Footprint(frozenset(), {})


def chunks(node: bytes = A, *coords: Coords) -> Footprint:
    return Footprint(frozenset(), {node: (ChunkTable.of({c: InlineRef(b"x") for c in coords}),)})


def metadata(*paths: str) -> Footprint:
    return Footprint(frozenset(paths), {})


def test_disjoint_chunks() -> None:
    mine = chunks(A, (0, 0), (5, 5))
    assert find_conflicts(mine, [chunks(A, (0, 5), (5, 0)), chunks(B, (0, 0))], PATHS) == []
    assert find_conflicts(mine, [], PATHS) == []


def test_shared_chunks_are_named_and_sorted() -> None:
    mine = chunks(A, (9, 1), (0, 0), (5, 5), (2, 2))
    (conflict,) = find_conflicts(mine, [chunks(A, (9, 1), (1, 1), (0, 0))], PATHS)
    assert conflict.path == "/air/a"
    assert conflict.component == "chunks"
    assert conflict.chunks == ((0, 0), (9, 1))
    assert "/air/a: chunks [(0, 0), (9, 1)]: also written by" in str(conflict)


def test_at_most_twenty_chunks_are_listed() -> None:
    coords = [(i,) for i in range(50)]
    (conflict,) = find_conflicts(chunks(A, *coords), [chunks(A, *coords)], PATHS)
    assert conflict.chunks == tuple(coords[:20])


def test_an_unset_is_a_change_too() -> None:
    unset = Footprint(frozenset(), {A: (ChunkTable.of({(1,): UNSET}),)})
    assert find_conflicts(unset, [chunks(A, (1,))], PATHS)
    assert find_conflicts(chunks(A, (1,)), [unset], PATHS)


def test_every_commit_between_counts() -> None:
    theirs = [chunks(A, (0,)), NOTHING, chunks(A, (1,)), chunks(B, (2,))]
    found = find_conflicts(chunks(A, (1,), (2,)), theirs, PATHS)
    assert [conflict.chunks for conflict in found] == [((1,),)]


def test_a_rewrite_conflicts_with_nothing() -> None:
    both = Footprint(frozenset({"air/a"}), chunks(A, (1,)).tables)
    for mine in (chunks(A, (1,)), metadata("air/a", "new"), both):
        assert find_conflicts(mine, [NOTHING, NOTHING], PATHS) == []


def test_metadata_on_either_side_is_a_conflict() -> None:
    for mine, theirs, path in (
        (metadata("air/a"), chunks(B, (0,)), "/air/a"),
        (chunks(B, (0,)), metadata("air/a"), "/air/a"),
        (metadata("air/a"), metadata("air/a"), "/air/a"),
        (metadata("one"), metadata("two"), "/two"),
    ):
        (conflict,) = find_conflicts(mine, [theirs], PATHS)
        assert (conflict.path, conflict.component) == (path, "metadata")


coords = st.lists(st.integers(0, 6), min_size=2, max_size=2).map(tuple)
footprints = st.dictionaries(st.sampled_from([A, B]), st.sets(coords, min_size=1), max_size=2)


@settings(max_examples=200, deadline=None)
@given(footprints, st.lists(footprints, max_size=3))
def test_chunk_conflicts_are_the_intersections(
    mine: dict[bytes, set[Coords]], theirs: list[dict[bytes, set[Coords]]]
) -> None:
    def made(touched: dict[bytes, set[Coords]]) -> Footprint:
        tables = {
            node: tuple(ChunkTable.of({c: UNSET}) for c in sorted(cs))
            for node, cs in touched.items()
        }
        return Footprint(frozenset(), tables)

    found = find_conflicts(made(mine), map(made, theirs), PATHS)
    expected = sorted(
        (f"/{PATHS[node]}", tuple(sorted(mine[node] & other[node])[:20]))
        for other in theirs
        for node in mine.keys() & other.keys()
        if mine[node] & other[node]
    )
    assert sorted((conflict.path, conflict.chunks) for conflict in found) == expected
