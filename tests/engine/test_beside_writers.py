"""Who only looks tells of no damage where others write and collect meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from typing import Any

import pytest
import zarr

import zarr_manifests as zm
from inside import change_root
from zarr_manifests import Repository
from zarr_manifests.engine.upkeep import verify
from zarr_manifests.errors import InvalidArgumentError, SnapshotExpiredError
from zarr_manifests.planning.upkeep import collection
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import InterruptingStorage, copy_of, in_order
from zarr_manifests.testing.wrapped import Call, WrappedStorage

NOW = timedelta(0)
CONFIG = {"inline-chunk-bytes": 0, "compaction": {"mode": "manual"}}
CELLS = 4
type Work = Callable[[Repository], object]


def opened(storage: Storage) -> Repository:
    return zm.open(storage, runtime=in_order())


def commit(repository: Repository) -> None:
    with repository.transaction(message="beside") as store:
        array = zarr.open_array(store, path="a")
        array[:] = array[:] + 1


def collect(repository: Repository) -> None:
    commit(repository)
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(NOW)


def go_back(repository: Repository) -> None:
    version = next(repository.ops_log()).version
    commit(repository)
    zm.recover(repository, version)


def unmake(repository: Repository) -> None:
    head = repository.list_branches()["main"]
    repository.create_branch("gone", head)
    with repository.transaction("gone", message="gone") as store:
        zarr.open_array(store, path="a")[:] = 7
    repository.delete_branch("gone")
    repository.garbage_collect(NOW)


def rewrite_pages(repository: Repository) -> None:
    tag(repository, "another", 200)
    collect(repository)


def tag(repository: Repository, name: str, count: int) -> None:
    """Give the head so many tags in one swap, with names that cannot be made shorter."""
    ref = contents_of(repository.readonly_session().store).view.ref.bare()
    tags = {sha256(f"{name}-{i}".encode()).hexdigest(): ref for i in range(count)}
    change_root(repository, "create tag", lambda root: replace(root, tags={**root.tags, **tags}))


WORK: dict[str, Work] = {
    "commit": commit,
    "expiry and collection": collect,
    "compaction": lambda repository: repository.compact(mode="full") and collect(repository),
    "restore": go_back,
    "a branch that goes": unmake,
    "pages": rewrite_pages,
}


@pytest.fixture(autouse=True)
def _few_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that collections of a small repository remove archives, too."""
    monkeypatch.setattr(collection, "ARCHIVES_KEPT", 2)


@pytest.fixture(scope="module")
def made() -> MemoryStorage:
    storage = MemoryStorage()
    repository = zm.create(storage, CONFIG, runtime=in_order())
    with repository.transaction(message="make a") as store:
        array = zarr.create_array(store, name="a", shape=(CELLS,), chunks=(2,), dtype="i8")
        array[:] = 1
    commit(repository)
    repository.create_tag("t", repository.list_branches()["main"])
    commit(repository)
    return storage


@pytest.fixture(scope="module")
def paged(made: MemoryStorage) -> MemoryStorage:
    storage = copy_of(made)
    repository = opened(storage)
    tag(repository, "tag", 200)
    assert any(info.key.startswith("pages/") for info in storage.list())
    return storage


def moments(made: MemoryStorage, work: Work) -> Iterator[InterruptingStorage]:
    """A storage for each moment at which the work may come between."""
    for number in range(1, 1000):
        storage = copy_of(made)
        others = opened(storage)
        racing = InterruptingStorage(storage, lambda others=others: work(others))
        racing.number = number  # type: ignore[attr-defined]
        yield racing
        if len(racing.ops) < number:
            return


@pytest.mark.parametrize("name", WORK)
def test_verification_reports_nothing_whatever_others_do_between_its_calls(
    name: str, made: MemoryStorage, paged: MemoryStorage
) -> None:
    for racing in moments(paged if name == "pages" else made, WORK[name]):
        repository = opened(racing)
        racing.arm(racing.number)  # type: ignore[attr-defined]
        assert repository.verify().problems == ()


class Restless(WrappedStorage):
    """Others do something before each third call."""

    work: Callable[[], object] | None = None
    calls = 0

    def _around[R](self, call: Call[R]) -> R:
        self.calls += 1
        if self.work is not None and self.calls % 3 == 0:
            self.work()
        return super()._around(call)


@pytest.mark.parametrize("name", ["commit", "expiry and collection"])
def test_verification_reports_nothing_while_others_never_rest(
    name: str, made: MemoryStorage
) -> None:
    storage = copy_of(made)
    others, restless = opened(storage), Restless(storage)
    repository = opened(restless)
    restless.work = lambda: WORK[name](others)
    assert repository.verify().problems == ()


def test_commits_are_no_reason_to_look_again(
    made: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, look, looks = copy_of(made), verify._look, list[object]()

    def counted(*args: Any) -> Any:
        looks.append(args)
        return look(*args)

    monkeypatch.setattr(verify, "_look", counted)
    others, restless = opened(storage), Restless(storage)
    repository = opened(restless)
    restless.work = lambda: commit(others)
    assert repository.verify().ok
    assert len(looks) == 1


def test_what_is_damaged_is_found_though_others_never_rest(made: MemoryStorage) -> None:
    storage = copy_of(made)
    head = contents_of(opened(storage).readonly_session().store).view
    bad = head.snapshot.log.key
    opened(storage).create_tag("damaged", head.snapshot_id)
    data = storage.get(bad)
    storage.delete_many([bad])
    storage.put(bad, data[:-1] + bytes([data[-1] ^ 1]))
    others, restless = opened(storage), Restless(storage)
    repository = opened(restless)
    restless.work = lambda: others.create_tag(f"t-{len(others.list_tags())}")
    assert [problem.key for problem in repository.verify().problems] == [bad]


def test_looking_for_what_to_recover_finds_nothing_whatever_others_do_between_its_calls(
    made: MemoryStorage,
) -> None:
    for racing in moments(made, collect):
        racing.arm(racing.number)  # type: ignore[attr-defined]
        with pytest.raises(InvalidArgumentError, match="nothing to recover"):
            zm.recover(racing, dry_run=True, runtime=in_order())


def test_the_log_of_operations_ends_where_archives_are_removed_meanwhile(
    made: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = copy_of(made)
    repository = opened(storage)
    for _ in range(40):
        collect(repository)
    newest = next(repository.ops_log()).version
    for racing in moments(storage, collect):
        watched = opened(racing)
        racing.arm(racing.number)  # type: ignore[attr-defined]
        versions = [one.version for one in watched.ops_log()]
        assert versions == sorted(versions, reverse=True)
        assert versions[0] >= newest


OPERATIONS: dict[str, Work] = {
    "expire": lambda repository: repository.expire_snapshots(keep_last=2),
    "create branch": lambda repository: repository.create_branch("b", oldest(repository)),
    "lease": lambda repository: repository.lease(oldest(repository)).__enter__(),
}


def oldest(repository: Repository) -> str:
    """The snapshot that was the first; it may have expired meanwhile."""
    return repository.first  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_collected_while_history_is_gone_through_is_not_told_as_damage(
    name: str, made: MemoryStorage
) -> None:
    first = [info.snapshot_id for info in opened(made).ancestry()][-2]
    for racing in moments(made, collect):
        repository = opened(racing)
        repository.first = first  # type: ignore[attr-defined]
        racing.arm(racing.number)  # type: ignore[attr-defined]
        with contextlib.suppress(SnapshotExpiredError):
            OPERATIONS[name](repository)
        assert opened(copy_of(racing._storage)).verify().ok  # type: ignore[arg-type]
