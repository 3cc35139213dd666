"""Planning which chunks a where needs, by zone maps, in a repository that was just opened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import zarr
from runner import Case, Figure, Watch

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.engine.zones import index_directory
from zarr_manifests.format.zone_maps import Bounds, ZonePages
from zarr_manifests.grid import Box
from zarr_manifests.planning.meaning import Meaning, zones_of_chunks
from zarr_manifests.store import contents_of

_COLUMNS = 500
_FILE_CHUNKS = 10_000
_SIDE = 2


def choosing(case: Case) -> Iterator[Figure]:
    """Choose the chunks of a where that half of them match, with nothing in memory.

    Beside it: a where that few match, and one whose coordinates cut leaves.
    """
    grid = (max(1, case.sizes["chunks"] // _COLUMNS), _COLUMNS)
    few, half = fill(case, grid)
    rows, columns = (n * _SIDE for n in grid)
    cut = f"a > {half} AND y >= {rows * 7 // 20} AND x < {columns * 3 // 5}"
    nbytes = _zone_bytes(zm.open(case.folder))
    while True:
        found: dict[str, Figure] = {}
        for name, where in (("few", f"a > {few}"), ("cut", cut), ("half", f"a > {half}")):
            session = zm.open(case.folder).readonly_session()
            with Watch() as watch:
                selection = session.chunks_where("a", where)
            assert 0 < selection.selected < selection.chunks
            assert selection.unknown == 0
            found[name] = watch.figure()
        extras = {
            "seconds, few match": found["few"].value,
            "seconds, leaves are cut": found["cut"].value,
            "bytes of the zone map": float(nbytes),
        }
        yield replace(found["half"], extras=extras)


def fill(case: Case, grid: tuple[int, int]) -> tuple[float, float]:
    """Make the array, with chunks in files elsewhere; values that few and half of them exceed."""
    rng = np.random.default_rng(0)
    chunks = grid[0] * grid[1]
    files = [f"file:///raw/{i}" for i in range(-(-chunks // _FILE_CHUNKS))]
    repository = zm.create(case.folder, virtual_containers={"raw": "file:///raw"})
    session = repository.writable_session()
    zarr.create_array(
        session.store,
        name="a",
        shape=tuple(n * _SIDE for n in grid),
        chunks=(_SIDE, _SIDE),
        dtype="f4",
        fill_value=0,
        dimension_names=("y", "x"),
    )
    index = np.arange(chunks)
    coords = Box((0, 0), grid).unravel(index)
    length = rng.normal(20_000, 1500, chunks).astype(np.int64)
    start, which = np.cumsum(length) - length, index // _FILE_CHUNKS
    offset = start - start[which * _FILE_CHUNKS]
    etags = [f"e{i}" for i in range(len(files))]
    session.store.set_virtual_refs("a", coords, files, which, offset, length, etags=etags)
    contents = contents_of(session.store)
    node = contents.array_at("a")
    (rows,) = contents.changes.tables[node.node_id]
    low = (coords.sum(axis=1) / 50 + rng.normal(size=chunks)).astype("f4")
    high = low + np.abs(rng.normal(size=chunks)).astype("f4")
    none = np.zeros(chunks, np.int64)
    bounds = Bounds(low, high, none == 0, none, none, low.astype(np.float64), none)
    table, digest = contents.changes.rows(rows), Meaning.of(node.documents).digest
    zones = zones_of_chunks(digest, table, bounds)
    assert zones is not None
    contents.changes.add_zones(node.node_id, zones)
    session.commit("fill")
    repository.compact()
    few, half = np.quantile(high, [0.99, 0.5]).tolist()
    return round(few, 3), round(half, 3)


def _zone_bytes(repository: Repository) -> int:
    """Bytes of the zone map: the list of its pages, and the pages."""
    context = repository._context
    tip = context.roots.read().root.branches["main"]
    listed = index_directory(context, tip.index).zones.values()
    pages = [context.objects.load(ref, ZonePages) for ref in listed]
    blobs = [*listed, *(blob for one in pages for blob in one.blobs)]
    return sum(blob.length for blob in blobs)
