"""Reading cells with Spark, against xarray reading the same snapshot."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import cftime
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xarray as xr
import zarr
from pyspark import cloudpickle
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.error_cases import NotARepositoryError, UnsupportedStorageError
from zarr_manifests.errors import (
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.ids import snapshot_key
from zarr_manifests.session import Session
from zarr_manifests.spark import read
from zarr_manifests.spark.schema import Column, column_of, to_arrow
from zarr_manifests.spark.source import Source
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.testing.wrapped import Call, WrappedStorage

# Workers cannot import this module; what they need of it travels by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

MONTHS, LATS, LONS = 24, 37, 72
ENGINES: tuple[Any, ...] = ("arrow", "pandas")


def winds() -> xr.Dataset:
    """Winds on a grid that runs from north to south, with land where there are none."""
    rng = np.random.default_rng(7)
    shape = (MONTHS, LATS, LONS)
    u, v = (rng.normal(0, 6, shape).round(2).astype("f4") for _ in range(2))
    land = rng.random(shape[1:]) < 0.2
    u[:, land] = v[:, land] = np.nan
    v[3, 0, 0] = np.nan
    return xr.Dataset(
        {
            "u": (("time", "lat", "lon"), u, {"units": "m/s", "long_name": "eastward wind"}),
            "v": (("time", "lat", "lon"), v, {"units": "m/s"}),
        },
        {
            "time": pd.date_range("1999-01-15 12:00", periods=MONTHS, freq="30D"),
            "lat": np.linspace(90, -90, LATS, dtype="f4"),
            "lon": np.linspace(0, 355, LONS),
            "height": 10.0,
        },
        {"title": "winds"},
    )


PACKED = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 1.5, "_FillValue": -32768}


def write(
    place: Path, ds: xr.Dataset, encoding: Any = None, group: str | None = None
) -> Repository:
    # One object a chunk, so that reads of chunks can be counted.
    repo = zm.open(place, {"pack-chunk-bytes": 0}, create=True)
    with repo.transaction(message="write") as store:
        ds.to_zarr(store, group=group, consolidated=False, encoding=encoding or {})
    return repo


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    chunks = {"chunks": (4, LATS, 36)}
    encoding = {"u": chunks, "v": chunks | PACKED}
    return write(tmp_path_factory.mktemp("winds") / "repo", winds(), encoding)


def opened(repo: Repository, group: str | None = None) -> xr.Dataset:
    store = repo.readonly_session().store
    return xr.open_zarr(store, group=group, consolidated=False, chunks=None)


def cells(frame: DataFrame, *order: str) -> pd.DataFrame:
    """The rows in order, with nulls apart from NaN."""
    table = frame.toArrow()
    table = table.sort_by([(name, "ascending") for name in order]) if order else table
    return table.to_pandas(types_mapper=pd.ArrowDtype)


def same(frame: DataFrame, expected: xr.Dataset) -> None:
    """Compare with what xarray has read, cell by cell."""
    dims = [*next(iter(expected.data_vars.values())).dims]
    found = cells(frame, *dims)
    wanted = expected.drop_vars("height", errors="ignore").to_dataframe(dim_order=dims)
    wanted = wanted.reset_index().sort_values(dims, ignore_index=True)
    assert list(found.columns) == list(wanted.columns)
    assert len(found) == len(wanted)
    for name in wanted:
        mine, theirs = found[name].to_numpy(), wanted[name].to_numpy()
        if mine.dtype.kind == "O":
            mine = found[name].astype("datetime64[us, UTC]").dt.tz_localize(None).to_numpy()
        np.testing.assert_array_equal(mine, theirs)


# --- what is read ----------------------------------------------------------------------------


@pytest.mark.spark
def test_cells_are_what_xarray_reads(spark: SparkSession, repo: Repository) -> None:
    frame = read(spark, repo.storage.url)
    assert frame.columns == ["time", "lat", "lon", "u", "v"]
    same(frame, opened(repo))


@pytest.mark.spark
def test_monthly_mean_speed_in_sql_is_xarrays(spark: SparkSession, repo: Repository) -> None:
    read(spark, repo, nan="null").createOrReplaceTempView("winds")
    found = spark.sql(
        "SELECT date_trunc('month', time) AS month, avg(hypot(u, v)) AS speed "
        "FROM winds GROUP BY month ORDER BY month"
    ).collect()
    ds = opened(repo).astype("f8")
    speed = np.hypot(ds.u, ds.v).groupby(ds.time.astype("M8[M]").rename("month")).mean(...)
    assert len(found) == len(speed)
    np.testing.assert_allclose([row.speed for row in found], speed, rtol=1e-12)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("ranges", "selection"),
    [
        ({"lat": (-30, 30)}, {"lat": slice(30, -30)}),
        ({"lat": (-30.0, None), "lon": (None, 50)}, {"lat": slice(None, -30), "lon": slice(0, 50)}),
        ({"time": ("1999-03", "1999-12")}, {"time": slice("1999-03", "1999-12")}),
        ({"time": ("2000", None)}, {"time": slice("2000", None)}),
        ({"time": (pd.Timestamp(2000, 2, 9, 12), date(2000, 7, 8))}, {"time": slice(13, 19)}),
        ({"lon": (355, 355)}, {"lon": slice(355, 355)}),
        ({"lat": (None, None)}, {}),
    ],
)
def test_ranges_select_what_xarray_selects(
    spark: SparkSession, repo: Repository, ranges: dict[str, Any], selection: dict[str, slice]
) -> None:
    ds = opened(repo)
    if isinstance(selection.get("time", slice("")).start, int):
        expected = ds.isel(selection)
    else:
        expected = ds.sel(selection)
    assert expected.sizes["time"] > 0
    same(read(spark, repo, ranges=ranges), expected)


@pytest.mark.spark
def test_a_coordinate_in_any_order_is_masked(spark: SparkSession, tmp_path: Path) -> None:
    ds = winds()
    ds = ds.isel(lon=np.roll(np.arange(LONS), 30), time=np.argsort(np.sin(np.arange(MONTHS))))
    repo = write(tmp_path / "repo", ds, {"u": {"chunks": (2, 9, 7)}, "v": {"chunks": (3, 9, 7)}})
    ranges = {"lon": (100, 250), "time": ("1999-05-01", "2000-04-30")}
    ds = opened(repo)
    expected = ds.sortby("time").sel(time=slice("1999-05-01", "2000-04-30"))
    expected = expected.isel(lon=np.flatnonzero((ds.lon >= 100) & (ds.lon <= 250)))
    same(read(spark, repo, ranges=ranges, target_rows=1000), expected)


@pytest.mark.spark
def test_what_becomes_of_nan(spark: SparkSession, repo: Repository) -> None:
    ds = opened(repo)
    missing = ds.isnull().to_dataframe()
    count = {name: int(missing[name].sum()) for name in ("u", "v")}
    neither = int((missing.u & missing.v).sum())
    assert 0 < count["u"] == neither < count["v"]

    def counts(nan: Any) -> tuple[int, ...]:
        frame = read(spark, repo, nan=nan)
        query = [f"count_if({name} {what})" for name in "uv" for what in ("IS NULL", "= 'NaN'")]
        return tuple(frame.selectExpr("count(*)", *query).first())  # type: ignore[arg-type]

    assert counts("keep") == (ds.u.size, 0, count["u"], 0, count["v"])
    assert counts("null") == (ds.u.size, count["u"], 0, count["v"], 0)
    assert counts("drop") == (ds.u.size - neither, 0, 0, count["v"] - neither, 0)


@pytest.mark.spark
def test_one_variable_of_a_group_at_a_tag(spark: SparkSession, tmp_path: Path) -> None:
    ds = winds().isel(time=slice(0, 2))
    repo = write(tmp_path / "repo", ds, group="a/b")
    repo.create_tag("first")
    expected = opened(repo, "a/b").load()
    with repo.transaction(message="calm") as store:
        (ds * 0).to_zarr(store, group="a/b", mode="r+", consolidated=False)
    same(read(spark, repo, "u", group="/a/b", version="first"), expected[["u"]])
    calm = read(spark, repo, ["v"], group="a/b/", version="main", nan="drop")
    assert calm.agg({"v": "max"}).first()[0] == 0  # type: ignore[index]


@pytest.mark.spark
def test_a_frame_stays_at_its_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    ds = winds().isel(time=slice(0, 4))
    repo = write(tmp_path / "repo", ds)
    before = opened(repo).load()
    frame = read(spark, tmp_path / "repo")
    with repo.transaction(message="next") as store:
        winds().isel(time=slice(4, 6)).to_zarr(store, append_dim="time", consolidated=False)
    same(frame, before)
    same(read(spark, tmp_path / "repo"), opened(repo))


@pytest.mark.spark
def test_scalars_empty_arrays_and_positions(spark: SparkSession, tmp_path: Path) -> None:
    ds = xr.Dataset(
        {
            "scalar": ((), np.int16(7)),
            "none": (("x", "y"), np.empty((0, 3), "f4")),
            "bare": (("x2", "y"), np.arange(12.0).reshape(4, 3)),
        }
    )
    repo = write(tmp_path / "repo", ds, {"bare": {"chunks": (1, 2)}})
    assert [tuple(row) for row in read(spark, repo, "scalar").collect()] == [(7,)]
    empty = read(spark, repo, "none", ranges={"x": (1, 2)})
    assert empty.columns == ["x", "y", "none"]
    assert empty.collect() == []
    bare = read(spark, repo, "bare", ranges={"x2": (1, 2), "y": (-5, 1)})
    assert sorted(map(tuple, bare.collect())) == [(1, 0, 3), (1, 1, 4), (2, 0, 6), (2, 1, 7)]
    assert dict(bare.dtypes)["x2"] == "bigint"
    assert "no coordinate" in bare.schema["x2"].metadata["values"]


@pytest.mark.spark
def test_coordinates_can_be_read_as_variables(spark: SparkSession, repo: Repository) -> None:
    assert read(spark, repo, "height").collect() == [(10.0,)]
    lats = read(spark, repo, "lat", nan="drop", ranges={"lat": (80, None)})
    assert [tuple(row) for row in lats.collect()] == [(90.0,), (85.0,), (80.0,)]


@pytest.mark.spark
def test_what_a_range_that_selects_nothing_gives(spark: SparkSession, repo: Repository) -> None:
    nothing = read(spark, repo, ranges={"lat": (91, None)})
    assert nothing.columns == ["time", "lat", "lon", "u", "v"]
    assert nothing.collect() == []
    with pytest.raises(InvalidArgumentError, match="selects nothing: its 37 values run from"):
        read(spark, repo, ranges={"lat": (91, None)}, on_empty="error")
    with pytest.raises(InvalidArgumentError, match="smaller end comes first"):
        read(spark, repo, ranges={"lat": (30, -30)})


@pytest.mark.spark
def test_lists_and_slices_select_values_and_ranges(spark: SparkSession, repo: Repository) -> None:
    ranges = {"lat": [90, (-20, -10), slice(-90, -85)], "lon": slice(100, 110)}
    expected = opened(repo).sel(lat=[90, -10, -15, -20, -85, -90], lon=[100, 105, 110])
    same(read(spark, repo, ranges=ranges), expected)


@pytest.mark.spark
def test_the_state_of_a_time(spark: SparkSession, tmp_path: Path) -> None:
    repo = write(tmp_path / "repo", xr.Dataset({"a": ("x", [1, 2])}))
    then = repo.readonly_session().snapshot_id
    write(tmp_path / "repo", xr.Dataset({"b": ("x", [3])}), group="later")
    written = {snapshot.snapshot_id: snapshot.written_at for snapshot in repo.ancestry("main")}
    frame = read(spark, repo, "a", version=f"main@{written[then]}")
    assert [row.a for row in frame.collect()] == [1, 2]
    with pytest.raises(NotFoundError, match="no group /later"):
        read(spark, repo, group="later", version=f"main@{written[then]}")


@pytest.mark.spark
def test_times_that_cannot_be_decoded_are_read_as_numbers(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The times of the COADS climatology count from the year 0."""
    raw = xr.Dataset(
        {"t": ("TIME", [20.5, 21.5])},
        {"TIME": ("TIME", [366.0, 1096.485], {"units": "hour since 0000-01-01 00:00:00"})},
    )
    repo = write(tmp_path / "repo", raw)
    with pytest.raises(InvalidArgumentError, match="With decode_times=False, times stay numbers"):
        read(spark, repo)
    frame = read(spark, repo, decode_times=False, ranges={"TIME": (1000, None)})
    assert [tuple(row) for row in frame.collect()] == [(1096.485, 21.5)]
    assert frame.schema["TIME"].metadata["units"] == "hour since 0000-01-01 00:00:00"


