"""Regions of an array that hold few refs each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.grid import Box
from zarr_manifests.planning.layout.batches import batches
from zarr_manifests.planning.layout.splitting import ENDLESS

SIDE = 12


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    sides = [sorted(draw(st.sets(st.integers(0, SIDE), min_size=2, max_size=2))) for _ in range(3)]
    lo, hi = zip(*sides, strict=True)
    return Box(lo, hi)


def coords_of(box: Box) -> list[tuple[int, ...]]:
    return [tuple(at) for at in box.unravel(np.arange(box.size)).tolist()]


@given(
    st.lists(boxes(), max_size=5),
    st.integers(1, 300),
    st.tuples(*[st.sampled_from([1, 2, 5, ENDLESS])] * 3),
)
def test_regions_are_disjoint_and_cover_all_tables(
    tables: list[Box], most: int, cell: tuple[int, ...]
) -> None:
    regions = list(batches([(box, box.size) for box in tables], most, cell))
    found = [at for region in regions for at in coords_of(region)]
    assert len(found) == len(set(found))
    assert set(found) >= {at for box in tables for at in coords_of(box)}
    for region in regions:
        rows = sum(box.shared_size(region) for box in tables)
        cells = {tuple(a // n for a, n in zip(at, cell, strict=True)) for at in coords_of(region)}
        assert 0 < rows
        assert rows <= most or len(cells) == 1
    owners = {}
    for i, region in enumerate(regions):
        for at in coords_of(region):
            one = tuple(a // n for a, n in zip(at, cell, strict=True))
            assert owners.setdefault(one, i) == i, "a cell is never cut"


@given(st.lists(boxes(), max_size=5), st.integers(1, 300))
def test_regions_follow_each_other_in_c_order(tables: list[Box], most: int) -> None:
    found = [at for r in batches([(box, box.size) for box in tables], most) for at in coords_of(r)]
    assert found == sorted(found)


@pytest.mark.parametrize("box", [Box((), ()), Box((5,), (6,)), Box((0, 2**40), (1, 2**41))])
def test_a_region_that_holds_few_rows_is_not_cut(box: Box) -> None:
    assert list(batches([(box, 3)], 3)) == [box]
