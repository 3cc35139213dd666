"""Files that become rows of a group, with Spark's tasks run one after another in this process."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import cftime
import numpy as np
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from tasks_here import Tasks, run_here
from zarr_manifests.engine.root.deferred_create import Unmade
from zarr_manifests.error_cases import UnsupportedStorageError, VirtualSourceChangedError
from zarr_manifests.errors import ConflictError, InvalidArgumentError, StorageError
from zarr_manifests.planning.tables.resolved_chunks import ChunkKind
from zarr_manifests.reports import IngestProgress
from zarr_manifests.spark import ingest
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.xarray import scan_files
from zarr_manifests.xarray.ingest_records import FileRecord, add_records


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    return run_here(monkeypatch)


SPARK: Any = None
FIRST = np.datetime64("2024-01-01", "ns")


def day(number: int, rows: int = 2, **attributes: Any) -> xr.Dataset:
    time = FIRST + (number * rows + np.arange(rows)) * np.timedelta64(1, "D")
    values = (np.arange(rows * 12).reshape(rows, 3, 4) + 100 * number).astype("f4")
    ds = xr.Dataset(
        {"t": (("time", "lat", "lon"), values, {"units": "K", **attributes})},
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


def head(url: object, **options: Any) -> xr.Dataset:
    return xr.open_dataset(url, engine="zarr_manifests", **options).load()


def messages(url: object) -> list[str]:
    return [info.message for info in zm.open(url).ancestry()][::-1][1:]


def names(report: Any) -> dict[str, list[str]]:
    parts = {"added": report.added, "replaced": report.replaced, "failed": report.failed}
    return {k: [Path(f.url).stem for f in found] for k, found in parts.items() if found}


# --- one commit ------------------------------------------------------------------------------


def test_files_in_any_order_become_one_commit(files, tmp_path, tasks):
    place = tmp_path / "r"
    report = ingest(SPARK, files[::-1], place, append_dim="time")
    assert messages(place) == ["ingest 5 files"]
    assert names(report) == {"added": list("01234")}
    assert [(f.start, f.rows) for f in report.added] == [(2 * n, 2) for n in range(5)]
    assert report.snapshot_ids == (zm.open(place).list_branches()["main"],)
    assert report.nbytes == sum(file.stat().st_size for file in files)
    found = head(place)
    xr.testing.assert_identical(found, days(*range(5)))
    assert found.time.encoding["units"].startswith("hours since 2024-01-01")
    session = zm.open(place).readonly_session()
    assert len(session.chunk_refs("t", statistics=True)) == len(session.chunk_refs("t")) == 5
    assert zm.open(place).verify().ok


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("axis", [0, 2])
def test_rows_need_not_fill_chunks(files, tmp_path, chunk, axis):
    """Nor need the dimension be the first; values end up where they belong all the same."""
    dims = ["lat", "lon"]
    dims.insert(axis, "time")
    paths = [
        save(day(n).transpose(*dims), tmp_path / f"t{n}.nc", unlimited_dims=[]) for n in range(5)
    ]
    chunks = tuple(chunk if dim == "time" else 2 for dim in dims)
    how = {"append_dim": "time", "encoding": {"t": {"chunks": chunks}}}
    ingest(SPARK, paths[:2], tmp_path / "r", **how)
    ingest(SPARK, paths, tmp_path / "r", **how)
    xr.testing.assert_equal(head(tmp_path / "r"), days(*range(5)).transpose(*dims))


def test_shards_have_one_writer_each(files, tmp_path):
    how = {"t": {"shards": (4, 4, 4), "chunks": (2, 2, 2)}}
    ingest(SPARK, files, tmp_path / "r", append_dim="time", encoding=how)
    xr.testing.assert_equal(head(tmp_path / "r"), days(*range(5)))


def test_large_rows_are_written_in_boxes(files, tmp_path, monkeypatch):
    monkeypatch.setattr("zarr_manifests.xarray.ingest_rows._WINDOW_BYTES", 16)
    how = {"t": {"chunks": (3, 2, 2)}}
    ingest(SPARK, files, tmp_path / "r", append_dim="time", encoding=how)
    xr.testing.assert_equal(head(tmp_path / "r"), days(*range(5)))
    monkeypatch.setattr("zarr_manifests.xarray.ingest_rows._OPEN_FILES", 1)
    ingest(SPARK, files, tmp_path / "s", append_dim="time", encoding={"t": {"chunks": (10, 3, 4)}})
    xr.testing.assert_equal(head(tmp_path / "s"), days(*range(5)))


def test_a_commit_every_so_many_files(files, tmp_path):
    place = tmp_path / "r"
    report = ingest(SPARK, files, place, append_dim="time", files_per_commit=2, message="days")
    assert messages(place) == ["days"] * 3
    assert len(report.snapshot_ids) == 3
    assert [file.snapshot_id for file in report.added] == [
        report.snapshot_ids[n] for n in (0, 0, 1, 1, 2)
    ]
    xr.testing.assert_identical(head(place), days(*range(5)))


def test_into_a_group_that_write_made(files, tmp_path):
    first = days(0, 1).assign(mask=(("lat", "lon"), np.ones((3, 4))))
    zm.write(first, tmp_path / "r", message="by hand", group="a/b")
    ingest(SPARK, files[2:], tmp_path / "r", append_dim="time", group="a/b")
    ingest(SPARK, files, tmp_path / "r", append_dim="time", group="/c/d")
    xr.testing.assert_equal(head(tmp_path / "r", group="a/b").drop_vars("mask"), days(*range(5)))
    xr.testing.assert_equal(head(tmp_path / "r", group="c/d"), days(*range(5)))


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
            },
            {"time": time, "x": [1, 2]},
        )
        ds.p.encoding = {"dtype": "i2", "scale_factor": 0.5, "_FillValue": np.int16(-9)}
        ds.time.attrs["bounds"] = "time_bnds"
        ds.time.encoding["units"] = f"days since 2000-0{number + 1}-01"
        paths.append(save(ds, tmp_path / f"{number}.nc"))
    ingest(SPARK, paths, tmp_path / "r", append_dim="time")
    found = head(tmp_path / "r")
    assert found.p.values.tolist()[0][0] == 1.5
    assert np.isnan(found.p.values[:, 1]).tolist() == [True, False] * 3
    assert found.p.encoding["scale_factor"] == 0.5
    assert head(tmp_path / "r", mask_and_scale=False).p.dtype == np.dtype("i2")
    assert found.time.values[-1] == cftime.Datetime360Day(2000, 3, 4)
    assert (found.time_bnds.values[:, 0] == found.time.values).all()
    assert found.station.values.tolist() in (["a", "bc"], [b"a", b"bc"])
    assert int(found.crs) == 7


# --- agreement -------------------------------------------------------------------------------


def disagreeing(tmp_path: Path) -> dict[str, xr.Dataset]:
    other = day(1)
    packed = day(1)
    packed.t.encoding = {"dtype": "i2", "scale_factor": 0.5, "_FillValue": np.int16(-9)}
    calendar = day(1)
    calendar["time"] = xr.date_range("2024-01-03", periods=2, calendar="noleap", use_cftime=True)
    return {
        "'t' has units 'degC', and": other.assign(t=other.t.assign_attrs(units="degC")),
        "'t' is of type f8, and": other.astype("f8"),
        "'t' is of type i2, and": packed,
        "the dimension 'lat' has length 2, and": other.isel(lat=slice(0, 2)),
        "the values of 'lon' are others, and": other.assign_coords(lon=other.lon + 1),
        "there is a variable 'u', and": other.assign(u=other.t),
        "there is no variable 't', and": other.drop_vars("t"),
        "'t' has the dimensions (lat, time, lon), and": other.transpose("lat", "time", "lon"),
        "'time' has calendar 'noleap', and": calendar,
    }


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("there", [False, True])
def test_a_difference_is_named_with_its_file(files, tmp_path, number, there):
    told, ds = list(disagreeing(tmp_path).items())[number]
    unlimited = [] if told.startswith("'t' has the dimensions") else ["time"]
    wrong = save(ds, tmp_path / "wrong.nc", unlimited_dims=unlimited)
    place = tmp_path / "r"
    whose = files[0].as_uri()
    if there:
        ingest(SPARK, files[:1], place, append_dim="time")
        whose = "the group '/'"
    with pytest.raises(InvalidArgumentError) as error:
        ingest(SPARK, [files[0], wrong, files[2]], place, append_dim="time")
    assert "1 file cannot be ingested" in str(error.value)
    assert f"{wrong.as_uri()}: {told} {whose} has" in str(error.value)
    if there:
        assert messages(place) == ["ingest 1 files"]
    else:
        assert not zm.exists(place)
    report = ingest(SPARK, [*files, wrong], place, append_dim="time", on_error="report")
    assert names(report)["failed"] == ["wrong"]
    xr.testing.assert_identical(head(place), days(*range(5)))


def test_files_that_cannot_be_opened_are_left_out_if_asked(files, tmp_path):
    broken = tmp_path / "broken.nc"
    broken.write_bytes(b"CDF\x01 and nothing more")
    missing = tmp_path / "missing.nc"
    given, place = [broken, *files[:2], missing], tmp_path / "r"
    with pytest.raises(InvalidArgumentError, match="2 files cannot be ingested") as error:
        ingest(SPARK, given, place, append_dim="time")
    assert all(each.as_uri() in str(error.value) for each in (broken, missing))
    assert not zm.exists(place)
    report = ingest(SPARK, given, place, append_dim="time", on_error="report")
    assert names(report) == {"added": ["0", "1"], "failed": ["broken", "missing"]}
    assert "FileNotFoundError" in report.failed[1].reason
    xr.testing.assert_identical(head(place), days(0, 1))
    save(day(2), missing)  # they are not remembered, so that they can come later
    assert names(ingest(SPARK, [*files[:2], missing], place, append_dim="time")) == {
        "added": ["missing"]
    }
    only = ingest(SPARK, [broken], tmp_path / "s", append_dim="time", on_error="report")
    assert names(only) == {"failed": ["broken"]}
    assert only.snapshot_ids == ()


@pytest.mark.parametrize("how", ["changes", "breaks", "goes"])
def test_a_file_that_fails_while_it_is_written(files, tmp_path, tasks, how):
    """Nothing of it is committed, and nothing of the others is lost."""

    def fails() -> None:
        if how == "changes":
            save(day(2) + 1, files[2])
        elif how == "goes":
            files[2].unlink()
        else:
            state = files[2].stat()
            files[2].write_bytes(files[2].read_bytes()[:-200] + bytes(200))
            os.utime(files[2], ns=(state.st_atime_ns, state.st_mtime_ns))
            data = bytearray(files[2].read_bytes())
            data[:4] = b"none"
            files[2].write_bytes(data)
            os.utime(files[2], ns=(state.st_atime_ns, state.st_mtime_ns))

    tasks.before["_write"] = fails
    with pytest.raises(InvalidArgumentError, match=r"2\.nc: "):
        ingest(SPARK, files, tmp_path / "r", append_dim="time")
    assert not zm.exists(tmp_path / "r")
    save(day(2), files[2])
    tasks.before["_write"] = fails
    report = ingest(SPARK, files, tmp_path / "r", append_dim="time", on_error="report")
    assert names(report) == {"added": ["0", "1", "3", "4"], "failed": ["2"]}
    xr.testing.assert_identical(head(tmp_path / "r"), days(0, 1, 3, 4))
    assert messages(tmp_path / "r") == ["ingest 4 files"]
    assert zm.open(tmp_path / "r").verify().ok


def test_labels_have_to_follow(files, tmp_path):
    place = tmp_path / "r"
    ingest(SPARK, files[1:2], place, append_dim="time")
    with pytest.raises(InvalidArgumentError, match="begin at 2024-01-01, and what is there ends"):
        ingest(SPARK, files[:1], place, append_dim="time")
    twice = save(day(2).isel(time=[1]), tmp_path / "twice.nc")
    with pytest.raises(InvalidArgumentError, match=r"begin at 2024-01-06.*2\.nc ends at"):
        ingest(SPARK, [*files[2:], twice], place, append_dim="time")
    report = ingest(SPARK, [*files, twice], place, append_dim="time", on_error="report")
    assert names(report) == {"added": ["2", "3", "4"], "failed": ["0", "twice"]}


def test_times_that_the_array_cannot_hold_are_told_with_their_file(tmp_path):
    whole, half = day(0), day(1)
    whole.time.encoding["units"] = "days since 2024-01-01"
    half["time"] = half.time + np.timedelta64(6, "h")
    paths = [save(whole, tmp_path / "whole.nc"), save(half, tmp_path / "half.nc")]
    ingest(SPARK, paths[:1], tmp_path / "r", append_dim="time")
    with pytest.raises(InvalidArgumentError, match=r"half\.nc: .*'time' do not fit.*2024-01-03T06"):
        ingest(SPARK, paths, tmp_path / "r", append_dim="time")
    xr.testing.assert_identical(head(tmp_path / "r"), whole)


@pytest.mark.filterwarnings("ignore:Variable time has datetime type and a bounds variable")
@pytest.mark.parametrize("bounds", [False, True])
def test_units_are_chosen_from_the_times_of_all_files(tmp_path, bounds):
    """Of one hour, xarray makes days since that hour, and the first one is a midnight."""
    paths = []
    for hour in range(4):
        ds = day(0, rows=1)
        ds["time"] = ds.time + np.timedelta64(hour, "h")
        ds.time.encoding = {}
        if bounds:
            ds.time.attrs["bounds"] = "time_bnds"
            half = ds.time.values + np.array([-30, 30], "m8[m]").astype("m8[ns]")
            ds["time_bnds"] = (("time", "nv"), half[None])
        paths.append(save(ds, tmp_path / f"{hour}.nc"))
    assert "days since" in xr.open_dataset(paths[1], decode_times=False).time.units
    ingest(SPARK, paths, tmp_path / "r", append_dim="time", files_per_commit=2)
    found = head(tmp_path / "r")
    xr.testing.assert_equal(found, xr.open_mfdataset(paths).load())
    wanted = "minutes since" if bounds else "hours since"
    assert found.time.encoding["units"].startswith(wanted)


def test_an_hour_after_a_first_one_fits(tmp_path):
    """Of one time, xarray makes days since that time; each hour is a call of its own."""
    hours = [day(0, rows=1)] * 3
    for hour in range(3):
        ds = hours[hour] = hours[hour].copy()
        ds["time"] = ds.time + np.timedelta64(hour, "h")
        ds.time.encoding = {}
        path = save(ds, tmp_path / f"{hour}.nc")
        assert xr.open_dataset(path, decode_times=False).time.units.startswith("days since")
        report = zm.ingest([path], tmp_path / "r", append_dim="time")
        assert str(report).startswith("1 file added, in 1 commit: ")
    xr.testing.assert_equal(head(tmp_path / "r"), xr.concat(hours, "time"))


def test_without_spark_this_process_reads_and_writes(files, tasks):
    told: list[IngestProgress] = []
    place = MemoryStorage()
    report = zm.ingest(files, place, append_dim="time", progress=told.append)
    assert names(report) == {"added": list("01234")}
    xr.testing.assert_identical(head(place), days(*range(5)))
    assert tasks.kinds == []
    assert (told[0].doing, told[-1].doing, told[-1].files) == ("looking", "writing", 5)
    assert zm.ingest(files, place, append_dim="time").unchanged == 5
    assert messages(place) == ["ingest 5 files"]


def test_times_in_parts_of_hours_are_stored_as_near_as_the_array_can(tmp_path):
    """Monthly means that lie a 24th of a year apart, in hours since a time of their own."""
    paths = []
    for number in range(3):
        ds = day(number)
        ds["time"] = FIRST + ((2 * number + np.arange(2)) * 2629743840000007).astype("m8[ns]")
        ds.time.encoding = {"units": f"hours since 202{number}-01-14 14:00:00", "dtype": "f8"}
        paths.append(save(ds, tmp_path / f"{number}.nc"))
    ingest(SPARK, paths, tmp_path / "r", append_dim="time")
    off = head(tmp_path / "r").time.values - (FIRST + np.arange(6) * 2629743840000007)
    assert np.abs(off).max() < np.timedelta64(1, "ms")
    save(ds.assign(t=-ds.t), paths[2])
    report = ingest(SPARK, paths, tmp_path / "r", append_dim="time", on_changed="replace")
    assert report.replaced[0].start == 4


# --- the same call again ---------------------------------------------------------------------


def test_the_same_list_does_nothing_and_a_longer_one_appends(files, tmp_path, tasks):
    place = tmp_path / "r"
    ingest(SPARK, files[:2], place, append_dim="time")
    head_id, writes = zm.open(place).list_branches()["main"], tasks.writes
    report = ingest(SPARK, files[:2], place, append_dim="time")
    assert (report.snapshot_ids, report.unchanged, report.added) == ((), 2, ())
    assert str(report) == "nothing to do: 2 files were there already"
    assert zm.open(place).list_branches()["main"] == head_id
    assert tasks.writes == writes
    report = ingest(SPARK, files, place, append_dim="time")
    assert (names(report), report.unchanged) == ({"added": ["2", "3", "4"]}, 2)
    assert messages(place) == ["ingest 2 files", "ingest 3 files"]
    xr.testing.assert_identical(head(place), days(*range(5)))


def test_one_file_is_a_list_of_one(files, tmp_path):
    place = tmp_path / "r"
    assert len(ingest(SPARK, files[0], place, append_dim="time").added) == 1
    assert len(ingest(SPARK, str(files[1]), place, append_dim="time").added) == 1


def test_what_was_ingested_opens_as_a_tree(files, tmp_path):
    place = tmp_path / "r"
    zm.write(days(0), place, group="other", message="beside it")
    ingest(SPARK, files[:2], place, append_dim="time", group="air")
    tree = xr.open_datatree(str(place), engine="zarr_manifests")
    assert {"air", "other"} <= {*tree.children}


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
    xr.testing.assert_identical(head(place), expected)
    assert ingest(SPARK, files, place, on_changed="replace", **how).snapshot_ids == ()
    moved = day(9)
    save(moved, files[1])
    with pytest.raises(InvalidArgumentError, match="other rows along 'time' than before"):
        ingest(SPARK, files, place, on_changed="replace", **how)
    xr.testing.assert_identical(head(place), expected)


def test_other_variables_or_options_are_a_change(tmp_path):
    path = save(day(0).assign(u=day(0).t * 2, n=("time", [1, 2])), tmp_path / "0.nc")
    place = tmp_path / "r"
    ingest(SPARK, [path], place, append_dim="time", variables=["t"])
    assert set(head(place).variables) == {"t", "time", "lat", "lon"}
    ingest(SPARK, [path], place, append_dim="time", variables=("t",))
    with pytest.raises(InvalidArgumentError, match="not what was ingested"):
        ingest(SPARK, [path], place, append_dim="time")
    with pytest.raises(InvalidArgumentError, match="there is a variable 'n', and the group"):
        ingest(SPARK, [path], place, append_dim="time", on_changed="replace")
    with pytest.raises(InvalidArgumentError, match="no variable 'w' in it"):
        ingest(SPARK, [path], tmp_path / "s", append_dim="time", variables=["w"])


def test_what_is_known_of_files_goes_back_with_the_branch(files, tmp_path):
    place = tmp_path / "r"
    first = ingest(SPARK, files[:2], place, append_dim="time").snapshot_ids[0]
    ingest(SPARK, files, place, append_dim="time")
    repository = zm.open(place)
    repository.reset_branch("main", first, force=True)
    assert names(ingest(SPARK, files, repository, append_dim="time")) == {"added": ["2", "3", "4"]}
    zm.write(days(0), place, message="anew", mode="w")  # takes the records with it
    assert names(ingest(SPARK, files[1:], place, append_dim="time")) == {
        "added": ["1", "2", "3", "4"]
    }
    xr.testing.assert_equal(head(place), days(*range(5)))


def test_what_is_known_of_files_is_no_variable_and_grows_with_the_new_ones(files, tmp_path):
    place = tmp_path / "r"
    ingest(SPARK, files[:2], place, append_dim="time")
    assert "_ingest" not in head(place)
    group = zarr.open_group(zm.open(place).readonly_session().store, mode="r")
    before = group["_ingest/files"][:].tobytes()
    ingest(SPARK, files, place, append_dim="time")
    group = zarr.open_group(zm.open(place).readonly_session().store, mode="r")
    after = group["_ingest/files"][:].tobytes()
    assert after.startswith(before)
    assert len(after.splitlines()) == 5


# --- two at once -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs"), [((0, 1, 2), (0, 1, 2)), ((0, 1, 2), (0, 1)), ((0, 1), (0, 1, 2, 3))]
)
@pytest.mark.parametrize("made", [False, True])
def test_two_drivers_ingest_each_file_once(files, tmp_path, tasks, mine, theirs, made):
    """The other one begins and ends while this one writes."""
    place = tmp_path / "r"
    if made:
        zm.write(days(0).isel(time=[]), place, message="made")
        zm.open(place)
    start = 0
    if made:
        start = len(messages(place))
    reports = []

    def other() -> None:
        picked = [files[n] for n in theirs]
        reports.append(ingest(SPARK, picked, place, append_dim="time"))

    tasks.before["_write"] = other
    report = ingest(SPARK, [files[n] for n in mine], place, append_dim="time")
    every = sorted({*mine, *theirs})
    xr.testing.assert_equal(head(place), days(*every))
    assert names(reports[0]) == {"added": [str(n) for n in theirs]}
    rest = [str(n) for n in mine if n not in theirs]
    assert names(report) == ({"added": rest} if rest else {})
    assert report.unchanged == len(mine) - len(rest)
    assert len(messages(place)) == start + 1 + bool(rest)
    assert zm.open(place).verify().ok


def test_another_append_in_the_meantime_is_found(files, tmp_path, tasks):
    place = tmp_path / "r"
    ingest(SPARK, files[:1], place, append_dim="time")

    def append() -> None:
        zm.write(day(1), place, message="by hand", append_dim="time")

    tasks.before["_write"] = append
    ingest(SPARK, files[2:], place, append_dim="time")
    xr.testing.assert_equal(head(place), days(*range(5)))
    tasks.before["_write"] = lambda: zm.write(day(6), place, message="by hand", append_dim="time")
    late = save(day(5), tmp_path / "5.nc")
    with pytest.raises(InvalidArgumentError, match="what is there ends at 2024-01-14"):
        ingest(SPARK, [late], place, append_dim="time")


def test_it_gives_up_when_others_are_always_faster(files, tmp_path, tasks):
    """Each time it writes, somebody else ingests a file of another place before it can commit."""
    place = zm.create(tmp_path / "r", {"commits": {"attempts": 2}})
    ingest(SPARK, files[:1], place, append_dim="time")

    def change() -> None:
        tasks.before["_write"] = change
        session = place.writable_session()
        add_records(session.store, "", [FileRecord("s3://b/x.nc", 1, "", "", 0, 1)], 3)
        session.commit("other")

    tasks.before["_write"] = change
    with pytest.raises(ConflictError):
        ingest(SPARK, files[1:], place, append_dim="time")
    assert messages(tmp_path / "r") == ["ingest 1 files"] + ["other"] * 3
    tasks.before.clear()
    assert len(ingest(SPARK, files, place, append_dim="time").added) == 4
    xr.testing.assert_equal(head(place), days(*range(5)))


# --- other files -----------------------------------------------------------------------------


def test_a_file_without_the_dimension_is_one_row(tmp_path):
    expected = xr.concat([day(n, rows=1) for n in range(3)], "time")
    expected = expected.assign_coords(height=(("lat", "lon"), np.ones((3, 4))))
    paths = [save(expected.isel(time=n), tmp_path / f"{n}.nc", unlimited_dims=[]) for n in range(3)]
    ingest(SPARK, paths, tmp_path / "r", append_dim="time")
    xr.testing.assert_equal(head(tmp_path / "r"), expected)
    no = save(day(0).isel(time=0, drop=True), tmp_path / "no.nc", unlimited_dims=[])
    with pytest.raises(InvalidArgumentError, match=r"no\.nc: .*has no dimension 'time'"):
        ingest(SPARK, [no], tmp_path / "r", append_dim="time")


def test_files_without_labels_stay_in_the_order_given(tmp_path):
    paths = [save(day(n).drop_vars("time"), tmp_path / f"{n}.nc") for n in (2, 0, 1)]
    ingest(SPARK, paths, tmp_path / "r", append_dim="time")
    assert head(tmp_path / "r").t.values[:, 0, 0].tolist() == [200, 212, 0, 12, 100, 112]
    save(day(7).drop_vars("time"), paths[1])
    ingest(SPARK, paths, tmp_path / "r", append_dim="time", on_changed="replace")
    assert head(tmp_path / "r").t.values[:, 0, 0].tolist() == [200, 212, 700, 712, 100, 112]
    save(day(7).drop_vars("time").isel(time=[0]), paths[1])
    with pytest.raises(InvalidArgumentError, match="other rows along 'time' than before"):
        ingest(SPARK, paths, tmp_path / "r", append_dim="time", on_changed="replace")


def test_zarr_stores(tmp_path):
    paths = []
    for n in range(3):
        paths.append(tmp_path / f"{n}.zarr")
        day(n).to_zarr(paths[-1], consolidated=False)
    ingest(SPARK, paths[:2], tmp_path / "r", append_dim="time", open="zarr")
    assert ingest(SPARK, paths[:2], tmp_path / "r", append_dim="time", open="zarr").unchanged == 2
    ingest(SPARK, paths, tmp_path / "r", append_dim="time", open="zarr")
    xr.testing.assert_equal(head(tmp_path / "r"), days(0, 1, 2))


def test_a_function_opens_files(files, tmp_path):
    def doubled(path: str) -> xr.Dataset:
        return xr.open_dataset(path, engine="scipy") * 2

    ingest(SPARK, files, tmp_path / "r", append_dim="time", open=doubled)
    xr.testing.assert_equal(head(tmp_path / "r"), days(*range(5)) * 2)


def test_files_elsewhere_are_opened_by_fsspec(files, tmp_path):
    urls = [f"local://{file}" for file in files]
    how = {"append_dim": "time", "open_options": {"engine": "scipy"}}
    ingest(SPARK, urls, tmp_path / "r", **how)
    assert ingest(SPARK, urls, tmp_path / "r", **how).unchanged == 5
    xr.testing.assert_equal(head(tmp_path / "r"), days(*range(5)))


@pytest.mark.parametrize(
    "url",
    [
        "s3://me:SECRET@bucket/a.nc",
        "simplecache::https://me:SECRET@data.org/a.nc",
        "zip://a.nc::https://me:SECRET@data.org/a.zip",
        "https://data.org/a.nc?X-Amz-Signature=SECRET",
        "filecache::https://data.org/a.nc?sig=SECRET",
        "https:me:SECRET@data.org",
    ],
)
def test_urls_with_secrets_are_not_ingested(tmp_path, url):
    """Where files came from is written to the repository."""
    with pytest.raises(InvalidArgumentError) as caught:
        ingest(SPARK, [url], tmp_path / "r", append_dim="time")
    assert "SECRET" not in str(caught.value)
    assert not (tmp_path / "r").exists()


# --- virtual ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["netcdf", "zarr"])
def test_chunks_are_referred_to(tmp_path, kind):
    raw = tmp_path / "raw"
    raw.mkdir()
    paths = []
    for n in range(4):
        paths.append(raw / f"{n}")
        if kind == "zarr":
            day(n).to_zarr(paths[-1], consolidated=False, encoding={"t": {"chunks": (1, 3, 2)}})
        else:
            save(day(n), paths[-1])
    place = zm.create(tmp_path / "r", virtual_containers={"raw": raw})
    how: Any = {"append_dim": "time", "open": kind, "virtual": True}
    ingest(SPARK, paths[:2], place, **how)
    assert ingest(SPARK, paths[:2], place, **how).snapshot_ids == ()
    report = ingest(SPARK, paths, place, **how)
    assert names(report) == {"added": ["2", "3"]}
    xr.testing.assert_equal(head(place), days(*range(4)))
    refs = place.readonly_session().chunk_refs("t")
    assert {ChunkKind(each).name for each in refs.kind} == {"VIRTUAL"}
    assert all(url.startswith("virtual://raw/") for url in refs.locations)
    assert place.verify().ok
    os.utime(paths[3] if kind == "netcdf" else next(paths[3].rglob("c/0/0/0")), (1, 1))
    with pytest.raises(VirtualSourceChangedError):
        head(place)


def test_a_virtual_file_without_the_dimension_is_one_row(tmp_path):
    paths = [
        save(day(n, rows=1).squeeze("time"), tmp_path / f"{n}.nc", unlimited_dims=[])
        for n in range(3)
    ]
    place = zm.create(tmp_path / "r", virtual_containers={"raw": tmp_path})
    ingest(SPARK, paths, place, append_dim="time", virtual=True)
    expected = xr.concat([day(n, rows=1) for n in range(3)], "time")
    xr.testing.assert_equal(head(place), expected)


def test_references_have_to_fit(tmp_path):
    place = zm.create(tmp_path / "r", virtual_containers={"raw": tmp_path})
    how: Any = {"append_dim": "time", "virtual": True}
    whole = save(day(0), tmp_path / "0.nc", unlimited_dims=[])
    with pytest.raises(InvalidArgumentError, match="below no container"):
        ingest(SPARK, [whole], zm.open(tmp_path / "r"), **how)
    ingest(SPARK, [whole], place, **how)
    other = save(day(1).isel(time=[0]), tmp_path / "1.nc", unlimited_dims=[])
    with pytest.raises(InvalidArgumentError, match=r"chunks of 't' are \(1, 3, 4\) of >f4"):
        ingest(SPARK, [other], place, **how)
    longer = tmp_path / "z"
    day(0, rows=3).to_zarr(longer, consolidated=False, encoding={"t": {"chunks": (2, 3, 4)}})
    again = tmp_path / "y"
    day(1, rows=3).to_zarr(again, consolidated=False, encoding={"t": {"chunks": (2, 3, 4)}})
    with pytest.raises(InvalidArgumentError, match="begin at 3, within a chunk of 't'"):
        ingest(SPARK, [longer, again], place, open="zarr", group="z", **how)


@pytest.mark.parametrize(("head_bytes", "kind"), [(b"\x89HDF", "netcdf"), (b"GRIB", "grib")])
def test_what_is_not_installed_is_named(tmp_path, head_bytes, kind, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(head_bytes + bytes(100))
    for name in ("kerchunk.hdf", "kerchunk.grib2"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("xarray.backends.plugins.list_engines", dict)
    with pytest.raises(
        ImportError, match=r"zarr-manifests\[kerchunk\].*h5py.*zarr-manifests\[grib\]"
    ):
        scan_files.scan(str(file), kind, {})
    place = zm.create(tmp_path / "r", virtual_containers={"raw": tmp_path})
    with pytest.raises(ImportError, match=r"zarr-manifests\[kerchunk\]"):
        ingest(SPARK, [file], place, append_dim="time", open=kind, virtual=True)
    with pytest.raises(InvalidArgumentError, match=r"netCDF-4 and HDF5 take h5netcdf"):
        ingest(SPARK, [file], place, append_dim="time", open=kind)


def test_messages_of_a_grib_file_are_put_together(monkeypatch):
    """As `scan_grib` of kerchunk gives them: one set of references a message."""
    monkeypatch.setitem(
        __import__("sys").modules,
        "kerchunk.grib2",
        type("Module", (), {"scan_grib": staticmethod(lambda path: grib)}),
    )
    x = {"x/.zarray": '{"shape": [1]}', "x/0": "1"}
    grib = [
        {"refs": {".zgroup": "{}", "t/.zarray": "a", "t/0.0": ["f", 0, 9], **x}},
        {"refs": {".zgroup": "{}", "u/.zarray": "b", "u/0.0": ["f", 9, 9], **x}},
    ]
    found = scan_files._messages("f")["refs"]
    assert set(found) == {".zgroup", "t/.zarray", "t/0.0", "u/.zarray", "u/0.0", *x}
    grib.append({"refs": {"t/0.0": ["f", 18, 9]}})
    with pytest.raises(InvalidArgumentError, match="several messages of 't'"):
        scan_files._messages("f")


# --- the report, and what is refused ---------------------------------------------------------


def test_progress_and_report_say_what_goes_where(files, tmp_path):
    heard: list[IngestProgress] = []
    report = ingest(SPARK, files, tmp_path / "r", append_dim="time", progress=heard.append)
    sizes = sum(file.stat().st_size for file in files)
    assert [each.files for each in heard if each.doing == "looking"] == [2, 4, 5]
    for doing in ("looking", "writing"):
        last = [each for each in heard if each.doing == doing][-1]
        assert (last.files, last.of_files, last.nbytes) == (5, 5, sizes)
        assert last.rate > 0
    assert f"{IngestProgress('writing', 5, 6, 2_000_000, 0.5)}" == (
        "writing: 5 of 6 files, 2.00 MB, 4.00 MB/s"
    )
    text = str(report).splitlines()
    assert text[0].startswith("5 files added, in 1 commit: ")
    assert text[1:] == [
        f"  added {f.as_uri()}: rows {2 * n} to {2 * n + 1}" for n, f in enumerate(files)
    ]
    with pytest.raises(AttributeError):
        report.added = ()
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"virtual": "yes"}, "virtual must be True or False"),
        ({"on_error": "skip"}, "on_error must be"),
        ({"on_changed": "skip"}, "on_changed must be"),
        ({"open": "csv"}, "open must be one of 'netcdf'"),
        ({"open": day, "virtual": True}, "a function makes values"),
        ({"files_per_commit": 0}, "files_per_commit must be 1 or more"),
        ({"open_options": "x"}, "open_options must be a mapping, not 'x'"),
        ({"encoding": {"t": {"dtype": "i2"}}}, "the encoding of 't' has 'dtype'"),
    ],
)
def test_arguments_that_make_no_sense(files, tmp_path, options, told):
    with pytest.raises(InvalidArgumentError, match=told):
        ingest(SPARK, files, tmp_path / "r", append_dim="time", **options)


@pytest.mark.parametrize("when", ["looking", "writing", "committing"])
def test_a_first_ingest_that_fails_leaves_nothing(tmp_path, tasks, monkeypatch, when):
    noise = np.random.default_rng(0).random((10, 30, 400), "f4")  # too much for chunks in refs
    whole = xr.Dataset({"t": (("time", "y", "x"), noise)}, {"time": np.arange(10)})
    parts = [whole.isel(time=slice(first, first + 2)) for first in range(0, 10, 2)]
    files = [save(part, tmp_path / f"{number}.nc") for number, part in enumerate(parts)]
    wrong = parts[3].rename(t="u")
    place = tmp_path / "r"
    with monkeypatch.context() as patch:
        if when == "looking":
            save(wrong, files[3])
        elif when == "writing":
            tasks.before["_write"] = lambda: save(wrong, files[3])
        else:
            patch.setattr(Unmade, "cas", broken)
        with pytest.raises((InvalidArgumentError, StorageError), match=r"3\.nc: |is away"):
            ingest(SPARK, files, place, append_dim="time", files_per_commit=4)
    assert not zm.exists(place)
    assert not [path for path in place.rglob("*") if path.is_file() and "lock" not in path.name]
    save(parts[3], files[3])
    assert len(ingest(SPARK, files, place, append_dim="time").added) == 5
    xr.testing.assert_equal(head(place), whole)
    assert zm.open(place).verify().ok


def broken(storage: Unmade, key: str, *options: Any, **more: Any) -> Any:
    """A swap that fails, but for the one that stays in memory."""
    if storage._root is None:
        return UNBROKEN(storage, key, *options, **more)
    raise StorageError("the disk is away")


UNBROKEN = Unmade.cas


def test_what_cannot_work_is_refused_before_anything_is_written(files, tmp_path):
    with pytest.raises(UnsupportedStorageError, match="in the memory of this process"):
        ingest(SPARK, files, "memory://ingest", append_dim="time")
    with pytest.raises(InvalidArgumentError, match=r"0\.nc is in the list more than once"):
        ingest(SPARK, [*files, files[0]], tmp_path / "r", append_dim="time")
    zm.write(day(0)[["lat"]], tmp_path / "r", message="no time")
    with pytest.raises(InvalidArgumentError, match="no array in the group '/' has the dimension"):
        ingest(SPARK, files, tmp_path / "r", append_dim="time")
    assert ingest(SPARK, [], tmp_path / "s", append_dim="time").snapshot_ids == ()
    assert not zm.exists(tmp_path / "s")
