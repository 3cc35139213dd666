"""Which labels of an append are there already, and where each row goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.xarray.appended_rows import AppendPlan, plan_append


def plan(there: list[int], given: list[int], on_existing: Any) -> AppendPlan:
    return plan_append("time", np.array(there), np.array(given), on_existing)


def test_a_label_that_is_there_twice_cannot_be_replaced() -> None:
    with pytest.raises(InvalidArgumentError, match=r"2 of 'time' is there more than once.*region"):
        plan([1, 2, 2], [2, 3], "replace")
    assert plan([1, 2, 2], [1, 3], "replace") == AppendPlan(3, (1,), ((0, (0,)),))
    assert plan([1, 2, 2], [2, 3], "skip").appended == (1,)


def test_labels_that_cannot_be_compared() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be compared"):
        plan_append("x", np.array(["a"], object), np.array([1], object), "skip")
