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
from zarr_manifests.errors import ConflictError, InvalidArgumentError, NotFoundError
from zarr_manifests.repository import resolved
from zarr_manifests.storage.memory import MemoryStorage


@pytest.fixture
def repo() -> Repository:
    made = zm.create(MemoryStorage())
    with made.transaction(message="make a") as store:
        zarr.create_array(store, name="a", shape=(4, 6), chunks=(2, 2), dtype="f8")[:] = 1
    made.create_branch("side")
    return made


def put(repo: Repository, branch: str, at: Any, value: Any) -> None:
    with repo.transaction(branch, message=f"{branch}: a[{at}] = {value}") as store:
        zarr.open_array(store, path="a")[at] = value


def test_across_branches_by_what_both_have(repo: Repository) -> None:
    put(repo, "main", (0, 0), 2)
    put(repo, "side", (3, 5), 3)
    with repo.transaction("side", message="make b") as store:
        zarr.create_group(store, path="b")
    since = repo.diff("main", "side")
    assert since.created == ("/b",)
    assert since.chunks["/a"].tolist() == [[1, 2]]
    assert str(since) == "+ /b\n  /a: 1 chunk: (1, 2)"
    whole = repo.diff("main", "side", symmetric=False)
    assert whole.chunks["/a"].tolist() == [[0, 0], [1, 2]]
    back = repo.diff("side", "main", symmetric=False)
    assert (back.deleted, back.created) == (("/b",), ())
    assert repo.diff("side", "main").chunks["/a"].tolist() == [[0, 0]]
    repo.merge("side")
    assert repo.diff("side", "main").chunks["/a"].tolist() == [[0, 0]]
    nothing = repo.diff("main", "main")
    assert not nothing
    assert str(nothing) == "no changes"
    with pytest.raises(InvalidArgumentError, match="comes after it; give the older"):
        repo.diff("main", "main~2")
    assert repo.diff("main", "main~2", symmetric=False).chunks["/a"].tolist() == [[0, 0], [1, 2]]


def test_a_place_changed_back_or_alike_does_not_differ(repo: Repository) -> None:
    put(repo, "main", (0, 0), 2)
    put(repo, "side", (0, 0), 2)
    put(repo, "side", (3, 5), 3)
    put(repo, "side", (3, 5), 1)
    assert repo.diff("main", "side")  # its log has these chunks
    assert not repo.diff("main", "side", symmetric=False)


def test_many_chunks_are_shown_in_one_line(repo: Repository) -> None:
    put(repo, "main", ..., 5)
    shown = "  /a: 6 chunks: (0, 0), (0, 1), (0, 2), (1, 0), ..."
    assert str(repo.diff("main~1", "main")) == shown


def test_crosswise_merges_leave_only_the_plain_difference(repo: Repository) -> None:
    put(repo, "main", (0, 0), 2)
    put(repo, "side", (3, 5), 3)
    main, side = resolved(repo, "main"), resolved(repo, "side")
    repo.merge(side, "main")
    repo.merge(main, "side")
    with pytest.raises(ConflictError, match="crosswise"):
        repo.diff("main", "side")
    assert not repo.diff("main", "side", symmetric=False)


def test_values(repo: Repository) -> None:
    put(repo, "main", (0, slice(0, 3)), [2, np.nan, 0])
    put(repo, "side", (3, 5), 9)
    found = repo.diff("main~1", "main", "/a", values=True)
    assert (found.cells, found.chunks.tolist(), found.counts.tolist()) == (
        3,
        [[0, 0], [0, 1]],
        [2, 1],
    )
    assert (found.minimum, found.maximum, found.mean) == (-1.0, 1.0, 0.0)
    assert (found.to_nan, found.from_nan, found.added, found.removed) == (1, 0, 0, 0)
    assert found.map.tolist() == [[2, 1, 0], [0, 0, 0]]
    assert str(found).splitlines() == [
        "/a: 3 changed cells in 2 chunks",
        "  by -1 to 1, on average by 0",
        "  1 became NaN",
    ]
    across = repo.diff("main", "side", "a", values=True)
    assert across.map.tolist() == [[2, 1, 0], [0, 0, 1]]
    assert (across.from_nan, across.maximum) == (1, 8.0)
    same = repo.diff("main", "main", "a", values=True)
    assert (same.cells, same.mean, same.chunks.shape) == (0, None, (0, 2))


