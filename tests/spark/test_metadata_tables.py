"""What a repository says of itself in Spark, against what it says in Python."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import zarr
from pyspark.sql import SparkSession

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.spark import metadata_table


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


def test_snapshots_are_the_ancestry(spark: SparkSession, repo: Repository) -> None:
    found = metadata_table(spark, repo.storage.url, "snapshots").collect()
    expected = list(repo.ancestry())
    assert [row.snapshot_id for row in found] == [one.snapshot_id for one in expected]
    for row, one in zip(found, expected, strict=True):
        assert (row.parent_id, row.kind, row.message) == (one.parent_id, one.kind, one.message)
        assert (row.written, row.totals) == (dict(one.written), dict(one.totals))
        assert row.commit_id == one.commit_id
    assert '{"run": 1}' in [row.metadata for row in found]
    metadata_table(spark, repo.storage.url, "snapshots").createOrReplaceTempView("snapshots")
    seconds = spark.sql("SELECT unix_seconds(written_at) AS s FROM snapshots").collect()
    assert [row.s for row in seconds] == [int(one.written_at.timestamp()) for one in expected]
    tagged = metadata_table(spark, repo, "snapshots", version="second").collect()
    assert [row.snapshot_id for row in tagged] == [one.snapshot_id for one in expected[1:]]


def test_operations_and_manifests_are_the_repositorys(
    spark: SparkSession, repo: Repository
) -> None:
    found = metadata_table(spark, repo.storage.url, "operations").collect()
    assert [(row.version, row.operation, row.ref, row.snapshot_id) for row in found] == [
        (one.version, one.operation, one.ref, one.snapshot_id) for one in repo.ops_log()
    ]
    found = metadata_table(spark, repo.storage.url, "manifests").collect()
    assert [(row.key, row.set_name, row.refs, row.nbytes, row.arrays) for row in found] == [
        (one.key, one.set_name, one.refs, one.nbytes, one.arrays)
        for one in repo.explain_manifests().manifests
    ]
    assert found


def test_arrays_have_their_metadata_and_totals(spark: SparkSession, repo: Repository) -> None:
    found = {row.path: row for row in metadata_table(spark, repo.storage.url, "arrays").collect()}
    assert sorted(found) == ["/air/t", "/empty", "/late", "/scalar", "/sharded"]
    air = found["/air/t"]
    assert (air.dtype, air.dimensions, air.shape) == ("float64", ["y", "x"], [9, 70])
    assert (air.chunk_shape, air.shard_shape, air.zarr_format) == ([2, 35], None, 3)
    assert (air.attributes, air.grid_chunks) == ('{"units": "K"}', 10)
    assert (found["/sharded"].chunk_shape, found["/sharded"].shard_shape) == ([1, 2], [2, 4])
    assert found["/sharded"].grid_chunks == 6
    for array in repo.du(estimate=True).arrays:
        row = found[array.path]
        assert (row.chunks, row.chunk_bytes) == (array.total.chunks, array.total.nbytes)
        exact = array.total.chunks_exact, array.total.nbytes_exact
        assert (row.chunks_exact, row.chunk_bytes_exact) == exact


def test_chunks_are_the_refs_of_the_snapshot(spark: SparkSession, repo: Repository) -> None:
    frame = metadata_table(spark, repo.storage.url, "chunks").orderBy("path", "coords")
    found = [tuple(row) for row in frame.collect()]
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


def test_a_lease_keeps_what_tasks_read(
    spark: SparkSession, repo: Repository, tmp_path: Path
) -> None:
    shutil.copytree(Path(unquote(urlsplit(repo.storage.url).path)), tmp_path / "copy")
    copy = zm.open(tmp_path / "copy")
    first = copy.list_branches()["main"]
    expected = metadata_table(spark, copy, "chunks", lease=None).count()
    frame = metadata_table(spark, copy, "chunks", lease=timedelta(minutes=5))
    with copy.transaction(message="replace everything") as store:
        zarr.create_group(store, overwrite=True)
    copy.expire_snapshots(keep_last=1)
    copy.garbage_collect(timedelta(0))
    assert frame.count() == expected
    assert first in {one.snapshot_id for one in copy.ancestry("main")}


def test_statistics_are_those_of_the_chunks(spark: SparkSession, tmp_path: Path) -> None:
    made = zm.create(tmp_path / "repo")
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
    found = (
        metadata_table(spark, made.storage.url, "statistics").orderBy("path", "coords").collect()
    )
    text = [tuple(row) for row in found if row.path != "/t"]
    assert text == [
        ("/name", [0], "apple", "kiwi", 0, 0, 2),
        ("/name", [1], "fig", "plum", 0, 0, 2),
    ]
    cast = metadata_table(spark, made.storage.url, "statistics", path="t").selectExpr(
        "coords[0]", "round(CAST(low AS DOUBLE), 3)", "round(CAST(high AS DOUBLE), 3)", "nan"
    )
    assert sorted(tuple(row) for row in cast.collect()) == [
        (0, 1.0, 3.0, 0),
        (1, 2.0, 2.0, 1),
        (2, None, None, 2),
        (3, 7.0, 8.0, 0),
    ]


def test_what_cannot_be_asked_for_is_said(spark: SparkSession, repo: Repository) -> None:
    with pytest.raises(InvalidArgumentError, match="no table 'snapshot': did you mean snapshots"):
        metadata_table(spark, repo.storage.url, "snapshot")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="snapshots is not about arrays"):
        metadata_table(spark, repo.storage.url, "snapshots", path="/air")
    with pytest.raises(InvalidArgumentError, match="of the whole repository"):
        metadata_table(spark, repo.storage.url, "operations", version="main")
    memory = zm.create("memory://metadata-tables")
    with pytest.raises(UnsupportedStorageError, match="put the repository on a local disk"):
        metadata_table(spark, memory, "chunks")
