"""Nodes that were changed or moved, and new coordinates of shifted or reindexed chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import MAX_BOX_CHUNKS, Box, Coords, IndexArray
from zarr_manifests.keys import V2_ATTRIBUTES, absolute

type Places = (
    Mapping[Coords, Coords | None] | Callable[[Coords], Coords | None] | npt.NDArray[np.integer]
)
"""New coordinate by old one, None to drop the chunk; or an array with old and new side by side."""

type Fields = Mapping[str, tuple[Any, Any]]
"""By name, what a field was and what it is; None where it is not. Attributes are `attributes.x`."""

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


def moved_paths(before: Mapping[str, Node], after: Mapping[str, Node]) -> dict[str, str]:
    """The new path by old path of every node that is in both, at different paths."""
    old = {node.node_id: path for path, node in before.items()}
    return {
        old[node.node_id]: path
        for path, node in sorted(after.items())
        if node.node_id in old and old[node.node_id] != path
    }


@dataclass(frozen=True, slots=True)
class ChangedNodes:
    """The nodes that differ between two states, by absolute path.

    Parameters
    ----------
    created, updated, deleted : tuple of str
        A node that was deleted and made again at its path is created and deleted.
    moved : mapping of str to str
        New path by old; these are neither created nor deleted.
    """

    created: tuple[str, ...]
    updated: tuple[str, ...]
    deleted: tuple[str, ...]
    moved: Mapping[str, str]
    fields: Mapping[str, Fields]
    """Of the updated ones: which fields of their metadata differ."""


def changed_nodes(before: Mapping[str, Node], after: Mapping[str, Node]) -> ChangedNodes:
    """What was done to nodes; those with the same id are the same."""
    moved = moved_paths(before, after)
    same = {p: p for p in before.keys() & after.keys() if before[p].node_id == after[p].node_id}
    same |= moved
    updated = {
        absolute(to): field_changes(before[p], after[to])
        for p, to in same.items()
        if before[p].documents != after[to].documents
    }
    return ChangedNodes(
        _absolute(after.keys() - set(same.values())),
        tuple(sorted(updated)),
        _absolute(before.keys() - same.keys()),
        {absolute(old): absolute(new) for old, new in moved.items()},
        updated,
    )


def _fields_of(node: Node) -> dict[str, Any]:
    """The fields of a group's or an array's documents; the attributes are one of them."""
    found: dict[str, Any] = {}
    for name, data in node.documents.items():
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):  # those of format 2 may be anything
            fields = data.decode(errors="replace")
        found |= {"attributes": fields} if name == V2_ATTRIBUTES else fields
    return found


def field_changes(old: Node, new: Node) -> Fields:
    """The fields that differ between two states of a node.

    Examples
    --------
    >>> from zarr_manifests.planning.tables.moves import field_changes
    >>> from zarr_manifests.format.nodes import Node, NodeKind
    >>> group = lambda attributes: Node(
    ...     "", bytes(12), NodeKind.GROUP, {".zgroup": b'{"zarr_format": 2}', ".zattrs": attributes}
    ... )
    >>> field_changes(group(b'{"units": "K"}'), group(b'{"units": "degC", "x": 1}'))
    {'attributes.units': ('K', 'degC'), 'attributes.x': (None, 1)}
    """
    was, now = (_flat(_fields_of(node)) for node in (old, new))
    names = [*was, *(name for name in now if name not in was)]
    return {n: (was.get(n), now.get(n)) for n in names if was.get(n) != now.get(n)}


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    attributes = fields.get("attributes")
    if not isinstance(attributes, dict):
        return dict(fields)
    rest = {name: value for name, value in fields.items() if name != "attributes"}
    return rest | {f"attributes.{name}": value for name, value in attributes.items()}


def _absolute(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(map(absolute, paths)))


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
    inside = np.flatnonzero(_inside(moves.old, grid))
    order = np.argsort(grid.ravel(moves.old[inside]), kind="stable")
    inside = inside[order]
    wanted, there = grid.ravel(moves.old[inside]), grid.ravel(coords)
    again = np.flatnonzero(wanted[1:] == wanted[:-1])
    if len(again):
        raise InvalidArgumentError(f"{name}: chunk {_one(moves.old, inside[again])} is moved twice")
    named = np.isin(wanted, there, assume_unique=True)
    rows, which = np.searchsorted(there, wanted[named]), inside[named]
    dropped = moves.dropped[which]
    off = which[~dropped & ~_inside(moves.new[which], grid)]
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


def _inside(coords: IndexArray, grid: Box) -> npt.NDArray[np.bool_]:
    return np.asarray(((coords >= 0) & (coords < np.asarray(grid.hi, np.int64))).all(axis=1))


def _one(coords: IndexArray, rows: npt.NDArray[np.int64]) -> Coords:
    """The coordinate in the first of these rows."""
    return tuple(coords[rows[0]].tolist())
