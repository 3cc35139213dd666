"""Bins: within their capacity, few, and everything once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.layout.bins import pack, pack_into, pair

CAPACITY = 20
sizes = st.lists(st.integers(1, CAPACITY), max_size=40)


def fewest_bins(sizes: list[int], capacity: int) -> int:
    """By trying everything: each size into any bin that has room, or into a new one."""
    best = len(sizes)
    ordered = sorted(sizes, reverse=True)

    def place(position: int, rooms: tuple[int, ...]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if position == len(ordered):
            best = len(rooms)
            return
        for room in set(rooms):
            if room >= ordered[position]:
                rest = list(rooms)
                rest[rest.index(room)] -= ordered[position]
                place(position + 1, tuple(sorted(rest)))
        place(position + 1, tuple(sorted((*rooms, capacity - ordered[position]))))

    place(0, ())
    return best


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.integers(1, CAPACITY), max_size=9))
def test_bins_are_few(some: list[int]) -> None:
    bins = pack(some, CAPACITY)
    fewest = fewest_bins(some, CAPACITY)
    assert fewest <= len(bins) <= math.floor(11 / 9 * fewest + 1)


def test_the_brute_force_finds_what_first_fit_decreasing_misses() -> None:
    some = [9, 8, 6, 6, 6, 5]  # 9 + 8 leaves 3 over; 9 + 6 + 5 and 8 + 6 + 6 are full
    assert fewest_bins(some, CAPACITY) == 2
    assert len(pack(some, CAPACITY)) == 3
    assert fewest_bins([], CAPACITY) == 0


@settings(max_examples=examples(150), deadline=None)
@given(sizes)
def test_everything_is_packed_once_within_the_capacity(some: list[int]) -> None:
    bins = pack(some, CAPACITY)
    assert sorted(i for members in bins for i in members) == list(range(len(some)))
    assert all(sum(some[i] for i in members) <= CAPACITY for members in bins)
    # Whatever opened a bin fitted into none before it.
    rooms = [CAPACITY - sum(some[i] for i in members) for members in bins]
    for later in range(1, len(bins)):
        assert all(some[bins[later][0]] > room for room in rooms[:later])


def test_no_capacity_is_one_bin_and_nothing_is_none() -> None:
    assert pack([5, 9, 1], None) == [[0, 1, 2]]
    assert pack([], None) == pack([], 3) == []


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="21"):
        pack([3, 21], CAPACITY)


@settings(max_examples=examples(150), deadline=None)
@given(sizes, st.integers(0, 4))
def test_with_few_bins_the_biggest_are_left_out(some: list[int], most: int) -> None:
    bins = pack_into(some, CAPACITY, most)
    placed = {i for members in bins for i in members}
    assert len(placed) == sum(map(len, bins))
    assert len(bins) <= most
    assert all(sum(some[i] for i in members) <= CAPACITY for members in bins)
    left = set(range(len(some))) - placed
    assert all((some[i], i) < (some[j], j) for i in placed for j in left)
    if len(pack(some, CAPACITY)) <= most:
        assert not left
    if most and left:
        # What is left out is not for want of trying: the smallest of it would not fit in any bin.
        smallest = min(left, key=lambda i: (some[i], i))
        more = sorted({*placed, smallest})
        assert len(pack([some[i] for i in more], CAPACITY)) > most


@settings(max_examples=examples(150), deadline=None)
@given(sizes, st.integers(1, 7))
def test_pairs(some: list[int], members: int) -> None:
    groups = pair(some, members)
    assert sorted(i for group in groups for i in group) == list(range(len(some)))
    assert all(len(group) == members for group in groups[:-1])
    assert len(groups) == -(-len(some) // members)
    if members == 2 and groups:
        assert some[groups[0][0]] == max(some)
        assert len(groups[0]) == 1 or some[groups[0][1]] == min(some)


def test_pairs_come_out_alike() -> None:
    some = [100, 90, 80, 70, 40, 30, 20, 10]
    assert [sum(some[i] for i in group) for group in pair(some, 2)] == [110, 110, 110, 110]
    assert pair(some, 4) == [[0, 1, 7, 6], [2, 3, 5, 4]]
    assert pair(some, 3) == [[0, 1, 7], [2, 3, 6], [4, 5]]
