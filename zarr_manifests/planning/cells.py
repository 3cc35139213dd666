"""Where rows go: labels to positions, positions to bins of whole chunks.

A write from rows cuts its region into *bins*: boxes of whole chunks that fit a budget of cells. A
cell has a *key*, a number that says its bin and its offset there. Tables by position make keys with
one addition for each axis, so millions of rows take no loop.

Invariants: a chunk is in one bin; keys of different cells differ; keys sort by bin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.scan import Axis, Scan, plan_scan

_NOWHERE: Final = -1
_MOST_BINS: Final = 2**40


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """The labels of an axis, to find positions by. Made by `Lookup.of`.

    Parameters
    ----------
    ordered : ndarray
        The labels, ascending.
    positions : int64[n]
        The position of each.
    tolerance : float or timedelta64, optional
        How far a value may be from its label; None if it has to equal it.
    step : float, optional
        The distance of labels that are about evenly spaced; their numbers are then computed.
    """

    ordered: npt.NDArray[Any]
    positions: IndexArray
    tolerance: Any = None
    step: float | None = None

    @staticmethod
    def of(name: str, labels: npt.NDArray[Any], tolerance: Any = None) -> Lookup:
        """The lookup of an axis with these labels; missing ones (NaN, NaT) are never found.

        Raises
        ------
        InvalidArgumentError
            If a label is there twice.

        Examples
        --------
        >>> import numpy as np
        >>> from zarr_manifests.planning.cells import Lookup
        >>> Lookup.of("lat", np.array([60.0, 45.0, 30.0])).find(np.array([30.0, 60.0, 50.0]))
        array([ 2,  0, -1])
        """
        positions = np.flatnonzero(labels == labels)
        order = np.argsort(labels[positions], kind="stable")
        positions = positions[order].astype(np.int64)
        ordered = labels[positions]
        again = np.flatnonzero(ordered[1:] == ordered[:-1])
        if again.size:
            raise InvalidArgumentError(
                f"the label {ordered[again[0]]} occurs twice along {name!r}, so the cell of a row "
                "is not unique"
            )
        return Lookup(ordered, positions, tolerance, _even_step(ordered))

    def find(self, values: npt.NDArray[Any]) -> IndexArray:
        """The positions of these values (of the labels' type); -1 for those that are no label."""
        if not len(self.ordered):
            return np.full(len(values), _NOWHERE, np.int64)
        at = self._guess(values) if self.step is not None else self._nearest(values)
        near = self.ordered.take(at)
        with np.errstate(invalid="ignore"):
            if self.tolerance is None:
                found = near == values
            else:
                found = np.abs(near - values) <= self.tolerance
        positions: IndexArray = self.positions.take(at)
        if not found.all():
            positions[~found] = _NOWHERE
        return positions

    def _guess(self, values: npt.NDArray[Any]) -> IndexArray:
        """Numbers of the nearest labels, if values are near to any."""
        assert self.step is not None
        with np.errstate(invalid="ignore", over="ignore"):
            far = (values - self.ordered[0]).astype(np.float64, copy=False) / self.step
            np.rint(far, out=far)
            np.fmax(far, 0, out=far)  # NaN, too, becomes 0
            np.fmin(far, len(self.ordered) - 1, out=far)
            return np.asarray(far, np.int64)

    def _nearest(self, values: npt.NDArray[Any]) -> IndexArray:
        right = np.searchsorted(self.ordered, values)
        last = len(self.ordered) - 1
        if self.tolerance is None:
            return np.minimum(right, last)
        left, right = np.clip(right - 1, 0, last), np.clip(right, 0, last)
        with np.errstate(invalid="ignore", over="ignore"):
            nearer = values - self.ordered[left] <= self.ordered[right] - values
        return np.where(nearer, left, right)

    def label_at(self, position: int) -> Any:
        """The label at a position; None if it is missing."""
        at = np.flatnonzero(self.positions == position)
        return self.ordered[at[0]] if at.size else None


def _even_step(ordered: npt.NDArray[Any]) -> float | None:
    """The mean distance of labels, if it is enough to number each of them."""
    if len(ordered) < 2 or ordered.dtype.kind == "O":
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        far = (ordered - ordered[0]).astype(np.float64)
        step = float(far[-1]) / (len(ordered) - 1)
        if not (0 < step < np.inf) or (far < 0).any():
            return None
        even = np.abs(far / step - np.arange(len(ordered))) < 0.4
    return step if even.all() else None


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """The bins of a region: there are `len(bins)`. Made by `Bins.of`.

    Parameters
    ----------
    region : Box
        The cells that are written.
    unit : tuple of int
        The cells, by axis, that are written together: the chunks of all arrays.
    scan : Scan
        The region cut into boxes, one for each bin.
    shape : tuple of int
        Cells, by axis, of the largest bin.
    bits : int
        Lower bits of a key that are the offset in the bin.
    tables : tuple of int64[n]
        By axis and position in the region: what it adds to a key.
    """

    region: Box
    unit: Coords
    scan: Scan
    shape: Coords
    bits: int
    tables: tuple[IndexArray, ...]

    @staticmethod
    def of(region: Box, unit: Coords, *, cells: int, least: int = 1) -> Bins:
        """Cut a region of cells into bins.

        Parameters
        ----------
        region : Box
            The cells.
        unit : tuple of int
            Cells, by axis, that have to be in one bin.
        cells : int
            How many cells a bin may have; a larger one is a single unit.
        least : int, default 1
            How many bins there should be, if there are as many units.

        Raises
        ------
        InvalidArgumentError
            If there are more cells than 63 bits can number.
        """
        sides = list(zip(region.lo, region.hi, strict=True))
        runs = [
            np.array([[lo, hi]] if hi > lo else [], np.int64).reshape(-1, 2) for lo, hi in sides
        ]
        axes = [Axis(length, run) for length, run in zip(unit, runs, strict=True)]
        scan = plan_scan(axes, target_rows=max(cells, 1), min_tasks=max(least, 1))
        lengths = [spans[:, 1] - spans[:, 0] for spans in scan.spans]
        shape = tuple(int(each.max(initial=0)) for each in lengths)
        bits = max(math.prod(shape) - 1, 0).bit_length()
        if len(scan) > _MOST_BINS or len(scan).bit_length() + bits > 63:
            raise InvalidArgumentError(
                f"a region of {len(scan)} times {math.prod(shape)} cells is too large for one "
                "write; write parts of it"
            )
        tables: list[IndexArray] = []
        bin_step, cell_step = 1, 1
        for (lo, hi), spans, length in reversed(list(zip(sides, scan.spans, shape, strict=True))):
            at = np.arange(lo, hi)
            span = np.searchsorted(spans[:, 1], at, "right")
            within = at - spans[span, 0] if len(at) else at
            tables.insert(0, (span * bin_step << bits) + within * cell_step)
            bin_step, cell_step = bin_step * len(spans), cell_step * length
        return Bins(region, unit, scan, shape, bits, tuple(tables))

    def __len__(self) -> int:
        return len(self.scan)

    def box(self, number: int) -> Box:
        """The cells of a bin."""
        return self.scan[number]

    def inside(self, positions: Sequence[IndexArray]) -> npt.NDArray[np.bool_]:
        """Which cells, by their positions on each axis, are in the region."""
        inside = np.ones(len(positions[0]) if positions else 1, bool)
        for at, lo, hi in zip(positions, self.region.lo, self.region.hi, strict=True):
            inside &= (at >= lo) & (at < hi)
        return inside

    def keys(self, positions: Sequence[IndexArray], rows: int) -> IndexArray:
        """The keys (int64[rows]) of cells in the region."""
        keys = np.zeros(rows, np.int64)
        for table, at, lo in zip(self.tables, positions, self.region.lo, strict=True):
            keys += table.take(at - lo if lo else at)
        return keys

    def parted(self, keys: IndexArray) -> tuple[IndexArray, npt.NDArray[Any]]:
        """The bin of each key, and its offset there."""
        offsets = keys & ((1 << self.bits) - 1)
        return keys >> self.bits, offsets.astype(np.uint32) if self.bits <= 32 else offsets

    def cell(self, number: int, offset: int) -> Coords:
        """The position of a cell on each axis."""
        at = np.unravel_index(offset, self.shape) if self.shape else ()
        return tuple(lo + int(i) for lo, i in zip(self.box(number).lo, at, strict=True))


def common_unit(units: Sequence[Coords], shape: Coords) -> Coords:
    """The smallest box of cells that is whole chunks of all arrays of that shape.

    Examples
    --------
    >>> from zarr_manifests.planning.cells import common_unit
    >>> common_unit([(2, 10), (3, 5)], (100, 8))
    (6, 8)
    """
    sides = zip(*units, strict=True)
    lengths = [math.lcm(*(max(n, 1) for n in side)) for side in sides]
    return tuple(min(length, max(n, 1)) for length, n in zip(lengths, shape, strict=True))


def ordered(keys: IndexArray) -> tuple[IndexArray, IndexArray]:
    """The stable order of keys from 0 on, and the keys in that order.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.planning.cells import ordered
    >>> ordered(np.array([30, 10, 20, 10]))
    (array([1, 3, 2, 0]), array([10, 10, 20, 30]))
    """
    places = max(len(keys) - 1, 0).bit_length()
    if int(keys.max(initial=0)).bit_length() + places > 63:
        order = np.argsort(keys, kind="stable")
        return order, keys[order]
    # Sorting numbers takes a sixth of the time of sorting places by them.
    order = (keys << places) | np.arange(len(keys))
    order.sort()
    in_order = order >> places
    order &= (1 << places) - 1
    return order, in_order


def default_chunks(shape: Coords, itemsize: int, nbytes: int = 4 * 1024**2) -> Coords:
    """Chunks of an array for which nobody has named any: at most so many bytes.

    Examples
    --------
    >>> from zarr_manifests.planning.cells import default_chunks
    >>> default_chunks((365, 721, 1440), 4)
    (92, 91, 90)
    """
    chunk = [max(n, 1) for n in shape]
    while math.prod(chunk) * itemsize > nbytes and max(chunk) > 1:
        longest = chunk.index(max(chunk))
        chunk[longest] = -(-chunk[longest] // 2)
    return tuple(chunk)
