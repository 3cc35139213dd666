"""When compactions are due, and what minor ones merge."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.planning.upkeep.compaction_triggers import MOST_RUNS, Size, is_due, merge_groups

LIMITS = {"min_delta_count": 10, "max_delta_count": 50, "interval_commits": 100}


def apply(sizes: list[Size], groups: list[tuple[int, int]]) -> list[Size]:
    merged, position = [], 0
    for start, stop in groups:
        merged += sizes[position:start]
        merged.append(Size(sum(size.rows for size in sizes[start:stop]), True))
        position = stop
    return merged + sizes[position:]


def test_thresholds() -> None:
    assert not is_due(9, 100, **LIMITS)
    assert is_due(10, 100, **LIMITS)
    assert not is_due(10, 101, **LIMITS)
    assert is_due(50, 101, **LIMITS)
    assert is_due(51, 102, **LIMITS)


def test_nothing_is_merged_where_there_is_nothing_new() -> None:
    assert merge_groups([], 4) == []
    assert merge_groups([Size(10, True)], 4) == []
    assert merge_groups([Size(10, True)] * MOST_RUNS, 4) == []


def test_what_is_small_is_not_left_behind_what_is_large() -> None:
    sizes = [Size(10, True), Size(1_000_000, False)]
    assert merge_groups(sizes, 4) == [(0, 2)]
    sizes = [Size(1_000_000, True), Size(10, True), Size(10, False)]
    assert merge_groups(sizes, 4) == []


@given(
    st.lists(st.integers(0, 3_000_000).map(lambda n: Size(n, True)), max_size=30),
    st.lists(st.integers(0, 3_000_000).map(lambda n: Size(n, False)), max_size=60),
    st.integers(2, 10),
)
def test_groups_are_neighbours_and_leave_few_runs(
    runs: list[Size], deltas: list[Size], fan_in: int
) -> None:
    sizes = [*runs, *deltas]
    groups = merge_groups(sizes, fan_in)
    assert all(start + 1 < stop for start, stop in groups)
    assert all(a[1] <= b[0] for a, b in pairwise(groups))
    after = apply(sizes, groups)
    assert sum(size.rows for size in after) == sum(size.rows for size in sizes)
    assert len([size for size in after if not size.is_run]) <= 1
    assert len(after) <= max(MOST_RUNS, 1)


def test_ten_thousand_commits_copy_a_row_a_few_times() -> None:
    sizes: list[Size] = []
    copied = most_runs = 0
    for commit in range(10_000):
        sizes.append(Size(100, False))
        if is_due(sum(not size.is_run for size in sizes), commit + 1, **LIMITS):
            groups = merge_groups(sizes, 4)
            copied += sum(sum(size.rows for size in sizes[a:b]) for a, b in groups)
            sizes = apply(sizes, groups)
            most_runs = max(most_runs, sum(size.is_run for size in sizes))
    assert copied <= 6 * 10_000 * 100
    assert most_runs <= 16
