"""Sessions that are detached in one process and resumed in another, and land once."""

from __future__ import annotations

import contextlib
import gc
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from effort import swept
from inside import context_of, root_of
from zarr_manifests import Fork, Repository, Session
from zarr_manifests.engine.history.leases import renew_all
from zarr_manifests.error_cases import FencedError, UnmergedForksError
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    ReadOnlyError,
    SessionClosedError,
    SnapshotExpiredError,
    TransactionAlreadyCommitted,
)
from zarr_manifests.format import envelope
from zarr_manifests.format.chunk_table import NativeRef, RefKind
from zarr_manifests.format.detached import Detached, claim_key
from zarr_manifests.format.envelope import Fields, ObjectKind
from zarr_manifests.ids import snapshot_key
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import workspace_of
from zarr_manifests.testing import Fault, FaultyStorage, SimulatedCrash
from zoned import counting, make, numbers, write

CONFIG = {
    "compaction": {"mode": "manual"},
    "inline-chunk-bytes": 16,
    "pack-chunk-bytes": 64,
}


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage("detach-tests")
    storage.delete_many([info.key for info in storage.list()])
    repository = zm.create(storage, CONFIG)
    with repository.transaction(message="make") as store:
        for name, chunk in (("inline", 1), ("packed", 4), ("large", 20)):
            zarr.create_array(
                store, name=name, shape=(400,), chunks=(chunk,), dtype="i8", compressors=None
            )
    return storage


@pytest.fixture
def repository(storage: MemoryStorage) -> Repository:
    return zm.open(storage)


NOON = replace(SYSTEM, now_ms=lambda: 1_800_000_000_000)


def again(storage: MemoryStorage, runtime: Runtime = SYSTEM) -> Repository:
    """As another process opens it."""
    return zm.open(storage, runtime=runtime)


def fill(store: Any, start: int, stop: int, value: int) -> None:
    for name in ("inline", "packed", "large"):
        zarr.open_array(store, path=name)[start:stop] = value


def values(repository: Repository, name: str = "large") -> list[int]:
    found = zarr.open_array(repository.readonly_session().store, path=name, mode="r")[:]
    return sorted(set(np.asarray(found).tolist()))


def messages(repository: Repository) -> list[str]:
    return [info.message for info in repository.ancestry()]


def bare(data: bytes) -> Detached:
    return Detached.from_bytes(data)


# --- what a caller sees ------------------------------------------------------------------------


def test_a_session_goes_on_elsewhere(storage: MemoryStorage, repository: Repository) -> None:
    session = repository.writable_session()
    fill(session.store, 0, 40, 1)
    zarr.create_group(session.store, path="new", attributes={"a": 1})
    del zarr.open_group(session.store, mode="r+")["packed"]
    zarr.open_array(session.store, path="inline").resize((200,))
    status = session.status()
    data = session.detach()
    assert isinstance(data, bytes)
    resumed = again(storage).resume(data)
    assert resumed.status() == status
    assert resumed.branch == "main"
    assert zarr.open_array(resumed.store, path="large", mode="r")[39] == 1
    fill_more = zarr.open_array(resumed.store, path="large")
    fill_more[40:60] = 2
    resumed.commit("from elsewhere")
    assert values(repository) == [0, 1, 2]
    assert "packed" not in zarr.open_group(repository.readonly_session().store, mode="r")
    assert repository.verify().problems == ()
    resumed_array = zarr.open_array(resumed.store, path="large")
    resumed_array[60:80] = 3
    resumed.commit("and it goes on")
    assert values(repository) == [0, 1, 2, 3]


def test_a_detached_session_is_closed(repository: Repository) -> None:
    session = repository.writable_session()
    fill(session.store, 0, 40, 1)
    session.detach()
    for call in (
        lambda: session.commit("late"),
        session.detach,
        lambda: fill(session.store, 0, 4, 2),
        session.fork,
        session.discard_changes,
    ):
        with pytest.raises(SessionClosedError, match="it was detached"):
            call()
    assert zarr.open_array(session.store, path="large", mode="r")[0] == 1
    with pytest.raises(ReadOnlyError):
        repository.readonly_session().detach()


