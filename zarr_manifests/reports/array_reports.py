"""Values that tell of arrays: their chunks, sizes and statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Coords, IndexArray, grid_shape
from zarr_manifests.keys import no_array
from zarr_manifests.planning.tables.sums import Amount
from zarr_manifests.report import Report
from zarr_manifests.texts import plain_text

__all__ = [
    "ArrayStatistics",
    "ArrayUsage",
    "ChunkSelection",
    "StatisticsReport",
    "Usage",
]

_FULL, _PART, _NONE = "\N{FULL BLOCK}", "\N{MEDIUM SHADE}", "\N{MIDDLE DOT}"
_COLORS = ("rgba(128,128,128,.25)", "#7fb2cb", "#1f77a4")


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSelection(Report):
    """The chunks of an array that may hold cells that a where selects.

    A notebook shows the grid of chunks as a picture, with the selected ones in blue.

    Parameters
    ----------
    path, where : str
        The array, and the comparisons in canonical text.
    shape, chunk_shape : tuple of int
        Of the array; of a sharded array, chunks are its shards.
    dimensions : tuple of (str or None)
        Names of its axes.
    boxes : int64[n, 2, ndim]
        Half-open boxes of chunk coordinates, disjoint and in C order, with all chunks that may
        match. Each box has its lower corner, then its upper one.
    selected : int
        Number of chunks in the boxes.
    left_out : mapping of str to int
        Chunks that cannot match, by reason: `range` (the values of coordinates), `statistics`
        (their own values), `absence` (never written, and the fill value does not match).
    unknown : int
        Selected chunks that have no statistics.
    bytes, selected_bytes : int
        Stored bytes of the array's chunks in the smallest box that coordinates leave, and of the
        selected chunks.
    reasons : mapping of str to int
        For each comparison, how many chunks it leaves out by itself.
    data : tuple of str
        Paths of the arrays whose values are compared.
    """

    path: str
    where: str
    shape: Coords
    chunk_shape: Coords
    dimensions: tuple[str | None, ...]
    boxes: IndexArray
    selected: int
    left_out: Mapping[str, int]
    unknown: int
    bytes: int
    selected_bytes: int
    reasons: Mapping[str, int]
    data: tuple[str, ...] = ()

    @property
    def grid_shape(self) -> Coords:
        """Number of chunks along each axis."""
        return grid_shape(self.shape, self.chunk_shape)

    @property
    def chunks(self) -> int:
        """Chunks of the whole grid."""
        return math.prod(self.grid_shape)

    @property
    def cells(self) -> tuple[tuple[slice, ...], ...]:
        """The cells of each box as slices, one for each axis."""
        found = []
        for lo, hi in self.boxes.tolist():
            sides = zip(lo, hi, self.chunk_shape, self.shape, strict=True)
            found.append(tuple(slice(a * n, min(b * n, size)) for a, b, n, size in sides))
        return tuple(found)

    def __str__(self) -> str:
        stored = f"{self.selected_bytes:,} of {self.bytes:,}"
        lines = [
            f"{self.path} where {self.where}",
            f"{self.selected:,} of {self.chunks:,} chunks may match ({stored} bytes)",
            "left out: " + ", ".join(f"{n:,} by {why}" for why, n in self.left_out.items()),
            *(f"  {n:,} by {comparison}" for comparison, n in self.reasons.items() if n),
            *self._advice(),
        ]
        return "\n".join(map(plain_text, lines))

    def _advice(self) -> list[str]:
        """Why no more is left out."""
        if not self.data or not self.selected:
            return []
        paths = ", ".join(f'"{path}"' for path in self.data)
        found = []
        if self.unknown:
            call = f"repo.compute_statistics([{paths}])"
            found.append(
                f"{self.unknown:,} chunks have no statistics and are read; {call} makes them"
            )
        if not self.left_out["statistics"] and self.unknown < self.selected:
            names = [name or f"axis {i}" for i, name in enumerate(self.dimensions)]
            spans = [name for name, n in zip(names, self.grid_shape, strict=True) if n == 1]
            shape = " x ".join(map(str, self.chunk_shape))
            why = f": each spans all of {', '.join(spans)}" if spans else ""
            values = f"chunks of {shape} hold values of all sizes{why}"
            found.append(
                f"no chunk is left out by its values, because {values}; smaller ones can be"
            )
        return found

    def picture(self, columns: int = 72, lines: int = 24) -> str:
        """The grid of chunks as text: a block is selected, a dot left out, a grey block is both.

        It shows the last two axes. Along the others, a place counts as selected if it is anywhere.

        Parameters
        ----------
        columns, lines : int
            The largest picture; of larger grids, several chunks share a place.

        Raises
        ------
        InvalidArgumentError
            If one of them is not a whole number from 1 on.
        """
        for name, most in (("columns", columns), ("lines", lines)):
            if type(most) is not int or most < 1:
                raise InvalidArgumentError(f"{name} of a picture must be 1 or more, not {most!r}")
        marks = np.array([_NONE, _PART, _FULL])[self._places(columns, lines)]
        return "\n".join("".join(row) for row in marks.tolist())

    def _repr_html_(self) -> str:
        """What `str` says, and the grid of chunks as a picture."""
        places = self._places(120, 80)
        height, width = places.shape
        side = max(1, min(6, 480 // max(width, 1)))
        runs = []
        for line, row in enumerate(places.tolist()):
            for place, same in groupby(enumerate(row), itemgetter(1)):
                first, *rest = [column for column, _ in same]
                runs.append(
                    f'<rect x="{first}" y="{line}" width="{1 + len(rest)}" height="1" '
                    f'fill="{_COLORS[place]}"/>'
                )
        return (
            f"<pre>{escape(str(self))}</pre>"
            f'<svg width="{width * side}" height="{height * side}" viewBox="0 0 {width} {height}" '
            f'preserveAspectRatio="none" shape-rendering="crispEdges">{"".join(runs)}</svg>'
        )

    def _places(self, columns: int, lines: int) -> npt.NDArray[np.int64]:
        """A grid of at most this size: 0 for places left out, 2 for selected ones, 1 for both."""
        grid = (1, 1, *self.grid_shape)[-2:]
        shape = tuple(min(n, most) for n, most in zip(grid, (lines, columns), strict=True))
        if not math.prod(shape):
            return np.zeros((0, 0), np.int64)
        # Number of selected chunks from the beginning on, by place.
        places = [np.arange(n + 1) * size // n for n, size in zip(shape, grid, strict=True)]
        counts = np.zeros(shape)
        boxes = np.zeros((len(self.boxes), 2, 2), np.int64)
        boxes[:, 1] = 1
        ndim = min(2, len(self.shape))
        boxes[:, :, 2 - ndim :] = self.boxes[:, :, len(self.shape) - ndim :]
        for lo, hi in np.unique(boxes, axis=0).tolist():
            shares = [
                np.clip(edges[1:], a, b) - np.clip(edges[:-1], a, b)
                for edges, a, b in zip(places, lo, hi, strict=True)
            ]
            counts += np.outer(*shares)
        whole = np.outer(*(edges[1:] - edges[:-1] for edges in places))
        return np.where(counts >= whole, 2, np.where(counts > 0, 1, 0))


@dataclass(frozen=True, slots=True)
class ArrayUsage(Report):
    """Chunks and bytes of one array, or of one key that is not part of an array.

    Parameters
    ----------
    path : str
        Its absolute path.
    total : Amount
        Chunks and bytes in the snapshot.
    growth : Amount
        The difference to the snapshot before; negative if there is less now.
    grid_shape : tuple of int or None
        Chunks of the whole array along each axis; None for a key that is no array.
    inline, native, virtual : Amount or None
        Those in manifests, in objects of the repository, and in files elsewhere; None if they were
        not counted apart.
    """

    path: str
    total: Amount
    growth: Amount
    grid_shape: Coords | None = None
    inline: Amount | None = None
    native: Amount | None = None
    virtual: Amount | None = None

    @property
    def chunks(self) -> int:
        """Chunks that are there; all others read as the fill value."""
        return self.total.chunks

    @property
    def nbytes(self) -> int | None:
        """Bytes of all of them; None if unknown."""
        return self.total.nbytes

    @property
    def fraction(self) -> float:
        """How much of the grid is there, from 0 to 1; 1 for an empty grid."""
        size = math.prod(self.grid_shape or ())
        return self.chunks / size if size else 1.0


@dataclass(frozen=True, slots=True)
class Usage(Report):
    """Chunks and bytes of the arrays of a snapshot.

    Parameters
    ----------
    snapshot_id : str
        The snapshot.
    arrays : tuple of ArrayUsage
        By path, of every array and of every key that belongs to none.
    total : Amount
        All of them together.
    growth : Amount
        The difference to the snapshot before, deleted arrays included.
    """

    snapshot_id: str
    arrays: tuple[ArrayUsage, ...]
    total: Amount
    growth: Amount

    def __getitem__(self, path: str) -> ArrayUsage:
        """Of the array at that path, with or without a leading slash."""
        for array in self.arrays:
            if array.path.strip("/") == path.strip("/"):
                return array
        arrays = (array.path for array in self.arrays)
        raise no_array(path, arrays, f" in snapshot {self.snapshot_id}")

    @property
    def chunks(self) -> int:
        """Chunks of all arrays."""
        return self.total.chunks

    @property
    def nbytes(self) -> int | None:
        """Bytes of all of them; None if unknown."""
        return self.total.nbytes

    @property
    def exact(self) -> bool:
        """Whether all numbers are."""
        return self.total.exact and self.growth.exact


@dataclass(frozen=True, slots=True)
class ArrayStatistics(Report):
    """How many chunks of an array have statistics.

    Parameters
    ----------
    path : str
        The array.
    chunks : int
        Its initialised chunks.
    known : int
        Those of them that had statistics before.
    measured : int
        Those of them that were measured now.
    skipped : str
        Why it cannot have any; empty if it can.
    """

    path: str
    chunks: int
    known: int
    measured: int
    skipped: str = ""

    @property
    def complete(self) -> bool:
        """Whether all its chunks have statistics."""
        return not self.skipped and self.known + self.measured == self.chunks


@dataclass(frozen=True, slots=True)
class StatisticsReport(Report):
    """What computing statistics has done.

    Parameters
    ----------
    snapshot_id : str
        The snapshot whose chunks were measured.
    arrays : tuple of ArrayStatistics
        The arrays, in the order of their paths.
    """

    snapshot_id: str
    arrays: tuple[ArrayStatistics, ...]

    @property
    def chunks(self) -> int:
        """Initialised chunks of arrays that can have statistics."""
        return sum(one.chunks for one in self.arrays)

    @property
    def measured(self) -> int:
        """Chunks that were measured now."""
        return sum(one.measured for one in self.arrays)
