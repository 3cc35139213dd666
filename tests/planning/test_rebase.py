"""What can be put on top of what, without a session: chunks, names of conflicts, many commits."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.format.chunk_table import UNSET, ChunkTable, InlineRef, StoredRef
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.planning.conflict.components import Changes
from zarr_manifests.planning.conflict.decide import Rebased, rebase
from zarr_manifests.planning.conflict.reads import Reads

A, B = b"a" * 12, b"b" * 12
NOTHING = Changes({})


def array(path: str, node_id: bytes, shape: tuple[int, ...] = (100, 100)) -> Node:
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1] * len(shape)}},
        "chunk_key_encoding": {"name": "default"},
    }
    return Node(path, node_id, NodeKind.ARRAY, {"zarr.json": json.dumps(document).encode()})


NODES = {"air/a": array("air/a", A), "air/b": array("air/b", B)}


def chunks(refs: dict[Coords, StoredRef], node: bytes = A) -> Changes:
    return Changes.of(NODES, {}, {}, {node: ChunkTable.of(refs)})


def written(*coords: Coords, node: bytes = A, data: bytes = b"x") -> Changes:
    return chunks({c: InlineRef(data) for c in coords}, node)


def moved(mine: Changes, *theirs: Changes) -> Rebased:
    together = NOTHING
    for each in theirs:
        together = together.then(each)
    return rebase(mine, together, NODES)


def test_disjoint_chunks() -> None:
    mine = written((0, 0), (5, 5))
    other = written((0, 0), node=B)
    assert moved(mine, written((0, 5), (5, 0)), other).conflicts == ()
    assert moved(mine).conflicts == ()


def test_shared_chunks_are_named_and_sorted() -> None:
    mine = written((9, 1), (0, 0), (5, 5), (2, 2))
    (conflict,) = moved(mine, written((9, 1), (1, 1), (0, 0), data=b"y")).conflicts
    assert conflict.path == "/air/a"
    assert conflict.component == "chunks"
    assert conflict.chunks == ((0, 0), (9, 1))
    assert "/air/a: chunks [(0, 0), (9, 1)]: also written by" in str(conflict)


def test_at_most_twenty_chunks_are_listed() -> None:
    coords = [(i, 0) for i in range(50)]
    (conflict,) = moved(written(*coords), written(*coords, data=b"y")).conflicts
    assert conflict.chunks == tuple(coords[:20])


def test_an_unset_is_a_change_too() -> None:
    unset = chunks({(1, 1): UNSET})
    assert moved(unset, written((1, 1))).conflicts
    assert moved(written((1, 1)), unset).conflicts
    assert moved(unset, unset).conflicts == ()


def test_every_commit_between_counts_and_the_last_bytes() -> None:
    theirs = [written((0, 0), data=b"y"), NOTHING, written((1, 0), data=b"y")]
    (conflict,) = moved(written((1, 0), (2, 0)), *theirs).conflicts
    assert conflict.chunks == ((1, 0),)
    assert moved(written((1, 0)), *theirs, written((1, 0))).conflicts == ()


def test_a_rewrite_conflicts_with_nothing() -> None:
    removed = Changes.of(NODES, {"air/a": None}, {}, {})
    for mine in (written((1, 1)), removed):
        assert moved(mine, NOTHING, NOTHING).conflicts == ()


def test_what_was_made_and_deleted_between_leaves_no_trace() -> None:
    made = Changes.of({}, {"n": array("n", b"n" * 12)}, {}, {})
    gone = Changes.of({"n": array("n", b"n" * 12)}, {"n": None}, {}, {})
    mine = Changes.of(NODES, {"n": array("n", b"m" * 12)}, {}, {})
    assert moved(mine, made).conflicts
    assert moved(mine, made, gone).conflicts == ()


def test_chunks_that_are_read_and_written_must_be_nobody_elses() -> None:
    mine, theirs = written((1, 1), (2, 2)), written((1, 1), (2, 2))
    reads = Reads()
    reads.note(A, (2, 2))
    (conflict,) = rebase(mine, theirs, NODES, reads=reads).conflicts
    assert conflict.chunks == ((2, 2),)


def test_many_reads_become_a_box_that_says_no_less() -> None:
    reads = Reads()
    for i in range(10_000):
        reads.note(A, (i, 3))
    assert sum(map(len, reads.chunks.values())) <= 4096
    table = ChunkTable.of({(i, 3): UNSET for i in range(10_000)})
    assert reads.at(A, table.coords()).all()
    assert not reads.at(A, ChunkTable.of({(5, 2): UNSET, (10_000, 3): UNSET}).coords()).any()
    assert reads.beyond(A, (9_999, 9))
    assert not reads.beyond(A, (10_000, 9))
    other = Reads()
    other.add(reads)
    other.note(B, (1, 1))
    assert other.at(A, table.coords()).all()
    assert other.nodes() == {A, B}
    assert reads.nodes() == {A}
    single = Reads()
    single.note(B, ())
    assert single.at(B, ChunkTable.of({(): UNSET}).coords()).tolist() == [True]


def test_reads_end_in_no_hole_of_the_box() -> None:
    """Several boxes of one node, merged from forks, and what came after them."""
    one, two = Reads(), Reads()
    for i in range(5000):
        one.note(A, (i, 0))
        two.note(A, (i + 20_000, 0))
    one.add(two)
    coords = ChunkTable.of({(i, 0): UNSET for i in (0, 4999, 20_000, 24_999)}).coords()
    assert one.at(A, coords).all()
    assert not two.at(A, coords[:2]).any()


coords = st.lists(st.integers(0, 6), min_size=2, max_size=2).map(tuple)
touched = st.dictionaries(st.sampled_from([A, B]), st.sets(coords, min_size=1), max_size=2)


@settings(max_examples=examples(200), deadline=None)
@given(touched, st.lists(touched, max_size=3))
def test_chunk_conflicts_are_the_intersections(
    mine: dict[bytes, set[Coords]], theirs: list[dict[bytes, set[Coords]]]
) -> None:
    def made(by_node: dict[bytes, set[Coords]], data: bytes) -> Changes:
        tables = {
            node: ChunkTable.of({c: InlineRef(data) for c in sorted(cs)})
            for node, cs in by_node.items()
        }
        return Changes.of(NODES, {}, {}, tables)

    found = moved(made(mine, b"x"), *(made(other, b"y") for other in theirs)).conflicts
    paths = {node.node_id: f"/{path}" for path, node in NODES.items()}
    shared = {
        node: mine[node] & set().union(*(other.get(node, set()) for other in theirs))
        for node in mine
    }
    expected = [(paths[node], tuple(sorted(cs)[:20])) for node, cs in shared.items() if cs]
    assert sorted((conflict.path, conflict.chunks) for conflict in found) == sorted(expected)
