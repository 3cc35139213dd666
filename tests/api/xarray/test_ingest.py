"""Files that become rows of a group, with Spark's tasks run one after another in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cftime
import numpy as np
import pytest
import xarray as xr

import raw_files
import zarr_manifests as zm
from looking import messages, opened
from tasks_here import Tasks, run_here
from zarr_manifests.errors import InvalidArgumentError, UnsupportedStorageError
from zarr_manifests.spark import ingest


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    return run_here(monkeypatch)


SPARK: Any = None
FIRST = np.datetime64("2024-01-01", "ns")


def day(number: int, rows: int = 2) -> xr.Dataset:
    time = FIRST + (number * rows + np.arange(rows)) * np.timedelta64(1, "D")
    values = (np.arange(rows * 12).reshape(rows, 3, 4) + 100 * number).astype("f4")
    ds = xr.Dataset(
        {"t": (("time", "lat", "lon"), values, {"units": "K"})},
        {"time": time, "lat": [1.0, 2, 3], "lon": [10.0, 20, 30, 40]},
    )
    # Each file tells times in hours since its own first day.
    ds.time.encoding = {"units": f"hours since {str(time[0])[:10]}", "dtype": "i4"}
    return ds


def save(ds: xr.Dataset, place: Path, **options: Any) -> Path:
    ds.to_netcdf(place, engine="scipy", **{"unlimited_dims": ["time"], **options})
    return place


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [save(day(number), tmp_path / f"{number}.nc") for number in range(5)]


def days(*numbers: int) -> xr.Dataset:
    how: Any = {"data_vars": "minimal", "coords": "minimal", "compat": "override"}
    return xr.concat([day(number) for number in numbers], "time", join="override", **how)


def names(report: Any) -> dict[str, list[str]]:
    parts = {name: [f.url for f in getattr(report, name)] for name in ("added", "replaced")}
    parts["failed"] = [problem.key for problem in report.failed]
    return {k: [Path(url).stem for url in urls] for k, urls in parts.items() if urls}


# --- one commit ------------------------------------------------------------------------------


def test_files_are_one_commit(files, tmp_path):
    place = tmp_path / "r"
    how = {"t": {"shards": (4, 4, 4), "chunks": (2, 2, 2)}}
    report = zm.ingest(files, place, append_dim="time", message="days", encoding=how)
    assert str(report).startswith("5 files added, in 1 commit")
    assert messages(place) == ["days"]
    assert report.snapshot_id == zm.open(place).list_branches()["main"]
    xr.testing.assert_identical(opened(place), days(*range(5)))


def test_chunks_with_rows_of_many_files_are_written_in_boxes(files, tmp_path, monkeypatch):
    """However little memory there is."""
    monkeypatch.setattr("zarr_manifests.xarray.ingest_files._WINDOW_BYTES", 100)
    place, how = tmp_path / "r", {"encoding": {"t": {"chunks": (3, 2, 3)}}}
    zm.ingest(files[:2], place, append_dim="time", **how)
    zm.ingest(files, place, append_dim="time")
    xr.testing.assert_identical(opened(place), days(*range(5)))


def test_stored_values_are_those_of_the_files(tmp_path):
    """Packed integers, bounds, other calendars, text and scalars."""
    paths = []
    for number in range(3):
        time = xr.date_range("2000-02-29", periods=6, calendar="360_day", use_cftime=True)
        time = time[2 * number : 2 * number + 2]
        values = np.array([[1.5, np.nan], [2.5, 3.0]]) + number
        ds = xr.Dataset(
            {
                "p": (("time", "x"), values),
                "time_bnds": (("time", "nv"), np.stack([time, time], 1)),
                "station": ("x", ["a", "bc"]),
                "crs": ((), 7),
                "gauge": ("time", [0.5, np.nan]),
            },
            {"time": time, "x": [1, 2]},
        )
        ds.p.encoding = {"dtype": "i2", "scale_factor": 0.5, "_FillValue": np.int16(-9)}
        ds.time.attrs["bounds"] = "time_bnds"
        ds.time.encoding["units"] = f"days since 2000-0{number + 1}-01"
        paths.append(save(ds, tmp_path / f"{number}.nc"))
    ingest(SPARK, paths, tmp_path / "r", append_dim="time")
    found = opened(tmp_path / "r")
    assert found.p.values.tolist()[0][0] == 1.5
    assert np.isnan(found.p.values[:, 1]).tolist() == [True, False] * 3
    assert found.p.encoding["scale_factor"] == 0.5
    assert opened(tmp_path / "r", mask_and_scale=False).p.dtype == np.dtype("i2")
    assert found.time.values[-1] == cftime.Datetime360Day(2000, 3, 4)
    assert (found.time_bnds.values[:, 0] == found.time.values).all()
    assert found.station.values.tolist() in (["a", "bc"], [b"a", b"bc"])
    assert int(found.crs) == 7
    np.testing.assert_array_equal(found.gauge, [0.5, np.nan] * 3)


# --- agreement -------------------------------------------------------------------------------


def in_another_calendar(ds: xr.Dataset) -> xr.Dataset:
    time = xr.date_range("2024-01-03", periods=2, calendar="noleap", use_cftime=True)
    return ds.assign_coords(time=time)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda ds: ds.assign(t=ds.t.assign_attrs(units="degC")), "'t' has units 'degC'"),
        (lambda ds: ds.assign_coords(lon=ds.lon + 1), "values of 'lon'"),
        (lambda ds: ds.assign(u=ds.t), "variable 'u'"),
        (in_another_calendar, "calendar 'noleap'"),
    ],
)
def test_a_difference_is_named_with_its_file(files, tmp_path, change, told):
    wrong, place = save(change(day(1)), tmp_path / "wrong.nc"), tmp_path / "r"
    with pytest.raises(InvalidArgumentError, match=rf"wrong\.nc: .*{told}.*0\.nc has"):
        ingest(SPARK, [files[0], wrong, files[2]], place, append_dim="time")
    assert len([*zm.open(place).ancestry()]) == 1
    ingest(SPARK, str(files[0]), place, append_dim="time")
    with pytest.raises(InvalidArgumentError, match=rf"wrong\.nc: .*{told}.*the group '/' has"):
        ingest(SPARK, [files[0], wrong, files[2]], place, append_dim="time")
    assert messages(place) == ["ingest 1 files"]
    report = ingest(SPARK, [*files, wrong], place, append_dim="time", on_error="report")
    assert names(report)["failed"] == ["wrong"]
    xr.testing.assert_identical(opened(place), days(*range(5)))


def test_files_that_cannot_be_opened_are_left_out_if_asked(files, tmp_path):
    broken, missing, place = tmp_path / "broken.nc", tmp_path / "missing.nc", tmp_path / "r"
    broken.write_bytes(b"CDF\x01 and nothing more")
    given = [broken, *files[:2], missing]
    with pytest.raises(InvalidArgumentError) as error:
        ingest(SPARK, given, place, append_dim="time")
    assert all(each.as_uri() in str(error.value) for each in (broken, missing))
    assert not zm.exists(place)
    report = ingest(SPARK, given, place, append_dim="time", on_error="report")
    assert names(report) == {"added": ["0", "1"], "failed": ["broken", "missing"]}
    xr.testing.assert_identical(opened(place), days(0, 1))
    save(day(2), missing)  # they are not remembered, so that they can come later
    report = ingest(SPARK, [*files[:2], missing], place, append_dim="time")
    assert names(report) == {"added": ["missing"]}


def changed(file: Path) -> None:
    save(day(2) + 1, file)


def broken_in_place(file: Path) -> None:
    state = file.stat()
    file.write_bytes(b"none" + file.read_bytes()[4:])
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("fails", [changed, broken_in_place, Path.unlink])
def test_a_file_that_fails_while_it_is_written(files, tmp_path, tasks, fails):
    """Nothing of it is committed, and nothing of the others is lost."""
    place = tmp_path / "r"
    tasks.before["_write"] = lambda: fails(files[2])
    with pytest.raises(InvalidArgumentError, match=r"2\.nc: "):
        ingest(SPARK, files, place, append_dim="time")
    assert messages(place) == []
    save(day(2), files[2])
    tasks.before["_write"] = lambda: fails(files[2])
    report = ingest(SPARK, files, place, append_dim="time", on_error="report")
    assert names(report) == {"added": ["0", "1", "3", "4"], "failed": ["2"]}
    xr.testing.assert_identical(opened(place), days(0, 1, 3, 4))
    assert messages(place) == ["ingest 4 files"]
    assert zm.open(place).verify().ok


# --- the same call again ---------------------------------------------------------------------


def test_the_same_list_does_nothing_and_a_longer_one_appends(files, tmp_path):
    place = tmp_path / "r"
    ingest(SPARK, [*files[:2], files[0]], place, append_dim="time")
    report = ingest(SPARK, files[:2], place, append_dim="time")
    assert (report.snapshot_id, report.unchanged, report.added) == (None, 2, ())
    report = ingest(SPARK, files, place, append_dim="time")
    assert (names(report), report.unchanged) == ({"added": ["2", "3", "4"]}, 2)
    assert messages(place) == ["ingest 2 files", "ingest 3 files"]
    xr.testing.assert_identical(opened(place), days(*range(5)))


def test_a_changed_file_is_an_error_unless_it_is_to_be_replaced(files, tmp_path):
    place = tmp_path / "r"
    how = {"append_dim": "time", "encoding": {"t": {"chunks": (3, 3, 4)}}}
    ingest(SPARK, files[:4], place, **how)
    changed = day(1)
    changed["t"] = -changed.t
    save(changed, files[1])
    for on_error in ("fail", "report"):
        with pytest.raises(InvalidArgumentError, match=r"1\.nc is not what was ingested"):
            ingest(SPARK, files, place, on_error=on_error, **how)
    report = ingest(SPARK, files, place, on_changed="replace", **how)
    assert names(report) == {"added": ["4"], "replaced": ["1"]}
    assert (report.replaced[0].start, report.unchanged) == (2, 3)
    expected = days(*range(5))
    expected["t"][2:4] *= -1
    xr.testing.assert_identical(opened(place), expected)
    assert ingest(SPARK, files, place, on_changed="replace", **how).snapshot_id is None


def test_a_changed_file_with_other_labels_overwrites_and_leaves_no_other_values(files, tmp_path):
    place = tmp_path / "r"
    ingest(SPARK, files, place, append_dim="time")
    for other in (-day(1).isel(time=[0]), -day(2)):
        save(other, files[1])
        with pytest.raises(InvalidArgumentError, match="rows along 'time' are not where they were"):
            ingest(SPARK, files, place, append_dim="time", on_changed="replace")
        xr.testing.assert_identical(opened(place), days(*range(5)))


# --- two at once -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "made"),
    [((0, 1, 2), (0, 1, 2), False), ((0, 1, 2), (0, 1), True), ((0, 1), (0, 1, 2, 3), False)],
)
def test_two_drivers_ingest_each_file_once(files, tmp_path, tasks, mine, theirs, made):
    """The other one begins and ends while this one writes."""
    place = tmp_path / "r"
    if made:
        zm.write(days(0).isel(time=[]), place, message="made")
    reports = []

    def other() -> None:
        picked = [files[n] for n in theirs]
        reports.append(ingest(SPARK, picked, place, append_dim="time"))

    tasks.before["_write"] = other
    report = ingest(SPARK, [files[n] for n in mine], place, append_dim="time")
    xr.testing.assert_equal(opened(place), days(*sorted({*mine, *theirs})))
    assert names(reports[0]) == {"added": [str(n) for n in theirs]}
    rest = [str(n) for n in mine if n not in theirs]
    assert names(report) == ({"added": rest} if rest else {})
    assert report.unchanged == len(mine) - len(rest)
    assert len(messages(place)) == made + 1 + bool(rest)
    assert zm.open(place).verify().ok


def test_another_append_in_the_meantime_is_found(files, tmp_path, tasks):
    place = tmp_path / "r"
    ingest(SPARK, files[:1], place, append_dim="time")

    def append() -> None:
        zm.write(day(1), place, message="by hand", append_dim="time")

    tasks.before["_write"] = append
    ingest(SPARK, files[2:], place, append_dim="time")
    xr.testing.assert_equal(opened(place), days(*range(5)))
    tasks.before["_write"] = lambda: zm.write(day(6), place, message="by hand", append_dim="time")
    late = save(day(5), tmp_path / "5.nc")
    with pytest.raises(InvalidArgumentError, match="what is there ends at 2024-01-14"):
        ingest(SPARK, [late], place, append_dim="time")


# --- other files -----------------------------------------------------------------------------


def test_a_file_without_the_dimension_is_one_row(tmp_path):
    expected = xr.concat([day(n, rows=1) for n in range(3)], "time")
    expected = expected.assign_coords(height=(("lat", "lon"), np.ones((3, 4))))
    paths = [save(expected.isel(time=n), tmp_path / f"{n}.nc", unlimited_dims=[]) for n in range(3)]
    place = zm.create(tmp_path / "r")
    ingest(SPARK, paths, place, append_dim="time")
    xr.testing.assert_equal(opened(place), expected)
    no = save(day(0).isel(time=0, drop=True), tmp_path / "no.nc", unlimited_dims=[])
    with pytest.raises(InvalidArgumentError, match=r"no\.nc: .*no dimension 'time'"):
        ingest(SPARK, [no], tmp_path / "s", append_dim="time")


def test_files_without_labels_stay_in_the_order_given(tmp_path):
    paths = [save(day(n).drop_vars("time"), tmp_path / f"{n}.nc") for n in (2, 0, 1)]
    ingest(SPARK, paths, tmp_path / "r", append_dim="time")
    assert opened(tmp_path / "r").t.values[:, 0, 0].tolist() == [200, 212, 0, 12, 100, 112]
    save(day(7).drop_vars("time"), paths[1])
    ingest(SPARK, paths, tmp_path / "r", append_dim="time", on_changed="replace")
    assert opened(tmp_path / "r").t.values[:, 0, 0].tolist() == [200, 212, 700, 712, 100, 112]
    save(day(7).drop_vars("time").isel(time=[0]), paths[1])
    with pytest.raises(InvalidArgumentError, match="rows along 'time' are not where they were"):
        ingest(SPARK, paths, tmp_path / "r", append_dim="time", on_changed="replace")


def doubled(path: str) -> xr.Dataset:
    return xr.open_dataset(path, engine="scipy") * 2


@pytest.mark.parametrize(
    ("start", "end", "factor", "how"),
    [
        ("", "nc", 2, {"open": doubled}),
        ("local://", "nc", 1, {"open_options": {"engine": "scipy"}}),  # by fsspec
        ("", "zarr", 1, {"open": "zarr"}),
    ],
    ids=["function", "elsewhere", "zarr"],
)
def test_ways_to_open_files(files, tmp_path, start, end, factor, how):
    for number in range(5):
        day(number).to_zarr(tmp_path / f"{number}.zarr", consolidated=False)
    urls = [f"{start}{file.with_suffix(f'.{end}')}" for file in files]
    ingest(SPARK, urls[:2], tmp_path / "r", append_dim="time", **how)
    assert ingest(SPARK, urls, tmp_path / "r", append_dim="time", **how).unchanged == 2
    xr.testing.assert_equal(opened(tmp_path / "r"), days(*range(5)) * factor)


@pytest.mark.parametrize(
    "url",
    [
        "s3://me:SECRET@bucket/a.nc",
        "simplecache::https://me:SECRET@data.org/a.nc",
        "zip://a.nc::https://me:SECRET@data.org/a.zip",
        "https://data.org/a.nc?X-Amz-Signature=SECRET",
    ],
)
def test_urls_with_secrets_are_not_ingested(tmp_path, url):
    """Where files came from is written to the repository."""
    with pytest.raises(InvalidArgumentError) as caught:
        ingest(SPARK, [url], tmp_path / "r", append_dim="time")
    assert "SECRET" not in str(caught.value)
    assert not (tmp_path / "r").exists()


# --- the report, and what is refused ---------------------------------------------------------


def test_what_cannot_work_is_refused_before_anything_is_written(files, tmp_path):
    with pytest.raises(UnsupportedStorageError, match="in the memory of this process"):
        ingest(SPARK, files, "memory://ingest", append_dim="time")
    zm.write(day(0)[["lat"]], tmp_path / "r", message="no time")
    with pytest.raises(InvalidArgumentError, match="no array in the group '/' has the dimension"):
        ingest(SPARK, files, tmp_path / "r", append_dim="time")
    assert ingest(SPARK, [], tmp_path / "s", append_dim="time").snapshot_id is None
    assert not zm.exists(tmp_path / "s")


def test_a_file_that_another_ingests_as_it_was_before_is_not_ingested_twice(tmp_path, tasks):
    place = tmp_path / "r"
    path = save(day(1).drop_vars("time"), tmp_path / "1.nc")
    changed, stamp = path.read_bytes(), path.stat().st_mtime_ns

    def other() -> None:
        save(day(0).drop_vars("time"), path)
        ingest(SPARK, [path], place, append_dim="time")
        path.write_bytes(changed)
        os.utime(path, ns=(stamp, stamp))

    tasks.before["_write"] = other
    with pytest.raises(InvalidArgumentError, match="else has ingested it as it was before"):
        ingest(SPARK, [path], place, append_dim="time")
    assert opened(place).t.values[:, 0, 0].tolist() == [0, 12]


def test_grib_messages(tmp_path: Path) -> None:
    """Each file is one row; they are copied."""
    raw, shape = tmp_path / "raw", raw_files.SHAPE
    raw.mkdir()
    files = [raw_files.save_grib(raw / f"{n}", n, shape, ("2t", "2d")) for n in range(3)]
    repo = zm.create(tmp_path / "r")
    how: Any = {"append_dim": "time", "open": "grib"}
    ingest(SPARK, files[:2], repo, **how)
    assert len(ingest(SPARK, files, repo, **how).added) == 1
    found = opened(repo)
    expected = np.stack([raw_files.grib_values(number, shape) for number in range(3)])
    np.testing.assert_allclose(found.t2m, expected)
    np.testing.assert_allclose(found.d2m, expected + 1)
    noons = raw_files.FIRST + np.arange(3) * np.timedelta64(1, "D") + np.timedelta64(12, "h")
    assert (found.time.values == noons).all()
    assert found.latitude.values.tolist() == list(range(shape[0]))[::-1]
    assert len([*raw.iterdir()]) == 3  # cfgrib has left no index beside them


def test_a_day_that_came_late_is_not_ingested_again(tmp_path: Path) -> None:
    place, how = tmp_path / "r", {"append_dim": "time"}
    zm.ingest([save(day(n), tmp_path / f"{n}.nc") for n in (0, 1, 3, 4)], place, **how)
    zm.write(day(2), place, append_dim="time", sort="keep")
    with pytest.raises(InvalidArgumentError, match="what is there ends at 2024-01-10"):
        zm.ingest([save(day(3), tmp_path / "again.nc")], place, **how)
    assert zm.ingest([save(day(5), tmp_path / "5.nc")], place, **how).added


def refused(files: Any, place: Path, dim: str = "time") -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        zm.ingest(files, place, append_dim=dim)
    return str(caught.value).replace(f"{place.parent.as_uri()}/", "")


def test_what_is_wrong_with_several_files_is_told_once(files: list[Path], tmp_path: Path) -> None:
    place, empty, text = (tmp_path / name for name in ("r", "empty.nc", "text.nc"))
    empty.touch()
    text.write_text("hello\n" * 100)
    none = "2 files cannot be ingested; nothing was committed"
    bad = ": empty.nc, text.nc: it is empty, or no netCDF or HDF5 file"
    assert refused([empty, text], place) == none + bad
    skip = ". Give on_error='report' to leave such files out"
    assert refused([empty, files[0], text], place) == none + skip + bad
    lacks = "0.nc, 1.nc: it has no dimension 'tme', and no variable of that name"
    assert refused(files[:2], place, "tme") == f"{none}: {lacks}"
    pattern = refused(str(tmp_path / "*.nc"), place)
    assert pattern.endswith("a pattern has to be expanded first, as by Path.glob")


def test_labels_that_are_there_already_are_told(files: list[Path], tmp_path: Path) -> None:
    place = tmp_path / "r"
    zm.ingest([files[1], files[3]], place, append_dim="time")
    moved = files[1].rename(tmp_path / "moved.nc")
    already = ". All of them are there already: leave the file out"
    assert refused([moved], place).endswith(f"what is there ends at 2024-01-08{already}")
    assert refused([files[2]], place).endswith("what is there ends at 2024-01-08")


def test_durations_are_in_the_units_of_each_file(tmp_path: Path) -> None:
    due, places = [], []
    for number, units in enumerate(("hours", "minutes")):
        lead = np.array([60 * number, "NaT"], "m8[m]").astype("m8[ns]")
        ds = day(number).assign(lead=("time", lead), step=("time", [1, 2], {"units": "hours"}))
        ds.lead.encoding = {"units": units, "dtype": "i4", "_FillValue": -9}
        places.append(save(ds, tmp_path / f"{number}.nc"))
        due.append(ds)
    zm.ingest(places, tmp_path / "r", append_dim="time")
    found = opened(tmp_path / "r")
    assert found.step.dtype.kind == "i"
    xr.testing.assert_equal(found.lead, xr.concat([ds.lead for ds in due], "time"))


def test_units_of_the_year_0_need_a_function(tmp_path: Path) -> None:
    file = tmp_path / "climatology.nc"
    early = day(0).assign_coords(time=("time", [0, 24], {"units": "hours since 0000-01-01"}))
    save(early, file)
    told = refused([file], tmp_path / "r")
    assert "Try opening" not in told
    assert told.endswith(
        "Its encoding, such as units and calendar, cannot hold its values: change either"
    )

    def shifted(path: str) -> xr.Dataset:
        ds = xr.open_dataset(path, engine="scipy", decode_times=False)
        ds.time.attrs["units"] = "hours since 1970-01-01"
        return ds

    zm.ingest([file], tmp_path / "r", append_dim="time", open=shifted)
    assert str(opened(tmp_path / "r").time.values[1])[:10] == "1970-01-02"


def test_units_that_mean_nothing_are_told_with_the_file(tmp_path: Path) -> None:
    raw = xr.Dataset({"t": ("time", [1.0])}, {"time": ("time", [3], {"units": "hours since 0000"})})
    raw.to_netcdf(tmp_path / "odd.nc", engine="scipy", unlimited_dims=["time"])
    report = zm.ingest([tmp_path / "odd.nc"], tmp_path / "r", append_dim="time", on_error="report")
    assert "unable to decode time units" in str(report)
