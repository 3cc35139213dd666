"""Statistics of chunks that are there already: measured once, right whatever happens meanwhile."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import context_of, root_of
from zarr_manifests import Repository
from zarr_manifests.engine.compact import compute_statistics as module
from zarr_manifests.engine.snapshot.index_directory import index_directory
from zarr_manifests.error_cases import FencedError
from zarr_manifests.errors import NotFoundError
from zarr_manifests.format.root import ZONE_MAPS
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage, in_order
from zoned import CHUNK, counting, created, grow, make, numbers, pages_of, write


def wrote(repository: Repository, first: int, last: int, seed: float, **how: Any) -> None:
    session = repository.writable_session()
    write(session, first, last, seed, record=False, **how)
    session.commit("write")


def test_chunks_of_leaves_and_deltas_are_measured_once() -> None:
    repository = created()
    wrote(repository, 0, 4, 1)
    repository.compact(mode="full")
    wrote(repository, 3, 6, 2)
    assert counting(repository) == {}
    assert ZONE_MAPS not in root_of(repository).features
    (array,) = repository.compute_statistics().arrays
    assert (array.path, array.chunks, array.known, array.measured) == ("/a", 6, 0, 6)
    assert array.complete
    assert numbers(counting(repository)) == [*range(6)]
    assert ZONE_MAPS in root_of(repository).features
    (again,) = repository.compute_statistics().arrays
    assert (again.known, again.measured) == (6, 0)
    assert repository.verify().problems == ()
    repository.garbage_collect(timedelta(0))
    assert numbers(counting(repository)) == [*range(6)]


def test_only_chunks_without_entries_are_read() -> None:
    storage = CountingStorage(MemoryStorage())
    repository = created(storage, **{"pack-chunk-bytes": 0})
    wrote(repository, 0, 8, 1)
    repository.compute_statistics()
    wrote(repository, 2, 4, 2)
    storage.reset()
    report = repository.compute_statistics()
    assert report.measured == 2
    assert sum(one.key.startswith("chunks/") for one in storage.log) == 2
    repository.compact(mode="full")
    storage.reset()
    assert repository.compute_statistics().measured == 0
    assert not [one for one in storage.log if one.key.startswith("chunks/")]
    assert numbers(counting(repository)) == [*range(8)]


def test_entries_made_while_writing_are_used_and_kept() -> None:
    repository = created()
    session = repository.writable_session()
    write(session, 0, 3, 1)
    session.commit("with entries")
    wrote(repository, 3, 6, 2)
    (array,) = repository.compute_statistics().arrays
    assert (array.known, array.measured) == (3, 3)
    assert numbers(counting(repository)) == [*range(6)]
    repository.compact(mode="full")
    assert numbers(counting(repository)) == [*range(6)]
    assert repository.compute_statistics().measured == 0


@pytest.mark.parametrize("compact", [False, True])
def test_values_of_all_kinds_are_measured_as_zarr_reads_them(compact: bool) -> None:
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
    if compact:
        repository.compact(mode="full")
    report = repository.compute_statistics()
    for one in report.arrays:
        assert one.complete != bool(one.skipped), one
        if one.skipped:
            continue
        found = counting(repository, one.path.strip("/"))
        assert len(found) == one.chunks > 0, one
    assert [one.path for one in report.arrays if one.skipped] == ["/text"]


def test_padding_is_in_the_bounds_and_not_in_the_counts() -> None:
    repository = created(chunks=2)
    wrote(repository, 0, 2, 1)
    session = repository.writable_session()
    zarr.open_array(session.store, path="a").resize((CHUNK + 1,))
    session.commit("shorter")
    assert repository.compute_statistics().measured == 2
    session = repository.writable_session()
    zarr.open_array(session.store, path="a").resize((2 * CHUNK,))
    session.commit("as long as before")
    assert counting(repository)[1,] == (1004, 1007)


def test_arrays_can_be_chosen_and_unknown_ones_are_errors() -> None:
    repository = created()
    session = repository.writable_session()
    make(session, "b")
    write(session, 0, 2, 1, "b", record=False)
    write(session, 0, 2, 1, "a", record=False)
    session.commit("both")
    heard: list[tuple[str, int]] = []
    report = repository.compute_statistics(["b"], progress=lambda *said: heard.append(said))
    assert [one.path for one in report.arrays] == ["/b"]
    assert heard == [("measuring", 2)]
    assert counting(repository) == {}
    with pytest.raises(NotFoundError):
        repository.compute_statistics(["c"])
    with pytest.raises(NotFoundError):
        repository.compute_statistics(branch="c")


def in_tasks(call: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Runs tasks as in other processes: everything is pickled on the way."""
    for item in items:
        done = pickle.loads(pickle.dumps(call))(pickle.loads(pickle.dumps(item)))
        yield pickle.loads(pickle.dumps(done))


