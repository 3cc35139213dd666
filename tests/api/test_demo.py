"""The demo does what it says, checks what it claims, and deletes nothing but its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import zarr_manifests as zm
import zarr_manifests.serving
import zarr_manifests.spark
from zarr_manifests.cli import app


@pytest.mark.spark
def test_the_whole_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zarr_manifests", "demo", "here"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr.lower()
    assert "132 means, as xarray computes them" in done.stdout
    said = " ".join(done.stdout.split())
    assert said.count("every value as in the netCDF file") == 2
    assert "4 files, one commit each" in said
    assert "after the restart 1 batch came again and made no commit" in said
    assert "of 132 chunks 66 skipped by time" in said
    assert (tmp_path / "here" / "winds.png").stat().st_size > 10_000
    left = {path.name for path in (tmp_path / "here").iterdir()}
    assert left == {"winds", "winds.png"}
    assert len(list(zm.open(tmp_path / "here" / "winds").ancestry())) == 2 + 60 + 1


def run_demo(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def test_a_foreign_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    result = run_demo(tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
