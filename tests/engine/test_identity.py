"""What is found by its key alone says what it is, and readers compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import root_of
from zarr_manifests import Repository
from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.errors import CommitOutcomeUnknownError, CorruptObjectError
from zarr_manifests.format.root import LOG_TAIL, ROOT_KEY, LogEntry, archive_key
from zarr_manifests.ids import snapshot_key
from zarr_manifests.repository import context_of
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of


def made(commits: int = 3) -> tuple[Repository, list[str]]:
    """A repository, and the ids of its snapshots, the oldest first."""
    repo = zm.create(MemoryStorage())
    for i in range(commits):
        with repo.transaction("main", message=f"commit {i}") as store:
            zarr.create_array(store, name=f"a{i}", data=np.arange(4) + i)
    return repo, [info.snapshot_id for info in repo.ancestry()][::-1]


def exchange(repo: Repository, one: str, two: str) -> None:
    first, second = repo.storage.get(one), repo.storage.get(two)
    repo.storage.put(one, second)
    repo.storage.put(two, first)


def anew(repo: Repository) -> Repository:
    """As another process opens it, which has nothing in memory."""
    return zm.open(repo.storage)


BY_ID: dict[str, Callable[[Repository, str, str], Any]] = {
    "readonly_session": lambda repo, one, _: repo.readonly_session(one),
    "totals": lambda repo, one, _: repo.du(one, estimate=True),
    "diff": lambda repo, one, two: repo.diff(one, two),
    "ancestry": lambda repo, one, _: list(repo.ancestry(one)),
    "create_branch": lambda repo, one, _: repo.create_branch("new", one),
    "create_tag": lambda repo, one, _: repo.create_tag("new", one),
    "reset_branch": lambda repo, one, _: repo.reset_branch("main", one, force=True),
    "cherry_pick": lambda repo, one, _: repo.cherry_pick(one),
    "revert": lambda repo, one, _: repo.revert(one),
    "changes": lambda repo, one, two: list(repo.changes(one, two)),
}
each_way = pytest.mark.parametrize("way", BY_ID)


@each_way
def test_exchanged_snapshots_are_an_error(way: str) -> None:
    repo, ids = made()
    one, two = ids[1], ids[2]
    exchange(repo, snapshot_key(one), snapshot_key(two))
    with pytest.raises(CorruptObjectError) as caught:
        BY_ID[way](anew(repo), one, two)
    told = str(caught.value)
    assert any(snapshot_key(i) in told for i in (one, two)), told


def test_it_is_said_which_snapshot_lies_there() -> None:
    repo, ids = made()
    exchange(repo, snapshot_key(ids[1]), snapshot_key(ids[2]))
    with pytest.raises(CorruptObjectError) as caught:
        anew(repo).readonly_session(ids[1])
    assert str(caught.value).startswith(f"{snapshot_key(ids[1])}: found snapshot {ids[2]} under")


@each_way
def test_a_snapshot_of_another_repository_is_an_error(way: str) -> None:
    """Also where it has the same id, as no two have by chance."""
    repo, ids = made()
    other, _ = made(1)
    view = contents_of(repo.readonly_session(ids[1]).store).view
    foreign = replace(view.snapshot, repository_id=context_of(other).repository_id)
    repo.storage.put(snapshot_key(ids[1]), foreign.encode())
    with pytest.raises(CorruptObjectError, match=snapshot_key(ids[1])):
        BY_ID[way](anew(repo), ids[1], ids[2])


def test_a_leased_snapshot_that_was_exchanged_is_an_error() -> None:
    repo, ids = made()
    with repo.lease(ids[3]):
        repo.reset_branch("main", ids[1], force=True)
        exchange(repo, snapshot_key(ids[3]), snapshot_key(ids[2]))
        with pytest.raises(CorruptObjectError, match=r"found snapshot .* under this key"):
            anew(repo).garbage_collect()


def test_exchanged_archives_are_an_error() -> None:
    repo, _ = made()
    exchange(repo, archive_key(2), archive_key(3))
    fresh = anew(repo)
    for call in (lambda: zm.recover(fresh, 2), lambda: zm.recover(fresh, 3)):
        with pytest.raises(CorruptObjectError, match=r"root/0+[23]: the archive of version [32]"):
            call()
    assert {p.key for p in fresh.verify().problems} == {archive_key(2), archive_key(3)}


def test_an_archive_of_another_repository_is_an_error() -> None:
    repo, other = made()[0], made()[0]
    repo.storage.put(archive_key(2), other.storage.get(archive_key(2)))
    fresh = anew(repo)
    with pytest.raises(CorruptObjectError, match=context_of(other).repository_id):
        zm.recover(fresh, 2)
    assert {p.key for p in fresh.verify().problems} == {archive_key(2)}


def test_a_root_of_another_repository_is_an_error_for_who_has_it_open() -> None:
    repo, other = made()[0], made()[0]
    repo.storage.put(ROOT_KEY, other.storage.get(ROOT_KEY))
    for call in (repo.list_branches, repo.writable_session, lambda: next(repo.ops_log())):
        with pytest.raises(
            CorruptObjectError, match=f"current .* {context_of(other).repository_id}"
        ):
            call()


def test_recovery_takes_nothing_of_another_repository() -> None:
    """Neither its archive, nor what its root says of versions."""
    repo, other = made()[0], made(9)[0]
    heads = repo.list_branches()
    newest = archive_key(root_of(other.storage).version)
    repo.storage.put(newest, other.storage.get(newest))
    repo.storage.put(ROOT_KEY, other.storage.get(ROOT_KEY))
    # What a foreign archive stands in the place of is not known, and may have been a collection.
    report = zm.recover(repo.storage, collections_ended=True)
    assert report.branches == heads
    assert [*report.skipped] == [int(newest[5:])]
    assert report.version > 1_000_000, "how many versions there were is not known"
    assert context_of(zm.open(repo.storage)).repository_id == context_of(repo).repository_id


def test_an_exchanged_archive_does_not_tell_a_commit_as_lost() -> None:
    """Else it would be tried again, and land twice."""
    repo, ids = made()
    roots = Roots(repo.storage, SYSTEM)
    at = roots.read()
    entry = LogEntry(at.root.version + 1, 1, "create tag", "mine", ids[1], b"m" * 16)
    mine = roots.swap(at, at.root.with_log(entry), b"m" * 16)
    assert mine is not None
    for i in range(LOG_TAIL + 1):  # the log forgets it
        repo.create_tag(f"tag-{i}", ids[1])
    found = roots.read()
    assert roots._outcome(found, mine.root, b"m" * 16, archived=True) is found
    exchange(repo, archive_key(mine.root.version), archive_key(mine.root.version + 1))
    with pytest.raises(CommitOutcomeUnknownError, match="archive is unreadable"):
        roots._outcome(found, mine.root, b"m" * 16, archived=True)
