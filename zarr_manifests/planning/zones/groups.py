"""Groups of the cells of an array: what is selected along each axis, and what is known of each.

A group has the cells that go to one cell of an answer. Rows of `Bounds`, of whole chunks or of runs
of cells, are added to the groups that they belong to.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.format.zone_maps import Bounds
from zarr_manifests.grid import IndexArray

type _Values = npt.NDArray[Any]
type Rows = tuple[Bounds, IndexArray, IndexArray, _Values, IndexArray | int]
"""Rows, the group of each, the numbers and weights of all its cells, and what is too large for its
sum, in units of 2^32."""

HALF: Final = 32
"""Bits of the lower one of the two halves in which sums of integers are kept."""
LOW: Final = 2**HALF - 1


class GroupedAxis(Struct, frozen=True, eq=False):
    """What is selected along an axis.

    Parameters
    ----------
    name : str or None
        The dimension of the answer, if its groups are told apart.
    places : int64[n]
        The selected positions, ascending.
    codes : int64[n]
        For each of them, the number of its group.
    groups : int
        How many groups there are.
    whole : bool[chunks]
        The chunks that are selected wholly, for one group.
    touched : bool[chunks]
        The chunks with anything selected.
    code : int64[chunks]
        The group of each chunk that is whole.
    weights : float64[n]
        The weight of each selected position.
    is_weighted : bool
        Whether these are not all 1 for lack of weights.
    chunk_weight : float64[chunks]
        The weight of all that is selected of each chunk.
    even : float64[chunks]
        The weight of each position of a chunk that is whole; NaN if they differ.
    """

    name: str | None
    places: IndexArray
    codes: IndexArray
    groups: int
    whole: npt.NDArray[np.bool_]
    touched: npt.NDArray[np.bool_]
    code: IndexArray
    weights: npt.NDArray[np.float64]
    is_weighted: bool
    chunk_weight: npt.NDArray[np.float64]
    even: npt.NDArray[np.float64]

    @classmethod
    def of(
        cls,
        name: str | None,
        places: IndexArray,
        codes: IndexArray,
        groups: int,
        size: int,
        chunk: int,
        weights: npt.NDArray[np.float64] | None,
    ) -> GroupedAxis:
        """The axis of an array with that size and chunk length, and weights of its positions."""
        order = np.argsort(places, kind="stable")
        places, codes = places[order], codes[order]
        is_weighted = weights is not None
        weights = np.ones(len(places)) if weights is None else weights[places]
        starts = np.arange(0, size, chunk)
        at, found = places // chunk, np.bincount(places // chunk, minlength=len(starts))
        first = np.full(len(starts), groups)
        last = np.full(len(starts), -1)
        np.minimum.at(first, at, codes)
        np.maximum.at(last, at, codes)
        whole = (found == np.minimum(chunk, size - starts)) & (first == last)
        total = np.bincount(at, weights, minlength=len(starts))
        low, high = np.full(len(starts), np.inf), np.full(len(starts), -np.inf)
        np.minimum.at(low, at, weights)
        np.maximum.at(high, at, weights)
        even = np.where(low == high, low, np.nan)
        chunks = whole, found > 0, first
        return cls(name, places, codes, groups, *chunks, weights, is_weighted, total, even)

    def parts(self, start: int, stop: int) -> tuple[slice, IndexArray | None, list[CellRuns]]:
        """The cells to read from `start` to `stop`, which of these count, and their runs."""
        first, last = np.searchsorted(self.places, [start, stop])
        places, codes = self.places[first:last], self.codes[first:last]
        whole = slice(int(places[0]), int(places[-1]) + 1)
        some = None if whole.stop - whole.start == len(places) else places - places[0]
        edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
        lengths = np.diff(edges)
        weights = self.weights[first:last]
        if (lengths[:-1] == lengths[0]).all() and lengths[-1] <= lengths[0]:
            return whole, some, [CellRuns(slice(None), edges[1], codes[edges[:-1]], weights)]
        parts = ((slice(a, b), b - a, codes[a : a + 1], weights[a:b]) for a, b in pairwise(edges))
        return whole, some, [CellRuns(*part) for part in parts]


class CellRuns(NamedTuple):
    """Cells along an axis, in runs of a length; the last may be shorter.

    Parameters
    ----------
    cells : slice
        Which of those that were read.
    length : int
        That of the runs.
    codes : int64[runs]
        The group of each run.
    weights : float64[n]
        The weights of the cells.
    """

    cells: slice
    length: int
    codes: IndexArray
    weights: npt.NDArray[np.float64]

    @property
    def run_weights(self) -> npt.NDArray[np.float64]:
        """The weight of each run."""
        return np.add.reduceat(self.weights, np.arange(0, len(self.weights), self.length))


class Totals:
    """What is known of each group."""

    def __init__(self, dtype: np.dtype[Any], groups: int) -> None:
        self.cells, self.missing, self.nan = np.zeros((3, groups), np.int64)
        self.low, self.high = np.zeros(groups, dtype), np.zeros(groups, dtype)
        self.bounded = np.zeros(groups, np.bool_)
        self.is_float = dtype.kind == "f"
        self.sums, self.weighted, self.weight, self.covered = np.zeros((4, groups))
        # Of deviations from the mean of a group's first row, and of their squares.
        self.first, self.off, self.squares = np.full((3, groups), [[np.nan], [0.0], [0.0]])
        # Integers, in two halves: their sum may exceed 64 bits.
        self._halves = np.zeros((2, groups), np.int64)

    def add(
        self,
        bounds: Bounds,
        groups: IndexArray,
        cells: IndexArray,
        covered: _Values | float = 0.0,
        high_sums: IndexArray | int = 0,
    ) -> None:
        """Add `Rows`, each to a group."""
        for total, column in (
            (self.cells, cells),
            (self.missing, bounds.missing),
            (self.nan, bounds.nan),
        ):
            np.add.at(total, groups, column)
        np.add.at(self.covered, groups, covered)
        if bounds.weighted is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                np.add.at(self.weighted, groups, bounds.weighted.sums)
                np.add.at(self.weight, groups, bounds.weighted.weights)
        if bounds.squares is not None:
            self._add_squares(bounds, groups, cells - bounds.missing, high_sums)
        some = bounds.bounded
        at, low, high = groups[some], bounds.low[some], bounds.high[some]
        new = at[~self.bounded[at]]
        self.low[new] = low[~self.bounded[at]]
        self.high[new] = high[~self.bounded[at]]
        self.bounded[new] = True
        np.minimum.at(self.low, at, low)
        np.maximum.at(self.high, at, high)
        if self.is_float:
            with np.errstate(invalid="ignore", over="ignore"):
                np.add.at(self.sums, groups, bounds.sums)
            return
        np.add.at(self._halves[0], groups, high_sums + (bounds.sums >> HALF))
        np.add.at(self._halves[1], groups, bounds.sums & LOW)

    def _add_squares(
        self, bounds: Bounds, groups: IndexArray, numbers: IndexArray, high_sums: IndexArray | int
    ) -> None:
        some = numbers > 0
        at, number, squares = groups[some], numbers[some].astype(np.float64), bounds.squares
        assert squares is not None
        with np.errstate(invalid="ignore", over="ignore"):
            high = np.broadcast_to(high_sums, len(some))[some] * 2.0**HALF
            means = (bounds.sums[some] + high) / number
            finite = np.isfinite(means)
            new = np.isnan(self.first[at]) & finite
            self.first[at[new]] = means[new]
            off = means - np.nan_to_num(self.first[at])
            np.add.at(self.off, at, number * off)
            np.add.at(self.squares, at, squares[some] + number * off * off)

    def deviations(self, count: IndexArray) -> npt.NDArray[np.float64]:
        """The standard deviation of each group with so many values; NaN for none."""
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            variance = np.maximum(self.squares - self.off * self.off / count, 0.0) / count
        return np.where(np.isfinite(variance) & (count > 0), np.sqrt(np.abs(variance)), np.nan)

    def integers(self) -> list[int]:
        """The sums of integers."""
        return [(high << HALF) + low for high, low in zip(*self._halves.tolist(), strict=True)]
