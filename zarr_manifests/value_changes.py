"""Which values of an array differ between two versions, chunk by chunk.

Only chunks that may differ are read, in both versions. Invariant: a cell counts as changed if and
only if its values differ; NaN equals NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import batched, chain
from typing import Any, Final

import numpy as np
import zarr

from zarr_manifests.decoding import readable
from zarr_manifests.engine.differences import deltas_apart, net_changes
from zarr_manifests.engine.view import Context, SnapshotView
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.format.manifest import Node
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.keys import V2_ARRAY, V3_DOCUMENT, absolute
from zarr_manifests.progress import counted
from zarr_manifests.reports import Diff
from zarr_manifests.session import Session
from zarr_manifests.store import contents_of

_AT_ONCE: Final = 16


def value_changes(context: Context, old: Session, new: Session, path: str) -> Diff:
    """The cells of an array that differ between the snapshots of two sessions, and its shape.

    Cells of only one version are not compared; the shapes say that there are some.
    It may have been moved in between; then the path is either of both. `progress` is told how many
    commits were read, then how many chunks.

    Raises
    ------
    NotFoundError
        If one of them has no such array.
    InvalidArgumentError
        If the arrays have different numbers of dimensions.
    """
    views = contents_of(old.store).view, contents_of(new.store).view
    nodes = _arrays_at(*views, path.strip("/"))
    path = nodes[1].path
    was, now = (node.array_meta for node in nodes)
    if len(was.shape) != len(now.shape):
        raise InvalidArgumentError(
            f"{absolute(path)} has {len(was.shape)} dimensions in one version and "
            f"{len(now.shape)} in the other"
        )
    shared = tuple(map(min, was.shape, now.shape))
    opened = zip((old, new), nodes, strict=True)
    with readable(path):
        arrays = [zarr.open_array(one.store, path=node.path, mode="r") for one, node in opened]

    def compared(places: Sequence[_At]) -> Iterator[tuple[_At, tuple[int, list[float]]]]:
        regions = [_region(at, now.chunk_shape, shared) for at in places]
        calls = [partial(_compared, arrays, region) for region in regions]
        return zip(places, context.runtime.parallel(calls), strict=True)

    due, count = _due(context, views, nodes, now.grid)
    batches = map(compared, batched(due, _AT_ONCE))
    told = counted("comparing chunks", chain.from_iterable(batches), count)
    changed = [(at, cells, steps) for at, (cells, steps) in told if cells]
    name = absolute(path)
    lengths = {name: {"shape": (was.shape, now.shape)}} if was.shape != now.shape else {}
    steps = [step for *_, each in changed for step in each]
    return Diff(
        updated=tuple(lengths),
        chunks={name: np.array([at for at, *_ in changed], np.int64)} if changed else {},
        grids={name: now.grid.shape},
        dimensions={name: now.dimension_names} if now.dimension_names else {},
        fields=lengths,
        cells={name: np.array([cells for _, cells, _ in changed], np.int64)} if changed else {},
        steps={name: (min(steps), max(steps))} if steps else {},
    )


def _arrays_at(old: SnapshotView, new: SnapshotView, path: str) -> tuple[Node, Node]:
    """The array in both versions: the one that is there in the newer, or was in the older one."""
    was, now = old.nodes.get(path), new.nodes.get(path)
    if now is not None:
        was = old.by_id.get(now.node_id, was)
    elif was is not None:
        now = new.by_id.get(was.node_id)
    for view, node in ((old, was), (new, now)):
        if node is None or node.array is None:
            there = f"at snapshot {view.snapshot_id}"
            raise NotFoundError(f"there is no array {absolute(path)} {there}")
    assert was is not None
    assert now is not None
    return was, now


type _At = tuple[int, ...]
"""Coordinates of a chunk."""


def _due(
    context: Context, views: Sequence[SnapshotView], nodes: Sequence[Node], grid: Box
) -> tuple[Iterable[_At], int]:
    """The chunks of the newer array that may differ, in C order, and how many these are."""
    (old, new), (was, now) = views, nodes
    # By these, chunks differ that neither has, or cells lie in other chunks.
    if _fill(was) != _fill(now) or was.array_meta.chunk_shape != now.array_meta.chunk_shape:
        return np.ndindex(*grid.hi), grid.size
    parts: list[IndexArray] = []
    if was.node_id == now.node_id:
        deltas = deltas_apart(context, context.roots.read().root, old.ref, new.ref)
        found = net_changes(context, old, new, deltas, {now.node_id}).nodes.get(now.node_id)
        parts += [found.chunks.coords()] if found and found.chunks is not None else []
    # Of an array made anew, no log says which chunks are the same.
    if was.documents != now.documents or was.node_id != now.node_id:  # or have other cells
        every = (view.chunks(node.node_id) for view, node in zip(views, nodes, strict=True))
        parts += [table.coords() for table in every if table is not None]
    if not parts:
        return (), 0
    coords = np.unique(np.concatenate(parts), axis=0)
    coords = coords[(coords < np.asarray(grid.hi, np.int64)).all(axis=1)]
    return map(tuple, coords.tolist()), len(coords)


def _fill(node: Node) -> str:
    """The fill value as the array's document has it."""
    document = node.documents.get(V3_DOCUMENT) or node.documents[V2_ARRAY]
    return json.dumps(json.loads(document).get("fill_value"))


def _region(at: Sequence[int], chunk: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    places = zip(at, chunk, shape, strict=True)
    return tuple(slice(min(i * n, end), min((i + 1) * n, end)) for i, n, end in places)


def _compared(
    arrays: Sequence[zarr.Array[Any]], region: tuple[slice, ...]
) -> tuple[int, list[float]]:
    """How many cells of a chunk differ, and the least and the greatest difference.

    These are of cells that are numbers on both sides, if there are any.
    """
    old, new = (np.asarray(array[region]) for array in arrays)
    missing = old != old, new != new  # NaN and NaT differ from themselves
    changed = np.asarray((old != new) & ~(missing[0] & missing[1]))
    numbers = changed & ~(missing[0] | missing[1])
    if not numbers.any() or not all(a.dtype.kind in "biuf" for a in (old, new)):
        return int(changed.sum()), []
    with np.errstate(all="ignore"):
        by = new[numbers].astype(np.float64) - old[numbers].astype(np.float64)
    return int(changed.sum()), [float(by.min()), float(by.max())]
