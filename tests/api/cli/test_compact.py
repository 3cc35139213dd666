"""`compact` does what the library does, and says so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

import zarr_manifests as zm
from zarr_manifests.cli import app


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Four deltas on no base."""
    repo = zm.create(tmp_path / "repository", {"compaction": {"mode": "manual"}})
    with repo.transaction("main", message="array") as store:
        zarr.create_array(store, name="a", shape=(30,), chunks=(10,), dtype="f8")
    for i in range(3):
        with repo.transaction("main", message=f"part {i}") as store:
            zarr.open_array(store, path="a")[10 * i : 10 * i + 10] = np.arange(10.0) + i
    return repo.storage.url


def shown(*arguments: str) -> dict[str, list[str]]:
    """The numbers of each line it prints, by what they are of."""
    result = CliRunner().invoke(app, ["compact", *arguments])
    assert result.exit_code == 0, result.output
    lines = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    return {first: rest for first, *rest in lines}


def test_a_dry_run_writes_nothing(url: str) -> None:
    repo = zm.open(url)
    objects = sorted(info.key for info in repo.storage.list())
    found = shown(url, "--dry-run")
    assert found["deltas and runs"] == ["4", "?"]
    assert sorted(info.key for info in repo.storage.list()) == objects
    assert next(repo.ancestry()).message == "part 2"
