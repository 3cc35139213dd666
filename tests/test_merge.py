"""Merging branches: what is brought along, since when it counts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import Repository, merges
from zarr_manifests.conflicts import Conflict
from zarr_manifests.error_cases import HistoryExpiredError
from zarr_manifests.errors import (
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.repository import resolved
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage


@pytest.fixture
def repo() -> Repository:
    """An array of 60 chunks on `main` and `side`, and an array `b` of 2."""
    made = zm.create(MemoryStorage(), {"inline-chunk-bytes": 4})
    with made.transaction(message="make a and b") as store:
        zarr.create_array(store, name="a", shape=(120,), chunks=(2,), dtype="i4")[:] = 1
        zarr.create_array(store, name="b", shape=(4,), chunks=(2,), dtype="i4")[:] = 1
    made.create_branch("side")
    return made


def put(repo: Repository, branch: str, at: Any, value: Any, path: str = "a") -> str:
    with repo.transaction(branch, message=f"{branch}: {path}[{at}] = {value}") as store:
        zarr.open_array(store, path=path)[at] = value
    return resolved(repo, branch)


def values(repo: Repository, branch: str = "main", path: str = "a") -> list[int]:
    store = repo.readonly_session(branch).store
    return np.asarray(zarr.open_array(store, path=path, mode="r")[:]).tolist()


def head(repo: Repository, branch: str = "main") -> Snapshot:
    return contents_of(repo.readonly_session(branch).store).view.snapshot


CHUNKS = [slice(2 * i, 2 * i + 2) for i in range(60)]


def test_commits_of_both_sides_come_together(repo: Repository) -> None:
    base = resolved(repo, "main")
    put(repo, "side", CHUNKS[0], 2)
    source = put(repo, "side", CHUNKS[1], 3)
    tip = put(repo, "main", CHUNKS[2], 4)
    report = repo.merge("side", message="take it in", metadata={"why": "a test"})
    assert (report.source, report.base, report.commits) == (source, base, 2)
    assert not report.fast_forward
    assert values(repo)[:8] == [2, 2, 3, 3, 4, 4, 1, 1]
    info = next(repo.ancestry())
    assert (info.id, info.parent_id, info.message) == (report.snapshot_id, tip, "take it in")
    assert dict(info.metadata) == {"why": "a test", "merged-from": source}
    assert head(repo).merged == (source, base)
    assert "merge" in contents_of(repo.readonly_session().store).context.roots.latest.root.features
    assert values(repo, "side")[:6] == [2, 2, 3, 3, 1, 1]
    assert [c.path for c in repo.changes(tip, "main")] == ["/a"]
    assert repo.verify().ok


def test_no_chunk_is_read_or_written() -> None:
    storage = CountingStorage(MemoryStorage())
    repo = zm.create(storage, {"inline-chunk-bytes": 0})
    with repo.transaction(message="make a") as store:
        zarr.create_array(store, name="a", shape=(8,), chunks=(2,), dtype="i4")[:] = 1
    repo.create_branch("side")
    put(repo, "side", slice(0, 4), 2)
    put(repo, "main", slice(4, 6), 3)
    storage.reset()
    repo.merge("side")
    assert not [call for call in storage.log if str(call.key).startswith("chunks/")]


def test_a_branch_without_commits_of_its_own_is_moved(repo: Repository) -> None:
    source = put(repo, "side", 0, 2)
    told = repo.merge("side", dry_run=True)
    assert (told.fast_forward, told.commits, told.snapshot_id) == (True, 1, None)
    report = repo.merge("side")
    assert report.fast_forward
    assert report.snapshot_id == source == resolved(repo, "main")
    assert next(repo.ops_log()).operation == "fast-forward branch"
    again = repo.merge("side")
    assert (again.merges, again.commits, again.snapshot_id) == (False, 0, source)
    assert str(again) == f"main has all changes of {source}"


@pytest.mark.parametrize("options", [{"fast_forward": False}, {"message": "m"}, {"metadata": {}}])
def test_what_asks_for_a_commit_makes_one(repo: Repository, options: dict[str, Any]) -> None:
    source = put(repo, "side", 0, 2)
    report = repo.merge("side", **options)
    assert not report.fast_forward
    assert resolved(repo, "main") == report.snapshot_id != source
    assert head(repo).merged == (source, report.base)
    assert values(repo) == values(repo, "side")
    assert not repo.merge("side").merges


def test_a_second_merge_counts_from_the_first(repo: Repository) -> None:
    put(repo, "side", CHUNKS[0], 2)
    put(repo, "main", CHUNKS[1], 3)
    first = repo.merge("side")
    put(repo, "side", CHUNKS[0], 4)  # would conflict with what the first merge wrote
    put(repo, "main", CHUNKS[2], 5)
    second = repo.merge("side")
    assert (second.base, second.commits) == (first.source, 1)
    assert values(repo)[:6] == [4, 4, 3, 3, 5, 5]


def test_what_was_resolved_once_is_not_asked_again(repo: Repository) -> None:
    put(repo, "side", CHUNKS[0], 2)
    put(repo, "main", CHUNKS[0], 3)
    with pytest.raises(ConflictError):
        repo.merge("side")
    repo.merge("side", policy="ours")
    assert values(repo)[:2] == [3, 3]
    put(repo, "side", CHUNKS[1], 4)
    repo.merge("side")
    assert values(repo)[:4] == [3, 3, 4, 4]


def test_merging_to_and_fro(repo: Repository) -> None:
    put(repo, "side", CHUNKS[0], 2)
    put(repo, "main", CHUNKS[1], 3)
    repo.merge("main", "side")  # side now has main's
    put(repo, "side", CHUNKS[1], 4)  # on top of main's own
    put(repo, "main", CHUNKS[2], 5)
    report = repo.merge("side")
    assert report.base == resolved(repo, "main~2")
    assert values(repo)[:6] == [2, 2, 4, 4, 5, 5]
    put(repo, "side", CHUNKS[3], 6)
    repo.merge("side")
    repo.merge("main", "side")
    assert values(repo) == values(repo, "side")


def test_what_came_through_a_third_branch_is_known(repo: Repository) -> None:
    repo.create_branch("third")
    put(repo, "third", CHUNKS[0], 2)
    for branch in ("main", "side"):
        put(repo, branch, CHUNKS[1 if branch == "main" else 2], 3)
        repo.merge("third", branch)
    put(repo, "side", CHUNKS[0], 4)
    report = repo.merge("side")
    assert report.base == resolved(repo, "third")
    assert values(repo)[:6] == [4, 4, 3, 3, 3, 3]


def test_lines_merged_crosswise_are_refused(repo: Repository) -> None:
    ours, theirs = put(repo, "main", CHUNKS[0], 2), put(repo, "side", CHUNKS[1], 3)
    repo.merge(theirs, "main")
    repo.merge(ours, "side")
    put(repo, "side", CHUNKS[2], 4)
    put(repo, "main", CHUNKS[3], 4)
    with pytest.raises(ConflictError, match="crosswise") as error:
        repo.merge("side")
    assert ours in str(error.value)
    assert theirs in str(error.value)
    with pytest.raises(ConflictError, match="take one of the two merges back"):
        repo.merge("side", dry_run=True)
    repo.reset_branch("main", ours, force=True)
    repo.merge("side")
    assert values(repo)[:8] == [2, 2, 3, 3, 4, 4, 1, 1]


def test_conflicts_are_told_whole(repo: Repository) -> None:
    put(repo, "side", slice(0, 120), 2)
    put(repo, "main", slice(0, 120), 3)
    before = resolved(repo, "main")
    told = repo.merge("side", dry_run=True)
    with pytest.raises(ConflictError, match="'side' cannot be merged into branch 'main'") as error:
        repo.merge("side")
    (conflict,) = error.value.conflicts
    assert told.conflicts == error.value.conflicts
    assert conflict.chunks == tuple((i,) for i in range(60))
    assert "cannot be merged into main, because of conflicts:\n  /a: chunks" in str(told)
    assert resolved(repo, "main") == before


def test_policies_take_the_words_of_git(repo: Repository) -> None:
    put(repo, "side", slice(0, 4), 2)
    put(repo, "side", slice(0, 2), 2, "b")
    put(repo, "main", slice(0, 2), 3)
    put(repo, "main", slice(0, 2), 3, "b")
    seen: list[Conflict] = []

    def choose(conflict: Conflict) -> Any:
        seen.append(conflict)
        return "theirs" if conflict.path == "/a" else "ours"

    assert repo.merge("side", policy=choose, dry_run=True).conflicts == ()
    seen.clear()
    with pytest.raises(InvalidArgumentError, match="answered"):
        repo.merge("side", policy=lambda conflict: ["ours"])  # type: ignore[arg-type, return-value]
    repo.merge("side", policy=choose)
    assert values(repo)[:4] == [2, 2, 2, 2]
    assert values(repo, path="b")[:2] == [3, 3]
    assert sorted(conflict.path for conflict in seen) == ["/a", "/b"]
    with pytest.raises(InvalidArgumentError, match="not a policy"):
        repo.merge("side", policy="mine")  # type: ignore[arg-type]


def test_a_dry_run_writes_nothing() -> None:
    storage = CountingStorage(MemoryStorage())
    repo = zm.create(storage)
    repo.create_branch("side")
    for branch in ("main", "side"):
        with repo.transaction(branch, message="group") as store:
            zarr.create_group(store, path=branch)
    storage.reset()
    report = repo.merge("side", dry_run=True)
    assert not {call.op for call in storage.log} & {"put", "create", "cas", "delete_many"}
    assert report.dry_run
    assert str(report).startswith("would bring 1 commit of")


def test_a_branch_that_moves_meanwhile_is_planned_anew(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(repo, "side", CHUNKS[0], 2)
    put(repo, "main", CHUNKS[1], 3)
    plan, others = (
        merges.plan_merge,
        iter([lambda: repo.merge("side"), lambda: put(repo, "main", CHUNKS[2], 4)]),
    )

    def overtaken(*arguments: Any) -> Any:
        planned = plan(*arguments)
        monkeypatch.setattr(merges, "plan_merge", plan)
        next(others, lambda: None)()
        return planned

    monkeypatch.setattr(merges, "plan_merge", overtaken)
    report = repo.merge("side")  # somebody else has merged it
    assert not report.merges
    put(repo, "side", CHUNKS[3], 5)
    monkeypatch.setattr(merges, "plan_merge", overtaken)
    assert repo.merge("side").commits == 1
    assert values(repo)[:8] == [2, 2, 3, 3, 4, 4, 5, 5]
    repo.create_branch("moved", "side")
    put(repo, "moved", CHUNKS[4], 6)
    others = iter([lambda: put(repo, "side", CHUNKS[5], 7)])
    monkeypatch.setattr(merges, "plan_merge", overtaken)
    assert not repo.merge("moved", "side").fast_forward


def test_marks_are_merged_three_ways(repo: Repository) -> None:
    def step(branch: str, app: str, version: int) -> None:
        repo.writable_session(branch).commit("a batch", txn=(app, version))

    step("main", "old", 1)
    repo.reset_branch("side", "main")
    step("side", "new", 4)
    step("main", "ours", 2)
    repo.writable_session("side").commit(txn=zm.Txn("old", None, after=1))
    repo.merge("side")
    assert repo.txn_versions() == {"new": 4, "ours": 2}
    step("side", "new", 5)
    step("main", "new", 6)
    (conflict,) = repo.merge("side", dry_run=True).conflicts
    assert conflict.kind == "txn"
    with pytest.raises(ConflictError) as error:
        repo.merge("side", policy="theirs")
    assert [each.kind for each in error.value.conflicts] == ["txn"]


def test_shapes_groups_and_moves_come_along(repo: Repository) -> None:
    session = repo.writable_session("side")
    zarr.open_array(session.store, path="a").resize((10,))
    session.commit("shrink")
    with repo.transaction("side", message="grow again") as store:
        a = zarr.open_array(store, path="a")
        a.resize((20,))
        a[18:] = 5
    session = repo.writable_session("side")
    session.move("b", "moved")
    zarr.create_array(session.store, name="g/c", shape=(2,), chunks=(1,), dtype="i2")[:] = 7
    session.commit("move b, make c")
    with repo.transaction(message="beside") as store:
        zarr.create_group(store, path="beside")
    repo.merge("side")
    assert values(repo) == [1] * 10 + [0] * 8 + [5, 5]
    assert values(repo, path="moved") == [1] * 4
    assert values(repo, path="g/c") == [7, 7]
    assert "b" not in zarr.open_group(repo.readonly_session().store, mode="r")


def test_compactions_on_either_side_change_nothing(repo: Repository) -> None:
    put(repo, "side", CHUNKS[0], 2)
    repo.compact("side", mode="full")
    put(repo, "side", CHUNKS[1], 3)
    put(repo, "main", CHUNKS[2], 4)
    repo.compact("main", mode="full")
    assert repo.merge("side").commits == 2
    repo.compact("main", mode="full")
    put(repo, "side", CHUNKS[0], 5)
    repo.compact("side", mode="full")
    assert repo.merge("side").commits == 1
    assert values(repo)[:6] == [5, 5, 3, 3, 4, 4]
    assert repo.verify().ok


def test_an_amended_merge_stays_one(repo: Repository) -> None:
    source = put(repo, "side", CHUNKS[0], 2)
    put(repo, "main", CHUNKS[1], 3)
    repo.merge("side")
    session = repo.writable_session()
    session.amend("better words")
    assert head(repo).merged is not None
    assert head(repo).merged[0] == source
    assert not repo.merge("side").merges
    put(repo, "main", CHUNKS[2], 4)
    assert head(repo).merged is None


def test_a_reverted_merge_is_not_merged_again(repo: Repository) -> None:
    put(repo, "side", CHUNKS[0], 2)
    put(repo, "main", CHUNKS[1], 3)
    repo.merge("side")
    repo.revert("main")
    assert values(repo)[:4] == [1, 1, 3, 3]
    assert not repo.merge("side").merges
    put(repo, "side", CHUNKS[2], 4)
    repo.merge("side")
    assert values(repo)[:6] == [1, 1, 3, 3, 4, 4]


def test_what_is_not_there_is_refused(repo: Repository) -> None:
    with pytest.raises(NotFoundError, match="no branch 'nope'"):
        repo.merge("nope")
    with pytest.raises(NotFoundError, match="no branch 'nope'"):
        repo.merge("side", "nope")
    with pytest.raises(SnapshotExpiredError, match="it never was, or has expired"):
        repo.merge(f"{1:012d}-{'0' * 24}-7")
    repo.create_branch("kept", "main")
    put(repo, "kept", CHUNKS[0], 2)
    put(repo, "main", CHUNKS[1], 2)
    repo.expire_snapshots(keep_last=1)
    with pytest.raises(HistoryExpiredError, match="in common has expired"):
        repo.merge("kept")


WRONG: list[Callable[[Repository], Any]] = [
    lambda repo: repo.merge("main~x"),
    lambda repo: repo.merge("side", metadata={1: 2}),  # type: ignore[dict-item]
    lambda repo: repo.merge("side", message=" "),
]


@pytest.mark.parametrize("call", WRONG)
def test_wrong_arguments_are_refused(repo: Repository, call: Callable[[Repository], Any]) -> None:
    put(repo, "side", CHUNKS[0], 2)
    with pytest.raises(InvalidArgumentError):
        call(repo)
    assert isinstance(repo.merge("side"), zm.reports.MergeReport)


@pytest.mark.parametrize("undone", ["side", "main"])
@pytest.mark.parametrize("how", ["revert", "write"])
def test_a_chunk_that_is_as_before_does_not_count_as_changed(
    repo: Repository, undone: str, how: str
) -> None:
    other = {"side": "main", "main": "side"}[undone]
    wrong = put(repo, undone, slice(0, 4), 2)
    if how == "revert":
        repo.revert(wrong, undone)
    else:
        put(repo, undone, slice(0, 4), 1)
    put(repo, undone, CHUNKS[2], 3)
    put(repo, other, CHUNKS[0], 4)
    assert repo.merge("side", dry_run=True).conflicts == ()
    repo.merge("side")
    assert values(repo)[:8] == [4, 4, 1, 1, 3, 3, 1, 1]
    assert repo.verify().ok


def test_a_chunk_that_was_written_back_only_in_part_conflicts(repo: Repository) -> None:
    put(repo, "side", slice(0, 4), 2)
    put(repo, "side", CHUNKS[0], 1)
    put(repo, "main", slice(0, 4), 3)
    (conflict,) = repo.merge("side", dry_run=True).conflicts
    assert conflict.chunks == ((1,),)
    with pytest.raises(ConflictError):
        repo.merge("side")


def test_a_chunk_of_an_array_that_was_cut_off_and_written_again_is_merged(repo: Repository) -> None:
    with repo.transaction("side", message="cut off and written as before") as store:
        array = zarr.open_array(store, path="b")
        array.resize((2,))
        array.resize((4,))
    put(repo, "side", slice(2, 4), 9, "b")
    put(repo, "side", slice(2, 4), 1, "b")
    put(repo, "main", CHUNKS[0], 4)
    repo.merge("side")
    assert values(repo, path="b") == [1, 1, 1, 1]


def test_a_creation_that_was_cherry_picked_conflicts_when_it_is_merged(repo: Repository) -> None:
    with repo.transaction("side", message="make c") as store:
        zarr.create_array(store, name="c", shape=(4,), chunks=(2,), dtype="i4")[:] = 5
    repo.cherry_pick("side")
    put(repo, "main", slice(0, 2), 6, "c")
    before = values(repo, path="c")
    with pytest.raises(ConflictError) as caught:
        repo.merge("side")
    assert {conflict.path for conflict in caught.value.conflicts} == {"/c"}
    assert values(repo, path="c") == before == [6, 6, 5, 5]
