"""Writes from rows without Spark: every cell gets the value of its row, and no other does."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from row_writes import TableRows, rows_of, write_table
from zarr_manifests import Repository
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
)
from zarr_manifests.spark import cell_writer
from zarr_manifests.spark.dataframes import WriteOptions, plan_write

DIMS = ["time", "lat", "lon"]
TIMES = np.arange("2024-01", "2024-07", dtype="M8[M]").astype("M8[ns]")


def winds(times: Any = TIMES, lat: int = 5, lon: int = 8) -> xr.Dataset:
    shape = (len(times), lat, lon)
    values = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    coords = {"time": times, "lat": np.linspace(60, -60, lat), "lon": np.arange(lon) * 10.0}
    return xr.Dataset({"u": (DIMS, values)}, coords)


def opened(repo: Repository, group: str | None = None) -> xr.Dataset:
    return xr.open_dataset(repo, engine="zarr_manifests", group=group).load()


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    encoding = {"u": {"chunks": (2, 3, 4)}}
    zm.write(winds(), tmp_path / "r", message="half a year", encoding=encoding)
    return zm.open(tmp_path / "r")


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def later(months: int = 6, **sizes: int) -> xr.Dataset:
    times = (TIMES.astype("M8[M]") + np.timedelta64(months, "M")).astype("M8[ns]")
    return winds(times, **sizes) + 1000


@pytest.mark.parametrize(
    ("months", "error", "what"),
    [
        (0, AlreadyExistsError, "2024-01-01, 2024-02-01.* are there already"),
        (5, AlreadyExistsError, "2024-06-01 of 'time' is there already"),
        (-7, InvalidArgumentError, "2023-06-01 after 2024-06-01"),
    ],
)
def test_labels_to_append_go_behind(
    repo: Repository, months: int, error: type[Exception], what: str
) -> None:
    before = repo.readonly_session().snapshot_id
    with pytest.raises(error, match=f"{what}.*(?i:nothing was written)"):
        write_table(repo, rows_of(later(months), DIMS), target="u", dims=DIMS, append_dim="time")
    assert repo.readonly_session().snapshot_id == before


def test_dimensions_without_a_coordinate_have_positions(tmp_path: Path) -> None:
    ds = xr.Dataset({"a": (("y", "x"), np.arange(6.0).reshape(2, 3))})
    zm.write(ds, tmp_path, message="2 rows")
    repo = zm.open(tmp_path)
    rows = pa.table({"y": [3, 3, 2], "x": [0, 2, 1], "a": [30.0, 32.0, 21.0]})
    write_table(repo, rows, target="a", dims=["x", "y"], append_dim="y")
    nan = np.nan
    expected = [[0, 1, 2], [3, 4, 5], [nan, 21, nan], [30, nan, 32]]
    np.testing.assert_array_equal(opened(repo).a.values, expected)
    with pytest.raises(AlreadyExistsError, match=r"4 positions, so .* from 4 on, not 2, 3"):
        write_table(repo, rows, target="a", dims=["x", "y"], append_dim="y")


def over(repo: Repository, rows: pa.Table, **asked: Any) -> int:
    how = {"target": "u", "dims": DIMS, "mode": "overwrite-region", **asked}
    return write_table(repo, rows, **how)


def test_labels_are_looked_up_exactly(repo: Repository) -> None:
    rows = rows_of(-winds(), DIMS, seed=None)
    off = with_column(rows, "lat", np.asarray(rows["lat"]) + 1e-3)
    with pytest.raises(InvalidArgumentError, match=r"'lat'.*lat=60.001, lon=0.0.*tolerance"):
        over(repo, off)
    with pytest.raises(InvalidArgumentError, match="have no cell"):
        over(repo, off, tolerance={"lat": 1e-4})
    over(repo, off, tolerance={"lat": 1e-2})
    np.testing.assert_array_equal(opened(repo).u.values, -winds().u.values)
    late = rows_of(-winds(TIMES + np.timedelta64(30, "s")), DIMS)
    with pytest.raises(InvalidArgumentError, match=r"'time'.*2024-01-01T00:00:30"):
        over(repo, late)
    over(repo, late, tolerance={"time": timedelta(minutes=1)})
    np.testing.assert_array_equal(opened(repo).u.values, -winds().u.values)


@pytest.mark.parametrize(
    ("labels", "asked", "kind"),
    [
        (np.array([2**64 - 1, 7], "u8"), -1, pa.int64()),
        (np.array([-1, 7], "i8"), Decimal(2**64 - 1), pa.decimal128(20)),
        (np.array([2.0**24, 7], "f4"), 2**24 + 1, pa.int32()),
    ],
)
def test_a_whole_number_is_no_other_label(
    tmp_path: Path, labels: Any, asked: Any, kind: pa.DataType
) -> None:
    zm.write(xr.Dataset({"a": ("x", np.zeros(2))}, {"x": labels}), tmp_path, message="grid")
    repo = zm.open(tmp_path)
    how: dict[str, Any] = {"target": "a", "dims": ["x"], "missing": "keep"}
    rows = pa.table({"x": pa.array([asked], kind), "a": [1.0]})
    with pytest.raises(InvalidArgumentError, match="have no cell"):
        over(repo, rows, **how)
    over(repo, with_column(rows, "x", pa.array([7], kind)), **how)
    assert opened(repo).a.values.tolist() == [0, 1]


def test_a_double_is_no_label_beyond_its_precision(tmp_path: Path) -> None:
    ds = xr.Dataset({"a": ("x", np.zeros(2))}, {"x": np.array([2**53 + 1, 7])})
    zm.write(ds, tmp_path, message="grid")
    with pytest.raises(InvalidArgumentError, match="cast the column to bigint"):
        over(zm.open(tmp_path), pa.table({"x": [7.0], "a": [1.0]}), target="a", dims=["x"])


def test_whole_labels_and_texts(tmp_path: Path) -> None:
    labels = {"station": ["b", "a", "c"], "level": [1000, 500]}
    ds = xr.Dataset({"a": (("station", "level"), np.zeros((3, 2)))}, labels)
    zm.write(ds, tmp_path, message="grid")
    repo = zm.open(tmp_path)
    rows = pa.table({"level": [500.0, 1000.0], "station": ["c", "a"], "a": [1.0, 2.0]})
    how = {"target": "a", "dims": ["level", "station"], "missing": "keep"}
    over(repo, rows, **how)
    assert opened(repo).a.values.tolist() == [[0, 0], [2, 0], [0, 1]]
    for wrong in (
        with_column(rows, "level", [500.5, 1e30]),
        with_column(rows, "station", ["c", None]),
    ):
        with pytest.raises(InvalidArgumentError, match="have no cell"):
            over(repo, wrong, **how)


def test_a_region_is_one_run_that_has_all_rows(repo: Repository) -> None:
    rows = rows_of(-winds(), DIMS)
    with pytest.raises(InvalidArgumentError, match=r"outside the region.*lat=-60"):
        over(repo, rows, region={"lat": (-30, 60)})
    with pytest.raises(InvalidArgumentError, match="2 separate runs"):
        over(repo, rows, region={"lat": [60, -60]})
    with pytest.raises(InvalidArgumentError, match="selects nothing"):
        over(repo, rows, region={"lat": (70, 80)})


@pytest.mark.parametrize("gathered", [1, 10**9])
def test_two_rows_of_a_cell_are_refused(
    repo: Repository, monkeypatch: pytest.MonkeyPatch, gathered: int
) -> None:
    """Both gathered together, and by tasks of their own."""
    monkeypatch.setattr(cell_writer, "GATHER_BYTES", gathered)
    rows = rows_of(-winds(), DIMS)
    again = with_column(rows.slice(7, 1), "u", np.array([0.5], "f4"))
    place = [again[dim][0].as_py() for dim in DIMS]
    for both in (pa.concat_tables([again, rows]), pa.concat_tables([rows, again])):
        with pytest.raises(InvalidArgumentError) as found:
            over(repo, both)
        assert f"lat={place[1]:g}, lon={place[2]:g}" in str(found.value)
        assert "0.5" in str(found.value)
        assert f"{rows['u'][7].as_py():g}" in str(found.value)
        assert "time=2024-0" in str(found.value)


def test_chunks_without_any_row_count_too(repo: Repository) -> None:
    rows = rows_of(-winds().isel(time=[0], lat=[0], lon=[0]), DIMS)
    whole = {"region": {"time": (None, None)}, "buffer_bytes": 1}
    with pytest.raises(InvalidArgumentError, match="no row for"):
        over(repo, rows, missing="error", **whole)
    over(repo, rows, missing="fill", **whole)
    assert int(opened(repo).u.notnull().sum()) == 1


def test_nothing_stands_for_a_missing_integer(tmp_path: Path) -> None:
    ds = xr.Dataset({"n": ("x", np.arange(4, dtype="i4"))}, {"x": np.arange(4)})
    zm.write(ds, tmp_path, message="integers")
    repo = zm.open(tmp_path)
    how = {"target": "n", "dims": ["x"]}
    gap = pa.table({"x": [0, 3], "n": pa.array([7, 8], pa.int32())})
    with pytest.raises(InvalidArgumentError, match=r"no row for x=1; x=2: 'n', of type int32"):
        over(repo, gap, **how)
    with pytest.raises(InvalidArgumentError, match="NULL at x=3 "):
        over(repo, with_column(gap, "n", pa.array([7, None], pa.int32())), **how)
    over(repo, gap, **how, missing="keep")
    assert opened(repo).n.values.tolist() == [7, 1, 2, 8]


def test_null_is_the_missing_value(tmp_path: Path) -> None:
    """Of packed values, of integers that have one, and of floats."""
    ds = xr.Dataset({name: ("x", np.arange(4.0)) for name in "abc"}, {"x": np.arange(4)})
    packed = {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -1}
    encoding = {"a": packed, "b": {"dtype": "i4", "_FillValue": -9}}
    zm.write(ds, tmp_path, message="three", encoding=encoding)
    repo = zm.open(tmp_path)
    values = pa.array([None, 7, None, 8], pa.int64())
    rows = pa.table({"x": [0, 1, 2, 3], "a": values, "b": values, "c": values})
    over(repo, rows, target="/", dims=["x"])
    for name in "abc":
        np.testing.assert_array_equal(opened(repo)[name].values, [np.nan, 7, np.nan, 8])


def test_a_date_that_a_missing_one_would_hide_is_refused(tmp_path: Path) -> None:
    """Xarray cannot open a group with both: another cell may have none."""
    seen = np.array(["2024-01-01", "2024-03-01"], "M8[s]")
    ds = xr.Dataset({"seen": ("x", seen)}, {"x": [1, 2]})
    encoding = {"units": "hours since 2000-01-01", "dtype": "f8"}
    zm.write(ds, tmp_path, message="times", encoding={"seen": encoding})
    day = pa.array(np.array(["3000-01-01"], "M8[us]"), pa.timestamp("us", tz="UTC"))
    far = pa.table({"x": [1], "seen": day})
    how: dict[str, Any] = {"target": "seen", "dims": ["x"], "missing": "keep"}
    with pytest.raises(InvalidArgumentError, match="beside a missing date"):
        over(zm.open(tmp_path), far, **how)


def test_what_is_there_is_the_grid(repo: Repository) -> None:
    """A variable on coordinates of the group, as a path of its own."""
    mean = winds().u.mean("time").to_dataset(name="mean")
    write_table(repo, rows_of(mean, DIMS[1:]), target="/mean", dims=["lon", "lat"], mode="create")
    xr.testing.assert_equal(opened(repo), winds().assign(mean=mean["mean"].T))
    off = rows_of(mean.rename(mean="other"), DIMS[1:])
    off = with_column(off, "lat", np.asarray(off["lat"]) + 1)
    with pytest.raises(InvalidArgumentError, match="have no cell in the grid"):
        write_table(repo, off, target="other", dims=["lon", "lat"], mode="create")


def test_nothing_is_created_if_it_fails(repo: Repository) -> None:
    before = repo.readonly_session().snapshot_id
    rows = rows_of(winds().rename(u="v"), DIMS)
    both = pa.concat_tables([rows, rows])
    with pytest.raises(InvalidArgumentError, match="two rows"):
        write_table(repo, both, target="g", dims=DIMS, mode="create")
    with pytest.raises(AlreadyExistsError, match="/u is there already"):
        write_table(repo, rows_of(winds(), DIMS), target="/", dims=DIMS, mode="create")
    assert repo.readonly_session().snapshot_id == before
    assert list(zarr.open_group(repo.readonly_session().store, mode="r")) == [*sorted([*DIMS, "u"])]


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"mode": "replace"}, "mode cannot be 'replace'"),
        ({"append_dim": "time"}, "append_dim goes with mode='append'"),
        ({"tolerance": {"lat": -1}}, "not a tolerance"),
        ({"dims": ["time", "lat"], "target": "/"}, r"'lon' has the dimensions \(lon\), and"),
        ({"dims": [*DIMS, "x"]}, "no column 'x'"),
    ],
)
def test_options_that_cannot_be(repo: Repository, asked: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidArgumentError, match=what):
        over(repo, rows_of(winds(), DIMS), **asked)


def test_a_tip_with_other_labels_is_a_conflict(repo: Repository) -> None:
    """Rows were looked up in the old ones."""
    rows, session = rows_of(-winds(), DIMS), repo.writable_session()
    options = WriteOptions(
        target="u", dims=DIMS, mode="overwrite-region", region={"lat": (None, None)}
    )
    table = TableRows(rows)
    plan = plan_write(session, options, table)
    assert plan is not None
    session.merge(*(fork for fork, _ in table.fill(plan, session.fork())))
    north = winds().isel(time=slice(0), lon=slice(0)).drop_vars(["time", "lon", "u"])
    zm.write(north.assign_coords(lat=north.lat + 1), repo, message="shift", mode="a")
    with pytest.raises(ConflictError, match="changed the coordinate 'lat'"):
        session.commit("rows")


@pytest.mark.parametrize(
    ("kind", "given", "read"),
    [
        ("u8", "-1", None),
        ("i8", "18446744073709551617", None),
        ("i8", "1152921504606846977", 1152921504606846977),
        ("u8", "18446744073709551615", 18446744073709551615),
    ],
)
def test_decimals_are_whole_numbers_or_refused(
    kind: str, given: str, read: int | None, tmp_path: Path
) -> None:
    repo = zm.create(tmp_path)
    zm.write(xr.Dataset({"v": ("x", np.zeros(2, kind))}, {"x": [0, 1]}), repo, message="m")
    table = pa.table({"x": [0], "v": pa.array([Decimal(given)], pa.decimal128(38, 0))})
    expected = contextlib.nullcontext() if read else pytest.raises(InvalidArgumentError)
    with expected:
        over(repo, table, target="/", dims=["x"])
    assert opened(repo).v.values.tolist() == [read or 0, 0]


def test_a_group_keeps_its_attributes(tmp_path: Path) -> None:
    zm.write(winds().assign_attrs(title="winds"), tmp_path, message="winds")
    repo = zm.open(tmp_path)
    rows = rows_of(winds().rename(u="v"), DIMS)
    write_table(repo, rows, target="v", dims=DIMS, mode="create")
    assert opened(repo).attrs == {"title": "winds"}


def test_columns_and_targets(repo: Repository) -> None:
    rows = rows_of(winds(), DIMS)
    with pytest.raises(InvalidArgumentError, match="one column besides dims, named 'u'"):
        over(repo, rows.rename_columns([*DIMS, "v"]))
    with pytest.raises(NotFoundError, match="no variable 'v' in group /; mode='create'"):
        over(repo, rows.rename_columns([*DIMS, "v"]), target="/")
    with pytest.raises(InvalidArgumentError, match="cast the column"):
        over(repo, with_column(rows, "u", ["x"] * rows.num_rows))
    with pytest.raises(InvalidArgumentError, match=r"'lat' is of type string.*numbers"):
        over(repo, with_column(rows, "lat", ["x"] * rows.num_rows))


def test_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Whole days stay whole days."""
    encoding = {"time": {"units": "days since 2024-01-01", "dtype": "i4"}}
    zm.write(winds(), tmp_path, message="days", encoding=encoding)
    more = winds(TIMES + np.timedelta64(200 * 24 + 6, "h"))
    with pytest.raises(InvalidArgumentError, match=r"labels of 'time' do not fit.*06:00"):
        write_table(
            zm.open(tmp_path), rows_of(more, DIMS), target="/", dims=DIMS, append_dim="time"
        )


def test_encodings_say_how_new_variables_are_stored(repo: Repository) -> None:
    packed = {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -1, "chunks": (6, 5, 2)}
    rows = rows_of(winds().rename(u="v"), DIMS)
    write_table(repo, rows, target="v", dims=DIMS, mode="create", encoding={"v": packed})
    found = opened(repo).v
    np.testing.assert_array_equal(found.values, winds().u.values)
    assert {key: found.encoding[key] for key in packed} == packed
