"""Reads with `where` and `ranges`, against reading everything and filtering then."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Repository
from zarr_manifests.error_cases import WhereError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.zones.time_zone import zone_of
from zarr_manifests.planning.zones.where import Moment, Where, parse_where
from zarr_manifests.session import Session
from zarr_manifests.spark import explain_pruning, read, worker
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan, plan_read
from zarr_manifests.spark.row_filter import kept
from zarr_manifests.spark.worker import partition_batches
from zarr_manifests.testing import CountingStorage

FACTS = SparkFacts(parallelism=2)
SHAPE = (6, 8, 10)
CHUNKS = (2, 4, 5)
NEGATIVE = {"dtype": "i2", "scale_factor": -0.5, "add_offset": 10.0, "_FillValue": -32768}


def awkward() -> xr.Dataset:
    """Values that are hard to compare, on coordinates that are."""
    rng = np.random.default_rng(5)
    cells = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    level = (cells // 40).astype("f4")  # so that chunks differ
    odd = level.copy()
    odd[0, 0, :5] = [np.nan, -0.0, np.inf, -np.inf, 0.0]
    odd[2:4, 4:] = np.nan  # whole chunks without values
    odd[rng.random(SHAPE) < 0.1] = np.nan
    dims = ("time", "y", "x")
    times = pd.date_range("2000-01-01", periods=SHAPE[0], freq="12h").to_numpy().copy()
    times[4] = np.datetime64("NaT", "ns")
    return xr.Dataset(
        {
            "odd": (dims, odd),
            "packed": (dims, np.where(np.isnan(odd), np.nan, rng.integers(-20, 20, SHAPE) / 2)),
            "count": (dims, (cells % 7 + cells // 100).astype("u2")),
            "unwritten": (dims, np.full(SHAPE, 3, "i4")),
        },
        {
            "time": times,
            "y": np.array([80, 40, 40, 20, 0, -20, -20, -80], "f4"),  # descending, with duplicates
            "x": np.array([1, 5, np.nan, 3, 9, 0.1, -2, 4, 4, 100]),
        },
    )


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    repo = zm.create(tmp_path_factory.mktemp("where") / "repo")
    ds = awkward()
    encoding: dict[str, Any] = {name: {"chunks": CHUNKS} for name in ds.data_vars}
    encoding["packed"] |= NEGATIVE
    encoding["unwritten"] |= {"fill_value": 3, "write_empty_chunks": False}
    zm.write(ds, repo, message="all of it", encoding=encoding)
    # Written anew, with and without statistics: what was measured before is out of date.
    part = {"time": slice(0, 2), "y": slice(0, 4), "x": slice(5, 10)}
    again = (ds[["odd", "count"]].isel(part) + 50).drop_vars(["time", "y", "x"])
    with repo.transaction(message="some of it anew") as store:
        again.to_zarr(store, region=part, consolidated=False)
    return repo


def rows(job: Job) -> pa.Table:
    """The rows of all tasks, as a worker makes them."""
    exact = pa.schema([(column.name, column.arrow) for column in job.columns])
    batches = [each for task in range(job.tasks) for each in partition_batches(job, task)]
    return pa.Table.from_batches(batches, exact)


def sorted_rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """The rows in an order of their own, with NaN as text so that it equals itself."""
    return sorted(tuple(map(str, row.values())) for row in table.to_pylist())


_LITERALS: dict[str, list[Any]] = {
    "odd": [0, -0.0, 0.5, 3, 11, 12.0, 50, 1e30, -1e30],
    "packed": [-10, -0.5, 0, 9.5, 10, 20],
    "count": [0, 3, 6.5, 50, 70000, -1],
    "unwritten": [2, 3, 4],
    "y": [80, 40, 0.0, -20, -79.5, 100],
    "x": [1, 3, 0.1, 4, 9, 100.0, -5],
    "time": ["2000-01-01", "2000-01-02T12:00", "1999", "2001-02-03 04:05:06Z"],
}


@st.composite
def wheres(draw: st.DrawFn) -> Where:
    comparisons = []
    for _ in range(draw(st.integers(1, 3))):
        column = draw(st.sampled_from(sorted(_LITERALS)))
        literal = st.sampled_from(_LITERALS[column])
        op = draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "in", "between", "is null"]))
        if op == "in":
            comparisons.append((column, op, draw(st.lists(literal, min_size=1, max_size=3))))
        elif op == "between":
            comparisons.append((column, op, [draw(literal), draw(literal)]))
        elif op == "is null":
            comparisons.append((column, draw(st.sampled_from(["is null", "is not null"]))))
        else:
            comparisons.append((column, op, draw(literal)))
    return parse_where(comparisons)


_RANGES = st.sampled_from(
    [{}, {"y": (-20, 40)}, {"x": [1, (3, 9)]}, {"time": ("2000-01-02", None)}]
)


@pytest.mark.slow
@given(wheres(), _RANGES, st.sampled_from(["null", "keep", "drop"]), st.integers(1, 300))
@settings(max_examples=examples(150), deadline=None)
def test_rows_are_those_that_are_left_of_all(
    repo: Repository, where: Where, ranges: dict[str, Any], nan: str, target_rows: int
) -> None:
    facts = SparkFacts(parallelism=2, time_zone="GMT+9")
    all_options = ReadOptions(ranges=ranges, nan=nan)
    options = ReadOptions(ranges=ranges, nan=nan, where=where.sql, target_rows=target_rows)
    everything = rows(plan_read(repo, all_options, facts))
    found = rows(plan_read(repo, options, facts))
    assert sorted_rows(found) == sorted_rows(kept(everything, where, zone_of("GMT+9")))


@pytest.mark.parametrize("damage", ["flipped", "cut off", "gone"])
def test_damaged_statistics_leave_out_nothing(
    repo: Repository, tmp_path: Path, damage: str
) -> None:
    place = tmp_path / "damaged"
    shutil.copytree(Path(unquote(urlsplit(repo.storage.url).path)), place)
    damaged = [path for path in (place / "indexes").rglob("*") if path.is_file()]
    assert damaged
    for path in damaged:
        data = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
            continue
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    for text in ("odd > 3 AND count < 3", "odd IS NULL", "unwritten = 4", "packed < 0"):
        where = parse_where(text)
        whole = rows(plan_read(repo, ReadOptions(), FACTS))
        job = plan_read(place, ReadOptions(where=where), FACTS)
        assert sorted_rows(rows(job)) == sorted_rows(kept(whole, where, zone_of("UTC")))


@pytest.fixture(scope="module")
def everything(spark: SparkSession, repo: Repository) -> DataFrame:
    return read(spark, repo).cache()


@pytest.mark.spark
@given(where=wheres())
@settings(
    max_examples=examples(8),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_rows_are_those_of_sparks_filter(
    spark: SparkSession, repo: Repository, everything: DataFrame, where: Where
) -> None:
    found = read(spark, repo, where=where.sql).toArrow()
    assert sorted_rows(found) == sorted_rows(everything.where(where.sql).toArrow())


def test_positions_are_compared_without_being_listed(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repo")
    ds = xr.Dataset({"a": ("i", np.arange(40.0))})
    zm.write(ds, repo, message="a", encoding={"a": {"chunks": 4}})
    everything = rows(plan_read(repo, ReadOptions(), FACTS))
    for text in (
        "i > 5.5 AND i <= 20",
        "i != 7",
        "i IN (3, 4, 39, 40, -1)",
        "i BETWEEN 10 AND 9",
        "i IS NULL",
        "i = 38.5",
        "i < 1e30",
    ):
        job = plan_read(repo, ReadOptions(where=text), FACTS)
        wanted = kept(everything, parse_where(text), zone_of("UTC"))
        assert sorted_rows(rows(job)) == sorted_rows(wanted)
        assert job.scan.rows == wanted.num_rows


@pytest.fixture(scope="module")
def ridges(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Chunk (i, j) of `depth` has values around 100 i + 10 j; a part was never written."""
    place = tmp_path_factory.mktemp("ridges") / "repo"
    repo = zm.create(place, {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0})
    y, x = np.arange(80), np.arange(60)
    depth = (y[:, None] // 10 * 100 + x // 10 * 10 + (y[:, None] + x) % 10).astype("f4")
    depth[30:40, :] = np.nan
    ds = xr.Dataset(
        {"depth": (("y", "x"), depth), "other": (("y", "x"), depth * 2)}, {"y": y * 1.0, "x": x}
    )
    encoding: Any = {"depth": {"chunks": (10, 10)}, "other": {"chunks": (20, 30)}}
    zm.write(ds, repo, message="ridges", encoding=encoding)
    return repo


def requests(repo: Repository, options: ReadOptions) -> tuple[int, pa.Table]:
    """Chunks of variables that tasks fetch, and the rows they give."""
    worker._sessions.clear()  # what a worker has opened reads from another storage
    worker._sources.clear()
    storage = CountingStorage(repo.storage)
    job = plan_read(zm.open(storage), options, FACTS)
    storage.reset()
    found = rows(job)
    fetched = sum(r.op == "get" and r.key.startswith("chunks/") for r in storage.log)
    return fetched - len(job.dimensions) * bool(job.tasks), found  # one of each coordinate


@pytest.mark.parametrize(
    ("where", "ranges", "chunks"),
    [
        ("depth > 749", {}, 1),
        ("depth > 700", {}, 6),
        ("depth BETWEEN 210 AND 219", {}, 1),
        ("depth >= 0", {}, 42),
        ("depth < 0", {}, 0),
        ("depth IS NULL", {}, 0),
        ("depth > 100 AND x < 10", {}, 6),
        ("depth > 100 AND x < 10", {"y": (50, None)}, 3),
        ("depth IN (0, 759)", {}, 2),
    ],
)
def test_chunks_that_cannot_match_are_not_fetched(
    ridges: Repository, where: str, ranges: dict[str, Any], chunks: int
) -> None:
    options = ReadOptions(variables="depth", where=where, ranges=ranges)
    fetched, found = requests(ridges, options)
    assert fetched == chunks
    everything = rows(plan_read(ridges, ReadOptions(variables="depth", ranges=ranges), FACTS))
    wanted = kept(everything, parse_where(where), zone_of("UTC"))
    assert sorted_rows(found) == sorted_rows(wanted)


def test_larger_chunks_of_other_variables_are_fetched_once(ridges: Repository) -> None:
    fetched, found = requests(ridges, ReadOptions(where="depth > 739 AND other < 1518"))
    assert fetched == 1 + 6  # a chunk of `other`, and those of `depth` in it
    assert found.num_rows == 190
    fetched, found = requests(ridges, ReadOptions(where="depth = 640"))
    assert (fetched, found.num_rows) == (1 + 6, 10)


@pytest.mark.spark
def test_one_variable_is_explained_by_its_plan(
    spark: SparkSession, ridges: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = ["depth >= 700 AND x < 20 AND y >= 30", "depth IS NULL", "depth >= 0", "depth < 0"]
    everywhere = {"x": (0, 59)}  # so that chunks are listed
    listed = [explain_pruning(spark, ridges, "depth", where=w, ranges=everywhere) for w in cases]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("chunks were listed")

    monkeypatch.setattr(Session, "chunk_refs", refuse)
    for where, expected in zip(cases, listed, strict=True):
        found = explain_pruning(spark, ridges, "depth", where=where)
        assert found.where == parse_where(where).sql
        assert found.left_out == expected.left_out
        assert found.reasons == expected.reasons
        assert (found.bytes, found.selected_bytes) == (expected.bytes, expected.selected_bytes)
        assert np.array_equal(found.boxes, expected.boxes)


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Variables of three, two and one dimensions; some chunks of the first were never written."""
    repo = zm.create(tmp_path_factory.mktemp("repeated") / "repo")
    cells = np.arange(6 * 8 * 10.0).reshape(6, 8, 10)
    cells[2:4, 4:] = np.nan
    ds = xr.Dataset(
        {"t": (("time", "y", "x"), cells), "area": (("y", "x"), cells[0]), "w": ("y", np.ones(8))},
        {"x": np.arange(10)},
    )
    chunks: Any = {"t": (2, 4, 5), "area": (2, 5), "w": (4,)}
    zm.write(ds, repo, message="a", encoding={name: {"chunks": n} for name, n in chunks.items()})
    return repo


def by_listing(repo: Repository, options: ReadOptions, boxes: Any) -> tuple[int, int, int]:
    """All bytes, those that are read, and the chunks that statistics leave out."""
    planned = plan(repo, options, FACTS)
    job, source = planned.job, planned.source
    dims = [column.name for column in job.dimensions]
    read = {at for lo, hi in boxes.tolist() for at in itertools.product(*map(range, lo, hi))}
    inside = {*itertools.product(*(axis.chunks.tolist() for axis in job.scan.axes))}
    columns = {each.column for each in job.where.comparisons} if job.where else set()
    nbytes = selected = 0
    stored = set()
    for column in job.variables:
        refs = planned.session.chunk_refs(column.name)
        shape, own = source.stored_chunk_shape(column.name), source.encoded(column.name).dims
        for coords, length in zip(refs.coords.tolist(), refs.length.tolist(), strict=True):
            first = {dim: at * n for dim, at, n in zip(own, coords, shape, strict=True)}
            place = tuple(
                first.get(dim, 0) // axis.chunk
                for dim, axis in zip(dims, job.scan.axes, strict=True)
            )
            nbytes += length
            selected += length * (place in read)
            if column.name in columns:
                stored.add(place)
    return nbytes, selected, len((stored & inside) - read)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("place", "options", "most"),
    [
        ("ridges", {}, 0),
        ("ridges", {"variables": "depth"}, 0),
        ("ridges", {"ranges": {"y": (70, None)}}, 12 + 2),
        ("ridges", {"where": "depth > 739 AND other < 1518"}, 6 + 1),
        ("ridges", {"where": "depth > 1000"}, 42),
        ("ridges", {"where": "other > 9000"}, 0),
        ("ridges", {"variables": "depth", "where": "depth >= 700", "ranges": {"x": (0, 19)}}, 28),
        ("ridges", {"where": "depth >= 700", "ranges": {"x": [3, 45], "y": (0, 75)}}, 100),
        ("repeated", {"broadcast": True}, 0),
        ("repeated", {"broadcast": True, "where": "t > 250", "ranges": {"x": (6, 9)}}, 100),
        ("repeated", {"broadcast": True, "where": "area > 70"}, 100),
    ],
)
def test_chunks_are_listed_in_pieces_where_counts_do_not_tell(
    spark: SparkSession,
    place: str,
    options: dict[str, Any],
    most: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo: Repository = request.getfixturevalue(place)
    found = explain_pruning(spark, repo, **options)
    told = found.bytes, found.selected_bytes, found.left_out["statistics"]
    assert told == by_listing(repo, ReadOptions(**options), found.boxes)
    assert found.selected + sum(found.left_out.values()) == found.chunks
    listed: list[int] = []
    whole = Session.chunk_refs

    def counted(*args: Any, **kwargs: Any) -> Any:
        refs = whole(*args, **kwargs)
        listed.append(len(refs))
        return refs

    monkeypatch.setattr(Session, "chunk_refs", counted)
    monkeypatch.setattr("zarr_manifests.spark.explain._LISTED", 2)
    again = explain_pruning(spark, repo, **options)
    assert (again.bytes, again.selected_bytes, again.left_out) == (*told[:2], found.left_out)
    assert sum(listed) <= most
    assert max(listed, default=0) <= 2 * 6  # chunks of `depth` in a chunk of `other`


@pytest.mark.spark
def test_what_is_left_out_is_explained(spark: SparkSession, ridges: Repository) -> None:
    found = explain_pruning(spark, ridges, "depth", where="depth >= 700 AND x < 20 AND y >= 30")
    assert (found.chunks, found.selected) == (48, 2)
    assert found.left_out == {"range": 48 - 10, "statistics": 6, "absence": 2}
    assert 0 < found.selected_bytes < found.bytes / 10
    assert "2 of 48 chunks may match" in str(found)
    assert found.picture().splitlines()[-1] == "██····"
    both = explain_pruning(spark, ridges, ranges={"y": (70, None)})
    assert (both.chunk_shape, both.selected, both.left_out["range"]) == ((20, 30), 2, 6)
    assert both.where == "y in (70, None)"
    whole = zm.create(ridges.storage.url.removeprefix("file://") + "-whole")
    ds = xr.Dataset({"t": (("time", "y"), np.arange(12.0).reshape(3, 4) % 4)})
    zm.write(ds, whole, message="maps", encoding={"t": {"chunks": (1, 4)}})
    said = str(explain_pruning(spark, whole, where="t > 2"))
    assert "3 of 3 chunks may match" in said
    assert "no chunk is left out by its values, because chunks of 1 x 4 hold values of" in said


def test_chunks_that_coordinates_leave_out_are_not_read(repo: Repository) -> None:
    job = plan_read(repo, ReadOptions(where="y <= -20 AND x = 100"), FACTS)
    assert job.scan.rows == 6 * 3
    assert [axis.chunk for axis in job.scan.axes] == [2, 4, 5]
    assert all(
        box.lo[1] >= 4 and box.lo[2] >= 5 for task in range(job.tasks) for box in job.boxes(task)
    )


@pytest.mark.spark
@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("odd > 1 OR odd < 0", WhereError, "comparisons can only be joined by AND"),
        ("speed > 1", InvalidArgumentError, "no column 'speed' to compare .*there are: time, y"),
        ("odd > 'a'", InvalidArgumentError, "'odd' has values of type float"),
        ("y > 'north'", InvalidArgumentError, "'y' has values of type float"),
        ([("odd", "like", 3)], InvalidArgumentError, "'like' is not an operator"),
    ],
)
def test_what_cannot_be_compared_is_told_at_once(
    spark: SparkSession, repo: Repository, where: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        read(spark, repo, where=where)


@pytest.mark.spark
@pytest.mark.parametrize(
    "zone", ["Europe/Berlin", "America/New_York", "Australia/Sydney", "Asia/Tokyo", "Asia/Kolkata"]
)
def test_times_in_a_zone_are_those_of_spark(spark: SparkSession, zone: str) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        asked = "unix_micros(make_timestamp(year, month, 15, 12, 0, 0))"
        rows = spark.sql(
            f"SELECT year, month, {asked} AS due FROM (SELECT id AS year FROM range(1900, 2101)) "
            "CROSS JOIN (SELECT id AS month FROM range(1, 13))"
        ).collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")
    assert len(rows) == 201 * 12
    for row in rows:
        moment = Moment(f"{row.year:04d}-{row.month:02d}-15 12:00")
        assert moment.nanoseconds(zone_of(zone)) == row.due * 1000, moment
