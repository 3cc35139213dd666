"""Exactly-once commits: the marks of applications, and everything they survive."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from inside import context_of, root_of
from zarr_manifests import Repository, Session
from zarr_manifests.error_cases import FencedError, UnmergedForksError
from zarr_manifests.errors import (
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    SessionClosedError,
    StorageError,
    TransactionAlreadyCommitted,
    TransactionGapError,
)
from zarr_manifests.format.marks import MOST_IN_SNAPSHOT
from zarr_manifests.format.root import MARKS_PAGE
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import Fault, FaultyStorage, in_order

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


def opened(storage: MemoryStorage, runtime: Runtime | None = None) -> Repository:
    return zm.open(storage, runtime=runtime or in_order())


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


def head_of(storage: MemoryStorage, branch: str = "main") -> Snapshot:
    head = root_of(storage).branches[branch].head
    return Snapshot.from_object(storage.get(head.key), head)


def at_swap(*due: Callable[[], object]) -> Runtime:
    """Does the next of these each time when the root is about to be swapped."""
    left = list(due)

    def checkpoint(reached: str) -> None:
        if reached == "root.swap" and left:
            left.pop(0)()

    return replace(SYSTEM, checkpoint=checkpoint)


# --- what a caller sees ------------------------------------------------------------------------


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


def test_a_session_ends_with_a_batch_that_was_committed(repository: Repository) -> None:
    batch(repository, 1)
    session = wrote(repository, 5, 99)
    with pytest.raises(TransactionAlreadyCommitted):
        session.commit("again", txn=("app", 1))
    assert not session.status()
    assert zarr.open_array(session.store, path="a", mode="r")[5] == 0
    with pytest.raises(SessionClosedError, match="had been committed before"):
        session.commit("and again")
    with pytest.raises(SessionClosedError):
        zarr.open_array(session.store, path="a")[5] = 1
    assert len(messages(repository)) == 3


def test_a_lower_version_is_committed_too_and_applications_do_not_meddle(
    repository: Repository,
) -> None:
    batch(repository, 5)
    with pytest.raises(TransactionAlreadyCommitted) as told:
        batch(repository, 3)
    assert (told.value.version, told.value.last, told.value.snapshot_id) == (3, 5, None)
    batch(repository, 3, "other")
    batch(repository, 6)
    assert repository.txn_versions() == {"app": 6, "other": 3}


def test_an_absent_mark_is_below_zero(repository: Repository) -> None:
    batch(repository, 0)
    assert repository.txn_versions() == {"app": 0}
    with pytest.raises(TransactionAlreadyCommitted):
        batch(repository, 0)


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


def test_an_empty_batch_lands_behind_others(storage: MemoryStorage) -> None:
    session = opened(storage).writable_session()
    batch(opened(storage), 1, "other")
    session.commit("empty", txn=("app", 1))
    assert opened(storage).txn_versions() == {"app": 1, "other": 1}


def test_branches_have_marks_of_their_own(repository: Repository) -> None:
    batch(repository, 1)
    repository.create_branch("side")
    batch(repository, 2)
    assert repository.txn_versions("side") == {"app": 1}
    batch(repository, 2, branch="side")
    assert repository.txn_versions("side") == {"app": 2}
    with pytest.raises(NotFoundError, match="nowhere"):
        repository.txn_versions("nowhere")


def test_a_transaction_says_so_before_its_block_runs(repository: Repository) -> None:
    with repository.transaction(message="first", txn=("app", 1)) as store:
        zarr.open_array(store, path="a")[0] = 1
    ran = []
    with (
        pytest.raises(TransactionAlreadyCommitted),
        repository.transaction(message="again", txn=("app", 1)),
    ):
        ran.append(1)
    assert ran == []
    with repository.transaction(message="empty", txn=("app", 2)):
        pass
    assert messages(repository)[:2] == ["empty", "first"]


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
    "txn",
    [
        ("", 1),
        ("x" * 256, 1),
        ("\ud800", 1),
        (5, 1),
        ([], 1),
        ("app", -1),
        ("app", 2**63),
        ("app", 1.0),
        ("app", True),
        ("app",),
        "ab",
        5,
        {"app": 1},
    ],
)
def test_what_is_no_transaction_is_refused(txn: Any, repository: Repository) -> None:
    session = wrote(repository, 1)
    with pytest.raises(InvalidArgumentError):
        session.commit("odd", txn=txn)
    session.commit("the session goes on")


@pytest.mark.parametrize("after", [-2, 5, 6, 1.0, "4", True])
def test_a_version_comes_after_a_lower_one(after: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        zm.Txn("app", 5, after)


def test_a_gap_is_an_error_and_the_session_goes_on(repository: Repository) -> None:
    batch(repository, 1)
    session = wrote(repository, 9)
    with pytest.raises(TransactionGapError, match=r"comes after 3, but the last one .* is 1"):
        session.commit("a gap", txn=zm.Txn("app", 4, after=3))
    assert session.status()
    session.commit("no gap", txn=zm.Txn("app", 4, after=1))
    with pytest.raises(TransactionGapError, match="comes after none"):
        wrote(repository, 1).commit("first", txn=zm.Txn("app", 5, after=-1))
    wrote(repository, 1).commit("first", txn=zm.Txn("new", 5, after=-1))
    with pytest.raises(TransactionAlreadyCommitted):  # and no gap
        wrote(repository, 1).commit("again", txn=zm.Txn("app", 3, after=2))


# --- checked at every attempt, before everything else ------------------------------------------


def test_two_drivers_of_one_batch(storage: MemoryStorage) -> None:
    """Checked only when the commit begins, both would land."""
    late = lambda: batch(opened(storage), 1)  # noqa: E731
    session = wrote(opened(storage, at_swap(late)), 40)
    with pytest.raises(TransactionAlreadyCommitted) as told:
        session.commit("the same batch", txn=("app", 1))
    assert told.value.snapshot_id == opened(storage).list_branches()["main"]
    assert messages(opened(storage)) == ["batch 1", "make", "create repository"]


def test_a_replay_is_no_conflict(storage: MemoryStorage) -> None:
    """Checked only after the rebase, the stream would get a conflict for ever."""
    session = wrote(opened(storage), 1, 77)
    batch(opened(storage), 1)  # has written the same chunk
    with pytest.raises(TransactionAlreadyCommitted):
        session.commit("a replay", txn=("app", 1))
    during = wrote(opened(storage, at_swap(lambda: batch(opened(storage), 2))), 2, 77)
    with pytest.raises(TransactionAlreadyCommitted):
        during.commit("a replay", txn=("app", 2))


def test_a_replay_is_not_fenced_off(storage: MemoryStorage) -> None:
    def land_and_collect() -> None:
        batch(opened(storage), 2)
        opened(storage).garbage_collect(timedelta(0))

    session = wrote(opened(storage), 1)
    batch(opened(storage), 1)
    opened(storage).garbage_collect(timedelta(0))
    fenced = wrote(opened(storage), 2)
    opened(storage).garbage_collect(timedelta(0))
    with pytest.raises(FencedError):
        fenced.commit("no replay", txn=("app", 2))
    with pytest.raises(TransactionAlreadyCommitted):
        session.commit("a replay", txn=("app", 1))
    during = wrote(opened(storage, at_swap(land_and_collect)), 2)
    with pytest.raises(TransactionAlreadyCommitted):
        during.commit("a replay", txn=("app", 2))


def test_a_replay_is_not_shut_out_by_a_claim(storage: MemoryStorage) -> None:
    session = wrote(opened(storage), 1)
    exclusive = wrote(opened(storage), 2, exclusive=True)
    exclusive.commit("batch 1", txn=("app", 1))
    with pytest.raises(TransactionAlreadyCommitted):
        session.commit("a replay", txn=("app", 1))


def test_a_replay_is_told_before_copies_are(tmp_path: Path) -> None:
    repository = zm.create(tmp_path / "repository", CONFIG)
    with repository.transaction(message="make") as store:
        zarr.create_array(store, name="a", shape=(64,), chunks=(1,), dtype="i8")
    session = wrote(repository, 1)
    with warnings.catch_warnings(action="ignore"):
        copy = pickle.loads(pickle.dumps(session.store))
    zarr.open_array(copy, path="a")[3] = 3
    batch(repository, 1)
    with pytest.raises(UnmergedForksError):
        session.commit("no transaction")
    with pytest.raises(TransactionAlreadyCommitted):
        session.commit("a replay", txn=("app", 1))


def test_a_stale_root_does_not_say_that_it_is_committed(storage: MemoryStorage) -> None:
    """This process knows a root in which it is; since then the branch was set back."""
    here = opened(storage)
    before = here.list_branches()["main"]
    session = wrote(here, 40)
    batch(here, 1)
    opened(storage).reset_branch("main", before, force=True)
    assert (
        "app"
        in Snapshot.from_object(
            storage.get((head := context_of(here).roots.latest.root.branches["main"].head).key),
            head,
        ).marks
    )
    session.commit("batch 1, again", txn=("app", 1))
    assert messages(opened(storage)) == ["batch 1, again", "make", "create repository"]


def test_a_stale_root_shows_no_gap(storage: MemoryStorage) -> None:
    session = wrote(opened(storage), 40)
    batch(opened(storage), 1)
    session.commit("batch 2", txn=zm.Txn("app", 2, after=1))
    assert opened(storage).txn_versions() == {"app": 2}


class Unsynced(LocalStorage):
    """Notes what is made durable, and may fail to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.synced: list[str] = []
        self.fails = False

    def sync(self, keys: Any) -> None:
        if self.fails and "current" in keys:
            raise StorageError("the disk does not answer")
        self.synced += keys
        super().sync(keys)


