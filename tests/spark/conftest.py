"""One Spark session for all tests that can share it, since each costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from small_store import small_store
from zarr_manifests.spark import session

__all__ = ["small_store", "spark"]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # A task may fail twice before its job does.
    started = session(master="local[2,3]", config={"spark.sql.shuffle.partitions": "2"})
    yield started
    started.stop()
