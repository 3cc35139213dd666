"""The plan of one read, as it travels to Spark's workers, and the lease on its snapshot.

A plan names a snapshot, columns and boxes of cells. It has neither data nor secrets, and its size
depends on the length of the axes, not on the number of cells.

A DataFrame is lazy, and Spark does not say when the last one that needs a snapshot is gone. So a
read leaves a lease behind that nobody gives up: it ends when its duration is over. A task that
begins when half of the duration or more is over leaves it again. So a lease covers a job of any
length, as long as tasks keep beginning.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import numpy as np
from pyspark.sql.types import StructType

from zarr_manifests import repositories
from zarr_manifests.errors import ManifestsError, StorageError
from zarr_manifests.grid import Box, IndexArray, grid_shape
from zarr_manifests.planning.scan import Scan
from zarr_manifests.planning.zones.where import Where
from zarr_manifests.spark.schema import Column, chunk_columns, schema_of
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import place_of
from zarr_manifests.texts import plain_text
from zarr_manifests.virtual.containers import VirtualContainer

__all__ = ["Containers", "Job", "LeftLease", "chunks_in", "with_lease"]

_LOG = logging.getLogger(__name__)
_RENEWED: Final = 0.5 + 0.3 * os.urandom(1)[0] / 255
"""After which share of the duration this process renews: not all workers at the same moment."""
_left_s: Final[dict[tuple[Hashable, str, timedelta], float]] = {}
"""When a lease was left, as far as this process knows: by repository, snapshot and duration."""

type Containers = tuple[tuple[str, VirtualContainer], ...]


@dataclass(frozen=True, slots=True)
class LeftLease:
    """A lease that was left on a snapshot.

    Parameters
    ----------
    storage : Storage
        The repository's storage.
    snapshot_id : str
        The snapshot.
    duration : timedelta
        How long it lasts, if nobody renews it.
    since_s : float
        When it was left, in seconds since 1970.
    """

    storage: Storage
    snapshot_id: str
    duration: timedelta
    since_s: float

    @classmethod
    def leave(
        cls, storage: Storage, snapshot_id: str, duration: timedelta, since_s: float = 0.0
    ) -> LeftLease:
        """Leave a lease, unless the last one known, or that since a moment, is not half over.

        There is one for each snapshot and duration. Where the storage refuses to be written, no
        lease is left, and the log says so.

        Raises
        ------
        SnapshotExpiredError
            If the snapshot has expired.
        """
        key = (place_of(storage), snapshot_id, duration)
        since_s = max(since_s, _left_s.get(key, 0.0))
        if time.time() >= since_s + _RENEWED * duration.total_seconds():
            owner = f"Spark jobs on {snapshot_id}, {duration}"
            repository = repositories.open(storage)
            try:
                with repository.lease(snapshot_id, duration, owner=owner, instead=True) as lease:
                    lease.keep()
            except StorageError:
                _LOG.warning("no lease on %s, which cannot be written", repository, exc_info=True)
            since_s = _left_s[key] = time.time()
        return cls(storage, snapshot_id, duration, since_s)

    def renew(self) -> None:
        """Leave it again, if half of its duration is over.

        A task goes on without it: what it reads may still be there, and else its error says so.
        """
        try:
            self.leave(self.storage, self.snapshot_id, self.duration, self.since_s)
        except ManifestsError:
            _LOG.warning(
                "the lease on snapshot %s was not renewed", self.snapshot_id, exc_info=True
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all tasks of a read have in common.

    Parameters
    ----------
    storage : Storage
        The repository's storage.
    containers : tuple of (str, VirtualContainer)
        The repository's containers, by name.
    snapshot_id, group : str
        The snapshot and group to read.
    dimensions, variables : tuple of Column
        What is read; the dimensions in order of the variables' axes. A variable may lack some.
    shape : tuple of int
        The cells along each dimension, selected or not.
    scan : Scan
        The selected cells, cut into boxes.
    tasks : int
        Number of tasks.
    nan : str
        `keep`, `null` or `drop`.
    layout : str, default "long"
        Whether a row is a cell (`long`) or a `chunk`.
    parts : int64[n, 2, ndim], optional
        Boxes of cells to read instead of the scan's, disjoint.
    starts : int64[tasks + 1], optional
        With `parts`: where each task's begin, and the end of the last.
    decode_times : bool, default True
        Whether CF times are decoded.
    where : Where, optional
        Which rows to keep.
    time_zone : str, default "UTC"
        The time zone of times in `where` that have none.
    lease : LeftLease, optional
        The lease on the snapshot that tasks renew.
    """

    storage: Storage
    containers: Containers = ()
    snapshot_id: str
    group: str
    dimensions: tuple[Column, ...]
    variables: tuple[Column, ...]
    shape: tuple[int, ...]
    scan: Scan
    tasks: int
    nan: str
    layout: str = "long"
    parts: IndexArray | None = None
    starts: IndexArray | None = None
    decode_times: bool = True
    where: Where | None = None
    time_zone: str = "UTC"
    lease: LeftLease | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of a row."""
        if self.layout == "chunk":
            return chunk_columns(self.dimensions, self.variables)
        return (*self.dimensions, *self.variables)

    @property
    def schema(self) -> StructType:
        """The schema of the rows."""
        return schema_of(self.columns)

    @property
    def grid(self) -> Box:
        """The chunks of whole variables; where these differ, the larger ones."""
        chunk_shape = [axis.chunk for axis in self.scan.axes]
        return Box((0,) * len(self.shape), grid_shape(self.shape, chunk_shape))

    def chunks(self) -> IndexArray:
        """The boxes of chunks (int64[n, 2, ndim]) of the grid that tasks read, disjoint."""
        parts = self.parts
        if parts is None:
            cells = [(box.lo, box.hi) for box in self.scan]
            parts = np.array(cells, np.int64).reshape(len(cells), 2, len(self.shape))
        chunk = np.array([axis.chunk for axis in self.scan.axes], np.int64)
        # A box has selected cells in each of its chunks.
        return np.stack([parts[:, 0] // chunk, -(-parts[:, 1] // chunk)], axis=1)

    @property
    def name(self) -> str:
        """What is read, as plans show it: the place and version, the condition, how much."""
        where = f" where {self.where.sql[:500]}" if self.where else ""
        read = f"{chunks_in(self.chunks()):,} of {self.grid.size:,} chunks"
        place = f"{self.storage.url} at {self.snapshot_id}"
        return plain_text(f"zarr_manifests {place}, {self.group}{where}: {read}")

    def boxes(self, task: int) -> Iterator[Box]:
        """The boxes of cells that the task with that number reads."""
        if self.parts is not None and self.starts is not None:
            for part in self.parts[self.starts[task] : self.starts[task + 1]].tolist():
                yield Box(tuple(part[0]), tuple(part[1]))
            return
        count = len(self.scan)
        for number in range(task * count // self.tasks, (task + 1) * count // self.tasks):
            yield self.scan[number]


def chunks_in(boxes: IndexArray) -> int:
    """The number of chunks, or of cells, in disjoint boxes (int64[n, 2, ndim])."""
    return int((boxes[:, 1] - boxes[:, 0]).prod(axis=1).sum())


def with_lease(job: Job, duration: timedelta | None) -> Job:
    """The job, on whose snapshot a lease was left for a duration, if it reads anything.

    Raises
    ------
    SnapshotExpiredError
        If the snapshot has expired.
    """
    if duration is None or not job.tasks:
        return job
    return replace(job, lease=LeftLease.leave(job.storage, job.snapshot_id, duration))
