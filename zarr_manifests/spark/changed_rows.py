"""What changed between two snapshots, as rows.

The driver finds the boxes of cells that changed from the deltas of the commits in between, and each
task reads the cells of some boxes, as for `read`. Rows are identified by the positions of their
cells. So coordinates must have the same values at both snapshots, as far as both have them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit

from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.grid import IndexArray
from zarr_manifests.reports import CellChanges
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository, changed_cells, resolved
from zarr_manifests.spark.cell_rows import rows
from zarr_manifests.spark.job import Job, with_lease
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read, restrict
from zarr_manifests.spark.source import Source
from zarr_manifests.storage import Storage

__all__ = ["CHANGE", "ChangePlan", "changes", "plan_changes"]

CHANGE: Final = "_change"
"""The column that says what happened to a cell, with `cells="all"`."""

_CELLS: Final = ("added", "all")


def changes(
    spark: SparkSession,
    url: str | os.PathLike[str] | Storage | Repository,
    start: str | None,
    end: str = "main",
    variables: str | Sequence[str] | None = None,
    *,
    cells: Literal["added", "all"] = "added",
    group: str = "/",
    where: Any = None,
    nan: Literal["null", "keep", "drop"] = "null",
    decode_times: bool = True,
    target_rows: int = 2 * 1024**2,
    max_tasks: int = 10_000,
    lease: timedelta | None = timedelta(days=1),
    storage_options: Mapping[str, object] | None = None,
) -> DataFrame:
    """Read the cells that changed from one snapshot to a later one, one row per cell.

    Columns and values are as `read` gives them at `end`. Only cells in stored chunks are rows: a
    chunk that was never written has none. Zarr does not store a chunk in which all cells have the
    fill value, unless told to (`write_empty_chunks`).

    A cell is added if it lies beyond the old shape, or in chunks of all variables that were absent.
    So the rows added over consecutive ranges are the rows of the table, each once, also where two
    appends fill one chunk. Compactions change nothing.

    Parameters
    ----------
    spark : SparkSession
        A Spark session.
    url : str, path, Storage or Repository
        The repository, as for `read`.
    start : str or None
        Any name of a version, as `Repository.readonly_session` takes it. With None, all cells of
        `end` are added.
    end : str, default "main"
        Likewise; `start` must be in its history.
    variables, group, where, nan, decode_times, target_rows, max_tasks, lease
        As for `read`.
    cells : "added" or "all", default "added"
        With `all` there is one more column, `_change`. It is `added`; `overwritten`, where a chunk
        was written again or deleted; `rewritten`, where a chunk was written again only to append to
        it, so that its cells may have the values they had; or `removed`, with the values that a
        cell had at `start`.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

    Returns
    -------
    pyspark.sql.DataFrame
        Without rows if nothing has changed.

    Raises
    ------
    SnapshotExpiredError
        If some of the range has expired; it may be a `HistoryExpiredError`.
    NotFoundError
        If there is no such branch, tag, group or variable at `end`.
    InvalidArgumentError
        If `start` is not in the history of `end`, chunks were moved to other positions in between,
        coordinates have other values now, or an option is wrong.
    UnsupportedStorageError
        If other processes cannot reach the repository (`memory://`).

    Examples
    --------
    >>> from zarr_manifests.spark import changes, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> changes(spark, "winds", "monday", "tuesday", ["u", "v"]).show()  # doctest: +SKIP
    """
    if cells not in _CELLS:
        listed = ", ".join(map(repr, _CELLS))
        raise InvalidArgumentError(f"cells cannot be {cells!r}; known: {listed}")
    options = ReadOptions(
        variables=variables,
        group=group,
        where=where,
        nan=nan,
        decode_times=decode_times,
        target_rows=target_rows,
        max_tasks=max_tasks,
    )
    repository = repository_of(url, storage_options)
    plan = plan_changes(repository, options, SparkFacts.of(spark), start, end)
    parts = [("added", plan.job(plan.cells.added))]
    if cells == "all":
        parts.append(("overwritten", plan.job(plan.cells.overwritten)))
        parts.append(("rewritten", plan.job(plan.cells.rewritten)))
        if len(plan.cells.removed):
            parts.append(("removed", plan.job_before(plan.cells.removed)))
    frames = []
    for word, job in parts:
        part = rows(spark, with_lease(job, lease))
        frames.append(part if cells == "added" else part.withColumn(CHANGE, lit(word)))
    return reduce(DataFrame.union, frames)


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """The cells that changed between two snapshots, and how to read them.

    Parameters
    ----------
    repository : Repository
        The repository.
    options : ReadOptions
        What to read and how, at the later snapshot.
    facts : SparkFacts
        Where tasks run.
    cells : CellChanges
        The boxes of cells.
    whole : Job
        The read of the whole of the later snapshot.
    """

    repository: Repository
    options: ReadOptions
    facts: SparkFacts
    cells: CellChanges
    whole: Job

    def job(self, boxes: IndexArray) -> Job:
        """The read of some boxes at the later snapshot."""
        return restrict(self.whole, boxes, self.options, self.facts)

    def job_before(self, boxes: IndexArray) -> Job:
        """The read of some boxes at the earlier snapshot."""
        options = replace(self.options, version=self.cells.start)
        before = plan_read(self.repository, options, self.facts)
        if before.schema != self.whole.schema:
            raise InvalidArgumentError(
                f"the columns at snapshot {self.cells.start}, {before.schema.simpleString()}, are "
                f"not those at {self.cells.end}, {self.whole.schema.simpleString()}, so removed "
                "cells do not fit into this table; read them at the first snapshot"
            )
        return restrict(before, boxes, options, self.facts)


def plan_changes(
    repository: Repository,
    options: ReadOptions,
    facts: SparkFacts,
    start: str | None,
    end: str,
) -> ChangePlan:
    """Find the cells that changed from `start` to `end`, and plan to read them.

    `start` and `end` are named as for `changes`; the options name no snapshot.

    Raises
    ------
    ManifestsError
        As for `changes`.
    """
    if options.layout != "long":
        raise InvalidArgumentError(
            f"changes has one row for each cell; only read takes layout={options.layout!r}"
        )
    last = resolved(repository, end)
    options = replace(options, version=last)
    whole = plan_read(repository, options, facts)
    first = None if start is None else resolved(repository, start)
    group = whole.group.rstrip("/")
    paths = [f"{group}/{column.name}" for column in whole.variables]
    if not paths:
        raise InvalidArgumentError(
            "all variables are coordinates, whose changes are not tracked; name another variable "
            "with variables=[...]"
        )
    cells = changed_cells(repository, paths, first, last)
    if first is not None and cells.old_shape is not None:
        _check_coordinates(repository, whole, first, last)
    return ChangePlan(repository, options, facts, cells, whole)


def _check_coordinates(repository: Repository, whole: Job, first: str, last: str) -> None:
    """Raise if a coordinate has other values now, or a variable has other dimensions."""
    try:
        old, new = (
            Source(
                repository.readonly_session(each),
                whole.group,
                decode_times=whole.decode_times,
            )
            for each in (first, last)
        )
    except NotFoundError as error:
        raise InvalidArgumentError(
            f"the variables were not in group {whole.group} at snapshot {first}, so their "
            "coordinates cannot be compared. Read the whole of a newer snapshot, and the changes "
            "from there on"
        ) from error
    dims = tuple(column.name for column in whole.dimensions)
    for column in whole.variables:
        was = tuple(map(str, old.encoded(column.name).dims)) if old.has(column.name) else dims
        if was != dims:
            raise InvalidArgumentError(
                f"{column.name} has the dimensions {', '.join(dims)} now, and had "
                f"{', '.join(was)} at snapshot {first}, so its rows cannot be compared"
            )
    for dim in dims:
        before, after = old.coordinate(dim), new.coordinate(dim)
        at = _first_difference(before, after)
        if at is not None:
            raise InvalidArgumentError(
                f"the coordinate {dim!r} has other values at snapshot {last} than at {first}, from "
                f"position {at} on, so positions do not identify rows. Read the whole of a newer "
                "snapshot, and the changes from there on"
            )


def _first_difference(before: Any, after: Any) -> int | None:
    """The first position at which the values differ; a value in place of a missing one does not."""
    if before is None or after is None:
        return None if before is after else 0
    size = min(len(before), len(after))
    was, now = pd.Series(before[:size]), pd.Series(after[:size])
    differ = np.flatnonzero(((was != now) & was.notna()).to_numpy(bool))
    return int(differ[0]) if len(differ) else None
