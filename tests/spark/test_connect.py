"""Reads by Spark Connect, whose client has no `sparkContext`.

A server and a classic session exclude each other in one process, so the test runs in another one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from pyspark.errors import PySparkAttributeError
from pyspark.sql import SparkSession

import zarr_manifests as zm
from zarr_manifests.spark import (
    changes,
    maintenance,
    metadata_table,
    read,
    register,
    write_dataframe,
)
from zarr_manifests.spark.tasks import java_home

VALUES = np.arange(200.0).reshape(20, 10)
SETTINGS = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


@pytest.mark.spark
def test_reads_need_no_spark_context(tmp_path: Path) -> None:
    place = tmp_path / "repo"
    ds = xr.Dataset({"a": (("y", "x"), VALUES)}, {"y": np.arange(20), "x": np.arange(10)})
    zm.write(ds, place, message="write", encoding={"a": {"chunks": (5, 5)}})
    with java_home(local=False) as home:
        environment = os.environ | {
            "JAVA_HOME": str(home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_TESTING": "1",  # the server takes any free port
        }
        command = [sys.executable, __file__, str(place)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    written = xr.open_zarr(zm.open(place).readonly_session().store, consolidated=False)
    assert np.array_equal(written.a, VALUES + 1)


def main(place: str) -> None:
    """What the client does."""
    builder = SparkSession.builder.remote("local[2]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        with pytest.raises(PySparkAttributeError):
            _ = spark.sparkContext
        look(spark, place)
    finally:
        spark.stop()


def look(spark: SparkSession, place: str) -> None:
    """Read in all ways, and write a little."""
    assert read(spark, place, where="a > 150").count() == 49
    assert read(spark, place).count() == 200
    assert changes(spark, place, None).count() == 200
    read(spark, place).createOrReplaceTempView("v")
    assert [row[0] for row in spark.sql("SELECT max(a) FROM v").collect()] == [199.0]
    register(spark)
    loaded = spark.read.format("zarr_manifests").option("where", "a < 10").load(place)
    assert sorted(row.a for row in loaded.collect()) == list(range(10))
    assert metadata_table(spark, place, "chunks").count() > 0
    assert maintenance.verify(spark, place).ok
    more = read(spark, place).selectExpr("y", "x", "a + 1 AS a")
    write_dataframe(more, place, "/", dims=["y", "x"], mode="overwrite-region", message="more")


if __name__ == "__main__":
    main(*sys.argv[1:])
