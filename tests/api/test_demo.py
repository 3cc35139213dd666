"""The demo does what it says, checks what it claims, and deletes nothing but its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

import zarr_manifests as zm
import zarr_manifests.serving
import zarr_manifests.spark
from zarr_manifests.cli import app
from zarr_manifests.demo import MARKER, CheckFailedError, check_means, claim, open_winds
from zarr_manifests.errors import AlreadyExistsError, StorageError


def test_what_the_demo_did_not_make_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "winds"
    mine.mkdir()
    (mine / "data").write_text("precious")
    with pytest.raises(AlreadyExistsError, match="not made by the demo"):
        claim(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["winds"]
    assert (mine / "data").read_text() == "precious"


def test_a_second_run_replaces_only_what_a_run_writes(tmp_path: Path) -> None:
    claim(tmp_path / "demo")
    for folder in ("winds", "rewritten", "stream"):
        (tmp_path / "demo" / folder / "deep").mkdir(parents=True)
    for file in ("winds.png", "notes.txt"):
        (tmp_path / "demo" / file).write_text("mine")
    claim(tmp_path / "demo")
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {MARKER, "notes.txt"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("precious")
    claim(tmp_path / "demo")
    (tmp_path / "demo" / "winds").symlink_to(precious)
    with pytest.raises(StorageError):
        claim(tmp_path / "demo")
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
    winds = open_winds().isel(time=slice(0, 3))
    speed = np.hypot(winds.u.astype("f8"), winds.v.astype("f8"))
    means = speed.weighted(np.cos(np.deg2rad(winds.lat))).mean(("lat", "lon")).values
    same = pd.DataFrame({"time": winds.time.values, "mean": means * (1 + 1e-12)})
    assert 0 < check_means(same, winds) < 1e-10
    for other in (
        same.assign(mean=means * 1.00001),
        same.assign(mean=[*means[:2], np.nan]),
        same.assign(time=same.time + pd.Timedelta("1h")),
        same[:2],
    ):
        with pytest.raises(CheckFailedError, match="Spark"):
            check_means(other, winds)
