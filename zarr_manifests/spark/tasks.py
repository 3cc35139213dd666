"""Calls that run as Spark tasks, and what they return.

Items go to tasks in waves, a few for each task that Spark runs at once. The next wave is submitted
before the results of one are handed out, so tasks run while the caller works on results. Invariant:
an item has one result, that of the attempt which Spark counts; failed and speculative attempts have
none.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.util import inheritable_thread_target

from zarr_manifests.spark.plan import SparkFacts

__all__ = ["run_tasks"]

_WAVE: Final = 4
"""Tasks in a wave, for each that Spark runs at once."""
_PICKLE: Final[Any] = cloudpickle
"""It raises what pickling raises: a fork writes what it holds when it is pickled."""


def run_tasks[Item, Result](
    spark: SparkSession, call: Callable[[Item], Result], items: Sequence[Item]
) -> Iterator[Result]:
    """Yield what the call makes of each item, in the order of the items.

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
    size = _WAVE * SparkFacts.of(spark).parallelism
    waves = [items[first : first + size] for first in range(0, len(items), size)]
    submitted: deque[Future[list[Result]]] = deque()
    with ThreadPoolExecutor(2) as threads:
        try:
            for wave in waves:
                run: Any = inheritable_thread_target(spark)(_run_wave)
                submitted.append(threads.submit(run, spark, call, wave))
                if len(submitted) > 1:
                    yield from submitted.popleft().result()
            while submitted:
                yield from submitted.popleft().result()
        finally:
            for future in submitted:
                future.cancel()


def _run_wave(spark: SparkSession, call: Any, items: Sequence[Any]) -> list[Any]:
    # The items are pickled here one by one, so that a task unpickles its own only.
    pickled = [_PICKLE.dumps(item) for item in items]
    numbers = spark.range(0, len(pickled), 1, len(pickled))  # one a partition
    run = partial(_run_batches, _PICKLE.dumps(call), pickled)
    table = numbers.mapInArrow(run, "number bigint, failed boolean, result binary").toArrow()
    rows = sorted(table.to_pylist(), key=lambda row: row["number"])
    results = []
    for row in rows:
        result = _PICKLE.loads(row["result"])
        if row["failed"]:
            raise result
        results.append(result)
    return results


def _run_batches(
    call: bytes, items: Sequence[bytes], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            failed, result = _outcome(call, items[number])
            if not gc.get_freeze_count():  # else each later task looks through all modules again
                gc.collect()
                gc.freeze()
            columns = [pa.array([number]), pa.array([failed]), pa.array([result], pa.binary())]
            yield pa.record_batch(columns, ["number", "failed", "result"])


def _outcome(call: bytes, item: bytes) -> tuple[bool, bytes]:
    try:
        return False, _PICKLE.dumps(_PICKLE.loads(call)(_PICKLE.loads(item)))
    except (OSError, MemoryError):
        raise  # Spark tries again
    except Exception as error:  # noqa: BLE001 - raised on the driver
        return True, _PICKLE.dumps(error)
