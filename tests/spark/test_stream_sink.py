"""Batches of a stream in commits: each once, none lost, whatever is lost of the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import zarr_manifests as zm
from grids import DIMS, SCHEMA, found, hours, made, put_file
from small_store import Answer, Request, SmallStore
from zarr_manifests import Repository
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.spark import foreach_batch, register
from zarr_manifests.storage import from_url


@dataclass
class Feed:
    """Files that a stream reads one by one, and a sink for them."""

    spark: SparkSession
    repo: Repository
    place: Path
    storage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        return self.place / "checkpoint"

    def put(self, ds: xr.Dataset, number: int) -> None:
        put_file(ds, self.place / "in", number)

    def run(self, checkpoint: Path | None = None, **options: Any) -> str:
        """Write what is there now; the id of the query."""
        reader = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        frame = reader.parquet(str(self.place / "in"))
        query = self.sink(frame, **options).option(
            "checkpointLocation", str(checkpoint or self.checkpoint)
        )
        running = query.trigger(availableNow=True).start()
        running.awaitTermination()
        return str(running.id)

    def sink(self, frame: DataFrame, **options: Any) -> Any:
        how: Any = {"dims": DIMS, "append_dim": "time", "storage_options": self.storage or None}
        write = foreach_batch(self.repo.storage.url, "/", **how, **options)
        return frame.writeStream.foreachBatch(write)

    def lost(self, number: int) -> Path:
        """A copy of the checkpoint in which a batch is not noted as done."""
        copy = self.place / f"checkpoint-{number}"
        shutil.copytree(self.checkpoint, copy)
        for path in (copy / "commits").glob(f"*{number}*"):
            path.unlink()
        return copy


@pytest.fixture
def feed(tmp_path: Path, spark: SparkSession) -> Feed:
    (tmp_path / "in").mkdir()
    return Feed(spark, made(tmp_path / "repo"), tmp_path)


@pytest.mark.smoke
def test_each_batch_lands_once_however_often_it_comes(feed: Feed) -> None:
    repo, lost = feed.repo, []
    for number in range(3):
        feed.put(hours(4 + 2 * (number + 1), 4 + 2 * number), number)
        query_id = feed.run()
        lost.append(feed.lost(number))
        repo.expire_snapshots(keep_last=1)
        repo.garbage_collect(timedelta(0))
    mark = {f"spark:{query_id}": 2}
    assert repo.txn_versions() == mark
    head = repo.list_branches()["main"]
    for checkpoint in lost:
        # It knows nothing of what came later, and reads the files again.
        assert feed.run(checkpoint) == query_id
        assert repo.list_branches()["main"] == head
    feed.put(hours(11, 10), 3)
    feed.run(lost[2])
    feed.run()
    assert repo.txn_versions() == {f"spark:{query_id}": 3}
    xr.testing.assert_equal(found(repo), hours(11))
    assert repo.verify().ok


def test_late_and_partial_rows_complete_what_is_there(feed: Feed) -> None:
    whole = hours(9)
    feed.put(whole.isel(time=slice(4, 6), lon=[0, 1]), 0)
    feed.put(whole.isel(time=slice(6, 9)), 1)
    feed.run()
    assert np.isnan(found(feed.repo).u[4:6, :, 2:]).all()
    feed.put(whole.isel(time=slice(4, 6), lon=[2, 3]), 2)  # late
    feed.run()
    xr.testing.assert_equal(found(feed.repo), whole)
    assert len(list(feed.repo.ancestry())) == 2 + 3
    chosen = feed.repo.readonly_session().chunks_where("u", "u >= 96")
    assert len(chosen.boxes) <= 2


def test_a_name_of_its_own_outlives_the_checkpoint(feed: Feed) -> None:
    feed.put(hours(6, 4), 0)
    feed.run(txn_app_id="hourly")
    feed.run(feed.place / "another", txn_app_id="hourly")
    assert feed.repo.txn_versions() == {"hourly": 0}
    xr.testing.assert_equal(found(feed.repo), hours(6))


def test_an_object_store_fails_under_a_stream(
    small_store: SmallStore, tmp_path: Path, spark: SparkSession
) -> None:
    """What has lost its answer is found; a stream that a refusal has stopped goes on later."""
    storage = {"endpoint": small_store.endpoint, "allow_http": True, "anonymous": True}
    repo = made(from_url("s3://bucket/winds", **storage))
    feed = Feed(spark, repo, tmp_path, storage)
    feed.put(hours(6, 4), 0)
    feed.put(hours(9, 6), 1)

    def loses(request: Request) -> Answer:
        small_store.perform(request)
        return Answer(None)

    for part in ("/chunks/", "/chunks/", "/snapshots/", "/current"):
        small_store.once("PUT", part, loses)
    query_id = feed.run()
    assert not small_store.faults
    assert repo.txn_versions() == {f"spark:{query_id}": 1}
    feed.put(hours(11, 9), 2)
    small_store.refuse({"PUT"}, 403, "AccessDenied")
    with pytest.raises(StreamingQueryException, match="do not allow it here"):
        feed.run()
    assert repo.txn_versions() == {f"spark:{query_id}": 1}
    small_store.faults.clear()
    feed.run()
    assert repo.txn_versions() == {f"spark:{query_id}": 2}
    xr.testing.assert_equal(found(repo), hours(11))
    repo.garbage_collect(timedelta(0))
    assert repo.verify().ok


def test_a_frame_that_is_no_batch_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    write = foreach_batch(made(tmp_path / "repo"), "/", dims=DIMS, append_dim="time")
    with pytest.raises(InvalidArgumentError, match="txn_app_id"):
        write(spark.createDataFrame([], SCHEMA), 0)


def test_a_stream_of_changes_fills_another_repository(tmp_path: Path, spark: SparkSession) -> None:
    """Also where a batch of the source has no tasks."""
    register(spark)
    source, sink = made(tmp_path / "source"), made(tmp_path / "sink")
    frame = spark.readStream.format("zarr_manifests").option("starting-snapshot", "main")
    frame = frame.option("max-commits-per-trigger", 1).load(source.storage.url)
    with source.transaction(message="nothing that has rows") as store:
        zarr.create_group(store, path="notes")
    write = foreach_batch(sink, "/", dims=DIMS, append_dim="time")
    writer = frame.writeStream.foreachBatch(write).option(
        "checkpointLocation", str(tmp_path / "checkpoint")
    )
    writer.trigger(availableNow=True).start().awaitTermination()
    zm.write(hours(7, 4), source, append_dim="time", message="more")
    writer.trigger(availableNow=True).start().awaitTermination()
    xr.testing.assert_equal(found(sink), hours(7))
