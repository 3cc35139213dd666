"""A session in a process of its own, since a process has one JVM for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
from zarr_manifests.spark import session

NAMES = ("JAVA_HOME", "PYSPARK_PYTHON", "SPARK_LOCAL_IP", "SPARK_SUBMIT_OPTS")
before = {name: os.environ.get(name) for name in NAMES}
spark = session(master="local[2]", config={"spark.sql.shuffle.partitions": "2"})
said = {
    "environment kept": before == {name: os.environ.get(name) for name in NAMES},
    "bound to": spark.conf.get("spark.driver.host"),
    "zone": spark.sql("SELECT current_timezone()").first()[0],
}


def batches(frames):
    for frame in frames:
        yield frame.assign(
            rows=len(frame), python=sys.executable, unix=os.environ["PYTHON_UNIX_DOMAIN_ENABLED"]
        )


columns = "id long, rows long, python string, unix string"
job = spark.range(0, 200_000, 1, 2).mapInPandas(batches, columns)
seen = job.selectExpr("sum(id)", "max(rows)", "max(python)", "max(unix)").first()
said["sum"], said["largest batch"], said["python"], said["unix"] = seen

spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
again = session("other", master="local[1]", config={"spark.sql.ansi.enabled": "false"})
said["same"] = again is spark
said["settings kept"] = spark.conf.get("spark.sql.session.timeZone")
said["settings applied"] = spark.conf.get("spark.sql.ansi.enabled")
spark.stop()
print(json.dumps(said))
"""


DUE = {
    "sum": sum(range(200_000)),
    "largest batch": 65536,
    "python": sys.executable,
    "unix": "True",
    "zone": "UTC",
    "bound to": "127.0.0.1",
    "environment kept": True,
    "same": True,
    "settings kept": "Asia/Tokyo",
    "settings applied": "false",
}


def without_java(directory: Path) -> str:
    """Give a `PATH` with every command of this one but `java`."""
    directory.mkdir()
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        for command in folder.iterdir() if folder.is_dir() else ():
            link = directory / command.name
            if command.name != "java" and not link.is_symlink():
                link.symlink_to(command)
    return str(directory)


@pytest.mark.spark
def test_a_session_starts_on_a_machine_without_java(tmp_path: Path) -> None:
    environment = {"PATH": without_java(tmp_path / "path"), "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    (tmp_path / "script.py").write_text(SCRIPT)
    ignored = "ignore:PySpark does not yet fully support pandas:FutureWarning"
    done = subprocess.run(
        [sys.executable, "-W", ignored, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == DUE
    assert " WARN " not in done.stderr
