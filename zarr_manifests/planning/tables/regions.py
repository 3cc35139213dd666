"""From a caller's region of an array to a box of its chunks.

Bounds of an axis are a slice without step, or `(start, stop)`. They work as for a list of that
length: negative bounds count from the end, and bounds beyond the end are clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box, Coords

type Bounds = slice | tuple[int | None, int | None]
"""Start and stop of a region on one axis."""


def chunk_box(grid: Box, region: Sequence[Bounds] | Box | None) -> Box:
    """The box of a grid (starting at 0) that a region in chunk coordinates selects.

    Raises
    ------
    InvalidArgumentError
        If the region has another number of axes than the grid, or a step.

    Examples
    --------
    >>> from zarr_manifests.grid import Box
    >>> from zarr_manifests.planning.tables.regions import chunk_box
    >>> chunk_box(Box((0, 0), (4, 9)), [slice(-2, None), (3, 100)])
    Box(lo=(2, 3), hi=(4, 9))
    """
    return _box(grid.hi, region, f"a grid of {grid.shape} chunks")


def cells_box(shape: Coords, chunk_shape: Coords, region: Sequence[Bounds]) -> Box:
    """The box of the chunks that hold any selected cell.

    Raises
    ------
    InvalidArgumentError
        If the region has another number of axes than the array, or a step.

    Examples
    --------
    >>> from zarr_manifests.planning.tables.regions import cells_box
    >>> cells_box((100,), (10,), [slice(5, 21)])
    Box(lo=(0,), hi=(3,))
    """
    cells = _box(shape, region, f"an array of {shape} cells")
    sides = list(zip(cells.lo, cells.hi, chunk_shape, strict=True))
    lo = tuple(a // max(n, 1) for a, _, n in sides)
    return Box(lo, tuple(-(-b // max(n, 1)) if b > a else a // max(n, 1) for a, b, n in sides))


def _box(shape: Coords, region: Sequence[Bounds] | Box | None, of: str) -> Box:
    if region is None:
        return Box((0,) * len(shape), shape)
    given: Sequence[Any] = (
        list(zip(region.lo, region.hi, strict=True)) if isinstance(region, Box) else region
    )
    try:
        if len(given) != len(shape):
            raise TypeError
        ranges = [_bounds(part).indices(n) for part, n in zip(given, shape, strict=True)]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{given!r} is not a region of {of}: give a slice without step, or (start, stop), for "
            "each axis"
        ) from error
    return Box(tuple(a for a, _, _ in ranges), tuple(max(a, b) for a, b, _ in ranges))


def _bounds(part: Any) -> slice:
    start, stop, step = (
        (part.start, part.stop, part.step) if isinstance(part, slice) else (*part, None)
    )
    if step is not None and index(step) != 1:
        raise ValueError
    return slice(start, stop)
