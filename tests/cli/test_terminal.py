"""What the command line does at a terminal and in a pipe: `| head`, progress, completion."""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zarr
from rich.console import Console
from typer.testing import CliRunner

import zarr_manifests as zm
from zarr_manifests.cli import app
from zarr_manifests.cli.progress_bar import ProgressBar
from zarr_manifests.cli.words import on_command_line

ICECHUNK = Path(__file__).parents[1] / "virtual/icechunk_golden/format-2"


@pytest.fixture
def url(tmp_path: Path) -> Path:
    repo = zm.create(tmp_path / "repository", {"inline-chunk-bytes": 0})
    with repo.transaction(message="make t") as store:
        zarr.create_array(store, name="t", shape=(4,), chunks=(2,), dtype="i4")[:] = 7
    repo.create_tag("v1")
    repo.create_branch("trial")
    return tmp_path / "repository"


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_a_reader_that_goes_away_is_no_error(url: Path, more: tuple[str, ...]) -> None:
    """As `log | head`: the other end of the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "zarr_manifests", "log", str(url), *more],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError("of a storage")

    monkeypatch.setattr(zm, "open", broken)
    done = CliRunner().invoke(app, ["log", "x"])
    assert done.exit_code == 1


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


def drawn(console: Console) -> str:
    with ProgressBar(console, "verifying") as bar:
        bar.expect("reading chunks", 4000)
        for done in (0, 1000, 2000):
            bar("reading chunks", done)
        bar("counting chunks", 12)
        bar("reading chunks", 3000)
        bar._live.refresh()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_progress_shows_how_much_how_fast_and_how_long() -> None:
    text = drawn(terminal())
    assert "reading chunks" in text
    assert re.search(r"3,000 of 4,000, \d+/s \d:\d\d left", text)
    assert max(map(len, re.sub(r"\x1b\S*?[A-Za-z]", "", text).splitlines())) <= 80


def test_progress_is_quiet_in_a_pipe() -> None:
    assert drawn(Console(file=io.StringIO())) == ""


def test_a_stage_that_begins_again_has_a_rate_of_its_own() -> None:
    """As of a second branch, or of a newer root that is verified again."""
    now = 0.0
    console = Console(file=_Terminal(), force_terminal=True, width=100, get_time=lambda: now)
    bar = ProgressBar(console, "expiring")
    bar("following", 0)
    now = 100.0
    bar("following", 1000)
    bar.expect("following", 400)
    bar("following", 0)
    now = 110.0
    bar("following", 200)
    console.print(bar._line())
    assert isinstance(console.file, io.StringIO)
    assert "200 of 400, 20/s 0:10 left" in console.file.getvalue()


VERBS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "verify": (
        ["verify", "REPO"],
        ["reading archives", "following the history", "reading metadata", "checking snapshots",
         "counting chunks", "reading pages of archives", "reading chunks"],
        [],
    ),
    "compact": (["compact", "REPO", "--mode", "full"], ["merging refs"], []),
    "compact --statistics": (["compact", "REPO", "--statistics"], ["measuring"], []),
    "explain --config": (["explain", "REPO", "--config", "CONFIG"], ["merging refs"], []),
    "clone": (
        ["clone", "REPO", "CLONE"],
        ["following the history", "metadata", "chunks"],
        ["looking at what is there"],
    ),
    "export": (["export", "REPO", "PLAIN"], ["chunks"], []),
    "import zarr": (
        ["import", "zarr", "IMPORTED", "PLAIN"],
        ["chunks"],
        ["looking for files"],
    ),
    "import kerchunk": (
        ["import", "kerchunk", "IMPORTED", "REFERENCES"],
        ["reading references", "chunks"],
        [],
    ),
    "import icechunk": (
        ["import", "icechunk", "IMPORTED", "ICECHUNK", "--container", "here=HERE"],
        ["snapshots"],
        [],
    ),
    "diff": (
        ["diff", "REPO", "main~2", "main"],
        ["following the history", "reading commits"],
        [],
    ),
    "diff --values": (
        ["diff", "REPO", "main~2", "main", "--values"],
        ["reading commits", "comparing chunks"],
        [],
    ),
    "log": (["log", "REPO"], [], ["following the history"]),
    "log PATH": (["log", "REPO", "t"], ["following the history", "reading commits"], []),
    "log --ops": (["log", "REPO", "--ops"], [], ["reading the log"]),
    "du": (["du", "REPO"], ["reading refs of arrays"], []),
    "info": (["info", "REPO"], [], ["looking at what is stored"]),
    "clean --no-collect": (
        ["clean", "REPO", "--keep", "1", "--no-collect"],
        ["following the history"],
        [],
    ),
    "clean": (
        ["clean", "REPO", "--grace", "0s"],
        ["following the history", "marking", "deleting"],
        ["looking at objects"],
    ),
    "recover": (
        ["recover", "LOST", "--dry-run"],
        ["following the history", "reading metadata", "checking snapshots"],
        ["looking for chunks"],
    ),
}  # fmt: skip
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
    zm.export(session, elsewhere / "references", "kerchunk", copy=False, tag="kept")
    shutil.copytree(ICECHUNK, elsewhere / "icechunk")
    shutil.copytree(url, elsewhere / "lost")
    (elsewhere / "lost" / "current").unlink()
    (elsewhere / "config").write_text("chunk-manifests: {}\n")
    names = ("config", "clone", "icechunk", "imported", "lost", "plain", "references")
    found = {"REPO": str(url), "here=HERE": f"here={elsewhere}"}
    return found | {name.upper(): str(elsewhere / name) for name in names}


@pytest.mark.parametrize("verb", VERBS)
def test_long_verbs_draw_how_far_they_are(
    verb: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts, rate and time left of each stage; without a total, how many there were so far."""
    screen, call = terminal(), ProgressBar.__call__

    def shown(self: ProgressBar, stage: str, done: int) -> None:
        call(self, stage, done)
        self._live.refresh()

    monkeypatch.setattr(ProgressBar, "__call__", shown)
    monkeypatch.setattr("zarr_manifests.cli.console.console", lambda *, stderr=False: screen)
    words, with_total, without = VERBS[verb]
    if verb == "export":
        shutil.rmtree(places["PLAIN"])
    done = CliRunner().invoke(app, [places.get(word, word) for word in words])
    assert done.exit_code == 0, done.output
    assert isinstance(screen.file, io.StringIO)
    text = re.sub(r"\x1b\[\S*?[A-Za-z]", "", screen.file.getvalue())
    for stage in with_total:
        found = re.findall(rf" {stage} \S+ ([1-9]\d*) of (\d+), \S+/s 0:00 left", text)
        assert found, (stage, text)
        assert found[-1][0] == found[-1][1], stage
    for stage in without:
        assert re.search(rf" {stage} \S+ [1-9]\d* so far, \S+/s \d:\d\d", text), (stage, text)


