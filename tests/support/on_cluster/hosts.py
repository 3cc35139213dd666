"""Another host of a cluster: Spark runs no two attempts of a task on one host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pyspark.sql import SparkSession

_HOST: Final = "localhost"
"""Another name than the one that Spark's own workers have."""
_SECONDS: Final = 300


@contextmanager
def another_host(spark: SparkSession) -> Iterator[None]:
    """For as long as this lasts, an executor more, which counts as one on another host."""
    jvm: Any = spark.sparkContext._jvm
    context: Any = spark.sparkContext._jsc.sc()
    gateway: Any = spark.sparkContext._gateway
    urls = gateway.new_array(jvm.java.lang.String, 1)
    urls[0] = _master(jvm)
    workers = _module(jvm, "worker.Worker")
    number, resources = (getattr(workers, f"startRpcEnvAndEndpoint$default${n}")() for n in (8, 10))
    given = (_HOST, 0, 0, 1, 1024, urls, None, number, context.conf(), resources)
    worker = workers.startRpcEnvAndEndpoint(*given)
    try:
        until = time.monotonic() + _SECONDS
        while _HOST not in _hosts(context):
            assert time.monotonic() < until, f"executors are on {_hosts(context)} only"
            time.sleep(0.2)
        yield
    finally:
        worker.shutdown()
        worker.awaitTermination()


def _hosts(context: Any) -> set[str]:
    return {info.host() for info in context.statusTracker().getExecutorInfos()}


def _module(jvm: Any, name: str) -> Any:
    made = jvm.java.lang.Class.forName(f"org.apache.spark.deploy.{name}$")
    return made.getField("MODULE$").get(None)


def _master(jvm: Any) -> str:
    """The URL of the master that `local-cluster` has started."""
    cluster = _module(jvm, "LocalSparkCluster").get().get()
    masters = cluster.getClass().getDeclaredField("masterRpcEnvs")
    masters.setAccessible(True)
    return str(masters.get(cluster).apply(0).address().toSparkURL())
