"""Repositories: creating and opening them, refs, history, time travel."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import zarr_manifests as zm
from storages import WrappedStorage
from stored import get, put
from zarr_manifests import Repository
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotARepositoryError,
    NotFoundError,
    SnapshotExpiredError,
    StorageError,
    UnsupportedStorageError,
)
from zarr_manifests.repository import context_of
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import Capabilities


def commit_value(repository: Repository, key: str, value: bytes, branch: str = "main") -> str:
    session = repository.writable_session(branch)
    put(session, key, value)
    return session.commit(f"{key} = {value!r}")


@pytest.fixture
def repository() -> Repository:
    return zm.create(MemoryStorage())


def test_racing_processes_that_may_create_all_open_the_same() -> None:
    storage = MemoryStorage()
    found = SYSTEM.parallel([lambda: zm.open(storage, create=True).list_branches()] * 8)
    assert found == found[:1] * 8


class _WithoutSwap(WrappedStorage):
    @property
    def capabilities(self) -> Capabilities:
        return replace(self.storage.capabilities, cas=False)


def test_storage_that_cannot_swap_is_read_only() -> None:
    storage = MemoryStorage()
    with pytest.raises(UnsupportedStorageError, match="compare-and-swap"):
        zm.create(_WithoutSwap(storage))
    commit_value(zm.create(storage), "k", b"v")
    repository = zm.open(_WithoutSwap(storage))
    assert get(repository, "k") == b"v"
    with pytest.raises(UnsupportedStorageError, match="read-only"):
        repository.writable_session("main")


def test_a_reset_that_drops_commits_has_to_be_asked_for(repository: Repository) -> None:
    one = commit_value(repository, "k", b"1")
    repository.create_branch("side", one)
    two = commit_value(repository, "k", b"2")
    with pytest.raises(InvalidArgumentError, match=rf"main.*{two}.*expected='{two}'.*force"):
        repository.reset_branch("main", one)
    aside = commit_value(repository, "k", b"aside", branch="side")
    with pytest.raises(InvalidArgumentError, match="not a descendant"):
        repository.reset_branch("main", aside)
    assert repository.list_branches()["main"] == two
    repository.reset_branch("main", two)
    repository.reset_branch("main", one, expected=two)
    assert repository.list_branches()["main"] == one
    repository.reset_branch("main", aside)  # nothing is dropped
    repository.reset_branch("main", one, force=True)
    assert repository.list_branches()["main"] == one


def test_branch_refusals_name_what_is_wrong(repository: Repository) -> None:
    repository.create_branch("side")
    with pytest.raises(AlreadyExistsError, match="'side'"):
        repository.create_branch("side")
    with pytest.raises(NotFoundError, match=r"'nope'.*main, side"):
        repository.delete_branch("nope")
    with pytest.raises(InvalidArgumentError, match="'main' cannot be deleted"):
        repository.delete_branch("main")
    for session in (repository.readonly_session, repository.writable_session):
        with pytest.raises(NotFoundError, match="no branch 'nope'"):
            session("nope")


def test_the_name_of_a_deleted_tag_is_never_used_again(repository: Repository) -> None:
    repository.create_tag("v1")
    repository.delete_tag("v1")
    for _ in range(40):  # beyond the tail of the log
        repository.create_branch("b")
        repository.delete_branch("b")
    with pytest.raises(AlreadyExistsError, match="never used again"):
        zm.open(repository.storage).create_tag("v1")


def test_refs_point_only_to_snapshots_that_are_there(repository: Repository) -> None:
    one = commit_value(repository, "k", b"1")
    two = commit_value(repository, "k", b"2")
    repository.reset_branch("main", one, force=True)
    assert get(repository.readonly_session(two), "k") == b"2"
    repository.create_branch("left", two)  # it is not collected
    repository.create_tag("tagged", two)
    repository.delete_branch("left")
    repository.delete_tag("tagged")
    repository.garbage_collect(timedelta(0))
    for make in (repository.create_branch, repository.create_tag, repository.reset_branch):
        name = "main" if make == repository.reset_branch else "new"
        with pytest.raises(SnapshotExpiredError, match=r"it never was, or has\s+expired"):
            make(name, two)
        with pytest.raises(NotFoundError, match=r"no branch '../../etc/passwd'"):
            make(name, "../../etc/passwd")


@pytest.mark.parametrize("name", ["my data.nc", "some data/part.nc"])
def test_no_repository_is_made_among_files_that_no_key_can_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"theirs")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(AlreadyExistsError, match="is not empty"):
        zm.open(tmp_path, create=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_create_refuses_a_repository_that_lost_its_root(repository: Repository) -> None:
    storage = repository.storage
    commit_value(repository, "k", b"v")
    storage.delete_many(["current"])
    with pytest.raises(AlreadyExistsError, match=r"zm.recover .* newest archive under 'root/'"):
        zm.create(storage)
    with pytest.raises(NotARepositoryError, match=r"if the root is lost, zm\.recover"):
        zm.open(storage)


def test_racing_creates_have_one_winner() -> None:
    storage = MemoryStorage()
    outcomes: list[object] = []

    def create() -> None:
        try:
            outcomes.append(context_of(zm.create(storage)).repository_id)
        except AlreadyExistsError as error:
            outcomes.append(error)

    SYSTEM.parallel([create] * 8)
    winners = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert winners == [context_of(zm.open(storage)).repository_id]
    assert len(outcomes) == 8


def read_value(repository: Repository, key: str, version: str | None = None) -> bytes | None:
    found = repository.readonly_session(version).store.get_sync(key)
    return None if found is None else found.to_bytes()


def _clock(times: list[int]) -> Runtime:
    return replace(SYSTEM, now_ms=lambda: times[0])


def test_a_branch_at_a_time() -> None:
    times = [1_000_000]
    repository = zm.create(MemoryStorage(), runtime=_clock(times))
    for i, at in enumerate((2_000_000, 3_000_000, 4_000_000)):
        times[0] = at
        commit_value(repository, "k", bytes([i]))

    def at(ms: int) -> datetime:
        return datetime.fromtimestamp(ms / 1000, UTC)

    assert read_value(repository, "k", f"main@{at(2_000_000)}") == b"\0"
    assert read_value(repository, "k", f"main@{at(2_999_999)}") == b"\0"
    assert read_value(repository, "k", f"main@{at(3_000_000)}") == b"\1"
    assert read_value(repository, "k", f"main@{at(9_000_000)}") == b"\2"
    assert read_value(repository, "k", f"main@{at(1_500_000)}") is None
    assert read_value(repository, "k", f"main@{at(3_500_000)}") == b"\1"
    assert read_value(repository, "k", f"main@{at(3_500_000).replace(tzinfo=None)}") == b"\1"
    shifted = at(3_500_000).astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert read_value(repository, "k", f"main@{shifted}") == b"\1"
    with pytest.raises(NotFoundError, match="no snapshot from 1970"):
        repository.readonly_session(f"main@{at(999_999)}")
    assert [info.written_at for info in repository.ancestry()] == [
        at(4_000_000),
        at(3_000_000),
        at(2_000_000),
        at(1_000_000),
    ]


def test_a_read_that_failed_is_no_read_of_the_root() -> None:
    class Flaky(MemoryStorage):
        fails = False

        def get_tagged(self, key: str) -> Any:
            if self.fails:
                raise StorageError("once")
            return super().get_tagged(key)

    storage = Flaky()
    session = zm.create(storage).writable_session()
    put(session, "a", b"1")
    repo = zm.open(storage)
    session.commit("acknowledged")
    storage.fails = True
    with pytest.raises(StorageError):
        repo.writable_session()
    storage.fails = False
    assert repo.readonly_session().snapshot_id == session.snapshot_id
