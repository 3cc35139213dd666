"""Verification finds every damage; recovery and restoring go back to what is whole."""

from __future__ import annotations

from functools import partial
from hashlib import sha256

import pytest
import zarr
from msgspec.structs import replace

import zarr_manifests as zm
from filled import NOW, fill, make, opened, read
from in_order import in_order
from inside import change_root, root_of
from storages import InterruptingStorage, copy_of
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    FencedError,
    InvalidArgumentError,
    ManifestsError,
    NotARepositoryError,
    SnapshotExpiredError,
)
from zarr_manifests.ids import snapshot_key
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage

OFTEN = {"max-delta-count": 10}


@pytest.fixture(scope="module")
def whole() -> MemoryStorage:
    """A repository with all kinds of objects, where everything can be reached."""
    repository = make(storage := MemoryStorage(), **OFTEN)
    for value in range(14):
        fill(repository, value)
    repository.expire_snapshots(keep_last=5)
    repository.create_tag("first")
    head = root_of(repository).tags["first"]
    names = [f"tag-{i}-{sha256(b'%d' % i).hexdigest()}" for i in range(400)]
    for more in ("", "-too"):  # so that older archives name other pages
        tags = {name + more: head for name in names}
        change_root(repository, "create tag", lambda root, tags=tags: replace(root, tags=tags))
    repository.garbage_collect(NOW)
    repository.create_tag("last")
    return storage


def problems(storage: MemoryStorage) -> str:
    try:
        report = opened(storage).verify()
    except CorruptObjectError as error:  # of the root
        return f"current {error}"
    return "\n".join(map(str, report.problems))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_verification_finds_damage_of_objects_of_each_kind(
    whole: MemoryStorage, every: bool
) -> None:
    assert problems(whole) == ""
    of_kind: dict[str, list[str]] = {}
    for info in whole.list():
        of_kind.setdefault(info.key.partition("/")[0], []).append(info.key)
    kinds = {"chunks", "deltas", "manifests", "nodes", "pages", "snapshots"}
    assert kinds < of_kind.keys()
    for keys in of_kind.values():
        for key, other in zip(keys if every else keys[-1:], keys[1:] + keys[:1], strict=False):
            data = whole.get(key)
            damages = {"flipped": data[:-1] + bytes([data[-1] ^ 1])}
            if every:
                damages |= {"truncated": data[:-1], "emptied": b"", "swapped": whole.get(other)}
            for name, damage in damages.items():
                storage = copy_of(whole)
                storage.put(key, damage)
                assert damage == data or key in problems(storage), (key, name)


def test_a_damaged_root_and_a_damaged_head_are_recovered() -> None:
    repository = make(storage := MemoryStorage(), **OFTEN)
    before = fill(repository, 2)
    lost = fill(repository, 3)
    version = next(repository.ops_log()).version
    storage.put("current", b"damaged")
    storage.delete_many([snapshot_key(lost)])
    report = zm.recover(storage, runtime=in_order())
    assert report.recovered == version - 1
    assert report.perhaps_lost == range(version, report.version)
    assert list(report.skipped) == [version]
    assert report.version == version + 1_000_000
    again = opened(storage)
    assert next(iter(again.ancestry())).snapshot_id == before
    assert read(again.readonly_session()) == [2] * 8
    with pytest.raises(NotARepositoryError):
        zm.recover(MemoryStorage())


def test_a_root_that_can_be_read_says_how_many_versions_there_were() -> None:
    repository = make(storage := MemoryStorage(), **OFTEN)
    before = fill(repository, 2)
    lost = fill(repository, 3)
    done = next(repository.ops_log()).version
    with repository.lease(lost):
        version = done + 2  # as there are when it has ended
    session = repository.writable_session()
    zarr.open_array(session.store, path="a")[:] = 9
    storage.delete_many([snapshot_key(lost)])
    report = zm.recover(storage, runtime=in_order())
    assert (report.recovered, report.branches) == (done - 1, {"main": (None, before)})
    assert report.version == version + 1
    assert report.perhaps_lost == range(done, version + 1)
    with pytest.raises(FencedError):
        session.commit("of before")
    assert read(opened(storage).readonly_session()) == [2] * 8


