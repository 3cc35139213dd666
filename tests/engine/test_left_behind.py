"""Snapshots that no branch leads to any more: they can be named until a collection deletes them.

Whoever names one beside a collection, at whatever moment, gets it whole or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import zarr

from filled import NOW, Clock, fill, make, opened, read
from storages import InterruptingStorage, copy_of
from zarr_manifests import Repository
from zarr_manifests.errors import SnapshotExpiredError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage

DAY = timedelta(hours=24)
LATER = timedelta(hours=30)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def repo(clock: Clock) -> Repository:
    return make(MemoryStorage(), clock)


def check_named(repo: Repository, name: str, values: list[int]) -> None:
    """It is whole, and stays so."""
    for _ in range(2):
        assert repo.verify().ok
        assert read(repo, name) == values
        repo.garbage_collect(NOW)


def reset(repo: Repository) -> None:
    repo.reset_branch("main", "main~2", force=True)


def amend(repo: Repository) -> None:
    session = repo.writable_session()
    zarr.open_array(session.store, path="a")[:] = 9
    session.amend("amended")


def untag(repo: Repository) -> None:
    repo.create_tag("v1")
    reset(repo)
    repo.delete_tag("v1")


@pytest.mark.parametrize("leave", [reset, amend, untag])
def test_what_was_left_can_be_named_until_the_next_collection(
    repo: Repository, leave: Callable[[Repository], None]
) -> None:
    for value in (2, 3, 4):
        fill(repo, value)
    line = [info.id for info in repo.ancestry()]
    repo.expire_snapshots(keep_last=4)
    leave(repo)
    left = [name for name in line if name not in {info.id for info in repo.ancestry()}]
    assert left
    for number, name in enumerate(left):
        repo.create_tag(f"again{number}", name)
        repo.delete_tag(f"again{number}")
    repo.garbage_collect(NOW)
    for name in left:
        with pytest.raises(SnapshotExpiredError):
            repo.create_tag("late", name)


@pytest.mark.parametrize("fast_forward", [False, True])
def test_what_was_left_can_be_merged(repo: Repository, fast_forward: bool) -> None:
    for value in (2, 3):
        fill(repo, value)
    repo.create_branch("side")
    fill(repo, 4, "side", slice(2))
    left = fill(repo, 5, "side", slice(2, 4))
    repo.expire_snapshots(keep_last=4)
    if not fast_forward:
        fill(repo, 6, where=slice(6, 8))
    repo.delete_branch("side")
    report = repo.merge(left)
    assert (report.commits, report.fast_forward) == (2, fast_forward)
    check_named(repo, "main", [4, 4, 5, 5, 3, 3] + ([3, 3] if fast_forward else [6, 6]))


def test_one_that_is_young_but_has_lost_old_chunks_is_refused(
    repo: Repository, clock: Clock
) -> None:
    repo.create_branch("side")
    fill(repo, 2, "side")
    clock.advance(LATER)
    left = repo.cherry_pick("side")
    repo.reset_branch("main", "main~1", force=True)
    repo.delete_branch("side")
    repo.garbage_collect(DAY)
    with pytest.raises(SnapshotExpiredError):
        repo.create_tag("back", left)


def tag(repo: Repository, left: str) -> None:
    repo.create_tag("back", left)


def pick(repo: Repository, left: str) -> None:
    repo.cherry_pick(left)
    repo.create_tag("back")


def merge(repo: Repository, left: str) -> None:
    repo.merge(left, fast_forward=False)
    repo.create_tag("back")


@pytest.mark.parametrize(
    ("bring", "outer", "left_before"),
    [
        (tag, "naming", True),
        (tag, "collecting", False),
        (pick, "collecting", True),
        (merge, "naming", False),
    ],
)
def test_naming_and_collecting_at_once(
    clock: Clock, bring: Callable[[Repository, str], None], outer: str, left_before: bool
) -> None:
    """It was left before a collection, or after; those who commit have begun after the fence."""
    storage = MemoryStorage()
    repo = make(storage, clock)
    first = fill(repo, 2)
    left = fill(repo, 3, where=slice(4))
    if not left_before:
        repo.garbage_collect(NOW)
    repo.reset_branch("main", first, force=True)
    clock.advance(LATER)
    outcomes = []
    for at in range(1, 500):
        there = copy_of(storage)

        def name(place: Storage) -> None:
            try:
                bring(opened(place, clock), left)
            except SnapshotExpiredError:
                outcomes.append("refused")
            else:
                outcomes.append("named")

        def collect(place: Storage) -> None:
            opened(place, clock).garbage_collect(DAY)

        acts = (name, collect) if outer == "naming" else (collect, name)
        between = InterruptingStorage(there, lambda: acts[1](there), at)  # noqa: B023 - called here
        acts[0](between)
        if len(between.ops) < at:
            break
        repo = opened(there, clock)
        if outcomes[-1] == "named":
            check_named(repo, "back", [3] * 4 + [2] * 4)
        else:
            assert repo.verify().ok, at
            assert "back" not in repo.list_tags()
            assert read(repo, "main") == [2] * 8
    assert {*outcomes} == {"named", "refused"}
