"""Aggregates of arrays, mostly from statistics; tasks aggregate the rest before a row is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import xarray as xr
from pyspark.sql import DataFrame, SparkSession

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.repositories import Location
from zarr_manifests.spark.job import frame_of, shared_repository
from zarr_manifests.spark.tasks import run_tasks
from zarr_manifests.texts import known_as, shown

_FUNCTIONS: Final = ("count", "missing", "min", "max", "sum", "mean", "std")


def aggregate(
    spark: SparkSession,
    url: Location,
    values: Mapping[str, Sequence[str]],
    *,
    by: str | Sequence[str] | Mapping[str, str | None] | None = None,
    where: str | None = None,
    weights: Mapping[str, Any] | None = None,
    version: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> DataFrame:
    """Aggregate arrays by labels of their dimensions, as `Session.summarize` does.

    Whole chunks are answered by their statistics. Others are read and aggregated in tasks, by
    NumPy; what is few is read on the driver. Only the answer becomes rows.

    Parameters
    ----------
    spark : SparkSession
        Runs the tasks.
    url : str, path, storage or Repository
        The repository.
    values : mapping of str to sequence of str
        By path of each array, what to compute: `count`, `missing`, `min`, `max`, `sum`, `mean`; and
        `std`, if it has the attribute `statistics_std = 1`.
    by, weights
        As in `Session.summarize`.
    where : str, optional
        Comparisons of coordinates, such as `"lat > 30"`.
    version : str, optional
        A branch, tag, id and so on; by default the head of `main`.
    storage_options : mapping, optional
        Options for the URL.

    Returns
    -------
    DataFrame
        A column for each dimension in `by`, and one such as `t2m_mean` for each value.

    Raises
    ------
    NotFoundError
        If there is no such array.
    InvalidArgumentError
        If a function is unknown, or as `Session.summarize` does.

    Examples
    --------
    >>> from zarr_manifests.spark import aggregate, session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> aggregate(spark, "winds", {"u": ["mean", "max"]}, by="time").show()  # doctest: +SKIP
    """
    for how in (how for given in values.values() for how in given):
        if how not in _FUNCTIONS:
            raise InvalidArgumentError(f"{shown(how)} is unknown: {known_as(how, _FUNCTIONS)}")
    if not any(values.values()):
        raise InvalidArgumentError('values= names nothing: give {"air": ["mean"]} and so on')
    opened = shared_repository(url, storage_options).readonly_session(version)
    run, parts = partial(run_tasks, spark), []
    for path, given in values.items():
        found = opened.summarize(path, where, by=by, weights=weights, run=run)
        if "std" in given and "std" not in found:
            raise InvalidArgumentError(
                f"{path} has no standard deviations: set its attribute statistics_std to 1"
            )
        name = path.strip("/").replace("/", "_")
        parts.append(found[[*given]].rename({how: f"{name}_{how}" for how in given}))
    # Where one array has labels that another one lacks, it has no cells.
    none = {name: 0 for part in parts for name in part if name.endswith(("_count", "_missing"))}
    whole = xr.merge(parts, join="outer", fill_value=none, combine_attrs="drop")
    dims = [*whole.sizes]
    columns = (whole[name].broadcast_like(whole).transpose(*dims) for name in (*dims, *whole))
    return frame_of(spark, {str(one.name): one for one in columns})