def test_committed_is_said_only_of_a_root_that_is_durable(tmp_path: Path) -> None:
    """The root that others have swapped in may be visible and not synced."""
    place = Unsynced(tmp_path / "repository")
    repository = zm.create(place, CONFIG)
    repository.writable_session().commit("batch", txn=("app", 1))
    session = repository.writable_session()
    place.synced.clear()
    with pytest.raises(TransactionAlreadyCommitted):
        session.commit("again", txn=("app", 1))
    assert "current" in place.synced
    place.fails = True
    session = repository.writable_session()
    with pytest.raises(StorageError, match="does not answer"):
        session.commit("again", txn=("app", 1))


def test_a_lost_answer_is_a_commit_and_its_replay_is_told(storage: MemoryStorage) -> None:
    faulty = FaultyStorage(storage, [Fault("lose_answer", "cas")])
    session = wrote(zm.open(faulty, runtime=in_order()), 1)
    session.commit("batch 1", txn=("app", 1))
    with pytest.raises(TransactionAlreadyCommitted):
        batch(opened(storage), 1)


# --- what marks survive, and what takes them back ------------------------------------------------


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


def test_the_snapshot_is_found_behind_others_and_a_compaction(repository: Repository) -> None:
    first = batch(repository, 1)
    batch(repository, 2)
    batch(repository, 7, "other")
    repository.compact(mode="full")
    with pytest.raises(TransactionAlreadyCommitted) as told:
        batch(repository, 1)
    assert told.value.snapshot_id == first
    for i in range(70):
        wrote(repository, i % 64, i + 2).commit("another")
    with pytest.raises(TransactionAlreadyCommitted) as told:
        batch(repository, 1)
    assert told.value.snapshot_id is None  # far back


