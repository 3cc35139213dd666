"""What the driver of an ingestion does for very many files, whose tasks are made up."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import zarr_manifests as zm
from zarr_manifests.planning.file_rows import FileFacts, FileLayout, VariableFacts
from zarr_manifests.spark import ingest
from zarr_manifests.spark.plan import SparkFacts
from zarr_manifests.xarray import ingest_run
from zarr_manifests.xarray.ingest_rows import Template

SPARK: Any = None
MANY = 20_000


class MadeUpTasks:
    """Each file has one row, which no task writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.items: dict[str, list[int]] = {}
        self.compared = 0
        monkeypatch.setattr("zarr_manifests.spark.ingest_tasks.run_tasks", self.run)
        monkeypatch.setattr(SparkFacts, "of", lambda spark: SparkFacts(parallelism=2))
        difference = ingest_run.difference

        def counted(*arguments: Any) -> Any:
            self.compared += 1
            return difference(*arguments)

        monkeypatch.setattr(ingest_run, "difference", counted)

    def run(self, spark: object, call: Any, items: Sequence[Any]) -> Iterator[Any]:
        self.items.setdefault(call.func.__name__, []).append(len(items))
        for item in items:
            if call.func is ingest_run._write:
                yield call.args[0]
                continue
            files, wants_template = item
            made = [looked(url, known) for url, known in files]
            if wants_template:
                made[0] = ingest_run._Looked(made[0].url, made[0].facts, TEMPLATE)
            yield made


def looked(url: str, known: Any) -> Any:
    if known is not None:
        return ingest_run._Looked(url)
    label = np.array([int(url.rpartition("/")[2])])
    # As from a pickle: each file has its own copy of what all have in common.
    facts = {
        "t": VariableFacts(("time", "x"), "f4", (("units", "K"),)),
        "time": VariableFacts(("time",), "i8"),
    }
    layout = FileLayout((("x", 100),), tuple(facts.items()))
    return ingest_run._Looked(url, FileFacts(url, 500, "1700000000", layout, 1, {"time": label}))


TEMPLATE = Template(
    "file:///data/000000",
    xr.Dataset(
        {"t": (("time", "x"), np.empty((0, 100), "f4"), {"units": "K"})},
        {"time": np.empty(0, "i8")},
    ),
    {"t": (1, 100), "time": (8192,)},
)


@pytest.mark.slow
def test_very_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work and memory of the driver are a little for each file, and few tasks have all of it."""
    files = [f"/data/{number:06}" for number in range(MANY)]
    for attempt in range(3):  # threads that other tests have left may allocate as well
        tasks = MadeUpTasks(monkeypatch)
        place = tmp_path / f"{attempt}"
        tracemalloc.start()
        try:
            report = ingest(SPARK, files[: MANY // 2], place, append_dim="time")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        if peak < 1500 * MANY // 2:
            break
    assert peak < 1500 * MANY // 2
    assert (len(report.added), len(report.snapshot_ids)) == (MANY // 2, 1)
    assert tasks.compared == 2
    assert tasks.items == {"_look": [40], "_write": [1]}
    before = {path for path in place.rglob("*") if path.is_file()}
    report = ingest(SPARK, files, place, append_dim="time")
    assert (len(report.added), report.unchanged) == (MANY // 2, MANY // 2)
    written = {path for path in place.rglob("*") if path.is_file()} - before
    assert len(written) < 10
    assert sum(path.stat().st_size for path in written) < 10 * MANY
    found = xr.open_dataset(place, engine="zarr_manifests")
    assert (found.time.values == np.arange(MANY)).all()
    assert ingest(SPARK, files, place, append_dim="time").snapshot_ids == ()
    assert len([*zm.open(place).ancestry()]) == 3