@pytest.mark.parametrize("compact", [False, True])
def test_tasks_measure_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compact: bool
) -> None:
    config = {"chunk-manifests": {"sets": [{"default": {"max-manifest-size": 8}}]}}
    repository = zm.create(tmp_path / "repo", config)
    values = np.random.default_rng(2).normal(size=(40, 6)).astype("f4")
    with repository.transaction(message="fill") as store:
        zarr.create_array(store, name="a", data=values, chunks=(1, 3))
        zarr.create_array(store, name="b", data=values[:2], chunks=(1, 3))
    if compact:
        repository.compact(mode="full")  # 80 chunks in ten leaves
    wrote = zarr.open_array((session := repository.writable_session()).store, path="a")
    wrote[5:7] = 50.0
    session.commit("some of it again")
    shutil.copytree(tmp_path / "repo", tmp_path / "same")
    same = zm.open(tmp_path / "same")
    monkeypatch.setattr(module, "_TASK_BYTES", 7 * 12)
    monkeypatch.setattr(module, "_GATHERED", 20)
    tasks: list[int] = []

    def run(call: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        tasks.extend(len(table) for _, table in items)
        return in_tasks(call, items)

    heard: list[tuple[str, int]] = []
    report = repository.compute_statistics(run=run, progress=lambda *told: heard.append(told))
    assert report == same.compute_statistics()
    assert (report.measured, sum(tasks)) == (84, 80)  # four are too few for tasks
    assert 1 < max(tasks) <= 7
    assert heard[-1] == ("measuring", 84)
    for path in ("a", "b"):
        assert counting(repository, path) == counting(same, path)
    assert counting(repository, "a")[5, 0] == pytest.approx((50, 50), abs=0.01)
    assert repository.compute_statistics(run=run).measured == 0
    assert repository.verify().ok


def test_threads_measure_many_chunks(tmp_path: Path) -> None:
    repository = zm.create(tmp_path / "repo", {"compaction": {"mode": "manual"}})
    rng = np.random.default_rng(2)
    with repository.transaction(message="fill") as store:
        data = rng.normal(size=(300, 64, 64)).astype("f4")
        zarr.create_array(store, name="a", data=data, chunks=(1, 64, 64))
    assert repository.compute_statistics().measured == 300
    assert len(counting(repository)) == 300


# --- beside others ---------------------------------------------------------------------------


def overwrite(repository: Repository) -> None:
    wrote(repository, 2, 6, 5)


def compact(repository: Repository) -> None:
    repository.compact(mode="full")


def reset(repository: Repository) -> None:
    first = [info.snapshot_id for info in repository.ancestry()][1]
    repository.reset_branch("main", first, force=True)


def replace_array(repository: Repository) -> None:
    session = repository.writable_session()
    del zarr.open_group(session.store)["a"]
    make(session)
    write(session, 0, 8, 7, record=False)
    session.commit("another array")


def expire(repository: Repository) -> None:
    wrote(repository, 0, 8, 6)
    repository.expire_snapshots(keep_last=1)


def append(repository: Repository) -> None:
    session = repository.writable_session()
    at = grow(session, 2)
    write(session, at, at + 2, 4)
    session.commit("append")


def measure_too(repository: Repository) -> None:
    wrote(repository, 0, 2, 8)
    repository.compute_statistics()


FAULTS: dict[str, Callable[[Repository], None]] = {
    "overwritten": overwrite,
    "compacted": compact,
    "overwritten, then compacted": lambda repository: (overwrite(repository), compact(repository)),
    "reset": reset,
    "replaced": replace_array,
    "expired": expire,
    "appended": append,
    "measured by another": measure_too,
}


@pytest.mark.parametrize("base", [False, True], ids=["deltas", "leaves"])
@pytest.mark.parametrize("what", FAULTS)
def test_what_happens_meanwhile_makes_no_entry_wrong(what: str, base: bool) -> None:
    repository = created()
    wrote(repository, 0, 8, 1)
    if base:
        repository.compact(mode="full")
    wrote(repository, 3, 5, 3)
    other = zm.open(repository.storage, runtime=in_order())
    once = [FAULTS[what]]

    def meanwhile(_stage: str, _done: int) -> None:
        if once:
            once.pop()(other)

    repository.compute_statistics(progress=meanwhile)
    assert not once
    found = counting(repository)
    if what in ("compacted", "appended", "measured by another"):
        assert {*range(8)} <= {*numbers(found)}
    for _ in range(2):
        repository.compute_statistics()
        assert repository.verify().problems == ()
        assert len(counting(repository)) == repository.compute_statistics().chunks
        repository.compact(mode="full")
        repository.garbage_collect(timedelta(0))


def test_pages_that_another_makes_meanwhile_are_kept() -> None:
    """Those of the leaf that a compaction has made are not those that were replaced."""
    repository = created()
    wrote(repository, 0, 8, 1)
    repository.compact(mode="full")
    other = zm.open(repository.storage, runtime=in_order())

    def meanwhile(_stage: str, _done: int) -> None:
        wrote(other, 0, 2, 2)
        other.compact(mode="full")
        other.compute_statistics()

    repository.compute_statistics(progress=meanwhile)
    view = contents_of(repository.readonly_session().store).view
    (manifest,) = view.manifests
    listed = pages_of(repository)
    assert listed is not None
    leaf = manifest.blob.key, manifest.blob.crc32c
    assert [page.count for page in listed.pages if page.leaf == leaf and page.complete] == [8]


def test_two_that_measure_the_same_leaf_leave_one_page_of_it() -> None:
    repository = created()
    wrote(repository, 0, 8, 1)
    repository.compact(mode="full")
    other = zm.open(repository.storage, runtime=in_order())
    repository.compute_statistics(progress=lambda *_: other.compute_statistics() and None)
    listed = pages_of(repository)
    assert listed is not None
    assert [(page.count, page.complete) for page in listed.pages] == [(8, True)]


def test_deleted_arrays_lose_their_pages() -> None:
    repository = created()
    wrote(repository, 0, 8, 1)
    repository.compute_statistics()
    session = repository.writable_session()
    del zarr.open_group(session.store)["a"]
    make(session, "b")
    write(session, 0, 4, 2, "b", record=False)
    session.commit("another array")
    repository.compute_statistics()
    tip = root_of(repository).branches["main"]
    (node_id,) = index_directory(context_of(repository), tip.index).zones
    assert node_id == contents_of(repository.readonly_session().store).array_at("b").node_id


def test_a_collection_meanwhile_shuts_it_out() -> None:
    repository = created()
    wrote(repository, 0, 8, 1)
    other = zm.open(repository.storage, runtime=in_order())
    wrote(other, 0, 1, 2)
    before = root_of(repository).branches["main"].index

    def meanwhile(_stage: str, _done: int) -> None:
        wrote(other, 0, 1, 3)
        other.garbage_collect(timedelta(0))

    with pytest.raises(FencedError, match="compute them again"):
        repository.compute_statistics(progress=meanwhile)
    assert root_of(repository).branches["main"].index == before
    assert repository.compute_statistics().measured == 8
    assert numbers(counting(repository)) == [*range(8)]


def test_stale_entries_never_count_again() -> None:
    """The same length and place in another object, and the same inline chunk elsewhere."""
    for inline in (0, 100):
        repository = created(**{"inline-chunk-bytes": inline, "pack-chunk-bytes": 0})
        wrote(repository, 0, 8, 1)
        repository.compute_statistics()
        session = repository.writable_session()
        workspace = workspace_of(session.store)
        chunks = {i: session.store.get_sync(f"a/c/{i}") for i in range(8)}
        for i, data in chunks.items():
            assert data is not None
            workspace.set(f"a/c/{7 - i}", data.to_bytes())
        session.commit("the other way round")
        assert counting(repository) == {}
        repository.compact(mode="full")
        assert counting(repository) == {}


def test_two_at_once_leave_all_entries() -> None:
    storage = MemoryStorage()
    repository = created(storage)
    wrote(repository, 0, 8, 1)
    threads = [threading.Thread(target=zm.open(storage).compute_statistics) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(counting(zm.open(storage))) == [*range(8)]
