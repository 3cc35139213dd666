"""Arrays whose chunks have zone maps, and a check that every entry that counts is right."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import zarr

import zarr_manifests as zm
from in_order import in_order
from inside import context_of
from zarr_manifests import Repository, Session
from zarr_manifests.engine.chunk_statistics import record_zones
from zarr_manifests.engine.zones import zones_of
from zarr_manifests.format.zone_maps import Bounds
from zarr_manifests.grid import Box, Coords
from zarr_manifests.planning.meaning import Meaning, valid
from zarr_manifests.planning.measure import measure
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of

CHUNK = 4
OPS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""What comparisons mean, of values that are not missing."""


def created(storage: Any = None, chunks: int = 8, **config: Any) -> Repository:
    """A repository with an array `a` of that many chunks, which compacts only when it is told."""
    manual = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 0}
    where = MemoryStorage() if storage is None else storage
    repository = zm.create(where, manual | config, runtime=in_order())
    session = repository.writable_session()
    make(session, chunks=chunks)
    session.commit("make")
    return repository


def make(session: Session, path: str = "a", chunks: int = 8, dtype: str = "f4") -> None:
    """An array of that many chunks along its one axis, without any."""
    zarr.create_array(
        session.store,
        name=path,
        shape=(CHUNK * chunks,),
        chunks=(CHUNK,),
        dtype=dtype,
        dimension_names=("t",),
        compressors=None,
        fill_value=0,
    )


def meaning_of(session: Session, path: str = "a") -> Meaning:
    return Meaning.of(contents_of(session.store).array_at(path).documents)


def write(
    session: Session, first: int, last: int, seed: float, path: str = "a", *, record: bool = True
) -> None:
    """Write the chunks from `first` to before `last`, and record their bounds."""
    array = zarr.open_array(session.store, path=path)
    (size,) = array.chunks
    values = (seed * 1000 + np.arange(first * size, last * size)).astype(array.dtype)
    array[first * size : last * size] = values
    if record:
        meaning = meaning_of(session, path)
        bounds = measure(meaning.compared(values), (size,), meaning.missing)
        box = Box((first,), (last,))
        record_zones(workspace_of(session.store), path, box, meaning.digest, bounds)


def grow(session: Session, chunks: int, path: str = "a") -> int:
    """Make the array longer by that many chunks; the number it had."""
    array = zarr.open_array(session.store, path=path)
    before = array.shape[0]
    array.resize((before + chunks * CHUNK,))
    return before // CHUNK


def counting(
    repository: Repository, path: str = "a", branch: str = "main", *, of: Session | None = None
) -> dict[Coords, tuple[float, float]]:
    """The bounds of the chunks with an entry that counts, each checked against the values."""
    session = of or repository.readonly_session(branch)
    contents, context = contents_of(session.store), context_of(repository)
    node = contents.array_at(path)
    known = zones_of(context, contents.view, [node.node_id], branch)
    chunks, digest = contents.chunks(node), Meaning.of(node.documents).digest
    array = zarr.open_array(session.store, path=path, mode="r")
    found: dict[Coords, tuple[float, float]] = {}
    for zones in known.near(node.node_id, node.array_meta.grid):
        if zones.meaning == digest:
            for row in np.flatnonzero(valid(zones, chunks)).tolist():
                coords = tuple(zones.coords()[row].tolist())
                check(array, coords, zones.bounds, row)
                found[coords] = zones.bounds.low[row], zones.bounds.high[row]
    return found


def check(array: Any, coords: Coords, bounds: Bounds, row: int) -> None:
    """Raise unless the bounds enclose all values of the chunk."""
    stored = array.shards or array.chunks
    place = tuple(slice(at * n, (at + 1) * n) for at, n in zip(coords, stored, strict=True))
    values = np.asarray(array[place])
    low, high = bounds.low[row], bounds.high[row]
    assert bounds.bounded[row] or not values.size, coords
    assert (low <= values).all(), (coords, low, values)
    assert (values <= high).all(), (coords, high, values)


def numbers(found: dict[Coords, tuple[float, float]]) -> list[int]:
    """The chunks of an array with one axis."""
    return sorted(at for (at,) in found)
