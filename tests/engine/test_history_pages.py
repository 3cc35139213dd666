"""The history as snapshots tell it of their ancestors: cheap, and the same as that of a walk."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import zarr_manifests as zm
from effort import examples
from in_order import in_order
from inside import root_of, short_pages
from storages import CountingStorage, LatencyStorage, copy_of
from zarr_manifests import Repository
from zarr_manifests.reports import SnapshotInfo
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage

QUIET = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 0}
NOW = timedelta(0)


def commit(
    repository: Repository,
    message: str,
    branch: str = "main",
    metadata: dict[str, Any] | None = None,
) -> str:
    session = repository.writable_session(branch)
    zarr.create_group(session.store, overwrite=True, attributes={"last": message[:100]})
    return session.commit(message, metadata)


def walked(repository: Repository, branch: str = "main") -> list[SnapshotInfo]:
    """The history of a branch, each snapshot asked about itself."""
    (info,) = repository.ancestry(branch, limit=1)
    found = [info]
    oldest = [*repository.ancestry(branch)][-1].snapshot_id
    while info.snapshot_id != oldest:
        assert info.parent_id is not None
        (info,) = repository.ancestry(info.parent_id, limit=1)
        found.append(info)
    return found


def check(storage: MemoryStorage, *branches: str) -> None:
    repository = zm.open(storage, runtime=in_order())
    for branch in branches or ("main",):
        assert [*repository.ancestry(branch)] == walked(repository, branch)


def test_long_messages_are_read_from_their_snapshots() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, QUIET)
    for i in range(40):
        text = "long " * 400 if i % 3 else "short"
        commit(repository, f"{i} {text}", metadata={"of": [i, text]})
    check(storage)
    assert max(info.nbytes for info in storage.list("snapshots/")) < 32 * 1024
    far = CountingStorage(LatencyStorage(storage, latency_s=0))
    repository = zm.open(far)
    far.reset()
    assert len([*repository.ancestry()]) == 41
    assert far.rounds() <= 8  # entries, then a round for their messages


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["commit"] * 4 + ["amend", "compact", "expire", "collect", "branch", "reset", "restore"]
        ),
        st.integers(0, 9),
    ),
    max_size=30,
)


@given(steps=STEPS)
@settings(max_examples=examples(40))
def test_whatever_is_done_pages_tell_what_a_walk_finds(steps: list[tuple[str, int]]) -> None:
    storage = MemoryStorage()
    with short_pages():
        repository = zm.create(storage, QUIET, runtime=in_order())
        commit(repository, "first")
        branches = ["main"]
        for number, (what, at) in enumerate(steps):
            take(repository, branches, what, at, str(number))
            check(storage, *branches)
    assert repository.verify().problems == ()


def take(repository: Repository, branches: list[str], what: str, at: int, message: str) -> None:
    branch = branches[at % len(branches)]
    match what:
        case "commit":
            for i in range(1 + at):
                commit(repository, f"{message} {i}", branch)
        case "amend":
            session = repository.writable_session(branch)
            zarr.create_group(session.store, overwrite=True, attributes={"last": message})
            line = walked(repository, branch)
            if len(line) > 1 and line[0].kind != "rewrite":
                session.amend(message)
        case "compact":
            repository.compact(branch)
        case "expire":
            repository.expire_snapshots(keep_last=1 + at)
        case "collect":
            repository.garbage_collect(NOW)
        case "branch":
            line = walked(repository, branch)
            branches.append(f"b{len(branches)}")
            repository.create_branch(branches[-1], line[at % len(line)].snapshot_id)
        case "reset":
            line = walked(repository, branches[0])
            repository.reset_branch(branch, line[at % len(line)].snapshot_id, force=True)
        case "restore":
            restore(repository, branches, at)


def restore(repository: Repository, branches: list[str], at: int) -> None:
    root = root_of(repository)
    logged = [entry.version for entry in root.log]
    versions = [v for v in logged if root.collected < v < root.version]
    if versions:
        zm.recover(repository, versions[-1 - at % len(versions)])
        branches[:] = ["main", *sorted({*repository.list_branches()} - {"main"})]


def test_a_compaction_drops_pages_of_what_has_expired() -> None:
    storage = MemoryStorage()
    with short_pages():
        repository = zm.create(storage, QUIET, runtime=in_order())
        for i in range(35):
            commit(repository, str(i))
            if i % 7 == 6:
                repository.expire_snapshots(keep_last=8)
                repository.compact("main")
                repository.garbage_collect(NOW)
                check(storage)
    keys = {info.key for info in storage.list("history/")}
    assert len(keys) <= 16
    for _ in range(2):
        repository.expire_snapshots(keep_last=1)
        commit(repository, "more")
        repository.compact("main", mode="full")
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(NOW)
    assert [*storage.list("history/")] == []
    check(storage)
    assert repository.verify().problems == ()


@pytest.fixture(scope="module")
def deep() -> MemoryStorage:
    """A history with pages of pages."""
    storage = MemoryStorage()
    with short_pages():
        repository = zm.create(storage, QUIET, runtime=in_order())
        for i in range(20):
            commit(repository, str(i))
    return storage


def pages(storage: MemoryStorage) -> set[str]:
    return {info.key for info in storage.list("history/")}


def test_a_page_that_cannot_be_read_keeps_all_others_from_being_deleted(
    deep: MemoryStorage,
) -> None:
    """What it names is not known then."""
    collected = copy_of(deep)
    zm.open(collected, runtime=in_order()).garbage_collect(NOW)
    for key in sorted(pages(collected)):
        storage = copy_of(deep)
        data = storage.get(key)
        storage.put(key, data[:-1] + bytes([data[-1] ^ 1]))
        zm.open(storage, runtime=in_order()).garbage_collect(NOW)
        assert pages(storage) >= pages(collected)


def test_a_damaged_page_does_not_make_a_recovery_go_back(deep: MemoryStorage) -> None:
    storage = copy_of(deep)
    newest = zm.open(storage).list_branches()
    for key in pages(storage):
        storage.put(key, b"damaged")
    storage.delete_many(["current"])
    report = zm.recover(storage)
    assert report.branches.keys() == newest.keys()
    assert zm.open(storage).list_branches() == newest
    check(storage)


def test_a_time_finds_what_was_committed_by_then_also_in_pages() -> None:
    at_ms = [1_000_000]
    repository = zm.create(MemoryStorage(), QUIET, runtime=replace(SYSTEM, now_ms=lambda: at_ms[0]))
    for i in range(40):
        at_ms[0] += 10
        commit(repository, f"{i}")
    for info in [*repository.ancestry()][:-1]:
        assert repository.readonly_session(f"main@{info.written_at}").snapshot_id == info.id
