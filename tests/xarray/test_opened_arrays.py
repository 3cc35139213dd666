"""What the engine opens is read in bulk, and bundled for dask into whole stored chunks."""

from __future__ import annotations

import math
from typing import Any

import dask
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import CountingStorage
from zarr_manifests.xarray.opened_arrays import bundle

_CONFIG = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}


def written(storage: Any, **encoding: Any) -> xr.Dataset:
    values = np.arange(24 * 8 * 9, dtype="f4").reshape(24, 8, 9)
    ds = xr.Dataset({"t": (("time", "y", "x"), values)}, {"time": np.arange(24)})
    how = {"chunks": (1, 4, 3), "compressors": None, **encoding}
    zm.write(ds, storage, message="made", config=_CONFIG, encoding={"t": how})
    return ds


def opened(location: Any, **options: Any) -> xr.Dataset:
    return xr.open_dataset(location, engine="zarr_manifests", **options)


@given(st.data())
def test_bundles_are_boxes_of_whole_chunks_that_lie_beside_each_other(data: st.DataObject) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(1, 9), max_size=4)))
    shape = tuple(data.draw(st.integers(0, 50)) for _ in lengths)
    itemsize, most = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 5000))
    found = bundle(shape, lengths, itemsize, most)
    counts = [a // b for a, b in zip(found, lengths, strict=True)]
    assert found == tuple(n * b for n, b in zip(counts, lengths, strict=True))
    assert counts == [1] * len(lengths) or math.prod(found) * itemsize <= most
    grown = [axis for axis, n in enumerate(counts) if n > 1]
    for axis in range(min(grown, default=len(counts)) + 1, len(counts)):
        assert found[axis] >= shape[axis], "the axes behind are complete"


def test_arrays_are_read_in_bulk_unless_told_otherwise() -> None:
    storage = MemoryStorage()
    ds = written(storage)
    for tune in (True, False):
        repository = zm.open(storage)
        xr.testing.assert_identical(opened(repository, tune=tune).load(), ds)
        assert (repository.metrics().bulk_batches > 0) is tune


def test_a_task_computes_neighbours_and_each_chunk_is_read_once() -> None:
    counting = CountingStorage(MemoryStorage())
    ds = written(counting)
    lazy = opened(counting, chunks={}, task_bytes=8 * 9 * 4 * 5)
    assert lazy.t.chunks == ((5, 5, 5, 5, 4), (8,), (9,))
    counting.reset()
    with dask.config.set(scheduler="synchronous"):
        np.testing.assert_array_equal(lazy.t.mean("time"), ds.t.mean("time"))
    assert sum(record.key.startswith("chunks/") for record in counting.log) == 24 * 6
    assert opened(counting, chunks={}).t.chunks == ((24,), (8,), (9,))
    assert opened(counting, chunks={}, task_bytes=0).t.chunks == ((1,) * 24, (4, 4), (3, 3, 3))
    assert opened(counting, chunks={}, task_bytes=150).t.chunks == ((1,) * 24, (4, 4), (9,))


def test_shards_are_bundled_whole() -> None:
    storage = MemoryStorage()
    ds = written(storage, shards=(6, 8, 9))
    lazy = opened(storage, chunks={}, task_bytes=6 * 8 * 9 * 4 * 2)
    assert lazy.t.chunks == ((12, 12), (8,), (9,))
    np.testing.assert_array_equal(lazy.t, ds.t)


def test_chunks_of_the_caller_are_compared_with_what_is_stored() -> None:
    storage = MemoryStorage()
    written(storage)
    assert opened(storage, chunks={"time": 2}).t.chunks == ((2,) * 12, (8,), (9,))
    with pytest.warns(UserWarning, match="separate the stored chunks"):
        opened(storage, chunks={"y": 3})


@pytest.mark.parametrize("how", ["write", "to_zarr"])
def test_what_is_bundled_is_written_back_by_region(how: str) -> None:
    repository = zm.create(storage := MemoryStorage(), _CONFIG)
    ds = written(storage)
    lazy = opened(storage, chunks={}, task_bytes=8 * 9 * 4 * 5)[["t"]]
    part = (lazy + 1).isel(time=slice(0, 10))
    region: dict[str, Any] = {"time": slice(0, 10)}
    if how == "write":
        zm.write(part.drop_vars("time"), storage, message="more", region=region)
    else:
        with repository.transaction(message="more") as store:
            part.drop_vars("time").to_zarr(store, region=region, consolidated=False)
    due = ds.t.values.copy()
    due[:10] += 1
    np.testing.assert_array_equal(opened(storage).t, due)


def test_groups_are_opened_like_the_root() -> None:
    storage = MemoryStorage()
    ds = written(storage)
    zm.write(ds, storage, message="below", group="a/b")
    repository = zm.open(storage)
    for group in (None, "a"):
        before = repository.metrics().bulk_batches
        tree = xr.open_datatree(repository, engine="zarr_manifests", group=group, chunks={})
        found = tree["a/b" if group is None else "b"].to_dataset()
        np.testing.assert_array_equal(found.t, ds.t)
        assert repository.metrics().bulk_batches > before


def test_what_is_no_number_of_bytes_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="task_bytes is a number of bytes, not '1 MB'"):
        opened(MemoryStorage(), task_bytes="1 MB")
