"""Merging branches: what is brought along, since when it counts, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from stored import get, overtaking
from stored import put as store_bytes
from zarr_manifests import Repository
from zarr_manifests.errors import Conflict, ConflictError
from zarr_manifests.repository import resolved
from zarr_manifests.storage.memory import MemoryStorage


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


CHUNKS = [slice(2 * i, 2 * i + 2) for i in range(60)]


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


def test_a_criss_cross_merge_is_refused(repo: Repository) -> None:
    ours, theirs = put(repo, "main", CHUNKS[0], 2), put(repo, "side", CHUNKS[1], 3)
    repo.merge(theirs, "main")
    repo.merge(ours, "side")
    put(repo, "side", CHUNKS[2], 4)
    put(repo, "main", CHUNKS[3], 4)
    with pytest.raises(ConflictError, match="criss-cross") as error:
        repo.merge("side")
    assert ours in str(error.value)
    assert theirs in str(error.value)
    repo.reset_branch("main", ours, force=True)
    repo.merge("side")
    assert values(repo)[:8] == [2, 2, 3, 3, 4, 4, 1, 1]


def test_policies_take_the_words_of_git(repo: Repository) -> None:
    put(repo, "side", slice(0, 4), 2)
    put(repo, "side", slice(0, 2), 2, "b")
    put(repo, "main", slice(0, 2), 3)
    put(repo, "main", slice(0, 2), 3, "b")
    seen: list[Conflict] = []

    def choose(conflict: Conflict) -> Any:
        seen.append(conflict)
        return "theirs" if conflict.path == "/a" else "ours"

    repo.merge("side", policy=choose)
    assert values(repo)[:4] == [2, 2, 2, 2]
    assert values(repo, path="b")[:2] == [3, 3]
    assert sorted(conflict.path for conflict in seen) == ["/a", "/b"]


@pytest.mark.parametrize(("rows", "others"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("policy", ["ours", "theirs"])
def test_no_policy_parts_appended_values_from_their_labels(
    repo: Repository, policy: Any, rows: int, others: int
) -> None:
    """All labels are in one chunk, and each value is in one of its own."""
    with repo.transaction(message="labels and values") as store:
        zarr.create_array(store, name="labels", data=np.array([1]), chunks=(100,))
        zarr.create_array(store, name="values", data=np.array([1]), chunks=(1,))
    repo.reset_branch("side", resolved(repo, "main"), force=True)
    for branch, added in (("main", [10] * rows), ("side", [20] * others)):
        with repo.transaction(branch, message="append") as store:
            for path in ("labels", "values"):
                zarr.open_array(store, path=path).append(added)
    with pytest.raises(ConflictError, match="both commits append along axis 0"):
        repo.merge("side", policy=policy)
    assert values(repo, path="labels") == values(repo, path="values")


@pytest.mark.parametrize("policy", ["ours", "theirs"])
def test_nor_does_it_take_a_label_away_that_one_side_has_appended(
    repo: Repository, policy: Any
) -> None:
    """The other side has written into the chunk of all labels."""
    with repo.transaction(message="labels") as store:
        zarr.create_array(store, name="labels", data=np.array([1, 2]), chunks=(100,))
    repo.reset_branch("side", resolved(repo, "main"), force=True)
    with repo.transaction(message="append") as store:
        zarr.open_array(store, path="labels").append([3])
    put(repo, "side", 0, 99, "labels")
    with pytest.raises(ConflictError):
        repo.merge("side", policy=policy)
    assert values(repo, path="labels") == [1, 2, 3]


def overtaken_by(repo: Repository, other: Callable[[], object]) -> Repository:
    return zm.open(repo.storage, runtime=overtaking(other))


def test_a_branch_that_moves_meanwhile_is_planned_anew(repo: Repository) -> None:
    put(repo, "side", CHUNKS[0], 2)
    put(repo, "main", CHUNKS[1], 3)
    report = overtaken_by(repo, lambda: repo.merge("side")).merge("side")
    assert not report.merges  # somebody else has merged it
    put(repo, "side", CHUNKS[3], 5)
    report = overtaken_by(repo, lambda: put(repo, "main", CHUNKS[2], 4)).merge("side")
    assert report.commits == 1
    assert values(repo)[:8] == [2, 2, 3, 3, 4, 4, 5, 5]
    repo.create_branch("moved", "side")
    put(repo, "moved", CHUNKS[4], 6)
    late = overtaken_by(repo, lambda: put(repo, "side", CHUNKS[5], 7))
    assert not late.merge("moved", "side").fast_forward
    assert values(repo, "side")[8:12] == [6, 6, 7, 7]


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


def test_what_the_branch_has_already_brings_no_array_back_that_it_has_moved(
    repo: Repository,
) -> None:
    put(repo, "side", slice(0, 2), 2, "b")
    put(repo, "main", slice(0, 2), 2, "b")
    session = repo.writable_session()
    session.move("b", "c")
    session.commit("move b")
    repo.merge("side")
    assert sorted(zarr.open_group(repo.readonly_session().store, mode="r")) == ["a", "c"]
    assert values(repo, path="c") == [2, 2, 1, 1]


def test_a_document_that_is_written_otherwise_and_says_the_same_moves_nothing_back(
    repo: Repository,
) -> None:
    with repo.transaction("side", message="indent") as store:
        said = json.loads(get(store, "b/zarr.json") or b"")
        store_bytes(store, "b/zarr.json", json.dumps(said, indent=7).encode())
    session = repo.writable_session()
    session.move("b", "c")
    session.commit("move b")
    repo.merge("side")
    assert sorted(zarr.open_group(repo.readonly_session().store, mode="r")) == ["a", "c"]


def test_an_append_that_was_taken_back_cuts_nothing_off(repo: Repository) -> None:
    def resize(branch: str, size: int) -> None:
        with repo.transaction(branch, message="resize b") as store:
            zarr.open_array(store, path="b").resize((size,))

    resize("main", 8)
    put(repo, "main", slice(4, 8), 2, "b")
    resize("main", 4)
    resize("side", 8)
    put(repo, "side", slice(4, 8), 3, "b")
    repo.merge("main", "side", message="merge")
    assert values(repo, "side", "b") == [1, 1, 1, 1, 3, 3, 3, 3]


@pytest.mark.parametrize("bring", [Repository.merge, Repository.cherry_pick])
def test_fill_values_in_an_array_that_was_rewritten_are_no_less_than_others(
    repo: Repository, bring: Callable[[Repository, str], object]
) -> None:
    put(repo, "side", slice(0, 2), 0, "b")  # which unsets the chunk
    zm.rewrite_chunks(repo, "b", chunks=[4])
    with pytest.raises(ConflictError) as caught:
        bring(repo, "side")
    assert [(each.path, each.chunks) for each in caught.value.conflicts] == [("/b", ((0,),))]


def test_an_array_without_chunks_that_was_made_smaller_is_merged_twice() -> None:
    repo = zm.create(MemoryStorage())

    def commit(branch: str, change: Callable[[Any], object]) -> None:
        with repo.transaction(branch, message="x") as store:
            change(store)

    commit("main", lambda s: zarr.create_array(s, name="a", shape=(8,), chunks=(2,), dtype="i4"))
    repo.create_branch("b")
    commit("main", lambda s: zarr.open_array(s, path="a").resize((4,)))
    for name in ("g", "h"):
        commit("b", lambda s, name=name: zarr.create_group(s, path=name))  # type: ignore[misc]
        assert repo.merge("b", message=name).commits == 1
    assert not repo.diff("main~3", "main", "a", values=True).chunks
    assert "/a" in repo.diff("b", "main", symmetric=False).updated
