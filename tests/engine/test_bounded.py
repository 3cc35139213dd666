"""What is found by its key alone is read up to a bound, whatever lies there."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import context_of
from zarr_manifests import Repository
from zarr_manifests.errors import CorruptObjectError, ManifestsError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.envelope import (
    MAX_ROOT_BYTES,
    MAX_SNAPSHOT_BYTES,
    ObjectKind,
    decode,
    encode,
)
from zarr_manifests.format.root import ROOT_KEY, archive_key
from zarr_manifests.ids import snapshot_key
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import MAX_TAGGED_BYTES, Tagged
from zarr_manifests.testing.wrapped import WrappedStorage

TIB = 1 << 40
GIB = 1 << 30


def filled(repo: Repository, name: str = "a") -> list[str]:
    """Make a history; its snapshots' ids, the oldest first."""
    for i in range(3):
        with repo.transaction("main", message=f"commit {i}") as store:
            zarr.create_array(store, name=f"{name}{i}", data=np.arange(4) + i)
    return [info.snapshot_id for info in repo.ancestry()][::-1]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read of a local file asks for."""
    asked: list[int] = []
    real = os.pread

    def pread(fd: int, length: int, at: int) -> bytes:
        asked.append(length)
        return real(fd, length, at)

    monkeypatch.setattr(os, "pread", pread)
    return asked


def sparse(path: Path) -> None:
    os.truncate(path, TIB)


def test_a_root_of_a_terabyte_is_read_up_to_the_bound(tmp_path: Path, read: list[int]) -> None:
    repo = zm.create(tmp_path / "repo")
    heads = repo.list_branches()
    head = filled(repo)[-1]
    sparse(tmp_path / "repo" / ROOT_KEY)
    read.clear()
    for call in (
        lambda: zm.open(tmp_path / "repo"),
        lambda: zm.open(tmp_path / "repo", create=True),
        lambda: repo.create_tag("v1", head),
        lambda: repo.lease(head).__enter__(),
    ):
        with pytest.raises(CorruptObjectError, match="more than 16777216 bytes"):
            call()
    (problem,) = repo.verify().problems
    assert "more than 16777216 bytes" in str(problem)
    assert zm.recover(tmp_path / "repo").branches.keys() == heads.keys()
    assert max(read) <= MAX_TAGGED_BYTES + 1
    assert zm.open(tmp_path / "repo").list_branches() == {"main": head}


@pytest.mark.parametrize("kind", ["snapshot", "archive"])
def test_others_found_by_key_are_read_up_to_their_bounds(
    kind: str, tmp_path: Path, read: list[int]
) -> None:
    repo = zm.create(tmp_path / "repo")
    ids = filled(repo)
    key = snapshot_key(ids[1]) if kind == "snapshot" else archive_key(2)
    sparse(tmp_path / "repo" / key)
    fresh = zm.open(tmp_path / "repo")
    read.clear()
    if kind == "snapshot":
        with pytest.raises(CorruptObjectError, match=f"{key}: more than 268435456 bytes"):
            fresh.readonly_session(ids[1])
        assert max(read) <= MAX_SNAPSHOT_BYTES + 1
    else:
        with pytest.raises(CorruptObjectError, match=f"{key}: more than 16777216 bytes"):
            zm.recover(fresh, 2)
        assert max(read) <= MAX_ROOT_BYTES + 1
    read.clear()
    assert key in "".join(map(str, fresh.verify().problems))
    assert max(read) <= MAX_ROOT_BYTES + 1  # a pointer says how long the snapshot is


class Endless(WrappedStorage):
    """A storage whose objects of these keys are 3 GiB long; it notes what is asked of them."""

    def __init__(self, storage: Any) -> None:
        super().__init__(storage)
        self.keys: set[str] = set()
        self.asked: list[int] = []

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        assert length is not None, f"all of {key} is asked for"
        if key not in self.keys:
            return super().get(key, start, length)
        self.asked.append(length)
        return super().get(key, start, length).ljust(min(length, 3 * GIB), b"\0")

    def get_tagged(self, key: str) -> Tagged:
        found = super().get_tagged(key)
        return Tagged(found.data.ljust(MAX_TAGGED_BYTES + 1), found.token) if self.keys else found


CALLS: dict[str, Callable[[Repository, list[str]], Any]] = {
    "by id": lambda repo, ids: repo.readonly_session(ids[1]),
    "ancestry": lambda repo, ids: list(repo.ancestry()),
    "diff": lambda repo, ids: repo.diff(ids[1], ids[2]),
    "restore": lambda repo, ids: zm.recover(repo, 2),
    "ops_log": lambda repo, ids: list(repo.ops_log()),
    "verify": lambda repo, ids: repo.verify(),
    "compact": lambda repo, ids: repo.compact(),
    "expire and collect": lambda repo, ids: (
        repo.expire_snapshots(1, timedelta(0)),
        repo.garbage_collect(timedelta(0)),
    ),
    "commit": lambda repo, ids: filled(repo, "b"),
}


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_asked_for_without_a_bound(call: str) -> None:
    """The storage itself looks at each request."""
    storage = Endless(MemoryStorage())
    repo = zm.create(storage)
    ids = filled(repo)
    CALLS[call](zm.open(storage), ids)


def test_a_server_that_answers_gigabytes_is_asked_for_no_more_than_the_bounds() -> None:
    storage = Endless(MemoryStorage())
    repo = zm.create(storage)
    ids = filled(repo)
    repo = zm.open(storage)
    storage.keys = {archive_key(v) for v in range(9)}
    for call in (CALLS["restore"], lambda repo, ids: zm.open(storage)):
        with pytest.raises(ManifestsError, match="more than 16777216 bytes"):
            call(repo, ids)
    assert storage.asked == [MAX_ROOT_BYTES + 1]


def test_what_is_larger_than_readers_take_is_not_written() -> None:
    noise = np.random.default_rng(1).bytes(MAX_ROOT_BYTES - 100)
    whole = encode(ObjectKind.ROOT, {"a": noise})
    assert decode(whole, ObjectKind.ROOT, lambda fields: fields.binary("a"), "x") == noise
    with pytest.raises(ManifestsError, match="larger than readers accept"):
        encode(ObjectKind.ROOT, {"a": noise + bytes(100)})


def test_what_was_listed_small_and_is_large_is_no_guess() -> None:
    storage = MemoryStorage()
    repo = zm.create(storage)
    key = snapshot_key(filled(repo)[1])
    data = storage.get(key)
    objects = context_of(repo).objects
    assert objects.guess(key, len(data)) == data
    assert objects.guess(key, len(data) - 1) is None
    assert BlobRef.to(key, data).length == len(data)


def test_a_swapped_object_of_a_terabyte_has_a_token(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put(ROOT_KEY, b"1")
    sparse(tmp_path / ROOT_KEY)
    tagged = storage.get_tagged(ROOT_KEY)
    assert len(tagged.data) == MAX_TAGGED_BYTES + 1
    assert storage.cas(ROOT_KEY, b"2", "another") is None
    assert storage.cas(ROOT_KEY, b"2", tagged.token) is not None
