"""Calls that run as Spark tasks, and the writes of datasets and files that are such tasks.

A Spark job hands over all its results at its end. So the tasks are spread over many small jobs, of
which several run at once: results come soon, and no executor waits for the last task of a job. On a
small cluster each task is a job of its own. Invariant: an item has one result, that of the attempt
which Spark counts; failed and speculative attempts have none.

For `write_dataset`, Spark stands in for dask's scheduler. A dask graph is cut into groups of keys,
neighbours in dask's own order, and each group is one task. What two groups share is computed by
both.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.util import inheritable_thread_target

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.reports import IngestReport
from zarr_manifests.spark.plan import Location, SparkFacts

if TYPE_CHECKING:
    import xarray as xr

_AHEAD: Final = 2
"""Tasks that are in jobs at the same time, for each that Spark runs at once."""
_JOBS: Final = 8
"""The most jobs at the same time."""
PICKLE: Final[Any] = cloudpickle
"""It raises what pickling raises: a fork writes what it holds when it is pickled."""
_TASKS: Final = 8
"""Tasks for each that Spark runs at once, if there are as many blocks."""
_MOST_KEYS: Final = 4096
"""Of a task."""
_BLOCK_BYTES: Final = 32 * 1024**2


def run_tasks[Item, Result](
    spark: SparkSession, call: Callable[[Item], Result], items: Sequence[Item]
) -> Iterator[Result]:
    """Yield what the call makes of each item, in the order of the items and soon after its task.

    A call that raises an `OSError` or `MemoryError` is tried again as often as Spark is configured
    to. Any other error is raised here as it is.

    Parameters
    ----------
    spark : SparkSession
        Runs the tasks, one for each item.
    call : callable
        Can be pickled, as can what it returns.
    items : sequence
        Its arguments, which can be pickled too.
    """
    pickled = PICKLE.dumps(call)
    most = _AHEAD * SparkFacts.of(spark).parallelism
    size = -(-most // _JOBS)
    jobs = -(-most // size)
    waiting = deque(items[first : first + size] for first in range(0, len(items), size))
    submitted: deque[Future[list[Result]]] = deque()
    with ThreadPoolExecutor(jobs) as threads:
        try:
            while waiting or submitted:
                # More than run at once, so that a slow one holds up no others.
                while waiting and len(submitted) < 2 * jobs:
                    run: Any = inheritable_thread_target(spark)(_run_job)
                    submitted.append(threads.submit(run, spark, pickled, waiting.popleft()))
                yield from submitted.popleft().result()
        finally:
            for future in submitted:
                future.cancel()


def _run_job(spark: SparkSession, call: bytes, items: Sequence[Any]) -> list[Any]:
    # The items are pickled here one by one, so that a task unpickles its own only.
    pickled = [PICKLE.dumps(item) for item in items]
    numbers = spark.range(0, len(pickled), 1, len(pickled))  # one a partition
    done = dict(chain.from_iterable(results(numbers, partial(_run_items, call, pickled))))
    return [done[number] for number in range(len(pickled))]


def _run_items(
    call: bytes, items: Sequence[bytes], batches: Iterable[pa.RecordBatch]
) -> list[tuple[int, Any]]:
    numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
    return [(n, PICKLE.loads(call)(PICKLE.loads(items[n]))) for n in numbers]


def results(frame: DataFrame, call: Callable[[Iterable[pa.RecordBatch]], Any]) -> list[Any]:
    """What the call returns for the rows of each partition.

    An `OSError` or `MemoryError` that it raises has Spark try again; others are raised here.
    """
    found = []
    for data in mapped(frame, partial(_returned, call), "result binary").toArrow()[0].to_pylist():
        fine, result = PICKLE.loads(data)
        if not fine:
            raise result
        found.append(result)
    return found


def _returned(
    call: Callable[[Iterable[pa.RecordBatch]], Any], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield what the call returns, or what it raises, for `results`."""
    try:
        result = PICKLE.dumps((True, call(batches)))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - raised on the driver
        result = PICKLE.dumps((False, error))
    if not gc.get_freeze_count():  # else each later task looks through all modules again
        gc.collect()
        gc.freeze()
    yield pa.record_batch([pa.array([result], pa.binary())], ["result"])


def mapped(frame: DataFrame, call: Any, schema: Any) -> DataFrame:
    """The rows that a call makes of those of each partition."""
    with warnings.catch_warnings():
        # About features of pandas that are not used here.
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        return frame.mapInArrow(call, schema)


# --- datasets and files ----------------------------------------------------------------------


def ingest(
    spark: SparkSession,
    files: Iterable[str | os.PathLike[str]],
    url: Location,
    *,
    append_dim: str,
    **options: Any,
) -> IngestReport:
    """`zarr_manifests.ingest`, read and written by Spark's tasks.

    Parameters
    ----------
    spark : SparkSession
        A Spark session, such as `zarr_manifests.spark.session()` returns.
    files : iterable of str or path
        Paths or URLs, in any order. Spark's workers must be able to open them.
    url : str, path, Storage or Repository
        Where the repository is, or is to be made. Spark's workers must be able to reach it.
    append_dim : str
        The dimension along which the files are joined.
    **options
        As for `zarr_manifests.ingest`.

    Returns
    -------
    IngestReport
        What went where; `str` says it.

    Raises
    ------
    UnsupportedStorageError
        If other processes cannot reach the repository (`memory://`).
    InvalidArgumentError, ConflictError, ImportError
        As for `zarr_manifests.ingest`.

    Examples
    --------
    >>> from pathlib import Path
    >>> from zarr_manifests.spark import ingest, session
    >>> year = Path("era5").glob("2024-*.nc")
    >>> report = ingest(session(), year, "era5.zarr", append_dim="time")  # doctest: +SKIP
    >>> print(report)  # doctest: +SKIP
    366 files added, in 1 commit: 9.12 GB in 71.2 s, 128 MB/s
    """
    from zarr_manifests.xarray import ingest_files

    parallelism = SparkFacts.of(spark).parallelism
    runner = ingest_files.TaskRunner(partial(run_tasks, spark), parallelism, elsewhere=True)
    return ingest_files.ingest(files, url, append_dim=append_dim, runner=runner, **options)


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
    from zarr_manifests.xarray import write

    if "scheduler" in options:
        raise InvalidArgumentError("write_dataset computes with Spark, and takes no scheduler")
    if find_spec("dask") is not None:
        ds = _cut(ds, options.get("encoding") or {})
    return write(ds, url, message=message, scheduler=partial(_compute, spark), **options)


def _cut(ds: Any, encoding: Mapping[Hashable, Mapping[str, Any]]) -> Any:
    """Turn lazy values into dask arrays; blocks are several chunks, which `write` aligns."""
    import xarray as xr

    from zarr_manifests.xarray.backend import bundle

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
            blocks = bundle(variable.shape, chunks, variable.dtype.itemsize or 1, _BLOCK_BYTES)
            variable.data = variable.chunk(dict(zip(variable.dims, blocks, strict=True))).data
    return ds  # xarray says what is wrong with other chunks


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
