"""The comparison with other stores runs: each row once, with tiny sizes. No time is looked at."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).parent / "benchmarks"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of that name; the folder's modules import each other."""
    monkeypatch.syspath_prepend(str(HOME))
    yield importlib.import_module("runner")
    for name in ("runner", "rows", "workloads", "histories", "contestants", "report", "picture"):
        sys.modules.pop(name, None)


def run(*arguments: str, to: Path) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    done = subprocess.run(
        [sys.executable, str(HOME), "--against", "MemoryStore", "--to", str(to), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    found = to / "benchmarks.json"
    rows = json.loads(found.read_text(encoding="utf-8"))["rows"] if found.exists() else []
    return done, rows


@pytest.mark.benchmarks
def test_all_rows_run(runner: Any, tmp_path: Path) -> None:
    done, rows = run("--rehearse", "--only", "[!s]*", "s[!p]*", to=tmp_path)
    assert done.returncode == 0, done.stderr
    names = [row.name for row in importlib.import_module("rows").ROWS]
    assert [row["name"] for row in rows] == [
        name for name in names if not name.startswith("spark-")
    ]
    for row in rows:
        figures = row["figures"]["zarr_manifests"]
        assert [figure["value"] > 0 for figure in figures] == [True], row["name"]
        assert row["pipeline"], row["name"]
        assert row["durability"], row["name"]
        assert row["cache"], row["name"]
        assert row["peak_bytes"]["zarr_manifests"] is not None, row["name"]
    by_name = {row["name"]: row["figures"]["zarr_manifests"][0] for row in rows}
    assert len(by_name["commits-10k"]["series"]) == 20
    left = by_name["collect-1000"]["extras"]
    assert 0 < left["objects left"] < left["objects before"]
    assert (tmp_path / "benchmarks.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert [row["name"] for row in rows if f"| `{row['name']}` |" not in table] == []


@pytest.mark.spark
def test_the_rows_of_spark_run(tmp_path: Path) -> None:
    done, rows = run("--rehearse", "--only", "spark-*", to=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(rows) > 1
    for row in rows:
        (figure,) = row["figures"]["zarr_manifests"]
        assert figure["value"] > 0
        if row["name"] == "spark-scan":
            assert figure["peak_bytes"] is None, "most of it lies in Spark's own processes"


def outcome(runner: Any, ours: list[float], theirs: list[float], **more: Any) -> Any:
    figures = {
        "zarr_manifests": [runner.Figure(value, peak_bytes=10) for value in ours],
        "peer": [runner.Figure(value) for value in theirs],
    }
    row = runner.Row(
        "row", "a row", iter, ("zarr_manifests", "peer"), {}, "s", due={"peer": 4.0}, **more
    )
    return runner.Outcome(row, {}, figures, full=True)


def test_a_ratio_is_the_middle_one_of_the_rounds(runner: Any) -> None:
    """A round in which the machine was busy has both figures higher, and its ratio still fits."""
    found = outcome(runner, [1.0, 10.0, 2.0], [4.0, 50.0, 2.0])
    assert found.ratios("peer") == [1.0, 4.0, 5.0]
    assert found.ratio("peer") == 4.0


def test_a_row_is_missed_below_half_of_what_is_due(runner: Any) -> None:
    assert outcome(runner, [1.0], [4.0]).faults() == []
    slow = outcome(runner, [1.0], [2.5])
    assert len(slow.faults()) == 1
    assert slow.faults(runner.MISSED) == []
    assert len(outcome(runner, [1.0], [1.9]).faults(runner.MISSED)) == 1


def test_a_row_is_missed_beyond_twice_the_memory(runner: Any) -> None:
    assert outcome(runner, [1.0], [4.0], peak_due_bytes=10).faults() == []
    large = outcome(runner, [1.0], [4.0], peak_due_bytes=6)
    assert len(large.faults()) == 1
    assert large.faults(runner.MISSED) == []
    assert len(outcome(runner, [1.0], [4.0], peak_due_bytes=4).faults(runner.MISSED)) == 1


def test_a_row_is_missed_beyond_twice_its_limits(runner: Any) -> None:
    row = runner.Row("row", "row", iter, ("zarr_manifests",), {}, "s", limits={"value": 1, "n": 5})

    def faults(value: float, n: float, part: float = 1.0, *, full: bool = True) -> int:
        figures = {"zarr_manifests": [runner.Figure(value, extras={"n": n})]}
        return len(runner.Outcome(row, {}, figures, full=full).faults(part))

    assert faults(1, 5) == 0
    assert faults(1.1, 6) == 2
    assert faults(1.1, 6, full=False) == 0
    assert faults(1.9, 11, runner.MISSED) == 1


def aged(runner: Any, name: str, value: float, *, full: bool = True, **extras: float) -> Any:
    row = runner.Row(name, name, iter, ("zarr_manifests",), {}, "s")
    figures = {"zarr_manifests": [runner.Figure(value, extras=extras)]}
    return runner.Outcome(row, {}, figures, full=full)


def test_a_figure_may_not_grow_more_than_is_said(runner: Any) -> None:
    growth = runner.Growth("large against small", ("small", None), ("large", None), 2.0)
    small = aged(runner, "small", 1.0)
    assert growth.faults([small, aged(runner, "large", 2.0)]) == []
    slow = [small, aged(runner, "large", 3.0)]
    assert growth.found(slow) == 3.0
    assert len(growth.faults(slow)) == 1
    assert growth.faults(slow, runner.MISSED) == []
    assert len(growth.faults([small, aged(runner, "large", 4.1)], runner.MISSED)) == 1


def test_growth_is_told_of_full_runs_that_have_both(runner: Any) -> None:
    growth = runner.Growth("late against early", ("row", "first"), ("row", "last"), 2.0)
    assert growth.found([aged(runner, "row", 1.0, first=1.0, last=5.0)]) == 5.0
    assert growth.found([aged(runner, "row", 1.0, full=False, first=1.0, last=5.0)]) is None
    assert growth.found([aged(runner, "other", 1.0)]) is None


def test_the_rows_that_growths_name_are_there(runner: Any) -> None:
    rows = importlib.import_module("rows")
    names = {row.name for row in rows.ROWS}
    for growth in rows.GROWTHS:
        assert {growth.before[0], growth.after[0]} <= names


def test_memory_that_was_not_taken_is_told_as_such(runner: Any) -> None:
    report = importlib.import_module("report")
    found = outcome(runner, [1.0], [4.0])
    assert found.peak_bytes("zarr_manifests") == 10
    assert found.peak_bytes("peer") is None
    assert "peak -" in report.describe(found, 1.0)


@pytest.mark.slow
def test_an_error_of_a_workload_ends_the_run(runner: Any, tmp_path: Path) -> None:
    row = runner.Row("bad", "bad", iter, ("zarr_manifests",), {}, "s")
    with pytest.raises(RuntimeError, match="bad, zarr_manifests"):
        runner.run(row, row.contestants, scale=2, rounds=1, place=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_row_that_is_not_there_is_said(tmp_path: Path) -> None:
    done, _ = run("--only", "nothing", to=tmp_path)
    assert done.returncode != 0
    assert "small-read-fused" in done.stderr
