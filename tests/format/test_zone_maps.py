"""Zone maps as bytes: bounds only ever grow, and forged objects take little."""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError, ManifestsError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable, InlineRef, NativeRef
from zarr_manifests.format.columns import MAX_ROWS
from zarr_manifests.format.envelope import Fields, ObjectKind, encode
from zarr_manifests.format.zone_maps import (
    MEANING_BYTES,
    Bounds,
    ZonePage,
    ZonePages,
    Zones,
    ZoneTable,
)
from zarr_manifests.grid import Box

SESSION = f"{1:012d}-{'ab' * 12}"
KEY = f"indexes/{SESSION}/0"
NODE = b"n" * 12
MEANING = b"m" * MEANING_BYTES
BLOB = BlobRef(KEY, 100, 7)

NUMBERS = ["<f2", "<f4", "<f8", "|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8"]
TIMES = ["<M8[ns]", "<m8[s]"]


def bounds_of(low: Any, high: Any, bounded: Any = None, counts: Any = None) -> Bounds:
    n = len(low)
    missing, nan, cells = np.zeros((3, n), np.int64) if counts is None else counts
    some = np.ones(n, np.bool_) if bounded is None else np.asarray(bounded, np.bool_)
    return Bounds(np.asarray(low), np.asarray(high), some, missing, nan, cells)


def back(bounds: Bounds) -> Bounds:
    packed = msgpack.unpackb(msgpack.packb(bounds.pack()))
    return Bounds.parse(Fields(packed, "bounds"))


@st.composite
def pairs(draw: st.DrawFn) -> Bounds:
    dtype = np.dtype(draw(st.sampled_from([*NUMBERS, *TIMES, "|S3", "|S40"])))
    options: dict[str, Any] = {}
    if dtype.kind == "f":
        options = {"allow_nan": False, "allow_subnormal": True}
    values = npst.from_dtype(dtype, **options)
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
def test_bounds_only_grow(bounds: Bounds) -> None:
    found, some = back(bounds), bounds.bounded
    assert (found.bounded == some).all()
    assert (found.low[some] <= bounds.low[some]).all()
    assert (found.high[some] >= bounds.high[some]).all()
    for name in ("missing", "nan", "cells"):
        assert (getattr(found, name) == getattr(bounds, name)).all()
    if bounds.low.dtype.kind != "S":
        assert found.low.dtype == bounds.low.dtype


@given(pairs())
def test_all_rows_together_enclose_each(bounds: Bounds) -> None:
    whole, some = bounds.around(), bounds.bounded
    assert whole.bounded[0] == some.any()
    assert (whole.low[0] <= bounds.low[some]).all()
    assert (whole.high[0] >= bounds.high[some]).all()
    assert whole.missing[0] == bounds.missing.sum()


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
def test_extreme_floats(dtype: str) -> None:
    info = np.finfo(dtype)
    tiny, most = info.smallest_subnormal, info.max
    ends = [-np.inf, -most, -1, -tiny, -0.0, 0.0, tiny, 1, most, np.inf]
    values = np.array(ends, dtype)
    low, high = (a.ravel() for a in np.meshgrid(values, values))
    ordered = low <= high
    found = back(bounds_of(low[ordered], high[ordered]))
    assert (found.low <= low[ordered]).all()
    assert (found.high >= high[ordered]).all()


def test_floats_of_one_sign_keep_about_six_digits() -> None:
    values = np.random.default_rng(1).uniform(250, 310, 1000).astype("f4")
    found = back(bounds_of(values, values + np.float32(3)))
    assert np.abs(found.low - values).max() <= 310 * 2**-15
    assert np.abs(found.high - values - 3).max() <= 313 * 2**-15


def test_integers_of_few_bits_are_exact() -> None:
    low = np.array([-(2**63), 2**63 - 5, -(2**63) + 9], "i8")
    near = np.array([2**40 + 1, 2**40 + 2**30, 2**40 + 7], "i8")
    assert (back(bounds_of(near, near)).low == near).all()
    found = back(bounds_of(low, low))
    assert (found.low <= low).all()
    assert (found.high >= low).all()


def test_long_texts_are_cut_outward() -> None:
    low = np.array([b"a" * 40, b"\xff" * 15, b"b"], "S40")
    high = np.array([b"a" * 41, b"\xff" * 15 + b"\xfe!", b"bz" * 20], "S41")
    found = back(bounds_of(low.astype("S41"), high))
    assert found.low.dtype == np.dtype("S16")
    assert found.low.tolist() == [b"a" * 16, b"\xff" * 15, b"b"]
    assert found.high.tolist() == [b"a" * 15 + b"b", b"\xff" * 16, b"bz" * 7 + b"b{"]


def test_texts_that_nothing_short_exceeds_are_kept() -> None:
    texts = np.array([b"\xff" * 20, b"a" * 17], "S20")
    found = back(bounds_of(texts, texts))
    assert found.low.tolist() == found.high.tolist() == texts.tolist()


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (np.array([2.0]), np.array([1.0])),
        (np.array([math.nan]), np.array([1.0])),
        (np.array([0.0]), np.array([math.nan])),
        (np.array(["NaT"], "M8[s]"), np.array([0], "M8[s]")),
        (np.array([1j]), np.array([2j])),
        (np.array([1.0]), np.array([2.0], "f4")),
        (np.array([1.0], ">f8"), np.array([2.0], ">f8")),
        (np.array([1.0]), np.array([2.0, 3.0])),
    ],
)
def test_bounds_that_bound_nothing_are_refused(low: Any, high: Any) -> None:
    with pytest.raises(CorruptObjectError):
        bounds_of(low, high)


