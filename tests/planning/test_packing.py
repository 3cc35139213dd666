"""Where chunk tables go: everything exactly once, in whatever order it comes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.planning.layout.packing import EMBED_BYTES, plan_embedding

node_ids = st.binary(min_size=1, max_size=3)
sizes = st.one_of(st.integers(0, 60_000), st.integers(0, 2_000_000), st.integers(0, 100))


def shuffled(items: dict[bytes, int], seed: int) -> dict[bytes, int]:
    keys = list(items)
    random.Random(seed).shuffle(keys)
    return {key: items[key] for key in keys}


@settings(max_examples=examples(200), deadline=None)
@given(
    st.dictionaries(node_ids, sizes, max_size=60),
    st.frozensets(node_ids),
    st.booleans(),
    st.integers(),
)
def test_embedding(
    encoded_bytes: dict[bytes, int],
    coordinates: frozenset[bytes],
    changes_nodes: bool,
    seed: int,
) -> None:
    plan = plan_embedding(encoded_bytes, coordinates, changes_nodes=changes_nodes)
    placed = [*plan.embedded, *(node for group in plan.manifests for node in group)]
    assert sorted(placed) == sorted(encoded_bytes)
    assert all(plan.manifests)
    assert sum(encoded_bytes[node] for node in plan.embedded) <= EMBED_BYTES
    for group in plan.manifests:
        assert len(group) == 1 or sum(encoded_bytes[node] for node in group) <= 1 << 20
    other = shuffled(encoded_bytes, seed)
    assert plan_embedding(other, coordinates, changes_nodes=changes_nodes) == plan


def test_small_tables_are_embedded_first() -> None:
    plan = plan_embedding({b"small": 100, b"medium": 8_000, b"large": 8_193, b"huge": 10**7})
    assert plan.embedded == (b"small", b"medium")
    assert plan.manifests == ((b"huge",), (b"large",))


@pytest.mark.parametrize("opening", [{"coordinates": {b"\1"}}, {"changes_nodes": True}])
def test_what_opening_reads_embeds_all_if_that_is_little(opening: dict[str, Any]) -> None:
    tables = {bytes([i]): 2_048 for i in range(9)}
    assert len(plan_embedding(tables).embedded) == 9
    assert [len(group) for group in plan_embedding(tables, **opening).manifests] == [
        8 - len(opening.get("coordinates", ()))
    ]
    del tables[b"\0"]
    assert len(plan_embedding(tables, **opening).embedded) == 8


def test_coordinates_are_embedded_first_and_then_a_few_of_the_smallest() -> None:
    data = {bytes([i]): 200 for i in range(200)} | {b"large": 300}
    coordinates = {b"time": 8_000, b"lat": 700, b"long": 8_193}
    plan = plan_embedding(data | coordinates, coordinates)
    assert plan.embedded[:2] == (b"lat", b"time")
    assert set(plan.embedded[2:]) < {*data} - {b"large"}
    assert len(plan.embedded) == 2 + 2_048 // 200
    assert [len(group) for group in plan.manifests] == [202 - 2_048 // 200]
    many = {bytes([0, i]): 8_000 for i in range(9)}
    assert len(plan_embedding(many, many).embedded) == EMBED_BYTES // 8_000
