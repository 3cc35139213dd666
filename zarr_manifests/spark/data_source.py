"""The data source `zarr_manifests`: `spark.read.format`, `df.write.format`, and views in SQL.

Spark makes a data source in a process of its own, asks it for its schema, pickles it, and plans the
read in another process. So `ManifestsDataSource` plans when it is asked for its schema, which pins
the snapshot; all later steps take that plan. It is the plan that `read` makes, and the same tasks
run it. If a schema is given, Spark makes the data source only when a query runs, and the snapshot
would be that of the query; so none may be given.

For a write, Spark makes it too, and asks only for a writer (`zarr_manifests.spark.data_sink`).

Filters are not pushed down: Spark keeps one plan for each relation, so a filter of one query would
take rows from another (`docs/adr/0035-pruning-is-asked-for.md`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, Final

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from zarr_manifests import repositories
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.repository import Repository
from zarr_manifests.spark.cell_rows import read
from zarr_manifests.spark.changed_rows import plan_changes
from zarr_manifests.spark.data_sink import BatchSink, Sink, StreamSink
from zarr_manifests.spark.job import Job, with_lease
from zarr_manifests.spark.options import CHANGES, STREAM, read_options, taken
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.spark.stream import ChangeStream, StreamOptions, same_columns
from zarr_manifests.spark.worker import JobReader, briefly
from zarr_manifests.storage import Storage

__all__ = ["ManifestsDataSource", "create_view", "register"]

_LEASE: Final = timedelta(days=1)


def register(spark: SparkSession) -> None:
    """Register the data source `zarr_manifests` with a session.

    Afterwards `spark.read.format("zarr_manifests").option(...).load(url)` and
    `CREATE TEMPORARY VIEW v USING zarr_manifests OPTIONS (path 'url', ...)` read repositories, and
    `df.write.format("zarr_manifests").mode("append").option(...).save(url)` writes to them.
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
        As for `read`: `variables`, `version`, `where`, ...

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
    """The variables of a repository, as Spark's data source.

    Parameters
    ----------
    options : mapping of str to str
        As `zarr_manifests.spark.options` lists them; `path` is the location.
    """

    facts: ClassVar[SparkFacts] = SparkFacts()

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._planned: tuple[_SourceAsked, Job] | None = None

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "zarr_manifests"

    @briefly()
    def schema(self) -> StructType:
        """The columns, as `read` has them."""
        return self._plan()[1].schema

    def _plan(self) -> tuple[_SourceAsked, Job]:
        """What is asked for, and the job of its rows, with a lease on their snapshot."""
        if self._planned is None:
            asked = _SourceAsked(self.options)
            options, repository = ReadOptions(**asked.read), asked.repository()
            if asked.changes:
                start, end = asked.changes["start"], asked.changes.get("end", "main")
                plan = plan_changes(repository, options, self.facts, start, end)
                job = plan.job(plan.cells.added)
            else:
                job = plan_read(repository, options, self.facts)
            self._planned = asked, with_lease(job, asked.lease)
        return self._planned

    @briefly()
    def reader(self, schema: StructType) -> DataSourceReader:
        """The tasks of the read.

        Raises
        ------
        InvalidArgumentError
            If the caller has given a schema, or options of a stream.
        """
        if self._planned is None:
            raise InvalidArgumentError(
                f"with the schema {schema.simpleString()[:200]}, Spark would choose the snapshot "
                "anew for each query: leave it out, and choose columns by the option variables"
            )
        asked, job = self._planned
        if asked.stream:
            raise InvalidArgumentError(
                f"only a stream takes the options {', '.join(STREAM)}: use readStream"
            )
        return JobReader(job)

    @briefly()
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """The stream of the cells that commits of a branch add.

        Raises
        ------
        InvalidArgumentError
            If the caller has given another schema, or options name one snapshot.
        """
        asked, job = self._plan()
        own = job.schema
        if not same_columns(schema, own):
            raise InvalidArgumentError(
                f"the schema {schema.simpleString()[:200]} is not that of the variables, "
                f"{own.simpleString()[:200]}: leave it out, and choose columns by the option "
                "variables"
            )
        if asked.changes:
            raise InvalidArgumentError(
                f"a stream does not take {' and '.join(CHANGES)}: use starting-snapshot"
            )
        names = [column.name for column in job.variables]
        options, stream = ReadOptions(**asked.read), StreamOptions(**asked.stream)
        return ChangeStream(asked.repository(), options, self.facts, stream, schema, names)

    @briefly()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """The tasks of a write, and its commit.

        Raises
        ------
        ManifestsError
            As for `zarr_manifests.spark.write_dataframe`, as far as rows need not be known.
        """
        return BatchSink(Sink.of(self.options, schema, overwrite=overwrite, facts=self.facts))

    @briefly()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """The tasks of a batch of a stream, and its commit.

        Raises
        ------
        ManifestsError
            As for `writer`; also if each batch would replace the ones before.
        """
        if overwrite:
            raise InvalidArgumentError(
                "a stream adds the rows of each batch: use the output mode append or update"
            )
        return StreamSink(Sink.of_stream(self.options, schema, facts=self.facts))


class _SourceAsked:
    """What options ask for: the arguments of `read`, of `changes` and of a stream."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._location, self.read = read_options(options)
        self.changes, self.stream = taken(self.read, CHANGES), taken(self.read, STREAM)
        # A stream holds its own.
        self.lease = self.read.pop("lease", None if self.stream else _LEASE)
        where = "virtual_containers", "authorize", "storage_options"
        self._opening = {name: self.read.pop(name) for name in where if name in self.read}

    def repository(self) -> Repository:
        """The repository, opened."""
        return repositories.open(self._location, **self._opening)
