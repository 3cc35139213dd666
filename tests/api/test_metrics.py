"""Counts: what a repository does is counted, exactly, by this process, and shown where wanted."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys

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


_OFFERED = """
import sys, zarr_manifests as zm
repo = zm.create("memory://counted")
print([name for name in sys.modules if name.startswith("opentelemetry")])
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
zm.open("memory://counted")
(resource,) = reader.get_metrics_data().resource_metrics
counts = {each.name: each.data.data_points[0].value for each in resource.scope_metrics[0].metrics}
print(counts["zarr_manifests.write_requests"] > 0, len(counts) == len(repo.metrics().to_dict()))
"""


def test_counts_are_offered_to_opentelemetry_once_it_is_imported() -> None:
    command = [sys.executable, "-c", _OFFERED]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == ["[]", "True True"]
