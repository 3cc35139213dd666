"""The demo does what it says, checks what it claims, and deletes nothing but its own."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import shlex
import subprocess
import sys
from importlib.resources import files
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
from zarr_manifests.demo import CheckFailedError, Demo, DemoPlace, open_relief, open_winds
from zarr_manifests.demo.costs import Commit, Cost, JournalStorage, Rewrite, measure
from zarr_manifests.demo.map_picture import draw
from zarr_manifests.demo.place import MARKER
from zarr_manifests.demo.steps import FIRST_MONTHS, FIRST_TAG, compare_means
from zarr_manifests.error_cases import JavaNotFoundError
from zarr_manifests.errors import AlreadyExistsError, StorageError
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import CountingStorage

# --- the sample ----------------------------------------------------------------------------------


def test_the_sample_is_small_and_says_where_it_comes_from() -> None:
    data = files("zarr_manifests.demo") / "data"
    sizes = [len((data / name).read_bytes()) for name in ("winds.nc", "relief.nc")]
    assert sum(sizes) <= 3_000_000
    for ds in (open_winds(), open_relief()):
        assert "public domain" in ds.attrs["license"].lower()
        assert ".cdf" in ds.attrs["source"]
        assert "renamed" in ds.attrs["history"]


def test_the_winds_are_monthly_and_follow_cf() -> None:
    winds = open_winds()
    assert dict(winds.sizes) == {"time": 132, "lat": 37, "lon": 72}
    months = winds.time.dt.strftime("%Y-%m").values.tolist()
    assert months == [f"{year}-{month:02d}" for year in range(1982, 1993) for month in range(1, 13)]
    assert {name: winds[name].attrs["standard_name"] for name in winds.variables} == {
        "u": "eastward_wind",
        "v": "northward_wind",
        "time": "time",
        "lat": "latitude",
        "lon": "longitude",
    }
    assert winds.u.attrs["units"] == winds.v.attrs["units"] == "m s-1"
    assert winds.u.dtype == winds.v.dtype == np.float32
    assert not winds.isnull().to_array().any()
    # Westerlies in the south, trade winds at the equator: the components are not mixed up.
    assert winds.u.sel(lat=-50).mean() > 5
    assert winds.u.sel(lat=0).mean() < -1


# --- its place -----------------------------------------------------------------------------------


def test_a_new_and_an_empty_directory_are_taken(tmp_path: Path) -> None:
    for directory in (tmp_path / "a" / "b", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        place = DemoPlace.claim(directory)
        assert place.directory == directory
        assert [path.name for path in directory.iterdir()] == [MARKER]


def test_what_the_demo_did_not_make_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "winds"
    mine.mkdir()
    (mine / "data").write_text("precious")
    with pytest.raises(AlreadyExistsError, match="not made by the demo"):
        DemoPlace.claim(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["winds"]
    assert (mine / "data").read_text() == "precious"
    with pytest.raises(AlreadyExistsError, match="not made by the demo"):
        DemoPlace.claim(mine / "data")


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


def test_a_marker_that_is_a_link_is_no_marker(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / MARKER).symlink_to(tmp_path / "precious")
    with pytest.raises(AlreadyExistsError):
        DemoPlace.claim(tmp_path / "demo")
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="name another directory"):
        DemoPlace.claim(tmp_path / "file" / "demo")


# --- its steps -----------------------------------------------------------------------------------


def test_costs_are_those_of_the_block() -> None:
    storage = CountingStorage(MemoryStorage())
    storage.put("before", b"not counted")
    with measure(storage) as measured:
        storage.put("a", b"four")
        storage.get("a", 0, 3)
    cost = measured.cost
    assert (cost.requests, cost.bytes_written, cost.bytes_read) == (2, 4, 3)
    assert cost.seconds > 0
    assert cost + Cost(1, 1, 1) == Cost(3, 4, 5, cost.seconds)


@pytest.mark.sweep
def test_requests_of_other_processes_are_counted(tmp_path: Path) -> None:
    storage = JournalStorage(LocalStorage(tmp_path / "data"), tmp_path / "journal")
    storage.create("a", b"four")
    code = "import pickle, sys; pickle.load(sys.stdin.buffer).get('a', 1, 2)"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], input=pickle.dumps(storage), check=True)
    assert asyncio.run(storage.get_async("a")) == b"four"
    assert storage.cost(1.5) == Cost(4, 2 + 2 + 4, 4, 1.5)
    (tmp_path / "journal").unlink()
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(storage), check=True)
    assert not (tmp_path / "journal").exists(), "a worker that ends later leaves nothing"


@pytest.mark.slow
def test_the_steps_do_the_job(tmp_path: Path) -> None:
    demo = Demo(DemoPlace.claim(tmp_path / "demo"), appends=8)
    ingest = demo.ingest()
    commits = list(demo.append())
    rewrites = list(demo.rewrite())

    repo = zm.open(demo.place.repository)
    messages = [info.message for info in repo.ancestry()]
    assert messages[:2] == ["Append August 1988", "Append July 1988"]
    assert len(messages) == 8 + 2
    assert list(repo.list_tags()) == [FIRST_TAG]

    assert [commit.months for commit in commits] == list(range(73, 81))
    assert not any(commit.compacted for commit in commits)
    assert [rewrite.months for rewrite in rewrites] == [73, 78, 80]
    assert not demo.place.scratch.exists()
    # A month is two chunks, two new ones of eighty; what is there already is not read or written.
    month_bytes = 2 * 37 * 72 * 4
    for commit in commits:
        assert month_bytes * 0.8 < commit.cost.bytes_written < month_bytes * 3
        assert commit.cost.requests < 12
    for rewrite in rewrites:
        assert rewrite.cost.bytes_written > rewrite.months * month_bytes * 0.8
    assert ingest.bytes_written > FIRST_MONTHS * month_bytes * 0.8

    old, head = demo.read(FIRST_TAG), demo.read()
    assert (old.months, head.months) == (72, 80)
    for opened in (old, head):
        assert opened.opening.bytes_written == 0
        assert opened.opening.requests <= 5
        # Both chunks, and the one delta that holds them or the one leaf.
        assert opened.one_month.requests <= 3
        # All other chunks, and all other deltas and leaves once.
        rest = 2 * (opened.months - 1)
        assert rest <= opened.the_rest.requests <= rest + len(commits) + 1


@pytest.mark.slow
def test_a_value_that_is_not_the_samples_fails_the_demo(tmp_path: Path) -> None:
    demo = Demo(DemoPlace.claim(tmp_path / "demo"), appends=1)
    demo.ingest()
    list(demo.append())
    demo.read()
    repo = zm.open(demo.place.repository)
    with repo.transaction("main", message="spoil one value") as store:
        spoilt = xr.open_zarr(store, chunks=None).isel(time=slice(5, 6)).load()
        spoilt.v[0, 3, 4] += 1
        spoilt.drop_vars(["lat", "lon"]).to_zarr(store, region={"time": slice(5, 6)})
    demo.read(FIRST_TAG)
    with pytest.raises(CheckFailedError, match="does not hold the 73 months"):
        demo.read()


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


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    commits = [Commit(months, Cost(8, 0, 40_000, 0.1), months == 74) for months in (73, 74, 75)]
    rewrites = [Rewrite(73, Cost(150, 0, 1_400_000, 1.0)), Rewrite(75, Cost(150, 0, 1_500_000, 1))]
    month = open_winds().isel(time=-1)
    draw(tmp_path / "a.png", month, commits, rewrites)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    draw(tmp_path / "b.png", month, commits, rewrites)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    draw(tmp_path / "c.png", month * 0.5, commits, rewrites)
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "c.png").read_bytes()


# --- the command ---------------------------------------------------------------------------------


def run_demo(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


@pytest.mark.sweep
def test_without_java_all_but_spark_is_done_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_java(*arguments: object, **options: object) -> None:
        raise JavaNotFoundError("there is no Java here; install one")

    monkeypatch.setattr(zarr_manifests.spark, "session", no_java)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # it can be run again
        result = run_demo("my demo", "--months", 2)
        assert result.exit_code == 1
        assert result.stderr == "error: there is no Java here; install one\n"
        assert "left out" in result.stdout
        assert "every value as in the netCDF file" in result.stdout
        assert "saved my demo/winds.png" in result.stdout
        assert "log 'my demo/winds' -n 5" in result.stdout
        assert (tmp_path / "my demo" / "winds.png").is_file()
    assert len(list(zm.open(tmp_path / "my demo" / "winds").ancestry())) == 2 + 2


@pytest.mark.slow
def test_what_the_demo_suggests_works_and_the_readme_serves_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_java(*arguments: object, **options: object) -> None:
        raise JavaNotFoundError("there is no Java here; install one")

    def serve(repo: zm.Repository, *arguments: object, **options: object) -> None:
        served.append(repo.storage.url)

    served: list[str] = []
    monkeypatch.setattr(zarr_manifests.spark, "session", no_java)
    monkeypatch.setattr(zarr_manifests.serving.server, "serve", serve)
    monkeypatch.chdir(tmp_path)
    here = tmp_path / ".venv" / "bin"  # as after `make demo`
    here.mkdir(parents=True)
    (here / "zarr-manifests").touch()
    monkeypatch.setattr(sys, "executable", str(here / "python"))
    said = run_demo("--months", 1).stdout

    *commands, hint = said.partition("What to try next:\n")[2].splitlines()
    assert "choose the newest commit, then u" in hint
    *verbs, python = map(shlex.split, commands)
    assert len(verbs) >= 5
    for program, *words in verbs:
        assert program == ".venv/bin/zarr-manifests"
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output)
    assert python[:2] == [".venv/bin/python", "-c"]
    exec(python[2])  # noqa: S102
    assert served == [zm.open("zarr-manifests-demo/winds").storage.url]
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    assert f"\n{shlex.join(verbs[0])}\n" in readme
    assert verbs[0][1] == "serve"


def test_a_foreign_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    result = run_demo(tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("months", ["0", "61", "many"])
def test_months_that_there_are_not_are_a_usage_error(months: str, tmp_path: Path) -> None:
    assert run_demo(tmp_path / "demo", "--months", months).exit_code == 2
    assert not (tmp_path / "demo").exists()


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
    assert "left out" not in done.stdout
    assert "132 means, as xarray computes them" in done.stdout
    assert re.search(r"351,648 rows in ([2-9]|\d\d+) tasks", done.stdout)
    assert "132 chunks 66 skipped by time, 56 by statistics" in " ".join(done.stdout.split())
    said = " ".join(done.stdout.split())
    assert said.count("every value as in the netCDF file") == 3
    assert "4 files, one commit each" in said
    assert "after the restart 1 batch came again and made no commit" in said
    assert "also compacted the deltas" in done.stdout
    assert (tmp_path / "here" / "winds.png").stat().st_size > 10_000
    left = {path.name for path in (tmp_path / "here").iterdir()}
    assert left == {MARKER, "winds", "winds.png"}
    assert len(list(zm.open(tmp_path / "here" / "winds").ancestry())) == 2 + 60 + 1
