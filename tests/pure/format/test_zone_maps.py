"""Zone maps as bytes: bounds are exact, and forged objects take little."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from zarr_manifests.errors import CorruptObjectError, ManifestsError
from zarr_manifests.format.chunk_table import ChunkTable, NativeRef
from zarr_manifests.format.records import BlobRef, record
from zarr_manifests.format.zone_maps import (
    MEANING_BYTES,
    NO_SUM,
    Bounds,
    StoredBounds,
    ZoneTable,
    added,
    sum_type,
)

SESSION = f"{1:012d}-{'ab' * 12}"
KEY = f"indexes/{SESSION}/0"
NODE = b"n" * 12
MEANING = b"m" * MEANING_BYTES
BLOB = BlobRef(KEY, 100, 7)

NUMBERS = ["<f2", "<f4", "<f8", "|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8"]
TIMES = ["<M8[ns]", "<m8[s]"]


def bounds_of(low: Any, high: Any, bounded: Any = None, counts: Any = None) -> Bounds:
    n = len(low)
    missing, nan, clip = np.zeros((3, n), np.int64) if counts is None else counts
    some = np.ones(n, np.bool_) if bounded is None else np.asarray(bounded, np.bool_)
    kind = sum_type(np.asarray(low).dtype)
    sums = np.full(n, np.nan) if kind is None else (nan - missing).astype(kind)
    weighted: Any = ()
    if kind is not None and n % 2:
        weighted = nan / 3, np.where(missing > nan, np.nan, 2.5), bytes(16)
    return Bounds(np.asarray(low), np.asarray(high), some, missing, nan, sums, clip, *weighted)


def back(bounds: Bounds) -> Bounds:
    packed = msgpack.unpackb(msgpack.packb(bounds.pack()))
    return Bounds.parse(record(StoredBounds, packed, "bounds"))


@st.composite
def pairs(draw: st.DrawFn) -> Bounds:
    dtype = np.dtype(draw(st.sampled_from([*NUMBERS, *TIMES])))
    values = npst.from_dtype(dtype, **({"allow_nan": False} if dtype.kind == "f" else {}))
    if dtype.kind in "Mm":
        values = values.filter(lambda value: not np.isnat(value))
    shape = st.integers(1, 30)
    both = [draw(npst.arrays(dtype, (draw(shape),), elements=values))]
    both.append(draw(npst.arrays(dtype, both[0].shape, elements=values)))
    low = np.where(both[0] <= both[1], *both)
    high = np.where(both[0] <= both[1], *both[::-1])
    counts = draw(npst.arrays(np.int64, (3, len(low)), elements=st.integers(0, 2**40)))
    return bounds_of(low, high, draw(npst.arrays(np.bool_, low.shape)), counts)


@given(pairs())
def test_bounds_are_exact(bounds: Bounds) -> None:
    found, some = back(bounds), bounds.bounded
    assert (found.bounded == some).all()
    np.testing.assert_array_equal(found.low[some], bounds.low[some])
    np.testing.assert_array_equal(found.high[some], bounds.high[some])
    for name in ("missing", "nan", "clip", "sums"):
        np.testing.assert_array_equal(getattr(found, name), getattr(bounds, name))
    assert found.digest == bounds.digest
    for name in ("weighted", "weights"):
        np.testing.assert_array_equal(getattr(found, name), getattr(bounds, name))
    whole = bounds.around()  # of a page
    assert whole.bounded[0] == some.any()
    assert (whole.low[0] <= bounds.low[some]).all()
    assert (whole.high[0] >= bounds.high[some]).all()
    assert whole.missing[0] == bounds.missing.sum()
    assert (whole.clip[0] > 0) == bounds.clip.any()


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (np.array([2.0]), np.array([1.0])),
        (np.array([0.0]), np.array([math.nan])),
        (np.array(["NaT"], "M8[s]"), np.array([0], "M8[s]")),
        (np.array([1j]), np.array([2j])),
        (np.array([1.0]), np.array([2.0, 3.0])),
    ],
)
def test_bounds_that_bound_nothing_are_refused(low: Any, high: Any) -> None:
    with pytest.raises(CorruptObjectError):
        bounds_of(low, high)


def table_of(n: int) -> ZoneTable:
    addresses = {(i, 0): NativeRef(SESSION, i, 10 * i, 10, 0) for i in range(n)}
    values = np.arange(n, dtype="f4")
    counts = np.arange(3 * n).reshape(3, n)
    return ZoneTable(MEANING, ChunkTable.of(addresses), bounds_of(values, values + 1, None, counts))


@given(st.data())
def test_forged_fields_raise_only_errors_of_the_package(data: st.DataObject) -> None:
    value = msgpack.unpackb(table_of(5).pack())
    part = value[data.draw(st.sampled_from(["bounds", "chunks"]))]
    scalars = st.none() | st.integers(-5, 2**64 - 1) | st.binary(max_size=40) | st.text(max_size=9)
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(scalars | st.lists(scalars))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(ManifestsError):
            ZoneTable.parse(msgpack.packb(value))


@pytest.mark.parametrize(
    "low",
    [[8, 0, bytes(8)], [4, 0, bytes(3)], [4, 1, bytes(4)], [4, 0, b"\0\0\xc0\x7f"], [0], None],
)
def test_bounds_of_another_type_are_refused(low: Any) -> None:
    packed = bounds_of(np.array([1.0], "f4"), np.array([2.0], "f4")).pack()
    with pytest.raises(CorruptObjectError):
        Bounds.parse(record(StoredBounds, packed | {"low": low}, "bounds"))


def test_both_zeros_are_the_same_bound() -> None:
    packed = bounds_of(np.array([0.0, -0.0], "f2"), np.array([-0.0, 0.0], "f2")).pack()
    found = Bounds.parse(record(StoredBounds, packed, "bounds"))
    assert found.low.tolist() == found.high.tolist() == [0, 0]


def test_sums_too_large_for_64_bits_are_not_known() -> None:
    assert added(np.array([2**62, 2**62])) == NO_SUM
    assert added(np.array([1, NO_SUM])) == NO_SUM
    assert added(np.array([2**62, -(2**62), 5])) == 5
    assert math.isnan(added(np.array([1.0, np.nan])))
