"""Which labels of an append are there already, and where each row goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.conflict.appends import (
    AppendPlan,
    Run,
    aligned_blocks,
    plan_append,
)


def plan(there: list[int], given: list[int], on_existing: Any) -> AppendPlan:
    return plan_append("time", np.array(there), np.array(given), on_existing)


def test_a_label_that_is_there_twice_cannot_be_replaced() -> None:
    with pytest.raises(InvalidArgumentError, match=r"2 of 'time' is there more than once.*region"):
        plan([1, 2, 2], [2, 3], "replace")
    assert plan([1, 2, 2], [1, 3], "replace") == AppendPlan(3, (1,), (Run((0,), 0),))
    assert plan([1, 2, 2], [2, 3], "skip").appended == (1,)


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 20), st.integers(1, 7))
def test_blocks_end_where_chunks_end(blocks: list[int], start: int, chunk: int) -> None:
    found = aligned_blocks(blocks, start, chunk)
    assert sum(found) == sum(blocks)
    ends = start + np.cumsum(found)[:-1]
    assert (ends % chunk == 0).all()
    assert max(found) <= max([*blocks, chunk])
    assert min(found) > 0 or not blocks


def test_labels_that_cannot_be_compared() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be compared"):
        plan_append("x", np.array(["a"], object), np.array([1], object), "skip")
