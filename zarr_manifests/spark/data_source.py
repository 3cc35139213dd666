"""The data source `zarr_manifests`: `spark.read.format`, and views in SQL.

Spark makes a data source in a process of its own, pickles it, and plans the read in another one.
So `ManifestsDataSource` plans when it is made, which pins the snapshot; all later steps take that
plan. It is the plan that `read` makes, and the same tasks run it. If a schema is given, Spark makes
the data source only when a query runs, and the snapshot would be that of the query; so none may be
given.

Filters are not pushed down: Spark keeps one plan for each relation, so a filter of one query would
take rows from another (`docs/adr/0035-pruning-is-asked-for.md`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.repository import Repository
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.options import read_options
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.spark.read import read
from zarr_manifests.spark.worker import partition_batches
from zarr_manifests.storage import Storage

__all__ = ["ManifestsDataSource", "create_view", "register"]


def register(spark: SparkSession) -> None:
    """Register the data source `zarr_manifests` with a session.

    Afterwards `spark.read.format("zarr_manifests").option(...).load(url)` and
    `CREATE TEMPORARY VIEW v USING zarr_manifests OPTIONS (path 'url', ...)` read repositories.
    `spark.sql.session.timeZone` and `spark.sql.caseSensitive` count as they are now; register again
    after you change them.

    The first query through a data source is slow, since Spark starts processes to plan it. In
    Python, prefer `read`, which is also faster afterwards.

    Parameters
    ----------
    spark : SparkSession
        A Spark session.

    Examples
    --------
    >>> from zarr_manifests.spark import register, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> register(spark)  # doctest: +SKIP
    >>> winds = spark.read.format("zarr_manifests").load("winds")  # doctest: +SKIP
    """
    # Spark's processes do not know the session, so the class tells them what planning needs.
    members = {"facts": SparkFacts.of(spark)}
    spark.dataSource.register(type("ManifestsDataSource", (ManifestsDataSource,), members))


def create_view(
    spark: SparkSession,
    name: str,
    url: str | os.PathLike[str] | Storage | Repository,
    **options: Any,
) -> None:
    """Create or replace a temporary view of variables, to be queried in SQL.

    It reads as `read` does, not through the data source. It stays at the snapshot that was current
    when it was made.

    Parameters
    ----------
    spark : SparkSession
        A Spark session.
    name : str
        Name of the view.
    url : str, path, Storage or Repository
        The repository.
    **options
        As for `read`: `variables`, `tag`, `where`, ...

    Raises
    ------
    ManifestsError
        As for `read`.

    Examples
    --------
    >>> from zarr_manifests.spark import create_view, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> create_view(spark, "winds", "winds", variables=["u", "v"])  # doctest: +SKIP
    >>> spark.sql("SELECT avg(u) FROM winds").show()  # doctest: +SKIP
    """
    read(spark, url, **options).createOrReplaceTempView(name)


class ManifestsDataSource(DataSource):
    """The variables of one snapshot, as Spark's data source.

    Parameters
    ----------
    options : mapping of str to str
        As `zarr_manifests.spark.options` lists them; `path` is the location.

    Raises
    ------
    ManifestsError
        As for `zarr_manifests.spark.read`.
    """

    facts: ClassVar[SparkFacts] = SparkFacts()

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._inferred = False
        try:
            self._job = _plan(options, self.facts)
        except ManifestsError as error:
            # Spark shows the whole traceback, and the advice below it.
            raise error.with_traceback(None) from None

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "zarr_manifests"

    def schema(self) -> StructType:
        """The columns, as `read` has them."""
        self._inferred = True
        return self._job.schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """The tasks of the read.

        Raises
        ------
        InvalidArgumentError
            If the caller has given a schema.
        """
        if not self._inferred:
            raise InvalidArgumentError(
                f"the schema {schema.simpleString()[:200]} is given, so this would not stay at one "
                "snapshot: leave it out, and choose columns by the option variables"
            )
        return _Reader(self._job)


class _Reader(DataSourceReader):
    """One partition for each task of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._job.tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # For a job without tasks, Spark makes a partition without a value.
        number = partition.value
        return iter(()) if number is None else partition_batches(self._job, number)


def _plan(options: Mapping[str, str], facts: SparkFacts) -> Job:
    location, arguments = read_options(options)
    containers = arguments.pop("virtual_containers", None)
    repository = Repository.open(location, virtual_containers=containers)
    return plan_read(repository, ReadOptions(**arguments), facts)
