"""One Spark session for all tests that can share it, since each costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from small_store import small_store as small_store
from zarr_manifests.spark import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    settings = {
        "spark.sql.shuffle.partitions": "2",
        # Queries are small and few: the second compiler takes more time than it gives.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        # On a busy machine an answer may take minutes.
        "spark.network.timeout": "900s",
        "spark.executor.heartbeatInterval": "60s",
        "spark.python.authenticate.socketTimeout": "900s",
    }
    # A task may fail twice before its job does.
    started = session(master="local[2,3]", config=settings)
    yield started
    started.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the session is marked, so that `make test` starts no Spark for it."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")
