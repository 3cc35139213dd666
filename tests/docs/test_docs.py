"""The documentation is true: its code runs, its links lead somewhere, its pages are listed."""

from __future__ import annotations

import doctest
import functools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from notebooks import code_of, run_notebook
from zarr_manifests.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDED = {"moving-in": {"weather.icechunk": ROOT / "tests/api/virtual/icechunk_golden/format-2"}}
"""Folders that the code of a page finds, by page."""

_BLOCK = re.compile(
    r"^ *(?:<!-- skip:(?P<reason>[^\n]*?)-->\n+ *)?```(?P<kind>python|sh)\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    kind: str
    code: str
    line: int
    skipped: str | None


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        yield Block(found["kind"], found["code"], line, found["reason"])


def script(page: Path, kind: str = "python") -> str:
    """A page's blocks of a kind one after another, each line where it stands in the page."""
    lines: list[str] = []
    for block in blocks(page):
        if block.kind == kind and block.skipped is None:
            lines += [""] * (block.line - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def uses_spark(page: Path) -> bool:
    return "zarr_manifests.spark" in script(page)


@pytest.mark.parametrize(
    "page", [p for p in PAGES[1:] if any(blocks(p)) and not uses_spark(p)], ids=name_of
)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, source in NEEDED.get(page.stem, {}).items():
        shutil.copytree(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    exec(compile(script(page), str(page), "exec"), {"__name__": page.stem})  # noqa: S102
    run_commands(page, tmp_path)


def run_commands(page: Path, folder: Path) -> None:
    """Run the shell's blocks of a page in one shell, after its code: they find what that made."""
    programs = folder / ".programs"
    programs.mkdir()
    (programs / "zarr-manifests").write_text(_PROGRAM.format(python=sys.executable), "utf-8")
    (programs / "zarr-manifests").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["/bin/sh", "-eux"],
        input=script(page, "sh"),
        cwd=folder,
        # pip finds everything installed, or fails.
        env=os.environ | {"PATH": path, "PIP_NO_INDEX": "1", "PIP_DRY_RUN": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr


_PROGRAM = """#!{python}
import subprocess
import sys

command = [sys.executable, "-m", "zarr_manifests", *sys.argv[1:]]
if "serve" not in command:
    sys.exit(subprocess.run(command).returncode)
# At a free port, and until it says that it serves.
with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
    for line in server.stdout:
        if line == "press Ctrl-C to stop\\n":
            server.terminate()
            sys.exit(0)
sys.exit("it did not serve")
"""


_TOLD = re.compile(r"^```(?P<kind>python|console)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "```console" in p.read_text("utf-8")], ids=name_of
)
def test_the_commands_of_a_page_print_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands begin with `$`; below stands what they print, with ... for what may differ."""
    monkeypatch.chdir(tmp_path)
    checker, options = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for block in _TOLD.finditer(page.read_text("utf-8")):
        if block["kind"] == "python":
            exec(block["text"], {"__name__": page.stem})  # noqa: S102
            continue
        first, *commands = re.split(r"^\$ zarr-manifests ", block["text"], flags=re.MULTILINE)
        assert not first
        for command in commands:
            words, _, due = command.partition("\n")
            done = CliRunner().invoke(app, shlex.split(words))
            assert done.exit_code == 0, (words, done.output)
            assert checker.check_output(due, done.stdout, options), (words, done.stdout)


@pytest.mark.spark
def test_the_code_of_pages_runs_with_spark(tmp_path: Path) -> None:
    """In a process of their own, since pages stop the session they start.

    In one folder, which is emptied between them: there Spark's workers look for relative paths.
    """
    pages = [p for p in PAGES if uses_spark(p)]
    for page in pages:
        (tmp_path / f"{page.stem}.py").write_text(script(page), encoding="utf-8")
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _ONE_BY_ONE],
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("runs page ") == len(pages)


_ONE_BY_ONE = """
import runpy
import shutil
from pathlib import Path

for page in sorted(Path.cwd().parent.glob("*.py")):
    print("runs page", page.stem, flush=True)
    runpy.run_path(str(page), run_name="__main__")
    for made in Path.cwd().iterdir():
        shutil.rmtree(made) if made.is_dir() else made.unlink()
"""


def test_a_block_that_is_not_run_says_why() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    skipped = [block for page in PAGES for block in blocks(page) if block.skipped is not None]
    assert all(len(str(block.skipped).split()) >= 3 for block in skipped)
    assert text.count("<!-- skip:") == len(skipped), "a skip stands right before its block"
    for kind in ("python", "sh"):
        found = [block for page in PAGES for block in blocks(page) if block.kind == kind]
        assert len(re.findall(f"^ *```{kind}$", text, re.MULTILINE)) == len(found)


def test_each_block_says_in_which_language_it_is() -> None:
    """One without would be run by no test."""
    fences = {
        name_of(page): re.findall(r"^ *```(.*)$", page.read_text("utf-8"), re.MULTILINE)
        for page in PAGES
    }
    assert [name for name, found in fences.items() if not all(found[::2])] == []


def test_the_readme_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGES[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(script(page), str(page), "exec"), {"__name__": "readme"})  # noqa: S102
    told = re.search(r"^```text\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert told
    assert capsys.readouterr().out == told[1]


def test_the_readme_needs_only_what_it_says_to_install(tmp_path: Path) -> None:
    told = re.search(r"`pip install ([^`]*)`", PAGES[0].read_text("utf-8"))
    assert told
    words = [re.sub(r"^\.", "zarr-manifests", word) for word in shlex.split(told[1])]
    installed = with_dependencies(words)
    owners = {
        module: {canonicalize_name(name) for name in names}
        for module, names in metadata.packages_distributions().items()
    }
    hidden = sorted(module for module, names in owners.items() if not names & installed)
    assert {"pyspark", "pytest", "h5netcdf"} <= set(hidden)
    (tmp_path / "readme.py").write_text(_HIDING.format(hidden=hidden) + script(PAGES[0]), "utf-8")
    done = subprocess.run(
        [sys.executable, "readme.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


_HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {hidden}:
            return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


def with_dependencies(requirements: list[str]) -> set[str]:
    """The names of all packages that pip installs for these requirements."""
    due = [Requirement(text) for text in requirements]
    found: set[tuple[str, frozenset[str]]] = set()
    while due:
        one = due.pop()
        key = canonicalize_name(one.name), frozenset(one.extras)
        if key in found:
            continue
        found.add(key)
        for text in metadata.requires(one.name) or ():
            more = Requirement(text)
            extras = ("", *one.extras)
            if more.marker is None or any(more.marker.evaluate({"extra": e}) for e in extras):
                due.append(more)
    return {name for name, _ in found}


@pytest.mark.parametrize("name", ["chunk_shapes", "idea", "ratios"])
def test_pictures_are_those_of_their_scripts(name: str) -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "images" / f"{name}.py"))["picture"]()
    assert (ROOT / "docs" / "images" / f"{name}.svg").read_text("utf-8") == drawn


def in_spark(notebook: Path) -> bool:
    return any("zarr_manifests.spark" in cell for cell in code_of(notebook))


@pytest.mark.parametrize("notebook", [n for n in NOTEBOOKS if not in_spark(n)], ids=name_of)
def test_the_cells_of_a_notebook_run_and_end_in_a_picture(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_notebook(notebook)


@pytest.mark.spark
@pytest.mark.parametrize("notebook", [n for n in NOTEBOOKS if in_spark(n)], ids=name_of)
def test_the_cells_of_a_notebook_run_with_spark(notebook: Path, tmp_path: Path) -> None:
    """In a process of its own: a notebook stops the session it starts."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests/support/notebooks.py", notebook],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def prose(page: Path) -> str:
    """The page without its code."""
    text = page.read_text(encoding="utf-8")
    return re.sub(
        r"`[^`\n]*`", "``", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    )


@functools.cache
def anchors(page: Path) -> set[str]:
    """What its headings are called in a link, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_pages_are_few_and_short() -> None:
    guide = [page.read_text("utf-8") for page in (ROOT / "docs/guide").glob("*.md")]
    assert len(guide) <= 12
    assert sum(len(text.split()) for text in guide) <= 18_000
    decisions = (ROOT / "docs/adr/index.md").read_text("utf-8").split("\n## ")[1:]
    assert len(decisions) <= 25
    assert max(len(decision.split()) for decision in decisions) <= 130  # with the heading


def test_a_guarantee_names_a_planted_fault() -> None:
    faults = json.loads((ROOT / "tests/planted/found_by.json").read_text("utf-8"))
    told = re.findall(r"\| `([\w-]+)` \|", (ROOT / "docs/guarantees.md").read_text("utf-8"))
    assert len(told) > 50
    assert set(told) <= faults.keys()


def test_links_lead_somewhere() -> None:
    lost = []
    for page in PAGES:
        for found in _LINK.finditer(prose(page)):
            target, _, anchor = found["target"].partition("#")
            if "://" in target:
                continue
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                lost.append(f"{name_of(page)}: {found['target']}")
    assert lost == []


def test_every_page_can_be_reached_from_the_map() -> None:
    reached: set[Path] = set()
    due = [ROOT / "docs" / "index.md"]
    while due:
        page = due.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = (m["target"].partition("#")[0] for m in _LINK.finditer(prose(page)))
        due += [(page.parent / t).resolve() for t in targets if t and "://" not in t]
    assert set(PAGES[1:]) <= reached
