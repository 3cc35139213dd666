"""`ingest` by Spark's tasks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from zarr_manifests.reports import IngestReport
from zarr_manifests.repository import Repository
from zarr_manifests.spark.plan import SparkFacts
from zarr_manifests.spark.tasks import run_tasks
from zarr_manifests.storage import Storage
from zarr_manifests.xarray import ingest_files

__all__ = ["ingest"]


def ingest(
    spark: SparkSession,
    files: Iterable[str | os.PathLike[str]],
    url: str | os.PathLike[str] | Storage | Repository,
    *,
    append_dim: str,
    **options: Any,
) -> IngestReport:
    """`zarr_manifests.ingest`, read and written by Spark's tasks.

    Parameters
    ----------
    spark : SparkSession
        A Spark session, such as `zarr_manifests.spark.session()` returns.
    files : iterable of str or path
        Paths or URLs, in any order. Spark's workers must be able to open them.
    url : str, path, Storage or Repository
        Where the repository is, or is to be made. Spark's workers must be able to reach it.
    append_dim : str
        The dimension along which the files are joined.
    **options
        As for `zarr_manifests.ingest`.

    Returns
    -------
    IngestReport
        What went where; `str` says it.

    Raises
    ------
    UnsupportedStorageError
        If other processes cannot reach the repository (`memory://`).
    InvalidArgumentError, ConflictError, ImportError
        As for `zarr_manifests.ingest`.

    Examples
    --------
    >>> from pathlib import Path
    >>> from zarr_manifests.spark import ingest, session
    >>> year = Path("era5").glob("2024-*.nc")
    >>> report = ingest(session(), year, "era5.zarr", append_dim="time")  # doctest: +SKIP
    >>> print(report)  # doctest: +SKIP
    366 files added, in 1 commit: 9.12 GB in 71.2 s, 128 MB/s
    """
    parallelism = SparkFacts.of(spark).parallelism
    runner = ingest_files.TaskRunner(partial(run_tasks, spark), parallelism, elsewhere=True)
    return ingest_files.ingest(files, url, append_dim=append_dim, runner=runner, **options)
