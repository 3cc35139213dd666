"""Compactions in the background: none is waited for, none is lost, and errors stay there."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import Fault, FaultyStorage

CONFIG = {"compaction": {"mode": "async", "max-delta-count": 3, "async-threads": 1}}


def commits(repository: Repository, count: int, first: int = 0) -> None:
    for i in range(first, first + count):
        with repository.transaction("main", message=f"group {i}") as store:
            zarr.create_group(store, path=f"g{i}")


def wait_for_compactions(timeout_s: float) -> bool:
    """Wait until none is under way; False if that takes longer."""
    due = [one for one in threading.enumerate() if one.name == "zarr-manifests-background"]
    for thread in due:
        thread.join(timeout_s)
    return not any(thread.is_alive() for thread in due)


def kinds(repository: Repository) -> list[str]:
    return [info.kind for info in repository.ancestry()]


def test_a_commit_does_not_wait_for_it() -> None:
    storage, go = MemoryStorage(), threading.Event()

    def hold(name: str) -> None:
        if threading.current_thread().name == "zarr-manifests-background":
            assert go.wait(60)

    runtime = replace(SYSTEM, checkpoint=hold)
    repository = zm.create(storage, CONFIG, runtime=runtime)
    commits(repository, 5)
    assert "rewrite" not in kinds(repository)
    assert not wait_for_compactions(0.01)
    go.set()
    assert wait_for_compactions(60)
    assert "rewrite" in kinds(repository)
    assert len(list(zarr.open_group(repository.readonly_session("main").store, mode="r"))) == 5


def test_what_fails_is_logged_and_due_again(caplog: pytest.LogCaptureFixture) -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault("fail_before", op="create", key="nodes/*")])
    repository = zm.create(storage, CONFIG)
    with caplog.at_level(logging.WARNING):
        commits(repository, 3)
        assert wait_for_compactions(60)
    assert "compacting 'main' in the background failed" in caplog.text
    assert "rewrite" not in kinds(repository)
    commits(zm.open(storage), 1, first=3)
    assert wait_for_compactions(60)
    assert "rewrite" in kinds(repository)


PROGRAM = """
import sys, threading, zarr
from dataclasses import replace
import zarr_manifests as zm
from zarr_manifests.runtime import SYSTEM

def late(name):
    if threading.current_thread().name == "zarr-manifests-background":
        threading.main_thread().join()  # the interpreter exits

repository = zm.create(
    sys.argv[1],
    {"compaction": {"mode": "async", "max-delta-count": 3}},
    runtime=replace(SYSTEM, checkpoint=late),
)
for i in range(3):
    with repository.transaction("main", message=f"group {i}") as store:
        zarr.create_group(store, path=f"g{i}")
"""


@pytest.mark.slow
def test_what_is_under_way_is_ended_before_the_interpreter(tmp_path: Path) -> None:
    path = str(tmp_path / "repository")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert kinds(zm.open(path))[0] == "rewrite"
