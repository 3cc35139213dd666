"""Forks with many refs: what they send, what the session keeps, and what a commit refers to."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from storages import CountingStorage
from zarr_manifests import Fork, Repository, Session
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of

SENT = 500
GRID = (20, 10, 20)
CONFIG: dict[str, Any] = {
    "inline-chunk-bytes": 0,
    "pack-chunk-bytes": 0,
    "compaction": {"mode": "manual"},
}
CONTAINERS: dict[str, Any] = {"raw": "memory://raw-of-forks"}


@pytest.fixture
def storage() -> CountingStorage:
    memory = MemoryStorage("many-refs")
    memory.delete_many([info.key for info in memory.list()])
    return CountingStorage(memory)


@pytest.fixture
def repository(storage: CountingStorage) -> Repository:
    return make(storage)


def make(storage: Any, grid: Sequence[int] = GRID) -> Repository:
    """With an array of 4,000 chunks, none of which is there."""
    repository = zm.create(storage, CONFIG, virtual_containers=CONTAINERS)
    with repository.transaction(message="array") as store:
        zarr.create_array(
            store, name="a", shape=grid, chunks=(1,) * len(grid), dtype="u1", compressors=None
        )
    return repository


def refer(target: Session | Fork, first: int, stop: int, version: int = 1) -> None:
    """Refs to a range of chunks in C order."""
    rows = np.arange(first, stop)
    length = 1 + (rows * 2_654_435_761 >> 9) % 200
    target.store.set_virtual_refs(
        "a",
        Box((0,) * len(GRID), GRID).unravel(rows),
        ["virtual://raw/x"],
        rows * 0,
        rows * 1_000 + version,
        length,
    )


def sent(fork: Fork) -> Fork:
    return pickle.loads(pickle.dumps(fork))  # type: ignore[no-any-return]


def test_refs_to_objects_of_strangers_are_found_in_what_was_spilled(
    repository: Repository,
) -> None:
    """Nothing protects these objects until a snapshot reaches them."""
    stranger = repository.writable_session()
    stranger.store.set_sync("a/c/1/5/0", cpu.Buffer.from_bytes(b"theirs"))
    workspace_of(stranger.store).flush()
    ((node, refs),) = contents_of(stranger.store).changes.chunks.items()
    planted = dict(refs)
    tight = zm.open(
        repository.storage, {**CONFIG, "spill-refs": 100}, virtual_containers=CONTAINERS
    )

    def with_theirs(fork: Fork) -> None:
        refer(fork, 100, 100 + SENT + 1)
        contents_of(fork.store).changes.chunks[node] = dict(planted)
        refer(fork, 700, 900)

    session = tight.writable_session()
    fork = sent(session.fork())
    with_theirs(fork)
    fork = sent(fork)
    with pytest.raises(InvalidArgumentError, match="neither this session nor its copies"):
        session.merge(fork)
    stranger.commit("now they are reached")
    session = tight.writable_session()
    fork = sent(session.fork())
    with_theirs(fork)
    session.merge(sent(fork))
    session.commit("fine")
    assert repository.verify().ok