def test_an_untouched_session_can_be_detached(repository: Repository) -> None:
    data = repository.writable_session().detach()
    assert len(data) < 1000
    resumed = repository.resume(data)
    with pytest.raises(InvalidArgumentError, match="nothing to commit"):
        resumed.commit("nothing")
    fill(resumed.store, 0, 4, 1)
    resumed.commit("something")


def test_forks_made_before_are_merged_after(storage: MemoryStorage, repository: Repository) -> None:
    session = repository.writable_session()
    zarr.open_array(session.store, path="large").resize((800,))
    fill(session.store, 0, 20, 1)
    before = pickle.dumps(session.fork())
    merged = session.fork()
    fill(merged.store, 20, 40, 2)
    session.merge(merged)
    data = session.detach()
    tasks = [pickle.loads(before) for _ in range(3)]
    for i, task in enumerate(tasks):
        fill(task.store, 40 + 20 * i, 60 + 20 * i, 3 + i)
    resumed = again(storage).resume(data)
    resumed.merge(*(pickle.loads(pickle.dumps(task)) for task in tasks))
    fill(merged.store, 20, 40, 9)
    resumed.merge(merged)  # it is known who wrote what
    resumed.merge(pickle.loads(pickle.dumps(merged)))
    resumed.commit("all")
    assert values(repository) == [0, 1, 3, 4, 5, 9]
    assert values(repository, "inline") == [0, 1, 3, 4, 5, 9]
    assert repository.verify().problems == ()


def test_forks_that_differ_are_still_found(storage: MemoryStorage, repository: Repository) -> None:
    session = repository.writable_session()
    one, other = session.fork(), session.fork()
    fill(one.store, 0, 20, 1)
    fill(other.store, 0, 20, 2)
    session.merge(one)
    resumed = again(storage).resume(session.detach())
    with pytest.raises(ConflictError, match="differently"):
        resumed.merge(other)


@pytest.mark.slow
def test_many_refs_are_in_the_manifests_that_were_written(storage: MemoryStorage) -> None:
    repository = zm.open(storage, {"spill-refs": 64})
    with repository.transaction(message="wide") as store:
        zarr.create_array(store, name="wide", shape=(2000,), chunks=(1,), dtype="i8")
    session = repository.writable_session()
    wide = zarr.open_array(session.store, path="wide")
    wide[:1000] = 7
    fork = session.fork()
    zarr.open_array(fork.store, path="wide")[1000:1500] = 8
    session.merge(fork)
    data = session.detach()
    assert any(isinstance(rows, tuple) for r in bare(data).changes.rows.values() for rows in r)
    resumed = again(storage).resume(data)
    zarr.open_array(resumed.store, path="wide")[500] = 9
    resumed.merge(fork)
    resumed.commit("many")
    found = zarr.open_array(repository.readonly_session().store, path="wide", mode="r")[:]
    assert {*np.asarray(found).tolist()} == {0, 7, 8, 9}
    assert repository.verify().problems == ()


def test_statistics_go_along(storage: MemoryStorage, repository: Repository) -> None:
    session = repository.writable_session()
    make(session)
    write(session, 1, 4, 3)
    resumed = again(storage).resume(session.detach())
    resumed.commit("with entries")
    assert {1, 2, 3} <= {*numbers(counting(again(storage)))}


# --- it lands once -----------------------------------------------------------------------------


def test_two_resumes_land_once(storage: MemoryStorage, repository: Repository) -> None:
    """With a shared commit id, the second would find the first's commit and lose its forks."""
    session = repository.writable_session()
    fork = session.fork()
    data = session.detach()
    one, other = again(storage).resume(data), again(storage).resume(data)
    fill(one.store, 0, 20, 1)
    one.commit("the first")
    fill(fork.store, 20, 40, 2)
    other.merge(fork)
    with pytest.raises(FencedError, match="resumed more than once"):
        other.commit("the second")
    assert messages(repository) == ["the first", "make", "create repository"]
    assert values(repository) == [0, 1]


