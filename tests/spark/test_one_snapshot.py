"""One read is one snapshot, and no read changes another, whatever happens in between."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from pyspark import cloudpickle
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession

import zarr_manifests as zm
from zarr_manifests.errors import StorageError
from zarr_manifests.spark import read
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.testing.wrapped import Call, WrappedStorage

# Workers cannot import this module; what they need of it travels by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 40


def dataset(offset: float) -> xr.Dataset:
    return xr.Dataset({"a": ("x", np.arange(float(ROWS)) + offset)}, {"x": np.arange(ROWS)})


def upheaval(place: Path) -> None:
    """Overwrite and append, compact, expire all but the last snapshot, and collect the rest."""
    repo = zm.open(place)
    for offset in (1000.0, 2000.0):
        with repo.transaction(message="overwrite") as store:
            dataset(offset).to_zarr(store, mode="a", consolidated=False)
    with repo.transaction(message="append") as store:
        more = dataset(5000.0).assign_coords(x=np.arange(ROWS) + ROWS)
        more.to_zarr(store, append_dim="x", consolidated=False)
    repo.compact()
    repo.expire_snapshots(keep_last=1)
    repo.garbage_collect(timedelta(0))


class Disturbed(WrappedStorage):
    """The first reading of a chunk by a worker fails, after an upheaval."""

    def __init__(self, storage: LocalStorage, flag: Path) -> None:
        super().__init__(storage)
        self.flag = flag

    def _around(self, call: Call[Any]) -> Any:
        self._disturb(call)
        return super()._around(call)

    async def _around_async(self, call: Call[Any], run: Callable[[], Awaitable[Any]]) -> Any:
        self._disturb(call)
        return await super()._around_async(call, run)

    def _disturb(self, call: Call[Any]) -> None:
        if call.op == "get" and str(call.key).startswith("chunks/") and self.flag.exists():
            self.flag.unlink()
            upheaval(self.flag.with_name("repo"))
            raise StorageError("the first attempt fails")


def disturbed(tmp_path: Path) -> tuple[Disturbed, Path]:
    repo = zm.create(tmp_path / "repo", {"pack-chunk-bytes": 0, "inline-chunk-bytes": 0})
    with repo.transaction(message="write") as store:
        dataset(0.0).to_zarr(store, consolidated=False, encoding={"a": {"chunks": (10,)}})
    flag = tmp_path / "flag"
    return Disturbed(LocalStorage(tmp_path / "repo"), flag), flag


@pytest.mark.spark
def test_a_read_is_one_snapshot_under_retry(spark: SparkSession, tmp_path: Path) -> None:
    storage, flag = disturbed(tmp_path)
    frame = read(spark, storage, target_rows=10)
    flag.touch()
    first = sorted(tuple(row) for row in frame.collect())
    assert not flag.exists()
    assert first == [(x, float(x)) for x in range(ROWS)]
    assert sorted(tuple(row) for row in frame.where("x < 5").collect()) == first[:5]
    again = read(spark, storage)
    assert again.count() == 2 * ROWS
    assert again.agg({"a": "min"}).first()[0] == 2000.0  # type: ignore[index]


@pytest.mark.spark
def test_without_a_lease_the_snapshot_may_be_collected(spark: SparkSession, tmp_path: Path) -> None:
    storage, flag = disturbed(tmp_path)
    frame = read(spark, storage, target_rows=10, lease=None)
    flag.touch()
    with pytest.raises(PythonException, match="SnapshotExpiredError"):
        frame.collect()


@pytest.mark.spark
def test_no_query_changes_the_rows_of_another(spark: SparkSession, tmp_path: Path) -> None:
    zm.write(dataset(0.0), tmp_path / "repo", message="write", encoding={"a": {"chunks": 10}})

    def frame(where: str | None = None) -> DataFrame:
        return read(spark, tmp_path / "repo", where=where)

    def xs(found: DataFrame) -> list[int]:
        return sorted(row.x for row in found.collect())

    whole, few = frame(), frame("a >= 30 AND x < 35")
    assert xs(whole.where("a >= 30")) == list(range(30, 40))
    assert xs(whole) == list(range(40))
    assert xs(few) == list(range(30, 35))
    assert xs(few.unionAll(frame("a < 2"))) == [0, 1, *range(30, 35)]
    assert xs(whole.where("x < 3").unionAll(whole.where("x > 37"))) == [0, 1, 2, 38, 39]
    cached = few.cache()
    assert (cached.count(), cached.where("x = 31").count(), cached.count()) == (5, 1, 5)
    assert whole.join(few, "x").count() == few.alias("l").join(few.alias("r"), "x").count() == 5
    queries = ["x < 3", "a > 36.5", "a IN (7, 8)", "x BETWEEN 4 AND 6"] * 2
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda where: xs(frame(where)), queries))
    assert found == [[0, 1, 2], [37, 38, 39], [7, 8], [4, 5, 6]] * 2
