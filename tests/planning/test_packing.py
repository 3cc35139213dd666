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
@given(st.dictionaries(node_ids, sizes, max_size=60), st.integers())
def test_embedding(encoded_bytes: dict[bytes, int], seed: int) -> None:
    plan = plan_embedding(encoded_bytes)
    placed = [*plan.embedded, *(node for group in plan.manifests for node in group)]
    assert sorted(placed) == sorted(encoded_bytes)
    assert all(plan.manifests)
    assert sum(encoded_bytes[node] for node in plan.embedded) <= EMBED_BYTES
    for group in plan.manifests:
        assert len(group) == 1 or sum(encoded_bytes[node] for node in group) <= 1 << 20
    assert plan_embedding(shuffled(encoded_bytes, seed)) == plan


def test_small_tables_are_embedded_first() -> None:
    plan = plan_embedding({b"small": 100, b"medium": 8_000, b"large": 8_193, b"huge": 10**7})
    assert plan.embedded == (b"small", b"medium")
    assert plan.manifests == ((b"huge",), (b"large",))
