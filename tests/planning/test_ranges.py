"""Byte ranges of one object, brought together to requests."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.tables import byte_ranges
from zarr_manifests.planning.tables.byte_ranges import RangeRequest, coalesce

_RANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=40)


def _requests(ranges: list[tuple[int, int]], gap_bytes: int, span_bytes: int) -> list[RangeRequest]:
    offsets, lengths = [start for start, _ in ranges], [length for _, length in ranges]
    return coalesce(offsets, lengths, gap_bytes=gap_bytes, span_bytes=span_bytes)


def test_neighbours_are_one_request() -> None:
    assert _requests([(20, 10), (0, 10), (10, 10)], 0, 100) == [RangeRequest(0, 30, (1, 2, 0))]


def test_a_gap_is_bridged_up_to_its_bound_and_no_further() -> None:
    assert _requests([(0, 10), (15, 10)], 5, 100) == [RangeRequest(0, 25, (0, 1))]
    assert _requests([(0, 10), (16, 10)], 5, 100) == [
        RangeRequest(0, 10, (0,)),
        RangeRequest(16, 10, (1,)),
    ]


def test_few_bytes_of_all_requests_lie_in_gaps() -> None:
    """The smallest gaps are bridged."""

    def members(spare: float | None, *gaps: int) -> list[tuple[int, ...]]:
        offsets = [0]
        for gap in gaps:
            offsets.append(offsets[-1] + 100_000 + gap)
        bounds = {"gap_bytes": 50_000, "span_bytes": 9_000_000, "spare": spare}
        return [one.members for one in coalesce(offsets, [100_000] * len(offsets), **bounds)]

    assert members(0.15, 40_000, 20_000, 30_000) == [(0,), (1, 2, 3)]
    assert members(0.1, 40_000, 20_000, 30_000) == [(0,), (1, 2), (3,)]
    assert members(0.15, 20_000, 20_000, 20_000, 20_000) == [(0, 1, 2, 3), (4,)]
    assert members(9, 51_000, 40_000) == [(0,), (1, 2)]
    assert members(None, 50_000, 50_000, 50_000) == [(0, 1, 2, 3)]
    # However little is wanted.
    assert members(0, 1025, 0, 1024) == [(0,), (1, 2, 3)]


def test_a_request_is_no_longer_than_its_span() -> None:
    found = _requests([(10 * i, 10) for i in range(10)], 0, 40)
    assert [(one.start, one.length) for one in found] == [(0, 40), (40, 40), (80, 20)]


def test_what_is_longer_than_a_span_goes_alone() -> None:
    found = _requests([(0, 10), (10, 500), (510, 10)], 0, 100)
    assert [one.members for one in found] == [(0,), (1,), (2,)]


def test_the_same_range_is_fetched_once() -> None:
    assert _requests([(7, 10)] * 3, 0, 0) == [RangeRequest(7, 10, (0, 1, 2))]


def test_no_ranges_need_no_request() -> None:
    assert _requests([], 0, 0) == []


@pytest.mark.parametrize("bounds", [(-1, 0), (0, -1)])
def test_negative_bounds_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="0 or more"):
        _requests([(0, 1)], *bounds)


def test_every_offset_needs_a_length() -> None:
    with pytest.raises(InvalidArgumentError, match="2 offsets and 1 lengths"):
        coalesce([0, 1], [1], gap_bytes=0, span_bytes=0)


@pytest.mark.parametrize("free_bytes", [0, 10])
@given(_RANGES, st.integers(0, 30), st.integers(0, 150), st.none() | st.floats(0, 2))
def test_any_ranges(
    free_bytes: int,
    ranges: list[tuple[int, int]],
    gap_bytes: int,
    span_bytes: int,
    spare: float | None,
) -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(byte_ranges, "_FREE_BYTES", free_bytes)
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
