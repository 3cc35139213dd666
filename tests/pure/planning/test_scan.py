"""Boxes of a scan, against the cells counted one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.grid import Box
from zarr_manifests.planning.scan import Axis, Scan, plan_scan, runs_of

masks = st.lists(st.booleans(), max_size=12).map(lambda bits: np.array(bits, bool))
axes = st.builds(lambda chunk, mask: Axis(chunk, runs_of(mask)), st.integers(1, 5), masks)
scans = st.tuples(st.lists(axes, max_size=3), st.integers(1, 200), st.integers(1, 12))


def cells(ranges: list[range]) -> set[tuple[int, ...]]:
    return set(itertools.product(*ranges))


def chunks_of(scan: Scan, box: Box) -> set[tuple[int, ...]]:
    """The chunks a box touches."""
    return cells(
        [
            range(lo // axis.chunk, (hi - 1) // axis.chunk + 1)
            for axis, lo, hi in zip(scan.axes, box.lo, box.hi, strict=True)
        ]
    )


def selected(parts: tuple[Axis, ...]) -> set[tuple[int, ...]]:
    return set(itertools.product(*(axis.positions().tolist() for axis in parts)))


@given(masks)
def test_runs_hold_exactly_what_is_true(mask: np.ndarray) -> None:
    runs = runs_of(mask)
    assert Axis(1, runs).positions().tolist() == np.flatnonzero(mask).tolist()
    assert all(hi < lo for (_, hi), (lo, _) in itertools.pairwise(runs.tolist()))


@given(scans)
def test_every_selected_cell_is_in_one_box_of_the_size_that_was_asked_for(
    case: tuple[list[Axis], int, int],
) -> None:
    parts, target_rows, min_tasks = case
    scan = plan_scan(parts, target_rows=target_rows, min_tasks=min_tasks)
    boxes = list(scan)
    assert len(boxes) == len(scan)
    wanted = selected(tuple(parts))
    assert scan.rows == len(wanted)
    found = [cell for box in boxes for cell in selected(scan.within(box))]
    assert len(found) == len(wanted)
    assert set(found) == wanted
    read = [chunk for box in boxes for chunk in chunks_of(scan, box)]
    needed = {
        tuple(p // axis.chunk for p, axis in zip(cell, parts, strict=True)) for cell in wanted
    }
    assert len(read) == len(set(read))
    assert set(read) == needed
    for box in boxes:
        rows = math.prod(axis.size for axis in scan.within(box))
        assert rows <= target_rows or len(chunks_of(scan, box)) == 1
    assert len(scan) >= min(min_tasks, len(read))


def test_one_cell_and_none() -> None:
    assert list(plan_scan([], target_rows=1, min_tasks=8)) == [Box((), ())]
    nothing = Axis(3, np.empty((0, 2), np.int64))
    assert list(plan_scan([nothing], target_rows=1, min_tasks=8)) == []


@given(scans, st.lists(st.integers(1, 6), min_size=3, max_size=3), st.data())
def test_boxes_that_hold_chunks(
    case: tuple[list[Axis], int, int], shape: list[int], data: st.DataObject
) -> None:
    """Also chunks other than those it was planned with, of which one may lie in several boxes."""
    parts, target_rows, min_tasks = case
    scan = plan_scan(parts, target_rows=target_rows, min_tasks=min_tasks)
    lengths = shape[: len(parts)]
    coords = data.draw(st.lists(st.tuples(*(st.integers(0, 12 // n) for n in lengths)), max_size=5))
    expected = {
        number
        for number, box in enumerate(scan)
        for chunk in coords
        if all(
            max(lo, at * n) < min(hi, (at + 1) * n)
            for lo, hi, at, n in zip(box.lo, box.hi, chunk, lengths, strict=True)
        )
    }
    given_coords = np.array(coords, np.int64).reshape(len(coords), len(parts))
    assert scan.holding(lengths, given_coords).tolist() == sorted(expected)


@given(scans, st.data())
def test_boxes_are_cut_where_those_of_the_scan_are(
    case: tuple[list[Axis], int, int], data: st.DataObject
) -> None:
    parts, target_rows, min_tasks = case
    scan = plan_scan(parts, target_rows=target_rows, min_tasks=min_tasks)
    # Disjoint boxes: slices along the first axis, if there is one.
    edges = sorted(data.draw(st.lists(st.integers(0, 14), max_size=6))) if parts else [0, 1]
    rest = [sorted(data.draw(st.tuples(st.integers(0, 14), st.integers(0, 14)))) for _ in parts[1:]]
    boxes = np.array(
        [
            [[lo, *(r[0] for r in rest)], [hi, *(r[1] for r in rest)]] if parts else [[], []]
            for lo, hi in itertools.pairwise(edges)
        ],
        np.int64,
    ).reshape(len(edges[1:]), 2, len(parts))
    asked = {cell for lo, hi in boxes.tolist() for cell in cells(list(map(range, lo, hi)))}
    wanted = asked & selected(tuple(parts))
    found = [Box(tuple(lo), tuple(hi)) for lo, hi in scan.cut(boxes).tolist()]
    inside = [selected(scan.within(box)) for box in found]
    assert sorted(cell for each in inside for cell in each) == sorted(wanted)
    assert scan.cells(scan.cut(boxes)).tolist() == [len(each) for each in inside]
    assert all(inside)
