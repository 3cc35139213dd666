"""Every value that a repository or a session returns: history, differences, sizes and reports.

All are immutable and hold no connection to the repository. The module is long because it is a
flat list of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from datetime import UTC, datetime
from enum import StrEnum
from html import escape
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import Conflict, InvalidArgumentError, ManifestsError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.entry_columns import HistoryEntries, HistoryEntry, numbers_at
from zarr_manifests.format.root import LogEntry
from zarr_manifests.grid import Coords, IndexArray, grid_shape
from zarr_manifests.keys import no_array
from zarr_manifests.markup import cell, facts, folded, page, report, table
from zarr_manifests.plain import plain_text
from zarr_manifests.planning.layout.sets import Overflow
from zarr_manifests.planning.tables.sums import Tally
from zarr_manifests.planning.upkeep.cell_changes import ArrayShape, CellChanges
from zarr_manifests.planning.upkeep.change_records import Change, Operation
from zarr_manifests.records import dataclass
from zarr_manifests.versions import RefName

__all__ = [
    "Amount",
    "Ancestry",
    "ArrayPlace",
    "ArrayShape",
    "ArrayStatistics",
    "ArrayStats",
    "ArrayTotals",
    "ArrayUsage",
    "CellChanges",
    "Change",
    "ChunkSelection",
    "CloneReport",
    "CollectionReport",
    "CompactionReport",
    "Diff",
    "ExpiryReport",
    "ExportReport",
    "IndexReport",
    "LeafPlace",
    "LoggedOperation",
    "ManifestLayout",
    "ManifestPlace",
    "MergeReport",
    "Operation",
    "PreloadReport",
    "PreloadState",
    "PreloadedManifest",
    "Problem",
    "ReadCost",
    "ReadCosts",
    "RecoveryReport",
    "RepackReport",
    "RestoreReport",
    "RewriteReport",
    "SnapshotInfo",
    "StatisticsReport",
    "Status",
    "Totals",
    "Usage",
    "ValueChanges",
    "VerifyReport",
    "moved_tops",
]

_FULL, _PART, _NONE = "\N{FULL BLOCK}", "\N{MEDIUM SHADE}", "\N{MIDDLE DOT}"
_COLORS = ("rgba(128,128,128,.25)", "#7fb2cb", "#1f77a4")

_SHOWN_CHUNKS: Final = 4
_SHOWN_COMMITS: Final = 1000
_GRAPH_ROWS: Final = 60


def moved_tops(moved: Mapping[str, str]) -> dict[str, str]:
    """New path by old path of moved nodes, without those that moved along with their group.

    Examples
    --------
    >>> from zarr_manifests.reports import moved_tops
    >>> moved_tops({"/air": "/sky", "/air/t": "/sky/t", "/air/q": "/q"})
    {'/air': '/sky', '/air/q': '/q'}
    """

    def went_along(old: str, new: str) -> bool:
        (above, _, name), (now_above, _, now_name) = old.rpartition("/"), new.rpartition("/")
        return name == now_name and moved.get(above) == now_above

    return {old: new for old, new in moved.items() if not went_along(old, new)}


class SnapshotInfo:
    """One entry of the history.

    What it says is looked up when it is asked for, since a listing may have many thousands.

    Attributes
    ----------
    snapshot_id, id : str
        The snapshot's id.
    parent_id : str or None
        Its parent's; None for the first of a repository.
    written_at : datetime
        When, in UTC, by the committer's clock.
    kind : str
        `append`, `overwrite`, `delete`, `metadata`, or `rewrite` (changes no data).
    message : str
        Why.
    metadata : mapping
        What the committer wanted kept.
    written : mapping of str to int
        What the commit did: `refs-set`, `refs-unset`, `chunk-bytes`, `chunk-objects`.
    commit_id : str
        32 hexadecimal digits, as in `CommitOutcomeUnknownError.commit_id`.
    totals : mapping of str to int
        What the snapshot holds: `arrays`, `groups`, `chunks`, `chunk-bytes`. Where the last two
        are upper bounds, they are `chunks-at-most` and `chunk-bytes-at-most`. What is not known
        is left out. `Repository.totals` gives the same per array.
    """

    __slots__ = ("_at", "_entries")

    def __init__(self, entries: HistoryEntries, at: int) -> None:
        self._entries = entries
        self._at = at

    @classmethod
    def of(cls, entry: HistoryEntry) -> SnapshotInfo:
        """The same, with the names that callers use."""
        return cls(HistoryEntries.of([entry]), 0)

    @property
    def snapshot_id(self) -> str:
        """The snapshot's id."""
        return self._entries.ids[self._at]

    @property
    def id(self) -> str:
        """The snapshot's id; the same as `snapshot_id`."""
        return self.snapshot_id

    @property
    def parent_id(self) -> str | None:
        """The id of its parent; None for the first of a repository."""
        parent = self._entries.parent_of(self._at)
        return None if parent is None else parent.snapshot_id

    @property
    def written_at(self) -> datetime:
        """When it was written, in UTC, by the committer's clock."""
        return datetime.fromtimestamp(self._entries.written_ms[self._at] / 1000, UTC)

    @property
    def kind(self) -> str:
        """What the commit mostly did."""
        return self._entries.kinds[self._at]

    @property
    def message(self) -> str:
        """The commit message."""
        return self._entries.messages[self._at] or ""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the committer wanted kept."""
        return self._entries.metadata[self._at]

    @property
    def written(self) -> Mapping[str, int]:
        """What the commit did."""
        return numbers_at(self._entries.totals, self._at)

    @property
    def commit_id(self) -> str:
        """The id of the commit, 32 hexadecimal digits."""
        return self._entries.commit_id(self._at).hex()

    @property
    def totals(self) -> Mapping[str, int]:
        """What the snapshot holds."""
        return numbers_at(self._entries.sums, self._at)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SnapshotInfo):
            return NotImplemented
        return self._entries.entry(self._at) == other._entries.entry(other._at)

    def __hash__(self) -> int:
        return hash(self.snapshot_id)

    def __reduce__(self) -> tuple[Any, ...]:
        return SnapshotInfo.of, (self._entries.entry(self._at),)  # without the other entries

    def __repr__(self) -> str:
        names = ("snapshot_id", "parent_id", "written_at", "kind", "message", "metadata", "written")
        shown = (f"{name}={getattr(self, name)!r}" for name in (*names, "commit_id", "totals"))
        return f"SnapshotInfo({', '.join(shown)})"

    _repr_html_ = report


class Ancestry(Iterator[SnapshotInfo]):
    """The history of a version, newest first: an iterator that a notebook shows as a graph.

    Made by `Repository.ancestry`. What a notebook shows is not taken from the iterator.

    Parameters
    ----------
    found : iterator of SnapshotInfo
        The snapshots.
    refs : callable
        Branches and tags of snapshots, by their ids.
    ancestry : callable
        The history of another snapshot, by its id, to show what was merged.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> history = zm.Repository.create("memory://history-example").ancestry()
    >>> "create repository" in history._repr_html_()
    True
    >>> next(history).message
    'create repository'
    """

    def __init__(
        self,
        found: Iterator[SnapshotInfo],
        refs: Callable[[], Mapping[str, Sequence[RefName]]],
        ancestry: Callable[[str], Iterable[SnapshotInfo]],
    ) -> None:
        self._found, self._refs, self._ancestry = found, refs, ancestry
        self._ahead: deque[SnapshotInfo] = deque()

    def __next__(self) -> SnapshotInfo:
        return self._ahead.popleft() if self._ahead else next(self._found)

    def __repr__(self) -> str:
        return "<Ancestry: an iterator of SnapshotInfo, newest first>"

    def _repr_html_(self) -> str:
        from zarr_manifests.picturing.graph import graph_html
        from zarr_manifests.picturing.lanes import lanes, lines

        refs: Mapping[str, Sequence[RefName]] = {}
        with suppress(ManifestsError):  # what is shown to look around must not fail
            self._ahead.extend(islice(self._found, _SHOWN_COMMITS + 1 - len(self._ahead)))
            refs = self._refs()
        shown = [*islice(self._ahead, _SHOWN_COMMITS)]

        def ancestry(snapshot_id: str) -> Iterator[SnapshotInfo]:
            with suppress(ManifestsError):
                yield from shown if snapshot_id == shown[0].id else self._ancestry(snapshot_id)

        found = lines([one.id for one in shown[:1]], ancestry, _SHOWN_COMMITS)
        graph = graph_html(lanes(found, refs, _GRAPH_ROWS))
        if len(self._ahead) > len(shown):
            graph += '<div class="zm-dim">... and older ones</div>'
        return page("History", graph)


@dataclass(frozen=True, slots=True)
class Diff:
    """What changed from one snapshot to a later one.

    Parameters
    ----------
    created, updated, deleted : tuple of str
        Absolute paths; a node that was deleted and made again is in both lists.
    chunks : mapping of str to int64[n, ndim]
        Coordinates of the chunks written or removed, by absolute path, sorted.
    moved : mapping of str to str
        New path by old; these are neither created nor deleted, but updated if their metadata
        changed too.
    truncated : mapping of str to tuple of int
        Of arrays that were made smaller, or whose chunks were moved, though they may have grown
        again since: the shape of the chunk grid, in chunks along each axis, beyond which all chunks
        went. Which these were is not looked up; `chunks` does not have them.
    grids : mapping of str to tuple of int
        Of the arrays in `chunks`: the shape of the chunk grid in the later snapshot.
    dimensions : mapping of str to tuple of (str or None)
        Of the arrays in `chunks` that name their dimensions: the names in the later snapshot.
    """

    created: tuple[str, ...]
    updated: tuple[str, ...]
    deleted: tuple[str, ...]
    chunks: Mapping[str, IndexArray]
    moved: Mapping[str, str] = field(default_factory=dict)
    truncated: Mapping[str, Coords] = field(default_factory=dict)
    grids: Mapping[str, Coords] = field(default_factory=dict, repr=False)
    dimensions: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        listed = self.created, self.updated, self.deleted, self.chunks, self.moved, self.truncated
        return any(listed)

    def __str__(self) -> str:
        chunks = self.chunks.items()
        shown = slice(_SHOWN_CHUNKS)
        return _listed(
            self, ((path, len(at), map(tuple, at[shown].tolist())) for path, at in chunks)
        )

    _repr_html_ = report

    def plot(self) -> npt.NDArray[np.object_]:
        """Draw which chunks of each array changed, and return the axes.

        Large grids are folded: a cell then stands for several chunks, and its color says how many
        of them changed. Where no chunk changed, the picture has what `str` says.

        Raises
        ------
        ImportError
            If matplotlib is not installed; it comes with the extra `plot`.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://plot-diff-example")
        >>> with repo.transaction(message="make air") as store:
        ...     air = zarr.create_array(store, name="air", shape=(8, 8), chunks=(2, 2), dtype="i2")
        ...     air[:] = 1
        >>> with repo.transaction(message="correct a corner") as store:
        ...     zarr.open_array(store, path="air")[:2, :2] = 7
        >>> (axes,) = repo.diff("main~1", "main").plot()
        >>> axes.get_title(loc="left")
        '/air: 1 of 16 chunks'
        """
        from zarr_manifests.picturing.draw import draw_diff

        counts = [("created", self.created), ("updated", self.updated), ("deleted", self.deleted)]
        title = "Changed chunks; nodes: " + ", ".join(f"{len(n):,} {name}" for name, n in counts)
        return draw_diff(title, str(self), self.chunks, self.grids, self.dimensions)


def _listed(changes: Diff | Status, chunks: Iterable[tuple[str, int, Iterable[Coords]]]) -> str:
    """Changes as lines; of the chunks of each array, how many there are and the first of them."""
    if not changes:
        return "no changes"
    groups = (("+", changes.created), ("~", changes.updated), ("-", changes.deleted))
    lines = [f"{sign} {path}" for sign, paths in groups for path in paths]
    again = sorted({*changes.created}.intersection(changes.deleted))
    lines += [f"  {path}: made again, so all that it held before is gone" for path in again]
    lines += [f"> {old} to {new}" for old, new in moved_tops(changes.moved).items()]
    lines += [f"  {path}: cut to {shape} chunks" for path, shape in changes.truncated.items()]
    lines += [f"  {path}: {_chunks_text(count, first)}" for path, count, first in sorted(chunks)]
    return "\n".join(map(plain_text, lines))


def _chunks_text(count: int, first: Iterable[Coords]) -> str:
    """How many chunks, and the first of them."""
    text = f"{count:,} chunk{'' if count == 1 else 's'}"
    shown = [str(at) for at in islice(first, _SHOWN_CHUNKS) if at]
    if not shown:
        return text
    return f"{text}: {', '.join(shown)}{', ...' if count > len(shown) else ''}"


@dataclass(frozen=True, slots=True, eq=False)
class ValueChanges:
    """Which cells of an array have other values in another version.

    Parameters
    ----------
    path : str
        Absolute path.
    shape, chunk_shape : tuple of int
        Of the newer array; of a sharded array, chunks are its shards.
    chunks : int64[n, ndim]
        Coordinates of the chunks with changed cells, in C order.
    counts : int64[n]
        How many cells have changed in each.
    minimum, maximum, mean : float or None
        Of the differences, new minus old, over the changed cells that are numbers in both versions;
        None if there are none. Values are as stored: not scaled, and times not decoded.
    to_nan, from_nan : int
        Changed cells that are NaN (or not a time) only in the newer version, or only in the older.
    added, removed : int
        Cells of only one version, because the array has another shape. They are not compared.
    """

    path: str
    shape: Coords
    chunk_shape: Coords
    chunks: IndexArray
    counts: IndexArray
    minimum: float | None
    maximum: float | None
    mean: float | None
    to_nan: int
    from_nan: int
    added: int
    removed: int

    @property
    def cells(self) -> int:
        """How many cells have changed."""
        return int(self.counts.sum())

    @property
    def map(self) -> IndexArray:
        """The number of changed cells in each chunk, in an array of the shape of the chunk grid."""
        found = np.zeros(grid_shape(self.shape, self.chunk_shape), np.int64)
        found[tuple(self.chunks.T)] = self.counts
        return found

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.cells:,} changed cells in {len(self.chunks):,} chunks"]
        if self.mean is not None:
            lines.append(f"  by {self.minimum:g} to {self.maximum:g}, on average by {self.mean:g}")
        facts = [(self.to_nan, "became NaN"), (self.from_nan, "were NaN")]
        facts += [(self.added, "were added"), (self.removed, "were removed")]
        lines += [f"  {count:,} {what}" for count, what in facts if count]
        return plain_text("\n".join(lines), lines=True)

    _repr_html_ = report


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
        chunks = f"{'' if self.refs_exact else 'at most '}{self.refs:,} chunks"
        if self.nbytes is None:
            return chunks
        return f"{chunks}, {'' if self.nbytes_exact else 'at most '}{self.nbytes:,} bytes"

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
        history = lanes([self.snapshots] if self.snapshots else [], {}, _GRAPH_ROWS)
        return page(
            "Usage",
            sums,
            folded(f"arrays ({len(self.arrays):,})", arrays, is_open=True),
            folded(f"snapshots ({len(self.snapshots):,})", graph_html(history)),
        )


@dataclass(frozen=True, slots=True)
class Status:
    """The uncommitted changes of a session.

    Parameters
    ----------
    created, updated, deleted : tuple of str
        Absolute paths of nodes; a node that was deleted and made again is created and deleted.
    chunks : mapping of str to int
        Number of chunks written or removed, by absolute path; a key that belongs to no array is one
        chunk.
    moved : mapping of str to str
        New path by old; these are neither created nor deleted.
    truncated : mapping of str to tuple of int
        Of arrays of the snapshot that were made smaller, or whose chunks were moved, though they
        may have grown again since: the shape of the chunk grid beyond which all chunks went.
    coordinates : mapping of str to tuple of tuple of int
        The first 100 of these chunks in C order, by absolute path.
    """

    created: tuple[str, ...]
    updated: tuple[str, ...]
    deleted: tuple[str, ...]
    chunks: Mapping[str, int]
    moved: Mapping[str, str] = field(default_factory=dict)
    truncated: Mapping[str, Coords] = field(default_factory=dict)
    coordinates: Mapping[str, tuple[Coords, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        listed = self.created, self.updated, self.deleted, self.chunks, self.moved, self.truncated
        return any(listed)

    def __str__(self) -> str:
        named, counts = self.coordinates, self.chunks.items()
        return _listed(self, ((path, count, named.get(path, ())) for path, count in counts))

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did, or would do.

    Parameters
    ----------
    source, base : str
        Ids of the snapshot that was merged, and of the newest one whose changes both sides had.
    into : str
        The branch.
    snapshot_id : str or None
        The head of the branch now; None for a dry run.
    commits : int
        Commits of the source that the branch did not have.
    fast_forward : bool
        Whether the branch was moved to the source, because it had nothing else to keep.
    conflicts : tuple of Conflict
        All places where both sides have different changes; only a dry run has any.
    dry_run : bool
        Whether nothing was changed.
    """

    source: str
    base: str
    into: str
    snapshot_id: str | None
    commits: int
    fast_forward: bool
    conflicts: tuple[Conflict, ...] = ()
    dry_run: bool = False

    @property
    def merges(self) -> bool:
        """Whether there was, or is, anything to merge."""
        return self.source != self.base

    def __str__(self) -> str:
        if not self.merges:
            return plain_text(f"{self.into} has all changes of {self.source}")
        count = f"{self.commits} commit" if self.commits == 1 else f"{self.commits:,} commits"
        would = "would bring" if self.dry_run else "brought"
        how = "by moving the branch there" if self.fast_forward else "in one commit"
        if self.conflicts:
            places = [f"  {conflict}" for conflict in self.conflicts]
            first = f"{self.source} cannot be merged into {self.into}, because of conflicts:"
            return "\n".join([plain_text(first), *places])
        return plain_text(f"{would} {count} of {self.source} to {self.into}, {how}")

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What a compaction did, or would do.

    Attributes
    ----------
    snapshot_id : str or None
        The snapshot that it made; None if there was nothing to do, for a dry run, and if somebody
        else was faster.
    deltas_before, deltas_after : int
        Deltas and runs that readers merge.
    manifests_before, manifests_after : int
        Manifests of the base.
    manifests_written : int
        Those of the base that are new.
    refs_merged : int
        Chunk refs in manifests that were written.
    bytes_written : int
        Bytes of all objects that were written.
    bytes_read : int
        Bytes of all objects that were fetched; what is in the cache is not fetched.
    """

    snapshot_id: str | None = None
    deltas_before: int = 0
    deltas_after: int = 0
    manifests_before: int = 0
    manifests_after: int = 0
    manifests_written: int = 0
    refs_merged: int = 0
    bytes_written: int = 0
    bytes_read: int = 0

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class RepackReport:
    """What a repacking did, or would do.

    Attributes
    ----------
    snapshot_id : str or None
        The branch's head that it made; None if there was nothing to do, and for a dry run.
    objects : int
        Chunk objects that the head refers to.
    nbytes : int
        Bytes of these, as far as they are there.
    packs : int
        Those of them whose live part is below `min_live`.
    packs_nbytes : int
        Bytes of these packs.
    chunks : int
        Live chunks in these packs: those that were moved, or would be.
    chunks_nbytes : int
        Bytes of these chunks.
    chunks_overtaken : int
        Chunks that somebody else has changed meanwhile, which were therefore not moved.
    packs_written : int
        New packs.
    dry_run : bool
        Whether nothing was written.
    """

    snapshot_id: str | None = None
    objects: int = 0
    nbytes: int = 0
    packs: int = 0
    packs_nbytes: int = 0
    chunks: int = 0
    chunks_nbytes: int = 0
    chunks_overtaken: int = 0
    packs_written: int = 0
    dry_run: bool = False

    @property
    def dead_nbytes(self) -> int:
        """Bytes of the packs that nothing of the head refers to, and that become garbage."""
        return self.packs_nbytes - self.chunks_nbytes

    _repr_html_ = report


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteReport:
    """What writing an array anew has cost, or would cost.

    Attributes
    ----------
    path : str
        The array's absolute path.
    snapshot_id : str or None
        The new snapshot; None for a dry run.
    chunks : tuple of two shapes
        Shapes of the chunks, before and after.
    shards : tuple of two shapes or None
        Shapes of the shards, before and after; None without shards.
    values_bytes : int
        Bytes of all values, not encoded.
    chunks_before, stored_bytes : int
        Chunks or shards of the old array that are there, and their bytes.
    reads_per_chunk : float
        How often each of these is read, on average.
    chunks_after : int
        Chunks or shards of the new array; in a dry run, all that there can be.
    tasks : int
        Boxes of cells that are read and written at a time.
    reused_tasks : int
        Those that an earlier call had written.
    """

    path: str
    snapshot_id: str | None
    chunks: tuple[Coords, Coords]
    shards: tuple[Coords | None, Coords | None]
    values_bytes: int
    chunks_before: int
    stored_bytes: int
    reads_per_chunk: float
    chunks_after: int
    tasks: int
    reused_tasks: int

    def __str__(self) -> str:
        what = [f"{name} {_shape(old)} -> {_shape(new)}" for name, (old, new) in self._shapes()]
        times = f"{self.reads_per_chunk:.3g} times" if self.reads_per_chunk > 1 else "once"
        tasks = f"tasks: {self.tasks:,}"
        did = "would read", "write"
        if self.snapshot_id is not None:
            did = "read", "wrote"
            tasks += f", {self.reused_tasks:,} of them done before" if self.reused_tasks else ""
        objects = "shards" if self.shards[1] else "chunks"
        return (
            f"{plain_text(self.path)}: {', '.join(what) or 'other codecs'}\n"
            f"{did[0]} {self.chunks_before:,} {'shards' if self.shards[0] else 'chunks'} {times}, "
            f"and {did[1]} {self.chunks_after:,} {objects}; {tasks}"
        )

    def _shapes(self) -> list[tuple[str, tuple[Coords | None, Coords | None]]]:
        """The shapes that change."""
        shapes = [("chunks", self.chunks), ("shards", self.shards)]
        return [(name, pair) for name, pair in shapes if pair[0] != pair[1]]

    _repr_html_ = report


def _shape(shape: Coords | None) -> str:
    return "none" if shape is None else " x ".join(f"{length:,}" for length in shape)


@dataclass(frozen=True, slots=True)
class IndexReport:
    """What building the index has done.

    Parameters
    ----------
    leaves : int
        Leaves of the branch's base.
    indexed : int
        Those of them that were new to the index.
    read_bytes, written_bytes : int
        Of the manifests that were read, and of the objects that were written.
    """

    leaves: int
    indexed: int
    read_bytes: int
    written_bytes: int

    _repr_html_ = report


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


@dataclass(frozen=True, slots=True)
class ManifestPlace:
    """A manifest of the base.

    Parameters
    ----------
    key : str or None
        Its key in the storage; None if it is only planned.
    set_name : str
        The manifest set it was packed for.
    refs : int
        Chunk refs in it.
    nbytes : int
        Its bytes.
    arrays : int
        How many arrays have refs in it.
    """

    key: str | None
    set_name: str
    refs: int
    nbytes: int
    arrays: int

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class LeafPlace:
    """A leaf: the box [lo, hi) of an array's chunks, its refs, and its manifest's position."""

    lo: Coords
    hi: Coords
    refs: int
    manifest: int

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class ArrayPlace:
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
    leaves : tuple of LeafPlace
        Where its refs are.
    pending_refs : int
        Refs that commits since have set or unset, and that are in no leaf yet.
    is_coordinate : bool
        Whether it is a 1-d array named as its own dimension.
    """

    path: str
    rule: int | None
    wanted: str
    overflows: tuple[Overflow, ...]
    leaves: tuple[LeafPlace, ...]
    pending_refs: int
    is_coordinate: bool

    @property
    def refs(self) -> int:
        """Refs in all its leaves."""
        return sum(leaf.refs for leaf in self.leaves)

    @property
    def manifests(self) -> tuple[int, ...]:
        """Positions of the manifests with leaves of it, each once."""
        return tuple(sorted({leaf.manifest for leaf in self.leaves}))

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Requests to the storage, and the bytes they bring."""

    requests: int
    nbytes: int

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class ReadCosts:
    """What a process that has read nothing yet fetches of the metadata; chunks are not counted.

    Parameters
    ----------
    opening : ReadCost
        To open the repository and the snapshot: its groups, arrays and attributes are there then.
    coordinates : ReadCost
        What is fetched after that to find all chunks of all coordinates.
    last_step : ReadCost
        What is fetched after that to find the last chunks along the first axis of all other
        arrays, which is where one more step is appended.
    """

    opening: ReadCost
    coordinates: ReadCost
    last_step: ReadCost

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class ManifestLayout:
    """Which manifests there are, and in which of them the refs of each array are.

    Parameters
    ----------
    snapshot_id : str
        The snapshot.
    manifests : tuple of ManifestPlace
        The base's.
    arrays : tuple of ArrayPlace
        By path; opaque keys that are stored as chunks are among them.
    costs : ReadCosts or None
        What is fetched to read it; of what is planned only, see `Repository.read_costs`.
    """

    snapshot_id: str
    manifests: tuple[ManifestPlace, ...]
    arrays: tuple[ArrayPlace, ...]
    costs: ReadCosts | None = None

    _repr_html_ = report


class PreloadState(StrEnum):
    """What became of a manifest that a session might need."""

    FETCHED = "fetched"
    SKIPPED = "skipped"
    FAILED = "failed"
    WAITING = "waiting"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class PreloadedManifest:
    """A manifest or delta with chunk refs of an array that is preloaded.

    Parameters
    ----------
    key : str
        Its key in the storage.
    refs : int
        Chunk refs in it.
    nbytes : int
        Its bytes.
    state : PreloadState
        What became of it.
    why : str
        Why it was skipped, or could not be fetched; else empty.
    """

    key: str
    refs: int
    nbytes: int
    state: PreloadState
    why: str = ""

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class PreloadReport:
    """What a session has prefetched, and what it has not.

    Parameters
    ----------
    snapshot_id : str
        The snapshot that the session opened with.
    manifests : tuple of PreloadedManifest
        The smallest first.
    done : bool
        Whether nothing more will be fetched.
    """

    snapshot_id: str
    manifests: tuple[PreloadedManifest, ...]
    done: bool

    def of(self, state: PreloadState | str) -> tuple[PreloadedManifest, ...]:
        """Those in that state, such as `"fetched"`."""
        return tuple(one for one in self.manifests if one.state == state)

    @property
    def nbytes(self) -> int:
        """Bytes of what was fetched."""
        return sum(one.nbytes for one in self.of(PreloadState.FETCHED))

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class ExpiryReport:
    """What an expiry has done, or would do.

    Parameters
    ----------
    expired : mapping of str to tuple of str
        Ids of the snapshots that have left each branch's history, newest first; branches that
        keep all they have are not named.
    kept : mapping of str to int
        How many snapshots the history of each branch has now.
    dry_run : bool
        Whether nothing was changed.
    """

    expired: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    dry_run: bool = False

    @property
    def snapshots(self) -> tuple[str, ...]:
        """Ids of all snapshots that have left the history of some branch, each once."""
        return tuple(dict.fromkeys(name for names in self.expired.values() for name in names))

    _repr_html_ = report


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export has written; `str` says it in words.

    Parameters
    ----------
    format : str
        The format.
    dest : str
        Where it is.
    snapshot_id : str
        The snapshot that was exported.
    path : str
        The group or array that became the root.
    groups, arrays : int
        How many there are.
    chunks, nbytes : int
        The chunks in it, and their bytes as stored.
    referenced : int
        Those of them that are referred to, and not copied.
    reused : int
        Those of them that an interrupted export had left there.
    tag : str or None
        The tag that keeps what is referred to; None if nothing is.
    """

    format: str
    dest: str
    snapshot_id: str
    path: str
    groups: int
    arrays: int
    chunks: int
    nbytes: int
    referenced: int = 0
    reused: int = 0
    tag: str | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.path} of snapshot {self.snapshot_id} as {self.format} at {self.dest}",
            f"arrays: {self.arrays:,}; chunks: {self.chunks:,}, {self.nbytes:,} bytes",
        ]
        if self.reused:
            lines.append(f"chunks that were there already: {self.reused:,}")
        if self.tag is not None:
            lines.append(
                f"chunks that are referred to: {self.referenced:,}; the tag {self.tag} keeps them"
            )
        return "\n".join(map(plain_text, lines))

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class CollectionReport:
    """What a collection has deleted, or would delete.

    Parameters
    ----------
    fence : int
        Sessions that began before this version of the root and hold no lease cannot commit.
    kept : int
        Objects that can be reached.
    objects, nbytes : mapping of str to int
        Objects deleted, and their bytes, by kind: `chunks`, `manifests`, `snapshots`, `root`, ...
    leases_removed : int
        Leases whose time was up.
    temporary_files : int
        Files removed that killed writers have left on a local disk.
    complete : bool
        Whether all objects of the repository were looked at.
    dry_run : bool
        Whether nothing was changed or deleted.
    """

    fence: int
    kept: int
    objects: Mapping[str, int] = field(default_factory=dict)
    nbytes: Mapping[str, int] = field(default_factory=dict)
    leases_removed: int = 0
    temporary_files: int = 0
    complete: bool = False
    dry_run: bool = False

    @property
    def deleted(self) -> int:
        """Objects of all kinds that were deleted."""
        return sum(self.objects.values())

    @property
    def deleted_nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.nbytes.values())

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the key of an object, and what is wrong with it."""

    key: str
    what: str

    def __str__(self) -> str:
        return plain_text(self.what if self.key in self.what else f"{self.key}: {self.what}")

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification has found.

    Parameters
    ----------
    problems : tuple of Problem
        What is wrong; none if all is well.
    objects : int
        Metadata objects read, roots and archives included.
    chunk_objects, chunks : int
        Chunk objects read, and the different ranges of them that chunks refer to.
    nbytes : int
        Bytes of these chunks.
    unguarded : int
        Different byte ranges of files elsewhere that virtual chunks refer to without an etag or a
        time, so that a change of the file is not noticed. They are no problems.
    """

    problems: tuple[Problem, ...] = ()
    objects: int = 0
    chunk_objects: int = 0
    chunks: int = 0
    nbytes: int = 0
    unguarded: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class CloneReport:
    """What a clone has copied.

    Parameters
    ----------
    version : int
        The version of the clone's root.
    branches : mapping of str to str
        The snapshots of the cloned branches, by name.
    tags : mapping of str to str
        The snapshots of the tags that are new in the clone, by name.
    snapshots : int
        Snapshots that are new in the clone.
    objects : int
        Objects copied by this call.
    nbytes : int
        Their bytes.
    within_store : int
        How many of them the store has copied itself.
    skipped : int
        Objects that were there already, from a call that was interrupted.
    chunks : int
        Different ranges of chunk objects that these snapshots need and the clone may lack.
    virtual : int
        Chunks of these snapshots that are in files elsewhere. They stay there, and the clone
        refers to the same files.
    """

    version: int
    branches: Mapping[str, str]
    tags: Mapping[str, str]
    snapshots: int = 0
    objects: int = 0
    nbytes: int = 0
    within_store: int = 0
    skipped: int = 0
    chunks: int = 0
    virtual: int = 0

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """One operation on the root.

    Parameters
    ----------
    version : int
        The version of the root that it made; `Repository.restore_refs` takes one.
    at : datetime
        When, in UTC, by the clock of who did it.
    operation : str
        What: `commit append`, `create branch`, `expire snapshots`, ...
    ref : str
        The branch or tag it was about; empty if about none.
    snapshot_id : str
        The snapshot concerned; may be empty.
    operation_id : str
        Its random id in hexadecimal; of a commit that is `SnapshotInfo.commit_id`.
    by : str
        Who, as they said: the user and the host, or what the environment variable
        `ZARR_MANIFESTS_WHO` was set to; may be empty.
    before : str
        Of an amend, a reset or a deletion: id of the snapshot that the branch or tag was at. It can
        be opened by that id until it is collected. Else empty.
    """

    version: int
    at: datetime
    operation: str
    ref: str
    snapshot_id: str
    operation_id: str
    by: str = ""
    before: str = ""

    @classmethod
    def of(cls, entry: LogEntry) -> LoggedOperation:
        """What an entry of the log says."""
        at = datetime.fromtimestamp(entry.at_ms / 1000, UTC)
        operation, _, before = entry.operation.partition(" from ")
        return cls(
            entry.version,
            at,
            operation,
            entry.ref,
            entry.snapshot,
            entry.commit_id.hex(),
            entry.by,
            before,
        )

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The branches and tags that `restore_refs` has moved, or would move.

    Parameters
    ----------
    version : int
        The version whose branches and tags these are.
    branches, tags : mapping of str to (str or None, str or None)
        By name, of those that differ: the ids of their snapshots before and after; None where
        there is no such branch or tag.
    dry_run : bool
        Whether nothing was changed.
    """

    version: int
    branches: dict[str, tuple[str | None, str | None]]
    tags: dict[str, tuple[str | None, str | None]]
    dry_run: bool = False

    _repr_html_ = report


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a recovery has done, or would do.

    Parameters
    ----------
    recovered : int
        The version of the root whose archive was taken.
    version : int
        The version of the root now.
    branches : mapping of str to str
        The id of each branch's head.
    perhaps_lost : range
        Versions after it that there were, or may have been, and that are not in the root now. If
        the root could not be read, how many there were is not known: then these are all from the
        first one on up to the root's version now. Empty if the newest version was taken.
    skipped : mapping of int to str
        Newer archives that were not taken, and what was wrong with each.
    dry_run : bool
        Whether nothing was changed.
    """

    recovered: int
    version: int
    branches: dict[str, str]
    perhaps_lost: range
    skipped: dict[int, str]
    dry_run: bool = False

    _repr_html_ = report