@pytest.mark.spark
def test_both_engines_give_the_same_rows(spark: SparkSession, repo: Repository) -> None:
    found = [cells(read(spark, repo, engine=name), "time", "lat", "lon") for name in ENGINES]
    assert len(found[0]) == MONTHS * LATS * LONS
    assert found[0].equals(found[1])


@pytest.mark.spark
def test_variables_of_fewer_dimensions_are_repeated(spark: SparkSession, tmp_path: Path) -> None:
    ds = winds().isel(time=slice(0, 3)).drop_vars("height")
    ds["turned"] = (("lon", "lat"), np.arange(LONS * LATS, dtype="f4").reshape(LONS, LATS))
    ds["month"] = ("time", [1, 2, 3])
    ds["one"] = ((), np.int32(5))
    encoding = {"u": {"chunks": (2, 10, 10)}, "turned": {"chunks": (7, 20)}}
    repo = write(tmp_path / "repo", ds, encoding)
    names = ["month", "turned", "u", "one"]
    ranges = {"lat": (-20, 60), "lon": [5, (100, 200)]}
    frame = read(spark, repo, names, broadcast=True, ranges=ranges, target_rows=500)
    assert frame.columns == ["time", "lat", "lon", *names]
    lons = ds.lon.values
    some = ds.isel(lon=(lons == 5) | ((lons >= 100) & (lons <= 200))).sel(lat=slice(60, -20))
    like = some[["u"]].assign({name: some[name].broadcast_like(some.u) for name in names})
    same(frame, like.transpose("time", "lat", "lon")[names])
    where = read(spark, repo, names, broadcast=True, where="turned > 2600 AND month = 2")
    assert where.count() == int((ds.turned > 2600).sum())


