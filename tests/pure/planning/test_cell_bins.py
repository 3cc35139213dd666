"""Where cells go: every cell in one bin, every chunk whole, and no two cells at one place."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box
from zarr_manifests.planning.scan import Bins, Lookup


@st.composite
def regions(draw: st.DrawFn) -> tuple[Box, tuple[int, ...]]:
    ndim = draw(st.integers(0, 3))
    lo = tuple(draw(st.integers(0, 9)) for _ in range(ndim))
    hi = tuple(at + draw(st.integers(1, 9)) for at in lo)
    return Box(lo, hi), tuple(draw(st.integers(1, 6)) for _ in range(ndim))


@given(regions(), st.integers(1, 200), st.integers(1, 5))
def test_each_cell_has_a_place_of_its_own(
    case: tuple[Box, tuple[int, ...]], cells: int, least: int
) -> None:
    region, unit = case
    bins = Bins.of(region, unit, cells=cells, least=least)
    sides = zip(region.lo, region.hi, strict=True)
    every = np.array(list(itertools.product(*(range(*side) for side in sides))), np.int64)
    every = every.reshape(region.size, len(unit))
    keys = bins.keys(list(every.T), len(every))
    assert len(set(keys.tolist())) == len(every)
    numbers, offsets = bins.parted(keys)
    assert (np.diff(np.sort(keys) >> bins.bits) >= 0).all()
    held: dict[tuple[int, ...], set[int]] = {}
    for cell, number, offset in zip(
        every.tolist(), numbers.tolist(), offsets.tolist(), strict=True
    ):
        assert bins.cell(number, offset) == tuple(cell)
        assert tuple(cell) in bins.box(number)
        assert offset < math.prod(bins.shape)
        chunk = tuple(at // length for at, length in zip(cell, unit, strict=True))
        held.setdefault(chunk, set()).add(number)
    assert all(len(found) == 1 for found in held.values())
    assert len(bins) >= min(least, len(held))
    for number in set(numbers.tolist()):
        chunks = [chunk for chunk, found in held.items() if found == {number}]
        assert bins.box(number).size <= cells or len(chunks) == 1


@given(
    st.lists(st.floats(allow_nan=True), unique=True, max_size=20)
    | st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=20)
    | st.builds(
        lambda n, lo, by: [lo + i * by for i in range(n)],
        st.integers(0, 9),
        st.integers(-99, 99),
        st.integers(1, 999),
    ),
    st.data(),
)
def test_labels_are_found_where_they_are(labels: list[float], data: st.DataObject) -> None:
    """Even or not, sorted or not, close to the ends of their type or not."""
    kind = np.float64 if any(isinstance(one, float) for one in labels) else np.int64
    labels = data.draw(st.permutations(labels))
    asked = data.draw(st.lists(st.sampled_from(labels) if labels else st.just(0), max_size=9))
    other = st.floats() if kind is np.float64 else st.integers(-(2**63), 2**63 - 1)
    asked += data.draw(st.lists(other, max_size=5))
    given_labels, values = np.array(labels, kind), np.array(asked, kind)
    found = Lookup.of("x", given_labels).find(values)
    expected = [
        next((at for at, one in enumerate(given_labels) if one == value), -1) for value in values
    ]
    assert found.tolist() == expected


@given(
    st.lists(st.floats(-1e6, 1e6), unique=True, min_size=1, max_size=20),
    st.lists(st.floats(-1e6, 1e6), max_size=20),
    st.floats(0, 1e3),
)
def test_a_tolerance_finds_the_nearest(
    labels: list[float], asked: list[float], within: float
) -> None:
    given_labels, values = np.array(labels), np.array(asked)
    for value, at in zip(values, Lookup.of("x", given_labels, within).find(values), strict=True):
        distances = np.abs(given_labels - value)
        assert (at == -1) == (distances.min() > within)
        if at >= 0:
            assert distances[at] <= within
            assert distances[at] == pytest.approx(distances.min(), abs=1e-9)


def test_a_label_twice_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"2\.0 occurs twice along 'x'"):
        Lookup.of("x", np.array([2.0, 1.0, 2.0]))
