"""Every kind of object damaged, gone, or in another's place: an error that names it, or the truth.

No damage may ever read as other data, or as fill value, and what does not need the damaged object
still reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import zarr

import stored
import zarr_manifests as zm
from in_order import in_order
from inside import short_pages
from storages import CountingStorage, copy_of
from stored import put
from zarr_manifests import Repository, Session
from zarr_manifests.errors import (
    CorruptObjectError,
    ManifestsError,
    NotARepositoryError,
    UnsupportedFormatError,
)
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage.memory import MemoryStorage

START_MS = 1_700_000_000_000
KINDS = ("chunks", "deltas", "manifests", "nodes", "snapshots", "history")
MOST_KEYS = 2


def runtime(*, at_ms: Iterator[int] | None = None) -> Runtime:
    clock = at_ms or itertools.repeat(START_MS + 10**9)
    return in_order(now_ms=lambda: next(clock))


def make(seed: int) -> MemoryStorage:
    """A repository with many kinds of objects; repositories of two seeds differ in all values."""
    storage, rng = MemoryStorage(), np.random.default_rng(seed)
    config = {
        "compaction": {"max-delta-count": 4},
        "inline-chunk-bytes": 250,
        "pack-chunk-bytes": 400,
    }
    repository = zm.create(
        storage, config, runtime=runtime(at_ms=itertools.count(START_MS, 60_000))
    )
    session = repository.writable_session()
    group = zarr.create_group(session.store)
    group.create_array("a", shape=(120,), chunks=(1,), dtype="u1", compressors=None)
    group.create_array("x", data=rng.random(30), chunks=(5,), dimension_names=("x",))
    session.commit("made")
    with short_pages():
        for i in range(8):
            for at in (i, i + 13, i + 26):
                put(session, f"a/c/{at}", rng.bytes(300))
            put(session, f"a/c/{i + 40}", rng.bytes(900))
            put(session, f"x/c/{i % 6}", rng.bytes(60))
            if i in (2, 5):
                for at in range(40):  # more than fits into a delta
                    put(session, f"a/c/{60 + at}", rng.bytes(200))
                for number in range(6):  # more than is copied along with a pointer
                    put(session, f"note-{i}-{number}.txt", rng.bytes(2_500))
            session.commit(f"commit {i}")
            if i == 4:
                repository.create_tag("t")
                repository.create_branch("b")
    return storage


def contents(session: Session) -> dict[str, bytes]:
    assert stored.get(session, "a/c/119") is None
    return stored.contents(session)


class Ways:
    """Everything that reads one repository, by name, and what it answers of a sound one."""

    def __init__(self, storage: MemoryStorage) -> None:
        infos = [*zm.open(storage, runtime=runtime()).ancestry()]
        newest, middle, oldest = infos[0], infos[len(infos) // 2], infos[-1]
        self.reads: dict[str, Callable[[Repository], Any]] = {
            "branch": lambda r: contents(r.readonly_session()),
            "other branch": lambda r: contents(r.readonly_session("b")),
            "as of": lambda r: contents(r.readonly_session(f"main@{middle.written_at}")),
            "estimate": lambda r: r.du(estimate=True),
            "diff": lambda r: r.diff(middle.snapshot_id, newest.snapshot_id),
            "changes": lambda r: [*r.changes(oldest.snapshot_id)],
            "bulk": lambda r: [
                ([*map(int, coords)], data)
                for coords, data in r.readonly_session().read_chunks("a")
            ],
        }
        for info in infos[::4]:
            one = partial(Repository.readonly_session, version=info.snapshot_id)
            self.reads[f"id {info.message}"] = lambda r, one=one: contents(one(r))
        self.answers: dict[str, str] = {}
        self.keys: dict[str, set[str]] = {}
        for name, read in self.reads.items():
            counting = CountingStorage(storage)
            self.answers[name] = repr(read(zm.open(counting, runtime=runtime())))
            self.keys[name] = {record.key for record in counting.log}

    def check(self, storage: MemoryStorage, keys: set[str], what: str) -> int:
        """Read in all ways; how many raise an error, which names one of these keys."""
        ids = {part for key in keys for part in key.partition("/")[2].rsplit("/", 1)}
        told = []
        for name, read in self.reads.items():
            if what != "gone" and not keys & self.keys[name]:
                continue
            try:
                assert repr(read(zm.open(storage, runtime=runtime()))) == self.answers[name], what
            except ManifestsError as error:
                told.append((name, str(error)))
        for name, text in told:
            assert keys & self.keys[name], (what, name)
            assert any(part in text for part in ids), (what, text)
        return len(told)


@pytest.fixture(scope="module")
def storage() -> MemoryStorage:
    return make(0)


@pytest.fixture(scope="module")
def other() -> MemoryStorage:
    return make(1)


@pytest.fixture(scope="module")
def ways(storage: MemoryStorage) -> Ways:
    return Ways(storage)


def flipped(data: bytes) -> Iterator[bytes]:
    for at in (6, 14, len(data) // 2, len(data) - 1):
        yield data[:at] + bytes([data[at] ^ 0x81]) + data[at + 1 :]


def damages(
    storage: MemoryStorage, other: MemoryStorage, keys: list[str], key: str
) -> Iterator[tuple[str, dict[str, bytes | None]]]:
    """What may lie at a key instead, and at others."""
    at, data = keys.index(key), storage.get(key)
    next_key = keys[(at + 1) % len(keys)]
    yield "gone", {key: None}
    yield "exchanged", {key: storage.get(next_key), next_key: data}
    yield "like another", {key: storage.get(keys[at - 1])}
    kind = key.partition("/")[0]
    theirs = [info.key for info in other.list(f"{kind}/")]
    yield "of another repository", {key: other.get(theirs[at % len(theirs)])}
    for part in (data[: len(data) // 2], bytes(len(data))):
        yield f"cut to {len(part)}", {key: part}
    for bits in flipped(data):
        yield "flipped", {key: bits}


def damaged(storage: MemoryStorage, objects: dict[str, bytes | None]) -> MemoryStorage:
    copy = copy_of(storage)
    copy.delete_many(objects)
    for key, data in objects.items():
        if data is not None:
            copy.put(key, data)
    return copy


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_an_error_that_names_it_and_never_other_data(
    storage: MemoryStorage, other: MemoryStorage, ways: Ways, kind: str
) -> None:
    keys = [info.key for info in storage.list(f"{kind}/")]
    used = [key for key in keys if key in set().union(*ways.keys.values())]
    errors = 0
    for key in used[:: -(-len(used) // MOST_KEYS)]:
        for what, objects in damages(storage, other, keys, key):
            copy = damaged(storage, objects)
            errors += ways.check(copy, {*objects}, what)
            if what in ("exchanged", "like another"):
                assert not zm.open(copy, runtime=runtime()).verify().ok
    assert errors or kind == "history"  # without a page of it, the snapshots are read


def test_a_damaged_root_is_an_error(storage: MemoryStorage) -> None:
    data = storage.get("current")
    for bad in (*flipped(data), data[:-1], b""):
        with pytest.raises((CorruptObjectError, UnsupportedFormatError, NotARepositoryError)):
            zm.open(damaged(storage, {"current": bad}))


def test_another_repositorys_root_is_refused_by_who_knows_this_one(
    storage: MemoryStorage, other: MemoryStorage
) -> None:
    copy = copy_of(storage)
    repository = zm.open(copy, runtime=runtime())
    session = repository.writable_session()
    put(session, "note.txt", b"rewritten")
    assert contents(repository.readonly_session())
    copy.put("current", other.get("current"))
    for use in (
        lambda: session.commit("mine"),
        lambda: [*repository.ancestry()],
        repository.du,
        lambda: repository.create_tag("new"),
        lambda: repository.expire_snapshots(keep_last=1),
        lambda: repository.garbage_collect(timedelta(0)),
        lambda: repository.compact(mode="full"),
        lambda: contents(repository.readonly_session()),
    ):
        with pytest.raises(ManifestsError):
            use()
    assert copy.get("current") == other.get("current")
    assert {i.key for i in copy.list()} >= {i.key for i in storage.list()}


def test_an_older_root_in_its_place_is_told_by_verification(storage: MemoryStorage) -> None:
    copy = copy_of(storage)
    older = copy.get("current")
    for name in ("one", "two"):
        zm.open(copy, runtime=runtime()).create_tag(name)
    assert zm.open(copy, runtime=runtime()).verify().ok
    copy.put("current", older)
    assert not zm.open(copy, runtime=runtime()).verify().ok
