"""Files that become rows: what differs, where they go, and who writes them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.xarray.appended_rows import (
    FileFacts,
    FileLayout,
    FileRows,
    VariableFacts,
    difference,
    rows_of_labels,
    write_groups,
)

T = VariableFacts(("time", "lat"), "f4", (("units", "K"),))
LAT = VariableFacts(("lat",), "f8", digest=b"1", values=np.arange(3.0).tobytes())
NEAR = VariableFacts(("lat",), "f8", digest=b"2", values=(np.arange(3.0) * (1 + 1e-9)).tobytes())
FAR = VariableFacts(("lat",), "f8", digest=b"3", values=(np.arange(3.0) + 1).tobytes())


def layout(lat_size: int = 3, **variables: VariableFacts) -> FileLayout:
    return FileLayout(
        (("lat", lat_size),), tuple(sorted({"t": T, "lat": LAT, **variables}.items()))
    )


def changed(**fields: object) -> VariableFacts:
    facts = {"dims": T.dims, "dtype": T.dtype, "meaning": T.meaning}
    return VariableFacts(**{**facts, **fields})


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (layout(lat=NEAR), None),
        (layout(t=changed(meaning=(("units", "degC"),))), ("'t' has units 'degC'", "'K'")),
        (layout(4), ("the dimension 'lat' has length 4", "3")),
        (layout(lat=FAR), ("the values of 'lat' differ", "other ones")),
        (layout(u=T), ("there is a variable 'u'", "none")),
    ],
)
def test_what_differs_is_told(other, told):
    assert difference(other, layout(), "time") == told


def test_rows_of_labels_are_found_only_in_a_row():
    there = np.array([1, 2, 3, 5, 6])
    assert rows_of_labels(there, np.array([2, 3])) == 1
    assert rows_of_labels(there, np.array([3, 4])) is None
    times = np.datetime64("2024-01-01", "ns") + np.arange(4) * np.timedelta64(1, "h")
    assert rows_of_labels(times, times[2:] + np.timedelta64(300, "ns")) == 2
    assert rows_of_labels(times, times[2:] + np.timedelta64(2, "s")) is None


@given(
    rows=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    chunks=st.lists(st.integers(1, 6), max_size=2),
    begins=st.integers(0, 7),
    most=st.integers(1, 9),
    gap=st.integers(0, 5),
)
def test_each_chunk_has_one_writer_and_each_row_one_place(rows, chunks, begins, most, gap):
    placed, start = [], begins
    for number, count in enumerate(rows):
        facts = FileFacts(f"{number}", (10 * count, "", ""), layout(), count)
        placed.append(FileRows(facts, start, start + count))
        start += count + (gap if number == len(rows) // 2 else 0)
    unit = math.lcm(*chunks)
    groups = write_groups(placed[::-1], unit, most, 0)
    wrote: dict[int, int] = {}
    seen = []
    for number, group in enumerate(groups):
        for part in group:
            assert part.stop > part.start
            start = next(each.start for each in placed if each.file.url == part.file.url)
            assert part.start - start == part.first
            seen += range(part.start, part.stop)
            for row in range(part.start, part.stop):
                assert wrote.setdefault(row // unit, number) == number
    assert sorted(seen) == [row for each in placed for row in range(each.start, each.stop)]
    assert len(groups) <= 2 * most + 2


def test_a_file_may_lack_what_does_not_grow():
    without = FileLayout((), (("t", T),))
    assert difference(without, layout(), "time") is None
    assert difference(FileLayout((), (("lat", LAT),)), layout(), "time") == (
        "there is no variable 't'",
        "one",
    )
