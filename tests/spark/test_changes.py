"""Rows of the cells that changed between two snapshots, against reading both."""

from __future__ import annotations

from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from pyspark.sql import DataFrame, SparkSession

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError, NotFoundError, SnapshotExpiredError
from zarr_manifests.spark import changes, read, register

type Row = tuple[Any, ...]


def days(first: int, count: int, value: float, width: int = 4) -> xr.Dataset:
    """Days of a field, each value of which says which write it is from."""
    shape = (count, 3, width)
    values = value + np.arange(np.prod(shape)).reshape(shape) / 1000
    return xr.Dataset(
        {"a": (("day", "y", "x"), values), "b": (("day", "y", "x"), -values)},
        {
            "day": np.datetime64("2024-01-01", "ns")
            + np.arange(first, first + count) * 86_400_000_000_000,
            "y": [10.0, 20.0, 30.0],
            "x": np.arange(width),
        },
    )


ENCODING = {name: {"chunks": (3, 2, 4)} for name in "ab"}


def append(repo: Repository, first: int, count: int, value: float) -> str:
    with repo.transaction(message=f"{count} days") as store:
        ds = days(first, count, value)
        if first:
            ds.to_zarr(store, append_dim="day", consolidated=False, safe_chunks=False)
        else:
            ds.to_zarr(store, consolidated=False, encoding=ENCODING)
    return repo.list_branches()["main"]


def overwrite(repo: Repository, value: float, day: slice = slice(0, 3)) -> str:
    with repo.transaction(message="overwrite") as store:
        zarr.open_array(store, path="a")[day] = value
    return repo.list_branches()["main"]


def rows(frame: DataFrame) -> list[Row]:
    return sorted((tuple(row) for row in frame.collect()), key=repr)


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return zm.create(tmp_path / "repo")


def test_added_rows_of_consecutive_ranges_are_the_table(
    repo: Repository, spark: SparkSession
) -> None:
    ids = [append(repo, first, count, first) for first, count in ((0, 2), (2, 2), (4, 5))]
    repo.compact("main", "full")
    parts = [
        rows(changes(spark, repo, start, end))
        for start, end in zip([None, *ids], [*ids, "main"], strict=True)
    ]
    assert [len(part) for part in parts] == [24, 24, 60, 0]
    assert sorted(chain(*parts), key=repr) == rows(read(spark, repo))
    late = changes(spark, repo, ids[0], where="day >= '2024-01-04' AND x > 1")
    assert rows(late) == rows(read(spark, repo, where="day >= '2024-01-04' AND x > 1"))
    assert late.count() == 6 * 3 * 2
    one = changes(spark, repo, ids[0], ids[1], "a", ranges={"y": (20, None)}, target_rows=5)
    assert one.schema == read(spark, repo, "a").schema
    assert rows(one) == rows(
        read(
            spark,
            repo,
            "a",
            version=ids[1],
            ranges={"y": (20, None), "day": ("2024-01-03", None)},
        )
    )


def test_all_changes_say_what_happened_to_each_row(repo: Repository, spark: SparkSession) -> None:
    start = append(repo, 0, 4, 0)
    overwrite(repo, 7.0)
    append(repo, 4, 4, 4)
    session = repo.writable_session("main")
    for name in "ab":
        zarr.open_array(session.store, path=name).resize((8, 3, 3))
    zarr.open_array(session.store, path="x").resize((3,))
    session.commit("narrower")
    frame = changes(spark, repo, start, cells="all")
    found: dict[str, list[Row]] = {}
    for *row, what in rows(frame):
        found.setdefault(what, []).append(tuple(row))
    # The first three days were overwritten; the fourth shares a chunk with the fifth and sixth.
    counts = {what: len(of) for what, of in found.items()}
    assert counts == {"added": 4 * 9, "overwritten": 3 * 9, "rewritten": 9, "removed": 4 * 3}
    assert {row[3] for row in found["overwritten"]} == {7.0}
    before = rows(read(spark, repo, version=start, ranges={"x": (3, 3)}))
    assert found.pop("removed") == before
    assert sorted(chain(*found.values()), key=repr) == rows(read(spark, repo))
    nothing = changes(spark, repo, "main", cells="all")
    assert nothing.schema == frame.schema
    assert rows(nothing) == []


