"""The checkout itself: what lies at its top, what it speaks of, what it needs."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = {"zarr_manifests", "tests", "notebooks", "docs"}
FILES = {"README.md", "LICENSE", "Makefile", "conftest.py", "pyproject.toml"}


def checkout() -> list[Path]:
    """What git keeps, or would keep once added; the tree itself where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return [Path(name) for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    hidden = {".venv", "__pycache__"}
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [path for path in found if not hidden.intersection(path.parts)]


def test_only_the_known_names_lie_at_the_top() -> None:
    tops = {path.parts[0] for path in checkout()}
    assert {top for top in tops if not top.startswith(".")} <= FOLDERS | FILES
    assert {"zarr_manifests", "tests", "LICENSE", "Makefile", "pyproject.toml"} <= tops


def test_what_make_test_leaves_out_is_run_by_night() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = dict(re.findall(r"^(\w+):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    (parts,) = re.findall(r"^NIGHTLY = (.*)$", makefile, re.MULTILINE)
    by_night = "".join(recipes[part] for part in parts.split())
    assert '-m "$(QUICK)"' in recipes["test"]
    assert '-m "$(HERE) and not spark and (sweep or hypothesis)"' in by_night
    assert "--seeds 2000" in by_night
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for mark in (one.partition(":")[0] for one in told["tool"]["pytest"]["ini_options"]["markers"]):
        if mark not in ("smoke", "sweep", "simulation"):
            assert re.search(rf'-m "?{mark}\b', by_night), f"nobody runs {mark}"


def test_no_path_of_a_machine_and_no_package_registry_is_written_down() -> None:
    words = [
        r"(?<!\w)/(?:work|root|farm|opt)/\w",
        r"/(?:home|Users)/\w",
        r"/tmp/\w",
        r"-?-(?:extra-)?index-url",
        r"--registry",
        r"--find-links",
        r"\bdeb https?:",
    ]
    forbidden = re.compile("|".join(words))
    found = []
    for path in checkout():
        # Keys of a repository begin with words that are folders elsewhere.
        if ROOT / path == Path(__file__) or path.is_relative_to("tests/spec/golden/v1"):
            continue
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # data and pictures
        found += [f"{path}: {match[0]}" for match in forbidden.finditer(text)]
    assert found == []


def test_every_dependency_is_pinned() -> None:
    pins = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in pins.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = {normal(line) for line in lines}
    metadata = project()
    wanted = [*metadata["project"]["dependencies"], *metadata["build-system"]["requires"]]
    for extra in metadata["project"]["optional-dependencies"].values():
        wanted += extra
    for group in metadata["dependency-groups"].values():
        wanted += [entry for entry in group if isinstance(entry, str)]
    assert {normal(requirement) for requirement in wanted} - {"zarr-manifests"} <= pinned


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def normal(requirement: str) -> str:
    """The name in a requirement, as indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_the_scripts_can_be_run() -> None:
    names = ("find-python", "run", "setup", "setup-browser", "setup-servers")
    assert all(os.access(ROOT / ".ci" / name, os.X_OK) for name in names)


# --- the package --------------------------------------------------------------------------------

PACKAGE = ROOT / "zarr_manifests"
NAME = "zarr_manifests"


@functools.cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path, tree in modules().items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_a_module_name_and_a_class_name_occur_once() -> None:
    places = defaultdict(list)
    for path in modules():
        if path.stem not in ("__init__", "__main__"):
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    for path, node in classes():
        places[f"class {node.name}"].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
