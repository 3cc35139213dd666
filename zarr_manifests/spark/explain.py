"""Which chunks a read would leave out, and why, without reading any."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pyspark.sql import SparkSession

from zarr_manifests.grid import Box, IndexArray, grid_shape
from zarr_manifests.planning.layout.batches import batches
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository
from zarr_manifests.session import estimate_of
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.plan import PlannedRead, ReadOptions, SparkFacts, plan
from zarr_manifests.storage import Storage

__all__ = ["explain_pruning"]

type _Mask = npt.NDArray[np.bool_]

_LISTED: Final = 2**20
"""Chunks of the grid that are listed at a time."""


def explain_pruning(
    spark: SparkSession,
    url: str | os.PathLike[str] | Storage | Repository,
    variables: str | Sequence[str] | None = None,
    *,
    group: str = "/",
    version: str | None = None,
    ranges: Mapping[str, Any] | None = None,
    where: Any = None,
    nan: str = "null",
    decode_times: bool = True,
    broadcast: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> ChunkSelection:
    r"""Tell which chunks a read with these options would read, and why it leaves out the others.

    No chunk of a variable is read. What planning or commits have counted is not counted again. For
    the rest, lists of chunks are read piece by piece: of the chunks that tasks read, and where an
    array that is compared has unwritten chunks, of those in range.

    Parameters
    ----------
    spark, url, variables, group, version
        As for `read`.
    ranges, where, nan, decode_times, broadcast
        As for `read`.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

    Returns
    -------
    ChunkSelection
        `str` says it in words, and `picture()` draws it. Its chunks are those that tasks read:
        where variables have different chunks, the larger ones. Bytes are those of all variables.

    Raises
    ------
    NotFoundError, InvalidArgumentError, WhereError
        As for `read`.

    Examples
    --------
    >>> from zarr_manifests.spark import explain_pruning, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> found = explain_pruning(spark, "sea", where="depth > 6000")  # doctest: +SKIP
    >>> print(found, found.picture(), sep="\n")  # doctest: +SKIP
    """
    options = ReadOptions(
        variables=variables,
        group=group,
        version=version,
        ranges=ranges,
        where=where,
        nan=nan,
        decode_times=decode_times,
        broadcast=broadcast,
    )
    return _explained(
        plan(repository_of(url, storage_options), options, SparkFacts.of(spark)), ranges
    )


def _explained(planned: PlannedRead, ranges: Mapping[str, Any] | None) -> ChunkSelection:
    job, source = planned.job, planned.source
    dims = tuple(column.name for column in job.dimensions)
    names = [column.name for column in job.variables]
    encoded = [source.encoded(name) for name in (*names, *dims) if source.has(name)]
    shape = tuple(max(each.sizes.get(dim, 0) for each in encoded) for dim in dims)
    chunk_shape = tuple(axis.chunk for axis in job.scan.axes)
    grid = Box((0,) * len(dims), grid_shape(shape, chunk_shape))
    in_range = math.prod(len(axis.chunks) for axis in job.scan.axes)
    boxes = _chunks_read(job)
    selected = sum(math.prod(sides) for sides in (boxes[:, 1] - boxes[:, 0]).tolist())
    said = [job.where.sql] if job.where else []
    said += [f"{dim} in {given!r}" for dim, given in (ranges or {}).items()]
    where = " AND ".join(said) or "TRUE"
    path = source.group.rstrip("/")
    known = {array.path: array.total for array in estimate_of(planned.session).arrays}
    totals = {name: known[f"{path}/{name}"] for name in names}
    nbytes: int | None = 0
    for total in totals.values():
        exact = nbytes is not None and total.nbytes is not None and total.nbytes_exact
        nbytes = (nbytes or 0) + (total.nbytes or 0) if exact else None
    if not ranges and len(planned.selections) == len(names) == 1:
        (counted,) = planned.selections
        same = counted.dimensions, counted.chunk_shape, counted.selected
        if same == (dims, chunk_shape, selected) and nbytes is not None:
            return replace(counted, where=where, boxes=boxes, bytes=nbytes)
    compared = [
        name
        for name in names
        if job.where and any(each.column == name for each in job.where.comparisons)
    ]
    left_out = in_range - selected
    # Nothing is absent of a full array.
    full = any(
        len(source.encoded(name).dims) == len(dims)
        and totals[name].chunks_exact
        and totals[name].chunks == _grid_of(planned, name).size
        for name in compared
    )
    by_statistics = left_out if compared else 0
    split = bool(by_statistics and not full)
    if nbytes is None:
        due = [grid]
    elif split:
        ends = [(int(axis.chunks[0]), int(axis.chunks[-1]) + 1) for axis in job.scan.axes]
        due = [Box(tuple(lo for lo, _ in ends), tuple(hi for _, hi in ends))]
    elif len(boxes) and selected < grid.size:
        lo, hi = boxes[:, 0].min(axis=0).tolist(), boxes[:, 1].max(axis=0).tolist()
        due = [Box(tuple(lo), tuple(hi))]
    else:
        due = []
    listed = selected_bytes = stored = 0
    for region in batches([(box, box.size) for box in due], _LISTED):
        read, inside = _read(boxes, region), _in_range(job, region)
        asked = compared if split and inside.any() else []
        there = np.zeros(region.size, np.bool_)
        for name in names if nbytes is None or read.any() else asked:
            index, sizes = _stored(planned, name, region)
            listed += int(sizes.sum())
            selected_bytes += int(sizes[read[index]].sum())
            if name in asked:
                there[index] = True
        stored += int((there & inside & ~read).sum())
    if split:
        by_statistics = stored
    return ChunkSelection(
        path=f"{path}/{','.join(names)}",
        where=where,
        shape=shape,
        chunk_shape=chunk_shape,
        dimensions=dims,
        boxes=boxes,
        selected=selected,
        left_out={
            "range": grid.size - in_range,
            "statistics": by_statistics,
            "absence": left_out - by_statistics,
        },
        unknown=max((each.unknown for each in planned.selections), default=0),
        bytes=listed if nbytes is None else nbytes,
        selected_bytes=nbytes if nbytes is not None and selected == grid.size else selected_bytes,
        reasons={sql: n for each in planned.selections for sql, n in each.reasons.items()},
        data=tuple(f"{path}/{name}" for name in compared),
    )


def _chunks_read(job: Job) -> IndexArray:
    """The boxes of chunks (int64[n, 2, ndim]) that tasks read."""
    parts = job.parts
    if parts is None:
        every = range(len(job.scan)) if job.numbers is None else job.numbers.tolist()
        cells = [(box.lo, box.hi) for box in map(job.scan.__getitem__, every)]
        parts = np.array(cells, np.int64).reshape(len(cells), 2, len(job.scan.axes))
    chunk = np.array([axis.chunk for axis in job.scan.axes], np.int64)
    # A box has selected cells in each of its chunks.
    return np.stack([parts[:, 0] // chunk, -(-parts[:, 1] // chunk)], axis=1)


def _grid_of(planned: PlannedRead, name: str) -> Box:
    """The grid of a variable's own chunks."""
    shape = planned.source.encoded(name).shape
    grid = grid_shape(shape, planned.source.stored_chunk_shape(name))
    return Box((0,) * len(grid), grid)


