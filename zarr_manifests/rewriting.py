"""`rewrite_chunks`: other chunks, shards or codecs for an array, in one commit.

Tasks read boxes of the array at a fixed snapshot and write them to forks of a session, which merges
and commits them. Invariants: the branch gets all of the new chunks in one commit, or none; every
cell is in one box, and every new chunk or shard lies within one, so that one task writes it.
"""

from __future__ import annotations

import copy
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import batched
from typing import Any, Final, Literal

import numpy as np
import zarr
import zarr.storage
from msgspec.structs import replace

from zarr_manifests.engine.bulk_chunks import find_chunks, stream_table
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box
from zarr_manifests.planning.merge import select
from zarr_manifests.planning.regions import ResolvedChunks
from zarr_manifests.planning.scan import Axis, Scan, one_run, plan_scan
from zarr_manifests.progress import counted
from zarr_manifests.reports import RewriteReport
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository
from zarr_manifests.runtime import Run
from zarr_manifests.session import Fork
from zarr_manifests.storage import Storage
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.versions import HEADS
from zarr_manifests.xarray.array_target import ArrayTarget

_LEASE_S: Final = 120
_MERGED: Final = 32
"""So many forks are merged at once."""


def rewrite_chunks(
    location: str | os.PathLike[str] | Storage | Repository,
    path: str,
    *,
    chunks: Sequence[int] | Literal["keep"] = "keep",
    shards: Sequence[int] | Literal["keep"] | None = "keep",
    codecs: Mapping[str, Any] | None = None,
    branch: str = "main",
    message: str | None = None,
    task_bytes: int = 256 * 1024**2,
    dry_run: bool = False,
    run: Run | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> RewriteReport:
    """Rewrite an array with other chunks, shards or codecs, in one commit.

    Older snapshots are untouched. If the rewriting fails, nothing is committed.

    Parameters
    ----------
    location : str, path, Storage or Repository
        The repository.
    path : str
        The array.
    chunks, shards : sequence of int, optional
        Their new shapes, as in `zarr.create_array`; unchanged if not given. None for `shards`
        stores chunks without shards.
    codecs : mapping, optional
        `filters`, `compressors` and `serializer`, as in `zarr.create_array`; unchanged if not
        given.
    branch : str, default "main"
        The branch.
    message : str, optional
        The commit message.
    task_bytes : int, default 256 MiB
        Bytes of values that a task holds at a time; at least one new chunk or shard.
    dry_run : bool, default False
        Only report the cost.
    run : callable, optional
        Runs the tasks; by default, one after the other here. `zarr_manifests.spark.maintenance`
        brings its own.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

    Returns
    -------
    RewriteReport
        What was read and written, or would be.

    Raises
    ------
    NotFoundError
        If there is no such branch or array.
    InvalidArgumentError
        If the array has such chunks, shards and codecs already, or `codecs` has other names.
    ConflictError
        If others have changed the array meanwhile.
    ValueError
        From Zarr, if chunks, shards and codecs do not go together.

    Examples
    --------
    >>> import numpy as np, zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://rewrite-chunks-example")
    >>> with repo.transaction(message="one day a chunk") as store:
    ...     a = zarr.create_array(store, name="t", shape=(60, 8), chunks=(1, 8), dtype="f4")
    ...     a[:] = np.arange(480).reshape(60, 8)
    >>> print(zm.rewrite_chunks(repo, "t", chunks=(30, 4), dry_run=True))
    /t: chunks 1 x 8 -> 30 x 4
    would read 60 chunks once, and write 4 chunks; tasks: 1
    >>> report = zm.rewrite_chunks(repo, "t", chunks=(30, 4))
    >>> zarr.open_array(repo.readonly_session().store, path="t").chunks
    (30, 4)
    """
    repository = repository_of(location, storage_options)
    if dry_run:
        session = repository.readonly_session(HEADS + branch)
    else:
        session = repository.writable_session(branch, lease=_LEASE_S)
    with session:
        source = repository.readonly_session(session.snapshot_id)
        path = contents_of(source.store).array_at(path).path  # Zarr says less of what is missing
        old = zarr.open_array(source.store, path=path, mode="r")
        layout = _layout(old, chunks, shards, codecs)
        _create(zarr.storage.MemoryStore(), old, layout)  # so that a wrong layout fails at once
        stored, written = old.shards or old.chunks, layout["shards"] or layout["chunks"]
        cells = max(task_bytes // max(old.dtype.itemsize, 1), 1)
        scan = plan_rechunk(old.shape, stored, written, cells)
        refs = source.chunk_refs(path)
        boxes = [scan[number] for number in scan.holding(stored, refs.coords).tolist()]
        report = _estimate(refs, old, layout, scan, len(boxes))
        if dry_run:
            return report
        _create(session.store, old, layout)
        write = partial(_write, source.store, session.fork(), path)
        forks = counted("rewriting chunks", (run or map)(write, boxes), len(boxes))
        for some in batched(forks, _MERGED):
            session.merge(*some)
        made = session.commit(message or f"rewrite the chunks of {report.path}")
    number = len(repository.readonly_session(made).chunk_refs(path))
    return replace(report, snapshot_id=made, chunks_after=number)


def plan_rechunk(
    shape: Sequence[int], old: Sequence[int], new: Sequence[int], target_cells: int
) -> Scan:
    """Boxes of cells that are rewritten together.

    A box is made of whole new chunks. As far as the target allows, its edges are edges of old
    chunks too, so that these are read once.

    Parameters
    ----------
    shape : sequence of int
        The array's shape.
    old, new : sequence of int
        Shapes of what is read and written as a whole: chunks, or shards if there are any.
    target_cells : int
        Cells that a box should have at most; a box with more is one new chunk.

    Examples
    --------
    >>> from zarr_manifests.rewriting import plan_rechunk
    >>> [(box.lo, box.hi) for box in plan_rechunk((12, 4), (1, 4), (6, 2), 24)]
    [((0, 0), (6, 4)), ((6, 0), (12, 4))]
    """
    unit = list(new)
    for axis in reversed(range(len(shape))):
        common = math.lcm(old[axis], new[axis])
        if common >= shape[axis]:  # one span is aligned with everything
            common = -(-shape[axis] // new[axis]) * new[axis]
        if math.prod(unit) // unit[axis] * common <= target_cells:
            unit[axis] = common
    axes = [Axis(n, one_run(0, length)) for n, length in zip(unit, shape, strict=True)]
    return plan_scan(axes, target_rows=target_cells)


def reads_per_chunk(scan: Scan, old: Sequence[int]) -> float:
    """How many boxes read an old chunk, on average; 1 is the best.

    Examples
    --------
    >>> from zarr_manifests.rewriting import plan_rechunk, reads_per_chunk
    >>> reads_per_chunk(plan_rechunk((12,), (12,), (3,), 3), (12,))
    4.0
    """
    factor = 1.0
    for spans, chunk, axis in zip(scan.spans, old, scan.axes, strict=True):
        if len(spans):
            touched = -(-spans[:, 1] // chunk) - spans[:, 0] // chunk
            factor *= int(touched.sum()) / -(-axis.size // chunk)
    return factor


def _layout(
    old: zarr.Array[Any],
    chunks: Sequence[int] | str,
    shards: Sequence[int] | str | None,
    codecs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The arguments of `zarr.create_array` that say how values are stored."""
    known = ["compressors", "filters", *(["serializer"] if old.metadata.zarr_format == 3 else ())]
    if unknown := set(codecs or {}) - set(known):
        raise InvalidArgumentError(f"codecs has {min(unknown)!r}; known here: {', '.join(known)}")
    now: dict[str, Any] = {name: getattr(old, name) for name in ("chunks", "shards", *known)}
    new = {**now, **(codecs or {})}
    if not isinstance(chunks, str):
        new["chunks"] = tuple(chunks)
    if not isinstance(shards, str):
        new["shards"] = None if shards is None else tuple(shards)
    if new == now:
        raise InvalidArgumentError(
            f"/{old.path} has these chunks, shards and codecs already; nothing was rewritten"
        )
    if len(new["chunks"]) != old.ndim:
        raise InvalidArgumentError(f"chunks must have {old.ndim} axes, not {new['chunks']}")
    return new


def _estimate(
    refs: ResolvedChunks, old: zarr.Array[Any], layout: Mapping[str, Any], scan: Scan, boxes: int
) -> RewriteReport:
    stored_as = old.shards or old.chunks
    written_as = layout["shards"] or layout["chunks"]
    grid = [-(-length // n) for length, n in zip(old.shape, written_as, strict=True)]
    return RewriteReport(
        path=f"/{old.path}",
        snapshot_id=None,
        chunks=(old.chunks, layout["chunks"]),
        shards=(old.shards, layout["shards"]),
        chunks_before=len(refs),
        reads_per_chunk=reads_per_chunk(scan, stored_as),
        chunks_after=math.prod(grid),
        tasks=boxes,
    )


def _create(store: Any, old: zarr.Array[Any], layout: Mapping[str, Any]) -> None:
    """Make an empty array of the new layout in the place of the old one."""
    zarr.from_array(store, data=old, write_data=False, name=old.path, overwrite=True, **layout)


def _write(old: ManifestStore, fork: Fork, path: str, box: Box) -> Fork:
    """Write a box of the old array to the new one, in a fork of its own."""
    mine = copy.copy(fork)
    source = zarr.open_array(old, path=path, mode="r")
    array = zarr.open_array(mine.store, path=path, mode="r+")
    target = ArrayTarget(array, statistics=True)
    if source.shards is not None:
        # Zarr reads only parts of shards at the edges, and only a whole one has a checksum.
        contents, inside = contents_of(old), list(zip(box.lo, box.hi, strict=True))
        _, shards = find_chunks(contents, path, None, inside)
        if shards is not None:
            lo, size = shards.coords() * source.shards, np.array(source.shards)
            cut = ((lo < box.lo) | (lo + size > box.hi)).any(axis=1)
            due = stream_table(contents, select(shards, cut), gap_bytes=0, window_bytes=1)
            deque(due, maxlen=0)
    place = tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))
    target[place] = source[place]
    target.record()
    return mine
