"""The comparison with other stores runs: each row once, with tiny sizes. No time is looked at."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).parents[1] / "benchmarks"


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