def _read(boxes: IndexArray, region: Box) -> _Mask:
    """Which chunks of a region are in the boxes."""
    lo = np.maximum(boxes[:, 0], region.lo) - region.lo
    hi = np.minimum(boxes[:, 1], region.hi) - region.lo
    near = (lo < hi).all(axis=1)
    found = np.zeros(region.shape, np.bool_)
    for start, stop in zip(lo[near].tolist(), hi[near].tolist(), strict=True):
        found[tuple(map(slice, start, stop))] = True
    return found.ravel()


def _in_range(job: Job, region: Box) -> _Mask:
    """Which chunks of a region have cells that coordinates select."""
    axes = zip(job.scan.axes, region.lo, region.hi, strict=True)
    masks = [np.isin(np.arange(lo, hi), axis.chunks) for axis, lo, hi in axes]
    return np.asarray(reduce(np.logical_and.outer, masks, np.ones((), np.bool_))).ravel()


def _stored(planned: PlannedRead, name: str, region: Box) -> tuple[IndexArray, IndexArray]:
    """A variable's stored chunks in a region of the read's grid, and their bytes.

    A chunk of a variable with fewer dimensions counts as the first of those that it is repeated
    in.
    """
    job, source = planned.job, planned.source
    dims = [column.name for column in job.dimensions]
    own, bounds = [], []
    sides = zip(source.encoded(name).dims, source.stored_chunk_shape(name), strict=True)
    for most, (dim, length) in zip(_grid_of(planned, name).hi, sides, strict=True):
        axis = dims.index(str(dim))
        chunk = job.scan.axes[axis].chunk
        own.append((axis, chunk, length))
        stop = -(-region.hi[axis] * chunk // length)
        bounds.append((min(region.lo[axis] * chunk // length, most), min(stop, most)))
    refs = planned.session.chunk_refs(f"{source.group.rstrip('/')}/{name}", bounds)
    coords = np.zeros((len(refs), len(dims)), np.int64)
    for number, (axis, chunk, length) in enumerate(own):
        coords[:, axis] = refs.coords[:, number] * length // chunk
    here = ((coords >= region.lo) & (coords < region.hi)).all(axis=1)
    return region.ravel(coords[here]), np.asarray(refs.length, np.int64)[here]
