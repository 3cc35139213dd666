"""The history as snapshots tell it of their ancestors: cheap, and the same as that of a walk."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples, some_or_all
from inside import context_of, root_of, short_pages
from zarr_manifests import Repository
from zarr_manifests.engine.history.ancestry import ancestors
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.entry_columns import HistoryEntries
from zarr_manifests.format.history_pages import History, HistoryPage
from zarr_manifests.format.root import HISTORY_PAGES
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.reports import SnapshotInfo
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import CountingStorage, LatencyStorage, copy_of, in_order

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
    """The history of a branch from the snapshots themselves."""
    tip = root_of(repository).branches[branch]
    line = ancestors(context_of(repository), tip.head, tip.floor)
    return [SnapshotInfo.from_entry(snapshot.entry(ref)) for ref, snapshot in line]


def check(storage: MemoryStorage, *branches: str) -> None:
    repository = zm.open(storage, runtime=in_order())
    for branch in branches or ("main",):
        assert [*repository.ancestry(branch)] == walked(repository, branch)


def far_away(storage: MemoryStorage) -> CountingStorage:
    return CountingStorage(LatencyStorage(storage, latency_s=0))


def head_of(storage: MemoryStorage, branch: str = "main") -> Snapshot:
    head = root_of(storage).branches[branch].head
    return Snapshot.from_object(storage.get(head.key), head)


@pytest.fixture(scope="module")
def thousand() -> MemoryStorage:
    """A branch of 1,000 commits, compacted as is usual."""
    storage = MemoryStorage()
    repository = zm.create(storage)
    for i in range(1_000):
        commit(repository, f"commit {i}", metadata={"number": i})
    return storage


# --- what it costs -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_snapshots_are_listed_in_a_few_rounds(thousand: MemoryStorage) -> None:
    storage = far_away(thousand)
    repository = zm.open(storage)
    storage.reset()
    history = [*repository.ancestry()]
    assert storage.rounds() <= 2  # the root, all pages
    assert storage.requests <= 12
    assert storage.bytes_read <= 128 * 1024
    assert len(history) > 1_000
    assert history == walked(zm.open(thousand))


def test_the_newest_twenty_need_two_requests(thousand: MemoryStorage) -> None:
    storage = far_away(thousand)
    repository = zm.open(storage)
    storage.reset()
    assert len([*repository.ancestry(limit=20)]) == 20
    assert storage.requests <= 2  # the root, a page


@pytest.mark.parametrize("limit", [0, 1, 2, 40, 300, 1_000, 10**30])
def test_a_limit_ends_the_history_and_opens_no_page_too_many(
    thousand: MemoryStorage, limit: int
) -> None:
    everything = walked(zm.open(thousand))
    storage = far_away(thousand)
    repository = zm.open(storage)
    storage.reset()
    assert [*repository.ancestry(limit=limit)] == everything[:limit]
    assert storage.rounds() <= 2
    head = head_of(thousand).history
    left, due = limit - 1 - len(head.recent), 0
    for page in reversed(head.pages):
        due += left > 0
        left -= page.count
    assert len({r.key for r in storage.log if r.key.startswith("history/")}) == due


@pytest.mark.parametrize("limit", [-1, True, 1.5, "2"])
def test_a_limit_that_is_no_number_is_refused(thousand: MemoryStorage, limit: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="limit must be a whole number"):
        zm.open(thousand).ancestry(limit=limit)


def test_commits_stay_small(thousand: MemoryStorage) -> None:
    sizes = [info.nbytes for info in thousand.list("snapshots/")]
    assert max(sizes) <= 6 * 1024
    pages = [info.nbytes for info in thousand.list("history/")]
    assert sum(pages) <= 400 * 1_000


def test_a_commit_with_a_new_page_takes_no_round_more() -> None:
    storage = CountingStorage(LatencyStorage(MemoryStorage(), latency_s=0))
    repository = zm.create(storage, QUIET)
    rounds: dict[int, set[int]] = {}
    for i in range(120):
        session = repository.writable_session()
        zarr.create_group(session.store, overwrite=True, attributes={"last": i})
        storage.reset()
        session.commit(str(i))
        pages = {record.key for record in storage.log if record.key.startswith("history/")}
        rounds.setdefault(len(pages), set()).add(storage.rounds())
    assert rounds.keys() == {0, 1}
    assert rounds[0] == rounds[1]


def test_time_travel_reads_pages_instead_of_snapshots(thousand: MemoryStorage) -> None:
    storage = far_away(thousand)
    repository = zm.open(storage)
    *_, second, _ = zm.open(thousand).ancestry()
    storage.reset()
    session = repository.readonly_session(f"main@{second.written_at}")
    assert session.snapshot_id == second.snapshot_id
    assert storage.rounds() <= 5
    read = [r.key for r in storage.log if r.op == "get" and r.key.startswith("snapshots/")]
    assert len(read) == 1


def test_an_expiry_reads_what_stays_and_lists_the_rest_from_pages(thousand: MemoryStorage) -> None:
    ids = [info.snapshot_id for info in walked(zm.open(thousand))]
    storage = far_away(thousand)
    repository = zm.open(storage)
    storage.reset()
    report = repository.expire_snapshots(keep_last=5, dry_run=True)
    assert report.kept["main"] == 5
    assert [*report.expired["main"]] == ids[5:]
    assert storage.rounds() <= 8  # the root, six snapshots, all pages
    assert storage.requests <= 18


def test_pages_below_the_floor_are_not_opened(thousand: MemoryStorage) -> None:
    storage = copy_of(thousand)
    repository = zm.open(storage)
    repository.expire_snapshots(keep_last=100)
    far = far_away(storage)
    repository = zm.open(far)
    far.reset()
    assert len([*repository.ancestry()]) == 100
    pages = [record.key for record in far.log if record.key.startswith("history/")]
    assert len(pages) <= 6
    assert far.rounds() <= 3  # the root, the oldest snapshot, all pages


# --- the same as a walk --------------------------------------------------------------------------


def test_long_messages_are_read_from_their_snapshots() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, QUIET)
    for i in range(60):
        text = "long " * 400 if i % 3 else "short"
        commit(repository, f"{i} {text}", metadata={"of": [i, text]})
    check(storage)
    assert max(info.nbytes for info in storage.list("snapshots/")) < 32 * 1024
    far = far_away(storage)
    repository = zm.open(far)
    far.reset()
    assert len([*repository.ancestry()]) == 61
    assert far.rounds() <= 8  # entries, then a round for their messages


def test_an_amended_commit_is_not_in_the_history_of_its_successor() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, QUIET)
    for i in range(3):
        commit(repository, str(i))
    old = repository.list_branches()["main"]
    session = repository.writable_session()
    zarr.create_group(session.store, overwrite=True, attributes={"last": "amended"})
    session.amend("amended")
    check(storage)
    commit(repository, "after")
    check(storage)
    assert old not in {info.snapshot_id for info in repository.ancestry()}


def test_history_without_entries_is_walked_from_there_on() -> None:
    """As of a writer that left them out: the next commit tells of its parent only."""
    storage = MemoryStorage()
    repository = zm.create(storage, QUIET, runtime=in_order())
    for i in range(5):
        commit(repository, str(i))
    context = context_of(repository)
    head = root_of(repository).branches["main"].head
    line = [*ancestors(context, head)]
    context.objects.cache.clear()
    for ref, snapshot in line:
        context.objects.remember(ref, replace(snapshot, history=History()))
    commit(repository, "on top")
    told = head_of(storage).history
    assert told.count == 1
    assert [info.message for info in repository.ancestry()][:-1] == [
        "on top",
        *map(str, range(4, -1, -1)),
    ]


def test_the_first_page_adds_the_feature() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, QUIET)
    with short_pages():
        while not head_of(storage).history.pages:
            assert HISTORY_PAGES not in root_of(storage).features
            commit(repository, "one more")
    assert HISTORY_PAGES in root_of(storage).features


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["commit"] * 4
            + ["amend", "compact", "repack", "expire", "collect", "branch", "reset", "restore"]
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
        case "repack":
            repack(repository, branch, message)
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


def repack(repository: Repository, branch: str, message: str) -> None:
    """Make a pack that is mostly dead, and move the rest out of it."""
    session = repository.writable_session(branch)
    zarr.create_array(session.store, name="a", data=np.arange(9), chunks=(1,), overwrite=True)
    session.commit(f"{message} packed")
    zarr.open_array(session.store, path="a")[:8] = 0
    session.commit(f"{message} mostly dead")
    assert repository.compact(branch, mode="packs")


# --- collection ----------------------------------------------------------------------------------


def test_pages_go_with_the_newest_snapshot_that_they_cover() -> None:
    """Found without listing all objects: what expires leads to them, or what is left does."""
    storage = MemoryStorage()
    with short_pages():
        repository = zm.create(storage, QUIET, runtime=in_order())
        for i in range(60):
            commit(repository, str(i))
            if i % 7 == 6:
                repository.expire_snapshots(keep_last=8)
                report = repository.garbage_collect(NOW)
                assert report.complete == (i in {6, 69})
                check(storage)
    keys = {info.key for info in storage.list("history/")}
    assert len(keys) <= 12
    repository.expire_snapshots(keep_last=1)
    for _ in range(10):
        repository.garbage_collect(NOW)
    assert [*storage.list("history/")] == []
    check(storage)
    assert repository.verify().problems == ()


# --- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep() -> MemoryStorage:
    """A history with pages of pages."""
    storage = MemoryStorage()
    with short_pages(page=3, fan_out=3):
        repository = zm.create(storage, QUIET, runtime=in_order())
        for i in range(40):
            commit(repository, str(i))
    assert {page.level for page in head_of(storage).history.pages} >= {1, 2}
    return storage


def damaged(storage: MemoryStorage) -> Iterator[tuple[str, MemoryStorage]]:
    """A key, and a copy of the storage in which that page is not what it should be."""
    keys = [info.key for info in storage.list("history/")]
    for key, other in zip(keys, [*keys[1:], keys[0]], strict=True):
        data = storage.get(key)
        for now in None, data[:-1], data[:-1] + bytes([data[-1] ^ 1]), storage.get(other):
            copy = copy_of(storage)
            copy.delete_many([key])
            if now is not None:
                copy.put(key, now)
            yield key, copy


@pytest.mark.slow
@some_or_all
def test_damage_hides_neither_itself_nor_the_history(
    deep: MemoryStorage, caplog: pytest.LogCaptureFixture, every: int
) -> None:
    for key, storage in itertools.islice(damaged(deep), 0, None, every):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            check(storage)
            told = key in caplog.text
        repository = zm.open(storage, runtime=in_order())
        assert [problem.key for problem in repository.verify().problems] == [key]
        assert told or key not in reached(storage)
        commit(repository, "goes on")
        check(storage)
        repository.garbage_collect(NOW)
        check(storage)


def reached(storage: MemoryStorage) -> set[str]:
    """The pages that the head of the branch leads to."""
    found: set[str] = set()
    due = [*head_of(storage).history.pages]
    while due:
        ref = due.pop()
        found.add(ref.blob.key)
        try:
            due += HistoryPage.from_object(storage.get(ref.blob.key), ref.blob).pages
        except (CorruptObjectError, KeyError):
            continue
    return found


def test_a_page_that_cannot_be_read_keeps_all_others_from_being_deleted(
    deep: MemoryStorage,
) -> None:
    """What it names is not known then."""
    names_others = [page.blob.key for page in head_of(deep).history.pages if page.level > 0]
    for key in names_others:
        storage = copy_of(deep)
        data = storage.get(key)
        before = reached(storage)
        storage.put(key, data[:-1] + bytes([data[-1] ^ 1]))
        zm.open(storage, runtime=in_order()).garbage_collect(NOW)
        assert before <= {info.key for info in storage.list("history/")}


def test_pages_that_a_collection_deleted_are_not_looked_for(
    deep: MemoryStorage, caplog: pytest.LogCaptureFixture
) -> None:
    storage = copy_of(deep)
    repository = zm.open(storage, runtime=in_order())
    repository.expire_snapshots(keep_last=5)
    repository.garbage_collect(NOW)
    named = {page.blob.key for page in head_of(storage).history.pages}
    assert not named <= {info.key for info in storage.list("history/")}
    repository = zm.open(storage, runtime=in_order())
    with caplog.at_level(logging.WARNING):
        assert len([*repository.ancestry()]) == 5
    assert caplog.records == []


def test_a_page_of_another_line_is_not_believed() -> None:
    """Sound, and by its own pointer right; but not of the ancestors of the snapshot."""
    storage = MemoryStorage()
    with short_pages():
        repository = zm.create(storage, QUIET, runtime=in_order())
        commit(repository, "shared")
        for branch in "main", "side":
            if branch != "main":
                repository.create_branch(branch, repository.list_branches()["main"])
                repository.reset_branch(
                    branch, [*repository.ancestry()][-2].snapshot_id, force=True
                )
            for i in range(9):
                commit(repository, f"{branch} {i}", branch)
    head, other = head_of(storage), head_of(storage, "side")
    assert head.history.pages[-1] != other.history.pages[-1]
    forged = replace(head, history=replace(head.history, pages=other.history.pages))
    lie = replace(head, history=replace(head.history, recent=other.history.recent))
    context = context_of(repository)
    tip = root_of(repository).branches["main"].head
    for wrong in forged, lie:
        context.objects.cache.clear()
        context.objects.remember(tip, wrong)
        assert [*repository.ancestry()] == walked(repository)


def test_verification_compares_entries_with_their_snapshots(deep: MemoryStorage) -> None:
    storage = copy_of(deep)
    head = head_of(storage)
    entry = HistoryEntries.unpack(head.history.recent).entries()[-1]
    said = (*head.history.recent[:-1], entry._replace(message="never said").pack())
    lying = replace(head, history=replace(head.history, recent=said)).encode()
    tip = root_of(storage).branches["main"].head
    storage.put(tip.key, lying)
    repository = zm.open(deep, runtime=in_order())
    root = root_of(deep)
    moved = replace(root.branches["main"], head=BlobRef.to(tip.key, lying))
    storage.put("current", replace(root, branches={"main": moved}).encode())
    problems = zm.open(storage, runtime=in_order()).verify().problems
    (found,) = [problem for problem in problems if "is wrong about" in problem.what]
    assert found.key == tip.key
    assert entry.snapshot_id != head.snapshot_id
    assert repository.verify().problems == ()


def test_a_damaged_page_does_not_make_a_recovery_go_back(deep: MemoryStorage) -> None:
    storage = copy_of(deep)
    newest = zm.open(storage).list_branches()
    for info in [*storage.list("history/")]:
        storage.put(info.key, b"damaged")
    storage.delete_many(["current"])
    report = zm.recover(storage)
    assert report.branches == newest or {*report.branches} == {*newest}
    assert zm.open(storage).list_branches() == newest
    check(storage)
