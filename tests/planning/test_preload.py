"""What is fetched ahead: few and small manifests of the arrays that matter, and why not others."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.config.manifest_sets import Preload
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.grid import Box
from zarr_manifests.planning.layout.leaves import ArrayFacts, BaseIndex
from zarr_manifests.planning.layout.preload_plan import plan_preload

LAT, TIME, AIR = b"l" * 12, b"t" * 12, b"a" * 12
ARRAYS = [
    ArrayFacts(LAT, "/g/lat", (10,), 10, ("lat",)),
    ArrayFacts(TIME, "/g/time", (10,), 10, ("time",)),
    ArrayFacts(AIR, "/g/air", (10, 10), 100, ("time", "lat")),
]


def blob(number: int, length: int = 100, kind: str = "manifests") -> BlobRef:
    return BlobRef(f"{kind}/{1:012d}-{'ab' * 12}/{number}", length, 0)


def part(node_id: bytes, refs: int) -> Part:
    return Part(node_id, Box((0,), (refs,)), refs)


def manifest(number: int, *parts: Part, length: int = 100) -> ManifestRef:
    return ManifestRef(blob(number, length), parts)


def numbers(keys: tuple[str, ...]) -> list[int]:
    return [int(key.rpartition("/")[2]) for key in keys]


def test_coordinates_by_default_smallest_first() -> None:
    base = BaseIndex(
        [
            manifest(1, part(LAT, 30)),
            manifest(2, part(AIR, 1)),
            manifest(3, part(TIME, 5), part(AIR, 20)),
            manifest(4, part(TIME, 30), length=99),
        ]
    )
    plan = plan_preload(Preload(), ARRAYS, base)
    assert numbers(plan.keys) == [3, 4, 1]
    assert [(c.refs, c.is_delta) for c in plan.fetched] == [(25, False), (30, False), (30, False)]
    assert plan.skipped == ()


def test_arrays_are_named_by_path() -> None:
    base = BaseIndex([manifest(1, part(LAT, 3)), manifest(2, part(AIR, 9))])
    assert numbers(plan_preload(Preload(arrays=(".*/air",)), ARRAYS, base).keys) == [2]
    assert numbers(plan_preload(Preload(arrays=("/g",)), ARRAYS, base).keys) == []
    assert numbers(plan_preload(Preload(arrays=()), ARRAYS, base).keys) == []


def test_what_is_skipped_says_why() -> None:
    base = BaseIndex(
        [
            manifest(1, part(LAT, 51)),
            manifest(2, part(TIME, 50)),
            manifest(3, part(LAT, 20)),
            manifest(4, part(TIME, 30)),
            ManifestRef(dataclasses.replace(blob(5), copy=b"x" * 100), (part(LAT, 1),)),
        ]
    )
    plan = plan_preload(Preload(max_manifest_size=50, max_manifests=2), ARRAYS, base)
    assert numbers(plan.keys) == [3, 4]
    assert [(numbers((s.candidate.blob.key,))[0], s.why) for s in plan.skipped] == [
        (5, "it is here already"),
        (2, "smaller ones have reached max-manifests, 2"),
        (1, "its 51 chunk refs are more than max-manifest-size, 50"),
    ]
    assert plan_preload(Preload(max_manifests=0), ARRAYS, base).keys == ()


def test_deltas_that_speak_of_the_arrays_are_fetched_too() -> None:
    base = BaseIndex([manifest(1, part(LAT, 30))])
    deltas = [
        DeltaEntry(blob(1, kind="deltas"), 1, 1, False, (part(LAT, 2), part(AIR, 3)), ()),
        DeltaEntry(
            blob(2, kind="deltas"), 2, 2, False, (part(AIR, 1),), (manifest(8, part(TIME, 4)),)
        ),
        DeltaEntry(blob(3, kind="deltas"), 3, 3, True, (), (manifest(9, part(AIR, 4)),)),
    ]
    plan = plan_preload(Preload(), ARRAYS, base, deltas)
    assert plan.keys == (deltas[1].manifests[0].blob.key, deltas[0].log.key, base.key(0))
    assert [c.is_delta for c in plan.fetched] == [True, True, False]


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.lists(
            st.builds(part, st.sampled_from([LAT, TIME, AIR]), st.integers(1, 60)), max_size=3
        ),
        max_size=8,
    ),
    st.integers(0, 80),
    st.integers(0, 5),
    st.randoms(),
)
def test_every_candidate_is_chosen_or_skipped(
    parts: list[list[Part]], size: int, most: int, chance: random.Random
) -> None:
    refs = [manifest(i, *some) for i, some in enumerate(parts)]
    preload = Preload(max_manifest_size=size, max_manifests=most)
    plan = plan_preload(preload, ARRAYS, BaseIndex(refs))
    wanted = {
        i: sum(p.count for p in some)
        for i, some in enumerate(parts)
        if any(p.node_id != AIR for p in some)
    }
    within = sorted((n, i) for i, n in wanted.items() if n <= size)
    assert [(c.refs, i) for c, i in zip(plan.fetched, numbers(plan.keys), strict=True)] == within[
        :most
    ]
    if most:
        keys = [s.candidate.blob.key for s in plan.skipped]
        assert sorted([*numbers(plan.keys), *numbers(tuple(keys))]) == sorted(wanted)
    chance.shuffle(refs)
    arrays = list(ARRAYS)
    chance.shuffle(arrays)
    assert plan_preload(preload, arrays, BaseIndex(refs)) == plan
