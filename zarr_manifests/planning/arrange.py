"""Where nodes go when one of them is moved, and chunks when an array is shifted or reindexed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import Box, Coords, IndexArray

__all__ = ["moved_paths", "plan_move", "reindexed", "shifted"]


def plan_move(nodes: Mapping[str, Node], old: str, new: str) -> dict[str, str]:
    """New path of every node that a move of the group or array at `old` to `new` takes along.

    Raises
    ------
    NotFoundError
        If there is nothing at `old`, or no group that `new` would lie in.
    AlreadyExistsError
        If there is something at or below `new`.
    InvalidArgumentError
        If `old` is the root, or `new` is `old` or lies below it or below an array.
    """
    if old not in nodes:
        raise NotFoundError(f"there is no group or array at /{old}")
    if not old or not new:
        raise InvalidArgumentError("the root can neither be moved nor be moved to")
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
    """New path by old path of every node that is in both, at different paths."""
    old = {node.node_id: path for path, node in before.items()}
    return {
        old[node.node_id]: path
        for path, node in sorted(after.items())
        if node.node_id in old and old[node.node_id] != path
    }


def _key(node: Node) -> str:
    """The node's path; of an opaque entry its key, without the slash that marks it."""
    return node.path[1:] if node.kind is NodeKind.OPAQUE else node.path


def _within(path: str, top: str) -> bool:
    return path == top or not top or path.startswith(top + "/")


def shifted(
    coords: IndexArray, offset: Coords, shape: Coords
) -> tuple[npt.NDArray[np.bool_], IndexArray]:
    """Which chunks are still inside a grid of that shape when moved by `offset`; and to where."""
    hi = np.asarray(shape, np.int64)
    # An offset beyond the grid, whatever its size, moves everything out.
    moved = coords + np.clip(np.array(offset, object), -hi, hi).astype(np.int64)
    return ((moved >= 0) & (moved < hi)).all(axis=1), moved


def reindexed(
    coords: IndexArray, place: Callable[[Coords], Coords | None], grid: Box, name: str
) -> tuple[npt.NDArray[np.bool_], IndexArray]:
    """Which chunks are kept, and where `place` puts them.

    Raises
    ------
    InvalidArgumentError
        If a chunk would lie off the grid, or two at one place.
    """
    keep, moved = np.ones(len(coords), np.bool_), coords.copy()
    taken: dict[Coords, Coords] = {}
    for row, was in enumerate(map(tuple, coords.tolist())):
        to = place(was)
        if to is None:
            keep[row] = False
            continue
        to = tuple(to)
        if to not in grid:
            raise InvalidArgumentError(
                f"{name}: chunk {was} cannot go to {to}, which is not in the grid {grid.shape}"
            )
        if to in taken:
            raise InvalidArgumentError(f"{name}: chunks {taken[to]} and {was} both go to {to}")
        taken[to] = was
        moved[row] = to
    return keep, moved
