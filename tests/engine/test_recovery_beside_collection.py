"""A root that is made anew while a collection runs needs nothing that this one deletes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import Config, Repository
from zarr_manifests.error_cases import FencedError
from zarr_manifests.errors import ConflictError, ManifestsError
from zarr_manifests.format.root import WRITE_ID_BYTES, LogEntry, Root, archive_key
from zarr_manifests.ids import snapshot_key
from zarr_manifests.planning.upkeep.collection import unended_since
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import SimulatedCrash, copy_of, in_order
from zarr_manifests.testing.wrapped import Call, WrappedStorage

NOW = timedelta(0)
CONFIG = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0, "compaction": {"mode": "manual"}}


class Before(WrappedStorage):
    """Something happens before one of the calls of a name."""

    def __init__(self, storage: Storage, happens: Callable[[], object], op: str, at: int) -> None:
        super().__init__(storage)
        self.happens, self.op, self.at, self.seen = happens, op, at, 0

    def _around[R](self, call: Call[R]) -> R:
        if self.op in ("", call.op):
            self.seen += 1
            if self.seen == self.at:
                self.happens()
        return super()._around(call)


def opened(storage: Storage) -> Repository:
    return zm.open(storage, runtime=in_order())


def fill(repository: Repository, value: int) -> str:
    with repository.transaction(message=f"fill {value}") as store:
        zarr.open_array(store, path="a")[:] = value
    return repository.list_branches()["main"]


def read(repository: Repository) -> list[int]:
    array = zarr.open_array(repository.readonly_session().store, path="a", mode="r")
    return np.asarray(array[:]).tolist()


@pytest.fixture(scope="module")
def made() -> MemoryStorage:
    """Five versions, and much that is about to expire."""
    storage = MemoryStorage()
    repository = zm.create(storage, CONFIG, runtime=in_order())
    with repository.transaction(message="make a") as store:
        zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i4")[:] = 1
    for value in (2, 3, 4):
        fill(repository, value)
    return storage


def lose_the_root(storage: Storage) -> None:
    storage.delete_many(["current"])


def damage_the_head(storage: Storage) -> None:
    storage.delete_many([snapshot_key(opened(storage).list_branches()["main"])])


def expire_and_collect(storage: Storage, others: Storage) -> None:
    opened(others).expire_snapshots(keep_last=1)
    opened(storage).garbage_collect(NOW)


def test_whenever_a_root_is_recovered_the_collection_takes_nothing_from_it(
    made: MemoryStorage,
) -> None:
    """Also between its look at the root and the deletion that follows."""
    for moment in range(1, 1000):
        below = copy_of(made)

        def recover(below: MemoryStorage = below) -> None:
            lose_the_root(below)
            zm.recover(below, runtime=in_order())

        storage = Before(below, recover, "", moment)
        refused: list[ManifestsError] = []
        try:
            expire_and_collect(storage, below)
        except ManifestsError as error:
            refused.append(error)
        repository = opened(below)
        assert repository.verify().problems == ()
        assert read(repository) == [4] * 4
        fill(repository, 5)
        if storage.seen < moment:
            assert not refused
            assert moment > 20
            return


def test_an_archive_from_before_a_collection_that_runs_is_not_taken(made: MemoryStorage) -> None:
    below = copy_of(made)
    refused: list[str] = []

    def lose_much() -> None:
        damage_the_head(below)
        lose_the_root(below)
        for dry_run in (True, False):
            with pytest.raises(ConflictError, match="may still delete") as caught:
                zm.recover(below, dry_run=dry_run, runtime=in_order())
            refused.append(str(caught.value))

    # The collector has just looked at the root, and its deletion is on the way.
    storage = Before(below, lose_much, "delete_many", 1)
    with contextlib.suppress(ManifestsError):
        expire_and_collect(storage, below)
    assert len(refused) == 2
    with pytest.raises(FileNotFoundError):
        below.get("current")


def test_an_archive_from_before_a_collection_that_has_died_is_taken_if_one_says_so(
    made: MemoryStorage,
) -> None:
    below = copy_of(made)

    def die() -> None:
        damage_the_head(below)
        lose_the_root(below)
        raise SimulatedCrash

    with pytest.raises(SimulatedCrash):
        expire_and_collect(Before(below, die, "delete_many", 1), below)
    with pytest.raises(ConflictError, match="collections_ended"):
        zm.recover(below, runtime=in_order())
    zm.recover(below, collections_ended=True, runtime=in_order())
    repository = opened(below)
    assert repository.verify().problems == ()
    assert read(repository) == [3] * 4


def test_after_a_collection_that_has_ended_older_archives_are_taken(made: MemoryStorage) -> None:
    storage = copy_of(made)
    opened(storage).garbage_collect(NOW)
    damage_the_head(storage)
    lose_the_root(storage)
    zm.recover(storage, runtime=in_order())
    assert read(opened(storage)) == [3] * 4


def test_what_an_unreadable_archive_was_of_is_not_known(made: MemoryStorage) -> None:
    storage = copy_of(made)
    version = next(opened(storage).ops_log()).version
    storage.delete_many([archive_key(version)])
    storage.put(archive_key(version), b"damaged")
    lose_the_root(storage)
    with pytest.raises(ConflictError, match=f"at version {version}"):
        zm.recover(storage, runtime=in_order())
    zm.recover(storage, collections_ended=True, runtime=in_order())
    assert read(opened(storage)) == [3] * 4


def test_a_collector_stops_when_an_older_root_is_put_back(made: MemoryStorage) -> None:
    below = copy_of(made)
    older = below.get("current")

    def put_back() -> None:
        below.put("current", older)

    storage = Before(below, put_back, "delete_many", 2)
    with pytest.raises(FencedError, match="knows nothing of the collection"):
        expire_and_collect(storage, below)
    assert storage.seen == 2


def roots(*operations: str, first: int = 1) -> list[Root]:
    """Roots whose logs have these operations, each a version."""
    entries = [LogEntry(first + i, 0, operation, "", "") for i, operation in enumerate(operations)]
    return [
        Root(
            "0" * 32,
            entry.version,
            bytes(WRITE_ID_BYTES),
            0,
            Config(),
            log=tuple(entries[: i + 1]),
        )
        for i, entry in enumerate(entries)
    ]


BEGIN, END = "collect garbage", "end collection"


@pytest.mark.parametrize(
    ("operations", "version", "due"),
    [
        (("create", "commit", "commit"), 1, None),
        (("create", "commit", BEGIN), 2, 3),
        (("create", "commit", BEGIN), 3, None),
        (("create", "commit", BEGIN, "commit"), 2, 3),
        (("create", "commit", BEGIN, END), 2, None),
        (("create", "commit", BEGIN, END, BEGIN), 2, 5),
        # The second has ended the first, but for what it had sent.
        (("create", "commit", BEGIN, BEGIN, END), 2, 3),
        (("create", "commit", BEGIN, BEGIN, END), 3, None),
    ],
)
def test_which_collections_may_still_delete(
    operations: tuple[str, ...], version: int, due: int | None
) -> None:
    newer = [root for root in roots(*operations) if root.version > version]
    assert unended_since(version, newer, []) == due


def test_what_is_not_known_may_be_a_collection() -> None:
    assert unended_since(1, [], [2]) == 2
    assert unended_since(1, roots("create", "commit", "commit")[1:], [2]) is None
    assert unended_since(1, roots("commit", "commit", first=7), []) == 2
