"""Moving nodes, and the chunks of an array, without touching a byte of any chunk.

A node's chunks are known by its id, so a move changes paths only: the node and all that lies
below it, opaque entries too, get new paths and keep their ids. Shifting and reindexing an array
give its chunk refs new coordinates: everything stored is cut off, and the refs are recorded anew
at their new places, so that whoever wrote to the array meanwhile is in conflict.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords
from zarr_manifests.keys import ArrayMeta, is_inside
from zarr_manifests.planning.tables.merge import rearranged
from zarr_manifests.planning.tables.regions import Places, moves_of, plan_move, reindexed, shifted


def node_path(path: object) -> str:
    """A path as nodes have it: without slashes at its ends.

    Raises
    ------
    InvalidArgumentError
        If it is no text, or no such path.
    """
    if not isinstance(path, str):
        raise InvalidArgumentError(f"{path!r} is not the path of a group or array")
    stripped = path.strip("/")
    if stripped and not is_inside(stripped):
        raise InvalidArgumentError(f"{path[:80]!r} is not the path of a group or array")
    return stripped


def move_node(workspace: Workspace, old: str, new: str) -> None:
    """Give the node at `old`, and all below it, its place at `new`."""
    old, new = node_path(old), node_path(new)
    with workspace.lock:
        above = {node.path: node for node in workspace.contents.above(new)}
        near = above | workspace.contents.within(old) | workspace.contents.within(new)
        workspace.edits.move(plan_move(near, old, new))


def shift_chunks(workspace: Workspace, path: str, offset: Iterable[int]) -> None:
    """Move all chunks of an array by that many chunks along each axis."""
    with workspace.lock:
        node, meta = _array(workspace, path)
        steps = _steps(offset)
        if steps is None or len(steps) != len(meta.shape):
            raise InvalidArgumentError(
                f"/{node.path} has {len(meta.shape)} axes: give a whole number of chunks for each, "
                f"not {offset!r}"
            )
        table = workspace.settled_chunks(node)
        if table is not None and any(steps):
            keep, coords = shifted(table.coords(), steps, meta.grid.hi)
            workspace.put_chunks(node, rearranged(table, keep, coords))


def _steps(offset: object) -> Coords | None:
    """The whole numbers of an offset; None if it is something else."""
    steps = tuple(offset) if isinstance(offset, Iterable) else (None,)
    whole = (isinstance(s, int | np.integer) and not isinstance(s, bool) for s in steps)
    return tuple(map(int, steps)) if all(whole) else None


def reindex_chunks(
    workspace: Workspace,
    path: str,
    places: Places,
) -> None:
    """Move the chunks of an array to where `places` says."""
    with workspace.lock:
        node, meta = _array(workspace, path)
        table = workspace.settled_chunks(node)
        before = np.zeros((0, len(meta.shape)), np.int64) if table is None else table.coords()
        name = f"/{node.path}"
        keep, coords = reindexed(before, moves_of(places, before, name), meta.grid, name)
        if table is not None and not (keep.all() and (coords == before).all()):
            workspace.put_chunks(node, rearranged(table, keep, coords))


def _array(workspace: Workspace, path: str) -> tuple[Node, ArrayMeta]:
    node = workspace.contents.array_at(node_path(path))
    assert node.array is not None
    if not node.array.shape:
        raise InvalidArgumentError(f"/{node.path} is a scalar: its chunk cannot be moved")
    return node, node.array
