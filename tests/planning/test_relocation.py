"""Where an append goes that others have come before."""

from __future__ import annotations

import json

import pytest

from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.planning.conflict.components import Changes
from zarr_manifests.planning.conflict.relocation import Relocation, plan_relocation


def node(path: str, shape: tuple[int, ...], dims: list[str], chunk: int = 2) -> Node:
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "uint8",
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [chunk, *([4] * (len(shape) - 1))]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "attributes": {},
        "dimension_names": dims,
    }
    node_id = path.encode().ljust(12, b".")[-12:]
    return Node(path, node_id, NodeKind.ARRAY, {"zarr.json": json.dumps(document).encode()})


def changed(before: dict[str, Node], *nodes: Node) -> Changes:
    return Changes.of(before, {node.path: node for node in nodes}, {}, {})


def group(path: str, length: int, chunk: int = 2) -> list[Node]:
    prefix = f"{path}/" if path else ""
    return [
        node(f"{prefix}time", (length,), ["time"], 100),
        node(f"{prefix}air", (length, 4), ["time", "x"], chunk),
    ]


def by_path(*nodes: Node) -> dict[str, Node]:
    return {each.path: each for each in nodes}


@pytest.mark.parametrize(
    ("start", "to", "chunk", "steps"), [(4, 8, 2, 2), (4, 8, 4, 1), (4, 6, 2, 1), (3, 6, 3, 1)]
)
def test_an_append_shifts_by_whole_chunks(start: int, to: int, chunk: int, steps: int) -> None:
    base = by_path(*group("", start, chunk))
    mine, theirs = (changed(base, *group("", n, chunk)) for n in (start + 3, to))
    moves, conflicts = plan_relocation("time", base, mine, theirs)
    assert conflicts == []
    air, time = moves
    assert air == Relocation("air", base["air"].node_id, 0, start, start + 3, to, chunk)
    assert (air.steps, air.first, air.length) == (steps, start // chunk, to + 3)
    assert (time.steps, time.first, time.length) == (None, 0, to + 3)


@pytest.mark.parametrize(("start", "to"), [(4, 5), (3, 5), (3, 4)])
def test_more_axes_within_a_chunk_are_a_conflict(start: int, to: int) -> None:
    base = by_path(*group("", start))
    mine, theirs = (changed(base, *group("", n)) for n in (start + 2, to))
    moves, (conflict,) = plan_relocation("time", base, mine, theirs)
    assert moves == []
    assert (conflict.path, conflict.component) == ("/air", "growth")


def test_nothing_is_to_be_done_where_only_one_appends() -> None:
    base = by_path(*group("", 4))
    longer, same = changed(base, *group("", 6)), changed(base)
    for mine, theirs in ((longer, same), (same, longer), (same, same)):
        assert plan_relocation("time", base, mine, theirs) == ([], [])
    assert plan_relocation("x", base, longer, longer) == ([], [])


def test_groups_beside_each_other_shift_apart_and_groups_within_each_other_together() -> None:
    for other, apart in (("b", True), ("a/deep", False)):
        base = by_path(*group("a", 4), *group(other, 4))
        mine = changed(base, *group("a", 6), *group(other, 6))
        theirs = changed(base, *group("a", 6), *group(other, 8))
        moves, conflicts = plan_relocation("time", base, mine, theirs)
        assert bool(moves) is apart
        assert bool(conflicts) is not apart
        one = changed(base, *group("a", 6))
        moves, conflicts = plan_relocation("time", base, mine, one)
        assert [move.path for move in moves] == (["a/air", "a/time"] if apart else [])
        assert [c.path for c in conflicts] == ([] if apart else [f"/{other}/air", f"/{other}/time"])


def test_an_array_that_either_side_makes_with_the_dimension_is_a_conflict() -> None:
    base = by_path(*group("", 4))
    longer = changed(base, *group("", 6))
    more = changed(base, *group("", 6), node("more", (6,), ["time"]))
    for mine, theirs in ((longer, more), (more, longer)):
        moves, (conflict,) = plan_relocation("time", base, mine, theirs)
        assert (moves, conflict.path, conflict.component) == ([], "/more", "create")
    apart = changed(base, *group("", 6), node("more", (6,), ["x"]))
    assert not plan_relocation("time", base, apart, longer)[1]