def address(number: int) -> NativeRef:
    return NativeRef(SESSION, number, 10 * number, 10, 0)


def table_of(n: int, first: int = 0) -> ZoneTable:
    addresses = ChunkTable.of({(i, 0): address(i) for i in range(first, first + n)})
    values = np.arange(first, first + n, dtype="f4")
    counts = np.arange(3 * n).reshape(3, n)
    return ZoneTable(MEANING, addresses, bounds_of(values, values + 1, counts=counts))


def test_zones_come_back_by_node() -> None:
    other = b"o" * 12
    zones = Zones.of([(NODE, table_of(3)), (other, table_of(2)), (NODE, table_of(4, 3))])
    data = zones.encode()
    found = Zones.from_object(data, BlobRef.to(KEY, data))
    assert found.nodes == {NODE, other}
    assert [len(table) for table in found.of_node(NODE)] == [3, 4]
    table = found.at(1)
    assert table.meaning == MEANING
    assert table.addresses.get((1, 0)) == address(1)
    assert table.bounds.low.tolist() == [0, 1]
    assert table.coords().tolist() == [[0, 0], [1, 0]]


def test_pages_come_back() -> None:
    page = ZonePage(Box((0, 0), (3, 1)), ("manifests/x", 9), 3, True, BLOB, 2)
    second = ZonePage(Box((3, 0), (9, 1)), None, 2, False, BLOB, 0)
    pages = ZonePages(MEANING, (page, second), bounds_of(np.array([1, 2]), np.array([3, 4])))
    data = pages.encode()
    found = ZonePages.from_object(data, BlobRef.to(KEY, data))
    assert (found.meaning, found.pages) == (MEANING, (page, second))
    assert found.bounds.high.tolist() == [3, 4]
    assert found.blobs == (BLOB,)


def test_an_address_table_has_hashes_of_one_length() -> None:
    addresses = ChunkTable.of({(0,): InlineRef(b"the bytes themselves")})
    with pytest.raises(CorruptObjectError):
        ZoneTable(MEANING, addresses, bounds_of([1.0], [1.0]))


def test_a_position_beyond_the_end_is_damage() -> None:
    with pytest.raises(CorruptObjectError):
        Zones.of([(NODE, table_of(1))]).at(1)


def test_entries_are_bounded_before_any_is_decoded() -> None:
    half = MAX_ROWS // 2 + 1
    payload = {"type": "zones", "tables": [[NODE, half, b""], [NODE, half, b""]]}
    data = encode(ObjectKind.INDEX, payload)
    with pytest.raises(CorruptObjectError, match="zones"):
        Zones.from_object(data, BlobRef.to(KEY, data))
    with pytest.raises(InvalidArgumentError):
        Zones(((NODE, half, b""), (NODE, half, b"")))


def test_a_table_of_another_length_than_stated_is_damage() -> None:
    packed = table_of(5).pack()
    with pytest.raises(CorruptObjectError, match="number of entries"):
        Zones(((NODE, 1, packed),)).at(0)


def test_a_forged_number_of_bounds_is_refused() -> None:
    table = table_of(5)
    value = msgpack.unpackb(table.pack())
    value["bounds"]["n"] = 6
    with pytest.raises(CorruptObjectError):
        ZoneTable.parse(msgpack.packb(value))
    page = ZonePage(Box((0,), (1,)), None, 1, True, BLOB, 0)
    payload = {
        "type": "zone-pages",
        "meaning": MEANING,
        "blobs": [BLOB.pack()],
        "pages": [[page.box.lo, page.box.hi, None, 1, True, 0, 0]],
        "bounds": {**table.bounds.pack(), "n": MAX_ROWS},
    }
    data = encode(ObjectKind.INDEX, payload)
    with pytest.raises(CorruptObjectError):
        ZonePages.from_object(data, BlobRef.to(KEY, data))


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


@pytest.mark.parametrize("least", [2**32, 0xFF800001, 2**64 - 1])
def test_bounds_beyond_the_end_of_their_type_are_refused(least: int) -> None:
    packed = bounds_of(np.array([1.0], "f4"), np.array([2.0], "f4")).pack() | {"least": least}
    with pytest.raises(CorruptObjectError):
        Bounds.parse(Fields(packed, "bounds"))


def test_a_million_compressed_chunks_take_less_than_nine_megabytes() -> None:
    n, rng = 1 << 16, np.random.default_rng(0)
    length = rng.normal(20_000, 1500, n).astype(np.int64)
    number = np.arange(n) // 300
    end = np.cumsum(length)
    zeros = np.zeros(n, np.int64)
    begin = end - length - (end - length)[number * 300]
    chunks = ChunkTable(
        *(Box((0, 0), (n // 16, 16)), None, zeros + 2, zeros, number, begin, length, zeros),
        (SESSION,),
        b"",
    )
    low = rng.normal(0, 100, n).astype("f4")
    high = low + np.abs(rng.normal(0, 30, n)).astype("f4")
    nan = np.where(rng.random(n) < 0.4, rng.integers(0, 6912, n), 0)
    bounds = bounds_of(low, high, counts=(nan, nan, zeros + 6912))
    size = len(Zones.of([(NODE, ZoneTable(MEANING, chunks, bounds))]).encode())
    assert size * 1_000_000 / n <= 9_000_000
    whole = replace(chunks, length=zeros + 20_000, offset=20_000 * (np.arange(n) % 300))
    assert len(Zones.of([(NODE, ZoneTable(MEANING, whole, bounds))]).encode()) < size
