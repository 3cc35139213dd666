"""The positions along axes, and the boxes of chunks, that a `Where` may match."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import tzinfo
from typing import Any, Final

import numpy as np
import pyarrow as pa

from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.planning.scan import Axis, runs_of
from zarr_manifests.planning.zones.skipping import boxes_of
from zarr_manifests.planning.zones.where import Comparison, Where
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.session import Session
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.row_filter import kept
from zarr_manifests.spark.schema import Column, to_arrow
from zarr_manifests.spark.source import Source

__all__ = ["axis_where", "boxes_where", "common", "empty_rows"]

_MOST_CHUNKS: Final = 2**22
"""Most chunks that are listed to align boxes."""
_MOST_POSITIONS: Final = 2**24
"""Longest coordinate that is compared again, so that fewer statistics are looked at."""


def empty_rows(columns: Sequence[Column]) -> pa.Table:
    """A table with these columns and no rows."""
    return pa.schema([(column.name, column.arrow) for column in columns]).empty_table()


def axis_where(
    axis: Axis, source: Source, column: Column, where: Where, zone: tzinfo, *, nan_is_null: bool
) -> Axis:
    """The axis with only the positions whose coordinate a where keeps."""
    mine = tuple(each for each in where.comparisons if each.column == column.name)
    if not mine or not axis.size:
        return axis
    own = Where(mine)
    coordinate = source.coordinate(column.name)
    if coordinate is not None:
        values = to_arrow(coordinate, column, nan_is_null=nan_is_null)
        number = pa.array(np.arange(len(values)))
        rows = kept(pa.table([values, number], [column.name, "number"]), own, zone).column(1)
        mask = np.zeros(len(values), bool)
        mask[rows.to_numpy()] = True
        runs = runs_of(mask)
    else:
        runs = _positions_where(own, column.name, int(axis.runs[-1, 1]), zone)
    both = common(axis.runs[:, :, None], runs[:, :, None])[:, :, 0]
    return Axis(axis.chunk, both[np.argsort(both[:, 0])])


def _positions_where(where: Where, name: str, size: int, zone: tzinfo) -> IndexArray:
    """The runs of positions below `size` that a where keeps, without listing the positions."""
    edges = {0, size}
    for comparison in where.comparisons:
        for value in comparison.values:
            if isinstance(value, int | float):
                edges |= {math.floor(value), math.floor(value) + 1}
    # Between two edges, all positions compare alike.
    starts = np.array(sorted(edge for edge in edges if 0 <= edge < size), np.int64)
    stops = np.append(starts[1:], size)
    table = pa.table([pa.array(starts), pa.array(np.arange(len(starts)))], [name, "number"])
    rows = kept(table, where, zone).column(1).to_numpy()
    joined = runs_of(np.isin(np.arange(len(starts)), rows))
    return np.stack([starts[joined[:, 0]], stops[joined[:, 1] - 1]], axis=1)


def boxes_where(
    session: Session, source: Source, job: Job, where: Where
) -> tuple[IndexArray | None, list[ChunkSelection]]:
    """The boxes of cells (int64[n, 2, ndim]) that statistics leave; None for everything.

    They are whole chunks of the job's scan. Variables with the same chunks are looked at together.
    """
    names = {column.name for column in job.variables}
    dims = [column.name for column in job.dimensions]
    alike: dict[tuple[Any, ...], list[Comparison]] = {}
    for comparison in where.comparisons:
        if comparison.column in names:
            variable = source.encoded(comparison.column)
            chunk_shape = source.stored_chunk_shape(comparison.column)
            alike.setdefault((variable.dims, variable.shape, chunk_shape), []).append(comparison)
    shape = [int(axis.runs[-1, 1]) for axis in job.scan.axes]
    found: IndexArray | None = None
    selections = []
    for (own_dims, own_shape, chunk_shape), comparisons in alike.items():
        small = {dim for dim, n in zip(own_dims, own_shape, strict=True) if n <= _MOST_POSITIONS}
        along = [each for each in where.comparisons if each.column in small]
        selection = session.chunks_where(
            f"{source.group.rstrip('/')}/{comparisons[0].column}",
            Where((*comparisons, *along)),
            nan_matches=job.nan == "keep",
            time_zone=job.time_zone,
            decode_times=job.decode_times,
        )
        selections.append(selection)
        if selection.selected == selection.chunks:
            continue
        boxes = np.zeros((len(selection.boxes), 2, len(dims)), np.int64)
        boxes[:, 1] = shape
        for number, (dim, chunk) in enumerate(zip(own_dims, chunk_shape, strict=True)):
            boxes[:, :, dims.index(dim)] = selection.boxes[:, :, number] * chunk
        boxes = _aligned(boxes, [axis.chunk for axis in job.scan.axes])
        found = boxes if found is None else common(found, boxes)
    return found, selections


def _aligned(boxes: IndexArray, chunk_shape: Sequence[int]) -> IndexArray:
    """Disjoint boxes of whole chunks around some boxes; the same if there are too many chunks."""
    lo, hi = boxes[:, 0] // chunk_shape, -(-boxes[:, 1] // chunk_shape)
    edges = np.stack([lo, hi], axis=1)
    if not len(boxes) or np.array_equal(edges * chunk_shape, boxes):
        return boxes
    if int((hi - lo).prod(axis=1).sum()) > _MOST_CHUNKS:
        return boxes
    region = Box.around_coords(np.concatenate([lo, hi - 1]))
    each = (Box(tuple(a), tuple(b)) for a, b in edges.tolist())
    numbers = [box.carried(np.arange(box.size), region) for box in each]
    found = boxes_of(np.unique(np.concatenate(numbers)), region)
    return np.asarray(found * np.array(chunk_shape), np.int64)


def common(some: IndexArray, others: IndexArray) -> IndexArray:
    """The boxes of what is in both of two lists of disjoint boxes."""
    few, many = sorted((some, others), key=len)
    found = [np.empty((0, *many.shape[1:]), np.int64)]
    for lo, hi in few:
        both = np.stack([np.maximum(many[:, 0], lo), np.minimum(many[:, 1], hi)], axis=1)
        found.append(both[(both[:, 0] < both[:, 1]).all(axis=1)])
    return np.concatenate(found)
