"""Values that tell of arrays: chunks, sizes, statistics, manifests and ingested files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape

import numpy as np
from msgspec import Struct

from zarr_manifests.grid import Coords, IndexArray, grid_shape
from zarr_manifests.keys import no_array
from zarr_manifests.picturing import Folding
from zarr_manifests.planning.live_deltas import Amount
from zarr_manifests.planning.packing import Overflow
from zarr_manifests.report import Problem, Report
from zarr_manifests.texts import bytes_text, count_text

_PICTURE_LINES, _PICTURE_COLUMNS = 24, 72
_FULL, _PART, _NONE = "\N{FULL BLOCK}", "\N{MEDIUM SHADE}", "\N{MIDDLE DOT}"


class ChunkSelection(Report, Struct, frozen=True, eq=False):
    """The chunks of an array that may hold cells that a where selects.

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

    def _lines(self) -> Iterator[str]:
        yield f"{self.path} where {self.where}"
        yield f"{self.selected:,} of {self.chunks:,} chunks may match"
        yield "left out: " + ", ".join(f"{n:,} by {why}" for why, n in self.left_out.items())
        if self.data and self.unknown:
            call = f"repo.compute_statistics([{', '.join(f'"{path}"' for path in self.data)}])"
            yield f"{self.unknown:,} chunks have no statistics and are read; {call} makes them"

    def picture(self) -> str:
        """The grid of chunks as text: a block is selected, a dot left out, a grey block is both.

        It shows the two longest axes, and all chunks along the others in one place. It has at most
        24 lines of 72 places; of larger grids, several chunks share a place.
        """
        folding = Folding.of(self.grid_shape, _PICTURE_LINES, _PICTURE_COLUMNS)
        counts = folding.cover(self.boxes)
        marks = np.where(counts == folding.whole, _FULL, np.where(counts > 0, _PART, _NONE))
        return "\n".join("".join(row) for row in marks.tolist())

    def _repr_html_(self) -> str:
        """What `str` says, and the grid of chunks as a picture."""
        return f"<pre>{escape(str(self))}\n\n{self.picture()}</pre>"


class Usage(Report, Struct, frozen=True):
    """Chunks and bytes of the arrays of a snapshot; or of one array or other key of it.

    Parameters
    ----------
    path : str
        The absolute path of the array or key; empty for all together.
    total : Amount
        Chunks and bytes in the snapshot.
    growth : Amount
        The difference to the snapshot before, deleted arrays included; negative if there is less.
    grid_shape : tuple of int or None
        Chunks of the whole array along each axis; None for what is no array.
    inline, native, virtual : Amount or None
        Those in manifests, in objects of the repository, and in files elsewhere; None if they were
        not counted apart.
    arrays : tuple of Usage
        Of all together: that of every array and of every key that belongs to none, by path.
    snapshot_id : str
        Of all together: the snapshot.
    """

    path: str
    total: Amount
    growth: Amount
    grid_shape: Coords | None = None
    inline: Amount | None = None
    native: Amount | None = None
    virtual: Amount | None = None
    arrays: tuple[Usage, ...] = ()
    snapshot_id: str = ""

    def __getitem__(self, path: str) -> Usage:
        """Of the array at that path, with or without a leading slash."""
        for array in self.arrays:
            if array.path.strip("/") == path.strip("/"):
                return array
        arrays = (array.path for array in self.arrays)
        raise no_array(path, arrays, f" in snapshot {self.snapshot_id}")

    @property
    def chunks(self) -> int:
        """Chunks that are there; all others read as the fill value."""
        return self.total.chunks

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.total.nbytes

    @property
    def exact(self) -> bool:
        """Whether all numbers are."""
        return self.total.exact and self.growth.exact

    @property
    def fraction(self) -> float | None:
        """How much of an array's grid is there, from 0 to 1; 1 for an empty grid, None without."""
        if self.grid_shape is None:
            return None
        size = math.prod(self.grid_shape)
        return self.chunks / size if size else 1.0


