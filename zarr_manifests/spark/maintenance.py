"""Maintenance whose work Spark's executors do: the methods of `Repository`, with Spark tasks.

The driver plans, and only the driver changes the repository's root. Tasks read, check, write and
delete objects. A task that Spark runs twice does no harm.

Each function takes a Spark session and the repository: a path, a URL, a `Storage` or a
`Repository`. `storage_options` are those of `zarr_manifests.storage.from_url` for the path or URL.
All other arguments, what is returned and what is raised are as for the method that its docstring
names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from zarr_manifests.reports import (
    CollectionReport,
    CompactionReport,
    RepackReport,
    RewriteReport,
    StatisticsReport,
    VerifyReport,
)
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository
from zarr_manifests.rewriting import rewrite_chunks as rewrite
from zarr_manifests.runtime import Run
from zarr_manifests.spark.checks import check_shared
from zarr_manifests.spark.tasks import run_tasks
from zarr_manifests.storage import Storage

__all__ = ["compact", "compute_statistics", "garbage_collect", "rewrite_chunks", "verify"]

type Location = str | os.PathLike[str] | Storage | Repository


def verify(
    spark: SparkSession,
    url: Location,
    *,
    storage_options: Mapping[str, object] | None = None,
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
    repository = repository_of(url, storage_options)
    return repository.verify(run=_tasks(spark, repository))


def garbage_collect(
    spark: SparkSession,
    url: Location,
    grace: timedelta = timedelta(hours=24),
    *,
    dry_run: bool = False,
    storage_options: Mapping[str, object] | None = None,
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
    repository = repository_of(url, storage_options)
    run = _tasks(spark, repository)
    return repository.garbage_collect(grace, dry_run=dry_run, run=run)


def compact(
    spark: SparkSession,
    url: Location,
    branch: str = "main",
    mode: str = "major",
    *,
    min_live: float = 0.5,
    dry_run: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> CompactionReport | RepackReport:
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
    repository = repository_of(url, storage_options)
    how: Any = {"min_live": min_live, "dry_run": dry_run}
    return repository.compact(branch, mode, run=_tasks(spark, repository), **how)


def compute_statistics(
    spark: SparkSession,
    url: Location,
    paths: Sequence[str] | None = None,
    *,
    branch: str = "main",
    storage_options: Mapping[str, object] | None = None,
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
    repository = repository_of(url, storage_options)
    run = _tasks(spark, repository)
    return repository.compute_statistics(paths, branch=branch, run=run)


def rewrite_chunks(
    spark: SparkSession,
    url: Location,
    path: str,
    *,
    storage_options: Mapping[str, object] | None = None,
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
    repository = repository_of(url, storage_options)
    return rewrite(repository, path, **options, run=_tasks(spark, repository))


def _tasks(spark: SparkSession, repository: Repository) -> Run:
    """Runs calls as Spark tasks, which must be able to reach the repository."""
    check_shared(repository.storage)
    return partial(run_tasks, spark)
