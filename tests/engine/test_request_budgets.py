"""Requests and sequential rounds that reads and commits take, in a process that knows nothing yet.

The large repository has 200 arrays, one of them with thousands of chunks in eight manifests, whose
node table is beyond 64 KiB and so not inline, ten branches, and a full log.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from msgspec.structs import replace
from zarr.core.sync import sync

import zarr_manifests as zm
from inside import change_root, root_of
from storages import CountingStorage, LatencyStorage, copy_of
from stored import array_document, get, put
from zarr_manifests import Repository, Session
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage

MANIFESTS, ROWS = 8, 1_000
CHUNK = b"\x05" * 8
NOISE = np.random.default_rng(0).normal(size=(4, 20, 30))
STOPPED = replace(SYSTEM, monotonic_s=lambda: 1000.0)
CONFIG = {
    "inline-chunk-bytes": 512,
    "compaction": {"mode": "manual"},
    "chunk-manifests": {"sets": [{"default": {"max-manifest-size": ROWS}}]},
}


@pytest.fixture(scope="module")
def large() -> MemoryStorage:
    repository = zm.create(storage := MemoryStorage(), CONFIG)
    session = repository.writable_session()
    group = zarr.create_group(session.store, attributes={"title": "budgets"})
    names = {"dimension_names": ("time",), "dtype": "i8"}
    for name, values in (("time", np.arange(50)), ("far", np.arange(9_000.0))):
        group.create_array(name, data=values, dimension_names=(name,), compressors=None)
    group.create_array("huge", shape=(MANIFESTS * ROWS,), chunks=(1,), **names)
    for i in range(MANIFESTS * ROWS):
        put(session.store, f"huge/c/{i}", CHUNK)
    for i in range(197):
        long = {"comment": Random(i).randbytes(400).hex()}  # which does not compress away
        group.create_array(
            f"v{i}", shape=(50,), chunks=(10,), attributes=long if i > 1 else {}, **names
        )
    session.commit("200 arrays")
    repository.compact(mode="full")
    repository.create_tag("base")
    for i in range(9):
        repository.create_branch(f"branch-{i}")
        session = repository.writable_session(f"branch-{i}")
        put(session.store, "v0/c/1", b"of this branch")
        session.commit("on a branch")
    for i in range(30):
        repository.create_branch(f"gone-{i}")
        repository.delete_branch(f"gone-{i}")
    return storage


def append(session: Session, commit: int) -> None:
    """What an append leaves: the arrays longer, the coordinate written anew, chunks beyond."""
    for name in ("time", "huge", "v0", "v1"):
        document = json.loads(get(session.store, f"{name}/zarr.json") or b"")
        document["shape"] = [MANIFESTS * ROWS + commit + 1 if name == "huge" else 60 + 10 * commit]
        put(session.store, f"{name}/zarr.json", json.dumps(document).encode())
    at = 1 + commit // 5
    put(session.store, f"time/c/{at}", np.arange(50 * at, 50 * at + 50).tobytes())
    put(session.store, f"huge/c/{MANIFESTS * ROWS + commit}", CHUNK + bytes(600))


@pytest.fixture(scope="module")
def ahead(large: MemoryStorage) -> MemoryStorage:
    """The large repository with 49 deltas that change nodes on top of its base."""
    storage = copy_of(large)
    session = zm.open(storage).writable_session()
    for commit in range(49):
        append(session, commit)
        session.commit(f"append {commit}")
    return storage


def name_of(section: str, i: int) -> str:
    """A name that does not compress away."""
    return f"{section}-{i}-{Random(i).randbytes(32).hex()}"


@pytest.fixture(scope="module")
def paged(ahead: MemoryStorage) -> MemoryStorage:
    """The same with so many tags and branches that most lie in pages."""
    storage = copy_of(ahead)
    for section in ("tags", "branches"):
        root = root_of(storage)
        value = root.branches["main"].bare() if section == "branches" else root.tags["base"]
        more = {name_of(section, i): value for i in range(2_000)}
        named = {section: {**getattr(root, section), **more}}
        change_root(
            zm.open(storage), "create tag", lambda root, named=named: replace(root, **named)
        )
    return storage


def cold(storage: MemoryStorage) -> tuple[CountingStorage, Repository]:
    counting = CountingStorage(LatencyStorage(storage, latency_s=0))
    return counting, zm.open(counting, runtime=STOPPED)


def walk(session: Session) -> int:
    """Open the hierarchy and read every document; the number of arrays."""
    return len([*zarr.open_group(session.store, mode="r").arrays()])


def small_repository(commits: int) -> MemoryStorage:
    """A dataset whose data chunks are objects and whose coordinates are small."""
    storage = MemoryStorage()
    repository = zm.create(storage)
    coords = {"lat": np.linspace(90, -90, 20), "lon": np.linspace(0, 348, 30)}
    for i in range(commits):
        session = repository.writable_session("main")
        times = {"time": np.arange(4) + 4 * i}
        data = xr.Dataset({"t2m": (("time", "lat", "lon"), NOISE)}, coords | times)
        how = {"append_dim": "time"} if i else {"encoding": {"t2m": {"chunks": (2, 20, 30)}}}
        data.to_zarr(session.store, consolidated=False, zarr_format=3, **how)
        session.commit(f"months {i}")
    return storage


@pytest.mark.parametrize("folded", [False, True])
def test_a_small_repository_opens_with_its_coordinates_in_one_request(folded: bool) -> None:
    storage = small_repository(4)
    if folded:
        zm.open(storage).compact(mode="full")
    counting = CountingStorage(storage)
    repository = zm.open(counting, runtime=STOPPED)
    ds = xr.open_zarr(repository.readonly_session("main").store, consolidated=False)
    np.testing.assert_array_equal(ds.lat.values, np.linspace(90, -90, 20))
    np.testing.assert_array_equal(ds.time.values, np.arange(16))
    assert [(r.op, r.key) for r in counting.log] == [("get_tagged", "current")]
    # A data chunk is one request more.
    counting.reset()
    assert ds.t2m[0, 0, 0].values == NOISE[0, 0, 0]
    assert [record.op for record in counting.log] == ["get"]


def test_a_commit_of_others_is_not_missed_by_a_session() -> None:
    """The first may use what `open` has read, unless that was a while ago; others ask again."""
    storage, times = small_repository(1), [1000.0]
    counting = CountingStorage(storage)
    repository = zm.open(counting, runtime=replace(SYSTEM, monotonic_s=lambda: times[0]))
    times[0] += 1.0
    repository.readonly_session("main")
    assert [record.key for record in counting.log] == ["current", "current"]
    other = zm.open(storage).writable_session("main")
    put(other, "note", b"x")
    snapshot_id = other.commit("of another handle")
    assert repository.readonly_session("main").snapshot_id == snapshot_id
    assert counting.requests == 3


@pytest.mark.parametrize("branch", ["main", "branch-4"])
def test_a_branch_head_takes_two_rounds(large: MemoryStorage, branch: str) -> None:
    counting, repository = cold(large)
    session = repository.readonly_session(branch)
    assert walk(session) == 200
    assert np.frombuffer(get(session.store, "time/c/0") or b"", "i8")[-1] == 49
    assert counting.rounds() == 2
    assert zarr.open_array(session.store, path="far")[-1] == 8_999.0
    assert counting.rounds() == 3  # a coordinate that is not inline


def test_a_branch_head_takes_two_rounds_with_many_deltas(ahead: MemoryStorage) -> None:
    counting, repository = cold(ahead)
    session = repository.readonly_session()
    assert walk(session) == 200
    assert zarr.open_array(session.store, path="time").shape == (540,)
    assert zarr.open_array(session.store, path="time")[50:500:50].tolist() == [*range(50, 500, 50)]
    assert counting.rounds() == 2
    assert counting.requests <= 7


@pytest.mark.parametrize("how", ["tag", "snapshot id", "under deltas"])
def test_a_tag_or_an_old_snapshot_takes_a_round_more(
    large: MemoryStorage, ahead: MemoryStorage, how: str
) -> None:
    version: str | None = "base"
    if how != "tag":
        newest = next(zm.open(ahead).ancestry())
        version = zm.open(large).list_tags()["base"] if how == "snapshot id" else newest.parent_id
    counting, repository = cold(ahead)
    session = repository.readonly_session(version)
    assert walk(session) == 200
    assert get(session.store, "time/c/0")
    assert counting.rounds() <= 3


@pytest.mark.parametrize(
    ("ref", "rounds"),
    [
        ("main", 2),
        ("refs/heads/" + name_of("branches", 700), 3),  # one for the page
        ("refs/tags/" + name_of("tags", 700), 4),  # and one for a tag
    ],
)
def test_a_ref_in_a_page_takes_a_round_more(paged: MemoryStorage, ref: str, rounds: int) -> None:
    counting, repository = cold(paged)
    session = repository.readonly_session(ref)
    assert walk(session) == 200
    assert get(session.store, "time/c/0")
    assert counting.rounds() == rounds
    assert sum(r.key.startswith("pages/") for r in counting.log) == (rounds > 2)


def test_the_first_chunk_under_many_deltas_takes_four_rounds(ahead: MemoryStorage) -> None:
    counting, repository = cold(ahead)
    session = repository.readonly_session()
    assert get(session.store, "huge/c/17") == CHUNK
    assert counting.rounds() <= 4
    assert sum(record.key.startswith("manifests/") for record in counting.log) == 1
    counting.reset()
    first = MANIFESTS * ROWS
    assert get(session.store, f"huge/c/{first + 7}") == CHUNK + bytes(600)
    assert counting.rounds() == 1, "its delta came in a bundle"
    counting.reset()
    assert get(session.store, f"huge/c/{first + 8}") == CHUNK + bytes(600)
    assert (counting.rounds(), counting.requests) == (1, 1)


@pytest.mark.parametrize("with_pages", [False, True])
def test_a_commit_takes_two_rounds_and_few_bytes(
    large: MemoryStorage, paged: MemoryStorage, with_pages: bool
) -> None:
    """No page of other branches and tags is read or written."""
    storage = copy_of(paged if with_pages else large)
    counting = CountingStorage(LatencyStorage(storage, latency_s=0))
    session = zm.open(counting).writable_session()
    nbytes: Counter[str] = Counter()
    commits = 1 if with_pages else 40
    for commit in range(commits):
        append(session, commit)
        counting.reset()
        session.commit(f"append {commit}")
        assert counting.rounds() == 2
        nbytes.update({r.key: r.nbytes for r in counting.log if not r.key.startswith("chunks/")})
    assert not any(key.startswith("pages/") for key in nbytes)
    assert with_pages or nbytes.total() <= commits * 16 * 1024


def test_a_warm_commit_to_a_disk_takes_three_rounds(tmp_path: Path) -> None:
    """In its turn it reads the root, has everything on the disk at once, and swaps."""
    counting = CountingStorage(LocalStorage(tmp_path))
    session = zm.create(counting).writable_session("main")
    zarr.create_array(session.store, name="a", shape=(30, 2**18), chunks=(1, 2**18), dtype="u1")
    session.commit("an array")
    for i in range(3):
        for chunk in range(10):
            put(session, f"a/c/{10 * i + chunk}/0", bytes([i + 1]) * 2**18)
        counting.reset()
        session.commit("a pack of 2.5 MB")
        log = [(r.op, r.key.split("/")[0]) for r in counting.log]
        assert log[0] == ("get_tagged", "current")
        assert ("create", "chunks") in log
        assert counting.rounds() == 3, log


def test_an_expiry_of_a_long_history_takes_few_rounds() -> None:
    repository = zm.create(storage := MemoryStorage(), CONFIG)
    for i in range(150):
        with repository.transaction(message=str(i)) as store:
            zarr.create_group(store, path=f"g{i}")
    counting, repository = cold(storage)
    kept = [info.snapshot_id for info in zm.open(storage).ancestry()][:5]
    report = repository.expire_snapshots(keep_last=5)
    assert len(report.snapshots) == 151 - 5
    assert counting.rounds() <= 20
    assert [info.snapshot_id for info in zm.open(storage).ancestry()] == kept


# --- bases in pages --------------------------------------------------------------------------

GROUP = b'{"zarr_format": 3, "node_type": "group"}'
GROUPS, IN_A_GROUP = 50, 100


def collected(names: Any) -> list[str]:
    async def gather() -> list[str]:
        return [name async for name in names]

    return sync(gather())


def test_one_array_or_group_of_many_is_found_by_few_pages() -> None:
    storage = CountingStorage(LatencyStorage(MemoryStorage(), latency_s=0))
    with zm.create(storage).transaction("main", message="make") as store:
        put(store, "zarr.json", GROUP)
        for group in range(GROUPS):
            put(store, f"g{group}/zarr.json", GROUP)
            for i in range(IN_A_GROUP):
                put(store, f"g{group}/a{i}/zarr.json", array_document((i + 1,)))
    storage.reset()
    session = zm.open(storage).readonly_session("main")
    assert zarr.open_array(session.store, path="g7/a23", mode="r").shape == (24,)
    assert storage.rounds() <= 3
    assert storage.bytes_read <= 32 * 1024
    storage.reset()
    with pytest.raises(FileNotFoundError):
        zarr.open_array(session.store, path="g7/a100", mode="r")
    assert storage.requests <= 1  # the page of a path beyond those of the group
    storage.reset()
    assert len(collected(session.store.list_dir(""))) == GROUPS + 1
    assert storage.requests <= 1
    storage.reset()
    group = zarr.open_group(session.store, path="g3", mode="r")
    assert len(list(group.array_keys())) == IN_A_GROUP
    assert storage.requests <= 3
    assert storage.rounds() <= 2
