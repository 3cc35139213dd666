"""Byte ranges of one object, brought together to requests."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.storage import protocol
from zarr_manifests.storage.protocol import coalesce

RANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=40)


@pytest.mark.parametrize("free_bytes", [0, 10])
@given(RANGES, st.integers(0, 30), st.integers(0, 150), st.none() | st.floats(0, 2))
def test_any_ranges(
    free_bytes: int,
    ranges: list[tuple[int, int]],
    gap_bytes: int,
    span_bytes: int,
    spare: float | None,
) -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(protocol, "_FREE_BYTES", free_bytes)
        requests = coalesce(
            [start for start, _ in ranges],
            [length for _, length in ranges],
            gap_bytes=gap_bytes,
            span_bytes=span_bytes,
            spare=spare,
        )
    assert sorted(member for one in requests for member in one.members) == list(range(len(ranges)))
    all_in_vain = 0
    for one in requests:
        held = [ranges[member] for member in one.members]
        ends = [start + length for start, length in held]
        assert one.start == min(start for start, _ in held)
        assert one.start + one.length == max(ends)
        assert one.length <= span_bytes or all(end <= ends[0] for end in ends)
        reach, in_vain = ends[0], 0
        for (start, _), end in zip(held, ends, strict=True):
            assert start - reach <= gap_bytes
            in_vain += max(start - reach, 0)
            reach = max(reach, end)
        all_in_vain += in_vain
    if spare is not None:
        wanted = len({at for start, length in ranges for at in range(start, start + length)})
        assert all_in_vain <= max(spare * wanted, free_bytes)
    for one, other in pairwise(requests):  # none could have gone along with those before it
        start, length = ranges[other.members[0]]
        assert one.start <= other.start
        too_far = start - (one.start + one.length) > gap_bytes
        assert too_far or start + length - one.start > span_bytes or spare is not None
