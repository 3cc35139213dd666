"""What can be put on top of what, without a session: chunks, names of conflicts, many commits."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.format.chunk_table import UNSET, ChunkTable, InlineRef
from zarr_manifests.format.manifest import Node, NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.planning.components import Changes, Reads
from zarr_manifests.planning.conflict import rebase

A, B = b"a" * 12, b"b" * 12


def array(path: str, node_id: bytes) -> Node:
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [100, 100],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1]}},
        "chunk_key_encoding": {"name": "default"},
    }
    return Node(path, node_id, NodeKind.ARRAY, {"zarr.json": json.dumps(document).encode()})


NODES = {"air/a": array("air/a", A), "air/b": array("air/b", B)}


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


coords = st.lists(st.integers(0, 6), min_size=2, max_size=2).map(tuple)
touched = st.dictionaries(st.sampled_from([A, B]), st.sets(coords, min_size=1), max_size=2)


@settings(max_examples=examples(200))
@given(touched, st.lists(touched, max_size=3))
def test_chunk_conflicts_are_the_intersections(
    mine: dict[bytes, set[Coords]], theirs: list[dict[bytes, set[Coords]]]
) -> None:
    def made(by_node: dict[bytes, set[Coords]], data: bytes) -> Changes:
        tables = {
            node: [ChunkTable.of({c: InlineRef(data) for c in sorted(cs)})]
            for node, cs in by_node.items()
        }
        by_id = {node.node_id: node for node in NODES.values()}
        return Changes.of(NODES, by_id, {}, {}, tables)

    together = Changes.joined(made(each, b"y") for each in theirs)
    found = rebase(made(mine, b"x"), together, NODES).conflicts
    paths = {node.node_id: f"/{path}" for path, node in NODES.items()}
    shared = {
        node: mine[node] & set().union(*(other.get(node, set()) for other in theirs))
        for node in mine
    }
    expected = [(paths[node], tuple(sorted(cs)[:20])) for node, cs in shared.items() if cs]
    assert sorted((conflict.path, conflict.chunks) for conflict in found) == sorted(expected)
