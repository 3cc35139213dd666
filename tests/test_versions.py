"""Versions by any name: what is found, in which order, and what is told of names that find none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from inside import change_root
from zarr_manifests import Repository
from zarr_manifests.errors import InvalidArgumentError, NotFoundError, SnapshotExpiredError
from zarr_manifests.repository import resolved
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.versions import RefName, VersionName, refs_by_snapshot, short_ids

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


def test_every_name_finds_its_snapshot(made: tuple[Repository, list[str]]) -> None:
    repo, ids = made
    due = {
        "main": 4,
        "HEAD": 4,
        "side": 2,
        "v1": 1,
        ids[3]: 3,
        random_part(ids[3])[:6]: 3,
        random_part(ids[3])[:11]: 3,
        random_part(ids[3]): 3,
        ids[3][:20]: 3,
        "main~": 3,
        "main~0": 4,
        "main~3": 1,
        "HEAD~2~1": 1,
        "v1~1": 0,
        f"{ids[3]}~2": 1,
        f"{random_part(ids[3])[:8]}~": 2,
        "main@{1970-01-03}": 2,
        "HEAD@{1970-01-03T23:59:59Z}": 2,
        "main@{1970-01-03}~2": 0,
        "side@{1999-12-31}": 2,
    }
    for name, at in due.items():
        assert resolved(repo, name) == ids[at], name
        assert repo.readonly_session(name).snapshot_id == ids[at], name
        assert next(repo.ancestry(name)).id == ids[at], name
    for day in ("1970-01-03", datetime(1970, 1, 3, tzinfo=UTC)):
        assert repo.readonly_session(f"main@{day}").snapshot_id == ids[2]


def test_every_call_takes_any_name(made: tuple[Repository, list[str]]) -> None:
    repo, ids = made
    short = random_part(ids[2])[:7]
    assert repo.du(short, estimate=True) == repo.du(ids[2], estimate=True)
    assert repo.du(short).snapshot_id == ids[2]
    assert repo.explain_manifests("main~2").snapshot_id == ids[2]
    assert repo.explain_manifests("main~2", config={}).snapshot_id == ids[2]
    one, same = (repo.explain_manifests(name, costs=True) for name in ("v1", "refs/tags/v1"))
    assert one.costs == same.costs is not None
    assert repo.diff("main~2", "HEAD").created == ("/day3", "/day4")
    assert [c.path for c in repo.changes(short, "main~1")] == ["/day3"]
    with repo.lease("main~1") as lease:
        assert lease.snapshot_id == ids[3]
    repo.create_branch("again", "main@{1970-01-02}")
    repo.create_tag("v2", "v1~1")
    assert repo.list_branches()["again"] == ids[1]
    assert repo.list_tags()["v2"] == ids[0]
    assert [one.snapshot_id for one in repo.ops_log()][:2] == [ids[0], ids[1]]
    repo.cherry_pick("main~1", "again")
    assert {*zarr.open_group(repo.readonly_session("again").store, mode="r")} == {"day1", "day3"}
    repo.reset_branch("again", "v1", force=True)
    assert resolved(repo, "again") == ids[1]
    repo.revert("HEAD~1")
    names = {*xr.open_datatree(repo, engine="zarr_manifests", version="main").children}
    assert names == {"day1", "day2", "day4"}
    old = xr.open_datatree(repo, engine="zarr_manifests", version="main@{1970-01-02}")
    assert {*old.children} == {"day1"}


@pytest.mark.parametrize("undo", [False, True])
def test_a_commit_that_another_process_has_just_made_is_picked_and_undone(undo: bool) -> None:
    storage = MemoryStorage()
    repo = zm.create(storage)
    branch = "main" if undo else "side"
    repo.create_branch("side", "main")
    with zm.open(storage).transaction(message="elsewhere") as store:
        zarr.create_group(store, path="new")
    made = resolved(zm.open(storage), "main")
    (repo.revert if undo else repo.cherry_pick)(made, branch)
    there = repo.readonly_session(branch).store.get_sync("new/zarr.json")
    assert (there is None) is undo


def test_a_branch_called_like_a_short_id_comes_first(made: tuple[Repository, list[str]]) -> None:
    repo, ids = made
    short = random_part(ids[1])[:8]
    repo.create_branch(short, ids[3])
    assert resolved(repo, short) == ids[3]
    assert resolved(repo, short + random_part(ids[1])[8]) == ids[1]


def test_what_is_ambiguous_lists_both(made: tuple[Repository, list[str]]) -> None:
    repo, ids = made
    repo.create_tag("side", ids[0])
    for name in ("side", "side~1", "side@{1970-01-02}"):
        with pytest.raises(InvalidArgumentError, match=f"branch 'side' at {ids[2]}.*{ids[0]}"):
            repo.readonly_session(name)
    repo.create_tag("main", ids[1])
    assert resolved(repo, "main") == resolved(repo, "HEAD") == ids[4]
    assert repo.readonly_session("refs/heads/side").snapshot_id == ids[2]
    assert repo.readonly_session("refs/tags/side").snapshot_id == ids[0]
    assert repo.readonly_session("refs/tags/main").snapshot_id == ids[1]


def test_a_short_id_of_two_snapshots_lists_both() -> None:
    drawn = count()

    def alike(number: int) -> bytes:
        return b"\xab" * (number - 2) + next(drawn).to_bytes(2, "big")

    repo = zm.create(MemoryStorage(), runtime=replace(SYSTEM, random_bytes=alike))
    with repo.transaction(message="make air") as store:
        zarr.create_group(store, path="air")
    newest, first = (info.id for info in repo.ancestry())
    with pytest.raises(InvalidArgumentError, match="ids of 2 snapshots begin so") as error:
        resolved(repo, "ababab")
    assert newest in str(error.value)
    assert first in str(error.value)
    assert resolved(repo, random_part(newest)) == newest


def test_what_is_unknown_lists_what_is_near(made: tuple[Repository, list[str]]) -> None:
    repo, ids = made
    with pytest.raises(NotFoundError, match=r"no branch 'mian'.* near it is branch 'main'"):
        resolved(repo, "mian")
    with pytest.raises(NotFoundError, match="no branch ''"):
        resolved(repo, "")
    with pytest.raises(NotFoundError, match="there are branch 'main', branch 'side', tag 'v1'"):
        resolved(repo, "zzzzzzz")
    digits = random_part(ids[4])[:8]
    wrong = digits[:7] + ("0" if digits[7] != "0" else "1")
    with pytest.raises(NotFoundError, match=f"near it (is|are) .*the snapshot {digits}"):
        resolved(repo, wrong)
    with pytest.raises(NotFoundError, match=r"'main~9': only 4 snapshots before it in history$"):
        resolved(repo, "main~9")
    with pytest.raises(NotFoundError, match=r"no snapshot from 1969-12-31[^,]* or before; "):
        resolved(repo, "main@{1969-12-31}")
    with pytest.raises(SnapshotExpiredError):
        resolved(repo, ids[0][:-1] + "999")


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


def test_a_branch_called_head_of_older_versions_is_found_by_its_full_name(
    made: tuple[Repository, list[str]],
) -> None:
    repo, ids = made

    def old(root: Any) -> Any:
        return replace(root, branches={**root.branches, "HEAD": root.branches["side"]})

    change_root(repo, "create branch", old)
    assert resolved(repo, "HEAD") == ids[4]
    assert repo.readonly_session("refs/heads/HEAD").snapshot_id == ids[2]


def test_a_follower_by_any_name_of_a_branch_moves(made: tuple[Repository, list[str]]) -> None:
    repo, _ = made
    for name in ("main", "HEAD"):
        session = repo.readonly_session(name, follow=True, follow_interval=timedelta(0))
        with repo.transaction(message="more") as store:
            zarr.create_group(store, path=name)
        assert name in zarr.open_group(session.store, mode="r")


def test_what_has_expired_is_found_by_its_id_until_it_is_collected(
    made: tuple[Repository, list[str]],
) -> None:
    repo, ids = made
    repo.expire_snapshots(keep_last=2)
    assert resolved(repo, "main~1") == ids[3]
    assert resolved(repo, random_part(ids[1])[:8]) == ids[1]  # the tag keeps it
    older = "because older ones have expired"
    for name, most in (("main~2", "1 snapshot"), ("v1~1", "0 snapshots")):
        with pytest.raises(NotFoundError, match=f"only {most} before it in history, {older}$"):
            resolved(repo, name)
    with pytest.raises(NotFoundError, match=f"no snapshot from .* or before, {older}; "):
        resolved(repo, "main@{1969-12-31}")
    short = random_part(ids[0])[:8]
    assert resolved(repo, short) == ids[0]
    repo.garbage_collect(timedelta(0))
    with pytest.raises((NotFoundError, SnapshotExpiredError), match=r"no branch|has expired"):
        resolved(repo, short)


def test_spaces_of_a_time_do_not_matter() -> None:
    assert VersionName.parse("a@{ 1970-01-02 }~1") == VersionName("a", _DAY_MS, 1)


def test_a_short_id_is_as_short_as_it_may_be_and_finds_its_snapshot() -> None:
    repo = zm.create(MemoryStorage())
    for number in range(40):
        with repo.transaction(allow_empty=True, message=f"commit {number}"):
            pass
    ids = [info.id for info in repo.ancestry()]
    for snapshot_id, short in short_ids(ids).items():
        assert resolved(repo, short) == snapshot_id
        assert len(short) >= 6
    start, random = "000000000001-", "5f3a09c41b77d20e9a8b6c10"
    alike = [f"{start}{random}-1", f"{start}{random}-2"]
    assert short_ids(alike[:1]) == {alike[0]: "5f3a09"}
    assert list(short_ids(alike).values()) == alike
    assert short_ids([]) == {}


def test_a_branch_and_a_tag_of_one_snapshot_are_told_apart() -> None:
    """Whatever they are called: another writer's root may have names that no call here makes."""
    here, there = (f"{number:012d}-{number:024x}-1" for number in range(2))
    names = refs_by_snapshot({"a": here, "main": here, "tag v1": here, "b": there}, {"v1": here})
    assert names == {
        here: [
            RefName("branch", "main"),
            RefName("branch", "a"),
            RefName("branch", "tag v1"),
            RefName("tag", "v1"),
        ],
        there: [RefName("branch", "b")],
    }
    assert [*map(str, names[here])] == ["main", "a", "tag v1", "tag v1"]
