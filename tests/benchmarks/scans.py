"""What is measured of Spark: rows from chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xarray as xr
import zarr
from contestants import Ours
from runner import Case, Figure, Watch

import zarr_manifests as zm

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SEED = 7
_TINY_CELLS = 4
_NAMES = ("time", "lat", "lon")


def scanning(case: Case) -> Iterator[Figure]:
    """Read all cells of a variable as rows; or as many rows that are made on the spot.

    Both give Spark Arrow batches of the same columns and rows, and Spark throws them away.
    """

    def frame(spark: SparkSession, url: str, cells: int) -> DataFrame:
        from zarr_manifests.spark import read

        rows = read(spark, url, "t")
        if case.contestant != "generated":
            return rows
        tasks = rows.rdd.getNumPartitions()
        made = _made(cells // tasks)

        def all_made(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for _ in range(batch.num_rows):
                    yield from made()

        return spark.range(0, tasks, 1, tasks).mapInArrow(all_made, rows.schema)

    yield from _scanning(case, frame)


def scanning_source(case: Case) -> Iterator[Figure]:
    """Read all cells through the data source, or through `read`; or a source that makes rows.

    The sources give Spark Arrow batches of the same columns and rows.
    """

    def frame(spark: SparkSession, url: str, cells: int) -> DataFrame:
        from zarr_manifests.spark import read, register

        if case.contestant == "read":
            return read(spark, url, "t")
        register(spark)
        rows = spark.read.format("zarr_manifests").option("variables", "t").load(url)
        if case.contestant != "generated":
            return rows
        tasks = rows.rdd.getNumPartitions()
        spark.dataSource.register(_source(tasks, _made(cells // tasks), rows.schema))
        return spark.read.format("generated").load()

    yield from _scanning(case, frame)


def _scanning(case: Case, frame: Callable[[SparkSession, str, int], DataFrame]) -> Iterator[Figure]:
    """Time a row of a frame over a repository of one variable, which Spark throws away."""
    from zarr_manifests.spark import session

    shape = (case.sizes["times"], 250, 400)
    cells = int(np.prod(shape))
    spark = session(master="local[2]")
    try:
        contestant = Ours(case.folder)
        contestant.create()
        store, commit = contestant.writer()
        coords = {name: np.arange(n, dtype=float) for name, n in zip(_NAMES, shape, strict=True)}
        rng = np.random.default_rng(_SEED)
        dataset = xr.Dataset({"t": (_NAMES, rng.random(shape, np.float32))}, coords)
        dataset.to_zarr(store, encoding={"t": {"chunks": (10, 250, 400)}}, consolidated=False)
        commit()
        rows = frame(spark, str(case.folder / "r"), cells)
        while True:
            with Watch() as watch:
                rows.write.format("noop").mode("overwrite").save()
            yield Figure(watch.seconds / cells)
    finally:
        spark.stop()


def asking(case: Case, *, of: str) -> Iterator[Figure]:
    """Read a frame's rows, take the mean at each time, or read one column; as rows or Parquet.

    The Parquet files have the same rows, written by Spark with its defaults. Where `aggregate`
    takes the means, rows are a contestant of their own; each chunk has several times.
    """
    from pyspark.sql.functions import avg

    from zarr_manifests.spark import aggregate, read, session

    shape = (case.sizes["times"], 250, 400)
    rng = np.random.default_rng(_SEED)
    coords = {name: np.arange(n, dtype=float) for name, n in zip(_NAMES, shape, strict=True)}
    dataset = xr.Dataset({"t": (_NAMES, rng.random(shape, np.float32))}, coords)
    encoding = {"t": {"chunks": (10, 250, 400)}}
    zm.write(dataset, case.folder / "r", message="cells", encoding=encoding)
    spark = session(master="local[2]")
    try:
        rows = read(spark, case.folder / "r", "t")
        if case.contestant == "parquet":
            rows.write.parquet(str(case.folder / "p"))
            rows = spark.read.parquet(str(case.folder / "p"))
        means = partial(rows.groupBy("time").agg, avg("t"))
        own = partial(aggregate, spark, case.folder / "r", {"t": ["mean"]}, by="time")
        asked: dict[str, Callable[[], DataFrame]] = {
            "rows": lambda: rows,
            "mean": means,
            "column": lambda: rows.select("t"),
            "aggregate": own if case.contestant == "zarr_manifests" else means,
        }
        while True:
            with Watch() as watch:
                asked[of]().write.format("noop").mode("overwrite").save()
            yield Figure(watch.seconds / int(np.prod(shape)))
    finally:
        spark.stop()


def _made(count: int) -> Callable[[], Iterator[pa.RecordBatch]]:
    """A task of so many rows, in batches as those that are read."""
    from zarr_manifests.spark.worker import BATCH_ROWS

    def rows() -> Iterator[pa.RecordBatch]:
        import numpy as np
        import pyarrow as pa

        for first in range(0, count, BATCH_ROWS):
            n = min(count - first, BATCH_ROWS)
            columns = {name: pa.array(np.zeros(n)) for name in ("time", "lat", "lon")}
            columns["t"] = pa.array(np.zeros(n, np.float32))
            yield pa.record_batch(columns)

    return rows


def _source(tasks: int, made: Callable[[], Iterator[pa.RecordBatch]], columns: Any) -> Any:
    """A data source of so many made tasks; its classes are local, so that they travel by value."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(tasks)]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            return made()

    class Generated(DataSource):
        @classmethod
        def name(cls) -> str:
            return "generated"

        def schema(self) -> Any:
            return columns

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader()

    return Generated


