"""What is found by its key alone says what it is, and readers compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.ids import snapshot_key
from zarr_manifests.storage.memory import MemoryStorage


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


READS: dict[str, Callable[[Repository, str, str], Any]] = {
    "readonly_session": lambda repo, one, _: repo.readonly_session(one),
    "diff": lambda repo, one, two: repo.diff(one, two),
    "ancestry": lambda repo, one, _: list(repo.ancestry(one)),
    "create_tag": lambda repo, one, _: repo.create_tag("new", one),
    "cherry_pick": lambda repo, one, _: repo.cherry_pick(one),
    "changes": lambda repo, one, two: list(repo.changes(one, two)),
}


@pytest.mark.parametrize("way", READS)
def test_exchanged_snapshots_are_an_error(way: str) -> None:
    repo, ids = made()
    one, two = ids[1], ids[2]
    exchange(repo, snapshot_key(one), snapshot_key(two))
    with pytest.raises(CorruptObjectError) as caught:
        READS[way](anew(repo), one, two)
    assert any(snapshot_key(i) in str(caught.value) for i in (one, two))


def test_a_leased_snapshot_that_was_exchanged_is_an_error() -> None:
    repo, ids = made()
    with repo.lease(ids[3]):
        repo.reset_branch("main", ids[1], force=True)
        exchange(repo, snapshot_key(ids[3]), snapshot_key(ids[2]))
        with pytest.raises(CorruptObjectError, match="snapshot"):
            anew(repo).garbage_collect()


def archives(repo: Repository) -> list[str]:
    return sorted(info.key for info in repo.storage.list("root/"))


def test_an_archive_of_another_repository_is_an_error() -> None:
    repo, other = made()[0], made()[0]
    key = archives(repo)[2]
    repo.storage.put(key, other.storage.get(key))
    fresh = anew(repo)
    with pytest.raises(CorruptObjectError):
        zm.recover(fresh, int(key[5:]))
    assert {problem.key for problem in fresh.verify().problems} == {key}


@pytest.mark.parametrize("step", [-1, 1])
def test_an_archive_in_the_place_of_another_version_is_an_error(step: int) -> None:
    repo = made()[0]
    key, other = archives(repo)[2], archives(repo)[2 + step]
    repo.storage.put(key, repo.storage.get(other))
    fresh = anew(repo)
    with pytest.raises(CorruptObjectError, match=key):
        zm.recover(fresh, int(key[5:]))
    assert {problem.key for problem in fresh.verify().problems} == {key}


def test_recovery_takes_nothing_of_another_repository() -> None:
    """Neither its archive, nor what its root says of versions."""
    repo, other = made()[0], made(9)[0]
    heads = repo.list_branches()
    newest = archives(other)[-1]
    repo.storage.put(newest, other.storage.get(newest))
    repo.storage.put("current", other.storage.get("current"))
    # What a foreign archive stands in the place of is not known, and may have been a collection.
    report = zm.recover(repo.storage, collections_ended=True)
    assert {name: now for name, (_, now) in report.branches.items()} == heads
    assert [*report.skipped] == [int(newest[5:])]
    assert report.version > 1_000_000, "how many versions there were is not known"
    assert anew(repo).list_branches() == heads
