"""Cutting an array into regions with so few chunk refs that one fits into memory.

How many refs a region has is estimated from the boxes and row counts of tables: the rows of a table
are assumed to be spread evenly in its box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from zarr_manifests.grid import Box, Coords


def batches(
    held: Sequence[tuple[Box, int]], most: int, cell: Coords | None = None
) -> Iterator[Box]:
    """Yield regions that hold about `most` rows each, and together all rows.

    A region is cut along the first axis on which it has more than one cell. So with cells of one
    chunk, the default, the coordinates of one region after the other are in C order.

    Parameters
    ----------
    held : sequence of (Box, int)
        The boxes of the tables and their numbers of rows. Regions without a table are left out.
    most : int
        Rows of a region; one that is a single cell may have more.
    cell : tuple of int, optional
        Shape of the cells that are not cut, counted from the origin.

    Examples
    --------
    >>> from zarr_manifests.grid import Box
    >>> from zarr_manifests.planning.layout.batches import batches
    >>> tables = [(Box((0, 0), (4, 5)), 20), (Box((4, 0), (8, 5)), 20)]
    >>> [(box.lo, box.hi) for box in batches(tables, 25)]
    [((0, 0), (4, 5)), ((4, 0), (8, 5))]
    """
    if not held:
        return
    around = Box.around(box for box, _ in held)
    shape = (len(held), around.ndim)
    lo = np.array([box.lo for box, _ in held], np.int64).reshape(shape)
    hi = np.array([box.hi for box, _ in held], np.int64).reshape(shape)
    # Rows a coordinate; the product of the sides may exceed int64.
    rows = np.array([count for _, count in held], np.float64)
    rows /= np.maximum((hi - lo).astype(np.float64).prod(axis=1), 1)
    steps = cell or (1,) * around.ndim
    due = [(around, np.arange(len(held)))]
    while due:
        region, inside = due.pop()
        shared = np.minimum(hi[inside], region.hi) - np.maximum(lo[inside], region.lo)
        inside, shared = inside[(shared > 0).all(axis=1)], shared[(shared > 0).all(axis=1)]
        if not len(inside):
            continue
        estimate = float((rows[inside] * shared.astype(np.float64).prod(axis=1)).sum())
        axis, at = _middle(region, steps)
        if estimate <= most or axis < 0:
            yield region
            continue
        below, above = list(region.hi), list(region.lo)
        below[axis] = above[axis] = at
        due += [(Box(tuple(above), region.hi), inside), (Box(region.lo, tuple(below)), inside)]


def _middle(region: Box, steps: Coords) -> tuple[int, int]:
    """The first axis on which the region has several cells, and where to cut it; -1 without one."""
    for axis, (lo, hi, step) in enumerate(zip(region.lo, region.hi, steps, strict=True)):
        first, count = lo // step, (hi - 1) // step - lo // step + 1
        if count > 1:
            return axis, (first + count // 2) * step
    return -1, 0


def parts[T](
    items: Iterable[T], weigh: Callable[[T], int], most: int, most_items: int | None = None
) -> Iterator[list[T]]:
    """Split the items, in order, into parts of at most that weight and number, or of one item.

    Examples
    --------
    >>> from zarr_manifests.planning.layout.batches import parts
    >>> list(parts(["ab", "c", "defg", "h"], len, 3)), list(parts("abc", len, 9, 2))
    ([['ab', 'c'], ['defg'], ['h']], [['a', 'b'], ['c']])
    """
    part: list[T] = []
    weight = 0
    for item in items:
        more = weigh(item)
        if part and (weight + more > most or len(part) == most_items):
            yield part
            part, weight = [], 0
        part.append(item)
        weight += more
    if part:
        yield part
