"""What would mean something else in the arrays that are there is refused, and nothing written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cftime
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from looking import opened
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage.memory import MemoryStorage


def times(*texts: str) -> Any:
    return np.array(texts, dtype="M8[ns]")


def series(time: Any, **more: Any) -> xr.Dataset:
    n = len(time)
    data = {"t": ("time", np.arange(float(n)), {"units": "K"}), **more}
    return xr.Dataset(data, {"time": ("time", time)})


def written(ds: xr.Dataset, encoding: Mapping[Any, Any] | None = None) -> zm.Repository:
    repository = zm.create(MemoryStorage())
    zm.write(ds, repository, message="first", encoding=encoding)
    return repository


def refused(repository: zm.Repository, ds: xr.Dataset, match: str, **how: Any) -> None:
    before = opened(repository, decode_cf=False)
    how = how or {"append_dim": "time"}
    with pytest.raises(InvalidArgumentError, match=match):
        zm.write(ds, repository, message="refused", **how)
    assert len(list(repository.ancestry())) == 2
    xr.testing.assert_identical(opened(repository, decode_cf=False), before)


DAYS = times("2024-01-01", "2024-01-02")


# --- packed values -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["scale_factor", "_Unsigned"])
def test_values_that_are_packed_already(key: str) -> None:
    raw = xr.Dataset({"t": ("time", [10.0], {"units": "K", key: 10})}, {"time": [3]})
    repository = written(series([1, 2]))
    for lazy in (raw, raw.chunk()):
        refused(repository, lazy, f"has the attribute '{key}'.*xr.decode_cf")
    zm.write(raw.drop_attrs(), repository, message="decoded", append_dim="time")


# --- times -------------------------------------------------------------------------------------


def test_times_that_the_units_cannot_tell_are_refused() -> None:
    refused(written(series(DAYS)), series(times("2024-01-03T06")), "2024-01-03T06")


@pytest.mark.parametrize(
    ("there", "given"),
    [
        (np.arange(2), DAYS),
        (np.array(["a", "b"]), DAYS - DAYS[0]),
        ([cftime.DatetimeNoLeap(2001, 2, 28)], [cftime.Datetime360Day(2001, 3, 1)]),
        ([cftime.DatetimeNoLeap(2001, 2, 28)], [cftime.DatetimeGregorian(2001, 3, 1)]),
    ],
)
def test_times_do_not_go_where_others_are(there: Any, given: Any) -> None:
    refused(written(series(there)), series(given), "do not fit")


# --- units -------------------------------------------------------------------------------------


def raw(units: str, values: Any, **attributes: str) -> xr.Dataset:
    return series(np.arange(2)).assign_coords(
        time=("time", np.asarray(values), {"units": units, **attributes})
    )


def test_values_that_are_not_decoded_have_to_be_in_the_same_units() -> None:
    repository = written(raw("days since 1980-01-01", [0, 1]))
    refused(repository, raw("days since 1990-01-01", [2, 3]), "'days since 1980-01-01'")
    refused(repository, raw("hours since 1980-01-01", [2, 3]), "time.*units")
    other = raw("days since 1980-01-01", [2, 3], calendar="360_day")
    refused(repository, other, "calendar '360_day'")
    refused(written(other), raw("days since 1980-01-01", [4, 5]), "calendar 'standard'")
    same = raw("days since 1980-1-1 00:00:00", [2, 3], calendar="standard")
    zm.write(same, repository, message="more", append_dim="time")
    assert opened(repository).time[-1] == times("1980-01-04")[0]


# --- shapes ------------------------------------------------------------------------------------


LATER = times("2024-01-03", "2024-01-04")


def test_an_append_leaves_no_array_behind() -> None:
    both = {"q": ("time", [1.0, 2.0])}
    told = "'time' would be 2 long in 'q', 4 long in 't', 'time'"
    refused(written(series(DAYS)), series(LATER, **both), told)
    repository = written(series(DAYS, **both))
    refused(repository, series(LATER), told)
    zm.write(series(LATER, **both), repository, message="both", append_dim="time")
    assert opened(repository).sizes["time"] == 4


def test_a_variable_of_no_cells_goes_beside_another() -> None:
    repository = written(series(times()))
    zm.write(xr.Dataset({"q": ("time", [])}), repository, message="beside", mode="a")
    assert dict(opened(repository).sizes) == {"time": 0}
    refused = xr.Dataset({"p": ("time", [1.0])})
    with pytest.raises(InvalidArgumentError, match="be 1 long in 'p', 0 long in 'q', 't', 'time'"):
        zm.write(refused, repository, message="longer", mode="a")


@pytest.mark.parametrize("fine", ["ns", "us"])
def test_times_of_another_resolution(fine: str) -> None:
    """Each is stored as it is, or refused; xarray alone would store some as NaT."""
    units = {"ns": "nanoseconds", "us": "microseconds"}[fine]
    repository = written(series(DAYS), {"time": {"units": f"{units} since 2024-01-01"}})
    coarse = series(LATER.astype("M8[s]"))
    refused(repository, coarse, rf"is there \({units} since .*\): .*would be read back as NaT")
    more = coarse.assign_coords(time=LATER.astype(f"M8[{fine}]"))
    zm.write(more.chunk(), repository, message="more", append_dim="time")
    assert opened(repository).time.values.tolist() == [*DAYS.tolist(), *LATER.tolist()]
    zm.write(more, repository, message="again", append_dim="time", on_existing="skip")
    assert opened(repository).time.size == 4


@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
def test_single_bytes_are_no_characters_of_a_text() -> None:
    storage = MemoryStorage()
    ds = xr.Dataset({"f": ("time", np.array([b"a", b"b"]))})
    with pytest.raises(InvalidArgumentError, match=r"b'a' at .* would be read back as b'ab'"):
        zm.write(ds, storage, message="as a reader would join them")
    zm.write(ds, storage, check=False)
    zm.write(ds[{"time": [1]}], storage, append_dim="time", check=False)
    found = xr.open_dataset(storage, engine="zarr_manifests", concat_characters=False)
    assert found.f.values.tolist() == [b"a", b"b", b"b"]


# --- as by xarray ------------------------------------------------------------------------------

KINDS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "floats": ([0.5, np.nan, -0.0, 7.0], [{}, {"_FillValue": -9.0}, {"fill_value": 7.0}]),
    "packed": ([0.5, 7.0, -3.5, np.nan], [{"dtype": "i2", "scale_factor": 0.5, "_FillValue": -1}]),
    "big": (np.array([1, 2, 3, -4], ">i4"), [{}, {"_FillValue": 3}]),
    "flags": (np.array([True, False, True, True]), [{}]),
    "waves": (np.array([1j, 2.0, 0.0, 3 - 1j], "c8"), [{}]),
    "texts": (np.array(["a", "", "böse", "c"], object), [{}]),
    "letters": (np.array(["a", "", "bös", "c"]), [{}]),
    "days": (np.arange(4) + np.datetime64("2001-01-01", "D"), [{}, {"units": "hours since 1999"}]),
    "spans": (np.arange(4) * np.timedelta64(3600, "s"), [{}, {"units": "minutes"}]),
}


def stored(store: Any) -> dict[str, Any]:
    """All that is stored: metadata without what is left to the store, and values as bytes."""
    group = zarr.open_group(store, mode="r")
    found: dict[str, Any] = {"": dict(group.attrs)}
    for name, array in group.arrays():
        values = np.asarray(array[...])
        cells = values.tobytes() if values.dtype.kind not in "OT" else values.tolist()
        found[name] = repr(array.metadata.to_dict()), values.dtype.str, values.shape, cells
    return found


@st.composite
def writes(draw: st.DrawFn) -> tuple[xr.Dataset, xr.Dataset, dict[str, Any], int]:
    """A dataset, another one for the same arrays, where to write that, and the format."""
    zarr_format, n = draw(st.sampled_from([2, 3])), draw(st.integers(2, 5))
    how: dict[str, Any] = draw(
        st.sampled_from([{"append_dim": "time"}, {"mode": "a"}, {"region": {"time": slice(1, 2)}}])
    )
    m = n if "mode" in how else 1 if "region" in how else draw(st.integers(1, 3))
    first, second = xr.Dataset(attrs={"title": "first"}), xr.Dataset(attrs={"title": "second"})
    for kind in draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True)):
        some, encodings = KINDS[kind]
        dims = draw(st.sampled_from([("time",), ("time", "x"), ("x", "time")]))
        for ds, size in ((first, n), (second, m)):
            shape = [size if dim == "time" else 2 for dim in dims]
            cells = draw(st.lists(st.integers(0, 3), min_size=2 * size, max_size=2 * size))
            values = np.asarray(some)[cells][: np.prod(shape)].reshape(shape)
            ds[kind] = xr.Variable(dims, values, {"long_name": f"of {size}"})
        encoding = {**draw(st.sampled_from(encodings))}
        if zarr_format == 2:
            encoding.pop("fill_value", None)
        if draw(st.booleans()):
            encoding["chunks"] = tuple(draw(st.integers(1, 3)) for _ in dims)
            if zarr_format == 3 and draw(st.booleans()):
                encoding["shards"] = tuple(2 * size for size in encoding["chunks"])
        first[kind].encoding = encoding
        if draw(st.booleans()):
            second[kind] = second[kind].transpose()
    if draw(st.booleans()) and "mode" not in how:
        second = second.chunk(time=-1)
    return first, second, how, zarr_format


@settings(max_examples=examples(40), deadline=None)
@given(writes(), st.booleans())
@pytest.mark.filterwarnings("ignore")
def test_what_is_stored_is_what_xarray_stores(
    case: tuple[xr.Dataset, xr.Dataset, dict[str, Any], int], check: bool
) -> None:
    first, second, how, zarr_format = case
    theirs, repository = zarr.storage.MemoryStore(), zm.create(MemoryStorage())
    with repository.transaction(message="a group") as store:
        zarr.create_group(store, zarr_format=zarr_format)  # type: ignore[arg-type]
    put: Any = first.copy(deep=True).to_zarr
    put(theirs, zarr_format=zarr_format, consolidated=False)
    zm.write(first.copy(deep=True), repository, message="first", mode="a", check=False)
    try:
        second.copy(deep=True).to_zarr(theirs, consolidated=False, **how)
    except ValueError as error:
        with pytest.raises(type(error)):
            zm.write(second, repository, message="second", check=check, **how)
        return
    try:
        zm.write(second, repository, message="second", check=check, **how)
    except InvalidArgumentError:  # of values that xarray reads back differently
        if not check:
            raise
        return
    assert stored(repository.readonly_session("main").store) == stored(theirs)


def test_an_append_does_not_go_on_with_arrays_of_different_lengths() -> None:
    repository = written(series(DAYS))
    with repository.transaction(message="by hand") as store:
        zarr.open_array(store, path="t").resize((1,))
    with pytest.raises(
        InvalidArgumentError, match="'time' would be 3 long in 't', 4 long in 'time'"
    ):
        zm.write(series(LATER), repository, message="more", append_dim="time")
