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
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    plain_text,
)
from zarr_manifests.format.chunk_table import ChunkTable, RefKind, side_by_side
from zarr_manifests.format.manifest import Node, NodeKind
from zarr_manifests.grid import Box, Coords, IndexArray
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

type Places = Mapping[Coords, Coords | None] | Callable[[Coords], Coords | None]
"""New coordinate by old one; None to drop the chunk."""


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
            raise AlreadyExistsError(f"/{key_of(path)} is there already; delete it first")
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


def reindexed(
    coords: IndexArray, places: Places, grid: Box, name: str
) -> tuple[npt.NDArray[np.bool_], IndexArray]:
    """Which chunks (at `coords`, in C order) are kept, and their new coordinates.

    Chunks that a mapping does not name stay where they are. Those that it names and that do not
    exist are ignored. A function is called for each chunk.

    Raises
    ------
    InvalidArgumentError
        If a coordinate is not one integer per axis, a chunk leaves the grid, or two chunks get the
        same coordinate.
    """
    chunks = [*map(tuple, coords.tolist())]
    if callable(places):
        found = [places(chunk) for chunk in chunks]
    else:
        _whole_numbers(list(places), grid.ndim, name)
        found = [places.get(chunk, chunk) for chunk in chunks]
    keep, moved = np.array([to is not None for to in found], np.bool_), coords.copy()
    moved[keep] = _whole_numbers([to for to in found if to is not None], grid.ndim, name)
    kept = np.flatnonzero(keep)
    off = kept[~grid.holds(moved[kept])]
    if len(off):
        raise InvalidArgumentError(
            f"{name}: chunk {_one(coords, off)} cannot go to {_one(moved, off)}, which is "
            f"not in the grid {grid.shape}"
        )
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


def _whole_numbers(rows: Sequence[Any], width: int, name: str) -> IndexArray:
    """The rows as int64[n, width]."""
    try:
        found = np.array(rows or np.zeros((0, width), np.int64))
    except ValueError:  # rows of different lengths
        found = np.zeros(0)
    if found.ndim != 2 or found.shape[1] != width or found.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{name}: a chunk coordinate is one whole number an axis, as in {{(0,): (1,)}}"
        )
    return found.astype(np.int64)


def _one(coords: IndexArray, rows: npt.NDArray[np.int64]) -> Coords:
    """The coordinate in the first of these rows."""
    return tuple(coords[rows[0]].tolist())


# --- where chunks are stored --------------------------------------------------------------------


def locate(table: ChunkTable) -> tuple[IndexArray, IndexArray]:
    """For each row, the position of its location (int64[n], -1 if inline).

    Also the objects among the locations, by session and number (int64[m, 2]). Virtual files come
    after these.
    """
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
    return found, np.stack(np.divmod(distinct, most), axis=1)


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
            return cls(path, coords, kind, none, none, none, none, [])
        kind, (source, objects) = table.kind.astype(np.uint8), locate(table)
        locations = [object_key("chunks", table.sources[at], n) for at, n in objects.tolist()]
        if (kind == RefKind.VIRTUAL).any():
            locations += [file.location for file in table.virtual]
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
        is_inline = self.kind == RefKind.INLINE
        kinds = pa.array([kind.name.lower() for kind in RefKind])
        kind = self.kind.astype(np.int8)
        sources = pa.array(self.source.astype(np.int32), mask=is_inline)
        locations = pa.array(self.locations, pa.string())
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
