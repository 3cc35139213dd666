"""Exactly-once commits: the marks of applications, and everything they survive."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from in_order import in_order
from storages import Fault, FaultyStorage
from stored import overtaking
from zarr_manifests import Repository, Session
from zarr_manifests.errors import (
    ConflictError,
    InvalidArgumentError,
    StorageError,
    TransactionAlreadyCommitted,
    TransactionGapError,
)
from zarr_manifests.storage.memory import MemoryStorage

CONFIG = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 0}


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    repository = zm.create(storage, CONFIG, runtime=in_order())
    with repository.transaction(message="make") as store:
        zarr.create_array(store, name="a", shape=(64,), chunks=(1,), dtype="i8")
    return storage


@pytest.fixture
def repository(storage: MemoryStorage) -> Repository:
    return opened(storage)


def opened(storage: MemoryStorage) -> Repository:
    return zm.open(storage, runtime=in_order())


def wrote(repository: Repository, at: int, value: int = 1, **options: Any) -> Session:
    """A session that has written one chunk."""
    session = repository.writable_session(**options)
    zarr.open_array(session.store, path="a")[at] = value
    return session


def batch(repository: Repository, version: int, app: str = "app", branch: str = "main") -> str:
    session = wrote(repository, version % 64, version + 1, branch=branch)
    return session.commit(f"batch {version}", txn=(app, version))


def messages(repository: Repository, branch: str = "main") -> list[str]:
    return [info.message for info in repository.ancestry(branch)]


def test_a_batch_is_committed_once(repository: Repository) -> None:
    snapshot_id = batch(repository, 17)
    session = wrote(repository, 5, 99)
    with pytest.raises(TransactionAlreadyCommitted) as told:
        session.commit("batch 17 again", txn=("app", 17))
    error = told.value
    assert (error.app, error.version, error.last) == ("app", 17, 17)
    assert error.snapshot_id == snapshot_id
    assert "nothing was committed" in str(error).lower()
    assert messages(repository) == ["batch 17", "make", "create repository"]
    assert repository.txn_versions() == {"app": 17}


def test_an_empty_batch_is_a_batch(repository: Repository) -> None:
    before = repository.list_branches()["main"]
    session = repository.writable_session()
    snapshot_id = session.commit("empty", txn=("app", 1))
    assert repository.list_branches()["main"] == snapshot_id
    assert session.commit("empty, too", txn=("app", 2)) != snapshot_id
    with pytest.raises(InvalidArgumentError, match="nothing to commit"):
        session.commit("empty, without a transaction")
    assert list(repository.changes(before)) == []
    assert repository.txn_versions() == {"app": 2}
    for mode in ("minor", "full"):
        repository.compact(mode=mode)
        assert repository.verify().problems == ()
    assert repository.txn_versions() == {"app": 2}


def test_write_is_done_once_and_leaves_a_mark_even_if_nothing_changes() -> None:
    place = MemoryStorage()
    ds = xr.Dataset({"t": ("time", [1.0, 2.0])}, {"time": [0, 1]})
    first = zm.write(ds, place, message="create", txn=("app", 0))
    with pytest.raises(TransactionAlreadyCommitted) as told:
        zm.write(ds, place, message="create", txn=("app", 0))
    assert told.value.snapshot_id == first
    how: dict[str, Any] = {"append_dim": "time", "on_existing": "skip"}
    more = ds.assign_coords(time=[2, 3])
    second = zm.write(more, place, message="append", txn=zm.Txn("app", 1, after=0), **how)
    third = zm.write(more, place, message="nothing new", txn=("app", 2), **how)
    assert third != second
    assert zm.open(place).txn_versions() == {"app": 2}
    assert xr.open_dataset(place, engine="zarr_manifests").sizes["time"] == 4
    with pytest.raises(TransactionGapError):
        zm.write(more, place, message="a gap", txn=zm.Txn("app", 9, after=7), **how)


@pytest.mark.parametrize(
    "txn", [("", 1), ("x" * 256, 1), ("app", -1), ("app", 2**63), ("app", True), "ab"]
)
def test_what_is_no_transaction_is_refused(txn: Any, repository: Repository) -> None:
    session = wrote(repository, 1)
    with pytest.raises(InvalidArgumentError):
        session.commit("odd", txn=txn)
    session.commit("the session goes on")


def test_a_gap_is_an_error_and_the_session_goes_on(repository: Repository) -> None:
    batch(repository, 1)
    session = wrote(repository, 9)
    with pytest.raises(TransactionGapError, match=r"after 3.* new checkpoint and txn_app_id"):
        session.commit("a gap", txn=zm.Txn("app", 4, after=3))
    with pytest.raises(InvalidArgumentError):  # a version comes after a lower one
        zm.Txn("app", 5, after=5)
    session.commit("no gap", txn=zm.Txn("app", 4, after=1))
    with pytest.raises(TransactionGapError):
        wrote(repository, 1).commit("first", txn=zm.Txn("app", 5, after=-1))
    wrote(repository, 1).commit("first", txn=zm.Txn("new", 5, after=-1))
    with pytest.raises(TransactionAlreadyCommitted):  # and no gap
        wrote(repository, 1).commit("again", txn=zm.Txn("app", 3, after=2))


def test_a_replay_is_told_so_only_once_the_commit_is_durable(storage: MemoryStorage) -> None:
    """Or the stream would go on, and a crash could take back what it relies on."""
    batch(opened(storage), 1)
    unsynced = Fault("fail_before", op="sync", key="current", count=None)
    with pytest.raises(StorageError):
        batch(zm.open(FaultyStorage(storage, [unsynced]), runtime=in_order()), 1)


def test_marks_survive_the_log_expiry_and_compaction(
    storage: MemoryStorage, repository: Repository
) -> None:
    batch(repository, 1)
    for i in range(40):  # the root's log has 32 entries
        wrote(repository, i).commit(f"another {i}")
    repository.compact(mode="full")
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(timedelta(0))
    assert repository.txn_versions() == {"app": 1}
    with pytest.raises(TransactionAlreadyCommitted) as told:
        batch(opened(storage), 1)
    assert told.value.snapshot_id is None  # it has expired
    assert repository.verify().problems == ()


def test_a_picked_transaction_is_one_on_the_other_branch_too(repository: Repository) -> None:
    repository.create_branch("side")
    batch(repository, 1)
    second = batch(repository, 2)
    with pytest.raises(ConflictError, match="'app'") as told:
        repository.cherry_pick(second, "side")
    assert {str(conflict.kind) for conflict in told.value.conflicts} == {"txn"}
    first = [info.snapshot_id for info in repository.ancestry()][1]
    repository.cherry_pick(first, "side")
    repository.cherry_pick(second, "side")
    assert repository.txn_versions("side") == {"app": 2}
    with pytest.raises(TransactionAlreadyCommitted):
        batch(repository, 2, branch="side")


def test_marks_are_dropped_from_a_picked_commit_if_asked(repository: Repository) -> None:
    repository.create_branch("side")
    batch(repository, 1)
    repository.cherry_pick(batch(repository, 2), "side", txn="drop")
    assert repository.txn_versions("side") == {}
    empty = repository.writable_session().commit("empty", txn=("other", 1))
    with pytest.raises(InvalidArgumentError, match="nothing to do"):
        repository.cherry_pick(empty, "side", txn="drop")
    repository.cherry_pick(empty, "side")
    assert repository.txn_versions("side") == {"other": 1}


def forget(repository: Repository, app: str, version: int) -> str:
    return repository.writable_session().commit("forget", txn=zm.Txn(app, None, after=version))


def test_a_mark_is_forgotten_only_if_it_is_the_expected_one(storage: MemoryStorage) -> None:
    repository = opened(storage)
    batch(repository, 17)
    before = repository.list_branches()["main"]
    for expected in (16, 18):
        with pytest.raises(ConflictError, match="17"):
            forget(repository, "app", expected)
    with pytest.raises(ConflictError):
        forget(repository, "other", 0)
    late = zm.open(storage, runtime=overtaking(lambda: batch(opened(storage), 18)))
    with pytest.raises(ConflictError, match="18"):
        forget(late, "app", 17)
    snapshot_id = forget(repository, "app", 18)
    assert repository.txn_versions() == {}
    assert repository.list_branches()["main"] == snapshot_id
    batch(repository, 3)
    repository.reset_branch("main", before, force=True)
    assert repository.txn_versions() == {"app": 17}
    assert repository.verify().problems == ()


def test_marks_of_many_applications_outlive_the_snapshot_that_has_them(
    storage: MemoryStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    expected = {f"app {i}": i for i in range(256)}  # as many as a snapshot has itself
    for app, version in expected.items():
        session.commit("empty", txn=(app, version))
    session.commit("empty", txn=("app 7", 8))
    session.commit("one more", txn=("one more", 1))
    session.commit("again", txn=("app 9", 10))
    expected |= {"one more": 1, "app 7": 8, "app 9": 10}
    repository = opened(storage)
    assert repository.txn_versions() == expected
    with pytest.raises(TransactionAlreadyCommitted):
        batch(repository, 7, "app 7")
    forget(repository, "app 9", 10)
    forget(repository, "app 10", 10)
    del expected["app 9"], expected["app 10"]
    assert repository.txn_versions() == expected
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(timedelta(0))
    repository = opened(storage)
    assert repository.txn_versions() == expected
    assert repository.verify().problems == ()
