"""Reading cells with Spark, against xarray reading the same snapshot."""

from __future__ import annotations

import math
import sys
from datetime import UTC, datetime, timedelta
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
from zarr_manifests.errors import InvalidArgumentError, NotARepositoryError, UnsupportedStorageError
from zarr_manifests.spark import read
from zarr_manifests.spark.job import Column, column_of, to_arrow
from zarr_manifests.spark.source import Source

# Workers cannot import this module; what they need of it travels by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

MONTHS, LATS, LONS = 24, 37, 72


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


def test_cells_are_what_xarray_reads(spark: SparkSession, repo: Repository) -> None:
    frame = read(spark, repo.storage.url)
    assert frame.columns == ["time", "lat", "lon", "u", "v"]
    same(frame, opened(repo))


@pytest.mark.smoke
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


@pytest.mark.parametrize(
    ("ranges", "selection"),
    [
        ({"lat": (-30.0, None), "lon": (None, 50)}, {"lat": slice(None, -30), "lon": slice(0, 50)}),
        ({"time": ("1999-03", "1999-12")}, {"time": slice("1999-03", "1999-12")}),
        (
            {"lat": [90, (-20, -10), slice(-90, -85)], "lon": slice(100, 110)},
            {"lat": [90, -10, -15, -20, -85, -90], "lon": slice(100, 110)},
        ),
    ],
    ids=["numbers", "times", "lists"],
)
def test_ranges_select_what_xarray_selects(
    spark: SparkSession, repo: Repository, ranges: dict[str, Any], selection: dict[str, Any]
) -> None:
    same(read(spark, repo, where=ranges), opened(repo).sel(selection))


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


def test_scalars_coordinates_empty_arrays_and_positions(
    spark: SparkSession, tmp_path: Path
) -> None:
    ds = xr.Dataset(
        {
            "scalar": ((), np.int16(7)),
            "none": (("x", "y"), np.empty((0, 3), "f4")),
            "bare": (("x2", "y"), np.arange(12.0).reshape(4, 3)),
        },
        {"y2": [10.0, 20.0, 30.0, 40.0]},
    )
    repo = write(tmp_path / "repo", ds, {"bare": {"chunks": (1, 2)}})
    assert read(spark, repo, "scalar").collect() == [(7,)]
    lats = read(spark, repo, "y2", nan="drop", where={"y2": (25, None)})
    assert sorted(map(tuple, lats.collect())) == [(30.0,), (40.0,)]
    empty = read(spark, repo, "none", where={"x": (1, 2)})
    assert empty.columns == ["x", "y", "none"]
    assert empty.collect() == []
    bare = read(spark, repo, "bare", where={"x2": (1, 2), "y": (-5, 1)})
    assert sorted(map(tuple, bare.collect())) == [(1, 0, 3), (1, 1, 4), (2, 0, 6), (2, 1, 7)]
    assert dict(bare.dtypes)["x2"] == "bigint"
    assert "no coordinate" in bare.schema["x2"].metadata["values"]


