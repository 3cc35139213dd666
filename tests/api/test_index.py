"""The index of leaves: never wrong, whatever it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import zarr

import zarr_manifests as zm
from stored import put
from zarr_manifests import Repository, Session
from zarr_manifests.storage.memory import MemoryStorage

ROWS = 1200


def make(session: Session, path: str, shape: tuple[int, ...]) -> None:
    chunks = (1,) * len(shape)
    zarr.create_array(
        session.store, name=path, shape=shape, chunks=chunks, dtype="u1", compressors=None
    )


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def repository(storage: MemoryStorage) -> Repository:
    """An array of 3,600 chunks in two leaves, every third of them there, and a full small one.

    There is no index of them.
    """
    sets = [{"coordinates": {"max-manifest-size": 500}}, {"default": {"max-manifest-size": 900}}]
    config = {"chunk-manifests": {"sets": sets}, "compaction": {"size-ratio": 0}}
    made = zm.create(storage, config)
    session = made.writable_session()
    make(session, "big", (ROWS, 3))
    make(session, "small", (5,))
    for i in range(ROWS):
        put(session, f"big/c/{i}/{i % 3}")
    for i in range(5):
        put(session, f"small/c/{i}", b"1234")
    session.commit("fill")
    made.compact("main", "major")
    return made


def answers(repository: Repository) -> tuple[object, ...]:
    session = repository.readonly_session()
    region = session.chunk_refs("big", [slice(590, 610), slice(0, 2)]).coords
    every = session.chunk_refs("big").coords
    return repository.du().arrays, region.tolist(), every.tolist()


def remove(storage: MemoryStorage) -> None:
    storage.delete_many([info.key for info in storage.list("indexes/")])


def damage(storage: MemoryStorage) -> None:
    for info in list(storage.list("indexes/")):
        data = bytearray(storage.get(info.key))
        data[-1] ^= 1
        storage.put(info.key, bytes(data))


def exchange(storage: MemoryStorage) -> None:
    keys = [info.key for info in storage.list("indexes/")]
    for key, data in zip(keys, [storage.get(key) for key in keys[1:] + keys[:1]], strict=True):
        storage.put(key, data)


@pytest.mark.parametrize("harm", [None, remove, damage, exchange])
def test_whatever_the_index_is_the_answers_are_the_same(
    repository: Repository, storage: MemoryStorage, harm: Callable[[MemoryStorage], None] | None
) -> None:
    session = repository.writable_session()
    put(session, "big/c/600/1")
    session.store.delete_sync("big/c/601/1")
    session.commit("before")
    session = zm.open(storage).writable_session()
    put(session, "big/c/3/0")
    session.commit("which does not look up what it overwrites")
    expected = answers(repository)
    if harm is not None:
        harm(storage)
    assert answers(zm.open(storage)) == expected
