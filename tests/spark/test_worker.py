"""Batches, and a task's rows without Spark."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from storages import CountingStorage
from zarr_manifests import Repository
from zarr_manifests.spark import worker
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read, restrict
from zarr_manifests.storage.local import LocalStorage

FACTS = SparkFacts(parallelism=2)
APART = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}
"""Each chunk is an object."""

ROWS, BYTES = 10, 640


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "BATCH_ROWS", ROWS)
        patch.setattr(worker, "BATCH_BYTES", BYTES)
        yield


def rows_of(job: Job) -> pd.DataFrame:
    """The rows of all tasks."""
    found = [each.to_pandas() for task in range(job.tasks) for each in partition(job, task)]
    return pd.concat([pd.DataFrame(columns=[c.name for c in job.columns]), *found])


def partition(job: Job, task: int) -> Iterator[pa.RecordBatch]:
    return worker.run_arrow(job, [pa.record_batch({"id": [task]})])


def chunks_read(storage: CountingStorage) -> list[str]:
    return [r.key for r in storage.log if r.op == "get" and r.key.startswith("chunks/")]


@pytest.mark.parametrize("shards", [None, (10, 20)])
def test_chunks_of_a_block_come_with_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: Any
) -> None:
    monkeypatch.setattr(worker, "BATCH_BYTES", 10**6)
    ds = xr.Dataset(
        {n: (("y", "x"), np.arange(800.0).reshape(20, 40) + i) for i, n in enumerate("ab")}
    )
    ds["a"][5:9] = np.nan  # chunks that are not written
    storage = CountingStorage(LocalStorage(tmp_path / "repo"))
    repo = zm.create(storage, {"inline-chunk-bytes": 0})
    how = {"chunks": (1, 2), "_FillValue": np.nan} | ({"shards": shards} if shards else {})
    with repo.transaction(message="write") as store:
        ds.to_zarr(store, consolidated=False, encoding={"a": how, "b": dict(how)})
    job = plan_read(repo, ReadOptions(nan="keep"), SparkFacts())
    storage.reset()
    found = rows_of(job)
    expected = ds.to_dataframe().reset_index()
    pd.testing.assert_frame_equal(
        found.sort_values(["y", "x"], ignore_index=True).astype(expected.dtypes), expected
    )
    assert len(chunks_read(storage)) == 2 * job.tasks  # of 400 chunks a variable, all in one pack


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[CountingStorage, xr.Dataset]:
    values = np.arange(70.0).reshape(7, 10)
    ds = xr.Dataset(
        {"a": (("y", "x"), values), "b": (("y", "x"), values + 1)}, {"x": np.arange(10) * 10}
    )
    storage = CountingStorage(LocalStorage(tmp_path_factory.mktemp("grid") / "repo"))
    repo = zm.create(storage, APART)
    zm.write(ds, repo, message="write", encoding={name: {"chunks": (2, 3)} for name in "ab"})
    rows_of(plan_read(repo, ReadOptions(), FACTS))  # the coordinates are read
    return storage, ds


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), unique=True, max_size=16),
    st.sets(st.integers(0, 9), min_size=1),
    st.integers(1, 100),
    st.integers(1, 20),
)
@settings(deadline=None, max_examples=examples(100))
def test_of_some_chunks_all_is_read_once_and_nothing_else(
    grid: tuple[CountingStorage, xr.Dataset],
    chunks: list[tuple[int, int]],
    columns: set[int],
    target_rows: int,
    max_tasks: int,
) -> None:
    storage, ds = grid
    ranges = {"x": [10 * column for column in sorted(columns)]}
    options = ReadOptions(where=ranges, target_rows=target_rows, max_tasks=max_tasks)
    lo = np.array(sorted(chunks), np.int64).reshape(-1, 2) * [2, 3]
    boxes = np.stack([lo, np.minimum(np.add(lo, (2, 3)), (7, 10))], axis=1)
    job = restrict(plan_read(zm.open(storage), options, FACTS), boxes)
    assert job.tasks <= max_tasks
    storage.reset()
    found = rows_of(job).sort_values(["y", "x"], ignore_index=True)
    due = np.zeros((7, 10), bool)
    for (y0, x0), (y1, x1) in boxes.tolist():
        due[y0:y1, [x for x in range(x0, x1) if x in columns]] = True
    expected = ds.to_dataframe().reset_index()[due.ravel()].reset_index(drop=True)
    assert found.astype(expected.dtypes).equals(expected)
    in_use = {(y, x) for y, x in chunks if columns & set(range(3 * x, 3 * x + 3))}
    read = chunks_read(storage)
    assert len(read) == len(set(read)) == 2 * len(in_use)


def array_of(repo: Repository, **options: Any) -> Any:
    """An array `a` over `x`, in a session of its own that has to be committed."""
    session = repo.writable_session("main")
    return session, zarr.create_array(session.store, name="a", dimension_names=["x"], **options)


def test_chunks_that_cannot_be_decoded_are_told_as_by_zarr(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repo")
    session, array = array_of(repo, shape=(8,), chunks=(4,), dtype="i4", compressors="auto")
    array[:] = 1
    buffer = zarr.core.buffer.default_buffer_prototype().buffer
    asyncio.run(session.store.set("a/c/1", buffer.from_bytes(b"not what zstd makes")))
    session.commit("damaged")
    with pytest.raises(RuntimeError, match="Zstd decompression error") as told:
        rows_of(plan_read(repo, ReadOptions(), SparkFacts()))
    with pytest.raises(RuntimeError) as by_zarr:
        zarr.open_array(repo.readonly_session().store, path="a", mode="r")[:]
    assert str(told.value) == str(by_zarr.value)


def test_jobs_read_elsewhere_only_where_they_may(tmp_path: Path) -> None:
    """A worker that has opened a snapshot for one job asks again where another may read."""
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        cells = np.arange(4, dtype="<i4") + 100 * number
        (tmp_path / name / "cells").write_bytes(cells.tobytes())
    place = tmp_path / "repo"
    repo = zm.create(place, virtual_containers={"raw": tmp_path / "a"})
    session, _ = array_of(repo, shape=(4,), chunks=(4,), dtype="i4", compressors=None)
    session.store.set_virtual_refs("a", [[0]], ["virtual://raw/cells"], [0], [0], [16])
    session.commit("refer")
    for folder, due in (("a", [0, 1, 2, 3]), ("b", [100, 101, 102, 103])):
        opened = zm.open(place, virtual_containers={"raw": tmp_path / folder})
        assert rows_of(plan_read(opened, ReadOptions(), SparkFacts()))["a"].tolist() == due


def test_a_scalar_is_one_chunk_and_one_row(tmp_path: Path) -> None:
    zm.write(xr.Dataset({"n": ((), 7), "none": ((), np.nan)}), tmp_path, message="scalars")
    for name, layout, due in (("n", "long", 1), ("n", "chunk", 1), ("none", "chunk", 0)):
        job = plan_read(tmp_path, ReadOptions(variables=name, layout=layout, nan="drop"), FACTS)
        found = rows_of(job)
        assert len(found) == due
        if layout == "chunk" and due:
            cell = found[name][0]
            assert np.frombuffer(cell["data"], cell["dtype"]).reshape(found["shape"][0]) == 7
