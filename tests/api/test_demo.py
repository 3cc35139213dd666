"""The demo does what it says, checks what it claims, and deletes nothing but its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from typer.testing import CliRunner, Result

import zarr_manifests as zm
import zarr_manifests.serving.server
import zarr_manifests.spark
from zarr_manifests.cli import app
from zarr_manifests.demo import CheckFailedError, DemoPlace
from zarr_manifests.demo.place import MARKER
from zarr_manifests.demo.steps import compare_means
from zarr_manifests.errors import StorageError


def test_a_second_run_replaces_only_what_a_run_writes(tmp_path: Path) -> None:
    place = DemoPlace.claim(tmp_path / "demo")
    for folder in (place.repository, place.scratch, place.stream):
        (folder / "deep").mkdir(parents=True)
    place.picture.write_bytes(b"old")
    (place.directory / "notes.txt").write_text("mine")
    assert DemoPlace.claim(tmp_path / "demo") == place
    assert {path.name for path in place.directory.iterdir()} == {MARKER, "notes.txt"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("precious")
    place = DemoPlace.claim(tmp_path / "demo")
    place.repository.symlink_to(precious)
    with pytest.raises(StorageError):
        DemoPlace.claim(tmp_path / "demo")
    assert (precious / "data").read_text() == "precious"


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
    assert said.count("every value as in the netCDF file") == 3
    assert "4 files, one commit each" in said
    assert "after the restart 1 batch came again and made no commit" in said
    assert (tmp_path / "here" / "winds.png").stat().st_size > 10_000
    left = {path.name for path in (tmp_path / "here").iterdir()}
    assert left == {MARKER, "winds", "winds.png"}
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


def test_means_that_differ_fail_the_demo() -> None:
    times = pd.date_range("1982-01-16", periods=3)
    wanted = xr.DataArray([5.0, 6.0, 7.0], {"time": times}, ("time",))
    same = pd.DataFrame({"time": times, "mean": [5.0, 6.0, 7.0 + 1e-12]})
    assert 0 < compare_means(same, wanted) < 1e-11
    for other in (
        same.assign(mean=[5.0, 6.0, 7.00001]),
        same.assign(mean=[5.0, 6.0, np.nan]),
        same.assign(time=times + pd.Timedelta("1h")),
        same[:2],
    ):
        with pytest.raises(CheckFailedError, match="Spark"):
            compare_means(other, wanted)
