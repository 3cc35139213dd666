"""What a repository says of itself in Spark, against what it says in Python."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
import zarr
from pyspark.sql import SparkSession

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.spark import metadata_table
from zarr_manifests.spark.maintenance import driver_table

NO_SPARK: Final[Any] = None
"""Where a call needs no session."""

COLUMNS: Final = {
    "arrays": "path string, zarr_format int, dtype string, dimensions array<string>, "
    "shape array<bigint>, chunk_shape array<bigint>, shard_shape array<bigint>, "
    "attributes string, grid_chunks decimal(38,0), chunks bigint, chunks_exact boolean, "
    "chunk_bytes bigint, chunk_bytes_exact boolean",
    "chunks": "path string, coords array<bigint>, kind string, location string, offset bigint, "
    "length bigint, crc32c bigint",
    "statistics": "path string, coords array<bigint>, low string, high string, missing bigint, "
    "nan bigint, cells bigint, sum double",
}
"""The columns of each table in Spark."""


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A small chunk, large ones, a sharded array, an empty one, and a compaction between them."""
    made = zm.create(tmp_path_factory.mktemp("tables") / "repo")
    rng = np.random.default_rng(3)
    with made.transaction(message="first", metadata={"run": 1}) as store:
        root = zarr.create_group(store)
        root.attrs["title"] = "tables"
        air = root.create_group("air")
        t = air.create_array(
            "t", shape=(9, 70), chunks=(2, 35), dtype="f8", dimension_names=("y", "x")
        )
        t.attrs["units"] = "K"
        t[:4] = rng.random((4, 70)) + 1
        root.create_array("empty", shape=(4,), chunks=(2,), dtype="i2")
        root.create_array("scalar", shape=(), dtype="f4")[...] = 3
    made.compact()
    with made.transaction(message="second") as store:
        root = zarr.open_group(store)
        root["air/t"][6:] = rng.random((3, 70)) + 1
        sharded = root.create_array(
            "sharded", shape=(6, 6), chunks=(1, 2), shards=(2, 4), dtype="i4"
        )
        sharded[:3] = 5
    made.create_tag("second")
    with made.transaction(message="third") as store:
        zarr.open_group(store).create_array("late", shape=(2,), chunks=(1,), dtype="u1")[:] = 1
    return made


def rows(repo: Repository, table: str, path: str | None = None) -> list[dict[str, Any]]:
    """The rows of a table that the driver makes, at the head of main."""
    found: list[dict[str, Any]] = driver_table(repo.readonly_session(), table, path).to_pylist()
    return found


def test_arrays_have_their_metadata_and_totals(repo: Repository) -> None:
    found = {row["path"]: row for row in rows(repo, "arrays")}
    assert list(found) == ["/air/t", "/empty", "/late", "/scalar", "/sharded"]
    air = found["/air/t"]
    assert (air["dtype"], air["dimensions"], air["shape"]) == ("float64", ["y", "x"], [9, 70])
    assert (air["chunk_shape"], air["shard_shape"], air["zarr_format"]) == ([2, 35], None, 3)
    assert (air["attributes"], air["grid_chunks"]) == ('{"units": "K"}', 10)
    sharded = found["/sharded"]
    assert (sharded["chunk_shape"], sharded["shard_shape"]) == ([1, 2], [2, 4])
    assert (sharded["grid_chunks"], sharded["dimensions"]) == (6, None)
    for array in repo.du(estimate=True).arrays:
        row, total = found[array.path], array.total
        assert (row["chunks"], row["chunk_bytes"]) == (total.chunks, total.nbytes)
        exact = total.chunks_exact, total.nbytes_exact
        assert (row["chunks_exact"], row["chunk_bytes_exact"]) == exact


def test_a_path_is_an_array_or_all_below_a_group(repo: Repository) -> None:
    for path in ("air", "/air/", "/air/t"):
        assert [row["path"] for row in rows(repo, "arrays", path)] == ["/air/t"]
    for path in ("ai", "/air/t/u"):
        with pytest.raises(NotFoundError, match=f"no group or array /{path.strip('/')}"):
            rows(repo, "statistics", path)


