"""What is fetched ahead: few and small manifests of the arrays that matter, and why not others."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.config.manifest_sets import Preload
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.grid import Box
from zarr_manifests.planning.at_open import plan_preload
from zarr_manifests.planning.layout.leaves import ArrayFacts, BaseIndex

LAT, TIME, AIR = b"l" * 12, b"t" * 12, b"a" * 12
ARRAYS = [
    ArrayFacts(LAT, "/g/lat", (10,), 10, ("lat",)),
    ArrayFacts(TIME, "/g/time", (10,), 10, ("time",)),
    ArrayFacts(AIR, "/g/air", (10, 10), 100, ("time", "lat")),
]


def part(node_id: bytes, refs: int) -> Part:
    return Part(node_id, Box((0,), (refs,)), refs)


def manifest(number: int, *parts: Part) -> ManifestRef:
    return ManifestRef(BlobRef(f"manifests/{1:012d}-{'ab' * 12}/{number}", 100, 0), parts)


def numbers(keys: Iterable[str]) -> list[int]:
    return [int(key.rpartition("/")[2]) for key in keys]


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.lists(
            st.builds(part, st.sampled_from([LAT, TIME, AIR]), st.integers(1, 60)), max_size=3
        ),
        max_size=8,
    ),
    st.integers(0, 80),
    st.integers(0, 5),
)
def test_every_candidate_is_chosen_or_skipped(
    parts: list[list[Part]], size: int, most: int
) -> None:
    refs = [manifest(i, *some) for i, some in enumerate(parts)]
    preload = Preload(max_manifest_size=size, max_manifests=most)
    fetched, left = plan_preload(preload, ARRAYS, BaseIndex(refs))
    chosen = numbers(candidate.blob.key for candidate in fetched)
    wanted = {
        i: sum(p.count for p in some)
        for i, some in enumerate(parts)
        if any(p.node_id != AIR for p in some)
    }
    within = sorted((n, i) for i, n in wanted.items() if n <= size)
    assert [(c.refs, i) for c, i in zip(fetched, chosen, strict=True)] == within[:most]
    if most:
        skipped = numbers(candidate.blob.key for candidate, _ in left)
        assert sorted([*chosen, *skipped]) == sorted(wanted)
