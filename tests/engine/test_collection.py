"""Expiry and collection beside writers and readers: nothing acknowledged is lost, and what is dead
goes."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import chosen, some_or_all
from inside import change_root, context_of, root_of
from zarr_manifests import Repository, Session
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.edit.pin import Pin
from zarr_manifests.engine.history.ancestry import ages
from zarr_manifests.engine.history.leases import renew_all, take
from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.error_cases import FencedError, HistoryExpiredError
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    MissingChunkError,
    SnapshotExpiredError,
)
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.session import commits_of
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, freeze_store, workspace_of
from zarr_manifests.testing import (
    Fault,
    FaultyStorage,
    InterruptingStorage,
    SimulatedCrash,
    copy_of,
    in_order,
)

NOW = timedelta(0)
CONFIG = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0, "compaction": {"max-delta-count": 10}}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def advance(self, by: timedelta) -> None:
        self.ms += int(by.total_seconds() * 1000)


def world(clock: Clock | None = None) -> Any:
    """Everything in order, by that clock."""
    given = clock or Clock()
    return in_order(now_ms=lambda: given.ms, monotonic_s=lambda: given.ms / 1000)


def make(storage: Storage, runtime: Any = None) -> Repository:
    repository = zm.create(storage, CONFIG, runtime=runtime or world())
    with repository.transaction(message="make a") as store:
        array = zarr.create_array(store, name="a", shape=(8,), chunks=(2,), dtype="i4")
        array[:] = 1
    return repository


def fill(repository: Repository, value: int, branch: str = "main") -> str:
    session = repository.writable_session(branch)
    write(session, value)
    return session.commit(f"fill {value}")


def write(session: Session, value: int, where: slice = slice(None)) -> None:
    zarr.open_array(session.store, path="a")[where] = value


def read(session: Session) -> list[int]:
    return np.asarray(zarr.open_array(session.store, path="a", mode="r")[:]).tolist()


def keys(storage: Storage) -> list[str]:
    return [info.key for info in storage.list()]


def live_count(storage: Storage) -> int:
    """Objects but archives of the root."""
    return sum(not key.startswith("root/") for key in keys(storage))


def live_nbytes(storage: Storage) -> int:
    """Bytes of all objects but archives of the root."""
    return sum(info.nbytes for info in storage.list() if not info.key.startswith("root/"))


# --- how small it gets ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_overwrites_leave_what_is_alive() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    session = repository.writable_session()
    for value in range(1_000):
        session.store.set_sync("a/c/0", cpu.Buffer.from_bytes(bytes([value % 251]) * 40))
        session.commit("overwrite")
    report = repository.expire_snapshots(keep_last=1)
    assert len(report.snapshots) > 1_000
    assert len(keys(storage)) > 4_000
    repository.garbage_collect(NOW)
    # The head, its base or deltas with their manifests, and the 4 chunks of each live delta.
    fresh = MemoryStorage()
    small = make(fresh)
    for value in range(12):
        fill(small, value)
    assert live_count(storage) <= live_count(fresh)
    # Names of versions take more digits, and a head has a parent.
    assert live_nbytes(storage) <= 1.1 * live_nbytes(fresh)
    assert sum(info.nbytes for info in storage.list("root/")) < 102 * 8_192
    archives = [key for key in keys(storage) if key.startswith("root/")]
    assert len(archives) <= 102
    again = zm.open(storage, runtime=world())
    assert again.verify().ok
    assert len(list(again.ancestry())) == 1
    assert again.garbage_collect(NOW).deleted <= 2  # archives


def test_a_dry_run_changes_nothing_and_says_what_would_go() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    for value in range(5):
        fill(repository, value)
    before = {key: storage.get(key) for key in keys(storage)}
    planned = repository.expire_snapshots(keep_last=2, dry_run=True)
    repository.garbage_collect(NOW, dry_run=True)
    assert {key: storage.get(key) for key in keys(storage)} == before
    assert repository.expire_snapshots(keep_last=2).expired == planned.expired
    dry = repository.garbage_collect(NOW, dry_run=True)
    assert dry.deleted > 0
    wet = repository.garbage_collect(NOW)
    assert (wet.objects, wet.nbytes) == (dry.objects, dry.nbytes)


def test_the_search_begins_where_the_last_one_ended_and_pending_snapshots_tell_the_rest() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    for value in range(14):
        fill(repository, value)
    assert repository.garbage_collect(NOW).complete
    repository.expire_snapshots(keep_last=1)
    root = root_of(storage)
    assert root.swept > 0
    assert root.pending
    report = repository.garbage_collect(NOW)
    assert not report.complete
    # Older than where the search began, so known from the snapshots that have expired alone.
    assert report.objects["chunks"] == 8 * 4  # those before the fold that lies below
    assert report.objects["snapshots"] == 16
    root = root_of(storage)
    assert root.pending == ()


def test_every_tenth_collection_looks_at_everything() -> None:
    repository = make(MemoryStorage())
    looked = [repository.garbage_collect(NOW).complete for _ in range(20)]
    assert looked[0]
    assert [i for i, complete in enumerate(looked) if complete and i] == [9, 19]


# --- what expires --------------------------------------------------------------------------------


def test_a_long_history_expires_without_decoding_what_each_of_its_snapshots_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    zm.create(storage)
    for i in range(30):
        with zm.open(storage).transaction("main", message=f"{i}") as store:
            zarr.create_group(store, path=f"g{i}")
    parsed = 0
    parse_all = DeltaEntry.parse_all.__func__  # type: ignore[attr-defined]

    def counted(cls: type[DeltaEntry], fields: Any, name: str) -> tuple[DeltaEntry, ...]:
        nonlocal parsed
        found: tuple[DeltaEntry, ...] = parse_all(cls, fields, name)
        parsed += len(found)
        return found

    monkeypatch.setattr(DeltaEntry, "parse_all", classmethod(counted))
    report = zm.open(storage).expire_snapshots(keep_last=2)
    assert report.kept["main"] == 2
    assert len(report.expired["main"]) == 29
    assert parsed < 30  # of one snapshot: the newest that leaves, for its history


def test_expiry_goes_by_a_point_in_time() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    for value in range(4):
        clock.advance(timedelta(days=1, milliseconds=1))
        fill(repository, value)
    third = list(repository.ancestry())[1].written_at
    later = third + timedelta(milliseconds=1)
    assert repository.expire_snapshots(older_than=later, dry_run=True).kept == {"main": 1}
    kept = repository.expire_snapshots(keep_last=3, older_than=later, dry_run=True).kept
    assert kept == {"main": 3}
    assert repository.expire_snapshots(older_than=third.replace(tzinfo=None)).kept == {"main": 2}
    with pytest.raises(InvalidArgumentError, match="not both"):
        repository.expire_snapshots(max_age=timedelta(days=1), older_than=third)
    with pytest.raises(InvalidArgumentError, match="older_than must be a datetime"):
        repository.expire_snapshots(older_than=timedelta(days=1))  # type: ignore[arg-type]


def test_expiry_keeps_what_is_new_enough_or_needed() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    written = []
    for value in range(6):
        clock.advance(timedelta(days=1))
        written.append(fill(repository, value))
    repository.create_tag("second", written[1])
    repository.create_branch("side", written[3])
    with repository.lease(written[2]):
        report = repository.expire_snapshots(keep_last=1, max_age=timedelta(hours=30))
        assert report.kept == {"main": 4, "side": 2}  # down to the leased one
    report = repository.expire_snapshots(keep_last=1, max_age=timedelta(hours=30))
    assert report.kept == {"main": 2, "side": 1}
    repository.garbage_collect(NOW)
    assert [i.snapshot_id for i in repository.ancestry()] == written[:3:-1]
    assert [i.snapshot_id for i in repository.ancestry("second")] == [written[1]]
    assert read(repository.readonly_session("second")) == [1] * 8
    assert read(repository.readonly_session("side")) == [3] * 8
    with pytest.raises(SnapshotExpiredError):
        repository.readonly_session(written[0])
    with pytest.raises(SnapshotExpiredError):
        repository.create_branch("late", written[2])
    assert repository.verify().ok
    with pytest.raises(InvalidArgumentError):
        repository.expire_snapshots()


def test_the_first_expiry_waits_for_a_lease_on_what_tags_alone_have() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    fill(repository, 0)
    repository.create_branch("side")
    with repository.transaction("side", message="leased") as store:
        zarr.open_array(store, path="a")[:] = 7
    leased = repository.list_branches()["side"]
    with repository.transaction("side", message="tagged") as store:
        zarr.open_array(store, path="a")[:] = 8
    repository.create_tag("kept", repository.list_branches()["side"])
    repository.delete_branch("side")
    fill(repository, 1)
    with repository.lease(leased) as lease:
        for dry_run in (True, False):
            report = repository.expire_snapshots(keep_last=1, dry_run=dry_run)
            assert (report.snapshots, report.kept) == ((), {"main": 4})
        renew_all(context_of(repository))
        lease.check()
        repository.garbage_collect(NOW)
        assert read(repository.readonly_session(leased)) == [7] * 8
    assert repository.expire_snapshots(keep_last=1).kept == {"main": 1}
    assert [i.message for i in repository.ancestry("kept")] == ["tagged"]
    repository.garbage_collect(NOW)
    with pytest.raises(SnapshotExpiredError):
        repository.create_branch("late", leased)


@pytest.mark.parametrize("how", ["tagged", "on a branch", "in no history"])
def test_the_first_expiry_waits_for_no_other_lease(how: str) -> None:
    storage = MemoryStorage()
    repository = make(storage)
    repository.create_branch("side")
    leased, last = fill(repository, 7, "side"), fill(repository, 8, "side")
    repository.create_tag("kept", leased if how == "tagged" else last)
    with repository.lease(leased):
        if how != "on a branch":
            repository.delete_branch("side")
        if how == "in no history":
            repository.delete_tag("kept")
            repository.create_tag("another")
        fill(repository, 1)
        assert len(repository.expire_snapshots(keep_last=1).expired["main"]) == 2
        repository.garbage_collect(NOW)
        assert read(repository.readonly_session(leased)) == [7] * 8


def test_looking_for_leases_below_tags_walks_each_history_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repository = make(MemoryStorage())
    repository.create_branch("side")
    leased = fill(repository, 7, "side")
    for value in range(20):
        fill(repository, value)
        repository.create_tag(f"t{value}")
    walked: list[str] = []

    def counted(*given: Any) -> Any:
        for ref, snapshot in ages(*given):
            walked.append(ref.key)
            yield ref, snapshot

    with repository.lease(leased):
        repository.delete_branch("side")
        monkeypatch.setattr("zarr_manifests.engine.upkeep.expire.ages", counted)
        assert repository.expire_snapshots(keep_last=1, dry_run=True).kept == {"main": 1}
    # In the branch, and by way of tags; where one tag's way meets another's it ends.
    assert len(walked) <= 2 * len(set(walked)) + 20


def test_a_branch_made_from_a_cut_history_has_its_floor() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    written = [fill(repository, value) for value in range(4)]
    repository.expire_snapshots(keep_last=2)
    repository.create_branch("head")
    repository.create_branch("older", written[2])
    repository.garbage_collect(NOW)
    assert [i.snapshot_id for i in repository.ancestry("head")] == [written[3], written[2]]
    assert [i.snapshot_id for i in repository.ancestry("older")] == [written[2]]
    assert repository.verify().ok


def test_a_deleted_branch_goes_although_it_is_older_than_the_last_search() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    repository.create_branch("side")
    fill(repository, 7, "side")
    repository.garbage_collect(NOW)
    repository.delete_branch("side")
    assert repository.garbage_collect(NOW).objects["chunks"] == 4


def test_an_amended_head_goes_although_it_is_older_than_the_last_search() -> None:
    repository = make(MemoryStorage())
    session = repository.writable_session()
    write(session, 2)
    session.commit("to be amended")
    repository.garbage_collect(NOW)
    session = repository.writable_session()
    write(session, 3)
    session.amend("amended")
    report = repository.garbage_collect(NOW)
    assert report.objects["snapshots"] == 1
    assert report.objects["chunks"] == 4
    assert read(repository.readonly_session()) == [3] * 8
    assert repository.verify().ok


def test_changes_over_what_has_expired_are_refused_whole() -> None:
    repository = make(MemoryStorage())
    written = [fill(repository, value) for value in range(6)]
    repository.expire_snapshots(keep_last=3)
    for collected in (False, True):
        if collected:
            repository.garbage_collect(NOW)
        again = zm.open(repository.storage, runtime=world())
        for since in written[:3]:
            with pytest.raises(HistoryExpiredError):
                list(again.changes(since))
        found = list(again.changes(written[3]))
        assert [change.snapshot_id for change in found] == written[4:]


def test_a_collection_tells_how_far_it_is_and_what_it_deleted_by_kind() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    for value in range(60):
        fill(repository, value)
    repository.expire_snapshots(keep_last=1)
    sizes = {info.key: info.nbytes for info in storage.list()}
    told: list[tuple[str, int]] = []
    report = repository.garbage_collect(
        NOW, progress=lambda stage, done: told.append((stage, done))
    )
    gone = sizes.keys() - keys(storage)
    kinds = {key.partition("/")[0] for key in gone}
    assert report.objects == {
        kind: sum(key.startswith(f"{kind}/") for key in gone) for kind in kinds
    }
    assert report.nbytes == {
        kind: sum(sizes[key] for key in gone if key.startswith(f"{kind}/")) for kind in kinds
    }
    assert {"chunks", "deltas", "nodes", "snapshots"} <= kinds
    assert {stage for stage, _ in told} >= {"marking", "deleting"}
    assert told[-1] == ("deleting", len(gone))


# --- beside writers and readers ------------------------------------------------------------------


def test_a_writer_that_a_collection_outlived_is_refused() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    session = repository.writable_session()
    write(session, 5)
    report = zm.open(storage, runtime=world()).garbage_collect(NOW)
    assert report.objects["chunks"] == 4  # those of the session
    with pytest.raises(FencedError):
        session.commit("too late")
    assert read(repository.readonly_session()) == [1] * 8
    assert repository.verify().ok


@pytest.mark.parametrize("forked", [False, True])
def test_what_a_writer_wrote_and_a_collection_took_is_not_told_as_damage(forked: bool) -> None:
    storage = MemoryStorage()
    repository = make(storage)
    session = repository.writable_session()
    writer = session.fork() if forked else session
    zarr.open_array(writer.store, path="a")[:] = 5
    repository.create_tag("meanwhile")
    zm.open(storage, runtime=world()).garbage_collect(NOW)
    with pytest.raises(FencedError, match="collection has taken chunks/"):
        writer.store.get_sync("a/c/0")


def test_what_is_missing_of_what_a_writer_wrote_is_damage_unless_the_fence_has_passed() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    chunks = {key for key in keys(storage) if key.startswith("chunks/")}
    session = repository.writable_session()
    write(session, 5)
    storage.delete_many({key for key in keys(storage) if key.startswith("chunks/")} - chunks)
    with pytest.raises(MissingChunkError):
        session.store.get_sync("a/c/0")
    repository.create_tag("meanwhile")
    zm.open(storage, runtime=world()).garbage_collect(NOW)
    storage.delete_many(chunks)
    fresh = zm.open(storage, runtime=world()).writable_session()
    with pytest.raises(MissingChunkError):  # it is not the session's own
        fresh.store.get_sync("a/c/0")
    with pytest.raises(FencedError):
        session.store.get_sync("a/c/0")


def test_a_writer_within_the_grace_goes_on() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    clock.advance(timedelta(hours=48))
    fill(repository, 2)
    session = repository.writable_session()
    write(session, 5)
    clock.advance(timedelta(hours=23))
    fill(repository, 3)
    report = repository.garbage_collect(timedelta(hours=24))
    assert 0 < report.fence <= 3
    with pytest.raises(ConflictError):
        session.commit("the same chunks")  # refused for what the other did, not for its age
    assert report.objects == {}


def test_the_fence_is_found_among_archives_when_the_log_has_rolled() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    for value in range(60):
        clock.advance(timedelta(hours=1))
        fill(repository, value)
    versions = {one.version: one.at for one in repository.ops_log()}
    fence = repository.garbage_collect(timedelta(hours=50)).fence
    now = max(versions.values())
    assert now - versions[fence] >= timedelta(hours=50)
    assert now - versions[fence + 2] < timedelta(hours=50)


def test_a_leased_writer_is_not_refused_and_loses_nothing() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    session = repository.writable_session(lease=60)
    write(session, 5, slice(0, 2))
    base = session.snapshot_id
    other = zm.open(storage, runtime=world())
    other_session = other.writable_session()
    write(other_session, 9, slice(6, 8))
    other_session.commit("elsewhere")
    other.expire_snapshots(keep_last=1)
    assert base in {info.snapshot_id for info in other.ancestry()}
    assert other.garbage_collect(NOW).objects.get("chunks", 0) == 0
    session.commit("at leisure")
    assert read(repository.readonly_session()) == [5, 5, 1, 1, 1, 1, 9, 9]
    write(session, 6, slice(2, 4))
    zm.open(storage, runtime=world()).garbage_collect(NOW)
    session.commit("the lease goes on with it")
    session.discard_changes()
    write(session, 8, slice(2, 4))
    zm.open(storage, runtime=world()).garbage_collect(NOW)
    session.commit("after a discard, too")
    commits_of(session).writer.release_lease()
    write(session, 3)
    zm.open(storage, runtime=world()).garbage_collect(NOW)
    with pytest.raises(FencedError):
        session.commit("without")
    assert repository.verify().ok


def test_what_copies_of_a_leased_session_write_is_kept() -> None:
    storage = MemoryStorage("leased-copies")
    repository = make(storage)
    session = repository.writable_session(lease=60)
    fork = session.fork()
    zarr.open_array(fork.store, path="a")[:] = 4
    freeze_store(fork.store)
    zm.open(storage, runtime=world()).garbage_collect(NOW)
    session.merge(fork)
    session.commit("from a copy")
    assert read(repository.readonly_session()) == [4] * 8


def test_a_lease_cannot_bring_back_a_session_behind_the_fence() -> None:
    """Its objects are gone already; only the lease check inside the swap knows."""
    storage = MemoryStorage()
    repository = make(storage)
    session = repository.writable_session()
    write(session, 5)
    repository.garbage_collect(NOW)
    own = workspace_of(session.store).keys.session_id
    with pytest.raises(FencedError):
        take(context_of(repository), session.snapshot_id, 60_000, "", own)


def test_a_commit_made_on_an_expired_snapshot_is_a_conflict_and_refers_to_nothing_dead() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    fill(repository, 2)
    later = repository.writable_session()
    later.shift_array("a", (1,))  # refers to chunks of the snapshot it began at
    fill(repository, 3)
    for value in range(12):
        fill(repository, value)  # folds, so that the head does not reach them any more
    repository.expire_snapshots(keep_last=1)
    with pytest.raises((ConflictError, FencedError)):
        later.commit("on what has expired")
    assert repository.verify().ok


def test_a_commit_is_not_put_on_top_of_a_history_that_begins_after_it() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    session = repository.writable_session()
    write(session, 5, slice(0, 2))
    clock.advance(timedelta(days=1))
    other = zm.open(storage, runtime=world(clock))
    elsewhere = other.writable_session()
    write(elsewhere, 9, slice(6, 8))
    elsewhere.commit("another chunk")
    other.expire_snapshots(keep_last=1)
    report = other.garbage_collect(timedelta(hours=12))
    assert (
        report.fence == workspace_of(session.store).keys.start
    )  # so it is not refused for its age
    assert report.objects["snapshots"] == 2
    with pytest.raises(ConflictError, match="expired"):
        session.commit("on what is gone")


def test_logs_that_no_read_list_names_any_more_are_kept_with_their_snapshots() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    for value in range(14):
        fill(repository, value)
    repository.expire_snapshots(keep_last=12)
    repository.garbage_collect(NOW)
    again = zm.open(storage, runtime=world())
    line = [info.snapshot_id for info in again.ancestry()]
    assert len(line) == 12
    assert len(again.diff(line[-1], line[0]).chunks["/a"]) == 4
    assert len(list(again.changes(line[-1]))) == 10  # the fold is not seen


def test_the_head_after_an_expiry_cannot_be_amended_on_what_is_gone() -> None:
    repository = make(MemoryStorage())
    fill(repository, 2)
    session = repository.writable_session()
    repository.expire_snapshots(keep_last=1)
    with pytest.raises(ConflictError, match="expired"):
        session.amend("another message")
    with pytest.raises(SnapshotExpiredError):
        repository.revert(session.snapshot_id)


@pytest.mark.parametrize("moved", [False, True])
def test_an_amendment_of_what_has_lost_its_parent_is_not_told_as_damage(moved: bool) -> None:
    storage = MemoryStorage()
    repository = make(storage)
    fill(repository, 2)
    session = zm.open(storage, runtime=world()).writable_session(lease=60)
    other = zm.open(storage, runtime=world())
    if moved:
        fill(other, 3)
    other.expire_snapshots(keep_last=1)
    assert other.garbage_collect(NOW).objects["snapshots"] >= 2
    with pytest.raises(ConflictError, match="not the head" if moved else "has expired"):
        session.amend("another message")


def test_what_is_missing_before_an_amended_head_in_history_is_damage() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    fill(repository, 2)
    session = zm.open(storage, runtime=world()).writable_session()
    parent = contents_of(session.store).view.snapshot.parent
    assert parent is not None
    storage.delete_many([parent.key])
    with pytest.raises(CorruptObjectError, match="not there"):
        session.amend("another message")


def test_a_reader_of_an_expired_snapshot_is_told_so_and_a_leased_one_reads_on() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    opened = zm.open(storage, runtime=world())
    reader = opened.readonly_session()
    leased = zm.open(storage, runtime=world())
    kept = leased.readonly_session()
    follower = zm.open(storage, runtime=world()).readonly_session(follow=True)
    with leased.lease(kept.snapshot_id) as lease:
        fill(repository, 2)
        repository.expire_snapshots(keep_last=1)
        repository.garbage_collect(NOW)
        assert read(kept) == [1] * 8
        assert read(reader) == [1] * 8
        lease.check()
    for value in range(12):
        fill(repository, value)
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(NOW)
    contents = SessionView(context_of(opened), contents_of(reader.store).view)
    session = Session(Pin(contents, None))
    with pytest.raises(SnapshotExpiredError, match="has expired"):
        read(session)
    assert read(follower) == [11] * 8
    assert reader.rebase() == repository.list_branches()["main"]
    assert read(reader) == [11] * 8


@pytest.mark.parametrize("key", ["a/c/0", "a/zarr.json"])
def test_a_deletion_in_an_expired_snapshot_is_told_so(key: str) -> None:
    storage = MemoryStorage()
    repository = make(storage)
    repository.compact("main", "full")
    session = zm.open(storage, runtime=world()).writable_session()
    fill(repository, 2)
    repository.compact("main", "full")
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(NOW)
    with pytest.raises(SnapshotExpiredError, match="has expired"):
        session.store.delete_sync(key)


def test_what_is_damaged_is_not_told_as_expired() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    chunk = next(key for key in keys(storage) if key.startswith("chunks/"))
    storage.delete_many([chunk])
    with pytest.raises(ManifestsError) as caught:
        read(repository.readonly_session())
    assert not isinstance(caught.value, SnapshotExpiredError)


def test_a_follower_looks_at_its_interval() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    follower = repository.readonly_session(follow=True, follow_interval=timedelta(seconds=30))
    fill(repository, 2)
    assert read(follower) == [1] * 8
    clock.advance(timedelta(seconds=31))
    assert read(follower) == [2] * 8


# --- leases --------------------------------------------------------------------------------------


def leases(storage: Storage) -> tuple[Any, ...]:
    return root_of(storage).leases


def test_leases_are_renewed_together_without_log_or_archive() -> None:
    clock, storage = Clock(), MemoryStorage()
    beats: list[tuple[float, Callable[[], None]]] = []

    def later(delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        beats.append((delay_s, call))
        return lambda: None

    repository = make(storage, replace(world(clock), later=later))
    head = repository.list_branches()["main"]
    before = root_of(storage)
    with repository.lease(head, 120), repository.lease(head, 60):
        first = {lease.lease_id: lease.expires_ms for lease in leases(storage)}
        assert len(first) == 2
        assert beats[-1][0] == 20
        clock.advance(timedelta(seconds=20))
        swaps = root_of(storage).version
        beats[-1][1]()
        root = root_of(storage)
        assert root.version == swaps + 1
        assert {one.lease_id: one.expires_ms for one in root.leases} == {
            lease_id: at + 20_000 for lease_id, at in first.items()
        }
        assert len(beats) >= 2
    root = root_of(storage)
    assert root.leases == ()
    assert root.log == before.log
    archives = [int(key[5:]) for key in keys(storage) if key.startswith("root/")]
    assert max(archives) == before.version
    fill(repository, 2)
    assert repository.verify().ok
    assert [one.version for one in repository.ops_log()][:2] == [root.version + 1, before.version]


def test_a_reader_gets_a_lease_at_whatever_moment_of_a_collection() -> None:
    """No fence is in its way: it needs its snapshot, and has no objects of its own."""
    storage = MemoryStorage()
    make(storage)
    for number in range(1, 20):
        other = zm.open(storage, runtime=world())
        racing = InterruptingStorage(storage, partial(other.garbage_collect, NOW))
        repository = zm.open(racing, runtime=world())
        head = repository.list_branches()["main"]
        racing.arm(number)
        with repository.lease(head) as lease:
            assert [one.snapshot for one in leases(storage)] == [head] or len(racing.ops) < number
            lease.check()
        if len(racing.ops) < number:
            break
    assert 3 < number < 19


def test_a_lease_counts_until_a_collection_removes_it() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    session = repository.writable_session(lease=10)
    write(session, 5)
    clock.advance(timedelta(days=3))  # long over its time, and there still
    session.commit("late and fine")
    write(session, 6)
    clock.advance(timedelta(days=3))
    assert repository.garbage_collect(NOW).leases_removed == 1
    with pytest.raises(FencedError):
        session.commit("now it is gone")


def test_a_lease_lets_its_writer_through_the_fence_after_its_time() -> None:
    """Its time only says when a collection may remove it, and none has since."""
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    session = repository.writable_session(lease=60)
    write(session, 5)
    report = zm.open(storage, runtime=world(clock)).garbage_collect(NOW)
    assert workspace_of(session.store).keys.start < report.fence
    clock.advance(timedelta(days=3))
    session.commit("behind the fence, and leased")
    assert read(repository.readonly_session()) == [5] * 8
    assert repository.verify().ok


def test_a_leased_snapshot_stays_when_nothing_else_leads_to_it() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    repository.create_branch("side")
    snapshot_id = fill(repository, 7, "side")
    with repository.lease(snapshot_id):
        reader = repository.readonly_session("side")
        repository.delete_branch("side")
        assert zm.open(storage, runtime=world(clock)).garbage_collect(NOW).deleted == 0
        again = zm.open(storage, runtime=world(clock))
        assert again.verify().problems == ()
        assert read(reader) == [7] * 8
    assert repository.garbage_collect(NOW).objects["chunks"] == 4


def test_a_lost_lease_is_not_renewed() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    with repository.lease(repository.list_branches()["main"], 10) as lease:
        clock.advance(timedelta(seconds=11))
        repository.garbage_collect(NOW)
        renew_all(context_of(repository))
        assert lease.lost
        assert leases(storage) == ()
        with pytest.raises(FencedError):
            lease.check()
    never = "000000000001-" + "0" * 24 + "-7"
    with pytest.raises(SnapshotExpiredError), repository.lease(never):
        pass


def test_a_kept_lease_outlives_its_block_for_its_timeout() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    with repository.lease(repository.list_branches()["main"], 10) as given_up:
        given_up.keep()
        given_up.keep(False)
    assert leases(storage) == ()
    with repository.lease(repository.list_branches()["main"], 10) as lease:
        assert not lease.kept
        lease.keep()
        assert lease.kept
        clock.advance(timedelta(seconds=6))
    clock.advance(timedelta(seconds=9))
    renew_all(context_of(repository))  # which nobody does for it any more
    repository.garbage_collect(NOW)
    assert [one.snapshot for one in leases(storage)] == [lease.snapshot_id]
    clock.advance(timedelta(seconds=2))
    repository.garbage_collect(NOW)
    assert leases(storage) == ()


def test_a_lease_takes_the_place_of_its_owners_others_in_one_swap() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    first, second = repository.list_branches()["main"], fill(repository, 1)
    with repository.lease(first, owner="other"):
        for owner in ("job", "job"):
            with repository.lease(first, owner=owner) as kept:
                kept.keep()
        before = root_of(storage).version
        with repository.lease(second, owner="job", instead=True) as lease:
            assert root_of(storage).version == before + 1
            assert {(x.snapshot, x.owner) for x in leases(storage)} == {
                (first, "other"),
                (second, "job"),
            }
            lease.check()
        assert [x.owner for x in leases(storage)] == ["other"]
    with (
        pytest.raises(InvalidArgumentError, match="pass an owner"),
        repository.lease(first, instead=True),
    ):
        pass


def test_swept_stays_behind_the_oldest_lease() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    session = repository.writable_session(lease=60)
    start = workspace_of(session.store).keys.start
    write(session, 5)
    fill(repository, 2)
    repository.garbage_collect(NOW)
    assert root_of(storage).swept == start
    commits_of(session).writer.release_lease()
    report = repository.garbage_collect(NOW)
    assert not report.complete
    assert report.objects["chunks"] == 4  # those of the session, found by the search


# --- failures and races --------------------------------------------------------------------------


def prepared() -> MemoryStorage:
    storage = MemoryStorage()
    repository = make(storage)
    repository.create_branch("side")
    fill(repository, 1, "side")
    for value in range(4):
        fill(repository, value)
    repository.create_tag("kept", repository.list_branches()["main"])
    for value in range(12):
        fill(repository, 10 + value)
    repository.delete_branch("side")
    session = repository.writable_session()
    write(session, 99)
    repository.expire_snapshots(keep_last=2)
    return storage


@pytest.mark.slow
@some_or_all
def test_a_crash_at_any_call_of_a_collection_loses_nothing(every: int) -> None:
    made = prepared()
    faulty = FaultyStorage(copy_of(made))
    zm.open(faulty, runtime=world()).garbage_collect(NOW)
    calls = len(faulty.calls)
    assert calls > 20
    kinds = ("crash_before", "crash_after", "lose_answer", "fail_after")
    cases = itertools.product(range(1, calls + 1), kinds)
    for number, kind in itertools.islice(cases, 0, None, every):
        storage = copy_of(made)
        faulty = FaultyStorage(storage)
        faulty.fail_at(number, kind)  # type: ignore[arg-type]
        with contextlib.suppress(SimulatedCrash, ManifestsError):
            zm.open(faulty, runtime=world()).garbage_collect(NOW)
        repository = zm.open(storage, runtime=world())
        assert repository.verify().problems == (), (number, kind, faulty.calls[number - 1])
        assert read(repository.readonly_session()) == [21] * 8
        assert read(repository.readonly_session("kept")) == [3] * 8
        fill(repository, 50)
        for _ in range(2):
            repository.expire_snapshots(keep_last=1)
            repository.garbage_collect(NOW)
        assert repository.verify().ok
        assert dead_chunks(storage) == 0


def dead_chunks(storage: Storage) -> int:
    """How many chunk objects a dry run that looks at everything would delete."""
    root = Roots(storage, SYSTEM).read()
    whole = replace(root.root, swept=0, pending=())
    copy = copy_of(storage)
    copy.put("current", whole.encode())
    report = zm.open(copy, runtime=world()).garbage_collect(NOW, dry_run=True)
    return report.objects.get("chunks", 0)


@some_or_all
def test_commits_at_any_moment_of_a_collection_are_whole_or_refused(every: int) -> None:
    """Of a session opened before, with and without a lease, and of one opened at that moment."""
    made = prepared()
    counting = InterruptingStorage(copy_of(made), lambda: None)
    zm.open(counting, runtime=world()).garbage_collect(NOW)
    landed = refused = 0
    moments = chosen(len(counting.ops), every)
    for number in moments:
        for leased in (False, True):
            storage = copy_of(made)
            writer = zm.open(storage, runtime=world())
            session = writer.writable_session(lease=60 if leased else None)
            write(session, 70, slice(0, 2))
            done: list[str] = []

            def commit(
                session: Session = session, done: list[str] = done, writer: Repository = writer
            ) -> None:
                nonlocal refused
                try:
                    done.append(session.commit("meanwhile"))
                except FencedError:
                    refused += 1
                fresh = writer.writable_session()
                write(fresh, 71, slice(4, 6))
                done.append(fresh.commit("new"))
                writer.create_branch("new")

            racing = InterruptingStorage(storage, commit, number)
            zm.open(racing, runtime=world()).garbage_collect(NOW)
            after = zm.open(storage, runtime=world())
            if not done:
                continue  # the other run made more calls
            history = {info.snapshot_id for info in after.ancestry()}
            assert set(done) <= history
            assert after.verify().problems == (), number
            if leased:
                assert len(done) == 2
                assert read(after.readonly_session()) == [70, 70, 21, 21, 71, 71, 21, 21]
            landed += len(done)
    assert landed > len(moments) * (3 if every == 1 else 2)
    assert refused > 0


def test_a_tip_that_goes_while_a_commit_is_put_on_top_of_it_is_not_told_as_damage() -> None:
    """The branch is reset and its old tip collected, at any moment of the commit."""

    def race(number: int) -> int:
        clock, storage = Clock(), MemoryStorage()
        repository = make(storage, world(clock))
        base = repository.readonly_session().snapshot_id
        elsewhere = repository.writable_session()
        write(elsewhere, 9, slice(6, 8))
        repository.create_tag("t", base)

        def reset() -> None:
            again = zm.open(storage, runtime=world(clock))
            again.reset_branch("main", base, force=True)
            again.expire_snapshots(keep_last=1)
            report = again.garbage_collect(timedelta(hours=12))
            assert report.fence == workspace_of(session.store).keys.start
            assert tip not in {info.snapshot_id for info in again.ancestry()}

        racing = InterruptingStorage(storage, reset)
        session = zm.open(racing, runtime=world(clock)).writable_session()
        write(session, 5, slice(0, 2))
        clock.advance(timedelta(days=1))
        elsewhere.commit("another chunk")
        write(elsewhere, 8, slice(6, 8))
        tip = elsewhere.commit("again")
        racing.arm(number)
        session.commit("on top of it")  # or of what there is instead
        after = zm.open(storage, runtime=world(clock))
        assert after.verify().problems == ()
        return len(racing.ops)

    calls = race(0)
    assert calls >= 8
    for number in range(1, calls + 1):
        race(number)


@pytest.mark.parametrize("how", ["branch", "time", "writable", "exclusive"])
def test_a_head_that_goes_while_it_is_opened_is_not_told_as_damage(how: str) -> None:
    """The branch is reset and its old head collected, at any moment of the opening."""
    clock, made = Clock(), MemoryStorage()
    repository = make(made, world(clock))
    base = repository.readonly_session().snapshot_id
    for value in range(2):
        clock.advance(timedelta(days=1))
        session = repository.writable_session()
        root = zarr.open_group(session.store)
        root.attrs["large"] = np.random.default_rng(value).bytes(20_000).hex()  # not kept as copy
        session.commit("large")
    moment = datetime.fromtimestamp(clock.ms / 1000 - 3_600, UTC)
    before = [info.snapshot_id for info in repository.ancestry()]

    def race(number: int) -> int:
        storage = copy_of(made)

        def reset() -> None:
            again = zm.open(storage, runtime=world(clock))
            again.reset_branch("main", base, force=True)
            again.expire_snapshots(keep_last=1)
            assert again.garbage_collect(NOW).objects["snapshots"] >= 2

        racing = InterruptingStorage(storage, reset)
        repository = zm.open(racing, runtime=world(clock))
        repository.readonly_session(base)
        clock.advance(timedelta(hours=1))
        racing.arm(number)
        match how:
            case "branch":
                session = repository.readonly_session()
            case "time":
                session = repository.readonly_session(f"main@{moment}")
            case _:
                session = repository.writable_session(exclusive=how == "exclusive")
        due = before[1 if how == "time" else 0]
        assert session.snapshot_id in (due, base)
        seen.add(session.snapshot_id)
        return len(racing.ops)

    seen: set[str] = set()
    calls = race(0)
    for number in range(1, calls + 1):
        race(number)
    assert len(seen) == 2


def test_what_is_missing_of_a_head_in_history_is_damage() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    with repository.transaction(message="large") as store:
        zarr.open_group(store).attrs["large"] = np.random.default_rng(1).bytes(20_000).hex()
    view = contents_of(repository.readonly_session().store).view
    storage.delete_many([view.snapshot.log.key])
    fresh = zm.open(storage, runtime=world())
    for open_it in (fresh.readonly_session, fresh.writable_session):
        with pytest.raises(CorruptObjectError, match="not there"):
            open_it()


def test_what_is_missing_of_a_tip_in_history_is_damage() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    session = zm.open(storage, runtime=world()).writable_session()
    write(session, 5, slice(0, 2))
    for value in range(2):
        with repository.transaction(message="other") as store:
            zarr.open_array(store, path="a")[6:] = value
    repository.compact("main", "full")  # the tip's list tells nothing of those commits any more
    parent = contents_of(repository.readonly_session().store).view.snapshot.parent
    assert parent is not None
    storage.delete_many([parent.key])
    with pytest.raises(CorruptObjectError, match="not there"):
        session.commit("on what is damaged")


def test_what_cannot_be_read_stops_the_deletions() -> None:
    storage = prepared()
    repository = zm.open(storage, runtime=world())
    ref = contents_of(repository.readonly_session().store).view.manifests[0].blob
    storage.put(ref.key, b"damaged")
    before = [key for key in keys(storage) if not key.startswith("root/")]
    with pytest.raises(CorruptObjectError):
        zm.open(storage, runtime=world()).garbage_collect(NOW)
    assert [key for key in keys(storage) if not key.startswith("root/")] == before


def test_the_root_is_archived_before_anything_is_deleted() -> None:
    """Else the newest archive leads to what is gone, should the root be lost then."""
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, world(clock))
    repository.create_branch("side")
    take(context_of(repository), fill(repository, 7, "side"), 10_000, "")
    repository.delete_branch("side")
    clock.advance(timedelta(days=1))
    faults = [
        Fault("fail_before", op="create_after", count=None),
        Fault("crash_after", op="delete_many", key="snapshots/*"),
    ]
    with pytest.raises(SimulatedCrash):
        zm.open(FaultyStorage(storage, faults), runtime=world(clock)).garbage_collect(NOW)
    storage.delete_many(["current"])
    assert zm.recover(storage, runtime=world(clock)).skipped == {}
    assert read(zm.open(storage, runtime=world()).readonly_session()) == [1] * 8


@pytest.mark.slow
def test_a_second_collector_takes_over() -> None:
    made = prepared()
    counting = InterruptingStorage(copy_of(made), lambda: None)
    zm.open(counting, runtime=world()).garbage_collect(NOW)
    for number in range(1, len(counting.ops) + 1):
        storage = copy_of(made)
        other = zm.open(storage, runtime=world())
        racing = InterruptingStorage(storage, partial(other.garbage_collect, NOW), number)
        with contextlib.suppress(FencedError):
            zm.open(racing, runtime=world()).garbage_collect(NOW)
        after = zm.open(storage, runtime=world())
        assert after.verify().problems == ()
        assert read(after.readonly_session()) == [21] * 8
        assert dead_chunks(storage) == 0


@pytest.mark.slow
def test_pages_that_archives_name_are_kept() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    root = root_of(storage)
    head = root.branches["main"].bare().head

    def more(letter: str) -> None:
        names = [letter + sha256(bytes([i % 251, i // 251])).hexdigest() for i in range(900)]
        change_root(
            repository,
            "create tag",
            lambda root: replace(root, tags={**root.tags, **dict.fromkeys(names, head)}),
        )

    def pages() -> set[str]:
        return {ref.blob.key for ref in root_of(storage).pages["tags"]}

    more("a")
    before = pages()
    version = root_of(storage).version
    more("b")
    gone = before - pages()
    assert gone
    repository.garbage_collect(NOW)
    assert gone <= set(keys(storage))  # the archive of that version names them
    assert repository.verify().problems == ()
    assert len(repository.list_tags()) == 1800
    for value in range(110):
        fill(repository, value % 9)
    repository.garbage_collect(NOW)
    assert f"root/{version:020d}" not in keys(storage)
    repository.garbage_collect(NOW)
    assert repository.verify().problems == ()


def test_stale_temporary_files_of_a_disk_go_by_their_age(tmp_path: Any) -> None:
    repository = zm.create(LocalStorage(tmp_path))
    for name, age_s in ((".tmp-1-0", 200_000), (".tmp-1-1", 10)):
        path = tmp_path / "root" / name
        path.write_bytes(b"left")
        at = context_of(repository).runtime.now_ms() / 1000 - age_s
        os.utime(path, (at, at))
    assert repository.garbage_collect().temporary_files == 1
    assert [p.name for p in (tmp_path / "root").glob(".tmp*")] == [".tmp-1-1"]


def test_folders_that_a_collection_has_emptied_go_a_day_later(tmp_path: Any) -> None:
    repository = make(LocalStorage(tmp_path), SYSTEM)
    for value in range(30):
        fill(repository, value)
    repository.expire_snapshots(keep_last=1)

    def empty() -> int:
        return sum(not list(p.iterdir()) for p in tmp_path.rglob("*") if p.is_dir())

    repository.garbage_collect(NOW)
    left = empty()
    assert left >= 30
    repository.garbage_collect(NOW)
    assert empty() == left  # somebody may be about to write there
    before = {p for p in tmp_path.iterdir() if p.is_dir()}
    for folder in (p for p in tmp_path.rglob("*") if p.is_dir()):
        at = SYSTEM.now_ms() / 1000 - 200_000
        os.utime(folder, (at, at))
    repository.garbage_collect(NOW)
    assert empty() <= 1  # but those of all sessions stay
    assert {p for p in tmp_path.iterdir() if p.is_dir()} == before
    fill(repository, 99)
    assert read(repository.readonly_session()) == [99] * 8
    assert repository.verify().ok
