"""Planning reads without Spark: tasks, limits, and what is asked for."""

from __future__ import annotations

import itertools
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Repository
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read, restrict

FACTS = SparkFacts(parallelism=2)
SHAPE, CHUNKS = (12, 30, 40), (4, 10, 10)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    repo = zm.create(tmp_path_factory.mktemp("plan") / "repo")
    ds = xr.Dataset({"t": (("time", "y", "x"), np.arange(np.prod(SHAPE)).reshape(SHAPE) * 1.0)})
    with repo.transaction(message="write") as store:
        ds.to_zarr(store, consolidated=False, encoding={"t": {"chunks": CHUNKS}})
    return repo


def cells(job: Job, task: int) -> Iterator[tuple[int, ...]]:
    for box in job.boxes(task):
        yield from itertools.product(*(a.positions().tolist() for a in job.scan.within(box)))


@given(
    st.lists(st.tuples(*(st.integers(0, n - 1) for n in (3, 3, 4))), unique=True),
    st.integers(1, 40_000),
    st.integers(1, 50),
)
@settings(max_examples=examples(40), deadline=None)
def test_the_tasks_of_some_chunks(
    repo: Repository, chunks: list[tuple[int, ...]], target_rows: int, max_tasks: int
) -> None:
    options = ReadOptions(
        ranges={"x": [(3, 5), (17, 38)]}, target_rows=target_rows, max_tasks=max_tasks
    )
    whole = plan_read(repo, options, FACTS)
    lo = np.array(sorted(chunks), np.int64).reshape(-1, 3) * CHUNKS
    job = restrict(whole, np.stack([lo, lo + CHUNKS], axis=1), options, FACTS)
    found = [list(cells(job, task)) for task in range(job.tasks)]
    everything = [cell for task in range(whole.tasks) for cell in cells(whole, task)]
    wanted = [c for c in everything if (c[0] // 4, c[1] // 10, c[2] // 10) in set(chunks)]
    assert sorted(itertools.chain(*found)) == sorted(wanted)
    assert all(found)
    assert job.tasks <= max_tasks
    if max_tasks > 1 and len({(c[0] // 4, c[1] // 10, c[2] // 10) for c in wanted}) > 1:
        assert job.tasks >= 2
    if job.tasks < max_tasks:
        chunk = int(np.prod(CHUNKS))
        assert max(map(len, found), default=0) <= max(target_rows, len(wanted) // max_tasks) + chunk


def test_what_is_restricted_twice_has_what_is_in_both(repo: Repository) -> None:
    options = ReadOptions()
    some = np.array([[[0, 0, 0], [5, 7, 9]], [[5, 3, 3], [12, 30, 5]]])
    other = np.array([[[3, 5, 2], [9, 8, 40]], [[0, 0, 0], [3, 1, 1]]])
    whole = plan_read(repo, options, FACTS)
    once = restrict(whole, some, options, FACTS)
    twice = restrict(once, other, options, FACTS)
    found = [cell for task in range(twice.tasks) for cell in cells(twice, task)]

    def held(boxes: Any) -> set[tuple[int, ...]]:
        return {c for lo, hi in boxes.tolist() for c in itertools.product(*map(range, lo, hi))}

    assert sorted(found) == sorted(held(some) & held(other))


def test_no_more_tasks_than_allowed(repo: Repository) -> None:
    for ranges in ({}, {"x": [1, 5, 11, 15, 21, 25, 31, 35]}):
        for max_tasks in (1, 5, 36, 100):
            options = ReadOptions(ranges=ranges, target_rows=1, max_tasks=max_tasks)
            job = plan_read(repo, options, FACTS)
            assert max_tasks / 2 <= min(job.tasks, 36) <= max_tasks or job.tasks == 36
            found = [cell for task in range(job.tasks) for cell in cells(job, task)]
            assert len(found) == len(set(found)) == 12 * 30 * (8 if ranges else 40)


@pytest.mark.parametrize(
    "options",
    [{}, {"ranges": {"x": (5, 10**6)}}, {"where": "x >= 5 AND y < 900000 AND t > 3"}],
    ids=["all", "ranges", "where"],
)
def test_planning_takes_memory_and_steps_by_axis_and_not_by_cell(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """An array of 10^13 cells in 10^10 chunks has axes of 10^6 and 10^7."""
    repo = zm.create(tmp_path / "repo")
    with repo.transaction(message="large") as store:
        zarr.create_array(
            store,
            name="t",
            shape=(10**6, 10**7),
            chunks=(10, 100),
            dtype="f4",
            dimension_names=["y", "x"],
            fill_value=5,
        )
    steps = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal steps
        steps += 1

    tracemalloc.start()
    try:
        job = plan_read(repo, ReadOptions(**options), FACTS)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A where is compared with each position of both axes.
    assert most < (200e6 if "where" in options else 50e6)
    assert 5_000 < job.tasks <= 10_000
    sys.setprofile(count)
    try:
        plan_read(repo, ReadOptions(**options), FACTS)
    finally:
        sys.setprofile(None)
    assert steps < 200_000  # calls and returns of functions, a fraction of the 10^6 positions


@pytest.mark.spark
def test_a_worker_takes_little_memory_for_a_million_chunks(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A task reads half of the 10^6 chunks of 16 bytes, in a worker of Spark."""
    chunks, files = 10**6, tmp_path / "files"
    files.mkdir()
    cells = np.arange(chunks * 4, dtype="<f4")
    (files / "cells").write_bytes(cells.tobytes())
    repo = zm.create(tmp_path / "repo", virtual_containers={"raw": files})
    with repo.transaction(message="tiny chunks") as store:
        zarr.create_array(
            store,
            name="t",
            shape=cells.shape,
            chunks=(4,),
            dtype="f4",
            compressors=None,
            dimension_names=["x"],
        )
        index = np.arange(chunks)
        place = [(files / "cells").as_uri()], np.zeros(chunks, np.int64), index * 16
        store.set_virtual_refs("t", index[:, None], *place, np.full(chunks, 16))
    job = plan_read(repo, ReadOptions(), SparkFacts(parallelism=2))

    def measured(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        from zarr_manifests.spark.worker import run_arrow

        Path("/proc/self/clear_refs").write_text("5")  # the peak of what this worker did before
        rows = sum(batch.num_rows for batch in run_arrow(job, batches))
        status = Path("/proc/self/status").read_text().splitlines()
        (line,) = [line for line in status if line.startswith("VmHWM")]
        yield pa.record_batch({"rows": [rows], "kilobytes": [int(line.split()[1])]})

    tasks = spark.range(0, 1, 1, 1)
    (found,) = tasks.mapInArrow(measured, "rows bigint, kilobytes bigint").collect()
    assert job.tasks == 2
    assert found.rows == len(cells) / 2
    assert 0 < found.kilobytes * 1024 <= 400e6
