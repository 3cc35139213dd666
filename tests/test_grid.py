"""Boxes of chunk coordinates."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import MAX_BOX_CHUNKS, Box, grid_shape


@st.composite
def boxes(draw: st.DrawFn, ndim: int | None = None) -> Box:
    n = draw(st.integers(0, 4)) if ndim is None else ndim
    lo = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    return Box(tuple(lo), tuple(x + draw(st.integers(0, 4)) for x in lo))


def all_coords(box: Box) -> list[tuple[int, ...]]:
    axes = (range(a, b) for a, b in zip(box.lo, box.hi, strict=True))
    return list(itertools.product(*axes))


def test_grid_shape() -> None:
    assert grid_shape((0, 1, 10, 11), (5, 5, 5, 5)) == (0, 1, 2, 3)
    assert grid_shape((), ()) == ()
    assert grid_shape((0,), (0,)) == (0,)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        grid_shape((1, 2), (1,))


@settings(max_examples=examples(200), deadline=None)
@given(boxes())
def test_coordinates_and_linear_indexes(box: Box) -> None:
    coords = all_coords(box)
    assert box.size == len(coords)
    assert [box.ravel_one(c) for c in coords] == list(range(len(coords)))
    array = np.array(coords, np.int64).reshape(len(coords), box.ndim)
    np.testing.assert_array_equal(box.ravel(array), np.arange(len(coords)))
    np.testing.assert_array_equal(box.unravel(np.arange(len(coords))), array)
    assert all(c in box for c in coords)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_linear_indexes_carried_to_another_box(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 4))
    one, two = data.draw(boxes(ndim)), data.draw(boxes(ndim))
    shared = [coords for coords in all_coords(one) if coords in two]
    index = np.array([one.ravel_one(coords) for coords in shared], np.int64)
    expected = [two.ravel_one(coords) for coords in shared]
    assert one.carried(index, two).tolist() == expected


def test_many_coordinates_and_linear_indexes() -> None:
    box = Box((3, 5, 7), (45, 46, 47))
    coords = box.unravel(np.arange(box.size))
    assert coords[[0, 16_383, 16_384, -1]].tolist() == [
        [3, 5, 7],
        [3 + 9, 5 + 40, 7 + 23],
        [3 + 9, 5 + 40, 7 + 24],
        [44, 45, 46],
    ]
    np.testing.assert_array_equal(box.ravel(coords), np.arange(box.size))


def test_linear_indexes_carried_from_far_outside() -> None:
    one, two = Box((0, 0), (1001, 5)), Box((1000, 0), (1001, 2**61))
    assert one.carried(np.array([5000, 5004]), two).tolist() == [0, 4]
    assert two.carried(np.array([0, 4]), one).tolist() == [5000, 5004]


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_containment_and_overlap(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 3))
    one, two = data.draw(boxes(ndim)), data.draw(boxes(ndim))
    shared = set(all_coords(one)) & set(all_coords(two))
    assert one.overlaps(two) == bool(shared)
    assert two.overlaps(one) == bool(shared)
    probe = data.draw(st.lists(st.integers(-1, 10), min_size=ndim, max_size=ndim).map(tuple))
    assert (probe in one) == (probe in set(all_coords(one)))
    around = Box.around([one, two])
    assert set(all_coords(one)) | set(all_coords(two)) <= set(all_coords(around))
    if one.size:
        coords = np.array(all_coords(one), np.int64).reshape(one.size, ndim)
        assert (Box.around_coords(coords) == one) or not ndim


def test_boxes_of_different_ndim_share_nothing() -> None:
    assert not Box((0,), (5,)).overlaps(Box((0, 0), (5, 5)))
    assert (1, 1) not in Box((0,), (5,))
    with pytest.raises(InvalidArgumentError, match="axes"):
        Box.around([Box((0,), (5,)), Box((0, 0), (5, 5))])


@pytest.mark.parametrize(
    ("lo", "hi"),
    [((1,), (0,)), ((-1,), (0,)), ((0,), (1, 2)), ((0,), (2**62,)), ((0, 0), (2**31, 2**31))],
)
def test_boxes_that_cannot_be(lo: Any, hi: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        Box(lo, hi)


def test_the_largest_box() -> None:
    box = Box((0, 3), (1, 3 + MAX_BOX_CHUNKS - 1))
    last = (0, 3 + MAX_BOX_CHUNKS - 2)
    assert box.ravel_one(last) == MAX_BOX_CHUNKS - 2
    np.testing.assert_array_equal(box.ravel(np.array([last])), [MAX_BOX_CHUNKS - 2])
    np.testing.assert_array_equal(box.unravel(np.array([MAX_BOX_CHUNKS - 2])), [last])
