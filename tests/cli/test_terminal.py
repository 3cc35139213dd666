"""What the command line does at a terminal and in a pipe: `| head`, progress, completion."""

from __future__ import annotations

import io
import os
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


@pytest.fixture
def url(tmp_path: Path) -> Path:
    repo = zm.Repository.create(tmp_path / "repository", {"inline-chunk-bytes": 0})
    with repo.transaction(message="make t") as store:
        zarr.create_array(store, name="t", shape=(4,), chunks=(2,), dtype="i4")[:] = 7
    repo.create_tag("v1")
    repo.create_branch("trial")
    return tmp_path / "repository"


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

    monkeypatch.setattr(zm.Repository, "open", broken)
    done = CliRunner().invoke(app, ["log", "x"])
    assert done.exit_code == 1


# --- progress --------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(console: Console) -> str:
    with ProgressBar(console, "verifying", "objects") as bar:
        bar.expect("reading chunks", 4000)
        for done in (1000, 2000):
            bar("reading chunks", done)
        bar("counting chunks", 12)
        bar("reading chunks", 3000)
        bar._bar.refresh()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_progress_shows_how_much_how_fast_and_how_long() -> None:
    text = drawn(Console(file=_Terminal(), force_terminal=True, width=120))
    assert "reading chunks" in text
    assert "3,000 of 4,000 objects" in text
    assert "/s" in text


def test_progress_is_quiet_in_a_pipe() -> None:
    assert drawn(Console(file=io.StringIO())) == ""


def test_long_verbs_say_how_far_they_are(url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each stage, no more is done than was expected, where something was expected."""
    told: dict[str, int] = {}
    expected: dict[str, int] = {}
    call, expect = ProgressBar.__call__, ProgressBar.expect

    def noted(self: ProgressBar, stage: str, done: int) -> None:
        told[stage] = done
        call(self, stage, done)

    def noted_total(self: ProgressBar, stage: str, total: int) -> None:
        expected[stage] = total
        expect(self, stage, total)

    monkeypatch.setattr(ProgressBar, "__call__", noted)
    monkeypatch.setattr(ProgressBar, "expect", noted_total)
    elsewhere = url.parent
    for words in (
        ["verify", url],
        ["compact", url, "--mode", "full"],
        ["statistics", url],
        ["clone", url, elsewhere / "clone"],
        ["export", url, elsewhere / "plain"],
        ["import", "zarr", elsewhere / "imported", elsewhere / "plain"],
        ["expire", url, "--keep-last", "1"],
        ["gc", url, "--grace", "0s"],
        ["repack", url],
    ):
        done = CliRunner().invoke(app, [*map(str, words)])
        assert (done.exit_code, done.stderr) == (0, ""), words
        assert all(told.get(stage, 0) <= total for stage, total in expected.items()), words
        if words[0] in ("verify", "compact", "statistics", "clone", "export", "import"):
            assert [stage for stage, total in expected.items() if 0 < told.get(stage, 0) == total]
        told.clear()
        expected.clear()


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
        ("authorize=['raw'] if you", "--authorize raw if you"),
        ("and tag 'a' at 2; give branch='a', tag='a' or the id", "and tag 'a' at 2; give the id"),
        (
            "`Repository.recover` and `zarr-manifests recover` make a new one",
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
