"""Maintenance whose work Spark's executors do: the methods of `Repository`, with Spark tasks.

The driver plans, and only the driver changes the repository's root. Tasks read, check, write and
delete objects. A task that Spark runs twice does no harm.

Each function takes a Spark session and the repository: a path, a URL, a `Storage` or a
`Repository`. `storage_options` are those of `zarr_manifests.storage.from_url` for the path or URL.
All other arguments, what is returned and what is raised are as for the method that its docstring
names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from zarr_manifests.reports import (
    CollectionReport,
    CompactionReport,
    RewriteReport,
    StatisticsReport,
    VerifyReport,
)
from zarr_manifests.rewriting import rewrite_chunks as rewrite
from zarr_manifests.spark.plan import Location, shared_repository
from zarr_manifests.spark.tasks import run_tasks

__all__ = ["compact", "compute_statistics", "garbage_collect", "rewrite_chunks", "verify"]

type Options = Mapping[str, object] | None


def verify(
    spark: SparkSession, url: Location, *, storage_options: Options = None, **options: Any
) -> VerifyReport:
    """Read every object that can be reached; tasks read the chunks and compare their checksums.

    As `Repository.verify`.

    Examples
    --------
    >>> from zarr_manifests.spark import maintenance, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> maintenance.verify(spark, "winds").ok  # doctest: +SKIP
    True
    """
    return shared_repository(url, storage_options).verify(**options, run=partial(run_tasks, spark))


def garbage_collect(
    spark: SparkSession,
    url: Location,
    grace: timedelta = timedelta(hours=24),
    *,
    storage_options: Options = None,
    **options: Any,
) -> CollectionReport:
    """Delete the objects that no snapshot needs; the driver marks, and tasks delete.

    As `Repository.garbage_collect`.

    Examples
    --------
    >>> from zarr_manifests.spark import maintenance, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> maintenance.garbage_collect(spark, "winds", dry_run=True).kept  # doctest: +SKIP
    12
    """
    repository, run = shared_repository(url, storage_options), partial(run_tasks, spark)
    return repository.garbage_collect(grace, **options, run=run)


def compact(
    spark: SparkSession,
    url: Location,
    branch: str = "main",
    mode: str = "major",
    *,
    storage_options: Options = None,
    **options: Any,
) -> CompactionReport:
    """Bring the deltas of a branch together, or its packs; tasks write leaves, or copy chunks.

    Commits that land meanwhile stay on top. As `Repository.compact`.

    Examples
    --------
    >>> from zarr_manifests.spark import maintenance, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> maintenance.compact(spark, "winds", mode="full").deltas_after  # doctest: +SKIP
    0
    >>> maintenance.compact(spark, "winds", mode="packs").chunks  # doctest: +SKIP
    48
    """
    repository, run = shared_repository(url, storage_options), partial(run_tasks, spark)
    return repository.compact(branch, mode, **options, run=run)


def compute_statistics(
    spark: SparkSession,
    url: Location,
    paths: Sequence[str] | None = None,
    *,
    storage_options: Options = None,
    **options: Any,
) -> StatisticsReport:
    """Measure chunks, so that queries can leave out those that cannot match; tasks decode them.

    An array of few bytes is measured on the driver. As `Repository.compute_statistics`.

    Examples
    --------
    >>> from zarr_manifests.spark import maintenance, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> maintenance.compute_statistics(spark, "winds", ["/u"]).measured  # doctest: +SKIP
    132
    """
    repository, run = shared_repository(url, storage_options), partial(run_tasks, spark)
    return repository.compute_statistics(paths, **options, run=run)


def rewrite_chunks(
    spark: SparkSession,
    url: Location,
    path: str,
    *,
    storage_options: Options = None,
    **options: Any,
) -> RewriteReport:
    """Write an array anew with other chunks, shards or codecs, in one commit; tasks copy it.

    As `zarr_manifests.rewrite_chunks`.

    Examples
    --------
    >>> from zarr_manifests.spark import maintenance, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> how = {"chunks": (24, 90, 180), "dry_run": True}
    >>> maintenance.rewrite_chunks(spark, "winds", "/u", **how).chunks_after  # doctest: +SKIP
    132
    """
    repository, run = shared_repository(url, storage_options), partial(run_tasks, spark)
    return rewrite(repository, path, **options, run=run)
