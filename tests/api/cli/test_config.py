"""`zarr-manifests config`: what it prints is what is saved, and every fault is a line."""

from __future__ import annotations

from pathlib import Path

import pytest

import zarr_manifests as zm
from cli_calls import call


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = tmp_path / "repository"
    zm.create(path, {"compaction": {"max-delta-count": 7}})
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["commits.mode=deltas", "colour=blue"], "commits.mode"),
        (["commits.mode"], "commits.mode"),
        (["pack-bytes=1", "pack-bytes=2"], "pack-bytes"),
        (["commits=1", "commits.mode=delta"], "commits"),
        (["commits.mode=["], "YAML"),
    ],
)
def test_set_saves_all_or_nothing(url: str, options: list[str], message: str) -> None:
    before = call("config", "show", url).stdout
    done = call("config", "set", url, "inline-chunk-bytes=1", *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert call("config", "show", url).stdout == before


def test_validate_says_every_fault_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("chunk-manifests:\n  sets: [{a: {overflow-to: b}}]\ncolour: blue\n", "utf-8")
    done = call("config", "validate", file)
    assert (done.exit_code, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("error: line 2: chunk-manifests.sets[0].a.overflow-to")
    assert second.startswith("error: line 3: colour")
    file.write_text("chunk-manifests:\n  sets: [a]\n", "utf-8")
    assert call("config", "validate", file).stdout == f"{file}: good\n"
    assert call("config", "validate", "-", given=b"").stdout == "<stdin>: good\n"