@pytest.mark.spark
def test_a_row_for_each_chunk(spark: SparkSession, repo: Repository) -> None:
    ranges = {"lon": [(0, 10), (300, 355)], "lat": (0, 90)}
    found = read(spark, repo, layout="chunk", ranges=ranges, where="time < '2000-01-01'")
    assert found.columns == ["time", "lat", "lon", "shape", "u", "v"]
    ds = opened(repo).sel(time=slice("1999"), lat=slice(90, 0)).load()
    rows = found.collect()
    assert len(rows) == 3 * 2
    seen = 0
    for row in rows:
        times = [time.astimezone(UTC).replace(tzinfo=None) for time in row.time]
        part = ds.sel(time=times, lat=row.lat, lon=row.lon)
        for name in "uv":
            values = np.frombuffer(row[name].data, row[name].dtype).reshape(row["shape"])
            np.testing.assert_array_equal(values, part[name].values)
        seen += values.size
    assert seen == ds.sizes["time"] * ds.sizes["lat"] * 15


@pytest.mark.spark
def test_a_row_for_each_chunk_with_values(spark: SparkSession, tmp_path: Path) -> None:
    values = np.full((6, 4), np.nan)
    values[2, 1] = 7
    repo = write(
        tmp_path / "repo", xr.Dataset({"a": (("y", "x"), values)}), {"a": {"chunks": (2, 4)}}
    )
    found = read(spark, repo, layout="chunk", nan="drop").collect()
    assert [(row.y, row.x, row["shape"]) for row in found] == [([2, 3], [0, 1, 2, 3], [2, 4])]
    text = xr.Dataset({"who": ("x", np.array(["a", "b"], object))})
    with pytest.raises(InvalidArgumentError, match="'who' have no fixed size"):
        read(spark, write(tmp_path / "text", text), layout="chunk")


