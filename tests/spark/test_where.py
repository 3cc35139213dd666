"""Reads with `where`, against reading everything and filtering then."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Repository
from zarr_manifests.spark import read, worker
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.spark.worker import partition_batches
from zoned import OPS

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
    found = pa.Table.from_batches(batches, exact)
    if job.variables and job.tasks:
        assert list(map(str, spread(job))) == [str((*row.values(),)) for row in found.to_pylist()]
    return found


def spread(job: Job) -> Iterator[tuple[Any, ...]]:
    """The same rows in the same order, from the lines of cells that Spark makes rows of."""
    for task in range(job.tasks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "ROW_CELLS", 12)
            lines = list(worker.run_arrow(job, [pa.record_batch({"id": [task]})], in_lines=True))
        for row in (row for batch in lines for row in batch.to_pylist()):
            *lists, length = row.values()
            *outer, inner = lists[: len(job.dimensions)]
            for cell, values in enumerate(zip(*lists[len(job.dimensions) :], strict=True)):
                line, place = divmod(cell, length)
                yield *(labels[line] for labels in outer), inner[place], *values


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


_SECOND_DAY = [("time", ">=", "2000-01-02"), ("time", "<", "2000-01-03")]


@st.composite
def wheres(draw: st.DrawFn) -> list[tuple[Any, ...]]:
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
    return comparisons


# Ranges of labels, and the same in comparisons.
_RANGES = st.sampled_from(
    [
        ([], []),
        ([{"y": (-20, 40)}], [("y", ">=", -20), ("y", "<=", 40)]),
        ([{"x": slice(3, 9)}], [("x", "between", [3, 9])]),
        ([{"x": [1, (0.1, 0.1)]}], [("x", "in", [1, 0.1])]),
        ([{"odd": (3, 50)}], [("odd", "between", [3, 50])]),
        ([{"count": (None, 6.5)}], [("count", "<=", 6.5)]),
        ([{"time": ("2000-01-02", "2000-01-02")}], _SECOND_DAY),
        ([{"time": "2000-01-02"}], _SECOND_DAY),
        ([{"time": ["1999", date(2000, 1, 2)]}], _SECOND_DAY),
        ([{"time": ("=", "2000-01-02T12")}], [("time", "=", "2000-01-02T12:00")]),
    ]
)


def due(
    everything: pa.Table, where: list[tuple[Any, ...]], zone: tzinfo = UTC
) -> list[tuple[Any, ...]]:
    """The rows of all that a where leaves, comparing value by value."""
    found = everything.to_pylist()
    for column, op, *literals in where:
        found = [row for row in found if holds(op, row[column], literals, zone)]
    return sorted(tuple(map(str, row.values())) for row in found)


def holds(op: str, value: Any, literals: list[Any], zone: tzinfo) -> bool:
    """Whether a comparison holds for a value, as it does in Spark."""
    if op in ("is null", "is not null") or value is None:
        return op == ("is null" if value is None else "is not null")
    if value != value:  # greater than every number
        return op in (">", ">=", "!=")
    given = literals[0] if isinstance(literals[0], list) else literals
    if isinstance(value, datetime):
        times = map(pd.Timestamp, given)
        given = [time if time.tzinfo else time.tz_localize(zone) for time in times]
    match op:
        case "in":
            return value in given
        case "between":
            return bool(given[0] <= value <= given[1])
    return bool(OPS[op](value, given[0]))


@given(wheres(), _RANGES, st.sampled_from(["null", "keep", "drop"]), st.integers(1, 300))
@settings(max_examples=examples(50), deadline=None)
def test_rows_are_those_that_are_left_of_all(
    repo: Repository, where: Any, ranges: Any, nan: str, target_rows: int
) -> None:
    facts = SparkFacts(parallelism=2, time_zone="GMT+9")
    given, same = ranges
    everything = rows(plan_read(repo, ReadOptions(nan=nan), facts))
    options = ReadOptions(nan=nan, where=[*given, *where], target_rows=target_rows)
    job = plan_read(repo, options, facts)
    assert sorted_rows(rows(job)) == due(everything, [*same, *where], timezone(timedelta(hours=9)))


@pytest.mark.parametrize("damage", ["flipped", "gone"])
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
        path.write_bytes(data)
    wheres: list[list[tuple[Any, ...]]] = [
        [("odd", ">", 3), ("count", "<", 3)],
        [("odd", "is null")],
        [("unwritten", "=", 4)],
        [("packed", "<", 0)],
    ]
    for where in wheres:
        whole = rows(plan_read(repo, ReadOptions(), FACTS))
        job = plan_read(place, ReadOptions(where=where), FACTS)
        assert sorted_rows(rows(job)) == due(whole, where)


def test_positions_are_compared_without_being_listed(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repo")
    ds = xr.Dataset({"a": ("i", np.arange(40.0))})
    zm.write(ds, repo, message="a", encoding={"a": {"chunks": 4}})
    everything = rows(plan_read(repo, ReadOptions(), FACTS))
    wheres: list[list[tuple[Any, ...]]] = [
        [("i", ">", 5.5), ("i", "<=", 20)],
        [("i", "!=", 7)],
        [("i", "in", [3, 4, 39, 40, -1])],
        [("i", "between", [10, 9])],
        [("i", "is null")],
        [("i", "=", 38.5)],
        [("i", "<", 1e30)],
    ]
    for where in wheres:
        job = plan_read(repo, ReadOptions(where=where), FACTS)
        assert sorted_rows(rows(job)) == due(everything, where)
        assert job.scan.rows == len(due(everything, where))


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


def test_what_is_left_out_is_explained(
    spark: SparkSession, ridges: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "depth >= 700 AND x < 20 AND y >= 30"
    read(spark, ridges, "depth", where=where).explain()
    shown = capsys.readouterr().out
    for part in (
        ridges.storage.url,
        ridges.readonly_session().snapshot_id,
        where,
        "2 of 48 chunks, 38 out of range",
    ):
        assert part in shown
