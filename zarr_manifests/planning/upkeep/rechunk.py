"""How the cells of an array are divided among the tasks that rewrite its chunks.

Invariants: every cell is in exactly one box, and every new chunk or shard lies within one box, so
that one task writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zarr_manifests.planning.scan import Axis, Scan, plan_scan


def plan_rechunk(
    shape: Sequence[int], old: Sequence[int], new: Sequence[int], target_cells: int
) -> Scan:
    """Boxes of cells that are rewritten together.

    A box is made of whole new chunks. As far as the target allows, its edges are edges of old
    chunks too, so that these are read once.

    Parameters
    ----------
    shape : sequence of int
        The array's shape.
    old, new : sequence of int
        Shapes of what is read and written as a whole: chunks, or shards if there are any.
    target_cells : int
        Cells that a box should have at most; a box with more is one new chunk.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.rechunk import plan_rechunk
    >>> [(box.lo, box.hi) for box in plan_rechunk((12, 4), (1, 4), (6, 2), 24)]
    [((0, 0), (6, 4)), ((6, 0), (12, 4))]
    """
    unit = list(new)
    for axis in reversed(range(len(shape))):
        common = math.lcm(old[axis], new[axis])
        if common >= shape[axis]:  # one span is aligned with everything
            common = -(-shape[axis] // new[axis]) * new[axis]
        if math.prod(unit) // unit[axis] * common <= target_cells:
            unit[axis] = common
    axes = [Axis(n, _whole(length)) for n, length in zip(unit, shape, strict=True)]
    return plan_scan(axes, target_rows=target_cells)


def _whole(length: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array([[0, length]] if length else np.empty((0, 2)), np.int64).reshape(-1, 2)


def reads_per_chunk(scan: Scan, old: Sequence[int]) -> float:
    """How many boxes read an old chunk, on average; 1 is the best.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.rechunk import plan_rechunk, reads_per_chunk
    >>> reads_per_chunk(plan_rechunk((12,), (12,), (3,), 3), (12,))
    4.0
    """
    factor = 1.0
    for spans, chunk, axis in zip(scan.spans, old, scan.axes, strict=True):
        if len(spans):
            touched = -(-spans[:, 1] // chunk) - spans[:, 0] // chunk
            factor *= int(touched.sum()) / -(-axis.size // chunk)
    return factor
