"""Clones are equal in every snapshot, whatever fails or happens meanwhile."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from effort import some_or_all
from inside import change_root, context_of, root_of, short_pages
from zarr_manifests import Repository
from zarr_manifests.error_cases import NotARepositoryError, UnsupportedStorageError
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    MissingChunkError,
    NotFoundError,
    SnapshotExpiredError,
    StorageError,
)
from zarr_manifests.format.root import CLONING_KEY
from zarr_manifests.repository import build_index
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import (
    Fault,
    FaultyStorage,
    InterruptingStorage,
    SimulatedCrash,
    copy_of,
    in_order,
)

NOW = timedelta(0)
CONFIG = {"inline-chunk-bytes": 8, "pack-chunk-bytes": 64, "compaction": {"mode": "manual"}}
CELLS = 12


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


@pytest.fixture(scope="module")
def whole() -> MemoryStorage:
    """A repository with all kinds of objects, some of which only old snapshots need."""
    storage = MemoryStorage()
    with short_pages():
        repository = make(storage, 6)
        repository.compact("main", mode="full")
        for value in range(9, 11):
            fill(repository, value)
        repository.compute_statistics()
        build_index(repository)
        head = root_of(repository).branches["main"].head.bare()
        tags = {sha256(str(number).encode()).hexdigest(): head for number in range(300)}
        change_root(repository, "create tag", lambda r: replace(r, tags={**r.tags, **tags}))
        fill(repository, 14)
        repository.compact("main", mode="full")
        fill(repository, 15)
    return storage


# --- what a clone has --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("expired", [False, True])
def test_a_clone_has_every_snapshot(whole: MemoryStorage, expired: bool) -> None:
    storage, place = copy_of(whole), MemoryStorage()
    source = opened(storage)
    if expired:
        source.expire_snapshots(keep_last=4)
        source.garbage_collect(NOW)
    told: list[tuple[str, int]] = []
    report = zm.clone(source, place, progress=lambda stage, done: told.append((stage, done)))
    clone = opened(place)
    assert_equal(source, clone)
    assert report.branches == source.list_branches()
    assert report.tags == source.list_tags()
    assert report.skipped == report.within_store == 0
    metadata = clone.verify().objects - 2  # without the root and its archive
    kinds = Counter(info.key.partition("/")[0] for info in place.list())
    of_root = kinds["root"] + kinds["current"] + kinds["pages"]
    assert report.objects == sum(kinds.values()) - of_root
    assert kinds["chunks"] > 2
    assert kinds["pages"]
    assert metadata > 20
    assert {"history", "indexes", "manifests", "nodes", "deltas", "snapshots"} < kinds.keys()
    assert told[-1][0] == "chunks"
    assert context_of(clone).repository_id == context_of(source).repository_id
    assert clone.config == source.config
    assert next(clone.ops_log()).operation == "clone"
    # It is a repository like any other.
    fill(clone, 20)
    clone.expire_snapshots(keep_last=1)
    clone.garbage_collect(NOW)
    assert clone.verify().problems == ()
    assert root_of(clone).branches["main"].head.copy is not None


def test_a_clone_on_disk_is_another_copy(tmp_path: Path) -> None:
    source = make(LocalStorage(tmp_path / "source"), 3)
    zm.clone(source, tmp_path / "clone")
    clone = zm.open(tmp_path / "clone")
    assert_equal(source, clone)
    inodes = {path.stat().st_ino for path in (tmp_path / "source").rglob("*") if path.is_file()}
    copies = [path for path in (tmp_path / "clone").rglob("*") if path.is_file()]
    assert len(copies) > 10
    assert not inodes & {path.stat().st_ino for path in copies}


@pytest.mark.sweep
def test_a_later_call_brings_what_is_new(whole: MemoryStorage) -> None:
    storage, place = copy_of(whole), MemoryStorage()
    source = opened(storage)
    zm.clone(source, place)
    assert zm.clone(source, place).objects == 0
    fill(source, 21)
    source.create_branch("third")
    fill(source, 22, "third")
    source.create_tag("later", line(source, "main")[2])
    before = {info.key for info in place.list()}
    report = zm.clone(source, place)
    assert_equal(source, opened(place))
    assert (report.snapshots, report.tags) == (2, {"later": source.list_tags()["later"]})
    assert report.objects < 12
    assert before < {info.key for info in place.list()}
    source.compact("main", mode="full")
    source.expire_snapshots(keep_last=3)
    source.garbage_collect(NOW)
    fill(source, 23)
    clone = opened(place)
    oldest = line(clone, "main")[-1]
    with clone.lease(oldest) as lease:
        zm.clone(source, place)
        assert line(clone, "main")[-1] == oldest
        lease.check()
    fill(source, 24)
    zm.clone(source, place)
    assert_equal(source, clone)
    clone.garbage_collect(NOW)
    assert_equal(source, clone)


def test_only_the_heads(whole: MemoryStorage) -> None:
    source, place = opened(copy_of(whole)), MemoryStorage()
    report = zm.clone(source, place, "head")
    clone = opened(place)
    assert clone.verify().problems == ()
    assert line(clone, "main") == line(source, "main")[:1]
    assert clone.list_tags() == source.list_tags()
    for snapshot in {*source.list_branches().values(), *source.list_tags().values()}:
        assert contents(clone, snapshot) == contents(source, snapshot)
    assert report.snapshots == len({*source.list_branches().values(), *source.list_tags().values()})
    with pytest.raises(SnapshotExpiredError):
        clone.lease(line(source, "main")[-1]).__enter__()
    fill(source, 24)
    fill(source, 25)
    source.create_branch("fourth")
    zm.clone(source, place, "head")
    assert line(clone, "main") == line(source, "main")[:3]
    assert line(clone, "fourth") == line(source, "main")[:1]
    clone.garbage_collect(NOW)
    assert clone.verify().problems == ()
    begins = line(source, "main")[2]
    with pytest.raises(ConflictError, match=f"'main' of .* begins at {begins}, .* older snapshots"):
        zm.clone(source, place, "all", ["main"])
    fill(source, 26)
    assert zm.clone(source, place).snapshots == 1
    assert line(clone, "main") == line(source, "main")[:4]


def test_some_branches(small: MemoryStorage) -> None:
    source, place = opened(copy_of(small)), MemoryStorage()
    source.create_tag("of-other", source.list_branches()["other"])
    zm.clone(source, place, branches=["main"])
    clone = opened(place)
    assert (list(clone.list_branches()), list(clone.list_tags())) == (["main"], ["t"])
    zm.clone(source, place)
    assert_equal(source, clone)


def test_a_first_expiry_in_between(small: MemoryStorage) -> None:
    """What has expired in the source expires in the clone, where every branch gets a floor."""
    source, place = opened(copy_of(small)), MemoryStorage()
    zm.clone(source, place, branches=["main"])
    fill(source, 30)
    source.expire_snapshots(keep_last=2)
    zm.clone(source, place)
    clone = opened(place)
    assert clone.verify().problems == ()
    assert_equal(source, clone)
    assert len(line(clone, "main")) == len(line(clone, "other")) == 2
    assert all(branch.floor for branch in root_of(clone).branches.values())


# --- two copies of one repository --------------------------------------------------------------


def test_commits_of_a_clone_are_kept(small: MemoryStorage) -> None:
    source, place = opened(copy_of(small)), MemoryStorage()
    zm.clone(source, place)
    clone = opened(place)
    fill(clone, 31)
    mine = clone.list_branches()
    for _ in range(2):  # also if the source has nothing new
        with pytest.raises(ConflictError, match="branch 'main' of memory:"):
            zm.clone(source, place)
        fill(source, 32)
    assert clone.list_branches() == mine
    assert clone.verify().problems == ()
    source.delete_tag("t")
    clone.reset_branch("main", line(clone, "main")[1], force=True)
    zm.clone(source, place)
    assert list(clone.list_tags()) == ["t"]  # nothing is taken away
    clone.create_tag("v", line(clone, "main")[0])
    source.create_tag("v", line(source, "main")[1])
    with pytest.raises(ConflictError, match="tag 'v'"):
        zm.clone(source, place)


def test_sessions_stay_with_their_copy(small: MemoryStorage) -> None:
    source, place = opened(copy_of(small)), MemoryStorage()
    zm.clone(source, place)
    clone = opened(place)
    for mine, other in ((source, clone), (clone, source)):
        session = mine.writable_session()
        fork = session.fork()
        zarr.open_array(fork.store, path="a")[0] = 99
        with pytest.raises(InvalidArgumentError, match="a fork of another"):
            other.writable_session().merge(fork)
        session.merge(fork)
        session.commit("at home")


def test_leases_and_claims_are_not_cloned(small: MemoryStorage) -> None:
    source, place = opened(copy_of(small)), MemoryStorage()
    with source.lease(source.list_branches()["main"], owner="a reader"):
        source.writable_session(exclusive=True)
        zm.clone(source, place)
        assert [lease.owner for lease in root_of(source).leases] == ["a reader"]
    root = root_of(opened(place))
    assert root.leases == ()
    assert root.branches["main"].epoch == 0
    fill(opened(place), 33)


# --- what is refused ---------------------------------------------------------------------------


def test_a_chunk_cut_short_at_the_place_is_named(small: MemoryStorage) -> None:
    source, place = opened(copy_of(small)), MemoryStorage()
    with pytest.raises(StorageError):
        zm.clone(source, FaultyStorage(place, [Fault("fail_before", op="create", skip=3)]))
    key = next(info.key for info in small.list("chunks/"))
    place.put(key, b"")
    with pytest.raises(CorruptObjectError, match=f"{key} .* clone again"):
        zm.clone(source, place)
    place.delete_many([key])
    assert zm.clone(source, place).branches == source.list_branches()


def test_places_that_are_refused(small: MemoryStorage, tmp_path: Path) -> None:
    source = opened(copy_of(small))
    other = MemoryStorage()
    make(other, 1)
    taken = MemoryStorage()
    taken.put("something", b"1")
    for place in (other, taken):
        with pytest.raises(AlreadyExistsError):
            zm.clone(source, place)
    unfinished = MemoryStorage()
    with pytest.raises(StorageError):
        zm.clone(source, FaultyStorage(unfinished, [Fault("fail_before", op="create", skip=3)]))
    with pytest.raises(AlreadyExistsError, match="unfinished clone of another"):
        zm.clone(opened(other), unfinished)
    with pytest.raises(AlreadyExistsError, match="clone again"):
        zm.create(unfinished)
    with pytest.raises(NotARepositoryError, match="clone again"):
        zm.open(unfinished)
    here = make(LocalStorage(tmp_path / "here"), 1)
    (tmp_path / "link").symlink_to(tmp_path / "here")
    for path in (tmp_path / "here", tmp_path / "here" / "within", tmp_path, tmp_path / "link"):
        with pytest.raises(InvalidArgumentError, match="overlap"):
            zm.clone(here, path)
    assert not (tmp_path / "here" / "within").exists()
    with pytest.raises(InvalidArgumentError, match="history='heads'"):
        zm.clone(source, MemoryStorage(), "heads")  # type: ignore[arg-type]
    for branches in ("main", ["other"], ["main", 3], ["main", ["other"]]):
        with pytest.raises(InvalidArgumentError):
            zm.clone(source, MemoryStorage(), branches=branches)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        zm.clone(source, MemoryStorage(), branches=["main", "absent"])


def test_damage_is_named(small: MemoryStorage) -> None:
    objects = [info for info in small.list() if info.key.count("/") == 2]
    for info in {info.key.partition("/")[0]: info for info in objects}.values():
        storage, place = copy_of(small), MemoryStorage()
        source = opened(storage)
        data = bytearray(storage.get(info.key))
        data[-1] ^= 1
        storage.put(info.key, bytes(data))
        with pytest.raises(CorruptObjectError, match=info.key):
            zm.clone(source, place)
        storage.delete_many([info.key])
        with pytest.raises((CorruptObjectError, MissingChunkError), match=info.key):
            zm.clone(opened(storage), place)
        assert not zm.exists(place)
        storage.put(info.key, small.get(info.key))
        zm.clone(opened(storage), place)  # once it is repaired
        assert_equal(opened(storage), opened(place))


# --- what fails --------------------------------------------------------------------------------


def copied(storages: list[FaultyStorage]) -> Counter[str]:
    """How often each object was sent."""
    return Counter(key for storage in storages for op, key in storage.calls if op == "create")


@some_or_all
@pytest.mark.parametrize("kind", ["fail_before", "fail_after", "lose_answer", "crash_after"])
def test_a_clone_continues_wherever_it_was_interrupted(
    small: MemoryStorage, kind: str, every: int
) -> None:
    source = opened(small)
    number, done = 1, False
    while not done:
        place = MemoryStorage()
        first, second = FaultyStorage(place), FaultyStorage(place)
        first.fail_at(number, kind)  # type: ignore[arg-type]
        with contextlib.suppress(StorageError, SimulatedCrash):
            zm.clone(source, first)
        report = zm.clone(source, second)
        assert_equal(source, opened(place))
        assert CLONING_KEY not in {info.key for info in place.list()}
        sent = copied([first, second])
        assert sum(count > 1 for count in sent.values()) <= 1, "only what was under way"
        done = len(first.calls) < number
        assert report.snapshots in (0, 5)  # 0 if only its answer was lost
        number += every
    assert number > 20


@some_or_all
@pytest.mark.parametrize("kind", ["fail_before", "crash_after"])
def test_what_fails_in_the_source(small: MemoryStorage, kind: str, every: int) -> None:
    number, done = 1, False
    while not done:
        below, place = copy_of(small), MemoryStorage()
        source = FaultyStorage(below)
        with contextlib.suppress(StorageError, SimulatedCrash):
            repository = opened(source)
            source.fail_at(len(source.calls) + number, kind)  # type: ignore[arg-type]
            begun = len(source.calls)
            zm.clone(repository, place)
        done = len(source.calls) - begun < number
        zm.clone(opened(below), place)
        assert_equal(opened(below), opened(place))
        number += every
    assert number > 20


# --- what others do meanwhile ------------------------------------------------------------------


def collect(repository: Repository) -> None:
    fill(repository, 40)
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(NOW)


def unmake(repository: Repository) -> None:
    repository.delete_branch("other")
    repository.garbage_collect(NOW)


def go_back(repository: Repository) -> None:
    repository.reset_branch("main", line(repository, "main")[1], force=True)
    repository.garbage_collect(NOW)
    fill(repository, 41)


WORK: dict[str, Callable[[Repository], object]] = {
    "commit": lambda repository: fill(repository, 42),
    "expiry and collection": collect,
    "a branch that goes": unmake,
    "a branch that goes back": go_back,
    "compaction": lambda repository: repository.compact("main", mode="full"),
}


@some_or_all
@pytest.mark.parametrize("name", WORK)
def test_others_work_in_the_source_meanwhile(small: MemoryStorage, name: str, every: int) -> None:
    number, done = 1, False
    while not done:
        below, place = copy_of(small), MemoryStorage()
        others = opened(below)
        racing = InterruptingStorage(below, lambda: WORK[name](others))  # noqa: B023
        repository = opened(racing)
        racing.arm(number)
        zm.clone(repository, place)
        done = len(racing.ops) < number
        clone = opened(place)
        assert clone.verify().problems == ()
        for branch, head in clone.list_branches().items():
            assert contents(clone, head)["packed"] == list(range(CELLS)), branch
        opened(below).verify()
        number += every


def orphans(source: Repository, place: Storage) -> None:
    """Leave objects at the place that no ref names yet."""
    with pytest.raises(StorageError):
        zm.clone(source, FaultyStorage(place, [Fault("fail_before", op="cas", count=None)]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["collection", "commit", "clone"])
def test_others_work_in_the_clone_meanwhile(small: MemoryStorage, name: str) -> None:
    source = opened(copy_of(small))
    begun = MemoryStorage()
    zm.clone(source, begun)
    fill(opened(begun), 43, "other")
    opened(begun).reset_branch("other", source.list_branches()["other"], force=True)
    fill(source, 44)
    fill(source, 45)
    orphans(source, begun)
    work: dict[str, Callable[[Repository], object]] = {
        "collection": lambda clone: clone.garbage_collect(NOW),
        "commit": lambda clone: fill(clone, 46),
        "clone": lambda clone: zm.clone(source, clone.storage),
    }
    number, done, refused = 1, False, 0
    while not done:
        place = copy_of(begun)
        others = opened(place)
        racing = InterruptingStorage(place, lambda: work[name](others), number)  # noqa: B023
        try:
            zm.clone(source, racing)
        except ConflictError:
            refused += 1
            assert opened(place).verify().problems == ()
            if name == "collection":
                zm.clone(source, place)
        done = len(racing.ops) < number
        assert opened(place).verify().problems == ()
        if name == "collection":
            assert_equal(source, opened(place))
        number += 1
    assert refused > 3


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


@some_or_all
def test_a_source_that_cannot_be_written(small: MemoryStorage, every: int) -> None:
    """No lease can be taken; what is collected meanwhile makes the clone begin again."""
    place = MemoryStorage()
    refused = Fault("fail_before", op="cas", count=None, error=UnsupportedStorageError)
    zm.clone(opened(FaultyStorage(small, [refused])), place)
    assert_equal(opened(small), opened(place))
    number, done = 1, False
    while not done:
        below, place = copy_of(small), MemoryStorage()
        others = opened(below)
        racing = InterruptingStorage(below, lambda: collect(others))  # noqa: B023
        repository = opened(FaultyStorage(racing, [refused]))
        racing.arm(number)
        zm.clone(repository, place)
        done = len(racing.ops) < number
        assert opened(place).verify().problems == ()
        number += every


def test_the_place_must_swap(small: MemoryStorage) -> None:
    with pytest.raises((UnsupportedStorageError, ManifestsError)):
        zm.clone(opened(small), "http://127.0.0.1:9/nowhere")
    assert context_of(opened(small)).roots.read().root.leases == ()