def test_amending_takes_the_marks_of_the_old_head(repository: Repository) -> None:
    batch(repository, 1)
    session = wrote(repository, 9)
    amended = session.amend("batch 1, and more")
    assert repository.txn_versions() == {"app": 1}
    with pytest.raises(TransactionAlreadyCommitted) as told:
        batch(repository, 1)
    assert told.value.snapshot_id == amended


def test_a_compaction_takes_the_marks_of_the_tip(storage: MemoryStorage) -> None:
    batch(opened(storage), 1)
    compacting = opened(storage, at_swap(lambda: batch(opened(storage), 2)))
    assert compacting.compact(mode="full").snapshot_id is not None
    assert messages(opened(storage))[1] == "batch 2"
    assert opened(storage).txn_versions() == {"app": 2}


def test_a_revert_keeps_marks(repository: Repository) -> None:
    repository.revert(batch(repository, 1))
    assert repository.txn_versions() == {"app": 1}
    with pytest.raises(TransactionAlreadyCommitted):
        batch(repository, 1)


def test_a_branch_that_is_set_back_has_the_marks_of_its_snapshot(
    storage: MemoryStorage, repository: Repository
) -> None:
    before = batch(repository, 1)
    batch(repository, 2)
    version = root_of(storage).version
    batch(repository, 3)
    repository.reset_branch("main", before, force=True)
    assert repository.txn_versions() == {"app": 1}
    with pytest.raises(TransactionGapError):  # not a silent gap
        wrote(repository, 1).commit("batch 4", txn=zm.Txn("app", 4, after=3))
    zm.recover(repository, version)
    assert repository.txn_versions() == {"app": 2}
    batch(repository, 3)
    storage.put("current", b"damaged")
    zm.recover(storage)
    assert opened(storage).txn_versions() == {"app": 3}


