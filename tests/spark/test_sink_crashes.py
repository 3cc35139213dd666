"""The commit of a batch, without Spark: it lands once, whatever others commit."""

from __future__ import annotations

import pickle
from datetime import timedelta
from itertools import count

import pyarrow as pa
import pytest
import xarray as xr

import zarr_manifests as zm
from grids import DIMS, found, hours, made
from overtaken import OvertakenStorage
from zarr_manifests import Repository
from zarr_manifests.errors import FencedError, TransactionGapError
from zarr_manifests.spark.data_source import Sink, Spooled
from zarr_manifests.spark.dataframes import WriteOptions, batch_txn
from zarr_manifests.storage import Storage, from_url

_names = count()


def batch(start: int, stop: int) -> pa.RecordBatch:
    frame = hours(stop, start).to_dataframe().reset_index().sample(frac=1, random_state=1)
    frame["time"] = frame["time"].dt.tz_localize("UTC").astype("datetime64[us, UTC]")
    return pa.RecordBatch.from_pandas(frame[["time", "lat", "lon", "u", "v"]], preserve_index=False)


def sink_to(storage: Storage) -> Sink:
    options = WriteOptions(target="/", dims=DIMS, append_dim="time", missing="keep", max_tasks=1)
    return Sink(repository=zm.open(storage), columns=batch(0, 1).schema, options=options)


def spooled(sink: Sink, start: int, stop: int) -> list[Spooled]:
    """As two tasks leave them."""
    rows = batch(start, stop)
    half = rows.num_rows // 2
    parts = [sink.write(iter([rows.slice(0, half)])), sink.write(iter([rows.slice(half)]))]
    return list(pickle.loads(pickle.dumps(parts)))


def world() -> tuple[Repository, Storage]:
    storage = from_url(f"memory://sink-crashes-{next(_names)}")
    return made(storage), storage


def test_a_batch_that_leaves_a_gap_is_refused() -> None:
    repo, storage = world()
    sink = sink_to(storage)
    with pytest.raises(TransactionGapError):
        sink.land(spooled(sink, 4, 6), batch_txn("query", None, 3))
    xr.testing.assert_equal(found(repo), hours(4))


def test_another_commit_in_between_is_kept() -> None:
    """The rows are planned anew behind it, or a cell that both wrote is the later one's."""
    repo, storage = world()
    other = sink_to(storage)
    rows, others = spooled(other, 6, 9), spooled(other, 4, 7)
    first = OvertakenStorage(storage, lambda: other.land(others, batch_txn("other", None, 0)))
    sink_to(first).land(rows, batch_txn("query", None, 0))
    assert repo.txn_versions() == {"other": 0, "query": 0}
    xr.testing.assert_equal(found(repo), hours(9))


def test_a_batch_that_comes_twice_at_once_lands_once() -> None:
    repo, storage = world()
    other = sink_to(storage)
    rows, again = spooled(other, 4, 9), spooled(other, 4, 9)
    first = OvertakenStorage(storage, lambda: other.land(again, batch_txn("query", None, 0)))
    sink_to(first).land(rows, batch_txn("query", None, 0))
    assert repo.txn_versions() == {"query": 0}
    assert [info.message for info in repo.ancestry()].count("first hours") == 1
    xr.testing.assert_equal(found(repo), hours(9))


def test_rows_that_a_collection_has_removed_are_an_error_and_no_holes() -> None:
    """A collection whose grace is shorter than the write."""
    repo, storage = world()
    sink = sink_to(storage)
    rows = spooled(sink, 4, 40)
    repo.garbage_collect(timedelta(0))
    with pytest.raises(FencedError, match="did not commit in time"):
        sink.land(rows, None)
    xr.testing.assert_equal(found(repo), hours(4))
    sink.land(spooled(sink, 4, 40), None)
    xr.testing.assert_equal(found(repo), hours(40))
