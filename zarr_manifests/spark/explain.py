"""Which chunks a read would leave out, and why, without reading any."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pyspark.sql import SparkSession

from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.planning.layout.batches import batches
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository
from zarr_manifests.spark.job import Job, chunks_in
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
    where: Any = None,
    nan: str = "null",
    decode_times: bool = True,
    broadcast: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> ChunkSelection:
    r"""Tell which chunks a read with these options would read, and why it leaves out the others.

    No chunk of a variable is read, but the lists of their chunks are, piece by piece.

    Parameters
    ----------
    spark, url, variables, group, version
        As for `read`.
    where, nan, decode_times, broadcast
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
        where=where,
        nan=nan,
        decode_times=decode_times,
        broadcast=broadcast,
    )
    planned = plan(repository_of(url, storage_options), options, SparkFacts.of(spark))
    job, path = planned.job, planned.source.group.rstrip("/")
    names = [column.name for column in job.variables]
    compared = [name for name in names if job.where and name in job.where.columns]
    boxes, grid = job.chunks(), job.grid
    selected, in_range = chunks_in(boxes), math.prod(len(axis.chunks) for axis in job.scan.axes)
    nbytes = selected_bytes = by_statistics = 0
    for region in batches([(grid, grid.size)], _LISTED):
        read, there = _read(boxes, region), np.zeros(region.size, np.bool_)
        for name in names:
            index, sizes = _stored(planned, name, region)
            nbytes += int(sizes.sum())
            selected_bytes += int(sizes[read[index]].sum())
            there[index] |= name in compared
        by_statistics += int((there & _in_range(job, region) & ~read).sum())
    return ChunkSelection(
        path=f"{path}/{','.join(names)}",
        where=job.where.sql if job.where else "TRUE",
        shape=job.shape,
        chunk_shape=tuple(axis.chunk for axis in job.scan.axes),
        dimensions=tuple(column.name for column in job.dimensions),
        boxes=boxes,
        selected=selected,
        left_out={
            "range": grid.size - in_range,
            "statistics": by_statistics,
            "absence": in_range - selected - by_statistics,
        },
        unknown=max((each.unknown for each in planned.selections), default=0),
        bytes=nbytes,
        selected_bytes=selected_bytes,
        reasons={sql: n for each in planned.selections for sql, n in each.reasons.items()},
        data=tuple(f"{path}/{name}" for name in compared),
    )


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
    variable, own, bounds = source.encoded(name), [], []
    for dim, length in zip(variable.dims, source.stored_chunk_shape(name), strict=True):
        axis = dims.index(str(dim))
        chunk, most = job.scan.axes[axis].chunk, -(-variable.sizes[dim] // length)
        own.append((axis, chunk, length))
        stop = -(-region.hi[axis] * chunk // length)
        bounds.append((min(region.lo[axis] * chunk // length, most), min(stop, most)))
    refs = planned.session.chunk_refs(f"{source.group.rstrip('/')}/{name}", bounds)
    coords = np.zeros((len(refs), len(dims)), np.int64)
    for number, (axis, chunk, length) in enumerate(own):
        coords[:, axis] = refs.coords[:, number] * length // chunk
    here = ((coords >= region.lo) & (coords < region.hi)).all(axis=1)
    return region.ravel(coords[here]), np.asarray(refs.length, np.int64)[here]