def test_two_resumes_race_to_the_swap(storage: MemoryStorage, repository: Repository) -> None:
    session = repository.writable_session()
    fill(session.store, 0, 20, 1)
    data = session.detach()
    other = again(storage).resume(data)
    due: list[Callable[[], object]] = [lambda: other.commit("the other")]
    lost: list[BaseException] = []

    def checkpoint(reached: str) -> None:
        if reached == "root.swap" and due:
            try:
                due.pop()()
            except ManifestsError as error:
                lost.append(error)

    one = again(storage, replace(SYSTEM, checkpoint=checkpoint)).resume(data)
    one.commit("the one")
    assert [type(error) for error in lost] == [FencedError]
    assert messages(repository)[0] == "the one"
    with pytest.raises(FencedError):
        other.commit("again")


def test_the_one_that_has_claimed_may_try_again(
    storage: MemoryStorage, repository: Repository
) -> None:
    def overtake() -> None:
        with repository.transaction(message="faster") as store:
            fill(store, 40, 60, 5)

    due = [overtake]

    def checkpoint(reached: str) -> None:
        if reached == "root.swap" and due:
            due.pop()()

    session = repository.writable_session()
    fill(session.store, 0, 20, 1)
    data = session.detach()
    one = again(storage, replace(SYSTEM, checkpoint=checkpoint)).resume(data)
    with pytest.raises(ConflictError, match="other writers came first"):
        one.commit("overtaken", retries=0)
    with pytest.raises(InvalidArgumentError, match="has tried to commit"):
        one.detach()
    with pytest.raises(FencedError):
        again(storage).resume(data).commit("not this one")
    one.commit("the second try")
    assert messages(repository)[:2] == ["the second try", "faster"]


def test_a_conflict_leaves_it_to_others(storage: MemoryStorage, repository: Repository) -> None:
    """The claim comes last, so that whoever can commit the session does."""
    session = repository.writable_session()
    fill(session.store, 0, 20, 1)
    data = session.detach()
    with repository.transaction(message="in the way") as store:
        fill(store, 0, 20, 5)
    with pytest.raises(ConflictError):
        again(storage).resume(data).commit("conflict")
    again(storage).resume(data).commit("ours", rebase="ours")
    assert messages(repository)[0] == "ours"


def test_a_conflict_on_a_disk_leaves_it_to_others(tmp_path: Path) -> None:
    """There, much is uploaded before the tip is read."""
    repository = zm.create(tmp_path / "repository", CONFIG)
    with repository.transaction(message="make") as store:
        zarr.create_array(
            store, name="large", shape=(4,), chunks=(1 << 18,), dtype="i8", compressors=None
        )
    session = repository.writable_session()
    zarr.open_array(session.store, path="large")[:] = 1
    data = session.detach()
    with repository.transaction(message="in the way") as store:
        zarr.open_array(store, path="large")[:] = 2
    first = repository.resume(data)
    zarr.open_array(first.store, path="large")[:] = 3
    with pytest.raises(ConflictError):
        first.commit("conflict")
    repository.resume(data).commit("ours", rebase="ours")


