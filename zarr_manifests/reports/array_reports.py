"""Values that tell of arrays: their chunks, sizes and statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.grid import Coords, IndexArray, grid_shape
from zarr_manifests.keys import no_array
from zarr_manifests.markup import cell, facts, folded, page, report, table
from zarr_manifests.plain import plain_text
from zarr_manifests.planning.tables.sums import Tally
from zarr_manifests.records import dataclass
from zarr_manifests.reports.version_reports import SnapshotInfo
from zarr_manifests.texts import count_text

__all__ = [
    "Amount",
    "ArrayStatistics",
    "ArrayStats",
    "ArrayTotals",
    "ArrayUsage",
    "ChunkSelection",
    "StatisticsReport",
    "Totals",
    "Usage",
]

_FULL, _PART, _NONE = "\N{FULL BLOCK}", "\N{MEDIUM SHADE}", "\N{MIDDLE DOT}"
_COLORS = ("rgba(128,128,128,.25)", "#7fb2cb", "#1f77a4")


@dataclass(frozen=True, slots=True)
class ArrayStats:
    """How far an array is filled.

    Parameters
    ----------
    path : str
        Absolute path.
    shape, chunk_shape, grid_shape : tuple of int
        Elements of the array and of a chunk, and chunks of the array, along each axis.
    initialized_chunks : int
        Chunks that are there; all others read as the fill value.
    stored_bytes : int or None
        Bytes of these, as stored; None if the index does not tell: `du` without a path counts them.
    counted : bool
        Whether manifests were read, because the index lacked the answer.
    """

    path: str
    shape: Coords
    chunk_shape: Coords
    grid_shape: Coords
    initialized_chunks: int
    stored_bytes: int | None
    counted: bool

    @property
    def total_chunks(self) -> int:
        """Chunks of the whole grid."""
        return math.prod(self.grid_shape)

    @property
    def fraction(self) -> float:
        """How much of the grid is there, from 0 to 1; 1 for an empty grid."""
        return self.initialized_chunks / self.total_chunks if self.total_chunks else 1.0

    _repr_html_ = report


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSelection:
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
class ArrayUsage:
    """What an array refers to.

    Parameters
    ----------
    path : str
        Absolute path.
    inline_chunks, inline_bytes : int
        Chunks that are in manifests.
    native_chunks, native_bytes : int
        Chunks in objects of the repository.
    virtual_chunks, virtual_bytes : int
        Chunks in files elsewhere.
    """

    path: str
    inline_chunks: int = 0
    inline_bytes: int = 0
    native_chunks: int = 0
    native_bytes: int = 0
    virtual_chunks: int = 0
    virtual_bytes: int = 0

    @property
    def chunks(self) -> int:
        """All chunks that are there."""
        return self.inline_chunks + self.native_chunks + self.virtual_chunks

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.inline_bytes + self.native_bytes + self.virtual_bytes

    @classmethod
    def of(cls, path: str, table: ChunkTable | None) -> ArrayUsage:
        """What the chunk table refers to; it may be None, for no chunks."""
        if table is None:
            return cls(path)
        counts = []
        for kind in (RefKind.INLINE, RefKind.NATIVE, RefKind.VIRTUAL):
            rows = table.kind == kind
            counts += [int(rows.sum()), int(table.length[rows].sum())]
        return cls(path, *counts)

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of chunks and of their bytes, each exact or an upper bound.

    Parameters
    ----------
    refs : int
        Chunks that are there, wherever their bytes are.
    nbytes : int or None
        Bytes of all of them; None if nothing is known of these.
    refs_exact, nbytes_exact : bool
        Whether the number is exact; else it is an upper bound.
    """

    refs: int
    nbytes: int | None
    refs_exact: bool
    nbytes_exact: bool

    @property
    def exact(self) -> bool:
        """Whether both numbers are."""
        return self.refs_exact and self.nbytes_exact

    def __str__(self) -> str:
        chunks = ("" if self.refs_exact else "at most ") + count_text(self.refs, "chunk")
        if self.nbytes is None:
            return chunks
        most = "" if self.nbytes_exact else "at most "
        return f"{chunks}, {most}{count_text(self.nbytes, 'byte')}"

    @classmethod
    def of(cls, tally: Tally) -> Amount:
        """The amount that the tally says."""
        return cls(tally.chunks, tally.nbytes, tally.chunks_exact, tally.nbytes_exact)

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class ArrayTotals:
    """Chunks and bytes of one array, or of one key that is not part of an array.

    Parameters
    ----------
    path : str
        Its absolute path.
    total : Amount
        Chunks and bytes in the snapshot.
    delta : Amount
        The difference to the snapshot before; negative if there is less now.
    """

    path: str
    total: Amount
    delta: Amount

    @property
    def exact(self) -> bool:
        """Whether all numbers are."""
        return self.total.exact and self.delta.exact

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class Totals:
    """Chunks and bytes of every array of a snapshot, as the snapshot counts them.

    Parameters
    ----------
    snapshot_id : str
        The snapshot.
    arrays : tuple of ArrayTotals
        By path, of every array and of every key that is not part of one.
    total : Amount
        All of them together.
    delta : Amount
        The difference to the snapshot before, deleted arrays included.
    """

    snapshot_id: str
    arrays: tuple[ArrayTotals, ...]
    total: Amount
    delta: Amount

    def __getitem__(self, path: str) -> ArrayTotals:
        """Of the array at that path, with or without a leading slash."""
        for array in self.arrays:
            if array.path.strip("/") == path.strip("/"):
                return array
        arrays = (array.path for array in self.arrays)
        raise no_array(path, arrays, f" in snapshot {self.snapshot_id}")

    @property
    def exact(self) -> bool:
        """Whether all numbers are."""
        return self.total.exact and self.delta.exact

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class Usage:
    """Exact chunks and bytes of every array of a snapshot, and what each commit before it wrote.

    Parameters
    ----------
    arrays : tuple of ArrayUsage
        By path, of every array and of every key that belongs to none.
    snapshots : tuple of SnapshotInfo
        The history, newest first. `written` of each says how many chunks its commit set and
        removed (`refs-set`, `refs-unset`), and the bytes of those it set (`chunk-bytes`).
    """

    arrays: tuple[ArrayUsage, ...]
    snapshots: tuple[SnapshotInfo, ...]

    @property
    def chunks(self) -> int:
        """Chunks of all arrays."""
        return sum(array.chunks for array in self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays' chunks."""
        return sum(array.nbytes for array in self.arrays)

    def _repr_html_(self) -> str:
        from zarr_manifests.picturing.graph import graph_html
        from zarr_manifests.picturing.lanes import lanes

        sums = facts([("chunks", f"{self.chunks:,}"), ("bytes", cell("nbytes", self.nbytes))])
        lines = []
        for one in self.arrays:
            kinds = one.inline_chunks, one.native_chunks, one.virtual_chunks
            counts = [f"{count:,}" for count in (one.chunks, *kinds)]
            lines.append((one.path, cell("nbytes", one.nbytes), *counts))
        arrays = table(lines, ("", "bytes", "chunks", "inline", "native", "virtual"))
        history = lanes([self.snapshots] if self.snapshots else [], {})
        return page(
            "Usage",
            sums,
            folded(f"arrays ({len(self.arrays):,})", arrays, is_open=True),
            folded(f"snapshots ({len(self.snapshots):,})", graph_html(history)),
        )


@dataclass(frozen=True, slots=True)
class ArrayStatistics:
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

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class StatisticsReport:
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

    _repr_html_ = report