def test_values_of_an_array_of_another_shape(repo: Repository) -> None:
    with repo.transaction(message="grow") as store:
        a = zarr.open_array(store, path="a")
        a.resize((5, 6))
        a[4] = 7
        a[0, 0] = 4
    found = repo.diff("main~1", "main", "a", values=True)
    assert (found.map.tolist(), found.added, found.removed) == (
        [[1, 0, 0], [0, 0, 0], [0, 0, 0]],
        6,
        0,
    )
    back = repo.diff("main", "main~1", "a", values=True)
    assert (back.map.tolist(), back.added, back.removed) == ([[1, 0, 0], [0, 0, 0]], 0, 6)


@pytest.mark.parametrize("path", ["a", "/b"])
def test_values_of_an_array_that_was_moved(repo: Repository, path: str) -> None:
    put(repo, "main", (0, slice(0, 2)), [2, 5])
    session = repo.writable_session()
    session.move("a", "b")
    session.commit("move it")
    with repo.transaction(message="another cell") as store:
        zarr.open_array(store, path="b")[0, 5] = 3
    found = repo.diff("main~3", "main", path, values=True)
    assert (found.path, found.map.tolist()) == ("/b", [[2, 0, 1], [0, 0, 0]])
    back = repo.diff("main", "main~3", path, values=True)
    assert (back.path, back.map.tolist()) == ("/a", [[2, 0, 1], [0, 0, 0]])


def test_values_follow_what_is_at_the_path_in_the_newer_version(repo: Repository) -> None:
    session = repo.writable_session()
    session.move("a", "b")
    session.commit("move it")
    with repo.transaction(message="another in its place") as store:
        zarr.create_array(store, name="a", shape=(4, 6), chunks=(4, 6), dtype="i2")[:] = 7
    assert repo.diff("main~2", "main", "a", values=True).cells == 24
    assert repo.diff("main~2", "main", "b", values=True).cells == 0


def test_values_of_an_array_made_anew(repo: Repository) -> None:
    with repo.transaction(message="remake") as store:
        zarr.create_array(store, name="a", shape=(4, 6), chunks=(4, 3), dtype="i2", overwrite=True)
        zarr.open_array(store, path="a")[:] = 1
        zarr.open_array(store, path="a")[0, 5] = 3
    found = repo.diff("main~1", "main", "a", values=True)
    assert (found.cells, found.map.tolist()) == (1, [[0, 1]])


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
    assert (found.cells, found.map.tolist()) == (6, [0, 0, 2, 2, 2])


def test_values_that_are_no_numbers_are_compared_and_counted() -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="make t") as store:
        t = zarr.create_array(store, name="t", shape=(1,), chunks=(1,), dtype="M8[s]")
        t[:] = np.array(["2026-01-01"], "M8[s]")
    with repo.transaction(message="another day") as store:
        zarr.open_array(store, path="t")[:] = np.array(["2026-01-02"], "M8[s]")
    found = repo.diff("main~1", "main", "t", values=True)
    assert (found.cells, found.mean, found.map.tolist()) == (1, None, [1])


def test_what_has_no_values_is_refused(repo: Repository) -> None:
    with pytest.raises(NotFoundError, match="no array /b"):
        repo.diff("side", "main", "b", values=True)
    with repo.transaction(message="remake") as store:
        zarr.create_array(store, name="a", shape=(4,), chunks=(4,), dtype="i2", overwrite=True)
    with pytest.raises(InvalidArgumentError, match="dimensions"):
        repo.diff("side", "main", "a", values=True)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_fields_of_metadata_say_what_they_were_and_are(zarr_format: Any, symmetric: bool) -> None:
    repo = zm.create(MemoryStorage())
    given = {"units": "K", "source": "ship", "valid": [0, 1]}
    with repo.transaction(message="made") as store:
        zarr.create_group(store, path="g", zarr_format=zarr_format).create_array(
            "t", shape=(4,), chunks=(2,), dtype="i4", attributes=given
        )
    with repo.transaction(message="changed") as store:
        array = zarr.open_array(store, path="g/t")
        array.resize((6,))
        array.attrs.put({"units": "degC", "valid": [0, 1], "long_name": "t" * 100})
    expected = {
        "shape": ([4], [6]),
        "attributes.units": ("K", "degC"),
        "attributes.source": ("ship", None),
        "attributes.long_name": (None, "t" * 100),
    }
    found = repo.diff("main~1", "main", symmetric=symmetric)
    assert found.fields == {"/g/t": expected}
    for mode in ("log", "net"):
        (change,) = repo.changes("main~1", "main", mode)  # type: ignore[arg-type]
        assert change.fields == expected
    lines = str(found).splitlines()
    assert "    attributes.units: 'K' to 'degC'" in lines
    assert "    attributes.source: 'ship' removed" in lines
    assert any(line.endswith("ttt... added") for line in lines)
    assert all(len(line) < 100 for line in lines)
