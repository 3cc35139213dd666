"""Drivers in processes of their own, on a cluster of two executors on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from on_cluster.answers import Driver

ROOT = Path(__file__).parents[3]
CLUSTER = "local-cluster[2,1,1024]"
LOCAL = "local[2,3]"


class Drivers:
    """Drivers that tests share, since each takes seconds to start; who kills one gets another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[tuple[str, Driver]] = []

    def living(self, master: str, number: int = 1) -> list[Driver]:
        """So many drivers of that master."""
        living = [one for kind, one in self._started if kind == master and one.lives]
        while len(living) < number:
            living.append(self._start(master))
        return living[:number]

    def _start(self, master: str) -> Driver:
        folder = self._folder / str(len(self._started))
        folder.mkdir()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
            "SPARK_LOCAL_DIRS": str(folder),
        }
        if master == CLUSTER:
            environment["SPARK_HOME"] = str(_spark_home(folder / "home"))
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "on_cluster.driver", master],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._started.append((master, Driver(process, folder / "log")))
        return self._started[-1][1]

    def end(self) -> None:
        """End those that live."""
        for _, driver in self._started:
            driver.end()


def _spark_home(home: Path) -> Path:
    """What Spark's scripts expect, which the package has in other places."""
    home.mkdir()
    for name in ("bin", "sbin", "jars", "python"):
        (home / name).symlink_to(Path(pyspark.__file__).parent / name)
    return home


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    started = Drivers(tmp_path_factory.mktemp("drivers"))
    yield started
    started.end()


@pytest.fixture
def cluster(drivers: Drivers) -> Driver:
    """A driver on the cluster, which tests do not kill."""
    return drivers.living(CLUSTER)[0]


@pytest.fixture
def victim(drivers: Drivers) -> Driver:
    """A driver that the test kills."""
    return drivers.living(LOCAL)[0]


@pytest.fixture
def three(drivers: Drivers) -> list[Driver]:
    """Three drivers, one of them on the cluster."""
    return [*drivers.living(CLUSTER), *drivers.living(LOCAL, 2)]
