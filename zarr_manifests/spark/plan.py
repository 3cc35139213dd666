"""Planning a read: from a repository and options to a `Job` and its columns.

One planner serves `read`, the data source and streams. It needs no Spark session. It pins the
snapshot, and reads metadata and coordinates, but no chunk of another variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.planning.scan import Axis, Scan, one_run, plan_scan
from zarr_manifests.planning.skipping import boxes_of, comparable, matching_cells, matching_runs
from zarr_manifests.planning.where import Comparison, Moment, Where, parse_where, zone_of
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.repositories import Location
from zarr_manifests.repository import Repository, changed_cells, containers_of, resolved
from zarr_manifests.session import Session
from zarr_manifests.spark.job import Column, Job, column_of, shared_repository
from zarr_manifests.spark.job import ReadOptions as ReadOptions
from zarr_manifests.spark.job import SparkFacts as SparkFacts
from zarr_manifests.spark.source import Source, listed_in

_MOST_CHUNKS: Final = 2**22
"""Most chunks that are listed to align boxes."""


def plan_read(location: Location, options: ReadOptions, facts: SparkFacts) -> Job:
    """Plan a read.

    Parameters
    ----------
    location : str, path, Storage or Repository
        The repository.
    options : ReadOptions
        What to read and how.
    facts : SparkFacts
        Where it will run. There are at least as many tasks as can run at once, if there are as
        many chunks.

    Returns
    -------
    Job
        With `tasks` 0 if there is nothing to read.

    Raises
    ------
    NotARepositoryError, NotFoundError, InvalidArgumentError, UnsupportedStorageError
        As for `zarr_manifests.spark.read`.
    """
    repository = shared_repository(location)
    session = repository.readonly_session(options.version)
    source = Source(session, options.group, decode_times=options.decode_times)
    names = _variables(source, options.variables)
    sizes = _shared_sizes(source, names)
    dimensions = tuple(column_of(source, dim, is_dimension=True) for dim in sizes)
    along = {dim for dim in sizes if source.coordinate(dim) is not None}
    columns = tuple(column_of(source, n, is_dimension=False) for n in names if n not in along)
    where = None
    if options.where is not None:
        where = _checked(parse_where(options.where), source, (*dimensions, *columns), facts)
    axes = _axes(source, names, sizes, where, options, facts)
    everything = np.array([[[0] * len(sizes), [*sizes.values()]]], np.int64)
    job = Job(
        storage=repository.storage,
        containers=tuple(sorted(containers_of(repository).items())),
        snapshot_id=session.snapshot_id,
        group=source.group,
        dimensions=dimensions,
        variables=columns,
        shape=tuple(sizes.values()),
        scan=Scan(tuple(axes), spans=()),  # `restrict` cuts it
        options=replace(options, variables=None, where=None),
        facts=facts,
        parts=everything,
        starts=np.array([0, 1], np.int64),
        where=where,
    )
    for boxes in [*_left_by_statistics(session, source, job)] or [everything]:
        job = restrict(job, boxes)
    return job


def restrict(job: Job, boxes: IndexArray) -> Job:
    """The job for only the cells in some boxes, regrouped into tasks of about the target size.

    Parameters
    ----------
    job : Job
        A planned read.
    boxes : int64[n, 2, ndim]
        Half-open boxes of cells that do not overlap.
    """
    options, parallelism = job.options, job.facts.parallelism
    boxes = _common(boxes, job.parts)
    rows = int(job.scan.cells(boxes).sum())
    target = min(options.target_rows, rows // parallelism)
    scan = plan_scan(job.scan.axes, target_rows=max(target, rows // options.max_tasks, 1))
    parts = scan.cut(boxes)
    sizes = scan.cells(parts)
    middles = np.cumsum(sizes) - sizes / 2
    tasks = max(-(-rows // options.target_rows), min(parallelism, len(parts)))
    tasks = min(tasks, options.max_tasks, len(parts))
    cuts = np.searchsorted(middles, np.arange(1, tasks) * (rows / max(tasks, 1)))
    starts = np.unique(np.concatenate([[0], cuts, [len(parts)]])).astype(np.int64)
    return replace(job, scan=scan, parts=parts, starts=starts)


def plan_changes(
    repository: Repository,
    options: ReadOptions,
    facts: SparkFacts,
    start: str | None,
    end: str,
) -> Job:
    """Plan to read the cells that were added from `start` to `end`.

    `start` and `end` are named as for `changes`; the options name no snapshot.

    Raises
    ------
    ManifestsError
        As for `changes`.
    """
    if options.layout != "long" or options.version is not None:
        raise InvalidArgumentError(
            "changes has a row for each cell, from start to end: only read takes layout and version"
        )
    last = resolved(repository, end)
    whole = plan_read(repository, replace(options, version=last), facts)
    first = None if start is None else resolved(repository, start)
    group = whole.group.rstrip("/")
    paths = [f"{group}/{column.name}" for column in whole.variables]
    if not paths:
        raise InvalidArgumentError(
            "all variables are coordinates, whose changes are not tracked; name another variable "
            "with variables=[...]"
        )
    cells = changed_cells(repository, paths, first, last)
    if first is not None and cells.old_shape is not None:
        _check_coordinates(repository, whole, first, last)
    return restrict(whole, cells.added)


def _check_coordinates(repository: Repository, whole: Job, first: str, last: str) -> None:
    """Raise if a coordinate has other values now, or a variable has other dimensions."""
    try:
        how: Any = {"decode_times": whole.options.decode_times}
        sessions = map(repository.readonly_session, (first, last))
        old, new = (Source(each, whole.group, **how) for each in sessions)
    except NotFoundError as error:
        raise InvalidArgumentError(
            f"the variables were not in group {whole.group} at snapshot {first}, so their "
            "coordinates cannot be compared. Read the whole of a newer snapshot, and the changes "
            "from there on"
        ) from error
    dims = tuple(column.name for column in whole.dimensions)
    for column in whole.variables:
        was = old.dims.get(column.name, dims)
        if was != dims:
            raise InvalidArgumentError(
                f"{column.name} has the dimensions {', '.join(dims)} now, and had "
                f"{', '.join(was)} at snapshot {first}, so its rows cannot be compared"
            )
    for dim in dims:
        at = _first_difference(old.coordinate(dim), new.coordinate(dim))
        if at is not None:
            raise InvalidArgumentError(
                f"the coordinate {dim!r} has other values at snapshot {last} than at {first}, from "
                f"position {at} on, so positions do not identify rows. Read the whole of a newer "
                "snapshot, and the changes from there on"
            )


def _first_difference(before: Any, after: Any) -> int | None:
    """The first position at which the values differ; a value in place of a missing one does not."""
    if before is None or after is None:
        return None if before is after else 0
    size = min(len(before), len(after))
    was, now = before[:size], after[:size]
    differ = np.asarray(was != now, bool) & ~comparable(was)[1]
    return int(np.flatnonzero(differ)[0]) if differ.any() else None


def _variables(source: Source, given: str | Sequence[str] | None) -> tuple[str, ...]:
    names = (
        source.data_variables if given is None else (given,) if isinstance(given, str) else given
    )
    if not names:
        none = "has no variables, which are arrays whose dimensions have names"
        what = none if given is None else "was asked for no variables"
        told = f"group {source.group} {what}; name what to read with variables=[...]"
        raise InvalidArgumentError(told)
    for name in names:
        source.array(name)
    return tuple(names)


def _shared_sizes(source: Source, names: Sequence[str]) -> dict[str, int]:
    """The lengths by dimension, which all variables have in the same order."""
    found = {name: source.sizes(name) for name in names}
    if len({tuple(sizes.items()) for sizes in found.values()}) > 1:
        listed = "; ".join(
            f"{name} ({', '.join(f'{dim}: {size}' for dim, size in sizes.items())})"
            for name, sizes in found.items()
        )
        raise InvalidArgumentError(
            "variables of one read must have the same dimensions in the same order: "
            f"{listed}. Name those that do with variables=[...], and join the results"
        )
    return found[names[0]]


def _axes(
    source: Source,
    names: Sequence[str],
    sizes: Mapping[str, int],
    where: Where | None,
    options: ReadOptions,
    facts: SparkFacts,
) -> list[Axis]:
    """What to read along each dimension, in chunks that are whole for all the variables."""
    how: Any = {"zone": zone_of(facts.time_zone), "nan_is_null": options.nan != "keep"}
    shapes = [source.reading_shape(name, in_shards=options.layout == "long") for name in names]
    axes = []
    for (dim, size), chunks in zip(sizes.items(), zip(*shapes, strict=True), strict=True):
        # If chunks differ, the largest: if it is a multiple of the others, no chunk is read twice.
        chunk = max(chunks)
        mine = [each for each in where.comparisons if each.column == dim] if where else []
        runs = one_run(0, size)
        if mine and size:
            runs = matching_runs(mine, source.coordinate(dim), size, **how)
        axes.append(Axis(max(chunk, 1), runs))
    return axes


def _checked(where: Where, source: Source, columns: Sequence[Column], facts: SparkFacts) -> Where:
    """The where with times as Spark has them.

    Raises
    ------
    InvalidArgumentError
        If there is no such column, or it cannot be compared so.
    """
    known = {column.name: column for column in columns}
    found = []
    for each in where.comparisons:
        column = known.get(each.column)
        if column is None:
            raise InvalidArgumentError(
                f"there is no column {each.column!r} to compare in {each.sql!r}; "
                f"there are: {', '.join(known)}"
            )
        if pa.types.is_timestamp(column.arrow):
            each = replace(each, values=tuple(map(_in_microseconds, each.values)))
        if each.column in source.dims:
            text = pa.types.is_string(column.arrow)
            none = np.empty(0, object if text else source.decoded_dtype(each.column))
            matching_cells(each, none, zone=zone_of(facts.time_zone))
        found.append(each)
    return Where(tuple(found))


def _in_microseconds(value: Any) -> Any:
    """A time, or the times of a range, without the digits that Spark cuts off."""
    if isinstance(value, tuple):
        return tuple(map(_in_microseconds, value))
    if isinstance(value, Moment):
        return Moment(_in_microseconds(value.text))
    return re.sub(r"(\.\d{6})\d+", r"\1", value) if isinstance(value, str) else value


# --- boxes of chunks that statistics leave -------------------------------------------------------


def _left_by_statistics(session: Session, source: Source, job: Job) -> Iterator[IndexArray]:
    """What statistics leave, each time as boxes of cells (int64[n, 2, ndim]).

    They are whole chunks of the job's scan. Variables with the same chunks are looked at together.
    """
    names = [column.name for column in job.variables]
    chunk_shape = np.array([axis.chunk for axis in job.scan.axes], np.int64)

    def chosen(*comparisons: Comparison) -> tuple[ChunkSelection, IndexArray]:
        name = comparisons[0].column
        selection = session.chunks_where(
            f"{source.group.rstrip('/')}/{name}",
            Where(comparisons),
            nan_matches=job.options.nan == "keep",
            time_zone=job.facts.time_zone,
            decode_times=job.options.decode_times,
        )
        return selection, selection.boxes * np.array(source.meta(name).chunk_shape, np.int64)

    asked: list[list[tuple[Comparison, ...]]] = []  # the boxes of each are those of any of it
    if job.options.nan == "drop":
        asked.append([(Comparison(name, "is_not_null"),) for name in names])
    comparisons = job.where.comparisons if job.where else ()
    of_dims = [each for each in comparisons if each.column not in names]
    alike: dict[Coords, list[Comparison]] = {}
    for each in comparisons:
        if each.column in names:
            alike.setdefault(source.meta(each.column).chunk_shape, []).append(each)
    asked += [[(*mine, *of_dims)] for mine in alike.values()]
    for each_of in asked if job.scan.rows else ():
        found = [chosen(*one) for one in each_of]
        if found and all(selection.selected < selection.chunks for selection, _ in found):
            boxes = np.concatenate([each for _, each in found])
            yield from _aligned(boxes, chunk_shape, apart=len(found) == 1)


def _aligned(boxes: IndexArray, chunk_shape: IndexArray, *, apart: bool) -> Iterator[IndexArray]:
    """Disjoint boxes of whole chunks around some boxes.

    If there are too many chunks: the same boxes, if they are apart, or none.
    """
    lo, hi = boxes[:, 0] // chunk_shape, -(-boxes[:, 1] // chunk_shape)
    edges = np.stack([lo, hi], axis=1)
    many = int((hi - lo).prod(axis=1).sum()) > _MOST_CHUNKS
    if not len(boxes) or (apart and (many or np.array_equal(edges * chunk_shape, boxes))):
        yield boxes
    elif not many:
        region, chunks = listed_in(lo, hi)
        yield boxes_of(chunks, region) * chunk_shape


def _common(some: IndexArray, others: IndexArray) -> IndexArray:
    """The boxes of what is in both of two lists of disjoint boxes."""
    few, many = sorted((some, others), key=len)
    found = [np.empty((0, *many.shape[1:]), np.int64)]
    for lo, hi in few:
        both = np.stack([np.maximum(many[:, 0], lo), np.minimum(many[:, 1], hi)], axis=1)
        found.append(both[(both[:, 0] < both[:, 1]).all(axis=1)])
    return np.concatenate(found)