# --- types -----------------------------------------------------------------------------------

TYPES: list[tuple[Any, list[Any], str, list[Any]]] = [
    ("bool", [True, False], "boolean", [True, False]),
    ("int8", [-128, 127], "tinyint", [-128, 127]),
    ("int16", [-1, 2], "smallint", [-1, 2]),
    ("int32", [-1, 2], "int", [-1, 2]),
    ("int64", [-(2**63), 2**63 - 1], "bigint", [-(2**63), 2**63 - 1]),
    ("uint8", [0, 255], "smallint", [0, 255]),
    ("uint16", [0, 65535], "int", [0, 65535]),
    ("uint32", [0, 2**32 - 1], "bigint", [0, 2**32 - 1]),
    ("uint64", [0, 2**64 - 1], "decimal(20,0)", [Decimal(0), Decimal(2**64 - 1)]),
    ("float16", [0.5, 65504], "float", [0.5, 65504]),
    ("float32", [0.25, math.inf], "float", [0.25, math.inf]),
    (">f8", [0.1, -1e300], "double", [0.1, -1e300]),
    ("string", ["é", ""], "string", ["é", ""]),
    ("<U3", ["abc", "é"], "string", ["abc", "é"]),
    ("S1", [b"a", b"b"], "binary", [b"a", b"b"]),
    ("S3", [b"abc", b"\xff"], "binary", [b"abc", b"\xff"]),
    ("variable_length_bytes", [b"a\x00", b""], "binary", [b"a\x00", b""]),
    ("V2", [b"\x00\xff", b"ab"], "binary", [b"\x00\xff", b"ab"]),
    (
        "datetime64[ms]",
        ["1999-01-01T00:00:00.001", "NaT"],
        "timestamp",
        [datetime(1999, 1, 1, 0, 0, 0, 1000, tzinfo=UTC), None],
    ),
    (
        "timedelta64[h]",
        [36, "NaT"],
        "interval day to second",
        [timedelta(hours=36), None],
    ),
]


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
def test_every_type_has_its_place(spark: SparkSession, tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repo")
    with repo.transaction(message="types") as store:
        for number, (dtype, values, _, _) in enumerate(TYPES):
            array = zarr.create_array(
                store, name=f"v{number}", shape=(2,), dtype=dtype, dimension_names=["x"]
            )
            array[:] = np.array(values, array.dtype)
    frame = read(spark, repo, [f"v{number}" for number in range(len(TYPES))])
    assert [kind for _, kind in frame.dtypes[1:]] == [kind for _, _, kind, _ in TYPES]
    for table in (frame.toArrow(), read(spark, repo, frame.columns[1:], nan="drop").toArrow()):
        for number, (dtype, _, _, expected) in enumerate(TYPES):
            assert table.column(f"v{number}").to_pylist() == expected, dtype


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize("dtype", ["complex64", [("a", "i4"), ("b", "f4")]])
def test_types_without_a_place_are_named(spark: SparkSession, tmp_path: Path, dtype: Any) -> None:
    repo = zm.create(tmp_path / "repo")
    with repo.transaction(message="odd") as store:
        zarr.create_array(store, name="odd", shape=(2,), dtype=dtype, dimension_names=["x"])
    with pytest.raises(InvalidArgumentError, match="'odd' has values of type") as caught:
        read(spark, repo)
    assert str(np.dtype(dtype)) in str(caught.value)


@pytest.mark.spark
def test_dates_no_timestamp_can_hold_are_text(spark: SparkSession, tmp_path: Path) -> None:
    times = xr.date_range("2000-02-27", periods=4, calendar="360_day", use_cftime=True)
    when = np.array([cftime.DatetimeNoLeap(1, 3, 1, 6), None], object)
    ds = xr.Dataset({"t": ("time", np.arange(4.0))}, {"time": times})
    repo = write(tmp_path / "repo", ds)
    frame = read(spark, repo)
    assert frame.dtypes[0] == ("time", "string")
    metadata = frame.schema["time"].metadata
    assert metadata["calendar"] == "360_day"
    assert "ISO 8601" in metadata["values"]
    assert [row.time for row in frame.orderBy("t").collect()] == [
        f"2000-02-{day}T00:00:00" for day in (27, 28, 29, 30)
    ]
    some = read(spark, repo, ranges={"time": ("2000-02-28", "2000-02-29")})
    assert sorted(row.t for row in some.collect()) == [1, 2]
    text = Column("when", None, pa.string(), {})  # type: ignore[arg-type]
    assert to_arrow(when, text).to_pylist() == ["0001-03-01T06:00:00", None]


@pytest.mark.spark
def test_times_in_variables(spark: SparkSession, tmp_path: Path) -> None:
    """Their type is told by their calendar: reading values to tell it would read chunks."""
    raw = xr.Dataset(
        {
            "real": ("x", np.array([0.0, np.nan]), {"units": "days since 0001-01-01"}),
            "other": ("x", [59, 60], {"units": "days since 2000-01-01", "calendar": "noleap"}),
            "far": ("x", [0, 1], {"units": "days since 5000-01-01"}),
            "lasts": ("x", [1, 2], {"units": "days", "dtype": "timedelta64[ns]"}),
            "period": ("x", [1, 2], {"units": "days"}),
            "x_bounds": (("x", "edge"), [[0, 1], [1, 2]]),
        },
        {"x": ("x", [0, 1], {"units": "days since 2000-01-01", "bounds": "x_bounds"})},
    )
    raw["real"].attrs["calendar"] = "proleptic_gregorian"
    repo = write(tmp_path / "repo", raw)
    names = ["real", "other", "far", "lasts", "period"]
    frame = read(spark, repo, names)
    kinds = ["timestamp", "timestamp", "string", "timestamp", "interval day to second", "bigint"]
    assert [kind for _, kind in frame.dtypes] == kinds
    table = frame.toArrow().to_pydict()
    assert table["real"] == [datetime(1, 1, 1, tzinfo=UTC), None]
    assert table["other"] == ["2000-03-01T00:00:00", "2000-03-02T00:00:00"]
    assert table["far"][1] == datetime(5000, 1, 2, tzinfo=UTC)
    assert table["lasts"] == [timedelta(days=1), timedelta(days=2)]
    assert table["period"] == [1, 2]
    bounds = read(spark, repo, "x_bounds").toArrow().to_pydict()
    assert bounds["x_bounds"][-1] == datetime(2000, 1, 3, tzinfo=UTC)


@pytest.mark.spark
def test_timestamps_are_instants_whatever_the_sessions_zone(
    spark: SparkSession, repo: Repository
) -> None:
    frame = read(spark, repo, ranges={"lat": (0, 0), "lon": (0, 0)})
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        seconds = [row[0] for row in frame.selectExpr("unix_micros(time)").collect()]
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert seconds == opened(repo).time.values.astype("M8[us]").astype("i8").tolist()


@pytest.mark.spark
def test_ranges_are_of_the_sessions_zone(spark: SparkSession, tmp_path: Path) -> None:
    """A range of times has the rows of the same `where`, and of Spark's own filter."""
    hours = np.arange("2000-01-01", "2000-01-04", dtype="M8[h]").astype("M8[ns]")
    repo = write(tmp_path / "repo", xr.Dataset({"t": ("time", np.arange(72.0))}, {"time": hours}))
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        day = "time >= '2000-01-02' AND time < '2000-01-03'"
        found = [
            sorted(row.t for row in frame.collect())
            for frame in (
                read(spark, repo, ranges={"time": ("2000-01-02", "2000-01-02")}),
                read(spark, repo, where=day),
                read(spark, repo).where(day),
            )
        ]
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert found == [list(range(15, 39))] * 3


@pytest.mark.spark
def test_columns_are_found_in_any_case(spark: SparkSession, repo: Repository) -> None:
    wanted = read(spark, repo, where="lat > 0", ranges={"lon": (0, 10)}).count()
    assert read(spark, repo, where="LAT > 0", ranges={"Lon": (0, 10)}).count() == wanted > 0
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(InvalidArgumentError, match="LAT"):
            read(spark, repo, where="LAT > 0")
        with pytest.raises(InvalidArgumentError, match="there is no dimension 'Lon'"):
            read(spark, repo, ranges={"Lon": (0, 10)})
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_mixed_calendar_dates_before_1582_are_refused(tmp_path: Path) -> None:
    attributes = {"units": "days since 1500-01-01", "calendar": "standard"}
    repo = write(tmp_path / "repo", xr.Dataset({"t": ("x", [0, 1], attributes)}))
    source = Source(repo.readonly_session(), "/")
    column = column_of(source, "t", is_dimension=False)
    assert column.spark.simpleString() == "timestamp"
    with pytest.raises(InvalidArgumentError, match="'t' has dates before 1582"):
        to_arrow(source.read("t"), column)


def test_units_that_make_no_sense_are_told(tmp_path: Path) -> None:
    raw = xr.Dataset({}, {"x": ("x", [0, 1], {"units": "days since the flood"})})
    source = Source(write(tmp_path / "repo", raw).readonly_session(), "/")
    with pytest.raises(InvalidArgumentError, match=r"'x' in group / cannot be decoded: .*flood"):
        source.coordinate("x")


@pytest.mark.spark
def test_metadata_has_the_attributes(spark: SparkSession, tmp_path: Path) -> None:
    attributes = {"units": "m", "flags": [1, 2], "mixed": [1, "a"], "big": 2**70, "none": None}
    ds = xr.Dataset({"v": ("time", [1.0, 2.0], attributes)}, {"time": winds().time[:2]})
    schema = read(spark, write(tmp_path / "repo", ds)).schema
    assert schema["v"].metadata == {"units": "m", "flags": [1, 2], "dtype": "float64"}
    assert schema["time"].metadata["units"].startswith("days since 1999-01-15")
    assert schema["time"].metadata["calendar"] == "proleptic_gregorian"


# --- what is asked for wrongly ---------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    place = tmp_path_factory.mktemp("mixed") / "repo"
    ds = winds().isel(time=slice(0, 2))
    ds["land"] = (("lat", "lon"), np.ones((LATS, LONS), bool))
    ds["U"] = ds.u
    ds["who"] = ("name", np.array(["a", "b"], object))
    ds["name"] = ("name", np.array(["anna", "bert"], object))
    repo = write(place, ds, group="air")
    with repo.transaction(message="an array without names, and one with a name twice") as store:
        zarr.create_array(store, name="air/nameless", shape=(2,), dtype="f4")
        names = {"dimension_names": ["x", "x"]}
        zarr.create_array(store, name="air/square", shape=(2, 2), dtype="f4", **names)
        names = {"dimension_names": ["i", "j"]}
        zarr.create_array(store, name="air/i", shape=(2, 2), dtype="f4", **names)
        zarr.create_group(store, path="empty")
    return repo


@pytest.mark.spark
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"variables": "w"}, NotFoundError, r"no variable 'w' in group /air; there are: U, .*lat"),
        ({"group": "sea"}, NotFoundError, "no group /sea in this snapshot; there are: /, /air, "),
        ({"group": "air/u"}, NotFoundError, "no group /air/u"),
        ({"group": "empty", "variables": None}, InvalidArgumentError, "/empty has no variables"),
        ({"variables": []}, InvalidArgumentError, "asked for no variables"),
        ({"variables": ["u", "u"]}, InvalidArgumentError, "twice"),
        ({"variables": None}, InvalidArgumentError, r"same dimensions.*land \(lat, lon\); .*u \("),
        ({"variables": ["u", "land"]}, InvalidArgumentError, "With broadcast=True, values are rep"),
        ({"variables": ["u", "U"]}, InvalidArgumentError, "'u' and 'U' are the same to Spark"),
        ({"variables": "nameless"}, InvalidArgumentError, "'nameless' in group /air have no"),
        ({"variables": "square"}, InvalidArgumentError, r"have a name twice \(x, x\)"),
        ({"variables": "i"}, InvalidArgumentError, "'i' is a variable of several dimensions"),
        ({"version": "dev"}, NotFoundError, "no branch 'dev'"),
        ({"version": f"{0:012d}-{'0' * 24}-1"}, SnapshotExpiredError, "ancestry"),
        ({"engine": "rust"}, InvalidArgumentError, "engine cannot be 'rust'; known: 'arrow', 'pa"),
        ({"max_tasks": 0}, InvalidArgumentError, "max_tasks must be 1 or more"),
        ({"on_empty": "skip"}, InvalidArgumentError, "on_empty cannot be 'skip'; known: 'empty'"),
        (
            {"layout": "wide"},
            InvalidArgumentError,
            "layout cannot be 'wide'; known: 'long', 'ch",
        ),
        ({"nan": "skip"}, InvalidArgumentError, "nan cannot be 'skip'; known: 'null', 'keep'"),
        ({"target_rows": 0}, InvalidArgumentError, "target_rows must be 1 or more"),
        ({"target_rows": True}, InvalidArgumentError, "target_rows must be 1 or more"),
        ({"ranges": {"latt": (0, 1)}}, InvalidArgumentError, "no dimension 'latt'.*: time, lat"),
        ({"ranges": {"lat": 5}}, InvalidArgumentError, r"'lat' must be a pair \(lo, hi\)"),
        ({"ranges": {"lat": (1, 2, 3)}}, InvalidArgumentError, "must be a pair"),
        ({"ranges": {"lat": (91, None)}}, InvalidArgumentError, "from -90.0 to 90.0"),
        ({"ranges": {"lat": (30, -30)}}, InvalidArgumentError, "smaller end comes first"),
        ({"ranges": {"lat": ("a", None)}}, InvalidArgumentError, "'a' cannot .* are numbers"),
        ({"ranges": {"lat": (math.nan, None)}}, InvalidArgumentError, "are numbers"),
        ({"ranges": {"lat": (True, None)}}, InvalidArgumentError, "are numbers"),
        ({"ranges": {"time": ("2001", None)}}, InvalidArgumentError, "from 1999-01-15T12:00 to "),
        ({"ranges": {"time": ("today", None)}}, InvalidArgumentError, "are times"),
        ({"ranges": {"time": ("1999-02-30", None)}}, InvalidArgumentError, "are times"),
        ({"ranges": {"time": (1999, None)}}, InvalidArgumentError, "are times"),
        ({"ranges": {"time": (pd.NaT, None)}}, InvalidArgumentError, "are times"),
    ],
)
def test_wrong_asking_is_told(
    spark: SparkSession,
    mixed: Repository,
    options: dict[str, Any],
    error: type[ManifestsError],
    message: str,
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        read(spark, mixed, **{"group": "air", "variables": "u", "on_empty": "error", **options})


@pytest.mark.spark
def test_columns_that_differ_in_case_can_be_told_apart(
    spark: SparkSession, mixed: Repository
) -> None:
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        assert read(spark, mixed, ["u", "U"], group="air").selectExpr("U").columns == ["U"]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


@pytest.mark.spark
def test_places_that_cannot_be_read(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NotARepositoryError):
        read(spark, tmp_path / "nothing")
    zm.create("memory://spark-read")
    with pytest.raises(UnsupportedStorageError, match="memory of this process"):
        read(spark, "memory://spark-read")


# --- how it is read --------------------------------------------------------------------------


class Told(WrappedStorage):
    """Writes down who calls what, over all processes."""

    def __init__(self, storage: Storage, log: Path) -> None:
        super().__init__(storage)
        self.log = log

    def _around(self, call: Call[Any]) -> Any:
        self._tell(call)
        return super()._around(call)

    async def _around_async(self, call: Call[Any], run: Callable[[], Awaitable[Any]]) -> Any:
        self._tell(call)
        return await super()._around_async(call, run)

    def _tell(self, call: Call[Any]) -> None:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()} {call.key}\n")


