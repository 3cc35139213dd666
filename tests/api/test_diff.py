"""What differs between any two versions: nodes, chunks, and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.storage.memory import MemoryStorage


@pytest.fixture
def repo() -> Repository:
    made = zm.create(MemoryStorage())
    with made.transaction(message="make a") as store:
        zarr.create_array(store, name="a", shape=(4, 6), chunks=(2, 2), dtype="f8")[:] = 1
    made.create_branch("side")
    return made


def test_values_of_an_array_of_another_shape(repo: Repository) -> None:
    with repo.transaction(message="grow") as store:
        a = zarr.open_array(store, path="a")
        a.resize((5, 6))
        a[4] = 7
        a[0, 0] = 4
    found = repo.diff("main~1", "main", "a", values=True)
    assert (found.chunks["/a"].tolist(), found.cells["/a"].tolist()) == ([[0, 0]], [1])
    assert found.updated == ("/a",)
    assert "shape: (4, 6) to (5, 6)" in str(found)
    back = repo.diff("main", "main~1", "a", values=True)
    assert (back.chunks["/a"].tolist(), back.cells["/a"].tolist()) == ([[0, 0]], [1])


def test_values_of_an_array_that_has_only_grown_are_not_told_as_unchanged(
    repo: Repository,
) -> None:
    with repo.transaction(message="append a row") as store:
        a = zarr.open_array(store, path="a")
        a.resize((6, 6))
        a[4:] = 7
    found = repo.diff("main~1", "main", "a", values=True)
    assert str(found).splitlines() == ["~ /a", "    shape: (4, 6) to (6, 6)"]
    assert found
    assert not found.chunks


def test_values_follow_what_is_at_the_path_in_the_newer_version(repo: Repository) -> None:
    session = repo.writable_session()
    session.move("a", "b")
    session.commit("move it")
    with repo.transaction(message="another in its place") as store:
        zarr.create_array(store, name="a", shape=(4, 6), chunks=(4, 6), dtype="i2")[:] = 7
    assert repo.diff("main~2", "main", "a", values=True).cells["/a"].sum() == 24
    assert not repo.diff("main~2", "main", "b", values=True)


def test_values_that_are_no_numbers_are_compared_and_counted() -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="make t") as store:
        t = zarr.create_array(store, name="t", shape=(1,), chunks=(1,), dtype="M8[s]")
        t[:] = np.array(["2026-01-01"], "M8[s]")
    with repo.transaction(message="another day") as store:
        zarr.open_array(store, path="t")[:] = np.array(["2026-01-02"], "M8[s]")
    found = repo.diff("main~1", "main", "t", values=True)
    assert (found.cells["/t"].tolist(), found.steps) == ([1], {})


def test_what_has_no_values_is_refused(repo: Repository) -> None:
    with pytest.raises(NotFoundError, match="no array /b"):
        repo.diff("side", "main", "b", values=True)
    with repo.transaction(message="remake") as store:
        zarr.create_array(store, name="a", shape=(4,), chunks=(4,), dtype="i2", overwrite=True)
    with pytest.raises(InvalidArgumentError, match="dimensions"):
        repo.diff("side", "main", "a", values=True)


def put(repo: Repository, branch: str, at: Any, value: Any) -> None:
    with repo.transaction(branch, message=f"{branch}: a[{at}] = {value}") as store:
        zarr.open_array(store, path="a")[at] = value


def test_chunks_that_were_cut_off_differ_although_the_array_has_grown_again(
    repo: Repository,
) -> None:
    put(repo, "main", (0, 0), 2)
    with repo.transaction("side", message="cut off and grow") as store:
        array = zarr.open_array(store, path="a")
        array.resize((4, 2))
        array.resize((4, 6))
    expected = [[0, 0], [0, 1], [0, 2], [1, 1], [1, 2]]
    assert repo.diff("main", "side", symmetric=False).chunks["/a"].tolist() == expected
    assert repo.diff("side", "main", symmetric=False).chunks["/a"].tolist() == expected


def test_unset_cells_have_other_values_under_another_fill_value() -> None:
    repo = zm.create(MemoryStorage())
    stores: list[MemoryStore] = []
    for fill in (1, 9):
        stores.append(MemoryStore())
        zarr.create_array(
            stores[-1], name="a", shape=(10,), chunks=(2,), dtype="i4", fill_value=fill
        )
    documents = [sync(one.get("a/zarr.json", default_buffer_prototype())) for one in stores]
    for document in documents:
        with repo.transaction(message="the document") as store:
            assert document is not None
            sync(store.set("a/zarr.json", document))
            zarr.open_array(store, path="a")[:4] = 5
    found = repo.diff("main~1", "main", "a", values=True)
    assert found.chunks["/a"].tolist() == [[2], [3], [4]]
    assert found.cells["/a"].tolist() == [2, 2, 2]


def test_values_of_a_sparse_array_that_was_made_anew() -> None:
    repo = zm.create(MemoryStorage())
    how: Any = {"name": "t", "shape": (2**40,), "chunks": (4,), "dtype": "u1", "overwrite": True}
    for value in (1, 2):
        with repo.transaction(message="m") as store:
            zarr.create_array(store, **how)[:4] = value
    assert repo.diff("main~1", "main", "t", values=True).cells["/t"].sum() == 4


def test_values_of_an_array_that_was_made_anew_with_other_chunks(repo: Repository) -> None:
    """Neither version says where the cells of the other's chunks are now."""
    for chunk in (5, 1):
        with repo.transaction(message=f"chunks of {chunk}") as store:
            kind: Any = {"shape": (10,), "chunks": (chunk,), "dtype": "i4", "fill_value": 0}
            made = zarr.create_array(store, name="anew", overwrite=True, **kind)
            if chunk > 1:
                made[:] = np.arange(1, 11)
    found = repo.diff("main~1", "main", "anew", values=True)
    assert found.cells["/anew"].tolist() == [1] * 10
