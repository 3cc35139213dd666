"""The pruning planner: never leaves out a chunk with a match, and says why it leaves out others."""

from __future__ import annotations

from datetime import UTC
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import replace

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box
from zarr_manifests.planning.skipping import Ranges, Verdict, may_match, plan_chunks
from zarr_manifests.planning.where import Comparison, parse_where
from zoned import OPS

EDGES = [0, -1, 1, 2**24 + 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, -0.5, 1e300]
TYPES = ["i1", "i4", "i8", "u1", "u4", "u8", "f4", "f8"]


def values_of(dtype: str, data: st.DataObject) -> Any:
    kind = np.dtype(dtype)
    if kind.kind == "f":
        plain = st.floats(width=8 * kind.itemsize, allow_nan=False)
        special = st.sampled_from([-0.0, 0.0, np.inf, -np.inf, 2.0**53])
        found = data.draw(st.lists(plain | special, min_size=1, max_size=5))
    else:
        info = np.iinfo(kind)
        near = [
            n for n in (0, 1, 2**53, 2**53 + 1, info.min, info.max) if info.min <= n <= info.max
        ]
        whole = st.integers(int(info.min), int(info.max)) | st.sampled_from(near)
        found = data.draw(st.lists(whole, min_size=1, max_size=5))
    return np.array(found, kind)


def holds(op: str, value: Any, literal: Any, dtype: str = "f8") -> bool:
    """The comparison itself, in exact numbers; of a float, with the literal as a float.

    Spark takes it as a double, and NumPy in the type of the values, where 1e300 may be infinite.
    """
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            typed = float(np.dtype(dtype).type(literal))
        return any(OPS[op](value, each) for each in (typed, float(literal)))
    return bool(OPS[op](Fraction(value), Fraction(literal)))


def test_an_infinite_float32_equals_what_numpy_takes_for_infinite() -> None:
    cells = Ranges.of_cells(np.array([np.inf, 1], np.float32), np.zeros(2, bool))
    assert may_match(Comparison("x", "=", (1e300,)), cells).tolist() == [True, False]


@given(st.data(), st.sampled_from(TYPES), st.sampled_from([*OPS, "in", "between"]))
def test_numbers_are_compared_exactly(data: st.DataObject, dtype: str, op: str) -> None:
    values = values_of(dtype, data)
    near = [v for v in values.tolist() if abs(v) != np.inf and abs(v) < 1e37]
    near += [v + 1 for v in near] + [v + 0.5 for v in near if abs(v) < 2**52]
    literals = tuple(
        data.draw(st.sampled_from([*EDGES, *near]))
        for _ in range(2 if op in ("in", "between") else 1)
    )
    comparison = Comparison("x", op, literals)
    given_ = comparison.values

    def cell(value: Any) -> bool:
        if op == "in":
            return any(holds("=", value, literal, dtype) for literal in given_)
        if op == "between":
            return holds(">=", value, given_[0], dtype) and holds("<=", value, given_[1], dtype)
        return holds(op, value, given_[0], dtype)

    due = [cell(value) for value in values.tolist()]
    cells = Ranges.of_cells(values, np.zeros(len(values), bool))
    assert may_match(comparison, cells).tolist() == due
    one = np.ones(1, bool)
    chunk = Ranges(values.min(keepdims=True), values.max(keepdims=True), one, ~one, one)
    assert may_match(comparison, chunk)[0] >= any(due)
    assert may_match(comparison, replace(chunk, known=~one))[0], "it was not measured"
    if op not in ("in", "between", "!=", "=") and not any(due):
        assert not may_match(comparison, chunk)[0], "the bounds of one chunk decide"


def test_missing_values_match_nothing_but_is_null() -> None:
    values = np.array([1.0, np.nan])
    cells = Ranges.of_cells(values, np.isnan(values))
    for op in OPS:
        assert not may_match(Comparison("x", op, (5,)), cells)[1]
        found = may_match(Comparison("x", op, (5,)), cells, nan_matches=True)[1]
        assert found == (op in (">", ">=", "!=")), "NaN is greater than every number in Spark"
    assert may_match(Comparison("x", "is_null"), cells).tolist() == [False, True]
    assert may_match(Comparison("x", "is_not_null"), cells).tolist() == [True, False]
    assert may_match(Comparison("x", "is_not_null"), cells, nan_matches=True).all()