def test_a_picked_transaction_is_one_on_the_other_branch_too(repository: Repository) -> None:
    repository.create_branch("side")
    batch(repository, 1)
    second = batch(repository, 2)
    with pytest.raises(ConflictError, match="'app' is none and not 1") as told:
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
    second = batch(repository, 2)
    repository.cherry_pick(second, "side", txn="drop")
    assert repository.txn_versions("side") == {}
    with pytest.raises(InvalidArgumentError, match="txn='keep'"):
        repository.cherry_pick(second, "side", txn="keep")  # type: ignore[arg-type]


def test_an_empty_batch_can_be_picked(repository: Repository) -> None:
    repository.create_branch("side")
    empty = repository.writable_session().commit("empty", txn=("app", 1))
    with pytest.raises(InvalidArgumentError, match="nothing to do"):
        repository.cherry_pick(empty, "side", txn="drop")
    repository.cherry_pick(empty, "side")
    assert repository.txn_versions("side") == {"app": 1}


def test_a_picked_mark_is_compared_when_the_commit_lands(storage: MemoryStorage) -> None:
    repository = opened(storage)
    repository.create_branch("side")
    first = batch(repository, 1)
    late = opened(storage, at_swap(lambda: batch(opened(storage), 5, branch="side")))
    with pytest.raises(ConflictError, match="is 5 and not none"):
        late.cherry_pick(first, "side")


def forget(repository: Repository, app: str, version: int) -> str:
    return repository.writable_session().commit("forget", txn=zm.Txn(app, None, after=version))


def test_a_mark_is_forgotten_only_if_it_is_the_expected_one(storage: MemoryStorage) -> None:
    repository = opened(storage)
    batch(repository, 17)
    before = repository.list_branches()["main"]
    for expected in (16, 18):
        with pytest.raises(ConflictError, match=f"is 17 and not {expected}"):
            forget(repository, "app", expected)
    with pytest.raises(ConflictError, match="is none and not 0"):
        forget(repository, "other", 0)
    late = opened(storage, at_swap(lambda: batch(opened(storage), 18)))
    with pytest.raises(ConflictError, match="is 18 and not 17"):
        forget(late, "app", 17)
    snapshot_id = forget(repository, "app", 18)
    assert repository.txn_versions() == {}
    assert repository.list_branches()["main"] == snapshot_id
    batch(repository, 3)
    repository.reset_branch("main", before, force=True)
    assert repository.txn_versions() == {"app": 17}
    for odd in ("", 5, None):
        with pytest.raises(InvalidArgumentError):
            forget(repository, odd, 1)  # type: ignore[arg-type]
    assert repository.verify().problems == ()


# --- many applications -------------------------------------------------------------------------


def test_marks_of_many_applications_are_in_a_page(storage: MemoryStorage) -> None:
    repository = opened(storage)
    session = repository.writable_session()
    for i in range(MOST_IN_SNAPSHOT):
        session.commit("empty", txn=(f"app {i}", i))
    assert head_of(storage).marks_page is None
    assert MARKS_PAGE not in root_of(storage).features
    session.commit("empty", txn=("app 7", 8))
    assert head_of(storage).marks_page is None
    session.commit("one more", txn=("one more", 1))
    assert head_of(storage).marks_page is not None
    assert head_of(storage).marks == {"one more": 1}
    assert MARKS_PAGE in root_of(storage).features
    session.commit("again", txn=("app 9", 10))
    expected = {f"app {i}": i for i in range(MOST_IN_SNAPSHOT)}
    expected |= {"one more": 1, "app 7": 8, "app 9": 10}
    page = head_of(storage).marks_page
    repository = opened(storage)
    assert repository.txn_versions() == expected
    with pytest.raises(TransactionAlreadyCommitted):
        batch(repository, 7, "app 7")
    forget(repository, "app 9", 10)
    forget(repository, "app 10", 10)
    del expected["app 9"], expected["app 10"]
    assert repository.txn_versions() == expected
    assert head_of(storage).marks_page != page
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(timedelta(0))
    repository = opened(storage)
    assert repository.txn_versions() == expected
    assert repository.verify().problems == ()


@pytest.mark.slow
def test_the_last_mark_of_a_page_takes_the_page_along(storage: MemoryStorage) -> None:
    repository = opened(storage)
    session = repository.writable_session()
    for i in range(MOST_IN_SNAPSHOT + 1):
        session.commit("empty", txn=(f"app {i}", i))
    for i in range(MOST_IN_SNAPSHOT):
        forget(repository, f"app {i}", i)
    assert head_of(storage).marks_page is None
    assert repository.txn_versions() == {f"app {MOST_IN_SNAPSHOT}": MOST_IN_SNAPSHOT}
