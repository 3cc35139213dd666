"""Statistics of chunks that are there already: measured once, right whatever happens meanwhile."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from hearing import Hearing
from in_order import in_order
from storages import CountingStorage
from zarr_manifests import Repository
from zarr_manifests.errors import FencedError
from zarr_manifests.storage.memory import MemoryStorage
from zoned import counting, created, numbers, write


def wrote(repository: Repository, first: int, last: int, seed: float, **how: Any) -> None:
    session = repository.writable_session()
    write(session, first, last, seed, record=False, **how)
    session.commit("write")


def test_values_of_all_kinds_are_measured_as_zarr_reads_them() -> None:
    repository = zm.create(MemoryStorage(), runtime=in_order())
    rng = np.random.default_rng(1)
    values: dict[str, np.ndarray] = {
        "i2": rng.integers(-(2**15), 2**15, (7, 5)).astype("i2"),
        "u8": rng.integers(0, 2**63, (7, 5)).astype("u8"),
        "f4": rng.normal(0, 1e3, (7, 5)).astype("f4"),
        "b1": rng.random((7, 5)) < 0.5,
        "S5": rng.choice(np.array([b"a", b"zz", b"hello"]), (7, 5)),
    }
    with repository.transaction(message="fill") as store:
        for name, data in values.items():
            made = 2 if name == "S5" else 3  # format 3 lacks it
            zarr.create_array(store, name=name, data=data, chunks=(3, 2), zarr_format=made)
        shards = {"chunks": (1, 2), "shards": (4, 4)}
        zarr.create_array(store, name="sharded", data=values["f4"], **shards)
        zarr.create_array(store, name="scalar", data=np.float64(3.5))
        zarr.create_array(store, name="text", shape=(2,), dtype=str, chunks=(1,))[:] = "a"
    repository.compact(mode="full")
    report = repository.compute_statistics()
    assert [one.path for one in report.arrays if not one.complete] == ["/S5", "/text"]
    for one in report.arrays:
        if one.complete:
            found = counting(repository, one.path.strip("/"))
            assert len(found) == one.chunks > 0, one


def in_tasks(call: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Runs tasks as in other processes: everything is pickled on the way."""
    for item in items:
        done = pickle.loads(pickle.dumps(call))(pickle.loads(pickle.dumps(item)))
        yield pickle.loads(pickle.dumps(done))


def test_tasks_measure_the_same(tmp_path: Path) -> None:
    config = {"chunk-manifests": {"sets": [{"default": {"max-manifest-size": 8}}]}}
    repository = zm.create(tmp_path / "repo", config)
    values = np.random.default_rng(2).normal(size=(40, 6)).astype("f4")
    with repository.transaction(message="fill") as store:
        zarr.create_array(store, name="a", data=values, chunks=(1, 3))
    repository.compact(mode="full")  # 80 chunks in ten leaves
    with repository.transaction(message="some of it again") as store:
        zarr.open_array(store, path="a")[5:7] = 50.0
    shutil.copytree(tmp_path / "repo", tmp_path / "same")
    same = zm.open(tmp_path / "same")
    heard = Hearing()
    with zm.show_progress(heard):
        report = repository.compute_statistics(run=in_tasks)
    assert report == same.compute_statistics()
    assert report.measured == heard.done["measuring"] == 80
    found = counting(repository, "a")
    assert found == counting(same, "a")
    assert found[5, 0] == pytest.approx((50, 50), abs=0.01)
    assert repository.compute_statistics(run=in_tasks).measured == 0
    assert repository.verify().ok


def test_chunks_that_are_never_measured_leave_everything_as_it_is(tmp_path: Path) -> None:
    """What is known of the other chunks is not written again and again."""
    file = tmp_path / "chunk"
    file.write_bytes(bytes(16))
    created(storage := CountingStorage(MemoryStorage()))
    repository = zm.open(storage, virtual_containers={"files": tmp_path})
    wrote(repository, 0, 7, 1)
    with repository.transaction(message="a file that nothing is known of") as store:
        store.set_virtual_refs("a", [[7]], [file.as_uri()], [0], [0], [16])
    repository.compact(mode="full")
    assert repository.compute_statistics().measured == 7
    storage.reset()
    assert repository.compute_statistics().measured == 0
    assert {record.op for record in storage.log}.isdisjoint({"create", "put", "cas"})
    assert numbers(counting(repository)) == [*range(7)]


# --- beside others ---------------------------------------------------------------------------


def test_a_collection_meanwhile_shuts_it_out() -> None:
    repository = created()
    wrote(repository, 0, 8, 1)
    other = zm.open(repository.storage, runtime=in_order())
    wrote(other, 0, 1, 2)

    def meanwhile(_stage: str, _done: int) -> None:
        wrote(other, 0, 1, 3)
        other.garbage_collect(timedelta(0))

    with zm.show_progress(meanwhile), pytest.raises(FencedError, match="again"):
        repository.compute_statistics()
    assert counting(repository) == {}
    assert repository.compute_statistics().measured == 8
    assert numbers(counting(repository)) == [*range(8)]


def test_stale_entries_never_count_again() -> None:
    """The same length and place in another object, and the same inline chunk elsewhere."""
    for inline in (0, 100):
        repository = created(**{"inline-chunk-bytes": inline, "pack-chunk-bytes": 0})
        wrote(repository, 0, 8, 1)
        repository.compute_statistics()
        session = repository.writable_session()
        chunks = {i: session.store.get_sync(f"a/c/{i}") for i in range(8)}
        for i, data in chunks.items():
            assert data is not None
            session.store.set_sync(f"a/c/{7 - i}", data)
        session.commit("the other way round")
        assert counting(repository) == {}
        repository.compact(mode="full")
        assert counting(repository) == {}
