"""What the command line does at a terminal: progress and completion."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import zarr
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

import zarr_manifests as zm
from zarr_manifests.cli import app


@pytest.fixture
def url(tmp_path: Path) -> Path:
    repo = zm.create(tmp_path / "repository", {"inline-chunk-bytes": 0})
    with repo.transaction(message="make t") as store:
        zarr.create_array(store, name="t", shape=(4,), chunks=(2,), dtype="i4")[:] = 7
    repo.create_tag("v1")
    repo.create_branch("trial")
    return tmp_path / "repository"


# --- progress --------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal() -> Console:
    """A terminal where a second passes whenever somebody looks at the clock."""
    seconds = itertools.count()
    return Console(
        file=_Terminal(), force_terminal=True, width=100, get_time=lambda: next(seconds) * 1.0
    )


VERBS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "verify": (["verify", "REPO"], ["reading chunks"], ["following the history"]),
    "compact": (["compact", "REPO", "--mode", "full"], ["merging refs"], []),
    "clone": (["clone", "REPO", "CLONE"], ["metadata", "chunks"], ["looking at what is there"]),
    "import zarr": (["import", "zarr", "IMPORTED", "PLAIN"], ["chunks"], ["looking for files"]),
    "clean": (["clean", "REPO", "--grace", "0s"], ["marking", "deleting"], ["looking at objects"]),
}
"""By verb: a call of it, the stages with a total, and those without."""


@pytest.fixture
def places(url: Path) -> dict[str, str]:
    """Places for `VERBS`: a repository, what was made from it, and where nothing is yet."""
    repo, elsewhere = zm.open(url), url.parent
    zm.clone(repo, elsewhere / "clone")
    repo.create_branch("gone")
    for branch in ("main", "main", "gone"):
        with repo.transaction(branch=branch, message="write") as store:
            zarr.open_array(store, path="t")[:2] = 5
    repo.delete_branch("gone")
    session = repo.readonly_session()
    zm.export(session, elsewhere / "plain")
    names = ("clone", "imported", "plain")
    return {"REPO": str(url)} | {name.upper(): str(elsewhere / name) for name in names}


@pytest.mark.parametrize("verb", VERBS)
def test_long_verbs_draw_how_far_they_are(
    verb: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts, rate and time left of each stage; without a total, how many there were so far."""
    screen, call = terminal(), Progress.update

    def shown(self: Progress, *args: Any, **options: Any) -> None:
        call(self, *args, **options)
        self.refresh()

    monkeypatch.setattr(Progress, "update", shown)
    monkeypatch.setattr("rich.console.Console", lambda *, stderr: screen)
    words, with_total, without = VERBS[verb]
    done = CliRunner().invoke(app, [places.get(word, word) for word in words])
    assert done.exit_code == 0, done.output
    assert isinstance(screen.file, io.StringIO)
    text = re.sub(r"\x1b\[\S*?[A-Za-z]", "", screen.file.getvalue())
    for stage in with_total:
        found = re.findall(rf" {stage} \S+ +([1-9]\d*)/(\d+) ", text)
        assert found, (stage, text)
        assert found[-1][0] == found[-1][1], stage
    for stage in without:
        assert re.search(rf" {stage} \S+ +[1-9]\d*/\? ", text), (stage, text)


# --- completion ------------------------------------------------------------------------------


def completed(line: str) -> list[str]:
    words = line.split(" ")
    environment = {
        "_ZARR_MANIFESTS_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = CliRunner().invoke(app, [], prog_name="zarr-manifests", env=environment)
    return done.stdout.split()


def test_a_shell_completes_verbs_and_options(url: Path) -> None:
    assert completed("zarr-manifests ver") == ["verify"]
    assert completed("zarr-manifests import k") == ["kerchunk"]
    assert "--json" in completed(f"zarr-manifests log {url} --j")
