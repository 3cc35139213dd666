"""Spark tasks of an ingestion that run in this process, one after another.

Each call and its argument go through a pickle, as on their way to a task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark import cloudpickle

from zarr_manifests.spark.plan import SparkFacts

PICKLE: Any = cloudpickle


class Tasks:
    """Runs tasks here; `before` is called once before the first task of a kind."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.before: dict[str, Any] = {}

    def run(self, spark: object, call: Any, items: Any) -> Iterator[Any]:
        kind = call.func.__name__
        self.kinds += [kind] * len(items)
        hook = self.before.pop(kind, None)
        if hook is not None:
            hook()
        for item in items:
            moved, own = PICKLE.loads(PICKLE.dumps((call, item)))
            yield PICKLE.loads(PICKLE.dumps(moved(own)))

    @property
    def writes(self) -> int:
        return self.kinds.count("_write")


def run_here(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    """Have tasks run here, until the test ends."""
    tasks = Tasks()
    monkeypatch.setattr("zarr_manifests.spark.tasks.run_tasks", tasks.run)
    monkeypatch.setattr(SparkFacts, "of", lambda spark: SparkFacts(parallelism=2))
    return tasks
