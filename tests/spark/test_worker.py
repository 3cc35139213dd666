"""Batches, and a task's rows without Spark."""

from __future__ import annotations

import asyncio
import gc
import math
import pickle
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
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
from pyspark.sql import types as sql

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Repository
from zarr_manifests.errors import VirtualContainerError
from zarr_manifests.grid import Box
from zarr_manifests.planning.scan import Axis, plan_scan, runs_of
from zarr_manifests.repository import containers_of
from zarr_manifests.session import Session
from zarr_manifests.spark import worker
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.spark.schema import Column, column_of, to_arrow
from zarr_manifests.spark.source import Source
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.testing import CountingStorage
from zarr_manifests.virtual.containers import VirtualContainer

ROWS, BYTES = 10, 640


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "BATCH_ROWS", ROWS)
        patch.setattr(worker, "BATCH_BYTES", BYTES)
        yield


def pieces(lengths: list[int], width: int) -> list[pa.Table]:
    """Tables of rows of `width` bytes (a multiple of 8), numbered through."""
    starts = np.cumsum([0, *lengths])
    tables = []
    for lo, hi in pairwise(starts.tolist()):
        numbers = {"0": pa.array(np.arange(lo, hi))}
        rest = {str(i): pa.array(np.zeros(hi - lo)) for i in range(1, width // 8)}
        tables.append(pa.table(numbers | rest))
    return tables


@given(st.lists(st.integers(0, ROWS), max_size=12), st.sampled_from([8, 16, 64, 128, 1024]))
def test_batches_are_within_both_bounds(lengths: list[int], width: int) -> None:
    found = list(worker.batches(pieces(lengths, width)))
    rows = [table.num_rows for table in found]
    numbers = np.concatenate([np.empty(0, int), *(table["0"].to_numpy() for table in found)])
    assert numbers.tolist() == list(range(sum(lengths)))
    assert all(table.nbytes <= BYTES or table.num_rows == 1 for table in found)
    assert all(table["0"].num_chunks == 1 for table in found)
    if width * 3 * ROWS <= BYTES:  # as much as is held back at the end fits in one batch
        assert all(n >= min(ROWS, sum(lengths)) for n in rows if sum(lengths))
    assert 0 not in rows


def test_a_row_larger_than_a_batch_is_one() -> None:
    text = pa.table({"0": [0, 1, 2], "text": ["a" * 1000, "b", "c" * 1000]})
    assert [table.num_rows for table in worker.batches([text])] == [1, 1, 1]


def test_batches_are_made_as_pieces_come() -> None:
    """What is held back is bounded, however long the task."""
    taken = 0

    def counted() -> Iterator[pa.Table]:
        nonlocal taken
        for piece in pieces([ROWS] * 100, 8):
            taken += 1
            yield piece

    given_out = 0
    for table in worker.batches(counted()):
        given_out += table.num_rows
        assert taken * ROWS - given_out <= 3 * ROWS


def job_of(
    repo: Repository,
    axes: list[Axis],
    group: str = "/",
    *,
    dimensions: Sequence[str] = ("y", "x"),
    variables: Sequence[str] = ("a", "b"),
    target_rows: int = 12,
) -> Job:
    """Read variables over the axes."""
    session = repo.readonly_session()
    source = Source(session, group)
    scan = plan_scan(axes, target_rows=target_rows)
    return Job(
        storage=repo.storage,
        containers=tuple(containers_of(repo).items()),
        snapshot_id=session.snapshot_id,
        group=group,
        dimensions=tuple(column_of(source, dim, is_dimension=True) for dim in dimensions),
        variables=tuple(column_of(source, name, is_dimension=False) for name in variables),
        scan=scan,
        tasks=len(scan),
        nan="keep",
    )


def written(storage: Storage, *groups: str) -> tuple[Repository, xr.Dataset]:
    ds = xr.Dataset(
        {name: (("y", "x"), np.arange(70.0).reshape(7, 10) + i) for i, name in enumerate("ab")},
        {"x": np.arange(10) * 10},
    )
    repo = zm.create(storage)
    with repo.transaction(message="write") as store:
        for group in groups:
            encoding = {"a": {"chunks": (2, 3)}, "b": {"chunks": (2, 3)}}
            ds.to_zarr(store, group=group, consolidated=False, encoding=encoding)
    return repo, ds


@pytest.mark.parametrize("block_bytes", [1, 400, 10**6])
def test_rows_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(worker, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(worker, "BATCH_BYTES", 10**6)
    repo, ds = written(LocalStorage(tmp_path / "repo"), "/")
    mask = np.array([1, 0, 1, 1, 0, 0, 0, 0, 0, 1], bool)
    job = job_of(repo, [Axis(2, np.array([[1, 6]])), Axis(3, runs_of(mask))])
    numbers = pd.DataFrame({"id": np.arange(len(job.scan))})
    frames = list(worker.run(job, [numbers]))
    assert all(ROWS <= len(frame) < 3 * ROWS for frame in frames)
    found = pd.concat(frames).sort_values(["y", "x"], ignore_index=True)
    expected = ds.isel(x=mask).to_dataframe().reset_index().query("1 <= y < 6")
    expected = expected.reset_index(drop=True)
    assert found.astype(expected.dtypes).equals(expected)


def test_what_was_opened_and_read_for_all_tasks_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BATCH_BYTES", 10**6)
    storage = CountingStorage(LocalStorage(tmp_path / "repo"))
    repo, _ = written(storage, "/", "other")
    axes = [Axis(2, np.array([[0, 7]])), Axis(3, np.array([[0, 10]]))]
    jobs = [job_of(repo, axes), job_of(repo, axes, "/other")]
    storage.reset()
    asked: list[str] = []
    read_chunks = Session.read_chunks

    def told(session: Session, path: str, **cells: Any) -> Any:
        for at, data in read_chunks(session, path, **cells):
            asked.append("/".join(map(str, (path, *at))))
            yield at, data

    monkeypatch.setattr(Session, "read_chunks", told)
    for job in (*jobs, *jobs):
        for number in range(len(job.scan)):
            assert list(worker.run(job, [pd.DataFrame({"id": [number]})]))
    assert [record.key for record in storage.log].count("current") == 1
    assert asked.count("x/0") == asked.count("other/x/0") == 1
    assert asked.count("a/3/3") == 2  # a chunk of a variable is read by each run
    assert gc.get_freeze_count() > 0


def test_a_task_reads_elsewhere_with_the_containers_of_its_own_job(tmp_path: Path) -> None:
    _, ds = written(LocalStorage(tmp_path / "source"), "/")
    ds.to_zarr(tmp_path / "plain", consolidated=False, zarr_format=3)
    storage = LocalStorage(tmp_path / "repo")
    opened = zm.create(storage, virtual_containers={"plain": tmp_path / "plain"})
    zm.virtual.import_zarr(opened, tmp_path / "plain")
    axes = [Axis(7, np.array([[0, 7]])), Axis(10, np.array([[0, 10]]))]
    job = job_of(opened, axes)
    assert job.containers == (("plain", VirtualContainer(tmp_path / "plain")),)
    task = pd.DataFrame({"id": np.arange(len(job.scan))})
    found = pd.concat(worker.run(pickle.loads(pickle.dumps(job)), [task]))
    assert found["a"].tolist() == ds["a"].values.ravel().tolist()
    # What one job may read is kept in the worker, and no leave for another.
    with pytest.raises(VirtualContainerError, match="'plain'"):
        list(worker.run(replace(job, containers=()), [task]))


_COLUMNS = {
    "double": pa.array(np.arange(9) * 0.5),
    "part": pa.array(np.arange(12, dtype=np.int16)).slice(3),
    "timestamp": pa.array(np.arange(9), pa.int64()).cast(pa.timestamp("us", tz="UTC")),
    "missing": pa.array([1.0, None, 3.0, None, *range(5)], pa.float64()),
    "text": pa.array(list("abcdefghi")),
    "flag": pa.array([True, False] * 4 + [True]),
    "decimal": pa.array(np.arange(9)).cast(pa.decimal128(20, 0)),
}


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.sampled_from(sorted(_COLUMNS)), min_size=4, max_size=4),
    st.data(),
)
def test_coordinates_of_cells(shape: list[int], kinds: list[str], data: st.DataObject) -> None:
    along = [_COLUMNS[kind].slice(1, n) for kind, n in zip(kinds, shape, strict=False)]
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    for axis, place in enumerate(np.unravel_index(np.arange(start, stop), tuple(shape))):
        inner = int(np.prod(shape[axis + 1 :]))
        found = worker._spread(along[axis], start, stop, inner)
        assert found.type == along[axis].type
        assert found.equals(along[axis].take(pa.array(place)))


@given(st.data())
@settings(deadline=None)
def test_coordinates_of_blocks_that_may_be_alike(data: st.DataObject) -> None:
    tiles = worker._Tiles()
    tile_rows = data.draw(st.sampled_from([1, 12, 1000]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_TILE_ROWS", tile_rows)
        for _ in range(data.draw(st.integers(1, 4))):
            along = [
                _COLUMNS[data.draw(st.sampled_from(["double", "part", "missing", "text"]))].slice(
                    data.draw(st.integers(0, 1)), data.draw(st.integers(1, 5))
                )
                for _ in range(3)
            ]
            shape = tuple(map(len, along))
            start = data.draw(st.integers(0, math.prod(shape) - 1))
            stop = data.draw(st.integers(start + 1, min(start + ROWS, math.prod(shape))))
            places = np.unravel_index(np.arange(start, stop), shape)
            found = tiles.columns(along, start, stop)
            expected = [a.take(pa.array(p)) for a, p in zip(along, places, strict=True)]
            assert all(a.equals(b) for a, b in zip(found, expected, strict=True))


def test_repeated_coordinates_are_made_once() -> None:
    tiles = worker._Tiles()
    inner = [_COLUMNS["double"].slice(0, 2), _COLUMNS["double"].slice(0, 3)]
    blocks = [[_COLUMNS["double"].slice(at, 4), *inner] for at in (0, 4)]
    found = [tiles.columns(block, at, at + 6) for block in blocks for at in (0, 7)]
    for axis, makings in ((0, 2), (1, 1), (2, 1)):
        assert len({each[axis].buffers()[1].address for each in found}) == makings


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@given(st.lists(st.floats(width=32) | st.just(math.nan), max_size=20))
def test_nan_becomes_null(dtype: str, values: list[float]) -> None:
    given_in = np.array(values, dtype)
    column = Column("t", sql.DoubleType(), pa.from_numpy_dtype(dtype), {})
    found = to_arrow(given_in, column, nan_is_null=True)
    found.validate(full=True)
    assert found.equals(pa.array(given_in, from_pandas=True))


@pytest.mark.parametrize(("zarr_format", "shards"), [(2, None), (3, None), (3, (10, 20))])
def test_chunks_of_a_block_come_with_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zarr_format: Any, shards: Any
) -> None:
    monkeypatch.setattr(worker, "BATCH_BYTES", 10**6)
    ds = xr.Dataset(
        {n: (("y", "x"), np.arange(800.0).reshape(20, 40) + i) for i, n in enumerate("ab")}
    )
    ds["a"][5:9] = np.nan  # chunks that are not written
    storage = CountingStorage(LocalStorage(tmp_path / "repo"))
    repo = zm.create(storage, {"inline-chunk-bytes": 0})
    with repo.transaction(message="write") as store:
        given = {"chunks": (1, 2), "_FillValue": np.nan} | ({"shards": shards} if shards else {})
        ds.to_zarr(
            store,
            consolidated=False,
            zarr_format=zarr_format,
            encoding={"a": dict(given), "b": dict(given)},
        )
    axes = [Axis(1, np.array([[0, 20]])), Axis(2, np.array([[0, 40]]))]
    job = job_of(repo, axes, target_rows=800)
    storage.reset()
    frame = pd.concat(worker.run(job, [pd.DataFrame({"id": [0]})]))
    expected = ds.to_dataframe().reset_index()
    for name in ("y", "x", "a", "b"):
        found = frame[name].to_numpy(float, na_value=np.nan)
        np.testing.assert_array_equal(found, expected[name].to_numpy(float))
    reads = [r for r in storage.log if r.op == "get" and r.key.startswith("chunks/")]
    assert len(reads) == 2  # of 400 chunks a variable, all in one pack


_KINDS: dict[str, Any] = {
    "bool": [True, False],
    "int8": [-128, 127],
    "uint8": [0, 255],
    "uint16": [0, 65535],
    "uint32": [0, 2**32 - 1],
    "uint64": [0, 2**64 - 1],
    "float16": [0.5, 65504],
    ">f8": [0.1, -1e300],
    "<U3": ["abc", "é"],
    "S3": [b"abc", b"\xff"],
    "datetime64[ms]": ["1999-01-01T00:00:00.001", "NaT"],
    "timedelta64[h]": [36, "NaT"],
}


@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
def test_batches_for_spark_have_exactly_the_types_of_the_columns(tmp_path: Path) -> None:
    repo = zm.create(LocalStorage(tmp_path / "repo"))
    with repo.transaction(message="types") as store:
        for number, (dtype, values) in enumerate(_KINDS.items()):
            array = zarr.create_array(
                store, name=f"v{number}", shape=(2,), dtype=dtype, dimension_names=["x"]
            )
            array[:] = np.array(values, array.dtype)
    axes = [Axis(1, np.array([[0, 2]]))]
    names = [f"v{n}" for n in range(len(_KINDS))]
    job = job_of(repo, axes, dimensions=["x"], variables=names, target_rows=1)
    asked = [pa.record_batch({"id": pa.array([task])}) for task in range(2)]
    found = list(worker.run_arrow(job, asked))
    exact = pa.schema([(column.name, column.arrow) for column in job.columns])
    assert all(isinstance(each, pa.RecordBatch) and each.schema == exact for each in found)
    rows = pa.Table.from_batches(found)
    alone = [each for task in range(2) for each in worker.partition_batches(job, task)]
    assert rows.equals(pa.Table.from_batches(alone))
    frames = worker.run(job, [pd.DataFrame({"id": [0, 1]})])
    assert rows.equals(pa.Table.from_pandas(pd.concat(frames), exact, preserve_index=False))


def test_a_variable_that_is_repeated_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BLOCK_CHUNKS", 1)
    wide = xr.DataArray(np.arange(24.0).reshape(6, 4), dims=("y", "x"))
    ds = xr.Dataset({"a": wide, "b": ("x", np.arange(4.0))})
    repo = zm.create(LocalStorage(tmp_path / "repo"))
    with repo.transaction(message="write") as store:
        ds.to_zarr(store, consolidated=False, encoding={"a": {"chunks": (2, 4)}})
    job = plan_read(repo, ReadOptions(broadcast=True, target_rows=100), SparkFacts())
    read = Read(monkeypatch)
    found = pd.concat(worker.run(job, [pd.DataFrame({"id": [0]})]))
    assert found["b"].tolist() == [0.0, 1.0, 2.0, 3.0] * 6
    assert [path.strip("/") for path, *_ in read.chunks].count("b") == 1
    assert [path.strip("/") for path, *_ in read.chunks].count("a") == 3


class Read:
    """The blocks and chunks that are read while it is there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.blocks: list[Box] = []
        self.chunks: list[tuple[Any, ...]] = []
        stored, read_chunks = Source.stored, Session.read_chunks

        def told(source: Source, name: str, block: Box, parts: Any = None) -> Any:
            self.blocks += [block] * (name in "ab")
            return stored(source, name, block, parts)

        def given_out(session: Session, path: str, **cells: Any) -> Any:
            for at, data in read_chunks(session, path, **cells):
                self.chunks.append((path, *at))
                yield at, data

        patch.setattr(Source, "stored", told)
        patch.setattr(Session, "read_chunks", given_out)


def rows_of(job: Job) -> pd.DataFrame:
    frames = worker.run(job, [pd.DataFrame({"id": np.arange(job.tasks)})])
    return pd.concat([pd.DataFrame(columns=["y", "x", "a", "b"]), *frames])


def chunks_touched(block: Box) -> int:
    sides = zip(block.lo, block.hi, (2, 3), strict=True)
    return math.prod(-(-hi // length) - lo // length for lo, hi, length in sides)


@pytest.mark.parametrize("most", [1, 4, 10])
def test_blocks_are_bounded_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also where few cells of each chunk are selected."""
    monkeypatch.setattr(worker, "BLOCK_CHUNKS", most)
    repo, ds = written(LocalStorage(tmp_path / "repo"), "/")
    axes = [Axis(2, np.array([[0, 7]])), Axis(3, np.array([[1, 2], [4, 5], [7, 8], [9, 10]]))]
    job = job_of(repo, axes, target_rows=10**6)
    read = Read(monkeypatch)
    found = rows_of(job)
    assert sorted(found["a"]) == sorted(ds["a"].values[:, [1, 4, 7, 9]].ravel().tolist())
    chunks = [chunk for chunk in read.chunks if chunk[0] in "ab"]
    assert len(chunks) == len(set(chunks)) == 2 * 16
    assert max(map(chunks_touched, read.blocks)) <= most


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), unique=True, max_size=16),
    st.lists(st.booleans(), min_size=10, max_size=10),
    st.sampled_from([0, 10, 10**6]),
    st.sampled_from([1, 3, 100]),
    st.sampled_from([10, 10**6]),
)
@settings(deadline=None, max_examples=examples(60))
def test_of_the_parts_of_a_job_all_is_read_and_nothing_else(
    parted: tuple[Job, xr.Dataset],
    chunks: list[tuple[int, int]],
    columns: list[bool],
    skipped_cells: int,
    block_chunks: int,
    target_rows: int,
) -> None:
    job, ds = parted
    chosen = np.array(columns, bool)
    scan = plan_scan([Axis(2, np.array([[0, 7]])), Axis(3, runs_of(chosen))], target_rows=10**6)
    boxes = [[[2 * y, 3 * x], [min(2 * y + 2, 7), min(3 * x + 3, 10)]] for y, x in chunks]
    parts = scan.cut(np.array(boxes, np.int64).reshape(-1, 2, 2))
    starts = np.unique([0, len(parts) // 2, len(parts)])
    job = replace(job, scan=scan, parts=parts, starts=starts, tasks=len(starts) - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_SKIPPED_CELLS", skipped_cells)
        patch.setattr(worker, "BLOCK_CHUNKS", block_chunks)
        read = Read(patch)
        found = rows_of(job)
    due = np.zeros((7, 10), bool)
    for y, x in chunks:
        due[2 * y : 2 * y + 2, 3 * x : 3 * x + 3] = True
    due &= chosen
    expected = ds.to_dataframe().reset_index()[due.ravel()]
    found = found.sort_values(["y", "x"], ignore_index=True)
    assert found.astype(expected.dtypes).equals(expected.reset_index(drop=True))
    in_use = {(y, x) for y, x in chunks if chosen[3 * x : 3 * x + 3].any()}
    assert {at[1:] for at in read.chunks if len(at) == 3} == in_use
    assert len(read.chunks) == len(set(read.chunks))
    assert all(chunks_touched(block) <= block_chunks for block in read.blocks)


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, xr.Dataset]:
    repo, ds = written(LocalStorage(tmp_path_factory.mktemp("parted") / "repo"), "/")
    job = job_of(repo, [Axis(2, np.array([[0, 7]])), Axis(3, np.array([[0, 10]]))])
    rows_of(job)  # the coordinates are read
    return job, ds


def _numbers(repo: Repository, **options: Any) -> Any:
    """An array `a` over `x`, in a session of its own that has to be committed."""
    session = repo.writable_session("main")
    array = zarr.create_array(session.store, name="a", dimension_names=["x"], **options)
    return session, array


def test_parts_of_large_shards_do_not_read_all_of_them(tmp_path: Path) -> None:
    storage = CountingStorage(LocalStorage(tmp_path / "repo"))
    repo = zm.create(storage, {"inline-chunk-bytes": 0})
    session, array = _numbers(
        repo, shape=(4000,), shards=(4000,), chunks=(100,), dtype="i4", compressors=None
    )
    array[:] = np.arange(4000)
    session.commit("a shard")
    axes = [Axis(100, np.array([[950, 1150]]))]
    job = job_of(repo, axes, dimensions=["x"], variables=["a"], target_rows=10**6)
    storage.reset()
    found = pa.Table.from_batches(worker.run_arrow(job, [pa.record_batch({"id": [0]})]))
    assert found["a"].to_pylist() == list(range(950, 1150))
    given_out = sum(r.nbytes for r in storage.log if r.key.startswith("chunks/"))
    assert 0 < given_out < 4000


def test_chunks_that_cannot_be_decoded_are_told_as_by_zarr(tmp_path: Path) -> None:
    repo = zm.create(LocalStorage(tmp_path / "repo"))
    session, array = _numbers(repo, shape=(8,), chunks=(4,), dtype="i4", compressors="auto")
    array[:] = 1
    buffer = zarr.core.buffer.default_buffer_prototype().buffer
    asyncio.run(session.store.set("a/c/1", buffer.from_bytes(b"not what zstd makes")))
    session.commit("damaged")
    axes = [Axis(4, np.array([[0, 8]]))]
    job = job_of(repo, axes, dimensions=["x"], variables=["a"])
    with pytest.raises(RuntimeError, match="Zstd decompression error") as told:
        list(worker.run_arrow(job, [pa.record_batch({"id": [0]})]))
    with pytest.raises(RuntimeError) as by_zarr:
        zarr.open_array(repo.readonly_session().store, path="a", mode="r")[:]
    assert str(told.value) == str(by_zarr.value)


@pytest.mark.sweep
def test_memory_does_not_grow_with_the_number_of_small_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BLOCK_CHUNKS", 500)
    monkeypatch.setattr(worker, "BATCH_ROWS", 1000)
    monkeypatch.setattr(worker, "BATCH_BYTES", 10**6)
    repo = zm.create(LocalStorage(tmp_path / "repo"))
    session, array = _numbers(repo, shape=(40_000,), chunks=(4,), dtype="i4", compressors=None)
    array[:] = np.arange(40_000)
    session.commit("small chunks")

    def peak(cells: int) -> int:
        axes = [Axis(4, np.array([[0, cells]]))]
        job = job_of(repo, axes, dimensions=["x"], variables=["a"], target_rows=10**6)
        rows = 0
        tracemalloc.start()
        for batch in worker.run_arrow(job, [pa.record_batch({"id": [0]})]):
            rows += batch.num_rows
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert rows == cells
        return held

    peak(40_000)  # what is kept is kept
    # Only the plan of the axis grows: a few integers a chunk.
    assert peak(40_000) - peak(4000) < 9000 * 40


def test_tasks_read_each_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although shards are read whole, and chunks of many shards lie beside each other."""
    repo = zm.create(LocalStorage(tmp_path / "repo"))
    ds = xr.Dataset({"a": (("y", "x"), np.arange(1600.0).reshape(40, 40))})
    with repo.transaction(message="write") as store:
        encoding = {"a": {"chunks": (2, 2), "shards": (20, 20)}}
        ds.to_zarr(store, consolidated=False, encoding=encoding)
    options = ReadOptions(variables="a", target_rows=100)
    job = plan_read(repo, options, SparkFacts())
    read = Read(monkeypatch)
    found = pd.concat(worker.run(job, [pd.DataFrame({"id": np.arange(job.tasks)})]))
    assert sorted(found["a"]) == list(range(1600))
    assert sorted(at for at in read.chunks if at[0] == "a") == [
        ("a", y, x) for y in (0, 1) for x in (0, 1)
    ]
    by_chunk = plan_read(repo, replace(options, layout="chunk"), SparkFacts())
    assert [axis.chunk for axis in by_chunk.scan.axes] == [2, 2]
