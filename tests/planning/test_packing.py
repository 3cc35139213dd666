"""Where chunk tables go: everything exactly once, in whatever order it comes."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from zarr_manifests.planning.packing import EMBED_BYTES, plan_embedding

node_ids = st.binary(min_size=1, max_size=3)
sizes = st.one_of(st.integers(0, 60_000), st.integers(0, 2_000_000), st.integers(0, 100))


def shuffled(items: dict[bytes, int], seed: int) -> dict[bytes, int]:
    keys = list(items)
    random.Random(seed).shuffle(keys)
    return {key: items[key] for key in keys}


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(node_ids, sizes, max_size=60), st.frozensets(node_ids), st.integers())
def test_embedding(encoded_bytes: dict[bytes, int], first: frozenset[bytes], seed: int) -> None:
    plan = plan_embedding(encoded_bytes, first)
    placed = [*plan.embedded, *(node for group in plan.manifests for node in group)]
    assert sorted(placed) == sorted(encoded_bytes)
    assert all(plan.manifests)
    assert sum(encoded_bytes[node] for node in plan.embedded) <= EMBED_BYTES
    for group in plan.manifests:
        assert len(group) == 1 or sum(encoded_bytes[node] for node in group) <= 1 << 20
    assert plan_embedding(shuffled(encoded_bytes, seed), first) == plan


def test_what_is_small_and_little_is_embedded_in_whatever_order() -> None:
    sizes = {b"small": 100, b"medium": 8_000, b"large": 8_192}
    assert plan_embedding(sizes).embedded == (b"small", b"medium", b"large")
    assert plan_embedding(sizes, {b"large"}).embedded == (b"large", b"small", b"medium")
    assert not plan_embedding(sizes, {b"large"}).manifests


def test_beside_manifests_only_few_are_embedded_the_smallest_first() -> None:
    plan = plan_embedding({b"small": 100, b"medium": 3_996, b"more": 3_997, b"large": 8_193})
    assert plan.embedded == (b"small", b"medium")
    assert plan.manifests == ((b"large", b"more"),)


def test_beside_manifests_what_opening_needs_is_embedded_as_far_as_it_is_small() -> None:
    data = {bytes([i]): 200 for i in range(200)}
    coordinates = {b"time": 8_000, b"lat": 700, b"long": 8_193}
    plan = plan_embedding(data | coordinates, {*coordinates})
    assert plan.embedded[:2] == (b"lat", b"time")
    assert len(plan.embedded) == 2 + 4_096 // 200
    assert [len(group) for group in plan.manifests] == [201 - 4_096 // 200]
    many = {bytes([0, i]): 8_000 for i in range(9)}
    assert len(plan_embedding(many, many).embedded) == EMBED_BYTES // 8_000
