"""Which boxes of cells the tasks of a parallel read get.

A read selects runs of positions on each axis of an array; it wants the product of these runs.
`plan_scan` cuts each axis into spans of whole chunks, and a task's box is the product of one span
of each axis. The product of all spans is never materialized, so a scan of a million tasks is as
small as its axes.

Axes are coalesced from the last to the first, as cells are in C order, each as far as the target
allows. They are cut evenly, so that no task gets a small rest. Invariants:

- Every selected cell is in exactly one box, and no chunk is in two boxes.
- Every chunk of a box has selected cells, so no chunk is read in vain.
- A box with more selected cells than the target is a single chunk.
- There are at least as many boxes as asked for, if there are as many chunks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box, IndexArray


def runs_of(mask: npt.NDArray[np.bool_]) -> IndexArray:
    """The half-open runs (int64[n, 2]) of positions at which a one-dimensional mask is true.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.planning.scan import runs_of
    >>> runs_of(np.array([True, True, False, True])).tolist()
    [[0, 2], [3, 4]]
    """
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return edges.astype(np.int64).reshape(-1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """One axis of an array: the length of its chunks, and the selected positions.

    Parameters
    ----------
    chunk : int
        Positions in a chunk, at least 1.
    runs : int64[n, 2]
        Half-open runs of selected positions, ascending, with gaps in between.

    Raises
    ------
    InvalidArgumentError
        If the chunk is empty, or the runs are negative, empty, out of order or touch.
    """

    chunk: int
    runs: IndexArray

    def __post_init__(self) -> None:
        edges = self.runs.reshape(-1)
        if self.chunk < 1 or self.runs.shape[1:] != (2,):
            raise InvalidArgumentError(f"not an axis: chunks of {self.chunk}, runs {self.runs}")
        if edges.size and (edges[0] < 0 or bool((np.diff(edges) <= 0).any())):
            raise InvalidArgumentError(f"not ascending runs apart from each other: {self.runs}")

    @property
    def size(self) -> int:
        """Number of selected positions."""
        return int((self.runs[:, 1] - self.runs[:, 0]).sum())

    def within(self, lo: int, hi: int) -> Axis:
        """The same axis, with only the selected positions in `lo <= position < hi`."""
        clipped = np.clip(self.runs, lo, hi)
        return Axis(self.chunk, clipped[clipped[:, 0] < clipped[:, 1]])

    def count(self, spans: IndexArray) -> IndexArray:
        """The number of selected positions in each of these half-open spans (int64[n, 2])."""
        if not len(self.runs):
            return np.zeros(len(spans), np.int64)
        return self._before(spans[:, 1]) - self._before(spans[:, 0])

    def in_chunks(self) -> Axis:
        """The same axis, with all positions of the chunks that have selected ones."""
        chunks, _ = self._chunks()
        gaps = np.flatnonzero(np.diff(chunks) > 1)
        first, last = np.append(0, gaps + 1), np.append(gaps, len(chunks) - 1)
        runs = np.stack([chunks[first], chunks[last] + 1], axis=1) if len(chunks) else self.runs
        return Axis(self.chunk, runs * self.chunk)

    def positions(self) -> IndexArray:
        """The selected positions, ascending."""
        return np.concatenate([np.arange(lo, hi) for lo, hi in self.runs] or [np.empty(0, int)])

    def _before(self, positions: IndexArray) -> IndexArray:
        """The number of selected positions before each of these."""
        lo, hi = self.runs[:, 0], self.runs[:, 1]
        done = np.concatenate([[0], np.cumsum(hi - lo)])
        run = np.searchsorted(lo, positions, "right")
        over = np.maximum(hi[run - 1] - positions, 0)
        return np.where(run == 0, 0, done[run] - over)

    @property
    def chunks(self) -> IndexArray:
        """The chunks with selected positions, ascending."""
        return self._chunks()[0]

    def _chunks(self) -> tuple[IndexArray, IndexArray]:
        """The chunks with selected positions, ascending, and how many each has."""
        if not len(self.runs):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first, last = self.runs[0, 0] // self.chunk, (self.runs[-1, 1] - 1) // self.chunk
        chunks = np.arange(first, last + 1)
        counts = np.diff(self._before(np.arange(first, last + 2) * self.chunk))
        return chunks[counts > 0], counts[counts > 0]

    def _clip(self, chunks: IndexArray) -> IndexArray:
        """Spans of chunks (int64[n, 2]) as spans of positions, without unselected ends."""
        lo, hi = chunks[:, 0] * self.chunk, chunks[:, 1] * self.chunk
        after = np.searchsorted(self.runs[:, 1], lo, "right")
        before = np.searchsorted(self.runs[:, 0], hi, "left") - 1
        return np.stack(
            [np.maximum(lo, self.runs[after, 0]), np.minimum(hi, self.runs[before, 1])], axis=1
        )


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """The boxes of a read: there are `len(scan)`, and `scan[i]` is the i-th in C order.

    Made by `plan_scan`. Boxes are in cells, not chunks, and have no unselected ends. An unselected
    cell of a box is between selected ones.

    Parameters
    ----------
    axes : tuple of Axis
        The planned axes.
    spans : tuple of int64[n, 2]
        Half-open spans of positions, by axis.
    """

    axes: tuple[Axis, ...]
    spans: tuple[IndexArray, ...]

    def __len__(self) -> int:
        return math.prod(map(len, self.spans))

    def __getitem__(self, number: int) -> Box:
        if not 0 <= number < len(self):
            raise IndexError(f"there is no box {number} in a scan of {len(self)}")
        chosen = []
        for spans in reversed(self.spans):
            number, span = divmod(number, len(spans))
            chosen.append(spans[span])
        lo, hi = (tuple(int(span[end]) for span in reversed(chosen)) for end in (0, 1))
        return Box(lo, hi)

    def __iter__(self) -> Iterator[Box]:
        return map(self.__getitem__, range(len(self)))

    def within(self, box: Box) -> tuple[Axis, ...]:
        """The axes, with only the selected positions in the box."""
        return tuple(
            axis.within(lo, hi) for axis, lo, hi in zip(self.axes, box.lo, box.hi, strict=True)
        )

    @property
    def rows(self) -> int:
        """Number of selected cells."""
        return math.prod(axis.size for axis in self.axes)

    def holding(self, chunk_shape: Sequence[int], coords: IndexArray) -> IndexArray:
        """Numbers of the boxes that overlap any of these chunks, ascending.

        The chunks (int64[n, ndim]) need not be those that the scan was planned with.
        """
        chunks, found = np.arange(len(coords)), np.zeros(len(coords), np.int64)
        for axis, (spans, length) in enumerate(zip(self.spans, chunk_shape, strict=True)):
            lo = coords[:, axis] * length
            first = np.searchsorted(spans[:, 1], lo, "right")
            stop = np.searchsorted(spans[:, 0], lo + length, "left")
            counts = np.maximum(stop - first, 0)[chunks]
            which = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            chunks = np.repeat(chunks, counts)
            found = np.repeat(found, counts) * len(spans) + first[chunks] + which
        return np.unique(found)

    def cut(self, boxes: IndexArray) -> IndexArray:
        """Cut boxes of cells (int64[n, 2, ndim]) where boxes of the scan begin and end.

        Returns
        -------
        int64[m, 2, ndim]
            The parts that have selected cells, ordered by the box of the scan that they are in.
        """
        of, number = np.arange(len(boxes)), np.zeros(len(boxes), np.int64)
        chosen: list[IndexArray] = []
        for axis, spans in enumerate(self.spans):
            lo, hi = boxes[:, 0, axis], boxes[:, 1, axis]
            first = np.searchsorted(spans[:, 1], lo, "right")
            stop = np.searchsorted(spans[:, 0], hi, "left")
            counts = np.maximum(stop - first, 0)[of]
            which = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            of, number = np.repeat(of, counts), np.repeat(number, counts)
            span = first[of] + which
            number = number * len(spans) + span
            chosen = [*(np.repeat(each, counts) for each in chosen), span]
        parts = boxes[of]
        for axis, (spans, span) in enumerate(zip(self.spans, chosen, strict=True)):
            parts[:, 0, axis] = np.maximum(parts[:, 0, axis], spans[span, 0])
            parts[:, 1, axis] = np.minimum(parts[:, 1, axis], spans[span, 1])
        parts = parts[np.argsort(number, kind="stable")]
        return parts[self.cells(parts) > 0]

    def cells(self, boxes: IndexArray) -> IndexArray:
        """The number of selected cells in each of these boxes (int64[n, 2, ndim])."""
        counts = np.ones(len(boxes), np.int64)
        for number, axis in enumerate(self.axes):
            counts *= axis.count(boxes[:, :, number])
        return counts


def plan_scan(axes: Sequence[Axis], *, target_rows: int, min_tasks: int = 1) -> Scan:
    """Cut the selection into boxes of whole chunks.

    Parameters
    ----------
    axes : sequence of Axis
        The selection; none for the one cell of a zero-dimensional array.
    target_rows : int
        Selected cells a box should have at most; a box with more is one chunk.
    min_tasks : int
        Make boxes smaller, if need be, until there are this many or each is one chunk.

    Raises
    ------
    InvalidArgumentError
        If the target or the number of tasks is below 1.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.planning.scan import Axis, plan_scan
    >>> axes = [Axis(12, np.array([[6, 132]])), Axis(144, np.array([[0, 144]]))]
    >>> scan = plan_scan(axes, target_rows=10_000)
    >>> [(box.lo, box.hi) for box in scan]
    [((6, 0), (36, 144)), ((36, 0), (84, 144)), ((84, 0), (132, 144))]
    """
    if target_rows < 1 or min_tasks < 1:
        raise InvalidArgumentError(
            f"a scan needs a target of at least 1 row and 1 task, not {target_rows} and {min_tasks}"
        )
    chunked = [axis._chunks() for axis in axes]
    wanted = min(min_tasks, math.prod(len(counts) for _, counts in chunked))

    def too_few(target: int) -> bool:
        return math.prod(map(len, _spans(chunked, target))) < wanted

    target = target_rows
    if too_few(target):
        # The largest target that gives enough boxes; 1 does, since then each is one chunk.
        target = bisect_left(range(1, target_rows + 1), True, key=too_few)
    spans = _spans(chunked, target)
    return Scan(
        tuple(axes), tuple(axis._clip(span) for axis, span in zip(axes, spans, strict=True))
    )


def _spans(chunked: Sequence[tuple[IndexArray, IndexArray]], target: int) -> list[IndexArray]:
    """Cut each axis into spans of chunks that make boxes of at most `target` selected cells."""
    largest = [int(counts.max(initial=0)) for _, counts in chunked]
    spans: list[IndexArray] = []
    for axis in reversed(range(len(chunked))):
        chunks, counts = chunked[axis]
        others = math.prod(largest[:axis] + largest[axis + 1 :])
        most = max(target // max(others * largest[axis], 1), 1)
        cut = _cut(chunks, most)
        starts = np.searchsorted(chunks, cut[:, 0])
        if len(starts):
            largest[axis] = int(np.add.reduceat(counts, starts).max())
        spans.insert(0, cut)
    return spans


def _cut(chunks: IndexArray, most: int) -> IndexArray:
    """Spans of at most `most` neighbouring chunks, of lengths as even as can be."""
    starts = np.flatnonzero(np.diff(chunks, prepend=-2) > 1)
    lengths = np.diff(starts, append=len(chunks))
    parts = -(-lengths // most)
    stretch = np.repeat(np.arange(len(starts)), parts)
    part = np.arange(len(stretch)) - np.repeat(np.cumsum(parts) - parts, parts)
    first, length, of = chunks[starts][stretch], lengths[stretch], parts[stretch]
    return np.stack([first + part * length // of, first + (part + 1) * length // of], axis=1)
