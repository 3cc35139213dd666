"""Regions of an array, however they are said, as boxes of chunks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.grid import Box, grid_shape
from zarr_manifests.planning.regions import cells_box, chunk_box

GRID = Box((0, 0), (4, 9))
_END = st.none() | st.integers(-25, 25)


@pytest.mark.parametrize(
    ("region", "lo", "hi"),
    [
        (None, (0, 0), (4, 9)),
        ([slice(None), slice(2, 5)], (0, 2), (4, 5)),
        ([(1, 2), (None, None)], (1, 0), (2, 9)),
        ([slice(-1, None), (3, 100)], (3, 3), (4, 9)),
        (Box((1, 1), (2, 20)), (1, 1), (2, 9)),
        ([slice(3, 1), slice(0, 1, 1)], (3, 0), (3, 1)),
    ],
)
def test_what_bounds_select(region: Any, lo: tuple[int, ...], hi: tuple[int, ...]) -> None:
    assert chunk_box(GRID, region) == Box(lo, hi)


@given(st.integers(0, 20), st.integers(1, 7), _END, _END)
def test_the_chunks_of_cells(length: int, chunk: int, start: int | None, stop: int | None) -> None:
    box = cells_box((length,), (chunk,), [(start, stop)])
    held = {cell // chunk for cell in range(length)[start:stop]}
    assert set(range(box.lo[0], box.hi[0])) == held
    assert not held or box.hi[0] <= grid_shape((length,), (chunk,))[0]
