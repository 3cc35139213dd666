"""Versions by any name: what is found, in which order, and what is told of names that find none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import zarr
from msgspec.structs import replace

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.repository import resolved
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.versions import short_ids

_DAY_MS = 86_400_000


@pytest.fixture
def made() -> tuple[Repository, list[str]]:
    """A history of five snapshots, one a day from 1970-01-01 on, and their ids."""
    today = 0
    runtime = replace(SYSTEM, now_ms=lambda: today * _DAY_MS)
    repo = zm.create(MemoryStorage(), runtime=runtime)
    ids = [resolved(repo, "main")]
    for day in range(1, 5):
        today = day
        with repo.transaction(message=f"day {day}") as store:
            zarr.create_group(store, path=f"day{day}")
        ids.append(resolved(repo, "main"))
    repo.create_branch("side", ids[2])
    repo.create_tag("v1", ids[1])
    return repo, ids


def random_part(snapshot_id: str) -> str:
    return snapshot_id.split("-")[1]


def test_what_is_unknown_lists_what_is_near(made: tuple[Repository, list[str]]) -> None:
    repo, ids = made
    with pytest.raises(NotFoundError, match=r"no branch 'mian'.* near it is branch 'main'"):
        resolved(repo, "mian")
    with pytest.raises(NotFoundError, match="there are branch 'main', branch 'side', tag 'v1'"):
        resolved(repo, "zzzzzzz")
    with pytest.raises(NotFoundError, match=r"'main~9': .* only 4 snapshots before it$"):
        resolved(repo, "main~9")
    with pytest.raises(NotFoundError, match=r"no snapshot from 1969-12-31[^,]* or before; "):
        resolved(repo, "main@{1969-12-31}")
    with pytest.raises(SnapshotExpiredError):
        resolved(repo, ids[0][:-1] + "999")


def test_what_has_expired_is_found_by_its_id_until_it_is_collected(
    made: tuple[Repository, list[str]],
) -> None:
    repo, ids = made
    repo.expire_snapshots(keep_last=2)
    assert resolved(repo, "main~1") == ids[3]
    assert resolved(repo, random_part(ids[1])[:8]) == ids[1]  # the tag keeps it
    for name in ("main~2", "v1~1", "main@{1969-12-31}"):
        with pytest.raises(NotFoundError, match="older ones have expired"):
            resolved(repo, name)
    assert repo.readonly_session(ids[0]).snapshot_id == ids[0]
    repo.garbage_collect(timedelta(0))
    with pytest.raises(SnapshotExpiredError, match="has expired"):
        repo.readonly_session(ids[0])


def test_a_short_id_finds_its_snapshot() -> None:
    repo = zm.create(MemoryStorage())
    for number in range(40):
        with repo.transaction(allow_empty=True, message=f"commit {number}"):
            pass
    ids = [info.id for info in repo.ancestry()]
    for snapshot_id, short in short_ids(ids).items():
        assert resolved(repo, short) == snapshot_id
        assert len(short) == 8
    near = [f"000000000001-5f3a09c4{digit}b77d20e9a8b6c10-1" for digit in "12"]
    assert list(short_ids(near).values()) == near


def test_a_follower_by_any_name_of_a_branch_moves(made: tuple[Repository, list[str]]) -> None:
    repo, _ = made
    for name in ("main", "HEAD"):
        session = repo.readonly_session(name, follow=True, follow_interval=timedelta(0))
        with repo.transaction(message="more") as store:
            zarr.create_group(store, path=name)
        assert name in zarr.open_group(session.store, mode="r")


REFUSED: dict[str, Callable[[Repository], Any]] = {
    "only a branch has a time": lambda repo: resolved(repo, "v1@{1970-01-02}"),
    "only a branch has a time;": lambda repo: repo.readonly_session("v1@1970-01-02"),
    "tags begin so": lambda repo: repo.create_tag("refs/tags/v2"),
    "follow goes with a branch": lambda repo: repo.readonly_session("main~1", follow=True),
    "follow goes with a branch only": lambda repo: repo.readonly_session("v1", follow=True),
    "not 'yesterday'": lambda repo: resolved(repo, "main@{yesterday}"),
    "names no version": lambda repo: resolved(repo, "main~x"),
    "names no version:": lambda repo: resolved(repo, "main{3}"),
    "further back": lambda repo: resolved(repo, "main~9999999999"),
    "not the name of a branch": lambda repo: resolved(repo, 5),  # type: ignore[arg-type]
    "it stands for the head of main": lambda repo: repo.create_branch("HEAD"),
    "'HEAD': it stands": lambda repo: repo.create_tag("HEAD"),
    "it is the id of a snapshot": lambda repo: repo.create_tag(resolved(repo, "main")),
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_is_no_version_is_refused(made: tuple[Repository, list[str]], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        REFUSED[told](made[0])


def test_a_branch_and_a_tag_of_one_name_are_ambiguous(
    made: tuple[Repository, list[str]], tmp_path: Path
) -> None:
    repo, ids = made
    zm.clone(repo, tmp_path / "clone")
    copy = zm.open(tmp_path / "clone")
    repo.create_branch("later", ids[2])
    copy.create_tag("later", ids[3])
    zm.clone(repo, tmp_path / "clone")
    with pytest.raises(InvalidArgumentError, match="ambiguous"):
        resolved(copy, "later")
    assert resolved(copy, "refs/tags/later") == ids[3]


def test_no_tag_makes_the_name_of_a_branch_ambiguous(made: tuple[Repository, list[str]]) -> None:
    repo, ids = made
    with pytest.raises(AlreadyExistsError, match="ambiguous"):
        repo.create_tag("side", ids[3])
    assert resolved(repo, "side") != ids[3]


def test_no_branch_makes_the_name_of_a_tag_ambiguous(made: tuple[Repository, list[str]]) -> None:
    repo, ids = made
    repo.create_tag("released", ids[3])
    with pytest.raises(AlreadyExistsError, match="ambiguous"):
        repo.create_branch("released")
    assert resolved(repo, "released") == ids[3]


def test_a_step_back_without_a_number_is_one(made: tuple[Repository, list[str]]) -> None:
    repo, ids = made
    assert resolved(repo, "main~") == ids[3]
