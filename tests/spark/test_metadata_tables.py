"""What a repository says of itself in Spark, against what it says in Python."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import zarr
from pyspark.sql import SparkSession

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.engine.edit.record_zones import record_zones
from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.grid import Box
from zarr_manifests.planning.tables.resolved_chunks import ChunkKind
from zarr_manifests.planning.zones.meaning import Meaning
from zarr_manifests.planning.zones.measure import measure
from zarr_manifests.spark import metadata_table, metadata_tables
from zarr_manifests.store import contents_of, workspace_of


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


@pytest.mark.spark
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


@pytest.mark.spark
def test_snapshots_start_where_they_are_told_to(spark: SparkSession, repo: Repository) -> None:
    tagged = metadata_table(spark, repo, "snapshots", version="second").collect()
    assert [row.snapshot_id for row in tagged] == [
        one.snapshot_id for one in repo.ancestry("second")
    ]
    later = datetime.now(UTC) + timedelta(hours=1)
    assert metadata_table(spark, repo, "snapshots", version=f"main@{later}").count() == len(
        list(repo.ancestry())
    )


@pytest.mark.spark
def test_operations_are_the_log(spark: SparkSession, repo: Repository) -> None:
    found = metadata_table(spark, repo.storage.url, "operations").collect()
    expected = list(repo.ops_log())
    assert [(row.version, row.operation, row.ref, row.snapshot_id) for row in found] == [
        (one.version, one.operation, one.ref, one.snapshot_id) for one in expected
    ]


@pytest.mark.spark
def test_manifests_are_those_of_the_base(spark: SparkSession, repo: Repository) -> None:
    found = metadata_table(spark, repo.storage.url, "manifests").collect()
    expected = repo.explain_manifests().manifests
    assert [(row.key, row.set_name, row.refs, row.nbytes, row.arrays) for row in found] == [
        (one.key, one.set_name, one.refs, one.nbytes, one.arrays) for one in expected
    ]
    assert found


@pytest.mark.spark
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


@pytest.mark.spark
@pytest.mark.parametrize("per_task", [256 * 1024, 1], ids=["one task", "many tasks"])
def test_chunks_are_the_refs_of_the_snapshot(
    spark: SparkSession, repo: Repository, per_task: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_tables, "_REFS_PER_TASK", per_task)
    frame = metadata_table(spark, repo.storage.url, "chunks")
    found = [tuple(row) for row in frame.orderBy("path", "coords").collect()]
    session, expected = repo.readonly_session(), []
    for path in ("/air/t", "/late", "/scalar", "/sharded"):
        refs = session.chunk_refs(path)
        for row in range(len(refs)):
            at, checksum = refs.source.item(row), refs.checksum.item(row)
            expected.append(
                (
                    path,
                    refs.coords[row].tolist(),
                    ChunkKind(refs.kind[row]).name.lower(),
                    None if at < 0 else refs.locations[at],
                    None if at < 0 else refs.offset.item(row),
                    refs.length.item(row),
                    None if checksum < 0 else checksum,
                )
            )
    assert found == expected
    assert {row[2] for row in found} == {"inline", "native"}
    partitions = frame.rdd.getNumPartitions()
    assert partitions == 4 if per_task > 1 else partitions > 10


@pytest.mark.spark
def test_the_driver_reads_no_refs_of_chunks(
    spark: SparkSession, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zarr_manifests.session import Session

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("refs were read by the driver")

    monkeypatch.setattr(Session, "chunk_refs", refuse)
    monkeypatch.setattr("zarr_manifests.spark.plan.initialized_chunks", refuse)
    assert metadata_table(spark, repo.storage.url, "chunks", path="air").count() == 8


@pytest.mark.spark
def test_a_lease_keeps_what_tasks_read(
    spark: SparkSession, repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path(unquote(urlsplit(repo.storage.url).path)), tmp_path / "copy")
    copy = zm.open(tmp_path / "copy")
    expected = metadata_table(spark, copy, "chunks", lease=None).count()
    first = copy.list_branches()["main"]
    held: list[tuple[str, float]] = []
    keep = metadata_tables.keep_readable

    def noted(repository: Repository, snapshot_id: str, duration_s: float, frame: object) -> None:
        held.append((snapshot_id, duration_s))
        keep(repository, snapshot_id, duration_s, frame)

    monkeypatch.setattr(metadata_tables, "keep_readable", noted)
    frame = metadata_table(spark, copy, "chunks", lease=timedelta(minutes=5))
    metadata_table(spark, copy, "snapshots")
    metadata_table(spark, copy, "chunks", lease=None)
    assert held == [(first, 300.0)]
    with copy.transaction(message="replace everything") as store:
        zarr.create_group(store, overwrite=True)
    copy.expire_snapshots(keep_last=1)
    copy.garbage_collect(timedelta(0))
    assert frame.count() == expected
    assert first in {one.snapshot_id for one in copy.ancestry("main")}


@pytest.mark.spark
def test_a_path_limits_arrays_and_chunks(spark: SparkSession, repo: Repository) -> None:
    arrays = metadata_table(spark, repo.storage.url, "arrays", path="/air").collect()
    assert [row.path for row in arrays] == ["/air/t"]
    chunks = metadata_table(spark, repo.storage.url, "chunks", path="air/t", version="second")
    assert {row.path for row in chunks.select("path").distinct().collect()} == {"/air/t"}
    assert metadata_table(spark, repo.storage.url, "chunks", path="/late").count() == 2
    with pytest.raises(NotFoundError, match="no group or array /late in snapshot"):
        metadata_table(spark, repo.storage.url, "chunks", path="/late", version="second")


@pytest.mark.spark
@pytest.mark.parametrize("per_task", [256 * 1024, 1], ids=["one task", "many tasks"])
def test_statistics_are_those_of_the_chunks(
    spark: SparkSession, tmp_path: Path, per_task: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_tables, "_REFS_PER_TASK", per_task)
    made = zm.create(tmp_path / "repo")
    numbers = np.array([[3, 1], [np.nan, 2], [np.nan, np.nan], [7, 8]])
    names = np.array(["kiwi", "apple", "plum", "fig"])
    with made.transaction(message="with statistics") as store:
        for name, values, chunk in (("t", numbers, (1, 2)), ("name", names, (2,))):
            zarr.create_array(
                store, name=name, shape=values.shape, chunks=chunk, dtype=values.dtype
            )[...] = values
            meaning = Meaning.of(contents_of(store).array_at(name).documents)
            bounds = measure(meaning.compared(values), chunk, meaning.fill, meaning.missing)
            grid = tuple(n // c for n, c in zip(values.shape, chunk, strict=True))
            box = Box((0,) * len(grid), grid)
            record_zones(workspace_of(store), name, box, meaning.digest, bounds)
    found = (
        metadata_table(spark, made.storage.url, "statistics").orderBy("path", "coords").collect()
    )
    text = [tuple(row) for row in found if row.path == "/name"]
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


@pytest.mark.spark
def test_a_repository_without_data_has_empty_tables(spark: SparkSession, tmp_path: Path) -> None:
    empty = zm.create(tmp_path / "repo")
    for table in ("arrays", "chunks", "manifests", "statistics"):
        frame = metadata_table(spark, empty, table)  # type: ignore[arg-type]
        assert frame.count() == 0
        assert len(frame.columns) > 4
    assert metadata_table(spark, empty, "snapshots").count() == 1


@pytest.mark.spark
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
