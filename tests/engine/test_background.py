"""Compactions in the background: none is waited for, what is not done is due again."""

from __future__ import annotations

import logging
import threading

import pytest
import zarr
from msgspec.structs import replace

import zarr_manifests as zm
from storages import Fault, FaultyStorage
from zarr_manifests import Repository
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage

CONFIG = {"compaction": {"mode": "async", "max-delta-count": 3, "async-threads": 1}}
THREAD = "zarr-manifests-background"


def commits(repository: Repository, count: int, first: int = 0) -> None:
    for i in range(first, first + count):
        with repository.transaction("main", message=f"group {i}") as store:
            zarr.create_group(store, path=f"g{i}")


def await_compactions() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()


def kinds(repository: Repository) -> list[str]:
    return [info.kind for info in repository.ancestry()]


def test_a_commit_does_not_wait_for_it() -> None:
    storage, go = MemoryStorage(), threading.Event()

    def hold(name: str) -> None:
        if threading.current_thread().name == THREAD:
            go.wait()

    repository = zm.create(storage, CONFIG, runtime=replace(SYSTEM, checkpoint=hold))
    commits(repository, 5)
    assert "rewrite" not in kinds(repository)
    go.set()
    await_compactions()
    assert "rewrite" in kinds(repository)
    assert len(list(zarr.open_group(repository.readonly_session("main").store, mode="r"))) == 5


def test_what_fails_is_logged_and_due_again(caplog: pytest.LogCaptureFixture) -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault("fail_before", op="create", key="nodes/*")])
    repository = zm.create(storage, CONFIG)
    with caplog.at_level(logging.WARNING):
        commits(repository, 3)
        await_compactions()
    assert "'main' in the background failed" in caplog.text
    assert "rewrite" not in kinds(repository)
    commits(zm.open(storage), 1, first=3)
    await_compactions()
    assert "rewrite" in kinds(repository)
