"""Values that would be read back as others are refused, wherever they are computed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from looking import opened
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage.memory import MemoryStorage

NOLEAP = {"calendar": "noleap", "dtype": "f8"}
KELVIN = {"dtype": "i2", "scale_factor": 0.001, "add_offset": 275.0, "_FillValue": -32768}


def field(values: Any, start: int = 0) -> xr.Dataset:
    values = np.asarray(values)
    return xr.Dataset({"t": ("x", values)}, {"x": np.arange(start, start + len(values)) * 10})


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


# --- first writes ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        (np.float64([250.0, np.nan, 280.123]), KELVIN),
        (np.float64([0.0, 254.0, np.nan]), {"dtype": "i1", "_Unsigned": "true", "_FillValue": -1}),
        (np.float64([1.0, np.nan]), {"dtype": "i8", "_FillValue": np.int64(-(2**63) + 2)}),
        (np.array(["2000-01-01T06"], "M8[ns]"), {"units": "days since 1990-01-01", **NOLEAP}),
        (np.array([b"abc", b"de"]), {"dtype": "S1"}),  # as xarray has it from files
        (np.array(["a", None], object), {}),
    ],
)
def test_first_values_that_fit(values: Any, encoding: dict[str, Any]) -> None:
    assert opened(written(values, encoding)).t.size == len(values)


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.filterwarnings("ignore::xarray.SerializationWarning")
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        (np.float64([250.0, 310.0]), KELVIN),
        (np.int64([1, 2**53 + 1]), {"dtype": "f8"}),
        (np.array(["ab", "abc"]), {"dtype": "U2"}),
        (
            np.array(["2000-01-01T06:10"], "M8[ns]"),
            {"units": "days since 0001-01-01", "dtype": "f4"},
        ),
    ],
)
def test_first_values_that_do_not_fit(values: Any, encoding: dict[str, Any], lazy: bool) -> None:
    ds = field(values)
    how: Any = {"encoding": {"t": encoding}}
    refused(zm.create(MemoryStorage()), ds.chunk(x=1) if lazy else ds, "read back", **how)


def test_a_number_without_dimensions_does_not_fit() -> None:
    ds = xr.Dataset({"t": ((), 310.0, {}, KELVIN)})
    with pytest.raises(InvalidArgumentError, match="310 would be read back as"):
        zm.write(ds, MemoryStorage(), message="scalar")


def test_blocks_that_are_no_numbers_as_dask_says_are_stored_as_these() -> None:
    said = da.from_array(np.arange(8.0), chunks=4)
    objects = said.map_blocks(lambda block: block.astype(object), dtype="f8", meta=np.empty(0))
    storage = MemoryStorage()
    zm.write(
        xr.Dataset({"t": ("x", objects)}), storage, message="m", encoding={"t": {"dtype": "f4"}}
    )
    assert xr.open_zarr(zm.open(storage).readonly_session().store).t.values.tolist() == [*range(8)]


@pytest.mark.parametrize("lazy", [False, True])
def test_what_xarray_cannot_encode_is_said_of_the_variable(lazy: bool) -> None:
    ds = xr.Dataset({"t": ("x", [1, 2, 3], {}, {"dtype": "i2", "scale_factor": 2})})
    refused(zm.create(MemoryStorage()), ds.chunk() if lazy else ds, "'t' could not be read back")


@pytest.mark.parametrize("lazy", [False, True])
def test_a_missing_text_is_none_of_the_texts_that_are_there(lazy: bool) -> None:
    repository = written(np.array(["a", "b"], object))
    for missing in (None, np.nan):
        more = field(np.array(["c", missing], object), start=2)
        refused(repository, more.chunk() if lazy else more, "at x=30 .* read back as 'nan'")
    more = field(np.array(["nan", "c"], object), start=2)
    zm.write(more.chunk() if lazy else more, repository, append_dim="x")
    assert opened(repository).t.values.tolist() == ["a", "b", "nan", "c"]


# --- wherever they are computed ----------------------------------------------------------------


def test_dask_computes_once_and_the_error_arrives(tmp_path: Path) -> None:
    def counted(block: Any) -> Any:
        (tmp_path / f"{block[0]:.0f}").touch(exist_ok=False)
        return block

    repository = zm.create(tmp_path / "r")
    values = da.arange(250.0, 290.0, 5.0, chunks=2).map_blocks(counted, meta=np.empty(0))
    lazy = xr.Dataset({"t": ("x", values)}, {"x": np.arange(8) * 10})
    with dask.config.set(scheduler="threads", num_workers=2):
        zm.write(lazy, repository, encoding={"t": {**KELVIN, "chunks": (2,)}})
        assert opened(repository).t[-1] == 285.0
        hot = lazy.assign(t=lazy.t * 0 + np.where(lazy.x == 50, 999.0, 280.0))
        for path in tmp_path.glob("2*"):
            path.unlink()
        text = refused(repository, hot, "999", mode="r+")
    assert "999 at x=50" in text


# --- whatever is accepted is what a reader gets ------------------------------------------------

MOMENTS = ["2000-01-01", "2000-01-03T00:00:00.5", "1677-09-22", "2262-04-11", "2292-01-01", "NaT"]
FLOATS = [0.0, -1.5, 0.3, 65504.0, np.nan, -np.inf]
VALUES: dict[str, list[Any]] = {
    "f4": FLOATS,
    "f8": [*FLOATS, 1e-300, 1e39],
    "u1": [0, 1, 7, 255],
    "i8": [0, 7, -(2**63), 2**53 + 1],
    "b1": [False, True],
    "M8[s]": MOMENTS,
    "M8[ns]": MOMENTS,
    "m8[ms]": [0, 1, 86_400_000, "NaT"],
    "O": ["a", "nan", "", "abc", None],
    "U": ["a", "nan", "", "abc"],
}
BESIDE_MISSING = np.array(["NaT", "2000-01-01"], "M8[ns]")
FAR = np.array(["1677-09-22"], "M8[ns]")  # nanoseconds reach it from 1970, and not from 2000
ARRAYS = st.sampled_from(sorted(VALUES)).flatmap(
    lambda kind: st.lists(st.sampled_from(VALUES[kind]), min_size=1, max_size=4).map(
        lambda cells: np.array(cells, kind)
    )
)


def is_what_was_given(given: Any, read: Any, how: Mapping[str, Any], stored: Any) -> bool:
    if given is None or given != given:
        return read is None or read != read or (given is None and read == "")
    if "scale_factor" in how and isinstance(given, np.timedelta64):  # a step is of days at most
        half = np.timedelta64(round(0.51 * 86_400 * abs(how["scale_factor"])), "s")
        return bool(abs(given - read) <= half)
    if "scale_factor" in how and given != read and isinstance(given, np.number):
        step = abs(how["scale_factor"])
        extent = max(abs(float(given)), step * 2.0 ** (8 * stored.itemsize))
        return bool(abs(float(given) - float(read)) <= 0.51 * step + 1e-5 * extent)
    if isinstance(given, np.datetime64) and not isinstance(read, np.datetime64):  # of cftime
        return str(given.astype("M8[s]")) == read.isoformat(timespec="seconds")
    if isinstance(given, np.datetime64 | np.timedelta64):
        return bool(abs(given - read) < np.timedelta64(1, "s"))
    if isinstance(given, np.floating) and stored.kind == "f" and given != read:
        info = np.finfo(stored)
        return bool(abs(float(given) - float(read)) <= abs(float(given)) * info.eps + info.tiny)
    return bool(given == read)


@settings(max_examples=examples(150), deadline=None)
@given(
    values=ARRAYS,
    more=ARRAYS,
    how=st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["i1", "i8", "u1", "f2", "f4", "f8", "S2", "U2"]),
            "_FillValue": st.sampled_from([0, -1, 100]),
            "scale_factor": st.sampled_from([0.5, -0.01]),
            "units": st.sampled_from(
                ["days since 2000-01-01", "nanoseconds since 1990-01-01", "hours"]
            ),
        },
    ),
    lazy=st.booleans(),
)
@example(BESIDE_MISSING, FAR, {}, False)
@example(BESIDE_MISSING, FAR, {}, True)
def test_what_is_accepted_is_what_a_reader_gets(
    values: Any, more: Any, how: Any, lazy: bool
) -> None:
    repository = zm.create(MemoryStorage())
    expected: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part, options in ((values, {"encoding": {"t": how}}), (more, {"append_dim": "x"})):
            ds = xr.Dataset({"t": ("x", part)})
            try:
                zm.write(ds.chunk(x=2) if lazy else ds, repository, **options)
            except (ValueError, TypeError, KeyError, OverflowError, NotImplementedError):
                break  # errors of xarray, too; nothing of it is committed
            expected += part.tolist() if part.dtype == object else list(part)
        if not expected:
            return
        read = opened(repository).t.values
        stored = zarr.open_array(repository.readonly_session().store, path="t").dtype
    for given_one, read_one in zip(expected, read, strict=True):
        assert is_what_was_given(given_one, read_one, how, stored), (given_one, read_one)


@pytest.mark.parametrize("lazy", [False, True])
# Of dates that numpy has no nanoseconds for; threads of a write that failed set filters, too.
@pytest.mark.filterwarnings("ignore::xarray.SerializationWarning")
def test_dates_that_xarray_does_not_open_beside_missing_ones(lazy: bool) -> None:
    repository = written(np.array(["NaT", "2000-01-01"], "M8[s]"))
    ds = field(np.array(["2300-01-01"], "M8[s]"), start=2)
    refused(repository, ds.chunk() if lazy else ds, "could not be read back")
    assert opened(repository).t.size == 2


def test_an_append_with_rounded_coordinates_leaves_the_stored_ones() -> None:
    lat = np.array([89.9, 79.8, 69.7])
    repository = zm.create(MemoryStorage())
    day = xr.Dataset({"t": (("time", "lat"), np.ones((1, 3)))}, {"time": [0], "lat": lat})
    day = day.assign_coords(area=("lat", lat / 3))
    zm.write(day, repository, message="float64")
    rounded = day.assign_coords(
        time=[1], lat=lat.astype("f4"), area=("lat", (lat / 3).astype("f4"))
    )
    first = repository.list_branches()["main"]
    second = zm.write(rounded, repository, append_dim="time")
    found = opened(repository)
    assert found.lat.values.tolist() == lat.tolist()
    assert found.area.values.tolist() == (lat / 3).tolist()
    assert found.sizes["time"] == 2
    assert set(repository.diff(first, second).chunks) == {"/t", "/time"}


# --- what attributes, dimensions and labels make of values -------------------------------------


@pytest.mark.parametrize(
    ("new", "how"),
    [
        (xr.Dataset({"w": ("x", [1.0, 2.0])}), {"mode": "a"}),
        (xr.Dataset(coords={"x": [1, 2]}), {"mode": "a"}),
        (xr.Dataset({"v": ("t", [1.0]), "w": ("x", [1.0, 2.0])}), {"append_dim": "t"}),
    ],
)
def test_a_dimension_of_a_group_has_one_length(new: xr.Dataset, how: Any) -> None:
    first = xr.Dataset({"u": ("x", [1.0, 2.0, 3.0]), "v": ("t", [1.0]), "s": ((), 1)})
    repository = zm.create(MemoryStorage())
    zm.write(first, repository)
    refused(repository, new, "could not be opened as a dataset", **how)


@pytest.mark.parametrize(
    ("there", "given_label", "on_existing"),
    [
        (np.array([1, 2]), np.array([1.4]), "replace"),
        (np.array([1, 2], "i1"), np.array([257]), "skip"),
        (np.array(["1", "2"], object), np.array([1]), "replace"),
    ],
)
def test_a_label_that_does_not_fit_is_none_that_is_there(
    there: Any, given_label: Any, on_existing: str
) -> None:
    repository = zm.create(MemoryStorage())
    zm.write(xr.Dataset({"v": ("x", [1.0, 2.0])}, {"x": there}), repository)
    new = xr.Dataset({"v": ("x", [9.0])}, {"x": given_label})
    how: Any = {"append_dim": "x", "on_existing": on_existing}
    refused(repository, new, "values of 'x' do not fit", **how)


def test_blocks_are_of_the_type_that_dask_was_told() -> None:
    x = xr.DataArray(da.arange(6.0, chunks=2), dims="x")
    told = xr.apply_ufunc(lambda b: b + 0.5, x, dask="parallelized", output_dtypes=[np.int32])
    with pytest.raises(InvalidArgumentError, match="'t' is computed as"):
        zm.write(told.to_dataset(name="t"), MemoryStorage())


@pytest.mark.parametrize("time", [np.datetime64("2026-01-01", "ns"), np.timedelta64("NaT", "ns")])
def test_times_without_axes_are_written(time: Any) -> None:
    repository = zm.create(MemoryStorage())
    zm.write(xr.Dataset({"t": ("x", [1.0])}, {"reference": time}), repository, message="a")
    np.testing.assert_array_equal(opened(repository).reference, time)
