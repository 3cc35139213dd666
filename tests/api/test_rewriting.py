"""Arrays that are written anew with other chunks, shards or codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.codecs

import zarr_manifests as zm
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    NotFoundError,
)
from zarr_manifests.grid import Box
from zarr_manifests.session import Fork
from zarr_manifests.storage.memory import MemoryStorage

VALUES = np.arange(480, dtype="f4").reshape(60, 8)


@pytest.fixture
def repo(request: pytest.FixtureRequest) -> zm.Repository:
    repo = zm.create(f"memory://{request.node.name.replace('[', '-').strip(']')}")
    with repo.transaction(message="one day a chunk") as store:
        how: dict[str, Any] = {"chunks": (1, 8), "dtype": "f4", "attributes": {"units": "K"}}
        a = zarr.create_array(
            store, name="t", shape=(60, 8), dimension_names=("day", "x"), fill_value=-1, **how
        )
        a[:40] = VALUES[:40]
    return repo


def values(repo: zm.Repository, **where: str) -> Any:
    return zarr.open_array(repo.readonly_session(**where).store, path="t")[:]


def branches(repo: zm.Repository) -> list[str]:
    return sorted(repo.list_branches())


def test_the_values_stay_and_all_else_but_the_layout(repo: zm.Repository) -> None:
    old, before = values(repo), repo.list_branches()["main"]
    report = zm.rewrite_chunks(
        repo,
        "/t",
        chunks=(10, 4),
        shards=(20, 8),
        codecs={"compressors": zarr.codecs.GzipCodec()},
        task_bytes=20 * 8 * 4,
    )
    array = zarr.open_array(repo.readonly_session().store, path="t")
    assert np.array_equal(array[:], old)
    assert (array.chunks, array.shards, array.fill_value) == ((10, 4), (20, 8), -1)
    assert array.compressors == (zarr.codecs.GzipCodec(),)
    assert (array.metadata.dimension_names, dict(array.attrs)) == (("day", "x"), {"units": "K"})
    assert len(repo.readonly_session().chunk_refs("t")) == 2  # none where nothing was written
    assert (report.tasks, report.chunks_after, report.reads_per_chunk) == (2, 2, 1.0)
    assert report.snapshot_id == repo.list_branches()["main"]
    assert next(info.message for info in repo.ancestry(limit=2)) == "rewrite the chunks of /t"
    assert next(iter(repo.ancestry(limit=2))).parent_id == before  # one commit
    assert np.array_equal(values(repo, version=before), old)
    assert branches(repo) == ["main"]
    assert repo.verify().ok


def test_a_dry_run_writes_nothing(repo: zm.Repository) -> None:
    before = repo.list_branches()
    report = zm.rewrite_chunks(repo, "t", chunks=(60, 1), task_bytes=60 * 4, dry_run=True)
    assert repo.list_branches() == before
    assert (report.snapshot_id, report.tasks) == (None, 8)
    assert report.reads_per_chunk == 8
    assert "would read 40 chunks 8 times" in str(report)


def test_a_rewriting_that_fails_changes_nothing(repo: zm.Repository) -> None:
    def run(call: Callable[[Box], Fork], boxes: Sequence[Box]) -> Iterable[Fork]:
        yield call(boxes[0])
        raise KeyboardInterrupt

    before = repo.list_branches()
    with pytest.raises(KeyboardInterrupt):
        zm.rewrite_chunks(repo, "t", chunks=(5, 8), task_bytes=160, run=run)
    assert repo.list_branches() == before
    zm.rewrite_chunks(repo, "t", chunks=(5, 8), task_bytes=160)
    assert np.array_equal(values(repo), values(repo, version="main~1"))


def meanwhile(repo: zm.Repository, change: Callable[[Any], object]) -> Callable[..., Any]:
    """Runs tasks after somebody has committed a change of the array."""

    def run(call: Callable[[Box], Fork], boxes: Sequence[Box]) -> Iterable[Fork]:
        with repo.transaction(message="meanwhile") as store:
            change(zarr.open_array(store, path="t"))
        return [call(box) for box in boxes]

    return run


def test_a_damaged_shard_is_not_rewritten_by_parts() -> None:
    storage = MemoryStorage()
    repo = zm.create(storage, {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0})
    with repo.transaction(message="a") as store:
        made = zarr.create_array(
            store, name="a", shape=(60,), chunks=(4,), shards=(32,), dtype="i4", compressors=None
        )
        made[:] = np.arange(60)
    head = next(repo.ancestry()).snapshot_id
    for key in [each.key for each in storage.list("chunks/")]:
        data = bytearray(storage.get(key))
        data[1] ^= 64
        storage.delete_many([key])
        storage.create(key, bytes(data))
        for cells in (16, 10_000):  # a part of a shard; both, of which the last reaches beyond
            with pytest.raises(CorruptObjectError, match="checksum"):
                zm.rewrite_chunks(repo, "a", chunks=[8], shards=None, task_bytes=cells)
        data[1] ^= 64
        storage.delete_many([key])
        storage.create(key, bytes(data))
    assert next(repo.ancestry()).snapshot_id == head
    zm.rewrite_chunks(repo, "a", chunks=[8], shards=None, task_bytes=16)
    assert (zarr.open_array(repo.readonly_session().store, path="a")[:] == np.arange(60)).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda array: array.__setitem__(0, 7),
        lambda array: array.resize((61, 8)),
        lambda array: array.attrs.put({"units": "degC"}),
    ],
    ids=["values", "append", "attributes"],
)
def test_a_change_meanwhile_is_a_conflict(
    repo: zm.Repository, change: Callable[[Any], object]
) -> None:
    with pytest.raises(ConflictError):
        zm.rewrite_chunks(repo, "t", chunks=(60, 8), run=meanwhile(repo, change))
    array = zarr.open_array(repo.readonly_session().store, path="t")
    assert array.chunks == (1, 8)
    zm.rewrite_chunks(repo, "t", chunks=(60, 8))
    again = zarr.open_array(repo.readonly_session().store, path="t")
    assert (again.shape, again.attrs) == (array.shape, array.attrs)
    assert np.array_equal(again[:], array[:])


def test_wrong_arguments_change_nothing(repo: zm.Repository) -> None:
    before = repo.list_branches()
    with pytest.raises(NotFoundError, match="no array '/u'"):
        zm.rewrite_chunks(repo, "u", chunks=(1, 1))
    with pytest.raises(InvalidArgumentError, match="already"):
        zm.rewrite_chunks(repo, "t")
    with pytest.raises(InvalidArgumentError, match="2 axes"):
        zm.rewrite_chunks(repo, "t", chunks=(3,))
    assert repo.list_branches() == before


@pytest.mark.parametrize(
    ("data", "zarr_format"),
    [
        (np.array([0.0, -0.0, np.nan, np.inf, 1.5]), 2),
        (np.array(["2026-01-01", "NaT", "1970-01-01"], "M8[ns]"), 3),
        (np.array([True, False, True]), 3),
        (np.array(["a", "", "longer"], "U6"), 3),
        (np.array(5, "i8"), 2),
    ],
    ids=["float", "time", "bool", "text", "scalar"],
)
@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_values_of_any_type_are_the_same_bytes(data: Any, zarr_format: Any) -> None:
    repo = zm.create(f"memory://rewritten-{data.dtype.kind}-{zarr_format}")
    with repo.transaction(message="values") as store:
        how = {"shape": data.shape, "dtype": data.dtype, "chunks": (1,) * data.ndim}
        a = zarr.create_array(store, name="t", zarr_format=zarr_format, **how)
        a[...] = data
    chunks = (2,) * data.ndim
    codecs = None if data.ndim else {"compressors": None}
    zm.rewrite_chunks(repo, "t", chunks=chunks, codecs=codecs)
    found = zarr.open_array(repo.readonly_session().store, path="t")
    assert (found.metadata.zarr_format, found.chunks) == (zarr_format, chunks)
    assert np.asarray(found[...]).tobytes() == data.tobytes()


def test_a_repository_that_rewrites_manifests_at_each_commit() -> None:
    repo = zm.create("memory://rewriting-manifests", {"commits": {"mode": "rewrite"}})
    with repo.transaction(message="a") as store:
        zarr.create_array(store, name="a", shape=(40,), chunks=(1,), dtype="i4")[:] = np.arange(40)
    zm.rewrite_chunks(repo, "a", chunks=(10,), task_bytes=40)
    found = zarr.open_array(repo.readonly_session().store, path="a", mode="r")
    assert (found.chunks, found[:].tolist()) == ((10,), [*range(40)])
    assert repo.list_branches().keys() == {"main"}