@pytest.mark.spark
def test_boxes_that_nothing_was_written_to_become_no_tasks(
    spark: SparkSession, tmp_path: Path
) -> None:
    values = np.full((40, 30), np.nan)
    values[3, 4], values[25:27, 29] = 1.0, [np.nan, 2.0]
    ds = xr.Dataset(
        {
            "a": (("y", "x"), values),
            "b": (("y", "x"), np.where(np.arange(30) == 7, values, np.nan)),
            "packed": (("y", "x"), values),
            "count": (("y", "x"), np.nan_to_num(values).astype("i4")),
        }
    )
    encoding: Any = {name: {"chunks": (10, 10)} for name in ds}
    encoding["b"] = {"chunks": (10, 10), "shards": (20, 10)}
    packing = {"dtype": "i2", "_FillValue": -1, "fill_value": -1, "scale_factor": 0.5}
    encoding["packed"] = packing | {"chunks": (5, 10)}
    repo = write(tmp_path / "repo", ds, encoding)

    def tasks(*names: str, nan: Any = "drop", **more: Any) -> tuple[int, int]:
        frame = read(spark, repo, names, nan=nan, target_rows=1, **more)
        return frame.rdd.getNumPartitions(), frame.count()

    assert tasks("a", nan="null") == (12, 1200)
    assert tasks("a") == (2, 2)
    assert tasks("a", "packed") == (2, 2)
    assert tasks("a", "b") == (2, 2)
    assert read(spark, repo, "b", nan="drop").count() == 0
    assert tasks("a", ranges={"y": (20, None)}) == (1, 1)
    assert tasks("a", "count") == (12, 1200)  # there, 0 is a value


