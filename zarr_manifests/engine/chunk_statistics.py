"""What is known of an array's chunks without reading them: bounds of their values, and their map.

Who has a chunk's values when it is written says what its bounds are; where the chunk lies is looked
up in the session's changes. Staged chunks do not lie anywhere yet: they keep their bounds until
they do. To find statistics, the entries of zone maps are matched with the chunks that the session
has now, by their addresses. Invariants:

- An entry names the chunk that the session has when it is recorded. If that is overwritten later,
  the entry is left out of the commit.
- A row of statistics describes exactly the chunk at its coordinate, with the meaning that the array
  gives to stored values today. Chunks without such an entry have no row.

The map says which chunks exist, how large they are, and when they last changed. The chunks are
taken slab by slab along the longest axis, and of the history only the cells of the map are
remembered, so memory depends on the size of the map and on the largest commit. Commits are looked
at from the newest on, until all cells with chunks have a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import batched, islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.decoding import BulkDecoder
from zarr_manifests.engine.ancestry import ancestors
from zarr_manifests.engine.bulk_chunks import find_chunks, stream_table
from zarr_manifests.engine.change_set import slabs
from zarr_manifests.engine.chunks import StagedRef
from zarr_manifests.engine.differences import delta_of, tables_of
from zarr_manifests.engine.overlay import SessionView
from zarr_manifests.engine.roots import unless_missing
from zarr_manifests.engine.totals import amounts_of
from zarr_manifests.engine.view import ReadContext
from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.engine.zones import zones_of
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable, Column, StoredRef, Unset
from zarr_manifests.format.manifest import Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import CommitKind, Snapshot
from zarr_manifests.format.zone_maps import NO_SUM, Bounds, sum_type
from zarr_manifests.grid import Box, Coords, IndexArray, clipped_cells
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V3_DOCUMENT, join, split
from zarr_manifests.picturing import ChunkMap, Folding
from zarr_manifests.planning.meaning import Meaning, zones_of_chunks
from zarr_manifests.planning.measure import CellWeights
from zarr_manifests.planning.regions import Bounds as AxisBounds
from zarr_manifests.planning.tables import NOTHING

_PACKING: Final = (b"scale_factor", b"add_offset", b"_Unsigned")
_SLAB_CHUNKS: Final = 1 << 18
_MOST_COMMITS: Final = 1000
_AT_ONCE: Final = 16
_ROUNDED: Final = 1e-6
"""The cosine of 90 degrees may be as far below 0."""


class ChunkStatistics(Struct, frozen=True, eq=False):
    """Bounds, counts and sums of the values in chunks: one row per chunk that has them, in C order.

    Parameters
    ----------
    path : str
        Path of the array.
    coords : int64[n, ndim]
        Chunk coordinates.
    low, high : array[n]
        Least and greatest stored value that is neither missing nor NaN.
    bounded : bool[n]
        Whether there is such a value; if not, `low` and `high` mean nothing.
    missing, nan, cells : int64[n]
        Number of missing values, of NaN, and of all cells, inside the array's shape when they were
        counted.
    sums : float64[n]
        Sum of the stored values that are not missing; NaN where it is not known, and of
        times.
    """

    path: str
    coords: IndexArray
    low: npt.NDArray[Any]
    high: npt.NDArray[Any]
    bounded: npt.NDArray[np.bool_]
    missing: IndexArray
    nan: IndexArray
    cells: IndexArray
    sums: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.coords)


def chunk_statistics(
    contents: SessionView,
    path: str,
    box: Sequence[AxisBounds] | Box | None,
    cells: Sequence[AxisBounds] | None,
    branch: str | None,
) -> ChunkStatistics:
    """The statistics of the chunks in a box, as `Session.chunk_refs` documents them."""
    node, table = find_chunks(contents, path, box, cells)
    meaning = Meaning.of(node.documents)
    zones = None
    if table is not None and meaning.measurable:
        known = zones_of(contents.context, contents.view, [node.node_id], branch)
        zones = known.counting(node, table, contents.changes.zones_of(node.node_id))
    if zones is None:
        kind = meaning.dtype if meaning.measurable else np.dtype(np.float64)
        nothing, none = np.empty(0, kind), np.empty(0, np.int64)
        coords, sums = np.empty((0, len(node.array_meta.shape)), np.int64), sum_type(kind)
        found = Bounds(nothing, nothing, none == 0, none, none, none.astype(sums or "f8"), none)
    else:
        coords, found = zones.coords(), zones.bounds
    return ChunkStatistics(
        f"/{node.path}",
        coords,
        found.low,
        found.high,
        found.bounded,
        found.missing,
        found.nan,
        clipped_cells(found.clip, node.array_meta.chunk_shape),
        np.where(found.sums == NO_SUM, np.nan, found.sums),
    )


def cell_weights(contents: SessionView, node: Node, along: Mapping[str, Any]) -> CellWeights | None:
    """Weights of an array's cells by dimension; None if there are none, or if they cannot be had.

    Those along a dimension are numbers, the name of a variable along it, or `"cos"`: the cosine of
    its coordinate in degrees.
    """
    meta = node.array
    assert meta is not None
    dims = meta.dimension_names or ()
    if not along or not {*along} <= {*dims}:
        return None
    found: list[npt.NDArray[np.float64] | None] = []
    for dim, size in zip(dims, meta.shape, strict=True):
        said = along.get(str(dim))
        if isinstance(said, str):
            is_cos = said == "cos"
            name = str(dim) if is_cos else said
            said = _numbers_of(contents, join(split(node.path)[0], name), in_degrees=is_cos)
            said = np.cos(np.deg2rad(said)) if is_cos and said is not None else said
        elif said is not None:
            said = np.asarray(said, np.float64)
        if str(dim) in along and (said is None or said.shape != (size,)):
            return None
        if said is not None and not (said > -_ROUNDED).all():
            return None  # negative, or NaN
        found.append(said)
    return CellWeights(tuple(found))


def _numbers_of(
    contents: SessionView, path: str, *, in_degrees: bool
) -> npt.NDArray[np.float64] | None:
    """The values of a variable with one dimension; None if it has none that are plain numbers."""
    node = contents.node(path)
    meaning = Meaning.of({} if node is None else node.documents)
    if node is None or node.array is None or meaning.dtype.kind not in "iuf":
        return None
    if any(name in one for one in node.documents.values() for name in _PACKING):
        return None
    document = json.loads(node.documents.get(V3_DOCUMENT) or node.documents[V2_ARRAY])
    said = document.get("attributes") or json.loads(node.documents.get(V2_ATTRIBUTES, b"{}"))
    units = said.get("units", "degrees") if isinstance(said, dict) else "degrees"
    if in_degrees and not str(units).startswith("degree"):
        return None
    decoder, table = BulkDecoder.of(document, meaning.laid_out), contents.chunks(node)
    if decoder is None or table is None or table.box.ndim != 1:
        return None
    room = node.array.grid.size * node.array.chunk_shape[0]
    out = np.full(room, meaning.fill.view(meaning.stored), meaning.laid_out)
    chunks = stream_table(contents, table, gap_bytes=0, window_bytes=max(out.nbytes, 1))
    if not decoder.decode(list(chunks), out, (0,)):
        return None
    out = out[: node.array.shape[0]]
    values = out.astype(np.float64)
    return values if not np.isin(out, meaning.missing).any() and np.isfinite(values).all() else None


def record_zones(
    workspace: Workspace,
    path: str,
    box: Box,
    meaning: bytes,
    bounds: Bounds,
    index: Column | None = None,
) -> None:
    """Record the bounds of chunks that were just written to the array at `path`.

    Parameters
    ----------
    workspace : Workspace
        The session's changes. A copy that reports its chunks one by one records nothing.
    path : str
        Path of the array.
    box : Box
        The chunks, whole ones only.
    meaning : bytes
        Hash of what decides how their bytes become values.
    bounds : Bounds
        One row for each chunk of the box in C order, or for those at `index`.
    index : int64[n], optional
        Linear indexes in the box, ascending.

    Raises
    ------
    InvalidArgumentError
        If there are more or fewer bounds than chunks.
    """
    index = np.arange(box.size, dtype=np.int64) if index is None else index
    if len(index) != len(bounds):
        raise InvalidArgumentError(f"{len(bounds)} bounds for {len(index)} chunks")
    if workspace.reports or not len(index):
        return
    with workspace.lock:
        node_id = workspace.contents.array_at(path).node_id
        changes = workspace.contents.changes
        # Spilled ones are not fetched for it.
        loaded = (one for one in changes.tables.get(node_id, ()) if isinstance(one, ChunkTable))
        held = replace(changes, tables={node_id: tuple(loaded)})
        found: dict[Coords, StoredRef] = {}
        rows: list[int] = []
        for row, coords in enumerate(map(tuple, box.unravel(index).tolist())):
            ref = held.get(node_id, coords)
            if isinstance(ref, StagedRef):
                ref.at.measured = meaning, bounds, row
            elif ref is not None and not isinstance(ref, Unset):
                found[coords] = ref
                rows.append(row)
        if found:
            table = ChunkTable.of(found)
            zones = zones_of_chunks(meaning, table, bounds.take(np.array(rows)))
            if zones is not None:
                changes.add_zones(node_id, zones)


# --- the map of an array's chunks ----------------------------------------------------------------


def chunk_map(contents: SessionView, path: str, side: int = 96) -> ChunkMap:
    """The map of an array's chunks, of at most `side` x `side` cells (see `Folding`).

    Uncommitted changes are included; they count as made now. At most 1,000 commits are looked at.

    Raises
    ------
    NotFoundError
        If there is no such array.
    """
    node = contents.array_at(path)
    meta = node.array
    assert meta is not None
    folding = Folding.of(meta.grid.shape, side)
    chunks, nbytes = np.zeros(folding.shape, np.int64), np.zeros(folding.shape, np.int64)
    count = amounts_of(contents.view).get(node.node_id, NOTHING).chunks
    for box in slabs(meta.grid, 1 + count // _SLAB_CHUNKS):  # if they are spread evenly
        _, table = find_chunks(contents, node.path, box, None)
        if table is not None:
            coords = table.coords()
            chunks += folding.place(coords)
            nbytes += folding.place(coords, table.length)
    changed, since_ms = _changed(contents, node, folding, chunks > 0)
    names = meta.dimension_names or (None,) * len(meta.shape)
    return ChunkMap(f"/{node.path}", tuple(names), folding, chunks, nbytes, changed, since_ms)


def _changed(
    contents: SessionView, node: Node, folding: Folding, there: npt.NDArray[np.bool_]
) -> tuple[IndexArray, int]:
    """When each cell with chunks last changed, 0 if before the oldest commit that was looked at.

    Also the time of that commit.
    """
    changed = np.zeros(folding.shape, np.int64)
    context = contents.context
    with contents.lock:
        uncommitted, view = contents.changes.table(node.node_id), contents.view
    if uncommitted is not None:
        changed[folding.place(uncommitted.coords()) > 0] = context.runtime.now_ms()
    since_ms = view.snapshot.written_ms
    for snapshots in batched(_ancestors(context, view.ref), _AT_ONCE):
        if not (there & (changed == 0)).any():
            break
        data = [one for one in snapshots if one.kind is not CommitKind.REWRITE]
        deltas = context.runtime.parallel([partial(delta_of, context, one) for one in data])
        for snapshot, delta in zip(data, deltas, strict=True):
            for table in tables_of(context, delta, {node.node_id}).get(node.node_id, ()):
                changed[(folding.place(table.coords()) > 0) & (changed == 0)] = snapshot.written_ms
        since_ms = snapshots[-1].written_ms
    return changed, since_ms


def _ancestors(context: ReadContext, head: BlobRef) -> Iterator[Snapshot]:
    """The snapshot and those before it, as far as they are there."""
    with unless_missing():  # older ones may have expired
        yield from (snapshot for _, snapshot in islice(ancestors(context, head), _MOST_COMMITS))