def test_names_are_ids_branches_and_tags(repo: Repository, spark: SparkSession) -> None:
    first = append(repo, 0, 3, 0)
    repo.create_tag("monday", first)
    repo.create_branch("then", first)
    append(repo, 3, 3, 1)
    expected = rows(changes(spark, str(repo.storage.url), first))
    assert len(expected) == 36
    assert rows(changes(spark, repo, "monday", "main")) == expected
    assert rows(changes(spark, repo, "then")) == expected
    with pytest.raises(NotFoundError, match="never"):
        changes(spark, repo, "never")
    with pytest.raises(InvalidArgumentError, match="not an ancestor"):
        changes(spark, repo, "main", "monday")


def test_the_data_source_reads_added_cells(repo: Repository, spark: SparkSession) -> None:
    first = append(repo, 0, 3, 0)
    second = append(repo, 3, 3, 1)
    append(repo, 6, 3, 2)
    register(spark)
    source = spark.read.format("zarr_manifests").option("start-snapshot-id", first)
    assert rows(source.load(repo.storage.url)) == rows(changes(spark, repo, first))
    source = source.option("end-snapshot-id", second)
    assert rows(source.load(repo.storage.url)) == rows(changes(spark, repo, first, second))


def test_values_in_place_of_missing_coordinates_are_no_change(
    repo: Repository, spark: SparkSession
) -> None:
    ds = days(0, 6, 0)
    with repo.transaction(message="template") as store:
        ds.assign_coords(day=ds.day.where(ds.day < ds.day[3])).chunk().to_zarr(
            store, consolidated=False, compute=False, encoding=ENCODING
        )
    start = repo.list_branches()["main"]
    with repo.transaction(message="fill") as store:
        filled = ds.drop_vars(["y", "x"])
        filled.to_zarr(store, region={"day": slice(0, 6)}, mode="r+", consolidated=False)
    assert rows(changes(spark, repo, start)) == rows(read(spark, repo))


def moved_coordinate(repo: Repository) -> str:
    with repo.transaction(message="correct") as store:
        zarr.open_array(store, path="x")[2] = 9
    return "the coordinate 'x' has other values .* from position 2 on"


def moved_chunks(repo: Repository) -> str:
    session = repo.writable_session("main")
    session.shift_array("a", (1, 0, 0))
    session.commit("shift")
    return "has moved chunks of /a"


def written_anew_with_an_earlier_day(repo: Repository) -> str:
    with repo.transaction(message="all again") as store:
        days(-1, 7, 0).to_zarr(store, mode="w", consolidated=False, encoding=ENCODING)
    return "the coordinate 'day' has other values"


@pytest.mark.parametrize(
    "change", [moved_coordinate, moved_chunks, written_anew_with_an_earlier_day]
)
def test_rows_that_cannot_be_told_apart_are_refused(
    repo: Repository, spark: SparkSession, change: Any
) -> None:
    start = append(repo, 0, 6, 0)
    with pytest.raises(InvalidArgumentError, match=change(repo)):
        changes(spark, repo, start)


def test_what_cannot_be_answered_is_an_error(repo: Repository, spark: SparkSession) -> None:
    start = append(repo, 0, 3, 0)
    append(repo, 3, 3, 0)
    for wrong, what in (
        ({"cells": "new"}, "cells cannot be 'new'"),
        ({"variables": "day"}, "all variables are coordinates"),
        ({"nan": "none"}, "nan cannot be"),
    ):
        with pytest.raises(InvalidArgumentError, match=what):
            changes(spark, repo, start, **wrong)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="no group /b"):
        changes(spark, repo, start, group="b")
    memory = zm.create("memory://changes-of-memory")
    zm.write(days(0, 2, 0), memory, message="days")
    with pytest.raises(UnsupportedStorageError, match="memory of this process"):
        changes(spark, memory, None)
    repo.expire_snapshots(keep_last=1)
    repo.garbage_collect(grace=timedelta(0))
    for place in (repo, repo.storage.url):
        with pytest.raises(SnapshotExpiredError):
            changes(spark, place, start)
    assert changes(spark, repo, None).count() == 72
