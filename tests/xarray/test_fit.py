"""Values that would be read back as others are refused, wherever they are computed."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import cftime
import dask
import dask.array as da
import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
import zarr
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from xarray.backends import BackendArray
from xarray.core.indexing import LazilyIndexedArray
from zarr.storage import MemoryStore

import zarr_manifests as zm
from effort import examples, swept
from row_writes import write_table
from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.storage.memory import MemoryStorage

NOLEAP = {"calendar": "noleap", "dtype": "f8"}
KELVIN = {"dtype": "i2", "scale_factor": 0.001, "add_offset": 275.0, "_FillValue": -32768}


def field(values: Any, start: int = 0) -> xr.Dataset:
    values = np.asarray(values)
    return xr.Dataset({"t": ("x", values)}, {"x": np.arange(start, start + len(values)) * 10})


def opened(repository: zm.Repository, **options: Any) -> xr.Dataset:
    return xr.open_dataset(repository, engine="zarr_manifests", **options).load()


def written(
    values: Any, encoding: Mapping[str, Any] | None = None, **options: Any
) -> zm.Repository:
    repository = zm.create(MemoryStorage())
    how = {"t": dict(encoding)} if encoding is not None else None
    zm.write(field(values), repository, message="first", encoding=how, **options)
    return repository


def refused(repository: zm.Repository, ds: xr.Dataset, match: str, **how: Any) -> str:
    history = len(list(repository.ancestry()))
    with pytest.raises(InvalidArgumentError, match=match) as caught:
        zm.write(ds, repository, message="refused", **(how or {"append_dim": "x"}))
    assert len(list(repository.ancestry())) == history
    return str(caught.value)


# --- arrays that are there ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {"append_dim": "x"},
        {"region": {"x": slice(0, 3)}},
        {"region": "auto"},
        {"mode": "a"},
        {"mode": "r+"},
    ],
)
@pytest.mark.parametrize("lazy", [False, True])
def test_beyond_the_range_of_a_packing(how: dict[str, Any], lazy: bool) -> None:
    repository = written([250.0, 275.0, 300.0], {**KELVIN, "chunks": (3,)})
    hot = field([250.0, 330.0, 300.0], start=3 if "append_dim" in how else 0)
    if how.get("region") not in (None, "auto"):
        hot = hot.drop_vars("x")
    text = refused(repository, hot.chunk(x=3) if lazy else hot, "values of 't' do not fit", **how)
    assert "242.233 to 307.767, in steps of 0.001, as int16" in text
    assert "330 at x" in text
    assert "would be read back as 264.464" in text
    np.testing.assert_allclose(opened(repository).t, [250, 275, 300], atol=0.0005)


def test_it_says_where() -> None:
    time = np.array(["2024-01-01", "2024-01-02"], "M8[ns]")
    values = np.full((2, 3, 4), 280.0)
    ds = xr.Dataset({"t": (("time", "lat", "n"), values)}, {"time": time, "lat": [5.0, 6.0, 7.0]})
    repository = zm.create(MemoryStorage())
    zm.write(ds, repository, message="first", encoding={"t": {**KELVIN, "chunks": (1, 3, 4)}})
    ds = ds.assign_coords(time=time + np.timedelta64(2, "D")).copy(deep=True)
    ds.t[1, 2, 3] = np.inf
    expected = r"inf at time=2024-01-04 00:00:00, lat=7.0, n\[3\] \(position 1, 2, 3\)"
    for new in (ds, ds.transpose("n", "lat", "time").transpose(*ds.t.dims), ds.chunk(time=1)):
        refused(repository, new, expected, append_dim="time")


@pytest.mark.parametrize(
    ("there", "new", "told"),
    [
        (np.int32([1]), np.int64([2**33 + 5]), "8589934597 at x=10 .* as 5"),
        (np.int32([1]), np.float64([np.nan]), "nan at x=10"),
        (np.int16([1]), np.float64([1.5]), "1.5 at .* as 2"),
        (np.int16([1]), np.float64([40000.0]), "whole numbers, as int16"),
        (np.int32([1]), np.float32([2**31]), "2.14748365e\\+09 at"),
        (np.int64([1]), np.float64([2**63]), "9.22337204e\\+18 at"),
        (np.uint8([1]), np.int64([-1]), "-1 at .* as 255"),
        (np.int8([1]), np.uint8([255]), "255 at .* as -1"),
        (np.uint64([1]), np.int64([-1]), "-1 at"),
        (np.int64([1]), np.uint64([2**63]), "9223372036854775808 at .* as -9223372036854775808"),
        (np.float32([1]), np.float64([1e300]), "1e\\+300 at .* as inf"),
        (np.float32([1]), np.float64([1e-50]), "1e-50 at .* as 0"),
        (np.float16([1]), np.int32([-(2**31)]), "-2147483648 at .* as -inf"),
        (np.array(["abc"]), np.array(["a", None], object), "position 1. .* as '"),
        (np.array(["abc"]), np.array([7]), "7 at .* as '7'"),
        (np.float16([1]), np.float32([70000]), "70000 at .* as inf"),
        (np.float32([1]), np.int64([2**24 + 1]), "16777217 at .* as 16777216"),
        (np.float64([1]), np.int64([2**53 + 1]), "9007199254740993 at"),
        (np.float64([1]), np.complex128([1 + 2j]), r"\(1\+2j\) at .* as 1"),
        (np.complex64([1]), np.complex128([1e300]), "at .* as \\(inf"),
        (np.bool_([True]), np.int64([2]), "2 at .* as True"),
        (np.bool_([True]), np.float64([np.nan]), "True and False, and no NaN"),
        (np.array(["abc"]), np.array(["abcd"], object), "'abcd' at .* as 'abc'"),
        (np.array([b"abc"]), np.array([b"abcd"], object), "texts of at most 3 bytes"),
    ],
)
def test_what_a_type_has_no_room_for(there: Any, new: Any, told: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Zarr's, about texts; numpy's, about just these values
        repository = written(there)
        refused(repository, field(new, start=1), told)
        zm.write(field(new, start=1), repository, message="so be it", append_dim="x", check=False)
    assert opened(repository).t.size == 1 + len(new)


@pytest.mark.parametrize(
    ("there", "new"),
    [
        (np.float32([1]), np.float64([0.1, 1e-40, np.nan, np.inf, -np.inf, 3.4e38])),
        (np.float16([1]), np.float64([0.1, 65519.0, 1e-7])),
        (np.float32([1]), np.int64([2**24, -5])),
        (np.int16([1]), np.float64([3.0, -32768.0, 32767.0])),
        (np.int16([1]), np.uint64([32767])),
        (np.bool_([True]), np.float64([0.0, 1.0])),
        (np.complex64([1]), np.float64([0.1])),
        (np.float64([1]), np.complex64([0.5])),
        (np.array(["abc"], object), np.array(["abcdefgh"], object)),
        (np.array(["abc"]), np.array(["ab"], object)),
    ],
)
def test_what_only_rounds_is_fine(there: Any, new: Any) -> None:
    repository = written(there)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zm.write(field(new, start=1), repository, message="more", append_dim="x")
    assert opened(repository).t.size == 1 + len(new)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("on_existing", "rows"), [("skip", [4, 5]), ("replace", [2, 5])])
def test_it_says_where_among_rows_of_which_some_are_skipped(
    on_existing: str, rows: list[int], lazy: bool
) -> None:
    repository = written([250.0, 275.0, 300.0], {**KELVIN, "chunks": (3,)})
    new = field(np.full(6, 280.0)).assign_coords(x=[-1, 0, 10, 20, 30, 40]).isel(x=slice(1, None))
    new = xr.concat([new, field([280.0], start=5)], "x")
    for row in rows:
        hot = new.copy(deep=True)
        hot.t[row] = 330.0
        told = rf"330 at x={int(hot.x[row])} \(position {row}\) would"
        how: dict[str, Any] = {"append_dim": "x", "on_existing": on_existing}
        refused(repository, hot.chunk(x=3) if lazy else hot, told, **how)


# --- first writes ------------------------------------------------------------------------------


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("mode", [None, "w", "a"])
def test_an_encoding_that_does_not_fit_the_values(carried: bool, mode: Any) -> None:
    repository = zm.create(MemoryStorage())
    hot = field([250.0, 330.0])
    how: dict[str, Any] = {"encoding": {"t": KELVIN}, "mode": mode}
    if carried:  # as of a file that was opened
        how.pop("encoding")
        hot.t.encoding = {**KELVIN, "source": "a file", "original_shape": (2,)}
    text = refused(repository, hot, "do not fit their encoding", **how)
    assert "ds['t'].encoding.clear()" in text
    hot.t.encoding.clear()
    zm.write(hot, repository, message="as it is", mode=mode)
    assert opened(repository).t[1] == 330.0


@pytest.mark.parametrize(
    ("values", "encoding", "told"),
    [
        (np.float64([1.5]), {"dtype": "i2"}, "1.5 at"),
        (np.float64([1.0, np.nan]), {"dtype": "i2"}, "nan at x=10"),
        (np.float64([1.0, np.nan]), {**KELVIN, "_FillValue": None}, "nan at x=10"),
        (np.int64([-9999, 1]), {"dtype": "i2", "_FillValue": -9999}, "-9999 at .* as nan"),
        (np.float64([7.0, 1]), {"dtype": "f8", "missing_value": 7.0}, "7 at .* as nan"),
        (np.float32([1e20, 1]), {"_FillValue": np.float32(1e20)}, "as nan"),
        (
            np.float64([0.1, -25.4]),
            {"dtype": "i1", "scale_factor": 0.2, "_FillValue": -127},
            "-25.4 at .* as nan",
        ),
        (
            np.float64([255.0, 256.0]),
            {"dtype": "i1", "_Unsigned": "true", "_FillValue": -1},
            "255 at x=0 .* as nan; 256 at x=10",
        ),
        (np.float64([1, np.nan]), {"dtype": "u8", "_FillValue": np.uint64(2**64 - 1)}, "nan at"),
        (
            np.float64([1, 2.0**63 + 2**20]),
            {"dtype": "i8", "_Unsigned": "true", "_FillValue": 0},
            "x=10",
        ),
        (np.float64([1e39]), {"dtype": "f4"}, "as inf"),
        (np.int64([2**53 + 1]), {"dtype": "i8", "_FillValue": 0}, "9007199254740993 at"),
        (np.float16([1000.0, 60000.0]), {**KELVIN, "dtype": "i4"}, "60000 at"),
        (np.array([b"a", b"b"]), {}, "'a' at .* as b'ab'"),
        (np.float64([7e4]), {"dtype": "f2"}, "as inf"),
        (np.float64([np.inf]), KELVIN, "inf at"),
        (np.float64([2.0]), {"dtype": "bool"}, "2 at .* as True"),
        (np.array(["abcd"]), {"dtype": "U3"}, "'abcd' at .* as 'abc'"),
        (np.array([b"abcd"]), {"dtype": "S3"}, "abcd"),
        (
            np.array(["2000-01-01", "2000-01-11"], "M8[ns]"),
            {"units": "days since 2000-01-01", "dtype": "i4", "_FillValue": 10},
            "2000-01-11T00:00:00.0+ at .* as NaT",
        ),
        (
            np.array([1, 10], "m8[D]").astype("m8[ns]"),
            {"units": "days", "dtype": "i4", "_FillValue": 10},
            "as NaT",
        ),
    ],
)
@pytest.mark.parametrize("lazy", [False, True])
def test_first_values(values: Any, encoding: dict[str, Any], told: str, lazy: bool) -> None:
    repository = zm.create(MemoryStorage())
    ds = field(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # xarray's, that there may be NaN
        refused(repository, ds.chunk() if lazy else ds, told, encoding={"t": encoding})


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        (np.float64([250.0, np.nan, 280.123]), KELVIN),
        (np.float64([0.0, 254.0, np.nan]), {"dtype": "i1", "_Unsigned": "true", "_FillValue": -1}),
        (np.int64([-5, 2**53]), {"dtype": "i8", "_FillValue": 0}),
        (np.float64([np.nan, 1e19]), {"_FillValue": 1e20}),
        (np.float64([1.0, np.nan]), {"dtype": "i8", "_FillValue": np.int64(-(2**63) + 2)}),
        (np.array(["2000-01-01T06"], "M8[ns]"), {"units": "hours since 2000-01-01"}),
        (np.array(["2000-01-01T06"], "M8[ns]"), {"units": "hours since 0001-01-01", "dtype": "f8"}),
        (np.array(["2000-01-01T06"], "M8[ns]"), {"units": "days since 1990-01-01", **NOLEAP}),
        (np.array(["2000-01-01", "NaT"], "M8[ns]"), {}),
        (np.array([b"abc", b"de"]), {"dtype": "S1"}),  # as xarray has it from files
        (np.array(["abc", "dé"]), {"dtype": np.dtype("S1")}),
        (np.array([True, False]), {}),
        (np.array(["a", None], object), {}),
        (np.zeros((0,)), KELVIN),
    ],
)
def test_first_values_that_fit(values: Any, encoding: dict[str, Any]) -> None:
    repository = written(values, encoding)
    assert opened(repository).t.size == len(values)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_missing_text_is_none_of_the_texts_that_are_there(lazy: bool) -> None:
    repository = written(np.array(["a", "b"], object))
    for missing in (None, np.nan):
        more = field(np.array(["c", missing], object), start=2)
        refused(repository, more.chunk() if lazy else more, "at x=30 .* read back as 'nan'")
    more = field(np.array(["nan", "c"], object), start=2)
    zm.write(more.chunk() if lazy else more, repository, message="texts", append_dim="x")
    assert opened(repository).t.values.tolist() == ["a", "b", "nan", "c"]


@pytest.mark.parametrize("lazy", [False, True])
def test_unsigned_values_are_kept_as_such_only_beside_a_fill_value(lazy: bool) -> None:
    ds = field(np.uint8([1, 200]))
    ds.t.encoding = {"dtype": "i1", "_Unsigned": "true"}
    refused(zm.create(MemoryStorage()), ds.chunk() if lazy else ds, "200 at .* as -56")
    ds.t.encoding["_FillValue"] = np.int8(-1)
    repository = zm.create(MemoryStorage())
    zm.write(ds, repository, message="with a fill value")
    assert opened(repository).t.values.tolist() == [1, 200]


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_texts_of_a_file(tmp_path: Path) -> None:
    stations = xr.Dataset({"name": ("x", np.array([b"Oslo", b"Bergen"]))})
    stations.to_netcdf(tmp_path / "stations.nc", engine="scipy")
    with xr.open_dataset(tmp_path / "stations.nc", engine="scipy") as ds:
        repository = zm.create(MemoryStorage())
        zm.write(ds, repository, message="from a file")
    xr.testing.assert_equal(opened(repository), stations)


def test_values_that_are_packed_already() -> None:
    """As xarray opens them with `mask_and_scale=False`: what is missing is what it says."""
    repository = written([250.0, np.nan], KELVIN)
    raw = opened(repository, mask_and_scale=False)
    assert "_FillValue" in raw.t.attrs
    copy = zm.create(MemoryStorage())
    zm.write(raw, copy, message="raw")
    xr.testing.assert_identical(opened(copy), opened(repository))


# --- wherever they are computed ----------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    swept(["synchronous", "threads", "processes"], but=["synchronous", "threads"]),
)
def test_dask_computes_once_and_the_error_arrives(tmp_path: Path, scheduler: str) -> None:
    def counted(block: Any) -> Any:
        (tmp_path / f"{block[0]:.0f}").touch(exist_ok=False)
        return block

    repository = zm.create(tmp_path / "r")
    how = {"t": {**KELVIN, "chunks": (2,)}}
    values = da.arange(250.0, 290.0, 5.0, chunks=2).map_blocks(counted, meta=np.empty(0))
    lazy = xr.Dataset({"t": ("x", values)}, {"x": np.arange(8) * 10})
    with dask.config.set(scheduler=scheduler, num_workers=2):
        zm.write(lazy, repository, message="each block once", encoding=how)
        assert opened(repository).t[-1] == 285.0
        hot = lazy.assign(t=lazy.t * 0 + np.where(lazy.x == 50, 999.0, 280.0))
        for path in tmp_path.glob("2*"):
            path.unlink()
        text = refused(repository, hot, "999", mode="r+")
    assert "999 at x=50 (position 5) would be read back as 278.104" in text


def test_what_is_loaded_late_is_loaded_once() -> None:
    """As from a file that is opened without dask."""

    class Late(BackendArray):
        shape, dtype, loads = (3,), np.dtype("f8"), 0

        def __getitem__(self, key: Any) -> Any:
            self.loads += 1
            return np.array([250.0, 260.0, 330.0])[key.tuple]

    late = Late()
    ds = xr.Dataset({"t": ("x", LazilyIndexedArray(late))})
    repository = zm.create(MemoryStorage())
    zm.write(ds, repository, message="wide", encoding={"t": {"dtype": "f4", "_FillValue": 0.0}})
    assert late.loads == 1
    refused(repository, ds, r"330 at x\[2\]", encoding={"t": KELVIN}, mode="w")


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda values: values,
    "columns": np.asfortranarray,
    "every other": lambda values: np.repeat(values, 2, axis=2)[:, :, ::2],
    "backwards": lambda values: values[::-1, :, ::-1].copy()[::-1, :, ::-1],
    "transposed": lambda values: np.ascontiguousarray(values.T).T,
    "read-only": lambda values: np.broadcast_to(values[:1], values.shape),
    "dask": lambda values: da.from_array(values, chunks=(2, 5, 4)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("given", "least", "encoding", "unfit"),
    [
        ("f8", 245.0, {**KELVIN, "_FillValue": 3000}, 278.0),
        ("f4", 240.0, {"dtype": "u1", "scale_factor": 0.5, "add_offset": 230.0}, np.nan),
        ("f4", 60.0, {"dtype": "i1", "_Unsigned": "true", "_FillValue": -3}, 253.0),
        ("f8", -5.0, {"dtype": ">i4", "scale_factor": 0.01, "missing_value": -1}, 1e300),
        ("f8", -5.0, {"dtype": "i4", "_FillValue": -9}, 0.5),
        ("f8", -5.0, {"dtype": "f4", "_FillValue": 1e20}, 1e300),
        ("f4", -5.0, {"dtype": "f4", "_FillValue": 0.5}, 0.5),
        ("i8", -5, {"dtype": "i2", "_FillValue": -9}, 2**40),
        ("i8", -5, {"dtype": "f4"}, 2**24 + 1),
        ("i4", 60, {"dtype": "i2", "scale_factor": 2, "add_offset": 10}, 2**20),
    ],
)
def test_parts_are_stored_as_xarray_stores_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    least: float,
    encoding: dict[str, Any],
    unfit: float,
    layout: str,
) -> None:
    """And a value that does not fit is found wherever it is."""
    monkeypatch.setattr("zarr_manifests.xarray.fit._PART", 7)
    values = (np.arange(120).reshape(4, 5, 6) % 50 // 2 * 2 + least).astype(given)
    if "_FillValue" in encoding and given[0] == "f":
        values[:, 2] = np.nan
    how = {"t": {**encoding, "chunks": (2, 5, 4)}}
    ds = xr.Dataset({"t": (("x", "y", "z"), LAYOUTS[layout](values))})
    own, repository = MemoryStore(), zm.create(MemoryStorage())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # xarray's, that there may be NaN
        ds.to_zarr(own, encoding=how, consolidated=False)
        for mode in (None, "a"):
            zm.write(ds, repository, message="what fits", encoding=None if mode else how, mode=mode)
            expected = zarr.open_array(own, path="t")
            found = zarr.open_array(repository.readonly_session().store, path="t", mode="r")
            assert found.metadata == expected.metadata
            np.testing.assert_array_equal(found[:], expected[:])
        values[0 if layout == "read-only" else 3, 4, 1] = unfit
        bad = ds.assign(t=(ds.t.dims, LAYOUTS[layout](values)))
        refused(repository, bad, r"position [03], 4, 1\)", mode="a")


def test_a_value_far_behind_is_told_with_its_place() -> None:
    values = np.full((4, 2**16), 280.0, "f4")
    values[0, 5] = 275.0  # next to what stands for NaN: looked at, and fine
    values[3, 2**16 - 2] = 330.0
    ds = xr.Dataset({"t": (("x", "y"), values)})
    with pytest.raises(InvalidArgumentError, match=rf"330 at .*\(position 3, {2**16 - 2}\)"):
        zm.write(ds, MemoryStorage(), message="m", encoding={"t": {**KELVIN, "_FillValue": 1}})


def test_without_a_check_xarray_does_what_it_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        repository = written([250.0, 330.0], KELVIN, check=False)
    assert opened(repository).t[1] == pytest.approx(264.464)
    other = field([280.0]).assign(t=("x", [280.0], {"units": "degC"})).assign_coords(x=[1])
    there = zm.create(MemoryStorage())
    first = field([1.0]).assign(t=("x", [1.0], {"units": "K"}))
    zm.write(first, there, message="kelvins")
    refused(there, other, "degC", append_dim="x")
    zm.write(other, there, message="as you like", append_dim="x", check=False)


@pytest.mark.parametrize("unit", ["s", "us"])
def test_times_that_nanoseconds_have_no_room_for(unit: str) -> None:
    time = np.array(["2900-01-01", "2900-01-02"], f"M8[{unit}]")
    how: dict[str, Any] = {"units": "seconds since 2000-01-01", "dtype": "i8"}
    repository = zm.create(MemoryStorage())
    first = xr.Dataset(coords={"time": time[:1]})
    zm.write(first, repository, message="first", encoding={"time": how})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of xarray's: it decodes them as cftime's
        more = xr.Dataset(coords={"time": time[1:]})
        zm.write(more, repository, message="more", append_dim="time")
        found = opened(repository).time.values.astype(str).tolist()
    assert found == ["2900-01-01 00:00:00", "2900-01-02 00:00:00"]


def test_what_check_can_be() -> None:
    repository = zm.create(MemoryStorage())
    refused(repository, field([1.0]), "check must be", check="all")


# --- neither too much nor too little -----------------------------------------------------------


def xarrays_own(values: Any, encoding: Mapping[str, Any]) -> Any:
    """What xarray reads of what it has written."""
    store = MemoryStore()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        field(values).to_zarr(store, encoding={"t": dict(encoding)}, consolidated=False)
        return xr.open_zarr(store, consolidated=False).t.values


def same(values: Any, read: Any, step: float, precision: float) -> Any:
    """Which of the values are the same, but for a step or the last digits."""
    with np.errstate(all="ignore"):
        off = abs(read.astype("f8") - values)
        near = np.isfinite(values) & (off <= step * 0.500001 + precision * abs(values))
    return np.where(np.isnan(values), np.isnan(read), near | (read == values))


def refusal(values: Any, encoding: Mapping[str, Any]) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written(values, encoding)
    except InvalidArgumentError as error:
        return str(error)
    return None


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2"])
@pytest.mark.parametrize("scale", [0.25, -0.01])
@pytest.mark.parametrize("offset", [0.0, 275.0])
@pytest.mark.parametrize("wide", ["f4", "f8"])
@pytest.mark.parametrize("missing", [None, "least", "greatest", 17])
def test_every_value_that_is_kept_fits(
    dtype: str, scale: float, offset: float, wide: str, missing: Any
) -> None:
    info = np.iinfo(dtype)
    codes = np.arange(info.min, info.max + 1)
    fill = {"least": int(info.min), "greatest": int(info.max)}.get(missing, missing)
    encoding = {"dtype": dtype, "scale_factor": scale, "add_offset": offset, "_FillValue": fill}
    fits = (codes * scale + offset)[codes != fill].astype(wide)
    assert refusal(fits, encoding) is None
    inner = fits[:-1] + (np.diff(fits) * 0.4).astype(wide)
    if missing != 17:
        assert refusal(inner, encoding) is None
    for code in (info.min - 1, info.max + 1, info.max + 700, fill):
        if code is not None:
            off = np.append(fits[:3], np.array(code * scale + offset, wide))
            assert "position 3" in (refusal(off, encoding) or "")


numbers = st.one_of(
    st.floats(-400, 400, width=32),
    st.floats(width=32),
    st.integers(-300, 300).map(float),
    st.sampled_from([np.nan, 127.0, 127.5, 128.0, -128.0, -128.5, 12.7, 12.75, -12.85]),
)


@settings(max_examples=examples(50), deadline=None)
@given(
    values=st.lists(numbers, min_size=1, max_size=6),
    wide=st.sampled_from(["f4", "f8"]),
    dtype=st.sampled_from(["i1", "u1", "i2", "i4", "f2", "f4", "f8"]),
    scale=st.sampled_from([None, 0.1, -0.5, 2.0]),
    offset=st.sampled_from([None, 0.0, 100.0]),
    fill=st.sampled_from([None, -1, 0, 100, 127]),
)
def test_what_is_refused_and_what_is_not(
    values: list[float], wide: str, dtype: str, scale: Any, offset: Any, fill: Any
) -> None:
    assume(not (dtype == "u1" and fill == -1))  # numpy itself refuses that
    given = np.array(values, wide)
    how = {"dtype": dtype, "scale_factor": scale, "add_offset": offset, "_FillValue": fill}
    encoding = {key: value for key, value in how.items() if value is not None}
    packed = scale is not None or offset is not None
    whole = np.dtype(dtype).kind in "iu"
    least = 0.0 if not packed else 1.0
    if not whole:
        least = 2 * float(np.finfo(dtype).smallest_subnormal)
    step = abs(scale or 1.0) * least
    precision = 0.0
    if packed or not whole:
        types = [t for t in (wide, dtype) if t[0] == "f"]
        precision = (16 if packed else 0.5) * max(float(np.finfo(t).eps) for t in types)
    slack = precision * abs(offset or 0.0)
    expected = same(given, xarrays_own(given, encoding), step + 2 * slack, precision)
    found = refusal(given, encoding)
    assert (found is None) == expected.all(), (found, expected)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("given", ["f4", "f8"])
@pytest.mark.parametrize("statistics", [False, True])
def test_floats_equal_to_the_fill_value_amid_others(
    given: str, statistics: bool, lazy: bool
) -> None:
    how = {"dtype": "f4", "_FillValue": np.float32(2.0), "chunks": (2,)}
    repository = zm.create(MemoryStorage())
    for values in ([1.0, 2.0, 3.0], [1.0, 3.0, 2.0, np.nan]):
        ds = field(np.array(values, given))
        ds = ds.chunk(x=2) if lazy else ds
        with pytest.raises(InvalidArgumentError, match=r"2 at x=.* would be read back as nan"):
            zm.write(ds, repository, message="m", encoding={"t": how}, statistics=statistics)
    fine = field(np.array([1.0, np.nan, 3.0, np.nan], given))
    fine = fine.chunk(x=2) if lazy else fine
    zm.write(fine, repository, message="m", encoding={"t": how}, statistics=statistics)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("values", [[1.0, 1e300], [-1e300, np.nan], [1.0, 2.0, 3.0, 1e39]])
def test_floats_beyond_the_range_of_narrower_ones(values: list[float], lazy: bool) -> None:
    repository = zm.create(MemoryStorage())
    how = {"t": {"dtype": "f4", "chunks": (2,)}}
    ds, fine = field(values), field([1.0, np.inf, np.nan])
    if lazy:
        ds, fine = ds.chunk(x=2), fine.chunk(x=2)
    with pytest.raises(InvalidArgumentError, match=r"would be read back as -?inf"):
        zm.write(ds, repository, message="m", encoding=how)
    zm.write(fine, repository, message="m", encoding=how)


def test_the_place_of_a_lazy_value_is_that_in_the_dataset() -> None:
    repository = zm.create(MemoryStorage())
    how = {"t": {"dtype": "f4", "chunks": (2,)}}
    zm.write(field([1.0, 2.0, 3.0, 4.0]), repository, message="m", encoding=how)
    more = field([5.0, 6.0, 7.0, 1e300], 4).chunk(x=2)
    with pytest.raises(InvalidArgumentError, match=r"1e\+300 at x.*\(position 3\)"):
        zm.write(more, repository, message="m", append_dim="x")


# --- whatever is accepted is what a reader gets ------------------------------------------------

_EDGES = [0.0, 1.0, -1.5, 1e-300, 1e-50, 1e-7, 0.3, 65504.0, 1e39, 1e300, np.nan, np.inf, -np.inf]
_MOMENTS = ["2000-01-01", "2000-01-03T00:00:00.5", "1677-09-22", "2262-04-11", "2292-01-01", "NaT"]


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    kind = draw(
        st.sampled_from(
            ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u8", "b1", "M8", "m8", "O", "U", "S"]
        )
    )
    some = {"min_size": 1, "max_size": 4}
    if kind[0] == "f":
        with np.errstate(all="ignore"):
            return np.array(draw(st.lists(st.sampled_from(_EDGES), **some)), kind)
    if kind[0] in "iu":
        info = np.iinfo(kind)
        edges = [int(info.min), int(info.max), 0, 1, 7, min(2**53 + 1, int(info.max))]
        return np.array(draw(st.lists(st.sampled_from(edges), **some)), kind)
    if kind == "b1":
        return np.array(draw(st.lists(st.booleans(), **some)))
    unit = draw(st.sampled_from(["s", "ms", "us", "ns"]))
    moments = np.array(draw(st.lists(st.sampled_from(_MOMENTS), **some)), f"M8[{unit}]")
    if kind == "M8":
        return moments
    if kind == "m8":
        return moments.view("i8").view(f"m8[{unit}]")
    texts = draw(st.lists(st.sampled_from(["a", "nan", "", "abc", "7"]), **some))
    if kind == "O":
        return np.array([*texts, draw(st.sampled_from([None, "a", np.nan]))], object)
    return np.array(texts, kind)


encodings = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(
            ["i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8", "S2", "U2", "S1"]
        ),
        "scale_factor": st.sampled_from([0.5, 2, -0.01]),
        "add_offset": st.sampled_from([0.0, 275.0, 3]),
        "_FillValue": st.sampled_from([0, -1, 7, 100]),
        "units": st.sampled_from(
            [
                "days since 2000-01-01",
                "milliseconds since 2000-01-01",
                "nanoseconds since 1990-01-01",
                "days",
                "hours",
            ]
        ),
    },
)  # fmt: skip


def is_what_was_given(given: Any, read: Any, how: Mapping[str, Any], stored: Any) -> bool:
    """Whether one value is read back as it was given, as far as its encoding asks for it."""
    if given is None or given != given:
        return read is None or read != read or (not isinstance(given, np.generic) and read == "")
    if isinstance(given, np.datetime64 | np.timedelta64):
        if not isinstance(read, np.datetime64 | np.timedelta64):
            return str(given.astype("M8[s]")) == str(read.isoformat(timespec="seconds"))
        unit = "M8[us]" if isinstance(given, np.datetime64) else "m8[us]"
        return bool(abs(given.astype(unit) - read.astype(unit)) < np.timedelta64(1, "s"))
    if not isinstance(given, np.number | np.bool_) or not isinstance(read, np.number | np.bool_):
        return bool(given == read)
    if given == read:
        return True
    if isinstance(given, np.integer) and "scale_factor" not in how and "add_offset" not in how:
        return int(given) == float(read) if np.isfinite(read) else False
    one, other = float(given), float(read)
    packed = "scale_factor" in how or "add_offset" in how
    if packed:
        step = abs(float(how.get("scale_factor", 1)))
        floats = [
            np.dtype(kind) for kind in (given.dtype, stored, "f4") if np.dtype(kind).kind == "f"
        ]
        error = 8 * max(float(np.finfo(kind).eps) for kind in floats)
        extent = step * 2.0 ** (8 * stored.itemsize) if stored.kind in "iu" else abs(one)
        return abs(one - other) <= step * 0.51 + error * (extent + 600)
    if stored.kind not in "fc":
        return False
    info = np.finfo(stored)
    return abs(one - other) <= abs(one) * float(info.eps) + float(info.tiny)


NUMBERS = itertools.count()


def put_rows(repository: zm.Repository, values: Any) -> None:
    """Write values to the first positions, as rows of a data frame."""
    listed = values.tolist() if values.dtype.kind in "OUS" else values
    column = pa.array(listed, from_pandas=values.dtype.kind == "O")
    table = pa.table({"x": np.arange(len(values)), "t": column})
    write_table(repository, table, target="/", mode="overwrite-region", dims=["x"])


def test_rows_of_a_data_frame_are_written() -> None:
    repository = zm.create(MemoryStorage("fit-rows"))
    zm.write(xr.Dataset({"t": ("x", [1.0, 2.0])}), repository, message="first")
    put_rows(repository, np.array([7.0]))
    assert opened(repository).t.values.tolist() == [7.0, 2.0]


@settings(max_examples=examples(300), deadline=None)
@given(
    values=arrays(),
    how=encodings,
    more=arrays(),
    then=st.sampled_from(["memory", "dask", "rows"]),
    lazy=st.booleans(),
)
def test_what_is_accepted_is_what_a_reader_gets(
    values: Any, how: Any, more: Any, then: str, lazy: bool
) -> None:
    repository = zm.create(MemoryStorage(f"fit-{next(NUMBERS)}"))
    first, second = (xr.Dataset({"t": ("x", part)}) for part in (values, more))
    # Also errors of xarray, which come before anything is committed.
    refusals = ValueError, TypeError, KeyError, OverflowError, NotImplementedError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            first = first.chunk(x=2) if lazy else first
            zm.write(first, repository, message="m", encoding={"t": how})
        except refusals:
            return
        expected = values.tolist() if values.dtype == object else list(values)
        try:
            if then == "rows":
                given_rows = more[: len(values)]
                with suppress(ManifestsError):
                    put_rows(repository, given_rows)
                    expected[: len(given_rows)] = given_rows
            else:
                second = second.chunk(x=2) if then == "dask" else second
                zm.write(second, repository, message="m", append_dim="x")
                expected += more.tolist() if more.dtype == object else list(more)
        except refusals:
            pass  # nothing is committed
        read = opened(repository).t.values
        stored = zarr.open_array(repository.readonly_session().store, path="t").dtype
    assert len(read) == len(expected)
    for given_one, read_one in zip(expected, read, strict=True):
        assert is_what_was_given(given_one, read_one, how, stored), (given_one, read_one)


@pytest.mark.parametrize(
    ("first", "more", "then"),
    [
        ("NaT", "2300-01-01", "memory"),
        ("NaT", "2300-01-01", "dask"),
        ("2300-01-01", "NaT", "memory"),
    ],
)
# Of dates that numpy has no nanoseconds for; threads of a write that failed set filters, too.
@pytest.mark.filterwarnings("ignore::xarray.SerializationWarning")
def test_dates_that_xarray_does_not_open_beside_missing_ones(
    first: str, more: str, then: str
) -> None:
    repository = written(np.array([first, "2000-01-01"], "M8[s]"))
    ds = field(np.array([more], "M8[s]"), start=2)
    with pytest.raises(InvalidArgumentError, match="could not be read back"):
        zm.write(ds.chunk() if then == "dask" else ds, repository, message="m", append_dim="x")
    both = xr.Dataset({"t": ("x", np.array([first, more], "M8[s]"))}).chunk(x=1)
    with pytest.raises(InvalidArgumentError, match="could not be read back"):
        zm.write(both, zm.create(MemoryStorage()), message="m")
    assert opened(repository).t.size == 2


@pytest.mark.parametrize("lazy", [False, True])
def test_a_whole_scale_that_xarray_does_not_open(lazy: bool) -> None:
    ds = field([2.0, np.nan, 4.0])
    how = {"dtype": "i2", "scale_factor": 2, "_FillValue": -1}
    refused(
        zm.create(MemoryStorage()),
        ds.chunk() if lazy else ds,
        "could not be read back, for ValueError",
        encoding={"t": how},
    )


@pytest.mark.parametrize("lazy", [False, True])
def test_a_number_is_none_of_another_sign_that_is_read_as_a_float(lazy: bool) -> None:
    repository = written(np.int8([-128]), {"_FillValue": 0})  # so they are read as floats
    ds = field(np.uint8([255]), start=1)
    refused(repository, ds.chunk() if lazy else ds, "255 at .* as -1")


# --- what attributes, dimensions and labels make of values -------------------------------------

TIMES = np.array(["1970-01-01T00:00:00.000000001", "2000-01-05"], "M8[ns]")


@pytest.mark.parametrize(
    ("values", "attributes"),
    [
        (np.array([1.0, 2.0]), {"units": "days since garbage"}),
        (np.array([1, 2]), {"units": "days since 2000-01-01", "calendar": "nonsense"}),
        (np.array(["a", "b"], object), {"units": "days since 2000-01-01"}),
        (np.array([True, False]), {"units": "days since 2000-01-01"}),
        (np.array([10**18, 3]), {"units": "days since 2000-01-01"}),
        (np.array([1.0, np.inf]), {"units": "days since 2000-01-01"}),
        (np.array([1.0, 2.0]), {"scale_factor": "0.1"}),
        (np.array([1.0, 2.0]), {"_Encoding": "utf-8"}),
        (TIMES, {"dtype": "bool"}),
        (TIMES, {"missing_value": [0, 1]}),
        (np.array([1, 2], "m8[s]"), {"_FillValue": 2}),
        (np.array(["a", ""], object), {"dtype": "bool"}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_attributes_that_a_reader_makes_something_else_of(values: Any, attributes: Any) -> None:
    ds = xr.Dataset({"t": ("x", values, attributes)})
    refused(zm.create(MemoryStorage()), ds, "'t'.*(read back|do not fit)", mode="a")


@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("values", [np.array([[0.0, 1.0], [1.0, 2.0]]), np.ones((2, 2), bool)])
def test_numbers_are_no_bounds_of_times(values: Any, then: bool) -> None:
    """Bounds without units take those of their times."""
    times = np.array(["2000-01-01", "2000-01-02"], "M8[ns]")
    time = xr.Dataset(coords={"time": ("time", times, {"bounds": "time_bnds"})})
    bounds = xr.Dataset({"time_bnds": (("time", "nv"), values)})
    repository = zm.create(MemoryStorage())
    if then:
        zm.write(time, repository, message="times")
    refused(repository, bounds if then else time.merge(bounds), "'time_bnds'", mode="a")


def test_times_make_no_times_of_numbers_that_are_there() -> None:
    repository = zm.create(MemoryStorage())
    numbers = xr.Dataset({"time_bnds": (("time", "nv"), [[0.0, 1.0], [1.0, 2.0]])})
    zm.write(numbers, repository, message="numbers")
    times = np.array(["2000-01-01", "2000-01-02"], "M8[ns]")
    time = xr.Dataset(coords={"time": ("time", times, {"bounds": "time_bnds"})})
    refused(repository, time, "'time_bnds' has their bounds", mode="a")
    assert opened(repository).time_bnds.dtype == np.float64


@pytest.mark.parametrize("lazy", [False, True])
def test_whole_numbers_are_packed_with_an_offset(lazy: bool) -> None:
    """Xarray subtracts the offset in the type of the numbers, and fails."""
    repository = zm.create(MemoryStorage())
    first = xr.Dataset({"t": ("x", np.array([280, 281], "u2"))})
    zm.write(first, repository, message="first", encoding={"t": KELVIN})
    more = first.chunk() if lazy else first
    zm.write(more, repository, message="more", append_dim="x")
    np.testing.assert_allclose(opened(repository).t, [280, 281, 280, 281], atol=0.01)
    refused(repository, more * 100, "'t' do not fit", append_dim="x")


@pytest.mark.parametrize(
    ("new", "how"),
    [
        (xr.Dataset({"w": ("x", [1.0, 2.0])}), {"mode": "a"}),
        (xr.Dataset(coords={"x": [1, 2]}), {"mode": "a"}),
        (xr.Dataset({"x": ((), 5)}), {"mode": "a"}),
        (xr.Dataset({"w": (("s",), [1.0])}), {"mode": "a"}),
        (xr.Dataset({"w": ("x", [1.0, 2.0])}), {"mode": "a", "region": {"x": slice(0, 2)}}),
        (xr.Dataset({"v": ("t", [1.0]), "w": ("x", [1.0, 2.0])}), {"append_dim": "t"}),
    ],
)
def test_a_dimension_of_a_group_has_one_length(new: xr.Dataset, how: Any) -> None:
    first = xr.Dataset({"u": ("x", [1.0, 2.0, 3.0]), "v": ("t", [1.0]), "s": ((), 1)})
    repository = zm.create(MemoryStorage())
    zm.write(first, repository, message="first")
    refused(repository, new, "could not be opened as a dataset", **how)


@pytest.mark.parametrize("on_existing", ["replace", "skip"])
@pytest.mark.parametrize(
    ("there", "given_label"),
    [
        (np.array([1, 2]), np.array([1.4])),
        (np.array([1, 2], "i1"), np.array([257])),
        (np.array([True, False]), np.array([2])),
        (np.array(["1", "2"], object), np.array([1])),
        (np.array([-1, 2]), np.array([2**64 - 1], "u8")),
    ],
)
def test_a_label_that_does_not_fit_is_none_that_is_there(
    there: Any, given_label: Any, on_existing: str
) -> None:
    repository = zm.create(MemoryStorage())
    zm.write(xr.Dataset({"v": ("x", [1.0, 2.0])}, {"x": there}), repository, message="first")
    new = xr.Dataset({"v": ("x", [9.0])}, {"x": given_label})
    how: dict[str, Any] = {"append_dim": "x", "on_existing": on_existing}
    refused(repository, new, "values of 'x' do not fit", **how)


@pytest.mark.parametrize(
    ("there", "other"),
    [
        (np.array([7000001, 7000002]), np.array([7000002, 7000001])),
        (TIMES[1:] + np.arange(2) * np.timedelta64(10, "m"), None),
        (np.array(["a", "b"], object), np.array(["a", "c"], object)),
    ],
)
def test_labels_of_other_axes_are_the_same(there: Any, other: Any) -> None:
    repository = zm.create(MemoryStorage())
    other = there + np.timedelta64(10, "m") if other is None else other
    first = xr.Dataset({"v": (("t", "s"), [[1.0, 2.0]])}, {"t": [0], "s": there})
    how = {"s": {"units": "seconds since 1970-01-01"}} if there.dtype.kind == "M" else None
    zm.write(first, repository, message="first", encoding=how)
    new = first.assign_coords(t=[1])
    zm.write(new, repository, message="more", append_dim="t")
    new = new.assign_coords(t=[2], s=other)
    refused(repository, new, "'s' differ from the existing ones", append_dim="t")


def test_labels_that_are_rounded_in_another_way_are_the_same() -> None:
    first = xr.Dataset({"v": (("t", "s"), [[1.0, 2.0]])}, {"t": [0], "s": [0.0, 1.0]})
    repository = zm.create(MemoryStorage())
    zm.write(first, repository, message="first")
    new = first.assign_coords(t=[1], s=[1e-17, 1.0])
    zm.write(new, repository, message="more", append_dim="t")
    assert opened(repository).sizes["t"] == 2


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float64])
def test_blocks_are_of_the_type_that_dask_was_told(dtype: Any) -> None:
    def fault(block: Any) -> Any:
        return block + (0.5 if dtype is np.int32 else 1e300 if dtype is np.float32 else 1j)

    x = xr.DataArray(da.arange(6.0, chunks=2), dims="x")
    told = xr.apply_ufunc(fault, x, dask="parallelized", output_dtypes=[dtype])
    with pytest.raises(InvalidArgumentError, match="'t' is computed as"):
        zm.write(told.to_dataset(name="t"), MemoryStorage(), message="m")


@pytest.mark.parametrize("append", [False, True])
def test_an_imaginary_part_is_no_error_of_a_packing(append: bool) -> None:
    how = {"dtype": "i4", "scale_factor": 1.0, "_FillValue": -9}
    repository = written([1.0], how) if append else zm.create(MemoryStorage())
    given = field(np.array([5 + 3000j], "c8"), start=1)
    options: dict[str, Any] = {"append_dim": "x"} if append else {"encoding": {"t": how}}
    refused(repository, given, r"5\+3000j", **options)


def test_numbers_of_no_calendar_are_of_the_standard_one() -> None:
    repository = zm.create(MemoryStorage())
    days = {"t": {"units": "days since 2000-01-01"}}
    zm.write(field([cftime.DatetimeNoLeap(2000, 1, 1)]), repository, message="m", encoding=days)
    new = field([366], start=1)
    new.t.attrs["units"] = "days since 2000-01-01"
    refused(repository, new, "'t' has the calendar 'standard'")


def test_a_name_with_a_backslash_is_a_path_for_zarr() -> None:
    for name in ("a\\b", "a\\", "\\"):
        ds = xr.Dataset({name: ("x", [1.0])})
        refused(zm.create(MemoryStorage()), ds, "cannot be the name of an array", mode="a")


def test_an_append_beside_a_coordinate_of_no_labels() -> None:
    first = xr.Dataset({"v": (("t", "s"), np.empty((1, 0)))}, {"t": [0], "s": np.empty(0)})
    repository = zm.create(MemoryStorage())
    zm.write(first, repository, message="first")
    zm.write(first.assign_coords(t=[1]), repository, message="more", append_dim="t")
    assert opened(repository).sizes == {"t": 2, "s": 0}
