"""Drivers in processes of their own, on a cluster of two executors on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark
import pytest

from on_cluster.answers import Driver
from s3_server import ObjectServer, object_server, server_named

__all__ = ["object_server", "server_named"]

ROOT = Path(__file__).parents[3]
CLUSTER = "local-cluster[2,1,1024]"


@pytest.fixture(scope="session")
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Spark's scripts expect, which the package has in other places."""
    home = tmp_path_factory.mktemp("spark-home")
    for name in ("bin", "sbin", "jars", "python"):
        (home / name).symlink_to(Path(pyspark.__file__).parent / name)
    return home


type Start = Callable[..., Driver]


@pytest.fixture(scope="session")
def start(spark_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a driver with a master and settings; it ends with the tests."""

    @contextmanager
    def driver(master: str, config: dict[str, str]) -> Iterator[Driver]:
        folder = tmp_path_factory.mktemp("driver")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
            "SPARK_LOCAL_DIRS": str(folder),
        }
        if master.startswith("local-cluster"):
            environment["SPARK_HOME"] = str(spark_home)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "on_cluster.driver", master, json.dumps(config)],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            yield Driver(process)
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    with ExitStack() as drivers:
        yield lambda master=CLUSTER, **config: drivers.enter_context(driver(master, config))


@pytest.fixture(scope="session")
def cluster(start: Start, object_server: ObjectServer) -> Driver:
    """A driver that the tests share, which do not kill it."""
    return start()
