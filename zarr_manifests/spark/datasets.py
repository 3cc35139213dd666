"""`write_dataset`: `zarr_manifests.write`, with the blocks computed and written by Spark tasks.

Spark stands in for dask's scheduler. A dask graph is cut into groups of keys, neighbours in dask's
own order, and each group is one task. What two groups share is computed by both.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Final

import xarray as xr
from pyspark.sql import SparkSession

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.repository import Repository
from zarr_manifests.spark.plan import SparkFacts
from zarr_manifests.spark.tasks import run_tasks
from zarr_manifests.storage.url import refuse_options, storage_of
from zarr_manifests.xarray import write
from zarr_manifests.xarray.backend import Location

__all__ = ["write_dataset"]

_TASKS: Final = 8
"""Tasks for each that Spark runs at once, if there are as many blocks."""
_MOST_KEYS: Final = 4096
"""Of a task."""
_BLOCK_BYTES: Final = 32 * 1024**2


def write_dataset(
    ds: xr.Dataset, url: Location, *, spark: SparkSession, message: str, **options: Any
) -> str:
    """Write a dataset to a repository in one commit, with Spark computing it.

    Dask arrays are computed and written by Spark tasks, each of which takes several blocks.
    Variables that were opened lazily without dask are cut along the chunks they are stored in, and
    tasks read them from their files. The driver itself writes values that it has in memory.

    Parameters
    ----------
    ds : Dataset
        The dataset. Spark's workers must be able to open what its lazy values are read from.
    url : str, path, Storage or Repository
        Where the repository is, or is to be made. Spark's workers must be able to reach it.
    spark : SparkSession
        A Spark session, such as `zarr_manifests.spark.session()` returns.
    message : str
        The commit message.
    **options : optional
        The other arguments of `zarr_manifests.write`, except `scheduler`.

    Returns
    -------
    str
        The id of the new snapshot; if every byte existed already, that of the branch's head.

    Raises
    ------
    InvalidArgumentError
        If there is no such option, or the repository is in the memory of this process; or as
        `zarr_manifests.write` says, as are all other errors.

    Examples
    --------
    >>> import xarray as xr
    >>> from zarr_manifests.spark import session, write_dataset
    >>> ds = xr.open_mfdataset("winds/*.nc")  # doctest: +SKIP
    >>> _ = write_dataset(
    ...     ds, "winds.zarr", spark=session(), message="ten years"
    ... )  # doctest: +SKIP
    """
    if "scheduler" in options:
        raise InvalidArgumentError("write_dataset computes with Spark, and takes no scheduler")
    given = options.pop("storage_options", None)
    if isinstance(url, Repository):
        refuse_options("a repository", given)
    else:
        url = storage_of(url, given)
    if find_spec("dask") is not None:
        ds = _cut(ds, options.get("encoding") or {})
    return write(ds, url, message=message, scheduler=partial(_compute, spark), **options)


def _cut(ds: Any, encoding: Mapping[Hashable, Mapping[str, Any]]) -> Any:
    """Turn lazy values into dask arrays; blocks are several chunks, which `write` aligns."""
    if not isinstance(ds, xr.Dataset):
        return ds  # `write` refuses it
    ds = ds.copy()
    for name, variable in ds.variables.items():
        if variable.chunks is not None or variable._in_memory:
            continue
        how = {**variable.encoding, **encoding.get(name, {})}
        preferred = how.get("preferred_chunks") or {}
        chunks: Any = how.get("shards") or how.get("chunks")
        chunks = chunks or [preferred.get(dim, 1) for dim in variable.dims]
        if isinstance(chunks, Sequence) and len(chunks) == variable.ndim:
            variable.data = variable.chunk(_blocks(variable, chunks)).data
    return ds  # xarray says what is wrong with other chunks


def _blocks(variable: xr.Variable, chunks: Sequence[int]) -> dict[Hashable, int]:
    """Lengths of blocks of several chunks, which are neighbours in the file."""
    blocks = dict(zip(variable.dims, chunks, strict=True))
    room = _BLOCK_BYTES // max(math.prod(chunks) * variable.dtype.itemsize, 1)
    for dim, chunk in reversed(blocks.items()):
        times = max(1, min(-(-variable.sizes[dim] // chunk), room))
        blocks[dim], room = chunk * times, room // times
    return blocks


# --- Spark as a scheduler of dask ------------------------------------------------------------


def _compute(spark: SparkSession, graph: Any, keys: Sequence[Any], **_: object) -> list[Any]:
    """Compute keys of a dask graph by Spark tasks; a scheduler as dask calls it."""
    from dask._task_spec import Task, convert_legacy_graph
    from dask.local import get_sync
    from dask.optimization import cull
    from dask.order import order

    if not isinstance(graph, Mapping):
        graph = graph.__dask_graph__()
    graph = convert_legacy_graph(graph)
    if not any(isinstance(node, Task) for node in graph.values()):
        return list(get_sync(graph, keys))  # what was computed already
    places = order(graph)
    wanted = sorted(set(keys), key=places.__getitem__)
    most = _TASKS * SparkFacts.of(spark).parallelism
    count = max(min(len(wanted), most), -(-len(wanted) // _MOST_KEYS))
    ends = [number * len(wanted) // count for number in range(count + 1)]
    groups = [wanted[start:stop] for start, stop in pairwise(ends)]
    parts: Any = [(cull(graph, group)[0], group) for group in groups]  # type: ignore[no-untyped-call]
    found: dict[Any, Any] = {}
    for group, values in zip(groups, run_tasks(spark, _compute_here, parts), strict=True):
        found.update(zip(group, values, strict=True))
    return [found[key] for key in keys]


def _compute_here(part: tuple[Mapping[Any, Any], Sequence[Any]]) -> list[Any]:
    """Compute keys of a graph in a task, which has one processor."""
    import dask
    from dask.local import get_sync

    graph, keys = part
    with dask.config.set(scheduler="synchronous"):
        return list(get_sync(graph, keys))
