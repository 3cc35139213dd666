"""From what callers say of places to boxes of chunks, new coordinates of chunks, and new paths.

Bounds of an axis are a slice without step, or `(start, stop)`. They work as for a list of that
length: negative bounds count from the end, and bounds beyond the end are clipped.

Where an array's chunks are stored, as columns
----------------------------------------------

Invariants of the columns: there is one row for each existing chunk, in C order of coordinates; all
columns have the same length; bytes of inline chunks are stored back to back in row order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from operator import index
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    plain_text,
)
from zarr_manifests.format.chunk_table import (
    NO_SOURCES,
    ChunkTable,
    RefKind,
    VirtualSources,
    side_by_side,
)
from zarr_manifests.format.manifest import Node, NodeKind
from zarr_manifests.grid import MAX_BOX_CHUNKS, Box, Coords, IndexArray
from zarr_manifests.ids import object_key
from zarr_manifests.keys import lies_below
from zarr_manifests.planning.components import key_of

if TYPE_CHECKING:
    import pyarrow as pa


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
    >>> from zarr_manifests.planning.regions import chunk_box
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
    >>> from zarr_manifests.planning.regions import cells_box
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


# --- moves -------------------------------------------------------------------------------------

type Places = (
    Mapping[Coords, Coords | None] | Callable[[Coords], Coords | None] | npt.NDArray[np.integer]
)
"""New coordinate by old one, None to drop the chunk; or an array with old and new side by side."""

DROPPED: Final = -1
"""In an array of moves: the new coordinate, on every axis, that drops the chunk."""


class Moves(Struct, frozen=True):
    """New coordinates of chunks.

    Parameters
    ----------
    old, new : int64[n, ndim]
        Old and new coordinates of each chunk.
    dropped : bool[n]
        Which chunks are dropped; their `new` is ignored.
    """

    old: IndexArray
    new: IndexArray
    dropped: npt.NDArray[np.bool_]


def plan_move(nodes: Mapping[str, Node], old: str, new: str) -> dict[str, str]:
    """Return the new path of every node that moves when the node at `old` moves to `new`.

    Raises
    ------
    NotFoundError
        If nothing is at `old`, or the parent group of `new` does not exist.
    AlreadyExistsError
        If something is at or below `new`.
    InvalidArgumentError
        If `old` or `new` is the root, or `new` is `old` or lies below it or below an array.
    """
    if old not in nodes:
        raise NotFoundError(f"there is no group or array at /{old}")
    if not old or not new:
        raise InvalidArgumentError("the root cannot be moved or replaced by a move")
    if lies_below(new, old):
        raise InvalidArgumentError(f"/{old} cannot be moved to /{new}, which is or lies below it")
    for path, node in nodes.items():
        if lies_below(key_of(path), new):
            raise AlreadyExistsError(
                f"there is something at /{new}: /{key_of(path)}; delete it first"
            )
        if node.kind is NodeKind.ARRAY and lies_below(new, path):
            raise InvalidArgumentError(f"/{new} would lie below the array /{path}")
    above = new.rpartition("/")[0]
    if above and above not in nodes:
        raise NotFoundError(f"there is no group /{above} to move to; make it first")
    taken = {path: key_of(path) for path in nodes if lies_below(key_of(path), old)}
    return {path: path[: -len(key)] + new + key[len(old) :] for path, key in taken.items()}


def shifted(
    coords: IndexArray, offset: Coords, shape: Coords
) -> tuple[npt.NDArray[np.bool_], IndexArray]:
    """Which chunks stay inside the grid when moved by `offset`, and their new coordinates."""
    hi = np.asarray(shape, np.int64)
    # Clipped, so that an offset of any size moves everything out without overflow.
    moved = coords + np.clip(np.array(offset, object), -hi, hi).astype(np.int64)
    return ((moved >= 0) & (moved < hi)).all(axis=1), moved


def moves_of(places: Places, coords: IndexArray, name: str) -> Moves:
    """The moves as columns. A function is called for each of `coords` (int64[n, ndim]).

    Raises
    ------
    InvalidArgumentError
        If a coordinate is not one integer per axis, or an array's rows are not two.
    """
    ndim = coords.shape[1]
    if callable(places):
        found = [(chunk, places(chunk)) for chunk in map(tuple, coords.tolist())]
    elif isinstance(places, Mapping):
        found = list(places.items())
    else:
        columns = _whole_numbers(places, 2 * ndim, name)
        was, to = columns[:, :ndim], columns[:, ndim:]
        return Moves(was, to, (to == DROPPED).all(axis=1))
    nowhere = (0,) * ndim
    return Moves(
        _whole_numbers([was for was, _ in found], ndim, name),
        _whole_numbers([nowhere if to is None else to for _, to in found], ndim, name),
        np.array([to is None for _, to in found], np.bool_),
    )


def _whole_numbers(rows: npt.ArrayLike, width: int, name: str) -> IndexArray:
    """The rows as int64[n, width]."""
    try:
        found = np.asarray(rows)
    except ValueError:  # rows of different lengths
        found = np.zeros(0)
    if isinstance(rows, list) and not rows:
        found = np.zeros((0, width), np.int64)
    fits = found.ndim == 2 and found.shape[1] == width and found.dtype.kind in "iu"
    if not fits or (found.dtype.kind == "u" and found.size and found.max() > MAX_BOX_CHUNKS):
        raise InvalidArgumentError(
            f"{name}: a chunk coordinate is one whole number an axis; an array of moves has "
            "columns for the old coordinate, then for the new one"
        )
    return found.astype(np.int64)


def reindexed(
    coords: IndexArray, moves: Moves, grid: Box, name: str
) -> tuple[npt.NDArray[np.bool_], IndexArray]:
    """Which chunks (at `coords`, in C order) are kept, and their new coordinates.

    Chunks that `moves` does not name stay where they are. Moves of chunks that do not exist are
    ignored.

    Raises
    ------
    InvalidArgumentError
        If a chunk leaves the grid, two chunks get the same coordinate, or one is moved twice.
    """
    inside = np.flatnonzero(grid.holds(moves.old))
    order = np.argsort(grid.ravel(moves.old[inside]), kind="stable")
    inside = inside[order]
    wanted, there = grid.ravel(moves.old[inside]), grid.ravel(coords)
    again = np.flatnonzero(wanted[1:] == wanted[:-1])
    if len(again):
        raise InvalidArgumentError(f"{name}: chunk {_one(moves.old, inside[again])} is moved twice")
    named = np.isin(wanted, there, assume_unique=True)
    rows, which = np.searchsorted(there, wanted[named]), inside[named]
    dropped = moves.dropped[which]
    off = which[~dropped & ~grid.holds(moves.new[which])]
    if len(off):
        raise InvalidArgumentError(
            f"{name}: chunk {_one(moves.old, off)} cannot go to {_one(moves.new, off)}, which is "
            f"not in the grid {grid.shape}"
        )
    keep, moved = np.ones(len(coords), np.bool_), coords.copy()
    keep[rows[dropped]] = False
    moved[rows[~dropped]] = moves.new[which[~dropped]]
    kept = np.flatnonzero(keep)
    target = grid.ravel(moved[kept])
    order = np.argsort(target, kind="stable")
    clash = np.flatnonzero(target[order][1:] == target[order][:-1])
    if len(clash):
        one, other = kept[order[clash[:1]]], kept[order[clash[:1] + 1]]
        raise InvalidArgumentError(
            f"{name}: chunks {_one(coords, one)} and {_one(coords, other)} both go to "
            f"{_one(moved, one)}"
        )
    return keep, moved


def _one(coords: IndexArray, rows: npt.NDArray[np.int64]) -> Coords:
    """The coordinate in the first of these rows."""
    return tuple(coords[rows[0]].tolist())


# --- where chunks are stored --------------------------------------------------------------------


class ChunkKind(IntEnum):
    """Where a chunk's bytes are.

    `INLINE`: in the manifest, or still in the session's memory. `NATIVE`: in an object of the
    repository. `VIRTUAL`: in a file elsewhere.

    Examples
    --------
    >>> from zarr_manifests.planning.regions import ChunkKind
    >>> ChunkKind(2).name
    'NATIVE'
    """

    INLINE = RefKind.INLINE
    NATIVE = RefKind.NATIVE
    VIRTUAL = RefKind.VIRTUAL


class Locations(Sequence[str]):
    """Object keys, then file URLs, that hold chunks. Each string is built on access."""

    def __init__(
        self,
        sessions: Sequence[str],
        session: IndexArray,
        number: IndexArray,
        files: VirtualSources = NO_SOURCES,
    ) -> None:
        self._sessions = tuple(sessions)
        self._session = session
        self._number = number
        self._files = files

    def __len__(self) -> int:
        return len(self._number) + len(self._files)

    @overload
    def __getitem__(self, position: int) -> str: ...
    @overload
    def __getitem__(self, position: slice) -> list[str]: ...
    def __getitem__(self, position: int | slice) -> str | list[str]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        at, native = range(len(self))[position], len(self._number)
        if at >= native:
            return self._files[at - native].location
        session = self._sessions[self._session.item(at)]
        return object_key("chunks", session, self._number.item(at))

    def __repr__(self) -> str:
        return f"<{len(self._number)} objects and {len(self._files)} files>"


def locate(table: ChunkTable) -> tuple[IndexArray, Locations]:
    """For each row, the position of its location (int64[n], -1 if inline); and the locations."""
    found = np.full(len(table), -1, np.int64)
    native = np.flatnonzero(table.kind == RefKind.NATIVE)
    source, number = table.source[native], table.number[native]
    most = int(number.max(initial=0)) + 1
    rank = source * most + number  # fits: there are fewer than 10**9 numbers and 2**33 sessions
    first = np.diff(rank, prepend=-1) != 0
    if (rank[1:] >= rank[:-1]).all():  # already in the order they were written
        found[native] = np.cumsum(first) - 1
        distinct = rank[first]
    else:
        distinct, found[native] = np.unique(rank, return_inverse=True)
    virtual = np.flatnonzero(table.kind == RefKind.VIRTUAL)
    found[virtual] = table.source[virtual] + len(distinct)
    files = table.virtual if len(virtual) else NO_SOURCES
    return found, Locations(table.sources, distinct // most, distinct % most, files)


class ResolvedChunks(Struct, frozen=True, eq=False):
    """Where the chunks of an array are stored: one row per existing chunk, in C order.

    Made by `Session.chunk_refs`.

    Parameters
    ----------
    path : str
        Path of the array.
    coords : int64[n, ndim]
        Chunk coordinates.
    kind : uint8[n]
        1 for an inline chunk (it is in a manifest, or still in memory), 2 for one in an object of
        the repository, 3 for a virtual one (it is in a file elsewhere).
    source : int64[n]
        Position in `locations` of the object or file; -1 for an inline chunk.
    offset, length : int64[n]
        Byte range in that location; for an inline chunk, in `inline`.
    checksum : int64[n]
        crc32c of the chunk's bytes; -1 where it is unknown, and for inline chunks.
    locations : sequence of str
        Keys of objects in the repository's storage, and URLs of files elsewhere
        (`virtual://<container>/<path>` below a container).
    inline : bytes
        The inline chunks' bytes.

    Raises
    ------
    InvalidArgumentError
        If the columns differ in length, or inline chunks are not stored back to back.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://resolved-example")
    >>> with repo.transaction(message="fill half") as store:
    ...     a = zarr.create_array(store, name="a", shape=(8,), chunks=(2,), dtype="i2")
    ...     a[4:] = 7
    >>> found = repo.readonly_session().chunk_refs("a")
    >>> found.coords.tolist(), found.kind.tolist()
    ([[2], [3]], [1, 1])
    """

    path: str
    coords: IndexArray
    kind: npt.NDArray[np.uint8]
    source: IndexArray
    offset: IndexArray
    length: IndexArray
    checksum: IndexArray
    locations: Sequence[str]
    inline: bytes = field(default=b"")

    def __post_init__(self) -> None:
        columns = (self.kind, self.source, self.offset, self.length, self.checksum)
        is_inline = self.kind == ChunkKind.INLINE
        lengths = self.length[is_inline] if is_inline.any() else np.empty(0, np.int64)
        if (
            any(len(column) != len(self.coords) for column in columns)
            or int(lengths.sum()) != len(self.inline)
            or (self.offset[is_inline] != np.cumsum(lengths) - lengths).any()
        ):
            raise InvalidArgumentError("the columns of resolved chunks contradict each other")

    def __len__(self) -> int:
        return len(self.coords)

    def __repr__(self) -> str:
        return (
            f"<ResolvedChunks of {plain_text(self.path)}: {len(self)} chunks of {self.nbytes} "
            f"bytes in {len(self.locations)} objects or files>"
        )

    @property
    def nbytes(self) -> int:
        """Total size of the chunks as stored, in bytes."""
        return int(self.length.sum())

    @classmethod
    def from_table(cls, path: str, ndim: int, table: ChunkTable | None) -> ResolvedChunks:
        """Build it from a table without UNSET rows; empty if there is no table."""
        if table is None:
            none = np.empty(0, np.int64)
            kind = none.astype(np.uint8)
            coords = np.empty((0, ndim), np.int64)
            return cls(path, coords, kind, none, none, none, none, Locations((), none, none))
        kind, (source, locations) = table.kind.astype(np.uint8), locate(table)
        known = (kind == RefKind.NATIVE) | ((kind == RefKind.VIRTUAL) & (table.number == 1))
        checksum = np.where(known, table.crc32c, -1)
        offset, length, inline = np.ascontiguousarray(table.offset), table.length, table.inline
        if inline:  # other orders are valid, though we write it so
            offset, inline = side_by_side(inline, table.kind, offset, length)
        length = np.ascontiguousarray(length)
        return cls(path, table.coords(), kind, source, offset, length, checksum, locations, inline)

    def to_arrow(self) -> pa.Table:
        """The rows as a pyarrow table.

        Columns: `coords` (a list with one number per axis), `kind` (`inline`, `native` or
        `virtual`), `location`, `offset`, `length`, `checksum` and `data`. An inline chunk has no
        location and no offset; only inline chunks have data. An unknown checksum is null.

        Raises
        ------
        ImportError
            If pyarrow is not installed.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.create("memory://arrow-example").writable_session()
        >>> a = zarr.create_array(session.store, name="a", shape=(8,), chunks=(2,), dtype="i2")
        >>> a[4:] = 7
        >>> session.chunk_refs("a").to_arrow().select(["coords", "kind"]).to_pylist()
        [{'coords': [2], 'kind': 'inline'}, {'coords': [3], 'kind': 'inline'}]
        """
        try:
            import pyarrow as pa
        except ImportError as error:
            raise ImportError(
                "to_arrow() needs pyarrow, which is not installed; "
                'pip install "zarr-manifests[spark]"'
            ) from error
        is_inline = self.kind == ChunkKind.INLINE
        kinds = pa.array([kind.name.lower() for kind in ChunkKind])
        kind = self.kind.astype(np.int8) - np.int8(ChunkKind.INLINE)
        sources = pa.array(self.source.astype(np.int32), mask=is_inline)
        locations = pa.array(list(self.locations), pa.string())
        ndim = self.coords.shape[1]
        flat = pa.array(np.ascontiguousarray(self.coords).reshape(-1), pa.int64())
        coords = (
            pa.FixedSizeListArray.from_arrays(flat, ndim)
            if ndim
            else pa.array([[]] * len(self), pa.list_(pa.int64(), 0))
        )
        return pa.table(
            {
                "coords": coords,
                "kind": pa.DictionaryArray.from_arrays(kind, kinds),
                "location": pa.DictionaryArray.from_arrays(sources, locations),
                "offset": pa.array(self.offset, mask=is_inline),
                "length": pa.array(self.length),
                "checksum": pa.array(self.checksum, mask=self.checksum < 0),
                "data": self._data(pa, is_inline),
            }
        )

    def _data(self, pa: Any, is_inline: npt.NDArray[np.bool_]) -> Any:
        ends = np.cumsum(np.where(is_inline, self.length, 0), dtype=np.int64)
        offsets = np.concatenate([[0], ends]).astype(np.int64)
        there = pa.py_buffer(np.packbits(is_inline, bitorder="little"))
        parts = [there, pa.py_buffer(offsets), pa.py_buffer(self.inline)]
        return pa.Array.from_buffers(pa.large_binary(), len(self), parts)