def test_tables_without_rows_have_their_columns() -> None:
    repo = zm.create("memory://empty-tables")
    for table in COLUMNS:
        found = driver_table(repo.readonly_session(), table)
        assert not len(found)
        assert found.column_names == [one.split()[0] for one in COLUMNS[table].split(", ")]
        assert pa.null() not in found.schema.types


def test_dimensions_of_zarr_2_are_those_of_xarray() -> None:
    repo = zm.create("memory://tables-of-zarr-2")
    with repo.transaction(message="an array of Zarr 2") as store:
        how: dict[str, Any] = {"chunks": (2, 6), "dtype": "i2", "zarr_format": 2}
        old = zarr.create_array(store, name="old", shape=(4, 6), **how)
        old.attrs["_ARRAY_DIMENSIONS"] = ["y", "x"]
    (row,) = rows(repo, "arrays")
    assert (row["zarr_format"], row["dimensions"], row["grid_chunks"]) == (2, ["y", "x"], 2)


def test_tables_have_their_columns_in_spark(spark: SparkSession, repo: Repository) -> None:
    for table, columns in COLUMNS.items():
        frame = metadata_table(spark, repo.storage.url, table)  # type: ignore[arg-type]
        assert ", ".join(f"{name} {kind}" for name, kind in frame.dtypes) == columns
        assert frame.count() == len(driver_table(repo.readonly_session(), table))
    empty = metadata_table(spark, repo, "statistics", path="empty")
    assert (empty.count(), empty.columns[0]) == (0, "path")
    assert metadata_table(spark, repo, "chunks", path="/empty").collect() == []


def test_chunks_are_the_refs_of_the_snapshot(repo: Repository) -> None:
    found = [tuple(row.values()) for row in rows(repo, "chunks")]
    session, expected = repo.readonly_session(), []
    for path in ("/air/t", "/late", "/scalar", "/sharded"):
        refs = session.chunk_refs(path)
        for row in range(len(refs)):
            at, checksum = refs.source.item(row), refs.checksum.item(row)
            key, offset = (None, None) if at < 0 else (refs.locations[at], refs.offset.item(row))
            kind = "inline" if at < 0 else "native"
            place = (path, refs.coords[row].tolist(), kind, key, offset)
            expected.append((*place, refs.length.item(row), None if checksum < 0 else checksum))
    assert found == expected
    assert {row[2] for row in found} == {"inline", "native"}


def test_statistics_are_those_of_the_chunks() -> None:
    made = zm.create("memory://tables-of-statistics")
    numbers = np.array([[3, 1], [np.nan, 2], [np.nan, np.nan], [7, 8]])
    with made.transaction(message="with statistics") as store:
        for name, values, chunk in (
            ("t", numbers, (1, 2)),
            ("name", np.array(["kiwi", "apple", "plum", "fig"]), (2,)),
            ("unordered", np.ones(4, "c8"), (2,)),
        ):
            how = {"shape": values.shape, "chunks": chunk, "dtype": values.dtype}
            zarr.create_array(store, name=name, **how)[...] = values
    made.compute_statistics()
    with made.transaction(message="not measured") as store:
        zarr.create_array(store, name="late", shape=(2,), chunks=(1,), dtype="<U3")[:] = "a"
    assert {row["path"] for row in rows(made, "statistics")} == {"/t"}
    numbered = rows(made, "statistics", "t")
    for end, expected in (("low", [1, 2, None, 7]), ("high", [3, 2, None, 8])):
        bounds = [row[end] if row[end] is None else float(row[end]) for row in numbered]
        assert bounds == expected
    assert [row["sum"] for row in numbered] == [4, 2, 0, 15]
    assert [(row["coords"], row["nan"]) for row in numbered] == [
        ([0, 0], 0),
        ([1, 0], 1),
        ([2, 0], 2),
        ([3, 0], 0),
    ]


def test_what_cannot_be_asked_for_is_said(repo: Repository) -> None:
    with pytest.raises(InvalidArgumentError, match="no table 'array': did you mean arrays"):
        metadata_table(NO_SPARK, repo.storage.url, "array")  # type: ignore[arg-type]
