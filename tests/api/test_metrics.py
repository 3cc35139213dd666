"""Counts: what a repository does is counted, exactly, by this process, and shown where wanted."""

from __future__ import annotations

import gc
import logging

import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.metrics import process_totals
from zarr_manifests.storage.memory import MemoryStorage


def test_what_a_repository_that_is_gone_has_done_still_counts() -> None:
    before = process_totals()
    with zm.create(MemoryStorage()).transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(100,), chunks=(1,), dtype="u1")
    del store
    gc.collect()
    found = process_totals() - before
    assert found.commits == 1
    assert found.write_requests > 0


def with_array(repository: Repository) -> Repository:
    with repository.transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(100,), chunks=(1,), dtype="u1")
    return repository


def test_a_commit_is_logged_though_its_snapshot_is_not_in_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the snapshot says is left out when it is not in memory any more."""
    caplog.set_level(logging.INFO, "zarr_manifests.operations")
    with_array(zm.create(MemoryStorage(), cache={"expire-ms": 0, "max-size": 0}))
    assert [record.operation for record in caplog.records] == ["commit"]
