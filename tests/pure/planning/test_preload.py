"""What is fetched ahead: few and small manifests of the arrays that matter."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.config.manifest_sets import Preload
from zarr_manifests.engine.read_ahead import plan_preload
from zarr_manifests.format.manifest import Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.grid import Box

LAT, TIME, AIR = b"l" * 12, b"t" * 12, b"a" * 12


def part(node_id: bytes, refs: int) -> Part:
    return Part(node_id, Box((0,), (refs,)), refs)


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
def test_the_smallest_candidates_are_chosen(parts: list[list[Part]], size: int, most: int) -> None:
    blobs = [BlobRef(f"manifests/{1:012d}-{'ab' * 12}/{i}", 100, 0) for i in range(len(parts))]
    preload = Preload(max_manifest_size=size, max_manifests=most)
    wanted = [
        (sum(p.count for p in some), i)
        for i, some in enumerate(parts)
        if any(p.node_id != AIR for p in some)
    ]
    within = sorted(one for one in wanted if one[0] <= size)[:most]
    found = plan_preload(preload, {LAT, TIME}, zip(blobs, parts, strict=True))
    assert found == [blobs[i] for _, i in within]
