"""Boxes of chunk coordinates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box


@st.composite
def boxes(draw: st.DrawFn, ndim: int | None = None) -> Box:
    n = draw(st.integers(0, 4)) if ndim is None else ndim
    lo = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    return Box(tuple(lo), tuple(x + draw(st.integers(0, 4)) for x in lo))


def all_coords(box: Box) -> list[tuple[int, ...]]:
    axes = (range(a, b) for a, b in zip(box.lo, box.hi, strict=True))
    return list(itertools.product(*axes))


@settings(max_examples=examples(200))
@given(boxes())
def test_coordinates_and_linear_indexes(box: Box) -> None:
    coords = all_coords(box)
    assert box.size == len(coords)
    assert [box.ravel_one(c) for c in coords] == list(range(len(coords)))
    array = np.array(coords, np.int64).reshape(len(coords), box.ndim)
    np.testing.assert_array_equal(box.ravel(array), np.arange(len(coords)))
    np.testing.assert_array_equal(box.unravel(np.arange(len(coords))), array)
    assert all(c in box for c in coords)


@settings(max_examples=examples(200))
@given(st.data())
def test_containment_and_overlap(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 4))
    one, two = data.draw(boxes(ndim)), data.draw(boxes(ndim))
    shared = set(all_coords(one)) & set(all_coords(two))
    index = np.array([one.ravel_one(coords) for coords in shared], np.int64)
    assert one.carried(index, two).tolist() == [two.ravel_one(coords) for coords in shared]
    assert one.overlaps(two) == bool(shared)
    assert two.overlaps(one) == bool(shared)
    probe = data.draw(st.lists(st.integers(-1, 10), min_size=ndim, max_size=ndim).map(tuple))
    assert (probe in one) == (probe in set(all_coords(one)))
    around = Box.around([one, two])
    assert set(all_coords(one)) | set(all_coords(two)) <= set(all_coords(around))
    if one.size:
        coords = np.array(all_coords(one), np.int64).reshape(one.size, ndim)
        assert (Box.around_coords(coords) == one) or not ndim


def test_a_box_with_more_chunks_than_can_be_numbered_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="exceeds"):
        Box((0, 0), (2**31, 2**31))


def test_boxes_of_different_ndim_share_nothing() -> None:
    assert not Box((0,), (5,)).overlaps(Box((0, 0), (5, 5)))
    assert (1, 1) not in Box((0,), (5,))
    with pytest.raises(InvalidArgumentError, match="axes"):
        Box.around([Box((0,), (5,)), Box((0, 0), (5, 5))])
