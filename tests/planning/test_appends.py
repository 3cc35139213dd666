"""Which labels of an append are there already, and where each row goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError
from zarr_manifests.planning.conflict.append_labels import (
    AppendPlan,
    Run,
    aligned_blocks,
    plan_append,
)

NAN = float("nan")


def plan(there: Any, given: Any, on_existing: Any = "error", **how: Any) -> AppendPlan:
    dtype = np.asarray([*there, *given]).dtype if len(there) + len(given) else None
    return plan_append(
        "time", np.asarray(there, dtype), np.asarray(given, dtype), on_existing, **how
    )


def test_what_is_not_there_is_appended() -> None:
    assert plan([1, 2], [3, 4]) == AppendPlan(2, (0, 1))
    assert plan([], [3, 4]) == AppendPlan(0, (0, 1))
    assert plan([1, 2], []) == AppendPlan(2, ())


def test_what_is_there() -> None:
    with pytest.raises(AlreadyExistsError, match=r"2, 1 of 'time' are there already.*on_existing"):
        plan([1, 2], [2, 1, 3])
    with pytest.raises(AlreadyExistsError, match="1, 2, 3, 4, 5 and 2 more of 'time' are there"):
        plan(range(1, 8), range(1, 9))
    assert plan([1, 2], [2, 1, 3], "skip") == AppendPlan(2, (2,))
    # Two runs: a row for 1 and 2, which lie side by side, and one for 4.
    found = plan([1, 2, 3, 4], [2, 4, 5, 1], "replace")
    assert found == AppendPlan(4, (2,), (Run((3, 0), 0), Run((1,), 3)))


@pytest.mark.parametrize("on_existing", ["error", "skip", "replace"])
@pytest.mark.parametrize("keep", [True, False])
def test_a_label_comes_once_in_a_call(on_existing: Any, keep: bool) -> None:
    with pytest.raises(InvalidArgumentError, match="3, 4 of 'time' are in the dataset more than"):
        plan([1, 2], [3, 4, 4, 3, 5], on_existing, keep_order=keep)
    with pytest.raises(InvalidArgumentError, match="nan of 'time' is"):
        plan([1.0], [NAN, NAN], on_existing, keep_order=keep)


@pytest.mark.parametrize(
    ("there", "given"),
    [
        ([1, 2], [3]),
        ([2, 1], [0, -1]),  # goes on as it has begun
        ([5], [6, 7]),
        ([5], [4, 3]),  # two that descend say so
        ([], [2, 1]),
        ([1, 1, 2], [3]),  # what was written long ago may be there twice
        ([5, 5], [4, 3]),
        (["a", "b"], ["c"]),
    ],
)
def test_sorted(there: Any, given: Any) -> None:
    assert plan(there, given).appended == tuple(range(len(given)))


@pytest.mark.parametrize(
    ("there", "given", "match"),
    [
        ([1, 3], [2], "'time' would not be sorted any more: 2 after 3"),
        ([3, 1], [2], "would not be sorted any more: 2 after 1"),
        # One label says nothing of a direction; who appends a day before the first one errs.
        ([5], [4], "would not be sorted any more: 4 after 5"),
        ([5], [4, 6], "would not be sorted any more: 4 after 5"),
        ([1, 2], [4, 3], r"the dataset is not sorted along 'time' \(3 after 4\).*sortby"),
        ([], [1, 3, 2], "the dataset is not sorted"),
        ([1, 3, 2], [4], r"'time' is not sorted already \(2 after 3\)"),
    ],
)
def test_unsorted(there: Any, given: Any, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        plan(there, given)
    assert plan(there, given, keep_order=True).appended == tuple(range(len(given)))


def test_only_what_is_appended_has_to_be_sorted() -> None:
    assert plan([1, 2, 3], [3, 1, 4], "skip").appended == (2,)
    assert plan([3, 1, 2], [2, 3], "skip").appended == ()
    assert plan([3, 1, 2], [2, 3], "replace").replaced == (Run((1,), 0), Run((0,), 2))


def test_a_label_that_is_there_twice_cannot_be_replaced() -> None:
    with pytest.raises(InvalidArgumentError, match=r"2 of 'time' is there more than once.*region"):
        plan([1, 2, 2], [2, 3], "replace")
    assert plan([1, 2, 2], [1, 3], "replace") == AppendPlan(3, (1,), (Run((0,), 0),))
    assert plan([1, 2, 2], [2, 3], "skip").appended == (1,)


def test_missing_labels_are_one_label() -> None:
    assert plan([1.0, NAN], [NAN], "skip").appended == ()
    with pytest.raises(AlreadyExistsError, match="nan"):
        plan([1.0, NAN], [NAN])


def test_times_are_shown_without_noughts() -> None:
    days = np.array(["2024-01-01", "2024-01-02T06"], "M8[ns]")
    with pytest.raises(AlreadyExistsError, match=r"^2024-01-01, 2024-01-02T06:00 of 'time'"):
        plan(days, days)


def test_labels_that_cannot_be_compared() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be compared"):
        plan_append("x", np.array(["a"], object), np.array([1], object), "skip")


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 20), st.integers(1, 7))
def test_blocks_end_where_chunks_end(blocks: list[int], start: int, chunk: int) -> None:
    found = aligned_blocks(blocks, start, chunk)
    assert sum(found) == sum(blocks)
    ends = start + np.cumsum(found)[:-1]
    assert (ends % chunk == 0).all()
    assert max(found) <= max([*blocks, chunk])
    assert min(found) > 0 or not blocks
