"""What a driver can be asked to do."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import zarr
from pyspark.sql import SparkSession

from on_cluster.trouble import storage_at
from zarr_manifests import Repository

type Troubles = list[dict[str, object]]


def processes(spark: SparkSession) -> list[int]:
    """The processes that tasks run in."""

    def mine(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"pid": [os.getppid()]})

    rows = spark.range(0, 64, 1, 4).mapInArrow(mine, "pid long").collect()
    return sorted({row.pid for row in rows})


def fill(spark: SparkSession, url: str, value: float, troubles: Troubles = ()) -> str:  # type: ignore[assignment]
    """Fill an array by forks of one session, one chunk a task."""
    repo = Repository.open(storage_at(url, list(troubles)))
    session = repo.writable_session()
    fork = pickle.dumps(session.fork())

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        mine = pickle.loads(fork)
        array: Any = zarr.open_array(mine.store, path="a")
        for batch in batches:
            for chunk in batch.column(0).to_pylist():
                array[chunk * 1000 : (chunk + 1) * 1000] = value + np.arange(1000)
        yield pa.RecordBatch.from_pydict({"fork": [pickle.dumps(mine)]})

    chunks = spark.range(0, 8, 1, 4).mapInArrow(write, "fork binary")
    session.merge(*(pickle.loads(row.fork) for row in chunks.collect()))
    return session.commit(f"fill with {value}")
