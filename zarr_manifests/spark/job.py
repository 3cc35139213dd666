"""The plan of one read, as it travels to Spark's workers.

It names a snapshot, columns and boxes of cells. It has neither data nor secrets, and its size
depends on the length of the axes, not on the number of cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from pyspark.sql.types import StructType

from zarr_manifests.grid import Box, IndexArray, grid_shape
from zarr_manifests.plain import plain_text
from zarr_manifests.planning.scan import Scan
from zarr_manifests.planning.zones.where import Where
from zarr_manifests.spark.schema import Column, chunk_columns, schema_of
from zarr_manifests.storage import Storage
from zarr_manifests.virtual.containers import VirtualContainer

__all__ = ["Containers", "Job", "Leased", "chunks_in"]

type Containers = tuple[tuple[str, VirtualContainer], ...]


@dataclass(frozen=True, slots=True)
class Leased:
    """The lease that a job began with.

    Parameters
    ----------
    since_s : float
        When it was taken, in seconds since 1970.
    duration : timedelta
        How long it lasts, if nobody renews it.
    """

    since_s: float
    duration: timedelta


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
    lease : Leased, optional
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
    lease: Leased | None = None

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