@pytest.mark.parametrize("verb", VERBS)
def test_long_verbs_draw_nothing_in_a_pipe(verb: str, places: dict[str, str]) -> None:
    if verb == "export":
        shutil.rmtree(places["PLAIN"])
    done = CliRunner().invoke(app, [places.get(word, word) for word in VERBS[verb][0]])
    assert (done.exit_code, done.stderr) == (0, "")


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


def test_a_shell_completes_verbs_options_and_versions(url: Path) -> None:
    assert completed("zarr-manifests ver") == ["verify"]
    assert completed("zarr-manifests import k") == ["kerchunk"]
    assert "--json" in completed(f"zarr-manifests log {url} --j")
    assert completed(f"zarr-manifests log {url} --at ") == ["main", "trial", "v1"]
    assert completed(f"zarr-manifests merge {url} t") == ["trial"]
    assert completed(f"zarr-manifests merge {url} trial --into t") == ["trial"]
    assert completed(f"zarr-manifests log {url}-lost --at ") == []


# --- words -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "due"),
    [
        ("tag= goes with copy=False: a copy", "--tag goes with --no-copy: a copy"),
        ("format='zrr' is unknown", "--format zrr is unknown"),
        ("export with copy=True", "export without --no-copy"),
        ("x exists; overwrite=True replaces it", "x exists; --overwrite replaces it"),
        ("pass expected='00-a', or force=True to", "pass --expected 00-a, or --force to"),
        ("pass a larger max_bytes= if you", "pass a larger --max-bytes if you"),
        ("history='some': give 'all'", "--history some: give 'all'"),
        ("authorize=['raw'] if you", "--authorize if you"),
        (
            "move it with reset_branch('a', '00-b', expected='00-c'), which drops",
            "move it with `branch a 00-b --move --expected 00-c`, which drops",
        ),
        ("by reset_branch('a', ...), which", "by `branch a VERSION --move`, which"),
        ("one back with reset_branch", "one back with `branch --move`"),
        ("repeat it with cherry_pick", "repeat it with `cherry-pick`"),
        ("run garbage_collect() there", "run `clean` there"),
        ("`repo.ops_log()` lists the versions", "`zarr-manifests log --ops` lists the versions"),
        (
            "`zm.recover` and `zarr-manifests recover` make a new one",
            "`zarr-manifests recover` makes a new one",
        ),
        (
            "`repo.list_branches()`, `repo.list_tags()` and `repo.ancestry()` list them",
            "`zarr-manifests branch`, `zarr-manifests tag` and `zarr-manifests log` list them",
        ),
    ],
)
def test_messages_are_in_the_words_of_the_command_line(said: str, due: str) -> None:
    assert on_command_line(said) == due
