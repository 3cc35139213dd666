"""What a `Where` leaves to read: positions along axes, and boxes of chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import tzinfo

import numpy as np
import pyarrow as pa

from zarr_manifests.grid import IndexArray
from zarr_manifests.planning.scan import Axis, runs_of
from zarr_manifests.planning.zones.where import Where
from zarr_manifests.spark.row_filter import kept
from zarr_manifests.spark.schema import Column, to_arrow
from zarr_manifests.spark.source import Source

__all__ = ["axis_where", "common", "empty_rows"]


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


def common(some: IndexArray, others: IndexArray) -> IndexArray:
    """The boxes of what is in both of two lists of disjoint boxes."""
    few, many = sorted((some, others), key=len)
    found = [np.empty((0, *many.shape[1:]), np.int64)]
    for lo, hi in few:
        both = np.stack([np.maximum(many[:, 0], lo), np.minimum(many[:, 1], hi)], axis=1)
        found.append(both[(both[:, 0] < both[:, 1]).all(axis=1)])
    return np.concatenate(found)