@pytest.mark.spark
def test_the_driver_reads_no_chunk_and_a_worker_opens_once(
    spark: SparkSession, repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    read_chunks = Session.read_chunks

    def told(session: Session, path: str, **cells: Any) -> Any:
        asked.append(path)
        return read_chunks(session, path, **cells)

    monkeypatch.setattr(Session, "read_chunks", told)
    # Under a path of its own, workers have not opened it yet.
    (tmp_path / "link").symlink_to(LocalStorage(repo.storage.url.removeprefix("file://")).path)
    storage = Told(LocalStorage(tmp_path / "link"), tmp_path / "log")
    frames = [read(spark, storage, target_rows=rows) for rows in (10**6, 5000)]
    assert set(asked) == {"time", "lat", "lon"}

    assert all(frame.count() == MONTHS * LATS * LONS for frame in (*frames, *frames))
    calls = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    driver = str(os.getpid())
    workers = {pid for pid, _ in calls} - {driver}
    assert workers
    for pid in workers:
        assert [p for p, key in calls if p == pid and key == "current"] == [pid]
    chunks = [key for pid, key in calls if pid in workers and key.startswith("chunks/")]
    read_once = {key for key in chunks if chunks.count(key) == 4}
    assert len(read_once) == 2 * (MONTHS // 4) * 2  # each chunk of u and v, by four counts


@pytest.mark.spark
def test_tasks_are_as_many_as_asked_for(spark: SparkSession, repo: Repository) -> None:
    def rows_by_task(**options: Any) -> list[int]:
        frame = read(spark, repo, **options)
        parts = frame.selectExpr("spark_partition_id() AS part").groupBy("part").count().collect()
        assert len(parts) == frame.rdd.getNumPartitions()
        return sorted(row["count"] for row in parts)

    chunk = 4 * LATS * 36
    assert rows_by_task() == [6 * chunk, 6 * chunk]
    assert rows_by_task(target_rows=5 * chunk) == [4 * chunk] * 3
    assert rows_by_task(target_rows=1) == [chunk] * 12


@pytest.mark.spark
def test_tasks_carry_a_plan_and_no_data(
    spark: SparkSession, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    monkeypatch.setattr(
        type(spark.range(1)), "mapInArrow", lambda self, function, schema: sent.append(function)
    )
    read(spark, repo, ranges={"lat": (0, 90)}, lease=None)
    pickled = cloudpickle.dumps(sent[0])
    assert len(pickled) < 10_000
    assert opened(repo).lon.values.tobytes() not in pickled


@pytest.mark.spark
def test_reading_gives_no_warnings_about_pandas(spark: SparkSession, repo: Repository) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        read(spark, repo)
    assert [str(warning.message) for warning in seen] == []


@pytest.mark.spark
def test_a_missing_chunk_is_told(spark: SparkSession, tmp_path: Path) -> None:
    repo = write(tmp_path / "repo", winds()[["u"]], {"u": {"chunks": (4, LATS, LONS)}})
    frame = read(spark, repo, "u")
    key = max(repo.storage.list("chunks/"), key=lambda info: info.nbytes).key
    repo.storage.delete_many([key])
    with pytest.raises(PythonException, match=f"(?s)MissingChunkError: .*{key}"):
        frame.count()


@pytest.mark.spark
def test_a_snapshot_that_expires_before_it_is_read_is_told(
    spark: SparkSession, tmp_path: Path
) -> None:
    repo = write(tmp_path / "repo", winds().isel(time=[0]))
    frame = read(spark, repo)
    snapshot_id = repo.readonly_session().snapshot_id
    repo.storage.delete_many([snapshot_key(snapshot_id)])
    with pytest.raises(PythonException, match=f"SnapshotExpiredError: snapshot {snapshot_id}"):
        frame.count()


def test_chunks_elsewhere_are_read_with_the_containers_of_the_repository(
    spark: SparkSession, tmp_path: Path
) -> None:
    ds = xr.Dataset({"a": (("y", "x"), np.arange(12.0).reshape(3, 4))})
    ds.to_zarr(tmp_path / "plain", consolidated=False, zarr_format=2)
    repo = zm.create(tmp_path / "repo", virtual_containers={"plain": tmp_path / "plain"})
    zm.virtual.import_zarr(repo, tmp_path / "plain")
    rows = read(spark, repo, "a").collect()
    assert {(row.y, row.x): row.a for row in rows} == {
        (y, x): 4.0 * y + x for y in range(3) for x in range(4)
    }
    with pytest.raises(PythonException, match="VirtualContainerError"):
        read(spark, tmp_path / "repo", "a").collect()
