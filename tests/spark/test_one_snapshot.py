"""One read is one snapshot, and no read changes another, whatever happens in between."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import zarr_manifests as zm
from storages.wrapped import Call, WrappedStorage
from zarr_manifests.errors import StorageError
from zarr_manifests.spark import read
from zarr_manifests.storage.local import LocalStorage

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