def scanning_one_of_four(case: Case) -> Iterator[Figure]:
    """Read one variable as rows, of a repository with three others; or of one that has only it."""
    shape = (case.sizes["times"], 250, 400)
    rng = np.random.default_rng(_SEED)
    names = ["t"] if case.contestant == "alone" else ["t", "u", "v", "w"]
    dataset = xr.Dataset({name: (_NAMES, rng.random(shape, np.float32)) for name in names})
    yield from _rows_of_t(case, dataset)


def scanning_where(case: Case) -> Iterator[Figure]:
    """Read rows where statistics leave out 90 % of the chunks; or all rows."""
    shape = (case.sizes["times"], 250, 400)
    rng = np.random.default_rng(_SEED)
    # Halved, so that no value is rounded up to the bound.
    rising = rng.random(shape, np.float32) / 2
    rising += (np.arange(shape[0]) // 10).astype(np.float32)[:, None, None]
    where = None if case.contestant == "everything" else f"t >= {shape[0] // 10 * 0.9}"
    dataset = xr.Dataset({"t": (_NAMES, rising)})
    yield from _rows_of_t(case, dataset, where)


def _rows_of_t(case: Case, dataset: xr.Dataset, where: str | None = None) -> Iterator[Figure]:
    """Write the dataset, and read `t` again and again; Spark throws the rows away."""
    import zarr_manifests as zm
    from zarr_manifests.spark import read, session

    encoding = {name: {"chunks": (10, 250, 400)} for name in dataset.data_vars}
    zm.write(dataset, case.folder / "r", message="cells", encoding=encoding)
    spark = session(master="local[2]")
    try:
        while True:
            with Watch() as watch:
                rows = read(spark, case.folder / "r", "t", where=where)
                rows.write.format("noop").mode("overwrite").save()
            yield Figure(watch.seconds)
    finally:
        spark.stop()


def scanning_tiny_chunks(case: Case) -> Iterator[Figure]:
    """Make rows of all cells of very many chunks, as a task does; or decode them with Zarr.

    The figure is processor time. Zarr decodes a few of the chunks only.
    """
    from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
    from zarr_manifests.spark.worker import run_arrow

    chunks, by_zarr = case.sizes["chunks"], case.sizes["chunks by Zarr"]
    elsewhere = case.folder / "files"
    elsewhere.mkdir()
    cells = np.arange(chunks * _TINY_CELLS, dtype="<f4")
    (elsewhere / "cells").write_bytes(cells.tobytes())
    containers = {"raw": elsewhere}
    repository = zm.create(case.folder / "r", virtual_containers=containers)
    session = repository.writable_session("main")
    like = zarr.create_array(
        session.store,
        name="t",
        shape=cells.shape,
        chunks=(_TINY_CELLS,),
        dtype="f4",
        compressors=None,
        dimension_names=["x"],
    )
    length = _TINY_CELLS * like.dtype.itemsize
    index = np.arange(chunks)
    session.store.set_virtual_refs(
        "t",
        index[:, None],
        [(elsewhere / "cells").as_uri()],
        np.zeros(chunks, np.int64),
        index * length,
        np.full(chunks, length),
    )
    session.commit("cells")
    store = repository.readonly_session().store
    job = plan_read(repository, ReadOptions(variables="t"), SparkFacts(parallelism=2))
    while True:
        with Watch() as watch:
            if case.contestant == "Zarr":
                found = zarr.open_array(store, path="t", mode="r")[: by_zarr * _TINY_CELLS]
                done = len(found) // _TINY_CELLS
            else:
                tasks = pa.record_batch({"id": pa.array(np.arange(job.tasks))})
                rows = sum(batch.num_rows for batch in run_arrow(job, [tasks]))
                done = rows // _TINY_CELLS
        assert done == (by_zarr if case.contestant == "Zarr" else chunks)
        figure = watch.figure(done)
        yield replace(figure, value=figure.cpu_seconds)
