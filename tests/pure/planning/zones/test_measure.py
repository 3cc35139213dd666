"""Bounds, counts and sums of chunks, against loops over chunks and cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from effort import examples
from zarr_manifests.format.zone_maps import NO_SUM
from zarr_manifests.grid import clipped_cells, grid_shape
from zarr_manifests.planning import measure as module
from zarr_manifests.planning.measure import measure

DTYPES = ("f2", "f4", ">f4", "f8", "i1", ">i2", "i4", "i8", "u1", "u8", "?", "M8[s]", "m8[ns]")
FEW: dict[str, list[Any]] = {
    "f": [0.0, -0.0, 1.5, -2.0, np.nan, np.inf, -np.inf],
    "i": [0, 1, -1, 7, 100],
    "u": [0, 1, 7, 200],
    "b": [False, True],
    "M": ["NaT", "2000-01-01", "1999-12-31"],
    "m": ["NaT", 5, -5],
}


def is_missing(value: Any, marks: Sequence[Any]) -> bool:
    absent = value != value or (
        isinstance(value, np.generic) and value.dtype.kind in "mM" and np.isnat(value)
    )
    return bool(absent) or any(value == mark for mark in marks)


def slowly(values: Any, chunk_shape: Any, marks: Any) -> list[tuple[Any, ...]]:
    rows = []
    for at in itertools.product(*map(range, grid_shape(values.shape, chunk_shape))):
        inside = values[
            tuple(slice(a * n, (a + 1) * n) for a, n in zip(at, chunk_shape, strict=True))
        ]
        cells = list(inside.ravel())
        kept = [value for value in cells if not is_missing(value, marks)]
        nan = sum(values.dtype.kind == "f" and value != value for value in cells)
        rows.append((min(kept, default=None), max(kept, default=None), kept, nan, len(cells)))
    return rows


def is_sum(found: Any, kept: Sequence[Any], dtype: np.dtype[Any]) -> bool:
    """Whether that is the sum of these values, or says that it is not known."""
    if dtype.kind in "fmM":
        numbers = [float(value) for value in kept] if dtype.kind == "f" else [math.nan]
        with np.errstate(all="ignore"):
            exact = float(np.sum(numbers))
            slack = 1e-12 * float(np.sum(np.abs(numbers)))
        return found == exact or math.isnan(exact) or bool(abs(found - exact) <= slack)
    numbers = [int(value) for value in kept]
    if found != NO_SUM:
        return bool(found == sum(numbers))
    return max(map(abs, numbers)) * len(numbers) > 2**61


@st.composite
def blocks(draw: Any) -> tuple[Any, ...]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    ndim = draw(st.integers(0, 3))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=ndim, max_size=ndim)))
    chunks = tuple(draw(st.lists(st.integers(1, 5), min_size=ndim, max_size=ndim)))
    few = st.sampled_from([np.asarray(value, dtype)[()] for value in FEW[dtype.kind]])
    every = few if dtype.kind in "US" else few | hnp.from_dtype(dtype)
    values = draw(hnp.arrays(dtype, shape, elements=every, fill=few))
    if ndim and draw(st.booleans()):
        values = np.asfortranarray(values)
    marks = np.array(draw(st.lists(few, max_size=2)), dtype)
    marks = marks[[not is_missing(mark, []) for mark in marks]] if marks.size else marks
    return values, chunks, marks


@settings(max_examples=examples(300))
@given(
    blocks(),
    st.sampled_from([1, 4, 2**17]),
    st.sampled_from([0, 32]),
)
def test_chunks_are_measured_as_loops_measure_them(
    block: tuple[Any, ...], slab: int, few: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLAB", slab)
        patch.setattr(module, "_FEW", few)
        found = measure(*block)
    columns = (found.missing, found.nan, found.clip)
    assert all(column.dtype == np.int64 and column.ndim == 1 for column in columns)
    cells = clipped_cells(found.clip, block[1])
    dtype = block[0].dtype.newbyteorder("=")
    if dtype.kind == "U":
        dtype = np.dtype(f"S{dtype.itemsize}")
    assert found.low.dtype == found.high.dtype == dtype
    for row, (low, high, kept, nan, size) in enumerate(slowly(*block)):
        assert (cells[row], found.nan[row], found.missing[row]) == (size, nan, size - len(kept))
        assert is_sum(found.sums[row], kept, dtype)
        assert bool(found.bounded[row]) == (low is not None)
        if low is not None:
            if block[0].dtype.kind == "U":
                low, high = low.encode(), high.encode()
            assert (found.low[row], found.high[row]) == (low, high)
    assert len(found.bounded) == len(slowly(*block))
