"""From what callers say of places to boxes of chunks, new coordinates of chunks, and new paths.

Bounds of an axis are a slice without step, or `(start, stop)`. They work as for a list of that
length: negative bounds count from the end, and bounds beyond the end are clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import MAX_BOX_CHUNKS, Box, Coords, IndexArray

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


# --- moves -------------------------------------------------------------------------------------

type Places = (
    Mapping[Coords, Coords | None] | Callable[[Coords], Coords | None] | npt.NDArray[np.integer]
)
"""New coordinate by old one, None to drop the chunk; or an array with old and new side by side."""

DROPPED: Final = -1
"""In an array of moves: the new coordinate, on every axis, that drops the chunk."""


@dataclass(frozen=True, slots=True)
class Moves:
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
    if _within(new, old):
        raise InvalidArgumentError(f"/{old} cannot be moved to /{new}, which is or lies below it")
    for path, node in nodes.items():
        if _within(_key(node), new):
            raise AlreadyExistsError(
                f"there is something at /{new}: /{_key(node)}; delete it first"
            )
        if node.kind is NodeKind.ARRAY and _within(new, path):
            raise InvalidArgumentError(f"/{new} would lie below the array /{path}")
    above = new.rpartition("/")[0]
    if above and above not in nodes:
        raise NotFoundError(f"there is no group /{above} to move to; make it first")
    taken = {path: _key(node) for path, node in nodes.items() if _within(_key(node), old)}
    return {path: path[: -len(key)] + new + key[len(old) :] for path, key in taken.items()}


def _key(node: Node) -> str:
    """The node's path; for an opaque entry its key, without the leading slash."""
    return node.path[1:] if node.kind is NodeKind.OPAQUE else node.path


def _within(path: str, top: str) -> bool:
    return path == top or not top or path.startswith(top + "/")


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
