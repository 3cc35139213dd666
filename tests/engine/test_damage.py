"""Every object of a repository, damaged in every way: a typed error that names it, or the truth.

No damage may ever read as other data, or as fill value, and what does not need the damaged object
still reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import some_or_all
from inside import context_of
from zarr_manifests import Session
from zarr_manifests.engine.history.by_id import snapshot_ref
from zarr_manifests.error_cases import NotARepositoryError
from zarr_manifests.errors import (
    CorruptObjectError,
    MissingChunkError,
    SnapshotExpiredError,
    UnsupportedFormatError,
)
from zarr_manifests.format.history_pages import History
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import snapshot_key
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage

ERRORS = {
    "current": (CorruptObjectError, UnsupportedFormatError, NotARepositoryError),
    "chunks": (CorruptObjectError, MissingChunkError),
    "deltas": (CorruptObjectError, UnsupportedFormatError),
    "manifests": (CorruptObjectError, UnsupportedFormatError),
    "nodes": (CorruptObjectError, UnsupportedFormatError),
    "snapshots": (CorruptObjectError, UnsupportedFormatError, SnapshotExpiredError),
}
BIG = bytes(range(256)) * 3


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def contents(session: Session) -> dict[str, bytes]:
    found = {}
    for key in sorted(contents_of(session.store).keys_below("")):
        value = session.store.get_sync(key)
        assert value is not None, f"{key} is listed and reads as absent"
        found[key] = value.to_bytes()
    return found


def write_much(session: Session, seed: int) -> None:
    """Small chunks, more than fit into a delta, and notes, more than are copied along with one."""
    rng = np.random.default_rng(seed)
    for i in range(40):
        put(session, f"a/c/{40 + i}", rng.bytes(300))
        put(session, f"note-{i}.txt", rng.bytes(300))


def damages(data: bytes) -> Iterator[tuple[str, bytes | None]]:
    yield "missing", None
    for length in sorted({0, 1, 23, 24, len(data) // 2, len(data) - 1} & {*range(len(data))}):
        yield f"cut to {length}", data[:length]
    yield "longer", data + b"\0"
    yield "zeros", bytes(len(data))
    for at in sorted({*range(min(24, len(data))), *range(24, len(data), len(data) // 12 + 1)}):
        for bit in (1, 0x80):
            flipped = bytes([data[at] ^ bit])
            yield f"bit {bit} of byte {at} flipped", data[:at] + flipped + data[at + 1 :]


class Seeded:
    """A small repository with every kind of object, and what each of its snapshots holds."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        repository = zm.create(self.storage, {"compaction": {"max-delta-count": 3}})
        session = repository.writable_session("main")
        group = zarr.create_group(session.store)
        group.create_array("a", shape=(90,), chunks=(1,), dtype="u1")
        self.snapshots: dict[str, dict[str, bytes]] = {}
        write_much(session, 0)
        self._commit(session)
        for i in range(4):
            put(session, f"a/c/{i}", BIG + bytes([i]))
            if i == 2:
                write_much(session, i)
            self._commit(session)
        self.used = {snapshot_id: self._uses(snapshot_id) for snapshot_id in self.snapshots}
        self.used_by_head = self._uses(None)
        self.head = contents(repository.readonly_session("main"))

    def _commit(self, session: Session) -> None:
        held = contents(session)
        self.snapshots[session.commit("more")] = held

    def _uses(self, snapshot_id: str | None) -> set[str]:
        counting = CountingStorage(self.storage)
        repository = zm.open(counting)
        contents(repository.readonly_session(snapshot_id))
        return {record.key for record in counting.log}


@pytest.fixture(scope="module")
def seeded() -> Seeded:
    return Seeded()


def test_the_repository_has_every_kind_of_object(seeded: Seeded) -> None:
    kinds = {info.key.split("/")[0] for info in seeded.storage.list()}
    read = {"current", "chunks", "deltas", "manifests", "nodes", "snapshots"}
    assert kinds == read | {"root", "indexes"}
    assert any("rewrite" == i.kind for i in zm.open(seeded.storage).ancestry())
    used = set().union(*seeded.used.values(), seeded.used_by_head)
    assert {key.split("/")[0] for key in used} == read


def _read(storage: Storage, snapshot_id: str | None) -> dict[str, bytes]:
    return contents(zm.open(storage).readonly_session(snapshot_id))