def test_times_that_cannot_be_decoded_are_read_as_numbers(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The times of the COADS climatology count from the year 0."""
    raw = xr.Dataset(
        {"t": ("TIME", [20.5, 21.5])},
        {"TIME": ("TIME", [366.0, 1096.485], {"units": "hour since 0000-01-01 00:00:00"})},
    )
    repo = write(tmp_path / "repo", raw)
    with pytest.raises(InvalidArgumentError, match="read times as numbers by decode_times=False"):
        read(spark, repo)
    frame = read(spark, repo, decode_times=False, where={"TIME": (1000, None)})
    assert [tuple(row) for row in frame.collect()] == [(1096.485, 21.5)]
    assert frame.schema["TIME"].metadata["units"] == "hour since 0000-01-01 00:00:00"


def test_a_row_for_each_chunk(spark: SparkSession, repo: Repository) -> None:
    ranges = {"lon": [(0, 10), (300, 355)], "lat": (0, 90)}
    found = read(spark, repo, layout="chunk", where=[ranges, "time < '2000-01-01'"])
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


TYPES: list[tuple[Any, list[Any], str, list[Any]]] = [
    ("bool", [True, False], "boolean", [True, False]),
    ("int8", [-128, 127], "tinyint", [-128, 127]),
    ("int64", [-(2**63), 2**63 - 1], "bigint", [-(2**63), 2**63 - 1]),
    ("uint32", [0, 2**32 - 1], "bigint", [0, 2**32 - 1]),
    ("uint64", [0, 2**64 - 1], "decimal(20,0)", [Decimal(0), Decimal(2**64 - 1)]),
    ("float16", [0.5, 65504], "float", [0.5, 65504]),
    ("float32", [0.25, math.inf], "float", [0.25, math.inf]),
    (">f8", [0.1, -1e300], "double", [0.1, -1e300]),
    ("string", ["é", ""], "string", ["é", ""]),
    ("<U3", ["abc", "é"], "string", ["abc", "é"]),
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
    some = read(spark, repo, where={"time": ("2000-02-28", "2000-02-29")})
    assert sorted(row.t for row in some.collect()) == [1, 2]
    text = Column("when", pa.string(), {})
    assert to_arrow(when, text).to_pylist() == ["0001-03-01T06:00:00", None]


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
                read(spark, repo, where={"time": ("2000-01-02", "2000-01-02")}),
                read(spark, repo, where=day),
                read(spark, repo).where(day),
            )
        ]
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert found == [list(range(15, 39))] * 3


def test_mixed_calendar_dates_before_1582_are_refused(tmp_path: Path) -> None:
    attributes = {"units": "days since 1500-01-01", "calendar": "standard"}
    repo = write(tmp_path / "repo", xr.Dataset({"t": ("x", [0, 1], attributes)}))
    source = Source(repo.readonly_session(), "/")
    column = column_of(source, "t", is_dimension=False)
    assert column.arrow == pa.timestamp("us", tz="UTC")
    with pytest.raises(InvalidArgumentError, match="'t' has dates before 1582"):
        to_arrow(source.decode("t", np.array([0, 1])), column)


def test_metadata_has_the_attributes(spark: SparkSession, tmp_path: Path) -> None:
    attributes = {"units": "m", "flags": [1, 2], "mixed": [1, "a"], "big": 2**70, "none": None}
    ds = xr.Dataset({"v": ("time", [1.0, 2.0], attributes)}, {"time": winds().time[:2]})
    schema = read(spark, write(tmp_path / "repo", ds)).schema
    assert schema["v"].metadata == {"units": "m", "flags": [1, 2], "dtype": "float64"}
    assert schema["time"].metadata["units"].startswith("days since 1999-01-15")
    assert schema["time"].metadata["calendar"] == "proleptic_gregorian"


def test_places_that_cannot_be_read(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NotARepositoryError):
        read(spark, tmp_path / "nothing")
    zm.create("memory://spark-read")
    with pytest.raises(UnsupportedStorageError, match="memory of this process"):
        read(spark, "memory://spark-read")


def test_a_missing_chunk_is_told(spark: SparkSession, tmp_path: Path) -> None:
    repo = write(tmp_path / "repo", winds()[["u"]], {"u": {"chunks": (4, LATS, LONS)}})
    frame = read(spark, repo, "u")
    key = max(repo.storage.list("chunks/"), key=lambda info: info.nbytes).key
    repo.storage.delete_many([key])
    with pytest.raises(PythonException, match=f"(?s)MissingChunkError: .*{key}") as raised:
        frame.count()
    assert "Traceback" not in str(raised.value)


def test_units_that_make_no_sense_are_told(tmp_path: Path) -> None:
    raw = xr.Dataset({}, {"x": ("x", [0, 1], {"units": "days since the flood"})})
    source = Source(write(tmp_path / "repo", raw).readonly_session(), "/")
    with pytest.raises(InvalidArgumentError, match=r"'x' in group / cannot be decoded: .*flood"):
        source.coordinate("x")