@pytest.mark.parametrize("unit", ["h", "ms", "ns"])
def test_times_are_compared_at_their_unit_and_in_their_zone(unit: str) -> None:
    times = np.array(["2000-01-01T00", "2000-01-01T01"], f"M8[{unit}]")
    cells = Ranges.of_cells(times, np.isnat(times))

    def found(text: str, zone: Any = UTC) -> list[bool]:
        return may_match(parse_where(text).comparisons[0], cells, zone=zone).tolist()

    assert found("t = '2000-01-01'") == [True, False]
    assert found("t > TIMESTAMP '2000-01-01 00:00:00.000000001'") == [False, True]
    assert found("t >= '2000-01-01 00:59:59.999'") == [False, True]
    assert found("t < '2000-01-01T02:00+01:00'") == [True, False]
    assert found("t = '2000-01-01 10:00'", ZoneInfo("Asia/Tokyo")) == [False, True]


@pytest.mark.parametrize(
    ("values", "where"),
    [
        (np.array([1]), "x = 'a'"),
        (np.array([True]), "x = 1"),
        (np.array([b"a"]), "x = DATE '2000-01-01'"),
        (np.array([0], "M8[s]"), "x > 5"),
        (np.array([0], "M8[s]"), "x > 'soon'"),
    ],
    ids=["text", "truth", "date", "number", "no time"],
)
def test_other_types_are_refused(values: Any, where: str) -> None:
    with pytest.raises(InvalidArgumentError, match="`x "):
        may_match(parse_where(where).comparisons[0], Ranges.of_cells(values, np.zeros(1, bool)))


def test_text_is_compared_by_its_utf8_bytes() -> None:
    texts = np.array(["Zürich", "Ankara", "ﬁ", "𐀀"])
    for values in (texts, np.array([t.encode() for t in texts.tolist()]), texts.astype(object)):
        found = may_match(Comparison("x", "<", ("ﬂ",)), Ranges.of_cells(values, np.zeros(4, bool)))
        assert found.tolist() == [True, True, True, False]


@st.composite
def plans(draw: st.DrawFn) -> Any:
    axes = [
        np.array(draw(st.lists(st.booleans(), min_size=1, max_size=5)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    runs = [np.flatnonzero(axis) for axis in axes]
    if all(map(len, runs)):
        region = Box(tuple(int(r[0]) for r in runs), tuple(int(r[-1]) + 1 for r in runs))
    else:
        region = Box((0,) * len(axes), (0,) * len(axes))
    verdicts = []
    for _ in range(draw(st.integers(0, 2))):
        stored = draw(hnp.arrays(bool, region.size))
        n = int(stored.sum())
        known = draw(hnp.arrays(bool, n))
        match = draw(hnp.arrays(bool, n)) | ~known
        verdicts.append(Verdict(np.flatnonzero(stored), match, known, draw(st.booleans())))
    return axes, region, verdicts


@given(plans())
def test_every_chunk_is_selected_or_left_out_for_one_reason(made: Any) -> None:
    axes, region, verdicts = made
    plan = plan_chunks(axes, region, verdicts)
    shape = tuple(map(len, axes))
    due = np.ones(shape, bool)
    for number, axis in enumerate(axes):
        due &= axis.reshape([-1 if i == number else 1 for i in range(len(axes))])
    in_range = due.copy()
    by_statistics = np.zeros(shape, bool)
    for verdict in verdicts:
        here = np.full(region.size, verdict.unwritten)
        here[verdict.index] = verdict.match
        inside = tuple(slice(a, b) for a, b in zip(region.lo, region.hi, strict=True))
        due[inside] &= here.reshape(region.shape)
        there = np.zeros(region.size, bool)
        there[verdict.index[~verdict.match]] = True
        by_statistics[inside] |= there.reshape(region.shape)
    found = np.zeros(shape, int)
    for low, high in plan.boxes.tolist():
        found[tuple(map(slice, low, high))] += 1
    assert (found == due).all()
    assert plan.boxes[:, 0].tolist() == sorted(plan.boxes[:, 0].tolist())
    assert plan.selected == due.sum()
    assert plan.left_out["range"] == (~in_range).sum()
    assert plan.left_out["statistics"] == (by_statistics & in_range).sum()
    assert plan.selected + sum(plan.left_out.values()) == due.size
    assert plan.unknown <= plan.selected


def test_a_huge_grid_with_few_chunks_is_planned_without_looking_at_all_of_it() -> None:
    n = 10**7
    axes = [np.ones(n, bool), np.ones(10, bool)]
    region = Box((0, 0), (n, 10))
    index = np.array([5, 17, 10**8 - 1])
    yes = np.ones(3, bool)
    plan = plan_chunks(axes, region, [Verdict(index, yes, yes, unwritten=False)])
    assert plan.boxes[:, 0].tolist() == [[0, 5], [1, 7], [n - 1, 9]]
    assert (plan.selected, plan.left_out["absence"]) == (3, 10**8 - 3)
    plan = plan_chunks(axes, region, [Verdict(index, ~yes, yes, unwritten=True)])
    assert plan.selected == 10**8, "what is not stored matches"
