"""Batches of a stream as transactions, written by `foreachBatch`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.errors import PySparkAttributeError
from pyspark.sql import DataFrame

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository
from zarr_manifests.spark.checks import check_shared
from zarr_manifests.spark.data_sink import QUERY_ID, app_of, batch_txn
from zarr_manifests.spark.write_dataframe import write_rows
from zarr_manifests.spark.write_plan import WriteOptions, WriteReport
from zarr_manifests.storage import Storage

__all__ = ["foreach_batch"]


def foreach_batch(
    url: str | os.PathLike[str] | Storage | Repository,
    target: str,
    *,
    dims: Sequence[str],
    mode: Literal["append", "overwrite-region"] = "append",
    append_dim: str | None = None,
    region: Mapping[str, Any] | None = None,
    missing: Literal["fill", "keep", "error"] = "keep",
    duplicates: Literal["error", "last"] = "error",
    order_by: str | None = None,
    tolerance: Mapping[str, Any] | None = None,
    txn_app_id: str | None = None,
    message: str | None = None,
    branch: str = "main",
    statistics: bool = True,
    buffer_bytes: int = 256 * 1024**2,
    max_tasks: int = 1000,
    on_report: Callable[[int, WriteReport], None] | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> Callable[[DataFrame, int], None]:
    """A function for `writeStream.foreachBatch` that writes each batch in one commit, exactly once.

    Each batch is a transaction of the query: its number is kept in the snapshots. A batch that
    comes again is not written again, whatever log of the checkpoint was lost, and whoever else runs
    on the same checkpoint. A batch without rows is committed too.

    Parameters
    ----------
    url, target, dims, mode, append_dim, region, duplicates, order_by, tolerance, branch, \
statistics, buffer_bytes, max_tasks
        As for `write_dataframe`.
    missing : "fill", "keep" or "error", default "keep"
        As for `write_dataframe`. With `keep`, a later batch can bring the rest of a chunk, or cells
        of labels that earlier batches have appended.
    txn_app_id : str, optional
        The name under which the number of the batch is kept, instead of the id of the query. Spark
        Connect does not tell the id, so it is needed there.
    message : str, optional
        The message of the commits; by default it names the batch.
    on_report : callable, optional
        Called with the number of each batch, and what was written.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

    Returns
    -------
    callable
        To be given to `foreachBatch`.

    Raises
    ------
    InvalidArgumentError
        If options contradict each other.
    NotARepositoryError
        If there is no repository.
    UnsupportedStorageError
        If other processes cannot reach it (`memory://`).

    Examples
    --------
    >>> from zarr_manifests.spark import foreach_batch
    >>> write = foreach_batch(  # doctest: +SKIP
    ...     "winds", "/", dims=["time", "lat", "lon"], append_dim="time"
    ... )
    >>> query = (  # doctest: +SKIP
    ...     rows.writeStream.foreachBatch(write).option("checkpointLocation", "winds-in").start()
    ... )
    """
    repository = repository_of(url, storage_options)
    check_shared(repository.storage)
    options = WriteOptions(
        target=target,
        dims=tuple(dims) if not isinstance(dims, str) else dims,
        mode=mode,
        append_dim=append_dim,
        region=region,
        missing=missing,
        duplicates=duplicates,
        order_by=order_by,
        tolerance={} if tolerance is None else tolerance,
        statistics=statistics,
        buffer_bytes=buffer_bytes,
        max_tasks=max_tasks,
    )
    return _BatchWriter(repository, options, branch, message, txn_app_id, on_report)


@dataclass(frozen=True, slots=True)
class _BatchWriter:
    """Writes batches."""

    repository: Repository
    options: WriteOptions
    branch: str
    message: str | None
    app: str | None
    on_report: Callable[[int, WriteReport], None] | None

    def __call__(self, rows: DataFrame, number: int) -> None:
        """Write a batch, unless that was done before."""
        txn = batch_txn(self.app or _app_of(rows), number)
        message = f"batch {number}" if self.message is None else self.message
        rows.persist()  # it is computed for the labels, too
        try:
            report = write_rows(
                rows, self.repository, self.options, self.branch, message, None, txn
            )
        finally:
            rows.unpersist()
        if self.on_report is not None:
            self.on_report(number, report)


def _app_of(rows: DataFrame) -> str:
    try:
        query_id = rows.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
    except PySparkAttributeError:  # Spark Connect: the context is in another process
        query_id = None
    if query_id is None:
        raise InvalidArgumentError(
            "this DataFrame does not say which query it is a batch of; name it by txn_app_id"
        )
    return app_of(query_id)