class StatisticsReport(Report, Struct, frozen=True):
    """How many chunks of an array have statistics; or those of all arrays that were asked for.

    Parameters
    ----------
    path : str
        The array; empty for all together.
    chunks : int
        Initialised chunks of what can have statistics.
    known : int
        Those of them that had statistics before.
    measured : int
        Those of them that were measured now.
    skipped : str
        Why an array cannot have any; empty if it can.
    arrays : tuple of StatisticsReport
        Of all together: those of each array.
    snapshot_id : str
        Of all together: the snapshot whose chunks were measured.
    """

    path: str
    chunks: int
    known: int
    measured: int
    skipped: str = ""
    arrays: tuple[StatisticsReport, ...] = ()
    snapshot_id: str = ""

    @property
    def complete(self) -> bool:
        """Whether all these chunks have statistics."""
        return not self.skipped and self.known + self.measured == self.chunks


class ManifestPlace(Struct, frozen=True):
    """A manifest of the base.

    Parameters
    ----------
    key : str
        Its key in the storage.
    set_name : str
        The manifest set it was packed for.
    refs : int
        Chunk refs in it.
    nbytes : int
        Its bytes.
    arrays : int
        How many arrays have refs in it.
    """

    key: str
    set_name: str
    refs: int
    nbytes: int
    arrays: int


class ArrayPlace(Struct, frozen=True):
    """Where the refs of an array are, and why there.

    Parameters
    ----------
    path : str
        Its absolute path.
    rule : int or None
        Position of the rule that matched; None if none did.
    wanted : str
        The manifest set that says.
    overflows : tuple of Overflow
        The sets that did not take it, each with `set_name` and `why`.
    refs : int
        Refs in manifests of the base.
    manifests : tuple of int
        Positions of these manifests, each once.
    pending_refs : int
        Refs that commits since have set or unset, and that are in no manifest of the base yet.
    is_coordinate : bool
        Whether it is a 1-d array named as its own dimension.
    """

    path: str
    rule: int | None
    wanted: str
    overflows: tuple[Overflow, ...]
    refs: int
    manifests: tuple[int, ...]
    pending_refs: int
    is_coordinate: bool


class ManifestLayout(Report, Struct, frozen=True):
    """Which manifests there are, and in which of them the refs of each array are.

    Parameters
    ----------
    snapshot_id : str
        The snapshot.
    manifests : tuple of ManifestPlace
        The base's.
    arrays : tuple of ArrayPlace
        By path; opaque keys that are stored as chunks are among them.
    """

    snapshot_id: str
    manifests: tuple[ManifestPlace, ...]
    arrays: tuple[ArrayPlace, ...]


class IngestedFile(Struct, frozen=True):
    """A file whose rows were committed.

    Parameters
    ----------
    url : str
        Where it is.
    start, rows : int
        Its first row in the arrays, and how many it has.
    nbytes : int
        Its size.
    """

    url: str
    start: int
    rows: int
    nbytes: int


class IngestReport(Report, Struct, frozen=True):
    """What `ingest` has done.

    Parameters
    ----------
    snapshot_id : str or None
        The commit it made; None if there was nothing to do.
    added, replaced : tuple of IngestedFile
        Files whose rows were appended, and files that had changed.
    failed : tuple of Problem
        Files that were left out, each with its URL as `key`, and `what` the reason is.
    unchanged : int
        The number of files that had been ingested before.
    seconds : float
        How long it took.

    Examples
    --------
    >>> print(IngestReport(None, (), (), (), 365, 0.5))
    nothing to do: 365 there already
    """

    snapshot_id: str | None
    added: tuple[IngestedFile, ...]
    replaced: tuple[IngestedFile, ...]
    failed: tuple[Problem, ...]
    unchanged: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of the files that were read."""
        return sum(file.nbytes for file in (*self.added, *self.replaced))

    def _lines(self) -> Iterator[str]:
        counts = (
            (len(self.added), f"{count_text(len(self.added), 'file')} added"),
            (len(self.replaced), f"{len(self.replaced):,} replaced"),
            (self.unchanged, f"{self.unchanged:,} there already"),
            (len(self.failed), f"{len(self.failed):,} left out"),
        )
        done = ", ".join(what for count, what in counts if count) or "no files"
        if self.snapshot_id is not None:
            done += f", in 1 commit: {bytes_text(self.nbytes)} in {self.seconds:.1f} s"
        yield done if self.snapshot_id is not None else f"nothing to do: {done}"
        yield from (f"  left out {file}" for file in self.failed)