@pytest.mark.parametrize("kind", ["current", "chunks", "deltas", "manifests", "nodes", "snapshots"])
@some_or_all
def test_damage_of_every_object(seeded: Seeded, kind: str, every: int) -> None:
    storage = seeded.storage
    reads: list[tuple[str | None, dict[str, bytes], set[str]]] = [
        (None, seeded.head, seeded.used_by_head)
    ]
    # The oldest and two between: the first has deltas only, the others a base.
    reads.extend(
        (snapshot_id, seeded.snapshots[snapshot_id], seeded.used[snapshot_id])
        for snapshot_id in [*seeded.snapshots][::2]
    )
    noticed = 0
    of_kind = [info for info in storage.list() if info.key.split("/")[0] == kind]
    of_kind.sort(key=lambda info: all(info.key not in read[2] for read in reads))  # the read first
    for info in of_kind[::every]:
        data = storage.get(info.key)
        users = [read for read in reads if info.key in read[2]]
        others = [read for read in reads if info.key not in read[2]]
        for what, damaged in damages(data):
            where = f"{info.key} ({len(data)} bytes), {what}"
            if damaged is None:
                storage.delete_many([info.key])
            else:
                storage.put(info.key, damaged)
            try:
                for snapshot_id, held, _ in users:
                    try:
                        found = _read(storage, snapshot_id)
                    except ERRORS[kind] as error:
                        named = str(error)
                        assert info.key in named or str(snapshot_id) in named, where
                        noticed += 1
                    else:
                        # What lies behind a chunk in its object does not matter.
                        assert (kind, what) == ("chunks", "longer"), where
                        assert found == held, where
                if what in ("missing", "zeros"):
                    for snapshot_id, held, _ in others:
                        assert _read(storage, snapshot_id) == held, where
            finally:
                storage.put(info.key, data)
    assert noticed
    assert _read(storage, None) == seeded.head


def test_objects_of_the_same_kind_cannot_stand_in_for_each_other(seeded: Seeded) -> None:
    storage = seeded.storage
    by_kind: dict[str, list[str]] = {}
    for key in sorted(set().union(*seeded.used.values())):
        by_kind.setdefault(key.split("/")[0], []).append(key)
    del by_kind["current"]
    swapped = 0
    for keys in by_kind.values():
        for key, other in zip(keys, [*keys[1:], keys[0]], strict=True):
            data = storage.get(key)
            if key == other or storage.get(other) == data:
                continue
            storage.put(key, storage.get(other))
            try:
                for snapshot_id, used in seeded.used.items():
                    # A snapshot asked for by its id has no pointer that could tell.
                    if key in used and key != snapshot_key(snapshot_id):
                        with pytest.raises(CorruptObjectError, match=key):
                            _read(storage, snapshot_id)
                        swapped += 1
            finally:
                storage.put(key, data)
    assert swapped > 5


def test_a_damaged_archive_hinders_nobody(seeded: Seeded) -> None:
    storage = MemoryStorage()
    for info in seeded.storage.list():
        storage.put(info.key, seeded.storage.get(info.key))
    for info in [*storage.list("root/")]:
        storage.put(info.key, b"damaged")
    assert _read(storage, None) == seeded.head
    session = zm.open(storage).writable_session("main")
    put(session, "a/c/89", b"x")
    session.commit("goes on")


def test_a_history_that_runs_in_a_circle_ends(seeded: Seeded) -> None:
    """Found by its keys alone: with every object in the cache no checksum stands in the way."""
    storage = MemoryStorage()
    for info in seeded.storage.list():
        storage.put(info.key, seeded.storage.get(info.key))
    repository = zm.open(storage)
    context, ids = context_of(repository), [info.snapshot_id for info in repository.ancestry()]
    objects, refs = context.objects, [snapshot_ref(context, one) for one in ids]
    untold = [replace(objects.load(ref, Snapshot), history=History()) for ref in refs]
    untold[2] = replace(untold[2], parent=refs[0])
    objects.cache.clear()
    for ref, snapshot in zip(refs, untold, strict=True):
        objects.remember(ref, snapshot)
    with pytest.raises(CorruptObjectError, match="is its own ancestor"):
        list(islice(repository.ancestry(), 100))
    with pytest.raises(CorruptObjectError, match="is its own ancestor"):
        repository.diff(ids[-1], ids[0])


def test_a_missing_log_fails_closed(seeded: Seeded) -> None:
    """Whether two commits conflict is not guessed at."""
    storage = MemoryStorage()
    for info in seeded.storage.list():
        storage.put(info.key, seeded.storage.get(info.key))
    session = zm.open(storage).writable_session("main")
    put(session, "a/c/55", b"mine")  # in the midst of the others'
    other = zm.open(storage).writable_session("main")
    before = {info.key for info in storage.list("deltas/")}
    write_much(other, 9)
    other.commit("other")
    added = [info.key for info in storage.list("deltas/") if info.key not in before]
    storage.delete_many(added[:1])
    with pytest.raises(CorruptObjectError, match=added[0]):
        session.commit("mine")
    assert not any(i.message == "mine" for i in zm.open(storage).ancestry())
