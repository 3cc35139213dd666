"""Clones are equal in every snapshot, whatever fails or happens meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from in_order import in_order
from storages import Fault, FaultyStorage, InterruptingStorage, SimulatedCrash, copy_of
from zarr_manifests import Repository
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    NotARepositoryError,
    StorageError,
    UnsupportedStorageError,
)
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage

NOW = timedelta(0)
CONFIG = {"inline-chunk-bytes": 8, "pack-chunk-bytes": 64, "compaction": {"mode": "manual"}}
CELLS = 12
EVERY = 7
"""Of the moments at which something may happen, one in so many is tried."""
type Work = Callable[[Repository], object]


def opened(storage: Storage) -> Repository:
    return zm.open(storage, runtime=in_order())


def fill(repository: Repository, value: int, branch: str = "main") -> str:
    session = repository.writable_session(branch)
    zarr.open_array(session.store, path="a")[value % CELLS] = value
    zarr.open_array(session.store, path="large")[value % 2 :: 2] = value
    return session.commit(f"fill {value}")


def make(storage: Storage, commits: int) -> Repository:
    """A repository with chunks inline, in packs and of their own, and a branch and a tag."""
    repository = zm.create(storage, CONFIG, runtime=in_order())
    with repository.transaction(message="make arrays") as store:
        for name, chunk in (("a", 1), ("packed", 6), ("large", 100)):
            cells = CELLS if name != "large" else 200
            array = zarr.create_array(
                store, name=name, shape=(cells,), chunks=(chunk,), dtype="i8", compressors=None
            )
            array[:] = np.arange(cells)
    for value in range(1, commits):
        fill(repository, value)
    repository.create_branch("other")
    repository.create_tag("t")
    fill(repository, 7, "other")
    return repository


def contents(repository: Repository, snapshot_id: str) -> dict[str, list[int]]:
    store = repository.readonly_session(snapshot_id).store
    found = {}
    for name in ("a", "packed", "large"):
        with contextlib.suppress(FileNotFoundError):  # the first snapshot has none
            found[name] = np.asarray(zarr.open_array(store, path=name, mode="r")[:]).tolist()
    return found


def line(repository: Repository, branch: str) -> list[str]:
    return [info.snapshot_id for info in repository.ancestry(branch)]


def assert_equal(source: Repository, clone: Repository) -> None:
    """The clone has the refs of the source, and every snapshot, sound and with the same values."""
    assert clone.verify().problems == ()
    assert clone.list_branches() == source.list_branches()
    assert clone.list_tags() == source.list_tags()
    for branch in source.list_branches():
        assert line(clone, branch) == line(source, branch)
        for snapshot in line(source, branch):
            assert contents(clone, snapshot) == contents(source, snapshot)
    for snapshot in source.list_tags().values():
        assert contents(clone, snapshot) == contents(source, snapshot)


@pytest.fixture(scope="module")
def small() -> MemoryStorage:
    storage = MemoryStorage()
    make(storage, 3)
    return storage


# --- what a clone has --------------------------------------------------------------------------


def test_a_clone_that_has_expired_more(small: MemoryStorage) -> None:
    """What has expired there stays so, and what is new has all of its history."""
    source, place = opened(copy_of(small)), MemoryStorage()
    source.compute_statistics()
    zm.clone(source, place)
    clone = opened(place)
    clone.expire_snapshots(keep_last=1)
    clone.garbage_collect(NOW)
    fill(source, 24)
    source.create_branch("third")
    zm.clone(source, place)
    assert line(clone, "main") == line(source, "main")[:2]
    assert line(clone, "third") == line(source, "third")
    clone.garbage_collect(NOW)
    assert clone.verify().problems == ()
    for snapshot in line(source, "third"):
        assert contents(clone, snapshot) == contents(source, snapshot)


def test_a_first_expiry_in_between(small: MemoryStorage) -> None:
    """What has expired in the source expires in the clone, where every branch gets a floor."""
    source, place = opened(copy_of(small)), MemoryStorage()
    zm.clone(source, place)
    fill(source, 30)
    source.expire_snapshots(keep_last=2)
    zm.clone(source, place)
    clone = opened(place)
    assert clone.verify().problems == ()
    assert_equal(source, clone)
    assert len(line(clone, "main")) == len(line(clone, "other")) == 2


# --- what is refused ---------------------------------------------------------------------------


def test_places_that_are_refused(small: MemoryStorage, tmp_path: Path) -> None:
    source = opened(copy_of(small))
    other, taken, unfinished = MemoryStorage(), MemoryStorage(), MemoryStorage()
    make(other, 1)
    taken.put("something", b"1")
    for place in (other, taken):
        with pytest.raises(AlreadyExistsError):
            zm.clone(source, place)
    with pytest.raises(StorageError):
        zm.clone(source, FaultyStorage(unfinished, [Fault("fail_before", op="create", skip=3)]))
    with pytest.raises(AlreadyExistsError, match="unfinished clone of another"):
        zm.clone(opened(other), unfinished)
    with pytest.raises(AlreadyExistsError, match=r"zm\.clone again"):
        zm.create(unfinished)
    with pytest.raises(NotARepositoryError):
        zm.open(unfinished)
    here = make(LocalStorage(tmp_path / "here"), 1)
    (tmp_path / "link").symlink_to(tmp_path / "here")
    for path in (tmp_path / "here" / "within", tmp_path):
        with pytest.raises(AlreadyExistsError):
            zm.clone(here, path)
    heads = here.list_branches()
    for path in (tmp_path / "here", tmp_path / "link"):  # changes nothing
        assert zm.clone(here, path).objects == 0
    assert (here.list_branches(), here.verify().problems) == (heads, ())
    assert not (tmp_path / "here" / "within").exists()


# --- what fails --------------------------------------------------------------------------------


def test_what_fails_in_the_source(small: MemoryStorage) -> None:
    number, done = 1, False
    while not done:
        below, place = copy_of(small), MemoryStorage()
        source = FaultyStorage(below)
        with contextlib.suppress(StorageError, SimulatedCrash):
            repository = opened(source)
            source.fail_at(len(source.calls) + number, "crash_after")
            begun = len(source.calls)
            zm.clone(repository, place)
        done = len(source.calls) - begun < number
        zm.clone(opened(below), place)
        assert_equal(opened(below), opened(place))
        number += EVERY
    assert number > 20


# --- what others do meanwhile ------------------------------------------------------------------


def collect(repository: Repository) -> None:
    fill(repository, 40)
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(NOW)


def go_back(repository: Repository) -> None:
    repository.reset_branch("main", line(repository, "main")[1], force=True)
    repository.garbage_collect(NOW)
    fill(repository, 41)


def beside(small: MemoryStorage, work: Work, *faults: Fault) -> Iterator[Repository]:
    """Clones, each made while others worked in the source at another moment."""
    number, done = 1, False
    while not done:
        below, place = copy_of(small), MemoryStorage()
        racing = InterruptingStorage(below, partial(work, opened(below)))
        repository = opened(FaultyStorage(racing, faults))
        racing.arm(number)
        zm.clone(repository, place)
        done = len(racing.ops) < number
        clone = opened(place)
        assert clone.verify().problems == ()
        yield clone
        number += EVERY


WORK: dict[str, Work] = {
    "commit": lambda repository: fill(repository, 42),
    "expiry and collection": collect,
    "a branch that goes back": go_back,
}


@pytest.mark.parametrize("name", WORK)
def test_others_work_in_the_source_meanwhile(small: MemoryStorage, name: str) -> None:
    for clone in beside(small, WORK[name]):
        for branch, head in clone.list_branches().items():
            assert contents(clone, head)["packed"] == list(range(CELLS)), branch


def test_a_source_that_cannot_be_written(small: MemoryStorage) -> None:
    """No lease can be taken; what is collected meanwhile makes the clone begin again."""
    place = MemoryStorage()
    refused = Fault("fail_before", op="cas", count=None, error=UnsupportedStorageError)
    zm.clone(opened(FaultyStorage(small, [refused])), place)
    assert_equal(opened(small), opened(place))
    assert len([*beside(small, collect, refused)]) > 3


# --- what others do in the clone ---------------------------------------------------------------


def test_commits_of_a_clone_are_kept(small: MemoryStorage) -> None:
    source, place = opened(copy_of(small)), MemoryStorage()
    zm.clone(source, place)
    clone = opened(place)
    fill(clone, 31)
    mine = clone.list_branches()
    for _ in range(2):  # also if the source has nothing new
        with pytest.raises(ConflictError, match=r"branch 'main' .* Clone to a new place"):
            zm.clone(source, place)
        fill(source, 32)
    assert clone.list_branches() == mine
    clone.reset_branch("main", line(clone, "main")[1], force=True)
    zm.clone(source, place)
    clone.create_tag("v", line(clone, "main")[0])
    source.create_tag("v", line(source, "main")[1])
    with pytest.raises(ConflictError, match="tag 'v'"):
        zm.clone(source, place)


@pytest.mark.parametrize("what", ["commit", "collection"])
def test_others_work_in_the_clone_meanwhile(small: MemoryStorage, what: str) -> None:
    source, begun = opened(copy_of(small)), MemoryStorage()
    zm.clone(source, begun)
    fill(opened(begun), 43, "other")  # and to be collected
    opened(begun).reset_branch("other", source.list_branches()["other"], force=True)
    fill(source, 44)
    refused = number = 0
    done = False
    while not done:
        number += 1
        place = copy_of(begun)
        others, made = opened(place), list[str]()

        def work(others: Repository = others, made: list[str] = made) -> None:
            if what == "commit":
                made.append(fill(others, 46))
            else:
                others.garbage_collect(NOW)

        racing = InterruptingStorage(place, work, number)
        try:
            zm.clone(source, racing)
        except ConflictError:
            refused += 1
        done = len(racing.ops) < number
        assert {*made} <= {*line(opened(place), "main")}
        assert opened(place).verify().problems == ()
    assert refused


def test_an_unended_collection_of_the_clone_is_waited_for(small: MemoryStorage) -> None:
    source, place = opened(copy_of(small)), MemoryStorage()
    zm.clone(source, place)
    fill(opened(place), 47, "other")
    opened(place).reset_branch("other", source.list_branches()["other"], force=True)
    with pytest.raises(StorageError):
        opened(FaultyStorage(place, [Fault("fail_before", op="delete_many")])).garbage_collect(NOW)
    fill(source, 48)
    with pytest.raises(ConflictError, match="has begun and not ended"):
        zm.clone(source, place)
    opened(place).garbage_collect(NOW)
    zm.clone(source, place)
    assert_equal(source, opened(place))


def test_a_moved_array_is_cloned_after_pages_of_the_base_have_gone() -> None:
    """Its tables keep their place in the manifest, which is no longer that of its path."""
    few = {"chunk-manifests": {"sets": [{"default": {"max-manifest-size": 100}}], "rules": []}}
    repository = zm.create(MemoryStorage(), CONFIG | few, runtime=in_order())
    paths = [f"a{number:03}" for number in range(300)]  # more nodes than a snapshot itself lists
    with repository.transaction(message="make") as store:
        for number, path in enumerate(paths):
            zarr.create_array(store, name=path, data=np.array([number]), chunks=(1,))
    repository.compact(mode="full")
    session = repository.writable_session()
    session.move("a001", "z")
    session.commit("move")
    repository.compact(mode="major")
    last = {a.path: a.manifests for a in repository.explain_manifests().arrays}["/a299"]
    with repository.transaction(message="delete") as store:
        group = zarr.open_group(store)
        for array in repository.explain_manifests().arrays:
            if array.manifests == last:
                del group[array.path.strip("/")]
    repository.compact(mode="major")
    assert repository.verify().ok
    copy = MemoryStorage()
    zm.clone(repository, copy)
    assert zarr.open_array(opened(copy).readonly_session().store, path="z")[0] == 1