def test_a_version_is_restored_refs_only() -> None:
    repository = make(MemoryStorage(), **OFTEN)
    repository.create_tag("gone")
    before = fill(repository, 2)
    repository.create_branch("side")
    version = next(repository.ops_log()).version
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
    assert read(repository.readonly_session()) == [2] * 8
    assert next(repository.ops_log()).version > version
    repository.garbage_collect(NOW)
    assert repository.verify().ok
    with pytest.raises(SnapshotExpiredError):
        zm.recover(repository, version)
    for none in (10**6, -1, 1.5, "1"):
        with pytest.raises(InvalidArgumentError):
            zm.recover(repository, none)  # type: ignore[arg-type]


def test_the_operations_log_has_no_hole_where_an_archive_is_missing() -> None:
    repository = make(storage := MemoryStorage(), **OFTEN)
    for i in range(80):
        repository.create_tag(f"tag-{i}")
    all_of_them = [*repository.ops_log()]
    for version in (1, 2, 40, 80, 81):
        copy = copy_of(storage)
        copy.delete_many([f"root/{version:020d}"])
        found = [*opened(copy).ops_log()]
        assert found == all_of_them if version > 1 else found == all_of_them[: len(found)]


@pytest.fixture(scope="module")
def made() -> MemoryStorage:
    """Five versions, and much that is about to expire."""
    repository = make(storage := MemoryStorage(), **OFTEN)
    for value in (2, 3, 4):
        fill(repository, value)
    return storage


def recover_without_root(storage: Storage, **options: bool) -> None:
    storage.delete_many(["current"])
    zm.recover(storage, runtime=in_order(), **options)


def expire_and_collect(storage: Storage, others: Storage) -> None:
    opened(others).expire_snapshots(keep_last=1)
    opened(storage).garbage_collect(NOW)


def test_whenever_a_root_is_recovered_the_collection_takes_nothing_from_it(
    made: MemoryStorage,
) -> None:
    """Also between its look at the root and the deletion that follows."""
    for moment in range(1, 1000):
        below = copy_of(made)
        storage = InterruptingStorage(below, partial(recover_without_root, below), moment)
        refused: list[ManifestsError] = []
        try:
            expire_and_collect(storage, below)
        except ManifestsError as error:
            refused.append(error)
        repository = opened(below)
        assert repository.verify().problems == ()
        assert read(repository.readonly_session()) == [4] * 8
        fill(repository, 5)
        if len(storage.ops) < moment:
            assert not refused
            assert moment > 20
            return


def test_archives_from_before_a_collection_are_taken_if_it_has_ended(
    made: MemoryStorage,
) -> None:
    storage = copy_of(made)
    opened(storage).garbage_collect(NOW)
    storage.delete_many([snapshot_key(opened(storage).list_branches()["main"])])
    with pytest.raises(ConflictError, match="may still delete"):
        recover_without_root(storage)
    recover_without_root(storage, collections_ended=True)
    assert read(opened(storage).readonly_session()) == [3] * 8


def test_what_an_unreadable_archive_was_of_is_not_known(made: MemoryStorage) -> None:
    storage = copy_of(made)
    version = next(opened(storage).ops_log()).version
    storage.put(f"root/{version:020d}", b"damaged")
    with pytest.raises(ConflictError, match=f"at version {version}"):
        recover_without_root(storage)
    recover_without_root(storage, collections_ended=True)
    assert read(opened(storage).readonly_session()) == [3] * 8


def test_a_collector_stops_when_an_older_root_is_put_back(made: MemoryStorage) -> None:
    probe = InterruptingStorage(copy_of(made), list)
    expire_and_collect(probe, probe.storage)
    second = [number for number, op in enumerate(probe.ops, 1) if op == "delete_many"][1]
    below = copy_of(made)
    put_back = partial(below.put, "current", below.get("current"))
    storage = InterruptingStorage(below, put_back, second)
    with pytest.raises(FencedError):
        expire_and_collect(storage, below)
    assert storage.ops.count("delete_many") == 2


def test_a_root_is_sound_whenever_a_collection_takes_what_it_no_longer_needs(
    made: MemoryStorage,
) -> None:
    for moment in range(1, 1000):
        below = copy_of(made)
        storage = InterruptingStorage(below, partial(expire_and_collect, below, below), moment)
        with pytest.raises(InvalidArgumentError, match="nothing to recover"):
            zm.recover(storage, dry_run=True, runtime=in_order())
        if len(storage.ops) < moment:
            assert moment > 4
            return
