"""Chunks that end with their own CRC-32C: different ones of one length have the same checksum."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from zarr.codecs import Crc32cCodec

import zarr_manifests as zm
from zarr_manifests import Fork, Repository, Session
from zarr_manifests.errors import ConflictError
from zarr_manifests.storage.memory import MemoryStorage

type Values = npt.NDArray[np.int32]

_NUMBERS = itertools.count()
KINDS: dict[str, dict[str, Any]] = {
    "codec": {"chunks": (16,), "compressors": [Crc32cCodec()]},
    "small": {"chunks": (4,), "compressors": [Crc32cCodec()]},  # kept inline
    "shard": {"chunks": (256,), "shards": (1024,), "compressors": None},
    "packed shard": {"chunks": (256,), "shards": (1024,)},
    "inner codec": {"chunks": (4,), "shards": (16,), "compressors": [Crc32cCodec()]},
    "v2": {
        "chunks": (16,),
        "zarr_format": 2,
        "compressors": {"id": "crc32c", "location": "end"},
    },
}
"""Arrays whose first chunk has the same checksum for both of `values`."""


def values(chunk: int) -> tuple[Values, Values]:
    one, other = np.zeros(chunk, np.int32), np.zeros(chunk, np.int32)
    one[: chunk // 4] = 5
    other[chunk // 4 : chunk // 2] = 5
    return one, other


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest) -> tuple[Repository, int]:
    """A repository with such an array, and the length of its chunks."""
    kind = KINDS[request.param]
    repo = zm.create(MemoryStorage(f"own-checksums-{next(_NUMBERS)}"))
    chunk: int = kind.get("shards", kind["chunks"])[0]
    with repo.transaction(message="create") as store:
        zarr.create_array(store, name="a", shape=(2 * chunk,), dtype="i4", fill_value=0, **kind)
    return repo, chunk


def write(target: Session | Fork, what: Values, start: int = 0) -> None:
    zarr.open_array(target.store, path="a", mode="r+")[start : start + len(what)] = what


def commit(repo: Repository, what: Values, branch: str = "main", start: int = 0) -> str:
    with repo.writable_session(branch) as session:
        write(session, what, start)
        return session.commit("write")


def read(repo: Repository, n: int) -> list[int]:
    array = zarr.open_array(repo.readonly_session().store, path="a", mode="r")
    return [*map(int, np.asarray(array[:n]))]


def test_merged_branches_conflict_and_keep_what_differs(made: tuple[Repository, int]) -> None:
    repo, chunk = made
    one, other = values(chunk)
    commit(repo, one)
    repo.create_branch("dev")
    commit(repo, np.zeros_like(one), "dev")
    commit(repo, other, "dev")
    commit(repo, one, start=chunk)
    repo.merge("dev")
    assert read(repo, 2 * chunk) == [*other.tolist(), *one.tolist()]
    repo.create_branch("late")
    commit(repo, one, "late")
    commit(repo, other, "late", start=chunk)
    commit(repo, one + one, start=0)
    commit(repo, one + other, start=0)
    with pytest.raises(ConflictError, match="in one place"):
        repo.merge("late")


def test_forks_and_their_session_conflict_unless_the_bytes_are_equal(
    made: tuple[Repository, int],
) -> None:
    repo, chunk = made
    one, other = values(chunk)
    session = repo.writable_session()
    forks = [session.fork() for _ in range(3)]
    for fork, what in zip(forks, (one, other, one), strict=True):
        write(fork, what)
    with pytest.raises(ConflictError, match="different bytes"):
        session.merge(*forks)
    session.merge(forks[0], forks[2])
    with pytest.raises(ConflictError, match="different bytes"):
        session.merge(forks[1])
    mixed = repo.writable_session()
    forks = [mixed.fork() for _ in range(2)]
    for writer, what in zip((mixed, *forks), (one, other, one), strict=True):
        write(writer, what)
    with pytest.raises(ConflictError, match="different bytes"):
        mixed.merge(forks[0])
    mixed.merge(forks[1])
    session.commit("merged")
    assert read(repo, chunk) == one.tolist()
