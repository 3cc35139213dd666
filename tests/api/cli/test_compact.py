"""`compact` does what the library does, and says so."""

from __future__ import annotations

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


def test_a_dry_run_writes_nothing(url: str) -> None:
    repo = zm.open(url)
    objects = sorted(info.key for info in repo.storage.list())
    done = CliRunner().invoke(app, ["compact", url, "--dry-run"])
    assert done.stdout.startswith("deltas and runs: 4; manifests: 0; ")
    assert sorted(info.key for info in repo.storage.list()) == objects
    assert next(repo.ancestry()).message == "part 2"
