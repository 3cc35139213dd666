"""`zarr-manifests config`: what it prints is what is saved, and every fault is a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import zarr_manifests as zm
from zarr_manifests.cli import app
from zarr_manifests.config import config_schema


def call(*arguments: object, given: bytes | None = None) -> Result:
    """Call `zarr-manifests config` with these arguments, without a terminal."""
    return CliRunner().invoke(app, ["config", *map(str, arguments)], input=given)


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = tmp_path / "repository"
    zm.create(path, {"compaction": {"max-delta-count": 7}})
    return str(path)


def test_show_prints_yaml_that_can_be_applied(url: str, tmp_path: Path) -> None:
    shown = call("show", url)
    assert shown.exit_code == 0
    assert zm.Config.from_yaml(shown.stdout) == zm.Config.from_dict(
        {"compaction": {"max-delta-count": 7}}
    )
    other = tmp_path / "other"
    zm.create(other)
    assert call("apply", other, "-", given=shown.stdout_bytes).exit_code == 0
    assert call("show", other).stdout == shown.stdout


def test_set_changes_and_saves_options(url: str) -> None:
    done = call(
        "set",
        url,
        "commits.mode=rewrite",
        "commits.attempts=3",
        "inline-chunk-bytes=1_000",
        "chunk-manifests.preload.arrays=[{path: .*/time}]",
    )
    assert (done.exit_code, done.output) == (0, "")
    config = zm.open(url).config
    assert (config.commits.mode, config.commits.attempts) == ("rewrite", 3)
    assert (config.inline_chunk_bytes, config.compaction.max_delta_count) == (1_000, 7)
    assert config.chunk_manifests.preload.arrays == (".*/time",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["commits.mode=deltas", "colour=blue"],
            "commits.mode: 'deltas' is not one of delta",
        ),
        (["commits.mode"], "'commits.mode': expected option=value"),
        (["=3"], "'=3': expected option=value"),
        (["pack-bytes=1", "pack-bytes=2"], "pack-bytes is given twice"),
        (["commits=1", "commits.mode=delta"], "commits is given as a value and as a section"),
        (["commits.mode=["], "this is not YAML"),
    ],
)
def test_set_saves_all_or_nothing(url: str, options: list[str], message: str) -> None:
    before = call("show", url).stdout
    done = call("set", url, "inline-chunk-bytes=1", *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert call("show", url).stdout == before


def test_validate_says_every_fault_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("chunk-manifests:\n  sets: [{a: {overflow-to: b}}]\ncolour: blue\n", "utf-8")
    done = call("validate", file)
    assert (done.exit_code, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert second.startswith("error: line 3: colour: unknown option; known are")
    assert first == (
        "error: line 2: chunk-manifests.sets[0].a.overflow-to: there is no set 'b'; known are a, "
        "default"
    )
    file.write_text("chunk-manifests:\n  sets: [a]\n", "utf-8")
    assert call("validate", file).stdout == f"{file}: good\n"
    assert call("validate", "-", given=b"").stdout == "standard input: good\n"


def test_apply_saves_nothing_of_a_file_with_faults(url: str, tmp_path: Path) -> None:
    before = call("show", url).stdout
    file = tmp_path / "config.yaml"
    file.write_text("commits: {mode: rewrite}\ncolour: blue\n", "utf-8")
    assert call("apply", url, file).exit_code == 2
    assert call("show", url).stdout == before
    file.write_text("commits: {mode: rewrite}\n", "utf-8")
    assert call("apply", url, file).exit_code == 0
    config = zm.open(url).config
    assert config.commits.mode == "rewrite"
    assert config.compaction.max_delta_count == 50, "what the file leaves out has its default"


def test_a_file_that_is_too_large_or_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    with file.open("wb") as stream:
        stream.truncate(1 << 32)
    assert "longer than 1,048,576 bytes" in call("validate", file).stderr
    for lost in (tmp_path / "lost.yaml", tmp_path):
        done = call("validate", lost)
        assert done.exit_code == 2
        assert "cannot be read" in done.stderr


def test_schema_is_printed() -> None:
    assert json.loads(call("schema").stdout) == config_schema()


def test_info_names_the_options(url: str) -> None:
    shown = CliRunner().invoke(app, ["info", url]).stdout
    assert "compaction.max-delta-count: 7" in shown
    assert "chunk-manifests: 2 sets, 1 rule (see `zarr-manifests config show`)" in shown
