"""Verification finds every damage; recovery and restoring go back to what is whole."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import change_root, context_of, root_of
from zarr_manifests import Repository, Session
from zarr_manifests.error_cases import FencedError, NotARepositoryError
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError, SnapshotExpiredError
from zarr_manifests.format.root import archive_key
from zarr_manifests.repository import build_index
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import Fault, FaultyStorage, copy_of, in_order

NOW = timedelta(0)
CONFIG = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0, "compaction": {"max-delta-count": 10}}


def make(storage: MemoryStorage) -> Repository:
    repository = zm.create(storage, CONFIG, runtime=in_order())
    with repository.transaction(message="make a") as store:
        array = zarr.create_array(store, name="a", shape=(8,), chunks=(2,), dtype="i4")
        array[:] = 1
    return repository


def write(session: Session, value: int) -> None:
    zarr.open_array(session.store, path="a")[:] = value


def fill(repository: Repository, value: int) -> str:
    session = repository.writable_session()
    write(session, value)
    return session.commit(f"fill {value}")


def read(session: Session) -> list[int]:
    return np.asarray(zarr.open_array(session.store, path="a", mode="r")[:]).tolist()


def keys(storage: MemoryStorage) -> list[str]:
    return [info.key for info in storage.list()]


@pytest.fixture(scope="module")
def whole() -> MemoryStorage:
    """A repository with all kinds of objects, where everything can be reached."""
    storage = MemoryStorage()
    repository = make(storage)
    for value in range(14):
        fill(repository, value)
    repository.expire_snapshots(keep_last=5)
    head = contents_of(repository.readonly_session().store).view.ref.bare()
    tags = {f"tag-{i:04d}-{hash_of(i)}": head for i in range(400)}
    change_root(repository, "create tag", lambda root: replace(root, tags={**root.tags, **tags}))
    change_root(  # so that older archives name other pages
        repository,
        "create tag",
        lambda root: replace(root, tags={f"{name}-too": ref for name, ref in tags.items()}),
    )
    build_index(repository)
    repository.garbage_collect(NOW)
    repository.create_tag("last")
    return storage


def hash_of(i: int) -> str:
    return sha256(bytes([i % 251, i // 251])).hexdigest()


def problems(storage: MemoryStorage) -> str:
    try:
        report = zm.open(storage, runtime=in_order()).verify()
    except CorruptObjectError as error:  # of the root
        return f"current {error}"
    return "\n".join(map(str, report.problems))


@pytest.mark.sweep
def test_verification_finds_every_damage_of_every_object(whole: MemoryStorage) -> None:
    assert problems(whole) == ""
    kinds = {key.partition("/")[0] for key in keys(whole)}
    assert {"chunks", "deltas", "indexes", "manifests", "nodes", "pages", "snapshots"} < kinds
    made = keys(whole)
    version = root_of(whole).version
    for i, key in enumerate(made):
        data = whole.get(key)
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        kind = key.partition("/")[0]
        same = [k for k in (*made[i + 1 :], *made[:i]) if k.startswith(f"{kind}/")]
        damages = {"truncated": data[:-1], "emptied": b"", "flipped": flipped}
        if same:
            damages["swapped"] = whole.get(same[0])
        # The newest archive may not be written yet, and the first may never be (decision 25).
        if key not in ("current", f"root/{version:020d}", f"root/{1:020d}"):
            damages["deleted"] = None  # type: ignore[assignment]
        for name, damage in damages.items():
            if damage == data:
                continue
            storage = copy_of(whole)
            storage.delete_many([key])
            if damage is not None:
                storage.put(key, damage)
            assert key in problems(storage), (key, name)


def test_verification_does_not_trust_what_the_process_knows(whole: MemoryStorage) -> None:
    storage = copy_of(whole)
    repository = zm.open(storage, runtime=in_order())
    assert repository.verify().ok
    ref = contents_of(repository.readonly_session().store).view.ref
    storage.delete_many([ref.key])
    assert not repository.verify().ok


def test_a_lost_root_is_recovered_and_says_what_may_be_lost() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    written = fill(repository, 2)
    session = repository.writable_session(lease=60)
    write(session, 9)
    version = root_of(repository).version
    storage.delete_many(["current"])
    told = zm.recover(storage, dry_run=True, runtime=in_order())
    assert not any(info.key == "current" for info in storage.list())  # nothing was made
    report = zm.recover(storage, runtime=in_order())
    assert report == replace(told, dry_run=False)
    assert report.branches == {"main": written}
    assert report.recovered == version - 1  # a lease leaves no archive
    assert report.version == report.recovered + 1_000_000
    assert report.perhaps_lost == range(version, report.version)  # how many is not known
    root = root_of(storage)
    assert root.fence == root.version == report.version
    assert root.leases == ()
    assert root.epochs == {"collector": root.version, "compactor": root.version}
    again = zm.open(storage, runtime=in_order())
    assert next(info.snapshot_id for info in again.ancestry()) == written
    with pytest.raises(FencedError):
        session.commit("of before")
    fill(again, 3)
    assert again.verify().ok
    assert next(iter(again.ops_log())).operation == "commit overwrite"
    with pytest.raises(InvalidArgumentError, match="nothing to recover"):
        zm.recover(storage, runtime=in_order())


def test_a_damaged_root_and_a_damaged_head_are_recovered() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    before = fill(repository, 2)
    lost = fill(repository, 3)
    version = root_of(repository).version
    storage.put("current", b"damaged")
    storage.delete_many([f"snapshots/{lost.rpartition('-')[0]}/{lost.rpartition('-')[2]}"])
    report = zm.recover(storage, runtime=in_order())
    assert report.recovered == version - 1
    assert report.perhaps_lost == range(version, report.version)
    assert list(report.skipped) == [version]
    assert report.version == version + 1_000_000
    again = zm.open(storage, runtime=in_order())
    assert next(iter(again.ancestry())).snapshot_id == before
    assert read(again.readonly_session()) == [2] * 8
    with pytest.raises(NotARepositoryError):
        zm.recover(MemoryStorage())


@pytest.mark.parametrize("current", [None, b"damaged", "older"])
def test_a_recovery_shuts_out_who_began_after_versions_that_left_no_archive(
    current: bytes | str | None,
) -> None:
    storage = MemoryStorage()
    repository = make(storage)
    older = storage.get("current")
    written = fill(repository, 2)
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(NOW)
    for _ in range(6):
        with repository.lease(written):
            pass
    before = zm.open(storage, runtime=in_order()).writable_session()
    write(before, 9)
    version = root_of(repository).version
    storage.delete_many(["current"])
    if current is not None:
        # The older one was put back by hand; what it leads to is gone.
        storage.put("current", older if isinstance(current, str) else current)
    report = zm.recover(storage, runtime=in_order())
    assert version in report.perhaps_lost
    with pytest.raises(FencedError):
        before.commit("of before")
    again = zm.open(storage, runtime=in_order())
    assert read(again.readonly_session()) == [2] * 8
    fill(again, 3)
    again.garbage_collect(NOW)
    assert again.verify().ok
    assert len({one.version for one in again.ops_log()}) == len(list(again.ops_log()))


def test_two_recoveries_in_a_row_make_two_versions() -> None:
    storage = MemoryStorage()
    fill(make(storage), 2)
    # As if the process had died before the archive that goes with its swap was sent.
    unsent = FaultyStorage(storage, [Fault("fail_before", op="create_after", count=None)])
    storage.delete_many(["current"])
    first = zm.recover(unsent, runtime=in_order())
    between = zm.open(storage, runtime=in_order()).writable_session()
    write(between, 9)
    storage.delete_many(["current"])
    second = zm.recover(unsent, runtime=in_order())
    assert (second.recovered, second.branches) == (first.version, first.branches)
    assert second.version > first.version
    with pytest.raises(FencedError):
        between.commit("of before")


def test_a_root_that_can_be_read_says_how_many_versions_there_were() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    before = fill(repository, 2)
    lost = fill(repository, 3)
    done = root_of(repository).version
    for _ in range(3):
        with repository.lease(lost):
            pass
    session = repository.writable_session()
    write(session, 9)
    version = root_of(repository).version
    assert version == done + 6
    storage.delete_many([f"snapshots/{lost.rpartition('-')[0]}/{lost.rpartition('-')[2]}"])
    report = zm.recover(storage, runtime=in_order())
    assert (report.recovered, report.branches) == (done - 1, {"main": before})
    assert report.version == version + 1
    assert report.perhaps_lost == range(done, version + 1)
    with pytest.raises(FencedError):
        session.commit("of before")
    assert read(zm.open(storage, runtime=in_order()).readonly_session()) == [2] * 8


def test_a_version_is_restored_refs_only() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    repository.create_tag("gone")
    before = fill(repository, 2)
    repository.create_branch("side")
    version = root_of(repository).version
    refs = repository.list_branches()
    fill(repository, 3)
    repository.delete_branch("side")
    repository.delete_tag("gone")
    repository.create_tag("new")
    now = repository.list_branches()["main"]
    told = zm.recover(repository, version, dry_run=True)
    assert told.branches == {"main": (now, before), "side": (None, before)}
    assert told.tags == {"new": (now, None)}
    assert repository.list_branches() == {"main": now}  # nothing has moved
    assert zm.recover(repository, version) == replace(told, dry_run=False)
    assert repository.list_branches() == refs
    assert repository.list_tags() == {}  # a deleted tag stays deleted
    assert next(iter(repository.ancestry())).snapshot_id == before
    assert read(repository.readonly_session()) == [2] * 8
    root = root_of(repository)
    assert root.version > version
    repository.garbage_collect(NOW)
    assert repository.verify().ok
    with pytest.raises(SnapshotExpiredError, match="older than the last collection"):
        zm.recover(repository, version)
    for none in (10**6, 0, -1, 2**64, 10**30, math.nan, 1.5, True, "1"):
        with pytest.raises(InvalidArgumentError):
            zm.recover(repository, none)  # type: ignore[arg-type]


def test_a_restore_that_a_collection_overtakes_is_refused() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    version = root_of(repository).version
    fill(repository, 3)
    other = zm.open(storage, runtime=in_order())
    roots, swap = context_of(repository).roots, context_of(repository).roots.swap
    ran = []

    def overtaken(*args: object, **kwargs: object) -> object:
        if not ran:
            ran.append(other.garbage_collect(NOW))
        return swap(*args, **kwargs)  # type: ignore[arg-type]

    roots.swap = overtaken  # type: ignore[method-assign, assignment]
    with pytest.raises(SnapshotExpiredError):
        zm.recover(repository, version)


def test_the_operations_log_has_no_hole_where_an_archive_is_missing() -> None:
    storage = MemoryStorage()
    repository = make(storage)
    for i in range(80):
        repository.create_tag(f"tag-{i}")
    all_of_them = [*repository.ops_log()]
    for version in range(1, 82):
        copy = copy_of(storage)
        copy.delete_many([archive_key(version)])
        found = [*zm.open(copy, runtime=in_order()).ops_log()]
        assert found == all_of_them if version > 1 else found == all_of_them[: len(found)]


def test_the_operations_log_goes_back_through_archives() -> None:
    repository = make(MemoryStorage())
    for value in range(80):
        fill(repository, value % 5)
    repository.create_tag("done")
    log = list(repository.ops_log())
    assert [one.version for one in log] == [*range(len(log), 0, -1)]
    assert (log[0].operation, log[0].ref) == ("create tag", "done")
    assert (log[-1].operation, log[-1].ref) == ("create", "main")
    head = next(iter(repository.ancestry()))
    assert head.commit_id in {one.operation_id for one in log}


def test_the_operations_log_says_who_did_what_to_which_ref_and_when() -> None:
    """Of every operation, whoever makes the next version and archives the one before."""
    storage, at_ms = MemoryStorage(), 1_700_000_000_000

    def of(name: str, seconds: int) -> Runtime:
        return replace(in_order(), who=lambda: name, now_ms=lambda: at_ms + 1000 * seconds)

    ann = zm.create(storage, CONFIG, runtime=of("ann@desk", 0))
    bob = zm.open(storage, runtime=of("bob@\udc80" + "x" * 200, 1))
    with bob.transaction(message="make g") as store:
        zarr.create_group(store, path="g")
    with ann.lease(ann.list_branches()["main"]):  # no operation, and in nobody's name
        bob.create_tag("done")
    zm.open(storage, runtime=of("", 2)).create_branch("side")
    ann.expire_snapshots(keep_last=1)
    ann.garbage_collect(NOW)
    storage.delete_many(["current"])
    zm.recover(storage, runtime=of("carl@desk", 3))
    log = list(zm.open(storage, runtime=in_order()).ops_log())
    assert [(one.by[:9], one.operation, one.ref) for one in log][::-1] == [
        ("ann@desk", "create", "main"),
        ("bob@?xxxx", "commit metadata", "main"),
        ("bob@?xxxx", "create tag", "done"),
        ("", "create branch", "side"),
        ("ann@desk", "expire snapshots", ""),
        ("ann@desk", "collect garbage", ""),
        ("ann@desk", "end collection", ""),
        ("carl@desk", "recover", ""),
    ]
    assert max(len(one.by) for one in log) == 100
    assert [int(one.at.timestamp() * 1000) - at_ms for one in log][::-1] == [
        *(0, 1000, 1000, 2000, 0, 0, 0, 3000),
    ]


def test_who_it_was_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZARR_MANIFESTS_WHO", raising=False)
    assert "@" in SYSTEM.who()
    monkeypatch.setenv("ZARR_MANIFESTS_WHO", "the nightly job")
    assert SYSTEM.who() == "the nightly job"
    monkeypatch.setenv("ZARR_MANIFESTS_WHO", "")
    assert SYSTEM.who() == ""
