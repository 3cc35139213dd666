"""Calls that run as Spark tasks, and what they return.

A Spark job hands over all its results at its end. So the tasks are spread over many small jobs, of
which several run at once: results come soon, and no executor waits for the last task of a job. On a
small cluster each task is a job of its own. Invariant: an item has one result, that of the attempt
which Spark counts; failed and speculative attempts have none.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, Final

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.util import inheritable_thread_target

from zarr_manifests.spark.plan import SparkFacts

__all__ = ["PICKLE", "RESULT", "results", "returned", "run_tasks"]

RESULT: Final = "result binary"
"""The columns of what `returned` yields."""

_AHEAD: Final = 2
"""Tasks that are in jobs at the same time, for each that Spark runs at once."""
_JOBS: Final = 8
"""The most jobs at the same time."""
PICKLE: Final[Any] = cloudpickle
"""It raises what pickling raises: a fork writes what it holds when it is pickled."""


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
    found = numbers.mapInArrow(partial(returned, partial(_run_items, call, pickled)), RESULT)
    done = dict(chain.from_iterable(results(found)))
    return [done[number] for number in range(len(pickled))]


def _run_items(
    call: bytes, items: Sequence[bytes], batches: Iterable[pa.RecordBatch]
) -> list[tuple[int, Any]]:
    numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
    return [(n, PICKLE.loads(call)(PICKLE.loads(items[n]))) for n in numbers]


def returned(
    call: Callable[[Iterable[pa.RecordBatch]], Any], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield what the call returns for the rows of a partition, or what it raises, for `results`.

    An `OSError` or `MemoryError` is raised here, so that Spark tries again.
    """
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


def results(frame: DataFrame) -> list[Any]:
    """What `returned` has yielded in each partition; raises what a call has raised."""
    found = []
    for data in frame.toArrow()["result"].to_pylist():
        fine, result = PICKLE.loads(data)
        if not fine:
            raise result
        found.append(result)
    return found
