"""Expiry and collection beside writers and readers: nothing lives on or dies that should not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from msgspec.structs import replace

import zarr_manifests as zm
from filled import NOW, Clock, fill, line, make, opened, read, runtime_of, write
from inside import change_root, root_of
from storages import (
    CountingStorage,
    Fault,
    FaultyStorage,
    InterruptingStorage,
    SimulatedCrash,
    WrappedStorage,
    copy_of,
)
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    FencedError,
    HistoryExpiredError,
    InvalidArgumentError,
    SnapshotExpiredError,
    StorageError,
)
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import ObjectInfo

OFTEN = {"max-delta-count": 10}


def live(storage: Storage) -> list[str]:
    """All objects but archives of the root."""
    return [info.key for info in storage.list() if not info.key.startswith("root/")]


# --- what expires --------------------------------------------------------------------------------


def test_expiry_goes_by_a_point_in_time() -> None:
    clock = Clock()
    repository = make(MemoryStorage(), clock)
    for value in range(4):
        clock.advance(timedelta(days=1, milliseconds=1))
        fill(repository, value)
    day = timedelta(days=1)
    assert repository.expire_snapshots(max_age=day, dry_run=True).versions == {"main": 1}
    kept = repository.expire_snapshots(keep_last=3, max_age=day, dry_run=True).versions
    assert kept == {"main": 3}
    longer = day + timedelta(milliseconds=1)
    assert repository.expire_snapshots(max_age=longer).versions == {"main": 2}
    with pytest.raises(InvalidArgumentError, match="give keep "):
        repository.expire_snapshots()
    wrong: Any = "30d"
    with pytest.raises(InvalidArgumentError, match=r"timedelta\(days=30\), not '30d'"):
        repository.clean(keep=wrong)


def test_a_negative_time_is_refused_and_nothing_expires() -> None:
    repository = make(MemoryStorage())
    fill(repository, 1)
    before = line(repository)
    calls: list[Callable[[timedelta], object]] = [
        lambda ago: repository.expire_snapshots(max_age=ago),
        repository.clean,
        lambda ago: repository.clean(1, grace=ago),
        repository.garbage_collect,
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="timedelta"):
            call(timedelta(seconds=-1))
    assert line(repository) == before


def test_expiry_keeps_what_is_new_enough_or_needed() -> None:
    clock = Clock()
    repository = make(MemoryStorage(), clock)
    written = []
    for value in range(6):
        clock.advance(timedelta(days=1))
        written.append(fill(repository, value))
    repository.create_tag("second", written[1])
    repository.create_branch("side", written[3])
    with repository.lease(written[2]):
        report = repository.expire_snapshots(keep_last=1, max_age=timedelta(hours=30))
        assert report.versions == {"main": 4, "side": 2}  # down to the leased one
    report = repository.expire_snapshots(keep_last=1, max_age=timedelta(hours=30))
    assert report.versions == {"main": 2, "side": 1}
    repository.garbage_collect(NOW)
    assert line(repository) == written[:3:-1]
    assert [i.snapshot_id for i in repository.ancestry("second")] == [written[1]]
    assert read(repository.readonly_session("second")) == [1] * 8
    assert read(repository.readonly_session("side")) == [3] * 8
    with pytest.raises(SnapshotExpiredError):
        repository.readonly_session(written[0])
    with pytest.raises(SnapshotExpiredError):
        repository.create_branch("late", written[2])
    assert repository.verify().ok


def test_tags_in_pages_are_sound_once_what_is_before_them_has_expired() -> None:
    storage, clock = MemoryStorage(), Clock()
    repository = make(storage, clock)
    fill(repository, 2)
    for i in range(200):
        repository.create_tag(f"release-number-{i:04d}")
    for i in range(5):
        fill(repository, i + 3)
    repository.create_branch("another")
    repository.expire_snapshots(keep_last=2)
    repository.garbage_collect(NOW)
    assert root_of(repository).pages
    assert opened(storage, clock).verify().problems == ()


def test_the_first_expiry_waits_for_a_lease_on_what_tags_alone_have() -> None:
    repository = make(MemoryStorage())
    repository.create_branch("side")
    leased = fill(repository, 7, "side")
    repository.create_tag("kept", fill(repository, 8, "side"))
    repository.delete_branch("side")
    fill(repository, 1)
    with repository.lease(leased) as lease:
        for dry_run in (True, False):
            report = repository.expire_snapshots(keep_last=1, dry_run=dry_run)
            assert (report.snapshots, report.versions) == ((), {"main": 3})
        repository.garbage_collect(NOW)
        assert read(repository.readonly_session(leased)) == [7] * 8
        lease.check()
    assert repository.expire_snapshots(keep_last=1).versions == {"main": 1}
    assert [i.message for i in repository.ancestry("kept")] == ["fill 8"]
    repository.garbage_collect(NOW)
    with pytest.raises(SnapshotExpiredError):
        repository.create_branch("late", leased)


def test_changes_over_what_has_expired_are_refused_whole() -> None:
    repository = make(MemoryStorage())
    written = [fill(repository, value) for value in range(6)]
    repository.expire_snapshots(keep_last=3)
    again = opened(repository.storage)
    for since in written[:3]:
        with pytest.raises(HistoryExpiredError):
            list(again.changes(since))
    found = list(again.changes(written[3]))
    assert [change.snapshot_id for change in found] == written[4:]


def test_the_head_after_an_expiry_cannot_be_amended_nor_reverted_to_what_is_gone() -> None:
    repository = make(MemoryStorage())
    fill(repository, 2)
    session = repository.writable_session()
    repository.expire_snapshots(keep_last=1)
    with pytest.raises(ConflictError, match="expired"):
        session.amend("another message")
    repository.garbage_collect(NOW)
    with pytest.raises(SnapshotExpiredError):
        repository.revert(session.snapshot_id)


# --- beside writers and readers ------------------------------------------------------------------


def test_a_writer_that_a_collection_outlived_is_refused() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    session = repository.writable_session()
    write(session, 5)
    report = opened(storage).garbage_collect(NOW)
    assert report.objects["chunks"] == 4  # those of the session
    with pytest.raises(FencedError):
        session.store.get_sync("a/c/0")
    with pytest.raises(FencedError):
        session.commit("too late")
    assert read(repository.readonly_session()) == [1] * 8
    assert repository.verify().ok


def test_the_fence_is_found_in_few_of_very_many_archives() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, clock)
    sessions = []
    for minute in range(500):
        clock.advance(timedelta(minutes=1))
        repository.create_branch("side")
        repository.delete_branch("side")
        if minute in (98, 99):
            sessions.append(write(opened(storage, clock).writable_session(), minute))
    counting = CountingStorage(storage)
    opened(counting, clock).garbage_collect(timedelta(minutes=400))
    read_archives = [one for one in counting.log if one.op == "get" and one.key[:5] == "root/"]
    assert len(read_archives) <= 12
    with pytest.raises(FencedError):
        sessions[0].commit("begun before the grace")
    sessions[1].commit("begun within it")
    assert read(repository.readonly_session()) == [99] * 8


class LosingArchives(CountingStorage):
    """As another collection deletes them right after they were listed."""

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        found = [*super().list(prefix, after)]
        if prefix == "root/":
            self.delete_many([info.key for info in found])
        return iter(found)


def test_archives_that_another_collection_deletes_leave_the_fence_where_it_is() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, clock)
    for _ in range(20):
        clock.advance(timedelta(minutes=1))
        repository.create_branch("side")
        repository.delete_branch("side")
    session = write(opened(storage, clock).writable_session(), 5)
    opened(LosingArchives(storage), clock).garbage_collect(timedelta(minutes=18))
    session.commit("not fenced off")


class OvertakenWithoutAnswer(WrappedStorage):
    """Its first swap takes effect; before it is told of an error, others do something."""

    def __init__(self, storage: Storage, *others: Callable[[], object]) -> None:
        super().__init__(storage)
        self.others = iter(others)

    def cas(self, key: str, data: bytes, *args: Any, **how: Any) -> Any:
        done = super().cas(key, data, *args, **how)
        for other in self.others:
            other()
            raise StorageError("the connection is gone")
        return done


def test_refs_that_others_moved_before_a_collection_had_its_answer_can_be_restored() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    first = line(repository)[-2]
    fill(repository, 5)
    other = opened(storage)
    reset = partial(other.reset_branch, "main", first, force=True)
    opened(OvertakenWithoutAnswer(storage, reset)).garbage_collect(NOW)
    begun = next(op for op in other.ops_log() if op.operation == "collect garbage")
    zm.recover(other, begun.version)
    assert read(opened(storage).readonly_session()) == [5] * 8
    assert repository.verify().ok


def test_a_leased_writer_is_not_refused_and_loses_nothing() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    session = repository.writable_session(lease=60)
    write(session, 5, slice(0, 2))
    base = session.snapshot_id
    other = opened(storage)
    other_session = other.writable_session()
    write(other_session, 9, slice(6, 8))
    other_session.commit("elsewhere")
    other.expire_snapshots(keep_last=1)
    assert base in line(other)
    assert other.garbage_collect(NOW).objects.get("chunks", 0) == 0
    session.commit("at leisure")
    assert read(repository.readonly_session()) == [5, 5, 1, 1, 1, 1, 9, 9]
    write(session, 6, slice(2, 4))
    opened(storage).garbage_collect(NOW)
    session.commit("the lease goes on with it")
    assert read(repository.readonly_session()) == [5, 5, 6, 6, 1, 1, 9, 9]
    assert repository.verify().ok


def collect_all_but_the_first(storage: Storage) -> None:
    other = opened(storage)
    other.reset_branch("main", line(other)[-2], force=True)
    other.garbage_collect(NOW)


def test_a_lease_goes_where_a_rebase_moves_its_session() -> None:
    storage = MemoryStorage()
    session = make(storage).writable_session(lease=60)
    write(session, 5, slice(0, 2))
    fill(opened(storage), 9, where=slice(6, 8))
    session.rebase()
    collect_all_but_the_first(storage)
    assert read(session) == [5, 5, 1, 1, 1, 1, 9, 9]


def test_a_lease_goes_where_a_compaction_moves_its_session() -> None:
    storage = MemoryStorage()
    session = make(storage, **{"max-delta-count": 1}).writable_session(lease=60)
    committed = write(session, 5, slice(0, 2)).commit("and compact")
    assert session.snapshot_id != committed
    collect_all_but_the_first(storage)
    assert read(session) == [5, 5, 1, 1, 1, 1, 1, 1]


def test_a_commit_is_not_put_on_top_of_a_history_that_begins_after_it() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, clock)
    session = repository.writable_session()
    write(session, 5, slice(0, 2))
    clock.advance(timedelta(days=1))
    other = opened(storage, clock)
    elsewhere = other.writable_session()
    write(elsewhere, 9, slice(6, 8))
    elsewhere.commit("another chunk")
    other.expire_snapshots(keep_last=1)
    report = other.garbage_collect(timedelta(hours=12))  # so it is not refused for its age
    assert report.objects["snapshots"] == 2
    with pytest.raises(ConflictError, match="expired"):
        session.commit("on what is gone")


def test_a_reader_of_an_expired_snapshot_is_told_so_and_a_leased_one_reads_on() -> None:
    storage = MemoryStorage()
    repository = make(storage, **OFTEN)
    reader, unread = (opened(storage).readonly_session() for _ in range(2))
    leased = opened(storage)
    kept = leased.readonly_session()
    follower = opened(storage).readonly_session(follow=True)
    with leased.lease(kept.snapshot_id) as lease:
        fill(repository, 2)
        repository.expire_snapshots(keep_last=1)
        repository.garbage_collect(NOW)
        assert read(kept) == read(reader) == [1] * 8
        lease.check()
    for value in range(12):
        fill(repository, value)
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(NOW)
    with pytest.raises(SnapshotExpiredError, match="has expired"):
        read(unread)
    assert read(follower) == [11] * 8
    assert reader.rebase() == repository.list_branches()["main"]
    assert read(reader) == [11] * 8


# --- leases --------------------------------------------------------------------------------------


def leases(storage: Storage) -> tuple[Any, ...]:
    return root_of(storage).leases


def test_leases_are_renewed_together_without_archives() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, clock)
    head = repository.list_branches()["main"]
    archives = [*storage.list("root/")]
    with repository.lease(head, 120), repository.lease(head, 60):
        first = {lease.lease_id: lease.expires_ms for lease in leases(storage)}
        assert len(first) == 2
        version = root_of(storage).version
        clock.advance(timedelta(seconds=20))
        clock.beat()
        assert root_of(storage).version == version + 1
        renewed = {lease.lease_id: lease.expires_ms for lease in leases(storage)}
        assert renewed == {lease_id: at + 20_000 for lease_id, at in first.items()}
    assert leases(storage) == ()
    assert [*storage.list("root/")] == archives


def test_a_lease_lets_its_writer_through_the_fence_after_its_time() -> None:
    """Its time only says when a collection may remove it, and none has since."""
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, clock)
    session = repository.writable_session(lease=60)
    write(session, 5)
    opened(storage, clock).garbage_collect(NOW)
    clock.advance(timedelta(days=3))
    session.commit("behind the fence, and leased")
    assert read(repository.readonly_session()) == [5] * 8
    assert repository.verify().ok


def test_a_leased_snapshot_stays_when_nothing_else_leads_to_it() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    repository.create_branch("side")
    snapshot_id = fill(repository, 7, "side")
    with repository.lease(snapshot_id):
        reader = repository.readonly_session("side")
        repository.delete_branch("side")
        assert opened(storage).garbage_collect(NOW).deleted == 0
        assert opened(storage).verify().problems == ()
        assert read(reader) == [7] * 8
    assert repository.garbage_collect(NOW).objects["chunks"] == 4


def test_a_lost_lease_is_not_renewed() -> None:
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, clock)
    with repository.lease(repository.list_branches()["main"], 10) as lease:
        clock.advance(timedelta(seconds=11))
        repository.garbage_collect(NOW)
        clock.beat()
        assert lease.lost
        assert leases(storage) == ()
        with pytest.raises(FencedError):
            lease.check()
    never = "000000000001-" + "0" * 24 + "-7"
    with pytest.raises(SnapshotExpiredError), repository.lease(never):
        pass


# --- failures and races --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["branch", "time", "writable", "exclusive"])
def test_a_head_that_goes_while_it_is_opened_is_not_told_as_damage(how: str) -> None:
    """The branch is reset and its old head collected, at any moment of the opening."""
    clock, made = Clock(), MemoryStorage()
    repository = make(made, clock)
    base = repository.readonly_session().snapshot_id
    for value in range(2):
        clock.advance(timedelta(days=1))
        session = repository.writable_session()
        root = zarr.open_group(session.store)
        root.attrs["large"] = np.random.default_rng(value).bytes(20_000).hex()  # not kept as copy
        session.commit("large")
    moment = datetime.fromtimestamp(clock.ms / 1000 - 3_600, UTC)
    due = line(repository)[1 if how == "time" else 0]
    seen = set[str]()
    for number in range(1, 100):
        storage = copy_of(made)

        def reset(storage: MemoryStorage = storage) -> None:
            again = opened(storage, clock)
            again.reset_branch("main", base, force=True)
            again.expire_snapshots(keep_last=1)
            assert again.garbage_collect(NOW).objects["snapshots"] >= 2

        racing = InterruptingStorage(storage, reset)
        repository = opened(racing, clock)
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
        seen.add(session.snapshot_id)
        if len(racing.ops) < number:
            break
    assert seen == {due, base}


def test_what_cannot_be_read_stops_the_deletions() -> None:
    storage = MemoryStorage()
    repository = make(storage, **OFTEN)
    for value in range(16):
        fill(repository, value)
    write(repository.writable_session(), 99)
    repository.expire_snapshots(keep_last=2)
    bad = repository.explain_manifests().manifests[0].key
    storage.put(bad, b"damaged")
    before = live(storage)
    with pytest.raises(CorruptObjectError):
        opened(storage).garbage_collect(NOW)
    assert live(storage) == before


def test_the_root_is_archived_before_anything_is_deleted() -> None:
    """Else the newest archive leads to what is gone, should the root be lost then."""
    clock, storage = Clock(), MemoryStorage()
    repository = make(storage, clock)
    repository.create_branch("side")
    with repository.lease(fill(repository, 7, "side"), 10) as lease:
        lease.keep()
    repository.delete_branch("side")
    clock.advance(timedelta(days=1))
    faults = [
        Fault("fail_before", op="create_after", count=None),
        Fault("crash_after", op="delete_many", key="snapshots/*"),
    ]
    with pytest.raises(SimulatedCrash):
        opened(FaultyStorage(storage, faults), clock).garbage_collect(NOW)
    storage.delete_many(["current"])
    assert zm.recover(storage, runtime=runtime_of(clock)).skipped == {}
    assert read(opened(storage).readonly_session()) == [1] * 8


def test_pages_of_tags_that_archives_name_are_kept() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    head = root_of(storage).branches["main"].bare().head

    def tag(letter: str) -> set[str]:
        names = [letter + sha256(bytes([i % 251, i // 251])).hexdigest() for i in range(900)]
        change_root(
            repository,
            "create tag",
            lambda root: replace(root, tags={**root.tags, **dict.fromkeys(names, head)}),
        )
        return {ref.blob.key for ref in root_of(storage).pages}

    gone = tag("a") - tag("b")
    assert gone
    repository.garbage_collect(NOW)
    assert gone <= {*live(storage)}  # the archive of that version names them
    assert repository.verify().problems == ()
    assert len(repository.list_tags()) == 1800


def test_stale_temporary_files_of_a_disk_go_by_their_age(tmp_path: Path) -> None:
    clock = Clock()
    repository = make(LocalStorage(tmp_path), clock)
    for name, age_s in ((".tmp-1-0", 200_000), (".tmp-1-1", 10)):
        path = tmp_path / "root" / name
        path.write_bytes(b"left")
        os.utime(path, (clock.ms / 1000 - age_s,) * 2)
    repository.garbage_collect()
    assert [p.name for p in (tmp_path / "root").glob(".tmp*")] == [".tmp-1-1"]
