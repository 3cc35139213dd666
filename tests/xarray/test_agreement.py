"""What would mean something else in the arrays that are there is refused, and nothing written."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import cftime
import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from zarr_manifests.error_cases import NotARepositoryError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage.memory import MemoryStorage


def times(*texts: str) -> Any:
    return np.array(texts, dtype="M8[ns]")


def series(time: Any, **more: Any) -> xr.Dataset:
    n = len(time)
    data = {"t": ("time", np.arange(float(n)), {"units": "K"}), **more}
    return xr.Dataset(data, {"time": ("time", time)})


def grid(time: Any, lat: Any) -> xr.Dataset:
    values = np.arange(len(time) * len(lat), dtype=float).reshape(len(time), -1)
    return xr.Dataset({"t": (("time", "lat"), values)}, {"time": time, "lat": lat})


def opened(repository: zm.Repository, **options: Any) -> xr.Dataset:
    return xr.open_dataset(repository, engine="zarr_manifests", **options).load()


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


@pytest.mark.parametrize("key", ["scale_factor", "add_offset", "missing_value", "_Unsigned"])
def test_values_that_are_packed_already(key: str) -> None:
    raw = xr.Dataset({"t": ("time", [10.0], {"units": "K", key: 10})}, {"time": [3]})
    repository = written(series([1, 2]))
    for lazy in (raw, raw.chunk()):
        refused(repository, lazy, f"has the attribute '{key}'.*xr.decode_cf")
    zm.write(raw.drop_attrs(), repository, message="decoded", append_dim="time")


# --- times -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"append_dim": "time"}, {"mode": "a"}])
def test_times_that_would_be_read_as_others(how: dict[str, Any]) -> None:
    repository = written(series(DAYS))
    late = series(times("2024-01-03T06", "2024-01-04"))
    refused(
        repository, late, r"2024-01-03T06:00:00\S* at .* would be read back as 2024-02-24", **how
    )


def test_times_of_a_region_that_would_be_read_as_others() -> None:
    repository = written(series(DAYS))
    patch = series(times("2024-01-01T12", "2024-01-02")).isel(time=[0, 1])
    refused(repository, patch, "do not fit", region={"time": slice(0, 2)})


@pytest.mark.parametrize("encoding", [{"dtype": "f8"}, {"units": "hours since 2024-01-01"}])
def test_times_that_there_is_room_for(encoding: dict[str, Any]) -> None:
    repository = written(series(DAYS), {"time": encoding})
    zm.write(series(times("2024-01-03T06")), repository, message="more", append_dim="time")
    assert opened(repository).time[-1] == times("2024-01-03T06")[0]


@settings(max_examples=examples(40))
@given(first=st.integers(0, 400), steps=st.lists(st.integers(1, 10**9), max_size=4))
def test_an_append_is_read_back_or_refused(first: int, steps: list[int]) -> None:
    """Seconds since some midnight."""
    begin = times("2000-01-01") + np.timedelta64(first, "D")
    repository = written(series(begin))
    new = begin + np.cumsum([1, *steps]).astype("m8[s]")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zm.write(series(new), repository, message="more", append_dim="time")
    except InvalidArgumentError:
        assert np.any((new - begin) % np.timedelta64(1, "D"))
        assert opened(repository).time.size == 1
    else:
        found = opened(repository).time.values[1:]
        assert np.all(np.abs(found - new) < np.timedelta64(1, "s"))


@pytest.mark.parametrize(("dtype", "fill"), [("f8", np.nan), ("i8", -9999)])
def test_what_is_missing_stays_missing(dtype: str, fill: float) -> None:
    units = "hours since 2024-01-01"
    encoding = {"when": {"units": units, "dtype": dtype, "_FillValue": fill}}
    gaps = {"when": ("time", times("2024-01-05", "NaT"))}
    repository = written(series(DAYS, **gaps), encoding)
    more = {"when": ("time", times("NaT", "2024-01-06T12"))}
    later = series(times("2024-01-03", "2024-01-04"), **more)
    zm.write(later, repository, message="more", append_dim="time")
    expected = [*gaps["when"][1], *more["when"][1]]
    np.testing.assert_array_equal(opened(repository).when, expected)


def test_spans_of_time() -> None:
    lag = {"lag": ("time", np.array([1, 2], "m8[D]").astype("m8[ns]"))}
    repository = written(series(DAYS, **lag))
    hours = {"lag": ("time", np.array([30, 40], "m8[h]").astype("m8[ns]"))}
    refused(repository, series(times("2024-01-03", "2024-01-04"), **hours), "lag.*do not fit")


def bounded(*days: str) -> xr.Dataset:
    ends = np.stack([times(*days), times(*days) + np.timedelta64(1, "D")], axis=1)
    ds = series(times(*days), time_bnds=(("time", "end"), ends), made=((), times(*days)[0]))
    ds.time.attrs["bounds"] = "time_bnds"
    return ds


@pytest.mark.parametrize("dtype", ["i4", "f8"])
def test_times_of_any_number_of_dimensions(dtype: str) -> None:
    how = {"units": "days since 1990-01-01", "dtype": dtype}
    repository = written(bounded("2024-01-01"), dict.fromkeys(("time", "time_bnds", "made"), how))
    zm.write(bounded("2024-01-02"), repository, message="next", append_dim="time")
    both = bounded("2024-01-01", "2024-01-02")
    expected = both.assign(t=("time", [0.0, 0.0]), made=times("2024-01-02")[0])
    xr.testing.assert_equal(opened(repository), expected)
    late = bounded("2024-01-03")
    late["time_bnds"] = late.time_bnds + np.timedelta64(1, "h")
    if dtype == "i4":
        with pytest.raises(InvalidArgumentError, match="'time_bnds' do not fit"):
            zm.write(late, repository, message="an hour off", append_dim="time")


@pytest.mark.parametrize("lazy", [False, True])
def test_bounds_are_in_the_units_of_their_times(lazy: bool) -> None:
    how = {"units": "days since 1990-01-01", "dtype": "f8"}
    first, more = (bounded(day).drop_vars("made") for day in ("2024-01-01", "2024-01-02"))
    repository = written(first, {"time": how, "time_bnds": how})
    with repository.transaction(message="as CF has it") as store:
        bounds = zarr.open_array(store, path="time_bnds", mode="r+")
        kept = {k: v for k, v in bounds.attrs.items() if k not in ("units", "calendar")}
        bounds.attrs.put(kept)
    zm.write(more.chunk() if lazy else more, repository, message="next", append_dim="time")
    xr.testing.assert_equal(opened(repository), xr.concat([first, more], "time"))


def test_calendars_of_models() -> None:
    def dates(*days: int) -> list[Any]:
        return [cftime.DatetimeNoLeap(2001, 2, day) for day in days]

    repository = written(series(dates(27, 28)))
    more = series([cftime.DatetimeNoLeap(2001, 3, 1)])
    zm.write(more, repository, message="more", append_dim="time")
    assert opened(repository).time.values.tolist() == [*dates(27, 28), *more.time.values]
    half = series([cftime.DatetimeNoLeap(2001, 3, 1, 12)])
    with pytest.raises(InvalidArgumentError, match="do not fit"):
        zm.write(half, repository, message="half a day", append_dim="time")


def test_calendars_that_are_not_the_same() -> None:
    noleap = series([cftime.DatetimeNoLeap(2001, 2, day) for day in (27, 28)])
    others = [cftime.Datetime360Day(2001, 3, 1), cftime.DatetimeGregorian(2001, 3, 1)]
    for other in others:
        with pytest.raises(InvalidArgumentError, match="do not fit"):
            zm.write(series([other]), written(noleap), message="other", append_dim="time")


@pytest.mark.parametrize("there", [np.arange(2), np.array(["a", "b"])])
@pytest.mark.parametrize(
    "given", [DAYS, DAYS - DAYS[0], [cftime.DatetimeNoLeap(2001, 2, d) for d in (1, 2)]]
)
def test_times_do_not_go_where_no_units_are(there: Any, given: Any) -> None:
    refused(written(series(there)), series(given), "do not fit")


def test_numbers_without_units_do_not_go_where_times_are() -> None:
    refused(written(series(DAYS)), series(np.arange(2)), "read back as")


def test_xarray_would_write_days_into_times_of_zarrs_own() -> None:
    repository = written(series(np.arange(2)))
    own: dict[str, Any] = {"shape": (2,), "dtype": "M8[ns]", "dimension_names": ["time"]}
    with repository.transaction(message="made by Zarr") as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of types that the specification does not have
        zarr.create_array(store, name="when", **own)[:] = DAYS
    more = series(np.arange(2), when=("time", times("2024-01-03", "2024-01-04")))
    with pytest.raises(InvalidArgumentError, match="'when' do not fit"):
        zm.write(more, repository, message="more", append_dim="time")


def test_lazy_times_are_xarrays_to_refuse_and_not_computed_before() -> None:
    def when(*texts: str) -> dict[str, Any]:
        return {"when": ("time", da.from_array(times(*texts), chunks=1))}

    units = {"when": {"units": "days since 2024-01-01", "dtype": "i8"}}
    repository = written(series(DAYS, **when("2024-01-01", "2024-01-02")), units)
    late = series(times("2024-01-03", "2024-01-04"), **when("2024-01-03T06", "2024-01-04"))
    with pytest.raises(ValueError, match="can't be serialized faithfully"):
        zm.write(late, repository, message="late", append_dim="time")
    assert len(list(repository.ancestry())) == 2


# --- units -------------------------------------------------------------------------------------


def raw(units: str, values: Any, **attributes: str) -> xr.Dataset:
    return series(np.arange(2)).assign_coords(
        time=("time", np.asarray(values), {"units": units, **attributes})
    )


def test_values_that_are_not_decoded_have_to_be_in_the_same_units() -> None:
    repository = written(raw("days since 1980-01-01", [0, 1]))
    refused(repository, raw("days since 1990-01-01", [2, 3]), "'days since 1980-01-01'")
    refused(repository, raw("hours since 1980-01-01", [2, 3]), "time.*units")
    zm.write(
        raw("days since 1980-1-1 00:00:00", [2, 3]), repository, message="more", append_dim="time"
    )
    assert opened(repository).time[-1] == times("1980-01-04")[0]


def test_other_calendars() -> None:
    first = raw("days since 1980-01-01", [0, 1], calendar="noleap")
    other = raw("days since 1980-01-01", [2, 3], calendar="360_day")
    refused(written(first), other, "calendar '360_day'")


def test_other_units_of_data() -> None:
    repository = written(series(DAYS))
    more = series(times("2024-01-03", "2024-01-04"))
    more.t.attrs["units"] = "degC"
    for how in ({"append_dim": "time"}, {"mode": "a"}):
        refused(repository, more, "'t' has the units 'degC'.*'K'", **how)
    del more.t.attrs["units"]
    zm.write(more, repository, message="no units said", append_dim="time")
    replaced = more.assign(t=more.t.assign_attrs(units="degC"))
    zm.write(replaced, repository, message="from scratch", mode="w")
    assert opened(repository).t.attrs["units"] == "degC"


# --- shapes ------------------------------------------------------------------------------------


LATER = times("2024-01-03", "2024-01-04")


def test_an_append_leaves_no_array_behind() -> None:
    both = {"q": ("time", [1.0, 2.0])}
    repository = written(series(DAYS, **both))
    refused(repository, series(LATER), "'q' would be left shorter")
    zm.write(series(LATER, **both), repository, message="both", append_dim="time")
    assert opened(repository).sizes["time"] == 4


def test_an_append_makes_no_array_that_is_shorter() -> None:
    repository = written(series(DAYS))
    refused(repository, series(LATER, q=("time", [1.0, 2.0])), "'q' does not exist yet")


def test_an_append_does_not_go_on_with_arrays_of_different_lengths() -> None:
    repository = written(series(DAYS))
    with repository.transaction(message="by hand") as store:
        zarr.open_array(store, path="t").resize((1,))
    with pytest.raises(InvalidArgumentError, match=r"different lengths already \(t 1, time 2\)"):
        zm.write(series(LATER), repository, message="more", append_dim="time")


@pytest.mark.parametrize(
    ("lat", "other"),
    [
        (np.array([60.0, 50.0, 40.0]), np.array([40.0, 50.0, 60.0])),
        (np.array(["a", "b"]), np.array(["b", "a"])),
        (times("2020-01-01", "2020-01-02"), times("2020-01-02", "2020-01-03")),
    ],
)
def test_an_append_does_not_replace_the_grid(lat: Any, other: Any) -> None:
    repository = written(grid(DAYS, lat))
    refused(repository, grid(LATER, other), "values of 'lat' differ from the existing ones")
    zm.write(grid(LATER, lat), repository, message="more", append_dim="time")
    without = grid(times("2024-01-05"), other).drop_vars("lat")
    zm.write(without, repository, message="more", append_dim="time")
    assert opened(repository).lat.values.tolist() == lat.tolist()


@pytest.mark.parametrize("more", [1.0, 1.0 + 1e-9])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_grid_in_another_precision_is_the_same_grid(dtype: str, more: float) -> None:
    lat = np.linspace(-90, 90, 721)
    repository = written(grid(DAYS, lat.astype(dtype)))
    zm.write(grid(LATER, lat * more), repository, message="more", append_dim="time")
    assert opened(repository).sizes == {"time": 4, "lat": 721}


def test_a_grid_can_be_replaced_where_that_is_asked_for() -> None:
    repository = written(grid(DAYS, np.array([60.0, 50.0])))
    zm.write(grid(DAYS, np.array([50.0, 60.0])), repository, message="turned", mode="a")
    assert opened(repository).lat.values.tolist() == [50, 60]


# --- places ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{"region": {"time": slice(0, 2)}}, {"mode": "r+"}, {"branch": "dev"}]
)
def test_what_can_only_go_on_makes_no_repository(tmp_path: Any, how: dict[str, Any]) -> None:
    with pytest.raises(NotARepositoryError):
        zm.write(series(DAYS), tmp_path / "mistyped", message="x", **how)
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("units", ["nanoseconds", "milliseconds", "microseconds"])
@pytest.mark.parametrize("coarse", ["s", "ms", "us", "ns"])
def test_times_of_another_resolution(units: str, coarse: str, lazy: bool) -> None:
    """Each is stored as it is, or refused; xarray alone would store some as NaT."""
    repository = written(series(DAYS), {"time": {"units": f"{units} since 2024-01-01"}})
    more = series(times("2024-01-03", "2024-01-04").astype(f"M8[{coarse}]"))
    zm.write(more.chunk() if lazy else more, repository, message="more", append_dim="time")
    assert opened(repository).time.values.tolist() == [
        *times("2024-01-01", "2024-01-02", "2024-01-03", "2024-01-04").tolist()
    ]
    zm.write(more, repository, message="again", append_dim="time", on_existing="skip")
    assert opened(repository).time.size == 4