def test_a_lost_answer_to_the_claim_is_a_claim(
    storage: MemoryStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    fill(session.store, 0, 20, 1)
    data = session.detach()
    faulty = FaultyStorage(storage, [Fault("lose_answer", "create", "reports/*")])
    zm.open(faulty).resume(data).commit("landed")
    assert messages(repository)[0] == "landed"


def test_a_crash_anywhere_lands_it_once_or_not_at_all(storage: MemoryStorage) -> None:
    for number in range(1, 60):
        repository = again(storage)
        session = repository.writable_session()
        fill(session.store, 0, 20, number)
        data = session.detach()
        faulty = FaultyStorage(storage)
        resumed = zm.open(faulty).resume(data)
        faulty.reset()
        faulty.fail_at(number, "crash_after")
        try:
            resumed.commit(f"try {number}")
            ended = True
        except BaseException:  # noqa: BLE001 - the process is dead
            ended = False
        try:
            again(storage).resume(data).commit(f"again {number}")
        except (FencedError, ConflictError):
            assert messages(repository)[0] in (f"try {number}", messages(repository)[0])
        told = messages(repository)
        assert (f"try {number}" in told) + (f"again {number}" in told) <= 1
        if ended:
            assert f"try {number}" in told
            break
    else:
        raise AssertionError("the commit never ended")
    assert repository.verify().problems == ()


RACER = """
import sys
import zarr_manifests as zm
url, path, go = sys.argv[1:]
session = zm.open(url).resume(open(path, "rb").read())
print("ready", flush=True)
sys.stdin.readline()
try:
    print(session.commit("mine"))
except zm.errors.SessionClosedError:
    print("fenced")
"""


@pytest.mark.slow
@pytest.mark.parametrize("rounds", swept([1, 3], but=[1]))
def test_two_processes_race_and_one_lands(tmp_path: Path, rounds: int) -> None:
    place = tmp_path / "repository"
    repository = zm.create(place, CONFIG)
    with repository.transaction(message="make") as store:
        zarr.create_array(store, name="large", shape=(40,), chunks=(20,), dtype="i8")
    for _ in range(rounds):
        session = repository.writable_session()
        zarr.open_array(session.store, path="large")[:] = np.random.default_rng().integers(1, 99)
        (tmp_path / "detached").write_bytes(session.detach())
        before = len(messages(repository))
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", RACER, str(place), str(tmp_path / "detached"), ""],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("\n")
            racer.stdin.flush()
        told = [racer.communicate(timeout=60)[0].strip() for racer in racers]
        assert sorted(told)[1:] == ["fenced", "fenced"]
        assert len(messages(repository)) == before + 1


def test_a_replay_of_a_transaction_is_told_before_the_claim(
    storage: MemoryStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    fill(session.store, 0, 20, 1)
    data = session.detach()
    one, other = again(storage).resume(data), again(storage).resume(data)
    one.commit("batch 1", txn=("app", 1))
    with pytest.raises(TransactionAlreadyCommitted):
        other.commit("batch 1", txn=("app", 1))


def test_what_is_discarded_needs_no_claim(storage: MemoryStorage, repository: Repository) -> None:
    session = repository.writable_session()
    fill(session.store, 0, 20, 1)
    data = session.detach()
    one, other = again(storage).resume(data), again(storage).resume(data)
    other.discard_changes()
    fill(other.store, 20, 40, 2)
    other.commit("something else")
    one.commit("the detached one")
    assert values(repository) == [0, 1, 2]


def test_a_resumed_session_can_be_detached_again(
    storage: MemoryStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    fill(session.store, 0, 20, 1)
    first = session.detach()
    second = again(storage).resume(first)
    fill(second.store, 20, 40, 2)
    again(storage).resume(second.detach()).commit("landed")
    with pytest.raises(FencedError):
        again(storage).resume(first).commit("not this one, too")
    assert values(repository) == [0, 1, 2]


# --- what the bytes carry ----------------------------------------------------------------------


def test_reads_count(storage: MemoryStorage, repository: Repository) -> None:
    session = repository.writable_session()
    zarr.open_array(session.store, path="large")[5] = 1  # read, then written
    data = session.detach()
    with repository.transaction(message="the same chunk, equal bytes") as store:
        zarr.open_array(store, path="large")[5] = 1
    with pytest.raises(ConflictError):
        again(storage).resume(data).commit("depends on it")


def test_isolation_counts(storage: MemoryStorage, repository: Repository) -> None:
    session = repository.writable_session(isolation="serializable")
    assert zarr.open_array(session.store, path="large")[100] == 0
    fill(session.store, 0, 20, 1)
    data = session.detach()
    with repository.transaction(message="what was read") as store:
        zarr.open_array(store, path="large")[100:120] = 1
    with pytest.raises(ConflictError):
        again(storage).resume(data).commit("write skew")


def test_appends_still_land_behind_others(storage: MemoryStorage, repository: Repository) -> None:
    ds = xr.Dataset({"t": ("time", [1.0, 2.0])}, {"time": [0, 1]})
    zm.write(ds, repository, message="make", group="g")
    session = repository.writable_session()
    session.relocate_appends("time")
    options: dict[str, Any] = {"append_dim": "time", "consolidated": False, "group": "g"}
    ds.assign_coords(time=[4, 5]).to_zarr(session.store, **options)
    data = session.detach()
    zm.write(ds.assign_coords(time=[2, 3]), repository, message="b", append_dim="time", group="g")
    again(storage).resume(data).commit("behind it")
    found = xr.open_dataset(repository, engine="zarr_manifests", group="g")
    assert found.time.values.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_claim_of_the_branch_counts(storage: MemoryStorage, repository: Repository) -> None:
    session = repository.writable_session(exclusive=True)
    fill(session.store, 0, 20, 1)
    data = session.detach()
    repository.writable_session(exclusive=True)
    with pytest.raises(FencedError, match="claimed"):
        again(storage).resume(data).commit("too late")
    session = repository.writable_session(exclusive=True)
    fill(session.store, 0, 20, 1)
    again(storage).resume(session.detach()).commit("in time")


def test_a_branch_that_was_made_again_is_not_the_claimed_one(
    storage: MemoryStorage, repository: Repository
) -> None:
    repository.create_branch("side")
    session = repository.writable_session("side", exclusive=True)
    fill(session.store, 0, 20, 1)
    data = session.detach()
    repository.delete_branch("side")
    repository.create_branch("side", session.snapshot_id)
    with pytest.raises(FencedError, match="made again"):
        again(storage).resume(data).commit("too late")


def test_staged_chunks_are_written_and_not_carried(repository: Repository) -> None:
    session = repository.writable_session()
    fill(session.store, 0, 400, 1)
    data = session.detach()
    for table in bare(data).changes.singles.values():
        assert (table.length[table.kind == RefKind.INLINE] <= 16).all()


def test_copies_that_were_not_merged_are_not_left_out(tmp_path: Path) -> None:
    repository = zm.create(tmp_path / "repository", CONFIG)
    with repository.transaction(message="make") as store:
        zarr.create_array(store, name="large", shape=(40,), chunks=(20,), dtype="i8")
    session = repository.writable_session()
    zarr.open_array(session.store, path="large")[:20] = 1
    with warnings.catch_warnings(action="ignore"):
        copy = pickle.dumps(session.store)
    resumed = repository.resume(session.detach())
    late = pickle.loads(copy)
    zarr.open_array(late, path="large")[20:] = 2
    with pytest.raises(UnmergedForksError):
        resumed.commit("without the copy")
    with pytest.raises(UnmergedForksError):
        resumed.detach()
    resumed.merge(late)
    resumed.commit("with it")


def test_there_is_no_place_and_no_secret_in_the_bytes(tmp_path: Path) -> None:
    place = tmp_path / "a-telling-name"
    repository = zm.create(place)
    session = repository.writable_session(lease=60)
    zarr.create_group(session.store, path="g")
    data = session.detach()
    assert b"a-telling-name" not in data
    assert not any(b"a-telling-name" in piece for piece in _pieces(bare(data)))
    repository.resume(data).close()


def _pieces(detached: Detached) -> list[bytes]:
    return [repr(detached).encode()]


def test_reporting_sessions_are_not_detached(tmp_path: Path) -> None:
    repository = zm.create(tmp_path / "repository")
    session = repository.writable_session(copies="report")
    with pytest.raises(InvalidArgumentError, match="copies='report'"):
        session.detach()


def test_what_was_detached_is_durable(tmp_path: Path) -> None:
    class Noting(LocalStorage):
        synced: list[str] = []  # noqa: RUF012

        def sync(self, keys: Any) -> None:
            self.synced += keys
            super().sync(keys)

    place = Noting(tmp_path / "repository")
    repository = zm.create(place, CONFIG)
    session = repository.writable_session()
    array = zarr.create_array(
        session.store, name="a", shape=(60,), chunks=(20,), dtype="i8", compressors=None
    )
    array[:] = 1
    session.detach()
    written = {info.key for info in place.list("chunks/")}
    assert written
    assert written <= {*place.synced}


# --- leases and the fence ----------------------------------------------------------------------


def test_without_a_lease_a_collection_ends_it(
    storage: MemoryStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    fill(session.store, 0, 20, 1)
    data = session.detach()
    before = again(storage).resume(data)
    repository.garbage_collect(timedelta(0))
    with pytest.raises(FencedError):
        before.commit("too late")
    with pytest.raises(FencedError):
        again(storage).resume(data)


@pytest.mark.parametrize("opened_with", [None, 60])
def test_a_lease_is_handed_over(
    opened_with: float | None, storage: MemoryStorage, repository: Repository
) -> None:
    repository = again(storage, NOON)
    session = repository.writable_session(lease=opened_with)
    fill(session.store, 0, 20, 1)
    data = session.detach(lease=timedelta(hours=6))
    (lease,) = root_of(storage).leases
    assert lease.expires_ms - NOON.now_ms() == 6 * 3_600_000
    assert context_of(repository).heart.held() == []  # nobody renews it
    del session
    gc.collect()
    repository.garbage_collect(timedelta(0))
    resumed = again(storage, NOON).resume(data)
    (renewed,) = root_of(storage).leases
    assert renewed.lease_id == lease.lease_id
    assert renewed.expires_ms - NOON.now_ms() == (opened_with or 6 * 3600) * 1000
    repository.garbage_collect(timedelta(0))
    resumed.commit("in time")
    resumed.close()
    assert root_of(storage).leases == ()
    repository.garbage_collect(timedelta(0))
    assert values(repository) == [0, 1]
    assert repository.verify().problems == ()


LONG_AGO = replace(SYSTEM, now_ms=lambda: 0)


def test_a_lease_that_was_taken_away_ends_it(
    storage: MemoryStorage, repository: Repository
) -> None:
    session = again(storage, LONG_AGO).writable_session()
    fill(session.store, 0, 20, 1)
    data = session.detach(lease=60)
    repository.garbage_collect(timedelta(0))
    with pytest.raises(FencedError, match="took it away"):
        again(storage).resume(data)


def test_a_lease_that_is_over_and_still_there_is_renewed_at_once(
    storage: MemoryStorage, repository: Repository
) -> None:
    session = again(storage, LONG_AGO).writable_session(lease=60)
    fill(session.store, 0, 20, 1)
    data = session.detach(lease=60)
    resumed = again(storage).resume(data)
    repository.garbage_collect(timedelta(0))
    resumed.commit("in time")


def test_renewing_others_does_not_shorten_what_was_handed_over(
    storage: MemoryStorage, repository: Repository
) -> None:
    """A renewal that has begun before the hand-over may end after it."""
    repository = again(storage, NOON)
    session = repository.writable_session(lease=60)
    due: list[Callable[[], object]] = []

    def checkpoint(reached: str) -> None:
        if reached == "root.swap" and due:
            due.pop()()

    renewing = again(storage, replace(NOON, checkpoint=checkpoint))
    other = replace(context_of(renewing), heart=context_of(repository).heart)
    data: list[bytes] = []
    due.append(lambda: data.append(session.detach(lease=timedelta(hours=6))))
    with repository.lease(session.snapshot_id):
        renew_all(other)
        (handed,) = [one for one in root_of(storage).leases if one.owner == "writer of main"]
        assert handed.expires_ms - NOON.now_ms() == 6 * 3_600_000


def test_closing_a_resumed_session_gives_up_its_lease(
    storage: MemoryStorage, repository: Repository
) -> None:
    session = repository.writable_session(lease=60)
    data = session.detach()
    again(storage).resume(data).close()
    assert root_of(storage).leases == ()


def test_resuming_in_the_same_process_keeps_the_lease(
    storage: MemoryStorage, repository: Repository
) -> None:
    session = repository.writable_session(lease=60)
    fill(session.store, 0, 20, 1)
    resumed = repository.resume(session.detach())
    del session
    gc.collect()
    assert len(context_of(repository).heart.held()) == 1
    resumed.close()
    assert context_of(repository).heart.held() == []


def test_the_claim_is_collected_like_what_the_session_wrote(
    storage: MemoryStorage, repository: Repository
) -> None:
    """If it went earlier, another resume would win it again, and land too."""
    session = repository.writable_session()
    keys = workspace_of(session.store).keys
    key = claim_key(keys.start, keys.lineage)
    fill(session.store, 0, 20, 1)
    data = session.detach(lease=60)
    other = again(storage).resume(data)
    one = again(storage).resume(data)
    one.commit("landed")
    assert [info.key for info in storage.list("reports/")] == [key]
    repository.garbage_collect(timedelta(hours=1))
    assert [info.key for info in storage.list("reports/")] == [key]
    with pytest.raises(FencedError):
        other.commit("not again")
    repository.garbage_collect(timedelta(0))
    assert [info.key for info in storage.list("reports/")] == []
    with pytest.raises(FencedError):
        other.commit("not again")
    assert messages(repository)[0] == "landed"


def test_a_lease_keeps_the_claim(storage: MemoryStorage, repository: Repository) -> None:
    session = repository.writable_session(lease=60)
    fill(session.store, 0, 20, 1)
    data = session.detach()
    faulty = FaultyStorage(storage, [Fault("crash_before", "cas", skip=1)])
    resumed = zm.open(faulty).resume(data)  # renews its lease by the first swap
    with pytest.raises(SimulatedCrash):
        resumed.commit("claimed, and dead")
    repository.garbage_collect(timedelta(0))
    assert len([*storage.list("reports/")]) == 1
    with pytest.raises(FencedError, match="resumed more than once"):
        again(storage).resume(data).commit("not this one")


# --- what is refused ---------------------------------------------------------------------------


def test_a_session_of_another_repository_is_refused(repository: Repository) -> None:
    other = zm.create(MemoryStorage())
    with pytest.raises(InvalidArgumentError, match="a session of repository"):
        other.resume(repository.writable_session().detach())


def test_a_snapshot_that_has_expired_is_refused(
    storage: MemoryStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    data = session.detach()
    with repository.transaction(message="newer") as store:
        fill(store, 0, 20, 1)
    repository.expire_snapshots(keep_last=1)
    storage.delete_many([snapshot_key(session.snapshot_id)])
    with pytest.raises(SnapshotExpiredError):
        again(storage).resume(data)


@pytest.mark.parametrize("odd", [None, 5, "text", bytearray(b"x"), [b"x"]])
def test_what_is_not_bytes_is_refused(odd: Any, repository: Repository) -> None:
    with pytest.raises(InvalidArgumentError):
        repository.resume(odd)


def test_damaged_bytes_are_refused(storage: MemoryStorage, repository: Repository) -> None:
    session = repository.writable_session()
    fill(session.store, 0, 20, 1)
    data = session.detach()
    for at in range(0, len(data), 7):
        broken = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(ManifestsError):
            again(storage).resume(broken)
    for cut in (b"", data[:30], data[:-1], data + b"x", storage.get("current")):
        with pytest.raises(CorruptObjectError):
            again(storage).resume(cut)


def test_refs_to_objects_of_strangers_are_refused(
    storage: MemoryStorage, repository: Repository
) -> None:
    """They may be collected at any time: nothing protects them."""
    stranger = repository.writable_session()
    fill(stranger.store, 0, 20, 3)
    workspace_of(stranger.store).flush()
    theirs = workspace_of(stranger.store).contents.changes
    session = repository.writable_session()
    mine = workspace_of(session.store).contents.changes
    ((node, refs),) = [
        (node, refs)
        for node, refs in theirs.chunks.items()
        if any(isinstance(ref, NativeRef) and ref.length == 160 for ref in refs.values())
    ]
    mine.chunks[node] = dict(refs)
    with pytest.raises(InvalidArgumentError, match="neither this session nor its copies"):
        again(storage).resume(session.detach())
    session = repository.writable_session()
    fork = session.fork()
    workspace_of(fork.store).contents.changes.chunks[node] = dict(refs)
    with pytest.raises(InvalidArgumentError, match="neither this session nor its copies"):
        session.merge(fork)
    stranger.commit("now they are reached")
    session = repository.writable_session()
    workspace_of(session.store).contents.changes.chunks[node] = dict(refs)
    again(storage).resume(session.detach()).commit("fine")


def test_refs_that_the_snapshot_reaches_may_move(
    storage: MemoryStorage, repository: Repository
) -> None:
    with repository.transaction(message="fill") as store:
        fill(store, 0, 400, 3)
    session = repository.writable_session()
    session.shift_array("large", (2,))
    session.move("packed", "elsewhere")
    again(storage).resume(session.detach()).commit("moved")
    assert values(repository) == [0, 3]
    assert values(repository, "elsewhere") == [3]
    assert repository.verify().problems == ()


def test_chunks_outside_the_grid_are_refused(
    storage: MemoryStorage, repository: Repository
) -> None:
    def with_a_chunk_outside(copy: Session | Fork) -> None:
        fill(copy.store, 0, 20, 1)
        workspace_of(copy.store).flush()
        chunks = workspace_of(copy.store).contents.changes.chunks
        (node,) = [node for node, refs in chunks.items() if len(refs) == 1]
        chunks[node][(20,)] = chunks[node][(0,)]

    session = repository.writable_session()
    with_a_chunk_outside(session)
    data = session.detach()
    with pytest.raises(InvalidArgumentError, match=r"chunk \(20,\) lies outside"):
        again(storage).resume(data)
    session = repository.writable_session()
    with_a_chunk_outside(fork := session.fork())
    with pytest.raises(InvalidArgumentError, match=r"chunk \(20,\) lies outside"):
        session.merge(fork)


def test_a_resume_draws_names_and_a_commit_id_of_its_own(
    storage: MemoryStorage, repository: Repository
) -> None:
    session = repository.writable_session()
    fill(session.store, 0, 20, 1)
    before = workspace_of(session.store).keys
    data = session.detach()
    ids = set()
    for _ in range(3):
        keys = workspace_of(again(storage).resume(data).store).keys
        assert (keys.start, keys.lineage) == (before.start, before.lineage)
        ids.add(keys.session_id)
    assert len(ids | {before.session_id}) == 4


def _variants(value: Any) -> Iterator[Any]:
    """The value with one part of it replaced by something else."""
    yield from (None, -1, 2**63 - 1, 2**64 - 1, 1.5, True, "x", b"x", b"n" * 12, [], [[]], {})
    if isinstance(value, dict):
        for name, held in value.items():
            yield {key: other for key, other in value.items() if key != name}
            for variant in _variants(held):
                yield value | {name: variant}
    if isinstance(value, list):
        yield [*value, *value]
        for i, held in enumerate(value):
            for variant in _variants(held):
                yield [*value[:i], variant, *value[i + 1 :]]


def test_forged_bytes_raise_only_errors_of_the_package(storage: MemoryStorage) -> None:
    repository = zm.open(storage, {"spill-refs": 64})
    session = repository.writable_session(lease=600)
    session.relocate_appends("time")
    fill(session.store, 0, 40, 1)
    zarr.create_array(session.store, name="scalar", shape=(), chunks=(), dtype="i8")[...] = 5
    assert zarr.open_array(session.store, path="scalar", mode="r")[()] == 5
    wide = zarr.create_array(session.store, name="wide", shape=(300,), chunks=(1,), dtype="i8")
    wide[:200] = 7
    fork = session.fork()
    zarr.open_array(fork.store, path="wide")[200:] = 8
    fill(fork.store, 40, 60, 2)
    session.merge(fork)
    data = session.detach()
    payload = envelope.unpack(envelope.decode(data, ObjectKind.DETACHED, _packed, "here"))
    assert Detached.from_bytes(envelope.encode(ObjectKind.DETACHED, payload)).encode() == data
    forged = [*_variants(payload)]
    assert len(forged) > 1000
    for variant in np.random.default_rng(7).permutation(len(forged))[:1000].tolist():
        if isinstance(forged[variant], dict):
            odd = envelope.encode(ObjectKind.DETACHED, forged[variant])
            with contextlib.suppress(ManifestsError):
                repository.resume(odd).close()
    assert repository.verify().ok


def _packed(fields: Fields) -> bytes:
    return envelope.pack(fields.value)
