"""Which chunks of an array may hold cells that a where selects.

Comparisons of coordinates are applied to their values, which are read. Comparisons of data are
applied to the bounds in zone maps, and no chunk is read. Bounds and coordinates are decoded by
xarray, as data is when it is read. Invariants: an entry of a zone map counts only for the chunk
and the meaning it was made of; chunks without an entry that counts are selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.snapshot.zones import zones_of
from zarr_manifests.grid import Box
from zarr_manifests.planning.zones.skipping import Ranges, Verdict, may_match, plan_chunks
from zarr_manifests.planning.zones.time_zone import zone_of
from zarr_manifests.planning.zones.where import Comparison, parse_where
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.selecting.pruning import Pruner, StoredChunks, WhereArray
from zarr_manifests.store import ManifestStore

__all__ = ["chunks_where"]

type _Mask = npt.NDArray[np.bool_]


def chunks_where(
    store: ManifestStore,
    path: str,
    where: Any,
    *,
    branch: str | None,
    nan_matches: bool,
    time_zone: str,
    decode_times: bool,
) -> ChunkSelection:
    """Select chunks, as `Session.chunks_where` documents it, with the index of the branch."""
    parsed = parse_where(where)
    zone = zone_of(time_zone)
    array = WhereArray(store, path, decode_times=decode_times)
    axes = [np.ones(n, np.bool_) for n in array.meta.grid.shape]
    reasons: dict[str, int] = {}
    total = array.meta.grid.size
    of_data: dict[str, list[Comparison]] = {}
    of_axes: dict[tuple[str, int], list[Comparison]] = {}
    for comparison in parsed.comparisons:
        axis = array.axis_of(comparison.column)
        if axis is None:
            of_data.setdefault(comparison.column, []).append(comparison)
        else:
            of_axes.setdefault((comparison.column, axis), []).append(comparison)
    for (name, axis), comparisons in of_axes.items():
        cells = array.coordinate(name, axis)
        keep = np.ones(len(cells.low), np.bool_)
        for comparison in comparisons:
            # Readers differ in what NaN in a coordinate is, so it may match.
            floats = cells.low.dtype.kind == "f"
            found = may_match(comparison, cells, nan_matches=floats, zone=zone)
            gone = ~_by_chunk(found, array.meta.chunk_shape[axis])
            reasons[comparison.sql] = int(gone.sum()) * (total // max(len(gone), 1))
            keep &= found
        axes[axis] &= _by_chunk(keep, array.meta.chunk_shape[axis])
    region = _around(axes)

    def match(comparison: Comparison, ranges: Ranges) -> _Mask:
        return may_match(comparison, ranges, nan_matches=nan_matches, zone=zone)

    nodes = {name: array.beside(name) for name in of_data}
    known = zones_of(
        array.contents.context,
        array.contents.view,
        [node.node_id for node in nodes.values()],
        branch,
    )
    verdicts: list[Verdict] = []
    stored: dict[bytes, StoredChunks] = {}
    for name, comparisons in of_data.items():
        node = nodes[name]
        pruner = Pruner(array, node, region, known[node.node_id], comparisons, match)
        here, judged = pruner.judge(alone=len(nodes) == 1)
        absent = region.size - len(here.index) - here.unread_count
        for number, verdict in enumerate(judged):
            unread = sum(box.size for box, may in here.unread if not may[number])
            left_out = int((~verdict.match).sum()) + unread
            reasons[comparisons[number].sql] = left_out + (0 if verdict.unwritten else absent)
        verdicts += judged
        stored[node.node_id] = here
    out = [box for each in stored.values() for box, _ in each.unread]
    plan = plan_chunks(axes, region, verdicts, out)
    target = stored.get(array.node.node_id)
    if target is None:
        target = StoredChunks.of(array.chunks(array.node, region), region, 0)
    sizes = target.sizes(array, region, plan.chosen)
    return ChunkSelection(
        path=f"/{array.node.path}",
        where=parsed.sql,
        shape=array.meta.shape,
        chunk_shape=array.meta.chunk_shape,
        dimensions=array.dims,
        boxes=plan.boxes,
        selected=plan.selected,
        left_out=plan.left_out,
        unknown=plan.unknown,
        bytes=sizes[0],
        selected_bytes=sizes[1],
        reasons={each.sql: reasons[each.sql] for each in parsed.comparisons},
        data=tuple(f"/{node.path}" for node in nodes.values()),
    )


def _by_chunk(cells: _Mask, chunk: int) -> _Mask:
    """Which chunks along an axis have a cell for which the mask is true."""
    starts = np.arange(0, len(cells), chunk)
    return np.logical_or.reduceat(cells, starts) if len(starts) else cells


def _around(axes: Sequence[_Mask]) -> Box:
    """The smallest box around the chunks that are in all masks."""
    found = [np.flatnonzero(axis) for axis in axes]
    if not all(map(len, found)):
        return Box((0,) * len(axes), (0,) * len(axes))
    return Box(tuple(int(at[0]) for at in found), tuple(int(at[-1]) + 1 for at in found))
