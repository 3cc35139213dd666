"""What a driver can be asked to do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

import zarr_manifests as zm
from grids import DIMS, SCHEMA, hours
from on_cluster.hosts import another_host
from on_cluster.trouble import Troubles, storage_at, troubled
from zarr_manifests.spark import foreach_batch, write_dataframe
from zarr_manifests.spark.data_source import ManifestsDataSource

_OPTIONS: Final = {"dims": ",".join(DIMS), "append-dim": "time"}


class TroubledDataSource(ManifestsDataSource):
    """The data source on a storage that has troubles; its sinks use the option `troubles`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        own = dict(options)
        self._troubles = json.loads(own.pop("troubles"))
        super().__init__(own)

    @classmethod
    def name(cls) -> str:
        return "troubled"

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        sink: Any = super().writer(schema, overwrite)
        storage = storage_at(sink.repository.storage.url, self._troubles)
        return replace(sink, repository=zm.open(storage))


def write(
    spark: SparkSession,
    how: str,
    url: str,
    start: int,
    stop: int,
    troubles: Troubles = (),
    amid: Troubles = (),
) -> None:
    """Append hours, by `write_dataframe` or `save`; `amid` are troubles amid the rows."""
    frame = troubled(_rows(spark, start, stop), amid)
    message = f"hours from {start}"
    if how == "write_dataframe":
        storage = storage_at(url, troubles)
        write_dataframe(frame, storage, "/", dims=DIMS, append_dim="time", message=message)
    else:
        writer = frame.write.format("troubled").mode("append").options(**_OPTIONS)
        writer.options(troubles=json.dumps(list(troubles)), message=message).save(url)


def write_twice_a_task(spark: SparkSession, **given: Any) -> None:
    """As `write`, on a cluster on which Spark makes a second attempt of a slow task."""
    with another_host(spark):
        write(spark, **given)


def _rows(spark: SparkSession, start: int, stop: int) -> DataFrame:
    frame = hours(stop, start).to_dataframe().reset_index()
    return spark.createDataFrame(frame).selectExpr(*_columns()).repartition(4)


def _columns() -> Sequence[str]:
    return [f"cast({name} as {kind}) {name}" for name, kind in map(str.split, SCHEMA.split(", "))]


def stream(
    spark: SparkSession,
    url: str,
    files: str,
    checkpoint: str,
    troubles: Troubles = (),
) -> str:
    """Write the files that are there, one a batch; the id of the query."""
    frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(files)
    storage = storage_at(url, troubles)
    write = foreach_batch(storage, "/", dims=DIMS, append_dim="time")
    writer = frame.writeStream.foreachBatch(write)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    return str(query.id)
