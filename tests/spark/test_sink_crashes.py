"""The commit of a batch, without Spark: it lands once, wherever the process that commits dies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count

import pyarrow as pa
import pytest
import xarray as xr

from grids import DIMS, found, hours, made
from on_cluster.after import landed
from zarr_manifests import Repository
from zarr_manifests.errors import ConflictError, TransactionGapError
from zarr_manifests.spark.data_sink import Sink, batch_txn
from zarr_manifests.spark.spool import SpooledRows
from zarr_manifests.spark.write_plan import WriteOptions
from zarr_manifests.storage import Storage, from_url
from zarr_manifests.testing import SimulatedCrash
from zarr_manifests.testing.wrapped import Call, WrappedStorage

_names = count()


class Dying(WrappedStorage):
    """A storage whose process dies at a call; its copies are in the same process."""

    calls = 0
    at = 0

    @classmethod
    def set(cls, number: int) -> None:
        """Die at that call from now on; 0 is never."""
        cls.calls, cls.at = 0, number

    def _count(self) -> None:
        Dying.calls += 1
        if 0 < Dying.at <= Dying.calls:
            raise SimulatedCrash

    def _around[R](self, call: Call[R]) -> R:
        self._count()
        return call.run()

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        self._count()
        return await run()


def batch(start: int, stop: int) -> pa.RecordBatch:
    frame = hours(stop, start).to_dataframe().reset_index().sample(frac=1, random_state=1)
    frame["time"] = frame["time"].dt.tz_localize("UTC").astype("datetime64[us, UTC]")
    return pa.RecordBatch.from_pandas(frame[["time", "lat", "lon", "u", "v"]], preserve_index=False)


def sink_to(storage: Storage) -> Sink:
    return Sink(
        storage=storage,
        containers=None,
        branch="main",
        columns=batch(0, 1).schema,
        options=WriteOptions(target="/", dims=DIMS, append_dim="time", missing="keep", max_tasks=1),
    )


def spooled(sink: Sink, start: int, stop: int) -> list[SpooledRows]:
    """As two tasks leave them."""
    rows = batch(start, stop)
    half = rows.num_rows // 2
    return [sink.spool([rows.slice(0, half)]), sink.spool([rows.slice(half)])]


def world() -> tuple[Repository, Storage]:
    storage = from_url(f"memory://sink-crashes-{next(_names)}")
    return made(storage), storage


@pytest.mark.sweep
def test_a_batch_lands_once_wherever_its_commit_dies() -> None:
    """Another process tries again, and a third one after that, as with a lost log."""
    _, storage = world()
    sink = sink_to(Dying(storage))
    rows = spooled(sink, 4, 9)
    Dying.set(0)
    sink.commit(rows, batch_txn("query", 0))
    calls = Dying.calls
    assert calls > 10
    outcomes = set()
    for number in range(1, calls + 1):
        repo, storage = world()
        sink, dying = sink_to(storage), sink_to(Dying(storage))
        rows = spooled(sink, 4, 9)
        Dying.set(number)
        with pytest.raises(SimulatedCrash):
            dying.commit(rows, batch_txn("query", 0))
        outcomes.add(repo.txn_versions().get("query"))
        Dying.set(0)
        repo.expire_snapshots(keep_last=1)
        for _ in range(2):
            sink.commit(spooled(sink, 4, 9), batch_txn("query", 0))
        sink.commit(spooled(sink, 9, 11), batch_txn("query", 1))
        assert repo.txn_versions() == {"query": 1}
        history = [info.message for info in repo.ancestry()]
        assert history.count("append rows to /") == 2
        xr.testing.assert_equal(found(repo), hours(11))
        landed(storage.url, "")
    assert outcomes == {None, 0}, "it dies before the swap and after it"


def test_a_batch_that_leaves_a_gap_is_refused() -> None:
    repo, storage = world()
    sink = sink_to(storage)
    with pytest.raises(TransactionGapError):
        sink.commit(spooled(sink, 4, 6), batch_txn("query", 3))
    xr.testing.assert_equal(found(repo), hours(4))


def test_another_commit_in_between_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are planned anew behind it, or a cell that both wrote is the later one's."""
    repo, storage = world()
    sink = sink_to(storage)
    rows, others = spooled(sink, 6, 9), spooled(sink, 4, 7)
    write = Sink._write
    tries = []

    def slow(self: Sink, *given: object) -> object:
        written = write(self, *given)  # type: ignore[arg-type]
        if not tries:
            tries.append(1)
            monkeypatch.setattr(Sink, "_write", write)
            sink.commit(others, batch_txn("other", 0))
        return written

    monkeypatch.setattr(Sink, "_write", slow)
    try:
        sink.commit(rows, batch_txn("query", 0))
    except ConflictError:
        pytest.fail("it was not planned again")
    assert repo.txn_versions() == {"other": 0, "query": 0}
    xr.testing.assert_equal(found(repo), hours(9))
