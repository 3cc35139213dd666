"""Which chunks a read would leave out, and why, without reading any."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.sql import SparkSession

from zarr_manifests.grid import Box, IndexArray, grid_shape
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.repository import Repository, repository_of
from zarr_manifests.spark.job import Job
from zarr_manifests.spark.plan import PlannedRead, ReadOptions, SparkFacts, plan
from zarr_manifests.storage import Storage

__all__ = ["explain_pruning"]


def explain_pruning(
    spark: SparkSession,
    url: str | os.PathLike[str] | Storage | Repository,
    variables: str | Sequence[str] | None = None,
    *,
    group: str = "/",
    version: str | None = None,
    branch: str | None = None,
    tag: str | None = None,
    snapshot_id: str | None = None,
    as_of: datetime | str | None = None,
    ranges: Mapping[str, Any] | None = None,
    where: Any = None,
    nan: str = "null",
    decode_times: bool = True,
    broadcast: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> ChunkSelection:
    r"""Tell which chunks a read with these options would read, and why it leaves out the others.

    No chunk of a variable is read. One variable with a where and without ranges is explained by
    what its planning has counted. Otherwise the snapshot's lists of chunks are read, too, so it may
    take longer than planning a read.

    Parameters
    ----------
    spark, url, variables, group, version, branch, tag, snapshot_id, as_of
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
        branch=branch,
        tag=tag,
        snapshot_id=snapshot_id,
        as_of=as_of,
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
    if not ranges and len(planned.selections) == len(names) == 1:
        (counted,) = planned.selections
        totals = {array.path: array.total for array in planned.session.totals().arrays}
        total = totals[counted.path]
        same = counted.dimensions, counted.chunk_shape, counted.selected
        if (
            same == (dims, chunk_shape, selected)
            and total.nbytes_exact
            and total.nbytes is not None
        ):
            return replace(counted, where=where, boxes=boxes, bytes=total.nbytes)
    numbers = [Box(tuple(lo), tuple(hi)) for lo, hi in boxes.tolist()]
    read = np.concatenate(
        [np.empty(0, np.int64), *(box.carried(np.arange(box.size), grid) for box in numbers)]
    )
    stored = {name: _stored(planned, name, grid) for name in names}
    compared = [
        name
        for name in names
        if job.where and any(each.column == name for each in job.where.comparisons)
    ]
    there = [stored[name][0] for name in compared]
    unread = np.setdiff1d(np.concatenate(there) if there else np.empty(0, np.int64), read)
    by_statistics = int(_in_range(job, grid.unravel(unread)).sum())
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
            "absence": in_range - selected - by_statistics,
        },
        unknown=max((each.unknown for each in planned.selections), default=0),
        bytes=sum(int(lengths.sum()) for _, lengths in stored.values()),
        selected_bytes=sum(int(sizes[np.isin(at, read)].sum()) for at, sizes in stored.values()),
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


def _in_range(job: Job, coords: IndexArray) -> npt.NDArray[np.bool_]:
    """Which of these chunks have cells that coordinates select."""
    inside = np.ones(len(coords), np.bool_)
    for number, axis in enumerate(job.scan.axes):
        inside &= np.isin(coords[:, number], axis.chunks)
    return inside


def _stored(planned: PlannedRead, name: str, grid: Box) -> tuple[IndexArray, IndexArray]:
    """A variable's stored chunks as numbers in the grid of the read, and their bytes.

    A chunk of a variable with fewer dimensions counts as the first of those that it is repeated in.
    """
    job, source = planned.job, planned.source
    refs = planned.session.chunk_refs(f"{source.group.rstrip('/')}/{name}")
    dims = [column.name for column in job.dimensions]
    coords = np.zeros((len(refs), len(dims)), np.int64)
    own = zip(source.encoded(name).dims, source.stored_chunk_shape(name), strict=True)
    for number, (dim, length) in enumerate(own):
        axis = dims.index(str(dim))
        coords[:, axis] = refs.coords[:, number] * length // job.scan.axes[axis].chunk
    return grid.ravel(coords), np.asarray(refs.length, np.int64)
