"""Refs set in bulk over chunks that the same session has written, staged or as objects."""

import itertools
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage


def written(tmp_path: Path, config: dict[str, int]) -> tuple[CountingStorage, zm.Session]:
    """A session that has written chunk 0 and made chunk 3 virtual, in this order."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.bin").write_bytes(bytes(range(10)))
    storage = CountingStorage(MemoryStorage())
    containers: dict[str, str | os.PathLike[str]] = {"raw": tmp_path / "raw"}
    repo = zm.create(storage, config, virtual_containers=containers)
    session = repo.writable_session()
    a = zarr.create_array(
        session.store, name="a", shape=(40,), chunks=(10,), dtype="u1", compressors=None
    )
    a[:10] = 7
    session.store.set_virtual_refs("a", np.array([[3]]), ["virtual://raw/a.bin"], [0], [0], [10])
    np.testing.assert_array_equal(a[:10], np.full(10, 7))
    np.testing.assert_array_equal(a[30:], np.arange(10))
    return storage, session


@pytest.mark.parametrize("pack_chunk_bytes", [0, 1024])
def test_the_chunk_is_an_object_that_is_durable_before_the_commit(
    tmp_path: Path, pack_chunk_bytes: int
) -> None:
    config = {"inline-chunk-bytes": 0, "pack-chunk-bytes": pack_chunk_bytes}
    storage, session = written(tmp_path, config)
    (key,) = [r.key for r in storage.log if r.op == "create" and r.key.startswith("chunks/")]
    storage.reset()
    session.commit("both")
    assert [r.key for r in storage.log if r.op == "sync"] == [key]
    table = contents_of(session.store).chunks(contents_of(session.store).nodes()["a"])
    assert table is not None
    assert not table.inline
    np.testing.assert_array_equal(zarr.open_array(session.store, path="a")[:10], np.full(10, 7))


def test_an_amended_commit_makes_the_sessions_chunks_durable(tmp_path: Path) -> None:
    storage, session = written(tmp_path, {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0})
    session.commit("both")
    zarr.open_array(session.store, path="a")[10:20] = 9
    (key,) = [r.key for r in storage.log if r.op == "create" and r.key.startswith("chunks/")][1:]
    storage.reset()
    session.amend("all three")
    assert [r.key for r in storage.log if r.op == "sync"] == [key]


def test_refs_set_in_bulk_are_kept_in_parts_of_a_leaf(tmp_path: Path) -> None:
    """So memory is in proportion to them, and a commit makes several manifests."""
    step, steps = 500_000, 6
    repo = zm.create(MemoryStorage(), virtual_containers={"raw": tmp_path})
    session = repo.writable_session()
    zarr.create_array(session.store, name="a", shape=(step * steps,), chunks=(1,), dtype="u1")
    tracemalloc.start()
    for i in range(steps):
        rows = np.arange(i * step, (i + 1) * step)
        session.store.set_virtual_refs(
            "a", rows[:, None], [f"virtual://raw/{i}"], rows * 0, rows % 1013, 1 + rows % 511
        )
    session.commit("bulk")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 90 * step * steps  # bytes; columns that vary take 8 a ref each
    view = contents_of(repo.readonly_session().store).view
    (entry,) = view.snapshot.deltas[-1:]
    parts = [part for ref in entry.manifests for part in ref.parts]
    assert sum(part.count for part in parts) == step * steps
    assert max(part.count for part in parts) <= 1_000_000
    assert not any(a.box.overlaps(b.box) for a, b in itertools.combinations(parts, 2))


def test_refs_set_in_bulk_twice_are_there_once(tmp_path: Path) -> None:
    """Also where they were set in large parts that overlap."""
    n = 1_500_000
    repo = zm.create(MemoryStorage(), virtual_containers={"raw": tmp_path})
    session = repo.writable_session()
    zarr.create_array(session.store, name="a", shape=(2 * n,), chunks=(1,), dtype="u1")
    for start, length in ((0, 1), (n // 2, 2), (n, 3)):
        rows = np.arange(start, start + n)
        session.store.set_virtual_refs(
            "a", rows[:, None], ["virtual://raw/a"], rows * 0, rows, rows * 0 + length
        )
    session.commit("bulk")
    table = contents_of(repo.readonly_session().store).chunks(
        contents_of(repo.readonly_session().store).nodes()["a"]
    )
    assert table is not None
    assert len(table) == 2 * n + n // 2 - n // 2
    assert [int((table.length == k).sum()) for k in (1, 2, 3)] == [n // 2, n // 2, n]
